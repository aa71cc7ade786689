"""The suites `training` and `sdpa`: what they say of rows, and a tiny step on a CPU."""

import dataclasses
import json
import sys
import time

import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import sdpa, side_by_side, suites, summary, timing, training
from benchmarks.cases import PHASES
from benchmarks.results import Results, Row
from tests.figures import FACTS, parsed_flags  # noqa: F401

SMALL = training.Case("decoder", 1, 8, layers=1, heads=2, D=8, words=16, dtype="float32")


@pytest.fixture
def small(monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed here")
    monkeypatch.setitem(training.CASES, "cpu", [SMALL])
    monkeypatch.setattr(training, "SECONDS", 0.01)


def run(path, **more):
    with flagsaver.flagsaver(suite=["training"], json=str(path), **more):
        return entry.main(["benchmarks", "run"])


def test_a_step_on_a_cpu(small, tmp_path, capsys, monkeypatch):
    path = tmp_path / "steps.json"
    assert run(path) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["seconds"].keys() == {"ato_torch", "PyTorch"} and not row["wrong"]
    assert row["errors"]["gradient"] < 1e-5
    assert "A training step" in capsys.readouterr().out
    # A row that is steady stays, and one that is not is measured again.
    row |= {"batches": {name: [1.0] * 4 for name in row["seconds"]}, "load": ""}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": [row]}))
    monkeypatch.setattr(training, "measured", lambda *_: pytest.fail("measured again"))
    assert run(path, resume=True) == 0
    # With --resume a run begins the file, too, and another machine goes on with it.
    assert "machine" not in json.loads(path.read_text())
    monkeypatch.undo()
    monkeypatch.setitem(training.CASES, "cpu", [SMALL])
    monkeypatch.setattr(training, "SECONDS", 0.01)
    assert run(tmp_path / "begun.json", resume=True) == 0
    assert len(json.loads((tmp_path / "begun.json").read_text())["rows"]) == 1
    # No time.
    assert run(tmp_path / "none.json", within_s=1e-9) == 0
    assert "no time left" in capsys.readouterr().out


def test_a_layer_that_is_not_taken_and_a_gradient_that_is_wrong(small, tmp_path, monkeypatch):
    monkeypatch.setitem(
        training.CASES, "cpu", [dataclasses.replace(SMALL, model="decoder, autocast")]
    )
    # In bfloat16 the gradients differ by more than float32 allows.
    assert run(tmp_path / "wrong.json") == 1
    (row,) = json.loads((tmp_path / "wrong.json").read_text())["rows"]
    assert "gradient is" in row["wrong"]
    ours = training.both
    monkeypatch.setitem(training.CASES, "cpu", [SMALL])
    monkeypatch.setattr(training, "both", lambda *args: (ours(*args)[0], lambda: 0))
    assert run(tmp_path / "left.json") == 1
    (row,) = json.loads((tmp_path / "left.json").read_text())["rows"]
    assert row["wrong"] == "ato_torch took 0 of 1 layers"


def test_a_model_that_fails_costs_its_own_row(small, tmp_path, monkeypatch, capsys):
    """It is not measured again before those that were never reached."""
    other = dataclasses.replace(SMALL, T=16)
    monkeypatch.setitem(training.CASES, "cpu", [SMALL, other])
    ours, asked = training.both, []

    def both(torch, case, platform):
        asked.append(case)
        if case == SMALL:
            raise TypeError("no such argument")
        return ours(torch, case, platform)

    monkeypatch.setattr(training, "both", both)
    path = tmp_path / "steps.json"
    assert run(path) == 1
    wrong, right = json.loads(path.read_text())["rows"]
    assert wrong["wrong"] == "TypeError: no such argument" and right["seconds"]
    (table,) = training.tables(path)
    assert "WRONG: TypeError" in table.markdown() and table.rows[0][0] == str(other)
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"rows": [wrong]}))
    asked.clear()
    assert run(path, resume=True) == 1 and asked == [other, SMALL]


def test_without_transformers_the_other_rows_are_measured(small, tmp_path, monkeypatch, capsys):
    path = tmp_path / "steps.json"
    cases = [dataclasses.replace(SMALL, model="Llama"), SMALL]
    monkeypatch.setitem(training.CASES, "cpu", cases)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(path) == 0
    without, row = json.loads(path.read_text())["rows"]
    assert without["skipped"] == "transformers is not installed" and row["seconds"]
    assert "Llama B1 T8: transformers is not installed" in capsys.readouterr().out


def test_ratios_are_pytorchs_time_over_ours():
    step = training.Step("a", seconds={"ato_torch": 1.0, "PyTorch": 1.5})
    step.errors = {"loss": 1e-6, "gradient": 1e-5}
    step.batches = {"ato_torch": [1.0] * 4, "PyTorch": [1.5] * 4}
    assert step.ratio == 1.5 and not step.again
    noisy = dataclasses.replace(step, load="another program")
    assert noisy.ratio is None and noisy.again
    table = training.table([dataclasses.replace(step, host=step.seconds), step_of_skip()])
    text = table.text()
    assert "1.500" in text and "b: out of memory" in text
    assert "0 of 1 steps are slower than PyTorch's" in text
    assert len(table.head) == len(table.rows[0]) == len(set(table.head))


def test_sentences_have_the_steady_steps_alone(tmp_path):
    path = tmp_path / "a_card.json"
    assert training.ratios_of(path) == []
    steady = {"case": "a", "seconds": {"ato_torch": 1.0, "PyTorch": 1.5}, "host": {}}
    steady |= {"memory": {}, "errors": {}}
    busy = steady | {"case": "b", "load": "another program"}
    told = {"device": "a card", "rows": [steady, busy, {"case": "c", "skipped": "no memory"}]}
    path.write_text(json.dumps(told))
    assert training.ratios_of(path) == [1.5]


def step_of_skip():
    return training.Step("b", skipped="out of memory")


def test_cases_of_sdpa():
    assert suites.named("sdpa")[0].contests == (sdpa.CONTEST,)
    cases = sdpa.CONTEST.cases["gpu"]
    assert len(cases) == len(set(cases)) == 8 * 3 * 2
    assert {case.B * case.T for case in cases} == {16384}
    assert {case.H * case.D for case in cases} == {2048}


class Process:
    """A process of PyTorch that notes what it is asked, and answers at once."""

    made = []

    def __init__(self, platform="cpu", leads=True):
        self.warmed, self.timed, self.ended = [], [], False
        self.made.append(self)

    def warm(self, name, case, phase):
        self.warmed.append((str(case), phase, name))

    def prepare(self, name, case, phase):
        # What this process did not compile would be compiled now.
        assert (str(case), phase, name) in self.warmed or not self.made
        self.timed.append((str(case), phase, name))
        return {"errors": {}}

    def time(self, name, seconds):
        return timing.Timing([1.0] * 3, 3)

    def forget(self):
        pass

    def end(self):
        self.ended = True


@pytest.fixture
def meeting(monkeypatch, parsed_flags):  # noqa: F811
    """The contest of `sdpa` on a CPU, of which no row is measured yet."""
    own = Process()
    monkeypatch.setattr(sdpa, "Peer", Process)
    monkeypatch.setattr(Process, "made", [])
    results = Results(**FACTS | {"platform": "cpu"})
    end = time.monotonic() + 60
    return side_by_side.Meeting(sdpa.CONTEST, own, results, end, side_by_side.Plan())


@pytest.mark.parametrize(("count", "helpers"), [(None, 0), (3, 2), (16, 3)])
def test_several_processes_compile_for_sdpa(monkeypatch, meeting, count, helpers):
    monkeypatch.setattr(sdpa, "AT_A_TIME", 1)
    sdpa.tell(meeting, count)
    assert len(Process.made) == helpers and all(one.ended for one in Process.made)
    every = [meeting.peer, *Process.made]
    if count:
        # Each process times the cases that it compiled, and no others.
        assert all(one.timed == one.warmed for one in every)
    else:
        assert not meeting.peer.warmed
    timed = [one for process in every for one in process.timed]
    wanted = {
        (str(case), phase, name)
        for case, phase in meeting.groups()
        for name in (sdpa.OURS, sdpa.THEIRS)
    }
    assert len(timed) == len(wanted)
    assert {*timed} == wanted == {row.key for row in meeting.results.rows}
    # All rows are there now, so a second call starts no process and asks none.
    sdpa.tell(dataclasses.replace(meeting, peer=None), count)
    assert len(Process.made) == helpers


def test_processes_for_sdpa_are_ended_where_one_fails(monkeypatch, meeting):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Process, "warm", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sdpa.tell(meeting, 2)
    assert [one.ended for one in Process.made] == [True]


def row_of(case, phase, name, seconds):
    work = case.traffic(phase), case.operations(phase)
    spread = summary.spread([seconds] * 3)
    return Row(str(case), phase, name, 1e-6, *work, seconds, [seconds], spread)


def test_what_is_said_of_ratios_to_sdpa():
    facts = FACTS | {"platform": "gpu"}
    rows = []
    for case in sdpa.CONTEST.cases["gpu"][:12]:
        for phase in PHASES:
            slow = case.T == 1024 and case.D == 64 and case.causal
            rows.append(row_of(case, phase, sdpa.OURS, 1.0))
            rows.append(row_of(case, phase, sdpa.THEIRS, 0.9 if slow else 1.2))
    (table,) = sdpa.findings(sdpa.CONTEST)(Results(**facts, rows=rows))
    (said,) = table.notes
    assert said.startswith("T >= 1024: 22 of 24 ratios are at least 1.0; the least is 0.900 (soft")
    assert [row[2] for row in table.rows].count("-") == 48 - 12
    # Sentences are made of the same ratios, of steady times alone.
    steady = sdpa.ratios(Results(**facts, rows=rows))
    assert sum(one < 1 for one in steady.values()) == 2
    rows[0] = dataclasses.replace(rows[0], load="another program")
    assert len(sdpa.ratios(Results(**facts, rows=rows))) == 23
