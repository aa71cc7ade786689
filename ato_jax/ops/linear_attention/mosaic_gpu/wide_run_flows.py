"""Sums that OWN leaves of each row for the gradient of a decay per head (`scans/run_flows.py`).

With M[i, j] what the pair of query i and key j adds to the loss's derivative by its own exponent,

    M[i, j] = phi'(q_i) . phi(k_j) (g_i . v_j - e_i) times what the decay leaves between them

    DQ    flows_i  = sum of M[i, j] over the keys ahead of i's run
    DV    flows_j  = sum of M[i, j] over the queries behind j's run
          within_j = sum of (i - j) M[i, j] over those of j's run

The sums over other runs come from the product with the state, before any chunk is added to it: its
rows are multiplied by phi(q_i), whose tile the ring brings once more, or by v_j. DV keeps v of the
own rows in shared memory, and multiplies it by g of each chunk for the pairs of the run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_numbers import (
    Found,
    Own,
    Powers,
    block_in,
    leave,
    of_own,
    vector_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_storage import (
    UNIT,
    Runs,
    columns_of,
    rows_of,
)

# The sums over a row's features of phi(q) G and, with a normaliser, of phi(q) z, where G and z are
# of the keys ahead of the run, [64] each.
Ahead = tuple[Any, Any]


def read_ahead(runs: Runs, item: Item, found: Found) -> Ahead:
    """`found` is the product of g with the state. Lets go of the tiles of q."""
    for other in range(UNIT):
        slot = runs.wait(runs.tile_of_first_reader(item, other))
        pl.when(other != mosaic.group())(functools.partial(runs.let_go, slot))
    slot = runs.own.ring.slot(runs.tile_of_first_reader(item, mosaic.group()))
    of_g: Any = 0.0
    of_z: Any = 0.0
    for block in range(runs.blocks):
        q = load(runs.block_in(runs.tiles.at[slot], block))
        if runs.arrays.powers is not None:
            q = runs.phi.present(q, block * HALF)
        phi = runs.phi.unrounded(q, block * HALF)
        of_g = of_g + jnp.sum(phi * block_in(found, block), axis=1)
        if runs.normalizes:
            of_run = item.batch, runs.kv_head(item), runs.first_of_run(item), columns_of(block)
            z = load(runs.arrays.vectors.at[of_run], OF_COLUMNS, optimized=False)
            of_z = of_z + jnp.sum(phi * mosaic.in_rows(z, C), axis=1)
    plgpu.commit_smem()
    runs.let_go(slot)
    if runs.normalizes:
        of_z = of_z * of_own(runs, item, runs.arrays.reads)
    return of_g, of_z


def leave_flows_of_queries(
    runs: Runs, item: Item, ahead: Ahead, inverse: Any, e: Any, found: Any
) -> None:
    """`found` undoes the scale of G in float16."""
    of_g, of_z = ahead
    of_g = of_g if found is None else of_g * found
    sums = of_g if e is None else of_g - e * of_z
    leave(runs, item, runs.left.flows, sums * inverse)


def leave_flows_of_keys(runs: Runs, item: Item, own: Powers | None, found: Found) -> None:
    """From `found`, the product of phi(k) with the state."""
    runs.own.held_loaded.wait(mosaic.slot_of(mosaic.group(), UNIT))
    x, v = runs.x.at[mosaic.group()], runs.held.at[mosaic.group()]
    of_v: Any = 0.0
    of_u: Any = 0.0
    for block in range(runs.blocks):
        of_v = of_v + jnp.sum(load(runs.block_in(v, block)) * block_in(found, block), axis=1)
        phi = load(runs.block_in(x, block)).astype(F32)
        of_u = of_u + jnp.sum(phi * vector_of(runs, item, block, 0), axis=1)
    of_u = of_u * of_own(runs, item, runs.arrays.reads)
    if own is not None:
        of_u, of_v = of_u * (own.pairs * own.found), of_v * own.found
    leave(runs, item, runs.left.flows, of_v + of_u)


def within_chunk(runs: Runs, item: Item, mine: Own, chunk: Any, w: jax.Array, g: Any) -> jax.Array:
    """What queries of a chunk of the run add to `within`, [64].

    Args:
      w: phi'(q_i) . phi(k_j) times what the decay leaves, [64, 64]; in float16 with the powers of
        the product with the state.
      g: the chunk's tile.
    """
    start = mosaic.zeros(C, C)
    if runs.spec.normalize:
        source = runs.arrays.e.at[item.batch, item.head, rows_of(chunk)]
        start = start - mosaic.in_rows(load(source, OF_COLUMNS, optimized=False), C)
    # Else its addresses would be kept in registers through the loop over chunks.
    held = runs.held.at[mosaic.plus_zero(mosaic.group(), chunk)]
    (of_pairs,) = multiply((start, runs.factors(held, g)))
    rows, columns = (
        plgpu.broadcasted_iota(jnp.int32, (C,), dimension=0, layout=layout)
        for layout in (OF_ROWS, OF_COLUMNS)
    )
    columns = columns + (chunk - mine.chunk) * C
    apart = mosaic.in_rows(columns.astype(F32), C) - mosaic.in_columns(rows.astype(F32), C)
    return jnp.sum(w * of_pairs * apart, axis=1)


def leave_within(runs: Runs, item: Item, own: Powers | None, found: jax.Array) -> None:
    leave(runs, item, runs.left.within, found if own is None else found * own.found)
