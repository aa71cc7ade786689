"""Checks at import that PyTorch has the private names that calls on every device need.

A release may remove one, and an error at import is clearer than a failing call.
docs/private_names.md lists all private names.
"""

from __future__ import annotations

import pkgutil

import torch

TESTED = ("2.11", "2.13")
NEEDED = (
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._functorch.TransformType.Jvp",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._is_any_autocast_enabled",
    "torch._C._autograd._profiler_enabled",
    "torch._C._disabled_torch_function_impl",
    "torch._remove_batch_dim",
    "torch._add_batch_dim",
    "torch._subclasses.FakeTensor",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch.Tensor._make_wrapper_subclass",
    "torch.autograd.forward_ad._current_level",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
)


def check() -> None:
    """Raises an ImportError that lists the names of `NEEDED` that PyTorch does not have."""
    missing = [name for name in NEEDED if not _is_there(name)]
    if missing:
        first, last = TESTED
        raise ImportError(
            f"ato_torch needs {', '.join(missing)}, which PyTorch {torch.__version__} does not "
            f"have; it is tested with PyTorch {first} to {last}"
        )


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
