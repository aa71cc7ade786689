"""Pairs of a chunk with a decay per step and channel, for `channel_walk.py`.

With c_i the sum of a channel's log-decays from the chunk's first row to row i, the pairs are

    P_ij = sum over channels of phi(q_i) exp(c_i - c_j) phi(k_j)                  j <= i

and where every query sees every key, those with j > i have exp(c_j - c_i). A product needs a factor
for each side. A chunk is cut into blocks of `size` rows. Within a block both factors refer to a
middle row m:

    f_i = exp(c_i - c_m)        q^_i = f_i phi(q_i)        k^_j = phi(k_j) / f_j

Other pairs are separated by an edge p between two halves of h = size, 2 size, .. rows, where the
factors are exp(c_i - c_p) and exp(c_p - c_j), neither of which is above 1. So each level of halves
multiplies half of the rows of q and half of those of k. With `size` 1 nothing is above 1, and with
`size` = C there is one product. f stays within 2^-70 to 2^70 where no half of a block loses more
(`form`), which leaves the features as much again. Products of pairs that no query sees may
overflow; they are replaced by 0.

The sums c have two parts (`in_parts` of `xla/chunk.py`), of which float32 adds the first exactly:
their differences keep the small decays behind a strong one. One part is enough for operands that
are rounded, in a chunk of one block: its sums are small.

The derivative by a step's decay is the sum over the pairs that it stands between. With M_ij the
part of a channel in P_ij dP_ij, the row sums A_i = q^_i dq^_i = sum_j M_ij and the column sums
B_j = k^_j dk^_j are sums of the same products, since both take the rounded operands:

    sum over j < t <= i of M_ij = sum over i >= t of (A_i - B_i)                 in one block
                                = sum over i >= t of A_i                         t behind an edge
                                = sum over j < t of B_j                          t before an edge

Pairs with j = i have no decay; they are left out, since the others may be far smaller.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax.ops.linear_attention.decay import MOST_LOST_OF_RUN
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.xla.chunk import in_parts
from ato_jax.ops.linear_attention.xla.products import rows

# Rows of a block, from the fastest form to the one that takes every decay: with 64 rows a channel
# may lose a factor of e^1.5 at each step, with 16 rows e^6.
BLOCKS = (64, 16, 1)
# The largest factor of a product, f times a feature, as an exponent of 2: float32 ends at 2^128.
LARGEST_FACTOR = 120.0
LN_2 = 0.6931471805599453
# A running sum is a sum over windows, as long as the sum is. Longer sums are those of parts and of
# their totals.
LONGEST_WINDOW = 16
PART = 8


class Parts(NamedTuple):
    """A sum of decays, [.., F]: multiples of a grid and a rest, or all in one and None."""

    coarse: Any
    rest: Any

    def __sub__(self, other: Parts) -> Parts:
        rest = None if self.rest is None else self.rest - other.rest
        return Parts(self.coarse - other.coarse, rest)

    def map(self, function: Any) -> Parts:
        return Parts(*(None if part is None else function(part) for part in self))

    def rows(self, first: int, step: int) -> Parts:
        """Rows first, first + step, .. of [.., C, F]."""
        return self.map(lambda x: x[..., first::step, :])

    def exp(self) -> jax.Array:
        found: jax.Array = jnp.exp(self.coarse)
        return found if self.rest is None else found * jnp.exp(self.rest)


def from_row(x: jax.Array) -> jax.Array:
    """The sum over each row and those behind it, [.., C, F]."""
    return _running(x, reverse=True)


def before_row(x: jax.Array) -> jax.Array:
    """The sum over the rows before each."""
    width = [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 0)]
    # The last row is in none of the sums: it would cancel in a difference.
    return _running(jnp.pad(x[..., :-1, :], width), reverse=False)


def _running(x: jax.Array, reverse: bool) -> jax.Array:
    count = x.shape[-2]
    if count <= LONGEST_WINDOW or count % PART:
        # `cumsum` may be a scan on a GPU, which no pass is fused with.
        window = [1] * (x.ndim - 2) + [count, 1]
        padding = [(0, 0)] * (x.ndim - 2) + [(0, count - 1) if reverse else (count - 1, 0), (0, 0)]
        found: jax.Array = jax.lax.reduce_window(
            x, np.zeros((), x.dtype), jax.lax.add, window, [1] * x.ndim, padding
        )
        return found
    parts = x.reshape(*x.shape[:-2], count // PART, PART, x.shape[-1])
    own = _running(parts, reverse)
    totals = own[..., 0 if reverse else -1, :]  # [.., parts, F]
    width = [(0, 0)] * (totals.ndim - 2)
    if reverse:
        others = jnp.pad(totals[..., 1:, :], [*width, (0, 1), (0, 0)])
    else:
        others = jnp.pad(totals[..., :-1, :], [*width, (1, 0), (0, 0)])
    return (own + _running(others, reverse)[..., None, :]).reshape(x.shape)


def sums(steps: jax.Array, exact: bool = True) -> Parts:
    """c of each chunk, of the decays [B, G, N, C, F] of its steps; in two parts where `exact`."""
    parts = in_parts(steps) if exact else (steps, None)
    return Parts(*parts).map(lambda part: _running(part, reverse=False))


def forms(C: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(min(size, C) for size in BLOCKS))


def form(steps: jax.Array, largest: Any) -> jax.Array:
    """The first of `forms` that takes the decays of a segment: no half of a block loses more than
    its factors hold. `largest`: of all features."""
    beside_features = LARGEST_FACTOR - jnp.log2(jnp.maximum(jnp.float32(largest), 1))
    most = jnp.minimum(jnp.float32(MOST_LOST_OF_RUN), beside_features) * LN_2
    steep = []
    for size in forms(steps.shape[3])[:-1]:
        halves = jnp.sum(steps.reshape(-1, size // 2, steps.shape[-1]), axis=1)
        steep.append((jnp.min(halves) < -most).astype(jnp.int32))
    return jnp.sum(jnp.stack(steep), dtype=jnp.int32)


class Blocks(NamedTuple):
    """The factors of a segment's rows, for blocks of `size` rows."""

    size: int
    sums: Parts  # c [B, G, N, C, F]
    middles: Parts  # c_m [B, G, N, C / size, F]
    factors: tuple[Any, Any]  # f and 1 / f, [B, G, N, C, F]; None: 1

    def of_rows(self, block: jax.Array, factor: Any) -> jax.Array:
        """A number of each block [.., n, F] times the factors of its rows, [.., n * size, F]."""
        block = block[..., None, :]
        if factor is None:
            return jnp.squeeze(block, -2)
        shape = *block.shape[:-2], self.size, block.shape[-1]
        found = block * factor.reshape(shape)
        return found.reshape(*shape[:-3], -1, shape[-1])

    def to_edge(self, h: int, later: int) -> jax.Array:
        """The factors between the rows of each half of h rows and their edge, [B, G, N, n, h, F].
        `later`: 1 for the half behind the edge."""
        edge = self.sums.rows(h - 1, 2 * h).map(lambda x: x[..., None, :])

        def half(x: jax.Array, rows: int) -> jax.Array:
            return x.reshape(*x.shape[:-2], -1, 2, rows, x.shape[-1])[..., later, :, :]

        middles = self.middles.map(lambda x: half(x, h // self.size))
        between = (middles - edge if later else edge - middles).exp()
        factor = self.factors[1 - later]
        return self.of_rows(between, None if factor is None else half(factor, h))

    def to_start(self) -> tuple[jax.Array, Any]:
        """exp(c_i) as a number of each block and a factor of each row."""
        return self.middles.exp(), self.factors[0]

    def to_end(self) -> tuple[jax.Array, Any]:
        """exp(c_last - c_i) likewise."""
        last = self.sums.rows(self.sums.coarse.shape[-2] - 1, 1)
        return (last - self.middles).exp(), self.factors[1]


def blocks(of: Parts, size: int) -> Blocks:
    middles = of.rows(max(size // 2 - 1, 0), size)
    if size == 1:
        return Blocks(size, of, middles, (None, None))
    shape = *middles.coarse.shape[:-1], size, middles.coarse.shape[-1]
    between = of.map(lambda x: x.reshape(shape)) - middles.map(lambda x: x[..., None, :])
    # As an array, which each pass would otherwise make of both parts again.
    f = jax.lax.optimization_barrier(between.exp().reshape(of.coarse.shape))
    return Blocks(size, of, middles, (f, 1 / f))


class _Level(NamedTuple):
    """The operands of a level's product, of n blocks or pairs of halves."""

    q: jax.Array  # [B, G, N, n, R * h, F]
    k: jax.Array  # [B, G, N, n, h, F]
    factors: tuple[Any, Any]  # of the rows of q and of k, [B, G, N, n, h, F]


class Pairs(NamedTuple):
    """The products of one way: the rows of q with those of k before them, or with those behind."""

    spec: LinearAttentionSpec
    blocks: Blocks
    way: int  # 0: j <= i; 1: j > i
    phi_q: jax.Array  # [B, G, N, R, C, F]
    phi_k: jax.Array  # [B, G, N, 1, C, F]
    q: jax.Array  # q^, rounded as an operand
    k: jax.Array  # k^

    def _level(self, h: int) -> _Level:
        """Half of the rows of each side, by the edge between them."""
        later = 1 - self.way
        factors = self.blocks.to_edge(h, later), self.blocks.to_edge(h, 1 - later)
        pair = []
        for x, side, factor in zip(
            (self.phi_q, self.phi_k), (later, 1 - later), factors, strict=True
        ):
            half = x.reshape(*x.shape[:4], -1, 2, h, x.shape[-1])[..., side, :, :]
            half = jnp.swapaxes(half, 3, 4) * factor[:, :, :, :, None]  # [B, G, N, n, R, h, F]
            pair.append(rows.operand(self.spec, half.reshape(*half.shape[:4], -1, half.shape[-1])))
        return _Level(pair[0], pair[1], factors)

    def _own(self) -> _Level:
        """Blocks with themselves."""
        pair = []
        for x in (self.q, self.k):
            x = x.reshape(*x.shape[:4], -1, self.blocks.size, x.shape[-1])
            x = jnp.swapaxes(x, 3, 4)
            pair.append(rows.operand(self.spec, x.reshape(*x.shape[:4], -1, x.shape[-1])))
        f, inverse = self.blocks.factors[:: 1 if self.way == 0 else -1]
        return _Level(pair[0], pair[1], (f, inverse))

    def _product(self, level: _Level) -> jax.Array:
        """[B, G, N, n, R, h, h]."""
        found = rows.product(self.spec, "bgnpmf,bgnpcf->bgnpmc", level.q, level.k, jnp.float32)
        return found.reshape(*found.shape[:4], -1, found.shape[-1], found.shape[-1])

    def weights(self) -> jax.Array:
        """P [B, G, N, R, C, C], 0 for the pairs of the other way."""
        size, C = self.blocks.size, self.phi_q.shape[4]
        own = self._product(self._own())
        found = jnp.where(self.seen(size), own, 0)
        while size < C:
            cross = self._product(self._level(size))
            first, second = found[:, :, :, ::2], found[:, :, :, 1::2]
            nothing = jnp.zeros_like(cross)
            above, below = (nothing, cross) if self.way == 0 else (cross, nothing)
            upper = jnp.concatenate([first, above], axis=-1)
            lower = jnp.concatenate([below, second], axis=-1)
            found, size = jnp.concatenate([upper, lower], axis=-2), 2 * size
        return found[:, :, :, 0]

    def seen(self, C: int) -> jax.Array:
        i, j = jnp.arange(C)[:, None], jnp.arange(C)[None]
        return j <= i if self.way == 0 else j > i

    def gradients(self, d_pairs: list[jax.Array]) -> Gradients:
        """Those by phi(q) and phi(k), of dP as operands [B, G, N, R, C, C], added up. They are 0
        for the pairs of the other way, and for those of a row with itself."""
        size, C = self.blocks.size, self.phi_q.shape[4]
        parts = [part[:, :, :, None] for part in d_pairs]  # [B, G, N, 1, R, C, C]
        d_q, d_k = jnp.zeros_like(self.phi_q), jnp.zeros_like(self.phi_k)
        crossing = jnp.zeros_like(self.phi_k[:, :, :, 0])
        h = C // 2
        while h >= size:
            late, early = slice(h, None), slice(None, h)
            of_q, of_k = (late, early) if self.way == 0 else (early, late)
            level = self._level(h)
            cross = [part[..., of_q, of_k] for part in parts]
            flow_q, flow_k, of_level_q, of_level_k = self._flows(level, cross)
            d_q += _in_halves(flow_q, 1 - self.way)
            d_k += _in_halves(flow_k, self.way)
            behind, ahead = (of_level_q, of_level_k)[:: 1 if self.way == 0 else -1]
            both = jnp.stack([before_row(ahead), from_row(behind)], axis=4)
            crossing += both.reshape(crossing.shape)
            parts = [
                jnp.stack([part[..., early, early], part[..., late, late]], axis=4)
                for part in parts
            ]
            parts = [part.reshape(*part.shape[:3], -1, *part.shape[5:]) for part in parts]
            h //= 2
        if size == 1:
            return Gradients(d_q, d_k, crossing, None)
        flow_q, flow_k, of_level_q, of_level_k = self._flows(self._own(), parts)
        d_q += jnp.swapaxes(flow_q, 3, 4).reshape(d_q.shape)
        d_k += flow_k.reshape(d_k.shape)
        both = of_level_q - of_level_k if self.way == 0 else of_level_k - of_level_q
        if size == C:
            return Gradients(d_q, d_k, crossing, both.reshape(crossing.shape))
        return Gradients(d_q, d_k, crossing + from_row(both).reshape(crossing.shape), None)

    def _flows(self, level: _Level, d_pairs: list[jax.Array]) -> tuple[jax.Array, ...]:
        """The gradients by phi(q) and phi(k), [B, G, N, n, R or 1, h, F], and A and B of the
        level, [B, G, N, n, h, F]."""
        d_q = d_k = jnp.float32(0)
        for part in d_pairs:
            merged = part.reshape(*part.shape[:4], -1, part.shape[-1])
            d_q += rows.product(self.spec, "bgnpmc,bgnpcf->bgnpmf", merged, level.k, jnp.float32)
            d_k += rows.product(self.spec, "bgnpmc,bgnpmf->bgnpcf", merged, level.q, jnp.float32)
        shape = *d_k.shape[:4], -1, *d_k.shape[4:]
        d_q, d_k, q = d_q.reshape(shape), d_k.reshape(shape), level.q.reshape(shape)
        of_q = jnp.sum(q * d_q, axis=4)
        of_k = level.k * d_k[:, :, :, :, 0]
        factors = [factor.reshape(*d_k.shape[:4], 1, *d_k.shape[5:]) for factor in level.factors]
        return d_q * factors[0], d_k * factors[1], of_q, of_k


class Gradients(NamedTuple):
    q: jax.Array  # by phi(q) [B, G, N, R, C, F]
    k: jax.Array  # by phi(k) [B, G, N, 1, C, F]
    crossing: jax.Array  # by each step's decay [B, G, N, C, F]
    behind: Any  # what it lacks is the sum of these over each row and those behind it; None: 0


def _in_halves(x: jax.Array, later: int) -> jax.Array:
    """One half's rows [B, G, N, n, R, h, F] as those of all, [B, G, N, R, C, F]."""
    pair = (jnp.zeros_like(x), x) if later else (x, jnp.zeros_like(x))
    both = jnp.moveaxis(jnp.stack(pair, axis=4), 5, 3)  # [B, G, N, R, n, 2, h, F]
    return both.reshape(*both.shape[:4], -1, both.shape[-1])


def pairs(
    spec: LinearAttentionSpec, of: Blocks, phi_q: jax.Array, phi_k: jax.Array, way: int
) -> Pairs:
    by_row = of.factors[:: 1 if way == 0 else -1]
    own = [
        rows.rounded(spec, x if factor is None else x * factor[:, :, :, None])
        for x, factor in zip((phi_q, phi_k), by_row, strict=True)
    ]
    return Pairs(spec, of, way, phi_q, phi_k, *own)
