"""The delta rule beside its peers: DeltaNet, gated DeltaNet and Kimi Delta Attention.

Keys are of length 1, with which no step makes a state grow, and betas lie between 0 and 1. Inputs
and outputs are those of `ato_jax.gated_delta_rule`; the peers' gradients are of as many arrays.
"""

from __future__ import annotations

import functools
import importlib

import jax

import ato_jax
from benchmarks import delta_torch, side_by_side
from benchmarks.attention_jax import Attend, Contender
from benchmarks.cases import Case

KINDS = {None: "deltanet", "step": "gated_deltanet", "channel": "kda"}

_bf16 = functools.partial(Case, "delta", T=8192, dtype="bfloat16")
_tiny = functools.partial(Case, "delta", B=1, H=2, T=48, D=16, dtype="float32")
CASES = {
    "gpu": (
        *(_bf16(B=2, H=16, D=128, decay=decay) for decay in ("step", None, "channel")),
        _bf16(B=8, H=8, D=64, decay="step"),
    ),
    "cpu": tuple(_tiny(decay=decay) for decay in ("step", None, "channel")),
}


def _library(implementation: str | None, case: Case) -> Attend:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *gates: jax.Array) -> jax.Array:
        *decay, beta = gates
        named = dict(zip(["decay"], decay, strict=False))
        return ato_jax.gated_delta_rule(q, k, v, beta, implementation=implementation, **named)

    return attend


def _jla(case: Case) -> Attend:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *gates: jax.Array) -> jax.Array:
        # Its kernels first: whoever calls it while another thread imports them finds none.
        importlib.import_module("jla.ops.mosaic_gpu")
        from jla import ops

        *decay, beta = gates
        named = dict(zip("g", decay, strict=False))
        kind = KINDS[case.decay]
        return ops.linear_attention(kind, q, k, v, beta=beta, impl="mosaic_gpu", **named)[0]

    return attend


def _every(case: Case) -> bool:
    return True


XLA = "ato_jax xla"
CONTEST = side_by_side.Contest(
    CASES,
    {
        "ato_jax": Contender(_every, functools.partial(_library, None)),
        XLA: Contender(_every, functools.partial(_library, "xla")),
        "jax-linear-attention's delta rule": Contender(_every, _jla, package="jla"),
    },
    delta_torch.CONTENDERS,
)


def in_report(case: Case, name: str) -> bool:
    """XLA compiles for long, and is far behind: once."""
    return name != XLA or case in (CASES["gpu"][0], CASES["cpu"][0])
