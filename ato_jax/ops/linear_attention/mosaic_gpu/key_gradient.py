"""The gradients of the causal output's keys and values, walking from the end.

With phi'_i, R and u as in `query_sums.py`, those of later chunks:

    a[j, i] = phi(k_j) . phi'_i    for i >= j of the same chunk, else 0
    b[j, i] = v_j . g_i - e_i      for i >= j of the same chunk, else 0
    dv_j = R phi(k_j) + sum_i a[j, i] g_i
    dk_j = (R^T v_j + u + sum_i b[j, i] phi'_i) * phi'(k_j)
    R += g^T phi',  u -= sum_i e_i phi'_i      after each chunk

    memory   loads chunks as slots come free, across pieces
    state    maps q in place, times inverse; R and u in registers, published for each chunk
    dv       phi(k), a and dv: phi(k) stays in registers, the left factor of both products
    dk       b and dk

R is whole in one warpgroup: in halves beside dv and dk each would need the other's, every chunk. b
is a difference: what rounding it leaves off is multiplied, too.
"""

from __future__ import annotations

from collections.abc import Callable
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
    LOG2_E,
    OF_COLUMNS,
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
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import PARTS, map_queries, spread
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

DV, DK, STATE = 0, 1, 3  # warpgroups beside MEMORY
# Slots of q, g, inverse and e; and of k and v.
STAGES, K_STAGES = 2, 2
DV_REGISTERS, DK_REGISTERS, STATE_REGISTERS = 144, 144, 200


def in_parts(u: jax.Array) -> jax.Array:
    """u [F] as a sum over columns [F, 8] would leave it."""
    return frame.in_columns(u * (PARTS / ALIKE), ALIKE)


def of_parts(columns: jax.Array) -> jax.Array:
    return jnp.sum(columns, axis=1) / PARTS


def key_gradient(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    inverse: jax.Array,
    e: jax.Array,
    r: jax.Array,
    u: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv, of r [B, H, P, V, F] in bfloat16 and u [B, H, P, F] in float32, the sums behind
    each piece."""
    scratch = dict(
        q_s=shared(STAGES, C, F),
        g_s=shared(STAGES, C, V),
        k_s=shared(K_STAGES, C, F),
        v_s=shared(K_STAGES, C, V),
        r_s=shared(V, F),
        out_s=shared(2, C, F),
        minus_e_s=shared(C, C),
        inverse_s=plgpu.SMEM((STAGES, C), F32),
        e_s=plgpu.SMEM((STAGES, C), F32),
        u_s=plgpu.SMEM((F,), F32),
        u_start_s=plgpu.SMEM((F,), F32),
        loaded=plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
        mapped=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        k_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=K_STAGES),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=K_STAGES),
        start=plgpu.Barrier(num_arrivals=2),
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
        dk_ref: Any,
        dv_ref: Any,
        *,
        q_s: Any,
        g_s: Any,
        k_s: Any,
        v_s: Any,
        r_s: Any,
        out_s: Any,
        minus_e_s: Any,
        inverse_s: Any,
        e_s: Any,
        u_s: Any,
        u_start_s: Any,
        loaded: Any,
        mapped: Any,
        free: Any,
        k_loaded: Any,
        k_free: Any,
        start: Any,
        r_ready: Any,
        r_free: Any,
    ) -> None:
        def load_piece(item: Item) -> None:
            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows_from_the_end(chunk)
                slot, k_slot = slot_of(step, STAGES), slot_of(step, K_STAGES)
                frame.wait_until_free(free, step, STAGES)
                for source, own in (
                    (part(spec, q_ref, item, rows, item.head), q_s),
                    (inverse_ref.at[item.batch, item.head, rows], inverse_s),
                    (e_ref.at[item.batch, item.head, rows], e_s),
                    (part(spec, g_ref, item, rows, item.head), g_s),
                ):
                    plgpu.copy_gmem_to_smem(source, own.at[slot], loaded.at[slot])
                frame.wait_until_free(k_free, step, K_STAGES)
                for ref, own in ((k_ref, k_s), (v_ref, v_s)):
                    source = part(spec, ref, item, rows, item.head)
                    plgpu.copy_gmem_to_smem(source, own.at[k_slot], k_loaded.at[k_slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def sum_piece(item: Item) -> None:
            @pl.when(item.number > 0)
            def _() -> None:
                plgpu.barrier_wait(r_free)

            of_piece = item.batch, item.head, item.piece
            plgpu.copy_gmem_to_smem(r_ref.at[of_piece], r_s, start)
            plgpu.copy_gmem_to_smem(u_ref.at[of_piece], u_start_s, start)
            plgpu.barrier_wait(start)
            sums = load(r_s).astype(F32), in_parts(load(u_start_s, frame.OF_ROWS))
            plgpu.commit_smem()  # what was read, ahead of the next piece's

            def sum_chunk(chunk: Any, sums: Any) -> Any:
                total, parts = sums
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                map_queries(q_s.at[slot], inverse_s.at[slot])
                spread(e_s.at[slot], minus_e_s)
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])

                @pl.when(chunk > 0)
                def _() -> None:
                    plgpu.barrier_wait(r_free)

                r_s[...] = total.astype(BF16)
                u_s[...] = of_parts(parts)
                plgpu.commit_smem()
                plgpu.barrier_arrive(r_ready)
                minus_e = minus_e_s.at[pl.ds(0, ALIKE)]
                sums = multiply(
                    (total, [(g_s.at[slot].T, q_s.at[slot])]),
                    (parts, [(q_s.at[slot].T, minus_e.T)]),
                )
                plgpu.barrier_arrive(free.at[slot])
                return sums

            lax.fori_loop(0, item.chunks, sum_chunk, sums)

        def seen(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            """x [j, i] where query i sees key j, and it rounded."""
            x = jnp.where(frame.position(1) >= frame.position(0), x, 0.0)
            # Rounded in pairs: behind the choice each would be by itself.
            x = lax.optimization_barrier(x)
            return x, frame.rounded(x)

        def walk(one: Callable[..., jax.Array], number: int, ref: Any) -> None:
            """For dv or dk: `one` makes a chunk's, which is stored."""

            def walk_piece(item: Item) -> None:
                def walk_chunk(chunk: Any, _: None) -> None:
                    step = item.before + chunk
                    found = one(slot_of(step, STAGES), slot_of(step, K_STAGES))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_s.at[number][...] = found.astype(BF16)
                    plgpu.commit_smem()
                    rows = item.rows_from_the_end(chunk)
                    plgpu.copy_smem_to_gmem(
                        out_s.at[number], part(spec, ref, item, rows, item.head)
                    )

                lax.fori_loop(0, item.chunks, walk_chunk, None)

            deal.each(walk_piece)
            plgpu.wait_smem_to_gmem(0)

        def values_chunk(slot: Any, k_slot: Any) -> jax.Array:
            plgpu.barrier_wait(k_loaded.at[k_slot])
            x = load(k_s.at[k_slot])
            plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
            plgpu.barrier_arrive(k_free.at[k_slot])
            phi_k = frame.features_of(x)

            plgpu.barrier_wait(mapped.at[slot])
            (a,) = multiply((frame.zeros(C, C), [(phi_k, q_s.at[slot].T)]))
            _, a = seen(a)
            plgpu.barrier_wait(r_ready)
            (dv,) = multiply((frame.zeros(C, V), [(phi_k, r_s.T), (a, g_s.at[slot])]))
            plgpu.barrier_arrive(r_free)
            plgpu.barrier_arrive(free.at[slot])
            return dv

        def keys_chunk(slot: Any, k_slot: Any) -> jax.Array:
            plgpu.barrier_wait(mapped.at[slot])
            minus_e = frame.in_rows(-load(e_s.at[slot], OF_COLUMNS), C)
            plgpu.barrier_wait(k_loaded.at[k_slot])
            (b,) = multiply((minus_e, [(v_s.at[k_slot], g_s.at[slot].T)]))
            b, factor = seen(b)
            left = frame.rounded(b - factor.astype(F32))
            plgpu.barrier_wait(r_ready)
            of_others = frame.in_rows(load(u_s, OF_COLUMNS), C)
            plgpu.commit_smem()  # e was read, ahead of the load that overwrites it
            products = [(v_s.at[k_slot], r_s), (factor, q_s.at[slot]), (left, q_s.at[slot])]
            (dk,) = multiply((of_others, products))
            plgpu.barrier_arrive(r_free)
            plgpu.barrier_arrive(free.at[slot])
            x = load(k_s.at[k_slot]).astype(F32)
            dk = dk * jnp.exp2(jnp.minimum(x, 0.0) * LOG2_E)
            plgpu.commit_smem()
            plgpu.barrier_arrive(k_free.at[k_slot])
            return dk

        @pl.when(frame.group() == frame.MEMORY)
        def _memory() -> None:
            frame.set_registers(frame.MEMORY_REGISTERS)
            steps = deal.each(load_piece)
            frame.await_the_last(free, steps, STAGES)
            frame.await_the_last(k_free, steps, K_STAGES)

        @pl.when(frame.group() == STATE)
        def _state() -> None:
            frame.set_registers(STATE_REGISTERS)
            deal.each(sum_piece)
            plgpu.barrier_wait(r_free)

        @pl.when(frame.group() == DV)
        def _dv() -> None:
            frame.set_registers(DV_REGISTERS)
            walk(values_chunk, 0, dv_ref)

        @pl.when(frame.group() == DK)
        def _dk() -> None:
            frame.set_registers(DK_REGISTERS)
            walk(keys_chunk, 1, dk_ref)

    out_type = jax.ShapeDtypeStruct(k.shape, BF16), jax.ShapeDtypeStruct(v.shape, BF16)
    arrays = q, k, v, g, inverse, e, r, u
    return frame.launch(body, "key_gradient", deal, out_type, scratch, arrays)
