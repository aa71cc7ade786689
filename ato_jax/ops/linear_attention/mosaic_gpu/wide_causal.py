"""The causal passes over heads of 129 to 256 columns, by the walks of `wide_walk.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps
from ato_jax.ops.linear_attention.mosaic_gpu.whole_sums import blocks_of_state, whole_sums
from ato_jax.ops.linear_attention.mosaic_gpu.wide_walk import Role, wide_walk
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

State = tuple[jax.Array, jax.Array]


def piece_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    x: jax.Array,
    y: jax.Array,
    of_rows: Sequence[jax.Array] = (),
) -> State:
    """As `whole_sums`, but [B, heads, P, V, F]."""
    deal = dataclasses.replace(deal, heads=deal.heads * blocks_of_state(spec))
    kv, k_sum = whole_sums(spec, deal, name, x, y, of_rows)
    return jnp.swapaxes(kv, 3, 4), k_sum


def output(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    z: jax.Array,
) -> jax.Array:
    found: jax.Array = wide_walk(spec, deal, Role.OUT, q, k, v, (s, z))
    return found


def query_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq; inverse and e [B, H, T up to a whole chunk], float32.

    e is a quotient of what phi(q) as rounded makes. But inverse is multiplied by phi(q) before it
    is rounded: where all of a row are rounded alike, that would add up.
    """
    length = mosaic.whole_chunks(spec.T)
    inverse = jnp.full((spec.B, spec.H, length), spec.scale, jnp.float32)
    e = jnp.zeros_like(inverse)
    if spec.normalize:
        flows, den = wide_walk(spec, deal, Role.FLOW, q, k, v, (s, z), g)
        usual = den > spec.eps
        inverse = 1 / jnp.maximum(den, spec.eps)
        e = jnp.where(usual, jnp.sum(flows, axis=2) * inverse, 0.0)
        inverse *= jnp.where(usual, _rounded_over_unrounded(spec, q, length), 1.0)
    state = jnp.swapaxes(s, 3, 4), z
    return wide_walk(spec, deal, Role.DQ, g, v, k, state, q, (inverse, e)), inverse, e


def _rounded_over_unrounded(spec: LinearAttentionSpec, q: jax.Array, length: int) -> jax.Array:
    """The sum of each row's features as rounded over what it is unrounded, [B, H, length]. Sums of
    features that may be negative cancel: there each feature counts times itself."""
    phi = feature_maps.features(spec).unrounded_of_rows(q)
    rounded = jax.lax.reduce_precision(phi, 8, 7)
    if spec.feature_map.nonnegative:
        ratio = jnp.sum(rounded, axis=3) / jnp.sum(phi, axis=3)
    else:
        squares = jnp.sum(phi * phi, axis=3)
        ratio = jnp.where(squares > 0, jnp.sum(rounded * phi, axis=3) / squares, 1.0)
    if spec.layout == "bthd":
        ratio = jnp.swapaxes(ratio, 1, 2)
    return jnp.pad(ratio, ((0, 0), (0, 0), (0, length - spec.T)), constant_values=1.0)


def key_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    inverse: jax.Array,
    e: jax.Array,
    r: jax.Array,
    u: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv."""
    dv = wide_walk(spec, deal, Role.DV, k, q, g, (r, u), of_rows=(inverse,))
    state = jnp.swapaxes(r, 3, 4), u
    return wide_walk(spec, deal, Role.DK, v, g, q, state, k, (inverse, e)), dv
