"""Row masks: the rows of a chunk that count, where a sequence ends within it or ahead of it.

A masked key has features of 0, so that pairs and sums do not have it. A masked row of another
factor of a product is set to 0 in shared memory: a feature of 0 does not cancel NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.mosaic.tiles import ROWS, TILE, load


def kept(x: jax.Array, count: Any) -> jax.Array:
    """x [64, columns] in its first `count` rows, else 0; all of x where count is None."""
    if count is None:
        return x
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, dimension=0, layout=TILE)
    return jnp.where(row < count, x, jnp.zeros((), x.dtype))


def keep_rows(ref: Any, count: Any) -> None:
    """Applies `kept` to a tile in shared memory. The caller has to `commit_smem` afterwards."""
    if count is None:
        return

    @pl.when(count < ROWS)
    def _() -> None:
        ref[...] = kept(load(ref), count)
