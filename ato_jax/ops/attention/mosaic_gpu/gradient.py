"""The kernel of the backward pass: one algorithm for dk and dv, and, its sides exchanged, for dq.

A block of warpgroups holds rows of one side, its own, and walks over the other side's:

    s_rc   = x_r . x'_c,  dp_rc = y_r . y'_c       float32, [R, C] in registers
    p_rc   = exp2(c s_rc - norm)                   norm = lse log2(e), of the query
    ds_rc  = p_rc (dp_rc - delta)                  delta = out . dout - dlse, of the query
    dx_r  += sum_c ds_rc x'_c                      float32, [R, D] in registers
    dy_r  += sum_c p_rc y'_c                       float32, [R, V] in registers

    symbol   shape             for dk and dv          for dq
    x, y     [.., R, D], V     k, v                   q, dout
    x', y'   [.., C, D], V     q, dout                k, v
    dx, dy   [R, D], [R, V]    dk, dv                 dq, none
    norm     [C] or [R]        of the others          of the own rows
    delta    [C] or [R]        likewise

So for dk and dv the pairs are transposed, keys by queries, as these sums need them: p and ds stay
in registers, the first factors of their products.

Warpgroups, and the barriers between them:

    MEMORY (n)    loads x and y of a tile, and blocks of x' and y', the last one first
      |  x_loaded, y_loaded   a tile's x, y; persistent: the rings own_xs, own_ys
      |  xs, ys: a block of x' (with norm), of y' (with delta) loaded
      |                       consumed once the products that read it are done
      |  pairs                bias and mask of a step loaded, and consumed once in registers
      v
    CONSUMER (0 .. n - 1)   R own rows each; turns, if any: one issues its products at a time
      |  cleaned              rows of x' and y' beyond their end are 0: by all, for all

A consumer's step:

    wait for its turn, if there are turns
    issue s = x x'^T and dp - delta = y y'^T - delta;  pass the turn on
    s is known:    p = exp2(c s - norm)     under the product dp
    dp is known:   ds = p (dp - delta);  round p and ds
    wait for its turn
    issue dy += p y' and dx += ds x';  pass the turn on
    both are known:   let x' and y' go

So while one consumer computes p and ds, the tensor cores run the products of another. Only the
blocks that are cut (by causality, a window, or the end of the keys) hide pairs: in loops of their
own around the one over whole blocks.

The sum dp - delta starts at -delta: its registers have to be written ahead of the product anyway,
those of s do not.

A group's heads of queries are H / G walks, one after the other, into the same sums dk and dv.

With a bias, scores and lse are natural, and p = exp2(log2(e) (s - lse)), since a bias may be so low
that lse has no digit left of the logarithm of the keys' number. So the kernel for dq sums each
query's weights up, and divides by that sum; `backward.py` brings it to dk and dv.

Where lse has a cotangent, ds is multiplied in two parts of 16 bits, by one product more: see
`may_have_alike_gradients`.

Where the launch is persistent, a block takes several items, a tile of own rows each (`rounds.py`).
Then x and y lie in rings, own_xs and own_ys, of one slot or two, and every ring counts its steps
across items. While the consumers work on an item, MEMORY loads the next one's first blocks of x'
and y', and its x and y where they have a second slot; with one slot, once that is free. Consumers
let go of the slots that hold dx and dy at the beginning of the next item, once the copy engine has
read the results, and of a y whose place no dy takes once the item's products are done.

In float16 p carries 2^15, from norm or, with a bias, from `natural_weights`. dp - delta carries
`gain` of the batch entry and group, a power of two that keeps it within 1. The sums lose both at
the end.
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
from ato_jax.mosaic import OF_ROWS
from ato_jax.ops.attention.mosaic_gpu import frame, pairs
from ato_jax.ops.attention.mosaic_gpu.frame import Side
from ato_jax.ops.attention.mosaic_gpu.gradient_pairs import (
    At,
    Own,
    dropped,
    gradient_of_scores,
    load_planes,
    natural_weights,
    per_query,
    shift,
    signs,
    start_of_dp,
    undropped,
    unit_of_ds,
    weights,
    with_planes_of,
    with_queries,
)
from ato_jax.ops.attention.mosaic_gpu.gradient_storage import (
    ROWS,
    Held,
    Pass,
    Storage,
    Walk,
    roles_of,
    storage_of,
)
from ato_jax.ops.attention.mosaic_gpu.schedule import Item
from ato_jax.ops.attention.mosaic_gpu.softmax import COLUMNS, by_columns
from ato_jax.ops.attention.mosaic_gpu.storage import MEMORY
from ato_jax.ops.attention.spec import AttentionSpec, may_have_alike_gradients


class Sums(NamedTuple):
    """In parts of columns where the others' tiles are in parts; none where it is not made. by_row
    [R, 8] each: what `Pass.by_row` says, over every 8th of the others."""

    dx: tuple[jax.Array, ...]
    dy: tuple[jax.Array, ...]
    by_row: tuple[jax.Array, ...]


def run(of: Pass, planes: pairs.Planes, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """Returns dx and dy, those that the pass makes, and the sums of `Pass.by_row`. `arrays` are
    those of `Walk` by name."""
    made = {"dx": of.with_x, "dy": of.with_y}
    wanted = [name for name, makes in made.items() if makes]
    shapes = [
        jax.ShapeDtypeStruct(array.shape, array.dtype)
        for array in (arrays[name.removeprefix("d")] for name in wanted)
    ]
    by_row = jax.ShapeDtypeStruct((of.spec.B, of.spec.H, of.tiles * of.tile), mosaic.F32)
    wanted += of.by_row
    shapes += [by_row] * len(of.by_row)

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        return Walk(of, planes, own, **dict(zip([*arrays, *wanted], refs, strict=True)))

    consumer, _ = cast = roles_of(of)
    parts = (MEMORY, memory), (consumer, consume)
    found = mosaic.launch(
        "_".join(("attention_backward", *(f"d{name}" for name in of.names), "mosaic")),
        mosaic.Program(mosaic.Roles(cast), storage_of(of, planes), parts, bind),
        of,
        tuple(shapes),
        tuple(arrays.values()),
        own_barriers=True,
    )
    return list(found)


def memory(walk: Walk) -> None:
    """Loads x and y of each item, and its blocks of x' and y'."""
    own, (x, y) = walk.own, (walk.held_x, walk.held_y)
    items, steps = walk.each_item(functools.partial(load_item, walk))
    for ring in (x.ring, None if y is None else y.ring):
        if ring is not None:
            ring.drain(items)
    own.xs.drain(steps())
    own.ys.drain(steps())
    if own.pairs is not None:
        own.pairs.drain(steps())


def load_item(walk: Walk, item: Item) -> None:
    own, of = walk.own, walk.of
    other_x, other_y = of.other
    of_own = [held for held in (walk.held_x, walk.held_y) if held is not None]
    # Loads that wait for the predecessor's results come behind those of the first block, which the
    # ring takes earlier. Two blocks ahead would be a deadlock where that ring has one slot.
    late = [held for held in of_own if not held.ahead]

    def load_member(member: Any, _: None) -> None:
        lax.fori_loop(0, item.steps, functools.partial(load_block, member), None)

    def load_block(member: Any, step: Any, _: None) -> None:
        now, head = walk.step(item, member, step), walk.other_head(item, member)
        first = item.block(step) * of.others
        rows = pl.ds(first, of.others)
        slot, barrier = own.xs.slot(now), own.xs.produced
        own.xs.acquire(now)
        tile = own.other_x.at[slot]  # [C, D]
        other_x.load(walk.other_x, item.batch, head, first, of.others, tile, barrier.at[slot])
        if own.norm is not None:
            source = walk.norm.at[item.batch, head, rows]  # [C]
            plgpu.copy_gmem_to_smem(source, own.norm.at[slot], barrier.at[slot])
        if own.hashes is not None:
            source = walk.hashes.at[item.batch, head, rows]  # [C]
            plgpu.copy_gmem_to_smem(source, own.hashes.at[slot], barrier.at[slot])
        if own.ids is not None:
            source = walk.other_ids.at[item.batch, rows]  # [C]
            plgpu.copy_gmem_to_smem(source, own.ids.at[slot], barrier.at[slot])
        slot, barrier = own.ys.slot(now), own.ys.produced
        own.ys.acquire(now)
        tile = own.other_y.at[slot]  # [C, V]
        other_y.load(walk.other_y, item.batch, head, first, of.others, tile, barrier.at[slot])
        if own.minus_delta is not None:
            source = walk.minus_delta.at[item.batch, head, rows]  # [C]
            plgpu.copy_gmem_to_smem(source, own.minus_delta.at[slot], barrier.at[slot])
        load_planes(walk, item, (head if of.of_keys else item.head), now, first)
        if late:
            pl.when(now == item.before)(lambda: load_own(late))

    def load_own(of_own: list[Held]) -> None:
        for held in of_own:
            held.load(item)

    load_own([held for held in of_own if held.ahead])
    lax.fori_loop(0, of.members, load_member, None)


def consume(walk: Walk) -> None:
    """Makes R rows of dx and dy of each item."""
    turns = walk.turns if walk.of.persistent else None
    if turns is not None:
        turns.open(mosaic.group())
    items, _ = walk.each_item(functools.partial(make_rows, walk))
    if turns is not None:
        turns.close(mosaic.group())
    if walk.of.persistent:
        let_go_of_results(walk, items - 1)
    plgpu.wait_smem_to_gmem(0)


def make_rows(walk: Walk, item: Item) -> None:
    of, number, (x, y) = walk.of, mosaic.group(), (walk.held_x, walk.held_y)
    first_row = item.first_row + number * ROWS
    mine = Own(
        item,
        number,
        first_row,
        x.place(item, number),
        number if y is None else y.place(item, number),
        gain=walk.gain_of(item),
    )
    if not of.of_keys:
        mine = with_queries(walk, mine)
    if of.persistent:
        # Behind the loads above: the copies of the last item's results run beside them.
        pl.when(item.turn > 0)(lambda: let_go_of_results(walk, item.turn - 1))
    x.wait(item)
    if y is not None:
        y.wait(item)
    sums = Sums(
        _zeros(of.other[0]) if of.with_x else (),
        _zeros(of.other[1]) if of.with_y else (),
        (),
    )
    own_turns = None if of.persistent else walk.turns
    if own_turns is not None:
        own_turns.open(number)
    sums = lax.fori_loop(0, of.members, functools.partial(walk_once, walk, mine), sums)
    if own_turns is not None:
        own_turns.close(number)
    if of.persistent and y is not None and not of.with_y:
        y.let_go(item.turn)
    finish(walk, mine, sums)


def let_go_of_results(walk: Walk, turn: Any) -> None:
    """Lets go of the slots that hold an item's results, once the copy engine has read them."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    walk.held_x.let_go(turn)
    if walk.of.with_y and walk.held_y is not None:
        walk.held_y.let_go(turn)


def _zeros(side: Side) -> tuple[jax.Array, ...]:
    return tuple(mosaic.zeros(ROWS, side.columns // side.parts) for _ in range(side.parts))


def walk_once(walk: Walk, mine: Own, member: Any, sums: Sums) -> Sums:
    """All blocks of one head of the others: cut ones, whole ones, and cut ones."""
    of, item = walk.of, mine.item
    mine = with_planes_of(walk, mine, member)
    limits = walk.limits(item.batch)
    cut_at_end = limits.high is not None or of.spec.segments or of.cleans or of.masks_the_end
    cut_at_start = limits.low is not None or of.spec.segments
    seen = walk.seen(item.batch, mine.first_row, ROWS)
    until, behind = item.seen.end - seen.whole_end, item.seen.end - seen.whole
    until, behind = (jnp.clip(bound, 0, item.steps) for bound in (until, behind))
    sums = sums._replace(by_row=tuple(mosaic.zeros(ROWS, COLUMNS) for _ in of.by_row))
    until = until if cut_at_end else jnp.int32(0)
    behind = behind if cut_at_start else item.steps

    rings = walk.own.xs, walk.own.ys, walk.own.pairs

    def step(is_cut: bool, number: Any, sums: Sums) -> Sums:
        now = walk.step(item, member, number)
        slots = (None if ring is None else ring.slot(now) for ring in rings)
        return one_step(walk, mine, is_cut, At(item.block(number), *slots), sums)

    if cut_at_end:
        sums = lax.fori_loop(0, until, functools.partial(step, True), sums)
    sums = lax.fori_loop(until, behind, functools.partial(step, False), sums)
    if cut_at_start:
        sums = lax.fori_loop(behind, item.steps, functools.partial(step, True), sums)
    return finish_rows(walk, mine, member, sums)


def one_step(walk: Walk, mine: Own, is_cut: bool, at: At, sums: Sums) -> Sums:
    of, own = walk.of, walk.own
    own.xs.produced.wait(at.x_slot)
    own.ys.produced.wait(at.y_slot)
    other_x, other_y = of.other
    xs = other_x.parts_of(own.other_x.at[at.x_slot])
    ys = other_y.parts_of(own.other_y.at[at.y_slot])
    if is_cut and of.cleans:
        clean(walk, mine, at, xs, ys)
    p, slope, dp, minus_delta = pairs_of(walk, mine, is_cut, at, xs, ys)
    dtype, of_dx, of_dy, by_row = frame.dtype_of(of.spec), [], [], sums.by_row
    if of.with_x:
        ds = gradient_of_scores(of.spec, mine, p, dp, minus_delta)
        by_row = tuple(
            total + by_columns(ds if name == "ds" else undropped(of.spec, p))
            for name, total in zip(of.by_row, by_row, strict=True)
        )
        factors = in_factors(of.spec, ds if slope is None else ds * slope)
        of_dx = [
            (total, [(factor, part) for factor in factors])
            for total, part in zip(sums.dx, xs, strict=True)
        ]
    if own.norm is not None or own.ids is not None:
        plgpu.commit_smem()  # vectors were read, ahead of the loads that overwrite them
    if of.with_y:
        p = mosaic.rounded(dropped(of.spec, p), dtype)
        of_dy = [(total, [(p, part)]) for total, part in zip(sums.dy, ys, strict=True)]
    await_turn(walk, mine)
    found = mosaic.multiply(
        *of_dy, *of_dx, meanwhile=functools.partial(pass_turn_on, walk, mine)
    )
    own.xs.consumed.arrive(at.x_slot)
    own.ys.consumed.arrive(at.y_slot)
    return Sums(found[len(of_dy) :], found[: len(of_dy)], by_row)


def pairs_of(
    walk: Walk,
    mine: Own,
    is_cut: bool,
    at: At,
    xs: list[Any],
    ys: list[Any],
) -> tuple[jax.Array, jax.Array | None, Any, Any]:
    """p, with `signs`, the softcap's slope, and dp, from `start_of_dp` on, and -delta, where dx is
    made."""
    of = walk.of
    # Kept in registers, the descriptors of x and y at D = 256 made the kernels spill 300 to 800
    # bytes.
    x_place = y_place = mosaic.plus_zero(mine.x_place, mine.first_row + at.block)
    if of.own_x_slots != of.own_y_slots:
        y_place = mosaic.plus_zero(mine.y_place, mine.first_row + at.block)
    x = of.own[0].parts_of(walk.own.x.at[x_place])
    issued = functools.partial(pass_turn_on, walk, mine)
    start, of_s = mosaic.zeros(ROWS, of.others), frame.products(x, xs)
    if not of.with_x:
        await_turn(walk, mine)
        (s,) = mosaic.multiply((start, of_s), meanwhile=issued)
        p, slope = weights(walk, mine, is_cut, at, s)
        return signs(walk, mine, at, p), slope, None, None

    def known(s: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        p, slope = weights(walk, mine, is_cut, at, s)
        if of.hold:
            mosaic.compute_first(p)
        return signs(walk, mine, at, p), slope

    y = of.own[1].parts_of(walk.own.y.at[y_place])
    minus_delta = per_query(walk, mine.minus_delta, walk.own.minus_delta, at.y_slot)
    await_turn(walk, mine)
    (p, slope), (dp,) = mosaic.multiply_under(
        of_s, (ROWS, of.others), [(start_of_dp(of.spec, minus_delta), frame.products(y, ys))],
        known, issued=issued
    )
    return p, slope, dp, minus_delta


def in_factors(spec: AttentionSpec, ds: jax.Array) -> list[jax.Array]:
    """ds in the dtype of q, rounded; as a second factor what rounding left off, if it counts."""
    found = [mosaic.rounded(ds, frame.dtype_of(spec))]
    if may_have_alike_gradients(spec):
        found.append(mosaic.rounded(ds - found[0].astype(mosaic.F32), found[0].dtype))
    return found


def await_turn(walk: Walk, mine: Own) -> None:
    if walk.turns is not None:
        walk.turns.wait(mine.number)


def pass_turn_on(walk: Walk, mine: Own) -> None:
    if walk.turns is not None:
        walk.turns.pass_on(mine.number)


def clean(walk: Walk, mine: Own, at: At, xs: list[Any], ys: list[Any]) -> None:
    """Sets x' and y' to 0 beyond their end, in blocks of 64 rows, each by one consumer: a weight of
    0 does not cancel NaN."""
    of = walk.of
    here = walk.limits(mine.item.batch).kv_length - at.block * of.others
    cleaned = walk.own.cleaned
    assert cleaned is not None

    def clean_block(block: int) -> None:
        for part in (*xs, *ys):
            rows = part.at[pl.ds(block * ROWS, ROWS)]  # [64, D or V]
            mosaic.keep_rows(rows, here - block * ROWS)

    @pl.when(here < of.others)
    def _() -> None:
        for block in range(of.others // ROWS):
            pl.when(mine.number == block % of.consumers)(functools.partial(clean_block, block))
        plgpu.commit_smem()
        cleaned.arrive()
        cleaned.wait()


def finish_rows(walk: Walk, mine: Own, member: Any, sums: Sums) -> Sums:
    """Stores what is summed over a head's pairs: by what dq is multiplied, the inverse of the sum
    of each query's weights; and ds of each key or query, which loses the units of dq."""
    of, item, gain = walk.of, mine.item, mine.gain
    unit, inverse = 2.0 ** -shift(of.spec), None
    for name, by_columns_of_row in zip(of.by_row, sums.by_row, strict=True):
        found, head = jnp.sum(by_columns_of_row, axis=1), item.head
        if name == "weights":
            if walk.sinks is not None:
                found = found + natural_weights(of.spec, walk.sinks[head], mine.norm)
            found = inverse = 1 / jnp.where(found == 0, 1.0, found * unit)
            factor = [mosaic.in_columns(found, total.shape[1]) for total in sums.dx]
            dx = tuple(total * by for total, by in zip(sums.dx, factor, strict=True))
            sums = sums._replace(dx=dx)
        else:
            if of.of_keys:
                head = walk.other_head(item, member)
            of_ds = unit_of_ds(of.spec)
            found = found * (of_ds if gain is None else of_ds / gain)
            if inverse is not None:
                found = found * inverse
            here = walk.limits(item.batch).q_length
            if here is not None:
                row = plgpu.broadcasted_iota(jnp.int32, found.shape, dimension=0, layout=OF_ROWS)
                found = jnp.where(row < here - mine.first_row, found, 0.0)
        at = item.batch, head, pl.ds(mine.first_row, ROWS)
        mosaic.store_in_memory((walk.weights if name == "weights" else walk.ds).at[at], found)
    return sums._replace(by_row=())


def finish(walk: Walk, mine: Own, sums: Sums) -> None:
    """Stores dx and dy, in the places of x and y."""
    of, own, item = walk.of, walk.own, mine.item
    tile_of_dx = own.x.at[mine.x_place]
    tile_of_dy = tile_of_dx if own.y is None else own.y.at[mine.y_place]
    here = walk.limits(item.batch).q_length
    here = None if here is None else here - mine.first_row
    gain, of_y = mine.gain, unit_of_ds(of.spec)
    of_x: Any = of.spec.scale * of_y if gain is None else of.spec.scale * of_y / gain
    plgpu.commit_smem()  # the products that read x and y, ahead of what takes their places
    for side, tile, totals, factor in (
        (of.own[0], tile_of_dx, sums.dx, of_x),
        (of.own[1], tile_of_dy, sums.dy, of_y),
    ):
        if not totals:
            continue
        for part, total in frame.alike(side.parts_of(tile), list(totals)):
            part[...] = mosaic.kept(total * factor, here).astype(side.dtype)
    plgpu.commit_smem()
    for side, tile, ref, totals in (
        (of.own[0], tile_of_dx, walk.dx, sums.dx),
        (of.own[1], tile_of_dy, walk.dy, sums.dy),
    ):
        if totals:
            side.store(tile, ref, item.batch, item.head, mine.first_row, ROWS)
