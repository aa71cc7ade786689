"""The roles of `channel_query_gradient.py`, its arrays in global memory (`Arrays`, `Left`), and its
shared memory and barriers (`Storage`).

C is 64 rows of a chunk; D and V are the columns of a tile, and 2 in a shape counts its halves.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, Array, Buffer, Item, Ring, Role, Signal
from ato_jax.ops.linear_attention.mosaic_gpu import chunk_borders, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of g and v, of q, and of k.
STAGES, Q_STAGES, K_STAGES = 2, 2, 2

VALUES = Role("values", registers=232, warpgroups=2)
MEMORY = Role("memory", registers=40)
ROLES = mosaic.Roles((VALUES, MEMORY))


class Arrays(NamedTuple):
    """The kernel's inputs, in the order of its operands: those of `channel_query_gradient`, with
    `ones` [8, C]. With segments begins and chunks are those of `borders.OfSequence`."""

    x: Any
    q: Any
    k: Any
    v: Any
    g: Any
    s: Any
    z: Any
    onto: Any
    ones: Any
    begins: Any = None
    chunks: Any = None
    inverse: Any = None  # and e: where the kernel cannot compute them
    e: Any = None


class Left(NamedTuple):
    """The arrays that the kernel writes: as `channel_query_gradient` returns them."""

    dq: Any
    flow: Any
    kv: Any
    inverse: Any = None  # with a normaliser, unless they are given
    e: Any = None
    k_sum: Any = None  # with a normaliser


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    flow: Array  # [2, 64, 64] float32
    g: Array  # [STAGES, 64, V], or two heads of [64, 64]
    k: Array  # [K_STAGES, 2, 64, 64] k~
    ones: Array  # [8, 64]
    onto: Array  # [K_STAGES, D] float32
    parts: Array  # [2, 2, 2, 64] float32: [even or odd chunk, half, terms of a row sum]
    q: Array  # [Q_STAGES, 2, 64, 64] q^, in whose place dq is stored
    rows: Array  # [2 * heads, 64] float32: inverse and e, to be stored
    s: Array  # [2, 64, V] S^T of half of D each, as products read it
    v: Array  # as g
    weights: Array  # [2, STAGES, 64] float32: inverse and e, where they are given
    x: Array  # [2, 64, 64] queries
    z: Array  # [2, 64] float32
    values: Ring  # of g, v and weights
    keys: Ring  # of k and onto
    queries: Ring  # of q; a slot is consumed once dq has been stored from it
    inputs: Ring  # of x
    start_loaded: Signal  # S and z of a piece, and `ones`
    exchanged: Signal | None  # both halves have left their terms of the row sums in `parts`

    barriers = (
        "exchanged",
        "values.consumed",
        "keys.consumed",
        "keys.produced",
        "leave",
        "values.produced",
        "queries.consumed",
        "queries.produced",
        "start_loaded",
        "inputs.consumed",
        "inputs.produced",
    )


def storage_of(spec: LinearAttentionSpec, is_given: bool) -> Storage:
    """`is_given`: whether the weights are."""
    tiling = frame.tiling(spec)
    heads, shared = tiling.heads, tiling.shared
    g, v = (Buffer(tiling.tiles(STAGES), copies=tiling.blocks) for _ in range(2))
    q = Buffer(shared(Q_STAGES, 2, C, HALF), copies=2)
    k = Buffer(shared(K_STAGES, 2, C, HALF), copies=2)
    x = Buffer(shared(2, C, HALF), copies=2)
    onto = Buffer(plgpu.SMEM((K_STAGES, F), F32), copies=heads)
    s = Buffer(shared(2, HALF, spec.V), copies=2)
    z = Buffer(plgpu.SMEM((2, HALF), F32), copies=2)
    ones = Buffer(shared(ALIKE, C))
    parts = weights = exchanged = None
    if is_given:
        weights = Buffer(plgpu.SMEM((2, STAGES, C), F32), copies=2)
    elif heads == 1:
        parts = Buffer(plgpu.SMEM((2, 2, 2, C), F32))
        exchanged = Signal((VALUES,))
    return Storage(
        flow=Buffer(tiling.of_rows_in_float32(2, C, HALF)),
        g=g,
        k=k,
        ones=ones,
        onto=onto,
        parts=parts,
        q=q,
        rows=Buffer(plgpu.SMEM((2 * heads, C), F32)),
        s=s,
        v=v,
        weights=weights,
        x=x,
        z=z,
        values=Ring.of(STAGES, filled=(g, v, weights), readers=(VALUES,)),
        keys=Ring.of(K_STAGES, filled=(k, onto), readers=(VALUES,)),
        queries=Ring.of(Q_STAGES, filled=(q,), readers=(VALUES,)),
        inputs=Ring.of(1, filled=(x,), readers=(VALUES,)),
        start_loaded=Signal((ones, s, z)),
        exchanged=exchanged,
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory, and its storage."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    arrays: Arrays
    left: Left
    own: Storage

    @property
    def tiling(self) -> mosaic.Tiling:
        return frame.tiling(self.spec)

    @property
    def heads(self) -> int:
        """The number of heads in a tile."""
        return self.tiling.heads

    @property
    def given(self) -> bool:
        """Whether inverse and e are."""
        return self.arrays.inverse is not None

    def borders(self, item: Item, chunk: Any) -> chunk_borders.Borders:
        return chunk_borders.of_chunk(self.arrays.begins, self.arrays.chunks, item, chunk)


class Half(NamedTuple):
    """Half of D of a piece, which one warpgroup of VALUES takes."""

    item: Item
    number: Any  # 0 or 1
    head: Any  # in global memory
    columns: Any  # of a tile


class Chunk(NamedTuple):
    """One chunk of a half, and the slots in which it lies."""

    half: Half
    number: Any
    slot: Any  # of `values`
    q_slot: Any
    k_slot: Any
    parity: Any
