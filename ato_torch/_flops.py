"""What `torch.utils.flop_counter.FlopCounterMode` counts of this library's ops.

    attention           2 B H T S (D + V), backward 2 B H T S (3 D + 2 V)
    linear_attention    2 B (H T + G S) F V, where F is the number of features; backward twice that
    gated_delta_rule    6 B T H D V; backward twice that

A multiplication and an addition are two operations. Attention is counted as PyTorch counts its own:
all pairs of a query and a key, also those that causality, a window or segments hide, and the scores
once more in the backward pass. The linear ops are counted step by step, whatever the kernels'
chunks add to that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ato_jax.ops.common import axes
from ato_torch import _calls, _programs

Size = tuple[int, ...]


def operations(op: str, options: dict[str, Any], sizes: dict[str, Size], backward: bool) -> int:
    """The operations of one call; `sizes` are the shapes of its arrays by name."""
    if op == "attention":
        B, H, T, D = _heads_first(sizes["q"], options["layout"])
        *_, S, V = _heads_first(sizes["v"], options["layout"])
        return 2 * B * H * T * S * (3 * D + 2 * V if backward else D + V)
    forward = 0  # `combine` has no products
    if op == "linear_attention":
        B, H, T, features = _heads_first(sizes["q"], options["layout"])
        _, G, S, V = _heads_first(sizes["v"], options["layout"])
        if callable(options["feature_map"]) and not options["feature_map"].elementwise:
            features, *_ = sizes[_calls.PARAMETERS[0]]
        forward = 2 * B * (H * T + G * S) * features * V
    elif op == "linear_attention_step":
        (_, H, _), (_, G, _) = sizes["q"], sizes["v"]
        forward = 2 * (H + G) * math.prod(sizes["state.kv"]) // G
    elif op == "gated_delta_rule":
        forward = 6 * math.prod(sizes["v"]) * sizes["k"][-1]
    elif op == "gated_delta_rule_step":
        forward = 6 * math.prod(sizes["state"])
    return 2 * forward if backward else forward


def _heads_first(size: Size, layout: str) -> Size:
    """Batch, heads, time, columns."""
    of = dict(zip(axes(layout, "BTHD"), size, strict=True))
    return tuple(of[letter] for letter in "BHTD")


def _of_call(
    call: _calls.Call, tensors: Sequence[Size], backward: bool, levels: _calls.Levels
) -> int:
    """The operations of a call under `levels` of vmap, which repeat it."""
    if levels:
        *inner, level = levels
        size, bare = _programs.unbatched(level, [(tuple(each), "") for each in tensors])
        return size * _of_call(call, [each for each, _ in bare], backward, tuple(inner))
    sizes = dict(zip(call.arrays, tensors, strict=True))
    return operations(call.op, dict(call.options), sizes, backward)


def _forward(text: str, tensors: Sequence[Size], **_: Any) -> int:
    call = _calls.parse(text)
    return _of_call(call, tensors, False, call.batched)


def _backward(text: str, tensors: Sequence[Size], *_: Any, **__: Any) -> int:
    call = _calls.parse(text)
    times, bare = 1, [(tuple(each), "") for each in tensors]
    for level in reversed(call.batched_backward):
        size, bare = _programs.unbatched(level, bare)
        times *= size
    inputs = [each for each, _ in bare[: len(call.arrays)]]
    return times * _of_call(call, inputs, True, call.batched)


@functools.cache  # PyTorch refuses a second formula, which reloading the package would give
def register() -> None:
    """Makes PyTorch count both ops, in every mode of this process."""
    register_flop_formula(torch.ops.ato.forward)(_forward)
    register_flop_formula(torch.ops.ato.backward)(_backward)
