"""Dropout: which weights of a block are kept, by the same bits as in every backend.

XLA hashes the positions of the queries, [B, H, T] int32, and a kernel these with those of keys.

`spec.dropout_keep_in_row` keeps a pair where x ^ (x >> 16) is at least L, 32 bits without a sign,
L = threshold 2^8. The upper halves of x and of that are the same; where they are the upper half of
L, the lower half is x ^ (L >> 16), else it decides nothing. So the pair is kept where x ^ (L >> 16)
is at least L: one instruction in the place of four.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from ato_jax import device
from ato_jax.mosaic import TILE
from ato_jax.mosaic.assembly import constant, instructions
from ato_jax.ops.attention.mosaic_gpu.softmax import COLUMNS
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, dropout_keep_in_row, dropout_row

# Shifts and factors of the hash in `spec.py`, ahead of its last shift.
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
THRESHOLDS = 2**24  # that a rate is rounded to
SIGN = 1 << 31
# A thread's first column of 8: two for each of four threads.
FIRST_COLUMN = """{
.reg .b32 lane;
mov.u32 lane, %laneid;
and.b32 lane, lane, 3;
shl.b32 $0, lane, 1;
}"""


def hashes(spec: AttentionSpec, inputs: Inputs, rows: int) -> jax.Array | None:
    """The hash of each query, int32 [B, H, rows]; None without dropout."""
    seed = inputs.dropout_seed
    if spec.dropout_rate == 0 or seed is None:
        return None
    shape = spec.B, spec.H, rows
    b, h, i = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
    words = tuple(seed[word] for word in range(seed.shape[0]))
    return lax.bitcast_convert_type(dropout_row(words, b, h, i), jnp.int32)


def kept(spec: AttentionSpec, hashes: Any, first_key: Any, axis: int) -> jax.Array:
    """Which pairs are kept, from `hashes` of their queries; the keys, from `first_key` on, lie
    along `axis`."""
    if axis == 1 and not device.interpreting():
        return keep(spec.dropout_rate, plus_columns(hashes + first_key), 0)
    key = plgpu.broadcasted_iota(jnp.int32, hashes.shape, dimension=axis, layout=TILE)
    return keep(spec.dropout_rate, hashes, key + first_key)


def plus_columns(rows: jax.Array) -> jax.Array:
    """Numbers that are alike in a row, each with its column added: for each but those of a thread's
    first columns one addition of a constant. LLVM would compute each column by an OR first."""
    own = plgpu.ShapeDtypeStruct(rows.shape, jnp.int32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=own)
    def add(_: Any, tile: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        of_pair = ir.VectorType.get([2], word)
        first = instructions(FIRST_COLUMN, "=r", result=word)
        found = np.empty(tile.registers.shape, object)
        assert found.shape[1] * COLUMNS == rows.shape[1]
        for place, pair in np.ndenumerate(tile.registers):
            operands = []
            for half in range(2):
                number = ir.Operation.create(
                    "vector.extract",
                    results=[word],
                    operands=[pair],
                    attributes={"static_position": ir.DenseI64ArrayAttr.get([half])},
                ).result
                base = arith.addi(number, first)
                column = ir.IntegerAttr.get(word, place[1] * COLUMNS + half)
                operands.append(arith.addi(base, constant(column)))
            found[place] = ir.Operation.create(
                "vector.from_elements", results=[of_pair], operands=operands
            ).result
        return mgpu.FragmentedArray(
            _registers=found, _layout=tile.layout, _is_signed=tile.is_signed
        )

    return add(rows)


def keep(rate: float, row: Any, j: Any) -> Any:
    """`dropout_keep_in_row` of int32 numbers, in fewer instructions."""
    least = round(rate * THRESHOLDS) * (2**32 // THRESHOLDS)
    if least == 2**32:  # beyond 32 bits
        return dropout_keep_in_row(rate, row, j)
    x = row + j
    for by, factor in ROUNDS:
        x = (x ^ lax.shift_right_logical(x, np.int32(by))) * _signed(factor)
    # The sign is flipped on both sides: an order with signs.
    return (x ^ _signed(least >> 16 | SIGN)) >= _signed(least ^ SIGN)


def _signed(word: int) -> Any:
    return np.uint32(word).astype(np.int32)
