"""Tiles of one head of 128 columns where sequences are no multiple of 8 rows.

Products take a tile [64, 128] in swizzled atoms of [8, 64]: 8 rows of one half, 1 KiB, the two
halves of 8 rows side by side. Where a sequence is a multiple of 8 rows one TMA copy lays them so,
from an array that is seen in groups of 8 rows. Else the array is seen as it is, and such a copy
takes 64 columns of some rows: of 64 rows it would fill the half of a tile in two blocks
(`mosaic.Tiling.blocks`), and a product of 128 columns would be two of 64, with as many sums. So
each copy here takes one atom, `COPIES` a tile. Rows beyond the end of a sequence are read as zeros
and not written, whole atoms of them, too.
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

ATOM = frame.ROWS_OF_A_TILE  # rows of one
GROUPS = mosaic.ROWS // ATOM
COPIES = 2 * GROUPS


@dataclasses.dataclass(frozen=True)
class ByAtoms(mosaic.Tiling):
    """Tiles that copies fill atom by atom. Vectors, and rows of 64 columns, are as elsewhere."""

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
            plgpu.copy_smem_to_gmem(atom, part)

        self._each_atom(copy, ref, item, rows, head, tiles, slot)

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


@functools.cache
def tiling(spec: LinearAttentionSpec) -> mosaic.Tiling:
    """As `frame.tiling`, of kernels whose products take all columns of a tile at once."""
    own = frame.tiling(spec)
    if not own.untiled or own.heads == 2:
        return own
    return ByAtoms(**{field.name: getattr(own, field.name) for field in dataclasses.fields(own)})


def copies_of(tiling: mosaic.Tiling) -> int:
    """How many copies fill a tile."""
    return COPIES if isinstance(tiling, ByAtoms) else tiling.blocks
