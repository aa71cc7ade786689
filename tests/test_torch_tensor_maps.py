"""Tensor maps of kernels that XLA compiled by Triton: a backward pass of softmax attention and one
of the delta rule, compiled for an H200 by JAX 0.11.2. Every sum that Triton can compute is Triton's
with tensor maps there; on a card it is so where that takes the least time. Of the machine code the
files hold the notes on parameters alone, of Mosaic GPU's kernels the host code too."""

# ruff: noqa: N802  the driver's functions have CUDA's names

import ctypes
import itertools
import struct
import types
import zlib

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

from ato_torch import _driver, _elf, _executable, _plan  # noqa: E402
from ato_torch._kernels import Kernels  # noqa: E402
from ato_torch._mosaic import Place, TensorMap  # noqa: E402
from ato_torch._protobuf import UnknownError  # noqa: E402
from tests.test_torch_executable import changed, message, plus, sample, to  # noqa: E402

pytestmark = pytest.mark.skipif(
    not _elf.runs_host_code(), reason="the host code is for Linux on x86-64"
)

SOFTMAX, DELTA_RULE = "attention_gradient_maps", "delta_rule_gradient_maps"
# CUDA's numbers: for unsigned integers of 1, 2 and 4 bytes, since XLA tells of elements their size
# alone, for a swizzle of 128 bytes and for none, and for fetching 128 bytes at once into the cache.
BYTE, HALF, WORD, SWIZZLED, PLAIN, FETCHED = 0, 1, 2, 3, 0, 2
MAP_BYTES = 128
B, H, T, D = 2, 8, 1024, 128
# delta[b, h, t] is the sum over D of dout, a byte of out's correction, and out. A block takes 16
# rows; a swizzle of 128 bytes takes rows of at most 128 bytes, so those of bfloat16 are cut.
ROWS = 16
HALVES = (D, T, H, B), (2 * D, 2 * D * T, 2 * D * T * H), (64, ROWS, 1, 1)
DELTA = [
    TensorMap(HALF, *HALVES, SWIZZLED, FETCHED),
    TensorMap(
        BYTE, (D, T, H, B), (D, D * T, D * T * H), (D, ROWS, 1, 1), SWIZZLED, FETCHED
    ),
    TensorMap(HALF, *HALVES, SWIZZLED, FETCHED),
    TensorMap(WORD, (T, H, B), (4 * T, 4 * T * H), (ROWS, 1, 1), PLAIN, FETCHED),
]
# The delta rule's dq and dk are sums over the heads that share a key head, [B, T, H, D] to
# [B, T, G, D]. A block takes 2 steps.
G, STEPS = 4, 2
SUMS = [
    TensorMap(
        *(HALF, (D, heads, T, B), (2 * D, 2 * D * heads, 2 * D * heads * T)),
        *((64, heads, STEPS, 1), SWIZZLED, FETCHED),
    )
    for heads in (H, G)
]
# Its launches that sum, dk and dq, and the one before them, whose last results they read.
GRADIENTS, SUM_DK, SUM_DQ = 4, 5, 9
# A tensor map begins at a multiple of 64 bytes of the constant bank, where parameters begin at 528.
FIRST = 48
# The program's parameters: q, k, v, out, lse, the correction of out, dout.
OUT, LSE, CORRECTION, DOUT = 3, 4, 5, 6


def arrays():
    like = [torch.empty(B, H, T, D, dtype=torch.bfloat16)] * 4 + [torch.empty(B, H, T)]
    like += [torch.empty(B, H, T, D, dtype=torch.int8), torch.empty(B, H, T, D).bfloat16()]
    return [torch.zeros_like(each) for each in like]


# What is read


def test_the_sum_ahead_of_softmax_attentions_gradients():
    found = _executable.read(sample(SOFTMAX))
    step, scaling, *_ = found.steps
    places = tuple(
        Place(FIRST + MAP_BYTES * n, n, 0, what) for n, what in enumerate(DELTA)
    )
    assert step.name == "input_reduce_fusion" and step.parameters.places == places
    assert step.parameters.layout == tuple((place.offset, MAP_BYTES) for place in places)
    assert step.parameters.constant == bytes(FIRST + 4 * MAP_BYTES)
    assert step.grid == (B * H * T // ROWS, 1, 1)
    parameters = [found.allocations[each.allocation].parameter for each in step.arguments]
    assert parameters == [DOUT, CORRECTION, OUT, None]
    assert scaling.name == "loop_multiply_fusion" and scaling.parameters is None


def test_the_sums_of_the_delta_rules_gradients():
    found = _executable.read(sample(DELTA_RULE))
    *_, dq, dk = found.steps[GRADIENTS].arguments
    for n, source, result in ((SUM_DK, dk, 1), (SUM_DQ, dq, 0)):
        step = found.steps[n]
        assert step.name == "loop_reduce_fusion" and step.grid == (B * T // STEPS, 1, 1)
        assert step.parameters.places == tuple(
            Place(FIRST + MAP_BYTES * n, n, 0, what) for n, what in enumerate(SUMS)
        )
        read, written = step.arguments
        assert (read, written.allocation) == (source, found.results[result])
        assert step.written == (written,)


# What is refused

METADATA = (13, 36, 6)
VALUE = (*METADATA, 1, 2)


@pytest.mark.parametrize(
    ("path", "edit", "reason"),
    [
        (METADATA, plus((2, b"")), "TmaMetadataProto has a field 2"),
        ((*METADATA, 1), plus((3, 1)), "ArgIndexToTmaInfoEntry has a field 3"),
        (VALUE, plus((10, 1)), "TmaDescriptorProto has a field 10"),
        ((*VALUE, 1), to(3), "elements of 3 bytes"),
        ((*VALUE, 2), to(b"\1\1\1\1\1\1"), "as its axes"),
        ((*VALUE, 2), to(b"\x80\1\xff\xff\1\x08\x02"), "reaches beyond its"),
        ((*VALUE, 3), to(b"\x80\x02"), "as its axes"),
        ((*VALUE, 5), to(b"\1\2\1\1"), "skips elements"),
        (VALUE, plus((6, 1)), "interleaves them"),
        (VALUE, plus((9, 1)), "fills with NaN"),
        ((*VALUE, 8), to(4), "the promotion 4"),
        ((*METADATA, 1), to(None), r"128, 128, 128\] bytes in place of \[.*8"),
        (METADATA, plus((1, message((1, 9), (2, b"")))), "as its axes"),
        ((13, 36, 1, 1), plus((1, 8)), "at an odd address"),
    ],
)
def test_what_is_not_known_is_refused(path, edit, reason):
    with pytest.raises(UnknownError, match=reason):
        _executable.read(changed(path, edit, SOFTMAX))


# What is launched


class Recorder:
    """Of CUDA's driver what a plan calls. It keeps what each tensor map is made of, and the bytes
    of each launch's parameters."""

    def __init__(self, executable):
        self.steps = {step.name.encode(): step for step in executable.steps}
        self.made, self.launched, self.nodes = {}, [], []

    def cuCtxGetCurrent(self, context):
        context._obj.value = 77
        return 0

    def cuModuleLoadData(self, module, code):
        return 0

    def cuModuleGetFunction(self, kernel, module, name):
        kernel._obj.value = 1 + list(self.steps).index(name)
        return 0

    def layout(self, kernel):
        name = list(self.steps)[kernel - 1]
        return _elf.parameters(self.steps[name].code, name.decode()) + [(0, 0)]

    def cuFuncGetParamInfo(self, kernel, n, offset, size):
        layout = self.layout(kernel.value)
        offset._obj.value, size._obj.value = layout[n]
        return int(n == len(layout) - 1)

    def cuFuncSetAttribute(self, kernel, attribute, value):
        return 0

    def cuTensorMapEncodeTiled(self, place, element, rank, address, *rest):
        sizes, strides, tile, steps, *modes = rest
        facts = (
            element.value, rank.value, *map(tuple, (sizes, strides, tile, steps)),
            *(mode.value for mode in modes),
        )  # fmt: skip
        words = [address.value, *(zlib.crc32(repr((facts, n)).encode()) for n in range(15))]
        ctypes.memmove(place.value, struct.pack("16Q", *words), MAP_BYTES)
        self.made[struct.pack("15Q", *words[1:])] = facts
        return 0

    def cuLaunchKernelEx(self, config, kernel, nothing, extra):
        extra = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
        size = ctypes.cast(extra[3], ctypes.POINTER(ctypes.c_size_t))[0]
        self.launched.append(ctypes.string_at(extra[1], size))
        return 0

    def cuGraphCreate(self, graph, flags):
        return 0

    def cuGraphAddKernelNode_v2(self, node, graph, before, count, facts):
        self.nodes.append(None)
        node._obj.value = len(self.nodes)
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0

    def cuGraphInstantiateWithFlags(self, ready, graph, flags):
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, ready, node, facts):
        kernel, parameters = struct.unpack("Q32xQ", ctypes.string_at(facts.value, 48))
        *layout, _ = self.layout(kernel)
        places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        data = bytearray(max(map(sum, layout)))
        for n, (offset, size) in enumerate(layout):
            data[offset : offset + size] = ctypes.string_at(places[n], size)
        self.nodes[node.value - 1] = bytes(data)
        return 0

    def cuGraphLaunch(self, ready, stream):
        return 0


@pytest.fixture
def recorded(monkeypatch):
    """A function of a sample, its parameters and results: the recorder after a call by single
    launches and one by a graph, and the addresses of results and scratch memory, the same ones in
    both calls."""

    def record(name, tensors, results):
        executable = _executable.read(sample(name))
        found = Recorder(executable)
        monkeypatch.setattr(_driver, "library", lambda: found)
        stream = types.SimpleNamespace(query=lambda: None, cuda_stream=5)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 5, raising=False)
        monkeypatch.setattr(_plan, "is_capturing", lambda: False)
        plan = _plan.Plan(executable, tensors, results, Kernels(executable))
        # Else another test would unload by this recorder, which cannot.
        plan.kernels.loaded.is_captured = True
        memory = [torch.empty_strided(*fact[:2], dtype=fact[2]) for fact in plan.facts]
        memory.append(torch.empty(plan.scratch_bytes, dtype=torch.uint8))
        each = itertools.cycle(memory)
        monkeypatch.setattr(_plan, "empty_strided", lambda *_: next(each))
        plan(tensors, as_graph=False)
        plan(tensors)
        return found, memory

    return record


def check(found, step, maps, addresses):
    """Compares the parameters of a launch, of tensor maps alone, with what is made by hand."""
    data = found.launched[step]
    assert len(data) == FIRST + MAP_BYTES * len(maps) and not any(data[:FIRST])
    for n, (what, address) in enumerate(zip(maps, addresses, strict=True)):
        whole = data[FIRST + MAP_BYTES * n :][:MAP_BYTES]
        rank = len(what.sizes)
        assert whole[:8] == struct.pack("Q", address), n
        # The type, the axes, no steps between elements; no interleaving, and zeros beyond the end.
        facts = what.element, rank, what.sizes, (*what.strides, 0), what.tile, (1,) * rank
        assert found.made[whole[8:]] == (*facts, 0, what.swizzle, what.promotion, 0), n


def test_the_launch_ahead_of_softmax_attentions_gradients(recorded):
    tensors = arrays()
    found, (*_, scratch) = recorded(SOFTMAX, tensors, tensors[:3])
    # lse in base 2 lies ahead of delta.
    delta = scratch.data_ptr() + 4 * B * H * T
    addresses = [tensors[n].data_ptr() for n in (DOUT, CORRECTION, OUT)]
    check(found, 0, DELTA, [*addresses, delta])
    assert found.launched[1] == struct.pack("2Q", tensors[LSE].data_ptr(), scratch.data_ptr())
    assert len(found.launched) == 4 and found.nodes == found.launched


def test_the_launches_behind_the_delta_rules_gradients(recorded):
    keys, values = torch.zeros(B, T, G, D).bfloat16(), torch.zeros(B, T, H, D).bfloat16()
    steps, state = torch.zeros(B, T, H), torch.zeros(B, H, D, D)
    tensors = [keys, keys, values, steps, steps, values, state, values]
    found, (dq, dk, _, _, _, scratch) = recorded(DELTA_RULE, tensors, tensors[:5])
    *_, of_dq, of_dk = _executable.read(sample(DELTA_RULE)).steps[GRADIENTS].arguments
    for step, source, result in ((SUM_DK, of_dk, dk), (SUM_DQ, of_dq, dq)):
        check(found, step, SUMS, [scratch.data_ptr() + source.offset, result.data_ptr()])
    assert len(found.launched) == 10 and found.nodes == found.launched
