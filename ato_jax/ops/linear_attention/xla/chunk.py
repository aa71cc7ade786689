"""One chunk of C steps: the contribution of its keys to a state, and the reads of its queries.

    w[i,j]  = (phi(q_i) . phi(k_j)) * exp(sum decay[j+1..i])            j <= i, both in the chunk
    num_i   = sum_j w[i,j] v_j + exp(sum decay[first..i]) phi(q_i) . kv
    den_i   = sum_j w[i,j]     + exp(sum decay[first..i]) phi(q_i) . k_sum
    kv'     = exp(sum decay[first..last]) kv + sum_j exp(sum decay[j+1..last]) phi(k_j) v_j^T
    k_sum'  = exp(sum decay[first..last]) k_sum + sum_j exp(sum decay[j+1..last]) phi(k_j)

(kv, k_sum) is the carry, the sum over all keys to the left. It belongs to one run of equal segment
ids, and starts from 0 at the next run. Without causality, w also has pairs j > i, with
exp(sum decay[i+1..j]), and a second carry comes from the right:

    num_i  += exp(sum decay[i+1..last]) phi(q_i) . kv
    kv'     = exp(sum decay[first..last]) kv + sum_j exp(sum decay[first..j]) phi(k_j) v_j^T

That is the first formula with the decays up to a step and those after it exchanged, so both share
their code, given an `Edge`. No exponent is positive but that of a rest (`in_parts`), which is at
most 1, and none is a difference of sums that cancel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax import autodiff
from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.xla.timeline import Timeline, zero_unless

MOST_STEPS = 512  # the largest chunk
# So few queries or keys over all heads are multiplied exactly whatever their dtype: float32's
# products on a GPU are TF32's by default, whose roundings do not average out over one or two rows.
EXACT_ROWS = 16
# float32 adds multiples of this exactly up to 2^24 times it, 65,536, which is `MOST_STEPS` times
# the strongest decay.
GRID = 2.0**-8


class Carry(NamedTuple):
    """The sums over the keys on one side of an edge between chunks."""

    kv: jax.Array  # [B, G, F, V]
    k_sum: jax.Array  # [B, G, F]
    run: Any  # [B], the run that it belongs to


class Edge(NamedTuple):
    """One edge of a chunk: exp of the decays between it and each step, and the run at the edge."""

    factor: Any  # [B, G, C, 1 or F]
    run: Any  # [B]


class Chunk(NamedTuple):
    """C steps, mapped to features, with 0 in place of padding; None as in `Timeline`."""

    q: Any  # [B, G, R, C, F]
    k: Any  # [B, G, C, F]
    v: Any  # [B, G, C, V]
    decay: Any  # [B, G, C, 1 or F]
    halves: list[jax.Array]  # of [B, G, C, F], the decays between each step and its `middles`
    run: Any  # [B, C]
    real: Any  # [B, C], whether there is a key; None: everywhere
    left: Edge
    right: Edge
    einsum: Callable[..., jax.Array]


def open_chunk(spec: LinearAttentionSpec, parameters: Any, steps: Timeline) -> Chunk:
    """A chunk of the timeline; it lacks the arrays that the timeline lacks."""
    given = (steps.k if steps.q is None else steps.q).dtype
    dtype = jnp.promote_types(given, jnp.float32)
    few = spec.B * spec.H * min(spec.T, spec.S) <= EXACT_ROWS
    exact = few or (dtype == given and spec.precision == "exact")
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT

    def phi(x: jax.Array) -> jax.Array:
        return spec.feature_map(x.astype(dtype), *parameters)

    q = k = v = decay = before = after = first = last = None
    halves: list[jax.Array] = []
    if steps.q is not None:
        q = phi(zero_unless(steps.asked, steps.q))
        if steps.q_decay is not None:
            q = q * jnp.exp(steps.q_decay.astype(dtype))[:, :, None]
    if steps.k is not None:
        # Masked before phi, so that NaN in padding reaches nothing, and after, as phi(0) may not be
        # 0.
        k = zero_unless(steps.real, phi(zero_unless(steps.real, steps.k)))
        v = zero_unless(steps.real, steps.v).astype(dtype)
    if steps.decay is not None:
        decay = jnp.maximum(zero_unless(steps.real, steps.decay.astype(dtype)), LEAST_DECAY)
        coarse, rest = (sums_to_edges(part, [0, decay.shape[2]]) for part in in_parts(decay))
        before, after = jnp.exp(coarse) * jnp.exp(rest)
        if q is not None and decay.shape[-1] > 1 and decay.shape[2] > 1:
            halves = list(sums_to_edges(decay, middles(decay.shape[2])))
    if steps.run is not None:
        first, last = steps.run[:, 0], steps.run[:, -1]
    einsum = functools.partial(jnp.einsum, precision=precision)
    return Chunk(
        q,
        k,
        v,
        decay,
        halves,
        steps.run,
        steps.real,
        Edge(before, first),
        Edge(after, last),
        einsum,
    )


def absorb(chunk: Chunk, carry: Carry, edge: Edge) -> Carry:
    """The carry at `edge`: that at the other edge, decayed, plus the sums over the chunk's keys."""
    k, kv, k_sum = chunk.k, carry.kv, carry.k_sum
    if chunk.decay is not None:
        k = k * edge.factor
        coarse, rest = (jnp.sum(part, axis=2) for part in in_parts(chunk.decay))
        total = jnp.exp(coarse) * jnp.exp(rest)  # [B, G, 1 or F]
        kv, k_sum = total[..., None] * kv, total * k_sum
    if chunk.run is not None:
        k = zero_unless(chunk.run == edge.run[:, None], k)
        stays = (carry.run == edge.run)[:, None, None]
        kv, k_sum = jnp.where(stays[..., None], kv, 0), jnp.where(stays, k_sum, 0)
    return Carry(
        kv + chunk.einsum("bgjf,bgjv->bgfv", k, chunk.v), k_sum + jnp.sum(k, axis=2), edge.run
    )


def read(chunk: Chunk, carry: Carry, edge: Edge) -> tuple[jax.Array, jax.Array]:
    """num [B, G, R, C, V] and den [B, G, R, C] of the queries with the carry at `edge`."""
    q = chunk.q
    if edge.factor is not None:
        q = q * edge.factor[:, :, None]
    if chunk.run is not None:
        q = zero_unless(chunk.run == carry.run[:, None], q)
    return (
        chunk.einsum("bgrif,bgfv->bgriv", q, carry.kv),
        chunk.einsum("bgrif,bgf->bgri", q, carry.k_sum),
    )


def weights(chunk: Chunk, both_ways: bool) -> jax.Array:
    """w [B, G, R, C, C] of the chunk's own queries and keys."""
    i, j = pair_indices(chunk.k.shape[2])
    if chunk.decay is None or chunk.decay.shape[-1] == 1:
        w = chunk.einsum("bgrif,bgjf->bgrij", chunk.q, chunk.k)
        if chunk.decay is not None:
            w *= jnp.exp(pair_decay(chunk.decay, chunk.real))[:, :, None]
    else:
        # The diagonal has no decay. Every other pair has one level at which a middle separates it.
        w = jnp.sum(chunk.q * chunk.k[:, :, None], axis=-1, keepdims=True)  # [B, G, R, C, 1]
        for level, exponent in enumerate(chunk.halves):
            factor = jnp.exp(exponent)  # [B, G, C, F]
            parted = chunk.einsum(
                "bgrif,bgjf->bgrij", chunk.q * factor[:, :, None], chunk.k * factor
            )
            w = jnp.where((i ^ j) >> level == 1, parted, w)
        w = jnp.broadcast_to(w, (*w.shape[:-1], w.shape[-2]))  # one step has no levels
    if chunk.run is not None:
        same_run = chunk.run[:, :, None] == chunk.run[:, None]  # [B, C, C]
        w = jnp.where(same_run[:, None, None], w, 0)
    return w if both_ways else jnp.where(j <= i, w, 0)


def output(spec: LinearAttentionSpec, num: jax.Array, den: jax.Array) -> jax.Array:
    """num [..., C, V], den [..., C] -> out [..., C, V]."""
    if not spec.normalize:
        return spec.scale * num
    # jnp.maximum would pass on half of the gradient where both are equal.
    return autodiff.quotient(num, jnp.where(den > spec.eps, den, spec.eps)[..., None])


def pair_indices(size: int) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(size, dtype=jnp.int32)[:, None], jnp.arange(size, dtype=jnp.int32)[None, :]


def in_parts(decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Multiples of the grid, which float32 adds exactly, and rests of at most half the grid.

    A state that is read from far is multiplied by exp of a large sum, which carries the rounding of
    that sum as a relative error: 2^-24 of an exponent of 50 is 3e-6. The sum of the rests is small,
    so exp of each part has float32's own accuracy.
    """
    coarse = jax.lax.stop_gradient(jnp.round(decay / GRID) * GRID)
    return coarse, decay - coarse


def pair_decay(decay: jax.Array, real: jax.Array | None) -> jax.Array:
    """[B, G, C, 1] -> [B, G, C, C]: the sums of the decays between two steps, either way.

    A difference of prefix sums would lose the small decays that follow a large one, so both parts
    of the decays have one of their own.
    """
    coarse, rest = in_parts(decay)
    i, j = pair_indices(decay.shape[2])

    def difference(part: jax.Array) -> jax.Array:
        running = sums_to_edges(part, [0])[0]  # [B, G, C, 1]
        return running - jnp.swapaxes(running, 2, 3)

    # Where no key's step lies between, as on the diagonal, the sign is 0. That keeps weights which
    # carry no decay, and may be far larger than the others, out of the decay's gradient, where
    # they would cancel in float32.
    sign = jnp.sign(i - j)
    if real is not None:
        keys = jnp.cumsum(real, axis=1, dtype=jnp.int32)  # [B, C]
        sign = jnp.sign(keys[:, :, None] - keys[:, None])[:, None]  # [B, 1, C, C]
    return (difference(coarse) + difference(rest)) * sign.astype(coarse.dtype)


def middles(size: int) -> list[np.ndarray]:
    """For each level, the middle of each step's block of 2, 4, 8, ... steps.

    Two steps are in one block, on either side of its middle, at the level of the highest bit in
    which their numbers differ. The decays between them are then those from the one to the middle
    plus those from the middle to the other, both of one sign, so both factors are at most 1.
    """
    step = np.arange(size)
    halves = [1 << level for level in range(size.bit_length() - 1)]
    return [step // (2 * half) * (2 * half) + half for half in halves]


def sums_to_edges(decay: jax.Array, edges: list[Any]) -> jax.Array:
    """[B, G, C, X] -> [edges, B, G, C, X]: the sums of the decays between each step and an edge.

    Edge e is before step e; it is a number, or one for each step. A step is behind its own decay,
    so its sum to an earlier edge includes that. The sums are products with zeros and ones, so
    nothing cancels.
    """
    step = np.arange(decay.shape[2])
    edge = np.stack([np.broadcast_to(edge, step.shape) for edge in edges])[..., None]
    behind = step[:, None] + 1
    between = (np.minimum(edge, behind) <= step) & (step < np.maximum(edge, behind))
    return jnp.einsum(
        "eit,bgtx->ebgix", between.astype(decay.dtype), decay, precision=jax.lax.Precision.HIGHEST
    )
