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

import dataclasses
import functools
from collections.abc import Callable
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
from ato_jax.ops.linear_attention.xla.products import channels, chunks, gates, rows
from ato_jax.ops.linear_attention.xla.products.channels import Blocks
from ato_jax.ops.linear_attention.xla.products.chunks import Call, Cut
from ato_jax.ops.linear_attention.xla.products.gates import unless_hidden

# Chunks whose states are added up one after another; their groups follow one another likewise.
GROUP = 4


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


def _products_of(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    """bfloat16 rows are multiplied in TF32: in bfloat16 the factors of signed features round off
    more than the budgets allow."""
    if spec.dtype != "bfloat16":
        return spec
    return dataclasses.replace(spec, dtype="float32", precision="tf32")


def _call(spec: LinearAttentionSpec, chunk: int, most: int, inputs: Inputs) -> Call:
    C = max(chunks.MULTIPLE, 1 << (min(chunk, spec.T).bit_length() - 1))
    count = -(-spec.T // C)
    of_segment = -(-count // -(-count // most))
    if of_segment > 2 * GROUP:
        of_segment = -(-of_segment // GROUP) * GROUP
    of = Cut(C, of_segment, -(-count // of_segment))
    q, k, v = (chunks.padded(spec, of, array) for array in inputs[:3])
    assert inputs.decay is not None
    decay = chunks.padded(spec, of, inputs.decay)
    runs = gates.of_call(dataclasses.replace(spec, decay=None), inputs, C, of.N * of.segments)
    return Call(spec, of, inputs._replace(q=q, k=k, v=v, decay=decay), runs)


def _ways(spec: LinearAttentionSpec) -> int:
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
    for n in range(_ways(spec)):
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


def _scaled(scale: Any, x: jax.Array) -> jax.Array:
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
        kv.append(_scaled(way.add_scale, each))
        k_sum.append(_scaled(way.add_scale, jnp.sum(way.added, axis=3)))
    return kv, k_sum


class States(NamedTuple):
    """By way the states that each chunk reads, and those behind the segment."""

    kv: list[jax.Array]  # S [B, G, N, F, V]
    k_sum: list[jax.Array]
    behind: list[LinearState]


def _at_chunks(
    first: jax.Array, each: jax.Array, keeps: jax.Array, back: bool
) -> tuple[jax.Array, jax.Array]:
    """The sum that each chunk meets, [B, G, N, F, ..], and that behind all, in their order or
    `back` against it. first [B, G, F, ..], each [B, G, N, F, ..], keeps [B, G, N, F].

    Chunks are summed up in groups, all groups at once, since each step is a launch.
    """
    count = each.shape[2]
    size = GROUP if count % GROUP == 0 else count
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


def _states(call: Call, segment: Segment, edges: list[LinearState]) -> States:
    found: list[list[jax.Array]] = [[], []]
    behind = []
    for way, edge, *each in zip(segment.ways, edges, *_state_sums(call, segment), strict=True):
        walked = [
            _at_chunks(*one, way.keeps, back=way.pairs.way == 1)
            for one in zip(edge, each, strict=True)
        ]
        for sums, (own, _) in zip(found, walked, strict=True):
            sums.append(own)
        behind.append(LinearState(walked[0][1], walked[1][1]))
    return States(found[0], found[1], behind)


def _den(segment: Segment, pairs: jax.Array, k_sums: list[jax.Array]) -> jax.Array:
    """[B, G, N, M, 1], of z times each way's `read_scale`."""
    found = jnp.sum(pairs, axis=-1, keepdims=True)
    for way, z in zip(segment.ways, k_sums, strict=True):
        found += jnp.sum(way.reading * z[:, :, :, None], axis=-1, keepdims=True)
    return found


def _by_form(call: Call, index: Any, run: Callable[[Segment], Any]) -> Any:
    """`run` of a segment, in the first form that takes its decays."""
    steps = _steps(call, index)

    def of_size(size: int) -> Callable[[jax.Array], Any]:
        return lambda steps: run(_segment(call, index, channels.blocks(channels.sums(steps), size)))

    branches = [of_size(size) for size in channels.forms(call.of.C)]
    return jax.lax.switch(channels.form(steps), branches, steps)


def _edges(call: Call, way: int, state: LinearState) -> LinearState:
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


def _from_end(call: Call, state: LinearState) -> list[LinearState]:
    nothing = jax.tree.map(jnp.zeros_like, state)
    return [_edges(call, way, nothing) for way in range(1, _ways(call.spec))]


def forward(spec: LinearAttentionSpec, chunk: int, most: int, inputs: Inputs) -> Outputs:
    spec = _products_of(spec)
    call = _call(spec, chunk, most, inputs)
    initial = rows.initial(spec, call.inputs)
    ends = _from_end(call, initial)

    def body(carry: tuple[LinearState, jax.Array], index: Any) -> Any:
        state, out = carry
        edges = [state, *(jax.tree.map(lambda x: x[index], end) for end in ends)]

        def run(segment: Segment) -> tuple[LinearState, jax.Array]:
            states = _states(call, segment, edges)
            scales = [way.read_scale for way in segment.ways]
            pairs = segment.pairs()
            k_sums = [_scaled(*pair) for pair in zip(scales, states.k_sum, strict=True)]
            w = rows.weights(spec, _den(segment, pairs, k_sums))
            num = rows.product(
                spec, "bgnmc,bgncv->bgnmv", rows.operand(spec, pairs), segment.v, jnp.float32
            )
            for way, kv in zip(segment.ways, states.kv, strict=True):
                reading = way.reading
                for part in rows.parts_of_states(spec, _scaled(way.read_scale, kv)):
                    num += rows.product(spec, "bgnmf,bgnfv->bgnmv", reading, part, jnp.float32)
            num = rows.keep(call.masks(index)[0], num)
            return states.behind[0], (num * w).astype(inputs.v.dtype)

        state, found = _by_form(call, index, run)
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
        [_scaled(*pair) for pair in zip(scales, each, strict=True)]
        for each in (states.kv, states.k_sum)
    )
    pairs = segment.pairs()
    den = _den(segment, pairs, k_sum)
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
    return LinearState(_scaled(way.read_scale, sums), _scaled(way.read_scale, r))


class _Backward(NamedTuple):
    call: Call
    edges: list[LinearState]  # by way, of `_edges`
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
                found = _rows(self.call, segment, _states(self.call, segment, edges), d_out)
                way = segment.ways[1]
                sums = _sums_of_rows(self.call, way, found, d_out)
                walked = [
                    _at_chunks(*one, way.keeps, back=False)[1]
                    for one in zip(later, sums, strict=True)
                ]
                return LinearState(walked[0], walked[1])

            return _by_form(self.call, index, run), later

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
    states = _states(call, segment, edges)
    found = _rows(call, segment, states, d_out)
    d_q, d_k, crossing, behind = _of_pairs(call, segment, found.d_pairs)
    walked = [
        [
            _at_chunks(*one, way.keeps, back=way.pairs.way == 0)
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
        flow = rows.operand(spec, _scaled(way.add_scale, after))
        r = _scaled(way.add_scale, r_after)
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
    spec = _products_of(spec)
    call = _call(spec, chunk, most, inputs)
    initial = rows.initial(spec, call.inputs)
    edges = [_edges(call, 0, initial), *_from_end(call, initial)]
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

        later, gradients = _by_form(call, index, run)
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
