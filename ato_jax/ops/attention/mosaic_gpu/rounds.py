"""Rounds: which items each block of a persistent backward launch takes.

Items are numbered with the heaviest ones first. Each round deals one item to each of n blocks, in
every other round from the last block to the first, so that no block has the heaviest item of each:

    round 0    block 0 takes item 0, .., block n - 1 takes item n - 1
    round 1    block n - 1 takes item n, .., block 0 takes item 2 n - 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


def each(
    items: int, blocks: int, block: Any, do: Callable[[Any, Any, Any], Any], start: Any
) -> tuple[Any, Any]:
    """Runs `carried = do(turn, number, carried)` for each item that a block takes; returns how many
    these were, and the last `carried`."""

    def one(turn: Any, carried: Any) -> Any:
        return do(turn, number_of(turn, blocks, block), carried)

    rounds = jnp.int32(items // blocks)
    takes_a_last_one = number_of(rounds, blocks, block) < items
    count = rounds + takes_a_last_one.astype(jnp.int32)
    return count, lax.fori_loop(0, count, one, start)


def number_of(turn: Any, blocks: int, block: Any) -> Any:
    """The item that a block takes at its turn; none where it is too large."""
    return turn * blocks + jnp.where(lax.rem(turn, 2) == 0, block, blocks - 1 - block)
