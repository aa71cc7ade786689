"""bfloat16 calls of few rows, whose products are float32's or TF32's.

Roundings average out over the rows of a call. They do not where a few rounded weights, or one sum
whose terms cancel, are a whole result: there the rounding of factors to bfloat16 can be beyond the
budget of the result, and so

    up to `FEW_ROWS` rows     both passes multiply exactly
    up to `SOME_ROWS` rows    TF32 multiplies calls of features of either sign without a normaliser,
                              whose weights cancel, calls with segments or lengths, of which a few
                              rows may be all that one sees, and the backward with a decay per head,
                              whose gradient is one number for each head

The kernels and the block sizes are then those of float32; the arrays stay in bfloat16. A call with
a decay per step and channel counts up to `FEW_ROWS` alone: in float32 it has kernels that walk, not
those of `prepared/`.
"""

from __future__ import annotations

import dataclasses

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import products
from ato_jax.ops.linear_attention.triton.calls import FineSpec, fields

# Rows of queries or of keys, whichever are more, over all query heads and batch entries. On an H100
# exact products take a causal call and its gradients of 2 rows of 128 columns from 57 to 101 us, of
# 128 rows from 60 to 116; of 64 columns 128 rows take 57 in place of 55. TF32's take 2,048 rows of
# 64 columns 81 us, bfloat16's 85.
FEW_ROWS = 128
SOME_ROWS = 2048


def finer(spec: LinearAttentionSpec, phase: str) -> LinearAttentionSpec:
    """The kernels' call for this one in this phase."""
    rows = spec.B * spec.H * max(spec.T, spec.S)
    if spec.dtype != "bfloat16" or rows > SOME_ROWS:
        return spec
    apart = spec.segments is not None or spec.q_lengths or spec.kv_lengths
    if spec.decay == "head" and phase == "backward":
        needed = True
    else:
        needed = spec.decay != "channel" and (apart or products.rounds_both_signs(spec))
    if rows > FEW_ROWS and not needed:
        return spec
    precision = "exact" if rows <= FEW_ROWS else "tf32"
    return FineSpec(**fields(dataclasses.replace(spec, dtype="float32", precision=precision)))
