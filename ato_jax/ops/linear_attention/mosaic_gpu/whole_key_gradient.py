"""dk and dv [B, T, G, D] where every query sees every key, without a decay.

`bidirectional.py` launches it with R [F, V], in the dtype of tiles, and u [F], the sums over all
queries (`whole_query_gradient.py`):

    dv_j = R^T phi(k_j)
    dk_j = (R v_j + u) phi'(k_j)        phi' is phi's derivative

Warpgroups, and the barriers between them:

    MEMORY (3)            loads R and u of a head, and its chunks as slots come free, across pieces
      |    |    |
      |    |    |  keys: k loaded
      |    |  values: v loaded
      |  state: R, u and inverse, loaded once an item
      v    v    v
    GRADIENTS (0, 1, 2)   take chunks in turn: phi(k) in registers, dk, then dv

Each slot of `keys` and `values` belongs to one warpgroup of GRADIENTS, which alone consumes it; all
three consume `state`.

    symbol     shape     what it is
    k, v       [64, D]   a chunk's rows
    R, u       [F, V]    sums over all queries; u is [F]
    inverse    [F]       in float16 with a normaliser, `LARGEST` / z
    unit       -         in float16, that of R
    phi        [64, F]   features of the chunk's keys, or shares

Where phi' is computed from k and not from phi(k), registers have no room for k: k stays in its slot
of shared memory until dk is stored, and dv is computed first.

In float16 (`whole_units.py`) R has a unit of its head, by which products are multiplied. With a
normaliser phi(k) becomes shares, which are multiplied by `LARGEST`. Without one phi(k) is rounded
in a unit of its row, by which dv is multiplied; features of identity are exact and have no unit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import (
    F32,
    HALF,
    OF_COLUMNS,
    Array,
    Buffer,
    Item,
    OneOf,
    Ring,
    Role,
    load,
    multiply,
)
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F, V
from ato_jax.ops.linear_attention.mosaic_gpu.whole_units import LARGEST, SumsOfQueries
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# A multiple of the warpgroups of GRADIENTS.
STAGES, STATES = 3, 1

GRADIENTS = Role("gradients", registers=160, warpgroups=3)
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
ROLES = mosaic.Roles((GRADIENTS, MEMORY))
# The first column of each half of F.
FIRSTS = range(0, F, HALF)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    inverse: Array  # [STATES, F] float32, in float16 with a normaliser
    k: Array  # [STAGES, 64, F]
    out: Array  # [2 * 3, 64, F]: dk and dv of each warpgroup
    r: Array  # [STATES, F, V]
    u: Array  # [STATES, F] float32
    v: Array  # [STAGES, 64, V]
    keys: Ring  # of k
    values: Ring  # of v
    state: Ring  # of r, u and inverse

    barriers = (
        "keys.consumed",
        "leave",
        "keys.produced",
        "state.consumed",
        "state.produced",
        "values.consumed",
        "values.produced",
    )


def storage_of(spec: LinearAttentionSpec, of_shares: bool) -> Storage:
    tiling = row_copies.tiling(spec)
    k, v = (Buffer(tiling.tiles(STAGES), row_copies.copies_of(tiling)) for _ in range(2))
    r = Buffer(tiling.shared(STATES, F, V))
    u = Buffer(plgpu.SMEM((STATES, F), F32))
    inverse = Buffer(plgpu.SMEM((STATES, F), F32)) if of_shares else None
    return Storage(
        inverse=inverse,
        k=k,
        out=Buffer(tiling.tiles(2 * GRADIENTS.warpgroups)),
        r=r,
        u=u,
        v=v,
        keys=Ring.of(STAGES, filled=(k,), readers=(OneOf(GRADIENTS),)),
        values=Ring.of(STAGES, filled=(v,), readers=(OneOf(GRADIENTS),)),
        state=Ring.of(STATES, filled=(r, u, inverse), readers=(GRADIENTS,)),
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory, and its storage. r, u, units and
    inverse are those of `SumsOfQueries`."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    own: Storage
    k: Any
    v: Any
    r: Any
    u: Any
    lengths: Any = None
    units: Any = None
    inverse: Any = None
    dk: Any = None
    dv: Any = None

    @property
    def tiling(self) -> mosaic.Tiling:
        return row_copies.tiling(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def of_shares(self) -> bool:
        return self.inverse is not None

    @property
    def in_units(self) -> bool:
        """Whether phi(k) is rounded in units of its rows."""
        return whole_units.rounds_in_units(self.spec)


def whole_key_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    k: jax.Array,
    v: jax.Array,
    sums: SumsOfQueries,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel and returns dk and dv, which are 0 behind the lengths of keys, [B]."""
    arrays = dict(k=k, v=v, r=sums.r, u=sums.u, lengths=lengths)
    arrays |= dict(units=sums.units, inverse=sums.inverse)
    given = {name: array for name, array in arrays.items() if array is not None}

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        return Walk(spec, deal, own, **dict(zip((*given, "dk", "dv"), refs, strict=True)))

    storage = storage_of(spec, of_shares=sums.inverse is not None)
    program = mosaic.Program(ROLES, storage, ((MEMORY, memory), (GRADIENTS, gradients)), bind)
    out_type = tuple(jax.ShapeDtypeStruct(x.shape, row_copies.tiling(spec).dtype) for x in (k, v))
    name = frame.name_of("whole_key_gradient")
    found: tuple[jax.Array, jax.Array] = mosaic.launch(
        name, program, deal, out_type, tuple(given.values())
    )
    return found


def memory(walk: Walk) -> None:
    """Loads the sums over queries of each item, and its chunks."""
    own = walk.own
    steps = walk.deal.each(functools.partial(load_piece, walk))
    own.keys.drain(steps)
    own.values.drain(steps)
    own.state.drain(walk.deal.own)


def load_piece(walk: Walk, item: Item) -> None:
    own = walk.own
    state = own.state.slot(item.number)
    own.state.acquire(item.number)
    of_heads = [(walk.r, own.r), (walk.u, own.u)]  # [F, V] and [F]
    if walk.of_shares:
        of_heads.append((walk.inverse, own.inverse))  # [F]
    for ref, target in of_heads:
        source = ref.at[item.batch, item.head]
        plgpu.copy_gmem_to_smem(source, target.at[state], own.state.produced.at[state])

    def load_chunk(chunk: Any, _: None) -> None:
        step = item.before + chunk
        slot = own.keys.slot(step)
        for ref, tiles, ring in ((walk.k, own.k, own.keys), (walk.v, own.v, own.values)):
            ring.acquire(step)
            rows = item.rows(chunk)
            walk.tiling.copy_tile(ref, item, rows, item.head, tiles, slot, ring.produced)  # [64, D]

    lax.fori_loop(0, item.chunks, load_chunk, None)


class Chunk(NamedTuple):
    """A chunk of an item, and where it and the item's state lie."""

    item: Item
    number: Any
    slot: Any
    state: Any
    count: Any  # how many of its rows count; None: all
    unit: Any  # of R; None: 1
    unit_of_shares: Any  # of products of R with shares, or with features where there are none


def gradients(walk: Walk) -> None:
    """Computes dk and dv of every third chunk."""
    walk.deal.each(functools.partial(write_piece, walk))
    plgpu.wait_smem_to_gmem(0)


def write_piece(walk: Walk, item: Item) -> None:
    own = walk.own
    state = own.state.slot(item.number)
    unit: Any = None if walk.units is None else walk.units[item.batch, item.head]
    # Shares come times `LARGEST`, and so does what dk is multiplied by.
    unit_of_shares = unit * (1 / LARGEST) if walk.of_shares else unit
    own.state.produced.wait(state)

    def write_chunk(number: Any) -> None:
        slot = own.keys.slot(item.before + number)
        count = item.rows_within(number, walk.lengths)
        chunk = Chunk(item, number, slot, state, count, unit, unit_of_shares)
        own.keys.produced.wait(slot)
        if walk.phi.slope_is_known:
            write_by_features(walk, chunk)
        else:
            write_by_keys(walk, chunk)

    mosaic.in_turn(item, GRADIENTS.warpgroups, write_chunk)
    own.state.consumed.arrive(state)


def write_by_features(walk: Walk, chunk: Chunk) -> None:
    """dk and dv where phi(k) tells phi'(k): k is loaded once."""
    maps, own, units = walk.phi, walk.own, None
    x = load(tiled(own.k).at[chunk.slot])  # [64, F]
    let_go_of_k(walk, chunk)
    if walk.in_units:
        phi = mosaic.kept(maps.unrounded(maps.present(x)), chunk.count)
        (phi,), units = whole_units.rows_in_units([phi])
    elif not walk.of_shares:
        phi = mosaic.kept(maps.keys(maps.present(x)), chunk.count)
    else:
        phi = mosaic.kept(maps.unrounded(x) * inverse_of(walk, chunk, 0, F), chunk.count)
        phi = mosaic.rounded(phi, walk.tiling.dtype)
    dk = mosaic.kept(gradient_of_features(walk, chunk), chunk.count)
    inverse = functools.partial(inverse_of, walk, chunk, 0, F) if walk.of_shares else None
    dk = dk * whole_units.slope_of_keys(maps, x, phi, units, inverse)
    write_tile(walk, chunk, 0, dk)
    write_dv(walk, chunk, [(phi, own.r.at[chunk.state])], units)


def write_by_keys(walk: Walk, chunk: Chunk) -> None:
    """dk and dv where k tells phi'(k): k stays in its slot until dk is stored."""
    maps, own = walk.phi, walk.own

    def keys(first: int) -> jax.Array:
        return load(tiled(own.k).at[chunk.slot, :, pl.ds(first, HALF)])  # [64, 64]

    def features(first: int) -> jax.Array:
        if not walk.of_shares:
            return mosaic.kept(maps.keys(keys(first), first=first), chunk.count)
        phi = maps.unrounded(keys(first), first) * inverse_of(walk, chunk, first, HALF)
        return mosaic.rounded(mosaic.kept(phi, chunk.count), walk.tiling.dtype)

    units = None
    if walk.in_units:
        phis = [maps.unrounded(keys(first), first) for first in FIRSTS]
        phis = [mosaic.kept(phi, chunk.count) for phi in phis]
        phis, units = whole_units.rows_in_units(phis)
    else:
        phis = [features(first) for first in FIRSTS]
    parts_of_r = [own.r.at[chunk.state, pl.ds(first, HALF)] for first in FIRSTS]
    write_dv(walk, chunk, list(zip(phis, parts_of_r, strict=True)), units)
    dk = gradient_of_features(walk, chunk)

    def store(target: Any) -> None:
        for first in FIRSTS:
            part = dk[:, first : first + HALF] * maps.slope(keys(first))
            if walk.of_shares:
                part = part * inverse_of(walk, chunk, first, HALF)
            part = mosaic.kept(part, chunk.count)
            target.at[:, pl.ds(first, HALF)][...] = part.astype(walk.tiling.dtype)
        let_go_of_k(walk, chunk)

    write_by(walk, chunk, 0, store)


def let_go_of_k(walk: Walk, chunk: Chunk) -> None:
    plgpu.commit_smem()  # reads finish before the next load overwrites them
    walk.own.keys.consumed.arrive(chunk.slot)


def inverse_of(walk: Walk, chunk: Chunk, first: int, width: int) -> jax.Array:
    """`LARGEST` / z of the features from `first` on, in all rows: [64, width]."""
    own = walk.own.inverse.at[chunk.state, pl.ds(first, width)]
    return mosaic.in_rows(load(own, OF_COLUMNS), C)


def gradient_of_features(walk: Walk, chunk: Chunk) -> jax.Array:
    """R v_j + u [64, F]; v is let go."""
    own, unit = walk.own, chunk.unit
    of_sum = mosaic.in_rows(load(own.u.at[chunk.state], OF_COLUMNS), C)
    of_sum = of_sum if unit is None else of_sum * (1 / unit)
    own.values.produced.wait(chunk.slot)
    (dk,) = multiply((of_sum, [(tiled(own.v).at[chunk.slot], own.r.at[chunk.state].T)]))
    own.values.consumed.arrive(chunk.slot)
    return dk if unit is None else dk * chunk.unit_of_shares


def write_dv(
    walk: Walk, chunk: Chunk, factors: list[tuple[jax.Array, Any]], rows: jax.Array | None
) -> None:
    """Stores the sum of the products of `factors`, times `rows`, the units of phi(k)."""
    (dv,) = multiply((mosaic.zeros(C, V), factors))
    dv = dv if rows is None else dv * mosaic.in_columns(rows, V)
    write_tile(walk, chunk, 1, dv if chunk.unit is None else dv * chunk.unit_of_shares)


def write_tile(walk: Walk, chunk: Chunk, number: int, found: jax.Array) -> None:
    """Stores dk, number 0, or dv, number 1."""

    def store(target: Any) -> None:
        target[...] = found.astype(walk.tiling.dtype)

    write_by(walk, chunk, number, store)


def write_by(walk: Walk, chunk: Chunk, number: int, store: Callable[[Any], None]) -> None:
    """As `write_tile`, of what `store` puts into its place in shared memory."""
    own, item, ref = walk.own, chunk.item, (walk.dk, walk.dv)[number]
    place = 2 * mosaic.group() + number
    target = tiled(own.out).at[place]
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the other's may go on
    store(target)
    plgpu.commit_smem()
    rows = item.rows(chunk.number)
    walk.tiling.leave_tile(own.out, place, ref, item, rows, item.head)
