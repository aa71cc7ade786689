"""The forward kernel: a block of warpgroups takes a tile of queries, and its keys block by block.

    s_ij  = q_i . k_j                                   float32, [R, K] in registers
    p_ij, lasts_i = softmax.update(s)                   `softmax.py`
    acc_i = lasts_i acc_i + sum_j p_ij v_j              float32, [R, V] in registers
    out_i = factor_i acc_i,  lse_i                      `softmax.finish`

Warpgroups, and the barriers between them:

    MEMORY (n)    loads q of a tile, and its blocks of k and of v, the last one first
      |  queries: q loaded              consumed once its last scores are known, or, where out takes
      |                                 its place, once the copy engine has read out from there
      |  keys, values: a block loaded   consumed once the products that read it are done
      |  pairs: bias and mask loaded    consumed once they are in registers
      v
    CONSUMER (0 .. n - 1)    R queries each; turns, if any: one issues its products at a time
      |  cleaned                        rows of v beyond the keys' end are 0: by all, for all

A consumer's step t, with scores one step ahead of values:

    wait for k_t, and for its turn, if there are turns
    issue s_t = q k_t^T
    issue acc += p_(t-1) v_(t-1), once v_(t-1) is there;  pass the turn on
    s_t is known:   let k_t go;  p_t = softmax(s_t)     under the product with v_(t-1)
    acc is known:   let v_(t-1) go;  acc *= lasts_t

So the tensor cores have a product of this consumer, or of another, while p_t is computed. p stays
in registers: it is the first factor of its product. Bias and mask are read into registers while s_t
is in flight; at step 0, and where one over pairs has float32, once s_t is known. Only the blocks
that are cut (by causality, a window, segments, or the end of the keys) hide pairs: step 0, and
loops of their own around the one over whole blocks. In these p_t is computed behind both products.

Where the launch is persistent, a block takes several tiles (`rounds.py`), and the rings count
steps across them. If out has its own place in shared memory (`frame.has_own_outputs`), MEMORY loads
the next tile's queries and first keys and values while out is made and stored. Otherwise it loads
only the first keys ahead: the queries wait until out has left their place.

    symbol      shape           what it is
    q           [n, R, D]       a tile's queries
    k, v        [.., K, D], V   blocks of keys and values
    s, p        [R, K]          scores and weights; p rounded to 16 bits, or to 8 as q, k and v
    acc         [R, V]          sums of weighted values, in parts of columns where v is in parts
    out         [n, R, V]       in q's place, or in its own
    rest        [R, V]          what rounding took from out, in 8 bits, from registers (`rest.py`)
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
from ato_jax.mosaic import F32, OF_ROWS
from ato_jax.ops.attention.eight_bits import reads_eight_bits
from ato_jax.ops.attention.mosaic_gpu import (
    dropout,
    frame,
    pairs,
    rest,
    segments,
    sums,
    visibility,
)
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.mosaic_gpu.schedule import Item, Schedule
from ato_jax.ops.attention.mosaic_gpu.softmax import Rows
from ato_jax.ops.attention.mosaic_gpu.storage import MEMORY, Storage, Walk, consumer, storage_of
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, limits_array

Arrays = tuple[Any, Any]  # bias and mask of a step

class Carried(NamedTuple):
    """From step to step: weights whose values are still to be added, rounded, and the sums ahead
    of them."""

    p: jax.Array
    rows: Rows
    acc: tuple[jax.Array, ...]
    base: Any = None  # c_m of the sums that wait in out's place, if any do


class Own(NamedTuple):
    """A consumer's part of an item."""

    item: Item
    number: Any
    first_row: Any
    hashes: Any  # of its queries, for dropout
    unit: Any  # of its scores


def forward(
    spec: AttentionSpec,
    config: Config,
    inputs: Inputs,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Returns out, lse and, where `keep_rest`, what rounding took from out. The last two have rows
    up to a whole tile of queries.

    `scales` come with arrays of 8 bits: those of scores and of values, [B, H] (`float8.py`, which
    also says how v lies).
    """
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if scales is not None:
        given["units"], given["v_scales"] = scales
    if inputs.sinks is not None:
        given["sinks"] = inputs.sinks
    if (bounds := limits_array(spec, inputs)) is not None:
        given["bounds"] = bounds
    given |= segments.arrays_of(spec, config, inputs)
    planes = pairs.planes_of(spec, inputs)
    hashes = dropout.hashes(spec, inputs, frame.whole_tiles(spec, config))
    if hashes is not None:
        given["hashes"] = hashes
    blocks = int(pl.cdiv(spec.S, config.keys))
    given |= pairs.arrays_of(
        planes, inputs, frame.whole_tiles(spec, config), blocks * config.keys
    )

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        made = "out", "lse", *(["rest"] if spec.keep_rest else [])
        named = dict(zip([*given, *made], refs, strict=True))
        return Walk(spec, config, planes, own, **named)

    roles = mosaic.Roles((consumer(config), MEMORY))
    parts = (MEMORY, memory), (consumer(config), consume)
    program = mosaic.Program(roles, storage_of(spec, config, planes), parts, bind)
    rows = (spec.T, spec.H) if spec.layout == "bthd" else (spec.H, spec.T)
    of_out = jax.ShapeDtypeStruct((spec.B, *rows, spec.V), frame.dtype_of(spec))
    by_row = frame.lse_shape(spec, config)
    of_lse = jax.ShapeDtypeStruct(by_row, F32)
    of_rest = jax.ShapeDtypeStruct((*by_row, spec.V), jnp.int8)
    out_types = of_out, of_lse, *([of_rest] if spec.keep_rest else [])
    found = mosaic.launch(
        "attention_forward_mosaic",
        program,
        Schedule(spec, config),
        out_types,
        tuple(given.values()),
        own_barriers=True,
    )
    return tuple(found)


def memory(walk: Walk) -> None:
    """Loads queries, keys, values, bias and mask."""
    items, steps = walk.each_item(functools.partial(load_item, walk))
    walk.own.queries.drain(items)
    walk.own.keys.drain(steps)
    walk.own.values.drain(steps)
    if walk.own.pairs is not None:
        walk.own.pairs.drain(steps)


def load_item(walk: Walk, item: Item) -> None:
    """Queries come behind the first keys: the slot of the latter is free earlier."""
    own, spec, config = walk.own, walk.spec, walk.config
    kv_head = lax.div(item.head, jnp.int32(spec.H // spec.G))

    def load_block(step: Any, _: None) -> None:
        first_key = item.block(step) * config.keys
        load_planes(walk, item, step)
        for side, ring, ref, tiles in (
            (frame.keys(spec), own.keys, walk.k, own.k),  # [K, D]
            (frame.values(spec), own.values, walk.v, own.v),  # [K, V]
        ):
            slot = ring.slot(item.before + step)
            ring.acquire(item.before + step)
            barrier = ring.produced.at[slot]
            side.load(ref, item.batch, kv_head, first_key, config.keys, tiles.at[slot], barrier)
            if ring is own.keys and walk.k_ids is not None:
                ids = walk.k_ids.at[item.batch, pl.ds(first_key, config.keys)]
                plgpu.copy_gmem_to_smem(ids, own.k_ids.at[slot], barrier)  # [K]
            if ring is own.keys:
                pl.when(step == 0)(functools.partial(load_queries, walk, item))

    lax.fori_loop(0, item.steps, load_block, None)


def load_queries(walk: Walk, item: Item) -> None:
    own, config = walk.own, walk.config
    own.queries.acquire(item.turn)
    for number in range(config.consumers):
        frame.queries(walk.spec).load(
            walk.q,
            item.batch,
            item.head,
            item.first_row + number * config.rows,
            config.rows,
            own.q.at[number],  # [R, D]
            own.queries.produced.barrier,
        )


def load_planes(walk: Walk, item: Item, step: Any) -> None:
    """Loads bias and mask of a step."""
    ring = walk.own.pairs
    if ring is None:
        return
    ring.acquire(item.before + step)
    slot = ring.slot(item.before + step)
    first = item.first_row, item.block(step) * walk.config.keys
    for plane, ref, tiles in (
        (walk.planes.bias, walk.bias, walk.own.bias),
        (walk.planes.mask, walk.mask, walk.own.mask),
    ):
        if plane is not None and plane.in_ring:
            at, barrier = (item.batch, item.head), ring.produced.at[slot]
            block = pairs.block_of(walk.config)
            plane.load(ref, block, at, first, tiles.at[slot], barrier)


def consume(walk: Walk) -> None:
    """Makes R rows of out, lse and rest of each item."""
    number = mosaic.group()
    if walk.config.turns:
        walk.turns.open(number)
    walk.each_item(functools.partial(attend, walk, number))
    if walk.config.turns:
        walk.turns.close(number)
    plgpu.wait_smem_to_gmem(0)


def attend(walk: Walk, number: Any, item: Item) -> None:
    """The steps of an item."""
    spec, config = walk.spec, walk.config
    first_row, hashes = item.first_row + number * config.rows, None
    if walk.hashes is not None:
        at = item.batch, item.head, pl.ds(first_row, config.rows)
        hashes = mosaic.load(walk.hashes.at[at], OF_ROWS, optimized=False)  # [R]
    mine = Own(item, number, first_row, hashes, walk.unit(item))
    walk.own.queries.produced.wait()
    limits = walk.limits(item.batch)
    last_is_cut, others_are = visibility.cuts(spec, limits, config.keys)
    carried = first_step(walk, mine, last_is_cut)
    step = functools.partial(one_step, walk, mine)
    if others_are:
        seen = walk.seen(item.batch, mine.first_row, config.rows)
        until, behind = item.seen.end - seen.whole_end, item.seen.end - seen.whole
        until, behind = (jnp.clip(bound, 1, item.steps) for bound in (until, behind))
        if limits.high is not None or spec.segments or spec.kv_lengths:
            carried = lax.fori_loop(1, until, functools.partial(step, True), carried)
        else:
            until = jnp.int32(1)
        carried = lax.fori_loop(until, behind, functools.partial(step, False), carried)
        if limits.low is not None or spec.segments:
            carried = lax.fori_loop(behind, item.steps, functools.partial(step, True), carried)
    else:
        carried = lax.fori_loop(1, item.steps, functools.partial(step, False), carried)
    if walk.own.out is not None:
        walk.own.queries.consumed.arrive()
    finish(walk, mine, carried)


def factors_of_scores(walk: Walk, mine: Own, slot: Any) -> list[tuple[Any, Any]]:
    q = frame.queries(walk.spec).parts_of(walk.own.q.at[mine.number])
    k = frame.keys(walk.spec).parts_of(walk.own.k.at[slot])
    return frame.products(q, k)


def first_step(walk: Walk, mine: Own, is_cut: bool) -> Carried:
    own, config, spec = walk.own, walk.config, walk.spec
    slot = own.keys.slot(mine.item.before)
    own.keys.produced.wait(slot)
    await_turn(walk, mine)
    start = mosaic.zeros(config.rows, config.keys)
    (s,) = mosaic.multiply(
        (start, factors_of_scores(walk, mine, slot)),
        meanwhile=functools.partial(pass_turn_on, walk, mine),
    )
    ids = walk.ids(mine.item.batch, mine.first_row, slot) if is_cut else None
    own.keys.consumed.arrive(slot)
    rows = walk.softmax(mine.unit).start(config.rows)
    arrays = arrays_of_pairs(walk, mine, 0)
    p, rows, _ = weights(walk, mine, is_cut, 0, rows, s, ids, arrays)
    if walk.cleans:
        clean(walk, mine)
    widths = [spec.V // frame.values(spec).parts] * frame.values(spec).parts
    acc = tuple(mosaic.zeros(config.rows, width) for width in widths)
    base = None
    if config.steps_of_sums:
        await_stores(walk)
        base = rows.c_m
        for tile, total in sums.tiles_of(walk, mine, acc):
            tile[...] = mosaic.rounded(total, tile.dtype)
    return Carried(rounded(walk, p), rows, acc, base)


def one_step(walk: Walk, mine: Own, is_cut: bool, step: Any, carried: Carried) -> Carried:
    """Scores of a step, and the product with the values of the one before it."""
    own, config = walk.own, walk.config
    now, under = mine.item.before + step, config.under and not is_cut
    slot, v_slot = own.keys.slot(now), own.values.slot(now - 1)
    own.keys.produced.wait(slot)
    await_turn(walk, mine)
    early: list[Arrays] = []

    def issued() -> None:
        pass_turn_on(walk, mine)
        if walk.planes.fit_beside_scores:
            early.append(arrays_of_pairs(walk, mine, step))

    def known(s: jax.Array) -> tuple[jax.Array, Rows, jax.Array]:
        ids = walk.ids(mine.item.batch, mine.first_row, slot) if is_cut else None
        own.keys.consumed.arrive(slot)
        arrays = early[0] if early else arrays_of_pairs(walk, mine, step)
        found = weights(walk, mine, is_cut, step, carried.rows, s, ids, arrays)
        if config.hold and under:
            mosaic.compute_first(found[1].total)
        return found

    (p, rows, lasts), acc = mosaic.multiply_under(
        factors_of_scores(walk, mine, slot),
        (config.rows, config.keys),
        sums_of_values(walk, carried, v_slot),
        known,
        between=functools.partial(await_values, walk, step, v_slot),
        issued=issued,
        under=under,
    )
    own.values.consumed.arrive(v_slot)
    scaled = tuple(part * mosaic.in_columns(lasts, part.shape[1]) for part in acc)
    p = rounded(walk, p)
    if not config.steps_of_sums:
        return Carried(p, rows, scaled)
    scaled, base = lax.cond(
        lax.rem(step, config.steps_of_sums) == 0,
        functools.partial(sums.set_aside, walk, mine, rows.c_m),
        lambda *unchanged: unchanged,
        scaled,
        carried.base,
    )
    return Carried(p, rows, scaled, base)


def rounded(walk: Walk, p: jax.Array) -> jax.Array:
    """Weights as the first factor of a product."""
    if reads_eight_bits(walk.spec):
        return mosaic.in_eight_bits(p)
    return mosaic.rounded(p, frame.dtype_of(walk.spec))


def await_values(walk: Walk, step: Any, slot: Any) -> None:
    """Waits for the values of the step before this one; `clean` awaits those of step 0."""
    if walk.cleans:
        pl.when(step > 1)(lambda: walk.own.values.produced.wait(slot))
    else:
        walk.own.values.produced.wait(slot)


def clean(walk: Walk, mine: Own) -> None:
    """Sets the values of the first step to 0 beyond the keys' end, in blocks of 64 rows, each by
    one consumer: a weight of 0 does not cancel NaN."""
    own, config, item = walk.own, walk.config, mine.item
    slot = own.values.slot(item.before)
    own.values.produced.wait(slot)
    here = walk.limits(item.batch).kv_length - item.block(0) * config.keys

    def clean_block(block: int) -> None:
        for part in frame.values(walk.spec).parts_of(own.v.at[slot]):
            rows = part.at[pl.ds(block * mosaic.ROWS, mosaic.ROWS)]  # [64, V]
            mosaic.keep_rows(rows, here - block * mosaic.ROWS)

    @pl.when(here < config.keys)
    def _() -> None:
        for block in range(config.keys // mosaic.ROWS):
            pl.when(mine.number == block % config.consumers)(
                functools.partial(clean_block, block)
            )

    plgpu.commit_smem()
    assert own.cleaned is not None
    own.cleaned.arrive()
    own.cleaned.wait()


def sums_of_values(walk: Walk, carried: Carried, slot: Any) -> list[Any]:
    """acc + p v, for each part of v's columns."""
    v = frame.values(walk.spec).parts_of(walk.own.v.at[slot])
    v = [part.T for part in v] if reads_eight_bits(walk.spec) else v
    return [(acc, [(carried.p, part)]) for acc, part in zip(carried.acc, v, strict=True)]


def weights(
    walk: Walk,
    mine: Own,
    is_cut: bool,
    step: Any,
    rows: Rows,
    s: jax.Array,
    ids: visibility.Ids | None,
    arrays: Arrays,
) -> tuple[jax.Array, Rows, jax.Array]:
    """p in float32, the rows behind it, and what earlier sums are multiplied by. A factor that is
    rounded while products are in flight makes the assembler wait for them: it comes later."""
    spec, config = walk.spec, walk.config
    if spec.softcap is not None:
        s = jnp.tanh(s * (mine.unit / spec.softcap))
    bias, mask = arrays
    if bias is not None:
        s = pairs.add(s * (spec.softcap or mine.unit), bias)  # natural units
    if mask is not None:
        s = pairs.keep(s, mask)
    if is_cut:
        limits = walk.limits(mine.item.batch)
        kv_end = limits.kv_length if spec.kv_lengths or spec.S % config.keys else None
        first_key = mine.item.block(step) * config.keys
        s = visibility.hide(s, limits, mine.first_row, first_key, kv_end, ids)
    p, rows, lasts = walk.softmax(mine.unit).update(rows, s)
    if mine.hashes is not None:
        hashes = mosaic.in_columns(mine.hashes, config.keys)
        first_key = mine.item.block(step) * config.keys
        p = jnp.where(dropout.kept(spec, hashes, first_key, 1), p, 0.0)
    return p, rows, lasts


def arrays_of_pairs(walk: Walk, mine: Own, step: Any) -> Arrays:
    """Bias and mask of a step, in registers."""
    ring, block = walk.own.pairs, pairs.block_of(walk.config)
    at = mine.item.batch, mine.item.head
    of_rows = (
        None if plane is None else plane.of_rows(ref, block, at, mine.first_row)
        for plane, ref in zip(walk.planes, (walk.bias, walk.mask), strict=True)
    )
    slot = None if ring is None else ring.slot(mine.item.before + step)
    return walk.planes.read(walk.own, of_rows, block, slot, mine.number)


def finish(walk: Walk, mine: Own, carried: Carried) -> None:
    """Adds the last values. Stores out from its place in shared memory; lse and, where `keep_rest`,
    what rounding took from out, from registers."""
    own, spec, config, item = walk.own, walk.spec, walk.config, mine.item
    slot = own.values.slot(item.before + item.steps - 1)
    await_values(walk, item.steps, slot)
    acc = mosaic.multiply(*sums_of_values(walk, carried, slot))
    if config.steps_of_sums:
        plgpu.commit_smem()
        factor = walk.softmax(mine.unit).lasts(carried.base, carried.rows.c_m)
        both = sums.tiles_of(walk, mine, acc)
        acc = tuple(sums.with_earlier(tile, total, factor) for tile, total in both)
    own.values.consumed.arrive(slot)
    sink = None if walk.sinks is None else walk.sinks[item.head]
    factor, lse = walk.softmax(mine.unit).finish(carried.rows, sink)
    if walk.v_scales is not None:
        factor *= walk.v_scales[item.batch, item.head]
    if spec.dropout_rate:
        factor *= 1 / (1 - spec.dropout_rate)
    here = walk.limits(item.batch).q_length
    here = None if here is None else here - mine.first_row
    if here is not None:
        row = plgpu.broadcasted_iota(jnp.int32, lse.shape, dimension=0, layout=OF_ROWS)
        lse = jnp.where(row < here, lse, -jnp.inf if sink is None else sink)
    rows = pl.ds(mine.first_row, config.rows)
    at = (item.batch, rows, item.head) if spec.layout == "bthd" else (item.batch, item.head, rows)
    mosaic.store_in_memory(walk.lse.at[at], lse)
    tile = (own.q if own.out is None else own.out).at[mine.number]
    side, dtype = frame.outputs(spec), frame.dtype_of(spec)
    if own.out is None:
        plgpu.commit_smem()  # the products that read q, ahead of what takes its place
    elif not config.steps_of_sums:
        await_stores(walk)
    exact = []
    for part, total in frame.alike(side.parts_of(tile), list(acc)):
        exact.append(mosaic.kept(total * mosaic.in_columns(factor, total.shape[1]), here))
        part[...] = exact[-1].astype(dtype)
    plgpu.commit_smem()
    side.store(tile, walk.out, item.batch, item.head, mine.first_row, config.rows)
    if walk.rest is not None:
        rest.store(spec, walk.rest, at, exact)
    if own.out is None:
        await_stores(walk)
        own.queries.consumed.arrive()


def await_stores(walk: Walk) -> None:
    """Waits until the copy engine has read the last tile's out, whose place is filled again."""
    if Schedule(walk.spec, walk.config).rounds.persistent:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def await_turn(walk: Walk, mine: Own) -> None:
    if walk.config.turns:
        walk.turns.wait(mine.number)


def pass_turn_on(walk: Walk, mine: Own) -> None:
    if walk.config.turns:
        walk.turns.pass_on(mine.number)
