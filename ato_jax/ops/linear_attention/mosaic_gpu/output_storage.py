"""The roles of `output.py`, its shared memory and barriers (`Storage`), and its arrays (`Walk`).

C is 64 rows of a chunk; F and V are the columns of a tile, and 2 in a shape counts its halves.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, OF_ROWS, Array, Buffer, Item, Ring, Role, Signal, load
from ato_jax.ops.linear_attention.mosaic_gpu import (
    chunk_borders,
    chunk_decay,
    feature_maps,
    frame,
    powers,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of the ring of q and k, of the ring of v and gates, and of results that are being stored.
STAGES, V_STAGES, OUT_SLOTS = 4, 2, 1
# Slots of rows of 8 bits, and of the tiles of q and k into which they are widened.
EIGHT_STAGES, WIDENED_STAGES = 3, 2

VALUES = Role("values", registers=176, warpgroups=2)
MEMORY = Role("memory", registers=32)
FEATURES = Role("features", registers=48, warpgroups=2, unrolled=True)
ROLES = mosaic.Roles((VALUES, MEMORY, FEATURES))


class Part(enum.Enum):
    """The share of out that a launch computes."""

    ALL = enum.auto()
    LATER = enum.auto()  # the sums over the keys behind each query, not divided by den
    REST = enum.auto()  # the sums over the other keys, added to those that LATER wrote


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    adds: Array  # [2, 8, 64] the factor of each key's features in z: 1, or the decay to the end
    den: Array  # [V_STAGES, 2, 64] float32: phi(q_i) . z, of each half
    gates: Array  # [V_STAGES, heads * 64] float32
    k: Array  # [STAGES, 64, F], or two blocks of [64, 64]
    later: Array  # [V_STAGES, 2, 64, 64] the sums that `Part.LATER` wrote
    later_den: Array  # [V_STAGES, heads * 64] float32
    eight_k: Array  # [EIGHT_STAGES, 2, 64, 64] of 8 bits, as eight_q and eight_v
    eight_q: Array
    eight_v: Array
    left_den: Array  # [2, 64] float32: denominators to be stored: of LATER, or in REST of all keys
    out: Array  # [2, OUT_SLOTS, 64, 64]
    q: Array  # as k
    q_largest: Array  # [V_STAGES, 2, 64] float32, in float16: max abs(phi(q_i)) over each half
    s: Array  # [2, 64, F] S of each half of V
    s_units: Array  # [2, 64] float32: of S's rows, in float16
    v: Array  # [V_STAGES, 2, 64, 64]
    z_rows: Array  # [2, 8, 64] z of each half of F, rounded, in all 8 rows
    z_start: Array  # [2, 64] float32: z ahead of the piece
    rows: Ring  # of q and k
    values: Ring  # of v and gates
    state: Ring  # of s
    sums: Ring  # of z_start
    mapped: Signal  # the slot of `rows` holds phi(q) and phi(k)
    den_known: Signal  # phi(q_i) . z is in the slot of `den`
    largest_known: Signal | None  # q_largest is stored; None if each half is a head of its own
    eight: Ring | None  # of rows of 8 bits, which FEATURES widen into q, k and v

    barriers = (
        "den_known",
        "eight.consumed",
        "eight.produced",
        "rows.consumed",
        "largest_known",
        "leave",
        "rows.produced",
        "mapped",
        "state.consumed",
        "state.produced",
        "values.consumed",
        "values.produced",
        "sums.consumed",
        "sums.produced",
    )


def storage_of(
    spec: LinearAttentionSpec, part: Part = Part.ALL, of_eight_bits: bool = False
) -> Storage:
    tiling, gated = frame.tiling(spec), spec.decay is not None
    heads, shared = tiling.heads, tiling.shared
    stages = STAGES - (part is Part.REST)  # which makes room for `later`
    if of_eight_bits:
        stages = WIDENED_STAGES
    q = Buffer(tiling.tiles(stages), copies=tiling.blocks)
    k = Buffer(tiling.tiles(stages), copies=tiling.blocks)
    v = Buffer(tiling.of_rows(V_STAGES, 2, C, HALF), copies=2)
    gates = Buffer(plgpu.SMEM((V_STAGES, heads * C), F32), copies=heads)
    s = Buffer(shared(2, HALF, spec.F), copies=2)
    z_start = Buffer(plgpu.SMEM((2, HALF), F32), copies=2)
    s_units = q_largest = largest_known = None
    if mosaic.has_units(tiling.dtype):
        q_largest = Buffer(plgpu.SMEM((V_STAGES, 2, C), F32))
        if heads == 1:
            largest_known = Signal((FEATURES,), within="values")
        s_units = Buffer(plgpu.SMEM((2, HALF), F32), copies=2)
    later = later_den = left_den = None
    if part is Part.REST:
        later = Buffer(tiling.of_rows(V_STAGES, 2, C, HALF), copies=2)
        if spec.normalize:
            later_den = Buffer(plgpu.SMEM((V_STAGES, heads * C), F32), copies=heads)
    if part is not Part.ALL and spec.normalize:
        left_den = Buffer(plgpu.SMEM((2, C), F32))
    of_values = v, gates if gated else None, later, later_den
    # The roles or copies that fill the slots of q and k, and of v; and the roles that consume v.
    rows_by: tuple[Any, ...] = q, k
    values_by: tuple[Any, ...] = of_values
    values_for: tuple[Role, ...] = FEATURES, VALUES
    eight: Ring | None = None
    eights: list[Any] = [None, None, None]
    if of_eight_bits:
        block = mosaic.eight_bits(EIGHT_STAGES, 2, C, HALF)
        eights = [Buffer(block, copies=2) for _ in range(3)]
        eight = Ring.of(EIGHT_STAGES, eights, (FEATURES,))
        rows_by = values_by = (FEATURES,)
        values_for = (VALUES,)
    return Storage(
        adds=Buffer(shared(2, ALIKE, C)),
        den=Buffer(plgpu.SMEM((V_STAGES, 2, C), F32)),
        gates=gates,
        k=k,
        later=later,
        later_den=later_den,
        eight_k=eights[0],
        eight_q=eights[1],
        eight_v=eights[2],
        left_den=left_den,
        out=Buffer(tiling.of_rows(2, OUT_SLOTS, C, HALF)),
        q=q,
        q_largest=q_largest,
        s=s,
        s_units=s_units,
        v=v,
        z_rows=Buffer(shared(2, ALIKE, HALF)),
        z_start=z_start,
        rows=Ring.of(stages, filled=rows_by, readers=(FEATURES, VALUES)),
        values=Ring.of(V_STAGES, values_by, values_for),
        state=Ring.of(1, (s, s_units), (VALUES,)),
        sums=Ring.of(1, (z_start,), (FEATURES,)),
        mapped=Signal((FEATURES,), within="rows"),
        den_known=Signal((FEATURES,), within="values"),
        largest_known=largest_known,
        eight=eight,
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory by the names of `output`'s
    arguments, and its storage."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    own: Storage
    q: Any
    k: Any
    v: Any
    s: Any
    z: Any
    gates: Any = None
    steep: Any = None
    lengths: Any = None
    s_units: Any = None
    k_powers: Any = None
    later: Any = None
    later_den: Any = None
    out: Any = None
    left_den: Any = None
    begins: Any = None  # with segments, as `borders.OfSequence` has them
    borders_of: Any = None
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    v_rest: Any = None

    @property
    def tiling(self) -> mosaic.Tiling:
        return frame.tiling(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def gated(self) -> bool:
        return self.spec.decay is not None

    @property
    def part(self) -> Part:
        if self.later is not None:
            return Part.REST
        return Part.ALL if self.deal.end is None else Part.LATER

    @property
    def z_unit(self) -> float:
        """The divisor of z before it is rounded to float16, so that features of 2^15 can be summed
        over all rows; 1 in bfloat16."""
        if not mosaic.has_units(self.tiling.dtype):
            return 1.0
        return max(1.0, pl.next_power_of_2(self.spec.T) / powers.room_for_decay(self.spec))

    def power_of_keys(self, item: Item, half: Any) -> Any:
        """In float16, the power of two of phi(k) of the head that has this half of a tile."""
        return self.k_powers[item.batch, self.tiling.head_of(self.kv_head(item), half)]

    def rest_of_scale(self, item: Item, half: Any) -> Any:
        """For rows of 8 bits, what the scale of v has beside its power of two."""
        return self.v_rest[item.batch, self.tiling.head_of(self.kv_head(item), half)]

    def powers_of_queries(self, v_slot: Any, half: Any) -> jax.Array:
        """In float16, the powers of two of phi(q_i) of a chunk's queries, [64]."""
        halves = range(2) if self.tiling.heads == 1 else (half,)
        found = [load(self.own.q_largest.at[v_slot, other], OF_ROWS) for other in halves]
        return powers.power_of(functools.reduce(jnp.maximum, found))

    def kv_head(self, item: Item) -> Any:
        return frame.head_of_keys(self.spec, item.head)

    def s_parts(self, half: Any) -> list[Any]:
        return self.tiling.parts_of(self.own.s.at[half])

    def gates_in(self, slot: Any, half: Any, some_steep: bool = True) -> chunk_decay.Gates:
        rows = self.tiling.rows_in(self.own.gates, slot, half)
        from_the_end = self.part is Part.LATER
        return chunk_decay.gates_of(self.spec, rows, some_steep, from_the_end)

    def borders(self, item: Item, chunk: Any) -> chunk_borders.Borders:
        return chunk_borders.of_chunk(self.begins, self.borders_of, item, chunk)

    def seen(self, w: jax.Array) -> jax.Array:
        """w [i, j], 0 where key j does not belong to this launch's part of out."""
        query, key = mosaic.hidden_position(0), mosaic.hidden_position(1)
        return jnp.where(query < key if self.part is Part.LATER else query >= key, w, 0.0)
