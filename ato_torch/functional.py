"""Softmax attention on tensors: arguments checked, brought into the op's shapes, and run.

PyTorch differentiates whatever is done to an argument with a gradient before it reaches the op. A
tensor whose memory is [B, T, H, D], as a projection leaves it before `transpose(1, 2)`, is passed
with `layout="bthd"` and is not copied.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from ato_jax import shapes
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.attention.api import Window
from ato_jax.ops.common import LAYOUTS, axes
from ato_torch import _checked_calls, _checks, _float8, _ops
from ato_torch._checks import Integers, Layout


@overload
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ..., *, window: Window | None = ...,
    query_offset: int | Integers | None = ..., softcap: float | None = ...,
    sinks: torch.Tensor | None = ..., segment_ids: Integers | None = ...,
    q_segment_ids: Integers | None = ..., kv_segment_ids: Integers | None = ...,
    q_lengths: Integers | None = ..., kv_lengths: Integers | None = ...,
    return_lse: Literal[False] = ..., scales: _float8.Scales | None = ...,
    out_dtype: torch.dtype | str | None = ..., precision: str | None = ...,
    implementation: str | None = ...,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ..., *, window: Window | None = ...,
    query_offset: int | Integers | None = ..., softcap: float | None = ...,
    sinks: torch.Tensor | None = ..., segment_ids: Integers | None = ...,
    q_segment_ids: Integers | None = ..., kv_segment_ids: Integers | None = ...,
    q_lengths: Integers | None = ..., kv_lengths: Integers | None = ...,
    return_lse: Literal[True], scales: _float8.Scales | None = ...,
    out_dtype: torch.dtype | str | None = ..., precision: str | None = ...,
    implementation: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: Window | None = None,
    query_offset: int | Integers | None = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    segment_ids: Integers | None = None,
    q_segment_ids: Integers | None = None,
    kv_segment_ids: Integers | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    return_lse: bool = False,
    scales: _float8.Scales | None = None,
    out_dtype: torch.dtype | str | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes exact softmax attention, like `F.scaled_dot_product_attention`.

        s[i,j] = scale * q_i . k_j ; softcap: c * tanh(s / c) ; + mask ; -inf where not visible
        out_i  = softmax over j (and over the sink logit, which has no value) . v

    The first eight arguments have the names, order and meaning of
    `torch.nn.functional.scaled_dot_product_attention`. The tensors may be on the CPU or on a CUDA
    device; the result is on the same device, and differentiable once. Axes: B batch, T queries, S
    keys, H query heads, G key/value heads, D key size, V value size.

    Args:
      query: Queries [..., H, T, D], float16, bfloat16, float32 or float8_e4m3fn. Leading axes
        broadcast, and may be missing.
      key: Keys [..., G, S, D] in query's dtype. G is H or 1, or any divisor of H with `enable_gqa`.
      value: Values [..., G, S, V] in query's dtype.
      attn_mask: Broadcastable to [..., H, T, S]: booleans, where True shows a key to a query, or
        floats, which are added to the scores and get a gradient.
      dropout_p: Probability from 0 to 1 with which a weight is dropped. PyTorch's generator of the
        tensors' device gives the seed.
      is_causal: Query i sees key j if and only if j <= query_offset + i.
      scale: Factor of the scores; D ** -0.5 unless given.
      enable_gqa: Allow fewer heads in `key` and `value` than in `query`: query head h reads head
        h // (H // G).
      window: (left, right): query i sees the keys from position - left to position + right, where
        its position is query_offset + i. Each is an int >= 0, or None for no bound.
      query_offset: An int or integers [B]: the position of the first query among the keys, for
        `is_causal` and `window`. None puts the last query at the last key.
      softcap: c > 0: the scores are limited to (-c, c).
      sinks: Floats [H]: one more logit in the softmax of every query of a head, without a value.
      segment_ids: Integers [B, T], for queries and keys alike (T = S). A query sees only the keys
        of its own id.
      q_segment_ids: Integers [B, T], together with `kv_segment_ids` in place of `segment_ids`.
      kv_segment_ids: Integers [B, S].
      q_lengths: Integers [B]: queries from there on are padding and give 0. Where T = S, it also
        sets a missing `kv_lengths`.
      kv_lengths: Integers [B]: keys from there on are padding and are never seen. Where T = S, it
        also sets a missing `q_lengths`.
      return_lse: Return (out, lse) in place of out.
      scales: (query_scale, key_scale, value_scale), for query, key and value of float8_e4m3fn:
        float32 tensors of the batch axes and the heads. Hopper's kernels read the 8 bits of the
        calls of which `ato_jax` reads them. All others are widened, and cost what a call on
        bfloat16 tensors does.
      out_dtype: Dtype of out with float8_e4m3fn: torch.bfloat16 unless given, torch.float16 or
        torch.float32, for which the tensors are widened to float32.
      precision: How float32 is multiplied. None is exact; "tf32" may round the factors to TF32.
      implementation: A backend of `ato_jax.attention` by name; None takes the fastest. With a
        JAX before 0.11.1, or on a host other than Linux on x86-64, only JAX can launch
        "mosaic_gpu", which then runs where it is named.

    Returns:
      out [..., H, T, V] in query's dtype, or `out_dtype`; with `return_lse` the pair (out, lse).
      lse [..., H, T] is float32: the natural logarithm of the softmax's denominator, sink included.
      A query that sees no key has out 0 and lse -inf, or the sink's logit.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value, or `attn_mask` is given
        together with `is_causal`. The message names the argument.
      NotImplementedError: The backend `implementation` does not support the call
        (`ato_jax.UnsupportedError`), a derivative of second order or of forward mode is asked for,
        or any derivative of a call on float8_e4m3fn.
      RuntimeError: A CUDA graph is captured, and the call cannot be part of it: it is the first of
        its kind, or its kernels cannot be launched directly.

    Example:
      >>> import torch, ato_torch
      >>> query = torch.randn(2, 4, 16, 8, requires_grad=True)  # [B, H, T, D]
      >>> key = value = torch.randn(2, 2, 16, 8)  # [B, G, S, D]
      >>> out = ato_torch.attention(query, key, value, is_causal=True, enable_gqa=True)
      >>> out.shape
      torch.Size([2, 4, 16, 8])
      >>> out.sum().backward()
      >>> query.grad.shape
      torch.Size([2, 4, 16, 8])
    """
    if _float8.is_meant(query, scales, out_dtype):
        return _float8.call(
            attention,
            (query, key, value),
            scales,
            out_dtype,
            -3,
            3,
            *(attn_mask, dropout_p, is_causal, scale, enable_gqa),
            window=window,
            query_offset=query_offset,
            softcap=softcap,
            sinks=sinks,
            segment_ids=segment_ids,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            q_lengths=q_lengths,
            kv_lengths=kv_lengths,
            return_lse=return_lse,
            precision=precision,
            implementation=implementation,
        )
    query, key, value, attn_mask = _checks.autocast(query, key, value, attn_mask)
    known = None
    read = _float8.as_read(scales)
    given = (query, key, value) if read is None else (query, key, value, *read.scales)
    ids = segment_ids is q_segment_ids is kv_segment_ids is None
    if ids and attn_mask is sinks is q_lengths is kv_lengths is None:
        facts = (
            *(dropout_p, is_causal, scale, enable_gqa, window, query_offset, softcap),
            *(return_lse, precision, implementation, read and read.out_dtype),
        )
        known = _checked_calls.checked_call("attention", given, facts)
        if known is not None and known.program is not None:
            return known(given)
    if torch.compiler.is_compiling():
        dropout_p, is_causal, scale, softcap, window, query_offset = _ops.static(
            (dropout_p, is_causal, scale, softcap, window, query_offset)
        )
    if read is not None:
        _float8.check_devices(query, key, value)
    else:
        _checks.check_all(query, key, value, smallest=2)
    is_causal = shapes.flag("is_causal", is_causal)
    enable_gqa = shapes.flag("enable_gqa", enable_gqa)
    dropout_p = _checks.required("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be from 0 to 1, got {dropout_p}")
    if dropout_p == 1:
        # Else 0 / 0: no weight is left. PyTorch does not multiply in 8 bits.
        wide = value if read is None else value.float()
        dropout_p, value = 0.0, (wide * 0).to(value.dtype)
    return_lse = shapes.flag("return_lse", return_lse)
    (query, key, value), batch, heads = _checks.broadcast(query, key, value, enable_gqa)
    straight = query is given[0] and key is given[1] and value is given[2]
    sizes = _checks.bind(query, key, value, "BHTD", "BGSD", "BGSV")
    arrays = {
        "query_offset": (query_offset, "B"),
        "segment_ids": (segment_ids, "BT"),
        "q_segment_ids": (q_segment_ids, "BT"),
        "kv_segment_ids": (kv_segment_ids, "BS"),
        "q_lengths": (q_lengths, "B"),
        "kv_lengths": (kv_lengths, "B"),
    }
    tensors, options = _checks.integers(arrays, query, sizes, batched=len(batch) > 0)
    if attn_mask is not None:
        if is_causal:
            raise ValueError(
                "attn_mask cannot be given together with is_causal=True: make the mask causal"
            )
        dtype = query.dtype if read is None else _float8.wide_dtype(read.out_dtype)
        spread = _checks.four_axes(attn_mask, query, batch, heads, sizes, dtype)
        tensors["mask" if spread.dtype == torch.bool else "bias"] = spread
    if sinks is not None:
        _checks.check("sinks", sinks, like=query)
        shapes.bind(sizes, "sinks", tuple(sinks.shape), "H")
        tensors["sinks"] = sinks.float()
    options |= {
        "causal": is_causal,
        "window": None if window is None else attention_api.bounds(False, window),
        "softcap": _checks.number("softcap", softcap),
        "scale": _checks.number("scale", scale),
        "dropout_rate": dropout_p,
        "return_lse": return_lse,
        "precision": precision,
        "implementation": implementation,
        "layout": "bhtd",
    }
    bound = {} if read is None else read.bound((query, key, value), batch, -3)
    exchanged = _checks.are_exchanged(query, key, value)
    if exchanged:
        options["layout"] = "bthd"
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    tensors |= {"q": query, "k": key, "v": value} | bound
    if read is not None:
        options["out_dtype"] = read.out_dtype
        words = {"dropout_key": torch.empty(2, dtype=torch.uint32, device=query.device)}
        # Ahead of the draw: a call that is made once more, on widened tensors, draws then.
        _ops.refuse_unread("attention", tensors | (words if dropout_p > 0 else {}), options)
    if dropout_p > 0:
        key_words = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=query.device)
        tensors["dropout_key"] = key_words.view(torch.uint32)
    # None: the leading axes are those of the tensors, nothing was broadcast.
    shape = None if len(batch) == len(heads) == 1 else (*batch, *heads, sizes["T"])
    finish = functools.partial(_attention_results, shape, return_lse)
    outputs = _ops.run("attention", tensors, options)
    if known is not None and straight and len(tensors) == len(given):
        known.fill("attention", (query, key, value, *bound.values()), options, exchanged, finish)
    return finish(exchanged, outputs)


def _attention_results(
    shape: tuple[int, ...] | None, return_lse: bool, exchanged: bool, outputs: Any
) -> Any:
    out = outputs[0].transpose(1, 2) if exchanged else outputs[0]
    if shape is not None:
        out = out.reshape(*shape, out.shape[-1])
    if not return_lse:
        return out
    lse = outputs[1].transpose(1, 2) if exchanged else outputs[1]
    return out, lse if shape is None else lse.reshape(shape)


def combine(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    layout: Layout = "bhtd",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention to parts of the keys into attention to all of them.

        lse = log sum_n exp(lse_n)        out = sum_n exp(lse_n - lse) out_n

    This is `ato_jax.combine` on tensors. It is differentiable once.

    Args:
      outs: N results [B, H, T, V], as a sequence or stacked to [N, B, H, T, V]. B may be missing.
      lses: Their N normalisers [B, H, T], which `attention(..., return_lse=True)` returns.
      layout: "bhtd", or "bthd" for outs [B, T, H, V] and lses [B, T, H].

    Returns:
      The pair (out in the dtype of `outs`, lse in float32). Where no part saw a key, out is 0 and
      lse is -inf.

    Raises:
      ValueError: The parts disagree in number, shape, dtype or device, or there are none.
      NotImplementedError: A derivative of second order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
      >>> halves = [
      ...     ato_torch.attention(q, k[:, :, part], v[:, :, part], return_lse=True)
      ...     for part in (slice(0, 4), slice(4, 8))
      ... ]
      >>> out, lse = ato_torch.combine(*zip(*halves))
      >>> torch.allclose(out, ato_torch.attention(q, k, v), atol=1e-5)
      True
    """
    shapes.one_of("layout", layout, LAYOUTS)
    out, lse = _checks.stacked("outs", outs), _checks.stacked("lses", lses)
    if lse.device != out.device:
        raise ValueError(f"lses must be on {out.device} as outs are, got {lse.device}")
    _checks.check_device("outs", out)
    letters = axes(layout, "BTHV")
    if out.ndim not in (4, 5):
        raise ValueError(
            f"outs must hold pieces [{', '.join(letters)}] or [{', '.join(letters[1:])}], "
            f"got shape {tuple(out.shape[1:])}"
        )
    letters = letters[5 - out.ndim :]
    sizes: dict[str, int] = {}
    shapes.bind(sizes, "outs", tuple(out.shape), "N" + letters)
    shapes.bind(sizes, "lses", tuple(lse.shape), "N" + letters[:-1])
    if not sizes["N"]:
        raise ValueError("outs must hold at least one piece, got none")
    out, lse = _ops.run("combine", {"outs": out, "lses": lse}, {"layout": layout})
    return out, lse
