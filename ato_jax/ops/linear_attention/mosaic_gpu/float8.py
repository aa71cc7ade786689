"""Calls on q, k and v of float8_e4m3fn, which kernels read as 8 bits; forward alone.

Kernels are those of bfloat16 arrays where only the loads of q differ, and of their own where a
product needs v in shared memory (`float8_sums.py`). Supported is what the kernels of bfloat16
arrays support where every query sees every key, of up to 128 columns; and heads of 64 columns,
which have a tile of their own here.
"""

from __future__ import annotations

import dataclasses

from ato_jax import mosaic
from ato_jax.backend import Backend, Residuals
from ato_jax.device import Device
from ato_jax.ops.linear_attention import mosaic_gpu
from ato_jax.ops.linear_attention.eight_bits import Float8Inputs
from ato_jax.ops.linear_attention.mosaic_gpu import bidirectional, frame, narrow
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec, LinearState, Outputs

# With fewer rows of all heads than this times 128 columns, others are taken to be faster, as for
# bfloat16 arrays: no card has timed heads of 64 columns, which only these kernels take.
ENOUGH_ROWS = mosaic_gpu.ENOUGH_ROWS


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    if phase == "backward":
        return "float8 inputs have no derivative"
    if spec.dtype != "bfloat16":
        return f"reads float8 for an output in bfloat16, and not in {spec.dtype}"
    if spec.causal or spec.segments or spec.decay:
        return "reads float8 where every query sees every key, without a decay or segments"
    if frame.is_wide(spec):
        return f"reads float8 of up to {frame.F} columns, got D={spec.D}, V={spec.V}"
    return mosaic_gpu.unsupported(_in_a_tile(spec), phase)


def _in_a_tile(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    """The spec, or where a head fills half a tile, that of one that fills it."""
    if not narrow.fills(spec, mosaic.HALF):
        return spec
    return dataclasses.replace(spec, D=frame.F, F=frame.F, V=frame.F)


def beats_later_backends(
    spec: LinearAttentionSpec, device: Device, backward_follows: bool
) -> bool:
    """The one place for what a card measures of these."""
    if not narrow.fills(spec, mosaic.HALF):
        return mosaic_gpu.beats_later_backends(spec, device, backward_follows)
    elements = spec.B * (spec.H * spec.T + spec.G * spec.S) * spec.D
    return elements >= ENOUGH_ROWS * frame.F


def forward(spec: LinearAttentionSpec, config: Config, inputs: Float8Inputs) -> Outputs:
    return _forward(spec, config, inputs)


@mosaic_gpu.as_larger_batch
def _forward(spec: LinearAttentionSpec, config: Config, inputs: Float8Inputs) -> Outputs:
    tiles = spec if narrow.fills(spec, mosaic.HALF) else narrow.in_tiles(spec)
    if inputs.initial_state is not None:
        inputs = inputs._replace(initial_state=narrow.widened(tiles, inputs.initial_state))
    out, state = bidirectional.forward_of_float8(tiles, config, inputs)
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
