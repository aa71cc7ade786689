"""Query i sees keys up to position i + offset, offset = S - T: chunks inside pieces.

The positions are cut into pieces, a piece into chunks of C rows. Position p is key p and query
p - offset, so that in the same chunk row i sees row j iff j <= i. One state per piece is summed
(`states.py`) and accumulated over the pieces; then one program walks each piece chunk by chunk,
its running state S [F, V] and z [F] in registers. With seen[i, j] = 1 iff j <= i:

    num = phi(q) S + w v              w = seen * (phi(q) phi(k)^T)
    den = phi(q) . z + w 1
    out = num / max(den, eps)         normalize, else scale * num

Backward, the same walk for dq. With dw = seen * (do v^T), the weights' gradient without the
normaliser, and row i's own z_i = z + sum_{j<=i} phi(k_j):

    g_i       = S do_i + sum_j dw[i, j] phi(k_j)
    e_i       = -(phi(q_i) . g_i) / den_i, 0 where phi(q_i) . z_i <= eps or not normalize
    d_num_i   = do_i / den_i
    d_den_i   = e_i / den_i
    d_phi_q_i = (g_i + e_i z_i) / den_i

and a walk from the end for dk and dv, with dS = sum phi(q_i) d_num_i^T and dz = sum d_den_i
phi(q_i) over the queries i of later chunks; d_den and 1 / den were left by the walk before, in
float32. 1 / den goes with do, not with phi(q), whose rows may all be alike: their roundings would
add up.

    dv_j      = dS^T phi(k_j) + sum_i seen[i, j] (phi(q_i) . phi(k_j)) d_num_i
    d_phi_k_j = dS v_j + dz   + sum_i seen[i, j] (d_num_i . v_j + d_den_i) phi(q_i)

The states' kv are held transposed, [V, F]: what the state pass leaves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.triton import tiles
from ato_jax.ops.linear_attention.triton.bidirectional import normalizer_terms
from ato_jax.ops.linear_attention.triton.states import piece_states
from ato_jax.ops.linear_attention.triton.tiles import Config, Pieces, Rows


class Walk(NamedTuple):
    """The pieces of the positions, which run from min(0, offset) to S.

    Piece p is the keys from `first_key + p * rows` on and the queries from `first_query + p *
    rows` on; either may be negative, where the other's sequence is the longer one.
    """

    pieces: Pieces
    first_key: int
    first_query: int
    aligned: bool
    with_queries: int

    def rows_at(
        self, spec: LinearAttentionSpec, piece: Any, chunk: Any, block: int
    ) -> tuple[Rows, Rows]:
        """The queries and the keys of one chunk of a piece."""
        start = piece * self.pieces.rows + chunk * block
        return (
            tiles.tile_rows(self.first_query + start, block, spec.T, self.aligned),
            tiles.tile_rows(self.first_key + start, block, spec.S, self.aligned),
        )


def _walk(spec: LinearAttentionSpec, config: Config) -> Walk:
    offset = spec.S - spec.T
    first_key = min(0, offset)
    length = spec.S - first_key
    block = max(config.state_block, config.output_block, config.dq_block, config.dkv_block)
    pieces = tiles.cut(length, spec.B * spec.G, config.piece_rows, block, config.programs)
    aligned = offset == 0 and pieces.count * pieces.rows == length
    # Earlier pieces hold keys alone, which the walks over queries leave out.
    return Walk(pieces, first_key, first_key - offset, aligned, max(0, offset) // pieces.rows)


def _prefix_states(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk
) -> tuple[jax.Array, jax.Array]:
    """The states before each piece and, last, after all: [B, G, pieces + 1, V, F] and [.., F]."""
    kv, k_sum = piece_states(spec, config, inputs, walk.pieces, walk.first_key)
    if inputs.initial_state is None:
        start = jnp.zeros_like(kv[:, :, 0]), jnp.zeros_like(k_sum[:, :, 0])
    else:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    return (
        jnp.cumsum(jnp.concatenate([start[0][:, :, None], kv], axis=2), axis=2),
        jnp.cumsum(jnp.concatenate([start[1][:, :, None], k_sum], axis=2), axis=2),
    )


def _state_blocks(spec: LinearAttentionSpec, index: Any) -> list[pl.BlockSpec]:
    """kv [V, F] and k_sum [F] of one piece; `index(*program_ids)` is (batch, head, piece)."""
    return [
        pl.BlockSpec((None, None, None, spec.V, spec.F), lambda *ids: (*index(*ids), 0, 0)),
        pl.BlockSpec((None, None, None, spec.F), lambda *ids: (*index(*ids), 0)),
    ]


def _load_state(
    spec: LinearAttentionSpec, kv_ref: Any, k_sum_ref: Any, rows: int
) -> tuple[jax.Array, jax.Array]:
    """kv [V, F], and k_sum in each of so many rows [rows, F]."""
    width = tiles.padded(spec.F)
    return (
        tiles.load_matrix(kv_ref, spec.V, spec.F),
        jnp.broadcast_to(tiles.load_vector(k_sum_ref, spec.F)[None, :], (rows, width)),
    )


def _seen(block: int) -> jax.Array:
    """[C, C]: whether column j is at or before row i."""
    i = jnp.arange(block, dtype=jnp.int32)
    return i[None, :] <= i[:, None]


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    walk = _walk(spec, config)
    kv, k_sum = _prefix_states(spec, config, inputs, walk)
    state = LinearState(jnp.swapaxes(kv[:, :, -1], 2, 3), k_sum[:, :, -1])
    return Outputs(_output(spec, config, inputs, walk, kv, k_sum), state)


def _output(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    kv: jax.Array,
    k_sum: jax.Array,
) -> jax.Array:
    block = config.output_block
    group = spec.H // spec.G

    def kernel(
        q_ref: Any, k_ref: Any, v_ref: Any, kv_ref: Any, k_sum_ref: Any, out_ref: Any
    ) -> None:
        piece = walk.with_queries + tiles.piece_id()
        ones = jnp.ones((block, block), jnp.float32)

        def write_chunk(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            kv, z = state  # [V, F], [C, F]
            queries, keys = walk.rows_at(spec, piece, i, block)
            q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            phi_q = tiles.operand(spec, tiles.features_of(spec, q, queries), wide=True)
            wide = tiles.wide_features(spec)
            phi_k = tiles.operand(spec, tiles.features_of(spec, k, keys), wide=wide)
            w = tiles.product(spec, phi_q, phi_k, wide=True, trans_b=True)  # [C, C]
            w = jnp.where(_seen(block), w, 0.0)
            out = tiles.product(spec, phi_q, kv, wide=True, trans_b=True)  # [C, V]
            out += tiles.weighted_sum(spec, w, v)
            if spec.normalize:
                seen = jnp.where(_seen(block), ones, 0.0)
                z_seen = z + tiles.product(spec, seen, phi_k, wide=wide)  # [C, F]
                den = jnp.sum(phi_q.astype(jnp.float32) * z_seen, axis=1)  # [C]
                out *= (1 / jnp.maximum(den, spec.eps))[:, None]
                z += tiles.product(spec, ones, phi_k, wide=wide)
            else:
                out *= spec.scale
            tiles.store_tile(out_ref, queries, spec.V, out)
            return kv + tiles.product(spec, v, phi_k, wide=wide, trans_a=True), z

        state = _load_state(spec, kv_ref, k_sum_ref, block)
        jax.lax.fori_loop(0, walk.pieces.rows // block, write_chunk, state)

    return tiles.launch(
        kernel,
        "linear_attention_causal_output",
        grid=(walk.pieces.count - walk.with_queries, spec.H, spec.B),
        in_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.S, spec.D, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.S, spec.V, lambda p, h, b: (b, h // group)),
            *_state_blocks(spec, lambda p, h, b: (b, h // group, walk.with_queries + p)),
        ],
        out_specs=tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
        out_shape=tiles.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
    )(inputs.q, inputs.k, inputs.v, kv, k_sum)


class Normalizer(NamedTuple):
    """What the walk for dq leaves for the one for dk and dv, [B, H, T] float32."""

    d_den: jax.Array  # e / den
    inverse: jax.Array  # 1 / den


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    walk = _walk(spec, config)
    kv, k_sum = _prefix_states(spec, config, inputs, walk)
    dq, dkv, dk_sum, normalizer = _query_gradient(
        spec, config, inputs, walk, kv, k_sum, cotangents.out
    )
    # Over the query heads of each kv head; pieces that hold keys alone add nothing.
    dkv = jnp.sum(dkv.reshape(spec.B, spec.G, -1, *dkv.shape[2:]), axis=2)
    dk_sum = jnp.sum(dk_sum.reshape(spec.B, spec.G, -1, *dk_sum.shape[2:]), axis=2)
    if spec.return_state:
        end = jnp.swapaxes(cotangents.state.kv, 2, 3), cotangents.state.k_sum
    else:
        end = jnp.zeros_like(dkv[:, :, 0]), jnp.zeros_like(dk_sum[:, :, 0])
    dkv = _suffix_sums(dkv, end[0], walk.with_queries)
    dk_sum = _suffix_sums(dk_sum, end[1], walk.with_queries)
    dk, dv = _key_gradient(spec, config, inputs, walk, dkv, dk_sum, normalizer, cotangents.out)
    d_state = None
    if inputs.initial_state is not None:
        d_state = LinearState(jnp.swapaxes(dkv[:, :, 0], 2, 3), dk_sum[:, :, 0])
    return Inputs(dq, dk, dv, initial_state=d_state)


def _suffix_sums(pieces: jax.Array, end: jax.Array, pieces_before: int) -> jax.Array:
    """[.., p + 1, ..] is the sum over the pieces after p and `end`; [.., 0, ..] over all."""
    sums = jnp.concatenate([pieces, end[:, :, None]], axis=2)
    sums = jax.lax.cumsum(sums, axis=2, reverse=True)
    if not pieces_before:
        return sums
    padding = [(0, 0), (0, 0), (pieces_before, 0)] + [(0, 0)] * (sums.ndim - 3)
    return jnp.pad(sums, padding, mode="edge")


def _query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    kv: jax.Array,
    k_sum: jax.Array,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Normalizer | None]:
    """dq; dS^T [B, H, pieces, V, F] and dz [B, H, pieces, F] of each piece; e and 1 / den."""
    block = config.dq_block
    group = spec.H // spec.G
    count = walk.pieces.count - walk.with_queries

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        do_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        dq_ref: Any,
        dkv_ref: Any,
        dk_sum_ref: Any,
        *normalizer_refs: Any,
    ) -> None:
        piece = walk.with_queries + tiles.piece_id()
        ones = jnp.ones((block, block), jnp.float32)

        def write_chunk(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            kv, z, dkv, dz = carry  # [V, F], [C, F], [V, F], [C, F]
            queries, keys = walk.rows_at(spec, piece, i, block)
            q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            do = tiles.load_tile(do_ref, queries, spec.V)  # [C, V]
            phi_q, slopes = tiles.features_and_slopes(spec, q, queries)  # [C, F]
            wide = tiles.wide_features(spec)
            phi_k = tiles.operand(spec, tiles.features_of(spec, k, keys), wide=wide)  # [C, F]
            dw = tiles.product(spec, do, v, trans_b=True)  # [C, C]
            dw = jnp.where(_seen(block), dw, 0.0)
            g = tiles.product(spec, do, kv, wide=True)  # [C, F]
            g += tiles.product(spec, dw, phi_k, wide=True)
            if spec.normalize:
                # The features as the forward rounded them, in both terms that nearly cancel.
                phi_q = tiles.operand(spec, phi_q, wide=True).astype(jnp.float32)
                seen = jnp.where(_seen(block), ones, 0.0)
                z_seen = z + tiles.product(spec, seen, phi_k, wide=wide)  # [C, F]
                e, inverse = normalizer_terms(spec, [phi_q], [g], [z_seen])
                tiles.store_rows(normalizer_refs[0], queries, e * inverse)
                tiles.store_rows(normalizer_refs[1], queries, inverse)
                dz += (e * inverse)[:, None] * phi_q
                z += tiles.product(spec, ones, phi_k, wide=wide)
                dq = (g + e[:, None] * z_seen) * inverse[:, None] * slopes
                d_num = do.astype(jnp.float32) * inverse[:, None]
            else:
                dq = g * spec.scale * slopes
                d_num = do.astype(jnp.float32) * spec.scale
            tiles.store_tile(dq_ref, queries, spec.D, dq)
            kv += tiles.product(spec, v, phi_k, wide=wide, trans_a=True)
            dkv += tiles.product(spec, d_num, phi_q, wide=True, trans_a=True)
            return kv, z, dkv, dz

        state = _load_state(spec, kv_ref, k_sum_ref, block)
        carry = (*state, *(jnp.zeros_like(array) for array in state))
        *_, dkv, dz = jax.lax.fori_loop(0, walk.pieces.rows // block, write_chunk, carry)
        tiles.store_matrix(dkv_ref, spec.V, spec.F, dkv)
        tiles.store_vector(dk_sum_ref, spec.F, jnp.sum(dz, axis=0))

    per_row = pl.BlockSpec((None, None, spec.T), lambda p, h, b: (b, h, 0))
    row_shape = jax.ShapeDtypeStruct((spec.B, spec.H, spec.T), jnp.float32)
    extra = 2 if spec.normalize else 0
    dq, dkv, dk_sum, *normalizer = tiles.launch(
        kernel,
        "linear_attention_causal_query_gradient",
        grid=(count, spec.H, spec.B),
        in_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.S, spec.D, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.S, spec.V, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
            *_state_blocks(spec, lambda p, h, b: (b, h // group, walk.with_queries + p)),
        ],
        out_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            *_state_blocks(spec, lambda p, h, b: (b, h, p)),
            *[per_row] * extra,
        ],
        out_shape=[
            tiles.sequence_shape(spec, spec.T, spec.H, spec.D),
            jax.ShapeDtypeStruct((spec.B, spec.H, count, spec.V, spec.F), jnp.float32),
            jax.ShapeDtypeStruct((spec.B, spec.H, count, spec.F), jnp.float32),
            *[row_shape] * extra,
        ],
        warps=config.dq_warps,
        stages=config.dq_stages,
    )(inputs.q, inputs.k, inputs.v, do, kv, k_sum)
    return dq, dkv, dk_sum, Normalizer(*normalizer) if normalizer else None


def _key_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    dkv: jax.Array,
    dk_sum: jax.Array,
    normalizer: Normalizer | None,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv, summed over the query heads of each kv head."""
    block = config.dkv_block
    group = spec.H // spec.G
    chunks = walk.pieces.rows // block
    axis = tiles.heads_axis(spec)

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        do_ref: Any,
        dkv_ref: Any,
        dk_sum_ref: Any,
        *refs: Any,
    ) -> None:
        *normalizer_refs, dk_ref, dv_ref = refs
        piece = tiles.piece_id()

        def write_chunk(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            dkv, dz = sums  # [V, F], [C, F]
            queries, keys = walk.rows_at(spec, piece, chunks - 1 - i, block)
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            phi_k, slopes = tiles.features_and_slopes(spec, k, keys)  # [C, F]
            phi_k = tiles.operand(spec, phi_k, wide=True)
            dv = tiles.product(spec, phi_k, dkv, wide=True, trans_b=True)  # [C, V]
            d_features = tiles.read_state(spec, v, dkv) + dz  # [C, F]
            seen = _seen(block).T  # [C keys, C queries]

            def add_head(head: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                dv, d_features, dkv, dz = sums
                q = tiles.load_tile(q_ref, queries, spec.D, head, axis)  # [C, D]
                do = tiles.load_tile(do_ref, queries, spec.V, head, axis)  # [C, V]
                phi_q = tiles.features_of(spec, q, queries)  # [C, F]
                phi_q = tiles.operand(spec, phi_q, wide=True)
                factor = jnp.full((block,), spec.scale, jnp.float32)
                if spec.normalize:
                    factor = tiles.load_rows(normalizer_refs[1], queries, head)  # [C]
                d_num = do.astype(jnp.float32) * factor[:, None]
                d_num = tiles.operand(spec, d_num, wide=True)  # [C, V]
                # Not v . d_num, which is rounded: these terms are a difference.
                dw = tiles.product(spec, v, do, trans_b=True)  # [C keys, C queries]
                dw *= factor[None, :]
                if spec.normalize:
                    d_den = tiles.load_rows(normalizer_refs[0], queries, head)  # [C]
                    d_den_rows = jnp.broadcast_to(d_den[None, :], (block, block))
                    dw += d_den_rows
                    dz += tiles.weighted_sum(spec, d_den_rows, phi_q)
                w = tiles.product(spec, phi_k, phi_q, wide=True, trans_b=True)
                dv += tiles.weighted_sum(spec, jnp.where(seen, w, 0.0), d_num)
                d_features += tiles.weighted_sum(spec, jnp.where(seen, dw, 0.0), phi_q)
                dkv += tiles.product(spec, d_num, phi_q, wide=True, trans_a=True)
                return dv, d_features, dkv, dz

            dv, d_features, dkv, dz = jax.lax.fori_loop(
                0, group, add_head, (dv, d_features, dkv, dz)
            )
            tiles.store_tile(dv_ref, keys, spec.V, dv)
            tiles.store_tile(dk_ref, keys, spec.D, d_features * slopes)
            return dkv, dz

        jax.lax.fori_loop(0, chunks, write_chunk, _load_state(spec, dkv_ref, dk_sum_ref, block))

    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, g, b: (b, g))
    values = tiles.sequence_block(spec, spec.S, spec.V, lambda p, g, b: (b, g))
    per_row = pl.BlockSpec((None, group, spec.T), lambda p, g, b: (b, g, 0))
    return tiles.launch(
        kernel,
        "linear_attention_causal_key_gradient",
        grid=(walk.pieces.count, spec.G, spec.B),
        in_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, g, b: (b, g), group),
            keys,
            values,
            tiles.sequence_block(spec, spec.T, spec.V, lambda p, g, b: (b, g), group),
            *_state_blocks(spec, lambda p, g, b: (b, g, p + 1)),
            *[per_row] * len(normalizer or ()),
        ],
        out_specs=[keys, values],
        out_shape=[
            tiles.sequence_shape(spec, spec.S, spec.G, spec.D),
            tiles.sequence_shape(spec, spec.S, spec.G, spec.V),
        ],
        warps=config.dkv_warps,
        stages=config.dkv_stages,
    )(inputs.q, inputs.k, inputs.v, do, dkv, dk_sum, *(normalizer or ()))
