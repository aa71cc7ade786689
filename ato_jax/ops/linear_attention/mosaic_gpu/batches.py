"""`as_larger_batch`: under `vmap` a function runs once, with the mapped axis as a part of B.

The backend (`__init__.py`) decorates its functions with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ato_jax.ops.linear_attention.mosaic_gpu import (
    causal_pieces,
    channel_blocks,
    frame,
    narrow,
    value_blocks,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def spec_in_tiles(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    if channel_blocks.is_cut(spec):
        return channel_blocks.in_blocks(spec)
    return value_blocks.in_blocks(spec) if value_blocks.is_cut(spec) else narrow.in_tiles(spec)


def as_larger_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under `vmap` the mapped axis becomes a part of B, since one grid is made for the whole
    card."""

    @functools.wraps(function)
    def call(spec: LinearAttentionSpec, config: Config, *arrays: Any) -> Any:
        if spec.causal or spec.decay or frame.by_runs(spec):
            # The saved arrays have the same shape whatever the size of the batch.
            pieces = causal_pieces.pieces_of(spec_in_tiles(spec), config)
            config = dataclasses.replace(config, pieces=pieces)

        @custom_vmap
        def run(*arrays: Any) -> Any:
            return function(spec, config, *arrays)

        @run.def_vmap
        def _(size: int, batched: Any, *arrays: Any) -> Any:
            if not size:
                one = jax.tree.map(
                    lambda array, is_batched: jax.ShapeDtypeStruct(
                        array.shape[is_batched:], array.dtype
                    ),
                    arrays,
                    tuple(batched),
                )
                shapes = jax.eval_shape(functools.partial(function, spec, config), *one)
                found = jax.tree.map(lambda of: jnp.zeros((0, *of.shape), of.dtype), shapes)
                return found, jax.tree.map(lambda _: True, found)

            def fold(array: jax.Array, is_batched: bool) -> jax.Array:
                if not is_batched:
                    array = jnp.broadcast_to(array, (size, *array.shape))
                return array.reshape(-1, *array.shape[2:])

            larger = dataclasses.replace(spec, B=size * spec.B)
            found = call(larger, config, *jax.tree.map(fold, arrays, tuple(batched)))
            parted = jax.tree.map(lambda array: array.reshape(size, -1, *array.shape[1:]), found)
            return parted, jax.tree.map(lambda _: True, found)

        return run(*arrays)

    return call
