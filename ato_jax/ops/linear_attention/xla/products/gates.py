"""A decay per head or step, and segments, as factors of the pairs and states of `causal.py`.

With g_t the log-decay of step t, and run_t the number of its segment, a chunk of the steps from
`first` to `last` has

    E_ij = exp(sum g[j+1..i])       where run_j = run_i         multiplies the pair (i, j), j <= i
    a_i  = exp(sum g[first..i])     where run_i = run_before    what row i reads of the state before
    b_j  = exp(sum g[j+1..last])    where run_j = run_last      what key j adds to the state behind
    c    = exp(sum g[first..last])  where run_last = run_before what is left of the state

and 0 elsewhere; run_before is that of the step before the chunk. A chunk's prefix sums are taken in
two parts (`chunk.in_parts`), of which float32 adds the first exactly, so that no difference of them
loses the small decays behind a strong one. No exponent is positive.

Let M_ij = E_ij dE_ij be the derivative of the loss by the exponent of E_ij, and A_i, B_j and K
those by the exponents of a_i, b_j and c. The gradient of g_t is the sum over those that it is in:

    F(t) = sum over j < t <= i of M_ij + sum over i >= t of A_i + sum over j < t of B_j + K

The sum of pairs grows from t to t + 1 by the pairs of key t and loses those of row t, so it is a
running sum of column sums less row sums of M, without the diagonal, which no decay is in. All are
sums of the same float32 numbers, and none is of more than one chunk, so they cancel to float32's
own roundings; a running sum over all steps, of products that were rounded, would not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.xla.chunk import in_parts


class Gates(NamedTuple):
    """The factors of N chunks. The second axis has one entry where segments alone make them."""

    sums: Any  # the two parts of the prefix sums, [2, B, G, N, C]; None: no decay
    runs: Any  # [B, 1, N, C] int32; None: no segments
    reads: Any  # a, [B, G or 1, N, C]
    adds: Any  # b, [B, G or 1, N, C]
    keeps: Any  # c, [B, G or 1, N]

    def take(self, first: Any, count: int) -> Gates:
        """The chunks from `first` on."""

        def cut(array: Any, axis: int = 2) -> Any:
            if array is None:
                return None
            return jax.lax.dynamic_slice_in_dim(array, first, count, axis=axis)

        sums, *others = self
        return Gates(cut(sums, 3), *map(cut, others))


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
    reads = adds = jnp.ones((1, 1, chunks, C), jnp.float32)
    keeps = jnp.ones((1, 1, chunks), jnp.float32)
    if spec.decay:
        steps = in_chunks(_steps(spec, inputs), "constant")
        sums = jnp.cumsum(jnp.stack(in_parts(steps)), axis=-1)
        total = sums[..., -1:]
        reads, adds, keeps = map(_exp, (sums, total - sums, total[..., 0]))
    if spec.segments:
        runs = in_chunks(_runs(spec, inputs), "edge")
        last = runs[..., -1]  # [B, 1, chunks]
        before = jnp.pad(last[..., :-1], ((0, 0), (0, 0), (1, 0)))  # an initial state is of run 0
        reads = jnp.where(runs == before[..., None], reads, 0)
        adds = jnp.where(runs == last[..., None], adds, 0)
        keeps = jnp.where(last == before, keeps, 0)
    return Gates(sums, runs, reads, adds, keeps)


def _exp(parts: jax.Array) -> jax.Array:
    """exp of a sum's two parts [2, ..], which is at most 1."""
    return jnp.exp(jnp.minimum(parts[0] + parts[1], 0))


def of_rows(factors: jax.Array, count: int) -> jax.Array:
    """[.., C] for each of a chunk's `count` query rows, those of one head after another's."""
    return jnp.tile(factors, count // factors.shape[-1])


def gated(gates: Gates | None, pairs: jax.Array) -> jax.Array:
    """E times pairs [B, G, N, M, C], and 0 for the keys that a row does not see."""
    count, C = pairs.shape[-2:]
    visible = (jnp.arange(count) % C)[:, None] >= jnp.arange(C)
    if gates is not None and gates.runs is not None:
        visible = visible & (of_rows(gates.runs, count)[..., None] == gates.runs[..., None, :])
    if gates is not None and gates.sums is not None:
        pairs = pairs * _exp(of_rows(gates.sums, count)[..., None] - gates.sums[..., None, :])
    return jnp.where(visible, pairs, 0)


class Flows(NamedTuple):
    """Derivatives by the exponents of a chunk's factors."""

    pairs: jax.Array  # M [B, G, N, M, C]
    reads: jax.Array  # A [B, G, N, M], of all heads of a group
    adds: jax.Array  # B [B, G, N, C]
    keeps: jax.Array  # K [B, G, N]


def flows_of_steps(flows: Flows) -> jax.Array:
    """F [B, G, N, C]."""
    count, C = flows.pairs.shape[-2:]
    off_diagonal = (jnp.arange(count) % C)[:, None] != jnp.arange(C)
    pairs = jnp.where(off_diagonal, flows.pairs, 0)

    def over_group(of_rows: jax.Array) -> jax.Array:
        return jnp.sum(of_rows.reshape(*of_rows.shape[:-1], -1, C), axis=-2)

    passing = jnp.sum(pairs, axis=-2) - over_group(jnp.sum(pairs, axis=-1))
    # The last B is in no gradient, and where all decays are strong, far above all others.
    shifted = jnp.pad((passing + flows.adds)[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)))
    before = jnp.cumsum(shifted, axis=-1)
    reads = jax.lax.cumsum(over_group(flows.reads), axis=3, reverse=True)
    return before + reads + flows.keeps[..., None]


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
