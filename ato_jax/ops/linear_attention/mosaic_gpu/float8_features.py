"""The dtype of features of keys in 8 bits, for `float8_sums.py`: float16 where the scale allows it.

An instruction converts two numbers of 8 bits to float16. bfloat16 has no such conversion, so each
number passes through float32. For a map that leaves a number as it is, or makes it 0, the scale
alone tells a power of two c that keeps features in float16's range, and no pass over k is needed:

    phi c < 2^16        |x| <= 448 k_scale

S and z are multiplied by c, which is taken from them once at the end. Other maps make features of
any size: elu(x) + 1 of keys that are all at -16 lies at 1e-7, where float16 has few digits. These
are rounded to bfloat16 (`dtype_of`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

from ato_jax import device, mosaic
from ato_jax.mosaic import BF16, F16, F32, assembly
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

LARGEST_EIGHT_BITS = 448.0
# Maps whose features are 0 or as large as the number itself.
LINEAR = "relu", "identity"
EXPONENT = 0x7F800000  # the exponent bits of a float32
# The bits of 2^14 and of 1 added up, as int32: those of 2^e taken from them leave 2^(14 - e).
OF_LARGEST = ((127 + 14 + 127) << 23) - 2**32
LEAST_BOUND, MOST_BOUND = 2.0**-100, 2.0**100


def dtype_of(spec: LinearAttentionSpec) -> Any:
    """The dtype of both factors of phi(k)^T v."""
    return F16 if spec.feature_map.name in LINEAR else BF16


def power_of(spec: LinearAttentionSpec, scale: Any) -> Any:
    """c, a number in float32."""
    if dtype_of(spec) == BF16:
        return jnp.float32(1)
    bound = jnp.abs(scale) * LARGEST_EIGHT_BITS
    return _power_below(jnp.clip(bound, LEAST_BOUND, MOST_BOUND))


def _power_below(bound: Any) -> Any:
    """The power of two that brings a number to between 2^14 and 2^15."""
    if device.interpreting():
        bits = jax.lax.bitcast_convert_type(bound, jnp.int32) & EXPONENT
        return jax.lax.bitcast_convert_type(OF_LARGEST - bits, F32)
    own = plgpu.ShapeDtypeStruct((), F32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,), return_type=own)
    def power(_: Any, bound: Any) -> Any:
        text = f"""{{
.reg .b32 bits;
mov.b32 bits, $1;
and.b32 bits, bits, {EXPONENT};
sub.s32 bits, {OF_LARGEST}, bits;
mov.b32 $0, bits;
}}"""
        found = assembly.instructions(text, "=f,f", [bound.registers[()]], ir.F32Type.get())
        return mgpu.FragmentedArray.splat(found, (), bound.layout)

    return power(bound)


def begin(spec: LinearAttentionSpec, x: jax.Array, scale: Any, power: Any, first: Any) -> jax.Array:
    """The features of x [64, 64], float16 from 8 bits transposed, times c, in float32."""
    phi = feature_maps.features(spec).unrounded_transposed_keys(mosaic.scaled(x, scale), first)
    return phi * power


def finish(spec: LinearAttentionSpec, begun: jax.Array, count: Any) -> jax.Array:
    """What `begin` returned, rounded to the factors' dtype; 0 behind the first `count` keys."""
    if count is not None:
        begun = jnp.where(mosaic.hidden_position(1) < count, begun, 0.0)
    return mosaic.rounded(begun, dtype_of(spec))
