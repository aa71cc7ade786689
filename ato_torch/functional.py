"""The functions: PyTorch's arguments checked, and put as ato_jax's ops take them.

Whatever has a gradient goes to the op in its final shape and dtype, brought there by operations
that PyTorch differentiates. Tensors whose memory is [B, T, H, D], as a projection leaves them
before it is transposed to [B, H, T, D], go as `layout="bthd"` and are not copied.

Values are checked where they can be read without waiting for a GPU, and where nothing traces:
those of lengths, segments, offsets and decays that are on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ato_jax import LinearState, device, shapes
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.common import LAYOUTS, axes
from ato_torch import _bridge, _ops, _programs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# int32 does not hold all of theirs.
WIDE = (torch.int64, torch.uint32, torch.uint64)
# Options that are known by their value.
PLAIN = (bool, int, float, str, type(None))


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
    window: tuple[int | None, int | None] | None = None,
    query_offset: Any = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    segment_ids: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    return_lse: bool = False,
    precision: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Exact softmax attention, as `torch.nn.functional.scaled_dot_product_attention` means it.

    Args:
      query: [..., H, T, D]; leading axes broadcast and may be missing, as there.
      key: [..., G, S, D]; G is H, or 1, or with `enable_gqa` divides H.
      value: [..., G, S, V].
      attn_mask: broadcastable to [..., H, T, S]; boolean, True where a query sees a key, or
        float, added to the scores, with a gradient. Not together with `is_causal`.
      dropout_p: weights dropped at random, seeded by PyTorch's generator of the tensors' device.
      is_causal: query i sees key j iff j <= i (top left).
      scale: D**-0.5 unless given.
      enable_gqa: allow fewer heads in `key` and `value` than in `query`.
      query_offset: puts query i at position query_offset + i among the keys, for `is_causal` and
        `window`; None is ato_jax's own default, where the last query sees the last key.
      window, softcap, sinks, segment_ids, q_segment_ids, kv_segment_ids, q_lengths, kv_lengths,
        return_lse, precision, implementation: as in `ato_jax.attention`; arrays as tensors.

    Returns:
      [..., H, T, V], or that and lse [..., H, T] with `return_lse`. A query that sees nothing
      gives 0.
    """
    plan = None
    given = (query, key, value)
    ids = segment_ids is q_segment_ids is kv_segment_ids is None
    if ids and attn_mask is sinks is q_lengths is kv_lengths is None:
        facts = (dropout_p, is_causal, scale, enable_gqa, window, query_offset, softcap)
        plan = _plan_of("attention", given, facts + (return_lse, precision, implementation))
        if plan is not None and plan.program is not None:
            return plan(given)
    if torch.compiler.is_compiling():
        dropout_p, is_causal, scale, softcap, window, query_offset = _ops.static(
            (dropout_p, is_causal, scale, softcap, window, query_offset)
        )
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    _check_all(query, key, value, smallest=2)
    is_causal = shapes.flag("is_causal", is_causal)
    enable_gqa = shapes.flag("enable_gqa", enable_gqa)
    dropout_p = _required("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be from 0 to 1, got {dropout_p}")
    if dropout_p == 1:
        dropout_p, value = 0.0, value * 0  # the weights would be divided by 0
    return_lse = shapes.flag("return_lse", return_lse)
    (query, key, value), batch, heads = _broadcast(query, key, value, enable_gqa)
    straight = query is given[0] and key is given[1] and value is given[2]
    sizes = _bind(query, key, value, "BHTD", "BGSD", "BGSV")
    arrays = {
        "query_offset": (query_offset, "B"),
        "segment_ids": (segment_ids, "BT"),
        "q_segment_ids": (q_segment_ids, "BT"),
        "kv_segment_ids": (kv_segment_ids, "BS"),
        "q_lengths": (q_lengths, "B"),
        "kv_lengths": (kv_lengths, "B"),
    }
    tensors, options = _integers(arrays, query, sizes, batched=len(batch) > 0)
    if attn_mask is not None:
        if is_causal:
            raise ValueError(
                "attn_mask cannot be given together with is_causal=True: make the mask causal"
            )
        spread = _four_axes(attn_mask, query, batch, heads, sizes)
        tensors["mask" if spread.dtype == torch.bool else "bias"] = spread
    if sinks is not None:
        _check("sinks", sinks, like=query)
        shapes.bind(sizes, "sinks", tuple(sinks.shape), "H")
        tensors["sinks"] = sinks.float()
    if dropout_p > 0:
        key_words = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=query.device)
        tensors["dropout_key"] = key_words.view(torch.uint32)
    options |= {
        "causal": is_causal,
        "window": None if window is None else attention_api.bounds(False, window),
        "softcap": _number("softcap", softcap),
        "scale": _number("scale", scale),
        "dropout_rate": dropout_p,
        "return_lse": return_lse,
        "precision": precision,
        "implementation": implementation,
        "layout": "bhtd",
    }
    transposed = _are_transposed(query, key, value)
    if transposed:
        options["layout"] = "bthd"
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    tensors |= {"q": query, "k": key, "v": value}
    # As they are, where nothing was broadcast.
    shape = None if len(batch) == len(heads) == 1 else (*batch, *heads, sizes["T"])
    finish = functools.partial(_attention_results, shape, return_lse)
    outputs = _ops.run("attention", tensors, options)
    if plan is not None and straight and len(tensors) == 3:
        plan.fill("attention", (query, key, value), options, transposed, finish)
    return finish(transposed, outputs)


def _attention_results(
    shape: tuple[int, ...] | None, return_lse: bool, transposed: bool, outputs: Any
) -> Any:
    out = outputs[0].transpose(1, 2) if transposed else outputs[0]
    if shape is not None:
        out = out.reshape(*shape, out.shape[-1])
    if not return_lse:
        return out
    lse = outputs[1].transpose(1, 2) if transposed else outputs[1]
    return out, lse if shape is None else lse.reshape(shape)


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    feature_map: Any = "elu1",
    causal: bool = False,
    decay: torch.Tensor | None = None,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    segment_ids: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    initial_state: Any = None,
    return_state: bool = False,
    layout: str = "bhtd",
    precision: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Linear attention, in time and memory linear in T and S: `ato_jax.linear_attention`.

    Args:
      query: [B, H, T, D]; the batch axis may be missing, here and everywhere.
      key: [B, G, S, D] with H % G == 0: query head h reads head h // (H // G).
      value: [B, G, S, V].
      feature_map: a name, an elementwise JAX function, or `ato_jax.favor(...)`. To torch.compile
        a function is what it was, closure included, when it was compiled; before PyTorch 2.13
        it takes names alone.
      decay: log of the factor per step, <= 0: [G], [B, G, S] or [B, G, S, D], with a gradient.
      initial_state: a pair of tensors (kv [B, G, D, V], k_sum [B, G, D]), with gradients.
      layout: "bhtd", or "bthd" for [B, T, H, D] (and decay [B, S, G], [B, S, G, D]).
      the rest: as in `ato_jax.linear_attention`; arrays as tensors.

    Returns:
      [B, H, T, V], or that and `LinearState(kv, k_sum)` with `return_state`. A query that sees
      nothing gives 0.
    """
    plan = None
    given = (query, key, value)
    ids = segment_ids is q_segment_ids is kv_segment_ids is None
    named = isinstance(feature_map, str)
    if ids and named and decay is initial_state is q_lengths is kv_lengths is None:
        facts = (feature_map, causal, normalize, scale, eps, return_state, layout)
        plan = _plan_of("linear_attention", given, facts + (precision, implementation))
        if plan is not None and plan.program is not None:
            return plan(given)
    if torch.compiler.is_compiling():
        causal, scale, eps = _ops.static((causal, scale, eps))
    query, key, value = _autocast(query, key, value)
    _check_all(query, key, value, smallest=3)
    shapes.one_of("layout", layout, LAYOUTS)
    return_state = shapes.flag("return_state", return_state)
    batched = query.ndim == 4
    first = 0 if batched else 1
    letters = [axes(layout, name)[first:] for name in ("BTHD", "BSGD", "BSGV")]
    sizes = _bind(query, key, value, *letters)
    sizes.setdefault("B", 1)
    arrays = {
        "segment_ids": (segment_ids, "BT"),
        "q_segment_ids": (q_segment_ids, "BT"),
        "kv_segment_ids": (kv_segment_ids, "BS"),
        "q_lengths": (q_lengths, "B"),
        "kv_lengths": (kv_lengths, "B"),
    }
    tensors, options = _integers(arrays, query, sizes, batched)
    # The number of features is the feature map's: ato_jax checks axes of that size.
    if decay is not None:
        kinds = ["G", *(axes(layout, letters)[first:] for letters in ("BSG", "BSGF"))]
        tensors["decay"] = _decay(decay, query, sizes, kinds, batched)
    if initial_state is not None:
        tensors |= _state("initial_state", initial_state, query, batched)
    feature_map, parameters = _ops.resolved(feature_map, query.device)
    tensors |= parameters
    straight = batched and query is given[0] and key is given[1] and value is given[2]
    if not batched:
        query, key, value = query[None], key[None], value[None]
    transposed = _are_transposed(query, key, value)
    if transposed:
        layout = "bthd" if layout == "bhtd" else "bhtd"
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if decay is not None and decay.ndim > 1:
            tensors["decay"] = tensors["decay"].transpose(1, 2)
    tensors |= {"q": query, "k": key, "v": value}
    options |= {
        "feature_map": feature_map,
        "causal": causal,
        "normalize": normalize,
        "scale": _number("scale", scale),
        "eps": _number("eps", eps),
        "return_state": return_state,
        "layout": layout,
        "precision": precision,
        "implementation": implementation,
    }
    finish = functools.partial(_linear_results, batched, return_state)
    outputs = _ops.run("linear_attention", tensors, options)
    if plan is not None and straight and len(tensors) == 3:
        plan.fill("linear_attention", (query, key, value), options, transposed, finish)
    return finish(transposed, outputs)


def _linear_results(batched: bool, return_state: bool, transposed: bool, outputs: Any) -> Any:
    out = outputs[0].transpose(1, 2) if transposed else outputs[0]
    out = out if batched else out[0]
    if not return_state:
        return out
    return out, LinearState(*(tensor if batched else tensor[0] for tensor in outputs[1:]))


def linear_attention_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: Any,
    *,
    feature_map: Any = "elu1",
    decay: torch.Tensor | None = None,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, LinearState]:
    """One token of causal linear attention: `ato_jax.linear_attention_step`.

    Args:
      query: [B, H, D]; the batch axis may be missing, here and everywhere.
      key: [B, G, D] with H % G == 0.
      value: [B, G, V].
      state: a pair of tensors (kv [B, G, D, V], k_sum [B, G, D]): what `linear_attention` with
        `return_state` or the step before returned, or zeros. It is left as it is.
      feature_map, normalize, scale, eps: as in `linear_attention`.
      decay: log of this step's factor, <= 0: [G], [B, G] or [B, G, D], with a gradient.

    Returns:
      ([B, H, V], the new `LinearState(kv, k_sum)`).
    """
    if torch.compiler.is_compiling():
        scale, eps = _ops.static((scale, eps))
    query, key, value = _autocast(query, key, value)
    _check_all(query, key, value, smallest=2)
    if query.ndim > 3:
        raise ValueError(f"query must be [B, H, D] or [H, D], got shape {tuple(query.shape)}")
    batched = query.ndim == 3
    first = 0 if batched else 1
    sizes = _bind(query, key, value, "BHD"[first:], "BGD"[first:], "BGV"[first:])
    tensors = _state("state", state, query, batched)
    if decay is not None:
        kinds = ["G", "BG"[first:], "BGF"[first:]]
        tensors["decay"] = _decay(decay, query, sizes, kinds, batched)
    feature_map, parameters = _ops.resolved(feature_map, query.device)
    tensors |= parameters
    if not batched:
        query, key, value = query[None], key[None], value[None]
    tensors |= {"q": query, "k": key, "v": value}
    options = {
        "feature_map": feature_map,
        "normalize": normalize,
        "scale": _number("scale", scale),
        "eps": _number("eps", eps),
    }
    sums: Any
    out, *sums = _ops.run("linear_attention_step", tensors, options)
    if not batched:
        out, sums = out[0], [tensor[0] for tensor in sums]
    return out, LinearState(*sums)


def combine(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    layout: str = "bhtd",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over parts of the keys into attention over all: `ato_jax.combine`.

    Args:
      outs: N pieces [B, H, T, V], a sequence or stacked to [N, B, H, T, V]; the batch axis may
        be missing.
      lses: as many [B, H, T]: what `attention(..., return_lse=True)` returned.
      layout: "bhtd", or "bthd" for [B, T, H, V] and [B, T, H].

    Returns:
      (out in the pieces' dtype, lse in float32). Where no piece saw anything, 0 and -inf.
    """
    shapes.one_of("layout", layout, LAYOUTS)
    out, lse = _stacked("outs", outs), _stacked("lses", lses)
    if lse.device != out.device:
        raise ValueError(f"lses must be on {out.device} as outs are, got {lse.device}")
    _check_device("outs", out)
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


def _stacked(name: str, pieces: Any) -> torch.Tensor:
    """A sequence of pieces, or a tensor of them, as one tensor with the pieces in front."""
    if isinstance(pieces, torch.Tensor):
        _check(name, pieces)
        return pieces
    if not isinstance(pieces, Sequence):
        raise ValueError(f"{name} must be tensors or one tensor, got {type(pieces).__name__}")
    for n, piece in enumerate(pieces):
        _check(f"{name}[{n}]", piece)
    if not pieces:
        raise ValueError(f"{name} must hold at least one piece, got none")
    if len({(tuple(piece.shape), piece.dtype, piece.device) for piece in pieces}) > 1:
        listing = ", ".join(
            f"{piece.dtype} {tuple(piece.shape)} on {piece.device}" for piece in pieces
        )
        raise ValueError(f"{name} must be alike in shape, dtype and device, got {listing}")
    return torch.stack(list(pieces))


def _decay(
    decay: Any, query: torch.Tensor, sizes: dict[str, int], kinds: list[str], batched: bool
) -> torch.Tensor:
    """decay in float32, with a batch axis where it is not [G]; its axes are one of `kinds`."""
    _check("decay", decay, like=query)
    letters_of = {len(letters): letters for letters in reversed(kinds)}
    if decay.ndim not in letters_of:
        needed = " or ".join(f"[{', '.join(letters)}]" for letters in kinds)
        raise ValueError(f"decay must be {needed}, got shape {tuple(decay.shape)}")
    shapes.bind(dict(sizes), "decay", tuple(decay.shape), letters_of[decay.ndim])
    if decay.device.type == "cpu" and _ops.runs_plainly([decay]) and decay.numel():
        largest = float(decay.detach().max())
        if largest > 0:
            raise ValueError(
                "decay is the natural log of a factor and must be <= 0, "
                f"got values up to {largest}"
            )
    return (decay[None] if decay.ndim > 1 and not batched else decay).float()


def _state(
    name: str, state: Any, query: torch.Tensor, batched: bool
) -> dict[str, torch.Tensor]:
    """A pair (kv, k_sum) as float32 tensors with a batch axis, named as parts of `name`."""
    if not isinstance(state, tuple) or len(state) != 2:
        raise ValueError(
            f"{name} must be a pair of tensors (kv [B, G, D, V], k_sum [B, G, D]), "
            f"got {type(state).__name__}"
        )
    found = {}
    for field, tensor in zip(LinearState._fields, state, strict=True):
        _check(f"{name}.{field}", tensor, like=query)
        found[f"{name}.{field}"] = (tensor if batched else tensor[None]).float()
    return found


class _Plan:
    """What the checks made of a call of query, key and value alone.

    It follows from what `_plan_of` looks at, so that a call like it goes straight to its program.
    """

    def __init__(self, key: tuple[Any, ...], differentiates: bool) -> None:
        self.key, self.differentiates = key, differentiates
        self.program: Any = None
        self.transposed = False
        self.finish: Any = None
        # The direct road: None if it has to be looked for, False if there is none.
        self.ready: Any = None

    def fill(
        self,
        op: str,
        tensors: tuple[torch.Tensor, ...],
        options: dict[str, Any],
        transposed: bool,
        finish: Any,
    ) -> None:
        self.transposed, self.finish = transposed, finish
        names = ("q", "k", "v")
        self.program = _ops.program_of(op, names, tensors, self.differentiates, options)
        if len(_plans) >= _programs.KEPT:
            _plans.clear()
        _programs.kept.also_known(self.program, _plans, self.key, self)

    def __call__(self, tensors: Any) -> Any:
        self.program.used = True
        if self.ready:
            return self.finish(False, self.ready(tensors))
        if self.ready is None:
            found = _ops.ready(self.program, tensors, self.differentiates, self.transposed)
            if found is not None or not self.program.waits_for_memory:
                self.ready = found or False
        if self.transposed:
            tensors = [tensor.transpose(1, 2) for tensor in tensors]
        outputs = _ops.run_plainly(self.program, tensors, self.differentiates)
        return self.finish(self.transposed, outputs)


# Those that are filled, by their keys.
_plans: dict[Any, _Plan] = {}


def _plan_of(op: str, tensors: Any, options: tuple[Any, ...]) -> _Plan | None:
    """The plan of a call, yet to be filled where it is the first of its kind; None without one."""
    if torch._C._is_any_autocast_enabled() or not _ops.runs_plainly(tensors):
        return None
    if _ops.is_forward_mode():
        return None
    query, key, value = tensors
    differentiates = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    # 1 is equal to True and to 1.0, also inside a window.
    kinds = tuple(map(type, options))
    if tuple in kinds:
        kinds += tuple(type(part) for each in options if type(each) is tuple for part in each)
    try:
        facts = (
            *(op, options, kinds, differentiates, device.interpreting()),
            *(query.shape, query.dtype, query.device, query.layout, query.stride()),
            *(key.shape, key.dtype, key.device, key.layout, key.stride()),
            *(value.shape, value.dtype, value.device, value.layout, value.stride()),
        )
        found = _plans.get(facts)
    except (RuntimeError, TypeError):  # no strides; an option that has no hash
        return None
    if found is not None:
        return found
    is_dense = query.layout is key.layout is value.layout is torch.strided
    if is_dense and all(type(option) in PLAIN or _is_window(option) for option in options):
        return _Plan(facts, differentiates)
    return None


def _is_window(option: Any) -> bool:
    return type(option) is tuple and all(type(part) in (int, type(None)) for part in option)


def _number(name: str, value: Any) -> float | None:
    return None if value is None else _required(name, value)


def _required(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise ValueError(
            f"{name} must be a number, and a tensor that requires a gradient would get none; give "
            "its item(), or multiply outside of the call"
        )
    return shapes.static_number(name, value)


def _check(name: str, tensor: Any, like: torch.Tensor | None = None) -> None:
    """A dense float tensor that ato_jax can compute with, on the device of `like`."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    _check_dense(name, tensor)
    if tensor.dtype not in DTYPES:
        how = "dequantize() it" if tensor.is_quantized else "convert it first"
        raise ValueError(
            f"{name} must be bfloat16, float16 or float32, got {tensor.dtype}; {how}"
        )
    if like is not None:
        _check_place(name, tensor, like)


def _check_place(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(
            f"{name} must be on {like.device} as query is, got {tensor.device}; move it there"
        )


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one; pad it by to_padded_tensor, and "
            "give q_lengths and kv_lengths"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{name} must be a dense tensor, got {tensor.layout}; call to_dense() on it"
        )


def _check_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, smallest: int
) -> None:
    """query, key and value: of one dtype on one device that JAX has, of at least so many axes."""
    _check("query", query)
    for name, tensor in (("key", key), ("value", value)):
        _check(name, tensor, like=query)
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}, got {tensor.dtype}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim < smallest:
            raise ValueError(
                f"{name} must have at least {smallest} axes, got shape {tuple(tensor.shape)}"
            )
    _check_device("query", query)


def _check_device(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(
            f"{name} is on meta, without memory to compute with; make it on a device, or take "
            "FakeTensorMode for shapes alone"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{name} must be on the CPU or a CUDA device, got {tensor.device}; move it there"
        )
    if tensor.is_cuda and not _bridge.has_gpu():
        raise ValueError(
            f"{name} is on {tensor.device}, but JAX finds no GPU: install JAX for CUDA, "
            "for instance as the extra ato-jax[cuda13]"
        )


def _bind(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *letters: str
) -> dict[str, int]:
    """The sizes of the axes, by their letters."""
    sizes: dict[str, int] = {}
    named = zip(("query", "key", "value"), (query, key, value), letters, strict=True)
    for name, tensor, tensor_letters in named:
        shapes.bind(sizes, name, tuple(tensor.shape), tensor_letters)
    if sizes["G"] and sizes["H"] % sizes["G"]:
        raise ValueError(
            "query's heads H must be a multiple of key's heads G, "
            f"got H={sizes['H']}, G={sizes['G']}"
        )
    return sizes


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Float tensors in autocast's dtype where it is on, as for PyTorch's own attention."""
    query = tensors[0]
    if not isinstance(query, torch.Tensor):
        return tensors
    kind = query.device.type
    # The two where the ops run: to ask which kinds have autocast breaks the graph of PyTorch 2.11.
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor.to(dtype)
        if isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES
        else tensor
        for tensor in tensors
    )


def _broadcast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[list[torch.Tensor], tuple[int, ...], tuple[int, ...]]:
    """[B, H, T, D], [B, G, S, D], [B, G, S, V], and what the result has in place of B and of H."""
    tensors = (query, key, value)
    with_heads = max(tensor.ndim for tensor in tensors) > 2
    query, key, value = (tensor if tensor.ndim > 2 else tensor[None] for tensor in tensors)
    H, G, value_G = (tensor.shape[-3] for tensor in (query, key, value))
    # Compared one by one: a size that is PyTorch's symbol has no hash.
    different = [heads for heads in (H, G, value_G) if heads != 1]
    try:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        shown = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"the leading axes of query, key and value must broadcast, got shapes {shown}"
        ) from None
    if enable_gqa:
        if G != value_G:
            key, value = _same_heads(H, key, value)
            G = value_G = key.shape[-3]
    elif any(heads != different[0] for heads in different):
        raise ValueError(
            f"key and value have {G} and {value_G} heads where query has {H}: "
            "pass enable_gqa=True if groups of query heads share them"
        )
    else:
        G = value_G = value_G if G == 1 else G
        H = G if H == 1 else H
    B = math.prod(batch)
    spread = [
        tensor
        if tensor.shape[:-2] == (B, heads) and len(batch) == 1
        else tensor.expand(*batch, heads, *tensor.shape[-2:]).reshape(B, heads, *tensor.shape[-2:])
        for tensor, heads in ((query, H), (key, G), (value, G))
    ]
    return spread, tuple(batch), (H,) if with_heads else ()


def _same_heads(
    H: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each with its heads repeated, until key and value have the same number."""
    sizes = key.shape[-3], value.shape[-3]
    if not all(sizes) or any(H % heads for heads in sizes):
        raise ValueError(
            "query's heads must be a multiple of key's and of value's, "
            f"got {H}, {sizes[0]} and {sizes[1]}"
        )
    G = math.lcm(*sizes)
    key, value = (
        tensor if heads == G else tensor.repeat_interleave(G // heads, dim=-3)
        for tensor, heads in zip((key, value), sizes, strict=True)
    )
    return key, value


def _four_axes(
    attn_mask: Any,
    query: torch.Tensor,
    batch: tuple[int, ...],
    heads: tuple[int, ...],
    sizes: dict[str, int],
) -> torch.Tensor:
    """attn_mask as [B|1, H|1, T|1, S|1]."""
    if not isinstance(attn_mask, torch.Tensor):
        raise ValueError(f"attn_mask must be a torch.Tensor, got {type(attn_mask).__name__}")
    _check_dense("attn_mask", attn_mask)
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise ValueError(
            f"attn_mask must be bool, float32 or query's {query.dtype}, got {attn_mask.dtype}; "
            "convert it first"
        )
    _check_place("attn_mask", attn_mask, query)
    full = (*batch, *heads, sizes["T"], sizes["S"])
    fits = 2 <= attn_mask.ndim <= len(full) and all(
        size in (1, wanted)
        for size, wanted in zip(reversed(attn_mask.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask must broadcast to [..., H, T, S] = {full}, "
            f"got shape {tuple(attn_mask.shape)}"
        )
    if not attn_mask.requires_grad:
        # An expanded axis goes as the one entry that it is in memory.
        for axis, (size, stride) in enumerate(
            zip(attn_mask.shape, attn_mask.stride(), strict=True)
        ):
            attn_mask = attn_mask.narrow(axis, 0, 1) if size > 1 and stride == 0 else attn_mask
    spread = attn_mask[(None,) * (len(batch) + 3 - attn_mask.ndim)]
    B = 1
    if any(size != 1 for size in spread.shape[:-3]):
        B = sizes["B"]
        spread = spread.expand(*batch, *spread.shape[-3:])
    return spread.reshape(B, *spread.shape[-3:])


def _integers(
    arrays: dict[str, tuple[Any, str]],
    query: torch.Tensor,
    sizes: dict[str, int],
    batched: bool,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Lengths, segments and offsets as int32 on query's device; an int offset as an option.

    Each comes with its axes, without B where `query` has none.
    """
    tensors: dict[str, torch.Tensor] = {}
    options: dict[str, Any] = {}
    for name, (given, letters) in arrays.items():
        if given is None:
            continue
        if name == "query_offset" and isinstance(given, int) and not isinstance(given, bool):
            options[name] = given
            continue
        tensor = _integer(name, given, query, sizes)
        if name != "query_offset" or tensor.ndim > 0:
            if letters == "B":
                shapes.bind_batch(dict(sizes), name, tuple(tensor.shape), batched)
                tensor = tensor.reshape(-1)
            else:
                wanted = letters if batched else letters[1:]
                shapes.bind(dict(sizes), name, tuple(tensor.shape), wanted)
                tensor = tensor if batched else tensor[None]
        tensors[name] = tensor
    return _narrow(tensors) if tensors else tensors, options


def _integer(
    name: str, given: Any, query: torch.Tensor, sizes: dict[str, int]
) -> torch.Tensor:
    """Integers as a tensor on query's device; values that can be read now are checked."""
    if torch.compiler.is_compiling() and not isinstance(given, torch.Tensor):
        given = torch.as_tensor(given)
    is_tensor = isinstance(given, torch.Tensor)
    found = str(given.dtype) if is_tensor else shapes.dtype_name(name, given)
    if not found.removeprefix("torch.").startswith(("int", "uint")):
        raise ValueError(f"{name} must hold integers, got {found}")
    if is_tensor:
        _check_dense(name, given)
        if given.device.type != "cpu":
            _check_place(name, given, query)
        if given.device.type != "cpu" or not _ops.runs_plainly([given]):
            return given.to(query.device)
    host = given.numpy() if is_tensor else np.asarray(given)
    shapes.integers(name, host)
    if name.endswith("lengths"):
        axis = "T" if name == "q_lengths" else "S"
        shapes.within(name, host, 0, sizes[axis], f"{axis}={sizes[axis]}")
    elif name == "query_offset":
        farthest = attention_api.FARTHEST_OFFSET
        shapes.within(name, host, -farthest, farthest, str(farthest))
    # A copy, since backward reads it again. Out of ordinary memory, so that nothing waits.
    return torch.from_numpy(host.astype(np.int32)).to(query.device, non_blocking=True)


def _narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Integers as int32: ids are equal where they were, the others as near as int32 can be."""
    limits = torch.iinfo(torch.int32)
    wide = {
        name: tensor.long() for name, tensor in tensors.items() if tensor.dtype in WIDE
    }
    narrow = tensors | {
        name: tensor.clamp(limits.min, limits.max) for name, tensor in wide.items()
    }
    ids = {name: tensor for name, tensor in tensors.items() if "segment_ids" in name}
    if any(name in wide for name in ids):
        # An id's place among all the ids, sorted: PyTorch's integers have 64 bits by default.
        ordered = torch.cat([tensor.long() for tensor in ids.values()], dim=1).sort(dim=1).values
        for name, tensor in ids.items():
            narrow[name] = torch.searchsorted(ordered, tensor.long().contiguous())
    return {name: tensor.int() for name, tensor in narrow.items()}


def _are_transposed(*tensors: torch.Tensor) -> bool:
    """Whether the memory of all has its second and third axis the other way round."""
    return not all(tensor.is_contiguous() for tensor in tensors) and all(
        tensor.transpose(1, 2).is_contiguous() for tensor in tensors
    )
