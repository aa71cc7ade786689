"""Arithmetic that Triton's compiler makes slowly, or wrongly for us, when it is left alone.

Tensor cores multiply bfloat16, float16 and TF32. Of float32's 23 bits of mantissa TF32 keeps 10,
and bfloat16 7. What is rounded to them here is rounded to nearest.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ato_jax import device
from ato_jax.launch import triton as plgpu

LOG2_E = math.log2(math.e)
# float32 factors in three bfloat16 parts each, and six products of them on the tensor cores:
# measured as near to float64 as multiply-adds in float32, at D = 64 and T = 65,536, and without
# the register spills that Triton's float32 dots have from tiles of 32 x 32 on.
EXACT = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
TF32_HALF_ULP = 1 << 12
TF32_MASK = -(1 << 13)
BFLOAT16_MASK = -(1 << 16)  # of float32's bits, those that bfloat16 has


def exp2(x: jax.Array) -> jax.Array:
    """2 to the power of x, float32.

    On NVIDIA GPUs by the bare instruction, which flushes results below 2^-126 to 0: to keep them,
    the compiler would add three instructions for each element.
    """
    if not device.takes_ptx():
        return jnp.exp2(x)
    return plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=(x,),
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=(jax.ShapeDtypeStruct(x.shape, jnp.float32),),
    )[0]


def round_to_tf32(x: jax.Array) -> jax.Array:
    """float32 x rounded to TF32: the tensor cores alone would truncate it, towards zero."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    rounded = jax.lax.bitcast_convert_type((bits + TF32_HALF_ULP) & TF32_MASK, jnp.float32)
    return jnp.where(x == x, rounded, x)  # the carry would turn a NaN into a number


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """float32 x rounded to bfloat16, in float32.

    NVIDIA GPUs round two elements by one instruction, while the compiler makes one slow instruction
    for each element of a conversion down and up again.
    """
    if device.interpreting():
        return jax.lax.reduce_precision(x, 8, 7)
    if not device.takes_ptx():
        return x.astype(jnp.bfloat16).astype(jnp.float32)
    return plgpu.elementwise_inline_asm(
        """{
        .reg .b32 pair, low, high;
        cvt.rn.bf16x2.f32 pair, $3, $2;
        shl.b32 low, pair, 16;
        and.b32 high, pair, 0xffff0000;
        mov.b32 $0, low;
        mov.b32 $1, high;
        }""",
        args=(x,),
        constraints="=f,=f,f,f",
        pack=2,
        result_shape_dtypes=(jax.ShapeDtypeStruct(x.shape, jnp.float32),),
    )[0]


def truncate_to_bfloat16(x: jax.Array) -> jax.Array:
    """float32 x without the bits that bfloat16 lacks, in float32.

    Cheaper than rounding, and x less the result is exact in float32.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & BFLOAT16_MASK
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def bfloat16_parts(x: jax.Array, count: int = 3) -> list[jax.Array]:
    """bfloat16 arrays whose sum is float32 x: exactly with three, to 16 bits with two."""
    found = []
    for _ in range(count - 1):
        part = truncate_to_bfloat16(x)
        found.append(part.astype(jnp.bfloat16))
        x -= part
    return [*found, x.astype(jnp.bfloat16)]
