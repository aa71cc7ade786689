"""An op beside its peers: what all suites share.

For each case, everything that takes it is compiled and compared with float64 first, and then timed
in turns; the figure is the median of the turns. On a GPU other processes have compiled for all of
a run before (`ahead.py`). What was found is written after every group of rows, those of a case and
phase, and `--resume` goes on with what a file lacks.

A contender that fails costs its own row: one of PyTorch's process also where it ends that process
or gives no answer; one of this process where it raises an error, or does not finish compiling. One
that ends this process leaves its name in a file beside the figures, and `--resume` goes on without
it; one that leaves the device unusable has this program started again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import (
    ahead,
    byte_limit,
    cases,
    kept,
    other_load,
    ours,
    peers,
    progress,
    summary,
    timing,
)
from benchmarks.ahead import Ahead
from benchmarks.cases import Case
from benchmarks.results import NO_TIME_LEFT, Results, Row
from benchmarks.spending import CHECKING, COMPILING, TIMING, clock
from benchmarks.store import Store

FLAGS = flags.FLAGS
flags.DEFINE_float("within_s", 0, "run: start nothing new after so long; 0: as the suites say", 0)
flags.DEFINE_string("case", "", "run: only cases whose name contains this")
flags.DEFINE_list("peer", [], "run: only ato_jax and peers whose name contains one of these")
flags.DEFINE_enum("dtype", "", ["", *cases.ITEMSIZES], "run: all cases in this dtype")
flags.DEFINE_bool("forward_only", False, "run: without the backward pass")

TURNS = 3
TURN_SECONDS = 0.03
# Where a turn's calls take longer than this, the row has two turns: each has three batches at
# least, whatever a call takes, so a row of 20 ms a call has 16 calls in all.
LONG_TURN_SECONDS = 0.5
LONG_TURNS = 2
# What takes longer than this, and than twice the fastest, is timed in one turn: it is far behind.
SLOW_SECONDS = 0.03
# For all that compiles at one time.
LONGEST_COMPILE_SECONDS = 120

# Times one turn, or says why it cannot.
Turn = Callable[[float], timing.Timing | str]


class InTorch(Protocol):
    """What the table needs of a contender of PyTorch's process; that one prepares it by name."""

    @property
    def takes(self) -> Callable[[Case], bool]: ...


class InJax(InTorch, Protocol):
    """What it needs of one in this process.

    `searches` where XLA times variants of products while it compiles: nothing runs beside that.
    """

    @property
    def searches(self) -> bool: ...

    def compiled(self, case: Case, phase: str) -> ours.Compiled | str: ...


@dataclasses.dataclass(frozen=True)
class Contest:
    """Who meets whom over what.

    `cases` are by platform, the most telling first: what the time does not suffice for is at the
    end. Where cases are many, `turns` may be fewer, or `meets(case, name)` leave out some of those
    that take the case.
    """

    cases: Mapping[str, tuple[Case, ...]]
    in_jax: Mapping[str, InJax]
    in_torch: Mapping[str, InTorch]
    phases: tuple[str, ...] = cases.PHASES
    turns: int = TURNS
    meets: Callable[[Case, str], bool] = lambda case, name: True

    def phases_of(self, case: Case) -> tuple[str, ...]:
        forward_alone = case.op in cases.STEPS or case.decoding or FLAGS.forward_only
        return self.phases[:1] if forward_alone else self.phases

    def groups(self, platform: str) -> list[tuple[Case, str]]:
        cases = self.wanted_cases(platform)
        return [(case, phase) for case in cases for phase in self.phases_of(case)]

    def wanted_cases(self, platform: str) -> list[Case]:
        """Those that the flags leave, in the dtype that they ask for."""
        found = self.cases[platform]
        if FLAGS.dtype:
            found = tuple(dataclasses.replace(case, dtype=FLAGS.dtype) for case in found)
        return [case for case in found if FLAGS.case in str(case)]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One that was compared: its turn, and what a row says of it beside times."""

    errors: dict[str, float]
    turn: Turn
    scratch: int | None = None
    picked: str = ""


Ready = Contestant | str
# A case, a phase and a contender.
Job = tuple[Case, str, str]


class DeviceLostError(RuntimeError):
    """JAX computes nothing any more in this process."""


# What did not finish compiling, and runs on in its thread.
stuck: list[concurrent.futures.Future[Any]] = []


def compiled(contest: Contest, case: Case, phase: str, name: str) -> Callable[[], Ready]:
    """The contender on JAX, compiled; the result compares it, when nothing else runs any more.

    A program that runs while others compile, or run, may break off their recording of CUDA graphs:
    cuDNN's results were wrong then.
    """
    try:
        ready = contest.in_jax[name].compiled(case, phase)
    except Exception as error:  # a peer's own: its reason, and on to the next
        ready = refusal(error)
    return functools.partial(compared, ready)


def compared(ready: ours.Compiled | str) -> Ready:
    try:
        found = ours.finished(ready)
    except Exception as error:  # a peer's own: its reason, and on to the next
        return refusal(error)
    if isinstance(found, str):
        return found

    def turn(seconds: float) -> timing.Timing | str:
        try:
            return found.time(seconds)
        except Exception as error:  # as above
            return refusal(error)

    return Contestant(found.errors, turn, found.scratch)


def loaded(contest: Contest, told: Any, *job: Any) -> Callable[[], Ready]:
    """The same of what another process compiled. Where that does not run here, it is compiled here:
    it costs nobody the row.
    """

    def compare() -> Ready:
        found = compared(lambda: ours.unpacked(told)())
        if not isinstance(found, str):
            return found
        case, phase, name = job
        print(f"{case}, {phase}: {name} is compiled again: {found}", flush=True)
        with clock(COMPILING, name):
            return compiled(contest, case, phase, name)()

    return compare


def prepared_by(peer: peers.Peer, case: Case, phase: str, name: str) -> Ready:
    """The contender of PyTorch's process."""
    found = peer.prepare(name, case, phase)
    if isinstance(found, str):
        return found
    return Contestant(turn=functools.partial(peer.time, name), **found)


def all_compiled(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each job gives, or why it has not finished."""
    pool = concurrent.futures.ThreadPoolExecutor(ahead.workers())
    futures = [pool.submit(job) for job in jobs]
    _, late = concurrent.futures.wait(futures, LONGEST_COMPILE_SECONDS)
    pool.shutdown(wait=not late, cancel_futures=True)
    stuck.extend(future for future in late if not future.cancelled())
    reason = f"compiling took longer than {LONGEST_COMPILE_SECONDS} s"
    return [(lambda: reason) if one in late else one.result() for one in futures]


def refusal(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def device_works() -> bool:
    try:
        jax.block_until_ready(jnp.arange(8) + 1)
    except Exception:  # whatever it is, nothing runs any more
        return False
    return True


def is_ours(name: str) -> bool:
    return name.startswith(("ato_jax", "ato_torch"))


def wanted(contest: Contest, case: Case) -> list[str]:
    """The names of those that take the case, this library first."""
    both = [*contest.in_jax.items(), *contest.in_torch.items()]
    found = [name for name, one in both if one.takes(case) and contest.meets(case, name)]
    return [name for name in found if is_ours(name) or chosen(name)]


def chosen(name: str) -> bool:
    return not FLAGS.peer or any(part in name for part in FLAGS.peer)


def measure(
    contest: Contest,
    peer: peers.Peer,
    case: Case,
    phase: str,
    limit: float,
    left: Callable[[], float],
    known: Collection[str] = (),
    product_limit: float | None = None,
    ready_made: Callable[[str], Callable[[], Ready] | None] = lambda name: None,
    attempt: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Rows of all contenders but the known ones, prepared and then timed in turns.

    `ready_made(name)` is one on JAX that is compiled already, and `attempt(name)` is told which of
    them is about to run for the first time.
    """
    work = case.traffic(phase), case.operations(phase)
    names = [name for name in wanted(contest, case) if name not in known]
    about = {"product_limit": product_limit, "held": case.held(phase)}
    rows = [Row(str(case), phase, name, limit, *work, **about) for name in names]
    batches: dict[str, list[float]] = {name: [] for name in names}
    hosts: dict[str, list[float]] = {name: [] for name in names}
    longest = dict.fromkeys(names, 0.0)

    def compare_later(row: Row) -> Callable[[], Ready]:
        if left() <= 0:
            return lambda: NO_TIME_LEFT
        progress.show(f"{case}, {phase}: {row.contender}")
        if row.contender in contest.in_jax:
            return ready_made(row.contender) or compiled(contest, case, phase, row.contender)
        return lambda: prepared_by(peer, case, phase, row.contender)

    def searches(row: Row) -> bool:
        return row.contender not in contest.in_jax or contest.in_jax[row.contender].searches

    turns: dict[str, Turn] = {}
    together = [row for row in rows if not searches(row)]
    with clock(COMPILING):
        comparisons = all_compiled([functools.partial(compare_later, row) for row in together])
    alone = [row for row in rows if searches(row)]
    for row in alone:
        job = functools.partial(compare_later, row)
        with clock(COMPILING, row.contender):
            comparisons += all_compiled([job]) if row.contender in contest.in_jax else [job()]
    lost = False
    for row, compare in zip(together + alone, comparisons, strict=True):
        if lost or left() <= 0:
            row.unavailable = NO_TIME_LEFT
            continue
        attempt(row.contender)
        with clock(CHECKING, row.contender):
            ready = compare()
        if isinstance(ready, str):
            row.unavailable = ready
            lost = row.contender in contest.in_jax and not device_works()
        else:
            row.errors, row.scratch, row.picked = ready.errors, ready.scratch, ready.picked
            turns[row.contender] = ready.turn
    watch = other_load.Watch(ours.platform())
    for turn in range(0 if lost else contest.turns):
        fastest = min((row.turns[-1] for row in rows if row.turns), default=0.0)
        for row in rows:
            # At least once, whatever the time.
            slow = row.turns and row.turns[-1] > max(SLOW_SECONDS, 2 * fastest)
            enough = turn >= LONG_TURNS and longest[row.contender] > LONG_TURN_SECONDS
            if row.contender not in turns or turn and (slow or enough or left() <= 0):
                continue
            start = time.monotonic()
            with clock(TIMING, row.contender):
                timed = turns[row.contender](TURN_SECONDS)
            longest[row.contender] = max(longest[row.contender], time.monotonic() - start)
            if isinstance(timed, str):
                # It has no figure then: its earlier turns are in doubt.
                row.unavailable = timed
                row.turns.clear()
                del turns[row.contender]
            else:
                row.turns.append(timed.seconds)
                batches[row.contender] += timed.batches
                hosts[row.contender].append(timed.host)
    load = watch.told()
    for row in rows:
        if row.turns:
            row.load = load
            row.seconds = statistics.median(row.turns)
            row.spread = summary.spread(batches[row.contender])
            row.host = statistics.median(hosts[row.contender])
        elif not row.unavailable:
            # It was compared, and another one ended the device before its turn.
            row.unavailable = NO_TIME_LEFT
    peer.forget()
    progress.show("")
    return rows


@dataclasses.dataclass(frozen=True)
class Programs:
    """What contests lack, in the order in which it is timed: programs for JAX with the number of
    the contest that asks for each, and contenders that fill PyTorch's caches, those together that
    share what is compiled.
    """

    in_jax: dict[Job, int]
    in_torch: list[list[Job]]


def lacking(
    contests: Sequence[Contest], known: Collection[tuple[str, str, str]], platform: str
) -> Programs:
    """All that is compiled ahead but for the known rows. A row goes by its name: several contests
    may ask for it.
    """
    in_jax: dict[Job, int] = {}
    in_torch: dict[Job, Hashable] = {}
    for number, contest in enumerate(contests):
        for case, phase in contest.groups(platform):
            for name in wanted(contest, case):
                job = case, phase, name
                if (str(case), phase, name) in known:
                    continue
                if name not in contest.in_jax:
                    shared = getattr(contest.in_torch[name], "shares", None)
                    if shared:
                        in_torch.setdefault(job, (name, shared(case)))
                elif not contest.in_jax[name].searches:
                    in_jax.setdefault(job, number)
    together: dict[Hashable, list[Job]] = {}
    for job, kind in in_torch.items():
        together.setdefault(kind, []).append(job)
    return Programs(in_jax, [*together.values()])


@dataclasses.dataclass
class Plan:
    """What is compiled of a run. What is not is compiled by threads of this process, for each
    group of rows when it comes to it; but `late` is left for a later run.
    """

    programs: dict[Job, Callable[[], Ready]] = dataclasses.field(default_factory=dict)
    late: set[Job] = dataclasses.field(default_factory=set)

    def compile_ahead(
        self,
        contests: Sequence[Contest],
        found: Results,
        helpers: Ahead,
        seconds: float | None = None,
    ) -> None:
        """All that the contests lack, by other processes, in so many seconds at most."""
        wanted = lacking(contests, {row.key for row in found.rows}, found.platform)
        # Backward passes take the longest: at the end nothing waits for one of them.
        ordered = sorted(wanted.in_jax, key=lambda job: job[1] == cases.PHASES[0])
        numbered = [(wanted.in_jax[job], *job) for job in ordered]
        count = sum(map(len, wanted.in_torch))
        progress.show(f"compiling {len(ordered)} programs for JAX, {count} for PyTorch")
        with clock(COMPILING):
            answers = helpers.programs(numbered, wanted.in_torch, seconds)
        for job, told in zip(ordered, answers, strict=True):
            self._take(job, told, contests[wanted.in_jax[job]])

    def take(self, contests: Sequence[Contest], found: Results, store: Store) -> None:
        """Takes the programs that the contests lack from a store, if an earlier process put them
        there."""
        wanted = lacking(contests, {row.key for row in found.rows}, found.platform)
        for job, number in wanted.in_jax.items():
            name = ahead.named(*job)
            if store.has(name):
                self._take(job, store.get(name), contests[number])
            else:
                self.late.add(job)
        print(
            f"{len(wanted.in_jax) - len(self.late)} of {len(wanted.in_jax)} programs are in "
            f"{store.folder}",
            flush=True,
        )

    def _take(self, job: Job, told: ahead.Answer, contest: Contest) -> None:
        # Or another process held the memory.
        if told is not None and told != ours.OUT_OF_MEMORY:
            reason = isinstance(told, str)
            later = functools.partial(compared, told) if reason else None
            self.programs[job] = later or loaded(contest, told, *job)


@dataclasses.dataclass
class Meeting:
    """One run of a contest: what was found so far, in this run or before, and until when it goes
    on.
    """

    contest: Contest
    peer: peers.Peer
    results: Results
    end: float
    plan: Plan

    def left(self) -> float:
        return self.end - time.monotonic()

    def cases(self) -> Iterator[Case]:
        """Those that are wanted."""
        yield from self.contest.wanted_cases(self.results.platform)

    def groups(self) -> list[tuple[Case, str]]:
        return self.contest.groups(self.results.platform)

    def found(self, case: Case, phase: str) -> dict[str, Row]:
        """By contender: the rows of the case and phase that are there."""
        group = str(case), phase
        return {row.contender: row for row in self.results.rows if row.key[:2] == group}

    def has(self, case: Case, phase: str) -> bool:
        """Whether all rows of the case and phase are there."""
        return self.found(case, phase).keys() >= set(wanted(self.contest, case))

    def measure(self, case: Case, phase: str) -> list[Row]:
        """The rows of the case and phase: those that are there already, and the rest measured."""
        names = wanted(self.contest, case)
        found = self.found(case, phase)
        if not self.has(case, phase):
            late = any((case, phase, name) in self.plan.late for name in set(names) - found.keys())
            # That of float32 is one in full precision.
            rate = None if case.tf32 else self.results.matrix.get(case.dtype)
            new = measure(
                self.contest,
                self.peer,
                case,
                phase,
                byte_limit.limit(case, phase, self.results.bandwidth),
                (lambda: 0.0) if late else self.left,
                found,
                case.operations(phase) / rate if rate else None,
                lambda name: self.plan.programs.pop((case, phase, name), None),
                lambda name: self._mark(case, phase, name),
            )
            self.results.rows += kept.signed(new)
            kept.write(self.results)
            self._mark(case, phase, "")
            progress.step()
            found |= {row.contender: row for row in new}
            if any(row.unavailable for row in new) and not device_works():
                raise DeviceLostError
        return [found[name] for name in names]

    def _mark(self, case: Case, phase: str, name: str) -> None:
        """Says beside the file of figures what runs on JAX now, for the run after one that died."""
        if not name or name in self.contest.in_jax:
            kept.mark(str(case), phase, name)


def unknown(contests: Sequence[Contest]) -> str:
    """What is wrong with the flags that choose cases and peers; "" if nothing."""
    platform = ours.platform()
    names = [str(case) for contest in contests for case in contest.cases[platform]]
    if not any(contest.wanted_cases(platform) for contest in contests):
        return f"No case contains --case={FLAGS.case!r}: {'; '.join(dict.fromkeys(names))}"
    both = [name for one in contests for name in [*one.in_jax, *one.in_torch]]
    for part in FLAGS.peer:
        if not any(part in name for name in both):
            return f"No peer contains --peer={part!r}: {'; '.join(dict.fromkeys(both))}"
    return ""
