"""What both walks over chunks with a decay per channel share: their roles, and what they load.

The rows and weights of `channel_solve.py` hold all decays but those of the whole chunk. A walk has
64 of v's columns of a head's state in registers; `channel_walk_forward.py` carries S from the first
chunk to the last, `channel_walk_backward.py` its gradient from the last to the first.

    MEMORY         loads all of the below for a chunk
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
from ato_jax.ops.delta_rule.mosaic_gpu.walk import carry
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

EARLY_STAGES, LATE_STAGES = 2, 1
STATE = Role("state", registers=frame.MOST_REGISTERS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the forward walk and the backward walk differ.

    Attributes:
      early: the arrays of `Storage` that the ring `early` brings; `late` brings the others.
      parts: of q^ and k^ that are multiplied.
      from_end: chunks are walked from the last to the first.
      keeps: the arrays of `Walk` that it leaves beside out and the last state.
    """

    early: tuple[str, ...]
    parts: int
    from_end: bool
    keeps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    """An array that is loaded has the slots of its ring as its first axis."""

    read: Array  # [.., D / 64, parts, 64, 64] q^
    recalled: Array  # [.., D / 64, parts, 64, 64] k^
    written: Array  # [.., D / 64, PARTS, 64, 64] k~
    rows: Array  # [.., 64, 64] v or dout
    solved: Array  # [.., PARTS, 64, 64] X
    pairs: Array  # [.., PARTS, 64, 64] P
    kept: Array  # [.., D] float32: exp2(L_C)
    out: Array  # [1, 64, 64]
    kept_rows: Array  # [PARTS, 64, 64] u, where the walk keeps it
    kept_states: Array  # [D / 64, 64, 64] likewise
    early: Ring
    late: Ring


def storage_of(spec: DeltaRuleSpec, plan: Plan) -> Storage:
    blocks, tiling = frame.blocks_of_key(spec), frame.tiling(spec)
    tiles: dict[str, tuple[int, ...]] = {
        "read": (blocks, plan.parts),
        "recalled": (blocks, plan.parts),
        "written": (blocks, PARTS),
        "rows": (),
        "solved": (PARTS,),
        "pairs": (PARTS,),
    }
    loaded = {}
    for name, shape in tiles.items():
        make = tiling.of_rows if name == "rows" else tiling.shared
        copies = functools.reduce(int.__mul__, shape, 1)
        loaded[name] = Buffer(make(_stages(plan, name), *shape, C, HALF), copies=copies)
    loaded["kept"] = Buffer(plgpu.SMEM((_stages(plan, "kept"), spec.D), F32))
    early = [one for name, one in loaded.items() if name in plan.early]
    late = [one for name, one in loaded.items() if name not in plan.early]
    keeps_rows, keeps_states = ("u" in plan.keeps), ("states" in plan.keeps)
    return Storage(
        **loaded,
        out=Buffer(tiling.of_rows(1, C, HALF)),
        kept_rows=Buffer(tiling.shared(PARTS, C, HALF)) if keeps_rows else None,
        kept_states=Buffer(tiling.shared(blocks, HALF, HALF)) if keeps_states else None,
        early=Ring.of(EARLY_STAGES, early, (STATE,)),
        late=Ring.of(LATE_STAGES, late, (STATE,)),
    )


def _stages(plan: Plan, name: str) -> int:
    return EARLY_STAGES if name in plan.early else LATE_STAGES


@dataclasses.dataclass(frozen=True)
class Walk:
    """The call, the blocks' work, the arrays in global memory, and the storage of a block."""

    spec: DeltaRuleSpec
    plan: Plan
    deal: mosaic.Deal
    own: Storage
    read: Any
    recalled: Any
    written: Any
    rows: Any
    solved: Any
    pairs: Any
    kept: Any
    start: Any = None  # [B, H, V, D] float32: the first state
    out: Any = None  # like `rows`: out, or v's cotangent
    end: Any = None  # [B, H, V, D] float32: the last state
    u: Any = None  # [B, H, chunks, V / 64, PARTS, 64, 64]
    states: Any = None  # [B, H, chunks, V / 64, D / 64, 64, 64]: those that a chunk is walked from

    def place(self, item: Item) -> tuple[Any, Any]:
        """The head, and the number of the item's block of v's columns."""
        count = jnp.int32(self.spec.V // HALF)
        return lax.div(item.head, count), lax.rem(item.head, count)

    def number_of(self, item: Item, chunk: Any) -> Any:
        """The number in the sequence of the chunk that is walked as number `chunk`."""
        return item.chunks - 1 - chunk if self.plan.from_end else chunk

    def part(self, ref: Any, item: Item, number: Any) -> Any:
        """A chunk's rows of v, out or their gradients."""
        head, block = self.place(item)
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
) -> dict[str, jax.Array]:
    """Launches a walk; its outputs by the names of `Walk`: out, end, and those that it keeps.
    `given`: rows, kept, and start where there is one."""
    heads = spec.H * (spec.V // HALF)
    rows = mosaic.whole_chunks(spec.T)
    deal = mosaic.Deal(spec.B, heads, spec.T, rows, pieces=1, most_blocks=spec.B * heads)
    given = {**solved._asdict(), **given}
    blocks = (spec.B, spec.H, frame.chunks_of(spec), spec.V // HALF)
    types = {
        "out": jax.ShapeDtypeStruct(given["rows"].shape, BF16),
        "end": jax.ShapeDtypeStruct((spec.B, spec.H, spec.V, spec.D), F32),
        "u": jax.ShapeDtypeStruct((*blocks, PARTS, C, HALF), BF16),
        "states": jax.ShapeDtypeStruct((*blocks, frame.blocks_of_key(spec), HALF, HALF), BF16),
    }
    types = {one: types[one] for one in ("out", "end", *plan.keeps)}

    parts = (MEMORY, memory), (STATE, functools.partial(carry, step))
    bind = functools.partial(Walk, spec, plan, deal)
    return frame.launch(name, deal, storage_of(spec, plan), parts, bind, given, types)


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
        for place in places
    ]
    rows = mosaic.for_copy(own.rows.at[slot])
    copies += [
        (walk.part(walk.rows, item, number), rows, "rows"),
        (walk.kept.at[at], own.kept.at[slot], "kept"),
    ]
    for source, target, one in copies:
        if (one in plan.early) == (name == "early"):
            plgpu.copy_gmem_to_smem(source, target, ring.produced.at[slot])
