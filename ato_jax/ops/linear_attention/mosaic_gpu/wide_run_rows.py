"""The role OWN of `wide_runs.py`: each of its two warpgroups computes 64 rows of a pass's result.

`write_unit` is the order of the work: x is mapped to features (`map_rows`), multiplied by the state
(`read_state`), and by the pairs of each chunk that the rows see (`add_chunk`); the result is
finished and stored by `write_found`, `write_query_gradient` or `write_key_gradient`. found [64, D]
is a tuple of accumulators, one for each of `Runs.parts`. "Own" rows are those of the warpgroup.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import (
    feature_maps,
    powers,
    wide_powers,
    wide_run_flows,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_arrays import Pass
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_numbers import (
    Found,
    Own,
    Powers,
    block_in,
    leave,
    of_own,
    of_rows_in,
    powers_of,
    times,
    vector_of,
    vectors_times,
)
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_states import add_last_document, read_state
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_storage import UNIT, Runs, rows_of
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_units import each

# With y = DIGITS x in float32, y - (y - x) is x rounded to the 11 bits of a float16.
DIGITS = 2.0**13 + 1


def own_rows(passes: Sequence[Runs]) -> None:
    each(passes, write_unit)
    plgpu.wait_smem_to_gmem(0)


def write_unit(runs: Runs, item: Item) -> None:
    own, number = runs.own, mosaic.slot_of(mosaic.group(), UNIT)
    runs = runs.with_vectors(item, number)
    own_chunk, (turns, own_turn) = runs.own_chunk(item, number), runs.turns_of(item, number)
    sums, limit, beyond = (of_own(runs, item, ref) for ref in runs.of_pairs)
    own.x_loaded.wait(number)
    mine = Own(own_chunk, own_turn, sums, limit, beyond, powers_of(runs, item))
    den = map_rows(runs, item, mine.powers) if runs.by_values else ()
    found, flows = read_state(runs, item, mine.powers)
    if runs.adds_flows and runs.of is Pass.DV:
        wide_run_flows.leave_flows_of_keys(runs, item, mine.powers, flows)
    one = functools.partial(add_chunk, runs, item, mine)
    carried = found, den
    if runs.all_in_two_parts:
        carried = lax.fori_loop(0, turns, functools.partial(one, in_two_parts=True), carried)
    elif runs.in_two_parts:
        carried = lax.fori_loop(0, own_turn, one, carried)
        of_own_turn = functools.partial(one, in_two_parts=True)
        if runs.both_ways:
            behind = jnp.minimum(own_turn + 1, turns)  # a run without pairs has no turns
            carried = lax.fori_loop(own_turn, behind, of_own_turn, carried)
            carried = lax.fori_loop(behind, turns, one, carried)
        else:
            carried = of_own_turn(own_turn, carried)
    else:
        carried = lax.fori_loop(0, turns, one, carried)
    found, den = carried
    skip = functools.partial(skip_chunk, runs, item)
    lax.fori_loop(turns, runs.turns(item), skip, None)
    if runs.of_documents:
        add_last = functools.partial(add_last_document, runs, item, mine.powers)
        found = lax.cond(runs.has_last(item), add_last, lambda found: found, found)
    if runs.rereads_keys:
        pl.when(runs.has_pairs(item))(functools.partial(await_keys, runs, item))
    reader = await_reader(runs, item)
    if runs.of is Pass.DQ:
        if runs.of_documents:
            k_slot = own.ring.slot(runs.tile_of_key(item, mosaic.group()))
        else:
            k_slot = own.ring.slot(runs.tile_of_chunk(item, own_turn, 1))
        write_query_gradient(runs, item, found, reader, k_slot, mine, flows)
        if runs.rereads_keys:
            pl.when(runs.has_pairs(item))(functools.partial(runs.let_go, k_slot))
        elif not runs.of_documents:
            runs.let_go(k_slot)
    elif runs.of is Pass.DK:
        write_key_gradient(runs, item, found, reader, mine.powers)
    else:
        write_found(runs, found, den, mine.powers)
        if runs.adds_flows:
            wide_run_flows.leave_within(runs, item, mine.powers, den)
    plgpu.commit_smem()
    if reader is not None:
        runs.let_go(reader)
    target = runs.left.found, item, rows_of(own_chunk), runs.own_head(item)
    runs.tiling.leave_tile(own.x, number, *target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(own.x_free.at[number])


def map_rows(runs: Runs, item: Item, own: Powers | None) -> Any:
    """Maps x to features, in place. Returns phi(q) . z of the states that the rows read, [64], with
    a normaliser; else 0."""
    dens: list[Any] = [plgpu.layout_cast(jnp.zeros((C,), F32), OF_ROWS)] * runs.sides
    for block in range(runs.blocks):
        part = runs.block_in(runs.x.at[mosaic.group()], block)
        if runs.of is Pass.DV:
            half = block if runs.tiling.is_filled else 0
            power = None if own is None else own.keys
            feature_maps.map_keys_in_place(runs.spec, part, half, power=power)
            continue
        if own is None:
            phi = runs.phi.queries(load(part), block * HALF)
        else:
            phi = times(runs.phi.unrounded(load(part), block * HALF), own.row)
            phi = mosaic.rounded(phi, runs.tiling.dtype)
        part[...] = phi
        if runs.normalizes:
            phi = phi.astype(F32)
            # The last document's z is read only where there is one.
            for side in range(1 if runs.of_documents else runs.sides):
                vector = vector_of(runs, item, block, side)
                dens[side] = dens[side] + jnp.sum(phi * vector, axis=1)
    plgpu.commit_smem()
    if runs.normalizes and runs.of_documents:
        of_last = functools.partial(den_of_last, runs, item, dens[1])
        dens[1] = lax.cond(runs.has_last(item), of_last, lambda: dens[1])
    if own is not None:
        dens = [den * own.pairs for den in dens]
    if runs.normalizes:
        factors = [of_own(runs, item, ref) for ref in runs.reads]
        dens = [
            den if own_factor is None else den * own_factor
            for den, own_factor in zip(dens, factors, strict=True)
        ]
    return functools.reduce(jnp.add, dens)


def den_of_last(runs: Runs, item: Item, den: jax.Array) -> jax.Array:
    """Adds phi(q) . z of the run's last document, [64]."""
    for block in range(runs.blocks):
        phi = load(runs.block_in(runs.x.at[mosaic.group()], block)).astype(F32)
        den = den + jnp.sum(phi * vector_of(runs, item, block, 1), axis=1)
    return den


def weights_of(
    runs: Runs, w: jax.Array, mine: Own, chunk: Any, seen_sums: jax.Array | None
) -> jax.Array:
    """w [64, 64] of the own rows and a chunk's rows, times the decay between them; 0 where a row
    does not see the other. `seen_sums` is L of the chunk's rows, [64]."""
    if mine.powers is not None:
        w = times(w, mine.powers.pairs)
    i, j = mosaic.hidden_position(0), mosaic.hidden_position(1)
    behind = (mine.chunk - chunk) * C
    if runs.both_ways:
        sees = j < runs.spec.T - chunk * C
    else:
        sees = i <= j - behind if runs.from_the_end else i >= j - behind
    limits = (mine.limit, runs.from_the_end), (mine.limit_beyond, not runs.from_the_end)
    for limit, is_last in limits:
        if limit is not None:
            own_limit = mosaic.in_columns(limit - chunk * C, C)
            sees &= j <= own_limit if is_last else j >= own_limit
    if mine.sums is not None and seen_sums is not None:
        own, seen = mosaic.in_columns(mine.sums, C), mosaic.in_rows(seen_sums, C)
        lost = seen - own if runs.from_the_end else own - seen
        lost = -jnp.abs(lost) if runs.both_ways else jnp.minimum(lost, 0.0)
        w = w * jnp.exp2(lost)
    # Without the barrier the compiler would round the selected numbers one by one, not in pairs.
    return lax.optimization_barrier(jnp.where(sees, w, 0.0))


def sums_of_seen(runs: Runs, item: Item, chunk: Any) -> jax.Array | None:
    """L of a chunk's rows, [64]; None without a decay."""
    if runs.arrays.sums is None:
        return None
    at = item.batch, runs.kv_head(item), rows_of(chunk)
    return load(runs.arrays.sums.at[at], OF_COLUMNS, optimized=False)


def add_chunk(
    runs: Runs,
    item: Item,
    mine: Own,
    turn: Any,
    carried: tuple[Found, Any],
    in_two_parts: bool = False,
) -> tuple[Found, Any]:
    """Adds the pairs of the own rows with the chunk at `turn` to found. The second number that is
    carried, [64], is den in OUT and `within` in DV with flows (`wide_run_flows.py`)."""
    own, (found, den) = runs.own, carried
    chunk = runs.chunk(item, turn)
    y_slot = runs.wait(runs.tile_of_chunk(item, turn, 0))
    p_slot: Any = None
    if runs.by_values:
        own.mapped.wait(y_slot)
    if runs.left.seen_within is not None:
        # First, while no other tile of pairs is in registers.
        p_slot = runs.wait(runs.tile_of_chunk(item, turn, 1))
        y, p = runs.tiles.at[y_slot], runs.tiles.at[p_slot]
        leave_seen_within(runs, item, mine, chunk, y, p)

    def meanwhile() -> Any:
        seen_sums = sums_of_seen(runs, item, chunk)
        if runs.of is not Pass.DK:
            return None, seen_sums
        source = runs.arrays.e.at[item.batch, item.head, rows_of(chunk)]
        return load(source, OF_COLUMNS, optimized=False), seen_sums

    products = runs.factors(runs.x.at[mosaic.group()], runs.tiles.at[y_slot])
    w, (e, seen_sums) = mosaic.multiply_while(products, (C, C), meanwhile)
    runs.let_go(y_slot)
    if runs.of is Pass.DK:
        w = w - mosaic.in_rows(e, C)
    exact, raised = weights_of(runs, w, mine, chunk, seen_sums), None
    if runs.of is Pass.DV and runs.adds_flows:
        if p_slot is None:
            p_slot = runs.wait(runs.tile_of_chunk(item, turn, 1))
        p = runs.tiles.at[p_slot]
        den = den + wide_run_flows.within_chunk(runs, item, mine, chunk, exact, p)
    if mine.powers is not None and runs.by_values:
        # A row's numbers may be far below the bound of its head, and would lose digits.
        raised = powers.power_of(jnp.max(jnp.abs(exact), axis=1), wide_powers.MOST_OF_ROWS)
        exact, found = times(exact, raised), tuple(times(part, raised) for part in found)
    w = mosaic.rounded(exact, runs.tiling.dtype)
    factors = [w]
    if in_two_parts:
        factors.insert(0, mosaic.rounded(exact - w.astype(F32), runs.tiling.dtype))
    if runs.of is Pass.OUT and runs.normalizes:
        added = jnp.sum(w.astype(F32), axis=1)
        den = den + (added if raised is None else added / raised)
    if p_slot is None:
        p_slot = runs.wait(runs.tile_of_chunk(item, turn, 1))
    if not runs.by_values:
        own.mapped.wait(p_slot)
    p = runs.tiles.at[p_slot]
    sums = (
        (start, [(factor, runs.part_in(p, columns)) for factor in factors])
        for start, columns in zip(found, runs.parts, strict=True)
    )
    found = multiply(*sums)
    if raised is not None:
        found = tuple(times(part, 1.0 / raised) for part in found)
    if runs.of is not Pass.DQ or runs.of_documents:
        runs.let_go(p_slot)
    else:
        # `write_query_gradient` reads the keys of the own chunk once more.
        pl.when(turn != mine.turn)(functools.partial(runs.let_go, p_slot))
    return tuple(found), den


def leave_seen_within(runs: Runs, item: Item, mine: Own, chunk: Any, y: Any, g: Any) -> None:
    """Writes `seen_within` for the queries of a chunk (`wide_run_flows.py`): sums over own keys.

    The products of `add_chunk` and `within_chunk` are repeated with queries as rows: an accumulator
    in registers can be summed to a number for each row, but not to one for each column."""
    x = runs.x.at[mosaic.plus_zero(mosaic.group(), chunk)]
    (w,) = multiply((mosaic.zeros(C, C), runs.factors(y, x)))
    own_sums = sums_of_seen(runs, item, mine.chunk)
    sums, limit, beyond = (of_rows_in(runs, item, ref, chunk) for ref in runs.of_pairs)
    seen = Own(chunk, None, sums, limit, beyond, mine.powers)
    w = weights_of(runs, w, seen, mine.chunk, own_sums)
    wide_run_flows.leave_seen_within(runs, item, mine, chunk, w, g)


def skip_chunk(runs: Runs, item: Item, turn: Any, _: None) -> None:
    """Waits for the tiles of a chunk that only the other warpgroup's rows see, and releases them:
    each phase of a barrier has to be awaited."""
    for number in range(2):
        slot = runs.wait(runs.tile_of_chunk(item, turn, number))
        if number == (0 if runs.by_values else 1):
            runs.own.mapped.wait(slot)
        runs.let_go(slot)


def await_keys(runs: Runs, item: Item) -> None:
    """Waits for k of the unit's rows, and releases that of the other warpgroup's rows."""
    for other in range(UNIT):
        slot = runs.wait(runs.tile_of_key(item, other))
        runs.own.mapped.wait(slot)
        pl.when(other != mosaic.group())(functools.partial(runs.let_go, slot))


def await_reader(runs: Runs, item: Item) -> Any:
    """The slot with q or k of the own rows; None where the pass reads neither."""
    if not runs.readers:
        return None
    for other in range(UNIT):
        slot = runs.wait(runs.tile_of_reader(item, other))
        pl.when(other != mosaic.group())(functools.partial(runs.let_go, slot))
    return runs.own.ring.slot(runs.tile_of_reader(item, mosaic.group()))


def write_found(runs: Runs, found: Found, den: Any, own: Powers | None) -> None:
    """Writes out or dv to x's place."""
    factor: Any = None if own is None else own.found
    if runs.normalizes:
        eps: Any = runs.spec.eps
        if own is not None:  # den is scaled by these powers
            eps = eps * own.row * (own.keys * own.pairs)
        factor = 1.0 / jnp.maximum(den, eps)
    elif runs.of is Pass.OUT:
        factor = runs.spec.scale if factor is None else factor * runs.spec.scale
    for columns, part in zip(runs.parts, found, strict=True):
        found_here = times(part, factor).astype(runs.tiling.dtype)
        runs.part_in(runs.x.at[mosaic.group()], columns)[...] = found_here


def write_query_gradient(
    runs: Runs,
    item: Item,
    G: Found,
    reader: Any,
    k_slot: Any,
    mine: Own,
    flows_of_sides: Sequence[wide_run_flows.OfSide],
) -> None:
    """Writes dq to x's place, and inverse, e and flows. Each use of the features maps q again, 64
    columns at a time: registers have no room for all."""
    spec, maps, x = runs.spec, runs.phi, runs.x.at[mosaic.group()]
    q = runs.held_tiles.at[mosaic.group()] if runs.holds_queries else runs.tiles.at[reader]
    k = runs.tiles.at[k_slot]
    own = mine.powers
    found = None if own is None else own.found
    # g is no longer needed. Its last 64 columns, or 128, now hold the weight with which each row
    # sees each key of its chunk (in two parts), for the sum z.
    last = range(1 + runs.in_two_parts)
    seen = [runs.block_in(x, runs.blocks - 1 - part) for part in last]
    reads = [of_own(runs, item, ref) for ref in runs.reads_of_chunk]

    def leave_seen() -> None:
        own_sums = sums_of_seen(runs, item, mine.chunk)
        ones, visible = mosaic.zeros(C, C) + 1.0, mine._replace(powers=None)
        left = weights_of(runs, ones, visible, mine.chunk, own_sums)
        if runs.of_documents:
            # z of all other rows is that of a document that is not inside the chunk.
            left = times(left, 1.0 - reads[0] - reads[1])
        for part in seen:
            rounded = mosaic.rounded(left, runs.tiling.dtype)
            part[...] = rounded
            left = left - rounded.astype(F32)
        plgpu.commit_smem()

    if runs.normalizes and runs.of_documents:
        pl.when(runs.has_pairs(item))(leave_seen)
    elif runs.normalizes:
        leave_seen()

    def z_of(block: int) -> jax.Array:
        """64 columns of z_i for each own row: the sum of phi(k) over all keys that it sees."""
        ahead = vectors_times(runs, item, block, reads)

        def with_own_chunk() -> jax.Array:
            own_k = runs.block_in(k, block)
            (z,) = multiply((ahead, [(part, own_k) for part in reversed(seen)]))
            return z

        if not runs.of_documents:
            return with_own_chunk()
        found: jax.Array = lax.cond(runs.has_pairs(item), with_own_chunk, lambda: ahead)
        return found

    def features_of(block: int) -> tuple[jax.Array, jax.Array]:
        own_q = load(runs.block_in(q, block))
        if own is not None:  # else padding columns would count in the largest feature
            own_q = maps.present(own_q, block * HALF)
        return own_q, maps.unrounded(own_q, block * HALF)

    # In float16 G, z and den have the power of keys.
    inverse: Any = spec.scale if own is None else spec.scale / own.keys
    eps: Any = spec.eps if own is None else spec.eps * own.keys
    e: Any = None
    largest: Any = 0.0
    if runs.normalizes:
        of_e: Any = 0.0
        den: Any = 0.0
        for block in range(runs.blocks):
            z, (_, phi) = z_of(block), features_of(block)
            of_e = of_e + jnp.sum(phi * block_in(G, block), axis=1)
            den = den + jnp.sum(phi * z, axis=1)
        of_e = of_e if found is None else of_e * found
        of_rows = 1.0 / jnp.maximum(den, eps)
        of_e = jnp.where(den > eps, of_e * of_rows, 0.0)
        leave(runs, item, runs.left.inverse, of_rows)
        leave(runs, item, runs.left.e, of_e)
        inverse, e = of_rows, of_e
    has_flows = runs.left.flows is not None and not runs.adds_flows
    if runs.adds_flows:
        wide_run_flows.leave_flows_of_queries(runs, item, flows_of_sides, inverse, e, found)
    if runs.normalizes:
        inverse, e = mosaic.in_columns(inverse, HALF), mosaic.in_columns(e, HALF)
    flows: Any = 0.0
    # Blocks of dq that are not stored yet: their place in x holds `seen`, which `z_of` reads.
    waiting: list[tuple[int, jax.Array]] = []
    for block in range(runs.blocks):
        dq = times(block_in(G, block), found)
        if e is not None:
            dq = dq - e * z_of(block)
        own_q, phi = features_of(block)
        if own is not None:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(phi), axis=1))
        if has_flows:
            # The features as the keys' gradients have them: rounded.
            flows = flows + jnp.sum(as_keys_see(runs, phi * inverse) * dq, axis=1)
        dq = dq * inverse * maps.slope_of(own_q, phi)
        waiting.append((block, dq.astype(runs.tiling.dtype)))
        while len(waiting) >= len(seen) or waiting and block + 1 == runs.blocks:
            done, dq = waiting.pop(0)
            runs.block_in(x, done)[...] = dq
    leave(runs, item, runs.left.features, largest)
    if has_flows:
        leave(runs, item, runs.left.flows, flows)


def as_keys_see(runs: Runs, x: jax.Array) -> jax.Array:
    """phi(q_i) inverse_i with the rounding that it has in DV and DK, in float32. In float16 those
    passes scale it by a power of two first, which changes no digit, so rounding to 11 bits does the
    same here."""
    if runs.arrays.powers is None:
        return mosaic.rounded(x).astype(F32)
    raised = x * DIGITS
    return raised - lax.optimization_barrier(raised - x)


def write_key_gradient(
    runs: Runs, item: Item, found: Found, reader: Any, own: Powers | None
) -> None:
    """Writes dk to x's place, and flows."""
    flows: Any = 0.0
    reads = [of_own(runs, item, ref) for ref in runs.reads]
    if own is not None:
        reads = [own.pairs if factor is None else factor * own.pairs for factor in reads]
    for block in range(runs.blocks):
        own_k = load(runs.block_in(runs.tiles.at[reader], block))
        phi = runs.phi.unrounded(own_k, block * HALF)
        dk = block_in(found, block) + vectors_times(runs, item, block, reads)
        if runs.left.flows is not None:
            # The features as OUT and DQ have them: rounded, and 0 in padding columns.
            seen = runs.phi.present(own_k, block * HALF)
            if own is None:
                seen = runs.phi.keys(seen, first=block * HALF)
            else:
                seen = feature_maps.times_power(runs.phi, seen, own.keys, block * HALF)
            flows = flows + jnp.sum(seen.astype(F32) * dk, axis=1)
        dk = dk * runs.phi.slope_of(own_k, phi)
        dk = dk if own is None else dk * own.found
        runs.block_in(runs.x.at[mosaic.group()], block)[...] = dk.astype(runs.tiling.dtype)
    if own is not None:
        flows = flows * (own.found / own.keys)
    leave(runs, item, runs.left.flows, flows)
