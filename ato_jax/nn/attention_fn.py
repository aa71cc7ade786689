"""Attention functions for Flax's own layers: their `attention_fn` argument.

    nnx.MultiHeadAttention(..., attention_fn=ato_jax.nn.softmax_attention_fn())
    linen.MultiHeadDotProductAttention(..., attention_fn=ato_jax.nn.linear_attention_fn())

Flax calls these functions like `dot_product_attention`, with arrays [batch..., T, H, D] with any
number of batch axes, and `bias` and `mask` broadcastable to [batch..., H, T, S]. Every argument is
honoured exactly, or refused by an error that names it:

- The softmax function gives Flax's numbers, with two differences. A query that sees no key gives 0,
  where Flax gives the mean of all values. `precision=None` multiplies float32 in full float32 on
  every device, where Flax leaves it to the device.
- Dropout drops weights after the softmax. With `broadcast_dropout=True`, Flax's default, all batch
  entries and heads share one pattern [T, S]. The kernels draw a pattern for each batch entry and
  head, so the shared one is drawn here, with Flax's random bits. It costs a mask [T, S] and a
  second pass for the normaliser. `broadcast_dropout=False` drops inside the kernel, with other
  random bits.
- Linear attention honours key-padding and causal masks. It has no weights to bias or to drop.
- Neither forms weights that a module could sow.

The functions are frozen and compare by their options, so that equal ones share compiled programs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype
from jax.typing import ArrayLike

import ato_jax
from ato_jax import shapes
from ato_jax.nn.arguments import (
    Mask,
    as_implementation,
    refuse_no_dtype,
    refuse_no_key,
    refuse_no_promotion,
)
from ato_jax.nn.call import Call, one_batch_axis
from ato_jax.nn.masks import bind_mask, factor_mask, hide_keys, hide_queries
from ato_jax.ops.attention import api as softmax
from ato_jax.ops.linear_attention import api as linear
from ato_jax.ops.linear_attention.api import FeatureMapLike
from ato_jax.ops.linear_attention.features import Favor


class AttentionFn:
    """Checks a call as Flax makes it; a subclass implements `attend`."""

    def attend(
        self, call: Call, bias: Any, dropout_rate: float, broadcast_dropout: bool, precision: Any
    ) -> jax.Array:
        """The attention [B, T, H, V]; `call.dropout_key` is None where nothing is dropped."""
        raise NotImplementedError

    # Linen looks up the names in this signature and passes no other arguments.
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: Mask | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Dtype | None = None,
        precision: jax.lax.PrecisionLike = None,
        module: Any = None,
        promote_dtype: Any = flax_promote_dtype,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,  # it is float32 always
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> jax.Array:
        """Computes attention with the arguments of `nnx.dot_product_attention`."""
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
        # With a dtype, arrays are converted to it. Without one, float64 would be narrowed silently.
        read = shapes.floating if dtype is None else shapes.as_array
        named = (("query", query), ("key", key), ("value", value))
        arrays = tuple(read(name, array) for name, array in named)
        promoted: tuple[jax.Array, ...] = promote_dtype(arrays, dtype=dtype)
        batch = promoted[0].shape[:-3]
        for name, array in zip(("key", "value"), promoted[1:], strict=True):
            if array.ndim != promoted[0].ndim or array.shape[:-3] != batch:
                raise ValueError(
                    f"{name} must have query's batch axes {batch}, got shape {array.shape}"
                )
        if mask is not None and not isinstance(mask, jax.Array):
            shapes.dtype_name("mask", mask)  # raises an error if it is no array
            mask = np.asarray(mask)
        q, k, v = (one_batch_axis(array, 3) for array in promoted)
        call = Call(
            q,
            k,
            v,
            inputs_q=q,  # the unprojected inputs are not known here; only gates read them
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
    """Softmax attention as an `attention_fn`: see `softmax_attention_fn`."""

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
        # A single query stands at the last key and sees all keys that the mask shows.
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
        shape = (1,) * (len(call.batch) + 1) + (T, S)  # the shape, and so the random bits, of Flax
        keep = jax.random.bernoulli(call.dropout_key, 1 - dropout_rate, shape)
        return _dropped(q, k, v, keep.reshape(1, 1, T, S), dropout_rate, mask, options)


@dataclasses.dataclass(frozen=True)
class LinearAttentionFn(AttentionFn):
    """Linear attention as an `attention_fn`: see `linear_attention_fn`."""

    feature_map: FeatureMapLike
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
        # A single query sees all keys: it decodes one token.
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
    """Returns `ato_jax.attention` as the `attention_fn` of Flax's layers, nnx's and Linen's.

    The layers keep their own parameters and their own cache. Query i stands at position S - T + i
    among the keys, or at i if the layer asks for `is_causal`, as in Flax. With a mask and T != S
    the positions are not known, since the mask may hide the end of a cache: then `window` is
    refused, and so is `causal` for more than one query. A layer with a window cannot decode with
    Flax's cache; `ato_jax.nn.Attention` can.

    Args:
      causal: Query i sees the keys up to its position, in addition to what the layer asks for. It
        needs no mask [T, S] in memory.
      window: (left, right): a query sees the keys from its position - left to its position + right.
        Each is an int >= 0, or None for no bound.
      softcap: c > 0: the scores are limited to (-c, c).
      scale: Factor of the scores; D ** -0.5 unless given.
      implementation: A backend of `ato_jax.attention` by name; None takes the fastest.

    Returns:
      A function with the arguments of `nnx.dot_product_attention`. Two with equal options are
      equal, so that they share compiled programs.

    Raises:
      ValueError: An option has a wrong type or value. The returned function raises it for
        arguments that it cannot honour, such as `sow_weights`.

    Example:
      >>> import jax.numpy as jnp
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> layer = nnx.MultiHeadAttention(
      ...     num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0),
      ...     attention_fn=ato_jax.nn.softmax_attention_fn(causal=True),
      ... )
      >>> layer(jnp.ones((2, 8, 16))).shape
      (2, 8, 16)
    """
    left, right = softmax.bounds(causal=False, window=window)
    return SoftmaxAttentionFn(
        causal=shapes.flag("causal", causal),
        window=None if left is None and right is None else (left, right),
        softcap=None if softcap is None else shapes.positive("softcap", softcap),
        scale=None if scale is None else shapes.scale(scale),
        implementation=as_implementation(softmax.OP, implementation),
    )


def linear_attention_fn(
    *,
    feature_map: FeatureMapLike = "elu1",
    causal: bool = False,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> LinearAttentionFn:
    """Returns `ato_jax.linear_attention` as the `attention_fn` of Flax's layers.

    It serves nnx's and Linen's layers. Key-padding and causal masks are honoured; any other mask, a
    bias, and dropout are refused. Flax's layers decode with a cache of all keys, also with this
    function. `ato_jax.nn.LinearAttention` has a cache of constant size.

    Args:
      feature_map: phi: a name or an elementwise JAX function, as in `ato_jax.linear_attention`. One
        of `ato_jax.favor` holds arrays, which belong into a layer: `ato_jax.nn.Performer`.
      causal: Query i sees the keys up to i. It needs T = S, or a single query, which sees all.
      normalize: Divide by the sum of the weights. None does so where phi is known to be
        non-negative.
      scale: Factor of the sums for normalize=False; D ** -0.5 unless given.
      eps: The smallest denominator.
      implementation: A backend of `ato_jax.linear_attention` by name; None takes the fastest.

    Returns:
      A function with the arguments of `nnx.dot_product_attention`. Two with equal options are
      equal, so that they share compiled programs.

    Raises:
      ValueError: An option has a wrong type or value. The returned function raises it for
        arguments that it cannot honour, such as `bias`.

    Example:
      >>> import jax.numpy as jnp
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> layer = nnx.MultiHeadAttention(
      ...     num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0),
      ...     attention_fn=ato_jax.nn.linear_attention_fn(feature_map="relu"),
      ... )
      >>> layer(jnp.ones((2, 8, 16))).shape
      (2, 8, 16)
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
        scale=None if scale is None else shapes.scale(scale),
        eps=shapes.positive("eps", eps),
        implementation=as_implementation(linear.OP, implementation),
    )


def _bind_bias(bias: jax.Array, call: Call) -> jax.Array:
    """A bias that broadcasts to [batch..., H, T, S], with one batch axis."""
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
    mask: Mask | None,
    options: dict[str, Any],
) -> jax.Array:
    """Attention with the weights dropped where `keep` [1, 1, T, S] is False.

    Attention to the kept keys alone divides by their sum exp(lse_kept). Dropout divides by the sum
    over all visible keys, exp(lse), so the result is multiplied by exp(lse_kept - lse).
    """
    kept = keep if mask is None else keep & jnp.asarray(mask)
    out, lse_kept = ato_jax.attention(q, k, v, mask=kept, return_lse=True, **options)
    # One column of values is enough for the normaliser.
    _, lse = ato_jax.attention(q, k, v[..., :1], mask=mask, return_lse=True, **options)
    nothing = lse_kept == -jnp.inf
    share = jnp.where(nothing, 0, jnp.exp(jnp.where(nothing, 0, lse_kept - lse)))
    return (out.astype(jnp.float32) * share[..., None] / (1 - dropout_rate)).astype(v.dtype)
