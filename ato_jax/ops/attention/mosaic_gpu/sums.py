"""Sums of 8 bits set aside: the tensor cores lose bits of them at every addition, so after some
steps they are added to others, which wait in out's place in shared memory."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32
from ato_jax.ops.attention.mosaic_gpu import frame
from ato_jax.ops.attention.mosaic_gpu.storage import Walk


def tiles_of(walk: Walk, mine: Any, acc: tuple[jax.Array, ...]) -> list[Any]:
    """Pairs of a tile in out's place, which has the sums of earlier steps until then, and of those
    of acc: of 64 columns where that is possible, since registers are few."""
    tiles = frame.outputs(walk.spec).parts_of(walk.own.out.at[mine.number])
    if len(tiles) == 1 and walk.spec.V % mosaic.HALF == 0:
        columns = range(0, walk.spec.V, mosaic.HALF)
        tiles = [tiles[0].at[:, pl.ds(first, mosaic.HALF)] for first in columns]
    return frame.alike(tiles, list(acc))


def set_aside(
    walk: Walk, mine: Any, c_m: jax.Array, acc: tuple[jax.Array, ...], base: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Adds acc to the sums of earlier steps, and starts anew."""
    mosaic.commit_to_warp()  # the loads below read what other threads of the warp stored
    factor = walk.softmax(mine.unit).lasts(base, c_m)
    for tile, total in tiles_of(walk, mine, acc):
        tile[...] = mosaic.rounded(with_earlier(tile, total, factor), tile.dtype)
    return tuple(mosaic.zeros(*total.shape) for total in acc), c_m


def with_earlier(tile: Any, total: jax.Array, factor: jax.Array) -> jax.Array:
    earlier = mosaic.load(tile).astype(F32)
    return total + earlier * mosaic.in_columns(factor, total.shape[1])
