"""The roles of `channel_output.py`, its shared memory and barriers (`Storage`), and its arrays
(`Walk`).

C is 64 rows of a chunk; F and V are the columns of a tile, and 2 in a shape counts its halves. A
tile of two heads is two blocks of [64, 64].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, Array, Buffer, Item, Ring, Role, Signal
from ato_jax.ops.linear_attention.mosaic_gpu import (
    channel,
    channel_blocks,
    channel_turns,
    chunk_borders,
    frame,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of q and k, of v, and of gates.
STAGES, V_STAGES, GATES_STAGES = 2, 2, 1
MEMORY_REGISTERS = 32
# Registers a thread of VALUES and FEATURES, by whether S and w are multiplied in two parts.
REGISTERS = {False: (136, 88), True: (160, 64)}


def multiplies_two_parts(spec: LinearAttentionSpec) -> bool:
    """Whether S and w are multiplied in two parts: rounded, and what rounding left off."""
    # In float16 a rounding leaves 2e-4, and 6e-4 is allowed.
    return not spec.feature_map.nonnegative and spec.dtype != "float16"


class Cast(NamedTuple):
    """The roles, in the order of their warpgroups' numbers."""

    values: Role
    memory: Role
    features: Role


def cast_of(spec: LinearAttentionSpec) -> Cast:
    values, features = REGISTERS[multiplies_two_parts(spec)]
    return Cast(
        Role("values", values, warpgroups=2),
        Role("memory", MEMORY_REGISTERS),
        Role("features", features, warpgroups=2, unrolled=True),
    )


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    both: Array  # [half of F, half of a chunk, 64] float32: sums of the gates, to be stored
    den: Array  # [V_STAGES, 2, 64] float32: q^_i . z, of each half of F
    gates: Array  # [GATES_STAGES, 2, 64, 64] float32
    halves: Array  # [2, 8, 64] float16: weights that sum the gates over both halves of a step
    k: Array  # [STAGES, 64, F]; k~ once it is mapped
    ones: Array  # [2, 8, 64] 1 for each key that is added to z
    onto: Array  # [STAGES, F] float32: the square root of the factor of S and z
    out: Array  # [2, 64, 64], in float32 if XLA adds up blocks
    powers: Array  # [STAGES, heads * 64] float32, in float16: log2 of the powers of queries
    q: Array  # [STAGES, 64, F]; q^ once it is mapped
    rounded: Array  # [2, 64, 64] float16: the gates as products read them
    s: Array  # [2, 64, F] S of each half of V; in two parts also what rounding S leaves off
    since_middle: Array  # [64, 64] float16: weights that sum the gates from the middle row on
    v: Array  # [V_STAGES, 2, 64, 64]
    z_rows: Array  # [2, 8, 64] z of each half of F, rounded, in all 8 rows
    z: Array  # [2, 64] float32: z ahead of the piece
    rows: Ring  # of q and k
    values: Ring  # of v
    gates_ring: Ring
    mapped: Signal  # the slot of `rows` holds q^ and k~, and onto
    den_known: Signal  # q^_i . z is in the slot of `den`
    start: Signal  # s and z ahead of the piece have landed
    weights_stored: Signal  # halves, ones and since_middle

    barriers = (
        "den_known",
        "rows.consumed",
        "gates_ring.consumed",
        "gates_ring.produced",
        "leave",
        "rows.produced",
        "mapped",
        "start",
        "values.consumed",
        "values.produced",
        "weights_stored",
    )


def storage_of(spec: LinearAttentionSpec, keeps_features: bool) -> Storage:
    tiling, heads, cast = frame.tiling(spec), frame.heads_of_tile(spec), cast_of(spec)
    out_type = tiling.of_rows_in_float32 if channel_blocks.adds_up(spec) else tiling.shared
    q, k = (Buffer(tiling.tiles(STAGES), copies=tiling.blocks) for _ in range(2))
    v = Buffer(tiling.shared(V_STAGES, 2, C, HALF), copies=2)
    gates = Buffer(tiling.of_rows_in_float32(GATES_STAGES, 2, C, HALF), copies=2)
    s = Buffer(tiling.shared(2, HALF, spec.F), copies=2)
    z = Buffer(plgpu.SMEM((2, HALF), F32), copies=2)
    powers = None
    if mosaic.has_units(tiling.dtype):
        powers = Buffer(plgpu.SMEM((STAGES, heads * C), F32), copies=heads)
    return Storage(
        both=Buffer(plgpu.SMEM((2, 2, HALF), F32)) if keeps_features else None,
        den=Buffer(plgpu.SMEM((V_STAGES, 2, C), F32)),
        gates=gates,
        halves=Buffer(channel.shared(spec, 2, ALIKE, C)),
        k=k,
        ones=Buffer(tiling.shared(2, ALIKE, C)),
        onto=Buffer(plgpu.SMEM((STAGES, F), F32)),
        out=Buffer(out_type(2, C, HALF)),
        powers=powers,
        q=q,
        rounded=Buffer(channel.shared(spec, 2, C, HALF)),
        s=s,
        since_middle=Buffer(channel.shared(spec, C, C)),
        v=v,
        z_rows=Buffer(tiling.shared(2, ALIKE, HALF)),
        z=z,
        rows=Ring.of(STAGES, filled=(q, k, powers), readers=(cast.features, cast.values)),
        values=Ring.of(V_STAGES, filled=(v,), readers=(cast.values,)),
        gates_ring=Ring.of(GATES_STAGES, filled=(gates,), readers=(cast.features,)),
        mapped=Signal((cast.features,), within="rows"),
        den_known=Signal((cast.features,), within="values"),
        start=Signal((s, z)),
        weights_stored=Signal((cast.features,)),
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory, and its storage."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    own: Storage
    q: Any
    k: Any
    v: Any
    s: Any
    z: Any
    gates: Any
    turns: Any  # how many each chunk has
    steep: Any  # which pieces have a chunk of more than one turn
    begins: Any = None  # with segments, as `borders.OfSequence` has them
    borders_of: Any = None
    powers_of_queries: Any = None  # in float16, as `channel_powers.Powers` has them
    powers_of_heads: Any = None
    out: Any = None
    den: Any = None  # where XLA adds up blocks and divides
    q_features: Any = None  # q^ and k~, for the gradients
    k_features: Any = None
    halves: Any = None  # the sums of the gates over each half of a chunk

    @property
    def tiling(self) -> mosaic.Tiling:
        return frame.tiling(self.spec)

    @property
    def heads(self) -> int:
        """The number of heads in a tile."""
        return frame.heads_of_tile(self.spec)

    @property
    def in_two_parts(self) -> bool:
        return multiplies_two_parts(self.spec)

    @property
    def in_float16(self) -> bool:
        return self.powers_of_heads is not None

    @property
    def keeps_features(self) -> bool:
        return self.halves is not None

    @property
    def has_borders(self) -> bool:
        return self.borders_of is not None

    @property
    def adds_up(self) -> bool:
        """Whether out and den are written in float32, and XLA adds up those of several blocks."""
        return channel_blocks.adds_up(self.spec)

    def kv_head(self, item: Item) -> Any:
        return lax.div(item.head, self.spec.H // self.spec.G)

    def power_of(self, item: Item, half: Any, name: int) -> Any:
        """In float16, one of the powers (`channel_powers.Power`) of the head of keys that half a
        tile belongs to."""
        head = self.tiling.head_of(self.kv_head(item), half)
        return self.powers_of_heads[item.batch, head, name]

    def times(self, x: jax.Array, item: Item, half: Any, name: int) -> jax.Array:
        """x times such a power; x itself in bfloat16."""
        return x * self.power_of(item, half, name) if self.in_float16 else x

    def borders(self, item: Item, chunk: Any) -> chunk_borders.Borders:
        return chunk_borders.of_chunk(self.begins, self.borders_of, item, chunk)

    def each_step(
        self,
        item: Item,
        start: Callable[[bool], Any],
        do: Callable[[channel_turns.Step, Any], Any],
    ) -> Any:
        """`channel_turns.each_step` for the steps of an item."""
        head = self.kv_head(item)
        return channel_turns.each_step(
            self.steep, self.turns, item, head, start, do, self.in_float16
        )
