"""Linear attention in plain JAX: every option, time and memory linear in T, any derivative.

The sequence is cut into chunks. A chunk's queries meet its own keys in a matrix of products of
features, and all earlier keys through the state that these add up to (`chunk.py` has the
mathematics). `lax.scan` carries the state from chunk to chunk. For the derivative it keeps the
states before each chunk, and `jax.checkpoint` recomputes a chunk's matrix instead of storing it.

A decay or segments without causality take the whole matrix and a second state, which comes from the
right. Without causality, decay and segments, one state serves every query.

Where query i is at a known distance from key i, the queries are on the keys' timeline. Elsewhere
(lengths or segments of their own) both are sorted onto one timeline (`timeline.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import autodiff
from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.meshes import varying_with
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.xla.chunk import (
    MOST_STEPS,
    Carry,
    absorb,
    open_chunk,
    output,
    read,
    weights,
)
from ato_jax.ops.linear_attention.xla.timeline import (
    Timeline,
    cut,
    heads_first,
    join,
    little_padding,
    merge,
    power_of_two,
    time_slice,
    zero_unless,
)

# The most elements of a wide chunk's features, and its fewest steps where there are many heads.
WIDE_CHUNK_SIZE = 1 << 23
LEAST_WIDE_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Steps per chunk, powers of two.

    Attributes:
      chunk: where queries meet the chunk's keys in a matrix.
      wide_chunk: the most where they only meet the state; larger products, which several cores
        share, are then faster.
    """

    chunk: int
    wide_chunk: int


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    return None


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    """Measured on CPUs. Wider chunks spend more time on their matrices, narrower ones on states.

    The states that are kept for the derivative take at most a few times the memory of q in float32.
    """
    chunk = min(max(64, power_of_two(max(spec.F, spec.V)) // 2), MOST_STEPS)
    if spec.decay == "channel":
        chunk = 32  # it takes log2(chunk) products instead of one
    row = spec.B * spec.H * max(spec.F, spec.V)
    wide = power_of_two(max(1, WIDE_CHUNK_SIZE // max(1, row)))
    return Config(chunk, wide_chunk=max(LEAST_WIDE_CHUNK, wide))


def scan(body: Any, carry: Any, chunks: Any, reverse: bool = False) -> Any:
    """`lax.scan` whose derivative keeps the carries and recomputes the body."""
    carry = varying_with(carry, chunks)
    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), carry, chunks, reverse=reverse)


def sum_keys(
    spec: LinearAttentionSpec, most: int, parameters: Any, carry: Carry, timeline: Timeline
) -> Carry:
    """The carry after the timeline's last key."""
    size = little_padding(most, timeline.length)

    def body(carry: Carry, steps: Timeline) -> tuple[Carry, None]:
        chunk = open_chunk(spec, parameters, steps)
        return absorb(chunk, carry, chunk.right), None

    return scan(body, carry, cut(timeline._replace(q=None), size))[0]


def read_state(
    spec: LinearAttentionSpec, most: int, parameters: Any, state: Carry, timeline: Timeline
) -> jax.Array:
    """out [B, G, R, T, V] of queries that all read the same state."""
    size = little_padding(most, timeline.length)

    def body(state: Carry, steps: Timeline) -> tuple[Carry, jax.Array]:
        chunk = open_chunk(spec, parameters, steps)
        out = output(spec, *read(chunk, state, chunk.left))
        return state, out.astype(steps.q.dtype)

    return join(scan(body, state, cut(timeline, size))[1], timeline.length)


def attend(
    spec: LinearAttentionSpec,
    size: int,
    parameters: Any,
    carry: Carry,
    timeline: Timeline,
    both_ways: bool,
) -> tuple[Carry, jax.Array]:
    """The carry after the timeline's last key, and out [B, G, R, N, V]."""
    chunks = cut(timeline, size)

    def from_right(carry: Carry, steps: Timeline) -> tuple[Carry, Carry]:
        chunk = open_chunk(spec, parameters, steps)
        return absorb(chunk, carry, chunk.left), carry

    def from_left(carry: Carry, both: tuple[Timeline, Carry | None]) -> tuple[Carry, jax.Array]:
        steps, right = both
        chunk = open_chunk(spec, parameters, steps)
        num, den = read(chunk, carry, chunk.left)
        if right is not None:
            right_num, right_den = read(chunk, right, chunk.right)
            num, den = num + right_num, den + right_den
        w = weights(chunk, both_ways)  # [B, G, R, C, C]
        num += chunk.einsum("bgrij,bgjv->bgriv", w, chunk.v)
        den += jnp.sum(w, axis=-1)
        out = output(spec, num, den).astype(steps.v.dtype)
        return absorb(chunk, carry, chunk.right), out

    right = None
    if both_ways:
        nothing = jax.tree.map(jnp.zeros_like, carry)
        _, right = scan(from_right, nothing, chunks._replace(q=None), reverse=True)
    carry, out = scan(from_left, carry, (chunks, right))
    return carry, join(out, timeline.length)


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    queries, keys = heads_first(spec, inputs)
    asked = queries.asked
    dtype = jnp.promote_types(inputs.q.dtype, jnp.float32)
    state = inputs.initial_state
    if state is None:
        rows = (spec.B, spec.G, spec.F)
        state = LinearState(jnp.zeros((*rows, spec.V), dtype), jnp.zeros(rows, dtype))
    carry = Carry(*state, None if keys.run is None else jnp.zeros(spec.B, jnp.int32))
    parameters = inputs.feature_parameters

    if not spec.causal and spec.decay is None and spec.segments is None:
        carry = sum_keys(spec, config.wide_chunk, parameters, carry, keys)
        out = read_state(spec, config.wide_chunk, parameters, carry, queries)
    elif spec.segments == "cross" or (spec.causal and spec.offset is None):
        timeline, asked, slots = merge(spec, inputs, queries, keys)
        both_ways = not spec.causal and spec.decay is not None
        carry, out = attend(spec, config.chunk, parameters, carry, timeline, both_ways)
        out = jax.vmap(lambda out, slot: jnp.take(out, slot, axis=2))(out, slots)
    else:
        # The number of keys before the first query; negative: of queries before the first key.
        ahead = spec.offset if spec.causal and spec.offset is not None else 0
        if ahead > 0:
            carry = sum_keys(
                spec, config.wide_chunk, parameters, carry, time_slice(keys, 0, ahead)
            )
            keys = time_slice(keys, ahead, spec.S)
        elif ahead < 0:
            queries = time_slice(queries, -ahead, spec.T)
        timeline = keys._replace(q=queries.q, asked=queries.asked)
        carry, out = attend(spec, config.chunk, parameters, carry, timeline, not spec.causal)
        out = jnp.pad(out, ((0, 0), (0, 0), (0, 0), (max(-ahead, 0), 0), (0, 0)))

    out = zero_unless(asked, out).reshape(spec.B, spec.H, spec.T, spec.V)
    if spec.layout == "bthd":
        out = jnp.swapaxes(out, 1, 2)
    return Outputs(out, LinearState(carry.kv, carry.k_sum))


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    return autodiff.gradient(
        functools.partial(forward, spec, config), residuals.inputs, cotangents
    )


class _Xla(Backend[LinearAttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Xla()
