"""Reads a program that XLA compiled for an NVIDIA GPU: its kernels and the order of their launches.

    executable = read(compiled.runtime_executable().serialize())

JAX serializes a compiled program to bytes. From JAX 0.11 on these hold the steps ("thunks") that
XLA itself would run. A launch has the kernel's machine code, its grid, and its arguments as slices
of numbered allocations; the program's parameters, its results and its scratch memory are such
allocations. From the outside in, the bytes are:

    a header of IFRT, preceded by its length
    ExecutableAndOptionsProto       protocol buffers (`_protobuf`)
    a Riegeli file of records       chunks compressed by Snappy, in blocks of 64 KiB (`_riegeli`)
    GpuExecutableProto              split over several records, which the first record lists

Nothing unknown is skipped: a field, a step or a compression that has no name in these modules is an
`UnknownError`. The one exception is the HLO, the program before it was compiled: only the values of
constants are taken from it.

This module imports neither PyTorch nor JAX, and needs no GPU.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping

from ato_torch import _mosaic, _tensor_maps
from ato_torch._protobuf import (
    KIND_BITS64_ABSOLUTE,
    Message,
    UnknownError,
    read_varint,
    write_field,
)
from ato_torch._riegeli import SIGNATURE, records
from ato_torch._steps import Allocation as Allocation
from ato_torch._steps import Constant as Constant
from ato_torch._steps import Copy as Copy
from ato_torch._steps import Executable as Executable
from ato_torch._steps import Fill as Fill
from ato_torch._steps import Launch as Launch
from ato_torch._steps import Slice as Slice
from ato_torch._steps import Step as Step

ELF = b"\x7fELF"  # the first bytes of machine code
WORD = 4  # bytes: the unit of a fill
# A field 1 that holds bytes or a message starts with this tag.
FIRST_FIELD_IS_BYTES = write_field(1, b"")[:1]

# XLA names a constant in the machine code after its instruction, in letters that symbols may have.
SYMBOL_PREFIX = "buffer_for_"
NOT_IN_SYMBOLS = re.compile(r"[^A-Za-z0-9_]")
# The fields of a literal: numbers as they lie in memory, or varints, by their bytes in memory.
FIXED_WIDTH = ("f32s", "f64s", "f16s", "bf16s", "s8s", "u8s")
VARINTS = {"preds": 1, "s32s": 4, "u32s": 4, "s64s": 8, "u64s": 8}
# The custom call whose kernels Mosaic GPU compiled, the type of what XLA keeps of it (a C++ name),
# and the versions of that message that are known.
MOSAIC_GPU, MOSAIC_STATE = b"mosaic_gpu_v2", b"N6mosaic3gpu19CustomCallResourcesE"
MOSAIC_VERSIONS = (2, 3, 4)
# The attributes of the call: the program that was compiled, and switches that must be off.
MOSAIC_SOURCES = {b"kernel_hash", b"module"}
MOSAIC_SWITCHES = {b"skip_device_barrier", b"use_custom_barrier", b"uses_xla_collective_metadata"}


def read(data: bytes) -> Executable:
    """The executable in the bytes that `serialize` returned.

    Raises:
      UnknownError: a part of it is not understood.
    """
    try:
        return _executable(_payload(data))
    except (IndexError, ValueError, struct.error) as error:
        raise UnknownError(f"its bytes are not what they seem: {error}") from error


def _payload(data: bytes) -> bytes:
    size, start = read_varint(data, 0)
    name, data = "xla.ExecutableAndOptionsProto", data[start + size :]
    if data.startswith(SIGNATURE):  # older versions store the message without a file of records
        data = _joined(name, data)
    return Message(name, data).part("serialized_executable")


def _executable(data: bytes) -> Executable:
    name = "xla.gpu.GpuExecutableProto"
    fields = Message(name, _joined(name, data))
    thunks = fields.parts("thunks")
    if not thunks:
        raise UnknownError("XLA gave no steps with it")
    # Where several records hold a field that is not repeated, the last one counts.
    code = [b"", *fields.parts("binary")][-1]
    steps = tuple(step for thunk in thunks for step in _steps(thunk, code))
    wrapped = Message(f"{name}.RepeatedBufferAllocations", fields.part("buffer_allocations"))
    allocations = dict(map(_allocation, wrapped.parts("values")))
    if len(allocations) != len(wrapped.parts("values")):
        raise UnknownError("two allocations have one number")
    results = _results(fields.parts("output_info_map"))
    entries = fields.parts("constants")
    # The HLO is large, and most programs have no constants. Its records, concatenated, are merged.
    hlo = b"".join(fields.parts("hlo_module_with_config")) if entries else b""
    constants = dict(_constants(entries, _literals(hlo)))
    found = Executable(allocations, steps, results, constants, code)
    _check(found)
    return found


def _joined(name: str, data: bytes) -> bytes:
    """The message `name`, put together from its records: single fields and partial messages."""
    found = list(records(data))
    manifest = Message("xla.SplitProtoManifest", found[0])
    if manifest.part("result_proto_type") != name.encode():
        raise UnknownError(f"it is a {manifest.part('result_proto_type')!r}")
    parts = []
    for said, record in zip(manifest.parts("records"), found[1:], strict=True):
        how = Message("xla.Record", said)
        if "field_override_record" in how:
            record = write_field(_overridden(how.part("field_override_record")), record)
        parts.append(record)
    # Concatenated messages of one type are their merge.
    return b"".join(parts)


def _overridden(data: bytes) -> int:
    """The number of the field that a record holds."""
    name = "xla.Record.FieldOverrideRecord"
    path = Message(name, data).part("field_path")
    return Message(f"{name}.FieldPathPart", path).number("field_number")


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
    """The numbers of the results' allocations, in the order of the results."""
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
        # A tuple has one more entry, its table of addresses, which no caller reads.
        found.pop((), None)
    elif () in found:
        found = {(0,): found[()]}
    order = [(n,) for n in range(len(found))]
    if sorted(found) != order or not len(set(found.values())) == len(found) <= len(entries):
        raise UnknownError(f"its results are {found}")
    return tuple(found[index] for index in order)


def _literals(data: bytes) -> dict[str, bytes | None]:
    """The values of the HLO's constants by their symbols; None where two have one symbol."""
    found: dict[str, bytes | None] = {}
    module = Message("xla.HloModuleProtoWithConfig", data)
    computations = Message("xla.HloModuleProto", b"".join(module.parts("hlo_module")))
    for computation in computations.parts("computations"):
        for each in Message("xla.HloComputationProto", computation).parts("instructions"):
            instruction = Message("xla.HloInstructionProto", each)
            if instruction.part("opcode") == b"constant" and "literal" in instruction:
                name = NOT_IN_SYMBOLS.sub("_", instruction.part("name").decode())
                symbol = SYMBOL_PREFIX + name
                known = symbol in found
                found[symbol] = None if known else _literal(instruction.part("literal"))
    return found


def _literal(data: bytes) -> bytes | None:
    """An array's bytes; None for an array of another type than those above."""
    literal = Message("xla.LiteralProto", data)
    kinds = list(literal.fields)
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind in FIXED_WIDTH:
        return b"".join(literal.parts(kind))
    width = VARINTS[kind]
    # A negative number is written as 64 bits of two's complement.
    modulus = 1 << 8 * width
    return b"".join(
        (number % modulus).to_bytes(width, "little") for number in literal.numbers(kind)
    )


def _constants(
    entries: list[bytes], literals: Mapping[str, bytes | None]
) -> Iterator[tuple[int, Constant]]:
    """(allocation, constant) of each constant whose value is known.

    XLA writes either the value, or leaves it to be found in the HLO.
    """
    for data in entries:
        info = Message("xla.gpu.GpuExecutableProto.ConstantInfoProto", data)
        symbol = info.part("symbol_name").decode()
        content = literals.get(symbol)
        if any(info.parts("content")):
            dense = Message("xla.gpu.DenseDataIntermediateProto", b"".join(info.parts("content")))
            content = dense.part("data")
        if content is not None:
            yield info.number("allocation_index"), Constant(symbol, content)


def _check(found: Executable) -> None:
    """Refuses parts that contradict each other, which parts that were read correctly never do."""
    allocations, steps, results = found.allocations, found.steps, found.results
    for number, constant in found.constants.items():
        if number not in allocations or not allocations[number].is_constant:
            raise UnknownError(f"the constant {number} is not in the allocations")
        if len(constant.content) != allocations[number].size:
            raise UnknownError(f"{constant} has {len(constant.content)} bytes")
    if found.constants and not found.code.startswith(ELF):
        raise UnknownError("its constants have no machine code that holds them")
    for step in steps:
        for each in step.arguments:
            whole = allocations.get(each.allocation)
            if whole is None or each.offset + each.size > whole.size or each.size <= 0:
                raise UnknownError(f"{each} is not in the allocations")
            if whole.is_constant and each.allocation not in found.constants:
                raise UnknownError("a step reads a constant whose value is not known")
        for each in step.written:
            if allocations[each.allocation].parameter is not None:
                raise UnknownError("a step writes to a parameter")
            if each.allocation in found.constants:
                raise UnknownError("a step writes to a constant")
    written = {each.allocation for step in steps for each in step.written}
    if not written.issuperset(results):
        raise UnknownError("a result is written by no step")


def _steps(data: bytes, code: bytes) -> Iterator[Step]:
    """The steps of a ThunkProto; kernels without machine code of their own are in `code`."""
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
    elif kind == "custom_call_thunk":
        yield _mosaic_kernel(thunk)
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
    if target.size % WORD or target.offset % WORD:
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
        fields,
    )


def _custom_kernel(data: bytes) -> Launch:
    fields = Message("xla.gpu.CustomKernelThunkProto", data)
    _check_plain(fields)
    kernel = Message("xla.gpu.CustomKernelProto", fields.part("custom_kernel"))
    _check_no_clusters(kernel)
    loader = Message("stream_executor.KernelLoaderSpecProto", kernel.part("kernel_spec"))
    arity, count = loader.number("arity"), len(fields.parts("args"))
    if arity != count:
        raise UnknownError(f"a kernel of {arity} gets {count} arguments")
    if "kernel_args_packing_spec" in loader:
        _check_packing(loader.part("kernel_args_packing_spec"), count)
    return _launch(
        loader.part("kernel_name").decode(),
        Message("stream_executor.CudaCubinProto", loader.part("cubin")).part("data"),
        _dimensions("Block", kernel.part("block_dims")),
        _dimensions("Thread", kernel.part("thread_dims")),
        kernel.number("shared_memory_bytes"),
        fields,
    )


def _mosaic_kernel(data: bytes) -> Launch:
    fields = Message("xla.gpu.CustomCallThunkProto", data)
    name = fields.part("target_name")
    if name != MOSAIC_GPU:
        raise UnknownError(f"a step is the custom call {name!r}, not a kernel, a copy or a fill")
    _check_switches(fields.part("attributes"))
    if "called_computation" in fields or any(fields.parts("opaque")):
        raise UnknownError("a kernel of Mosaic GPU calls another program")
    state = Message("xla.ffi.ExecutionStateProto", fields.part("execution_state"))
    if state.part("type_name") != MOSAIC_STATE:
        raise UnknownError(f"a kernel of Mosaic GPU is a {state.part('type_name')!r}")
    compiled = Message("mosaic.gpu.MosaicGpuKernelProto", state.part("state"))
    if compiled.number("version") not in MOSAIC_VERSIONS:
        raise UnknownError(f"Mosaic GPU's format has the version {compiled.number('version')}")
    if compiled.number("is_nvshmem_used") or compiled.number("is_multimem_used"):
        raise UnknownError("a kernel of Mosaic GPU runs on several cards")
    arrays, results = (
        [_array(each) for each in fields.parts(kind)] for kind in ("operands", "results")
    )
    kernel, code = compiled.part("kernel_name").decode(), compiled.part("gpu_binary")
    found = _mosaic.record(
        compiled.part("object_file"),
        compiled.part("host_func_name").decode(),
        code,
        kernel,
        len(arrays) + len(results),
    )
    if found.shared_bytes != compiled.number("smem_bytes"):
        asked, wanted = found.shared_bytes, compiled.number("smem_bytes")
        raise UnknownError(f"a launch asks for {asked} bytes of shared memory in place of {wanted}")
    arguments = []
    for place in found.parameters.places:
        whole = (arrays + results)[place.argument]
        start, size = whole.offset + place.within, whole.size - place.within
        arguments.append(Slice(whole.allocation, start, size))
    dimensions = found.grid, found.block, found.shared_bytes
    return Launch(
        kernel, code, *dimensions, tuple(arguments), tuple(results), found.parameters
    )


def _array(data: bytes) -> Slice:
    """The slice in a NullableShapedSliceProto."""
    return _slice(Message("xla.NullableShapedSliceProto", data).part("shaped_slice"))


def _check_switches(data: bytes) -> None:
    """Refuses a call of Mosaic GPU with an attribute that is not known."""
    for each in Message("xla.ffi.AttributesMapProto", data).parts("attrs"):
        entry = Message("xla.ffi.AttributesMapProto.AttrsEntry", each)
        name = entry.part("key")
        if name in MOSAIC_SOURCES:
            continue
        value = Message("xla.ffi.AttributeProto", entry.part("value"))
        is_known = name in MOSAIC_SWITCHES and "scalar" in value
        if not is_known or Message("xla.ffi.ScalarProto", value.part("scalar")).number("b"):
            raise UnknownError(f"a kernel of Mosaic GPU has the attribute {name!r}")


def _launch(
    name: str,
    code: bytes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    thunk: Message,
) -> Launch:
    """The launch of a kernel that XLA compiled, by its thunk."""
    arguments, written = tuple(map(_slice, thunk.parts("args"))), thunk.numbers("written")
    if not code.startswith(ELF):
        raise UnknownError(f"the kernel {name!r} has no machine code")
    if len(written) != len(arguments) or not set(written) <= {0, 1}:
        raise UnknownError(f"the kernel {name!r} writes to {written}")
    targets = tuple(each for each, is_it in zip(arguments, written, strict=True) if is_it)
    parameters = None
    # Of a kernel without tensor maps this is an empty message.
    if metadata := b"".join(thunk.parts("tma_metadata")):
        parameters = _tensor_maps.parameters(name, code, arguments, metadata)
    return Launch(name, code, grid, block, shared_bytes, arguments, targets, parameters)


def _check_plain(fields: Message) -> None:
    """Refuses launches that need more than a grid and addresses.

    A kernel that allows programmatic dependent launch (`use_pdl`) may start before the kernel ahead
    of it has ended, and waits for it itself. An ordinary launch is also correct: then the kernel
    ahead has always ended.
    """
    if fields.number("use_pdl") not in (0, 1):
        raise UnknownError(f"{fields.name}.use_pdl is {fields.number('use_pdl')}")
    _check_no_clusters(fields)
    if fields.numbers("zeroed_output_buffer_indices"):
        raise UnknownError("a kernel wants memory filled with zeros")


def _check_no_clusters(fields: Message) -> None:
    for each in fields.parts("cluster_dim"):
        if _dimensions("Cluster", each) != (1, 1, 1):
            raise UnknownError("a kernel has clusters of blocks")


def _check_packing(data: bytes, count: int) -> None:
    """Refuses a kernel whose parameters are not the addresses in the order of its arguments."""
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
    """The sizes in x, y and z of a grid ("Block"), a block ("Thread") or a cluster ("Cluster")."""
    wrapped = Message(f"stream_executor.{of}DimProto", data).part("coordinates")
    sizes = Message("stream_executor.Dim3DProto", wrapped)
    x, y, z = (sizes.number(axis) for axis in "xyz")
    if not x * y * z:
        raise UnknownError(f"a kernel has the dimensions {x}, {y}, {z}")
    return x, y, z


def _slice(data: bytes) -> Slice:
    """The slice in a BufferAllocationSliceProto or in a ShapedSliceProto, which wraps one.

    The first field of the former is a number, that of the latter a message.
    """
    if data[:1] == FIRST_FIELD_IS_BYTES:
        data = Message("xla.ShapedSliceProto", data).part("slice")
    fields = Message("xla.buffer_assignment.BufferAllocationSliceProto", data)
    return Slice(
        fields.number("buffer_allocation_index"), fields.number("offset"), fields.number("size")
    )
