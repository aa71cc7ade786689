"""Queries among keys where their distance is not known beforehand: both on one timeline.

A query of position p that sees the run of keys [start, end] reads the state after key
clip(p, start - 1, end), with the decay of the steps between there and p on top. So queries and
keys can be sorted into one order of T + S steps, along which every query sees what came before it
in its run. Both ways with a decay, it sees what comes after it, too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    positions_of_first_query,
)


class Order(NamedTuple):
    """The steps in order, and of each query what it sees and the decays on top."""

    steps: jax.Array  # [B, T + S]: the key's number, or S + the query's
    asked: jax.Array  # [B, T], whether the query sees anything
    low: jax.Array  # [B, T]: the decays of the steps [low, high) lie
    high: jax.Array  # [B, T]: between the query and the key that it stands after


def runs_of_keys(spec: LinearAttentionSpec, inputs: Inputs) -> jax.Array | None:
    """The run of each key, [B, S]: padding goes with the last keys, so that it ends no run."""
    runs = inputs.kv_segments
    if runs is None or inputs.kv_lengths is None:
        return runs
    last = jnp.maximum(inputs.kv_lengths - 1, 0)[:, None]
    real = jnp.arange(spec.S, dtype=jnp.int32) <= last
    return jnp.where(real, runs, jnp.take_along_axis(runs, last, 1))


def sort_steps(spec: LinearAttentionSpec, inputs: Inputs, runs: jax.Array | None) -> Order:
    """`runs` are those of `runs_of_keys`."""
    B, T, S = spec.B, spec.T, spec.S
    position = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    if spec.causal:
        position += positions_of_first_query(spec, inputs)[:, None]
    asked = jnp.full((B, T), True)
    if inputs.q_lengths is not None:
        asked = jnp.arange(T, dtype=jnp.int32) < inputs.q_lengths[:, None]
    start, end = jnp.zeros((B, T), jnp.int32), jnp.full((B, T), S - 1, jnp.int32)
    if runs is not None:
        assert inputs.q_segments is not None
        search = jax.vmap(jnp.searchsorted)
        start = search(runs, inputs.q_segments).astype(jnp.int32)
        end = search(runs, inputs.q_segments + 1).astype(jnp.int32) - 1
        asked &= start <= end
    if spec.causal:
        asked &= position >= -1  # -1 is where the initial state stands
    after_key = end
    if spec.causal or spec.decay is not None:
        after_key = jnp.clip(position, start - 1, end)
    after_key = jnp.where(asked, after_key, S - 1)

    # After the same key, those that see the run it ends come before those that see the next one.
    key_times = jnp.broadcast_to(3 * jnp.arange(S, dtype=jnp.int32), (B, S))
    query_times = 3 * after_key + jnp.where(after_key < start, 2, 1)
    steps = jnp.argsort(jnp.concatenate([key_times, query_times], axis=1), axis=1)
    return Order(
        steps.astype(jnp.int32),
        asked,
        jnp.clip(jnp.minimum(position, after_key) + 1, 0, S),
        jnp.clip(jnp.maximum(position, after_key) + 1, 0, S),
    )


def sum_between(steps: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """steps [G, S, X], low and high [T] -> [G, T, X], the sums of steps[low:high].

    By blocks of 1, 2, 4, ... steps, at most two of a size: sums of numbers of one sign, where a
    difference of running sums would cancel.
    """
    G, size, channels = steps.shape
    total = jnp.zeros((G, low.shape[0], channels), steps.dtype)
    while size:
        # A block that begins or ends between two larger ones counts alone; the rest is even.
        for block, alone in ((low, low % 2 == 1), (high - 1, high % 2 == 1)):
            counted = (alone & (low < high))[:, None]
            total += jnp.where(counted, steps[:, jnp.clip(block, 0, size - 1)], 0)
        low, high = (low + 1) // 2, high // 2
        size //= 2
        steps = steps[:, : 2 * size : 2] + steps[:, 1 : 2 * size : 2]
    return total
