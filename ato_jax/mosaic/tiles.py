"""Tiles: their layouts in registers and in shared memory, and how heads lie in them.

A tile is [64 rows, columns] of one head, or of two heads of 64 columns, one block of shared memory
behind the other. Its two halves of 64 columns are the halves of one head's columns, or the two
heads. TMA loads and stores tiles; where a tile is several blocks (`Tiling.blocks`), each of them is
a copy of its own, with an arrival of its own on the barrier.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import device

ROWS = 64  # of a tile: WGMMA's M
HALF = 64  # columns of half a tile
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

TILE = plgpu.Layout.WGMMA
OF_ROWS, OF_COLUMNS = TILE.reduce(1), TILE.reduce(0)
# In JAX 0.10 `load` needs an index, which is deprecated in 0.11; there tiles are transposed in
# registers alone.
_OF_LOAD = inspect.signature(plgpu.load).parameters
_NEEDS_INDEX = "idx" in _OF_LOAD and _OF_LOAD["idx"].default is inspect.Parameter.empty
_INDEX: tuple[Any, ...] = ((),) if _NEEDS_INDEX else ()
# From JAX 0.12 on an assignment is refused where it would not fill whole lines of the cache.
_STORE: Any = getattr(plgpu, "store", None)
_IN_REGISTERS = jax.__version_info__ < (0, 11)


@dataclasses.dataclass(frozen=True)
class Views:
    """Two references to the same tiles of 64 columns in shared memory: one in tiles of 8 rows, for
    loads, stores and products, and an untiled one, for the copy engine where T is not a multiple of
    8. An object of this class can stand for the tiled reference."""

    tiled: Any
    untiled: Any

    @property
    def at(self) -> _ViewsAt:
        return _ViewsAt(self)

    @property
    def T(self) -> Any:
        return self.tiled.T

    @property
    def dtype(self) -> Any:
        return self.tiled.dtype

    def __setitem__(self, index: Any, x: Any) -> None:
        self.tiled[index] = x


@dataclasses.dataclass(frozen=True)
class _ViewsAt:
    views: Views

    def __getitem__(self, index: Any) -> Views:
        return Views(self.views.tiled.at[index], self.views.untiled.at[index])


def bound(type: Any, ref: Any) -> Any:
    """The reference that a kernel uses for what was allocated by `type`."""
    return Views(*ref) if isinstance(type, plgpu.RefUnion) else ref


def for_copy(ref: Any) -> Any:
    """The reference to a tile that copies take."""
    return ref.untiled if isinstance(ref, Views) else ref


def tiled(ref: Any) -> Any:
    """The reference to a tile that loads, stores and products take."""
    return ref.tiled if isinstance(ref, Views) else ref


def load(ref: Any, layout: Any = TILE, optimized: bool = True) -> jax.Array:
    """Loads a reference to registers; if `optimized`, by wide loads, which shared memory allows."""
    return plgpu.load(tiled(ref), *_INDEX, layout=layout, optimized=optimized)


def load_transposed(ref: Any) -> jax.Array:
    """Loads transpose 16 bits; float32 is transposed in registers."""
    if _IN_REGISTERS or ref.dtype == F32:
        return plgpu.layout_cast(load(ref.T, plgpu.Layout.WGMMA_TRANSPOSED), TILE)
    return load(ref.T)


def store_transposed(ref: Any, x: jax.Array) -> None:
    x = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED) if _IN_REGISTERS else x
    ref.T[...] = x


def store_in_memory(ref: Any, x: jax.Array) -> None:
    """Stores from registers to global memory, each thread its own elements: for a few numbers whose
    strides the copy engine does not take."""
    if _STORE is not None:
        _STORE(ref, x, optimized=False)
    else:
        ref[...] = x


def zeros(rows: int, columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows, columns), F32), TILE)


def ones(rows: int, columns: int, dtype: Any = BF16) -> jax.Array:
    return plgpu.layout_cast(jnp.ones((rows, columns), dtype), TILE)


def rounded(x: jax.Array, dtype: Any = BF16) -> jax.Array:
    # Without the barrier each element would be converted there and back by itself, which is slow.
    return lax.optimization_barrier(x.astype(dtype))


def in_columns(rows: jax.Array, width: int) -> jax.Array:
    """One number for each row, [rows], in all of its columns, [rows, width]."""
    return lax.broadcast_in_dim(rows, (rows.shape[0], width), [0])


def in_rows(columns: jax.Array, height: int) -> jax.Array:
    """One number for each column, [columns], in all of its rows, [height, columns]."""
    return lax.broadcast_in_dim(columns, (height, columns.shape[0]), [1])


def position(axis: int) -> jax.Array:
    """[64, 64]: each element's row, or its column."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), dimension=axis, layout=TILE)


def times_rows(ref: Any, factors: jax.Array) -> jax.Array:
    """The transpose of a tile whose rows are multiplied by `factors` [rows], in registers."""
    turned = load_transposed(ref).astype(F32)
    return rounded(turned * in_rows(factors, turned.shape[0]), ref.dtype)


class Heads(NamedTuple):
    """The two heads of a tile where they do not lie side by side: `first`, and `first + apart`,
    which may be the same. It stands in the place of a pair's number."""

    first: Any
    apart: Any


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one op's heads lie in tiles and in arrays in global memory.

    Attributes:
      layout: "bthd" or "bhtd", of the arrays.
      columns: of a tile of one head; 128, or more where blocks of 64 columns are named by `half`.
      width: of a head in global memory, or where arrays have heads of two sizes what divides both.
        Where it is less than a head's part of `columns`, TMA fills the rest with zeros and leaves
        it out of stores.
      heads: 1 or 2, in a tile. Where 2, items count pairs of heads.
      dtype: of tiles.
      untiled: whether sequences are copied as they are (`Views`): those of a number of rows that
        is no multiple of 8, or of heads whose columns are no multiple of what a tile's row has.
      cut: whether heads whose arrays have more than `columns` are cut into blocks of so many, each
        a head of its own to a kernel. All first blocks are numbered ahead of all second ones.
    """

    layout: str
    columns: int
    width: int
    heads: int = 1
    dtype: Any = BF16
    untiled: bool = False
    cut: bool = False

    @property
    def is_filled(self) -> bool:
        """Whether tiles have columns beyond a head's, which TMA fills with zeros."""
        return self.width < self.columns // self.heads

    @property
    def blocks(self) -> int:
        """How many blocks of shared memory hold a tile; one copy fills each. Two heads have a block
        each, as TMA writes whole rows of a tile, and so have the halves of an untiled copy."""
        return 2 if self.untiled else self.heads

    def head_of(self, head: Any, half: Any) -> Any:
        """The head, in global memory, whose columns half a tile has."""
        if isinstance(head, Heads):
            return head.first + half * head.apart
        return head if self.heads == 1 else 2 * head + half

    def columns_of(self, half: Any) -> Any:
        """Which of that head's columns these are."""
        return self._columns(half * HALF if self.heads == 1 else 0, HALF)

    def _columns(self, first: Any, count: int) -> Any:
        if self.is_filled and isinstance(first, int):
            # Slices that are statically out of bounds are rejected; with a traced start, TMA
            # fills columns past the end with zeros.
            first += 0 * lax.axis_index("block")
        return pl.ds(first, count)

    def rows_of_half(self, ref: Any, rows: Any, half: Any) -> Any:
        """The rows that a copy of 64 columns takes: `rows`, or, where these columns lie beyond the
        head's, rows beyond the end of the sequence, which TMA reads as zeros and does not write.

        An array of at most 64 columns is one tile wide, and Mosaic GPU drops a copy's index of an
        axis of which both the array and the copy have one tile: the copy would take the head's
        first columns in place of none.
        """
        width = ref.shape[-1]
        if self.heads == 2 or width > HALF or not self.is_filled:
            return rows
        beyond = half * HALF >= width
        if beyond is False:
            return rows
        length = ref.shape[1 if self.layout == "bthd" else 2]
        return pl.ds(rows.start + jnp.where(beyond, pl.cdiv(length, ROWS) * ROWS, 0), rows.size)

    def part(self, ref: Any, item: Any, rows: Any, head: Any, half: Any = None) -> Any:
        """Rows of a sequence in global memory, [rows, columns]; with `half`, 64 columns of them."""
        columns: tuple[Any, ...] = ()
        assert half is not None or self.heads == 1
        if self.cut:
            return self._part_of_block(ref, item, rows, head, half)
        if half is not None:
            rows = self.rows_of_half(ref, rows, half)
            head, columns = self.head_of(head, half), (self.columns_of(half),)
        elif self.is_filled:
            columns = (self._columns(0, self.columns),)
        if self.layout == "bthd":
            return ref.at[(item.batch, rows, head, *columns)]
        return ref.at[(item.batch, head, rows, *columns)]

    def _part_of_block(self, ref: Any, item: Any, rows: Any, head: Any, half: Any) -> Any:
        """As `part`, of an array that has the heads of a call, or those of the kernel."""
        in_memory = ref.shape[self.layout.index("h")]
        first: Any = 0
        if ref.shape[-1] > self.columns:
            first = lax.div(head, in_memory) * self.columns
        head = lax.rem(head, in_memory)
        count = self.columns
        if half is not None:
            rows = self.rows_of_half(ref, rows, half)
            first, count = first + half * HALF, HALF
        columns = self._columns(first, count)
        if self.layout == "bthd":
            return ref.at[item.batch, rows, head, columns]
        return ref.at[item.batch, head, rows, columns]

    def shared(self, *shape: int, dtype: Any = None) -> Any:
        """Shared memory for tiles, swizzled as TMA and WGMMA take them. The swizzle is the largest
        divisor of 128 bytes that divides a row of a head. Where copies are untiled it is 128 bytes,
        and so it is in float32, which states have; for float32 rows of a sequence there is
        `of_rows_in_float32`."""
        dtype = self.dtype if dtype is None else dtype
        whole = self.untiled or dtype == F32
        return self._swizzled(shape, dtype, HALF if whole else self.width)

    def of_rows_in_float32(self, *shape: int) -> Any:
        return self._swizzled(shape, F32, self.width)

    def of_parts(self, *shape: int) -> Any:
        """For the bfloat16 parts of float32 numbers, which kernels store, or which come padded."""
        return self._swizzled(shape, BF16, HALF)

    @staticmethod
    def _swizzled(shape: tuple[int, ...], dtype: Any, width: int) -> Any:
        size = jnp.dtype(dtype).itemsize
        swizzle = math.gcd(128, size * width)
        transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def of_rows(self, *shape: int) -> Any:
        """Like `shared`, for rows of a sequence, which are copied by `for_copy`."""
        own = self.shared(*shape)
        if not self.untiled or device.interpreting():
            return own
        # Both are the same bytes where a row of the array is one of the swizzle.
        size = jnp.dtype(self.dtype).itemsize
        swizzle = shape[-1] * size
        assert swizzle == 128, f"rows of {swizzle} bytes are tiled otherwise than they are copied"
        untiled = plgpu.SMEM(shape, self.dtype, transforms=(plgpu.SwizzleTransform(swizzle),))
        return plgpu.RefUnion(own, untiled)

    def tiles(self, slots: int) -> Any:
        """Tiles of 64 rows."""
        return self.of_rows(slots, *((ROWS, self.columns) if self.blocks == 1 else (2, ROWS, HALF)))

    def half_of(self, tiles: Any, slot: Any, half: Any) -> Any:
        """64 columns of one of `tiles`, [64, 64]."""
        if self.blocks == 1:
            return tiles.at[slot, :, pl.ds(half * HALF, HALF)]
        return tiles.at[slot, half]

    def head_in(self, tiles: Any, slot: Any, half: Any) -> Any:
        """All columns of one of `tiles` that belong to the same head as a half of it."""
        (own,) = self.parts_in(tiles, slot, half)
        return own

    def parts_in(self, tiles: Any, slot: Any, half: Any) -> list[Any]:
        """The blocks that hold these columns: one of [64, 128] or [64, 64], or two of [64, 64]."""
        if self.blocks == 1:
            return [tiles.at[slot]]
        return [tiles.at[slot, n] for n in ([half] if self.heads == 2 else range(self.blocks))]

    def parts_of(self, ref: Any) -> list[Any]:
        """Cuts `ref`, [64, a head's columns], into as many parts as `parts_in` gives. Products
        pair the parts of both."""
        if self.blocks == self.heads:
            return [ref]
        return [ref.at[:, pl.ds(n * HALF, HALF)] for n in range(self.blocks)]

    def _each_block(self, tiles: Any, slot: Any) -> list[tuple[Any, Any]]:
        """The blocks of one of `tiles`, each with the `half` that names its columns to `part`."""
        if self.blocks == 1:
            return [(None, tiles.at[slot])]
        return [(half, tiles.at[slot, half]) for half in range(self.blocks)]

    def copy_tile(
        self, ref: Any, item: Any, rows: Any, head: Any, tiles: Any, slot: Any, barriers: Any
    ) -> None:
        """Loads rows of a sequence into one of `tiles`: `blocks` copies, and as many arrivals."""
        for half, own in self._each_block(tiles, slot):
            source = self.part(ref, item, rows, head, half)
            plgpu.copy_gmem_to_smem(source, for_copy(own), barriers.at[slot])

    def leave_tile(self, tiles: Any, slot: Any, ref: Any, item: Any, rows: Any, head: Any) -> None:
        """Stores one of `tiles` to rows of a sequence."""
        for half, own in self._each_block(tiles, slot):
            target = self.part(ref, item, rows, head, half)
            plgpu.copy_smem_to_gmem(for_copy(own), target)

    def by_heads(self, ref: Any) -> list[Any]:
        """Rows, or a vector, as one part for each head of a tile: one lies behind the other."""
        each = ref.shape[0] // self.heads
        if self.heads == 1:
            return [ref]
        return [ref.at[pl.ds(n * each, each)] for n in range(self.heads)]

    def rows_in(self, vectors: Any, slot: Any, half: Any) -> Any:
        """One of `vectors`, for the head that half a tile belongs to, [64]."""
        if self.heads == 1:
            return vectors.at[slot]
        return vectors.at[slot, pl.ds(half * ROWS, ROWS)]

    def copy_vector(
        self, ref: Any, item: Any, of_chunk: Any, vectors: Any, slot: Any, barriers: Any
    ) -> None:
        """Loads a chunk's part of an array [B, H, ..] into one of `vectors`: `heads` copies."""
        for half, own in enumerate(self.by_heads(vectors.at[slot])):
            source = ref.at[item.batch, self.head_of(item.head, half), of_chunk]
            plgpu.copy_gmem_to_smem(source, own, barriers.at[slot])
