"""Sums that OWN leaves of each row for the gradient of a decay (`scans/run_flows.py`), where it is
per head or rows see both sides.

With M[i, j] what the pair of query i and key j adds to the loss's derivative by its own exponent,

    M[i, j] = phi'(q_i) . phi(k_j) (g_i . v_j - e_i) times what the decay leaves between them

    DQ    flows_i         = sum of M[i, j] over the keys ahead of i's run
          flows_beyond_i  = sum of M[i, j] over the keys behind it, where rows see both sides
    DV    flows_j         = sum of M[i, j] over the queries behind j's run
          flows_beyond_j  = sum of M[i, j] over those ahead of it, where rows see both sides
          within_j        = sum of |i - j| M[i, j] over the queries of j's run; with a decay per
                            step, of the sign of i - j in place of |i - j|
          seen_within_i   = with a decay per step, the sum of the sign of i - j times M[i, j] over
                            the keys of each chunk of i's run

The sums over other runs come from the product with the state, before any chunk is added to it: its
rows are multiplied by phi(q_i), or by v_j. Where rows see both sides DQ keeps q of the own rows in
shared memory, else the ring brings it once more. DV keeps v of the own rows there, and multiplies
it by g of each chunk for the pairs of the run. Each pair is made once in `within` and once in
`seen_within`, from the same rounded factors, so that the two cancel in running sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_arrays import Pass
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
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN

# What rows read of one side, [64] each: of DQ the sums over a row's features of phi(q) G and, with
# a normaliser, of phi(q) z, where G and z are of the keys on that side of the run; of DV the sums
# of v times the values, and of phi(k) u, where both are of the queries there.
OfSide = tuple[Any, Any]


def read_by_queries(runs: Runs, item: Item, found: Found) -> OfSide:
    """`found` is the product of g with the state. Lets go of the tiles of q."""
    for other in range(UNIT):
        slot = runs.wait(runs.tile_of_first_reader(item, other))
        pl.when(other != mosaic.group())(functools.partial(runs.let_go, slot))
    slot = runs.own.ring.slot(runs.tile_of_first_reader(item, mosaic.group()))
    sums: OfSide = 0.0, 0.0
    for block in range(runs.blocks):
        q = runs.block_in(runs.tiles.at[slot], block)
        sums = _with_features(runs, item, block, sums, q, block_in(found, block), 0)
    plgpu.commit_smem()
    runs.let_go(slot)
    of_g, of_z = sums
    if runs.normalizes:
        of_z = of_z * of_own(runs, item, runs.arrays.reads)
    return of_g, of_z


def _with_features(
    runs: Runs, item: Item, block: int, sums: OfSide, q: Any, read: jax.Array, side: int
) -> OfSide:
    """`sums` and what 64 columns of phi(q) add. `read`: those of the product with the state."""
    of_g, of_z = sums
    q = load(q)
    if runs.arrays.powers is not None:
        q = runs.phi.present(q, block * HALF)
    phi = runs.phi.unrounded(q, block * HALF)
    of_g = of_g + jnp.sum(phi * read, axis=1)
    if runs.normalizes:
        chunk = runs.last_of_run(item) if side else runs.first_of_run(item)
        of_run = item.batch, runs.kv_head(item), chunk, columns_of(block)
        z = load(runs.vectors[side].at[of_run], OF_COLUMNS, optimized=False)
        of_z = of_z + jnp.sum(phi * mosaic.in_rows(z, C), axis=1)
    return of_g, of_z


def with_block(
    runs: Runs, item: Item, block: int, sums: Sequence[OfSide], reads: Sequence[jax.Array]
) -> list[OfSide]:
    """For each side, `sums` and what 64 columns of the product with its state add."""
    held = runs.block_in(runs.held_tiles.at[mosaic.group()], block)
    found = []
    for side, (own, read) in enumerate(zip(sums, reads, strict=True)):
        if runs.of is Pass.DQ:
            found.append(_with_features(runs, item, block, own, held, read, side))
        else:
            found.append(_with_values(runs, item, block, own, held, read, side))
    return found


def leave_flows_of_queries(
    runs: Runs, item: Item, sides: Sequence[OfSide], inverse: Any, e: Any, found: Any
) -> None:
    """`found` undoes the scale of G in float16."""
    left = runs.left.flows, runs.left.flows_beyond
    for ref, (of_g, of_z), reads in zip(left, sides, runs.reads, strict=False):
        of_g = of_g if found is None else of_g * found
        if e is None:
            sums = of_g
        else:
            # With one side its factor is in `of_z` already.
            sums = of_g - e * (of_z * of_own(runs, item, reads) if runs.both_ways else of_z)
        leave(runs, item, ref, sums * inverse)


def read_by_keys(runs: Runs, item: Item, found: Found) -> OfSide:
    """`found` is the product of phi(k) with the state."""
    runs.own.held_loaded.wait(mosaic.slot_of(mosaic.group(), UNIT))
    sums: OfSide = 0.0, 0.0
    for block in range(runs.blocks):
        v = runs.block_in(runs.held_tiles.at[mosaic.group()], block)
        sums = _with_values(runs, item, block, sums, v, block_in(found, block), 0)
    return sums


def _with_values(
    runs: Runs, item: Item, block: int, sums: OfSide, v: Any, read: jax.Array, side: int
) -> OfSide:
    """`sums` and what 64 columns of v and phi(k) add. `read`: those of the product with the
    state."""
    of_v, of_u = sums
    of_v = of_v + jnp.sum(load(v) * read, axis=1)
    phi = load(runs.block_in(runs.x.at[mosaic.group()], block)).astype(F32)
    return of_v, of_u + jnp.sum(phi * vector_of(runs, item, block, side), axis=1)


def leave_flows_of_keys(
    runs: Runs, item: Item, own: Powers | None, sides: Sequence[OfSide]
) -> None:
    left = runs.left.flows, runs.left.flows_beyond
    for ref, (of_v, of_u), reads in zip(left, sides, runs.reads, strict=False):
        of_u = of_u * of_own(runs, item, reads)
        if own is not None:
            of_u, of_v = of_u * (own.pairs * own.found), of_v * own.found
        leave(runs, item, ref, of_v + of_u)


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
    held = runs.held_tiles.at[mosaic.plus_zero(mosaic.group(), chunk)]
    (of_pairs,) = multiply((start, runs.factors(held, g)))
    return jnp.sum(w * of_pairs * _apart(runs, mine.chunk, chunk), axis=1)


def leave_seen_within(runs: Runs, item: Item, mine: Own, chunk: Any, w: jax.Array, g: Any) -> None:
    """Writes `seen_within` of the queries of a chunk of the run, for the own keys. `w` is as
    `within_chunk` has it, with queries as rows."""
    start = mosaic.zeros(C, C)
    if runs.spec.normalize:
        source = runs.arrays.e.at[item.batch, item.head, rows_of(chunk)]
        start = start - mosaic.in_columns(load(source, OF_ROWS, optimized=False), C)
    held = runs.held_tiles.at[mosaic.plus_zero(mosaic.group(), chunk)]
    (of_pairs,) = multiply((start, runs.factors(g, held)))
    sums = -jnp.sum(w * of_pairs * _apart(runs, chunk, mine.chunk), axis=1)
    sums = sums if mine.powers is None else sums * mine.powers.found
    place = lax.rem(mine.chunk, CHUNKS_OF_RUN)
    runs.left.seen_within.at[item.batch, item.head, place, rows_of(chunk)][...] = sums


def _apart(runs: Runs, of_rows: Any, of_columns: Any) -> jax.Array:
    """How far each column's row of the sequence is behind each row's, [64, 64], given the chunks of
    both; where rows see both sides without a sign, or with a decay per step the sign alone."""
    rows, columns = (
        plgpu.broadcasted_iota(jnp.int32, (C,), dimension=0, layout=layout)
        for layout in (OF_ROWS, OF_COLUMNS)
    )
    columns = columns + (of_columns - of_rows) * C
    apart = mosaic.in_rows(columns.astype(F32), C) - mosaic.in_columns(rows.astype(F32), C)
    if runs.spec.decay == "step":
        return jnp.clip(apart, -1.0, 1.0)
    return jnp.abs(apart) if runs.both_ways else apart


def leave_within(runs: Runs, item: Item, own: Powers | None, found: jax.Array) -> None:
    leave(runs, item, runs.left.within, found if own is None else found * own.found)
