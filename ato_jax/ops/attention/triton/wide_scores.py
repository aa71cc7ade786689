"""The weights of a tile of wide heads, their gradients, and products with either as a factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.attention.spec import (
    AttentionSpec,
    may_have_alike_gradients,
)
from ato_jax.ops.attention.triton.common import (
    dot,
)
from ato_jax.ops.attention.triton.weights import (
    shift,
    weight_gradient,
)
from ato_jax.ops.attention.triton.wide_forward import (
    Pair,
    not_zero,
    weigh,
)
from ato_jax.triton.arithmetic import round_to_bfloat16


class Found(NamedTuple):
    """A tile's weights times 2^shift, as the products and gradients use them."""

    p: jax.Array  # [block_q, block_k]
    dropped: jax.Array  # p as it multiplies v, in the dtype of the products
    kept: jax.Array | None
    slope: jax.Array | None
    sink: Any  # the sink's weight, [block_q, 1]


def found_weights(tile: Pair, product: jax.Array, fast_exp2: bool) -> Found:
    spec = tile.pairs.spec
    _, total, p, slope, sink = weigh(tile, product, fast_exp2)
    total = not_zero(total)
    p = p * (2.0 ** shift(spec) / total)
    kept = tile.pairs.kept(tile.h, tile.query, tile.key)
    dropped = p if kept is None else jnp.where(kept, p, 0.0)
    return Found(p, dropped.astype(spec.dtype), kept, slope, sink / total)


def score_gradient(
    tile: Pair, found: Found, dp: jax.Array, dlse: Any, gain: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """ds times 2^shift and the gain, float32, and dsink [block_q, 1]."""
    spec = tile.pairs.spec
    dp = weight_gradient(spec, dp, found.kept, gain)
    delta = jnp.sum(found.p * dp, axis=1, keepdims=True) * 2.0 ** -shift(spec)
    if dlse is not None:
        delta = delta - (dlse if gain is None else dlse * gain)
    ds = found.p * (dp - delta)
    if found.slope is not None:
        ds = ds * found.slope
    dsink = -found.sink * (delta if gain is None else delta / gain)
    return ds, dsink


def factors_of(spec: AttentionSpec, w: jax.Array) -> tuple[jax.Array, ...]:
    """Weights or their gradients as the factors of products: rounded to the dtype, and what the
    rounding left off where w holds it and the call needs it."""
    rounded = w.astype(spec.dtype)
    if w.dtype == rounded.dtype or not may_have_alike_gradients(spec):
        return (rounded,)
    nearest = round_to_bfloat16(w) if spec.dtype == "bfloat16" else rounded.astype(jnp.float32)
    return rounded, (w - nearest).astype(spec.dtype)


def transposed_dot(spec: AttentionSpec, a: jax.Array, b: jax.Array) -> jax.Array:
    """a^T . b"""
    return dot(spec, a.T, b)


def dots(spec: AttentionSpec, parts: Sequence[jax.Array], b: jax.Array) -> jax.Array:
    """a . b, where a is the sum of its parts."""
    first, *others = (dot(spec, part, b) for part in parts)
    return sum(others, first)
