"""dk and dv [B, T, G, D] of heads of 129 to 256 columns, where every query sees every key.

`bidirectional.py` launches it with R [F, V], in the dtype of tiles, and u [F], the sums over all
queries. `whole_key_gradient.py` is the same for heads of up to 128 columns; read it first.

    dv_j = R^T phi(k_j)
    dk_j = (R v_j + u) phi'(k_j)

Warpgroups, and the barriers between them:

    MEMORY (last)        loads R and u of a head, and by turns chunks of k and v, into one ring
      |      |
      |      |  tiles: k, or v, loaded
      |  state: R, u and inverse, loaded once an item
      v      v
    GRADIENTS (others)   64 columns of dk and dv each. It maps its columns of k in place. When all
                         have multiplied by phi(k), it stores dv from its place, and later dk from
                         v's. Barriers between its warpgroups:
                         largest_stored: each row's largest feature is known, in float16
                         mapped: the slot holds phi(k)
                         k_multiplied, v_multiplied: all have multiplied by the slot's tiles

A slot of `tiles` is let go once its result is stored, while the next product runs.

    symbol     shape                  what it is
    x          [blocks, 64, 64]       a chunk's rows of k or v, in blocks of 64 columns
    R          [F, V]                 in blocks of 64 rows
    u          [F]                    in the same blocks
    inverse    [F]                    in float16 with a normaliser, `LARGEST` / z
    unit       -                      in float16, that of R

In float16 (`whole_units.py`) R has a unit of its head, by which products are multiplied. With a
normaliser phi(k) becomes shares, which are multiplied by `LARGEST`. Without one phi(k) is rounded
in a unit of its row, by which dv is multiplied; for this unit the warpgroups exchange the largest
magnitudes of their columns. Features of identity are exact and have no unit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import (
    F32,
    HALF,
    OF_COLUMNS,
    OF_ROWS,
    Array,
    Buffer,
    Item,
    Ring,
    Role,
    Signal,
    load,
    multiply,
)
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.whole_units import LARGEST, SumsOfQueries
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)


def gradients_role(spec: LinearAttentionSpec) -> Role:
    workers = spec.D // HALF
    return Role("gradients", registers=mosaic.workers_registers(workers), warpgroups=workers)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    inverse: Array  # [workers, 64] float32, in float16 with a normaliser
    largest: Array  # [workers, 64] float32, with units: each row's largest feature of 64 columns
    r: Array  # [workers, 64, V]
    u: Array  # [workers, 64] float32
    x: Array  # [slots, workers, 64, 64] k and v by turns; then dv and dk
    tiles: Ring  # of x
    state: Ring  # of r, u and inverse
    mapped: Signal
    k_multiplied: Signal
    v_multiplied: Signal
    largest_stored: Signal | None

    barriers = (
        "tiles.consumed",
        "k_multiplied",
        "largest_stored",
        "leave",
        "tiles.produced",
        "mapped",
        "state.consumed",
        "state.produced",
        "v_multiplied",
    )


def storage_of(spec: LinearAttentionSpec, of_shares: bool) -> Storage:
    tiling, role = frame.tiling(spec), gradients_role(spec)
    workers = role.warpgroups
    slots = 3 if workers > 3 else 6  # as many as R leaves room for
    x = Buffer(tiling.of_rows(slots, workers, C, HALF), copies=workers)
    r = Buffer(tiling.shared(workers, HALF, spec.V), copies=workers)
    u = Buffer(plgpu.SMEM((workers, HALF), F32), copies=workers)
    inverse = Buffer(plgpu.SMEM((workers, HALF), F32), copies=workers) if of_shares else None
    largest = largest_stored = None
    if whole_units.rounds_in_units(spec):
        largest = Buffer(plgpu.SMEM((workers, C), F32))
        largest_stored = Signal((role,))
    return Storage(
        inverse=inverse,
        largest=largest,
        r=r,
        u=u,
        x=x,
        tiles=Ring.of(slots, filled=(x,), readers=(role,)),
        state=Ring.of(1, filled=(r, u, inverse), readers=(role,)),
        mapped=Signal((role,)),
        k_multiplied=Signal((role,)),
        v_multiplied=Signal((role,)),
        largest_stored=largest_stored,
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
        return frame.tiling(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def blocks(self) -> range:
        """The blocks of 64 columns, one for each warpgroup of GRADIENTS."""
        return range(gradients_role(self.spec).warpgroups)

    @property
    def of_shares(self) -> bool:
        return self.inverse is not None

    @property
    def in_units(self) -> bool:
        return whole_units.rounds_in_units(self.spec)


def wide_key_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    k: jax.Array,
    v: jax.Array,
    sums: SumsOfQueries,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv, which are 0 in rows behind the lengths of keys, [B]."""
    arrays = dict(k=k, v=v, r=sums.r, u=sums.u, lengths=lengths)
    arrays |= dict(units=sums.units, inverse=sums.inverse)
    given = {name: array for name, array in arrays.items() if array is not None}

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        return Walk(spec, deal, own, **dict(zip((*given, "dk", "dv"), refs, strict=True)))

    role = gradients_role(spec)
    program = mosaic.Program(
        mosaic.Roles((role, MEMORY)),
        storage_of(spec, of_shares=sums.inverse is not None),
        ((MEMORY, memory), (role, gradients)),
        bind,
        reads_number_once=True,
    )
    out_type = tuple(jax.ShapeDtypeStruct(x.shape, frame.tiling(spec).dtype) for x in (k, v))
    name = frame.name_of("wide_key_gradient")
    found: tuple[jax.Array, jax.Array] = mosaic.launch(
        name, program, deal, out_type, tuple(given.values())
    )
    return found


def memory(walk: Walk, _: Any) -> None:
    """Loads the sums over queries of each item, and its chunks."""
    own = walk.own
    steps = walk.deal.each(functools.partial(load_piece, walk))
    own.state.consumed.wait()
    own.tiles.drain(2 * steps)


def load_piece(walk: Walk, item: Item) -> None:
    own = walk.own
    pl.when(item.number > 0)(lambda: own.state.consumed.wait())
    of_heads = [(walk.r, own.r), (walk.u, own.u)]  # [64, V] and [64] of each block
    if walk.of_shares:
        of_heads.append((walk.inverse, own.inverse))  # [64]
    for block in walk.blocks:
        rows = pl.ds(block * HALF, HALF)
        for ref, target in of_heads:
            source = ref.at[item.batch, item.head, rows]
            plgpu.copy_gmem_to_smem(source, target.at[block], own.state.produced.barrier)

    def load_chunk(chunk: Any, _: None) -> None:
        for number, ref in enumerate((walk.k, walk.v)):
            step = 2 * (item.before + chunk) + number
            slot = own.tiles.slot(step)
            own.tiles.acquire(step)
            for block in walk.blocks:
                source = ref, item, item.rows(chunk), item.head, block  # [64, 64]
                target = own.x.at[slot, block]
                row_copies.copy_block(walk.tiling, *source, target, own.tiles.produced.at[slot])

    lax.fori_loop(0, item.chunks, load_chunk, None)


class Piece(NamedTuple):
    """An item, and the block of 64 columns that this warpgroup has."""

    item: Item
    block: Any
    unit: Any  # of R; None: 1
    unit_of_shares: Any  # of products of R with shares, or with features where there are none


def gradients(walk: Walk, block: Any) -> None:
    """Computes 64 columns of dk and dv."""
    tiles = walk.own.tiles
    steps = walk.deal.each(functools.partial(write_piece, walk, block))
    plgpu.wait_smem_to_gmem(0)
    tiles.consumed.arrive(tiles.slot(2 * steps - 1))


def write_piece(walk: Walk, block: Any, item: Item) -> None:
    own = walk.own
    own.state.produced.wait()
    unit: Any = None if walk.units is None else walk.units[item.batch, item.head]
    # Shares, and the factor `inverse` of dk, contain `LARGEST`.
    unit_of_shares = unit * (1 / LARGEST) if walk.of_shares else unit
    write_one = functools.partial(write_chunk, walk, Piece(item, block, unit, unit_of_shares))
    lax.fori_loop(0, item.chunks, write_one, None)
    own.state.consumed.arrive()


def write_chunk(walk: Walk, piece: Piece, chunk: Any, _: None) -> None:
    own, item, block = walk.own, piece.item, piece.block
    step = 2 * (item.before + chunk)
    slot, v_slot = own.tiles.slot(step), own.tiles.slot(step + 1)
    count = item.rows_within(chunk, walk.lengths)
    own.tiles.produced.wait(slot)
    first = block * HALF if walk.tiling.is_filled else 0
    x = walk.phi.present(load(own.x.at[slot, block]), first)  # [64, 64]
    phi_k, units = features_of(walk, piece, x, first, count)
    own.x.at[slot, block][...] = phi_k
    plgpu.commit_smem()
    meet(own.mapped)
    columns = pl.ds(block * HALF, HALF)
    products = [(own.x.at[slot, other], own.r.at[other, :, columns]) for other in walk.blocks]
    (dv,) = multiply((mosaic.zeros(C, HALF), products), meanwhile=lambda: let_go(walk, step - 1))
    meet(own.k_multiplied)
    dv = dv if units is None else dv * mosaic.in_columns(units, HALF)
    dv = dv if piece.unit is None else dv * piece.unit_of_shares
    write(walk, piece, chunk, slot, dv, walk.dv)
    own.tiles.produced.wait(v_slot)
    of_sum = mosaic.in_rows(load(own.u.at[block], OF_COLUMNS), C)
    of_sum = of_sum if piece.unit is None else of_sum * (1 / piece.unit)
    products = [
        (own.x.at[v_slot, other], own.r.at[block, :, pl.ds(other * HALF, HALF)].T)
        for other in walk.blocks
    ]
    (dk,) = multiply((of_sum, products), meanwhile=lambda: let_go(walk, step))
    meet(own.v_multiplied)
    dk = dk if piece.unit is None else dk * piece.unit_of_shares
    inverse = functools.partial(inverse_of, walk, block) if walk.of_shares else None
    dk = dk * whole_units.slope_of_keys(walk.phi, x, phi_k, units, inverse)
    write(walk, piece, chunk, v_slot, mosaic.kept(dk, count), walk.dk)


def features_of(
    walk: Walk, piece: Piece, x: jax.Array, first: Any, count: Any
) -> tuple[jax.Array, jax.Array | None]:
    """phi(k), or shares, of this warpgroup's columns [64, 64], which start at `first`; and the
    units of all rows [64], where there are units."""
    own, block = walk.own, piece.block
    if walk.in_units:
        assert own.largest_stored is not None
        phi = mosaic.kept(walk.phi.unrounded(x, first), count)
        own.largest.at[block][...] = jnp.max(jnp.abs(phi), axis=1)
        meet(own.largest_stored)
        largest = [load(own.largest.at[other], OF_ROWS) for other in walk.blocks]
        return whole_units.in_units_of(phi, largest)
    if not walk.of_shares:
        return mosaic.kept(walk.phi.keys(x, first=first), count), None
    phi = mosaic.kept(walk.phi.unrounded(x, first) * inverse_of(walk, block), count)
    return mosaic.rounded(phi, walk.tiling.dtype), None


def inverse_of(walk: Walk, block: Any) -> jax.Array:
    """`LARGEST` / z of this warpgroup's features, in all rows: [64, 64]."""
    return mosaic.in_rows(load(walk.own.inverse.at[block], OF_COLUMNS), C)


def meet(signal: Signal) -> None:
    """Waits until all warpgroups of GRADIENTS have come here."""
    signal.arrive()
    signal.wait()


def let_go(walk: Walk, step: Any) -> None:
    """Releases the slot of a step once its result is stored, while a product runs."""
    tiles = walk.own.tiles
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(step >= 0)
    def _() -> None:
        tiles.consumed.arrive(tiles.slot(step))


def write(walk: Walk, piece: Piece, chunk: Any, slot: Any, found: jax.Array, ref: Any) -> None:
    """Stores 64 columns of a gradient, by way of a slot."""
    item, tile = piece.item, walk.own.x.at[slot, piece.block]
    tile[...] = found.astype(walk.tiling.dtype)
    plgpu.commit_smem()
    target = ref, item, item.rows(chunk), item.head, piece.block
    row_copies.leave_block(walk.tiling, tile, *target)
