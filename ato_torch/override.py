"""PyTorch models as they are, with `ato_torch.attention` in place of PyTorch's own.

    with ato_torch.sdpa_override() as calls:
        out = model(x)
    print(calls)

Inside, `torch.nn.functional.scaled_dot_product_attention` is a function that calls the kernels, or
PyTorch's own where `ato_torch.attention` refuses, and `calls` tells which and why. It is the same
function by name, for all threads, since backward runs in threads of its own and may compute a
forward again; what took it by `from ... import` before keeps PyTorch's. `nn.MultiheadAttention` and
`nn.TransformerEncoderLayer` have a path past that name, which is switched off: rows of padding,
which it puts to zero, then hold numbers without a meaning. Where weights are asked for, they
compute them without that name. torch.compile looks whether the name is what it was.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from ato_torch.functional import attention

F = torch.nn.functional
# Stand for plain ones where torch.compile traces a call that it did not look into.
TRACING = (FakeTensor, FunctionalTensor)
PLAIN = (torch.Tensor, torch.nn.Parameter, *TRACING)
TRACED = "inside of what was compiled"
WEIGHTS = (
    "nn.MultiheadAttention was asked for the weights of its attention, which no fast kernel has: "
    "call it with need_weights=False"
)
NOTHING = (
    "sdpa_override has seen no attention: the model calls other functions, is a ScriptModule, or "
    "took scaled_dot_product_attention by `from torch.nn.functional import ...` before"
)


class Calls:
    """How many calls went where: `taken`, by what they were, and `left`, by the reason.

    What torch.compile traces counts once, when it does.
    """

    def __init__(self) -> None:
        self.taken: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        lines = [f"taken, {count} times: {kind}" for kind, count in self.taken.items()]
        lines += [f"left to PyTorch, {count} times: {why}" for why, count in self.left.items()]
        return "\n".join(lines) or "no attention was called"

    def _count(self, which: collections.Counter[str], kind: str) -> bool:
        """Whether it is the first of its kind."""
        with self._lock:
            which[kind] += 1
            return which[kind] == 1


_active: list[Calls] = []
_lock = threading.Lock()
# Of PyTorch, as they were outside: both functions, and whether the path past them is on.
_outside: Any = None


@contextlib.contextmanager
def sdpa_override() -> Iterator[Calls]:
    """Inside, PyTorch's `scaled_dot_product_attention` is `ato_torch.attention` where that can.

    Everything that calls it by its name in `torch.nn.functional` is served, in all threads:
    `nn.MultiheadAttention` and what is built of it, models of other libraries, what is traced by
    torch.compile. Forward and backward both belong inside where a checkpoint computes a forward
    again. A choice by `torch.nn.attention.sdpa_kernel` has no effect on what is taken, which has no
    second derivatives. What cannot be taken is left to PyTorch, and said in a warning once for each
    reason.

    Returns, as what `with` binds: `Calls`, with the counts of `taken` and `left`.
    """
    calls = Calls()
    with _lock:
        if not _active:
            _replace()
        _active.append(calls)
    try:
        yield calls
    finally:
        with _lock:
            _active.remove(calls)
            if not _active:
                _restore()
    if not calls.taken and not calls.left:
        warnings.warn(NOTHING, RuntimeWarning, stacklevel=3)


def _replace() -> None:
    global _outside
    fast_path = torch.backends.mha.get_fastpath_enabled()
    _outside = (F.scaled_dot_product_attention, F.multi_head_attention_forward, fast_path)
    F.scaled_dot_product_attention = scaled_dot_product_attention
    F.multi_head_attention_forward = multi_head_attention_forward
    torch.backends.mha.set_fastpath_enabled(False)


def _restore() -> None:
    F.scaled_dot_product_attention, F.multi_head_attention_forward, fast_path = _outside
    torch.backends.mha.set_fastpath_enabled(fast_path)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """In place of PyTorch's."""
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    query_offset = 0
    if isinstance(attn_mask, CausalBias) and not is_causal:
        if attn_mask.variant == CausalVariant.LOWER_RIGHT:
            query_offset = attn_mask.seq_len_kv - attn_mask.seq_len_q
        attn_mask, is_causal = None, True
    reason = _reason(query, key, value, attn_mask)
    if reason is None:
        try:
            out = attention(
                *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
                query_offset=query_offset,
            )
        except (ValueError, NotImplementedError) as error:
            reason = str(error)
        except RuntimeError as error:
            if not (query.is_cuda and torch.cuda.is_current_stream_capturing()):
                raise
            reason = str(error)
        else:
            traced = torch.compiler.is_compiling() or isinstance(query, TRACING)
            _took(TRACED if traced else _kind(query, key, attn_mask))
            return out
    _left(reason)
    if isinstance(arguments[3], CausalBias):  # which knows PyTorch's function by its name
        function = F.scaled_dot_product_attention
        return CausalBias.__torch_function__(function, (CausalBias,), arguments)
    own, *_ = _outside
    return own(*arguments[:6], scale=scale, enable_gqa=enable_gqa)


def multi_head_attention_forward(*arguments: Any, **options: Any) -> Any:
    """PyTorch's own, watched: with weights it calls no other function for its attention."""
    # Its 16th argument.
    if options.get("need_weights", arguments[15] if len(arguments) > 15 else True):
        _left(WEIGHTS)
    _, own, _ = _outside
    return own(*arguments, **options)


def _reason(*tensors: Any) -> str | None:
    """Why not even to try."""
    if torch.compiler.is_compiling():  # its tensors stand for plain ones
        return None
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and type(tensor) not in PLAIN:
            return f"{type(tensor).__name__} is a kind of tensor with a meaning of its own"
    return None


def _kind(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> str:
    masked = "" if mask is None else f", {mask.dtype} mask {list(mask.shape)}"
    return f"{query.dtype} query {list(query.shape)}, key {list(key.shape)}{masked}"


# What is compiled says it once, while it is.
@torch.compiler.assume_constant_result
def _took(kind: str) -> None:
    for calls in list(_active):
        calls._count(calls.taken, kind)


@torch.compiler.assume_constant_result
def _left(reason: str) -> None:
    first = [calls._count(calls.left, reason) for calls in list(_active)]
    if any(first):
        warnings.warn(
            f"sdpa_override left a call to PyTorch: {reason}", RuntimeWarning, stacklevel=4
        )
