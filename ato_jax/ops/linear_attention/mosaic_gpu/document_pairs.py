"""A chunk of 64 rows of one document or more by the pairs of its rows:

    a_ij  = phi(q_i) . phi(k_j) where i and j are of one document, else 0
    w_ij  = a_ij / max(sum_j a_ij, eps)        or scale * a_ij
    out_i = sum_j w_ij v_j

Sums over a document's keys would take a chunk each for documents of a row. Pairs have no phases
that wait for a sum, and a document of up to 64 rows takes less time by them, too.
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
    """Whether a chunk's rows and columns are of one document, [64, 64]. A thread loads two columns
    at once, and what begins with any row is not aligned for that in global memory."""
    own = walk.own.ids.at[mosaic.group()]
    first = walk.ids.at[document.batch, pl.ds(document.queries.first, C)]
    of_rows = load(first, OF_ROWS, optimized=False)
    own[...] = of_rows
    plgpu.commit_smem()
    return mosaic.in_columns(of_rows, C) == mosaic.in_rows(load(own, OF_COLUMNS), C)


def place_keys(walk: Walk, slot: Any, count: Any) -> jax.Array:
    """phi(k) of half a tile, 0 behind `count` rows, in k's place; returns k."""
    own, first = walk.own.tiles.at[slot, mosaic.group()], walk.first_column(mosaic.group())
    x = load(own)
    own[...] = mosaic.kept(walk.phi.keys(walk.phi.present(x, first), first=first), count)
    return x
