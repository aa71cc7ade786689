"""Runs unchanged PyTorch models with `ato_torch.attention` in place of PyTorch's own.

    with ato_torch.sdpa_override() as calls:
        out = model(x)
    print(calls)

Within the block `torch.nn.functional.scaled_dot_product_attention` is replaced by a function that
calls the kernels, or PyTorch's own function where `ato_torch.attention` refuses; `calls` counts
both, with the reasons. The replacement holds for all threads, because the backward pass runs in
threads of its own and may compute a forward pass again. Code that imported the function by `from
... import` before keeps PyTorch's. `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` have a
fast path that does not use that name; it is switched off, and the rows of padding that it sets to
zero then hold arbitrary numbers. If attention weights are asked for, these modules compute them
without that name. torch.compile checks that the name still refers to the same function.
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
# Tensors that torch.compile traces with, where it does not look into a call.
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
    """Counts of calls: `taken` by the kind of call, and `left` to PyTorch by the reason.

    A call that torch.compile traces counts once, when it is traced.
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
        """Counts a call; returns whether it is the first of its kind."""
        with self._lock:
            which[kind] += 1
            return which[kind] == 1


_active: list[Calls] = []
_lock = threading.Lock()
# PyTorch's two functions, and whether its fast path is on, as they were before the block.
_outside: Any = None


@contextlib.contextmanager
def sdpa_override() -> Iterator[Calls]:
    """Makes PyTorch's `scaled_dot_product_attention` call `ato_torch.attention`, within `with`.

    Everything that calls it by its name in `torch.nn.functional` is served, in all threads:
    `nn.MultiheadAttention` and what is built on it, models of other libraries, code that
    torch.compile traces. A call that `ato_torch.attention` refuses is left to PyTorch, and a
    warning says so once for each reason. With checkpointing, which computes a forward pass again,
    the backward pass belongs inside as well. `torch.nn.attention.sdpa_kernel` has no effect on
    calls that are taken, and these have no second derivatives.

    Yields:
      Counters: `taken`, by the kind of call, and `left`, by the reason. Printing shows both.

    Raises:
      RuntimeError: A kernel's launch fails. Such a call is not left to PyTorch.

    Example:
      >>> import torch, ato_torch
      >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
      >>> x = torch.ones(1, 4, 8)
      >>> with ato_torch.sdpa_override() as calls:
      ...     out, _ = model(x, x, x, need_weights=False)
      >>> print(calls)
      taken, 1 times: torch.float32 query [1, 2, 4, 4], key [1, 2, 4, 4]
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
    """Replaces PyTorch's function of this name."""
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
    if isinstance(arguments[3], CausalBias):  # its code refers to the function by name
        function = F.scaled_dot_product_attention
        return CausalBias.__torch_function__(function, (CausalBias,), arguments)
    own, *_ = _outside
    return own(*arguments[:6], scale=scale, enable_gqa=enable_gqa)


def multi_head_attention_forward(*arguments: Any, **options: Any) -> Any:
    """PyTorch's own function; calls that ask for weights are counted as left to PyTorch."""
    # need_weights is the 16th positional argument.
    if options.get("need_weights", arguments[15] if len(arguments) > 15 else True):
        _left(WEIGHTS)
    _, own, _ = _outside
    return own(*arguments, **options)


def _reason(*tensors: Any) -> str | None:
    """Why a call is left to PyTorch without trying it, or None."""
    if torch.compiler.is_compiling():  # its tensors stand for plain tensors
        return None
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and type(tensor) not in PLAIN:
            return f"{type(tensor).__name__} is a kind of tensor with a meaning of its own"
    return None


def _kind(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> str:
    masked = "" if mask is None else f", {mask.dtype} mask {list(mask.shape)}"
    return f"{query.dtype} query {list(query.shape)}, key {list(key.shape)}{masked}"


# Compiled code counts and warns once, while it is compiled.
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
