"""Which keys a query sees, and which blocks of keys a tile of queries has to go through.

    low <= j - i <= high        causality and windows, from position(i) = offset + i
    j < S                       the last block, where S cuts it

The blocks with visible pairs are a range, and inside it is a range of blocks in which every pair is
visible:

    first ... whole ... whole_end ... end
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax.mosaic import TILE
from ato_jax.ops.attention.spec import AttentionSpec


class Limits(NamedTuple):
    """The bounds of a batch entry's pairs; ints where they are static. None: no bound."""

    low: Any
    high: Any
    kv_length: Any


class Ranges(NamedTuple):
    """Blocks first, ..., end - 1 hold all visible pairs; whole, ..., whole_end - 1 no hidden
    ones. first < end: a tile that sees nothing goes through one block."""

    first: Any
    whole: Any
    whole_end: Any
    end: Any


def static_limits(spec: AttentionSpec) -> Limits:
    """Without bounds that hide no key."""
    assert spec.offset is not None
    low = None if spec.left is None else spec.offset - spec.left
    high = None if spec.right is None else spec.offset + spec.right
    if low is not None and low <= 1 - spec.T:
        low = None
    if high is not None and high >= spec.S - 1:
        high = None
    return Limits(low, high, spec.S)


def cuts(spec: AttentionSpec, limits: Limits, keys: int) -> tuple[bool, bool]:
    """Whether pairs may be hidden in the last block of a tile, and in others."""
    bounded = limits.low is not None or limits.high is not None
    return bounded or spec.S % keys != 0, bounded


def ranges(limits: Limits, first_row: Any, rows: int, keys: int, blocks: int) -> Ranges:
    """The blocks, `blocks` in all, that queries from `first_row` to `first_row + rows` see."""
    last_row = first_row + (rows - 1)
    first: Any = jnp.int32(0)
    whole: Any = jnp.int32(0)
    end: Any = jnp.int32(blocks)
    whole_end: Any = jnp.int32(limits.kv_length // keys)
    if limits.high is not None:
        beyond = lax.div(jnp.maximum(last_row + limits.high + keys, 0), keys)
        end = jnp.maximum(jnp.minimum(end, beyond), 1)
        beyond = lax.div(jnp.maximum(first_row + limits.high + 1, 0), keys)
        whole_end = jnp.minimum(whole_end, beyond)
    if limits.low is not None:
        first = lax.div(jnp.maximum(first_row + limits.low, 0), keys)
        first = jnp.minimum(first, end - 1)
        whole = lax.div(jnp.maximum(last_row + limits.low + (keys - 1), 0), keys)
    whole = jnp.clip(whole, first, end)
    return Ranges(first, whole, jnp.clip(whole_end, whole, end), end)


def hide(
    s: jax.Array, limits: Limits, first_row: Any, first_key: Any, kv_end: Any
) -> jax.Array:
    """s [rows, keys], minus infinity where a query does not see the key."""
    # Positions count from the sequence's start: numbers that do not change from block to block
    # would be kept in registers through the loops.
    key = plgpu.broadcasted_iota(jnp.int32, s.shape, dimension=1, layout=TILE) + first_key
    visible: Any = None
    if kv_end is not None:
        visible = key < kv_end
    if limits.low is not None or limits.high is not None:
        row = plgpu.broadcasted_iota(jnp.int32, s.shape, dimension=0, layout=TILE) + first_row
        if limits.high is not None:
            seen = key <= row + limits.high
            visible = seen if visible is None else visible & seen
        if limits.low is not None:
            seen = key >= row + limits.low
            visible = seen if visible is None else visible & seen
    return s if visible is None else jnp.where(visible, s, -jnp.inf)
