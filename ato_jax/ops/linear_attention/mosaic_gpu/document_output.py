"""out [B, T, H, V] where each query sees the keys of its own document, without a decay.

`documents.py` launches it. S and z are the sums over the document's keys (`document_walk.py`):

    out_i = phi(q_i) S / max(phi(q_i) . z, eps)        or scale * phi(q_i) S

    MEMORY (2)       loads k and v of a document, then q
      |  rows: a tile is loaded
      v
    HALVES (0, 1)    S and z by `sum_keys`; then of each chunk of q half of the features, stored
                     in q's place, and of all of them half of out

Items that are computed from pairs are in `document_pair_output.py`. Where features may be negative,
phi(q) is multiplied in two parts, as in `whole_output.py`.
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
from ato_jax.ops.linear_attention.mosaic_gpu.document_pair_output import write_pairs
from ato_jax.ops.linear_attention.mosaic_gpu.document_table import Deal, Item, Table
from ato_jax.ops.linear_attention.mosaic_gpu.document_walk import (
    Storage,
    Sums,
    Walk,
    in_all_rows,
    leave,
    memory,
    parts_of_features,
    share_features,
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
    walk.each(lambda item: walk.either(item, write_pairs, write_document))
    plgpu.wait_smem_to_gmem(0)


def write_document(walk: Walk, item: Item) -> None:
    sums = sum_keys(walk, item)

    def one(turn: Any, _: None) -> None:
        write_chunk(walk, item, sums, turn)

    lax.fori_loop(0, walk.group * item.queries.chunks, one, None)


def write_chunk(walk: Walk, item: Item, sums: Sums, turn: Any) -> None:
    own, queries, half = walk.own, item.queries, mosaic.group()
    step = item.before + walk.steps_of_sums(item) + turn
    slot, parity = own.rows.slot(step), lax.rem(step, 2)
    chunk, member = lax.rem(turn, queries.chunks), lax.div(turn, queries.chunks)
    own_q = own.tiles.at[slot, half]
    own.rows.produced.wait(slot)
    parts = parts_of_features(walk, load(own_q), half)
    if walk.spec.normalize:
        of_half = sum(jnp.sum(part.astype(F32) * in_all_rows(own.z_read.at[half]), axis=1)
                      for part in parts)  # fmt: skip
        own.parts.at[parity, half, 0][...] = of_half
    factors = share_features(walk, slot, parity, parts)
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
    plgpu.commit_smem()  # reads finish before the next load overwrites them
    own.rows.consumed.arrive(slot)
    out = mosaic.kept(out, queries.valid - chunk * C)
    target = walk.out, item, queries.of(chunk), queries.size - chunk * C
    leave(walk, own.out.at[parity, half], out, *target, walk.query_head(item, member))
