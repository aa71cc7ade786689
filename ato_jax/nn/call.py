"""One call of a layer: its inputs projected, with a single batch axis.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

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


def one_batch_axis(array: jax.Array, trailing: int) -> jax.Array:
    """The array [batch..., *trailing axes] as [B, *trailing axes]."""
    if array.ndim == trailing + 1:
        return array
    return array.reshape(math.prod(array.shape[:-trailing]), *array.shape[-trailing:])
