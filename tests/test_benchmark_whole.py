"""`whole`: every stage of a report, on one card or on several, and what is kept of it."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import (
    cliff_rows,
    cliffs,
    document,
    latency,
    machine,
    memory,
    other_load,
    results,
    run,
    sdpa,
    training,
    whole,
)
from benchmarks.results import Results, ResultsError
from tests.figures import parsed_flags  # noqa: F401
from tests.test_benchmark_parts import NOTED, row_of, untimed


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """Two stages that write how many rows they lack; what was run, how often each dies, and the
    commands that refuse.
    """
    ran, dies, refused = [], [0], []

    def lacking(path, platform="cpu"):
        assert platform == "cpu"
        return int(path.read_text()) if path.exists() else 4

    def measured(command, seconds, place, name):
        path = Path(next(one for one in command if one.startswith("--json=")).partition("=")[2])
        ran.append((path.name, [one for one in command if one.startswith("--re")]))
        path.parent.mkdir(exist_ok=True, parents=True)
        if command[3] in refused:
            return 2
        if dies[0]:
            dies[0] -= 1
            return -11
        path.write_text(str(max(0, lacking(path) - 3)))
        return 0

    made = [
        whole.Stage("first", ("run",), "", lacking),
        whole.Stage("last", ("latency",), "of_last", lacking, timed=False),
    ]
    monkeypatch.setattr(whole, "STAGES", made)
    monkeypatch.setattr(whole, "ran", measured)
    monkeypatch.setattr(whole, "probed", lambda: ("cpu", "a card", 1))
    return ran, dies, refused


def test_the_whole_report_goes_on_until_nothing_is_lacking(tmp_path, stages, capsys, caplog):
    ran, dies, refused = stages
    with flagsaver.flagsaver(folder=str(tmp_path)):
        assert entry.main(["benchmarks", "whole"]) == 2 and ran == []
        with flagsaver.flagsaver(within_s=10.0):
            assert entry.main(["benchmarks", "whole"]) == whole.LACKING and ran == []
        assert "Lacking: 4 rows of first, 4 rows of last. The same command goes on" in caplog.text
        dies[0] = 1
        with flagsaver.flagsaver(within_s=540.0):
            assert entry.main(["benchmarks", "whole"]) == 0
        resumed = ("a_card.json", ["--resume"])
        # What died is started again, and what lacks a row goes on.
        assert ran == [resumed, resumed, resumed, ("a_card.json", []), ("a_card.json", [])]
        told = capsys.readouterr().out
        assert f"{tmp_path / 'a_card.json'}\n{tmp_path / 'of_last' / 'a_card.json'}\n" in told
        assert "Nothing is lacking" in told
        ran.clear()
        with flagsaver.flagsaver(within_s=540.0):
            assert entry.main(["benchmarks", "whole"]) == 0 and ran == []
            # A file that cannot be gone on with is named, and the other stages run.
            (tmp_path / "a_card.json").write_text("7")
            (tmp_path / "of_last" / "a_card.json").write_text("2")
            refused[:] = ["run"]
            assert entry.main(["benchmarks", "whole"]) == 2
            assert "Lacking: 7 rows of first. Refused: first, as it says" in caplog.text
            assert [name for name, _ in ran] == ["a_card.json"] * 2


def test_stages_know_what_their_files_lack(tmp_path, monkeypatch):
    lacks = {stage.name: stage.lacking for stage in whole.STAGES}
    path = tmp_path / "figures.json"
    counts = {name: lacking(path, "cpu") for name, lacking in lacks.items()}
    for suite in (latency, memory, training):
        name = suite.__name__.rpartition(".")[2]
        cases = [str(case) for case in suite.CASES["cpu"]]
        assert counts[name] == len(cases) == 2
        # A command that ended after its first case is not done.
        for commit, done, left in (
            (machine.commit(), cases, 0), (machine.commit(), cases[:1], 1), ("another", cases, 2),
        ):  # fmt: skip
            rows = [{"case": case} for case in done]
            path.write_text(json.dumps({"rows": rows, "commit": commit}))
            assert lacks[name](path, "cpu") == left
    late = {"case": cases[0], "skipped": results.NO_TIME_LEFT}
    path.write_text(json.dumps({"rows": [late], "commit": machine.commit()}))
    assert lacks["training"](path, "cpu") == 2
    case = sdpa.CONTEST.cases["cpu"][0]
    assert counts["sdpa"] == 2 * 2 * 2
    assert lacks["sdpa"](tmp_path / "none.json", "gpu") == len(sdpa.CONTEST.cases["gpu"]) * 4
    step = cliff_rows.STEPS["cpu"][0]
    for name, of in (("cliffs", str(step.row)), ("sdpa", str(case))):
        contender = sdpa.OURS if name == "sdpa" else cliffs.OURS
        reached = dataclasses.replace(row_of(contender, 1.0), case=of)
        late = dataclasses.replace(untimed(contender, results.NO_TIME_LEFT), case=of)
        for row, fewer in ((reached, 1), (late, 0)):
            results.write(path, results.json_text(Results(**NOTED, rows=[row])))
            assert lacks[name](path, "cpu") == counts[name] - fewer


def test_stages_of_one_row_each_go_on_on_another_machine(tmp_path):
    with flagsaver.flagsaver(another_machine=True, folder=str(tmp_path)):
        told = {one.name: whole.command_of(one, tmp_path, 60.0) for one in whole.STAGES}
    given = [name for name, command in told.items() if "--another_machine" in command]
    assert given == ["report", "cliffs", "sdpa"]
    assert [name for name, command in told.items() if "--resume" not in command] == [
        "latency", "memory",
    ]  # fmt: skip


TOUCHES = """
import jax
from benchmarks import __main__ as entry, whole
entry.parsed(["benchmarks", "whole", "--folder=/nowhere", "--within_s=1"])
assert entry.main(["benchmarks", "whole"]) == whole.LACKING
assert not jax._src.xla_bridge._backends, "a device was touched"
"""


def test_the_command_itself_holds_nothing_on_a_gpu():
    """A child would see it as another program on its card, and mark all that it times."""
    whole_of = [sys.executable, "-c", TOUCHES]
    found = subprocess.run(whole_of, cwd=machine.ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert whole.probed()[0] == "cpu"


def test_a_command_of_the_report_is_stopped_when_its_time_is_up():
    silent = "import signal, time; signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
    command = [sys.executable, "-c", f"{silent}time.sleep(60)"]
    assert whole.ran(command, 1.0, whole.Place(), "a stage") != 0


# Several cards.


TELLS = """
import os, pathlib, sys
told = os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0))
print(*told)
path = pathlib.Path(next(one for one in sys.argv if one.startswith("--json=")).partition("=")[2])
path.parent.mkdir(exist_ok=True, parents=True)
path.write_text("0")
"""


def test_each_card_takes_the_next_stage(tmp_path, monkeypatch, capsys):
    """With its share of the cores, and its output in a file."""
    cores = sorted(os.sched_getaffinity(0))
    here, both = threading.get_native_id(), threading.Barrier(2, timeout=30)

    def lacking(path, platform):
        if path.exists():
            return 0
        both.wait()  # two stages at a time
        return 3

    names = "one", "two", "three", "four"
    stages = [whole.Stage(name, ("run",), name, lacking) for name in names]
    monkeypatch.setattr(whole, "STAGES", stages)
    monkeypatch.setattr(whole, "probed", lambda: ("gpu", "a card", 2))
    monkeypatch.setattr(
        whole,
        "command_of",
        lambda stage, path, seconds, programs: [sys.executable, "-c", TELLS, f"--json={path}"],
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 7")
    of_both = {"folder": str(tmp_path), "compiled": str(tmp_path / "programs")}
    with flagsaver.flagsaver(within_s=540.0, **of_both):
        assert entry.main(["benchmarks", "whole"]) == 0
    shares = {"4": cores[: len(cores) // 2], "7": cores[len(cores) // 2 :]}
    logs = [(tmp_path / f"{stage.name}.log").read_text() for stage in stages]
    assert {log.split()[0] for log in logs[:2]} == {"4", "7"}
    for log in logs:
        card, _, of_card = log.strip().partition(" ")
        assert of_card == str(shares[card])
    assert os.sched_getaffinity(here) == {*cores}
    told = capsys.readouterr().out
    assert "## one: 3 rows to measure on card " in told
    assert [str(tmp_path / one.name / "a_card.json") in told for one in stages] == [True] * 4


def test_a_card_goes_on_with_what_it_began(tmp_path, monkeypatch):
    """A file is of one card: a part that gave its stage to another card would be refused."""
    ran = {}

    def run_stage(stage, path, platform, end, place, programs):
        ran[stage.name] = place.card
        while len(ran) < 2:  # each card takes one before any takes its second
            time.sleep(0.01)
        return 0, False

    names = "one", "two", "three"
    stages = [whole.Stage(name, ("run",), name, lambda *_: 1) for name in names]
    monkeypatch.setattr(whole, "STAGES", stages)
    monkeypatch.setattr(whole, "run_stage", run_stage)
    monkeypatch.setattr(machine, "identity", lambda card: f"card {card}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, card in (("one", "1"), ("two", "0"), ("three", "1")):
        path = tmp_path / name / "a_card.json"
        path.parent.mkdir()
        path.write_text(json.dumps({"machine": f"card {card}"}))
    assert whole.begun_on(path) == "card 1" and whole.begun_on(tmp_path / "none.json") == ""
    whole.run_stages(tmp_path, "a_card", "gpu", 2, time.monotonic() + 540)
    assert ran == {"one": "1", "two": "0", "three": "1"}
    # What another machine began, any card may take.
    ran.clear()
    monkeypatch.setattr(machine, "identity", lambda card: f"another {card}")
    whole.run_stages(tmp_path, "a_card", "gpu", 2, time.monotonic() + 540)
    assert ran.keys() == {*names}


def test_a_part_compiles_before_its_stages_and_again_for_what_it_left(tmp_path, monkeypatch):
    """The next part finds what was compiled; with nothing lacking the programs are removed."""
    done, lacks = [], [5, 0]

    def fill(stages, platform, cards, seconds, kept):
        done.append(("compile", [len(one.in_jax) > 50 for one in stages], cards, round(seconds)))
        return lacks.pop(0)

    def run_stage(stage, path, platform, end, place, programs):
        done.append((stage.name, "--compiled=" in str(whole.command_of(stage, path, 9, programs))))
        return len(lacks), False

    monkeypatch.setattr(whole.compiling, "fill", fill)
    monkeypatch.setattr(whole, "run_stage", run_stage)
    monkeypatch.setattr(whole, "probed", lambda: ("gpu", "a card", 1))
    programs = tmp_path / "programs"
    with flagsaver.flagsaver(folder=str(tmp_path / "new"), within_s=500.0, compiled=str(programs)):
        assert entry.main(["benchmarks", "whole"]) == 0
    ahead_of = {"report", "cliffs", "choices"}
    stages = [(stage.name, stage.name in ahead_of) for stage in whole.STAGES]
    phase = ("compile", [True] * 3, [""], 310)
    assert done == [phase, *stages, phase, *stages]
    assert [*programs.iterdir()] == []


def test_a_stage_whose_rows_wait_for_programs_is_not_started_again(tmp_path, stages):
    """It measured what was compiled: the next phase compiles the rest."""
    ran, _, _ = stages
    end = time.monotonic() + 540
    for programs, starts in ((tmp_path, 1), (None, 2)):
        ran.clear()
        stage = dataclasses.replace(whole.STAGES[0], ahead=lambda *_: whole.compiling.Jobs([]))
        path = tmp_path / f"{starts}.json"
        lacking, refused = whole.run_stage(stage, path, "cpu", end, whole.Place(), programs)
        assert (lacking, refused, len(ran)) == (2 - starts, False, starts)


def test_one_card_runs_on_all_of_the_machine(tmp_path, monkeypatch):
    assert whole.places(1, tmp_path) == [whole.Place()]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7, 8})
    first, second = whole.places(2, tmp_path)
    assert (first.card, first.cores) == ("0", {2, 3})
    assert (second.card, second.cores) == ("1", {5, 7, 8}) and second.folder == tmp_path


def test_a_stage_that_fails_ends_those_beside_it(tmp_path, monkeypatch, capsys):
    """As Ctrl-C does: nothing runs on, and nothing is begun."""
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]

    def of(name):
        def lacking(path, platform):
            if name == "fails":
                while not whole._running:
                    time.sleep(0.01)
                raise KeyboardInterrupt
            return 1

        return whole.Stage(name, ("run",), name, lacking)

    monkeypatch.setattr(whole, "STAGES", [of("waits"), of("fails"), of("late")])
    monkeypatch.setattr(whole, "command_of", lambda *_: waits)
    monkeypatch.setattr(whole, "places", lambda *_: [whole.Place(), whole.Place()])
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        whole.run_stages(tmp_path, "a_card", "gpu", 2, start + 540)
    assert time.monotonic() - start < 50 and not whole._running
    told = capsys.readouterr().out
    assert "## waits: 1 rows" in told and "late" not in told


def test_rows_of_a_second_card_are_put_to_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "FOLDER", tmp_path / "kept")
    of_report = Results(**NOTED, matrix={"float32": 1e12}, rows=[row_of("one", 1.0)])
    of_cliffs = Results(**NOTED | {"machine": "m2", "bandwidth": 1.05e9}, matrix={"float32": 1e12})
    of_cliffs.rows = [row_of("two", 2.0)]
    of_sdpa = Results(**NOTED, rows=[row_of("three", 3.0)])
    for name, found in (("", of_report), ("cliffs", of_cliffs), ("sdpa", of_sdpa)):
        results.write(tmp_path / "new" / name / "a_card.json", results.json_text(found))
    (path,) = document.keep(tmp_path / "new")
    found = results.read(path)
    # Which rows are of which machine is known: no ratio is made of rows of two.
    assert [(row.contender, row.machine) for row in found.rows] == [
        ("one", ""), ("two", "m2"), ("three", ""),
    ]  # fmt: skip
    assert found.rows[1].limit == pytest.approx(1.05e-3)  # by the report's copy
    first, second = found.about["machines"].split("; ")
    assert first.startswith("m1 (a copy 0.00 TB/s") and second.startswith("m2 (a copy")
    results.write(
        tmp_path / "new" / "cliffs" / "a_card.json",
        results.json_text(dataclasses.replace(of_cliffs, bandwidth=2e9)),
    )
    said = "cliffs/a_card.json cannot be merged with a_card.json: a copy ran at 1e"
    with pytest.raises(ResultsError, match=said):
        document.keep(tmp_path / "new")
    other = dataclasses.replace(of_cliffs, commit="def")
    results.write(tmp_path / "new" / "cliffs" / "a_card.json", results.json_text(other))
    with pytest.raises(ResultsError, match="cannot be merged: commit is abc in a_card.json"):
        document.keep(tmp_path / "new")


def test_every_stage_has_files_that_are_kept():
    folders = {stage.folder for stage in whole.STAGES}
    assert folders == {"", *document.PARTS, *document.OTHERS.values()}
    # No two stages write one file: they may run at the same time.
    assert len(folders) == len(whole.STAGES)


def test_a_machine_is_named_by_the_card_that_is_used(monkeypatch):
    monkeypatch.setattr(machine, "own_cards", lambda visible="": ["GPU-b", "GPU-c"])
    monkeypatch.setattr(machine, "nvidia", lambda query, card="0": f"{query} of {card}")
    of_b = machine.identity()
    monkeypatch.setattr(machine, "own_cards", lambda visible="": ["GPU-c"])
    assert machine.identity() != of_b


STAT = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 90 90 4 5 6 0 0\ncpu1 0 0 0 90 0 0 0 0 0 0\nintr 1\n"


def test_only_the_cores_of_this_process_count(tmp_path, monkeypatch):
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(other_load, "PROC", tmp_path)
    ticks = os.sysconf("SC_CLK_TCK")
    for cores, busy in (({0}, 21), ({1}, 0), ({0, 1}, 21)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        assert other_load.busy_seconds() == busy / ticks
