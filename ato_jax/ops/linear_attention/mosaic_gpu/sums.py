"""The sums of each piece of keys, S = sum_j v_j phi(k_j)^T [V, F] and z = sum_j phi(k_j) [F].

    memory    loads chunks of k and v
    features  maps k in place, and adds up z in every row of a tile
    values    each a half of V of S, in registers
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import (
    F32,
    FEATURES,
    HALF,
    MEMORY,
    C,
    F,
    Item,
    V,
    multiply,
    part,
    shared,
    slot_of,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES = 4
VALUES_REGISTERS, FEATURES_REGISTERS = 176, 136
# A tile has at least so many rows: z is stored in as many alike.
ALIKE = 8


def sums(
    spec: LinearAttentionSpec, deal: frame.Deal, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """kv [B, G, P, V, F] and k_sum [B, G, P, F], float32."""
    scratch = dict(
        k_s=shared(STAGES, C, F),
        v_s=shared(STAGES, 2, C, HALF),
        s_s=shared(2, HALF, F, dtype=F32),
        z_s=shared(C, F, dtype=F32),
        loaded=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        v_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        mapped=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
    )

    def body(
        k_ref: Any,
        v_ref: Any,
        s_ref: Any,
        z_ref: Any,
        *,
        k_s: Any,
        v_s: Any,
        s_s: Any,
        z_s: Any,
        loaded: Any,
        v_loaded: Any,
        mapped: Any,
        free: Any,
    ) -> None:
        def load_piece(item: Item) -> None:
            def load_chunk(chunk: Any, _: None) -> None:
                step = item.before + chunk
                slot = slot_of(step, STAGES)
                frame.wait_until_free(free, step, STAGES)
                rows = part(spec, k_ref, item, item.rows(chunk), item.head)
                plgpu.copy_gmem_to_smem(rows, k_s.at[slot], loaded.at[slot])
                for half in range(2):
                    rows = part(spec, v_ref, item, item.rows(chunk), item.head, half)
                    plgpu.copy_gmem_to_smem(rows, v_s.at[slot, half], v_loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def map_piece(item: Item) -> None:
            def map_chunk(chunk: Any, totals: jax.Array) -> jax.Array:
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                frame.map_in_place(k_s.at[slot])
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                (totals,) = multiply((totals, [(frame.ones(C, C), k_s.at[slot])]))
                plgpu.barrier_arrive(free.at[slot])
                return totals

            totals = lax.fori_loop(0, item.chunks, map_chunk, frame.zeros(C, F))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            z_s[...] = totals
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                z_s.at[pl.ds(0, ALIKE)], z_ref.at[item.batch, item.head, item.piece]
            )

        def multiply_piece(item: Item) -> None:
            half = frame.group()

            def multiply_chunk(chunk: Any, S: jax.Array) -> jax.Array:
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(mapped.at[slot])
                plgpu.barrier_wait(v_loaded.at[slot])
                (S,) = multiply((S, [(v_s.at[slot, half].T, k_s.at[slot])]))
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
            plgpu.set_max_registers(frame.MEMORY_REGISTERS, action="decrease")
            steps = deal.each(load_piece)
            frame.await_the_last(free, steps, STAGES)

        @pl.when(frame.group() == FEATURES)
        def _features() -> None:
            plgpu.set_max_registers(FEATURES_REGISTERS, action="increase")
            deal.each(map_piece)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(frame.group() < MEMORY)
        def _values() -> None:
            plgpu.set_max_registers(VALUES_REGISTERS, action="increase")
            deal.each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    s, z = frame.launch(
        body,
        "sums",
        deal,
        (
            jax.ShapeDtypeStruct((spec.B, spec.G, deal.pieces, V, F), F32),
            jax.ShapeDtypeStruct((spec.B, spec.G, deal.pieces, ALIKE, F), F32),
        ),
        scratch,
        (k, v),
        reduction_bytes=512,
    )
    return s, z[:, :, :, 0]
