"""The gradient of the causal decays, from what the kernels leave of each row.

With M[i, j] what the pair of query i and key j adds to the loss's derivative by its own exponent,
the gradient of step t's logarithm is F(t), the sum of M over the pairs with j < t <= i. The kernels
leave sums of M for each row, of all pairs of a query and of all of a key,

    R_i = sum_j M[i, j]    A_j = sum_i M[i, j]    F(t + 1) = F(t) + A_t - R_t

where each pair of two rows of a chunk is in both, and what it is rounded to is the same in both
(`query_gradient.py`, `key_gradient.py`). In a steep chunk, where a pair may be small beside that of
a row with itself, R and A are of pairs with rows of other chunks alone, and what is missing, I(t),
is summed up by itself: with Y what crosses the start of the chunk and sums within it,

    F(t) = Y + sum_{j < t} A_j - sum_{i < t} R_i + I(t)

Both kernels leave states, S and z ahead of every few chunks, and R and u behind those before them,
as they are multiplied, and there

    Y = <S, R> + z . u

Between, Y is summed up, and what the sums miss of the next one that is known is spread over the
chunks between. By the roundings of S and R Y is off, and alike in neighbouring chunks: in the
gradient of a decay for each head, a sum over all steps, that adds up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Y is known ahead of each of a piece's chunks whose number this divides. A state is as large as a
# chunk's q and k.
SPACING = 16


class OfQueries(NamedTuple):
    flows: jax.Array  # R_i, [B, H, T up to a whole chunk]
    kv: jax.Array  # S ahead of the chunks that are known, [B, H, places, V, F] bfloat16
    k_sum: jax.Array | None = None  # z there, [B, H, places, F] float32


class OfKeys(NamedTuple):
    flows: jax.Array  # A_j, [B, H, T up to a whole chunk]
    inside: jax.Array  # I(t), alike
    kv: jax.Array  # R behind the chunks before those, [B, H, places, V, F] bfloat16
    k_sum: jax.Array  # u there, [B, H, places, F] float32


def is_kept(chunk: Any) -> Any:
    return lax.rem(chunk, SPACING) == 0


def _in_piece(deal: frame.Deal) -> int:
    return int(pl.cdiv(deal.rows // frame.C, SPACING))


def places(deal: frame.Deal) -> int:
    """For the chunks that are known; the last piece may leave some of its own."""
    return deal.pieces * _in_piece(deal)


def place(deal: frame.Deal, item: frame.Item, chunk: Any) -> Any:
    return item.piece * _in_piece(deal) + lax.div(chunk, SPACING)


def decay_flows(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    gates: jax.Array,
    queries: OfQueries,
    keys: OfKeys,
    of_start: jax.Array | None,
) -> jax.Array:
    """F at each step, [B, H, T]; `of_start` [B, H] is Y there, None where there is no state."""
    count = gates.shape[2] // frame.C

    def cut(rows: jax.Array) -> jax.Array:
        return rows.reshape(*rows.shape[:-1], count, frame.C)

    # [j, t]: 1 where j < t, up to the step behind the chunk.
    until = np.triu(np.ones((frame.C, frame.C + 1), np.float32), 1)
    sums = jnp.einsum(
        "...j,jt->...t",
        cut(keys.flows - queries.flows),
        until,
        precision=jax.lax.Precision.HIGHEST,
    )
    middle, last = frame.halves_of(gates)
    crossing = _crossing(spec, deal, middle, last, sums[..., -1], queries, keys, of_start)
    # Of a steep chunk's start nothing is left at its end, and Y is off by more than nothing.
    of_chunk = jnp.sum(cut(queries.flows), axis=3)
    crossing = jnp.where(frame.is_steep(middle, last), of_chunk, crossing)
    found = sums[..., :-1] + cut(keys.inside) + crossing[..., None]
    return found.reshape(*found.shape[:2], -1)[:, :, : spec.T]


def _crossing(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    middle: jax.Array,
    last: jax.Array,
    added: jax.Array,
    queries: OfQueries,
    keys: OfKeys,
    of_start: jax.Array | None,
) -> jax.Array:
    """Y of each chunk, of the gates' sums up to its middle and its last row, and sums of A - R, all
    [B, H, chunks]."""
    count, in_piece = middle.shape[2], deal.rows // frame.C
    chunks = [
        piece * in_piece + chunk
        for piece in range(deal.pieces)
        for chunk in range(0, in_piece, SPACING)
    ]
    known = np.array([chunk for chunk in chunks if chunk < count])  # the last piece's may be fewer
    inner = known[1:]
    # S is as the middle of the chunk behind sees it, R as that of the chunk ahead.
    steep = frame.is_steep(middle, last)
    of_s = jnp.exp2(jnp.where(steep, 0.0, -middle))[:, :, inner]
    of_r = jnp.exp2(jnp.where(steep, 0.0, middle - last))[:, :, inner - 1]

    def times(rows: jax.Array, factors: jax.Array) -> jax.Array:
        return rows.astype(jnp.float32) * factors.reshape(*factors.shape, *[1] * (rows.ndim - 3))

    kv = times(queries.kv[:, :, 1 : len(known)], of_s)
    exact = jnp.sum(kv * times(keys.kv[:, :, : len(inner)], of_r), axis=(3, 4))
    if queries.k_sum is not None:
        z = times(queries.k_sum[:, :, 1 : len(known)], of_s)
        exact += jnp.sum(z * times(keys.k_sum[:, :, : len(inner)], of_r), axis=3)
    nothing = jnp.zeros(exact.shape[:2], jnp.float32)
    exact = jnp.concatenate(
        [(nothing if of_start is None else of_start)[..., None], exact, nothing[..., None]], axis=2
    )
    at = np.append(known, count)
    if spec.return_state:  # more than nothing crosses the end
        exact, at = exact[..., :-1], at[:-1]
    summed = jnp.pad(jnp.cumsum(added, axis=2), ((0, 0), (0, 0), (1, 0)))  # up to each edge
    missed = exact - summed[:, :, at]
    # Between those that are known, and behind the last.
    chunk = np.arange(count)
    low = np.searchsorted(at, chunk, side="right") - 1
    high = np.minimum(low + 1, len(at) - 1)
    share = (chunk - at[low]) / np.maximum(at[high] - at[low], 1)
    share = np.minimum(share, 1).astype(np.float32)
    return summed[..., :-1] + missed[:, :, low] * (1 - share) + missed[:, :, high] * share
