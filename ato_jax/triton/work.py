"""How an axis of rows is cut into pieces, or dealt out in blocks, to the programs of a grid.

`Pieces` are runs of consecutive rows, one for each program that carries a state through them.
`Dealt` blocks go to programs in turns: blocks that are processed at one time lie close together in
memory, which DRAM and the L2 cache favour, but a program's rows are not consecutive.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

# An even division may make pieces this much longer than asked for, at most, or half as long.
LONGEST_EVEN = 5 / 4
# `deal` looks for a good number of programs up to this multiple of those that run at once.
MOST_WAVES = 4


@dataclasses.dataclass(frozen=True)
class Pieces:
    """An axis of `length` rows cut into `count` runs of `rows`; the last may be shorter."""

    count: int
    rows: int
    length: int

    @property
    def whole(self) -> bool:
        """Whether all rows exist."""
        return self.count * self.rows == self.length

    def block_within(self, wanted: int) -> int:
        """The block of a pass that wants so many rows."""
        return min(wanted, self.rows)

    def turns(self, piece: Any, block: int) -> Any:
        """How many blocks a piece has."""
        return self.rows // block

    def first_row(self, piece: Any, turn: Any, block: int) -> Any:
        """The first row of a piece's block."""
        return piece * self.rows + turn * block


def cut(length: int, others: int, most_rows: int, block: int, programs: int) -> Pieces:
    """Pieces of whole blocks, so that `others` times their number is about `programs` or more.

    Where the blocks divide into equal pieces of nearly that length, they do: then no piece is
    shorter than the others, and no row needs a mask.
    """
    blocks = pl.cdiv(length, block)
    wanted = max(pl.cdiv(programs, others), pl.cdiv(length, most_rows))
    most = max(1, blocks // wanted)
    even = [size for size in range(1, int(most * LONGEST_EVEN) + 1) if blocks % size == 0]
    size = even[-1] if even[-1] * 2 > most else most
    return Pieces(pl.cdiv(blocks, size), size * block, length)


@dataclasses.dataclass(frozen=True)
class Dealt:
    """An axis of `length` rows dealt out in blocks of `block` to `count` programs, in turns."""

    count: int
    block: int
    length: int

    @property
    def whole(self) -> bool:
        return self.length % self.block == 0

    def block_within(self, wanted: int) -> int:
        return self.block

    def turns(self, piece: Any, block: int) -> Any:
        blocks = pl.cdiv(self.length, block)
        if blocks % self.count == 0:
            return blocks // self.count
        return jax.lax.div(blocks - piece + (self.count - 1), jnp.int32(self.count))

    def first_row(self, piece: Any, turn: Any, block: int) -> Any:
        return (piece + turn * self.count) * block


def deal(length: int, others: int, block: int, programs: int) -> Dealt:
    """Deals to so many programs that `others` times their number fills `programs` places.

    Programs that all run at once end together. Where `others` alone are about as many as the
    places, or more, the count is chosen so that its last wave of programs is nearly full.
    """
    blocks = pl.cdiv(length, block)
    least = max(1, programs // others)
    most = max(least, MOST_WAVES * programs // others)

    def filled(count: int) -> float:
        return round(count * others / (programs * pl.cdiv(count * others, programs)), 1)

    count = max(range(least, most + 1), key=lambda count: (filled(count), -count))
    return Dealt(min(count, blocks), block, length)
