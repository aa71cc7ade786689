"""The schedule of the forward kernel: a block takes one tile of queries of a head or, where the
launch is persistent, several, one after the other. `rounds.py` says which."""

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
from ato_jax.ops.attention.mosaic_gpu.rounds import Place, Rounds
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
    def group(self) -> int:
        """Query heads whose keys and values fit the cache together."""
        spec = self.spec
        of_keys = spec.S * (spec.D + spec.V) * (1 if reads_eight_bits(spec) else ITEM_BYTES)
        return min(self.heads, max(1, frame.CACHE_BYTES // of_keys) * (spec.H // spec.G))

    @property
    def rounds(self) -> Rounds:
        spec, config, causal = self.spec, self.config, self.spec.right is not None
        most = config.multiprocessors if config.persistent else None
        return Rounds(spec.B, spec.H, self.tiles, config.tile, self.group, causal, True, most)

    @property
    def blocks(self) -> int:
        return self.rounds.blocks

    def each(
        self, seen: Callable[[Any, Any], Ranges], do: Callable[[Item], None]
    ) -> tuple[Any, Any]:
        """Runs `do` for each item of this block; returns how many items and steps these were.
        `seen(batch, first_row)` are the blocks of keys that a tile goes through."""
        block = lax.axis_index("block")

        def one(turn: Any, place: Place, before: Any) -> Any:
            batch, head, first_row = place
            item = Item(turn, batch, head, first_row, seen(batch, first_row), before)
            do(item)
            return before + item.steps

        if self.rounds.persistent:
            return self.rounds.each(block, one, jnp.int32(0))
        return 1, one(jnp.int32(0), self.rounds.place(block), jnp.int32(0))
