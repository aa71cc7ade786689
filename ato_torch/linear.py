"""Linear attention on tensors: arguments checked, brought into the ops' shapes, and run.

A tensor whose memory has its second and third axis exchanged is passed with the other `layout` and
is not copied.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import torch

from ato_jax import LinearState, shapes
from ato_jax.ops.common import LAYOUTS, axes
from ato_torch import _checked_calls, _checks, _float8, _ops
from ato_torch._checks import FeatureMapLike, Integers, Layout, State


@overload
def linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *,
    feature_map: FeatureMapLike = ..., causal: bool = ..., decay: torch.Tensor | None = ...,
    normalize: bool | None = ..., scale: float | None = ..., eps: float = ...,
    segment_ids: Integers | None = ..., q_segment_ids: Integers | None = ...,
    kv_segment_ids: Integers | None = ..., q_lengths: Integers | None = ...,
    kv_lengths: Integers | None = ..., initial_state: State | None = ...,
    return_state: Literal[False] = ..., layout: Layout = ..., scales: _float8.Scales | None = ...,
    out_dtype: torch.dtype | str | None = ..., precision: str | None = ...,
    implementation: str | None = ...,
) -> torch.Tensor: ...  # fmt: skip


@overload
def linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *,
    feature_map: FeatureMapLike = ..., causal: bool = ..., decay: torch.Tensor | None = ...,
    normalize: bool | None = ..., scale: float | None = ..., eps: float = ...,
    segment_ids: Integers | None = ..., q_segment_ids: Integers | None = ...,
    kv_segment_ids: Integers | None = ..., q_lengths: Integers | None = ...,
    kv_lengths: Integers | None = ..., initial_state: State | None = ...,
    return_state: Literal[True], layout: Layout = ..., scales: _float8.Scales | None = ...,
    out_dtype: torch.dtype | str | None = ..., precision: str | None = ...,
    implementation: str | None = ...,
) -> tuple[torch.Tensor, LinearState]: ...  # fmt: skip


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    feature_map: FeatureMapLike = "elu1",
    causal: bool = False,
    decay: torch.Tensor | None = None,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    segment_ids: Integers | None = None,
    q_segment_ids: Integers | None = None,
    kv_segment_ids: Integers | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    layout: Layout = "bhtd",
    scales: _float8.Scales | None = None,
    out_dtype: torch.dtype | str | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, LinearState]:
    """Computes linear attention, in time and memory linear in T and S.

        w[i,j] = (phi(q_i) . phi(k_j)) * decay(i,j) * visible(i,j)
        out_i  = sum_j w[i,j] v_j / max(sum_j w[i,j], eps)     normalize=True
        out_i  = scale * sum_j w[i,j] v_j                      normalize=False

    This is `ato_jax.linear_attention` on tensors, which may be on the CPU or on a CUDA device. The
    result is on the same device, and differentiable once. Sums are float32 for every dtype.

    Args:
      query: Queries [B, H, T, D], float16, bfloat16, float32 or float8_e4m3fn. B may be missing,
        and then it is missing from every other argument and from the results.
      key: Keys [B, G, S, D] in query's dtype. H is a multiple of G: query head h reads key/value
        head h // (H // G).
      value: Values [B, G, S, V] in query's dtype.
      feature_map: phi: a name, an elementwise JAX function, or `ato_jax.favor(...)`. torch.compile
        takes a function as it is when the program is compiled, and before PyTorch 2.13 it takes
        names only.
      causal: Query i sees key j if and only if j <= i + (S - T): the last query sees the last key.
      decay: Natural logarithm of the factor per step, <= 0, with a gradient: [G], [B, G, S] or
        [B, G, S, D]. Without `causal`, T = S.
      normalize: Divide by the sum of the weights. None does so where phi is known to be
        non-negative.
      scale: Factor of the sums for normalize=False; D ** -0.5 unless given.
      eps: The smallest denominator.
      segment_ids: Integers [B, T], for queries and keys alike (T = S). A query sees only the keys
        of its own segment, which is one contiguous run of equal ids.
      q_segment_ids: Integers [B, T], together with `kv_segment_ids` in place of `segment_ids`.
      kv_segment_ids: Integers [B, S].
      q_lengths: Integers [B]: queries from there on are padding and give 0. Where T = S, it also
        sets a missing `kv_lengths`.
      kv_lengths: Integers [B]: keys from there on are padding and are never seen. Where T = S, it
        also sets a missing `q_lengths`.
      initial_state: A pair (kv [B, G, D, V], k_sum [B, G, D]), with gradients. If causal (T = S),
        it continues the first segment; else it adds earlier keys to the sums.
      return_state: Return (out, state) in place of out: the state after the last valid key.
      layout: "bhtd", or "bthd" for query, key, value, out [B, T, H, D] and decay [B, S, G] or
        [B, S, G, D].
      scales: (query_scale, key_scale, value_scale), for query, key and value of float8_e4m3fn:
        float32 tensors [B, H], [B, G] and [B, G]. Hopper's kernels read the 8 bits of the calls
        of which `ato_jax` reads them. All others are widened, and cost what a call on bfloat16
        tensors does.
      out_dtype: Dtype of out with float8_e4m3fn: torch.bfloat16 unless given, torch.float16 or
        torch.float32, for which the tensors are widened to float32.
      precision: How float32 is multiplied. None is exact; "tf32" may round the factors to TF32.
      implementation: A backend of `ato_jax.linear_attention` by name; None takes the fastest. With
        a JAX before 0.11.1, or on a host other than Linux on x86-64, only JAX can launch
        "mosaic_gpu", which then runs where it is named.

    Returns:
      out [B, H, T, V] in value's dtype, or `out_dtype`; with `return_state` the pair (out,
      `LinearState(kv, k_sum)`) with tensors in float32. A query that sees no key gives 0.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: The backend `implementation` does not support the call
        (`ato_jax.UnsupportedError`), a derivative of second order or of forward mode is asked for,
        or any derivative of a call on float8_e4m3fn, or torch.compile before PyTorch 2.13 meets a
        feature map that is a function.
      RuntimeError: A CUDA graph is captured, and the call cannot be part of it: it is the first of
        its kind, or its kernels cannot be launched directly.

    Example:
      >>> import torch, ato_torch
      >>> query = torch.randn(2, 4, 16, 8)  # [B, H, T, D]
      >>> key = value = torch.randn(2, 2, 16, 8)  # [B, G, S, D]
      >>> out, state = ato_torch.linear_attention(
      ...     query, key, value, causal=True, return_state=True
      ... )
      >>> out.shape, state.kv.shape
      (torch.Size([2, 4, 16, 8]), torch.Size([2, 2, 8, 8]))
    """
    if _float8.is_meant(query, scales, out_dtype):
        shapes.one_of("layout", layout, LAYOUTS)
        return _float8.call(
            linear_attention,
            (query, key, value),
            scales,
            out_dtype,
            -3 if layout == "bhtd" else -2,
            3,
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
    known = None
    query, key, value = _checks.autocast(query, key, value)
    read = _float8.as_read(scales)
    given = (query, key, value) if read is None else (query, key, value, *read.scales)
    ids = segment_ids is q_segment_ids is kv_segment_ids is None
    named = isinstance(feature_map, str)
    if ids and named and initial_state is None and decay is q_lengths is kv_lengths is None:
        facts = (
            *(feature_map, causal, normalize, scale, eps, return_state, layout),
            *(precision, implementation, read and read.out_dtype),
        )
        known = _checked_calls.checked_call("linear_attention", given, facts)
        if known is not None and known.program is not None:
            return known(given)
    if torch.compiler.is_compiling():
        causal, scale, eps = _ops.static((causal, scale, eps))
    if read is not None:
        _float8.check_devices(query, key, value)
    else:
        _checks.check_all(query, key, value, smallest=3)
    shapes.one_of("layout", layout, LAYOUTS)
    return_state = shapes.flag("return_state", return_state)
    batched = query.ndim == 4
    first = 0 if batched else 1
    letters = [axes(layout, name)[first:] for name in ("BTHD", "BSGD", "BSGV")]
    sizes = _checks.bind(query, key, value, *letters)
    sizes.setdefault("B", 1)
    arrays = {
        "segment_ids": (segment_ids, "BT"),
        "q_segment_ids": (q_segment_ids, "BT"),
        "kv_segment_ids": (kv_segment_ids, "BS"),
        "q_lengths": (q_lengths, "B"),
        "kv_lengths": (kv_lengths, "B"),
    }
    tensors, options = _checks.integers(arrays, query, sizes, batched)
    # F, the number of features, depends on the feature map; ato_jax checks axes of that size.
    if decay is not None:
        kinds = ["G", *(axes(layout, letters)[first:] for letters in ("BSG", "BSGF"))]
        padded = q_lengths is not None or kv_lengths is not None
        tensors["decay"] = _checks.decay_of(decay, query, sizes, kinds, batched, padded)
    if initial_state is not None:
        tensors |= _checks.state_of("initial_state", initial_state, query, batched)
    feature_map, parameters = _ops.resolved(feature_map, query.device)
    tensors |= parameters
    straight = batched and query is given[0] and key is given[1] and value is given[2]
    if not batched:
        query, key, value = query[None], key[None], value[None]
    bound = {}
    if read is not None:
        batch = (query.shape[0],) if batched else ()
        bound = read.bound((query, key, value), batch, axes(layout, "BTHD").index("H"))
        options["out_dtype"] = read.out_dtype
    exchanged = _checks.are_exchanged(query, key, value)
    if exchanged:
        layout = "bthd" if layout == "bhtd" else "bhtd"
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if decay is not None and decay.ndim > 1:
            tensors["decay"] = tensors["decay"].transpose(1, 2)
    tensors |= {"q": query, "k": key, "v": value} | bound
    options |= {
        "feature_map": feature_map,
        "causal": causal,
        "normalize": normalize,
        "scale": _checks.number("scale", scale),
        "eps": _checks.number("eps", eps),
        "return_state": return_state,
        "layout": layout,
        "precision": precision,
        "implementation": implementation,
    }
    if read is not None:
        _ops.refuse_unread("linear_attention", tensors, options)
    finish = functools.partial(_linear_results, batched, return_state)
    outputs = _ops.run("linear_attention", tensors, options)
    if known is not None and straight and len(tensors) == len(given):
        alone = (query, key, value, *bound.values())
        known.fill("linear_attention", alone, options, exchanged, finish)
    return finish(exchanged, outputs)


def _linear_results(batched: bool, return_state: bool, exchanged: bool, outputs: Any) -> Any:
    out = outputs[0].transpose(1, 2) if exchanged else outputs[0]
    out = out if batched else out[0]
    if not return_state:
        return out
    return out, LinearState(*(tensor if batched else tensor[0] for tensor in outputs[1:]))


def linear_attention_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: State,
    *,
    feature_map: FeatureMapLike = "elu1",
    decay: torch.Tensor | None = None,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    scales: _float8.Scales | None = None,
    out_dtype: torch.dtype | str | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """Computes one token of causal linear attention.

        kv' = exp(decay) kv + phi(k) v^T        k_sum' = exp(decay) k_sum + phi(k)
        out = phi(q) kv' / max(phi(q) . k_sum', eps)           normalize=True
        out = scale * phi(q) kv'                               normalize=False

    This is `ato_jax.linear_attention_step` on tensors. It is differentiable once.

    Args:
      query: The token's queries [B, H, D], float16, bfloat16, float32 or float8_e4m3fn. B may be
        missing, and then it is missing from every other argument and from the results.
      key: Its keys [B, G, D] in query's dtype; H is a multiple of G.
      value: Its values [B, G, V] in query's dtype.
      state: The pair (kv [B, G, D, V], k_sum [B, G, D]) that `linear_attention(...,
        return_state=True)` or the previous step returned, or zeros. It is not changed.
      feature_map: phi, as in `linear_attention`.
      decay: Natural logarithm of this step's factor, <= 0, with a gradient: [G], [B, G] or
        [B, G, D].
      normalize: As in `linear_attention`.
      scale: As in `linear_attention`.
      eps: As in `linear_attention`.
      scales: As in `linear_attention`, for query, key and value of float8_e4m3fn. These are always
        widened.
      out_dtype: As in `linear_attention`.

    Returns:
      The pair (out [B, H, V] in value's dtype or `out_dtype`, the new `LinearState(kv, k_sum)` in
      float32).

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: A derivative of second order or of forward mode is asked for, or any
        derivative of a step on float8_e4m3fn.

    Example:
      >>> import torch, ato_torch
      >>> state = torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8)  # kv [B, G, D, V], k_sum [B, G, D]
      >>> for _ in range(3):  # one token at a time
      ...     q, k, v = torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
      ...     out, state = ato_torch.linear_attention_step(q, k, v, state)
      >>> out.shape
      torch.Size([2, 4, 8])
    """
    if _float8.is_meant(query, scales, out_dtype):
        return _float8.call(
            linear_attention_step,
            (query, key, value),
            scales,
            out_dtype,
            -2,
            2,
            state,
            feature_map=feature_map,
            decay=decay,
            normalize=normalize,
            scale=scale,
            eps=eps,
        )
    if torch.compiler.is_compiling():
        scale, eps = _ops.static((scale, eps))
    query, key, value = _checks.autocast(query, key, value)
    _checks.check_all(query, key, value, smallest=2)
    if query.ndim > 3:
        raise ValueError(f"query must be [B, H, D] or [H, D], got shape {tuple(query.shape)}")
    batched = query.ndim == 3
    first = 0 if batched else 1
    sizes = _checks.bind(query, key, value, "BHD"[first:], "BGD"[first:], "BGV"[first:])
    tensors = _checks.state_of("state", state, query, batched)
    if decay is not None:
        kinds = ["G", "BG"[first:], "BGF"[first:]]
        tensors["decay"] = _checks.decay_of(decay, query, sizes, kinds, batched)
    feature_map, parameters = _ops.resolved(feature_map, query.device)
    tensors |= parameters
    if not batched:
        query, key, value = query[None], key[None], value[None]
    tensors |= {"q": query, "k": key, "v": value}
    options = {
        "feature_map": feature_map,
        "normalize": normalize,
        "scale": _checks.number("scale", scale),
        "eps": _checks.number("eps", eps),
    }
    sums: Any
    out, *sums = _ops.run("linear_attention_step", tensors, options)
    if not batched:
        out, sums = out[0], [tensor[0] for tensor in sums]
    return out, LinearState(*sums)
