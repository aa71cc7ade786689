"""Causal segments within a chunk of 64 rows: masks of pairs and of rows.

`scans/borders.py` computes begins and ends of each row, and reads and adds of each chunk. Query i
sees key j of the chunk if begins_i <= j <= i, which is the same as j <= i <= ends_j. The first
`reads` rows see the state ahead of the chunk, and the rows from `adds` on are added to the state
behind it. If reads < C, a segment begins in the chunk, at its first row or later, and nothing of
the state ahead is left behind it. In the backward pass keys from `adds` on are seen by queries of
later chunks, and the first `reads` queries see keys of earlier chunks.

The causal kernels make a `Borders` for each chunk. A chunk in which no segment begins runs the code
of a call without segments. In other chunks products follow one another, with masks in between.

In a piece with a steep chunk (`chunk_decay.py`) the kernels apply no masks. There the first step of
a segment has the least decay, which makes its chunk steep, too: exp2(-184) is 0 in float32, so
neither a state nor a pair of earlier steps is left. With a decay per channel a steep chunk has
masks, turn by turn (`channel_turns.py`).
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
    """The borders of one chunk, in a kernel; all fields are None in a call without segments."""

    rows: Any = None  # `begins` or `ends` in global memory, [C]
    numbers: Any = None  # `reads` and `adds` in global memory, [2]
    exist: Any = None

    def either(self, at_border: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        return otherwise() if self.exist is None else lax.cond(self.exist, at_border, otherwise)

    def unless(self, steep: Any) -> Borders:
        """These borders, or none if the chunk is steep, since steep chunks have no masks."""
        return self if self.exist is None else self._replace(exist=self.exist & ~steep)

    def when_some(self, do: Callable[[], None]) -> None:
        if self.exist is not None:
            pl.when(self.exist)(do)

    def unless_some(self, do: Callable[[], None]) -> None:
        if self.exist is None:
            do()
        else:
            pl.when(~self.exist)(do)

    # Loaded at each use, so that they take no registers in between.
    @property
    def reads(self) -> Any:
        return None if self.numbers is None else self.numbers[0]

    @property
    def adds(self) -> Any:
        return None if self.numbers is None else self.numbers[1]

    def left(self, x: Any) -> Any:
        """x, a part of the state ahead, or 0 if a segment begins in the chunk."""
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
    """Sets rows of a tile in shared memory to 0 that are not among `rows`. The caller has to call
    `commit_smem` afterwards."""
    first, end = (rows[item.batch, item.piece, one] for one in range(2))
    before = item.first_row + chunk * C
    mosaic.keep_rows_between(ref, first - before, end - before)
