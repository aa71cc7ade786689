"""Zigzag order: a sequence whose parts take each device the same time in causal attention.

A late query sees many keys and an early one few. The sequence is cut into 2 n chunks, and device d
of n gets chunks d and 2 n - 1 - d, so that each has early and late queries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ato_jax import meshes, shapes


def positions(order: str, index: jax.Array | int, devices: int, rows: int) -> jax.Array:
    """Where the rows of device `index` stand in the whole sequence, [rows] int32."""
    if order == "contiguous":
        return index * rows + jnp.arange(rows, dtype=jnp.int32)
    own = jnp.arange(rows // 2, dtype=jnp.int32)
    size = rows // 2
    return jnp.concatenate([index * size + own, (2 * devices - 1 - index) * size + own])


def zigzag(x: ArrayLike, devices: int, axis: int = 1) -> jax.Array:
    """Puts a whole sequence into zigzag order, so that equal parts of it balance causal attention.

    The sequence is cut into 2 n chunks for n devices; device d gets chunks d and 2 n - 1 - d.
    Whatever belongs to a row, such as its position for rotary embeddings or its segment id, has to
    be put into the same order. It is done once, ahead of the first layer.

    Args:
      x: An array with the whole sequence along one axis, outside of `jax.shard_map`.
      devices: n, the number of devices along the mesh axis that cuts the sequence.
      axis: The axis of the sequence, whose size is a multiple of 2 n.

    Returns:
      The array in zigzag order, to be cut into n equal parts along `axis`.

    Raises:
      ValueError: `devices` is no int of at least 1, `axis` no axis of x, or its size no multiple of
        2 n.

    Example:
      >>> import ato_jax.parallel, jax.numpy as jnp
      >>> ato_jax.parallel.zigzag(jnp.arange(8), 2, axis=0).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _permuted(x, devices, axis, back=False)


def unzigzag(x: ArrayLike, devices: int, axis: int = 1) -> jax.Array:
    """Undoes `zigzag`.

    Args:
      x: An array in zigzag order, the whole of it.
      devices: n, as it was given to `zigzag`.
      axis: The axis of the sequence.

    Returns:
      The array with the sequence in its own order.

    Raises:
      ValueError: As in `zigzag`.

    Example:
      >>> import ato_jax.parallel, jax.numpy as jnp
      >>> x = ato_jax.parallel.zigzag(jnp.arange(8), 2, axis=0)
      >>> ato_jax.parallel.unzigzag(x, 2, axis=0).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _permuted(x, devices, axis, back=True)


def _permuted(x: ArrayLike, devices: int, axis: Any, back: bool) -> jax.Array:
    """x put into zigzag order along the axis, or `back` into its own."""
    devices = shapes.positive_int("devices", devices)
    x = shapes.as_array("x", x)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be an axis of x, an int, got {axis!r} and shape {x.shape}")
    axis %= x.ndim
    if x.shape[axis] % (2 * devices):
        raise ValueError(
            f"x must have a multiple of 2 * devices rows, {2 * devices}, along axis {axis}, got "
            f"shape {x.shape}; pad it, and give lengths"
        )

    def permuted(x: jax.Array) -> jax.Array:
        # No `jnp.take`: XLA would gather a sharded x for it, and it sends slices for these.
        split = (devices, 2) if back else (2, devices)
        rows = x.shape[axis] // (2 * devices)
        chunks = x.reshape(*x.shape[:axis], *split, rows, *x.shape[axis + 1 :])
        early, late = jnp.moveaxis(chunks, axis + back, 0)  # [..., n, rows, ...] each
        halves = [early, jnp.flip(late, axis)]
        return jnp.stack(halves, axis + (not back)).reshape(x.shape)

    partition = lambda: meshes.sharded(*meshes.partition(x))  # noqa: E731
    permuted_x: jax.Array = meshes.call(permuted, x, partition)
    return permuted_x
