"""Dropout: which weights of a block are kept, by the same bits as in every backend.

XLA hashes the positions of the queries, [B, H, T] int32, and a kernel these with those of keys.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax.mosaic import TILE
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, dropout_keep_in_row, dropout_row


def hashes(spec: AttentionSpec, inputs: Inputs, rows: int) -> jax.Array | None:
    """The hash of each query, int32 [B, H, rows]; None without dropout."""
    seed = inputs.dropout_seed
    if spec.dropout_rate == 0 or seed is None:
        return None
    shape = spec.B, spec.H, rows
    b, h, i = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
    words = tuple(seed[word] for word in range(seed.shape[0]))
    return lax.bitcast_convert_type(dropout_row(words, b, h, i), jnp.int32)


def kept(spec: AttentionSpec, hashes: Any, first_key: Any, axis: int) -> jax.Array:
    """Which pairs are kept, from `hashes` of their queries; the keys, from `first_key` on, lie
    along `axis`."""
    key = plgpu.broadcasted_iota(jnp.int32, hashes.shape, dimension=axis, layout=TILE)
    return dropout_keep_in_row(spec.dropout_rate, hashes, key + first_key)
