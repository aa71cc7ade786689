"""Linear attention beside its peers: bidirectional, causal, gated and step by step.

"phi out" marks a peer that takes features in place of q and k, so that its time leaves out the
mapping; "not normalised" one that leaves out the division, too. The reached share is that of the
byte limit of the whole problem, at the bandwidth of a copy in the same run.
"""

from __future__ import annotations

import functools

from benchmarks import linear_jax, linear_torch, side_by_side
from benchmarks.cases import Case

_bf16 = functools.partial(Case, "linear", dtype="bfloat16")
CASES = {
    "gpu": (
        _bf16(B=8, T=65536, H=8, D=64),
        _bf16(B=1, T=16384, H=32, D=128),
        _bf16(B=8, T=65536, H=8, D=64, causal=True),
        _bf16(B=1, T=16384, H=32, D=128, causal=True),
        Case("step", B=64, T=1, H=32, D=128, dtype="bfloat16"),
        _bf16(B=1, T=65536, H=16, D=128, causal=True),
        _bf16(B=1, T=65536, H=16, D=128, causal=True, decay="step"),
        _bf16(B=8, T=65536, H=8, D=64, causal=True, decay="channel"),
        _bf16(B=4, T=4096, H=16, D=128, causal=True, decay="channel"),
        _bf16(B=8, T=4096, H=8, D=64, causal=True),
        _bf16(B=8, T=4096, H=8, D=64),
        _bf16(B=8, T=1024, H=8, D=64),
        _bf16(B=8, T=16384, H=8, D=64),
        _bf16(B=8, T=16384, H=8, D=64, causal=True, decay="head"),
    ),
    "cpu": (
        Case("linear", B=1, H=2, T=256, D=32, dtype="float32"),
        Case("linear", B=1, H=2, T=256, D=32, dtype="float32", causal=True),
        Case("linear", B=1, H=2, T=256, D=32, dtype="float32", causal=True, decay="step"),
        Case("step", B=2, H=2, T=1, D=32, dtype="float32"),
    ),
}
CONTEST = side_by_side.Contest(CASES, linear_jax.CONTENDERS, linear_torch.CONTENDERS)

# Everyone meets in these; they stand for what is not among the strongest elsewhere.
MAIN = 4
BESIDE_MAIN = ("PyTorch", "fla fused chunk, phi out, not normalised")
# Each program takes seconds, alone: XLA searches.
SCAN, SEARCHED = "plain JAX, associative scan", "plain JAX"
# Of backends far behind, the better one, where a call takes most of a second.
FLASH = "SDPA flash"


def in_report(case: Case, name: str) -> bool:
    if name == SCAN:
        return case == CASES["gpu"][2]
    if name == SEARCHED:
        return case.T != 1024
    if name == FLASH and case.causal:
        return case.T <= 4096
    return name not in BESIDE_MAIN or case in CASES["gpu"][:MAIN]
