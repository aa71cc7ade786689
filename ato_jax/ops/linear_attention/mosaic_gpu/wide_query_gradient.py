"""dq [B, T, H, D] of heads of 129 to 256 columns, where every query sees every key.

`bidirectional.py` launches it with S [F, V] and z [F], the sums over all keys.
`whole_query_gradient.py` is the same for heads of up to 128 columns; read it first. With g the
cotangent of out:

    G_i   = g_i S^T,  den_i = phi(q_i) . z,  inverse_i = 1 / max(den_i, least)
    e_i   = phi(q_i) . G_i / den_i,  0 where den_i <= least
    dq_i  = (G_i - e_i z) inverse_i phi'(q_i)

Without a normaliser inverse is 1 and e is 0, and S contains the scale. With one, inverse and e of
each row are written for `whole_sums.py`, which computes the sums over queries: beside S there is no
room for them here.

Warpgroups, and the barriers between them:

    MEMORY (last)   loads S of a head, and its chunks as slots come free, across pieces
      |    |    |
      |    |    |  queries: q loaded
      |    |  cotangents: g loaded
      |  state: S, loaded once an item
      v    v    v
    DQ (others)     64 columns of dq each, which take g's place. Barriers between its warpgroups:
                    multiplied: all have multiplied g, and left their terms of e and den
                    added: all have added up these terms, so their place may be stored to

Once a chunk the warpgroups exchange their terms of e and den. Each lets a slot of `queries` go when
it has loaded q, and one of `cotangents` when dq has been stored from it, while it multiplies the
next chunk. z is read from global memory, since neither registers nor shared memory have room for
it.

    symbol     shape             what it is
    q, g       [blocks, 64, 64]  a chunk's rows, in blocks of 64 columns; dq in g's place
    S          [F, V]            in blocks of 64 rows
    G          [64, 64]          g_i S^T, this warpgroup's columns
    inverse, e [64]              of the chunk's rows

In float16 (`whole_units.py`) S has a unit of its head. With a normaliser S is passed as means b of
the values, and with the shares w of a query

    P_i  = g_i b^T,  w_i = phi(q_i) z inverse_i,  e_i = w_i . P_i
    dq_i = (P_i - e_i) phi'(q_i) z inverse_i

phi'(q_i) z inverse_i is multiplied from left to right: z inverse_i alone may be large, while the
product is 0 where phi' is 0, and about 1 at most where phi' is about phi(q_i).
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
)
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)


def dq_role(spec: LinearAttentionSpec) -> Role:
    workers = spec.D // HALF
    return Role("dq", registers=mosaic.workers_registers(workers), warpgroups=workers)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    g: Array  # [slots, workers, 64, 64]; then dq
    # [workers, 2, 64] float32: each warpgroup's terms of e and den; then, in the place of the first
    # one's, inverse and e
    parts: Array
    q: Array  # [q_slots, workers, 64, 64]
    s: Array  # [workers, 64, V]
    cotangents: Ring  # of g
    queries: Ring  # of q
    state: Ring  # of s
    multiplied: Signal
    added: Signal

    barriers = (
        "added",
        "cotangents.consumed",
        "leave",
        "cotangents.produced",
        "multiplied",
        "queries.consumed",
        "queries.produced",
        "state.consumed",
        "state.produced",
    )


def storage_of(spec: LinearAttentionSpec) -> Storage:
    tiling, role = frame.tiling(spec), dq_role(spec)
    workers = role.warpgroups
    # As many slots of q and g as fit beside S. dq stays in g's slot until the next chunk's product.
    q_slots, slots = (1, 2) if workers > 3 else (2, 4)
    q = Buffer(tiling.of_rows(q_slots, workers, C, HALF), copies=workers)
    g = Buffer(tiling.of_rows(slots, workers, C, HALF), copies=workers)
    s = Buffer(tiling.shared(workers, HALF, spec.V), copies=workers)
    return Storage(
        g=g,
        parts=Buffer(plgpu.SMEM((workers, 2, C), F32)),
        q=q,
        s=s,
        cotangents=Ring.of(slots, filled=(g,), readers=(role,)),
        queries=Ring.of(q_slots, filled=(q,), readers=(role,)),
        state=Ring.of(1, filled=(s,), readers=(role,)),
        multiplied=Signal((role,)),
        added=Signal((role,)),
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory by the names of
    `wide_query_gradient`'s arguments and results, and its storage."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    own: Storage
    q: Any
    g: Any
    s: Any
    z: Any
    least: Any
    units: Any = None
    lengths: Any = None
    dq: Any = None
    inverse: Any = None
    e: Any = None

    @property
    def tiling(self) -> mosaic.Tiling:
        return frame.tiling(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def blocks(self) -> range:
        """The blocks of 64 columns, one for each warpgroup of DQ."""
        return range(dq_role(self.spec).warpgroups)

    @property
    def of_shares(self) -> bool:
        return whole_units.has_shares(self.spec)

    def head_of_state(self, item: Item) -> tuple[Any, Any]:
        return item.batch, lax.div(item.head, self.spec.H // self.spec.G)


def wide_query_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
    least: jax.Array,
    units: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """dq; and with a normaliser inverse and e, [B, H, T up to a whole chunk] float32 each. Rows
    behind the lengths of queries have a gradient and an e of 0.

    Args:
      s: [B, G, F, V] in the dtype of tiles; in float16 with a normaliser the means b.
      z: [B, G, F] float32.
      least: [B, G] float32, the least denominator.
      units: [B, G] float32 of s, in float16 without a normaliser.
      lengths: [B] of queries.
    """
    arrays = dict(q=q, g=g, s=s, z=z, least=least, units=units, lengths=lengths)
    given = {name: array for name, array in arrays.items() if array is not None}
    out_types = {"dq": jax.ShapeDtypeStruct(q.shape, frame.tiling(spec).dtype)}
    if spec.normalize:
        rows = jax.ShapeDtypeStruct((spec.B, spec.H, mosaic.whole_chunks(spec.T)), F32)
        out_types |= dict(inverse=rows, e=rows)

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        return Walk(spec, deal, own, **dict(zip((*given, *out_types), refs, strict=True)))

    role = dq_role(spec)
    program = mosaic.Program(
        mosaic.Roles((role, MEMORY)),
        storage_of(spec),
        ((MEMORY, memory), (role, query_gradient)),
        bind,
        reads_number_once=True,
    )
    types, operands = tuple(out_types.values()), tuple(given.values())
    name = frame.name_of("wide_query_gradient")
    return tuple(mosaic.launch(name, program, deal, types, operands))


def memory(walk: Walk, _: Any) -> None:
    """Loads S of each item, and its chunks."""
    own = walk.own
    steps = walk.deal.each(functools.partial(load_piece, walk))
    own.state.consumed.wait()
    own.cotangents.drain(steps)
    own.queries.drain(steps)


def load_piece(walk: Walk, item: Item) -> None:
    own, of_head = walk.own, walk.head_of_state(item)
    pl.when(item.number > 0)(lambda: own.state.consumed.wait())
    for block in walk.blocks:
        source = walk.s.at[(*of_head, pl.ds(block * HALF, HALF))]  # [64, V]
        plgpu.copy_gmem_to_smem(source, own.s.at[block], own.state.produced.barrier)

    def load_chunk(chunk: Any, _: None) -> None:
        step, rows = item.before + chunk, item.rows(chunk)
        for ref, tiles, ring in (
            (walk.g, own.g, own.cotangents),
            (walk.q, own.q, own.queries),
        ):
            slot = ring.slot(step)
            ring.acquire(step)
            for block in walk.blocks:
                part = ref, item, rows, item.head, block, tiles.at[slot, block]  # [64, 64]
                row_copies.copy_block(walk.tiling, *part, ring.produced.at[slot])

    lax.fori_loop(0, item.chunks, load_chunk, None)


class Piece(NamedTuple):
    """An item, and the block of 64 columns that this warpgroup has."""

    item: Item
    block: Any
    of_head: tuple[Any, Any]  # the index of its batch entry and head in arrays of the state


def query_gradient(walk: Walk, block: Any) -> None:
    """Computes 64 columns of dq."""
    ring = walk.own.cotangents
    steps = walk.deal.each(functools.partial(write_piece, walk, block))
    plgpu.wait_smem_to_gmem(0)
    ring.consumed.arrive(ring.slot(steps - 1))


def write_piece(walk: Walk, block: Any, item: Item) -> None:
    own = walk.own
    piece = Piece(item, block, walk.head_of_state(item))
    own.state.produced.wait()
    lax.fori_loop(0, item.chunks, functools.partial(write_chunk, walk, piece), None)
    own.state.consumed.arrive()


def write_chunk(walk: Walk, piece: Piece, chunk: Any, _: None) -> None:
    own, spec, item, block = walk.own, walk.spec, piece.item, piece.block
    step = item.before + chunk
    slot, q_slot = own.cotangents.slot(step), own.queries.slot(step)
    own_dq, count = own.g.at[slot, block], item.rows_within(chunk, walk.lengths)
    own.cotangents.produced.wait(slot)
    products = [
        (own.g.at[slot, other], own.s.at[block, :, pl.ds(other * HALF, HALF)].T)
        for other in walk.blocks
    ]
    map_q = functools.partial(map_chunk, walk, piece, step, q_slot, count)
    G, (x, phi_q) = mosaic.multiply_while(products, (C, HALF), map_q)
    G = mosaic.kept(G if walk.units is None else G * walk.units[piece.of_head], count)
    inverse: Any = None
    if spec.normalize:
        leave_terms(walk, piece, G, phi_q)
    own.multiplied.arrive()
    own.multiplied.wait()
    if spec.normalize:
        G, inverse = normalised(walk, piece, G)
    slope = walk.phi.slope_of(x, phi_q)
    if walk.of_shares:
        slope = slope * z_of(walk, piece) * mosaic.in_columns(inverse, HALF)
    own_dq[...] = mosaic.kept(G * slope, count).astype(walk.tiling.dtype)
    plgpu.commit_smem()
    rows = item.rows(chunk)
    row_copies.leave_block(walk.tiling, own_dq, walk.dq, item, rows, item.head, block)
    leave_rows(walk, piece, rows)


def map_chunk(
    walk: Walk, piece: Piece, step: Any, q_slot: Any, count: Any
) -> tuple[jax.Array, jax.Array]:
    """This warpgroup's columns of q, and phi(q) in float32, [64, 64] each. It runs while the
    products with g are in flight, and lets go of q, and of the slot of the chunk before."""
    own, ring = walk.own, walk.own.cotangents
    own.queries.produced.wait(q_slot)
    x = load(own.q.at[q_slot, piece.block])
    phi_q = mosaic.kept(walk.phi.unrounded(x), count)
    plgpu.commit_smem()  # these reads finish before the next load overwrites them
    own.queries.consumed.arrive(q_slot)
    # The chunk before has been stored by now.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(step > 0)
    def _() -> None:
        ring.consumed.arrive(ring.slot(step - 1))

    return x, phi_q


def z_of(walk: Walk, piece: Piece) -> jax.Array:
    """z [64, 64], loaded at each use: there are no registers to keep it in."""
    own = walk.z.at[(*piece.of_head, pl.ds(piece.block * HALF, HALF))]
    return mosaic.in_rows(load(own, OF_COLUMNS, optimized=False), C)


def leave_terms(walk: Walk, piece: Piece, G: jax.Array, phi_q: jax.Array) -> None:
    """Stores this warpgroup's terms of e and den for the others."""
    parts, block = walk.own.parts, piece.block
    of_phi = phi_q * z_of(walk, piece) if walk.of_shares else phi_q
    terms = jnp.sum(of_phi * G, axis=1), jnp.sum(phi_q * z_of(walk, piece), axis=1)
    parts.at[block, 0][...], parts.at[block, 1][...] = terms


def normalised(walk: Walk, piece: Piece, G: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What phi'(q) is multiplied by for dq (for shares also by z and inverse, later), and inverse
    [64]. The first warpgroup puts inverse and e into the place of its terms."""
    own = walk.own
    of_e, den = (
        sum(load(own.parts.at[other, number], OF_ROWS) for other in walk.blocks)
        for number in range(2)
    )
    own.added.arrive()
    least = walk.least[piece.of_head]
    own.added.wait()
    inverse = 1.0 / jnp.maximum(den, least)
    e = jnp.where(den > least, of_e * inverse, 0.0)

    @pl.when(piece.block == 0)
    def _() -> None:
        own.parts.at[0, 0][...], own.parts.at[0, 1][...] = inverse, e

    e = mosaic.in_columns(e, HALF)
    if walk.of_shares:
        return G - e, inverse
    return (G - e * z_of(walk, piece)) * mosaic.in_columns(inverse, HALF), inverse


def leave_rows(walk: Walk, piece: Piece, rows: Any) -> None:
    """Stores inverse and e, by the first warpgroup."""
    item, refs = piece.item, [ref for ref in (walk.inverse, walk.e) if ref is not None]

    @pl.when(piece.block == 0)
    def _() -> None:
        for number, ref in enumerate(refs):
            target = ref.at[item.batch, item.head, rows]
            plgpu.copy_smem_to_gmem(walk.own.parts.at[0, number], target)
