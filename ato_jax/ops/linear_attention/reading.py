"""Which calls on float8_e4m3fn arrays run by a backend that reads their 8 bits.

Such backends are an op of their own, since they take `Float8Inputs`. Where none of them serves a
call, `api.py` widens the arrays, and the call is one of the op of wide arrays.
"""

from __future__ import annotations

from ato_jax import choosing, device
from ato_jax.ops.linear_attention.eight_bits import Float8Inputs
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs

BACKEND = "mosaic_gpu.float8"
OP: choosing.Op[LinearAttentionSpec, Float8Inputs, Outputs] = choosing.Op(
    "linear_attention", (BACKEND,), package="ato_jax.ops.linear_attention"
)


def is_read(
    wide: choosing.Op[LinearAttentionSpec, Inputs, Outputs],
    spec: LinearAttentionSpec,
    inputs: Float8Inputs,
    implementation: str | None,
) -> bool:
    """Whether a backend reads the 8 bits of a call: where it supports the call, and the call names
    its family or none.

    Where it names none, the call on wide arrays has to choose that family, too, or to be one that
    the family takes in 8 bits alone and is fast at.
    """
    family = choosing.family(BACKEND)
    if implementation not in (None, family) or spec.B == 0:
        return False
    here, interpreted = device.of_call(inputs), device.interpreting()
    call = choosing.Call(OP, spec, BACKEND, here, interpreted)
    if choosing.reason_against(call, BACKEND, "forward") is not None:
        return False
    if implementation is not None:
        return True
    if here.platform != "gpu" or interpreted:
        return False
    call_on_wide = choosing.Call(wide, spec, None, here, interpreted)
    if choosing.reason_against(call_on_wide, family, "forward") is None:
        return choosing.choose(call_on_wide, "forward").backend == family
    return OP.backend(BACKEND).beats_later_backends(spec, here, False)
