"""The roles of `whole_query_gradient.py`, its shared memory and barriers (`Storage`), and its
arrays (`Walk`).

C is 64 rows of a chunk; F and V are the columns of a tile, and 2 in a shape counts its halves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, Array, Buffer, Item, OneOf, Ring, Role, Signal
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, V
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES = 4
COLUMNS = 32  # columns of R that are stored at once

DQ = Role("dq", registers=160, warpgroups=2)
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
SUMS = Role("sums", registers=168)
ROLES = mosaic.Roles((DQ, MEMORY, SUMS))


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    dq: Array  # [2, 2, 64, 64] of even and odd chunks, of each half: dq that is being stored
    g: Array  # [STAGES, 64, V]
    largest: Array  # [2, 64] float32, in float16: each row's largest magnitude in each half
    least: Array  # [64] float32, all the same
    ones: Array  # [8, 64]
    parts: Array  # [2, 2, 2, 64] float32 [even or odd chunk, half, terms of e or den]
    phi_units: Array  # [STAGES, 2, 64] float32, with units of features: phi(q)'s, all the same
    q: Array  # [STAGES, 2, 64, 64]
    r: Array  # [2, 64, COLUMNS] float32: columns of R that are being stored
    s: Array  # [2, 64, V]
    u: Array  # [2, 64] float32
    z: Array  # [2, 64] float32
    rows: Ring  # of q and g
    state: Ring  # of s, z and least
    mapped: Signal  # the slot of `rows` holds phi'
    exchanged: Signal
    ones_stored: Signal
    multiplied: Signal | None
    largest_stored: Signal | None

    barriers = (
        "exchanged",
        "rows.consumed",
        "largest_stored",
        "leave",
        "rows.produced",
        "mapped",
        "multiplied",
        "ones_stored",
        "state.consumed",
        "state.produced",
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory by the names of
    `whole_query_gradient`'s arguments and results, and its storage."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    own: Storage
    q: Any
    g: Any
    s: Any
    z: Any
    least: Any
    lengths: Any = None
    units: Any = None
    dq: Any = None
    r: Any = None
    u: Any = None

    @property
    def tiling(self) -> mosaic.Tiling:
        return row_copies.tiling(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def of_shares(self) -> bool:
        return whole_units.has_shares(self.spec)

    @property
    def in_units(self) -> bool:
        return whole_units.rounds_in_units(self.spec)

    def head_of_state(self, item: Item) -> tuple[Any, Any]:
        return item.batch, lax.div(item.head, self.spec.H // self.spec.G)


def storage_of(spec: LinearAttentionSpec, has_lengths: bool) -> Storage:
    tiling = row_copies.tiling(spec)
    q = Buffer(tiling.of_rows(STAGES, 2, C, HALF), copies=2)
    g = Buffer(tiling.tiles(STAGES), copies=row_copies.copies_of(tiling))
    s = Buffer(tiling.shared(2, HALF, V), copies=2)
    z = Buffer(plgpu.SMEM((2, HALF), F32), copies=2)
    least = Buffer(plgpu.SMEM((C,), F32))
    largest = largest_stored = None
    in_units = whole_units.rounds_in_units(spec)
    if in_units or whole_units.has_shares(spec):
        largest = Buffer(plgpu.SMEM((2, C), F32))
        largest_stored = Signal((OneOf(DQ),), slots=DQ.warpgroups)
    return Storage(
        dq=Buffer(tiling.of_rows(2, 2, C, HALF)),
        g=g,
        largest=largest,
        least=least,
        ones=Buffer(tiling.shared(ALIKE, C)),
        parts=Buffer(plgpu.SMEM((2, 2, 2, C), F32)),
        phi_units=Buffer(plgpu.SMEM((STAGES, 2, C), F32)) if in_units else None,
        q=q,
        r=Buffer(tiling.shared(2, HALF, COLUMNS, dtype=F32)),
        s=s,
        u=Buffer(plgpu.SMEM((2, HALF), F32)),
        z=z,
        rows=Ring.of(STAGES, filled=(q, g), readers=(SUMS,)),
        state=Ring.of(1, filled=(s, z, least), readers=(DQ,)),
        mapped=Signal((DQ,), within="rows"),
        exchanged=Signal((DQ,)),
        ones_stored=Signal((SUMS,)),
        multiplied=Signal((DQ,)) if has_lengths else None,
        largest_stored=largest_stored,
    )
