"""16-bit calls of few rows, whose products are float32's or TF32's.

Roundings average out over the rows of a call. They do not where a few rounded weights, or one sum
whose terms cancel, are a whole result: there the rounding of factors to 16 bits can be beyond the
budget of the result, and so in bfloat16

    up to `SOME_ROWS` rows    TF32 multiplies calls of features of either sign without a normaliser,
                              whose weights cancel, calls with segments or lengths, of which a few
                              rows may be all that one sees, the backward with a decay per head,
                              and that of full attention with a normaliser, in which the gradient of
                              a query is the small difference of two sums over all keys
    up to `FEW_HEADS` heads   TF32 multiplies the backward with a decay per head at any length: its
    of keys                   gradient is one number for each head, a sum over all pairs of terms of
                              either sign, whose error grows with the rows as its usual size does
    up to `FEW_ROWS` rows     TF32 multiplies every other call, and a decay per head's backward is
                              exact
    up to `EXACT_QUERIES`     both passes are exact: where one weight, or one query's gradient, is
    queries                   all of a result and cancels, the roundings of TF32 are too large, too

float16's products keep TF32's digits, and so there exact ones alone help: in both passes up to
`EXACT_QUERIES`, and up to `FEW_ROWS` in the backward of a decay per head, and with a normaliser in
that of an initial state, whose k_sum's gradient is a sum over all queries that cancels.

The kernels and the block sizes are then those of float32; the arrays keep their dtype. A call with
a decay per step and channel counts up to `FEW_ROWS` alone: in float32 it has kernels that walk, not
those of `prepared/`.
"""

from __future__ import annotations

import dataclasses

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import products
from ato_jax.ops.linear_attention.triton.calls import FineFloat16Spec, FineSpec, fields

# Rows of queries or of keys, whichever are more, and queries, over all query heads and batch
# entries. In TF32 4% of draws of one row of signed features, 4% of one with an initial state, 1 of
# 3,151 random calls of up to 6 steps and, of any length, 12 of 750 gradients of one head's decay
# were beyond their budget. On an H100 exact products take a causal call and its gradients of 128
# rows of 128 columns from 60 to 116 us. TF32's take 2,048 rows of 64 columns 81 us, bfloat16's 85.
EXACT_QUERIES = 8
FEW_ROWS = 128
SOME_ROWS = 2048
# Heads of keys G. In bfloat16 a decay's gradient has errors of 2e-3 to 4e-3 of the root mean square
# gradient, at 512 rows as at 4,224. So the gradient of a single head is beyond its budget of 1e-2
# in 1 draw of 4 to 8: where it is below a fifth to two fifths of the root mean square. The budget
# is of all heads of a call together. Four heads with errors of 2.5e-3 are beyond it in 1 draw of
# 100, as rarely as one head in TF32.
FEW_HEADS = 3


def finer(spec: LinearAttentionSpec, phase: str) -> LinearAttentionSpec:
    """The kernels' call for this one in this phase."""
    heads = spec.B * spec.H
    rows = heads * max(spec.T, spec.S)
    one_number = spec.decay == "head" and phase == "backward"
    short = rows <= SOME_ROWS or one_number and spec.G <= FEW_HEADS
    if spec.dtype == "float32" or not short:
        return spec
    few = rows <= FEW_ROWS
    if spec.dtype == "float16":
        of_state = spec.initial_state and spec.normalize and phase == "backward"
        exact = few and (one_number or of_state or heads * spec.T <= EXACT_QUERIES)
        return _fine(FineFloat16Spec, spec, "exact") if exact else spec
    difference = spec.normalize and not spec.causal and phase == "backward"
    apart = spec.segments is not None or spec.q_lengths or spec.kv_lengths
    cancels = spec.decay != "channel" and (apart or products.rounds_both_signs(spec))
    if not (few or one_number or difference or cancels):
        return spec
    exact = few and (one_number or heads * spec.T <= EXACT_QUERIES)
    return _fine(FineSpec, spec, "exact" if exact else "tf32")


def _fine(kind: type[FineSpec], spec: LinearAttentionSpec, precision: str) -> FineSpec:
    return kind(**fields(dataclasses.replace(spec, dtype="float32", precision=precision)))
