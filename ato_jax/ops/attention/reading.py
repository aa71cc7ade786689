"""Which calls on float8_e4m3fn arrays run by a backend that reads their 8 bits.

Such backends are an op of their own, since they take `Float8Inputs`. Where none of them serves a
call, `api.py` widens the arrays, and the call is one of the op of wide arrays.
"""

from __future__ import annotations

from ato_jax import choosing, device
from ato_jax.ops.attention.eight_bits import Float8Inputs
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs

BACKEND = "mosaic_gpu.float8"
OP: choosing.Op[AttentionSpec, Float8Inputs, Outputs] = choosing.Op(
    "attention", (BACKEND,), package="ato_jax.ops.attention"
)


# Fewer columns leave little to products: at 64 a call takes 0.95 of the time of bfloat16 arrays,
# and errs ten times as much as a widened one.
LEAST_COLUMNS = 128


def is_read(
    wide: choosing.Op[AttentionSpec, Inputs, Outputs],
    spec: AttentionSpec,
    inputs: Float8Inputs,
    implementation: str | None,
) -> bool:
    """Whether a backend reads the 8 bits of a call: where it supports the call, and the call names
    its family, or names none, has heads wide enough for it to pay, and would choose the family on
    wide arrays, too."""
    family = choosing.family(BACKEND)
    if implementation not in (None, family) or spec.B == 0:
        return False
    here, interpreted = device.of_call(inputs), device.interpreting()
    call = choosing.Call(OP, spec, BACKEND, here, interpreted)
    if choosing.reason_against(call, BACKEND, "forward") is not None:
        return False
    if implementation is not None:
        return True
    if here.platform != "gpu" or interpreted or spec.D < LEAST_COLUMNS:
        return False
    call_on_wide = choosing.Call(wide, spec, None, here, interpreted)
    return choosing.choose(call_on_wide, "forward").backend == family
