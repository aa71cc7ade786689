"""Causal walks over heads of 129 to 256 columns, whose state no block has registers for.

All five are one walk, chunk by chunk. A block makes 128 columns of the result, 64 in each of two
warpgroups. Row i reads with x_i; row j is found by y_j, and p_j is what is read of it. With T [64,
D] the state of all chunks before, and w[i, j] = x_i . y_j where row i sees row j:

    found_i = sum_j w[i, j] p_j + T x_i                T += sum_j p_j y_j^T

    role    x        y        p (own)   T (own)     found
    OUT     phi(q)   phi(k)   v         S^T [V, F]  out_i, once it is divided by den_i
    FLOW    phi(q)   phi(k)   v         S^T         of which g_i . found_i and den_i are left
    DV      phi(k)   phi'(q)  g         R^T         dv_j, from the end, where queries are later
    DQ      g        v        phi(k)    S [F, V]    dq_i, times inverse_i and phi(q)'s derivative
    DK      v        g        phi'(q)   R           dk_j, from the end, times phi(k)'s derivative

with phi'(q_i) = phi(q_i) inverse_i. In the last two e_i is subtracted from w; and found is less by
e_i z in DQ, and more by u in DK, which are summed up beside T. What is left there is a difference,
of which the first rows' weights are most: what rounding them leaves off is multiplied, too, and
where e is made of them.

    memory    loads T of a piece and its chunks, as slots come free
    features  in the first three: maps x and y in place; in two z, and what of den_i it makes
    own       two, 64 columns each: T in registers, and all products; maps its own p

Where columns are three times 64, the last block's second warpgroup makes again what its first does.

No barriers but those written here, as in `whole_query_gradient.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply, slot_of
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import FEATURES, MEMORY, C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES = 2
# Where there are features warpgroups; else the own ones share all registers.
OWN_REGISTERS, FEATURES_REGISTERS = 208, 72
# Of T, in one product: more takes more registers than a warpgroup has when it is launched.
MOST_COLUMNS = 128


class Role(enum.Enum):
    OUT = "wide_output"
    FLOW = "wide_flow"
    DV = "wide_value_gradient"
    DQ = "wide_query_gradient"
    DK = "wide_key_gradient"


def blocks_of_walk(spec: LinearAttentionSpec) -> int:
    """How many blocks share the columns of what is made of a piece, two times 64 each."""
    return int(pl.cdiv(spec.D // HALF, 2))


def wide_walk(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    role: Role,
    x: jax.Array,
    y: jax.Array,
    p: jax.Array,
    state: tuple[jax.Array, jax.Array],
    reader: jax.Array | None = None,
    of_rows: Sequence[jax.Array] = (),
) -> Any:
    """What is found; of FLOW g . found [B, H, D / 64, T up to a whole chunk] in as many summands as
    there are blocks of columns, and den [B, H, T up to a whole chunk], float32.

    Args:
      deal: counts heads.
      state: T [B, heads, P or more, D, D] in bfloat16 and z or u [B, heads, P or more, D] in
        float32, ahead of each piece as it is walked.
      reader: of the rows that read g, q or k, where these are not x.
      of_rows: inverse of DV; inverse and e of DQ and DK; [B, H, T up to a whole chunk] in float32.
    """
    tiling, maps = frame.tiling(spec), feature_maps.features(spec)
    blocks, parts = spec.D // HALF, blocks_of_walk(spec)
    deal = dataclasses.replace(deal, heads=deal.heads * parts)
    group_size = spec.H // spec.G
    by_values = role in (Role.OUT, Role.FLOW, Role.DV)
    from_the_end = role in (Role.DV, Role.DK)
    normalizes = role in (Role.OUT, Role.FLOW) and spec.normalize
    warpgroups = frame.WARPGROUPS if by_values else frame.WARPGROUPS - 1
    t_parts = [
        pl.ds(first, min(MOST_COLUMNS, spec.D - first)) for first in range(0, spec.D, MOST_COLUMNS)
    ]
    # What is found lies in the place of p, or of `reader`, until it is stored.
    p_slots = 2 if reader is None else 1
    scratch: dict[str, Any] = dict(
        x_s=tiling.shared(STAGES, C, spec.D),
        y_s=tiling.shared(STAGES, C, spec.D),
        p_s=tiling.shared(p_slots, 2, C, HALF),
        t_s=tiling.shared(2, HALF, spec.D),
    )
    # Behind all tiles, whose places begin at whole KB.
    barriers = dict(
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=2 + normalizes, num_barriers=STAGES),
        p_loaded=plgpu.Barrier(num_arrivals=2 + len(of_rows), num_barriers=p_slots),
        p_free=plgpu.Barrier(num_arrivals=2, num_barriers=p_slots),
        start_loaded=plgpu.Barrier(num_arrivals=2 + 2 * (not by_values) + normalizes * blocks),
        start_free=plgpu.Barrier(num_arrivals=2 + normalizes),
    )
    # Of z or u what is read, of den what features know of it, and of rows: in one, since each array
    # in shared memory takes whole KB.
    z_blocks = blocks if normalizes else 2 * (not by_values)
    first_den = z_blocks
    first_row = first_den + STAGES * normalizes
    if count := first_row + p_slots * len(of_rows):
        scratch["vectors_s"] = plgpu.SMEM((count, C), F32)
    if by_values:
        barriers["mapped"] = plgpu.Barrier(num_arrivals=1, num_barriers=STAGES)
    if reader is not None:
        scratch["reader_s"] = tiling.shared(2, C, HALF)
        barriers |= dict(
            reader_loaded=plgpu.Barrier(num_arrivals=2),
            reader_free=plgpu.Barrier(num_arrivals=2),
        )
    scratch |= barriers

    def body(
        *refs: Any,
        x_s: Any,
        y_s: Any,
        p_s: Any,
        t_s: Any,
        loaded: Any,
        free: Any,
        p_loaded: Any,
        p_free: Any,
        start_loaded: Any,
        start_free: Any,
        mapped: Any = None,
        vectors_s: Any = None,
        reader_s: Any = None,
        reader_loaded: Any = None,
        reader_free: Any = None,
    ) -> None:
        x_ref, y_ref, p_ref, t_ref, vector_ref, *refs_ = refs
        reader_ref = refs_.pop(0) if reader is not None else None
        row_refs, found_refs = refs_[: len(of_rows)], refs_[len(of_rows) :]

        def z_of(block: Any) -> Any:
            return vectors_s.at[block]

        def den_of(slot: Any) -> Any:
            return vectors_s.at[first_den + slot]

        def row_of(p_slot: Any, number: int) -> Any:
            return vectors_s.at[first_row + p_slot * len(of_rows) + number]

        def map_keys(ref: Any, block: Any) -> None:
            feature_maps.map_keys_in_place(spec, ref, block if tiling.is_filled else 0)

        def rows_of(item: Item, chunk: Any) -> Any:
            return item.rows_from_the_end(chunk) if from_the_end else item.rows(chunk)

        def head_of(item: Item) -> Any:
            return lax.div(item.head, parts)

        def block_of(item: Item, own: Any) -> Any:
            return jnp.minimum(lax.rem(item.head, parts) * 2 + own, blocks - 1)

        def load_piece(item: Item) -> None:
            head = head_of(item)
            kv_head = lax.div(head, group_size)
            of_piece = item.batch, kv_head, item.piece

            @pl.when(item.number > 0)
            def _() -> None:
                plgpu.barrier_wait(start_free)

            for own in range(2):
                columns = pl.ds(block_of(item, own) * HALF, HALF)
                plgpu.copy_gmem_to_smem(t_ref.at[(*of_piece, columns)], t_s.at[own], start_loaded)
                if not by_values:
                    source = vector_ref.at[(*of_piece, columns)]
                    plgpu.copy_gmem_to_smem(source, z_of(own), start_loaded)
            if normalizes:
                for block in range(blocks):
                    source = vector_ref.at[(*of_piece, pl.ds(block * HALF, HALF))]
                    plgpu.copy_gmem_to_smem(source, z_of(block), start_loaded)

            def load_chunk(chunk: Any, _carry: None) -> None:
                step, rows = item.before + chunk, rows_of(item, chunk)
                slot, p_slot = slot_of(step, STAGES), slot_of(step, p_slots)
                mosaic.wait_until_free(free, step, STAGES)
                for ref, tiles, of_head in ((x_ref, x_s, head), (y_ref, y_s, kv_head)):
                    source = tiling.part(ref, item, rows, of_head)
                    plgpu.copy_gmem_to_smem(source, tiles.at[slot], loaded.at[slot])
                mosaic.wait_until_free(p_free, step, p_slots)
                for own in range(2):
                    source = tiling.part(p_ref, item, rows, kv_head, block_of(item, own))
                    plgpu.copy_gmem_to_smem(source, p_s.at[p_slot, own], p_loaded.at[p_slot])
                for number, ref in enumerate(row_refs):
                    source = ref.at[item.batch, head, rows]
                    plgpu.copy_gmem_to_smem(source, row_of(p_slot, number), p_loaded.at[p_slot])
                if reader is None:
                    return

                @pl.when(step > 0)
                def _() -> None:
                    plgpu.barrier_wait(reader_free)

                for own in range(2):
                    source = tiling.part(reader_ref, item, rows, head, block_of(item, own))
                    plgpu.copy_gmem_to_smem(source, reader_s.at[own], reader_loaded)

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def map_piece(item: Item) -> None:
            z: tuple[jax.Array, ...] = ()
            if normalizes:
                plgpu.barrier_wait(start_loaded)
                z = tuple(load(z_of(block), OF_ROWS) for block in range(blocks))

            def map_rows(chunk: Any, z: Any) -> Any:
                step = item.before + chunk
                slot, p_slot = slot_of(step, STAGES), slot_of(step, p_slots)
                plgpu.barrier_wait(loaded.at[slot])
                inverse: Any = None
                if role is Role.DV:
                    plgpu.barrier_wait(p_loaded.at[p_slot])
                    inverse = load(row_of(p_slot, 0), OF_ROWS)
                den: Any = 0.0
                for block in range(blocks):
                    columns = pl.ds(block * HALF, HALF)
                    own_x, own_y = (tiles.at[slot, :, columns] for tiles in (x_s, y_s))
                    phi: Any = None
                    if role is Role.DV:
                        map_keys(own_x, block)
                    else:
                        phi = maps.queries(load(own_x))
                        own_x[...] = phi
                    if normalizes:
                        ahead = mosaic.in_rows(load(z_of(block), OF_COLUMNS), C)
                        den = den + jnp.sum(phi.astype(F32) * ahead, axis=1)
                    if inverse is None:
                        map_keys(own_y, block)
                    else:
                        feature_maps.map_queries_in_place(spec, own_y, inverse)
                if normalizes:
                    den_of(slot)[...] = den
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                if not normalizes:
                    return ()
                totals = []
                for block, total in enumerate(z):
                    own_y = y_s.at[slot, :, pl.ds(block * HALF, HALF)]
                    phi = mosaic.load_transposed(own_y).astype(F32)
                    totals.append(total + jnp.sum(phi, axis=1))
                    z_of(block)[...] = totals[-1]
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[slot])
                return tuple(totals)

            lax.fori_loop(0, item.chunks, map_rows, z)
            if normalizes:
                plgpu.barrier_arrive(start_free)

        def walk_piece(item: Item) -> None:
            own = mosaic.group()
            head, block = head_of(item), block_of(item, own)
            own_t = t_s.at[own]
            plgpu.barrier_wait(start_loaded)
            T = tuple(load(own_t.at[:, columns]).astype(F32) for columns in t_parts)
            vector = () if by_values else load(z_of(own), OF_ROWS)

            def walk_chunk(chunk: Any, carried: Any) -> Any:
                T, vector = carried
                step = item.before + chunk
                slot, p_slot = slot_of(step, STAGES), slot_of(step, p_slots)
                own_x, own_y, own_p = x_s.at[slot], y_s.at[slot], p_s.at[p_slot, own]
                kept = own_p if reader is None else reader_s.at[own]

                def let_go() -> None:
                    """Of what was found before, which has been stored by now."""
                    if role is Role.FLOW:
                        return
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    barrier = reader_free
                    if reader is None:
                        barrier = p_free.at[slot_of(step + (p_slots - 1), p_slots)]

                    @pl.when(step > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(barrier)

                def publish() -> Any:
                    """T and the vector; and the vector behind the chunk."""
                    let_go()
                    for columns, sums in zip(t_parts, T, strict=True):
                        own_t.at[:, columns][...] = sums.astype(BF16)
                    if by_values:
                        plgpu.commit_smem()
                        return vector
                    z_of(own)[...] = vector
                    plgpu.barrier_wait(p_loaded.at[p_slot])
                    if role is Role.DQ:
                        map_keys(own_p, block)
                    else:
                        inverse = load(row_of(p_slot, 0), OF_ROWS)
                        feature_maps.map_queries_in_place(spec, own_p, inverse)
                    plgpu.commit_smem()
                    added = mosaic.load_transposed(own_p).astype(F32)
                    if role is Role.DK:
                        added *= -mosaic.in_rows(load(row_of(p_slot, 1), OF_COLUMNS), HALF)
                    return vector + jnp.sum(added, axis=1)

                plgpu.barrier_wait(mapped.at[slot] if by_values else loaded.at[slot])
                w, vector = mosaic.multiply_while([(own_x, own_y.T)], (C, C), publish)
                start = mosaic.zeros(C, HALF)
                if not by_values:
                    start = mosaic.in_rows(load(z_of(own), OF_COLUMNS), C)
                if role is Role.DQ:
                    e = mosaic.in_columns(load(row_of(p_slot, 1), OF_ROWS), C)
                    w, start = w - e, -e * start
                elif role is Role.DK:
                    w = w - mosaic.in_rows(load(row_of(p_slot, 1), OF_COLUMNS), C)
                i, j = mosaic.hidden_position(0), mosaic.hidden_position(1)
                w = jnp.where(i <= j if from_the_end else i >= j, w, 0.0)
                # Rounded in pairs: behind the choice each would be by itself.
                w = lax.optimization_barrier(w)
                weights = [mosaic.rounded(w)]
                if role in (Role.FLOW, Role.DQ, Role.DK):
                    weights.append(mosaic.rounded(w - weights[0].astype(F32)))
                if by_values:
                    plgpu.barrier_wait(p_loaded.at[p_slot])
                products = [(own_x, own_t.T), *((own_w, own_p) for own_w in weights)]
                behind = [
                    (sums, [(own_p.T, own_y.at[:, columns])])
                    for columns, sums in zip(t_parts, T, strict=True)
                ]
                found, *T = multiply((start, products), *behind)
                factor: Any = spec.scale if role is Role.OUT else None
                den: Any = None
                if normalizes:
                    of_pairs = sum(jnp.sum(own_w.astype(F32), axis=1) for own_w in weights)
                    den = load(den_of(slot), OF_ROWS) + of_pairs
                if role is Role.DQ:
                    factor = mosaic.in_columns(load(row_of(p_slot, 0), OF_ROWS), HALF)
                elif role is Role.OUT and spec.normalize:
                    factor = mosaic.in_columns(1.0 / jnp.maximum(den, spec.eps), HALF)
                plgpu.commit_smem()  # what was read, ahead of the loads that overwrite it
                plgpu.barrier_arrive(free.at[slot])
                if reader is not None:
                    plgpu.barrier_arrive(p_free.at[p_slot])
                    plgpu.barrier_wait(reader_loaded)
                if factor is not None:
                    found = found * factor
                rows = rows_of(item, chunk)
                is_own = lax.rem(item.head, parts) * 2 + own < blocks
                if role is Role.FLOW:
                    flow = jnp.sum(found * load(kept).astype(F32), axis=1)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(reader_free)
                    flow_ref, den_ref = found_refs

                    @pl.when(is_own)
                    def _() -> None:
                        flow_ref.at[item.batch, head, block, rows][...] = flow

                    @pl.when(is_own & (block == 0))
                    def _() -> None:
                        den_ref.at[item.batch, head, rows][...] = den

                    return tuple(T), vector
                if not by_values:
                    own_reader = load(kept)
                    if maps.slope_is_known:
                        slope = maps.slope_of_features(maps.unrounded(own_reader))
                    else:
                        slope = maps.slope(own_reader)
                    found = found * slope
                kept[...] = found.astype(BF16)
                plgpu.commit_smem()

                @pl.when(is_own)
                def _() -> None:
                    target = tiling.part(found_refs[0], item, rows, head, block)
                    plgpu.copy_smem_to_gmem(kept, target)

                return tuple(T), vector

            lax.fori_loop(0, item.chunks, walk_chunk, (T, vector))
            plgpu.barrier_arrive(start_free)

        @pl.when(mosaic.group() == MEMORY)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, warpgroups)
            steps = deal.each(load_piece)
            plgpu.barrier_wait(start_free)
            mosaic.await_the_last(free, steps, STAGES)
            mosaic.await_the_last(p_free, steps, p_slots)
            if reader is not None:
                plgpu.barrier_wait(reader_free)

        if by_values:

            @pl.when(mosaic.group() == FEATURES)
            def _features() -> None:
                mosaic.set_registers(FEATURES_REGISTERS, frame.WARPGROUPS)
                deal.each(map_piece)

        @pl.when(mosaic.group() < MEMORY)
        def _own() -> None:
            registers = OWN_REGISTERS if by_values else mosaic.workers_registers(2)
            mosaic.set_registers(registers, warpgroups)
            steps = deal.each(walk_piece)
            if role is not Role.FLOW:
                plgpu.wait_smem_to_gmem(0)
                last = p_free.at[slot_of(steps - 1, p_slots)]
                plgpu.barrier_arrive(last if reader is None else reader_free)

    arrays = [x, y, p, *state, *([] if reader is None else [reader]), *of_rows]
    heads = deal.heads // parts
    length = mosaic.whole_chunks(spec.T)
    shape = frame.shape_of_values(spec, heads) if reader is None else reader.shape
    out_type: Any = jax.ShapeDtypeStruct(shape, BF16)
    if role is Role.FLOW:
        out_type = (
            jax.ShapeDtypeStruct((spec.B, heads, blocks, length), F32),
            jax.ShapeDtypeStruct((spec.B, heads, length), F32),
        )
    name = f"causal_{role.value}"
    return frame.launch(
        body,
        name,
        deal,
        out_type,
        scratch,
        arrays,
        warpgroups=warpgroups,
        own_barriers=True,
    )
