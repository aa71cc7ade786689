"""The causal output.

Per piece, with S [V, F] (bfloat16) and z [F] (float32) of the keys before it:

    w[i, j] = phi(q_i) . phi(k_j) for j <= i of the same chunk, else 0
    out_i = (phi(q_i) S^T + sum_j w[i, j] v_j) / max(phi(q_i) . z + sum_j w[i, j], eps)
    S += v^T phi(k),  z += sum_j phi(k_j)          after each chunk

    memory    loads S, z of a piece and its chunks, as slots come free, across pieces
    features  two, half of F each: map q and k in place; z in every column of a tile [64, 8]; den_i
    values    each a half of V: S_half [64, F] float32 in registers, w, out_half

so the state is loaded once for a piece and carried through its chunks. Both halves compute w: that
is cheaper than to hand it over.

With a decay, of whose logarithms to base 2 G_i is the sum from the chunk's first row to row i:

    w[i, j] carries exp2(G_i - G_j); out_i and its denominator read S and z times exp2(G_i)
    S = exp2(G_C) S + (exp2(G_C - G_j) v_j)^T phi(k_j), z alike    for the chunk's last row C

phi(k) carries the decay up to the chunk's middle (`frame.Gates`), as S and z do, and rows of out
and its denominator are multiplied by exp2(G_i - G_m) at the end. In a steep chunk w, v and what is
read of the state are scaled in registers.

Where a tile is two heads', the halves are these, each with products of its own 64 columns.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import (
    ALIKE,
    BF16,
    F32,
    FEATURES,
    HALF,
    MEMORY,
    OF_COLUMNS,
    OF_ROWS,
    C,
    Item,
    load,
    multiply,
    part,
    shared,
    slot_of,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of q and k, which are loaded, mapped and multiplied; of v and G; and of what is stored.
STAGES, V_STAGES, OUT_SLOTS = 4, 2, 1
# Two for features, half of F each.
WARPGROUPS = 5
VALUES_REGISTERS, FEATURES_REGISTERS, MEMORY_REGISTERS = 176, 48, 32


def output(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    z: jax.Array,
    gates: jax.Array | None,
    steep: jax.Array | None,
) -> jax.Array:
    """out, of s [B, G, P or more, V, F] in bfloat16 and z [B, G, P or more, F] in float32, the sums
    ahead of each piece; gates: [B, G, T up to a whole chunk], float32; steep: which pieces have a
    steep chunk, [B, tiles, P], of G tiles or G / 2."""
    group_size, gated = spec.H // spec.G, gates is not None
    heads = frame.heads_of_tile(spec)

    scratch = dict(
        q_s=frame.tiles(spec, STAGES),
        k_s=frame.tiles(spec, STAGES),
        v_s=shared(spec, V_STAGES, 2, C, HALF),
        gates_s=plgpu.SMEM((V_STAGES, heads * C), F32),
        s_s=shared(spec, 2, HALF, spec.F),
        out_s=shared(spec, 2, OUT_SLOTS, C, HALF),
        z_s=plgpu.SMEM((2, HALF), F32),
        den_s=plgpu.SMEM((V_STAGES, 2, C), F32),
        z_rows_s=shared(spec, 2, ALIKE, HALF),
        adds_s=shared(spec, 2, ALIKE, C),
        loaded=plgpu.Barrier(num_arrivals=2 * heads, num_barriers=STAGES),
        v_loaded=plgpu.Barrier(num_arrivals=2 + heads * gated, num_barriers=V_STAGES),
        mapped=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        den_known=plgpu.Barrier(num_arrivals=2, num_barriers=V_STAGES),
        free=plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
        v_free=plgpu.Barrier(num_arrivals=4, num_barriers=V_STAGES),
        s_loaded=plgpu.Barrier(num_arrivals=2),
        s_free=plgpu.Barrier(num_arrivals=2),
        z_loaded=plgpu.Barrier(num_arrivals=2),
        z_free=plgpu.Barrier(num_arrivals=2),
    )

    def body(
        *refs: Any,
        q_s: Any,
        k_s: Any,
        v_s: Any,
        gates_s: Any,
        s_s: Any,
        out_s: Any,
        z_s: Any,
        den_s: Any,
        z_rows_s: Any,
        adds_s: Any,
        loaded: Any,
        v_loaded: Any,
        mapped: Any,
        den_known: Any,
        free: Any,
        v_free: Any,
        s_loaded: Any,
        s_free: Any,
        z_loaded: Any,
        z_free: Any,
    ) -> None:
        q_ref, k_ref, v_ref, s_ref, z_ref, *gates_refs, out_ref = refs
        gates_ref: Any
        gates_ref, steep_ref = gates_refs if gated else (None, None)

        def load_piece(item: Item) -> None:
            kv_head = lax.div(item.head, group_size)

            @pl.when(item.number > 0)
            def _() -> None:
                plgpu.barrier_wait(z_free)
                plgpu.barrier_wait(s_free)

            for half in range(2):
                head, own = frame.head_of(spec, kv_head, half), frame.columns_of(spec, half)
                for ref, start, barrier in ((z_ref, z_s, z_loaded), (s_ref, s_s, s_loaded)):
                    source = ref.at[item.batch, head, item.piece, own]
                    plgpu.copy_gmem_to_smem(source, start.at[half], barrier)

            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(chunk)
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                frame.wait_until_free(free, step, STAGES)
                for ref, own, head in ((k_ref, k_s, kv_head), (q_ref, q_s, item.head)):
                    frame.copy_tile(spec, ref, item, rows, head, own, slot, loaded)
                frame.wait_until_free(v_free, step, V_STAGES)
                if gated:
                    of_keys = item._replace(head=kv_head)
                    frame.copy_vector(spec, gates_ref, of_keys, rows, gates_s, v_slot, v_loaded)
                for half in range(2):
                    source = part(spec, v_ref, item, rows, kv_head, half)
                    plgpu.copy_gmem_to_smem(source, v_s.at[v_slot, half], v_loaded.at[v_slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def map_piece(item: Item, half: int) -> None:
            z_rows, adds = z_rows_s.at[half], adds_s.at[half]
            plgpu.barrier_wait(z_loaded)
            totals = frame.in_columns(load(z_s.at[half], OF_ROWS), ALIKE)  # z
            plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
            plgpu.barrier_arrive(z_free)

            def map_chunk(chunk: Any, carried: Any) -> Any:
                totals, to_end = carried
                step = item.before + chunk
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                own_q, own_k = (frame.half_of(spec, tiles, slot, half) for tiles in (q_s, k_s))
                plgpu.barrier_wait(v_loaded.at[v_slot])
                gates = of_keys = reads = None
                if gated:
                    gates = frame.gates_of(frame.rows_in(spec, gates_s, v_slot, half))
                    totals, to_end = totals * (to_end * gates.to_middle()), gates.from_middle()
                    of_keys = gates.up_to_middle()
                    reads = gates.if_steep(gates.of(OF_ROWS))
                    left = gates.if_steep(gates.last - gates.of(OF_ROWS))
                    frame.store_transposed(adds, frame.in_columns(left, ALIKE).astype(BF16))
                frame.store_transposed(z_rows, totals.astype(BF16))
                if gates is not None:
                    totals = totals * gates.if_steep(gates.last)
                plgpu.barrier_wait(loaded.at[slot])
                frame.map_in_place(own_q)
                frame.map_keys_in_place(spec, own_k, half, of_keys)
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                if spec.normalize:
                    den, totals = multiply(
                        (frame.zeros(C, ALIKE), [(own_q, z_rows.T)]),
                        (totals, [(own_k.T, adds.T)]),
                    )
                    den = jnp.sum(den, axis=1) / ALIKE
                    den_s.at[v_slot, half][...] = den if reads is None else den * reads
                    plgpu.barrier_arrive(den_known.at[v_slot])
                plgpu.barrier_arrive(free.at[slot])
                plgpu.barrier_arrive(v_free.at[v_slot])
                return totals, to_end

            lax.fori_loop(0, item.chunks, map_chunk, (totals, jnp.float32(1)))

        def multiply_piece(item: Item) -> None:
            half = frame.group()
            plgpu.barrier_wait(s_loaded)
            S = load(s_s.at[half]).astype(F32)  # [HALF, F]

            def multiply_chunk(some_steep: bool, chunk: Any, carried: Any) -> Any:
                S, to_end = carried
                step = item.before + chunk
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                out_slot = slot_of(step, OUT_SLOTS)
                q, k = (frame.head_in(spec, tiles, slot, half) for tiles in (q_s, k_s))
                values = v_s.at[v_slot, half]
                gates: Any = None

                def products(S: jax.Array, added: Any) -> Any:
                    return multiply(
                        (frame.zeros(C, C), [(q, k.T)]),
                        (frame.zeros(C, HALF), [(q, s_s.at[half].T)]),
                        (S, [(added, k)]),
                    )

                def when_steep() -> Any:
                    added = frame.times_rows(values, gates.left(OF_COLUMNS))
                    w, out, total = products(S * jnp.exp2(gates.last), added)
                    reads = frame.in_columns(jnp.exp2(gates.of(OF_ROWS)), HALF)
                    return w * gates.of_pairs(queries=0), out * reads, total

                if gated:
                    plgpu.barrier_wait(v_loaded.at[v_slot])
                    gates = frame.gates_of(frame.rows_in(spec, gates_s, v_slot, half), some_steep)
                    S, to_end = S * (to_end * gates.to_middle()), gates.from_middle()
                s_s.at[half][...] = S.astype(BF16)
                if not gated:
                    plgpu.barrier_wait(v_loaded.at[v_slot])
                plgpu.commit_smem()
                plgpu.barrier_wait(mapped.at[slot])

                def otherwise() -> Any:
                    return products(S, values.T)

                w, out, S = gates.either(when_steep, otherwise) if gated else otherwise()
                plgpu.barrier_arrive(free.at[slot])
                w = jnp.where(frame.position(0) >= frame.position(1), w, 0.0)
                # Rounded in pairs: behind the choice each would be by itself.
                w = frame.rounded(lax.optimization_barrier(w))
                (out,) = multiply((out, [(w, values)]))
                lasting: Any = jnp.exp2(gates.since_middle()) if gated else 1.0
                factor = spec.scale * lasting
                if spec.normalize:
                    den = jnp.sum(w.astype(F32), axis=1)
                    plgpu.barrier_wait(den_known.at[v_slot])
                    for own in range(2) if heads == 1 else (half,):
                        den = den + load(den_s.at[v_slot, own], OF_ROWS)
                    factor = lasting / jnp.maximum(den * lasting, spec.eps)
                if gated or spec.normalize:
                    factor = frame.in_columns(factor, HALF)
                plgpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
                out_s.at[half, out_slot][...] = (out * factor).astype(BF16)
                plgpu.commit_smem()  # also what was read of the gates
                plgpu.barrier_arrive(v_free.at[v_slot])
                plgpu.copy_smem_to_gmem(
                    out_s.at[half, out_slot],
                    part(spec, out_ref, item, item.rows(chunk), item.head, half),
                )
                return S, to_end

            def multiply_chunks(some_steep: bool) -> None:
                one = functools.partial(multiply_chunk, some_steep)
                lax.fori_loop(0, item.chunks, one, (S, jnp.float32(1)))

            frame.each_chunk(steep_ref, item, lax.div(item.head, group_size), multiply_chunks)
            plgpu.barrier_arrive(s_free)

        @pl.when(frame.group() == MEMORY)
        def _memory() -> None:
            frame.set_registers(MEMORY_REGISTERS, WARPGROUPS)
            steps = deal.each(load_piece)
            plgpu.barrier_wait(z_free)
            plgpu.barrier_wait(s_free)
            frame.await_the_last(free, steps, STAGES)
            frame.await_the_last(v_free, steps, V_STAGES)

        for half in range(2):

            @pl.when(frame.group() == FEATURES + half)
            def _features(half: int = half) -> None:
                frame.set_registers(FEATURES_REGISTERS, WARPGROUPS)
                if not gated:
                    frame.store_transposed(adds_s.at[half], frame.ones(C, ALIKE))
                deal.each(lambda item: map_piece(item, half))

        @pl.when(frame.group() < MEMORY)
        def _values() -> None:
            frame.set_registers(VALUES_REGISTERS, WARPGROUPS)
            deal.each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    out_type = jax.ShapeDtypeStruct(frame.sequence_shape(spec, spec.H), BF16)
    arrays = (q, k, v, s, z) if gates is None or steep is None else (q, k, v, s, z, gates, steep)
    return frame.launch(body, "output", deal, out_type, scratch, arrays, warpgroups=WARPGROUPS)
