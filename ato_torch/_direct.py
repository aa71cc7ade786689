"""The direct road: a function of JAX on PyTorch's tensors without JAX, its kernels launched here.

JAX compiles the function once, and `_executable` reads what XLA made of it: kernels, a few copies
perhaps, and which memory each takes. That becomes a `Plan`: PyTorch allocates, and the same machine
code goes to PyTorch's current stream, in the same order. So there is nothing to wait for, memory is
PyTorch's, and a CUDA graph of the caller's holds it all. Several kernels are a graph themselves,
whose addresses are changed before each launch: the host then pays for one launch.

Before a plan is taken, it runs once beside JAX on random tensors like those of the first call, and
has to give the same bits. What has no plan, for a step that is no kernel or for bytes that are not
understood, is `ClosedError`, and goes through `_bridge`: a warning says so, once for each reason.

ATO_TORCH_DIRECT=0 in the environment turns this road off, and that warning with it.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import functools
import math
import os
import re
import struct
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from ato_torch import _bridge, _executable, _programs

# Of memory that a step may write to: XLA holds its own to be aligned so.
SCRATCH_ALIGNMENT = 256
# What steps write and none reads lies in one place for all, up to that many bytes.
UNREAD_BYTES = 1 << 20
# Integers to compare the bits of an element by its size.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# The name in XLA's error where memory does not suffice.
XLA_NO_MEMORY = "RESOURCE_EXHAUSTED"
# The variable of the environment that turns this road off.
SWITCH = "ATO_TORCH_DIRECT"


def _allocator() -> Callable[[Any, Any, torch.dtype], torch.Tensor]:
    """(size, stride, dtype) -> a tensor on the current device; sizes and strides are tuples."""

    def public(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    try:  # the private one takes half as long
        return torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    except AttributeError:
        return public


class ClosedError(Exception):
    """Why a function has no plan."""

    is_captured = False


class NoMemoryError(ClosedError):
    """Why it has none yet."""


class NotMeantError(ClosedError):
    """Why nobody expects it to have one."""


def is_on() -> bool:
    """Whether the environment leaves this road open; ValueError for a value that says neither."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"the environment variable {SWITCH} must be 0, so that every call goes through JAX, or "
            f"1, as without it; got {value!r}"
        )
    return value != "0"


def execute(
    function: _programs.Function, tensors: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The function of the tensors, all on one device: by its plan where it has one."""
    if not tensors[0].is_cuda:
        return _bridge.execute(function.jitted, tensors)
    tensors = _bridge.dense(tensors)
    plan = plan_of(function, tensors)
    if isinstance(plan, ClosedError):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "ato_torch cannot be captured into a CUDA graph where it goes through JAX, which "
                f"launches its work itself. This call does: {plan}"
            )
        return _bridge.execute(function.jitted, tensors)
    return plan(tensors)


def plan_of(
    function: _programs.Function, tensors: Sequence[torch.Tensor]
) -> Plan | ClosedError:
    """The function's plan for dense tensors on a GPU of such shapes, or why there is none."""
    key = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
    try:
        return function.plans[key]
    except KeyError:
        pass
    with function.planning:
        if key in function.plans:
            return function.plans[key]
        # The second, the fourth, the eighth time and so on: to compile takes a second.
        calls = function.short_of_memory.get(key, 0) + 1
        if calls & (calls - 1):
            found: Plan | ClosedError = NoMemoryError("there was no memory to try its launches")
        else:
            found = _build(function, tensors)
            if isinstance(found, NoMemoryError):
                # Neither JAX nor the driver ask PyTorch for the memory that it holds unused.
                torch.cuda.empty_cache()
                found = _build(function, tensors)
        if isinstance(found, NoMemoryError):
            function.short_of_memory[key] = calls
        else:
            function.plans[key] = found
            function.short_of_memory.pop(key, None)
    if isinstance(found, ClosedError) and not isinstance(found, NotMeantError):
        _warn_once(str(found))
    return found


# The reasons that a warning was given for, without their numbers.
_warned: set[str] = set()
_warning = threading.Lock()


def _warn_once(reason: str) -> None:
    kind = re.sub(r"\d+", "", reason)
    with _warning:
        if kind in _warned:
            return
        _warned.add(kind)
    warnings.warn(
        "a call of ato_torch goes through JAX, since its kernels cannot be launched from PyTorch "
        f"directly: {reason}. That takes the host about 10 times as long, and no CUDA graph can "
        "capture the call. ato_torch.explain tells which road a call takes. This warning comes "
        f"once for each reason; the environment variable {SWITCH}=0 turns the direct road off, and "
        "the warning with it",
        RuntimeWarning,
        stacklevel=2,
    )


def ready(
    function: _programs.Function,
    tensors: Sequence[torch.Tensor],
    turned: Sequence[bool] = (),
    turned_results: Sequence[bool] = (),
) -> Plan | None:
    """The plan for tensors of such shapes and strides, if there is one that reads them as they lie.

    Tensors that are `turned` have their second and third axis exchanged, but not in memory; so
    have then the results.
    """
    if not tensors[0].is_cuda:
        return None
    if any(turned):
        tensors = [
            tensor.transpose(1, 2) if is_turned else tensor
            for tensor, is_turned in zip(tensors, turned, strict=True)
        ]
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    plan = plan_of(function, _bridge.dense(tensors))
    if isinstance(plan, ClosedError):
        return None
    return plan.turned(turned_results) if any(turned) else plan


def _build(function: _programs.Function, tensors: Sequence[torch.Tensor]) -> Plan | ClosedError:
    place = tensors[0].device
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ato_torch compiles a call at its first time, which a CUDA graph cannot capture: "
            "make the call once before"
        )
    if not is_on():
        return NotMeantError(f"{SWITCH}=0 in the environment turns the direct road off")
    if not all(tensor.numel() for tensor in tensors):
        return NotMeantError("an array is empty")
    try:
        # Where the user's own modes are on, none of them is meant for what is built here.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(place):
            _unload_retired()
            compiled, results = _compiled(function.traced, tensors)
            executable = _executable.read(compiled.runtime_executable().serialize())
            plan = Plan(executable, tensors, results, Kernels(executable))
            drawn = _drawn(tensors)
            wanted = _bridge.execute(compiled, drawn)
            _compare(plan(drawn), wanted)
            _compare(plan(drawn, as_graph=False), wanted)
            return plan
    except ClosedError as closed:
        return ClosedError(*closed.args)  # a new one: that one's traceback keeps the tensors
    except _executable.UnknownError as error:
        return ClosedError(f"what XLA compiled is not understood: {error}")
    except Exception as error:  # other versions of JAX, of the driver
        _raise_if_broken(place, error)
        is_memory = isinstance(error, torch.OutOfMemoryError) or XLA_NO_MEMORY in str(error)
        kind = NoMemoryError if is_memory else ClosedError
        return kind(f"{type(error).__name__}: {error}")


def _raise_if_broken(place: torch.device, error: Exception) -> None:
    """Where a launch has broken the process's use of the GPU, no other road works either: the error
    must not pass for a reason to take one."""
    try:
        driver = _driver()
    except OSError:  # no driver, so nothing was launched
        return
    with torch.cuda.device(place):
        stream = torch.cuda.current_stream().cuda_stream
        code = driver.cuStreamSynchronize(ctypes.c_size_t(stream))
    if code in BROKEN:
        raise RuntimeError(
            "the trial of a first call's kernels, launched from PyTorch beside JAX's own launch, "
            f"has left CUDA unusable in this process: {_said(code)}. Start it anew; with the "
            f"environment variable {SWITCH}=0 JAX alone launches"
        ) from error


def _drawn(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Random numbers in the place of the tensors' own, which may all be 0, or the same for q, k
    and v. Of the same sign where theirs is: a decay above 0 would overflow. Integers stay: they say
    what is seen."""
    generator = torch.Generator(tensors[0].device).manual_seed(0)
    drawn = []
    for tensor in tensors:
        if tensor.is_floating_point():
            numbers = torch.empty_like(tensor).normal_(generator=generator)
            if (tensor <= 0).all():
                numbers.abs_().neg_()
            elif (tensor >= 0).all():
                numbers.abs_()
            tensor = numbers
        drawn.append(tensor)
    return drawn


def _compiled(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor]
) -> tuple[Any, list[torch.Tensor]]:
    """The function, compiled by JAX, and tensors without memory like its results."""
    sharding = jax.sharding.SingleDeviceSharding(_bridge.jax_device(tensors[0].device))
    shapes = [
        jax.ShapeDtypeStruct(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), sharding=sharding
        )
        for tensor in tensors
    ]
    # What the function does not read is a parameter nevertheless. A function of its own, since JAX
    # keeps what it compiled as long as the function exists.
    lowered = jax.jit(lambda *arrays: function(*arrays), keep_unused=True).lower(*shapes)
    compiled = lowered.compile()
    results = [
        torch.empty(info.shape, dtype=getattr(torch, str(info.dtype)), device="meta")
        for info in jax.tree.leaves(lowered.out_info)
    ]
    return compiled, results


def _compare(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        bits = BITS[one.element_size()]
        if one.shape != other.shape:
            raise ClosedError(f"result {n} of its launches is of another shape than JAX's")
        if not torch.equal(one.view(bits), other.view(bits)):
            count = int((one.view(bits) != other.view(bits)).sum())
            raise ClosedError(
                f"result {n} of its launches is not what JAX gives, in {count} numbers of "
                f"{one.numel()}"
            )


class Plan:
    """An executable on one GPU, ready to run on tensors that are dense as `like` are.

    A call has one list of addresses: of what nothing reads, of the constants, of the tensors, of
    the results, of the scratch memory. What the steps take are these, some of them further on by a
    few bytes.
    """

    def __init__(
        self,
        executable: _executable.Executable,
        like: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        kernels: Kernels,
    ) -> None:
        self.executable, self.index = executable, like[0].device.index
        self.facts = [(tuple(one.shape), one.stride(), one.dtype) for one in results]
        bases, self.scratch_bytes = _bases(executable, like, results)
        self.places = [
            (bases[each.allocation][0], bases[each.allocation][1] + each.offset)
            for step in executable.steps
            for each in step.arguments
        ]
        self.kernels = kernels
        # The tensor, too: two threads may each get one of their own.
        self.unread = _nowhere(like[0].device)
        self.nowhere = self.unread.data_ptr()
        self.fixed = [self.nowhere, *kernels.constants]
        # By streams, so that no graph's launches are in two of them, waiting for each other.
        self.idle: dict[int, list[_Calls]] = collections.defaultdict(list)

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph of the caller's may hold its launches."""
        return self.kernels.loaded.is_captured

    def turned(self, which: Sequence[bool]) -> Plan:
        """The plan that gives those results with their second and third axis exchanged, but not in
        memory. `which` may tell of more results than there are.
        """
        plan = copy.copy(self)
        plan.facts = [
            (_exchanged(size), _exchanged(stride), dtype) if is_it else (size, stride, dtype)
            for (size, stride, dtype), is_it in zip(self.facts, which, strict=False)
        ]
        return plan

    def __call__(
        self, tensors: Sequence[torch.Tensor], as_graph: bool = True
    ) -> list[torch.Tensor]:
        if torch._C._cuda_getDevice() != self.index:
            with torch.cuda.device(self.index):
                return self(tensors, as_graph)
        tensors = [
            _aligned(tensor)
            if (pointer := tensor.data_ptr()) & MISALIGNED or not pointer or tensor.is_neg()
            else tensor
            for tensor in tensors
        ]
        results = [empty_strided(*fact) for fact in self.facts]
        addresses = self.fixed.copy()
        addresses += [tensor.data_ptr() for tensor in tensors]
        addresses += [result.data_ptr() for result in results]
        if self.scratch_bytes:
            # Free for others at the return: what they do with it comes later on the stream.
            scratch = empty_strided((self.scratch_bytes,), (1,), torch.uint8)
            addresses.append(scratch.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        idle = self.idle[stream]
        try:
            calls = idle.pop()
        except IndexError:
            calls = _Calls(self.executable, self.kernels, stream)
        calls.fill(*[addresses[number] + offset for number, offset in self.places])
        steps = calls.of_steps
        if is_capturing():
            # What captures holds the launches themselves, and a graph cannot be made meanwhile.
            self.kernels.loaded.is_captured = True
        elif calls.is_several and as_graph:
            steps = calls.of_graph or calls.make_graph()
        for function, arguments in steps:
            error = function(*arguments)
            if error == INVALID_CONTEXT:  # a thread in which CUDA was not used yet
                _check(_driver().cuCtxSetCurrent(self.kernels.context))
                error = function(*arguments)
            if error:
                _check(error)
        idle.append(calls)
        return results


MISALIGNED = _bridge.ALIGNMENT - 1
empty_strided = _allocator()
is_capturing = torch.cuda.is_current_stream_capturing


@functools.cache
def _nowhere(place: torch.device) -> torch.Tensor:
    """Where steps write what nothing reads."""
    return torch.empty(UNREAD_BYTES, dtype=torch.uint8, device=place)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, with its axes in memory as they were."""
    return tensor.detach().resolve_neg().clone(memory_format=torch.preserve_format)


def _exchanged(numbers: tuple[int, ...]) -> tuple[int, ...]:
    first, second, third, *rest = numbers
    return (first, third, second, *rest)


def _bases(
    executable: _executable.Executable,
    like: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> tuple[dict[int, tuple[int, int]], int]:
    """Of each allocation that a step takes the number of its address, and how many bytes further
    on it begins; and the bytes of scratch."""
    if len(executable.results) != len(results):
        raise ClosedError(f"it has {len(executable.results)} results for {len(results)}")
    bases = {number: (1 + n, 0) for n, number in enumerate(executable.constants)}
    first = 1 + len(bases)
    whole: dict[int, torch.Tensor] = {}
    for number, allocation in executable.allocations.items():
        if allocation.parameter is not None:
            if allocation.parameter >= len(like):
                raise ClosedError(f"it has a parameter {allocation.parameter} of {len(like)}")
            bases[number] = first + allocation.parameter, 0
            whole[number] = like[allocation.parameter]
    for n, number in enumerate(executable.results):
        if number in bases:
            raise ClosedError("a result is a parameter")
        bases[number] = first + len(like) + n, 0
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
            bases[number] = 0, 0
        else:
            bases[number] = first + len(like) + len(results), end
            end += math.ceil(size / SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return bases, end


class _LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_size_t),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _KernelNode(ctypes.Structure):
    """The driver's CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


# One of the driver's functions, and what it is called with.
_Call = tuple[Any, tuple[Any, ...]]


class _Calls:
    """The driver's functions for all the steps on one stream, with their arguments as C has them:
    made once, and filled in for each call. Of two kernels or more a graph can be made, too: each
    is given its arguments, and all are launched as one.

    One call at a time may use them; the driver has copied what they hold when it returns.
    """

    def __init__(
        self, executable: _executable.Executable, kernels: Kernels, stream: int
    ) -> None:
        steps = executable.steps
        count = sum(len(step.arguments) for step in steps)
        pointers = (ctypes.c_uint64 * count)()
        self.fill = functools.partial(struct.Struct(f"{count}Q").pack_into, pointers, 0)
        self.stream = ctypes.c_size_t(stream)
        kernels.loaded.streams.add(stream)
        self.of_steps: list[_Call] = []
        # C's memory that the arguments point to.
        self.held: list[Any] = []
        start = 0
        call: _Call
        width = ctypes.sizeof(ctypes.c_uint64)
        for step in steps:
            if isinstance(step, _executable.Launch):
                size = ctypes.c_size_t(width * len(step.arguments))
                extra = (ctypes.c_void_p * 5)(
                    LAUNCH_PARAM_BUFFER_POINTER,
                    ctypes.addressof(pointers) + width * start,
                    LAUNCH_PARAM_BUFFER_SIZE,
                    ctypes.addressof(size),
                    None,
                )
                config = _LaunchConfig(step.grid, step.block, step.shared_bytes, stream)
                self.held += size, extra, config
                # Four arguments, where the older cuLaunchKernel has eleven for ctypes to pass.
                places = (ctypes.c_void_p(ctypes.addressof(each)) for each in (config, extra))
                kernel = kernels.of_launches[step]
                call = _driver().cuLaunchKernelEx, (next(places), kernel, None, *places)
            else:
                first, *rest = (
                    ctypes.c_uint64.from_buffer(pointers, width * (start + n))
                    for n in range(len(step.arguments))
                )
                if isinstance(step, _executable.Copy):
                    bytes_of = ctypes.c_size_t(step.target.size)
                    call = _driver().cuMemcpyDtoDAsync_v2, (first, *rest, bytes_of, self.stream)
                else:
                    words = ctypes.c_size_t(step.target.size // 4)
                    value = ctypes.c_uint(step.value)
                    call = _driver().cuMemsetD32Async, (first, value, words, self.stream)
            self.of_steps.append(call)
            start += len(step.arguments)
        launches = [step for step in steps if isinstance(step, _executable.Launch)]
        self.is_several = len(launches) == len(steps) > 1
        self.of_graph: list[_Call] = []
        self._facts = launches, kernels, pointers

    def make_graph(self) -> list[_Call]:
        driver, pointer = _driver(), ctypes.c_void_p
        launches, kernels, pointers = self._facts
        context, graph, ready = pointer(), pointer(), pointer()
        _check(driver.cuCtxGetCurrent(ctypes.byref(context)))
        if not context:  # a thread in which CUDA was not used yet
            _check(driver.cuCtxSetCurrent(kernels.context))
        _check(driver.cuGraphCreate(ctypes.byref(graph), 0))
        kernels.loaded.graphs.append((graph, ready))
        nodes: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []
        address = ctypes.addressof(pointers)
        for launch in launches:
            count = len(launch.arguments)
            width = ctypes.sizeof(ctypes.c_uint64)
            parameters = (pointer * count)(*range(address, address + width * count, width))
            address += width * count
            found = _KernelNode(kernels.of_launches[launch], launch.grid, launch.block)
            found.shared_bytes = launch.shared_bytes
            found.parameters = ctypes.addressof(parameters)
            node, facts = pointer(), pointer(ctypes.addressof(found))
            before = [each for each, _ in nodes[-1:]]
            behind = (pointer * 1)(*before), ctypes.c_size_t(len(before))
            _check(driver.cuGraphAddKernelNode_v2(ctypes.byref(node), graph, *behind, facts))
            nodes.append((node, facts))
            self.held += parameters, found
        # Nor would another thread's capture allow it otherwise.
        mode = ctypes.c_int(RELAXED_CAPTURE)
        _check(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        error = driver.cuGraphInstantiateWithFlags(ctypes.byref(ready), graph, ctypes.c_uint64(0))
        _check(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        _check(error)
        change = driver.cuGraphExecKernelNodeSetParams_v2
        self.of_graph = [
            *((change, (ready, *node)) for node in nodes),
            (driver.cuGraphLaunch, (ready, self.stream)),
        ]
        return self.of_graph


# cuda.h's names for these numbers.
OUT_OF_MEMORY = 2
EVENT_DISABLE_TIMING = 2
INVALID_CONTEXT = 201
RELAXED_CAPTURE = 2
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
LAUNCH_PARAM_BUFFER_POINTER = 1
LAUNCH_PARAM_BUFFER_SIZE = 2
# After these every further call in the process fails, with the same one: an illegal address, among
# others, an assertion, a launch that timed out or failed, an uncorrectable error of the memory or
# of NVLink, a context that is gone.
BROKEN = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721}
# What a launch gets without asking for more.
SHARED_BYTES = 48 * 1024


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuCtxSetCurrent.argtypes = [pointer]
    driver.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    driver.cuModuleGetGlobal_v2.argtypes = [pointer, pointer, pointer, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    driver.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    driver.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
    return driver


def _check(error: int) -> None:
    if error:
        kind = torch.OutOfMemoryError if error == OUT_OF_MEMORY else RuntimeError
        raise kind(f"a kernel launched from PyTorch: {_said(error)}")


def _said(error: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(error, ctypes.byref(text))
    return text.value.decode() if text.value else f"CUDA error {error}"


class _Loaded:
    """What was made in a context for one executable: modules, and graphs of launches.

    Nothing is unloaded at once when it is no longer used: its launches may not have ended, and the
    thread may be capturing. It is retired, and `_unload_retired` looks at it later.
    """

    def __init__(self, driver: Any, context: ctypes.c_void_p) -> None:
        self.driver, self.context = driver, context
        self.modules: list[ctypes.c_void_p] = []
        self.graphs: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []
        # The streams that its launches were in, and events behind the last one of each.
        self.streams: set[int] = set()
        self.events: dict[int, ctypes.c_void_p] = {}
        # A CUDA graph of the caller's holds kernels for as long as the caller likes.
        self.is_captured = False

    def retire(self) -> None:
        if not self.is_captured:
            _retired.append(self)

    def unload(self) -> bool:
        """Whether it could be unloaded; else this has to be called again."""
        if self.driver.cuCtxPushCurrent_v2(self.context):
            return False
        # Nor would another thread's capture allow it otherwise.
        mode = ctypes.c_int(RELAXED_CAPTURE)
        self.driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            have_ended = all([self._have_ended(stream) for stream in self.streams])
            if have_ended:
                for event in self.events.values():
                    self.driver.cuEventDestroy_v2(event)
                for graph, ready in self.graphs:
                    if ready:
                        self.driver.cuGraphExecDestroy(ready)
                    self.driver.cuGraphDestroy(graph)
                for module in self.modules:
                    self.driver.cuModuleUnload(module)
            return have_ended
        finally:
            self.driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _have_ended(self, stream: int) -> bool:
        """Whether the launches in a stream have."""
        if stream not in self.events:
            # A stream that is capturing takes no event but into its graph.
            status, event, handle = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(stream)
            if self.driver.cuStreamIsCapturing(handle, ctypes.byref(status)) or status.value:
                return False
            if self.driver.cuEventCreate(ctypes.byref(event), EVENT_DISABLE_TIMING):
                return False
            self.events[stream] = event
            if self.driver.cuEventRecord(event, handle):
                del self.events[stream]
                self.driver.cuEventDestroy_v2(event)
                return False
        return not self.driver.cuEventQuery(self.events[stream])


# What is to be unloaded, of all devices.
_retired: collections.deque[_Loaded] = collections.deque()


def _unload_retired() -> None:
    for _ in range(len(_retired)):
        try:
            loaded = _retired.popleft()
        except IndexError:  # another thread's
            return
        if not loaded.unload():
            _retired.append(loaded)


class Kernels:
    """An executable's kernels in the current context, which stay there as long as this exists."""

    def __init__(self, executable: _executable.Executable) -> None:
        driver = _driver()
        self.context = ctypes.c_void_p()
        self.of_launches: dict[_executable.Launch, ctypes.c_void_p] = {}
        torch.cuda.current_stream().query()  # PyTorch makes the context when it is first used
        _check(driver.cuCtxGetCurrent(ctypes.byref(self.context)))
        self.loaded = _Loaded(driver, self.context)
        # At the process's end the driver has gone already.
        weakref.finalize(self, self.loaded.retire).atexit = False
        modules: dict[bytes, ctypes.c_void_p] = {}

        def module_of(code: bytes) -> ctypes.c_void_p:
            if code not in modules:
                modules[code] = module = ctypes.c_void_p()
                _check(driver.cuModuleLoadData(ctypes.byref(module), code))
                self.loaded.modules.append(module)
            return modules[code]

        for launch in executable.steps:
            if not isinstance(launch, _executable.Launch):
                continue
            kernel, module = ctypes.c_void_p(), module_of(launch.code)
            name = launch.name.encode()
            _check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, name))
            if _parameters(kernel) != [(8 * n, 8) for n in range(len(launch.arguments))]:
                raise ClosedError(f"the kernel {launch.name!r} has other parameters")
            if launch.shared_bytes > SHARED_BYTES:
                attribute = MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(driver.cuFuncSetAttribute(kernel, attribute, launch.shared_bytes))
            self.of_launches[launch] = kernel
        # The addresses of the executable's constants, in their order.
        self.constants: list[int] = []
        for number, symbol in executable.constants.items():
            address, size = ctypes.c_uint64(), ctypes.c_size_t()
            places = ctypes.byref(address), ctypes.byref(size)
            module = module_of(executable.code)
            _check(driver.cuModuleGetGlobal_v2(*places, module, symbol.encode()))
            if size.value != executable.allocations[number].size:
                raise ClosedError(f"the constant {symbol!r} has {size.value} bytes")
            self.constants.append(address.value)


def _parameters(kernel: ctypes.c_void_p) -> list[tuple[int, int]]:
    """Where each parameter of a kernel lies, and its bytes."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    pointers = ctypes.byref(offset), ctypes.byref(size)
    while not _driver().cuFuncGetParamInfo(kernel, len(found), *pointers):
        found.append((offset.value, size.value))
    return found
