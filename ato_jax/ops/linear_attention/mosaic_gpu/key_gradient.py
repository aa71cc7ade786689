"""dk and dv [B, T, G, D] of causal calls, without a decay or with one per head or step.

`causal.py` launches it after `query_gradient.py` and `query_sums.py`. A block
walks a piece of a head of keys from its last chunk to its first. Read `output.py` first. With R [V,
F] and u [F] the sums over the queries of all later chunks, and phi'_i = phi(q_i) inverse_i:

    a[j, i] = phi(k_j) . phi'_i    for i >= j of the same chunk, else 0
    b[j, i] = v_j . g_i - e_i      for i >= j of the same chunk, else 0
    dv_j = R phi(k_j) + sum_i a[j, i] g_i
    dk_j = (R^T v_j + u + sum_i b[j, i] phi'_i) * phi'(k_j)
    R += g^T phi',  u -= sum_i e_i phi'_i      after each chunk

Warpgroups, and the barriers between them:

    MEMORY (2)   loads chunks as slots come free, across pieces
      |    +--- keys: k and v loaded -----------------------------+
      |  rows: q, g, inverse, e and gates loaded                  |
      v                                                           |
    STATE (3)    loads R and u of a piece (start); maps q in      |
      |          place, times inverse; R and u in registers,      |
      |          published for each chunk                         |
      |  mapped: phi' lies in q's place, -e in minus_e            |
      |  state produced: R and u lie in shared memory             |
      v                                                           v
    DV (0)   phi(k), a and dv  --- keys_mapped (with a decay) -->  DK (1)   b and dk
             <-- pairs_ring (steep chunks): b in shared memory ---

MEMORY loads a slot of `rows` again when STATE, DV and DK have consumed it, and of `keys` when DV
and DK have; STATE stores R and u again when DV and DK have consumed `state`.

phi(k) stays in DV's registers, the first factor of both products. With a decay DV also stores it to
k's place, if phi's derivative follows from phi(k); else DK maps k again. One warpgroup, STATE, has
all of R: if DV and DK had half of it each, they would have to exchange the halves in every chunk. b
is a difference, so it is multiplied in two parts, rounded and what rounding left off.

    symbol       shape          what it is
    q, g         [64, F], [64, V]   a chunk's queries, phi' once they are mapped; cotangents of out
    k, v         [64, F], [64, V]   a chunk's keys and values
    inverse, e   [64]           of each query: 1 / denominator, and g_i . out_i
    R, u         [V, F], [F]    sums over the queries of later chunks
    a, b         [64, 64]       pairs of the chunk's keys j and queries i, [j, i]
    L_i          [64]           log2 of the decay from the chunk's first row to row i, summed
    m            -              the chunk's middle row
    to_start     -              the factor of a sum from the chunk's first row to its middle row

With a decay R and u are scaled to the last row C of the chunk:

    a[j, i] and b[j, i] have a factor exp2(L_i - L_j); R phi(k_j) and R^T v_j + u exp2(L_C - L_j)
    R = exp2(L_C) R + (exp2(L_i) g_i)^T phi'_i,  likewise u    after each chunk

Features, R and u are then scaled to the chunk's middle row (`chunk_decay.py`), and rows of dk are
multiplied by exp2(L_m - L_j) at the end. In a steep chunk a, b, phi(k), R^T v_j + u, and g and e
for the sums are scaled in registers instead.

For the gradient of the decays (`scans/flows.py`) DK writes for each key, with phi(k) rounded as in
`query_gradient.py`,

    phi(k_j) . (R^T v_j + u + sum_i b[j, i] phi'_i)

the sum over the key's pairs of the loss's derivative by their exponent. In a steep chunk the pair
of a row with itself may be far larger than all others, which would be lost beside it. There DK
writes A_j, and DV writes I(t):

    A_j  = phi(k_j) . (R^T v_j + u) exp2(L_C - L_j)
    I(t) = sum over j < t <= i of a[j, i] b[j, i] / exp2(L_i - L_j)

I is computed from b, which DK stores to shared memory, times a: a product with ones where j < t,
and a sum over i. It contains no pair of a row with itself, and nothing cancels. Where
`splits_states` holds, DK multiplies R in two parts, e and u are 0, and R is written at the start of
each piece.

Where segments begin in a chunk (`chunk_borders.py`), a and b are masked, and so is what keys read
of R and u, by a product of its own. R and u restart from the queries ahead of the first border:
`reading_g` has their g, and `minus_e` is 0 for the others.

Where a tile holds two heads, each warpgroup does the same for both.

Where H / G heads of queries read the same keys, R, u, dk and dv are sums over this group. An item
is a piece of a head of keys. Each chunk of keys takes H / G steps of `rows`, one for each member of
the group, and STATE stores R and u at the first of them.

The roles MEMORY and STATE are here, DV and DK in `key_gradient_rows.py`, the shared memory in
`key_gradient_storage.py`, and the units of float16 in `key_gradient_units.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, OF_COLUMNS, OF_ROWS, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import chunk_decay, frame, value_blocks
from ato_jax.ops.linear_attention.mosaic_gpu.chunk_borders import Borders
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_rows import keys, values
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_storage import (
    Arrays,
    Storage,
    Walk,
    cast_of,
    storage_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_units import (
    Before,
    as_stored,
    in_units_of,
    out_of_rows_units,
)
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import spread
from ato_jax.ops.linear_attention.mosaic_gpu.two_parts import splits_states
from ato_jax.ops.linear_attention.scans import flow_places
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def key_gradient(
    spec: LinearAttentionSpec, deal: mosaic.Deal, arrays: Arrays
) -> tuple[jax.Array, jax.Array, flow_places.OfKeys | None]:
    """Launches the kernel. It returns dk and dv; with a decay also the sums for its gradient."""
    k, v, gates = arrays.k, arrays.v, arrays.gates
    of_heads = value_blocks.shape_of_heads(spec, k)
    out_type: Any = jax.ShapeDtypeStruct(of_heads, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)
    given = {name: array for name, array in arrays._asdict().items() if array is not None}
    rest = None
    if gates is not None:
        rows = jax.ShapeDtypeStruct(gates.shape, F32)
        of_edges = spec.B, spec.G, flow_places.places(spec, deal)
        edges = [
            jax.ShapeDtypeStruct((*of_edges, spec.V, spec.F), k.dtype),
            jax.ShapeDtypeStruct((*of_edges, spec.F), F32),
        ]
        if splits_states(spec):
            starts = spec.B, spec.G, deal.pieces, spec.V, spec.F
            edges = [jax.ShapeDtypeStruct(starts, BF16)] * 2
        elif mosaic.has_units(k.dtype):
            edges.append(jax.ShapeDtypeStruct((*of_edges, spec.V), F32))
        out_type = (*out_type, rows, rows, *edges)
        rest = _program(spec, deal, list(given), some_steep=True)
    program = _program(spec, deal, list(given), some_steep=False)
    name = frame.name_of("key_gradient" if deal.end is None else "later_key_gradient")
    dk, dv, *found = mosaic.launch(name, program, deal, out_type, tuple(given.values()), rest=rest)
    if not found:
        return dk, dv, None
    inside, adds, *edges = found
    if splits_states(spec):
        rounded, rest = (part.astype(F32) for part in edges)
        return dk, dv, flow_places.OfKeys(adds, inside, rounded + rest)
    if mosaic.has_units(k.dtype):
        edges[0] = edges[0].astype(F32) * edges.pop()[..., None]
    return dk, dv, flow_places.OfKeys(adds, inside, *edges)


def _program(
    spec: LinearAttentionSpec, deal: mosaic.Deal, names: list[str], some_steep: bool
) -> mosaic.Program:
    """The kernel for inputs of these names. With a decay there are two, one for the pieces with a
    steep chunk and one for all others, as in `query_gradient.py`."""
    cast = cast_of(frame.heads_of_tile(spec))

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        inputs, (dk, dv, *of_flows) = refs[: len(names)], refs[len(names) :]
        arrays = Arrays(**dict(zip(names, inputs, strict=True)))
        return Walk(spec, deal, some_steep, arrays, dk, dv, of_flows, own)

    parts = (cast.memory, memory), (cast.state, state), (cast.dv, values), (cast.dk, keys)
    storage = storage_of(spec, some_steep, adds="dk" in names)
    return mosaic.Program(mosaic.Roles(cast), storage, parts, bind)


def memory(walk: Walk) -> None:
    """Loads chunks, from the end."""
    steps = walk.each(functools.partial(load_piece, walk))
    walk.own.rows.drain(walk.row_step(steps, 0))
    walk.own.keys.drain(steps)


def load_piece(walk: Walk, item: Item) -> None:
    own, arrays, tiling = walk.own, walk.arrays, walk.tiling

    def load_queries(rows: Any, step: Any, slot: Any, member: Any) -> None:
        of_member, produced = walk.of_queries(item, member), own.rows.produced
        own.rows.acquire(step)
        tiling.copy_tile(arrays.q, item, rows, of_member.head, own.q, slot, produced)  # [64, F]
        if walk.has_e:
            tiling.copy_vector(arrays.inverse, of_member, rows, own.inverse, slot, produced)  # [64]
            tiling.copy_vector(arrays.e, of_member, rows, own.e, slot, produced)  # [64]
        tiling.copy_tile(arrays.g, item, rows, of_member.head, own.g, slot, produced)  # [64, V]
        if walk.gated:
            tiling.copy_vector(arrays.gates, item, rows, own.gates, slot, produced)  # [64]

    def load_chunk(chunk: Any, _: None) -> None:
        step, rows = item.before + chunk, item.rows_from_the_end(chunk)
        first = walk.row_step(step, 0)
        slot, k_slot = own.rows.slot(first), own.keys.slot(step)
        load_queries(rows, first, slot, 0)
        own.keys.acquire(step)
        for ref, tiles in ((arrays.k, own.k), (arrays.v, own.v)):  # [64, F], [64, V]
            tiling.copy_tile(ref, item, rows, item.head, tiles, k_slot, own.keys.produced)

        def load_member(member: Any, _: None) -> None:
            own_step = walk.row_step(step, member)
            load_queries(rows, own_step, own.rows.slot(own_step), member)

        walk.each_other_member(load_member, None)

    lax.fori_loop(0, item.chunks, load_chunk, None)


def state(walk: Walk) -> None:
    """Maps queries in place, and accumulates R and u."""
    steps = walk.each(functools.partial(sum_piece, walk))
    if walk.has_e:

        @pl.when(steps > 0)
        def _() -> None:
            walk.own.state.consumed.wait()

    if walk.gated:
        plgpu.wait_smem_to_gmem(0)


def sum_piece(walk: Walk, item: Item) -> None:
    own, tiling = walk.own, walk.tiling
    if walk.has_e:  # else `leave_sums` waited

        @pl.when(item.before > 0)
        def _() -> None:
            own.state.consumed.wait()

    if walk.gated:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    copied = [] if walk.keeps_start else [(walk.arrays.r, own.r)]
    copied += [(walk.arrays.u, own.u_start)] if walk.has_e else []
    for ref, starts in copied:
        for head, target in zip(walk.heads_of(item), tiling.by_heads(starts), strict=True):
            source = ref.at[item.batch, head, item.piece]  # [V, F], and [F]
            plgpu.copy_gmem_to_smem(source, target, own.start.barrier)
    if walk.has_units:
        for head, target in zip(walk.heads_of(item), tiling.by_heads(own.r_rows), strict=True):
            source = walk.arrays.r_units.at[item.batch, head, item.piece]  # [V]
            plgpu.copy_gmem_to_smem(source, target, own.start.barrier)
    own.start.wait()
    us: Any = tiling.by_heads(own.u_start) if walk.has_e else [None] * walk.heads
    sums: Any = [
        (of_r, None if of_u is None else mosaic.in_parts(load(of_u, OF_ROWS)))
        for of_r, of_u in zip(r_behind(walk, item), us, strict=True)
    ]
    one = jnp.float32(1)
    before = [Before(one, (one, one) if walk.has_units else None)] * walk.heads
    if walk.has_units:
        sums = out_of_rows_units(walk, sums)
    plgpu.commit_smem()  # reads finish before the next piece is loaded
    sum_one = functools.partial(sum_chunk, walk, item)
    sums, before = lax.fori_loop(0, item.chunks, sum_one, (sums, before))
    if not walk.has_e:
        leave_sums(walk, item, sums, [of_head.to_start for of_head in before])


def r_behind(walk: Walk, item: Item) -> Iterator[list[jax.Array]]:
    """R behind the piece in float32: for each head in turn the parts in which it is multiplied."""
    if not walk.keeps_start:
        for of_head in walk.parts_of_r():
            yield [load(rows).astype(F32) for rows in of_head]
        return
    heads = [walk.arrays.r.at[item.batch, head, item.piece] for head in walk.heads_of(item)]
    for of_head in [[head] for head in heads] if walk.heads == 2 else walk.parts_of_r(*heads):
        yield [load(rows, optimized=False) for rows in of_head]


def sum_chunk(walk: Walk, item: Item, chunk: Any, carried: Any) -> Any:
    """Carries R and u of each head, u in 8 columns, and `Before`."""
    found = sum_queries(walk, item, chunk, None, *carried)

    def sum_member(member: Any, carried: Any) -> Any:
        return sum_queries(walk, item, chunk, member, *carried)

    return walk.each_other_member(sum_member, found)


def sum_queries(
    walk: Walk, item: Item, chunk: Any, member: Any, sums: Any, before: list[Before]
) -> Any:
    """R and u behind the chunk, and `Before`. With the first of a group's members, which is
    None, R and u of later chunks are published before."""
    own, is_first = walk.own, member is None
    step = walk.row_step(item.before + chunk, 0 if is_first else member)
    slot, count = own.rows.slot(step), walk.count(item, chunk)
    units = walk.units(item, chunk, 0 if is_first else member) if walk.has_units else None
    borders = walk.borders(item, chunk)
    gates, queries = map_queries(walk, slot, count, units, borders.reads)
    if is_first:
        sums, before = publish(walk, chunk, gates, sums, before)
    if units is not None:
        sums, before = in_units_of(units, sums, before)
    added = parts_of_g(walk, own.g, slot)
    if walk.gated and walk.has_e and is_first:
        keep_sums(walk, item, chunk)
    if walk.some_steep:
        factors = zip(gates, queries, added, sums, strict=True)
        sums = [
            sum_one_by_one(walk, of_head, is_first, q, n, g, *own_sums)
            for n, (of_head, q, g, own_sums) in enumerate(factors)
        ]
    else:
        sums = borders.either(
            functools.partial(sum_at_border, walk, borders, slot, is_first, queries, sums),
            functools.partial(sum_at_once, walk, queries, added, sums),
        )
    if walk.gated or walk.arrays.borders is not None:
        plgpu.commit_smem()  # reads finish before the next loads overwrite them
    own.rows.consumed.arrive(slot)
    return sums, before


def map_queries(
    walk: Walk, slot: Any, count: Any, units: list[tuple[Any, Any]] | None, reads: Any
) -> tuple[list[Any], list[Any]]:
    """The gates of each head, and its phi' where q was. u sums up the first `reads` queries, or all
    where it is None."""
    own, tiling, heads = walk.own, walk.tiling, walk.heads
    own.rows.produced.wait(slot)
    queries = walk.in_heads(own.q, slot)
    inverses: list[Any] = [walk.spec.scale] * heads
    es: list[Any] = []
    if walk.has_e:
        inverses = [load(rows, OF_ROWS) for rows in tiling.by_heads(own.inverse.at[slot])]
        es = [load(rows, OF_ROWS) for rows in tiling.by_heads(own.e.at[slot])]
    gates: list[Any] = [None] * heads
    if walk.gated:
        gates = walk.gates_in(slot)
        for n, of_head in enumerate(gates):
            inverses[n] = inverses[n] * jnp.exp2(of_head.since_middle())
            if es:
                es[n] = es[n] * of_head.if_steep(of_head.of(OF_ROWS))
    for n, (of_q, of_e) in enumerate(units or ()):
        inverses[n], es[n] = inverses[n] / of_q, es[n] / of_e
    for n in range(heads):
        x = load(queries[n])
        phi_q = walk.phi.unrounded(x) * mosaic.in_columns(inverses[n], x.shape[1])
        queries[n][...] = mosaic.kept(phi_q, count).astype(walk.dtype)
        mosaic.keep_rows(walk.in_heads(own.g, slot)[n], count)
        if es:
            spread(es[n], own.minus_e.at[n], reads)
    plgpu.commit_smem()
    own.mapped.arrive(slot)
    return gates, queries


def publish(walk: Walk, chunk: Any, gates: list[Any], sums: Any, before: list[Before]) -> Any:
    """R and u of later chunks, stored as the chunk's middle sees them; and `Before`."""
    own = walk.own
    if walk.gated:
        for n, of_head in enumerate(gates):
            onto = before[n].to_start * of_head.from_middle()
            sums[n] = jax.tree.map(lambda x, onto=onto: x * onto, sums[n])
            before[n] = before[n]._replace(to_start=of_head.to_middle())

    @pl.when(chunk > 0)
    def _() -> None:
        own.state.consumed.wait()

    if walk.gated:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    stored = as_stored(walk, sums, before) if walk.has_units else sums
    us = walk.tiling.by_heads(own.u) if walk.has_e else [None] * walk.heads
    for rows, of_u, (total, parts) in zip(walk.parts_of_r(), us, stored, strict=True):
        for ref, x in zip(rows, total, strict=True):
            ref[...] = x.astype(walk.dtype)
        if of_u is not None:
            of_u[...] = mosaic.of_parts(parts)
    if walk.splits:
        for rows, (total, _) in zip(walk.parts_of_r(own.r_rest), sums, strict=True):
            for ref, x in zip(rows, total, strict=True):
                ref[...] = rest_of(x)
    plgpu.commit_smem()
    own.state.produced.arrive()
    return sums, before


def sum_at_once(walk: Walk, queries: list[Any], added: list[list[Any]], sums: Any) -> Any:
    """R and u of all heads, by products that are all in flight together."""
    products: list[Any] = []
    for n, (total, parts) in enumerate(sums):
        of_g = zip(total, added[n], strict=True)
        products += [(own, [(g.T, queries[n])]) for own, g in of_g]
        if walk.has_e:
            products.append((parts, [(queries[n].T, walk.own.minus_e.at[n].T)]))
    found = iter(multiply(*products))
    return [
        ([next(found) for _ in total], next(found) if walk.has_e else None) for total, _ in sums
    ]


def sum_at_border(
    walk: Walk, borders: Borders, slot: Any, is_first: bool, queries: list[Any], sums: Any
) -> Any:
    """R and u of all heads where segments begin in the chunk: sums over the queries ahead of the
    first border alone. Their g are copied to `reading_g`, with 0 for the others, since DV and DK
    read all of g."""
    own, tiling = walk.own, walk.tiling
    for half in range(2):
        g = load(tiling.half_of(own.g, slot, half))  # [64, 64]
        tiling.half_of(own.reading_g, 0, half)[...] = mosaic.rows_within(g, None, borders.reads)
    plgpu.commit_smem()
    if is_first:
        sums = jax.tree.map(lambda x: mosaic.zeros(*x.shape), sums)
    return sum_at_once(walk, queries, parts_of_g(walk, own.reading_g, 0), sums)


def parts_of_g(walk: Walk, tiles: Any, slot: Any) -> list[list[Any]]:
    """g of each head, in as many parts as R."""
    if walk.gated and walk.heads == 1:
        return [[walk.tiling.half_of(tiles, slot, half) for half in range(2)]]
    return [[g] for g in walk.in_heads(tiles, slot)]


def sum_one_by_one(
    walk: Walk,
    gates: chunk_decay.Gates,
    is_first: bool,
    queries: Any,
    n: int,
    added: list[Any],
    total: list[jax.Array],
    parts: jax.Array | None,
) -> Any:
    """R and u of head n where the chunk may be steep, by one product after the other. Registers
    have no room for all operands, and without them ptxas would serialize the products of other
    chunks, too. The sums over later chunks decay at the first member of a group."""
    reads, keeps = gates.if_steep(gates.of(OF_COLUMNS)), gates.if_steep(gates.last)
    found: list[jax.Array] = []
    for x, g in zip(total, added, strict=True):
        scaled = mosaic.times_rows(g, reads)
        found += multiply((x * keeps if is_first else x, [(scaled, queries)]))
    if parts is not None:
        minus_e = walk.own.minus_e.at[n]
        (parts,) = multiply((parts * keeps if is_first else parts, [(queries.T, minus_e.T)]))
    return found, parts


def rest_of(x: jax.Array) -> jax.Array:
    """The second part of x: the rest that rounding x left off, rounded."""
    return mosaic.rounded(x - mosaic.rounded(x).astype(F32))


def leave_sums(walk: Walk, item: Item, sums: Any, to_start: list[Any]) -> None:
    """Writes R at the piece's start: rounded, and then what rounding left off, from its place in
    shared memory, once DV and DK have released that."""
    own = walk.own
    own.state.consumed.wait()
    for part, target in zip((mosaic.rounded, rest_of), walk.flows[2:], strict=True):
        for rows, (total, _), onto in zip(walk.parts_of_r(), sums, to_start, strict=True):
            for ref, x in zip(rows, total, strict=True):
                ref[...] = part(x * onto)
        plgpu.commit_smem()
        of_heads = walk.tiling.by_heads(own.r)
        for head, source in zip(walk.heads_of(item), of_heads, strict=True):
            plgpu.copy_smem_to_gmem(source, target.at[item.batch, head, item.piece])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def keep_sums(walk: Walk, item: Item, chunk: Any) -> None:
    """Stores R and u behind the chunk, if it is one ahead of those with a place."""
    number = item.chunks - 1 - chunk

    @pl.when((chunk == 0) | flow_places.is_kept(walk.spec, number + 1))
    def _() -> None:
        place = flow_places.place(walk.spec, walk.deal, item, number)
        left = walk.own.r, walk.own.u, *([walk.own.r_rows] if walk.has_units else [])
        for own, ref in zip(left, walk.flows[2:], strict=True):
            of_heads = walk.tiling.by_heads(own)
            for head, source in zip(walk.heads_of(item), of_heads, strict=True):
                plgpu.copy_smem_to_gmem(source, ref.at[item.batch, head, place])
