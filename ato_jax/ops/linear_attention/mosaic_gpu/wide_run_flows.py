"""Sums over pairs for the gradient of a decay: one number for each row, [B, H, T] float32 each.

The role OWN of `wide_runs.py` computes them in DQ and DV, where the decay is per head, or per step
and rows see both sides. `scans/run_flows.py` computes the decay's gradient from them. Let M[i, j]
be the derivative of the loss by the exponent of the pair's decay:

    M[i, j] = phi'(q_i) . phi(k_j) (g_i . v_j - e_i) times the decay between i and j

    DQ    flows_i         = sum of M[i, j] over the keys ahead of i's run
          flows_beyond_i  = sum of M[i, j] over the keys behind it, where rows see both sides
    DV    flows_j         = sum of M[i, j] over the queries behind j's run
          flows_beyond_j  = sum of M[i, j] over those ahead of it, where rows see both sides
          within_j        = sum of |i - j| M[i, j] over the queries of j's run; with a decay per
                            step, of the sign of i - j in place of |i - j|
          seen_within_i   = with a decay per step, the sum of the sign of i - j times M[i, j] over
                            the keys of each chunk of i's run

The sums over other runs follow from the product x T, before the pairs of the run are added to it:
row i of g S^T is multiplied by phi(q_i), and row j of phi(k) R by v_j. For this DQ keeps q of the
own rows in shared memory where rows see both sides, else the ring brings q twice. DV keeps v, and
multiplies it by g of each chunk for the pairs of the run. `within` and `seen_within` contain each
pair once each, computed from the same rounded factors, so the two cancel in running sums.
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

# Two numbers for each own row, [64] each, from the state on one side of the run. In DQ phi(q) . G
# and, with a normaliser, phi(q) . z, where G = g S^T and z are of the keys on that side. In DV
# v . (R^T phi(k)) and phi(k) . u, where R and u are of the queries on that side.
OfSide = tuple[Any, Any]


def read_by_queries(runs: Runs, item: Item, found: Found) -> OfSide:
    """The numbers of DQ where rows see one side. `found` is g S^T. Releases the tiles of q."""
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
    """Adds the terms of 64 columns of phi(q) to `sums`. `read` has these columns of g S^T."""
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
    """Adds the terms of 64 columns to the sums of each side; `reads` are x T of each side."""
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
    """Writes the flows of DQ for each side. `found` undoes the scale of G in float16."""
    left = runs.left.flows, runs.left.flows_beyond
    for ref, (of_g, of_z), reads in zip(left, sides, runs.reads, strict=False):
        of_g = of_g if found is None else of_g * found
        if e is None:
            sums = of_g
        else:
            # With one side `of_z` contains its factor already.
            sums = of_g - e * (of_z * of_own(runs, item, reads) if runs.both_ways else of_z)
        leave(runs, item, ref, sums * inverse)


def read_by_keys(runs: Runs, item: Item, found: Found) -> OfSide:
    """The numbers of DV where rows see one side. `found` is phi(k) R."""
    runs.own.held_loaded.wait(mosaic.slot_of(mosaic.group(), UNIT))
    sums: OfSide = 0.0, 0.0
    for block in range(runs.blocks):
        v = runs.block_in(runs.held_tiles.at[mosaic.group()], block)
        sums = _with_values(runs, item, block, sums, v, block_in(found, block), 0)
    return sums


def _with_values(
    runs: Runs, item: Item, block: int, sums: OfSide, v: Any, read: jax.Array, side: int
) -> OfSide:
    """Adds the terms of 64 columns of v and phi(k) to `sums`. `read` has these columns of
    phi(k) R."""
    of_v, of_u = sums
    of_v = of_v + jnp.sum(load(v) * read, axis=1)
    phi = load(runs.block_in(runs.x.at[mosaic.group()], block)).astype(F32)
    return of_v, of_u + jnp.sum(phi * vector_of(runs, item, block, side), axis=1)


def leave_flows_of_keys(
    runs: Runs, item: Item, own: Powers | None, sides: Sequence[OfSide]
) -> None:
    """Writes the flows of DV for each side."""
    left = runs.left.flows, runs.left.flows_beyond
    for ref, (of_v, of_u), reads in zip(left, sides, runs.reads, strict=False):
        of_u = of_u * of_own(runs, item, reads)
        if own is not None:
            of_u, of_v = of_u * (own.pairs * own.found), of_v * own.found
        leave(runs, item, ref, of_v + of_u)


def within_chunk(runs: Runs, item: Item, mine: Own, chunk: Any, w: jax.Array, g: Any) -> jax.Array:
    """The terms of `within` from the queries of a chunk of the run, for the own keys, [64].

    Args:
      chunk: the chunk's number in the sequence.
      w: phi'(q_i) . phi(k_j) times the decay between them, [64, 64], keys as rows; in float16
        scaled as found is.
      g: the chunk's tile of g.
    """
    start = mosaic.zeros(C, C)
    if runs.spec.normalize:
        source = runs.arrays.e.at[item.batch, item.head, rows_of(chunk)]
        start = start - mosaic.in_rows(load(source, OF_COLUMNS, optimized=False), C)
    # The 0 that no compiler knows keeps the tile's addresses out of registers between chunks.
    held = runs.held_tiles.at[mosaic.plus_zero(mosaic.group(), chunk)]
    (of_pairs,) = multiply((start, runs.factors(held, g)))
    return jnp.sum(w * of_pairs * _apart(runs, mine.chunk, chunk), axis=1)


def leave_seen_within(runs: Runs, item: Item, mine: Own, chunk: Any, w: jax.Array, g: Any) -> None:
    """Writes `seen_within` for the queries of a chunk of the run, summed over the own keys. `w` is
    that of `within_chunk`, with queries as rows."""
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
    """The factor of M[i, j], [64, 64]: the distance from the row of the sequence that a row of the
    tile stands for to the one that a column stands for. Where rows see both sides it is the
    absolute distance, and with a decay per step its sign. The arguments are chunks of the two."""
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
