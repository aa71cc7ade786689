"""Calls on q, k and v of float8_e4m3fn, which kernels read as 8 bits; forward alone.

Kernels are those of bfloat16 arrays where only the loads of q differ, and of their own where a
product needs v in shared memory (`float8_sums.py`). Supported is what the kernels of bfloat16
arrays support without a decay and segments, of up to 128 columns; and, where every query sees every
key, heads of 64 columns, which have a tile of their own here.
"""

from __future__ import annotations

import dataclasses

from ato_jax import mosaic
from ato_jax.backend import Backend, Residuals
from ato_jax.device import Device
from ato_jax.ops.linear_attention import mosaic_gpu
from ato_jax.ops.linear_attention.eight_bits import Float8Inputs
from ato_jax.ops.linear_attention.mosaic_gpu import (
    bidirectional,
    causal,
    frame,
    narrow,
    order,
    steps,
    support,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec, Outputs

# With fewer rows of all heads than this times 128 columns, others are taken to be faster, as for
# bfloat16 arrays. Heads of 64 columns were timed at B8 H8 T16384 alone (149 us, Triton 403).
ENOUGH_ROWS = order.ENOUGH_ROWS


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    if phase == "backward":
        return "float8 inputs have no derivative"
    if spec.dtype != "bfloat16":
        return f"reads float8 for an output in bfloat16, and not in {spec.dtype}"
    if spec.segments or spec.decay:
        return "reads float8 without a decay or segments"
    if max(spec.D, spec.V) > frame.F:
        return f"reads float8 of up to {frame.F} columns, got D={spec.D}, V={spec.V}"
    if spec.D % narrow.STEP or spec.V % narrow.STEP:
        # The copy engine needs rows of a multiple of 16 bytes.
        return f"reads float8 of multiples of {narrow.STEP} columns, got D={spec.D}, V={spec.V}"
    if _has_half_a_tile(spec):
        spec = dataclasses.replace(spec, D=frame.F, F=frame.F, V=frame.F)
    return support.unsupported_as_given(spec, phase)


def _has_half_a_tile(spec: LinearAttentionSpec) -> bool:
    """Whether each head has a tile of 64 columns, which only these kernels know."""
    return not spec.causal and narrow.fills(spec, mosaic.HALF)


def beats_later_backends(
    spec: LinearAttentionSpec, device: Device, backward_follows: bool
) -> bool:
    """Whether reading 8 bits pays. Where the kernels of wide arrays take the call, too,
    `ops/float8.py` also applies their rule for the sizes of a call."""
    if not _has_half_a_tile(spec):
        return True
    elements = spec.B * (spec.H * spec.T + spec.G * spec.S) * spec.D
    return elements >= ENOUGH_ROWS * frame.F


def forward(spec: LinearAttentionSpec, config: Config, inputs: Float8Inputs) -> Outputs:
    spec, wide = steps.in_place(spec, inputs.without_scales())
    inputs = inputs._replace(q_lengths=wide.q_lengths, kv_lengths=wide.kv_lengths)
    return _forward(spec, config, inputs)


@mosaic_gpu.as_larger_batch
def _forward(spec: LinearAttentionSpec, config: Config, inputs: Float8Inputs) -> Outputs:
    tiles = spec if _has_half_a_tile(spec) else narrow.in_tiles(spec)
    if inputs.initial_state is not None:
        inputs = inputs._replace(initial_state=narrow.widened(tiles, inputs.initial_state))
    run = causal.forward_of_float8 if spec.causal else bidirectional.forward_of_float8
    out, state = run(tiles, config, inputs)
    return Outputs(out, narrow.narrowed(tiles, state))


def backward(
    spec: LinearAttentionSpec,
    config: Config,
    residuals: Residuals[Float8Inputs, Outputs],
    cotangents: Outputs,
) -> Float8Inputs:
    raise NotImplementedError("float8 inputs have no derivative")


class _Float8(Backend[LinearAttentionSpec, Config, Float8Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(mosaic_gpu.default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)
    unsupported_device = staticmethod(mosaic_gpu.unsupported_device)
    beats_later_backends = staticmethod(beats_later_backends)


BACKEND = _Float8()
