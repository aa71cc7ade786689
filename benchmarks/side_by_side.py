"""An op beside its peers: what `linear` and `attention` share.

For each case, everything that takes it is compiled and compared with float64 first, and then timed
in turns; the figure is the median of the turns. What was found is written after every group of
rows, those of a case and phase, and `--resume` goes on with what a file lacks.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from absl import flags, logging

from benchmarks import byte_limit, cases, ours, peers, results, run, summary, timing
from benchmarks.cases import Case
from benchmarks.results import NO_TIME_LEFT, Results, ResultsError, Row

FLAGS = flags.FLAGS
flags.DEFINE_string("json", "", "linear, attention: where to write all figures, a .json")
flags.DEFINE_string("csv", "", "linear, attention: where to write a line for each row, a .csv")
flags.DEFINE_bool(
    "resume", False, "linear, attention: keep the figures in --json, measure what it lacks"
)
flags.register_multi_flags_validator(
    ["resume", "json"],
    lambda given: given["json"] or not given["resume"],
    "--resume goes on with the file that --json names",
)
flags.DEFINE_float(
    "within_s", 210, "linear, attention: start nothing new after so long", lower_bound=0
)
flags.DEFINE_string("case", "", "linear, attention: only cases whose name contains this")
flags.DEFINE_string(
    "contender", "", "linear, attention: only ato_jax and peers whose name contains this"
)

TURNS = 3
TURN_SECONDS = 0.03
# What takes longer than this, and than twice the fastest, is timed in one turn: it is far behind.
SLOW_SECONDS = 0.03

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
    end.
    """

    cases: Mapping[str, tuple[Case, ...]]
    in_jax: Mapping[str, InJax]
    in_torch: Mapping[str, InTorch]


# A contender's errors and its turn, or why it has none.
Ready = tuple[dict[str, float], Turn] | str


def compiled(contest: Contest, case: Case, phase: str, name: str) -> Callable[[], Ready]:
    """The contender on JAX, compiled; the result compares it, when nothing else runs any more.

    A program that runs while others compile, or run, may break off their recording of CUDA graphs:
    cuDNN's results were wrong then.
    """
    try:
        ready = contest.in_jax[name].compiled(case, phase)
    except Exception as error:  # a peer's own: its reason, and on to the next
        ready = refusal(error)

    def compare() -> Ready:
        try:
            found = ours.finished(ready)
        except Exception as error:  # as above
            return refusal(error)
        return found if isinstance(found, str) else (found.errors, found.time)

    return compare


def prepared_by(peer: peers.Peer, case: Case, phase: str, name: str) -> Ready:
    """The contender of PyTorch's process."""
    errors = peer.prepare(name, case, phase)
    return errors if isinstance(errors, str) else (errors, functools.partial(peer.time, name))


def compilers() -> concurrent.futures.ThreadPoolExecutor:
    """Threads that compile: each compilation takes more than one by itself."""
    return concurrent.futures.ThreadPoolExecutor(max(1, byte_limit.threads() // 2))


def refusal(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def wanted(contest: Contest, case: Case) -> list[str]:
    """The names of those that take the case, this library first."""
    both = [*contest.in_jax.items(), *contest.in_torch.items()]
    found = [name for name, one in both if one.takes(case)]
    return [name for name in found if name.startswith("ato_jax") or FLAGS.contender in name]


def measure(
    contest: Contest,
    peer: peers.Peer,
    case: Case,
    phase: str,
    limit: float,
    left: Callable[[], float],
    known: Collection[str] = (),
) -> list[Row]:
    """Rows of all contenders but the known ones, prepared and then timed in turns."""
    work = case.traffic(phase), case.operations(phase)
    names = [name for name in wanted(contest, case) if name not in known]
    rows = [Row(str(case), phase, name, limit, *work) for name in names]
    batches: dict[str, list[float]] = {name: [] for name in names}

    def compare_later(row: Row) -> Callable[[], Ready]:
        if left() <= 0:
            return lambda: NO_TIME_LEFT
        run.progress(f"{case}, {phase}: {row.contender}")
        if row.contender in contest.in_jax:
            return compiled(contest, case, phase, row.contender)
        return lambda: prepared_by(peer, case, phase, row.contender)

    def searches(row: Row) -> bool:
        return row.contender not in contest.in_jax or contest.in_jax[row.contender].searches

    turns: dict[str, Turn] = {}
    together = [row for row in rows if not searches(row)]
    with compilers() as pool:
        comparisons = list(pool.map(compare_later, together))
    alone = [row for row in rows if searches(row)]
    comparisons += map(compare_later, alone)
    for row, compare in zip(together + alone, comparisons, strict=True):
        ready = compare() if left() > 0 else NO_TIME_LEFT
        if isinstance(ready, str):
            row.unavailable = ready
        else:
            row.errors, turns[row.contender] = ready
    for turn in range(TURNS):
        fastest = min((row.turns[-1] for row in rows if row.turns), default=0.0)
        for row in rows:
            # At least once, whatever the time.
            slow = row.turns and row.turns[-1] > max(SLOW_SECONDS, 2 * fastest)
            if row.contender not in turns or turn and (slow or left() <= 0):
                continue
            timed = turns[row.contender](TURN_SECONDS)
            if isinstance(timed, str):
                # It has no figure then: its earlier turns are in doubt.
                row.unavailable = timed
                row.turns.clear()
                del turns[row.contender]
            else:
                row.turns.append(timed.seconds)
                batches[row.contender] += timed.batches
    for row in rows:
        if row.turns:
            row.seconds = statistics.median(row.turns)
            row.spread = summary.spread(batches[row.contender])
    peer.forget()
    run.progress("")
    return rows


@dataclasses.dataclass
class Meeting:
    """One run of a contest: what was found so far, in this run or before, and until when it goes
    on.
    """

    contest: Contest
    peer: peers.Peer
    results: Results
    end: float

    def left(self) -> float:
        return self.end - time.monotonic()

    def cases(self) -> Iterator[Case]:
        """Those that are wanted."""
        for case in self.contest.cases[ours.platform()]:
            if FLAGS.case in str(case):
                yield case

    def measure(self, case: Case, phase: str) -> list[Row]:
        """The rows of the case and phase: those that are there already, and the rest measured."""
        names = wanted(self.contest, case)
        group = str(case), phase
        found = {row.contender: row for row in self.results.rows if row.key[:2] == group}
        if not found.keys() >= set(names):
            limit = byte_limit.limit(case, phase, self.results.bandwidth)
            new = measure(self.contest, self.peer, case, phase, limit, self.left, found)
            self.results.rows += new
            self.write()
            found |= {row.contender: row for row in new}
        return [found[name] for name in names]

    def write(self) -> None:
        """All that was found so far, where files for it were named."""
        if FLAGS.json:
            results.write(Path(FLAGS.json), results.json_text(self.results))
        if FLAGS.csv:
            results.write(Path(FLAGS.csv), results.csv_text(self.results))


def resumed(path: Path, earlier: Results, here: Results) -> Results:
    """What was found earlier, to go on with.

    It keeps its copy bandwidth: the byte limits of one file are of one bandwidth.
    """
    there_and_here = [
        f"{name} is {getattr(earlier, name)} there and {getattr(here, name)} here"
        for name in results.SAME
        if getattr(earlier, name) != getattr(here, name)
    ]
    if there_and_here:
        raise ResultsError(f"{path} cannot be resumed: {'; '.join(there_and_here)}")
    kept = [row for row in earlier.rows if row.unavailable != NO_TIME_LEFT]
    print(
        f"{len(kept)} rows are from {path}, byte limits at its copy's "
        f"{earlier.bandwidth / 1e12:.3f} TB/s",
        flush=True,
    )
    return dataclasses.replace(earlier, rows=kept)


def unknown(contest: Contest, platform: str) -> str:
    """What is wrong with the flags that choose cases and contenders; "" if nothing."""
    names = [str(case) for case in contest.cases[platform]]
    if not any(FLAGS.case in name for name in names):
        return f"No case contains --case={FLAGS.case!r}: {'; '.join(names)}"
    names = [*contest.in_jax, *contest.in_torch]
    if not any(FLAGS.contender in name for name in names):
        return f"No contender contains --contender={FLAGS.contender!r}: {'; '.join(names)}"
    return ""


def hold(contest: Contest, tell: Callable[[Meeting], None]) -> int:
    """Runs the contest: `tell` measures and prints; the exit status."""
    platform = ours.platform()
    if platform not in contest.cases:
        logging.error("The benchmarks run on a CPU or an NVIDIA GPU, JAX computes on %s", platform)
        return 1
    if reason := unknown(contest, platform):
        logging.error("%s", reason)
        return 2
    path = Path(FLAGS.json)
    earlier = results.read(path) if FLAGS.resume else None
    end = time.monotonic() + FLAGS.within_s
    with peers.Peer(platform) as peer:
        facts = run.introduced(peer, platform)
        if facts is None:
            return 1
        here = Results(**facts)
        meeting = Meeting(contest, peer, resumed(path, earlier, here) if earlier else here, end)
        # Before anything is measured: a file that cannot be written is known now.
        meeting.write()
        tell(meeting)
    return 0


def phases(case: Case) -> tuple[str, ...]:
    return cases.PHASES[: 1 if case.op == "step" else 2]
