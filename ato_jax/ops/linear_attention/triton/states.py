"""The sums over the keys, piece by piece: the first pass of every forward and causal backward.

    kv[p] = sum over the keys j of piece p of v_j phi(k_j)^T     [V, F], the state transposed
    k_sum[p] = sum over them of phi(k_j)                         [F]

Written as v^T phi(k) the mapped tile is the product's right operand, which is the one that goes
through shared memory anyway; v's tile is there from its load. With a decay or segments, phi(k_j)
is first multiplied by what of it is left at the piece's end (`walk.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import tiles
from ato_jax.ops.linear_attention.triton.tiles import Config, Dealt, Pieces, Rows

# Threads in a warp, times the elements that one loads at once.
THREADS_BY_ELEMENTS = 32 * 8


def piece_states(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    pieces: Pieces | Dealt,
    keys_at: Callable[[dict[str, Any], Any, int], Rows],
    arrays: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """kv [B, G, pieces, V, F] and k_sum [B, G, pieces, F], float32.

    Args:
      keys_at: the keys of so many steps from one on, from the refs of `arrays`.
      arrays: by steps, [B, N] or [B, G, N]; a key's features are multiplied by "adds".
    """
    block = pieces.block_within(config.state_block)
    height, width = tiles.padded(spec.V), tiles.padded(spec.F)
    # Of a tile's rows a thread has one in so many to itself, and adds up those alone.
    apart = min(block, config.state_warps * THREADS_BY_ELEMENTS // width)

    def kernel(refs: dict[str, Any], k_ref: Any, v_ref: Any, kv_ref: Any, k_sum_ref: Any) -> None:
        piece = tiles.piece_id()

        def add_tile(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            kv, k_sum = sums  # [V, F], [apart, F]
            first = pieces.first_row(piece, i, block)
            rows = keys_at(refs, first, block)
            k = tiles.load_tile(k_ref, rows, spec.D)  # [S_block, D]
            v = tiles.load_tile(v_ref, rows, spec.V)  # [S_block, V]
            features = tiles.features_of(spec, k, rows)  # [S_block, F]
            wide = tiles.wide_features(spec)
            if "adds" in refs:
                features, wide = tiles.scale_rows(features, refs["adds"], first), True
            features = tiles.rounded(spec, features)
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
            tiles.step_blocks(arrays, lambda p, g, b: (b, g)),
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
    )(arrays, inputs.k, inputs.v)
