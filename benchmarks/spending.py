"""Counts the seconds that a run spends on each suite: compiling, checking, timing, and the rest.

A clock takes the seconds of what runs inside it, without those of a clock inside that one. What no
clock takes is the rest: starting PyTorch's process, drawing tables, writing files. Files of figures
keep the sums, so that the next report can be planned by them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.tables import Table

# Checking is loading a program, drawing its inputs and comparing its results with float64, which in
# PyTorch's process includes its compiling and its searches for block sizes.
COMPILING, CHECKING, TIMING, OTHER = "compiling", "checking", "timing", "other"
KINDS = (COMPILING, CHECKING, TIMING, OTHER)
# Seconds under this name were spent before the first suite, or by `whole` itself beside the
# commands of its stages.
START = "start"

# Seconds by suite and kind.
Spent = dict[str, dict[str, float]]

# The seconds of the suite that runs, by what they were spent on and for whom.
spent: collections.Counter[tuple[str, str]] = collections.Counter()
# For each clock that runs, the seconds that the clocks inside it took.
_inside: list[float] = []


@contextlib.contextmanager
def clock(what: str, whom: str = "") -> Iterator[None]:
    """In the main thread alone."""
    start = time.monotonic()
    _inside.append(0.0)
    try:
        yield
    finally:
        taken = time.monotonic() - start
        spent[what, whom] += taken - _inside.pop()
        if _inside:
            _inside[-1] += taken


def of_kinds(total: float) -> dict[str, float]:
    """What the clocks took since `spent` was cleared, and what is left of `total`."""
    found = dict.fromkeys(KINDS, 0.0)
    for (what, _), seconds in spent.items():
        found[what] += seconds
    found[OTHER] += max(0.0, total - sum(found.values()))
    return found


def add(sums: Spent, suite: str, seconds: Mapping[str, float]) -> None:
    """Adds what a suite took now to what it took in earlier runs."""
    of_suite = sums.setdefault(suite, {})
    for kind, one in seconds.items():
        of_suite[kind] = of_suite.get(kind, 0.0) + one


def of_file(path: Path) -> Spent:
    """The sums of a file of figures of any suite; none where it has none, or is not there."""
    try:
        found = json.loads(path.read_text()).get("spent", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return {suite: dict(seconds) for suite, seconds in found.items()}


def of_stages(walls: Mapping[str, float], files: Mapping[str, Path]) -> Spent:
    """Of a whole report: by stage and suite what the files say, and what of a stage's seconds they
    do not say, such as the start of its commands.
    """
    found: Spent = {}
    for stage, seconds in walls.items():
        told = of_file(files[stage]) if stage in files else {}
        known = 0.0
        for suite, one in told.items():
            known += sum(one.values())
            found[stage if suite == stage else f"{stage}: {suite}"] = dict(one)
        rest = {COMPILING if stage == COMPILING else OTHER: max(0.0, seconds - known)}
        add(found, f"{stage}: {START}" if told else stage, rest)
    return found


def table(sums: Mapping[str, Mapping[str, float]]) -> Table:
    lines = []
    for suite, seconds in sums.items():
        cells = [f"{seconds.get(kind, 0.0):.0f}" for kind in KINDS]
        lines.append([suite, *cells, f"{sum(seconds.values()):.0f}"])
    if len(lines) > 1:
        every = [sum(one.get(kind, 0.0) for one in sums.values()) for kind in KINDS]
        lines.append(["all", *(f"{one:.0f}" for one in every), f"{sum(every):.0f}"])
    return Table("Seconds by suite", ["", *KINDS, "all"], lines)
