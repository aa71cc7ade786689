"""Caches: `nnx.Cache` attributes of a layer, None until `init_cache` makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx


def made(variable: nnx.Cache[jax.Array] | None) -> nnx.Cache[jax.Array]:
    """A variable of a cache; a ValueError if `init_cache` did not make it yet."""
    if variable is None:
        raise ValueError(
            "decode needs a cache: call init_cache(input_shape) first, with the shape "
            "[batch..., length, features] of the inputs"
        )
    return variable


@contextlib.contextmanager
def caches_restored(layer: nnx.Module) -> Iterator[None]:
    """Restores the layer's caches if the block raises an error.

    A wrong mask, option or backend is found in the attention itself, after the tokens were put into
    the cache. A second call must not find them there.
    """
    caches = [cache for cache in vars(layer).values() if isinstance(cache, nnx.Cache)]
    before = [cache.get_value() for cache in caches]
    try:
        yield
    except BaseException:
        for cache, value in zip(caches, before, strict=True):
            cache.set_value(value)
        raise


def append(
    index: Any, batch: tuple[int, ...], **caches: tuple[Any, jax.Array]
) -> tuple[list[jax.Array], jax.Array]:
    """Appends a call's tokens to caches, and counts them in `index`.

    Args:
      index: The layer's `cache_index`.
      batch: The batch axes of the caches.
      caches: By attribute name, the variable [batch..., max_length, ...] and the new entries
        [B, T, ...].

    Returns:
      The caches as [B, max_length, ...], and the number of tokens they held before.

    Raises:
      ValueError: There is no cache, it has another shape or dtype, or no room.
    """
    index = made(index)
    held = index[...]
    found, T = [], 0
    for name, (cache, new) in caches.items():
        cache = made(cache)
        B, T, *sizes = new.shape
        max_length = cache.shape[len(batch)] if cache.ndim > len(batch) else 0
        if cache.shape != (*batch, max_length, *sizes) or cache.dtype != new.dtype:
            raise ValueError(
                f"{name} is {cache.shape} in {cache.dtype}, but this call appends "
                f"{(*batch, T, *sizes)} in {new.dtype}: call init_cache(input_shape, dtype) with "
                "this batch and this dtype"
            )
        at_least = 0 if isinstance(held, jax.core.Tracer) else int(held)
        if at_least + T > max_length:
            raise ValueError(
                f"the cache has room for {max_length} tokens and holds {at_least} or more: there "
                f"is none for {T} more. Call init_cache with a longer input_shape"
            )
        new = new.reshape(*batch, T, *sizes)
        cache[...] = jax.lax.dynamic_update_slice_in_dim(cache[...], new, held, len(batch))
        found.append(cache[...].reshape(B, max_length, *sizes))
    index[...] = held + T
    return found, held
