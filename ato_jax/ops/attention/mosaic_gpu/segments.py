"""Segments: which blocks of keys may hold an id of some queries, and the ids for the kernel.

Two blocks of rows may have an id in common if the intervals of their ids overlap, which is exact
for sorted ids, and their sets of bits do, which separates most others: the bit of an id is the id
modulo 256. A block that is visited without need costs time and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.attention.mosaic_gpu import frame
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Ranges

WORD = 32
WORDS = 8


class _Blocks(NamedTuple):
    """The smallest id of each block, the largest, and the set of its ids, [B, blocks] each."""

    low: jax.Array
    high: jax.Array
    words: list[jax.Array]


def arrays_of(spec: AttentionSpec, config: Config, inputs: Inputs) -> dict[str, jax.Array]:
    """The kernel's arrays, by the names of `storage.Walk`.

    q_ids: [B, T up to a whole tile] int32. k_ids: [B, S up to a whole block]. shared: [B, groups of
    `config.rows` queries, 4], the ranges of blocks that each group's segments allow.
    """
    if inputs.q_segments is None or inputs.kv_segments is None:
        return {}
    q_ids = padded(inputs.q_segments, frame.whole_tiles(spec, config))
    k_ids = padded(inputs.kv_segments, int(pl.cdiv(spec.S, config.keys)) * config.keys)
    ranges = shared(q_ids, config.rows, k_ids, config.keys)
    return {"q_ids": q_ids, "k_ids": k_ids, "shared": ranges}


def shared(own_ids: jax.Array, rows: int, other_ids: jax.Array, others: int) -> jax.Array:
    """`Ranges` of blocks of `others` ids that each group of `rows` ids allows, [B, groups, 4]."""
    return _ranges(_blocks(own_ids, rows), _blocks(other_ids, others))


def padded(ids: jax.Array, length: int) -> jax.Array:
    return jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])), mode="edge")


def _blocks(ids: jax.Array, block: int) -> _Blocks:
    ids = ids.reshape(ids.shape[0], -1, block)
    bit = jnp.left_shift(jnp.uint32(1), (ids & (WORD - 1)).astype(jnp.uint32))
    word = (ids // WORD) & (WORDS - 1)
    words = [
        lax.reduce(jnp.where(word == n, bit, jnp.uint32(0)), np.uint32(0), lax.bitwise_or, (2,))
        for n in range(WORDS)
    ]
    return _Blocks(jnp.min(ids, axis=-1), jnp.max(ids, axis=-1), words)


def _ranges(own: _Blocks, other: _Blocks) -> jax.Array:
    """`Ranges` of `other` for each block of `own`, [B, blocks, 4]."""

    def pairs(mine: jax.Array, theirs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mine[:, :, None], theirs[:, None, :]

    common: Any = False
    for mine, theirs in zip(own.words, other.words, strict=True):
        a, b = pairs(mine, theirs)
        common = common | ((a & b) != 0)
    low, their_high = pairs(own.low, other.high)
    high, their_low = pairs(own.high, other.low)
    common = common & (low <= their_high) & (their_low <= high)
    one = (low == their_high) & (high == their_low)  # the same single id in both
    count = one.shape[-1]
    n = jnp.arange(count, dtype=jnp.int32)
    first = jnp.min(jnp.where(common, n, count), axis=-1)
    end = jnp.max(jnp.where(common, n + 1, 0), axis=-1)
    whole = jnp.min(jnp.where(one, n, count), axis=-1)
    whole_end = jnp.min(jnp.where(~one & (n >= whole[..., None]), n, count), axis=-1)
    return jnp.stack([first, whole, whole_end, end], axis=-1)


def ranges_of(of_group: int, shared: Any, batch: Any, first_row: Any, rows: int) -> Ranges:
    """The ranges of so many rows, in groups of `of_group`; of several groups together, whole blocks
    are left out."""
    group, count = lax.div(first_row, of_group), rows // of_group
    found = [[shared[batch, group + n, bound] for bound in range(4)] for n in range(count)]
    first, whole, whole_end, end = found[0]
    if count == 1:
        return Ranges(first, whole, whole_end, end)
    for other in found[1:]:
        first, end = jnp.minimum(first, other[0]), jnp.maximum(end, other[3])
    return Ranges(first, end, end, end)
