"""`walk.py` for a decay per step and channel, with its letters.

The factors E, a, b and c have a channel, so the pairs of a chunk are those of `channels.py`, and
a_i phi(q_i) and b_j phi(k_j) have a factor for each element. Where all rows of a chunk are one
block, q^ and k^ take their place, and exp(c_m) and exp(c_last - c_m), which all rows share,
multiply the states: then q and k are written once each. The form is chosen for each segment by its
decays (`channels.form`).

The decay's gradient of a channel is that of `walk.py`, without the sums over channels:

    M_ij: `channels.py`                     A_i = w_i a_i phi(q_i) (do_i S^T - s_i z)
    K    = c (sum over V of S R + z r)      B_j = b_j phi(k_j) (v_j R^T + r)
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
)
from ato_jax.ops.linear_attention.xla.products import channel_states, channels, chunks, rows
from ato_jax.ops.linear_attention.xla.products.channel_states import Segment, States, Way
from ato_jax.ops.linear_attention.xla.products.chunks import Call
from ato_jax.ops.linear_attention.xla.products.gates import unless_hidden


def forward(spec: LinearAttentionSpec, chunk: int, most: int, inputs: Inputs) -> Outputs:
    spec = channel_states.products_of(spec)
    call = channel_states.call_of(spec, chunk, most, inputs)
    initial = rows.initial(spec, call.inputs)
    ends = channel_states.from_end(call, initial)

    def body(carry: tuple[LinearState, jax.Array], index: Any) -> Any:
        state, out = carry
        edges = [state, *(jax.tree.map(lambda x: x[index], end) for end in ends)]

        def run(segment: Segment) -> tuple[LinearState, jax.Array]:
            states = channel_states.states_of(call, segment, edges)
            scales = [way.read_scale for way in segment.ways]
            pairs = segment.pairs()
            k_sums = [
                channel_states.scaled(*pair) for pair in zip(scales, states.k_sum, strict=True)
            ]
            w = rows.weights(spec, channel_states.den_of(segment, pairs, k_sums))
            num = rows.product(
                spec, "bgnmc,bgncv->bgnmv", rows.operand(spec, pairs), segment.v, jnp.float32
            )
            for way, kv in zip(segment.ways, states.kv, strict=True):
                reading = way.reading
                for part in rows.parts_of_states(spec, channel_states.scaled(way.read_scale, kv)):
                    num += rows.product(spec, "bgnmf,bgnfv->bgnmv", reading, part, jnp.float32)
            num = rows.keep(call.masks(index)[0], num)
            return states.behind[0], (num * w).astype(inputs.v.dtype)

        state, found = channel_states.by_form(call, index, run)
        return state, chunks.put(spec, call.of, out, index, found)

    shape = list(call.inputs.q.shape)
    shape[-1] = spec.V
    out = jnp.zeros(shape, inputs.v.dtype)
    state, out = chunks.each_segment(call, body, (initial, out))
    return Outputs(chunks.unpadded(spec, out), state)


class _Rows(NamedTuple):
    """The arrays that the backward pass computes from a segment's query rows, in float32."""

    pairs: jax.Array  # P [B, G, N, M, C]
    w: jax.Array  # [B, G, N, M, 1]
    s: jax.Array  # [B, G, N, M, 1]
    d_pairs: jax.Array  # dP before its mask, [B, G, N, M, C]
    d_reading: list[jax.Array]  # by way w (do S^T - s z), times `read_scale`, [B, G, N, M, F]


def _rows(call: Call, segment: Segment, states: States, d_out: jax.Array) -> _Rows:
    spec = call.spec
    scales = [way.read_scale for way in segment.ways]
    kv, k_sum = (
        [channel_states.scaled(*pair) for pair in zip(scales, each, strict=True)]
        for each in (states.kv, states.k_sum)
    )
    pairs = segment.pairs()
    den = channel_states.den_of(segment, pairs, k_sum)
    w = rows.weights(spec, den)
    of_pairs = rows.product(spec, "bgnmv,bgncv->bgnmc", d_out, segment.v, jnp.float32)
    of_states = [
        rows.product(spec, "bgnmv,bgnfv->bgnmf", d_out, rows.operand(spec, S), jnp.float32)
        for S in kv
    ]
    s = jnp.sum(pairs * of_pairs, axis=-1, keepdims=True)
    for way, of_state in zip(segment.ways, of_states, strict=True):
        s += jnp.sum(way.reading * of_state, axis=-1, keepdims=True)
    s = rows.where_divided(spec, den, w * s)
    d_reading = []
    for way, of_state, z in zip(segment.ways, of_states, k_sum, strict=True):
        flow = w * (of_state - s * z[:, :, :, None])
        d_reading.append(unless_hidden(_tiled(way.reads, flow), flow))
    return _Rows(pairs, w, s, w * (of_pairs - s), d_reading)


def _tiled(factors: jax.Array, of_rows: jax.Array) -> jax.Array:
    """Factors [B, G, N, C, F] for the query rows of all heads of a group, [B, G, N, M, F]."""
    return jnp.tile(factors, (1, 1, 1, of_rows.shape[3] // factors.shape[3], 1))


def _sums_of_rows(call: Call, way: Way, found: _Rows, d_out: jax.Array) -> LinearState:
    """What each chunk's rows add to R and r of a way."""
    weighed = rows.operand(call.spec, way.reading * found.w)
    sums = rows.product(call.spec, "bgnmf,bgnmv->bgnfv", weighed, d_out, jnp.float32)
    r = -jnp.sum(way.reading * (found.w * found.s), axis=3)
    return LinearState(
        channel_states.scaled(way.read_scale, sums), channel_states.scaled(way.read_scale, r)
    )


class _Backward(NamedTuple):
    call: Call
    edges: list[LinearState]  # by way, of `edges_of`
    d_outs: jax.Array

    def at(self, index: Any) -> tuple[list[LinearState], jax.Array]:
        """The states at a segment's edges, and do as an operand."""
        edges = [jax.tree.map(lambda x: x[index], edge) for edge in self.edges]
        found = rows.keep(self.call.masks(index)[0], self.call.take(self.d_outs, index))
        return edges, rows.operand(self.call.spec, found.astype(jnp.float32))

    def from_start(self) -> list[LinearState]:
        """R and r of the states that come from the end, before each segment."""
        if len(self.edges) == 1:
            return []
        nothing = LinearState(*(jnp.zeros_like(edge[0]) for edge in self.edges[1]))
        if self.call.of.segments == 1:
            return [jax.tree.map(lambda x: x[None], nothing)]

        def body(later: LinearState, index: Any) -> tuple[LinearState, LinearState]:
            edges, d_out = self.at(index)

            def run(segment: Segment) -> LinearState:
                found = _rows(
                    self.call, segment, channel_states.states_of(self.call, segment, edges), d_out
                )
                way = segment.ways[1]
                sums = _sums_of_rows(self.call, way, found, d_out)
                walked = [
                    channel_states.at_chunks(*one, way.keeps, back=False)[1]
                    for one in zip(later, sums, strict=True)
                ]
                return LinearState(walked[0], walked[1])

            return channel_states.by_form(self.call, index, run), later

        return [self.call.scan(body, nothing, reverse=False)[1]]


class _Found(NamedTuple):
    """The gradients of a segment, in float32."""

    later: LinearState  # R and r before it
    q: jax.Array  # by phi(q) [B, G, N, M, F]
    k: jax.Array  # by phi(k) [B, G, N, C, F]
    v: jax.Array
    decay: jax.Array  # [B, G, N, C, F]


def _of_pairs(call: Call, segment: Segment, d_pairs: jax.Array) -> tuple[Any, ...]:
    """The gradients by phi(q) and phi(k), and what crosses each step (`channels.Gradients`)."""
    spec, C = call.spec, call.of.C
    d_pairs = d_pairs.reshape(*d_pairs.shape[:3], -1, C, C)
    if segment.same_run is not None:
        d_pairs = jnp.where(segment.same_run, d_pairs, 0)
    own = jnp.eye(C, dtype=bool)
    diagonal = jnp.sum(jnp.where(own, d_pairs, 0), axis=-1, keepdims=True)
    d_q = diagonal * segment.phi_k
    d_k = jnp.sum(diagonal * segment.phi_q, axis=3, keepdims=True)
    crossing, behind = jnp.float32(0), []
    for way in segment.ways:
        others = jnp.where(way.pairs.seen(C) & ~own, d_pairs, 0)
        found = way.pairs.gradients(rows.in_parts(spec, others))
        d_q, d_k, crossing = d_q + found.q, d_k + found.k, crossing + found.crossing
        behind += [] if found.behind is None else [found.behind]
    return d_q.reshape(*d_q.shape[:3], -1, spec.F), d_k[:, :, :, 0], crossing, behind


def _gradients(
    call: Call,
    segment: Segment,
    edges: list[LinearState],
    flows: list[LinearState],
    d_out: jax.Array,
) -> _Found:
    """`flows`: by way R and r at the edge that they come from."""
    spec, ways, C = call.spec, segment.ways, call.of.C
    product = functools.partial(rows.product, spec)
    states = channel_states.states_of(call, segment, edges)
    found = _rows(call, segment, states, d_out)
    d_q, d_k, crossing, behind = _of_pairs(call, segment, found.d_pairs)
    walked = [
        [
            channel_states.at_chunks(*one, way.keeps, back=way.pairs.way == 0)
            for one in zip(flow, _sums_of_rows(call, way, found, d_out), strict=True)
        ]
        for way, flow in zip(ways, flows, strict=True)
    ]
    later = LinearState(*(edge for _, edge in walked[0]))
    weighed = rows.operand(spec, found.pairs * found.w)
    d_v = product("bgnmc,bgnmv->bgncv", weighed, d_out, jnp.float32)
    ahead, kept = [], jnp.float32(0)
    for n, way in enumerate(ways):
        (after, _), (r_after, _) = walked[n]  # R and r behind each chunk
        flow = rows.operand(spec, channel_states.scaled(way.add_scale, after))
        r = channel_states.scaled(way.add_scale, r_after)
        added = way.added
        d_v += product("bgncf,bgnfv->bgncv", added, flow, jnp.float32)
        d_added = product("bgncv,bgnfv->bgncf", segment.v, flow, jnp.float32) + r[:, :, :, None]
        d_added = unless_hidden(way.adds, d_added)
        d_reading = found.d_reading[n]
        d_k += way.adds * d_added
        d_q += _tiled(way.reads, d_reading) * d_reading
        of_reads = way.reading * d_reading
        of_reads = jnp.sum(of_reads.reshape(*of_reads.shape[:3], -1, C, spec.F), axis=3)
        of_adds = way.added * d_added
        # A way from the end reads what is behind a row, and adds what is before it.
        last, first = (of_reads, of_adds) if n == 0 else (of_adds, of_reads)
        behind.append(last)
        ahead.append(first)
        of_state = jnp.sum(states.kv[n] * after, axis=-1) + states.k_sum[n] * r_after
        kept += way.keeps * unless_hidden(way.keeps, of_state)
    crossing += channels.from_row(sum(behind[1:], start=behind[0]))
    crossing += channels.before_row(sum(ahead[1:], start=ahead[0])) + kept[:, :, :, None]
    return _Found(later, d_q, d_k, d_v, crossing)


def backward(
    spec: LinearAttentionSpec, chunk: int, most: int, inputs: Inputs, cotangents: Outputs
) -> Inputs:
    spec = channel_states.products_of(spec)
    call = channel_states.call_of(spec, chunk, most, inputs)
    initial = rows.initial(spec, call.inputs)
    edges = [channel_states.edges_of(call, 0, initial), *channel_states.from_end(call, initial)]
    passes = _Backward(call, edges, chunks.padded(spec, call.of, cotangents.out))
    starts = passes.from_start()

    def body(carry: tuple[LinearState, Any], index: Any) -> Any:
        later, found = carry
        asked, real = call.masks(index)
        at_edges, d_out = passes.at(index)
        flows = [later, *(jax.tree.map(lambda x: x[index], start) for start in starts)]

        def run(segment: Segment) -> tuple[LinearState, tuple[jax.Array, ...]]:
            of = _gradients(call, segment, at_edges, flows, d_out)
            d_q = rows.pull_back(spec, call.take(call.inputs.q, index), asked, of.q)
            d_k = rows.pull_back(spec, call.take(call.inputs.k, index), real, of.k)
            d_v = rows.keep(real, of.v).astype(inputs.v.dtype)
            return of.later, (d_q, d_k, d_v, rows.keep(real, of.decay))

        later, gradients = channel_states.by_form(call, index, run)
        found = tuple(
            chunks.put(spec, call.of, array, index, flow)
            for array, flow in zip(found, gradients, strict=True)
        )
        return later, found

    zeros = jax.tree.map(jnp.zeros_like, (*call.inputs[:3], call.inputs.decay))
    carry = LinearState(*cotangents.state), zeros
    state, found = chunks.each_segment(call, body, carry, reverse=True)
    q, k, v, d_decay = (chunks.unpadded(spec, array) for array in found)
    assert inputs.decay is not None
    d_decay = jnp.where(inputs.decay < LEAST_DECAY, 0, d_decay)
    has_state = inputs.initial_state is not None
    return Inputs(q, k, v, decay=d_decay, initial_state=state if has_state else None)
