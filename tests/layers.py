"""Layers for tests, made without compiling: XLA takes longer than all else for a layer that small.

An initialiser of JAX is a program for every shape of a parameter, and so is each step around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def normal(scale: float | None = None) -> Callable[..., Any]:
    """An initialiser by NumPy, of that standard deviation; None is LeCun's, as Flax's own.

    Inside a transform the key is not known, and JAX draws.
    """

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> Any:
        deviation = math.prod(shape[:-1]) ** -0.5 if scale is None else scale
        if isinstance(key, jax.core.Tracer):
            return jax.random.normal(key, shape, dtype) * deviation
        seed = np.asarray(jax.random.key_data(key))
        return (np.random.default_rng(seed).normal(size=shape) * deviation).astype(dtype)

    return draw


def on_device(layer: Any) -> Any:
    """The layer with arrays of JAX, whatever its initialisers returned."""
    nnx.update(layer, jax.tree.map(jnp.asarray, nnx.state(layer, nnx.Param)))
    return layer
