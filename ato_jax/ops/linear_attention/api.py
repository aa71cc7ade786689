"""Linear attention, the public functions: arguments checked and bound, then dispatched.

    w[i,j] = (phi(q_i) . phi(k_j)) * decay(i,j) * visible(i,j)
    out_i  = sum_j w[i,j] v_j / max(sum_j w[i,j], eps)     normalize=True
    out_i  = scale * sum_j w[i,j] v_j                      normalize=False
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import checking, dispatch, shapes
from ato_jax.ops.common import (
    axes,
    bind_lengths,
    bind_qkv,
    bind_segments,
    pad_to_one,
    precision_of,
    with_batch,
)
from ato_jax.ops.linear_attention import features, segments
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs

OP: dispatch.Op[LinearAttentionSpec, Inputs, Outputs] = dispatch.Op(
    "linear_attention",
    ("mosaic_gpu", "triton", "xla", "reference"),
    package="ato_jax.ops.linear_attention",
)


class Request(NamedTuple):
    """A call with its arguments checked: what `dispatch` needs, and the shape of the answer."""

    spec: LinearAttentionSpec
    inputs: Inputs
    implementation: str | None
    batched: bool
    T: int


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
    precision: Any = None,
    implementation: str | None = None,
) -> Request:
    """Checks and binds every argument of `linear_attention`; its ValueErrors come from here."""
    (q, k, v), sizes, batched = bind_qkv(q, k, v, layout)
    dtype = str(q.dtype)
    causal, return_state = shapes.flag("causal", causal), shapes.flag("return_state", return_state)
    phi, parameters, sizes["F"] = features.resolve(feature_map, sizes["D"])
    normalize, scale, eps = resolve_output(phi, normalize, scale, eps, sizes["D"])
    q_lengths, kv_lengths, shared = bind_lengths(q_lengths, kv_lengths, sizes, batched)
    q_ids, kv_ids = bind_segments(segment_ids, q_segment_ids, kv_segment_ids, sizes, batched)
    decay, decay_kind = _bind_decay(decay, sizes, layout, batched)
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
        if segment_kind == "self":
            q_ids = kv_ids = segments.number_runs(q_ids)
        else:
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
    return Request(spec, inputs, implementation, batched, T)


def resolve_output(
    phi: features.FeatureMap, normalize: Any, scale: Any, eps: Any, D: int
) -> tuple[bool, float, float]:
    """normalize, scale and eps with their defaults."""
    normalize = phi.nonnegative if normalize is None else shapes.flag("normalize", normalize)
    if normalize and scale is not None:
        raise ValueError("scale must be None where normalize is True: it would cancel")
    if scale is None:
        scale = 1.0 if normalize else D**-0.5
    return normalize, shapes.static_number("scale", scale), shapes.positive("eps", eps)


def refuse_positive(decay: jax.Array) -> None:
    """A log-decay above 0 grows without bound. `checked` alone sees the values of a traced one."""
    if not decay.size:
        return
    message = "decay is the natural log of a factor and must be <= 0, got values up to {largest}"
    if isinstance(decay, jax.core.Tracer):
        if checking.checking():
            above = decay > 0  # not NaN, which may stand in padding
            checking.check(~above.any(), message, largest=jnp.where(above, decay, 0).max())
        return
    # Also where jit traces: what a traced function closes over is concrete.
    with jax.ensure_compile_time_eval():
        largest = float(decay.max())
    if largest > 0:
        raise ValueError(message.format(largest=largest))


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
    decay: Any, sizes: dict[str, int], layout: str, batched: bool
) -> tuple[jax.Array | None, str | None]:
    """decay in float32 and in the layout, and its kind."""
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
    refuse_positive(decay)
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


def linear_attention(
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
    precision: Any = None,
    implementation: str | None = None,
) -> Any:
    """Linear attention, in time and memory linear in T and S.

        w[i,j] = (phi(q_i) . phi(k_j)) * decay(i,j) * visible(i,j)
        out_i  = sum_j w[i,j] v_j / max(sum_j w[i,j], eps)     normalize=True
        out_i  = scale * sum_j w[i,j] v_j                      normalize=False

    Args:
      q: [B, T, H, D]; the batch axis may be missing, here and everywhere.
      k: [B, S, G, D] with H % G == 0: query head h reads kv head h // (H // G).
      v: [B, S, G, V].
      feature_map: phi. "elu1" (elu(x) + 1), "relu", "exp", "softplus", "identity", "silu",
        "relu2", any elementwise JAX function, or `ato_jax.favor(...)`. Features and their sums
        are float32 in every backend and for every dtype, and are not shifted: the sums of
        phi(k), of phi(k) v and of w[i,j] v_j must stay below 3.4e38 = exp(88.7), and with
        `normalize` the sum of w[i,j] below 5.5e34 = exp(80), so that gradients divided by it
        do not underflow. With "exp" that is max(q) + max(k) + log(D S) < 80. Beyond it the
        result may be NaN or 0; `ato_jax.checked` reports it.
      causal: query i sees key j iff j <= i + (S - T): the last query sees the last key.
      decay: log of the factor per step, <= 0: [G], [B, S, G] or [B, S, G, D]. Causal: the pair
        (i, j) carries exp(sum decay[j+1..i]); else (T = S) exp(sum decay[min+1..max]).
      normalize: None means True where phi is known to be non-negative.
      scale: for normalize=False; D**-0.5 unless given.
      eps: the least denominator.
      segment_ids: [B, T] for both sides, T = S; only equal ids see each other. Each segment is
        one contiguous run: an id that returns starts a new one.
      q_segment_ids, kv_segment_ids: [B, T] and [B, S], in place of `segment_ids`.
      q_lengths, kv_lengths: [B]; what lies beyond is padding. Where T = S, one gives both.
        With lengths, causality aligns the last valid query with the last valid key.
      initial_state: a LinearState; causal (T = S): it continues the first segment; else it is
        what earlier keys add to the sums.
      return_state: return (out, state) with the state after the last valid key.
      layout: "bthd", or "bhtd" for [B, H, T, D] (and decay [B, G, S], [B, G, S, D]).
      precision: for float32 inputs; None multiplies exactly, "tf32" or "default" may round.
      implementation: None (the fastest that supports the request here), "mosaic_gpu" (on Hopper,
        in bfloat16 at D = V = 80, 96, 112 and 128, causal also 64, without a decay also 192 and
        256), "triton", "xla" or "reference".

    Returns:
      out [B, T, H, V] in v's dtype, or (out, LinearState) with `return_state`. A query that
      sees nothing gives 0.
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
        precision=precision,
        implementation=implementation,
    )
    spec = request.spec
    if checking.checking():
        check_sums(spec.feature_map, spec.normalize, _sums(request))
    out, state = dispatch.run(OP, spec, request.inputs, request.implementation)
    time = axes(layout, "BTHV").index("T")
    out = jax.lax.slice_in_dim(out, 0, request.T, axis=time) if request.T < spec.T else out
    if not request.batched:
        out, state = out[0], jax.tree.map(lambda array: array[0], state)
    return (out, state) if return_state else out
