"""The gradient of the causal decays, from what the kernels leave of each row.

With M[i, j] what the pair of query i and key j adds to the loss's derivative by its own exponent,
the gradient of step t's logarithm is F(t), the sum of M over the pairs with j < t <= i:

    F(t) = X + sum_{i >= t} R_i + sum_{j < t} A_j + I(t)

with sums within the chunk. R_i is what query i reads of the state ahead (`query_gradient.py`), A_j
what key j adds to the cotangent of the state behind, and I(t) is of the chunk's own pairs
(`key_gradient.py`): sums of just those pairs. X is what passes the whole chunk,

    X(c) = exp2(G_C) (<S, R> + z . u)       X(c + 1) = X(c) + sum_c A - sum_{c + 1} R

for S and z ahead of the chunk, R and u behind it. Both kernels leave these of every few chunks, as
they are multiplied: where the chunk is not steep exp2(G_C) is in them (`frame.Gates`). X is summed
up between: what the sums miss of the next one that is known is spread over the chunks between. By
the roundings of S and R X is off, and alike in neighbouring chunks: in the gradient of a decay for
each head, a sum over all steps, that adds up.
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

# Of a piece's chunks each whose number this divides is known. A state is as large as a chunk's q
# and k. By the same roundings in float64, with a decay of -0.03 at each of 4096 steps of 12 heads,
# the steps' gradients are off by 0.0025, 0.003 and 0.004 where every fourth, eighth and sixteenth
# is known; the heads' on a card as far where every fourth is.
SPACING = 16
# Where less is left of a state than this, what passes is less than what the sums are off by.
LEAST_LEFT = 2.0**-9


class OfQueries(NamedTuple):
    reads: jax.Array  # R_i, [B, H, T up to a whole chunk]
    kv: jax.Array  # S ahead of the chunks that are known, [B, H, places, V, F] bfloat16
    k_sum: jax.Array | None = None  # z there, [B, H, places, F] float32


class OfKeys(NamedTuple):
    adds: jax.Array  # A_j, [B, H, T up to a whole chunk]
    inside: jax.Array  # I(t), alike
    kv: jax.Array  # R behind the chunks that are known, [B, H, places, V, F] bfloat16
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
) -> jax.Array:
    """F at each step, [B, H, T]."""
    count = gates.shape[2] // frame.C

    def cut(rows: jax.Array) -> jax.Array:
        return rows.reshape(*rows.shape[:-1], count, frame.C)

    both = jnp.concatenate([cut(queries.reads), cut(keys.adds)], axis=3)
    # [i, t]: 1 where i >= t, and where i < t; and what sums up all of either.
    from_t, of_all = np.tri(frame.C), np.kron(np.eye(2), np.ones((frame.C, 1)))
    weights = np.hstack([np.vstack([from_t, 1 - from_t]), of_all])
    sums = jnp.einsum(
        "...i,it->...t", both, weights.astype(np.float32), precision=jax.lax.Precision.HIGHEST
    )
    middle, last = frame.halves_of(gates)
    left, steep = jnp.exp2(last), frame.is_steep(middle, last)
    reads, adds = sums[..., frame.C], sums[..., frame.C + 1]
    passing = _passing(spec, deal, left, steep, reads, adds, queries, keys)
    found = sums[..., : frame.C] + cut(keys.inside) + passing[..., None]
    return found.reshape(*found.shape[:2], -1)[:, :, : spec.T]


def _passing(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    left: jax.Array,
    steep: jax.Array,
    reads: jax.Array,
    adds: jax.Array,
    queries: OfQueries,
    keys: OfKeys,
) -> jax.Array:
    """X of each chunk, of what is left of a state behind it, whether it is steep, and sums of R and
    A, all [B, H, chunks]."""
    count, in_piece = left.shape[2], deal.rows // frame.C
    chunks = [
        piece * in_piece + chunk
        for piece in range(deal.pieces)
        for chunk in range(0, in_piece, SPACING)
    ]
    known = [chunk for chunk in chunks if chunk < count]  # the last piece's may be fewer
    kv = queries.kv[:, :, : len(known)].astype(jnp.float32)
    of_kv = keys.kv[:, :, : len(known)].astype(jnp.float32)
    exact = jnp.sum(kv * of_kv, axis=(3, 4))
    if queries.k_sum is not None:
        both = queries.k_sum[:, :, : len(known)] * keys.k_sum[:, :, : len(known)]
        exact += jnp.sum(both, axis=3)
    exact *= jnp.where(steep, left, 1.0)[:, :, np.array(known)]
    if not spec.return_state and known[-1] < count - 1:
        known.append(count - 1)
        exact = jnp.pad(exact, ((0, 0), (0, 0), (0, 1)))  # nothing passes the last chunk
    steps = jnp.pad(adds[..., :-1], ((0, 0), (0, 0), (1, 0))) - reads
    summed = jnp.cumsum(steps, axis=2)
    at = np.array(known)
    missed = exact - summed[:, :, at]
    # Between those that are known, and behind the last.
    chunk = np.arange(count)
    low = np.searchsorted(at, chunk, side="right") - 1
    high = np.minimum(low + 1, len(at) - 1)
    share = (chunk - at[low]) / np.maximum(at[high] - at[low], 1)
    share = np.minimum(share, 1).astype(np.float32)
    found = summed + missed[:, :, low] * (1 - share) + missed[:, :, high] * share
    return jnp.where(left < LEAST_LEFT, 0.0, found)
