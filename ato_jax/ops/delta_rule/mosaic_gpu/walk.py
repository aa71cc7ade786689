"""What both walks over chunks share: their roles, what a block loads for each chunk, and the
factors of its steps.

A walk has a state for each head and 64 of v's columns, in registers. `walk_forward.py` carries S
from the first chunk to the last, `walk_backward.py` its gradient from the last to the first.

    MEMORY         loads q, k, v or dout, X and the numbers of a chunk's steps
      |  chunks: loaded; consumed once P and the next state are known
      v
    STATE (0 .. n - 1)    64 columns of v each: the products of a chunk, one after the other
    BESIDE         what no later chunk waits for, with the weights of the chunk's pairs

    P[t, s] = scale * q_t . k_s exp2(L_t - L_s)     s <= t, else 0

A chunk's steps that wait for one another are what a walk takes its time for, so STATE does as
little as it can. What BESIDE does, and what they hand to each other, is each walk's own.

Few long sequences are cut into pieces that are walked side by side (`pieces.py`).

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
from ato_jax.ops.delta_rule.mosaic_gpu.frame import MEMORY, C, Config
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

# The registers of a thread of BESIDE and of one of STATE, by whether the walk goes from the end and
# how many warpgroups STATE has.
REGISTERS = {
    (False, 1): (216, 240),
    (True, 1): (168, 240),
    (True, 2): (72, 208),
}
MOST_ALONE = 240  # of a thread of STATE, without BESIDE


@dataclasses.dataclass(frozen=True)
class Course:
    """The pieces that a walk goes over, and the arrays that it leaves; also of a walk with a decay
    per channel (`channel_walk.py`).

    Attributes:
      from_end: whether chunks are walked from the last to the first.
      leaves: outputs beside the last states, by their names in `Walk`.
      pieces: how many pieces of the sequence are walked, from piece `first` on; each has `rows`
        rows.
      maps: whether the walk is for the pieces' maps: it leaves no out, and has D columns of 0
        beside v's.
    """

    from_end: bool
    leaves: tuple[str, ...]
    pieces: int
    rows: int
    first: int = 0
    maps: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether there is one piece, which begins with the sequence."""
        return self.pieces == 1 and self.first == 0

    def columns(self, spec: DeltaRuleSpec) -> int:
        return spec.V + (spec.D if self.maps else 0)

    def parts_of_head(self, spec: DeltaRuleSpec, slices: int) -> int:
        """How many blocks share a head, where a block has so many slices."""
        return self.columns(spec) // (HALF * slices)

    def deal(self, spec: DeltaRuleSpec, slices: int) -> mosaic.Deal:
        heads = spec.H * self.parts_of_head(spec, slices)
        first = self.first * self.rows
        length = min(spec.T, first + self.pieces * self.rows)
        most = spec.B * heads * self.pieces
        return mosaic.Deal(spec.B, heads, length, self.rows, self.pieces, most, first)


@functools.cache
def roles_of(slices: int, course: Course) -> tuple[Role | None, Role]:
    """BESIDE, where there is one, and STATE."""
    if course.maps:
        return None, Role("state", mosaic.workers_registers(slices, MOST_ALONE), slices)
    beside, state = REGISTERS[course.from_end, slices]
    return Role("beside", beside), Role("state", state, slices)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    q: Array  # [stages, D / 64, 64, 64]
    k: Array  # as q
    rows: Array  # [stages, n, 64, 64]
    solved: Array  # [stages, PARTS, 64, 64] X
    numbers: Array  # [stages, NUMBERS, 64] float32
    weights: Array  # [stages, PARTS, 64, 64] P, where BESIDE hands it to STATE
    out: Array  # [n, 64, 64]
    rest: Array  # as out, where one slice leaves room for it
    states: Array  # [slots, n, D / 64, 64, 64]
    written: Array  # [slots, n, PARTS, 64, 64], where STATE hands it to BESIDE
    chunks: Ring
    pairs: Ring  # of `weights`
    begun: Ring  # of `states`, where STATE hands them to BESIDE
    corrected: Ring  # of `written`


def storage_of(spec: DeltaRuleSpec, config: Config, course: Course) -> Storage:
    stages, slices, blocks = config.stages, config.slices, frame.blocks_of_key(spec)
    tiling = frame.tiling(spec)
    q, k = (Buffer(tiling.of_rows(stages, blocks, C, HALF), copies=blocks) for _ in range(2))
    rows = Buffer(tiling.of_rows(stages, slices, C, HALF), copies=slices)
    solved = Buffer(tiling.shared(stages, frame.PARTS, C, C), copies=frame.PARTS)
    beside, state = roles_of(slices, course)
    numbers = Buffer(frame.numbers_in_memory(stages))
    # Two slices leave no room for two of what STATE hands on.
    slots = stages if slices == 1 and not course.from_end else 1
    own: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Storage))
    own |= dict(k=k, rows=rows, solved=solved, numbers=numbers)
    loaded: tuple[Buffer, ...] = (k, rows, solved, numbers)
    readers: tuple[Role, ...] = (state,)
    if beside is not None:
        own["q"], loaded, readers = q, (q, *loaded), (beside, state)
        if course.from_end:
            own["weights"] = Buffer(tiling.shared(stages, frame.PARTS, C, C))
            own["pairs"] = Ring.of(stages, (beside,), (state,))
        else:
            own["written"] = Buffer(tiling.shared(slots, slices, frame.PARTS, C, HALF))
            own["begun"], own["corrected"] = (Ring.of(slots, (state,), (beside,)) for _ in range(2))
    if "out" in course.leaves:
        own["out"] = Buffer(tiling.of_rows(slices, C, HALF))
        if "rest" in course.leaves and slices == 1:
            own["rest"] = Buffer(tiling.of_rows(slices, C, HALF))
        own["states"] = Buffer(tiling.shared(slots, slices, blocks, HALF, HALF))
    return Storage(**own | dict(chunks=Ring.of(stages, loaded, readers)))


@dataclasses.dataclass(frozen=True)
class Walk:
    """The call, the blocks' work, the arrays in global memory, and the storage of a block."""

    spec: DeltaRuleSpec
    config: Config
    deal: mosaic.Deal
    course: Course
    own: Storage
    k: Any
    rows: Any  # v, or out's cotangent
    solved: Any
    numbers: Any
    q: Any = None
    start: Any = None  # [pieces, B, H, columns, D] float32: the first states
    out: Any = None  # like `rows`: out, or v's cotangent
    end: Any = None  # like `start`: the last states
    rest: Any = None  # like `out`: what rounding took from v's cotangent
    written: Any = None  # [B, H, chunks, V / 64, PARTS, 64, 64]: u, in two parts
    states: Any = None  # [B, H, chunks, V / 64, D / 64, 64, 64]: those that chunks begin with

    def place(self, item: Item) -> tuple[Any, Any]:
        """The head, and the first of the item's blocks of v's columns."""
        count = self.course.parts_of_head(self.spec, self.config.slices)
        return lax.div(item.head, count), lax.rem(item.head, count) * self.config.slices

    def of_piece(self, item: Item) -> Walk:
        """The walk with the first and the last states of an item's piece."""
        start = None if self.start is None else self.start.at[item.piece]
        return dataclasses.replace(self, start=start, end=self.end.at[item.piece])

    def number_of(self, item: Item, chunk: Any) -> Any:
        """The number in the sequence of the chunk that is walked as number `chunk`."""
        first = lax.div(item.first_row, jnp.int32(C))
        return first + (item.chunks - 1 - chunk if self.course.from_end else chunk)

    def store_rows(self, item: Item, chunk: Any, number: Any, tile: Any, ref: Any) -> None:
        """Copies a slice's tile [64, 64] to its place in `ref`, which is like `out`."""
        head, first = self.place(item)
        rows = pl.ds(self.number_of(item, chunk) * C, C)
        target = frame.tiling(self.spec).part(ref, item, rows, head, first + number)
        plgpu.copy_smem_to_gmem(mosaic.for_copy(tile), target)

    def begin(self, item: Item, chunk: Any, layout: Any = OF_COLUMNS) -> Chunk:
        """Waits for the chunk's loads. `layout`: of the factors of its steps."""
        own, step = self.own, item.before + chunk
        slot = own.chunks.slot(step)
        own.chunks.produced.wait(slot)
        q, k = (
            frame.blocks_at(self.spec, tiles, slot) if tiles is not None else []
            for tiles in (own.q, own.k)
        )
        solved = tuple(own.solved.at[slot, part] for part in range(frame.PARTS))
        return Chunk(step, slot, q, k, solved, Numbers(self.spec, own.numbers.at[slot], layout))

    def pairs_of(self, here: Chunk) -> jax.Array:
        """P, in registers."""
        weights = frame.decayed_pairs(self.spec, here.q, here.k, here.numbers.ref)
        of_queries = load(here.numbers.ref.at[frame.OF_QUERIES], OF_ROWS)
        weights = weights * mosaic.in_columns(of_queries, C)
        return jnp.where(mosaic.hidden_position(0) >= mosaic.hidden_position(1), weights, 0.0)

    def store_state(self, item: Item, chunk: Any, slot: Any, number: int | Any) -> None:
        """Copies the state of a slot and of a slice to its place."""
        head, first = self.place(item)
        at = item.batch, head, self.number_of(item, chunk), first + number
        for block in range(frame.blocks_of_key(self.spec)):
            target = self.states.at[(*at, block)]  # [64, 64]
            plgpu.copy_smem_to_gmem(self.own.states.at[slot, number, block], target)


class Chunk(NamedTuple):
    """The step of the block that a chunk is, its slot, and what lies in it."""

    step: Any
    slot: Any
    q: list[Any]  # [64, 64] of each block of D, as are k's
    k: list[Any]
    solved: tuple[Any, ...]  # the parts of X, [64, 64]
    numbers: Numbers


def walk(
    name: str,
    spec: DeltaRuleSpec,
    config: Config,
    given: dict[str, jax.Array],
    step: Callable[..., list[jax.Array]],
    beside: Callable[[Walk, Item, Any], None] | None,
    course: Course,
) -> dict[str, jax.Array]:
    """Launches a walk whose `step` is (walk, item, slot of v's columns, chunk, state) to the next
    state, and `beside` what BESIDE does for a chunk; returns its outputs, by the names of `Walk`:
    end, and those that the course leaves."""
    deal = course.deal(spec, config.slices)
    blocks = (spec.B, spec.H, frame.chunks_of(spec), spec.V // HALF)
    ends = (course.pieces, spec.B, spec.H, course.columns(spec), spec.D)
    types = {
        "out": jax.ShapeDtypeStruct(given["rows"].shape, BF16),
        "rest": jax.ShapeDtypeStruct(given["rows"].shape, BF16),
        "end": jax.ShapeDtypeStruct(ends, F32),
        "written": jax.ShapeDtypeStruct((*blocks, frame.PARTS, C, HALF), BF16),
        "states": jax.ShapeDtypeStruct((*blocks, frame.blocks_of_key(spec), HALF, HALF), BF16),
    }
    types = {one: types[one] for one in types if one in ("end", *course.leaves)}

    other, state = roles_of(config.slices, course)
    parts: list[tuple[Role, Callable[..., None]]] = [(MEMORY, memory)]
    if other is not None:
        assert beside is not None
        parts.append((other, functools.partial(accompany, beside)))
    parts.append((state, functools.partial(carry_pieces, step)))
    bind = functools.partial(Walk, spec, config, deal, course)
    return frame.launch(name, deal, storage_of(spec, config, course), parts, bind, given, types)


def memory(walk: Walk) -> None:
    """Loads chunks as slots come free."""
    steps = walk.deal.each(functools.partial(load_item, walk))
    walk.own.chunks.drain(steps)


def load_item(walk: Walk, item: Item) -> None:
    own, spec, tiling = walk.own, walk.spec, frame.tiling(walk.spec)
    head, first = walk.place(item)
    key_head = frame.key_head(spec, head)

    def load_chunk(chunk: Any, slot: Any, barrier: Any) -> None:
        number = walk.number_of(item, chunk)
        rows = pl.ds(number * C, C)
        keys = (walk.k, own.k), (walk.q, own.q)
        frame.load_keys(spec, item, keys, rows, key_head, slot, barrier)
        for one in range(walk.config.slices):
            # Beyond v's columns what is loaded is not used.
            columns = jnp.minimum(first + one, spec.V // HALF - 1)
            source = tiling.part(walk.rows, item, rows, head, columns)  # [64, 64]
            plgpu.copy_gmem_to_smem(source, mosaic.for_copy(own.rows.at[slot, one]), barrier)
        at = item.batch, head, number
        for part in range(frame.PARTS):
            source = walk.solved.at[(*at, part)]  # [64, 64]
            plgpu.copy_gmem_to_smem(source, own.solved.at[slot, part], barrier)
        plgpu.copy_gmem_to_smem(walk.numbers.at[at], own.numbers.at[slot], barrier)

    frame.load_chunks(item, own.chunks, load_chunk)


def accompany(beside: Callable[[Walk, Item, Any], None], walk: Walk) -> None:
    def each_chunk(item: Item) -> None:
        lax.fori_loop(0, item.chunks, lambda chunk, _: beside(walk, item, chunk), None)

    steps = walk.deal.each(each_chunk)
    plgpu.wait_smem_to_gmem(0)
    if walk.own.pairs is not None:
        walk.own.pairs.drain(steps)


def carry(step: Callable[..., list[jax.Array]], walk: Walk) -> Any:
    """Carries 64 columns of the state from chunk to chunk; returns how many chunks there were."""
    steps = walk.deal.each(lambda item: carry_item(step, walk.of_piece(item), item))
    plgpu.wait_smem_to_gmem(0)
    return steps


def carry_item(step: Callable[..., list[jax.Array]], walk: Walk, item: Item) -> None:
    number, blocks = mosaic.group(), frame.blocks_of_key(walk.spec)
    head, first = walk.place(item)
    columns = pl.ds((first + number) * HALF, HALF)
    places = [(item.batch, head, columns, pl.ds(block * HALF, HALF)) for block in range(blocks)]
    state = [mosaic.zeros(HALF, HALF) for _ in range(blocks)]
    if walk.start is not None:
        # Times 1, so that inside `jax.shard_map` its type is that of what a step returns: what is
        # read varies over the mesh's axes there, and what is computed in a kernel does not.
        state = [1.0 * load(walk.start.at[place], optimized=False) for place in places]
    state = lax.fori_loop(0, item.chunks, functools.partial(step, walk, item, number), state)
    for place, block in zip(places, state, strict=True):
        mosaic.store_in_memory(walk.end.at[place], block)


def add_products(
    state: list[jax.Array],
    kept: Any,
    factors: Sequence[tuple[Sequence[jax.Array], list[Any]]],
    meanwhile: Callable[[], None] = lambda: None,
) -> list[jax.Array]:
    """The next state, in blocks of D: `kept` of it (None for all), and for each of `factors` the
    products of the parts of columns of steps with rows of keys or queries. `meanwhile` runs while
    the products are in flight."""
    sums = (
        (
            block if kept is None else block * kept,
            [(part, rows[n]) for parts, rows in factors for part in parts],
        )
        for n, block in enumerate(state)
    )
    return list(mosaic.multiply(*sums, meanwhile=meanwhile))


def carry_pieces(step: Callable[..., list[jax.Array]], walk: Walk) -> None:
    steps = carry(step, walk)
    for ring in (walk.own.begun, walk.own.corrected):
        if ring is not None:
            ring.drain(steps)


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
