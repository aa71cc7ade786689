"""float8_e4m3fn tensors: handed to `ato_jax` as they are where its kernels read 8 bits, and widened
before the call everywhere else.

    x = values * scale        values [B, H, T, D] of float8_e4m3fn, scale [B, H] float32

`ato_jax/ops/float8.py` decides what is read, for the device of the tensors and the options of the
call. Such a call reaches the op with the scales beside the tensors, and no wide copy is made. For
all others PyTorch widens the tensors, and the call on bfloat16 tensors runs, or on float32 ones for
a float32 output.

The decision needs the arguments as the op takes them. So the function is first called with `Read`
in the place of the scales, and `_ops.refuse_unread` raises a `NotReadError` if no kernel reads the
8 bits. That is remembered by the shapes and options of the call. A compiler sees one op in both
cases, which widens the tensors when it runs, if need be.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ato_jax import UnsupportedError, device, shapes
from ato_jax.ops import float8
from ato_jax.ops.attention import reading
from ato_jax.ops.float8 import NO_DERIVATIVE
from ato_torch import _bridge, _checks, _modes
from ato_torch._calls import KEPT, SCALES
from ato_torch._errors import NotReadError

FLOAT8 = torch.float8_e4m3fn
# (query_scale [B, H], key_scale [B, G], value_scale [B, G])
Scales = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NAMES = ("query", "key", "value")


class Read(NamedTuple):
    """In the place of a caller's scales: the call was checked, and the op takes its 8 bits."""

    scales: Scales
    out_dtype: str

    def bound(
        self, tensors: tuple[torch.Tensor, ...], batch: tuple[int, ...], heads: int
    ) -> dict[str, torch.Tensor]:
        """The scales by name, [B, H], [B, G] and [B, G], of tensors whose leading axes `batch` were
        made one, and whose axis of heads is `heads`."""
        found = {}
        for name, scale, tensor in zip(SCALES, self.scales, tensors, strict=True):
            shape = tensor.shape[0], tensor.shape[heads]
            if tuple(scale.shape) != shape:
                scale = scale.expand(*batch, shape[1]).reshape(shape)
            found[name] = scale
        return found


def as_read(scales: Any) -> Read | None:
    """What stands in the place of a caller's scales, if anything does."""
    return scales if isinstance(scales, Read) else None


def is_meant(
    query: torch.Tensor, scales: Scales | None, out_dtype: torch.dtype | str | None
) -> bool:
    """Whether a call is one on float8 tensors, right or wrong, that was not checked yet."""
    if as_read(scales) is not None:
        return False
    given = scales is not None or out_dtype is not None
    return given or getattr(query, "dtype", None) is FLOAT8


def call(
    function: Callable[..., Any],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scales: Scales | None,
    out_dtype: torch.dtype | str | None,
    heads: int,
    rank: int,
    *others: Any,
    **options: Any,
) -> Any:
    """`function` of float8 tensors and of the other arguments, its first result in `out_dtype`.

    Autocast is off inside: it would undo what `out_dtype` says of the digits.

    Args:
      function: One of ato_torch's functions.
      tensors: query, key and value.
      scales: Their scales.
      out_dtype: The output's dtype, bfloat16 if it is None.
      heads: The axis of heads, from the end.
      rank: How many axes a tensor has without those of the batch. Only functions of whole
        sequences, of rank 3, have kernels that read 8 bits.
      *others: Further arguments of the function.
      **options: Its options.
    """
    found = [getattr(tensor, "dtype", type(tensor)) for tensor in tensors]
    if FLOAT8 not in found:
        name = "out_dtype" if scales is None else "scales"
        raise ValueError(f"{name} goes with query, key and value of {FLOAT8}, got {found[0]}")
    if any(dtype is not FLOAT8 for dtype in found):
        told = ", ".join(map(str, found))
        raise ValueError(f"query, key and value must all be {FLOAT8} or none of them, got {told}")
    given: Any = scales
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise ValueError(
            "scales must be (query_scale [B, H], key_scale [B, G], value_scale [B, G]) with "
            f"tensors of {FLOAT8}, got {_told(given)}"
        )
    name = str(torch.bfloat16 if out_dtype is None else out_dtype).removeprefix("torch.")
    wide = wide_dtype(shapes.float_dtype("out_dtype", name))
    _refuse_gradients([tensors, given, others, tuple(options.values())])
    for whose, tensor, scale in zip(NAMES, tensors, given, strict=True):
        _check(whose, tensor, scale, heads, rank)
    kind = tensors[0].device.type
    on = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if on else contextlib.nullcontext():
        if rank == 3 and wide is torch.bfloat16 and _may_be_read(tensors, heads):
            read = Read((given[0], given[1], given[2]), name)
            try:
                return _read(function, tensors, read, others, options)
            except NotReadError:
                pass
        widened = [
            product(tensor, scale, heads, rank, wide)
            for tensor, scale in zip(tensors, given, strict=True)
        ]
        result = function(*widened, *others, **options)
    results = list(result) if isinstance(result, tuple) else [result]
    results[0] = results[0].to(getattr(torch, name))
    return tuple(results) if isinstance(result, tuple) else results[0]


def wide_dtype(out_dtype: str) -> torch.dtype:
    """What tensors are widened to for an output in that dtype."""
    found: torch.dtype = getattr(torch, float8.wide_dtype(out_dtype))
    return found


def _may_be_read(tensors: tuple[torch.Tensor, ...], heads: int) -> bool:
    """Whether there may be kernels that read the 8 bits of a call, by what is known at once.

    PyTorch's transforms and forward mode have no rules for 8 bits. Keys and values with different
    numbers of heads are repeated first, for which PyTorch has no operator in 8 bits.
    """
    if _modes.is_transformed() or _modes.is_forward_mode():
        return False
    query, key, value = tensors
    return key.shape[heads] == value.shape[heads] and has_readers(query.device)


@torch.compiler.assume_constant_result
def has_readers(place: torch.device) -> bool:
    """Whether a device has kernels that read 8 bits; interpreted ones any device may have."""
    if device.interpreting():
        return True
    return place.type == "cuda" and _bridge.has_gpu() and _card_has_readers(place)


@functools.cache
def _card_has_readers(place: torch.device) -> bool:
    here = device.describe(_bridge.jax_device(place))
    return reading.OP.backend(reading.BACKEND).unsupported_device(here, False) is None


# The calls whose 8 bits no kernel reads, by what `_facts` tells of them.
_widened: set[Any] = set()


def _read(
    function: Callable[..., Any],
    tensors: tuple[torch.Tensor, ...],
    read: Read,
    others: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """The result of a call whose 8 bits are read; otherwise a `NotReadError`."""
    if torch.compiler.is_compiling():
        return function(*tensors, *others, scales=read, **options)
    strides = [tensor.stride() for tensor in tensors]
    facts = (function, device.interpreting(), *strides, _facts((tensors, others, options)))
    try:
        is_known = facts in _widened
    except TypeError:  # a size that is PyTorch's symbol, or an option without a hash
        facts, is_known = (), False
    if is_known:
        raise NotReadError
    try:
        return function(*tensors, *others, scales=read, **options)
    except NotReadError:
        if facts:
            if len(_widened) >= KEPT:
                _widened.clear()
            _widened.add(facts)
        raise


def _facts(value: Any) -> Any:
    """What an argument's part in the decision depends on: of an array shape, dtype and device."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, tuple(value.shape), value.dtype, value.device
    if isinstance(value, np.ndarray):
        return np.ndarray, value.shape, str(value.dtype)
    if isinstance(value, dict):
        return tuple([(name, _facts(each)) for name, each in value.items()])
    if isinstance(value, tuple | list):
        return (type(value), *map(_facts, value))
    return type(value), value  # 1 == True, yet they are different options


def check_devices(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuses tensors that are not on one device that JAX can use."""
    for name, tensor in (("key", key), ("value", value)):
        _checks.check_place(name, tensor, query)
    _checks.check_device("query", query)


def _told(scales: Any) -> str:
    """Describes what was given in place of three scales, without a tensor's values."""
    if isinstance(scales, tuple | list):
        return f"{len(scales)} of them"
    return "none" if scales is None else type(scales).__name__


def _refuse_gradients(values: Any) -> None:
    """An UnsupportedError for a tensor, also in a tuple or list, that requires a gradient."""
    if not torch.is_grad_enabled():
        return
    for value in values:
        if isinstance(value, tuple | list):
            _refuse_gradients(value)
        elif isinstance(value, torch.Tensor) and value.requires_grad:
            raise UnsupportedError(
                f"{NO_DERIVATIVE}: call inside torch.no_grad(), or detach what requires a "
                "gradient; for training, quantise in the forward pass of a "
                "torch.autograd.Function alone"
            )


def _check(whose: str, tensor: torch.Tensor, scale: Any, heads: int, rank: int) -> None:
    """Refuses a tensor that is not dense, and a scale that does not belong to it."""
    _checks.check_dense(whose, tensor)
    name = f"scales: {whose}_scale"
    if isinstance(scale, torch.Tensor) and scale.dtype != torch.float32:
        how = f"pass {whose}_scale.float()"  # `check` would allow 16 bits, too
        raise ValueError(f"{name} must be float32, got {scale.dtype}; {how}")
    _checks.check(name, scale, like=tensor)
    if tensor.ndim < rank:
        raise ValueError(f"{whose} must have at least {rank} axes, got shape {tuple(tensor.shape)}")
    wanted = (*tensor.shape[: tensor.ndim - rank], tensor.shape[heads])
    if tuple(scale.shape) != wanted:
        raise ValueError(
            f"{name} must be one number for each head of each batch entry, of shape {wanted}, "
            f"got shape {tuple(scale.shape)}"
        )
    # Reading values would wait for a GPU.
    if scale.device.type == "cpu" and _modes.runs_plainly([scale]) and scale.numel():
        least, most = float(scale.min()), float(scale.max())
        if not shapes.LEAST <= least <= most <= shapes.MOST:
            raise ValueError(
                f"{name} must be positive and finite, at least {shapes.LEAST:.2g}, "
                f"got values from {least} to {most}"
            )


def product(
    tensor: torch.Tensor, scale: torch.Tensor, heads: int, rank: int, wide: torch.dtype
) -> torch.Tensor:
    """The tensor times its scale, rounded once to the dtype `wide`."""
    shape = [*tensor.shape[: tensor.ndim - rank], *[1] * rank]
    shape[heads] = tensor.shape[heads]
    # In place, PyTorch multiplies in float32 and stores `wide`: no float32 copy is made.
    return tensor.to(wide).mul_(scale.reshape(shape))
