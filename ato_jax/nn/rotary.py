"""Rotary positions (RoPE): queries and keys turned by their positions.

    (x[d], x[d + D/2]) is turned by the angle position * theta^(-2d/D),  d = 0 .. D/2 - 1

The halves of a head are paired, as in nnx.RoPE.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import programs, shapes
from ato_jax.parallel.devices import Devices, comparable


def as_positions(positions: Any) -> jax.Array:
    """`input_positions` as a JAX array of numbers."""
    found = shapes.dtype_name("input_positions", positions)
    if not found.startswith(("int", "uint", "float", "bfloat")):
        raise ValueError(f"input_positions must hold integers or floats, got {found}")
    return shapes.as_array("input_positions", positions)


def positions_in_segments(segment_ids: jax.Array) -> jax.Array:
    """Positions [B, T] that count from 0 in each run of equal ids [B, T]."""
    positions = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    begins = jnp.pad(~same, ((0, 0), (1, 0)), constant_values=True)
    return positions - jax.lax.cummax(jnp.where(begins, positions, 0), axis=1)


def positions_over_devices(segment_ids: jax.Array, devices: Devices) -> jax.Array:
    """`positions_in_segments` where devices hold contiguous parts of ids [B, T]. A segment may
    continue from one device to the next."""
    own = positions_in_segments(segment_ids)
    T = own.shape[1]
    segment_ids = comparable("segment_ids", segment_ids)
    ends = jnp.stack([segment_ids[:, 0], segment_ids[:, -1], own[:, -1] + 1], axis=1)
    ends = devices.gather(ends)  # [devices, B, 3]
    continues = jnp.pad(ends[1:, :, 0] == ends[:-1, :, 1], ((1, 0), (0, 0)))
    ahead = [jnp.zeros_like(ends[0, :, 2])]  # rows of each device's first run on earlier devices
    for number in range(devices.count - 1):
        last = ends[number, :, 2]
        last = jnp.where(last == T, T + ahead[-1], last)  # all rows are one run
        ahead.append(jnp.where(continues[number + 1], last, 0))
    in_first = own == jnp.arange(T, dtype=jnp.int32)
    return own + jnp.where(in_first, jnp.stack(ahead)[devices.index][:, None], 0)


@functools.partial(jax.jit, static_argnames="theta", inline=True)  # one program, not a dozen
@programs.promoting_ranks
def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """x [B, T, H, D], its pairs turned by the positions [B|1, T].

    Angles and products are float32; the result has x's dtype.
    """
    size = x.shape[-1]
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)  # [D/2]
    angles = (positions[..., None].astype(jnp.float32) * frequencies)[:, :, None]  # [B, T, 1, D/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
