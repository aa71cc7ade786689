"""A gate per step and channel, causal, beside a large state: the features are decayed beforehand.

In a run of rows (`stored.py`'s), with c_i the sum of the gates from the middle of the run to row
i, negative ones of what lies between for the rows before it,

    q^_i = phi(q_i) exp(c_i)                k~_j = phi(k_j) exp(-c_j)
    exp(sum decay[j+1..i, d]) phi(q_id) phi(k_jd) = q^_id k~_jd

so that all pairs of a run are products of q^ and k~, as without gates. One pass writes both; then
the kernels without gates take q^ and k~ as if they were features.
A run's queries see a state as decayed to the middle of the run, and what its keys add to the
state behind it is decayed from there: with `first` and `second` the decays of the run's halves,

    S[p+1] = exp(first + second) S[p] + exp(second) sum_j k~_j v_j^T     they read exp(first) S[p]

These factors go into the scan over the runs (`scan.py`). Backward, dq^ and dk~ come in float32:

    d_phi_q_i = exp(c_i) dq^_i              d_phi_k_j = exp(-c_j) dk~_j
    d_decay_t = sum_{i>=t} q^_i dq^_i - sum_{j>=t} k~_j dk~_j + E

with sums over the steps of the run, and E the product of the state at its end and its cotangent
(`channel.py`). As states are rounded here, and what the sum over all k~_j dk~_j has of that
cotangent has to cancel in E, E is not taken from the state there: it is the sum over the keys of
just that, and the product of the state ahead of the run and the cotangent behind, both as read.

A run in which a channel loses more than `MOST` in either half, by which factors could leave
float32's range, is steep: here its features are left undecayed, what the kernels make of them is
nobody's, and `steep.py` puts right what follows, on the device. That leaves the sums over such a
run as decayed to its edges; dq^ and dk~ so that the above holds with c = 0; and for E the same
product at the start of the run, from which the sums over the steps before t lead to d_decay_t.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.triton import channel, steep, stored, tiles
from ato_jax.ops.linear_attention.triton.scan import Edges, scan_states
from ato_jax.ops.linear_attention.triton.states import piece_states
from ato_jax.ops.linear_attention.triton.steep import Turns
from ato_jax.ops.linear_attention.triton.tiles import Columns, Config, Rows, Slice
from ato_jax.ops.linear_attention.triton.walk import Steps, Walk, plan

# Of a half's logarithm to base 2: factors from 2^-70 to 2^70 leave features as much again.
MOST = 70.0
LARGEST_F = 128
# Tiles of so many columns, which mix in no other way than by being decayed alike.
PREPARE_COLUMNS, PREPARE_WARPS, PREPARE_STAGES = 64, 4, 2
FINISH_COLUMNS, FINISH_WARPS = 32, 4
NO_STEPS = Steps({}, None, None, None)


def applies(spec: LinearAttentionSpec) -> bool:
    return (
        spec.decay == "channel"
        and spec.causal
        and spec.dtype == "bfloat16"
        and tiles.state_size(spec) > tiles.SMALL_STATE
        and tiles.padded(spec.F) <= LARGEST_F
    )


def inner_spec(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    """The call without gates, over decayed features."""
    return dataclasses.replace(spec, decay=None, feature_map=features.NAMED["identity"])


def _slices(spec: LinearAttentionSpec, widest: int) -> tuple[int, int]:
    """Into how many tiles the columns of q and k are cut, and their width."""
    width = min(widest, tiles.padded(spec.F))
    return pl.cdiv(spec.F, width), width


def _load_gates(ref: Any, rows: Rows, columns: Columns) -> jax.Array:
    """[C, f], to base 2."""
    return jnp.maximum(tiles.load_tile(ref, rows, columns), channel.STRONGEST) * tiles.LOG2_E


def _from_middle(half: Any, gates: jax.Array) -> jax.Array:
    """c of the rows of the first half of a run (0) or the second (1), [C, f]."""
    whole = jnp.where(half == 0, jnp.sum(gates, axis=0), 0.0)
    return jax.lax.cumsum(gates, axis=0) - whole[None, :]


class Prepared(NamedTuple):
    q: jax.Array  # [B, T, H, F] in the spec's layout, q^
    k: jax.Array  # [B, S, G, F], k~
    totals: jax.Array  # [B, G, P, parts of a run, F], the sums of the gates to base 2


def _prepare(spec: LinearAttentionSpec, inputs: Inputs, walk: Walk) -> Prepared:
    half = walk.pieces.rows // 2
    part = steep.part_rows(walk)
    group = spec.H // spec.G
    axis = tiles.heads_axis(spec)
    count, width = _slices(spec, PREPARE_COLUMNS)

    def kernel(
        q_ref: Any, k_ref: Any, gates_ref: Any, q_out: Any, k_out: Any, totals_ref: Any
    ) -> None:
        program = tiles.piece_id()
        run = program // count
        columns = Slice(program % count * width, width, spec.F)

        def write_half(i: Any, _: None) -> None:
            queries, keys = walk.rows_at(spec, {}, run * walk.pieces.rows + i * half, half)
            gates = _load_gates(gates_ref, keys, columns)  # [C, f]
            c = _from_middle(i, gates)
            k = tiles.load_tile(k_ref, keys, columns)  # [C, f]
            tiles.store_tile(k_out, keys, columns, _edge(spec, k, keys, -c, columns))

            def write_head(head: Any, _: None) -> None:
                q = tiles.load_tile(q_ref, queries, columns, head, axis)  # [C, f]
                q = _edge(spec, q, queries, c, columns)
                tiles.store_tile(q_out, queries, columns, q, head, axis)

            stored.over_tiles(0, group, group, write_head, None)
            totals = jnp.sum(gates.reshape(-1, part, width), axis=1)  # [parts of a half, f]
            parts = tiles.tile_rows(i * (half // part), half // part, 0, True)
            tiles.store_tile(totals_ref, parts, columns, totals)

        jax.lax.fori_loop(0, 2, write_half, None)

    P = walk.pieces.count
    parts = walk.pieces.rows // part
    queries = tiles.sequence_block(spec, spec.T, spec.D, lambda p, g, b: (b, g), group)
    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, g, b: (b, g))
    found = tiles.launch(
        kernel,
        "linear_attention_prepare",
        grid=(P * count, spec.G, spec.B),
        in_specs=[queries, keys, keys],
        out_specs=[
            queries,
            keys,
            pl.BlockSpec(
                (None, None, None, parts, spec.F), lambda p, g, b: (b, g, p // count, 0, 0)
            ),
        ],
        out_shape=[
            tiles.sequence_shape(spec, spec.T, spec.H, spec.D),
            tiles.sequence_shape(spec, spec.S, spec.G, spec.D),
            jax.ShapeDtypeStruct((spec.B, spec.G, P, parts, spec.F), jnp.float32),
        ],
        warps=PREPARE_WARPS,
        stages=PREPARE_STAGES,
    )(inputs.q, inputs.k, inputs.decay)
    return Prepared(*found)


def _edge(
    spec: LinearAttentionSpec, x: jax.Array, rows: Rows, decay: jax.Array, columns: Columns
) -> jax.Array:
    return channel._unrounded_side(spec, x.astype(jnp.float32), rows, decay, columns).edge


class Decays(NamedTuple):
    """Of the runs, [B, G, P, F] each: what is left of a state after the whole run, after the
    first half, and after the second; in steep runs 1 for the halves."""

    whole: jax.Array
    first: jax.Array
    second: jax.Array


def _classify(spec: LinearAttentionSpec, walk: Walk, totals: jax.Array) -> tuple[Decays, Turns]:
    B, G, P, parts, width = totals.shape
    halves = jnp.sum(totals.reshape(B, G, P, 2, parts // 2, width), axis=4)
    is_steep = jnp.any(halves < -MOST, axis=(3, 4))
    first, second = (
        jnp.where(is_steep[..., None], 1.0, jnp.exp2(halves[:, :, :, i])) for i in (0, 1)
    )
    whole = jnp.exp2(jnp.sum(halves, axis=3))
    return Decays(whole, first, second), steep.turns(spec, walk, totals, is_steep)


class Sums(NamedTuple):
    """What both phases begin with."""

    prepared: Inputs
    edges: Edges  # the states ahead of each run as its queries read them, and after the last
    decays: Decays
    turns: Turns


def _sums_of_keys(spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk) -> Sums:
    found = _prepare(spec, inputs, walk)
    decays, turns = _classify(spec, walk, found.totals)
    inner = inner_spec(spec)
    keys_at = functools.partial(walk.keys_at, inner)
    sums = piece_states(
        inner, config, found.k, inputs.v, walk.pieces, keys_at, {}, dtype=walk.state_dtype
    )
    sums = steep.states(spec, inputs, walk, turns, sums)
    start = None
    if inputs.initial_state is not None:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    reads = jnp.pad(decays.first, ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=1)
    edges = scan_states(sums, start, decays.whole, adds=decays.second, reads=reads)
    return Sums(Inputs(found.q, found.k, inputs.v), edges, decays, turns)


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    inner = inner_spec(spec)
    walk = plan(inner, config)
    prepared, edges, _, turns = _sums_of_keys(spec, config, inputs, walk)
    out = stored.output(inner, config, prepared, walk, NO_STEPS, [edges])
    out = steep.output(spec, inputs, walk, turns, edges, out)
    return Outputs(out, LinearState(jnp.swapaxes(edges.end_kv, 2, 3), edges.k_sum[:, :, -1]))


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs, do = residuals.inputs, cotangents.out
    inner = tiles.matched(inner_spec(spec))
    walk = plan(inner, config, "backward")
    prepared, edges, decays, turns = _sums_of_keys(spec, config, inputs, walk)
    found = stored.query_gradient(inner, config, prepared, walk, NO_STEPS, [edges], do)
    dq, q_rest, sums, normalizer = steep.query_gradient(
        spec, inputs, walk, turns, edges, found, prepared.q, do
    )

    def of_group(array: jax.Array) -> jax.Array:
        """Over the query heads of each kv head; runs that hold keys alone add nothing."""
        array = jnp.sum(array.reshape(spec.B, spec.G, -1, *array.shape[2:]), axis=2)
        before = [(0, 0), (0, 0), (walk.with_queries, 0)]
        return jnp.pad(array, before + [(0, 0)] * (array.ndim - 3))

    end = None
    if spec.return_state:
        end = jnp.swapaxes(cotangents.state.kv, 2, 3), cotangents.state.k_sum
    kv, k_sum = (of_group(array) for array in sums)
    reads = jnp.pad(decays.second, ((0, 0), (0, 0), (1, 0), (0, 0)), constant_values=1)
    cotangent = scan_states(
        (kv, k_sum), end, decays.whole, adds=decays.first, reads=reads, reverse=True
    )
    dk, dv, added = stored.key_gradient(
        inner, config, prepared._replace(q=q_rest), walk, NO_STEPS, [cotangent], normalizer, do
    )
    crossing = _crossing(edges, cotangent)
    crossing += jnp.sum(added[0].reshape(*crossing.shape[:3], -1, spec.F), axis=3)
    written = (dk, prepared.k, dv, crossing)
    dk, k_rest, dv, crossing = steep.key_gradient(
        spec, inputs, walk, turns, edges, cotangent, normalizer, written, do
    )
    dq, dk, d_decay = _finish(spec, inputs, walk, turns, (dq, q_rest), (dk, k_rest), crossing)
    d_state = None
    if inputs.initial_state is not None:
        d_state = LinearState(jnp.swapaxes(cotangent.end_kv, 2, 3), cotangent.k_sum[:, :, 0])
    return Inputs(dq, dk, dv, decay=d_decay, initial_state=d_state)


def _crossing(edges: Edges, cotangent: Edges) -> jax.Array:
    """sum_v S dS + z dz of the state ahead of each run, seen through it, [B, G, P, F]."""
    # As they are read, both are decayed to the middle.
    kv = edges.kv[:, :, :-1].astype(jnp.float32) * cotangent.kv[:, :, 1:].astype(jnp.float32)
    return jnp.sum(kv, axis=3) + edges.k_sum[:, :, :-1] * cotangent.k_sum[:, :, 1:]


def _finish(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    walk: Walk,
    turns: Turns,
    of_queries: tuple[jax.Array, jax.Array],
    of_keys: tuple[jax.Array, jax.Array],
    crossing: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and the gates' gradient from dq^ and dk~, float32, and in steep runs what these
    lack of the features' gradients. A program has a run of rows, and takes a half at a time."""
    half = walk.pieces.rows // 2
    group = spec.H // spec.G
    axis = tiles.heads_axis(spec)
    count, width = _slices(spec, FINISH_COLUMNS)

    def kernel(
        q_ref: Any,
        k_ref: Any,
        gates_ref: Any,
        of_queries_refs: Any,
        of_keys_refs: Any,
        crossing_ref: Any,
        turns_ref: Any,
        dq_out: Any,
        dk_out: Any,
        d_gates_out: Any,
    ) -> None:
        program = tiles.piece_id()
        run = program // count
        columns = Slice(program % count * width, width, spec.F)
        is_steep = steep.is_steep(turns_ref)

        def of_side(
            x_ref: Any, refs: tuple[Any, Any], rows: Rows, c: jax.Array, *head: Any
        ) -> tuple[jax.Array, jax.Array]:
            """The gradient of x, and the flow: that of its features times these, [C, f]."""
            x, dx = (tiles.load_tile(ref, rows, columns, *head) for ref in (x_ref, refs[0]))
            exist = is_steep if rows.real is None else rows.real & is_steep
            exist = jnp.broadcast_to(exist, rows.numbers.shape)
            rest = tiles.load_tile(refs[1], Rows(rows.numbers, exist, exist), columns, *head)
            side = channel._unrounded_side(spec, x.astype(jnp.float32), rows, c, columns)
            # As the kernels multiplied them.
            read = jnp.where(is_steep, side.edge, tiles.rounded(spec, side.edge))
            return (dx + rest.astype(jnp.float32)) * side.edge_slopes, dx * read

        def write_half(turn: Any, crossing: jax.Array) -> jax.Array:
            # From the end of the run, or less the rows before from its start.
            i = jnp.where(is_steep, turn, 1 - turn)
            queries, keys = walk.rows_at(spec, {}, run * walk.pieces.rows + i * half, half)
            gates = _load_gates(gates_ref, keys, columns)  # [C, f]
            c = _from_middle(i, gates)
            c = jnp.where(is_steep, 0.0, c)
            dx, flow = of_side(k_ref, of_keys_refs, keys, -c)
            tiles.store_tile(dk_out, keys, columns, dx)

            def add_head(head: Any, flow: jax.Array) -> jax.Array:
                dx, added = of_side(q_ref, of_queries_refs, queries, c, head, axis)
                tiles.store_tile(dq_out, queries, columns, dx, head, axis)
                return flow + added

            flow = stored.over_tiles(0, group, group, add_head, -flow)
            before, whole = jax.lax.cumsum(flow, axis=0) - flow, jnp.sum(flow, axis=0)
            d_gates = jnp.where(is_steep, 0.0, whole)[None, :] - before + crossing[None, :]
            tiles.store_tile(d_gates_out, keys, columns, d_gates)
            return crossing + jnp.where(is_steep, -whole, whole)

        jax.lax.fori_loop(0, 2, write_half, tiles.load_vector(crossing_ref, columns))

    queries = tiles.sequence_block(spec, spec.T, spec.D, lambda p, g, b: (b, g), group)
    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, g, b: (b, g))
    shape = tiles.sequence_shape(spec, spec.S, spec.G, spec.D)
    return tuple(
        tiles.launch(
            kernel,
            "linear_attention_finish",
            grid=(walk.pieces.count * count, spec.G, spec.B),
            in_specs=[
                queries,
                keys,
                keys,
                (queries, queries),
                (keys, keys),
                pl.BlockSpec((None, None, None, spec.F), lambda p, g, b: (b, g, p // count, 0)),
                pl.BlockSpec((None, None, None, 2), lambda p, g, b: (b, g, p // count, 0)),
            ],
            out_specs=[queries, keys, keys],
            out_shape=[
                tiles.sequence_shape(spec, spec.T, spec.H, spec.D),
                shape,
                shape.update(dtype=jnp.float32),
            ],
            warps=FINISH_WARPS,
            stages=1,
        )(inputs.q, inputs.k, inputs.decay, of_queries, of_keys, crossing, turns)
    )
