"""The sums of each piece of queries, R = sum_i g_i phi'_i^T [V, F] and u = -sum_i e_i phi'_i [F].

With phi'_i = phi(q_i) inverse_i; g, inverse and e are those of `query_gradient.py`. Of u's eight
columns half are of e rounded, half of what that left off.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import ALIKE, BF16, F32, C, F
from ato_jax.ops.linear_attention.mosaic_gpu.sums import piece_sums
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

PARTS = ALIKE // 2  # columns of either part


def map_queries(q_ref: Any, inverse_ref: Any) -> None:
    """phi(q_i) inverse_i in q's place, rounded once: inverse is of phi(q_i) in float32, too."""
    features = frame.unrounded_features_of(frame.load(q_ref))
    inverse = frame.in_columns(frame.load(inverse_ref, frame.OF_ROWS), F)
    q_ref[...] = (features * inverse).astype(BF16)


def spread(e_ref: Any, minus_e_ref: Any) -> None:
    """-e in the rows of minus_e [C, C], of which 8 are read: rounded, and what that left off."""
    e = -frame.in_rows(frame.load(e_ref, frame.OF_COLUMNS), C)
    left = e - frame.rounded(e).astype(F32)
    minus_e_ref[...] = frame.rounded(jnp.where(frame.position(0) % 2 == 0, e, left))


def query_sums(
    spec: LinearAttentionSpec,
    deal: frame.Deal,
    q: jax.Array,
    g: jax.Array,
    inverse: jax.Array,
    e: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """R [B, H, P, V, F] and u [B, H, P, F], float32."""

    def map_rows(q_ref: Any, minus_e_ref: Any, inverse_ref: Any, e_ref: Any) -> None:
        map_queries(q_ref, inverse_ref)
        spread(e_ref, minus_e_ref)

    def turn(g_ref: Any, *_: Any) -> tuple[Any, None]:
        return g_ref.T, None

    r, u = piece_sums(spec, deal, "query_sums", q, g, [inverse, e], map_rows, turn)
    return r, u / PARTS
