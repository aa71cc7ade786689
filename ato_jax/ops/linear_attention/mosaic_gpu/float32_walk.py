"""The walk of rows over one state in bfloat16 parts: each chunk of rows is multiplied by the state.

`float32.py` (rows in float32) and `projected_whole.py` (rows in bfloat16) launch it, each with a
function `do` that computes the results of a chunk.

    memory    loads a head's state and vectors, and chunks of rows
    workers   two warpgroups that take chunks in turn: a tile of rows, in parts in registers, is the
              first factor of all products; results take the place of the chunk's rows

                memory --state, loaded--> workers --state_free, free--> memory

A slot belongs to one worker, and each of its tiles has its own barriers. A tile is free when the
copy engine has read the result that was stored there, which the worker awaits during the products
of its next chunk; a tile without a result is free earlier. So the tile that is multiplied first is
the first of `rows`: it is loaded before those that are not free yet.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, Item, load, slot_of
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

WORKERS = 2
WARPGROUPS = WORKERS + 1
# Bytes of shared memory for chunks of rows: beside three parts of a state of 128 columns.
ROOM = 128 * 2**10
# For these and all factors in bfloat16 parts.
SHARED = ROOM + 96 * 2**10


Parts = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of rows in a worker's hands. `tiles` [C, columns] are those of its slot, `state`
    the parts [F, V] of the state, `common` those of another factor, `vectors` in shared memory as
    well; `count` is how many of its rows count, None where all do; `of_rows` is the worker's own,
    [2, C]. `do` has to call
    `free_the_last` once, before it waits for a tile that it stores to, and may do so late."""

    item: Item
    rows: Any
    count: Any
    tiling: mosaic.Tiling
    tiles: Sequence[Any]
    loaded: Sequence[Any]
    free: Sequence[Any]
    state: Sequence[Any]
    common: Sequence[Any]
    vectors: Sequence[Any]
    outputs: Sequence[Any]
    of_rows: Any
    free_the_last: Callable[[], None]

    def wait(self, number: int) -> None:
        """Until a tile is there."""
        plgpu.barrier_wait(self.loaded[number])

    def read(self, number: int, first: int) -> jax.Array:
        """[C, 64] of a tile, from column `first` on."""
        return load(self.tiles[number].at[:, pl.ds(first, HALF)])

    def let_go(self, number: int) -> None:
        """Nothing will be stored in this tile."""
        plgpu.commit_smem()  # reads finish before the next load overwrites them
        plgpu.barrier_arrive(self.free[number])

    def vector(self, number: int, first: int) -> jax.Array:
        """[C, 64], with all rows equal; loaded at each use."""
        own = self.vectors[number].at[pl.ds(first, HALF)]
        return mosaic.in_rows(load(own, OF_COLUMNS), C)

    def split(self, x: jax.Array) -> Parts:
        return mosaic.in_bf16_parts(x, len(self.state))

    def times_state(
        self, factor: Callable[[int], tuple[Parts, Any]], *, turned: bool = False
    ) -> tuple[jax.Array, list[Any]]:
        """x S, or x S^T; and what else `factor(first)` returns beside the parts of x [C, 64] from
        column `first` on. It runs while the products of the 64 columns before are in flight.

        WGMMA truncates what it adds up, so 64 columns are added up by it, small products first.
        """
        rows, columns = self.state[0].shape
        firsts = range(0, columns if turned else rows, HALF)
        xs, other = factor(0)
        total, others = None, [other]
        for first in firsts:
            own = pl.ds(first, HALF)
            parts = [part.at[:, own].T if turned else part.at[own] for part in self.state]
            products = mosaic.pairs_of_parts(xs, parts)
            start = mosaic.zeros(C, rows if turned else columns)
            if first == firsts[-1]:
                (found,) = mosaic.multiply((start, products))
            else:
                following = functools.partial(factor, first + HALF)
                found, (xs, other) = mosaic.accumulate_while(start, products, following)
                others.append(other)
            total = found if total is None else total + found
        assert total is not None
        return total, others

    def store(self, number: int, first: int, x: jax.Array) -> None:
        """x [C, 64] in a tile's place, from column `first` on; 0 in rows that do not count."""
        self.tiles[number].at[:, pl.ds(first, HALF)][...] = mosaic.kept(x, self.count)

    def leave(self, number: int, output: int) -> None:
        """Stores a tile in an output. It may be stored to again behind `await_reads`."""
        plgpu.commit_smem()
        target = self.tiling.part(self.outputs[output], self.item, self.rows, self.item.head)
        plgpu.copy_smem_to_gmem(self.tiles[number], target)

    @staticmethod
    def await_reads() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def leave_rows(self, vectors: Sequence[jax.Array], first: int) -> None:
        """Stores numbers of rows [C] in the outputs from `first` on."""
        for number, x in enumerate(vectors):
            self.of_rows.at[number][...] = x
        plgpu.commit_smem()
        for number in range(len(vectors)):
            target = self.outputs[first + number].at[self.item.batch, self.item.head, self.rows]
            plgpu.copy_smem_to_gmem(self.of_rows.at[number], target)


def slots_of(rows: Sequence[jax.Array], columns: int, factors: Sequence[tuple[int, ...]]) -> int:
    """How many chunks of rows have a place beside factors of these shapes, () for none."""
    taken = sum(2 * math.prod(shape) for shape in factors if shape)
    of_slot = sum(C * columns * array.dtype.itemsize for array in rows)
    return max(1, min(ROOM, SHARED - taken) // (WORKERS * of_slot)) * WORKERS


def scratch_of(
    tiling: mosaic.Tiling,
    slots: int,
    columns: int,
    rows: Sequence[jax.Array],
    of_state: tuple[int, ...],
    vectors: Sequence[jax.Array],
    of_common: tuple[int, ...],
) -> dict[str, Any]:
    """Shared memory and barriers; of a factor its shape, () for none."""
    copies = of_state[0] + sum(of_common[:1]) + len(vectors)
    scratch: dict[str, Any] = dict(
        state_s=tiling.of_parts(*of_state),
        state_loaded=plgpu.Barrier(num_arrivals=copies),
        state_free=plgpu.Barrier(num_arrivals=WORKERS),
        of_rows_s=plgpu.SMEM((WORKERS, 2, C), F32),
    )
    if of_common:
        scratch["common_s"] = tiling.of_parts(*of_common)
    for number, array in enumerate(rows):
        of_rows = tiling.of_rows_in_float32 if array.dtype == F32 else tiling.shared
        scratch[f"tile_{number}_s"] = of_rows(slots, C, columns)
        for barrier in (f"loaded_{number}", f"free_{number}"):
            scratch[barrier] = plgpu.Barrier(num_arrivals=1, num_barriers=slots)
    for number, vector in enumerate(vectors):
        scratch[f"vector_{number}_s"] = plgpu.SMEM((vector.shape[-1],), F32)
    return scratch


def float32_walk(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    rows: Sequence[jax.Array],
    state: jax.Array,
    vectors: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    do: Callable[[Chunk], None],
    kept: Sequence[int],
    lengths: jax.Array | None = None,
    common: jax.Array | None = None,
) -> Any:
    """The outputs that `do` leaves.

    Args:
      rows: arrays of a sequence of `deal.heads` heads each, float32 or bfloat16.
      state: [B, G, parts, F, V] bfloat16, and vectors [B, G, columns] float32, of kv heads.
      kept: which of the rows' tiles `do` stores to and does not let go.
      lengths: of the rows, [B] int32: what is left behind them is 0.
      common: a factor of all heads, [B, parts, rows, columns] bfloat16.
    """
    tiling, parts, group_size = frame.tiling(spec), state.shape[2], deal.heads // spec.G
    columns = max(spec.D, spec.V)
    of_common = () if common is None else common.shape[1:]
    slots = slots_of(rows, columns, (state.shape[2:], of_common))
    scratch = scratch_of(tiling, slots, columns, rows, state.shape[2:], vectors, of_common)

    def body(*refs: Any, state_s: Any, state_loaded: Any, state_free: Any, **own: Any) -> None:
        of_tiles = range(len(rows))
        row_refs, rest = refs[: len(rows)], refs[len(rows) + 1 + len(vectors) :]
        state_ref, *vector_refs = refs[len(rows) : len(rows) + 1 + len(vectors)]
        lengths_ref, rest = (None, rest) if lengths is None else (rest[0], rest[1:])
        common_ref: Any = None if common is None else rest[0]
        outputs = rest[common is not None :]
        common_s = [own["common_s"].at[part] for part in range(sum(of_common[:1]))]
        tiles, loaded, free = (
            [own[f"{kind}_{number}{end}"] for number in of_tiles]
            for kind, end in (("tile", "_s"), ("loaded", ""), ("free", ""))
        )
        vectors_s = [own[f"vector_{number}_s"] for number in range(len(vectors))]

        def load_piece(item: Item) -> None:

            @pl.when(item.number > 0)
            def _() -> None:
                plgpu.barrier_wait(state_free)

            of_head = item.batch, lax.div(item.head, group_size)
            for part in range(parts):
                source = state_ref.at[(*of_head, part)]  # [F, V]
                plgpu.copy_gmem_to_smem(source, state_s.at[part], state_loaded)
            for part, target in enumerate(common_s):
                source = common_ref.at[item.batch, part]  # [rows, columns]
                plgpu.copy_gmem_to_smem(source, target, state_loaded)
            for ref, vector in zip(vector_refs, vectors_s, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[of_head], vector, state_loaded)

            def load_chunk(chunk: Any, _: None) -> None:
                step = item.before + chunk
                slot = slot_of(step, slots)
                for number in of_tiles:
                    mosaic.wait_until_free(free[number], step, slots)
                    source = tiling.part(row_refs[number], item, item.rows(chunk), item.head)
                    own_tile, barrier = tiles[number].at[slot], loaded[number].at[slot]
                    plgpu.copy_gmem_to_smem(source, own_tile, barrier)

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def free_slot_of(step: Any) -> None:
            """Frees the slot of this worker's previous chunk once its stores have been read."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(step >= WORKERS)
            def _() -> None:
                for number in kept:
                    plgpu.barrier_arrive(free[number].at[slot_of(step - WORKERS, slots)])

        def work_on_piece(item: Item) -> None:
            plgpu.barrier_wait(state_loaded)

            def work_on_chunk(chunk: Any) -> None:
                step = item.before + chunk
                slot = slot_of(step, slots)
                do(
                    Chunk(
                        item,
                        item.rows(chunk),
                        item.rows_within(chunk, lengths_ref),
                        tiling,
                        [ref.at[slot] for ref in tiles],
                        [ref.at[slot] for ref in loaded],
                        [ref.at[slot] for ref in free],
                        [state_s.at[part] for part in range(parts)],
                        common_s,
                        vectors_s,
                        outputs,
                        own["of_rows_s"].at[mosaic.group()],
                        functools.partial(free_slot_of, step),
                    )
                )

            mosaic.in_turn(item, WORKERS, work_on_chunk)
            plgpu.barrier_arrive(state_free)

        @pl.when(mosaic.group() == WORKERS)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, WARPGROUPS)
            steps = deal.each(load_piece)
            plgpu.barrier_wait(state_free)
            for number in of_tiles:
                mosaic.await_the_last(free[number], steps, slots)

        @pl.when(mosaic.group() < WORKERS)
        def _workers() -> None:
            mosaic.set_registers(mosaic.workers_registers(WORKERS), WARPGROUPS)
            steps = deal.each(work_on_piece)
            # The step behind this worker's last one.
            free_slot_of(steps + lax.rem(mosaic.group() + steps, WORKERS))
            plgpu.wait_smem_to_gmem(0)

    given = [*rows, state, *vectors, *(x for x in (lengths, common) if x is not None)]
    program = mosaic.Flat(body, scratch, WARPGROUPS)
    return mosaic.launch(
        frame.name_of(name), program, deal, tuple(out_type), given, approximates=False
    )
