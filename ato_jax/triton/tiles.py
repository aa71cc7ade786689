"""Tiles of rows and columns: which of them exist, and how a kernel loads and stores them.

Triton wants each side of a tile to be a power of two, at least 16. A kernel loads `padded(D)`
columns of an array of D, and those beyond D read as zeros; likewise for rows past the end.

In the comments at loads, C is the rows of a tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.launch import triton as plgpu

COLUMNS = 16  # the narrowest tile that Triton's dots take
SLICE = 64  # columns of a tile of `in_slices`


def padded(size: int) -> int:
    """The power of two that a tile's axis takes, at least the smallest that dots take."""
    return max(COLUMNS, pl.next_power_of_2(size))


def span(first: Any, count: int) -> jax.Array:
    """first, .., first + count - 1, in int32 whatever JAX's default integer is."""
    return first + jnp.arange(count, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of one array: their numbers [C], which exist and which are real (None: all are).

    A row that exists and is not real is padding: it is never loaded, and is stored as zeros.
    """

    numbers: jax.Array
    exist: jax.Array | None
    real: jax.Array | None

    def only_if(self, wanted: Any) -> Rows:
        """These rows where `wanted` is true, or else none of them."""
        exist = (self.numbers >= 0) & wanted if self.exist is None else self.exist & wanted
        return Rows(self.numbers, exist, exist)


def tile_rows(first: Any, block: int, length: int, whole: bool, real_length: Any = None) -> Rows:
    """`block` rows from `first` on; `whole` promises that all of them exist.

    `real_length` is a ref [1]: rows from there on are padding.
    """
    index = span(first, block)
    exist = None if whole else (index >= 0) & (index < length)
    if real_length is None:
        return Rows(index, exist, exist)
    real = index < real_length[0]
    return Rows(index, exist, real if exist is None else exist & real)


def indexed_rows(ref: Any, first: Any, block: int, length: int) -> Rows:
    """The rows whose numbers stand in ref from `first` on.

    An entry -1 - n says that row n is padding, and an entry `length` that there is no row.
    """
    entries = load_steps(ref, first, block)
    numbers = jnp.maximum(entries, -1 - entries)
    exist = numbers < length
    return Rows(numbers, exist, exist & (entries >= 0))


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns `first` to `first + count` of an axis of `width`, in a tile of `count`."""

    first: int
    count: int
    width: int

    @property
    def index(self) -> jax.Array:
        return span(self.first, self.count)

    @property
    def exist(self) -> jax.Array | None:
        return None if self.first + self.count <= self.width else self.index < self.width


@dataclasses.dataclass(frozen=True)
class Slice(Columns):
    """Columns whose first one the kernel knows only when it runs."""

    first: Any

    @property
    def exist(self) -> jax.Array | None:
        return None if self.width % self.count == 0 else self.index < self.width


def all_columns(width: int) -> Columns:
    return Columns(0, padded(width), width)


def in_slices(width: int) -> list[Columns]:
    """The columns in tiles of 64, the last of which may be narrower."""
    whole = padded(width)
    return [Columns(first, min(SLICE, whole - first), width) for first in range(0, whole, SLICE)]


def as_columns(width: int | Columns) -> Columns:
    return width if isinstance(width, Columns) else all_columns(width)


def tile_mask(rows: jax.Array | None, columns: Columns) -> jax.Array | None:
    """Which elements of a tile are in rows [C] and in columns that exist; None: all of them."""
    exist = columns.exist
    if rows is None:
        return None if exist is None else exist[None, :]
    return rows[:, None] if exist is None else rows[:, None] & exist[None, :]


def load_tile(
    ref: Any,
    rows: Rows,
    width: int | Columns,
    head: Any = None,
    axis: int = 1,
    *,
    anew: bool = False,
) -> jax.Array:
    """[C, padded(width)] of ref [length, width], or some of its columns.

    Rows that are not real and columns that do not exist read as zeros. With `head`, ref has one
    more axis, of heads, at `axis`. `anew` is for a tile that the kernel loaded before: otherwise
    the compiler would hold the first one, and what was computed from it, in registers. The second
    load has another eviction policy, as the cache need not keep the tile any longer.
    """
    columns = as_columns(width)
    mask = tile_mask(rows.real, columns)
    index = [rows.numbers[:, None], columns.index[None, :]]
    if head is not None:
        index.insert(axis, head)
    return plgpu.load(
        ref.at[tuple(index)],
        mask=mask,
        other=None if mask is None else 0,
        eviction_policy="evict_first" if anew else None,
    )


def store_tile(
    ref: Any,
    rows: Rows,
    width: int | Columns,
    tile: jax.Array,
    head: Any = None,
    axis: int = 1,
) -> None:
    """The tile's rows and columns that exist into ref [length, width], padding as zeros.

    `head` and `axis` are those of `load_tile`.
    """
    columns = as_columns(width)
    if rows.real is not None and rows.real is not rows.exist:
        tile = jnp.where(rows.real[:, None], tile, 0)
    index = rows.numbers
    if rows.exist is not None:
        # The interpreter wraps a negative index round, and drops one past the end.
        length = ref.shape[0 if head is None or axis else 1]
        index = jnp.where(index >= 0, index, length)
    at = [index[:, None], columns.index[None, :]]
    if head is not None:
        at.insert(axis, head)
    place = ref.at[tuple(at)]
    plgpu.store(place, tile.astype(ref.dtype), mask=tile_mask(rows.exist, columns))


def load_rows(ref: Any, rows: Rows, head: Any = None) -> jax.Array:
    """[C] of ref [length], or of [heads, length]; rows that are not real read as zero."""
    index = rows.numbers if head is None else (head, rows.numbers)
    other = None if rows.real is None else 0
    return plgpu.load(ref.at[index], mask=rows.real, other=other)


def store_rows(ref: Any, rows: Rows, values: jax.Array, head: Any = None) -> None:
    """values [C] into ref [length], or [heads, length], where the rows exist."""
    index = rows.numbers
    if head is not None:
        plgpu.store(ref.at[head, index], values, mask=rows.exist)
        return
    if rows.exist is not None:
        index = jnp.where(index >= 0, index, ref.shape[0])
    plgpu.store(ref.at[index], values, mask=rows.exist)


def load_steps(ref: Any, first: Any, block: int) -> jax.Array:
    """[C] of ref [steps], an array as long as all pieces together: no step is missing."""
    return plgpu.load(ref.at[span(first, block)])


def store_steps(ref: Any, first: Any, values: jax.Array) -> None:
    """values [C] into ref [steps]."""
    plgpu.store(ref.at[span(first, values.shape[0])], values)


def scale_rows(tile: jax.Array, ref: Any, first: Any) -> jax.Array:
    """tile [C, X], each row times the number of its step in ref [steps]."""
    return tile * load_steps(ref, first, tile.shape[0])[:, None]


def all_rows(height: int | Columns) -> Rows:
    """The rows of a matrix, such as a state."""
    columns = as_columns(height)
    return Rows(columns.index, columns.exist, columns.exist)


def load_matrix(ref: Any, height: int | Columns, width: int | Columns) -> jax.Array:
    """[padded(height), padded(width)] of ref [height, width], or a part of it."""
    return load_tile(ref, all_rows(height), width)


def store_matrix(ref: Any, height: int | Columns, width: int | Columns, matrix: jax.Array) -> None:
    """matrix [padded(height), padded(width)] into ref [height, width], or a part of it."""
    store_tile(ref, all_rows(height), width, matrix)


def load_vector(ref: Any, size: int | Columns) -> jax.Array:
    """[padded(size)] of ref [size]."""
    return load_rows(ref, all_rows(size))


def store_vector(ref: Any, size: int | Columns, vector: jax.Array) -> None:
    """vector [padded(size)] into ref [size]."""
    store_rows(ref, all_rows(size), vector)
