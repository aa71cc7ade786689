"""The gradients of the causal output's keys and values, walking from the end.

With phi'_i, R and u as in `query_sums.py`, those of later chunks:

    a[j, i] = phi(k_j) . phi'_i    for i >= j of the same chunk, else 0
    b[j, i] = v_j . g_i - e_i      for i >= j of the same chunk, else 0
    dv_j = R phi(k_j) + sum_i a[j, i] g_i
    dk_j = (R^T v_j + u + sum_i b[j, i] phi'_i) * phi'(k_j)
    R += g^T phi',  u -= sum_i e_i phi'_i      after each chunk

    memory   loads chunks as slots come free, across pieces
    state    maps q in place, times inverse; R and u in registers, published for each chunk
    dv       phi(k), a and dv: phi(k) stays in registers, the left factor of both products; with a
             decay it takes k's place, too
    dk       b and dk

R is whole in one warpgroup: in halves beside dv and dk each would need the other's, every chunk. b
is a difference: what rounding it leaves off is multiplied, too.

With a decay, of whose logarithms to base 2 G_i is the sum from the chunk's first row to row i, and
R and u those of later chunks as this one's last row C sees them:

    a[j, i] and b[j, i] carry exp2(G_i - G_j); R phi(k_j) and R^T v_j + u are times exp2(G_C - G_j)
    R = exp2(G_C) R + (exp2(G_i) g_i)^T phi'_i,  u alike    after each chunk

Features carry the decay (`frame.Gates`), R and u are those that the middle sees, and rows of dk are
times exp2(G_m - G_j) at the end. In a steep chunk a, b, phi(k), R^T v_j + u, and g and e for their
sums are scaled in registers.

For the gradient of the decays (`flows.py`) dk leaves, of phi(k) as the queries' gradient has them,

    phi(k_j) . (R^T v_j + u + sum_i b[j, i] phi'_i)

what the pairs of a key add to the loss's derivative. In a steep chunk, where a strong decay leaves
each row the pair with itself, and all else would be lost beside it, dk and dv leave

    A_j  = phi(k_j) . (R^T v_j + u) exp2(G_C - G_j)
    I(t) = sum over j < t <= i of a[j, i] b[j, i] / exp2(G_i - G_j)

I is of b, which dk puts in shared memory, times a, which dv puts beside it: a product with ones
where j < t, and a sum over i. So there is no pair of a row with itself in it, and nothing cancels.

Where a tile is two heads', each warpgroup does for both what it does.
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

from ato_jax.ops.linear_attention.mosaic_gpu import frame
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
    shared,
    slot_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient import rounds_pairs
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import map_queries, spread
from ato_jax.ops.linear_attention.scans import flows
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

DV, DK, STATE = 0, 1, 3  # warpgroups beside MEMORY
# Slots of q, g, inverse and e; and of k and v.
STAGES, K_STAGES = 2, 2
# Of dv, dk and state: two heads in a tile have half as much of a state, and twice a and b.
REGISTERS = {1: (144, 144, 200), 2: (176, 176, 136)}


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
    each piece; with a decay, what its gradient needs. Gates and steep are as in `output`."""
    out_type: Any = jax.ShapeDtypeStruct(k.shape, BF16), jax.ShapeDtypeStruct(v.shape, BF16)
    arrays: Any = q, k, v, g, inverse, e, r, u
    body, scratch = _walk(spec, deal, some_steep=False)
    if gates is None:
        dk, dv = frame.launch(body, "key_gradient", deal, out_type, scratch, arrays)
        return dk, dv, None
    rows = jax.ShapeDtypeStruct(gates.shape, F32)
    of_edges = spec.B, spec.H, flows.places(deal)
    out_type = (
        *out_type,
        rows,
        rows,
        jax.ShapeDtypeStruct((*of_edges, spec.V, spec.F), BF16),
        jax.ShapeDtypeStruct((*of_edges, spec.F), F32),
    )
    arrays = *arrays, gates, steep
    rest = _walk(spec, deal, some_steep=True)
    dk, dv, inside, adds, *edges = frame.launch(
        body, "key_gradient", deal, out_type, scratch, arrays, rest=rest
    )
    return dk, dv, flows.OfKeys(adds, inside, *edges)


def _walk(
    spec: LinearAttentionSpec, deal: frame.Deal, some_steep: bool
) -> tuple[frame.Body, dict[str, Any]]:
    """A kernel's body and scratch; with a decay, of the pieces of which some chunk is steep, or of
    the others, as that of queries is."""
    gated, heads = spec.decay is not None, frame.heads_of_tile(spec)
    dv_registers, dk_registers, state_registers = REGISTERS[heads]
    # Of a b for the gradient of the decays: rounded, and what that leaves off where it is one sum
    # over all steps, which may cancel.
    pairs_parts = 2 if spec.decay == "head" else 1
    rounds = rounds_pairs(spec, some_steep)
    scratch = dict(
        q_s=frame.tiles(spec, STAGES),
        g_s=frame.tiles(spec, STAGES),
        k_s=frame.tiles(spec, K_STAGES),
        v_s=frame.tiles(spec, K_STAGES),
        r_s=shared(spec, V, spec.F),
        out_s=frame.tiles(spec, 2),
        minus_e_s=shared(spec, heads, ALIKE, C),
        inverse_s=plgpu.SMEM((STAGES, heads * C), F32),
        e_s=plgpu.SMEM((STAGES, heads * C), F32),
        u_s=plgpu.SMEM((F,), F32),
        u_start_s=plgpu.SMEM((F,), F32),
        loaded=plgpu.Barrier(num_arrivals=heads * (4 + gated), num_barriers=STAGES),
        mapped=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        k_loaded=plgpu.Barrier(num_arrivals=2 * heads, num_barriers=K_STAGES),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=K_STAGES),
        start=plgpu.Barrier(num_arrivals=2 * heads),
        r_ready=plgpu.Barrier(num_arrivals=1),
        r_free=plgpu.Barrier(num_arrivals=2),
    )
    if gated:
        scratch |= dict(
            k_mapped=plgpu.Barrier(num_arrivals=1, num_barriers=K_STAGES),
            gates_s=plgpu.SMEM((STAGES, heads * C), F32),
            flows_s=plgpu.SMEM((2, heads * C), F32),
        )
    if some_steep:
        scratch |= dict(
            pairs_s=shared(spec, heads, 2, C, C),
            before_s=shared(spec, C, C),  # [t, j]: 1 where j < t
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
        k_mapped: Any = None,
        gates_s: Any = None,
        flows_s: Any = None,
        pairs_s: Any = None,
        before_s: Any = None,
        pairs_ready: Any = None,
        pairs_free: Any = None,
    ) -> None:
        gates_ref, steep_ref = refs[:2] if gated else (None, None)
        dk_ref, dv_ref, *flow_refs = refs[2 * gated :]

        each = functools.partial(deal.each, takes=frame.takes_pieces(steep_ref, some_steep))

        def heads_of(item: Item) -> list[Any]:
            return [frame.head_of(spec, item.head, head) for head in range(heads)]

        def in_heads(tiles: Any, slot: Any) -> list[Any]:
            """What is of each head in a slot."""
            return [frame.head_in(spec, tiles, slot, head) for head in range(heads)]

        def gates_in(slot: Any) -> list[frame.Gates]:
            of_heads = frame.by_heads(spec, gates_s.at[slot])
            return [frame.gates_of(own, some_steep) for own in of_heads]

        def load_piece(item: Item) -> None:
            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows_from_the_end(chunk)
                slot, k_slot = slot_of(step, STAGES), slot_of(step, K_STAGES)
                copy_tile = functools.partial(frame.copy_tile, spec)
                copy_vector = functools.partial(frame.copy_vector, spec)
                frame.wait_until_free(free, step, STAGES)
                copy_tile(q_ref, item, rows, item.head, q_s, slot, loaded)
                copy_vector(inverse_ref, item, rows, inverse_s, slot, loaded)
                copy_vector(e_ref, item, rows, e_s, slot, loaded)
                copy_tile(g_ref, item, rows, item.head, g_s, slot, loaded)
                if gated:
                    copy_vector(gates_ref, item, rows, gates_s, slot, loaded)
                frame.wait_until_free(k_free, step, K_STAGES)
                for ref, own in ((k_ref, k_s), (v_ref, v_s)):
                    copy_tile(ref, item, rows, item.head, own, k_slot, k_loaded)

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def sum_piece(item: Item) -> None:
            @pl.when(item.before > 0)
            def _() -> None:
                plgpu.barrier_wait(r_free)

            if gated:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for ref, starts in ((r_ref, r_s), (u_ref, u_start_s)):
                for head, own in zip(heads_of(item), frame.by_heads(spec, starts), strict=True):
                    source = ref.at[item.batch, head, item.piece]
                    plgpu.copy_gmem_to_smem(source, own, start)
            plgpu.barrier_wait(start)
            sums = [
                ([load(rows).astype(F32) for rows in of_r], in_parts(load(of_u, OF_ROWS)))
                for of_r, of_u in zip(parts_of_r(), frame.by_heads(spec, u_start_s), strict=True)
            ]
            plgpu.commit_smem()  # what was read, ahead of the next piece's

            def sum_chunk(chunk: Any, carried: Any) -> Any:
                sums, to_start = carried
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                queries = in_heads(q_s, slot)
                inverses = [load(own, OF_ROWS) for own in frame.by_heads(spec, inverse_s.at[slot])]
                es = [load(own, OF_ROWS) for own in frame.by_heads(spec, e_s.at[slot])]
                gates: list[Any] = [None] * heads
                if gated:
                    gates = gates_in(slot)
                    for n, own in enumerate(gates):
                        inverses[n] = inverses[n] * jnp.exp2(own.since_middle())
                        es[n] = es[n] * own.if_steep(own.of(OF_ROWS))
                for n in range(heads):
                    map_queries(queries[n], inverses[n])
                    spread(es[n], minus_e_s.at[n])
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                if gated:
                    for n, own in enumerate(gates):
                        onto = to_start[n] * own.from_middle()
                        sums[n] = jax.tree.map(lambda x, onto=onto: x * onto, sums[n])
                    to_start = [own.to_middle() for own in gates]

                @pl.when(chunk > 0)
                def _() -> None:
                    plgpu.barrier_wait(r_free)

                if gated:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                of_heads = zip(parts_of_r(), frame.by_heads(spec, u_s), sums, strict=True)
                for rows, own_u, (total, parts) in of_heads:
                    for own, x in zip(rows, total, strict=True):
                        own[...] = x.astype(BF16)
                    own_u[...] = frame.of_parts(parts)
                plgpu.commit_smem()
                plgpu.barrier_arrive(r_ready)
                # g in as many parts as R.
                added = [[g] for g in in_heads(g_s, slot)]
                if gated and heads == 1:
                    added = [[frame.half_of(spec, g_s, slot, half) for half in range(2)]]

                def of_u(n: int) -> list[Any]:
                    return [(queries[n].T, minus_e_s.at[n].T)]

                def at_once(sums: Any) -> list[Any]:
                    products: list[Any] = []
                    for n, (total, parts) in enumerate(sums):
                        of_g = zip(total, added[n], strict=True)
                        products += [(own, [(x.T, queries[n])]) for own, x in of_g]
                        products.append((parts, of_u(n)))
                    found = iter(multiply(*products))
                    return [([next(found) for _ in total], next(found)) for total, _ in sums]

                def one_by_one(n: int, own: frame.Gates, total: Any, parts: jax.Array) -> Any:
                    """Where the chunk may be steep: there are no registers for all factors. For
                    want of them here ptxas would part the products of other chunks, too."""
                    reads, keeps = own.if_steep(own.of(OF_COLUMNS)), own.if_steep(own.last)
                    found: list[jax.Array] = []
                    for x, g in zip(total, added[n], strict=True):
                        scaled = frame.times_rows(g, reads)
                        found += multiply((x * keeps, [(scaled, queries[n])]))
                    (parts,) = multiply((parts * keeps, of_u(n)))
                    return found, parts

                if gated:
                    keep_sums(item, chunk)
                if some_steep:
                    sums = [one_by_one(n, own, *sums[n]) for n, own in enumerate(gates)]
                else:
                    sums = at_once(sums)
                if gated:
                    plgpu.commit_smem()  # what was read, ahead of the loads that overwrite it
                plgpu.barrier_arrive(free.at[slot])
                return sums, to_start

            lax.fori_loop(0, item.chunks, sum_chunk, (sums, [jnp.float32(1)] * heads))

        def parts_of_r() -> list[list[Any]]:
            """Of each head: with a decay of 128 columns two, as there are no more registers."""
            if heads == 1 and not gated:
                return [[r_s]]
            halves = [r_s.at[pl.ds(half * HALF, HALF)] for half in range(2)]
            return [halves] if heads == 1 else [[half] for half in halves]

        def keep_sums(item: Item, chunk: Any) -> None:
            """R and u behind the chunk, if it is one ahead of those."""
            number = item.chunks - 1 - chunk

            @pl.when((chunk == 0) | flows.is_kept(number + 1))
            def _() -> None:
                place = flows.place(deal, item, number)
                for own, ref in zip((r_s, u_s), flow_refs[2:], strict=True):
                    of_heads = frame.by_heads(spec, own)
                    for head, part_of_own in zip(heads_of(item), of_heads, strict=True):
                        plgpu.copy_smem_to_gmem(part_of_own, ref.at[item.batch, head, place])

        def from_here() -> jax.Array:
            """[j, i] and [t, i]: where the row is not behind the column."""
            return frame.position(1) >= frame.position(0)

        def seen(x: jax.Array) -> jax.Array:
            """x [j, i] where query i sees key j, else 0."""
            x = jnp.where(from_here(), x, 0.0)
            # Rounded in pairs: behind the choice each would be by itself.
            return lax.optimization_barrier(x)

        def walk(one: Callable[..., Any], number: int, ref: Any) -> None:
            """For dv or dk: `one` makes a chunk's, which is stored; and a flow [C] with a decay."""

            def walk_piece(item: Item) -> None:
                def walk_chunk(chunk: Any, _: None) -> None:
                    step = item.before + chunk
                    slots = slot_of(step, STAGES), slot_of(step, K_STAGES)
                    found, own_flows = one(*slots)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for own, x in zip(in_heads(out_s, number), found, strict=True):
                        own[...] = x.astype(BF16)
                    flow_rows = frame.by_heads(spec, flows_s.at[number]) if gated else []
                    for own, flow in zip(flow_rows, own_flows, strict=True):
                        own[...] = flow
                    plgpu.commit_smem()
                    rows = item.rows_from_the_end(chunk)
                    frame.leave_tile(spec, out_s, number, ref, item, rows, item.head)
                    for own, head in zip(flow_rows, heads_of(item), strict=False):
                        target = flow_refs[number].at[item.batch, head, rows]
                        plgpu.copy_smem_to_gmem(own, target)

                lax.fori_loop(0, item.chunks, walk_chunk, None)

            each(walk_piece)
            plgpu.wait_smem_to_gmem(0)

        def values_chunk(slot: Any, k_slot: Any) -> Any:
            plgpu.barrier_wait(k_loaded.at[k_slot])
            keys = in_heads(k_s, k_slot)
            xs = [frame.keys(spec, load(own)) for own in keys]
            if not gated:
                plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
                plgpu.barrier_arrive(k_free.at[k_slot])
            gates: list[Any] = []
            if gated:
                plgpu.barrier_wait(mapped.at[slot])
                gates = gates_in(slot)
                phi_k = [
                    frame.decayed_features_of(x, own.up_to_middle())
                    for x, own in zip(xs, gates, strict=True)
                ]
                for own, phi in zip(keys, phi_k, strict=True):
                    own[...] = phi
                plgpu.commit_smem()
                plgpu.barrier_arrive(k_mapped.at[k_slot])
                plgpu.barrier_arrive(k_free.at[k_slot])
            else:
                phi_k = [frame.features_of(x) for x in xs]
                plgpu.barrier_wait(mapped.at[slot])
            pairs = zip(phi_k, in_heads(q_s, slot), strict=True)
            a = list(multiply(*((frame.zeros(C, C), [(k, q.T)]) for k, q in pairs)))
            own_flows = []
            for n, own in enumerate(gates):
                if not some_steep:
                    own_flows.append(plgpu.layout_cast(jnp.zeros((C,), F32), OF_ROWS))
                    continue
                own_flows.append(jnp.where(own.steep, of_pairs(n, a[n]), 0.0))
                left = frame.in_columns(own.left(OF_ROWS), spec.F)
                a[n] *= own.of_pairs(queries=1)
                phi_k[n] = frame.rounded(phi_k[n].astype(F32) * left)
            if gated:
                plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
            weights = [frame.rounded(seen(own)) for own in a]
            plgpu.barrier_wait(r_ready)
            factors = zip(
                phi_k, frame.by_heads(spec, r_s), weights, in_heads(g_s, slot), strict=True
            )
            dv = multiply(
                *((frame.zeros(C, spec.V), [(k, r.T), (w, g)]) for k, r, w, g in factors)
            )
            plgpu.barrier_arrive(r_free)
            plgpu.barrier_arrive(free.at[slot])
            return dv, own_flows

        def of_pairs(n: int, a: jax.Array) -> jax.Array:
            """I of a steep chunk, of a as it was multiplied: what it lacks of the decay b has."""
            parts = [frame.half_of(spec, out_s, DV, part) for part in range(pairs_parts)]
            plgpu.barrier_wait(pairs_ready)
            m = seen(a) * sum(load(pairs_s.at[n, part]).astype(F32) for part in range(pairs_parts))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for own in parts:
                rounded = frame.rounded(m)
                own[...] = rounded
                m = m - rounded.astype(F32)
            plgpu.commit_smem()
            plgpu.barrier_arrive(pairs_free)
            products = [(before_s, own) for own in parts]
            (across,) = multiply((frame.zeros(C, C), products))  # [t, i]
            return jnp.sum(jnp.where(from_here(), across, 0.0), axis=1)

        def keys_chunk(slot: Any, k_slot: Any) -> Any:
            plgpu.barrier_wait(mapped.at[slot])
            queries, values = in_heads(q_s, slot), in_heads(v_s, k_slot)
            es = [load(own, OF_COLUMNS) for own in frame.by_heads(spec, e_s.at[slot])]
            plgpu.barrier_wait(k_loaded.at[k_slot])
            if some_steep:
                plgpu.barrier_wait(k_mapped.at[k_slot])
            minus_e = [frame.in_rows(-e, C) for e in es]
            starts = [frame.zeros(C, C)] * heads if rounds else minus_e
            pairs = zip(starts, values, in_heads(g_s, slot), strict=True)
            found = list(multiply(*((start, [(v, g.T)]) for start, v, g in pairs)))
            if rounds:
                found = [
                    frame.rounded(own).astype(F32) + e
                    for own, e in zip(found, minus_e, strict=True)
                ]
            gates: list[Any] = [None] * heads
            if gated:
                gates = gates_in(slot)
            slopes: list[Any] = [jnp.exp2(own.up_to_middle()) if gated else None for own in gates]
            plgpu.barrier_wait(r_ready)
            states, keys = frame.by_heads(spec, r_s), in_heads(k_s, k_slot)
            of_others = [
                frame.in_rows(load(own, OF_COLUMNS), C) for own in frame.by_heads(spec, u_s)
            ]

            def parts_of(b: jax.Array) -> list[jax.Array]:
                """Rounded, and what that leaves off."""
                rounded = frame.rounded(b)
                return [rounded, frame.rounded(b - rounded.astype(F32))]

            def products_of(n: int) -> Any:
                factors = [(b, queries[n]) for b in parts_of(seen(found[n]))]
                return of_others[n], [(values[n], states[n]), *factors]

            def one_by_one(n: int) -> tuple[jax.Array, jax.Array]:
                """The same where the chunk may be steep, and A."""
                own, parts = gates[n], [pairs_s.at[n, number] for number in range(2)]
                b = seen(found[n] * own.of_pairs(queries=1))
                for ref, part in zip(parts, parts_of(b), strict=True):
                    ref[...] = part
                plgpu.commit_smem()
                plgpu.barrier_arrive(pairs_ready)
                (read,) = multiply((of_others[n], [(values[n], states[n])]))
                read *= frame.in_columns(own.left(OF_ROWS), spec.F)
                flow = jnp.sum(load(keys[n]).astype(F32) * read, axis=1)
                (read,) = multiply((read, [(part, queries[n]) for part in parts]))
                plgpu.commit_smem()
                plgpu.barrier_wait(pairs_free)
                return read, flow

            plgpu.commit_smem()  # e was read, ahead of the load that overwrites it
            reads: list[jax.Array] = []
            if some_steep:
                dk, reads = map(list, zip(*map(one_by_one, range(heads)), strict=True))
            else:
                dk = list(multiply(*map(products_of, range(heads))))
            plgpu.barrier_arrive(r_free)
            plgpu.barrier_arrive(free.at[slot])
            if gated and not some_steep:
                plgpu.barrier_wait(k_mapped.at[k_slot])
            own_flows = []
            for n, (own, slope) in enumerate(zip(keys, slopes, strict=True)):
                x = load(own).astype(F32)
                if gated:  # phi(k), of which the derivative is the smaller of it and 1
                    flow = jnp.sum(x * dk[n], axis=1)
                    if some_steep:
                        flow = jnp.where(gates[n].steep, reads[n], flow)
                    own_flows.append(flow)
                    dk[n] *= jnp.minimum(x, frame.in_columns(slope, spec.F))
                else:
                    dk[n] *= jnp.exp2(jnp.minimum(x, 0.0) * LOG2_E)
            plgpu.commit_smem()
            plgpu.barrier_arrive(k_free.at[k_slot])
            return dk, own_flows

        @pl.when(frame.group() == frame.MEMORY)
        def _memory() -> None:
            frame.set_registers(frame.MEMORY_REGISTERS)
            steps = each(load_piece)
            frame.await_the_last(free, steps, STAGES)
            frame.await_the_last(k_free, steps, K_STAGES)

        @pl.when(frame.group() == STATE)
        def _state() -> None:
            frame.set_registers(state_registers)
            steps = each(sum_piece)

            @pl.when(steps > 0)
            def _() -> None:
                plgpu.barrier_wait(r_free)

            if gated:
                plgpu.wait_smem_to_gmem(0)

        @pl.when(frame.group() == DV)
        def _dv() -> None:
            frame.set_registers(dv_registers)
            if some_steep:
                # Not made where it is multiplied: as a factor in registers, the same in all chunks,
                # half of its rows were not there yet in a piece's first one.
                before_s[...] = jnp.where(from_here(), 0.0, 1.0).astype(BF16)
                plgpu.commit_smem()
            walk(values_chunk, DV, dv_ref)

        @pl.when(frame.group() == DK)
        def _dk() -> None:
            frame.set_registers(dk_registers)
            walk(keys_chunk, DK, dk_ref)

    return body, scratch
