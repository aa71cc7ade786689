"""The sums of each piece of keys, S = sum_j v_j phi(k_j)^T [V, F] and z = sum_j phi(k_j) [F].

    memory    loads chunks of k and v
    features  maps k in place, and adds up z in every column of a tile [F, 8]
    values    each a half of V of S, in registers

With a decay, as in `output.py`, they are what is left of them behind the piece.
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
    V,
    load,
    multiply,
    part,
    shared,
    slot_of,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES = 4
VALUES_REGISTERS, FEATURES_REGISTERS = 176, 136


def sums(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    k: jax.Array,
    v: jax.Array,
    gates: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """kv [B, G, P, V, F] and k_sum [B, G, P, F], float32."""
    gated = gates is not None
    scratch = dict(
        k_s=shared(STAGES, C, F),
        v_s=shared(STAGES, 2, C, HALF),
        s_s=shared(2, HALF, F, dtype=F32),
        z_s=plgpu.SMEM((F,), F32),
        gates_s=plgpu.SMEM((STAGES, C), F32),
        adds_s=shared(ALIKE, C),
        loaded=plgpu.Barrier(num_arrivals=1 + gated, num_barriers=STAGES),
        v_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        mapped=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
    )

    def body(
        *refs: Any,
        k_s: Any,
        v_s: Any,
        s_s: Any,
        z_s: Any,
        gates_s: Any,
        adds_s: Any,
        loaded: Any,
        v_loaded: Any,
        mapped: Any,
        free: Any,
    ) -> None:
        k_ref, v_ref, *gates_ref, s_ref, z_ref = refs

        def load_piece(item: Item) -> None:
            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(chunk)
                slot = slot_of(step, STAGES)
                frame.wait_until_free(free, step, STAGES)
                source = part(spec, k_ref, item, rows, item.head)
                plgpu.copy_gmem_to_smem(source, k_s.at[slot], loaded.at[slot])
                for ref in gates_ref:
                    source = ref.at[item.batch, item.head, rows]
                    plgpu.copy_gmem_to_smem(source, gates_s.at[slot], loaded.at[slot])
                for half in range(2):
                    source = part(spec, v_ref, item, rows, item.head, half)
                    plgpu.copy_gmem_to_smem(source, v_s.at[slot, half], v_loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def map_piece(item: Item) -> None:
            def map_chunk(chunk: Any, totals: jax.Array) -> jax.Array:
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                if gated:
                    own = load(gates_s.at[slot], OF_ROWS)
                    adds, keeps = frame.of_key(own, gates_s[slot, C - 1])
                    frame.store_transposed(adds_s, frame.in_columns(adds, ALIKE).astype(BF16))
                    totals = totals * keeps
                frame.map_in_place(k_s.at[slot])
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                (totals,) = multiply((totals, [(k_s.at[slot].T, adds_s.T)]))
                plgpu.barrier_arrive(free.at[slot])
                return totals

            totals = lax.fori_loop(0, item.chunks, map_chunk, frame.zeros(F, ALIKE))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            z_s[...] = jnp.sum(totals, axis=1) / ALIKE
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(z_s, z_ref.at[item.batch, item.head, item.piece])

        def multiply_piece(item: Item) -> None:
            half = frame.group()

            def multiply_chunk(chunk: Any, S: jax.Array) -> jax.Array:
                slot = slot_of(item.before + chunk, STAGES)
                values = v_s.at[slot, half]
                added: Any = values.T
                plgpu.barrier_wait(v_loaded.at[slot])
                if gated:
                    plgpu.barrier_wait(loaded.at[slot])
                    own = load(gates_s.at[slot], OF_COLUMNS)
                    adds, keeps = frame.of_key(own, gates_s[slot, C - 1])
                    added = frame.load_transposed(values).astype(F32)
                    added = frame.rounded(added * frame.in_rows(adds, HALF))
                    S = S * keeps
                    plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
                plgpu.barrier_wait(mapped.at[slot])
                (S,) = multiply((S, [(added, k_s.at[slot])]))
                plgpu.barrier_arrive(free.at[slot])
                return S

            S = lax.fori_loop(0, item.chunks, multiply_chunk, frame.zeros(HALF, F))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            s_s.at[half][...] = S
            plgpu.commit_smem()
            rows = pl.ds(half * HALF, HALF)
            plgpu.copy_smem_to_gmem(
                s_s.at[half], s_ref.at[item.batch, item.head, item.piece, rows]
            )

        @pl.when(frame.group() == MEMORY)
        def _memory() -> None:
            frame.set_registers(frame.MEMORY_REGISTERS)
            steps = deal.each(load_piece)
            frame.await_the_last(free, steps, STAGES)

        @pl.when(frame.group() == FEATURES)
        def _features() -> None:
            frame.set_registers(FEATURES_REGISTERS)
            if not gated:
                frame.store_transposed(adds_s, frame.ones(C, ALIKE))
            deal.each(map_piece)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(frame.group() < MEMORY)
        def _values() -> None:
            frame.set_registers(VALUES_REGISTERS)
            deal.each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    out_type = (
        jax.ShapeDtypeStruct((spec.B, spec.G, deal.pieces, V, F), F32),
        jax.ShapeDtypeStruct((spec.B, spec.G, deal.pieces, F), F32),
    )
    arrays = (k, v) if gates is None else (k, v, gates)
    return frame.launch(body, "sums", deal, out_type, scratch, arrays)
