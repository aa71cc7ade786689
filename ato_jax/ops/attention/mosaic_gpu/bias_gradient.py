"""The gradient of a bias over pairs: ds, summed over the batch entries and heads that share it.

    dbias_ij = sum_e p_ij (dp_ij - delta_i)        of each entry e, a batch entry and head

A block of warpgroups owns R queries each and a few blocks of C keys, and walks over the entries for
each of these in turn, so that no sum is shared and nothing of all entries is stored. p and dp are
made again, as in `gradient.py` for dq, from the same rows of each query.

Warpgroups, and the barriers between them:

    MEMORY (n)    loads q and dout of an entry, and a block of its k and v
      |  own, xs, ys          q and dout, k, v: consumed once the products that read them are done.
      |                       Where all entries have room, q and dout stay
      |  pairs                bias and mask, consumed once in registers
      v
    CONSUMER (0 .. n - 1)     ds of an entry, [R, C] in registers, added up; dbias stored by TMA
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import Array, Buffer, Ring
from ato_jax.ops.attention.mosaic_gpu import frame, pairs
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.mosaic_gpu.gradient_pairs import (
    At,
    Own,
    gradient_of_scores,
    load_planes,
    signs,
    start_of_dp,
    unit_of_ds,
    weights,
    with_planes_of,
    with_queries,
)
from ato_jax.ops.attention.mosaic_gpu.gradient_storage import ROWS, Pass, Walk, dq_pass, roles_of
from ato_jax.ops.attention.mosaic_gpu.schedule import ITEM_BYTES, Item
from ato_jax.ops.attention.mosaic_gpu.storage import MEMORY, consumers_of
from ato_jax.ops.attention.spec import AttentionSpec

KEYS = 64  # of a block
# How many blocks of keys share the queries that a block of warpgroups loads.
MOST_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The launch: who owns which tile of dbias, and how many slots each ring has."""

    of: Pass
    own_stages: int
    pair_stages: int

    @property
    def full(self) -> tuple[bool, bool]:
        """Whether the bias has batch entries, and heads."""
        assert self.of.spec.bias is not None
        return self.of.spec.bias[:2]

    @property
    def owners(self) -> int:
        spec, (of_batch, of_head) = self.of.spec, self.full
        return (spec.B if of_batch else 1) * (spec.H if of_head else 1)

    @property
    def entries(self) -> int:
        """How many share an element."""
        return self.of.spec.B * self.of.spec.H // self.owners

    @property
    def stays(self) -> bool:
        """Whether q and dout of each entry have a slot, and are loaded once."""
        return self.entries <= self.own_stages

    @property
    def parts(self) -> int:
        """Into which the blocks of keys of a tile of queries are cut."""
        return int(pl.cdiv(self.of.other_blocks, MOST_BLOCKS))

    @property
    def blocks(self) -> int:
        return self.owners * self.of.tiles * self.parts

    def place(self, number: Any) -> tuple[tuple[Any, Any], Any, Any]:
        """The bias's batch entry and head, the first query, and the first block of keys."""
        part, number = lax.rem(number, self.parts), lax.div(number, self.parts)
        tile, owner = lax.rem(number, self.of.tiles), lax.div(number, self.of.tiles)
        heads = self.of.spec.H if self.full[1] else 1
        return (lax.div(owner, heads), lax.rem(owner, heads)), tile * self.of.tile, (
            part * MOST_BLOCKS
        )

    def entry(self, owner: tuple[Any, Any], number: Any) -> tuple[Any, Any]:
        """Batch entry and head of one that shares the owner's elements."""
        of_batch, of_head = self.full
        if of_batch:
            return owner[0], owner[1] if of_head else number
        heads = 1 if of_head else self.of.spec.H
        return lax.div(number, heads), owner[1] if of_head else lax.rem(number, heads)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    x: Array  # [own stages n, R, D] q
    y: Array  # [own stages n, R, V] dout
    other_x: Array  # [x stages, C, D] k
    other_y: Array  # [y stages, C, V] v
    ids: Array  # [x stages, C] int32, segments of keys, with other_x
    bias: Array  # [1 or 2, n, R, C]
    mask: Array  # as bias, or [1 or 2, C]
    dbias: Array  # [1, n, R, C]
    own: Ring
    xs: Ring
    ys: Ring
    pairs: Ring
    norm: None = None  # these lie by rows, as for dq
    minus_delta: None = None
    hashes: None = None


def tiles_of(spec: AttentionSpec, config: Config, bias_bytes: int = 4) -> Tiles | None:
    """With as many slots as fit, for elements of the bias of so many bytes; None where none do."""
    whole = dataclasses.replace(dq_pass(spec, config), others=KEYS, turns=False)
    slots_of = (2, 2, 2), (2, 2, 1), (1, 2, 1), (2, 1, 1), (1, 1, 1)
    for consumers, (stages, own, slots) in itertools.product(
        range(whole.consumers, 0, -1), slots_of
    ):
        of = dataclasses.replace(whole, consumers=consumers, x_stages=stages, y_stages=stages)
        tiles = Tiles(of, own, slots)
        if stages < own and not tiles.stays:
            continue
        tiles = dataclasses.replace(tiles, own_stages=min(own, tiles.entries))
        pairs_of_tile = of.tile * KEYS * bias_bytes
        planes = pairs.most_bytes(spec, of.block) - of.tile * KEYS * 4 + pairs_of_tile
        rows = tiles.own_stages * of.tile + stages * KEYS
        taken = rows * (spec.D + spec.V) * ITEM_BYTES + stages * KEYS * 4
        taken += slots * planes + pairs_of_tile + frame.BARRIER_BYTES
        if taken <= frame.MOST_BYTES:
            return tiles
    return None


def storage_of(tiles: Tiles, planes: pairs.Planes) -> Storage:
    of = tiles.of
    (own_x, own_y), (other_x, other_y) = of.own, of.other
    count = tiles.own_stages * of.consumers
    x = Buffer(own_x.tiles(count, ROWS), copies=of.consumers * own_x.parts)
    y = Buffer(own_y.tiles(count, ROWS), copies=of.consumers * own_y.parts)
    xs = Buffer(other_x.tiles(of.x_stages, KEYS), copies=other_x.parts)
    ys = Buffer(other_y.tiles(of.y_stages, KEYS), copies=other_y.parts)
    ids = Buffer(plgpu.SMEM((of.x_stages, KEYS), jnp.int32)) if of.spec.segments else None
    slots = tiles.pair_stages
    bias, mask = (None if plane is None else plane.buffer(of.block, slots) for plane in planes)
    assert planes.bias is not None
    readers = (consumers_of(of.consumers),)
    return Storage(
        x=x,
        y=y,
        other_x=xs,
        other_y=ys,
        ids=ids,
        bias=bias,
        mask=mask,
        dbias=planes.bias.buffer(of.block, 1),
        own=Ring.of(tiles.own_stages, (x, y), readers),
        xs=Ring.of(of.x_stages, (xs, ids), readers),
        ys=Ring.of(of.y_stages, (ys,), readers),
        pairs=Ring.of(slots, (bias, mask), readers),
    )


class Step(NamedTuple):
    """One entry's pairs with a block of keys."""

    item: Item
    block: Any
    number: Any  # among all of the block of warpgroups
    entry: Any
    is_first: Any  # whether it is the entry's first one

    def slot(self, tiles: Tiles, ring: Ring) -> Any:
        """The slot of its q and dout."""
        return ring.slot(self.entry if tiles.stays else self.number)


@dataclasses.dataclass(frozen=True)
class Work:
    """The kernel."""

    tiles: Tiles
    walk: Walk  # as for dq
    dbias: Any

    @property
    def storage(self) -> Storage:
        return self.walk.own  # type: ignore[return-value]

    def each_step(self, start: Any, do: Any, done: Any) -> Any:
        """Runs `do(step, carried)` for each block of keys and entry with pairs that may be visible,
        and `done(owner, first row, block, carried)` behind each block; `carried` begins as
        `start()`. Returns the number of steps."""
        tiles, of = self.tiles, self.tiles.of
        owner, first_row, first = tiles.place(lax.axis_index("block"))

        def one_block(block: Any, steps: Any) -> Any:
            def one_entry(number: Any, state: Any) -> Any:
                batch, head = tiles.entry(owner, number)
                seen = self.walk.seen(batch, first_row, of.tile)
                item = Item(jnp.int32(0), batch, head, first_row, seen, jnp.int32(0))

                def one(_: Any, state: Any) -> Any:
                    steps, carried = state
                    is_first = block == jnp.maximum(seen.first, first)
                    return steps + 1, do(Step(item, block, steps, number, is_first), carried)

                # One iteration or none.
                start, end = jnp.maximum(seen.first, block), jnp.minimum(seen.end, block + 1)
                return lax.fori_loop(start, end, one, state)

            steps, carried = lax.fori_loop(0, tiles.entries, one_entry, (steps, start()))
            done(owner, first_row, block, carried)
            return steps

        last = jnp.minimum(first + MOST_BLOCKS, of.other_blocks)
        return lax.fori_loop(first, last, one_block, jnp.int32(0))


def run(
    spec: AttentionSpec, config: Config, planes: pairs.Planes, bias: Any, arrays: Any
) -> jax.Array:
    """dbias, from the arrays of `gradient_storage.Walk` by name, for dq."""
    tiles = tiles_of(spec, config, bias.dtype.itemsize)
    assert tiles is not None

    def bind(refs: Sequence[Any], own: Any) -> Work:
        *given, dbias = refs
        named = dict(zip(arrays, given, strict=True))
        return Work(tiles, Walk(tiles.of, planes, own, **named), dbias)

    consumer, _ = cast = roles_of(tiles.of)
    parts = (MEMORY, memory), (consumer, consume)
    return mosaic.launch(
        "attention_backward_dbias_mosaic",
        mosaic.Program(mosaic.Roles(cast), storage_of(tiles, planes), parts, bind),
        tiles,
        jax.ShapeDtypeStruct(bias.shape, bias.dtype),
        tuple(arrays.values()),
        own_barriers=True,
    )


def memory(work: Work) -> None:
    """Loads rows of queries, blocks of keys, bias and mask."""
    walk, own, tiles, of = work.walk, work.storage, work.tiles, work.tiles.of

    def load_rows(at: Step) -> None:
        item, slot, barrier = at.item, at.slot(tiles, own.own), own.own.produced
        for side, ref, rows in zip(of.own, (walk.x, walk.y), (own.x, own.y), strict=True):
            for number in range(of.consumers):
                tile = rows.at[slot * of.consumers + number]  # [R, D or V]
                first = item.first_row + number * ROWS
                side.load(ref, item.batch, item.head, first, ROWS, tile, barrier.at[slot])

    def load(at: Step, _: None) -> None:
        item, step = at.item, at.number
        if tiles.stays:
            pl.when(at.is_first)(functools.partial(load_rows, at))
        else:
            own.own.acquire(step)
            load_rows(at)
        first, head = at.block * KEYS, walk.other_head(item, 0)
        for side, ring, ref, blocks in zip(
            of.other,
            (own.xs, own.ys),
            (walk.other_x, walk.other_y),
            (own.other_x, own.other_y),
            strict=True,
        ):
            ring.acquire(step)
            slot = ring.slot(step)
            barrier = ring.produced.at[slot]
            side.load(ref, item.batch, head, first, KEYS, blocks.at[slot], barrier)  # [C, D or V]
            if ring is own.xs and own.ids is not None:
                ids = walk.other_ids.at[item.batch, pl.ds(first, KEYS)]
                plgpu.copy_gmem_to_smem(ids, own.ids.at[slot], barrier)  # [C]
        load_planes(walk, item, item.head, step, first)

    steps = work.each_step(lambda: None, load, lambda *_: None)
    if not tiles.stays:
        own.own.drain(steps)
    for ring in (own.xs, own.ys, own.pairs):
        ring.drain(steps)


def consume(work: Work) -> None:
    """Makes R rows of each block of dbias."""
    number, own, of = mosaic.group(), work.storage, work.tiles.of

    def store(owner: Any, first_row: Any, block: Any, total: jax.Array) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile = own.dbias.at[0, number]
        found = total * unit_of_ds(of.spec)
        tile[...] = found.astype(work.dbias.dtype)
        plgpu.commit_smem()
        rows, keys = pl.ds(first_row + number * ROWS, ROWS), pl.ds(block * KEYS, KEYS)
        plgpu.copy_smem_to_gmem(tile, work.dbias.at[(*owner, rows, keys)])

    work.each_step(
        lambda: mosaic.zeros(ROWS, KEYS), functools.partial(one_step, work, number), store
    )
    plgpu.wait_smem_to_gmem(0)


def one_step(work: Work, number: Any, of_step: Step, total: jax.Array) -> jax.Array:
    """The sum with an entry's ds."""
    walk, own, of = work.walk, work.storage, work.tiles.of
    item, step, stays = of_step.item, of_step.number, work.tiles.stays
    first_row, slot = item.first_row + number * ROWS, of_step.slot(work.tiles, own.own)
    mine = with_planes_of(walk, with_queries(walk, Own(item, number, first_row)), 0)
    at = At(of_step.block, own.xs.slot(step), own.ys.slot(step), own.pairs.slot(step))
    if stays:
        pl.when(of_step.is_first)(functools.partial(own.own.produced.wait, slot))
    else:
        own.own.produced.wait(slot)
    own.xs.produced.wait(at.x_slot)
    own.ys.produced.wait(at.y_slot)
    x, y, xs, ys = (
        side.parts_of(tiles.at[n])
        for side, tiles, n in (
            (of.own[0], own.x, slot * of.consumers + number),
            (of.own[1], own.y, slot * of.consumers + number),
            (of.other[0], own.other_x, at.x_slot),
            (of.other[1], own.other_y, at.y_slot),
        )
    )

    def known(s: jax.Array) -> jax.Array:
        p, _ = weights(walk, mine, True, at, s)
        return signs(walk, mine, at, p)

    minus_delta = mosaic.in_columns(mine.minus_delta, KEYS)
    start = start_of_dp(of.spec, minus_delta)
    p, (dp,) = mosaic.multiply_under(
        frame.products(x, xs), (ROWS, KEYS), [(start, frame.products(y, ys))], known
    )
    plgpu.commit_smem()  # what was read, ahead of the loads that overwrite it
    if not stays:
        own.own.consumed.arrive(slot)
    own.xs.consumed.arrive(at.x_slot)
    own.ys.consumed.arrive(at.y_slot)
    ds = gradient_of_scores(of.spec, mine, p, dp, minus_delta)
    return total + existing(walk, mine, at, ds)


def existing(walk: Walk, mine: Own, at: At, ds: jax.Array) -> jax.Array:
    """ds, and 0 beyond the lengths, where it may be NaN."""
    spec, limits = walk.of.spec, walk.limits(mine.item.batch)
    if spec.q_lengths:
        ds = mosaic.kept(ds, limits.q_length - mine.first_row)
    if spec.kv_lengths:
        key = plgpu.broadcasted_iota(jnp.int32, ds.shape, dimension=1, layout=mosaic.TILE)
        ds = jnp.where(key < limits.kv_length - at.block * KEYS, ds, 0.0)
    return ds
