"""The end of a chunk in `query_gradient.py`: dq, inverse and e from D and z_i [64, 64] of half of
F, and with a decay each row's sum for its gradient. VALUES calls `write_rows`."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_ROWS, load
from ato_jax.ops.linear_attention.mosaic_gpu import powers
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient_storage import Chunk, Walk


def features_of_queries(walk: Walk, chunk: Chunk) -> jax.Array:
    x = load(walk.own.q.at[chunk.q_slot, chunk.half])
    first = [] if walk.phi.slope_is_known else [chunk.half * HALF]
    return mosaic.kept(walk.phi.unrounded(x, *first), chunk.count)


def let_queries_go(walk: Walk, chunk: Chunk) -> None:
    plgpu.commit_smem()  # this read finishes before the next load overwrites it
    walk.own.queries.consumed.arrive(chunk.q_slot)


def await_slot(walk: Walk) -> None:
    # Until the stores of two chunks ago have read their slots. Those of the last chunk may still
    # read theirs: one store of dq, and one of each array of rows.
    stores = 1 + walk.heads * walk.leaves_weights + walk.gated + walk.has_units
    plgpu.wait_smem_to_gmem(stores, wait_read_only=True)


def write_rows(walk: Walk, chunk: Chunk, D: jax.Array, z: list[jax.Array], of_state: Any) -> None:
    """`of_state`: of a walk with steep chunks, phi(q) . D and phi(q) . z_i of the state alone."""
    spec, own, tiling, phi = walk.spec, walk.own, walk.tiling, walk.phi
    item, half, parity = chunk.item, chunk.half, chunk.parity
    # `share` is loaded into the slot early, and no registers can hold `largest` until dq is there.
    awaits_first = walk.adds or walk.has_units
    if awaits_first:
        await_slot(walk)
    if walk.adds:
        rows = item.rows(chunk.number)
        source = tiling.part(walk.arrays.share, item, rows, item.head, half)
        target = mosaic.for_copy(own.dq.at[half, pl.ds(parity * C, C)])
        plgpu.copy_gmem_to_smem(source, target, own.share_loaded.at[half])
    if not walk.some_steep:
        own.queries.produced.wait(chunk.q_slot)
    phi_q = features_of_queries(walk, chunk)
    if walk.has_units:
        own.largest.at[half, parity][...] = jnp.max(jnp.abs(phi_q), axis=1)
    D, inverse, e = weigh(walk, chunk, phi_q, D, z)
    scale = inverse * chunk.lasting if walk.gated else inverse
    if walk.gated or spec.normalize:
        scale = mosaic.in_columns(scale, HALF)
    dq = D * scale
    if phi.slope_is_known:
        dq *= phi.slope_of_features(phi_q)
    else:
        # Loaded once more: there are no registers to keep q, or its derivative.
        dq *= phi.slope(load(own.q.at[chunk.q_slot, half]))
        let_queries_go(walk, chunk)
    if not awaits_first:
        await_slot(walk)
    if walk.gated:
        flow = jnp.sum(as_keys_see(walk, phi_q * scale) * D, axis=1)
        if walk.some_steep:
            read = of_state[0] - e * of_state[1] if spec.normalize else of_state[0]
            flow = jnp.where(chunk.gates.steep, read * inverse, flow)
        own.flows.at[half, parity][...] = flow
    dq_slot = own.dq.at[half, pl.ds(parity * C, C)]
    if walk.adds:
        own.share_loaded.wait(half)
        dq += load(dq_slot).astype(F32)
    dq_slot[...] = mosaic.kept(dq, chunk.count).astype(tiling.dtype)
    store_rows(walk, chunk, dq_slot, inverse, e)


def as_keys_see(walk: Walk, weighed: jax.Array) -> jax.Array:
    """phi'_i with the rounding that it has in the walk over keys, in float32. In float16 both round
    it in units that are powers of two, though not the same, so the digits agree."""
    if not walk.has_units:
        return mosaic.rounded(weighed).astype(F32)
    power = powers.power_of(jnp.max(jnp.abs(weighed), axis=1), powers.MOST_OF_WEIGHTS)
    power = mosaic.in_columns(power, HALF)
    return mosaic.rounded(weighed * power, walk.tiling.dtype).astype(F32) / power


def weigh(
    walk: Walk, chunk: Chunk, phi_q: jax.Array, D: jax.Array, z: list[jax.Array]
) -> tuple[jax.Array, Any, Any]:
    """D - e z, inverse and e. Releases the slot of q, unless q is read once more."""
    spec, own, heads = walk.spec, walk.own, walk.heads
    half, parity = chunk.half, chunk.parity
    own_parts: Any = ()
    inverse: Any = spec.scale
    e: Any = None
    if walk.has_units and not spec.normalize:
        inverse = inverse / walk.power(chunk.item, half)
    if walk.given:
        inverse, e = (
            load(walk.tiling.rows_in(rows, chunk.q_slot, half), OF_ROWS)
            for rows in (own.inverse, own.e)
        )
        D -= mosaic.in_columns(e, HALF) * z[0]
    elif spec.normalize:
        own_parts = jnp.sum(phi_q * D, axis=1), jnp.sum(phi_q * z[0], axis=1)
        for number, one in enumerate(own_parts if heads == 1 else ()):
            own.parts.at[parity, half, number][...] = one
    if walk.phi.slope_is_known:
        let_queries_go(walk, chunk)
    else:
        plgpu.commit_smem()
    if walk.leaves_weights:
        total, den = own_parts
        if heads == 1:
            own.exchanged.arrive()
            own.exchanged.wait()
            total, den = (
                one + load(own.parts.at[parity, 1 - half, number], OF_ROWS)
                for number, one in enumerate(own_parts)
            )
        if walk.gated:
            total, den = total * chunk.lasting, den * chunk.lasting
        eps = spec.eps if own.least is None else load(own.least.at[half], OF_ROWS)
        inverse = 1.0 / jnp.maximum(den, eps)
        e = jnp.where(den > eps, total * inverse, 0.0)
        D -= mosaic.in_columns(e, HALF) * z[0]
    return D, inverse, e


def store_rows(walk: Walk, chunk: Chunk, dq_slot: Any, inverse: Any, e: Any) -> None:
    """Writes dq from its slot, inverse and e. With one head in a tile one half writes inverse, and
    the other one e."""
    own, left, tiling, heads = walk.own, walk.left, walk.tiling, walk.heads
    item, half, head, parity = chunk.item, chunk.half, chunk.head, chunk.parity
    if walk.leaves_weights and heads == 1:
        own.rows.at[half, parity][...] = jnp.where(half == 0, inverse, e)
    elif walk.leaves_weights:
        for number, one in enumerate((inverse, e)):
            own.rows.at[2 * half + number, parity][...] = one
    plgpu.commit_smem()
    rows = item.rows(chunk.number)
    target = tiling.part(left.dq, item, rows, item.head, half)
    plgpu.copy_smem_to_gmem(mosaic.for_copy(dq_slot), target)
    if walk.gated:
        of_half = half if heads == 1 else 0
        target = left.flows.at[of_half, item.batch, head, rows]
        plgpu.copy_smem_to_gmem(own.flows.at[half, parity], target)
    if walk.has_units:
        target = left.largest.at[half if heads == 1 else 0, item.batch, head, rows]
        plgpu.copy_smem_to_gmem(own.largest.at[half, parity], target)
    for number, ref in enumerate((left.inverse, left.e) if walk.leaves_weights else ()):
        target = ref.at[item.batch, head, rows]
        if heads == 2:
            plgpu.copy_smem_to_gmem(own.rows.at[2 * half + number, parity], target)
            continue

        @pl.when(half == number)
        def _(target: Any = target) -> None:
            plgpu.copy_smem_to_gmem(own.rows.at[half, parity], target)
