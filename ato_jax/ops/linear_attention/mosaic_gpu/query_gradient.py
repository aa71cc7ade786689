"""The gradient of the causal output's queries.

With g the cotangent of out, S [V, F] and z [F] the sums of the keys before a chunk, and z_i =
z + sum_{j<=i} phi(k_j) over the chunk's own keys:

    w[i, j] = g_i . v_j for j <= i of the same chunk, else 0
    G_i     = g_i S + sum_j w[i, j] phi(k_j)         the gradient of phi(q_i) without normaliser
    den_i   = phi(q_i) . z_i,  inverse_i = 1 / max(den_i, eps)
    e_i     = phi(q_i) . G_i / den_i = g_i . out_i,  0 where den_i <= eps
    dq_i    = (G_i - e_i z_i) inverse_i phi'(q_i)

and inverse and e are left in float32 for the walk from the end. `out` is not read: two row sums
give both e and den where G and z_i are there, and that e belongs to the G as rounded. phi(q) is not
rounded here: what it and inverse make together should be rounded once. Unnormalised, inverse is the
scale, and e is 0.

    memory    loads S, z of a piece and its chunks, as slots come free
    features  maps k in place
    values    each a half of F: S_half^T [64, V] float32 in registers, w, G_half, z_i's half

Every product but w is over a half of F alone, so that the halves meet once a chunk, to add up the
two row sums. A block has one piece: with a loop over more the registers do not suffice.

With a decay, of whose logarithms to base 2 G_i is the sum from the chunk's first row to row i (the
gradient of phi(q_i) being called D_i here):

    w[i, j] carries exp2(G_i - G_j), as each phi(k_j) in z_i does; g_i S and z are times exp2(G_i)
    S = exp2(G_C) S + (exp2(G_C - G_j) phi(k_j))^T v_j, z alike    for the chunk's last row C
    R_i = exp2(G_i) phi(q_i) . (g_i S - e_i z) inverse_i

R_i is what the query reads of the state, for the gradient of the decays (`flows.py`). Each half
leaves its own part of it, and S and z ahead of some chunks as they are multiplied. What is read of
the state is scaled in its accumulator, and phi(k) in registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import flows, frame
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

# Slots of g and v, of q, and of k, which is loaded, mapped and multiplied.
STAGES, Q_STAGES, K_STAGES = 2, 2, 3
VALUES_REGISTERS, FEATURES_REGISTERS = 216, 56


def query_gradient(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
    gates: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, flows.OfQueries | None]:
    """dq; inverse and e [B, H, T up to a whole chunk], float32. s, z and gates are as in
    `output`."""
    deal, gated = dataclasses.replace(deal, most_blocks=deal.items), gates is not None
    # A returned state's cotangent is one of z, too.
    sums_keys = spec.normalize or gated and spec.return_state
    scratch = dict(
        g_s=shared(STAGES, C, V),
        v_s=shared(STAGES, C, V),
        q_s=shared(Q_STAGES, 2, C, HALF),
        k_s=shared(K_STAGES, 2, C, HALF),
        s_s=shared(2, *((V, HALF) if gated else (HALF, V))),
        # Two slots of dq; before a piece's first chunk, S of its start [V, HALF].
        dq_s=shared(2, 2 * C, HALF),
        ones_s=shared(ALIKE, C),
        z_s=plgpu.SMEM((2, HALF), F32),
        parts_s=plgpu.SMEM((2, 2, 2, C), F32),
        rows_s=plgpu.SMEM((2, 2, C), F32),
        loaded=plgpu.Barrier(num_arrivals=2 + gated, num_barriers=STAGES),
        q_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=Q_STAGES),
        k_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=K_STAGES),
        k_mapped=plgpu.Barrier(num_arrivals=1, num_barriers=K_STAGES),
        free=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        q_free=plgpu.Barrier(num_arrivals=2, num_barriers=Q_STAGES),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=K_STAGES),
        start_loaded=plgpu.Barrier(num_arrivals=5),
        exchanged=plgpu.Barrier(num_arrivals=2),
    )
    if gated:
        scratch |= dict(
            gates_s=plgpu.SMEM((STAGES, C), F32),
            reads_s=plgpu.SMEM((2, 2, C), F32),
        )

    def body(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        g_ref: Any,
        s_ref: Any,
        z_ref: Any,
        ones_ref: Any,
        *refs: Any,
        g_s: Any,
        v_s: Any,
        q_s: Any,
        k_s: Any,
        s_s: Any,
        dq_s: Any,
        ones_s: Any,
        z_s: Any,
        parts_s: Any,
        rows_s: Any,
        loaded: Any,
        q_loaded: Any,
        k_loaded: Any,
        k_mapped: Any,
        free: Any,
        q_free: Any,
        k_free: Any,
        start_loaded: Any,
        exchanged: Any,
        gates_s: Any = None,
        reads_s: Any = None,
    ) -> None:
        gates_refs, (dq_ref, inverse_ref, e_ref, *flow_refs) = refs[:gated], refs[gated:]

        def load_piece(item: Item) -> None:
            of_piece = item.batch, item.head, item.piece
            plgpu.copy_gmem_to_smem(ones_ref, ones_s, start_loaded)
            for half in range(2):
                columns = pl.ds(half * HALF, HALF)
                start = s_ref.at[(*of_piece, slice(None), columns)]
                plgpu.copy_gmem_to_smem(start, dq_s.at[half], start_loaded)
                plgpu.copy_gmem_to_smem(
                    z_ref.at[(*of_piece, columns)], z_s.at[half], start_loaded
                )

            def load_chunk(chunk: Any, _: None) -> None:
                rows = item.rows(chunk)
                slot = slot_of(chunk, STAGES)
                frame.wait_until_free(free, chunk, STAGES)
                for ref, own in ((g_ref, g_s), (v_ref, v_s)):
                    plgpu.copy_gmem_to_smem(
                        part(spec, ref, item, rows, item.head), own.at[slot], loaded.at[slot]
                    )
                for ref in gates_refs:
                    source = ref.at[item.batch, item.head, rows]
                    plgpu.copy_gmem_to_smem(source, gates_s.at[slot], loaded.at[slot])
                for ref, own, stages, own_loaded, own_free in (
                    (k_ref, k_s, K_STAGES, k_loaded, k_free),
                    (q_ref, q_s, Q_STAGES, q_loaded, q_free),
                ):
                    slot = slot_of(chunk, stages)
                    frame.wait_until_free(own_free, chunk, stages)
                    for half in range(2):
                        plgpu.copy_gmem_to_smem(
                            part(spec, ref, item, rows, item.head, half),
                            own.at[slot, half],
                            own_loaded.at[slot],
                        )

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def map_piece(item: Item) -> None:
            def map_chunk(chunk: Any, _: None) -> None:
                slot = slot_of(chunk, K_STAGES)
                plgpu.barrier_wait(k_loaded.at[slot])
                for half in range(2):
                    frame.map_in_place(k_s.at[slot, half])
                plgpu.commit_smem()
                plgpu.barrier_arrive(k_mapped.at[slot])

            lax.fori_loop(0, item.chunks, map_chunk, None)

        def multiply_piece(item: Item) -> None:
            half = frame.group()

            def ones_where(seen: jax.Array) -> jax.Array:
                return jnp.where(seen, 1.0, 0.0).astype(BF16)

            def sees() -> jax.Array:
                return frame.position(0) >= frame.position(1)

            plgpu.barrier_wait(start_loaded)
            # The start's transpose, which is what a product with the identity reads.
            same = ones_where(frame.position(0) == frame.position(1))
            (S,) = multiply((frame.zeros(HALF, V), [(same, dq_s.at[half].T)]))
            totals = frame.in_columns(load(z_s.at[half], OF_ROWS), ALIKE)  # z's half, [64, 8]

            def keep_state(item: Item, chunk: Any) -> None:
                """The state ahead of the chunk, if it is one of those."""

                @pl.when(flows.is_kept(chunk))
                def _() -> None:
                    at = item.batch, item.head, flows.place(deal, item, chunk)
                    _, kv_ref, *z_refs = flow_refs
                    columns = pl.ds(half * HALF, HALF)
                    kv = kv_ref.at[(*at, slice(None), columns)]
                    plgpu.copy_smem_to_gmem(s_s.at[half], kv)
                    for ref in z_refs:
                        plgpu.copy_smem_to_gmem(z_s.at[half], ref.at[(*at, columns)])

            def read_decayed(w: jax.Array, slot: Any, q_slot: Any) -> Any:
                """What is read of S, [C, HALF]; phi(q) times that, and times z [C]; w, and all
                pairs' decays."""

                def weigh() -> Any:
                    to, since = (load(gates_s.at[slot], of) for of in (OF_ROWS, OF_COLUMNS))
                    # Infinite where a key is not seen, perhaps.
                    decays = jnp.exp2(frame.in_columns(to, C) - frame.in_rows(since, C))
                    both = [w * decays, decays] if spec.normalize else [w * decays]
                    # Rounded in pairs: behind the choice each would be by itself.
                    both = lax.optimization_barrier([jnp.where(sees(), x, 0.0) for x in both])
                    return [frame.rounded(x) for x in both]

                read, (w, *decays) = frame.multiply_while(
                    g_s.at[slot], s_s.at[half], (C, HALF), weigh
                )
                plgpu.barrier_wait(q_loaded.at[q_slot])
                phi_q = frame.unrounded_features_of(load(q_s.at[q_slot, half]))
                reads = jnp.exp2(load(gates_s.at[slot], OF_ROWS))
                read = read * frame.in_columns(reads, HALF)
                of_s = jnp.sum(phi_q * read, axis=1)
                if not spec.normalize:
                    return read, (of_s,), w, None
                z = frame.in_rows(load(z_s.at[half], OF_COLUMNS), C)
                return read, (of_s, reads * jnp.sum(phi_q * z, axis=1)), w, decays[0]

            def multiply_chunk(chunk: Any, carried: Any) -> Any:
                S, totals = carried
                slot, q_slot = slot_of(chunk, STAGES), slot_of(chunk, Q_STAGES)
                k_slot, parity = slot_of(chunk, K_STAGES), slot_of(chunk, 2)
                features = k_s.at[k_slot, half]

                def publish() -> None:
                    if gated:
                        frame.store_transposed(s_s.at[half], S.astype(BF16))
                    else:
                        s_s.at[half][...] = S.astype(BF16)
                    plgpu.commit_smem()

                plgpu.barrier_wait(loaded.at[slot])
                plgpu.barrier_wait(k_mapped.at[k_slot])
                (w,) = multiply(
                    (frame.zeros(C, C), [(g_s.at[slot], v_s.at[slot].T)]), meanwhile=publish
                )
                added: Any = features.T
                own_reads: Any = ()
                decays: Any = None
                if gated:
                    keep_state(item, chunk)
                    read, own_reads, w, decays = read_decayed(w, slot, q_slot)
                    gradient = read, [(w, features)]
                    added, keeps = frame.decayed_keys(features, gates_s.at[slot])
                    S, totals = S * keeps, totals * keeps
                else:
                    w = frame.rounded(jnp.where(sees(), w, 0.0))
                    gradient = (
                        frame.zeros(C, HALF),
                        [(g_s.at[slot], s_s.at[half].T), (w, features)],
                    )
                of_state = S, [(added, v_s.at[slot])]
                z_i: Any = None
                if spec.normalize:
                    z_i = frame.in_rows(load(z_s.at[half], OF_COLUMNS), C)
                    if gated:
                        to = load(gates_s.at[slot], OF_ROWS)
                        z_i = z_i * frame.in_columns(jnp.exp2(to), HALF)
                    seen = ones_where(sees()) if decays is None else decays
                    G, z_i, S, totals = multiply(
                        gradient,
                        (z_i, [(seen, features)]),
                        of_state,
                        (totals, [(added, ones_s.T)]),
                    )
                elif sums_keys:
                    G, S, totals = multiply(
                        gradient, of_state, (totals, [(added, ones_s.T)])
                    )
                else:
                    G, S = multiply(gradient, of_state)
                if gated:
                    plgpu.commit_smem()  # what was read, ahead of the loads that overwrite it
                plgpu.barrier_arrive(free.at[slot])
                plgpu.barrier_arrive(k_free.at[k_slot])

                if not gated:
                    plgpu.barrier_wait(q_loaded.at[q_slot])
                phi_q = frame.unrounded_features_of(load(q_s.at[q_slot, half]))
                scale: Any = spec.scale
                own_parts: Any = ()
                if gated:

                    @pl.when(flows.is_kept(chunk))
                    def _() -> None:  # S and z, ahead of what replaces them
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                if spec.normalize:
                    own_parts = jnp.sum(phi_q * G, axis=1), jnp.sum(phi_q * z_i, axis=1)
                    for number, own in enumerate(own_parts):
                        parts_s.at[parity, half, number][...] = own
                if sums_keys:
                    z_s.at[half][...] = jnp.max(totals, axis=1)  # of columns that are alike
                plgpu.commit_smem()
                plgpu.barrier_arrive(q_free.at[q_slot])
                inverse: Any = None
                e: Any = None
                if spec.normalize:
                    plgpu.barrier_arrive(exchanged)
                    plgpu.barrier_wait(exchanged)
                    total, den = (
                        own + load(parts_s.at[parity, 1 - half, number], OF_ROWS)
                        for number, own in enumerate(own_parts)
                    )
                    inverse = 1.0 / jnp.maximum(den, spec.eps)
                    e = jnp.where(den > spec.eps, total * inverse, 0.0)
                    G -= frame.in_columns(e, HALF) * z_i
                    scale = frame.in_columns(inverse, HALF)
                dq = G * scale * jnp.minimum(phi_q, 1.0)
                # Of the stores of two chunks ago: one of dq, and one of a row, or two.
                plgpu.wait_smem_to_gmem(1 + spec.normalize + gated, wait_read_only=True)
                dq_slot = dq_s.at[half, pl.ds(parity * C, C)]
                dq_slot[...] = dq.astype(BF16)
                if spec.normalize:
                    rows_s.at[half, parity][...] = jnp.where(half == 0, inverse, e)
                if gated:
                    of_s, *of_z = own_reads
                    reads_s.at[half, parity][...] = (
                        (of_s - e * of_z[0]) * inverse if of_z else of_s * spec.scale
                    )
                plgpu.commit_smem()
                rows = item.rows(chunk)
                if gated:
                    plgpu.copy_smem_to_gmem(
                        reads_s.at[half, parity], flow_refs[0].at[half, item.batch, item.head, rows]
                    )
                plgpu.copy_smem_to_gmem(dq_slot, part(spec, dq_ref, item, rows, item.head, half))
                for number, ref in enumerate((inverse_ref, e_ref) if spec.normalize else ()):

                    @pl.when(half == number)
                    def _(ref: Any = ref) -> None:
                        plgpu.copy_smem_to_gmem(
                            rows_s.at[half, parity], ref.at[item.batch, item.head, rows]
                        )

                return S, totals

            lax.fori_loop(0, item.chunks, multiply_chunk, (S, totals))

        @pl.when(frame.group() == MEMORY)
        def _memory() -> None:
            frame.set_registers(frame.MEMORY_REGISTERS)
            steps = deal.each(load_piece)
            frame.await_the_last(free, steps, STAGES)
            frame.await_the_last(k_free, steps, K_STAGES)
            frame.await_the_last(q_free, steps, Q_STAGES)

        @pl.when(frame.group() == FEATURES)
        def _features() -> None:
            frame.set_registers(FEATURES_REGISTERS)
            deal.each(map_piece)

        @pl.when(frame.group() < MEMORY)
        def _values() -> None:
            frame.set_registers(VALUES_REGISTERS)
            deal.each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    rows = jax.ShapeDtypeStruct((spec.B, spec.H, pl.cdiv(spec.T, C) * C), F32)
    out_type: Any = jax.ShapeDtypeStruct(q.shape, BF16), rows, rows
    arrays: Any = q, k, v, g, s, z, np.ones((ALIKE, C), BF16)
    if gated:
        arrays = *arrays, gates
        of_edges = spec.B, spec.H, flows.places(deal)
        out_type = (
            *out_type,
            jax.ShapeDtypeStruct((2, *rows.shape), F32),
            jax.ShapeDtypeStruct((*of_edges, V, F), BF16),
        )
        if sums_keys:
            out_type = *out_type, jax.ShapeDtypeStruct((*of_edges, F), F32)
    found = frame.launch(body, "query_gradient", deal, out_type, scratch, arrays)
    dq, inverse, e, *flow = found
    if not spec.normalize:
        inverse, e = jnp.full(rows.shape, spec.scale, F32), jnp.zeros(rows.shape, F32)
    return dq, inverse, e, flows.OfQueries(*flow) if gated else None
