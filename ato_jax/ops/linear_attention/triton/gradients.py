"""The normaliser's terms in the backward, and the results that its passes hand on.

With y_i [F] and z_i [F] what query i reads of the values and of the keys (`causal.py`):

    den_i     = max(phi(q_i) . z_i, eps)
    e_i       = -(phi(q_i) . y_i) / den_i, 0 where phi(q_i) . z_i <= eps or not normalize
    d_phi_q_i = (y_i + e_i z_i) / den_i
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


class Normalizer(NamedTuple):
    """The normaliser's terms, which the pass for dk and dv reads, [B, H, T] float32."""

    e: jax.Array
    inverse: jax.Array  # 1 / den


class QueryGradient(NamedTuple):
    """The results of the pass for dq."""

    dq: jax.Array
    # dS^T and dz of each piece with queries, [B, H, pieces, V, F] and [B, H, pieces, F].
    sides: list[tuple[jax.Array, jax.Array]]
    normalizer: Normalizer | None
    # For the decay's gradient, by steps, [B, H, steps]: what each query reads from the states,
    # and all that it reads, which its own decay multiplies.
    reads: list[jax.Array]
    own: jax.Array | None


def normalizer_terms(
    spec: LinearAttentionSpec,
    features: list[jax.Array],
    y: list[jax.Array],
    z: list[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """e and 1 / den, [T_block], from phi(q), y and each row's z, [T_block or 1, F] in parts."""

    def row_sums(left: list[jax.Array], right: list[jax.Array]) -> jax.Array:
        # One sum for all parts: each sum over a row may take two barriers between the warps.
        products = [a * b for a, b in zip(left, right, strict=True)]
        return jnp.sum(functools.reduce(jnp.add, products), axis=1)

    weight = row_sums(features, z)
    inverse = 1 / jnp.maximum(weight, spec.eps)
    e = jnp.where(weight > spec.eps, -inverse * row_sums(features, y), 0.0)
    return e, inverse


def feature_gradient(
    y: jax.Array, z: jax.Array | None, e: jax.Array | None, inverse: jax.Array
) -> jax.Array:
    """d_phi_q, [C, F], from the y and z of each query."""
    if e is not None and z is not None:
        y += e[:, None] * z
    return y * inverse[:, None]
