"""When the benchmarks must not speak: of times that scatter or drift, or beside other load."""

import dataclasses
import os
import subprocess
import sys
import time

import pytest

from benchmarks import (
    cases,
    compare,
    demo,
    exponents,
    findings,
    machine,
    noise,
    other_load,
    run,
    side_by_side,
    summary,
    tables,
    timing,
)
from benchmarks.cases import Case
from benchmarks.results import Results, Row
from tests.figures import FACTS, parsed_flags  # noqa: F401

CASE = Case("linear", B=1, H=2, T=64, D=16, dtype="float32")
STEADY = [1.0, 1.01, 1.02, 0.99, 1.0]


def row_of(batches, turns, contender="ato_jax", case=CASE, phase="forward", load=""):
    work = case.traffic(phase), case.operations(phase)
    found = Row(str(case), phase, contender, 1e-6, *work, turns[len(turns) // 2], list(turns))
    return dataclasses.replace(found, spread=summary.spread(batches), load=load)


@pytest.mark.parametrize(
    ("batches", "turns", "load", "said"),
    [
        (STEADY, [1.0, 1.05, 1.09], "", ""),
        ([1.0] * 39 + [9.0], [1.0, 1.0, 1.0], "", ""),
        ([1.0] * 9 + [9.0], [1.0, 1.0, 1.0], "", "p95 is 440% above the median"),
        (STEADY, [1.0, 1.0, 1.11], "", "its first and last turns differ by 11%"),
        (STEADY, [1.11, 1.0, 1.0], "", "its first and last turns differ by 11%"),
        (STEADY, [1.0, 1.5, 1.0], "", ""),
        (STEADY, [1.0], "other programs", "other programs"),
    ],
)
def test_a_row_knows_why_it_is_doubtful(batches, turns, load, said):
    assert row_of(batches, turns, load=load).doubt == said
    assert row_of(batches, turns, load=load).told()["doubt"] == said


def test_nothing_is_made_of_a_doubtful_time():
    """The time is printed and marked; no ratio, share, rate, exponent or crossover is made."""
    steady, busy = row_of(STEADY, [1.0]), row_of(STEADY, [2.0], "SDPA flash", load="a load")
    own = row_of(STEADY, [1.0], "PyTorch, compiled")
    contest = side_by_side.Contest({"cpu": (CASE,), "gpu": ()}, {}, {}, cases.PHASES[:1])

    def told(*rows):
        (table,) = findings.standing(contest, "All")(Results(**FACTS, rows=rows))
        return table.rows[0][2:]

    assert told(steady, own)[-1] == "1.0x" and told(steady, own)[1] != noise.NOISY
    assert told(steady, busy)[-3:] == ["SDPA flash", "≈2000", noise.NOISY]
    doubted = dataclasses.replace(steady, load="a load")
    assert told(doubted, own)[:3] == ["≈1000", noise.NOISY, ""]
    assert told(doubted, own)[-1] == noise.NOISY
    assert findings.steady_ratio(busy, steady) is None and findings.steady_ratio(None, own) is None
    flash = dataclasses.replace(busy, load="")
    for peer, cell in ((busy, noise.NOISY), (flash, "2.0x")):
        (table,) = findings.crossover(contest)(Results(**FACTS, rows=[steady, peer]))
        assert table.rows == [["64", cell]]
    assert findings.steady_ratio(flash, steady) == 2.0
    other = dataclasses.replace(flash, machine="another")
    assert findings.steady_ratio(other, steady) is None
    text = tables.measured([doubted]).text()
    assert "≈1000" in text and "≈ato_jax: a load" in text and "noisy" in text and "%" not in text
    longer = [dataclasses.replace(CASE, T=T) for T in (64, 128, 256)]
    contest = side_by_side.Contest({"cpu": tuple(longer), "gpu": ()}, {}, {})
    rows = [row_of(STEADY, [float(case.T)], case=case) for case in longer]
    assert len(exponents.growths(Results(**FACTS, rows=rows), [contest])) == 1
    rows[1].load = "a load"
    assert exponents.growths(Results(**FACTS, rows=rows), [contest]) == []


class Peer:
    """Stands in for PyTorch's process."""

    def prepare(self, name, case, phase):
        return {"errors": {"out": 1e-3}}

    def time(self, name, seconds):
        return timing.Timing([1e-3] * 3, 3, 1e-5)

    def forget(self):
        pass


def test_a_run_marks_what_it_measured_beside_other_load(monkeypatch, capsys):
    anyone = dict.fromkeys(["one"], type("Any", (), {"takes": staticmethod(lambda case: True)}))
    contest = side_by_side.Contest({}, {}, anyone)

    def measured():
        (row,) = side_by_side.measure(contest, Peer(), CASE, "forward", 1e-3, lambda: 1.0)
        return row

    monkeypatch.setattr(other_load.Watch, "told", lambda self: "")
    assert measured().doubt == "" and run.doubtful([measured()]) == ""
    monkeypatch.setattr(other_load.Watch, "told", lambda self: "a planted load")
    assert measured().load == measured().doubt == "a planted load"
    said = run.doubtful([measured()])
    assert "This machine is busy: a planted load. Close other programs" in said
    scattered = row_of([1.0] * 9 + [9.0], [1.0])
    assert "1 of 2 times are not steady. Close" in run.doubtful([scattered, row_of(STEADY, [1.0])])


# The demo.


def measured_demo(seconds_of, load=""):
    def contender(name):
        return lambda case, phase, _: timing.Timing(seconds_of(name, case.T), 9)

    contenders = {name: contender(name) for name in (demo.OURS, "SDPA flash")}
    plan = demo.Plan(100, 2**40)
    found = demo.measure(plan, contenders, CASE, 1024, lambda T, what: None)
    return found, found.disturbance(load)


def test_the_demo_speaks_of_steady_times_alone():
    def quiet(name, T):
        return [1e-6 * T * (1 if name == demo.OURS else T / 64)] * 9

    found, busy = measured_demo(quiet)
    assert busy == "" and found.doubts == {}
    assert "6.0" not in demo.finding(found.steady()) and "16 times" in demo.finding(found.steady())
    assert measured_demo(quiet, "a planted load")[1] == "a planted load"

    def scatters_at_the_end(name, T):
        held_up = (name, T) == ("SDPA flash", 1024)
        return quiet(name, T)[:7] + [1.0, 1.0] if held_up else quiet(name, T)

    found, busy = measured_demo(scatters_at_the_end)
    assert busy == "" and {key[1:] for key in found.doubts} == {("SDPA flash", 1024)}
    # The sentence ends a length earlier, and the table marks the time.
    assert "8.0 times" in demo.finding(found.steady()) and "16" not in demo.finding(found.steady())
    limits = {phase: {} for phase in cases.PHASES}
    assert demo.table(found.times, limits, found.doubts).count(noise.MARK) == 2

    _, busy = measured_demo(lambda name, T: [1e-3] * 5 + [2e-3] * 4)
    assert busy == "20 of 20 times are not steady"
    calls = []

    def slower_at_the_end(name, T):
        calls.append(T)
        return [2 * one if len(calls) > 20 else one for one in quiet(name, T)]

    _, busy = measured_demo(slower_at_the_end)
    assert busy == "the first case, timed again at the end, differs by 100%"
    assert noise.busy(busy).startswith(f"This machine is busy: {busy}. Close other programs")


# Comparing.


def test_compare_says_nothing_of_doubtful_rows():
    twice = [2 * seconds for seconds in STEADY]
    before, after = row_of(STEADY, [1.0]), row_of(twice, [2.0])

    def compared(one, other):
        files = (Results(**FACTS, rows=[row]) for row in (one, other))
        return compare.compared(["A.json", "B.json"], *files)

    assert compared(before, after)[1] == 1
    for doubted in (dataclasses.replace(after, load="a load"), row_of(twice, [2.0, 2.0, 2.5])):
        for pair in ((before, doubted), (doubted, before)):
            text, count = compared(*pair)
            assert count == 0 and "slower\n" not in text and "faster" not in text
            assert "1 of 1 rows noisy" in text and "This machine is busy" in text
            assert ("2.000" in text, "0.500" in text) == (False, False)


def test_compare_says_nothing_of_a_busy_run():
    """A quarter of doubtful rows, and what held them up may have passed the others unseen."""

    def compared(doubtful):
        slow = [2 * seconds for seconds in STEADY]
        cases_ = [dataclasses.replace(CASE, T=64 << index) for index in range(8)]
        before = [row_of(STEADY, [1.0], case=case) for case in cases_]
        after = [row_of(slow, [2.0], case=case) for case in cases_]
        for row in after[:doubtful]:
            row.load = "a load"
        files = (Results(**FACTS, rows=rows) for rows in (before, after))
        return compare.compared(["A.json", "B.json"], *files)

    text, count = compared(2)
    assert count == 6 and "2 of 8 rows noisy" in text and "This machine is busy" in text
    text, count = compared(3)
    assert count == 0 and "2.000" not in text and "8 of 8 rows noisy" in text
    assert "0 of 8 rows slower" in text


# What runs beside.


def test_other_processes_on_the_gpu(monkeypatch):
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        listed = f"GPU-0, {os.getpid()}, python\nGPU-0, {stranger.pid}, a, b\nGPU-0, 999999999, c"
        monkeypatch.setattr(
            machine, "nvidia_smi",
            lambda *asked: "GPU 0: a card (UUID: GPU-0)" if asked == ("-L",) else listed,
        )  # fmt: skip
        monkeypatch.setattr(other_load, "_seen_on_gpu", (-1e9, ""))
        # The stranger is a child of this process, and so none.
        assert other_load.on_gpu() == ""
        monkeypatch.setattr(other_load, "family", lambda: {os.getpid(): 0.0})
        assert other_load.on_gpu() == ""  # asked a moment ago
        monkeypatch.setattr(other_load, "_seen_on_gpu", (-1e9, ""))
        said = f"another process on the GPU: a, b (process {stranger.pid})"
        assert other_load.on_gpu() == said
        assert said in other_load.Watch("gpu").told()
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize(("others", "seen"), [(0.1, False), (1.5, True)])
def test_what_other_programs_take_of_the_cores(others, seen, monkeypatch):
    """Two cores, both in use: the clocks are what the test says they are."""
    now, busy, own = [0.0], [100.0], [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(other_load, "busy_seconds", lambda: busy[0])
    monkeypatch.setattr(other_load, "family", lambda: {1: own[0]})
    monkeypatch.setattr(other_load.byte_limit, "threads", lambda: 2)
    watch = other_load.Watch("cpu")
    assert watch.others() is None  # too short to say
    now[0], own[0], busy[0] = 10.0, 10.0 + 4.0, 100.0 + 4.0 + 10 * others
    assert watch.others() == pytest.approx(others)
    said = f"other programs kept {others:.1f} of 2 cores busy"
    assert watch.told() == (said if seen else "")
    # Where cores are left for both, as beside a GPU, nothing is disturbed.
    monkeypatch.setattr(other_load, "on_gpu", lambda: "")
    monkeypatch.setattr(other_load.byte_limit, "threads", lambda: 4)
    watch._platform = "gpu"
    assert watch.told() == ""


@pytest.mark.skipif(not other_load.PROC.joinpath("stat").exists(), reason="there is no /proc")
def test_what_a_child_computes_is_this_programs_own():
    code = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    before = other_load.busy_seconds()
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        end = time.monotonic() + 30
        while other_load.family().get(child.pid, 0.0) < 0.1 and time.monotonic() < end:
            time.sleep(0.05)
        own = other_load.family()
        assert own[child.pid] >= 0.1 and os.getpid() in own and 1 not in own
        assert other_load.busy_seconds() - before >= 0.1
    finally:
        child.kill()
        child.wait()
