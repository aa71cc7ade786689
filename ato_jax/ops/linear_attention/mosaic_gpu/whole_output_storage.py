"""The roles of `whole_output.py`, its shared memory and barriers (`Storage`), and its arrays
(`Walk`).

C is 64 rows of a chunk; `width` is the number of columns of S and out that an item has.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, Array, Buffer, Item, OneOf, Ring, Role
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.whole_sums import blocks_of_state
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

OUTPUT = Role("output", registers=160, warpgroups=3)
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
ROLES = mosaic.Roles((OUTPUT, MEMORY))


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    out: Array  # [3, 64, width] of each warpgroup, or in blocks of 64 columns
    q: Array  # [slots, 64, D], or in blocks of 64 columns, as those of 8 bits always are
    s: Array  # [states, D, width]
    z: Array  # [states, 8, D]; in float16 [states, D] float32
    rows: Ring  # of q
    state: Ring  # of s and z

    barriers = (
        "rows.consumed",
        "leave",
        "rows.produced",
        "state.consumed",
        "state.produced",
    )


def tiling_of(spec: LinearAttentionSpec) -> row_copies.ByBlocks:
    # In blocks, D256 takes 0.193 ms where whole tiles take 0.211 (H200, B2 H8 T16384).
    return row_copies.by_blocks(spec, always=frame.is_wide(spec))


def storage_of(spec: LinearAttentionSpec, of_eight_bits: bool) -> Storage:
    tiling, width = tiling_of(spec), spec.V // blocks_of_state(spec)
    # As many slots of q, a multiple of the warpgroups of OUTPUT, and of S and z as fit.
    workers = OUTPUT.warpgroups
    slots, states = (workers, 1) if frame.is_wide(spec) else (2 * workers, 2)
    q = Buffer(tiling.tiles(slots), copies=tiling.blocks)
    if of_eight_bits:
        blocks = spec.D // HALF
        q = Buffer(mosaic.eight_bits(slots, blocks, C, HALF), copies=blocks)
    s = Buffer(tiling.shared(states, spec.D, width))
    z = Buffer(tiling.shared(states, ALIKE, spec.D))
    if mosaic.has_units(tiling.dtype):
        z = Buffer(plgpu.SMEM((states, spec.D), F32))
    return Storage(
        out=Buffer(tiling.tiles(workers, width)),
        q=q,
        s=s,
        z=z,
        rows=Ring.of(slots, filled=(q,), readers=(OneOf(OUTPUT),)),
        state=Ring.of(states, filled=(s, z), readers=(OUTPUT,)),
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory by the names of `whole_output`'s
    arguments, and its storage."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    own: Storage
    q: Any
    s: Any
    z: Any
    lengths: Any = None
    q_scale: Any = None
    units: Any = None
    out: Any = None

    @property
    def tiling(self) -> row_copies.ByBlocks:
        return tiling_of(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def blocks(self) -> int:
        """The number of blocks of 64 features."""
        return self.spec.D // HALF

    @property
    def parts(self) -> int:
        return blocks_of_state(self.spec)

    @property
    def width(self) -> int:
        """The number of columns of S and out that an item has."""
        return self.spec.V // self.parts

    @property
    def of_eight_bits(self) -> bool:
        return self.q_scale is not None

    @property
    def half_precision(self) -> bool:
        return mosaic.has_units(self.tiling.dtype)

    @property
    def in_two_parts(self) -> bool:
        return not (self.spec.feature_map.nonnegative or self.half_precision)

    @property
    def of_shares(self) -> bool:
        return whole_units.has_shares(self.spec)

    @property
    def has_units(self) -> bool:
        return whole_units.has_units_of_features(self.spec)

    def head_and_share(self, item: Item) -> tuple[Any, Any]:
        """An item's head, and which share of the columns of S and out is its own."""
        return lax.div(item.head, self.parts), lax.rem(item.head, self.parts)

    def head_of_state(self, item: Item, head: Any) -> tuple[Any, Any]:
        return item.batch, lax.div(head, self.spec.H // self.spec.G)
