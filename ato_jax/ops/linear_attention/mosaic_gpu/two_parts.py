"""Where the gradients' walks multiply a factor in two parts: rounded, and what that leaves off.

On pairs and on states `query_gradient.py` and `key_gradient.py` have to agree: what both leave for
the gradient of a decay is to cancel.
"""

from __future__ import annotations

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Chunks at a sequence's start whose queries see few keys. By emulation at T = 65,536 and inputs of
# scale 0.01, over 40 draws, the worst row is 3.8 times its limit in bfloat16 and 1.6 times in
# float16; with two parts in so many chunks 0.87 and 0.47 times.
FEW_CHUNKS = {"bfloat16": 2, "float16": 1}


def rounds_pairs(spec: LinearAttentionSpec, some_steep: bool) -> bool:
    """Whether g_i . v_j is rounded in both walks, so that the sums for the decays' gradient are of
    the same pairs; else they multiply what rounding leaves off. Not where a sum over all steps may
    cancel; and of two heads in a tile the walk from the end loses more than this one gains."""
    if adds_up_e(spec) or spec.dtype == "float16":  # whose rounding goes by the largest of a row
        return False
    return spec.decay == "step" and not some_steep and frame.heads_of_tile(spec) == 1


def adds_up_e(spec: LinearAttentionSpec) -> bool:
    """Whether the gradient of a state's k_sum, a sum of e_i phi'_i over all queries, is wanted. The
    e_i have either sign and features of elu + 1 have one, so e_i cancels in every channel alike,
    and what rounding g_i . v_j leaves off e_i does not: up to 6e-3 of the sum."""
    return spec.normalize and spec.initial_state


def splits_states(spec: LinearAttentionSpec) -> bool:
    """Whether both walks multiply a state in two parts, rounded and what that leaves off.

    Products of features of either sign cancel, and rounding does not. So what a rounded S and R
    leave off adds up in the gradient of a decay per head, a sum over all steps: 8e-2 of it at 1,024
    steps of a decay of -1, where features of one sign have 1e-2.
    """
    # With a normaliser R has a vector beside it, for which shared memory has no room, too.
    one_sign = spec.feature_map.nonnegative
    return spec.decay == "head" and not spec.normalize and not one_sign


def splits_in_walk(spec: LinearAttentionSpec, some_steep: bool) -> bool:
    """Whether the kernel of such pieces does. Where a tile is one head's, all of its chunks are
    steep or none is, and of a steep one no state is left that could err later."""
    return splits_states(spec) and not (some_steep and frame.heads_of_tile(spec) == 1)


def chunks_in_two_parts(spec: LinearAttentionSpec) -> int:
    """In how many chunks of a sequence's start phi(k), and S in bfloat16, are multiplied in two
    parts, rounded and what that leaves off.

    sum_j (g_i . v_j - e_i) phi(k_j) cancels where keys are nearly alike, and the roundings of
    phi(k_j) do not: in all, beside either term, they are about a rounding, and where g_i . out_i is
    small by chance many. Both terms of row i are about 1 / sqrt(i) of the first row's. Further on,
    the error is small beside half the RMS row of 65,536 rows, which a row counts as at least.
    """
    if not spec.normalize or spec.decay is not None or spec.segments:
        return 0  # with segments few keys are seen everywhere
    if frame.heads_of_tile(spec) == 1:
        # It spills 184 bytes in place of 52, and at D = 128 a call with gradients takes 1.11 times
        # as long on an H200; with two heads in a tile 1.005 times.
        return 0
    return FEW_CHUNKS[spec.dtype]
