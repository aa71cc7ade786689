"""The schedule: which tiles of queries each block takes, and in which order.

An item is a tile of one head. Heads that share the L2 cache form a group; all items of a group come
before those of the next. Within a group tiles that see many keys come first, so that at the end of
the launch there is little left to wait for:

    for group: for tile, the last one first where causal: for head of the group

Blocks start in this order. Where the launch is persistent, each round deals one item to each of n
blocks, in every other round from the last block to the first, so that no block has the heaviest
tile of each round. Persistent backward launches have the same order from `rounds.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.attention.eight_bits import reads_eight_bits
from ato_jax.ops.attention.mosaic_gpu import frame
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.spec import AttentionSpec, Ranges

# The size of an element of 16 bits.
ITEM_BYTES = 2


class Item(NamedTuple):
    """A tile of rows of one head, from `first_row` on: queries in the forward kernel, own rows in a
    backward one. `turn` counts the items of the block, `before` the steps of its earlier items.
    Step t takes block `seen.end - 1 - t` of the other side."""

    turn: Any
    batch: Any
    head: Any
    first_row: Any
    seen: Ranges
    before: Any

    @property
    def steps(self) -> Any:
        return self.seen.end - self.seen.first

    def block(self, step: Any) -> Any:
        return self.seen.end - 1 - step


@dataclasses.dataclass(frozen=True)
class Schedule:
    """`heads` in groups of `group`, each with `tiles` of queries."""

    spec: AttentionSpec
    config: Config

    @property
    def tiles(self) -> int:
        return int(pl.cdiv(self.spec.T, self.config.tile))

    @property
    def heads(self) -> int:
        return self.spec.B * self.spec.H

    @property
    def items(self) -> int:
        return self.tiles * self.heads

    @property
    def group(self) -> int:
        """Query heads whose keys and values fit the cache together."""
        spec = self.spec
        of_keys = spec.S * (spec.D + spec.V) * (1 if reads_eight_bits(spec) else ITEM_BYTES)
        return min(self.heads, max(1, frame.CACHE_BYTES // of_keys) * (spec.H // spec.G))

    @property
    def persistent(self) -> bool:
        return self.config.persistent and self.items > self.config.multiprocessors

    @property
    def blocks(self) -> int:
        return self.config.multiprocessors if self.persistent else self.items

    def each(
        self, seen: Callable[[Any, Any], Ranges], do: Callable[[Item], None]
    ) -> tuple[Any, Any]:
        """Runs `do` for each item of this block; returns how many items and steps these were.
        `seen(batch, first_row)` are the blocks of keys that a tile goes through."""
        block = lax.axis_index("block")

        def one(turn: Any, before: Any) -> Any:
            batch, head, first_row = self.place(self.number(turn, block))
            item = Item(turn, batch, head, first_row, seen(batch, first_row), before)
            do(item)
            return before + item.steps

        if not self.persistent:
            return 1, one(jnp.int32(0), jnp.int32(0))
        rounds = self.items // self.blocks
        own = rounds + (self.number(jnp.int32(rounds), block) < self.items).astype(jnp.int32)
        return own, lax.fori_loop(0, own, one, jnp.int32(0))

    def number(self, turn: Any, block: Any) -> Any:
        """The item that a block takes at its turn; none where it is too large."""
        across = jnp.where(lax.rem(turn, 2) == 0, block, self.blocks - 1 - block)
        return turn * self.blocks + across

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """Batch, head and first row of an item."""
        head, tile = in_groups(number, self.heads, self.tiles, self.group)
        if self.spec.right is not None:
            tile = self.tiles - 1 - tile
        batch, head = lax.div(head, self.spec.H), lax.rem(head, self.spec.H)
        return batch, head, tile * self.config.tile


def in_groups(number: Any, heads: int, tiles: int, group: int) -> tuple[Any, Any]:
    """Head and tile of an item: all tiles of a group of heads come before those of the next, and
    within a group all heads of a tile."""
    index = lax.div(number, jnp.int32(group * tiles))
    within = lax.rem(number, jnp.int32(group * tiles))
    own = jnp.minimum(group, heads - index * group)
    return lax.rem(within, own) + index * group, lax.div(within, own)
