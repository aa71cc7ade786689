"""Queries and keys on one timeline, for any layout, lengths, segments and positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.alignment import runs_of_keys, sort_steps, sum_between
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec


class Timeline(NamedTuple):
    """N steps, each with a query, a key or both, heads before time; absent arrays are None.

    R = H / G query heads share a kv head. `cut` adds an axis of chunks in front, and has C steps in
    place of N.
    """

    q: Any = None  # [B, G, R, N, D]
    k: Any = None  # [B, G, N, D]
    v: Any = None  # [B, G, N, V]
    decay: Any = None  # [B, G, N, 1 or F]
    q_decay: Any = None  # [B, G, N, 1 or F], between the query and its step
    run: Any = None  # [B, N], the run of keys at each step, never decreasing
    asked: Any = None  # [B, N], whether there is a query; None: everywhere
    real: Any = None  # [B, N], whether there is a key; None: everywhere

    @property
    def length(self) -> int:
        return (self.k if self.q is None else self.q).shape[-2]


TIME_AXES = Timeline(q=3, k=2, v=2, decay=2, q_decay=2, run=1, asked=1, real=1)


def time_slice(timeline: Timeline, start: int, stop: int) -> Timeline:
    return Timeline(
        *(
            None if array is None else jax.lax.slice_in_dim(array, start, stop, axis=axis)
            for array, axis in zip(timeline, TIME_AXES, strict=True)
        )
    )


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def little_padding(most: int, length: int) -> int:
    """The largest power of two up to `most` whose chunks hold at most an eighth of padding."""
    size = min(most, power_of_two(length))
    while size > 1 and -length % size * 8 > length:
        size //= 2
    return size


def cut(timeline: Timeline, size: int) -> Timeline:
    """The timeline in chunks of `size` steps, or in one of the power of two that holds all."""
    length = timeline.length
    size = min(size, power_of_two(length))
    tail = -length % size
    if tail and timeline.real is None and timeline.k is not None:
        timeline = timeline._replace(real=jnp.ones((timeline.k.shape[0], length), bool))

    def chunks(array: jax.Array | None, axis: int, mode: str) -> jax.Array | None:
        if array is None:
            return None
        if tail:
            width = [(0, tail if a == axis else 0) for a in range(array.ndim)]
            array = jnp.pad(array, width, mode=mode)
        shape = (*array.shape[:axis], -1, size, *array.shape[axis + 1 :])
        return jnp.moveaxis(array.reshape(shape), axis, 0)

    return Timeline(
        *(
            chunks(array, axis, "edge" if name == "run" else "constant")
            for name, array, axis in zip(Timeline._fields, timeline, TIME_AXES, strict=True)
        )
    )


def join(chunks: jax.Array, length: int) -> jax.Array:
    """[chunks, B, G, R, C, V] -> [B, G, R, N, V]."""
    chunks = jnp.moveaxis(chunks, 0, 3)
    B, G, group, *_, V = chunks.shape
    return chunks.reshape(B, G, group, -1, V)[:, :, :, :length]


def zero_unless(mask: jax.Array | None, array: jax.Array) -> jax.Array:
    """array [B, G, ..., N, X] where mask [B, N] is true; elsewhere 0, whatever the array holds."""
    if mask is None:
        return array
    between = tuple(range(1, array.ndim - 2))
    return jnp.where(jnp.expand_dims(mask, (*between, -1)), array, 0)


def heads_first(spec: LinearAttentionSpec, inputs: Inputs) -> tuple[Timeline, Timeline]:
    """A timeline of the queries, and one of the keys."""
    B, G = spec.B, spec.G
    q, k, v = inputs.q, inputs.k, inputs.v
    decay: Any = inputs.decay
    if spec.decay == "head":
        decay = jnp.broadcast_to(decay[:, None, None], (B, G, spec.S, 1))
    elif spec.decay == "step":
        decay = decay[..., None]
    if spec.layout == "bthd":
        q, k, v = (jnp.swapaxes(array, 1, 2) for array in (q, k, v))
        decay = jnp.swapaxes(decay, 1, 2) if spec.decay in ("step", "channel") else decay
    asked = real = None
    if inputs.q_lengths is not None:
        asked = jnp.arange(spec.T, dtype=jnp.int32) < inputs.q_lengths[:, None]
    if inputs.kv_lengths is not None:
        real = jnp.arange(spec.S, dtype=jnp.int32) < inputs.kv_lengths[:, None]
    q = q.reshape(B, G, spec.H // G, spec.T, spec.D)
    return Timeline(q=q, asked=asked), Timeline(
        k=k, v=v, decay=decay, run=runs_of_keys(spec, inputs), real=real
    )


def merge(
    spec: LinearAttentionSpec, inputs: Inputs, queries: Timeline, keys: Timeline
) -> tuple[Timeline, jax.Array, jax.Array]:
    """Both sorted onto one timeline of T + S steps.

    Returns:
      the timeline, which queries see any key [B, T], and the steps of the queries [B, T].
    """
    S = spec.S
    run, q_run = keys.run, inputs.q_segments
    order, asked, low, high = sort_steps(spec, inputs, run)
    slots = jnp.argsort(order, axis=1)[:, S:]
    is_key = order < S
    key, query = jnp.where(is_key, order, 0), jnp.where(is_key, 0, order - S)  # [B, T + S]

    def take(array: jax.Array, index: jax.Array) -> jax.Array:
        return jax.vmap(lambda array, index: jnp.take(array, index, axis=-2))(array, index)

    def rows(array: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(array, index, axis=1)

    real = is_key if keys.real is None else is_key & rows(keys.real, key)
    merged = Timeline(
        q=take(queries.q, query),
        k=take(keys.k, key),
        v=take(keys.v, key),
        asked=~is_key & rows(asked, query),
        real=real,
    )
    if q_run is not None:
        q_run = jnp.where(asked, q_run, run[:, -1:])
        merged = merged._replace(run=jnp.where(is_key, rows(run, key), rows(q_run, query)))
    if keys.decay is not None:
        merged = merged._replace(decay=take(keys.decay, key))
        if q_run is not None:
            steps = zero_unless(keys.real, keys.decay)
            q_decay = jax.vmap(sum_between)(steps, low, high)  # [B, G, T, 1 or F]
            merged = merged._replace(q_decay=take(q_decay, query))
    return merged, asked, slots
