"""Which of PyTorch's compilers, transforms and modes are at work around a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad


def runs_plainly(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no compiler, transform or mode is active, and all tensors are of PyTorch's own type.

    A fake tensor, for one, is not.
    """
    if torch.compiler.is_compiling() or is_transformed() or torch._C._len_torch_dispatch_stack():
        return False
    for tensor in tensors:
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return False
    return True


# Evaluated while tracing: torch.compile would replace the empty stack by a value other than None.
@torch.compiler.assume_constant_result
def is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_forward_mode() -> bool:
    """Whether PyTorch's forward mode is on."""
    return forward_ad._current_level >= 0


def refuse_forward_mode(tensors: Sequence[torch.Tensor]) -> None:
    """Refuses forward mode: an op without a rule for it would silently drop the tangents."""
    if not is_forward_mode():
        return
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    if any(one.key() == torch._C._functorch.TransformType.Jvp for one in transforms) or any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise NotImplementedError(
            "ato_torch has no forward-mode derivatives (jvp, jacfwd, hessian); use reverse mode"
        )
