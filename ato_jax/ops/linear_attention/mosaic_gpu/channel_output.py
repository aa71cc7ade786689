"""out [B, T, H, V] of causal calls with a decay per step and channel, one block for each piece.

`causal.py` launches it, after `channel_sums.py` and the scan over pieces. Read `channel.py` first:
it defines q^, k~, G, the middle row m, and turns. With S [V, F] and z [F] the state ahead of the
chunk, scaled to its middle row, the kernel is `output.py` with q^ and k~ in place of phi(q) and
phi(k):

    w[i, j] = q^_i . k~_j for j <= i of the same chunk, else 0
    out_i = (q^_i S^T + sum_j w[i, j] v_j) / max(q^_i . z + sum_j w[i, j], eps)
    S = exp2(G_m' - G_m) (S + v^T k~),  likewise z      for the middle row m' of the next chunk

Warpgroups, and the barriers between them:

    MEMORY (2)   loads S and z of a piece, and its chunks as slots come free
      |    |    +---- start: S and z loaded, once ----------------+
      |    +--------- values: v loaded --------------------+      |
      |  gates_ring: gates loaded                          |      |
      |  rows: q and k loaded, in float16 powers of q      |      |
      v                                                    |      |
    FEATURES (3, 4)   half of F each: sums the gates; maps |      |
      |               q and k in place; z; q^_i . z        |      |
      |  mapped: q^, k~ and `onto` lie in the slot         |      |
      |  den_known: q^_i . z of both halves                |      |
      v                                                    v      v
    VALUES (0, 1)   half of V each: S_half [64, F] float32 in registers, w, out_half

MEMORY loads a slot of `rows` again when FEATURES and VALUES have consumed it, of `gates_ring` when
FEATURES has, and of `values` when VALUES has. FEATURES awaits `start`, too, and `values` ahead of
its store of den: if v is in the slot again, VALUES has read the old den there. Its two warpgroups
await each other once (`weights_stored`), as both multiply by the weights that one of them stores.

    symbol      shape          what it is
    q, k        [64, F]        a chunk's rows; q^ and k~ once they are mapped
    v           [64, V]        a chunk's rows
    S, z        [V, F], [F]    sums over all keys before the step, scaled to its middle row
    w           [64, 64]       weights of the step's pairs
    den         [64]           the denominator
    G_i         [64, F]        the sum of the gates from the chunk's first row to row i
    onto        [F]            the square root of the factor that scales S and z to the step's m

For the gradients (`keeps_features`) the kernel also writes q^ and k~, which MEMORY stores from
their slots behind `mapped`, and the sums of the gates over each half of a chunk, which FEATURES
stores. They are valid in pieces without steep chunks.

In a piece with steep chunks a step is a turn, and the chunk is loaded again for each of its turns.
A turn's part of out is 0 in all other rows, so the parts of a chunk's turns are added up.

Where features have either sign, products cancel and rounding errors do not: rounding each of q^,
k~, S or w, and out adds an error of 1.7e-3, in all 3.3e-3, twice that of rounding out alone, which
is the whole budget. So S and w are then multiplied in two parts: rounded, and what rounding left
off. The two parts of S take the same place in shared memory, one after the other.

Where segments begin in a chunk, masks apply to w, to what is read of S and z, and to the keys that
are added to S and z (`channel_turns.py`), and v^T k~ is a product of its own behind w.

Where a tile holds two heads, "half" means one of them, and products are over its 64 columns. Where
heads are cut into blocks (`channel_blocks.py`), the kernel returns numerators and denominators in
place of out. In float16 q^, k~, S and z are multiplied by powers of two (`channel_powers.py`).

The launch and the roles MEMORY and FEATURES are here, VALUES in `channel_output_rows.py`, and the
shared memory in `channel_output_storage.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, BF16, F32, HALF, OF_ROWS, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import channel, channel_blocks, chunk_decay, frame
from ato_jax.ops.linear_attention.mosaic_gpu.channel_output_rows import values
from ato_jax.ops.linear_attention.mosaic_gpu.channel_output_storage import (
    Storage,
    Walk,
    cast_of,
    storage_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu.channel_powers import Power, Powers
from ato_jax.ops.linear_attention.mosaic_gpu.channel_turns import Masks, Step
from ato_jax.ops.linear_attention.mosaic_gpu.chunk_borders import Borders
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.scans.borders import NO_BORDERS, OfSequence
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def channel_output(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    z: jax.Array,
    of_chunks: tuple[jax.Array, jax.Array, jax.Array],
    keeps_features: bool,
    borders: OfSequence = NO_BORDERS,
    powers: Powers | None = None,
) -> tuple[jax.Array, ...]:
    """Launches the kernel and returns out; or, where XLA adds up blocks (`channel_blocks.adds_up`),
    numerators in float32 and, if normalised, den [B, H, T up to a whole chunk]. If
    `keeps_features`, it also returns q^, k~, and the sums of the gates over each half of a chunk,
    [B, H, chunks, 2, F], which are valid in pieces that are not steep.

    Args:
      s, z: the state ahead of each piece, of the shapes that `output` takes.
      of_chunks: the gates; the number of turns of each chunk, [B, tiles, chunks]; and whether a
        piece has a chunk of more than one turn, [B, tiles, P]. There are G tiles, or G / 2 where a
        tile holds two heads.
      powers: in float16 (`channel_powers.py`), by which s and z are multiplied already.
    """
    # One item for each block: the storage of a piece's start is loaded once.
    deal = dataclasses.replace(deal, most_blocks=deal.items)
    gates, turns, steep = of_chunks
    given = dict(q=q, k=k, v=v, s=s, z=z, gates=gates, turns=turns, steep=steep)
    if borders.begins is not None and borders.chunks is not None:
        given |= {"begins": borders.begins, "borders_of": borders.chunks}
    if powers is not None:
        given |= {"powers_of_queries": powers.queries, "powers_of_heads": powers.of_heads}
    adds_up = channel_blocks.adds_up(spec)
    of_out = F32 if adds_up else frame.tiling(spec).dtype
    out_types = {"out": jax.ShapeDtypeStruct(frame.shape_of_values(spec, spec.H), of_out)}
    if adds_up and spec.normalize:
        rows = spec.B, spec.H, mosaic.whole_chunks(spec.T)
        out_types["den"] = jax.ShapeDtypeStruct(rows, F32)
    if keeps_features:
        both = spec.B, spec.H, pl.cdiv(spec.T, C), 2, spec.F
        features_type = jax.ShapeDtypeStruct(q.shape, BF16)
        out_types |= {"q_features": features_type, "k_features": features_type}
        out_types["halves"] = jax.ShapeDtypeStruct(both, F32)
    names = *given, *out_types

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        return Walk(spec, deal, own, **dict(zip(names, refs, strict=True)))

    cast = cast_of(spec)
    parts = (cast.memory, memory), (cast.features, features), (cast.values, values)
    storage = storage_of(spec, keeps_features)
    program = mosaic.Program(mosaic.Roles(cast), storage, parts, bind)
    name, types, arrays = frame.name_of("channel_output"), tuple(out_types.values()), given.values()
    found = mosaic.launch(name, program, deal, types, tuple(arrays), own_barriers=True)
    return tuple(found)


def memory(walk: Walk) -> None:
    """Loads a piece and its steps, and stores q^ and k~."""
    walk.deal.each(functools.partial(load_piece, walk))
    if walk.keeps_features:
        plgpu.wait_smem_to_gmem(0)


def load_piece(walk: Walk, item: Item) -> None:
    own, tiling, kv_head = walk.own, walk.tiling, walk.kv_head(item)
    for half in range(2):
        head, columns = tiling.head_of(kv_head, half), tiling.columns_of(half)
        for ref, start in ((walk.z, own.z), (walk.s, own.s)):
            source = ref.at[item.batch, head, item.piece, columns]  # [64] and [64, F]
            plgpu.copy_gmem_to_smem(source, start.at[half], own.start.barrier)
    load_one = functools.partial(load_step, walk, item, kv_head)
    steps = walk.each_step(item, lambda _: None, load_one)
    own.gates_ring.drain(steps)
    own.rows.drain(steps)
    own.values.drain(steps)


def load_step(walk: Walk, item: Item, kv_head: Any, step: Step, carried: None) -> None:
    own, tiling, spec = walk.own, walk.tiling, walk.spec
    chunk, rows = step.chunk, item.rows(step.chunk)
    slot, v_slot = own.rows.slot(step.number), own.values.slot(step.number)
    gates_slot = own.gates_ring.slot(step.number)
    own.gates_ring.acquire(step.number)
    head = channel_blocks.head_of_features(spec, walk.gates, kv_head)
    for half in range(2):
        source = tiling.part(walk.gates, item, rows, head, half)  # [64, 64]
        target = own.gates.at[gates_slot, half]
        plgpu.copy_gmem_to_smem(source, target, own.gates_ring.produced.at[gates_slot])
    own.rows.acquire(step.number)
    if walk.keeps_features:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the features that lay in the slot
    for ref, tiles, head in ((walk.k, own.k, kv_head), (walk.q, own.q, item.head)):
        head = channel_blocks.head_of_features(spec, ref, head)
        tiling.copy_tile(ref, item, rows, head, tiles, slot, own.rows.produced)  # [64, F]
    if walk.in_float16:
        source, produced = walk.powers_of_queries, own.rows.produced
        tiling.copy_vector(source, item, rows, own.powers, slot, produced)  # [64]
    own.values.acquire(step.number)
    head = channel_blocks.head_of_values(spec, walk.v, kv_head)
    for half in range(2):
        source = tiling.part(walk.v, item, rows, head, half)  # [64, 64]
        plgpu.copy_gmem_to_smem(source, own.v.at[v_slot, half], own.values.produced.at[v_slot])
    if walk.keeps_features and step.turn is None:
        # After the loads of the next chunk, which must not wait for these stores.
        leave_if(walk, item, chunk > 0, lambda: leave_features(walk, item, chunk - 1))
        is_last = chunk == item.chunks - 1
        leave_if(walk, item, is_last, lambda: leave_features(walk, item, chunk))


def leave_if(walk: Walk, item: Item, condition: Any, leave: Callable[[], None]) -> None:
    """Heads that differ in the block of values alone have the same features, and one of them leaves
    these."""
    if (is_first := channel_blocks.has_first_values(walk.spec, item.head)) is not None:
        condition = is_first & condition
    pl.when(condition)(leave)


def leave_features(walk: Walk, item: Item, chunk: Any) -> None:
    """Stores q^ and k~ of a chunk that is a step, from their slots."""
    own, spec = walk.own, walk.spec
    slot, rows = own.rows.slot(chunk), item.rows(chunk)
    own.mapped.wait(slot)
    for tiles, ref in ((own.q, walk.q_features), (own.k, walk.k_features)):
        head = channel_blocks.head_of_features(spec, ref, item.head)
        walk.tiling.leave_tile(tiles, slot, ref, item, rows, head)


def features(walk: Walk, half: int) -> None:
    """Maps half of q and k in place, keeps half of z, and computes q^_i . z for half of F."""
    own = walk.own
    mosaic.store_transposed(own.ones.at[half], mosaic.ones(C, ALIKE, walk.tiling.dtype))
    channel.store_halves(own.halves.at[half])
    if half == 0:
        own.since_middle[...] = channel.since_middle()
    plgpu.commit_smem()
    own.weights_stored.arrive()
    own.weights_stored.wait()
    walk.deal.each(lambda item: map_piece(walk, half, item))
    if walk.keeps_features:
        plgpu.wait_smem_to_gmem(0)


def map_piece(walk: Walk, half: int, item: Item) -> None:
    walk.own.start.wait()
    z = mosaic.in_columns(load(walk.own.z.at[half], OF_ROWS), ALIKE)  # [64, 8]
    none = plgpu.layout_cast(jnp.zeros((HALF,), F32), OF_ROWS)
    walk.each_step(item, lambda _: (z, none), functools.partial(map_step, walk, half, item))


def map_step(walk: Walk, half: int, item: Item, step: Step, carried: Any) -> Any:
    """Carries z's half [64, 8], scaled to the middle row of the step before, and the sum [64] of
    the gates from there to that step's end."""
    own, spec, (z, behind) = walk.own, walk.spec, carried
    borders = walk.borders(item, step.chunk)
    slot, v_slot = own.rows.slot(step.number), own.values.slot(step.number)
    since, first, second = sum_gates(walk, half, step, borders)
    # Its square is the factor of the state, which may underflow in float32.
    onto = jnp.exp2((behind + first) * 0.5)
    if spec.normalize:
        z = chunk_decay.times_squares(z, onto)
        rounded = walk.times(z, item, half, Power.SUMS).astype(walk.tiling.dtype)
        mosaic.store_transposed(own.z_rows.at[half], rounded)
    own.rows.produced.wait(slot)
    map_rows(walk, half, item, step, slot, since, onto)
    own.mapped.arrive(slot)
    if walk.keeps_features and step.turn is None:
        leave_halves(walk, half, item, step.chunk, (first, second))
    if spec.normalize:
        den, z = read_sums(walk, half, slot, Masks(borders, step.turn), z)
        own.values.produced.wait(v_slot)  # the old den in this slot was read
        den = walk.times(jnp.sum(den, axis=1) / ALIKE, item, half, Power.OVER_SUMS)
        own.den.at[v_slot, half][...] = den
        own.den_known.arrive(v_slot)
    own.rows.consumed.arrive(slot)
    return z, second


def sum_gates(
    walk: Walk, half: int, step: Step, borders: Borders
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sums of the gates for half of F: G_i - G_m [64, 64]; and over the first and the second
    half of the step, [64] each."""
    own, turn = walk.own, step.turn
    slot = own.gates_ring.slot(step.number)
    rounded, halves = own.rounded.at[half], own.halves.at[half]
    if turn is not None:
        channel.store_halves(halves, turn)
    own.gates_ring.produced.wait(slot)
    channel.round_gates(own.gates.at[slot, half], rounded, borders)
    plgpu.commit_smem()
    own.gates_ring.consumed.arrive(slot)
    weights = own.since_middle if turn is None else channel.since_middle(turn)
    since, both = multiply(
        channel.sums_of(weights, rounded), channel.sums_by_channel(rounded, halves)
    )
    first, second = channel.halves(both)
    return since, first, second


def map_rows(
    walk: Walk,
    half: int,
    item: Item,
    step: Step,
    slot: Any,
    since: jax.Array,
    onto: jax.Array,
) -> None:
    """Replaces half of q and k by q^ and k~, in float16 times their powers, and stores `onto`."""
    own, tiling = walk.own, walk.tiling
    q, k = (tiling.half_of(tiles, slot, half) for tiles in (own.q, own.k))
    of_q: Any = since
    if walk.in_float16:
        powers = load(tiling.rows_in(own.powers, slot, half), OF_ROWS)
        of_q += mosaic.in_columns(powers, HALF)
    own.onto.at[slot, pl.ds(half * HALF, HALF)][...] = onto
    kept: Any = {"for_flows": walk.keeps_features}
    channel.map_in_place(walk.spec, q, half, of_q, step.turn, **kept)
    of_k: Any = -since
    if walk.in_float16:
        of_k += walk.power_of(item, half, Power.LOG_KEYS)
    channel.map_in_place(walk.spec, k, half, of_k, step.turn, are_keys=True, **kept)
    plgpu.commit_smem()


def leave_halves(
    walk: Walk, half: int, item: Item, chunk: Any, both: tuple[jax.Array, jax.Array]
) -> None:
    """Writes the sums of the gates over each half of a chunk."""
    own, tiling = walk.own, walk.tiling
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for number, total in enumerate(both):
        own.both.at[half, number][...] = total
    plgpu.commit_smem()
    head, columns = tiling.head_of(item.head, half), tiling.columns_of(half)
    at = item.batch, head, lax.div(item.first_row, C) + chunk
    for number in range(2):
        target = walk.halves.at[(*at, number, columns)]
        plgpu.copy_smem_to_gmem(own.both.at[half, number], target)


def read_sums(
    walk: Walk, half: int, slot: Any, masks: Masks, z: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """q^ . z [64, 8] of half of F, in 8 equal columns, and z with the step's keys."""
    own, tiling, borders = walk.own, walk.tiling, masks.borders
    q, k = (tiling.half_of(tiles, slot, half) for tiles in (own.q, own.k))
    ones = own.ones.at[half]

    def store_ones(first: Any = None) -> None:
        """1 for each key, or for each from row `first` on and 0 for the others."""
        adds = mosaic.ones(C, ALIKE, tiling.dtype)
        adds = adds if first is None else mosaic.rows_within(adds, first, None)
        mosaic.store_transposed(ones, adds)
        plgpu.commit_smem()

    borders.when_some(lambda: store_ones(masks.adds))
    den, z = multiply(
        (mosaic.zeros(C, ALIKE), [(q, own.z_rows.at[half].T)]),
        (masks.left(z), [(k.T, ones.T)]),
    )
    den = borders.either(lambda: masks.reading(den), lambda: den)
    if walk.has_borders:
        plgpu.commit_smem()  # all warps have multiplied by it
    borders.when_some(store_ones)
    return den, z
