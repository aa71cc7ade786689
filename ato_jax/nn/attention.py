"""Softmax attention as a layer: nnx.MultiHeadAttention's parameters and results, ato_jax's kernels.

    out = softmax(query(x) . key(y) / sqrt(D)) . value(y)

and beyond Flax's: causality, windows, a softcap and sinks inside the kernels, rotary positions, and
prompts of any length in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from ato_jax import shapes
from ato_jax.nn.common import (
    Call,
    MultiHead,
    append,
    as_implementation,
    as_input_shape,
    bind_mask,
    refuse_no_dtype,
    refuse_no_initialiser,
)
from ato_jax.ops.attention import decode
from ato_jax.ops.attention.api import OP, attention, bounds
from ato_jax.paged_cache import PagedCache


class Attention(MultiHead):
    """Exact attention in memory linear in T and S; loads nnx.MultiHeadAttention's checkpoints.

    Args:
      num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features, rngs and
        every name in `options` (dtype, dropout_rate, normalize_qk, kernel_metadata, ...): as in
        nnx.MultiHeadAttention. `attention_fn` is refused.
      causal: query i sees the keys up to i.
      window: (left, right): keys from i - left to i + right, None for no bound.
      softcap: c, limits the scores to (-c, c).
      sinks: one more learned logit for every query of a head: the parameter `sinks` [H].
      sinks_init: what it starts as; 0 unless given. nnx.with_partitioning is honoured.
      rope_theta, implementation: as in `MultiHead`.

    Surprises:
      - `broadcast_dropout` makes no difference: each weight is dropped by itself.
      - A query that sees nothing gives 0 before the last projection, not the mean of all values.
      - float32 is multiplied in full float32, also on a GPU, unless `precision` says otherwise.
      - decode=True takes any number of tokens, causal among themselves: a prompt first, then one
        token at a time. Its mask is one over the cache, [batch..., H, T, max_length], as in Flax.
      - Beyond the cache's length, or its pages, there is an error, or NaN inside jit, where the
        count of tokens is not known.
      - A cache in pages is one `ato_jax.PagedCache`, in the variable `paged_cache`: between calls
        its sequences may be forked or freed. The call goes to those that are allocated; for a
        free slot nothing is kept, and it gives 0 before the last projection.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        sinks_init: Initializer = nnx.initializers.zeros,
        rope_theta: float | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        sinks = shapes.flag("sinks", sinks)
        bounds(shapes.flag("causal", causal), window)
        if softcap is not None:
            shapes.positive("softcap", softcap)
        refuse_no_initialiser(sinks_init=sinks_init)
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            causal=causal,
            rope_theta=rope_theta,
            implementation=as_implementation(OP, implementation),
            rngs=rngs,
            **options,
        )
        self.window = window
        self.softcap = softcap
        self.sinks: nnx.Param[jax.Array] | None = nnx.data(None)
        if sinks:
            self.sinks = nnx.Param(sinks_init(rngs.params(), (num_heads,), self.param_dtype))
        self.paged_cache: nnx.Cache[PagedCache] | None = nnx.data(None)

    def attend(self, call: Call) -> jax.Array:
        if call.decode and self.paged_cache is not None:
            return self._attend_pages(call, self.paged_cache)
        query, key, value = call.query, call.key, call.value
        B, T = query.shape[:2]
        held = jnp.zeros((), jnp.int32)
        options: dict[str, Any] = {"causal": call.causal}
        if call.decode:
            (key, value), held = append(
                self.cache_index,
                call.batch,
                cached_key=(self.cached_key, call.key),
                cached_value=(self.cached_value, call.value),
            )
            # The lengths of both sides are said: where T = S, one would stand for the other, too.
            options = {
                "causal": True,
                "query_offset": held,
                "q_lengths": jnp.full(B, T, jnp.int32),
                "kv_lengths": jnp.broadcast_to(held + T, B),
            }
        out = self._attention(call, key, value, **options)
        if call.decode:
            # Inside jit a full cache cannot be refused; it must not pass unnoticed either.
            out = jnp.where(held + T <= key.shape[1], out, jnp.nan)
        return out

    def _attention(self, call: Call, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        return attention(
            call.query,
            key,
            value,
            window=self.window,
            mask=bind_mask(call.mask, call, key.shape[1]),
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
            dropout_rate=0.0 if call.dropout_key is None else self.dropout_rate,
            dropout_key=call.dropout_key,
            precision=self.precision,
            implementation=self.implementation,
            **options,
        )

    def _attend_pages(self, call: Call, variable: nnx.Cache[PagedCache]) -> jax.Array:
        held: PagedCache = variable.get_value()
        B, T = call.query.shape[:2]
        slots, dtype = held.lengths.size, held.k_pages.dtype
        if (B, call.key.dtype) != (slots, dtype):
            raise ValueError(
                f"paged_cache holds {slots} sequences in {dtype}, but this call appends to {B} in "
                f"{call.key.dtype}: call init_cache(input_shape, dtype) with this batch and this "
                "dtype"
            )
        cache, fits = held.append(call.key, call.value)
        variable.set_value(cache)
        if (
            1 <= T <= decode.MOST_QUERIES
            and call.mask is None
            and call.dropout_key is None
            and self.implementation in (None, *decode.BACKENDS)
        ):
            out = decode.decode_attention(
                call.query,
                cache.k_pages,
                cache.v_pages,
                cache.page_table,
                cache.lengths,
                window=self.window,
                softcap=self.softcap,
                sinks=None if self.sinks is None else self.sinks[...],
                implementation=self.implementation,
            )
        else:
            out = self._attention(
                call,
                *cache.contiguous(),
                causal=True,
                query_offset=held.lengths,
                q_lengths=jnp.full(B, T, jnp.int32),
                kv_lengths=cache.lengths,
            )
        # As in a full cache without pages.
        return jnp.where(fits, out, jnp.nan)

    def _held(self) -> jax.Array:
        if self.paged_cache is None:
            return super()._held()
        return self.paged_cache.get_value().lengths[:, None]

    def init_cache(
        self,
        input_shape: Sequence[int],
        dtype: Any = jnp.float32,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
    ) -> None:
        """Makes an empty cache for inputs of shape [batch..., max_length, features].

        `dtype` is that of the keys: the layer's, or where it has none that of its inputs and
        parameters together.

        With a `page_size`, which must divide max_length, it is one in pages, the variable
        `paged_cache`, with a sequence for every entry of the batch. There are `num_pages` of them:
        enough for all sequences to grow to max_length, unless given.
        """
        *batch, max_length, _ = shape = as_input_shape(input_shape, self.in_features)
        refuse_no_dtype(dtype=dtype)
        if page_size is None:
            if num_pages is not None:
                raise ValueError(f"num_pages needs a page_size, got {num_pages!r} alone")
            super().init_cache(shape, dtype)
            self.paged_cache = nnx.data(None)
            return
        page_size = shapes.positive_int("page_size", page_size)
        if max_length % page_size:
            raise ValueError(
                f"page_size must divide input_shape's length, got {page_size} and {max_length}"
            )
        slots = math.prod(batch)
        cache = PagedCache.empty(
            slots,
            max_length,
            num_pages=slots * max_length // page_size if num_pages is None else num_pages,
            page_size=page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )
        self.paged_cache = nnx.Cache(cache._replace(active=jnp.ones(slots, bool)))
        self.cached_key = self.cached_value = self.cache_index = nnx.data(None)
