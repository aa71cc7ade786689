"""The tensor maps among the parameters of a kernel that XLA itself compiled.

    parameters(name, code, arguments, metadata)     of a kernel with at least one tensor map

XLA has two compilers for the sums and the exchanges of axes around a call's own kernels. On a card
it times both, Triton's also with tensor maps where the card has a copy engine, and takes what is
fastest. So the same call has such kernels on one machine and none on another.

A parameter is the address of an array, or a tensor map of it, 128 bytes by value. XLA stores what
describes the maps (`TmaMetadataProto`), by the numbers of the arguments, and makes a map from the
array's address at each launch. Where the parameters lie is told by the machine code.

This module imports neither PyTorch nor JAX, and needs no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from ato_torch import _elf, _mosaic
from ato_torch._mosaic import (
    MAP_BYTES,
    MOST_AXES,
    WORD_BYTES,
    Parameters,
    Place,
    TensorMap,
)
from ato_torch._protobuf import Message, UnknownError
from ato_torch._steps import Slice

METADATA = "stream_executor.gpu.TmaMetadataProto"
ENTRY = f"{METADATA}.ArgIndexToTmaInfoEntry"
DESCRIPTION = "stream_executor.gpu.TmaDescriptorProto"
# CUDA's number for the unsigned integer of so many bytes: XLA tells of an element its size alone.
ELEMENTS = {1: 0, 2: 1, 4: 2, 8: 4}
# The bytes of an element by CUDA's number for its type.
WIDTHS = {number: size for size, number in [*ELEMENTS.items(), *_mosaic.ELEMENTS.values()]}
# XLA numbers these as CUDA does.
SWIZZLES, PROMOTIONS = range(4), range(4)
# Bytes: of an address in a tensor map.
ALIGNMENT = 16


def parameters(
    name: str, code: bytes, arguments: Sequence[Slice], metadata: bytes
) -> Parameters:
    """The parameters of the kernel `name` in the machine code.

    Args:
      name: the kernel's name.
      code: the machine code.
      arguments: the arrays, in the order of the parameters.
      metadata: a TmaMetadataProto.

    Raises:
      UnknownError: anything that this module does not know, or that does not fit the code.
    """
    maps = dict(map(_entry, Message(METADATA, metadata).parts("arg_index_to_tma_info")))
    layout = _elf.parameters(code, name)
    wanted = [MAP_BYTES if n in maps else WORD_BYTES for n in range(len(arguments))]
    found = [size for _, size in layout]
    if found != wanted or not maps.keys() <= set(range(len(arguments))):
        raise UnknownError(f"a kernel has parameters of {found} bytes in place of {wanted}")
    for n, what in maps.items():
        if arguments[n].offset % ALIGNMENT:
            raise UnknownError("a tensor map begins at an odd address")
        if _reach(what) > arguments[n].size:
            raise UnknownError(f"a tensor map reaches beyond its {arguments[n].size} bytes")
    ends = [0, *(offset + size for offset, size in layout)]
    if any(end % WORD_BYTES for end in ends):
        raise UnknownError("a parameter begins within a word")
    places = (Place(offset, n, 0, maps.get(n)) for n, (offset, _) in enumerate(layout))
    return Parameters(tuple(layout), bytes(max(ends)), tuple(places))


def _entry(data: bytes) -> tuple[int, TensorMap]:
    """(number of the argument, its tensor map)"""
    entry = Message(ENTRY, data)
    return entry.number("key"), _tensor_map(Message(DESCRIPTION, entry.part("value")))


def _tensor_map(fields: Message) -> TensorMap:
    sizes, strides, tile, steps = (
        tuple(fields.numbers(name))
        for name in ("global_dims", "global_strides", "box_dims", "element_strides")
    )
    rank, element = len(sizes), fields.number("element_size")
    swizzle, promotion = fields.number("swizzle"), fields.number("l2_promotion")
    is_known = element in ELEMENTS and swizzle in SWIZZLES and promotion in PROMOTIONS
    if not 1 <= rank <= MOST_AXES or (len(strides), len(tile)) != (rank - 1, rank):
        raise UnknownError(f"a tensor map has {sizes}, {strides} and {tile} as its axes")
    if fields.number("interleave") or fields.number("float_oob_fill") or set(steps) != {1}:
        raise UnknownError("a tensor map skips elements, interleaves them or fills with NaN")
    if not is_known or len(steps) != rank:
        raise UnknownError(
            f"a tensor map has elements of {element} bytes, the swizzle {swizzle} and the "
            f"promotion {promotion}"
        )
    return TensorMap(ELEMENTS[element], sizes, strides, tile, swizzle, promotion)


def _reach(what: TensorMap) -> int:
    """How many bytes from its address on a tensor map describes."""
    rest = zip(what.sizes[1:], what.strides, strict=True)
    return what.sizes[0] * width_of(what) + sum((size - 1) * stride for size, stride in rest)


def width_of(what: TensorMap) -> int:
    """The bytes of an element of a tensor map of XLA or of Mosaic GPU."""
    return WIDTHS[what.element]
