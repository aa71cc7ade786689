"""What both walks over chunks share: their roles, what a block loads for each chunk, and the
factors of its steps.

A walk has a state for each head and 64 of v's columns, in registers. `walk_forward.py` carries S
from the first chunk to the last, `walk_backward.py` its gradient from the last to the first.

    MEMORY         loads q, k, v or dout, X and the numbers of a chunk's steps
      |  chunks: loaded; consumed once P and the next state are known
      v
    PAIRS          the weights of the chunk's pairs, a chunk or two ahead of STATE
      |  pairs: stored; consumed once they are multiplied
      v
    STATE (0 .. n - 1)    64 columns of v each: the products of a chunk, one after the other

    P[t, s] = scale * q_t . k_s exp2(L_t - L_s)     s <= t, else 0

with L_t the sum of log2 decays from the chunk's first step to t.

    symbol      shape       what it is
    q, k        [64, D]     a chunk's rows, in blocks of 64 columns
    rows        [64, 64]    a chunk's rows of v or dout, 64 of their columns
    X, P        [64, 64]    matrices of the chunk, in two parts each; X is of `solve.py`
    state       [D, 64]     in registers, transposed: [64, 64] for each block of D
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import (
    BF16,
    F32,
    HALF,
    OF_COLUMNS,
    OF_ROWS,
    Array,
    Buffer,
    Item,
    Ring,
    Role,
    load,
)
from ato_jax.ops.delta_rule.mosaic_gpu import frame
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C, Config
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
# The registers of a thread of PAIRS and of one of STATE, by how many warpgroups STATE has.
REGISTERS = {1: (168, 240), 2: (72, 208)}


@functools.cache
def roles_of(slices: int) -> tuple[Role, Role]:
    """PAIRS and STATE."""
    pairs, state = REGISTERS[slices]
    return Role("pairs", pairs), Role("state", state, slices)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    q: Array  # [stages, D / 64, 64, 64]
    k: Array  # as q
    rows: Array  # [stages, n, 64, 64]
    solved: Array  # [stages, PARTS, 64, 64] X
    numbers: Array  # [stages, NUMBERS, 64] float32
    weights: Array  # [slots of `pairs`, PARTS, 64, 64] P
    out: Array  # [n, 64, 64]
    written: Array  # [n, 64, 64], where the walk keeps it
    states: Array  # [n, D / 64, 64, 64], likewise
    chunks: Ring
    pairs: Ring


def storage_of(spec: DeltaRuleSpec, config: Config, written: bool, states: bool) -> Storage:
    stages, slices, blocks = config.stages, config.slices, frame.blocks_of_key(spec)
    tiling = frame.tiling(spec)
    q, k = (Buffer(tiling.of_rows(stages, blocks, C, HALF), copies=blocks) for _ in range(2))
    rows = Buffer(tiling.of_rows(stages, slices, C, HALF), copies=slices)
    solved = Buffer(tiling.shared(stages, frame.PARTS, C, C), copies=frame.PARTS)
    pairs, state = roles_of(slices)
    numbers = Buffer(frame.numbers_in_memory(stages))
    # Two slices that keep u and S leave no room for two; the forward walk reads P late.
    slots = 1 if written and slices > 1 else stages
    return Storage(
        q=q,
        k=k,
        rows=rows,
        solved=solved,
        numbers=numbers,
        weights=Buffer(tiling.shared(slots, frame.PARTS, C, C)),
        out=Buffer(tiling.of_rows(slices, C, HALF)),
        written=Buffer(tiling.shared(slices, C, HALF)) if written else None,
        states=Buffer(tiling.shared(slices, blocks, HALF, HALF)) if states else None,
        chunks=Ring.of(stages, (q, k, rows, solved, numbers), (pairs, state)),
        pairs=Ring.of(slots, (pairs,), (state,)),
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """The call, the blocks' work, the arrays in global memory, and the storage of a block.

    `from_end`: chunks are walked from the last to the first.
    """

    spec: DeltaRuleSpec
    config: Config
    deal: mosaic.Deal
    from_end: bool
    own: Storage
    q: Any
    k: Any
    rows: Any  # v, or out's cotangent
    solved: Any
    numbers: Any
    start: Any = None  # [B, H, V, D] float32: the first state
    out: Any = None  # like `rows`: out, or v's cotangent
    end: Any = None  # [B, H, V, D] float32: the last state
    written: Any = None  # [B, H, chunks, V / 64, 64, 64]: u
    states: Any = None  # [B, H, chunks, V / 64, D / 64, 64, 64]: those that chunks begin with

    def place(self, item: Item) -> tuple[Any, Any]:
        """The head, and the first of the item's blocks of v's columns."""
        count = _parts_of_head(self.spec, self.config)
        return lax.div(item.head, count), lax.rem(item.head, count) * self.config.slices

    def number_of(self, item: Item, chunk: Any) -> Any:
        """The number in the sequence of the chunk that is walked as number `chunk`."""
        return item.chunks - 1 - chunk if self.from_end else chunk

    def store_rows(self, item: Item, chunk: Any, slot: Any) -> None:
        """Copies a slot of `own.out` to its place."""
        head, first = self.place(item)
        rows = pl.ds(self.number_of(item, chunk) * C, C)
        target = frame.tiling(self.spec).part(self.out, item, rows, head, first + slot)
        plgpu.copy_smem_to_gmem(mosaic.for_copy(self.own.out.at[slot]), target)

    def begin(self, item: Item, chunk: Any) -> Chunk:
        """Waits for the chunk's loads; those who read the pairs wait for them."""
        own, step = self.own, item.before + chunk
        slot, of_pairs = own.chunks.slot(step), own.pairs.slot(step)
        own.chunks.produced.wait(slot)
        blocks, parts = range(frame.blocks_of_key(self.spec)), range(frame.PARTS)
        q, k = ([tiles.at[slot, n] for n in blocks] for tiles in (own.q, own.k))
        solved, pairs = (
            tuple(tiles.at[at, part] for part in parts)
            for tiles, at in ((own.solved, slot), (own.weights, of_pairs))
        )
        return Chunk(slot, of_pairs, q, k, solved, pairs, Numbers(self.spec, own.numbers.at[slot]))

    def end_of(self, here: Chunk) -> None:
        """Lets the chunk's slots go."""
        plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
        self.own.chunks.consumed.arrive(here.slot)
        self.own.pairs.consumed.arrive(here.of_pairs)

    def store_state(self, item: Item, chunk: Any, slot: Any) -> None:
        """Copies a slot of `own.states` to its place."""
        head, first = self.place(item)
        at = item.batch, head, self.number_of(item, chunk), first + slot
        for block in range(frame.blocks_of_key(self.spec)):
            target = self.states.at[(*at, block)]  # [64, 64]
            plgpu.copy_smem_to_gmem(self.own.states.at[slot, block], target)


class Chunk(NamedTuple):
    """The slots of the rings that hold a chunk, and what lies in them."""

    slot: Any
    of_pairs: Any
    q: list[Any]  # [64, 64] of each block of D, as are k's
    k: list[Any]
    solved: tuple[Any, ...]  # the parts of X, [64, 64], as are those of P
    pairs: tuple[Any, ...]
    numbers: Numbers


def _parts_of_head(spec: DeltaRuleSpec, config: Config) -> int:
    """How many blocks share a head."""
    return spec.V // (HALF * config.slices)


def walk(
    name: str,
    spec: DeltaRuleSpec,
    config: Config,
    given: dict[str, jax.Array],
    step: Callable[..., list[jax.Array]],
    *,
    from_end: bool,
    keeps: Sequence[str],
) -> dict[str, jax.Array]:
    """Launches a walk whose `step` is (walk, item, slot of v's columns, chunk, state) to the next
    state; returns its outputs, by the names of `Walk`: out, end, and those of `keeps`."""
    heads = spec.H * _parts_of_head(spec, config)
    rows = mosaic.whole_chunks(spec.T)
    deal = mosaic.Deal(spec.B, heads, spec.T, rows, pieces=1, most_blocks=spec.B * heads)
    blocks = (spec.B, spec.H, frame.chunks_of(spec), spec.V // HALF)
    types = {
        "out": jax.ShapeDtypeStruct(given["rows"].shape, BF16),
        "end": jax.ShapeDtypeStruct((spec.B, spec.H, spec.V, spec.D), F32),
        "written": jax.ShapeDtypeStruct((*blocks, C, HALF), BF16),
        "states": jax.ShapeDtypeStruct((*blocks, frame.blocks_of_key(spec), HALF, HALF), BF16),
    }
    types = {one: types[one] for one in ("out", "end", *keeps)}

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        named = dict(zip([*given, *types], refs, strict=True))
        return Walk(spec, config, deal, from_end, own, **named)

    pairs, state = roles_of(config.slices)
    parts = (MEMORY, memory), (pairs, weigh), (state, functools.partial(carry, step))
    storage = storage_of(spec, config, "written" in keeps, "states" in keeps)
    program = mosaic.Program(mosaic.Roles((state, pairs, MEMORY)), storage, parts, bind)
    found = mosaic.launch(
        frame.name_of(name),
        program,
        deal,
        tuple(types.values()),
        tuple(given.values()),
        own_barriers=True,
    )
    return dict(zip(types, found, strict=True))


def memory(walk: Walk) -> None:
    """Loads chunks as slots come free."""
    steps = walk.deal.each(functools.partial(load_item, walk))
    walk.own.chunks.drain(steps)


def load_item(walk: Walk, item: Item) -> None:
    own, spec, tiling = walk.own, walk.spec, frame.tiling(walk.spec)
    head, first = walk.place(item)
    key_head = lax.div(head, jnp.int32(spec.H // spec.G))

    def load_chunk(chunk: Any, _: None) -> None:
        step, number = item.before + chunk, walk.number_of(item, chunk)
        rows = pl.ds(number * C, C)
        slot = own.chunks.slot(step)
        own.chunks.acquire(step)
        barrier = own.chunks.produced.at[slot]
        for ref, tiles in ((walk.k, own.k), (walk.q, own.q)):
            for block in range(frame.blocks_of_key(spec)):
                source = tiling.part(ref, item, rows, key_head, block)  # [64, 64]
                plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tiles.at[slot, block]), barrier)
        for one in range(walk.config.slices):
            source = tiling.part(walk.rows, item, rows, head, first + one)  # [64, 64]
            plgpu.copy_gmem_to_smem(source, mosaic.for_copy(own.rows.at[slot, one]), barrier)
        at = item.batch, head, number
        for part in range(frame.PARTS):
            source = walk.solved.at[(*at, part)]  # [64, 64]
            plgpu.copy_gmem_to_smem(source, own.solved.at[slot, part], barrier)
        plgpu.copy_gmem_to_smem(walk.numbers.at[at], own.numbers.at[slot], barrier)

    lax.fori_loop(0, item.chunks, load_chunk, None)


def weigh(walk: Walk) -> None:
    """Forms P of each chunk."""
    steps = walk.deal.each(functools.partial(weigh_item, walk))
    walk.own.pairs.drain(steps)


def weigh_item(walk: Walk, item: Item) -> None:
    own, spec = walk.own, walk.spec
    blocks = range(frame.blocks_of_key(spec))
    below = mosaic.position(0) >= mosaic.position(1)

    def weigh_chunk(chunk: Any, _: None) -> None:
        step = item.before + chunk
        slot = own.chunks.slot(step)
        own.chunks.produced.wait(slot)
        q, k = ([tiles.at[slot, n] for n in blocks] for tiles in (own.q, own.k))
        numbers = own.numbers.at[slot]
        weights = frame.decayed_pairs(spec, q, k, numbers)
        weights = weights * mosaic.in_columns(load(numbers.at[frame.OF_QUERIES], OF_ROWS), C)
        own.pairs.acquire(step)
        to = own.pairs.slot(step)
        parts = frame.in_two_parts(jnp.where(below, weights, 0.0))
        for n, part in enumerate(parts):
            own.weights.at[to, n][...] = part
        plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
        own.pairs.produced.arrive(to)
        own.chunks.consumed.arrive(slot)

    lax.fori_loop(0, item.chunks, weigh_chunk, None)


def carry(step: Callable[..., list[jax.Array]], walk: Walk) -> None:
    """Carries 64 columns of the state from chunk to chunk."""
    walk.deal.each(functools.partial(carry_item, step, walk))
    plgpu.wait_smem_to_gmem(0)


def carry_item(step: Callable[..., list[jax.Array]], walk: Walk, item: Item) -> None:
    number, blocks = mosaic.group(), frame.blocks_of_key(walk.spec)
    head, first = walk.place(item)
    columns = pl.ds((first + number) * HALF, HALF)
    places = [
        (item.batch, head, columns, pl.ds(block * HALF, HALF)) for block in range(blocks)
    ]
    state = [mosaic.zeros(HALF, HALF) for _ in range(blocks)]
    if walk.start is not None:
        # Times 1, so that inside `jax.shard_map` its type is that of what a step returns: what is
        # read varies over the mesh's axes there, and what is computed in a kernel does not.
        state = [1.0 * load(walk.start.at[place], optimized=False) for place in places]
    state = lax.fori_loop(
        0, item.chunks, functools.partial(step, walk, item, number), state
    )
    for place, block in zip(places, state, strict=True):
        mosaic.store_in_memory(walk.end.at[place], block)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The factors of a chunk's steps, made of `ref` [NUMBERS, 64]. A method returns None where all
    its factors are 1. `layout` is that of a vector of steps: steps are columns of what a walk
    multiplies."""

    spec: DeltaRuleSpec
    ref: Any
    layout: Any = OF_COLUMNS

    def of_read(self) -> jax.Array:
        """[64]: the decay from the chunk's start to each step, times the factor of the query."""
        return load(self.ref.at[frame.READ], self.layout)

    def _of_keys(self, which: int) -> jax.Array | None:
        if self.spec.decay is None and not self.spec.normalize_qk:
            return None
        return load(self.ref.at[which], self.layout)

    def of_recalled(self) -> jax.Array | None:
        """[64]: the decay from the chunk's start to each step, times the factor of the key."""
        return self._of_keys(frame.RECALLED)

    def of_written(self) -> jax.Array | None:
        """[64]: the decay from each step to the chunk's end, times the factor of the key."""
        return self._of_keys(frame.WRITTEN)

    def kept(self) -> Any:
        """The decay over the whole chunk, a scalar."""
        return None if self.spec.decay is None else jnp.exp2(self.ref[frame.LOG_DECAY, C - 1])

    def times(self, x: jax.Array, factor: jax.Array | None) -> jax.Array:
        """x with each step, a column or a row by `layout`, times its factor."""
        if factor is None:
            return x
        if self.layout == OF_COLUMNS:
            return x * mosaic.in_rows(factor, x.shape[0])
        return x * mosaic.in_columns(factor, x.shape[1])
