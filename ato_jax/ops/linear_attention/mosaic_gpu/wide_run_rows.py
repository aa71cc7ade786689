"""What OWN does in `wide_runs.py`: each of its warpgroups makes 64 rows of what is found."""

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
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_storage import (
    MOST_COLUMNS,
    UNIT,
    Pass,
    Runs,
    columns_of,
    each,
    rows_of,
)

Found = tuple[jax.Array, ...]  # [64, D], in parts of at most MOST_COLUMNS


class Own(NamedTuple):
    """A warpgroup's own rows: their chunk, L of each row with a decay, and with segments the limit
    of what each row sees, [64]."""

    chunk: Any
    sums: jax.Array | None
    limit: jax.Array | None


def own_rows(passes: Sequence[Runs]) -> None:
    each(passes, write_unit)
    plgpu.wait_smem_to_gmem(0)


def write_unit(runs: Runs, item: Item) -> None:
    own, number = runs.own, mosaic.slot_of(mosaic.group(), UNIT)
    own_chunk = runs.own_chunk(item, number)
    # A unit's second chunk may be behind the sequence's last one, and then multiplies for nothing.
    ahead = runs.last(item) - own_chunk if runs.from_the_end else own_chunk - runs.first(item)
    turns = jnp.clip(ahead + 1, 1, runs.turns(item))
    mine = Own(own_chunk, *(of_own(runs, item, ref) for ref in runs.of_pairs))
    own.x_loaded.wait(number)
    den = map_rows(runs, item, own.x.at[number]) if runs.by_values else ()
    found = read_state(runs, item)
    one = functools.partial(add_chunk, runs, item, mine, turns)
    if runs.in_two_parts:
        found, den = lax.fori_loop(0, turns - 1, one, (found, den))
        found, den = one(turns - 1, (found, den), in_two_parts=True)
    else:
        found, den = lax.fori_loop(0, turns, one, (found, den))
    skip = functools.partial(skip_chunk, runs, item)
    lax.fori_loop(turns, runs.turns(item), skip, None)
    reader = await_reader(runs, item)
    if runs.of is Pass.DQ:
        k_slot = own.ring.slot(runs.tile_of_chunk(item, turns - 1, 1))
        write_query_gradient(runs, item, found, reader, k_slot, mine)
        runs.let_go(k_slot)
    elif runs.of is Pass.DK:
        write_key_gradient(runs, item, found, reader)
    else:
        write_found(runs, found, den)
    plgpu.commit_smem()
    if reader is not None:
        runs.let_go(reader)
    target = runs.tiling.part(runs.left.found, item, rows_of(own_chunk), runs.own_head(item))
    plgpu.copy_smem_to_gmem(own.x.at[number], target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(own.x_free.at[number])


def of_own(runs: Runs, item: Item, ref: Any) -> Any:
    """What an array holds of the own rows, [64]; None where there is no array."""
    if ref is None:
        return None
    rows = rows_of(runs.own_chunk(item, mosaic.group()))
    at = (item.batch, rows) if len(ref.shape) == 2 else (item.batch, runs.kv_head(item), rows)
    return load(ref.at[at], OF_ROWS, optimized=False)


def times(found: jax.Array, reads: jax.Array | None) -> jax.Array:
    """What rows read of a state or a vector, [64, columns], times their factors, if any."""
    return found if reads is None else found * mosaic.in_columns(reads, found.shape[1])


def vector_of(runs: Runs, block: int) -> jax.Array:
    """64 columns of z or u, in all rows."""
    own = runs.own.vector.at[mosaic.group(), columns_of(block)]
    return mosaic.in_rows(load(own, OF_COLUMNS), C)


def map_rows(runs: Runs, item: Item, x: Any) -> Any:
    """Maps x in place. With a normaliser returns what the run's state adds to den."""
    den: Any = plgpu.layout_cast(jnp.zeros((C,), F32), OF_ROWS)
    for block in range(runs.blocks):
        part = x.at[:, columns_of(block)]
        if runs.of is Pass.DV:
            half = block if runs.tiling.is_filled else 0
            feature_maps.map_keys_in_place(runs.spec, part, half)
            continue
        phi = runs.phi.queries(load(part), block * HALF)
        part[...] = phi
        if runs.normalizes:
            den = den + jnp.sum(phi.astype(F32) * vector_of(runs, block), axis=1)
    plgpu.commit_smem()
    reads = of_own(runs, item, runs.arrays.reads) if runs.normalizes else None
    return den if reads is None else den * reads


def read_state(runs: Runs, item: Item) -> Found:
    """x T, with T in 64 rows at a time."""
    x = runs.own.x.at[mosaic.group()]
    found = tuple(mosaic.zeros(C, columns.size) for columns in runs.parts)
    for block in range(runs.blocks):
        slot = runs.wait(runs.tile_of_state(item, block))
        factors = [
            runs.tiles.at[slot, :, columns] if runs.by_values else runs.turned.at[slot, columns].T
            for columns in runs.parts
        ]
        part = x.at[:, columns_of(block)]
        sums = ((start, [(part, own)]) for start, own in zip(found, factors, strict=True))
        found = multiply(*sums)
        runs.let_go(slot)
    reads = of_own(runs, item, runs.arrays.reads)
    return tuple(times(part, reads) for part in found)


def weights_of(
    runs: Runs, w: jax.Array, mine: Own, chunk: Any, seen_sums: jax.Array | None
) -> jax.Array:
    """w [64, 64] of the own rows and those of a chunk, as the decay leaves it, 0 where a row does
    not see the other. `seen_sums`: L of the chunk's rows."""
    i, j = mosaic.hidden_position(0), mosaic.hidden_position(1)
    behind = (mine.chunk - chunk) * C
    sees = i <= j - behind if runs.from_the_end else i >= j - behind
    if mine.limit is not None:
        limit = mosaic.in_columns(mine.limit - chunk * C, C)
        sees &= j <= limit if runs.from_the_end else j >= limit
    if mine.sums is not None and seen_sums is not None:
        own, seen = mosaic.in_columns(mine.sums, C), mosaic.in_rows(seen_sums, C)
        lost = seen - own if runs.from_the_end else own - seen
        w = w * jnp.exp2(jnp.minimum(lost, 0.0))
    # Without the barrier the choice would make the rounding go number by number, not in pairs.
    return lax.optimization_barrier(jnp.where(sees, w, 0.0))


def sums_of_seen(runs: Runs, item: Item, chunk: Any) -> jax.Array | None:
    """L of a chunk's rows."""
    if runs.arrays.sums is None:
        return None
    at = item.batch, runs.kv_head(item), rows_of(chunk)
    return load(runs.arrays.sums.at[at], OF_COLUMNS, optimized=False)


def add_chunk(
    runs: Runs,
    item: Item,
    mine: Own,
    turns: Any,
    turn: Any,
    carried: tuple[Found, Any],
    in_two_parts: bool = False,
) -> tuple[Found, Any]:
    own, (found, den) = runs.own, carried
    chunk = runs.chunk(item, turn)
    y_slot = runs.wait(runs.tile_of_chunk(item, turn, 0))
    if runs.by_values:
        own.mapped.wait(y_slot)

    def meanwhile() -> Any:
        seen_sums = sums_of_seen(runs, item, chunk)
        if runs.of is not Pass.DK:
            return None, seen_sums
        source = runs.arrays.e.at[item.batch, item.head, rows_of(chunk)]
        return load(source, OF_COLUMNS, optimized=False), seen_sums

    products = [(own.x.at[mosaic.group()], runs.tiles.at[y_slot].T)]
    w, (e, seen_sums) = mosaic.multiply_while(products, (C, C), meanwhile)
    runs.let_go(y_slot)
    if runs.of is Pass.DK:
        w = w - mosaic.in_rows(e, C)
    exact = weights_of(runs, w, mine, chunk, seen_sums)
    w = mosaic.rounded(exact)
    factors = [w]
    if in_two_parts:
        factors.insert(0, mosaic.rounded(exact - w.astype(F32)))
    if runs.of is Pass.OUT and runs.normalizes:
        den = den + jnp.sum(w.astype(F32), axis=1)
    p_slot = runs.wait(runs.tile_of_chunk(item, turn, 1))
    if not runs.by_values:
        own.mapped.wait(p_slot)
    p = runs.tiles.at[p_slot]
    sums = (
        (start, [(factor, p.at[:, columns]) for factor in factors])
        for start, columns in zip(found, runs.parts, strict=True)
    )
    found = multiply(*sums)
    if runs.of is not Pass.DQ:
        runs.let_go(p_slot)
    else:
        # The gradient of queries is made of the own keys, too.
        pl.when(turn < turns - 1)(functools.partial(runs.let_go, p_slot))
    return found, den


def skip_chunk(runs: Runs, item: Item, turn: Any, _: None) -> None:
    """Every phase of a barrier has to be awaited."""
    for number in range(2):
        slot = runs.wait(runs.tile_of_chunk(item, turn, number))
        if number == (0 if runs.by_values else 1):
            runs.own.mapped.wait(slot)
        runs.let_go(slot)


def await_reader(runs: Runs, item: Item) -> Any:
    """The slot of the own rows of q or k."""
    if not runs.readers:
        return None
    for other in range(UNIT):
        slot = runs.wait(runs.tile_of_reader(item, other))
        pl.when(other != mosaic.group())(functools.partial(runs.let_go, slot))
    return runs.own.ring.slot(runs.tile_of_reader(item, mosaic.group()))


def block_in(found: Sequence[jax.Array], block: int) -> jax.Array:
    part, first = divmod(block * HALF, MOST_COLUMNS)
    return found[part][:, first : first + HALF]


def write_found(runs: Runs, found: Found, den: Any) -> None:
    """out or dv, in x's place."""
    factor: Any = runs.spec.scale if runs.of is Pass.OUT else None
    if runs.normalizes:
        factor = 1.0 / jnp.maximum(den, runs.spec.eps)
    for columns, part in zip(runs.parts, found, strict=True):
        if runs.normalizes:
            part = part * mosaic.in_columns(factor, columns.size)
        elif factor is not None:
            part = part * factor
        runs.own.x.at[mosaic.group(), :, columns][...] = part.astype(BF16)


def write_query_gradient(
    runs: Runs, item: Item, G: Found, reader: Any, k_slot: Any, mine: Own
) -> None:
    """dq, in x's place, and inverse, e and flows. Where features are needed they are made once
    more, as registers have room for 64 columns of them."""
    spec, maps, x = runs.spec, runs.phi, runs.own.x.at[mosaic.group()]
    q, k = runs.tiles.at[reader], runs.tiles.at[k_slot]
    # g has been read: in its last columns is what a row sees of each key.
    seen = [x.at[:, columns_of(runs.blocks - 1 - part)] for part in range(1 + runs.in_two_parts)]
    if runs.normalizes:
        own_sums = sums_of_seen(runs, item, mine.chunk)
        left = weights_of(runs, mosaic.zeros(C, C) + 1.0, mine, mine.chunk, own_sums)
        for part in seen:
            rounded = mosaic.rounded(left)
            part[...] = rounded
            left = left - rounded.astype(F32)
        plgpu.commit_smem()
    reads = of_own(runs, item, runs.arrays.reads_of_chunk)

    def z_of(block: int) -> jax.Array:
        """64 columns, for each row, of the sum of phi(k) over all keys that it sees."""
        ahead = times(mosaic.zeros(C, HALF) + vector_of(runs, block), reads)
        own_k = k.at[:, columns_of(block)]
        (z,) = multiply((ahead, [(part, own_k) for part in reversed(seen)]))
        return z

    def features_of(block: int) -> tuple[jax.Array, jax.Array]:
        own_q = load(q.at[:, columns_of(block)])
        return own_q, maps.unrounded(own_q, block * HALF)

    inverse: Any = spec.scale
    e: Any = None
    if runs.normalizes:
        of_e: Any = 0.0
        den: Any = 0.0
        for block in range(runs.blocks):
            z, (_, phi) = z_of(block), features_of(block)
            of_e = of_e + jnp.sum(phi * block_in(G, block), axis=1)
            den = den + jnp.sum(phi * z, axis=1)
        of_rows = 1.0 / jnp.maximum(den, spec.eps)
        of_e = jnp.where(den > spec.eps, of_e * of_rows, 0.0)
        leave(runs, item, runs.left.inverse, of_rows)
        leave(runs, item, runs.left.e, of_e)
        inverse, e = mosaic.in_columns(of_rows, HALF), mosaic.in_columns(of_e, HALF)
    flows: Any = 0.0
    waiting: list[tuple[int, jax.Array]] = []  # for the block behind it, which reads `seen`
    for block in range(runs.blocks):
        dq = block_in(G, block)
        if e is not None:
            dq = dq - e * z_of(block)
        own_q, phi = features_of(block)
        if runs.left.flows is not None:
            # As keys see the features: rounded.
            flows = flows + jnp.sum(mosaic.rounded(phi * inverse).astype(F32) * dq, axis=1)
        waiting.append((block, (dq * inverse * maps.slope_of(own_q, phi)).astype(BF16)))
        while len(waiting) >= len(seen) or waiting and block + 1 == runs.blocks:
            done, dq = waiting.pop(0)
            x.at[:, columns_of(done)][...] = dq
    leave(runs, item, runs.left.flows, flows)


def write_key_gradient(runs: Runs, item: Item, found: Found, reader: Any) -> None:
    """dk, in x's place, and flows."""
    flows: Any = 0.0
    reads = of_own(runs, item, runs.arrays.reads)
    for block in range(runs.blocks):
        own_k = load(runs.tiles.at[reader, :, columns_of(block)])
        phi = runs.phi.unrounded(own_k, block * HALF)
        dk = block_in(found, block) + times(vector_of(runs, block), reads)
        if runs.left.flows is not None:
            # As queries see the features: rounded, and 0 in columns that a head does not have.
            seen = runs.phi.keys(runs.phi.present(own_k, block * HALF), first=block * HALF)
            flows = flows + jnp.sum(seen.astype(F32) * dk, axis=1)
        dk = dk * runs.phi.slope_of(own_k, phi)
        runs.own.x.at[mosaic.group(), :, columns_of(block)][...] = dk.astype(BF16)
    leave(runs, item, runs.left.flows, flows)


def leave(runs: Runs, item: Item, ref: Any, of_rows: Any) -> None:
    """Writes a number of each own row, where there is an array for them."""
    if ref is not None:
        rows = rows_of(runs.own_chunk(item, mosaic.group()))
        ref.at[item.batch, item.head, rows][...] = of_rows
