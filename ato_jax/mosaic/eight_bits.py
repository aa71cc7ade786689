"""Rows of float8_e4m3fn in shared memory: copied as 8 bits, widened in registers.

    x = values * scale        values of 8 bits, one scale for a whole tile

They lie in blocks of 64 columns, each [rows, 64] with rows of 64 bytes, and are copied untiled
(`Views`): a sequence may have any number of rows, and a head any multiple of 16 columns. No product
takes them. A role that maps them widens them in registers, where 16 bits hold every value exactly,
and multiplies them by their scale in float32. A factor that has to lie in shared memory is widened
into a bfloat16 tile (`widen`), by a role that has no other work: the conversion then hides behind
the products of the chunk before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import device
from ato_jax.mosaic.masks import kept
from ato_jax.mosaic.tiles import (
    BF16,
    F16,
    F32,
    HALF,
    TILE,
    Tiling,
    for_copy,
    load,
    rounded,
)

F8 = jnp.float8_e4m3fn


def eight_bits(*shape: int) -> Any:
    """Room for blocks of 64 columns, [.., rows, 64]."""
    assert shape[-1] == HALF
    swizzle = plgpu.SwizzleTransform(HALF)
    tiled = plgpu.SMEM(shape, F8, transforms=(plgpu.TilingTransform((8, HALF)), swizzle))
    if device.interpreting():
        return tiled
    # Both are the same bytes, since a row of a block is one of the swizzle.
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, F8, transforms=(swizzle,)))


def copy_eight_bits(
    tiling: Tiling, ref: Any, item: Any, rows: Any, head: Any, blocks: Sequence[Any], barrier: Any
) -> None:
    """Loads rows of a sequence into `blocks`, [rows, 64] of its columns each, by as many copies."""
    for half, block in enumerate(blocks):
        source = tiling.part(ref, item, rows, head, half)
        plgpu.copy_gmem_to_smem(source, for_copy(block), barrier)


def load_eight_bits(block: Any) -> jax.Array:
    """A block [rows, 64] in registers, in 16 bits and without its scale."""
    return load(block).astype(F16)


def load_eight_bits_transposed(block: Any) -> jax.Array:
    """The transpose [64, rows]. Loads of 8 bits cannot transpose: pairs of columns are loaded and
    widened, and the warps exchange 16 bits."""
    if device.interpreting():
        return load(block.T).astype(F16)
    turned = load(block.T, plgpu.Layout.WGMMA_TRANSPOSED, optimized=False).astype(F16)
    return plgpu.layout_cast(turned, TILE)


def scaled(x: jax.Array, scale: Any) -> jax.Array:
    """What 8 bits stand for, in float32."""
    return x.astype(F32) * scale


def widen(block: Any, target: Any, count: Any = None, scale: Any = None) -> None:
    """Stores a block [64, 64] of 8 bits to a bfloat16 tile, and 0 behind the first `count` rows:
    without its scale, which is exact, or times it, rounded once."""
    x = load_eight_bits(block).astype(F32)
    x = x if scale is None else x * scale
    target[...] = kept(rounded(x, BF16), count)
