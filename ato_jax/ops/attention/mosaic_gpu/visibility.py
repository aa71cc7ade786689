"""Which keys a query sees, and which blocks of keys a tile of queries has to go through.

    low <= j - i <= high        causality and windows, from position(i) = offset + i
    i < q_length                a padded query sees nothing
    j < kv_length               the last block, where the keys' end cuts it
    q_segment_i = kv_segment_j

The blocks with visible pairs are a range, and inside it is a range of blocks in which every pair is
visible:

    first ... whole ... whole_end ... end

Bounds that are known while tracing are Python ints. All others come in an array, [B, 4] int32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax.mosaic import TILE, in_columns, in_rows
from ato_jax.ops.attention.spec import AttentionSpec, Limits, Ranges

Ids = tuple[jax.Array, jax.Array]  # segments of rows and of keys


def limits_of(spec: AttentionSpec, array: Any, batch: Any) -> Limits:
    """The limits of a batch entry. Static bounds that hide no key are None, and so is q_length
    where no query is padded."""
    low: Any = None
    high: Any = None
    if spec.offset is not None:
        if spec.left is not None and spec.offset - spec.left > 1 - spec.T:
            low = spec.offset - spec.left
        if spec.right is not None and spec.offset + spec.right < spec.S - 1:
            high = spec.offset + spec.right
    else:
        low = None if spec.left is None else array[batch, 0]
        high = None if spec.right is None else array[batch, 1]
    q_length = array[batch, 2] if spec.q_lengths else None
    kv_length = array[batch, 3] if spec.kv_lengths else spec.S
    return Limits(low, high, q_length, kv_length)


def exchanged(spec: AttentionSpec, limits: Limits) -> Limits:
    """The limits of i - j in the place of j - i: those by which a key sees queries."""
    low = None if limits.high is None else -limits.high
    high = None if limits.low is None else -limits.low
    own = limits.kv_length if spec.kv_lengths else None
    return Limits(low, high, own, spec.T if limits.q_length is None else limits.q_length)


def cuts(spec: AttentionSpec, limits: Limits, keys: int) -> tuple[bool, bool]:
    """Whether pairs may be hidden in the last block of a tile, and in others."""
    bounded = limits.low is not None or limits.high is not None or spec.segments
    return bounded or spec.kv_lengths or spec.S % keys != 0, bounded


def ranges(limits: Limits, first_row: Any, rows: int, keys: int, blocks: int) -> Ranges:
    """The blocks, `blocks` in all, that queries from `first_row` to `first_row + rows` see. first
    is less than end: a tile that sees nothing goes through one block."""
    last_row = first_row + (rows - 1)
    first: Any = jnp.int32(0)
    whole: Any = jnp.int32(0)
    end: Any = jnp.int32(blocks)
    whole_end: Any = lax.div(jnp.int32(limits.kv_length), keys)
    if not isinstance(limits.kv_length, int):
        end = jnp.maximum(lax.div(limits.kv_length + (keys - 1), keys), 1)
    if limits.high is not None:
        beyond = lax.div(jnp.maximum(last_row + limits.high + keys, 0), keys)
        end = jnp.maximum(jnp.minimum(end, beyond), 1)
        beyond = lax.div(jnp.maximum(first_row + limits.high + 1, 0), keys)
        whole_end = jnp.minimum(whole_end, beyond)
    if limits.low is not None:
        first = lax.div(jnp.maximum(first_row + limits.low, 0), keys)
        first = jnp.minimum(first, end - 1)
        whole = lax.div(jnp.maximum(last_row + limits.low + (keys - 1), 0), keys)
    if limits.q_length is not None:
        end = jnp.where(first_row < limits.q_length, end, first + 1)
    whole = jnp.clip(whole, first, end)
    return Ranges(first, whole, jnp.clip(whole_end, whole, end), end)


def intersection(a: Ranges, b: Ranges, blocks: int) -> Ranges:
    first = jnp.minimum(jnp.maximum(a.first, b.first), blocks - 1)
    end = jnp.maximum(jnp.minimum(a.end, b.end), first + 1)
    whole = jnp.clip(jnp.maximum(a.whole, b.whole), first, end)
    whole_end = jnp.clip(jnp.minimum(a.whole_end, b.whole_end), whole, end)
    return Ranges(first, whole, whole_end, end)


def hide(
    s: jax.Array,
    limits: Limits,
    first_row: Any,
    first_key: Any,
    kv_end: Any,
    ids: Ids | None,
) -> jax.Array:
    """s [rows, keys], minus infinity where a query does not see the key. `ids` are those of the
    rows and those of the keys."""
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
    if ids is not None:
        of_rows, of_keys = ids
        same = in_columns(of_rows, s.shape[1]) == in_rows(of_keys, s.shape[0])
        visible = same if visible is None else visible & same
    return s if visible is None else jnp.where(visible, s, -jnp.inf)
