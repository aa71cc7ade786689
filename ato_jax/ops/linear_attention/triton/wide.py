"""Bidirectional, with states [F, V] that a program can read, but not sum: up to 256 x 256.

As operands in bfloat16 they fit into Hopper's shared memory, as float32 sums they fill all of its
registers. So what is summed over rows is summed for blocks of V, an axis of the grid, and what
reads a finished state reads the whole: no part of q's or k's gradient has to be added up.

    S[:, c]  = sum_j phi(k_j) v_j[c]^T                      reads k for each block, v once
    out      as in `bidirectional.py`                       q once
    dq, 1/den, dz = sum_i (e_i / den_i) phi(q_i)            q and do once
    dS[:, c] = sum_i phi(q_i) (do_i[c] / den_i)^T           q for each block, do once
    dk, dv   as in `bidirectional.py`                       k and v once

With two blocks that is 5u forward and 10u backward, u one array, where `bidirectional.py` has 4u
and 7u; V in blocks from end to end (`split.py`) would write dq and dk as many times in float32.
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
from ato_jax.ops.linear_attention.triton import bidirectional, split, tiles
from ato_jax.ops.linear_attention.triton.states import piece_states
from ato_jax.ops.linear_attention.triton.tiles import Config

WIDEST = 256
# What a state of that size and tiles of 64 rows take, as found by compiling; Hopper has it.
SHARED_MEMORY = 200_000


def applies(spec: LinearAttentionSpec, shared_memory: int) -> bool:
    """Whether these passes are the right ones, and fit."""
    return (
        not spec.causal
        and spec.dtype == "bfloat16"
        and split.blocks(spec) > 1
        and max(tiles.padded(spec.F), tiles.padded(spec.V)) <= WIDEST
        and shared_memory >= SHARED_MEMORY
    )


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    pieces = tiles.cut(
        spec.S, spec.B * spec.G, config.piece_rows, config.state_block, config.programs
    )

    def block(v: jax.Array) -> tuple[jax.Array, jax.Array]:
        kv, k_sum = piece_states(
            split.block_spec(spec), config, inputs._replace(v=v), pieces
        )
        return jnp.sum(kv, axis=2), jnp.sum(k_sum, axis=2)  # [B, G, V_block, F], [B, G, F]

    kv, k_sum = jax.vmap(block, in_axes=-2, out_axes=2)(split.cut(spec, inputs.v))
    kv = kv.reshape(spec.B, spec.G, -1, spec.F)[:, :, : spec.V]  # [B, G, V, F]
    state = LinearState(jnp.swapaxes(kv, 2, 3), k_sum[:, :, 0])
    if inputs.initial_state is not None:
        state = jax.tree.map(jnp.add, state, inputs.initial_state)
    return Outputs(bidirectional._output(spec, config, inputs.q, state), state)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs, outputs = residuals
    dq, *inverse, dk_sum = _query_gradient(
        spec, config, inputs.q, outputs.state, cotangents.out
    )

    def block(do: jax.Array) -> jax.Array:
        dkv = _state_gradient(split.block_spec(spec), config, inputs.q, do, *inverse)
        # Over the pieces and over the query heads of each kv head.
        return jnp.sum(dkv.reshape(spec.B, spec.G, -1, *dkv.shape[-2:]), axis=2)

    dkv = jax.vmap(block, in_axes=-2, out_axes=2)(split.cut(spec, cotangents.out))
    dkv = dkv.reshape(spec.B, spec.G, -1, spec.F)[:, :, : spec.V]  # [B, G, V, F]
    dk_sum = jnp.sum(dk_sum.reshape(spec.B, spec.G, -1, spec.F), axis=2)
    if spec.return_state:
        dkv += jnp.swapaxes(cotangents.state.kv, 2, 3)
        dk_sum += cotangents.state.k_sum
    dk, dv = bidirectional._key_gradient(spec, config, inputs.k, inputs.v, dkv, dk_sum)
    d_state = None
    if inputs.initial_state is not None:
        d_state = LinearState(jnp.swapaxes(dkv, 2, 3), dk_sum)
    return Inputs(dq, dk, dv, initial_state=d_state)


def _query_gradient(
    spec: LinearAttentionSpec, config: Config, q: jax.Array, state: LinearState, do: jax.Array
) -> list[jax.Array]:
    """dq; where normalised 1 / den [B, H, T]; dz [B, H, pieces, F] of each piece."""
    block = config.dq_block
    pieces = tiles.cut(spec.T, spec.B * spec.H, config.piece_rows, block, config.programs)
    whole = pieces.count * pieces.rows == spec.T

    def kernel(
        q_ref: Any, do_ref: Any, kv_ref: Any, k_sum_ref: Any, dq_ref: Any, *refs: Any
    ) -> None:
        *inverse_refs, dk_sum_ref = refs
        start = pl.program_id(0) * pieces.rows
        kv = tiles.operand(spec, tiles.load_matrix(kv_ref, spec.F, spec.V), wide=True)  # [F, V]
        z = tiles.load_vector(k_sum_ref, spec.F)  # [F]

        def write_tile(i: Any, dk_sum: jax.Array) -> jax.Array:
            rows = tiles.tile_rows(start + i * block, block, spec.T, whole)
            q = tiles.load_tile(q_ref, rows, spec.D)  # [T_block, D]
            do = tiles.load_tile(do_ref, rows, spec.V)  # [T_block, V]
            features, slopes = tiles.features_and_slopes(spec, q, rows)  # [T_block, F]
            g = tiles.product(spec, do, kv, wide=True, trans_b=True)  # [T_block, F]
            if spec.normalize:
                # The features as the forward rounded them, in both terms that nearly cancel.
                features = tiles.operand(spec, features, wide=True).astype(jnp.float32)
                e, inverse = bidirectional.normalizer_terms(spec, features, g, z[None, :])
                g = (g + e[:, None] * z[None, :]) * inverse[:, None]
                dk_sum += (e * inverse)[:, None] * features
                tiles.store_rows(inverse_refs[0], rows, inverse)
            else:
                g *= spec.scale
            tiles.store_tile(dq_ref, rows, spec.D, g * slopes)
            return dk_sum

        _, dk_sum = tiles.no_sums(spec, block)
        dk_sum = jax.lax.fori_loop(0, pieces.rows // block, write_tile, dk_sum)
        tiles.store_vector(dk_sum_ref, spec.F, jnp.sum(dk_sum, axis=0))

    per_row = pl.BlockSpec((None, None, spec.T), lambda p, h, b: (b, h, 0))
    row_shape = jax.ShapeDtypeStruct((spec.B, spec.H, spec.T), jnp.float32)
    extra = 1 if spec.normalize else 0
    return tiles.launch(
        kernel,
        "linear_attention_wide_query_gradient",
        grid=(pieces.count, spec.H, spec.B),
        in_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
            *bidirectional._state_blocks(spec, spec.H // spec.G),
        ],
        out_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            *[per_row] * extra,
            pl.BlockSpec((None, None, None, spec.F), lambda p, h, b: (b, h, p, 0)),
        ],
        out_shape=[
            tiles.sequence_shape(spec, spec.T, spec.H, spec.D),
            *[row_shape] * extra,
            jax.ShapeDtypeStruct((spec.B, spec.H, pieces.count, spec.F), jnp.float32),
        ],
        warps=config.dq_warps,
        stages=config.dq_stages,
    )(q, do, *state)


def _state_gradient(
    spec: LinearAttentionSpec, config: Config, q: jax.Array, do: jax.Array, *inverse: jax.Array
) -> jax.Array:
    """dS^T [B, H, pieces, V, F] of each piece, for a block of V."""
    block = config.state_block
    pieces = tiles.cut(spec.T, spec.B * spec.H, config.piece_rows, block, config.programs)
    whole = pieces.count * pieces.rows == spec.T

    def kernel(q_ref: Any, do_ref: Any, *refs: Any) -> None:
        *inverse_refs, dkv_ref = refs
        start = pl.program_id(0) * pieces.rows

        def add_tile(i: Any, dkv: jax.Array) -> jax.Array:
            rows = tiles.tile_rows(start + i * block, block, spec.T, whole)
            q = tiles.load_tile(q_ref, rows, spec.D)  # [T_block, D]
            do = tiles.load_tile(do_ref, rows, spec.V)  # [T_block, V]
            factor = jnp.full((block,), spec.scale, jnp.float32)
            if spec.normalize:
                factor = tiles.load_rows(inverse_refs[0], rows)  # [T_block]
            d_num = do.astype(jnp.float32) * factor[:, None]
            features = tiles.features_of(spec, q, rows)  # [T_block, F]
            return dkv + tiles.product(spec, d_num, features, wide=True, trans_a=True)

        dkv, _ = tiles.no_sums(spec, block)
        dkv = jax.lax.fori_loop(0, pieces.rows // block, add_tile, dkv)
        tiles.store_matrix(dkv_ref, spec.V, spec.F, dkv)

    per_row = pl.BlockSpec((None, None, spec.T), lambda p, h, b: (b, h, 0))
    return tiles.launch(
        kernel,
        "linear_attention_wide_state_gradient",
        grid=(pieces.count, spec.H, spec.B),
        in_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
            *[per_row] * len(inverse),
        ],
        out_specs=pl.BlockSpec((None, None, None, spec.V, spec.F), lambda p, h, b: (b, h, p, 0, 0)),
        out_shape=jax.ShapeDtypeStruct(
            (spec.B, spec.H, pieces.count, spec.V, spec.F), jnp.float32
        ),
        warps=config.state_warps,
        stages=config.state_stages,
    )(q, do, *inverse)
