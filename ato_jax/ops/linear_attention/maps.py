"""The feature map of a call: custom functions that only look alike are kept apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention import features

# What a jaxpr's text does not tell apart: rules of derivatives, and functions of the host.
HIDING = ("custom_jvp", "custom_vjp", "callback")


def _hides_something(closed: Any) -> bool:
    """Whether a custom map may differ from another of the same text, and is only itself."""
    inner = [
        parameter
        for equation in closed.jaxpr.eqns
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr")
        )
        if hasattr(parameter, "jaxpr")
    ]
    names = [equation.primitive.name for equation in closed.jaxpr.eqns]
    return (
        any(word in name for name in names for word in HIDING)
        or any(one.consts for one in inner)
        or any(map(_hides_something, inner))
    )


def resolve(
    feature_map: Any, D: int
) -> tuple[features.FeatureMap, tuple[jax.Array, ...], int]:
    """The map, its parameters and the feature size F for keys of size D."""
    phi, parameters, size = features.resolve(feature_map, D)
    if phi.name == "custom" and _hides_something(jax.make_jaxpr(feature_map)(jnp.float32(0))):
        # Held by the map, so that no other function gets its number.
        phi = dataclasses.replace(phi, text=f"{phi.text} {id(feature_map)}")
    return phi, parameters, size
