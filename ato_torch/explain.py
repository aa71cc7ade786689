"""`explain`: how a call gets from PyTorch to the kernels, and what keeps them from being launched
directly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ato_torch import _calls, _direct, _executable, _ops, _programs

# What sees every operator that a thread calls.
Mode = TorchDispatchMode
DIRECT, THROUGH_JAX = "direct", "through JAX"


@dataclasses.dataclass(frozen=True)
class Road:
    """How one pass is launched.

    `road` is "direct" if PyTorch launches the kernels itself, and `why` then lists them, after a
    note of how many tensors are copied because the kernels cannot read them where they lie.
    Otherwise it is "through JAX", and `why` is the reason.
    """

    road: str
    why: str

    def __str__(self) -> str:
        return f"{self.road} ({self.why})"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How both passes of a call are launched; `backward` is None if nothing needs a gradient."""

    forward: Road
    backward: Road | None

    def __str__(self) -> str:
        return f"forward: {self.forward}\nbackward: {self.backward or 'no gradient is asked for'}"


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Says how a call is launched, in the forward and in the backward pass.

    A direct launch costs the host about a tenth of the time, and a CUDA graph can capture it. The
    function is called once. The backward pass is the one from the first output to every tensor that
    requires a gradient.

    Args:
      function: One of ato_torch's functions, or a function that calls one.
      *args: Its positional arguments.
      **kwargs: Its keyword arguments.

    Returns:
      An object with the attributes `forward` and `backward`, each with `road` ("direct" or "through
      JAX") and `why`; `backward` is None if no tensor requires a gradient.

    Raises:
      ValueError: `function` is not callable, or does not call ato_torch.

    Example:
      >>> import torch, ato_torch
      >>> q = k = v = torch.ones(1, 2, 4, 8)
      >>> print(ato_torch.explain(ato_torch.attention, q, k, v))
      forward: through JAX (tensors on cpu, not on a CUDA device)
      backward: no gradient is asked for
    """
    if not callable(function):
        raise ValueError(f"function must be one of ato_torch's, got {function!r}")
    with _Recorder() as recorder:
        function(*args, **kwargs)
    if not recorder.calls:
        raise ValueError(
            f"function must be one of ato_torch's: {function!r} does not call ato_torch"
        )
    text, tensors = recorder.calls[0]
    call = _calls.parse(text)
    program = _ops.program_of_text(text, tensors)
    forward = _road(program.forward if call.training else program.answer, tensors)
    if not call.training:
        return Explanation(forward, None)
    shapes = [(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in tensors]
    outputs = [
        torch.empty(shape, dtype=getattr(torch, dtype), device=tensors[0].device)
        for shape, dtype in _programs.output_shapes(call, shapes)
    ]
    needed = tuple(tensor.requires_grad for tensor in tensors)
    given = tuple(n == 0 for n in range(len(outputs)))
    backward = program.backward(needed, given)
    return Explanation(forward, _road(backward, [*tensors, *outputs, outputs[0]]))


class _Recorder(Mode):
    """Records the calls of ato_torch's op: while a mode is on, every call goes through the op."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.ato.forward.default:
            self.calls.append((args[0], list(args[1])))
        return func(*args, **(kwargs or {}))


def _road(function: _programs.Function, tensors: Sequence[torch.Tensor]) -> Road:
    if not tensors[0].is_cuda:
        return Road(THROUGH_JAX, f"tensors on {tensors[0].device.type}, not on a CUDA device")
    plan = _direct.plan_of(function, tensors)
    if isinstance(plan, _direct.ClosedError):
        return Road(THROUGH_JAX, str(plan))
    names = [
        step.name if isinstance(step, _executable.Launch) else type(step).__name__.lower()
        for step in plan.executable.steps
    ]
    copied = _direct.copies(function, plan, tensors)
    ahead = [f"a copy of {copied} tensor{'s' * (copied > 1)}"] if copied else []
    return Road(DIRECT, ", ".join([*ahead, *names]))
