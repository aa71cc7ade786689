"""The suite `choices`: that it runs, that it sees a slower choice, and what it says of it."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

from ato_jax import launch, tuning
from benchmarks import __main__ as entry
from benchmarks import choices, noise, other_load, timing
from benchmarks.cases import PHASES
from benchmarks.choices import CHOSEN, RIGHT, Found, Programs, Row, Told
from benchmarks.results import ResultsError
from tests import choices as golden

# On a CPU Triton's kernels are interpreted, where JAX has a lowering to them.
TIMED = {CHOSEN, "xla"} | (set() if launch.no_triton else {"triton"})
TINY = choices.ROWS["cpu"][0]
TRAITS = {"dtype": "bfloat16", "D": 128, "causal": False, "window": False, "segments": False}
SIZES = {"T": 512, "S": 512, "shortest": 512, "rows": 1024}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmarks"])
    monkeypatch.setattr(choices, "SECONDS", 0.0)
    monkeypatch.setattr(choices, "SECONDS_OF_DOUBT", 0.0)
    # Three batches beside other tests scatter: `test_benchmark_busy.py` has what is said of that.
    monkeypatch.setattr(noise, "MOST_SCATTER", float("inf"))
    monkeypatch.setattr(noise, "MOST_DRIFT", float("inf"))
    monkeypatch.setattr(other_load.Watch, "told", lambda self: "")


def found(**changed: Any) -> Found:
    plain = Found(
        "attention B1 T512", "attention", PHASES[0], "triton", TRAITS, SIZES,
        {CHOSEN: 1.0, "triton": 1.0, "xla": 3.0}, {}, {},
    )  # fmt: skip
    return dataclasses.replace(plain, **changed)


def test_every_row_is_another_call() -> None:
    rows = choices.ROWS["gpu"]
    assert len(set(map(str, rows))) == len(rows)
    assert {row.op for row in rows} == set(choices.APIS)
    assert {row.dtype for row in rows} == {"bfloat16", "float16", "float32"}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_hold_every_row_once(count: int) -> None:
    rows, found = list(range(11)), []
    for which in range(1, count + 1):
        with flagsaver.flagsaver(part=f"{which}/{count}"):
            found += choices.part_of(rows)
    assert sorted(found) == rows


@pytest.mark.parametrize("part", ["2", "0/4", "5/4", "1/0", "a/b", "12/13"])
def test_a_part_that_is_none(part: str) -> None:
    with flagsaver.flagsaver(part=part), pytest.raises(ResultsError, match=f"--part.*{part}"):
        choices.part_of(list(range(11)))


def test_the_suite_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(choices.ROWS, "cpu", (TINY,))
    path = tmp_path / "choices.json"
    with flagsaver.flagsaver(suite=["choices"], json=str(path)):
        assert entry.main(["benchmarks", "run"]) == 0
    said = capsys.readouterr().out.strip().splitlines()
    assert said[-2:] == ["0 of 2 rows exceed 3%", str(path)]
    rows = json.loads(path.read_text())["rows"]
    assert [row["phase"] for row in rows] == list(PHASES)
    for row in rows:
        assert set(row["seconds"]) == TIMED and not row["wrong"]
        # One program: timed once.
        assert row["seconds"][CHOSEN] == row["seconds"]["xla"] and row["choice"] == "xla"
        assert "needs a GPU" in row["refused"]["cudnn"]


def test_the_suite_is_run_alone() -> None:
    with flagsaver.flagsaver(suite=["choices", "smoke"]):
        assert entry.main(["benchmarks", "run"]) == 2
    with flagsaver.flagsaver(case="no such call"), pytest.raises(ResultsError, match="No row"):
        choices.main()


def test_programs_go_to_another_process() -> None:
    row = choices.ROWS["cpu"][2]
    told = pickle.loads(pickle.dumps(choices.packed(row, PHASES[0], "cpu")))
    seen = choices.measure(row, PHASES[0], choices.unpacked(told), "cpu")
    assert set(seen.seconds) == TIMED
    # `None` ran XLA's program, which need not be the fastest on a busy machine.
    assert seen.ratio == seen.seconds["xla"] / min(seen.seconds.values())


def test_what_mosaic_gpu_calls_is_known_before_a_program_is_loaded() -> None:
    """A process that lowers nothing itself, as one that goes on with --resume."""
    code = "import sys\nfrom benchmarks import ours\nours.import_backends()\n"
    code += "assert 'jax.experimental.mosaic.gpu.core' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_what_is_lacking_comes_ahead_of_what_was_not_steady(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(TINY, T=TINY.T + 8)
    measured = []

    def measure(row: Row, phase: str, *_: Any) -> Found:
        measured.append((row.T, phase))
        return Found(str(row), row.op, phase, "xla", {}, {}, {CHOSEN: 1.0, "xla": 1.0}, {}, {})

    monkeypatch.setattr(choices, "_measured", measure)
    monkeypatch.setitem(choices.ROWS, "cpu", (TINY,))
    path = tmp_path / "choices.json"
    with flagsaver.flagsaver(suite=["choices"], json=str(path)):
        assert entry.main(["benchmarks", "run"]) == 0
        told = json.loads(path.read_text())
        told["rows"][0]["doubt"] = "p95 is 90% above the median"
        path.write_text(json.dumps(told))
        monkeypatch.setitem(choices.ROWS, "cpu", (TINY, other))
        measured.clear()
        with flagsaver.flagsaver(resume=True):
            entry.main(["benchmarks", "run"])
    assert measured == [(other.T, PHASES[0]), (other.T, PHASES[1]), (TINY.T, PHASES[0])]


def programs(seconds: dict[str, float], wrong: str = "", **of: str) -> Programs:
    """Programs that take so long; the `wrong` one's result is 2% off."""

    def taking(name: str) -> Any:
        def run(group: list[Any]) -> list[Any]:
            time.sleep(seconds.get(name, 0.0))
            ran.append(name)
            return [{"out": jnp.full(4, 1.02 if name == wrong else 1.0)} for _ in group]

        return run

    ran: list[str] = []
    told = Told("triton", TRAITS, SIZES, list(of), {})
    compiled = {name: taking(name) for name in (*seconds, RIGHT)}
    names = {CHOSEN if name == "none" else name: program for name, program in of.items()}
    return Programs(told, names, {}, compiled, lambda key: {}, choices.errors)


def test_a_slower_choice_is_behind() -> None:
    slow = programs({"a": 2e-2, "b": 2e-3}, none="a", triton="a", xla="b")
    seen = choices.measure(TINY, PHASES[0], slow, "cpu")
    assert seen.behind and seen.ratio > 1.5 and seen.fastest == "xla"
    assert "<--" in choices.line_of(seen) and "fastest xla" in choices.line_of(seen)
    last = choices.verdict([found(), seen]).splitlines()[-1]
    assert last == "1 of 2 rows exceed 3%"


def test_one_program_is_never_behind_itself() -> None:
    same = programs({"a": 2e-3, "b": 2e-2}, none="a", triton="a", xla="b")
    seen = choices.measure(TINY, PHASES[0], same, "cpu")
    assert seen.ratio == 1 and seen.fastest == "triton" and not seen.behind


def test_wrong_results_are_not_timed() -> None:
    fast = {"a": 4e-3, "b": 1e-3}
    seen = choices.measure(TINY, PHASES[0], programs(fast, "b", none="a", xla="b"), "cpu")
    assert set(seen.seconds) == {CHOSEN} and "out off by 2.0e-02" in seen.wrong["xla"]
    assert not seen.behind
    seen = choices.measure(TINY, PHASES[0], programs(fast, "a", none="a", xla="b"), "cpu")
    # A choice that is wrong is behind everything.
    assert seen.behind and CHOSEN in seen.wrong and seen.ratio == float("inf")
    assert choices.verdict([seen]).splitlines()[-1] == "1 of 1 rows exceed 3%"


def test_what_decides_a_row_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """`None`, however far behind it is, and what is near the fastest."""
    monkeypatch.setattr(noise, "MOST_SCATTER", -1.0)
    judged: list[Any] = []
    doubt_of_row = noise.doubt_of_row

    def told(by_name: dict[str, list[float]], load: str) -> str:
        judged.append({*by_name})
        return doubt_of_row(by_name, load)

    monkeypatch.setattr(noise, "doubt_of_row", told)
    times = {"a": 2e-3, "b": 4e-2}
    near = choices.measure(TINY, PHASES[0], programs(times, none="a", triton="a", xla="b"), "cpu")
    far = choices.measure(TINY, PHASES[0], programs(times, none="b", triton="a", xla="b"), "cpu")
    assert judged == [{CHOSEN, "triton"}, {CHOSEN, "triton", "xla"}]
    assert near.doubt.startswith(f"{CHOSEN}: p95 is ") and far.doubt.startswith(CHOSEN)
    assert far.ratio > 3 and not far.behind


def test_what_is_far_behind_has_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, int] = {}
    clock = types.SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(timing, "time", clock)

    def program(name: str, seconds: float) -> Any:
        def run(group: list[Any]) -> list[Any]:
            clock.now += seconds
            ran[name] = ran.get(name, 0) + 1
            return []

        return run

    compiled = {"a": program("a", 1e-3), "b": program("b", 1.2e-3), "c": program("c", 5e-2)}
    times = choices._timed({CHOSEN: "b", "x": "a", "y": "c"}, compiled, [[]], 1, "cpu")
    assert set(times) == {"a", "b", "c"} and max(times, key=times.__getitem__) == "c"
    # The batch that warms it up, and the fewest: it has no part in the longer turns.
    assert ran["c"] == 1 + timing.FEWEST_BATCHES and ran["a"] == ran["b"] > ran["c"]


def test_entries_are_a_tables() -> None:
    """What is proposed can be pasted, and changes the choice."""
    behind = found(
        seconds={CHOSEN: 2.0, "triton": 2.0, "cudnn": 1.0}, phase=PHASES[1], row="attention B1"
    )
    text = choices.entry_of(behind)
    [proposed] = tomllib.loads(text)["attention"]["first"]
    assert proposed == {
        "when": {"dtype": "bfloat16", "D": 128, "causal": False, "window": False},
        "sizes": {"shortest": {"least": 512}},
        "phase": tuning.TRAINING,
        "backend": "cudnn",
    }
    assert tuning._agree(proposed["when"], TRAITS) and tuning._agree(proposed["sizes"], SIZES)
    # Of XLA, which takes every option, those that were measured.
    behind.seconds["xla"] = 0.5
    [proposed] = tomllib.loads(choices.entry_of(behind))["attention"]["first"]
    assert proposed["backend"] == "xla" and proposed["when"] == TRAITS
    assert text in choices.verdict([found(), found(), dataclasses.replace(
        behind, seconds={CHOSEN: 2.0, "cudnn": 1.0}
    )])  # fmt: skip


def test_cards_are_fitted_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = found(seconds={CHOSEN: 2.0, "triton": 2.0, "cudnn": 1.0})
    there = found(seconds={CHOSEN: 2.0, "triton": 2.0, "cudnn": 2.1})
    paths = [tmp_path / f"{name}.json" for name in ("h200", "h100")]
    for path, one in zip(paths, (here, there), strict=True):
        rows = [dataclasses.asdict(row) for row in (one, found(row="another"))]
        path.write_text(json.dumps({"device": path.stem, "rows": rows}))
    assert entry.main(["benchmarks", "fit", *map(str, paths)]) == 0
    said = capsys.readouterr().out
    assert "None 2.000, cudnn 1.000" in said and "None 1.000, cudnn 1.050" in said
    assert "1 of 2 rows lack an entry" in said and choices.entry_of(here) in said
    assert tomllib.loads(said.rpartition("\n\n")[0])["attention"]["first"]
    paths[0].write_text("{}")
    assert entry.main(["benchmarks", "fit", str(paths[0])]) == 2
    assert entry.main(["benchmarks", "fit"]) == 2


def test_rows_have_what_they_say() -> None:
    row = Row("attention", 2, 4, 16, 8, S=24, G=2, V=6, lengths=True, options=(("layout", "bhtd"),))
    assert row.shapes["v"] == (2, 2, 24, 6) and row.shapes["dout"] == (2, 4, 16, 6)
    assert "S24" in str(row) and "lengths" in str(row) and "layout=bhtd" in str(row)
    spec = golden.spec_of(row)
    assert (spec.S, spec.G, spec.V, spec.kv_lengths) == (24, 2, 6, True)
    favor = Row("linear_attention", 1, 2, 16, 8, options=(("feature_map", "favor"),))
    assert golden.spec_of(favor).F == choices.FAVOR_FEATURES
