"""The weights, recomputed from lse, and float16's powers of two, for all backward kernels.

    p_ij    = exp(s_ij - lse_i)
    dp_ij   = do_i . v_j                      with dropout, 0 where it dropped p_ij
    delta_i = out_i . do_i - dlse_i
    ds_ij   = p_ij (dp_ij - delta_i)

float16 loses precision below 6e-5 and flushes below 6e-8, where p and ds are for long sequences. In
float16 both are therefore scaled by powers of two in the products, which the sums take out again:
p, which is at most 1, by 2^WEIGHT_SHIFT, and dp - delta by `gain`, a power of two per group that
keeps the product within 2^WEIGHT_SHIFT whatever the size of v and do.

A large lse is rounded by more than float32's budget for p: at 1000 by 3e-5. So in float32 the
kernel for dq sums each query's recomputed weights, divides dq by that sum, which should be 1, and
stores the inverse for the other kernels to multiply with. With a bias that is needed in every
dtype: where it is -1e9 for all keys of a query, lse has no digit left of the logarithm of their
number. The other kernels of 16-bit inputs then get do and delta multiplied by that inverse, and
hold no row more. Rounding the product in 16 bits changes do . v against delta, by more than is left
of their difference where one key has all the weight. So rows whose inverse is within
SMALLEST_CORRECTION of 1 are left as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.attention.spec import AttentionSpec
from ato_jax.ops.attention.triton.common import (
    BIASED_UNIT,
    LOG2_E,
    exp2,
    in_log2,
    in_score_units,
    multiply_add,
    quotient,
    raw_scores_and_slope,
)
from ato_jax.ops.attention.triton.pairs import Pairs, Side

# 2^15 is half of float16's largest number, which leaves room for weights that round above 1.
WEIGHT_SHIFT = 15


class Rows(NamedTuple):
    """Rows that the dQ kernel stores for the other kernels, each [B, H, T] float32."""

    norm: jax.Array  # `norm_of` lse
    delta: jax.Array  # times the gain
    correction: jax.Array | None  # makes the weights' sum 1; None unless float32


def shift(spec: AttentionSpec) -> int:
    return WEIGHT_SHIFT if spec.dtype == "float16" else 0


def renormalises(spec: AttentionSpec) -> bool:
    return spec.dtype == "float32" or spec.bias is not None


def norm_of(spec: AttentionSpec, lse: jax.Array, sees: jax.Array) -> jax.Array:
    """lse in the scores' units; less the shift without a bias. +inf where nothing is seen."""
    norm = in_score_units(spec, lse)
    return jnp.where(sees, norm - shift(spec) if spec.bias is None else norm, jnp.inf)


def scaled_weight(
    spec: AttentionSpec, raw: jax.Array, factor: float, norm: jax.Array, fast_exp2: bool = False
) -> jax.Array:
    """The weight of a score raw * factor, times 2^shift."""
    if spec.bias is None:
        exponent = raw - norm if factor == 1 else multiply_add(raw, factor, -norm)
        return exp2(exponent, fast_exp2)
    assert factor == 1
    if shift(spec) == 0:
        return exp2(in_log2(spec, raw - norm), fast_exp2)
    log2_unit = LOG2_E / BIASED_UNIT
    return exp2(multiply_add(raw - norm, log2_unit, jnp.float32(shift(spec))), fast_exp2)


def load_gain(gain_ref: Any | None) -> jax.Array | None:
    return None if gain_ref is None else gain_ref[0, 0]


def weight_gradient(
    spec: AttentionSpec, dp: jax.Array, kept: jax.Array | None, gain: jax.Array | None
) -> jax.Array:
    """The gradient of p from dp = do . v, 0 where dropout dropped p, times the gain."""
    if kept is not None:
        dp = jnp.where(kept, dp * (1 / (1 - spec.dropout_rate)), 0.0)
    return dp if gain is None else dp * gain


def without_powers(
    spec: AttentionSpec, sums: jax.Array, gain: jax.Array | None, scale: float = 1.0
) -> jax.Array:
    """Sums over ds, times `scale`, with the powers of two taken out."""
    factor: Any = scale * 2.0 ** -shift(spec)
    return sums * (factor if gain is None else factor / gain)


def weights(
    pairs: Pairs,
    h: Any,
    masked: bool,
    query: Side,
    key: Side,
    products: jax.Array,
    norm: jax.Array,
    fast_exp2: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """p * 2^shift from q . k, and the softcap's slope."""
    raw, slope = raw_scores_and_slope(pairs.spec, products)
    raw, factor = pairs.biased(h, raw, query, key)
    seen = pairs.visible(h, masked, query, key)
    if seen is not None:
        raw = jnp.where(seen, raw, -jnp.inf)
    return scaled_weight(pairs.spec, raw, factor, norm, fast_exp2), slope


def correction_of(spec: AttentionSpec, total: jax.Array) -> jax.Array:
    """The inverse of the sum of a query's weights, from the sum of these times 2^shift."""
    if shift(spec):
        total = total * 2.0 ** -shift(spec)
    return 1 / jnp.where(total == 0, 1.0, total)


def sink_shares(
    spec: AttentionSpec, sinks: jax.Array | None, rows: Rows
) -> jax.Array | float:
    """The sink's share of each query's weights, [B, H, T]."""
    if sinks is None:
        return 0.0
    norm = rows.norm + shift(spec) if spec.bias is None else rows.norm
    exponent = in_log2(spec, in_score_units(spec, sinks)[:, None] - norm)
    # At most 1, also where float16's shift rounds a norm of 1e9 down.
    shares = jnp.exp2(jnp.minimum(exponent, 0.0))
    return shares if rows.correction is None else shares * rows.correction


def plain_delta(spec: AttentionSpec, rows: Rows, gain: jax.Array | None) -> jax.Array:
    """delta without the gain, [B, H, T]."""
    if gain is None:
        return rows.delta
    return rows.delta / jnp.repeat(gain, spec.H // spec.G, axis=1)[..., None]


def gain_spec(share: int, parts: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1), lambda n, h, b: (quotient(b, parts), quotient(h, share)))
