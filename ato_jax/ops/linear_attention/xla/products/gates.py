"""A decay per head or step, and segments, as factors of the pairs and states of `walk.py`.

With g_t the log-decay of step t, and run_t the number of its segment, a chunk of the steps from
`first` to `last` has

    E_ij = exp(sum g[j+1..i])       where run_j = run_i         multiplies the pair (i, j), j <= i
    a_i  = exp(sum g[first..i])     where run_i = run_before    what row i reads of the state before
    b_j  = exp(sum g[j+1..last])    where run_j = run_last      what key j adds to the state behind
    c    = exp(sum g[first..last])  where run_last = run_before what is left of the state

and 0 elsewhere; run_before is that of the step before the chunk. Where every query sees every key
of its run, pairs with j > i have exp(sum g[i+1..j]), and a second state comes from the end:

    a_i  = exp(sum g[i+1..last])    where run_i = run_after
    b_j  = exp(sum g[first..j])     where run_j = run_first
    c    = exp(sum g[first..last])  where run_first = run_after

A chunk's prefix sums are taken in two parts (`in_parts` of `xla/chunk.py`), of which float32 adds
the first exactly, so that no difference of them loses the small decays behind a strong one. No
exponent is positive. What a factor of 0 hides may be beyond float32, so it is replaced by 0, not
multiplied by it (`unless_hidden`).

Let M_ij = E_ij dE_ij be the derivative of the loss by the exponent of E_ij, and A_i, B_j and K
those by the exponents of a_i, b_j and c. The gradient of g_t is the sum over those that it is in:

    F(t) = sum over j < t <= i of M_ij + sum over i >= t of A_i + sum over j < t of B_j + K

and, with a second state, sum over i < t <= j of M_ij + sum over i < t of A_i + sum over j >= t of
B_j + K. The sum of pairs grows from t to t + 1 by the pairs of key t and loses those of row t, so
it is a running sum of column sums less row sums of M, without the diagonal, which no decay is in;
above the diagonal of row sums less column sums. All are sums of the same float32 numbers, and none
is of more than one chunk, so they cancel to float32's own roundings; a running sum over all steps,
of products that were rounded, would not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.xla.chunk import in_parts


class Way(NamedTuple):
    """The factors of a state that comes from one end. The second axis has one entry where segments
    alone make them."""

    reads: Any  # a, [B, G or 1, N, C]
    adds: Any  # b, [B, G or 1, N, C]
    keeps: Any  # c, [B, G or 1, N]


class Gates(NamedTuple):
    """The factors of N chunks."""

    sums: Any  # the two parts of the prefix sums, [2, B, G, N, C]; None: no decay
    runs: Any  # [B, 1, N, C] int32; None: no segments
    ways: tuple[Way, ...]  # of the state before a chunk; without causality of that behind it, too

    def take(self, first: Any, count: int) -> Gates:
        """The chunks from `first` on."""

        def cut(array: Any, axis: int = 2) -> Any:
            return jax.lax.dynamic_slice_in_dim(array, first, count, axis=axis)

        sums = None if self.sums is None else cut(self.sums, 3)
        return Gates(sums, *jax.tree.map(cut, (self.runs, self.ways)))


def _real(spec: LinearAttentionSpec, inputs: Inputs) -> jax.Array | None:
    """[B, T], whether a step has a key; None: all have."""
    if inputs.kv_lengths is None:
        return None
    return jnp.arange(spec.T, dtype=jnp.int32) < inputs.kv_lengths[:, None]


def _steps(spec: LinearAttentionSpec, inputs: Inputs) -> jax.Array:
    """g [B, G, T] in float32: 0 where there is no key, and no stronger than the strongest."""
    decay = inputs.decay
    assert decay is not None
    if spec.decay == "head":
        decay = jnp.broadcast_to(decay[:, None], (spec.B, spec.G, spec.T))
    elif spec.layout == "bthd":
        decay = jnp.swapaxes(decay, 1, 2)
    real = _real(spec, inputs)
    decay = decay if real is None else jnp.where(real[:, None], decay, 0)
    return jnp.maximum(decay.astype(jnp.float32), LEAST_DECAY)


def _runs(spec: LinearAttentionSpec, inputs: Inputs) -> jax.Array:
    """[B, 1, T], never decreasing: padding belongs to the last run, whose state is returned."""
    runs, real = inputs.kv_segments, _real(spec, inputs)
    assert runs is not None
    if real is not None:
        last = jnp.max(jnp.where(real, runs, 0), axis=1, keepdims=True)
        runs = jnp.where(real, runs, last)
    return runs[:, None]


def of_call(spec: LinearAttentionSpec, inputs: Inputs, C: int, chunks: int) -> Gates | None:
    """The factors of a whole call, padded to `chunks` chunks; None where all are 1."""
    if not spec.decay and not spec.segments:
        return None

    def in_chunks(steps: jax.Array, mode: str) -> jax.Array:
        missing = chunks * C - spec.T
        steps = jnp.pad(steps, ((0, 0), (0, 0), (0, missing)), mode=mode)
        return steps.reshape(*steps.shape[:2], chunks, C)

    sums = runs = None
    upto = behind = jnp.ones((1, 1, chunks, C), jnp.float32)
    kept = jnp.ones((1, 1, chunks), jnp.float32)
    if spec.decay:
        steps = in_chunks(_steps(spec, inputs), "constant")
        sums = jnp.cumsum(jnp.stack(in_parts(steps)), axis=-1)
        total = sums[..., -1:]
        upto, behind, kept = map(_exp, (sums, total - sums, total[..., 0]))
    ways = [Way(upto, behind, kept)] + [Way(behind, upto, kept)] * (not spec.causal)
    if spec.segments:
        runs = in_chunks(_runs(spec, inputs), "edge")
        first, last = runs[..., 0], runs[..., -1]  # [B, 1, chunks]
        before = jnp.pad(last[..., :-1], ((0, 0), (0, 0), (1, 0)))  # an initial state is of run 0
        after = jnp.pad(first[..., 1:], ((0, 0), (0, 0), (0, 1)))  # behind the last is nothing
        ends = (before, last), (after, first)
        ways = [_of_runs(way, runs, *runs_at) for way, runs_at in zip(ways, ends, strict=False)]
    return Gates(sums, runs, tuple(ways))


def _of_runs(way: Way, runs: jax.Array, there: jax.Array, here: jax.Array) -> Way:
    """The factors that are of one run, that of the state that a chunk reads (`there`) or that of
    the state that it leaves (`here`), [B, 1, N]."""
    return Way(
        jnp.where(runs == there[..., None], way.reads, 0),
        jnp.where(runs == here[..., None], way.adds, 0),
        jnp.where(here == there, way.keeps, 0),
    )


def _exp(parts: jax.Array) -> jax.Array:
    """exp of a sum's two parts [2, ..], which is at most 1."""
    return jnp.exp(jnp.minimum(parts[0] + parts[1], 0))


def unless_hidden(factors: jax.Array, x: jax.Array) -> jax.Array:
    """x, and 0 where its factor is."""
    return jnp.where(factors == 0, 0, x)


def of_rows(factors: jax.Array, count: int) -> jax.Array:
    """[.., C] for each of a chunk's `count` query rows, those of one head after another's."""
    return jnp.tile(factors, count // factors.shape[-1])


def _below(count: int, C: int) -> jax.Array:
    """Which keys stand before a query row, or are its own: [count, C]."""
    return (jnp.arange(count) % C)[:, None] >= jnp.arange(C)


def gated(gates: Gates | None, pairs: jax.Array) -> jax.Array:
    """E times pairs [B, G, N, M, C], and 0 for the keys that a row does not see."""
    count, C = pairs.shape[-2:]
    below = visible = _below(count, C)
    if gates is None:
        return jnp.where(visible, pairs, 0)
    if len(gates.ways) == 2:
        visible = jnp.ones_like(below)
    if gates.runs is not None:
        visible = visible & (of_rows(gates.runs, count)[..., None] == gates.runs[..., None, :])
    if gates.sums is not None:
        between = of_rows(gates.sums, count)[..., None] - gates.sums[..., None, :]
        pairs = pairs * _exp(jnp.where(below, between, -between))
    return jnp.where(visible, pairs, 0)


class Flow(NamedTuple):
    """Derivatives by the exponents of a way's factors."""

    reads: jax.Array  # A [B, G, N, M], of all heads of a group
    adds: jax.Array  # B [B, G, N, C]
    keeps: jax.Array  # K [B, G, N]


def flows_of_steps(pairs: jax.Array, ways: list[Flow]) -> jax.Array:
    """F [B, G, N, C], of M [B, G, N, M, C]."""
    count, C = pairs.shape[-2:]
    off_diagonal = (jnp.arange(count) % C)[:, None] != jnp.arange(C)
    pairs = jnp.where(off_diagonal, pairs, 0)
    if len(ways) == 2:
        pairs = jnp.where(_below(count, C), pairs, -pairs)

    def over_group(of_rows: jax.Array) -> jax.Array:
        return jnp.sum(of_rows.reshape(*of_rows.shape[:-1], -1, C), axis=-2)

    to_later = jnp.sum(pairs, axis=-2) - over_group(jnp.sum(pairs, axis=-1)) + ways[0].adds
    to_earlier = over_group(ways[0].reads)
    for way in ways[1:]:
        to_later, to_earlier = to_later + over_group(way.reads), to_earlier + way.adds
    # The last one is in no gradient, and where all decays are strong, far above all others.
    shifted = jnp.pad(to_later[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)))
    earlier = jax.lax.cumsum(to_earlier, axis=3, reverse=True)
    kept = sum((way.keeps for way in ways[1:]), start=ways[0].keeps)
    return jnp.cumsum(shifted, axis=-1) + earlier + kept[..., None]


def gradient(spec: LinearAttentionSpec, inputs: Inputs, flows: jax.Array) -> jax.Array:
    """The gradient of the decay as the call has it, from F [B, G, T]."""
    decay, real = inputs.decay, _real(spec, inputs)
    assert decay is not None
    flows = flows if real is None else jnp.where(real[:, None], flows, 0)
    if spec.decay == "head":
        flows = jnp.sum(flows, axis=(0, 2))
    elif spec.layout == "bthd":
        flows = jnp.swapaxes(flows, 1, 2)
    return jnp.where(decay < LEAST_DECAY, 0, flows)
