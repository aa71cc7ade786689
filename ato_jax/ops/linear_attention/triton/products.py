"""Products of tiles on the tensor cores: how a spec rounds their factors, and how little.

bfloat16 calls multiply bfloat16, float16 calls float16, or TF32 where a factor may leave float16's
range, and float32 calls multiply exactly or in TF32. All sums are float32.

Rounding errors that are alike add up over a sequence instead of averaging out. So what may be
alike from row to row, such as the weights of pairs or a state, is multiplied in two parts: the
rounded factor, and what its rounding left.

A sum over a tile's rows that is wanted tile after tile is a product with ones, or is added up
elementwise and summed once at the end: a reduction across threads for each tile costs more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton.calls import in_parts
from ato_jax.triton.arithmetic import EXACT, round_to_bfloat16, round_to_tf32
from ato_jax.triton.tiles import COLUMNS, padded

# The product of ones [SUM_ROWS, C] with a tile [C, F] is the tile's sum over its rows, in each of
# SUM_ROWS rows. It costs nothing beside the other products at the height of Hopper's WGMMA, 64.
SUM_ROWS = 64
PARTS = 16  # rows in which sums of rows are kept, see `row_parts`
# `as_accumulated` would fill the shared memory with a larger identity matrix.
LARGEST_IDENTITY = 128


def operand(spec: LinearAttentionSpec, x: jax.Array, *, wide: bool = False) -> jax.Array:
    """`x` as the tensor cores take it: bfloat16, float16, or TF32 or float32 in float32.

    `wide` says that x may leave float16's range (a sum over keys, a weight, a quotient): float16
    calls then use TF32, which has float16's mantissa and float32's range.
    """
    if spec.dtype == "bfloat16":
        return x.astype(jnp.bfloat16)
    if spec.dtype == "float16":
        if not wide:
            return x.astype(jnp.float16)
        # TF32 holds every float16 exactly.
        return x.astype(jnp.float32) if x.dtype == jnp.float16 else round_to_tf32(x)
    x = x.astype(jnp.float32)  # from bfloat16 in a `FineSpec`'s call
    return round_to_tf32(x) if spec.precision == "tf32" else x


def rounded(spec: LinearAttentionSpec, x: jax.Array, *, wide: bool = False) -> jax.Array:
    """float32 x rounded as the `operand` is, in float32."""
    if spec.dtype != "bfloat16":
        return operand(spec, x, wide=wide).astype(jnp.float32)
    return round_to_bfloat16(x)


def left_by_rounding(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    return x - rounded(spec, x)


def product(
    spec: LinearAttentionSpec,
    a: jax.Array,
    b: jax.Array,
    *,
    wide: bool = False,
    trans_a: bool = False,
    trans_b: bool = False,
    in_parts: bool = True,
) -> jax.Array:
    """a @ b in float32, the factors rounded to operands.

    Without `in_parts` exact float32 products are multiply-adds: slower, and without the shared
    memory that three bfloat16 parts of a factor take.
    """
    exact = spec.dtype == "float32" and spec.precision == "exact"
    return plgpu.dot(
        operand(spec, a, wide=wide),
        operand(spec, b, wide=wide),
        trans_a=trans_a,
        trans_b=trans_b,
        # DEFAULT is TF32 for float32 operands, and rounds no others.
        precision=(EXACT if in_parts else jax.lax.Precision.HIGHEST)
        if exact
        else jax.lax.Precision.DEFAULT,
    )


def identity(spec: LinearAttentionSpec, size: int) -> jax.Array | None:
    """[size, size], with which `as_accumulated` multiplies; None where that product would round,
    or the matrix would fill the shared memory."""
    if spec.dtype == "float32" or size > LARGEST_IDENTITY:
        return None
    index = jnp.arange(size, dtype=jnp.int32)
    return operand(spec, jnp.where(index[:, None] == index[None, :], 1.0, 0.0))


def as_accumulated(tile: jax.Array, one: jax.Array | None) -> jax.Array:
    """A loaded tile [C, D] in float32, in the layout of the tensor cores' accumulators.

    The tile is multiplied by the identity matrix, exactly: the tensor cores, idle at this point,
    widen it and lay it out. Otherwise the tile would be converted through shared memory with bank
    conflicts, and all that is computed from it would be computed in two layouts.
    """
    if one is None:
        return tile.astype(jnp.float32)
    return plgpu.dot(tile, one)


def weighted_sum(spec: LinearAttentionSpec, w: jax.Array, rows: jax.Array) -> jax.Array:
    """w @ rows, the weights w [.., C] of pairs rounded less than operands are.

    Weights that are nearly alike are rounded alike, and the errors add up. In bfloat16 they exceed
    the budget: there, what the rounding left is multiplied, too.
    """
    found = product(spec, w, rows, wide=True)
    if spec.dtype == "bfloat16":
        found += product(spec, left_by_rounding(spec, w), rows)
    return found


def add_weighted_sum(
    spec: LinearAttentionSpec, sums: jax.Array, w: jax.Array, rows: jax.Array
) -> jax.Array:
    """sums + `weighted_sum`."""
    if not in_parts(spec) or spec.dtype != "bfloat16":
        return sums + weighted_sum(spec, w, rows)

    # A loop of two turns: where one of two products is added to the other, Triton gives each
    # warpgroup the whole of the first one, in a layout of its own.
    def add(turn: Any, sums: jax.Array) -> jax.Array:
        return sums + product(spec, jnp.where(turn == 0, w, left_by_rounding(spec, w)), rows)

    return jax.lax.fori_loop(0, 2, add, sums)


def rounds_both_signs(spec: LinearAttentionSpec) -> bool:
    """Whether a query's features are multiplied with a state in two parts: rounded, and what that
    leaves off. Products of features of either sign cancel, and four roundings, of both sides'
    features, the state and the result, then come to twice the last one, which is the limit."""
    phi = spec.feature_map
    is_rounded = spec.dtype == "bfloat16" and phi.name != "identity"
    return is_rounded and not phi.nonnegative and not spec.normalize


def read_by_features(
    spec: LinearAttentionSpec, features: jax.Array, state: jax.Array, *, trans_b: bool = False
) -> jax.Array:
    """The features of queries [C, F] @ state; they are float32 where `rounds_both_signs`."""
    found = product(spec, features, state, wide=True, trans_b=trans_b)
    if rounds_both_signs(spec):
        found += product(spec, left_by_rounding(spec, features), state, trans_b=trans_b)
    return found


def read_state(spec: LinearAttentionSpec, rows: jax.Array, state: jax.Array) -> jax.Array:
    """rows @ state, the state rounded as little as weights are in `weighted_sum`."""
    found = product(spec, rows, state, wide=True)
    if spec.dtype == "bfloat16" and state.dtype == jnp.float32:
        found += product(spec, rows, left_by_rounding(spec, state))
    return found


def as_columns(spec: LinearAttentionSpec, vector: jax.Array) -> jax.Array:
    """float32 [n] as [n, 16] operands, the sum over whose columns is the vector.

    A vector rounded once would be the least precise part of a product with it. So column 0 is the
    rounded vector, column 1 what the rounding left, and the others are zero.
    """
    column = jnp.arange(COLUMNS, dtype=jnp.int32)[None, :]
    rest = vector - rounded(spec, vector, wide=True)
    columns = jnp.where(column == 0, vector[:, None], 0.0)
    return operand(spec, jnp.where(column == 1, rest[:, None], columns), wide=True)


def of_initial_sums(spec: LinearAttentionSpec) -> bool:
    """Whether dz is a gradient that the caller sees, that of an initial state's k_sum.

    It is sum_i e_i u_i. Where keys and values are alike, all its numbers are alike, too: one sum of
    terms of either sign, of which roundings of single terms may be more than the budget. So u, and
    the weights that make e, are multiplied in two parts.
    """
    return spec.initial_state and spec.normalize and spec.dtype == "bfloat16"


def sum_by_normalizer(spec: LinearAttentionSpec, u: jax.Array, e: jax.Array) -> jax.Array:
    """sum_i e_i u_i, [F, 16].

    Args:
      u: [C, F], float32 where `of_initial_sums`.
      e: [C, 16], from `as_columns`.
    """
    found = product(spec, u, e, wide=True, trans_a=True)
    if of_initial_sums(spec):
        found += product(spec, left_by_rounding(spec, u), e, trans_a=True)
    return found


def row_parts(tile: jax.Array) -> jax.Array:
    """[16, F], whose sum over the 16 rows is the sum over all rows of a loaded tile [C, F].

    Each thread adds up the elements that it holds: nothing passes between threads.
    """
    return jnp.sum(tile.reshape(-1, PARTS, tile.shape[1]), axis=0)


def in_each_row(spec: LinearAttentionSpec, rows: int, parts: jax.Array) -> jax.Array:
    """[rows, F], the sum of parts [16, F] in each row.

    Half the factor's rows are sums of two parts, rounded, and the other half what the rounding
    left: rounded once, equal parts would all be off by the same amount.
    """
    pairs = jnp.sum(parts.reshape(PARTS // 2, 2, -1), axis=1)  # [8, F]
    high = rounded(spec, pairs, wide=True)
    is_high = jnp.arange(2, dtype=jnp.int32)[:, None, None] == 0
    both = jnp.where(is_high, high[None], (pairs - high)[None])  # [2, 8, F]
    ones = jnp.ones((rows, PARTS), jnp.float32)
    return product(spec, ones, both.reshape(PARTS, -1), wide=True)


def no_state(spec: LinearAttentionSpec, rows: int) -> tuple[jax.Array, jax.Array]:
    """Zeros to add to: kv [V, F], and k_sum in each of some rows [rows, F]."""
    height, width = padded(spec.V), padded(spec.F)
    return jnp.zeros((height, width), jnp.float32), jnp.zeros((rows, width), jnp.float32)
