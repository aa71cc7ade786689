"""Float8 calls with options in combination, by covering arrays: kernels read every row, a sample
compiles for a Hopper card, and on a card every row is right.

    python -m tests.covering_float8                                the rows
    ATO_ALL_ROWS=1 python -m pytest tests/test_covering_float8.py  lowers and compiles every row
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from typing import Any

import numpy as np
import pytest

from ato_jax import UnsupportedError, device
from tests import aot, covering, covering_float8
from tests.aot_covering import Rows
from tests.aot_mosaic import requires_plugin
from tests.covering_float8 import ATTENTION, LINEAR_ATTENTION, READER, SPACES
from tests.test_covering import completed, failures, groups

each_space = pytest.mark.parametrize("name", SPACES)
# Rows of each array, and pairs covered.
COVERED = {"attention": (37, 1459), "linear_attention": (33, 928)}
# Rows in one test on a card.
GROUP = 6
PARTS = {"attention": "mosaic_attention", "linear_attention": "mosaic_gpu"}


def numbered(name: str) -> list[tuple[int, Any]]:
    return list(enumerate(covering.rows(SPACES[name])))


def some(step: int) -> list[Any]:
    """One row in so many of each array, or all."""
    step = 1 if os.environ.get("ATO_ALL_ROWS") == "1" else step
    return [
        pytest.param(name, n, row, id=f"{name}, row {n}")
        for name in SPACES
        for n, row in numbered(name)[::step]
    ]


@each_space
def test_what_is_covered(name: str) -> None:
    space = SPACES[name]
    pairs = covering.count(space, 2)
    assert pairs.covered == pairs.total - pairs.excluded
    assert (len(covering.rows(space)), pairs.covered) == COVERED[name]


@each_space
def test_every_row_is_read(name: str) -> None:
    """By a kernel that reads 8 bits, where Hopper's are asked for by name."""

    def check(row: Any) -> None:
        told = covering_float8.explained(SPACES[name], row)
        assert told.implementation == READER, str(told)

    found = failures(check, numbered(name))
    assert not found, "\n".join(found)


@each_space
def test_what_rules_exclude_is_not_read(name: str) -> None:
    """It is wrong, or the kernels of wide arrays serve it, or Hopper's do not."""
    space = SPACES[name]
    for rule in space.rules:
        others = [other for other in space.rules if other is not rule]
        alone = covering.Space(space.op, space.factors, tuple(others), backend=space.backend)
        found = []
        for values in itertools.product(*(space.factors[factor] for factor in rule.factors)):
            forbidden = dict(zip(rule.factors, values, strict=True))
            if rule.forbids(**forbidden) and (row := completed(alone, forbidden)) is not None:
                found.append(row)
        assert found, rule.factors
        for row in found[:: max(1, len(found) // 3)]:
            try:
                told = covering_float8.explained(space, row)
            except (ValueError, UnsupportedError) as error:
                assert rule.message is not None and rule.message in str(error)
                continue
            assert told.implementation != READER, covering.label(row)
            assert rule.message is None or rule.message in str(told.reasons["mosaic_gpu"])


@aot.requires_triton
@pytest.mark.parametrize(("name", "n", "row"), some(9))
def test_lowers(name: str, n: int, row: Any) -> None:
    """To kernels of Mosaic GPU."""
    targets = covering_float8.lower(SPACES[name], row)
    assert any(target.startswith("mosaic_gpu") for target in targets), targets


@requires_plugin
@pytest.mark.parametrize("name", SPACES)
def test_compiles_for_a_card(name: str) -> None:
    """No product waits for another."""
    numbers = [n for each, n, _ in (one.values for one in some(16)) if each == name]
    kernels = covering_float8.compile_rows(Rows(name, numbers))
    assert kernels and not any(kernel.serialized for kernel in kernels), [*map(str, kernels)]


@pytest.mark.parametrize(("name", "n", "row"), some(12))
def test_arguments_and_oracle_agree(name: str, n: int, row: Any) -> None:
    """XLA, on widened arrays, is right on the rows: what a card is measured by is what they say."""
    covering_float8.check(SPACES[name], row, "xla")


def test_errors_are_seen() -> None:
    exact = {"out": np.ones((4, 4)), "lse": np.array([1.0, -np.inf])}
    compare = functools.partial(covering_float8.compare, lse_limit=1e-3)
    compare("attention", {"out": exact["out"] * 1.02, "lse": exact["lse"]}, exact)
    for op, name, wrong in (
        ("attention", "out", 1.04 * exact["out"]),
        ("linear_attention", "out", 1.006 * exact["out"]),
        ("attention", "out", np.nan * exact["out"]),
        ("attention", "lse", np.array([1.002, -np.inf])),
        ("attention", "lse", np.array([1.0, 0.0])),
    ):
        with pytest.raises(AssertionError, match=name):
            compare(op, {name: wrong}, exact)


def test_the_largest_score() -> None:
    """That of the norms, whatever is in padding."""
    q, k = np.full((1, 3, 2, 4), 2.0), np.full((1, 5, 1, 4), -3.0)
    k[:, 3:] = np.nan
    given = covering_float8.Arguments([], {"scale": 0.25}, [q, k, k])
    assert covering_float8.largest_score(given) == 0.25 * 4 * 6
    assert covering_float8.largest_score(dataclasses.replace(given, options={})) == 0.5 * 4 * 6


def test_rows_are_quantised() -> None:
    """With NaN in padding, and scales that are powers of two or not."""
    for space in (ATTENTION, LINEAR_ATTENTION):
        for row in covering.rows(space)[:6]:
            given = covering_float8.arguments_of(space, row)
            assert all(array.dtype == "float8_e4m3fn" for array in given.values)
            mantissas = [np.frexp(np.asarray(s))[0] for s in given.options["scales"]]
            are_powers = [bool((mantissa == 0.5).all()) for mantissa in mantissas]
            assert are_powers == [row["scales"] == "powers of two"] * 3
            padded = any(np.isnan(np.asarray(array)).any() for array in given.products)
            lengths = [name for name in given.options if name.endswith("_lengths")]
            assert padded <= bool(lengths)


def on_the_card() -> list[Any]:
    return [
        pytest.param(
            name,
            rows,
            id=f"{name}, rows {rows[0][0]} to {rows[-1][0]}",
            marks=pytest.mark.kernels(PARTS[name]),
        )
        for name in SPACES
        for rows in groups(numbered(name), GROUP)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rows"), on_the_card())
def test_on_a_card(name: str, rows: list[tuple[int, Any]]) -> None:
    """Beside float64, by the kernels that read 8 bits; skipped on a card without them."""
    if device.of_call(()).capability != (9, 0):
        pytest.skip("Mosaic GPU's kernels are for Hopper")
    found = failures(lambda row: covering_float8.check(SPACES[name], row), rows)
    assert not found, "\n".join(found)
