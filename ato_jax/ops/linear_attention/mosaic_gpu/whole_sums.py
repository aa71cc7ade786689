"""The sums of each piece of keys, S = sum_j phi(k_j) v_j^T [F, V] and z = sum_j phi(k_j) [F].

    memory    loads chunks of k and v
    sums      each a half of F: phi(k)^T [64, C] in registers, S_half, z in all columns of [64, 8]

As k is mapped by who multiplies it, nothing waits but for loads. Rows beyond the end are read as
zeros, of which the features are 1: z leaves them out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import (
    ALIKE,
    BF16,
    F32,
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

STAGES = 5


def whole_sums(
    spec: LinearAttentionSpec, deal: frame.Deal, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """kv [B, G, P, F, V] and k_sum [B, G, P, F], float32."""
    scratch = dict(
        k_s=shared(STAGES, 2, C, HALF),
        v_s=shared(STAGES, C, V),
        counted_s=shared(2, ALIKE, C),
        s_s=shared(2, HALF, V // 2, dtype=F32),
        z_s=plgpu.SMEM((2, HALF), F32),
        loaded=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        counted_loaded=plgpu.Barrier(num_arrivals=2),
        free=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    )

    def body(
        k_ref: Any,
        v_ref: Any,
        counted_ref: Any,
        s_ref: Any,
        z_ref: Any,
        *,
        k_s: Any,
        v_s: Any,
        counted_s: Any,
        s_s: Any,
        z_s: Any,
        loaded: Any,
        counted_loaded: Any,
        free: Any,
    ) -> None:
        def load_piece(item: Item) -> None:
            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(chunk)
                slot = slot_of(step, STAGES)
                frame.wait_until_free(free, step, STAGES)
                for half in range(2):
                    source = part(spec, k_ref, item, rows, item.head, half)
                    plgpu.copy_gmem_to_smem(source, k_s.at[slot, half], loaded.at[slot])
                source = part(spec, v_ref, item, rows, item.head)
                plgpu.copy_gmem_to_smem(source, v_s.at[slot], loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def sum_piece(item: Item) -> None:
            half = frame.group()

            def sum_chunk(chunk: Any, sums: Any) -> Any:
                S, totals = sums
                slot = slot_of(item.before + chunk, STAGES)
                behind = item.first_row + (chunk + 1) * C
                counted = counted_s.at[(behind > deal.length).astype(jnp.int32)]
                plgpu.barrier_wait(loaded.at[slot])
                phi_k = frame.features_of(frame.load_transposed(k_s.at[slot, half]))  # [HALF, C]
                sums = multiply((S, [(phi_k, v_s.at[slot])]), (totals, [(phi_k, counted.T)]))
                plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
                plgpu.barrier_arrive(free.at[slot])
                return sums

            start = frame.zeros(HALF, V), frame.zeros(HALF, ALIKE)
            S, totals = lax.fori_loop(0, item.chunks, sum_chunk, start)
            of_piece, rows = (item.batch, item.head, item.piece), pl.ds(half * HALF, HALF)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            z_s.at[half][...] = jnp.sum(totals, axis=1) / ALIKE
            for column in range(0, V, V // 2):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                s_s.at[half][...] = S[:, column : column + V // 2]
                plgpu.commit_smem()
                columns = pl.ds(column, V // 2)
                plgpu.copy_smem_to_gmem(s_s.at[half], s_ref.at[(*of_piece, rows, columns)])
            plgpu.copy_smem_to_gmem(z_s.at[half], z_ref.at[(*of_piece, rows)])

        @pl.when(frame.group() == MEMORY)
        def _memory() -> None:
            for number in range(2):
                plgpu.copy_gmem_to_smem(
                    counted_ref.at[number], counted_s.at[number], counted_loaded
                )
            steps = deal.each(load_piece)
            frame.await_the_last(free, steps, STAGES)

        @pl.when(frame.group() < MEMORY)
        def _sums() -> None:
            plgpu.barrier_wait(counted_loaded)
            deal.each(sum_piece)
            plgpu.wait_smem_to_gmem(0)

    # 1 for each row of a chunk; of the last one, which may end before it is whole.
    counted = np.ones((2, ALIKE, C), BF16)
    counted[1, :, deal.length - (pl.cdiv(deal.length, C) - 1) * C :] = 0
    out_type = (
        jax.ShapeDtypeStruct((spec.B, spec.G, deal.pieces, F, V), F32),
        jax.ShapeDtypeStruct((spec.B, spec.G, deal.pieces, F), F32),
    )
    return frame.launch(body, "whole_sums", deal, out_type, scratch, (k, v, counted))
