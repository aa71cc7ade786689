"""What XLA compiled for an NVIDIA GPU: machine code, and in which order to launch it on what.

    executable = read(compiled.runtime_executable().serialize())

JAX hands out a compiled program as bytes, into which XLA puts the very steps ("thunks") that it
would run itself (seen from JAX 0.11 on): a launch has the kernel's machine code, its grid, and its
arguments as slices of numbered allocations, among which are the program's parameters, its results
and scratch. From the outside in:

    a header of IFRT's, its length before it
    ExecutableAndOptionsProto       protocol buffers
    a Riegeli file of records       chunks compressed by Snappy, in blocks of 64 KiB
    GpuExecutableProto              in several records, which a first one lists

No schema comes with JAX, so fields have numbers here; messages are named as in XLA's sources, where
a field keeps its number for good. What is not known here is never passed over: a field, a step, a
compression that has no name in this file is an `UnknownError`.

Needs neither a GPU nor PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

ELF = b"\x7fELF"


class UnknownError(Exception):
    """What in an executable is not understood."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """`size` bytes of an allocation."""

    allocation: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Allocation:
    """`parameter` is its number, where it is one; an `is_constant` one is part of the code."""

    size: int
    parameter: int | None
    is_constant: bool


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel: the machine code that holds it by that name, and its arguments, all addresses."""

    name: str
    code: bytes = dataclasses.field(repr=False)
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[Slice, ...]
    written: tuple[Slice, ...]


@dataclasses.dataclass(frozen=True)
class Copy:
    """Bytes from one place on the device to another."""

    source: Slice
    target: Slice

    @property
    def arguments(self) -> tuple[Slice, ...]:
        return self.target, self.source

    @property
    def written(self) -> tuple[Slice, ...]:
        return (self.target,)


@dataclasses.dataclass(frozen=True)
class Fill:
    """Words of 32 bits, all of them `value`."""

    target: Slice
    value: int

    @property
    def arguments(self) -> tuple[Slice, ...]:
        return (self.target,)

    @property
    def written(self) -> tuple[Slice, ...]:
        return (self.target,)


Step = Launch | Copy | Fill


@dataclasses.dataclass(frozen=True)
class Executable:
    """`results` are the numbers of the allocations that hold them, each the whole of it."""

    allocations: dict[int, Allocation]
    steps: tuple[Step, ...]
    results: tuple[int, ...]


def read(data: bytes) -> Executable:
    """The executable in what `serialize` returned, or `UnknownError`."""
    try:
        return _executable(_payload(data))
    except (IndexError, ValueError, UnicodeDecodeError) as error:
        raise UnknownError(f"its bytes are not what they seem: {error}") from error


def _payload(data: bytes) -> bytes:
    size, start = _varint(data, 0)
    name, data = "xla.ExecutableAndOptionsProto", data[start + size :]
    if data.startswith(SIGNATURE):  # from some version on; before, it is a message at once
        data = _joined(name, data)
    return Message(name, data, known={1, 2, 3, 4, 5}).part(1)


# Protocol buffers


class Message:
    """The fields of a message by their number; those that are not `known` must not be there."""

    def __init__(self, name: str, data: bytes, known: set[int]) -> None:
        self.name = name
        self.fields: dict[int, list[int | bytes]] = {}
        place = 0
        while place < len(data):
            tag, place = _varint(data, place)
            number, kind = tag >> 3, tag & 7
            value: int | bytes
            if kind == 0:
                value, place = _varint(data, place)
            else:
                if kind == 2:
                    size, place = _varint(data, place)
                elif kind in (1, 5):
                    size = 8 if kind == 1 else 4
                else:
                    raise UnknownError(f"{name} has a field of kind {kind}")
                value, place = data[place : place + size], place + size
                if place > len(data):
                    raise UnknownError(f"{name} ends in the middle of a field")
            if number not in known:
                raise UnknownError(f"{name} has a field {number}")
            self.fields.setdefault(number, []).append(value)

    def __contains__(self, number: int) -> bool:
        return number in self.fields

    def parts(self, number: int) -> list[bytes]:
        """A repeated field."""
        found = self.fields.get(number, [])
        if not all(isinstance(value, bytes) for value in found):
            raise UnknownError(f"field {number} of {self.name} is a number")
        return found  # type: ignore[return-value]

    def part(self, number: int) -> bytes:
        """A field that has to be there, once."""
        found = self.parts(number)
        if len(found) != 1:
            raise UnknownError(f"{self.name} has {len(found)} fields {number} where one belongs")
        return found[0]

    def number(self, number: int) -> int:
        """A number; one that is 0 is left out."""
        found = self.fields.get(number, [0])
        if len(found) != 1 or not isinstance(found[0], int):
            raise UnknownError(f"field {number} of {self.name} is no number")
        return found[0]

    def numbers(self, number: int) -> list[int]:
        """Repeated ones, as one field or as many."""
        found: list[int] = []
        for value in self.fields.get(number, []):
            found += [value] if isinstance(value, int) else _varints(value)
        return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """(the number, where it ends)"""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _varints(data: bytes) -> list[int]:
    found, place = [], 0
    while place < len(data):
        value, place = _varint(data, place)
        found.append(value)
    return found


# Riegeli and Snappy

BLOCK, BLOCK_HEADER, CHUNK_HEADER = 1 << 16, 24, 40
SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f00000000000000004000000000000000"
    "91bac23c9287e1a90000000000000000e19f13c0e9b1c37273000000000000000000000000000000"
)


def records(data: bytes) -> Iterator[bytes]:
    """The records of a Riegeli file."""
    if not data.startswith(SIGNATURE):
        raise UnknownError("it is not in XLA's format of records")
    # A header before each block of the file, wherever in a chunk that is, belongs to no chunk.
    data = b"".join(
        data[start + BLOCK_HEADER : start + BLOCK] for start in range(0, len(data), BLOCK)
    )
    place = CHUNK_HEADER  # past the signature's own chunk
    while place < len(data):
        header = data[place : place + CHUNK_HEADER]
        size, decoded = (int.from_bytes(header[n : n + 8], "little") for n in (8, 32))
        kind, count = header[24:25], int.from_bytes(header[25:32], "little")
        start = place + CHUNK_HEADER
        chunk, place = data[start : start + size], start + size
        # Chunks of no more bytes than records are padded.
        if kind != b"r" or place > len(data) or count > size:
            raise UnknownError(f"it has a chunk of {count} records of kind {kind!r}")
        length, begin = _varint(chunk, 1)
        sizes = _varints(_decompressed(chunk[:1], chunk[begin : begin + length]))
        values = _decompressed(chunk[:1], chunk[begin + length :])
        if len(sizes) != count or sum(sizes) != decoded or len(values) != decoded:
            raise UnknownError("the records of a chunk are not as long as it says")
        end = 0
        for size in sizes:
            end += size
            yield values[end - size : end]


def _decompressed(kind: bytes, data: bytes) -> bytes:
    if kind == b"\0":
        return data
    if kind != b"s":
        raise UnknownError(f"it is compressed by a method {kind!r}")
    size, place = _varint(data, 0)
    return _unsnapped(data[place:], size)


def _unsnapped(data: bytes, size: int) -> bytes:
    """What Snappy compressed."""
    stated, place = _varint(data, 0)
    found = bytearray()
    while place < len(data):
        tag = data[place]
        place += 1
        kind, length = tag & 3, (tag >> 2) + 1
        if kind == 0:  # bytes as they are
            if length > 60:
                wide = length - 60
                length = int.from_bytes(data[place : place + wide], "little") + 1
                place += wide
            found += data[place : place + length]
            place += length
            continue
        # Bytes that were there before.
        if kind == 1:
            length = (tag >> 2 & 7) + 4
            back = (tag >> 5) << 8 | data[place]
            place += 1
        else:
            wide = 2 if kind == 2 else 4
            back = int.from_bytes(data[place : place + wide], "little")
            place += wide
        start = len(found) - back
        if back == 0 or start < 0:
            raise UnknownError("its compressed bytes point outside")
        part = found[start : start + length]
        while len(part) < length:  # what it copies begins with what it wrote
            part += part[: length - len(part)]
        found += part
    if not len(found) == stated == size:
        raise UnknownError("its compressed bytes are not as many as they say")
    return bytes(found)


# XLA's messages


def _executable(data: bytes) -> Executable:
    name = "xla.gpu.GpuExecutableProto"
    # 16 is a report on memory.
    fields = Message(name, _joined(name, data), known=set(range(1, 17)))
    # 7 was the root of the steps, before 13 was a list of them.
    thunks = [*fields.parts(7), *fields.parts(13)]
    if not thunks:
        raise UnknownError("XLA gave no steps with it")
    # Of a field that merged from several records, the last one counts.
    code = [b"", *fields.parts(4)][-1]
    steps = tuple(step for thunk in thunks for step in _steps(thunk, code))
    wrapped = Message("RepeatedBufferAllocations", fields.part(10), known={1})
    allocations = dict(map(_allocation, wrapped.parts(1)))
    if len(allocations) != len(wrapped.parts(1)):
        raise UnknownError("two allocations have one number")
    results = _results(fields.parts(11))
    _check(allocations, steps, results)
    return Executable(allocations, steps, results)


def _joined(name: str, data: bytes) -> bytes:
    """One message of the records: some are fields, the others parts of the whole."""
    found = list(records(data))
    manifest = Message("SplitProtoManifest", found[0], known={1, 2})
    if manifest.part(1) != name.encode():
        raise UnknownError(f"it is a {manifest.part(1)!r}")
    parts = []
    for said, record in zip(manifest.parts(2), found[1:], strict=True):
        how = Message("Record", said, known={2, 3})
        if 3 in how:
            override = Message("FieldOverrideRecord", how.part(3), known={1, 2})
            number = Message("FieldPath", override.part(1), known={1}).number(1)
            record = _as_field(number, record)
        parts.append(record)
    # That is how protocol buffers merge.
    return b"".join(parts)


def _as_field(number: int, value: bytes) -> bytes:
    return _as_varint(number << 3 | 2) + _as_varint(len(value)) + value


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _allocation(data: bytes) -> tuple[int, Allocation]:
    # 3 is one of a thread on a CPU, 7 and 8 are how long it lives and in what memory, 9 is what
    # lies in it, 11 a table of addresses.
    fields = Message("BufferAllocationProto", data, known={1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12})
    if fields.number(8):
        raise UnknownError(f"an allocation is in the memory space {fields.number(8)}")
    parameter = None
    if fields.number(5):
        if 10 in fields:
            raise UnknownError("a parameter is a tuple")
        parameter = fields.number(6)
    return fields.number(1), Allocation(fields.number(2), parameter, bool(fields.number(12)))


def _results(entries: list[bytes]) -> tuple[int, ...]:
    """The numbers of the allocations, in the order of the results."""
    found: dict[tuple[int, ...], int] = {}
    for data in entries:
        entry = Message("OutputInfoMapEntry", data, known={1, 2})
        index = tuple(Message("ShapeIndexProto", entry.part(1), known={1}).numbers(1))
        info = Message("OutputInfoProto", entry.part(2), known={1, 2, 3})
        if info.number(2) or 3 in info:
            raise UnknownError("a result is a parameter")
        found[index] = info.number(1)
    if len(found) > 1:
        # Of a tuple there is one more, its table of addresses, which nobody reads.
        found.pop((), None)
    elif () in found:
        found = {(0,): found[()]}
    order = [(n,) for n in range(len(found))]
    if sorted(found) != order or not len(set(found.values())) == len(found) <= len(entries):
        raise UnknownError(f"its results are {found}")
    return tuple(found[index] for index in order)


def _check(
    allocations: dict[int, Allocation], steps: tuple[Step, ...], results: tuple[int, ...]
) -> None:
    """What holds where all was understood rightly."""
    for step in steps:
        for each in step.arguments:
            whole = allocations.get(each.allocation)
            if whole is None or each.offset + each.size > whole.size or not each.size:
                raise UnknownError(f"{each} is not in the allocations")
            if whole.is_constant:
                raise UnknownError("a step reads a constant")
        if any(allocations[each.allocation].parameter is not None for each in step.written):
            raise UnknownError("a step writes to a parameter")
    written = {each.allocation for step in steps for each in step.written}
    if not written.issuperset(results):
        raise UnknownError("a result is written by no step")


def _steps(data: bytes, code: bytes) -> Iterator[Step]:
    """The steps of a ThunkProto; kernels that bring no code are in that of all."""
    named = {1, 2, 8, 13, 19, 28, 36}
    fields = Message("ThunkProto", data, known=set(range(1, 200)))
    kinds = set(fields.fields) - {1}
    if len(kinds) != 1:
        raise UnknownError(f"a step is {sorted(kinds)}")
    (kind,) = kinds
    if kind not in named:
        raise UnknownError(f"a step of kind {kind} is none of its kernels")
    thunk = fields.part(kind)
    if kind == 2:
        for each in Message("SequentialThunkProto", thunk, known={1}).parts(1):
            yield from _steps(each, code)
    elif kind == 8:
        yield _kernel(thunk, code)
    elif kind == 36:
        yield _custom_kernel(thunk)
    elif kind == 13:
        copy = Message("DeviceToDeviceCopyThunkProto", thunk, known={1})
        copy = Message("CopyThunkProto", copy.part(1), known={1, 2, 3})
        source, target = _slice(copy.part(1)), _slice(copy.part(2))
        if not source.size == target.size == copy.number(3):
            raise UnknownError(f"a copy of {source} to {target} is of {copy.number(3)} bytes")
        yield Copy(source, target)
    else:
        fill = Message("MemsetThunkProto", thunk, known={1, 2} if kind == 28 else {1})
        target = _slice(fill.part(1))
        if target.size % 4 or target.offset % 4:
            raise UnknownError(f"{target} is filled, which is not of whole words")
        yield Fill(target, fill.number(2))


def _kernel(data: bytes, code: bytes) -> Launch:
    # 8 are the arguments' shapes.
    fields = Message("KernelThunkProto", data, known=set(range(1, 11)))
    _check_plain(fields, early=10, cluster=5, metadata=7, zeroed=9)
    dimensions = Message("LaunchDimensionsProto", fields.part(4), known={1, 2})
    return _launch(
        fields.part(3).decode(),
        code,
        _dimensions(dimensions.part(1), 2),
        _dimensions(dimensions.part(2), 1),
        fields.number(6),
        [_slice(each) for each in fields.parts(1)],
        fields.numbers(2),
    )


def _custom_kernel(data: bytes) -> Launch:
    fields = Message("CustomKernelThunkProto", data, known={1, 2, 3, 4, 6})
    _check_plain(fields, early=4, metadata=6)
    kernel = Message("CustomKernelProto", fields.part(3), known=set(range(1, 7)))
    _check_plain(kernel, cluster=5)
    loader = Message("KernelLoaderSpecProto", kernel.part(2), known={2, 3, 4, 5})
    arguments = [_slice(each) for each in fields.parts(1)]
    if loader.number(3) != len(arguments):
        raise UnknownError(f"a kernel of {loader.number(3)} gets {len(arguments)} arguments")
    if loader.parts(5):
        _check_packing(loader.part(5), len(arguments))
    return _launch(
        loader.part(4).decode(),
        Message("CudaCubinInMemoryProto", loader.part(2), known={1}).part(1),
        _dimensions(kernel.part(3), 2),
        _dimensions(kernel.part(4), 1),
        kernel.number(6),
        arguments,
        fields.numbers(2),
    )


def _launch(
    name: str,
    code: bytes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    arguments: list[Slice],
    written: list[int],
) -> Launch:
    if not code.startswith(ELF):
        raise UnknownError(f"the kernel {name!r} has no machine code")
    if len(written) != len(arguments) or not set(written) <= {0, 1}:
        raise UnknownError(f"the kernel {name!r} writes to {written}")
    targets = tuple(each for each, is_it in zip(arguments, written, strict=True) if is_it)
    return Launch(name, code, grid, block, shared_bytes, tuple(arguments), targets)


def _check_plain(
    fields: Message, early: int = 0, cluster: int = 0, metadata: int = 0, zeroed: int = 0
) -> None:
    """That a launch has none of these, but `early`: it may begin before the kernel ahead of it has
    ended, and waits for that itself. Where it is not launched so, there is nothing to wait for.
    """
    if fields.number(early) not in (0, 1):
        raise UnknownError(f"field {early} of {fields.name} is {fields.number(early)}")
    for each in fields.parts(cluster):
        (inner,) = Message("ClusterDimProto", each, known={1, 2, 3}).fields.values()
        if _sizes(inner[0]) != (1, 1, 1):
            raise UnknownError("a kernel has clusters of blocks")
    if any(fields.parts(metadata)):
        raise UnknownError("a kernel has arguments that are descriptors of tensors")
    if fields.numbers(zeroed):
        raise UnknownError("a kernel wants memory filled with zeros")


def _check_packing(data: bytes, count: int) -> None:
    """That the kernel gets the addresses as they are listed."""
    packed = Message("KernelArgsPackingSpecProto", data, known={1}).parts(1)
    for n, each in enumerate(packed):
        argument = Message("KernelArgPackingSpecProto", each, known={1, 2})
        if any(any(value) for value in argument.parts(2)):
            raise UnknownError("a kernel has an argument that is a constant")
        place = Message("KernelArgPackingRelocationProto", argument.part(1), known={1, 2, 3})
        # Of the first kind: 64 bits, as they are.
        if (place.number(1), place.number(2), place.number(3)) != (1, n, 0):
            raise UnknownError("a kernel has its arguments in another order")
    if len(packed) != count:
        raise UnknownError(f"a kernel has {len(packed)} parameters for {count} arguments")


def _dimensions(data: bytes, wrapper: int) -> tuple[int, int, int]:
    """A BlockDimProto's, whose wrapper is 2, or a ThreadDimProto's, where it is 1."""
    return _sizes(Message("DimProto", data, known={wrapper}).part(wrapper))


def _sizes(data: Any) -> tuple[int, int, int]:
    sizes = Message("Dim3DProto", data, known={1, 2, 3})
    x, y, z = (sizes.number(n) for n in (1, 2, 3))
    if not x * y * z:
        raise UnknownError(f"a kernel has the dimensions {x}, {y}, {z}")
    return x, y, z


def _slice(data: bytes) -> Slice:
    """A BufferAllocationSliceProto, or a ShapedSliceProto, which has one and its shape."""
    fields = Message("BufferAllocationSliceProto", data, known={1, 2, 3, 4})
    if any(isinstance(value, bytes) for value in fields.fields.get(1, [])):
        fields = Message("ShapedSliceProto", data, known={1, 2})
        return _slice(fields.part(1))
    # 4 is the type of an element.
    return Slice(fields.number(3), fields.number(1), fields.number(2))
