"""A kernel's shared memory and barriers: `Buffer`, `Signal`, `Ring`, and `Storage`, which holds
them.

A phase of a barrier completes after a fixed number of arrivals, and a wrong number is a deadlock or
a race. So no kernel writes this number: a `Signal` names the roles that arrive on it and the
buffers whose TMA copies arrive on it, and counts both. A `Ring` has slots and two signals for each:
`produced` completes when the slot's copies have landed, and `consumed` when every role that reads
the slot has released it. If one role changes a slot for another one (it maps a tile in place, say),
a further signal names the ring by `within` and has as many barriers as the ring has slots.

    storage = Storage(
        q=q,
        rows=Ring.of(4, filled=(q, k), readers=(FEATURES, VALUES)),
        mapped=Signal((FEATURES,), within="rows"),
    )

`Storage` is declared outside the kernel. Inside, an object of the same class holds a reference to
the array of each `Buffer`, and signals and rings hold their barriers.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.mosaic import roles
from ato_jax.mosaic.roles import Role


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in shared memory. `copies` is the number of TMA copies that fill it, or one slot."""

    type: Any
    copies: int = 1


# The type of a field of `Storage`: a `Buffer` when declared, a reference inside the kernel.
Array = Any


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A role as one that arrives at a slot by one of its warpgroups alone, the one to which the
    slot belongs: where `schedule.in_turn` deals steps to warpgroups, or each has its own slot."""

    role: Role


@dataclasses.dataclass(frozen=True)
class Signal:
    """A barrier for each of `slots`. A phase completes when all of `by` have arrived: each
    warpgroup of a role, or `OneOf` them, and each copy into a buffer.

    `within` is the name of the field of `Storage` with a ring. `Storage` then sets `slots` to the
    number of the ring's slots.
    """

    by: tuple[Role | OneOf | Buffer, ...]
    slots: int = 1
    within: str | None = None
    barrier: Any = None
    used: set[Role | str] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def __post_init__(self) -> None:
        for one in self.by:
            if isinstance(one, OneOf) and self.within is None and self.slots % one.role.warpgroups:
                raise ValueError(
                    f"{self.slots} slots are not a multiple of the {one.role.warpgroups} "
                    f"warpgroups of {one.role.name}, so no slot belongs to one of them"
                )

    @property
    def arrivals(self) -> int:
        def count(one: Role | OneOf | Buffer) -> int:
            if isinstance(one, OneOf):
                return 1
            return one.warpgroups if isinstance(one, Role) else one.copies

        return sum(count(one) for one in self.by)

    @property
    def type(self) -> Any:
        return plgpu.Barrier(num_arrivals=self.arrivals, num_barriers=self.slots)

    @property
    def at(self) -> _At:
        """The barriers, to be indexed by slot: for copies that arrive on them."""
        self.used.add("awaited")
        return _At(self)

    def _of(self, slot: Any) -> Any:
        assert slot is not None or self.slots == 1, "a barrier of several slots is used by slot"
        if slot is None:
            return self.barrier
        check_slot(slot, self.slots)
        return self.barrier.at[slot]

    def arrive(self, slot: Any = None) -> None:
        """This warpgroup's arrival."""
        if (role := roles.playing.get()) is not None:
            self.used.add(role)
        plgpu.barrier_arrive(self._of(slot))

    def wait(self, slot: Any = None) -> None:
        """Every warpgroup that waits must wait for every phase, in order."""
        self.used.add("awaited")
        plgpu.barrier_wait(self._of(slot))

    def check(self, name: str) -> None:
        """Checks, when all roles are traced, that the roles which arrive are those declared. A
        signal that no role uses cannot block, and passes."""
        roles_of = (one.role if isinstance(one, OneOf) else one for one in self.by)
        declared = {one for one in roles_of if isinstance(one, Role)}
        arrived = {one for one in self.used if isinstance(one, Role)}
        if self.used and arrived != declared:
            listed = [
                ", ".join(sorted(role.name for role in found)) or "no role"
                for found in (declared, arrived)
            ]
            raise ValueError(
                f"barrier {name!r} counts arrivals of {listed[0]}, but {listed[1]} arrives on it"
            )


@dataclasses.dataclass(frozen=True)
class _At:
    signal: Signal

    def __getitem__(self, slot: Any) -> Any:
        return self.signal._of(slot)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that are filled ahead of the roles that read them. Steps are counted
    across items, and a step has the slot `step mod slots`."""

    slots: int
    produced: Signal
    consumed: Signal

    @classmethod
    def of(
        cls, slots: int, filled: Iterable[Role | Buffer | None], readers: Iterable[Role | OneOf]
    ) -> Ring:
        """`filled` are the buffers whose copies fill a slot, or the roles that fill it; None stands
        for a buffer that this kernel does not have. `readers` are the roles that release a slot."""
        present = tuple(one for one in filled if one is not None)
        return cls(slots, Signal(present, slots), Signal(tuple(readers), slots))

    def slot(self, step: Any) -> Any:
        return slot_of(step, self.slots)

    def acquire(self, step: Any) -> None:
        """Waits until the step's slot may be filled again."""
        wait_until_free(self.consumed, step, self.slots)

    def drain(self, steps: Any) -> None:
        """Waits, after the last of `steps`, for the releases that `acquire` has not awaited: each
        phase of a barrier has to be awaited."""
        await_the_last(self.consumed, steps, self.slots)


@dataclasses.dataclass(frozen=True)
class Storage:
    """Base of a kernel's storage: a dataclass of `Array`, `Signal` and `Ring`, or None where the
    kernel does not have it. Arrays lie in shared memory in the order of the fields.

    `barriers`, where a kernel sets it, is the order in which barriers lie, by name, with "leave"
    for the one at the end of a program; else they lie as the fields do. Order changes the text of
    a kernel's module, and nothing else.
    """

    barriers: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Signal) and value.within is not None:
                slots = getattr(self, value.within).slots
                object.__setattr__(self, field.name, dataclasses.replace(value, slots=slots))

    def signals(self) -> dict[str, Signal]:
        """The signals by name: the field's, or for a ring "field.consumed" and "field.produced"."""
        found: dict[str, Signal] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Signal):
                found[field.name] = value
            elif isinstance(value, Ring):
                found[f"{field.name}.consumed"] = value.consumed
                found[f"{field.name}.produced"] = value.produced
        return found

    def buffers(self) -> dict[str, Buffer]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Buffer)}

    def types(self, leave: Signal) -> dict[str, Any]:
        """The types of all arrays and barriers to allocate, in their order in shared memory."""
        signals = self.signals() | {"leave": leave}
        if self.barriers:
            missing = set(signals) - set(self.barriers)
            assert not missing, f"{type(self).__name__}.barriers lacks {sorted(missing)}"
            signals = {name: signals[name] for name in self.barriers if name in signals}
        found = {name: buffer.type for name, buffer in self.buffers().items()}
        return found | {name: signal.type for name, signal in signals.items()}

    def bound(self, refs: Mapping[str, Any]) -> Self:
        """This storage with references to what was allocated, by the names of `types`."""

        def signal(name: str, declared: Signal) -> Signal:
            return dataclasses.replace(declared, barrier=refs[name], used=set())

        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Buffer):
                changes[field.name] = refs[field.name]
            elif isinstance(value, Signal):
                changes[field.name] = signal(field.name, value)
            elif isinstance(value, Ring):
                consumed = signal(f"{field.name}.consumed", value.consumed)
                produced = signal(f"{field.name}.produced", value.produced)
                changes[field.name] = Ring(value.slots, produced, consumed)
        return dataclasses.replace(self, **changes)

    def check(self) -> None:
        for name, signal in self.signals().items():
            signal.check(name)


# The slots that `as_slot` has returned while the current program is traced: the key is the
# slot's id, the value the slot and the number of slots. Keeping the slot keeps its id from being
# reused.
found_slots: contextvars.ContextVar[dict[int, tuple[Any, int]] | None]
found_slots = contextvars.ContextVar("found_slots", default=None)


@contextlib.contextmanager
def checked_slots() -> Iterator[None]:
    """Around the trace of a program: checks that each signal is indexed by slots of its number."""
    token = found_slots.set({})
    try:
        yield
    finally:
        found_slots.reset(token)


def check_slot(slot: Any, slots: int) -> None:
    """Raises an error if a signal is indexed by a slot among another number of slots. Without this
    check such a kernel is lowered, and its interpreted results may be right."""
    if isinstance(slot, int):
        if not 0 <= slot < slots:
            raise ValueError(f"a signal of {slots} slots is used at slot {slot}")
    elif (known := found_slots.get()) is not None:
        _, among = known.get(id(slot), (None, None))
        if among is None:
            raise ValueError("a signal is used at a slot that is neither an int nor of `slot_of`")
        if among != slots:
            raise ValueError(f"a signal of {slots} slots is used at a slot among {among}")


def slot_of(step: Any, slots: int) -> Any:
    return as_slot(lax.rem(step, slots), slots)


def as_slot(number: Any, slots: int) -> Any:
    """`number`, to be used as one of `slots` though no step tells it, such as a warpgroup's."""
    if (known := found_slots.get()) is not None:
        known[id(number)] = number, slots
    return number


def wait_until_free(barriers: Any, step: Any, slots: int) -> None:
    """Waits until the step's slot may be filled again."""

    @pl.when(step >= slots)
    def _() -> None:
        plgpu.barrier_wait(barriers.at[slot_of(step, slots)])


def await_the_last(barriers: Any, steps: Any, slots: int) -> None:
    """Waits for the last completion of each slot's barrier: each has to be awaited once."""

    def one(step: Any, _: None) -> None:
        plgpu.barrier_wait(barriers.at[slot_of(step, slots)])

    lax.fori_loop(jnp.maximum(steps - slots, 0), steps, one, None)
