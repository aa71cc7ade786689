"""out [B, T, H, V] where every query sees every key, without a decay.

`bidirectional.py` launches it with S [F, V], in the dtype of tiles, and z [F], the sums over all
keys (`whole_sums.py`):

    out_i = phi(q_i) S / max(phi(q_i) . z, eps)        or without the denominator

`whole_output_storage.py` has the shared memory. Warpgroups, and the barriers between them:

    MEMORY (3)         loads S and z of a head, and its chunks as slots come free, across pieces
      |    |
      |    |  rows: q loaded
      |  state: S and z, loaded once an item
      v    v
    OUTPUT (0, 1, 2)   take chunks in turn: phi(q) in registers is the first factor of all products

Each slot of `rows` belongs to one warpgroup of OUTPUT, which alone consumes it; all three consume
`state`. Where S leaves no room for slots of q, two blocks have half of its columns each: items
count them, and `share` is 0 or 1.

    symbol    shape         what it is
    q         [64, D]       a chunk's rows, in blocks of 64 columns where heads are wide
    s         [D, width]    S, or this block's columns of it
    z         [8, D]        z: 4 rows hold it rounded, 4 what rounding left off; in float16 [D]
    phi       [64, D]       features of the chunk's queries, or shares: in one part, or in two
    factor    [64]          what the products of a row are multiplied by

Where features may be negative, products cancel, and the rounding errors of phi(q), phi(k), S and
out together take the whole budget of bfloat16. phi(q) is then multiplied in two parts, in blocks of
64 features: rounded, and what rounding left off.

Queries of 8 bits are widened and scaled in registers, and mapped and multiplied in such blocks.

In float16 (`whole_units.py`) with a normaliser the operands are shares and means. z and the
denominator are then in float32, and out is divided by the sum of the rounded shares. Without a
normaliser S has a unit of its head, and phi(q) is rounded in a unit of its row; out is multiplied
by both. Four roundings are within float16's budget, so phi(q) has one part whatever the signs are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, OF_COLUMNS, Item, load, multiply
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import frame, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F
from ato_jax.ops.linear_attention.mosaic_gpu.whole_output_storage import (
    MEMORY,
    OUTPUT,
    ROLES,
    Storage,
    Walk,
    storage_of,
    tiling_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu.whole_units import LEAST_SHARE, LEAST_SUM
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def whole_output(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    s: jax.Array,
    z: jax.Array,
    lengths: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    units: jax.Array | None = None,
) -> jax.Array:
    """Launches the kernel and returns out, which is 0 behind the lengths of queries.

    Args:
      deal: counts items.
      s: [B, G, F, V] in the dtype of tiles; in float16 with a normaliser the means of values.
      z: [B, G, 8, F] in the dtype of tiles; in float16 [B, G, F] float32.
      lengths: [B] of queries.
      q_scale: [B, H] float32 of queries in 8 bits.
      units: [B, G] float32 of s, in float16 without a normaliser.
    """
    arrays = dict(q=q, s=s, z=z, lengths=lengths, q_scale=q_scale, units=units)
    given = {name: array for name, array in arrays.items() if array is not None}

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        return Walk(spec, deal, own, **dict(zip((*given, "out"), refs, strict=True)))

    storage = storage_of(spec, of_eight_bits=q_scale is not None)
    program = mosaic.Program(ROLES, storage, ((MEMORY, memory), (OUTPUT, output)), bind)
    out_type = jax.ShapeDtypeStruct(frame.shape_of_values(spec, spec.H), tiling_of(spec).dtype)
    operands = tuple(given.values())
    out: jax.Array = mosaic.launch(frame.name_of("whole_output"), program, deal, out_type, operands)
    return out


def memory(walk: Walk) -> None:
    """Loads S and z of each item, and its chunks."""
    own = walk.own
    steps = walk.deal.each(functools.partial(load_piece, walk))
    own.rows.drain(steps)
    own.state.drain(walk.deal.own)


def load_piece(walk: Walk, item: Item) -> None:
    own, tiling = walk.own, walk.tiling
    head, share = walk.head_and_share(item)
    columns = pl.ds(share * walk.width, walk.width)
    of_head = walk.head_of_state(item, head)
    state = own.state.slot(item.number)
    own.state.acquire(item.number)
    for source, target in (
        (walk.s.at[(*of_head, slice(None), columns)], own.s),  # [D, width]
        (walk.z.at[of_head], own.z),  # [8, D], or [D]
    ):
        plgpu.copy_gmem_to_smem(source, target.at[state], own.state.produced.at[state])

    def load_chunk(chunk: Any, _: None) -> None:
        step = item.before + chunk
        slot = own.rows.slot(step)
        own.rows.acquire(step)
        rows = item.rows(chunk)
        if walk.of_eight_bits:
            blocks = [own.q.at[slot, block] for block in range(walk.blocks)]  # [64, 64] each
            loaded = own.rows.produced.at[slot]
            mosaic.copy_eight_bits(tiling, walk.q, item, rows, head, blocks, loaded)
            return
        tiling.copy_tile(walk.q, item, rows, head, own.q, slot, own.rows.produced)  # [64, D]

    lax.fori_loop(0, item.chunks, load_chunk, None)


class Piece(NamedTuple):
    """An item of this block, and where its state and its results lie."""

    item: Item
    head: Any
    share: Any
    state: Any  # the slot of S and z
    own_out: Any
    s_unit: Any


def output(walk: Walk) -> None:
    """Computes out of every third chunk."""
    walk.deal.each(functools.partial(multiply_piece, walk))
    plgpu.wait_smem_to_gmem(0)


def multiply_piece(walk: Walk, item: Item) -> None:
    own = walk.own
    head, share = walk.head_and_share(item)
    state = own.state.slot(item.number)
    own_out = tiled(own.out).at[mosaic.group()]
    s_unit = None if walk.units is None else walk.units[walk.head_of_state(item, head)]
    own.state.produced.wait(state)
    piece = Piece(item, head, share, state, own_out, s_unit)
    multiply_one = functools.partial(multiply_chunk, walk, piece)
    mosaic.in_turn(item, OUTPUT.warpgroups, multiply_one)
    own.state.consumed.arrive(state)


def multiply_chunk(walk: Walk, piece: Piece, chunk: Any) -> None:
    own, item, width = walk.own, piece.item, walk.width
    slot = own.rows.slot(item.before + chunk)
    count = item.rows_within(chunk, walk.lengths)
    own.rows.produced.wait(slot)
    features = features_of(walk, piece, slot, count)
    factor = features.factor
    # In columns of a width that leaves registers to the features.
    for first in range(0, width, F):
        size = min(F, width - first)
        out, *den = products_of(walk, piece, features, first, size)
        if features.are_in_slot and first + size == width:
            let_go(walk, slot)
        if den:
            factor = 1.0 / jnp.maximum(mosaic.of_parts(den[0]), walk.spec.eps)
        if factor is not None:
            out = out * mosaic.in_columns(factor, size)
        out = out if piece.s_unit is None else out * piece.s_unit
        if not first:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store_columns(walk, piece, first, out.astype(walk.tiling.dtype))
    plgpu.commit_smem()
    rows = item.rows(chunk)
    target = walk.out, item, rows, piece.head, piece.share
    walk.tiling.leave_tile(own.out, mosaic.group(), *target)


def let_go(walk: Walk, slot: Any) -> None:
    plgpu.commit_smem()  # reads finish before the next load overwrites them
    walk.own.rows.consumed.arrive(slot)


def products_of(
    walk: Walk, piece: Piece, features: Features, first: int, size: int
) -> tuple[jax.Array, ...]:
    """phi(q) S [64, size] of the columns from `first` on; and, if z is multiplied, too, what the
    first columns come with: phi(q) z [64, 8]."""
    own, state, columns = walk.own, piece.state, pl.ds(first, size)
    found: tuple[jax.Array, ...] = (mosaic.zeros(C, size),)
    if walk.spec.normalize and not (first or walk.half_precision):
        found += (mosaic.zeros(C, ALIKE),)
    for group in features.groups():
        pairs = [(phi, rows) for phis, rows in group for phi in phis]
        sums: Any = [(found[0], [(phi, own.s.at[state, rows, columns]) for phi, rows in pairs])]
        if len(found) > 1:
            sums.append((found[1], [(phi, own.z.at[state, :, rows].T) for phi, rows in pairs]))
        found = multiply(*sums)
    return found


def store_columns(walk: Walk, piece: Piece, first: int, out: jax.Array) -> None:
    """Stores columns of out, from `first` on, in shared memory."""
    size = out.shape[1]
    if walk.tiling.untiled:
        for block in range(size // HALF):
            columns = slice(block * HALF, (block + 1) * HALF)
            piece.own_out.at[first // HALF + block][...] = out[:, columns]
    else:
        piece.own_out.at[:, pl.ds(first, size)][...] = out


# Features [64, columns] in parts, and the rows of S that all parts are multiplied with.
Block = tuple[list[jax.Array], Any]


class Features(NamedTuple):
    """The features of a chunk's queries.

    Attributes:
      groups: gives the blocks that are multiplied at once, one group after the other: a group's
        features are mapped when it is its turn.
      factor: what rows of the products are multiplied by, [64], where features tell it.
      are_in_slot: whether `groups` maps q from its slot, again for each call, so that the slot is
        let go behind the last product.
    """

    groups: Callable[[], Iterable[list[Block]]]
    factor: jax.Array | None = None
    are_in_slot: bool = False


def at_once(blocks: list[Block], factor: jax.Array | None) -> Features:
    """All blocks in one group: registers have room for them."""
    return Features(lambda: [blocks], factor)


def features_of(walk: Walk, piece: Piece, slot: Any, count: Any) -> Features:
    """phi(q), or shares, of a slot, in the way that the call's dtype and width want it."""
    if walk.of_eight_bits:
        return widened_features(walk, piece, slot, count)
    if walk.in_two_parts:
        xs_again = functools.partial(blocks_of_q, walk, slot)
        return Features(lambda: in_parts(walk, xs_again(), count), are_in_slot=True)
    if walk.of_shares and (walk.parts > 1 or walk.tiling.untiled):
        return shares_of_blocks(walk, piece, slot, count)
    if walk.tiling.untiled:
        return features_of_blocks(walk, slot, count)
    return features_of_tile(walk, piece, slot, count)


def block_of_q(walk: Walk, slot: Any, block: Any) -> jax.Array:
    return load(walk.tiling.block_in(tiled(walk.own.q).at[slot], block))  # [64, 64]


def blocks_of_q(walk: Walk, slot: Any) -> Iterator[jax.Array]:
    """Each 64 columns of q, loaded when they are asked for."""
    return (block_of_q(walk, slot, block) for block in range(walk.blocks))


def widened_features(walk: Walk, piece: Piece, slot: Any, count: Any) -> Features:
    """phi(q) of rows of 8 bits."""
    xs = [mosaic.load_eight_bits(walk.own.q.at[slot, block]) for block in range(walk.blocks)]
    let_go(walk, slot)
    scale = walk.q_scale[piece.item.batch, piece.head]
    return Features(lambda: in_parts(walk, (mosaic.scaled(x, scale) for x in xs), count))


def in_parts(walk: Walk, xs: Iterable[jax.Array], count: Any) -> Iterator[list[Block]]:
    """phi(q) of each 64 columns: in two parts where features may be negative."""
    dtype = walk.tiling.dtype
    for block, x in enumerate(xs):
        first = block * HALF
        phi = mosaic.kept(walk.phi.unrounded(x, first), count)
        parts = [mosaic.rounded(phi, dtype)]
        if not walk.spec.feature_map.nonnegative:
            parts.append(mosaic.rounded(phi - parts[0].astype(F32), dtype))
        yield [(parts, pl.ds(first, HALF))]


def in_blocks(phis: Iterable[jax.Array]) -> list[Block]:
    """Features of each 64 columns, with the rows of S to multiply them with."""
    return [([phi], pl.ds(block * HALF, HALF)) for block, phi in enumerate(phis)]


def features_of_tile(walk: Walk, piece: Piece, slot: Any, count: Any) -> Features:
    """phi(q), or shares, of all columns."""
    phi_of, factor = walk.phi, None
    x = load(walk.own.q.at[slot])  # [64, D]
    let_go(walk, slot)
    if walk.of_shares:
        phi = weights(walk, x, walk.own.z.at[piece.state], count)
        den = jnp.sum(phi, axis=1)
        phi, of_rounded = shares(walk, phi, den)
        factor = factor_of_shares(walk, den, of_rounded)
    elif walk.has_units:
        phi = mosaic.kept(phi_of.unrounded(phi_of.present(x)), count)
        (phi,), factor = whole_units.rows_in_units([phi])
    else:
        phi = mosaic.kept(phi_of.queries(x), count)
    return at_once([([phi], slice(None))], factor)


def features_of_blocks(walk: Walk, slot: Any, count: Any) -> Features:
    """phi(q) of each 64 columns, and in float16 the units of its rows as the factor."""
    phi_of, xs, factor = walk.phi, list(blocks_of_q(walk, slot)), None
    if walk.has_units:
        phis = (phi_of.unrounded(phi_of.present(x, n * HALF)) for n, x in enumerate(xs))
        found, factor = whole_units.rows_in_units([mosaic.kept(phi, count) for phi in phis])
        blocks = in_blocks(found)
    else:
        phis = (phi_of.queries(x, n * HALF) for n, x in enumerate(xs))
        blocks = in_blocks(mosaic.kept(phi, count) for phi in phis)
    let_go(walk, slot)
    return at_once(blocks, factor)


def shares_of_blocks(walk: Walk, piece: Piece, slot: Any, count: Any) -> Features:
    """The shares of each 64 columns. Queries are mapped twice, since registers have no room for all
    features in float32."""

    def of_block(block: Any) -> jax.Array:
        first = row_copies.first_of(block)
        own_z = walk.own.z.at[piece.state, pl.ds(first, HALF)]
        return weights(walk, block_of_q(walk, slot, block), own_z, count, first)

    def add_block(block: Any, den: jax.Array) -> jax.Array:
        return den + jnp.sum(of_block(block), axis=1)

    nothing = plgpu.layout_cast(jnp.zeros((C,), F32), mosaic.OF_ROWS)
    den = lax.fori_loop(0, walk.blocks, add_block, nothing)
    found = [shares(walk, of_block(block), den) for block in range(walk.blocks)]
    of_rounded = functools.reduce(jnp.add, (rounded for _, rounded in found))
    factor = factor_of_shares(walk, den, of_rounded)
    let_go(walk, slot)
    return at_once(in_blocks(one for one, _ in found), factor)


def weights(walk: Walk, x: jax.Array, z: Any, count: Any, first: Any = 0) -> jax.Array:
    """phi(q) z, [64, columns]."""
    phi = mosaic.kept(walk.phi.unrounded(x, first), count)
    return phi * mosaic.in_rows(load(z, OF_COLUMNS), C)


def shares(walk: Walk, phi: jax.Array, den: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The shares of `weights` in `den`, their sum over all columns: rounded, and the sum of the
    rounded ones."""
    inverse = 1.0 / jnp.maximum(den, LEAST_SUM)
    found = phi * mosaic.in_columns(inverse, phi.shape[1])
    found = mosaic.rounded(found, walk.tiling.dtype)
    return found, jnp.sum(found.astype(F32), axis=1)


def factor_of_shares(walk: Walk, den: jax.Array, of_rounded: jax.Array) -> jax.Array:
    """The factor of the products of shares and means, [64]: den / max(den, eps), divided by the sum
    of the rounded shares, which rounding moves away from 1."""
    of_all = den / jnp.maximum(den, max(walk.spec.eps, LEAST_SUM))
    return of_all / jnp.maximum(of_rounded, LEAST_SHARE)
