"""Runs of rows whose gates are too steep for `prepared.py`: by chunks, as in `channel.py`.

Each kernel here goes on in the arrays that the prepared runs' kernels wrote, and writes what
belongs to the steep runs over it. A program looks through several runs, of which it passes over
those that are not steep: where all are mild, as is usual, there are few programs, and they end
at once. In chunks of `MILD_ROWS` rows in which no channel loses much all pairs are parted at once,
in other runs level by level.

Backward, what is written for q and for k is not their gradients but two parts of those of their
features, from which `prepared.py` makes both that of q and the flow of the gates' gradient. The
flow has to match the keys' in the roundings of the factors, and has no pairs of a row with itself:
divided by phi(q), it is the first part, in float32. The rest goes where q^ was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import channel, tiles
from ato_jax.ops.linear_attention.triton.pairs import Normalizer, QueryGradient
from ato_jax.ops.linear_attention.triton.scan import Edges, State
from ato_jax.ops.linear_attention.triton.tiles import Rows
from ato_jax.ops.linear_attention.triton.walk import Walk

MILD_ROWS = 32
# Runs that one program looks through.
RUNS = 8
WARPS = 8
# No feature so small is anything beside others, nor is it to be divided by.
SMALLEST = 1e-30

# [B, G, P, 2] int32: how many chunks of MILD_ROWS rows a run has, and how many of STEEP_BLOCK;
# both 0 where it is not steep.
Turns = jax.Array


def part_rows(walk: Walk) -> int:
    """The rows of a chunk that is parted at once; a half of a run has some of them."""
    return min(MILD_ROWS, walk.pieces.rows // 2)


def turns(spec: LinearAttentionSpec, walk: Walk, totals: jax.Array, steep: jax.Array) -> Turns:
    """From the gates' sums of each part of a run, [B, G, P, parts, F], and which are steep."""
    at_once = jnp.all(totals >= -channel.mildest(spec), axis=(3, 4))
    rows = walk.pieces.rows
    chunks = jnp.where(at_once[..., None], jnp.array([rows // part_rows(walk), 0]), 0)
    levels = jnp.where(at_once[..., None], 0, jnp.array([0, rows // channel.STEEP_BLOCK]))
    return jnp.where(steep[..., None], chunks + levels, 0).astype(jnp.int32)


def is_steep(turns_ref: Any) -> jax.Array:
    """Of the turns of one run, [2]."""
    return turns_ref[0] + turns_ref[1] > 0


Chunk = Callable[[bool, int], Callable[[Any, Any], Any]]


def _over_runs(
    walk: Walk, first_run: int, turns_ref: Any, body: Callable[[Any, Any, Callable[..., Any]], None]
) -> None:
    """`body(run, steep, walk_chunks)` for each of the program's runs.

    `walk_chunks(chunk, carry)` is the carry after `chunk(mild, rows)(i, carry)` for each chunk i,
    of which there are none where the run is not steep.
    """
    first = first_run + tiles.piece_id() * RUNS
    last = walk.pieces.count - 1
    numbers = jnp.minimum(first + jnp.arange(RUNS, dtype=jnp.int32), last)
    kind = jnp.arange(2, dtype=jnp.int32)[None, :]
    # All at once, so that where none is steep no load waits for another.
    some = jnp.max(plgpu.load(turns_ref.at[numbers[:, None], kind])) > 0

    def look(number: Any, _: Any) -> None:
        run = jnp.minimum(first + number, last)
        counts = [jnp.where(first + number <= last, turns_ref[run, kind], 0) for kind in (0, 1)]

        def walk_chunks(chunk: Chunk, carry: Any) -> Any:
            for mild, count in zip((True, False), counts, strict=True):
                rows = part_rows(walk) if mild else channel.STEEP_BLOCK
                carry = jax.lax.fori_loop(0, count, chunk(mild, rows), carry)
            return carry

        body(run, counts[0] + counts[1] > 0, walk_chunks)

    jax.lax.fori_loop(0, some.astype(jnp.int32) * RUNS, look, None)


def _some(rows: Rows, wanted: jax.Array) -> Rows:
    """The rows of a matrix if they are wanted, or else none."""
    numbers = rows.numbers
    exist = (numbers >= 0) & wanted if rows.exist is None else rows.exist & wanted
    return Rows(numbers, exist, exist)


def _load_state(
    spec: LinearAttentionSpec, kv_ref: Any, k_sum_ref: Any, edge: Any, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """kv [V, F] and z [1, F] of one of the edges, of refs [edges, V, F] and [edges, F]."""
    kv = tiles.load_tile(kv_ref, _some(tiles.all_rows(spec.V), wanted), spec.F, edge, 0)
    z = tiles.load_rows(k_sum_ref, _some(tiles.all_rows(spec.F), wanted), edge)
    return kv.astype(jnp.float32), z[None, :]


def _store_state(
    spec: LinearAttentionSpec,
    kv_ref: Any,
    k_sum_ref: Any,
    run: Any,
    wanted: jax.Array,
    state: tuple[jax.Array, jax.Array],
) -> None:
    kv, z = state
    tiles.store_tile(kv_ref, _some(tiles.all_rows(spec.V), wanted), spec.F, kv, run, 0)
    columns = _some(tiles.all_rows(spec.F), wanted)
    plgpu.store(k_sum_ref.at[run, columns.numbers], z[0], mask=columns.exist)


def _features(
    spec: LinearAttentionSpec, ref: Any, rows: Rows, head: Any = None
) -> tuple[LinearAttentionSpec, jax.Array]:
    """phi(x) [C, F] in float32, and the call of which it is the input."""
    x = tiles.load_tile(ref, rows, spec.D, head, tiles.heads_axis(spec))  # [C, D]
    plain = dataclasses.replace(spec, feature_map=features.NAMED["identity"])
    return plain, tiles.features_of(spec, x, rows)


def _flow_and_rest(found: channel.Gradient, side: channel.Side) -> tuple[jax.Array, jax.Array]:
    """What times the features [C, F] is the flow of the gates' gradient; and what that lacks to be
    the features' gradient."""
    gradient, flow = channel._finish_gradient(found, side)
    large = jnp.abs(side.features) > SMALLEST
    flow = jnp.where(large, flow / jnp.where(large, side.features, 1.0), gradient)
    return flow, gradient - flow


def _programs(walk: Walk, first_run: int = 0) -> int:
    return pl.cdiv(walk.pieces.count - first_run, RUNS)


def _whole(array: jax.Array, index: Callable[..., tuple[Any, Any]]) -> pl.BlockSpec:
    """All of one head's runs; `index(*program_ids)` is (batch entry, head)."""
    rest = array.shape[2:]
    return pl.BlockSpec((None, None, *rest), lambda *ids: (*index(*ids), *(0 for _ in rest)))


def _shapes(arrays: tuple[jax.Array, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def states(
    spec: LinearAttentionSpec, inputs: Inputs, walk: Walk, turns: Turns, written: State
) -> State:
    """Each run's sums over its keys, kv and k_sum; as its end sees them."""

    def kernel(k_ref: Any, v_ref: Any, gates_ref: Any, turns_ref: Any, *refs: Any) -> None:
        kv_ref, k_sum_ref = refs[-2:]

        def sum_up(run: Any, wanted: jax.Array, walk_chunks: Callable[..., Any]) -> None:
            def chunk(mild: bool, block: int) -> Callable[..., Any]:
                def add(i: Any, state: tuple[jax.Array, jax.Array]) -> Any:
                    kv, z = state  # [V, F], [1, F]
                    keys = walk.keys_at(spec, {}, run * walk.pieces.rows + i * block, block)
                    v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                    frame = channel._frame(spec, gates_ref, keys, mild)  # [C, F]
                    plain, phi_k = _features(spec, k_ref, keys)
                    adds = channel._side(plain, phi_k, keys, frame.until)
                    added = tiles.product(spec, v, adds.edge, wide=True, trans_a=True)
                    z = channel._advance(frame, z, channel._sum_rows(adds.edge))
                    return channel._advance(frame, kv, added), z

                return add

            state = walk_chunks(chunk, channel._no_sums(spec, 1))
            _store_state(spec, kv_ref, k_sum_ref, run, wanted, state)

        _over_runs(walk, 0, turns_ref, sum_up)

    def head(p: Any, g: Any, b: Any) -> tuple[Any, Any]:
        return b, g

    keys = tiles.sequence_block(spec, spec.S, spec.D, head)
    outs = [_whole(array, head) for array in written]
    return tuple(
        tiles.launch(
            kernel,
            "linear_attention_steep_states",
            grid=(_programs(walk), spec.G, spec.B),
            in_specs=[
                keys,
                tiles.sequence_block(spec, spec.S, spec.V, head),
                keys,
                _whole(turns, head),
                *outs,
            ],
            out_specs=outs,
            out_shape=_shapes(written),
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
    group = spec.H // spec.G

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
        def write_run(run: Any, wanted: jax.Array, walk_chunks: Callable[..., Any]) -> None:
            def chunk(mild: bool, block: int) -> Callable[..., Any]:
                row, column = channel._pairs(block)

                def write(i: Any, state: tuple[jax.Array, jax.Array]) -> Any:
                    kv, z = state  # [V, F], [1, F]
                    start = run * walk.pieces.rows + i * block
                    queries, keys = walk.rows_at(spec, {}, start, block)
                    v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                    frame = channel._frame(spec, gates_ref, keys, mild)  # [C, F]
                    plain, phi_q = _features(spec, q_ref, queries)
                    _, phi_k = _features(spec, k_ref, keys)
                    reads = channel._side(plain, phi_q, queries, frame.since)
                    adds = channel._side(plain, phi_k, keys, frame.until)
                    w = channel._weights(plain, frame, reads, adds)  # [C, C]
                    w = jnp.where(column <= row, w, 0.0)
                    out = tiles.product(spec, reads.edge, kv, wide=True, trans_b=True)  # [C, V]
                    out += channel._finely(spec, w, v, fine="a")
                    if spec.normalize:
                        den = jnp.sum(w, axis=1)  # [C]
                        den += jnp.sum(reads.edge.astype(jnp.float32) * z, axis=1)
                        out *= (1 / jnp.maximum(den, spec.eps))[:, None]
                        z = channel._advance(frame, z, channel._sum_rows(adds.edge))
                    else:
                        out *= spec.scale
                    tiles.store_tile(out_ref, queries, spec.V, out)
                    added = tiles.product(spec, v, adds.edge, wide=True, trans_a=True)
                    return channel._advance(frame, kv, added), z

                return write

            walk_chunks(chunk, _load_state(spec, kv_ref, k_sum_ref, run, wanted))

        _over_runs(walk, walk.with_queries, turns_ref, write_run)

    def query_head(p: Any, h: Any, b: Any) -> tuple[Any, Any]:
        return b, h

    def head(p: Any, h: Any, b: Any) -> tuple[Any, Any]:
        return b, h // group

    keys = tiles.sequence_block(spec, spec.S, spec.D, head)
    outs = tiles.sequence_block(spec, spec.T, spec.V, query_head)
    return tiles.launch(
        kernel,
        "linear_attention_steep_output",
        grid=(_programs(walk, walk.with_queries), spec.H, spec.B),
        in_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, query_head),
            keys,
            tiles.sequence_block(spec, spec.S, spec.V, head),
            keys,
            *[_whole(array, head) for array in (turns, edges.kv, edges.k_sum)],
            outs,
        ],
        out_specs=outs,
        out_shape=jax.ShapeDtypeStruct(written.shape, written.dtype),
        warps=WARPS,
        stages=1,
        aliases={7: 0},
    )(inputs.q, inputs.k, inputs.v, inputs.decay, turns, edges.kv, edges.k_sum, written)


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
    group = spec.H // spec.G
    before = (written.dq, rest, *written.sides[0], *(written.normalizer or ()))

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        gates_ref: Any,
        do_ref: Any,
        turns_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        *refs: Any,
    ) -> None:
        dq_ref, rest_ref, dkv_ref, dk_sum_ref, *normalizer_refs = refs[len(before) :]

        def write_run(run: Any, wanted: jax.Array, walk_chunks: Callable[..., Any]) -> None:
            def chunk(mild: bool, block: int) -> Callable[..., Any]:
                row, column = channel._pairs(block)

                def write(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    kv, z, dkv, dz, since_start = carry  # [V, F], [1, F], twice, [1, F]
                    start = run * walk.pieces.rows + i * block
                    queries, keys = walk.rows_at(spec, {}, start, block)
                    v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                    do = tiles.load_tile(do_ref, queries, spec.V)  # [C, V]
                    frame = channel._frame(spec, gates_ref, keys, mild)  # [C, F]
                    plain, phi_q = _features(spec, q_ref, queries)
                    _, phi_k = _features(spec, k_ref, keys)
                    reads = channel._side(plain, phi_q, queries, frame.since)
                    adds = channel._side(plain, phi_k, keys, frame.until)
                    # The features as the forward rounded them, in both terms that nearly cancel.
                    edge = reads.edge.astype(jnp.float32)  # [C, F]
                    dw = tiles.product(spec, do, v, trans_b=True)  # [C, C]
                    g = channel._finely(spec, do, kv, fine="b")  # [C, F]
                    inverse = jnp.full((block,), spec.scale, jnp.float32)
                    e: jax.Array | None = None
                    if spec.normalize:
                        w = channel._weights(plain, frame, reads, adds)  # [C, C]
                        w = jnp.where(column <= row, w, 0.0)
                        den = jnp.sum(w, axis=1) + jnp.sum(edge * z, axis=1)  # [C]
                        out_do = jnp.sum(w * dw, axis=1) + jnp.sum(edge * g, axis=1)
                        inverse = 1 / jnp.maximum(den, spec.eps)
                        e = jnp.where(den > spec.eps, -inverse * out_do, 0.0)
                        dw += e[:, None]
                        g += e[:, None] * z
                        z = channel._advance(frame, z, channel._sum_rows(adds.edge))
                        tiles.store_rows(normalizer_refs[0], queries, e)
                        tiles.store_rows(normalizer_refs[1], queries, inverse)
                    dw = jnp.where(column <= row, dw, 0.0)
                    found = channel._start_gradient(frame, g)
                    found = channel._add_pairs(plain, frame, found, dw, reads, adds)
                    flow, rest = _flow_and_rest(found, reads)
                    tiles.store_tile(dq_ref, queries, spec.D, flow * inverse[:, None])
                    tiles.store_tile(rest_ref, queries, spec.D, rest * inverse[:, None])
                    added = tiles.product(spec, v, adds.edge, wide=True, trans_a=True)
                    d_num = do.astype(jnp.float32) * inverse[:, None]  # [C, V]
                    # As seen from the start of the run.
                    read = tiles.operand(spec, edge * since_start, wide=True)  # [C, F]
                    dkv += channel._finely(spec, d_num, read, fine="a", trans_a=True)
                    if e is not None:
                        dz += channel._sum_rows((e * inverse)[:, None] * read.astype(jnp.float32))
                    since_start *= frame.keep
                    return channel._advance(frame, kv, added), z, dkv, dz, since_start

                return write

            state = _load_state(spec, kv_ref, k_sum_ref, run, wanted)
            whole = jnp.ones((1, tiles.padded(spec.F)), jnp.float32)
            carry = (*state, *channel._no_sums(spec, 1), whole)
            _, _, *sums, _ = walk_chunks(chunk, carry)
            _store_state(spec, dkv_ref, dk_sum_ref, run - walk.with_queries, wanted, tuple(sums))

        _over_runs(walk, walk.with_queries, turns_ref, write_run)

    def query_head(p: Any, h: Any, b: Any) -> tuple[Any, Any]:
        return b, h

    def head(p: Any, h: Any, b: Any) -> tuple[Any, Any]:
        return b, h // group

    keys = tiles.sequence_block(spec, spec.S, spec.D, head)
    queries = tiles.sequence_block(spec, spec.T, spec.D, query_head)
    outs = [queries, queries, *[_whole(array, query_head) for array in before[2:]]]
    dq, rest, kv, k_sum, *normalizer = tiles.launch(
        kernel,
        "linear_attention_steep_query_gradient",
        grid=(_programs(walk, walk.with_queries), spec.H, spec.B),
        in_specs=[
            queries,
            keys,
            tiles.sequence_block(spec, spec.S, spec.V, head),
            keys,
            tiles.sequence_block(spec, spec.T, spec.V, query_head),
            *[_whole(array, head) for array in (turns, edges.kv, edges.k_sum)],
            *outs,
        ],
        out_specs=outs,
        out_shape=_shapes(before),
        warps=WARPS,
        stages=1,
        aliases={8 + number: number for number in range(len(before))},
    )(inputs.q, inputs.k, inputs.v, inputs.decay, do, turns, edges.kv, edges.k_sum, *before)
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
    heads of each kv head; and the products of the states and their cotangents at the starts of
    the runs, [B, G, P, F]."""
    group = spec.H // spec.G
    axis = tiles.heads_axis(spec)

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        gates_ref: Any,
        do_ref: Any,
        turns_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        dkv_ref: Any,
        dk_sum_ref: Any,
        *refs: Any,
    ) -> None:
        dk_ref, rest_ref, dv_ref, crossing_ref = refs[-len(written) :]

        def write_run(run: Any, wanted: jax.Array, walk_chunks: Callable[..., Any]) -> None:
            def chunk(mild: bool, block: int) -> Callable[..., Any]:
                row, column = channel._pairs(block)  # keys, queries
                chunks = walk.pieces.rows // block

                def write(i: Any, carry: tuple[jax.Array, jax.Array]) -> Any:
                    dkv, dz = carry  # [V, F], [1, F]
                    start = run * walk.pieces.rows + (chunks - 1 - i) * block
                    queries, keys = walk.rows_at(spec, {}, start, block)
                    v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                    frame = channel._frame(spec, gates_ref, keys, mild)  # [C, F]
                    plain, phi_k = _features(spec, k_ref, keys)
                    adds = channel._side(plain, phi_k, keys, frame.until)
                    if mild:
                        dkv, dz = dkv * frame.keep, dz * frame.keep
                    dv = tiles.product(spec, adds.edge, dkv, wide=True, trans_b=True)  # [C, V]
                    g = channel._finely(spec, v, dkv, fine="b") + dz  # [C, F]
                    found = channel._start_gradient(frame, g)
                    if not mild:
                        dkv, dz = dkv * frame.keep, dz * frame.keep

                    def add_head(head: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
                        dv, found, dkv, dz = sums
                        do = tiles.load_tile(do_ref, queries, spec.V, head, axis)  # [C, V]
                        _, phi_q = _features(spec, q_ref, queries, head)
                        reads = channel._side(plain, phi_q, queries, frame.since)
                        dw = tiles.product(spec, v, do, trans_b=True)  # [C keys, C queries]
                        inverse = jnp.full((block,), spec.scale, jnp.float32)
                        if spec.normalize:
                            e = tiles.load_rows(refs[0], queries, head)  # [C]
                            inverse = tiles.load_rows(refs[1], queries, head)  # [C]
                            dw += e[None, :]
                            edge = reads.edge.astype(jnp.float32)
                            dz += channel._sum_rows((e * inverse)[:, None] * edge)
                        dw *= inverse[None, :]
                        d_num = do.astype(jnp.float32) * inverse[:, None]  # [C, V]
                        w = channel._weights(plain, frame, adds, reads)  # [C keys, C queries]
                        w = jnp.where(row <= column, w * inverse[None, :], 0.0)
                        dv += channel._finely(spec, w, do, fine="a")
                        dw = jnp.where(row <= column, dw, 0.0)
                        found = channel._add_pairs(plain, frame, found, dw, adds, reads)
                        dkv += channel._finely(spec, d_num, reads.edge, fine="a", trans_a=True)
                        return dv, found, dkv, dz

                    dv, found, dkv, dz = jax.lax.fori_loop(0, group, add_head, (dv, found, dkv, dz))
                    tiles.store_tile(dv_ref, keys, spec.V, dv)
                    flow, rest = _flow_and_rest(found, adds)
                    tiles.store_tile(dk_ref, keys, spec.D, flow)
                    tiles.store_tile(rest_ref, keys, spec.D, rest)
                    return dkv, dz

                return write

            carry = _load_state(spec, dkv_ref, dk_sum_ref, run + 1, wanted)
            dkv, dz = walk_chunks(chunk, carry)
            kv, z = _load_state(spec, kv_ref, k_sum_ref, run, wanted)
            columns = _some(tiles.all_rows(spec.F), wanted)
            crossing = jnp.sum(kv * dkv, axis=0) + z[0] * dz[0]  # [F]
            plgpu.store(crossing_ref.at[run, columns.numbers], crossing, mask=columns.exist)

        _over_runs(walk, 0, turns_ref, write_run)

    def head(p: Any, g: Any, b: Any) -> tuple[Any, Any]:
        return b, g

    keys = tiles.sequence_block(spec, spec.S, spec.D, head)
    values = tiles.sequence_block(spec, spec.S, spec.V, head)
    per_row = pl.BlockSpec((None, group, spec.T), lambda p, g, b: (b, g, 0))
    normalizers = list(normalizer or ())
    states = (edges.kv, edges.k_sum, cotangent.kv, cotangent.k_sum)
    outs = [keys, keys, values, _whole(written[3], head)]
    first = 6 + len(states) + len(normalizers)
    return tuple(
        tiles.launch(
            kernel,
            "linear_attention_steep_key_gradient",
            grid=(_programs(walk), spec.G, spec.B),
            in_specs=[
                tiles.sequence_block(spec, spec.T, spec.D, head, group),
                keys,
                values,
                keys,
                tiles.sequence_block(spec, spec.T, spec.V, head, group),
                *[_whole(array, head) for array in (turns, *states)],
                *[per_row] * len(normalizers),
                *outs,
            ],
            out_specs=outs,
            out_shape=_shapes(written),
            warps=WARPS,
            stages=1,
            aliases={first + number: number for number in range(len(written))},
        )(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.decay,
            do,
            turns,
            *states,
            *normalizers,
            *written,
        )
    )
