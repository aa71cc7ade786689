"""The output of queries that see the keys of their own document:

    out_i = phi(q_i) S / max(phi(q_i) . z, eps)        or scale * phi(q_i) S

    MEMORY (2)       loads k and v of a document, then q
      |  rows: a tile is loaded
      v
    HALVES (0, 1)    S and z by `sum_keys`; then of each chunk of q half of the features, stored
                     in q's place, and of all of them half of out

Documents that lie within a chunk go by pairs (`document_pairs.py`). There a weight is divided
before it is rounded, so that the output of a document of one row is v itself.

Where features may be negative phi(q) is multiplied in two parts, as in `whole_output.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_ROWS, Role, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.document_pairs import least_of, place_keys, seen
from ato_jax.ops.linear_attention.mosaic_gpu.document_table import Deal, Document, Table
from ato_jax.ops.linear_attention.mosaic_gpu.document_walk import (
    Storage,
    Sums,
    Walk,
    in_all_rows,
    leave,
    memory,
    storage_of,
    sum_keys,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

HALVES = Role("halves", registers=232, warpgroups=2)
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
ROLES = mosaic.Roles((HALVES, MEMORY))


def document_output(
    spec: LinearAttentionSpec,
    deal: Deal,
    table: Table,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> jax.Array:
    arrays = {**table.arrays(), "q": q, "k": k, "v": v}

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        return Walk(spec, deal, own, **dict(zip((*arrays, "out"), refs, strict=True)))

    parts = (MEMORY, memory), (HALVES, halves)
    program = mosaic.Program(ROLES, storage_of(spec, HALVES), parts, bind)
    out_type = jax.ShapeDtypeStruct(frame.shape_of_values(spec, spec.H), BF16)
    name, given = frame.name_of("document_output"), tuple(arrays.values())
    found: jax.Array = mosaic.launch(name, program, deal, out_type, given)
    return found


def halves(walk: Walk) -> None:
    walk.each(lambda document: walk.either(document, write_pairs, write_document))
    plgpu.wait_smem_to_gmem(0)


def write_document(walk: Walk, document: Document) -> None:
    sums = sum_keys(walk, document)

    def one(turn: Any, _: None) -> None:
        write_chunk(walk, document, sums, turn)

    lax.fori_loop(0, walk.group * document.queries.chunks, one, None)


def write_chunk(walk: Walk, document: Document, sums: Sums, turn: Any) -> None:
    own, queries, half = walk.own, document.queries, mosaic.group()
    step = document.before + walk.steps_of_sums(document) + turn
    slot, parity = own.rows.slot(step), lax.rem(step, 2)
    chunk, member = lax.rem(turn, queries.chunks), lax.div(turn, queries.chunks)
    own_q = own.tiles.at[slot, half]
    own.rows.produced.wait(slot)
    parts = parts_of_features(walk, load(own_q), half)
    if walk.spec.normalize:
        of_half = sum(jnp.sum(part.astype(F32) * in_all_rows(own.z_read.at[half]), axis=1)
                      for part in parts)  # fmt: skip
        own.parts.at[parity, half, 0][...] = of_half
    factors = placed(walk, slot, parity, parts)
    plgpu.commit_smem()
    walk.meet()
    (out,) = multiply(
        (
            mosaic.zeros(C, HALF),
            [
                (part, own.s.at[other, walk.part_of(half)])
                for other, of_half in factors
                for part in of_half
            ],
        )
    )
    if walk.spec.normalize:
        den = sum(
            load(own.parts.at[parity, other, 0], OF_ROWS) for other in walk.halves_of_head(half)
        )
        out = out * mosaic.in_columns(1.0 / jnp.maximum(den, sums.least), HALF)
    plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
    own.rows.consumed.arrive(slot)
    out = mosaic.kept(out, queries.valid - chunk * C)
    target = walk.out, document, queries.of(chunk), queries.size - chunk * C
    leave(walk, own.out.at[parity, half], out, *target, walk.query_head(document, member))


def placed(walk: Walk, slot: Any, parity: Any, parts: list[jax.Array]) -> list[Any]:
    """Pairs of a half of F and the factors of phi(q) there, once `commit_smem` and `meet` are over:
    of all of a head, where both halves are needed, in q's place."""
    own, half = walk.own, mosaic.group()
    if not walk.together:
        return [(half, parts)]
    tiles = [own.tiles.at[slot], *([] if own.low is None else [own.low.at[parity]])]
    for part, tile in zip(parts, tiles, strict=True):
        tile.at[half][...] = part
    return [(other, [tile.at[other] for tile in tiles]) for other in range(2)]


def write_pairs(walk: Walk, document: Document) -> None:
    lax.fori_loop(0, walk.group, lambda member, _: write_head(walk, document, member), None)


def write_head(walk: Walk, document: Document, member: Any) -> None:
    """A chunk of one query head, and of the other one's in a tile, by its pairs."""
    own, half, spec = walk.own, mosaic.group(), walk.spec
    step = document.before + len(walk.of_pairs) * member
    k_slot, v_slot, slot = (own.rows.slot(step + n) for n in range(3))
    parity = lax.rem(step, 2)
    own.rows.produced.wait(k_slot)
    place_keys(walk, k_slot, document.keys.valid)
    own.rows.produced.wait(v_slot)
    mosaic.keep_rows(own.tiles.at[v_slot, half], document.keys.valid)
    own.rows.produced.wait(slot)
    parts = parts_of_features(walk, load(own.tiles.at[slot, half]), half)
    factors = placed(walk, slot, parity, parts)
    plgpu.commit_smem()
    walk.meet()
    (pairs,) = multiply(
        (
            mosaic.zeros(C, C),
            [
                (part, own.tiles.at[k_slot, other].T)
                for other, of_half in factors
                for part in of_half
            ],
        )
    )
    pairs = jnp.where(seen(walk, document), pairs, 0.0)
    if spec.normalize:
        inverse = 1.0 / jnp.maximum(jnp.sum(pairs, axis=1), least_of(spec))
        pairs = pairs * mosaic.in_columns(inverse, C)
    else:
        pairs = pairs * spec.scale
    out_of = mosaic.zeros(C, HALF), [(mosaic.rounded(pairs), own.tiles.at[v_slot, half])]
    (out,) = multiply(out_of)
    plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
    for one in (k_slot, v_slot, slot):
        own.rows.consumed.arrive(one)
    queries = document.queries
    target = walk.out, document, queries.first, queries.size, walk.query_head(document, member)
    leave(walk, own.out.at[parity, half], mosaic.kept(out, queries.valid), *target)


def parts_of_features(walk: Walk, x: jax.Array, half: Any) -> list[jax.Array]:
    """phi(q) rounded, and where features may be negative what that left off."""
    first = walk.first_column(half)
    if walk.spec.feature_map.nonnegative:
        return [walk.phi.queries(x, first)]
    phi = walk.phi.unrounded(x, first)
    rounded = mosaic.rounded(phi)
    return [rounded, mosaic.rounded(phi - rounded.astype(F32))]
