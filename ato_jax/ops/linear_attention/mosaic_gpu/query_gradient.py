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

phi(k) carries the decay up to the middle of the chunk (`chunk_decay`), as S and z do, D_i and z_i
what is left: their rows are multiplied by exp2(G_i - G_m) at the end. In a steep chunk w, pairs'
decays in z_i, and what is read of the state are scaled in registers, phi(k) there for its sums.

For the gradient of the decays (`scans/flows.py`) each half leaves a sum for each row, its columns'
of

    phi'_i . (D_i - e_i z_i)    phi'_i = exp2(G_i - G_m) phi(q_i) inverse_i, rounded

which is what the pairs of the query add to the loss's derivative, and S and z ahead of some chunks.
Keys leave theirs, of which those of the same pairs are to cancel: so either both round w, or here,
too, it is multiplied with what rounding it leaves off (`rounds_pairs`). In a steep chunk the sum is
of what is read of the state alone. Where `splits_states`, S is multiplied in two parts, rounded and
what that leaves off, and is not left: the second part lies in dq's slots until dq is there.

The first chunks of a sequence multiply phi(k) in two parts, and in bfloat16 S
(`chunks_in_two_parts`). There the warpgroups of values map k, each its half, and what rounding
leaves off lies in dq's other slot until S and z are summed up, behind all else.

Where a tile is two heads', the halves are these, and nothing has to be exchanged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import (
    ALIKE,
    BF16,
    F32,
    HALF,
    OF_COLUMNS,
    OF_ROWS,
    Item,
    load,
    multiply,
    slot_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu import chunk_decay, feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import FEATURES, MEMORY, C
from ato_jax.ops.linear_attention.scans import flows
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of g and v, of q, and of k, which is loaded, mapped and multiplied.
STAGES, Q_STAGES, K_STAGES = 2, 2, 3
# Of values and features.
OWN_REGISTERS, GATED_REGISTERS = (216, 56), (224, 40)
# Chunks at a sequence's start whose queries see few keys. By emulation at T = 65,536 and inputs of
# scale 0.01, over 40 draws, the worst row is 3.8 times its limit in bfloat16 and 1.6 times in
# float16; with two parts in so many chunks 0.87 and 0.47 times.
FEW_CHUNKS = {"bfloat16": 2, "float16": 1}


def query_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
    gates: jax.Array | None,
    steep: jax.Array | None,
    lengths: jax.Array | None = None,
    s_units: jax.Array | None = None,
    weights: tuple[jax.Array, jax.Array] | None = None,
    share: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, flows.OfQueries | None]:
    """dq; inverse and e [B, H, T up to a whole chunk], float32; with a decay, what its gradient
    needs. s, z, gates, steep, lengths and s_units are as in `output`. `weights` are inverse and e
    where they are of other keys, too; then dq is these keys' share, and `share` the others', if it
    is to be added."""
    deal, gated = dataclasses.replace(deal, most_blocks=deal.items), gates is not None
    heads = frame.heads_of_tile(spec)
    sums_keys = _sums_keys(spec)
    rows = jax.ShapeDtypeStruct((spec.B, spec.H, mosaic.whole_chunks(spec.T)), F32)
    out_type: Any = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
    if weights is None:
        out_type = *out_type, rows, rows
    arrays: Any = q, k, v, g, s, z, np.ones((ALIKE, C), q.dtype)
    if s_units is not None:
        arrays = *arrays, s_units
    if spec.kv_lengths:
        arrays = *arrays, lengths
    if gated:
        arrays = *arrays, gates, steep
        of_edges = spec.B, spec.G, flows.places(deal)
        out_type = *out_type, jax.ShapeDtypeStruct((2 // heads, *rows.shape), F32)
        if not splits_states(spec):
            out_type = *out_type, jax.ShapeDtypeStruct((*of_edges, spec.V, spec.F), BF16)
        if sums_keys:
            out_type = *out_type, jax.ShapeDtypeStruct((*of_edges, spec.F), F32)
    if weights is not None:
        arrays = *arrays, *weights
    if share is not None:
        arrays = *arrays, share
    walk = functools.partial(
        _walk, spec, deal, given=weights is not None, adds=share is not None
    )
    body, scratch = walk(some_steep=False)
    rest = walk(some_steep=True) if gated else None
    name = "query_gradient" if deal.end is None else "later_query_gradient"
    found = frame.launch(body, name, deal, out_type, scratch, arrays, rest=rest)
    dq, *flow = found
    if weights is not None:
        inverse, e = weights
    else:
        inverse, e, *flow = flow
    if not spec.normalize:
        inverse, e = jnp.full(rows.shape, spec.scale, F32), jnp.zeros(rows.shape, F32)
    if not gated:
        return dq, inverse, e, None
    return dq, inverse, e, flows.OfQueries(*flow)


def _sums_keys(spec: LinearAttentionSpec) -> bool:
    # A returned state's cotangent is one of z, too.
    return spec.normalize or spec.decay is not None and spec.return_state


def rounds_pairs(spec: LinearAttentionSpec, some_steep: bool) -> bool:
    """Whether g_i . v_j is rounded in both walks, so that the sums for the decays' gradient are of
    the same pairs; else they multiply what rounding leaves off. Not where a sum over all steps may
    cancel; and of two heads in a tile the walk from the end loses more than this one gains."""
    if _adds_up_e(spec):
        return False
    return spec.decay == "step" and not some_steep and frame.heads_of_tile(spec) == 1


def _adds_up_e(spec: LinearAttentionSpec) -> bool:
    """Whether the gradient of a state's k_sum, a sum of e_i phi'_i over all queries, is wanted. The
    e_i have either sign and features of elu + 1 have one, so e_i cancels in every channel alike,
    and what rounding g_i . v_j leaves off e_i does not: up to 6e-3 of the sum."""
    return spec.normalize and spec.initial_state


def splits_states(spec: LinearAttentionSpec) -> bool:
    """Whether both walks multiply a state in two parts, rounded and what that leaves off.

    Products of features of either sign cancel, and rounding does not. So what a rounded S and R
    leave off adds up in the gradient of a decay per head, a sum over all steps: 8e-2 of it at 1,024
    steps of a decay of -1, where features of one sign have 1e-2.
    """
    # With a normaliser R has a vector beside it, for which shared memory has no room, too.
    one_sign = spec.feature_map.nonnegative
    return spec.decay == "head" and not spec.normalize and not one_sign


def splits_in_walk(spec: LinearAttentionSpec, some_steep: bool) -> bool:
    """Whether the kernel of such pieces does. Where a tile is one head's, all of its chunks are
    steep or none is, and of a steep one no state is left that could err later."""
    return splits_states(spec) and not (some_steep and frame.heads_of_tile(spec) == 1)


def chunks_in_two_parts(spec: LinearAttentionSpec) -> int:
    """In how many chunks of a sequence's start phi(k), and S in bfloat16, are multiplied in two
    parts, rounded and what that leaves off.

    sum_j (g_i . v_j - e_i) phi(k_j) cancels where keys are nearly alike, and the roundings of
    phi(k_j) do not: in all, beside either term, they are about a rounding, and where g_i . out_i is
    small by chance many. Both terms of row i are about 1 / sqrt(i) of the first row's. Further on,
    the error is small beside half the RMS row of 65,536 rows, which a row counts as at least.
    """
    if not spec.normalize or spec.decay is not None:
        return 0
    if frame.heads_of_tile(spec) == 1:
        # It spills 184 bytes in place of 52, and at D = 128 a call with gradients takes 1.11 times
        # as long on an H200; with two heads in a tile 1.005 times.
        return 0
    return FEW_CHUNKS[spec.dtype]


def _walk(
    spec: LinearAttentionSpec, deal: mosaic.Deal, *, given: bool, adds: bool, some_steep: bool
) -> tuple[mosaic.Body, dict[str, Any]]:
    """A kernel's body and scratch. With a decay, of the pieces of which some chunk is steep, or of
    the others alone: what the steep need would cost all others registers, in a loop beside theirs,
    too.
    """
    tiling = frame.tiling(spec)
    gated, heads = spec.decay is not None, frame.heads_of_tile(spec)
    group_size = spec.H // spec.G
    values_registers, features_registers = GATED_REGISTERS if gated else OWN_REGISTERS
    sums_keys, phi = _sums_keys(spec), feature_maps.features(spec)
    has_units = mosaic.has_units(tiling.dtype)
    splits = splits_in_walk(spec, some_steep)
    few_chunks = chunks_in_two_parts(spec)
    # In which w is multiplied: rounded, and what that leaves off.
    w_parts = 1 if rounds_pairs(spec, some_steep) or not (gated or _adds_up_e(spec)) else 2
    scratch = dict(
        g_s=tiling.tiles(STAGES),
        v_s=tiling.tiles(STAGES),
        q_s=tiling.of_rows(Q_STAGES, 2, C, HALF),
        k_s=tiling.of_rows(K_STAGES, 2, C, HALF),
        s_s=tiling.shared(2, *((spec.V, HALF) if gated else (HALF, spec.V))),
        # Two slots of dq; before a piece's first chunk, S of its start [V, HALF]. Where states are
        # split, before a chunk's dq, what rounding S leaves off, alike.
        dq_s=tiling.of_rows(2, 2 * C, HALF),
        ones_s=tiling.shared(ALIKE, C),
        z_s=plgpu.SMEM((2, HALF), F32),
        parts_s=plgpu.SMEM((2, 2, 2, C), F32),
        rows_s=plgpu.SMEM((2 * heads, 2, C), F32),
        loaded=plgpu.Barrier(num_arrivals=2 * heads, num_barriers=STAGES),
        q_loaded=plgpu.Barrier(num_arrivals=2 + 2 * heads * given, num_barriers=Q_STAGES),
        k_loaded=plgpu.Barrier(num_arrivals=2 + heads * gated, num_barriers=K_STAGES),
        k_mapped=plgpu.Barrier(num_arrivals=1, num_barriers=K_STAGES),
        free=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        q_free=plgpu.Barrier(num_arrivals=2, num_barriers=Q_STAGES),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=K_STAGES),
        start_loaded=plgpu.Barrier(num_arrivals=5 + 2 * has_units),
        exchanged=plgpu.Barrier(num_arrivals=2),
    )
    if has_units:
        # The units of S's rows: [V] as S is loaded, [HALF] as its transpose is multiplied.
        scratch |= dict(
            start_units_s=plgpu.SMEM((2, spec.V), F32), units_s=plgpu.SMEM((2, HALF), F32)
        )
    if gated:
        scratch |= dict(
            gates_s=plgpu.SMEM((K_STAGES, heads * C), F32),
            flows_s=plgpu.SMEM((2, 2, C), F32),
        )
    if given:
        scratch |= dict(
            inverse_s=plgpu.SMEM((Q_STAGES, heads * C), F32),
            e_s=plgpu.SMEM((Q_STAGES, heads * C), F32),
        )
    if adds:
        scratch |= dict(share_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=2))

    def body(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        g_ref: Any,
        s_ref: Any,
        z_ref: Any,
        ones_ref: Any,
        *optional: Any,
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
        flows_s: Any = None,
        start_units_s: Any = None,
        units_s: Any = None,
        inverse_s: Any = None,
        e_s: Any = None,
        share_loaded: Any = None,
    ) -> None:
        units_ref, *rest = optional if has_units else (None, *optional)
        lengths_ref, *refs = rest if spec.kv_lengths else (None, *rest)
        gates_ref, steep_ref, *refs = refs if gated else (None, None, *refs)
        given_refs, refs = (refs[:2], refs[2:]) if given else ((), refs)
        share_ref, *refs = refs if adds else (None, *refs)
        dq_ref, *flow_refs = refs
        weight_refs: Sequence[Any] = ()
        if not given:
            weight_refs, flow_refs = flow_refs[:2], flow_refs[2:]

        leaves_weights = spec.normalize and not given
        takes = chunk_decay.takes_pieces(steep_ref, some_steep, group_size)
        each = functools.partial(deal.each, takes=takes)
        gates_in = functools.partial(chunk_decay.gates_of, from_the_end=deal.end is not None)

        def of_keys(item: Item) -> Item:
            """The item with the head of its keys."""
            if group_size == 1:
                return item
            return item._replace(head=frame.head_of_keys(spec, item.head))

        def start_in(half: Any) -> Any:
            """S of a piece's start, before its first chunk."""
            return dq_s.at[half] if heads == 1 else dq_s.at[half, pl.ds(0, spec.V)]

        def load_piece(item: Item) -> None:
            kv_item = of_keys(item)
            plgpu.copy_gmem_to_smem(ones_ref, ones_s, start_loaded)
            for half in range(2):
                head, columns = tiling.head_of(kv_item.head, half), tiling.columns_of(half)
                of_piece = item.batch, head, item.piece
                if has_units:
                    source = units_ref.at[of_piece]
                    plgpu.copy_gmem_to_smem(source, start_units_s.at[half], start_loaded)
                source = s_ref.at[(*of_piece, slice(None), columns)]
                plgpu.copy_gmem_to_smem(source, mosaic.for_copy(start_in(half)), start_loaded)
                plgpu.copy_gmem_to_smem(z_ref.at[(*of_piece, columns)], z_s.at[half], start_loaded)

            def load_chunk(chunk: Any, _: None) -> None:
                rows = item.rows(chunk)
                slot = slot_of(chunk, STAGES)
                mosaic.wait_until_free(free, chunk, STAGES)
                for ref, own, head in ((g_ref, g_s, item.head), (v_ref, v_s, kv_item.head)):
                    tiling.copy_tile(ref, item, rows, head, own, slot, loaded)
                for ref, own, head, stages, own_loaded, own_free in (
                    (k_ref, k_s, kv_item.head, K_STAGES, k_loaded, k_free),
                    (q_ref, q_s, item.head, Q_STAGES, q_loaded, q_free),
                ):
                    slot = slot_of(chunk, stages)
                    mosaic.wait_until_free(own_free, chunk, stages)
                    for half in range(2):
                        plgpu.copy_gmem_to_smem(
                            tiling.part(ref, item, rows, head, half),
                            mosaic.for_copy(own.at[slot, half]),
                            own_loaded.at[slot],
                        )
                    if gated and ref is k_ref:
                        tiling.copy_vector(gates_ref, kv_item, rows, gates_s, slot, k_loaded)
                for ref, own in zip(given_refs, (inverse_s, e_s), strict=False):
                    slot = slot_of(chunk, Q_STAGES)
                    tiling.copy_vector(ref, item, rows, own, slot, q_loaded)

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def map_piece(item: Item) -> None:
            def map_chunk(chunk: Any, _: None) -> None:
                slot = slot_of(chunk, K_STAGES)
                plgpu.barrier_wait(k_loaded.at[slot])
                exponents: list[Any] = [None] * heads
                if gated:
                    of_heads = tiling.by_heads(gates_s.at[slot])
                    exponents = [gates_in(own).up_to_middle() for own in of_heads]

                def map_keys() -> None:
                    for half in range(2):
                        feature_maps.map_keys_in_place(
                            spec, k_s.at[slot, half], half, exponents[half % heads]
                        )

                if few_chunks:
                    pl.when(~sees_few_keys(item, chunk))(map_keys)
                else:
                    map_keys()
                if lengths_ref is not None:
                    keep_rows(item, chunk, slot)
                plgpu.commit_smem()
                plgpu.barrier_arrive(k_mapped.at[slot])

            lax.fori_loop(0, item.chunks, map_chunk, None)

        def sees_few_keys(item: Item, chunk: Any) -> Any:
            return item.first_row + chunk * C < few_chunks * C

        def keep_rows(item: Item, chunk: Any, k_slot: Any) -> None:
            """Sets rows of features, v and g to 0 that do not count."""
            slot, count = slot_of(chunk, STAGES), item.rows_within(chunk, lengths_ref)
            plgpu.barrier_wait(loaded.at[slot])
            for half in range(2):
                mosaic.keep_rows(k_s.at[k_slot, half], count)
                for tiles in (g_s, v_s):
                    mosaic.keep_rows(tiling.half_of(tiles, slot, half), count)

        def multiply_piece(item: Item) -> None:
            half = mosaic.group()
            head = tiling.head_of(item.head, half)

            def ones_where(seen: jax.Array) -> jax.Array:
                return jnp.where(seen, 1.0, 0.0).astype(tiling.dtype)

            def sees() -> jax.Array:
                query, key = mosaic.position(0), mosaic.position(1)
                return query >= key if deal.end is None else query < key

            plgpu.barrier_wait(start_loaded)

            def keep_state(item: Item, chunk: Any) -> None:
                """The state ahead of the chunk, if it is kept; once for a group of heads."""
                kept = flows.is_kept(chunk)
                if group_size > 1:
                    kept &= lax.rem(head, group_size) == 0

                @pl.when(kept)
                def _() -> None:
                    of_state = head if group_size == 1 else lax.div(head, group_size)
                    at = item.batch, of_state, flows.place(deal, item, chunk)
                    kv_ref, *z_refs = flow_refs[1:]
                    columns = tiling.columns_of(half)
                    kv = kv_ref.at[(*at, slice(None), columns)]
                    plgpu.copy_smem_to_gmem(s_s.at[half], kv)
                    for ref in z_refs:
                        plgpu.copy_smem_to_gmem(z_s.at[half], ref.at[(*at, columns)])

            def multiply_chunk(chunk: Any, carried: Any) -> Any:
                S, totals, to_end = carried
                slot, q_slot = slot_of(chunk, STAGES), slot_of(chunk, Q_STAGES)
                k_slot, parity = slot_of(chunk, K_STAGES), slot_of(chunk, 2)
                count = item.rows_within(chunk, lengths_ref)
                features = k_s.at[k_slot, half]
                g, v = (tiling.head_in(tiles, slot, half) for tiles in (g_s, v_s))

                def publish() -> None:
                    if gated:
                        mosaic.store_transposed(s_s.at[half], S.astype(BF16))
                        if splits:
                            # The stores of dq that lay there.
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            rest = S - S.astype(BF16).astype(F32)
                            mosaic.store_transposed(start_in(half), rest.astype(BF16))
                    elif has_units:
                        units = mosaic.units_of_rows([S])
                        units_s.at[half][...] = units
                        s_s.at[half][...] = mosaic.in_units(S, units).astype(tiling.dtype)
                    else:
                        s_s.at[half][...] = S.astype(BF16)
                    if sums_keys:
                        z_s.at[half][...] = jnp.max(totals, axis=1)  # of columns that are alike
                    plgpu.commit_smem()

                def where_seen(x: jax.Array) -> jax.Array:
                    # Rounded in pairs: behind the choice each would be by itself.
                    return lax.optimization_barrier(jnp.where(sees(), x, 0.0))

                def parts_of(x: jax.Array) -> list[jax.Array]:
                    """Rounded, and where `w_parts` is 2 what that leaves off."""
                    rounded = mosaic.rounded(x)
                    return [rounded, mosaic.rounded(x - rounded.astype(F32))][:w_parts]

                def features_of_queries() -> jax.Array:
                    x = load(q_s.at[q_slot, half])
                    phi_q = phi.unrounded(x, *([] if phi.slope_is_known else [half * HALF]))
                    return mosaic.kept(phi_q, count)

                def let_queries_go() -> None:
                    plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
                    plgpu.barrier_arrive(q_free.at[q_slot])

                def z_before() -> jax.Array:
                    return mosaic.in_rows(load(z_s.at[half], OF_COLUMNS), C)

                plgpu.barrier_wait(loaded.at[slot])
                plgpu.barrier_wait(k_mapped.at[k_slot])
                gates: Any = None
                lasting: Any = None
                if gated:
                    gates = gates_in(tiling.rows_in(gates_s, k_slot, half), some_steep)
                    onto = to_end * gates.to_middle()
                    S, totals, to_end = S * onto, totals * onto, gates.from_middle()
                    lasting = jnp.exp2(gates.since_middle())

                few: Any = None
                rest_of_keys: Any = None
                if few_chunks:
                    few = sees_few_keys(item, chunk)
                    # What rounding phi(k) leaves off, where dq of the last chunk was.
                    rest_of_keys = dq_s.at[half, pl.ds((1 - parity) * C, C)]

                def map_keys() -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    first: Any = half * HALF
                    x = phi.present(load(features), first)
                    phi_k = mosaic.kept(phi.unrounded(x, first), count)
                    rounded = mosaic.rounded(phi_k, tiling.dtype)
                    rest_of_keys[...] = (phi_k - rounded.astype(F32)).astype(tiling.dtype)
                    features[...] = rounded
                    plgpu.commit_smem()

                def rest_of_state() -> jax.Array:
                    """The product with what rounding S leaves off, where S will lie."""
                    s_s.at[half][...] = (S - S.astype(BF16).astype(F32)).astype(BF16)
                    plgpu.commit_smem()
                    (D,) = multiply((mosaic.zeros(C, HALF), [(g, s_s.at[half].T)]))
                    return D

                if few is not None:
                    pl.when(few)(map_keys)
                initial: Any = None
                if few_chunks > 1:
                    initial = lax.cond(few, rest_of_state, lambda: mosaic.zeros(C, HALF))
                (w,) = multiply((mosaic.zeros(C, C), [(g, v.T)]), meanwhile=publish)

                state = s_s.at[half] if gated else s_s.at[half].T
                of_state_parts = [(g, state), *([(g, start_in(half))] if splits else [])]

                def at_once() -> tuple[Any, ...]:
                    """D, z_i where it is needed, S and z behind the chunk."""
                    reads = [*of_state_parts]
                    weights: list[jax.Array] = []
                    if not has_units:
                        weights = parts_of(where_seen(w))
                        reads += [(part, features) for part in weights]
                    start = mosaic.zeros(C, HALF) if initial is None else initial
                    of_queries = [(start, reads)]
                    if spec.normalize:
                        of_queries.append((z_before(), [(ones_where(sees()), features)]))
                    if few is not None:
                        of_queries = start_at_rest(weights, of_queries)
                    behind = [(S, [(features.T, v)])]
                    if sums_keys:
                        behind.append((totals, [(features.T, ones_s.T)]))
                    D, *found = multiply(*of_queries, *behind)
                    z, (own_S, *own_totals) = found[: spec.normalize], found[spec.normalize :]
                    if has_units:
                        D = add_pairs(D)
                    return D, z, own_S, own_totals[0] if sums_keys else totals

                def start_at_rest(weights: list[jax.Array], sums: list[Any]) -> list[Any]:
                    """The sums D and z_i, which start at what the rest of phi(k) adds to them; in
                    float16 z_i alone."""
                    (D, of_D), (z, of_z) = sums
                    of_rest = [(part, rest_of_keys) for part in weights]
                    of_ones = [(ones_where(sees()), rest_of_keys)]
                    if has_units:
                        (z,) = lax.cond(few, lambda: multiply((z, of_ones)), lambda: (z,))
                    else:
                        D, z = lax.cond(
                            few, lambda: multiply((D, of_rest), (z, of_ones)), lambda: (D, z)
                        )
                    return [(D, of_D), (z, of_z)]

                def behind_rest() -> tuple[jax.Array, ...]:
                    """S and z behind the chunk, with what the rest of phi(k) adds to them."""
                    of_keys = rest_of_keys.T
                    return multiply((S, [(of_keys, v)]), (totals, [(of_keys, ones_s.T)]))

                def add_pairs(D: jax.Array) -> jax.Array:
                    """Scales D, the product with the state, by the units of its columns, and adds
                    the product with the chunk's own keys."""
                    seen = jnp.where(sees(), w, 0.0)
                    units = mosaic.units_of_rows([seen])
                    weights = mosaic.in_units(seen, units)
                    weights = mosaic.rounded(lax.optimization_barrier(weights), tiling.dtype)
                    D *= mosaic.in_rows(load(units_s.at[half], OF_COLUMNS), C)
                    D = mosaic.in_units(D, units)
                    if few is not None:
                        of_rest = [(weights, rest_of_keys)]
                        (D,) = lax.cond(few, lambda: multiply((D, of_rest)), lambda: (D,))
                    (D,) = multiply((D, [(weights, features)]))
                    return D * mosaic.in_columns(units, HALF)

                def one_by_one() -> tuple[Any, ...]:
                    """The same where the chunk may be steep, and what is read of the state: one
                    product after the other, as there are no registers for all factors."""
                    left = mosaic.in_columns(gates.if_steep(gates.of(OF_ROWS)), HALF)
                    pairs = gates.of_pairs(queries=0)
                    (D,) = multiply((mosaic.zeros(C, HALF), of_state_parts))
                    D *= left
                    phi_q = features_of_queries()
                    reads = [jnp.sum(phi_q * D, axis=1)]
                    weights = parts_of(where_seen(w * pairs))
                    (D,) = multiply((D, [(part, features) for part in weights]))
                    z: list[jax.Array] = []
                    if spec.normalize:
                        before = z_before() * left
                        reads.append(jnp.sum(phi_q * before, axis=1))
                        decays = mosaic.rounded(where_seen(pairs))
                        z += multiply((before, [(decays, features)]))
                    added = mosaic.times_rows(features, gates.left(OF_COLUMNS))
                    keeps = gates.if_steep(gates.last)
                    (own_S,) = multiply((S * keeps, [(added, v)]))
                    own_totals = totals
                    if sums_keys:
                        (own_totals,) = multiply((totals * keeps, [(added, ones_s.T)]))
                    return D, z, own_S, own_totals, reads

                of_state: Any = None
                leaves_state = gated and not splits_states(spec)
                if leaves_state:
                    keep_state(item, chunk)
                if some_steep:
                    plgpu.barrier_wait(q_loaded.at[q_slot])
                    D, z, S, totals, of_state = one_by_one()
                else:
                    D, z, S, totals = at_once()
                if gated:
                    plgpu.commit_smem()  # what was read, ahead of the loads that overwrite it

                def await_slot() -> None:
                    # Until the stores of two chunks ago have read their slots. Those of the last
                    # chunk may still read theirs: one store of dq, and one of each array of rows.
                    plgpu.wait_smem_to_gmem(1 + heads * leaves_weights + gated, wait_read_only=True)

                def let_values_go() -> None:
                    plgpu.barrier_arrive(free.at[slot])

                if few is None:
                    let_values_go()
                else:
                    pl.when(~few)(let_values_go)
                plgpu.barrier_arrive(k_free.at[k_slot])
                if leaves_state:

                    @pl.when(flows.is_kept(chunk))
                    def _() -> None:  # S and z, ahead of what replaces them
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                if adds:
                    await_slot()
                    source = tiling.part(share_ref, item, item.rows(chunk), item.head, half)
                    target = mosaic.for_copy(dq_s.at[half, pl.ds(parity * C, C)])
                    plgpu.copy_gmem_to_smem(source, target, share_loaded.at[half])
                if not some_steep:
                    plgpu.barrier_wait(q_loaded.at[q_slot])
                phi_q = features_of_queries()
                own_parts: Any = ()
                inverse: Any = spec.scale
                e: Any = None
                if given:
                    inverse, e = (
                        load(tiling.rows_in(own, q_slot, half), OF_ROWS) for own in (inverse_s, e_s)
                    )
                    D -= mosaic.in_columns(e, HALF) * z[0]
                elif spec.normalize:
                    own_parts = jnp.sum(phi_q * D, axis=1), jnp.sum(phi_q * z[0], axis=1)
                    for number, own in enumerate(own_parts if heads == 1 else ()):
                        parts_s.at[parity, half, number][...] = own
                if phi.slope_is_known:
                    let_queries_go()
                else:
                    plgpu.commit_smem()
                if leaves_weights:
                    total, den = own_parts
                    if heads == 1:
                        plgpu.barrier_arrive(exchanged)
                        plgpu.barrier_wait(exchanged)
                        total, den = (
                            own + load(parts_s.at[parity, 1 - half, number], OF_ROWS)
                            for number, own in enumerate(own_parts)
                        )
                    if gated:
                        total, den = total * lasting, den * lasting
                    inverse = 1.0 / jnp.maximum(den, spec.eps)
                    e = jnp.where(den > spec.eps, total * inverse, 0.0)
                    D -= mosaic.in_columns(e, HALF) * z[0]
                scale = inverse * lasting if gated else inverse
                if gated or spec.normalize:
                    scale = mosaic.in_columns(scale, HALF)
                dq = D * scale
                if phi.slope_is_known:
                    dq *= phi.slope_of_features(phi_q)
                else:
                    # Loaded once more: there are no registers to keep q, or its derivative.
                    dq *= phi.slope(load(q_s.at[q_slot, half]))
                    let_queries_go()
                if not adds:
                    await_slot()
                if gated:
                    flow = jnp.sum(mosaic.rounded(phi_q * scale).astype(F32) * D, axis=1)
                    if some_steep:
                        read = of_state[0] - e * of_state[1] if spec.normalize else of_state[0]
                        flow = jnp.where(gates.steep, read * inverse, flow)
                    flows_s.at[half, parity][...] = flow
                dq_slot = dq_s.at[half, pl.ds(parity * C, C)]
                if adds:
                    plgpu.barrier_wait(share_loaded.at[half])
                    dq += load(dq_slot).astype(F32)
                dq_slot[...] = mosaic.kept(dq, count).astype(tiling.dtype)
                if leaves_weights and heads == 1:
                    rows_s.at[half, parity][...] = jnp.where(half == 0, inverse, e)
                elif leaves_weights:
                    for number, own in enumerate((inverse, e)):
                        rows_s.at[2 * half + number, parity][...] = own
                plgpu.commit_smem()
                rows = item.rows(chunk)
                target = tiling.part(dq_ref, item, rows, item.head, half)
                plgpu.copy_smem_to_gmem(mosaic.for_copy(dq_slot), target)
                if gated:
                    of_half = half if heads == 1 else 0
                    target = flow_refs[0].at[of_half, item.batch, head, rows]
                    plgpu.copy_smem_to_gmem(flows_s.at[half, parity], target)
                for number, ref in enumerate(weight_refs if leaves_weights else ()):
                    target = ref.at[item.batch, head, rows]
                    if heads == 2:
                        plgpu.copy_smem_to_gmem(rows_s.at[2 * half + number, parity], target)
                        continue

                    @pl.when(half == number)
                    def _(target: Any = target) -> None:
                        plgpu.copy_smem_to_gmem(rows_s.at[half, parity], target)

                if few is not None:
                    # Here, where no other sum takes registers.
                    S, totals = lax.cond(few, behind_rest, lambda: (S, totals))
                    pl.when(few)(let_values_go)
                return S, totals, to_end

            # The start's transpose, which is what a product with the identity reads.
            same = ones_where(mosaic.position(0) == mosaic.position(1))
            (S,) = multiply((mosaic.zeros(HALF, spec.V), [(same, start_in(half).T)]))
            if has_units:
                S *= mosaic.in_rows(load(start_units_s.at[half], OF_COLUMNS), HALF)
            totals = mosaic.in_columns(load(z_s.at[half], OF_ROWS), ALIKE)  # z's half, [64, 8]
            lax.fori_loop(0, item.chunks, multiply_chunk, (S, totals, jnp.float32(1)))

        @pl.when(mosaic.group() == MEMORY)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, frame.WARPGROUPS)
            steps = each(load_piece)
            mosaic.await_the_last(free, steps, STAGES)
            mosaic.await_the_last(k_free, steps, K_STAGES)
            mosaic.await_the_last(q_free, steps, Q_STAGES)

        @pl.when(mosaic.group() == FEATURES)
        def _features() -> None:
            mosaic.set_registers(features_registers, frame.WARPGROUPS)
            each(map_piece)

        @pl.when(mosaic.group() < MEMORY)
        def _values() -> None:
            mosaic.set_registers(values_registers, frame.WARPGROUPS)
            each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    return body, scratch
