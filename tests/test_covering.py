"""Options in combination, by covering arrays.

    on a CPU     rows are lowered for CUDA, and their IR is verified: two of 48 in the ordinary
                 tests, all with ATO_ALL_ROWS=1. A sample is interpreted, in which every value of
                 every factor occurs, and its numbers are compared with the reference.
    on a card    every row runs, and its numbers are compared with the reference.

So a CPU computes the numbers of a few rows, and never those of all pairs of options.

    python -m tests.covering                                what the arrays cover
    ATO_ALL_ROWS=1 python -m pytest tests/test_covering.py  lowers every row

Lowering all rows takes a core about 15 minutes. Rows of the delta rule by Mosaic GPU are compiled
for a Hopper card besides.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ato_jax
from ato_jax import UnsupportedError
from ato_jax.ops.attention.triton.pairs import Pairs
from ato_jax.ops.delta_rule import mosaic_gpu as mosaic_delta_rule
from ato_jax.ops.linear_attention import mosaic_gpu as linear_mosaic_gpu
from ato_jax.ops.linear_attention.mosaic_gpu import chunk_decay
from tests import aot, aot_covering, covering
from tests.aot_covering import Rows
from tests.aot_mosaic import requires_plugin
from tests.covering import (
    ATTENTION,
    DECODE,
    DELTA_RULE,
    DELTA_STEP,
    LINEAR_ATTENTION,
    MOSAIC,
    MOSAIC_DELTA_RULE,
    STEP,
    Row,
    Space,
)
from tests.interpreted import newest

# Rows in one test: few enough for workers to share the time evenly. The ordinary tests take smaller
# groups, one in so many, since a row of Mosaic GPU takes some seconds.
GROUP = 6
ORDINARY_GROUP, ORDINARY_STEP = 2, 24
# Rows in one test on a card, of spaces whose rows take longer, or shorter, than those of others.
ROWS_ON_A_CARD = {DELTA_RULE: 4, MOSAIC_DELTA_RULE: 4, DELTA_STEP: 15}

# Rows of each array, pairs covered, and triples covered among `Space.triples`.
COVERED = {
    "attention": (150, 2532, 734),
    "linear_attention": (116, 2186, 450),
    "mosaic_gpu": (78, 1454, 502),
    "mosaic_attention": (78, 1923, 201),
    "mosaic_gradients": (55, 1711, 0),
    "decode_attention": (49, 1158, 261),
    "linear_attention_step": (71, 768, 0),
    "delta_rule": (26, 947, 200),
    "mosaic_delta_rule": (28, 936, 200),
    "delta_rule_step": (29, 342, 24),
}


def failures(check: Callable[[Row], Any], rows: list[tuple[int, Row]]) -> list[str]:
    """What fails, by row: one wrong row does not hide another."""
    found = []
    for n, row in rows:
        try:
            check(row)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            found.append(f"row {n} ({covering.label(row)}): {text[:2000]}")
    return found


def groups(rows: list[tuple[int, Row]], size: int = GROUP) -> Iterator[list[tuple[int, Row]]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def ordinary(*names: str, size: int = ORDINARY_GROUP) -> Iterator[Any]:
    """Groups of rows of the spaces that are named, or of all."""
    step = ORDINARY_STEP
    if os.environ.get("ATO_ALL_ROWS") == "1":
        size, step = GROUP, 1
    for name in names or covering.SPACES:
        space = covering.SPACES[name]
        for rows in list(groups(list(enumerate(covering.rows(space))), size))[::step]:
            yield pytest.param(space, rows, id=f"{name}, rows {rows[0][0]} to {rows[-1][0]}")


@pytest.mark.parametrize("name", covering.SPACES)
def test_what_is_covered(name: str) -> None:
    """Every pair that no rule excludes, and every such triple among the factors of sight."""
    space = covering.SPACES[name]
    pairs, triples = covering.count(space, 2), covering.count(space, 3, space.triples)
    for found in (pairs, triples):
        assert found.covered == found.total - found.excluded
    assert (len(covering.rows(space)), pairs.covered, triples.covered) == COVERED[name]
    assert all(map(space.allows, covering.rows(space)))


@pytest.mark.parametrize("name", covering.SPACES)
def test_what_rules_exclude_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some combinations of values that each rule forbids, beside the plainest other values. Those
    of Hopper's kernels are of the kernels as they are, to which other calls are made to fit."""
    monkeypatch.setattr(linear_mosaic_gpu.support, "fit_of", lambda spec, phase: None)
    space = covering.SPACES[name]
    for rule in space.rules:
        if rule.message is None:
            continue
        others = dataclasses.replace(
            space, rules=tuple(other for other in space.rules if other is not rule)
        )
        found = []
        for values in itertools.product(*(space.factors[factor] for factor in rule.factors)):
            forbidden = dict(zip(rule.factors, values, strict=True))
            row = completed(others, forbidden)
            if row is not None and rule.forbids(**forbidden):
                found.append(row)
        assert found, rule.factors
        for row in found[:: max(1, len(found) // 3)]:
            with pytest.raises((ValueError, UnsupportedError), match=re.escape(rule.message)):
                covering.trace(space, row)


def completed(space: Space, row: Row) -> Row | None:
    """With the plainest values of the other factors that are allowed; None where none are."""
    if not space.completes(row):
        return None
    for name, values in space.factors.items():
        if name not in row:
            row = row | {
                name: next(value for value in values if space.completes(row | {name: value}))
            }
    return row


@aot.requires_triton
@pytest.mark.parametrize(("space", "rows"), list(ordinary()))
def test_lowers(space: Space, rows: list[tuple[int, Row]]) -> None:
    found = failures(lambda row: covering.lower(space, row), rows)
    assert not found, "\n".join(found)


@requires_plugin
@pytest.mark.parametrize(("space", "rows"), list(ordinary("mosaic_delta_rule", size=1)))
def test_compiles_for_a_card(space: Space, rows: list[tuple[int, Row]]) -> None:
    kernels = aot_covering.compile_rows(Rows("mosaic_delta_rule", [n for n, _ in rows]))
    assert kernels and not any(kernel.serialized for kernel in kernels), [*map(str, kernels)]


def test_the_delta_rule_is_chosen_on_hopper() -> None:
    """Rows of Mosaic GPU run by it unasked, and the others where it takes them."""
    for space in (DELTA_RULE, MOSAIC_DELTA_RULE):
        for row in covering.sample(space):
            with covering.as_on_a_card(row):
                arguments, options = covering.qkv_and_options(space, row)
                found = ato_jax.explain(space.op, *arguments, **options)
            refused = mosaic_delta_rule.unsupported(found.spec, "forward")
            taken = "mosaic_gpu" if refused is None else "xla"
            assert taken == "mosaic_gpu" or space is DELTA_RULE, covering.label(row)
            for phase in (found.forward, found.recorded, found.backward):
                assert phase is not None and phase.backend == taken, covering.label(row)


def test_hopper_takes_every_row() -> None:
    """The forward pass of what rules do not exclude. Some gradients are another backend's."""

    def check(row: Row) -> None:
        with covering.as_on_a_card(row):
            arguments, options = covering.qkv_and_options(MOSAIC, row)
            found = ato_jax.explain("linear_attention", *arguments, **options)
        refused = linear_mosaic_gpu.unsupported(found.spec, "forward")
        assert refused is None, refused

    found = failures(check, list(enumerate(covering.rows(MOSAIC))))
    assert not found, "\n".join(found)


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """What was traced before would hide a planted fault, and what has one would outlive it."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@aot.requires_triton
@pytest.mark.usefixtures("traced_anew")
def test_a_planted_fault_in_a_rare_branch_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice between two Python ints, to which the lowering gives the type bool, where the keys
    alone have lengths and a program owns keys."""
    ranges = Pairs.ranges

    def planted(self: Pairs, n: Any, *arguments: Any) -> Any:
        found = ranges(self, n, *arguments)
        if self.own == "keys" and self.spec.kv_lengths and not self.spec.q_lengths:
            found = found._replace(end=jnp.minimum(found.end, jnp.where(n >= 0, 1 << 20, 0)))
        return found

    monkeypatch.setattr(Pairs, "ranges", planted)
    rows = [
        (n, row)
        for n, row in enumerate(covering.rows(ATTENTION))
        if row["padding"] == "kv" and row["lengths"] not in covering.SQUARE
        if max(row["widths"]) <= covering.WIDEST_WHOLE_ROW
    ]
    found = failures(lambda row: covering.lower(ATTENTION, row), rows[:2])
    assert ["would be one of bools" in text for text in found] == [True, True], found
    # Without that check the verifier sees it, where no cast hides it.
    monkeypatch.setattr(aot, "_checked_choice", lambda lowered, *arguments: lowered(*arguments))
    rows = [(n, row) for n, row in rows if not row["x64"]]
    (text,) = failures(lambda row: covering.lower(ATTENTION, row), rows[:1])
    assert "'arith.minsi' op requires the same type" in text


@pytest.mark.usefixtures("traced_anew")
def test_a_planted_fault_in_a_rare_branch_of_mosaic_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer in place of a float32, in chunks that a gate for each step makes steep."""

    def planted(self: chunk_decay.Gates, exponent: Any) -> Any:
        return exponent if self.steep is None else jax.lax.select(self.steep, 0, exponent)

    monkeypatch.setattr(chunk_decay.Gates, "unless_steep", planted)
    rows = [(n, row) for n, row in enumerate(covering.rows(MOSAIC)) if row["decay"] == "step"]
    (found,) = failures(lambda row: covering.lower(MOSAIC, row), rows[:1])
    assert "same dtypes, got float32, int32" in found


SAMPLE = [
    pytest.param(
        space,
        row,
        id=f"{space.op}, {space.backend}, row {covering.rows(space).index(row)}",
        marks=newest if space is MOSAIC_DELTA_RULE else (),
    )
    for space in (ATTENTION, LINEAR_ATTENTION, DELTA_RULE, MOSAIC_DELTA_RULE)
    for row in covering.sample(space)
]


@pytest.mark.parametrize(("space", "row"), SAMPLE)
def test_interpreted(space: Space, row: Row) -> None:
    covering.check_interpreted(space, row)


# -- on a card -----------------------------------------------------------------------------------


def part_of(space: Space, row: Row) -> str | None:
    """Whose kernels the row runs, by the receipt's names; None where XLA runs it."""
    if space.backend == "xla":
        return None
    if space is MOSAIC_DELTA_RULE:
        return "mosaic_delta_rule"
    if space is DELTA_STEP:
        return "delta_rule"
    if space in (DECODE, STEP):
        return "decode_attention" if space is DECODE else "linear_attention"
    if space in (covering.MOSAIC_ATTENTION, covering.MOSAIC_GRADIENTS):
        return "mosaic_attention"
    if space is ATTENTION:
        wide = max(row["widths"]) > covering.WIDEST_WHOLE_ROW
        return "wide_attention" if wide else "attention"
    gated = row["decay"] == "channel"
    if space is MOSAIC:
        return "mosaic_channel_gates" if gated else "mosaic_gpu"
    return "channel_gates" if gated else "linear_attention"


def is_by_documents(space: Space, row: Row) -> bool:
    """Whether Hopper's kernels of documents run the row, which belong to a part of their own."""
    return (
        space is MOSAIC
        and row["segments"] != "none"
        and row["decay"] == "none"
        and not row["causal"]
    )


def on_the_card() -> Iterator[Any]:
    for name, space in covering.SPACES.items():
        by_part: dict[str | None, list[tuple[int, Row]]] = {}
        for n, row in enumerate(covering.rows(space)):
            by_part.setdefault(part_of(space, row), []).append((n, row))
        # A step takes no backend's name. The delta rule that names none runs the same programs.
        chosen = (None,) if space in covering.STEPS else (space.backend, None)
        chosen = (space.backend,) if space.op == "gated_delta_rule" else chosen
        for (part, rows), implementation in itertools.product(by_part.items(), chosen):
            for some in groups(rows, ROWS_ON_A_CARD.get(space, GROUP)):
                by_documents = any(is_by_documents(space, row) for _, row in some)
                parts = [part] * (part is not None) + ["mosaic_documents"] * by_documents
                numbers = f"rows {some[0][0]} to {some[-1][0]}"
                yield pytest.param(
                    space,
                    some,
                    implementation,
                    id=f"{name}, {part or 'XLA'}, {implementation}, {numbers}",
                    marks=pytest.mark.kernels(*parts),
                )


@pytest.mark.gpu
@pytest.mark.parametrize(("space", "rows", "implementation"), list(on_the_card()))
def test_on_a_card(space: Space, rows: list[tuple[int, Row]], implementation: str | None) -> None:
    def check(row: Row) -> None:
        covering.check_on_the_card(space, row, implementation)

    found = failures(check, rows)
    assert not found, "\n".join(found)
