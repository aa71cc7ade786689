"""Rows of 8 bits in the paged kernel: loaded as words of two columns, multiplied in 16 bits.

The loads of the tensor cores need elements of 16 bits, so a cache of 8 bits is loaded in words of
two columns, and each word is split in registers. The tiles of such a row are those of its even
columns and those of its odd ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ato_jax import device
from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.triton.common import Sliced, each


def words_of(rows: jax.Array) -> jax.Array:
    """[..., D] of 8 bits as words of two columns, [..., ceil(D / 2)] int16."""
    if rows.shape[-1] % 2:
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, 1)])
    return lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], -1, 2), jnp.int16)


# PTX that takes one number of each of two words, of the even columns or of the odd ones, to
# float16. The float16 with exponent byte 0x64 and last byte n + 128 is 1024 + 128 + n, so a
# subtraction gives n.
HALVES = {
    "int8": """{{
.reg .b32 number, bias;
mov.b32 bias, 0x64806480;
shr.b32 number, $1, {odd} * 8;
lop3.b32 number, number, 0x00ff00ff, bias, 0x6a;
sub.f16x2 $0, number, bias;
}}""",
    "float8_e4m3fn": """{{
.reg .b32 sorted;
.reg .b16 number<2>;
prmt.b32 sorted, $1, 0, 0x3120;
mov.b32 {{number0, number1}}, sorted;
cvt.rn.f16x2.e4m3x2 $0, number{odd};
}}""",
}


def halves_of(words: jax.Array, cache_dtype: str, dtype: DTypeLike) -> Sequence[jax.Array]:
    """The even and the odd columns of words as `dtype`; the cache's own dtype is `cache_dtype`."""
    if dtype == jnp.float16 and device.takes_ptx():
        found = (
            plgpu.elementwise_inline_asm(
                HALVES[cache_dtype].format(odd=odd),
                args=[words],
                constraints="=r,r",
                pack=2,
                result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, dtype)],
            )
            for odd in (0, 1)
        )
        return [half for [half] in found]
    if cache_dtype == "int8":
        return tuple(
            lax.shift_right_arithmetic(one, jnp.int16(8)).astype(jnp.float32).astype(dtype)
            for one in (lax.shift_left(words, jnp.int16(8)), words)
        )
    return tuple(
        lax.bitcast_convert_type(one.astype(jnp.int8), jnp.dtype(cache_dtype)).astype(dtype)
        for one in (words, lax.shift_right_logical(words, jnp.int16(8)))
    )


def into_range(rows: Sliced) -> tuple[Sliced, jax.Array]:
    """Rows divided by a power of two each, in float16, and those powers [rows], in float32."""
    rows = each(lambda tile: tile.astype(jnp.float32), rows)
    top = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(tile), axis=1) for tile in rows))
    # The exponent bits of a float32 alone are a power of two; 254 minus them is its inverse.
    smallest, largest = (np.int32(exponent << 23) for exponent in (1, 253))
    exponent = lax.bitcast_convert_type(top, jnp.int32) & np.int32(0xFF << 23)
    exponent = jnp.clip(exponent, smallest, largest)
    inverse = lax.bitcast_convert_type(np.int32(254 << 23) - exponent, jnp.float32)
    rows = each(lambda tile: (tile * inverse[:, None]).astype(jnp.float16), rows)
    return rows, lax.bitcast_convert_type(exponent, jnp.float32)
