"""The roles of `channel_key_gradient.py`, its shared memory and barriers (`Storage`), its inputs
(`Arrays`), and its launch (`Walk`).

C is 64 rows of a chunk; F and V are the columns of a tile. A tile of two heads is two blocks of
[64, 64], and a vector of it has one head's part behind the other's.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, Array, Buffer, Item, Ring, Role, Signal
from ato_jax.ops.linear_attention.mosaic_gpu import channel, channel_blocks, chunk_borders, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_storage import Cast
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of q, g, inverse, e and onto; and of k and v.
STAGES, K_STAGES = 2, 2
# Registers a thread of DV, DK and STATE, by heads in a tile: with two heads a state is half as
# large, and there are twice as many a and b.
REGISTERS = {1: (144, 144, 200), 2: (176, 176, 136)}


def cast_of(heads: int) -> Cast:
    dv, dk, state = REGISTERS[heads]
    memory = Role("memory", mosaic.MEMORY_REGISTERS)
    return Cast(Role("dv", dv), Role("dk", dk), memory, Role("state", state))


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    crossing: Array  # [F] float32: E of a run, to be stored
    dv: Array  # [1, 64, V], or [64, 64] float32 if XLA adds up blocks: half of dv at a time
    e: Array  # [STAGES, heads * 64] float32
    flow: Array  # [2, 64, 64] float32: of each half of F
    g: Array  # [STAGES, 64, V]
    inverse: Array  # [STAGES, heads * 64] float32
    k: Array  # [K_STAGES, 64, F]
    k_sum: Array  # [F] float32: z ahead of a run
    kv: Array  # [64, 64] a quarter of S ahead of a run, half of it with two heads
    minus_e: Array  # [heads * 8, 64] -e: rounded in four rows, what rounding left off in four
    onto: Array  # [STAGES, F] float32: the square root of the factor of R and u
    q: Array  # [STAGES, 64, F]; q' once it is mapped
    r: Array  # [F, V] R^T, or that of each head, [64, 64]
    u: Array  # [F] float32
    u_start: Array  # [F] float32: u behind the piece
    v: Array  # [K_STAGES, 64, V]
    rows: Ring  # of q, g, inverse, e and onto
    keys: Ring  # of k and v
    state: Ring  # of r and u
    kv_ring: Ring
    mapped: Signal  # q' lies in the slot of q
    start: Signal  # r and u_start behind the piece have landed
    k_sum_loaded: Signal

    barriers = (
        "rows.consumed",
        "keys.consumed",
        "keys.produced",
        "k_sum_loaded",
        "kv_ring.consumed",
        "kv_ring.produced",
        "leave",
        "rows.produced",
        "mapped",
        "state.consumed",
        "state.produced",
        "start",
    )


def storage_of(spec: LinearAttentionSpec) -> Storage:
    tiling, heads = frame.tiling(spec), frame.heads_of_tile(spec)
    cast = cast_of(heads)

    def tiles(slots: int) -> Buffer:
        return Buffer(tiling.tiles(slots), copies=tiling.blocks)

    def vectors(*shape: int) -> Buffer:
        return Buffer(plgpu.SMEM(shape, F32), copies=heads)

    adds_up = channel_blocks.adds_up(spec)
    q, g = tiles(STAGES), tiles(STAGES)
    k, v = tiles(K_STAGES), tiles(K_STAGES)
    e, inverse = vectors(STAGES, heads * C), vectors(STAGES, heads * C)
    onto = vectors(STAGES, F)
    r = Buffer(tiling.shared(F, spec.V), copies=heads)
    u_start, k_sum = vectors(F), vectors(F)
    kv = Buffer(tiling.shared(HALF, HALF))
    return Storage(
        crossing=vectors(F),
        dv=Buffer(tiling.of_rows_in_float32(C, HALF) if adds_up else tiling.tiles(1)),
        e=e,
        flow=Buffer(tiling.of_rows_in_float32(2, C, HALF)),
        g=g,
        inverse=inverse,
        k=k,
        k_sum=k_sum,
        kv=kv,
        minus_e=Buffer(tiling.shared(heads * ALIKE, C)),
        onto=onto,
        q=q,
        r=r,
        u=vectors(F),
        u_start=u_start,
        v=v,
        rows=Ring.of(STAGES, (q, g, inverse, e, onto), (cast.state, cast.dv, cast.dk)),
        keys=Ring.of(K_STAGES, (k, v), (cast.dv, cast.dk)),
        state=Ring.of(1, (cast.state,), (cast.dv, cast.dk)),
        kv_ring=Ring.of(1, (kv,), (cast.state,)),
        mapped=Signal((cast.state,), within="rows"),
        start=Signal((r, u_start)),
        k_sum_loaded=Signal((k_sum,)),
    )


class Arrays(NamedTuple):
    """The inputs, in the order of the kernel's operands; inside the kernel, references to them."""

    q: Any  # q^ of the forward pass, [B, T, H, D]
    k: Any  # k~
    v: Any
    g: Any
    inverse: Any  # as `channel_query_gradient` returns it, and so e, kv and k_sum
    e: Any
    r: Any  # R^T behind each piece, [B, H, P, D, V] in bfloat16
    u: Any  # u behind each piece, [B, H, P, D] float32
    onto: Any  # `channel_backward.Factors.of_queries`, [B, H, chunks * D]
    kv: Any
    ends: Any = (
        None  # with segments, as `borders.OfSequence` has them, `borders` being its `chunks`
    )
    borders: Any = None
    k_sum: Any = None  # None without a normaliser


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory, and its storage. Here chunks
    are counted from the end of an item: chunk 0 is its last one."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    arrays: Arrays
    flow: Any
    dv: Any
    crossing: Any
    own: Storage

    @property
    def tiling(self) -> mosaic.Tiling:
        return frame.tiling(self.spec)

    @property
    def heads(self) -> int:
        """The number of heads in a tile."""
        return frame.heads_of_tile(self.spec)

    @property
    def adds_up(self) -> bool:
        """Whether dv is written in float32, and XLA adds up several blocks or both walks."""
        return channel_blocks.adds_up(self.spec)

    @property
    def scale_rest(self) -> float:
        """The part of the scale that float32 results are multiplied by."""
        return channel.parts_of_scale(self.spec)[1]

    @property
    def quarters(self) -> list[tuple[int, int]]:
        """The blocks [64, 64] in which S is loaded: the numbers of a half of the features, and of
        a half of V; with two heads in a tile, of all 64 columns of V."""
        return list(itertools.product(range(2), range(self.spec.V // HALF)))

    def heads_of(self, item: Item) -> list[Any]:
        """Their numbers, in global memory."""
        return [self.tiling.head_of(item.head, head) for head in range(self.heads)]

    def in_heads(self, tiles: Any, slot: Any) -> list[Any]:
        """A slot's tile of each head."""
        return [self.tiling.head_in(tiles, slot, head) for head in range(self.heads)]

    def number_of(self, item: Item, chunk: Any) -> Any:
        """The number of a chunk from the item's start on."""
        return item.chunks - 1 - chunk

    def is_first_of_run(self, item: Item, chunk: Any) -> Any:
        return lax.rem(self.number_of(item, chunk), channel.CHUNKS) == 0

    def run_of(self, item: Item, chunk: Any) -> Any:
        return channel.run_of(item, self.number_of(item, chunk))

    def borders(self, item: Item, chunk: Any) -> chunk_borders.Borders:
        if self.arrays.borders is None:
            return chunk_borders.Borders()
        number = self.number_of(item, chunk)
        return chunk_borders.of_chunk(self.arrays.ends, self.arrays.borders, item, number)
