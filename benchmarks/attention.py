"""Softmax attention beside its peers: long and short, grouped heads, windows, documents, caches.

Operations are those of the products, 4 B H T S D forward and 3.5 times as many with the backward
pass; half of them if causal; under a window and between documents those of the visible pairs. There
the time is also told as a share of the same contender's without them, next to the share of pairs
and of blocks that are visible. Where keys are many and queries few, the bytes are the limit, and
stand below.

At one size the table is followed by what the forward and backward pass of everything holds beyond
its inputs and outputs: as XLA plans it, and by what PyTorch's allocator counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from benchmarks import (
    attention_jax,
    attention_torch,
    cases,
    demo,
    noise,
    ours,
    side_by_side,
    tables,
)
from benchmarks.cases import Case
from benchmarks.results import ERRORS, Row
from benchmarks.side_by_side import Meeting

_bf16 = functools.partial(Case, "softmax", dtype="bfloat16")
_long = functools.partial(_bf16, B=2, H=16, T=16384, D=128)
_tiny = functools.partial(Case, "softmax", B=2, H=2, T=128, D=16, dtype="float32")
# Beside those that most would pick, and no variants: what else the report would say of them is
# said of the others.
LESSER = (
    _bf16(B=1, H=16, T=1, S=65536, D=128),
    _bf16(B=1, H=16, T=16, S=65536, D=128),
    _bf16(B=1, H=32, G=8, T=16, S=65536, D=128),
    *(
        _bf16(B=4, H=16, T=T, D=D, causal=causal)
        for T, D in ((512, 64), (512, 128), (128, 64), (8192, 96), (8192, 192))
        for causal in (False, True)
    ),
)
BESIDE_LESSER = (
    "ato_jax",
    "ato_jax triton",
    "JAX cuDNN",
    "JAX's Pallas kernel, 128x64",
    "SDPA default",
    "SDPA cuDNN",
    "SDPA flash",
    # These take no others.
    "plain JAX",
    "PyTorch",
    "PyTorch, compiled",
)
CASES = {
    "gpu": (
        _bf16(B=4, H=16, T=8192, D=128),
        _bf16(B=4, H=16, T=8192, D=128, causal=True),
        _bf16(B=4, H=32, T=8192, D=64),
        _bf16(B=4, H=32, T=8192, D=64, causal=True),
        _bf16(B=2, H=8, T=8192, D=256),
        _bf16(B=2, H=8, T=8192, D=256, causal=True),
        _bf16(B=2, H=32, G=8, T=8192, D=128, causal=True),
        # Each after what it is a share of.
        _long(causal=True),
        _long(causal=True, left=1023),
        _long(causal=True, documents=1024),
        *LESSER,
    ),
    "cpu": (
        _tiny(),
        _tiny(causal=True),
        _tiny(causal=True, left=15),
        _tiny(causal=True, documents=32),
        _tiny(H=4, G=2, causal=True),
        _tiny(T=1, S=256),
    ),
}
MEMORY_CASES = {"gpu": CASES["gpu"][2], "cpu": CASES["cpu"][0]}


def _beside(contenders: Mapping[str, Any]) -> dict[str, Any]:
    def takes(name: str, case: Case) -> bool:
        return (case not in LESSER or name in BESIDE_LESSER) and contenders[name].takes(case)

    return {
        name: dataclasses.replace(one, takes=functools.partial(takes, name))
        for name, one in contenders.items()
    }


CONTEST = side_by_side.Contest(
    CASES, _beside(attention_jax.CONTENDERS), _beside(attention_torch.CONTENDERS)
)

# In the report everyone meets in the first case. In the others these: of kernels that come with
# several tiles the best ones, of two names for one kernel one, and what has windows and documents.
STRONGEST = (
    "ato_jax",
    "ato_jax triton",
    "Tokamax Triton, 128x64",
    "Tokamax Mosaic",
    "jax-linear-attention's flash",
    "FlashAttention-3 through JAX",
    "JAX's Pallas kernel, 128x64",
    "SDPA cuDNN",
    "SDPA flash",
    "FlexAttention",
    "PyTorch varlen flash",
)
STRONGEST_OF_LESSER = ("ato_jax", "SDPA cuDNN", "SDPA flash")
# Where keys are 16K: these stand for what is said of them at 8K.
NOT_LONG = ("Tokamax Triton, 128x64", "JAX's Pallas kernel, 128x64", "SDPA flash")
# Of the lesser cases: caches, and one of each size.
REPORT_CASES = tuple(case for case in CASES["gpu"] if case not in LESSER[3:] or case.causal)


def in_report(case: Case, name: str) -> bool:
    if case == CASES["gpu"][0]:
        return True
    windowed = name == "JAX cuDNN" and case.left is not None
    if case.T == _long().T and (name in NOT_LONG or case.documents and name == "Tokamax Mosaic"):
        return False
    return windowed or name in (STRONGEST_OF_LESSER if case in LESSER else STRONGEST)


def whole(case: Case) -> Case:
    """The same without its window or documents."""
    return dataclasses.replace(case, left=None, documents=None)


def table(case: Case, phases: dict[str, list[Row]], earlier: list[Row]) -> str:
    """Both phases of one case, side by side.

    `earlier` rows tell what the case without its window or documents took.
    """
    unit, name = (1e12, "TFLOP/s") if ours.platform() == "gpu" else (1e9, "GFLOP/s")
    full = whole(case)
    before = {(row.phase, row.contender): row for row in earlier if row.case == str(full)}
    columns = 2 if case == full else 3

    def figures(row: Row) -> list[str]:
        if row.seconds is None or row.rate is None:
            return ["-"] + [""] * (columns - 1)
        of_full = before.get((row.phase, row.contender))
        if row.doubt:
            return [tables.milliseconds(row), noise.NOISY, ""][:columns]
        steady = of_full is not None and of_full.seconds and not of_full.doubt
        steady = steady and of_full.machine == row.machine
        share = f"{row.seconds / of_full.seconds:.1%}" if steady else ""
        return [tables.milliseconds(row), f"{row.rate / unit:.3g}", share][:columns]

    head, limits = [str(case)], ["  byte limit"]
    for phase, rows in phases.items():
        head += [f"{phase}, ms", name, "of full"][:columns]
        limits += [demo.milliseconds(rows[0].limit), *[""] * (columns - 1)]
    lines, notes = [[*head, *ERRORS]], []
    for both in zip(*phases.values(), strict=True):
        errors = {one: error for row in both for one, error in row.errors.items()}
        told = [f"{errors[one]:.1e}" if one in errors else "" for one in ERRORS]
        if any(row.seconds for row in both):
            numbers = [cell for row in both for cell in figures(row)]
            lines.append([f"  {both[0].contender}", *numbers, *told])
        reasons = {row.unavailable for row in both}
        if len(reasons) == 1:
            both = both[:1]
        # Without the phase where both have the same reason.
        notes += [
            f"  {row.contender}{f', {row.phase}' if len(reasons) > 1 else ''}: {row.unavailable}"
            for row in both
            if row.unavailable
        ]
    if case.T != case.key_shape[1]:
        lines.append(limits + [""] * len(ERRORS))
    return "\n".join([demo.aligned(lines, texts=1), *about(case), *notes])


def about(case: Case) -> list[str]:
    """What the table's reader has to know of the case."""
    backends = dict(zip(cases.PHASES, ours.backends(case), strict=True))
    told = "; ".join(f"{phase} {backend}" for phase, backend in backends.items())
    found = [f"  ato_jax ran by: {told}"]
    if case != whole(case):
        pairs = case.pairs / whole(case).pairs
        blocks = case.visible_blocks / whole(case).visible_blocks
        found.append(f"  of the full one's, visible pairs: {pairs:.1%}; blocks: {blocks:.1%}")
    return found


def memory_table(case: Case, rows: list[Row]) -> str:
    """Of the rows whose contenders say what they hold."""
    matrix = case.B * case.H * case.T * case.key_shape[1] * cases.ITEMSIZES[case.dtype]
    lines = [[f"{case}, {rows[0].phase}, beyond inputs and outputs", "MB", "of [B, H, T, S]"]]
    for row in rows:
        if row.scratch is not None:
            size = row.scratch
            lines.append([f"  {row.contender}", f"{size / 1e6:.1f}", f"{size / matrix:.2%}"])
    return demo.aligned(lines, texts=1)


def tell(meeting: Meeting) -> None:
    for case in meeting.cases():
        earlier = list(meeting.results.rows)
        phases = {phase: meeting.measure(case, phase) for phase in meeting.contest.phases_of(case)}
        print("\n" + table(case, phases, earlier), flush=True)
        if case == MEMORY_CASES[meeting.results.platform]:
            print("\n" + memory_table(case, list(phases.values())[-1]), flush=True)
