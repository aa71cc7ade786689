"""The roles DV and DK of `key_gradient.py`: dv [64, V] and dk [64, F] of each chunk and head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import F32, OF_COLUMNS, OF_ROWS, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import chunk_decay, feature_maps
from ato_jax.ops.linear_attention.mosaic_gpu.chunk_borders import Borders
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_storage import DK, DV, Walk
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_units import (
    add_in_units,
    add_parts,
    of_state,
    parts_of,
)

# Maps a member of the group to the float16 units of its phi' and e, for each head of the tile.
Units = Callable[[Any], list[tuple[Any, Any]]]


class Chunk(NamedTuple):
    """One chunk of an item's keys."""

    step: Any  # of `keys`
    count: Any  # how many of its rows count; None: all
    borders: Borders
    units: Units | None  # in float16
    load_share: Callable[[], None]
    powers: list[Any]  # of each head, in float16; else None


def from_here(walk: Walk) -> jax.Array:
    """[t, i] and [t, j]: where the row is not behind the column, as the deal counts them."""
    if walk.from_the_end:
        return mosaic.hidden_position(1) <= mosaic.hidden_position(0)
    return mosaic.hidden_position(1) >= mosaic.hidden_position(0)


def values(walk: Walk) -> None:
    """The role DV."""
    if walk.some_steep:
        # Not made where it is multiplied: as a factor in registers, the same in all chunks, half of
        # its rows were not there yet in a piece's first one.
        walk.own.before[...] = jnp.where(from_here(walk), 0.0, 1.0).astype(walk.dtype)
        plgpu.commit_smem()
    store_each(walk, values_chunk, DV, walk.dv, walk.arrays.dv)


def keys(walk: Walk) -> None:
    """The role DK."""
    store_each(walk, keys_chunk, DK, walk.dk, walk.arrays.dk)


def store_each(walk: Walk, one: Callable[..., Any], number: int, ref: Any, share: Any) -> None:
    """Stores what `one` makes of each chunk, DV or DK, with the share that other walks found, if
    there is one; and with a decay its flow [64]."""
    own, tiling = walk.own, walk.tiling

    def walk_piece(item: Item) -> None:
        def walk_chunk(chunk: Any, _: None) -> None:
            units = functools.partial(walk.units, item, chunk) if walk.has_units else None

            def load_share() -> None:
                """In the place of the last chunk's results."""
                if own.shares is not None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    rows = item.rows_from_the_end(chunk)
                    tiling.copy_tile(share, item, rows, item.head, own.out, number, own.shares)

            powers = [walk.power(item, n) for n in range(walk.heads)]
            of_chunk = item.before + chunk, walk.count(item, chunk), walk.borders(item, chunk)
            found, own_flows = one(walk, Chunk(*of_chunk, units, load_share, powers))
            if own.shares is None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            else:
                own.shares.wait(number)
                loaded = [load(tile).astype(F32) for tile in walk.in_heads(own.out, number)]
                found = [x + of_others for x, of_others in zip(found, loaded, strict=True)]
            for target, x in zip(walk.in_heads(own.out, number), found, strict=True):
                target[...] = x.astype(walk.dtype)
            flow_rows = tiling.by_heads(own.flows.at[number]) if walk.gated else []
            for target, flow in zip(flow_rows, own_flows, strict=True):
                target[...] = flow
            plgpu.commit_smem()
            rows = item.rows_from_the_end(chunk)
            tiling.leave_tile(own.out, number, ref, item, rows, item.head)
            for source, head in zip(flow_rows, walk.heads_of(item), strict=False):
                target = walk.flows[number].at[item.batch, head, rows]
                plgpu.copy_smem_to_gmem(source, target)

        lax.fori_loop(0, item.chunks, walk_chunk, None)

    walk.each(walk_piece)
    plgpu.wait_smem_to_gmem(0)


def values_chunk(walk: Walk, chunk: Chunk) -> Any:
    """dv of each head [64, V], and with a decay I(t) of a steep chunk, whose parts lie in dv's
    place meanwhile."""
    step, count, borders, units, load_share, powers = chunk
    own, spec, tiling = walk.own, walk.spec, walk.tiling
    slot, k_slot = own.rows.slot(walk.row_step(step, 0)), own.keys.slot(step)
    own.keys.produced.wait(k_slot)
    tiles = walk.in_heads(own.k, k_slot)
    xs = [walk.phi.present(load(tile)) for tile in tiles]
    gates: list[Any] = []
    if walk.gated:
        own.mapped.wait(slot)
        gates = walk.gates_in(slot)
        exponents = [of_head.up_to_middle() for of_head in gates]
        phi_k = features_of_keys(walk, xs, exponents, count, powers)
        if own.keys_mapped is not None:
            for tile, phi in zip(tiles, phi_k, strict=True):
                tile[...] = phi
        plgpu.commit_smem()
        if own.keys_mapped is not None:
            own.keys_mapped.arrive(k_slot)
        own.keys.consumed.arrive(k_slot)
    else:
        plgpu.commit_smem()  # reads finish before the next load overwrites them
        own.keys.consumed.arrive(k_slot)
        phi_k = features_of_keys(walk, xs, [None] * walk.heads, count, powers)
        own.mapped.wait(slot)
    of_walk = walk, slot, phi_k, gates, borders
    reads, weights, own_flows = weights_of(*of_walk, None if units is None else units(0))
    if not walk.some_steep:
        load_share()
    own.state.produced.wait()
    states, gs = tiling.by_heads(own.r), walk.in_heads(own.g, slot)
    dv: Any
    reads = of_last_segment(borders, reads)
    if units is None:
        factors = zip(reads, states, weights, gs, strict=True)
        dv = multiply(*((mosaic.zeros(C, spec.V), [(k, r.T), (w, g)]) for k, r, w, g in factors))
    else:
        read = of_state(walk, [(k, r.T) for k, r in zip(reads, states, strict=True)])
        dv = add_in_units(walk, units(0), read, weights, gs)
    own.state.consumed.arrive()
    own.rows.consumed.arrive(slot)

    def add_member(member: Any, carried: Any) -> Any:
        dv, own_flows = carried
        slot = own.rows.slot(walk.row_step(step, member))
        own.mapped.wait(slot)
        gates = walk.gates_in(slot) if walk.gated else []
        of_member = None if units is None else units(member)
        _, weights, more = weights_of(walk, slot, phi_k, gates, borders, of_member)
        gs = walk.in_heads(own.g, slot)
        if units is None:
            dv = multiply(*((x, [(w, g)]) for x, w, g in zip(dv, weights, gs, strict=True)))
        else:
            assert of_member is not None
            dv = add_in_units(walk, of_member, dv, weights, gs)
        own.rows.consumed.arrive(slot)
        return dv, [x + flow for x, flow in zip(own_flows, more, strict=True)]

    found = walk.each_other_member(add_member, (dv, own_flows))
    if walk.some_steep:
        load_share()
    return found


def add_up(
    borders: Borders, starts: list[jax.Array], of_later: list[Any], of_pairs: list[Any]
) -> tuple[jax.Array, ...]:
    """For each head the sum of what its keys have of later chunks, the start and the products of
    `of_later`, and of the products with the chunk's own queries. Where segments begin in the chunk,
    only the keys of its last one are seen by later chunks."""

    def at_border() -> tuple[jax.Array, ...]:
        found: list[jax.Array] = []
        for start, read, pairs in zip(starts, of_later, of_pairs, strict=True):
            (x,) = multiply((start, read))
            found += multiply((mosaic.rows_within(x, borders.adds, None), pairs))
        return tuple(found)

    def otherwise() -> tuple[jax.Array, ...]:
        sums = zip(starts, of_later, of_pairs, strict=True)
        return multiply(*((start, [*read, *pairs]) for start, read, pairs in sums))

    return borders.either(at_border, otherwise)


def of_last_segment(borders: Borders, rows: list[jax.Array]) -> list[jax.Array]:
    """The rows of each head with 0 for keys whose segment ends in this chunk, which no later chunk
    sees."""

    def at_border() -> list[jax.Array]:
        return [mosaic.rows_within(of_head, borders.adds, None) for of_head in rows]

    return borders.either(at_border, lambda: rows)


def keep_last_segment(borders: Borders, tiles: list[Any]) -> None:
    """Does the same to a tile in shared memory."""
    for tile in tiles:
        mosaic.keep_rows_between(tile, borders.adds, C)
    plgpu.commit_smem()


def weights_of(
    walk: Walk,
    slot: Any,
    phi_k: list[jax.Array],
    gates: list[chunk_decay.Gates],
    borders: Borders,
    units: list[tuple[Any, Any]] | None,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Three lists by head: the left factor of R, which is phi(k); that of g, which is a, in float16
    not yet rounded; and with a decay I(t)."""
    reads = list(phi_k)
    pairs = zip(phi_k, walk.in_heads(walk.own.q, slot), strict=True)
    a = list(multiply(*((mosaic.zeros(C, C), [(k, q.T)]) for k, q in pairs)))
    own_flows = []
    for n, of_head in enumerate(gates):
        if not walk.some_steep:
            own_flows.append(plgpu.layout_cast(jnp.zeros((C,), F32), OF_ROWS))
            continue
        unit = None if units is None else units[n][0]
        own_flows.append(jnp.where(of_head.steep, inside_flow(walk, n, a[n], unit), 0.0))
        left = mosaic.in_columns(of_head.left(OF_ROWS), walk.spec.F)
        a[n] *= of_head.of_pairs(queries=1)
        reads[n] = mosaic.rounded(phi_k[n].astype(F32) * left, walk.dtype)
    if walk.gated:
        plgpu.commit_smem()  # reads finish before the next load overwrites them
    a = seen_pairs(borders, a)
    if walk.has_units:
        return reads, [walk.seen(of_head) for of_head in a], own_flows
    return reads, [mosaic.rounded(walk.seen(of_head)) for of_head in a], own_flows


def seen_pairs(borders: Borders, pairs: list[jax.Array]) -> list[jax.Array]:
    """The pairs [j, i] of each head, 0 where query i is of a later segment than key j."""

    def at_border() -> list[jax.Array]:
        seen = borders.pairs_until()
        return [jnp.where(seen, of_head, 0.0) for of_head in pairs]

    return borders.either(at_border, lambda: pairs)


def features_of_keys(
    walk: Walk,
    xs: list[jax.Array],
    exponents: list[Any],
    count: Any,
    powers: list[Any],
) -> list[jax.Array]:
    """phi(k) of each head [64, F]; with a decay times exp2 of `exponents` [64], up to the chunk's
    middle; and in float16 times `powers`."""
    found = []
    for x, of_head, power in zip(xs, exponents, powers, strict=True):
        if power is None:
            phi_k = walk.phi.keys(x, of_head)
        else:
            phi_k = feature_maps.times_power(walk.phi, x, power, exponents=of_head)
        found.append(mosaic.kept(phi_k, count))
    return found


def inside_flow(walk: Walk, n: int, a: jax.Array, unit: Any) -> jax.Array:
    """I(t) [64] of a steep chunk, of a as it was multiplied: what it lacks of the decay b has. In
    float16 `unit` is that of phi'."""
    own = walk.own
    assert own.pairs_ring is not None
    parts = [walk.tiling.half_of(own.out, DV, part) for part in range(walk.pairs_parts)]
    own.pairs_ring.produced.wait()
    seen = walk.seen(a)
    m = seen * sum(load(own.pairs.at[n, part]).astype(F32) for part in range(walk.pairs_parts))
    largest: Any = None
    if own.pairs_units is not None:
        of_pairs = load(walk.tiling.by_heads(own.pairs_units)[n], OF_ROWS)
        m = m * mosaic.in_columns(of_pairs * unit, C)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if own.pairs_units is not None:
        # In the place of what the chunk leaves later.
        rows = walk.tiling.by_heads(own.flows.at[DV])[n]
        rows[...] = mosaic.units_of_rows([m])
        plgpu.commit_smem()
        largest = mosaic.unit_of(rows, C)
        m = mosaic.in_units(m, largest)
    for part in parts:
        rounded = mosaic.rounded(m, walk.dtype)
        part[...] = rounded
        m = m - rounded.astype(F32)
    plgpu.commit_smem()
    own.pairs_ring.consumed.arrive()
    (across,) = multiply((mosaic.zeros(C, C), [(own.before, part) for part in parts]))  # [t, i]
    found = jnp.sum(jnp.where(from_here(walk), across, 0.0), axis=1)
    return found if largest is None else found * largest


def keys_chunk(walk: Walk, chunk: Chunk) -> Any:
    """dk of each head [64, F], and with a decay the flow of its keys."""
    step, count, borders, units, load_share, powers = chunk
    own, spec, tiling, heads = walk.own, walk.spec, walk.tiling, walk.heads
    slot, k_slot = own.rows.slot(walk.row_step(step, 0)), own.keys.slot(step)
    own.mapped.wait(slot)
    queries, vs = walk.in_heads(own.q, slot), walk.in_heads(own.v, k_slot)
    es = es_of(walk, slot)
    own.keys.produced.wait(k_slot)
    if walk.some_steep and own.keys_mapped is not None:
        own.keys_mapped.wait(k_slot)
    found = seen_pairs(borders, [mosaic.kept(b, count) for b in pairs_of(walk, slot, vs, es)])
    gates: list[Any] = [None] * heads
    if walk.gated:
        gates = walk.gates_in(slot)
    exponents: list[Any] = []
    slopes: list[Any] = []
    for of_head in gates:
        exponents.append(of_head.up_to_middle() if walk.gated else None)
        slopes.append(jnp.exp2(exponents[-1]) if walk.gated else None)
    if walk.gated and walk.has_units:
        slopes = [slope * power for slope, power in zip(slopes, powers, strict=True)]
    load_share()
    own.state.produced.wait()
    states, tiles = tiling.by_heads(own.r), walk.in_heads(own.k, k_slot)
    if walk.has_e:
        of_others = [mosaic.in_rows(load(u, OF_COLUMNS), C) for u in tiling.by_heads(own.u)]
    else:
        of_others = [mosaic.zeros(C, spec.F)] * heads
    plgpu.commit_smem()  # e was read, ahead of the load that overwrites it
    reads: list[jax.Array] = []
    if walk.some_steep:
        dk = []
        for n in range(heads):
            state_read = of_others[n], walk.of_state(n, vs[n])
            keys = tiles[n], exponents[n], powers[n]
            of_queries = queries[n], None if units is None else units(0)[n][0]
            one, read = keys_one_by_one(
                walk, n, gates[n], found[n], state_read, keys, of_queries, count
            )
            dk.append(one)
            reads.append(read)
    elif units is not None:
        of_r = of_state(walk, list(zip(vs, states, strict=True)))
        starts = [x + u for x, u in zip(of_r, of_others, strict=True)]
        starts = of_last_segment(borders, starts)
        dk = add_in_units(walk, units(0), starts, [walk.seen(b) for b in found], queries, parts=2)
    else:
        of_later = [walk.of_state(n, vs[n]) for n in range(heads)]
        both = [parts_of(walk.seen(b)) for b in found]
        of_pairs = [[(b, queries[n]) for b in parts] for n, parts in enumerate(both)]
        if heads == 2 and walk.spec.H == walk.spec.G:
            borders.when_some(functools.partial(keep_last_segment, borders, vs))
            if borders.exist is not None:
                first = jnp.where(borders.exist, borders.adds, 0)
                of_others = [mosaic.rows_within(x, first, None) for x in of_others]
            sums = zip(of_others, of_later, of_pairs, strict=True)
            dk = list(multiply(*((start, [*read, *pairs]) for start, read, pairs in sums)))
        else:  # other members' pairs are of all of v
            dk = list(add_up(borders, of_others, of_later, of_pairs))
    own.state.consumed.arrive()
    own.rows.consumed.arrive(slot)
    add_member = functools.partial(add_pairs, walk, chunk, k_slot)
    dk = walk.each_other_member(add_member, dk)
    if walk.gated and not walk.some_steep and own.keys_mapped is not None:
        own.keys_mapped.wait(k_slot)
    own_flows = []
    for n, (tile, slope) in enumerate(zip(tiles, slopes, strict=True)):
        x = mosaic.kept(load(tile), count)
        dk[n] = mosaic.kept(dk[n], count)
        if not walk.gated:
            slope_of_x = walk.phi.slope(x)
            dk[n] *= slope_of_x if powers[n] is None else slope_of_x * powers[n]
            continue
        phi_k = decayed_keys(walk, x, exponents[n], count, powers[n])
        flow = jnp.sum(phi_k * dk[n], axis=1)
        if walk.some_steep:
            flow = jnp.where(gates[n].steep, reads[n], flow)
        own_flows.append(flow)
        if walk.replaces_keys:
            dk[n] *= walk.phi.slope_of_features(phi_k, slope)
        else:
            dk[n] *= walk.phi.slope(x) * mosaic.in_columns(slope, spec.F)
    plgpu.commit_smem()
    own.keys.consumed.arrive(k_slot)
    return dk, own_flows


def add_pairs(
    walk: Walk, chunk: Chunk, k_slot: Any, member: Any, dk: list[jax.Array]
) -> list[jax.Array]:
    """dk of each head with the pairs of another member's queries."""
    own, count, borders, units = walk.own, chunk.count, chunk.borders, chunk.units
    slot = own.rows.slot(walk.row_step(chunk.step, member))
    own.mapped.wait(slot)
    queries, vs = walk.in_heads(own.q, slot), walk.in_heads(own.v, k_slot)
    es = es_of(walk, slot)
    found = [mosaic.kept(b, count) for b in pairs_of(walk, slot, vs, es)]
    if walk.some_steep:
        gates = walk.gates_in(slot)
        for n, b in enumerate(found):
            parts, rows = hand_pairs(walk, n, gates[n], b)
            unit = None if units is None else units(member)[n][0]
            dk[n] = add_parts(walk, dk[n], parts, rows, unit, queries[n])
            plgpu.commit_smem()
            pairs_ring_of(walk).consumed.wait()
    elif units is not None:
        plgpu.commit_smem()  # e was read, ahead of the load that overwrites it
        of_member = [walk.seen(b) for b in seen_pairs(borders, found)]
        dk = add_in_units(walk, units(member), dk, of_member, queries, parts=2)
    else:
        plgpu.commit_smem()  # e was read, ahead of the load that overwrites it
        parts_of_heads = [parts_of(walk.seen(b)) for b in seen_pairs(borders, found)]
        factors = zip(dk, parts_of_heads, queries, strict=True)
        dk = list(multiply(*((x, [(b, q) for b in both]) for x, both, q in factors)))
    own.rows.consumed.arrive(slot)
    return dk


def decayed_keys(walk: Walk, x: jax.Array, exponents: Any, count: Any, power: Any) -> jax.Array:
    """phi(k) as DV has it, in float32, of what lies in k's place. The exponents come loaded: their
    slot may have been let go."""
    if walk.replaces_keys:
        return x.astype(F32)
    (phi_k,) = features_of_keys(walk, [x], [exponents], count, [power])
    return phi_k.astype(F32)


def es_of(walk: Walk, slot: Any) -> list[jax.Array]:
    """e [64] of each head."""
    if not walk.has_e:
        return []
    return [load(rows, OF_COLUMNS) for rows in walk.tiling.by_heads(walk.own.e.at[slot])]


def pairs_of(walk: Walk, slot: Any, vs: list[Any], es: list[jax.Array]) -> list[jax.Array]:
    """v_j . g_i - e_i of each head, [64, 64] at [j, i]."""
    minus_e = [mosaic.in_rows(-e, C) for e in es] or [mosaic.zeros(C, C)] * walk.heads
    starts = [mosaic.zeros(C, C)] * walk.heads if walk.rounds_b else minus_e
    pairs = zip(starts, vs, walk.in_heads(walk.own.g, slot), strict=True)
    found = list(multiply(*((start, [(v, g.T)]) for start, v, g in pairs)))
    if walk.rounds_b:
        found = [mosaic.rounded(own).astype(F32) + e for own, e in zip(found, minus_e, strict=True)]
    return found


def keys_one_by_one(
    walk: Walk,
    n: int,
    gates: chunk_decay.Gates,
    b: jax.Array,
    state_read: Any,
    keys: tuple[Any, jax.Array, Any],
    queries: tuple[Any, Any],
    count: Any,
) -> tuple[jax.Array, jax.Array]:
    """dk of head n without phi's derivative [64, F], and A [64], where the chunk may be steep; of
    keys, their tile, its exponents, and its power; of queries phi' and its unit."""
    tile, exponents, power = keys
    parts, rows = hand_pairs(walk, n, gates, b)
    if walk.has_units:
        of_others, (of_r,) = state_read
        (read,) = of_state(walk, [of_r], n)
        read += of_others
    else:
        (read,) = multiply(state_read)
    read = mosaic.kept(read, count)
    read *= mosaic.in_columns(gates.left(OF_ROWS), walk.spec.F)
    flow = jnp.sum(decayed_keys(walk, load(tile), exponents, count, power) * read, axis=1)
    read = add_parts(walk, read, parts, rows, queries[1], queries[0])
    plgpu.commit_smem()
    pairs_ring_of(walk).consumed.wait()
    return read, flow


def hand_pairs(
    walk: Walk, n: int, gates: chunk_decay.Gates, b: jax.Array
) -> tuple[list[Any], jax.Array | None]:
    """Puts b of head n in shared memory, where DV reads it, too: rounded, and the rest; and in
    float16 the units of its rows [64], which are returned, too."""
    own, rows = walk.own, None
    parts = [own.pairs.at[n, number] for number in range(2)]
    b = walk.seen(b * gates.of_pairs(queries=1))
    if own.pairs_units is not None:
        rows = mosaic.units_of_rows([b])
        walk.tiling.by_heads(own.pairs_units)[n][...] = rows
        b = lax.optimization_barrier(mosaic.in_units(b, rows))
    for ref, part in zip(parts, parts_of(b, walk.dtype), strict=True):
        ref[...] = part
    plgpu.commit_smem()
    pairs_ring_of(walk).produced.arrive()
    return parts, rows


def pairs_ring_of(walk: Walk) -> mosaic.Ring:
    assert walk.own.pairs_ring is not None
    return walk.own.pairs_ring
