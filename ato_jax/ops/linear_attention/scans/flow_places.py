"""The arrays from which `flows.py` computes the gradient of a decay, and where states are kept.

The walks store their states ahead of every `spacing`-th chunk of a piece only. A place is the index
of such a chunk's states in the arrays. Each piece has the same number of places, and the last piece
may leave some of its own unused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.scans.chunks import (
    CHUNKS_OF_RUN,
    TILE_COLUMNS,
    C,
    Cut,
    OfPiece,
    in_runs,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# By the decay: Y is known ahead of each chunk of a piece whose number this divides; powers of two.
# A stored state is as large as a chunk's q and k. By emulation of a decay of -0.3 per head, with
# T = 4,224 and D = 64, in eight draws: the root mean square of the errors is 2.6e-2 of that of the
# gradients at 32, 7.6e-3 at 8, 3.5e-3 at 4 and 1.8e-3 at 2; of steps it is at most 1.2e-3 at 32.
SPACING = {"step": 32, "head": 4}


class OfQueries(NamedTuple):
    flows: jax.Array  # one or two parts of R_i, [1 or 2, B, H, T up to a whole chunk]
    # S ahead of the chunks where Y is known, [B, H, places, V, F] bfloat16, in float16 calls
    # float32; None where states are multiplied in two parts.
    kv: jax.Array | None = None
    k_sum: jax.Array | None = None  # z there, [B, H, places, F] float32


class OfKeys(NamedTuple):
    flows: jax.Array  # A_j, [B, H, T up to a whole chunk]
    inside: jax.Array  # I(t), [B, H, T up to a whole chunk]
    # dS behind the chunks before those, [B, H, places, V, F] as S; where states are multiplied in
    # two parts, at the start of each piece, [B, H, P, V, F] float32.
    kv: jax.Array
    k_sum: jax.Array | None = None  # dz there, [B, H, places, F] float32


class Known(NamedTuple):
    """The results of the first pass, in float32."""

    crossing: jax.Array  # Y, [B, H, places]
    # Sums of A - R from the place before a chunk up to it, [B, H, chunks]; beside segments from the
    # last border ahead of the chunk, where that is behind the place.
    before: jax.Array
    # Sums of A - R from each place to the next, [B, H, places]; beside segments from the same row
    # as `before` to a chunk's first border, or to its end if it has none, [B, H, chunks].
    between: jax.Array


def spacing(spec: LinearAttentionSpec) -> int:
    """How many chunks lie from one place to the next. Heads that are walked in runs have a place
    for each run."""
    assert spec.decay is not None
    walks_runs = max(spec.D, spec.V) > TILE_COLUMNS or in_runs(spec)
    return CHUNKS_OF_RUN if walks_runs else SPACING[spec.decay]


def is_kept(spec: LinearAttentionSpec, chunk: Any) -> Any:
    """Whether the kernels leave their states at this chunk of a piece."""
    return lax.rem(chunk, spacing(spec)) == 0


def places_of_piece(spec: LinearAttentionSpec, deal: Cut) -> int:
    return int(pl.cdiv(deal.rows // C, spacing(spec)))


def places(spec: LinearAttentionSpec, deal: Cut) -> int:
    """How many places there are for states; the last piece may leave some of its own unused."""
    return deal.pieces * places_of_piece(spec, deal)


def place(spec: LinearAttentionSpec, deal: Cut, item: OfPiece, chunk: Any) -> Any:
    """The place of a chunk whose states are kept."""
    return item.piece * places_of_piece(spec, deal) + lax.div(chunk, spacing(spec))


def chunk_of(spec: LinearAttentionSpec, deal: Cut, place: Any) -> Any:
    """The chunk at a place, numbered through all pieces."""
    of_piece = places_of_piece(spec, deal)
    return place // of_piece * (deal.rows // C) + place % of_piece * spacing(spec)


def place_before(spec: LinearAttentionSpec, deal: Cut, chunk: Any) -> Any:
    """The last place up to a chunk."""
    chunks = deal.rows // C
    return chunk // chunks * places_of_piece(spec, deal) + chunk % chunks // spacing(spec)
