"""The borders of segments within a chunk: masks of its pairs and of its rows.

With rows of a chunk counted from its first one, and segments that are runs of rows,

    begins_i   the first row of the chunk that is of row i's segment
    ends_i     the last such row
    reads      how many rows, from the chunk's first one on, are of the segment of the row ahead
    adds       the first row that is of the segment of the chunk's last row

query i sees key j of the chunk where begins_i <= j <= i, or, which is the same, j <= i <= ends_j.
The first `reads` rows see the state ahead of the chunk, and the rows from `adds` on are part of the
state behind it. Where reads < C there is a border, at the first row of the chunk or behind it, and
nothing is left of the state ahead.

Backwards the same rows meet the sums over queries: keys from `adds` on are seen by later chunks,
and the first `reads` queries see keys of earlier ones.

XLA makes these numbers from the segments, and kernels ask for them by chunk. A chunk without a
border takes the way of a call that has no segments; one with a border multiplies what is masked and
what is not one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.ops.linear_attention.alignment import runs_of_keys
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, whole_chunks
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec


class OfSequence(NamedTuple):
    """The borders of all chunks, and of pieces, in the rows of the sequence. Each is None without
    segments, and where a decay is in their place (`steps.in_place`)."""

    begins: jax.Array | None = None  # [B, T up to a whole chunk] int32, as `ends`
    ends: jax.Array | None = None
    chunks: jax.Array | None = None  # [B, chunks, 2] int32: `reads` and `adds`
    # [B, P, 2] int32: the first row and the one behind the last of those that are part of the state
    # behind a piece, and of those that see the state ahead of it.
    adding: jax.Array | None = None
    reading: jax.Array | None = None
    # [B, G, P] float32: 1 where a piece leaves something of the state ahead of it, else 0.
    keeps: jax.Array | None = None


def of_sequence(spec: LinearAttentionSpec, deal: mosaic.Deal, inputs: Inputs) -> OfSequence:
    if spec.segments is None:
        return OfSequence()
    runs = runs_of_keys(spec, inputs)
    assert runs is not None
    of_chunks = _cut(runs, whole_chunks(spec.T) // C, C)
    query, key = of_chunks[..., :, None], of_chunks[..., None, :]
    begins = jnp.sum(key < query, axis=3, dtype=jnp.int32)  # [B, chunks, C]
    ends = (C - 1) - jnp.sum(key > query, axis=3, dtype=jnp.int32)
    chunks = jnp.stack([_reads(of_chunks), begins[:, :, -1]], axis=2)
    of_pieces = _cut(runs, deal.pieces, deal.rows)
    last = of_pieces[..., -1:]
    first = jnp.arange(deal.pieces, dtype=jnp.int32) * deal.rows
    end = jnp.minimum(first + deal.rows, spec.T)
    adds = first + jnp.sum(of_pieces < last, axis=2, dtype=jnp.int32)
    reads = jnp.minimum(first + _reads(of_pieces), end)
    first, end = (jnp.broadcast_to(x, adds.shape) for x in (first, end))
    keeps = _reads(of_pieces) == deal.rows
    return OfSequence(
        begins.reshape(spec.B, -1),
        ends.reshape(spec.B, -1),
        chunks,
        jnp.stack([adds, end], axis=2),
        jnp.stack([first, reads], axis=2),
        jnp.broadcast_to(keeps[:, None], (spec.B, spec.G, deal.pieces)).astype(jnp.float32),
    )


def _cut(runs: jax.Array, count: int, rows: int) -> jax.Array:
    """[B, T] as [B, count, rows]; rows behind the last one are of its run."""
    missing = count * rows - runs.shape[1]
    return jnp.pad(runs, ((0, 0), (0, missing)), mode="edge").reshape(-1, count, rows)


def _reads(parts: jax.Array) -> jax.Array:
    """How many rows of each part are of the run of the row ahead, [B, parts]. Ahead of the first
    row is the state that is given, which the first run continues."""
    ahead = jnp.concatenate([parts[:, :1, 0], parts[:, :-1, -1]], axis=1)
    return jnp.sum(parts == ahead[..., None], axis=2, dtype=jnp.int32)


class Borders(NamedTuple):
    """The borders of one chunk, in a kernel; each None in a call without segments."""

    rows: Any = None  # `begins` or `ends` in global memory, [C]
    numbers: Any = None  # `reads` and `adds` there, [2]
    exist: Any = None

    def either(self, at_border: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        return otherwise() if self.exist is None else lax.cond(self.exist, at_border, otherwise)

    def when_some(self, do: Callable[[], None]) -> None:
        if self.exist is not None:
            pl.when(self.exist)(do)

    def unless_some(self, do: Callable[[], None]) -> None:
        if self.exist is None:
            do()
        else:
            pl.when(~self.exist)(do)

    # Loaded where they are used, so that they take no registers meanwhile.
    @property
    def reads(self) -> Any:
        return None if self.numbers is None else self.numbers[0]

    @property
    def adds(self) -> Any:
        return None if self.numbers is None else self.numbers[1]

    def left(self, x: Any) -> Any:
        """A number, or a tile, of the state ahead, of which a border leaves nothing."""
        return x if self.exist is None else jnp.where(self.exist, 0.0, x)

    def pairs_from(self) -> jax.Array:
        """[i, j]: whether key j is of query i's segment or of a later one, with rows of
        `begins`."""
        return mosaic.hidden_position(1) >= self._in_columns()

    def pairs_until(self) -> jax.Array:
        """[j, i]: whether query i is of key j's segment or of an earlier one, with rows of
        `ends`."""
        return mosaic.hidden_position(1) <= self._in_columns()

    def _in_columns(self) -> jax.Array:
        return mosaic.in_columns(mosaic.load(self.rows, mosaic.OF_ROWS, optimized=False), C)


def of_chunk(rows: Any, chunks: Any, item: mosaic.Item, chunk: Any) -> Borders:
    """From the references to `begins` or `ends`, and to `chunks`; None without segments."""
    if chunks is None:
        return Borders()
    number = item.number_of(chunk)
    numbers = chunks.at[item.batch, number]
    return Borders(rows.at[item.batch, pl.ds(number * C, C)], numbers, numbers[0] < C)


def cut_to(rows: Any, item: mosaic.Item) -> mosaic.Item:
    """The item without chunks at its start and end that have none of the rows of its piece, those
    that `adding` or `reading` names."""
    first, end = (rows[item.batch, item.piece, one] for one in range(2))
    skipped = lax.div(first - item.first_row, C)
    chunks = lax.div(end - item.first_row + (C - 1), C) - skipped
    return item._replace(first_row=item.first_row + skipped * C, chunks=chunks)


def keep_within(rows: Any, item: mosaic.Item, chunk: Any, ref: Any) -> None:
    """Sets those of a chunk's rows to 0, in a tile in shared memory, that `rows` leaves out. The
    caller has to `commit_smem` afterwards."""
    first, end = (rows[item.batch, item.piece, one] for one in range(2))
    before = item.first_row + chunk * C
    mosaic.keep_rows_between(ref, first - before, end - before)
