"""Which operands of the gradients are multiplied in two parts: rounded, and what rounding left off.

`query_gradient.py` and `key_gradient.py` ask these functions. For pairs and states both have to do
the same, since the same pair has to cancel in the gradient of a decay.
"""

from __future__ import annotations

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Chunks at a sequence's start whose queries see few keys. Emulated at T = 65,536 with inputs of
# scale 0.01, over 40 draws, the error of the worst row is 3.8 times its limit in bfloat16 and 1.6
# times in float16; with two parts in so many chunks it is 0.87 and 0.47 times.
FEW_CHUNKS = {"bfloat16": 2, "float16": 1}


def rounds_pairs(spec: LinearAttentionSpec, some_steep: bool) -> bool:
    """Whether both walks round g_i . v_j, so that the sums for the decays' gradient contain the
    same pairs; otherwise both multiply it in two parts. Two parts are needed where a sum over all
    steps may cancel. With two heads in a tile the walk over keys would lose more time by rounding
    than this one gains."""
    if adds_up_e(spec) or spec.dtype == "float16":  # float16 rounds in units of rows
        return False
    return spec.decay == "step" and not some_steep and frame.heads_of_tile(spec) == 1


def adds_up_e(spec: LinearAttentionSpec) -> bool:
    """Whether a call wants the gradient of a state's k_sum, the sum of e_i phi'_i over all queries.
    The e_i have either sign and features of elu + 1 have one, so the e_i cancel in the sum, while
    the errors of a rounded g_i . v_j in e_i do not: up to 6e-3 of the sum."""
    return spec.normalize and spec.initial_state


def splits_states(spec: LinearAttentionSpec) -> bool:
    """Whether both walks multiply a state in two parts, rounded and what rounding left off.

    Products of features of either sign cancel, and rounding errors do not. The errors of a rounded
    S and R add up in the gradient of a decay per head, a sum over all steps: they are 8e-2 of it at
    1,024 steps with a decay of -1, and 1e-2 with features of one sign.
    """
    # With a normaliser there is also u, for which shared memory has no room beside two parts.
    one_sign = spec.feature_map.nonnegative
    return spec.decay == "head" and not spec.normalize and not one_sign


def splits_in_walk(spec: LinearAttentionSpec, some_steep: bool) -> bool:
    """Whether the kernel of such pieces does. Where a tile is one head's, all of its chunks are
    steep or none is, and of a steep one no state is left that could err later."""
    return splits_states(spec) and not (some_steep and frame.heads_of_tile(spec) == 1)


def chunks_in_two_parts(spec: LinearAttentionSpec) -> int:
    """The number of chunks at a sequence's start in which phi(k), and S in bfloat16, are multiplied
    in two parts, rounded and what rounding left off.

    Where keys are nearly equal, sum_j (g_i . v_j - e_i) phi(k_j) cancels, and the rounding errors
    of phi(k_j) do not. Compared with either of the two terms, their sum is about one rounding, and
    several where g_i . out_i is small by chance. Both terms of row i are about 1 / sqrt(i) of those
    of the first row. Further on, the error is small beside half of the RMS row of 65,536 rows, the
    least norm that a row counts as.
    """
    if not spec.normalize or spec.decay is not None or spec.segments:
        return 0  # with segments few keys are seen everywhere
    if frame.heads_of_tile(spec) == 1:
        # The kernel would spill 184 bytes in place of 52, and at D = 128 a call with gradients
        # would take 1.11 times as long on an H200; with two heads in a tile it takes 1.005 times.
        return 0
    return FEW_CHUNKS[spec.dtype]
