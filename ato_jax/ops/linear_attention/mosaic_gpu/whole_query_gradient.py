"""The gradient of queries that see every key, and its sums over the queries, in one pass.

With g the cotangent of out, S [F, V] and z [F] of all keys, and phi'_i = phi(q_i) inverse_i:

    G_i   = g_i S^T                         the gradient of phi(q_i) without normaliser
    den_i = phi(q_i) . z,  inverse_i = 1 / max(den_i, least)
    e_i   = phi(q_i) . G_i / den_i = g_i . out_i,  0 where den_i <= least
    dq_i  = (G_i - e_i z) inverse_i phi'(q_i)
    R = sum_i phi'_i g_i^T [F, V],  u = -sum_i e_i phi'_i [F]     of the piece

Unnormalised, inverse is 1 and e is 0: S comes scaled.

    memory    loads S and z of a head, and chunks of q and g, as slots come free
    dq        two, each all of a chunk: G, e, dq; phi' replaces q
    sums      R and u in registers

e belongs to the G and phi(q) as rounded. It is multiplied as in `query_sums.py`: half of 8 columns
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
    HALF,
    LOG2_E,
    MEMORY,
    OF_COLUMNS,
    OF_ROWS,
    TILE,
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

WORKERS, SUMS = 2, 3  # dq's warpgroups, 0 and 1, and that of the sums
STAGES = 4  # a multiple of the workers
WORKER_REGISTERS, SUMS_REGISTERS = 160, 168
HALVES = slice(0, HALF), slice(HALF, F)
COLUMNS = 32  # of R that are stored at once


def whole_query_gradient(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    q: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
    z_rows: jax.Array,
    least: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq; R [B, H, P, F, V] and u [B, H, P, F], float32. Of s [B, G, F, V] and z_rows
    [B, G, 8, F] in bfloat16, z [B, G, F] and least [B, G, C], all the same, in float32."""
    group_size = spec.H // spec.G
    scratch = dict(
        q_s=shared(STAGES, C, F),
        g_s=shared(STAGES, C, V),
        s_s=shared(F, V),
        z_s=plgpu.SMEM((F,), F32),
        z_rows_s=shared(ALIKE, F),
        least_s=plgpu.SMEM((C,), F32),
        minus_e_s=shared(STAGES, ALIKE, C),
        dq_s=shared(WORKERS, 2, C, HALF),
        r_s=shared(F, COLUMNS, dtype=F32),
        u_s=plgpu.SMEM((F,), F32),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        mapped=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        s_loaded=plgpu.Barrier(num_arrivals=4),
        s_free=plgpu.Barrier(num_arrivals=WORKERS),
    )

    def body(
        q_ref: Any,
        g_ref: Any,
        s_ref: Any,
        z_ref: Any,
        z_rows_ref: Any,
        least_ref: Any,
        dq_ref: Any,
        r_ref: Any,
        u_ref: Any,
        *,
        q_s: Any,
        g_s: Any,
        s_s: Any,
        z_s: Any,
        z_rows_s: Any,
        least_s: Any,
        minus_e_s: Any,
        dq_s: Any,
        r_s: Any,
        u_s: Any,
        loaded: Any,
        mapped: Any,
        free: Any,
        s_loaded: Any,
        s_free: Any,
    ) -> None:
        def load_piece(item: Item) -> None:
            of_head = item.batch, lax.div(item.head, group_size)

            @pl.when(item.number > 0)
            def _() -> None:
                plgpu.barrier_wait(s_free)

            for ref, own in (
                (s_ref, s_s),
                (z_ref, z_s),
                (z_rows_ref, z_rows_s),
                (least_ref, least_s),
            ):
                plgpu.copy_gmem_to_smem(ref.at[of_head], own, s_loaded)

            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(chunk)
                slot = slot_of(step, STAGES)
                frame.wait_until_free(free, step, STAGES)
                for ref, own in ((q_ref, q_s), (g_ref, g_s)):
                    source = part(spec, ref, item, rows, item.head)
                    plgpu.copy_gmem_to_smem(source, own.at[slot], loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def write_piece(item: Item) -> None:
            plgpu.barrier_wait(s_loaded)

            def write_chunk(chunk: Any) -> None:
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                phi_q = frame.features_of(load(q_s.at[slot]))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                # The slopes, where dq will be: there are no registers to keep them in.
                for half, columns in enumerate(HALVES):
                    dq_s.at[frame.group(), half][...] = jnp.minimum(phi_q, 1)[:, columns]
                product = frame.zeros(C, F), [(g_s.at[slot], s_s.T)]
                inverse: Any = None
                e: Any = None
                if spec.normalize:
                    G, den = multiply(product, (frame.zeros(C, ALIKE), [(phi_q, z_rows_s.T)]))
                    den, least = frame.of_parts(den), load(least_s, OF_ROWS)
                    total = jnp.sum(phi_q.astype(F32) * G, axis=1)
                    inverse = 1.0 / jnp.maximum(den, least)
                    e = jnp.where(den > least, total * inverse, 0.0)
                    scale_features(q_s.at[slot], inverse)
                    frame.store_transposed(minus_e_s.at[slot], spread(-e))
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(mapped.at[slot])
                else:
                    (G,) = multiply(product)
                    q_s.at[slot][...] = phi_q
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(mapped.at[slot])
                for half, columns in enumerate(HALVES):
                    dq = G[:, columns]
                    if spec.normalize:
                        z = frame.in_rows(load(z_s.at[pl.ds(columns.start, HALF)], OF_COLUMNS), C)
                        dq -= frame.in_columns(e, HALF) * z
                        dq *= frame.in_columns(inverse, HALF)
                    own_dq = dq_s.at[frame.group(), half]
                    own_dq[...] = (dq * load(own_dq).astype(F32)).astype(BF16)
                plgpu.commit_smem()  # also what was read of z
                for half in range(2):
                    plgpu.copy_smem_to_gmem(
                        dq_s.at[frame.group(), half],
                        part(spec, dq_ref, item, item.rows(chunk), item.head, half),
                    )

            frame.in_turn(item, WORKERS, write_chunk)
            plgpu.barrier_arrive(s_free)

        def sum_piece(item: Item) -> None:
            def sum_chunk(chunk: Any, sums: Any) -> Any:
                total, parts = sums
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(mapped.at[slot])
                features = q_s.at[slot].T
                product = total, [(features, g_s.at[slot])]
                if spec.normalize:
                    total, parts = multiply(product, (parts, [(features, minus_e_s.at[slot].T)]))
                else:
                    (total,) = multiply(product)
                plgpu.barrier_arrive(free.at[slot])
                return total, parts

            start = frame.zeros(F, V), frame.zeros(F, ALIKE)
            total, parts = lax.fori_loop(0, item.chunks, sum_chunk, start)
            of_piece = item.batch, item.head, item.piece
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            u_s[...] = frame.of_parts(parts)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(u_s, u_ref.at[of_piece])
            for column in range(0, V, COLUMNS):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                r_s[...] = total[:, column : column + COLUMNS]
                plgpu.commit_smem()
                columns = pl.ds(column, COLUMNS)
                plgpu.copy_smem_to_gmem(r_s, r_ref.at[(*of_piece, slice(None), columns)])

        @pl.when(frame.group() == MEMORY)
        def _memory() -> None:
            frame.set_registers(frame.MEMORY_REGISTERS)
            steps = deal.each(load_piece)
            plgpu.barrier_wait(s_free)
            frame.await_the_last(free, steps, STAGES)

        @pl.when(frame.group() == SUMS)
        def _sums() -> None:
            frame.set_registers(SUMS_REGISTERS)
            deal.each(sum_piece)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(frame.group() < WORKERS)
        def _dq() -> None:
            frame.set_registers(WORKER_REGISTERS)
            deal.each(write_piece)
            plgpu.wait_smem_to_gmem(0)

    out_type = (
        jax.ShapeDtypeStruct(q.shape, BF16),
        jax.ShapeDtypeStruct((spec.B, spec.H, deal.pieces, F, V), F32),
        jax.ShapeDtypeStruct((spec.B, spec.H, deal.pieces, F), F32),
    )
    arrays = q, g, s, z, z_rows, least
    return frame.launch(body, "whole_query_gradient", deal, out_type, scratch, arrays)


def scale_features(q_ref: Any, inverse: jax.Array) -> None:
    """phi(q_i) inverse_i in q's place, rounded once."""
    x = load(q_ref).astype(F32)
    # max(x + 1, exp(min(x, 0))) inverse, of which the last factor is no instruction of its own.
    exponent = jnp.minimum(x, 0.0) * LOG2_E + frame.in_columns(jnp.log(inverse) * LOG2_E, F)
    factor = frame.in_columns(inverse, F)
    q_ref[...] = jnp.maximum(x * factor + factor, jnp.exp2(exponent)).astype(BF16)


def spread(e: jax.Array) -> jax.Array:
    """e [C] in 8 columns: rounded, and what that left off."""
    e = frame.in_columns(e, ALIKE)
    left = e - frame.rounded(e).astype(F32)
    column = plgpu.broadcasted_iota(jnp.int32, (C, ALIKE), dimension=1, layout=TILE)
    return frame.rounded(jnp.where(column % 2 == 0, e, left))
