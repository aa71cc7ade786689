"""Protocol buffers: messages in the wire format, with the fields that XLA's sources name.

A message is a sequence of fields, each a tag and a value:

    tag      a varint: the field's number << 3 | its wire type
    value    a varint, 4 or 8 bytes, or a length and as many bytes

JAX publishes no schema, so `FIELDS` holds the part of XLA's schema that the reader needs: the names
and numbers of the fields of each message. XLA never gives a number to another field. A field
without a name in `FIELDS` is an `UnknownError`.

This module imports neither PyTorch nor JAX.
"""

from __future__ import annotations

import enum

# The fields that a message may have. Fields that `_executable` does not read have no effect on a
# launch: they describe the program (its HLO, its name, the shapes of its arguments) or the machine
# that it was compiled for. `gpu_topology`, new in JAX 0.12, describes that machine: the number of
# cards that the process sees, their model, the driver and the host's processor. The machine code
# is for one architecture, and the driver refuses to load it on another. Messages of the HLO have
# here only the fields that lead to the values of constants (`DESCRIPTIONS`).
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
    "xla.gpu.DenseDataIntermediateProto": {1: "data"},
    "xla.HloModuleProtoWithConfig": {1: "hlo_module"},
    "xla.HloModuleProto": {3: "computations"},
    "xla.HloComputationProto": {2: "instructions"},
    "xla.HloInstructionProto": {1: "name", 2: "opcode", 8: "literal"},
    "xla.LiteralProto": {
        2: "preds",
        3: "u8s",
        4: "s32s",
        5: "s64s",
        6: "u32s",
        7: "u64s",
        8: "f32s",
        9: "f64s",
        11: "f16s",
        13: "bf16s",
        15: "s8s",
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
    # XLA has some fifty kinds of steps. Listed are those that are read, and those that programs
    # of this package are known to contain, so that the refusal can name them.
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
    "xla.gpu.CustomCallThunkProto": {
        1: "target_name",
        2: "operands",
        3: "results",
        4: "opaque",
        5: "api_version",
        6: "attributes",
        7: "called_computation",
        8: "execution_state",
        9: "use_pdl",
    },
    "xla.NullableShapedSliceProto": {1: "shaped_slice"},
    "xla.ffi.AttributesMapProto": {1: "attrs"},
    "xla.ffi.AttributesMapProto.AttrsEntry": {1: "key", 2: "value"},
    "xla.ffi.AttributeProto": {1: "scalar", 2: "array", 3: "str", 4: "dict"},
    "xla.ffi.ScalarProto": {1: "b"},
    "xla.ffi.ExecutionStateProto": {1: "type_name", 2: "state"},
    "mosaic.gpu.MosaicGpuKernelProto": {
        1: "version",
        2: "object_file",
        3: "is_nvshmem_used",
        4: "kernel_hash",
        5: "host_func_name",
        7: "is_multimem_used",
        8: "gpu_binary",
        9: "kernel_name",
        10: "smem_bytes",
        11: "cluster_size",
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
    "stream_executor.gpu.TmaMetadataProto": {1: "arg_index_to_tma_info"},
    "stream_executor.gpu.TmaMetadataProto.ArgIndexToTmaInfoEntry": {1: "key", 2: "value"},
    "stream_executor.gpu.TmaDescriptorProto": {
        1: "element_size",
        2: "global_dims",
        3: "global_strides",
        4: "box_dims",
        5: "element_strides",
        6: "interleave",
        7: "swizzle",
        8: "l2_promotion",
        9: "float_oob_fill",
    },
    "stream_executor.BlockDimProto": {2: "coordinates"},
    "stream_executor.ThreadDimProto": {1: "coordinates"},
    "stream_executor.ClusterDimProto": {3: "coordinates"},
    "stream_executor.Dim3DProto": {1: "x", 2: "y", 3: "z"},
}
# The `kind` of a KernelArgPackingRelocationProto: the argument is a 64-bit address, unchanged.
KIND_BITS64_ABSOLUTE = 1


class WireType(enum.IntEnum):
    """The low three bits of a field's tag: how its value is stored."""

    VARINT = 0
    FIXED64 = 1
    LENGTH_DELIMITED = 2
    FIXED32 = 5


FIXED_SIZES = {WireType.FIXED64: 8, WireType.FIXED32: 4}  # bytes
TAG_TYPE_BITS = 3
TAG_TYPE_MASK = (1 << TAG_TYPE_BITS) - 1
# A varint has 7 bits a byte, the lowest first; the top bit says that another byte follows.
VARINT_BITS = 7
VARINT_MORE = 1 << VARINT_BITS


class UnknownError(Exception):
    """A part of an executable that this package cannot read."""


# Messages whose fields without a name are skipped.
DESCRIPTIONS = {
    "xla.HloModuleProtoWithConfig",
    "xla.HloModuleProto",
    "xla.HloComputationProto",
    "xla.HloInstructionProto",
    "xla.LiteralProto",
}


class Message:
    """A message's fields by their names in `FIELDS`.

    Args:
      name: the message's name, a key of `FIELDS`.
      data: its bytes.

    Raises:
      UnknownError: a field has no name in `FIELDS`, unless the message is one of `DESCRIPTIONS`, or
        it has an unknown wire type.
    """

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name.rpartition(".")[2]
        self.fields: dict[str, list[int | bytes]] = {}
        known = FIELDS[name]
        place = 0
        while place < len(data):
            tag, place = read_varint(data, place)
            number, wire_type = tag >> TAG_TYPE_BITS, tag & TAG_TYPE_MASK
            value: int | bytes
            if wire_type == WireType.VARINT:
                value, place = read_varint(data, place)
            else:
                if wire_type == WireType.LENGTH_DELIMITED:
                    size, place = read_varint(data, place)
                elif wire_type in FIXED_SIZES:
                    size = FIXED_SIZES[WireType(wire_type)]
                else:
                    raise UnknownError(f"{name} has a field of kind {wire_type}")
                value, place = data[place : place + size], place + size
                if place > len(data):
                    raise UnknownError(f"{name} ends in the middle of a field")
            if number not in known:
                if name in DESCRIPTIONS:
                    continue
                raise UnknownError(f"{name} has a field {number}")
            self.fields.setdefault(known[number], []).append(value)

    def __contains__(self, field: str) -> bool:
        return field in self.fields

    def parts(self, field: str) -> list[bytes]:
        """The values of a repeated field that holds bytes or messages."""
        found = self.fields.get(field, [])
        if not all(isinstance(value, bytes) for value in found):
            raise UnknownError(f"{self.name}.{field} is a number")
        return found  # type: ignore[return-value]

    def part(self, field: str) -> bytes:
        """The value of a field that must occur exactly once."""
        found = self.parts(field)
        if len(found) != 1:
            raise UnknownError(f"{self.name}.{field} is there {len(found)} times, not once")
        return found[0]

    def number(self, field: str) -> int:
        """The value of a field that holds one number; writers leave out a 0."""
        found = self.fields.get(field, [0])
        if len(found) != 1 or not isinstance(found[0], int):
            raise UnknownError(f"{self.name}.{field} is not one number")
        return found[0]

    def numbers(self, field: str) -> list[int]:
        """The values of a repeated field of numbers, packed into one field or not."""
        found: list[int] = []
        for value in self.fields.get(field, []):
            found += [value] if isinstance(value, int) else read_varints(value)
        return found


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """(the number that starts at `place`, the place after it)"""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & VARINT_MORE - 1) << shift
        place, shift = place + 1, shift + VARINT_BITS
        if byte < VARINT_MORE:
            return value, place


def read_varints(data: bytes) -> list[int]:
    """All numbers in `data`."""
    found, place = [], 0
    while place < len(data):
        value, place = read_varint(data, place)
        found.append(value)
    return found


def write_varint(value: int) -> bytes:
    """The number as a varint."""
    found = bytearray()
    while value >= VARINT_MORE:
        found.append(value & VARINT_MORE - 1 | VARINT_MORE)
        value >>= VARINT_BITS
    return bytes([*found, value])


def write_field(number: int, value: bytes) -> bytes:
    """A field that holds bytes or a message."""
    tag = number << TAG_TYPE_BITS | WireType.LENGTH_DELIMITED
    return write_varint(tag) + write_varint(len(value)) + value
