"""PyTorch's arguments, checked and put into the shapes and dtypes that the ops take.

Errors are ValueErrors that name the argument. Values are checked where reading them does not wait
for a GPU and nothing traces: lengths, segment ids, offsets and decays in the host's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
import torch

from ato_jax import LinearState, shapes
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.common import are_known_equal
from ato_torch import _bridge, _modes

Layout = Literal["bhtd", "bthd"]
# Lengths, segment ids and offsets.
Integers = torch.Tensor | np.ndarray | Sequence[Any]
# A name, or an elementwise JAX function such as `ato_jax.favor` returns.
FeatureMapLike = (
    Literal["elu1", "relu", "exp", "softplus", "identity", "silu", "relu2"]
    | Callable[[jax.Array], jax.Array]
)
# (kv [B, G, D, V], k_sum [B, G, D]), as a `LinearState` or a plain pair.
State = LinearState | tuple[torch.Tensor, torch.Tensor]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Integers that may not fit in int32.
WIDE = (torch.int64, torch.uint32, torch.uint64)


def number(name: str, value: Any) -> float | None:
    """`value` as a float; None stays None."""
    return None if value is None else required(name, value)


def required(name: str, value: Any) -> float:
    """`value` as a float.

    Raises:
      ValueError: it is no number, or a tensor that requires a gradient.
    """
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise ValueError(
            f"{name} must be a number, and a tensor that requires a gradient would get none; give "
            "its item(), or multiply outside of the call"
        )
    return shapes.static_number(name, value)


def filled(length: int) -> int:
    """A length rounded up to one of four sizes per doubling; at least a multiple of 64."""
    step = max(64, 1 << (length - 1).bit_length() >> 3)
    return -(-length // step) * step


def check(
    name: str, tensor: Any, like: torch.Tensor | None = None, whose: str = "query"
) -> None:
    """Refuses what is no dense tensor in one of `DTYPES`, or not on the device of `like`, whose
    name is `whose`."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    check_dense(name, tensor)
    if tensor.dtype not in DTYPES:
        how = "dequantize() it" if tensor.is_quantized else "convert it first"
        raise ValueError(
            f"{name} must be bfloat16, float16 or float32, got {tensor.dtype}; {how}"
        )
    if like is not None:
        check_place(name, tensor, like, whose)


def check_place(
    name: str, tensor: torch.Tensor, like: torch.Tensor, whose: str = "query"
) -> None:
    """Refuses a tensor that is not on the device of `like`, whose name is `whose`."""
    if tensor.device != like.device:
        raise ValueError(
            f"{name} must be on {like.device} as {whose} is, got {tensor.device}; move it there"
        )


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuses nested and sparse tensors."""
    if tensor.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one; pad it by to_padded_tensor, and "
            "give q_lengths and kv_lengths"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{name} must be a dense tensor, got {tensor.layout}; call to_dense() on it"
        )


def check_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, smallest: int
) -> None:
    """Refuses query, key and value unless they share a dtype and a device that JAX can use, and
    have at least `smallest` axes each."""
    check("query", query)
    for name, tensor in (("key", key), ("value", value)):
        check(name, tensor, like=query)
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}, got {tensor.dtype}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim < smallest:
            raise ValueError(
                f"{name} must have at least {smallest} axes, got shape {tuple(tensor.shape)}"
            )
    check_device("query", query)


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Refuses tensors that are neither on the CPU nor on a GPU that JAX can use."""
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


def bind(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *letters: str
) -> dict[str, int]:
    """The sizes of the axes, by their letters; refuses sizes that disagree."""
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


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The float tensors in autocast's dtype where autocast is on, as for PyTorch's attention."""
    query = tensors[0]
    # Every call comes here, and this check takes a tenth of the time of those below.
    if not torch._C._is_any_autocast_enabled() or not isinstance(query, torch.Tensor):
        return tensors
    kind = query.device.type
    # The two device types of the ops. A query for all types that have autocast would break the
    # graph that PyTorch 2.11 compiles.
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        [
            tensor.to(dtype)
            if isinstance(tensor, torch.Tensor)
            and tensor.dtype != dtype
            and tensor.dtype in DTYPES
            else tensor
            for tensor in tensors
        ]
    )


def broadcast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[list[torch.Tensor], tuple[int, ...], tuple[int, ...]]:
    """Query [B, H, T, D], key [B, G, S, D] and value [B, G, S, V] with leading axes broadcast.

    Returns:
      The three tensors, and the axes that the result has in place of B and in place of H.
    """
    tensors = (query, key, value)
    with_heads = max(tensor.ndim for tensor in tensors) > 2
    query, key, value = (tensor if tensor.ndim > 2 else tensor[None] for tensor in tensors)
    H, G, value_G = (tensor.shape[-3] for tensor in (query, key, value))
    # A list, not a set: sizes that are PyTorch's symbols have no hash.
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
            key, value = same_heads(H, key, value)
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


def same_heads(
    H: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value with their heads repeated until both have the same number."""
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


def four_axes(
    attn_mask: Any,
    query: torch.Tensor,
    batch: tuple[int, ...],
    heads: tuple[int, ...],
    sizes: dict[str, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """attn_mask as [B|1, H|1, T|1, S|1]; query's `dtype` is that of the call on widened tensors."""
    if not isinstance(attn_mask, torch.Tensor):
        raise ValueError(f"attn_mask must be a torch.Tensor, got {type(attn_mask).__name__}")
    check_dense("attn_mask", attn_mask)
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
        raise ValueError(
            f"attn_mask must be bool, float32 or query's {dtype}, got {attn_mask.dtype}; "
            "convert it first"
        )
    check_place("attn_mask", attn_mask, query)
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
        # An expanded axis has one entry in memory and is passed as an axis of size 1.
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


def integers(
    arrays: dict[str, tuple[Any, str]],
    query: torch.Tensor,
    sizes: dict[str, int],
    batched: bool,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Lengths, segment ids and offsets as int32 on query's device; an int offset as an option.

    `arrays` has for each name what was given and the letters of its axes. A tensor lacks the axis B
    where `query` lacks it.
    """
    tensors: dict[str, torch.Tensor] = {}
    options: dict[str, Any] = {}
    of_queries, of_keys = (arrays[name][0] for name in ("q_lengths", "kv_lengths"))
    # Where T = S, those of the queries say both, and kernels need to know that they are the same.
    same = of_queries is not None and of_keys is not None
    if same:
        is_one = of_queries is of_keys or not torch.compiler.is_compiling()
        same = sizes["T"] == sizes["S"] and is_one and are_known_equal(of_queries, of_keys)
    for name, (given, letters) in arrays.items():
        if given is None or name == "kv_lengths" and same:
            continue
        if name == "query_offset" and isinstance(given, int) and not isinstance(given, bool):
            options[name] = given
            continue
        tensor = integer(name, given, query, sizes)
        if name != "query_offset" or tensor.ndim > 0:
            if letters == "B":
                shapes.bind_batch(dict(sizes), name, tuple(tensor.shape), batched)
                tensor = tensor.reshape(-1)
            else:
                wanted = letters if batched else letters[1:]
                shapes.bind(dict(sizes), name, tuple(tensor.shape), wanted)
                tensor = tensor if batched else tensor[None]
        tensors[name] = tensor
    return narrow(tensors) if tensors else tensors, options


def integer(
    name: str, given: Any, query: torch.Tensor, sizes: dict[str, int]
) -> torch.Tensor:
    """Integers as a tensor on query's device, their values checked if they are on the host."""
    if torch.compiler.is_compiling() and not isinstance(given, torch.Tensor):
        given = torch.as_tensor(given)
    is_tensor = isinstance(given, torch.Tensor)
    found = str(given.dtype) if is_tensor else shapes.dtype_name(name, given)
    if not found.removeprefix("torch.").startswith(("int", "uint")):
        raise ValueError(f"{name} must hold integers, got {found}")
    if is_tensor:
        check_dense(name, given)
        if given.device.type != "cpu":
            check_place(name, given, query)
        if given.device.type != "cpu" or not _modes.runs_plainly([given]):
            return given.to(query.device)
    host = given.numpy() if is_tensor else np.asarray(given)
    shapes.integers(name, host)
    if name.endswith("lengths"):
        axis = "T" if name == "q_lengths" else "S"
        shapes.within(name, host, 0, sizes[axis], f"{axis}={sizes[axis]}")
    elif name == "query_offset":
        farthest = attention_api.FARTHEST_OFFSET
        shapes.within(name, host, -farthest, farthest, str(farthest))
    # A copy, since the backward pass reads it again. Its memory is not pinned, so that no one has
    # to wait before it is freed.
    return torch.from_numpy(host.astype(np.int32)).to(query.device, non_blocking=True)


def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Integers as int32. Equal ids stay equal and others stay apart; the rest is clamped."""
    limits = torch.iinfo(torch.int32)
    wide = {
        name: tensor.long() for name, tensor in tensors.items() if tensor.dtype in WIDE
    }
    narrow = tensors | {
        name: tensor.clamp(limits.min, limits.max) for name, tensor in wide.items()
    }
    ids = {name: tensor for name, tensor in tensors.items() if "segment_ids" in name}
    if any(name in wide for name in ids):
        # 64-bit ids, PyTorch's default, may not fit: each becomes its rank among all ids.
        ordered = torch.cat([tensor.long() for tensor in ids.values()], dim=1).sort(dim=1).values
        for name, tensor in ids.items():
            narrow[name] = torch.searchsorted(ordered, tensor.long().contiguous())
    return {name: tensor.int() for name, tensor in narrow.items()}


def are_exchanged(*tensors: torch.Tensor) -> bool:
    """Whether all tensors have the second axis within the third in memory, and one is not
    contiguous.

    A projection leaves its tensors in this order, [B, T, H, D] in memory, also as parts of a larger
    tensor. Calls on them compute in this order: kernels read parts in place where they can, other
    parts are copied faster, and the result has the same order. A tensor with one head or one row
    has either order, and follows the others.
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        return False
    exchanged = [
        tensor.transpose(1, 2).is_contiguous() or tensor.stride(1) < tensor.stride(2)
        for tensor in tensors
    ]
    deciding = [
        is_exchanged
        for is_exchanged, tensor in zip(exchanged, tensors, strict=True)
        if 1 not in tensor.shape[1:3]
    ]
    return all(deciding or exchanged)


def stacked(name: str, pieces: Any) -> torch.Tensor:
    """A sequence of pieces, or a tensor of them, as one tensor with a leading axis of pieces."""
    if isinstance(pieces, torch.Tensor):
        check(name, pieces)
        return pieces
    if not isinstance(pieces, Sequence):
        raise ValueError(f"{name} must be tensors or one tensor, got {type(pieces).__name__}")
    for n, piece in enumerate(pieces):
        check(f"{name}[{n}]", piece)
    if not pieces:
        raise ValueError(f"{name} must hold at least one piece, got none")
    if len({(tuple(piece.shape), piece.dtype, piece.device) for piece in pieces}) > 1:
        listing = ", ".join(
            f"{piece.dtype} {tuple(piece.shape)} on {piece.device}" for piece in pieces
        )
        raise ValueError(f"{name} must be alike in shape, dtype and device, got {listing}")
    return torch.stack(list(pieces))


def decay_of(
    decay: Any,
    query: torch.Tensor,
    sizes: dict[str, int],
    kinds: list[str],
    batched: bool,
    padded: bool = False,
) -> torch.Tensor:
    """`decay` in float32, with a batch axis unless it is [G]. Its axes must be one of `kinds`.
    Where keys are `padded`, NaN may be in the padding.
    """
    check("decay", decay, like=query)
    letters_of = {len(letters): letters for letters in reversed(kinds)}
    if decay.ndim not in letters_of:
        needed = " or ".join(f"[{', '.join(letters)}]" for letters in kinds)
        raise ValueError(f"decay must be {needed}, got shape {tuple(decay.shape)}")
    shapes.bind(dict(sizes), "decay", tuple(decay.shape), letters_of[decay.ndim])
    if decay.device.type == "cpu" and _modes.runs_plainly([decay]) and decay.numel():
        values = decay.detach()
        if padded and decay.ndim > 1:
            values = values.nan_to_num(nan=0.0)
        shapes.refuse_growing_decay(float(values.max()))
    return (decay[None] if decay.ndim > 1 and not batched else decay).float()


def state_of(
    name: str, state: Any, query: torch.Tensor, batched: bool
) -> dict[str, torch.Tensor]:
    """A pair (kv, k_sum) as float32 tensors with a batch axis, by the names of its parts."""
    if not isinstance(state, tuple) or len(state) != 2:
        raise ValueError(
            f"{name} must be a pair of tensors (kv [B, G, D, V], k_sum [B, G, D]), "
            f"got {type(state).__name__}"
        )
    found = {}
    for field, tensor in zip(LinearState._fields, state, strict=True):
        check(f"{name}.{field}", tensor, like=query)
        found[f"{name}.{field}"] = (tensor if batched else tensor[None]).float()
    return found
