"""The sums of each piece of queries, R = sum_i g_i phi'_i^T [V, F] and u = -sum_i e_i phi'_i [F].

With phi'_i = phi(q_i) inverse_i; g, inverse and e are those of `query_gradient.py`.

    memory    loads chunks of q, g, inverse and e
    features  maps q in place, times inverse, and adds up u
    values    each a half of V of R, in registers

u is kept transposed, [F, 8]: phi'^T e costs an eighth of what e^T phi' would. Half of the columns
are of e rounded, half of what that left off.
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
    LOG2_E,
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


def map_queries(q_ref: Any, inverse_ref: Any) -> None:
    """phi(q_i) inverse_i in q's place."""
    inverse = load(inverse_ref, OF_ROWS)
    x = load(q_ref).astype(F32)
    # max(x + 1, exp(min(x, 0))) inverse, of which the last factor is no instruction of its own.
    exponent = jnp.minimum(x, 0.0) * LOG2_E + frame.in_columns(jnp.log(inverse) * LOG2_E, F)
    factor = frame.in_columns(inverse, F)
    q_ref[...] = jnp.maximum(x * factor + factor, jnp.exp2(exponent)).astype(BF16)


def spread(e_ref: Any, minus_e_ref: Any) -> None:
    """-e in the rows of minus_e [C, C], of which 8 are read: rounded, and what that left off."""
    e = -frame.in_rows(load(e_ref, OF_COLUMNS), C)
    left = e - frame.rounded(e).astype(F32)
    minus_e_ref[...] = frame.rounded(jnp.where(frame.position(0) % 2 == 0, e, left))


def query_sums(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    q: jax.Array,
    g: jax.Array,
    inverse: jax.Array,
    e: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """R [B, H, P, V, F] and u [B, H, P, F], float32."""
    scratch = dict(
        q_s=shared(STAGES, C, F),
        g_s=shared(STAGES, 2, C, HALF),
        inverse_s=plgpu.SMEM((STAGES, C), F32),
        e_s=plgpu.SMEM((STAGES, C), F32),
        minus_e_s=shared(C, C),
        r_s=shared(2, HALF, F, dtype=F32),
        u_s=plgpu.SMEM((F,), F32),
        loaded=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        g_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        mapped=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
    )

    def body(
        q_ref: Any,
        g_ref: Any,
        inverse_ref: Any,
        e_ref: Any,
        r_ref: Any,
        u_ref: Any,
        *,
        q_s: Any,
        g_s: Any,
        inverse_s: Any,
        e_s: Any,
        minus_e_s: Any,
        r_s: Any,
        u_s: Any,
        loaded: Any,
        g_loaded: Any,
        mapped: Any,
        free: Any,
    ) -> None:
        def load_piece(item: Item) -> None:
            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(chunk)
                slot = slot_of(step, STAGES)
                frame.wait_until_free(free, step, STAGES)
                for source, own in (
                    (part(spec, q_ref, item, rows, item.head), q_s),
                    (inverse_ref.at[item.batch, item.head, rows], inverse_s),
                    (e_ref.at[item.batch, item.head, rows], e_s),
                ):
                    plgpu.copy_gmem_to_smem(source, own.at[slot], loaded.at[slot])
                for half in range(2):
                    source = part(spec, g_ref, item, rows, item.head, half)
                    plgpu.copy_gmem_to_smem(source, g_s.at[slot, half], g_loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def map_piece(item: Item) -> None:
            def map_chunk(chunk: Any, parts: jax.Array) -> jax.Array:
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                map_queries(q_s.at[slot], inverse_s.at[slot])
                spread(e_s.at[slot], minus_e_s)
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                minus_e = minus_e_s.at[pl.ds(0, ALIKE)]
                (parts,) = multiply((parts, [(q_s.at[slot].T, minus_e.T)]))
                plgpu.barrier_arrive(free.at[slot])
                return parts

            parts = lax.fori_loop(0, item.chunks, map_chunk, frame.zeros(F, ALIKE))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            u_s[...] = frame.of_parts(parts)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(u_s, u_ref.at[item.batch, item.head, item.piece])

        def multiply_piece(item: Item) -> None:
            half = frame.group()

            def multiply_chunk(chunk: Any, total: jax.Array) -> jax.Array:
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(mapped.at[slot])
                plgpu.barrier_wait(g_loaded.at[slot])
                (total,) = multiply((total, [(g_s.at[slot, half].T, q_s.at[slot])]))
                plgpu.barrier_arrive(free.at[slot])
                return total

            total = lax.fori_loop(0, item.chunks, multiply_chunk, frame.zeros(HALF, F))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            r_s.at[half][...] = total
            plgpu.commit_smem()
            rows = pl.ds(half * HALF, HALF)
            plgpu.copy_smem_to_gmem(
                r_s.at[half], r_ref.at[item.batch, item.head, item.piece, rows]
            )

        @pl.when(frame.group() == MEMORY)
        def _memory() -> None:
            frame.set_registers(frame.MEMORY_REGISTERS)
            steps = deal.each(load_piece)
            frame.await_the_last(free, steps, STAGES)

        @pl.when(frame.group() == FEATURES)
        def _features() -> None:
            frame.set_registers(FEATURES_REGISTERS)
            deal.each(map_piece)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(frame.group() < MEMORY)
        def _values() -> None:
            frame.set_registers(VALUES_REGISTERS)
            deal.each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    out_type = (
        jax.ShapeDtypeStruct((spec.B, spec.H, deal.pieces, V, F), F32),
        jax.ShapeDtypeStruct((spec.B, spec.H, deal.pieces, F), F32),
    )
    return frame.launch(body, "query_sums", deal, out_type, scratch, (q, g, inverse, e))
