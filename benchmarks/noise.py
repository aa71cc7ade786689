"""When a measured time must not be spoken of.

A time is doubtful where its batches scatter, where its first and its last turn disagree, or where
other programs ran beside it. A doubtful time is printed with `MARK` before it, and no sentence, no
title and no ratio is made of it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Self

from benchmarks import summary

# p95 above the median, as a share of it. Quiet machines stay below a tenth for nearly all calls;
# from here on the median itself depends on when it was taken.
MOST_SCATTER = 0.25
# Between the first and the last time of one case.
MOST_DRIFT = 0.10
# The share of doubtful times from which on nothing is said of the rest either.
MOST_DOUBTFUL = 0.25
MARK = "≈"
# In place of a ratio.
NOISY = "noisy"
# In place of a ratio of times of two machines.
TWO_MACHINES = "two machines"
LEGEND = (
    f"{MARK} marks a time that is not steady: its p95 is more than {MOST_SCATTER:.0%} above its "
    f"median, its first and last turns differ by more than {MOST_DRIFT:.0%}, or other programs ran "
    "beside it. No ratio is made of it."
)
ADVICE = (
    "Close other programs (`top` and `nvidia-smi` list them), wait until the machine is idle, and "
    "measure again"
)


def scatter(spread: summary.Spread) -> float:
    """How far p95 lies above the median, as a share of it."""
    return spread.p95 / spread.p50 - 1


def drift(turns: Sequence[float]) -> float | None:
    """How far the first and the last time differ, as a share of the faster; None of one time."""
    if len(turns) < 2:
        return None
    first, last = turns[0], turns[-1]
    return max(first, last) / min(first, last) - 1


def doubt(spread: summary.Spread, turns: Sequence[float], load: str = "") -> str:
    """Why a time must not be spoken of; "" where it may be. `load` is what ran beside it."""
    reasons = []
    if scatter(spread) > MOST_SCATTER:
        reasons.append(f"p95 is {scatter(spread):.0%} above the median")
    drifted = drift(turns)
    if drifted is not None and drifted > MOST_DRIFT:
        reasons.append(f"its first and last turns differ by {drifted:.0%}")
    return "; ".join(reasons + [load] * bool(load))


def doubt_of_batches(batches: Sequence[float]) -> str:
    """The same for one turn: the medians of its two halves stand for the first and last turns."""
    half = len(batches) // 2
    turns = [statistics.median(batches[:half]), statistics.median(batches[-half:])]
    return doubt(summary.spread(batches), turns if half > 1 else [])


def doubt_of_row(by_name: Mapping[str, Sequence[float]], load: str = "") -> str:
    """Why nothing may be concluded from several programs that were timed in turns, by what each is
    called: the first program's reason, and `load`.
    """
    told = ((name, doubt_of_batches(batches)) for name, batches in by_name.items())
    reasons = [f"{name}: {reason}" for name, reason in told if reason]
    return "; ".join(reasons[:1] + [load] * bool(load))


@dataclasses.dataclass(kw_only=True)
class InTurns:
    """A row of programs that are timed in turns. By each program's name, it has the seconds of one
    call, the batches whose median these are, and the errors found when the programs were compared.
    `wrong` or `skipped` is why there are no seconds; `load` is what other programs did meanwhile.
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    batches: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    wrong: str = ""
    skipped: str = ""
    load: str = ""

    @property
    def doubt(self) -> str:
        """Why nothing may be concluded from its times."""
        return doubt_of_row(self.batches, self.load)

    @property
    def again(self) -> bool:
        """Whether a run with --resume measures it again."""
        return bool(self.doubt or self.wrong or self.skipped)

    @classmethod
    def of_file(cls, told: Mapping[str, Any]) -> Self:
        """From a row of a file. Such a row also has what follows from the times, which is left out,
        and may lack fields that were added later.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: told[name] for name in names if name in told})


def busy(reason: str) -> str:
    """The message that a command prints where it cannot conclude anything."""
    return f"This machine is busy: {reason}. {ADVICE}."


def left_out(doubts: Sequence[str], what: str = "rows") -> str:
    """The message of a command whose rows have these doubts; "" where all are steady."""
    marked = [one for one in doubts if one]
    if not marked:
        return ""
    count = f"{len(marked)} of {len(doubts)} {what} are not steady, and say nothing"
    return f"{LEGEND}\n{busy(f'{count} ({marked[0]})')}"
