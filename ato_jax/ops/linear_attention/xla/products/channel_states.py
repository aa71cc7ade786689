"""The rows of a call with a decay per step and channel in chunks, and the states that chunks meet,
for `channel_walk.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
)
from ato_jax.ops.linear_attention.xla.products import channels, chunks, gates, rows
from ato_jax.ops.linear_attention.xla.products.channels import Blocks
from ato_jax.ops.linear_attention.xla.products.chunks import Call, Cut

# Their features stay far below what the factors of `channels.py` leave of float32's range.
SLOW_MAPS = frozenset(("elu1", "relu", "softplus", "silu", "identity"))


class Way(NamedTuple):
    """A state's factors and operands; `read_scale` and `add_scale` multiply the states."""

    pairs: channels.Pairs
    reads: Any  # [B, G, N, C, F]; None: 1
    adds: Any
    keeps: jax.Array  # [B, G, N, F]
    reading: jax.Array  # a phi(q) / read_scale, rounded once, [B, G, N, M, F]
    added: jax.Array  # b phi(k) / add_scale, rounded once, [B, G, N, C, F]
    read_scale: Any  # [B, G, N, F]; None: 1
    add_scale: Any


class Segment(NamedTuple):
    phi_q: jax.Array  # [B, G, N, R, C, F] float32
    phi_k: jax.Array  # [B, G, N, 1, C, F] float32
    v: jax.Array  # [B, G, N, C, V]
    same_run: Any  # [B, 1, N, 1, C, C]; None: everywhere
    ways: list[Way]

    def pairs(self) -> jax.Array:
        """P [B, G, N, M, C]."""
        found = sum((way.pairs.weights() for way in self.ways[1:]), self.ways[0].pairs.weights())
        if self.same_run is not None:
            found = jnp.where(self.same_run, found, 0)
        return found.reshape(*found.shape[:3], -1, found.shape[-1])


def products_of(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    """bfloat16 rows are multiplied in TF32: in bfloat16 the factors of signed features round off
    more than the budgets allow."""
    if spec.dtype != "bfloat16":
        return spec
    return dataclasses.replace(spec, dtype="float32", precision="tf32")


def _chunks_of_segment(count: int, most: int) -> int:
    """All, or what leaves the least padding: arrays that are padded are written anew."""
    if count <= most:
        return count
    return min(range(most, most // 2, -1), key=lambda chunks: -count % chunks)


def call_of(spec: LinearAttentionSpec, chunk: int, most: int, inputs: Inputs) -> Call:
    C = max(chunks.MULTIPLE, 1 << (min(chunk, spec.T).bit_length() - 1))
    count = -(-spec.T // C)
    of_segment = _chunks_of_segment(count, most)
    of = Cut(C, of_segment, -(-count // of_segment))
    q, k, v = (chunks.padded(spec, of, array) for array in inputs[:3])
    assert inputs.decay is not None
    decay = chunks.padded(spec, of, inputs.decay)
    runs = gates.of_call(dataclasses.replace(spec, decay=None), inputs, C, of.N * of.segments)
    return Call(spec, of, inputs._replace(q=q, k=k, v=v, decay=decay), runs)


def ways_of(spec: LinearAttentionSpec) -> int:
    return 1 if spec.causal else 2


def _steps(call: Call, index: Any) -> jax.Array:
    """The decays of a segment, [B, G, N, C, F]: 0 where there is no key, and no stronger than the
    strongest."""
    assert call.inputs.decay is not None
    decay = rows.keep(call.masks(index)[1], call.take(call.inputs.decay, index))
    return jnp.maximum(decay.astype(jnp.float32), LEAST_DECAY)


def _keys(call: Call, index: Any) -> tuple[jax.Array, jax.Array]:
    """phi(k) [B, G, N, C, F] in float32 and v as an operand."""
    spec, mask = call.spec, call.masks(index)[1]
    v = rows.keep(mask, call.take(call.inputs.v, index)).astype(jnp.float32)
    v = rows.operand(spec, v)
    return rows.features(spec, call.take(call.inputs.k, index), mask), v


def _runs(call: Call, index: Any) -> gates.Gates | None:
    return None if call.gates is None else call.gates.take(index * call.of.N, call.of.N)


def _segment(call: Call, index: Any, of: Blocks) -> Segment:
    spec, C = call.spec, call.of.C
    phi_q = rows.features(spec, call.take(call.inputs.q, index), call.masks(index)[0])
    phi_q = phi_q.reshape(*phi_q.shape[:3], -1, C, spec.F)
    phi_k, v = _keys(call, index)
    runs, same_run = _runs(call, index), None
    if runs is not None:
        same_run = runs.runs[:, :, :, None, :, None] == runs.runs[:, :, :, None, None]
    ways = []
    for n in range(ways_of(spec)):
        pairs = channels.pairs(spec, of, phi_q, phi_k[:, :, :, None], n)
        ways.append(_way(spec, pairs, None if runs is None else runs.ways[n]))
    return Segment(phi_q, phi_k[:, :, :, None], v, same_run, ways)


def _way(spec: LinearAttentionSpec, pairs: channels.Pairs, seen: gates.Way | None) -> Way:
    """`seen`: the factors of runs, which are 0 and 1."""
    of = pairs.blocks
    ends = of.to_start(), of.to_end()
    (read_block, reads), (add_block, adds) = ends if pairs.way == 0 else ends[::-1]
    C = of.sums.coarse.shape[-2]
    keeps = of.sums.rows(C - 1, 1).exp()[..., 0, :]
    read_scale = add_scale = None
    if of.size == C:
        read_scale, add_scale = read_block[..., 0, :], add_block[..., 0, :]
        reading, added = pairs.q, pairs.k
        if seen is not None:
            reads = jnp.where(seen.reads[..., None] == 0, 0, reads)
            adds = jnp.where(seen.adds[..., None] == 0, 0, adds)
            reading = jnp.where(seen.reads[:, :, :, None, :, None] == 0, 0, reading)
            added = jnp.where(seen.adds[:, :, :, None, :, None] == 0, 0, added)
    else:
        reads, adds = of.of_rows(read_block, reads), of.of_rows(add_block, adds)
        if seen is not None:
            reads = jnp.where(seen.reads[..., None] == 0, 0, reads)
            adds = jnp.where(seen.adds[..., None] == 0, 0, adds)
        reading = rows.rounded(spec, pairs.phi_q * reads[:, :, :, None])
        added = rows.rounded(spec, pairs.phi_k * adds[:, :, :, None])
    if seen is not None:
        keeps = jnp.where(seen.keeps[..., None] == 0, 0, keeps)
    reading = reading.reshape(*reading.shape[:3], -1, spec.F)
    return Way(pairs, reads, adds, keeps, reading, added[:, :, :, 0], read_scale, add_scale)


def scaled(scale: Any, x: jax.Array) -> jax.Array:
    """x [B, G, N, F, ..] times the scale of each channel."""
    if scale is None:
        return x
    return x * scale.reshape(*scale.shape, *(1 for _ in x.shape[scale.ndim :]))


def _state_sums(call: Call, segment: Segment) -> tuple[list[jax.Array], list[jax.Array]]:
    """By way what each chunk adds to S, [B, G, N, F, V], and to z."""
    kv, k_sum = [], []
    for way in segment.ways:
        added = way.added
        each = rows.product(call.spec, "bgncf,bgncv->bgnfv", added, segment.v, jnp.float32)
        kv.append(scaled(way.add_scale, each))
        k_sum.append(scaled(way.add_scale, jnp.sum(way.added, axis=3)))
    return kv, k_sum


class States(NamedTuple):
    """By way the states that each chunk reads, and those behind the segment."""

    kv: list[jax.Array]  # S [B, G, N, F, V]
    k_sum: list[jax.Array]
    behind: list[LinearState]


def at_chunks(
    first: jax.Array, each: jax.Array, keeps: jax.Array, back: bool
) -> tuple[jax.Array, jax.Array]:
    """The sum that each chunk meets, [B, G, N, F, ..], and that behind all, in their order or
    `back` against it. first [B, G, F, ..], each [B, G, N, F, ..], keeps [B, G, N, F].

    Chunks are summed up in groups, all groups at once, since each step is a launch.
    """
    count = each.shape[2]
    divisors = (size for size in range(2, count) if count % size == 0 and size * size <= count)
    size = max(divisors, default=count)
    each = each.reshape(*each.shape[:2], -1, size, *each.shape[3:])
    keeps = keeps.reshape(*each.shape[:5], *(1 for _ in each.shape[5:]))
    order = slice(None, None, -1 if back else 1)
    own, kept = [jnp.zeros_like(each[:, :, :, 0])], [jnp.ones_like(keeps[:, :, :, 0])]
    for n in range(size)[order]:
        own.append(own[-1] * keeps[:, :, :, n] + each[:, :, :, n])
        kept.append(kept[-1] * keeps[:, :, :, n])
    edges = [first]
    for group in range(count // size)[order]:
        edges.append(edges[-1] * kept[-1][:, :, group] + own[-1][:, :, group])
    of_groups = jnp.stack(edges[:-1][order], axis=2)[:, :, :, None]
    own_sums, kept_sums = (jnp.stack(found[:-1][order], axis=3) for found in (own, kept))
    found = of_groups * kept_sums + own_sums
    return found.reshape(*found.shape[:2], count, *found.shape[4:]), edges[-1]


def states_of(call: Call, segment: Segment, edges: list[LinearState]) -> States:
    found: list[list[jax.Array]] = [[], []]
    behind = []
    for way, edge, *each in zip(segment.ways, edges, *_state_sums(call, segment), strict=True):
        walked = [
            at_chunks(*one, way.keeps, back=way.pairs.way == 1)
            for one in zip(edge, each, strict=True)
        ]
        for sums, (own, _) in zip(found, walked, strict=True):
            sums.append(own)
        behind.append(LinearState(walked[0][1], walked[1][1]))
    return States(found[0], found[1], behind)


def den_of(segment: Segment, pairs: jax.Array, k_sums: list[jax.Array]) -> jax.Array:
    """[B, G, N, M, 1], of z times each way's `read_scale`."""
    found = jnp.sum(pairs, axis=-1, keepdims=True)
    for way, z in zip(segment.ways, k_sums, strict=True):
        found += jnp.sum(way.reading * z[:, :, :, None], axis=-1, keepdims=True)
    return found


def _largest(call: Call, index: Any) -> Any:
    """No feature of a segment is larger. Maps that grow no faster than x need no pass over q and k
    for it."""
    spec, inputs = call.spec, call.inputs
    if spec.feature_map.name in SLOW_MAPS:
        return 1.0
    of_rows = [
        rows.features(spec, call.take(x, index), mask)
        for x, mask in zip((inputs.q, inputs.k), call.masks(index), strict=True)
    ]
    return jnp.maximum(*(jnp.max(jnp.abs(x)) for x in of_rows))


def by_form(call: Call, index: Any, run: Callable[[Segment], Any]) -> Any:
    """`run` of a segment, in the first form that takes its decays."""
    steps = _steps(call, index)

    def of_size(size: int) -> Callable[[jax.Array], Any]:
        exact = rows.is_exact(call.spec) or size < call.of.C
        return lambda steps: run(
            _segment(call, index, channels.blocks(channels.sums(steps, exact), size))
        )

    branches = [of_size(size) for size in channels.forms(call.of.C)]
    return jax.lax.switch(channels.form(steps, _largest(call, index)), branches, steps)


def edges_of(call: Call, way: int, state: LinearState) -> LinearState:
    """`chunks.edges`, for a decay per channel."""
    if call.of.segments == 1:
        return LinearState(state.kv[None], state.k_sum[None])
    spec = call.spec

    def body(state: LinearState, index: Any) -> tuple[LinearState, LinearState]:
        phi_k, v = _keys(call, index)
        of, runs = channels.sums(_steps(call, index)), _runs(call, index)
        last = of.rows(call.of.C - 1, 1)  # [B, G, N, 1, F]
        of_chunks = last.map(lambda x: x[..., 0, :])
        # From a row to the edge of its chunk, and from there to that of the segment.
        if way == 0:
            rest = of_chunks.map(lambda x: channels.before_row(x[:, :, ::-1])[:, :, ::-1])
            adds = (last - of).exp()
        else:
            rest, adds = of_chunks.map(channels.before_row), of.exp()
        adds = adds * rest.exp()[..., None, :]
        keeps = of_chunks.map(lambda x: jnp.sum(x, axis=2)).exp()  # [B, G, F]
        if runs is not None:
            own = runs.runs[:, :, -1:, -1:] if way == 0 else runs.runs[:, :, :1, :1]
            adds = jnp.where((runs.runs == own)[..., None], adds, 0)
            keeps = jnp.where(jnp.all(runs.ways[way].keeps != 0, axis=2)[..., None], keeps, 0)
        added = rows.rounded(spec, phi_k * adds)
        kv = rows.product(spec, "bgncf,bgncv->bgfv", added.astype(v.dtype), v, jnp.float32)
        kv += keeps[..., None] * state.kv
        return LinearState(kv, keeps * state.k_sum + jnp.sum(added, axis=(2, 3))), state

    found: LinearState = call.scan(body, state, reverse=way == 1)[1]
    return found


def from_end(call: Call, state: LinearState) -> list[LinearState]:
    nothing = jax.tree.map(jnp.zeros_like, state)
    return [edges_of(call, way, nothing) for way in range(1, ways_of(call.spec))]
