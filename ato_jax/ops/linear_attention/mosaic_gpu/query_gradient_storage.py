"""The arrays of `query_gradient.py` in global memory (`Arrays`, `Left`) and in shared memory
(`Storage`), and `Walk`, which says what a launch computes and in how many parts it multiplies.

C is 64 rows of a chunk; F and V are the columns of a tile, and 2 in a shape counts its halves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, Array, Buffer, Item, Ring, Role, Signal
from ato_jax.ops.linear_attention.mosaic_gpu import (
    chunk_borders,
    chunk_decay,
    feature_maps,
    frame,
    row_copies,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.two_parts import (
    adds_up_e,
    chunks_in_two_parts,
    rounds_pairs,
    splits_in_walk,
    splits_states,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of g and v, of q, and of k, which is loaded, mapped and multiplied.
STAGES, Q_STAGES, K_STAGES = 2, 2, 3
# Registers a thread of VALUES and of FEATURES: without a decay, and with one.
OWN_REGISTERS, GATED_REGISTERS = (216, 56), (224, 40)


class Cast(NamedTuple):
    """The roles, in the order of their warpgroups."""

    values: Role
    memory: Role
    features: Role


def cast_of(gated: bool) -> Cast:
    values, features = GATED_REGISTERS if gated else OWN_REGISTERS
    memory = Role("memory", mosaic.MEMORY_REGISTERS)
    return Cast(Role("values", values, warpgroups=2), memory, Role("features", features))


class Arrays(NamedTuple):
    """The kernel's inputs, in the order of its operands.

    s, z, gates, steep, lengths and s_units are as in `output`; with segments begins and borders are
    those of `borders.OfSequence`, `chunks` the latter. `k_powers` are those of keys in
    float16 (`powers.py`). The launch adds `ones`, and `least`, the least denominators there. Where
    queries also see keys of another launch, `inverse` and `e` are given and count all keys; dq is
    then the share of this launch's keys, and `share`, where it is given, is that of the other
    launch and is added to it.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    s: Any
    z: Any
    ones: Any = None
    s_units: Any = None
    k_powers: Any = None
    least: Any = None
    lengths: Any = None
    gates: Any = None
    steep: Any = None
    inverse: Any = None
    e: Any = None
    share: Any = None
    begins: Any = None
    borders: Any = None


class Left(NamedTuple):
    """The arrays that the kernel writes. Calls with a decay also have `flows`, and S and z ahead of
    some chunks. Float16 calls also have `largest`, each query's largest feature in each half."""

    dq: Any
    inverse: Any = None
    e: Any = None
    largest: Any = None  # [2 / heads of a tile, B, H, T up to a whole chunk]
    flows: Any = None
    kv: Any = None
    kv_units: Any = None  # in float16 those of its columns
    k_sum: Any = None


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    dq: Array  # [2, 2 * 64, 64] two slots of dq, of half of F each. See `Walk.start_in`
    e: Array  # [Q_STAGES, heads * 64] float32, where it is given
    flows: Array  # [2, 2, 64] float32: of each half, by even and odd chunks
    g: Array  # [STAGES, 64, V], or two heads of [64, 64]
    gates: Array  # [K_STAGES, heads * 64] float32
    inverse: Array  # as e
    k: Array  # [K_STAGES, 2, 64, 64]; features once they are mapped
    largest: Array  # as flows, in float16
    least: Array  # [2, 64] float32, in float16: the least denominator, for each row
    ones: Array  # [8, 64]
    parts: Array  # [2, 2, 2, 64] float32: [even or odd chunk, half, terms of a row sum]
    q: Array  # [Q_STAGES, 2, 64, 64]
    rows: Array  # [2 * heads, 2, 64] float32: inverse and e to be stored, by even and odd chunks
    s: Array  # [2, 64, V], with a decay [2, V, 64]: S of half of F each, as products read it
    start_units: Array  # [2, V] float32: the units of S's rows as S is loaded
    units: Array  # [2, 64] float32: of its transpose's as that is multiplied
    v: Array  # as g
    z: Array  # [2, 64] float32
    values: Ring  # of g and v
    keys: Ring  # of k and gates
    queries: Ring  # of q, and of inverse and e where they are given
    mapped: Signal  # the slot of `keys` holds phi(k); in `values` rows that do not count are 0
    start_loaded: Signal  # S and z of a piece, and `ones`
    exchanged: Signal  # both halves have left their row sums
    share_loaded: Signal | None  # the share of dq of each half

    barriers = (
        "exchanged",
        "values.consumed",
        "keys.consumed",
        "keys.produced",
        "mapped",
        "leave",
        "values.produced",
        "queries.consumed",
        "queries.produced",
        "share_loaded",
        "start_loaded",
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory, and its storage. With a decay,
    one launch has the pieces with a steep chunk and another one has all others: the code for steep
    chunks would cost the others registers even as a loop of its own."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    some_steep: bool
    arrays: Arrays
    left: Any = None  # `Left`
    own: Any = None  # `Storage`

    @property
    def tiling(self) -> mosaic.Tiling:
        return row_copies.tiling(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def heads(self) -> int:
        """The number of heads in a tile."""
        return frame.heads_of_tile(self.spec)

    @property
    def group_size(self) -> int:
        return self.spec.H // self.spec.G

    @property
    def gated(self) -> bool:
        return self.spec.decay is not None

    @property
    def has_units(self) -> bool:
        return mosaic.has_units(self.tiling.dtype)

    @property
    def given(self) -> bool:
        """Whether inverse and e are."""
        return self.arrays.inverse is not None

    @property
    def adds(self) -> bool:
        return self.arrays.share is not None

    @property
    def leaves_weights(self) -> bool:
        return self.spec.normalize and not self.given

    @property
    def leaves_state(self) -> bool:
        return self.gated and not splits_states(self.spec)

    @property
    def sums_keys(self) -> bool:
        # A returned state's cotangent is one of z, too.
        return self.spec.normalize or self.gated and self.spec.return_state

    @property
    def splits(self) -> bool:
        return splits_in_walk(self.spec, self.some_steep)

    @property
    def few_chunks(self) -> int:
        return chunks_in_two_parts(self.spec)

    @property
    def w_parts(self) -> int:
        """The number of parts in which w is multiplied: rounded, and what rounding left off."""
        if rounds_pairs(self.spec, self.some_steep):
            return 1
        return 2 if self.gated or adds_up_e(self.spec) else 1

    def each(self, do: Callable[[Item], None]) -> Any:
        steep = self.arrays.steep
        takes = chunk_decay.takes_pieces(steep, self.some_steep, self.group_size)
        return self.deal.each(do, takes=takes)

    def of_keys(self, item: Item) -> Item:
        """The item with the head of its keys."""
        if self.group_size == 1:
            return item
        return item._replace(head=frame.head_of_keys(self.spec, item.head))

    def power(self, item: Item, half: Any) -> Any:
        """The power of two of keys, in float16; else None."""
        if self.arrays.k_powers is None:
            return None
        head = self.tiling.head_of(self.of_keys(item).head, half)
        return self.arrays.k_powers[item.batch, head]

    def start_in(self, half: Any) -> Any:
        """dq's place, which holds S [V, 64] ahead of the piece until the first chunk; and, if S is
        multiplied in two parts, its second part until a chunk's dq is stored."""
        dq = self.own.dq
        return dq.at[half] if self.heads == 1 else dq.at[half, pl.ds(0, self.spec.V)]

    def gates_in(self, rows: Any, some_steep: bool = True) -> chunk_decay.Gates:
        return chunk_decay.gates_of(self.spec, rows, some_steep, self.deal.end is not None)

    def borders(self, item: Item, chunk: Any) -> chunk_borders.Borders:
        if self.some_steep:
            return chunk_borders.Borders()
        return chunk_borders.of_chunk(self.arrays.begins, self.arrays.borders, item, chunk)

    def sees_few_keys(self, item: Item, chunk: Any) -> Any:
        return item.first_row + chunk * C < self.few_chunks * C


def storage_of(walk: Walk) -> Storage:
    spec, tiling, heads = walk.spec, walk.tiling, walk.heads
    shared, of_rows = tiling.shared, tiling.of_rows
    cast = cast_of(walk.gated)
    copies = row_copies.copies_of(tiling)

    def of_floats(*shape: int, copies: int = 1) -> Buffer:
        return Buffer(plgpu.SMEM(shape, F32), copies)

    dq = Buffer(of_rows(2, 2 * C, HALF), copies=2)  # of S, which lies there first
    g, v = (Buffer(tiling.tiles(STAGES), copies) for _ in range(2))
    k = Buffer(of_rows(K_STAGES, 2, C, HALF), copies=2)
    q = Buffer(of_rows(Q_STAGES, 2, C, HALF), copies=2)
    ones, z = Buffer(shared(ALIKE, C)), of_floats(2, HALF, copies=2)
    e = inverse = flows = gates = largest = least = start_units = units = share_loaded = None
    if walk.given:
        inverse, e = (of_floats(Q_STAGES, heads * C, copies=heads) for _ in range(2))
    if walk.gated:
        gates = of_floats(K_STAGES, heads * C, copies=heads)
        flows = of_floats(2, 2, C)
    if walk.has_units:
        largest, units = of_floats(2, 2, C), of_floats(2, HALF)
        start_units = of_floats(2, spec.V, copies=2)
    if walk.arrays.least is not None:
        least = of_floats(2, C, copies=2)
    if walk.adds:
        share = dataclasses.replace(dq, copies=1)
        share_loaded = Signal((share,), slots=2)
    start = (part for part in (dq, z, ones, start_units, least) if part is not None)
    return Storage(
        dq=dq,
        e=e,
        flows=flows,
        g=g,
        gates=gates,
        inverse=inverse,
        k=k,
        largest=largest,
        least=least,
        ones=ones,
        parts=of_floats(2, 2, 2, C),
        q=q,
        rows=of_floats(2 * heads, 2, C),
        s=Buffer(shared(2, *((spec.V, HALF) if walk.gated else (HALF, spec.V)))),
        start_units=start_units,
        units=units,
        v=v,
        z=z,
        values=Ring.of(STAGES, filled=(g, v), readers=(cast.values,)),
        keys=Ring.of(K_STAGES, filled=(k, gates), readers=(cast.values,)),
        queries=Ring.of(Q_STAGES, filled=(q, inverse, e), readers=(cast.values,)),
        mapped=Signal((cast.features,), within="keys"),
        start_loaded=Signal(tuple(start)),
        exchanged=Signal((cast.values,)),
        share_loaded=share_loaded,
    )


class Chunk(NamedTuple):
    """One chunk of half of F, and where it lies."""

    item: Item
    number: Any
    half: Any
    head: Any
    slot: Any
    q_slot: Any
    k_slot: Any
    parity: Any
    count: Any  # how many of its rows count; None: all
    features: Any  # phi(k) [64, 64]
    g: Any  # [64, V]
    v: Any
    gates: Any = None
    lasting: Any = None  # [64] with a decay, exp2(G_i - G_m)
    few: Any = None  # whether its queries see few keys; None where that changes nothing
    rest_of_keys: Any = None  # there: what rounding phi(k) leaves off
    borders: chunk_borders.Borders = chunk_borders.Borders()
