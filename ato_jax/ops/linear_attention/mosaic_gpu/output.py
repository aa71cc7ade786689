"""out [B, T, H, V] of causal calls, without a decay or with one per head or step.

`causal.py` and `both_ways.py` launch it, with S [V, F] and z [F] ahead of each piece, the sums over
all earlier keys. A block takes a piece of a head, in chunks of C = 64 rows. `output_storage.py` has
the shared memory; read `ato_jax/mosaic/rings.py` and `roles.py` for the kit. In each chunk:

    w[i, j] = phi(q_i) . phi(k_j) for j <= i of the same chunk, else 0
    out_i = (phi(q_i) S^T + sum_j w[i, j] v_j) / max(phi(q_i) . z + sum_j w[i, j], eps)
    S += v^T phi(k),  z += sum_j phi(k_j)          after the chunk

S and z stay in registers from chunk to chunk. Warpgroups, and the barriers between them:

    MEMORY (2)   loads S and z of a piece, and its chunks as slots come free, across pieces
      |    |    +---- state: S, and sums: z, loaded once a piece ------------+
      |    +--------- values: v and gates loaded -----------------+          |
      |  rows: q and k loaded                                     |          |
      v                                                           |          |
    FEATURES (3, 4)   half of F each: maps q and k in place; z;   |          |
      |               phi(q_i) . z                                |          |
      |  largest_known: float16, max phi(q_i) of both halves      |          |
      |  mapped: phi(q) and phi(k) lie in the slot                |          |
      |  den_known: phi(q_i) . z of both halves                   |          |
      v                                                           v          v
    VALUES (0, 1)   half of V each: S_half [64, F] float32 in registers, w, out_half

MEMORY loads a slot of `rows` or `values` again when FEATURES and VALUES have consumed it, of
`state` when VALUES has, of `sums` when FEATURES has. Both warpgroups of VALUES compute all of w,
which is cheaper than an exchange through shared memory.

Rows of 8 bits come in a ring of their own, `eight`. FEATURES widens them, times their scales, and
fills `rows` and `values` in place of MEMORY; then VALUES alone consumes `values`. v is multiplied
by the power of two in its scale, and VALUES multiplies out by the rest (`output_eight_bits.py`).

    symbol      shape          what it is
    q, k        [64, F]        a chunk's rows; features once they are mapped
    v           [64, V]        a chunk's rows
    S, z        [V, F], [F]    sums over all keys before the chunk
    w           [64, 64]       weights of the chunk's pairs
    den         [64]           the denominator
    L_i         [64]           log2 of the decay from the chunk's first row to row i, summed
    m           -              the chunk's middle row
    to_end      -              the factor of a state from the chunk's middle row to its last

In float16 (`powers.py`) phi(k) is multiplied by a power of two of its head, and phi(q_i) by one of
its row. For the latter the warpgroups of FEATURES exchange the largest feature of each query before
they round phi(q). Both powers cancel in a normalised out_i; otherwise it is divided by them.

With a decay:

    w[i, j] has a factor exp2(L_i - L_j), and what out_i and den_i read of S and z one of exp2(L_i)
    S = exp2(L_C) S + (exp2(L_C - L_j) v_j)^T phi(k_j), likewise z    for the chunk's last row C

phi(k), S and z are scaled to the chunk's middle row (`chunk_decay.py`), and rows of out and den are
multiplied by exp2(L_i - L_m) at the end. In a steep chunk w, v and what is read of the state are
scaled in registers instead.

Where segments begin in a chunk (`chunk_borders.py`), masks apply to w and to what is read of S and
z. Then rows of v ahead of the last segment are set to 0 in shared memory, and a further product
gives the new S. Meanwhile `adds` has 0 for these rows.

Where every query sees every key through a decay (`both_ways.py`), a first launch walks from the end
(`mosaic.Deal.end`) and writes for each query the sum over the keys behind it, and its denominator.
A second launch walks from the start and adds these, `later` and `later_den`, to its own sums.

Where a tile holds two heads, "half" means one of them, and products are over its 64 columns. Where
a tile of one head lies in two blocks (`Tiling.parts_in`), a product over F is the sum of two, and S
is two arrays of 64 columns.
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
from ato_jax.mosaic import (
    ALIKE,
    F32,
    HALF,
    OF_COLUMNS,
    OF_ROWS,
    Item,
    load,
    multiply,
)
from ato_jax.ops.linear_attention.eight_bits import Float8Inputs
from ato_jax.ops.linear_attention.mosaic_gpu import chunk_decay, feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.chunk_borders import Borders
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.output_eight_bits import (
    load_eight_bits,
    map_eight_bits,
)
from ato_jax.ops.linear_attention.mosaic_gpu.output_rows import (
    factor_of,
    leave_den,
    store_state,
    times,
)
from ato_jax.ops.linear_attention.mosaic_gpu.output_storage import (
    FEATURES,
    MEMORY,
    OUT_SLOTS,
    ROLES,
    VALUES,
    Part,
    Storage,
    Walk,
    storage_of,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def output(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    z: jax.Array,
    later: Later | None = None,
    **options: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Launches the kernel and returns out; with `later` and a normaliser also the denominators,
    [B, H, T up to a whole chunk] float32.

    Args:
      s, z: the sums ahead of each piece. s is [B, G, P or more, V, F] in the dtype of q, in float16
        divided by `s_units`; z is [B, G, P or more, F] float32.
      later: the result of `later_output`.
      gates: log2 decays summed within each chunk, [B, G, T up to a whole chunk], float32.
      steep: which pieces have a steep chunk, [B, tiles, P], with G tiles, or G / 2.
      lengths: of queries and keys, [B] int32; rows behind them see nothing and are not seen.
      s_units: [B, G, P or more, V] float32, in float16.
      k_powers: in float16, [B, G] float32, `powers.powers_of_keys`.
      begins, borders_of: with segments, `begins` and `chunks` of `scans.borders.OfSequence`.
    """
    out, *den = _launch(spec, deal, later, q=q, k=k, v=v, s=s, z=z, **options)
    return out, den[0] if den else None


def output_of_eight_bits(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    inputs: Float8Inputs,
    s: jax.Array,
    z: jax.Array,
    v_rest: jax.Array,
) -> jax.Array:
    """`output` for q, k and v in 8 bits, without a decay. Scales of v are powers of two, and rows
    of out are multiplied by `v_rest`, [B, G] float32."""
    names = "q", "k", "v", "q_scale", "k_scale", "v_scale"
    arrays = {name: getattr(inputs, name) for name in names} | {"v_rest": v_rest}
    (out,) = _launch(spec, deal, None, s=s, z=z, lengths=inputs.kv_lengths, **arrays)
    return out


class Later(NamedTuple):
    """Numerators and denominators of the keys behind each query."""

    sums: jax.Array  # of the shape and dtype of out
    den: jax.Array | None  # [B, H, T up to a whole chunk] float32, with a normaliser


def later_output(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    z: jax.Array,
    gates: jax.Array,
    steep: jax.Array,
    lengths: jax.Array | None = None,
) -> Later:
    """The launch that walks from the end, for the keys behind each query (`Deal.end` is set)."""
    sums, *den = _launch(
        spec, deal, None, q=q, k=k, v=v, s=s, z=z, gates=gates, steep=steep, lengths=lengths
    )
    return Later(sums, *den or (None,))


def _launch(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    later: Later | None,
    **arrays: jax.Array | None,
) -> Sequence[jax.Array]:
    given: dict[str, Any] = {name: x for name, x in arrays.items() if x is not None}
    part, name = Part.ALL, "output"
    if later is not None:
        part = Part.REST
        given |= {"later": later.sums} | ({} if later.den is None else {"later_den": later.den})
    elif deal.end is not None:
        part, name = Part.LATER, "later_output"
    out_types = {"out": jax.ShapeDtypeStruct(frame.shape_of_values(spec, spec.H), spec.dtype)}
    if part is not Part.ALL and spec.normalize:
        rows = spec.B, spec.H, mosaic.whole_chunks(spec.T)
        out_types["left_den"] = jax.ShapeDtypeStruct(rows, F32)
    names = *given, *out_types

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        return Walk(spec, deal, own, **dict(zip(names, refs, strict=True)))

    parts = (MEMORY, memory), (FEATURES, features), (VALUES, values)
    storage = storage_of(spec, part, of_eight_bits="q_scale" in given)
    program = mosaic.Program(ROLES, storage, parts, bind)
    types, operands = tuple(out_types.values()), tuple(given.values())
    found: Sequence[jax.Array] = mosaic.launch(frame.name_of(name), program, deal, types, operands)
    return found


def memory(walk: Walk) -> None:
    """Loads pieces and chunks."""
    own = walk.own
    steps = walk.deal.each(functools.partial(load_piece, walk))
    own.sums.consumed.wait()
    own.state.consumed.wait()
    if own.eight is not None:
        own.eight.drain(steps)
        return
    own.rows.drain(steps)
    own.values.drain(steps)


def load_piece(walk: Walk, item: Item) -> None:
    own, tiling, kv_head = walk.own, walk.tiling, walk.kv_head(item)

    @pl.when(item.number > 0)
    def _() -> None:
        own.sums.consumed.wait()
        own.state.consumed.wait()

    for half in range(2):
        at = item.batch, tiling.head_of(kv_head, half), item.piece, tiling.columns_of(half)
        # [64] and [64, F]
        plgpu.copy_gmem_to_smem(walk.z.at[at], own.z_start.at[half], own.sums.produced.barrier)
        plgpu.copy_gmem_to_smem(walk.s.at[at], own.s.at[half], own.state.produced.barrier)
        if walk.s_units is not None:
            source = walk.s_units.at[at]
            plgpu.copy_gmem_to_smem(source, own.s_units.at[half], own.state.produced.barrier)

    def load_chunk(chunk: Any, _: None) -> None:
        step, rows = item.before + chunk, item.rows(chunk)
        if own.eight is not None:
            load_eight_bits(walk, item, rows, step)
            return
        slot, v_slot = own.rows.slot(step), own.values.slot(step)
        own.rows.acquire(step)
        for ref, tiles, head in ((walk.k, own.k, kv_head), (walk.q, own.q, item.head)):
            tiling.copy_tile(ref, item, rows, head, tiles, slot, own.rows.produced)  # [64, F]
        own.values.acquire(step)
        if walk.gated:
            of_keys = item._replace(head=kv_head)
            produced = own.values.produced
            tiling.copy_vector(walk.gates, of_keys, rows, own.gates, v_slot, produced)  # [64]
        if walk.later_den is not None:
            produced = own.values.produced
            tiling.copy_vector(walk.later_den, item, rows, own.later_den, v_slot, produced)  # [64]
        copied = [(walk.v, own.v, kv_head)]
        copied += [] if walk.later is None else [(walk.later, own.later, item.head)]
        for ref, tiles, head in copied:
            for half in range(2):
                source = tiling.part(ref, item, rows, head, half)  # [64, 64]
                target = mosaic.for_copy(tiles.at[v_slot, half])
                plgpu.copy_gmem_to_smem(source, target, own.values.produced.at[v_slot])

    lax.fori_loop(0, item.chunks, load_chunk, None)


def features(walk: Walk, half: int) -> None:
    """Maps q and k in place, and computes phi(q_i) . z for half of F."""
    if not walk.gated:
        store_adds(walk, half)
    steps = walk.deal.each(lambda item: map_piece(walk, half, item))
    if walk.own.eight is not None:
        walk.own.rows.drain(steps)
        walk.own.values.drain(steps)


def store_adds(walk: Walk, half: int, first: Any = None) -> None:
    """Stores 1 for each key, or for each from row `first` on and 0 for the others."""
    adds = mosaic.ones(C, ALIKE, walk.tiling.dtype)
    adds = adds if first is None else mosaic.rows_within(adds, first, None)
    mosaic.store_transposed(walk.own.adds.at[half], adds)
    if first is not None:
        plgpu.commit_smem()


def map_piece(walk: Walk, half: int, item: Item) -> None:
    own = walk.own
    own.sums.produced.wait()
    totals = mosaic.in_columns(load(own.z_start.at[half], OF_ROWS), ALIKE)  # z [64, 8]
    plgpu.commit_smem()  # this read finishes before the next load overwrites it
    own.sums.consumed.arrive()
    map_one = functools.partial(map_chunk, walk, half, item)
    lax.fori_loop(0, item.chunks, map_one, (totals, jnp.float32(1)))


def map_chunk(walk: Walk, half: int, item: Item, chunk: Any, carried: Any) -> Any:
    """Carries z's half [64, 8], and `to_end`."""
    own, tiling, spec = walk.own, walk.tiling, walk.spec
    z_rows, adds = own.z_rows.at[half], own.adds.at[half]
    totals, to_end = carried
    step = item.before + chunk
    slot, v_slot = own.rows.slot(step), own.values.slot(step)
    own_q, own_k = (tiling.half_of(tiles, slot, half) for tiles in (own.q, own.k))
    if own.eight is None:
        own.values.produced.wait(v_slot)
    else:
        own.values.acquire(step)
    gates = of_keys = reads = None
    if walk.gated:
        gates = walk.gates_in(v_slot, half)
        totals, to_end = totals * (to_end * gates.to_middle()), gates.from_middle()
        of_keys = gates.up_to_middle()
        reads = gates.if_steep(gates.of(OF_ROWS))
        left = gates.if_steep(gates.last - gates.of(OF_ROWS))
        mosaic.store_transposed(adds, mosaic.in_columns(left, ALIKE).astype(tiling.dtype))
    z = totals * (1 / walk.z_unit) if walk.z_unit > 1 else totals
    mosaic.store_transposed(z_rows, z.astype(tiling.dtype))
    if gates is not None:
        totals = totals * gates.if_steep(gates.last)
    phi, first, count = walk.phi, half * HALF, item.rows_within(chunk, walk.lengths)
    if own.eight is None:
        own.rows.produced.wait(slot)
        if walk.k_powers is None:
            own_q[...] = mosaic.kept(phi.queries(load(own_q), first), count)
            phi_k = phi.keys(phi.present(load(own_k), first), of_keys, first)
        else:
            # Rows behind the lengths may hold any number, also NaN.
            largest = phi.largest_of_rows(mosaic.kept(load(own_q), count), first)
            own.q_largest.at[v_slot, half][...] = largest
            if own.largest_known is not None:
                own.largest_known.arrive(v_slot)
            of_k = walk.power_of_keys(item, half)
            x = phi.present(load(own_k), first)
            phi_k = feature_maps.times_power(phi, x, of_k, first, of_keys)
        own_k[...] = mosaic.kept(phi_k, count)
        if walk.k_powers is not None:
            if own.largest_known is not None:
                own.largest_known.wait(v_slot)
            of_q = mosaic.in_columns(walk.powers_of_queries(v_slot, half), HALF)
            phi_q = feature_maps.times_power(phi, phi.present(load(own_q), first), of_q, first)
            own_q[...] = mosaic.kept(phi_q, count)
        plgpu.commit_smem()
    else:
        own.rows.acquire(step)
        map_eight_bits(walk, half, item, step, own_q, own_k, own.v.at[v_slot, half], count)
        own.values.produced.arrive(v_slot)
    own.mapped.arrive(slot)
    if spec.normalize:
        borders = walk.borders(item, chunk)  # as late as possible: features are out of registers
        if gates is not None:
            borders = borders.unless(gates.steep)
        borders.when_some(lambda: store_adds(walk, half, borders.adds))
        den, totals = multiply(
            (mosaic.zeros(C, ALIKE), [(own_q, z_rows.T)]),
            (borders.left(totals), [(own_k.T, adds.T)]),
        )
        den = jnp.sum(mosaic.rows_within(den, None, borders.reads), axis=1) / (ALIKE / walk.z_unit)
        own.den.at[v_slot, half][...] = den if reads is None else den * reads
        own.den_known.arrive(v_slot)
        borders.when_some(lambda: store_adds(walk, half))
    own.rows.consumed.arrive(slot)
    if own.eight is None:
        own.values.consumed.arrive(v_slot)
    return totals, to_end


def values(walk: Walk) -> None:
    """Computes half of out's columns, with the same half of S in registers."""
    walk.deal.each(functools.partial(multiply_piece, walk))
    plgpu.wait_smem_to_gmem(0)


def multiply_piece(walk: Walk, item: Item) -> None:
    half = mosaic.group()
    walk.own.state.produced.wait()
    S = [load(part).astype(F32) for part in walk.s_parts(half)]  # [64, F]
    if walk.s_units is not None:
        units = load(walk.own.s_units.at[half], OF_ROWS)
        S = [part * mosaic.in_columns(units, part.shape[1]) for part in S]
        plgpu.commit_smem()  # this read finishes before the next store to the same place

    def multiply_chunks(some_steep: bool) -> None:
        one = functools.partial(multiply_chunk, walk, half, item, some_steep)
        lax.fori_loop(0, item.chunks, one, (S, jnp.float32(1)))

    tile = lax.div(item.head, walk.spec.H // walk.spec.G)
    chunk_decay.each_chunk(walk.steep, item, tile, multiply_chunks)
    walk.own.state.consumed.arrive()


def multiply_chunk(
    walk: Walk, half: Any, item: Item, some_steep: bool, chunk: Any, carried: Any
) -> Any:
    """Carries S's half [64, F], in parts, and `to_end`."""
    own, tiling = walk.own, walk.tiling
    S, to_end = carried
    step = item.before + chunk
    slot, v_slot = own.rows.slot(step), own.values.slot(step)
    out_slot = mosaic.slot_of(step, OUT_SLOTS)
    q, k = (tiling.parts_in(tiles, slot, half) for tiles in (own.q, own.k))
    v, state = own.v.at[v_slot, half], walk.s_parts(half)
    borders = Borders() if some_steep else walk.borders(item, chunk)
    gates: Any = None
    if walk.gated:
        own.values.produced.wait(v_slot)
        gates = walk.gates_in(v_slot, half, some_steep)
        S, to_end = times(S, to_end * gates.to_middle()), gates.from_middle()
    store_state(walk, half, state, S)
    if not walk.gated:
        own.values.produced.wait(v_slot)
    mosaic.keep_rows(v, item.rows_within(chunk, walk.lengths))
    plgpu.commit_smem()
    own.mapped.wait(slot)

    def products(S: list[jax.Array], added: Any) -> Any:
        """w [64, 64], phi(q) S^T [64, 64], and S behind the chunk. `added` is v^T."""
        w, out, *totals = multiply(
            (mosaic.zeros(C, C), [(a, b.T) for a, b in zip(q, k, strict=True)]),
            (mosaic.zeros(C, HALF), [(a, b.T) for a, b in zip(q, state, strict=True)]),
            *((total, [(added, b)]) for total, b in zip(S, k, strict=True)),
        )
        return w, out, totals

    def when_steep() -> Any:
        added = mosaic.times_rows(v, gates.left(OF_COLUMNS))
        w, out, totals = products(times(S, jnp.exp2(gates.last)), added)
        reads = mosaic.in_columns(jnp.exp2(gates.of(OF_ROWS)), HALF)
        return w * gates.of_pairs(queries=0), out * reads, totals

    def otherwise() -> Any:
        return products(S, v.T)

    def at_border() -> Any:
        return jnp.where(borders.pairs_from(), w, 0.0), mosaic.rows_within(out, None, borders.reads)

    def behind_border() -> list[jax.Array]:
        mosaic.keep_rows_between(v, borders.adds, C)
        plgpu.commit_smem()
        starts = [mosaic.zeros(*part.shape) for part in S]
        return list(multiply(*((start, [(v.T, b)]) for start, b in zip(starts, k, strict=True))))

    w, out, S = gates.either(when_steep, otherwise) if walk.gated else otherwise()
    w, out = borders.either(at_border, lambda: (w, out))
    borders.unless_some(lambda: own.rows.consumed.arrive(slot))
    w = walk.seen(w)
    w_units = None
    if walk.s_units is not None:
        w_units = mosaic.units_of_rows([w])
        w = mosaic.in_units(w, w_units)
        of_state = mosaic.in_rows(load(own.s_units.at[half], OF_COLUMNS), C)
        out = mosaic.in_units(out * of_state, w_units)
    # Without the barrier the selected numbers would be rounded singly, not in pairs.
    w = mosaic.rounded(lax.optimization_barrier(w), tiling.dtype)
    (out,) = multiply((out, [(w, v)]))
    S = borders.either(behind_border, lambda: S)
    borders.when_some(lambda: own.rows.consumed.arrive(slot))
    factor, den = factor_of(walk, item, half, v_slot, w, w_units, gates)
    plgpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
    out = out * factor
    if own.later is not None:
        later = load(own.later.at[v_slot, half]).astype(F32)  # [64, 64]
        out += later if den is None else later * mosaic.in_columns(1.0 / den, HALF)
    own.out.at[half, out_slot][...] = out.astype(tiling.dtype)
    if own.left_den is not None:
        own.left_den.at[half][...] = den
    plgpu.commit_smem()  # the stores above, and reads of gates before their slot is released
    own.values.consumed.arrive(v_slot)
    plgpu.copy_smem_to_gmem(
        mosaic.for_copy(own.out.at[half, out_slot]),
        tiling.part(walk.out, item, item.rows(chunk), item.head, half),
    )
    if own.left_den is not None:
        leave_den(walk, half, item, item.rows(chunk))
    return S, to_end
