"""Linear attention, the public functions: arguments checked and bound, then dispatched.

    w[i,j] = (phi(q_i) . phi(k_j)) * decay(i,j) * visible(i,j)
    out_i  = sum_j w[i,j] v_j / max(sum_j w[i,j], eps)     normalize=True
    out_i  = scale * sum_j w[i,j] v_j                      normalize=False
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ato_jax import checking, choosing, dispatch, shapes
from ato_jax.ops import float8
from ato_jax.ops.common import (
    Integers,
    Precision,
    axes,
    bind_lengths,
    bind_segments,
    number_runs,
    pad_to_one,
    precision_of,
    refuse_positive,
    with_batch,
)
from ato_jax.ops.float8 import Scales
from ato_jax.ops.linear_attention import features, reading, segments
from ato_jax.ops.linear_attention.eight_bits import Float8Inputs
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs

# A name, or a function of one array, such as what `favor` returns.
FeatureMapLike = str | Callable[[jax.Array], jax.Array]

OP: choosing.Op[LinearAttentionSpec, Inputs, Outputs] = choosing.Op(
    "linear_attention",
    ("mosaic_gpu", "triton", "xla.products", "xla", "reference"),
    package="ato_jax.ops.linear_attention",
)


class Request(NamedTuple):
    """A call with its arguments checked: what `dispatch` needs, and the shape of the answer."""

    spec: LinearAttentionSpec
    inputs: Any  # `Inputs`, or what `op` takes
    implementation: str | None
    batched: bool
    T: int
    out_dtype: str | None = None  # of a call on float8 arrays
    op: choosing.Op[LinearAttentionSpec, Any, Outputs] = OP


def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    feature_map: Any = "elu1",
    causal: bool = False,
    decay: Any = None,
    normalize: bool | None = None,
    scale: Any = None,
    eps: Any = 1e-6,
    segment_ids: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    initial_state: Any = None,
    return_state: bool = False,
    layout: str = "bthd",
    scales: Any = None,
    out_dtype: Any = None,
    precision: Any = None,
    implementation: str | None = None,
) -> Request:
    """Checks and binds every argument of `linear_attention`; its ValueErrors come from here."""
    ((q, k, v), own_scales), sizes, batched, out_dtype = float8.bind(
        q, k, v, layout, scales, out_dtype
    )
    dtype = str(q.dtype) if out_dtype is None else float8.wide_dtype(out_dtype)
    causal, return_state = shapes.flag("causal", causal), shapes.flag("return_state", return_state)
    phi, parameters, sizes["F"] = features.resolve(feature_map, sizes["D"])
    normalize, scale, eps = resolve_output(phi, normalize, scale, eps, sizes["D"])
    q_lengths, kv_lengths, shared = bind_lengths(q_lengths, kv_lengths, sizes, batched)
    q_ids, kv_ids = bind_segments(segment_ids, q_segment_ids, kv_segment_ids, sizes, batched)
    decay, decay_kind = _bind_decay(decay, sizes, layout, batched, kv_lengths is not None)
    square = sizes["T"] == sizes["S"]
    got = f"got T={sizes['T']}, S={sizes['S']}"
    if decay_kind and not causal and not square:
        raise ValueError(f"decay needs causal=True or T = S, {got}")
    if causal and not square and return_state:
        raise ValueError(f"return_state with causal=True needs T = S, {got}")
    if causal and not square and initial_state is not None:
        raise ValueError(f"initial_state with causal=True needs T = S, {got}")
    if initial_state is not None:
        initial_state = bind_state("initial_state", initial_state, sizes, batched)

    T = sizes["T"]
    if T == 0 or sizes["S"] == 0:
        # An empty side becomes one padded row, so that backends never meet an empty array.
        if T == 0:
            q_lengths = jnp.zeros(sizes["B"], jnp.int32)
        if sizes["S"] == 0:
            kv_lengths = jnp.zeros(sizes["B"], jnp.int32)
        time = axes(layout, "BTHD").index("T")
        q, k, v = (pad_to_one(array, time) for array in (q, k, v))
        decay = pad_to_one(decay, time) if decay_kind in ("step", "channel") else decay
        if q_ids is not None and kv_ids is not None:
            q_ids, kv_ids = pad_to_one(q_ids, 1), pad_to_one(kv_ids, 1)
        sizes |= {"T": max(T, 1), "S": max(sizes["S"], 1)}
        shared = False

    segment_kind = None
    if q_ids is not None and kv_ids is not None:
        segment_kind = "self" if shared and q_ids is kv_ids else "cross"
        if q_ids is kv_ids:
            q_ids = kv_ids = number_runs(q_ids)
        if segment_kind == "cross":
            q_ids, kv_ids = segments.match_runs(q_ids, kv_ids, q_lengths, kv_lengths)
    dynamic = (q_lengths is not None or kv_lengths is not None) and not shared
    spec = LinearAttentionSpec(
        **sizes,
        dtype=dtype,
        feature_map=phi,
        normalize=normalize,
        scale=scale,
        eps=eps,
        layout=layout,
        causal=causal,
        decay=decay_kind,
        offset=None if dynamic else sizes["S"] - sizes["T"],
        segments=segment_kind,
        q_lengths=q_lengths is not None,
        kv_lengths=kv_lengths is not None,
        initial_state=initial_state is not None,
        return_state=return_state,
        precision=precision_of(precision, dtype),
    )
    inputs = Inputs(
        q, k, v, decay, initial_state, parameters, q_ids, kv_ids, q_lengths, kv_lengths
    )
    request = Request(spec, inputs, implementation, batched, T, out_dtype)
    if out_dtype is None:
        return request
    # Backends that read 8 bits take neither segments nor parameters of a feature map.
    q_scale, k_scale, v_scale = own_scales
    read = Float8Inputs(
        q, k, v, q_scale, k_scale, v_scale, decay, initial_state, q_lengths, kv_lengths
    )
    return float8.resolved(request, reading.OP, read, own_scales, spec)


def resolve_output(
    phi: features.FeatureMap, normalize: Any, scale: Any, eps: Any, D: int
) -> tuple[bool, float, float]:
    """normalize, scale and eps with their defaults."""
    normalize = phi.nonnegative if normalize is None else shapes.flag("normalize", normalize)
    if normalize and scale is not None:
        raise ValueError("scale must be None where normalize is True: it would cancel")
    if scale is None:
        scale = 1.0 if normalize else D**-0.5
    return normalize, shapes.scale(scale), shapes.positive("eps", eps)


# The largest normaliser, exp(80). Gradients are divided by it, and float32's least is 1.2e-38.
MOST_SUM = 5.5e34


def to_sums(inputs: Any) -> Any:
    """The inputs of a call whose values are also 1: its last column is the sum of the weights.

    All in float32. What is not finite becomes 0: then only an overflow gives what is not finite.
    A decay of -inf is none of that.
    """
    decay = inputs.decay
    if decay is not None:
        decay = jnp.where(jnp.isnan(decay), 0, decay)
    inputs = jax.tree.map(lambda array: jnp.where(jnp.isfinite(array), array, 0), inputs)
    q, k, v = (array.astype(jnp.float32) for array in (inputs.q, inputs.k, inputs.v))
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    return inputs._replace(q=q, k=k, v=v, decay=decay)


def with_sums(state: LinearState) -> LinearState:
    """The state of such a call."""
    return state._replace(kv=jnp.concatenate([state.kv, state.k_sum[..., None]], axis=-1))


def check_sums(phi: features.FeatureMap, normalize: bool, sums: jax.Array) -> None:
    """An error of `checked` where sums [..., V + 1] of `to_sums` are beyond float32."""
    largest = jnp.max(jnp.abs(jnp.where(jnp.isnan(sums), jnp.inf, sums)), initial=0)
    fits = jnp.isfinite(largest)
    if normalize:
        fits &= (sums[..., -1] <= MOST_SUM).all()
    checking.check(
        fits,
        f"feature_map {phi.name!r} leaves float32: the sums of phi(q) . phi(k), and of that times "
        f"v, must be finite{f' and the first at most {MOST_SUM:.2g}' if normalize else ''}, got "
        "values up to {largest}; scale q and k down",
        largest=largest,
    )


def _bind_decay(
    decay: Any, sizes: dict[str, int], layout: str, batched: bool, padded: bool
) -> tuple[jax.Array | None, str | None]:
    """decay in float32 and in the layout, and its kind. Where keys are `padded`, NaN may be in the
    padding."""
    if decay is None:
        return None, None
    decay = shapes.floating("decay", decay)
    if decay.ndim == 1:
        shapes.bind(sizes, "decay", decay.shape, "G")
        kind = "head"
    elif decay.ndim == 2 + batched:
        kind = "step"
    elif decay.ndim == 3 + batched:
        kind = "channel"
    else:
        raise ValueError(
            "decay must be [G], [B, S, G] or [B, S, G, D] (no B where q has none), "
            f"got shape {decay.shape}"
        )
    if kind != "head":
        letters = axes(layout, "BSG" if kind == "step" else "BSGF")
        shapes.bind(sizes, "decay", decay.shape, letters if batched else letters[1:])
        decay = decay if batched else decay[None]
    refuse_positive(decay, padded and kind != "head")
    return decay.astype(jnp.float32), kind


def bind_state(name: str, state: Any, sizes: dict[str, int], batched: bool) -> LinearState:
    """A pair (kv, k_sum) as a float32 LinearState with a batch axis."""
    if not isinstance(state, tuple) or len(state) != 2:
        raise ValueError(
            f"{name} must be a LinearState(kv [B, G, D, V], k_sum [B, G, D]), got {type(state)}"
        )
    first = 0 if batched else 1
    kv = shapes.floating(f"{name}.kv", state[0])
    k_sum = shapes.floating(f"{name}.k_sum", state[1])
    shapes.bind(sizes, f"{name}.kv", kv.shape, "BGFV"[first:])
    shapes.bind(sizes, f"{name}.k_sum", k_sum.shape, "BGF"[first:])
    return LinearState(
        with_batch(kv, 4).astype(jnp.float32), with_batch(k_sum, 3).astype(jnp.float32)
    )


def _sums(request: Request) -> jax.Array:
    """The call's numerators and, in the last column, its normalisers: float32, by plain JAX."""
    spec = dataclasses.replace(
        request.spec,
        V=request.spec.V + 1,
        dtype="float32",
        normalize=False,
        scale=1.0,
        precision="exact",
    )
    inputs = to_sums(request.inputs)
    if inputs.initial_state is not None:
        inputs = inputs._replace(initial_state=with_sums(inputs.initial_state))
    out, _ = dispatch.run(OP, spec, inputs, "xla")
    return out


def run(request: Request) -> tuple[jax.Array, LinearState]:
    """The call's output and state, in the shapes of the caller's arrays."""
    spec = request.spec
    if checking.checking():
        check_sums(spec.feature_map, spec.normalize, _sums(request))
    out, state = dispatch.run(request.op, spec, request.inputs, request.implementation)
    time = axes(spec.layout, "BTHV").index("T")
    out = jax.lax.slice_in_dim(out, 0, request.T, axis=time) if request.T < spec.T else out
    if not request.batched:
        out, state = out[0], jax.tree.map(lambda array: array[0], state)
    return out if request.out_dtype is None else out.astype(request.out_dtype), state


@overload
def linear_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, feature_map: FeatureMapLike = ...,
    causal: bool = ..., decay: ArrayLike | None = ..., normalize: bool | None = ...,
    scale: float | None = ..., eps: float = ..., segment_ids: Integers | None = ...,
    q_segment_ids: Integers | None = ..., kv_segment_ids: Integers | None = ...,
    q_lengths: Integers | None = ..., kv_lengths: Integers | None = ...,
    initial_state: LinearState | None = ..., return_state: Literal[False] = ...,
    layout: str = ..., scales: Scales | None = ..., out_dtype: DTypeLike | None = ...,
    precision: Precision = ..., implementation: str | None = ...,
) -> jax.Array: ...  # fmt: skip


@overload
def linear_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, feature_map: FeatureMapLike = ...,
    causal: bool = ..., decay: ArrayLike | None = ..., normalize: bool | None = ...,
    scale: float | None = ..., eps: float = ..., segment_ids: Integers | None = ...,
    q_segment_ids: Integers | None = ..., kv_segment_ids: Integers | None = ...,
    q_lengths: Integers | None = ..., kv_lengths: Integers | None = ...,
    initial_state: LinearState | None = ..., return_state: Literal[True],
    layout: str = ..., scales: Scales | None = ..., out_dtype: DTypeLike | None = ...,
    precision: Precision = ..., implementation: str | None = ...,
) -> tuple[jax.Array, LinearState]: ...  # fmt: skip


def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    feature_map: FeatureMapLike = "elu1",
    causal: bool = False,
    decay: ArrayLike | None = None,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    segment_ids: Integers | None = None,
    q_segment_ids: Integers | None = None,
    kv_segment_ids: Integers | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    layout: str = "bthd",
    scales: Scales | None = None,
    out_dtype: DTypeLike | None = None,
    precision: Precision = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, LinearState]:
    """Computes linear attention, in time and memory linear in T and S.

        w[i,j] = (phi(q_i) . phi(k_j)) * decay(i,j) * visible(i,j)
        out_i  = sum_j w[i,j] v_j / max(sum_j w[i,j], eps)     normalize=True
        out_i  = scale * sum_j w[i,j] v_j                      normalize=False

    With `causal`, the sums are a recurrence over a state of constant size, decay_t being the decay
    of step t:

        kv_t    = exp(decay_t) kv_{t-1} + phi(k_t) v_t^T
        k_sum_t = exp(decay_t) k_sum_{t-1} + phi(k_t)

    Args:
      q: Queries [B, T, H, D], float16, bfloat16, float32 or float8_e4m3fn. B may be missing, and
        then it is missing from every other argument and from the results.
      k: Keys [B, S, G, D] in q's dtype. H is a multiple of G: query head h reads key/value head
        h // (H // G).
      v: Values [B, S, G, V] in q's dtype.
      feature_map: phi: "elu1" (elu(x) + 1), "relu", "exp", "softplus", "identity", "silu" or
        "relu2"; any elementwise JAX function; or what `ato_jax.favor` returns. Features and their
        sums are float32 for every dtype and are not shifted by a maximum, so the sums of phi(k),
        phi(k) v and w[i,j] v_j must stay below 3.4e38 = exp(88.7), and with `normalize` the sum of
        w[i,j] below 5.5e34 = exp(80). For "exp" that means max(q) + max(k) + log(D S) < 80. Beyond
        these limits the result may be NaN or 0; `ato_jax.checked` reports it.
      causal: Query i sees key j if and only if j <= i + (S - T): the last query sees the last key.
        With lengths, the last valid query sees the last valid key.
      decay: Natural logarithm of the factor of each step, <= 0, as float32: [G], [B, S, G] or
        [B, S, G, D] ([B, G, S] and [B, G, S, D] with layout "bhtd"). With `causal`, the pair (i, j)
        is multiplied by exp(sum decay[j+1..i]); otherwise T = S, and it is multiplied by
        exp(sum decay[min(i,j)+1..max(i,j)]).
      normalize: Divide by the sum of the weights. None means True where phi is known to be
        non-negative: "elu1", "relu", "exp", "softplus", "relu2" and `favor`.
      scale: Factor of the result for normalize=False; D ** -0.5 unless given. Refused with
        normalize=True, where it would cancel.
      eps: The smallest denominator, > 0.
      segment_ids: Integers [B, T], for queries and keys alike (T = S). A query sees the keys of
        its own id alone. A segment is one contiguous run: an id that returns starts a new one.
      q_segment_ids: Integers [B, T], together with `kv_segment_ids` in place of `segment_ids`.
      kv_segment_ids: Integers [B, S].
      q_lengths: Integers [B]: queries from there on are padding and give 0. Where T = S, it also
        sets a missing `kv_lengths`.
      kv_lengths: Integers [B]: keys from there on are padding and are never seen. Where T = S, it
        also sets a missing `q_lengths`.
      initial_state: A `LinearState`. With `causal` (T = S) the first segment continues from it;
        otherwise it is added to the sums, as what earlier keys contribute; with segments, to those
        of the first one alone.
      return_state: Return (out, state) in place of out: the state after the last valid key, of the
        last segment.
      layout: "bthd", or "bhtd" for q, k, v, out [B, H, T, D].
      scales: (q_scale [B, H], k_scale [B, G], v_scale [B, G]), float32, for q, k and v of
        float8_e4m3fn, and only for these: q stands for q * q_scale. `ato_jax.quantize` makes both.
        On Hopper some calls read the 8 bits, all others widen the arrays first (`explain` says
        which) and cost what a call on bfloat16 arrays does.
      out_dtype: Dtype of out where q, k and v are float8_e4m3fn: "bfloat16" unless given,
        "float16", or "float32", for which they are widened to float32.
      precision: How float32 inputs are multiplied. None is exact; "tf32" or "default" may round
        the factors to TF32. Other dtypes ignore it.
      implementation: None for the fastest backend that supports the call on this device, or one of
        "mosaic_gpu" (Hopper; bfloat16; D and V of multiples of 8, the larger from 72 to 256,
        bidirectional with a decay or segments to 128; causal also of 8 from 16 to 64; most
        other sizes are padded; up to 128 columns float32 without a decay and segments, and float16
        causal or without them), "triton", "xla.products"
        (D or V above 256 in bfloat16; in float16 and TF32 above 128, or above 64 with segments or a
        decay per head or step; in exact float32 up to 256, causal above 128, or above 32 with
        segments or such a decay; any beside a decay per step and channel), "xla" and "reference".

    Returns:
      out [B, T, H, V] in v's dtype, or `out_dtype`; with `return_state` the pair (out, state). A
      query that sees no key gives 0.

    Raises:
      ValueError: An argument is wrong for every backend: its shape, dtype or value. The message
        names it, what it was and what it has to be. The numbers in a jax array of lengths
        are not read, and `ato_jax.checked` reports them.
      UnsupportedError: The backend named by `implementation` does not support this call on this
        device, or a derivative is taken of a call on float8 arrays; the message says why.

    Example:
      >>> import ato_jax, jax, jax.numpy as jnp
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))  # [B, T, H, D] each
      >>> whole = ato_jax.linear_attention(q, k, v, causal=True)
      >>> whole.shape
      (2, 16, 4, 8)
      >>> first, rest = [x[:, :10] for x in (q, k, v)], [x[:, 10:] for x in (q, k, v)]
      >>> _, state = ato_jax.linear_attention(*first, causal=True, return_state=True)
      >>> out = ato_jax.linear_attention(*rest, causal=True, initial_state=state)
      >>> bool(jnp.allclose(out, whole[:, 10:], atol=1e-5))
      True
    """
    request = prepare(
        q,
        k,
        v,
        feature_map=feature_map,
        causal=causal,
        decay=decay,
        normalize=normalize,
        scale=scale,
        eps=eps,
        segment_ids=segment_ids,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        initial_state=initial_state,
        return_state=return_state,
        layout=layout,
        scales=scales,
        out_dtype=out_dtype,
        precision=precision,
        implementation=implementation,
    )
    out, state = run(request)
    return (out, state) if return_state else out
