"""A plan: an executable's steps on PyTorch's memory, launched in PyTorch's current stream.

    plan = Plan(executable, tensors, results, Kernels(executable))
    outputs = plan(tensors)

All addresses of a call are one list, and a step's argument is an index into it and an offset:

    0                       memory that steps write and nothing reads
    1, ...                  the executable's constants
    then                    the tensors, the results, the scratch memory
"""

from __future__ import annotations

import collections
import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ato_torch import _bridge, _driver, _executable
from ato_torch._errors import ClosedError
from ato_torch._kernels import Kernels, LaunchSequence

# Bytes: XLA aligns its own allocations so, and its kernels rely on it.
SCRATCH_ALIGNMENT = 256
# Allocations up to this size in bytes that nothing reads share one piece of memory.
UNREAD_BYTES = 1 << 20


def allocator() -> Callable[[Any, Any, torch.dtype], torch.Tensor]:
    """A function (size, stride, dtype) -> tensor on the current device; sizes are tuples."""

    def public(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    try:  # the private function takes half the host time
        return torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    except AttributeError:
        return public


class Place(NamedTuple):
    """Where an allocation begins: an index into a call's list of addresses, and bytes beyond it."""

    address: int
    offset: int


class Plan:
    """An executable on one GPU, ready to run on tensors with the strides of its tensor maps.

    These are contiguous tensors, unless `with_maps` was given others.

    Args:
      executable: the program.
      like: tensors with the shapes, dtypes and device of the program's parameters.
      results: tensors with the shapes, strides and dtypes of its results.
      kernels: the program's kernels on that device.

    Raises:
      ClosedError: the program's allocations do not fit these tensors.
    """

    def __init__(
        self,
        executable: _executable.Executable,
        like: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        kernels: Kernels,
    ) -> None:
        self.executable, self.index = executable, like[0].device.index
        # The plan for contiguous tensors, if this one is for others.
        self.contiguous: Plan | None = None
        # Which tensors have their second and third axis exchanged; empty where none has.
        self.exchanged: Sequence[bool] = ()
        self.facts = [(tuple(one.shape), one.stride(), one.dtype) for one in results]
        bases, self.scratch_bytes = _bases(executable, like, results)
        self.places = [
            Place(base.address, base.offset + each.offset)
            for step in executable.steps
            for each in step.arguments
            for base in [bases[each.allocation]]
        ]
        self.kernels = kernels
        # Holds the tensor itself, since two threads that start together each make one.
        self.unread = unread_memory(like[0].device)
        self.fixed = [self.unread.data_ptr(), *kernels.constants]
        # One list a stream: a graph launched in two streams would make one wait for the other.
        self.idle: dict[int, list[LaunchSequence]] = collections.defaultdict(list)

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph of the caller may hold its launches."""
        return self.kernels.loaded.is_captured

    def with_exchanged(self, which: Sequence[bool], tensors: Sequence[bool] = ()) -> Plan:
        """This plan with the second and third axis of some results exchanged, memory unchanged.

        `which` says of each result whether its axes are exchanged; it may be longer than results.
        `tensors` says it of the tensors that the plan is called with.
        """
        plan = copy.copy(self)
        plan.exchanged = tensors
        if self.contiguous is not None:
            plan.contiguous = self.contiguous.with_exchanged(which, tensors)
        plan.facts = [
            (_exchanged(size), _exchanged(stride), dtype) if is_it else (size, stride, dtype)
            for (size, stride, dtype), is_it in zip(self.facts, which, strict=False)
        ]
        return plan

    def with_maps(self, executable: _executable.Executable) -> Plan:
        """This plan with other tensor maps in its executable."""
        plan = copy.copy(self)
        plan.executable, plan.contiguous = executable, self
        plan.kernels = self.kernels.with_maps(self.executable, executable)
        plan.idle = collections.defaultdict(list)
        return plan

    def __call__(
        self, tensors: Sequence[torch.Tensor], as_graph: bool = True
    ) -> list[torch.Tensor]:
        if torch._C._cuda_getDevice() != self.index:
            with torch.cuda.device(self.index):
                return self(tensors, as_graph)
        if any(
            [
                (pointer := tensor.data_ptr()) & MISALIGNED or not pointer or tensor.is_neg()
                for tensor in tensors
            ]
        ):
            # A copy with the strides of a part would take the memory of the whole.
            which = self.exchanged or [False] * len(tensors)
            kept = _bridge.dense(_bridge.exchanged(tensors, which))
            return (self.contiguous or self)(_bridge.exchanged(kept, which), as_graph)
        results = [empty_strided(*fact) for fact in self.facts]
        addresses = self.fixed.copy()
        addresses += [tensor.data_ptr() for tensor in tensors]
        addresses += [result.data_ptr() for result in results]
        if self.scratch_bytes:
            # Freed at the return; later users of that memory come later in the same stream.
            scratch = empty_strided((self.scratch_bytes,), (1,), torch.uint8)
            addresses.append(scratch.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        idle = self.idle[stream]
        try:
            calls = idle.pop()
        except IndexError:
            calls = LaunchSequence(self.executable, self.kernels, stream)
        calls.fill(*[addresses[number] + offset for number, offset in self.places])
        steps = calls.of_steps
        if is_capturing():
            # The capture records single launches; no graph can be made during it.
            self.kernels.loaded.is_captured = True
        elif calls.is_several and as_graph:
            steps = calls.of_graph or calls.make_graph()
        for function, arguments in steps:
            error = function(*arguments)
            if error == _driver.INVALID_CONTEXT:  # this thread has not used CUDA yet
                _driver.check(_driver.library().cuCtxSetCurrent(self.kernels.context))
                error = function(*arguments)
            if error:
                _driver.check(error)
        idle.append(calls)
        return results


MISALIGNED = _bridge.ALIGNMENT - 1
empty_strided = allocator()
is_capturing = torch.cuda.is_current_stream_capturing


@functools.cache
def unread_memory(place: torch.device) -> torch.Tensor:
    """Memory for steps to write what nothing reads."""
    return torch.empty(UNREAD_BYTES, dtype=torch.uint8, device=place)


def _exchanged(numbers: tuple[int, ...]) -> tuple[int, ...]:
    first, second, third, *rest = numbers
    return (first, third, second, *rest)


def _bases(
    executable: _executable.Executable,
    like: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> tuple[dict[int, Place], int]:
    """The places of the allocations that steps use, and the scratch memory they need in bytes."""
    if len(executable.results) != len(results):
        raise ClosedError(f"it has {len(executable.results)} results for {len(results)}")
    bases = {number: Place(1 + n, 0) for n, number in enumerate(executable.constants)}
    first = 1 + len(bases)
    whole: dict[int, torch.Tensor] = {}
    for number, allocation in executable.allocations.items():
        if allocation.parameter is not None:
            if allocation.parameter >= len(like):
                raise ClosedError(f"it has a parameter {allocation.parameter} of {len(like)}")
            bases[number] = Place(first + allocation.parameter, 0)
            whole[number] = like[allocation.parameter]
    for n, number in enumerate(executable.results):
        if number in bases:
            raise ClosedError("a result is a parameter")
        bases[number] = Place(first + len(like) + n, 0)
        whole[number] = results[n]
    for number, tensor in whole.items():
        size = executable.allocations[number].size
        if size != tensor.numel() * tensor.element_size():
            raise ClosedError(f"an array of shape {tuple(tensor.shape)} has {size} bytes")
    slices = [each for step in executable.steps for each in step.arguments]
    used = collections.Counter(each.allocation for each in slices)
    written = {each.allocation for step in executable.steps for each in step.written}
    end = 0
    for number in sorted(set(used).difference(bases)):
        size = executable.allocations[number].size
        if used[number] == 1 and number in written and size <= UNREAD_BYTES:
            bases[number] = Place(0, 0)
        else:
            bases[number] = Place(first + len(like) + len(results), end)
            end += math.ceil(size / SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return bases, end
