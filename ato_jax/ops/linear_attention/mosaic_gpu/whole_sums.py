"""The sums over the rows of each piece, [B, heads, P, F, V] and [B, heads, P, F] in float32.

`bidirectional.py` launches it where every query sees every key, and `wide_heads.py` for the pieces
of wide heads. The sums are over keys, or over queries with inverse and e of each row:

    S = sum_j phi(k_j) v_j^T [F, V],  z = sum_j phi(k_j) [F]
    R = sum_i phi'_i g_i^T [F, V],  u = -sum_i e_i phi'_i [F],  phi'_i = phi(q_i) inverse_i

x and y are k and v, or q and g. Warpgroups, and the barriers between them:

    MEMORY (last)   loads chunks as slots come free, across pieces
      |
      |  chunks: x, y and the numbers of each row
      v
    SUMS (others)   64 rows of the sum each, float32 in registers: phi(x)^T [64, C], in registers,
                    times all columns of y
                    masked: every warpgroup of SUMS has set its columns of y to 0 in rows that do
                    not count; only where there are lengths

MEMORY loads a slot of `chunks` again when all warpgroups of SUMS have consumed it. Where the sum
fills more registers than a block has, two blocks have half of its rows each: items count them, and
`share` is 0 or 1.

    symbol    shape                      what it is
    x         [blocks of F, 64, 64]      a chunk's rows of k or q, in blocks of the rows of the sum
    y         [64, V]                    a chunk's rows of v or g
    rows      [1 or 2, 64]               numbers of each row: a factor of keys, or inverse and e
    totals    [64, V]                    a warpgroup's rows of S or R, in blocks of columns
    vector    [64]                       likewise z or u
    z_own     [64]                       of the whole sum z, times `LARGEST`, for shares of queries
    largest   [64]                       in float16, each feature's largest magnitude so far

In float16 (`whole_units.py`) phi(k) is rounded in units, one for each feature: its largest
magnitude so far in the piece, over `LARGEST`. S is accumulated in these units, and z without.
Features of queries have such units, too, without a normaliser; with one, phi' are shares, which are
multiplied by `LARGEST`: phi'_i = phi(q_i) z inverse_i. Features of identity are exact and have no
unit.
"""

from __future__ import annotations

import dataclasses
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
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import (
    feature_maps,
    frame,
    row_copies,
    sums_walk,
    whole_units,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.sums_walk import COLUMNS
from ato_jax.ops.linear_attention.mosaic_gpu.whole_units import LARGEST, LEAST_SUM
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES = 4
MOST_ROWS = 192  # the most rows of a sum that a block's registers hold

MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)


def blocks_of_state(spec: LinearAttentionSpec) -> int:
    """The number of blocks that share S or R, and so of items for each piece."""
    return 1 if spec.D <= MOST_ROWS else 2


def sums_role(spec: LinearAttentionSpec) -> Role:
    workers = spec.D // blocks_of_state(spec) // HALF
    return Role("sums", registers=mosaic.workers_registers(workers), warpgroups=workers)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    rows: Array  # [STAGES, 1 or 2, 64] float32
    total: Array  # [workers, 64, COLUMNS] float32: columns of S or R that are being stored
    vector: Array  # [workers, 64] float32: z or u that is being stored
    x: Array  # [STAGES, workers, 64, 64]
    y: Array  # [STAGES, 64, V], or in blocks of 64 columns
    chunks: Ring  # of x, y and rows
    masked: Signal | None  # rows of y that do not count are 0; None without lengths

    barriers = ("chunks.consumed", "leave", "chunks.produced", "masked")


def tiling_of(spec: LinearAttentionSpec) -> row_copies.ByBlocks:
    return row_copies.by_blocks(spec, always=frame.is_wide(spec))


def storage_of(spec: LinearAttentionSpec, numbers: int, has_lengths: bool) -> Storage:
    """`numbers` of each row are loaded beside x and y."""
    tiling, sums = tiling_of(spec), sums_role(spec)
    workers = sums.warpgroups
    x = Buffer(tiling.of_rows(STAGES, workers, C, HALF), copies=workers)
    y = Buffer(tiling.tiles(STAGES), copies=tiling.blocks)
    rows = Buffer(plgpu.SMEM((STAGES, numbers, C), F32), copies=numbers) if numbers else None
    return Storage(
        rows=rows,
        total=Buffer(tiling.shared(workers, HALF, COLUMNS, dtype=F32)),
        vector=Buffer(plgpu.SMEM((workers, HALF), F32)),
        x=x,
        y=y,
        chunks=Ring.of(STAGES, filled=(x, y, rows), readers=(sums,)),
        masked=Signal((sums,)) if has_lengths else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk(sums_walk.Walk):
    """As the base has it; `z` [B, G, F] is given for shares of queries."""

    z: Any = None

    @property
    def tiling(self) -> row_copies.ByBlocks:
        return tiling_of(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def parts(self) -> int:
        return blocks_of_state(self.spec)

    @property
    def workers(self) -> int:
        return sums_role(self.spec).warpgroups

    @property
    def in_units(self) -> bool:
        return whole_units.has_units_of_features(self.spec) and not self.of_rows

    @property
    def some_rows_are_missing(self) -> bool:
        return self.lengths is not None or self.deal.length % C != 0

    def head_and_share(self, item: Item) -> tuple[Any, Any]:
        """An item's head, and which share of the rows of the sum its block has."""
        return lax.div(item.head, self.parts), lax.rem(item.head, self.parts)


def whole_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    x: jax.Array,
    y: jax.Array,
    of_rows: Sequence[jax.Array] = (),
    lengths: jax.Array | None = None,
    z: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel, and returns S and z, or R and u.

    Args:
      deal: counts items, `blocks_of_state` for each head.
      of_rows: [B, heads, T up to a whole chunk] float32 each: inverse and e of queries; of keys (),
        or a factor of their features.
      lengths: of keys, [B] int32; rows behind them are left out.
      z: [B, G, F] float32, if the sums are to be those of shares of queries.
    """
    given = {name: one for name, one in (("z", z), ("lengths", lengths)) if one is not None}

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        x, y, *others, total, vector = refs
        rows, rest = others[: len(of_rows)], others[len(of_rows) :]
        arrays = dict(x=x, y=y, of_rows=rows, total=total, vector=vector)
        return Walk(spec=spec, deal=deal, own=own, **arrays, **dict(zip(given, rest, strict=True)))

    role = sums_role(spec)
    storage = storage_of(spec, len(of_rows), lengths is not None)
    parts = (MEMORY, memory), (role, sums)
    program = mosaic.Program(mosaic.Roles((role, MEMORY)), storage, parts, bind)
    of_pieces = deal.B, deal.heads // blocks_of_state(spec), deal.pieces
    out_type = (
        jax.ShapeDtypeStruct((*of_pieces, spec.D, spec.V), F32),
        jax.ShapeDtypeStruct((*of_pieces, spec.D), F32),
    )
    arrays = (x, y, *of_rows, *given.values())
    found: tuple[jax.Array, jax.Array] = mosaic.launch(
        frame.name_of(name), program, deal, out_type, arrays
    )
    return found


def memory(walk: Walk) -> None:
    """Loads chunks."""
    own, tiling, workers = walk.own, walk.tiling, walk.workers

    def load_piece(item: Item) -> None:
        head, share = walk.head_and_share(item)

        def load_chunk(chunk: Any, _: None) -> None:
            step, rows = item.before + chunk, item.rows(chunk)
            slot = own.chunks.slot(step)
            own.chunks.acquire(step)
            loaded = own.chunks.produced
            for worker in range(workers):
                source = walk.x, item, rows, head, share * workers + worker  # [64, 64]
                target = own.x.at[slot, worker]
                row_copies.copy_block(tiling, *source, target, loaded.at[slot])
            tiling.copy_tile(walk.y, item, rows, head, own.y, slot, loaded)  # [64, V]
            walk.load_of_rows(item._replace(head=head), rows, slot, loaded.at[slot])

        lax.fori_loop(0, item.chunks, load_chunk, None)

    own.chunks.drain(walk.deal.each(load_piece))


class Piece(NamedTuple):
    """A piece, and which rows of its sum this warpgroup has."""

    item: Item
    worker: Any
    head: Any
    share: Any
    z_own: Any = None


def sums(walk: Walk) -> None:
    """Adds up 64 rows of each piece's sum."""

    def sum_piece(item: Item) -> None:
        piece = Piece(item, mosaic.group(), *walk.head_and_share(item))
        if walk.z is not None:
            piece = piece._replace(z_own=z_of(walk, piece))

        def one(chunk: Any, sums: Any) -> Any:
            return sum_chunk(walk, piece, chunk, sums)

        nothing = plgpu.layout_cast(jnp.zeros((HALF,), F32), OF_ROWS)
        blocks = walk.tiling.blocks
        start: Any = (mosaic.zeros(HALF, walk.spec.V // blocks),) * blocks, nothing
        if walk.in_units:
            start += (plgpu.layout_cast(jnp.full((HALF,), LEAST_SUM, F32), OF_ROWS),)
        totals, vector, *largest = lax.fori_loop(0, item.chunks, one, start)
        if walk.in_units:
            totals = times(totals, largest[0] * (1 / LARGEST))
        if walk.z is not None:
            totals = tuple(total * (1 / LARGEST) for total in totals)
            vector = vector * (1 / LARGEST)
        of_piece = item.batch, piece.head, item.piece
        rows = pl.ds((piece.share * walk.workers + piece.worker) * HALF, HALF)
        walk.leave_blocks(piece.worker, of_piece, rows, totals, vector)

    walk.each_sum(sum_piece)


def z_of(walk: Walk, piece: Piece) -> jax.Array:
    """z of this warpgroup's features, times `LARGEST`."""
    spec = walk.spec
    group = lax.div(piece.head, spec.H // spec.G)
    block = piece.share * walk.workers + piece.worker
    own = walk.z.at[piece.item.batch, group, pl.ds(block * HALF, HALF)]
    return load(own, OF_ROWS, optimized=False) * LARGEST  # [64]


def sum_chunk(walk: Walk, piece: Piece, chunk: Any, sums: Any) -> Any:
    """Carries the totals [64, V], in blocks, the vector [64], and in units `largest` [64]."""
    own, tiling, item = walk.own, walk.tiling, piece.item
    totals, vector, *largest_before = sums
    slot = own.chunks.slot(item.before + chunk)
    own.chunks.produced.wait(slot)
    x = mosaic.load_transposed(own.x.at[slot, piece.worker])  # [64, C]
    largest: list[jax.Array] = []
    if walk.in_units:
        (before,) = largest_before
        phi, added, *largest = map_keys_in_units(walk, piece, x, chunk, before)
        totals = times(totals, before / largest[0])
    else:
        map_rows = map_queries if len(walk.of_rows) == 2 else map_keys
        phi, added = map_rows(walk, piece, x, slot, chunk)
    if walk.lengths is not None:
        mask_values(walk, piece, slot, item.rows_within(chunk, walk.lengths))
    blocks = tiling.all_in(tiled(own.y).at[slot])
    totals = multiply(*((total, [(phi, y)]) for total, y in zip(totals, blocks, strict=True)))
    plgpu.commit_smem()  # reads finish before the next load overwrites them
    own.chunks.consumed.arrive(slot)
    return totals, vector + added, *largest


def first_column(walk: Walk, piece: Piece) -> Any:
    """The first of this warpgroup's columns of x, for what depends on columns that x lacks."""
    first = piece.worker * HALF
    if walk.tiling.is_filled and walk.parts > 1:
        return first + piece.share * walk.workers * HALF
    return first


def there(walk: Walk, piece: Piece, found: jax.Array, chunk: Any) -> jax.Array:
    """found [HALF, C] in rows that there are, which are its columns; else 0."""
    item = piece.item
    here = item.rows_within(chunk, walk.lengths)
    if here is None:
        here = walk.deal.length - item.first_row - chunk * C
    return jnp.where(mosaic.hidden_position(1) < here, found.astype(F32), 0.0)


def map_keys(
    walk: Walk, piece: Piece, x: jax.Array, slot: Any, chunk: Any
) -> tuple[jax.Array, jax.Array]:
    """phi(k) [64, C] of rows and columns that there are, and its sum over the rows."""
    first, dtype = first_column(walk, piece), walk.tiling.dtype
    if walk.of_rows:
        factor = mosaic.in_rows(load(walk.own.rows.at[slot, 0], OF_COLUMNS), HALF)
        phi = walk.phi.unrounded_transposed_keys(x, first) * factor
        phi = mosaic.rounded(there(walk, piece, phi, chunk), dtype)
    else:
        phi = walk.phi.transposed_keys(x, first)
        if walk.some_rows_are_missing:
            phi = mosaic.rounded(there(walk, piece, phi, chunk), dtype)
    return phi, jnp.sum(phi.astype(F32), axis=1)


def map_keys_in_units(
    walk: Walk, piece: Piece, x: jax.Array, chunk: Any, before: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """phi(k) [64, C] in units [64] of its features, which are at least those `before`; its sum over
    the rows; and the units, each the largest magnitude."""
    phi = walk.phi.unrounded_transposed_keys(x, first_column(walk, piece))
    if walk.some_rows_are_missing:
        phi = there(walk, piece, phi, chunk)
    size = phi if walk.spec.feature_map.nonnegative else jnp.abs(phi)
    largest = jnp.maximum(jnp.max(size, axis=1), before)
    phi = mosaic.rounded(phi * mosaic.in_columns(LARGEST / largest, C), walk.tiling.dtype)
    added = jnp.sum(phi.astype(F32), axis=1) * (largest * (1 / LARGEST))
    return phi, added, largest


def map_queries(
    walk: Walk, piece: Piece, x: jax.Array, slot: Any, chunk: Any
) -> tuple[jax.Array, jax.Array]:
    """phi' [64, C], or shares, and the sum of -e phi' over the rows."""
    inverse, e = (load(walk.own.rows.at[slot, number], OF_COLUMNS) for number in range(2))
    phi = walk.phi.unrounded_transposed_queries(x, first_column(walk, piece))
    phi = phi if piece.z_own is None else phi * mosaic.in_columns(piece.z_own, C)
    phi = phi * mosaic.in_rows(inverse, HALF)
    # Beyond the end g and e are 0, but phi(0) inverse may be large or not finite.
    is_cut = walk.deal.length % C != 0
    masks = walk.lengths is not None or is_cut and not walk.phi.slope_is_known
    phi = there(walk, piece, phi, chunk) if masks else phi
    rounded, e = mosaic.rounded(phi, walk.tiling.dtype), mosaic.in_rows(e, HALF)
    e = there(walk, piece, e, chunk) if masks else e
    return rounded, -jnp.sum(phi * e, axis=1)


def mask_values(walk: Walk, piece: Piece, slot: Any, count: Any) -> None:
    """Sets rows of y that do not count to 0: each warpgroup does so in some columns."""
    own, tiling = walk.own, walk.tiling

    @pl.when(count < C)
    def _() -> None:
        blocks = walk.spec.V // HALF // walk.workers
        for block in range(blocks):
            tile = tiling.block_in(tiled(own.y).at[slot], piece.worker * blocks + block)
            mosaic.keep_rows(tile, count)
        plgpu.commit_smem()
        own.masked.arrive()
        own.masked.wait()


def times(totals: Sequence[jax.Array], factors: jax.Array) -> tuple[jax.Array, ...]:
    """A sum, in parts of its columns, times a factor for each feature."""
    return tuple(total * mosaic.in_columns(factors, total.shape[1]) for total in totals)
