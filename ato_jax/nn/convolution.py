"""A short causal convolution of each channel over time, ahead of the delta rule.

    y_t = sum_w kernel[size - 1 - w] x_{t-w}        w = 0 .. size - 1, kernel [size, C]

A tap that reaches behind the first token reads `before`, the size - 1 tokens ahead of the call, or
the zeros of an empty sequence. It never reads another segment, nor a hidden step: `visible_first`
moves the visible steps together, so that the steps ahead of one are the visible ones ahead of it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax.parallel.devices import AxisName, devices_along


class Order(NamedTuple):
    """The visible steps of each sequence ahead of its hidden ones."""

    steps: jax.Array  # [B, T] int32, which step stands at each place
    places: jax.Array  # [B, T] int32, where each visible step stands
    visible: jax.Array  # [B] int32, how many are visible

    def apply(self, array: jax.Array) -> jax.Array:
        """[B, T, ...] in this order."""
        return _take(array, self.steps)

    def undo(self, array: jax.Array) -> jax.Array:
        """[B, T, ...] in the order of time; what a hidden step gets has no meaning."""
        return _take(array, self.places)


def visible_first(visible: jax.Array) -> Order:
    """`visible` [B, T] booleans."""
    count = jnp.cumsum(visible, axis=1, dtype=jnp.int32)
    return Order(
        jnp.argsort(~visible, axis=1, stable=True).astype(jnp.int32),
        jnp.where(visible, count - 1, 0),
        count[:, -1],
    )


def _take(array: jax.Array, indices: jax.Array) -> jax.Array:
    """array[b, indices[b, i]]."""
    indices = jnp.expand_dims(indices, tuple(range(2, array.ndim)))
    return jnp.take_along_axis(array, indices, axis=1)


def convolve(
    x: jax.Array, kernel: jax.Array, before: jax.Array, ids: jax.Array | None
) -> jax.Array:
    """y [B, T, C] in x's dtype, summed in float32.

    Args:
      x: [B, T, C].
      kernel: [size, C].
      before: [B, size - 1, C], the tokens ahead of x.
      ids: [B, size - 1 + T] integers, the segments of `before` and x; None for one segment.
    """
    reach, T = kernel.shape[0] - 1, x.shape[1]
    extended = jnp.concatenate([before, x], axis=1).astype(jnp.float32)
    kernel = kernel.astype(jnp.float32)
    found, same = kernel[reach, None, None] * extended[:, reach:], jnp.ones((1, 1), bool)
    for first in reversed(range(reach)):
        tap = lax.slice_in_dim(extended, first, first + T, axis=1)
        if ids is not None:
            here, next_to_it = (
                lax.slice_in_dim(ids, start, start + T, axis=1) for start in (first, first + 1)
            )
            same = same & (here == next_to_it)
            tap = jnp.where(same[..., None], tap, 0)
        found += kernel[first, None, None] * tap
    return found.astype(x.dtype)


def tail(x: jax.Array, before: jax.Array, count: jax.Array | None) -> jax.Array:
    """The last tokens of `before` [B, size - 1, C] and the first `count` [B] of x, or all of it;
    as many as `before` has."""
    reach, T = before.shape[1], x.shape[1]
    extended = jnp.concatenate([before, x], axis=1)
    if count is None:
        return lax.slice_in_dim(extended, T, T + reach, axis=1)
    return _take(extended, count[:, None] + jnp.arange(reach, dtype=jnp.int32))


def from_device_ahead(array: jax.Array, size: int, axis_name: AxisName) -> jax.Array:
    """The last `size` steps [B, size, ...] of the device ahead along the axis; zeros on the first.

    Raises:
      ValueError: A device has fewer steps.
    """
    if array.shape[1] < size:
        raise ValueError(
            f"context_axis needs at least conv_size - 1 = {size} tokens on each device, "
            f"got T={array.shape[1]}"
        )
    devices = devices_along(axis_name, "context_axis")
    last = lax.slice_in_dim(array, array.shape[1] - size, array.shape[1], axis=1)
    onwards = [(device, device + 1) for device in range(devices.count - 1)]
    return lax.ppermute(last, axis_name, onwards)
