"""The schedule of a persistent launch: which items of work each block takes, and in which order.

An item is a piece of the sequence of one head, or of the two heads of a tile. A role walks it chunk
by chunk, 64 rows each. Steps, which select the slots of rings, count the chunks of all items that
the block has taken so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.mosaic.roles import group
from ato_jax.mosaic.tiles import ROWS


class Item(NamedTuple):
    """A piece of one head, or of the two heads of a tile; then `head` is the number of the pair.
    `before` is the number of chunks in the block's earlier items. `end` is that of `Deal`."""

    number: Any
    batch: Any
    head: Any
    piece: Any
    first_row: Any
    chunks: Any
    before: Any
    end: int | None = None

    def _first_of(self, chunk: Any) -> Any:
        """A chunk's first row."""
        first = self.first_row + chunk * ROWS
        return first if self.end is None else self.end - ROWS - first

    def rows(self, chunk: Any) -> Any:
        return pl.ds(self._first_of(chunk), ROWS)

    def number_of(self, chunk: Any) -> Any:
        """The chunk's number in the sequence."""
        number = lax.div(self.first_row, ROWS) + chunk
        return number if self.end is None else self.end // ROWS - 1 - number

    def rows_within(self, chunk: Any, lengths: Any) -> Any:
        """The number of rows from a chunk's first row to the end of the sequence, which may be more
        than 64 or negative; None if no `lengths` [B] are given."""
        return None if lengths is None else lengths[self.batch] - self._first_of(chunk)

    def rows_from_the_end(self, chunk: Any) -> Any:
        return self.rows(self.chunks - 1 - chunk)


@dataclasses.dataclass(frozen=True)
class Deal:
    """The items of a launch: `pieces` of `rows` each, from row `first` on, of B sequences of
    `length` rows with `heads` heads, or pairs of heads.

    Blocks that run at the same time have the same piece of several heads, which lie next to each
    other in memory.

    If `end` is given, `length` rounded up to whole chunks, chunks are counted from the end of the
    sequence: the first chunk of the first piece is the last one in memory. Within a chunk rows keep
    their order in memory.
    """

    B: int
    heads: int
    length: int
    rows: int
    pieces: int
    most_blocks: int
    first: int = 0
    end: int | None = None

    @property
    def items(self) -> int:
        return self.pieces * self.B * self.heads

    @property
    def blocks(self) -> int:
        return min(self.most_blocks, self.items)

    @property
    def own(self) -> Any:
        """The number of items that this block takes."""
        if self.items == self.blocks:
            return 1
        return lax.div(self.items - lax.axis_index("block") + (self.blocks - 1), self.blocks)

    def each(
        self,
        do: Callable[[Item], None],
        takes: Callable[[Item], Any] | None = None,
        cut: Callable[[Item], Item] = lambda item: item,
    ) -> Any:
        """Runs `do` for each item of this block, or for those that it `takes`; returns how many
        chunks these had in all. `cut` gives an item as it is walked, without chunks at its start
        or end."""
        block = lax.axis_index("block")
        heads = self.B * self.heads

        def one(number: Any, before: Any) -> Any:
            item = block + number * self.blocks
            piece, head = lax.div(item, heads), lax.rem(item, heads)
            first_row = self.first + piece * self.rows
            here = jnp.minimum(self.rows, self.length - first_row)
            chunks = lax.div(here + (ROWS - 1), ROWS)
            batch, head = lax.div(head, self.heads), lax.rem(head, self.heads)
            found = cut(Item(number, batch, head, piece, first_row, chunks, before, self.end))
            if takes is None:
                do(found)
                return before + found.chunks
            taken = takes(found)
            pl.when(taken)(lambda: do(found))
            return jnp.where(taken, before + found.chunks, before)

        if self.items == self.blocks:
            # Without a loop around an item the compiler has more registers for its body.
            return one(0, jnp.int32(0))
        return lax.fori_loop(0, self.own, one, jnp.int32(0))


def in_turn(item: Item, workers: int, do: Callable[[Any], None]) -> None:
    """Runs `do` for each chunk of an item that falls to this one of `workers` warpgroups, which
    take turns across items. Where the slots are a multiple of the workers, each slot belongs to
    one warpgroup."""
    first = lax.rem(group() + workers - lax.rem(item.before, workers), workers)
    own = lax.div(item.chunks - first + (workers - 1), workers)
    lax.fori_loop(0, own, lambda turn, _: do(first + turn * workers), None)


def whole_chunks(length: int) -> int:
    """The length of a sequence, rounded up to whole chunks."""
    return int(pl.cdiv(length, ROWS)) * ROWS
