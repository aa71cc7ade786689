"""Both passes of `flows.py` as XLA computes them, where JAX cannot lower to Triton.

`of_chunks` is also the last step of `flows.decay_flows_in_pieces`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.scans import restarts
from ato_jax.ops.linear_attention.scans.borders import OfSequence
from ato_jax.ops.linear_attention.scans.chunks import C, Cut, is_steep
from ato_jax.ops.linear_attention.scans.flow_places import (
    Known,
    OfKeys,
    OfQueries,
    chunk_of,
    place_before,
    places,
    places_of_piece,
    spacing,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def known(
    spec: LinearAttentionSpec,
    deal: Cut,
    gates: jax.Array,
    queries: OfQueries,
    keys: OfKeys,
    of_start: jax.Array | None,
    borders: OfSequence,
) -> Known:
    assert queries.kv is not None and keys.k_sum is not None
    _, B, H, length = queries.flows.shape
    count = length // C
    first = chunk_of(spec, deal, np.arange(places(spec, deal)))  # of each place
    inner = np.minimum(first, count - 1)[1:]  # where there is a chunk, else never read
    rows = gates.reshape(B, H, count, C)
    middle, last = rows[..., C // 2 - 1], rows[..., C - 1]
    steep = is_steep(spec, middle, last)
    # S is stored as decayed to the middle of the chunk behind, dS to that of the chunk ahead.
    of_s = jnp.exp2(jnp.where(steep, 0.0, -middle))[:, :, inner]
    of_ds = jnp.exp2(jnp.where(steep, 0.0, middle - last))[:, :, inner - 1]

    def product(of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
        """The product of what queries left at each place but the first, and keys at the place
        before."""
        shape = B, H, len(first), -1
        left = of_queries.reshape(shape)[:, :, 1:].astype(jnp.float32) * of_s[..., None]
        right = of_keys.reshape(shape)[:, :, :-1].astype(jnp.float32) * of_ds[..., None]
        return jnp.sum(left * right, axis=3)

    crossing = product(queries.kv, keys.kv)
    if queries.k_sum is not None:
        crossing += product(queries.k_sum, keys.k_sum)
    start = jnp.zeros((B, H), jnp.float32) if of_start is None else of_start
    crossing = jnp.concatenate([start[..., None], crossing], axis=2)

    passing = (keys.flows - jnp.sum(queries.flows, axis=0)).reshape(B, H, count, C)
    return Known(crossing, *between_places(spec, deal, passing, borders))


def between_places(
    spec: LinearAttentionSpec, deal: Cut, passing: jax.Array, borders: OfSequence
) -> tuple[jax.Array, jax.Array]:
    """`before` and `between` of `Known`, of A - R [B, H, chunks, C]."""
    B, H, count, _ = passing.shape
    in_piece, of_piece, of_place = deal.rows // C, places_of_piece(spec, deal), spacing(spec)
    missing = deal.pieces * in_piece - count
    whole_places = ((0, 0), (0, 0), (0, 0), (0, of_piece * of_place - in_piece))

    def in_places(of_chunks: jax.Array) -> jax.Array:
        of_chunks = jnp.pad(of_chunks, ((0, 0), (0, 0), (0, missing)))
        of_chunks = of_chunks.reshape(*of_chunks.shape[:2], deal.pieces, in_piece)
        of_chunks = jnp.pad(of_chunks, whole_places)
        return of_chunks.reshape(*of_chunks.shape[:3], of_piece, of_place)

    def in_chunks(of_places: jax.Array) -> jax.Array:
        of_chunks = of_places.reshape(B, H, deal.pieces, -1)[..., :in_piece]
        return of_chunks.reshape(B, H, -1)[:, :, :count]

    if borders.chunks is not None:
        reads, adds = (borders.chunks[:, None, :, one] for one in range(2))
        ahead, behind = restarts.at_ends(passing, reads, adds)
        before = in_chunks(restarts.over_chunks(in_places(behind), in_places(reads < C)))
        return before, before + ahead
    of_chunks = in_places(jnp.sum(passing, axis=3))
    before = in_chunks(jnp.cumsum(of_chunks, axis=4) - of_chunks)
    return before, jnp.sum(of_chunks, axis=4).reshape(B, H, -1)


def of_steps(
    spec: LinearAttentionSpec,
    deal: Cut,
    gates: jax.Array,
    queries: OfQueries,
    keys: OfKeys,
    known: Known,
    decay: jax.Array | None,
    borders: OfSequence,
) -> jax.Array:
    count = queries.flows.shape[3] // C
    chunk = np.arange(count)
    here = place_before(spec, deal, chunk)
    low, high = chunk_of(spec, deal, here), chunk_of(spec, deal, here + 1)
    is_known: Any = high < count
    start = known.crossing[:, :, here]
    # Nothing crosses the end, unless a state is returned.
    next_place = np.minimum(here + 1, known.crossing.shape[2] - 1)
    exact = jnp.where(is_known, known.crossing[:, :, next_place], 0.0)
    end = np.minimum(high, count)
    if borders.chunks is None:
        between = known.between[:, :, here]
        share = ((chunk - low) / (end - low)).astype(np.float32)
    else:
        number = low[:, None] + np.arange(spacing(spec))  # [chunks, spacing]
        have_border = (borders.chunks[:, np.minimum(number, count - 1), 0] < C) & (
            number < end[:, None]
        )
        stretch = restarts.stretch_of(chunk, low, end, number.astype(np.int32), have_border)
        from_border, to_border, last = (
            x[:, None] for x in (stretch.from_border, stretch.to_border, stretch.last)
        )
        start = jnp.where(from_border, 0.0, start)
        exact = jnp.where(to_border, 0.0, exact)
        is_known = is_known | to_border
        between = jnp.take_along_axis(known.between, last, axis=2)
        share = (chunk - stretch.first) / (stretch.last + 1 - stretch.first)
        share = share.astype(jnp.float32)[:, None]
    missed = exact - start - between
    if spec.return_state:
        missed = jnp.where(is_known, missed, 0.0)
    crossing = start + known.before + missed * share
    return of_chunks(spec, gates, queries, keys, crossing, decay, borders)


def of_chunks(
    spec: LinearAttentionSpec,
    gates: jax.Array,
    queries: OfQueries,
    keys: OfKeys,
    crossing: jax.Array,
    decay: jax.Array | None,
    borders: OfSequence,
) -> jax.Array:
    """The gradient, from Y at the start of each chunk, [B, H, chunks]."""
    _, B, H, length = queries.flows.shape
    count = length // C
    reads = jnp.sum(queries.flows, axis=0).reshape(B, H, count, C)
    passing = keys.flows.reshape(B, H, count, C) - reads
    # A steep chunk leaves nothing of its start at its end, while Y has the error of its parts.
    rows = gates.reshape(B, H, count, C)
    steep = is_steep(spec, rows[..., C // 2 - 1], rows[..., C - 1])
    crossing = jnp.where(steep, jnp.sum(reads, axis=3), crossing)
    inside, crossing = keys.inside.reshape(B, H, count, C), crossing[..., None]
    if borders.begins is None or borders.chunks is None:
        found = jnp.cumsum(passing, axis=3) - passing + inside
    else:
        begins = borders.begins.reshape(B, 1, count, C)
        found = restarts.in_chunk(passing, begins) + inside
        is_ahead = np.arange(C) < borders.chunks[:, None, :, :1]  # of a chunk's first border
        crossing = jnp.where(is_ahead, crossing, 0.0)
    found = (found + crossing).reshape(B, H, length)[:, :, : spec.T]
    if decay is None:
        found = jnp.pad(found, ((0, 0), (0, 0), (0, length - spec.T)))
        return jnp.sum(found.reshape(B, H, count, C), axis=3)
    found = found if spec.layout == "bhtd" else jnp.swapaxes(found, 1, 2)
    return jnp.where(decay < LEAST_DECAY, 0.0, found)
