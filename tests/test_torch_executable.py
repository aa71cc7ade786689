"""Executables of XLA's, read: two that JAX 0.11.2 compiled on an H200, two that JAX 0.12.0.1
compiled for one, all without their machine code; what others might hold; and, where XLA's CUDA
plugin is installed, what it compiles today. PyTorch is not needed."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests import aot_executables
from tests.aot_executables import without_torch

_executable = without_torch("_executable")
_protobuf, _riegeli = without_torch("_protobuf"), without_torch("_riegeli")
Allocation, Copy, Fill = _executable.Allocation, _executable.Copy, _executable.Fill
Constant, Slice = _executable.Constant, _executable.Slice
UnknownError = _executable.UnknownError

SAMPLES = Path(__file__).parent / "executables"
NEW = ("linear_attention_step", "attention_sinks_gradient")
NAMES = ("linear_attention", "attention_gradient", *NEW)


def sample(name):
    return (SAMPLES / f"{name}.bin").read_bytes()


# A writer, as far as the reader goes


def number(value):
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def message(*fields):
    return b"".join(
        number(place << 3 | 2) + number(len(value)) + value
        if isinstance(value, bytes)
        else number(place << 3) + number(value)
        for place, value in fields
    )


def fields_of(data):
    found, place = [], 0
    while place < len(data):
        tag, place = _protobuf.read_varint(data, place)
        value, place = _protobuf.read_varint(data, place)
        if tag & 7 == 2:
            value, place = data[place : place + value], place + value
        found.append((tag >> 3, value))
    return found


def snapped(data):
    """As Snappy may have it: bytes as they are."""
    found = number(len(data))
    for start in range(0, len(data), 1 << 16):
        part = data[start : start + (1 << 16)]
        found += bytes([61 << 2]) + (len(part) - 1).to_bytes(2, "little") + part
    return number(len(data)) + found


def file_of(records, compressed=True, kind=b"r", method=b"s"):
    pack = snapped if compressed else bytes
    sizes = pack(b"".join(number(len(record)) for record in records))
    values = b"".join(records)
    chunk = (method if compressed else b"\0") + number(len(sizes)) + sizes + pack(values)
    header = bytes(8) + len(chunk).to_bytes(8, "little") + bytes(8) + kind
    header += len(records).to_bytes(7, "little") + len(values).to_bytes(8, "little")
    data = _riegeli.SIGNATURE[24:] + header + chunk
    size = _riegeli.BLOCK - _riegeli.BLOCK_HEADER
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    first = _riegeli.SIGNATURE[:24]
    return b"".join((bytes(24) if n else first) + part for n, part in enumerate(parts))


def executable(name="linear_attention"):
    """The fields of a sample, and what writes others as an executable."""
    data = sample(name)
    size, start = _protobuf.read_varint(data, 0)
    wrapper, payload, options = _riegeli.records(data[start + size :])
    manifest, *overrides, rest = _riegeli.records(payload)

    def written(fields, **how):
        inner = file_of([manifest, *overrides, message(*fields)], **how)
        return data[: start + size] + file_of([wrapper, inner, options])

    return fields_of(rest), written


def edited(data, path, edit):
    """The message with the first field at the end of the path changed."""
    first, *rest = path
    found, done = [], False
    for place, value in fields_of(data):
        if place == first and not done:
            value, done = edited(value, rest, edit) if rest else edit(value), True
        found += [] if value is None else [(place, value)]
    return message(*found)


def changed(path, edit, name="linear_attention"):
    fields, written = executable(name)
    return written(fields_of(edited(message(*fields), path, edit)))


# What is read


def test_an_executable_of_four_kernels():
    found = _executable.read(sample("linear_attention"))
    assert [(step.name, step.grid, step.block, step.shared_bytes) for step in found.steps] == [
        ("linear_attention_states", (4, 16, 2), (128, 1, 1), 16384),
        ("input_transpose_fusion", (128, 1, 1), (128, 1, 1), 2048),
        ("loop_reduce_fusion", (4, 1, 1), (128, 1, 1), 0),
        ("linear_attention_output", (4, 4, 2), (128, 1, 1), 43008),
    ]
    assert found.steps[1].arguments == (Slice(10, 0, 2097152), Slice(10, 2097152, 131072))
    assert found.steps[1].written == (Slice(10, 2097152, 131072),)
    assert found.allocations[2] == Allocation(1048576, 1, False)
    assert found.allocations[10] == Allocation(2228240, None, False)
    assert found.results == (0,)


def test_an_executable_of_three_results():
    found = _executable.read(sample("attention_gradient"))
    assert [step.name for step in found.steps] == [
        *("loop_broadcast_fusion", "attention_forward", "attention_backward_dq"),
        *("loop_reduce_fusion", "wrapped_slice", "wrapped_slice", "attention_backward_dkv"),
    ]
    assert found.steps[-1].written == (Slice(1, 0, 1048576), Slice(2, 0, 1048576))
    assert found.results == (0, 1, 2)
    assert [found.allocations[n].parameter for n in (3, 4, 5)] == [0, 1, 2]


def test_executables_that_describe_the_card():
    """As JAX writes them from 0.12 on."""
    step = _executable.read(sample("linear_attention_step"))
    copy, kernel = step.steps
    assert isinstance(copy, Copy) and kernel.name == "linear_attention_step"
    assert kernel.written and step.allocations[copy.target.allocation].parameter is None
    gradient = _executable.read(sample("attention_sinks_gradient"))
    assert [step.name for step in gradient.steps] == [
        *("loop_broadcast_fusion", "attention_backward_dq", "attention_backward_dkv"),
        "input_reduce_fusion",
    ]
    assert gradient.results == (0, 4, 5, 12)
    for name in NEW:
        ((_, topology),) = [field for field in executable(name)[0] if field[0] == 17]
        assert b"NVIDIA H200" in topology


@pytest.mark.parametrize("name", NAMES)
def test_how_it_is_written_does_not_matter(name):
    """Compressed or not, in one block of a file or more, with or without a file around it."""
    wanted = _executable.read(sample(name))
    fields, written = executable(name)
    for how in ({"compressed": True}, {"compressed": False}):
        assert _executable.read(written(fields, **how)) == wanted
        # Field 1 is the HLO, which nobody reads.
        assert _executable.read(written([(1, b"h" * 200_000), *fields], **how)) == wanted
    data = sample(name)
    size, start = _protobuf.read_varint(data, 0)
    _, payload, _ = _riegeli.records(data[start + size :])
    assert _executable.read(data[: start + size] + message((1, payload), (2, b""))) == wanted


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"\x05\x10hello", b"hello"),
        (bytes([9, 1 << 2]) + b"ab" + bytes([(7 - 4) << 2 | 1, 2]), b"ababababa"),
        (bytes([9, 1 << 2]) + b"ab" + bytes([6 << 2 | 2, 2, 0]), b"ababababa"),
        (bytes([9, 1 << 2]) + b"ab" + bytes([6 << 2 | 3, 1, 0, 0, 0]), b"abbbbbbbb"),
        (bytes([70, 60 << 2, 69]) + b"x" * 70, b"x" * 70),
        (bytes([9, 1 << 2]) + b"ab" + bytes([6 << 2 | 2, 3, 0]), None),
        (bytes([9, 1 << 2]) + b"ab" + bytes([6 << 2 | 2, 0, 0]), None),
        (b"\x06\x10hello", None),
    ],
)
def test_snappy(data, wanted):
    if wanted is None:
        with pytest.raises(UnknownError, match="compressed bytes"):
            _riegeli.decompress_snappy(data, data[0])
    else:
        assert _riegeli.decompress_snappy(data, len(wanted)) == wanted


def slice_of(allocation, offset, size):
    return message((1, offset), (2, size), (3, allocation))


def test_copies_and_fills():
    shaped = message((1, slice_of(0, 0, 32768)), (2, b""))
    copy = message((1, message((1, slice_of(10, 256, 32768)), (2, shaped), (3, 32768))))
    fields, written = executable()
    steps = [
        (13, message((1, b""), (2, message((1, message((13, copy))))))),
        (13, message((19, message((1, shaped))))),
        (13, message((28, message((1, shaped), (2, 7))))),
    ]
    found = _executable.read(written([*fields, *steps]))
    source, target = Slice(10, 256, 32768), Slice(0, 0, 32768)
    assert found.steps[4:] == (Copy(source, target), Fill(target, 0), Fill(target, 7))
    assert found.steps[4].arguments == (target, source)


def test_a_kernel_in_the_code_of_all():
    """As XLA has it in older versions: launches name their kernels, and one binary holds them."""
    dimensions = message((1, message((2, message((1, 5), (2, 3), (3, 1))))))
    dimensions += message((2, message((1, message((1, 64), (2, 1), (3, 1))))))
    kernel = message((1, slice_of(1, 0, 1048576)), (1, slice_of(0, 0, 1048576)), (2, b"\0\1"))
    kernel += message((3, b"kernel"), (4, dimensions), (6, 99))
    fields, written = executable()
    fields = [field for field in fields if field[0] != 13] + [(13, message((8, kernel)))]
    with pytest.raises(UnknownError, match="'kernel' has no machine code"):
        _executable.read(written(fields))
    (step,) = _executable.read(written([*fields, (4, b"\x7fELF...")])).steps
    assert step == _executable.Launch(
        *("kernel", b"\x7fELF...", (5, 3, 1), (64, 1, 1), 99),
        (Slice(1, 0, 1048576), Slice(0, 0, 1048576)),
        (Slice(0, 0, 1048576),),
    )


def test_a_kernel_of_mosaic_gpu_whose_code_is_cut_short():
    compiled = message((1, 4), (2, b"ELF"), (5, b"host"), (8, b"\x7fELF\2\1\1"), (9, b"kernel"))
    state = message((1, _executable.MOSAIC_STATE), (2, compiled))
    call = message((1, _executable.MOSAIC_GPU), (6, b""), (8, state))
    thunk = message((1, b""), (30, call))
    with pytest.raises(UnknownError, match="not what they seem: unpack_from requires"):
        _executable.read(changed((13,), to(thunk)))


def test_an_argument_behind_its_allocation():
    """As a kernel of Mosaic GPU may have one that begins behind its array's end."""
    argument, result = Slice(0, 128, -64), Slice(0, 0, 64)
    launch = _executable.Launch("kernel", b"", (1, 1, 1), (32, 1, 1), 0, (argument,), (result,))
    found = _executable.Executable({0: Allocation(64, None, False)}, (launch,), (0,))
    with pytest.raises(UnknownError, match="is not in the allocations"):
        _executable._check(found)


SYMBOL = b"buffer_for_constant_22_0"
CONSTANT_SIZE = 1048576


def hlo(name=b"constant.22_0", opcode=b"constant", literal=((8, b"\1" * CONSTANT_SIZE),), count=1):
    """Instructions with a literal, and with fields that the reader has no name for."""
    instruction = message((1, name), (2, opcode), (35, 7), (8, message((1, b"shape"), *literal)))
    computation = message((1, b"main"), *[(2, instruction)] * count)
    return message((1, message((1, b"module"), (3, computation))), (2, b"the configuration"))


def with_a_constant(
    number=3, info=((1, SYMBOL), (3, 3)), code=b"\x7fELF of all", program=None, size=CONSTANT_SIZE
):
    """A sample in which an allocation, the third parameter's, is a constant."""
    fields, written = executable()
    every = [fields_of(each) for _, each in fields_of(dict(fields)[10])]
    constant = [
        (1, number),
        (2, size if number == 3 else _executable.read(sample(NAMES[0])).allocations[number].size),
        (12, 1),
    ]
    allocations = [constant if (1, number) in each else each for each in every]
    whole = message(*((1, message(*each)) for each in allocations))
    rest = [field for field in fields if field[0] not in (1, 4, 10)]
    described = (1, hlo() if program is None else program)
    return written([*rest, described, (4, code), (10, whole), (12, message(*info))])


def test_a_constant_in_the_machine_code():
    """XLA reserves its memory there, and takes its value from the HLO when it loads the code."""
    found = _executable.read(with_a_constant())
    assert found.constants == {3: Constant(SYMBOL.decode(), b"\1" * CONSTANT_SIZE)}
    assert found.code == b"\x7fELF of all"
    assert found.allocations[3] == Allocation(CONSTANT_SIZE, None, True)
    # Or it writes the value beside the name.
    beside = ((1, SYMBOL), (3, 3), (2, message((1, b"\2" * CONSTANT_SIZE))))
    found = _executable.read(with_a_constant(info=beside, program=b""))
    assert found.constants[3].content == b"\2" * CONSTANT_SIZE
    short = ((8, b"\1" * 4),)
    for changes, reason in [
        ({"program": b""}, "whose value is not known"),
        ({"program": hlo(name=b"constant.23")}, "whose value is not known"),
        ({"program": hlo(opcode=b"iota")}, "whose value is not known"),
        ({"program": hlo(count=2)}, "whose value is not known"),
        ({"program": hlo(literal=((12, b"complex"),))}, "whose value is not known"),
        ({"program": hlo(literal=short)}, "has 4 bytes"),
        ({"info": ((1, SYMBOL), (3, 1))}, "the constant 1 is not in the allocations"),
        ({"info": ((1, SYMBOL), (3, 99))}, "the constant 99 is not in the allocations"),
        ({"info": ((3, 3),)}, "symbol_name is there 0 times"),
        ({"info": ((1, SYMBOL), (3, 3), (4, 1))}, "ConstantInfoProto has a field 4"),
        ({"code": b""}, "no machine code that holds them"),
    ]:
        with pytest.raises(UnknownError, match=reason):
            _executable.read(with_a_constant(**changes))
    written = ((1, SYMBOL), (3, 10), (2, message((1, b"\2" * found.allocations[10].size))))
    with pytest.raises(UnknownError, match="a step writes to a constant"):
        _executable.read(with_a_constant(10, written))


@pytest.mark.parametrize(
    ("literal", "content"),
    [
        ((8, b"abcdefgh"), b"abcdefgh"),  # f32s
        ((4, b"\5" + b"\xff" * 9 + b"\1"), b"\5\0\0\0\xff\xff\xff\xff"),  # s32s: 5 and -1
        ((2, b"\0\1\1\0\1\1\0\0"), b"\0\1\1\0\1\1\0\0"),  # preds
        ((7, b"\x80\1"), b"\x80\0\0\0\0\0\0\0"),  # u64s: 128
    ],
)
def test_values_of_constants(literal, content):
    made = with_a_constant(program=hlo(literal=(literal,)), size=8)
    with pytest.raises(UnknownError, match="is not in the allocations"):  # a step reads more of it
        _executable.read(made)
    assert _executable._literals(hlo(literal=(literal,))) == {SYMBOL.decode(): content}


# What is refused

THUNK = (13, 36)
KERNEL = (13, 36, 3)
LOADER = (13, 36, 3, 2)


def plus(*fields):
    return lambda data: data + message(*fields)


def to(value):
    return lambda data: value


@pytest.mark.parametrize(
    ("path", "edit", "reason"),
    [
        (THUNK, plus((9, 1)), "CustomKernelThunkProto has a field 9"),
        (THUNK, plus((6, message((2, b"")))), "TmaMetadataProto has a field 2"),
        (THUNK, plus((4, 1)), "CustomKernelThunkProto.use_pdl is not one number"),
        ((13, 36, 4), to(2), "CustomKernelThunkProto.use_pdl is 2"),
        ((13, 36, 2), to(b"\0\0\1"), "writes to"),
        ((13, 36, 2), to(b"\1\0\1\1"), "a step writes to a parameter"),
        ((13, 36, 1, 1, 3), to(99), "is not in the allocations"),
        ((13, 36, 1, 1, 2), to(1048577), "is not in the allocations"),
        (KERNEL, plus((5, message((3, message((1, 2), (2, 1), (3, 1)))))), "clusters of blocks"),
        (THUNK, plus((5, b"\1")), "memory filled with zeros"),
        (KERNEL, plus((7, 1)), "CustomKernelProto has a field 7"),
        ((*KERNEL, 3), to(message((1, message((1, 4), (2, 1), (3, 1))))), "has a field 1"),
        ((*KERNEL, 4), to(message((1, message((1, 128))))), "dimensions 128, 0, 0"),
        (LOADER, plus((1, b"ptx")), "KernelLoaderSpecProto has a field 1"),
        ((*LOADER, 2, 1), to(b"ptx"), "has no machine code"),
        ((*LOADER, 3), to(5), "a kernel of 5 gets 4 arguments"),
        ((*LOADER, 5, 1, 1, 1), to(2), "in another order"),
        ((*LOADER, 5, 1, 1), to(message((1, 1), (2, 1))), "in another order"),
        ((*LOADER, 5, 1), plus((2, b"\1")), "an argument that is a constant"),
        ((*LOADER, 5), plus((1, message((1, message((1, 1), (2, 4)))))), "5 parameters for 4"),
        ((13,), to(message((1, b""), (7, b""))), "a step is a while_thunk, not a kernel"),
        ((13,), to(message((1, b""), (62, b""))), "ThunkProto has a field 62"),
        ((13,), to(message((1, b""))), "a step is"),
        ((10, 1), plus((8, 5)), "in the memory space 5"),
        ((10, 1), plus((12, 1)), "a step reads a constant whose value is not known"),
        ((10, 1), plus((13, 1)), "BufferAllocationProto has a field 13"),
        ((10,), plus((1, message((2, 4)))), "two allocations have one number"),
        ((11, 2), to(message((2, 1))), "a result is a parameter"),
        ((11, 2), to(message((1, 4))), "a result is written by no step"),
        ((11, 1), to(message((1, b"\1"))), "its results are"),
    ],
)
def test_what_is_not_known_is_refused(path, edit, reason):
    with pytest.raises(UnknownError, match=reason):
        _executable.read(changed(path, edit))


def test_a_field_that_is_new_is_refused():
    fields, written = executable()
    with pytest.raises(UnknownError, match="GpuExecutableProto has a field 18"):
        _executable.read(written([*fields, (18, b"")]))
    with pytest.raises(UnknownError, match="XLA gave no steps"):
        _executable.read(written([field for field in fields if field[0] != 13]))
    with pytest.raises(UnknownError, match=r"a method b'z'"):
        _executable.read(written(fields, method=b"z"))
    with pytest.raises(UnknownError, match=r"records of kind b't'"):
        _executable.read(written(fields, kind=b"t"))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_are_cut_short_are_refused(name):
    data = sample(name)
    for size in range(0, len(data) - 5, 7):
        with pytest.raises(UnknownError):
            _executable.read(data[:size])


def test_an_executable_for_a_cpu_is_refused():
    compiled = jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile()
    with pytest.raises(UnknownError, match="not in XLA's format|has a field"):
        _executable.read(compiled.runtime_executable().serialize())


def test_samples_hold_no_code():
    for name in NAMES:
        steps = _executable.read(sample(name)).steps
        codes = {step.code for step in steps if isinstance(step, _executable.Launch)}
        assert codes == {_executable.ELF}


# What XLA writes today

requires_plugin = pytest.mark.skipif(
    aot_executables.plugin() is None,
    reason="XLA's schema and what it compiles for a GPU come from JAX's CUDA plugin, see `make`",
)


@requires_plugin
@pytest.mark.newest
def test_fields_are_named_as_in_xla():
    schema = aot_executables.schema(aot_executables.plugin())
    is_newest = jax.__version_info__ >= (0, 12)
    for message_name, fields in _protobuf.FIELDS.items():
        theirs = schema[message_name]
        # A field that is newer than the oldest JAX is missing there, and none is another one.
        assert {n: name for n, name in fields.items() if n in theirs or is_newest} == {
            n: theirs[n] for n in fields if n in theirs
        }, message_name
    # A field that XLA adds here would close the direct road for every program.
    name = "xla.gpu.GpuExecutableProto"
    assert schema[name].keys() <= _protobuf.FIELDS[name].keys(), schema[name]


@requires_plugin
@pytest.mark.newest
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="this version of JAX serializes no steps of a program"
)
def test_programs_that_xla_compiles_are_read():
    found = aot_executables.compile_all()
    told = {name: steps for name, steps in found.items() if not name.endswith(": constants")}
    assert not [f"{name}: {steps}" for name, steps in told.items() if "refused" in steps[0]]
    assert found["attention"] == ["attention_forward"]
    assert found["attention, backward"] == ["attention_backward_dq", "attention_backward_dkv"]
    assert found["one query, lengths"][-1] == "attention_forward"
    assert found["linear"][-1] == "linear_attention_output"
    # A step of it reads a constant: ones in a triangle, [64, 128] in float32.
    assert "linear_attention_causal_output" in found["decay"], found["decay"]
    [constant] = found["decay: constants"]
    assert constant.endswith(f"of {4 * 64 * 128} bytes are not 0") and not constant.startswith("0 ")
    assert found["states, backward"][-3] == "linear_attention_causal_key_gradient"
    assert found["step"] == ["Copy", "linear_attention_step"]
    assert "Copy" not in found["delta step"]
    assert found["delta step"][-1] == "gated_delta_rule_step"
    # Kernels of Mosaic GPU among others, launched as their host code tells.
    of_mosaic = {
        name: [step for step in steps if step.endswith("_mosaic_mosaic_gpu_kernel")]
        for name, steps in found.items()
    }
    assert found["hopper attention"][0] in of_mosaic["hopper attention"]
    assert len(of_mosaic["hopper attention, backward"]) == 2
    assert len(of_mosaic["hopper linear"]) == 2
    for causal in ("", "causal "):
        assert of_mosaic[f"float8 {causal}attention"] == [
            f"attention_{name}_mosaic_mosaic_gpu_kernel" for name in ("transposition", "forward")
        ]
        sums, output = of_mosaic[f"float8 {causal}linear_attention"]
        assert sums.startswith("linear_attention_float8_sums") and "output" in output
