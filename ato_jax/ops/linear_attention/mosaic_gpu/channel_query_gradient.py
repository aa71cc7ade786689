"""dq and the flow [B, T, H, D] of queries, for causal calls with a decay per step and channel.

`channel_backward.py` launches it, with q^ and k~ of the forward pass. Read `channel.py` first for
q^, k~ and the middle row, and `query_gradient.py` for the pass without a decay. With g the
cotangent of out, S [V, F] and z [F] the state ahead of a chunk, scaled to its middle row, and
z_i = z + sum_{j<=i} k~_j:

    w[i, j] = g_i . v_j for j <= i of the same chunk, else 0
    D_i     = g_i S + sum_j w[i, j] k~_j
    den_i   = q^_i . z_i,  inverse_i = 1 / max(den_i, eps)
    e_i     = q^_i . D_i / den_i = g_i . out_i,  0 where den_i <= eps
    q'_i    = q^_i inverse_i
    flow_i  = q'_i (D_i - e_i z_i),  dq_i = q^_i (D_i - e_i z_i) inverse_i phi'(q_i) / phi(q_i)

The gradient of the gates is, for each pair, a difference between the results of this walk and of
`channel_key_gradient.py`. So w is multiplied in two parts (rounded, and what rounding left off),
and q' is rounded as it is there. The kernel writes the flow, inverse and e in float32, and S and z
ahead of each run with the rounding that the products have. Without a normaliser e is 0, inverse is
the power of two in the scale, and D_i is multiplied by the rest (`channel.parts_of_scale`).

Where segments begin in a chunk (`chunk_borders.py`), masks apply to w and to what is read of S and
z, and then to the features that are added to S and z: products that run one after the other.

    memory    loads S and z of a piece, and its chunks
    values    two warpgroups with half of F each: S_half^T [64, V] in registers, w, and the same
              half of D and z_i

Where a tile holds two heads of 64 columns, each half is a head with its own g, v and w. The two
warpgroups then exchange nothing, and each writes inverse and e.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import (
    ALIKE,
    BF16,
    F32,
    HALF,
    OF_COLUMNS,
    OF_ROWS,
    Item,
    load,
    multiply,
    slot_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu import (
    channel,
    channel_blocks,
    chunk_borders,
    chunk_decay,
    feature_maps,
    frame,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import MEMORY, C, F
from ato_jax.ops.linear_attention.scans.borders import NO_BORDERS, OfSequence
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of g and v, of q, and of k.
STAGES, Q_STAGES, K_STAGES = 2, 2, 2
WARPGROUPS = 3
VALUES_REGISTERS, MEMORY_REGISTERS = 232, 40


class Factors(NamedTuple):
    """The operands of a chunk's products, tiles in shared memory or in registers."""

    g: Any
    state: Any  # S^T, rounded
    features: Any  # k~, half of its columns
    v: Any
    of_pairs: Any  # the products of both parts of w with the features
    ones: Any  # as many columns as a product needs, to sum features over rows
    sees: Callable[[], jax.Array]  # [64, 64], a mask of pairs
    z: Any = None  # ahead of the chunk; None without a normaliser

    def z_before(self) -> jax.Array:
        return mosaic.in_rows(load(self.z, OF_COLUMNS), C)


def ones_where(seen: jax.Array) -> jax.Array:
    return jnp.where(seen, 1.0, 0.0).astype(BF16)


def read_at_once(factors: Factors, S: jax.Array, totals: jax.Array) -> Any:
    """D, and S behind the chunk; with a normaliser also z_i, and z behind the chunk."""
    features = factors.features
    sums = [
        (mosaic.zeros(C, HALF), ((factors.g, factors.state), *factors.of_pairs)),
        (S, [(features.T, factors.v)]),
    ]
    if factors.z is not None:
        z_before = factors.z_before()
        sums += [
            (z_before, [(ones_where(factors.sees()), features)]),
            (totals, [(features.T, factors.ones)]),
        ]
    return multiply(*sums)


def read_at_border(borders: Any, factors: Factors, S: jax.Array, totals: jax.Array) -> Any:
    """The results of `read_at_once` where segments begin in the chunk. Products follow one another,
    since registers have no room for all operands. Features that are not added to the state are set
    to 0 in the end."""
    features = factors.features
    (D,) = multiply((mosaic.zeros(C, HALF), [(factors.g, factors.state)]))
    (D,) = multiply((mosaic.rows_within(D, None, borders.reads), factors.of_pairs))
    z: Any = ()
    if factors.z is not None:
        before = mosaic.rows_within(factors.z_before(), None, borders.reads)
        seen = borders.pairs_from() & factors.sees()
        z = multiply((before, [(ones_where(seen), features)]))
    plgpu.commit_smem()  # all warps have multiplied by the features
    mosaic.keep_rows_between(features, borders.adds, C)
    plgpu.commit_smem()
    behind = [(mosaic.zeros(*S.shape), [(features.T, factors.v)])]
    if factors.z is not None:
        behind.append((mosaic.zeros(*totals.shape), [(features.T, factors.ones)]))
    S_behind, *totals_behind = multiply(*behind)
    return D, S_behind, *z, *totals_behind


def channel_query_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    x: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
    onto: jax.Array,
    weights: tuple[jax.Array, jax.Array] | None = None,
    borders: OfSequence = NO_BORDERS,
) -> tuple[jax.Array, ...]:
    """Launches the kernel. It returns dq; the flow; inverse and e, [B, H, T up to a whole chunk];
    and ahead of each run S^T [B, H, runs, D, V] in bfloat16 and, with a normaliser, z [B, H, runs,
    D].

    Args:
      x: the queries.
      q, k: q^ and k~.
      s, z: S^T and z ahead of each piece.
      onto: `Factors.of_keys` of `channel_backward.py`, [B, H, chunks * D].
      weights: inverse and e, if heads are cut and the kernel cannot compute them
        (`channel_blocks.py`).
    """
    tiling = frame.tiling(spec)
    heads = frame.heads_of_tile(spec)
    is_given, has_borders = weights is not None, borders.chunks is not None
    power, scale_rest = channel.parts_of_scale(spec)
    deal = dataclasses.replace(deal, most_blocks=deal.items)
    scratch = dict(
        g_s=tiling.tiles(STAGES),
        v_s=tiling.tiles(STAGES),
        q_s=tiling.shared(Q_STAGES, 2, C, HALF),  # q^, in whose place dq is stored
        x_s=tiling.shared(2, C, HALF),
        k_s=tiling.shared(K_STAGES, 2, C, HALF),
        s_s=tiling.shared(2, HALF, spec.V),
        flow_s=tiling.of_rows_in_float32(2, C, HALF),
        ones_s=tiling.shared(ALIKE, C),
        z_s=plgpu.SMEM((2, HALF), F32),
        onto_s=plgpu.SMEM((K_STAGES, F), F32),
        parts_s=plgpu.SMEM((2, 2, 2, C), F32),
        rows_s=plgpu.SMEM((2 * heads, C), F32),
        loaded=plgpu.Barrier(num_arrivals=2 * heads + 2 * is_given, num_barriers=STAGES),
        q_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=Q_STAGES),
        k_loaded=plgpu.Barrier(num_arrivals=2 + heads, num_barriers=K_STAGES),
        x_loaded=plgpu.Barrier(num_arrivals=2),
        free=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        q_free=plgpu.Barrier(num_arrivals=2, num_barriers=Q_STAGES),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=K_STAGES),
        x_free=plgpu.Barrier(num_arrivals=2, num_barriers=1),
        start_loaded=plgpu.Barrier(num_arrivals=5),
        exchanged=plgpu.Barrier(num_arrivals=2),
    )
    if heads == 2 or is_given:  # which exchange nothing
        del scratch["parts_s"], scratch["exchanged"]
    if is_given:
        scratch["weights_s"] = plgpu.SMEM((2, STAGES, C), F32)

    def body(
        x_ref: Any,
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        g_ref: Any,
        s_ref: Any,
        z_ref: Any,
        onto_ref: Any,
        ones_ref: Any,
        *refs: Any,
        g_s: Any,
        v_s: Any,
        q_s: Any,
        x_s: Any,
        k_s: Any,
        s_s: Any,
        flow_s: Any,
        ones_s: Any,
        z_s: Any,
        onto_s: Any,
        parts_s: Any = None,
        rows_s: Any,
        loaded: Any,
        q_loaded: Any,
        k_loaded: Any,
        x_loaded: Any,
        free: Any,
        q_free: Any,
        k_free: Any,
        x_free: Any,
        start_loaded: Any,
        exchanged: Any = None,
        weights_s: Any = None,
    ) -> None:
        begins_ref, chunks_ref = refs[:2] if has_borders else (None, None)
        refs = refs[2 * has_borders :]
        weight_refs, (dq_ref, flow_ref, kv_ref, *kept_refs) = (
            refs[: 2 * is_given],
            refs[2 * is_given :],
        )
        row_refs = () if is_given else kept_refs[:2]
        z_out = kept_refs[-1] if spec.normalize else None

        def load_piece(item: Item) -> None:
            plgpu.copy_gmem_to_smem(ones_ref, ones_s, start_loaded)
            for half in range(2):
                head, own = tiling.head_of(item.head, half), tiling.columns_of(half)
                for ref, start in ((z_ref, z_s), (s_ref, s_s)):
                    source = ref.at[item.batch, head, item.piece, own]
                    plgpu.copy_gmem_to_smem(source, start.at[half], start_loaded)

            def load_chunk(chunk: Any, _: None) -> None:
                rows = item.rows(chunk)
                number = lax.div(item.first_row, C) + chunk
                slot, q_slot = slot_of(chunk, STAGES), slot_of(chunk, Q_STAGES)
                k_slot = slot_of(chunk, K_STAGES)
                mosaic.wait_until_free(free, chunk, STAGES)
                for ref, own in ((g_ref, g_s), (v_ref, v_s)):
                    head = channel_blocks.head_of_values(spec, ref, item.head)
                    tiling.copy_tile(ref, item, rows, head, own, slot, loaded)
                for n, ref in enumerate(weight_refs):
                    tiling.copy_vector(ref, item, rows, weights_s.at[n], slot, loaded)
                mosaic.wait_until_free(k_free, chunk, K_STAGES)
                own_columns = pl.ds(number * spec.D, spec.D)
                tiling.copy_vector(onto_ref, item, own_columns, onto_s, k_slot, k_loaded)
                head = channel_blocks.head_of_features(spec, k_ref, item.head)
                for half in range(2):
                    source = tiling.part(k_ref, item, rows, head, half)
                    plgpu.copy_gmem_to_smem(source, k_s.at[k_slot, half], k_loaded.at[k_slot])
                mosaic.wait_until_free(q_free, chunk, Q_STAGES)
                for half in range(2):
                    source = tiling.part(q_ref, item, rows, head, half)
                    plgpu.copy_gmem_to_smem(source, q_s.at[q_slot, half], q_loaded.at[q_slot])
                mosaic.wait_until_free(x_free, chunk, 1)
                for half in range(2):
                    source = tiling.part(x_ref, item, rows, head, half)
                    plgpu.copy_gmem_to_smem(source, x_s.at[half], x_loaded)

            lax.fori_loop(0, item.chunks, load_chunk, None)
            mosaic.await_the_last(free, item.chunks, STAGES)
            mosaic.await_the_last(k_free, item.chunks, K_STAGES)
            mosaic.await_the_last(q_free, item.chunks, Q_STAGES)
            mosaic.await_the_last(x_free, item.chunks, 1)

        def multiply_piece(item: Item) -> None:
            half = mosaic.group()
            head = tiling.head_of(item.head, half)
            columns = pl.ds(half * HALF, HALF)
            sees = functools.partial(channel_blocks.sees, spec, item)

            def give_back(chunk: Any) -> None:
                """Releases the slot from which dq was stored."""
                plgpu.barrier_arrive(q_free.at[slot_of(chunk, Q_STAGES)])

            def keep_state(chunk: Any) -> None:
                """Writes S and z ahead of the chunk, if it is the first chunk of its run."""

                @pl.when(lax.rem(chunk, channel.CHUNKS) == 0)
                def _() -> None:
                    run = channel.run_of(item, chunk)
                    at = item.batch, head, run, tiling.columns_of(half)
                    plgpu.copy_smem_to_gmem(s_s.at[half], kv_ref.at[at])
                    if z_out is not None:
                        plgpu.copy_smem_to_gmem(z_s.at[half], z_out.at[at])

            def multiply_chunk(chunk: Any, carried: Any) -> Any:
                S, totals = carried
                borders = chunk_borders.of_chunk(begins_ref, chunks_ref, item, chunk)
                slot, q_slot = slot_of(chunk, STAGES), slot_of(chunk, Q_STAGES)
                k_slot, parity = slot_of(chunk, K_STAGES), slot_of(chunk, 2)
                features = k_s.at[k_slot, half]
                plgpu.barrier_wait(k_loaded.at[k_slot])
                onto = load(onto_s.at[k_slot, columns], OF_ROWS)
                S = chunk_decay.times_squares(S, onto)

                def publish() -> None:
                    s_s.at[half][...] = S.astype(BF16)
                    if spec.normalize:
                        z_s.at[half][...] = jnp.max(totals, axis=1)  # all columns are equal
                    plgpu.commit_smem()
                    keep_state(chunk)

                if spec.normalize:
                    totals = chunk_decay.times_squares(totals, onto)
                plgpu.barrier_wait(loaded.at[slot])
                g, v = (tiling.head_in(tiles, slot, half) for tiles in (g_s, v_s))
                (w,) = multiply((mosaic.zeros(C, C), [(g, v.T)]), meanwhile=publish)
                # Without the barrier the selected numbers would be rounded singly, not in pairs.
                w = borders.either(lambda: jnp.where(borders.pairs_from(), w, 0.0), lambda: w)
                w = lax.optimization_barrier(jnp.where(sees(), w, 0.0))
                rounded = mosaic.rounded(w)
                rest = mosaic.rounded(w - rounded.astype(F32))
                of_pairs = (rounded, features), (rest, features)

                factors = Factors(g, s_s.at[half].T, features, v, of_pairs, ones_s.T, sees)
                if spec.normalize:
                    factors = factors._replace(z=z_s.at[half])
                D, S, *of_keys = borders.either(
                    lambda: read_at_border(borders, factors, S, totals),
                    lambda: read_at_once(factors, S, totals),
                )
                given = [load(weights_s.at[n, slot], OF_ROWS) for n in range(len(weight_refs))]
                if is_given:
                    plgpu.commit_smem()  # reads finish before the next load overwrites them
                plgpu.barrier_arrive(free.at[slot])
                plgpu.barrier_arrive(k_free.at[k_slot])
                plgpu.barrier_wait(q_loaded.at[q_slot])
                read = load(q_s.at[q_slot, half]).astype(F32)
                inverse: Any = power
                of_row: Any = None
                e: Any = None
                own_parts: Any = ()
                z: Any = None
                if spec.normalize:
                    z, totals = of_keys
                if spec.normalize and not is_given:
                    own_parts = jnp.sum(read * D, axis=1), jnp.sum(read * z, axis=1)
                    for number, own in enumerate(own_parts if heads == 1 else ()):
                        parts_s.at[parity, half, number][...] = own
                plgpu.commit_smem()
                if is_given:
                    of_row, e = given
                elif spec.normalize:
                    total, den = own_parts
                    if heads == 1:
                        plgpu.barrier_arrive(exchanged)
                        plgpu.barrier_wait(exchanged)
                        total, den = (
                            own + load(parts_s.at[parity, 1 - half, number], OF_ROWS)
                            for number, own in enumerate(own_parts)
                        )
                    of_row = 1.0 / jnp.maximum(den, spec.eps)
                    e = jnp.where(den > spec.eps, total * of_row, 0.0)
                if spec.normalize:
                    D = D - mosaic.in_columns(e, HALF) * z
                    inverse = mosaic.in_columns(of_row, HALF)
                else:
                    D = channel.times_rest(D, scale_rest)
                read = read * inverse
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(chunk > 0)(lambda: give_back(chunk - 1))
                flow_s.at[half][...] = mosaic.rounded(read).astype(F32) * D
                plgpu.barrier_wait(x_loaded)
                of_flow = feature_maps.features(spec).slope_by_feature(load(x_s.at[half]))
                dq_s = q_s.at[q_slot, half]
                dq_s[...] = mosaic.rounded(of_flow(read * D))
                if row_refs and spec.normalize and heads == 1:
                    rows_s.at[half][...] = jnp.where(half == 0, of_row, e)
                elif row_refs and spec.normalize:
                    for number, own in enumerate((of_row, e)):
                        rows_s.at[2 * half + number][...] = own
                plgpu.commit_smem()
                plgpu.barrier_arrive(x_free)
                rows = item.rows(chunk)
                for tile, ref in ((flow_s.at[half], flow_ref), (dq_s, dq_ref)):
                    plgpu.copy_smem_to_gmem(tile, tiling.part(ref, item, rows, item.head, half))
                for number, ref in enumerate(row_refs if spec.normalize else ()):
                    target = ref.at[item.batch, head, rows]
                    if heads == 2:
                        plgpu.copy_smem_to_gmem(rows_s.at[2 * half + number], target)
                        continue

                    @pl.when(half == number)
                    def _(target: Any = target) -> None:
                        plgpu.copy_smem_to_gmem(rows_s.at[half], target)

                return S, totals

            plgpu.barrier_wait(start_loaded)
            S = load(s_s.at[half]).astype(F32)
            totals = mosaic.in_columns(load(z_s.at[half], OF_ROWS), ALIKE)
            plgpu.commit_smem()  # reads finish before the first chunk's stores
            lax.fori_loop(0, item.chunks, multiply_chunk, (S, totals))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            give_back(item.chunks - 1)

        @pl.when(mosaic.group() == MEMORY)
        def _memory() -> None:
            mosaic.set_registers(MEMORY_REGISTERS, WARPGROUPS)
            deal.each(load_piece)

        @pl.when(mosaic.group() < MEMORY)
        def _values() -> None:
            mosaic.set_registers(VALUES_REGISTERS, WARPGROUPS)
            deal.each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    rows = jax.ShapeDtypeStruct((spec.B, spec.H, mosaic.whole_chunks(spec.T)), F32)
    of_runs = spec.B, spec.H, pl.cdiv(spec.T, channel.RUN)
    of_features = channel_blocks.shape_of_heads(spec, q)
    out_type: Any = (
        jax.ShapeDtypeStruct(of_features, BF16),
        jax.ShapeDtypeStruct(of_features, F32),
        jax.ShapeDtypeStruct((*of_runs, spec.D, spec.V), BF16),
    )
    if spec.normalize:
        k_sums = jax.ShapeDtypeStruct((*of_runs, spec.D), F32)
        out_type = *out_type, *[rows, rows][2 * is_given :], k_sums
    arrays = x, q, k, v, g, s, z, onto, np.ones((ALIKE, C), BF16)
    found = frame.launch(
        body,
        "channel_query_gradient",
        deal,
        out_type,
        scratch,
        (*arrays, *borders.arrays("begins", "chunks"), *(weights or ())),
        warpgroups=WARPGROUPS,
        own_barriers=True,
    )
    dq, flow, kv, *of_rows = found
    if weights is not None:
        of_rows = *weights, *of_rows
    elif not spec.normalize:
        of_rows = jnp.full(rows.shape, power, F32), jnp.zeros(rows.shape, F32), None
    inverse, e, k_sum = of_rows
    return dq, flow, inverse, e, kv, k_sum
