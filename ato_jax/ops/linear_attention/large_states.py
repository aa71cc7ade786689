"""Which calls products of plain JAX (`xla/products`) take, since kernels are slow at their states.
Beside a decay per step and channel these are states of any size, which no other form of plain JAX
multiplies for all chunks at once.

That backend refuses all other calls, and the Triton kernels, which stand before it in the order of
backends, yield those that products are faster at. No backend imports another, so the rules are
here. Hopper's kernels come before both.
"""

from __future__ import annotations

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# The largest states that kernels serve well, by their columns: without a decay and segments, and
# with them. Triton's kernels stay far from what the bytes allow beyond these.
LARGEST_HELD = {
    "bfloat16": (256, 256),
    "float16": (128, 64),
    "tf32": (128, 64),
    "float32": (128, 32),
}
# Exact float32 with D or V above this, and where one state serves all queries, is left to `xla`: it
# is no slower than Triton's kernels there, and has every derivative.
MOST_EXACT = 256
# Fewer rows do not average out the roundings of states.
LEAST_ROWS = {"bfloat16": 256, "float16": 64, "tf32": 64, "float32": 64}
# Fewer leave most of a card idle.
LEAST_ROWS_OF_HEADS = 2**12


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    """Why `xla/products` does not take the call; None where it does."""
    dtype = spec.precision if spec.precision == "tf32" else spec.dtype
    if spec.decay == "channel":
        dtype = "tf32" if dtype == "bfloat16" else dtype  # as it is multiplied
    elif reason := _wrong_size(spec, dtype):
        return reason
    if not spec.feature_map.elementwise or spec.feature_map.parameters:
        return f"feature map {spec.feature_map.name!r} is not elementwise or closes over arrays"
    if spec.segments == "cross":
        return "does not support segments of queries and keys that differ"
    if spec.causal and (spec.T != spec.S or spec.offset != 0):
        unequal = ", and lengths that may differ" * (spec.offset is None)
        return f"needs T = S and equal lengths where causal, got {spec.T} and {spec.S}{unequal}"
    if (spec.decay or spec.segments) and spec.T != spec.S:
        return f"needs T = S with a decay or segments, got {spec.T} and {spec.S}"
    least = LEAST_ROWS[dtype]
    if min(spec.T, spec.S) < least or spec.B * spec.H * spec.T < LEAST_ROWS_OF_HEADS:
        return (
            f"needs T and S of at least {least} and B * H * T of at least "
            f"{LEAST_ROWS_OF_HEADS}, got B={spec.B}, H={spec.H}, T={spec.T}, S={spec.S}"
        )
    return None


def _wrong_size(spec: LinearAttentionSpec, dtype: str) -> str | None:
    """Why the call's states are left to kernels or to `xla`."""
    gated = bool(spec.decay or spec.segments)
    held = LARGEST_HELD[dtype][gated]
    if max(spec.F, spec.V) <= held:
        beside = " with a decay or segments" * gated
        return f"takes D or V above {held} in {dtype}{beside}, got D={spec.D}, V={spec.V}"
    one_state = not (spec.causal or gated)
    if dtype == "float32" and (one_state or max(spec.F, spec.V) > MOST_EXACT):
        return (
            "takes exact float32 that is causal or has a decay or segments, up to D and V of "
            f"{MOST_EXACT}, got D={spec.D}, V={spec.V}"
        )
    return None


def beats_kernels(spec: LinearAttentionSpec, backward_follows: bool) -> bool:
    """Whether products are faster than Triton's kernels, where both take the call.

    `docs/notes/linear_attention.md` has the times of both on an H200, under "Large states". With 64
    columns and 16,384 rows products win with gradients of a causal decay in exact float32 (12.5 ms,
    by Triton's kernels 17.9), and lose in TF32 (12.1 and 8.6) and without a causal mask.
    """
    if spec.decay == "channel":
        # Those fill heads up to 64 or 128 columns. Forward and forward + backward in ms, T 8192,
        # and Triton's: B2 H12 G4 D80 1.05, 3.73 (1.38, 5.54). But of whole tiles B2 H16 D64 took
        # 1.31, 4.75 (0.67, 3.30), B2 H8 D128 1.35, 5.30 (1.03, 5.49), in TF32 1.11, 4.40 (0.70,
        # 4.03), and in float16 1.08, 4.24 (0.56, 2.50).
        exact = spec.dtype == "float32" and spec.precision == "exact"
        return exact and 64 < max(spec.F, spec.V) < 128
    if spec.dtype == "bfloat16" or unsupported(spec, "forward") is not None:
        # In bfloat16 products take only states that those kernels do not hold: D192, causal with a
        # decay per step and gradients, took 10.1 ms, by Triton's kernels 3.8.
        return False
    columns = max(spec.F, spec.V)
    if columns > 128:
        return True
    if spec.dtype == "float16" or spec.precision == "tf32":
        return backward_follows
    return columns > 64 or bool(spec.causal and spec.decay and backward_follows)
