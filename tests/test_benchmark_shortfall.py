"""Options that are slower than their targets: the table, `ato_jax/slower.toml`, and what `explain`
says of a call that has such an option."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ato_jax
from ato_jax import device, slower
from benchmarks import cliff_rows, cliffs, document, results, shortfall, summary
from benchmarks.cases import PHASES
from benchmarks.choices import Row
from benchmarks.cliff_rows import Step, Target
from benchmarks.results import Results
from tests import choices
from tests.figures import FACTS, parsed_flags  # noqa: F401

PLAIN = Row("linear_attention", B=2, H=16, T=16384, D=128, causal=True)
WIDE = dataclasses.replace(PLAIN, H=4, D=512)
TARGET = Target(0.5)


def step_of(name: str, row: Row, target: Target | None = TARGET, group: str = "heads") -> Step:
    return Step(group, name, row, PLAIN, target)


def rows_of(step: Step, phase: str, times: float, backend: str = "xla") -> list[results.Row]:
    """The row takes so many times as long as its base case for each byte."""
    found = Results(**FACTS)
    row = cliffs.blank(step.row, phase, found, cliffs.OURS)
    base = cliffs.blank(step.row, phase, found, cliffs.BASE, step.base)
    for one, factor in ((row, times), (base, 1.0)):
        one.seconds = 2 * factor * one.limit
        one.turns, one.spread = [one.seconds], summary.spread([one.seconds] * 3)
        one.picked = backend
    return [row, base]


def results_of(
    monkeypatch: pytest.MonkeyPatch, *measured: tuple[Step, float, float, str], card: str = "H200"
) -> Results:
    monkeypatch.setitem(cliff_rows.STEPS, "gpu", tuple(one[0] for one in measured))
    rows = [
        row
        for step, *factors, backend in measured
        for phase, factor in zip(PHASES, factors, strict=True)
        for row in rows_of(step, phase, factor, backend)
    ]
    return Results(**(FACTS | {"device": f"NVIDIA {card}"}), platform="gpu", rows=rows)


def test_the_table_has_what_misses_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """In either phase, the worst first; nothing without a target, and no drawn shape."""
    longer = dataclasses.replace(PLAIN, T=16411)
    found = results_of(
        monkeypatch,
        (step_of("short with gradients", dataclasses.replace(PLAIN, D=96)), 1.0, 2.1, "triton"),
        (step_of("D 512", WIDE), 9.25, 12.5, "xla"),
        (step_of("met", longer), 1.9, 1.9, "mosaic_gpu"),
        (step_of("no target", dataclasses.replace(PLAIN, T=4096), None), 9.0, 9.0, "xla"),
        (step_of("drawn", dataclasses.replace(PLAIN, T=777), group="drawn"), 9.0, 9.0, "xla"),
        (step_of("limit", dataclasses.replace(PLAIN, T=8), Target(0.4, "limit")), 2.0, 3.0, "xla"),
    )
    (table,) = shortfall.tables(found)
    assert [row[0] for row in table.rows] == ["D 512", "limit", "short with gradients"]
    assert table.rows[0][1:] == [WIDE_SIZE, "9.25", "12.5", "2.00", "xla"]
    # The base case has half of the byte limit, so 0.4 of the limit are 1.25 times its time.
    assert table.rows[1][2:5] == ["2.00", "3.00", "1.25"]
    assert "3 of 4 options, each in one size, are here." in table.notes
    assert shortfall.tables(dataclasses.replace(found, rows=[])) == []


WIDE_SIZE = "B2 H4 D512, causal"


def test_the_file_has_what_takes_twice_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    short = dataclasses.replace(WIDE, T=4096)
    other = dataclasses.replace(WIDE, T=2048)
    half = dataclasses.replace(PLAIN, dtype="float32")
    measured = (
        (step_of("D 512", WIDE), 1.5, 12.5, "xla"),
        (step_of("D 512, T 4096", short), 1.2, 4.0, "xla"),
        (step_of("D 512, T 2048", other), 1.1, 3.0, "triton"),
        (step_of("float32", half), 1.99, 1.5, "mosaic_gpu"),
        (step_of("plain", dataclasses.replace(PLAIN, T=8)), 9.0, 9.0, "triton"),
    )
    found = results_of(monkeypatch, *measured)
    another = dataclasses.replace(found, device="another card")
    text = shortfall.toml_text([another, found])
    # Each entry has the backend of its largest factor. Float32 is below 2 in both phases.
    assert tomllib.loads(text) == {
        "card": "NVIDIA H200",
        "options": [
            {
                "name": "heads above 256 columns, causal",
                "forward": {"backend": "xla", "least": 1.2, "most": 1.5},
                "training": {"backend": "xla", "least": 4.0, "most": 12.5},
            }
        ],
    }
    assert shortfall.toml_text([another, dataclasses.replace(found, rows=[])]) == ""


def test_no_slow_row_of_linear_attention_lacks_an_option() -> None:
    """Each row that takes twice its base case's time for each byte has one, and what is asked of
    its traits is what its spec has. tests/test_benchmark_suites.py compares the file itself."""
    found = next(one for _, one in document.reports() if shortfall.entries(one))
    seen = {}
    for factor in shortfall.factors(found):
        row, option = factor.step.row, shortfall.option_of(factor.step.row)
        if row.op != "linear_attention":
            continue
        holding = [one for one in slower.OPTIONS if one.holds(shortfall.traits(row))]
        assert len(holding) <= 1
        if factor.times >= slower.LEAST:
            assert option is not None, f"{factor.step.name}, {factor.step.size}: {factor.times}"
            seen[factor.step.size, option.name] = row
    assert {name for _, name in seen} == set(slower.table()["options"])
    for row in seen.values():
        traits = choices.spec_of(row).traits()
        wanted = shortfall.traits(row)
        assert {name: traits[name] for name in wanted} == wanted
    assert slower.table()["card"] == found.device


CARDS = {name: choices.described(name) for name in ("H200", "A100")}


def note(monkeypatch: pytest.MonkeyPatch, row: Row, card: str, by: str | None = None) -> str:
    file = {
        "card": "NVIDIA H200",
        "options": {
            "heads above 256 columns, causal": {
                "forward": {"backend": "xla", "least": 9.3, "most": 9.3},
                "training": {"backend": "xla", "least": 6.2, "most": 12.3},
            },
            "exact float32, causal": {
                "forward": {"backend": "triton", "least": 2.0, "most": 2.0},
                "training": {"backend": "mosaic_gpu", "least": 2.2, "most": 3.5},
            },
        },
    }
    monkeypatch.setattr(slower, "table", lambda: file)
    arrays = [jax.ShapeDtypeStruct((row.B, row.T, row.H, row.D), jnp.dtype(row.dtype))] * 3
    with choices.pretending(CARDS[card]):
        function: Any = ato_jax.linear_attention
        return ato_jax.explain(function, *arrays, causal=row.causal, implementation=by).note


@pytest.mark.lowering
def test_explain_says_how_much_longer_such_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the phases whose backend is the one that was measured, on a card of its architecture."""
    assert CARDS["H200"].capability == slower.CAPABILITY
    assert note(monkeypatch, WIDE, "H200") == (
        "heads above 256 columns, causal: for each byte, 9.3 times forward and 6.2 to 12.3 times "
        "with gradients as long as the plain call in heads of 128 columns (large calls on one "
        "NVIDIA H200)"
    )
    assert note(monkeypatch, WIDE, "A100") == ""
    assert note(monkeypatch, dataclasses.replace(WIDE, causal=False), "H200") == ""
    assert note(monkeypatch, WIDE, "H200", by="reference") == ""
    exact = dataclasses.replace(PLAIN, dtype="float32")
    told = note(monkeypatch, exact, "H200")
    assert "2.2 to 3.5 times with gradients as long" in told and "forward" not in told
    assert note(monkeypatch, PLAIN, "H200") == ""


def test_a_plain_call_does_not_read_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> Any:
        raise AssertionError("the file was read")

    monkeypatch.setattr(slower, "table", read)
    arrays = [jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)] * 3
    with choices.pretending(CARDS["H200"]):
        assert ato_jax.explain(ato_jax.linear_attention, *arrays, causal=True).note == ""
        favor = ato_jax.favor(jax.random.key(0), 128, 128)
        with pytest.raises(AssertionError, match="was read"):
            ato_jax.explain(ato_jax.linear_attention, *arrays, feature_map=favor)
    assert device.of_call(()).capability != slower.CAPABILITY
    ato_jax.explain(ato_jax.linear_attention, *arrays, feature_map=favor)
    rows = jnp.ones((1, 64, 1, 8))
    ato_jax.linear_attention(rows, rows, rows, causal=True, feature_map="elu1")
