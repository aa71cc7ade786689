"""Features phi(x) for kernels that leave only phi(x) d_phi: the gradient d_phi is found again by a
division."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.features import FeatureMap

# Where kernels leave the product phi(x) d_phi for the gradient of a decay, and d_phi is found from
# it, features of maps that may be 0 where their slope is not are never nearer to 0 than this. It is
# 9e-19, and with a factor of 2^-60 still a normal number in bfloat16.
LEAST_OF_FLOWS = 2.0**-60
# Maps with phi(x) = 0 only where phi'(x) = 0.
NEVER_CROSS_ZERO = "elu1", "relu", "relu2", "exp", "softplus"


def of_flows(feature_map: FeatureMap, phi: jax.Array) -> jax.Array:
    """phi(x), and `LEAST_OF_FLOWS` where that is nearer to 0 and the slope may not be 0."""
    if feature_map.name in NEVER_CROSS_ZERO:
        return phi
    return jnp.where(jnp.abs(phi) < LEAST_OF_FLOWS, LEAST_OF_FLOWS, phi)


def slope_by_feature(feature_map: FeatureMap, phi: jax.Array, slope: jax.Array) -> jax.Array:
    """phi'(x) / phi(x), with phi(x) as `of_flows` has it; 0 where both are 0."""
    if feature_map.name not in NEVER_CROSS_ZERO:
        return slope / of_flows(feature_map, phi)
    return jnp.where(phi > 0, slope / phi, 0.0)
