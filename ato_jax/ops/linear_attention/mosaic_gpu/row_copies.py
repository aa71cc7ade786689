"""Loads and stores of tiles [64, D], D >= 128, where T is not a multiple of 8: subclasses of
Tiling.

Kernels get one by `tiling` or `by_blocks` below. A product reads a tile in swizzled atoms [8, 64]
of 1 KiB. Where T is a multiple of 8, one TMA copy of an array in groups of 8 rows writes a tile of
atoms. Otherwise a copy can only take 64 columns of some rows. Rows behind the end of a sequence are
read as zeros and not written.

    ByBlocks    a tile is blocks [64, 64], each filled by one copy. A product over the columns of a
                tile is a sum of one product for each block
    ByAtoms     a tile of 128 columns is filled by `COPIES` copies, one for each atom, and products
                read it whole
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import device, mosaic
from ato_jax.mosaic import HALF
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

ATOM = frame.ROWS_OF_A_TILE  # rows of an atom
GROUPS = mosaic.ROWS // ATOM
COPIES = 2 * GROUPS


@dataclasses.dataclass(frozen=True)
class ByAtoms(mosaic.Tiling):
    """Tiles that copies fill atom by atom; vectors and rows of 64 columns as in `Tiling`."""

    @property
    def blocks(self) -> int:
        return 1

    def tiles(self, slots: int) -> Any:
        own = self.shared(slots, mosaic.ROWS, self.columns)
        if device.interpreting():
            return own
        swizzle = plgpu.SwizzleTransform(HALF * self.dtype(0).itemsize)
        atoms = plgpu.SMEM((slots, GROUPS, 2, ATOM, HALF), self.dtype, transforms=(swizzle,))
        return plgpu.RefUnion(own, atoms)

    def half_of(self, tiles: Any, slot: Any, half: Any) -> Any:
        return super().half_of(tiled(tiles), slot, half)

    def parts_in(self, tiles: Any, slot: Any, half: Any) -> list[Any]:
        return [tiled(tiles).at[slot]]

    def copy_tile(
        self, ref: Any, item: Any, rows: Any, head: Any, tiles: Any, slot: Any, barriers: Any
    ) -> None:
        """`COPIES` copies, and as many arrivals."""

        def copy(part: Any, atom: Any) -> None:
            plgpu.copy_gmem_to_smem(part, atom, barriers.at[slot])

        self._each_atom(copy, ref, item, rows, head, tiles, slot)

    def leave_tile(self, tiles: Any, slot: Any, ref: Any, item: Any, rows: Any, head: Any) -> None:
        def copy(part: Any, atom: Any) -> None:
            plgpu.copy_smem_to_gmem(atom, part, commit_group=False)

        self._each_atom(copy, ref, item, rows, head, tiles, slot)
        plgpu.commit_smem_to_gmem_group()

    def _each_atom(
        self, copy: Any, ref: Any, item: Any, rows: Any, head: Any, tiles: Any, slot: Any
    ) -> None:
        def copy_group(group: Any, _: None) -> None:
            own = pl.ds(rows.start + group * ATOM, ATOM)
            for half in range(2):
                copy(self.part(ref, item, own, head, half), _atom(tiles, slot, group, half))

        lax.fori_loop(0, GROUPS, copy_group, None)


def _atom(tiles: Any, slot: Any, group: Any, half: int) -> Any:
    """[8, 64]."""
    if isinstance(tiles, mosaic.Views):
        return tiles.untiled.at[slot, group, half]
    return tiles.at[slot, pl.ds(group * ATOM, ATOM), pl.ds(half * HALF, HALF)]


@dataclasses.dataclass(frozen=True)
class ByBlocks(mosaic.Tiling):
    """Tiles of any multiple of 64 columns, of one head. Where `untiled`, they are [blocks, 64, 64];
    else one block has all columns."""

    @property
    def blocks(self) -> int:
        return self.columns // HALF if self.untiled else 1

    def tiles(self, slots: int, columns: int | None = None) -> Any:
        """Shared memory for `slots` tiles, of all columns of a head or of `columns`."""
        columns = self.columns if columns is None else columns
        if not self.untiled:
            return self.shared(slots, mosaic.ROWS, columns)
        return self.of_rows(slots, columns // HALF, mosaic.ROWS, HALF)

    def leave_tile(
        self, tiles: Any, slot: Any, ref: Any, item: Any, rows: Any, head: Any, share: Any = 0
    ) -> None:
        """Stores a tile. One with fewer columns than a head has those of number `share`."""
        own = tiled(tiles).at[slot]
        if not self.untiled:
            target, columns = self.part(ref, item, rows, head), own.shape[-1]
            if columns < self.columns:
                target = target.at[:, pl.ds(share * columns, columns)]
            plgpu.copy_smem_to_gmem(own, target)
            return
        blocks = own.shape[0]
        for block in range(blocks):
            target = self.part(ref, item, rows, head, share * blocks + block)
            plgpu.copy_smem_to_gmem(mosaic.for_copy(tiles.at[slot, block]), target)

    def block_in(self, tile: Any, block: Any) -> Any:
        """64 columns of a tile."""
        if self.untiled:
            return tile.at[block]
        return tile.at[:, pl.ds(first_of(block), HALF)]

    def all_in(self, tile: Any) -> list[Any]:
        """The blocks of a tile, each an operand of a product."""
        return [tile.at[block] for block in range(tile.shape[0])] if self.untiled else [tile]


def first_of(block: Any) -> Any:
    """The first column of a block of 64."""
    first = block * HALF
    return first if isinstance(block, int) else pl.multiple_of(first, HALF)


def copy_block(
    tiling: mosaic.Tiling, ref: Any, item: Any, rows: Any, head: Any, block: Any, tile: Any, to: Any
) -> None:
    """Loads 64 columns of some rows into a tile [64, 64], by one copy, which arrives on `to`."""
    source = tiling.part(ref, item, rows, head, block)
    plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tile), to)


def leave_block(
    tiling: mosaic.Tiling, tile: Any, ref: Any, item: Any, rows: Any, head: Any, block: Any
) -> None:
    """Stores a tile [64, 64] to 64 columns of some rows."""
    target = tiling.part(ref, item, rows, head, block)
    plgpu.copy_smem_to_gmem(mosaic.for_copy(tile), target)


def _as(kind: type[mosaic.Tiling], own: mosaic.Tiling) -> Any:
    return kind(**{field.name: getattr(own, field.name) for field in dataclasses.fields(own)})


@functools.cache
def tiling(spec: LinearAttentionSpec) -> mosaic.Tiling:
    """`frame.tiling` for kernels whose products take all columns of a tile at once."""
    own = frame.tiling(spec)
    if not own.untiled or own.heads == 2:
        return own
    return _as(ByAtoms, own)


@functools.cache
def by_blocks(spec: LinearAttentionSpec, always: bool = False) -> ByBlocks:
    """`frame.tiling` for kernels that multiply a tile's columns in parts. With `always` tiles are
    in blocks for every T."""
    own = frame.tiling(spec)
    found: ByBlocks = _as(ByBlocks, dataclasses.replace(own, untiled=own.untiled or always))
    return found


def copies_of(tiling: mosaic.Tiling) -> int:
    """How many copies fill a tile."""
    return COPIES if isinstance(tiling, ByAtoms) else tiling.blocks
