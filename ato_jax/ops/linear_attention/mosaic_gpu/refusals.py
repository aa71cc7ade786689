"""The refusals of the backend by sizes, float16, pairs of heads, and rows.

`__init__.py` and `fitted.py` call these functions. A function that returns text says what a call
would need, and None if it has it.
"""

from __future__ import annotations

from ato_jax import mosaic
from ato_jax.ops.linear_attention.fits import FILLERS, up
from ato_jax.ops.linear_attention.mosaic_gpu import (
    channel_blocks,
    frame,
    narrow,
    powers,
    whole_units,
)
from ato_jax.ops.linear_attention.mosaic_gpu.two_parts import splits_states
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

SIZES_BOTH_WAYS = 64, 80, 96, 112, 128  # D = V with a decay both ways


def unsupported_sizes(spec: LinearAttentionSpec) -> str | None:
    """What D and V are to be."""
    if spec.decay == "channel":
        in_steps = spec.D % narrow.STEP == spec.V % narrow.STEP == 0
        most = max(narrow.TILES)
        both_ways = not spec.causal and max(spec.D, spec.V) <= most
        if in_steps and (both_ways or narrow.tile_of(spec)):
            return None
        return f"D and V of multiples of {narrow.STEP}, up to {most}"
    if frame.by_two_walks(spec):
        if spec.D == spec.V and spec.D in SIZES_BOTH_WAYS:
            return None
        return f"D = V = {', '.join(map(str, SIZES_BOTH_WAYS[:-1]))} or {SIZES_BOTH_WAYS[-1]}"
    in_float32 = spec.dtype == "float32"
    if in_float32 and narrow.fills(spec, mosaic.HALF):
        return None
    most = frame.F if in_float32 else max(narrow.TILES)
    step = narrow.step_of(spec)
    least = up(narrow.LEAST, step)
    if (least if in_float32 else 0) <= max(spec.D, spec.V) <= most and narrow.tile_of(spec):
        return None
    if frame.in_runs(spec):
        return f"D and V of multiples of {step}, from {narrow.LEAST_OF_PAIRS} to {most}"
    sizes = f"D and V of multiples of {step}, the larger from {least} to {most}"
    if in_float32:
        sizes += f", or D = V = {mosaic.HALF}"
    if spec.causal and not in_float32:
        sizes += f", or both from {narrow.LEAST_OF_PAIRS} to {mosaic.HALF}"
    return sizes


def unsupported_in_float16(spec: LinearAttentionSpec, phase: str) -> str | None:
    """Sums and weights have units there; features may not be above its largest number."""
    name, by_runs = spec.feature_map.name, frame.by_runs(spec)
    if frame.by_two_walks(spec):
        return "with a decay and without causal=True"
    if spec.decay == "channel" and phase == "backward":
        return "for the gradients of a decay per channel"
    by_runs |= spec.decay == "channel"
    if phase == "backward" and splits_states(spec) and not by_runs:
        # Their states in two parts have no units.
        return (
            "for the gradients of a decay per head with normalize=False and "
            f"feature_map={spec.feature_map.name!r}, whose features may be negative"
        )
    if spec.segments and not (spec.causal or by_runs):
        return "with segments and without causal=True"
    if name not in powers.FITTING and (spec.causal or by_runs):
        return f"with feature_map={name!r}, whose features may be larger than its largest number"
    if spec.normalize and not spec.feature_map.nonnegative:
        return f"with normalize=True and feature_map={name!r}, whose features may be negative"
    if spec.normalize and spec.initial_state and not by_runs:
        return "with a normalizer beside an initial_state"
    of_shares = spec.normalize and not (spec.causal or by_runs)
    if of_shares and spec.eps < whole_units.LEAST_EPS:
        return f"without causal=True and with eps below {whole_units.LEAST_EPS:.1e}"
    return None


def unsupported_both_ways(spec: LinearAttentionSpec, phase: str) -> str | None:
    """Says what the kernels lack for a call with a decay and without causal=True."""
    if frame.by_runs(spec):
        return "a state beside a decay" if spec.initial_state or spec.return_state else None
    if phase == "forward":
        return None
    if spec.decay == "head":
        # One sum over all steps, in which the roundings of both walks add up: interpreted, 640 rows
        # of scale 0.01 were 3e-2 off.
        return "the gradients of a decay per head"
    if spec.initial_state and spec.normalize:
        # Few rows count for the gradient of a state's k_sum, so their roundings do not add up to
        # less: on an H200 it was 5.7e-3 off, of 4e-3, beside 1,096 rows.
        return "the gradients of a normalizer beside an initial_state"
    return None


def unsupported_padding(spec: LinearAttentionSpec) -> str | None:
    """Where XLA would have to pad keys of heads that are cut (`channel_blocks.py`)."""
    if not channel_blocks.is_cut(spec) or spec.feature_map.name in FILLERS:
        return None
    cut = channel_blocks.in_blocks(spec)
    if cut.feature_blocks * cut.width == spec.D:
        return None
    step = cut.feature_blocks * narrow.STEP
    return (
        f"needs D above {channel_blocks.COLUMNS} to be a multiple of {step} with a decay per "
        f"channel and a feature_map without a name, got {spec.D}"
    )


def is_left_to_xla(spec: LinearAttentionSpec) -> bool:
    """Whether of the other backends XLA alone takes a call with a decay per channel. On an H100 it
    took 20 to 25 times as long as these kernels where both take a call (`channel_blocks.py`)."""
    if spec.decay != "channel" or not spec.feature_map.elementwise:
        return False
    beside = not spec.causal or spec.segments or spec.q_lengths or spec.kv_lengths
    most = channel_blocks.COLUMNS
    return bool(beside) or spec.D * spec.V > most**2


def unsupported_pairs(spec: LinearAttentionSpec) -> str | None:
    """Returns what a call lacks whose tiles hold two heads each, or None if it lacks nothing."""
    group = spec.H // spec.G
    if spec.decay == "channel":
        return "needs H = G, and even," if group != 1 or spec.H % 2 else None
    if spec.G % 2 or group % 2 and group != 1:
        return "needs an even G, and H = G or an even H / G"
    return None


def takes_any_rows(spec: LinearAttentionSpec) -> bool:
    """Whether sequences may be no multiple of 8 rows (`mosaic.Views`, `row_copies.py`)."""
    return spec.dtype != "float32" and spec.decay != "channel"
