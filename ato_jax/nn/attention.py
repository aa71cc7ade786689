"""Softmax attention as a layer: nnx.MultiHeadAttention's parameters and results, ato_jax's kernels.

    out = softmax(query(x) . key(y) / sqrt(D)) . value(y)

and beyond Flax's: causality, windows, a softcap and sinks inside the kernels, rotary positions, and
prompts of any length in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from ato_jax import shapes
from ato_jax.nn.common import Call, MultiHead, append, as_implementation, as_input_shape, bind_mask
from ato_jax.ops.attention.api import OP, attention, bounds


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
      - Beyond the cache's length there is an error, or NaN inside jit, where the count of tokens
        is not known.
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
        bounds(causal, window)
        if softcap is not None:
            shapes.positive("softcap", softcap)
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

    def attend(self, call: Call) -> jax.Array:
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
        out = attention(
            query,
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
        if call.decode:
            # Inside jit a full cache cannot be refused; it must not pass unnoticed either.
            out = jnp.where(held + T <= key.shape[1], out, jnp.nan)
        return out

    def init_cache(self, input_shape: Sequence[int], dtype: Any = jnp.float32) -> None:
        """Makes an empty cache for inputs of shape [batch..., max_length, features].

        `dtype` is that of the keys: the layer's, or where it has none that of its inputs and
        parameters together.
        """
        super().init_cache(as_input_shape(input_shape, self.in_features), dtype)
