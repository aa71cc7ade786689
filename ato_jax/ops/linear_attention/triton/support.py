"""The calls that the Triton kernels of linear attention support, and why they refuse the rest."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import meshes
from ato_jax.ops.linear_attention.features import FeatureMap
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import projected, split
from ato_jax.triton.tiles import COLUMNS

# Beyond these sizes V would be cut into so many blocks that q and k, read for each of them, were
# most of the traffic.
LARGEST_F = 256
LARGEST_V = 512
# With a decay per step and channel V is not cut, and its tiles have to fit the shared memory.
LARGEST_GATED_V = 256

# The primitives that Pallas lowers to Triton elementwise, and of which feature maps and their
# derivatives consist.
ELEMENTWISE = frozenset(
    "abs add add_any and ceil convert_element_type cos custom_jvp_call div eq exp exp2 "
    "expm1 floor ge gt integer_pow is_finite jit le log log1p logistic lt max min mul ne neg not "
    "one_minus_square or pow rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh "
    "broadcast_in_dim".split()
)


def _primitives(jaxpr: Any) -> set[str]:
    """The names of a jaxpr's primitives, at any depth."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr")
        ):
            if hasattr(parameter, "jaxpr"):
                found |= _primitives(parameter.jaxpr)
    return found


@functools.lru_cache(maxsize=1024)
def unsupported_map(feature_map: FeatureMap) -> str | None:
    """Why a kernel, which gives the map x alone, cannot compute it; None where it can."""
    if not feature_map.elementwise:
        return f"feature map {feature_map.name!r} is not elementwise"
    if feature_map.parameters:
        return f"feature map {feature_map.name!r} closes over arrays"
    x = jax.ShapeDtypeStruct((COLUMNS, COLUMNS), jnp.float32)
    try:
        with meshes.nowhere():
            closed = jax.make_jaxpr(lambda x: jax.jvp(feature_map, (x,), (jnp.ones_like(x),)))(x)
    except Exception as error:  # the map is the user's, and so may be the rule of its derivative
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"feature map {feature_map.name!r} has no derivative: {reason}"
    if others := _primitives(closed.jaxpr) - ELEMENTWISE:
        return f"feature map {feature_map.name!r} uses {', '.join(sorted(others))}"
    return None


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    """Why the kernels cannot take the call in this phase; None where they can."""
    spec = projected.inner_spec(spec, phase)
    if spec.decay == "channel":
        if not spec.causal:
            return "a gate per step and channel is not supported without causal=True"
        if spec.segments or spec.q_lengths or spec.kv_lengths:
            return "a gate per step and channel is not supported with segments or lengths"
        if split.blocks(spec) > 1 or spec.V > LARGEST_GATED_V:
            return (
                "a gate per step and channel is supported up to D * V = 128 * 128 and "
                f"V = {LARGEST_GATED_V}, got D={spec.D}, V={spec.V}"
            )
    if spec.F > LARGEST_F or spec.V > LARGEST_V:
        return f"states up to D = {LARGEST_F}, V = {LARGEST_V}, got D={spec.D}, V={spec.V}"
    if min(spec.B, spec.T, spec.S) < 1:
        return f"empty arrays, got B={spec.B}, T={spec.T}, S={spec.S}"
    return unsupported_map(spec.feature_map)
