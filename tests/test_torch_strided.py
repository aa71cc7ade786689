"""Tensors that are not contiguous: tensor maps with their strides, and calls that copy nothing."""
# ruff: noqa: N802  the driver's functions have CUDA's names

import contextlib
import ctypes
import dataclasses
import struct

import jax
import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

import ato_torch  # noqa: E402
from ato_torch import (  # noqa: E402
    _adapters,
    _checked_calls,
    _checks,
    _direct,
    _driver,
    _executable,
    _kernels,
    _known,
    _mosaic,
    _plan,
    _programs,
    _strided,
)
from ato_torch._executable import (  # noqa: E402
    Allocation,
    Copy,
    Executable,
    Launch,
    Slice,
)
from tests.test_torch_direct import (  # noqa: E402, F401  two are fixtures
    CALLS,
    CONSTANT,
    LAYOUT,
    MAPS,
    TARGET,
    B,
    D,
    Driver,
    G,
    H,
    check_a_graph_of,
    driver,
    inputs,
    known,
    parts,
)

# Maps as Mosaic GPU and XLA make them

BFLOAT16 = 9


def mosaic_map(sizes, strides):
    """Axes from the first to the last, strides in elements of 2 bytes, as `as_strided` has them."""
    assert strides[-1] == 1
    return _mosaic.TensorMap(
        *(BFLOAT16, sizes[::-1], tuple(2 * stride for stride in strides[-2::-1])),
        *((1,) * len(sizes), 3),
    )


def array_of(tensor):
    return _direct._array(tensor)


def read_by(what, tensor):
    """All that a map describes, from the tensor's first element on."""
    sizes = what.sizes[::-1]
    strides = [stride // tensor.element_size() for stride in what.strides[::-1]]
    return tensor.as_strided(sizes, (*strides, 1))


def part_of(*shape, axis=1, of=3, seed=0):
    """The second of several tensors of that shape, side by side in memory along an axis."""
    whole = list(shape)
    whole[axis] *= of
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(whole, generator=generator).bfloat16().chunk(of, axis)[1]
    assert not found.is_contiguous()
    return found


def of_rows_of_8(B, T, H, D, order="bthd"):
    """The map of an array [B, T, H, D] or [B, H, T, D]. With 64 columns it is [B, H, T / 8, 8, 64].
    Wider heads come in parts of 64 columns, and batch and heads are then folded into one axis."""
    batch = T * H * D
    head, row = (D, H * D) if order == "bthd" else (T * D, D)
    if D == 64:
        return mosaic_map((B, H, T // 8, 8, 64), (batch, head, 8 * row, row, 1))
    last = (B - 1) * batch // head + H
    return mosaic_map((last, T // 8, D // 64, 8, 64), (head, 8 * row, 64, row, 1))


def of_whole_rows(B, T, H, D):
    batch, head, row = T * H * D, D, H * D
    return mosaic_map((B, H, T, D), (batch, head, row, 1))


READABLE = {
    "part of a projection": (of_rows_of_8(2, 16, 3, 64), part_of(2, 16, 3, 64, axis=2)),
    "[B, H, T, 64]": (of_rows_of_8(2, 16, 3, 64, "bhtd"), part_of(2, 3, 16, 64, axis=1)),
    "[B, H, T, 64], turned": (
        of_rows_of_8(2, 16, 3, 64, "bhtd"),
        part_of(2, 16, 3, 64, axis=2).transpose(1, 2),
    ),
    "odd length": (of_whole_rows(2, 13, 3, 128), part_of(2, 13, 3, 128, axis=2)),
    "columns of wider heads": (of_whole_rows(2, 13, 3, 64), part_of(2, 13, 3, 64, axis=3)),
    "heads of 128, one batch": (of_rows_of_8(1, 16, 3, 128), part_of(1, 16, 3, 128, axis=2)),
    "heads of 128, their columns": (of_rows_of_8(2, 16, 3, 128), part_of(2, 16, 3, 128, axis=3)),
    "heads of 128, every second batch": (
        of_rows_of_8(1, 16, 3, 128),
        part_of(4, 16, 3, 128, axis=3)[::4],
    ),
    "[B, H, T, 128], their columns": (
        of_rows_of_8(2, 16, 3, 128, "bhtd"),
        part_of(2, 3, 16, 128, axis=3),
    ),
    "one head": (of_rows_of_8(2, 16, 1, 64), part_of(2, 16, 1, 64, axis=2)),
    "axes of one": (
        mosaic_map((1, 16, 1, 1, 64), (1024, 64, 64, 64, 1)),
        part_of(1, 16, 1, 64, axis=3),
    ),
    "an axis of one with any stride": (
        mosaic_map((2 * 16, 64), (64, 1)),
        part_of(2, 16, 1, 64, axis=3).as_strided((2, 1, 16, 64), (16 * 192, 7, 192, 1)),
    ),
    "rows as one axis": (
        mosaic_map((2 * 16, 3 * 64), (3 * 64, 1)),
        part_of(2, 16, 3, 64, axis=2),
    ),
    "some rows of all": (mosaic_map((2, 5, 3 * 64), (16 * 192, 2 * 192, 1)),
                         part_of(2, 16, 3, 64, axis=2)),
}  # fmt: skip
CONTIGUOUS = {
    # batch * T * H + head has no stride where the batches lie further apart.
    "heads of 128, batches": (of_rows_of_8(2, 16, 3, 128), part_of(2, 16, 3, 128, axis=2)),
    "[B, H, T, 128], batches": (
        of_rows_of_8(2, 16, 3, 128, "bhtd"),
        part_of(2, 3, 16, 128, axis=1),
    ),
    "rows of several heads": (
        mosaic_map((2 * 16, 3 * 64), (3 * 64, 1)),
        part_of(2, 16, 3, 64, axis=3),
    ),
    "all as one axis": (mosaic_map((2 * 16 * 64,), (1,)), part_of(2, 16, 1, 64, axis=2)),
    "beyond the rows": (mosaic_map((2, 17, 64), (16 * 64, 64, 1)), part_of(2, 16, 1, 64, axis=2)),
    "between two axes": (mosaic_map((2, 16), (96, 1)), part_of(2, 2, 1, 64, axis=2)),
    "odd strides": (
        mosaic_map((2, 16, 64), (16 * 64, 64, 1)),
        torch.zeros(2, 16, 65).bfloat16()[:, :, None, :64],
    ),
    "no contiguous axis": (
        mosaic_map((2, 16, 64), (16 * 64, 64, 1)),
        torch.zeros(2, 16, 1, 128).bfloat16()[..., ::2],
    ),
    "expanded": (
        mosaic_map((2, 16, 64), (16 * 64, 64, 1)),
        torch.zeros(1, 16, 1, 64).bfloat16().expand(2, 16, 1, 64),
    ),
    "strides of 2^40 bytes": (
        mosaic_map((2, 16, 64), (16 * 64, 64, 1)),
        torch.empty(2, device="meta").bfloat16().as_strided((2, 16, 1, 64), (1 << 39, 64, 64, 1)),
    ),
}


@pytest.mark.parametrize("name", READABLE)
def test_a_map_reads_what_it_read(name):
    """It reads the same elements of a part, in the same order, as of a contiguous copy of it."""
    what, tensor = READABLE[name]
    found = _strided._with_strides(what, array_of(tensor))
    assert found is not None
    assert found._replace(strides=what.strides) == what
    dense = tensor.contiguous()
    assert torch.equal(read_by(found, tensor), read_by(what, dense))
    assert _strided._with_strides(what, array_of(dense)) == what


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_a_map_that_has_no_strides(name):
    what, tensor = CONTIGUOUS[name]
    array = array_of(tensor)
    if name == "no contiguous axis":
        array = array._replace(strides=(*array.strides[:-1], 2))
    assert _strided._with_strides(what, array) is None


def test_every_map_of_a_random_array():
    """A map gets strides if each of its axes steps through one axis of the array. Every map that
    gets strides reads the right elements."""
    generator = np.random.default_rng(0)
    read = 0
    for _ in range(400):
        sizes = (*generator.integers(1, 5, 3), 8)
        order = generator.permutation(3)
        gaps = [int(generator.integers(1, 3)) for _ in range(4)]
        strides, step = [0, 0, 0], 8 * gaps[3]
        for axis in order:
            strides[axis], step = step, step * int(sizes[axis]) * gaps[axis]
        memory = torch.randn(step, generator=torch.Generator().manual_seed(1)).bfloat16()
        tensor = memory.as_strided([int(size) for size in sizes], (*strides, 1))
        dense = tensor.contiguous()
        axes = list(zip(map(int, sizes), dense.stride(), strict=True))
        first, second = sorted(generator.integers(0, 4, 2))
        if generator.random() < 0.5 and first < second < 3:  # two axes as one
            joined = np.prod([size for size, _ in axes[first : second + 1]])
            axes[first : second + 1] = [(int(joined), axes[second][1])]
        what = mosaic_map(*zip(*axes, strict=True))
        found = _strided._with_strides(what, array_of(tensor))
        if found is not None:
            read += 1
            assert torch.equal(read_by(found, tensor), read_by(what, dense))
    assert read > 200


# Programs

SHAPE, ROW = (2, 4, 8), 8 * 4
BYTES = 2 * 4 * ROW
MAP = _mosaic.TensorMap(7, (8, 4, 2), (ROW, 4 * ROW), (8, 4, 1), 0)


class ByMaps(Driver):
    """Its kernel `mapped` reads by what the driver was told of each tensor map."""

    def __init__(self):
        super().__init__()
        self.KERNELS = Driver.KERNELS | {b"mapped": (self.mapped, 40)}
        self.maps, self.refused, self.ignores_strides = {}, False, False

    def cuTensorMapEncodeTiled(self, place, element, rank, address, *rest):
        error = super().cuTensorMapEncodeTiled(place, element, rank, address, *rest)
        sizes, strides = tuple(rest[0]), tuple(rest[1])[: rank.value - 1]
        self.maps[struct.unpack("15Q", ctypes.string_at(place.value + 8, 120))] = sizes, strides
        return 1 if self.refused and strides != MAP.strides else error

    def mapped(self, *words):
        """out = x + 2 * y"""
        assert words[CONSTANT] == 77
        x, y = (self.read(words[start], words[start + 1 : start + 16]) for start in MAPS)
        out = ctypes.cast(words[TARGET], ctypes.POINTER(ctypes.c_float))
        np.ctypeslib.as_array(out, x.shape)[:] = x + 2 * y

    def read(self, address, words):
        sizes, strides = self.maps[words]
        if self.ignores_strides:
            strides = MAP.strides
        memory = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        first = np.ctypeslib.as_array(memory, (1,))
        return np.lib.stride_tricks.as_strided(first, sizes[::-1], (*strides[::-1], 4))


def program(*more):
    """(x, y) -> x + 2 y by tensor maps, and more steps."""
    x, y, out = (Slice(n, 0, BYTES) for n in (1, 2, 3))
    places = [
        _mosaic.Place(8 * TARGET, 2, 0),
        *(_mosaic.Place(8 * start, n, 0, MAP) for n, start in enumerate(MAPS)),
    ]
    constant = struct.pack("40Q", 77, *[0] * 39)
    parameters = _mosaic.Parameters(LAYOUT, constant, tuple(places))
    launch = Launch("mapped", b"ELF 3", (1, 1, 1), (32, 1, 1), 0, (out, x, y), (out,), parameters)
    allocations = {
        **{n: Allocation(BYTES, n - 1 if n < 3 else None, False) for n in (1, 2, 3)},
        4: Allocation(BYTES, None, False),
    }
    return Executable(allocations, (launch, *more), (3,))


@pytest.fixture
def by_maps(driver, monkeypatch):  # noqa: F811
    """The driver; functions are planned on a CPU, and their executable is `program()`."""
    found = ByMaps()
    monkeypatch.setattr(_driver, "library", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(_executable, "read", lambda _: program())
    return found


def function():
    return _programs.Function(lambda x, y: [x + 2 * y], jax.devices()[0])


def rows_of(whole):
    """Two parts of an array [2, 4, 16]."""
    return [whole[..., :8], whole[..., 8:]]


def strided(function, tensors):
    plan = _direct.plan_of(function, tensors)
    assert isinstance(plan, _direct.Plan), plan
    return plan, *_direct.strided(function, plan, tensors)


def test_which_parameters_a_program_reads_by_their_strides():
    """Not those that a step reads by the address, in part, or as a source of a copy."""
    x, y = rows_of(torch.zeros(2, 4, 16))
    arrays = {0: array_of(x), 1: array_of(y)}
    whole = program()
    changed, read = _strided.restrided(whole, arrays)
    assert read == {0, 1}
    maps = [place.map for place in changed.steps[0].parameters.places]
    other = MAP._replace(strides=(2 * ROW, 8 * ROW))
    assert maps == [None, other, other]
    assert dataclasses.replace(changed, steps=whole.steps) == whole
    changed, read = _strided.restrided(whole, {1: array_of(y)})
    assert read == {1}
    assert [place.map for place in changed.steps[0].parameters.places] == [None, MAP, other]
    for more in (
        Launch("add", b"ELF 1", (1, 1, 1), (1, 1, 1), 0, (Slice(1, 0, BYTES),) * 3, ()),
        Copy(Slice(1, 0, BYTES), Slice(4, 0, BYTES)),
        dataclasses.replace(
            whole.steps[0], arguments=(Slice(4, 0, BYTES), Slice(1, 16, 16), Slice(2, 0, BYTES))
        ),
    ):
        changed, read = _strided.restrided(program(more), arrays)
        assert read == {1}
        first = changed.steps[0].parameters
        assert [place.map for place in first.places] == [None, MAP, other]
    narrow = whole.steps[0].parameters.places
    narrow = (*narrow[:2], narrow[2]._replace(map=MAP._replace(strides=(ROW, 8 * ROW))))
    parameters = dataclasses.replace(whole.steps[0].parameters, places=narrow)
    launch = dataclasses.replace(whole.steps[0], parameters=parameters)
    _, read = _strided.restrided(dataclasses.replace(whole, steps=(launch,)), arrays)
    assert read == {0}


def test_parts_are_read_where_they_lie(by_maps):
    """By a plan of its own, which is tried once; others are read as before."""
    asked = function()
    whole = torch.randn(2, 4, 16)
    x, y = rows_of(whole)
    plan, found, copied = strided(asked, [x, y])
    assert found is not plan and copied == (False, False)
    loads = [call for call in by_maps.calls if call[0] == "load"]
    assert loads == [("load", b"ELF 3")]
    for _ in range(3):
        by_maps.calls.clear()
        assert torch.equal(found([x, y])[0], x + 2 * y)
        assert [call[0] for call in by_maps.calls] == ["mapped"]
        x, y = rows_of(torch.randn(2, 4, 16))
        assert strided(asked, [x, y])[1:] == (found, copied)
    # The plan for contiguous tensors is what it was.
    assert strided(asked, [x.contiguous(), y.contiguous()])[1:] == (plan, (False, False))
    assert torch.equal(plan([x.contiguous(), y.contiguous()])[0], x + 2 * y)
    # One of both, in another order of axes.
    turned = torch.randn(4, 2, 8).transpose(0, 1)
    _, other, copied = strided(asked, [turned, y.contiguous()])
    assert other is not found and copied == (False, False)
    assert torch.equal(other([turned, y.contiguous()])[0], turned + 2 * y)


def test_a_plan_of_strides_keeps_the_kernels(by_maps, monkeypatch):
    """Also after the plan for contiguous tensors is gone; a capture pins both."""
    monkeypatch.setattr(_kernels, "retired", retired := [])
    asked = function()
    parts = rows_of(torch.randn(2, 4, 16))
    plan, found, _ = strided(asked, parts)
    asked.plans.clear()
    del plan
    assert not retired
    assert torch.equal(found(parts)[0], parts[0] + 2 * parts[1])
    monkeypatch.setattr(_plan, "is_capturing", lambda: True)
    found(parts)
    assert found.is_captured
    del found
    asked.strided.clear()
    assert not retired


@pytest.mark.parametrize("fault", ["the driver refuses", "other bits", "an error"])
def test_what_keeps_tensors_from_being_read_so(by_maps, monkeypatch, fault):
    """Then they are copied as before, and it is not tried again."""
    asked = function()
    parts = rows_of(torch.randn(2, 4, 16))
    plan = _direct.plan_of(asked, parts)
    tries = []

    def laid_out(*arguments, laid_out=_direct._laid_out):
        tries.append(fault)
        return laid_out(*arguments)

    monkeypatch.setattr(_direct, "_laid_out", laid_out)
    by_maps.refused = fault == "the driver refuses"
    by_maps.ignores_strides = fault == "other bits"
    if fault == "an error":
        launches = ByMaps.cuLaunchKernelEx
        fails = iter([0, 1])
        monkeypatch.setattr(
            ByMaps, "cuLaunchKernelEx", lambda *given: next(fails, 0) or launches(*given)
        )
    for _ in range(3):
        assert _direct.strided(asked, plan, parts) == (plan, (True, True))
    assert len(tries) == (fault != "the driver refuses")
    by_maps.refused = by_maps.ignores_strides = False
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert torch.equal(_direct.execute(asked, parts)[0], parts[0] + 2 * parts[1])


def test_a_trial_without_memory_is_repeated(by_maps, monkeypatch):
    """Ever less often, as a plan is; no caller keeps the copies for its later calls."""
    asked = function()
    parts = rows_of(torch.randn(2, 4, 16))
    plan = _direct.plan_of(asked, parts)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    tries, calls = [], []

    def laid_out(*arguments, laid_out=_direct._laid_out):
        tries.append(len(calls) + 1)
        if len(tries) < 3:
            raise torch.OutOfMemoryError("planted")
        return laid_out(*arguments)

    monkeypatch.setattr(_direct, "_laid_out", laid_out)
    for _ in range(3):
        calls.append(_direct.ready(asked, parts))
    assert calls == [None] * 3 and not asked.strided
    assert torch.equal(_direct.execute(asked, parts)[0], parts[0] + 2 * parts[1])
    assert tries == [1, 2, 4] and not asked.refused
    found, copied = _direct.ready(asked, parts)
    assert found is not plan and copied == (False, False)


def test_parts_that_no_map_reads_here_are_tried_elsewhere(by_maps, monkeypatch):
    """Where a part begins between two addresses that a map takes, the call copies: a trial there
    would compare the copying call with itself."""
    asked = function()
    whole = torch.randn(2, 4, 20)
    between, aligned = ([whole[..., :8], whole[..., at : at + 8]] for at in (10, 8))
    assert between[1].stride() == aligned[1].stride()
    _direct.plan_of(asked, between)  # has a trial of its own
    with monkeypatch.context() as patched:
        patched.setattr(_direct, "_compare", lambda *_: pytest.fail("it was tried"))
        plan, found, copied = strided(asked, between)
    assert found is plan and copied == (True, True) and not asked.strided
    _, found, copied = strided(asked, aligned)
    assert found is not plan and copied == (False, False)
    assert torch.equal(found(aligned)[0], aligned[0] + 2 * aligned[1])


def test_a_small_part_of_much_memory_is_copied(by_maps, monkeypatch):
    """The trial would take all of the memory between its first and its last element."""
    y = torch.randn(SHAPE)

    def layer(of):
        return torch.randn(2, of, 4, 8)[:, 0], y

    # x spans (layers + 1) * 32 elements; x and y have 128.
    for layers, is_read in [(2, True), (15, True), (16, False), (1000, False)]:
        with monkeypatch.context() as patched:
            if not is_read:
                patched.setattr(_direct, "_laid_out", lambda *_: pytest.fail("it was tried"))
            plan, found, copied = strided(function(), layer(layers))
        assert copied == (not is_read, False) and (found is plan) != is_read


def test_one_part_of_a_wide_projection_is_read(by_maps):
    """It spans the whole projection, which is no more than the call's tensors together."""
    whole = torch.randn(2, 4, 8 * 11)
    x = whole[..., 80:]
    assert _direct._is_far_apart([x], {0})
    q, k = (whole[..., n : n + size].contiguous() for n, size in ((0, 64), (64, 8)))
    assert not _direct._is_far_apart([q, k, x], {2})


def test_a_trial_that_breaks_the_gpu_is_an_error(by_maps):
    asked = function()
    parts = rows_of(torch.randn(2, 4, 16))
    plan = _direct.plan_of(asked, parts)
    by_maps.errors, by_maps.broken = [700], 700
    with pytest.raises(RuntimeError, match="has left CUDA unusable"):
        _direct.strided(asked, plan, parts)


def test_a_trial_reads_nothing_beside_the_parts():
    """What lies around them is NaN, and they share memory as the originals do."""
    whole = torch.randn(2, 4, 24)
    like = [whole[..., 8:16], torch.randn(2, 4, 8), whole[..., 12:20]]
    drawn = [torch.randn(2, 4, 8) for _ in like]
    found = _direct._laid_out(drawn, like, {0, 2})
    for one, other in zip(found, like, strict=True):
        assert one.stride() == other.stride() and one.shape == other.shape
    assert found[1] is drawn[1] and torch.equal(found[2], drawn[2])
    assert found[2].data_ptr() - found[0].data_ptr() == 4 * 4
    assert torch.equal(found[0][..., 4:], drawn[2][..., :4])
    storage = torch.tensor(found[0].untyped_storage(), dtype=torch.uint8).view(torch.float32)
    # From the first element of the one to the last of the other.
    assert len(storage) == 7 * 24 + 12 and storage.isnan().sum() == 7 * 12


def test_what_no_map_describes_is_not_tried(by_maps, monkeypatch):
    """Tensors without a contiguous axis, and expanded ones."""
    monkeypatch.setattr(_direct, "_laid_out", lambda *_: pytest.fail("it was tried"))
    for x in (torch.randn(2, 4, 16)[..., ::2], torch.randn(1, 4, 8).expand(SHAPE)):
        plan, found, copied = strided(function(), [x, torch.randn(SHAPE)])
        assert found is plan and copied == (True, False)


def test_patterns_of_strides_are_bounded(by_maps):
    asked = function()
    y = torch.randn(SHAPE)
    for n in range(_direct.MOST_STRIDED + 2):
        x = torch.randn(2, 4, 16 + 4 * n)[..., :8]
        plan, found, copied = strided(asked, [x, y])
        assert (found is plan) == copied[0] == (n >= _direct.MOST_STRIDED)
    assert len(asked.strided) == _direct.MOST_STRIDED


def test_a_refused_pattern_takes_no_place(by_maps, monkeypatch):
    """Nor is it looked at twice; so many are remembered."""
    asked, looked = function(), []
    restrided = _strided.restrided
    monkeypatch.setattr(_strided, "restrided", lambda *given: looked.append(1) or restrided(*given))
    y = torch.randn(SHAPE)
    for n in range(_direct.MOST_REFUSED + 2):
        refused = torch.randn(2, 4, 16 + n)[..., : 2 * 8 : 2], y
        for _ in range(2):
            assert strided(asked, refused)[2] == (True, False)
        assert len(looked) == n + 1 and 0 < len(asked.refused) <= _direct.MOST_REFUSED
    x = torch.randn(2, 4, 16)[..., :8]
    assert strided(asked, [x, y])[2] == (False, False) and len(asked.strided) == 1


def test_nothing_is_tried_while_a_graph_is_captured(by_maps, monkeypatch):
    asked = function()
    parts = rows_of(torch.randn(2, 4, 16))
    plan = _direct.plan_of(asked, parts)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _direct.strided(asked, plan, parts) == (plan, (True, True)) and not asked.strided
    with monkeypatch.context() as patched:  # a caller that keeps its answers asks again
        patched.setattr(torch.Tensor, "is_cuda", True)
        assert _direct.ready(asked, parts) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found, copied = _direct.strided(asked, plan, parts)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _direct.strided(asked, plan, parts) == (found, (False, False)) == (found, copied)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert _direct.ready(asked, parts) == (found, copied)


def test_a_call_copies_what_it_must(by_maps, monkeypatch):
    """Parts are passed on as they are; where one lies at an odd address or is negated, all are
    copied, into no more memory than their elements take; what is expanded is copied."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    asked = function()
    x, y = rows_of(torch.randn(2, 4, 16))
    given, stored = [], []
    call = _plan.Plan.__call__

    def recorded(self, tensors, as_graph=True):
        given.append([(tensor.data_ptr(), tensor.stride()) for tensor in tensors])
        stored[:] = [tensor.untyped_storage().nbytes() for tensor in tensors]
        return call(self, tensors, as_graph)

    monkeypatch.setattr(_plan.Plan, "__call__", recorded)
    for _ in range(2):
        assert torch.equal(_direct.execute(asked, [x, y])[0], x + 2 * y)
        assert given[-1] == [(part.data_ptr(), part.stride()) for part in (x, y)]
    odd = torch.empty(2 * 4 * 16 + 1)[1:].view(2, 4, 16)[..., :8].copy_(x)
    assert odd.data_ptr() % 16 and odd.stride() == x.stride()
    plan = _direct.plan_of(asked, [x, y])
    assert _direct.copies(asked, plan, [x, y]) == 0
    for one, other in ((odd, y), (torch._neg_view(x), y)):
        assert torch.equal(_direct.execute(asked, [one, other])[0], one + 2 * other)
        assert stored == [BYTES, BYTES]
        assert _direct.copies(asked, plan, [one, other]) == 2
        # With two axes exchanged, of the tensors and of the result.
        turned = [part.transpose(1, 2) for part in (one, other)]
        ready, copied = _direct.ready(asked, turned, (True, True), (True,))
        assert copied == (False, False)
        assert torch.equal(ready(turned)[0], turned[0] + 2 * turned[1])
        assert stored == [BYTES, BYTES]
    assert len(asked.strided) == 1
    aside = torch.empty(2 * 4 * 8 + 1)[1:].view(SHAPE)
    assert _direct.copies(asked, plan, [aside, x.contiguous()]) == 1
    expanded = torch.randn(1, 4, 8).expand(SHAPE)
    assert torch.equal(_direct.execute(asked, [expanded, y])[0], expanded + 2 * y)
    assert given[-1][0][1] == (32, 8, 1) and given[-1][1] == (y.data_ptr(), y.stride())


# Calls that are known


@pytest.mark.parametrize("name", ["attention", "lse", "linear", "linear state"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("reads_strides", [False, True])
def test_parts_of_a_projection(known, name, transposed, reads_strides):  # noqa: F811
    """They are read where they lie, or copied once for both passes, in the order in which they lie;
    so lies the result."""
    _checked_calls.checked.clear()
    known.reads_strides = reads_strides
    drawn = parts(length=9, transposed=transposed)
    plain = [x.contiguous().requires_grad_() for x in drawn]
    for leaves in (plain, [x.detach().requires_grad_() for x in drawn]):
        for _ in range(3):
            known.clear()
            out, *rest = torch.utils._pytree.tree_leaves(CALLS[name](*leaves))
            gradients = torch.autograd.grad(out.sum() + sum(x.sum() for x in rest), leaves)
            with torch.no_grad():
                answer = torch.utils._pytree.tree_leaves(CALLS[name](*leaves))
        # Forward with and without gradients, and backward where one output has a cotangent.
        assert len(known) == (2 if rest else 3)
        if reads_strides:
            wanted_strides = [leaf.stride() for leaf in leaves]
            assert all(strides[:3] == wanted_strides for strides in known)
        assert all(torch.equal(one, other) for one, other in zip(answer, (out, *rest), strict=True))
        if leaves is plain:
            wanted = [out, *rest, *gradients]
    assert out.transpose(1, 2).is_contiguous() == transposed
    torch.testing.assert_close([out, *rest, *gradients], wanted)
    # A derivative of second order is refused, also where the graph has another way to the inputs.
    for wanted_of in ([leaves[0]], leaves):
        out = torch.utils._pytree.tree_leaves(CALLS[name](*leaves))[0]
        again = torch.autograd.grad(out.sum(), wanted_of, create_graph=True)
        with pytest.raises(NotImplementedError, match="second order"):
            loss = again[0].sum() + sum((x * x).sum() for x in wanted_of)
            torch.autograd.grad(loss, wanted_of)


@pytest.mark.parametrize("name", ["attention", "lse", "linear", "linear state"])
@pytest.mark.parametrize("reads_strides", [False, True])
def test_a_write_ahead_of_the_backward_pass(known, name, reads_strides):  # noqa: F811
    """Is refused where the pass reads what was written to; a copy that it reads is as it was."""
    _checked_calls.checked.clear()
    known.reads_strides = reads_strides
    drawn = parts(length=9)
    leaf = drawn[0].clone().requires_grad_()
    given = [leaf * 1, *drawn[1:]]
    wanted = None
    for n in range(5):
        out = torch.utils._pytree.tree_leaves(CALLS[name](*given))[0]
        if n >= 2:
            found = torch.autograd.grad(out.sum(), leaf, retain_graph=True)[0]
            wanted = found if wanted is None else wanted
            assert torch.equal(found, wanted)
        out = torch.utils._pytree.tree_leaves(CALLS[name](*given))[0]
        given[1].add_(0)  # the numbers stay
        if reads_strides or n == 0:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(out.sum(), leaf, retain_graph=True)
        elif n >= 2:
            assert torch.equal(torch.autograd.grad(out.sum(), leaf, retain_graph=True)[0], wanted)


def test_what_shares_memory_is_not_kept_in_full(known):  # noqa: F811
    """A copy of keys that all heads share would be held until the backward pass; one of windows
    that overlap, too."""
    query, key, value = (x[:, :, :9].contiguous() for x in inputs(torch.float32, "cpu"))
    shared = [x[:, :1].expand(B, H, 9, D) for x in (key, value)]
    windows, apart = (
        [torch.randn(B, H, 8 * step + D).unfold(2, D, step) for _ in range(2)]
        for step in (D // 4, D + D // 4)
    )
    assert windows[0].shape == apart[0].shape == query.shape
    # One head of a projection that has all others, too: it spans more than the keys of all heads.
    projected = torch.randn(B, 9, (H + 2) * D)
    one = [projected[..., n * D : (n + 1) * D].unsqueeze(1).expand(B, H, 9, D) for n in (H, H + 1)]
    for keys, larger in ((shared, True), (windows, True), (one, True), (apart, False)):
        _checked_calls.checked.clear()
        known.clear()
        leaves = [query.requires_grad_(), *keys]
        for _ in range(3):
            out = ato_torch.attention(*leaves)
        assert bool(known) != larger
        torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(*leaves))
        known.clear()
        with torch.no_grad():
            for _ in range(3):
                ato_torch.attention(*leaves)
        assert len(known) == 1
        # Where nothing is copied, nothing larger is kept.
        _checked_calls.checked.clear()
        known.clear()
        known.reads_strides = True
        for _ in range(3):
            ato_torch.attention(*leaves)
        assert known
        known.reads_strides = False


def test_cotangents_of_any_strides(known):  # noqa: F811
    """Each has a backward pass by a plan, and so many of these are kept."""
    _checked_calls.checked.clear()
    leaves = [x[:, :, :9].clone().requires_grad_() for x in inputs(torch.float32, "cpu")]
    for _ in range(2):
        CALLS["attention"](*leaves)
    cotangent, wanted = torch.randn(B, H, 9, D), None
    for n in [*range(_known.MOST_BACKWARDS + 2), *range(3)]:
        wide = torch.empty(B, H, 9, D + n)[..., :D].copy_(cotangent)
        out = CALLS["attention"](*leaves)
        known.clear()
        found = torch.autograd.grad(out, leaves, wide)
        assert len(known) == 1
        wanted = found if wanted is None else wanted
        torch.testing.assert_close(found, wanted)
        assert 0 < len(out.grad_fn.known.backwards) <= _known.MOST_BACKWARDS


ORDERS = {
    "mixed": (True, False, True),
    "mixed the other way": (False, True, True),
    "one in another order": (False, False, True),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reads_strides", [False, True])
def test_tensors_in_different_orders(known, order, reads_strides):  # noqa: F811
    """Some [B, T, H, D] in memory, others [B, H, T, D]: known calls as well."""
    _checked_calls.checked.clear()
    known.reads_strides = reads_strides
    plain = [x[:, :, :9].contiguous() for x in inputs(torch.float32, "cpu")]
    leaves = [
        (x.transpose(1, 2).contiguous().transpose(1, 2) if turned else x).clone().requires_grad_()
        for x, turned in zip(plain, ORDERS[order], strict=True)
    ]
    found = []
    for tensors in ([x.requires_grad_() for x in plain], leaves):
        for _ in range(3):
            known.clear()
            out = CALLS["causal"](*tensors)
            gradients = torch.autograd.grad(out.sum(), tensors)
        assert len(known) == 2
        found.append([out, *gradients])
    torch.testing.assert_close(*found)


def test_one_head_of_keys_has_either_order(known):  # noqa: F811
    """Keys of one head beside queries [B, T, H, D] in memory do not turn the call around."""
    _checked_calls.checked.clear()
    length = 9
    whole = torch.randn(B, length, (H + 2) * D)
    query = whole[..., : H * D].view(B, length, H, D).transpose(1, 2)
    key, value = (x.unsqueeze(1) for x in whole[..., H * D :].chunk(2, -1))
    assert key.stride(1) > key.stride(2)
    for _ in range(3):
        known.clear()
        with torch.no_grad():
            out = ato_torch.attention(query, key, value, enable_gqa=True)
    assert len(known) == 1 and out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(
        out,
        torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True),
    )
    # Tensors [B, H, T, D] in memory keep their order, whatever a single head says.
    plain = torch.randn(B, H, length, D)
    assert not _checks.are_exchanged(plain, key, value)
    assert not _checks.are_exchanged(key, key, value)
    assert _checks.are_exchanged(plain.transpose(1, 2), key, value)
    assert _checks.are_exchanged(query, key, value)


# On a card

hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0))
    or not _adapters.READS_LAUNCHES,
    reason="it needs a Hopper GPU, and a JAX that tells the launches",
)


def of_a_projection(batch, length, heads, groups, columns):
    """Leaves q, k and v [B, H, T, D], parts of one array [B, T, (H + 2 G) D], and a cotangent."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).bfloat16().cuda()

    whole = drawn(batch, length, (heads + 2 * groups) * columns)
    sizes = [count * columns for count in (heads, groups, groups)]
    leaves = [
        part.view(batch, length, -1, columns).transpose(1, 2).detach().requires_grad_()
        for part in whole.split(sizes, -1)
    ]
    return leaves, drawn(batch, length, heads, columns).transpose(1, 2)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", ["causal", "lse", "linear causal"])
@pytest.mark.parametrize(
    ("sizes", "is_read"),
    [
        ((2, 1024, 4, 4, 64), True),
        ((2, 1024, 4, 2, 64), True),
        ((2, 1024, 4, 4, 32), True),
        ((1, 2048, 4, 4, 128), True),
        ((2, 1003, 4, 4, 128), True),
        # Batch and head are one axis of the tensor maps.
        ((2, 1024, 4, 4, 128), False),
    ],
    ids=str,
)
def test_parts_on_a_card(name, sizes, is_read):
    """To the bit what contiguous copies give, without copies where the tensor maps take strides."""
    leaves, cotangent = of_a_projection(*sizes)
    copies = [
        leaf.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for leaf in leaves
    ]
    found = []
    for tensors in (copies, leaves):
        for _ in range(4):
            out = torch.utils._pytree.tree_leaves(CALLS[name](*tensors))[0]
            gradients = torch.autograd.grad(out, tensors, cotangent)
        found.append([out.detach(), *gradients])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    told = ato_torch.explain(CALLS[name], *leaves)
    assert told.forward.road == told.backward.road == "direct", told
    if name == "causal":
        assert ("a copy of" not in told.forward.why) == is_read, told
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor.data_ptr()) or tensor, lambda tensor: tensor
        ):
            CALLS[name](*leaves)
        assert (saved[:3] == [leaf.data_ptr() for leaf in leaves]) == is_read


@pytest.mark.gpu
@hopper
def test_a_write_to_parts_is_refused_on_a_card():
    """In every call, by PyTorch's own check of what the backward pass reads."""
    leaves, cotangent = of_a_projection(2, 1024, 4, 4, 64)
    for _ in range(5):
        query, key, value = leaves[0], *(leaf.detach() for leaf in leaves[1:])
        out = CALLS["causal"](query, key, value)
        key.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, leaves[0], cotangent)


@pytest.mark.gpu
@hopper
def test_parts_in_a_cuda_graph():
    leaves, cotangent = of_a_projection(2, 1024, 4, 4, 64)

    def step():
        out = CALLS["causal"](*leaves)
        return out, *torch.autograd.grad(out, leaves, cotangent)

    check_a_graph_of(step, leaves)
