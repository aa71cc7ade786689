"""An op beside its peers: what `linear` and `attention` share.

For each case, everything that takes it is compiled and compared with float64 first, and then timed
in turns; the figure is the median of the turns.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from absl import flags, logging

from benchmarks import byte_limit, cases, ours, peers, run, timing
from benchmarks.cases import Case

FLAGS = flags.FLAGS
flags.DEFINE_string("json", "", "linear, attention: where to write all figures, a .json")
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


@dataclasses.dataclass
class Row:
    """What was found of one contender: its turns' seconds and errors, or the reason for neither.

    `operations` are those of the products, where they are the measure.
    """

    case: str
    phase: str
    contender: str
    limit: float
    operations: float | None = None
    seconds: float | None = None
    turns: list[float] = dataclasses.field(default_factory=list)
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    unavailable: str = ""

    @property
    def reached(self) -> float | None:
        """The share of the byte limit."""
        return self.limit / self.seconds if self.seconds else None

    @property
    def rate(self) -> float | None:
        """Operations per second."""
        return self.operations / self.seconds if self.seconds and self.operations else None

    def told_errors(self) -> list[str]:
        """Of the output and dq, as the tables print them."""
        return [f"{self.errors[name]:.1e}" if name in self.errors else "" for name in ("out", "dq")]


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
) -> list[Row]:
    """Rows of all contenders, prepared and then timed in turns."""
    operations = case.operations(phase) if case.op == "softmax" else None
    rows = [Row(str(case), phase, name, limit, operations) for name in wanted(contest, case)]

    def compare_later(row: Row) -> Callable[[], Ready]:
        if left() <= 0:
            return lambda: "no time left"
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
        ready = compare() if left() > 0 else "no time left"
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
    for row in rows:
        row.seconds = statistics.median(row.turns) if row.turns else None
    peer.forget()
    run.progress("")
    return rows


@dataclasses.dataclass
class Meeting:
    """One run of a contest: what it runs on, the time that is left, and what was found so far."""

    contest: Contest
    peer: peers.Peer
    facts: dict[str, Any]
    end: float
    rows: list[Row] = dataclasses.field(default_factory=list)

    def left(self) -> float:
        return self.end - time.monotonic()

    def cases(self) -> Iterator[Case]:
        """Those that are wanted."""
        for case in self.contest.cases[ours.platform()]:
            if FLAGS.case in str(case):
                yield case

    def measure(self, case: Case, phase: str) -> list[Row]:
        limit = byte_limit.limit(case, phase, self.facts["bandwidth"])
        found = measure(self.contest, self.peer, case, phase, limit, self.left)
        self.rows += found
        return found

    def write(self) -> None:
        """All that was found so far, where a file for it was named."""
        if not FLAGS.json:
            return
        path = Path(FLAGS.json)
        told = [
            dataclasses.asdict(row) | {"reached": row.reached, "rate": row.rate}
            for row in self.rows
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.facts | {"rows": told}, indent=1) + "\n")


def hold(contest: Contest, tell: Callable[[Meeting], None]) -> int:
    """Runs the contest: `tell` measures, prints and writes; the exit status."""
    platform = ours.platform()
    if platform not in contest.cases:
        logging.error("The benchmarks run on a CPU or an NVIDIA GPU, JAX computes on %s", platform)
        return 1
    end = time.monotonic() + FLAGS.within_s
    with peers.Peer(platform) as peer:
        facts = run.introduced(peer, platform)
        if facts is None:
            return 1
        tell(Meeting(contest, peer, facts, end))
    return 0


def phases(case: Case) -> tuple[str, ...]:
    return cases.PHASES[: 1 if case.op == "step" else 2]
