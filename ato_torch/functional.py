"""The two functions: PyTorch's arguments checked, and put as ato_jax's ops take them.

Whatever has a gradient goes to the bridge in its final shape and dtype, brought there by
operations that PyTorch differentiates. Tensors whose memory is [B, T, H, D], as a projection
leaves them before it is transposed to [B, H, T, D], go as `layout="bthd"` and are not copied.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch

from ato_jax import LinearState, shapes
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.common import LAYOUTS, axes
from ato_jax.ops.linear_attention import api as linear_attention_api
from ato_torch import _bridge

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# int32 does not hold all of theirs.
WIDE = (torch.int64, torch.uint32, torch.uint64)


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
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    _check_all(query, key, value, smallest=2)
    is_causal = shapes.flag("is_causal", is_causal)
    enable_gqa = shapes.flag("enable_gqa", enable_gqa)
    dropout_p = shapes.static_number("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    (query, key, value), batch, heads = _broadcast(query, key, value, enable_gqa)
    sizes = _bind(query, key, value, "BHTD", "BGSD", "BGSV")
    arrays = {
        "query_offset": (query_offset, "B"),
        "segment_ids": (segment_ids, "BT"),
        "q_segment_ids": (q_segment_ids, "BT"),
        "kv_segment_ids": (kv_segment_ids, "BS"),
        "q_lengths": (q_lengths, "B"),
        "kv_lengths": (kv_lengths, "B"),
    }
    tensors, options = _integers(arrays, query, sizes, batched=bool(batch))
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
        # A copy, since backward reads it again and a list may have changed by then.
        "window": copy.copy(window),
        "softcap": softcap,
        "scale": scale,
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
    out, lse, _ = _bridge.run(attention_api, tensors, options)
    if transposed:
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    T = sizes["T"]
    # An empty T is one row to the op.
    out, lse = out[:, :, :T], lse[:, :, :T]
    out = out.reshape(*batch, *heads, T, sizes["V"])
    return (out, lse.reshape(*batch, *heads, T)) if return_lse else out


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
      feature_map: a name, an elementwise JAX function, or `ato_jax.favor(...)`.
      decay: log of the factor per step, <= 0: [G], [B, G, S] or [B, G, S, D], with a gradient.
      initial_state: a pair of tensors (kv [B, G, D, V], k_sum [B, G, D]), with gradients.
      layout: "bhtd", or "bthd" for [B, T, H, D] (and decay [B, S, G], [B, S, G, D]).
      the rest: as in `ato_jax.linear_attention`; arrays as tensors.

    Returns:
      [B, H, T, V], or that and `LinearState(kv, k_sum)` with `return_state`. A query that sees
      nothing gives 0.
    """
    query, key, value = _autocast(query, key, value)
    _check_all(query, key, value, smallest=3)
    shapes.one_of("layout", layout, LAYOUTS)
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
        _check("decay", decay, like=query)
        kinds = ["G", *(axes(layout, letters)[first:] for letters in ("BSG", "BSGF"))]
        letters_of = {len(letters): letters for letters in kinds}
        if decay.ndim not in letters_of:
            needed = " or ".join(f"[{', '.join(letters)}]" for letters in kinds)
            raise ValueError(f"decay must be {needed}, got shape {tuple(decay.shape)}")
        shapes.bind(dict(sizes), "decay", tuple(decay.shape), letters_of[decay.ndim])
        has_batch = decay.ndim > 1 and not batched
        tensors["decay"] = (decay[None] if has_batch else decay).float()
    if initial_state is not None:
        if not isinstance(initial_state, tuple) or len(initial_state) != 2:
            raise ValueError(
                "initial_state must be a pair of tensors (kv [B, G, D, V], k_sum [B, G, D]), "
                f"got {type(initial_state).__name__}"
            )
        for name, tensor in zip(LinearState._fields, initial_state, strict=True):
            _check(f"initial_state.{name}", tensor, like=query)
        tensors["initial_state"] = LinearState(
            *((tensor if batched else tensor[None]).float() for tensor in initial_state)
        )
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
        "scale": scale,
        "eps": eps,
        "return_state": return_state,
        "layout": layout,
        "precision": precision,
        "implementation": implementation,
    }
    out, state = _bridge.run(linear_attention_api, tensors, options)
    # An empty T is one row to the op.
    out = out.narrow(axes(layout, "BTHV").index("T"), 0, sizes["T"])
    if transposed:
        out = out.transpose(1, 2)
    if not batched:
        out, state = out[0], LinearState(*(tensor[0] for tensor in state))
    return (out, state) if return_state else out


def _check(name: str, tensor: Any, like: torch.Tensor | None = None) -> None:
    """A dense float tensor that ato_jax can compute with, on the device of `like`."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    _check_dense(name, tensor)
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} must be bfloat16, float16 or float32, got {tensor.dtype}; convert it first"
        )
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} as query is, got {tensor.device}")


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {tensor.layout}")


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
    kind = query.device.type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"query must be on the CPU or a CUDA device, got {query.device}")
    if kind == "cuda" and not _bridge.has_gpu():
        raise ValueError(
            f"query is on {query.device}, but JAX finds no GPU: install JAX for CUDA, "
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
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
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
    try:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        shown = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"the leading axes of query, key and value must broadcast, got shapes {shown}"
        ) from None
    if enable_gqa:
        if G != value_G:
            raise ValueError(f"key and value must have the same heads, got {G} and {value_G}")
    elif len({H, G, value_G} - {1}) > 1:
        raise ValueError(
            f"key and value have {G} and {value_G} heads where query has {H}: "
            "pass enable_gqa=True if groups of query heads share them"
        )
    else:
        G = value_G = max(G, value_G)
        H = max(H, G)
    B = math.prod(batch)
    spread = [
        tensor.expand(*batch, heads, *tensor.shape[-2:]).reshape(B, heads, *tensor.shape[-2:])
        for tensor, heads in ((query, H), (key, G), (value, G))
    ]
    return spread, tuple(batch), (H,) if with_heads else ()


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
            f"attn_mask must be bool, float32 or query's {query.dtype}, got {attn_mask.dtype}"
        )
    if attn_mask.device != query.device:
        raise ValueError(
            f"attn_mask must be on {query.device} as query is, got {attn_mask.device}"
        )
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
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lengths, segments and offsets: as tensors where on a GPU, else as arrays on the host.

    ato_jax checks the values of those on the host. Each comes with its axes, without B where
    `query` has none.
    """
    tensors: dict[str, torch.Tensor] = {}
    options: dict[str, Any] = {}
    for name, (given, letters) in arrays.items():
        if given is None or (name == "query_offset" and isinstance(given, int)):
            options[name] = given
            continue
        is_tensor = isinstance(given, torch.Tensor)
        found = str(given.dtype) if is_tensor else shapes.dtype_name(name, given)
        if not found.removeprefix("torch.").startswith(("int", "uint")):
            raise ValueError(f"{name} must hold integers, got {found}")
        if is_tensor:
            _check_dense(name, given)
            if given.device.type != "cpu" and given.device != query.device:
                raise ValueError(
                    f"{name} must be on {query.device} as query is, got {given.device}"
                )
        on_gpu = is_tensor and given.is_cuda
        # A copy of what is on the host, since backward reads it again.
        array: Any = given if on_gpu else np.array(given.numpy() if is_tensor else given)
        if name != "query_offset" or array.ndim > 0:
            if letters == "B":
                shapes.bind_batch(dict(sizes), name, tuple(array.shape), batched)
                array = array.reshape(-1)
            else:
                wanted = letters if batched else letters[1:]
                shapes.bind(dict(sizes), name, tuple(array.shape), wanted)
                array = array if batched else array[None]
        (tensors if on_gpu else options)[name] = array
    if any("segment_ids" in name for name in tensors):
        # Ids of both sides are compared: they are narrowed together.
        for name in [name for name in options if "segment_ids" in name]:
            ids = options.pop(name)
            if ids is not None:
                tensors[name] = torch.as_tensor(ids.astype(np.int64), device=query.device)
    return _narrow(tensors), options


def _narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Integers as int32: ids are equal where they were, the others as near as int32 can be."""
    limits = torch.iinfo(torch.int32)
    wide = {name: tensor.long() for name, tensor in tensors.items()}
    narrow = {name: tensor.clamp(limits.min, limits.max).int() for name, tensor in wide.items()}
    ids = {name: tensor for name, tensor in wide.items() if "segment_ids" in name}
    if any(tensors[name].dtype in WIDE for name in ids):
        # An id's place among all the ids, sorted: PyTorch's integers have 64 bits by default.
        ordered = torch.cat(list(ids.values()), dim=1).sort(dim=1).values
        for name, tensor in ids.items():
            narrow[name] = torch.searchsorted(ordered, tensor.contiguous(), out_int32=True)
    return narrow


def _are_transposed(*tensors: torch.Tensor) -> bool:
    """Whether the memory of all has its second and third axis the other way round."""
    return not all(tensor.is_contiguous() for tensor in tensors) and all(
        tensor.transpose(1, 2).is_contiguous() for tensor in tensors
    )
