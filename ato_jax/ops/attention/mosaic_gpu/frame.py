"""What Hopper's kernels of softmax attention agree on: block sizes, and how heads lie in tiles.

A tile is rows of a sequence of one head, [rows, columns]. Tiles come by TMA and lie swizzled in
shared memory, in rows of as many bytes as divide those of a head. Where a sequence is no multiple
of 8 rows, the copy engine takes 64 columns at a time (`mosaic.Views`): a tile is then several
parts of [rows, 64], one behind the other, and a product over its columns, or one whose result has
them, is one for each part.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.device import SHARED_MEMORY
from ato_jax.mosaic import F8, HALF
from ato_jax.ops.attention.eight_bits import reads_eight_bits
from ato_jax.ops.attention.spec import AttentionSpec

# The copy engine takes tiles of 8 rows, of arrays whose rows are a multiple of 8.
ROWS_OF_A_TILE = 8
# The widest head: WGMMA has at most 256 columns, and a row of the output fills the registers.
WIDEST_HEAD = 256
# WGMMA's contractions come in 16 elements of 16 bits.
HEAD_MULTIPLE = 16
# The shared memory that a block can have.
MOST_BYTES = SHARED_MEMORY[9, 0]
# More than all of a kernel's barriers and vectors take.
BARRIER_BYTES = 2048
# Keys and values of heads that run at the same time should stay in the L2 cache: 50 MB on an H100
# and an H200, of which a part holds what comes through.
CACHE_BYTES = 32 * 2**20
# The most keys whose products of 8 bits the tensor cores add up before the sums are set aside. By
# an emulation (docs/notes/attention.md) the relative error for values of one sign is then at most
# 2.2e-2. With 2048 keys it is 4.5e-2, above the budget of 3e-2.
MOST_KEYS_OF_SUMS = 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes, and how the work is laid out.

    Attributes:
      consumers: warpgroups that multiply.
      rows: queries of each of them, a multiple of 64.
      keys: keys of a step.
      stages: slots of keys, and of values.
      under: whether a step's exponentials run under the products of its predecessor's values.
      hold: whether the wait for that product is held behind the exponentials, ahead of which the
        assembler would move it.
      turns: whether the consumers take turns in issuing products.
      persistent: whether a block takes several tiles of queries, one after the other.
      multiprocessors: of the device: the most blocks of a persistent launch.
      dkv_consumers, dkv_queries, dkv_stages: of the kernel for dk and dv: its warpgroups that
        multiply, the queries of a step, and their slots.
      dq_consumers, dq_keys, dq_stages: of the kernel for dq, likewise.
      dkv_hold, dkv_turns, dkv_persistent, dq_hold, dq_turns, dq_persistent: `hold`, `turns` and
        `persistent` of these kernels.
      steps_of_sums: after how many steps sums are added to others, which wait in out's place,
        rounded to its dtype; 0 for never. The tensor cores' sums of 8 bits have 14 bits or so.
    """

    consumers: int
    rows: int
    keys: int
    stages: int
    under: bool = True
    hold: bool = False
    turns: bool = True
    persistent: bool = False
    multiprocessors: int = 132
    dkv_consumers: int = 2
    dkv_queries: int = 64
    dkv_stages: int = 2
    dq_consumers: int = 2
    dq_keys: int = 64
    dq_stages: int = 2
    dkv_hold: bool = False
    dkv_turns: bool = False
    dq_hold: bool = True
    dq_turns: bool = False
    dkv_persistent: bool = False
    dq_persistent: bool = False
    steps_of_sums: int = 0

    @property
    def tile(self) -> int:
        """Queries of a block at a time."""
        return self.consumers * self.rows


@dataclasses.dataclass(frozen=True)
class Side:
    """How rows of one array lie in global and in shared memory.

    Attributes:
      layout: "bthd" or "bhtd".
      columns: of a head.
      length: rows of a sequence.
      dtype: of the elements, of 16 or 8 bits.
    """

    layout: str
    columns: int
    length: int
    dtype: Any

    @property
    def parts(self) -> int:
        """How many parts of columns a tile has."""
        ragged = self.length % ROWS_OF_A_TILE != 0
        return self.columns // HALF if ragged else 1

    @functools.cached_property
    def tiling(self) -> mosaic.Tiling:
        ragged = self.length % ROWS_OF_A_TILE != 0
        return mosaic.Tiling(self.layout, self.columns, self.columns, 1, self.dtype, ragged)

    def tiles(self, slots: int, rows: int) -> Any:
        """Room for `slots` tiles."""
        if self.length % ROWS_OF_A_TILE:
            return self.tiling.of_rows(slots, self.parts, rows, HALF)
        return self.tiling.of_rows(slots, rows, self.columns)

    def parts_of(self, tile: Any) -> list[Any]:
        """The parts of one of `tiles`, each [rows, columns or 64]."""
        if self.length % ROWS_OF_A_TILE:
            return [tile.at[part] for part in range(self.parts)]
        return [tile]

    def in_memory(self, ref: Any, batch: Any, head: Any, first: Any, rows: int) -> list[Any]:
        """These rows of a head in global memory, as `parts_of` has them. Rows beyond the sequence
        come as zeros and are not stored."""
        # Slices that are statically out of bounds are rejected, even where TMA would fill them.
        within = pl.ds(first + 0 * lax.axis_index("block"), rows)
        at = (batch, within, head) if self.layout == "bthd" else (batch, head, within)
        if self.length % ROWS_OF_A_TILE:
            return [ref.at[(*at, pl.ds(part * HALF, HALF))] for part in range(self.parts)]
        return [ref.at[at]]

    def load(
        self, ref: Any, batch: Any, head: Any, first: Any, rows: int, tile: Any, barrier: Any
    ) -> None:
        """Starts `parts` copies, which all arrive on the barrier."""
        sources = self.in_memory(ref, batch, head, first, rows)
        for source, own in zip(sources, self.parts_of(tile), strict=True):
            plgpu.copy_gmem_to_smem(source, mosaic.for_copy(own), barrier)

    def store(self, tile: Any, ref: Any, batch: Any, head: Any, first: Any, rows: int) -> None:
        """Starts the copies from one of `tiles` to global memory."""
        targets = self.in_memory(ref, batch, head, first, rows)
        for own, target in zip(self.parts_of(tile), targets, strict=True):
            plgpu.copy_smem_to_gmem(mosaic.for_copy(own), target)


@dataclasses.dataclass(frozen=True)
class Across(Side):
    """Rows of an array whose sequences lie along the last axis, [B, G, columns, length]: a product
    of 8 bits contracts over what lies side by side. `length` is a multiple of a tile's rows."""

    def tiles(self, slots: int, rows: int) -> Any:
        return dataclasses.replace(self.tiling, width=rows).shared(slots, self.columns, rows)

    def in_memory(self, ref: Any, batch: Any, head: Any, first: Any, rows: int) -> list[Any]:
        return [ref.at[batch, head, :, pl.ds(first, rows)]]


def products(a: list[Any], b: list[Any]) -> list[tuple[Any, Any]]:
    """Factors of a @ b.T by parts of columns; where only one side is in parts, the other is cut
    alike."""
    if len(a) < len(b):
        a = _cut(a[0], len(b))
    elif len(b) < len(a):
        b = _cut(b[0], len(a))
    return [(x, y.T) for x, y in zip(a, b, strict=True)]


def _cut(tile: Any, parts: int) -> list[Any]:
    return [tile.at[:, pl.ds(part * HALF, HALF)] for part in range(parts)]


def alike(tile: list[Any], sums: list[jax.Array]) -> list[tuple[Any, jax.Array]]:
    """Parts of columns of the same width: the parts of a tile beside the sums for them."""
    if len(tile) < len(sums):
        tile = _cut(tile[0], len(sums))
    elif len(sums) < len(tile):
        parts = range(len(tile))
        sums = [sums[0][:, part * HALF : (part + 1) * HALF] for part in parts]
    return list(zip(tile, sums, strict=True))


def dtype_of(spec: AttentionSpec) -> Any:
    return jnp.dtype(spec.dtype).type


def dtype_of_inputs(spec: AttentionSpec) -> Any:
    return F8 if reads_eight_bits(spec) else dtype_of(spec)


def whole_rows(spec: AttentionSpec, length: int) -> int:
    """The rows that an array of a sequence has: those of 8 bits are padded to whole tiles."""
    return length + -length % ROWS_OF_A_TILE if reads_eight_bits(spec) else length


def queries(spec: AttentionSpec) -> Side:
    return Side(spec.layout, spec.D, whole_rows(spec, spec.T), dtype_of_inputs(spec))


def keys(spec: AttentionSpec) -> Side:
    return Side(spec.layout, spec.D, whole_rows(spec, spec.S), dtype_of_inputs(spec))


def values(spec: AttentionSpec) -> Side:
    if reads_eight_bits(spec):
        return Across(spec.layout, spec.V, whole_rows(spec, spec.S), F8)
    return Side(spec.layout, spec.V, spec.S, dtype_of(spec))


def outputs(spec: AttentionSpec) -> Side:
    return Side(spec.layout, spec.V, spec.T, dtype_of(spec))


def shared_bytes(spec: AttentionSpec, config: Config) -> int:
    """How many bytes q, k, v, out and the barriers take in shared memory."""
    of_queries = config.tile * spec.D
    of_keys = config.stages * config.keys * (spec.D + spec.V)
    found = (of_queries + of_keys) * jnp.dtype(dtype_of_inputs(spec)).itemsize + BARRIER_BYTES
    if has_own_outputs(spec, config):
        found += config.tile * spec.V * jnp.dtype(spec.dtype).itemsize
    return found


def has_own_outputs(spec: AttentionSpec, config: Config) -> bool:
    """Whether out has a place of its own in shared memory: else it takes that of the queries. Where
    a block takes several tiles, the next one's queries are then loaded while out is made and
    stored. Where D and V are the same and above 128, there is no room for that."""
    loads_ahead = config.persistent and spec.D <= 128
    return loads_ahead or spec.V != spec.D or reads_eight_bits(spec)


def whole_tiles(spec: AttentionSpec, config: Config) -> int:
    """T, up to a whole tile of queries."""
    return int(pl.cdiv(spec.T, config.tile)) * config.tile


def lse_shape(spec: AttentionSpec, config: Config) -> tuple[int, ...]:
    rows = whole_tiles(spec, config)
    return (spec.B, rows, spec.H) if spec.layout == "bthd" else (spec.B, spec.H, rows)
