"""Which calls the kernels take, as they are given or in other sizes (`fitted.py`)."""

from __future__ import annotations

import functools

from ato_jax import mosaic
from ato_jax.ops.linear_attention.fits import Fit
from ato_jax.ops.linear_attention.mosaic_gpu import (
    feature_maps,
    fitted,
    frame,
    projected,
    refusals,
    steps,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    lacking = unsupported_as_given(spec, phase)
    return lacking if lacking is None or fit_of(spec, phase) is None else None


@functools.lru_cache(maxsize=1024)
def fit_of(spec: LinearAttentionSpec, phase: str) -> Fit | None:
    """How a call becomes one that kernels take; None where they take it, or no such one."""
    if not spec.feature_map.elementwise or unsupported_as_given(spec, phase) is None:
        return None
    found = fitted.candidates(spec)
    return next((fit for fit in found if unsupported_as_given(fit.spec, phase) is None), None)


def unsupported_as_given(spec: LinearAttentionSpec, phase: str) -> str | None:
    if not spec.feature_map.elementwise:
        if lacking := projected.unsupported(spec, phase):
            return lacking
        by_parts = phase == "backward" and spec.causal
        inner = projected.in_parts(spec) if by_parts else projected.inner_spec(spec)
        lacking = unsupported_as_given(inner, phase)
        return lacking and f"{lacking}, where D is the number of features, {spec.F}"
    if spec.dtype == "float16":
        if lacking := refusals.unsupported_in_float16(spec, phase):
            return f"does not support float16 {lacking}"
    elif spec.dtype == "float32":
        if spec.decay or spec.segments:
            return "does not support float32 with a decay or segments"
        if spec.causal and (spec.q_lengths or spec.kv_lengths):
            return "does not support float32 with causal=True and lengths"
    if lacking := refusals.unsupported_sizes(spec):
        return f"needs {lacking}, got D={spec.D}, V={spec.V}"
    if frame.heads_of_tile(spec) == 2 and (lacking := refusals.unsupported_pairs(spec)):
        return f"{lacking} where D and V are at most {mosaic.HALF}, got {spec.H} and {spec.G}"
    if lacking := feature_maps.unsupported(spec.feature_map):
        return lacking
    if spec.decay == "channel" and (lacking := refusals.unsupported_padding(spec)):
        return lacking
    if spec.segments and (lacking := steps.unsupported_segments(spec, phase)):
        return f"does not support segments {lacking}"
    if (spec.q_lengths or spec.kv_lengths) and (lacking := steps.unsupported_lengths(spec, phase)):
        return f"does not support lengths {lacking}"
    got = f"got {spec.T} and {spec.S}"
    multiple = 1 if refusals.takes_any_rows(spec) else frame.ROWS_OF_A_TILE
    if any(length < frame.C or length % multiple for length in (spec.T, spec.S)):
        of_rows = f", multiples of {multiple}" * (multiple > 1)
        return f"needs T and S of at least {frame.C}{of_rows}, {got}"
    if spec.causal and spec.T != spec.S:
        return f"needs T = S where causal, {got}"
    in_walks = spec.causal or spec.decay or frame.by_runs(spec)
    if not in_walks:
        return None
    if frame.both_ways(spec) and (lacking := refusals.unsupported_both_ways(spec, phase)):
        return f"does not support {lacking} without causal=True"
    lacking = steps.unsupported_lengths(spec, phase)
    if spec.return_state and spec.T % frame.C and lacking:
        return f"return_state needs T to be a multiple of {frame.C} {lacking}, got {spec.T}"
    if phase == "backward" and spec.decay == "channel" and spec.T <= frame.C:
        return f"needs T above {frame.C} for the gradients of a decay per channel"
    of_one_head = spec.decay == "channel" or frame.by_runs(spec)
    if phase == "backward" and spec.H != spec.G and of_one_head:
        return f"needs H = G for these gradients, got {spec.H} and {spec.G}"
    if phase == "backward" and spec.scale <= 0:
        return f"needs a positive scale for the gradients, got {spec.scale}"
    return None
