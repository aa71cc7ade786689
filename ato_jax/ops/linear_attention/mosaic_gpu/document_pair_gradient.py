"""dq, dk and dv of an item of up to 64 rows, from the pairs of its rows (`document_pairs.py`).

The role HALVES of `document_gradient.py` calls it for items that hold whole documents:

    da_ij = g_i . v_j,  inverse_i = 1 / max(sum_j a_ij, eps),  w_ij = a_ij inverse_i
    e_i   = sum_j w_ij da_ij,  0 where sum_j a_ij <= eps
    c_ij  = (da_ij - e_i) inverse_i where i and j are of one document, else 0
    dq_i  = sum_j c_ij phi(k_j) phi'(q_i)
    dk_j  = sum_i c_ij phi(q_i) phi'(k_j),  dv_j = sum_i w_ij g_i

or, without a normaliser, w_ij = scale a_ij and c_ij = scale da_ij. c is multiplied in two parts,
rounded and what rounding left off, since the few terms of a document may cancel; w is rounded once.
A product with a transpose reads that from shared memory: the first part of c lies in S's place, the
second in `out[1]`, and w in `rest`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu.document_pairs import (
    Slots,
    let_go,
    map_keys,
    slots_of,
    weigh,
)
from ato_jax.ops.linear_attention.mosaic_gpu.document_table import Item
from ato_jax.ops.linear_attention.mosaic_gpu.document_walk import Walk, leave
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C


def write_pairs(walk: Walk, item: Item) -> None:
    own, half, keys = walk.own, mosaic.group(), item.keys

    def of_head(member: Any, sums: Any) -> Any:
        return write_head(walk, item, member, *sums)

    start = mosaic.zeros(C, HALF), mosaic.zeros(C, HALF)
    found = of_head(0, start) if walk.group == 1 else lax.fori_loop(0, walk.group, of_head, start)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for number, (x, ref) in enumerate(zip(found, (walk.dk, walk.dv), strict=True)):
        target = ref, item, keys.first, keys.size, item.head
        leave(walk, own.out.at[number, half], mosaic.kept(x, keys.valid), *target)


def write_head(
    walk: Walk, item: Item, member: Any, dk: jax.Array, dv: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Half of dq of a query head; adds what it has of dk and dv."""
    own, half, maps, queries = walk.own, mosaic.group(), walk.phi, item.queries
    slots = slots_of(walk, item, member)
    k, q, g = (own.tiles.at[slot, half] for slot in (slots.k, slots.q, slots.g))
    x_k, x_q = map_rows(walk, item, slots)
    c, w = factors(walk, item, slots)
    places = own.s.at[half, 0], own.out.at[1, half], own.rest.at[half, 0]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last item's, or query head's
    for place_of, part in zip(places, (*mosaic.in_two_parts(c), w), strict=True):
        place_of[...] = part
    plgpu.commit_smem()
    *of_c, of_w = places
    (dq,) = multiply((mosaic.zeros(C, HALF), [(part, k) for part in of_c]))
    dq = mosaic.kept(dq * maps.slope_of(x_q, load(q)).astype(F32), queries.valid)
    target = walk.dq, item, queries.first, queries.size, walk.query_head(item, member)
    leave(walk, own.out.at[0, half], dq, *target)
    of_keys, dv = multiply(
        (mosaic.zeros(C, HALF), [(part.T, q) for part in of_c]), (dv, [(of_w.T, g)])
    )
    dk = dk + of_keys * maps.slope_of(x_k, load(k)).astype(F32)
    let_go(walk, slots)
    return dk, dv


def map_rows(walk: Walk, item: Item, slots: Slots) -> tuple[jax.Array, jax.Array]:
    """Replaces k and q by phi(k) and phi(q), 0 in all rows that do not count, as are those of v and
    g; returns k and q as they were loaded. Once both warpgroups are here, the other one has also
    read the R of the last item, so S's place may be written."""
    own, half, count = walk.own, mosaic.group(), item.queries.valid
    x_k = map_keys(walk, item, slots)
    own.rows.produced.wait(slots.q)
    own_q = own.tiles.at[slots.q, half]
    x_q = load(own_q)
    own_q[...] = mosaic.kept(walk.phi.queries(x_q, walk.first_column(half)), count)
    own.rows.produced.wait(slots.g)
    mosaic.keep_rows(own.tiles.at[slots.g, half], count)
    plgpu.commit_smem()
    walk.meet()
    return x_k, x_q


def factors(walk: Walk, item: Item, slots: Slots) -> tuple[jax.Array, jax.Array]:
    """c in float32, and w rounded."""
    k, v, q, g = (
        [walk.own.tiles.at[slot, other] for other in walk.halves_of_head(mosaic.group())]
        for slot in slots
    )
    a, da = multiply(
        *(
            (mosaic.zeros(C, C), [(x, y.T) for x, y in zip(rows, columns, strict=True)])
            for rows, columns in ((q, k), (g, v))
        )
    )
    found = weigh(walk, item, a)
    if walk.spec.normalize:
        e = jnp.where(found.counts, jnp.sum(found.w * da, axis=1), 0.0)
        c = (da - mosaic.in_columns(e, C)) * found.inverse
    else:
        c = da * walk.spec.scale
    return jnp.where(found.visible, c, 0.0), mosaic.rounded(found.w)
