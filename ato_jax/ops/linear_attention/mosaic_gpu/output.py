"""The causal output.

Per piece, with S [V, F] (bf16) and z [F] (float32) of the keys before it:

    w[i, j] = phi(q_i) . phi(k_j) for j <= i of the same chunk, else 0
    out_i = (phi(q_i) S^T + sum_j w[i, j] v_j) / max(phi(q_i) . z + sum_j w[i, j], eps)
    S += v^T phi(k),  z += sum_j phi(k_j)          after each chunk

    memory    loads S, z of a piece and its chunks, as slots come free, across pieces
    features  maps q and k in place; den_i = phi(q_i) . z; keeps z in every row of a tile
    values    each a half of V: S_half [64, F] float32 in registers, w, out_half

so the state is loaded once for a piece and carried through its chunks. Both halves compute w: that
is cheaper than to hand it over.
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

# Slots of q and k, which are loaded, mapped and multiplied; of v; and of what is stored.
STAGES, V_STAGES, OUT_SLOTS = 3, 3, 2
VALUES_REGISTERS, FEATURES_REGISTERS = 168, 152


def output(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    z: jax.Array,
) -> jax.Array:
    """out, of s [B, G, P or more, V, F] in bfloat16 and z [B, G, P or more, F] in float32, the sums
    ahead of each piece."""
    group_size = spec.H // spec.G

    scratch = dict(
        q_s=shared(STAGES, C, F),
        k_s=shared(STAGES, C, F),
        v_s=shared(V_STAGES, 2, C, HALF),
        s_s=shared(2, HALF, F),
        out_s=shared(2, OUT_SLOTS, C, HALF),
        z_s=plgpu.SMEM((F,), F32),
        den_s=plgpu.SMEM((STAGES, C), F32),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        v_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=V_STAGES),
        mapped=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        v_free=plgpu.Barrier(num_arrivals=2, num_barriers=V_STAGES),
        s_loaded=plgpu.Barrier(num_arrivals=2),
        s_free=plgpu.Barrier(num_arrivals=2),
        z_loaded=plgpu.Barrier(),
        z_free=plgpu.Barrier(),
    )

    def body(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        s_ref: Any,
        z_ref: Any,
        out_ref: Any,
        *,
        q_s: Any,
        k_s: Any,
        v_s: Any,
        s_s: Any,
        out_s: Any,
        z_s: Any,
        den_s: Any,
        loaded: Any,
        v_loaded: Any,
        mapped: Any,
        free: Any,
        v_free: Any,
        s_loaded: Any,
        s_free: Any,
        z_loaded: Any,
        z_free: Any,
    ) -> None:
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
                step = item.before + chunk
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                frame.wait_until_free(free, step, STAGES)
                for ref, own, head in ((k_ref, k_s, kv_head), (q_ref, q_s, item.head)):
                    rows = part(spec, ref, item, item.rows(chunk), head)
                    plgpu.copy_gmem_to_smem(rows, own.at[slot], loaded.at[slot])
                frame.wait_until_free(v_free, step, V_STAGES)
                for half in range(2):
                    rows = part(spec, v_ref, item, item.rows(chunk), kv_head, half)
                    plgpu.copy_gmem_to_smem(rows, v_s.at[v_slot, half], v_loaded.at[v_slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def map_piece(item: Item) -> None:
            plgpu.barrier_wait(z_loaded)
            z = load(z_s, OF_COLUMNS)
            plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
            plgpu.barrier_arrive(z_free)

            def map_chunk(chunk: Any, totals: jax.Array) -> jax.Array:
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                phi_q = frame.map_in_place(q_s.at[slot])
                if spec.normalize:
                    den_s.at[slot][...] = jnp.sum(phi_q.astype(F32) * totals, axis=1)
                frame.map_in_place(k_s.at[slot])
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                if spec.normalize:
                    (totals,) = multiply((totals, [(frame.ones(C, C), k_s.at[slot])]))
                plgpu.barrier_arrive(free.at[slot])
                return totals

            lax.fori_loop(0, item.chunks, map_chunk, frame.in_rows(z, C))

        def multiply_piece(item: Item) -> None:
            half = frame.group()
            plgpu.barrier_wait(s_loaded)
            S = load(s_s.at[half]).astype(F32)  # [HALF, F]

            def multiply_chunk(chunk: Any, S: jax.Array) -> jax.Array:
                step = item.before + chunk
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                out_slot = slot_of(step, OUT_SLOTS)
                s_s.at[half][...] = S.astype(BF16)
                plgpu.commit_smem()
                plgpu.barrier_wait(mapped.at[slot])

                (w,) = multiply((frame.zeros(C, C), [(q_s.at[slot], k_s.at[slot].T)]))
                w = jnp.where(frame.position(0) >= frame.position(1), w, 0.0)
                w = frame.rounded(w)
                factor: Any = spec.scale
                if spec.normalize:
                    den = jnp.sum(w.astype(F32), axis=1) + load(den_s.at[slot], OF_ROWS)
                    factor = frame.in_columns(1.0 / jnp.maximum(den, spec.eps), HALF)
                plgpu.barrier_wait(v_loaded.at[v_slot])
                values = v_s.at[v_slot, half]
                out, S = multiply(
                    (frame.zeros(C, HALF), [(q_s.at[slot], s_s.at[half].T), (w, values)]),
                    (S, [(values.T, k_s.at[slot])]),
                )
                plgpu.barrier_arrive(free.at[slot])
                plgpu.barrier_arrive(v_free.at[v_slot])
                plgpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
                out_s.at[half, out_slot][...] = (out * factor).astype(BF16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    out_s.at[half, out_slot],
                    part(spec, out_ref, item, item.rows(chunk), item.head, half),
                )
                return S

            lax.fori_loop(0, item.chunks, multiply_chunk, S)
            plgpu.barrier_arrive(s_free)

        @pl.when(frame.group() == MEMORY)
        def _memory() -> None:
            plgpu.set_max_registers(frame.MEMORY_REGISTERS, action="decrease")
            steps = deal.each(load_piece)
            plgpu.barrier_wait(z_free)
            plgpu.barrier_wait(s_free)
            frame.await_the_last(free, steps, STAGES)
            frame.await_the_last(v_free, steps, V_STAGES)

        @pl.when(frame.group() == FEATURES)
        def _features() -> None:
            plgpu.set_max_registers(FEATURES_REGISTERS, action="increase")
            deal.each(map_piece)

        @pl.when(frame.group() < MEMORY)
        def _values() -> None:
            plgpu.set_max_registers(VALUES_REGISTERS, action="increase")
            deal.each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    out_type = jax.ShapeDtypeStruct(frame.sequence_shape(spec, spec.H), BF16)
    return frame.launch(body, "output", deal, out_type, scratch, (q, k, v, s, z))
