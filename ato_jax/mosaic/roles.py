"""Roles: which warpgroups of a block run the same code, and how many registers they have.

A role is declared once, with its number of warpgroups, which barriers count (`rings.py`). Its code
is a function, its part, that `program.Program` calls with the kernel's arrays and storage.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental import pallas as pl

# The registers a thread, summed over the warpgroups of a block: 64 Ki registers, and 128 threads
# in each warpgroup.
REGISTERS = 512
# Enough for a warpgroup that only starts TMA copies.
MEMORY_REGISTERS = 24
# The most registers of a thread, a multiple of 8.
MOST_REGISTERS = 232

group = functools.partial(lax.axis_index, "group")


def registers_at_launch(warpgroups: int) -> int:
    return REGISTERS // warpgroups // 8 * 8


def set_registers(count: int, warpgroups: int) -> None:
    """Sets the registers a thread of this warpgroup, a multiple of 8. A launch gives the same
    number to all warpgroups, and only these can be redistributed. An increase to fewer registers
    than a warpgroup has is an illegal instruction, and so is a decrease to more."""
    increases = count > registers_at_launch(warpgroups)
    plgpu.set_max_registers(count, action="increase" if increases else "decrease")


def workers_registers(workers: int, most: int = MOST_REGISTERS) -> int:
    """The registers a thread of each of `workers` warpgroups, beside one warpgroup that loads."""
    dealt = (workers + 1) * registers_at_launch(workers + 1)
    return min(most, (dealt - MEMORY_REGISTERS) // workers // 8 * 8)


@dataclasses.dataclass(frozen=True)
class Role:
    """`warpgroups` with the same part. `unrolled`: its code is made once for each of them, and its
    part is given the warpgroup's number within the role as a Python int."""

    name: str
    registers: int
    warpgroups: int = 1
    unrolled: bool = False


# The role whose part is being traced, for `rings.Signal` to compare with those declared.
playing: contextvars.ContextVar[Role | None] = contextvars.ContextVar("playing", default=None)


@dataclasses.dataclass(frozen=True)
class Roles:
    """All roles of a block, in the order of their warpgroups' numbers."""

    roles: tuple[Role, ...]

    def __iter__(self) -> Iterator[Role]:
        return iter(self.roles)

    @property
    def warpgroups(self) -> int:
        return sum(role.warpgroups for role in self.roles)

    def first(self, role: Role) -> int:
        """The number of the role's first warpgroup."""
        return sum(other.warpgroups for other in self.roles[: self.roles.index(role)])

    def play(self, role: Role, part: Callable[..., None], own: Any = None) -> None:
        """Traces the role's part, for its warpgroups alone. `own` is this warpgroup's number, if it
        has been read."""
        first, count = self.first(role), role.warpgroups

        def number_of_own() -> Any:
            return group() if own is None else own

        def one(*number: int) -> None:
            token = playing.set(role)
            try:
                set_registers(role.registers, self.warpgroups)
                part(*number)
            finally:
                playing.reset(token)

        if role.unrolled:
            for number in range(count):
                pl.when(number_of_own() == first + number)(functools.partial(one, number))
        elif count == 1:
            pl.when(number_of_own() == first)(one)
        elif first == 0:
            pl.when(number_of_own() < count)(one)
        else:
            pl.when((number_of_own() >= first) & (number_of_own() < first + count))(one)
