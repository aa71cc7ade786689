"""What `document_pair_output.py` and `document_pair_gradient.py` share: the pairs of up to 64 rows,
which belong to one document or more.

    a_ij  = phi(q_i) . phi(k_j) where i and j are of one document, else 0
    w_ij  = a_ij / max(sum_j a_ij, eps)        or scale * a_ij
    out_i = sum_j w_ij v_j

With the sums S and z a document of one row would cost as much as one of 64 rows, and each phase
would wait for the one before. Pairs need no sums, and are also faster for one document of up to 64
rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import OF_COLUMNS, OF_ROWS, load
from ato_jax.ops.linear_attention.mosaic_gpu.document_table import Item
from ato_jax.ops.linear_attention.mosaic_gpu.document_walk import Walk
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.scans.totals import LEAST_USUAL


class Slots(NamedTuple):
    """Where the tiles of one query head lie; forward there is no g."""

    k: Any
    v: Any
    q: Any
    g: Any = None


def slots_of(walk: Walk, item: Item, member: Any) -> Slots:
    count = len(walk.arrays_of_pairs)
    first = item.before + count * member
    return Slots(*(walk.own.rows.slot(first + number) for number in range(count)))


def let_go(walk: Walk, slots: Slots) -> None:
    """Behind the last read of these slots, which are loaded into from then on."""
    plgpu.commit_smem()
    for slot in slots:
        if slot is not None:
            walk.own.rows.consumed.arrive(slot)


def map_keys(walk: Walk, item: Item, slots: Slots) -> jax.Array:
    """Replaces this warpgroup's half of k by phi(k), 0 in all rows that do not count, as are those
    of v; returns k as it was loaded."""
    own, half, count = walk.own, mosaic.group(), item.keys.valid
    own.rows.produced.wait(slots.k)
    own_k, first = own.tiles.at[slots.k, half], walk.first_column(half)
    x = load(own_k)
    own_k[...] = mosaic.kept(walk.phi.keys(walk.phi.present(x, first), first=first), count)
    own.rows.produced.wait(slots.v)
    mosaic.keep_rows(own.tiles.at[slots.v, half], count)
    return x


def seen(walk: Walk, item: Item) -> jax.Array:
    """Whether a row and a column are of one document, [64, 64]. In the layout of columns a thread
    loads two neighbours at once. A slice that begins with an odd row is not aligned for that in
    global memory, so ids go by way of shared memory."""
    own = walk.own.ids.at[mosaic.group()]
    first = walk.ids.at[item.batch, pl.ds(item.queries.first, C)]
    of_rows = load(first, OF_ROWS, optimized=False)
    own[...] = of_rows
    plgpu.commit_smem()
    return mosaic.in_columns(of_rows, C) == mosaic.in_rows(load(own, OF_COLUMNS), C)


class Weights(NamedTuple):
    w: jax.Array  # [64, 64] float32
    visible: jax.Array  # [64, 64]
    counts: Any = None  # [64] whether a row's sum of a is above eps; None without a normaliser
    inverse: Any = None  # [64, 64] likewise: that of the sum, the same in each row


def weigh(walk: Walk, item: Item, a: jax.Array) -> Weights:
    """The weights of products a, of which those that are not seen count as 0."""
    spec, visible = walk.spec, seen(walk, item)
    a = jnp.where(visible, a, 0.0)
    if not spec.normalize:
        return Weights(a * spec.scale, visible)
    # eps, or the least number whose inverse is finite.
    total, least = jnp.sum(a, axis=1), max(spec.eps, LEAST_USUAL)
    inverse = mosaic.in_columns(1.0 / jnp.maximum(total, least), C)
    return Weights(a * inverse, visible, total > least, inverse)
