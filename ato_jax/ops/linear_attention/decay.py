"""The clamps and thresholds of decays, for all backends.

A decay is the natural log of a factor, at most 0. Kernels add decays up and take exp of the sums,
or exp2 of sums to base 2. Two things have to be bounded for that.

A single decay, from below: exp(-128) is 0 in float32, so nothing stronger matters, and -inf would
turn sums into NaN.

The decay within a chunk. Pairs (i, j) of a chunk are products of decayed features,

    exp(sum decay[j+1..i]) phi(q_i) phi(k_j) = (phi(q_i) exp(c_i - m)) (phi(k_j) exp(m - c_j))

with c the prefix sums of the decays and m the sum at some row between. The two factors may become
very small and very large, although their product is at most phi(q_i) phi(k_j). So a chunk that
loses more than a threshold between m and one of its ends is `steep`, and is taken apart. Normal
float32 and bfloat16 numbers end at 2^-126 and 2^128. What the thresholds leave of that range is for
the features. They differ because m and the factors do.
"""

from __future__ import annotations

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# The strongest decay that a sum takes.
LEAST_DECAY = -128.0
# The strongest where Hopper's kernels hold decays per channel in float16, as exponents of 2: of a
# step alone 72, which stays below `MOST_LOST_OF_TURN`. exp of it is 2e-22.
LEAST_DECAY_IN_FLOAT16 = -50.0

# Thresholds, all exponents of 2.
#
# Hopper's kernels, a decay per head or step: m is the middle of a chunk of 64 rows. Both factors
# are rounded to bfloat16, and states are multiplied by the features' factor, too.
MOST_LOST_OF_CHUNK = 60.0
# The same kernels in float16. Its normal numbers lie between 2^-14 and 2^16. The decay multiplies
# features by 2^-8 to 2^8, so features are scaled to at most 2^7 before (`mosaic_gpu/powers.py`).
MOST_LOST_IN_FLOAT16 = 8.0
# Hopper's kernels, a decay per step and channel: m is the middle of a turn of 2 to 64 rows, and a
# half of two rows, which is one step, must never be steep.
MOST_LOST_OF_TURN = 80.0
# Triton's kernels, prepared features (`triton/prepared/`): m is the middle of a run of 128 rows.
# Factors from 2^-70 to 2^70 leave the features as much again.
MOST_LOST_OF_RUN = 70.0
# Triton's kernels, a decay per step and channel: m is an edge of the chunk, so that the whole chunk
# counts, and a feature's factors stand beside a state's.
MOST_LOST_AT_ONCE = 46.0
# There with exact float32 products: their exponents are differences of prefix sums of that size,
# and are exact only as far as these are.
MOST_LOST_EXACTLY = 11.5

# Multiples of this, up to 2^24 of them, are added by float32 without rounding.
EXACT_STEP = 2.0**-8


def most_lost_at_once(spec: LinearAttentionSpec) -> float:
    """How much of its log2 a channel may lose in a chunk whose pairs are all multiplied at once."""
    exact = spec.dtype == "float32" and spec.precision == "exact"
    return MOST_LOST_EXACTLY if exact else MOST_LOST_AT_ONCE
