"""Two files of figures, row by row: what became slower, by more than chance makes it.

What a run knows of its own noise is how far its times lie apart: its turns, between which the
machine has time to drift, and the batches of a row, from their lower quartile to p90. What disturbs
a machine only ever adds to a time, so that batches tell more above the median than below it, and
the upper quartile is not yet where it shows. A row's noise is the width from the lowest of these to
the highest. A row is slower where the second run's median is above the first's

    by more than both noises together   what held up a tenth of one run's batches, or one of its
                                        turns, may have held up all of the other's
    and by more than `FLOOR`            clocks, the placement of memory and what else a machine
                                        runs may stay as they are for as long as a process lives:
                                        they move all of its times at once, and no width shows it

and likewise faster. A row that is doubtful in either file (`noise`) is marked and counted as noisy:
it is neither slower nor faster; nor is any other where more than a quarter of a file's rows are
doubtful. A row that scatters less, but widely, needs a larger change: the table prints the noise as
a share of the median beside each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import demo, noise, results, tables
from benchmarks.results import Results, ResultsError, Row

# Between the percent or two that two runs are apart and the tenth that must not go unseen.
FLOOR = 0.05
# The share of doubtful rows from which on the machine is called busy.
BUSY = 0.1


def width(row: Row) -> float:
    """Seconds: see above."""
    assert row.spread is not None
    known = (row.spread.p25, row.spread.p90, *row.turns)
    return max(known) - min(known)


def slower(before: Row, after: Row) -> bool:
    assert before.seconds is not None and after.seconds is not None
    allowed = max(width(before) + width(after), FLOOR * before.seconds)
    return after.seconds - before.seconds > allowed


def verdict(before: Row, after: Row) -> str:
    if before.doubt or after.doubt:
        return noise.NOISY
    if slower(before, after):
        return "slower"
    return "faster" if slower(after, before) else ""


def by_key(found: Results) -> dict[tuple[str, str, str], Row]:
    return {row.key: row for row in found.rows}


def timed_in_both(before: Results, after: Results) -> list[tuple[Row, Row]]:
    others = by_key(after)
    pairs = [(row, others[row.key]) for row in by_key(before).values() if row.key in others]
    return [(one, other) for one, other in pairs if one.seconds and other.seconds]


def alone(found: Results, other: Results) -> list[str]:
    """The rows, or times, that the other file lacks; with the other's reason where it has one."""
    others, lines = by_key(other), []
    for row in by_key(found).values():
        there = others.get(row.key)
        if there is None:
            lines.append(", ".join(row.key))
        elif row.seconds and not there.seconds:
            lines.append(f"{', '.join(row.key)}; there: {there.unavailable}")
    return lines


def time_and_noise(row: Row) -> tuple[str, str]:
    assert row.seconds is not None
    return tables.milliseconds(row), f"{width(row) / row.seconds:.1%}"


def verdicts(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    """One of each pair. What disturbed many rows of a run may have passed the others unseen."""
    for rows in zip(*pairs, strict=True):
        if sum(bool(row.doubt) for row in rows) > noise.MOST_DOUBTFUL * len(rows):
            return [noise.NOISY] * len(pairs)
    return [verdict(*pair) for pair in pairs]


def table(pairs: Sequence[tuple[Row, Row]], verdicts: Sequence[str]) -> str:
    """By case and phase. The ratio is the second run's time over the first one's."""
    lines, group = [["", "A, ms", "noise", "B, ms", "noise", "B / A", ""]], ""
    for (before, after), said in zip(pairs, verdicts, strict=True):
        assert before.seconds and after.seconds
        if group != f"{before.case}, {before.phase}":
            group = f"{before.case}, {before.phase}"
            lines.append([group, *[""] * 6])
        cells = [*time_and_noise(before), *time_and_noise(after)]
        ratio = "" if said == noise.NOISY else f"{after.seconds / before.seconds:.3f}"
        lines.append([f"  {before.contender}", *cells, ratio, said])
    return demo.aligned(lines, texts=1)


def compared(names: Sequence[str], before: Results, after: Results) -> tuple[str, int]:
    """What is printed of two files, and how many rows are slower."""
    if before.device != after.device:
        raise ResultsError(
            f"{names[0]} is of {before.device}, {names[1]} of {after.device}: times of two devices "
            "are not compared"
        )
    pairs = timed_in_both(before, after)
    if not pairs:
        raise ResultsError(f"{names[0]} and {names[1]} have no time of the same case in common")
    parts = [f"A: {names[0]}\nB: {names[1]}\non {before.device}"]
    for name in results.SAME:
        one, other = getattr(before, name), getattr(after, name)
        if one != other:
            parts.append(f"{name} {one} in A, {other} in B")
    said = verdicts(pairs)
    parts.append(table(pairs, said))
    for letter, lines in (("A", alone(before, after)), ("B", alone(after, before))):
        if lines:
            parts.append("\n".join([f"In {letter} alone:", *(f"  {line}" for line in lines)]))
    count = said.count("slower")
    for letter, rows in zip("AB", zip(*pairs, strict=True), strict=True):
        doubts = [row.doubt for row in rows if row.doubt]
        if len(doubts) > BUSY * len(rows) or any(row.load for row in rows):
            example = max(doubts, key=len)
            parts.append(
                f"{len(doubts)} of {len(rows)} times of {letter} are not steady ({example}). "
                f"{noise.busy(f'it was while {letter} was measured')}"
            )
    if noise.NOISY in said:
        parts.append(f"{noise.LEGEND}\n{said.count(noise.NOISY)} of {len(pairs)} rows noisy")
    parts.append(f"{count} of {len(pairs)} rows slower by more than the noise")
    return "\n\n".join(parts), count


def main(names: Sequence[str]) -> int:
    """The exit status: 1 where a row is slower."""
    if len(names) != 2:
        given = " ".join(names) or "none"
        raise ResultsError(f"compare takes two files, A.json B.json; got {given}")
    text, count = compared(names, *(results.read(Path(name)) for name in names))
    print(text)
    return 1 if count else 0
