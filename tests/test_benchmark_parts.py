"""A report by parts: what may be put together, and what is lost of a run that is stopped."""

import dataclasses
import json
import subprocess

import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import cards, document, kept, machine, noise, results, run, summary
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
        assert f"and --json=ALL.json; got {' '.join(names)}" in caplog.text


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
    about = {"date": "today", "clocks after linear": "1980 MHz", "driver": "1"}
    told = document.provenance(Results(**NOTED, about=about), "a_card")
    for line in ("| card | a card |", "| commit | abc |", "| linear: 1980 MHz |", "| driver | 1 |"):
        assert line in told.replace("clocks, power and temperature after each suite ", "")
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
