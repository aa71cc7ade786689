"""A tile of weights as a product's first factor of 8 bits.

The tensor cores multiply 8 bits by 8 bits at twice the rate of 16, and want the first factor in
registers in another order of columns than their results have.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

from ato_jax import device
from ato_jax.mosaic import assembly
from ato_jax.mosaic.eight_bits import F8
from ato_jax.mosaic.tiles import TILE

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
        most = float(jnp.finfo(F8).max)  # the instruction cuts off what is above; NaN stays
        return in_order_of_eight_bits(jnp.minimum(x, most), 1).astype(F8)
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
            operands = [assembly.element(pair, number) for pair in of_four for number in range(2)]
            bits = assembly.instructions(_NARROW, "=r,f,f,f,f", operands, word)
            vector = ir.Operation.create("vector.broadcast", results=[one], operands=[bits]).result
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


def transposed_bytes(x: jax.Array, number: int) -> jax.Array:
    """Extracts the lower or the upper bytes of a transposed tile, each of whose elements holds two
    neighbours of a row of the original: rows of a product's second factor.

    Args:
      x: [rows, columns] of uint16 in registers, a column for each row of the factor.
      number: 0 for the lower bytes, 1 for the upper ones.

    Returns:
      [rows, columns / 2] of uint16, each two bytes in the order of `in_order_of_eight_bits`. A
      thread already holds the four bytes of each word of 32 bits, so none are exchanged.
    """
    shape = x.shape[0], x.shape[1] // 2
    if device.interpreting():
        bytes_ = in_order_of_eight_bits(x >> 8 * number & 0xFF, 1)
        return bytes_[:, ::2] | bytes_[:, 1::2] << 8
    own = plgpu.ShapeDtypeStruct(shape, jnp.uint16, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=own)
    def packed(_: Any, tile: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        pairs = tile.registers.reshape(shape[1] // 8, 2, 2)  # [16 columns, 8 of them, row half]
        found = np.empty((shape[1] // 8, 2), object)
        for (block, half), _ in np.ndenumerate(found):
            words = [
                ir.Operation.create("llvm.bitcast", results=[word], operands=[pair]).result
                for pair in pairs[block, :, half]
            ]
            text = f"prmt.b32 $0, $1, $2, {0x7531 if number else 0x6420};"
            bits = assembly.instructions(text, "=r,r,r", words, word)
            pair = pairs[block, 0, half].type
            found[block, half] = ir.Operation.create(
                "llvm.bitcast", results=[pair], operands=[bits]
            ).result
        layout = mgpu.WGMMA_LAYOUT
        return mgpu.FragmentedArray(
            _registers=found.reshape(layout.registers_shape(shape)),
            _layout=layout,
            _is_signed=False,
        )

    return packed(x)


_NARROW = """{
.reg .b16 lower, upper;
cvt.rn.satfinite.e4m3x2.f32 lower, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 upper, $4, $3;
mov.b32 $0, {lower, upper};
}"""
