"""The kit of Hopper kernels: derived arrivals, roles, storage; and that kernels lower to the same
module text as before."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import ato_jax
from ato_jax import mosaic
from ato_jax.mosaic import F32, Array, Buffer, OneOf, Ring, Role, Signal
from ato_jax.ops.linear_attention.mosaic_gpu import key_gradient_storage, output
from tests import mosaic_text

LOADS = Role("loads", registers=24)
WORKS = Role("works", registers=160, warpgroups=2)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    x: Array  # [2, 64]
    y: Array  # [64], or None
    rows: Ring
    done: Signal


def storage(by: tuple[Role, ...] = (WORKS,)) -> Storage:
    x = Buffer(plgpu.SMEM((2, 64), F32), copies=3)
    return Storage(x, None, Ring.of(2, (x, None), (WORKS,)), Signal(by))


def test_arrivals_follow_from_roles_and_copies() -> None:
    own = storage((LOADS, WORKS))
    counts = {name: signal.arrivals for name, signal in own.signals().items()}
    assert counts == {"rows.consumed": 2, "rows.produced": 3, "done": 3}
    leave = Signal((LOADS, WORKS))
    assert list(own.types(leave)) == ["x", "rows.consumed", "rows.produced", "done", "leave"]
    assert own.types(leave)["leave"].num_arrivals == 3
    assert own.rows.produced.slots == own.rows.slots == 2


def test_order_of_barriers_names_all_of_them() -> None:
    class Ordered(Storage):
        barriers = ("leave", "done", "rows.produced", "rows.consumed")

    class Short(Storage):
        barriers = ("leave", "done")

    values = {field.name: getattr(storage(), field.name) for field in dataclasses.fields(Storage)}
    assert list(Ordered(**values).types(Signal((WORKS,))))[1:] == list(Ordered.barriers)
    with pytest.raises(AssertionError, match=r"lacks \['rows.consumed', 'rows.produced'\]"):
        Short(**values).types(Signal((WORKS,)))


def lowered(
    own: Storage,
    works: Any,
    loads: Any = lambda own, *_: own.rows.drain(0),
    dtype: Any = F32,
    once: bool = False,
) -> Any:
    roles = mosaic.Roles((WORKS, LOADS))
    parts = (LOADS, loads), (WORKS, works)
    program = mosaic.Program(roles, own, parts, lambda _refs, own: own, reads_number_once=once)
    deal = mosaic.Deal(1, 1, 64, 64, 1, 1)
    out = jax.ShapeDtypeStruct((64,), F32)

    def call(x: jax.Array) -> Any:
        return mosaic.launch("kit_test", program, deal, out, (x,))

    with mosaic_text.on_hopper():
        return jax.jit(call).trace(jnp.zeros(64, dtype)).lower(lowering_platforms=("cuda",))


def works(own: Storage) -> None:
    own.rows.produced.wait(0)
    own.rows.consumed.arrive(0)
    own.done.arrive()


def test_inputs_of_64_bits_are_refused() -> None:
    """Some JAX would lower them to kernels that copy too many bytes."""
    with jax.enable_x64(True), pytest.raises(TypeError, match="kit_test: input 0 is float64"):
        lowered(storage(), works, dtype=jnp.float64)


def test_undeclared_arrivals_are_refused() -> None:
    """They would complete a phase too early, or never: found when the kernel is traced."""
    lowered(storage(), works)
    with pytest.raises(ValueError, match="'done' counts arrivals of loads, but works arrives on"):
        lowered(storage((LOADS,)), works)
    with pytest.raises(ValueError, match="'done' counts arrivals of loads, works, but works arr"):
        lowered(storage((LOADS, WORKS)), works)

    def nobody(own: Storage) -> None:
        own.rows.consumed.arrive(0)
        own.done.wait()

    with pytest.raises(ValueError, match="'done' counts arrivals of works, but no role arrives"):
        lowered(storage(), nobody)


@dataclasses.dataclass(frozen=True)
class Mapping(Storage):
    mapped: Signal


@pytest.mark.parametrize(
    ("mapped", "fault"),
    [
        (Signal((WORKS,), within="rows"), None),
        (Signal((WORKS,), slots=2), None),
        (Signal((WORKS,)), "a signal of 1 slots is used at a slot among 2"),
        (Signal((WORKS,), slots=3), "a signal of 3 slots is used at a slot among 2"),
    ],
)
def test_a_signal_within_a_ring_has_a_barrier_for_each_slot(
    mapped: Signal, fault: str | None
) -> None:
    """Found when the kernel is traced: lowering and interpretation take a barrier too few."""
    own = storage()
    values = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}

    def maps(own: Mapping) -> None:
        works(own)
        own.mapped.arrive(own.rows.slot(jnp.int32(5)))

    with contextlib.nullcontext() if fault is None else pytest.raises(ValueError, match=fault):
        lowered(Mapping(**values, mapped=mapped), maps)


def test_slots_of_barriers_are_those_of_steps() -> None:
    def at(slot: Any) -> Any:
        return lambda own: (works(own), own.rows.consumed.arrive(slot(own)))

    lowered(storage(), at(lambda _: 1))
    with pytest.raises(ValueError, match="a signal of 2 slots is used at slot 2"):
        lowered(storage(), at(lambda _: 2))
    with pytest.raises(ValueError, match="neither an int nor of `slot_of`"):
        lowered(storage(), at(lambda own: own.rows.slot(jnp.int32(5)) + 1))

    def number(slots: int) -> Any:
        return at(lambda _: mosaic.as_slot(jnp.int32(1), slots))

    lowered(storage(), number(2))
    with pytest.raises(ValueError, match="a signal of 2 slots is used at a slot among 3"):
        lowered(storage(), number(3))


def test_a_warpgroup_reads_its_number_once_if_told() -> None:
    """And each part is given it; otherwise each role reads it."""

    def reads(once: bool) -> int:
        given: list[int] = []

        def works_and_counts(own: Storage, *number: Any) -> None:
            given.append(len(number))
            works(own)

        call = lowered(storage(), works_and_counts, once=once)
        assert given == [int(once)]
        ((_, text),) = mosaic_text.modules_of(call)
        return text.count("nvvm.shfl.sync")

    assert reads(once=True) == reads(once=False) - 1


def test_a_slot_may_belong_to_one_warpgroup() -> None:
    """One of the role's warpgroups arrives, and the role is checked as any other."""
    own = Signal((OneOf(WORKS), LOADS), slots=4)
    assert own.arrivals == 2
    with pytest.raises(ValueError, match="3 slots are not a multiple of the 2 warpgroups of works"):
        Signal((OneOf(WORKS),), slots=3)
    declared = dataclasses.replace(storage(), done=Signal((OneOf(WORKS),), slots=2))

    def arrives_at_its_own(own: Storage) -> None:
        own.rows.consumed.arrive(0)
        own.done.arrive(mosaic.as_slot(mosaic.group() + 0, 2))

    lowered(declared, arrives_at_its_own)
    with pytest.raises(ValueError, match="'done' counts arrivals of works, but no role arrives"):
        lowered(declared, lambda own: (own.rows.consumed.arrive(0), own.done.wait(0)))


# As the barriers of these kernels were counted by hand; of one head in a tile, and of two.
OUTPUT = {
    "rows.produced": (2, 4),
    "values.produced": (2, 2),
    "mapped": (2, 2),
    "den_known": (2, 2),
    "rows.consumed": (4, 4),
    "values.consumed": (4, 4),
    "state.produced": (2, 2),
    "state.consumed": (2, 2),
    "sums.produced": (2, 2),
    "sums.consumed": (2, 2),
}
KEY_GRADIENT = {
    "rows.produced": (4, 8),
    "rows.consumed": (3, 3),
    "keys.produced": (2, 4),
    "keys.consumed": (2, 2),
    "state.produced": (1, 1),
    "state.consumed": (2, 2),
    "mapped": (1, 1),
    "start": (2, 4),
}
# A sequence that is no multiple of 8 rows: 16 copies fill a tile of one head.
BY_ATOMS = {"rows.produced": (34, 8), "keys.produced": (32, 4)}
BY_ATOMS_WITH_GATES = {"rows.produced": (35, 10)}
OF_GATES = {"keys_mapped": (1, 1), "rows.produced": (5, 10)}
OF_STEEP = {"pairs_ring.produced": (1, 1), "pairs_ring.consumed": (1, 1)}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("decay", [None, "step"])
def test_arrivals_are_those_counted_by_hand(heads: int, decay: str | None) -> None:
    spec = mosaic_text.spec_of(mosaic_text.Case(128 // heads, decay=decay))

    def counts(own: mosaic.Storage) -> dict[str, int]:
        return {name: signal.arrivals for name, signal in own.signals().items()}

    def wanted(by_hand: dict[str, tuple[int, int]]) -> dict[str, int]:
        return {name: numbers[heads - 1] for name, numbers in by_hand.items()}

    of_gates = {"values.produced": (3, 4)} if decay else {}
    assert counts(output.storage_of(spec)) == wanted(OUTPUT | of_gates)
    # Where T is no multiple of 8, two copies fill a tile, whether it holds one head or two.
    odd, in_blocks = dataclasses.replace(spec, T=1001, S=1001), {"rows.produced": (4, 4)}
    assert counts(output.storage_of(odd)) == wanted(OUTPUT | of_gates | in_blocks)
    for some_steep in (False, True)[: 1 + bool(decay)]:
        by_hand = KEY_GRADIENT | (OF_GATES if decay else {}) | (OF_STEEP if some_steep else {})
        assert counts(key_gradient_storage.storage_of(spec, some_steep)) == wanted(by_hand)
        by_hand |= BY_ATOMS | (BY_ATOMS_WITH_GATES if decay else {})
        assert counts(key_gradient_storage.storage_of(odd, some_steep)) == wanted(by_hand)


RECORDED = mosaic_text.recorded()


@pytest.mark.newest
@pytest.mark.skipif(RECORDED is None, reason="the record is of other JAX versions")
@pytest.mark.parametrize("name", ["D128-causal-B1T4096-bthd", "D64-causal-decay_step-B1T4096-bthd"])
def test_modules_are_those_recorded(name: str) -> None:
    """All other cases: `python -m tests.mosaic_text`."""
    (case,) = [case for case in mosaic_text.CASES if case.name == name]
    assert RECORDED is not None
    assert mosaic_text.hashes_of(case) == RECORDED[name], (
        "a kernel lowers to another module text: if that is meant, its numerics were checked, and "
        "the next run on a card is to time it, `python -m tests.mosaic_text --write` records it"
    )


def test_the_record_has_all_cases() -> None:
    names = [case.name for case in mosaic_text.CASES]
    assert len(set(names)) == len(names)
    for version, cases in mosaic_text.everything().items():
        assert sorted(cases) == sorted(names), version


def shared_bytes(text: str) -> int:
    """The bytes of shared memory that a kernel allocates, read from its module's text."""
    return max(int(size) for size in re.findall(r"memref<(\d+)xi8, #gpu.address_space<work", text))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("decay", "layout"), [(None, "bthd"), ("step", "bhtd"), ("head", "bthd")])
def test_sequences_of_odd_lengths(decay: str | None, layout: str, D: int) -> None:
    """A call with T = 1001 launches the kernels that T = 1000 does, and each allocates as much
    shared memory: forward, and backward where gates of heads do not take the kernels of those of
    steps."""
    backward = decay != "head"

    def modules(T: int) -> list[tuple[str, str]]:
        options = dict(normalize=layout == "bthd", gradients=backward)
        case = mosaic_text.Case(D, T=T, decay=decay, layout=layout, **options)
        return mosaic_text.modules_of(mosaic_text.lower(case))

    even, odd = modules(1000), modules(1001)
    assert [name for name, _ in even] == [name for name, _ in odd]
    for (_, of_even), (_, of_odd) in zip(even, odd, strict=True):
        assert shared_bytes(of_even) == shared_bytes(of_odd)


def test_only_rows_of_the_swizzle_have_an_untiled_view() -> None:
    of_pairs = mosaic.Tiling("bthd", 128, 64, heads=2, untiled=True)
    assert isinstance(of_pairs.tiles(4), plgpu.RefUnion)
    assert not isinstance(dataclasses.replace(of_pairs, untiled=False).tiles(4), plgpu.RefUnion)
    with ato_jax.interpret():
        assert not isinstance(of_pairs.tiles(4), plgpu.RefUnion)
    of_one = mosaic.Tiling("bthd", 128, 128, untiled=True)
    assert isinstance(of_one.tiles(4), plgpu.RefUnion)
    with pytest.raises(AssertionError, match="256 bytes are tiled otherwise"):
        of_one.of_rows(4, 64, 128)
    filled = dataclasses.replace(of_pairs, width=40)
    assert filled.is_filled and filled.tiles(4) == of_pairs.tiles(4)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_columns_beyond_a_head_are_rows_beyond_its_sequence(layout: str) -> None:
    """Mosaic GPU would copy the first columns of an array that is one tile wide."""
    tiling, rows = mosaic.Tiling(layout, 128, 64), pl.ds(64, 64)
    shape = (1, 200, 2, 64) if layout == "bthd" else (1, 2, 200, 64)
    array = SimpleNamespace(shape=shape)
    assert tiling.rows_of_half(array, rows, 0) == rows
    for half in (1, jnp.int32(1)):
        assert int(tiling.rows_of_half(array, rows, half).start) >= 200
    assert int(tiling.rows_of_half(array, rows, jnp.int32(0)).start) == 64
    wider = SimpleNamespace(shape=(*shape[:3], 80))
    assert tiling.rows_of_half(wider, rows, 1) == rows
