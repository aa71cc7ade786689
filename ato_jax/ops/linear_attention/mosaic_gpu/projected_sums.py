"""FAVOR+: the sums over the rows of each piece; the kernel computes the features from the rows.

`projected_whole.py` launches it; `sums_walk.py` has its loops. Over keys,

    S = sum_j phi(k_j) v_j^T [F, V],  z = sum_j phi(k_j) [F]
    phi(x) = exp2(w x - offset(x))

or over queries, with inverse and e of each row,

    R = sum_i phi'_i g_i^T [F, V],  u = -sum_i e_i phi'_i [F]
    phi'_i = phi(q_i) inverse_i = exp2(w q_i + shift_i)

    memory    loads the parts of w, and chunks of x and y, which are k and v or q and g
    sums      each 64 rows of the sum: phi^T [64, C] in two parts in registers, all columns of y

                memory --weights, chunks--> sums

WGMMA truncates when it accumulates. So it accumulates one chunk alone, small products first, and
the chunks are added up in registers, in float32 with rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, Array, Buffer, Item, Ring, Role, load
from ato_jax.ops.linear_attention import random_features
from ato_jax.ops.linear_attention.mosaic_gpu import frame, sums_walk
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.sums_walk import COLUMNS, Sums
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

WORKERS = frame.F // HALF
SLOTS = 4
MEMORY = Role("memory", mosaic.MEMORY_REGISTERS)
SUMS = Role("sums", mosaic.workers_registers(WORKERS), WORKERS)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    w: Array  # [2, F / 64, 64, D] bfloat16
    x: Array  # [slots, C, D] bfloat16
    y: Array  # [slots, C, V] bfloat16
    rows: Array  # [slots, 2, C] float32: shift and e, of queries
    offsets: Array  # [F / 64, C] float32: a warpgroup's own, of keys
    total: Array  # [F / 64, 64, COLUMNS] float32: what is stored of R
    vector: Array  # [F / 64, 64] float32: what is stored of u
    weights: Ring  # of w
    chunks: Ring  # of x, y and rows


def storage_of(spec: LinearAttentionSpec, of_queries: bool) -> Storage:
    tiling = frame.tiling(spec)
    w = Buffer(tiling.of_parts(2, WORKERS, HALF, spec.D), copies=2 * WORKERS)
    x = Buffer(tiling.shared(SLOTS, C, spec.D))
    y = Buffer(tiling.shared(SLOTS, C, spec.V))
    rows = Buffer(plgpu.SMEM((SLOTS, 2, C), F32), copies=2) if of_queries else None
    return Storage(
        w=w,
        x=x,
        y=y,
        rows=rows,
        offsets=None if of_queries else Buffer(plgpu.SMEM((WORKERS, C), F32)),
        total=Buffer(tiling.shared(WORKERS, HALF, COLUMNS, dtype=F32)),
        vector=Buffer(plgpu.SMEM((WORKERS, HALF), F32)),
        weights=Ring.of(1, (w,), (SUMS,)),
        chunks=Ring.of(SLOTS, (x, y, rows), (SUMS,)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk(sums_walk.Walk):
    w: Any


def projected_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    w: jax.Array,
    x: jax.Array,
    y: jax.Array,
    of_rows: Sequence[jax.Array] = (),
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """[B, heads, P, F, V] and [B, heads, P, F], float32.

    Args:
      w: its parts, [B, 2, F, D] bfloat16.
      of_rows: shift and e, [B, heads, T up to a whole chunk] float32, of queries; else none.
      lengths: of the rows, [B] int32: rows behind them are left out.
    """
    parts = (MEMORY, memory), (SUMS, add_up)
    return sums_walk.sums_of_pieces(
        spec,
        deal,
        name,
        (Walk, storage_of(spec, bool(of_rows)), parts),
        (deal.pieces, frame.F, spec.V),
        {"w": w, "x": x, "y": y},
        of_rows,
        lengths,
    )


def memory(walk: Walk) -> None:
    own, tiling = walk.own, walk.tiling

    def load_weights(item: Item) -> None:
        slot, loaded = own.weights.slot(item.number), own.weights.produced.at
        own.weights.acquire(item.number)
        for part in range(2):
            for worker in range(WORKERS):
                source = walk.w.at[item.batch, part, pl.ds(worker * HALF, HALF)]  # [64, D]
                plgpu.copy_gmem_to_smem(source, own.w.at[part, worker], loaded[slot])

    def load_chunk(item: Item, chunk: Any) -> None:
        step, rows = item.before + chunk, item.rows(chunk)
        slot, loaded = own.chunks.slot(step), own.chunks.produced.at
        own.chunks.acquire(step)
        for ref, tiles in ((walk.x, own.x), (walk.y, own.y)):
            source = tiling.part(ref, item, rows, item.head)  # [C, columns]
            plgpu.copy_gmem_to_smem(source, tiles.at[slot], loaded[slot])
        walk.load_of_rows(item, rows, slot, loaded[slot])

    own.chunks.drain(walk.each_chunk(load_chunk, ahead=load_weights))
    own.weights.drain(walk.deal.own)


def add_up(walk: Walk) -> None:
    own, spec, worker = walk.own, walk.spec, mosaic.group()

    def shift_of(slot: Any) -> jax.Array:
        """[C], which goes by way of shared memory from one layout to the other."""
        if walk.of_rows:
            return load(own.rows.at[slot, 0], OF_COLUMNS)
        xs = (load(own.x.at[slot, :, pl.ds(n, HALF)]) for n in range(0, spec.D, HALF))
        own.offsets.at[worker][...] = random_features.offset_of(spec, xs)
        return -load(own.offsets.at[worker], OF_COLUMNS)

    def map_chunk(item: Item, chunk: Any, slot: Any) -> jax.Array:
        """phi^T [64, C], 0 in columns that do not count."""
        turned = own.x.at[slot].T  # [D, C]
        parts = [(own.w.at[part, worker], turned) for part in reversed(range(2))]
        (exponents,) = mosaic.multiply((mosaic.zeros(HALF, C), parts))
        phi = jnp.exp2(exponents + mosaic.in_rows(shift_of(slot), HALF))
        count = walk.count(item, chunk)
        if count is not None:
            phi = jnp.where(mosaic.hidden_position(1) < count, phi, 0.0)
        return phi

    def add_chunk(item: Item, chunk: Any, sums: Sums) -> Sums:
        total, vector = sums
        slot = own.chunks.slot(item.before + chunk)
        own.chunks.produced.wait(slot)
        phi = map_chunk(item, chunk, slot)
        weighted = phi
        if walk.of_rows:
            weighted = phi * mosaic.in_rows(-load(own.rows.at[slot, 1], OF_COLUMNS), HALF)
        vector = vector + jnp.sum(weighted, axis=1)
        y = own.y.at[slot]  # [C, V]
        products = [(part, y) for part in reversed(mosaic.in_two_parts(phi))]
        (found,) = mosaic.multiply((mosaic.zeros(HALF, spec.V), products))
        plgpu.commit_smem()  # reads finish before the next store there
        own.chunks.consumed.arrive(slot)
        return total + found, vector

    def sum_piece(item: Item) -> None:
        own.weights.produced.wait(own.weights.slot(item.number))
        sums = walk.add_up(item, add_chunk)
        own.weights.consumed.arrive(own.weights.slot(item.number))
        of_piece, rows = (item.batch, item.head, item.piece), pl.ds(worker * HALF, HALF)
        walk.leave(worker, of_piece, rows, sums)

    walk.each_sum(sum_piece)
