"""One chunk of C steps: what its keys add to a state, and what its queries read.

    w[i,j]  = (phi(q_i) . phi(k_j)) * exp(sum decay[j+1..i])            j <= i, both in the chunk
    num_i   = sum_j w[i,j] v_j + exp(sum decay[first..i]) phi(q_i) . kv
    den_i   = sum_j w[i,j]     + exp(sum decay[first..i]) phi(q_i) . k_sum
    kv'     = exp(sum decay[first..last]) kv + sum_j exp(sum decay[j+1..last]) phi(k_j) v_j^T
    k_sum'  = exp(sum decay[first..last]) k_sum + sum_j exp(sum decay[j+1..last]) phi(k_j)

(kv, k_sum) is the carry: what all keys to the left add up to. It belongs to one run of equal
segment ids, and where another begins it starts anew. Both ways, w has j > i too, where it
carries exp(sum decay[i+1..j]), and a second carry comes from the right:

    num_i  += exp(sum decay[i+1..last]) phi(q_i) . kv
    kv'     = exp(sum decay[first..last]) kv + sum_j exp(sum decay[first..j]) phi(k_j) v_j^T

which is the first with the decays up to a step and those after it exchanged: an `Edge` each. No
exponent is ever positive, and none is a difference of sums that could cancel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.xla.timeline import Timeline, zero_unless

# exp of it is 0 in float32, and a chunk's sum of it stays exact on the grid: see `pair_decay`.
LEAST_DECAY = -200.0
# The grid on which float32 adds up a chunk's decays without rounding: 2^-8 * 2^24 = 65,536.
GRID = 2.0**-8


class Carry(NamedTuple):
    """What the keys on one side of an edge between chunks add up to."""

    kv: jax.Array  # [B, G, F, V]
    k_sum: jax.Array  # [B, G, F]
    run: Any  # [B], the run that it belongs to


class Edge(NamedTuple):
    """One edge of a chunk: the decays between it and each step, and the run that touches it."""

    decay: Any  # [B, G, C, 1 or F]
    run: Any  # [B]


class Chunk(NamedTuple):
    """C steps, cleared of padding and mapped to features; None as in the timeline."""

    q: Any  # [B, G, R, C, F]
    k: Any  # [B, G, C, F]
    v: Any  # [B, G, C, V]
    decay: Any  # [B, G, C, 1 or F]
    levels: list[jax.Array]  # of [B, G, C, 1 or F]: see `sums_in_halves`
    run: Any  # [B, C]
    left: Edge
    right: Edge
    einsum: Callable[..., jax.Array]


def open_chunk(spec: LinearAttentionSpec, parameters: Any, steps: Timeline) -> Chunk:
    """A chunk of the timeline; what the timeline lacks, the chunk lacks."""
    dtype = jnp.promote_types(spec.dtype, jnp.float32)
    exact = spec.dtype not in ("bfloat16", "float16") and spec.precision == "exact"
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT

    def phi(x: jax.Array) -> jax.Array:
        return spec.feature_map(x.astype(dtype), *parameters)

    q = k = v = decay = before = after = first = last = None
    levels: list[jax.Array] = []
    if steps.q is not None:
        q = phi(zero_unless(steps.asked, steps.q))
        if steps.q_decay is not None:
            q = q * jnp.exp(steps.q_decay.astype(dtype))[:, :, None]
    if steps.k is not None:
        # Masked before phi, so that a NaN in padding goes nowhere, and after: phi(0) may not be 0.
        k = zero_unless(steps.real, phi(zero_unless(steps.real, steps.k)))
        v = zero_unless(steps.real, steps.v).astype(dtype)
    if steps.decay is not None:
        decay = jnp.maximum(
            zero_unless(steps.real, steps.decay.astype(dtype)), LEAST_DECAY
        )
        before, after, levels = sums_in_halves(decay)
    if steps.run is not None:
        first, last = steps.run[:, 0], steps.run[:, -1]
    einsum = functools.partial(jnp.einsum, precision=precision)
    return Chunk(
        q, k, v, decay, levels, steps.run, Edge(before, first), Edge(after, last), einsum
    )


def absorb(chunk: Chunk, carry: Carry, edge: Edge) -> Carry:
    """The carry from beyond the other edge, and the chunk's keys, as seen at `edge`."""
    k, kv, k_sum = chunk.k, carry.kv, carry.k_sum
    if chunk.decay is not None:
        k = k * jnp.exp(edge.decay)
        total = jnp.exp(jnp.sum(chunk.decay, axis=2))  # [B, G, 1 or F]
        kv, k_sum = total[..., None] * kv, total * k_sum
    if chunk.run is not None:
        k = zero_unless(chunk.run == edge.run[:, None], k)
        stays = (carry.run == edge.run)[:, None, None]
        kv, k_sum = jnp.where(stays[..., None], kv, 0), jnp.where(stays, k_sum, 0)
    return Carry(
        kv + chunk.einsum("bgjf,bgjv->bgfv", k, chunk.v), k_sum + jnp.sum(k, axis=2), edge.run
    )


def read(chunk: Chunk, carry: Carry, edge: Edge) -> tuple[jax.Array, jax.Array]:
    """num [B, G, R, C, V] and den [B, G, R, C] of the carry from beyond `edge`."""
    q = chunk.q
    if edge.decay is not None:
        q = q * jnp.exp(edge.decay)[:, :, None]
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
            w *= jnp.exp(pair_decay(chunk.decay[..., 0]))[:, :, None]
    else:
        # The diagonal has no decay; every other pair has one level, at which a half parts it.
        w = jnp.sum(chunk.q * chunk.k[:, :, None], axis=-1, keepdims=True)  # [B, G, R, C, 1]
        for level, exponent in enumerate(chunk.levels):
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
    """num [..., C, V], den [..., C] -> out, in the dtype of the inputs."""
    if spec.normalize:
        # Not jnp.maximum, which passes on half of the gradient where both are equal.
        out = num / jnp.where(den > spec.eps, den, spec.eps)[..., None]
    else:
        out = spec.scale * num
    return out.astype(spec.dtype)


def pair_indices(size: int) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(size)[:, None], jnp.arange(size)[None, :]


def pair_decay(decay: jax.Array) -> jax.Array:
    """[B, G, C] -> [B, G, C, C]: the sums of the decays between two steps, either way.

    A difference of running sums would lose the small decays that follow a large one. So they are
    taken apart: multiples of the grid, which float32 adds exactly, and what is left, at most half
    the grid a step.
    """
    coarse = jax.lax.stop_gradient(jnp.round(decay / GRID) * GRID)
    i, j = pair_indices(decay.shape[-1])

    def difference(part: jax.Array) -> jax.Array:
        running = jnp.cumsum(part, axis=-1)
        return running[..., :, None] - running[..., None, :]

    # The sign, 0 on the diagonal, also keeps w[i,i] out of the decay's gradient.
    return (difference(coarse) + difference(decay - coarse)) * jnp.sign(i - j)


def sums_in_halves(decay: jax.Array) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Sums of [B, G, C, X] decays up to each step, from behind it to the end, and by halves.

    At each level the chunk falls into blocks of 2 h steps. The decays between a step of a block's
    first half and one of its second half are those behind the one, to the middle, and those from
    there up to the other: the entries of that level. They are sums of numbers of one sign, so
    nothing cancels.
    """
    B, G, size, channels = decay.shape
    before, after, levels = decay, jnp.zeros_like(decay), []
    for level in range(size.bit_length() - 1):
        h = 1 << level
        halves = (B, G, size // (2 * h), 2, h, channels)
        before, after = before.reshape(halves), after.reshape(halves)
        second = jnp.array([False, True])[:, None, None]
        levels.append(jnp.where(second, before, after).reshape(decay.shape))
        other_half = before[:, :, :, ::-1, -1:]  # its sum, [B, G, C / 2h, 2, 1, X]
        before += jnp.where(second, other_half, 0)
        after += jnp.where(second, 0, other_half)
    return before.reshape(decay.shape), after.reshape(decay.shape), levels
