"""ELF files of 64 bits, as XLA makes them: a kernel's machine code, and host code.

    sections(data)              the sections of a file, by number
    parameters(code, kernel)    where a kernel's parameters lie, from NVIDIA's notes in its code
    HostCode(data, symbols)     an object file of x86-64, loaded into this process

Nothing unknown is skipped where it could matter: a relocation of another kind, or a symbol that the
caller does not have, is an `UnknownError`. This module imports neither PyTorch nor JAX.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Mapping
from typing import NamedTuple

from ato_torch._protobuf import UnknownError

MAGIC = b"\x7fELF\x02\x01"  # of 64 bits, little endian
RELOCATABLE, X86_64 = 1, 62
SYMBOL_TABLE, RELOCATIONS, NO_BITS = 2, 4, 8
# Relocations in forms that x86-64 does not use: without addends, and packed.
OTHER_RELOCATIONS = (9, 19, 0x40000014)
WRITABLE, IN_MEMORY = 1, 2  # flags of a section
WHOLE_ADDRESS = 1  # R_X86_64_64: the address of a symbol, plus a number
UNDEFINED = 0
SECTION_ALIGNMENT = 64
# `.nv.info.<kernel>` is a list of attributes. Each has a header of 4 bytes; one of the format SIZED
# has as many bytes behind it as the header says. An attribute PARAMETER describes one parameter of
# the kernel; the parameter's size lies from the bit SIZE_SHIFT of the last word on.
SIZED, PARAMETER = 4, 0x17
PARAMETER_BYTES = 12
SIZE_SHIFT = 18


class Section(NamedTuple):
    name: str
    kind: int
    flags: int
    data: bytes
    size: int
    link: int
    info: int


class Symbol(NamedTuple):
    name: str
    section: int
    value: int


def sections(data: bytes) -> list[Section]:
    if not data.startswith(MAGIC):
        raise UnknownError("its code is no ELF file of 64 bits")
    (start,) = struct.unpack_from("<Q", data, 40)
    width, count, names = struct.unpack_from("<3H", data, 58)
    found, places = [], []
    for n in range(count):
        name, kind, flags, _, first, size, link, info = struct.unpack_from(
            "<2I4Q2I", data, start + n * width
        )
        content = b"" if kind == NO_BITS else data[first : first + size]
        places.append(name)
        found.append(Section("", kind, flags, content, size, link, info))
    if names >= count:
        raise UnknownError("its sections have no names")
    table = found[names].data
    return [
        section._replace(name=_string(table, name))
        for section, name in zip(found, places, strict=True)
    ]


def _string(table: bytes, place: int) -> str:
    return table[place : table.index(b"\0", place)].decode()


def parameters(code: bytes, kernel: str) -> list[tuple[int, int]]:
    """(offset in bytes, size in bytes) of each parameter of a kernel."""
    (notes,) = [each.data for each in sections(code) if each.name == f".nv.info.{kernel}"]
    found, place = {}, 0
    while place < len(notes):
        kind, attribute, size = struct.unpack_from("<BBH", notes, place)
        place += 4
        if kind != SIZED:
            continue
        if attribute == PARAMETER:
            if size != PARAMETER_BYTES:
                raise UnknownError(f"a parameter is described by {size} bytes")
            _, ordinal, offset, rest = struct.unpack_from("<IHHI", notes, place)
            found[ordinal] = offset, rest >> SIZE_SHIFT
        place += size
    if not found or sorted(found) != list(range(len(found))):
        raise UnknownError(f"a kernel has the parameters {sorted(found)}")
    return [found[n] for n in range(len(found))]


def runs_host_code() -> bool:
    """Whether `HostCode` can be run on this machine."""
    return platform.machine() in ("x86_64", "AMD64") and platform.system() == "Linux"


class HostCode:
    """The code and constants of an object file, executable in memory while this object lives.

    Args:
      data: the file.
      symbols: the addresses of functions that it may call.

    Raises:
      UnknownError: it is for another processor, calls a function that is not in `symbols`, or has a
        part that this module does not know.
    """

    def __init__(self, data: bytes, symbols: Mapping[str, int]) -> None:
        if not runs_host_code():
            here = f"{platform.system()} on {platform.machine()}"
            raise UnknownError(f"its host code needs Linux on x86-64, and this is {here}")
        self._sections = sections(data)
        if struct.unpack_from("<2H", data, 16) != (RELOCATABLE, X86_64):
            raise UnknownError("its host code is no object file of x86-64")
        self._starts: dict[int, int] = {}
        end = 0
        for n, section in enumerate(self._sections):
            if section.flags & IN_MEMORY and not section.name.startswith(".eh_frame"):
                # Variables would need memory of their own, and initializers would have to run.
                if section.flags & WRITABLE and section.size:
                    raise UnknownError(f"its host code has the variables {section.name!r}")
                self._starts[n] = end
                end += -(-section.size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, max(end, 1), flags=private)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for n, start in self._starts.items():
            self._memory[start : start + len(self._sections[n].data)] = self._sections[n].data
        self.symbols = self._symbols()
        for section in self._sections:
            if section.kind == RELOCATIONS and section.info in self._starts:
                self._relocate(section, symbols)
            elif section.kind in OTHER_RELOCATIONS:
                raise UnknownError(f"its host code has relocations of the form {section.kind}")
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        place, size = ctypes.c_void_p(self.address), ctypes.c_size_t(len(self._memory))
        if protect(place, size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise UnknownError("this process may not make memory executable")

    def function(self, name: str) -> int:
        """The address of a function."""
        for symbol in self.symbols:
            if symbol.name == name and symbol.section in self._starts:
                return self.address + self._starts[symbol.section] + symbol.value
        raise UnknownError(f"its host code has no function {name!r}")

    @property
    def needed(self) -> set[str]:
        """The names of the functions that it calls and does not define."""
        return {each.name for each in self.symbols if each.section == UNDEFINED and each.name}

    def _symbols(self) -> list[Symbol]:
        found = []
        for section in self._sections:
            if section.kind == SYMBOL_TABLE:
                names = self._sections[section.link].data
                for name, _, _, home, value, _ in struct.iter_unpack("<IBBHQQ", section.data):
                    found.append(Symbol(_string(names, name), home, value))
        return found

    def _relocate(self, section: Section, symbols: Mapping[str, int]) -> None:
        start = self._starts[section.info]
        for place, what, added in struct.iter_unpack("<QQq", section.data):
            symbol = self.symbols[what >> 32]
            if what & 0xFFFFFFFF != WHOLE_ADDRESS:
                raise UnknownError(f"its host code has a relocation of kind {what & 0xFFFFFFFF}")
            if symbol.section == UNDEFINED:
                if symbol.name not in symbols:
                    raise UnknownError(f"its host code calls {symbol.name!r}")
                target = symbols[symbol.name]
            elif symbol.section in self._starts:
                target = self.address + self._starts[symbol.section] + symbol.value
            else:
                raise UnknownError(f"its host code needs the section {symbol.section}")
            struct.pack_into("<Q", self._memory, start + place, target + added)
