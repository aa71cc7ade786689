"""Feature maps that are not elementwise, FAVOR+: phi(q) and phi(k) are arrays in bfloat16, of which
the kernels are given queries and keys whose features are what they are.

    out = attend(phi(q), phi(k), v)                    the kernels, D = F, features of one sign

Traffic without a decay, in rows of D = V = 64 columns of q, k, v or out, at F = 128, where an
elementwise map has 4 at the least: 12 where every query sees every key (the map reads 2 and writes
4, the sums read 3, the output reads 2 and writes 1), and 15 where causal. So the byte limit's share
is at most 0.33, causal 0.27. At D = V = F = 128 it is 0.5 and 0.4.

Gradients are Triton's: by these kernels, with 256 rows of scale 2.5, the worst row of dk was 2.8e-2
off. The pull-back is a difference, in which the roundings of S, of dS and of the features to
bfloat16 weigh; that of the features' gradient itself adds little (`triton/projected.py`).
"""

from __future__ import annotations

import dataclasses

from ato_jax.ops.linear_attention import random_features
from ato_jax.ops.linear_attention.features import FeatureMap
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec

# "identity" is not known to be nonnegative. These features are.
FEATURES = FeatureMap("identity", True, lambda x: x)


def inner_spec(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    """The call that the kernels take."""
    return dataclasses.replace(spec, D=spec.F, feature_map=FEATURES)


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    """What does not lie in the kernels' call."""
    if spec.feature_map.name != "favor":
        return f"takes elementwise feature maps and favor, {spec.feature_map.name} is neither"
    if spec.dtype != "bfloat16":
        return f"needs bfloat16 with features that are not elementwise, got {spec.dtype}"
    if phase == "backward":
        return "does not support the gradients of features that are not elementwise"
    return None


def inner_inputs(spec: LinearAttentionSpec, inputs: Inputs) -> Inputs:
    """phi(q) and phi(k) instead of q and k."""
    (projection,) = inputs.feature_parameters
    counted = random_features.counted(spec, inputs)
    of_q, of_k = (random_features.features_of(x, projection) for x in counted)
    return inputs._replace(q=of_q, k=of_k, feature_parameters=())
