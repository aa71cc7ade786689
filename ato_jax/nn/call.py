"""One call of a layer: its inputs projected, with a single batch axis.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from ato_jax import shapes
from ato_jax.nn.arguments import Mask


class Call(NamedTuple):
    """One call of a layer, its inputs projected and with a single batch axis."""

    query: jax.Array  # [B, T, H, D]
    key: jax.Array  # [B, S, G, D]
    value: jax.Array  # [B, S, G, D]
    inputs_q: jax.Array  # [B, T, in_features]
    inputs_k: jax.Array  # [B, S, in_kv_features]
    batch: tuple[int, ...]  # the batch axes that became B
    mask: Mask | None  # as given, broadcastable to [batch..., H, T, S]
    causal: bool
    decode: bool  # append to the cache and attend to what is in it
    dropout_key: jax.Array | None  # None: nothing is dropped
    segment_ids: jax.Array | None = None  # [B, T] integers of queries and keys (T = S)


def one_batch_axis(array: jax.Array, trailing: int) -> jax.Array:
    """The array [batch..., *trailing axes] as [B, *trailing axes]."""
    if array.ndim == trailing + 1:
        return array
    return array.reshape(math.prod(array.shape[:-trailing]), *array.shape[-trailing:])


def as_segment_ids(
    segment_ids: Any, batch: tuple[int, ...], T: int, S: int, decode: bool
) -> jax.Array | None:
    """`segment_ids` of a call as integers [B, T]; None stays None."""
    if segment_ids is None:
        return None
    if decode:
        raise ValueError(
            "segment_ids cannot be given with decode: a cache holds one sequence for each batch "
            "entry, so put each document into an entry of its own"
        )
    segment_ids = shapes.integers("segment_ids", segment_ids)
    if segment_ids.shape != (*batch, T) or T != S:
        raise ValueError(
            f"segment_ids must be [batch..., T] = {(*batch, T)} and T = S, "
            f"got shape {segment_ids.shape}, T={T}, S={S}"
        )
    return one_batch_axis(segment_ids, 1)
