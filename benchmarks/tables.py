"""What is printed of rows and findings: columns of text on a screen, Markdown in documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks import demo, noise
from benchmarks.results import Row


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells by row, with the words before and after. The first `texts` columns are words."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    texts: int = 1

    def text(self) -> str:
        lines = [list(self.head), *map(list, self.rows)]
        return "\n".join([self.title, demo.aligned(lines, self.texts), *self.notes])

    def markdown(self, level: int = 3) -> str:
        aligns = ["---"] * self.texts + ["---:"] * (len(self.head) - self.texts)
        lines = [list(self.head), aligns, *map(list, self.rows)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join([f"{'#' * level} {self.title}", table, *self.notes])


def milliseconds(row: Row | None) -> str:
    """A row's time, marked where it is doubtful; empty where there is none."""
    if row is None or row.seconds is None:
        return ""
    return noise.MARK * bool(row.doubt) + demo.milliseconds(row.seconds)


def number(value: float | None) -> str:
    """A share or a ratio; a dash where there is none."""
    return "-" if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def shares(row: Row) -> list[str]:
    """Of a copy's bandwidth, TFLOP/s and of a product's rate; nothing of a doubtful time."""
    if row.doubt:
        return [noise.NOISY, "", ""]
    of_product = "" if row.product_share is None else f"{row.product_share:.1%}"
    return [f"{row.reached:.0%}", f"{(row.rate or 0) / 1e12:.3g}", of_product]


def measured(rows: Sequence[Row]) -> Table:
    """All of a case and phase."""
    head = rows[0]
    names = ["", "ms", "p95", "of a copy", "TFLOP/s", "of a product", "MB beyond", "host µs"]
    lines, notes = [], []
    for row in rows:
        if row.seconds is None or row.spread is None or row.rate is None:
            notes.append(f"  {row.contender}: {row.unavailable}")
            continue
        cells = [
            f"  {row.contender}{f' ({row.picked})' if row.picked else ''}",
            milliseconds(row),
            demo.milliseconds(row.spread.p95),
            *shares(row),
            "" if row.scratch is None else f"{row.scratch / 1e6:.1f}",
            "" if row.host is None else f"{row.host * 1e6:.0f}",
            *row.told_errors(),
        ]
        lines.append(cells)
        if row.doubt:
            notes.append(f"  {noise.MARK}{row.contender}: {row.doubt}")
    limit = ["  byte limit", demo.milliseconds(head.limit), *[""] * (len(names) - 2), "", ""]
    return Table(f"{head.case}, {head.phase}", [*names, "out", "dq"], [*lines, limit], notes)
