"""dq, dk and dv where each query sees the keys of its own document, a document at a time.

`documents.py` launches it. With S and z the sums over the document's keys, and S, z and eps in
units of 1 / sum |z| (`document_walk.py`):

    G_i   = g_i S^T,  den_i = phi(q_i) . z,  inverse_i = 1 / max(den_i, eps)
    e_i   = phi(q_i) . G_i inverse_i,  0 where den_i <= eps
    dq_i  = (G_i - e_i z) inverse_i phi'(q_i)
    R = sum_i phi(q_i) inverse_i g_i^T [F, V],  u = -sum_i e_i phi(q_i) inverse_i [F]
    dv_j  = R^T phi(k_j),  dk_j = (R v_j + u) phi'(k_j)

    MEMORY (2)       loads k and v of a document, q and g of it, and k and v once more
      |  rows: a tile is loaded
      v
    HALVES (0, 1)    S and z; then of each chunk half of F: dq, and phi(q) inverse in q's place;
      |   ^          at last of each chunk half of dk, and half of V of dv
      |   |  r_known: R lies in S's place
      |  mapped: phi(q) inverse lies in the slot; s_known: the unit does
      v   |
    SUMS (3)         R in registers

k and v are read twice, since no state leaves the chip. For an item that is computed from pairs SUMS
only releases the slots, and HALVES compute all gradients (`document_pair_gradient.py`).

For dq and dk S and R are multiplied in two parts, rounded and what rounding left off. Rows whose
products are small compared with S and R, as in documents of one or two rows, would otherwise lose
too much: dk of a tile of 64 rows had an error of 4.2e-3, and one row of dk of 2.7e-2, both above
the budget. For dv R is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, BF16, F32, HALF, OF_ROWS, Role, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.document_pair_gradient import write_pairs
from ato_jax.ops.linear_attention.mosaic_gpu.document_table import Deal, Item, Table
from ato_jax.ops.linear_attention.mosaic_gpu.document_walk import (
    Storage,
    Sums,
    Walk,
    in_all_rows,
    keep_rows,
    leave,
    memory,
    parts_of_sums,
    storage_of,
    store_sum,
    sum_keys,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

HALVES = Role("halves", registers=160, warpgroups=2)
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
SUMS = Role("sums", registers=168)
ROLES = mosaic.Roles((HALVES, MEMORY, SUMS))


def document_gradient(
    spec: LinearAttentionSpec,
    deal: Deal,
    table: Table,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv."""
    arrays = {**table.arrays(), "q": q, "k": k, "v": v, "g": g}
    names = *arrays, "dq", "dk", "dv"

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        return Walk(spec, deal, own, **dict(zip(names, refs, strict=True)))

    parts = (MEMORY, memory), (SUMS, sums), (HALVES, halves)
    program = mosaic.Program(ROLES, storage_of(spec, HALVES, SUMS), parts, bind)
    out_type = tuple(jax.ShapeDtypeStruct(x.shape, BF16) for x in (q, k, v))
    name, given = frame.name_of("document_gradient"), tuple(arrays.values())
    dq, dk, dv = mosaic.launch(name, program, deal, out_type, given)
    return dq, dk, dv


def sums(walk: Walk) -> None:
    own = walk.own
    mosaic.store_transposed(own.ones, mosaic.ones(C, ALIKE))
    plgpu.commit_smem()
    own.ones_known.arrive()
    walk.each(lambda item: walk.either(item, let_pairs_pass, sum_queries))


def let_pairs_pass(walk: Walk, item: Item) -> None:
    let_pass(walk, item.before, walk.steps_of(item))


def let_pass(walk: Walk, first: Any, steps: Any) -> None:
    """Steps of which this role reads nothing."""

    def one(step: Any, _: None) -> None:
        slot = walk.own.rows.slot(step)
        walk.own.rows.produced.wait(slot)
        walk.own.rows.consumed.arrive(slot)

    lax.fori_loop(first, first + steps, one, None)


def sum_queries(walk: Walk, item: Item) -> None:
    """R, in half of F each."""
    own = walk.own
    let_pass(walk, item.before, walk.steps_of_sums(item))
    before = item.before + walk.steps_of_sums(item)
    turns = walk.group * item.queries.chunks
    blocks = [(half, other) for half in range(2) for other in walk.halves_of_head(half)]

    def one(turn: Any, total: Any) -> Any:
        step = before + 2 * turn
        slot, g_slot = own.rows.slot(step), own.rows.slot(step + 1)
        own.rows.produced.wait(slot)
        own.rows.produced.wait(g_slot)
        own.mapped.wait(slot)
        total = multiply(
            *(
                (of_block, [(own.tiles.at[slot, half].T, own.tiles.at[g_slot, other])])
                for of_block, (half, other) in zip(total, blocks, strict=True)
            )
        )
        own.rows.consumed.arrive(slot)
        own.rows.consumed.arrive(g_slot)
        return list(total)

    total = lax.fori_loop(0, turns, one, [mosaic.zeros(HALF, HALF) for _ in blocks])
    own.s_known.wait()
    for of_block, (half, other) in zip(total, blocks, strict=True):
        unit = mosaic.in_columns(load(own.unit.at[half], OF_ROWS), HALF)
        store_sum(own, (half, walk.part_of(other)), of_block * unit)
    plgpu.commit_smem()
    own.r_known.arrive()
    let_pass(walk, before + 2 * turns, 2 * item.keys.chunks)


def halves(walk: Walk) -> None:
    walk.own.ones_known.wait()
    walk.each(lambda item: walk.either(item, write_pairs, write_document))
    plgpu.wait_smem_to_gmem(0)


def write_document(walk: Walk, item: Item) -> None:
    of_keys = sum_keys(walk, item)
    walk.own.s_known.arrive()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last document's

    def one(turn: Any, total: jax.Array) -> jax.Array:
        return write_dq(walk, item, of_keys, turn, total)

    turns = walk.group * item.queries.chunks
    total = lax.fori_loop(0, turns, one, mosaic.zeros(C, HALF))
    if walk.spec.normalize:
        sum_rows(walk, of_keys, total)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    walk.own.r_known.wait()

    def each(chunk: Any, _: None) -> None:
        write_dk_dv(walk, item, chunk)

    lax.fori_loop(0, item.keys.chunks, each, None)


def write_dq(
    walk: Walk, item: Item, of_keys: Sums, turn: Any, total: jax.Array
) -> jax.Array:
    """Half of a chunk's dq; adds -e phi(q) inverse to `total` [C, F / 2]."""
    own, queries, half = walk.own, item.queries, mosaic.group()
    step = item.before + walk.steps_of_sums(item) + 2 * turn
    slot, g_slot = own.rows.slot(step), own.rows.slot(step + 1)
    parity = lax.rem(turn, 2)
    chunk, member = lax.rem(turn, queries.chunks), lax.div(turn, queries.chunks)
    count = queries.valid - chunk * C
    own_q, maps = own.tiles.at[slot, half], walk.phi
    others = walk.halves_of_head(half)

    def z() -> jax.Array:
        """Read where it is needed: there are no registers to keep it in."""
        return in_all_rows(own.z_read.at[half])

    def features() -> jax.Array:
        return mosaic.kept(maps.unrounded(load(own_q), walk.first_column(half)), count)

    own.rows.produced.wait(slot)
    own.rows.produced.wait(g_slot)
    keep_rows(walk, g_slot, half, count)
    products = [
        (own.tiles.at[g_slot, other], part.at[half, walk.part_of(other)].T)
        for part in parts_of_sums(own)
        for other in others
    ]
    G, phi_q = mosaic.multiply_while(products, (C, HALF), features)
    mapped_q = phi_q
    if walk.spec.normalize:
        for number, of_half in enumerate((phi_q * z(), phi_q * G)):
            own.parts.at[parity, half, number][...] = jnp.sum(of_half, axis=1)
        plgpu.commit_smem()
        walk.meet()
        den, of_e = (
            sum(load(own.parts.at[parity, other, number], OF_ROWS) for other in others)
            for number in range(2)
        )
        inverse = 1.0 / jnp.maximum(den, of_keys.least)
        e = mosaic.in_columns(jnp.where(den > of_keys.least, of_e * inverse, 0.0), HALF)
        inverse = mosaic.in_columns(inverse, HALF)
        mapped_q = phi_q * inverse
        total -= e * mapped_q
        G = (G - e * z()) * inverse
    if not maps.slope_is_known:  # of x, which phi(q) inverse replaces
        G = G * maps.slope(load(own_q))
    else:
        G = G * maps.slope_of_features(phi_q)
    own_q[...] = mapped_q.astype(BF16)
    plgpu.commit_smem()
    own.mapped.arrive(slot)
    own.rows.consumed.arrive(slot)
    own.rows.consumed.arrive(g_slot)
    target = walk.dq, item, queries.of(chunk), queries.size - chunk * C
    head = walk.query_head(item, member)
    leave(walk, own.out.at[parity, half], mosaic.kept(G, count), *target, head)
    return total


def sum_rows(walk: Walk, of_keys: Sums, total: jax.Array) -> None:
    """u, the sum over rows, by a product of the rows in two parts with ones."""
    own, half = walk.own, mosaic.group()
    rounded = mosaic.rounded(total)
    found = mosaic.zeros(HALF, ALIKE)
    for one in (rounded, (total - rounded.astype(F32)).astype(BF16)):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own.out.at[0, half][...] = one
        plgpu.commit_smem()
        (found,) = multiply((found, [(own.out.at[0, half].T, own.ones.T)]))
    # All columns of `found` are equal, so the maximum over them is any one of them.
    own.u.at[half][...] = jnp.max(found, axis=1) * of_keys.unit
    plgpu.commit_smem()


def write_dk_dv(walk: Walk, item: Item, chunk: Any) -> None:
    own, keys, half = walk.own, item.keys, mosaic.group()
    turns = walk.group * item.queries.chunks
    step = item.before + walk.steps_of_sums(item) + 2 * (turns + chunk)
    k_slot, v_slot = own.rows.slot(step), own.rows.slot(step + 1)
    count, first = keys.valid - chunk * C, walk.first_column(half)
    own_k, maps, others = own.tiles.at[k_slot, half], walk.phi, walk.halves_of_head(half)
    own.rows.produced.wait(k_slot)
    own.rows.produced.wait(v_slot)
    x = load(own_k)
    phi_k = mosaic.kept(maps.keys(maps.present(x, first), first=first), count)
    of_features: list[tuple[Any, Any]] = [(half, phi_k)]
    if walk.together:
        own_k[...] = phi_k
        of_features = [(other, own.tiles.at[k_slot, other]) for other in others]
    plgpu.commit_smem()
    walk.meet()
    start = in_all_rows(own.u.at[half]) if walk.spec.normalize else mosaic.zeros(C, HALF)
    dk, dv = multiply(
        (
            start,
            [
                (own.tiles.at[v_slot, v], part.at[half, walk.part_of(v)].T)
                for part in parts_of_sums(own)
                for v in others
            ],
        ),
        (
            mosaic.zeros(C, HALF),
            [(phi, own.s.at[f, walk.part_of(half)]) for f, phi in of_features],
        ),
    )
    plgpu.commit_smem()  # reads finish before the next load overwrites them
    own.rows.consumed.arrive(k_slot)
    own.rows.consumed.arrive(v_slot)
    dk = mosaic.kept(dk * maps.slope_of(x, phi_k).astype(F32), count)
    for number, found, ref in ((0, dk, walk.dk), (1, dv, walk.dv)):
        target = ref, item, keys.of(chunk), keys.size - chunk * C
        leave(walk, own.out.at[number, half], found, *target, item.head)
