"""Which columns, rows and blocks of keys a program of the paged kernels has (`paged.py`).

A *run* is the consecutive blocks of keys that one program goes over. The blocks that are seen are
numbered through all sequences, so a run may end one sequence and begin the next.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.spec import AttentionSpec
from ato_jax.ops.attention.triton.common import LN_2, Sliced, column_slices, quotient, span
from ato_jax.ops.attention.triton.forward import FLOOR


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes of the paged kernels.

    Attributes:
      rows: rows in a tile; a row is one query of one head of the group.
      block: keys in a tile.
      num_warps, num_stages: warps and pipeline stages of the first kernel.
      programs: how many programs share the blocks of all sequences.
      fast_exp2: take NVIDIA's instruction for 2^x.
    """

    rows: int
    block: int
    num_warps: int
    num_stages: int
    programs: int
    fast_exp2: bool = False


class Slice(NamedTuple):
    """Columns start, start + step, ... of a row: `size` of them, of which `width` exist."""

    start: int
    size: int
    width: int
    step: int = 1


# The columns of each tile of a row.
Slices = tuple[Slice, ...]


def slices_of(width: int, in_words: bool) -> Slices:
    """The tiles of a row of `width` columns.

    With `in_words`, each slice of words gives a tile of its even columns and one of its odd ones.
    """
    if not in_words:
        return tuple(Slice(*columns) for columns in column_slices(width))
    return tuple(
        Slice(2 * start + odd, size, min(size, max(0, pl.cdiv(width - odd, 2) - start)), 2)
        for start, size, _ in column_slices(pl.cdiv(width, 2))
        for odd in (0, 1)
    )


def value_slices_of(spec: AttentionSpec, shared: bool, in_words: bool) -> Slices:
    """The tiles of a row of values; `shared` values are columns of the keys, in the keys' tiles."""
    if not shared:
        return slices_of(spec.V, in_words)
    return tuple(
        one._replace(width=max(0, min(one.width, pl.cdiv(spec.V - one.start, one.step))))
        for one in slices_of(spec.D, in_words)
        if one.start - one.start % one.step < spec.V
    )


def columns_of(slices: Slices) -> int:
    """The columns of all tiles of a row, padding included."""
    return sum(one.size for one in slices)


class Runs(NamedTuple):
    """Which blocks of which sequence each program goes over.

    The vectors have one element a sequence, and are padded with sequences of no blocks to a power
    of two, [B].
    """

    length: jax.Array  # [B], the keys of the sequence
    position: jax.Array  # [B], query 0's position
    first: jax.Array  # [B], the first block that is seen
    ends: jax.Array  # [B], the end of its blocks in the numbering through all sequences
    blocks: jax.Array  # [B], how many blocks are seen
    each: jax.Array  # blocks that every program has
    rest: jax.Array  # how many programs have one block more

    def start(self, program: Any) -> Any:
        """The first block of a program, in the numbering through all sequences."""
        return program * self.each + jnp.minimum(program, self.rest)

    def of(self, sequence: Any, values: jax.Array) -> jax.Array:
        """The element of a vector [B] that belongs to the sequence."""
        index = jnp.arange(values.shape[0], dtype=jnp.int32)
        return jnp.sum(jnp.where(index == sequence, values, 0), dtype=jnp.int32)


def runs_of(spec: AttentionSpec, config: Config, lengths_ref: Any, first_ref: Any | None) -> Runs:
    """The runs of all programs, from the lengths and the positions of query 0, refs of [B]."""
    index = jnp.arange(pl.next_power_of_2(spec.B), dtype=jnp.int32)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref.at[index], mask=index < spec.B, other=0)  # [B]

    length = jnp.clip(load(lengths_ref), 0, spec.S)
    position = length - spec.T if first_ref is None else load(first_ref)
    first, stop = jnp.zeros_like(length), length
    if spec.left is not None:
        first = quotient(jnp.maximum(position - spec.left, 0), config.block)
    if spec.right is not None:
        stop = jnp.clip(position + spec.T + spec.right, 0, length)
    blocks = jnp.maximum(quotient(stop + config.block - 1, config.block) - first, 0)
    total = jnp.sum(blocks, dtype=jnp.int32)
    each = quotient(total, config.programs)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    return Runs(length, position, first, ends, blocks, each, total - each * config.programs)


def count_of(found: jax.Array) -> jax.Array:
    """How many elements are true."""
    return jnp.sum(found, dtype=jnp.int32)


class Rows(NamedTuple):
    """A program's rows of its group: row r is query r // share of head r % share of the group."""

    spec: AttentionSpec
    group: Any
    row: jax.Array  # [rows]
    query: jax.Array  # [rows]
    head: jax.Array  # [rows], among all H
    exist: jax.Array  # [rows] bool

    @classmethod
    def of(cls, spec: AttentionSpec, size: int) -> Rows:
        """Those of this program, whose first grid axis runs over the groups' tiles of rows."""
        share = spec.H // spec.G
        tiles = pl.cdiv(spec.T * share, size)
        group = quotient(pl.program_id(0), tiles)
        row = span((pl.program_id(0) - group * tiles) * size, size)
        query = quotient(row, share)
        head = group * share + row - query * share
        return cls(spec, group, row, query, head, row < spec.T * share)

    def outside(self, b: Any) -> tuple[Any, ...]:
        """Their index in a caller's array, [B, T, H, ...] or [B, H, T, ...]."""
        own = (self.query, self.head)
        return (b, *(own if self.spec.layout == "bthd" else own[::-1]))

    def part(self, slot: Any) -> tuple[Any, ...]:
        """Their index in an array of parts, [slots, G, T * share, ...]."""
        return slot, self.group, self.row

    def nothing(self, slices: Slices) -> tuple[jax.Array, jax.Array, Sliced]:
        """The maximum and the sums of rows that have seen no key: [rows], [rows], [rows, V]."""
        zeros = jnp.zeros(self.row.shape, jnp.float32)
        acc = tuple(jnp.zeros((*self.row.shape, one.size), jnp.float32) for one in slices)
        return jnp.full_like(zeros, FLOOR), zeros, acc

    def load(self, ref: Any, index: tuple[Any, ...], slices: Slices) -> Sliced:
        return load_columns(ref, index, self.exist, slices)

    def store(
        self,
        refs: tuple[Any, Any],
        index: tuple[Any, ...],
        slices: Slices,
        sums: tuple[jax.Array, jax.Array, Sliced],
    ) -> None:
        """acc / total and lse = ln(2) m + ln(total); 0 and -inf where total is 0."""
        out_ref, lse_ref = refs
        m, total, acc = sums
        nobody = total == 0
        safe = jnp.where(nobody, 1.0, total)
        for tile, columns in zip(acc, slices, strict=True):
            place, mask = place_of(out_ref, index, self.exist, columns)
            plgpu.store(place, (tile / safe[:, None]).astype(out_ref.dtype), mask=mask)
        lse = jnp.where(nobody, -jnp.inf, m * LN_2 + jnp.log(safe))
        plgpu.store(lse_ref.at[index], lse, mask=self.exist)


def place_of(
    ref: Any, index: tuple[Any, ...], exist: jax.Array, columns: Slice
) -> tuple[Any, jax.Array]:
    """A tile of rows in memory, and the mask of those elements that exist.

    `index` holds a vector for the axes that the rows run over, and scalars for the others.
    """
    count = span(0, columns.size)[None, :]
    column = columns.start + (count if columns.step == 1 else count * columns.step)
    index = tuple(one[:, None] if jnp.ndim(one) else one for one in index)
    return ref.at[(*index, column)], exist[:, None] & (count < columns.width)


def load_columns(ref: Any, index: tuple[Any, ...], exist: jax.Array, slices: Slices) -> Sliced:
    """Rows of an array, tile by tile, 0 where they do not exist."""
    found = []
    for columns in slices:
        place, mask = place_of(ref, index, exist, columns)
        zero = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
        found.append(plgpu.load(place, mask=mask, other=zero))  # [rows, size]
    return tuple(found)
