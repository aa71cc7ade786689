"""How a run of rows is cut into tiles, and the loops over them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.scan import Edges
from ato_jax.ops.linear_attention.triton.sequences import state_blocks
from ato_jax.ops.linear_attention.triton.walk import Walk


class Tiling(NamedTuple):
    """A program's tile has `block` rows, of which a run has `in_run`; it takes `other` rows of the
    run's other side at a time, of which the run has `others`."""

    rows: int  # of a run
    block: int
    in_run: int
    other: int
    others: int

    def place(self, tile: Any) -> tuple[Any, Any]:
        """The first steps of the tile and of its run."""
        return tile * self.block, tile // self.in_run * self.rows


def tiling(walk: Walk, config: Config, wanted: int) -> Tiling:
    """The tiling of a pass that wants `wanted` rows per tile."""
    rows = walk.pieces.rows
    block = walk.pieces.block_within(wanted)
    other = rows if walk.both_ways else min(config.pair_block, block)
    return Tiling(rows, block, rows // block, other, rows // other)


def over_tiles(first: Any, last: Any, most: int, body: Any, sums: Any) -> Any:
    """The sums after the tiles from `first` up to `last`, of which there are `most` in a run."""
    return body(0, sums) if most == 1 else jax.lax.fori_loop(first, last, body, sums)


def add_up(parts: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def sides_of_queries(
    spec: LinearAttentionSpec, walk: Walk, tiling: Tiling, sides: list[Edges]
) -> list[list[pl.BlockSpec]]:
    """The state ahead of the run of a program's queries, and both ways the one behind it."""
    group = spec.H // spec.G

    def at_edge(behind: int) -> Any:
        def index(p: Any, h: Any, b: Any) -> tuple[Any, ...]:
            return b, h // group, walk.with_queries + p // tiling.in_run + behind

        return index

    return [state_blocks(spec, at_edge(n)) for n in range(len(sides))]


def sides_of_keys(
    spec: LinearAttentionSpec, tiling: Tiling, sides: list[Edges]
) -> list[list[pl.BlockSpec]]:
    """The cotangent behind the run of a program's keys, and both ways the one ahead of it."""

    def at_edge(behind: int) -> Any:
        return lambda p, g, b: (b, g, p // tiling.in_run + behind)

    return [state_blocks(spec, at_edge(1 - n)) for n in range(len(sides))]
