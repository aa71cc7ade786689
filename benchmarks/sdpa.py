"""The suite `sdpa`: `ato_torch.attention` beside SDPA by the backend that PyTorch chooses.

Both run in one process of PyTorch. Every case has the same number of tokens and of columns: 16,384
tokens and 2,048 columns, as in the benchmarks of FlashAttention. A ratio is SDPA's time over that
of `ato_torch.attention`, so above 1 this library is faster.

A program of `ato_torch` and a plan of cuDNN belong to the process that made them, and making them
takes most of the suite's time. So on a GPU there are several processes. They run some cases once,
side by side; then these cases are timed one after the other, each by the process that has its
programs, while the other processes wait.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence

from benchmarks import attention_torch, byte_limit, noise, tables
from benchmarks.cases import PHASES, Case
from benchmarks.findings import Found, cases_of, steady_ratio
from benchmarks.peers import Peer
from benchmarks.results import Results
from benchmarks.side_by_side import Contest, Meeting
from benchmarks.spending import COMPILING, clock
from benchmarks.tables import Table

OURS, THEIRS = "ato_torch", "SDPA default"
TOKENS, COLUMNS = 16384, 2048
# The most telling first: where time runs out, the short ones are left.
LENGTHS = (4096, 1024, 16384, 512, 2048, 8192, 128, 256)
WIDTHS = (64, 128, 256)
# From here on every ratio should be 1 or more.
LONG = 1024
# The cases and phases that a process compiles before they are timed.
AT_A_TIME = 4

CONTEST = Contest(
    {
        "gpu": tuple(
            Case("softmax", TOKENS // T, COLUMNS // D, T, D, "bfloat16", causal=causal)
            for T in LENGTHS
            for D in WIDTHS
            for causal in (True, False)
        ),
        "cpu": tuple(
            Case("softmax", B=1, H=2, T=32, D=16, dtype="float32", causal=causal)
            for causal in (True, False)
        ),
    },
    {},
    {
        OURS: attention_torch.ON_HOST[OURS],
        THEIRS: dataclasses.replace(
            attention_torch.CONTENDERS[THEIRS], takes=lambda case: case.op == "softmax"
        ),
    },
)


def tell(meeting: Meeting, count: int | None = None) -> None:
    """Measures the cases and phases, and prints a table of each. `count` processes of PyTorch
    compile at one time, the meeting's among them: on a GPU 3 for 4 cores, unless it is given, and
    on a CPU one, where compiling takes little.
    """
    groups = meeting.groups()
    lacking = [group for group in groups if not meeting.has(*group)]
    on_gpu = meeting.results.platform == "gpu"
    count = count or (max(1, 3 * byte_limit.threads() // 4) if on_gpu else 1)
    count = max(1, min(count, len(lacking)))
    helpers = [Peer(meeting.results.platform, leads=True) for _ in range(count - 1)]
    every = [meeting.peer, *helpers]
    try:
        for first in range(0, len(groups), count * AT_A_TIME):
            share = groups[first : first + count * AT_A_TIME]
            if count > 1:
                compile_side_by_side(meeting, every, share)
            for index, (case, phase) in enumerate(share):
                by_one = dataclasses.replace(meeting, peer=every[index % count])
                if rows := by_one.measure(case, phase):
                    print("\n" + tables.measured(rows).text(), flush=True)
    finally:
        for helper in helpers:
            helper.end()


def compile_side_by_side(
    meeting: Meeting, peers: Sequence[Peer], groups: Sequence[tuple[Case, str]]
) -> None:
    """Each process runs both contenders once in every case and phase that it will time."""

    def compile_share(number: int) -> None:
        for group in groups[number :: len(peers)]:
            # The reason of a failure is told where the case is timed.
            for name in (OURS, THEIRS):
                if meeting.left() > 0 and not meeting.has(*group):
                    peers[number].warm(name, *group)

    pool = concurrent.futures.ThreadPoolExecutor(len(peers))
    with clock(COMPILING):
        try:
            shares = [pool.submit(compile_share, number) for number in range(len(peers))]
            for share in shares:
                share.result()
        finally:
            # Where this is interrupted, nothing more is begun.
            pool.shutdown(wait=False, cancel_futures=True)


def every_ratio(
    results: Results, contest: Contest = CONTEST
) -> dict[tuple[Case, str], float | None]:
    """SDPA's time over ours by case and phase, where both were measured; None where one of them is
    not steady.
    """
    found = Found(results)
    told = {}
    for case in cases_of(results, contest):
        for phase in PHASES:
            theirs, ours = (found.row(case, phase, name) for name in (THEIRS, OURS))
            if theirs and theirs.seconds and ours and ours.seconds:
                told[case, phase] = steady_ratio(theirs, ours)
    return told


def ratios(results: Results, contest: Contest = CONTEST) -> dict[tuple[Case, str], float]:
    """The ratios of steady times."""
    every = every_ratio(results, contest)
    return {key: ratio for key, ratio in every.items() if ratio is not None}


def findings(contest: Contest) -> Callable[[Results], list[Table]]:
    """A line of each case, and how many ratios are 1 or more."""

    def tables(results: Results) -> list[Table]:
        found = Found(results)
        steady, lines = ratios(results, contest), []
        for case in sorted(cases_of(results, contest), key=lambda case: (case.T, case.D)):
            cells = []
            for phase in PHASES:
                ours, theirs = (found.row(case, phase, name) for name in (OURS, THEIRS))
                told = noise.NOISY if ours and ours.seconds and theirs else "-"
                one = steady.get((case, phase))
                cells.append(told if one is None else f"{one:.3f}")
            picked = found.row(case, PHASES[0], THEIRS)
            lines.append([str(case), picked.picked if picked else "", *cells])
        notes = []
        for what, chosen in (
            (f"T >= {LONG}", [key for key in steady if key[0].T >= LONG]),
            (f"T < {LONG}", [key for key in steady if key[0].T < LONG]),
        ):
            if chosen:
                case, phase = least = min(chosen, key=steady.__getitem__)
                above = sum(steady[key] >= 1 for key in chosen)
                notes.append(
                    f"{what}: {above} of {len(chosen)} ratios are at least 1.0; the least is "
                    f"{steady[least]:.3f} ({case}, {phase})."
                )
        head = ["case", "SDPA's choice", *PHASES]
        title = "SDPA's time over that of ato_torch.attention"
        return [Table(title, head, lines, notes, texts=2)] if lines else []

    return tables
