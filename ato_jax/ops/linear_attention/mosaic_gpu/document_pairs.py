"""Up to 64 rows, of one document or more, by the pairs of these rows:

    a_ij  = phi(q_i) . phi(k_j) where i and j are of one document, else 0
    w_ij  = a_ij / max(sum_j a_ij, eps)        or scale * a_ij
    out_i = sum_j w_ij v_j

By sums a document of one row costs as much as one of 64, and each phase waits for the one before.
Pairs need no sum first, and are also faster for one document of up to 64 rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import OF_COLUMNS, OF_ROWS, load
from ato_jax.ops.linear_attention.mosaic_gpu.document_table import Document
from ato_jax.ops.linear_attention.mosaic_gpu.document_walk import Walk
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.scans.totals import LEAST_USUAL
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def least_of(spec: LinearAttentionSpec) -> float:
    """eps, or the least number whose inverse is finite."""
    return max(spec.eps, LEAST_USUAL)


def seen(walk: Walk, document: Document) -> jax.Array:
    """Whether a row and a column are of one document, [64, 64]. In the layout of columns a thread
    loads two neighbours at once. A slice that begins with an odd row is not aligned for that in
    global memory, so ids go by way of shared memory."""
    own = walk.own.ids.at[mosaic.group()]
    first = walk.ids.at[document.batch, pl.ds(document.queries.first, C)]
    of_rows = load(first, OF_ROWS, optimized=False)
    own[...] = of_rows
    plgpu.commit_smem()
    return mosaic.in_columns(of_rows, C) == mosaic.in_rows(load(own, OF_COLUMNS), C)


def place_keys(walk: Walk, slot: Any, count: Any) -> jax.Array:
    """Replaces this warpgroup's half of k by phi(k), 0 from row `count` on; returns k as it was
    loaded."""
    own, first = walk.own.tiles.at[slot, mosaic.group()], walk.first_column(mosaic.group())
    x = load(own)
    own[...] = mosaic.kept(walk.phi.keys(walk.phi.present(x, first), first=first), count)
    return x
