"""Merging attention over parts of the keys.

    lse = log sum_n exp(lse_n),  out = sum_n exp(lse_n - lse) out_n
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def merge(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges N parts, out [N, ..., V] and lse [N, ...], into out [..., V] and lse [...] float32.

    The sums are in float32, and out has the parts' dtype. A part with lse -inf has weight 0,
    whatever its out holds.
    """
    lse = lse.astype(jnp.float32)
    # An equality, so that a NaN does not count as a part that saw nothing.
    saw = lse != -jnp.inf
    top = jnp.max(lax.stop_gradient(lse), axis=0)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(lse - top[None])  # 0 for -inf
    total = jnp.sum(weights, axis=0)
    any_saw = total != 0
    safe = jnp.where(any_saw, total, 1)
    parts = jnp.where(saw[..., None], out.astype(jnp.float32), 0)
    merged = jnp.sum(parts * (weights / safe[None])[..., None], axis=0)
    return merged.astype(out.dtype), jnp.where(any_saw, top + jnp.log(safe), -jnp.inf)
