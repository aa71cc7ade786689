"""What a gate for each step and channel does to features, and when its chunk is taken in turns.

With G_i the sum of the gates [F] from a chunk's first row to row i, to base 2, and m its middle,

    q^_i = phi(q_i) exp2(G_i - G_m)        k~_j = phi(k_j) exp2(G_m - G_j)
    exp2(G_i - G_j) phi(q_i) phi(k_j) = q^_i k~_j        channel by channel

so that all pairs of a chunk are products of q^ and k~, as without gates, if states are those that
the middle sees. Where a half of the chunk loses more than features in bfloat16 have room for, the
chunk is steep, and is taken in turns of fewer rows, each with a middle of its own: in 2, 4, ..,
until no half loses that much, or in pairs of rows, for which there is always room. A turn is the
chunk with features of 0 in all rows but its own.

Sums over rows are products with matrices of 0, `UNIT` and -`UNIT`, of the gates in float16, by
which they are divided. So a pair's exponent x is off by x 2^-12 at most, its weight 2^x by 9e-5: as
much of it as is left.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF
from ato_jax.ops.linear_attention.decay import LEAST_DECAY_IN_FLOAT16 as LEAST_DECAY
from ato_jax.ops.linear_attention.decay import MOST_LOST_OF_TURN as MOST_LOST
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN as CHUNKS
from ato_jax.ops.linear_attention.scans.chunks import RUN
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

F16 = jnp.float16

MOST_TURNS = C // 2
# What float16 holds of gates: from 72 down to 2e-7 by its normal numbers.
UNIT = 2.0**-8
# How many halves 1, 2, .. turns have, but for the most turns, where none is steep.
_HALVES = [2 << level for level in range(int(math.log2(MOST_TURNS)))]


def run_of(item: mosaic.Item, chunk: Any) -> Any:
    """The run of a chunk of a piece, of which pieces are whole."""
    return lax.div(item.first_row, RUN) + lax.div(chunk, CHUNKS)


class Turn(NamedTuple):
    """Rows of a chunk that are taken at once, from `first` on; up to `middle` the first half."""

    first: Any
    rows: Any
    middle: Any

    def has(self, row: jax.Array) -> jax.Array:
        return (row >= self.first) & (row < self.first + self.rows)


def turn_of(number: Any, turns: Any) -> Turn:
    rows = C // turns
    return Turn(number * rows, rows, number * rows + rows // 2 - 1)


WHOLE = Turn(0, C, C // 2 - 1)


def shared(spec: LinearAttentionSpec, *shape: int) -> Any:
    """Room for gates, and for what they are multiplied by."""
    return frame.tiling(spec).shared(*shape, dtype=F16)


def round_gates(gates_ref: Any, rounded_ref: Any) -> None:
    """[C, HALF] in float32 to float16, to base 2, divided by `UNIT`."""
    gates = jnp.maximum(mosaic.load(gates_ref), LEAST_DECAY) * (frame.LOG2_E / UNIT)
    rounded_ref[...] = lax.optimization_barrier(gates.astype(F16))


def sums_of(weights: Any, rounded_ref: Any) -> Any:
    """weights @ the gates, [C, HALF], as `mosaic.multiply` takes it."""
    return mosaic.zeros(C, HALF), [(weights, rounded_ref)]


def sums_by_channel(rounded_ref: Any, weights_ref: Any) -> Any:
    """The gates' transpose @ the transpose of weights [ALIKE, C], [HALF, ALIKE]."""
    return mosaic.zeros(HALF, ALIKE), [(rounded_ref.T, weights_ref.T)]


def _units(where: jax.Array) -> jax.Array:
    return jnp.where(where, UNIT, 0.0).astype(F16)


def since_middle(turn: Turn = WHOLE) -> jax.Array:
    """What sums up G_i - G_m; of rows that are not the turn's 0."""
    row, column = mosaic.hidden_position(0), mosaic.hidden_position(1)
    later = (column > turn.middle) & (column <= row) & turn.has(row)
    earlier = (column <= turn.middle) & (column > row) & turn.has(row)
    return (jnp.where(later, UNIT, 0.0) - jnp.where(earlier, UNIT, 0.0)).astype(F16)


def until_end() -> jax.Array:
    """What sums up G_C - G_j for the chunk's last row C."""
    return _units(mosaic.hidden_position(1) > mosaic.hidden_position(0))


def of_halves() -> jax.Array:
    return weights_of_halves(mosaic.hidden_position(0), mosaic.hidden_position(1))


def weights_of_halves(row: jax.Array, column: jax.Array) -> jax.Array:
    """What sums up the n halves of n / 2 turns in rows from n - 2 on."""
    own = [row + 2 == n + column // (C // n) for n in _HALVES]
    return _units(functools.reduce(jnp.logical_or, own))


def store_all(ref: Any) -> None:
    """What sums up all rows, in each row of a tile [ALIKE, C]."""
    units = plgpu.layout_cast(jnp.full((C, ALIKE), UNIT, F16), mosaic.TILE)
    mosaic.store_transposed(ref, units)


def store_halves(ref: Any, turn: Turn = WHOLE) -> None:
    """What adds up a turn's first half, in half of a tile's rows [ALIKE, C]; then the other."""
    row, number = (
        plgpu.broadcasted_iota(jnp.int32, (C, ALIKE), dimension=axis, layout=mosaic.TILE)
        for axis in (0, 1)
    )
    is_first = row <= turn.middle
    own = turn.has(row) & (is_first == (number < ALIKE // 2))
    mosaic.store_transposed(ref, _units(own))


def halves(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[HALF] each, of what `store_halves` made them add up."""
    number = plgpu.broadcasted_iota(jnp.int32, sums.shape, dimension=1, layout=mosaic.TILE)
    first = jnp.where(number < ALIKE // 2, sums, 0.0)
    first, both = jnp.sum(first, axis=1) * (2 / ALIKE), jnp.sum(sums, axis=1) * (2 / ALIKE)
    return first, both - first


def map_keys_in_place(
    spec: LinearAttentionSpec,
    ref: Any,
    half: int,
    exponents: jax.Array,
    turn: Turn | None = None,
) -> None:
    """`map_in_place` of half a tile of keys; 0 in columns that the head does not have."""
    x = feature_maps.keys(spec, mosaic.load(ref), half * HALF)
    _store_features(ref, x, exponents, turn)


def map_in_place(ref: Any, exponents: jax.Array, turn: Turn | None = None) -> None:
    """Features of a tile times exp2 of exponents, rounded once; 0 in all but the turn's rows."""
    _store_features(ref, mosaic.load(ref), exponents, turn)


def _store_features(ref: Any, x: jax.Array, exponents: jax.Array, turn: Turn | None) -> None:
    found = feature_maps.unrounded_decayed_features_of(x.astype(F32), exponents)
    if turn is not None:
        row = plgpu.broadcasted_iota(jnp.int32, found.shape, dimension=0, layout=mosaic.TILE)
        found = jnp.where(turn.has(row), found, 0.0)
        found = lax.optimization_barrier(found)
    ref[...] = mosaic.rounded(found)


def turns_of(least: jax.Array) -> jax.Array:
    """How many each chunk of a tile takes, [B, tiles, chunks], from the least of the sums that
    `of_halves` makes, [B, tiles, chunks, halves of F, C]."""
    # Where halves are steep, as many turns as these are.
    instead = np.ones(C, np.int32)
    for n in _HALVES:
        instead[n - 2 : 2 * n - 2] = n
    return jnp.max(jnp.where(least < -MOST_LOST, instead, 1), axis=(3, 4))
