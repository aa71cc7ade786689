"""Compiled programs on disk: what one part of a report compiled, the next one loads."""

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import (
    ahead,
    choices,
    cliff_rows,
    cliffs,
    compiling,
    machine,
    peers,
    results,
    run,
    side_by_side,
    store,
    suites,
)
from benchmarks.cases import PHASES
from benchmarks.cliff_rows import Step
from benchmarks.results import NO_TIME_LEFT, Results
from tests import test_benchmark_cliffs
from tests.figures import FACTS, parsed_flags  # noqa: F401
from tests.test_benchmark_ahead import COMPILES, FILLS, LINEAR, SMOKE
from tests.test_benchmark_suites import Peer

JOB = (0, LINEAR, "forward", "ato_jax")
TINY = choices.ROWS["cpu"][0]


@pytest.fixture
def kept(tmp_path):
    return store.opened(tmp_path / "programs", "cpu")


def test_a_store_has_what_was_put_there(kept, tmp_path, monkeypatch):
    job = ahead.key(JOB)
    assert not kept.has(job) and kept.get(job) is None
    kept.put(job, {"program": b"1"})
    assert kept.has(job) and kept.get(job) == {"program": b"1"}
    # The number of a contest is no part of a row's name.
    assert ahead.key((3, *JOB[1:])) == job == ahead.named(*JOB[1:])
    other = dataclasses.replace(LINEAR, T=LINEAR.T + 1)
    assert not kept.has(ahead.named(other, *JOB[2:]))
    # A row that has no program is answered, too.
    kept.put(ahead.named(other, *JOB[2:]), None)
    assert kept.has(ahead.named(other, *JOB[2:]))
    # Another process on this machine finds the same folder, and another state does not.
    root = tmp_path / "programs"
    assert store.opened(root, "cpu") == kept and store.opened(root, "gpu") != kept
    with monkeypatch.context() as patched:
        patched.setattr(machine, "commit", lambda: "another")
        assert store.opened(root, "cpu") != kept
    assert kept.folder.stat().st_mode & 0o077 == 0
    kept.remove()
    assert not kept.has(job) and not kept.folder.exists()


def test_a_file_that_is_not_whole_is_no_program(kept, monkeypatch):
    job = ahead.key(JOB)
    kept.put(job, {"program": b"1" * 1000})
    (path,) = (one for one in kept.folder.iterdir() if one.name != store.STATE)
    path.write_bytes(path.read_bytes()[:100])
    assert kept.get(job) is None and not kept.has(job)

    def full(answer, file):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(pickle, "dump", full)
    kept.put(job, {})
    assert [one.name for one in kept.folder.iterdir()] == [store.STATE]


@pytest.fixture
def stand_in(monkeypatch):
    """Two processes that compile in a moment."""
    monkeypatch.setattr(peers.Peer, "COMMAND", (sys.executable, "-c", FILLS))

    def made(program=COMPILES, cards=("",)):
        helpers = ahead.Ahead("cpu", ["", "smoke"], 2, cards)
        for one in helpers._workers:
            one._command = (sys.executable, "-c", program)
        return helpers

    return made


def test_a_second_part_compiles_only_what_the_first_one_left(stand_in, kept, capsys):
    jobs = [(0, dataclasses.replace(LINEAR, T=T), "forward", "ato_jax") for T in (16, 32, 48)]
    warm = [[(LINEAR, "forward", "fla")]]
    with stand_in() as helpers:
        assert helpers.fill(jobs[:2], warm, 60, kept) == 0
        assert len(helpers._warmers) == 1
    assert "0 of 2 programs were compiled before, 2 are to be compiled" in capsys.readouterr().out
    with stand_in() as helpers:
        assert helpers.fill(jobs, warm, 60, kept) == 0
        assert helpers._warmers == []
    assert "2 of 3 programs were compiled before, 1 are to be compiled" in capsys.readouterr().out
    assert [kept.get(ahead.key(job)) for job in jobs] == ["compiled"] * 3


# The second job takes for ever.
SLOW = """
import json, pickle, sys, time
for line in sys.stdin:
    if json.loads(line)["case"]["T"] == 32:
        time.sleep(60)
    sys.stdout.buffer.write(pickle.dumps("compiled"))
    sys.stdout.flush()
"""


def test_what_the_time_is_up_for_is_compiled_by_the_next_part(stand_in, kept):
    jobs = [(0, dataclasses.replace(LINEAR, T=T), "forward", "ato_jax") for T in (16, 32, 48)]
    with stand_in(SLOW) as helpers:
        assert helpers.fill(jobs, [], 3, kept) == 1
    # Its worker was ended: that is no answer.
    time.sleep(0.5)
    assert [kept.has(ahead.key(job)) for job in jobs] == [True, False, True]


def test_a_worker_that_is_killed_costs_its_own_job(stand_in, kept):
    """The process that times compiles that row itself."""
    jobs = [(0, dataclasses.replace(LINEAR, T=T), "forward", "ato_jax") for T in (16, 32, 48)]
    with stand_in(SLOW) as helpers:

        def kill():
            while not sum(kept.has(ahead.key(job)) for job in jobs) == 2:
                time.sleep(0.05)
            for one in [*helpers._workers]:
                if one._process:
                    os.kill(one._process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        assert helpers.fill(jobs, [], 30, kept) == 0
        killer.join()
    assert [kept.get(ahead.key(job)) for job in jobs] == ["compiled", None, "compiled"]
    assert kept.has(ahead.key(jobs[1]))


SHOWS_CARD = """
import os, pickle, sys
for line in sys.stdin:
    sys.stdout.buffer.write(pickle.dumps(os.environ.get("CUDA_VISIBLE_DEVICES")))
    sys.stdout.flush()
"""


def test_processes_take_the_cards_in_turns(stand_in, kept):
    with stand_in(SHOWS_CARD, cards=("4", "7")) as helpers:
        assert [one.ask(JOB) for one in helpers._workers] == ["4", "7"]


def test_programs_of_another_process_are_timed_by_a_run_that_compiles_nothing(kept, monkeypatch):
    """With two processes; the rows whose programs are not there wait for a later run."""
    monkeypatch.setattr(compiling, "REPORT", "smoke")
    monkeypatch.setattr(ahead, "workers", lambda: 2)
    wanted = compiling.of_report(set(), "cpu")
    ours_alone = [job for job in wanted.in_jax if job[3] == "ato_jax"]
    assert len(ours_alone) == 4
    late = next(job for job in ours_alone if job[1] == LINEAR and job[2] == PHASES[1])
    ours_alone.remove(late)
    late = late[1:]
    of_rows = [choices.job_of(TINY, PHASES[0], by_name=False)]
    stages = [compiling.Jobs(ours_alone), compiling.Jobs(of_rows)]
    assert compiling.fill(stages, "cpu", [""], 20, kept) == 4  # too short to begin
    assert compiling.fill(stages, "cpu", [""], 120, kept) == 0
    monkeypatch.setattr(ahead, "Ahead", lambda *_: pytest.fail("begun"))
    assert compiling.fill(stages, "cpu", [""], 120, kept) == 0
    # A row of `cliffs` or `choices`.
    group = TINY, PHASES[0]
    (ready,), absent = choices.in_store([group, (TINY, PHASES[1])], kept, by_name=False)
    assert ready == group and absent == {(TINY, PHASES[1])}
    row = choices.unpacked(kept.get(of_rows[0]))
    assert isinstance(cliffs.compared(*group, row, "cpu"), cliffs.Ready)
    # Those of the report.
    contests = [
        dataclasses.replace(one, in_jax={"ato_jax": one.in_jax["ato_jax"]}, in_torch={})
        for one in SMOKE.contests
        if "ato_jax" in one.in_jax
    ]
    plan, found = side_by_side.Plan(), Results(**FACTS)
    plan.take(contests, found, kept)
    assert plan.late == {late} and plan.programs.keys() == {job[1:] for job in ours_alone}
    monkeypatch.setattr(side_by_side, "compiled", lambda *_: pytest.fail("compiled here"))
    for contest in contests:
        meeting = side_by_side.Meeting(contest, Peer(), found, time.monotonic() + 60, plan)
        for case, phase in meeting.groups():
            (measured,) = meeting.measure(case, phase)
            reason = NO_TIME_LEFT if (case, phase, "ato_jax") == late else ""
            assert measured.unavailable == reason and bool(measured.seconds) != bool(reason)
    assert len(found.rows) == 4


def test_cliffs_and_choices_leave_what_is_not_compiled(tmp_path, kept, monkeypatch, capsys):
    rows = [dataclasses.replace(TINY, T=T) for T in (16, 17, 18)]
    steps = tuple(Step("lengths", f"T {row.T}", row, rows[0]) for row in rows[1:])
    monkeypatch.setitem(cliff_rows.STEPS, "cpu", steps)
    monkeypatch.setattr(cliffs.peers, "Peer", test_benchmark_cliffs.Peer)
    monkeypatch.setattr(run, "introduced", lambda *_: dict(FACTS))
    monkeypatch.setattr(cliffs, "run_rows", lambda groups, calls, *_: timed.append(
        ([step.row.T for step, _ in groups], [row.T for row, _ in calls.programs])
    ) or True)  # fmt: skip
    timed = []
    for row in rows[:2]:
        kept.put(choices.job_of(row, PHASES[0], by_name=False), ["programs"])
    path = tmp_path / "figures.json"
    flags_of = {"json": str(path), "forward_only": True, "compiled": str(kept.folder)}
    with flagsaver.flagsaver(suite=["cliffs"], **flags_of):
        assert entry.main(["benchmarks", "run"]) == 0
    assert timed == [([17], [16, 17])]
    (left,) = results.read(path).rows
    assert left.case == str(rows[2]) and left.unavailable == NO_TIME_LEFT
    monkeypatch.setitem(choices.ROWS, "cpu", tuple(rows))
    measured = []
    found = choices.Found(str(rows[0]), "attention", PHASES[0], "xla", {}, {}, {}, {}, {})
    monkeypatch.setattr(
        choices, "_measured", lambda row, *_: measured.append(row.T) or
        dataclasses.replace(found, row=str(row), seconds={choices.CHOSEN: 1.0, "xla": 1.0}),
    )  # fmt: skip
    kept.put(choices.job_of(rows[1], PHASES[0]), ["programs"])
    path.unlink()
    with flagsaver.flagsaver(suite=["choices"], **flags_of):
        assert entry.main(["benchmarks", "run"]) == 1
    assert measured == [17] and "2 rows were not reached in time" in capsys.readouterr().out
    with flagsaver.flagsaver(suite=["training"], **flags_of):
        assert entry.main(["benchmarks", "run"]) == 2
    # Programs of other sources are refused, and so is a folder without any.
    with flagsaver.flagsaver(suite=["choices"], **flags_of):
        with monkeypatch.context() as patched:
            patched.setattr(machine, "commit", lambda: "another")
            assert entry.main(["benchmarks", "run"]) == 2
        kept.remove()
        assert entry.main(["benchmarks", "run"]) == 2


def test_jobs_of_all_stages_advance_at_one_rate():
    parts = [[{"row": f"a{n}"} for n in range(4)], [{"row": f"b{n}"} for n in range(2)], []]
    order = [job["row"] for job in compiling.mixed(parts)]
    assert order == ["a0", "b0", "a1", "a2", "b1", "a3"]
    # A row's options survive JSON.
    for row in {*choices.ROWS["gpu"], *(step.row for step in cliff_rows.STEPS["gpu"])}:
        told = ahead.question(choices.job_of(row, PHASES[0]))
        assert choices.row_of(json.loads(json.dumps(told))["row"]) == row


TOUCHES = """
import pathlib, sys, jax
from benchmarks import __main__ as entry, ahead, choices, compiling, store
entry.parsed(["benchmarks", "whole"])
ahead.workers = lambda: 1
kept = store.opened(pathlib.Path(sys.argv[1]), "cpu")
compiling.of_report(set(), "gpu"), compiling.of_cliffs(set(), "gpu")
compiling.of_choices(choices.ROWS["gpu"], set())
report = next(job for job in compiling.of_report(set(), "cpu").in_jax if job[3] == "ato_jax")
row = choices.job_of(choices.ROWS["cpu"][0], "forward")
assert compiling.fill([compiling.Jobs([report, row])], "cpu", [""], 120, kept) == 0
assert kept.get(ahead.key(report)) and kept.get(row)
assert not jax._src.xla_bridge._backends, "a device was touched"
"""


def test_whole_touches_no_device_while_others_compile(tmp_path):
    """What held a GPU would be another program's beside all that is timed."""
    command = [sys.executable, "-c", TOUCHES, str(tmp_path)]
    found = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_every_stage_that_compiles_has_jobs():
    wanted = compiling.of_report(set(), "gpu")
    assert len(wanted.in_jax) > 200 and len(wanted.in_torch) > 5
    assert len(compiling.of_cliffs(set(), "gpu").in_jax) > 272
    assert {job[2] for job in wanted.in_jax} == {*PHASES}
    assert suites.named(compiling.REPORT)
