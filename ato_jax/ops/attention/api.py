"""Softmax attention, the public function: arguments checked and bound, then dispatched.

    s[i,j] = scale * q_i . k_j ; softcap: c * tanh(s / c) ; + bias ; masked where not visible
    out_i  = softmax over j (and over the sink logit, which has no value) . v
"""

from __future__ import annotations

import operator
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ato_jax import choosing, dispatch, shapes
from ato_jax.ops import float8
from ato_jax.ops.attention import reading
from ato_jax.ops.attention.eight_bits import Float8Inputs, Float8Spec
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs
from ato_jax.ops.common import (
    Integers,
    Precision,
    axes,
    bind_lengths,
    bind_segments,
    check_within,
    pad_to_one,
    precision_of,
)
from ato_jax.ops.float8 import Scales

# (left, right): keys to the left and to the right of a query's position, None for no bound.
Window = tuple[int | None, int | None]

# The kernel for a few queries of each sequence and a long cache, in pages or not.
PAGED = "triton.paged"
OP: choosing.Op[AttentionSpec, Inputs, Outputs] = choosing.Op(
    "attention",
    ("mosaic_gpu", "triton.wide", "triton", "cudnn", "xla", "reference"),
    package="ato_jax.ops.attention",
    special=(("triton", PAGED),),
    on_demand=(("return_lse", "lse"),),
)

# A window of this size bounds nothing where queries begin within half of it from key 0, and the
# sum of a position and a bound stays within int32.
FARTHEST = 1 << 30
FARTHEST_OFFSET = FARTHEST // 2


class Request(NamedTuple):
    """A call with its arguments checked: what `dispatch` needs, and the shape of the answer."""

    spec: AttentionSpec
    inputs: Any  # `Inputs`, or those of a backend that reads float8
    implementation: str | None
    batched: bool
    T: int
    out_dtype: str | None = None  # of a call on float8 arrays
    op: Any = OP


def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    query_offset: Any = None,
    bias: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    scale: Any = None,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    return_lse: bool = False,
    layout: str = "bthd",
    scales: Any = None,
    out_dtype: Any = None,
    precision: Any = None,
    implementation: str | None = None,
) -> Request:
    """Checks and binds every argument of `attention`; its ValueErrors come from here."""
    ((q, k, v), own_scales), sizes, batched, out_dtype = float8.bind(
        q, k, v, layout, scales, out_dtype
    )
    dtype = str(q.dtype) if out_dtype is None else float8.wide_dtype(out_dtype)
    causal, return_lse = shapes.flag("causal", causal), shapes.flag("return_lse", return_lse)
    left, right = bounds(causal, window)
    q_lengths, kv_lengths, shared = bind_lengths(q_lengths, kv_lengths, sizes, batched)
    q_ids, kv_ids = bind_segments(segment_ids, q_segment_ids, kv_segment_ids, sizes, batched)
    bias = bind_bias(bias, sizes)
    mask = bind_mask(mask, sizes)
    sinks = bind_sinks(sinks, sizes)
    dropout_rate, seed = bind_dropout(dropout_rate, dropout_key)
    static_offset, query_offset = bind_offset(query_offset, sizes, batched)

    T = sizes["T"]
    if static_offset is None and query_offset is None:
        if shared:
            static_offset = 0
        elif q_lengths is None and kv_lengths is None:
            static_offset = sizes["S"] - sizes["T"]
    if T == 0 or sizes["S"] == 0:
        # An empty side becomes one padded row, so that backends never meet an empty array.
        if T == 0:
            q_lengths = jnp.zeros(sizes["B"], jnp.int32)
        if sizes["S"] == 0:
            kv_lengths = jnp.zeros(sizes["B"], jnp.int32)
        time = axes(layout, "BTHD").index("T")
        q, k, v = (pad_to_one(array, time) for array in (q, k, v))
        if q_ids is not None and kv_ids is not None:
            q_ids, kv_ids = pad_to_one(q_ids, 1), pad_to_one(kv_ids, 1)
        bias, mask = (
            None if array is None else pad_to_one(pad_to_one(array, 2), 3)
            for array in (bias, mask)
        )
        sizes |= {"T": max(T, 1), "S": max(sizes["S"], 1)}

    precision = precision_of(precision, dtype)
    if softcap is not None or sinks is not None:
        # A score rounded to TF32 moves a softcap's slope and a sink's weight: gradients by them
        # were 1.0e-3 to 3.5e-3 off on a card, beyond what TF32 is allowed.
        precision = "exact"

    def full(array: jax.Array | None) -> Any:
        shape = tuple(sizes[letter] for letter in "BHTS")
        return None if array is None else tuple(map(operator.eq, array.shape, shape))

    spec = AttentionSpec(
        **sizes,
        dtype=dtype,
        scale=shapes.scale(sizes["D"] ** -0.5 if scale is None else scale),
        layout=layout,
        left=left,
        right=right,
        offset=static_offset,
        query_offset=query_offset is not None,
        bias=full(bias),
        mask=full(mask),
        segments=q_ids is not None,
        q_lengths=q_lengths is not None,
        kv_lengths=kv_lengths is not None,
        softcap=None if softcap is None else shapes.positive("softcap", softcap),
        sinks=sinks is not None,
        dropout_rate=dropout_rate,
        keep_rest=False,
        return_lse=return_lse,
        precision=precision,
    )
    inputs = Inputs(
        q,
        k,
        v,
        bias,
        mask,
        sinks,
        q_ids,
        kv_ids,
        q_lengths,
        kv_lengths,
        query_offset,
        seed,
    )
    request = Request(spec, inputs, implementation, batched, T, out_dtype)
    if out_dtype is None:
        return request
    read = Float8Inputs(inputs, *own_scales)
    return float8.resolved(request, reading.OP, read, own_scales, Float8Spec.of(spec))


def bounds(causal: bool, window: Any) -> tuple[int | None, int | None]:
    """How many keys to the left and to the right of its position a query sees."""
    left = right = None
    if window is not None:
        is_pair = isinstance(window, tuple | list) and len(window) == 2
        if not is_pair or not all(
            bound is None or (shapes.is_int(bound) and bound >= 0) for bound in window
        ):
            raise ValueError(
                "window must be a pair (left, right), each an int >= 0 or None, "
                f"got {window!r}"
            )
        left, right = (None if bound is None else min(int(bound), FARTHEST) for bound in window)
    return left, 0 if causal else right


def bind_offset(
    query_offset: Any, sizes: dict[str, int], batched: bool
) -> tuple[int | None, jax.Array | None]:
    """The query offset as a static int or as an array [B]."""
    name, farthest = "query_offset", FARTHEST_OFFSET
    if query_offset is None:
        return None, None
    if shapes.is_int(query_offset):
        shapes.within(name, query_offset, -farthest, farthest, str(farthest))
        return int(query_offset), None
    found = shapes.integers(name, query_offset)
    if found.ndim > 0:
        shapes.bind_batch(sizes, name, found.shape, batched)
    shapes.within(name, query_offset, -farthest, farthest, str(farthest))
    check_within(name, found, -farthest, farthest, str(farthest))
    found = shapes.clipped(found, -farthest, farthest)
    return None, jnp.broadcast_to(found, (sizes["B"],))


def _four_axes(name: str, array: Any, sizes: dict[str, int]) -> jax.Array:
    """[B|1, H|1, T|1, S|1]; without a batch axis in q, [H, T, S] and what broadcasts to it."""
    return array.reshape(shapes.broadcastable(sizes, name, array.shape, "BHTS"))


def bind_bias(bias: Any, sizes: dict[str, int]) -> jax.Array | None:
    if bias is None:
        return None
    return _four_axes("bias", shapes.floating("bias", bias), sizes)


def bind_mask(mask: Any, sizes: dict[str, int]) -> jax.Array | None:
    if mask is None:
        return None
    found = shapes.dtype_name("mask", mask)
    if found != "bool":
        raise ValueError(f"mask must be boolean, got {found}; an additive one is `bias`")
    mask = shapes.as_array("mask", mask)
    if mask.shape == (sizes["B"], sizes["S"]) and sizes["B"] not in (1, sizes["T"]):
        raise ValueError(
            f"mask must broadcast to [B, H, T, S], got shape {mask.shape}, which is [B, S]: for a "
            "mask of keys give mask[:, None, None], for padding at the end kv_lengths"
        )
    return _four_axes("mask", mask, sizes)


def bind_sinks(sinks: Any, sizes: dict[str, int]) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = shapes.floating("sinks", sinks)
    shapes.bind(sizes, "sinks", sinks.shape, "H")
    return sinks.astype(jnp.float32)


def bind_dropout(rate: Any, key: Any) -> tuple[float, jax.Array | None]:
    """The rate, and the seed where it is above 0."""
    rate = shapes.static_number("dropout_rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be at least 0 and below 1, got {rate}")
    return rate, dropout_seed(key) if rate > 0 else None


class PlacedSeed(NamedTuple):
    """What takes a dropout key's place in a part of a larger call: the two words that the key gives
    there, and where the part's pairs begin, each an integer."""

    words: jax.Array  # [2] uint32
    b: Any
    h: Any
    i: Any
    j: Any


def dropout_seed(key: Any) -> jax.Array:
    """Two words from a JAX random key, and where the call is a part, the position of the part."""
    if isinstance(key, PlacedSeed):
        start = (jnp.asarray(index).astype(jnp.uint32) for index in key[1:])
        return jnp.stack([*key.words, *start])
    if key is None:
        raise ValueError("dropout_key must be given with a dropout_rate above 0")
    return shapes.draw("dropout_key", key, lambda key: jax.random.bits(key, (2,), jnp.uint32))


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, causal: bool = ..., window: Window | None = ...,
    query_offset: Integers | None = ..., bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ..., segment_ids: Integers | None = ...,
    q_segment_ids: Integers | None = ..., kv_segment_ids: Integers | None = ...,
    q_lengths: Integers | None = ..., kv_lengths: Integers | None = ...,
    softcap: float | None = ..., sinks: ArrayLike | None = ..., scale: float | None = ...,
    dropout_rate: float = ..., dropout_key: jax.Array | None = ...,
    return_lse: Literal[False] = ..., layout: str = ..., scales: Scales | None = ...,
    out_dtype: DTypeLike | None = ..., precision: Precision = ...,
    implementation: str | None = ...,
) -> jax.Array: ...  # fmt: skip


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, causal: bool = ..., window: Window | None = ...,
    query_offset: Integers | None = ..., bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ..., segment_ids: Integers | None = ...,
    q_segment_ids: Integers | None = ..., kv_segment_ids: Integers | None = ...,
    q_lengths: Integers | None = ..., kv_lengths: Integers | None = ...,
    softcap: float | None = ..., sinks: ArrayLike | None = ..., scale: float | None = ...,
    dropout_rate: float = ..., dropout_key: jax.Array | None = ...,
    return_lse: Literal[True], layout: str = ..., scales: Scales | None = ...,
    out_dtype: DTypeLike | None = ..., precision: Precision = ...,
    implementation: str | None = ...,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    window: Window | None = None,
    query_offset: Integers | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    segment_ids: Integers | None = None,
    q_segment_ids: Integers | None = None,
    kv_segment_ids: Integers | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_lse: bool = False,
    layout: str = "bthd",
    scales: Scales | None = None,
    out_dtype: DTypeLike | None = None,
    precision: Precision = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes exact softmax attention, in memory linear in T and S.

        s[i,j] = scale * q_i . k_j ; softcap: c * tanh(s / c) ; + bias ; masked where not visible
        out_i  = softmax over j (and over the sink logit, which has no value) . v

    Sums are float32 for every input dtype. The gradients of q, k, v, bias and sinks are computed
    block by block, too: no pass holds an array of T times S elements.

    Args:
      q: Queries [B, T, H, D], float16, bfloat16, float32 or float8_e4m3fn. B may be missing, and
        then it is missing from every other argument and from the results.
      k: Keys [B, S, G, D] in q's dtype. H is a multiple of G: query head h reads key/value head
        h // (H // G).
      v: Values [B, S, G, V] in q's dtype.
      causal: Query i sees key j if and only if j <= position(i). Without `query_offset`,
        position(i) = kv_length - q_length + i, so the last query sees the last key.
      window: (left, right): query i sees the keys from position(i) - left to position(i) + right.
        Each is an int >= 0, or None for no bound. Blocks outside the window are skipped.
      query_offset: An int or integers [B]: position(i) = query_offset + i. The mask of
        `torch.nn.functional.scaled_dot_product_attention(is_causal=True)` has query_offset = 0.
      bias: Added to the scores: floats that broadcast to [B, H, T, S]. -inf hides a key. Its
        gradient is summed over the axes that were broadcast.
      mask: Booleans that broadcast to [B, H, T, S]. False hides a key.
      segment_ids: Integers [B, T], for queries and keys alike (T = S). A query sees the keys of
        its own id alone.
      q_segment_ids: Integers [B, T], together with `kv_segment_ids` in place of `segment_ids`.
      kv_segment_ids: Integers [B, S].
      q_lengths: Integers [B]: queries from there on are padding and give 0. Where T = S, it also
        sets a missing `kv_lengths`.
      kv_lengths: Integers [B]: keys from there on are padding and are never seen; a NaN among them
        reaches no output. Where T = S, it also sets a missing `q_lengths`.
      softcap: c > 0: the scores are limited to (-c, c).
      sinks: Floats [H]: one more logit in the softmax of every query of a head, without a value.
      scale: Factor of the scores; D ** -0.5 unless given.
      dropout_rate: Probability in [0, 1) with which a weight is dropped; the others are divided by
        1 - dropout_rate.
      dropout_key: JAX random key, needed where dropout_rate > 0. Which weights are dropped depends
        on the key and on the position alone, in every backend.
      return_lse: Return (out, lse) in place of out.
      layout: "bthd", or "bhtd" for q, k, v, out [B, H, T, D] and lse [B, H, T]. Axes of bias and
        mask stay [B, H, T, S].
      scales: (q_scale [B, H], k_scale [B, G], v_scale [B, G]), float32, for q, k and v of
        float8_e4m3fn, and only for these: q stands for q * q_scale. `ato_jax.quantize` makes both.
        Hopper's kernel multiplies them as 8 bits, and rounds the weights to 8 bits, too; other
        backends get them widened, and cost what a call on bfloat16 arrays does.
      out_dtype: Dtype of out where q, k and v are float8_e4m3fn: "bfloat16" unless given,
        "float16", or "float32", for which they are widened to float32.
      precision: How float32 inputs are multiplied. None is exact; "tf32" or "default" may round
        the factors to TF32. With a softcap or sinks the products are exact regardless, since TF32
        would spoil these gradients. Other dtypes ignore it.
      implementation: None for the fastest backend that supports the call on this device, or one of
        "mosaic_gpu" (Hopper; bfloat16 and float16; D and V multiples of 16 up to 256), "triton",
        "triton.wide" (D or V from 257 on, up to 256 queries and keys), "cudnn", "xla" and
        "reference". Gradients by cuDNN may differ in the last bit from run to run; those of the
        other backends do not.

    Returns:
      out [B, T, H, V] in v's dtype, or `out_dtype`; with `return_lse` the pair (out, lse). lse is
      the natural logarithm of the softmax's denominator, sink included: float32 [B, T, H],
      differentiable. For a query that sees no key, out is 0 and lse is -inf, or the sink's logit
      where there are sinks.

    Raises:
      ValueError: An argument is wrong for every backend: its shape, dtype or value. The message
        names it, what it was and what it has to be. The numbers in a jax array of lengths or
        offsets are not read, and `ato_jax.checked` reports them.
      UnsupportedError: The backend named by `implementation` does not support this call on this
        device, or a derivative is taken of a call on float8 arrays; the message says why.

    Example:
      >>> import ato_jax, jax.numpy as jnp
      >>> q = jnp.ones((2, 16, 8, 32))  # [B, T, H, D]
      >>> k = v = jnp.ones((2, 16, 2, 32))  # [B, S, G, D]
      >>> out = ato_jax.attention(q, k, v, causal=True, window=(7, 0))
      >>> out.shape
      (2, 16, 8, 32)
      >>> out, lse = ato_jax.attention(q, k, v, return_lse=True)
      >>> lse.shape
      (2, 16, 8)
    """
    request = prepare(
        q,
        k,
        v,
        causal=causal,
        window=window,
        query_offset=query_offset,
        bias=bias,
        mask=mask,
        segment_ids=segment_ids,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        return_lse=return_lse,
        layout=layout,
        scales=scales,
        out_dtype=out_dtype,
        precision=precision,
        implementation=implementation,
    )
    spec = request.spec
    out, lse, _ = dispatch.run(request.op, spec, request.inputs, request.implementation)
    if request.T < spec.T:
        time = axes(layout, "BTH").index("T")
        out, lse = (jax.lax.slice_in_dim(array, 0, request.T, axis=time) for array in (out, lse))
    if not request.batched:
        out, lse = out[0], lse[0]
    out = out if request.out_dtype is None else out.astype(request.out_dtype)
    return (out, lse) if return_lse else out
