"""Runs of rows that are too steep to be prepared: by chunks, as in `channel/`.

Each kernel here goes on in the arrays that the prepared runs' kernels wrote, and overwrites what
belongs to the steep runs. Where all runs are mild, as is usual, there are few programs, and they
end at once (`runs.py`).

Backward, what is written for q and for k is not their gradients but two parts of the gradients of
their features, from which `finish.py` computes both that of q or k and the flow of the decays'
gradient. The flow has to match that of the other side in the roundings of the factors, and has no
pairs of a row with itself: divided by the features, it is the first part, in float32. The rest of
the gradient stands where the prepared features were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import mapping, products, sequences
from ato_jax.ops.linear_attention.triton.channel.chunk import (
    Side,
    advance,
    finely,
    frame_of,
    output_of,
    pairs,
    reading_side,
    side_of,
    sum_rows,
)
from ato_jax.ops.linear_attention.triton.channel.gradients import (
    Gradient,
    KeySums,
    add_pairs_of_keys,
    finish_gradient,
    pairs_of_queries,
    read_chunk,
    read_cotangent,
)
from ato_jax.ops.linear_attention.triton.gradients import Normalizer, QueryGradient
from ato_jax.ops.linear_attention.triton.prepared.runs import (
    Turns,
    WalkChunks,
    load_state,
    over_runs,
    programs,
    store_state,
)
from ato_jax.ops.linear_attention.triton.scan import Edges, State
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch
from ato_jax.triton.tiles import Rows

WARPS = 8
# A feature smaller than this adds nothing beside others, and is not divided by.
SMALLEST = 1e-30


def _features(
    spec: LinearAttentionSpec, ref: Any, rows: Rows, head: Any = None
) -> tuple[LinearAttentionSpec, jax.Array]:
    """phi(x) [C, F] in float32, and the call that takes it as its q or k."""
    x = tiles.load_tile(ref, rows, spec.D, head, sequences.heads_axis(spec))  # [C, D]
    plain = dataclasses.replace(spec, feature_map=features.NAMED["identity"])
    return plain, mapping.features_of(spec, x, rows)


def _flow_and_rest(found: Gradient, side: Side) -> tuple[jax.Array, jax.Array]:
    """[C, F] each: what times the features is the flow of the decays' gradient, and what that lacks
    to be the features' gradient."""
    gradient, flow = finish_gradient(found, side)
    large = jnp.abs(side.features) > SMALLEST
    flow = jnp.where(large, flow / jnp.where(large, side.features, 1.0), gradient)
    return flow, gradient - flow


def states(
    spec: LinearAttentionSpec, inputs: Inputs, walk: Walk, turns: Turns, written: State
) -> State:
    """The sums over the keys of each steep run, kv and k_sum, decayed to its end."""

    def kernel(k_ref: Any, v_ref: Any, gates_ref: Any, turns_ref: Any, *refs: Any) -> None:
        state_refs = refs[-2:]

        def sum_up(run: Any, wanted: jax.Array, walk_chunks: WalkChunks) -> None:
            def chunk(mild: bool, block: int) -> Callable[..., Any]:
                def add(i: Any, state: tuple[jax.Array, jax.Array]) -> Any:
                    kv, z = state  # [V, F], [1, F]
                    keys = walk.keys_at(spec, {}, run * walk.pieces.rows + i * block, block)
                    v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                    frame = frame_of(spec, gates_ref, keys, mild)  # [C, F]
                    plain, phi_k = _features(spec, k_ref, keys)
                    adds = side_of(plain, phi_k, keys, frame.until)
                    added = products.product(spec, v, adds.edge, wide=True, trans_a=True)
                    z = advance(frame, z, sum_rows(adds.edge))
                    return advance(frame, kv, added), z

                return add

            state = walk_chunks(chunk, products.no_state(spec, 1))
            store_state(spec, state_refs, run, wanted, state)

        over_runs(walk, 0, turns_ref, sum_up)

    own_head = sequences.own_head
    keys = sequences.sequence_block(spec, spec.S, spec.D, own_head)
    outs = [sequences.whole_block(array, own_head) for array in written]
    return tuple(
        launch(
            kernel,
            "linear_attention_steep_states",
            grid=(programs(walk), spec.G, spec.B),
            in_specs=[
                keys,
                sequences.sequence_block(spec, spec.S, spec.V, own_head),
                keys,
                sequences.whole_block(turns, own_head),
                *outs,
            ],
            out_specs=outs,
            out_shape=sequences.shapes_of(written),
            warps=WARPS,
            stages=1,
            aliases={4: 0, 5: 1},
        )(inputs.k, inputs.v, inputs.decay, turns, *written)
    )


def output(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    walk: Walk,
    turns: Turns,
    edges: Edges,
    written: jax.Array,
) -> jax.Array:
    """The outputs of steep runs."""

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        gates_ref: Any,
        turns_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        _: Any,
        out_ref: Any,
    ) -> None:
        def write_run(run: Any, wanted: jax.Array, walk_chunks: WalkChunks) -> None:
            def chunk(mild: bool, block: int) -> Callable[..., Any]:
                index = pairs(block)

                def write(i: Any, state: tuple[jax.Array, jax.Array]) -> Any:
                    start = run * walk.pieces.rows + i * block
                    queries, keys = walk.rows_at(spec, {}, start, block)
                    v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                    frame = frame_of(spec, gates_ref, keys, mild)  # [C, F]
                    plain, phi_q = _features(spec, q_ref, queries)
                    _, phi_k = _features(spec, k_ref, keys)
                    reads = reading_side(plain, phi_q, queries, frame.since)
                    adds = side_of(plain, phi_k, keys, frame.until)

                    def store(out: jax.Array) -> None:
                        tiles.store_tile(out_ref, queries, spec.V, out)

                    return output_of(spec, frame, index, reads, adds, v, state, store)

                return write

            walk_chunks(chunk, load_state(spec, (kv_ref, k_sum_ref), run, wanted))

        over_runs(walk, walk.with_queries, turns_ref, write_run)

    kv_head = sequences.head_of_group(spec)
    q, k, v = sequences.query_blocks(spec)
    outs = sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head)
    states = (turns, edges.kv, edges.k_sum)
    return launch(
        kernel,
        "linear_attention_steep_output",
        grid=(programs(walk, walk.with_queries), spec.H, spec.B),
        in_specs=[
            *(q, k, v, k),
            *[sequences.whole_block(array, kv_head) for array in states],
            outs,
        ],
        out_specs=outs,
        out_shape=jax.ShapeDtypeStruct(written.shape, written.dtype),
        warps=WARPS,
        stages=1,
        aliases={7: 0},
    )(inputs.q, inputs.k, inputs.v, inputs.decay, *states, written)


def query_gradient(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    walk: Walk,
    turns: Turns,
    edges: Edges,
    written: QueryGradient,
    rest: jax.Array,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, State, Normalizer | None]:
    """The flow beside phi(q) in float32, and the rest of its gradient; dS^T and dz of each run with
    queries, as its start sees them; and the normalizer."""
    before = (written.dq, rest, *written.sides[0], *(written.normalizer or ()))

    def kernel(
        sequence_refs: tuple[Any, ...], turns_ref: Any, state_refs: tuple[Any, Any], *refs: Any
    ) -> None:
        q_ref, k_ref, v_ref, gates_ref, do_ref = sequence_refs
        dq_ref, rest_ref, dkv_ref, dk_sum_ref, *normalizer_refs = refs[len(before) :]

        def write_run(run: Any, wanted: jax.Array, walk_chunks: WalkChunks) -> None:
            def chunk(mild: bool, block: int) -> Callable[..., Any]:
                index = pairs(block)

                def write(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    kv, z, dkv, dz, since_start = carry  # [V, F], [1, F], twice, [1, F]
                    start = run * walk.pieces.rows + i * block
                    queries, keys = walk.rows_at(spec, {}, start, block)
                    v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                    do = tiles.load_tile(do_ref, queries, spec.V)  # [C, V]
                    frame = frame_of(spec, gates_ref, keys, mild)  # [C, F]
                    plain, phi_q = _features(spec, q_ref, queries)
                    _, phi_k = _features(spec, k_ref, keys)
                    reads = side_of(plain, phi_q, queries, frame.since)
                    adds = side_of(plain, phi_k, keys, frame.until)
                    edge = reads.edge.astype(jnp.float32)  # [C, F]
                    read = read_chunk(spec, frame, index, reads, adds, edge, v, do, (kv, z))
                    e, inverse = read.e, read.inverse
                    if e is not None:
                        tiles.store_rows(normalizer_refs[0], queries, e)
                        tiles.store_rows(normalizer_refs[1], queries, inverse)
                    found = pairs_of_queries(spec, frame, index, read, reads, adds)
                    flow, rest = _flow_and_rest(found, reads)
                    tiles.store_tile(dq_ref, queries, spec.D, flow * inverse[:, None])
                    tiles.store_tile(rest_ref, queries, spec.D, rest * inverse[:, None])
                    added = products.product(spec, v, adds.edge, wide=True, trans_a=True)
                    d_num = do.astype(jnp.float32) * inverse[:, None]  # [C, V]
                    # As seen from the start of the run.
                    u = products.operand(spec, edge * since_start, wide=True)  # [C, F]
                    dkv += finely(spec, d_num, u, fine="a", trans_a=True)
                    if e is not None:
                        dz += sum_rows((e * inverse)[:, None] * u.astype(jnp.float32))
                    since_start *= frame.keep
                    return advance(frame, kv, added), read.z, dkv, dz, since_start

                return write

            state = load_state(spec, state_refs, run, wanted)
            whole = jnp.ones((1, tiles.padded(spec.F)), jnp.float32)
            carry = (*state, *products.no_state(spec, 1), whole)
            _, _, *sums, _ = walk_chunks(chunk, carry)
            sum_refs = dkv_ref, dk_sum_ref
            store_state(spec, sum_refs, run - walk.with_queries, wanted, tuple(sums))

        over_runs(walk, walk.with_queries, turns_ref, write_run)

    kv_head, own_head = sequences.head_of_group(spec), sequences.own_head
    q, k, v = sequences.query_blocks(spec)
    outs = [q, q, *[sequences.whole_block(array, own_head) for array in before[2:]]]
    states = (edges.kv, edges.k_sum)
    dq, rest, kv, k_sum, *normalizer = launch(
        kernel,
        "linear_attention_steep_query_gradient",
        grid=(programs(walk, walk.with_queries), spec.H, spec.B),
        in_specs=[
            (q, k, v, k, sequences.sequence_block(spec, spec.T, spec.V, own_head)),
            sequences.whole_block(turns, kv_head),
            tuple(sequences.whole_block(array, kv_head) for array in states),
            *outs,
        ],
        out_specs=outs,
        out_shape=sequences.shapes_of(before),
        warps=WARPS,
        stages=1,
        aliases={8 + number: number for number in range(len(before))},
    )((inputs.q, inputs.k, inputs.v, inputs.decay, do), turns, states, *before)
    return dq, rest, (kv, k_sum), Normalizer(*normalizer) if normalizer else None


def key_gradient(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    walk: Walk,
    turns: Turns,
    edges: Edges,
    cotangent: Edges,
    normalizer: Normalizer | None,
    written: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The flow beside phi(k) in float32, the rest of its gradient, and dv, summed over the query
    heads of each key/value head; and the products of the states and their cotangents at the starts
    of the runs, [B, G, P, F]."""
    group = spec.H // spec.G
    axis = sequences.heads_axis(spec)

    def kernel(
        sequence_refs: tuple[Any, ...],
        turns_ref: Any,
        state_refs: tuple[Any, Any],
        cotangent_refs: tuple[Any, Any],
        normalizer_refs: tuple[Any, ...],
        *refs: Any,
    ) -> None:
        q_ref, k_ref, v_ref, gates_ref, do_ref = sequence_refs
        dk_ref, rest_ref, dv_ref, crossing_ref = refs[-len(written) :]

        def write_run(run: Any, wanted: jax.Array, walk_chunks: WalkChunks) -> None:
            def chunk(mild: bool, block: int) -> Callable[..., Any]:
                index = pairs(block)  # keys, queries
                chunks = walk.pieces.rows // block

                def write(i: Any, carry: tuple[jax.Array, jax.Array]) -> Any:
                    start = run * walk.pieces.rows + (chunks - 1 - i) * block
                    queries, keys = walk.rows_at(spec, {}, start, block)
                    v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                    frame = frame_of(spec, gates_ref, keys, mild)  # [C, F]
                    plain, phi_k = _features(spec, k_ref, keys)
                    adds = side_of(plain, phi_k, keys, frame.until)
                    sums = read_cotangent(spec, frame, adds, v, carry)

                    def add_head(head: Any, sums: KeySums) -> KeySums:
                        do = tiles.load_tile(do_ref, queries, spec.V, head, axis)  # [C, V]
                        _, phi_q = _features(spec, q_ref, queries, head)
                        reads = side_of(plain, phi_q, queries, frame.since)
                        dw = products.product(spec, v, do, trans_b=True)  # [C keys, C queries]
                        dz, inverse = sums.dz, jnp.full((block,), spec.scale, jnp.float32)
                        if spec.normalize:
                            e = tiles.load_rows(normalizer_refs[0], queries, head)  # [C]
                            inverse = tiles.load_rows(normalizer_refs[1], queries, head)  # [C]
                            dw += e[None, :]
                            edge = reads.edge.astype(jnp.float32)
                            dz += sum_rows((e * inverse)[:, None] * edge)
                        dw *= inverse[None, :]
                        d_num = do.astype(jnp.float32) * inverse[:, None]  # [C, V]
                        sums = add_pairs_of_keys(
                            spec, frame, index, sums, adds, reads, dw, inverse, do
                        )
                        dkv = sums.dkv + finely(spec, d_num, reads.edge, fine="a", trans_a=True)
                        return sums._replace(dkv=dkv, dz=dz)

                    sums = jax.lax.fori_loop(0, group, add_head, sums)
                    tiles.store_tile(dv_ref, keys, spec.V, sums.dv)
                    flow, rest = _flow_and_rest(sums.gradient, adds)
                    tiles.store_tile(dk_ref, keys, spec.D, flow)
                    tiles.store_tile(rest_ref, keys, spec.D, rest)
                    return sums.dkv, sums.dz

                return write

            carry = load_state(spec, cotangent_refs, run + 1, wanted)
            dkv, dz = walk_chunks(chunk, carry)
            kv, z = load_state(spec, state_refs, run, wanted)
            columns = tiles.all_rows(spec.F).only_if(wanted)
            crossing = jnp.sum(kv * dkv, axis=0) + z[0] * dz[0]  # [F]
            tiles.store_rows(crossing_ref, columns, crossing, run)

        over_runs(walk, 0, turns_ref, write_run)

    own_head = sequences.own_head
    _, keys, values, *_ = sequences.gated_blocks_of_group(spec)
    normalizers = tuple(normalizer or ())
    states = (edges.kv, edges.k_sum)
    cotangents = (cotangent.kv, cotangent.k_sum)
    outs = [keys, keys, values, sequences.whole_block(written[3], own_head)]
    first = 6 + len(states) + len(cotangents) + len(normalizers)
    return tuple(
        launch(
            kernel,
            "linear_attention_steep_key_gradient",
            grid=(programs(walk), spec.G, spec.B),
            in_specs=[
                sequences.gated_blocks_of_group(spec),
                sequences.whole_block(turns, own_head),
                tuple(sequences.whole_block(array, own_head) for array in states),
                tuple(sequences.whole_block(array, own_head) for array in cotangents),
                (sequences.group_row_vectors(spec),) * len(normalizers),
                *outs,
            ],
            out_specs=outs,
            out_shape=sequences.shapes_of(written),
            warps=WARPS,
            stages=1,
            aliases={first + number: number for number in range(len(written))},
        )(
            (inputs.q, inputs.k, inputs.v, inputs.decay, do),
            turns,
            states,
            cotangents,
            normalizers,
            *written,
        )
    )
