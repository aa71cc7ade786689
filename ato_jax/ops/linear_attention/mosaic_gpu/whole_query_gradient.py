"""dq [B, T, H, D] where every query sees every key, without a decay, and the sums over queries.

`bidirectional.py` launches it with S [F, V] and z [F], the sums over all keys. R and u of each
piece are added up for `whole_key_gradient.py`. With g the cotangent of out, and phi'_i = phi(q_i)
inverse_i (phi'(q_i) is the derivative of phi):

    G_i   = g_i S^T                         the gradient of phi(q_i) without normaliser
    den_i = phi(q_i) . z,  inverse_i = 1 / max(den_i, least)
    e_i   = phi(q_i) . G_i / den_i = g_i . out_i,  0 where den_i <= least
    dq_i  = (G_i - e_i z) inverse_i phi'(q_i)
    R = sum_i phi'_i g_i^T [F, V],  u = -sum_i e_i phi'_i [F]     of the piece

Without a normaliser inverse is 1 and e is 0, and S contains the scale.

Warpgroups, and the barriers between them:

    MEMORY (2)   loads S, z and the least denominator of a head, and its chunks as slots come free
      |    |
      |    |  rows: q and g loaded
      |  state: S, z and the least denominator, loaded once an item
      v    v
    DQ (0, 1)    half of F each: maps q once, computes dq, and stores phi' to q's place. Barriers
      |          between its two warpgroups:
      |          exchanged: both have left their terms of e and den
      |          multiplied: both have multiplied all of g; only where there are lengths
      |          and within one of them, in float16:
      |          largest_stored: each row's largest magnitude
      |
      |  mapped: phi' lies in the slot of `rows`
      v
    SUMS (3)     keeps R in registers. At its start it stores `ones`, which DQ awaits: ones_stored

MEMORY loads a slot of `rows` again when SUMS has consumed it, and `state` when DQ has. Features
stay in float32, so phi' is rounded once, and e follows from the same G and den as dq. u is a sum
over rows: a product of the rows in two parts with ones, once a piece.

    symbol    shape          what it is
    q         [2, 64, 64]    a chunk's rows, of each half of F; then phi'
    g         [64, V]        a chunk's rows
    s, z      [F, V], [F]    the head's sums over all keys, in halves of F
    G         [64, 64]       half the gradient of phi(q), then half of dq
    inverse   [64]           1 / max(den, least)
    total     [64, 64]       -sum e phi' of the rows so far at the same place in a chunk; u is its
                             sum over rows. Without a normaliser in float16 phi(q)'s unit, [64]
    R         [F, V]         float32, in halves of F

In float16 (`whole_units.py`) S has a unit of its head without a normaliser. With one S is passed as
means, and phi' are shares, which are multiplied by `LARGEST`. u is accumulated in a unit of its
half of F. Without a normaliser phi(q) is rounded in a unit of its half, the largest magnitude so
far in the piece over `LARGEST`, and R is accumulated in that unit; features of identity are exact
and have none.

Pallas adds no barriers around loads and stores here (`own_barriers`). A warp only stores where it
alone has loaded, or after `wait_smem_to_gmem`; and a warpgroup that waits on a barrier sees all
stores ahead of the arrivals on it.

`whole_query_gradient_storage.py` has the shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply
from ato_jax.mosaic.scales import LEAST_UNIT
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import frame, row_copies
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F, V
from ato_jax.ops.linear_attention.mosaic_gpu.whole_query_gradient_storage import (
    COLUMNS,
    DQ,
    MEMORY,
    ROLES,
    SUMS,
    Storage,
    Walk,
    storage_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu.whole_units import LARGEST
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def whole_query_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
    least: jax.Array,
    lengths: jax.Array | None = None,
    units: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the kernel. It returns dq; and R [B, H, P, F, V] and u [B, H, P, F] in float32, in
    float16 with a normaliser those of shares. Rows behind the lengths of queries have a gradient of
    0 and no part in the sums.

    Args:
      s: [B, G, F, V] in the dtype of tiles; in float16 with a normaliser the means of values.
      z: [B, G, F] float32.
      least: [B, G, C] float32, the least denominator, repeated C times.
      lengths: [B] of queries.
      units: [B, G] float32 of s, in float16 without a normaliser.
    """
    arrays = dict(q=q, g=g, s=s, z=z, least=least, lengths=lengths, units=units)
    given = {name: array for name, array in arrays.items() if array is not None}
    of_pieces = spec.B, spec.H, deal.pieces
    out_types = {
        "dq": jax.ShapeDtypeStruct(q.shape, row_copies.tiling(spec).dtype),
        "r": jax.ShapeDtypeStruct((*of_pieces, F, V), F32),
        "u": jax.ShapeDtypeStruct((*of_pieces, F), F32),
    }

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        return Walk(spec, deal, own, **dict(zip((*given, *out_types), refs, strict=True)))

    parts = (MEMORY, memory), (SUMS, sums), (DQ, query_gradient)
    program = mosaic.Program(ROLES, storage_of(spec, lengths is not None), parts, bind)
    found: tuple[jax.Array, jax.Array, jax.Array] = mosaic.launch(
        frame.name_of("whole_query_gradient"),
        program,
        deal,
        tuple(out_types.values()),
        tuple(given.values()),
        own_barriers=True,
    )
    return found


def memory(walk: Walk) -> None:
    """Loads the state of each item, and its chunks."""
    own = walk.own
    steps = walk.deal.each(functools.partial(load_piece, walk))
    own.state.consumed.wait()
    own.rows.drain(steps)


def load_piece(walk: Walk, item: Item) -> None:
    own, tiling, of_head = walk.own, walk.tiling, walk.head_of_state(item)

    @pl.when(item.number > 0)
    def _() -> None:
        own.state.consumed.wait()

    loaded = own.state.produced.barrier
    for half in range(2):
        rows = pl.ds(half * HALF, HALF)
        for ref, target in ((walk.s, own.s), (walk.z, own.z)):  # [64, V] and [64]
            plgpu.copy_gmem_to_smem(ref.at[(*of_head, rows)], target.at[half], loaded)
    plgpu.copy_gmem_to_smem(walk.least.at[of_head], own.least, loaded)  # [64]

    def load_chunk(chunk: Any, _: None) -> None:
        step, rows = item.before + chunk, item.rows(chunk)
        slot = own.rows.slot(step)
        own.rows.acquire(step)
        for half in range(2):
            source = walk.q, item, rows, item.head, half  # [64, 64]
            target = own.q.at[slot, half]
            row_copies.copy_block(tiling, *source, target, own.rows.produced.at[slot])
        produced = own.rows.produced
        tiling.copy_tile(walk.g, item, rows, item.head, own.g, slot, produced)  # [64, V]

    lax.fori_loop(0, item.chunks, load_chunk, None)


class Half(NamedTuple):
    """An item, and the half of F that this warpgroup has."""

    item: Item
    half: Any
    s_unit: Any


def query_gradient(walk: Walk) -> None:
    """Computes half the columns of dq, and the same half of u."""
    walk.own.ones_stored.wait()
    walk.deal.each(functools.partial(write_piece, walk))
    plgpu.wait_smem_to_gmem(0)


def write_piece(walk: Walk, item: Item) -> None:
    own = walk.own
    half = mosaic.as_slot(mosaic.group(), DQ.warpgroups)
    s_unit = None if walk.units is None else walk.units[walk.head_of_state(item)]
    own.state.produced.wait()
    piece = Half(item, half, s_unit)
    start = least_unit() if walk.in_units else mosaic.zeros(C, HALF)
    write_one = functools.partial(write_chunk, walk, piece)
    total = lax.fori_loop(0, item.chunks, write_one, start)
    own.state.consumed.arrive()
    leave_u(walk, piece, mosaic.zeros(C, HALF) if walk.in_units else total)


def write_chunk(walk: Walk, piece: Half, chunk: Any, total: jax.Array) -> jax.Array:
    """Carries what u is the sum over rows of, [64, 64]; or the unit of phi(q), repeated in [64]."""
    own, tiling, item, half = walk.own, walk.tiling, piece.item, piece.half
    step = item.before + chunk
    slot, parity = own.rows.slot(step), mosaic.slot_of(step, 2)
    own_q, own_dq = own.q.at[slot, half], own.dq.at[parity, half]
    count = item.rows_within(chunk, walk.lengths)
    own.rows.produced.wait(slot)
    products = [(tiled(own.g).at[slot], own.s.at[half].T)]
    map_q = functools.partial(features_of, walk, piece, chunk, own_q, count)
    G, phi_q = mosaic.multiply_while(products, (C, HALF), map_q)
    if piece.s_unit is not None:
        G = G * piece.s_unit
    if count is not None:
        mask_cotangents(walk, half, slot, count)
    mapped_q, inverse = phi_q, None
    if walk.spec.normalize:
        G, mapped_q, inverse, total = normalised(walk, half, parity, G, phi_q, total)
    if not walk.phi.slope_is_known:  # of x, which phi' replaces
        G = G * scaled_slope(walk, half, walk.phi.slope(load(own_q)), inverse)
    if walk.in_units:
        total = jnp.maximum(total, unit_of(walk, half, mapped_q))
        own.phi_units.at[slot, half][...] = total
        mapped_q = mosaic.in_units(mapped_q, total)
    own_q[...] = mapped_q.astype(tiling.dtype)
    # Behind this wait the store of two chunks ago has read the slot.
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    if walk.phi.slope_is_known:
        G = G * scaled_slope(walk, half, walk.phi.slope_of_features(phi_q), inverse)
    own_dq[...] = mosaic.kept(G, count).astype(tiling.dtype)
    plgpu.commit_smem()
    own.mapped.arrive(slot)
    target = walk.dq, item, item.rows(chunk), item.head, half
    row_copies.leave_block(tiling, own_dq, *target)
    return total


def features_of(walk: Walk, piece: Half, chunk: Any, own_q: Any, count: Any) -> jax.Array:
    """phi(q) [64, 64], float32; 0 in rows that do not count."""
    maps, item = walk.phi, piece.item
    x = load(own_q)
    phi = maps.unrounded(maps.present(x, piece.half * HALF) if walk.in_units else x)
    if count is not None:
        return mosaic.kept(phi, count)
    if maps.slope_is_known and not walk.in_units or walk.deal.length % C == 0:
        return phi
    # Beyond the end g is 0, but phi(0) inverse may be large or not finite, and phi(0) the largest
    # of its half.
    return mosaic.kept(phi, walk.deal.length - item.first_row - chunk * C)


def z_of(walk: Walk, half: Any) -> jax.Array:
    """z [64, 64] of half of F, read where it is needed: there are no registers to keep it in."""
    return mosaic.in_rows(load(walk.own.z.at[half], OF_COLUMNS), C)


def normalised(
    walk: Walk, half: Any, parity: Any, G: jax.Array, phi_q: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What phi'(q) is multiplied by for dq (for shares also by z and inverse, later); phi', or
    shares times `LARGEST`; inverse, in all columns; and `total` with this chunk's -e phi'."""
    own = walk.own

    def of_shares() -> jax.Array:
        return phi_q * z_of(walk, half) if walk.of_shares else phi_q

    terms = jnp.sum(of_shares() * G, axis=1), jnp.sum(phi_q * z_of(walk, half), axis=1)
    for number, term in enumerate(terms):
        own.parts.at[parity, half, number][...] = term
    own.exchanged.arrive()
    own.exchanged.wait()
    of_e, den = (
        term + load(own.parts.at[parity, 1 - half, number], OF_ROWS)
        for number, term in enumerate(terms)
    )
    least = load(own.least, OF_ROWS)
    inverse = 1.0 / jnp.maximum(den, least)
    e = mosaic.in_columns(jnp.where(den > least, of_e * inverse, 0.0), HALF)
    inverse = mosaic.in_columns(inverse, HALF)
    mapped_q = of_shares() * inverse
    total -= e * mapped_q
    if walk.of_shares:
        return G - e, mapped_q * LARGEST, inverse, total
    return (G - e * z_of(walk, half)) * inverse, mapped_q, inverse, total


def scaled_slope(walk: Walk, half: Any, slope: jax.Array, inverse: Any) -> jax.Array:
    """The derivative of what shares have in place of phi(q). In this order it is 0 where slope is,
    and near 1 at most where slope is about phi(q)."""
    return slope * z_of(walk, half) * inverse if walk.of_shares else slope


def unit_of(walk: Walk, half: Any, x: jax.Array) -> jax.Array:
    """The largest magnitude of x [64, 64] over `LARGEST`: [64] times the same."""
    own = walk.own
    assert own.largest_stored is not None
    largest = own.largest.at[half]
    largest[...] = jnp.max(jnp.abs(x), axis=1)
    own.largest_stored.arrive(half)
    own.largest_stored.wait(half)
    return mosaic.unit_of(largest, C) * (1 / LARGEST)


def mask_cotangents(walk: Walk, half: Any, slot: Any, count: Any) -> None:
    """Sets half the columns of g to 0 in rows that do not count, ahead of the sums: 0 does not
    cancel NaN. Both halves have been multiplied with all of g."""
    own, multiplied = walk.own, walk.own.multiplied
    assert multiplied is not None

    @pl.when(count < C)
    def _() -> None:
        multiplied.arrive()
        multiplied.wait()
        mosaic.keep_rows(tiled(own.g).at[slot, :, pl.ds(half * HALF, HALF)], count)


def leave_u(walk: Walk, piece: Half, total: jax.Array) -> None:
    """Stores half of u, the sum over the rows of `total`: a product of these in two parts with
    ones."""
    own, dtype, item, half = walk.own, walk.tiling.dtype, piece.item, piece.half
    u_unit: Any = None
    if walk.of_shares:
        u_unit = unit_of(walk, half, total)
        total = mosaic.in_units(total, u_unit)
    rounded = mosaic.rounded(total, dtype)
    sums = mosaic.zeros(HALF, ALIKE)
    for part in (rounded, (total - rounded.astype(F32)).astype(dtype)):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own.dq.at[0, half][...] = part
        plgpu.commit_smem()
        (sums,) = multiply((sums, [(own.dq.at[0, half].T, own.ones.T)]))
    u = jnp.max(sums, axis=1)  # all columns are equal
    own.u.at[half][...] = u if u_unit is None else u * u_unit
    plgpu.commit_smem()
    rows = pl.ds(half * HALF, HALF)
    target = walk.u.at[item.batch, item.head, item.piece, rows]
    plgpu.copy_smem_to_gmem(own.u.at[half], target)


def least_unit() -> jax.Array:
    return plgpu.layout_cast(jnp.full((C,), LEAST_UNIT, F32), OF_ROWS)


def sums(walk: Walk) -> None:
    """Adds up R of each piece."""
    own = walk.own
    mosaic.store_transposed(own.ones, mosaic.ones(C, ALIKE, walk.tiling.dtype))
    plgpu.commit_smem()
    own.ones_stored.arrive()
    walk.deal.each(functools.partial(sum_piece, walk))
    plgpu.wait_smem_to_gmem(0)


def sum_piece(walk: Walk, item: Item) -> None:
    start = mosaic.zeros(HALF, V), mosaic.zeros(HALF, V)
    units = [least_unit()] * 2 if walk.in_units else []
    sum_one = functools.partial(sum_chunk, walk, item)
    halves, units = lax.fori_loop(0, item.chunks, sum_one, (start, units))
    if walk.in_units:
        halves = times(halves, units)
    if walk.of_shares:
        halves = tuple(total * (1 / LARGEST) for total in halves)
    leave_r(walk, item, halves)


def sum_chunk(walk: Walk, item: Item, chunk: Any, carried: Any) -> Any:
    """Carries R in halves, [64, V] each, and the unit of each half of phi(q), repeated in [64]."""
    own = walk.own
    halves, before = carried
    slot = own.rows.slot(item.before + chunk)
    own.mapped.wait(slot)
    if walk.in_units:
        units = [load(own.phi_units.at[slot, half], OF_ROWS) for half in range(2)]
        halves = times(halves, [x / y for x, y in zip(before, units, strict=True)])
        before = units
    g = tiled(own.g).at[slot]
    halves = multiply(
        *((total, [(own.q.at[slot, half].T, g)]) for half, total in enumerate(halves))
    )
    own.rows.consumed.arrive(slot)
    return halves, before


def times(halves: Any, factors: list[jax.Array]) -> Any:
    """R in halves, times a factor for each feature."""
    pairs = zip(halves, factors, strict=True)
    return tuple(total * mosaic.in_columns(factor, V) for total, factor in pairs)


def leave_r(walk: Walk, item: Item, halves: Sequence[jax.Array]) -> None:
    """Stores R of a piece, some columns at a time."""
    own, of_piece = walk.own, (item.batch, item.head, item.piece)
    for column in range(0, V, COLUMNS):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        columns = slice(column, column + COLUMNS)
        for half, total in enumerate(halves):
            own.r.at[half][...] = total[:, columns]
        plgpu.commit_smem()
        for half in range(2):
            rows = pl.ds(half * HALF, HALF)
            target = walk.r.at[(*of_piece, rows, pl.ds(column, COLUMNS))]
            plgpu.copy_smem_to_gmem(own.r.at[half], target)
