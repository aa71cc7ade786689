"""The roles of `key_gradient.py`, its shared memory and barriers (`Storage`), its inputs
(`Arrays`), and `Walk`, which says what a launch computes and in how many parts it multiplies.

C is 64 rows of a chunk; F and V are the columns of a tile, which holds one or two heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
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
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F, V
from ato_jax.ops.linear_attention.mosaic_gpu.two_parts import (
    rounds_pairs,
    splits_in_walk,
    splits_states,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of q, g, inverse and e; and of k and v.
STAGES, K_STAGES = 2, 2
# Registers a thread of DV, DK and STATE, by heads in a tile: with two heads a state is half as
# large, and there are twice as many pairs of rows.
REGISTERS = {1: (144, 144, 200), 2: (176, 176, 136)}
DV, DK = 0, 1  # warpgroups, and their places in `out` and `flows`


def keeps_start(spec: LinearAttentionSpec) -> bool:
    """Whether `Arrays.r` is in float32: if R behind the last piece is the cotangent of a state.

    The cotangent may be far larger than the terms of chunks. If R is rounded to bfloat16 here, and
    again when it is stored for each chunk, terms below half of its last digit are lost, all with
    the same sign for features of one sign: dv then has an error of 4.5e-3. Float16, with units, has
    three bits more.
    """
    tiling = frame.tiling(spec)
    return spec.return_state and not frame.is_wide(spec) and not mosaic.has_units(tiling.dtype)


class Cast(NamedTuple):
    """The roles, in the order of their warpgroups' numbers."""

    dv: Role
    dk: Role
    memory: Role
    state: Role


def cast_of(heads: int) -> Cast:
    dv, dk, state = REGISTERS[heads]
    memory = Role("memory", mosaic.MEMORY_REGISTERS)
    return Cast(Role("dv", dv), Role("dk", dk), memory, Role("state", state))


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    before: Array  # [64, 64] at [t, j] 1 where j < t; for steep chunks
    e: Array  # [STAGES, heads * 64] float32
    flows: Array  # [2, heads * 64] float32: the sums of DV and DK for the gradient of a decay
    g: Array  # [STAGES, 64, V], or two heads of [64, 64]
    gates: Array  # [STAGES, heads * 64] float32
    inverse: Array  # [STAGES, heads * 64] float32
    k: Array  # [K_STAGES, 64, F], or two heads of [64, 64]
    minus_e: Array  # [heads, 8, 64] -e: rounded in four rows, what rounding left off in four
    out: Array  # [2, 64, V] dv and dk, or two heads of [64, 64] each
    pairs: Array  # [heads, 2, 64, 64] b of a steep chunk: rounded, and what rounding left off
    pairs_units: Array  # [heads * 64] float32: in float16 the units of the rows of b
    q: Array  # as g
    r: Array  # [V, F] R scaled to the chunk's middle row, or two heads of [64, 64]
    r_rest: Array  # as r: what rounding left off, if R is multiplied in two parts
    r_rows: Array  # [V] float32, for float16: the units of R's rows, then one unit for all of R
    reading_g: Array  # as one slot of g: with segments, g of the queries that earlier chunks see
    u: Array  # [F] float32
    u_start: Array  # [F] float32: u behind the piece
    v: Array  # as k
    rows: Ring  # of q, g, inverse, e and gates
    keys: Ring  # of k and v
    state: Ring  # of r and u
    pairs_ring: Ring | None
    mapped: Signal  # phi' and -e lie in the slot
    keys_mapped: Signal | None  # phi(k) lies in k's place; with a decay, for some maps
    start: Signal  # u_start of a piece has landed, and r unless it is read from global memory
    shares: Signal | None  # dv or dk of another launch has landed in its place in `out`

    barriers = (
        "rows.consumed",
        "keys.consumed",
        "keys.produced",
        "keys_mapped",
        "leave",
        "rows.produced",
        "mapped",
        "pairs_ring.consumed",
        "pairs_ring.produced",
        "state.consumed",
        "state.produced",
        "start",
        "shares",
    )


def storage_of(spec: LinearAttentionSpec, some_steep: bool, adds: bool = False) -> Storage:
    tiling, gated = row_copies.tiling(spec), spec.decay is not None
    copies = row_copies.copies_of(tiling)
    heads, shared = tiling.heads, tiling.shared
    cast = cast_of(heads)
    replaces_keys = gated and feature_maps.features(spec).slope_is_known
    splits, has_e = splits_in_walk(spec, some_steep), not splits_states(spec)
    masks = bool(spec.segments) and not some_steep
    # Beside what rounding R left off, and pairs or masked rows of g, there is no room for more.
    k_stages = 1 if splits and (some_steep or masks) else K_STAGES

    def of_rows() -> Buffer:
        return Buffer(tiling.tiles(STAGES), copies=copies)

    def of_keys() -> Buffer:
        return Buffer(tiling.tiles(k_stages), copies=copies)

    def vectors() -> Buffer:
        return Buffer(plgpu.SMEM((STAGES, heads * C), F32), copies=heads)

    q, g = of_rows(), of_rows()
    e, inverse = (vectors(), vectors()) if has_e else (None, None)
    k, v = of_keys(), of_keys()
    gates = vectors() if gated else None
    r = Buffer(shared(V, spec.F), copies=heads)
    u_start = Buffer(plgpu.SMEM((F,), F32), copies=heads) if has_e else None
    r_rows = pairs_units = None
    if mosaic.has_units(tiling.dtype):
        if some_steep:
            pairs_units = Buffer(plgpu.SMEM((heads * C,), F32))
        r_rows = Buffer(plgpu.SMEM((V,), F32), copies=heads)
    starts = (None if keeps_start(spec) else r), u_start, r_rows
    out = Buffer(tiling.tiles(2), copies=copies)
    return Storage(
        before=Buffer(shared(C, C)) if some_steep else None,
        e=e,
        flows=Buffer(plgpu.SMEM((2, heads * C), F32)) if gated else None,
        g=g,
        gates=gates,
        inverse=inverse,
        k=k,
        minus_e=Buffer(shared(heads, ALIKE, C)) if has_e else None,
        out=out,
        pairs=Buffer(shared(heads, 2, C, C)) if some_steep else None,
        pairs_units=pairs_units,
        q=q,
        r=r,
        r_rest=Buffer(shared(V, spec.F)) if splits else None,
        r_rows=r_rows,
        reading_g=Buffer(tiling.tiles(1)) if masks else None,
        u=Buffer(plgpu.SMEM((F,), F32)) if has_e else None,
        u_start=u_start,
        v=v,
        rows=Ring.of(STAGES, (q, g, inverse, e, gates), (cast.state, cast.dv, cast.dk)),
        keys=Ring.of(k_stages, (k, v), (cast.dv, cast.dk)),
        state=Ring.of(1, (cast.state,), (cast.dv, cast.dk)),
        pairs_ring=Ring.of(1, (cast.dk,), (cast.dv,)) if some_steep else None,
        mapped=Signal((cast.state,), within="rows"),
        keys_mapped=Signal((cast.dv,), within="keys") if replaces_keys else None,
        start=Signal(tuple(one for one in starts if one is not None)),
        shares=Signal((out,), 2) if adds else None,
    )


class Arrays(NamedTuple):
    """The inputs; inside the kernel, references to them."""

    q: Any
    k: Any
    v: Any
    g: Any
    inverse: Any  # [B, H, T up to a whole chunk] float32
    e: Any  # of the same shape
    r: Any  # [B, G, P, V, F]: R behind each piece, summed over the group; see `keeps_start`
    u: Any  # [B, G, P, F] float32
    gates: Any = None  # [B, G, ..] with a decay; as `output` has them
    steep: Any = None
    lengths: Any = None  # [B] int32: rows behind them have no gradient, and give none
    # In float16 units of the rows of r, [B, G, P, V], and of inverse and e, [B, H, chunks].
    r_units: Any = None
    q_units: Any = None
    e_units: Any = None
    k_powers: Any = None  # in float16, [B, G], as `powers.py` has them
    # dk and dv of the other walk, to which the results are added.
    dk: Any = None
    dv: Any = None
    # With segments, as `borders.OfSequence` has them, `borders` being its `chunks`.
    ends: Any = None
    borders: Any = None


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory, and its storage. With a decay
    `some_steep` says whether the launch has the pieces with a steep chunk, or all others."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    some_steep: bool
    arrays: Arrays
    dk: Any
    dv: Any
    # With a decay I(t), A_j, and R and u at some chunks; if states are multiplied in two parts,
    # both parts of R at each piece's start in place of the latter.
    flows: Sequence[Any]
    own: Storage

    @property
    def tiling(self) -> mosaic.Tiling:
        return row_copies.tiling(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def replaces_keys(self) -> bool:
        """Whether phi(k) takes k's place, since its derivative is known from phi(k)."""
        return self.own.keys_mapped is not None

    @property
    def gated(self) -> bool:
        return self.spec.decay is not None

    @property
    def from_the_end(self) -> bool:
        """Whether the deal counts rows from the end, by which each key's queries are those ahead of
        it in memory, and the walk begins at the sequence's start."""
        return self.deal.end is not None

    def sees(self) -> jax.Array:
        """[j, i]: whether query i sees key j of the same chunk."""
        if self.from_the_end:
            return mosaic.hidden_position(1) < mosaic.hidden_position(0)
        return mosaic.hidden_position(1) >= mosaic.hidden_position(0)

    def seen(self, x: jax.Array) -> jax.Array:
        """x [j, i], 0 where query i does not see key j."""
        x = jnp.where(self.sees(), x, 0.0)
        # Without the barrier the selected numbers would be rounded singly, not in pairs.
        return lax.optimization_barrier(x)

    def borders(self, item: Item, chunk: Any) -> chunk_borders.Borders:
        """The borders of chunk number `chunk`, where 0 is the last chunk of the item."""
        if self.arrays.borders is None or self.some_steep:
            return chunk_borders.Borders()
        number = item.chunks - 1 - chunk
        return chunk_borders.of_chunk(self.arrays.ends, self.arrays.borders, item, number)

    @property
    def heads(self) -> int:
        return self.tiling.heads

    @property
    def dtype(self) -> Any:
        return self.tiling.dtype

    @property
    def has_units(self) -> bool:
        return mosaic.has_units(self.dtype)

    def units(self, item: Item, chunk: Any, member: Any) -> list[tuple[Any, Any]]:
        """The units of phi' and of e for each head of the tile. Chunks are counted from the end."""
        number = lax.div(item.first_row, C) + item.chunks - 1 - chunk
        of_member = self.of_queries(item, member)
        at = ((item.batch, head, number) for head in self.heads_of(of_member))
        return [(self.arrays.q_units[one], self.arrays.e_units[one]) for one in at]

    def power(self, item: Item, n: int) -> Any:
        """The power of two of the features of head n's keys in float16; else None."""
        if self.arrays.k_powers is None:
            return None
        return self.arrays.k_powers[item.batch, self.tiling.head_of(item.head, n)]

    @property
    def has_e(self) -> bool:
        """Whether the kernel reads e and computes u; else both count as 0."""
        return not splits_states(self.spec)

    @property
    def keeps_start(self) -> bool:
        return keeps_start(self.spec)

    @property
    def splits(self) -> bool:
        """Whether R is multiplied in two parts."""
        return splits_in_walk(self.spec, self.some_steep)

    @property
    def rounds_b(self) -> bool:
        """Whether v_j . g_i is rounded, as in the walk over queries."""
        return rounds_pairs(self.spec, self.some_steep)

    @property
    def pairs_parts(self) -> int:
        """The number of parts in which a b is multiplied for the gradient of the decays. There are
        two where the gradient is one sum over all steps, which may cancel, and in float16, where
        all pairs of the chunk have one unit."""
        return 2 if self.spec.decay == "head" or self.has_units else 1

    @property
    def group_size(self) -> int:
        """The number of query heads that read the item's keys: steps of `rows` for each chunk."""
        return self.spec.H // self.spec.G

    def row_step(self, step: Any, member: Any) -> Any:
        """The step of `rows` for the queries of a member of the group, at a step of `keys`."""
        return step if self.group_size == 1 else step * self.group_size + member

    def of_queries(self, item: Item, member: Any) -> Item:
        """The item with the head of a member's queries."""
        if self.group_size == 1:
            return item
        first = self.tiling.head_of(item.head, 0) * self.group_size + member
        if self.heads == 1:
            return item._replace(head=first)
        return item._replace(head=mosaic.Heads(first, self.group_size))

    def each_other_member(self, do: Callable[[Any, Any], Any], carried: Any) -> Any:
        """Runs `do(member, carried)` for all members of the group but the first."""
        if self.group_size == 1:
            return carried
        return lax.fori_loop(1, self.group_size, do, carried)

    def each(self, do: Callable[[Item], None]) -> Any:
        takes = chunk_decay.takes_pieces(self.arrays.steep, self.some_steep)
        return self.deal.each(do, takes=takes)

    def count(self, item: Item, chunk: Any) -> Any:
        """The number of rows of a chunk, counted from the end, that are within the lengths; None if
        all are."""
        if self.arrays.lengths is None:
            return None
        return item.rows_within(item.chunks - 1 - chunk, self.arrays.lengths)

    def heads_of(self, item: Item) -> list[Any]:
        """Their numbers, in global memory."""
        return [self.tiling.head_of(item.head, head) for head in range(self.heads)]

    def in_heads(self, tiles: Any, slot: Any) -> list[Any]:
        """A slot's tile of each head."""
        return [self.tiling.head_in(tiles, slot, head) for head in range(self.heads)]

    def gates_in(self, slot: Any) -> list[chunk_decay.Gates]:
        of_heads = self.tiling.by_heads(self.own.gates.at[slot])
        of_walk = self.some_steep, self.from_the_end
        return [chunk_decay.gates_of(self.spec, own, *of_walk) for own in of_heads]

    def of_state(self, n: int, rows: Any) -> list[tuple[Any, Any]]:
        """The factors of rows times R of head n."""
        found = [self.own.r, *([self.own.r_rest] if self.splits else [])]
        return [(rows, self.tiling.by_heads(part)[n]) for part in found]

    def parts_of_r(self, r: Any = None) -> list[list[Any]]:
        """R of each head; with a decay, of 128 columns in two parts, as there are no registers to
        multiply it whole."""
        r = self.own.r if r is None else r
        if self.heads == 1 and not self.gated:
            return [[r]]
        halves = [r.at[pl.ds(half * HALF, HALF)] for half in range(2)]
        return [halves] if self.heads == 1 else [[half] for half in halves]
