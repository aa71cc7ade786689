"""The delta rule beside its peers: DeltaNet, gated DeltaNet and Kimi Delta Attention; and a step.

Keys are of length 1, with which no step makes a state grow, and betas lie between 0 and 1. Inputs
and outputs are those of `ato_jax.gated_delta_rule`; the peers' gradients are of as many arrays.

    python -m benchmarks run --suite=delta --within_s=540 --json=FILE

times the cases of SIZES, too, which the report leaves out: some 400 s, most of them for comparing
with float64.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib

import jax

import ato_jax
from benchmarks import delta_plain, delta_step, delta_torch, ours, side_by_side, stepping
from benchmarks.attention_jax import Attend, Contender
from benchmarks.cases import Case

KINDS = {None: "deltanet", "step": "gated_deltanet", "channel": "kda"}

_bf16 = functools.partial(Case, "delta", T=8192, dtype="bfloat16")
_tiny = functools.partial(Case, "delta", B=1, H=2, T=48, D=16, dtype="float32")
_small = functools.partial(Case, "delta", B=1, T=1024, dtype="float32")
STEP = "delta step"
_step = functools.partial(Case, STEP, T=1, dtype="bfloat16")
KINDS_ON_CPUS = ("step", None, "channel")
# On both sides of where calls go step by step (`delta_rule/xla/`).
SIZES_ON_CPUS = ((4, 64), (16, 64), (2, 128), (8, 128))
# By heads and tokens: few tokens, whose heads fill a card, and one long sequence, whose do not.
SIZES = ((4, 4096, 16), (4, 4096, 32), (1, 65536, 16), (1, 65536, 32))
CASES = {
    "gpu": (
        *(_bf16(B=2, H=16, D=128, decay=decay) for decay in ("step", None, "channel")),
        _bf16(B=8, H=8, D=64, decay="step"),
        *(_step(B=64, H=32, D=128, decay=decay) for decay in ("step", "channel", None)),
        _step(B=64, H=32, D=64, decay="step"),
        _step(B=32, H=16, D=256, decay="step"),
        _step(B=8, H=16, D=128, decay="step"),
        _step(B=1, H=32, D=128, decay="step"),
        *(
            _bf16(B=B, T=T, H=H, D=128, decay=decay)
            for B, T, H in SIZES
            for decay in ("step", "channel")
        ),
    ),
    "cpu": (
        *(_tiny(decay=decay) for decay in KINDS_ON_CPUS),
        *(_small(H=H, D=D, decay=decay) for H, D in SIZES_ON_CPUS for decay in KINDS_ON_CPUS),
        Case(STEP, B=2, H=2, T=1, D=32, dtype="float32", decay="step"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Ours(Contender):
    """This library, which has steps, too."""

    step: stepping.Step = delta_step.by_library

    def compiled(self, case: Case, phase: str) -> ours.Compiled | str:
        if case.op == STEP:
            return lambda: delta_step.prepare(case, self.step)
        return super().compiled(case, phase)


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


def _whole(case: Case) -> bool:
    return case.op == "delta"


def few(case: Case) -> bool:
    """Cases that XLA compiles and runs in seconds."""
    return (case.B, case.T, case.H) not in SIZES


def of_report(case: Case) -> bool:
    """Cases of the report. Steps are not in it: the notes have their times."""
    return _whole(case) and few(case)


def _plain(case: Case) -> bool:
    """Float32, which CPUs' cases have."""
    return _whole(case) and case.dtype == "float32"


def _plain_by_chunks(case: Case) -> bool:
    return _plain(case) and case.decay != "channel" and case.T % MOST_STEPS == 0


# Steps of a chunk of the plain form.
MOST_STEPS = 32
XLA, PLAIN = "ato_jax xla", "plain JAX"
CONTEST = side_by_side.Contest(
    CASES,
    {
        "ato_jax": Ours(_every, functools.partial(_library, None)),
        XLA: Ours(few, functools.partial(_library, "xla"), step=delta_step.by_xla),
        "jax-linear-attention's delta rule": Contender(_whole, _jla, package="jla"),
        f"{PLAIN} by steps": Contender(_plain, delta_plain.by_steps),
        **{
            f"{PLAIN} by chunks of {steps}": Contender(
                _plain_by_chunks, functools.partial(delta_plain.by_chunks, steps)
            )
            for steps in (16, MOST_STEPS)
        },
    },
    delta_torch.CONTENDERS,
)


def in_report(case: Case, name: str) -> bool:
    """XLA compiles for long, and is far behind: once. Plain forms are beside it on CPUs alone."""
    if name.startswith(PLAIN):
        return False
    return name != XLA or case in (CASES["gpu"][0], CASES["cpu"][0])
