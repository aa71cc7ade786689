"""Cards side by side: what this library took on each, where two cards or more were measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import demo, findings, noise, scaling_page, suites
from benchmarks.findings import OURS
from benchmarks.results import Results
from benchmarks.tables import Table, milliseconds

NOTE = (
    "Times of two cards are of different runs and hosts, and of different kernels where the "
    "commits differ, so no ratio is made of them."
)
# By case and phase, and then by card: what the table says.
Cells = dict[tuple[str, str], dict[str, str]]


def of_reports(found: Sequence[Results]) -> Cells:
    """The library's rows of the report's suites."""
    cells: Cells = {}
    for one in found:
        for suite in suites.named("report"):
            for contest in suite.contests:
                for case in findings.cases_of(one, contest):
                    for phase in contest.phases_of(case):
                        row = findings.Found(one).row(case, phase, OURS)
                        if row is not None and row.seconds:
                            share = "" if row.doubt else f" ({row.reached:.0%} of a copy)"
                            told = f"{milliseconds(row)}{share}"
                            cells.setdefault((str(case), phase), {})[one.device] = told
    return cells


def of_one_device(paths: Sequence[Path]) -> Cells:
    """The times on one GPU of the calls of the suite `devices`.

    Only calls count whose work is the same whatever the number of GPUs. Where several files have a
    call, the first one's time stands.
    """
    cells: Cells = {}
    for path in paths:
        told = json.loads(path.read_text())
        for row in told["rows"]:
            batches = row["batches"].get("one", [])
            if row["work"] != 1 or len(batches) < 2 or row["wrong"]:
                continue
            mark = noise.MARK * bool(row.get("load") or noise.doubt_of_batches(batches))
            call = row["row"].partition(", by ")[0], row["phase"]
            time = f"{mark}{demo.milliseconds(row['seconds']['one'])}"
            cells.setdefault(call, {}).setdefault(told["device"], time)
    return cells


def noted(paths: Sequence[Path]) -> str:
    """The dates and commits of files by card."""
    files = [json.loads(path.read_text()) for path in paths]
    return dated((one["device"], one["about"]["date"], one.get("commit", "")) for one in files)


def dated(facts: Iterable[tuple[str, str, str]]) -> str:
    """The dates and commits of figures, card by card. `facts` has a file's card, date and commit
    each.
    """
    told: dict[str, dict[str, None]] = {}
    for card, date, commit in facts:
        of_card = told.setdefault(card, {})
        of_card[f"{date or 'not dated'}, commit {commit or 'not noted'}"] = None
    return "; ".join(f"{card}: {' and '.join(dates)}" for card, dates in told.items()) + "."


def table(cells: Cells, title: str, *notes: str) -> list[Table]:
    """Calls that two cards or more have; no table without one."""
    shared = {call: by_card for call, by_card in cells.items() if len(by_card) > 1}
    names = sorted({card for by_card in shared.values() for card in by_card}, reverse=True)
    lines = [
        [*call, *(by_card.get(card, "-") for card in names)] for call, by_card in shared.items()
    ]
    head = ["case", "phase", *(f"{card}, ms" for card in names)]
    return [Table(title, head, lines, [" ".join([NOTE, *notes])], 2)] if lines else []


def tables(found: Sequence[Results]) -> list[Table]:
    paths = scaling_page.files()
    when = dated((one.device, one.about.get("date", ""), one.commit) for one in found)
    return [
        *table(of_reports(found), "Cards side by side: the report's rows of ato_jax", when),
        *table(of_one_device(paths), "Cards side by side: calls on one GPU", noted(paths)),
    ]
