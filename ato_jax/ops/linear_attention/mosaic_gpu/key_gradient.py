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

With a decay, of whose logarithms to base 2 G_i is the sum from the chunk's first row to row i, and
R and u those of later chunks as this one's last row C sees them:

    a[j, i] and b[j, i] carry exp2(G_i - G_j); R phi(k_j) and R^T v_j + u are times exp2(G_C - G_j)
    R = exp2(G_C) R + (exp2(G_i) g_i)^T phi'_i,  u alike    after each chunk

and for the gradient of the decays (`flows.py`)

    A_j  = phi(k_j) . (R^T v_j + u) exp2(G_C - G_j)
    I(t) = sum over j < t <= i of a[j, i] b[j, i] / exp2(G_i - G_j)

dk leaves A, and b in shared memory, from where it is multiplied, too; dv puts a b beside it. I is a
product of that with ones where j < t, and a sum over i. So there is no pair of a row with itself in
it, which a strong decay would leave alone, and nothing that cancels.

Features carry the decay (`frame.Gates`), R and u are those that the middle sees, and rows of dk are
times exp2(G_m - G_j) at the end. In a steep chunk a, b, phi(k), R^T v_j + u, and g and e for their
sums are scaled in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import flows, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import (
    ALIKE,
    BF16,
    F32,
    HALF,
    LOG2_E,
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
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import map_queries, spread
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

DV, DK, STATE = 0, 1, 3  # warpgroups beside MEMORY
# Slots of q, g, inverse and e; and of k and v.
STAGES, K_STAGES = 2, 2
DV_REGISTERS, DK_REGISTERS, STATE_REGISTERS = 144, 144, 200
# With a decay dv and dk do more.
GATED_DV_REGISTERS, GATED_DK_REGISTERS, GATED_STATE_REGISTERS = 152, 152, 184


def in_parts(u: jax.Array) -> jax.Array:
    """u [F] as a sum over columns [F, 8] would leave it."""
    return frame.in_columns(u * (frame.PARTS / ALIKE), ALIKE)


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
    gates: jax.Array | None,
    steep: jax.Array | None,
) -> tuple[jax.Array, jax.Array, flows.OfKeys | None]:
    """dk and dv, of r [B, H, P, V, F] in bfloat16 and u [B, H, P, F] in float32, the sums behind
    each piece; gates and steep as in `output`."""
    gated = gates is not None
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
        loaded=plgpu.Barrier(num_arrivals=4 + gated, num_barriers=STAGES),
        mapped=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        k_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=K_STAGES),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=K_STAGES),
        start=plgpu.Barrier(num_arrivals=2),
        r_ready=plgpu.Barrier(num_arrivals=1),
        r_free=plgpu.Barrier(num_arrivals=2),
    )
    if gated:
        scratch |= dict(
            gates_s=plgpu.SMEM((STAGES, C), F32),
            flows_s=plgpu.SMEM((2, C), F32),
            pairs_s=shared(2, C, C),
            pairs_ready=plgpu.Barrier(num_arrivals=1),
            pairs_free=plgpu.Barrier(num_arrivals=1),
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
        *refs: Any,
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
        gates_s: Any = None,
        flows_s: Any = None,
        pairs_s: Any = None,
        pairs_ready: Any = None,
        pairs_free: Any = None,
    ) -> None:
        gates_ref, steep_ref = refs[:2] if gated else (None, None)
        dk_ref, dv_ref, *flow_refs = refs[2 * gated :]

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
                if gated:
                    source = gates_ref.at[item.batch, item.head, rows]
                    plgpu.copy_gmem_to_smem(source, gates_s.at[slot], loaded.at[slot])
                frame.wait_until_free(k_free, step, K_STAGES)
                for ref, own in ((k_ref, k_s), (v_ref, v_s)):
                    source = part(spec, ref, item, rows, item.head)
                    plgpu.copy_gmem_to_smem(source, own.at[k_slot], k_loaded.at[k_slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def sum_piece(item: Item) -> None:
            @pl.when(item.number > 0)
            def _() -> None:
                plgpu.barrier_wait(r_free)

            if gated:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            of_piece = item.batch, item.head, item.piece
            plgpu.copy_gmem_to_smem(r_ref.at[of_piece], r_s, start)
            plgpu.copy_gmem_to_smem(u_ref.at[of_piece], u_start_s, start)
            plgpu.barrier_wait(start)
            if gated:
                start_rows = tuple(load(rows).astype(F32) for rows in halves_of_r())
            else:
                start_rows = (load(r_s).astype(F32),)
            sums = *start_rows, in_parts(load(u_start_s, frame.OF_ROWS))
            plgpu.commit_smem()  # what was read, ahead of the next piece's

            def sum_chunk(some_steep: bool, chunk: Any, carried: Any) -> Any:
                sums, to_start = carried
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                inverse, own_e = load(inverse_s.at[slot], OF_ROWS), load(e_s.at[slot], OF_COLUMNS)
                gates: Any = None
                if gated:
                    gates = frame.gates_of(gates_s.at[slot], some_steep)
                    onto = to_start * gates.from_middle()
                    sums, to_start = [x * onto for x in sums], gates.to_middle()
                    inverse = inverse * jnp.exp2(gates.since_middle())
                    own_e = own_e * gates.if_steep(gates.of(OF_COLUMNS))
                *total, parts = sums
                map_queries(q_s.at[slot], inverse)
                spread(own_e, minus_e_s)
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])

                @pl.when(chunk > 0)
                def _() -> None:
                    plgpu.barrier_wait(r_free)

                if gated:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for rows, half in zip(halves_of_r(), total, strict=True):
                        rows[...] = half.astype(BF16)
                else:
                    r_s[...] = total[0].astype(BF16)
                u_s[...] = frame.of_parts(parts)
                plgpu.commit_smem()
                plgpu.barrier_arrive(r_ready)

                def multiply_sums(sums: Any, added: Any) -> Any:
                    *total, parts = sums
                    minus_e = minus_e_s.at[pl.ds(0, ALIKE)]
                    return multiply(
                        *((own, [(x, q_s.at[slot])]) for own, x in zip(total, added, strict=True)),
                        (parts, [(q_s.at[slot].T, minus_e.T)]),
                    )

                if gated:
                    keep_sums(item, chunk)
                    halves = [g_s.at[slot, :, pl.ds(half * HALF, HALF)] for half in range(2)]

                    def when_steep() -> Any:
                        """One after the other: there are no registers for both factors."""
                        reads = jnp.exp2(gates.of(OF_COLUMNS))
                        keeps = jnp.exp2(gates.last)
                        found: list[jax.Array] = []
                        for own, half in zip(total, halves, strict=True):
                            added = frame.times_rows(half, reads)
                            found += multiply((own * keeps, [(added, q_s.at[slot])]))
                        return *found, *multiply_sums([parts * keeps], [])

                    sums = gates.either(
                        when_steep, lambda: multiply_sums(sums, [x.T for x in halves])
                    )
                    plgpu.commit_smem()  # what was read, ahead of the loads that overwrite it
                else:
                    sums = multiply_sums(sums, [g_s.at[slot].T])
                plgpu.barrier_arrive(free.at[slot])
                return tuple(sums), to_start

            def sum_chunks(some_steep: bool) -> None:
                one = functools.partial(sum_chunk, some_steep)
                lax.fori_loop(0, item.chunks, one, (sums, jnp.float32(1)))

            frame.each_chunk(steep_ref, item, item.head, sum_chunks)

        def halves_of_r() -> list[Any]:
            return [r_s.at[pl.ds(half * HALF, HALF)] for half in range(2)]

        def keep_sums(item: Item, chunk: Any) -> None:
            """R and u behind the chunk, if it is one of those."""
            number = item.chunks - 1 - chunk

            @pl.when(flows.is_kept(number))
            def _() -> None:
                at = item.batch, item.head, flows.place(deal, item, number)
                for own, ref in zip((r_s, u_s), flow_refs[2:], strict=True):
                    plgpu.copy_smem_to_gmem(own, ref.at[at])

        def seen(x: jax.Array) -> jax.Array:
            """x [j, i] where query i sees key j, else 0."""
            x = jnp.where(frame.position(1) >= frame.position(0), x, 0.0)
            # Rounded in pairs: behind the choice each would be by itself.
            return lax.optimization_barrier(x)

        def store_parts(refs: Any, x: jax.Array) -> None:
            """What is rounded, and what that leaves off."""
            rounded = frame.rounded(x)
            refs[0][...] = rounded
            refs[1][...] = frame.rounded(x - rounded.astype(F32))
            plgpu.commit_smem()

        def walk(one: Callable[..., Any], number: int, ref: Any) -> None:
            """For dv or dk: `one` makes a chunk's, which is stored; and a flow [C] with a decay."""

            def walk_piece(item: Item) -> None:
                def walk_chunk(some_steep: bool, chunk: Any, _: None) -> None:
                    step = item.before + chunk
                    slots = slot_of(step, STAGES), slot_of(step, K_STAGES)
                    found, flow = one(*slots, step, some_steep)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_s.at[number][...] = found.astype(BF16)
                    if gated:
                        flows_s.at[number][...] = flow
                    plgpu.commit_smem()
                    rows = item.rows_from_the_end(chunk)
                    plgpu.copy_smem_to_gmem(
                        out_s.at[number], part(spec, ref, item, rows, item.head)
                    )
                    if gated:
                        target = flow_refs[number].at[item.batch, item.head, rows]
                        plgpu.copy_smem_to_gmem(flows_s.at[number], target)

                def walk_chunks(some_steep: bool) -> None:
                    lax.fori_loop(0, item.chunks, functools.partial(walk_chunk, some_steep), None)

                frame.each_chunk(steep_ref, item, item.head, walk_chunks)

            deal.each(walk_piece)
            plgpu.wait_smem_to_gmem(0)

        def values_chunk(slot: Any, k_slot: Any, step: Any, some_steep: bool) -> Any:
            plgpu.barrier_wait(k_loaded.at[k_slot])
            x = load(k_s.at[k_slot])
            plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
            plgpu.barrier_arrive(k_free.at[k_slot])
            gates: Any = None
            if gated:
                plgpu.barrier_wait(mapped.at[slot])
                gates = frame.gates_of(gates_s.at[slot], some_steep)
                phi_k = frame.decayed_features_of(x, gates.up_to_middle())
            else:
                phi_k = frame.features_of(x)
                plgpu.barrier_wait(mapped.at[slot])
            (a,) = multiply((frame.zeros(C, C), [(phi_k, q_s.at[slot].T)]))
            flow: Any = None
            if gated:
                flow = of_pairs(a)

                def when_steep() -> Any:
                    left = frame.in_columns(gates.left(OF_ROWS), F)
                    return a * gates.of_pairs(queries=1), frame.rounded(phi_k.astype(F32) * left)

                a, phi_k = gates.either(when_steep, lambda: (a, phi_k))
                plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
            weights = frame.rounded(seen(a))
            plgpu.barrier_wait(r_ready)
            (dv,) = multiply((frame.zeros(C, V), [(phi_k, r_s.T), (weights, g_s.at[slot])]))
            plgpu.barrier_arrive(r_free)
            plgpu.barrier_arrive(free.at[slot])
            return dv, flow

        def of_pairs(a: jax.Array) -> jax.Array:
            """I, of a as it was multiplied: what it lacks of the decay in a steep chunk b has."""
            parts = [out_s.at[DV, :, pl.ds(half * HALF, HALF)] for half in range(2)]
            plgpu.barrier_wait(pairs_ready)
            m = seen(a) * sum(load(pairs_s.at[part]).astype(F32) for part in range(2))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store_parts(parts, m)
            plgpu.barrier_arrive(pairs_free)
            t, other = frame.position(0), frame.position(1)
            before = jnp.where(other < t, 1.0, 0.0).astype(BF16)  # [t, j]
            products = [(before, part) for part in parts]
            (across,) = multiply((frame.zeros(C, C), products))  # [t, i]
            return jnp.sum(jnp.where(other >= t, across, 0.0), axis=1)

        def keys_chunk(slot: Any, k_slot: Any, step: Any, some_steep: bool) -> Any:
            plgpu.barrier_wait(mapped.at[slot])
            minus_e = frame.in_rows(-load(e_s.at[slot], OF_COLUMNS), C)
            plgpu.barrier_wait(k_loaded.at[k_slot])
            (b,) = multiply((minus_e, [(v_s.at[k_slot], g_s.at[slot].T)]))
            gates: Any = None
            factors: Any
            if gated:
                gates = frame.gates_of(gates_s.at[slot], some_steep)
                b = gates.either(lambda: b * gates.of_pairs(queries=1), lambda: b)

                @pl.when(step > 0)
                def _() -> None:
                    plgpu.barrier_wait(pairs_free)

                factors = pairs_s.at[0], pairs_s.at[1]
                store_parts(factors, seen(b))
                plgpu.barrier_arrive(pairs_ready)
            else:
                b = seen(b)
                rounded = frame.rounded(b)
                factors = rounded, frame.rounded(b - rounded.astype(F32))
            plgpu.barrier_wait(r_ready)
            of_others = frame.in_rows(load(u_s, OF_COLUMNS), C)
            products = [(v_s.at[k_slot], r_s), *((factor, q_s.at[slot]) for factor in factors)]
            flow = exponents = None
            if gated:
                (of_others,) = multiply((of_others, products[:1]))
                of_others = gates.either(
                    lambda: of_others * frame.in_columns(gates.left(OF_ROWS), F),
                    lambda: of_others,
                )
                exponents = gates.up_to_middle()
                phi_k = frame.unrounded_features_of(load(k_s.at[k_slot]))
                flow = jnp.sum(phi_k * of_others, axis=1) * jnp.exp2(exponents)
                del products[:1]
            plgpu.commit_smem()  # e was read, ahead of the load that overwrites it
            (dk,) = multiply((of_others, products))
            plgpu.barrier_arrive(r_free)
            plgpu.barrier_arrive(free.at[slot])
            x = jnp.minimum(load(k_s.at[k_slot]).astype(F32), 0.0) * LOG2_E
            dk = dk * jnp.exp2(x if exponents is None else x + frame.in_columns(exponents, F))
            plgpu.commit_smem()
            plgpu.barrier_arrive(k_free.at[k_slot])
            return dk, flow

        @pl.when(frame.group() == frame.MEMORY)
        def _memory() -> None:
            frame.set_registers(frame.MEMORY_REGISTERS)
            steps = deal.each(load_piece)
            frame.await_the_last(free, steps, STAGES)
            frame.await_the_last(k_free, steps, K_STAGES)

        @pl.when(frame.group() == STATE)
        def _state() -> None:
            frame.set_registers(GATED_STATE_REGISTERS if gated else STATE_REGISTERS)
            deal.each(sum_piece)
            plgpu.barrier_wait(r_free)
            if gated:
                plgpu.wait_smem_to_gmem(0)

        @pl.when(frame.group() == DV)
        def _dv() -> None:
            frame.set_registers(GATED_DV_REGISTERS if gated else DV_REGISTERS)
            walk(values_chunk, DV, dv_ref)

        @pl.when(frame.group() == DK)
        def _dk() -> None:
            frame.set_registers(GATED_DK_REGISTERS if gated else DK_REGISTERS)
            walk(keys_chunk, DK, dk_ref)
            if gated:
                plgpu.barrier_wait(pairs_free)

    out_type: Any = jax.ShapeDtypeStruct(k.shape, BF16), jax.ShapeDtypeStruct(v.shape, BF16)
    arrays: Any = q, k, v, g, inverse, e, r, u
    if gates is None:
        dk, dv = frame.launch(body, "key_gradient", deal, out_type, scratch, arrays)
        return dk, dv, None
    rows = jax.ShapeDtypeStruct(gates.shape, F32)
    of_edges = spec.B, spec.H, flows.places(deal)
    out_type = (
        *out_type,
        rows,
        rows,
        jax.ShapeDtypeStruct((*of_edges, V, F), BF16),
        jax.ShapeDtypeStruct((*of_edges, F), F32),
    )
    arrays = *arrays, gates, steep
    dk, dv, inside, adds, *edges = frame.launch(
        body, "key_gradient", deal, out_type, scratch, arrays
    )
    return dk, dv, flows.OfKeys(adds, inside, *edges)
