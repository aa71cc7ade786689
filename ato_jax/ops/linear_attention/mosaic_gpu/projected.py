"""Feature maps that are not elementwise, FAVOR+: phi(q) and phi(k) are arrays in bfloat16, of which
the kernels are given queries and keys whose features are what they are.

    out = attend(phi(q), phi(k), v)                    the kernels, D = F, features of one sign

Traffic without a decay, in rows of D = V = 64 columns of q, k, v or out, at F = 128, where an
elementwise map has 4 at the least: 12 where every query sees every key (the map reads 2 and writes
4, the sums read 3, the output reads 2 and writes 1), and 15 where causal. So the byte limit's share
is at most 0.33, causal 0.27. At D = V = F = 128 it is 0.5 and 0.4.

By the gradients of these kernels, with 256 rows of scale 2.5, the worst row of dk was 2.8e-2 off.
The pull-back is a difference, in which the roundings of S, of dS and of the features to bfloat16
weigh; that of the features' gradient itself adds little (`triton/projected.py`). So gradients have
kernels of their own where every query sees every key (`projected_whole.py`), which read and
write 9 such rows, at any number of features. Causal gradients are those
of the float32 kernels (`float32_causal.py`). All others are Triton's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ato_jax.mosaic import F32
from ato_jax.ops.linear_attention import random_features
from ato_jax.ops.linear_attention.features import FeatureMap
from ato_jax.ops.linear_attention.mosaic_gpu import causal, frame, projected_whole
from ato_jax.ops.linear_attention.mosaic_gpu.narrow import STEP
from ato_jax.ops.linear_attention.mosaic_gpu.projected_whole import least_of
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)

# "identity" is not known to be nonnegative. These features are.
FEATURES = FeatureMap("identity", True, lambda x: x)
# D = V of `projected_whole.py`.
SIZES = 64, 128


def inner_spec(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    """The call that the kernels take."""
    return dataclasses.replace(spec, D=spec.F, feature_map=FEATURES)


def in_parts(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    """The call whose gradients the kernels take where causal."""
    phi = random_features.OWN_SLOPE
    return dataclasses.replace(spec, D=spec.F, feature_map=phi, dtype="float32", precision="tf32")


def is_whole(spec: LinearAttentionSpec) -> bool:
    """Whether the call is one of `projected_whole.py`."""
    alone = spec.causal or spec.decay or spec.segments
    return not alone and spec.D == spec.V and spec.D in SIZES and spec.F <= frame.F


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    """What does not lie in the kernels' call."""
    if spec.feature_map.name != "favor":
        return f"takes elementwise feature maps and favor, {spec.feature_map.name} is neither"
    if spec.dtype != "bfloat16":
        return f"needs bfloat16 with features that are not elementwise, got {spec.dtype}"
    if spec.decay == "channel":
        return "does not support a decay per channel with features that are not elementwise"
    if phase == "forward" or is_whole(spec):
        ragged = spec.T % frame.ROWS_OF_A_TILE or spec.S % frame.ROWS_OF_A_TILE
        if is_whole(spec) and ragged:
            rows = f"multiples of {frame.ROWS_OF_A_TILE} rows"
            return f"needs {rows} without causal=True, got {spec.T} and {spec.S}"
        if is_whole(spec) and spec.F % STEP:
            return f"needs a multiple of {STEP} features without causal=True, got {spec.F}"
        return None
    beside = "a decay or segments" if spec.decay or spec.segments else ""
    if spec.causal and (spec.q_lengths or spec.kv_lengths):
        beside = "causal=True and lengths"
    if beside:
        return f"does not support the gradients of features that are not elementwise with {beside}"
    if spec.causal and spec.D > frame.F:
        return f"needs at most {frame.F} columns of q and k for their gradients, got {spec.D}"
    if spec.causal:
        return None
    return (
        f"needs D = V = {' or '.join(map(str, SIZES))} and at most {frame.F} features for their "
        f"gradients, got D={spec.D}, V={spec.V} and {spec.F} features"
    )


def inner_inputs(spec: LinearAttentionSpec, inputs: Inputs) -> Inputs:
    """phi(q) and phi(k) instead of q and k."""
    (projection,) = inputs.feature_parameters
    counted = random_features.counted(spec, inputs)
    of_q, of_k = (random_features.features_of(x, projection) for x in counted)
    return inputs._replace(q=of_q, k=of_k, feature_parameters=())


def inputs_in_parts(spec: LinearAttentionSpec, inputs: Inputs) -> Inputs:
    """The inputs of the call whose spec is `in_parts`."""
    (projection,) = inputs.feature_parameters
    q, k = (random_features.features_of(x, projection, F32) for x in (inputs.q, inputs.k))
    return inputs._replace(q=q, k=k, v=inputs.v.astype(F32), feature_parameters=())


def kept_in_parts(spec: LinearAttentionSpec, kept: causal.Kept) -> causal.Kept:
    """With an output in bfloat16 and, where gradients read it, what rounding it left off."""
    if not spec.normalize:
        return kept._replace(out=kept.out.astype(jnp.bfloat16))
    rounded = jax.lax.reduce_precision(kept.out, exponent_bits=8, mantissa_bits=7)
    out, rest = (x.astype(jnp.bfloat16) for x in (rounded, kept.out - rounded))
    return kept._replace(out=out, rest=rest)


def gradients_in_parts(
    backward: Callable[..., Inputs],
    spec: LinearAttentionSpec,
    residuals: Residuals,
    cotangents: Outputs,
) -> Inputs:
    """`backward(spec, residuals, cotangents)` is that of `in_parts`."""
    inputs, kept = residuals
    if isinstance(kept, causal.Kept):
        out = kept.out.astype(F32)
        kept = kept._replace(out=out if kept.rest is None else out + kept.rest, rest=None)
    found = backward(
        in_parts(spec),
        Residuals(inputs_in_parts(spec, inputs), kept),
        cotangents._replace(out=cotangents.out.astype(F32)),
    )
    return random_features.pulled_back(spec, inputs, found)


def whole_inputs(spec: LinearAttentionSpec, inputs: Inputs) -> tuple[Inputs, jax.Array]:
    """The inputs of `projected_whole.py`, and the parts of the projection."""
    (projection,) = inputs.feature_parameters
    q, k = random_features.counted(spec, inputs)
    v = random_features.without_padding(spec, inputs.v, inputs.kv_lengths)
    inputs = inputs._replace(q=q, k=k, v=v, feature_parameters=())
    return inputs, projected_whole.parts_of_projection(spec.B, projection)


def gradient_of_projection(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    projection: jax.Array,
    g: jax.Array,
    state: LinearState,
    sums: LinearState,
) -> jax.Array:
    """The gradient of the projection, which few calls ask for: by XLA, in float32, from arrays of
    features and of their gradients.

    Args:
      inputs: padding is 0 in them.
      g: the cotangent of out, 0 in padding.
      state: S and z, and `sums` R and u.
    """
    exactly = jax.lax.Precision.HIGHEST
    axis = spec.layout.index("h")
    phi_q, phi_k = (
        random_features.features_of(x, projection, jnp.float32) for x in (inputs.q, inputs.k)
    )

    def in_groups(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return x.reshape(*x.shape[:axis], spec.G, spec.H // spec.G, *x.shape[axis + 1 :])

    def of_kv_heads(x: jax.Array) -> jax.Array:
        """[B, G, F] beside rows of keys."""
        return jnp.expand_dims(x, 3 - axis)

    queries, keys = ("btgr", "btg") if axis == 2 else ("bgrt", "bgt")
    d_q = jnp.einsum(
        f"{queries}v,bgfv->{queries}f", in_groups(g), state.kv * spec.scale, precision=exactly
    )
    if spec.normalize:
        phi, z = in_groups(phi_q), state.k_sum
        den, of_e = (
            jnp.einsum(f"{queries}f,bgf->{queries}", phi, z, precision=exactly),
            jnp.sum(phi * d_q, axis=-1),
        )
        least = least_of(spec)
        inverse = 1.0 / jnp.maximum(den, least)
        e = jnp.where(den > least, of_e * inverse, 0.0)
        d_q = d_q - jnp.einsum(f"{queries},bgf->{queries}f", e, z, precision=exactly)
        d_q = d_q * inverse[..., None]
    v = inputs.v.astype(jnp.float32)
    d_k = jnp.einsum(f"{keys}v,bgfv->{keys}f", v, sums.kv, precision=exactly)
    d_k = d_k + of_kv_heads(sums.k_sum)
    of_q = random_features.gradient_of_projection(inputs.q, d_q.reshape(phi_q.shape) * phi_q)
    of_k = random_features.without_padding(spec, d_k * phi_k, inputs.kv_lengths)
    found = of_q + random_features.gradient_of_projection(inputs.k, of_k)
    return found.astype(projection.dtype)
