"""Masks as Flax gives them, read in one of two ways.

    bind_mask(call.mask, call)     any mask, as booleans [B|1, H|1, T|1, S|1]: for softmax attention
    factor_mask(call)              causality, queries [B, T] and keys [B, S]: for linear attention

A linear layer sums over keys once for all queries, so it can only leave out keys, or stop at a
query's own position. `hide_keys`, `hide_inputs` and `hide_queries` apply what `factor_mask` found.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ato_jax import shapes
from ato_jax.nn.arguments import Mask
from ato_jax.nn.call import Call
from ato_jax.ops.linear_attention.api import FeatureMapLike
from ato_jax.ops.linear_attention.features import Favor


def as_mask(mask: Any) -> Any:
    """A mask as an array of NumPy or JAX whose zeros hide; None stays None.

    A mask to be added to the scores has 0 where a key is seen, the opposite, and is refused. Inside
    jit its values are not known, so it is taken for zeros and ones, which Flax makes in float32.
    """
    if mask is None:
        return None
    if isinstance(mask, nnx.Variable):
        mask = mask[...]
    shapes.refuse_masked("mask", mask)
    if not isinstance(mask, jax.Array):
        try:
            mask = np.asarray(mask)
        except ValueError as error:
            raise ValueError(f"mask must be an array of booleans, got {mask!r}") from error
    floating = jnp.issubdtype(mask.dtype, jnp.floating)
    boolean = mask.dtype == bool
    if not (floating or boolean or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise ValueError(f"mask must be an array of booleans, got one of {mask.dtype}")
    known = not isinstance(mask, jax.core.Tracer) and getattr(mask, "is_fully_addressable", True)
    if not boolean and known:
        values = np.asarray(mask)
        if floating and values.size and not values.any():
            raise ValueError(
                "mask must not hold zeros alone, got shape "
                f"{values.shape}: one that is added to the scores and hides nothing can be left "
                "out; to hide everything give booleans"
            )
        if not ((values == 0) | (values == 1)).all():
            raise ValueError(
                "mask must hold True and False, or 1 and 0, got values from "
                f"{float(values.min()):g} to {float(values.max()):g}: in place of one that "
                "is added to the scores give mask == 0"
            )
    return mask


def bind_mask(mask: Any, call: Call, S: int | None = None) -> Any:
    """A mask as booleans [B|1, H|1, T|1, S|1], of NumPy if it was so; None stays None.

    `S` is the number of keys if it is not the call's: the length of a cache.
    """
    mask = as_mask(mask)
    if mask is None:
        return None
    T, H = call.query.shape[1:3]
    S = call.key.shape[1] if S is None else S
    shape = (1,) * (len(call.batch) + 3 - mask.ndim) + mask.shape
    wanted = (*call.batch, H, T, S)
    fits = len(shape) == len(wanted) and all(
        size in (1, full) for size, full in zip(shape, wanted, strict=True)
    )
    if not fits:
        of_keys = mask.shape == (*call.batch, S)
        hint = "; for a mask of keys give mask[..., None, None, :]" if of_keys else ""
        raise ValueError(
            f"mask must broadcast to [batch..., H, T, S] = {wanted}, got shape {mask.shape}{hint}"
        )
    mask = mask.astype(bool).reshape(shape)
    if all(size == 1 for size in shape[:-3]):
        return mask.reshape(1, *shape[-3:])
    numpy = np if isinstance(mask, np.ndarray) else jnp
    full = numpy.broadcast_to(mask, call.batch + shape[-3:])
    # -1 in place of the product would be ambiguous where an axis is empty.
    return full.reshape(math.prod(call.batch), *shape[-3:])


class Visible(NamedTuple):
    """A mask in factors: query i sees key j iff queries[i] and keys[j] and (j <= i if causal)."""

    causal: bool
    queries: Mask | None  # [B|1, T] booleans, None for all
    keys: Mask | None  # [B|1, S|1] booleans, None for all


def factor_mask(call: Call) -> Visible:
    """The call's mask and `causal` in factors.

    A mask of keys alone, [batch..., 1, 1, S], has factors by its shape. Any other is compared with
    its factors value by value, which needs values: outside of jit, or a constant inside it.

    Raises:
      ValueError: The mask is not a product of such factors, or its values are not known.
    """
    mask, causal = as_mask(call.mask), call.causal
    if mask is None:
        return Visible(causal, None, None)
    given = mask.shape
    for_keys = mask.ndim < 2 or mask.shape[-2] == 1
    if not for_keys and isinstance(mask, jax.core.Tracer):
        in_place_of_causal = (
            "This call is causal without a mask"
            if causal
            else "For a causal layer say causal=True (or is_causal=True in the call)"
        )
        raise ValueError(
            "mask has an axis of queries, and its values are not known inside jit: a linear layer "
            f"cannot tell whether it can honour it. {in_place_of_causal}; for padding give a mask "
            "[batch..., 1, 1, S] of the keys, for packed documents segment_ids; "
            f"got shape {mask.shape}"
        )
    # NumPy, because an operation of JAX inside jit would turn values into tracers.
    mask = bind_mask(mask if for_keys else np.asarray(mask), call)
    if for_keys and mask.shape[1] > 1 and not isinstance(mask, jax.core.Tracer):
        values = np.asarray(mask)
        mask = values[:, :1] if (values == values[:, :1]).all() else mask
    if mask.shape[1] == 1 and for_keys:
        return Visible(causal, None, mask[:, 0, 0])
    if for_keys:
        raise ValueError(
            "mask hides keys head by head, which a linear layer cannot do: its axis of heads must "
            f"be 1, or all heads alike outside of jit, got shape {given}"
        )
    T, S = call.query.shape[1], call.key.shape[1]
    pairs: Any = np.broadcast_to(mask, (*mask.shape[:2], T, S))
    for known_causal in (True,) if causal else (False, True) if T == S else (False,):
        order = np.tri(T, S, dtype=bool) if known_causal else np.ones((T, S), bool)
        # In a causal layer the mask may repeat that the call is causal, or leave it out.
        seen = pairs[:, 0] & order if causal else pairs[:, 0]
        queries, keys = seen.any(2), seen.any(1)
        same_in_heads = ((pairs & order if causal else pairs) == seen[:, None]).all()
        if same_in_heads and (seen == (queries[:, :, None] & keys[:, None] & order)).all():
            return Visible(known_causal, queries, keys)
    raise ValueError(
        "mask is neither causal nor a mask of padding nor both, and a linear layer can honour no "
        f"other, got shape {given}: use ato_jax.nn.Attention for it, or segment_ids where it keeps "
        "packed documents apart"
    )


# An x for which phi(x) is exactly 0, in float32 and in 16 bits: exp(-10000) underflows to 0.
_BLANK = {
    "elu1": -1e4,
    "relu": 0.0,
    "exp": -1e4,
    "softplus": -1e4,
    "identity": 0.0,
    "silu": 0.0,
    "relu2": 0.0,
}
# FAVOR+'s phi is 0 there: -|k|^2 / 2 outweighs w k for any row w that can be drawn.
_BLANK_FAVOR = 1e4


class _Itself:
    """A key for a feature map, by identity: a dataclass of arrays, for one, has no hash."""

    def __init__(self, feature_map: Callable[[jax.Array], jax.Array]) -> None:
        self.feature_map = feature_map

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.feature_map is other.feature_map

    def __hash__(self) -> int:
        return id(self.feature_map)


@functools.lru_cache(maxsize=64)
def _zero_at_infinity(which: _Itself) -> Callable[[jax.Array], jax.Array]:
    """phi, but 0 at -inf. Cached, so that the same phi gives the same function each time."""

    def extended(x: jax.Array) -> jax.Array:
        blank = x == -jnp.inf
        # phi is evaluated at 0 instead of -inf, where its value or derivative may be NaN.
        return jnp.where(blank, 0.0, which.feature_map(jnp.where(blank, 0.0, x)))

    return extended


def hide_keys(
    key: jax.Array, value: jax.Array, keys: Mask | None, feature_map: FeatureMapLike
) -> tuple[jax.Array, jax.Array, FeatureMapLike]:
    """k, v [B, S, G, D] and phi such that a hidden key has phi(k) = 0 and v = 0.

    Then it adds nothing to any sum, the normaliser included. `keys` [B|1, S|1] are booleans, False
    for hidden keys anywhere. NaN in a hidden key or value reaches no result; its gradient is 0.
    """
    if keys is None:
        return key, value, feature_map
    if isinstance(feature_map, str):
        blank = _BLANK.get(feature_map, 0.0)  # the op refuses unknown names
    elif isinstance(feature_map, Favor):
        blank = _BLANK_FAVOR
    else:
        blank, feature_map = -jnp.inf, _zero_at_infinity(_Itself(feature_map))
    seen = jnp.asarray(keys)[:, :, None, None]
    return jnp.where(seen, key, blank), jnp.where(seen, value, 0), feature_map


def hide_queries(array: jax.Array, queries: Mask | None) -> jax.Array:
    """The array [B, T, ...], 0 for hidden queries; `queries` as in `Visible`.

    Applied to the output and to the query itself: NaN in a hidden query, times its cotangent 0,
    would otherwise be NaN in the gradients of all keys.
    """
    return array if queries is None else blank_steps(array, queries)


def hide_inputs(call: Call, visible: Visible) -> Call:
    """The call, its query and the inputs of gates 0 where they are hidden."""
    return call._replace(
        query=hide_queries(call.query, visible.queries),
        inputs_q=hide_queries(call.inputs_q, visible.queries),
        inputs_k=call.inputs_k
        if visible.keys is None
        else blank_steps(call.inputs_k, visible.keys),
    )


def blank_steps(array: jax.Array, steps: Mask) -> jax.Array:
    """The array [B, T, ...], 0 where the booleans `steps` [B|1, T|1] are False."""
    return jnp.where(jnp.expand_dims(jnp.asarray(steps), tuple(range(2, array.ndim))), array, 0)
