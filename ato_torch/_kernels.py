"""An executable's kernels in a CUDA context, and the sequence of their launches.

    Kernels             the machine code loaded, one handle a launch, the addresses of constants
    LaunchSequence      the driver's functions for all steps on one stream, their arguments in C
    Loaded              what has to be unloaded some time after the kernels are no longer used

Two or more kernels also form a CUDA graph, so that the host pays for one launch: before each launch
of the graph its nodes get the addresses of the call.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import functools
import struct
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ato_torch import _driver, _executable
from ato_torch._errors import ClosedError

# The dynamic shared memory that a launch gets without asking for more.
SHARED_BYTES = 48 * 1024
# What XLA reserves in the machine code for a constant of fewer bytes.
LEAST_CONSTANT_BYTES = 64


class Loaded:
    """The modules and graphs that one executable has in a context.

    They cannot be unloaded as soon as nothing refers to them: launches may still run, and the
    thread may be capturing a graph. They are put into `retired`, and `unload_retired` unloads those
    whose launches have ended.
    """

    def __init__(self, driver: Any, context: ctypes.c_void_p) -> None:
        self.driver, self.context = driver, context
        self.modules: list[ctypes.c_void_p] = []
        self.graphs: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []
        # The streams of its launches, and for each an event recorded after the last launch.
        self.streams: set[int] = set()
        self.events: dict[int, ctypes.c_void_p] = {}
        # Whether a CUDA graph of the caller holds kernels. Then they are never unloaded.
        self.is_captured = False

    def retire(self) -> None:
        """Leaves the modules and graphs to `unload_retired`."""
        if not self.is_captured:
            retired.append(self)

    def unload(self) -> bool:
        """Unloads all; returns False where launches may still run, and has to be called again."""
        if self.driver.cuCtxPushCurrent_v2(self.context):
            return False
        # Otherwise the capture of another thread would forbid these calls.
        mode = ctypes.c_int(_driver.RELAXED_CAPTURE)
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
        """Whether all launches in a stream have ended."""
        if stream not in self.events:
            # An event recorded in a capturing stream would become part of the captured graph.
            status, event, handle = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(stream)
            if self.driver.cuStreamIsCapturing(handle, ctypes.byref(status)) or status.value:
                return False
            if self.driver.cuEventCreate(ctypes.byref(event), _driver.EVENT_DISABLE_TIMING):
                return False
            self.events[stream] = event
            if self.driver.cuEventRecord(event, handle):
                del self.events[stream]
                self.driver.cuEventDestroy_v2(event)
                return False
        return not self.driver.cuEventQuery(self.events[stream])


# To be unloaded, for all devices.
retired: collections.deque[Loaded] = collections.deque()


def unload_retired() -> None:
    """Unloads what is in `retired` and no longer runs."""
    for _ in range(len(retired)):
        try:
            loaded = retired.popleft()
        except IndexError:  # another thread took it
            return
        if not loaded.unload():
            retired.append(loaded)


class Kernels:
    """An executable's kernels in the current context, loaded for as long as this object lives."""

    def __init__(self, executable: _executable.Executable) -> None:
        driver = _driver.library()
        self.context = ctypes.c_void_p()
        self.loaded_by: Kernels | None = None
        self.of_launches: dict[_executable.Launch, ctypes.c_void_p] = {}
        # The bytes of each launch's parameters; those of addresses are 0.
        self.constant_bytes: dict[_executable.Launch, bytes] = {}
        torch.cuda.current_stream().query()  # PyTorch creates the context on first use
        _driver.check(driver.cuCtxGetCurrent(ctypes.byref(self.context)))
        self.loaded = Loaded(driver, self.context)
        # When the process ends, the driver is shut down before finalizers run.
        weakref.finalize(self, self.loaded.retire).atexit = False
        modules: dict[bytes, ctypes.c_void_p] = {}

        def module_of(code: bytes) -> ctypes.c_void_p:
            if code not in modules:
                modules[code] = module = ctypes.c_void_p()
                _driver.check(driver.cuModuleLoadData(ctypes.byref(module), code))
                self.loaded.modules.append(module)
            return modules[code]

        for launch in executable.steps:
            if not isinstance(launch, _executable.Launch):
                continue
            kernel, module = ctypes.c_void_p(), module_of(launch.code)
            name = launch.name.encode()
            _driver.check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, name))
            if _parameters(kernel) != layout_of(launch):
                raise ClosedError(f"the kernel {launch.name!r} has other parameters")
            self.constant_bytes[launch] = constant_bytes(launch)
            if launch.shared_bytes > SHARED_BYTES:
                attribute = _driver.MAX_DYNAMIC_SHARED_SIZE_BYTES
                _driver.check(driver.cuFuncSetAttribute(kernel, attribute, launch.shared_bytes))
            self.of_launches[launch] = kernel
        # The addresses of the executable's constants, in the order of `executable.constants`.
        self.constants: list[int] = []
        for constant in executable.constants.values():
            address, size = ctypes.c_uint64(), ctypes.c_size_t()
            places = ctypes.byref(address), ctypes.byref(size)
            module, symbol = module_of(executable.code), constant.symbol.encode()
            _driver.check(driver.cuModuleGetGlobal_v2(*places, module, symbol))
            own = len(constant.content)
            if size.value not in (own, max(own, LEAST_CONSTANT_BYTES)):
                raise ClosedError(f"{constant} has {size.value} bytes in the machine code")
            _write(address, constant.content)
            self.constants.append(address.value)

    def with_maps(self, before: _executable.Executable, after: _executable.Executable) -> Kernels:
        """These kernels for `after`, which differs from `before`, theirs, in tensor maps alone."""
        found = copy.copy(self)
        # Only its finalizer unloads the modules.
        found.loaded_by = self
        found.of_launches, found.constant_bytes = {}, {}
        for one, other in zip(before.steps, after.steps, strict=True):
            if isinstance(one, _executable.Launch) and isinstance(other, _executable.Launch):
                found.of_launches[other] = self.of_launches[one]
                found.constant_bytes[other] = constant_bytes(other)
        return found


def layout_of(launch: _executable.Launch) -> list[tuple[int, int]]:
    """(offset in bytes, size in bytes) of each parameter of a launch's kernel."""
    if launch.parameters is not None:
        return list(launch.parameters.layout)
    width = _driver.POINTER_BYTES
    return [(width * n, width) for n in range(len(launch.arguments))]


def places_of(launch: _executable.Launch) -> list[int]:
    """The offset in bytes of each argument's address among the parameters."""
    if launch.parameters is not None:
        return [place.offset for place in launch.parameters.places]
    return [offset for offset, _ in layout_of(launch)]


def constant_bytes(launch: _executable.Launch) -> bytes:
    """The parameters without the addresses of arrays.

    The driver makes each tensor map; its first word is the address. That is not documented, so the
    driver makes it for two addresses, and the two maps must not differ in anything else.
    """
    if launch.parameters is None:
        return bytes(_driver.POINTER_BYTES * len(launch.arguments))
    found = bytearray(launch.parameters.constant)
    for place in launch.parameters.places:
        if place.map is None:
            continue
        maps = []
        for address in (1 << 21, 3 << 32):
            whole = _driver.tensor_map(place.map, address)
            if whole[: _driver.POINTER_BYTES] != address.to_bytes(_driver.POINTER_BYTES, "little"):
                raise ClosedError("a tensor map does not begin with its address")
            maps.append(whole[_driver.POINTER_BYTES :])
        if maps[0] != maps[1]:
            raise ClosedError("two tensor maps differ in more than their addresses")
        start = place.offset + _driver.POINTER_BYTES
        found[start : start + len(maps[0])] = maps[0]
    return bytes(found)


def _write(address: ctypes.c_uint64, content: bytes) -> None:
    """Writes bytes to the device, and waits until they are there."""
    driver = _driver.library()
    stream = ctypes.c_size_t(torch.cuda.current_stream().cuda_stream)
    size = ctypes.c_size_t(len(content))
    with _driver.relaxed_capture():
        _driver.check(driver.cuMemcpyHtoDAsync_v2(address, content, size, stream))
        _driver.check(driver.cuStreamSynchronize(stream))


def _parameters(kernel: ctypes.c_void_p) -> list[tuple[int, int]]:
    """(offset in bytes, size in bytes) of each parameter of a kernel."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    pointers = ctypes.byref(offset), ctypes.byref(size)
    while not _driver.library().cuFuncGetParamInfo(kernel, len(found), *pointers):
        found.append((offset.value, size.value))
    return found


def _fill(memory: memoryview, words: list[int], *addresses: int) -> None:
    for word, address in zip(words, addresses, strict=True):
        memory[word] = address


# A function of the driver and its arguments.
_Call = tuple[Any, tuple[Any, ...]]


class LaunchSequence:
    """The driver's functions for all steps on one stream, with their arguments in C's memory.

    Made once; `fill` writes the addresses of a call. `of_steps` launches one step after the other.
    Where all steps are kernels, and there are several, `make_graph` makes `of_graph`, which gives
    each node of a CUDA graph its addresses and launches the graph.

    Only one call at a time may use it. The driver copies the arguments before it returns.
    """

    def __init__(
        self, executable: _executable.Executable, kernels: Kernels, stream: int
    ) -> None:
        steps = executable.steps
        width = _driver.POINTER_BYTES
        # The parameters of all launches and the addresses of other steps, one behind the other.
        contents, words, starts = b"", list[int](), list[int]()
        for step in steps:
            start = len(contents) // width
            starts.append(start)
            if isinstance(step, _executable.Launch):
                words += [start + offset // width for offset in places_of(step)]
                contents += kernels.constant_bytes[step]
            else:
                words += range(start, start + len(step.arguments))
                contents += bytes(width * len(step.arguments))
        pointers = (ctypes.c_uint64 * (len(contents) // width)).from_buffer_copy(contents)
        self.fill: Callable[..., None]
        if words == list(range(len(pointers))):
            self.fill = functools.partial(struct.Struct(f"{len(words)}Q").pack_into, pointers, 0)
        else:
            self.fill = functools.partial(_fill, memoryview(pointers).cast("B").cast("Q"), words)
        self.stream = ctypes.c_size_t(stream)
        kernels.loaded.streams.add(stream)
        self.of_steps: list[_Call] = []
        # Keeps alive the memory that the arguments point to.
        self.held: list[Any] = []
        call: _Call
        for step, start in zip(steps, starts, strict=True):
            if isinstance(step, _executable.Launch):
                size = ctypes.c_size_t(max(map(sum, layout_of(step)), default=0))
                extra = (ctypes.c_void_p * 5)(
                    _driver.LAUNCH_PARAM_BUFFER_POINTER,
                    ctypes.addressof(pointers) + width * start,
                    _driver.LAUNCH_PARAM_BUFFER_SIZE,
                    ctypes.addressof(size),
                    None,
                )
                config = _driver.LaunchConfig(step.grid, step.block, step.shared_bytes, stream)
                self.held += size, extra, config
                # cuLaunchKernelEx has 4 arguments for ctypes to convert, cuLaunchKernel 11.
                places = (ctypes.c_void_p(ctypes.addressof(each)) for each in (config, extra))
                kernel = kernels.of_launches[step]
                call = _driver.library().cuLaunchKernelEx, (next(places), kernel, None, *places)
            else:
                first, *rest = (
                    ctypes.c_uint64.from_buffer(pointers, width * (start + n))
                    for n in range(len(step.arguments))
                )
                if isinstance(step, _executable.Copy):
                    bytes_of = ctypes.c_size_t(step.target.size)
                    copied = (first, *rest, bytes_of, self.stream)
                    call = _driver.library().cuMemcpyDtoDAsync_v2, copied
                else:
                    count = ctypes.c_size_t(step.target.size // _executable.WORD)
                    value = ctypes.c_uint(step.value)
                    call = _driver.library().cuMemsetD32Async, (first, value, count, self.stream)
            self.of_steps.append(call)
        launches = [step for step in steps if isinstance(step, _executable.Launch)]
        self.is_several = len(launches) == len(steps) > 1
        self.of_graph: list[_Call] = []
        self._facts = launches, kernels, pointers, starts

    def make_graph(self) -> list[_Call]:
        """Makes `of_graph`: the kernels as a CUDA graph, each node after the one before."""
        driver, pointer = _driver.library(), ctypes.c_void_p
        launches, kernels, pointers, starts = self._facts
        context, graph, ready = pointer(), pointer(), pointer()
        _driver.check(driver.cuCtxGetCurrent(ctypes.byref(context)))
        if not context:  # this thread has not used CUDA yet
            _driver.check(driver.cuCtxSetCurrent(kernels.context))
        _driver.check(driver.cuGraphCreate(ctypes.byref(graph), 0))
        kernels.loaded.graphs.append((graph, ready))
        nodes: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []
        for launch, start in zip(launches, starts, strict=True):
            address = ctypes.addressof(pointers) + _driver.POINTER_BYTES * start
            offsets = [offset for offset, _ in layout_of(launch)]
            parameters = (pointer * len(offsets))(*(address + offset for offset in offsets))
            found = _driver.KernelNode(kernels.of_launches[launch], launch.grid, launch.block)
            found.shared_bytes = launch.shared_bytes
            found.parameters = ctypes.addressof(parameters)
            node, facts = pointer(), pointer(ctypes.addressof(found))
            before = [each for each, _ in nodes[-1:]]
            behind = (pointer * 1)(*before), ctypes.c_size_t(len(before))
            _driver.check(driver.cuGraphAddKernelNode_v2(ctypes.byref(node), graph, *behind, facts))
            nodes.append((node, facts))
            self.held += parameters, found
        flags = ctypes.c_uint64(0)
        with _driver.relaxed_capture():
            _driver.check(driver.cuGraphInstantiateWithFlags(ctypes.byref(ready), graph, flags))
        change = driver.cuGraphExecKernelNodeSetParams_v2
        self.of_graph = [
            *((change, (ready, *node)) for node in nodes),
            (driver.cuGraphLaunch, (ready, self.stream)),
        ]
        return self.of_graph
