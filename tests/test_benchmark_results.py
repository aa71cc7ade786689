"""Figures in files: their statistics, what is kept of a run that died, what compares as slower."""

import contextlib
import csv
import dataclasses
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import (
    byte_limit,
    compare,
    linear,
    linear_torch,
    ours,
    peers,
    results,
    run,
    side_by_side,
    suites,
    summary,
    timing,
)
from benchmarks.cases import Case
from tests.figures import FACTS, parsed_flags  # noqa: F401

CASE = Case("linear", B=1, H=2, T=64, D=16, dtype="float32")
OTHER = dataclasses.replace(CASE, causal=True)
NOTED = FACTS | {"machine": "m1", "commit": "abc"}


@pytest.mark.parametrize("count", [2, 3, 10, 601])
def test_statistics_are_numpys(count):
    samples = np.random.default_rng(count).lognormal(size=count)
    found = summary.spread(samples.tolist())
    assert found.count == count
    np.testing.assert_allclose(found.mean, samples.mean(), rtol=1e-12)
    np.testing.assert_allclose(found.deviation, samples.std(ddof=1), rtol=1e-12)
    for percent in (25, 50, 75, 90, 95, 99):
        wanted = np.percentile(samples, percent)
        np.testing.assert_allclose(getattr(found, f"p{percent}"), wanted, rtol=1e-12)


def test_the_hosts_time_is_that_of_calls_and_not_of_waiting():
    calls = []
    found = timing.on_host(lambda: calls.append(1), lambda _: time.sleep(0.01), 0.0)
    assert len(found.batches) == timing.FEWEST_BATCHES and 0 < max(found.batches) < 1e-3
    assert len(calls) == (2 + timing.FEWEST_BATCHES) * timing.HOST_CALLS
    assert found.calls == timing.FEWEST_BATCHES * timing.HOST_CALLS and found.host == found.seconds


def test_a_rows_figures_by_hand():
    # 10 ms for 2e9 bytes and 3e10 operations: 200 GB/s, 3 TFLOP/s, of a copy's 400 GB/s half.
    row = results.Row("case", "forward", "one", 2e9 / 400e9, 2e9, 3e10, 0.01)
    told = row.told()
    assert told["GB/s"] == pytest.approx(200) and told["TFLOP/s"] == pytest.approx(3)
    assert told["reached"] == pytest.approx(0.5)
    late = results.Row("case", "forward", "one", 1.0, 1.0, 1.0, unavailable="no kernel").told()
    assert {late[name] for name in ("GB/s", "TFLOP/s", "reached", "seconds", "spread")} == {None}


# Rows of samples, and files of rows.


def row_of(turns, case="case", phase="forward", contender="ato_jax"):
    """As a run makes it of the batches of its turns."""
    medians = [float(np.median(turn)) for turn in turns]
    batches = [float(one) for turn in turns for one in turn]
    found = results.Row(case, phase, contender, 1e-4, 1e5, 1e6)
    found.turns, found.seconds = medians, float(np.median(medians))
    found.spread, found.errors = summary.spread(batches), {"out": 1e-3}
    return found


def drawn(seed, seconds=1e-3, batch_noise=0.01, turn_noise=0.005, **names):
    """Batches that scatter and turns that drift, with now and then a batch that was held up."""
    generator = np.random.default_rng(seed)
    turns = []
    for _ in range(side_by_side.TURNS):
        drift = 1 + turn_noise * generator.normal()
        batches = seconds * drift * np.exp(batch_noise * generator.normal(size=50))
        turns.append(batches * np.where(generator.random(50) < 0.02, 5, 1))
    return row_of(turns, **names)


def refused(reason, **names):
    found = row_of([[1.0, 1.0]], **names)
    return dataclasses.replace(found, seconds=None, turns=[], spread=None, unavailable=reason)


def file_of(path, rows, **facts):
    results.write(path, results.json_text(results.Results(**NOTED | facts, rows=rows)))
    return str(path)


def test_a_file_is_read_back_as_it_was_written(tmp_path):
    rows = [drawn(0), refused("no kernel", contender="other")]
    more = {"matrix": {"float32": 1e12}, "about": {"CUDA": "13"}, "suites": {"smoke": 2.5}}
    rows[0].scratch, rows[0].held, rows[0].host, rows[0].picked = 17, 64, 1e-5, "FLASH"
    path = tmp_path / "folder" / "figures.json"
    file_of(path, rows, **more)
    assert results.read(path) == results.Results(**NOTED, rows=rows, **more)
    assert rows[0].peak == 17 + 64 and rows[1].peak is None
    # Nothing is left of writing it.
    assert list(path.parent.iterdir()) == [path]


def test_the_table_of_values_has_a_line_a_row(tmp_path):
    rows = [drawn(0), refused("no kernel, it says", contender="other")]
    told = results.csv_text(results.Results(**NOTED, rows=rows))
    one, other = csv.DictReader(told.splitlines())
    assert (one["device"], one["jax"], one["contender"]) == ("a card", "2", "ato_jax")
    for name in ("mean", "deviation", "p50", "p90", "p95", "p99"):
        assert float(one[name]) == getattr(rows[0].spread, name)
    assert float(one["seconds"]) == rows[0].seconds and float(one["error of out"]) == 1e-3
    assert float(one["GB/s"]) == rows[0].throughput / 1e9 and one["error of dq"] == ""
    assert other["unavailable"] == "no kernel, it says" and other["p99"] == other["seconds"] == ""
    assert results.csv_text(results.Results(**NOTED)).startswith("device,")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: [told], "it is no object"),
        (lambda told: told | {"rows": {}}, "rows is no list"),
        (lambda told: told | {"bandwidth": "1"}, "bandwidth is no number above 0"),
        (lambda told: told | {"jax": 2}, "jax is no text"),
        (lambda told: told | {"matrix": {"a": "1"}}, "matrix has no numbers by name"),
        (lambda told: told | {"about": {"a": 1}}, "about has no texts by name"),
        (lambda told: with_row(told, scratch=-1), "row 1: scratch is no number from 0 on"),
        (lambda told: {"rows": told["rows"]}, "it lacks device, ato_jax, jax, torch, bandwidth"),
        (lambda told: told | {"form": 99}, "it is of form 99, of later benchmarks"),
        (lambda told: told | {"rows": [1]}, "row 1 is no object"),
        (lambda told: with_row(told, seconds="1"), "row 1: a time is no number above 0"),
        (lambda told: with_row(told, seconds=math.nan), "row 1: a time is no number above 0"),
        (lambda told: with_row(told, turns=[]), "row 1: a time is no number above 0"),
        (lambda told: with_row(told, turns=1), "row 1: turns is no list"),
        (lambda told: with_row(told, seconds=None), "row 1 has neither a time nor a reason"),
        (lambda told: with_row(told, spread=None), "row 1: spread is no object"),
        (lambda told: with_row(told, spread={"p25": 1}), "row 1: spread lacks count, mean"),
        (lambda told: with_row(told, case=1), "row 1: case is no text"),
        (lambda told: with_row(told, limit=0), "row 1: limit is no number above 0"),
        (lambda told: with_row(told, errors={"out": ""}), "row 1: errors are no numbers"),
    ],
)
def test_a_file_of_another_form_is_refused(change, said, tmp_path):
    path = tmp_path / "figures.json"
    told = json.loads(results.json_text(results.Results(**NOTED, rows=[drawn(0)])))
    path.write_text(json.dumps(change(told)))
    with pytest.raises(results.ResultsError, match=f"is not a file of these .* figures: {said}"):
        results.read(path)


def with_row(told, **more):
    return told | {"rows": [told["rows"][0] | more]}


# A contest in which a stand-in answers for PyTorch's process.


class Peer:
    """Times in a moment whatever it is asked to, and remembers what that was."""

    def __init__(self, *_):
        self.asked = []

    def prepare(self, name, case, phase):
        return "no kernel" if name == "refuses" else {"errors": {"out": 1e-3}}

    def time(self, name, seconds):
        if name not in self.asked:
            self.asked.append(name)
        return timing.Timing([1e-3, 2e-3, 3e-3], 3, 1e-5)

    def forget(self):
        pass


@pytest.fixture
def peer(monkeypatch):
    stand_in = Peer()
    monkeypatch.setattr(peers, "Peer", lambda _: contextlib.nullcontext(stand_in))
    monkeypatch.setattr(run, "introduced", lambda *_: NOTED)
    return stand_in


def contest_of(*names):
    anyone = linear_torch.Contender(lambda case: True, None)
    return side_by_side.Contest({"cpu": (CASE, OTHER)}, {}, dict.fromkeys(names, anyone))


def measure_all(meeting):
    for case, phase in meeting.groups():
        meeting.measure(case, phase)


def suite_of(contest, tell=measure_all):
    return suites.Suite("a suite", "of a test", 100, (contest,), tell=tell)


def only_suite(monkeypatch, contest):
    """Whatever suite is named is this contest."""
    monkeypatch.setattr(suites, "named", lambda name: (suite_of(contest),))


def test_all_turns_are_pooled(peer):
    (row,) = side_by_side.measure(contest_of("one"), peer, CASE, "forward", 1e-3, lambda: 1.0)
    assert row.turns == [2e-3] * side_by_side.TURNS and row.seconds == 2e-3
    assert row.spread == summary.spread([1e-3, 2e-3, 3e-3] * side_by_side.TURNS)
    assert (row.traffic, row.operations) == (CASE.traffic("forward"), CASE.operations("forward"))


def test_a_run_that_dies_leaves_its_rows_and_is_resumed(peer, tmp_path, capsys):
    path, table = tmp_path / "figures.json", tmp_path / "figures.csv"
    contest, groups = contest_of("one", "refuses"), []

    def dies_in_the_third_group(meeting):
        prepare = peer.prepare

        def counted(name, case, phase):
            if name == "one":
                groups.append((str(case), phase))
            if len(groups) == 3:
                raise KeyboardInterrupt
            return prepare(name, case, phase)

        peer.prepare = counted
        try:
            measure_all(meeting)
        finally:
            peer.prepare = prepare

    with flagsaver.flagsaver(json=str(path), csv=str(table)):
        with pytest.raises(KeyboardInterrupt):
            run.hold([suite_of(contest, dies_in_the_third_group)])
        kept = results.read(path)
        assert [row.key for row in kept.rows] == [
            (str(CASE), phase, name)
            for phase in ("forward", "forward + backward")
            for name in ("one", "refuses")
        ]
        assert len(table.read_text().splitlines()) == 1 + len(kept.rows)
        seen = []
        peer.prepare = lambda name, case, phase: seen.append((name, case)) or {"errors": {}}
        with flagsaver.flagsaver(resume=True):
            assert run.hold([suite_of(contest)]) == 0
            whole = results.read(path)
            # What refuses the case has been asked, and the rest of the case is there.
            assert {case for _, case in seen} == {OTHER} and len(seen) == 4
            assert whole.rows[:4] == kept.rows and len(whole.rows) == 8
            assert len(table.read_text().splitlines()) == 1 + 8
            # A contender more is all that is missing then.
            seen.clear()
            assert run.hold([suite_of(contest_of("one", "refuses", "two"))]) == 0
            assert [name for name, _ in seen] == ["two"] * 4
    assert f"8 rows are from {path}" in capsys.readouterr().out


def test_no_row_is_left_out_while_there_is_time(peer, tmp_path, monkeypatch):
    """A suite may take far more than it was thought to; then the last one is what there is no time
    for.
    """
    path = tmp_path / "figures.json"
    first, last = (
        suites.Suite(name, "of a test", seconds, (contest_of(name),), tell=measure_all)
        for name, seconds in (("first", 0.01), ("last", 1e6))
    )
    now, prepare = [0.0], peer.prepare
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(*job):
        now[0] += 0.25
        return prepare(*job)

    for within, lost in ((60, set()), (0.9, {"last"})):
        peer.prepare = slow if lost else prepare
        with flagsaver.flagsaver(json=str(path), within_s=within):
            assert run.hold([first, last]) == 0
        rows = results.read(path).rows
        assert [row.contender for row in rows] == ["first"] * 4 + ["last"] * 4
        late = {row.contender for row in rows if row.unavailable == results.NO_TIME_LEFT}
        assert late == lost


def test_what_there_was_no_time_for_is_measured_on_resuming(peer, tmp_path, monkeypatch):
    late = refused(results.NO_TIME_LEFT, case=str(CASE), contender="one")
    earlier = refused("no kernel", case=str(CASE), contender="refuses")
    path = tmp_path / "figures.json"
    file_of(path, [late, earlier], bandwidth=5e8)
    monkeypatch.setattr(run, "introduced", lambda *_: NOTED)
    with flagsaver.flagsaver(json=str(path), resume=True):
        assert run.hold([suite_of(contest_of("one", "refuses"))]) == 0
    found = results.read(path)
    assert peer.asked == ["one"] and len(found.rows) == 8
    assert found.rows[0] == earlier
    # One file's byte limits are of one bandwidth.
    assert found.bandwidth == 5e8
    assert {round(row.traffic / row.limit) for row in found.rows[1:]} == {round(5e8)}


@pytest.mark.parametrize("name", results.SAME)
def test_another_machine_or_version_is_not_resumed(name, peer, tmp_path, monkeypatch, caplog):
    path = tmp_path / "figures.json"
    file_of(path, [drawn(0)], **{name: "another"})
    before = path.read_text()
    only_suite(monkeypatch, contest_of("one"))
    with flagsaver.flagsaver(json=str(path), resume=True):
        assert entry.main(["benchmarks", "linear"]) == 2
    said = f"cannot be resumed: {name} is another there and {NOTED[name]} here"
    assert said in caplog.text and "Traceback" not in caplog.text
    assert path.read_text() == before and peer.asked == []


# What compares as slower.


def counted(before, after):
    def files(rows):
        return results.Results(**NOTED, rows=rows)

    return compare.compared(["A.json", "B.json"], files(before), files(after))


def test_a_planted_slowdown_is_seen_and_chance_is_not():
    names = [f"contender {number}" for number in range(40)]
    before = [drawn(number, contender=name) for number, name in enumerate(names)]
    again = [drawn(100 + number, contender=name) for number, name in enumerate(names)]
    planted = [drawn(200 + number, 1.1e-3, contender=name) for number, name in enumerate(names)]
    assert counted(before, again)[1] == 0
    text, count = counted(before, planted)
    assert count == len(names) and text.count("slower") == len(names) + 1
    text, count = counted(planted, before)
    assert count == 0 and text.count("faster") == len(names)


def test_what_scatters_needs_more():
    wide = {"batch_noise": 0.2, "turn_noise": 0.05}
    for seed in range(40):
        before = drawn(seed, **wide)
        assert not compare.slower(before, drawn(100 + seed, **wide))
        assert not compare.slower(before, drawn(200 + seed, 1.1e-3, **wide))
        assert compare.slower(before, drawn(200 + seed, 5e-3, **wide))
    # Without any scatter, what is below the floor is a machine's own.
    steady = [row_of([[seconds] * 9] * 3) for seconds in (1.0, 1.04, 1.06)]
    assert [compare.slower(steady[0], row) for row in steady] == [False, False, True]
    # Turns that drifted say so, though their batches agree.
    drifted = row_of([[1.0] * 9, [1.0] * 9, [1.2] * 9])
    assert compare.width(drifted) == pytest.approx(0.2)
    assert not compare.slower(drifted, row_of([[1.19] * 9] * 3))
    assert compare.slower(drifted, row_of([[1.21] * 9] * 3))
    # Both sides' count.
    assert not compare.slower(drifted, row_of([[1.2] * 9, [1.21] * 9, [1.3] * 9]))
    # So do batches, where the turns agree.
    batches = row_of([[0.9] * 3 + [1.0] * 5 + [1.1] * 2] * 3)
    assert compare.width(batches) == pytest.approx(0.2)
    assert compare.width(row_of([[1.0] * 19 + [9.0]] * 3)) == 0


def test_rows_of_one_file_are_named_and_not_counted(tmp_path, capsys):
    both = {"case": str(CASE)}
    before = [
        drawn(0, **both),
        drawn(1, contender="gone", **both),
        drawn(2, contender="breaks", **both),
    ]
    after = [
        drawn(3, 1.2e-3, **both),
        refused("out is wrong", contender="breaks", **both),
        refused("no kernel", contender="new", **both),
    ]
    names = [
        file_of(tmp_path / "A.json", before),
        file_of(tmp_path / "B.json", after, jax="4"),
    ]
    assert entry.main(["benchmarks", "compare", *names]) == 1
    out = capsys.readouterr().out
    in_a, in_b = out.split("In A alone:")[1].split("In B alone:")
    assert f"  {CASE}, forward, gone\n" in in_a
    assert f"  {CASE}, forward, breaks; there: out is wrong\n" in in_a
    assert f"  {CASE}, forward, new\n" in in_b
    assert "jax 2 in A, 4 in B" in out and "1 of 1 rows slower by more than the noise" in out
    (line,) = [line for line in out.splitlines() if line.endswith("slower")]
    ratio = after[0].seconds / before[0].seconds
    assert line.split()[0] == "ato_jax" and f"{ratio:.3f}" in line and line.count("%") == 2
    assert entry.main(["benchmarks", "compare", names[0], names[0]]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "a card"}, "no time of the same case in common"),
        ({"device": "another card"}, "times of two devices are not compared"),
    ],
)
def test_what_cannot_be_compared(change, said, tmp_path, caplog):
    names = [
        file_of(tmp_path / "A.json", [drawn(0, case=str(CASE))]),
        file_of(tmp_path / "B.json", [drawn(0, case=str(OTHER))], **change),
    ]
    assert entry.main(["benchmarks", "compare", *names]) == 2
    assert said in caplog.text


# What is asked wrongly.


def test_files_that_cannot_be_read(tmp_path, caplog):
    good = file_of(tmp_path / "good.json", [drawn(0)])
    broken, binary = tmp_path / "broken.json", tmp_path / "binary.json"
    broken.write_text('{"rows": [')
    binary.write_bytes(b"\xff\xfe\x00")
    for bad, said in (
        ([good, str(tmp_path / "absent.json")], "absent.json cannot be read: No such file"),
        ([good, str(tmp_path)], "cannot be read: Is a directory"),
        ([str(broken), good], "broken.json is not JSON: Expecting value"),
        ([str(binary), good], "binary.json is not JSON"),
        ([good], f"takes two files, A.json B.json; got {good}"),
        ([], "takes two files, A.json B.json; got none"),
    ):
        caplog.clear()
        assert entry.main(["benchmarks", "compare", *bad]) == 2
        assert said in caplog.text and len(caplog.records) == 1
        assert "\n" not in caplog.records[0].getMessage()


def test_flags_that_choose_nothing_or_no_file(peer, tmp_path, caplog, monkeypatch):
    only_suite(monkeypatch, contest_of("one"))
    a_file = tmp_path / "file"
    a_file.write_text("")
    for values, said in (
        ({"case": "T7"}, f"No case contains --case='T7': {CASE}; {OTHER}"),
        ({"peer": ["one", "SDPA"]}, "No peer contains --peer='SDPA': one"),
        ({"json": str(tmp_path), "resume": True}, "cannot be read: Is a directory"),
        ({"json": str(tmp_path)}, "cannot be written: it is not a file"),
        ({"csv": str(a_file / "figures.csv")}, "figures.csv cannot be written: "),
    ):
        caplog.clear()
        with flagsaver.flagsaver(**values):
            assert entry.main(["benchmarks", "linear"]) == 2
        assert said in caplog.text and peer.asked == []


def test_flags_of_no_meaning_are_one_line_and_status_2(capsys):
    for given, said in (
        (["--resume"], "--resume goes on with the file that --json names"),
        (["--jsonn=a.json"], "Unknown command line flag 'jsonn'"),
        (["--within_s=-1"], "within_s"),
    ):
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
            entry.parsed(["benchmarks", "linear", *given])
        told = capsys.readouterr().err
        assert ended.value.code == 2 and said in told and told.count("\n") == 1


def test_one_real_case_is_measured_resumed_and_compared(tmp_path, monkeypatch, capsys):
    """All of it but PyTorch's process."""
    path = Path(tmp_path / "figures.json")
    monkeypatch.setattr(byte_limit, "CPU_COPY_BYTES", 1 << 22)
    monkeypatch.setattr(side_by_side, "TURN_SECONDS", 0.0)
    monkeypatch.setitem(linear.CASES, "cpu", (CASE,))
    monkeypatch.setattr(peers, "Peer", lambda _: contextlib.nullcontext(Peer()))
    monkeypatch.setattr(run, "introduced", lambda *_: NOTED)
    with flagsaver.flagsaver(json=str(path), peer=["ato_jax"], case="T64"):
        assert entry.main(["benchmarks", "linear"]) == 0
        first = results.read(path)
        assert [row.contender for row in first.rows] == ["ato_jax"] * 2
        assert set(first.rows[1].errors) == {"out", "dq", "dk", "dv"}
        monkeypatch.setattr(ours, "compiled", None)
        with flagsaver.flagsaver(resume=True):
            assert entry.main(["benchmarks", "linear"]) == 0
    assert results.read(path).rows == first.rows
    assert entry.main(["benchmarks", "compare", str(path), str(path)]) == 0
    assert "0 of 2 rows slower" in capsys.readouterr().out
