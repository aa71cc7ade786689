"""Causal, or with a decay or segments: rows in chunks of C, chunks in segments, products over all
chunks of a segment at once. "Segments" are these here, and `runs` those of `segment_ids`.

With S, z the sums over the keys of all earlier chunks, w_i as in `whole.py`, and the factors
E_ij, a_i, b_j and c of `gates.py`, which are 1 without a decay and segments:

    P_ij  = E_ij phi(q_i) . phi(k_j)                      j <= i, both in the chunk
    den_i = sum_j P_ij + a_i phi(q_i) . z
    out_i = w_i [P_i, a_i phi(q_i)] [v; S]                one product over C + F
    S'    = c S + sum_j b_j phi(k_j) v_j^T                z' likewise: those of the next chunk

    s_i   = w_i (sum_j P_ij do_i . v_j + a_i phi(q_i) . do_i S^T)     out_i . do_i, as in `whole.py`
    R     = c' R' + sum over the next chunk's rows of w_i a_i phi(q_i) do_i^T
    r     = c' r' - sum over them of w_i a_i s_i phi(q_i)
    dP_ij = w_i (do_i . v_j - s_i)                        j <= i, both in the chunk
    dphi(q_i) = sum_j E_ij dP_ij phi(k_j) + w_i a_i (do_i S^T - s_i z)
    dphi(k_j) = sum_i E_ij dP_ij phi(q_i) + b_j (v_j R^T + r)
    dv_j      = sum_i w_i P_ij do_i + b_j phi(k_j) R

The decay's gradient is made of what each factor's exponent takes from the loss:

    M_ij = P_ij dP_ij                       A_i = w_i a_i phi(q_i) . (do_i S^T - s_i z)
    K    = c (<S, R> + z . r)               B_j = b_j phi(k_j) . (v_j R^T + r)

Where every query sees every key of its run, P has all pairs of a chunk, and there is a second
state, of the keys of all later chunks, with factors and a gradient R of its own. Both states stand
one above the other, as one of 2 F features: a row reads them with [a_i phi(q_i), a2_i phi(q_i)], so
the products are those of the causal call.

A chunk's query rows are those of all heads of a group, M = R * C. Segments follow one another, so
that what lies between the passes does not grow with T. The backward pass goes from the last segment
to the first; it takes the state before each of them, which a pass over the keys makes anew. A
second state takes one more pass over the keys, from the end, and its gradient a pass from the start
that computes each segment's rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
)
from ato_jax.ops.linear_attention.xla.products import chunks, gates, rows
from ato_jax.ops.linear_attention.xla.products.chunks import Call, Segment


def forward(spec: LinearAttentionSpec, chunk: int, most: int, inputs: Inputs) -> Outputs:
    call = chunks.call(spec, chunk, most, inputs)
    initial = rows.initial(spec, call.inputs)
    ends = chunks.from_end(call, initial)

    def body(carry: tuple[LinearState, jax.Array], index: Any) -> Any:
        (S, z), out = carry
        segment = call.segment(index)
        keeps = segment.keeps
        edges = [S, *(end.kv[index] for end in ends)]
        befores, (S, *_) = chunks.at_chunks(edges, chunks.state_sums(spec, segment), keeps)
        edges = [z, *(end.k_sum[index] for end in ends)]
        z_before, (z, *_) = chunks.at_chunks(edges, chunks.key_sums(segment), keeps)
        pairs = rows.operand(spec, chunks.pairs(spec, segment, segment.v.dtype))
        w = rows.weights(spec, chunks.den(pairs, segment.reading, chunks.stacked(z_before)))
        states = rows.parts_of_states(spec, chunks.stacked(befores))
        q = segment.operands(segment.reading)
        left = jnp.concatenate([pairs, *(q for _ in states)], axis=-1)  # [.., M, C + F]
        right = jnp.concatenate([segment.v, *states], axis=-2)  # [.., C + F, V]
        num = rows.product(spec, "bgnmx,bgnxv->bgnmv", left, right, jnp.float32)
        num = rows.keep(call.masks(index)[0], num)
        return LinearState(S, z), chunks.put(spec, call.of, out, index, num * w)

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
    d_pairs: jax.Array  # dP before the mask and E, [B, G, N, M, C]
    d_reading: list[jax.Array]  # by way w (do S^T - s z) [B, G, N, M, F]


def _rows_backward(
    spec: LinearAttentionSpec, segment: Segment, d_out: jax.Array, S: jax.Array, z: jax.Array
) -> _Rows:
    """S [B, G, N, ways * F, V] as an operand, z [B, G, N, ways * F]: the states of each chunk."""
    # In float32 for the normaliser's flow: where few keys are seen, their roundings do not average
    # out, and these rows have the largest gradients.
    pairs = chunks.pairs(spec, segment, jnp.float32)
    den = chunks.den(pairs, segment.reading, z)
    w = rows.weights(spec, den)
    of_states = rows.product(spec, "bgnmv,bgnfv->bgnmf", d_out, S, jnp.float32)
    of_pairs = rows.product(spec, "bgnmv,bgncv->bgnmc", d_out, segment.v, jnp.float32)
    s = jnp.sum(pairs * of_pairs, axis=-1, keepdims=True)
    for reading, of_state in chunks.split(segment.reading, of_states):
        s = s + jnp.sum(reading * of_state, axis=-1, keepdims=True)
    s = rows.where_divided(spec, den, w * s)
    d_reading = w * (of_states - s * z[:, :, :, None])
    d_readings = jnp.split(d_reading, len(segment.reading), axis=-1)
    if segment.gates is not None:
        count = d_reading.shape[3]
        d_readings = [
            gates.unless_hidden(gates.of_rows(way.reads, count)[..., None], flow)
            for way, flow in zip(segment.gates.ways, d_readings, strict=True)
        ]
    return _Rows(pairs, w, s, w * (of_pairs - s), d_readings)


def _sums_of_rows(
    spec: LinearAttentionSpec, segment: Segment, found: _Rows, d_out: jax.Array, way: int
) -> tuple[jax.Array, jax.Array]:
    """The sums over each chunk's rows that R and r of a way consist of."""
    reading = segment.reading[way]
    weighed = rows.operand(spec, reading * found.w)
    sums = rows.product(spec, "bgnmf,bgnmv->bgnfv", weighed, d_out, jnp.float32)
    return sums, -jnp.sum(reading * (found.w * found.s), axis=3)


class _Backward(NamedTuple):
    """The arrays that the passes over the queries read."""

    call: Call
    edges: list[LinearState]  # by way, of `chunks.edges`
    d_outs: jax.Array

    def states(self, segment: Segment, index: Any) -> tuple[list[list[jax.Array]], jax.Array]:
        """By way S of each chunk, and z of all, [B, G, N, ways * F]."""
        kv, k_sum = ([edge[n][index] for edge in self.edges] for n in range(2))
        befores = chunks.at_chunks(kv, chunks.state_sums(self.call.spec, segment), segment.keeps)[0]
        return befores, chunks.stacked(
            chunks.at_chunks(k_sum, chunks.key_sums(segment), segment.keeps)[0]
        )

    def d_out(self, index: Any) -> jax.Array:
        found = rows.keep(self.call.masks(index)[0], self.call.take(self.d_outs, index))
        return rows.operand(self.call.spec, found)

    def rows(
        self, segment: Segment, befores: list[list[jax.Array]], z: jax.Array, d_out: jax.Array
    ) -> _Rows:
        spec = self.call.spec
        S = chunks.stacked([[rows.operand(spec, one) for one in sums] for sums in befores])
        return _rows_backward(spec, segment, d_out, S, z)

    def from_start(self) -> list[LinearState]:
        """R and r of the states that come from the end, before each segment."""
        if self.call.ways == 1:
            return []
        nothing = LinearState(*(jnp.zeros_like(edge[0]) for edge in self.edges[1]))
        if self.call.of.segments == 1:
            return [jax.tree.map(lambda x: x[None], nothing)]

        def body(later: LinearState, index: Any) -> tuple[LinearState, LinearState]:
            segment = self.call.segment(index)
            d_out = self.d_out(index)
            found = self.rows(segment, *self.states(segment, index), d_out)
            sums = _sums_of_rows(self.call.spec, segment, found, d_out, 1)
            behind = [
                chunks.WALKS[0](edge, each, segment.keeps[1])[1]
                for edge, each in zip(later, sums, strict=True)
            ]
            return LinearState(*behind), later

        return [self.call.scan(body, nothing, reverse=False)[1]]


def backward(
    spec: LinearAttentionSpec, chunk: int, most: int, inputs: Inputs, cotangents: Outputs
) -> Inputs:
    call = chunks.call(spec, chunk, most, inputs)
    of, product = call.of, functools.partial(rows.product, spec)
    initial = rows.initial(spec, call.inputs)
    edges = [chunks.edges(call, 0, initial), *chunks.from_end(call, initial)]
    passes = _Backward(call, edges, chunks.padded(spec, of, cotangents.out))
    starts = passes.from_start()
    # The maps' derivatives read q and k by themselves: else XLA keeps the features in float32.
    q_again, k_again = jax.lax.optimization_barrier((call.inputs.q, call.inputs.k))

    def body(carry: tuple[LinearState, Any], index: Any) -> Any:
        (later, r), (found, found_decay) = carry
        asked, real = call.masks(index)
        segment = call.segment(index)
        own, v = segment.gates, segment.v
        q, k, added = (
            segment.operands(x) for x in ([segment.phi_q], [segment.phi_k], segment.added)
        )
        befores, z = passes.states(segment, index)
        d_out = passes.d_out(index)
        of_rows = passes.rows(segment, befores, z, d_out)
        # Two parts: the 16 bits that d_pairs is rounded to, and its rounding error. Where features
        # are alike, dk is the sum of d_pairs over the queries, and the terms of that sum cancel.
        d_products, *rest = rows.in_parts(spec, gates.gated(own, of_rows.d_pairs))

        sums = [_sums_of_rows(spec, segment, of_rows, d_out, way) for way in range(call.ways)]
        kv, k_sums = ([one[n] for one in sums] for n in range(2))
        starts_kv, starts_r = ([start[n][index] for start in starts] for n in range(2))
        after, (later, *_) = chunks.at_chunks([later, *starts_kv], kv, segment.keeps, back=True)
        states_after = chunks.stacked([[rows.operand(spec, one) for one in sums] for sums in after])
        r_after, (r, *_) = chunks.at_chunks([r, *starts_r], k_sums, segment.keeps, back=True)

        d_q = product("bgnmc,bgncf->bgnmf", d_products, k, jnp.float32)
        d_k = product("bgnmc,bgnmf->bgncf", d_products, q, jnp.float32)
        for part in rest:
            d_q += product("bgnmc,bgncf->bgnmf", part, k, jnp.float32)
            d_k += product("bgnmc,bgnmf->bgncf", part, q, jnp.float32)
        d_added = product("bgncv,bgnfv->bgncf", v, states_after, jnp.float32)
        d_added += chunks.stacked(r_after)[:, :, :, None]
        d_addeds = jnp.split(d_added, call.ways, axis=-1)
        weighed = rows.operand(spec, of_rows.pairs * of_rows.w)
        d_v = product("bgnmc,bgnmv->bgncv", weighed, d_out, jnp.float32)
        d_v += product("bgncf,bgnfv->bgncv", added, states_after, jnp.float32)
        if own is not None:
            d_addeds = [
                gates.unless_hidden(way.adds[..., None], flow)
                for way, flow in zip(own.ways, d_addeds, strict=True)
            ]
        for n in range(call.ways):
            reads, adds = of_rows.d_reading[n], d_addeds[n]
            if own is not None:
                reads *= gates.of_rows(own.ways[n].reads, q.shape[3])[..., None]
                adds *= own.ways[n].adds[..., None]
            d_q, d_k = d_q + reads, d_k + adds
        if spec.decay:
            assert own is not None
            flows = [
                gates.Flow(
                    jnp.sum(segment.reading[n] * of_rows.d_reading[n], axis=-1),
                    jnp.sum(segment.added[n] * d_addeds[n], axis=-1),
                    own.ways[n].keeps
                    * gates.unless_hidden(
                        own.ways[n].keeps, _overlap(befores[n], after[n], z_of, r_after[n])
                    ),
                )
                for n, z_of in enumerate(jnp.split(z, call.ways, axis=-1))
            ]
            steps = gates.flows_of_steps(of_rows.pairs * of_rows.d_pairs, flows)
            steps = steps.reshape(*steps.shape[:2], -1)
            found_decay = jax.lax.dynamic_update_slice_in_dim(
                found_decay, steps, index * of.rows, axis=2
            )
        gradients = (
            rows.pull_back(spec, call.take(q_again, index), asked, d_q),
            rows.pull_back(spec, call.take(k_again, index), real, d_k),
            rows.keep(real, d_v),
        )
        found = tuple(
            chunks.put(spec, of, array, index, flow)
            for array, flow in zip(found, gradients, strict=True)
        )
        return LinearState(later, r), (found, found_decay)

    zeros: Any = tuple(jnp.zeros_like(array) for array in call.inputs[:3])
    d_decay = None
    if spec.decay:
        d_decay = jnp.zeros((spec.B, spec.G, of.rows * of.segments), jnp.float32)
    carry = LinearState(*cotangents.state), (zeros, d_decay)
    state, (found, d_decay) = chunks.each_segment(call, body, carry, reverse=True)
    if spec.decay:
        d_decay = gates.gradient(spec, inputs, d_decay[:, :, : spec.T])
    q, k, v = (chunks.unpadded(spec, array) for array in found)
    has_state = inputs.initial_state is not None
    return Inputs(q, k, v, decay=d_decay, initial_state=state if has_state else None)


def _overlap(
    S: list[jax.Array], flows: list[jax.Array], z: jax.Array, r: list[jax.Array]
) -> jax.Array:
    """<S, R> + z . r of each chunk, [B, G, N]; `flows`: R."""
    of_states = jnp.sum(jnp.stack(S, axis=2) * jnp.stack(flows, axis=2), axis=(-2, -1))
    return of_states + jnp.sum(z * jnp.stack(r, axis=2), axis=-1)
