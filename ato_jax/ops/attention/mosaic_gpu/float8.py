"""Calls on q, k and v of float8_e4m3fn, which the forward kernel multiplies as 8 bits.

    s_ij  = q_i . k_j                           of values of 8 bits, without their scales
    p_ij  = 2^8 exp2(c s_ij - c m_i)            rounded to 8 bits; c has the scales of q and k
    out_i = v_scale acc_i / total_i

A product of 8 bits contracts over what lies side by side in both factors, so v comes with its
sequences along the last axis, [B, G, V, S]. Weights stay in registers. There a thread has other
columns of a sum of float32 than of a factor of 8 bits, so the keys of v lie in the order that
weights have as a factor, which is the same in every 16 of them (`mosaic.in_order_of_eight_bits`).
A kernel of its own transposes v into that order ahead of the forward kernel (`transposition.py`).
It also pads v to whole blocks, and sets it to 0 beyond the keys' end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax.backend import Backend, Residuals
from ato_jax.device import Device
from ato_jax.ops.attention import mosaic_gpu
from ato_jax.ops.attention.eight_bits import Float8Inputs, Float8Spec
from ato_jax.ops.attention.mosaic_gpu import frame
from ato_jax.ops.attention.mosaic_gpu.forward import forward as run_kernel
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.mosaic_gpu.transposition import transposed
from ato_jax.ops.attention.spec import AttentionSpec, Outputs

NO_DERIVATIVE = "float8 inputs have no derivative"
# WGMMA's contractions come in 32 elements of 8 bits.
HEAD_MULTIPLE = 32
# A unit of scores is kept between these: times the lowest score it is finite, and above 0.
LEAST_UNIT, LARGEST_UNIT = 1e-30, 1e25
# Calls of fewer columns gain little: at 64 one takes 0.97 of the time of a call on bfloat16 arrays,
# and its error is ten times that of a widened one.
LEAST_COLUMNS = 128


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    if phase == "backward":
        return NO_DERIVATIVE
    if spec.dtype != "bfloat16":
        return f"reads float8 for an output in bfloat16, and not in {spec.dtype}"
    if spec.D % HEAD_MULTIPLE or spec.V % frame.HEAD_MULTIPLE:
        return (
            f"reads float8 where D is a multiple of {HEAD_MULTIPLE} and V of "
            f"{frame.HEAD_MULTIPLE}, got D={spec.D}, V={spec.V}"
        )
    return mosaic_gpu.unsupported(Float8Spec.of(spec), phase)


def default_config(spec: AttentionSpec, device: Device) -> Config:
    return mosaic_gpu.default_config(Float8Spec.of(spec), device)


def beats_later_backends(spec: AttentionSpec, device: Device, backward_follows: bool) -> bool:
    """Whether reading 8 bits pays at these columns. `ops/float8.py` also applies the rule of wide
    arrays for the sizes of a call."""
    return spec.D >= LEAST_COLUMNS


def forward(spec: AttentionSpec, config: Config, inputs: Float8Inputs) -> Outputs:
    heads = spec.H // spec.G
    units = inputs.q_scale * jnp.repeat(inputs.k_scale, heads, axis=1) * spec.scale
    units = jnp.clip(units, LEAST_UNIT, LARGEST_UNIT)
    given = inputs.arrays
    time = 1 if spec.layout == "bthd" else 2
    given = given._replace(
        q=_padded(given.q, time, frame.ROWS_OF_A_TILE),
        k=_padded(given.k, time, frame.ROWS_OF_A_TILE),
        v=transposed(spec, given.v, config.keys, given.kv_lengths),
    )
    scales = units, jnp.repeat(inputs.v_scale, heads, axis=1)
    out, lse = run_kernel(spec, config, given, scales)
    if lse.shape[time] != spec.T:
        lse = lax.slice_in_dim(lse, 0, spec.T, axis=time)
    return Outputs(out, lse)


def _padded(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Zeros behind the end of an axis, up to a multiple."""
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    widths = [(0, missing if at == axis else 0) for at in range(array.ndim)]
    return jnp.pad(array, widths)


def backward(
    spec: AttentionSpec,
    config: Config,
    residuals: Residuals[Float8Inputs, Outputs],
    cotangents: Outputs,
) -> Float8Inputs:
    raise NotImplementedError(NO_DERIVATIVE)


class _Float8(Backend[AttentionSpec, Config, Float8Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)
    unsupported_device = staticmethod(mosaic_gpu.unsupported_device)
    beats_later_backends = staticmethod(beats_later_backends)


BACKEND = _Float8()
