"""The suite `cliffs`: its rows, their bytes and targets, what it says of them, and that it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import (
    choices,
    cliff_rows,
    cliffs,
    devices,
    results,
    run,
    show,
    suites,
    summary,
    tables,
    timing,
    training,
)
from benchmarks.cases import PHASES, Case
from benchmarks.choices import Row
from benchmarks.cliff_rows import Step, Target
from benchmarks.results import Results

FACTS: dict[str, Any] = {
    "device": "a card", "ato_jax": "1", "jax": "2", "torch": "3", "bandwidth": 1e9
}  # fmt: skip
TINY = Row("linear_attention", B=1, H=2, T=16, D=8, dtype="float32")
STEP = Step("lengths", "lengths", dataclasses.replace(TINY, lengths=True), TINY, Target(0.9))
GATED = dataclasses.replace(TINY, causal=True, decay="step")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmarks"])
    monkeypatch.setattr(cliffs, "SECONDS", 0.0)
    monkeypatch.setattr(run, "introduced", lambda *_: FACTS)


def row_of(step: Step, phase: str, seconds: float | None, base: float | None, reason: str = ""):
    """A measured row and its base case."""
    found = Results(**FACTS)
    rows = [cliffs.blank(step.row, phase, found, cliffs.OURS)]
    rows.append(cliffs.blank(step.row, phase, found, cliffs.BASE, step.base))
    for row, time in zip(rows, (seconds, base), strict=True):
        if time is None:
            row.unavailable = reason
        else:
            row.seconds, row.turns, row.spread = time, [time], summary.spread([time] * 3)
            row.picked = "xla"
    return rows


# The rows.


def test_every_option_is_one_row() -> None:
    for platform in results.PLATFORMS:
        steps = cliff_rows.STEPS[platform]
        names = [str(step.row) for step in steps]
        assert len(set(names)) == len(names)
        assert {step.group for step in steps} == set(cliff_rows.GROUPS)
        assert all(step.row != step.base for step in steps)
    on_card, on_cpu = ({(s.group, s.name) for s in cliff_rows.STEPS[p]} for p in results.PLATFORMS)
    assert on_card == on_cpu
    assert all(step.row.T < 100 for step in cliff_rows.STEPS["cpu"])
    sizes = {step.row.D for step in cliff_rows.STEPS["gpu"] if step.group == "heads"}
    assert sizes >= {32, 40, 48, 72, 80, 96, 112, 160, 192, 256, 512}


def test_shapes_that_a_seed_draws() -> None:
    """The seed draws the same rows each time. No other group has their lengths."""
    rows = [step.row for step in cliff_rows.STEPS["gpu"] if step.group == "drawn"]
    assert len(rows) == cliff_rows.DRAWN
    assert set(rows) == {step.row for step in cliff_rows._drawn()}
    for row in rows:
        assert 1 <= row.B <= 64 and 100 <= row.T <= 200_000 and 24 <= row.D <= 256
        assert row.H % (row.G or row.H) == 0 and row.T not in (4096, 16384)
        least, most = cliff_rows.ELEMENTS
        assert least <= row.B * row.T * row.H * row.D <= most


def test_base_cases_lack_the_option_alone() -> None:
    by_name: dict[str, list[Step]] = {}
    for step in cliff_rows.STEPS["gpu"]:
        by_name.setdefault(step.name, []).append(step)
    assert len(by_name["T 16411"]) == len(by_name["a callable"]) == 4
    for step in by_name["scalar gate, segments of 1024"]:
        assert step.base == dataclasses.replace(step.row, decay=None) and step.base.documents
    for step in by_name["scalar gate both ways"]:
        assert step.base == dataclasses.replace(step.row, causal=True)
    for step in by_name["D 192, channel gate"] + by_name["channel gate"][:1]:
        assert step.base.D == 128 and step.base.causal
    assert by_name["D 192, channel gate"][0].base.decay == "channel"
    elements = {s.row.B * s.row.H * s.row.D for s in cliff_rows.STEPS["gpu"] if s.group == "heads"}
    assert max(elements) < 1.1 * min(elements)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "more", [{}, {"causal": True, "decay": "step"}, {"decay": "channel"}, {"decay": "head"}]
)
def test_bytes_are_those_of_the_other_suites(phase: str, more: dict[str, Any]) -> None:
    row = dataclasses.replace(TINY, **more)
    case = Case("linear", B=1, H=2, T=16, D=8, dtype="float32", **more)
    assert cliff_rows.traffic(row, phase) == case.traffic(phase)
    assert cliff_rows.operations(row, phase) == case.operations(phase)


def test_bytes_of_an_options_own_arrays_by_hand() -> None:
    # q and out of 4 heads, k and v of 1, 8 and 6 columns wide in bfloat16; 16 ids of 4 bytes.
    row = dataclasses.replace(TINY, H=4, G=1, V=6, dtype="bfloat16", documents=4)
    forward = 2 * 16 * (4 * 8 + 8 + 6 + 4 * 6) + 4 * 16
    assert cliff_rows.traffic(row, PHASES[0]) == forward
    # Again q, k, v and ids, with dout, and three gradients.
    backward = 2 * 16 * (2 * (4 * 8 + 8 + 6) + 4 * 6) + 4 * 16
    assert cliff_rows.traffic(row, PHASES[1]) == forward + backward
    # The arrays that are drawn have these bytes.
    drawn = jax.eval_shape(lambda: choices.draw(row, jax.random.key(0)))
    assert forward == sum(one.size * one.dtype.itemsize for one in drawn.values())
    lengths = dataclasses.replace(TINY, lengths=True)
    assert cliff_rows.traffic(lengths, PHASES[0]) == cliff_rows.traffic(TINY, PHASES[0]) + 4
    favor = dataclasses.replace(TINY, options=(("feature_map", "favor"),))
    assert cliff_rows.operations(favor, PHASES[0]) == 4 * 16 * 2 * choices.FAVOR_FEATURES * 8


def test_targets_by_hand() -> None:
    row, base = row_of(STEP, PHASES[0], 1e-5, 5e-6)
    assert base.reached == pytest.approx(4096 / 1e9 / 5e-6)
    assert Target(0.9).share(row, base) == pytest.approx(0.9 * base.reached)
    assert Target(0.9).share(row, None) is None
    assert Target(0.4, "limit").share(row, None) == 0.4
    # Within 1.5 times the byte limit, or of the products where these take longer.
    products = Target(1 / 1.5, "products")
    assert products.share(row, None) == pytest.approx(1 / 1.5)
    slow = dataclasses.replace(row, operations=2 * row.limit * cliff_rows.FLOAT32_RATE)
    assert products.share(slow, None) == pytest.approx(1 / 3)


def test_options_of_softmax_are_compared_like_for_like() -> None:
    """Each has the pairs of its base case. Where its bytes are others, its target is a speed, or
    bytes and operations change alike."""
    steps = {s.name: s for s in cliff_rows.STEPS["gpu"] if s.group == "softmax"}
    for name in ("D 80", "D 96", "D 112", "D 160", "sinks", "query offsets", "with its normalizer"):
        assert f"softmax, {name}" in steps
    for step in steps.values():
        row, base = step.row, step.base
        assert row.T in (base.T, 4123) and (row.B, row.H, row.S) == (base.B, base.H, base.S)
        for phase in PHASES:
            told = cliff_rows.traffic(row, phase) / cliff_rows.traffic(base, phase)
            work = cliff_rows.operations(row, phase) / cliff_rows.operations(base, phase)
            assert step.target and (step.target.of == "speed" or abs(told / work - 1) < 0.01)
    # As fast as its base case, with fewer bytes, it is 1.25 times as fast as is wanted.
    step = steps["softmax, group of 4"]
    row, base = row_of(step, PHASES[0], 2e-4, 2e-4)
    found = cliffs.line_of(step, PHASES[0], row, base)
    assert found.reached == pytest.approx(1.25) and found.ratio == pytest.approx(0.625)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "changed",
    [
        {"mask": True},
        {"sinks": True},
        {"offsets": True},
        {"options": (("dropout_rate", 0.1),)},
        {"options": (("return_lse", True),)},
    ],
    ids=str,
)
def test_calls_with_options_of_softmax(changed: dict[str, Any], phase: str) -> None:
    """By plain JAX, the same as by the reference; and each array has its gradient."""
    row = Row("attention", B=2, H=2, T=16, D=8, dtype="float32", causal=True, **changed)
    arrays = choices.draw(row, jax.random.key(0))
    found, wanted = (choices.called(row, phase, name)(arrays) for name in ("xla", "reference"))
    errors = choices.errors(found, wanted)
    names = {"out"} | ({"dq", "dk", "dv"} if phase == PHASES[1] else set())
    names |= {"dsinks"} if row.sinks and phase == PHASES[1] else set()
    names |= {"lse"} if row.options == (("return_lse", True),) else set()
    assert errors.keys() == names
    assert all(float(error) < 1e-5 for error in errors.values()), errors


# The table of findings.


def test_the_table_has_the_worst_first(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Step("gates", "scalar gate", GATED, dataclasses.replace(GATED, decay=None), Target(0.5))
    raises = dataclasses.replace(STEP, name="raises", row=dataclasses.replace(TINY, T=17))
    late = dataclasses.replace(STEP, name="late", row=dataclasses.replace(TINY, T=19))
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", (other, STEP, raises, late))
    rows = [
        # The gated row takes twice the time of its base case and moves a little more.
        *row_of(other, PHASES[0], 1e-5, 5e-6),
        *row_of(STEP, PHASES[0], 2e-5, 5e-6),
        *row_of(raises, PHASES[0], None, 5e-6, "UnsupportedError: no kernel"),
        row_of(late, PHASES[0], None, None, results.NO_TIME_LEFT)[0],
    ]
    found = Results(**FACTS, rows=rows)
    (table,) = cliffs.findings(found)
    lines = [dict(zip(table.head, line, strict=True)) for line in table.rows]
    assert [line["option"] for line in lines] == ["raises", "lengths", "scalar gate"]
    assert lines[0]["None is"] == "UnsupportedError: no kernel" and lines[0]["share"] == "-"
    assert (lines[1]["ratio"], lines[1]["target"], lines[1]["reached"]) == ("0.25", "0.90", "0.28")
    assert (lines[1]["share"], lines[1]["base"], lines[1]["None is"]) == ("0.20", "0.82", "xla")
    assert (lines[2]["ratio"], lines[2]["reached"]) == ("0.52", "1.03")
    assert "1 of 2 rows with a target meet it." in table.notes
    assert "1 rows were left out for lack of time." in table.notes
    assert cliffs.left_out(found) == [f"  {late.row}, forward"]
    assert table.markdown().count("\n|") == 2 + 3
    assert cliffs.findings(Results(**FACTS)) == []


def test_what_the_drawn_rows_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ratios before they are rounded; rows of other groups, and without a time, are left
    out."""
    drawn = [
        dataclasses.replace(STEP, group="drawn", name=f"{T}", row=dataclasses.replace(TINY, T=T))
        for T in (17, 19, 21)
    ]
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", (STEP, *drawn))
    times = zip((STEP, *drawn), (1e-3, 2e-5, 1e-5, None), strict=True)
    rows = [row for step, seconds in times for row in row_of(step, PHASES[0], seconds, 5e-6)]
    (table,) = cliffs.findings(Results(**FACTS, rows=rows))
    timed = zip(rows[2:6:2], rows[3:6:2], strict=True)
    ratios = [row.reached / base.reached for row, base in timed]
    said = f"is {tables.number(sum(ratios) / 2)} in the median and {tables.number(min(ratios))} at"
    assert f"The ratio of the 2 rows that a seed drew {said} the least." in table.notes
    assert min(ratios) > 0.1


# The run.


def test_wrong_flags_are_a_line_and_status_2(caplog: pytest.LogCaptureFixture) -> None:
    for given, said in (
        ({"rows": ["map"]}, "--rows takes groups of rows, lengths, dtypes, maps, gates, softmax"),
        ({"case": "no such call"}, "No row of cliffs contains --case='no such call'"),
        ({"dtype": "float16"}, "no --dtype, no --peer"),
        ({"suite": ["cliffs", "smoke"]}, "cliffs is run alone"),
    ):
        caplog.clear()
        with flagsaver.flagsaver(**{"suite": ["cliffs"]} | given):
            assert entry.main(["benchmarks", "run"]) == 2
        assert said in caplog.text and "Traceback" not in caplog.text


class Peer:
    """Stands in for PyTorch's process, which only measures a copy here."""

    def __init__(self, platform: str) -> None:
        pass

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_suite_runs_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cliffs.peers, "Peer", Peer)
    callable_map = dataclasses.replace(
        TINY, options=(("feature_map", "callable"), ("normalize", True))
    )
    # The library refuses a scale beside a normaliser: the row says so, the other is measured.
    refused = dataclasses.replace(TINY, options=(("scale", 2.0),))
    steps = tuple(
        Step("maps", name, row, TINY, Target(0.9))
        for name, row in (("a callable", callable_map), ("refused", refused))
    )
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", (STEP, *steps))
    path = tmp_path / "figures.json"
    with flagsaver.flagsaver(suite=["cliffs"], json=str(path), rows=["maps"], forward_only=True):
        with flagsaver.flagsaver(within_s=1e-9):
            assert entry.main(["benchmarks", "run"]) == 0
        said = capsys.readouterr().out
        assert f"Left out for lack of time:\n  {callable_map}, forward\n  {refused}" in said
        with flagsaver.flagsaver(resume=True):
            assert entry.main(["benchmarks", "run"]) == 0
            said = capsys.readouterr().out
            assert "2 rows to measure, 0 known" in said and "Left out" not in said
            assert entry.main(["benchmarks", "run"]) == 0
    assert "0 rows to measure, 2 known" in capsys.readouterr().out
    found = results.read(path)
    own, base, refusal, beside = found.rows
    assert (own.contender, base.contender) == (cliffs.OURS, cliffs.BASE) == (
        refusal.contender, beside.contender
    )  # fmt: skip
    assert own.case == base.case == str(callable_map) and own.picked == base.picked == "xla"
    assert own.reached and base.reached and own.errors["out"] < 1e-5
    assert refusal.seconds is None and "ValueError" in refusal.unavailable
    assert list(tmp_path.iterdir()) == [path]
    assert "refused" in show.text(found, [cliffs.NAME])


def test_rows_that_were_not_compiled_in_time_are_compiled_ahead_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rather than by this process, one by one, while the others have nothing to do."""
    rows = [dataclasses.replace(TINY, T=T) for T in (16, 17, 18, 19, 20)]
    steps = [Step("lengths", f"T {row.T}", row, rows[0]) for row in rows[1:]]
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", tuple(steps))
    monkeypatch.setattr(cliffs.peers, "Peer", Peer)
    asked, measured = [], []
    # The first round compiles the base case and two rows, the second one another row.
    ready = iter([[rows[0], *rows[3:]], [rows[1]], []])

    def compile_ahead(groups, platform, left):
        asked.append(([step.row.T for step, _ in groups], left))
        return {(row, PHASES[0]): None for row in next(ready)}

    monkeypatch.setattr(cliffs, "compile_ahead", compile_ahead)
    monkeypatch.setattr(
        cliffs, "measured",
        lambda step, phase, *_: measured.append(step.row.T) or row_of(step, phase, 1.0, 1.0),
    )  # fmt: skip
    path = tmp_path / "figures.json"
    with flagsaver.flagsaver(suite=["cliffs"], json=str(path), forward_only=True, within_s=90.0):
        assert entry.main(["benchmarks", "run"]) == 0
    assert [lengths for lengths, _ in asked] == [[17, 18, 19, 20], [17, 18]]
    assert measured == [19, 20, 17, 18]
    assert 90 > asked[0][1] > asked[1][1] > 0
    assert len(results.read(path).rows) == 8 and "Left out" not in capsys.readouterr().out
    # What would not begin in time is not begun.
    monkeypatch.undo()
    monkeypatch.setattr(choices, "compiled_ahead", lambda *_, **options: pytest.fail("begun"))
    group = (STEP, PHASES[0])
    assert cliffs.compile_ahead([group], "gpu", cliffs.SHORTEST_ROUND - 1) == {}


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = choices.compiled(TINY, PHASES[0], "cpu", by_name=False)
    assert set(programs.of) == {choices.CHOSEN}
    ready = cliffs.compared(TINY, PHASES[0], programs, "cpu")
    assert isinstance(ready, cliffs.Ready) and ready.calls == 1 and ready.choice == "xla"
    monkeypatch.setattr(choices, "tolerance", lambda row: 0.0)
    off = dataclasses.replace(programs, comparing=lambda found, right: {"out": float("nan")})
    told = cliffs.compared(TINY, PHASES[0], off, "cpu")
    assert told == "out is wrong: relative error nan"
    calls = cliffs.Calls("cpu", {})
    monkeypatch.setattr(calls, "ready", lambda row, phase: told if row.lengths else ready)
    rows = cliffs.measured(STEP, PHASES[0], calls, Results(**FACTS))
    assert [row.seconds for row in rows] == [None, None] and rows[0].unavailable == told
    # Without its base case a row is timed alone.
    calls = cliffs.Calls("cpu", {})
    monkeypatch.setattr(calls, "ready", lambda row, phase: ready if row.lengths else told)
    rows = cliffs.measured(STEP, PHASES[0], calls, Results(**FACTS))
    assert rows[0].seconds and rows[1].unavailable == told


def test_a_launchs_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(launches: list[Any], *_: Any, **__: Any) -> list[timing.Timing]:
        return [timing.Timing([8.0] * 3, 3) for _ in launches]

    monkeypatch.setattr(timing, "interleaved", interleaved)
    one = cliffs.Ready(lambda index: None, 4, "xla", {})
    both = [one, dataclasses.replace(one, calls=1)]
    assert cliffs.in_turns(both, "cpu") == [[2.0] * 3, [8.0] * 3]


def test_few_base_cases_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, made = cliffs.Calls("cpu", {}), []
    monkeypatch.setattr(calls, "ready", lambda row, phase: made.append(row.T) or str(row.T))
    for T in (1, 1, 2, 3, 1, 4, 1, 2):
        assert calls.base(dataclasses.replace(TINY, T=T), PHASES[0]) == str(T)
    assert made == [1, 2, 3, 4, 2] and len(calls._bases) == cliffs.MOST_BASES


def test_the_suite_is_among_those_that_are_named() -> None:
    assert suites.ALONE == (choices.NAME, cliffs.NAME, devices.NAME, training.NAME)
