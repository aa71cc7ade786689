"""The parts of a program that `_executable.read` returns: its steps and its memory.

This module imports neither PyTorch nor JAX.
"""

from __future__ import annotations

import dataclasses

from ato_torch._mosaic import Parameters


@dataclasses.dataclass(frozen=True)
class Slice:
    """`size` bytes of the allocation with the number `allocation`, from the byte `offset` on."""

    allocation: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Allocation:
    """`size` bytes of device memory.

    `parameter` is the number of the program's parameter that it holds, or None. An allocation that
    `is_constant` is part of the machine code.
    """

    size: int
    parameter: int | None
    is_constant: bool


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of the kernel `name` in the machine code `code`.

    All arguments are addresses. `parameters` says where they lie among the kernel's parameters, by
    places in the order of the arguments; None means that they lie one behind the other.
    """

    name: str
    code: bytes = dataclasses.field(repr=False)
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[Slice, ...]
    written: tuple[Slice, ...]
    parameters: Parameters | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy from one slice of device memory to another."""

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
    """Sets every 32-bit word of a slice to `value`."""

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
class Constant:
    """An array in the machine code: its symbol there, and its bytes.

    XLA reserves the memory in the machine code, filled with zeros unless the array has one element,
    and writes the bytes there after loading. So must whoever loads the machine code.
    """

    symbol: str
    content: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Executable:
    """A program: its steps, and the allocations that they read and write, by number.

    `results` are the allocations of the program's results, each filled completely. `constants` are
    the allocations inside the machine code `code`.
    """

    allocations: dict[int, Allocation]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    constants: dict[int, Constant] = dataclasses.field(default_factory=dict)
    code: bytes = dataclasses.field(default=b"", repr=False)
