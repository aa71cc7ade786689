"""Names of passes for PyTorch's profilers: "ato::attention", "ato::attention_backward", and so on.

Kernels that are launched without PyTorch's operators have no name there otherwise. A name takes
microseconds, so there is one only while a profiler records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ato_torch import _direct, _programs

Tensors = Sequence[torch.Tensor]

# Whether a profiler records, in this thread.
is_on = torch._C._autograd._profiler_enabled


def execute(
    program: _programs.Program,
    function: _programs.Function,
    tensors: Tensors,
    backward: bool = False,
) -> Tensors:
    """The function's results, a pass of the program."""
    if not is_on():
        return _direct.execute(function, tensors)
    return named(program, functools.partial(_direct.execute, function, tensors), backward)


def named(
    program: _programs.Program, execute: Callable[[], Tensors], backward: bool = False
) -> Tensors:
    """The results of `execute`, under the name of the op in a profiler's list."""
    with torch.profiler.record_function(f"ato::{program.call.op}{'_backward' * backward}"):
        return execute()
