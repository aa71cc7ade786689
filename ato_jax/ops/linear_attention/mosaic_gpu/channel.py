"""A gate for each step and channel: how features carry it, and the turns of a steep chunk.

With G_i the sum of the gates [F] from a chunk's first row to row i, to base 2, and m its middle,

    q^_i = phi(q_i) exp2(G_i - G_m)        k~_j = phi(k_j) exp2(G_m - G_j)
    exp2(G_i - G_j) phi(q_i) phi(k_j) = q^_i k~_j        channel by channel

so that all pairs of a chunk are products of q^ and k~, as without gates, if states are those that
the middle sees. A chunk is steep where one half of it loses more than `MOST_LOST`. It is then
taken in 2, 4, .. turns: a turn is some rows of the chunk, with a middle of their own, and features
of 0 in all other rows. There are as many turns as it takes until no half of a turn loses that much.
With `MOST_TURNS`, which are pairs of rows, none can. In float16 (`channel_powers.py`) a half is
steep from 2^8 on, so a row may need a turn of its own.

Segments are masks (`chunk_borders.py`), of chunks and of turns alike (`channel_turns.py`). The
gates of steps that begin a segment count as 0, so that a border makes no chunk steep.

Sums of gates over rows are matrix products. One factor holds the gates in float16, divided by
`UNIT`; the other, called weights below, holds 0, `UNIT` and -`UNIT`. Rounding a gate to float16
changes it by at most 2^-11 of itself, so a pair's exponent x is off by at most |x| 2^-11, and its
weight 2^x by at most 1.8e-4.
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
from ato_jax.mosaic import ALIKE, HALF
from ato_jax.ops.linear_attention.decay import LEAST_DECAY_IN_FLOAT16 as LEAST_DECAY
from ato_jax.ops.linear_attention.decay import MOST_LOST_OF_TURN as MOST_LOST
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.chunk_borders import Borders
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN as CHUNKS
from ato_jax.ops.linear_attention.scans.chunks import RUN
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

F16 = jnp.float16
NO_BORDERS = Borders()

MOST_TURNS = C // 2
MOST_TURNS_IN_FLOAT16 = C
# Gates to base 2 are divided by it: then float16 holds them from -72 (`LEAST_DECAY`) up to -2e-7
# as normal numbers.
UNIT = 2.0**-8
# The number of halves that 1, 2, 4, 8 and 16 turns have. With `MOST_TURNS` no half is steep.
_HALVES = [2 << level for level in range(int(math.log2(MOST_TURNS)))]


def run_of(item: mosaic.Item, chunk: Any) -> Any:
    """The number of the run that a chunk belongs to. A piece consists of whole runs."""
    return lax.div(item.first_row, RUN) + lax.div(chunk, CHUNKS)


class Turn(NamedTuple):
    """Rows of a chunk that are taken at once, from `first` on; up to `middle` the first half."""

    first: Any
    rows: Any
    middle: Any

    @property
    def last(self) -> Any:
        return self.first + self.rows - 1

    def has(self, row: jax.Array) -> jax.Array:
        return (row >= self.first) & (row < self.first + self.rows)


def turn_of(number: Any, turns: Any, in_float16: bool = False) -> Turn:
    rows = C // turns
    if in_float16:  # which may need turns of a single row
        return Turn(number * rows, rows, number * rows + jnp.maximum(rows // 2, 1) - 1)
    return Turn(number * rows, rows, number * rows + rows // 2 - 1)


WHOLE = Turn(0, C, C // 2 - 1)


def shared(spec: LinearAttentionSpec, *shape: int) -> Any:
    """Shared memory for rounded gates, or for the weights that they are multiplied with."""
    return frame.tiling(spec).shared(*shape, dtype=F16)


def round_gates(gates_ref: Any, rounded_ref: Any, borders: Borders = NO_BORDERS) -> None:
    """Rounds gates [C, HALF] from float32 and natural logarithms to float16, to base 2, divided by
    `UNIT`. Those of steps that begin a segment are 0."""
    gates = jnp.maximum(mosaic.load(gates_ref), LEAST_DECAY) * (frame.LOG2_E / UNIT)

    def without_borders() -> jax.Array:
        row = plgpu.broadcasted_iota(jnp.int32, (C,), dimension=0, layout=mosaic.OF_ROWS)
        begins = mosaic.load(borders.rows, mosaic.OF_ROWS, optimized=False)
        # A row begins a segment where it is the first of its own; all rows ahead of `reads` are of
        # the segment of the chunk before, and for them `begins` is 0.
        own = mosaic.in_columns(jnp.where(row >= borders.reads, begins, -1), HALF)
        return jnp.where(own == mosaic.in_columns(row, HALF), 0.0, gates)

    gates = borders.either(without_borders, lambda: gates)
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
    """Weights [C, C], whose product with the gates has G_i - G_m in row i, and 0 in rows that are
    not the turn's."""
    row, column = mosaic.hidden_position(0), mosaic.hidden_position(1)
    later = (column > turn.middle) & (column <= row) & turn.has(row)
    earlier = (column <= turn.middle) & (column > row) & turn.has(row)
    return (jnp.where(later, UNIT, 0.0) - jnp.where(earlier, UNIT, 0.0)).astype(F16)


def until_end() -> jax.Array:
    """Weights [C, C], whose product with the gates has G_C - G_j in row j, with C the last row."""
    return _units(mosaic.hidden_position(1) > mosaic.hidden_position(0))


def of_halves() -> jax.Array:
    return weights_of_halves(mosaic.hidden_position(0), mosaic.hidden_position(1))


def weights_of_halves(row: jax.Array, column: jax.Array) -> jax.Array:
    """Weights [C, C]. For each n of `_HALVES`, their product with the gates has in the n rows from
    n - 2 on the sums over the n halves of n / 2 turns."""
    own = [row + 2 == n + column // (C // n) for n in _HALVES]
    return _units(functools.reduce(jnp.logical_or, own))


def store_all(ref: Any) -> None:
    """Stores weights [ALIKE, C] that add up all rows of a chunk, the same in each row."""
    units = plgpu.layout_cast(jnp.full((C, ALIKE), UNIT, F16), mosaic.TILE)
    mosaic.store_transposed(ref, units)


def store_halves(ref: Any, turn: Turn = WHOLE) -> None:
    """Stores weights [ALIKE, C]: the first ALIKE / 2 rows add up a turn's first half, the others
    its second half."""
    row, number = (
        plgpu.broadcasted_iota(jnp.int32, (C, ALIKE), dimension=axis, layout=mosaic.TILE)
        for axis in (0, 1)
    )
    is_first = row <= turn.middle
    own = turn.has(row) & (is_first == (number < ALIKE // 2))
    mosaic.store_transposed(ref, _units(own))


def halves(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums over a turn's first and second half, [HALF] each, from the product of gates with the
    weights of `store_halves`, [HALF, ALIKE]."""
    number = plgpu.broadcasted_iota(jnp.int32, sums.shape, dimension=1, layout=mosaic.TILE)
    first = jnp.where(number < ALIKE // 2, sums, 0.0)
    first, both = jnp.sum(first, axis=1) * (2 / ALIKE), jnp.sum(sums, axis=1) * (2 / ALIKE)
    return first, both - first


def map_in_place(
    spec: LinearAttentionSpec,
    ref: Any,
    half: int,
    exponents: jax.Array,
    turn: Turn | None = None,
    *,
    are_keys: bool = False,
    for_flows: bool = False,
) -> None:
    """Features of half a tile times exp2 of exponents, rounded once; 0 in all but the turn's rows,
    and those of keys in columns that the head does not have. `for_flows`: that the gradients read
    them (`flow_features.of_flows`)."""
    maps, x, first = feature_maps.features(spec), mosaic.load(ref), half * HALF
    if are_keys:
        x = maps.present(x, first)
    found = maps.decayed(x, exponents, first, for_flows)
    if turn is not None:
        row = plgpu.broadcasted_iota(jnp.int32, found.shape, dimension=0, layout=mosaic.TILE)
        found = jnp.where(turn.has(row), found, 0.0)
        found = lax.optimization_barrier(found)
    ref[...] = mosaic.rounded(found, ref.dtype)


def turns_of(
    least: jax.Array, most_lost: float = MOST_LOST, most_turns: int = MOST_TURNS
) -> jax.Array:
    """How many turns each chunk takes, [B, tiles, chunks].

    `least` [B, tiles, chunks, 2, C] is, for each half of a tile's columns, the least over these
    columns of each row of sums that `of_halves` makes.
    """
    # Where halves are steep, as many turns as these are.
    instead = np.ones(C, np.int32)
    for n in _HALVES:
        instead[n - 2 : 2 * n - 2] = n if n < MOST_TURNS else most_turns
    return jnp.max(jnp.where(least < -most_lost, instead, 1), axis=(3, 4))
