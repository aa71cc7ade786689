"""dv and the flow of keys, for causal calls with a decay per step and channel.

`channel_backward.py` launches it, with q^ and k~ of the forward pass, and inverse and e of
`channel_query_gradient.py`. Read `channel.py` first for q^, k~ and the middle row, and
`key_gradient.py` for the pass without a decay. The kernel walks from the last chunk to the first.
With q'_i = q^_i inverse_i, and R [V, F] and u [F] the sums over queries of later chunks, scaled to
the middle row of the chunk:

    a[j, i] = k~_j . q'_i          for i >= j of the same chunk, else 0
    b[j, i] = v_j . g_i - e_i      for i >= j of the same chunk, else 0
    dv_j  = R k~_j + sum_i a[j, i] g_i
    dk~_j = R^T v_j + u + sum_i b[j, i] q'_i
    R += g^T q',  u -= sum_i e_i q'_i        after each chunk

    flow_j = k~_j dk~_j
    E = sum_v S R + z u        [F]        for each run

Without a normaliser inverse is a power of two, and dv, the flow and E are multiplied by the rest of
the scale (`channel.parts_of_scale`). R and u are the gradients of S and z without that factor.

In E, S and z are those ahead of the run, with the rounding that its queries read, and R and u
include the queries of the run's first chunk. The flow and E are written in float32. Two heads of 64
columns in a tile have separate products, and their states [64, 64] lie one below the other.

Where XLA adds up dv over two walks or over blocks of features (`channel_blocks.adds_up`), dv is
written in float32, so that only the sum is rounded. Shared memory has room for half of its columns,
which are stored one half after the other.

Where segments begin in a chunk (`chunk_borders.py`), masks apply to a and b, to what keys read of R
and u, and to the queries that are added to these. Shared memory has no room for a masked g, so the
role state masks q' in registers.

    memory   loads chunks, and S in tiles of 64 x 64
    state    stores q' in place of q^; keeps R^T and u in registers and stores them rounded for each
             chunk; computes E
    dv       computes a and dv; k~ stays in registers, the first factor of both products
    dk       computes b and dk~; b is multiplied in two parts: rounded, and what rounding left off
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import (
    ALIKE,
    BF16,
    F32,
    HALF,
    OF_COLUMNS,
    OF_ROWS,
    Item,
    load,
    multiply,
    slot_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu import (
    channel,
    channel_blocks,
    chunk_borders,
    chunk_decay,
    frame,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_rows import (
    keep_last_segment,
    of_last_segment,
    seen_pairs,
)
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import spread
from ato_jax.ops.linear_attention.scans.borders import NO_BORDERS, OfSequence
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

DV, DK, STATE = 0, 1, 3  # warpgroups; MEMORY is 2
# Slots of q, g, inverse and e; and of k and v.
STAGES, K_STAGES = 2, 2
# Registers a thread of dv, dk and state, by heads in a tile: with two heads a state is half as
# large, and there are twice as many a and b.
OWN_REGISTERS = {1: (144, 144, 200), 2: (176, 176, 136)}


def channel_key_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    inverse: jax.Array,
    e: jax.Array,
    r: jax.Array,
    u: jax.Array,
    onto: jax.Array,
    kv: jax.Array,
    k_sum: jax.Array | None,
    borders: OfSequence = NO_BORDERS,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the kernel. It returns the flow, dv and E [B, H, runs, D].

    Args:
      q, k: q^ and k~.
      inverse, e, kv, k_sum: as `channel_query_gradient` returns them.
      r, u: R^T [B, H, P, D, V] in bfloat16 and u [B, H, P, D] behind each piece.
      onto: `Factors.of_queries` of `channel_backward.py`, [B, H, chunks * D].
    """
    tiling = frame.tiling(spec)
    deal = dataclasses.replace(deal, most_blocks=deal.items)
    heads = frame.heads_of_tile(spec)
    dv_registers, dk_registers, state_registers = OWN_REGISTERS[heads]
    normalized, has_borders = k_sum is not None, borders.chunks is not None
    adds_up = channel_blocks.adds_up(spec)
    _, scale_rest = channel.parts_of_scale(spec)
    scratch = dict(
        q_s=tiling.tiles(STAGES),
        g_s=tiling.tiles(STAGES),
        k_s=tiling.tiles(K_STAGES),
        v_s=tiling.tiles(K_STAGES),
        r_s=tiling.shared(F, spec.V),
        kv_s=tiling.shared(HALF, HALF),
        dv_s=tiling.of_rows_in_float32(C, HALF) if adds_up else tiling.tiles(1),
        flow_s=tiling.of_rows_in_float32(2, C, HALF),
        minus_e_s=tiling.shared(heads * ALIKE, C),
        inverse_s=plgpu.SMEM((STAGES, heads * C), F32),
        e_s=plgpu.SMEM((STAGES, heads * C), F32),
        onto_s=plgpu.SMEM((STAGES, F), F32),
        u_s=plgpu.SMEM((F,), F32),
        u_start_s=plgpu.SMEM((F,), F32),
        k_sum_s=plgpu.SMEM((F,), F32),
        crossing_s=plgpu.SMEM((F,), F32),
        loaded=plgpu.Barrier(num_arrivals=5 * heads, num_barriers=STAGES),
        mapped=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        k_loaded=plgpu.Barrier(num_arrivals=2 * heads, num_barriers=K_STAGES),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=K_STAGES),
        k_sum_loaded=plgpu.Barrier(num_arrivals=heads),
        kv_loaded=plgpu.Barrier(num_arrivals=1),
        kv_free=plgpu.Barrier(num_arrivals=1),
        start=plgpu.Barrier(num_arrivals=2 * heads),
        r_ready=plgpu.Barrier(num_arrivals=1),
        r_free=plgpu.Barrier(num_arrivals=2),
    )

    def body(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        g_ref: Any,
        inverse_ref: Any,
        e_ref: Any,
        r_ref: Any,
        u_ref: Any,
        onto_ref: Any,
        kv_ref: Any,
        *refs: Any,
        q_s: Any,
        g_s: Any,
        v_s: Any,
        k_s: Any,
        r_s: Any,
        kv_s: Any,
        dv_s: Any,
        flow_s: Any,
        minus_e_s: Any,
        inverse_s: Any,
        e_s: Any,
        onto_s: Any,
        u_s: Any,
        u_start_s: Any,
        k_sum_s: Any,
        crossing_s: Any,
        loaded: Any,
        mapped: Any,
        free: Any,
        k_loaded: Any,
        k_free: Any,
        k_sum_loaded: Any,
        kv_loaded: Any,
        kv_free: Any,
        start: Any,
        r_ready: Any,
        r_free: Any,
    ) -> None:
        ends_ref, chunks_ref = refs[:2] if has_borders else (None, None)
        *k_sum_refs, flow_ref, dv_ref, crossing_ref = refs[2 * has_borders :]
        # The blocks [64, 64] of S: a half of the features, and a half of V, or all 64 columns of V.
        quarters = list(itertools.product(range(2), range(spec.V // HALF)))

        def heads_of(item: Item) -> list[Any]:
            return [tiling.head_of(item.head, head) for head in range(heads)]

        def in_heads(tiles: Any, slot: Any) -> list[Any]:
            """The columns of each head of a slot's tile."""
            return [tiling.head_in(tiles, slot, head) for head in range(heads)]

        def number_of(item: Item, chunk: Any) -> Any:
            return item.chunks - 1 - chunk

        def borders_of(item: Item, chunk: Any) -> chunk_borders.Borders:
            if not has_borders:
                return channel.NO_BORDERS
            return chunk_borders.of_chunk(ends_ref, chunks_ref, item, number_of(item, chunk))

        def is_first_of_run(item: Item, chunk: Any) -> Any:
            return lax.rem(number_of(item, chunk), channel.CHUNKS) == 0

        def run_of(item: Item, chunk: Any) -> Any:
            return channel.run_of(item, number_of(item, chunk))

        def load_piece(item: Item) -> None:
            def load_chunk(chunk: Any, _: None) -> None:
                rows = item.rows_from_the_end(chunk)
                slot, k_slot = slot_of(chunk, STAGES), slot_of(chunk, K_STAGES)
                number = lax.div(item.first_row, C) + number_of(item, chunk)
                mosaic.wait_until_free(free, chunk, STAGES)
                columns = pl.ds(number * spec.D, spec.D)
                of_features = channel_blocks.head_of_features(spec, q_ref, item.head)
                of_values = channel_blocks.head_of_values(spec, g_ref, item.head)
                tiling.copy_tile(q_ref, item, rows, of_features, q_s, slot, loaded)
                for ref, of_chunk, vectors in (
                    (inverse_ref, rows, inverse_s),
                    (e_ref, rows, e_s),
                    (onto_ref, columns, onto_s),
                ):
                    tiling.copy_vector(ref, item, of_chunk, vectors, slot, loaded)
                tiling.copy_tile(g_ref, item, rows, of_values, g_s, slot, loaded)
                mosaic.wait_until_free(k_free, chunk, K_STAGES)
                for ref, head, tiles in ((k_ref, of_features, k_s), (v_ref, of_values, v_s)):
                    tiling.copy_tile(ref, item, rows, head, tiles, k_slot, k_loaded)
                # After the loads of the next chunk, since each quarter waits for the one before.
                pl.when(chunk > 0)(lambda: load_state(chunk - 1))

            def load_state(chunk: Any) -> None:
                pl.when(is_first_of_run(item, chunk))(lambda: load_quarters(chunk))

            def load_quarters(chunk: Any) -> None:
                run = run_of(item, chunk)
                is_last_run = chunk < channel.CHUNKS
                of_heads = list(zip(heads_of(item), tiling.by_heads(k_sum_s), strict=True))
                for n, (half, number) in enumerate(quarters):

                    @pl.when(jnp.logical_or(jnp.logical_not(is_last_run), n > 0))
                    def _() -> None:
                        plgpu.barrier_wait(kv_free)

                    if n == 0:
                        for ref, (head, own) in itertools.product(k_sum_refs, of_heads):
                            source = ref.at[item.batch, head, run]
                            plgpu.copy_gmem_to_smem(source, own, k_sum_loaded)
                    at = item.batch, tiling.head_of(item.head, half), run
                    quarter = tiling.columns_of(half), pl.ds(number * HALF, HALF)
                    plgpu.copy_gmem_to_smem(kv_ref.at[(*at, *quarter)], kv_s, kv_loaded)

            lax.fori_loop(0, item.chunks, load_chunk, None)
            load_state(item.chunks - 1)
            mosaic.await_the_last(free, item.chunks, STAGES)
            mosaic.await_the_last(k_free, item.chunks, K_STAGES)
            plgpu.barrier_wait(kv_free)

        def sum_piece(item: Item) -> None:
            halves = [pl.ds(half * HALF, HALF) for half in range(2)]
            for ref, starts in ((r_ref, r_s), (u_ref, u_start_s)):
                for head, own in zip(heads_of(item), tiling.by_heads(starts), strict=True):
                    source = ref.at[item.batch, head, item.piece]
                    plgpu.copy_gmem_to_smem(source, own, start)
            plgpu.barrier_wait(start)
            sums = (
                *(load(r_s.at[rows]).astype(F32) for rows in halves),
                *(mosaic.in_parts(load(u_start_s.at[rows], OF_ROWS)) for rows in halves),
            )
            plgpu.commit_smem()  # reads finish before the first chunk's stores

            def sum_chunk(chunk: Any, sums: Any) -> Any:
                slot = slot_of(chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                onto = [load(onto_s.at[slot, rows], OF_ROWS) for rows in halves]
                sums = [chunk_decay.times_squares(x, onto[n % 2]) for n, x in enumerate(sums)]
                inverses = [load(own, OF_ROWS) for own in tiling.by_heads(inverse_s.at[slot])]
                for half in range(2):
                    own, inverse = tiling.half_of(q_s, slot, half), inverses[half % heads]
                    read = load(own).astype(F32) * mosaic.in_columns(inverse, HALF)
                    own[...] = mosaic.rounded(read)
                minus_es = tiling.by_heads(minus_e_s)
                for e, own in zip(tiling.by_heads(e_s.at[slot]), minus_es, strict=True):
                    spread(load(e, OF_ROWS), own)
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])

                @pl.when(chunk > 0)
                def _() -> None:
                    plgpu.barrier_wait(r_free)

                for rows, own, parts in zip(halves, sums[:2], sums[2:], strict=True):
                    r_s.at[rows][...] = own.astype(BF16)
                    u_s.at[rows][...] = mosaic.of_parts(parts)
                plgpu.commit_smem()
                plgpu.barrier_arrive(r_ready)

                turned = [tiling.half_of(q_s, slot, half).T for half in range(2)]
                both = in_heads(g_s, slot), [own.T for own in minus_es]
                factors = [of_heads[half % heads] for of_heads in both for half in range(2)]
                borders = borders_of(item, chunk)

                def add_all() -> Any:
                    of_sums = zip(sums, turned * 2, factors, strict=True)
                    return multiply(*((own, [(x, y)]) for own, x, y in of_sums))

                def at_border() -> Any:
                    """Adds the queries ahead of the first border, and drops the sums over later
                    chunks. DV and DK read all of q' and g, so q' is masked in registers."""
                    row = plgpu.broadcasted_iota(jnp.int32, (C,), dimension=0, layout=OF_COLUMNS)
                    reads = jnp.where(row < borders.reads, 1.0, 0.0)
                    found: list[Any] = [None] * 4
                    for half in range(2):
                        own = mosaic.times_rows(tiling.half_of(q_s, slot, half), reads)
                        for n in (half, 2 + half):
                            start = mosaic.zeros(*sums[n].shape)
                            (found[n],) = multiply((start, [(own, factors[n])]))
                    return tuple(found)

                sums = borders.either(at_border, add_all)
                plgpu.commit_smem()  # all warps have multiplied by what the next chunk stores
                plgpu.barrier_arrive(free.at[slot])
                pl.when(is_first_of_run(item, chunk))(lambda: leave_crossing(item, chunk, sums))
                return sums

            sums = lax.fori_loop(0, item.chunks, sum_chunk, sums)

        def leave_crossing(item: Item, chunk: Any, sums: Any) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            found: list[Any] = [0.0, 0.0]
            if normalized:
                plgpu.barrier_wait(k_sum_loaded)
                for half in range(2):
                    of_keys = load(k_sum_s.at[pl.ds(half * HALF, HALF)], OF_ROWS)
                    found[half] = mosaic.of_parts(sums[2 + half]) * of_keys
            for half, number in quarters:
                columns = slice(number * HALF, (number + 1) * HALF)
                plgpu.barrier_wait(kv_loaded)
                found[half] += jnp.sum(sums[half][:, columns] * load(kv_s).astype(F32), axis=1)
                plgpu.commit_smem()  # reads finish before the next load overwrites them
                plgpu.barrier_arrive(kv_free)
            for half in range(2):
                own = channel.times_rest(found[half], scale_rest)
                crossing_s.at[pl.ds(half * HALF, HALF)][...] = own
            plgpu.commit_smem()
            run = run_of(item, chunk)
            for head, own in zip(heads_of(item), tiling.by_heads(crossing_s), strict=True):
                plgpu.copy_smem_to_gmem(own, crossing_ref.at[item.batch, head, run])

        def seen(item: Item, x: jax.Array) -> jax.Array:
            """x [j, i], 0 where query i does not see key j."""
            x = jnp.where(channel_blocks.sees(spec, item, queries=1), x, 0.0)
            # Without the barrier the selected numbers would be rounded singly, not in pairs.
            return lax.optimization_barrier(x)

        def values_chunk(item: Item, chunk: Any) -> None:
            slot, k_slot = slot_of(chunk, STAGES), slot_of(chunk, K_STAGES)
            plgpu.barrier_wait(k_loaded.at[k_slot])
            features = [load(own) for own in in_heads(k_s, k_slot)]
            plgpu.commit_smem()  # reads finish before the next load overwrites them
            plgpu.barrier_arrive(k_free.at[k_slot])
            plgpu.barrier_wait(mapped.at[slot])
            pairs = zip(features, in_heads(q_s, slot), strict=True)
            found = multiply(*((mosaic.zeros(C, C), [(k, q.T)]) for k, q in pairs))
            borders = borders_of(item, chunk)
            weights = [mosaic.rounded(seen(item, a)) for a in seen_pairs(borders, list(found))]
            features = of_last_segment(borders, features)
            plgpu.barrier_wait(r_ready)
            factors = zip(features, tiling.by_heads(r_s), weights, in_heads(g_s, slot), strict=True)
            found = multiply(
                *((mosaic.zeros(C, spec.V), [(k, r), (a, g)]) for k, r, a, g in factors)
            )
            plgpu.barrier_arrive(r_free)
            plgpu.barrier_arrive(free.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            found = tuple(channel.times_rest(dv, scale_rest) for dv in found)
            if adds_up:
                leave_halves(item, chunk, *found)
                return
            for own, dv in zip(in_heads(dv_s, 0), found, strict=True):
                own[...] = dv.astype(BF16)
            plgpu.commit_smem()
            rows = item.rows_from_the_end(chunk)
            tiling.leave_tile(dv_s, 0, dv_ref, item, rows, item.head)

        def leave_halves(item: Item, chunk: Any, dv: jax.Array) -> None:
            rows = item.rows_from_the_end(chunk)
            for half in range(pl.cdiv(v.shape[3], HALF)):
                if half:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dv_s[...] = dv[:, half * HALF : (half + 1) * HALF]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(dv_s, tiling.part(dv_ref, item, rows, item.head, half))

        def keys_chunk(item: Item, chunk: Any) -> None:
            slot, k_slot = slot_of(chunk, STAGES), slot_of(chunk, K_STAGES)
            plgpu.barrier_wait(mapped.at[slot])
            queries, values = in_heads(q_s, slot), in_heads(v_s, k_slot)
            minus_e = [
                mosaic.in_rows(-load(e, OF_COLUMNS), C) for e in tiling.by_heads(e_s.at[slot])
            ]
            plgpu.barrier_wait(k_loaded.at[k_slot])
            pairs = zip(minus_e, values, in_heads(g_s, slot), strict=True)
            found = multiply(*((e, [(v, g.T)]) for e, v, g in pairs))
            parts, borders = [], borders_of(item, chunk)
            for b in seen_pairs(borders, list(found)):
                b = seen(item, b)
                rounded = mosaic.rounded(b)
                parts.append((rounded, mosaic.rounded(b - rounded.astype(F32))))
            plgpu.barrier_wait(r_ready)
            of_others = [mosaic.in_rows(load(u, OF_COLUMNS), C) for u in tiling.by_heads(u_s)]
            of_others = of_last_segment(borders, of_others)
            plgpu.commit_smem()  # u and e were read, ahead of what overwrites them
            borders.when_some(lambda: keep_last_segment(borders, values))
            factors = zip(of_others, values, tiling.by_heads(r_s), parts, queries, strict=True)
            dk = multiply(
                *((u, [(v, r.T), *((b, q) for b in both)]) for u, v, r, both, q in factors)
            )
            plgpu.barrier_arrive(r_free)
            plgpu.barrier_arrive(free.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for half in range(2):
                features = load(tiling.half_of(k_s, k_slot, half)).astype(F32)
                features = channel.times_rest(features, scale_rest)
                first = half * HALF % spec.D
                flow_s.at[half][...] = features * dk[half % heads][:, first : first + HALF]
            plgpu.commit_smem()
            plgpu.barrier_arrive(k_free.at[k_slot])
            for half in range(2):
                rows = item.rows_from_the_end(chunk)
                target = tiling.part(flow_ref, item, rows, item.head, half)
                plgpu.copy_smem_to_gmem(flow_s.at[half], target)

        def walk(one: Callable[[Item, Any], None]) -> None:
            def walk_piece(item: Item) -> None:
                lax.fori_loop(0, item.chunks, lambda chunk, _: one(item, chunk), None)

            deal.each(walk_piece)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(mosaic.group() == frame.MEMORY)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, frame.WARPGROUPS)
            deal.each(load_piece)

        @pl.when(mosaic.group() == STATE)
        def _state() -> None:
            mosaic.set_registers(state_registers, frame.WARPGROUPS)
            deal.each(sum_piece)
            plgpu.barrier_wait(r_free)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(mosaic.group() == DV)
        def _dv() -> None:
            mosaic.set_registers(dv_registers, frame.WARPGROUPS)
            walk(values_chunk)

        @pl.when(mosaic.group() == DK)
        def _dk() -> None:
            mosaic.set_registers(dk_registers, frame.WARPGROUPS)
            walk(keys_chunk)

    out_type = (
        jax.ShapeDtypeStruct(channel_blocks.shape_of_heads(spec, k), F32),
        jax.ShapeDtypeStruct(channel_blocks.shape_of_heads(spec, v), F32 if adds_up else BF16),
        jax.ShapeDtypeStruct((spec.B, spec.H, pl.cdiv(spec.T, channel.RUN), spec.D), F32),
    )
    arrays: Any = q, k, v, g, inverse, e, r, u, onto, kv, *borders.arrays("ends", "chunks")
    found = frame.launch(
        body,
        "channel_key_gradient",
        deal,
        out_type,
        scratch,
        arrays if k_sum is None else (*arrays, k_sum),
        own_barriers=True,
    )
    return tuple(found)
