"""The sums over the rows, piece by piece: over the keys, and in the backward over the queries.

    kv[p] = sum over the keys j of piece p of v_j phi(k_j)^T     [V, F], the state transposed
    k_sum[p] = sum over them of phi(k_j)                         [F]

Written as v^T phi(k) the mapped tile is the product's right operand, which goes through shared
memory in any case, while v's tile is there from its load. With a decay or segments, phi(k_j) is
first multiplied by what is left of it at the piece's end (`steps.py`). A state too large for one
program's registers is cut into blocks of V and F, each of them a program's.

For queries, q stands for k and do for v: phi(q_i) is multiplied by 1 / den_i, and in the second
sum by e_i as well (`causal.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import mapping, powers, products, sequences
from ato_jax.ops.linear_attention.triton.calls import STATE_BLOCK, in_parts
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id
from ato_jax.triton.tiles import Rows, Slice
from ato_jax.triton.work import Dealt, Pieces

# Threads in a warp, times the elements that each loads at once.
THREADS_BY_ELEMENTS = 32 * 8


class RowWeights(NamedTuple):
    """The factors of the queries' features, [B, H, T] or a number; and those that k_sum has beside
    them, without which it is 0."""

    features: jax.Array | float
    k_sum: jax.Array | None


def piece_states(
    spec: LinearAttentionSpec,
    config: Config,
    x: jax.Array,
    other: jax.Array,
    pieces: Pieces | Dealt,
    rows_at: Callable[[dict[str, Any], Any, int], Rows],
    arrays: dict[str, jax.Array],
    *,
    weights: RowWeights | None = None,
    first_piece: int = 0,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """kv [B, heads, pieces, V, F] in `dtype`, and k_sum [B, heads, pieces, F] in float32.

    Args:
      x, other: k and v, or q and do.
      rows_at: the rows of some steps, from the refs of `arrays`, the first step and their number.
      arrays: by steps, [B, N] or [B, G, N]; a row's features are multiplied by "adds". For
        sums over keys they include `powers.arrays`.
      first_piece: the pieces before it are left out.
    """
    block = pieces.block_within(config.state_block)
    height, width = tiles.padded(spec.V), tiles.padded(spec.F)
    if in_parts(spec):
        height, width = min(height, STATE_BLOCK), min(width, STATE_BLOCK)
    across, blocks = pl.cdiv(spec.F, width), pl.cdiv(spec.V, height) * pl.cdiv(spec.F, width)
    # A thread holds one row in every `apart` of a tile, and adds up those alone.
    apart = min(block, config.state_warps * THREADS_BY_ELEMENTS // width)
    axes = (1, 2) if spec.layout == "bthd" else (2, 1)
    length, heads = (x.shape[axis] for axis in axes)
    group = heads // spec.G
    count = pieces.count - first_piece
    by_rows = [w for w in weights or () if isinstance(w, jax.Array)]

    def kernel(
        refs: dict[str, Any],
        x_ref: Any,
        other_ref: Any,
        weight_refs: list[Any],
        kv_ref: Any,
        k_sum_ref: Any,
    ) -> None:
        program = piece_id()
        other_columns, x_columns = tiles.all_columns(spec.V), tiles.all_columns(spec.F)
        if blocks > 1:
            other_columns = Slice(program % blocks // across * height, height, spec.V)
            x_columns = Slice(program % across * width, width, spec.F)
            program //= blocks
        piece = first_piece + program
        power = powers.of_head(refs)

        def add_tile(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            kv, k_sum = sums  # [V, F], [apart, F]
            first = pieces.first_row(piece, i, block)
            rows = rows_at(refs, first, block)
            x = tiles.load_tile(x_ref, rows, x_columns)  # [C, D]
            other = tiles.load_tile(other_ref, rows, other_columns)  # [C, V]
            # [C, F]
            features = powers.times(power, mapping.features_of(spec, x, rows, x_columns))
            wide = mapping.wide_features(spec)
            if "adds" in refs:
                features, wide = tiles.scale_rows(features, refs["adds"], first), True
            if weight_refs:
                # [C, 1]
                features, wide = features * tiles.load_rows(weight_refs[0], rows)[:, None], True
            elif weights is not None:
                features, wide = features * weights.features, True
            unrounded = features
            features = products.rounded(spec, features, wide=wide)
            kv += products.product(spec, other, features, wide=wide, trans_a=True)
            if weights is not None:
                if weights.k_sum is None:
                    return kv, k_sum
                if products.of_initial_sums(spec):
                    features = unrounded
                features *= tiles.load_rows(weight_refs[1], rows)[:, None]  # [C, 1]
            return kv, k_sum + jnp.sum(features.reshape(-1, apart, width), axis=0)

        sums = jnp.zeros((height, width), jnp.float32), jnp.zeros((apart, width), jnp.float32)
        kv, k_sum = jax.lax.fori_loop(0, pieces.turns(piece, block), add_tile, sums)
        tiles.store_matrix(kv_ref, other_columns, x_columns, powers.over(power, kv))
        k_sum = powers.over(power, jnp.sum(k_sum, axis=0))
        features_at = tiles.all_rows(x_columns)
        if blocks > 1:  # k_sum is written by one program
            once = (x_columns.index < spec.F) & (other_columns.first == 0)
            features_at = Rows(features_at.numbers, once, once)
        tiles.store_rows(k_sum_ref, features_at, k_sum)

    def at(program: Any) -> Any:
        return program // blocks if blocks > 1 else program

    return launch(
        kernel,
        "linear_attention_states",
        grid=(count * blocks, heads, spec.B),
        in_specs=[
            sequences.step_blocks(arrays, lambda p, h, b: (b, h // group)),
            sequences.sequence_block(spec, length, spec.D, lambda p, h, b: (b, h)),
            sequences.sequence_block(spec, length, spec.V, lambda p, h, b: (b, h)),
            [pl.BlockSpec((None, None, length), lambda p, h, b: (b, h, 0))] * len(by_rows),
        ],
        out_specs=sequences.state_blocks(spec, lambda p, h, b: (b, h, at(p))),
        out_shape=sequences.state_shapes(spec, heads, count, dtype),
        warps=config.state_warps,
        stages=config.state_stages,
    )(arrays, x, other, by_rows)
