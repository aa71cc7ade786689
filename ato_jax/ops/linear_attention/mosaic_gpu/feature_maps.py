"""elu(x) + 1 of tiles, in place and in registers; with a decay, times that."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import HALF
from ato_jax.ops.linear_attention.mosaic_gpu.frame import LOG2_E
from ato_jax.ops.linear_attention.mosaic_gpu.narrow import Narrow
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# A key of which the feature is 0, with any decay.
LEAST_KEY = -1024.0


def features_of(x: jax.Array) -> jax.Array:
    """elu(x) + 1 in bfloat16; its derivative is the smaller of it and 1.

    Two to an instruction but for exp, and the same as in float32, mosaic.rounded at the end.
    """
    raised = jnp.exp2(jnp.minimum(x, 0).astype(mosaic.F32) * LOG2_E)
    return jnp.maximum(x + 1, raised.astype(mosaic.BF16))


def unrounded_features_of(x: jax.Array) -> jax.Array:
    x = x.astype(mosaic.F32)
    return jnp.maximum(x + 1, jnp.exp2(jnp.minimum(x, 0.0) * LOG2_E))


def decayed_features_of(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """The features of rows times exp2 of `exponents` [rows], mosaic.rounded once."""
    x = x.astype(mosaic.F32)
    return mosaic.rounded(
        unrounded_decayed_features_of(x, mosaic.in_columns(exponents, x.shape[1]))
    )


def unrounded_decayed_features_of(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """The same of x in float32, with an exponent of its own for each element."""
    factor = jnp.exp2(exponents)
    raised = jnp.exp2(jnp.minimum(x, 0.0) * LOG2_E + exponents)
    return jnp.maximum(x * factor + factor, raised)


def map_in_place(ref: Any) -> None:
    """Features of a tile in shared memory, where they replace it."""
    ref[...] = features_of(mosaic.load(ref))


def map_keys_in_place(
    spec: LinearAttentionSpec, ref: Any, half: int, exponents: jax.Array | None = None
) -> None:
    """The same of half a tile of keys; with a decay, times that."""
    x = keys(spec, mosaic.load(ref), half * HALF)
    ref[...] = features_of(x) if exponents is None else decayed_features_of(x, exponents)


def keys(spec: LinearAttentionSpec, x: jax.Array, first: Any = 0, axis: int = 1) -> jax.Array:
    """From that column of a tile on, or row of its transpose: where a head has none, what has
    features of 0."""
    if not isinstance(spec, Narrow):
        return x
    if isinstance(first, int) and first + x.shape[axis] <= spec.width:
        return x
    column = first + plgpu.broadcasted_iota(jnp.int32, x.shape, dimension=axis, layout=mosaic.TILE)
    return jnp.where(column < spec.width, x, LEAST_KEY)
