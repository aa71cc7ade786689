"""A report by parts: what may be put together, and what is lost of a run that is stopped."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import (
    cards,
    document,
    findings,
    kept,
    machine,
    memory,
    noise,
    results,
    run,
    sdpa,
    summary,
)
from benchmarks.cases import Case
from benchmarks.results import Results, ResultsError, Row
from tests.figures import FACTS, parsed_flags  # noqa: F401

CASE = Case("linear", B=1, H=2, T=64, D=16, dtype="float32")
NOTED = FACTS | {"machine": "m1", "commit": "abc"}


def row_of(contender, seconds, case=CASE, **more):
    spread = summary.spread([seconds] * 3)
    found = Row(str(case), "forward", contender, 1e-3, 1e6, 1e9, seconds, [seconds], spread)
    return dataclasses.replace(found, **more)


def untimed(contender, reason):
    found = row_of(contender, 1.0)
    return dataclasses.replace(found, seconds=None, turns=[], spread=None, unavailable=reason)


def test_parts_of_one_machine_and_commit_are_merged(tmp_path, capsys):
    first = Results(**NOTED, matrix={"float32": 1e12}, suites={"linear": 2.0})
    first.rows = [row_of("one", 1.0), untimed("two", results.NO_TIME_LEFT), row_of("three", 1.0)]
    second = Results(**NOTED | {"bandwidth": 2e9}, matrix={"float32": 2e12})
    second.suites = {"linear": 1.0, "wide": 3.0}
    second.rows = [row_of("one", 1.09), row_of("two", 2.0, product_limit=1e9 / 2e12)]
    second.rows += [row_of("three", 1.2), untimed("four", "no kernel")]
    names = [str(tmp_path / name) for name in ("A.json", "B.json")]
    for name, part in zip(names, (first, second), strict=True):
        results.write(tmp_path / name, results.json_text(part))
    out = tmp_path / "all.json"
    with flagsaver.flagsaver(json=str(out)):
        assert entry.main(["benchmarks", "merge", *names]) == 0
    assert f"4 rows of 2 files\n{out}\n" in capsys.readouterr().out
    found = results.read(out)
    rows = {row.contender: row for row in found.rows}
    assert found.suites == {"linear": 3.0, "wide": 3.0} and found.bandwidth == 1e9
    assert [row.seconds for row in rows.values()] == [1.0, 2.0, 1.0, None]
    # At the first file's copy and product, both half as fast.
    assert rows["two"].limit == 2e-3 and rows["two"].product_limit == pytest.approx(1e-3)
    # Timed twice: 9% apart is chance, 20% is not.
    assert rows["one"].doubt == "" and rows["three"].doubt == "timed twice, 20% apart"


@pytest.mark.parametrize("name", results.SAME)
def test_parts_of_two_machines_or_commits_are_not_merged(name):
    parts = [Results(**NOTED), Results(**NOTED | {name: ""})]
    said = f"B.json cannot be merged: {name} is {NOTED[name]} in A.json and not noted in B.json"
    with pytest.raises(ResultsError, match=said):
        kept.merged(["A.json", "B.json"], parts)


def test_merge_needs_two_files_and_a_name(caplog):
    for values, names in (({"json": ""}, ["A", "B"]), ({"json": "C.json"}, ["A"])):
        caplog.clear()
        with flagsaver.flagsaver(**values):
            assert entry.main(["benchmarks", "merge", *names]) == 2
        said = f"and --json=ALL.json; got {' '.join(names)}"
        assert said in caplog.text


def git_in(folder):
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@e"]

    def run(*command):
        return subprocess.run([*git, *command], check=True, capture_output=True, text=True).stdout

    run("init", "-q")
    return run


def test_figures_of_a_copy_without_its_history_find_their_commit(tmp_path, monkeypatch):
    copy, kept_there = tmp_path / "copy", tmp_path / "kept"
    repository = tmp_path / "repository"
    git = git_in(repository) if repository.mkdir() is None else None
    commits, digests = [], []
    for text in ("1", "2", "3"):
        for root in (repository, copy):
            for name in ("benchmarks/a.py", "ato_jax/b.py", "ato_jax/ops/c.py", "ato_jax/ops.py"):
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{name} {text}")
        git("add", ".")
        git("commit", "-qm", text)
        commits.append(git("rev-parse", "--short=12", "HEAD").strip())
        digests.append(machine.commit(copy))
    assert len(set(digests)) == 3 and all(one.startswith("sources ") for one in digests)
    assert [machine.of_sources(one, repository) for one in digests] == commits
    # A copy that has the history up to an earlier commit says so besides.
    changed = [f"abc{machine.CHANGED}{one.removeprefix('sources ')}" for one in digests]
    assert [machine.of_sources(one, repository) for one in changed] == commits
    for told in ("sources 000000000000", "abc", "abc, changed: 123", ""):
        assert machine.of_sources(told, repository) == told
    assert machine.of_sources(digests[0], tmp_path) == digests[0]
    # Files that were measured there are put among those that are kept.
    monkeypatch.setattr(machine.of_sources, "__defaults__", (repository,))
    monkeypatch.setattr(run, "FOLDER", kept_there)
    new = tmp_path / "new"
    with pytest.raises(ResultsError, match="has no file of figures"):
        document.keep(new)
    part = Results(**NOTED | {"commit": digests[1]}, rows=[row_of("one", 1.0)])
    results.write(new / "a_card.json", results.json_text(part))
    rows = [{"case": "a step", "plan": {"arguments": 2}, "timeline": [["dot", 3_000_000]]}]
    told = {"device": "a card", "commit": digests[2], "about": {"date": "2026-11-28"}, "rows": rows}
    results.write(new / "memory" / "a_card.json", json.dumps(told))
    found = document.keep(new)
    assert found == [kept_there / "a_card.json", kept_there / "memory" / "a_card.json"]
    assert results.read(found[0]).commit == commits[1]
    assert json.loads(found[1].read_text())["commit"] == commits[2]
    (table,) = memory.tables(found[1])
    assert table.rows == [["a step", "0.000", "3.000", "-"]]
    assert table.notes == [f"Measured on 2026-11-28 with commit {commits[2]}, JAX not noted."]
    # A file of another kind is refused before any is written.
    results.write(new / "latency" / "a_card.json", "{}")
    with pytest.raises(ResultsError, match="holds no rows of these benchmarks' latency"):
        document.keep(new)
    assert not (kept_there / "latency").exists()


# A second machine of one kind.

HERE = NOTED | {"machine": "m2", "about": {"driver": "1"}, "matrix": {"float32": 1e12}}
THERE = HERE | {"machine": "m1"}


def go_on(path, found, here=HERE, another_machine=True):
    results.write(path, results.json_text(found))
    with flagsaver.flagsaver(json=str(path), resume=True, another_machine=another_machine):
        return kept.begun(here, kept.earlier())


def test_a_second_machine_of_one_kind_measures_whole_cases(tmp_path, capsys):
    path = tmp_path / "figures.json"
    lacking = untimed("two", results.NO_TIME_LEFT)
    other = dataclasses.replace(CASE, T=128)
    rows = [row_of("one", 1.0), lacking, row_of("one", 1.0, other), row_of("two", 2.0, other)]
    found = go_on(path, Results(**THERE, rows=rows))
    # Of the first case one row is there and one lacks, so both are measured here.
    assert [row.key for row in found.rows] == [row.key for row in rows[2:]]
    assert path.with_name("figures.json.earlier").read_text() == results.json_text(
        Results(**THERE, rows=rows)
    )
    new = kept.signed([row_of("one", 1.0), row_of("two", 4.0)])
    found.rows += new
    assert found.machine == "m1" and [row.machine for row in new] == ["m2", "m2"]
    told = findings.Found(found)
    assert told.ratio(CASE, "forward", "two", "one") == "4.0x"
    assert told.ratio(other, "forward", "two", "one") == "2.0x"
    assert findings.times(new[1], rows[2]) == noise.TWO_MACHINES
    said = "m1 (a copy 0.00 TB/s, float32 1); m2 (a copy 0.00 TB/s, float32 1)"
    assert f"| {document.MACHINES} | {said} |" in document.provenance(found, "a_card")
    line = results.csv_text(found).splitlines()
    assert ",m1," in line[1] and ",m2," in line[-1]
    # On the first machine again, the rows of the second are of another one.
    results.write(path, results.json_text(found))
    again = go_on(path, results.read(path), THERE)
    assert [row.machine for row in again.rows] == ["", "", "m2", "m2"]
    assert kept.signed([row_of("three", 1.0)])[0].machine == ""
    capsys.readouterr()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "b card"}, "device is a card there and b card here"),
        ({"commit": "def"}, "commit is abc there and def here"),
        ({"jax": "9"}, "jax is 2 there and 9 here"),
        ({"about": {"driver": "2"}}, "driver is 1 there and 2 here"),
        ({"about": {"driver": "1", "tokamax": "3"}}, "tokamax is not noted there and 3 here"),
        ({"bandwidth": 1.2e9}, "a copy ran at 1e+09 a second there and at 1.2e+09 here, 20% apart"),
        ({"matrix": {"float32": 5e11}}, "a large product of float32 ran at 1e+12 a second there"),
    ],
)
def test_a_machine_of_another_kind_is_none_to_go_on_with(change, said, tmp_path):
    path = tmp_path / "figures.json"
    found = Results(**THERE, rows=[row_of("one", 1.0)])
    with pytest.raises(ResultsError, match=re.escape(said)):
        go_on(path, found, HERE | change)
    assert path.read_text() == results.json_text(found)
    with pytest.raises(ResultsError, match="machine is m1 there and m2 here"):
        go_on(path, found, HERE, another_machine=False)


# What ends a run.


def test_a_row_that_a_run_died_in_is_tried_once_more(tmp_path, capsys):
    path = tmp_path / "figures.json"
    group = str(CASE), "forward", "one"
    for _ in range(2):
        results.write(path, results.json_text(Results(**NOTED)))
        with flagsaver.flagsaver(json=str(path), resume=True):
            found = kept.begun(NOTED, kept.earlier())
            kept.mark(*group)
    assert found.rows == [] and "it is tried again" in capsys.readouterr().out
    with flagsaver.flagsaver(json=str(path), resume=True):
        (row,) = kept.begun(NOTED, kept.earlier()).rows
    assert row.key == group and row.unavailable == "ended this program"
    assert not kept.doing(path).exists()


STUBBORN = """
import sys, time
from absl import flags
from benchmarks import __main__ as entry, kept, stopping
stopping.GRACE_SECONDS = 0.2
stopping.listen()
flags.FLAGS(["benchmarks", f"--json={sys.argv[1]}"])
def command(names):
    kept.mark("a case", "forward", "one")
    told = "measuring"
    while True:
        try:
            if told:
                print(told, flush=True)
            told = ""
            time.sleep(60)
        except KeyboardInterrupt:
            if sys.argv[2] == "ends":
                raise
entry.COMMANDS["run"] = command
sys.exit(entry.main(["benchmarks", "run"]))
"""


@pytest.mark.parametrize("how", ["ends", "goes on"])
def test_sigterm_keeps_what_was_measured(how, tmp_path):
    """Also where a compiler, or here a program that will not stop, does not let go of Python."""
    path = tmp_path / "figures.json"
    earlier = results.json_text(Results(**NOTED, rows=[row_of("one", 1.0)]))
    results.write(path, earlier)
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN, str(path), how],
        cwd=machine.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "measuring\n" and kept.doing(path).exists()
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and path.read_text() == earlier
    # A user ended it, so the row that ran is not to blame.
    assert not kept.doing(path).exists()
    assert ("What was measured is in" in said) == (how == "ends")


def test_a_commit_names_what_was_changed(tmp_path):
    source = tmp_path / "ato_jax" / "a.py"
    source.parent.mkdir()
    source.write_text("1")
    assert machine.commit(tmp_path).startswith("sources ")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    clean = machine.commit(tmp_path)
    assert len(clean) == 12 and int(clean, 16)
    # A file of figures is no source; a changed source is named by its text.
    (tmp_path / "figures.json").write_text("{}")
    assert machine.commit(tmp_path) == clean
    said = []
    for text in ("2", "3", "2"):
        source.write_text(text)
        said.append(machine.commit(tmp_path))
    assert said[0].startswith(f"{clean}, changed: ") and said[0] == said[2] != said[1]


def test_figures_are_not_lost_to_a_new_run_or_to_a_stopped_one(tmp_path, monkeypatch, caplog):
    path = tmp_path / "figures.json"
    earlier = results.json_text(Results(**NOTED, rows=[row_of("one", 1.0)]))
    results.write(path, earlier)

    def stopped(names):
        kept.begun(NOTED, kept.earlier())
        raise KeyboardInterrupt

    monkeypatch.setitem(entry.COMMANDS, "run", stopped)
    with flagsaver.flagsaver(json=str(path), resume=True):
        assert entry.main(["benchmarks", "run"]) == 130
    assert f"What was measured is in {path}: the same command with --resume" in caplog.text
    assert len(results.read(path).rows) == 1
    with flagsaver.flagsaver(json=str(path)):
        assert entry.main(["benchmarks", "run"]) == 130
    assert results.read(path).rows == []
    assert path.with_name("figures.json.earlier").read_text() == earlier
    with flagsaver.flagsaver(json=""):
        assert entry.main(["benchmarks", "run"]) == 130
    assert "Without --json nothing was kept" in caplog.text


def test_a_file_of_an_earlier_form_is_read(tmp_path):
    told = json.loads(results.json_text(Results(**NOTED, rows=[row_of("one", 1.0)])))
    for name in ("machine", "commit", "form"):
        del told[name]
    del told["rows"][0]["load"]
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(told))
    found = results.read(path)
    assert found.commit == found.machine == "" and found.rows[0].seconds == 1.0


# Documents.


def test_the_report_names_card_commit_and_clocks(monkeypatch):
    about = {"date": "today", "clocks after linear": "1980 MHz", "driver": "1", "machines": "m 2"}
    told = document.provenance(Results(**NOTED, about=about), "a_card")
    for line in ("| card | a card |", "| commit | abc |", "| linear: 1980 MHz |", "| driver | 1 |"):
        assert line in told.replace(f"{document.CLOCKS} ", "")
    assert f"| {document.MACHINES} | m 2 |" in told and "(°C)" in told and "(TFLOP/s)" in told
    assert "| commit | not noted |" in document.provenance(Results(**NOTED | {"commit": ""}), "a")


def test_cards_stand_side_by_side_where_both_were_measured(tmp_path):
    case = run.suites.named("linear")[0].contests[0].cases["gpu"][0]
    known = row_of("ato_jax", 1.0, case)
    found = [
        Results(**NOTED | {"device": name}, platform="gpu", rows=rows)
        for name, rows in (("card A", [known]), ("card B", [dataclasses.replace(known, load="x")]))
    ]
    (table,) = cards.table(cards.of_reports(found), "Cards")
    assert table.head == ["case", "phase", "card B, ms", "card A, ms"]
    assert table.rows == [[str(case), "forward", f"{noise.MARK}1000", "1000 (0% of a copy)"]]
    assert cards.table(cards.of_reports(found[:1]), "Cards") == []
    # The note says of which run each card's times are.
    found[0].about["date"] = "today"
    found[1].commit = ""
    note = cards.tables(found)[0].notes[0]
    assert note.endswith("card A: today, commit abc; card B: not dated, commit not noted.")
    row = {"row": "a call, by time", "phase": "forward", "work": 1, "wrong": ""}
    for name, batches in (("A", [1.0, 1.0, 1.0, 1.0]), ("B", [1.0, 1.0, 2.0, 2.0])):
        timed = row | {"seconds": {"one": batches[0]}, "batches": {"one": batches}}
        more = row | {"row": "other", "work": 2, "batches": {"one": batches}}
        told = {"device": name, "about": {"date": "today"}, "rows": [timed, more]}
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
    (table,) = cards.table(cards.of_one_device(sorted(tmp_path.glob("*.json"))), "Calls")
    assert table.rows == [["a call", "forward", f"{noise.MARK}1000", "1000"]]
    said = cards.noted(sorted(tmp_path.glob("*.json")))
    assert said == "A: today, commit not noted; B: today, commit not noted."


def test_other_files_of_a_card_stand_in_the_documents(tmp_path, monkeypatch):
    told = {"device": "a card", "commit": "abc", "jax": "2", "about": {"driver": "1"}}
    assert kept.told_of(told | {"about": {}}) == ""
    loop = {"case": "a loop", "first": 1.0, "tokens": [0.002] * 8, "load": "", "doubt": ""}
    call = {"op": "attention", "phase": "forward", "traits": {}, "sizes": {}, "wrong": {}}
    call |= {"refused": {}, "choice": "xla"}
    calls = [
        call | {"row": row, "seconds": {"None": none, "triton": 1.0}, "doubt": doubt}
        for row, none, doubt in (("even", 1.0, ""), ("behind", 1.5, ""), ("noisy", 9.0, "a load"))
    ]
    both = {"ato_torch": 0.01, "PyTorch": 0.012}
    step = {"case": "a model", "seconds": both, "host": both, "memory": {}, "errors": {}}
    step["batches"] = {name: [seconds] * 4 for name, seconds in both.items()}
    for folder, rows in (("latency", [loop]), ("choices", calls), ("training", [step])):
        results.write(tmp_path / folder / "a_card.json", json.dumps(told | {"rows": rows}))
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    case = sdpa.CONTEST.cases["gpu"][0]
    rows = [row_of(sdpa.OURS, 1.0, case), row_of(sdpa.THEIRS, 1.5, case, picked="FLASH")]
    text = document.section(Results(**NOTED, platform="gpu", rows=rows), "a_card")
    # The table beside SDPA has only the cases that were measured.
    said = "SDPA's time over that of ato_torch.attention"
    lines = [line for line in text.splitlines() if line.startswith("| softmax ")]
    assert lines == [f"| {case} | FLASH | 1.500 | - |"]
    assert said not in document.section(Results(**NOTED, platform="gpu"), "a_card")
    assert "| a model | 1.200 | 10.00 | 12.00 | 10.00 | 12.00 | - | - |" in text
    assert "| a loop | 2.000 | 2.000 | 2.000 | 2.000 | 2.000 | 1000 | 500 |" in text
    assert "| behind | forward | xla | triton | 1.50x |" in text and "even |" not in text
    assert "3 of 142 calls were measured, 2 of them steadily. In 1 `implementation=None`" in text
    assert text.count("Measured with commit abc, JAX 2, driver 1.") == 3
    # Another card's files are not this one's.
    assert "a loop" not in document.section(Results(**NOTED, platform="gpu"), "b_card")
