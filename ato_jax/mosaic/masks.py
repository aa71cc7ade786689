"""Row masks: they set rows of a chunk to 0, behind a sequence's end or outside a segment.

A masked key gets features of 0, so that it adds nothing to pairs and sums. A masked row of the
other factor of a product is set to 0 in shared memory, too, since 0 times NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.mosaic.tiles import OF_ROWS, ROWS, TILE, in_columns, load


def kept(x: jax.Array, count: Any) -> jax.Array:
    """x [64, columns] in its first `count` rows, else 0; all of x where count is None."""
    if count is None:
        return x
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, dimension=0, layout=TILE)
    return jnp.where(row < count, x, jnp.zeros((), x.dtype))


def rows_within(x: jax.Array, first: Any, end: Any) -> jax.Array:
    """x [64, columns] from its row `first` on and ahead of `end`, else 0; either may be None. Two
    numbers of rows a thread are compared, of which `kept` compares one for each element."""
    if first is None and end is None:
        return x
    vector = plgpu.broadcasted_iota(jnp.int32, (ROWS,), dimension=0, layout=OF_ROWS)
    row, nothing = in_columns(vector, x.shape[1]), jnp.zeros((), x.dtype)
    if first is not None:
        x = jnp.where(row >= first, x, nothing)
    return x if end is None else jnp.where(row < end, x, nothing)


def keep_rows(ref: Any, count: Any) -> None:
    """Applies `kept` to a tile in shared memory. The caller has to `commit_smem` afterwards."""
    if count is None:
        return

    @pl.when(count < ROWS)
    def _() -> None:
        ref[...] = kept(load(ref), count)


def keep_rows_between(ref: Any, first: Any, end: Any) -> None:
    """As `keep_rows`, of the rows from `first` on and ahead of `end`."""

    @pl.when((first > 0) | (end < ROWS))
    def _() -> None:
        ref[...] = rows_within(load(ref), first, end)
