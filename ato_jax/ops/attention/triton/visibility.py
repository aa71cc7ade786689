"""Which queries of a tile see which keys, and which tiles hold visible pairs.

    low <= j - i <= high                    causality and windows, from position(i) = offset + i
    i < q_length,  j < kv_length
    q_segment_i = kv_segment_j

A program owns some rows, queries or keys, and goes over blocks of the other side. The blocks with
visible pairs form a range, and inside it is a range of blocks in which every pair is visible:

    first ... whole ... whole_end ... end

Each rule has its own ranges, and all rules together have the intersection. The program's own rows
beyond their length need no rule: their inputs are read as 0, and their results are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import device
from ato_jax.ops.attention.spec import AttentionSpec, Limits, Ranges
from ato_jax.ops.attention.triton.common import quotient

# The segments of a block are a set of this many bits; the bit of an id is the id modulo that.
SEGMENT_BITS = 256
WORD = 32

Carry = TypeVar("Carry")
Bounds = tuple[Any, Any]


def key_bounds(spec: AttentionSpec, offset: int) -> Bounds:
    """(low, high): query i sees keys i + low to i + high; None for a bound that hides no key."""
    low = None if spec.left is None else offset - spec.left
    high = None if spec.right is None else offset + spec.right
    if low is not None and low <= 1 - spec.T:
        low = None
    if high is not None and high >= spec.S - 1:
        high = None
    return low, high


def query_bounds(bounds: Bounds) -> Bounds:
    """(low, high): queries j + low to j + high see key j, from the bounds of `key_bounds`."""
    low, high = bounds
    return None if high is None else -high, None if low is None else -low


def limits_of(spec: AttentionSpec, ref: Any, b: Any) -> Limits:
    """The limits of a batch entry; those that are not static are read from the ref."""
    if spec.offset is not None:
        low, high = key_bounds(spec, spec.offset)
    else:
        low = None if spec.left is None else ref[b, np.int32(0)]
        high = None if spec.right is None else ref[b, np.int32(1)]
    q_length = ref[b, np.int32(2)] if spec.q_lengths else spec.T
    kv_length = ref[b, np.int32(3)] if spec.kv_lengths else spec.S
    return Limits(low, high, q_length, kv_length)


def block_ranges(bounds: Bounds, start: Any, rows: int, length: Any, block: int) -> Ranges:
    """The blocks of the other side that the rows from `start` to `start + rows` pair with.

    Row x pairs with x + low to x + high, below `length`. Results that are known while tracing are
    Python ints.
    """
    low, high = bounds
    last = start + rows - 1
    static = isinstance(length, int)
    first: Any = 0
    whole: Any = 0
    whole_end: Any = length // block if static else quotient(length, block)
    end: Any = pl.cdiv(length, block) if static else quotient(length + (block - 1), block)
    if high is not None:
        whole_end = jnp.minimum(whole_end, quotient(jnp.maximum(start + high + 1, 0), block))
        end = jnp.minimum(end, quotient(jnp.maximum(last + high + block, 0), block))
    if low is not None:
        first = jnp.minimum(end, quotient(jnp.maximum(start + low, 0), block))
        whole = quotient(jnp.maximum(last + low + block - 1, 0), block)
        whole = jnp.minimum(jnp.maximum(whole, first), end)
    if high is not None or low is not None:
        whole_end = jnp.maximum(whole_end, whole)
    return Ranges(first, whole, whole_end, end)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    first = jnp.maximum(a.first, b.first)
    end = jnp.maximum(jnp.minimum(a.end, b.end), first)
    whole = jnp.clip(jnp.maximum(a.whole, b.whole), first, end)
    whole_end = jnp.clip(jnp.minimum(a.whole_end, b.whole_end), whole, end)
    return Ranges(first, whole, whole_end, end)


def part_of(ranges: Ranges, part: Any, parts: int) -> Ranges:
    """The share of the blocks that one of `parts` programs has."""
    count = ranges.end - ranges.first
    start = ranges.first + quotient(count * part, parts)
    stop = ranges.first + quotient(count * (part + 1), parts)
    return Ranges(*(jnp.clip(jnp.int32(bound), start, stop) for bound in ranges))


def segment_ranges(own: jax.Array, other: jax.Array, rows: int, block: int) -> jax.Array:
    """The ranges that segments allow, [B, blocks of rows, 4], from ids [B, T] and [B, S].

    Two blocks may have an id in common if the intervals of their ids overlap, which is exact for
    sorted ids, and their sets of bits do, which separates most others. A block that is visited
    without need costs time and nothing else.
    """
    low, high, sets = (x[..., :, None] for x in _segments_of_blocks(own, rows))
    other_low, other_high, other_sets = (x[..., None, :] for x in _segments_of_blocks(other, block))
    in_common = jnp.zeros((), bool)
    for word in range(SEGMENT_BITS // WORD):
        in_common = in_common | ((sets[word] & other_sets[word]) != 0)
    overlap = in_common & (low <= other_high) & (other_low <= high)  # [B, blocks, other blocks]
    same = (low == other_high) & (high == other_low)
    count = other_low.shape[-1]
    n = jnp.arange(count, dtype=jnp.int32)
    first = jnp.min(jnp.where(overlap, n, count), axis=-1)
    end = jnp.max(jnp.where(overlap, n + 1, 0), axis=-1)
    whole = jnp.min(jnp.where(same, n, count), axis=-1)
    broken = ~same & (n >= whole[..., None])
    whole_end = jnp.min(jnp.where(broken, n, count), axis=-1)
    return jnp.stack([first, whole, whole_end, end], axis=-1)


def _segments_of_blocks(
    ids: jax.Array, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The smallest and largest id of each block, [B, blocks], and its set, [words, B, blocks]."""
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    ids = ids.reshape(ids.shape[0], -1, block)
    bit = ids & (SEGMENT_BITS - 1)
    words = jnp.arange(SEGMENT_BITS // WORD, dtype=jnp.int32)[:, None, None, None]
    mine = jnp.left_shift(jnp.uint32(1), (bit % WORD).astype(jnp.uint32))
    sets = jnp.where(bit // WORD == words, mine, jnp.uint32(0))  # [words, B, blocks, block]
    sets = lax.reduce(sets, np.uint32(0), lax.bitwise_or, (3,))
    return jnp.min(ids, axis=-1), jnp.max(ids, axis=-1), sets


def _loop(lower: Any, upper: Any, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
    if isinstance(lower, int) and isinstance(upper, int):
        if lower >= upper:
            return carry
        if upper == lower + 1 and not device.interpreting():
            # A loop known to run once is inlined, and the next loop then spills 1000 bytes.
            upper = upper + jnp.minimum(pl.program_id(0), 0)
    # Python ints would become JAX's default integer, which may be int64.
    lower, upper = (np.int32(n) if isinstance(n, int) else n for n in (lower, upper))
    return lax.fori_loop(lower, upper, body, carry)


def for_blocks(
    ranges: Ranges, step: Callable[[bool, Any, Carry], Carry], carry: Carry
) -> Carry:
    """`step(masked, n, carry)` over the blocks in order; a loop for each masked or whole range."""
    first, whole, whole_end, end = ranges

    def masked(n: Any, carry: Carry) -> Carry:
        return step(True, n, carry)

    def unmasked(n: Any, carry: Carry) -> Carry:
        return step(False, n, carry)

    carry = _loop(first, whole, masked, carry)
    carry = _loop(whole, whole_end, unmasked, carry)
    return _loop(whole_end, end, masked, carry)
