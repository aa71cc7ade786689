"""One chunk of C steps: R value heads that share a query and key head.

With c[s..t] the sum of the decays of steps s to t, S the state before the chunk, and u_t what step
t writes,

    S_t = exp(c[0..t]) S + sum_{s<=t} exp(c[s+1..t]) k_s u_s^T
    u_t = beta_t (v_t - k_t exp(decay_t) S_{t-1})

u on both sides of the second is a triangular system, whose inverse X needs no state:

    A[t,s] = k_t exp(c[s+1..t]) k_s                      s < t, else 0
    P[t,s] = q_t exp(c[s+1..t]) k_s                      s <= t, else 0
    X      = (I + diag(beta) A)^-1 diag(beta)
    u      = X (v - (k exp(c[0..])) S)
    out    = scale * ((q exp(c[0..])) S + P u)
    S'     = exp(c[0..C-1]) S + (k exp(c[t+1..C-1]))^T u

This is the WY form; X meets v - k S at once, where the usual W = X k and U = X v take one product
more. At the start of a segment, pairs and states are cut off by a mask. No exponent is positive,
and none is a difference of sums that cancel.

On CPUs, XLA (in JAX 0.10.2 and 0.12) may crash in a product of arrays of 8 axes, and `vmap` adds
to those here. So axes are few: pairs of blocks, and of q and k, share one with something else.

A decay per step is a factor of rows, so the R heads share q and k. A decay per channel belongs to
the features, so there q and k are repeated, and R is 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax.ops.delta_rule.spec import LEAST_DECAY, DeltaRuleSpec, unit

EXACT = jax.lax.Precision.HIGHEST
# Beside a launch the products of calls of so few steps, over all heads, take no time.
FEW_STEPS = 64
# Triangles of so many rows are solved row by row.
SOLVED_BLOCK = 8
# Pairs of so many steps are decayed one by one.
PAIR_BLOCK = 2


class Steps(NamedTuple):
    """C steps of one query and key head, padding included; absent arrays are None."""

    q: Any  # [C, D]
    k: Any  # [C, D]
    v: Any  # [R, C, V]
    beta: Any  # [R, C]
    decay: Any  # [R, C] | [R, C, D]
    real: Any  # [C], False in padding
    run: Any  # [1 + C], the segment of the step before the chunk and of each of its own


class Chunk(NamedTuple):
    """The parts of a chunk that do not depend on the state, as the scan over chunks reads them.

    The factors are None where they would be 1.
    """

    q: Any  # [C, D], scaled, and decayed from the left edge if per channel
    k: Any  # [C, D], decayed from the left edge if per channel
    k_right: Any  # [C, D], decayed to the right edge if per channel
    v: Any  # [R, C, V]
    solved: Any  # X, [R, C, C]
    pairs: Any  # P, [R or 1, C, C]
    left: Any  # [R or 1, C], of the rows that S gives
    right: Any  # [R or 1, C], of the rows that are added to S'
    kept: Any  # [R or 1, 1 or D], of S in S'


class Walked(NamedTuple):
    state: Any  # S, [R, D, V]
    written: Any  # u, [R, C, V]


exact = functools.partial(jnp.einsum, precision=EXACT)


@jax.custom_jvp
def unit_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of a strictly lower triangular [count, order, order],
    whose order is a power of two.

    By blocks, which are joined two by two. A block of a few rows is solved by substitution: a
    series of powers of it has terms that cancel.
    """
    heads, whole, _ = lower.shape
    size = min(SOLVED_BLOCK, whole)

    def diagonal(size: int) -> jax.Array:
        """[R * blocks, size, size]."""
        count = whole // size
        blocks = lower.reshape(heads, count, size, count, size)
        own = np.arange(count)
        return jnp.moveaxis(blocks[:, own, :, own], 0, 1).reshape(-1, size, size)

    block = diagonal(size)
    identity = jnp.eye(size, dtype=lower.dtype)
    rows = [jnp.broadcast_to(identity[0], (len(block), size))]
    for t in range(1, size):
        known = (block[:, t, s, None] * row for s, row in enumerate(rows))
        rows.append(identity[t : t + 1] - sum(known))
    inverse = jnp.stack(rows, axis=1)
    while size < whole:
        first, last = inverse[::2], inverse[1::2]
        between = diagonal(2 * size)[:, size:, :size]
        between = jnp.matmul(jnp.matmul(last, between, precision=EXACT), first, precision=EXACT)
        inverse = _from_quarters(first, -between, last)
        size *= 2
    return inverse


@unit_inverse.defjvp
def _unit_inverse_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    inverse = unit_inverse(*primals)
    right = jnp.matmul(tangents[0], inverse, precision=EXACT)
    return inverse, -jnp.matmul(inverse, right, precision=EXACT)


def _from_quarters(first: jax.Array, between: jax.Array, last: jax.Array) -> jax.Array:
    """[[first, 0], [between, last]]."""
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([between, last], axis=-1)], axis=-2)


def einsum_of(spec: DeltaRuleSpec) -> Callable[..., jax.Array]:
    """The einsum for products of k with states and with what is written, and for pairs of keys.

    They are exact but with `precision="tf32"`, where XLA on a GPU rounds the factors to TF32: with
    betas near 2 and keys that are alike each step undoes the one before, and so what a product
    loses of a step comes back in all later ones. Calls of few steps are always exact: where
    q_t . k_s of the one or two that there are nearly cancels, or do_t . v_s does, that rounding is
    up to 1e-2 of what is left.

    Products with X and P are exact in every call: where keys are alike, the terms of such a sum
    change sign and nearly cancel, in the gradients, too.
    """
    return _einsum(rounded=_has_many_steps(spec) and spec.precision == "tf32")


def einsum_of_queries(spec: DeltaRuleSpec) -> Callable[..., jax.Array]:
    """The einsum for q times a state, which no later step reads: in bfloat16 it is rounded, too.
    The budget of float16 leaves no room for that."""
    rounded = spec.dtype == "bfloat16" or spec.precision == "tf32"
    return _einsum(rounded=_has_many_steps(spec) and rounded)


def _has_many_steps(spec: DeltaRuleSpec) -> bool:
    return spec.B * spec.H * spec.T > FEW_STEPS


def _einsum(rounded: bool) -> Callable[..., jax.Array]:
    return functools.partial(jnp.einsum, precision=jax.lax.Precision.DEFAULT) if rounded else exact


def open_chunk(spec: DeltaRuleSpec, steps: Steps) -> Chunk:
    """The part of a chunk that no state enters."""
    dtype = jnp.promote_types(steps.q.dtype, jnp.float32)

    def load(array: jax.Array, axes: int = 2) -> jax.Array:
        """In float32, with zeros in padding, whatever that holds; time is `axes` from the end."""
        if steps.real is not None:
            array = jnp.where(steps.real[:, None] if axes == 2 else steps.real, array, 0)
        return array.astype(dtype)

    q, k, v, beta = load(steps.q), load(steps.k), load(steps.v), load(steps.beta, axes=1)
    if spec.normalize_qk:
        q, k = unit(q), unit(k)
    q = spec.scale * q
    k_right, left, right, kept = k, None, None, None
    length = len(k)
    if spec.decay == "channel":
        decay = jnp.maximum(load(steps.decay[0]), LEAST_DECAY)  # [C, D]
        products = channel_pairs(einsum_of(spec), jnp.stack([q, k]), k, decay)
        products = products[:, None]  # [2, 1, C, C]
        before, after = jnp.exp(sums_upto(decay)), jnp.exp(sums_after(decay))
        q, k, k_right, kept = q * before, k * before, k * after, before[-1:]
    else:
        # Exact with `precision="tf32"`, too: the inverse of the triangle of k k^T is far from the
        # identity where keys are alike.
        pairs = exact("md,sd->ms", jnp.concatenate([q, k]), k)
        products = pairs.reshape(2, 1, length, length)
        if spec.decay == "step":
            decay = jnp.maximum(load(steps.decay, axes=1), LEAST_DECAY)  # [R, C]
            factors = jnp.exp(sums_between(decay))  # [R, C, 1 + C]
            products = products * factors[..., 1:]
            left, right, kept = factors[..., 0], factors[:, -1, 1:], factors[:, -1:, 0]
    if steps.run is not None:
        run, run_before = steps.run[1:], steps.run[0]
        products = jnp.where(run[:, None] == run, products, 0)
        left, right, kept = (
            jnp.where(stays, 1 if factor is None else factor, 0).astype(dtype)
            for stays, factor in (
                ((run == run_before)[None], left),
                ((run == run[-1])[None], right),
                (run_before == run[-1:], kept),
            )
        )
        kept = jnp.atleast_2d(kept)
    t, s = np.arange(length)[:, None], np.arange(length)
    lower = beta[..., None] * jnp.where(s < t, products[1], 0)
    solved = unit_inverse(lower) * beta[:, None]
    return Chunk(q, k, k_right, v, solved, jnp.where(s <= t, products[0], 0), left, right, kept)


def walk(spec: DeltaRuleSpec, state: jax.Array, chunk: Chunk) -> tuple[jax.Array, Walked]:
    """S' [R, D, V], and what the chunk's out is made of, from S [R, D, V]."""
    einsum = einsum_of(spec)
    recalled = einsum("rdv,td->rtv", state, chunk.k)
    written = exact("rts,rsv->rtv", chunk.solved, chunk.v - _times(chunk.left, recalled))
    added = einsum("rtv,td->rdv", _times(chunk.right, written), chunk.k_right)
    return _times(chunk.kept, state) + added, Walked(state, written)


def read(spec: DeltaRuleSpec, chunk: Chunk, walked: Walked) -> jax.Array:
    """out [R, C, V]. No other chunk waits for it, so all chunks of a piece are read at once."""
    of_state = einsum_of_queries(spec)("rdv,td->rtv", walked.state, chunk.q)
    of_chunk = exact("rts,rsv->rtv", chunk.pairs, walked.written)
    return _times(chunk.left, of_state) + of_chunk


def _times(factor: jax.Array | None, array: jax.Array) -> jax.Array:
    return array if factor is None else factor[..., None] * array


def sums_between(decay: jax.Array) -> jax.Array:
    """[R, C] -> [R, C, 1 + C]: at [t, 1 + s] the sum of decay[s+1..t], at [t, 0] of decay[0..t].

    It is 0 where s >= t. Here and below sums are products with zeros and ones: a difference of
    prefix sums would lose the small decays that follow a large one.
    """
    t, s = np.arange(decay.shape[-1])[:, None], np.arange(-1, decay.shape[-1])
    upto, after = (mask.astype(decay.dtype) for mask in (t >= t.T, t > s))
    return jnp.matmul(decay[:, None] * upto, after, precision=EXACT)


def sums_upto(decay: jax.Array) -> jax.Array:
    """[..., C, D] -> [..., C, D]: at t the sum of decay[0..t]."""
    upto = np.tri(decay.shape[-2], dtype=decay.dtype)
    return jnp.einsum("tr,...rd->...td", upto, decay, precision=EXACT)


def sums_after(decay: jax.Array) -> jax.Array:
    """[..., C, D] -> [..., C, D]: at s the sum of decay[s+1..]."""
    after = np.tri(decay.shape[-2], k=-1, dtype=decay.dtype).T
    return jnp.einsum("sr,...rd->...sd", after, decay, precision=EXACT)


def channel_pairs(
    einsum: Callable[..., jax.Array], rows: jax.Array, keys: jax.Array, decay: jax.Array
) -> jax.Array:
    """rows [2, C, D], keys [C, D] -> [2, C, C]: their products, decayed where s < t.

    Where t is in the last half of a block and s in the first, the decays between them are those of
    the last half up to t and those of the first after s: a product of decayed features whose
    factors are at most 1. So blocks are joined two by two, from small ones whose pairs are decayed
    one by one. What is above the diagonal has no meaning.
    """
    length, D = keys.shape
    size = min(PAIR_BLOCK, length)
    t, s = np.arange(size)[:, None, None], np.arange(size)[:, None]
    within = ((s < t.T) & (t.T <= t)).astype(decay.dtype)  # [size, size, size], steps s < r <= t
    between = jnp.einsum("tsr,nrd->ntsd", within, decay.reshape(-1, size, D), precision=EXACT)
    weighed = keys.reshape(-1, 1, size, D) * jnp.exp(between)  # [blocks, size, size, D]
    # As a product: XLA for CPUs, in JAX 0.10.2, crashes in some gradients of it as a sum.
    pairs = einsum("tmd,tsd->tms", jnp.swapaxes(rows, 0, 1), weighed.reshape(length, size, D))
    pairs = jnp.swapaxes(pairs.reshape(-1, size, 2, size), 1, 2)  # [blocks, 2, size, size]
    while size < length:
        row, key, gate = (x.reshape(*x.shape[:-2], -1, 2, size, D) for x in (rows, keys, decay))
        row = jnp.swapaxes(row[:, :, 1], 0, 1) * jnp.exp(sums_upto(gate[:, 1]))[:, None]
        key = key[:, 0] * jnp.exp(sums_after(gate[:, 0]))
        across = einsum("nmd,nsd->nms", row.reshape(-1, 2 * size, D), key)
        own = pairs.reshape(-1, 2, 2, size, size)
        pairs = _from_quarters(own[:, 0], across.reshape(-1, 2, size, size), own[:, 1])
        size *= 2
    return pairs[0]
