"""The suite `sdpa`: `ato_torch.attention` beside SDPA by the backend that PyTorch chooses.

Both run in one process of PyTorch. Every case has the same number of tokens and of columns: 16,384
tokens and 2,048 columns, as in the benchmarks of FlashAttention. A ratio is SDPA's time over that
of `ato_torch.attention`, so above 1 this library is faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks import attention_torch, noise
from benchmarks.cases import PHASES, Case
from benchmarks.findings import Found, cases_of, steady_ratio
from benchmarks.results import Results
from benchmarks.side_by_side import Contest
from benchmarks.tables import Table

OURS, THEIRS = "ato_torch", "SDPA default"
TOKENS, COLUMNS = 16384, 2048
# The most telling first: where time runs out, the short ones are left.
LENGTHS = (4096, 1024, 16384, 512, 2048, 8192, 128, 256)
WIDTHS = (64, 128, 256)
# From here on every ratio should be 1 or more.
LONG = 1024

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
