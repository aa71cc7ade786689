"""One kernel for out, dq, dv and dk, in units of 128 rows that do not depend on each other.

`wide_heads.py` launches it, after `wide_states.py` has stored the state of each run of 256 rows. A
unit reads the state of its run, or the states on both sides where rows see both, and adds the pairs
of rows within the run. The four passes differ in which arrays are x, y, p and T. With T the state
of all rows ahead of row i's run, and w[i, j] = x_i . y_j where j is in the run and row i sees it:

    found_i = x_i T + sum_j w[i, j] p_j                     [B, T, heads, D], or as the layout says

    pass    x        y        p         T           found
    OUT     phi(q)   phi(k)   v         S           out_i, before the division by den_i
    DQ      g        v        phi(k)    S^T         G_i
    DV      phi(k)   phi'(q)  g         R           dv_i: rows see later rows, and R is behind
    DK      v        g        phi'(q)   R^T         dk_i over phi(k)'s derivative, without u

with phi'(q_i) = phi(q_i) inverse_i. DK subtracts e of the query from w. With z_i the sum of phi(k)
over all keys that row i sees, DQ computes from G_i, in float32 and before it is rounded,

    den_i = phi(q_i) . z_i       inverse_i = 1 / max(den_i, eps)
    e_i   = phi(q_i) . G_i inverse_i,  0 where den_i <= eps
    dq_i  = (G_i - e_i z_i) inverse_i times phi(q_i)'s derivative

With a decay or segments x_i T has a factor of row i, and w[i, j] the decay between the two rows,
which is 0 across a segment's border (`wide_factors.py`). Where each query sees its whole segment,
T is the sum over the row's document. A run reads that of its first document, that of its last one
where this goes on behind the run, and pairs where documents lie inside it (`document_states.py`).

A unit is two chunks of 64 rows. One ring of tiles [64, D] brings all operands but x, in this order:
tiles of T, y and p of each chunk of the run that the unit sees, tiles of the T of the run's last
document, phi(k) of the unit in DQ (`Runs.rereads_keys`), and the unit's q or k in DQ or DK.

    MEMORY (2)     loads the tiles of T, x of both chunks, and the other tiles
      |  ring: a tile is loaded      x_loaded: x of a chunk, and its z or u, are loaded
      v
    FEATURES (3)   maps y or p to features, in place
      |  mapped: the tile in this slot of the ring holds features
      v
    OWN (0, 1)     each warpgroup multiplies for 64 rows, accumulates found [64, D] in registers,
                   and stores it from x's place in shared memory (`wide_run_rows.py`)
         x_free: the store from x's place is complete

Both warpgroups of OWN wait for every tile and release it, also tiles of a chunk that only the other
one sees. Read next: `wide_run_arrays.py` (operands), `wide_run_storage.py` (shared memory, order of
the tiles), `wide_run_rows.py` and `wide_run_states.py` (OWN), `wide_run_flows.py` (sums for a
decay's gradient).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_ROWS, Item, load
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, wide_powers
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_arrays import Arrays, Left, Pass
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_rows import own_rows
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_storage import (
    FEATURES,
    MEMORY,
    OWN,
    ROLES,
    UNIT,
    Runs,
    Storage,
    columns_of,
    rows_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_units import each
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def whole_units(length: int) -> int:
    """The length of a sequence, rounded up to whole units."""
    return int(pl.cdiv(length, UNIT * C)) * UNIT * C


def wide_runs(spec: LinearAttentionSpec, deal: mosaic.Deal, of: Pass, arrays: Arrays) -> Left:
    """Launches OUT or DQ and returns its outputs. DQ also returns [B, H, T up to a whole unit] in
    float32: inverse and e with a normaliser, flows of each side with a decay, and features and
    cotangents in float16. `deal` counts heads."""
    runs = Runs(spec, in_units(spec, deal), of, arrays)
    given, tree = jax.tree.flatten(arrays)
    like = arrays.x if arrays.reader is None else arrays.reader
    shape = frame.shape_of_values(spec, deal.heads) if runs.by_values else like.shape
    left = {"found": jax.ShapeDtypeStruct(shape, runs.tiling.dtype)}
    of_rows = jax.ShapeDtypeStruct((spec.B, spec.H, whole_units(spec.T)), F32)
    if of is Pass.DQ:
        names = ["inverse", "e"] * spec.normalize + ["flows"] * bool(spec.decay)
        names += ["flows_beyond"] * runs.holds_queries
        names += ["features", "cotangents"] * (arrays.powers is not None)
        left |= dict.fromkeys(names, of_rows)

    def bind(refs: Sequence[Any], own: Storage) -> list[Runs]:
        inputs = jax.tree.unflatten(tree, refs[: len(given)])
        outputs = Left(**dict(zip(left, refs[len(given) :], strict=True)))
        return [dataclasses.replace(runs, arrays=inputs, left=outputs, own=own)]

    found = launch(runs, of.value, bind, left.values(), tuple(given))
    return Left(**dict(zip(left, found, strict=True)))


def wide_key_gradients(
    spec: LinearAttentionSpec, deal: mosaic.Deal, arrays: Arrays
) -> tuple[jax.Array, Left]:
    """dk, and dv with the sums of keys for a decay's gradient: [B, H, T up to a whole unit], or
    [B, H, 4, T up to a whole unit] of `seen_within`. DK and DV share a launch, so that one finds in
    the L2 cache what the other has read. `arrays` are those of DK."""
    units = in_units(spec, deal, passes=2)
    runs = Runs(spec, units, Pass.DK, arrays, joined=True)
    given, tree = jax.tree.flatten(arrays)
    of_rows = jax.ShapeDtypeStruct((spec.B, spec.H, whole_units(spec.T)), F32)
    of_values = jax.ShapeDtypeStruct(frame.shape_of_values(spec, deal.heads), runs.tiling.dtype)
    names = ["flows"] * bool(spec.decay) + ["within"] * runs.weighs_pairs
    names += ["flows_beyond"] * (runs.weighs_pairs and runs.both_ways)
    left = {"found": of_values} | dict.fromkeys(names, of_rows)
    if runs.weighs_pairs and spec.decay == "step":
        of_chunks = spec.B, spec.H, CHUNKS_OF_RUN, whole_units(spec.T)
        left["seen_within"] = jax.ShapeDtypeStruct(of_chunks, F32)
    types = [jax.ShapeDtypeStruct(arrays.reader.shape, runs.tiling.dtype), *left.values()]

    def bind(refs: Sequence[Any], own: Storage) -> list[Runs]:
        of_keys: Arrays = jax.tree.unflatten(tree, refs[: len(given)])
        dk, *others = refs[len(given) :]
        of_values = of_keys._replace(x=of_keys.reader, y=of_keys.p, p=of_keys.y, reader=None)
        of_dk, of_dv = Left(dk), Left(**dict(zip(left, others, strict=True)))
        if runs.weighs_pairs:
            of_values = of_values._replace(held=of_keys.x)
        elif spec.decay:
            of_dk, of_dv = Left(dk, flows=of_dv.flows), Left(of_dv.found)
        return [
            dataclasses.replace(runs, arrays=of_keys, left=of_dk, own=own),
            dataclasses.replace(runs, of=Pass.DV, arrays=of_values, left=of_dv, own=own),
        ]

    dk, *found = launch(runs, "wide_key_gradients", bind, types, tuple(given))
    return dk, Left(**dict(zip(left, found, strict=True)))


def in_units(spec: LinearAttentionSpec, deal: mosaic.Deal, passes: int = 1) -> mosaic.Deal:
    """Returns a schedule of the heads and the number of blocks of `deal`; each piece is a unit."""
    units = whole_units(spec.T) // (UNIT * C)
    return mosaic.Deal(spec.B, deal.heads * passes, spec.T, UNIT * C, units, deal.most_blocks)


def launch(runs: Runs, name: str, bind: Any, left: Iterable[Any], arrays: Any) -> Any:
    parts = (MEMORY, memory), (FEATURES, features), (OWN, own_rows)
    program = mosaic.Program(ROLES, runs.storage(), parts, bind)
    name = frame.name_of(f"{'both_ways' if runs.both_ways else 'causal'}_{name}")
    return mosaic.launch(name, program, runs.deal, tuple(left), arrays)


def memory(passes: Sequence[Runs]) -> None:
    own = passes[0].own
    tiles = each(passes, load_unit)
    for number in range(UNIT):
        own.x_free.wait(number)
    own.ring.drain(tiles)


def load_unit(runs: Runs, item: Item) -> None:
    own, arrays, tiling = runs.own, runs.arrays, runs.tiling
    kv_head = runs.kv_head(item)

    def load_rows(tile: Any, ref: Any, chunk: Any, head: Any) -> None:
        own.ring.acquire(tile)
        slot, loaded = own.ring.slot(tile), own.ring.produced
        tiles = own.tiles if tiling.untiled else runs.tiles
        tiling.copy_tile(ref, item, rows_of(chunk), head, tiles, slot, loaded)

    def load_state(number: int) -> None:
        if runs.of_documents:
            side, block = divmod(number, runs.blocks)
        else:
            block, side = divmod(number, runs.sides)
        tile = runs.tile_of_state(item, block, side)
        own.ring.acquire(tile)
        slot = own.ring.slot(tile)
        tiles = runs.turned if runs.turns_states else runs.tiles
        of_run = item.batch, kv_head, runs.run_of_states(item, side)
        others = map(columns_of, range(runs.blocks)) if tiling.untiled else [slice(None)]
        for other, own_tile in zip(others, tiling.all_in(tiles.at[slot]), strict=True):
            part = columns_of(block), other
            source = runs.states[side].at[(*of_run, *(part[::-1] if runs.turns_states else part))]
            plgpu.copy_gmem_to_smem(source, own_tile, own.ring.produced.at[slot])

    # These tiles are loaded into the ring before x has its place in shared memory. More of them
    # would deadlock: OWN frees no tile before x of its rows is loaded.
    first = min(runs.slots, runs.tiles_of_states)
    for number in range(first):
        load_state(number)
    for number in range(UNIT):
        pl.when(item.number > 0)(functools.partial(own.x_free.wait, number))
        chunk, loaded = runs.own_chunk(item, number), own.x_loaded.at[number]
        head = runs.own_head(item)
        tiling.copy_tile(arrays.x, item, rows_of(chunk), head, own.x, number, own.x_loaded)
        if runs.has_vector:
            of_chunk = runs.chunk_of_vectors(item, number)
            source = arrays.vectors.at[item.batch, kv_head, of_chunk]
            plgpu.copy_gmem_to_smem(source, own.vector.at[number], loaded)
        if runs.held is not None:
            held = own.held, number, own.held_loaded
            tiling.copy_tile(runs.held, item, rows_of(chunk), head, *held)
    for number in range(first, runs.tiles_of_states):
        load_state(number)
    for number in range(runs.first_readers):
        tile, chunk = runs.tile_of_first_reader(item, number), runs.own_chunk(item, number)
        load_rows(tile, arrays.reader, chunk, runs.own_head(item))

    def load_chunk(turn: Any, _: None) -> None:
        chunk, head = runs.chunk(item, turn), runs.seen_head(item)
        for number, ref in enumerate((arrays.y, arrays.p)):
            load_rows(runs.tile_of_chunk(item, turn, number), ref, chunk, head)

    lax.fori_loop(0, runs.turns(item), load_chunk, None)
    if runs.of_documents:

        @pl.when(runs.has_last(item))
        def load_last_state() -> None:
            for number in range(runs.blocks, 2 * runs.blocks):
                load_state(number)

    if runs.rereads_keys:

        @pl.when(runs.has_pairs(item))
        def load_keys() -> None:
            for number in range(UNIT):
                tile, chunk = runs.tile_of_key(item, number), runs.own_chunk(item, number)
                load_rows(tile, arrays.p, chunk, runs.seen_head(item))

    for number in range(runs.readers):
        tile, chunk = runs.tile_of_reader(item, number), runs.own_chunk(item, number)
        load_rows(tile, arrays.reader, chunk, runs.own_head(item))


def features(passes: Sequence[Runs]) -> None:
    each(passes, map_unit)


def map_unit(runs: Runs, item: Item) -> None:
    """Maps y or p of each chunk. FEATURES waits for all other tiles, too, and releases them: each
    phase of a barrier has to be awaited before the slot is filled again."""
    for number in range(runs.tiles_ahead):
        runs.let_go(runs.wait(item.before + number))

    def map_chunk(turn: Any, _: None) -> None:
        inverse = None
        if runs.from_the_end:
            of_chunk = item.batch, item.head, rows_of(runs.chunk(item, turn))
            inverse = load(runs.arrays.inverse.at[of_chunk], OF_ROWS, optimized=False)
        for number in range(2):
            slot = runs.wait(runs.tile_of_chunk(item, turn, number))
            if number == (0 if runs.by_values else 1):
                map_tile(runs, item, runs.tiles.at[slot], inverse)
                runs.own.mapped.arrive(slot)
            runs.let_go(slot)

    lax.fori_loop(0, runs.turns(item), map_chunk, None)
    if runs.of_documents:

        @pl.when(runs.has_last(item))
        def let_go_of_last_state() -> None:
            for block in range(runs.blocks):
                runs.let_go(runs.wait(runs.tile_of_state(item, block, 1)))

    if runs.rereads_keys:

        @pl.when(runs.has_pairs(item))
        def map_own_keys() -> None:
            for number in range(UNIT):
                slot = runs.wait(runs.tile_of_key(item, number))
                map_tile(runs, item, runs.tiles.at[slot], None)
                runs.own.mapped.arrive(slot)
                runs.let_go(slot)

    for number in range(runs.readers):
        runs.let_go(runs.wait(runs.tile_of_reader(item, number)))


def map_tile(runs: Runs, item: Item, tile: Any, inverse: jax.Array | None) -> None:
    """Maps a tile in place: of keys, or of queries if their `inverse` [64] is given."""
    power = runs.power(item, wide_powers.KEYS)
    for block in range(runs.blocks):
        part = runs.block_in(tile, block)
        if inverse is None:
            half = block if runs.tiling.is_filled else 0
            feature_maps.map_keys_in_place(runs.spec, part, half, power=power)
        else:
            feature_maps.map_queries_in_place(runs.spec, part, inverse, block * HALF)
    plgpu.commit_smem()
