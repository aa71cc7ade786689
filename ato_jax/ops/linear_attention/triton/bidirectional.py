"""Every query sees every key: two passes forward, two backward, each array read once in each.

Forward, with S = sum_j phi(k_j) v_j^T [F, V] and z = sum_j phi(k_j) [F] (the state):

    den_i = max(phi(q_i) . z, eps)            normalize, else 1 / scale
    out_i = S^T phi(q_i) / den_i

Backward, with g_i = S do_i [F]; do_i . out_i is phi(q_i) . g_i / den_i, so that no output is
formed, and the difference below is taken in float32:

    e_i       = -(do_i . out_i), 0 where phi(q_i) . z <= eps or not normalize
    u_i       = phi(q_i) / den_i
    d_phi_q_i = (g_i + e_i z) / den_i
    dS        = sum_i u_i do_i^T + the state's cotangent         dz = sum_i e_i u_i + likewise
    dv_j      = dS^T phi(k_j)
    d_phi_k_j = dS v_j + dz

The first pass of the backward reads q and do, writes dq and leaves dS and dz of its pieces; the
second reads k and v and writes dk and dv.
"""

from __future__ import annotations

from typing import Any

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
from ato_jax.ops.linear_attention.triton.states import piece_states
from ato_jax.ops.linear_attention.triton.tiles import Config


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    pieces = tiles.cut(
        spec.S, spec.B * spec.G, config.piece_rows, config.state_block, config.programs
    )
    whole = pieces.count * pieces.rows == spec.S

    def keys_at(refs: dict[str, Any], start: Any, block: int) -> tiles.Rows:
        return tiles.tile_rows(start, block, spec.S, whole, refs.get("kv_length"))

    lengths = tiles.length_arrays(inputs)
    kv, k_sum = piece_states(spec, config, inputs, pieces, keys_at, lengths)
    state = LinearState(jnp.swapaxes(jnp.sum(kv, axis=2), 2, 3), jnp.sum(k_sum, axis=2))
    if inputs.initial_state is not None:
        state = jax.tree.map(jnp.add, state, inputs.initial_state)
    return Outputs(_output(spec, config, inputs.q, state, lengths), state)


def _state_blocks(spec: LinearAttentionSpec, group: int) -> list[pl.BlockSpec]:
    """kv [F, V] and k_sum [F] of the kv head that query head `program_id(1)` reads."""
    return [
        pl.BlockSpec((None, None, spec.F, spec.V), lambda p, h, b: (b, h // group, 0, 0)),
        pl.BlockSpec((None, None, spec.F), lambda p, h, b: (b, h // group, 0)),
    ]


def _output(
    spec: LinearAttentionSpec,
    config: Config,
    q: jax.Array,
    state: LinearState,
    lengths: dict[str, jax.Array],
) -> jax.Array:
    block = config.output_block
    pieces = tiles.cut(spec.T, spec.B * spec.H, config.stream_rows, block, config.programs)
    whole = pieces.count * pieces.rows == spec.T

    def kernel(
        lengths: dict[str, Any], q_ref: Any, kv_ref: Any, k_sum_ref: Any, out_ref: Any
    ) -> None:
        start = pl.program_id(0) * pieces.rows
        kv = tiles.operand(spec, tiles.load_matrix(kv_ref, spec.F, spec.V), wide=True)  # [F, V]
        z = tiles.as_columns(spec, tiles.load_vector(k_sum_ref, spec.F))  # [F, 16]

        def write_tile(i: Any, carry: None) -> None:
            first, length = start + i * block, lengths.get("q_length")
            rows = tiles.tile_rows(first, block, spec.T, whole, length)
            q = tiles.load_tile(q_ref, rows, spec.D)  # [T_block, D]
            features = tiles.operand(spec, tiles.features_of(spec, q, rows), wide=True)
            out = tiles.product(spec, features, kv, wide=True)  # [T_block, V]
            if spec.normalize:
                den = jnp.sum(tiles.product(spec, features, z, wide=True), axis=1)  # [T_block]
                out *= (1 / jnp.maximum(den, spec.eps))[:, None]
            else:
                out *= spec.scale
            tiles.store_tile(out_ref, rows, spec.V, out)

        jax.lax.fori_loop(0, pieces.rows // block, write_tile, None)

    return tiles.launch(
        kernel,
        "linear_attention_output",
        grid=(pieces.count, spec.H, spec.B),
        in_specs=[
            tiles.step_blocks(lengths, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            *_state_blocks(spec, spec.H // spec.G),
        ],
        out_specs=tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
        out_shape=tiles.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
    )(lengths, q, *state)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs, outputs = residuals
    lengths = tiles.length_arrays(inputs)
    dq, dkv, dk_sum = _query_gradient(
        spec, config, inputs.q, outputs.state, cotangents.out, lengths
    )
    # Over the pieces and over the query heads of each kv head.
    dkv = jnp.sum(dkv.reshape(spec.B, spec.G, -1, spec.V, spec.F), axis=2)
    dk_sum = jnp.sum(dk_sum.reshape(spec.B, spec.G, -1, spec.F), axis=2)
    if spec.return_state:
        dkv += jnp.swapaxes(cotangents.state.kv, 2, 3)
        dk_sum += cotangents.state.k_sum
    dk, dv = _key_gradient(spec, config, inputs.k, inputs.v, dkv, dk_sum, lengths)
    d_state = None
    if inputs.initial_state is not None:
        d_state = LinearState(jnp.swapaxes(dkv, 2, 3), dk_sum)
    return Inputs(dq, dk, dv, initial_state=d_state)


def _query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    q: jax.Array,
    state: LinearState,
    do: jax.Array,
    lengths: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq; and dS^T [B, H, pieces, V, F] and dz [B, H, pieces, F] of each piece."""
    block = config.dq_block
    pieces = tiles.cut(spec.T, spec.B * spec.H, config.piece_rows, block, config.programs)
    whole = pieces.count * pieces.rows == spec.T

    def kernel(
        lengths: dict[str, Any],
        q_ref: Any,
        do_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        dq_ref: Any,
        dkv_ref: Any,
        dk_sum_ref: Any,
    ) -> None:
        start = pl.program_id(0) * pieces.rows
        kv = tiles.operand(spec, tiles.load_matrix(kv_ref, spec.F, spec.V), wide=True)  # [F, V]
        z = tiles.load_vector(k_sum_ref, spec.F)  # [F]

        def add_tile(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            dkv, dk_sum = sums  # [V, F], [T_block, F]
            first, length = start + i * block, lengths.get("q_length")
            rows = tiles.tile_rows(first, block, spec.T, whole, length)
            q = tiles.load_tile(q_ref, rows, spec.D)  # [T_block, D]
            do = tiles.load_tile(do_ref, rows, spec.V)  # [T_block, V]
            features, slopes = tiles.features_and_slopes(spec, q, rows)  # [T_block, F]
            g = tiles.product(spec, do, kv, wide=True, trans_b=True)  # [T_block, F]
            if spec.normalize:
                # The features as the forward rounded them, in both terms that nearly cancel.
                features = tiles.operand(spec, features, wide=True).astype(jnp.float32)
                e, inverse = normalizer_terms(spec, features, g, z[None, :])
                g += e[:, None] * z[None, :]
                dk_sum += (e * inverse)[:, None] * features
                dq = g * inverse[:, None] * slopes
                d_num = do.astype(jnp.float32) * inverse[:, None]
            else:
                dq = g * spec.scale * slopes
                d_num = do.astype(jnp.float32) * spec.scale
            tiles.store_tile(dq_ref, rows, spec.D, dq)
            dkv += tiles.product(spec, d_num, features, wide=True, trans_a=True)
            return dkv, dk_sum

        sums = tiles.no_sums(spec, block)
        dkv, dk_sum = jax.lax.fori_loop(0, pieces.rows // block, add_tile, sums)
        tiles.store_matrix(dkv_ref, spec.V, spec.F, dkv)
        tiles.store_vector(dk_sum_ref, spec.F, jnp.sum(dk_sum, axis=0))

    return tiles.launch(
        kernel,
        "linear_attention_query_gradient",
        grid=(pieces.count, spec.H, spec.B),
        in_specs=[
            tiles.step_blocks(lengths, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
            *_state_blocks(spec, spec.H // spec.G),
        ],
        out_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            pl.BlockSpec((None, None, None, spec.V, spec.F), lambda p, h, b: (b, h, p, 0, 0)),
            pl.BlockSpec((None, None, None, spec.F), lambda p, h, b: (b, h, p, 0)),
        ],
        out_shape=[
            tiles.sequence_shape(spec, spec.T, spec.H, spec.D),
            jax.ShapeDtypeStruct((spec.B, spec.H, pieces.count, spec.V, spec.F), jnp.float32),
            jax.ShapeDtypeStruct((spec.B, spec.H, pieces.count, spec.F), jnp.float32),
        ],
        warps=config.dq_warps,
        stages=config.dq_stages,
    )(lengths, q, do, *state)


def normalizer_terms(
    spec: LinearAttentionSpec, features: jax.Array, g: jax.Array, z: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """e and 1 / den, [T_block], from phi(q), g and each row's z [T_block or 1, F]."""
    weight = jnp.sum(features * z, axis=1)
    inverse = 1 / jnp.maximum(weight, spec.eps)
    e = jnp.where(weight > spec.eps, -inverse * jnp.sum(features * g, axis=1), 0.0)
    return e, inverse


def _key_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    k: jax.Array,
    v: jax.Array,
    dkv: jax.Array,
    dk_sum: jax.Array,
    lengths: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """dk and dv, from dS^T [B, G, V, F] and dz [B, G, F]."""
    block = config.dkv_block
    pieces = tiles.cut(spec.S, spec.B * spec.G, config.stream_rows, block, config.programs)
    whole = pieces.count * pieces.rows == spec.S
    # dS is a factor both ways round, and each way its three parts lie in shared memory.
    in_parts = tiles.state_size(spec) <= tiles.SMALL_STATE

    def kernel(
        lengths: dict[str, Any],
        k_ref: Any,
        v_ref: Any,
        dkv_ref: Any,
        dk_sum_ref: Any,
        dk_ref: Any,
        dv_ref: Any,
    ) -> None:
        start = pl.program_id(0) * pieces.rows
        dkv = tiles.operand(spec, tiles.load_matrix(dkv_ref, spec.V, spec.F), wide=True)  # [V, F]
        dz = tiles.load_vector(dk_sum_ref, spec.F)  # [F]

        def write_tile(i: Any, carry: None) -> None:
            first, length = start + i * block, lengths.get("kv_length")
            rows = tiles.tile_rows(first, block, spec.S, whole, length)
            k = tiles.load_tile(k_ref, rows, spec.D)  # [S_block, D]
            v = tiles.load_tile(v_ref, rows, spec.V)  # [S_block, V]
            features, slopes = tiles.features_and_slopes(spec, k, rows)  # [S_block, F]
            dv = tiles.product(  # [S_block, V]
                spec, features, dkv, wide=True, trans_b=True, in_parts=in_parts
            )
            d_features = tiles.product(spec, v, dkv, wide=True, in_parts=in_parts)
            d_features += dz[None, :]  # [S_block, F]
            tiles.store_tile(dv_ref, rows, spec.V, dv)
            tiles.store_tile(dk_ref, rows, spec.D, d_features * slopes)

        jax.lax.fori_loop(0, pieces.rows // block, write_tile, None)

    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, g, b: (b, g))
    values = tiles.sequence_block(spec, spec.S, spec.V, lambda p, g, b: (b, g))
    return tiles.launch(
        kernel,
        "linear_attention_key_gradient",
        grid=(pieces.count, spec.G, spec.B),
        in_specs=[
            tiles.step_blocks(lengths, lambda p, g, b: (b, g)),
            keys,
            values,
            pl.BlockSpec((None, None, spec.V, spec.F), lambda p, g, b: (b, g, 0, 0)),
            pl.BlockSpec((None, None, spec.F), lambda p, g, b: (b, g, 0)),
        ],
        out_specs=[keys, values],
        out_shape=[
            tiles.sequence_shape(spec, spec.S, spec.G, spec.D),
            tiles.sequence_shape(spec, spec.S, spec.G, spec.V),
        ],
        warps=config.dkv_warps,
        stages=config.dkv_stages,
    )(lengths, k, v, dkv, dk_sum)
