"""What `document_output.py` and `document_gradient.py` share: shared memory, loads, and `sum_keys`,
which computes the sums over a document's keys:

    S = sum_j phi(k_j) v_j^T [F, V],  z = sum_j phi(k_j) [F]

A block has a tile of one head, or of two heads of 64 columns. The two warpgroups of the role HALVES
have half of its columns each. With one head each has 64 features and 64 values, and both
synchronise where a product needs all columns; with two heads each warpgroup has a head of its own.

S, z and eps are in units of 1 / sum |z|, or, without a normaliser, S is in units of the scale:
features of rows that are all equal are then not rounded at all (`bidirectional.backward`).

Chunks are counted from a document's first row, which may be any row of the sequence. So copies are
untiled (`mosaic.Views`), and only the last chunk is cut: its rows are stored in groups of 8, and
the rest one by one.
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
    BF16,
    F32,
    HALF,
    OF_COLUMNS,
    OF_ROWS,
    Array,
    Buffer,
    Ring,
    Role,
    Signal,
    load,
    multiply,
)
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.document_table import Deal, Item
from ato_jax.ops.linear_attention.mosaic_gpu.frame import ROWS_OF_A_TILE, C
from ato_jax.ops.linear_attention.mosaic_gpu.narrow import widths_of
from ato_jax.ops.linear_attention.scans.totals import LEAST_USUAL, least_usual
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

SLOTS = 6


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    tiles: Array  # [SLOTS, 2, 64, 64] rows of any of the sequences
    s: Array  # [2, 2 or 1, 64, 64] S by halves of F and of V, later R; of pairs the first part of c
    rest: Array  # of the shape of s: in gradients the second part of S or R; of pairs w
    out: Array  # [2, 2, 64, 64] results to be stored, two a half; of pairs also c's second part
    cut: Array  # [2, 64, 64] the result of a cut chunk, with rows one behind the other
    low: Array  # [2, 2, 64, 64] the second part of phi(q), in two places by turns
    ones: Array  # [8, 64]
    z: Array  # [2, 64] float32
    z_read: Array  # [2, 64] float32: z in its unit
    unit: Array  # [2, 64] float32: the unit of z, repeated
    u: Array  # [2, 64] float32
    parts: Array  # [2, 2, 2, 64] float32: [even or odd chunk, half, terms of den or e]
    rows: Ring  # of tiles
    met: Signal  # both warpgroups of HALVES have arrived
    ids: Any = None  # [2, 64] int32: the segments of a chunk's rows, for each half
    mapped: Any = None  # a signal: phi' lies in the slot
    s_known: Any = None  # a signal: the unit of S and z is stored
    r_known: Any = None
    ones_known: Any = None


def storage_of(spec: LinearAttentionSpec, halves: Role, sums: Role | None = None) -> Storage:
    """`sums` is the role that accumulates R, in the gradients."""
    tiling = frame.tiling(spec)
    vector = plgpu.SMEM((2, HALF), F32)
    tiles = Buffer(tiling.tiles(SLOTS), copies=2)
    low = ones = unit = u = rest = None
    of_s = tiling.shared(2, 2 // tiling.heads, HALF, HALF)
    signals = {}
    if sums is not None:
        ones = Buffer(tiling.shared(mosaic.ALIKE, C))
        unit, u = Buffer(vector), Buffer(vector)
        rest = Buffer(of_s)
        signals = {"mapped": Signal((halves,), within="rows"), "s_known": Signal((halves,))}
        signals |= {name: Signal((sums,)) for name in ("r_known", "ones_known")}
    elif tiling.heads == 1 and not spec.feature_map.nonnegative:
        low = Buffer(tiling.shared(2, 2, C, HALF))
    return Storage(
        tiles=tiles,
        s=Buffer(of_s),
        rest=rest,
        out=Buffer(tiling.of_rows(2, 2, C, HALF)),
        cut=Buffer(plgpu.SMEM((2, C, HALF), BF16)),
        low=low,
        ones=ones,
        z=Buffer(vector),
        z_read=Buffer(vector),
        unit=unit,
        u=u,
        parts=Buffer(plgpu.SMEM((2, 2, 2, C), F32)),
        rows=Ring.of(SLOTS, (tiles,), (halves,) if sums is None else (halves, sums)),
        met=Signal((halves,)),
        ids=Buffer(plgpu.SMEM((2, C), jnp.int32)) if spec.segments == "self" else None,
        **signals,
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """The kernel's static arguments, its arrays in global memory, and its storage."""

    spec: LinearAttentionSpec
    deal: Deal
    own: Storage
    fields: Any
    number: Any
    q: Any
    k: Any
    v: Any
    ids: Any = None
    g: Any = None
    out: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None

    @property
    def tiling(self) -> mosaic.Tiling:
        return frame.tiling(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def group(self) -> int:
        return self.spec.H // self.spec.G

    @property
    def together(self) -> bool:
        """Whether both halves belong to one head."""
        return self.tiling.heads == 1

    def halves_of_head(self, half: Any) -> tuple[Any, ...]:
        """The halves of the head that a half belongs to."""
        return (0, 1) if self.together else (half,)

    def part_of(self, half: Any) -> Any:
        """Where S has a half of V, second to the half of F."""
        return half if self.together else 0

    def first_column(self, half: Any) -> Any:
        return half * HALF if self.together else 0

    def query_head(self, item: Item, member: Any) -> Any:
        first = item.head * self.group + member
        if self.together or self.group == 1:
            return first
        return mosaic.Heads(2 * item.head * self.group + member, self.group)

    def steps_of_sums(self, item: Item) -> Any:
        return 2 * item.keys.valid_chunks

    def steps_of(self, item: Item) -> Any:
        """Each step is a tile: k and v of a chunk, then q; or then q and g, and k and v again. An
        item made of pairs takes k, v and q, or k, v, q and g, for each query head."""
        of_queries = self.group * item.queries.chunks
        if self.g is None:
            steps = self.steps_of_sums(item) + of_queries
        else:
            steps = self.steps_of_sums(item) + 2 * (of_queries + item.keys.chunks)
        if self.ids is None:
            return steps
        return jnp.where(self.is_of_pairs(item), self.group * len(self.arrays_of_pairs), steps)

    @property
    def arrays_of_pairs(self) -> list[Any]:
        """The arrays of which an item that is computed from pairs takes a tile for each query head.
        In the forward pass their number is odd, so that stores alternate between the two places of
        `out`."""
        return [ref for ref in (self.k, self.v, self.q, self.g) if ref is not None]

    def is_of_pairs(self, item: Item) -> Any:
        """Whether the item is computed from the pairs of its rows: if it has at most 64. For an
        item without a valid key the results are 0, and the code with sums loads no keys."""
        return (item.queries.size <= C) & (item.keys.valid > 0)

    def either(self, item: Item, by_pairs: Any, by_sums: Any) -> None:
        """Calls the function for this item: `by_pairs` or `by_sums`."""
        if self.ids is None:
            by_sums(self, item)
            return
        of_pairs = self.is_of_pairs(item)
        pl.when(of_pairs)(functools.partial(by_pairs, self, item))
        pl.when(jnp.logical_not(of_pairs))(functools.partial(by_sums, self, item))

    def each(self, do: Any) -> Any:
        return self.deal.each(self.fields, self.number, self.steps_of, do)

    def meet(self) -> None:
        if self.together:
            self.own.met.arrive()
            self.own.met.wait()


def memory(walk: Walk) -> None:
    """Loads the chunks of each item."""
    walk.own.rows.drain(
        walk.each(lambda item: walk.either(item, load_pairs, load_document))
    )


def load_tile(walk: Walk, item: Item, step: Any, ref: Any, row: Any, head: Any) -> None:
    own = walk.own
    own.rows.acquire(step)
    slot = own.rows.slot(step)
    walk.tiling.copy_tile(ref, item, pl.ds(row, C), head, own.tiles, slot, own.rows.produced)


def load_pairs(walk: Walk, item: Item) -> None:
    """Loads a tile of k, v and q, and of g in gradients, for each query head. A ring releases its
    slots in order, so k and v cannot stay for all heads of a group, and are loaded for each."""

    def of_head(member: Any, _: None) -> None:
        for number, ref in enumerate(walk.arrays_of_pairs):
            step = item.before + len(walk.arrays_of_pairs) * member + number
            keys = ref is walk.k or ref is walk.v
            head = item.head if keys else walk.query_head(item, member)
            load_tile(walk, item, step, ref, item.queries.first, head)

    lax.fori_loop(0, walk.group, of_head, None)


def load_keys(walk: Walk, item: Item, before: Any, chunks: Any) -> None:
    def one(chunk: Any, _: None) -> None:
        for number, ref in enumerate((walk.k, walk.v)):
            step, row = before + 2 * chunk + number, item.keys.of(chunk)
            load_tile(walk, item, step, ref, row, item.head)

    lax.fori_loop(0, chunks, one, None)


def load_document(walk: Walk, item: Item) -> None:
    load_keys(walk, item, item.before, item.keys.valid_chunks)
    before = item.before + walk.steps_of_sums(item)
    chunks = item.queries.chunks
    sides = [ref for ref in (walk.q, walk.g) if ref is not None]

    def load_queries(turn: Any, _: None) -> None:
        head = walk.query_head(item, lax.div(turn, chunks))
        row = item.queries.of(lax.rem(turn, chunks))
        for number, ref in enumerate(sides):
            load_tile(walk, item, before + len(sides) * turn + number, ref, row, head)

    lax.fori_loop(0, walk.group * chunks, load_queries, None)
    if walk.g is not None:
        load_keys(walk, item, before + 2 * walk.group * chunks, item.keys.chunks)


class Sums(NamedTuple):
    """The arrays [64] of equal elements that `sum_keys` leaves in registers of a half."""

    unit: Any
    least: Any  # eps in that unit; None without a normaliser


def sum_keys(walk: Walk, item: Item) -> Sums:
    """Computes S and z of a document, and stores them to shared memory."""
    half = mosaic.group()
    start = [mosaic.zeros(HALF, HALF) for _ in walk.halves_of_head(half)]
    nothing = plgpu.layout_cast(jnp.zeros((HALF,), F32), OF_ROWS)

    def one(chunk: Any, sums: Any) -> Any:
        return sum_chunk(walk, item, half, chunk, sums)

    total, vector = lax.fori_loop(0, item.keys.valid_chunks, one, (start, nothing))
    return publish(walk, half, total, vector)


def sum_chunk(walk: Walk, item: Item, half: Any, chunk: Any, sums: Any) -> Any:
    own, (total, vector) = walk.own, sums
    step = item.before + 2 * chunk
    k_slot, v_slot = own.rows.slot(step), own.rows.slot(step + 1)
    count = item.keys.valid - chunk * C
    own.rows.produced.wait(k_slot)
    x = mosaic.load_transposed(own.tiles.at[k_slot, half])  # [F / 2, C]
    phi = walk.phi.transposed_keys(x, walk.first_column(half))
    phi = jnp.where(mosaic.hidden_position(1) < count, phi, jnp.zeros((), phi.dtype))
    own.rows.produced.wait(v_slot)
    keep_rows(walk, v_slot, half, count)
    halves = walk.halves_of_head(half)
    found = multiply(
        *(
            (of_half, [(phi, own.tiles.at[v_slot, other])])
            for of_half, other in zip(total, halves, strict=True)
        )
    )
    plgpu.commit_smem()  # reads finish before the next load overwrites them
    own.rows.consumed.arrive(k_slot)
    own.rows.consumed.arrive(v_slot)
    return list(found), vector + jnp.sum(phi.astype(F32), axis=1)


def keep_rows(walk: Walk, slot: Any, half: Any, count: Any) -> None:
    """Sets what a half has of a cut tile to 0 behind `count` rows, where the other one's may be
    read from then on: 0 does not cancel NaN."""

    @pl.when(count < C)
    def _() -> None:
        mosaic.keep_rows(walk.own.tiles.at[slot, half], count)
        plgpu.commit_smem()
        walk.meet()


def publish(walk: Walk, half: Any, total: Sequence[jax.Array], vector: jax.Array) -> Sums:
    own, spec = walk.own, walk.spec
    walk.meet()  # behind all that was read of the last document's
    unit, least = jnp.full((HALF,), spec.scale, F32), None
    unit = plgpu.layout_cast(unit, OF_ROWS)
    if spec.normalize:
        own.z.at[half][...] = vector
        plgpu.commit_smem()
        walk.meet()
        usual: Any = 0.0
        for other in walk.halves_of_head(half):
            usual += jnp.sum(jnp.abs(in_all_rows(own.z.at[other])), axis=1)
        unit = 1.0 / jnp.where(usual >= least_usual(spec), usual, 1.0)
        least = jnp.maximum(unit * spec.eps, LEAST_USUAL)
        own.z_read.at[half][...] = vector * unit
    for part, of_half in enumerate(total):
        store_sum(own, (half, part), of_half * mosaic.in_columns(unit, HALF))
    if own.unit is not None:
        own.unit.at[half][...] = unit
    plgpu.commit_smem()
    walk.meet()
    return Sums(unit, least)


def parts_of_features(walk: Walk, x: jax.Array, half: Any) -> list[jax.Array]:
    """phi(q) rounded, and where features may be negative what rounding left off."""
    first = walk.first_column(half)
    if walk.spec.feature_map.nonnegative:
        return [walk.phi.queries(x, first)]
    phi = walk.phi.unrounded(x, first)
    rounded = mosaic.rounded(phi)
    return [rounded, mosaic.rounded(phi - rounded.astype(F32))]


def share_features(walk: Walk, slot: Any, parity: Any, parts: list[jax.Array]) -> list[Any]:
    """Pairs of a half of F and the factors of phi(q) there, once `commit_smem` and `meet` are over:
    of all of a head, where both halves are needed, in q's place."""
    own, half = walk.own, mosaic.group()
    if not walk.together:
        return [(half, parts)]
    tiles = [own.tiles.at[slot], *([] if own.low is None else [own.low.at[parity]])]
    for part, tile in zip(parts, tiles, strict=True):
        tile.at[half][...] = part
    return [(other, [tile.at[other] for tile in tiles]) for other in range(2)]


def store_sum(own: Storage, place: tuple[Any, Any], x: jax.Array) -> None:
    """A block of S or R [64, 64], in the parts that it is multiplied in."""
    if own.rest is None:
        own.s.at[place][...] = x.astype(BF16)
        return
    for ref, part in zip((own.s, own.rest), mosaic.in_two_parts(x), strict=True):
        ref.at[place][...] = part


def parts_of_sums(own: Storage) -> list[Any]:
    return [own.s] if own.rest is None else [own.s, own.rest]


def in_all_rows(ref: Any) -> jax.Array:
    """A vector [64] of columns, [64, 64]."""
    return mosaic.in_rows(load(ref, OF_COLUMNS), C)


def leave(
    walk: Walk,
    own: Any,
    x: jax.Array,
    ref: Any,
    item: Item,
    row: Any,
    rows: Any,
    head: Any,
) -> None:
    """Stores the first `rows` rows of half a tile, x [64, 64], by way of `own` in shared memory,
    from `row` of a sequence on. The copy before the last one's source is free to be written."""
    half, cut = mosaic.group(), walk.own.cut

    def target(first: Any, count: int) -> Any:
        return walk.tiling.part(ref, item, pl.ds(first, count), head, half)

    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    own[...] = x.astype(BF16)
    plgpu.commit_smem()

    @pl.when(rows >= C)
    def _whole() -> None:
        plgpu.copy_smem_to_gmem(mosaic.for_copy(own), target(row, C))

    @pl.when(rows < C)
    def _cut() -> None:
        for first in range(0, C - ROWS_OF_A_TILE, ROWS_OF_A_TILE):

            @pl.when(rows >= first + ROWS_OF_A_TILE)
            def _(first: int = first) -> None:
                tile = own.at[pl.ds(first, ROWS_OF_A_TILE)]
                plgpu.copy_smem_to_gmem(mosaic.for_copy(tile), target(row + first, ROWS_OF_A_TILE))

        rest = lax.rem(rows, ROWS_OF_A_TILE)

        @pl.when(rest > 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mosaic.store_in_memory(cut.at[half], x.astype(BF16))
            plgpu.commit_smem()
            leave_rows(walk, ref, item, row, (rows - rest, rows), head)


def leave_rows(
    walk: Walk, ref: Any, item: Item, row: Any, rows: tuple[Any, Any], head: Any
) -> None:
    """Stores rows `rows[0]` to `rows[1]` of half a tile from `cut` one by one, and of these the
    head's own columns alone. Mosaic GPU stores what is contiguous in an array without a tensor map,
    so that nothing leaves out what lies beyond the head: there is the next one."""
    of_head = widths_of(walk.spec)[0]
    widths = [min(of_head - first, HALF) for first in map(walk.first_column, range(2))]

    def leave_half(half: Any, width: int) -> None:
        columns = pl.ds(walk.first_column(half), width)
        own_head = walk.tiling.head_of(head, half)

        def one(number: Any, _: None) -> None:
            of_row = row + number
            at = (of_row, own_head) if walk.spec.layout == "bthd" else (own_head, of_row)
            source = walk.own.cut.at[half, number, pl.ds(0, width)]
            plgpu.copy_smem_to_gmem(source, ref.at[(item.batch, *at, columns)])

        lax.fori_loop(*rows, one, None)

    half = mosaic.group()
    if widths[0] == widths[1]:
        leave_half(half, widths[0])
        return
    for number, width in enumerate(widths):
        pl.when(half == number)(functools.partial(leave_half, number, width))
