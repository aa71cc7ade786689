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
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

from ato_jax import device
from ato_jax.mosaic.assembly import element, instructions
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


# Columns of 8 bits that a row of a product's first factor shares among 4 threads: each has 4 that
# lie side by side. Of a tile of float32 each has two pairs of them.
COLUMNS = 16


def in_order_of_eight_bits(x: jax.Array, axis: int) -> jax.Array:
    """x with an axis in the order that `in_eight_bits` gives to columns. No thread gives an element
    away there, so they lie in another order than in a tile, the same in every 16 of them."""
    axis %= x.ndim
    ahead, behind = x.shape[:axis], x.shape[axis + 1 :]
    blocks = x.reshape(*ahead, -1, 2, 4, 2, *behind)
    return jnp.swapaxes(blocks, axis + 1, axis + 2).reshape(x.shape)


def in_eight_bits(x: jax.Array) -> jax.Array:
    """A float32 tile in registers as a product's first factor of 8 bits, its columns in the order
    of `in_order_of_eight_bits`: the rows of the second factor have to lie in the same."""
    if device.interpreting():
        return in_order_of_eight_bits(x, 1).astype(F8)
    own = plgpu.ShapeDtypeStruct(x.shape, F8, layout=plgpu.Layout.WGMMA_8BIT)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=own)
    def narrowed(_: Any, tile: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        four = ir.VectorType.get([4], ir.Float8E4M3FNType.get())
        one = ir.VectorType.get([1], word)
        pairs = tile.registers.reshape(x.shape[1] // 8, 2)
        found = np.empty((x.shape[1] // COLUMNS, 2), object)
        for (block, half), _ in np.ndenumerate(found):
            of_four = pairs[2 * block, half], pairs[2 * block + 1, half]
            operands = [element(pair, number) for pair in of_four for number in range(2)]
            bits = instructions(_NARROW, "=r,f,f,f,f", operands, word)
            vector = ir.Operation.create(
                "vector.broadcast", results=[one], operands=[bits]
            ).result
            found[block, half] = ir.Operation.create(
                "vector.bitcast", results=[four], operands=[vector]
            ).result
        layout = mgpu.WGMMA_LAYOUT_8BIT
        return mgpu.FragmentedArray(
            _registers=found.reshape(layout.registers_shape(x.shape)),
            _layout=layout,
            _is_signed=None,
        )

    return narrowed(x)


_NARROW = """{
.reg .b16 lower, upper;
cvt.rn.satfinite.e4m3x2.f32 lower, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 upper, $4, $3;
mov.b32 $0, {lower, upper};
}"""
