"""float8_e4m3fn tensors: widened before the call, as `ato_jax/ops/float8.py` widens arrays.

    x = values * scale        values [B, H, T, D] of float8_e4m3fn, scale [B, H] float32

PyTorch widens the tensors, and the call on bfloat16 tensors runs, or on float32 ones for a float32
output. Kernels that read 8 bits (`ato_jax/ops/*/reading.py`) are not reached from here: the ops of
`_adapters.py` know no scales, and the trial of a direct launch draws normal numbers
(`_direct._drawn`), which PyTorch lacks in 8 bits. The guide to PyTorch has the way by DLPack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ato_jax import UnsupportedError, shapes
from ato_jax.ops.float8 import NO_DERIVATIVE
from ato_torch import _checks, _modes

FLOAT8 = torch.float8_e4m3fn
# (query_scale [B, H], key_scale [B, G], value_scale [B, G])
Scales = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NAMES = ("query", "key", "value")


def is_meant(
    query: torch.Tensor, scales: Scales | None, out_dtype: torch.dtype | str | None
) -> bool:
    """Whether a call is one on float8 tensors, right or wrong."""
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
    """`function` of the widened tensors and of the other arguments, its first result in
    `out_dtype`.

    Autocast is off inside: it would undo what `out_dtype` says of the digits.

    Args:
      function: One of ato_torch's functions.
      tensors: query, key and value.
      scales: Their scales.
      out_dtype: The output's dtype, bfloat16 if it is None.
      heads: The axis of heads, from the end.
      rank: How many axes a tensor has without those of the batch.
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
    wide = torch.float32 if shapes.float_dtype("out_dtype", name) == "float32" else torch.bfloat16
    _refuse_gradients([tensors, given, others, tuple(options.values())])
    widened = [
        _product(whose, tensor, scale, heads, rank, wide)
        for whose, tensor, scale in zip(NAMES, tensors, given, strict=True)
    ]
    kind = tensors[0].device.type
    on = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if on else contextlib.nullcontext():
        result = function(*widened, *others, **options)
    results = list(result) if isinstance(result, tuple) else [result]
    results[0] = results[0].to(getattr(torch, name))
    return tuple(results) if isinstance(result, tuple) else results[0]


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


def _product(
    whose: str, tensor: torch.Tensor, scale: Any, heads: int, rank: int, wide: torch.dtype
) -> torch.Tensor:
    """The tensor times its scale, rounded once to the dtype `wide`."""
    _checks.check_dense(whose, tensor)
    name = f"scales: {whose}_scale"
    if isinstance(scale, torch.Tensor) and scale.dtype != torch.float32:
        how = f"pass {whose}_scale.float()"  # `check` would allow 16 bits, too
        raise ValueError(f"{name} must be float32, got {scale.dtype}; {how}")
    _checks.check(name, scale, like=tensor)
    if tensor.ndim < rank:
        raise ValueError(f"{whose} must have at least {rank} axes, got shape {tuple(tensor.shape)}")
    batch = tensor.shape[: tensor.ndim - rank]
    wanted = (*batch, tensor.shape[heads])
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
    shape = [*batch, *[1] * rank]
    shape[heads] = tensor.shape[heads]
    # In place, PyTorch multiplies in float32 and stores `wide`: no float32 copy is made.
    return tensor.to(wide).mul_(scale.reshape(shape))
