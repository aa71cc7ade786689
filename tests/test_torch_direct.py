"""The direct road: plans on a driver that is a stand-in, on a CPU; on a GPU the real ones."""
# ruff: noqa: N802  the driver's functions have CUDA's names

import collections
import contextlib
import copy
import ctypes
import dataclasses
import importlib
import statistics
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

import ato_jax  # noqa: E402
import ato_torch  # noqa: E402
from ato_torch import (  # noqa: E402
    _adapters,
    _bridge,
    _calls,
    _checked_calls,
    _compiling,
    _direct,
    _driver,
    _elf,
    _executable,
    _kernels,
    _known,
    _mosaic,
    _plan,
    _programs,
)
from ato_torch._executable import (  # noqa: E402
    Allocation,
    Constant,
    Copy,
    Executable,
    Fill,
    Launch,
    Slice,
)
from tests import numerics  # noqa: E402

explaining = importlib.import_module("ato_torch.explain")  # the package has a function named so

B, H, G, T, D = 2, 4, 2, 300, 64
ATTENTION = {"layout": "bhtd", "query_offset": 0}
LINEAR = {"layout": "bhtd", "feature_map": "elu1"}
STATE = {"state.kv": (B, G, D, D), "state.k_sum": (B, G, D)}


def call_of(op, options, training=False, names=("q", "k", "v")):
    return _calls.Call(op, tuple(names), tuple(options.items()), training, False)


def test_which_versions_of_jax_tell_launches():
    """What 0.11.0 serializes is another form of 0.11, which nothing here reads."""
    versions = (0, 10, 2), (0, 11, 0), (0, 11, 1), (0, 12, 0, 1)
    here = _elf.runs_host_code()
    assert [_adapters.tells_launches(version) for version in versions] == [False, False, here, here]


@pytest.mark.parametrize("reads", [False, True])
def test_without_a_name_kernels_are_those_that_go_this_road(reads, monkeypatch):
    """Where this JAX or this machine does not tell how Mosaic GPU's are launched, these are not."""
    ours = _programs.OPS["linear_attention"]
    assert _adapters.through_jax_alone() == (() if _adapters.READS_LAUNCHES else ("mosaic_gpu",))
    monkeypatch.setattr(_adapters, "READS_LAUNCHES", reads)
    for name, is_among in ((None, reads), ("mosaic_gpu", True)):
        backends = ours.op(types.SimpleNamespace(implementation=name)).backends
        assert ("mosaic_gpu" in backends) == is_among and "triton" in backends


def inputs(dtype=torch.bfloat16, where="meta"):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, heads, T, D, generator=generator).to(dtype).to(where) for heads in (H, G, G)
    ]


def backward_of(program, tensors):
    """The backward of a program whose first output alone has a cotangent, and its tensors."""
    outputs = [
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for shape, dtype in _programs.output_shapes(
            program.call,
            [(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in tensors],
        )
    ]
    given = tuple(n == 0 for n in range(len(outputs)))
    function = program.backward((True,) * len(tensors), given)
    return function, [*tensors, *outputs, outputs[0]]


# A driver that is a stand-in

# Bytes of one array of the program below, and where in its scratch memory it has another one.
SIZE, FURTHER = 4 * 6, 64


def array(address):
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (6,))


def add(x, y, out):
    array(out)[:] = array(x) + array(y)


def times(x, y, product, square):
    array(product)[:] = array(x) * array(y)
    array(square)[:] = array(x) * array(x)


# The parameters of a kernel of Mosaic GPU, as (offset, size) in bytes: a number and an address, and
# from byte 64 on two tensor maps. In words that is:
LAYOUT, TARGET, CONSTANT, MAPS = ((0, 16), (64, 256)), 1, 0, (8, 24)
MAP = _mosaic.TensorMap(element=9, sizes=(8, 2), strides=(16,), tile=(8, 1), swizzle=3)


def mapped(*words):
    """out = x + y, by tensor maps, whose first words are addresses."""
    x, y = (words[start] for start in MAPS)
    assert words[CONSTANT] == 77 and not any(words[2:8])
    for start in MAPS:
        assert words[start + 1 : start + 16] == tuple(encoded(MAP)), "no tensor map"
    add(x, y, words[TARGET])


def encoded(what):
    """15 words that say all of a tensor map but its address."""
    return [hash((what, n)) & (1 << 64) - 1 for n in range(15)]


class Driver:
    """Of CUDA's driver what `_direct` calls; kernels are Python's functions of addresses."""

    KERNELS = {b"add": (add, 3), b"times": (times, 4), b"mapped": (mapped, 40)}
    # Whether tensor maps hold their addresses where it is known.
    maps_are_known = True

    def __init__(self):
        self.calls, self.errors, self.contexts = [], [], []
        self.parameter_size, self.context = 8, 77
        # Of each graph its nodes: a kernel, its sizes, and where its arguments are.
        self.graphs, self.mode = [], 0
        self.constants = {}
        # What every call returns after a launch that broke the context.
        self.broken = 0
        # What was destroyed, in order; streams that are at work, and those that capture.
        self.destroyed, self.busy, self.capturing = [], set(), set()

    def cuCtxPushCurrent_v2(self, context):
        self.pushed = context.value
        return 0

    def cuCtxPopCurrent_v2(self, context):
        self.pushed = None
        return 0

    def cuStreamIsCapturing(self, stream, status):
        status._obj.value = int((stream.value or 0) in self.capturing)
        return 0

    def cuEventCreate(self, event, flags):
        event._obj.value = 1000
        return 0

    def cuEventRecord(self, event, stream):
        assert (stream.value or 0) not in self.capturing
        event.value = 1000 + (stream.value or 0)
        return 0

    def cuEventQuery(self, event):
        assert self.mode == _driver.RELAXED_CAPTURE and self.pushed == 77
        return 600 * (event.value - 1000 in self.busy)

    def destroy(self, kind, handle):
        assert self.mode == _driver.RELAXED_CAPTURE and self.pushed == 77 and handle.value
        self.destroyed.append(kind)
        return 0

    def cuEventDestroy_v2(self, event):
        return self.destroy("event", event)

    def cuGraphExecDestroy(self, ready):
        return self.destroy("ready graph", ready)

    def cuGraphDestroy(self, graph):
        return self.destroy("graph", graph)

    def cuModuleUnload(self, module):
        return self.destroy("module", module)

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context):
        self.contexts.append(context.value)
        self.context = context.value
        return 0

    def cuModuleLoadData(self, module, code):
        self.calls.append(("load", code))
        module._obj.value = len(self.calls)
        return 0

    def cuModuleGetFunction(self, kernel, module, name):
        kernel._obj.value = 1 + list(self.KERNELS).index(name)
        return 0

    def cuModuleGetGlobal_v2(self, address, size, module, name):
        address._obj.value = self.constants[name].ctypes.data
        size._obj.value = self.constants[name].nbytes
        self.calls.append(("constant", module.value, name))
        return 0

    def cuMemcpyHtoDAsync_v2(self, address, content, size, stream):
        assert self.mode == _driver.RELAXED_CAPTURE and stream.value == 5
        ctypes.memmove(address.value, content, size.value)
        return 0

    def cuTensorMapEncodeTiled(self, place, element, rank, address, *rest):
        sizes, strides, tile, steps, interleave, swizzle, promotion, fill = rest
        assert list(steps) == [1] * rank.value and place.value % 64 == 0
        assert interleave.value == promotion.value == fill.value == 0
        strides = tuple(strides)[: rank.value - 1]
        what = element.value, tuple(sizes), strides, tuple(tile), swizzle.value
        words = [address.value, *encoded(_mosaic.TensorMap(*what))]
        if not self.maps_are_known:
            words[-1] ^= address.value
        ctypes.memmove(place.value, struct.pack("16Q", *words), 128)
        return 0

    def cuFuncGetParamInfo(self, kernel, n, offset, size):
        if list(self.KERNELS)[kernel.value - 1] == b"mapped":
            offset._obj.value, size._obj.value = LAYOUT[min(n, 1)]
            return int(n >= 2)
        offset._obj.value, size._obj.value = 8 * n, self.parameter_size
        return int(n >= list(self.KERNELS.values())[kernel.value - 1][1])

    def cuFuncSetAttribute(self, kernel, attribute, value):
        self.calls.append(("shared", attribute, value))
        return 0

    def cuGetErrorString(self, error, text):
        text._obj.value = b"a sticky error"
        return 0

    def cuStreamSynchronize(self, stream):
        assert stream.value == 5
        return self.broken

    def cuLaunchKernelEx(self, config, kernel, nothing, extra):
        if self.errors:
            return self.errors.pop()
        # As cuda.h has it: seven sizes, the stream, and a list of attributes.
        *sizes, stream, attributes, attribute_count = struct.unpack(
            "7I4xQQI", ctypes.string_at(config.value, 52)
        )
        assert nothing is None and attributes == attribute_count == 0
        extra = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
        function, count = list(self.KERNELS.values())[kernel.value - 1]
        bytes_of = ctypes.cast(extra[3], ctypes.POINTER(ctypes.c_size_t))[0]
        assert (extra[0], extra[2], extra[4], bytes_of) == (1, 2, None, 8 * count)
        function(*ctypes.cast(extra[1], ctypes.POINTER(ctypes.c_uint64))[:count])
        self.calls.append((function.__name__, sizes, stream))
        return 0

    def cuGraphCreate(self, graph, flags):
        assert flags == 0 and self.context
        self.graphs.append([])
        graph._obj.value = len(self.graphs)
        return 0

    def cuGraphAddKernelNode_v2(self, node, graph, before, count, facts):
        nodes = self.graphs[graph.value - 1]
        # Each follows the one before.
        assert count.value == min(len(nodes), 1) and before[0] == (len(nodes) or None)
        nodes.append(None)
        node._obj.value = len(nodes)
        return self.cuGraphExecKernelNodeSetParams_v2(graph, node._obj, facts)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0

    def cuGraphInstantiateWithFlags(self, ready, graph, flags):
        assert flags.value == 0 and self.mode == _driver.RELAXED_CAPTURE
        assert not _plan.is_capturing(), "not permitted when stream is capturing"
        ready._obj.value = graph.value
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, ready, node, facts):
        if self.errors:
            return self.errors.pop()
        # As cuda.h has it; what a pointer points to is read now, as the driver does.
        kernel, *sizes, parameters, extra, other, context = struct.unpack(
            "Q7I4xQQQQ", ctypes.string_at(facts.value, 72)
        )
        assert extra == other == context == 0
        function, count = list(self.KERNELS.values())[kernel - 1]
        if function is mapped:
            places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_uint64))[: len(LAYOUT)]
            values = [0] * count
            for place, (offset, size) in zip(places, LAYOUT, strict=True):
                words = struct.unpack(f"{size // 8}Q", ctypes.string_at(place, size))
                values[offset // 8 : (offset + size) // 8] = words
        else:
            places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_uint64))[:count]
            values = [ctypes.c_uint64.from_address(place).value for place in places]
        self.graphs[ready.value - 1][node.value - 1] = function, sizes, values
        return 0

    def cuGraphLaunch(self, ready, stream):
        for function, sizes, values in self.graphs[ready.value - 1]:
            function(*values)
            self.calls.append((function.__name__, sizes, stream.value))
        self.calls.append("as one")
        return 0

    def cuMemcpyDtoDAsync_v2(self, target, source, count, stream):
        ctypes.memmove(target.value, source.value, count.value)
        self.calls.append(("copy", count.value, stream.value))
        return 0

    def cuMemsetD32Async(self, target, value, count, stream):
        words = (ctypes.c_uint32 * count.value).from_address(target.value)
        words[:] = [value.value] * count.value
        self.calls.append(("fill", count.value, stream.value))
        return 0


@pytest.fixture
def driver(monkeypatch):
    """The stand-in, for tensors on a CPU."""
    found = Driver()
    monkeypatch.setattr(_driver, "library", lambda: found)
    stream = types.SimpleNamespace(query=lambda: None, cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 5, raising=False)

    def empty_strided(size, stride, dtype):
        assert type(size) is type(stride) is tuple
        return torch.empty_strided(size, stride, dtype=dtype)

    monkeypatch.setattr(_plan, "empty_strided", empty_strided)
    monkeypatch.setattr(_plan, "is_capturing", lambda: False)
    return found


def executable(**changes):
    """(x, y) -> (x + y) * y, and ones; on the way (x + y)**2, which nothing reads."""
    x, y, out, square, ones = (Slice(n, 0, SIZE) for n in (1, 2, 5, 4, 7))
    total, copied = Slice(3, 0, SIZE), Slice(3, FURTHER, SIZE)
    big, small = (2, 1, 1, 32, 1, 1, 50_000), (1, 1, 1, 64, 2, 1, 0)
    steps = (
        Launch("add", b"ELF 1", big[:3], big[3:6], big[6], (x, y, total), (total,)),
        Copy(y, copied),
        Launch(
            *("times", b"ELF 2", small[:3], small[3:6], small[6]),
            (total, copied, out, square),
            (out, square),
        ),
        Fill(ones, 0x3F800000),
    )
    allocations = {
        1: Allocation(SIZE, 0, False),
        2: Allocation(SIZE, 1, False),
        3: Allocation(FURTHER + SIZE, None, False),
        4: Allocation(SIZE, None, False),
        5: Allocation(SIZE, None, False),
        6: Allocation(99, None, False),
        7: Allocation(SIZE, None, False),
    }
    return Executable(allocations | changes, steps, (5, 7))


def plan(made=None, shape=(1, 2, 3), results=2):
    made = made or executable()
    like = [torch.empty(shape) for _ in range(2)]
    return _direct.Plan(made, like, like[:results], _direct.Kernels(made))


def test_a_plan(driver, monkeypatch):
    made = plan()
    x, y = torch.randn(2, 1, 2, 3)
    for stream in (5, 5, 0, 7):
        driver.calls.clear()
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _, stream=stream: stream)
        out, ones = made([x, y])
        assert torch.equal(out, (x + y) * y) and torch.equal(ones, torch.ones(1, 2, 3))
        assert driver.calls == [
            ("add", [2, 1, 1, 32, 1, 1, 50_000], stream),
            ("copy", SIZE, stream),
            ("times", [1, 1, 1, 64, 2, 1, 0], stream),
            ("fill", 6, stream),
        ]
    assert {stream: len(idle) for stream, idle in made.idle.items()} == {5: 1, 0: 1, 7: 1}
    assert made.scratch_bytes == 256


def test_kernels_alone_are_launched_as_one(driver, monkeypatch):
    """By a graph whose arguments are changed; where a graph is captured, each by itself."""
    whole = executable()
    first, _, second, _ = whole.steps
    total, _, *written = second.arguments
    second = dataclasses.replace(second, arguments=(total, Slice(2, 0, SIZE), *written))
    made = plan(Executable(whole.allocations, (first, second), (5,)), results=1)
    driver.context = None
    one_by_one = [("add", [2, 1, 1, 32, 1, 1, 50_000], 5), ("times", [1, 1, 1, 64, 2, 1, 0], 5)]
    for capturing in (True, False, False, True, False):
        monkeypatch.setattr(_plan, "is_capturing", lambda capturing=capturing: capturing)
        x, y = torch.randn(2, 1, 2, 3)
        driver.calls.clear()
        (out,) = made([x, y])
        assert torch.equal(out, (x + y) * y)
        assert driver.calls == one_by_one + ["as one"] * (not capturing)
        # A thread without a context, when the graph was made; then nothing is set again.
        assert driver.contexts == [77] * bool(driver.graphs)
    assert len(driver.graphs) == 1 and driver.mode == 0
    assert torch.equal(made([x, y], as_graph=False)[0], out) and driver.calls[-1] == one_by_one[-1]
    driver.errors = [_driver.INVALID_CONTEXT]
    assert torch.equal(made([x, y])[0], out) and driver.contexts == [77, 77]
    # Another stream has its own: launches of one graph would wait for each other.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7)
    assert torch.equal(made([x, y])[0], out) and len(driver.graphs) == 2
    assert driver.calls[-2][2] == 7


def by_maps(count):
    """(x, y) -> x + y, by so many launches of Mosaic GPU's kernel, of which each does all."""
    x, y, out = Slice(1, 0, SIZE), Slice(2, 0, SIZE), Slice(3, 0, SIZE)
    places = [
        _mosaic.Place(8 * TARGET, 2, 0),
        *(_mosaic.Place(8 * start, n, 0, MAP) for n, start in enumerate(MAPS)),
    ]
    constant = struct.pack("40Q", 77, *[0] * 39)
    parameters = _mosaic.Parameters(LAYOUT, constant, tuple(places))
    sizes = (2, 1, 1), (32, 1, 1), 0
    launch = Launch("mapped", b"ELF 3", *sizes, (out, x, y), (out,), parameters)
    allocations = {n: Allocation(SIZE, n - 1 if n < 3 else None, False) for n in (1, 2, 3)}
    return Executable(allocations, (launch,) * count, (3,))


@pytest.mark.parametrize("count", [1, 2])
def test_tensor_maps_get_the_addresses_of_each_call(driver, count):
    """One launch, and two as a graph."""
    found = plan(by_maps(count), results=1)
    for n in range(3):
        x, y = torch.randn(1, 2, 3), torch.full((1, 2, 3), float(n))
        assert torch.equal(found([x, y])[0], x + y)
    assert ("as one" in driver.calls) == (count > 1)


def test_tensor_maps_among_other_steps(driver):
    """(x, y) -> 2 x + y: by a copy of x, a launch with maps, and one without, which reads both."""
    x, y, out, copied, half = (Slice(n, 0, SIZE) for n in (1, 2, 3, 4, 5))
    (first,) = by_maps(1).steps
    first = dataclasses.replace(first, arguments=(half, copied, y), written=(half,))
    second = Launch("add", b"ELF 1", (2, 1, 1), (32, 1, 1), 0, (x, half, out), (out,))
    allocations = {n: Allocation(SIZE, n - 1 if n < 3 else None, False) for n in range(1, 6)}
    found = plan(Executable(allocations, (Copy(x, copied), first, second), (3,)), results=1)
    for n in range(3):
        x, y = torch.randn(1, 2, 3), torch.full((1, 2, 3), float(n))
        assert torch.equal(found([x, y])[0], x + (x + y))


def test_a_tensor_map_of_another_form_has_no_plan(driver, monkeypatch):
    monkeypatch.setattr(driver, "maps_are_known", False)
    with pytest.raises(_direct.ClosedError, match="differ in more than their addresses"):
        plan(by_maps(1), results=1)


def test_constants_lie_in_the_machine_code(driver):
    """x + 2, by the code of a kernel and by one that no kernel is in."""
    driver.constants = {b"two": np.zeros(6, np.float32)}
    content = np.full(6, 2, np.float32).tobytes()
    x, two, out = (Slice(n, 0, SIZE) for n in (1, 3, 5))
    for code in (b"ELF 1", b"ELF 0"):
        driver.calls.clear()
        made = Executable(
            executable().allocations | {3: Allocation(SIZE, None, True)},
            (Launch("add", b"ELF 1", (1, 1, 1), (32, 1, 1), 0, (x, two, out), (out,)),),
            (5,),
            {3: Constant("two", content)},
            code,
        )
        driver.constants[b"two"][:] = 0  # as the machine code has it when it is loaded
        tensor = torch.randn(1, 2, 3)
        found = plan(made, results=1)
        loads = [call for call in driver.calls if call[0] == "load"]
        assert loads == [("load", each) for each in dict.fromkeys((b"ELF 1", code))]
        assert found.scratch_bytes == 0
        assert torch.equal(found([tensor, tensor])[0], tensor + 2)
    # XLA reserves at least 64 bytes.
    driver.constants = {b"two": np.zeros(16, np.float32)}
    assert torch.equal(plan(made, results=1)([tensor, tensor])[0], tensor + 2)
    assert driver.constants[b"two"].tolist() == [2] * 6 + [0] * 10
    for other in (5, 7, 17):
        driver.constants = {b"two": np.full(other, 2, np.float32)}
        with pytest.raises(_direct.ClosedError, match=f"symbol='two'.* has {4 * other} bytes"):
            plan(made, results=1)


def kernels_alone():
    """An executable of two kernels, which are launched as a graph."""
    whole = executable()
    first, _, second, _ = whole.steps
    total, _, *written = second.arguments
    second = dataclasses.replace(second, arguments=(total, Slice(2, 0, SIZE), *written))
    return Executable(whole.allocations, (first, second), (5,))


def test_what_is_dropped_is_unloaded_after_its_launches(driver, monkeypatch):
    monkeypatch.setattr(_kernels, "retired", retired := collections.deque())
    x, y = torch.randn(2, 1, 2, 3)
    made = plan(kernels_alone(), results=1)
    for stream in (0, 5, 7):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _, stream=stream: stream)
        made([x, y])
    other = made.with_exchanged([True])
    del made
    _kernels.unload_retired()
    assert not driver.destroyed and not retired
    # It is retired with its last reference, in whatever thread that is: nothing is asked there.
    del other
    assert len(retired) == 1 and not driver.destroyed
    driver.busy, driver.capturing = {5}, {7}
    for _ in range(2):
        _kernels.unload_retired()
        assert len(retired) == 1 and not driver.destroyed and driver.mode == 0
        assert set(retired[0].events) == {0, 5}
    driver.capturing = set()
    _kernels.unload_retired()
    assert len(retired) == 1 and not driver.destroyed
    driver.busy = set()
    _kernels.unload_retired()
    wanted = ["event"] * 3 + ["ready graph", "graph"] * 3 + ["module"] * 2
    assert driver.destroyed == wanted and not retired and driver.pushed is None


def test_what_a_cuda_graph_captured_stays(driver, monkeypatch):
    monkeypatch.setattr(_kernels, "retired", retired := collections.deque())
    program = _programs.Program(call_of("attention", ATTENTION), jax.devices()[0])
    program.answer.plans["shapes"] = made = plan(kernels_alone(), results=1)
    program.forward.plans["shapes"] = _direct.ClosedError("planted")
    x, y = torch.randn(2, 1, 2, 3)
    made([x, y])
    assert not program.is_pinned()
    monkeypatch.setattr(_plan, "is_capturing", lambda: True)
    made.with_exchanged([True])([x, y])
    monkeypatch.setattr(_plan, "is_capturing", lambda: False)
    assert program.is_pinned()
    del made
    program.answer.plans.clear()
    _kernels.unload_retired()
    assert not driver.destroyed and not retired


def test_what_nothing_reads_has_a_place_for_all(driver, monkeypatch):
    x, y = torch.randn(2, 1, 2, 3)
    nowhere = _plan.unread_memory(torch.device("cpu"))
    assert torch.equal(plan()([x, y])[0], (x + y) * y)
    assert torch.equal(nowhere[:SIZE].view(torch.float32), ((x + y) ** 2).flatten())
    monkeypatch.setattr(_plan, "UNREAD_BYTES", SIZE - 1)
    made, nowhere[:SIZE] = plan(), 0
    assert torch.equal(made([x, y])[0], (x + y) * y) and made.scratch_bytes == 512
    assert not nowhere[:SIZE].any()


def test_a_plan_keeps_the_memory_that_it_writes_to(driver, monkeypatch):
    """Also where it is its alone, since two threads asked for the first at once."""
    found = []

    def its_own(place):
        memory = torch.empty(_plan.UNREAD_BYTES, dtype=torch.uint8)
        found.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(_plan, "unread_memory", its_own)
    made = plan().with_exchanged([True, False])
    assert found[0]().data_ptr() == made.fixed[0]


def test_kernels_are_loaded_once(driver):
    plan()
    maximum = ("shared", _driver.MAX_DYNAMIC_SHARED_SIZE_BYTES, 50_000)
    assert driver.calls == [("load", b"ELF 1"), maximum, ("load", b"ELF 2")]


def test_tensors_as_they_lie(driver):
    """Misaligned, negated and unstored ones are copied; exchanged results come back as views."""
    x, y = torch.randn(2, 1, 2, 3)
    aside = torch.empty(7)[1:].view(1, 2, 3).copy_(x)
    negated = torch._neg_view(y)
    assert aside.data_ptr() % _bridge.ALIGNMENT
    out, _ = plan()([aside, negated])
    assert torch.equal(out, (x - y) * -y)
    out, _ = plan()([torch._efficientzerotensor((1, 2, 3)), y])
    assert torch.equal(out, y * y)
    out, ones = plan().with_exchanged([True, False, True])([x, y])
    assert torch.equal(out.transpose(1, 2), (x + y) * y) and out.shape == (1, 3, 2)
    assert ones.shape == (1, 2, 3) and ones.is_contiguous()


def test_threads_without_a_context_and_errors(driver):
    made = plan()
    x, y = torch.randn(2, 1, 2, 3)
    driver.errors = [_driver.INVALID_CONTEXT]
    assert torch.equal(made([x, y])[0], (x + y) * y) and driver.contexts == [77]
    driver.errors = [700]
    with pytest.raises(RuntimeError, match="launched from PyTorch: a sticky error"):
        made([x, y])
    driver.errors = [_driver.OUT_OF_MEMORY]
    with pytest.raises(torch.OutOfMemoryError, match="launched from PyTorch"):
        made([x, y])


def test_what_does_not_fit_has_no_plan(driver):
    for changes, reason in [
        ({1: Allocation(SIZE + 4, 0, False)}, f"has {SIZE + 4} bytes"),
        ({5: Allocation(SIZE * 2, None, False)}, f"has {SIZE * 2} bytes"),
        ({1: Allocation(SIZE, 2, False)}, "a parameter 2 of 2"),
        ({5: Allocation(SIZE, 1, False)}, "a result is a parameter"),
    ]:
        made = executable()
        with pytest.raises(_direct.ClosedError, match=reason):
            plan(Executable(made.allocations | changes, made.steps, made.results))
    made = executable()
    with pytest.raises(_direct.ClosedError, match="1 results for 2"):
        plan(Executable(made.allocations, made.steps, (5,)))
    driver.parameter_size = 4
    with pytest.raises(_direct.ClosedError, match="'add' has other parameters"):
        plan()


def test_other_bits_than_jaxs():
    nan = torch.tensor([float("nan"), 1.0])
    _direct._compare([nan, torch.ones(2, dtype=torch.int8)], [nan, torch.ones(2).char()])
    with pytest.raises(_direct.ClosedError, match="result 1 .* JAX gives, in 2 numbers of 2"):
        _direct._compare([nan, torch.zeros(2)], [nan, -torch.zeros(2)])
    with pytest.raises(_direct.ClosedError, match="result 0"):
        _direct._compare([nan.bfloat16()], [nan.bfloat16()[None]])


def test_compiled_for_a_plan():
    compiled, results = _direct._compiled(
        lambda x, y: [x + 1, (x.sum(0), jnp.zeros(2, jnp.bool_))], [torch.ones(2, 3)] * 2
    )
    facts = [(tuple(one.shape), one.dtype, one.is_meta) for one in results]
    assert facts == [
        ((2, 3), torch.float32, True),
        ((3,), torch.float32, True),
        ((2,), torch.bool, True),
    ]
    assert len(compiled.in_avals[0]) == 2
    with pytest.raises(_executable.UnknownError):
        _executable.read(compiled.runtime_executable().serialize())


@pytest.fixture
def building(driver, monkeypatch):
    """A function whose plan is built on a CPU: of JAX it is what the stand-in's kernels are."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(_executable, "read", lambda _: executable())
    place = jax.devices()[0]
    return lambda: _programs.Function(lambda x, y: [(x + y) * y, jnp.ones_like(x)], place)


def test_a_plan_is_tried_on_numbers_of_its_own(building, driver, monkeypatch):
    """Those of a first call may hide what is wrong; and nothing of the trial is kept."""
    drawn, of_first = [], torch.zeros(1, 2, 3)

    def draw(tensors, draw=_direct._drawn):
        found = draw(tensors)
        drawn.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr(_direct, "_drawn", draw)
    before = torch.get_rng_state()
    assert isinstance(_direct.plan_of(building(), [of_first] * 2), _direct.Plan)
    wrong = {b"add": (lambda x, y, out: add(x, x, out), 3)}
    monkeypatch.setattr(driver, "KERNELS", driver.KERNELS | wrong, raising=False)
    closed = _direct.plan_of(building(), [of_first] * 2)
    assert isinstance(closed, _direct.ClosedError) and "is not what JAX gives" in str(closed)
    assert len(drawn) == 4 and not any(each() is not None for each in drawn)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("code", [700, 716, 719])
@pytest.mark.parametrize("found_by", ["the driver", "PyTorch", "JAX"])
def test_a_trial_that_breaks_the_gpu_is_an_error(building, driver, monkeypatch, code, found_by):
    """Every road would fail from then on: it is not for a reason to take another one."""
    driver.broken = code
    error = {
        "the driver": None,
        "PyTorch": RuntimeError("CUDA error: an illegal memory access was encountered"),
        "JAX": jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"),
    }[found_by]

    def fails(*arguments):
        raise error

    if error is None:
        driver.errors = [code]
    else:
        name = "_compare" if found_by == "PyTorch" else "_bridge.execute"
        monkeypatch.setattr(f"ato_torch._direct.{name}", fails)
    function, tensors = building(), [torch.ones(1, 2, 3)] * 2
    with pytest.raises(RuntimeError, match="has left CUDA unusable .* a sticky error.*_DIRECT=0"):
        _direct.plan_of(function, tensors)
    assert not function.plans and not function.short_of_memory


def test_an_error_that_breaks_nothing_closes_the_road(building, driver):
    driver.errors = [1]  # an invalid value
    function, tensors = building(), [torch.ones(1, 2, 3)] * 2
    with pytest.warns(RuntimeWarning, match="a kernel launched from PyTorch: a sticky error"):
        closed = _direct.plan_of(function, tensors)
    assert isinstance(closed, _direct.ClosedError)
    assert function.plans and _direct.plan_of(function, tensors) is closed


@pytest.fixture
def unwarned(monkeypatch):
    monkeypatch.setattr(_direct, "_warned", set())


def test_a_call_that_does_not_go_direct_says_so_once(building, unwarned, monkeypatch):
    """For each reason, whatever numbers are in it; not again for another shape or program."""
    reasons = iter(["a step of 3 bytes", "a step of 4 bytes", "a while", "a step of 5 bytes"])

    def read(_):
        raise _executable.UnknownError(next(reasons))

    monkeypatch.setattr(_executable, "read", read)
    said = []
    for shape in [(1, 2, 3), (1, 2, 3), (2, 2, 3), (3, 2, 3)]:
        function, tensors = building(), [torch.ones(shape)] * 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                closed = _direct.plan_of(function, tensors)
            said.append([str(each.message) for each in caught])
            assert isinstance(closed, _direct.ClosedError)
    assert [len(each) for each in said] == [1, 0, 1, 0]
    for part in (
        *("is not understood: a step of 3 bytes", "10 times as long", "no CUDA graph"),
        *("ato_torch.explain", "ATO_TORCH_DIRECT=0"),
    ):
        assert part in said[0][0]


def test_no_warning_where_a_plan_is_or_nothing_is_to_launch(building, unwarned, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(_direct.plan_of(building(), [torch.ones(1, 2, 3)] * 2), _direct.Plan)
        closed = _direct.plan_of(building(), [torch.ones(0, 2, 3)] * 2)
    assert str(closed) == "an array is empty"


def test_the_environment_turns_the_road_off(building, driver, unwarned, monkeypatch):
    """And says so where it is asked: nothing is compiled, launched or warned of."""
    tensors = [torch.ones(1, 2, 3)] * 2
    monkeypatch.setenv("ATO_TORCH_DIRECT", "0")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    function = building()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        road = explaining._road(function, tensors)
        out, _ = _direct.execute(function, tensors)
    told = "through JAX (ATO_TORCH_DIRECT=0 in the environment turns direct launches off)"
    assert str(road) == told
    assert torch.equal(out, torch.full((1, 2, 3), 2.0)) and not driver.calls
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph.*ATO_TORCH_DIRECT=0 in the environment"):
        _direct.execute(function, tensors)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for value in ("1", ""):
        monkeypatch.setenv("ATO_TORCH_DIRECT", value)
        assert isinstance(_direct.plan_of(building(), tensors), _direct.Plan)


@pytest.mark.parametrize("value", ["no", "false", "00", " 0"])
def test_the_environment_says_0_or_1(building, monkeypatch, value):
    monkeypatch.setenv("ATO_TORCH_DIRECT", value)
    with pytest.raises(ValueError, match=f"ATO_TORCH_DIRECT must be 0, .* got '{value}'"):
        _direct.plan_of(building(), [torch.ones(1, 2, 3)] * 2)
    # At once, too: a call may be hours away.
    with pytest.raises(ValueError, match="ATO_TORCH_DIRECT must be 0"):
        importlib.reload(ato_torch)


def test_numbers_drawn():
    turned = torch.randn(2, 3, 4).bfloat16().transpose(0, 1)
    given = [turned, turned, -torch.rand(9), torch.rand(9), torch.arange(3), torch.ones(2).bool()]
    found = _direct._drawn(given)
    for one, other in zip(found, given, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], turned)
    assert (found[0] < 0).any() and (found[0] > 0).any()
    assert (found[2] < 0).all() and (found[3] > 0).all()
    assert found[4] is given[4] and found[5] is given[5]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        None,
    ],
    ids=["PyTorch's", "XLA's", "the driver's"],
)
def test_memory_may_suffice_another_time(building, driver, monkeypatch, error):
    """What is compiled in vain is tried again, but ever less often."""
    kinds, tries, freed = [], [], []

    def compiled(*arguments, compiled=_direct._compiled):
        tries.append(len(kinds) + 1)
        if len(tries) < 7:
            if error is None:
                driver.errors.append(_driver.OUT_OF_MEMORY)
            else:
                raise error
        return compiled(*arguments)

    monkeypatch.setattr(_direct, "_compiled", compiled)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(len(kinds) + 1))
    function, tensors = building(), [torch.ones(1, 2, 3)] * 2
    while len(kinds) < 9:
        kinds.append(type(_direct.plan_of(function, tensors)))
    assert kinds == [_direct.NoMemoryError] * 7 + [_direct.Plan] * 2
    # Each time once more after PyTorch has given back what it does not use.
    assert tries == [1, 1, 2, 2, 4, 4, 8] and freed == [1, 2, 4]
    assert not function.short_of_memory


def test_roads_are_told(monkeypatch, driver):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    on_gpu = [torch.ones(4)] * 2
    for found, copied, told in [
        (_direct.ClosedError("it is old"), (), "through JAX (it is old)"),
        (plan(), (False, False), "direct (add, copy, times, fill)"),
        (plan(), (False, True), "direct (a copy of 1 tensor, add, copy, times, fill)"),
        (plan(), (True, True), "direct (a copy of 2 tensors, add, copy, times, fill)"),
    ]:
        monkeypatch.setattr(_direct, "plan_of", lambda function, tensors, found=found: found)
        monkeypatch.setattr(
            _direct, "strided", lambda _, plan, tensors, copied=copied: (plan, copied)
        )
        assert str(explaining._road(None, on_gpu)) == told


def test_a_known_call_waits_for_memory_too(building, driver, monkeypatch):
    """A call that was known while memory was short goes direct once it is not."""
    is_short, calls = [True], []

    def build(function, tensors):
        if is_short[0]:
            return _direct.NoMemoryError("planted")
        return types.SimpleNamespace(is_captured=False, with_exchanged=lambda *_: calls.append)

    monkeypatch.setattr(_direct, "_build", build)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(_bridge, "has_gpu", lambda: True)
    monkeypatch.setattr(_direct, "execute", lambda function, tensors: [tensors[0]])
    _checked_calls.checked.clear()
    _programs.kept.clear()
    tensors = [torch.randn(1, 2, 5, 4) for _ in range(3)]
    for _ in range(3):
        ato_torch.attention(*tensors)
    (plan,) = _checked_calls.checked.values()
    assert plan.ready is None
    is_short[0] = False
    monkeypatch.setattr(_direct, "_build", lambda *_: Zeros(plan.program.answer, tensors))
    for _ in range(4):
        ato_torch.attention(*tensors)
    assert plan.ready
    # The backward's, likewise.
    known = _known.Known(plan.program, plan.ready, False)
    monkeypatch.setattr(_direct, "ready", lambda *_: None)
    given = [*tensors, tensors[0], tensors[0]]
    assert known.backward((True,) * 3, given) is None and not known.backwards
    monkeypatch.setattr(_direct, "ready", lambda *_: False)
    assert known.backward((True,) * 3, given) is None and known.backwards


def test_without_a_plan_jax_does_it(monkeypatch):
    program = _programs.Program(call_of("attention", ATTENTION), jax.devices()[0])
    tensors = [x[:, :, :9].contiguous() for x in inputs(torch.float32, "cpu")]
    wanted = _bridge.execute(program.answer.jitted, tensors)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="make the call once before"):
        _direct.plan_of(program.answer, tensors)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # There is no GPU: to build a plan fails, in one way or another, and is not tried again.
    assert torch.equal(_direct.execute(program.answer, tensors)[0], wanted[0])
    ((key, closed),) = program.answer.plans.items()
    assert isinstance(closed, _direct.ClosedError)
    assert _direct.plan_of(program.answer, tensors) is closed
    assert _direct.ready(program.answer, tensors) is False
    # A CUDA graph would not hold what JAX launches; what is in the way is told.
    program.answer.plans[key] = _direct.ClosedError("it is old")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph.*it is old"):
        _direct.execute(program.answer, tensors)


class Known(list):
    """What plans were called with; `reads_strides` if they read tensors that are not contiguous."""

    reads_strides = False


@pytest.fixture
def known(monkeypatch):
    """Plans that are JAX, on a CPU; what they were called with is appended."""
    calls = Known()

    def ready(function, tensors, are_exchanged=(), exchanged_results=()):
        are_exchanged = are_exchanged or [False] * len(tensors)

        def must_be_copied(tensors):
            lie = exchanged(tensors, are_exchanged)
            return tuple(not (calls.reads_strides or x.is_contiguous()) for x in lie)

        def plan(tensors):
            calls.append([tensor.stride() for tensor in tensors])
            assert not any(must_be_copied(tensors))
            results = _bridge.execute(function.jitted, exchanged(tensors, are_exchanged))
            which = exchanged_results[: len(results)]
            return exchanged(results, which) if any(are_exchanged) else results

        return plan, must_be_copied(tensors)

    monkeypatch.setattr(_direct, "ready", ready)
    return calls


class Zeros:
    """In the place of a plan: results of the right shapes."""

    is_captured = False

    def __init__(self, function, tensors):
        arrays = [jnp.asarray(tensor.detach().numpy()) for tensor in tensors]
        self.results = [
            torch.zeros(info.shape, dtype=getattr(torch, str(info.dtype)))
            for info in jax.eval_shape(function.traced, *arrays)
        ]

    def with_exchanged(self, which, tensors):
        found = copy.copy(self)
        found.results = exchanged(self.results, which[: len(self.results)])
        return found

    def __call__(self, tensors):
        return [result.clone() for result in self.results]


@pytest.mark.parametrize("name", ["attention", "lse", "linear", "linear state"])
@pytest.mark.parametrize("are_exchanged", [False, True])
def test_what_a_cuda_graph_captures_was_built_before(monkeypatch, name, are_exchanged):
    """One call, forward and backward, is enough: those like it find what that one built, the second
    one, which takes another way there, included."""
    built = []

    def build(function, tensors):
        built.append(function)
        return Zeros(function, tensors)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(_bridge, "has_gpu", lambda: True)
    monkeypatch.setattr(_direct, "_build", build)
    _checked_calls.checked.clear()
    _programs.kept.clear()
    shape = (1, 2, 5, 4)
    drawn = [torch.randn(shape) for _ in range(3)]
    leaves = [x.transpose(1, 2) if are_exchanged else x for x in drawn]
    leaves = [x.detach().requires_grad_() for x in leaves]
    for n in range(4):
        out, *rest = torch.utils._pytree.tree_leaves(CALLS[name](*leaves))
        torch.autograd.grad([out, *rest], leaves, [torch.ones_like(x) for x in (out, *rest)])
        assert len(built) == len(set(map(id, built))) == 2, n


def exchanged(tensors, which):
    return [x.transpose(1, 2) if is_ else x for x, is_ in zip(tensors, which, strict=True)]


@pytest.mark.parametrize("name", ["attention", "lse", "linear", "linear state"])
@pytest.mark.parametrize("are_exchanged", [False, True])
def test_a_known_call_is_what_it_was(known, name, are_exchanged):
    tensors = [tensor[:, :, :9].contiguous() for tensor in inputs(torch.float32, "cpu")]
    if are_exchanged:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    function = CALLS[name]

    def step(weight):
        out, *rest = torch.utils._pytree.tree_leaves(function(*leaves))
        loss = (out * weight).sum() + sum(part.sum() for part in rest)
        return [out.detach(), *torch.autograd.grad(loss, leaves)]

    for weight in (torch.ones(()), torch.randn(B, H, 9, D)):
        known.clear()
        wanted = step(weight)
        # The first call of its kind goes through the checks, the second one here.
        _checked_calls.checked.clear()
        for _ in range(3):
            found = step(weight)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert len(known) >= (2 if name in ("attention", "linear") else 1)
        with torch.no_grad():
            torch.testing.assert_close(
                torch.utils._pytree.tree_leaves([function(*leaves) for _ in range(3)][-1])[0],
                wanted[0],
            )
    # Only part of the gradients; and a derivative of second order, refused.
    leaves[1].requires_grad_(False)
    out = [function(*leaves) for _ in range(3)][-1]
    out = out if isinstance(out, torch.Tensor) else out[0]
    gradients = torch.autograd.grad(out.sum(), leaves[::2], retain_graph=True)
    assert [each.shape for each in gradients] == [leaves[0].shape, leaves[2].shape]
    with pytest.raises(NotImplementedError, match="second order"):
        (again,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
        again.sum().backward()


def parts(where="cpu", dtype=torch.float32, length=T, transposed=True):
    """Query, key and value as parts of one projection's result."""
    generator = torch.Generator().manual_seed(0)
    shape = (B, length, H + 2 * G, D) if transposed else (B, H + 2 * G, length, D)
    whole = torch.randn(shape, generator=generator).to(where, dtype)
    found = whole.split((H, G, G), dim=2 if transposed else 1)
    return [part.transpose(1, 2) if transposed else part for part in found]


def test_a_profiler_names_a_known_call(known):
    """Each pass once, the backward pass by its plan included."""
    _checked_calls.checked.clear()
    leaves = [x[:, :, :9].clone().requires_grad_() for x in inputs(torch.float32, "cpu")]
    for _ in range(3):
        known.clear()
        with torch.profiler.profile() as profile:
            torch.autograd.grad(CALLS["attention"](*leaves).sum(), leaves)
        names = [event.name for event in profile.events() if event.name.startswith("ato::")]
        assert sorted(names) == ["ato::attention", "ato::attention_backward"]
    assert len(known) == 2


def test_a_batch_of_cotangents(known):
    """PyTorch's older vmap, of a first call and of known ones: a loop."""
    _checked_calls.checked.clear()
    leaves = [x[:, :, :9].clone().requires_grad_() for x in inputs(torch.float32, "cpu")]
    for name in ("attention", "attention", "attention", "linear state"):
        out, *rest = torch.utils._pytree.tree_leaves(CALLS[name](*leaves))
        cotangents = [torch.randn(3, *each.shape) for each in (out, *rest)]
        found = torch.autograd.grad(
            (out, *rest), leaves, cotangents, retain_graph=True, is_grads_batched=True
        )
        for n in range(3):
            each = [cotangent[n] for cotangent in cotangents]
            wanted = torch.autograd.grad((out, *rest), leaves, each, retain_graph=True)
            torch.testing.assert_close([gradient[n] for gradient in found], list(wanted))
    assert known
    nested = torch._vmap_internals._vmap(
        lambda rows: torch.autograd.grad(out, leaves, rows, is_grads_batched=True)
    )
    with pytest.raises(NotImplementedError, match="on one level: use torch.func.jacrev"):
        nested(torch.randn(2, 3, *out.shape))
    query, key, value = (leaf.detach()[:1, :, :2, :3].contiguous() for leaf in leaves)

    def of_query(query):
        return CALLS["attention"](query, key, value)

    jacobian = torch.autograd.functional.jacobian
    for create_graph in (False, True):
        found = jacobian(of_query, query, vectorize=True, create_graph=create_graph)
        torch.testing.assert_close(found, jacobian(of_query, query))


def test_explain_on_a_cpu():
    tensors = [x[:, :, :9].clone() for x in inputs(torch.float32, "cpu")]
    told = ato_torch.explain(CALLS["causal"], *tensors)
    assert str(told.forward) == "through JAX (tensors on cpu, not on a CUDA device)"
    assert told.backward is None and "no gradient is asked for" in str(told)
    told = ato_torch.explain(CALLS["causal"], tensors[0].requires_grad_(), *tensors[1:])
    assert told.backward == told.forward
    with pytest.raises(ValueError, match="does not call ato_torch"):
        ato_torch.explain(torch.add, *tensors[:1], 1)


CALLS = {
    "lse": lambda q, k, v: ato_torch.attention(q, k, v, enable_gqa=True, return_lse=True),
    "linear state": lambda q, k, v: ato_torch.linear_attention(q, k, v, return_state=True),
    "attention": lambda q, k, v: ato_torch.attention(q, k, v, enable_gqa=True),
    "causal": lambda q, k, v: ato_torch.attention(q, k, v, is_causal=True, enable_gqa=True),
    "linear": ato_torch.linear_attention,
    "linear causal": lambda q, k, v: ato_torch.linear_attention(q, k, v, causal=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "options", "dtype"),
    [
        ("attention", {}, torch.bfloat16),
        ("attention", {"causal": True}, torch.float16),
        ("attention", {"window": (64, 0), "softcap": 20.0}, torch.float32),
        ("linear_attention", {"causal": False}, torch.bfloat16),
        ("linear_attention", {"causal": False}, torch.float32),
        ("linear_attention", {"causal": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_the_numbers_by_the_plan(op, options, dtype):
    """Within the budgets of float64, what JAX gives to the bit, and the same each time."""
    tensors = inputs(dtype, "cuda")
    asked = (ATTENTION if op == "attention" else LINEAR) | options
    program = _programs.Program(call_of(op, asked, True), _bridge.jax_device(tensors[0].device))
    arrays = [jnp.asarray(tensor.float().cpu().numpy()) for tensor in tensors]
    arrays = [array.astype(str(dtype).removeprefix("torch.")) for array in arrays]
    wanted = numerics.oracle(op, *arrays, **asked)
    outputs = by_both(program.forward, tensors)
    cotangent = torch.tensor(np.asarray(wanted.cotangents, np.float32)).to(outputs[0])
    given = tuple(n == 0 for n in range(len(outputs)))
    gradients = by_both(program.backward((True,) * 3, given), [*tensors, *outputs, cotangent])
    names = ("out", "dq", "dk", "dv")
    numerics.compare(
        {
            name: jnp.asarray(tensor.float().cpu().numpy()).astype(arrays[0].dtype)
            for name, tensor in zip(names, (outputs[0], *gradients), strict=True)
        },
        wanted,
    )


def by_both(function, tensors):
    plan = _direct.plan_of(function, tensors)
    assert isinstance(plan, _direct.Plan), plan
    found, again = plan(tensors), plan(tensors)
    through_jax = _bridge.execute(function.jitted, tensors)
    for ours, same, theirs in zip(found, again, through_jax, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert torch.equal(ours, same) and torch.equal(ours, theirs)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 128, 64), (2, 2, 77, 96), (1, 2, 513, 128)])
def test_every_way_gives_the_same_bits(shape, causal):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).bfloat16().cuda() for _ in range(3)]
    for op, asked in (("attention", ATTENTION), ("linear_attention", LINEAR)):
        call = call_of(op, asked | {"causal": causal})
        by_both(_programs.Program(call, _bridge.jax_device(tensors[0].device)).answer, tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not _adapters.READS_LAUNCHES, reason="this JAX does not tell the launches")
@pytest.mark.parametrize(
    ("op", "shape", "options"),
    [
        ("attention", (2, 8, 1024, 128), {"causal": True}),
        ("attention", (2, 4, 1003, 64), {}),
        ("linear_attention", (1, 16, 16384, 128), {"causal": True}),
        ("linear_attention", (1, 16, 16384, 128), {"causal": False}),
    ],
    ids=str,
)
def test_hoppers_own_kernels_go_this_road(op, shape, options):
    """Chosen without a name, what JAX gives to the bit, at other addresses, and in a CUDA graph."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it needs a Hopper GPU")
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).bfloat16().cuda() for _ in range(4)]
    asked = (ATTENTION if op == "attention" else LINEAR) | options
    program = _programs.Program(call_of(op, asked, True), _bridge.jax_device(tensors[0].device))
    *qkv, cotangent = tensors
    outputs = by_both(program.forward, qkv)
    given = tuple(n == 0 for n in range(len(outputs)))
    backward = program.backward((True,) * 3, given)
    by_both(backward, [*qkv, *outputs, cotangent])
    for function, arrays in ((program.forward, qkv), (backward, [*qkv, *outputs, cotangent])):
        plan = _direct.plan_of(function, arrays)
        names = [step.name for step in plan.executable.steps if isinstance(step, Launch)]
        assert any("mosaic_gpu" in name for name in names), names
        moved = [tensor.clone() for tensor in arrays]
        wanted = plan(arrays)
        assert all(map(torch.equal, plan(moved), wanted))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = plan(moved)
        for tensor in found:
            tensor.zero_()
        graph.replay()
        assert all(map(torch.equal, found, wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(G,), (B, G, T)], ids=["head", "step"])
def test_a_decay_goes_direct(shape):
    """A step of its programs reads a constant in the machine code, which is written there first."""
    decay = -torch.rand(shape, generator=torch.Generator().manual_seed(0)).cuda()
    leaves = [tensor.requires_grad_() for tensor in inputs(where="cuda")]
    told = ato_torch.explain(ato_torch.linear_attention, *leaves, causal=True, decay=decay)
    assert told.forward.road == told.backward.road == "direct", told


@pytest.mark.gpu
def test_the_environment_turns_the_road_off_on_a_gpu(monkeypatch, unwarned):
    """Of a length that no other test has: what goes direct once keeps to it."""
    tensors = [tensor[:, :, :19].contiguous() for tensor in inputs(where="cuda")]
    monkeypatch.setenv("ATO_TORCH_DIRECT", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = ato_torch.explain(CALLS["causal"], *tensors)
    assert told.forward.road == "through JAX" and "ATO_TORCH_DIRECT=0" in told.forward.why, told


def check_a_graph_of(step, tensors):
    """A CUDA graph of `step` gives the step's bits for new numbers in the tensors."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for ours, theirs in zip(found, step(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "causal", "linear", "linear causal"])
def test_captured_in_a_cuda_graph(name):
    tensors = [tensor.requires_grad_() for tensor in inputs(where="cuda")]

    def step():
        out = CALLS[name](*tensors)
        return out, *torch.autograd.grad(out, tensors, torch.ones_like(out))

    check_a_graph_of(step, tensors)


@pytest.mark.gpu
def test_a_first_call_in_a_cuda_graph_is_refused():
    tensors = [tensor[:, :, :17].contiguous() for tensor in inputs(where="cuda")]
    with pytest.raises(RuntimeError, match="make the call once before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            CALLS["causal"](*tensors)


def test_options_of_xla(monkeypatch):
    """Those that keep XLA from choosing kernels by their times, if it knows them."""
    place = jax.devices()[0]
    _compiling._known.cache_clear()
    assert _compiling._known(place) == _compiling.OPTIONS
    _compiling._known.cache_clear()
    monkeypatch.setattr(_compiling, "OPTIONS", {"xla_gpu_name_that_is_gone": False})
    assert _compiling._known(place) is None
    _compiling._known.cache_clear()


# A call with sums over the pieces of the work, which XLA's own kernels take in several orders.
BITS_OF_A_PROCESS = """
import hashlib, torch, ato_torch
generator = torch.Generator("cuda").manual_seed(0)
q, k, v = (torch.randn(8, 8, 1024, 64, device="cuda", generator=generator) for _ in range(3))
out = ato_torch.linear_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
print(hashlib.sha256(out.view(torch.int16).cpu().numpy().tobytes()).hexdigest())
"""


@pytest.mark.gpu
def test_every_process_gives_the_same_bits():
    running = [
        subprocess.Popen([sys.executable, "-c", BITS_OF_A_PROCESS], stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    found = {each.communicate(timeout=300)[0].split()[-1] for each in running}
    assert len(found) == 1 and not any(each.returncode for each in running)


@pytest.mark.gpu
def test_a_thread_without_a_context():
    tensors = inputs(where="cuda")
    wanted = CALLS["causal"](*tensors)
    found = []
    thread = threading.Thread(target=lambda: found.append(CALLS["causal"](*tensors)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)


@pytest.mark.gpu
def test_a_step_of_linear_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, D, generator=generator).cuda() for heads in (H, G, G))
    state = ato_jax.LinearState(*(torch.zeros(shape).cuda() for shape in STATE.values()))
    out, found = ato_torch.linear_attention_step(q, k, v, state)
    assert not state.kv.any() and not state.k_sum.any()
    wanted = ato_torch.linear_attention(*(x[:, :, None] for x in (q, k, v)), causal=True)
    torch.testing.assert_close(out, wanted[:, :, 0])
    torch.testing.assert_close(found.k_sum, torch.nn.functional.elu(k) + 1)


@pytest.mark.gpu
def test_as_they_lie():
    """Permuted, misaligned and negated tensors, and cotangents that are not dense."""
    plain = inputs(where="cuda")
    permuted = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    _checked_calls.checked.clear()
    misaligned = [x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x) for x in plain]
    of_one = torch.cat([x.transpose(1, 2) for x in plain], dim=2).split((H, G, G), dim=2)
    of_one = [x.transpose(1, 2) for x in of_one]
    for name in ("causal", "linear causal"):
        found = []
        for tensors in (plain, permuted, misaligned, of_one):
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            for _ in range(3):
                out = CALLS[name](*leaves)
                gradients = torch.autograd.grad(out.sum(), leaves)
            for _ in range(3):
                answer = CALLS[name](*tensors)
            assert torch.equal(answer, out)
            like = permuted if tensors is of_one else tensors
            assert out.stride() == torch.empty_like(like[0]).stride()
            found.append([out.detach(), *gradients])
        torch.testing.assert_close(found[1], found[0], atol=1e-2, rtol=1e-2)
        for n, like in ((2, 0), (3, 1)):
            for ours, theirs in zip(found[n], found[like], strict=True):
                assert torch.equal(ours, theirs)
        told = ato_torch.explain(CALLS[name], *leaves)
        assert told.forward.road == told.backward.road == "direct", told
    plans = [plan for plan in _checked_calls.checked.values() if plan.exchanged]
    assert plans and all(plan.ready for plan in plans)


@pytest.mark.gpu
def test_compiled_with_cuda_graphs():
    """torch.compile leaves the op out of its graphs, and what comes out is the same."""
    tensors = inputs(where="cuda")
    compiled = torch.compile(lambda *tensors: 2 * CALLS["causal"](*tensors), mode="reduce-overhead")
    with torch.no_grad():
        wanted = 2 * CALLS["causal"](*tensors)
        for _ in range(4):
            assert torch.equal(compiled(*tensors), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "linear", "linear causal"])
def test_the_host_time_of_a_call(name):
    """At most 20 microseconds for a whole call; where other work slows the host, which it does to
    PyTorch's own in turn, a quarter more than that."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 4, 128, 64, generator=generator).bfloat16().cuda() for _ in range(3)]
    peer = torch.nn.functional.scaled_dot_product_attention

    def softmax(*tensors):
        return peer(*tensors, is_causal=True)

    def one_round(function):
        # So few that the launches do not wait for the GPU.
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            function(*tensors)
        return (time.perf_counter() - start) / 50

    rounds = [[one_round(each) for each in (CALLS[name], softmax)] for _ in range(21)]
    ours, its = map(statistics.median, zip(*rounds[1:], strict=True))
    assert ours <= max(20e-6, 1.25 * its), (ours, its)
