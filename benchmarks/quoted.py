"""Sentences of the documents that are made of the files of figures: `report` writes them, and a
test compares them.

A sentence stands between `<!-- NAME -->` and `<!-- /NAME -->` within a paragraph, and names the
card and the date of its figures. No time that is not steady is in one. A card without a steady
time for a sentence is left out of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from benchmarks import (
    attention,
    cliff_rows,
    delta,
    demo,
    findings,
    float8_tables,
    results,
    run,
    sdpa,
    suites,
    training,
)
from benchmarks.cases import PHASES, Case
from benchmarks.findings import FORWARD, Found
from benchmarks.results import Results

# The files of figures by name, as the documents order them.
Reports = Sequence[tuple[str, Results]]
# Softmax attention is compared with the fastest peer from this length on.
LONG = 8192
# Stands in place of a sentence for which no card has a steady time.
NOT_STEADY = "No card has steady times of this comparison."


def of_card(found: Results) -> str:
    """The card, and when it was measured."""
    date = found.about.get("date", "")
    return f"one {found.device}" + f" ({date})" * bool(date)


def listed(parts: Sequence[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def crossings(found: Results) -> list[tuple[int, int, float]]:
    """T, B, and the best SDPA backend's time over linear attention's in a bidirectional forward
    call with heads of 64 columns, where both are steady.
    """
    rows, told = Found(found), []
    cases = {case.T: case for case in suites.CROSSOVER.cases["gpu"] if case.D == 64}
    cases[1024] = dataclasses.replace(suites.BIDIRECTIONAL.cases["gpu"][0], T=1024)
    for T in (512, 1024, 2048):
        ratio = findings.steady_ratio(*findings.beside_sdpa(rows, cases[T], FORWARD))
        if ratio is not None:
            told.append((T, cases[T].B, ratio))
    return told


def crossover(reports: Reports) -> str:
    """From which length on linear attention is faster than softmax attention, card by card."""
    cards = []
    for _, found in reports:
        points = crossings(found)
        if not points:
            continue
        # The first ratio of the sentence says what it is a ratio of.
        unit = "times" if cards else "times the speed"
        ratios = []
        for T, B, ratio in points:
            ratios.append(f"{demo.ratio(ratio)} {unit} at {T:,} tokens (B {B})")
            unit = "times"
        told = listed(ratios) + "".join(
            f", so it overtakes between {T:,} and {later:,} tokens"
            for (T, _, before), (later, _, after) in itertools.pairwise(points)
            if before < 1 <= after
        )
        cards.append(f"on {of_card(found)} {told}")
    if not cards:
        return NOT_STEADY
    call = "one bidirectional forward call of linear attention (H 8, D 64, bfloat16)"
    return f"Beside PyTorch's fastest softmax kernel, {call} has {'; '.join(cards)}."


def slower(own: str, peer: str, groups: Sequence[tuple[str, Sequence[float | None]]]) -> list[str]:
    """In how many rows of each group the library is slower, of the peer's time over its, and how
    many rows were measured without a steady time, whose ratio is None; nothing without ratios.
    """
    told = []
    for where, every in groups:
        ratios = [ratio for ratio in every if ratio is not None]
        if ratios:
            noisy = len(every) - len(ratios)
            told.append(
                f"in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} rows{where} "
                f"({min(ratios):.2f} to {max(ratios):.2f}"
                f"{f'; {noisy} more had no steady times' if noisy else ''})"
            )
    return [f"{own} is slower than {peer} {listed(told)}"] if told else []


def of_softmax(name: str, found: Results) -> list[str]:
    """In how many rows of a file softmax attention or a training step is slower than its peers: a
    part of a sentence for each kind of peer.
    """
    rows = Found(found)
    peers = [
        findings.steady_ratio(findings.best(rows.of(case, phase)), own)
        for case, phase, own in findings.timed(rows, attention.CONTEST)
        if case.T >= LONG
    ]
    steady = [ratio for ratio in peers if ratio is not None]
    beside = sdpa.every_ratio(found)
    of_widths = {case.D for (case, _), ratio in beside.items() if ratio is not None}
    widths = listed([f"{width}" for width in sorted(of_widths)])
    short = [ratio for (case, _), ratio in beside.items() if case.T < sdpa.LONG]
    long = [ratio for (case, _), ratio in beside.items() if case.T >= sdpa.LONG]
    steps = training.ratios_of(run.FOLDER / training.NAME / f"{name}.json")
    return [
        *slower(
            f"`ato_torch.attention` with heads of {widths} columns",
            "`scaled_dot_product_attention`",
            [
                (f" below {sdpa.LONG:,} tokens", short),
                (f" from {sdpa.LONG:,} tokens on", long),
            ],
        ),
        *slower("a training step of a model", "PyTorch's own", [("", steps)]),
        *slower("`ato_jax.attention`", "its fastest peer", [(f" from {LONG:,} tokens on", steady)]),
    ]


def softmax(reports: Reports) -> str:
    """What softmax attention costs beside its peers, of files that name the kernels' commit."""
    sentences = [
        f"On {of_card(found)} {'; '.join(parts)}."
        for name, found in reports
        if found.commit and (parts := of_softmax(name, found))
    ]
    legend = "In brackets stands the peer's time over this library's, the least to the most."
    return " ".join([*sentences, legend]) if sentences else NOT_STEADY


def of_float8(op: str, name: str, found: Results) -> str:
    """How long calls of an op on float8 inputs, without options, take beside those in bfloat16;
    empty without steady times. They may be in a file of their own (`document.py`).
    """
    apart = run.FOLDER / float8_tables.GROUP / f"{name}.json"
    if not float8_tables.of(found) and apart.exists():
        found = results.read(apart)
    known, told = {row.key: row for row in found.rows}, []
    for step in cliff_rows.STEPS["gpu"]:
        if step.group != float8_tables.GROUP or step.name != f"float8 {op}":
            continue
        rows = float8_tables.rows_of(step, known)
        own, base = rows[cliff_rows.OURS], rows[cliff_rows.BASE]
        ratio = findings.steady_ratio(own, base) if own and base else None
        if ratio is not None:
            told.append(f"{ratio:.2f} times ({float8_tables.size_of(step)})")
    return f"on {of_card(found)} {listed(told)}" if told else ""


def _float8(op: str, reports: Reports) -> str:
    cards = [told for name, found in reports if (told := of_float8(op, name, found))]
    if not cards:
        return NOT_STEADY
    return f"A forward call took, beside one on bfloat16 arrays, {'; '.join(cards)}."


def float8_softmax(reports: Reports) -> str:
    """The time of softmax attention on float8 inputs over that in bfloat16."""
    return _float8("softmax", reports)


def float8_linear(reports: Reports) -> str:
    """The time of linear attention on float8 inputs over that in bfloat16."""
    return _float8("linear", reports)


def delta_rule(reports: Reports) -> str:
    """The times of the delta rule's kernels on each card, and those of XLA where they are known."""
    cases = [case for case in delta.CASES["gpu"] if delta.of_report(case) and case.D == 128]
    cards = []
    for _, found in reports:
        told = [of_call(Found(found), case) for case in cases if case.decay]
        if any(told):
            cards.append(f"on {of_card(found)} {', '.join(filter(None, told))}")
    if not cards:
        return NOT_STEADY
    size = f"B {cases[0].B}, T {cases[0].T:,}, {cases[0].H} heads of 128 columns"
    return f"Calls in bfloat16, {size}, forward and with gradients, take {'; '.join(cards)}."


def of_call(rows: Found, case: Case) -> str:
    """The times of both phases of a case, and XLA's; empty where one of ours is not steady."""
    times = {}
    for name in ("ato_jax", delta.XLA):
        timed = [rows.row(case, phase, name) for phase in PHASES]
        known = [row for row in timed if row and row.seconds and not row.doubt]
        steady = [f"{1e3 * (row.seconds or 0):.2f}" for row in known]
        if len(steady) == len(PHASES):
            times[name] = f"{' and '.join(steady)} ms"
    if "ato_jax" not in times:
        return ""
    beside = f" (by XLA {times[delta.XLA]})" if delta.XLA in times else ""
    return f"{times['ato_jax']} with a decay per {case.decay}{beside}"


# By page, from the repository's root: which sentences it has.
PAGES: dict[str, tuple[str, ...]] = {
    "README.md": ("crossover", "softmax"),
    "docs/faq.md": ("crossover",),
    "docs/guides/choosing.md": ("crossover",),
    "docs/guides/fla.md": ("delta_rule",),
    "docs/guides/float8.md": ("float8_softmax", "float8_linear"),
    "docs/guides/pytorch.md": ("softmax",),
}
SENTENCES: dict[str, Callable[[Reports], str]] = {
    "crossover": crossover,
    "softmax": softmax,
    "float8_softmax": float8_softmax,
    "float8_linear": float8_linear,
    "delta_rule": delta_rule,
}
