"""Layers for tests, made without compiling and called in one program each.

Outside of jit every step is a program for XLA to compile, for each shape anew, the drawing of each
parameter included. At the sizes of tests that takes longer than all else.
"""

from __future__ import annotations

import functools
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
    nnx.update(layer, jax.tree.map(jax.device_put, nnx.state(layer, nnx.Param)))
    return layer


@functools.partial(nnx.jit, static_argnames=("decode", "deterministic", "is_causal"))
def jitted(layer: Any, *inputs: Any, **options: Any) -> Any:
    """The call in one program, which layers alike share."""
    return layer(*inputs, **options)
