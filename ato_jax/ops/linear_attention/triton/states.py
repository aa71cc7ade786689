"""The sums over the keys, piece by piece: the first pass of every forward and causal backward.

    kv[p] = sum over the keys j of piece p of v_j phi(k_j)^T     [V, F], the state transposed
    k_sum[p] = sum over them of phi(k_j)                         [F]

Written as v^T phi(k) the mapped tile is the product's right operand, which is the one that goes
through shared memory anyway; v's tile is there from its load.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import tiles
from ato_jax.ops.linear_attention.triton.tiles import Config, Dealt, Pieces

# Threads in a warp, times the elements that one loads at once.
THREADS_BY_ELEMENTS = 32 * 8


def piece_states(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    pieces: Pieces | Dealt,
    first: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """kv [B, G, pieces, V, F] and k_sum [B, G, pieces, F], float32; piece 0 starts at `first`."""
    block = config.state_block
    whole = first == 0 and pieces.whole and pieces.length == spec.S
    wide = tiles.wide_features(spec)
    height, width = tiles.padded(spec.V), tiles.padded(spec.F)
    # Of a tile's rows a thread has one in so many to itself, and adds up those alone.
    apart = min(block, config.state_warps * THREADS_BY_ELEMENTS // width)

    def kernel(k_ref: Any, v_ref: Any, kv_ref: Any, k_sum_ref: Any) -> None:
        piece = tiles.piece_id()

        def add_tile(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            kv, k_sum = sums  # [V, F], [apart, F]
            rows = tiles.tile_rows(
                first + pieces.first_row(piece, i, block), block, spec.S, whole
            )
            k = tiles.load_tile(k_ref, rows, spec.D)  # [S_block, D]
            v = tiles.load_tile(v_ref, rows, spec.V)  # [S_block, V]
            features = tiles.rounded(spec, tiles.features_of(spec, k, rows))  # [S_block, F]
            kv += tiles.product(spec, v, features, wide=wide, trans_a=True)
            k_sum += jnp.sum(features.reshape(-1, apart, width), axis=0)
            return kv, k_sum

        sums = jnp.zeros((height, width), jnp.float32), jnp.zeros((apart, width), jnp.float32)
        kv, k_sum = jax.lax.fori_loop(0, pieces.turns(piece, block), add_tile, sums)
        tiles.store_matrix(kv_ref, spec.V, spec.F, kv)
        tiles.store_vector(k_sum_ref, spec.F, jnp.sum(k_sum, axis=0))

    return tiles.launch(
        kernel,
        "linear_attention_states",
        grid=(pieces.count, spec.G, spec.B),
        in_specs=[
            tiles.sequence_block(spec, spec.S, spec.D, lambda p, g, b: (b, g)),
            tiles.sequence_block(spec, spec.S, spec.V, lambda p, g, b: (b, g)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, spec.V, spec.F), lambda p, g, b: (b, g, p, 0, 0)),
            pl.BlockSpec((None, None, None, spec.F), lambda p, g, b: (b, g, p, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((spec.B, spec.G, pieces.count, spec.V, spec.F), jnp.float32),
            jax.ShapeDtypeStruct((spec.B, spec.G, pieces.count, spec.F), jnp.float32),
        ],
        warps=config.state_warps,
        stages=config.state_stages,
    )(inputs.k, inputs.v)
