"""dv and the flow of keys, for causal calls with a decay per step and channel.

`channel_backward.py` launches it, with q^ and k~ of the forward pass, and inverse and e of
`channel_query_gradient.py`. Read `channel.py` first for q^, k~ and the middle row, and
`key_gradient.py` for the pass without a decay. The kernel walks from the last chunk to the first.
With q'_i = q^_i inverse_i, and R [V, F] and u [F] the sums over queries of later chunks, scaled to
the middle row of the chunk:

    a[j, i] = k~_j . q'_i          for i >= j of the same chunk, else 0
    b[j, i] = v_j . g_i - e_i      for i >= j of the same chunk, else 0
    dv_j  = R k~_j + sum_i a[j, i] g_i
    dk~_j = R^T v_j + u + sum_i b[j, i] q'_i
    R += g^T q',  u -= sum_i e_i q'_i        after each chunk

    flow_j = k~_j dk~_j
    E = sum_v S R + z u        [F]        for each run

Warpgroups, and the barriers between them:

    MEMORY (2)   loads chunks as slots come free, and S and z ahead of runs
      |    +--- keys: k and v loaded -----------------------------+
      |  rows: q, g, inverse, e and onto loaded                   |
      |  kv_ring: a quarter of S loaded; k_sum_loaded: z          |
      v                                                           |
    STATE (3)    loads R^T and u behind a piece (start); maps q   |
      |          in place, times inverse; R^T and u in registers, |
      |          stored rounded for each chunk; computes E        |
      |  mapped: q' lies in q's place                             |
      |  state produced: R^T and u lie in shared memory           |
      v                                                           v
    DV (0)   k~ in registers, a and dv         DK (1)   b, dk~ and the flow

MEMORY loads a slot of `rows` again when STATE, DV and DK have consumed it, of `keys` when DV and DK
have, and of `kv_ring` when STATE has. STATE stores R^T and u again when DV and DK have consumed
`state`. In DV k~ is the first factor of both products. In DK b is multiplied in two parts: rounded,
and what rounding left off.

    symbol       shape              what it is
    q, g         [64, F], [64, V]   a chunk's queries, q' once they are mapped; cotangents of out
    k, v         [64, F], [64, V]   a chunk's keys k~ and values
    inverse, e   [64]               of each query: 1 / denominator, and g_i . out_i
    R, u         [V, F], [F]        sums over the queries of later chunks
    a, b         [64, 64]           pairs of the chunk's keys j and queries i, [j, i]
    S, z         [V, F], [F]        sums over the keys ahead of the run
    onto         [F]                the square root of the factor that scales R and u to the chunk

Without a normaliser inverse is a power of two, and dv, the flow and E are multiplied by the rest of
the scale (`channel.parts_of_scale`). R and u are the gradients of S and z without that factor.

In E, S and z have the rounding that the run's queries read, and R and u include the queries of the
run's first chunk. The flow and E are written in float32. Two heads of 64 columns in a tile have
separate products, and their states [64, 64] lie one below the other.

Where XLA adds up dv over two walks or over blocks of features (`channel_blocks.adds_up`), dv is
written in float32, so that only the sum is rounded. Shared memory has room for half of its columns,
which are stored one half after the other.

Where segments begin in a chunk (`chunk_borders.py`), masks apply to a and b, to what keys read of R
and u, and to the queries that are added to these. Shared memory has no room for a masked g, so
STATE masks q' in registers.

The shared memory is in `channel_key_gradient_storage.py`.
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
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import channel, channel_blocks, chunk_decay, frame
from ato_jax.ops.linear_attention.mosaic_gpu.channel_key_gradient_storage import (
    Arrays,
    Storage,
    Walk,
    cast_of,
    storage_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu.chunk_borders import Borders
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_rows import (
    keep_last_segment,
    of_last_segment,
    seen_pairs,
)
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import spread
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# The rows of R^T, and the elements of u, that belong to each half of F.
HALVES = [pl.ds(half * HALF, HALF) for half in range(2)]


def channel_key_gradient(
    spec: LinearAttentionSpec, deal: mosaic.Deal, arrays: Arrays
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the kernel. It returns the flow, dv and E [B, H, runs, D]."""
    deal = dataclasses.replace(deal, most_blocks=deal.items)
    k, v = arrays.k, arrays.v
    of_dv = F32 if channel_blocks.adds_up(spec) else BF16
    out_types = (
        jax.ShapeDtypeStruct(channel_blocks.shape_of_heads(spec, k), F32),
        jax.ShapeDtypeStruct(channel_blocks.shape_of_heads(spec, v), of_dv),
        jax.ShapeDtypeStruct((spec.B, spec.H, pl.cdiv(spec.T, channel.RUN), spec.D), F32),
    )
    given = {name: array for name, array in arrays._asdict().items() if array is not None}

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        inputs, (flow, dv, crossing) = refs[: len(given)], refs[len(given) :]
        references = Arrays(**dict(zip(given, inputs, strict=True)))
        return Walk(spec, deal, references, flow, dv, crossing, own)

    cast = cast_of(frame.heads_of_tile(spec))
    parts = (cast.memory, memory), (cast.state, state), (cast.dv, values), (cast.dk, keys)
    program = mosaic.Program(mosaic.Roles(cast), storage_of(spec), parts, bind)
    name, operands = frame.name_of("channel_key_gradient"), tuple(given.values())
    flow, dv, crossing = mosaic.launch(name, program, deal, out_types, operands, own_barriers=True)
    return flow, dv, crossing


def memory(walk: Walk) -> None:
    """Loads chunks, from the end, and the states ahead of runs."""
    walk.deal.each(functools.partial(load_piece, walk))


def load_piece(walk: Walk, item: Item) -> None:
    own = walk.own

    def load_one(chunk: Any, _: None) -> None:
        load_chunk(walk, item, chunk)
        # After the loads of the next chunk, since each quarter waits for the one before.
        pl.when(chunk > 0)(lambda: load_state(walk, item, chunk - 1))

    lax.fori_loop(0, item.chunks, load_one, None)
    load_state(walk, item, item.chunks - 1)
    own.rows.drain(item.chunks)
    own.keys.drain(item.chunks)
    own.kv_ring.consumed.wait()


def load_chunk(walk: Walk, item: Item, chunk: Any) -> None:
    own, arrays, tiling, spec = walk.own, walk.arrays, walk.tiling, walk.spec
    rows = item.rows_from_the_end(chunk)
    slot, k_slot = own.rows.slot(chunk), own.keys.slot(chunk)
    number = lax.div(item.first_row, C) + walk.number_of(item, chunk)
    own.rows.acquire(chunk)
    columns = pl.ds(number * spec.D, spec.D)
    of_features = channel_blocks.head_of_features(spec, arrays.q, item.head)
    of_values = channel_blocks.head_of_values(spec, arrays.g, item.head)
    produced = own.rows.produced
    tiling.copy_tile(arrays.q, item, rows, of_features, own.q, slot, produced)  # [64, F]
    tiling.copy_vector(arrays.inverse, item, rows, own.inverse, slot, produced)  # [64]
    tiling.copy_vector(arrays.e, item, rows, own.e, slot, produced)  # [64]
    tiling.copy_vector(arrays.onto, item, columns, own.onto, slot, produced)  # [F]
    tiling.copy_tile(arrays.g, item, rows, of_values, own.g, slot, produced)  # [64, V]
    own.keys.acquire(chunk)
    produced = own.keys.produced
    tiling.copy_tile(arrays.k, item, rows, of_features, own.k, k_slot, produced)  # [64, F]
    tiling.copy_tile(arrays.v, item, rows, of_values, own.v, k_slot, produced)  # [64, V]


def load_state(walk: Walk, item: Item, chunk: Any) -> None:
    """Loads S and z ahead of a run, if the chunk is the run's first one."""
    own, tiling, k_sum = walk.own, walk.tiling, walk.arrays.k_sum

    @pl.when(walk.is_first_of_run(item, chunk))
    def _() -> None:
        run = walk.run_of(item, chunk)
        is_last_run = chunk < channel.CHUNKS
        of_heads = list(zip(walk.heads_of(item), tiling.by_heads(own.k_sum), strict=True))
        for n, (half, number) in enumerate(walk.quarters):
            # Ahead of the last run's first quarter, which is loaded first, the place is free.
            pl.when(jnp.logical_or(jnp.logical_not(is_last_run), n > 0))(own.kv_ring.consumed.wait)
            if n == 0 and k_sum is not None:
                for head, target in of_heads:
                    source = k_sum.at[item.batch, head, run]  # [D]
                    plgpu.copy_gmem_to_smem(source, target, own.k_sum_loaded.barrier)
            at = item.batch, tiling.head_of(item.head, half), run
            quarter = tiling.columns_of(half), pl.ds(number * HALF, HALF)
            source = walk.arrays.kv.at[(*at, *quarter)]  # [64, 64]
            plgpu.copy_gmem_to_smem(source, own.kv, own.kv_ring.produced.barrier)


def state(walk: Walk) -> None:
    """Replaces q^ by q', adds up R and u, and computes E."""
    walk.deal.each(functools.partial(sum_piece, walk))
    walk.own.state.consumed.wait()
    plgpu.wait_smem_to_gmem(0)


def sum_piece(walk: Walk, item: Item) -> None:
    own, tiling, arrays = walk.own, walk.tiling, walk.arrays
    for ref, starts in ((arrays.r, own.r), (arrays.u, own.u_start)):
        for head, target in zip(walk.heads_of(item), tiling.by_heads(starts), strict=True):
            source = ref.at[item.batch, head, item.piece]  # [D, V] and [D]
            plgpu.copy_gmem_to_smem(source, target, own.start.barrier)
    own.start.wait()
    sums = (
        *(load(own.r.at[rows]).astype(F32) for rows in HALVES),
        *(mosaic.in_parts(load(own.u_start.at[rows], OF_ROWS)) for rows in HALVES),
    )
    plgpu.commit_smem()  # reads finish before the first chunk's stores
    lax.fori_loop(0, item.chunks, functools.partial(sum_chunk, walk, item), sums)


def sum_chunk(walk: Walk, item: Item, chunk: Any, sums: Any) -> Any:
    """Carries R^T, half of F each [64, V], and u in the same halves, in parts that a product adds
    up to (`mosaic.in_parts`)."""
    own, tiling = walk.own, walk.tiling
    slot = own.rows.slot(chunk)
    own.rows.produced.wait(slot)
    onto = [load(own.onto.at[slot, rows], OF_ROWS) for rows in HALVES]
    sums = [chunk_decay.times_squares(x, onto[n % 2]) for n, x in enumerate(sums)]
    map_queries(walk, slot)
    own.mapped.arrive(slot)
    pl.when(chunk > 0)(own.state.consumed.wait)
    for rows, r, u in zip(HALVES, sums[:2], sums[2:], strict=True):
        own.r.at[rows][...] = r.astype(BF16)
        own.u.at[rows][...] = mosaic.of_parts(u)
    plgpu.commit_smem()
    own.state.produced.arrive()
    # What q' is multiplied by, for each of the sums.
    minus_es = [own.T for own in tiling.by_heads(own.minus_e)]
    both = walk.in_heads(own.g, slot), minus_es
    factors = [of_heads[half % walk.heads] for of_heads in both for half in range(2)]
    borders = walk.borders(item, chunk)
    sums = borders.either(
        functools.partial(sums_up_to_border, walk, slot, borders, sums, factors),
        functools.partial(sums_with_chunk, walk, slot, sums, factors),
    )
    plgpu.commit_smem()  # all warps have multiplied by what the next chunk stores
    own.rows.consumed.arrive(slot)
    pl.when(walk.is_first_of_run(item, chunk))(lambda: leave_crossing(walk, item, chunk, sums))
    return sums


def map_queries(walk: Walk, slot: Any) -> None:
    """Stores q' in the place of q^, and -e as products read it."""
    own, tiling = walk.own, walk.tiling
    inverses = [load(of_head, OF_ROWS) for of_head in tiling.by_heads(own.inverse.at[slot])]
    for half in range(2):
        q = tiling.half_of(own.q, slot, half)
        mapped = load(q).astype(F32) * mosaic.in_columns(inverses[half % walk.heads], HALF)
        q[...] = mosaic.rounded(mapped)
    minus_es = tiling.by_heads(own.minus_e)
    for e, minus_e in zip(tiling.by_heads(own.e.at[slot]), minus_es, strict=True):
        spread(load(e, OF_ROWS), minus_e)
    plgpu.commit_smem()


def sums_with_chunk(walk: Walk, slot: Any, sums: Any, factors: list[Any]) -> Any:
    """The sums with the queries of the chunk added."""
    turned = [walk.tiling.half_of(walk.own.q, slot, half).T for half in range(2)]
    of_sums = zip(sums, turned * 2, factors, strict=True)
    return multiply(*((start, [(x, y)]) for start, x, y in of_sums))


def sums_up_to_border(
    walk: Walk, slot: Any, borders: Borders, sums: Any, factors: list[Any]
) -> Any:
    """The sums over the queries ahead of the chunk's first border alone: no key before it sees
    later ones. DV and DK read all of q' and g, so q' is masked in registers."""
    row = plgpu.broadcasted_iota(jnp.int32, (C,), dimension=0, layout=OF_COLUMNS)
    reads = jnp.where(row < borders.reads, 1.0, 0.0)
    found: list[Any] = [None] * 4
    for half in range(2):
        masked = mosaic.times_rows(walk.tiling.half_of(walk.own.q, slot, half), reads)
        for n in (half, 2 + half):
            start = mosaic.zeros(*sums[n].shape)
            (found[n],) = multiply((start, [(masked, factors[n])]))
    return tuple(found)


def leave_crossing(walk: Walk, item: Item, chunk: Any, sums: Any) -> None:
    """Computes and writes E of the run whose first chunk this is."""
    own, tiling = walk.own, walk.tiling
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    found: list[Any] = [0.0, 0.0]
    if walk.arrays.k_sum is not None:
        own.k_sum_loaded.wait()
        for half, rows in enumerate(HALVES):
            z = load(own.k_sum.at[rows], OF_ROWS)
            found[half] = mosaic.of_parts(sums[2 + half]) * z
    for half, number in walk.quarters:
        columns = slice(number * HALF, (number + 1) * HALF)
        own.kv_ring.produced.wait()
        found[half] += jnp.sum(sums[half][:, columns] * load(own.kv).astype(F32), axis=1)
        plgpu.commit_smem()  # reads finish before the next load overwrites them
        own.kv_ring.consumed.arrive()
    for half, rows in enumerate(HALVES):
        own.crossing.at[rows][...] = channel.times_rest(found[half], walk.scale_rest)
    plgpu.commit_smem()
    run = walk.run_of(item, chunk)
    for head, source in zip(walk.heads_of(item), tiling.by_heads(own.crossing), strict=True):
        plgpu.copy_smem_to_gmem(source, walk.crossing.at[item.batch, head, run])


def values(walk: Walk) -> None:
    """Computes dv."""
    each_chunk(walk, values_chunk)


def keys(walk: Walk) -> None:
    """Computes the flow."""
    each_chunk(walk, keys_chunk)


def each_chunk(walk: Walk, do: Callable[[Walk, Item, Any], None]) -> None:
    def one_piece(item: Item) -> None:
        lax.fori_loop(0, item.chunks, lambda chunk, _: do(walk, item, chunk), None)

    walk.deal.each(one_piece)
    plgpu.wait_smem_to_gmem(0)


def values_chunk(walk: Walk, item: Item, chunk: Any) -> None:
    own, tiling, spec = walk.own, walk.tiling, walk.spec
    slot, k_slot = own.rows.slot(chunk), own.keys.slot(chunk)
    own.keys.produced.wait(k_slot)
    features = [load(k) for k in walk.in_heads(own.k, k_slot)]  # [64, F]
    plgpu.commit_smem()  # reads finish before the next load overwrites them
    own.keys.consumed.arrive(k_slot)
    own.mapped.wait(slot)
    pairs = zip(features, walk.in_heads(own.q, slot), strict=True)
    found = multiply(*((mosaic.zeros(C, C), [(k, q.T)]) for k, q in pairs))
    borders = walk.borders(item, chunk)
    weights = []
    for a in seen_pairs(borders, list(found)):
        weights.append(mosaic.rounded(channel_blocks.seen(spec, item, a, queries=1)))
    features = of_last_segment(borders, features)
    own.state.produced.wait()
    of_heads = tiling.by_heads(own.r), weights, walk.in_heads(own.g, slot)
    factors = zip(features, *of_heads, strict=True)
    found = multiply(*((mosaic.zeros(C, spec.V), [(k, r), (a, g)]) for k, r, a, g in factors))
    own.state.consumed.arrive()
    own.rows.consumed.arrive(slot)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    found = tuple(channel.times_rest(dv, walk.scale_rest) for dv in found)
    if walk.adds_up:
        leave_halves(walk, item, chunk, *found)
        return
    for target, dv in zip(walk.in_heads(own.dv, 0), found, strict=True):
        target[...] = dv.astype(BF16)
    plgpu.commit_smem()
    tiling.leave_tile(own.dv, 0, walk.dv, item, item.rows_from_the_end(chunk), item.head)


def leave_halves(walk: Walk, item: Item, chunk: Any, dv: jax.Array) -> None:
    """Writes dv in float32, one half of its columns after the other."""
    own, rows = walk.own, item.rows_from_the_end(chunk)
    for half in range(pl.cdiv(walk.arrays.v.shape[3], HALF)):
        if half:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own.dv[...] = dv[:, half * HALF : (half + 1) * HALF]
        plgpu.commit_smem()
        target = walk.tiling.part(walk.dv, item, rows, item.head, half)
        plgpu.copy_smem_to_gmem(own.dv, target)


def keys_chunk(walk: Walk, item: Item, chunk: Any) -> None:
    own, tiling, spec = walk.own, walk.tiling, walk.spec
    slot, k_slot = own.rows.slot(chunk), own.keys.slot(chunk)
    own.mapped.wait(slot)
    queries, vs = walk.in_heads(own.q, slot), walk.in_heads(own.v, k_slot)
    es = tiling.by_heads(own.e.at[slot])
    minus_es = [mosaic.in_rows(-load(e, OF_COLUMNS), C) for e in es]
    own.keys.produced.wait(k_slot)
    pairs = zip(minus_es, vs, walk.in_heads(own.g, slot), strict=True)
    found = multiply(*((minus_e, [(v, g.T)]) for minus_e, v, g in pairs))
    parts, borders = [], walk.borders(item, chunk)
    for b in seen_pairs(borders, list(found)):
        b = channel_blocks.seen(spec, item, b, queries=1)
        rounded = mosaic.rounded(b)
        parts.append((rounded, mosaic.rounded(b - rounded.astype(F32))))
    own.state.produced.wait()
    of_others = [mosaic.in_rows(load(u, OF_COLUMNS), C) for u in tiling.by_heads(own.u)]
    of_others = of_last_segment(borders, of_others)
    plgpu.commit_smem()  # u and e were read, ahead of what overwrites them
    borders.when_some(lambda: keep_last_segment(borders, vs))
    factors = zip(of_others, vs, tiling.by_heads(own.r), parts, queries, strict=True)
    dk = multiply(*((u, [(v, r.T), *((b, q) for b in both)]) for u, v, r, both, q in factors))
    own.state.consumed.arrive()
    own.rows.consumed.arrive(slot)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for half in range(2):
        features = load(tiling.half_of(own.k, k_slot, half)).astype(F32)  # [64, 64]
        features = channel.times_rest(features, walk.scale_rest)
        first = half * HALF % spec.D
        own.flow.at[half][...] = features * dk[half % walk.heads][:, first : first + HALF]
    plgpu.commit_smem()
    own.keys.consumed.arrive(k_slot)
    for half in range(2):
        rows = item.rows_from_the_end(chunk)
        target = tiling.part(walk.flow, item, rows, item.head, half)
        plgpu.copy_smem_to_gmem(own.flow.at[half], target)
