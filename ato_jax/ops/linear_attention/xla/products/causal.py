"""Causal: rows in chunks of C, chunks in segments, products over all chunks of a segment at once.

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

A chunk's query rows are those of all heads of a group, M = R * C. Segments follow one another, so
that what lies between the passes does not grow with T. The backward pass goes from the last segment
to the first; it takes the state before each of them, which a pass over the keys makes anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from ato_jax.meshes import varying_with
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.xla.products import gates, rows
from ato_jax.ops.linear_attention.xla.products.gates import Gates


class Cut(NamedTuple):
    """T rows as `segments` of N chunks of C rows; the last may be padding in part."""

    C: int
    N: int
    segments: int

    @property
    def rows(self) -> int:
        return self.N * self.C


def cut(spec: LinearAttentionSpec, chunk: int, most: int) -> Cut:
    """Segments of like length, of at most `most` chunks."""
    C = min(chunk, spec.T)
    chunks = -(-spec.T // C)
    segments = -(-chunks // most)
    return Cut(C, -(-chunks // segments), segments)


class Segment(NamedTuple):
    """A segment's arrays, heads first; the features are rounded as operands are."""

    gates: Gates | None
    phi_k: Any  # [B, G, N, C, F] float32
    added: Any  # b phi(k), rounded once
    v: Any  # [B, G, N, C, V]
    phi_q: Any = None  # [B, G, N, M, F] float32
    reading: Any = None  # a phi(q), rounded once

    @property
    def keeps(self) -> Any:
        """c [B, G or 1, N]; None: all are 1."""
        return None if self.gates is None else self.gates.keeps


def _padded(spec: LinearAttentionSpec, of: Cut, array: jax.Array) -> jax.Array:
    missing = of.rows * of.segments - spec.T
    if not missing:
        return array
    axis = spec.layout.index("t")
    return jnp.pad(array, [(0, missing if a == axis else 0) for a in range(array.ndim)])


def _rows_first(array: jax.Array) -> jax.Array:
    """The array with its axes in memory as they are written.

    Products want heads first. Without this XLA turns the arrays of a loop as a whole before and
    behind it, and does not turn each segment where it is mapped.
    """
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


def _take(spec: LinearAttentionSpec, of: Cut, array: jax.Array, index: Any) -> jax.Array:
    """A segment of [B, T, heads, X] as [B, G, N, M, X], where M is C for k and v."""
    axis = spec.layout.index("t")
    array = jax.lax.dynamic_slice_in_dim(array, index * of.rows, of.rows, axis=axis)
    array = _rows_first(array)
    B, width = array.shape[0], array.shape[-1]
    if spec.layout == "bthd":
        array = array.reshape(B, of.N, of.C, spec.G, -1, width).transpose(0, 3, 1, 4, 2, 5)
    else:
        array = array.reshape(B, spec.G, -1, of.N, of.C, width).transpose(0, 1, 3, 2, 4, 5)
    return array.reshape(B, spec.G, of.N, -1, width)


def _put(
    spec: LinearAttentionSpec, of: Cut, array: jax.Array, index: Any, found: jax.Array
) -> jax.Array:
    """`array` with a segment replaced by `found` [B, G, N, M, X]."""
    B, width = found.shape[0], found.shape[-1]
    found = found.reshape(B, spec.G, of.N, -1, of.C, width)
    axis = spec.layout.index("t")
    if spec.layout == "bthd":
        found = found.transpose(0, 2, 4, 1, 3, 5).reshape(B, of.rows, -1, width)
    else:
        found = found.transpose(0, 1, 3, 2, 4, 5).reshape(B, -1, of.rows, width)
    found = _rows_first(found.astype(array.dtype))
    return jax.lax.dynamic_update_slice_in_dim(array, found, index * of.rows, axis=axis)


def _mask(
    spec: LinearAttentionSpec, of: Cut, lengths: jax.Array | None, index: Any, group: int
) -> jax.Array | None:
    """[B, 1, N, M, 1]: which rows of a segment are no padding; None: all."""
    if lengths is None:
        if of.rows * of.segments == spec.T:
            return None
        lengths = jnp.full((1,), spec.T, jnp.int32)
    mask = rows.valid(lengths, index * of.rows, of.rows, "bt")
    assert mask is not None
    shape = len(mask), 1, of.N, 1, of.C, 1
    full = jnp.broadcast_to(mask.reshape(shape), (*shape[:3], group, of.C, 1))
    return full.reshape(*shape[:3], -1, 1)


def _sums_before(
    first: jax.Array, each: jax.Array, keeps: jax.Array | None
) -> tuple[list[jax.Array], jax.Array]:
    """first [B, G, ..], each [B, G, N, ..]: the sum before each n, and that of all. What is summed
    up before n is multiplied by keeps [B, G or 1, N] there."""
    before = []
    for n in range(each.shape[2]):
        before.append(first)
        if keeps is not None:
            kept = keeps[:, :, n]
            first = first * kept.reshape(*kept.shape, *(1 for _ in first.shape[2:]))
        first = first + each[:, :, n]
    return before, first


def _sums_after(
    last: jax.Array, each: jax.Array, keeps: jax.Array | None
) -> tuple[list[jax.Array], jax.Array]:
    """The sum behind each n, and that of all."""
    keeps = None if keeps is None else keeps[:, :, ::-1]
    after, total = _sums_before(last, each[:, :, ::-1], keeps)
    return after[::-1], total


def _stacked(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack(arrays, axis=2)


class _Call(NamedTuple):
    """A call with its arrays padded to whole segments."""

    spec: LinearAttentionSpec
    of: Cut
    inputs: Inputs
    gates: Gates | None

    def masks(self, index: Any) -> tuple[jax.Array | None, jax.Array | None]:
        """Of queries, and of keys."""
        group = self.spec.H // self.spec.G
        make = functools.partial(_mask, self.spec, self.of)
        lengths = self.inputs.q_lengths, self.inputs.kv_lengths
        return make(lengths[0], index, group), make(lengths[1], index, 1)

    def take(self, array: jax.Array, index: Any) -> jax.Array:
        return _take(self.spec, self.of, array, index)

    def keys(self, index: Any) -> Segment:
        mask = self.masks(index)[1]
        v = rows.operand(self.spec, rows.keep(mask, self.take(self.inputs.v, index)))
        features = rows.features(self.spec, self.take(self.inputs.k, index), mask)
        added = phi_k = rows.rounded(self.spec, features)
        own = None if self.gates is None else self.gates.take(index * self.of.N, self.of.N)
        if own is not None:
            added = rows.rounded(self.spec, features * own.adds[..., None])
        return Segment(own, phi_k, added, v)

    def segment(self, index: Any) -> Segment:
        mask = self.masks(index)[0]
        features = rows.features(self.spec, self.take(self.inputs.q, index), mask)
        reading = phi_q = rows.rounded(self.spec, features)
        found = self.keys(index)
        if found.gates is not None:
            reads = gates.of_rows(found.gates.reads, features.shape[3])
            reading = rows.rounded(self.spec, features * reads[..., None])
        return found._replace(phi_q=phi_q, reading=reading)


def _call(spec: LinearAttentionSpec, chunk: int, most: int, inputs: Inputs) -> _Call:
    of = cut(spec, chunk, most)
    q, k, v = (_padded(spec, of, array) for array in inputs[:3])
    found = gates.of_call(spec, inputs, of.C, of.N * of.segments)
    return _Call(spec, of, inputs._replace(q=q, k=k, v=v), found)


def _each_segment(
    call: _Call, body: Callable[[Any, Any], Any], carry: Any, reverse: bool = False
) -> Any:
    """The carry after every segment; without a loop where there is one."""
    if call.of.segments == 1:
        return body(carry, 0)
    carry = varying_with(carry, call.inputs)
    indices = jnp.arange(call.of.segments, dtype=jnp.int32)
    return jax.lax.scan(lambda c, i: (body(c, i), None), carry, indices, reverse=reverse)[0]


def _pairs(segment: Segment, dtype: Any) -> jax.Array:
    """P [B, G, N, M, C], in float32 where there are gates."""
    operand = segment.v.dtype
    k, q = segment.phi_k.astype(operand), segment.phi_q.astype(operand)
    dtype = dtype if segment.gates is None else jnp.float32
    return gates.gated(segment.gates, rows.product("bgnmf,bgncf->bgnmc", q, k, dtype))


def _den(pairs: jax.Array, reading: jax.Array, z: jax.Array) -> jax.Array:
    """[B, G, N, M, 1]."""
    of_chunk = jnp.sum(pairs.astype(jnp.float32), axis=-1, keepdims=True)
    return of_chunk + jnp.sum(reading * z[:, :, :, None], axis=-1, keepdims=True)


def _state_sums(segment: Segment, equation: str = "bgncf,bgncv->bgnfv") -> jax.Array:
    return rows.product(equation, segment.added.astype(segment.v.dtype), segment.v, jnp.float32)


def _after(segment: Segment, state: LinearState) -> LinearState:
    """The state after a segment's keys."""
    if segment.keeps is None:
        kv = _state_sums(segment, "bgncf,bgncv->bgfv")
        return LinearState(state.kv + kv, state.k_sum + jnp.sum(segment.phi_k, axis=(2, 3)))
    _, kv = _sums_before(state.kv, _state_sums(segment), segment.keeps)
    _, k_sum = _sums_before(state.k_sum, jnp.sum(segment.added, axis=3), segment.keeps)
    return LinearState(kv, k_sum)


def forward(spec: LinearAttentionSpec, chunk: int, most: int, inputs: Inputs) -> Outputs:
    call = _call(spec, chunk, most, inputs)

    def body(carry: tuple[LinearState, jax.Array], index: Any) -> Any:
        (S, z), out = carry
        segment = call.segment(index)
        befores, S = _sums_before(S, _state_sums(segment), segment.keeps)
        z_before, z = _sums_before(z, jnp.sum(segment.added, axis=3), segment.keeps)
        pairs = rows.operand(spec, _pairs(segment, segment.v.dtype))
        w = rows.weights(spec, _den(pairs, segment.reading, _stacked(z_before)))
        states = rows.parts_of_states(spec, _stacked(befores))
        q = segment.reading.astype(segment.v.dtype)
        left = jnp.concatenate([pairs, *(q for _ in states)], axis=-1)  # [.., M, C + F]
        right = jnp.concatenate([segment.v, *states], axis=-2)  # [.., C + F, V]
        num = rows.product("bgnmx,bgnxv->bgnmv", left, right, jnp.float32)
        num = rows.keep(call.masks(index)[0], num)
        return LinearState(S, z), _put(spec, call.of, out, index, num * w)

    shape = list(call.inputs.q.shape)
    shape[-1] = spec.V
    out = jnp.zeros(shape, inputs.v.dtype)
    state, out = _each_segment(call, body, (rows.initial(spec, inputs), out))
    return Outputs(_unpadded(spec, out), state)


def _unpadded(spec: LinearAttentionSpec, array: jax.Array) -> jax.Array:
    return jax.lax.slice_in_dim(array, 0, spec.T, axis=spec.layout.index("t"))


def _states_before(call: _Call) -> LinearState:
    """The state before each segment: kv [segments, B, G, F, V] and k_sum."""
    state = rows.initial(call.spec, call.inputs)
    if call.of.segments == 1:
        return LinearState(state.kv[None], state.k_sum[None])

    def body(state: LinearState, index: Any) -> tuple[LinearState, LinearState]:
        return _after(call.keys(index), state), state

    indices = jnp.arange(call.of.segments, dtype=jnp.int32)
    found: LinearState = jax.lax.scan(body, varying_with(state, call.inputs), indices)[1]
    return found


class _Rows(NamedTuple):
    """The arrays that the backward pass computes from a segment's query rows, in float32."""

    pairs: jax.Array  # P [B, G, N, M, C]
    w: jax.Array  # [B, G, N, M, 1]
    s: jax.Array  # [B, G, N, M, 1]
    d_pairs: jax.Array  # dP, whatever a row sees, [B, G, N, M, C]
    d_reading: jax.Array  # w (do S^T - s z) [B, G, N, M, F]


def _rows_backward(
    spec: LinearAttentionSpec, segment: Segment, d_out: jax.Array, S: jax.Array, z: jax.Array
) -> _Rows:
    """S [B, G, N, F, V] as an operand, z [B, G, N, F]: the states before each chunk."""
    # In float32 for the normaliser's flow: where few keys are seen, their roundings do not average
    # out, and these rows have the largest gradients.
    pairs = _pairs(segment, jnp.float32)
    den = _den(pairs, segment.reading, z)
    w = rows.weights(spec, den)
    of_states = rows.product("bgnmv,bgnfv->bgnmf", d_out, S, jnp.float32)
    of_pairs = rows.product("bgnmv,bgncv->bgnmc", d_out, segment.v, jnp.float32)
    s = jnp.sum(pairs * of_pairs, axis=-1, keepdims=True)
    s = w * (s + jnp.sum(segment.reading * of_states, axis=-1, keepdims=True))
    s = rows.where_divided(spec, den, s)
    d_reading = w * (of_states - s * z[:, :, :, None])
    return _Rows(pairs, w, s, w * (of_pairs - s), d_reading)


def backward(
    spec: LinearAttentionSpec, chunk: int, most: int, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    call = _call(spec, chunk, most, residuals.inputs)
    of, product = call.of, rows.product
    dtype = rows.operand_dtype(spec)
    d_outs = _padded(spec, of, cotangents.out)
    starts = _states_before(call)
    # The maps' derivatives read q and k by themselves: else XLA keeps the features in float32.
    q_again, k_again = jax.lax.optimization_barrier((call.inputs.q, call.inputs.k))

    def body(carry: tuple[LinearState, Any], index: Any) -> Any:
        (later, r), (found, found_decay) = carry
        asked, real = call.masks(index)
        segment = call.segment(index)
        own, v = segment.gates, segment.v
        q, k, added = (x.astype(dtype) for x in (segment.phi_q, segment.phi_k, segment.added))
        befores = _sums_before(starts.kv[index], _state_sums(segment), segment.keeps)[0]
        S = _stacked([rows.operand(spec, one) for one in befores])
        z_sums = jnp.sum(segment.added, axis=3)
        z = _stacked(_sums_before(starts.k_sum[index], z_sums, segment.keeps)[0])
        d_out = rows.operand(spec, rows.keep(asked, call.take(d_outs, index)))
        pairs, w, s, d_pairs, d_reading = _rows_backward(spec, segment, d_out, S, z)
        # Two parts: the 16 bits that d_pairs is rounded to, and its rounding error. Where features
        # are alike, dk is the sum of d_pairs over the queries, and the terms of that sum cancel.
        d_products, *rest = rows.in_parts(spec, gates.gated(own, d_pairs))

        weighed = rows.operand(spec, segment.reading * w)
        sums = product("bgnmf,bgnmv->bgnfv", weighed, d_out, jnp.float32)
        after, later = _sums_after(later, sums, segment.keeps)
        states_after = _stacked([rows.operand(spec, one) for one in after])
        r_after, r = _sums_after(r, -jnp.sum(segment.reading * (w * s), axis=3), segment.keeps)

        d_q = product("bgnmc,bgncf->bgnmf", d_products, k, jnp.float32)
        d_k = product("bgnmc,bgnmf->bgncf", d_products, q, jnp.float32)
        for part in rest:
            d_q += product("bgnmc,bgncf->bgnmf", part, k, jnp.float32)
            d_k += product("bgnmc,bgnmf->bgncf", part, q, jnp.float32)
        d_added = product("bgncv,bgnfv->bgncf", v, states_after, jnp.float32)
        d_added += _stacked(r_after)[:, :, :, None]
        d_v = product("bgnmc,bgnmv->bgncv", rows.operand(spec, pairs * w), d_out, jnp.float32)
        d_v += product("bgncf,bgnfv->bgncv", added, states_after, jnp.float32)
        if own is None:
            d_q, d_k = d_q + d_reading, d_k + d_added
        else:
            d_q += d_reading * gates.of_rows(own.reads, q.shape[3])[..., None]
            d_k += d_added * own.adds[..., None]
        if spec.decay:
            assert own is not None
            kept = jnp.sum(_stacked(befores) * _stacked(after), axis=(-2, -1))
            kept = own.keeps * (kept + jnp.sum(z * _stacked(r_after), axis=-1))
            reads = jnp.sum(segment.reading * d_reading, axis=-1)
            adds = jnp.sum(segment.added * d_added, axis=-1)
            steps = gates.flows_of_steps(gates.Flows(pairs * d_pairs, reads, adds, kept))
            steps = steps.reshape(*steps.shape[:2], -1)
            found_decay = jax.lax.dynamic_update_slice_in_dim(
                found_decay, steps, index * of.rows, axis=2
            )
        flows = (
            rows.pull_back(spec, call.take(q_again, index), asked, d_q),
            rows.pull_back(spec, call.take(k_again, index), real, d_k),
            rows.keep(real, d_v),
        )
        found = tuple(
            _put(spec, of, array, index, flow) for array, flow in zip(found, flows, strict=True)
        )
        return LinearState(later, r), (found, found_decay)

    zeros: Any = tuple(jnp.zeros_like(array) for array in call.inputs[:3])
    d_decay = None
    if spec.decay:
        d_decay = jnp.zeros((spec.B, spec.G, of.rows * of.segments), jnp.float32)
    carry = LinearState(*cotangents.state), (zeros, d_decay)
    state, (found, d_decay) = _each_segment(call, body, carry, reverse=True)
    if spec.decay:
        d_decay = gates.gradient(spec, residuals.inputs, d_decay[:, :, : spec.T])
    q, k, v = (_unpadded(spec, array) for array in found)
    has_state = residuals.inputs.initial_state is not None
    return Inputs(q, k, v, decay=d_decay, initial_state=state if has_state else None)
