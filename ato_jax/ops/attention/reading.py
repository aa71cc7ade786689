"""The op of the backend that reads the 8 bits of float8_e4m3fn arrays: it takes `Float8Inputs`.

`ops/float8.py` decides which calls it serves. For all others the arrays are widened, and the op of
wide arrays serves the call.
"""

from __future__ import annotations

from ato_jax import choosing
from ato_jax.ops.attention.eight_bits import Float8Inputs
from ato_jax.ops.attention.spec import AttentionSpec, Outputs

BACKEND = "mosaic_gpu.float8"
OP: choosing.Op[AttentionSpec, Float8Inputs, Outputs] = choosing.Op(
    "attention", (BACKEND,), package="ato_jax.ops.attention"
)
