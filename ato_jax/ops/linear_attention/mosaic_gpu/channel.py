"""A decay per step and channel: what all `channel_*.py` kernels share, and the mathematics of it.

The decay of a step is called its gate here: [F] numbers, to base 2. With G_i the sum of the gates
from a chunk's first row to row i, and m the middle row of the chunk, features are scaled as

    q^_i = phi(q_i) exp2(G_i - G_m)        k~_j = phi(k_j) exp2(G_m - G_j)
    exp2(G_i - G_j) phi(q_i) phi(k_j) = q^_i k~_j        channel by channel

All pairs of a chunk are then one product of q^ and k~, as without a decay, and so is what queries
read of the state, if the state is scaled to the middle row. The kernels:

    channel_sums.py             the sums over each piece, and which chunks are steep
    channel_output.py           out, and q^, k~ for the backward pass
    channel_query_gradient.py, query_sums.py, channel_key_gradient.py    launched by
                                `channel_backward.py`

A chunk is steep where the gates of one of its halves sum to less than -`MOST_LOST`. It is processed
in 2, 4, .. turns: a turn is a range of its rows with a middle row of its own, and the features of
all other rows are 0 meanwhile. The number of turns is the least at which no half of a turn is
steep. At `MOST_TURNS` a turn has two rows, whose halves cannot be. In float16
(`channel_powers.py`) a half is steep below -8, so a turn may have a single row.

Segments are masks of chunks (`chunk_borders.py`) and of turns (`channel_turns.py`). The gate of a
step that begins a segment counts as 0, so that a border makes no chunk steep.

The kernels compute sums of gates over rows as matrix products. One factor holds the gates in
float16, divided by `UNIT`; the other, called weights below, holds 0, `UNIT` and -`UNIT`. Rounding
changes a gate by at most 2^-11 of itself, so a pair's exponent x has an error of at most
|x| 2^-11, and its weight 2^x one of at most 1.8e-4.
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
# Divides the gates: float16 then holds gates from -72 (`LEAST_DECAY`) to -2e-7 as normal numbers.
UNIT = 2.0**-8
# The numbers of halves of 1, 2, 4, 8 and 16 turns. With `MOST_TURNS` turns no half is steep.
_HALVES = [2 << level for level in range(int(math.log2(MOST_TURNS)))]


def run_of(item: mosaic.Item, chunk: Any) -> Any:
    """The number of the run that a chunk belongs to. A piece consists of whole runs."""
    return lax.div(item.first_row, RUN) + lax.div(chunk, CHUNKS)


def parts_of_scale(spec: LinearAttentionSpec) -> tuple[float, float]:
    """The scale as a power of two times the rest, which is at least 1. Without a normaliser q' is
    q^ times the power in the gradients, which does not round it again, and their float32 results
    are multiplied by the rest. With a normaliser the scale is 1. Gradients need a positive one."""
    power = 2.0 ** (math.frexp(spec.scale)[1] - 1)
    return power, spec.scale / power


def times_rest(x: Any, rest: float) -> Any:
    """x times the rest of the scale, which is often 1, as at 16, 64 and 256 columns."""
    return x if rest == 1.0 else x * rest


class Turn(NamedTuple):
    """Rows of a chunk that are processed at once: `rows` of them from `first` on. The first half
    ends with row `middle`."""

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
    if in_float16:  # a turn may have a single row
        return Turn(number * rows, rows, number * rows + jnp.maximum(rows // 2, 1) - 1)
    return Turn(number * rows, rows, number * rows + rows // 2 - 1)


WHOLE = Turn(0, C, C // 2 - 1)


def shared(spec: LinearAttentionSpec, *shape: int) -> Any:
    """Shared memory for rounded gates, or for the weights by which they are multiplied."""
    return frame.tiling(spec).shared(*shape, dtype=F16)


def round_gates(gates_ref: Any, rounded_ref: Any, borders: Borders = NO_BORDERS) -> None:
    """Rounds gates [C, HALF] from float32 and natural logarithms to float16, to base 2, divided by
    `UNIT`. Those of steps that begin a segment are 0."""
    gates = jnp.maximum(mosaic.load(gates_ref), LEAST_DECAY) * (frame.LOG2_E / UNIT)

    def without_borders() -> jax.Array:
        row = plgpu.broadcasted_iota(jnp.int32, (C,), dimension=0, layout=mosaic.OF_ROWS)
        begins = mosaic.load(borders.rows, mosaic.OF_ROWS, optimized=False)
        # A row begins a segment if `begins` is the row itself. Rows ahead of `reads` belong to the
        # last segment of the chunk before, and `begins` is 0 for them.
        own = mosaic.in_columns(jnp.where(row >= borders.reads, begins, -1), HALF)
        return jnp.where(own == mosaic.in_columns(row, HALF), 0.0, gates)

    gates = borders.either(without_borders, lambda: gates)
    rounded_ref[...] = lax.optimization_barrier(gates.astype(F16))


def sums_of(weights: Any, rounded_ref: Any) -> Any:
    """weights [C, C] @ gates [C, HALF], as an argument of `mosaic.multiply`."""
    return mosaic.zeros(C, HALF), [(weights, rounded_ref)]


def sums_by_channel(rounded_ref: Any, weights_ref: Any) -> Any:
    """gates^T @ weights^T, for weights [ALIKE, C]: [HALF, ALIKE]."""
    return mosaic.zeros(HALF, ALIKE), [(rounded_ref.T, weights_ref.T)]


def _units(where: jax.Array) -> jax.Array:
    return jnp.where(where, UNIT, 0.0).astype(F16)


def since_middle(turn: Turn = WHOLE) -> jax.Array:
    """Weights [C, C]. Row i of their product with the gates is G_i - G_m if the turn has row i, and
    0 otherwise."""
    row, column = mosaic.hidden_position(0), mosaic.hidden_position(1)
    later = (column > turn.middle) & (column <= row) & turn.has(row)
    earlier = (column <= turn.middle) & (column > row) & turn.has(row)
    return (jnp.where(later, UNIT, 0.0) - jnp.where(earlier, UNIT, 0.0)).astype(F16)


def until_end() -> jax.Array:
    """Weights [C, C]. Row j of their product with the gates is G_C - G_j, for the last row C."""
    return _units(mosaic.hidden_position(1) > mosaic.hidden_position(0))


def of_halves() -> jax.Array:
    return weights_of_halves(mosaic.hidden_position(0), mosaic.hidden_position(1))


def weights_of_halves(row: jax.Array, column: jax.Array) -> jax.Array:
    """Weights [C, C]. For each n of `_HALVES`, rows n - 2 to 2 n - 3 of their product with the
    gates are the sums over the n halves of n / 2 turns."""
    own = [row + 2 == n + column // (C // n) for n in _HALVES]
    return _units(functools.reduce(jnp.logical_or, own))


def store_all(ref: Any) -> None:
    """Stores weights [ALIKE, C] of which each row adds up all rows of a chunk."""
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
    """Replaces half a tile by its features times exp2(exponents), rounded once. Rows outside the
    turn become 0, and so do padding columns of keys. `for_flows` says that the gradients read the
    features, too (`flow_features.of_flows`)."""
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
    """The number of turns of each chunk, [B, tiles, chunks].

    `least` [B, tiles, chunks, 2, C] is the minimum, over each half of a tile's columns, of the
    sums that the weights of `of_halves` give.
    """
    # n / 2 turns have n halves; if one of these is steep, n turns are needed.
    instead = np.ones(C, np.int32)
    for n in _HALVES:
        instead[n - 2 : 2 * n - 2] = n if n < MOST_TURNS else most_turns
    return jnp.max(jnp.where(least < -most_lost, instead, 1), axis=(3, 4))
