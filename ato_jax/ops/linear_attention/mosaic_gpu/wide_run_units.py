"""The loop over units that all three roles of `wide_runs.py` share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.mosaic import Item
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_storage import UNIT, UNITS, Runs


def _do_unit(do: Callable[[Runs, Item], None], runs: Runs, item: Item) -> None:
    do(runs.in_unit(item), item)


def each(passes: Sequence[Runs], do: Callable[[Runs, Item], None]) -> Any:
    """Runs `do` for each unit of each pass, and returns the number of tiles in all. In these items
    `chunks` and `before` count tiles of the ring. The passes of a unit, and the units of a run,
    follow one another, so that blocks that run at once read the same states and rows."""
    count, deal = len(passes), passes[0].deal
    heads = deal.heads // count

    def cut(item: Item) -> Item:
        """The item at this place of that order."""
        of_piece = item.batch * deal.heads + item.head
        index = item.piece * (deal.B * deal.heads) + of_piece
        run = lax.div(index, UNITS * deal.B * deal.heads)
        within = index - run * (UNITS * deal.B * deal.heads)
        units = jnp.minimum(UNITS, deal.pieces - run * UNITS)
        rest, number = lax.div(within, count), lax.rem(within, count)
        piece, head = run * UNITS + lax.rem(rest, units), lax.div(rest, units)
        batch, head = lax.div(head, heads), lax.rem(head, heads)
        first_row = piece * (UNIT * C)
        own = item._replace(batch=batch, head=head, piece=piece, first_row=first_row)
        tiles, *others = (runs.tiles_of(own) for runs in passes)
        for other, of_other in enumerate(others):
            tiles = jnp.where(number == other + 1, of_other, tiles)
        return own._replace(head=head * count + number, chunks=tiles)

    def one(item: Item) -> None:
        if count == 1:
            _do_unit(do, passes[0], item)
            return
        own = item._replace(head=lax.div(item.head, count))
        for number, runs in enumerate(passes):
            is_own = lax.rem(item.head, count) == number
            pl.when(is_own)(functools.partial(_do_unit, do, runs, own))

    return deal.each(one, cut=cut)
