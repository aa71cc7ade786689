"""What the seconds of a run went to, in its tables and in its files."""

import json
import time

import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import kept, results, side_by_side, spending, timing, whole
from benchmarks.results import Results, ResultsError
from benchmarks.spending import CHECKING, COMPILING, OTHER, TIMING
from tests.figures import parsed_flags  # noqa: F401
from tests.test_benchmark_ahead import LINEAR
from tests.test_benchmark_parts import NOTED
from tests.test_benchmark_suites import InJax, Peer


@pytest.fixture
def clocked(monkeypatch):
    """A clock that only stands still where it is not moved on."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(spending, "spent", type(spending.spent)())
    return now


def test_a_clock_leaves_out_what_a_clock_inside_it_takes(clocked):
    with spending.clock(CHECKING, "one"):
        clocked[0] += 1
        with spending.clock(COMPILING, "one"):
            clocked[0] += 10
        with pytest.raises(ValueError), spending.clock(TIMING):
            clocked[0] += 100
            raise ValueError
        clocked[0] += 2
    found = {CHECKING: 3.0, COMPILING: 10.0, TIMING: 100.0, OTHER: 7.0}
    assert spending.of_kinds(120.0) == found
    sums = {}
    for _ in range(2):
        spending.add(sums, "linear", found)
    text = spending.table(sums | {"start": {OTHER: 5.0}}).text()
    lines = [line.split() for line in text.splitlines()]
    assert lines[1] == [COMPILING, CHECKING, TIMING, OTHER, "all"]
    assert lines[2:] == [
        ["linear", "20", "6", "200", "14", "240"],
        ["start", "0", "0", "0", "5", "5"],
        ["all", "20", "6", "200", "19", "245"],
    ]


def test_files_keep_the_seconds(tmp_path):
    path = tmp_path / "figures.json"
    found = Results(**NOTED, spent={"linear": {TIMING: 1.0, OTHER: 2.0}})
    results.write(path, results.json_text(found))
    assert results.read(path) == found and spending.of_file(path) == found.spent
    assert kept.merged(["a", "b"], [found, found]).spent == {"linear": {TIMING: 2.0, OTHER: 4.0}}
    # A file that was written before there were any has none.
    told = json.loads(path.read_text())
    del told["spent"]
    path.write_text(json.dumps(told))
    assert results.read(path).spent == {} == spending.of_file(path)
    path.write_text(json.dumps(told | {"spent": {"linear": 3}}))
    with pytest.raises(ResultsError, match="spent has no numbers by name"):
        results.read(path)


def test_whole_tells_the_seconds_of_all_parts(tmp_path, clocked, monkeypatch, capsys):
    lacking = [2]

    def ran(command, seconds, place, name):
        clocked[0] += 30
        lacking[0] -= 1
        spent = {"linear": {TIMING: 12.0 * (2 - lacking[0]), OTHER: 0.0}}
        (tmp_path / "a_card.json").write_text(json.dumps({"spent": spent}))
        return 0

    def one_row(path, platform):
        return lacking[0]

    monkeypatch.setattr(whole, "STAGES", [whole.Stage("report", ("run",), "", one_row)])
    monkeypatch.setattr(whole, "MOST_STARTS", 1)
    monkeypatch.setattr(whole, "ran", ran)
    monkeypatch.setattr(whole, "probed", lambda: ("cpu", "a card", 1))
    for status in (whole.LACKING, 0):
        with flagsaver.flagsaver(folder=str(tmp_path), within_s=540.0):
            assert entry.main(["benchmarks", "whole"]) == status
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["report:", "linear", "0", "0", "24", "0", "24"] in told
    assert ["report:", "start", "0", "0", "0", "36", "36"] in told
    assert ["all", "0", "0", "24", "36", "60"] in told
    noted = json.loads((tmp_path / whole.SECONDS / "a_card.json").read_text())
    assert noted["spent"] == {"a_card": {"report": 60.0}}
    # Beside the figures, and none of them.
    assert [path.name for path in tmp_path.glob("*.json")] == ["a_card.json"]
    whole.note(COMPILING, 5.0)
    assert ["compiling", "5", "0", "0", "0", "5"] in [
        line.split() for line in whole.noted(tmp_path, "a_card").text().splitlines()
    ]


def test_a_row_whose_turns_are_long_has_two(clocked, monkeypatch):
    """Whatever a call takes, a turn has three batches."""

    def measured(seconds):
        def turn(_):
            clocked[0] += seconds
            return timing.Timing([seconds] * 3, 3)

        ready = side_by_side.Contestant({}, turn)
        contender = InJax(lambda: None)
        contest = side_by_side.Contest({"cpu": (LINEAR,)}, {"ato_jax": contender}, {})
        (row,) = side_by_side.measure(
            contest, Peer(), LINEAR, "forward", 1e-3, lambda: 9.0,
            ready_made=lambda name: lambda: ready,
        )  # fmt: skip
        return len(row.turns)

    assert [measured(seconds) for seconds in (0.1, 0.6)] == [3, 2]
    assert spending.of_kinds(2.0)[TIMING] == pytest.approx(3 * 0.1 + 2 * 0.6)
