"""The rows of a call in chunks, chunks in segments, and the states that chunks meet, for `walk.py`,
which has the letters."""

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
)
from ato_jax.ops.linear_attention.xla.products import gates, rows
from ato_jax.ops.linear_attention.xla.products.gates import Gates

# Rows of a chunk, as products by tensor cores like them.
MULTIPLE = 16


class Cut(NamedTuple):
    """T rows as `segments` of N chunks of C rows; the last may be padding in part."""

    C: int
    N: int
    segments: int

    @property
    def rows(self) -> int:
        return self.N * self.C


def cut(spec: LinearAttentionSpec, chunk: int, most: int) -> Cut:
    """Chunks of like length, of at most `chunk` rows, and segments likewise of chunks."""
    chunks = -(-spec.T // chunk)
    C = min(chunk, -(-spec.T // (chunks * MULTIPLE)) * MULTIPLE)
    segments = -(-chunks // most)
    return Cut(C, -(-chunks // segments), segments)


class Segment(NamedTuple):
    """A segment's arrays, heads first; the features are rounded as operands are. Lists have one
    for each way that a state comes from (`gates.py`)."""

    gates: Gates | None
    phi_k: Any  # [B, G, N, C, F] float32
    added: list[Any]  # b phi(k), rounded once
    v: Any  # [B, G, N, C, V]
    phi_q: Any = None  # [B, G, N, M, F] float32
    reading: list[Any] = []  # a phi(q), rounded once

    @property
    def keeps(self) -> list[Any]:
        """c [B, G or 1, N]; None: all are 1."""
        return [None] if self.gates is None else [way.keeps for way in self.gates.ways]

    def operands(self, features: list[Any]) -> Any:
        """Those of all ways side by side, [B, G, N, M or C, ways * F]."""
        return jnp.concatenate(features, axis=-1).astype(self.v.dtype)


def padded(spec: LinearAttentionSpec, of: Cut, array: jax.Array) -> jax.Array:
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


def put(
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


# How states add up on their way through a segment: from its first chunk on, and from its last.
# Their gradients go against them.
WALKS = (_sums_before, _sums_after)


def at_chunks(
    edges: list[jax.Array], each: list[jax.Array], keeps: list[Any], back: bool = False
) -> tuple[list[list[jax.Array]], list[jax.Array]]:
    """By way the sums that each chunk meets, and those behind the segment, from those at the edge
    that a way comes from, [B, G, ..], and each chunk's, [B, G, N, ..]. `back`: of gradients."""
    walks = WALKS[::-1] if back else WALKS
    found = [walk(*given) for walk, *given in zip(walks, edges, each, keeps, strict=False)]
    return [sums for sums, _ in found], [total for _, total in found]


def stacked(of_ways: list[list[jax.Array]]) -> jax.Array:
    """[B, G, N, ways * F, ..]."""
    return jnp.concatenate([jnp.stack(sums, axis=2) for sums in of_ways], axis=3)


class Call(NamedTuple):
    """A call with its arrays padded to whole segments."""

    spec: LinearAttentionSpec
    of: Cut
    inputs: Inputs
    gates: Gates | None

    def masks(self, index: Any) -> tuple[jax.Array | None, jax.Array | None]:
        """Which of the segment's rows are real queries, and which are real keys; None: all."""
        group = self.spec.H // self.spec.G
        make = functools.partial(_mask, self.spec, self.of)
        lengths = self.inputs.q_lengths, self.inputs.kv_lengths
        return make(lengths[0], index, group), make(lengths[1], index, 1)

    def take(self, array: jax.Array, index: Any) -> jax.Array:
        return _take(self.spec, self.of, array, index)

    def keys(self, index: Any, way: int | None = None) -> Segment:
        """`way`: which one's keys alone are wanted."""
        mask = self.masks(index)[1]
        v = rows.operand(self.spec, rows.keep(mask, self.take(self.inputs.v, index)))
        features = rows.features(self.spec, self.take(self.inputs.k, index), mask)
        phi_k = rows.rounded(self.spec, features)
        if self.gates is None:
            return Segment(None, phi_k, [phi_k], v)
        own = self.gates.take(index * self.of.N, self.of.N)
        own = own if way is None else own._replace(ways=own.ways[way : way + 1])
        added = [rows.rounded(self.spec, features * one.adds[..., None]) for one in own.ways]
        return Segment(own, phi_k, added, v)

    def segment(self, index: Any) -> Segment:
        mask = self.masks(index)[0]
        features = rows.features(self.spec, self.take(self.inputs.q, index), mask)
        phi_q = rows.rounded(self.spec, features)
        found = self.keys(index)
        if found.gates is None:
            return found._replace(phi_q=phi_q, reading=[phi_q])
        of_rows = [gates.of_rows(way.reads, features.shape[3]) for way in found.gates.ways]
        reading = [rows.rounded(self.spec, features * reads[..., None]) for reads in of_rows]
        return found._replace(phi_q=phi_q, reading=reading)

    @property
    def ways(self) -> int:
        return 1 if self.gates is None else len(self.gates.ways)

    def scan(self, body: Callable[..., Any], carry: Any, reverse: bool) -> Any:
        """`lax.scan` of (carry, index of a segment)."""
        indices = jnp.arange(self.of.segments, dtype=jnp.int32)
        carry = varying_with(carry, self.inputs)
        return jax.lax.scan(body, carry, indices, reverse=reverse)


def call(spec: LinearAttentionSpec, chunk: int, most: int, inputs: Inputs) -> Call:
    of = cut(spec, chunk, most)
    q, k, v = (padded(spec, of, array) for array in inputs[:3])
    found = gates.of_call(spec, inputs, of.C, of.N * of.segments)
    return Call(spec, of, inputs._replace(q=q, k=k, v=v), found)


def each_segment(
    call: Call, body: Callable[[Any, Any], Any], carry: Any, reverse: bool = False
) -> Any:
    """The carry after every segment; without a loop where there is one."""
    if call.of.segments == 1:
        return body(carry, 0)
    return call.scan(lambda c, i: (body(c, i), None), carry, reverse)[0]


def pairs(spec: LinearAttentionSpec, segment: Segment, dtype: Any) -> jax.Array:
    """P [B, G, N, M, C], in float32 where there are gates."""
    operand = segment.v.dtype
    k, q = segment.phi_k.astype(operand), segment.phi_q.astype(operand)
    dtype = dtype if segment.gates is None else jnp.float32
    return gates.gated(segment.gates, rows.product(spec, "bgnmf,bgncf->bgnmc", q, k, dtype))


def den(pairs: jax.Array, reading: list[jax.Array], z: jax.Array) -> jax.Array:
    """[B, G, N, M, 1]."""
    of_chunk = jnp.sum(pairs.astype(jnp.float32), axis=-1, keepdims=True)
    terms = split(reading, z)
    return of_chunk + sum(
        jnp.sum(own * sums[:, :, :, None], axis=-1, keepdims=True) for own, sums in terms
    )


def split(of_ways: list[jax.Array], stacked: jax.Array) -> Any:
    """Pairs the array of each way with its columns of the stacked one, [B, G, N, .., ways * F]."""
    return zip(of_ways, jnp.split(stacked, len(of_ways), axis=-1), strict=True)


def state_sums(
    spec: LinearAttentionSpec, segment: Segment, equation: str = "bgncf,bgncv->bgnfv"
) -> list[jax.Array]:
    operands = [added.astype(segment.v.dtype) for added in segment.added]
    return [rows.product(spec, equation, added, segment.v, jnp.float32) for added in operands]


def key_sums(segment: Segment) -> list[jax.Array]:
    return [jnp.sum(added, axis=3) for added in segment.added]


def _behind(call: Call, way: int, state: LinearState, index: Any) -> LinearState:
    """The state of a way behind a segment's keys."""
    segment = call.keys(index, way)
    if segment.gates is None:
        kv = state_sums(call.spec, segment, "bgncf,bgncv->bgfv")[0]
        return LinearState(state.kv + kv, state.k_sum + jnp.sum(segment.phi_k, axis=(2, 3)))
    keeps, walk = segment.keeps[0], WALKS[way]
    kv = walk(state.kv, state_sums(call.spec, segment)[0], keeps)[1]
    return LinearState(kv, walk(state.k_sum, key_sums(segment)[0], keeps)[1])


def edges(call: Call, way: int, state: LinearState) -> LinearState:
    """The state of a way at the edge of each segment that it comes from: kv [segments, B, G, F, V]
    and k_sum. `state`: at the first of these edges."""
    if call.of.segments == 1:
        return LinearState(state.kv[None], state.k_sum[None])

    def body(state: LinearState, index: Any) -> tuple[LinearState, LinearState]:
        return _behind(call, way, state, index), state

    found: LinearState = call.scan(body, state, reverse=way == 1)[1]
    return found


def from_end(call: Call, state: LinearState) -> list[LinearState]:
    """The states that come from the end at each segment's last row, where there are any."""
    nothing = jax.tree.map(jnp.zeros_like, state)
    return [edges(call, way, nothing) for way in range(1, call.ways)]


def unpadded(spec: LinearAttentionSpec, array: jax.Array) -> jax.Array:
    return jax.lax.slice_in_dim(array, 0, spec.T, axis=spec.layout.index("t"))
