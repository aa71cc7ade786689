"""Powers of two for float16 in the passes over runs of heads of 129 to 256 columns.

Sums and features may be far below float16's smallest normal number, 2^-14, or above its largest. So
whatever is rounded is multiplied by a power of two first, one for each head unless the table says
otherwise, which brings the largest magnitude, or a bound of it, to between `LARGEST` and twice
that:

    keys      c     phi(k) c
    state     s     S c s, whose bound is c sum_j max phi(k_j) max |v|
    queries   p     phi(q) inverse p / c: kernels find inverse / c, since z comes times c
    sums      r     R p r / c, whose bound is p / c sum_i max phi(q_i) inverse_i max |g_i|
    pairs     w     (g_i . v_j - e_i) w, whose bound is D max |g| max |v| + max |e|; in DQ, where e
                    is not known, w is the row's, by its g_i
    shares    f     phi'(q_i) . phi(k_j) f, whose bound is D times both largest magnitudes, as their
                    powers leave them; in OUT phi(q_i) has a power of its own, and f is the row's.
                    A row far below the bound is raised once more in each chunk, before it is
                    rounded: `add_chunk` in `wide_run_rows.py`

Powers are undone where what is found leaves the kernels, or cancel in a quotient. A number keeps
all of its digits down to 2^-28 of the largest one that has the same power.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import frame, powers
from ato_jax.ops.linear_attention.mosaic_gpu.powers import power_of
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState

# The columns of the array in which a pass gets its powers. SUMS is s or r. PAIRS is w; or where the
# power is a row's, D times the largest number that its numbers are multiplied with.
KEYS, SUMS, PAIRS, QUERIES, SHARES = range(5)
# No power of a bound is larger: products of two, and of one with a sum, stay finite in float32.
MOST = 2.0**60
MOST_OF_ROWS = 2.0**40  # by which a sum is multiplied that has other powers already


class OfKeys(NamedTuple):
    """[B, G] float32 each."""

    keys: jax.Array  # c
    state: jax.Array  # s
    features: jax.Array  # the largest magnitude of phi(k) c
    values: jax.Array  # that of v


class OfQueries(NamedTuple):
    """[B, H] float32 each."""

    queries: jax.Array  # p
    sums: jax.Array  # r
    pairs: jax.Array  # w
    shares: jax.Array  # f


def of_keys(spec: LinearAttentionSpec, inputs: Inputs) -> OfKeys | None:
    """None where numbers are only rounded."""
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
    """H = G.

    Args:
      features: the largest magnitude of phi(q_i) inverse_i / c, [B, H, T or more].
      cotangents: that of g_i.
      e: as the kernels find it. All three are 0 in rows that there are not.
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
    """Rows that are not finite are no reason to lose all others."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def _largest(state: LinearState) -> jax.Array:
    return jnp.max(_finite(jnp.abs(state.kv)), axis=(2, 3))
