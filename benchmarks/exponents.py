"""How time and memory grow with the length: exponents of T, fitted to what was measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.findings import Found, cases_of
from benchmarks.results import Results
from benchmarks.side_by_side import Contest
from benchmarks.tables import Table

# The shortest calls take about 0.02 ms, whatever their length: launches, and a card that is not
# full. That is less than a tenth of a call from here on, so that an exponent is one of the work.
WORK_SECONDS = 2.5e-4
FEWEST_POINTS = 3


def exponent(values: Mapping[int, float]) -> float:
    """That of a power of T, by least squares of the logarithms."""
    lengths = np.log([float(T) for T in values])
    return float(np.polyfit(lengths, np.log(list(values.values())), 1)[0])


@dataclasses.dataclass(frozen=True)
class Growth:
    """The exponents of T, None where there are too few points beyond the launches."""

    family: str
    contender: str
    first: int
    last: int
    forward: float | None
    backward: float | None
    memory: float | None


def growths(results: Results, contests: Iterable[Contest]) -> list[Growth]:
    """Exponents for each case and contender that was measured at three lengths or more."""
    found = Found(results)
    families: dict[Case, list[Case]] = {}
    for contest in contests:
        for case in cases_of(results, contest):
            if case.op != "step" and case.S is None:
                of_family = families.setdefault(dataclasses.replace(case, T=1, documents=None), [])
                if case not in of_family and case.documents is None:
                    of_family.append(case)
    made = []
    for family, members in families.items():
        members.sort(key=lambda case: case.T)
        groups = [(case, phase) for case in members for phase in cases.PHASES]
        names = dict.fromkeys(row.contender for group in groups for row in found.of(*group))
        for name in names:
            growth = _growth(found, str(family).replace(" T1 ", " "), name, members)
            if growth:
                made.append(growth)
    return made


def _growth(found: Found, family: str, name: str, members: Sequence[Case]) -> Growth | None:
    forward: dict[int, float] = {}
    backward: dict[int, float] = {}
    memory: tuple[dict[int, float], dict[int, float]] = {}, {}
    timed = [found.row(case, cases.PHASES[0], name) for case in members]
    # Where two machines measured the lengths: the one of most of them.
    machine = statistics.mode([row.machine for row in timed if row] or [""])
    for case in members:
        row, both = (found.row(case, phase, name) for phase in cases.PHASES)
        if row and row.seconds and row.seconds >= WORK_SECONDS:
            # A doubtful time bends the line: the length has its memory alone.
            steady = not row.doubt and row.machine == machine
            if steady:
                forward[case.T] = row.seconds
            same = both is not None and both.machine == machine and not both.doubt
            if steady and same and both and both.seconds and both.seconds > row.seconds:
                backward[case.T] = both.seconds - row.seconds
            # The backward's is the higher; where a length has none, of all the forward's.
            peaks = [one.peak if one else None for one in (row, both)]
            for of_phase, peak in zip(memory, peaks, strict=True):
                if peak:
                    of_phase[case.T] = float(peak)
    if len(forward) < FEWEST_POINTS:
        return None
    fitted = [
        exponent(values) if len(values) >= FEWEST_POINTS else None
        for values in (forward, backward, max(memory[::-1], key=len))
    ]
    return Growth(family, name, min(forward), max(forward), *fitted)


def complexity(contests: Sequence[Contest]) -> Callable[[Results], list[Table]]:
    def tables(results: Results) -> list[Table]:
        def cell(value: float | None) -> str:
            return "-" if value is None else f"{value:.2f}"

        lines = [
            [
                one.family,
                one.contender,
                f"{one.first} to {one.last}",
                *map(cell, (one.forward, one.backward, one.memory)),
            ]
            for one in growths(results, contests)
        ]
        head = ["case", "", "T", "time forward", "time backward", "memory"]
        note = (
            f"Fitted over the lengths at which a forward call takes {1e3 * WORK_SECONDS:g} ms or "
            "more: below, launches, about 0.02 ms whatever the length, are a tenth of it and bend "
            "the line. Backward is forward and backward less forward; memory is a call's peak."
        )
        return [Table("Exponents of T", head, lines, [note], texts=3)] if lines else []

    return tables
