"""The borders of segments within a chunk: masks of its pairs and of its rows.

With begins, ends, reads and adds of a chunk as `scans/borders.py` makes them, query i sees key j of
the chunk where begins_i <= j <= i, or, which is the same, j <= i <= ends_j. The first `reads` rows
see the state ahead of the chunk, and the rows from `adds` on are part of the state behind it. Where
reads < C there is a border, at the first row of the chunk or behind it, and nothing is left of the
state ahead.

Backwards the same rows meet the sums over queries: keys from `adds` on are seen by later chunks,
and the first `reads` queries see keys of earlier ones.

Kernels ask for these numbers by chunk. A chunk without a border takes the way of a call that has no
segments; one with a border multiplies what is masked and what is not one after the other.

Where a decay is so strong that a piece has a steep chunk (`chunk_decay.py`), its walks have no
masks. There a segment begins with the least decay, so that its chunk is steep, too: exp2(-184) is 0
in float32, so nothing of earlier steps is left, neither of a state nor of a pair. With a decay per
channel a steep chunk is masked, too, turn by turn (`channel_turns.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C


class Borders(NamedTuple):
    """The borders of one chunk, in a kernel; each None in a call without segments."""

    rows: Any = None  # `begins` or `ends` in global memory, [C]
    numbers: Any = None  # `reads` and `adds` there, [2]
    exist: Any = None

    def either(self, at_border: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        return otherwise() if self.exist is None else lax.cond(self.exist, at_border, otherwise)

    def unless(self, steep: Any) -> Borders:
        """Those of a chunk that masks its borders, which a steep one does not."""
        return self if self.exist is None else self._replace(exist=self.exist & ~steep)

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
