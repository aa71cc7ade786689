"""Copies of tensors that a call's kernels cannot read where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensors = Sequence[torch.Tensor]


def with_copies(
    call: Callable[[Tensors], Tensors],
    like: Tensors,
    copied: Sequence[bool],
    exchanged: Sequence[bool],
) -> Callable[[Tensors], Tensors]:
    """The call with copies of some of its tensors, which have the strides of `like`.

    The backward pass keeps the copies in place of the originals, and need not copy again.
    """
    if not any(copied):
        return call
    copies = [
        _copy_of(tensor, is_exchanged) if is_copied else None
        for tensor, is_copied, is_exchanged in zip(like, copied, exchanged, strict=True)
    ]

    def copying(tensors: Tensors) -> Tensors:
        return call(
            [
                tensor if copy is None else copy(tensor)
                for tensor, copy in zip(tensors, copies, strict=True)
            ]
        )

    return copying


def _copy_of(like: torch.Tensor, exchanged: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that makes a tensor contiguous, or contiguous with its axes exchanged."""
    kept = torch.empty_like(like, device="meta")
    if (kept.transpose(1, 2) if exchanged else kept).is_contiguous():
        return torch.clone
    if exchanged:
        return lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.Tensor.contiguous


def repeats(tensor: torch.Tensor) -> bool:
    """Whether some elements surely share memory: a copy is then larger than the original."""
    is_expanded = any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return is_expanded or tensor.numel() > span_of(tensor)


def span_of(tensor: torch.Tensor) -> int:
    """The number of elements that the memory from the tensor's first to its last element can hold.

    If it is smaller than the tensor's own number of elements, some of them share memory, as in
    expanded tensors and in windows that overlap. The converse does not hold: gaps count, too.
    """
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)
