"""How a Mosaic GPU kernel is launched: recorded from the host code that XLA compiled with it.

Mosaic GPU compiles two programs for each kernel: the kernel's machine code, and a function for the
host that gets the addresses of the arrays, describes arrays to the copy engine (tensor maps), and
launches the kernel. Both lie in the serialized executable. `record` runs the host's function, with
functions of ours in the places of those that would make a tensor map and launch, and with numbers
that are no addresses. So `record` learns all that a launch needs, and nothing is launched:

    grid, block, shared memory
    the bytes of the kernel's parameters, and in them
        the addresses of arrays, each with its offset
        the tensor maps: their addresses, shapes, strides, tiles and swizzles

A launch must not depend on the addresses in any other way, so the function runs twice, with
different numbers, and both runs must give the same launch.

This module imports neither PyTorch nor JAX, and needs no GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ato_torch import _elf
from ato_torch._protobuf import UnknownError

WORD_BYTES = 8
MAP_WORDS = 16
MAP_BYTES = MAP_WORDS * WORD_BYTES
MOST_AXES = 5
# Numbers in the places of addresses and of the words of tensor maps: a tag from bit 56 on, the
# number of the array or of the map from bit 44 on, and below them an offset.
TAG_SHIFT, NUMBER_SHIFT = 56, 44
WITHIN = (1 << NUMBER_SHIFT) - 1
NUMBERS = (1 << TAG_SHIFT - NUMBER_SHIFT) - 1
TAGS = ((0x5A, 0xD0), (0x35, 0xE1))  # of addresses and of maps, in the first run and in the second
# The bytes of an element by Mosaic GPU's number for its type, and CUDA's number for that type.
ELEMENTS = {1: (1, 0), 2: (2, 1), 3: (4, 2), 4: (8, 4), 5: (2, 6), 6: (4, 7), 7: (2, 9), 9: (4, 3)}
SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}  # by bytes, CUDA's numbers
# How many arguments precede the arrays, by the function that the host code calls at its end: until
# JAX 0.11, and from 0.12 on.
AHEAD = {"mosaic_gpu_launch_kernel": 2, "mosaic_gpu_build_kernel_spec": 1}

_Numbers = ctypes.POINTER(ctypes.c_int64)
_Pointers = ctypes.POINTER(ctypes.c_void_p)
_INITIALIZE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, _Numbers, _Numbers,
    ctypes.c_int64, _Numbers,
)  # fmt: skip
# Grid, cluster, block, shared memory, and whether it is a programmatic dependent launch.
_DIMENSIONS = (*[ctypes.c_uint32] * 10, ctypes.c_int32)
_LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *_DIMENSIONS, ctypes.c_void_p, _Pointers)
# From JAX 0.12 on: a count, the parameters, and the size of each, 0 for an address.
_DESCRIBE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, *_DIMENSIONS, ctypes.c_uint32, _Pointers, ctypes.POINTER(ctypes.c_uint32)
)


class TensorMap(NamedTuple):
    """An array as the copy engine sees it, in the order of CUDA's function: the last axis first.

    Attributes:
      element: CUDA's number for the type of the elements.
      sizes: of each axis, in elements.
      strides: of each axis but the first, in bytes.
      tile: of a copy, in elements.
      swizzle: CUDA's number.
      promotion: CUDA's number for how much of an array the cache fetches at once.
    """

    element: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]
    swizzle: int
    promotion: int = 0


class Place(NamedTuple):
    """A place among a kernel's parameters that needs an address.

    Attributes:
      offset: of the place, in bytes from the start of the parameters.
      argument: the number of the array.
      within: of the address, in bytes from the start of the array.
      map: the tensor map that begins at the place with the address; None for the address alone.
    """

    offset: int
    argument: int
    within: int
    map: TensorMap | None = None


@dataclasses.dataclass(frozen=True)
class Parameters:
    """A kernel's parameters: (offset, size) of each, their constant bytes, and the addresses."""

    layout: tuple[tuple[int, int], ...]
    constant: bytes
    places: tuple[Place, ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: Parameters


def record(host: bytes, function: str, code: bytes, kernel: str, arrays: int) -> Recorded:
    """The launch that a function of the host code would make.

    Args:
      host: an object file.
      function: the function's name there.
      code: the machine code of the kernel.
      kernel: the kernel's name there.
      arrays: how many arrays the function gets.

    Raises:
      UnknownError: the function does anything that this module does not know.
    """
    layout = _elf.parameters(code, kernel)
    first, second = (_Run(*tags, layout).of(host, function, arrays) for tags in TAGS)
    if first != second:
        raise UnknownError("its host code depends on the addresses of arrays")
    return first


class _Run:
    """One run of the host code."""

    def __init__(self, address: int, map_tag: int, layout: list[tuple[int, int]]) -> None:
        self.address, self.map_tag, self.layout = address, map_tag, layout
        self.maps: list[tuple[int, int, TensorMap]] = []
        self.found: list[Recorded] = []
        self.errors: list[BaseException] = []

    def of(self, host: bytes, function: str, arrays: int) -> Recorded:
        if arrays > NUMBERS:
            raise UnknownError(f"a kernel has {arrays} arrays")
        callbacks = {
            "mosaic_gpu_init_tma_desc": _INITIALIZE(self._guarded(self._initialize)),
            "mosaic_gpu_launch_kernel": _LAUNCH(self._guarded(self._launch)),
            "mosaic_gpu_build_kernel_spec": _DESCRIBE(self._guarded(self._describe)),
        }
        addresses = {
            name: ctypes.cast(each, ctypes.c_void_p).value or 0 for name, each in callbacks.items()
        }
        code = _elf.HostCode(host, addresses)
        buffers = (ctypes.c_void_p * arrays)(
            *(self.address << TAG_SHIFT | n << NUMBER_SHIFT for n in range(1, arrays + 1))
        )
        # Ahead of the arrays, a function that launches gets a kernel and a stream, and one that
        # describes a launch gets memory. With another number it would read at random addresses.
        ends = code.needed & AHEAD.keys()
        if len(ends) != 1:
            raise UnknownError(f"its host code ends in {sorted(ends)}")
        ahead = AHEAD[ends.pop()]
        pointers = [ctypes.c_void_p] * (ahead + 1)
        run = ctypes.CFUNCTYPE(None, *pointers)(code.function(function))
        run(*[None] * ahead, ctypes.cast(buffers, ctypes.c_void_p))
        for error in self.errors:
            raise error
        if len(self.found) != 1:
            raise UnknownError(f"its host code launches {len(self.found)} kernels")
        return self.found[0]

    def _guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, with its exception kept, which cannot pass through the host code."""

        def guarded(*arguments: Any) -> None:
            try:
                function(*arguments)
            except BaseException as error:  # ctypes would drop a KeyboardInterrupt, too
                self.errors.append(error)

        return guarded

    def _initialize(
        self, place: int, base: int, element: int, rank: int, sizes: Any, strides: Any,
        swizzle: int, tile: Any,
    ) -> None:  # fmt: skip
        if element not in ELEMENTS or swizzle not in SWIZZLES or not 1 <= rank <= MOST_AXES:
            raise UnknownError(
                f"a tensor map has the type {element}, {rank} axes and a swizzle of {swizzle} bytes"
            )
        of_element, number = ELEMENTS[element]
        last_first = range(rank - 1, -1, -1)
        if strides[rank - 1] != 1:
            raise UnknownError("a tensor map has no contiguous axis")
        described = TensorMap(
            number,
            tuple(sizes[axis] for axis in last_first),
            tuple(strides[axis] * of_element for axis in last_first[1:]),
            tuple(tile[axis] for axis in last_first),
            SWIZZLES[swizzle],
        )
        tag = self.map_tag << TAG_SHIFT | len(self.maps) << NUMBER_SHIFT
        self.maps.append((*self._array(base), described))
        words = struct.pack(f"<{MAP_WORDS}Q", *range(tag, tag + MAP_WORDS))
        ctypes.memmove(place, words, MAP_BYTES)

    def _launch(self, _: Any, *rest: Any) -> None:
        *dimensions, _, pointers = rest
        self._add(dimensions, pointers)

    def _describe(self, _: Any, *rest: Any) -> None:
        *dimensions, count, pointers, sizes = rest
        told = [sizes[n] or WORD_BYTES for n in range(count)]
        if told != [size for _, size in self.layout]:
            raise UnknownError(f"its host code has parameters of {told} bytes")
        self._add(dimensions, pointers)

    def _add(self, dimensions: Sequence[int], pointers: Any) -> None:
        x, y, z, *cluster, block_x, block_y, block_z, shared_bytes, is_dependent = dimensions
        if any(cluster) or is_dependent:
            raise UnknownError(f"a kernel has clusters {cluster}, or its launch is dependent")
        end = max(offset + size for offset, size in self.layout)
        constant, places = bytearray(-(-end // WORD_BYTES) * WORD_BYTES), []
        for n, (offset, size) in enumerate(self.layout):
            data = ctypes.string_at(pointers[n], size)
            places += self._places(offset, data)
            constant[offset : offset + size] = data
        for place in places:
            size = WORD_BYTES if place.map is None else MAP_BYTES
            constant[place.offset : place.offset + size] = bytes(size)
        parameters = Parameters(tuple(self.layout), bytes(constant), tuple(places))
        block = block_x, block_y, block_z
        self.found.append(Recorded((x, y, z), block, shared_bytes, parameters))

    def _places(self, offset: int, data: bytes) -> list[Place]:
        """The addresses and tensor maps in a parameter's bytes."""
        found, place = [], 0
        while place + WORD_BYTES <= len(data):
            (word,) = struct.unpack_from("<Q", data, place)
            if offset + place & WORD_BYTES - 1:
                raise UnknownError("a parameter begins within a word")
            if word >> TAG_SHIFT == self.map_tag:
                number = word >> NUMBER_SHIFT & NUMBERS
                whole = struct.pack(f"<{MAP_WORDS}Q", *range(word, word + MAP_WORDS))
                if data[place : place + MAP_BYTES] != whole or number >= len(self.maps):
                    raise UnknownError("a parameter holds a part of a tensor map")
                found.append(Place(offset + place, *self.maps[number]))
                place += MAP_BYTES
                continue
            if word >> TAG_SHIFT == self.address:
                found.append(Place(offset + place, *self._array(word)))
            place += WORD_BYTES
        return found

    def _array(self, address: int) -> tuple[int, int]:
        """An array's number, and the bytes from its start."""
        number = (address >> NUMBER_SHIFT & NUMBERS) - 1
        if address >> TAG_SHIFT != self.address or number < 0:
            raise UnknownError("an address lies in no array")
        return number, address & WITHIN
