"""What both walks over chunks with a decay per channel share: their roles, and what they load.

The rows and weights of `channel_solve.py` hold all decays but those of the whole chunk. A walk has
64 of v's columns of a head's state in registers; `channel_walk_forward.py` carries S from the first
chunk to the last, `channel_walk_backward.py` its gradient from the last to the first.

    MEMORY         loads the arrays below, for one chunk after the other
      |  early: loaded, two chunks at once; consumed with the chunk's first products
      |  late: loaded, one chunk; consumed once the next state is known
      v
    STATE          the products of a chunk, one after the other

    symbol      shape       what it is
    q^, k^, k~  [64, D]     a chunk's rows, in blocks of 64 columns, k~ in two parts
    rows        [64, 64]    a chunk's rows of v or dout, 64 of their columns
    X, P        [64, 64]    matrices of the chunk, in two parts each
    state       [D, 64]     in registers, transposed: [64, 64] for each block of D

Where a walk keeps what a backward pass needs, both rings as one of two slots would have no room.

Few long sequences are cut into pieces that are walked side by side (`pieces.py`). The walk for the
pieces' maps, of v's columns and of the identity's, reads neither q^ nor P.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, Array, Buffer, Item, Ring, Role, load
from ato_jax.ops.delta_rule.mosaic_gpu import frame
from ato_jax.ops.delta_rule.mosaic_gpu.channel_solve import Solved
from ato_jax.ops.delta_rule.mosaic_gpu.frame import MEMORY, PARTS, C
from ato_jax.ops.delta_rule.mosaic_gpu.walk import Course, carry
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

EARLY_STAGES, LATE_STAGES = 2, 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arrays that a block of a walk loads, and the slices of v's columns that it holds.

    Attributes:
      early: the arrays of `Storage` that the ring `early` brings.
      late: those that the ring `late` brings.
      parts: of q^ and k^ that are multiplied.
      slices: blocks of 64 of v's columns, each in a warpgroup.
    """

    early: tuple[str, ...]
    late: tuple[str, ...]
    parts: int
    slices: int = 1

    @property
    def state(self) -> Role:
        registers = mosaic.workers_registers(self.slices, frame.MOST_REGISTERS)
        return Role("state", registers, self.slices)

    @property
    def places_of_rows(self) -> list[tuple[int, ...]]:
        """Where in a slot each of its slices has its rows."""
        return [()] if self.slices == 1 else [(one,) for one in range(self.slices)]


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    """An array that is loaded has the slots of its ring as its first axis."""

    read: Array  # [.., D / 64, parts, 64, 64] q^
    recalled: Array  # [.., D / 64, parts, 64, 64] k^
    written: Array  # [.., D / 64, PARTS, 64, 64] k~
    rows: Array  # [.., 64, 64] v or dout; [.., slices, 64, 64] of several slices
    solved: Array  # [.., PARTS, 64, 64] X
    pairs: Array  # [.., PARTS, 64, 64] P
    kept: Array  # [.., D] float32: exp2(L_C)
    out: Array  # [1, 64, 64]
    kept_rows: Array  # [PARTS, 64, 64] u, where the walk keeps it
    kept_states: Array  # [D / 64, 64, 64] likewise
    early: Ring
    late: Ring


def storage_of(spec: DeltaRuleSpec, plan: Plan, course: Course) -> Storage:
    blocks, tiling = frame.blocks_of_key(spec), frame.tiling(spec)
    tiles: dict[str, tuple[int, ...]] = {
        "read": (blocks, plan.parts),
        "recalled": (blocks, plan.parts),
        "written": (blocks, PARTS),
        "rows": () if plan.slices == 1 else (plan.slices,),
        "solved": (PARTS,),
        "pairs": (PARTS,),
    }
    loaded: dict[str, Any] = {}
    for name, shape in tiles.items():
        if name not in plan.early + plan.late:
            loaded[name] = None
            continue
        make = tiling.of_rows if name == "rows" else tiling.shared
        copies = functools.reduce(int.__mul__, shape, 1)
        loaded[name] = Buffer(make(_stages(plan, name), *shape, C, HALF), copies=copies)
    loaded["kept"] = Buffer(plgpu.SMEM((_stages(plan, "kept"), spec.D), F32))
    early = [one for name, one in loaded.items() if name in plan.early]
    late = [one for name, one in loaded.items() if name in plan.late]
    keeps_rows, keeps_states = ("u" in course.leaves), ("states" in course.leaves)
    return Storage(
        **loaded,
        out=Buffer(tiling.of_rows(1, C, HALF)) if "out" in course.leaves else None,
        kept_rows=Buffer(tiling.shared(PARTS, C, HALF)) if keeps_rows else None,
        kept_states=Buffer(tiling.shared(blocks, HALF, HALF)) if keeps_states else None,
        early=Ring.of(EARLY_STAGES, early, (plan.state,)),
        late=Ring.of(LATE_STAGES, late, (plan.state,)),
    )


def _stages(plan: Plan, name: str) -> int:
    return EARLY_STAGES if name in plan.early else LATE_STAGES


@dataclasses.dataclass(frozen=True)
class Walk:
    """The call, the blocks' work, the arrays in global memory, and the storage of a block."""

    spec: DeltaRuleSpec
    plan: Plan
    course: Course
    deal: mosaic.Deal
    own: Storage
    recalled: Any
    written: Any
    rows: Any
    solved: Any
    kept: Any
    read: Any = None
    pairs: Any = None
    start: Any = None  # [pieces, B, H, columns, D] float32: the first states
    out: Any = None  # like `rows`: out, or v's cotangent
    end: Any = None  # like `start`: the last states
    u: Any = None  # [B, H, chunks, V / 64, PARTS, 64, 64]
    states: Any = None  # [B, H, chunks, V / 64, D / 64, 64, 64]: those that a chunk is walked from

    def place(self, item: Item) -> tuple[Any, Any]:
        """The head, and the first of the item's blocks of v's columns."""
        count = jnp.int32(self.course.parts_of_head(self.spec, self.plan.slices))
        head, block = lax.div(item.head, count), lax.rem(item.head, count)
        return head, block if self.plan.slices == 1 else block * self.plan.slices

    def of_piece(self, item: Item) -> Walk:
        """The walk with the first and the last states of an item's piece."""
        if self.course.is_alone:
            return self
        start = None if self.start is None else self.start.at[item.piece]
        return dataclasses.replace(self, start=start, end=self.end.at[item.piece])

    def number_of(self, item: Item, chunk: Any) -> Any:
        """The number in the sequence of the chunk that is walked as number `chunk`."""
        number = item.chunks - 1 - chunk if self.course.from_end else chunk
        return number if self.course.is_alone else lax.div(item.first_row, jnp.int32(C)) + number

    def part(self, ref: Any, item: Item, number: Any, slice: int = 0) -> Any:
        """A chunk's rows of v, out or their gradients."""
        head, block = self.place(item)
        if self.course.maps:
            # Beyond v's columns what is loaded is not used.
            block = jnp.minimum(block + slice, self.spec.V // HALF - 1)
        return frame.tiling(self.spec).part(ref, item, pl.ds(number * C, C), head, block)

    def begin(self, item: Item, chunk: Any) -> Chunk:
        """Waits for what comes early."""
        step = item.before + chunk
        early, late = self.own.early.slot(step), self.own.late.slot(step)
        self.own.early.produced.wait(early)
        return Chunk(self, early, late)

    def leave(self, item: Item, chunk: Any, *names: str) -> None:
        """Copies the tiles that are kept to their places."""
        head, block = self.place(item)
        at = item.batch, head, self.number_of(item, chunk), block
        if "u" in names:
            for part in range(PARTS):
                plgpu.copy_smem_to_gmem(self.own.kept_rows.at[part], self.u.at[(*at, part)])
        if "states" in names:
            for n in range(frame.blocks_of_key(self.spec)):
                plgpu.copy_smem_to_gmem(self.own.kept_states.at[n], self.states.at[(*at, n)])


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk's tiles in the slots of both rings."""

    walk: Walk
    early: Any
    late: Any

    def _slot(self, name: str) -> Any:
        return self.early if name in self.walk.plan.early else self.late

    def tile(self, name: str, *at: Any) -> Any:
        return getattr(self.walk.own, name).at[(self._slot(name), *at)]

    def parts(self, name: str, *at: Any) -> tuple[Any, Any]:
        return self.tile(name, *at, 0), self.tile(name, *at, 1)

    def kept(self, block: int) -> jax.Array:
        """[64, 64]: exp2(L_C), in columns of channels."""
        return mosaic.in_rows(load(self.tile("kept", pl.ds(block * HALF, HALF)), OF_COLUMNS), HALF)

    def release(self, ring: str) -> None:
        """Behind a `commit_smem`, also for what was read of the slot."""
        slot = self.early if ring == "early" else self.late
        getattr(self.walk.own, ring).consumed.arrive(slot)


def walk(
    name: str,
    spec: DeltaRuleSpec,
    plan: Plan,
    solved: Solved,
    given: dict[str, jax.Array],
    step: Callable[..., list[jax.Array]],
    course: Course,
) -> dict[str, jax.Array]:
    """Launches a walk; its outputs by the names of `Walk`: end, and those that the course leaves.
    `given`: rows, kept, and start where there is one."""
    deal = course.deal(spec, plan.slices)
    read = {name: one for name, one in solved._asdict().items() if name in plan.early + plan.late}
    given = {**read, **given}
    ends: tuple[int, ...] = (course.pieces, spec.B, spec.H, course.columns(spec), spec.D)
    if course.is_alone:
        # A piece alone is not counted in the kernel.
        ends = ends[1:]
        given |= {"start": given["start"][0]} if "start" in given else {}
    blocks = (spec.B, spec.H, frame.chunks_of(spec), spec.V // HALF)
    types = {
        "out": jax.ShapeDtypeStruct(given["rows"].shape, BF16),
        "end": jax.ShapeDtypeStruct(ends, F32),
        "u": jax.ShapeDtypeStruct((*blocks, PARTS, C, HALF), BF16),
        "states": jax.ShapeDtypeStruct((*blocks, frame.blocks_of_key(spec), HALF, HALF), BF16),
    }
    types = {one: types[one] for one in types if one in ("end", *course.leaves)}

    parts = (MEMORY, memory), (plan.state, functools.partial(carry, step))
    bind = functools.partial(Walk, spec, plan, course, deal)
    storage = storage_of(spec, plan, course)
    found = frame.launch(name, deal, storage, parts, bind, given, types)
    return found | ({"end": found["end"][None]} if course.is_alone else {})


def memory(walk: Walk) -> None:
    """Loads chunks as slots come free."""
    steps = walk.deal.each(functools.partial(load_item, walk))
    walk.own.early.drain(steps)
    walk.own.late.drain(steps)


def load_item(walk: Walk, item: Item) -> None:
    """An early chunk ahead of the late part of the one before it, whose slot comes free later."""
    count = item.chunks
    # A traced 0: JAX rejects a slice that is statically out of bounds, here of a sequence that is
    # shorter than its first chunk.
    load_ring(walk, item, "early", jnp.int32(0))

    def load_chunk(chunk: Any, _: None) -> None:
        pl.when(chunk + 1 < count)(lambda: load_ring(walk, item, "early", chunk + 1))
        load_ring(walk, item, "late", chunk)

    lax.fori_loop(0, count, load_chunk, None)


def load_ring(walk: Walk, item: Item, name: str, chunk: Any) -> None:
    own, plan = walk.own, walk.plan
    ring: Ring = getattr(own, name)
    step, number = item.before + chunk, walk.number_of(item, chunk)
    slot = ring.slot(step)
    ring.acquire(step)
    at = item.batch, walk.place(item)[0], number
    blocks, parts = range(frame.blocks_of_key(walk.spec)), range(PARTS)
    tiles: dict[str, list[tuple[int, ...]]] = {
        "recalled": [(n, part) for n in blocks for part in range(plan.parts)],
        "read": [(n, part) for n in blocks for part in range(plan.parts)],
        "written": [(n, part) for n in blocks for part in parts],
        "solved": [(part,) for part in parts],
        "pairs": [(part,) for part in parts],
    }
    copies = [
        (getattr(walk, one).at[(*at, *place)], getattr(own, one).at[(slot, *place)], one)
        for one, places in tiles.items()
        if one in plan.early + plan.late
        for place in places
    ]
    for slice, place in enumerate(plan.places_of_rows):
        rows = mosaic.for_copy(own.rows.at[(slot, *place)])
        copies.append((walk.part(walk.rows, item, number, slice), rows, "rows"))
    copies.append((walk.kept.at[at], own.kept.at[slot], "kept"))
    for source, target, one in copies:
        if one in (plan.early if name == "early" else plan.late):
            plgpu.copy_gmem_to_smem(source, target, ring.produced.at[slot])
