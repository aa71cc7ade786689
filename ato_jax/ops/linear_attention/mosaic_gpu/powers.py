"""Powers of two by which float16 features are multiplied before they are rounded.

Features may be far below float16's smallest normal number, 2^-14: elu(x) + 1 of -14 is 8e-7. Where
causal kernels take them, features of queries and of keys are multiplied by c_q [B, H] and c_k
[B, G], one number per head, which bring the head's largest feature to between `LARGEST` and twice
that. Features down to 2^-28 of it then have all of their digits. With phi_q c_q and phi_k c_k:

    S, z and the state behind the sequence   times c_k
    pairs, denominators and eps              times c_q c_k, which cancels in out
    inverse, R and u                         divided by c_k: phi(q) is not rounded without them
    the unit of phi(q) inverse in a chunk    the largest of it, divided by 2^14
    dk                                       times c_k at the end
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import F32
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.narrow import Narrow
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState

LARGEST = 2.0**14
# No power is larger, so that products of two are far from float32's ends. The second bound is for
# calls with rows behind the end, or with columns that a head does not have: these are zeros, whose
# features, of up to 1, are multiplied by the power, too.
MOST, MOST_BESIDE_ZEROS = 2.0**30, 2.0**15
RISING = "elu1", "relu", "softplus"
EXPONENT = 0x7F800000  # the bits of float32 that are a normal number's exponent


class Powers(NamedTuple):
    q: jax.Array  # [B, H] float32
    k: jax.Array  # [B, G]
    q_rows: jax.Array  # [B, H, T up to a whole chunk]: the largest feature of each query


def powers_of(spec: LinearAttentionSpec, inputs: Inputs) -> Powers | None:
    """None where features need none."""
    if not mosaic.has_units(frame.tiling(spec).dtype):
        return None
    rises, phi = spec.feature_map.name in RISING, spec.feature_map

    def largest_of_rows(x: jax.Array) -> jax.Array:
        x = jnp.max(x if rises else jnp.abs(phi(x.astype(F32))), axis=3).astype(F32)
        return jnp.swapaxes(x, 1, 2) if spec.layout == "bthd" else x

    # XLA would else put one of the sums over columns into the pass that writes all heads, and read
    # its columns one after the other.
    of_q, of_k = lax.optimization_barrier([largest_of_rows(x) for x in (inputs.q, inputs.k)])
    # All heads at once, [B, H + G, T]: a launch takes longer to start than to run.
    rows = jnp.concatenate([of_q, of_k], axis=1)
    counts = jnp.isfinite(rows)
    if inputs.kv_lengths is not None:
        counts &= jnp.arange(spec.T, dtype=jnp.int32) < inputs.kv_lengths[:, None, None]
    rows = jnp.where(counts, rows, -65504.0 if rises else 0.0)
    if rises:
        rows = phi(rows)
    most = MOST_BESIDE_ZEROS if _has_zeros(spec) else MOST
    largest = jnp.maximum(jnp.max(rows, axis=2), LARGEST / most)
    bits = lax.bitcast_convert_type(largest, jnp.int32) & EXPONENT
    found = LARGEST / lax.bitcast_convert_type(bits, F32)
    q_rows = jnp.pad(rows[:, : spec.H], ((0, 0), (0, 0), (0, -spec.T % frame.C)))
    return Powers(found[:, : spec.H], found[:, spec.H :], q_rows)


def _has_zeros(spec: LinearAttentionSpec) -> bool:
    return spec.T % frame.C != 0 or isinstance(spec, Narrow) and spec.width < spec.D


def largest_weights(
    spec: LinearAttentionSpec, of_features: Powers, inverse: jax.Array
) -> jax.Array:
    """What phi(q) inverse of each row is divided by, so that it is at most `LARGEST`, or twice that
    where it is of zeros."""
    of_rows = of_features.q_rows
    if _has_zeros(spec):
        of_rows = jnp.maximum(of_rows, 0.5)
    return of_rows * inverse / LARGEST


def times(state: LinearState | None, power: jax.Array) -> LinearState | None:
    """The state times a number for each head, [B, G]."""
    if state is None:
        return None
    return LinearState(state.kv * power[..., None, None], state.k_sum * power[..., None])
