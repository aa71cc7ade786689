"""The sums over the rows of each piece in float32, by products of bfloat16 parts.

`float32.py` and `float32_causal.py` launch it; `sums_walk.py` has its loops. Over keys, or over
queries with inverse and e of each row:

    S = sum_j phi(k_j) v_j^T [F, V],  z = sum_j phi(k_j) [F]
    R = sum_i phi'_i g_i^T [F, V],  u = -sum_i e_i phi'_i [F],  phi'_i = phi(q_i) inverse_i

    memory    loads chunks of x and y, which are k and v or q and g
    split     stores the parts of y in shared memory
    sums      each warpgroup has 64 rows of the sum: phi(x)^T [64, C] in parts in registers, times
              all columns of y

                memory --features--> sums
                memory --values----> split --parts--> sums

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
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, sums_walk
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.sums_walk import COLUMNS, Sums, Walk
from ato_jax.ops.linear_attention.random_features import OWN_SLOPE
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

MEMORY, SPLIT = Role("memory", mosaic.MEMORY_REGISTERS), Role("split", 104)
PARTS_SLOTS = 2


def parts_of(spec: LinearAttentionSpec) -> int:
    """How many bfloat16 parts each factor has: 24 bits of each number, or 16, which is 5 more than
    TF32 has."""
    return 3 if spec.precision == "exact" else 2


def parts_of_values(spec: LinearAttentionSpec) -> int:
    """How many parts v and g have: those beside FAVOR+'s features are of bfloat16."""
    return 1 if spec.feature_map == OWN_SLOPE else parts_of(spec)


def sums_role(spec: LinearAttentionSpec) -> Role:
    workers = spec.D // HALF
    return Role("sums", 192, workers)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    x: Array  # [slots, D / 64, C, 64] float32
    y: Array  # [slots, C, V] float32
    y_parts: Array  # [PARTS_SLOTS, parts, C, V] bfloat16
    rows: Array  # [slots, 2, C] float32: inverse and e, of queries
    total: Array  # [D / 64, 64, COLUMNS] float32: what is stored of S
    vector: Array  # [D / 64, 64] float32: what is stored of z
    features: Ring  # of x and rows
    values: Ring  # of y
    parts: Ring  # of y_parts


def storage_of(spec: LinearAttentionSpec, of_queries: bool) -> Storage:
    tiling, sums = frame.tiling(spec), sums_role(spec)
    workers, parts = sums.warpgroups, parts_of_values(spec)
    slots = 2 if workers == 2 else 4
    y_slots = 1 if workers == 2 and parts == 3 else slots
    x = Buffer(tiling.of_rows_in_float32(slots, workers, C, HALF), copies=workers)
    y = Buffer(tiling.of_rows_in_float32(y_slots, C, spec.V))
    rows = Buffer(plgpu.SMEM((slots, 2, C), F32), copies=2) if of_queries else None
    return Storage(
        x=x,
        y=y,
        y_parts=Buffer(tiling.of_parts(PARTS_SLOTS, parts, C, spec.V)),
        rows=rows,
        total=Buffer(tiling.shared(workers, HALF, COLUMNS, dtype=F32)),
        vector=Buffer(plgpu.SMEM((workers, HALF), F32)),
        features=Ring.of(slots, (x, rows), (sums,)),
        values=Ring.of(y_slots, (y,), (SPLIT,)),
        parts=Ring.of(PARTS_SLOTS, (SPLIT,), (sums,)),
    )


def float32_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    x: jax.Array,
    y: jax.Array,
    of_rows: Sequence[jax.Array] = (),
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """[B, heads, P, F, V] and [B, heads, P, F], float32.

    Args:
      of_rows: inverse and e, [B, heads, T up to a whole chunk] float32, of queries with a
        normaliser; else none.
      lengths: of the rows, [B] int32: rows behind them are left out.
    """
    parts = (MEMORY, memory), (SPLIT, split), (sums_role(spec), add_up)
    return sums_walk.sums_of_pieces(
        spec,
        deal,
        name,
        (Walk, storage_of(spec, bool(of_rows)), parts),
        (deal.pieces, spec.D, spec.V),
        {"x": x, "y": y},
        of_rows,
        lengths,
        approximates=False,
    )


def memory(walk: Walk) -> None:
    own, tiling = walk.own, walk.tiling

    def load_chunk(item: Item, chunk: Any) -> None:
        step, rows = item.before + chunk, item.rows(chunk)
        slot, loaded = own.values.slot(step), own.values.produced.at
        own.values.acquire(step)
        source = tiling.part(walk.y, item, rows, item.head)  # [C, V]
        plgpu.copy_gmem_to_smem(source, own.y.at[slot], loaded[slot])
        slot, loaded = own.features.slot(step), own.features.produced.at
        own.features.acquire(step)
        for half in range(walk.spec.D // HALF):
            source = tiling.part(walk.x, item, rows, item.head, half)  # [C, 64]
            plgpu.copy_gmem_to_smem(source, own.x.at[slot, half], loaded[slot])
        walk.load_of_rows(item, rows, slot, loaded[slot])

    steps = walk.each_chunk(load_chunk)
    own.values.drain(steps)
    own.features.drain(steps)


def split(walk: Walk) -> None:
    """Rows of y that do not count become 0, since features of 0 do not cancel NaN."""
    own = walk.own

    def split_chunk(item: Item, chunk: Any) -> None:
        count = None if walk.lengths is None else walk.count(item, chunk)
        sums_walk.split_tile(
            (own.y, own.values),
            (own.y_parts, own.parts),
            item.before + chunk,
            (parts_of_values(walk.spec), walk.spec.V),
            lambda y, _: mosaic.kept(y, count),
        )

    own.parts.drain(walk.each_chunk(split_chunk))


def add_up(walk: Walk) -> None:
    own, spec, worker = walk.own, walk.spec, mosaic.group()

    def map_chunk(item: Item, chunk: Any) -> tuple[jax.Array, jax.Array]:
        """phi(x)^T [64, C], 0 in rows and columns that there are not; its part of z or u."""
        slot = own.features.slot(item.before + chunk)
        own.features.produced.wait(slot)
        x = mosaic.load_transposed(own.x.at[slot, worker])  # [64, C]
        phi = feature_maps.features(spec).unrounded_transposed_keys(x, worker * HALF)
        weights = None
        if walk.of_rows:
            inverse, e = (load(own.rows.at[slot, number], OF_COLUMNS) for number in range(2))
            phi, weights = phi * mosaic.in_rows(inverse, HALF), mosaic.in_rows(-e, HALF)
        plgpu.commit_smem()  # reads finish before the next load overwrites them
        own.features.consumed.arrive(slot)
        count = walk.count(item, chunk)
        if count is not None:
            phi = jnp.where(mosaic.hidden_position(1) < count, phi, 0.0)
        return phi, jnp.sum(phi if weights is None else phi * weights, axis=1)

    def add_chunk(item: Item, chunk: Any, sums: Sums) -> Sums:
        total, vector = sums
        phi, added = map_chunk(item, chunk)
        phis = sums_walk.in_parts(phi, parts_of(spec))
        slot = own.parts.slot(item.before + chunk)
        own.parts.produced.wait(slot)
        # [C, V] each
        ys = [own.y_parts.at[slot, number] for number in range(parts_of_values(spec))]
        products = sums_walk.pairs_of(phis, ys)
        (found,) = mosaic.multiply((mosaic.zeros(HALF, spec.V), products))
        plgpu.commit_smem()  # reads finish before the next store there
        own.parts.consumed.arrive(slot)
        return total + found, vector + added

    def sum_piece(item: Item) -> None:
        sums = walk.add_up(item, add_chunk)
        of_piece, rows = (item.batch, item.head, item.piece), pl.ds(worker * HALF, HALF)
        walk.leave(worker, of_piece, rows, sums)

    walk.each_sum(sum_piece)
