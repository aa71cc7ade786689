"""The roles of `sums.py`, its shared memory and barriers (`Storage`), and its arrays (`Arrays`,
`Walk`).

C is 64 rows of a chunk; D and V are the columns of a tile, and 2 in a shape counts its halves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, Array, Buffer, Item, Ring, Role, Signal
from ato_jax.ops.linear_attention.mosaic_gpu import chunk_borders, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES = 4  # slots of the ring of x and y
MOST_VECTORS = 3

VALUES = Role("values", registers=160, warpgroups=2)
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
FEATURES = Role("features", registers=64, warpgroups=2, unrolled=True)
ROLES = mosaic.Roles((VALUES, MEMORY, FEATURES))


@dataclasses.dataclass(frozen=True)
class Terms:
    """How a kernel computes the terms of its sums.

    Attributes:
      name: of the kernel, without `frame.name_of`'s prefix and suffix.
      map_rows: a function of (0 or 1, that half of x's columns, a^T, *vectors), all in shared
        memory, which replaces x by phi and stores a. In float16 it is also given `power` or
        `units` (`Arrays`).
      of_columns: the divisor of the second sum.
      weigh: a function of (0 or 1, a^T, *vectors) that stores a before `map_rows` runs; the second
        sum is then over a_jc x_j, for x as loaded, times the numbers that it returns for the half's
        columns.
    """

    name: str
    map_rows: Callable[..., None]
    of_columns: int
    weigh: Callable[..., Any] | None = None


class Arrays(NamedTuple):
    """The kernel's inputs, in the order of its operands.

    Attributes:
      x, y: k and v, or q and g.
      vectors: [B, heads, N for each chunk] in float32. `Terms.map_rows` gets the N numbers of a
        chunk for the head of its half; [B, G, ..] where the heads are groups of query heads.
      units: in float16, of phi and of a, [B, heads, chunks] each, by which `map_rows` divides.
        Sums are kept in the units of the last chunk.
      lengths: [B] int32; rows of x and y behind them count as 0.
      within: [B, P, 2] int32, the rows of each piece that are summed, where not all are: the first
        one, and the one behind the last.
      powers: [B, heads] in float16, of which `map_rows` is given its head's.
    """

    x: Any
    y: Any
    vectors: tuple[Any, ...]
    units: tuple[Any, Any] | None = None
    lengths: Any = None
    within: Any = None
    powers: Any = None


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    a: Array  # [STAGES, 2, 8, 64]: a^T, whose rows are factors of the chunk's rows
    columns: Array  # [2, 64] float32: the second sum, to be stored
    total: Array  # [2, 64, D] float32: the first sum, to be stored
    vector_0: Array  # [STAGES, heads * N] float32
    vector_1: Array
    vector_2: Array
    x: Array  # [STAGES, 64, D], or blocks of [64, 64]; phi once it is mapped
    y: Array  # [STAGES, 2, 64, 64]
    rows: Ring  # of x, y and vectors; `produced`: x and the vectors are loaded
    mapped: Signal  # the slot holds phi in place of x, and a
    y_loaded: Signal

    barriers = ("rows.consumed", "leave", "rows.produced", "mapped", "y_loaded")

    @property
    def vectors(self) -> list[Any]:
        found = self.vector_0, self.vector_1, self.vector_2
        return [one for one in found if one is not None]


def storage_of(spec: LinearAttentionSpec, terms: Terms, arrays: Arrays) -> Storage:
    tiling = frame.tiling(spec)
    x = Buffer(tiling.tiles(STAGES), copies=tiling.blocks)
    y = Buffer(tiling.of_rows(STAGES, 2, C, HALF), copies=2)
    vectors: list[Buffer | None] = [
        Buffer(plgpu.SMEM((STAGES, tiling.heads * width), F32), copies=tiling.heads)
        for width in widths_of(spec, arrays)
    ]
    vectors += [None] * (MOST_VECTORS - len(vectors))
    readers = (VALUES,) if values_sum_columns(spec, terms) else (FEATURES, VALUES)
    return Storage(
        a=Buffer(tiling.shared(STAGES, 2, ALIKE, C)),
        columns=Buffer(plgpu.SMEM((2, HALF), F32)),
        total=Buffer(tiling.shared(2, HALF, spec.D, dtype=F32)),
        vector_0=vectors[0],
        vector_1=vectors[1],
        vector_2=vectors[2],
        x=x,
        y=y,
        rows=Ring.of(STAGES, filled=(x, *vectors), readers=readers),
        mapped=Signal((FEATURES,), within="rows"),
        y_loaded=Signal((y,), within="rows"),
    )


def values_sum_columns(spec: LinearAttentionSpec, terms: Terms) -> bool:
    """Whether VALUES computes the second sum, too. FEATURES does where a tile has two heads, since
    VALUES then takes as many steps for half of the products; and where it needs x as loaded."""
    return terms.weigh is None and frame.heads_of_tile(spec) == 1


def widths_of(spec: LinearAttentionSpec, arrays: Arrays) -> list[int]:
    """How many numbers of each vector a chunk has."""
    return [vector.shape[2] // pl.cdiv(spec.T, C) for vector in arrays.vectors]


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory, and its storage."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    terms: Terms
    arrays: Arrays
    total: Any  # [B, heads, P, V, D], the outputs
    columns: Any  # [B, heads, P, D]
    own: Storage

    @property
    def tiling(self) -> mosaic.Tiling:
        return frame.tiling(self.spec)

    @property
    def values_sum_columns(self) -> bool:
        return values_sum_columns(self.spec, self.terms)

    def each(self, do: Callable[[Item], None]) -> Any:
        """Runs `do` for each item of this block, without chunks of which no row is summed."""
        within = self.arrays.within
        if within is None:
            return self.deal.each(do)
        return self.deal.each(do, cut=lambda item: chunk_borders.cut_to(within, item))

    def keep_within(self, item: Item, chunk: Any, x: Any) -> None:
        """Sets rows of a chunk to 0 that the piece does not sum."""
        if self.arrays.within is not None:
            chunk_borders.keep_within(self.arrays.within, item, chunk, x)

    def units_of(self, item: Item, half: Any, chunk: Any) -> tuple[Any, Any]:
        """The units of phi and of a in a chunk."""
        assert self.arrays.units is not None
        number = lax.div(item.first_row, C) + chunk
        head = self.tiling.head_of(item.head, half)
        of_phi, of_a = (ref[item.batch, head, number] for ref in self.arrays.units)
        return of_phi, of_a

    def onto_units(self, item: Item, half: Any, chunk: Any) -> tuple[Any, Any]:
        """The factors of both sums from the units of the chunk before to those of this chunk."""
        of_phi, of_a = self.units_of(item, half, jnp.maximum(chunk - 1, 0))
        own_phi, own_a = self.units_of(item, half, chunk)
        return of_phi / own_phi, of_phi / own_phi * (of_a / own_a)

    def last_units(self, item: Item, half: Any) -> tuple[Any, Any]:
        """The units of both sums behind the last chunk."""
        of_phi, of_a = self.units_of(item, half, item.chunks - 1)
        return of_phi, of_phi * of_a
