"""Which calls have states so large that products of plain JAX (`xla/products`) beat kernels.

That backend refuses all other calls, and the Triton kernels, which stand before it in the order of
backends, yield these. No backend imports another, so the rule is here.
"""

from __future__ import annotations

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Up to so many columns kernels hold the states. In float16 and TF32 Hopper's kernels take no more,
# and Triton's, which take up to 256, stay far from what the bytes allow: on an H200, B11 H1 T33730
# D155 in float16 took 7 ms, and causally B2 H61 G1 T5615 D147 11 ms, 5 to 8 TFLOP/s.
LARGEST_HELD = {"bfloat16": 256, "float16": 128, "float32": 128}
# Fewer rows do not average out the roundings of states, and leave most of a card idle.
LEAST_ROWS = 256
LEAST_ROWS_OF_HEADS = 2**12


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    """Why `xla/products` does not take the call; None where it does."""
    if spec.dtype == "float32" and spec.precision != "tf32":
        return 'takes bfloat16, float16, and float32 with precision="tf32", got exact float32'
    held = LARGEST_HELD[spec.dtype]
    if max(spec.F, spec.V) <= held:
        return f"takes D or V above {held} in {spec.dtype}, got D={spec.D}, V={spec.V}"
    if not spec.feature_map.elementwise or spec.feature_map.parameters:
        return f"feature map {spec.feature_map.name!r} is not elementwise or closes over arrays"
    if (spec.decay or spec.segments) and not spec.causal:
        return "does not support a decay or segments without causal=True"
    if spec.decay == "channel":
        return "does not support a decay per step and channel"
    if spec.segments == "cross":
        return "does not support segments of queries and keys that differ"
    if spec.causal and (spec.T != spec.S or spec.offset != 0):
        return f"needs T = S and equal lengths where causal, got {spec.T} and {spec.S}"
    if min(spec.T, spec.S) < LEAST_ROWS or spec.B * spec.H * spec.T < LEAST_ROWS_OF_HEADS:
        return (
            f"needs T and S of at least {LEAST_ROWS} and B * H * T of at least "
            f"{LEAST_ROWS_OF_HEADS}, got B={spec.B}, H={spec.H}, T={spec.T}, S={spec.S}"
        )
    return None


def beats_kernels(spec: LinearAttentionSpec) -> bool:
    """Whether products are faster than Triton's kernels, where both take the call.

    In bfloat16 those hold up to 512 columns of V beside 256 of D, and only D is too large.
    """
    return spec.dtype != "bfloat16" and unsupported(spec, "forward") is None
