"""Attention functions for Flax's own layers: their `attention_fn` argument.

    nnx.MultiHeadAttention(..., attention_fn=ato_jax.nn.softmax_attention_fn())
    linen.MultiHeadDotProductAttention(..., attention_fn=ato_jax.nn.linear_attention_fn())

What they return is called as Flax calls `dot_product_attention`: arrays [batch..., T, H, D], any
number of batch axes or none; `bias` and `mask` broadcastable to [batch..., H, T, S]. What Flax
hands over is honoured exactly or refused by name, never ignored:

- The softmax function computes Flax's numbers, with two differences. A query that sees nothing
  gives 0, where Flax gives the mean of all values. And `precision=None` multiplies float32 in
  float32 on every device, where Flax leaves it to the device.
- Dropout drops weights after the softmax. With `broadcast_dropout=True`, Flax's default, all of a
  batch and all heads share one [T, S] pattern. The kernels draw for each batch entry and head, so
  it is drawn here, from Flax's bits, and costs a mask [T, S] and a second pass for the normaliser.
  `broadcast_dropout=False` drops inside the kernel, by bits that are not Flax's.
- Linear attention honours key-padding and causal masks, and forms no weights to bias or to drop.
- Neither forms weights that a module could sow.

They are frozen and compare by their options, so that equal ones do not compile anew.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype

import ato_jax
from ato_jax import shapes
from ato_jax.nn.common import (
    Call,
    as_implementation,
    bind_mask,
    factor_mask,
    hide_keys,
    hide_queries,
    one_batch_axis,
    refuse_no_dtype,
    refuse_no_key,
    refuse_no_promotion,
)
from ato_jax.ops.attention import api as softmax
from ato_jax.ops.linear_attention import api as linear
from ato_jax.ops.linear_attention.features import Favor


class AttentionFn:
    """The call that Flax makes; a subclass says what attention is."""

    def attend(
        self, call: Call, bias: Any, dropout_rate: float, broadcast_dropout: bool, precision: Any
    ) -> jax.Array:
        """[B, T, H, V]; `call.dropout_key` is None where nothing is dropped."""
        raise NotImplementedError

    # Linen passes only the arguments that it finds named here, so each has its place.
    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Any = flax_promote_dtype,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,  # it is float32 always
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> jax.Array:
        for name, argument in {
            "sow_weights": module,
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }.items():
            if argument is not None:
                raise ValueError(
                    f"{name} is refused by {type(self).__name__}: no einsum forms the weights, "
                    "they are never in memory"
                )
        deterministic = shapes.flag("deterministic", deterministic)
        broadcast_dropout = shapes.flag("broadcast_dropout", broadcast_dropout)
        shapes.flag("force_fp32_for_softmax", force_fp32_for_softmax)
        dropout_rate = shapes.number("dropout_rate", dropout_rate)
        if not deterministic and not 0 <= dropout_rate < 1:
            raise ValueError(f"dropout_rate must be at least 0 and below 1, got {dropout_rate}")
        dropped = not deterministic and dropout_rate > 0
        if dropped and dropout_rng is None:
            raise ValueError(f"dropout_rng must be given with a dropout_rate of {dropout_rate}")
        if dropped:
            refuse_no_key("dropout_rng", dropout_rng)
        refuse_no_dtype(dtype=dtype)
        refuse_no_promotion("promote_dtype", promote_dtype)
        # With a dtype, others are converted to it; without one they would be narrowed unasked.
        read = shapes.floating if dtype is None else shapes.as_array
        named = (("query", query), ("key", key), ("value", value))
        arrays = tuple(read(name, array) for name, array in named)
        query, key, value = promote_dtype(arrays, dtype=dtype)
        batch = query.shape[:-3]
        for name, array in (("key", key), ("value", value)):
            if array.ndim != query.ndim or array.shape[:-3] != batch:
                raise ValueError(
                    f"{name} must have query's batch axes {batch}, got shape {array.shape}"
                )
        if mask is not None and not isinstance(mask, jax.Array):
            shapes.dtype_name("mask", mask)  # or the error that it is no array
            mask = np.asarray(mask)
        q, k, v = (one_batch_axis(array, 3) for array in (query, key, value))
        call = Call(
            q,
            k,
            v,
            inputs_q=q,  # what was projected is not known here; only gates would read it
            inputs_k=k,
            batch=batch,
            mask=mask,
            causal=shapes.flag("is_causal", is_causal),
            decode=False,
            dropout_key=dropout_rng if dropped else None,
        )
        out = self.attend(call, bias, dropout_rate, broadcast_dropout, precision)
        return out.reshape(*batch, *out.shape[1:])


@dataclasses.dataclass(frozen=True)
class SoftmaxAttentionFn(AttentionFn):
    """What `softmax_attention_fn` returns."""

    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    scale: float | None
    implementation: str | None

    def attend(
        self, call: Call, bias: Any, dropout_rate: float, broadcast_dropout: bool, precision: Any
    ) -> jax.Array:
        q, k, v = call.query, call.key, call.value
        T, S = q.shape[1], k.shape[1]
        mask = bind_mask(call.mask, call)
        # A single query at the last key sees all keys that the mask leaves, causal or not.
        placed = "window" if self.window is not None else "causal" if self.causal and T > 1 else ""
        if placed and mask is not None and T != S:
            raise ValueError(
                f"{placed} needs the queries' positions, not known with a mask and T != S: "
                "the mask may hide the end of the keys, as it does the rest of a cache where "
                f"Flax's layer decodes; got T={T}, S={S}. Let the mask say it, or decode with "
                "ato_jax.nn.Attention"
            )
        options: dict[str, Any] = dict(
            causal=self.causal or call.causal,
            window=self.window,
            query_offset=0 if call.causal and T != S else None,
            bias=None if bias is None else _bind_bias(shapes.floating("bias", bias), call),
            softcap=self.softcap,
            scale=self.scale,
            precision=precision,
            implementation=self.implementation,
        )
        if call.dropout_key is None:
            return ato_jax.attention(q, k, v, mask=mask, **options)
        if not broadcast_dropout:
            options |= {"dropout_rate": dropout_rate, "dropout_key": call.dropout_key}
            return ato_jax.attention(q, k, v, mask=mask, **options)
        shape = (1,) * (len(call.batch) + 1) + (T, S)  # Flax's, and so are the bits
        keep = jax.random.bernoulli(call.dropout_key, 1 - dropout_rate, shape)
        return _dropped(q, k, v, keep.reshape(1, 1, T, S), dropout_rate, mask, options)


@dataclasses.dataclass(frozen=True)
class LinearAttentionFn(AttentionFn):
    """What `linear_attention_fn` returns."""

    feature_map: Any
    causal: bool
    normalize: bool | None
    scale: float | None
    eps: float
    implementation: str | None

    def attend(
        self, call: Call, bias: Any, dropout_rate: float, broadcast_dropout: bool, precision: Any
    ) -> jax.Array:
        if bias is not None:
            raise ValueError("bias must be None: linear attention forms no scores to add it to")
        if call.dropout_key is not None:
            raise ValueError(
                f"dropout_rate must be 0 (or deterministic=True), got {dropout_rate}: "
                "linear attention forms no weights to drop"
            )
        T, S = call.query.shape[1], call.key.shape[1]
        if T != S and (call.causal or (self.causal and T > 1)):
            asked = "is_causal" if call.causal else "causal"
            raise ValueError(f"{asked} needs as many keys as queries, got T={T}, S={S}")
        # The last query of all sees every key: that is decoding, one token at a time.
        visible = factor_mask(call._replace(causal=call.causal or (self.causal and T == S)))
        k, v, feature_map = hide_keys(call.key, call.value, visible.keys, self.feature_map)
        out = ato_jax.linear_attention(
            call.query,
            k,
            v,
            feature_map=feature_map,
            causal=visible.causal,
            normalize=self.normalize,
            scale=self.scale,
            eps=self.eps,
            precision=precision,
            implementation=self.implementation,
        )
        return hide_queries(out, visible.queries)


def softmax_attention_fn(
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> SoftmaxAttentionFn:
    """`ato_jax.attention` as the `attention_fn` of Flax's layers, nnx's and Linen's.

    Args:
      causal, window, softcap, scale, implementation: as in `ato_jax.attention`, besides what the
        layer asks for. `causal` needs no mask [T, S] in memory and skips what it hides.

    Query i stands at position S - T + i among the keys, and where the layer asks for `is_causal`,
    at i: Flax aligns the first query with the first key. With a mask and T != S the positions are
    not known, and `window` is refused, as is `causal` of more than one query. So a layer with a
    window cannot decode by Flax's cache; `ato_jax.nn.Attention` can.
    """
    left, right = softmax.bounds(causal=False, window=window)
    return SoftmaxAttentionFn(
        causal=shapes.flag("causal", causal),
        window=None if left is None and right is None else (left, right),
        softcap=None if softcap is None else shapes.positive("softcap", softcap),
        scale=None if scale is None else shapes.static_number("scale", scale),
        implementation=as_implementation(softmax.OP, implementation),
    )


def linear_attention_fn(
    *,
    feature_map: Any = "elu1",
    causal: bool = False,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> LinearAttentionFn:
    """`ato_jax.linear_attention` as the `attention_fn` of Flax's layers, nnx's and Linen's.

    Args:
      feature_map, causal, normalize, scale, eps, implementation: as in
        `ato_jax.linear_attention`, where causal needs T = S or a single query, which sees all.
        A map that holds arrays, as `ato_jax.favor` does, belongs in a layer that has them among
        its variables: `ato_jax.nn.Performer`.

    Flax's layers decode with a cache of keys also around this function; the layer whose cache is
    a state of constant size is `ato_jax.nn.LinearAttention`.
    """
    if isinstance(feature_map, Favor):
        raise ValueError(
            "feature_map must hold no arrays here, got one of ato_jax.favor; "
            "use ato_jax.nn.Performer, which has its projection among its variables"
        )
    return LinearAttentionFn(
        feature_map=feature_map,
        causal=shapes.flag("causal", causal),
        normalize=None if normalize is None else shapes.flag("normalize", normalize),
        scale=None if scale is None else shapes.static_number("scale", scale),
        eps=shapes.positive("eps", eps),
        implementation=as_implementation(linear.OP, implementation),
    )


def _bind_bias(bias: jax.Array, call: Call) -> jax.Array:
    """What broadcasts to [batch..., H, T, S], with one batch axis."""
    wanted = (*call.batch, call.query.shape[2], call.query.shape[1], call.key.shape[1])
    shape = (1,) * (len(wanted) - bias.ndim) + bias.shape
    fits = len(shape) == len(wanted) and all(
        size in (1, full) for size, full in zip(shape, wanted, strict=True)
    )
    if not fits:
        raise ValueError(
            f"bias must broadcast to [batch..., H, T, S] = {wanted}, got shape {bias.shape}"
        )
    if all(size == 1 for size in shape[:-3]):
        return bias.reshape(1, *shape[-3:])
    bias = jnp.broadcast_to(bias.reshape(shape), call.batch + shape[-3:])
    return bias.reshape(math.prod(call.batch), *shape[-3:])


def _dropped(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keep: jax.Array,
    dropout_rate: float,
    mask: Any,
    options: dict[str, Any],
) -> jax.Array:
    """Attention with weights dropped where `keep` [1, 1, T, S] is False, not normalised anew.

    Attention to the kept keys alone divides by their own sum, exp(lse_kept), where the sum over
    all visible keys, exp(lse), is wanted.
    """
    kept = keep if mask is None else keep & jnp.asarray(mask)
    out, lse_kept = ato_jax.attention(q, k, v, mask=kept, return_lse=True, **options)
    # One column of values is enough for the normaliser.
    _, lse = ato_jax.attention(q, k, v[..., :1], mask=mask, return_lse=True, **options)
    nothing = lse_kept == -jnp.inf
    share = jnp.where(nothing, 0, jnp.exp(jnp.where(nothing, 0, lse_kept - lse)))
    return (out.astype(jnp.float32) * share[..., None] / (1 - dropout_rate)).astype(v.dtype)
