"""The backward kernels' passes, their roles and shared memory, and what their parts are called with
(`gradient.py` has the mathematics)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, Array, Buffer, Ring, Role, Signal
from ato_jax.ops.attention.mosaic_gpu import frame, pairs, segments, visibility
from ato_jax.ops.attention.mosaic_gpu.frame import Config, Side
from ato_jax.ops.attention.mosaic_gpu.rounds import Place, Rounds
from ato_jax.ops.attention.mosaic_gpu.schedule import ITEM_BYTES, Item
from ato_jax.ops.attention.mosaic_gpu.storage import MEMORY, consumers_of
from ato_jax.ops.attention.spec import AttentionSpec, Limits, Ranges, sums_by_query

ROWS = mosaic.ROWS  # of a consumer
# The most columns of dk and dv in one kernel. Their sums take half of the registers of each thread;
# p and dp need the rest.
MOST_COLUMNS = 256
# Mosaic GPU lays each buffer at a multiple of so many bytes, and all barriers take fewer.
ALIGNMENT = BARRIER_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Pass:
    """One launch: whose gradients it makes, and its block sizes.

    Attributes:
      of_keys: whether the own rows are keys, and the others queries; else the sides are exchanged.
      with_x, with_y: whether it makes dx, and dy: dk and dv, one of them, or dq.
      consumers: warpgroups of 64 own rows each.
      others: rows of a step.
      x_stages, y_stages: slots of them.
      hold, turns: as in `frame.Config`, of this kernel.
      most_blocks: the most blocks of the launch; None where each block takes one item.
      own_x_slots, own_y_slots: slots of own rows, see `with_slots_ahead`.
    """

    spec: AttentionSpec
    of_keys: bool
    with_x: bool
    with_y: bool
    consumers: int
    others: int
    x_stages: int
    y_stages: int
    hold: bool
    turns: bool
    most_blocks: int | None = None
    own_x_slots: int = 1
    own_y_slots: int = 1

    @property
    def tile(self) -> int:
        return self.consumers * ROWS

    @property
    def own(self) -> tuple[Side, Side]:
        """x and y: keys and values, or queries and the cotangents of out."""
        spec = self.spec
        if self.of_keys:
            return frame.keys(spec), frame.values(spec)
        return frame.queries(spec), frame.outputs(spec)

    @property
    def other(self) -> tuple[Side, Side]:
        return dataclasses.replace(self, of_keys=not self.of_keys).own

    @property
    def keeps_y(self) -> bool:
        """Whether own y has room of its own. Where only dy is made, y is not read, and dy takes the
        place of x, if it is as wide."""
        return self.with_x or self.spec.D != self.spec.V

    @property
    def names(self) -> list[str]:
        """The names of the inputs whose gradients it makes."""
        names = ("k", "v") if self.of_keys else ("q", "out")
        made = (self.with_x, self.with_y)
        return [name for name, makes in zip(names, made, strict=True) if makes]

    @property
    def by_row(self) -> tuple[str, ...]:
        """The quantities that this pass sums over the pairs of each own row: "weights" of a query
        with any bias, "ds" of a query for the gradient of few heads' sinks, and of a key for the
        gradient of a bias over keys alone. That of the sinks is without the softcap's slope."""
        bias = self.spec.bias
        if not self.with_x:
            return ()
        if self.of_keys:
            return ("ds",) if bias is not None and bias[3] and not bias[2] else ()
        of_weights = () if bias is None else ("weights",)
        return (*of_weights, "ds") if sums_by_query(self.spec) else of_weights

    @property
    def members(self) -> int:
        """How many heads of the other side each own head goes through."""
        return self.spec.H // self.spec.G if self.of_keys else 1

    @property
    def heads(self) -> int:
        """Own heads of a batch entry."""
        return self.spec.G if self.of_keys else self.spec.H

    @property
    def tiles(self) -> int:
        return int(pl.cdiv(self.own[0].length, self.tile))

    @property
    def rounds(self) -> Rounds:
        spec, causal, heads = self.spec, self.spec.right is not None, self.heads
        sizes = self.tiles, self.tile, self.group
        return Rounds(spec.B, heads, *sizes, causal, not self.of_keys, self.most_blocks)

    @property
    def persistent(self) -> bool:
        """Whether blocks take several items each."""
        return self.rounds.persistent

    @property
    def blocks(self) -> int:
        return self.rounds.blocks

    @property
    def group(self) -> int:
        """Own heads whose other rows fit the cache together."""
        spec = self.spec
        of_head = self.other[0].length * (spec.D + spec.V) * ITEM_BYTES
        together = max(1, frame.CACHE_BYTES // (of_head * self.members))
        return min(spec.B * self.heads, together * (1 if self.of_keys else spec.H // spec.G))

    @property
    def other_blocks(self) -> int:
        return int(pl.cdiv(self.other[0].length, self.others))

    @property
    def cleans(self) -> bool:
        """Whether others beyond their end may be anything, NaN too."""
        return self.spec.q_lengths if self.of_keys else self.spec.kv_lengths

    @property
    def masks_the_end(self) -> bool:
        """Whether others beyond their end have to be hidden. The weights of queries beyond it are 0
        by themselves, since their norm is infinite."""
        return not self.of_keys and (self.spec.kv_lengths or self.spec.S % self.others != 0)

    def fitted(self) -> Pass:
        """With fewer slots, where shared memory has no room for so many: of y' first where dx is
        made, else of x'. With fewer consumers, where one slot of each has no room beside bias and
        mask. With more slots of own rows, see `with_slots_ahead`."""
        found = self
        for name in ("y_stages", "x_stages") if self.with_x else ("x_stages", "y_stages"):
            while not found.fits and getattr(found, name) > 1:
                found = dataclasses.replace(found, **{name: getattr(found, name) - 1})
        while not found.fits and found.consumers > 1:
            consumers = found.consumers - 1
            turns = found.turns and consumers > 1
            found = dataclasses.replace(found, consumers=consumers, turns=turns)
        return found.with_slots_ahead()

    def with_slots_ahead(self) -> Pass:
        """Where a block takes several items: with a second slot of x, and of y, if shared memory
        has room for it beside two of each bias and mask. An item's rows are then loaded while the
        block works on its predecessor. With one slot the load waits until the copy engine has read
        the predecessor's results from there, or, for y where no dy takes its place, until the
        predecessor's products are done."""
        if not self.persistent:
            return self
        planes = pairs.most_bytes(self.spec, self.block, self.of_keys)
        for y_slots in (2, 1) if self.with_x else (1,):
            found = dataclasses.replace(self, own_x_slots=2, own_y_slots=y_slots)
            if found.shared_bytes + 2 * planes <= frame.MOST_BYTES:
                return found
        return self

    @property
    def block(self) -> pairs.Block:
        """The pairs of a step."""
        return pairs.Block(self.consumers, ROWS, self.others)

    @property
    def fits(self) -> bool:
        planes = pairs.most_bytes(self.spec, self.block, self.of_keys)
        return self.shared_bytes + planes <= frame.MOST_BYTES

    @property
    def shared_bytes(self) -> int:
        """The shared memory of all buffers but bias and mask, each rounded up to 1 KiB, and of the
        barriers."""
        spec, size = self.spec, jnp.dtype(self.spec.dtype).itemsize
        of_x, of_y = self.own_x_slots * spec.D, self.own_y_slots * spec.V
        elements = [self.tile * width for width in (of_x, of_y)[: 1 + self.keeps_y]]
        elements += [self.others * self.x_stages * spec.D, self.others * self.y_stages * spec.V]
        vectors = self.of_keys + spec.segments + (self.of_keys and spec.dropout_rate > 0)
        of_rows = [self.others * self.x_stages] * vectors
        of_rows += [self.others * self.y_stages] * (self.of_keys and self.with_x)
        buffers = [count * size for count in elements] + [count * 4 for count in of_rows]
        return sum(-(-count // ALIGNMENT) * ALIGNMENT for count in buffers) + BARRIER_BYTES


def dq_pass(spec: AttentionSpec, config: Config) -> Pass:
    sizes = config.dq_consumers, config.dq_keys, config.dq_stages
    return _pass(spec, config, False, *sizes).fitted()


def dkv_passes(spec: AttentionSpec, config: Config) -> list[Pass]:
    """One for dk and dv, or one for each where a consumer's registers do not hold both sums. Then
    s is made twice: one product more than the seven of all gradients."""
    sizes = config.dkv_consumers, config.dkv_queries, config.dkv_stages
    both = _pass(spec, config, True, *sizes)
    if spec.D + spec.V <= MOST_COLUMNS:
        return [both.fitted()]
    of_dk = dataclasses.replace(both, with_y=False)
    of_dv = dataclasses.replace(both, with_x=False)
    return [of_dk.fitted(), of_dv.fitted()]


def _pass(
    spec: AttentionSpec, config: Config, of_keys: bool, consumers: int, others: int, stages: int
) -> Pass:
    """The pass that makes all gradients of its side, before `fitted`."""
    persistent = config.dkv_persistent if of_keys else config.dq_persistent
    return Pass(
        spec,
        of_keys=of_keys,
        with_x=True,
        with_y=of_keys,
        consumers=consumers,
        others=others,
        x_stages=stages,
        y_stages=stages,
        hold=config.dkv_hold if of_keys else config.dq_hold,
        turns=config.dkv_turns if of_keys else config.dq_turns,
        most_blocks=config.multiprocessors if persistent else None,
    )


def passes(spec: AttentionSpec, config: Config) -> list[Pass]:
    return [dq_pass(spec, config), *dkv_passes(spec, config)]


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    x: Array  # [own x slots * n, R, D]; at an item's end dx, or dy without a y
    y: Array  # [own y slots * n, R, V]; at an item's end dy, if made; None without `Pass.keeps_y`
    other_x: Array  # [x stages, C, D]
    other_y: Array  # [y stages, C, V]
    norm: Array  # [x stages, C] float32, with other_x, where the others are queries
    minus_delta: Array  # [y stages, C] float32, with other_y, likewise
    ids: Array  # [x stages, C] int32, segments of the others, with other_x
    hashes: Array  # [x stages, C] int32, for dropout, with norm
    bias: Array  # [1 or 2, n, R, C], with `Plane.across` [1 or 2, n, C, R], or [1 or 2, C]
    mask: Array  # [1 or 2, n, R, C] or [1 or 2, C]
    x_loaded: Signal | None  # where a block takes one item
    y_loaded: Signal | None  # likewise, if y is read
    own_xs: Ring | None  # where it takes several
    own_ys: Ring | None  # likewise, if y is read
    xs: Ring
    ys: Ring
    pairs: Ring | None  # of bias and mask
    cleaned: Signal | None


def storage_of(of: Pass, planes: pairs.Planes) -> Storage:
    (own_x, own_y), (other_x, other_y) = of.own, of.other
    n = of.consumers
    x = Buffer(own_x.tiles(of.own_x_slots * n, ROWS), copies=n * own_x.parts)
    y = None
    if of.keeps_y:
        y = Buffer(own_y.tiles(of.own_y_slots * n, ROWS), copies=n * own_y.parts)
    xs = Buffer(other_x.tiles(of.x_stages, of.others), copies=other_x.parts)
    ys = Buffer(other_y.tiles(of.y_stages, of.others), copies=other_y.parts)
    norm = minus_delta = ids = hashes = None
    if of.of_keys:
        norm = Buffer(plgpu.SMEM((of.x_stages, of.others), F32))
        if of.spec.dropout_rate:
            hashes = Buffer(plgpu.SMEM((of.x_stages, of.others), jnp.int32))
        minus_delta = Buffer(plgpu.SMEM((of.y_stages, of.others), F32)) if of.with_x else None
    if of.spec.segments:
        ids = Buffer(plgpu.SMEM((of.x_stages, of.others), jnp.int32))
    slots = planes.slots(of.block, frame.MOST_BYTES - of.shared_bytes)
    bias, mask = (None if plane is None else plane.buffer(of.block, slots) for plane in planes)
    readers = (consumers_of(of.consumers),)
    x_loaded = y_loaded = own_xs = own_ys = None
    if of.persistent:
        own_xs = Ring.of(of.own_x_slots, (x,), readers)
        own_ys = Ring.of(of.own_y_slots, (y,), readers) if of.with_x else None
    else:
        x_loaded = Signal((x,))
        y_loaded = Signal((y,)) if y is not None and of.with_x else None
    return Storage(
        x=x,
        y=y,
        other_x=xs,
        other_y=ys,
        norm=norm,
        minus_delta=minus_delta,
        ids=ids,
        hashes=hashes,
        bias=bias,
        mask=mask,
        x_loaded=x_loaded,
        y_loaded=y_loaded,
        own_xs=own_xs,
        own_ys=own_ys,
        xs=Ring.of(of.x_stages, (xs, norm, ids, hashes), readers),
        ys=Ring.of(of.y_stages, (ys, minus_delta), readers),
        pairs=Ring.of(slots, (bias, mask), readers) if planes.in_ring else None,
        cleaned=Signal(readers) if of.cleans else None,
    )


def roles_of(of: Pass) -> tuple[Role, Role]:
    return consumers_of(of.consumers), MEMORY


@dataclasses.dataclass(frozen=True)
class Held:
    """x or y of an item in shared memory, loaded from `ref`. Where a block takes several items, the
    slots are a `ring`, else there is one slot, and `loaded` is its signal."""

    side: Side
    ref: Any
    tiles: Any
    consumers: int
    loaded: Signal | None
    ring: Ring | None

    @property
    def ahead(self) -> bool:
        """Whether an item's rows are loaded without waiting for its predecessor."""
        return self.ring is None or self.ring.slots > 1

    def place(self, item: Item, number: Any) -> Any:
        """Which of `tiles` a consumer's rows are."""
        if self.ring is None or self.ring.slots == 1:
            return number
        return self.ring.slot(item.turn) * self.consumers + number

    def load(self, item: Item) -> None:
        if self.ring is not None:
            self.ring.acquire(item.turn)
            barrier = self.ring.produced.at[self.ring.slot(item.turn)]
        else:
            assert self.loaded is not None
            barrier = self.loaded.barrier
        for number in range(self.consumers):
            first = item.first_row + number * ROWS
            tile = self.tiles.at[self.place(item, number)]  # [R, D or V]
            self.side.load(self.ref, item.batch, item.head, first, ROWS, tile, barrier)

    def wait(self, item: Item) -> None:
        if self.ring is not None:
            self.ring.produced.wait(self.ring.slot(item.turn))
        else:
            assert self.loaded is not None
            self.loaded.wait()

    def let_go(self, turn: Any) -> None:
        assert self.ring is not None
        self.ring.consumed.arrive(self.ring.slot(turn))


@dataclasses.dataclass(frozen=True)
class Walk:
    """The kernel: its pass, its arrays in global memory, and its storage."""

    of: Pass
    planes: pairs.Planes
    own: Storage
    x: Any
    y: Any
    other_x: Any
    other_y: Any
    norm: Any  # [B, H, T up to whole tiles]
    minus_delta: Any
    dx: Any = None
    dy: Any = None
    weights: Any = None  # [B, H, own rows up to whole tiles] float32, see `gradient.finish_rows`
    ds: Any = None  # likewise
    gain: Any = None  # [B, G]
    bounds: Any = None
    own_ids: Any = None
    other_ids: Any = None
    shared: Any = None
    bias: Any = None
    mask: Any = None
    sinks: Any = None
    hashes: Any = None  # as norm, int32, for dropout

    @property
    def turns(self) -> mosaic.Turns | None:
        consumers = self.of.consumers
        return mosaic.Turns(consumers, consumers + 1) if self.of.turns else None

    def limits(self, batch: Any) -> Limits:
        """As own rows see others."""
        spec = self.of.spec
        found = visibility.limits_of(spec, self.bounds, batch)
        return visibility.exchanged(spec, found) if self.of.of_keys else found

    def seen(self, batch: Any, first_row: Any, rows: int) -> Ranges:
        """The blocks of others that so many own rows see."""
        blocks = self.of.other_blocks
        found = visibility.ranges(self.limits(batch), first_row, rows, self.of.others, blocks)
        if self.shared is None:
            return found
        allowed = segments.ranges_of(ROWS, self.shared, batch, first_row, rows)
        return visibility.intersection(found, allowed, blocks)

    @property
    def held_x(self) -> Held:
        own, of = self.own, self.of
        return Held(of.own[0], self.x, own.x, of.consumers, own.x_loaded, own.own_xs)

    @property
    def held_y(self) -> Held | None:
        """None where y is not read."""
        own, of = self.own, self.of
        if own.y_loaded is None and own.own_ys is None:
            return None
        return Held(of.own[1], self.y, own.y, of.consumers, own.y_loaded, own.own_ys)

    def item(self, place: Place, turn: Any, before: Any) -> Item:
        """Its steps are those of one head of the others; `before` counts those of all."""
        batch, head, first_row = place
        seen = self.seen(batch, first_row, self.of.tile)
        return Item(turn, batch, head, first_row, seen, before)

    def each_item(self, do: Callable[[Item], None]) -> tuple[Any, Callable[[], Any]]:
        """Runs `do` for each item of this block; returns how many items these were, and a function
        that returns how many steps."""
        of, block, nothing = self.of, lax.axis_index("block"), jnp.int32(0)

        def one(turn: Any, place: Place, before: Any) -> Any:
            item = self.item(place, turn, before)
            do(item)
            return before + of.members * item.steps

        if of.persistent:
            items, steps = of.rounds.each(block, one, nothing)
            return items, lambda: steps
        item = self.item(of.rounds.place(block), nothing, nothing)
        do(item)
        return 1, lambda: of.members * item.steps

    def step(self, item: Item, member: Any, number: Any) -> Any:
        """A step's number among all of the block."""
        now = member * item.steps + number
        return item.before + now if self.of.persistent else now

    def other_head(self, item: Item, member: Any) -> Any:
        share = self.of.spec.H // self.of.spec.G
        if self.of.of_keys:
            return item.head * share + member
        return lax.div(item.head, jnp.int32(share))

    def gain_of(self, item: Item) -> Any:
        if self.gain is None:
            return None
        share = self.of.spec.H // self.of.spec.G
        head = item.head if self.of.of_keys else lax.div(item.head, jnp.int32(share))
        return self.gain[item.batch, head]
