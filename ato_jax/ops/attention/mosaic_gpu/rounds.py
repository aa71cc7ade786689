"""Rounds: which items each block of a launch takes, forward and backward.

An item is a tile of own rows of one head. Heads that share the L2 cache form a group; all items of
a group come before those of the next. Where each block takes one item, tiles that see many rows of
the other side come first, so that at the end of the launch there is little left to wait for:

    for group: for tile, the last one first where it sees most: for head of the group

A persistent launch deals units of equal weight, to n blocks by turns: block b takes the units b,
b + n, b + 2 n, ... Behind a causal mask a unit is two tiles of a head, p and tiles - 1 - p in the
order above, the heavy one first. If there are as many keys as queries, and no offset, the sums of
their steps differ by about one step at most. With an odd number of tiles the middle ones are left
over: two of them, of neighboring heads, are a unit, and come last. Where the last round has units
for half of the blocks or fewer, twice as many blocks take one item each. Without a causal mask each
tile is a unit. The order is

    for group: for unit of a head: for head of the group
    for two heads of all: their middle tiles, where there are any
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

Place = tuple[Any, Any, Any]  # batch entry, head, first row


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Which items each block takes.

    Attributes:
      batches, heads: each of so many batch entries has so many heads.
      tiles: of each head.
      rows: of a tile.
      group: heads that share the cache.
      causal: whether later keys are hidden: then each tile sees about one tile more, or less, than
        the one before it.
      ascending: whether the last tile sees most, where `causal`; else the first one does.
      most_blocks: those of a persistent launch; None where each block takes one item.
    """

    batches: int
    heads: int
    tiles: int
    rows: int
    group: int
    causal: bool
    ascending: bool
    most_blocks: int | None

    @property
    def items(self) -> int:
        return self.batches * self.heads * self.tiles

    @property
    def in_pairs(self) -> bool:
        return self.causal and self.tiles > 1

    @property
    def units(self) -> int:
        return -(-self.items // 2) if self.in_pairs else self.items

    @property
    def persistent(self) -> bool:
        """Whether a block takes several items."""
        return self.most_blocks is not None and self.items > self.most_blocks

    @property
    def blocks(self) -> int:
        if self.most_blocks is not None and self.persistent:
            return min(self.most_blocks, self.units)
        return self.items

    def place(self, number: Any) -> Place:
        """Batch entry, head and first row of an item, where each block takes one."""
        return self._at(*self._in_groups(number, self.tiles))

    def each(
        self, block: Any, do: Callable[[Any, Place, Any], Any], start: Any
    ) -> tuple[Any, Any]:
        """Runs `carried = do(turn, place, carried)` for each item of a block of a persistent
        launch; returns how many these were, and the last `carried`."""

        def one(turn: Any, carried: Any) -> Any:
            return do(turn, self._at(*self._of_turn(turn, block)), carried)

        count = self._count(block)
        return count, lax.fori_loop(0, count, one, start)

    @property
    def full_rounds(self) -> int:
        """Those in which each block takes a unit."""
        return self.units // self.blocks

    @property
    def _pairs(self) -> int:
        """The units of two tiles of one head."""
        return self.batches * self.heads * (self.tiles // 2)

    @property
    def _first_of_last(self) -> int:
        """The first unit of the last round."""
        return self.full_rounds * self.blocks

    @property
    def last(self) -> int:
        """The items of the last round, if blocks take one each there; else 0."""
        left = self.items - 2 * self._first_of_last
        return left if self.in_pairs and 0 < left <= self.blocks else 0

    def _count(self, block: Any) -> Any:
        if self.last:
            return 2 * self.full_rounds + (block < self.last).astype(jnp.int32)
        later = self.units - 1 - block
        count = lax.div(later, jnp.int32(self.blocks)) + 1
        if self.in_pairs:
            count *= 2
            if self.items % 2:
                has_half_a_unit = lax.rem(later, jnp.int32(self.blocks)) == 0
                count -= has_half_a_unit.astype(jnp.int32)
        return count

    def _of_turn(self, turn: Any, block: Any) -> tuple[Any, Any]:
        """Head and tile, in the order above, of a block's item. With two loops, over units and over
        their tiles, the kernels at D = 256 spilled up to 80 bytes more."""
        if not self.in_pairs:
            return self._in_groups(turn * self.blocks + block, self.tiles)
        half, unit = lax.rem(turn, 2), lax.div(turn, 2) * self.blocks + block
        if self.last:
            is_last = turn == 2 * self.full_rounds
            half = jnp.where(is_last, lax.rem(block, 2), half)
            unit = jnp.where(is_last, self._first_of_last + lax.div(block, 2), unit)
        of_head = jnp.minimum(unit, self._pairs - 1) if self.tiles % 2 else unit
        head, heavy = self._in_groups(of_head, self.tiles // 2)
        tile = jnp.where(half == 0, heavy, self.tiles - 1 - heavy)
        if self.tiles % 2:
            middle = 2 * (unit - self._pairs) + half
            head = jnp.where(middle < 0, head, middle)
            tile = jnp.where(middle < 0, tile, self.tiles // 2)
        return head, tile

    @property
    def imbalance(self) -> float:
        """The work of the fullest block, over that of all divided by `most_blocks`, in a persistent
        launch whose units weigh the same. An odd number of tiles makes it too large by half a unit
        at most."""
        assert self.most_blocks is not None
        if self.last:
            most = 2 * (self.full_rounds + self._heaviest_of_last)
        else:
            most = -(-self.units // self.most_blocks) * (2 if self.in_pairs else 1)
        return most * self.most_blocks / self.items

    @property
    def _heaviest_of_last(self) -> float:
        """The heaviest item of the last round, over a unit."""
        first, half = self._first_of_last, self.tiles // 2
        if first >= self._pairs:
            return 1 / 2  # a middle tile
        of_group = self.group * half
        own = min(self.group, self.batches * self.heads - first // of_group * self.group)
        in_last_group = (first // of_group + 1) * of_group >= self._pairs
        pair = first % of_group // own if in_last_group else 0
        return (self.tiles - pair) / (self.tiles + 1)

    def _in_groups(self, number: Any, of_head: int) -> tuple[Any, Any]:
        """Head, among those of all batch entries, and tile or unit of a head."""
        index = lax.div(number, jnp.int32(self.group * of_head))
        within = lax.rem(number, jnp.int32(self.group * of_head))
        own = jnp.minimum(self.group, self.batches * self.heads - index * self.group)
        return lax.rem(within, own) + index * self.group, lax.div(within, own)

    def _at(self, head: Any, tile: Any) -> Place:
        if self.causal and self.ascending:
            tile = self.tiles - 1 - tile
        return lax.div(head, self.heads), lax.rem(head, self.heads), tile * self.rows
