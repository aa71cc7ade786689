"""The sums over the keys of each piece, S [B, G, P, V, F] and z [B, G, P, F] in float32.

    S = sum_j v_j phi(k_j)^T [V, F],  z = sum_j phi(k_j) [F]

`causal.py` launches it; `scans/edges.py` adds the pieces up to the state ahead of each, which
`output.py` reads. `query_sums.py` launches the same kernel, `piece_sums`, for queries. In general
the kernel has rows x and y, and factors a [C, 8] of the rows of each chunk, and sums

    total = sum_j y_j phi_j^T [V, F],  columns = sum_jc a_jc phi_j / of_columns [F]

where phi is x as mapped by `Terms.map_rows`, which also stores a. A product has at least 8 columns,
so a has 8. For keys each of them is 1 and `of_columns` is 8.

`sums_storage.py` has the shared memory; read `ato_jax/mosaic/rings.py` and `roles.py` for the kit.
Warpgroups, and the barriers between them:

    MEMORY (2)   loads chunks as slots of `rows` come free, across pieces
      |    |
      |    +--------- y_loaded ------------------------------------+
      |  rows: x and vectors loaded                                |
      v                                                            |
    FEATURES (3, 4)   half of F each: maps x in place, stores a    |
      |  mapped: phi and a lie in the slot                         |
      v                                                            v
    VALUES (0, 1)   half of V each: total_half [64, F] in registers, and of columns half of F

MEMORY loads a slot again when VALUES has consumed it, and FEATURES, if FEATURES computes columns.
That is so in two cases: a tile holds two heads of 64 columns, or the sum is over x as loaded
(`Terms.weigh`).

    symbol         shape            what it is
    x, y           [64, F], [64, V] a chunk's rows: k and v, or q and g
    phi            [64, F]          x as mapped, in the place of x
    a              [64, 8]          factors of rows; shared memory holds a^T
    vectors        [N] each         numbers of a chunk: decays, normalisers, ..
    total          [V, F]           the first sum
    columns        [F]              the second sum; [F, 8] until it is stored

With a decay `map_rows` scales phi to the end of the piece, or for queries to its start. In float16
it divides queries' phi and a by units of their chunk (`Arrays.units`), and both sums are kept in
the units of the chunk that was added last.

Where a tile holds two heads, each half is a head with sums of its own. Where a tile of one head
lies in two blocks (`Tiling.parts_in`), so does total.
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
from ato_jax.mosaic import ALIKE, F32, HALF, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import channel_blocks, feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.sums_storage import (
    FEATURES,
    MEMORY,
    ROLES,
    VALUES,
    Arrays,
    Storage,
    Terms,
    Walk,
    storage_of,
    widths_of,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    k: jax.Array,
    v: jax.Array,
    gates: jax.Array | None,
    lengths: jax.Array | None = None,
    adding: jax.Array | None = None,
    powers: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """kv [B, G, P, V, F] and k_sum [B, G, P, F], float32; gates: from each step up to its piece's
    end, [B, G, T up to a whole chunk]; lengths: [B] int32, rows behind them are left out; adding:
    with segments, as `scans.borders` has it; powers: in float16 those of keys, `powers.py`."""

    def map_rows(
        half: int, k_ref: Any, adds_ref: Any, gates_ref: Any = None, power: Any = None
    ) -> None:
        adds = mosaic.ones(C, ALIKE, frame.tiling(spec).dtype)
        mosaic.store_transposed(adds_ref, adds)
        exponents = None
        if gates_ref is not None:
            exponents = load(gates_ref, mosaic.OF_ROWS)
        feature_maps.map_keys_in_place(spec, k_ref, half, exponents, power)

    vectors = () if gates is None else (gates,)
    arrays = Arrays(k, v, vectors, lengths=lengths, within=adding, powers=powers)
    return piece_sums(spec, deal, Terms("sums", map_rows, of_columns=ALIKE), arrays)


def piece_sums(
    spec: LinearAttentionSpec, deal: mosaic.Deal, terms: Terms, arrays: Arrays
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel, and returns total [B, heads, P, V, D] and columns [B, heads, P, D], both
    in float32."""
    operands, structure = jax.tree.flatten(arrays)

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        *given, total, columns = refs
        return Walk(spec, deal, terms, jax.tree.unflatten(structure, given), total, columns, own)

    parts = (MEMORY, memory), (FEATURES, features), (VALUES, values)
    program = mosaic.Program(ROLES, storage_of(spec, terms, arrays), parts, bind)
    of_pieces = deal.B, deal.heads * frame.heads_of_tile(spec), deal.pieces
    out_type = (
        jax.ShapeDtypeStruct((*of_pieces, spec.V, spec.D), F32),
        jax.ShapeDtypeStruct((*of_pieces, spec.D), F32),
    )
    found: tuple[jax.Array, jax.Array] = mosaic.launch(
        frame.name_of(terms.name), program, deal, out_type, operands
    )
    return found


def memory(walk: Walk) -> None:
    """Loads chunks."""
    steps = walk.each(functools.partial(load_piece, walk))
    walk.own.rows.drain(steps)


def load_piece(walk: Walk, item: Item) -> None:
    lax.fori_loop(0, item.chunks, lambda chunk, _: load_chunk(walk, item, chunk), None)


def load_chunk(walk: Walk, item: Item, chunk: Any) -> None:
    own, arrays, tiling, spec = walk.own, walk.arrays, walk.tiling, walk.spec
    step, rows, produced = item.before + chunk, item.rows(chunk), own.rows.produced
    slot = own.rows.slot(step)
    own.rows.acquire(step)
    x_head = channel_blocks.head_of_features(spec, arrays.x, item.head)
    tiling.copy_tile(arrays.x, item, rows, x_head, own.x, slot, produced)  # [64, F]
    number, widths = item.number_of(chunk), widths_of(spec, arrays)
    for ref, target, width in zip(arrays.vectors, own.vectors, widths, strict=True):
        columns, of_vector = pl.ds(number * width, width), item
        if ref.shape[1] < walk.deal.heads * tiling.heads:
            of_vector = item._replace(head=frame.head_of_keys(spec, item.head))
        tiling.copy_vector(ref, of_vector, columns, target, slot, produced)  # [N]
    y_head = channel_blocks.head_of_values(spec, arrays.y, item.head)
    for half in range(2):
        source = tiling.part(arrays.y, item, rows, y_head, half)  # [64, 64]
        target = mosaic.for_copy(own.y.at[slot, half])
        plgpu.copy_gmem_to_smem(source, target, own.y_loaded.at[slot])


def features(walk: Walk, half: int) -> None:
    """Maps half of x's columns in place; computes the same half of columns, unless VALUES does."""
    walk.each(functools.partial(map_piece, walk, half))
    plgpu.wait_smem_to_gmem(0)


def map_piece(walk: Walk, half: int, item: Item) -> None:
    one = functools.partial(map_chunk, walk, half, item)
    columns = lax.fori_loop(0, item.chunks, one, mosaic.zeros(HALF, ALIKE))
    if walk.values_sum_columns:
        return
    if walk.arrays.units is not None:
        columns = columns * walk.last_units(item, half)[1]
    leave_columns(walk, half, item, columns)


def map_chunk(walk: Walk, half: int, item: Item, chunk: Any, columns: jax.Array) -> jax.Array:
    """Carries half of columns [64, 8]; 0 where VALUES computes it."""
    own, arrays, terms = walk.own, walk.arrays, walk.terms
    slot = own.rows.slot(item.before + chunk)
    own.rows.produced.wait(slot)
    x, a = walk.tiling.half_of(own.x, slot, half), own.a.at[slot, half]
    vectors = [
        walk.tiling.by_heads(vector.at[slot])[half % walk.tiling.heads] for vector in own.vectors
    ]
    if terms.weigh is not None:
        walk.keep_within(item, chunk, x)
        factors = mosaic.in_columns(terms.weigh(half, a, *vectors), ALIKE)
        plgpu.commit_smem()
        (own_columns,) = multiply((mosaic.zeros(HALF, ALIKE), [(x.T, a.T)]))
        columns = columns + own_columns * factors
    of_float16: dict[str, Any] = {}
    if arrays.units is not None:
        of_float16["units"] = walk.units_of(item, half, chunk)
    if arrays.powers is not None:
        head = walk.tiling.head_of(item.head, half)
        of_float16["power"] = arrays.powers[item.batch, head]
    terms.map_rows(half, x, a, *vectors, **of_float16)
    mosaic.keep_rows(x, item.rows_within(chunk, arrays.lengths))
    if terms.weigh is None:
        walk.keep_within(item, chunk, x)
    plgpu.commit_smem()
    own.mapped.arrive(slot)
    if walk.values_sum_columns:
        return columns
    if arrays.units is not None:
        columns *= walk.onto_units(item, half, chunk)[1]
    if terms.weigh is None:
        (columns,) = multiply((columns, [(x.T, a.T)]))
    own.rows.consumed.arrive(slot)
    return columns


def leave_columns(walk: Walk, half: Any, item: Item, columns: jax.Array) -> None:
    """Stores half of columns, [64, 8]."""
    own = walk.own.columns.at[half]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    own[...] = jnp.sum(columns, axis=1) * (1 / walk.terms.of_columns)
    plgpu.commit_smem()
    head = walk.tiling.head_of(item.head, half)
    target = walk.columns.at[item.batch, head, item.piece, walk.tiling.columns_of(half)]
    plgpu.copy_smem_to_gmem(own, target)


def values(walk: Walk) -> None:
    """Computes half of total's rows, and half of columns where FEATURES does not."""
    walk.each(functools.partial(multiply_piece, walk))
    plgpu.wait_smem_to_gmem(0)


def multiply_piece(walk: Walk, item: Item) -> None:
    half, tiling, own = mosaic.group(), walk.tiling, walk.own.total
    parts = tiling.parts_of(own.at[half])
    sums = [mosaic.zeros(HALF, part.shape[1]) for part in parts]
    if walk.values_sum_columns:
        sums.append(mosaic.zeros(HALF, ALIKE))
    sums = lax.fori_loop(0, item.chunks, functools.partial(add_chunk, walk, half, item), sums)
    if walk.arrays.units is not None:
        sums = times(walk, sums, walk.last_units(item, half))
    if walk.values_sum_columns:
        leave_columns(walk, half, item, sums.pop())
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part, total in zip(parts, sums, strict=True):
        part[...] = total
    plgpu.commit_smem()
    head = tiling.head_of(item.head, half)
    target = walk.total.at[item.batch, head, item.piece, tiling.columns_of(half)]
    plgpu.copy_smem_to_gmem(own.at[half], target)


def add_chunk(
    walk: Walk, half: Any, item: Item, chunk: Any, sums: list[jax.Array]
) -> list[jax.Array]:
    """Carries half of total [64, F], in parts, and behind them, where VALUES computes it, half of
    columns [64, 8]."""
    own, tiling, lengths = walk.own, walk.tiling, walk.arrays.lengths
    slot = own.rows.slot(item.before + chunk)
    own.y_loaded.wait(slot)
    own.mapped.wait(slot)
    y = own.y.at[slot, half]
    products = [(y.T, x) for x in tiling.parts_in(own.x, slot, half)]
    if lengths is not None:
        mosaic.keep_rows(y, item.rows_within(chunk, lengths))
        plgpu.commit_smem()
    if walk.values_sum_columns:
        products.append((tiling.half_of(own.x, slot, half).T, own.a.at[slot, half].T))
    if walk.arrays.units is not None:
        sums = times(walk, sums, walk.onto_units(item, half, chunk))
    found = multiply(*((before, [pair]) for before, pair in zip(sums, products, strict=True)))
    own.rows.consumed.arrive(slot)
    return list(found)


def times(walk: Walk, sums: list[jax.Array], factors: tuple[Any, Any]) -> list[jax.Array]:
    """What `add_chunk` carries, times a factor of total and one of columns."""
    of_total, of_columns = factors
    if not walk.values_sum_columns:
        return [part * of_total for part in sums]
    return [*(part * of_total for part in sums[:-1]), sums[-1] * of_columns]
