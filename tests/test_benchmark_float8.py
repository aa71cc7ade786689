"""Float8 calls in the suite `cliffs`: their rows, their tables, and that they are measured."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver
from jax._src.cudnn import fused_attention_stablehlo

import ato_jax
from benchmarks import __main__ as entry
from benchmarks import (
    cases,
    choices,
    cliff_rows,
    cliffs,
    compiling,
    document,
    float8,
    float8_tables,
    machine,
    noise,
    results,
    run,
    store,
    summary,
    tables,
    whole,
)
from benchmarks.cases import PHASES, Case
from benchmarks.choices import Row
from benchmarks.cliff_rows import BASE, OURS, PLAIN, Step, Target
from benchmarks.results import NO_TIME_LEFT, Results
from tests.figures import parsed_flags  # noqa: F401
from tests.test_benchmark_cliffs import FACTS, Peer

FORWARD = PHASES[0]
WIDE = Row("attention", B=1, H=2, T=16, D=16, causal=True)
NARROW = dataclasses.replace(WIDE, dtype=float8.FLOAT8)
BY = dataclasses.replace(NARROW, by=float8_tables.PEER)
STEP = Step("float8", "float8 softmax", NARROW, WIDE, Target(1.25, "speed"), peer=BY)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cliffs, "SECONDS", 0.0)
    monkeypatch.setattr(cliffs.peers, "Peer", Peer)
    monkeypatch.setattr(run, "introduced", lambda *_: dict(FACTS))


def step_of(T: int, **changed: Any) -> Step:
    """`STEP` at another length."""
    rows = {name: dataclasses.replace(getattr(STEP, name), T=T) for name in ("row", "base", "peer")}
    return dataclasses.replace(STEP, name=f"float8 T {T}", **{**rows, **changed})


def rows_of(step: Step, **seconds: float | str) -> list[results.Row]:
    """Measured rows, by `row`, `base`, `plain` and `peer` the seconds or the reason for none."""
    found, rows = Results(**FACTS), []
    names = {"row": OURS, "base": BASE, "plain": PLAIN, "peer": float8_tables.PEER}
    for name, told in seconds.items():
        row = cliffs.blank(step.row, FORWARD, found, names[name], getattr(step, name))
        if isinstance(told, str):
            row.unavailable = told
        else:
            row.seconds, row.turns, row.spread = told, [told], summary.spread([told] * 3)
            row.picked, row.errors = "mosaic_gpu.float8", {"out": 2e-2}
        rows.append(row)
    return rows


def lines_of(table: tables.Table) -> list[dict[str, str]]:
    return [dict(zip(table.head, line, strict=True)) for line in table.rows]


# The rows.


def test_float8_rows_have_a_forward_pass_alone() -> None:
    for platform in results.PLATFORMS:
        for step in cliff_rows.STEPS[platform]:
            narrow = step.row.dtype == float8.FLOAT8
            assert narrow == (step.group == float8_tables.GROUP)
            assert step.phases == (PHASES[:1] if narrow else PHASES)
    jobs = compiling.of_cliffs(set(), "gpu").in_jax
    of_float8 = [job for job in jobs if job["row"]["dtype"] == float8.FLOAT8]
    assert len(of_float8) > 28 and {job["phase"] for job in of_float8} == {FORWARD}
    assert {job["row"]["by"] for job in of_float8} == {"", float8_tables.PEER}
    # Two phases of every other row.
    steps = cliff_rows.STEPS["gpu"]
    narrow = sum(step.group == float8_tables.GROUP for step in steps)
    assert whole._of_cliffs(Path("/nowhere.json"), "gpu") == 2 * len(steps) - narrow


def test_float8_rows_stand_beside_the_same_call() -> None:
    steps = [one for one in cliff_rows.STEPS["gpu"] if one.group == float8_tables.GROUP]
    for step in steps:
        assert step.row == dataclasses.replace(step.base, dtype=float8.FLOAT8)
        assert step.base.dtype == "bfloat16"
        if step.plain:
            # An option's plain call is a row of its own or has its size.
            assert step.plain.dtype == float8.FLOAT8 and step.plain != step.row
            assert step.plain.D == step.row.D and not step.plain.options
        if step.peer:
            assert step.peer == dataclasses.replace(step.row, by=float8_tables.PEER)
        assert list(step.beside.values()) == [*filter(None, (step.base, step.plain, step.peer))]
    plain = [step for step in steps if not step.plain]
    first = Row("linear_attention", B=8, H=8, T=16384, D=64, dtype=float8.FLOAT8)
    [one] = [step for step in plain if step.row == first]
    assert one.target == Target(0.85, "limit", speed=1.5)
    of_softmax = [step for step in plain if step.row.op == "attention"]
    assert {step.row.D for step in of_softmax if step.peer} == {128, 256}
    assert {step.target for step in of_softmax} == {Target(1.25, "speed")}
    assert {
        step.row.op for step in steps if step.errors and step.row.T == 65536
    } == choices.APIS.keys()
    told = " ".join(step.name for step in steps)
    for option in (
        "T 16411", "T 4123", "lengths", "segments", "group", "gate", "relu", "window", "soft cap",
        "bias",
    ):  # fmt: skip
        assert option in told


def test_bytes_and_targets_by_hand() -> None:
    # q, k and v of one byte, out of two.
    elements = 16 * 2 * 16
    assert cliff_rows.traffic(NARROW, FORWARD) == 5 * elements
    assert cliff_rows.traffic(WIDE, FORWARD) == 8 * elements
    row, base = rows_of(STEP, row=1e-5, base=2e-5)
    limit = 5 * elements / 1e9
    assert row.limit == pytest.approx(limit) and base.limit == pytest.approx(8 / 5 * limit)
    assert Target(1.25, "speed").share(row, base) == pytest.approx(1.25 * limit / 2e-5)
    assert Target(1.25, "speed").share(row, None) is None
    # The smaller of the two.
    assert Target(0.85, "limit", speed=1.5).share(row, None) == 0.85
    assert Target(0.85, "limit", speed=1.5).share(row, base) == pytest.approx(1.5 * limit / 2e-5)
    faster = dataclasses.replace(base, seconds=limit)
    assert Target(0.85, "limit", speed=1.5).share(row, faster) == 0.85
    assert "0.85 of the limit, or 1.50 times the speed" == str(Target(0.85, "limit", speed=1.5))


# The tables.


def test_rows_that_miss_their_target_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    met, missed, refused, late, option, never = map(step_of, (16, 17, 18, 19, 20, 21))
    option = dataclasses.replace(option, target=None, peer=None, plain=NARROW)
    other = Step("lengths", "lengths", dataclasses.replace(WIDE, lengths=True), WIDE, Target(0.9))
    steps = (other, met, option, missed, refused, late, never)
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", steps)
    rows = [
        *rows_of(met, row=1e-5, base=1.3e-5, peer=0.9e-5),
        *rows_of(option, row=2e-5, base=1e-5, plain=1e-5),
        *rows_of(missed, row=1e-5, base=1.2e-5, peer="NotImplementedError: no kernel"),
        *rows_of(refused, row="out is wrong", base="there is nothing beside it"),
        *rows_of(late, row=NO_TIME_LEFT),
        *rows_of(other, row=2e-5, base=1e-5),
    ]
    found = Results(**FACTS, rows=rows)
    of_others, table = cliffs.findings(found)
    assert [line["option"] for line in lines_of(of_others)] == ["lengths"]
    lines = lines_of(table)
    assert [line["call"] for line in lines] == ["T 18", "T 17", "T 20", "T 16"]
    assert (lines[0]["ms"], lines[0]["None is"], lines[0]["reached"]) == ("", "out is wrong", "-")
    # Without the peer's time there is no ratio.
    assert (lines[1]["cuDNN float8, ms"], lines[1]["cuDNN / float8"]) == ("", "-")
    assert lines[1]["None is"].endswith("cuDNN float8: NotImplementedError: no kernel")
    assert (lines[1]["bfloat16 / float8"], lines[1]["reached"]) == ("1.2x", "0.96")
    assert (lines[2]["without the option, ms"], lines[2]["target"]) == ("0.0100", "-")
    assert (lines[3]["cuDNN / float8"], lines[3]["reached"]) == ("0.9x", "1.04")
    assert lines[3]["None is"] == "mosaic_gpu.float8" and lines[3]["error"] == "2.0e-02"
    assert "1 of 2 float8 rows with a target meet it." in table.notes
    assert "2 of 6 float8 rows are not measured." in table.notes
    # The headline's worst option may be one of these, or another.
    assert cliffs.worst(found)[0] == other
    found.rows = [row for row in rows if row.case != str(other.row)]
    assert cliffs.worst(found)[0] == missed
    assert "ato_jax, the same call in bfloat16" in document.headline_of(found)[-1]
    assert len(cliffs.findings(found)) == 1


def test_no_ratio_of_a_time_that_is_lacking_or_not_steady() -> None:
    def told(*rows: results.Row, step: Step = STEP) -> dict[str, str]:
        known = {row.key: row for row in rows}
        cells = float8_tables.cells(step, float8_tables.rows_of(step, known))
        return dict(zip(float8_tables.HEAD, cells, strict=True))

    row, base, peer = rows_of(STEP, row=1e-5, base=2e-5, peer=3e-5)
    assert told(row, base, peer)["cuDNN / float8"] == "3.0x"
    alone = told(row)
    assert alone["bfloat16 / float8"] == alone["cuDNN / float8"] == alone["reached"] == "-"
    assert "bfloat16: not measured; cuDNN float8: not measured" in alone["None is"]
    peer.load = "another program"
    marked = told(row, base, peer)
    assert marked["cuDNN / float8"] == noise.NOISY and marked["cuDNN float8, ms"][0] == noise.MARK
    assert marked["reached"] == "1.60"
    base.machine = "another"
    assert told(row, base)["reached"] == "-"
    assert told(row, base)["bfloat16 / float8"] == noise.TWO_MACHINES
    # A row to which no other library belongs has no cell for one.
    assert told(row, step=dataclasses.replace(STEP, peer=None))["cuDNN / float8"] == ""


def test_errors_above_what_is_wanted_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad, none = (step_of(T, errors=True) for T in (16, 17, 18))
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", (good, bad, none))
    names = [(name, rotated) for name in (float8.NORMAL, float8.OUTLIERS) for rotated in (0, 1)]
    rows = []
    for step, values in (
        (good, (1e-2,) * 4),
        (bad, (2e-2, 4e-2, float("nan"), 2.9e-2)),
        (none, ()),
    ):
        row, base = rows_of(step, row=1e-5, base=1e-5)
        for (name, rotated), value in zip(names, values, strict=False):
            row.errors[float8.name_of(name, float8.SAME, bool(rotated))] = value
            row.errors[float8.name_of(name, float8.BEFORE, bool(rotated))] = 5e-2
            base.errors[name] = 2e-3
        rows += [row, base]
    _, table = cliffs.findings(Results(**FACTS, rows=rows))
    lines = lines_of(table)
    assert [(line["call"], line["same float8 inputs"]) for line in lines] == [
        ("T 17", "nan"), *[("T 18", "-")] * 4, ("T 17", "4.0e-02"), ("T 17", "2.9e-02"),
        ("T 17", "2.0e-02"), *[("T 16", "1.0e-02")] * 4,
    ]  # fmt: skip
    assert lines[5]["inputs"] == float8.NORMAL and lines[5]["q and k"] == float8.ROTATED
    assert (lines[5]["at most"], lines[5]["bfloat16"]) == ("3e-02", "2.0e-03")
    assert lines[5]["inputs not quantised"] == "5.0e-02"
    assert "6 of 12 rows are within the error that is wanted." in table.notes


def test_what_was_not_measured_has_no_table() -> None:
    for _, found in document.reports():
        known = {row.case for row in found.rows}
        steps = [one for one in cliff_rows.STEPS["gpu"] if one.group == float8_tables.GROUP]
        measured = any(str(step.row) in known for step in steps)
        assert bool(float8_tables.of(found)) == measured
    late = Results(**FACTS, platform="gpu", rows=rows_of(steps[0], row=NO_TIME_LEFT))
    assert float8_tables.of(late) == [] and cliffs.findings(late) == []


def test_rows_that_were_measured_apart_are_told_with_their_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "FOLDER", tmp_path / "kept")
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", (STEP,))
    rows = rows_of(STEP, row=1e-5, base=2e-5, peer=3e-5)
    about = {"date": "2026-01-02"}
    apart = Results(**FACTS, about=about, commit="sources abc", rows=rows)
    path = tmp_path / "new" / float8_tables.GROUP / "a_card.json"
    results.write(path, results.json_text(apart))
    monkeypatch.setattr(machine, "of_sources", {"sources abc": "commit 1"}.get)
    (written,) = document.keep(tmp_path / "new")
    assert written == tmp_path / "kept" / float8_tables.GROUP / "a_card.json"
    own = Results(**FACTS, commit="commit 0")
    (table,) = document.float8_apart(own, "a_card")
    assert "Measured on 2026-01-02 with commit commit 1, JAX 2." in table.notes[-1]
    assert "A copy ran at 0.00 TB/s." in table.notes[-1] and len(table.rows) == 1
    assert document.float8_apart(own, "another_card") == []
    # Once the card's own file has float8 rows, the other file's are not shown.
    own.rows = rows
    assert document.float8_apart(own, "a_card") == [] and len(cliffs.findings(own)) == 1
    # The folder holds no file of a card's whole report.
    assert document.reports() == []


# The errors.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", ["attention", "linear_attention"])
def test_float64_is_that_of_the_other_suites(op: str, causal: bool) -> None:
    T = 4 * float8.QUERIES
    q, k, v = (
        jax.random.normal(key, (2, T, 3, 8)) for key in jax.random.split(jax.random.key(1), 3)
    )
    found = float8.exact(op, causal, None, {"q": q, "k": k, "v": v})
    kind = "softmax" if op == "attention" else "linear"
    case = Case(kind, B=2, H=3, T=T, D=8, dtype="float32", causal=causal)
    rows = np.arange(T)[float8.compared(T)]
    assert list(rows[:2]) == [3, 7] and rows[-1] == T - 1 and len(rows) == float8.QUERIES
    for head in range(float8.HEADS):
        one = [np.asarray(x[0, :, head]) for x in (q, k, v)]
        wanted = cases.exact(case, *one, np.zeros_like(one[0]), rows)["out"]
        np.testing.assert_allclose(found[head], wanted, rtol=1e-12)


ELU1: str | None = None


@pytest.mark.parametrize(
    ("op", "feature_map"),
    [("attention", ELU1), ("linear_attention", ELU1), ("linear_attention", "identity")],
)
def test_errors_of_right_and_of_wrong_calls(op: str, feature_map: str | None) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = {
        name: jax.random.normal(key, (1, 64, 2, 32), jnp.bfloat16)
        for name, key in zip("qkv", keys, strict=True)
    }
    options: dict[str, Any] = {"causal": True}
    if feature_map:
        options |= {"feature_map": feature_map, "normalize": False}
    function: Callable[..., Any] = getattr(ato_jax, op)

    def call(factor: float) -> Callable[[dict[str, Any]], Any]:
        def attend(arrays: dict[str, Any]) -> Any:
            more = {name: one for name, one in arrays.items() if name == "scales"}
            return factor * function(*(arrays[name] for name in "qkv"), **options, **more)

        return attend

    what = op, True, feature_map, drawn
    own, base = float8.errors(*what, call(1), call(1))
    rotations = (False, True) if float8.rotates(op, feature_map) else (False,)
    assert own.keys() == {
        float8.name_of(name, against, rotated)
        for name in (float8.NORMAL, float8.OUTLIERS)
        for against in (float8.SAME, float8.BEFORE)
        for rotated in rotations
    }
    for name in base:
        assert base[name] < 5e-3
        for rotated in rotations:
            assert own[float8.name_of(name, float8.SAME, rotated)] < 5e-3
            assert 1e-2 < own[float8.name_of(name, float8.BEFORE, rotated)] < 0.2
    if len(rotations) == 2:
        before = (float8.name_of(float8.OUTLIERS, float8.BEFORE, one) for one in rotations)
        plain, rotated = (own[name] for name in before)
        assert rotated < plain
    # A call that is off by 5%, and one of which every value is the first head's.
    own, _ = float8.errors(*what, call(1.05), call(1))
    assert min(own.values()) > float8.LIMITS[op]
    own, base = float8.errors(*what, lambda x: jnp.roll(call(1)(x), 1, 2), call(float("nan")))
    assert min(own.values()) > 0.5 and all(np.isnan([*base.values()]))


def test_a_row_that_is_not_right_is_told_by_its_own_tolerance() -> None:
    linear = dataclasses.replace(NARROW, op="linear_attention")
    assert choices.tolerance(linear) == 1e-2 and choices.tolerance(NARROW) == 4e-2
    assert choices.tolerance(BY) == 8e-2
    for row in (linear, NARROW):
        assert float8.LIMITS[row.op] < choices.tolerance(row) < 2.1 * float8.LIMITS[row.op]
    assert choices.tolerance(WIDE) == cases.TOLERANCES["bfloat16"]


def test_the_scales_that_cudnn_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a function that computes what cuDNN is documented to compute."""

    def attention(
        q: Any, k: Any, v: Any, *, fp8_params: dict[str, Any], scale: float, mask_type: Any,
        use_fp8: bool,
    ) -> Any:  # fmt: skip
        assert use_fp8 and set(fp8_params) == set(fused_attention_stablehlo.fp8_params_keys)
        told = {name: float(one[0, 0, 0, 0]) for name, one in fp8_params.items()}
        assert told["scale_s"] * told["descale_s"] == 1 and told["scale_s"] <= 448
        wide = [
            x.astype(jnp.float32) * told[f"descale_{name}"]
            for name, x in zip("qkv", (q, k, v), strict=True)
        ]
        causal = mask_type == fused_attention_stablehlo.MaskType.CAUSAL
        out = ato_jax.attention(*wide, causal=causal, scale=scale)
        return (out * told["scale_o"]).astype(float8.FLOAT8), None, None

    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", attention)
    for causal in (False, True):
        row = dataclasses.replace(BY, causal=causal)
        arrays = choices.draw(row, jax.random.key(3))
        found = choices.called(row, FORWARD, None)(arrays)
        assert found["out"].dtype == float8.FLOAT8
        wanted = choices.right(row, FORWARD)(arrays)
        assert 1e-3 < float(choices.errors(found, wanted)["out"]) < 5e-2


# The run.


def test_a_float8_row_and_all_beside_it_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """cuDNN's call, which a CPU has not, says why; the others have times and errors."""
    step = dataclasses.replace(STEP, plain=dataclasses.replace(NARROW, T=24), errors=True)
    other = Step("lengths", "lengths", dataclasses.replace(WIDE, lengths=True), WIDE)
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", (other, step))
    path = tmp_path / "figures.json"
    with flagsaver.flagsaver(suite=["cliffs"], rows=["float8"], json=str(path)):
        assert entry.main(["benchmarks", "run"]) == 0
        assert "1 rows to measure, 0 known" in capsys.readouterr().out
        with flagsaver.flagsaver(resume=True):
            assert entry.main(["benchmarks", "run"]) == 0
    said = capsys.readouterr().out
    assert "0 rows to measure, 1 known" in said and float8_tables.ERRORS in said
    own, base, plain, peer = results.read(path).rows
    assert [row.contender for row in (own, base, plain, peer)] == [OURS, *step.beside]
    assert {row.case for row in (own, base, plain, peer)} == {str(NARROW)}
    assert own.seconds and base.seconds and plain.seconds and own.picked == "xla, widened"
    assert peer.seconds is None and "cuDNN" in peer.unavailable
    assert own.traffic < base.traffic and plain.traffic == own.traffic * 24 / 16
    assert own.errors["out"] < 1e-2 and len(own.errors) == 1 + 8 and len(base.errors) == 1 + 2
    same = [own.errors[float8.name_of(float8.OUTLIERS, float8.SAME, one)] for one in (False, True)]
    assert max(same) < 5e-3


def test_nothing_is_timed_beside_a_wrong_float8_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = cliffs.Ready(lambda index: jnp.zeros(()), 1, "xla", {"out": 0.0})
    calls = cliffs.Calls("cpu", {})
    told: dict[Row, cliffs.Ready | str] = {NARROW: "out is wrong", WIDE: ready, BY: ready}
    monkeypatch.setattr(calls, "ready", lambda row, phase: told[row])
    rows = cliffs.measured(STEP, FORWARD, calls, Results(**FACTS))
    assert [row.seconds for row in rows] == [None] * 3
    assert rows[0].unavailable == "out is wrong"
    assert {row.unavailable for row in rows[1:]} == {"there is nothing beside it"}
    # Errors that cannot be computed leave the times.
    told[NARROW] = ready
    step = dataclasses.replace(STEP, errors=True)
    rows = cliffs.measured(step, FORWARD, calls, Results(**FACTS))
    assert rows[0].seconds and [*rows[0].errors] == ["out"]
    assert f"{NARROW}: no errors: " in capsys.readouterr().out


def test_a_row_does_not_wait_for_another_librarys_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = step_of(17, peer=None)
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", (alone, STEP))
    rounds, measured = [], []

    def compile_ahead(groups: Any, platform: str, left: float) -> dict[Any, Any]:
        rounds.append([row for row, _ in cliffs.both_of(groups)])
        return {(row, FORWARD): None for row in rounds[-1] if not row.by}

    monkeypatch.setattr(cliffs, "compile_ahead", compile_ahead)
    monkeypatch.setattr(
        cliffs, "measured",
        lambda step, *_: measured.append(step) or rows_of(step, row=1e-5, base=1e-5),
    )  # fmt: skip
    with flagsaver.flagsaver(suite=["cliffs"], json=str(tmp_path / "figures.json")):
        assert entry.main(["benchmarks", "run"]) == 0
    assert rounds == [[alone.base, alone.row, WIDE, BY, NARROW]] and measured == [alone, STEP]


def test_a_store_that_lacks_a_call_beside_the_row_leaves_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", (STEP,))
    held = store.opened(tmp_path / "programs", "cpu")
    timed: list[Any] = []
    monkeypatch.setattr(cliffs, "run_rows", lambda groups, *_: timed.extend(groups) or True)
    path = tmp_path / "figures.json"
    flags_of = {"suite": ["cliffs"], "json": str(path), "compiled": str(held.folder)}
    for row, expected in ((WIDE, 0), (NARROW, 0), (BY, 1)):
        held.put(choices.job_of(row, FORWARD, by_name=False), None if row.by else ["programs"])
        with flagsaver.flagsaver(**flags_of):
            assert entry.main(["benchmarks", "run"]) == 0
        assert len(timed) == expected


def test_a_choice_says_whether_the_arrays_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (
        ("mosaic_gpu.float8", "mosaic_gpu.float8"),
        ("mosaic_gpu.prepared", "mosaic_gpu, widened"),
    ):
        forward = types.SimpleNamespace(backend=name)
        told = types.SimpleNamespace(forward=forward)
        monkeypatch.setattr(ato_jax, "explain", lambda *_, told=told, **__: told)
        assert choices.told_of(NARROW, FORWARD, {}).choice == said
