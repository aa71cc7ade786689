"""The phase in which a part of the whole report compiles, on all cores and for all cards, before
anything is timed. `ahead.py` says how, `store.py` what is kept of it.

The jobs of the stages are mixed, each stage's in the order in which it times its rows. So where the
phase ends early, every stage has rows to time, and the next part compiles what is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from benchmarks import ahead, choices, cliff_rows, cliffs, side_by_side, suites
from benchmarks.ahead import InTorch, Job
from benchmarks.cases import PHASES
from benchmarks.choices import Row
from benchmarks.store import Store

# The suites of the stage `report`.
REPORT = "report"
# A fresh process imports JAX and this library, and only then begins.
SHORTEST_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Jobs:
    """The programs that a stage needs from JAX, and the contenders that fill PyTorch's caches.
    Contenders that share compiled code stand in one sequence, and are compiled by one process.
    """

    in_jax: Sequence[Job]
    in_torch: Sequence[Sequence[InTorch]] = ()


def of_report(known: Collection[tuple[str, str, str]], platform: str) -> Jobs:
    wanted = side_by_side.lacking(suites.contests(suites.named(REPORT)), known, platform)
    return Jobs([(number, *job) for job, number in wanted.in_jax.items()], wanted.in_torch)


def of_cliffs(known: Collection[tuple[str, str, str]], platform: str) -> Jobs:
    """Those of each row that is lacking, and of the base case beside which it is timed."""
    groups = [
        (step, phase)
        for step in cliff_rows.STEPS[platform]
        for phase in step.phases
        if (str(step.row), phase, cliffs.OURS) not in known
    ]
    return Jobs([choices.job_of(*group, by_name=False) for group in cliffs.both_of(groups)])


def of_choices(rows: Sequence[Row], known: Collection[tuple[str, str]]) -> Jobs:
    groups = [(row, phase) for row in rows for phase in PHASES]
    return Jobs([choices.job_of(*one) for one in groups if (str(one[0]), one[1]) not in known])


def mixed(parts: Sequence[Sequence[Job]]) -> list[Job]:
    """The jobs of all parts, each part at the same rate from its beginning to its end."""
    placed = [
        ((index + 0.5) / len(part), number, job)
        for number, part in enumerate(parts)
        for index, job in enumerate(part)
    ]
    return [job for *_, job in sorted(placed, key=lambda one: one[:2])]


def fill(
    stages: Sequence[Jobs],
    platform: str,
    cards: Sequence[str],
    seconds: float,
    kept: Store,
) -> int:
    """Compiles what is not in the store; how many jobs it lacks then."""
    jobs = mixed([stage.in_jax for stage in stages])
    in_torch = [many for stage in stages for many in stage.in_torch]
    wanted = [job for job in jobs if not kept.has(ahead.key(job))]
    if not wanted or seconds < SHORTEST_SECONDS:
        return len(wanted)
    with ahead.Ahead(platform, ["", REPORT], ahead.workers(), cards) as helpers:
        return helpers.fill(jobs, in_torch, seconds, kept)
