"""The causal output.

Per piece, with S [V, F] (bfloat16) and z [F] (float32) of the keys before it:

    w[i, j] = phi(q_i) . phi(k_j) for j <= i of the same chunk, else 0
    out_i = (phi(q_i) S^T + sum_j w[i, j] v_j) / max(phi(q_i) . z + sum_j w[i, j], eps)
    S += v^T phi(k),  z += sum_j phi(k_j)          after each chunk

    memory    loads S, z of a piece and its chunks, as slots come free, across pieces
    features  maps q and k in place; z in every column of a tile [F, 8]; den_i = phi(q_i) . z
    values    each a half of V: S_half [64, F] float32 in registers, w, out_half

so the state is loaded once for a piece and carried through its chunks. Both halves compute w: that
is cheaper than to hand it over.

With a decay, of whose logarithms to base 2 G_i is the sum from the chunk's first row to row i:

    w[i, j] carries exp2(G_i - G_j); out_i and its denominator read S and z times exp2(G_i)
    S = exp2(G_C) S + (exp2(G_C - G_j) v_j)^T phi(k_j), z alike    for the chunk's last row C

The state's part of out_i is scaled in its accumulator, before w v is added to it; v is scaled in
registers by the warpgroup that reads that half. q and k are done with after the first three
products, S's own among them.
"""

from __future__ import annotations

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
    F,
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
VALUES_REGISTERS, FEATURES_REGISTERS, MEMORY_REGISTERS = 192, 96, 32


def output(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    z: jax.Array,
    gates: jax.Array | None,
) -> jax.Array:
    """out, of s [B, G, P or more, V, F] in bfloat16 and z [B, G, P or more, F] in float32, the sums
    ahead of each piece; gates: [B, G, T up to a whole chunk], float32."""
    group_size, gated = spec.H // spec.G, gates is not None

    scratch = dict(
        q_s=shared(STAGES, C, F),
        k_s=shared(STAGES, C, F),
        v_s=shared(V_STAGES, 2, C, HALF),
        gates_s=plgpu.SMEM((V_STAGES, C), F32),
        s_s=shared(2, HALF, F),
        out_s=shared(2, OUT_SLOTS, C, HALF),
        z_s=plgpu.SMEM((F,), F32),
        den_s=plgpu.SMEM((V_STAGES, C), F32),
        z_rows_s=shared(ALIKE, F),
        adds_s=shared(ALIKE, C),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        v_loaded=plgpu.Barrier(num_arrivals=2 + gated, num_barriers=V_STAGES),
        mapped=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        den_known=plgpu.Barrier(num_arrivals=1, num_barriers=V_STAGES),
        free=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        v_free=plgpu.Barrier(num_arrivals=3, num_barriers=V_STAGES),
        s_loaded=plgpu.Barrier(num_arrivals=2),
        s_free=plgpu.Barrier(num_arrivals=2),
        z_loaded=plgpu.Barrier(),
        z_free=plgpu.Barrier(),
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
        q_ref, k_ref, v_ref, s_ref, z_ref, *gates_ref, out_ref = refs

        def load_piece(item: Item) -> None:
            kv_head = lax.div(item.head, group_size)

            @pl.when(item.number > 0)
            def _() -> None:
                plgpu.barrier_wait(z_free)
                plgpu.barrier_wait(s_free)

            plgpu.copy_gmem_to_smem(z_ref.at[item.batch, kv_head, item.piece], z_s, z_loaded)
            for half in range(2):
                rows = pl.ds(half * HALF, HALF)
                plgpu.copy_gmem_to_smem(
                    s_ref.at[item.batch, kv_head, item.piece, rows], s_s.at[half], s_loaded
                )

            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(chunk)
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                frame.wait_until_free(free, step, STAGES)
                for ref, own, head in ((k_ref, k_s, kv_head), (q_ref, q_s, item.head)):
                    source = part(spec, ref, item, rows, head)
                    plgpu.copy_gmem_to_smem(source, own.at[slot], loaded.at[slot])
                frame.wait_until_free(v_free, step, V_STAGES)
                for ref in gates_ref:
                    source = ref.at[item.batch, kv_head, rows]
                    plgpu.copy_gmem_to_smem(source, gates_s.at[v_slot], v_loaded.at[v_slot])
                for half in range(2):
                    source = part(spec, v_ref, item, rows, kv_head, half)
                    plgpu.copy_gmem_to_smem(source, v_s.at[v_slot, half], v_loaded.at[v_slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def map_piece(item: Item) -> None:
            plgpu.barrier_wait(z_loaded)
            totals = frame.in_columns(load(z_s, OF_ROWS), ALIKE)  # z
            plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
            plgpu.barrier_arrive(z_free)

            def map_chunk(chunk: Any, totals: jax.Array) -> jax.Array:
                step = item.before + chunk
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                frame.store_transposed(z_rows_s, totals.astype(BF16))
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.barrier_wait(v_loaded.at[v_slot])
                own = load(gates_s.at[v_slot], OF_ROWS) if gated else None
                if own is not None:
                    adds, keeps = frame.of_key(own, gates_s[v_slot, C - 1])
                    frame.store_transposed(adds_s, frame.in_columns(adds, ALIKE).astype(BF16))
                    totals = totals * keeps
                frame.map_in_place(q_s.at[slot])
                frame.map_in_place(k_s.at[slot])
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                if spec.normalize:
                    den, totals = multiply(
                        (frame.zeros(C, ALIKE), [(q_s.at[slot], z_rows_s.T)]),
                        (totals, [(k_s.at[slot].T, adds_s.T)]),
                    )
                    den = jnp.sum(den, axis=1) / ALIKE
                    den_s.at[v_slot][...] = den if own is None else den * jnp.exp2(own)
                    plgpu.barrier_arrive(den_known.at[v_slot])
                plgpu.barrier_arrive(free.at[slot])
                plgpu.barrier_arrive(v_free.at[v_slot])
                return totals

            lax.fori_loop(0, item.chunks, map_chunk, totals)

        def multiply_piece(item: Item) -> None:
            half = frame.group()
            plgpu.barrier_wait(s_loaded)
            S = load(s_s.at[half]).astype(F32)  # [HALF, F]

            def multiply_chunk(chunk: Any, S: jax.Array) -> jax.Array:
                step = item.before + chunk
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                out_slot = slot_of(step, OUT_SLOTS)
                values = v_s.at[v_slot, half]
                added: Any = values.T
                s_s.at[half][...] = S.astype(BF16)
                plgpu.barrier_wait(v_loaded.at[v_slot])
                if gated:
                    adds, keeps = frame.of_key(
                        load(gates_s.at[v_slot], OF_COLUMNS), gates_s[v_slot, C - 1]
                    )
                    added = frame.load_transposed(values).astype(F32)
                    added = frame.rounded(added * frame.in_rows(adds, HALF))
                    S = S * keeps
                plgpu.commit_smem()
                plgpu.barrier_wait(mapped.at[slot])

                w, out, S = multiply(
                    (frame.zeros(C, C), [(q_s.at[slot], k_s.at[slot].T)]),
                    (frame.zeros(C, HALF), [(q_s.at[slot], s_s.at[half].T)]),
                    (S, [(added, k_s.at[slot])]),
                )
                plgpu.barrier_arrive(free.at[slot])
                if gated:
                    # Read again: there are no registers to keep them in.
                    to = load(gates_s.at[v_slot], OF_ROWS)
                    since = load(gates_s.at[v_slot], OF_COLUMNS)
                    out = out * frame.in_columns(jnp.exp2(to), HALF)
                    # Infinite where a key is not seen, perhaps.
                    w = w * jnp.exp2(frame.in_columns(to, C) - frame.in_rows(since, C))
                w = jnp.where(frame.position(0) >= frame.position(1), w, 0.0)
                # Rounded in pairs: behind the choice each would be by itself.
                w = frame.rounded(lax.optimization_barrier(w))
                (out,) = multiply((out, [(w, values)]))
                factor: Any = spec.scale
                if spec.normalize:
                    den = jnp.sum(w.astype(F32), axis=1)
                    plgpu.barrier_wait(den_known.at[v_slot])
                    den = den + load(den_s.at[v_slot], OF_ROWS)
                    factor = frame.in_columns(1.0 / jnp.maximum(den, spec.eps), HALF)
                plgpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
                out_s.at[half, out_slot][...] = (out * factor).astype(BF16)
                plgpu.commit_smem()  # also what was read of the gates
                plgpu.barrier_arrive(v_free.at[v_slot])
                plgpu.copy_smem_to_gmem(
                    out_s.at[half, out_slot],
                    part(spec, out_ref, item, item.rows(chunk), item.head, half),
                )
                return S

            lax.fori_loop(0, item.chunks, multiply_chunk, S)
            plgpu.barrier_arrive(s_free)

        @pl.when(frame.group() == MEMORY)
        def _memory() -> None:
            frame.set_registers(MEMORY_REGISTERS)
            steps = deal.each(load_piece)
            plgpu.barrier_wait(z_free)
            plgpu.barrier_wait(s_free)
            frame.await_the_last(free, steps, STAGES)
            frame.await_the_last(v_free, steps, V_STAGES)

        @pl.when(frame.group() == FEATURES)
        def _features() -> None:
            frame.set_registers(FEATURES_REGISTERS)
            if not gated:
                frame.store_transposed(adds_s, frame.ones(C, ALIKE))
            deal.each(map_piece)

        @pl.when(frame.group() < MEMORY)
        def _values() -> None:
            frame.set_registers(VALUES_REGISTERS)
            deal.each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    out_type = jax.ShapeDtypeStruct(frame.sequence_shape(spec, spec.H), BF16)
    arrays = (q, k, v, s, z) if gates is None else (q, k, v, s, z, gates)
    return frame.launch(body, "output", deal, out_type, scratch, arrays)
