"""One kernel for out, dq, dk and dv of causal calls in float32, by products of bfloat16 parts.

`float32_causal.py` launches it for each of the four (`float32_pass.py` has their arrays). A row
reads the state S of its run, or S^T, and the other rows of the run:

    out_i = x_i S + sum_j w_ij value_j,  w_ij = pair(x_i . y_j)

over the rows j of the run up to i, with S ahead of the run; or from i on, with S behind it. S is
stored for each run. A run has units of 128 rows:

    memory    loads the state, x of a unit, and y and values of its run's chunks
    split     maps the second factors and splits them into parts, 64 rows at a time
    work      two warpgroups with 64 rows of x each, in parts in registers: the first factors

                memory --raw--> split --parts--> work
                memory --x, rows--> work

The parts of 64 rows of a state take one slot, as those of 64 rows of y or values do. Outputs are
stored from the place of x, into which `last`, a further input of some passes, is loaded before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, OF_ROWS, Array, Buffer, Item, Ring, Role, load
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.float32_pass import Pass, Unit
from ato_jax.ops.linear_attention.mosaic_gpu.float32_sums import parts_of
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.sums_walk import in_parts, pairs_of, split_tile
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

WORKERS = 2
UNIT = WORKERS * C
MEMORY, SPLIT = Role("memory", mosaic.MEMORY_REGISTERS), Role("split", 104)
WORK = Role("work", 192, WORKERS)

def _halves(columns: int) -> range:
    return range(0, int(pl.cdiv(columns, HALF)) * HALF, HALF)


def units_of_run(spec: LinearAttentionSpec) -> int:
    """A longer run has fewer states to be stored, and more pairs."""
    return 1 if parts_of(spec) == 3 or spec.D == HALF else 2


def deal_of_runs(spec: LinearAttentionSpec, blocks: int, heads: int) -> mosaic.Deal:
    rows = units_of_run(spec) * UNIT
    return mosaic.Deal(spec.B, heads, spec.T, rows, int(pl.cdiv(spec.T, rows)), blocks)


def chunks_of_runs(spec: LinearAttentionSpec) -> int:
    """The chunks of a sequence, up to a whole run."""
    deal = deal_of_runs(spec, blocks=1, heads=1)
    return deal.pieces * deal.rows // C


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    raw: Array  # [slots, C, columns] float32
    parts: Array  # [slots, parts, C, columns] bfloat16
    x: Array  # [WORKERS, C, columns] float32
    vector: Array  # [columns] float32
    numbers: Array  # [2, chunks of a run, C] float32
    left: Array  # [WORKERS, C] float32
    raw_ring: Ring
    parts_ring: Ring
    x_ring: Ring  # of x and vector
    numbers_ring: Ring | None


def storage_of(spec: LinearAttentionSpec, own: Pass) -> Storage:
    tiling, parts, columns = frame.tiling(spec), parts_of(spec), spec.D
    slots = 4 if columns == HALF else 2
    # Three slots of 128 columns in two parts leave no room for both vector and numbers.
    is_full = parts == 3 or own.vector is not None and own.numbers is not None
    parts_slots = 4 if columns == HALF else 2 if is_full else 3
    raw = Buffer(tiling.of_rows_in_float32(slots, C, columns))
    x = Buffer(tiling.of_rows_in_float32(WORKERS, C, columns), copies=WORKERS)
    vector = Buffer(plgpu.SMEM((columns,), F32)) if own.vector else None
    chunks = units_of_run(spec) * WORKERS
    numbers = Buffer(plgpu.SMEM((2, chunks, C), F32), copies=2) if own.numbers else None
    return Storage(
        raw=raw,
        parts=Buffer(tiling.of_parts(parts_slots, parts, C, columns)),
        x=x,
        vector=vector,
        numbers=numbers,
        left=Buffer(plgpu.SMEM((WORKERS, C), F32)) if len(own.outputs) > 1 else None,
        raw_ring=Ring.of(slots, (raw,), (SPLIT,)),
        parts_ring=Ring.of(parts_slots, (SPLIT,), (WORK,)),
        x_ring=Ring.of(1, (x, vector), (WORK,)),
        numbers_ring=Ring.of(1, (numbers,), (SPLIT, WORK)) if numbers else None,
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """The kernel: what it is of, its arrays in global memory, and its storage."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    of: Pass
    own: Storage
    refs: dict[str, Any]
    outputs: Sequence[Any]

    @property
    def tiling(self) -> mosaic.Tiling:
        return frame.tiling(self.spec)

    @property
    def state_blocks(self) -> range:
        """First rows, of 64 each, of a state: those of which a head has features."""
        return _halves(frame.widths_of(self.spec)[0])

    @property
    def in_halves(self) -> range:
        """First columns, of 64 each, of x and y: those of which a head has some."""
        return _halves(frame.widths_of(self.spec)[int(self.of.turned)])

    @property
    def out_halves(self) -> range:
        """The halves of the columns of values and outputs."""
        return _halves(frame.widths_of(self.spec)[int(not self.of.turned)])

    def columns(self, name: str) -> int:
        """How many columns are split: other numbers are 0."""
        if name == "state":
            return _halves(frame.widths_of(self.spec)[1]).stop
        return (self.in_halves if name == "y" else self.out_halves).stop

    @property
    def units(self) -> int:
        return units_of_run(self.spec)

    def parts(self, name: str) -> int:
        return self.of.given()[name].parts or parts_of(self.spec)

    def head(self, name: str, item: Item) -> Any:
        of_keys = self.of.given()[name].of_keys
        return lax.div(item.head, self.spec.H // self.spec.G) if of_keys else item.head

    def rows(self, name: str, item: Item, chunk: Any) -> Any:
        """[C, columns] of a run's chunk."""
        return self.tiling.part(
            self.refs[name], item, item.rows(chunk), self.head(name, item)
        )

    def count(self, item: Item, chunk: Any) -> Any:
        """How many of a chunk's rows there are; None where runs of chunks are whole."""
        length = self.spec.T
        if length % (self.units * UNIT) == 0:
            return None
        return length - item.first_row - chunk * C

    def chunks(self, unit: Any) -> tuple[Any, Any]:
        """The first of a run's chunks that a unit sees, and how many it sees."""
        if self.of.reverse:
            return unit * WORKERS, (self.units - unit) * WORKERS
        return 0, (unit + 1) * WORKERS

    def step(self, item: Item, unit: Any) -> Any:
        """Slots that the block has filled with parts, or raw, before a unit."""

        def within(units: Any) -> Any:
            pairs = units * (units + 1)
            if self.of.reverse:
                pairs = units * (2 * self.units + 1 - units)
            return units * len(self.state_blocks) + pairs * WORKERS

        return item.number * within(self.units) + within(unit)

    def each(self, do: Callable[[Item, Any], None]) -> Any:
        """Each unit of this block's runs; returns how many runs these are."""

        def run(item: Item) -> None:
            if self.units == 1:
                do(item, 0)
            else:
                lax.fori_loop(0, self.units, lambda unit, _: do(item, unit), None)

        self.deal.each(run)
        return self.deal.own


def float32_pairs(spec: LinearAttentionSpec, blocks: int, own: Pass) -> Any:
    """The outputs of a pass."""
    given, deal = own.given(), deal_of_runs(spec, blocks, spec.H)

    def bind(refs: Sequence[Any], storage: Storage) -> Walk:
        named = dict(zip(given, refs, strict=False))
        return Walk(spec, deal, own, storage, named, refs[len(given) :])

    program = mosaic.Program(
        mosaic.Roles((WORK, SPLIT, MEMORY)),
        storage_of(spec, own),
        ((MEMORY, memory), (SPLIT, split), (WORK, work)),
        bind,
    )
    arrays = [one.array for one in given.values()]
    return mosaic.launch(
        frame.name_of(own.name), program, deal, tuple(own.outputs), arrays, approximates=False
    )


def memory(walk: Walk) -> None:
    own, of = walk.own, walk.of
    fills = 2 if of.last else 1  # of the place of x, for each unit

    def load_x(item: Item, unit: Any, name: str, step: Any) -> None:
        own.x_ring.acquire(step)
        loaded = own.x_ring.produced.at[0]
        for worker in range(WORKERS):
            source = walk.rows(name, item, unit * WORKERS + worker)
            plgpu.copy_gmem_to_smem(source, own.x.at[worker], loaded)
        if of.vector:
            source = walk.refs["vector"].at[item.batch, walk.head("vector", item), item.piece]
            plgpu.copy_gmem_to_smem(source, own.vector, loaded)

    def load_raw(source: Any, step: Any) -> None:
        own.raw_ring.acquire(step)
        slot = own.raw_ring.slot(step)
        plgpu.copy_gmem_to_smem(source, own.raw.at[slot], own.raw_ring.produced.at[slot])

    def load_unit(item: Item, unit: Any) -> None:
        number, step = item.number * walk.units + unit, walk.step(item, unit)
        of_run = item.batch, walk.head("state", item), item.piece
        for block, first in enumerate(walk.state_blocks):
            load_raw(walk.refs["state"].at[(*of_run, pl.ds(first, HALF))], step + block)
        load_x(item, unit, "x", number * fills)
        if own.numbers_ring is not None:
            own.numbers_ring.acquire(number)
            chunks = pl.ds(item.piece * walk.units * WORKERS, walk.units * WORKERS)
            for which, name in enumerate(("inverse", "e")):
                source = walk.refs[name].at[item.batch, item.head, chunks]
                loaded = own.numbers_ring.produced.at[0]
                plgpu.copy_gmem_to_smem(source, own.numbers.at[which], loaded)
        first_chunk, count = walk.chunks(unit)

        def load_pair(chunk: Any, _: None) -> None:
            for place, name in enumerate(("y", "value")):
                of_pair = step + len(walk.state_blocks) + 2 * chunk + place
                load_raw(walk.rows(name, item, first_chunk + chunk), of_pair)

        lax.fori_loop(0, count, load_pair, None)
        if of.last:
            load_x(item, unit, "last", number * fills + 1)

    runs = walk.each(load_unit)
    own.raw_ring.drain(_steps(walk, runs))
    own.x_ring.drain(runs * walk.units * fills)
    if own.numbers_ring is not None:
        own.numbers_ring.drain(runs * walk.units)


def _steps(walk: Walk, runs: Any) -> Any:
    """All slots that are filled in so many runs."""
    every = Item(*(None,) * 7)._replace(number=runs)
    return walk.step(every, 0)


def split(walk: Walk) -> None:
    own, of = walk.own, walk.of

    def split_slot(step: Any, name: str, change: Callable[[jax.Array, int], jax.Array]) -> None:
        rings = (own.raw, own.raw_ring), (own.parts, own.parts_ring)
        split_tile(*rings, step, (walk.parts(name), walk.columns(name)), change)

    def split_unit(item: Item, unit: Any) -> None:
        step = walk.step(item, unit)
        for block in range(len(walk.state_blocks)):
            split_slot(step + block, "state", lambda x, _: x)
        if own.numbers_ring is not None:
            own.numbers_ring.produced.wait(0)
        first_chunk, count = walk.chunks(unit)

        def split_pair(pair: Any, _: None) -> None:
            chunk = first_chunk + pair
            numbers = None if own.numbers is None else own.numbers.at[:, chunk]
            present = walk.count(item, chunk)
            for place, (name, map) in enumerate((("y", of.map_y), ("value", of.map_value))):

                def change(x: jax.Array, first: int, map: Any = map) -> jax.Array:
                    # A feature of a row that there is not may be infinite.
                    return x if map is None else mosaic.kept(map(x, first, numbers), present)

                split_slot(step + len(walk.state_blocks) + 2 * pair + place, name, change)

        lax.fori_loop(0, count, split_pair, None)
        if own.numbers_ring is not None:
            plgpu.commit_smem()
            own.numbers_ring.consumed.arrive(0)

    own.parts_ring.drain(_steps(walk, walk.each(split_unit)))


def _seen(w: jax.Array, ahead: Any, reverse: bool) -> jax.Array:
    """w [C, C] with 0 for pairs of rows that do not see each other; the columns' first row lies
    `ahead` of that of the rows."""
    rows, columns = (
        plgpu.broadcasted_iota(jnp.int32, (C,), dimension=0, layout=layout)
        for layout in (OF_ROWS, OF_COLUMNS)
    )
    rows, columns = mosaic.in_columns(rows, C), mosaic.in_rows(columns + ahead, C)
    return jnp.where(rows <= columns if reverse else rows >= columns, w, 0.0)


def work(walk: Walk) -> None:
    own, of, spec, worker = walk.own, walk.of, walk.spec, mosaic.group()
    blocks, tile = walk.state_blocks, walk.own.x.at[worker]

    def x_parts(first: int, step: Any) -> Sequence[jax.Array]:
        own_tile = own.x.at[mosaic.plus_zero(worker, step)]
        return in_parts(load(own_tile.at[:, pl.ds(first, HALF)]), walk.parts("x"))

    def take(step: Any, name: str) -> tuple[Any, list[Any]]:
        """A slot once it is filled, and its parts [C, columns]."""
        slot = own.parts_ring.slot(step)
        own.parts_ring.produced.wait(slot)
        return slot, [own.parts.at[slot, number] for number in range(walk.parts(name))]

    def give_back(slot: Any) -> None:
        plgpu.commit_smem()  # reads finish before the next store there
        own.parts_ring.consumed.arrive(slot)

    def times(start: jax.Array, xs: Sequence[jax.Array], ys: Sequence[Any]) -> jax.Array:
        """Adds products [C, 64] of 64 rows or columns."""
        (found,) = mosaic.multiply((start, pairs_of(xs, ys)))
        return found

    def times_rows(parts: Sequence[Any], step: Any) -> jax.Array:
        """x y^T [C, 64] of 64 rows y."""
        total = mosaic.zeros(C, HALF)
        for first in walk.in_halves:
            turned = [part.at[:, pl.ds(first, HALF)].T for part in parts]
            total = times(total, x_parts(first, step), turned)
        return total

    def add(
        total: Sequence[jax.Array], xs: Sequence[jax.Array], parts: Sequence[Any]
    ) -> list[jax.Array]:
        """x [C, C] times a slot's rows, added to halves [C, 64]: not by WGMMA, which truncates what
        it adds up."""
        found = []
        for first, half in zip(walk.out_halves, total, strict=True):
            columns = [part.at[:, pl.ds(first, HALF)] for part in parts]
            found.append(half + times(mosaic.zeros(C, HALF), xs, columns))
        return found

    def times_state(step: Any) -> list[jax.Array]:
        total = [mosaic.zeros(C, HALF) for _ in walk.out_halves]
        for block, first in enumerate(blocks):
            slot, parts = take(step + block, "state")
            if of.turned:
                total[block] = times_rows(parts, step + block)
            else:
                total = add(total, x_parts(first, step + block), parts)
            give_back(slot)
        return total

    def weights(chunk: Any, row: Any, parts: Sequence[Any], step: Any) -> jax.Array:
        """w of chunk `row` of the run beside one of its chunks, [C, C]."""
        w = times_rows(parts, step)
        if of.minus == "rows":
            w = w - mosaic.in_columns(load(own.numbers.at[1, row], OF_ROWS), C)
        elif of.minus == "columns":
            w = w - mosaic.in_rows(load(own.numbers.at[1, chunk], OF_COLUMNS), C)
        return _seen(w, (chunk - row) * C, of.reverse)

    def work_on_unit(item: Item, unit: Any) -> None:
        step, row = walk.step(item, unit), unit * WORKERS + worker
        own.x_ring.produced.wait(0)
        if of.map_x is not None:
            for first in walk.in_halves:
                x = of.map_x(load(tile.at[:, pl.ds(first, HALF)]), first, None)
                tile.at[:, pl.ds(first, HALF)][...] = x
        total = times_state(step)
        if own.numbers_ring is not None:
            own.numbers_ring.produced.wait(0)
        first_chunk, count = walk.chunks(unit)

        def add_pair(pair: Any, sums: Any) -> Any:
            total, den = sums
            of_pair = step + len(blocks) + 2 * pair
            slot, parts = take(of_pair, "y")
            w = weights(first_chunk + pair, row, parts, of_pair)
            give_back(slot)
            if of.sums_weights:
                den = den + jnp.sum(w, axis=1)
            ws = in_parts(w, of.weight_parts or parts_of(spec))
            slot, parts = take(of_pair + 1, "value")
            total = add(total, ws, parts)
            give_back(slot)
            return total, den

        nothing = plgpu.layout_cast(jnp.zeros((C,), F32), OF_ROWS) if of.sums_weights else None
        total, den = lax.fori_loop(0, count, add_pair, (total, nothing))
        if of.last:
            plgpu.commit_smem()  # reads finish before the next load overwrites them
            own.x_ring.consumed.arrive(0)
            own.x_ring.produced.wait(0)

        def leave() -> None:
            plgpu.commit_smem()
            target = walk.tiling.part(walk.outputs[0], item, item.rows(row), item.head)
            plgpu.copy_smem_to_gmem(tile, target)

        def leave_numbers(x: jax.Array) -> None:
            own.left.at[worker][...] = x
            plgpu.commit_smem()
            of_unit = item.piece * walk.units * WORKERS
            target = walk.outputs[1].at[item.batch, item.head, of_unit + row]
            plgpu.copy_smem_to_gmem(own.left.at[worker], target)

        numbers = None if own.numbers is None else own.numbers.at[:, row]
        unit_of_rows = Unit(tile, own.vector, numbers, leave, leave_numbers)
        of.finish(unit_of_rows, dict(zip(walk.out_halves, total, strict=True)), den)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own.x_ring.consumed.arrive(0)
        if own.numbers_ring is not None:
            own.numbers_ring.consumed.arrive(0)

    walk.each(work_on_unit)
    plgpu.wait_smem_to_gmem(0)
