"""Powers of two for float16 in `wide_states.py` and `wide_runs.py`, [B, heads] float32 each.

Sums and features may be far below float16's smallest normal number, 2^-14, or above its largest
one. So each operand is multiplied by a power of two before it is rounded. The power brings the
largest magnitude of the operand, or a bound of it, to between `LARGEST` of `powers.py` and twice
that. There is one power for each head, unless the table says otherwise; XLA computes them:

    power         operand, and what the power follows from
    keys     c    phi(k) c, from the largest phi(k)
    state    s    S c s, from the bound c sum_j max phi(k_j) max |v|
    queries  p    phi(q) inverse p / c, from the largest phi(q) inverse / c: the kernels multiply z
                  by c, so they compute inverse / c
    sums     r    R p r / c, from the bound p / c sum_i max phi(q_i) inverse_i max |g_i|
    pairs    w    (g_i . v_j - e_i) w, from the bound D max |g| max |v| + max |e|. In DQ, where e is
                  not known yet, each row has its own w, from its g_i
    shares   f    phi'(q_i) . phi(k_j) f, from D times the largest magnitudes of the two scaled
                  factors. In OUT phi(q_i) has a power for each row, and so has the product. A row
                  that is far below the bound is multiplied by a further power in each chunk
                  (`add_chunk` in `wide_run_rows.py`)

The kernels divide their results by the powers, or the powers cancel in a quotient. A number keeps
all of its digits down to 2^-28 of the largest number with the same power.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import frame, powers
from ato_jax.ops.linear_attention.mosaic_gpu.powers import power_of
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState

# The columns of the array of powers that a pass reads. SUMS is s or r. PAIRS is w; in OUT and DQ,
# where each row has its own power, it is D times the largest magnitude of the other factor instead.
KEYS, SUMS, PAIRS, QUERIES, SHARES = range(5)
# The largest power: products of two powers, and of a power with a sum, stay finite in float32.
MOST = 2.0**60
MOST_OF_ROWS = 2.0**40  # the largest further power of a row, whose sum is scaled by others already


class OfKeys(NamedTuple):
    """Numbers of each head of keys, [B, G] float32."""

    keys: jax.Array  # c
    state: jax.Array  # s
    features: jax.Array  # the largest magnitude of phi(k) c
    values: jax.Array  # the largest magnitude of v


class OfQueries(NamedTuple):
    """Powers of each query head, [B, H] float32."""

    queries: jax.Array  # p
    sums: jax.Array  # r
    pairs: jax.Array  # w
    shares: jax.Array  # f


def of_keys(spec: LinearAttentionSpec, inputs: Inputs) -> OfKeys | None:
    """The powers of keys and states; None in bfloat16, which needs none."""
    if not mosaic.has_units(frame.tiling(spec).dtype):
        return None
    rises, rows = powers.largest_of_keys(spec, inputs)
    rows = spec.feature_map(rows) if rises else rows
    largest = jnp.max(rows, axis=2)
    keys = power_of(largest, powers.most_of(spec))
    values = _finite(powers.largest_of_rows(spec, jnp.abs(inputs.v)))
    values = jnp.max(values, axis=2)
    bound = jnp.sum(rows * keys[..., None], axis=2) * values
    if inputs.initial_state is not None:
        bound += _largest(inputs.initial_state) * keys
    return OfKeys(keys, power_of(bound, MOST), largest * keys, values)


def of_queries(
    spec: LinearAttentionSpec,
    by: OfKeys,
    features: jax.Array,
    cotangents: jax.Array,
    e: jax.Array,
    end: LinearState | None,
) -> OfQueries:
    """The powers that follow from queries, with H = G.

    Args:
      by: the powers of keys.
      features: the largest magnitude of phi(q_i) inverse_i / c, [B, H, T or more].
      cotangents: the largest magnitude of g_i, of the same shape.
      e: of each row, of the same shape. All three are 0 in rows behind the last one.
      end: the cotangent of the state behind the sequence.
    """
    features, cotangents = _finite(features), _finite(cotangents)
    largest = jnp.max(features, axis=2)
    queries = power_of(largest, MOST)
    bound = jnp.sum(features * queries[..., None] * cotangents, axis=2)
    if end is not None:
        bound += _largest(end) * queries / by.keys
    of_pairs = jnp.max(cotangents, axis=2) * by.values * spec.D
    of_pairs += jnp.max(_finite(jnp.abs(e)), axis=2)
    of_shares = largest * queries * by.features * spec.D
    return OfQueries(queries, *(power_of(x, MOST) for x in (bound, of_pairs, of_shares)))


def _finite(x: jax.Array) -> jax.Array:
    """Rows that are not finite count as 0, so that they do not spoil the power of all others."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def _largest(state: LinearState) -> jax.Array:
    return jnp.max(_finite(jnp.abs(state.kv)), axis=(2, 3))
