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

JAX hands out no schema, so `FIELDS` holds the part of XLA's that is needed: the fields of each
message, by the names and numbers of XLA's sources, where a field keeps its number for good. What is
not known here is never passed over: a field, a step, a compression that has no name in this file is
an `UnknownError`.

This module imports neither PyTorch nor JAX, and needs no GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

ELF = b"\x7fELF"

# The fields that a message may have. Those that no code below reads do not change what a launch
# does: they describe the program (its HLO, its name, the shapes of its arguments) or what it was
# compiled for. `gpu_topology`, new in JAX 0.12, is of the latter kind: how many cards the process
# sees, and what XLA knows about their model, the driver and the host's processor. The machine code
# itself is for one architecture, and the driver loads it on no other.
FIELDS = {
    "xla.ExecutableAndOptionsProto": {
        1: "serialized_executable",
        2: "compile_options",
        3: "pjrt_client_name",
    },
    "xla.SplitProtoManifest": {1: "result_proto_type", 2: "records"},
    "xla.Record": {2: "proto_merge_record", 3: "field_override_record"},
    "xla.Record.FieldOverrideRecord": {1: "field_path", 2: "field_type"},
    "xla.Record.FieldOverrideRecord.FieldPathPart": {1: "field_number"},
    "xla.gpu.GpuExecutableProto": {
        1: "hlo_module_with_config",
        2: "buffer_assignment",
        3: "asm_text",
        4: "binary",
        5: "dnn_compiled_graphs",
        6: "gpu_compute_capability",
        8: "module_name",
        9: "program_shape",
        10: "buffer_allocations",
        11: "output_info_map",
        12: "constants",
        13: "thunks",
        14: "executable_abi_version",
        15: "cpu_target_machine_options",
        16: "buffer_allocations_debug_summary",
        17: "gpu_topology",
    },
    "xla.gpu.GpuExecutableProto.RepeatedBufferAllocations": {1: "values"},
    "xla.gpu.GpuExecutableProto.OutputInfoMapEntry": {1: "shape_index", 2: "output_info"},
    "xla.gpu.GpuExecutableProto.OutputInfoProto": {
        1: "allocation_index",
        2: "passthrough",
        3: "alias_config",
    },
    "xla.gpu.GpuExecutableProto.ConstantInfoProto": {
        1: "symbol_name",
        2: "content",
        3: "allocation_index",
    },
    "xla.ShapeIndexProto": {1: "indexes"},
    "xla.BufferAllocationProto": {
        1: "index",
        2: "size",
        3: "is_thread_local",
        5: "is_entry_computation_parameter",
        6: "parameter_number",
        7: "maybe_live_out",
        8: "color",
        9: "assigned",
        10: "parameter_shape_index",
        11: "is_tuple",
        12: "is_constant",
    },
    "xla.buffer_assignment.BufferAllocationSliceProto": {
        1: "offset",
        2: "size",
        3: "buffer_allocation_index",
        4: "element_type",
    },
    "xla.ShapedSliceProto": {1: "slice", 2: "shape"},
    # Of some fifty kinds of steps those that are read here, and those that are refused by name.
    "xla.gpu.ThunkProto": {
        1: "thunk_info",
        2: "sequential_thunk",
        6: "conditional_thunk",
        7: "while_thunk",
        8: "kernel_thunk",
        9: "gemm_thunk",
        13: "device_to_device_copy_thunk",
        15: "cudnn_thunk",
        19: "memzero_thunk",
        22: "cublas_lt_matmul_thunk",
        28: "memset32bit_value_thunk",
        30: "custom_call_thunk",
        36: "custom_kernel_thunk",
        57: "async_start_thunk",
        58: "async_done_thunk",
    },
    "xla.gpu.SequentialThunkProto": {1: "thunks"},
    "xla.gpu.DeviceToDeviceCopyThunkProto": {1: "copy_thunk"},
    "xla.gpu.CopyThunkProto": {1: "source_buffer", 2: "destination_buffer", 3: "mem_size"},
    "xla.gpu.MemzeroThunkProto": {1: "dest_buffer"},
    "xla.gpu.Memset32BitValueThunkProto": {1: "dest_buffer", 2: "value"},
    "xla.gpu.KernelThunkProto": {
        1: "args",
        2: "written",
        3: "kernel_name",
        4: "launch_dimensions",
        5: "cluster_dim",
        6: "shmem_bytes",
        7: "tma_metadata",
        8: "args_shape",
        9: "zeroed_output_buffer_indices",
        10: "use_pdl",
    },
    "xla.gpu.LaunchDimensionsProto": {1: "block_counts", 2: "thread_counts_per_block"},
    "xla.gpu.CustomKernelThunkProto": {
        1: "args",
        2: "written",
        3: "custom_kernel",
        4: "use_pdl",
        5: "zeroed_output_buffer_indices",
        6: "tma_metadata",
    },
    "xla.gpu.CustomKernelProto": {
        1: "name",
        2: "kernel_spec",
        3: "block_dims",
        4: "thread_dims",
        5: "cluster_dim",
        6: "shared_memory_bytes",
    },
    "stream_executor.KernelLoaderSpecProto": {
        2: "cubin",
        3: "arity",
        4: "kernel_name",
        5: "kernel_args_packing_spec",
    },
    "stream_executor.CudaCubinProto": {1: "data"},
    "stream_executor.KernelArgsPackingSpecProto": {1: "kernel_arguments"},
    "stream_executor.KernelArgPackingSpecProto": {1: "relocations", 2: "data"},
    "stream_executor.KernelArgPackingRelocationProto": {1: "kind", 2: "argument_index"},
    "stream_executor.BlockDimProto": {2: "coordinates"},
    "stream_executor.ThreadDimProto": {1: "coordinates"},
    "stream_executor.ClusterDimProto": {3: "coordinates"},
    "stream_executor.Dim3DProto": {1: "x", 2: "y", 3: "z"},
}
# A KernelArgPackingRelocationProto's kind: an address of 64 bits, as it is.
KIND_BITS64_ABSOLUTE = 1


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
    """`results` are the numbers of the allocations that hold them, each the whole of it.

    `constants` are the numbers of those that lie in the machine code `code`, with the names that
    they have there.
    """

    allocations: dict[int, Allocation]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    constants: dict[int, str] = dataclasses.field(default_factory=dict)
    code: bytes = dataclasses.field(default=b"", repr=False)


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
    return Message(name, data).part("serialized_executable")


# Protocol buffers


class Message:
    """The fields of a message by their names in `FIELDS`; one that has no name there is refused."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name.rpartition(".")[2]
        self.fields: dict[str, list[int | bytes]] = {}
        known = FIELDS[name]
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
            self.fields.setdefault(known[number], []).append(value)

    def __contains__(self, field: str) -> bool:
        return field in self.fields

    def parts(self, field: str) -> list[bytes]:
        """A repeated field."""
        found = self.fields.get(field, [])
        if not all(isinstance(value, bytes) for value in found):
            raise UnknownError(f"{self.name}.{field} is a number")
        return found  # type: ignore[return-value]

    def part(self, field: str) -> bytes:
        """A field that has to be there, once."""
        found = self.parts(field)
        if len(found) != 1:
            raise UnknownError(f"{self.name}.{field} is there {len(found)} times, not once")
        return found[0]

    def number(self, field: str) -> int:
        """A number; one that is 0 is left out."""
        found = self.fields.get(field, [0])
        if len(found) != 1 or not isinstance(found[0], int):
            raise UnknownError(f"{self.name}.{field} is not one number")
        return found[0]

    def numbers(self, field: str) -> list[int]:
        """Repeated ones, as one field or as many."""
        found: list[int] = []
        for value in self.fields.get(field, []):
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
    fields = Message(name, _joined(name, data))
    thunks = fields.parts("thunks")
    if not thunks:
        raise UnknownError("XLA gave no steps with it")
    # Of a field that merged from several records, the last one counts.
    code = [b"", *fields.parts("binary")][-1]
    steps = tuple(step for thunk in thunks for step in _steps(thunk, code))
    wrapped = Message(f"{name}.RepeatedBufferAllocations", fields.part("buffer_allocations"))
    allocations = dict(map(_allocation, wrapped.parts("values")))
    if len(allocations) != len(wrapped.parts("values")):
        raise UnknownError("two allocations have one number")
    results = _results(fields.parts("output_info_map"))
    constants = dict(_constants(fields.parts("constants")))
    found = Executable(allocations, steps, results, constants, code)
    _check(found)
    return found


def _joined(name: str, data: bytes) -> bytes:
    """One message of the records: some are fields, the others parts of the whole."""
    found = list(records(data))
    manifest = Message("xla.SplitProtoManifest", found[0])
    if manifest.part("result_proto_type") != name.encode():
        raise UnknownError(f"it is a {manifest.part('result_proto_type')!r}")
    parts = []
    for said, record in zip(manifest.parts("records"), found[1:], strict=True):
        how = Message("xla.Record", said)
        if "field_override_record" in how:
            record = _as_field(_overridden(how.part("field_override_record")), record)
        parts.append(record)
    # That is how protocol buffers merge.
    return b"".join(parts)


def _overridden(data: bytes) -> int:
    """The number of the field that a record is."""
    name = "xla.Record.FieldOverrideRecord"
    path = Message(name, data).part("field_path")
    return Message(f"{name}.FieldPathPart", path).number("field_number")


def _as_field(number: int, value: bytes) -> bytes:
    return _as_varint(number << 3 | 2) + _as_varint(len(value)) + value


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _allocation(data: bytes) -> tuple[int, Allocation]:
    fields = Message("xla.BufferAllocationProto", data)
    if fields.number("color"):
        raise UnknownError(f"an allocation is in the memory space {fields.number('color')}")
    parameter = None
    if fields.number("is_entry_computation_parameter"):
        if "parameter_shape_index" in fields:
            raise UnknownError("a parameter is a tuple")
        parameter = fields.number("parameter_number")
    is_constant = bool(fields.number("is_constant"))
    return fields.number("index"), Allocation(fields.number("size"), parameter, is_constant)


def _results(entries: list[bytes]) -> tuple[int, ...]:
    """The numbers of the allocations, in the order of the results."""
    name = "xla.gpu.GpuExecutableProto"
    found: dict[tuple[int, ...], int] = {}
    for data in entries:
        entry = Message(f"{name}.OutputInfoMapEntry", data)
        index = tuple(
            Message("xla.ShapeIndexProto", entry.part("shape_index")).numbers("indexes")
        )
        info = Message(f"{name}.OutputInfoProto", entry.part("output_info"))
        if info.number("passthrough") or "alias_config" in info:
            raise UnknownError("a result is a parameter")
        found[index] = info.number("allocation_index")
    if len(found) > 1:
        # Of a tuple there is one more, its table of addresses, which nobody reads.
        found.pop((), None)
    elif () in found:
        found = {(0,): found[()]}
    order = [(n,) for n in range(len(found))]
    if sorted(found) != order or not len(set(found.values())) == len(found) <= len(entries):
        raise UnknownError(f"its results are {found}")
    return tuple(found[index] for index in order)


def _constants(entries: list[bytes]) -> Iterator[tuple[int, str]]:
    """(allocation, symbol) of each constant in the machine code. Others have a `content`, with
    which XLA fills them."""
    for data in entries:
        info = Message("xla.gpu.GpuExecutableProto.ConstantInfoProto", data)
        if not any(info.parts("content")):
            yield info.number("allocation_index"), info.part("symbol_name").decode()


def _check(found: Executable) -> None:
    """What holds where all was understood rightly."""
    allocations, steps, results = found.allocations, found.steps, found.results
    for number in found.constants:
        if number not in allocations or not allocations[number].is_constant:
            raise UnknownError(f"the constant {number} is not in the allocations")
    if found.constants and not found.code.startswith(ELF):
        raise UnknownError("its constants have no machine code that holds them")
    for step in steps:
        for each in step.arguments:
            whole = allocations.get(each.allocation)
            if whole is None or each.offset + each.size > whole.size or not each.size:
                raise UnknownError(f"{each} is not in the allocations")
            if whole.is_constant and each.allocation not in found.constants:
                raise UnknownError("a step reads a constant that its machine code does not hold")
        for each in step.written:
            if allocations[each.allocation].parameter is not None:
                raise UnknownError("a step writes to a parameter")
            if each.allocation in found.constants:
                raise UnknownError("a step writes to a constant")
    written = {each.allocation for step in steps for each in step.written}
    if not written.issuperset(results):
        raise UnknownError("a result is written by no step")


def _steps(data: bytes, code: bytes) -> Iterator[Step]:
    """The steps of a ThunkProto; kernels that bring no code are in that of all."""
    fields = Message("xla.gpu.ThunkProto", data)
    kinds = set(fields.fields) - {"thunk_info"}
    if len(kinds) != 1:
        raise UnknownError(f"a step is {sorted(kinds)}")
    (kind,) = kinds
    thunk = fields.part(kind)
    if kind == "sequential_thunk":
        for each in Message("xla.gpu.SequentialThunkProto", thunk).parts("thunks"):
            yield from _steps(each, code)
    elif kind == "kernel_thunk":
        yield _kernel(thunk, code)
    elif kind == "custom_kernel_thunk":
        yield _custom_kernel(thunk)
    elif kind == "device_to_device_copy_thunk":
        copy = Message("xla.gpu.DeviceToDeviceCopyThunkProto", thunk)
        copy = Message("xla.gpu.CopyThunkProto", copy.part("copy_thunk"))
        source, target = (_slice(copy.part(f"{end}_buffer")) for end in ("source", "destination"))
        size = copy.number("mem_size")
        if not source.size == target.size == size:
            raise UnknownError(f"a copy of {source} to {target} is of {size} bytes")
        yield Copy(source, target)
    elif kind == "memzero_thunk":
        yield _fill(Message("xla.gpu.MemzeroThunkProto", thunk), 0)
    elif kind == "memset32bit_value_thunk":
        fill = Message("xla.gpu.Memset32BitValueThunkProto", thunk)
        yield _fill(fill, fill.number("value"))
    else:
        raise UnknownError(f"a step is a {kind}, not a kernel, a copy or a fill")


def _fill(fields: Message, value: int) -> Fill:
    target = _slice(fields.part("dest_buffer"))
    if target.size % 4 or target.offset % 4:
        raise UnknownError(f"{target} is filled, which is not of whole words")
    return Fill(target, value)


def _kernel(data: bytes, code: bytes) -> Launch:
    fields = Message("xla.gpu.KernelThunkProto", data)
    _check_plain(fields)
    dimensions = Message("xla.gpu.LaunchDimensionsProto", fields.part("launch_dimensions"))
    return _launch(
        fields.part("kernel_name").decode(),
        code,
        _dimensions("Block", dimensions.part("block_counts")),
        _dimensions("Thread", dimensions.part("thread_counts_per_block")),
        fields.number("shmem_bytes"),
        [_slice(each) for each in fields.parts("args")],
        fields.numbers("written"),
    )


def _custom_kernel(data: bytes) -> Launch:
    fields = Message("xla.gpu.CustomKernelThunkProto", data)
    _check_plain(fields)
    kernel = Message("xla.gpu.CustomKernelProto", fields.part("custom_kernel"))
    _check_no_clusters(kernel)
    loader = Message("stream_executor.KernelLoaderSpecProto", kernel.part("kernel_spec"))
    arguments = [_slice(each) for each in fields.parts("args")]
    arity = loader.number("arity")
    if arity != len(arguments):
        raise UnknownError(f"a kernel of {arity} gets {len(arguments)} arguments")
    if "kernel_args_packing_spec" in loader:
        _check_packing(loader.part("kernel_args_packing_spec"), len(arguments))
    return _launch(
        loader.part("kernel_name").decode(),
        Message("stream_executor.CudaCubinProto", loader.part("cubin")).part("data"),
        _dimensions("Block", kernel.part("block_dims")),
        _dimensions("Thread", kernel.part("thread_dims")),
        kernel.number("shared_memory_bytes"),
        arguments,
        fields.numbers("written"),
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


def _check_plain(fields: Message) -> None:
    """That a launch of either kind is of the addresses alone.

    One that may use programmatic dependent launch (`use_pdl`) begins before the kernel ahead of it
    has ended, and waits for that itself. Where it is not launched so, there is nothing to wait for.
    """
    if fields.number("use_pdl") not in (0, 1):
        raise UnknownError(f"{fields.name}.use_pdl is {fields.number('use_pdl')}")
    _check_no_clusters(fields)
    if any(fields.parts("tma_metadata")):
        raise UnknownError("a kernel has arguments that are descriptors of tensors")
    if fields.numbers("zeroed_output_buffer_indices"):
        raise UnknownError("a kernel wants memory filled with zeros")


def _check_no_clusters(fields: Message) -> None:
    for each in fields.parts("cluster_dim"):
        if _dimensions("Cluster", each) != (1, 1, 1):
            raise UnknownError("a kernel has clusters of blocks")


def _check_packing(data: bytes, count: int) -> None:
    """That the kernel gets the addresses as they are listed."""
    spec = Message("stream_executor.KernelArgsPackingSpecProto", data)
    packed = spec.parts("kernel_arguments")
    for n, each in enumerate(packed):
        argument = Message("stream_executor.KernelArgPackingSpecProto", each)
        if any(any(value) for value in argument.parts("data")):
            raise UnknownError("a kernel has an argument that is a constant")
        place = Message(
            "stream_executor.KernelArgPackingRelocationProto", argument.part("relocations")
        )
        if (place.number("kind"), place.number("argument_index")) != (KIND_BITS64_ABSOLUTE, n):
            raise UnknownError("a kernel has its arguments in another order")
    if len(packed) != count:
        raise UnknownError(f"a kernel has {len(packed)} parameters for {count} arguments")


def _dimensions(of: str, data: bytes) -> tuple[int, int, int]:
    """How many blocks, threads in a block, or blocks in a cluster there are."""
    wrapped = Message(f"stream_executor.{of}DimProto", data).part("coordinates")
    sizes = Message("stream_executor.Dim3DProto", wrapped)
    x, y, z = (sizes.number(axis) for axis in "xyz")
    if not x * y * z:
        raise UnknownError(f"a kernel has the dimensions {x}, {y}, {z}")
    return x, y, z


def _slice(data: bytes) -> Slice:
    """A slice, or what holds one and its shape: the first field of that is a message."""
    if data[:1] == _as_varint(1 << 3 | 2):
        data = Message("xla.ShapedSliceProto", data).part("slice")
    fields = Message("xla.buffer_assignment.BufferAllocationSliceProto", data)
    return Slice(
        fields.number("buffer_allocation_index"), fields.number("offset"), fields.number("size")
    )
