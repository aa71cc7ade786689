"""Powers of two for float16 in the causal kernels: features are multiplied by them before rounding.

`causal.py` calls `powers_of_keys`. Features may be far below float16's smallest normal number,
2^-14: elu(-14) + 1 is 8e-7. Features of keys are multiplied by c_k [B, G], one number for each
head, and those of queries by c_i, one for each row. These bring the largest feature of the head or
the row to between `LARGEST` and twice that, and features down to 2^-28 of it keep all digits. XLA
computes c_k ahead of the kernels, and `output.py` computes c_i. The gradients need no c_i, since
they round phi(q) only as phi(q) inverse, which has a unit. With phi(k) c_k:

    S, z and the state behind the sequence   are multiplied by c_k
    pairs, denominators and eps of out       are multiplied by c_i c_k, which cancels in out
    inverse, R and u                         are divided by c_k
    the unit of phi(q) inverse in a chunk    is its largest magnitude, divided by 2^14
    dk                                       is multiplied by c_k at the end

With a decay phi(k) is scaled to the middle row of its chunk: c_k leaves room for a factor of
2^`MOST_LOST_IN_FLOAT16`, and chunks that lose more are steep. phi(q) inverse is scaled from the
middle row on. Its unit is then a power of two, so that both walks of the gradients round it to the
same digits (`query_gradient_rows.as_keys_see`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import F32
from ato_jax.ops.linear_attention.mosaic_gpu import frame, value_blocks
from ato_jax.ops.linear_attention.mosaic_gpu.feature_maps import RISING
from ato_jax.ops.linear_attention.mosaic_gpu.narrow import Narrow
from ato_jax.ops.linear_attention.mosaic_gpu.value_blocks import Cut
from ato_jax.ops.linear_attention.scans.chunks import most_lost
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState

LARGEST = 2.0**14
# No power is larger, so products of two stay far from float32's limits. The second bound is for
# calls with rows beyond the end, or with columns that a head does not have: there x is 0, and its
# feature, which may be 1, is multiplied by the power of the head's keys, too.
MOST, MOST_BESIDE_ZEROS = 2.0**30, 2.0**15
# Maps whose features are no larger than x + 1. One power is no room for those of others, which of
# one head may be far apart.
FITTING = "elu1", "relu", "softplus", "identity", "silu"
MOST_OF_WEIGHTS = 2.0**100  # of phi(q) inverse
EXPONENT = 0x7F800000  # the exponent bits of a float32


def power_of(largest: jax.Array, most: float = MOST, to: float = LARGEST) -> jax.Array:
    """The power of two, at most `most`, that brings `largest` to between `to` and twice that;
    with `most` itself it may stay below. Kernels call this, too."""
    bits = lax.bitcast_convert_type(jnp.maximum(largest, to / most), jnp.int32) & EXPONENT
    return to / lax.bitcast_convert_type(bits, F32)


def powers_of_keys(spec: LinearAttentionSpec, inputs: Inputs) -> jax.Array | None:
    """[B, G] float32, for the kernels' heads; None where features need none."""
    if not mosaic.has_units(frame.tiling(spec).dtype):
        return None
    rises, rows = largest_of_keys(spec, inputs)
    largest = jnp.max(rows, axis=2)
    phi, room = spec.feature_map, room_for_decay(spec)
    found = power_of(phi(largest) if rises else largest, most_of(spec) / room, LARGEST / room)
    # Blocks of a head's values are heads of the kernels, which share the keys.
    return value_blocks.of_blocks(spec, found, 1) if isinstance(spec, Cut) else found


def largest_of_keys(spec: LinearAttentionSpec, inputs: Inputs) -> tuple[bool, jax.Array]:
    """Each key's largest feature, [B, G, S] float32; or, if the first value says that the map
    rises, the x of that feature. Rows that do not count, or are not finite, have the least there
    is."""
    rises, phi = spec.feature_map.name in RISING, spec.feature_map
    rows = largest_of_rows(spec, inputs.k if rises else jnp.abs(phi(inputs.k.astype(F32))))
    counts = jnp.isfinite(rows)
    if inputs.kv_lengths is not None:
        counts &= jnp.arange(spec.T, dtype=jnp.int32) < inputs.kv_lengths[:, None, None]
    return rises, jnp.where(counts, rows, -65504.0 if rises else 0.0)


def largest_of_rows(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    """The largest number of each row of x [B, S, G, columns], or as the layout has it: [B, G, S]
    float32."""
    rows = jnp.max(x, axis=3).astype(F32)
    # Without the barrier XLA would fuse the following steps, on few numbers, into the pass over x.
    rows = lax.optimization_barrier(rows)
    return jnp.swapaxes(rows, 1, 2) if spec.layout == "bthd" else rows


def room_for_decay(spec: LinearAttentionSpec) -> float:
    """By how much a decay may raise features of keys, beside the chunk's middle."""
    return 1.0 if spec.decay is None else 2.0 ** most_lost(spec)


def _has_zeros(spec: LinearAttentionSpec) -> bool:
    return spec.T % frame.C != 0 or isinstance(spec, Narrow) and spec.width < spec.D


def most_of(spec: LinearAttentionSpec) -> float:
    return MOST_BESIDE_ZEROS if _has_zeros(spec) else MOST


def largest_weights(
    spec: LinearAttentionSpec,
    of_rows: jax.Array,
    inverse: jax.Array,
    gates: jax.Array | None = None,
) -> jax.Array:
    """Divisors that bring phi(q) inverse of each row to at most `LARGEST`, or twice that where q is
    0.

    Args:
      of_rows: each query's largest feature, over all columns or over each half of them, [1 or 2, B,
        H, T up to a whole chunk].
      gates: with a decay as `output` has them: phi(q) inverse carries that since the middle of a
        chunk that is not steep.
    """
    of_rows = jnp.max(of_rows, axis=0)
    if _has_zeros(spec):
        of_rows = jnp.maximum(of_rows, 0.5)
    if gates is not None:
        rows = gates.reshape(*gates.shape[:2], -1, frame.C)
        middle, last = rows[..., frame.C // 2 - 1, None], rows[..., frame.C - 1, None]
        since = jnp.where(frame.is_steep(spec, middle, last), 0.0, rows - middle)
        lasting = jnp.exp2(since).reshape(gates.shape)
        of_rows = of_rows * jnp.repeat(lasting, spec.H // spec.G, axis=1)
    return of_rows * inverse / LARGEST


def next_power(x: jax.Array) -> jax.Array:
    """The least power of two above each x, which is positive and normal."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & EXPONENT
    return 2.0 * lax.bitcast_convert_type(bits, F32)


def times(state: LinearState | None, power: jax.Array) -> LinearState | None:
    """The state times a number for each head, [B, G]."""
    if state is None:
        return None
    return LinearState(state.kv * power[..., None, None], state.k_sum * power[..., None])
