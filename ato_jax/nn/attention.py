"""Softmax attention as a layer: nnx.MultiHeadAttention's parameters and results, ato_jax's kernels.

Beyond Flax's layer it has causality, windows, a softcap and sinks inside the kernels, rotary
positions, a paged cache, and decoding that takes prompts of any length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from ato_jax import shapes
from ato_jax.nn.arguments import (
    as_implementation,
    as_input_shape,
    as_kv_dtype,
    refuse_eight_bits,
    refuse_no_dtype,
    refuse_no_initialiser,
)
from ato_jax.nn.caches import append, made
from ato_jax.nn.call import Call
from ato_jax.nn.masks import bind_mask
from ato_jax.nn.multi_head import MultiHead
from ato_jax.ops.attention import decode
from ato_jax.ops.attention.api import OP, attention, bounds
from ato_jax.paged_cache import PagedCache
from ato_jax.parallel import softmax as parallel
from ato_jax.parallel.devices import AxisName
from ato_jax.quantizing import quantize


class Attention(MultiHead):
    """Softmax attention as a layer, with nnx.MultiHeadAttention's parameters.

        z = out(softmax over j (query(x_i) . key(y_j) / sqrt(D)) . value(y_j))

    Memory is linear in T and S. Checkpoints of nnx.MultiHeadAttention load, and the results are
    Flax's, with these differences:

    - A query that sees no key has 0 before the last projection, not the mean of all values.
    - float32 is multiplied in full float32 on every device, unless `precision` says otherwise.
    - Each weight is dropped independently, whatever `broadcast_dropout` is.

    With `decode=True` a call takes any number of tokens, causal among themselves: first a prompt,
    then one token at a time. Its mask covers the cache, [batch..., H, T, max_length], as in Flax. A
    call for which the cache has no room raises an error, or gives NaN inside jit, where the number
    of tokens is not known. A paged cache is an `ato_jax.PagedCache` in the variable `paged_cache`,
    whose sequences may be forked or freed between calls. A call appends to allocated sequences
    only, and a free one has 0 before the last projection.

    With `kv_dtype` the cache holds keys and values in float8_e4m3fn, and a float32 scale for each
    token and head: (D + 4) / (2 D) of a bfloat16 cache. A token's scale comes from that token
    alone, so decoding stays causal, and nothing in the cache is rounded twice. A call of up to 16
    tokens reads the 8 bits; a longer one, or one with a mask or dropout, first widens the cache.
    Such a call has no derivative.

    Args:
      num_heads: H, the number of query heads.
      in_features: Size of `inputs_q`.
      qkv_features: Size of all query heads together, H D; in_features unless given.
      out_features: Size of the outputs; in_features unless given.
      num_kv_heads: G, the number of key/value heads, which divides H; H unless given.
      in_kv_features: Size of `inputs_k` and `inputs_v`; in_features unless given.
      causal: Query i sees the keys up to i (T = S).
      window: (left, right): query i sees the keys from i - left to i + right. Each is an int >= 0,
        or None for no bound.
      softcap: c > 0: the scores are limited to (-c, c).
      sinks: Add the parameter `sinks` [H]: one more logit in the softmax of every query of a head,
        without a value.
      sinks_init: Initialiser of `sinks`.
      rope_theta: Base of the rotary positions (10000 in RoFormer) of queries and keys; None for
        none. It needs an even D.
      kv_dtype: "float8_e4m3fn" for a cache in 8 bits; None for one in the dtype that `init_cache`
        is given. Calls without `decode` do not depend on it.
      context_axis: The axis of the `jax.shard_map` around the call that cuts T and S, as in
        `ato_jax.parallel`: each device gives its own tokens and gets their outputs. None for whole
        sequences. Masks and `decode` are refused with it.
      context_schedule: "all_gather" or "ring", as in `ato_jax.parallel.attention`.
      context_order: "contiguous" or "zigzag", the order of the tokens over the devices. In zigzag
        order, rotary positions count through segments, which leaves their differences as they are.
      implementation: A backend of `ato_jax.attention` by name; None takes the fastest.
      rngs: Random keys: the stream `params` for the parameters and for dropout.
      **options: Other constructor arguments of nnx.MultiHeadAttention, such as dtype, param_dtype,
        precision, use_bias, normalize_qk, decode, kernel_init and kernel_metadata. `attention_fn`
        is refused.

    Raises:
      ValueError: An argument has a wrong type or value. The message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> layer = ato_jax.nn.Attention(
      ...     num_heads=4, in_features=16, num_kv_heads=2, causal=True, rngs=nnx.Rngs(0)
      ... )
      >>> layer(jnp.ones((2, 8, 16))).shape  # [B, T, in_features] -> [B, T, out_features]
      (2, 8, 16)
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
        kv_dtype: Dtype | None = None,
        context_axis: AxisName | None = None,
        context_schedule: str = "all_gather",
        context_order: str = "contiguous",
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        sinks = shapes.flag("sinks", sinks)
        bounds(shapes.flag("causal", causal), window)
        if softcap is not None:
            shapes.positive("softcap", softcap)
        refuse_no_initialiser(sinks_init=sinks_init)
        shapes.one_of("context_schedule", context_schedule, parallel.SCHEDULES)
        shapes.one_of("context_order", context_order, parallel.ORDERS)
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            causal=causal,
            rope_theta=rope_theta,
            context_axis=context_axis,
            implementation=as_implementation(OP, implementation),
            rngs=rngs,
            **options,
        )
        self.kv_dtype = as_kv_dtype(kv_dtype)
        self.context_schedule, self.context_order = context_schedule, context_order
        self.window = window
        self.softcap = softcap
        self.sinks: nnx.Param[jax.Array] | None = nnx.data(None)
        if sinks:
            self.sinks = nnx.Param(sinks_init(rngs.params(), (num_heads,), self.param_dtype))
        self.paged_cache: nnx.Cache[PagedCache] | None = nnx.data(None)
        self.cached_key_scale: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.cached_value_scale: nnx.Cache[jax.Array] | None = nnx.data(None)

    def attend(self, call: Call) -> jax.Array:
        """The attention of a call, [B, T, H, V]; with `decode` to all tokens in the cache."""
        if not call.decode:
            return self._attention(call, call.key, call.value, causal=call.causal)
        if self.paged_cache is not None:
            return self._attend_pages(call, self.paged_cache)
        return self._attend_cache(call)

    def _attend_cache(self, call: Call) -> jax.Array:
        key, value, of_scales = call.key, call.value, {}
        if self.kv_dtype is not None:
            (key, k_scale), (value, v_scale) = quantize(key, 3), quantize(value, 3)  # [B, T, G]
            of_scales = {
                "cached_key_scale": (self.cached_key_scale, k_scale),
                "cached_value_scale": (self.cached_value_scale, v_scale),
            }
        (key, value, *scales), held = append(
            self.cache_index,
            call.batch,
            cached_key=(self.cached_key, key),
            cached_value=(self.cached_value, value),
            **of_scales,
        )
        B, T = call.query.shape[:2]
        lengths = jnp.broadcast_to(held + T, B)
        if scales and self._takes_decode_attention(call):
            k_scale, v_scale = scales
            out = self._decode_attention(
                call.query, key, value, None, lengths, k_scale_pages=k_scale, v_scale_pages=v_scale
            )
        else:
            if scales:
                key, value = (
                    (array.astype(jnp.float32) * scale[..., None]).astype(call.key.dtype)
                    for array, scale in zip((key, value), scales, strict=True)
                )
            # Both lengths are given: if T = S, a missing one would be taken from the other.
            out = self._attention(
                call,
                key,
                value,
                causal=True,
                query_offset=held,
                q_lengths=jnp.full(B, T, jnp.int32),
                kv_lengths=lengths,
            )
        # Inside jit a full cache cannot be refused. NaN makes it noticed.
        return jnp.where(held + T <= key.shape[1], out, jnp.nan)

    def _attention(self, call: Call, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        if self.context_axis is None:
            function: Any = attention
            options["mask"] = bind_mask(call.mask, call, key.shape[1])
        else:
            function = parallel.attention
            options |= {
                "axis_name": self.context_axis,
                "schedule": self.context_schedule,
                "order": self.context_order,
            }
        out: jax.Array = function(
            call.query,
            key,
            value,
            window=self.window,
            segment_ids=call.segment_ids,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
            dropout_rate=0.0 if call.dropout_key is None else self.dropout_rate,
            dropout_key=call.dropout_key,
            precision=self.precision,
            implementation=self.implementation,
            **options,
        )
        return out

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
        if self._takes_decode_attention(call):
            out = self._decode_attention(
                call.query, cache.k_pages, cache.v_pages, cache.page_table, cache.lengths
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
        # NaN where there was no page left, as for a full cache without pages.
        return jnp.where(fits, out, jnp.nan)

    def _takes_decode_attention(self, call: Call) -> bool:
        return (
            1 <= call.query.shape[1] <= decode.MOST_QUERIES
            and call.mask is None
            and call.dropout_key is None
            and self.implementation in (None, *decode.BACKENDS)
        )

    def _decode_attention(self, *arrays: Any, **scales: jax.Array) -> jax.Array:
        function: Any = decode.decode_attention
        out: jax.Array = function(
            *arrays,
            **scales,
            window=self.window,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
            implementation=self.implementation,
        )
        return out

    def _held(self) -> jax.Array:
        if self.paged_cache is None:
            return super()._held()
        return self.paged_cache.get_value().lengths[:, None]

    def init_cache(
        self,
        input_shape: Sequence[int],
        dtype: Dtype = jnp.float32,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
    ) -> None:
        """Makes an empty cache for decoding.

        Args:
          input_shape: [batch..., max_length, in_features]: the batch of later calls, and the most
            tokens that a sequence will have.
          dtype: Dtype of the keys and values: the layer's, or if it has none the promoted dtype of
            its inputs and parameters. A layer with a `kv_dtype` takes that instead.
          page_size: Tokens in a page, which divides max_length. It makes a paged cache with one
            sequence for each batch entry. Refused with a `kv_dtype`.
          num_pages: The number of pages; enough for max_length tokens in every sequence unless
            given.

        Raises:
          ValueError: An argument has a wrong type or value, or `num_pages` comes without
            `page_size`.

        Example:
          >>> import jax.numpy as jnp
          >>> import ato_jax.nn
          >>> from flax import nnx
          >>> layer = ato_jax.nn.Attention(num_heads=4, in_features=16, rngs=nnx.Rngs(0))
          >>> layer.init_cache((2, 32, 16))
          >>> prompt = layer(jnp.ones((2, 5, 16)), decode=True)
          >>> layer(jnp.ones((2, 1, 16)), decode=True).shape  # the 6th token
          (2, 1, 16)
        """
        *batch, max_length, _ = shape = as_input_shape(input_shape, self.in_features)
        refuse_no_dtype(dtype=dtype)
        if self.kv_dtype is None:
            refuse_eight_bits(dtype)
        if page_size is None:
            if num_pages is not None:
                raise ValueError(f"num_pages needs a page_size, got {num_pages!r} alone")
            super().init_cache(shape, self.kv_dtype or dtype)
            self.cached_key_scale, self.cached_value_scale = (
                nnx.data(None)
                if self.kv_dtype is None
                else nnx.Cache(jnp.zeros(made(cache).shape[:-1], jnp.float32))
                for cache in (self.cached_key, self.cached_value)
            )
            self.paged_cache = nnx.data(None)
            return
        if self.kv_dtype is not None:
            raise ValueError(
                f"page_size must be None with kv_dtype={self.kv_dtype!r}: a PagedCache holds no "
                f"scales, got {page_size!r}"
            )
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
