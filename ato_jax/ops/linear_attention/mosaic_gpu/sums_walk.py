"""The parts shared by four kernels that sum over the rows of a piece: of float32 arrays
(`float32_sums.py`), of 8-bit arrays (`float8_sums.py`), of FAVOR+'s features (`projected_sums.py`),
and of 16-bit arrays where every query sees every key (`whole_sums.py`).

    total = sum_j phi(x_j) y_j^T [F, V],  vector = a sum of features [F]

    memory    loads chunks of x and y, which are k and v or q and g
    sums      each 64 rows of the total: phi(x)^T [64, C] in registers, all columns of y

Each role walks over the chunks of the pieces that its block takes. A role between these two may
convert y, for the products, into another ring (`pass_on`). Each kernel says for itself how a chunk
is loaded, mapped and multiplied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_ROWS, Item, Ring, Role, load
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

COLUMNS = 32  # of a sum that are stored at once

Sums = tuple[jax.Array, jax.Array]  # total [64, V] and vector [64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """A kernel's spec and deal, its arrays in global memory, and its storage `own`, where `total`
    [workers, 64, COLUMNS] and `vector` [workers, 64] float32 hold what is about to be stored.

    `of_rows` are two numbers of each query, [B, heads, T up to a whole chunk] float32: the factor
    of its features, or for FAVOR+ the shift of their exponents, and e. It is empty for keys, and
    for float32 queries without a normaliser."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    own: Any
    x: Any
    y: Any
    total: Any
    vector: Any
    of_rows: Sequence[Any] = ()
    lengths: Any = None

    @property
    def tiling(self) -> mosaic.Tiling:
        return frame.tiling(self.spec)

    def count(self, item: Item, chunk: Any) -> Any:
        """How many of a chunk's rows count, at most 64 of them; None where all do."""
        if self.lengths is not None:
            return item.rows_within(chunk, self.lengths)
        if self.deal.length % C == 0:
            return None
        return self.deal.length - item.first_row - chunk * C

    def each_chunk(
        self, do: Callable[[Item, Any], None], ahead: Callable[[Item], None] = lambda item: None
    ) -> Any:
        """Runs `do` for each chunk of this block's pieces, and `ahead` before those of a piece;
        returns how many chunks there are."""

        def walk_piece(item: Item) -> None:
            ahead(item)
            lax.fori_loop(0, item.chunks, lambda chunk, _: do(item, chunk), None)

        return self.deal.each(walk_piece)

    def load_of_rows(self, item: Item, rows: Any, slot: Any, loaded: Any) -> None:
        """Copies `of_rows` of a chunk to a slot of `own.rows` [slots, 2, C]."""
        for number, ref in enumerate(self.of_rows):
            source = ref.at[item.batch, item.head, rows]  # [C]
            plgpu.copy_gmem_to_smem(source, self.own.rows.at[slot, number], loaded)

    def add_up(self, item: Item, add_chunk: Callable[[Item, Any, Sums], Sums]) -> Sums:
        """The sums of a piece."""
        nothing = plgpu.layout_cast(jnp.zeros((HALF,), F32), OF_ROWS)
        start = mosaic.zeros(HALF, self.spec.V), nothing
        sums: Sums = lax.fori_loop(
            0, item.chunks, lambda chunk, sums: add_chunk(item, chunk, sums), start
        )
        return sums

    def each_sum(self, sum_piece: Callable[[Item], None]) -> None:
        """Runs `sum_piece`, which stores what it finds, for each piece of this block."""
        self.deal.each(sum_piece)
        plgpu.wait_smem_to_gmem(0)

    def leave(self, worker: Any, of_piece: tuple[Any, ...], rows: Any, sums: Sums) -> None:
        """Stores a worker's 64 rows of the sums: `rows` of the outputs at the index `of_piece`."""
        total, vector = sums
        self.leave_blocks(worker, of_piece, rows, [total], vector)

    def leave_blocks(
        self,
        worker: Any,
        of_piece: tuple[Any, ...],
        rows: Any,
        totals: Sequence[jax.Array],
        vector: jax.Array,
    ) -> None:
        """As `leave`, of a total in blocks of its columns."""
        own, width = self.own, self.spec.V // len(totals)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own.vector.at[worker][...] = vector
        for column in range(0, self.spec.V, COLUMNS):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            total, first = totals[column // width], column % width
            own.total.at[worker][...] = total[:, first : first + COLUMNS]
            plgpu.commit_smem()
            target = self.total.at[(*of_piece, rows, pl.ds(column, COLUMNS))]
            plgpu.copy_smem_to_gmem(own.total.at[worker], target)
        plgpu.copy_smem_to_gmem(own.vector.at[worker], self.vector.at[(*of_piece, rows)])


def sums_of_pieces(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    program: tuple[Callable[..., Walk], mosaic.Storage, Sequence[tuple[Role, Callable[..., None]]]],
    shape: tuple[int, int, int],
    arrays: Mapping[str, jax.Array],
    of_rows: Sequence[jax.Array] = (),
    lengths: jax.Array | None = None,
    *,
    approximates: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Launches a kernel: total [B, heads, P, F, V] and vector [B, heads, P, F], float32.

    Args:
      program: what makes the walk, the storage, and each role with its function, memory first.
      shape: P, F and V.
      arrays: by the names of the walk's fields, x and y among them.
    """
    walk, storage, parts = program
    *of_vector, V = shape
    of_pieces = (deal.B, deal.heads, *of_vector)
    out_type = (
        jax.ShapeDtypeStruct((*of_pieces, V), F32),
        jax.ShapeDtypeStruct(of_pieces, F32),
    )
    masks = [] if lengths is None else [lengths]

    def bind(refs: Sequence[Any], own: mosaic.Storage) -> Walk:
        *given, total, vector = refs
        named = dict(zip(arrays, given, strict=False))
        rows = given[len(arrays) : len(arrays) + len(of_rows)]
        own_lengths = given[-1] if masks else None
        return walk(
            spec=spec,
            deal=deal,
            own=own,
            total=total,
            vector=vector,
            of_rows=rows,
            lengths=own_lengths,
            **named,
        )

    roles = mosaic.Roles(tuple(role for role, _ in reversed(parts)))
    found: tuple[jax.Array, jax.Array] = mosaic.launch(
        frame.name_of(name),
        mosaic.Program(roles, storage, parts, bind),
        deal,
        out_type,
        [*arrays.values(), *of_rows, *masks],
        approximates=approximates,
    )
    return found


def in_parts(x: jax.Array, count: int) -> Sequence[jax.Array]:
    """A float32 tile in registers as one to three bfloat16 tiles."""
    return (mosaic.rounded(x),) if count == 1 else mosaic.in_bf16_parts(x, count)


def pairs_of(a: Sequence[Any], b: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The products of two factors in parts, one of which may have a single part; smallest first."""
    if len(a) == len(b):
        return mosaic.pairs_of_parts(a, b)
    assert 1 in (len(a), len(b)), f"factors of {len(a)} and {len(b)} parts"
    return [(one, other) for one in reversed(a) for other in reversed(b)]


def pass_on(source: Ring, target: Ring, step: Any, write: Callable[[Any, Any], None]) -> None:
    """One step of a role between two rings: `write(slot, target_slot)` reads that slot of `source`
    and fills that slot of `target`."""
    slot, target_slot = source.slot(step), target.slot(step)
    source.produced.wait(slot)
    target.acquire(step)
    write(slot, target_slot)
    plgpu.commit_smem()
    source.consumed.arrive(slot)
    target.produced.arrive(target_slot)


def split_tile(
    source: tuple[Any, Ring],
    target: tuple[Any, Ring],
    step: Any,
    shape: tuple[int, int],
    change: Callable[[jax.Array, int], jax.Array],
) -> None:
    """Splits a tile [slots, C, columns] float32 into bfloat16 parts [slots, parts, C, columns], 64
    columns at a time, each as `change(columns, number of the first one)` gives it: `shape` says
    into how many parts, and how many columns."""
    (x, raw), (parts, changed) = source, target
    count, width = shape

    def write(slot: Any, parts_slot: Any) -> None:
        for first in range(0, width, HALF):
            columns = pl.ds(first, HALF)
            own = change(load(x.at[slot, :, columns]), first)  # [C, 64]
            for number, part in enumerate(in_parts(own, count)):
                parts.at[parts_slot, number, :, columns][...] = part

    pass_on(raw, changed, step, write)
