"""The loop over the steps of `channel_output.py`, and the masks of segments within a step.

A step is a chunk, or in a piece with steep chunks a turn: a range of rows of a chunk
(`channel.py`). All roles of the kernel run `each_step`, so that their steps agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import Item
from ato_jax.ops.linear_attention.mosaic_gpu import channel
from ato_jax.ops.linear_attention.mosaic_gpu.chunk_borders import Borders
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C


class Step(NamedTuple):
    """A step of an item. If no chunk of the piece is steep, each step is a chunk."""

    number: Any  # counts the steps of the item
    chunk: Any
    turn: channel.Turn | None = None  # None where the step is all of its chunk
    is_last: Any = True  # whether it is the last one of its chunk


def each_step(
    steep_ref: Any,
    turns_ref: Any,
    item: Item,
    head: Any,
    start: Callable[[bool], Any],
    do: Callable[[Step, Any], Any],
    in_float16: bool = False,
) -> Any:
    """Runs `do(step, carried)` for each step of an item, and returns the number of steps.

    `carried` is the result of `do` in the step before, and `start(in_turns)` in the first one.
    """

    def whole() -> Any:
        def one(chunk: Any, carried: Any) -> Any:
            return do(Step(chunk, chunk), carried)

        lax.fori_loop(0, item.chunks, one, start(False))
        return item.chunks

    def in_turns() -> Any:
        def of_chunk(chunk: Any, carried: Any) -> Any:
            before, inner = carried
            turns = turns_ref[item.batch, head, lax.div(item.first_row, C) + chunk]

            def one(number: Any, inner: Any) -> Any:
                turn = channel.turn_of(number, turns, in_float16)
                return do(Step(before + number, chunk, turn, number == turns - 1), inner)

            return before + turns, lax.fori_loop(0, turns, one, inner)

        return lax.fori_loop(0, item.chunks, of_chunk, (jnp.int32(0), start(True)))[0]

    return lax.cond(steep_ref[item.batch, head, item.piece] != 0, in_turns, whole)


class Masks(NamedTuple):
    """The masks of a step in which segments begin.

    Turns follow each other as chunks do: row i sees the state ahead of the turn if its segment
    begins ahead of the turn, and the rows of the last row's segment are added to the state.
    """

    borders: Borders
    turn: channel.Turn | None

    def reading(self, x: jax.Array) -> jax.Array:
        """x [C, columns], 0 in rows that do not see the state ahead of the step."""
        reads = self.borders.reads
        if self.turn is None:
            return mosaic.rows_within(x, None, reads)
        row = plgpu.broadcasted_iota(jnp.int32, (C,), dimension=0, layout=mosaic.OF_ROWS)
        begins = mosaic.load(self.borders.rows, mosaic.OF_ROWS, optimized=False)
        is_first = self.turn.first == 0
        begins = mosaic.in_columns(jnp.where(is_first, row, begins), x.shape[1])
        return jnp.where(begins < jnp.where(is_first, reads, self.turn.first), x, 0.0)

    @property
    def adds(self) -> Any:
        """The first row that is added to the state."""
        return self.borders.adds if self.turn is None else self.borders.rows[self.turn.last]

    def left(self, x: jax.Array) -> jax.Array:
        """x, a part of the state ahead of the step, or 0 if a border lies between that state and
        the step's last row."""
        if self.turn is None or self.borders.exist is None:
            return self.borders.left(x)
        first, last = self.turn.first, self.turn.last
        begins, end = self.borders.rows[last], self.borders.reads
        stays = jnp.where(first == 0, last < end, begins < first)
        return jnp.where(self.borders.exist & ~stays, 0.0, x)
