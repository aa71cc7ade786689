"""Linear attention on Hopper by Pallas kernels lowered to Mosaic GPU.

    S = sum_j v_j phi(k_j)^T            [V, F]
    z = sum_j phi(k_j)                  [F]
    out_i = S phi(q_i) / max(phi(q_i) . z, eps)        normalize, else scale * S phi(q_i)

A sum is over all keys j, over those of the query's segment, or over j <= i. A decay per head or
step, or per step and channel, multiplies its terms. `_kept` below selects the module that launches
the kernels of a call, and `_backward` selects in the same order:

    channel_blocks.py    a decay per channel that is not causal, or with more than 128 columns
    wide_heads.py        the calls of `frame.by_runs`: causal with more than 128 columns, and others
    causal.py            causal; `channel.py` with a decay per channel
    both_ways.py         every query sees every key through a decay per head or step
    documents.py         every query sees its whole segment
    float32.py, float32_causal.py    the same calls in float32, up to 128 columns
    bidirectional.py     every query sees every key

Read `frame.py` (sizes, launches) and `causal.py` next. A kernel has tiles of D = V = 128, of two
heads of 64, or of 192 or 256 columns; operands are bfloat16 or float16, and sums float32. Other
sizes fill such a tile in part (`narrow.py`), or heads are cut into blocks (`channel_blocks.py`,
`value_blocks.py`). What does not fit is made to fit by copies (`fitted.py`), or refused
(`refusals.py`, `steps.py`). Options: any elementwise phi that Mosaic GPU lowers
(`feature_maps.py`); lengths and segments (`steps.py`, `chunk_borders.py`); float16 by units and
powers of two (`mosaic/scales.py`, `powers.py`, `wide_powers.py`, `channel_powers.py`,
`whole_units.py`); FAVOR+ in bfloat16 (`projected.py`, `projected_whole.py`); `vmap` as a larger
batch (`batches.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.mosaic import refusal_of_device as unsupported_device
from ato_jax.ops.linear_attention import fits, random_features
from ato_jax.ops.linear_attention.mosaic_gpu import (
    bidirectional,
    both_ways,
    causal,
    channel_blocks,
    documents,
    feature_maps,
    fitted,
    float32,
    float32_causal,
    frame,
    narrow,
    projected,
    projected_whole,
    refusals,
    steps,
    value_blocks,
    wide_heads,
)
from ato_jax.ops.linear_attention.mosaic_gpu.batches import as_larger_batch as as_larger_batch
from ato_jax.ops.linear_attention.mosaic_gpu.batches import spec_in_tiles
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config as Config
from ato_jax.ops.linear_attention.scans import gates
from ato_jax.ops.linear_attention.scans.returned import add_returned
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals

# With fewer rows of all heads, Triton's kernels are faster: they are fewer. On an H200 8 heads of
# 1024 rows took 23.8 us where they take 14.5, of 4096 rows 36.1 and 33.9; 32 heads of 2048 rows
# 43.7 and 64.7. Where every query sees every key they have no pieces to join: 8 heads of 1024 rows
# took 13.6 us and 12.3, of 4096 rows 19.0 and 22.0. Of other sizes as many elements: of 256 columns
# 8 heads of 1024 rows took 85 us and 77, of 4096 rows 101 and 149, where every query sees every key
# 77 and 129; of two heads of 64 in a tile 64 heads of 1024 rows took 31.7 us and 22.6, of 2048 rows
# 37.5 and 38.9, with gradients 114 and 134. But with gates of channels 16 heads of 4096 rows of 64
# columns took 66 us where Triton's kernels take 73, with gradients 236 and 277.
ENOUGH_ROWS = 2**16
# With a decay both ways 16 heads of 65,536 rows took 0.535 ms on an H200 where Triton's kernels
# take 1.085, with gradients 1.85 and 3.26; of 128 columns 1.06 and 3.54, 4.02 and 12.2. On an H100
# 32 heads of 8,192 rows of 64 columns took 0.196 ms and 0.340, with gradients 0.692 and 1.03; of
# 128 columns 0.355 and 1.14, 1.34 and 3.86. Fewer rows have not been timed.
ENOUGH_ROWS_BOTH_WAYS = 2**17
# The share of a tile's products that a head needs. What it takes is the tile's time, less some
# traffic, so with a smaller share it is left to Triton. On an H200, T 16384, causal, forward and
# forward + backward in ms, and Triton's: B8 H16 D32 0.362, 1.29 (0.475, 1.59), B8 H42 D24 1.01,
# 3.68 (0.91, 3.59), B8 H7 D72 0.417, 1.71 (0.598, 2.22).
LEAST_FILLED = 1 / 4
# Of a tile of two heads with a decay per step or head: D24 took 1.08, 4.21 (1.29, 6.12).
LEAST_FILLED_WITH_A_DECAY = 1 / 8
# With gates of channels and no gradients: B8 H16 D32 took 0.715 and by Triton's kernels 0.675.
LEAST_FILLED_BY_CHANNEL = 3 / 8


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    lacking = unsupported_as_given(spec, phase)
    return lacking if lacking is None or _fit(spec, phase) is None else None


@functools.lru_cache(maxsize=1024)
def _fit(spec: LinearAttentionSpec, phase: str) -> fits.Fit | None:
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


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    return Config(blocks=device.multiprocessors)


def needs_fallback(spec: LinearAttentionSpec) -> bool:
    """Where a chunk is steep, the walks over features are not right with a decay per channel, and
    the sums for the decay's gradient are not right in wide heads; of a decay per head where
    float16's range is too small for states (`MOST_LOST_OF_BOTH_SIDES`)."""
    if spec.decay == "head":
        return spec.dtype == "float16" and frame.both_ways(spec)
    return spec.decay == "channel" or spec.decay == "step" and frame.by_runs(spec)


def beats_later_backends(spec: LinearAttentionSpec, device: Device, backward_follows: bool) -> bool:
    if not spec.feature_map.elementwise:
        # On an H200, B2 H16 T16384 D64 F128: 0.345 ms and by Triton 0.912, causal 0.430 and 1.081.
        # Triton's gradients are the same behind either forward, whose outputs alone they are given.
        inner = projected.inner_spec(spec)
        return beats_later_backends(inner, device, backward_follows=False)
    if refusals.is_left_to_xla(spec):
        # On an H100, B1 H16 T16384 D256 took 1.15 ms and by XLA 25.9, with gradients 4.22 and 98.2.
        if backward_follows and unsupported(spec, "backward"):
            return False
        one_sign = spec.normalize or spec.feature_map.nonnegative
        if backward_follows and not (spec.causal or one_sign):
            return False  # each walk rounds its dv, which was 4.1e-3 off, of 4e-3
        columns = max(spec.D + spec.V, 2 * frame.F)
        return spec.B * spec.H * spec.T >= ENOUGH_ROWS * 2 * frame.F // columns
    if spec.decay == "channel" and spec.dtype == "float16":
        return False  # no card has timed these beside Triton's kernels
    if fit := _fit(spec, "backward" if backward_follows else "forward"):
        pays = fitted.pays(fit, backward_follows)
        return pays and beats_later_backends(fit.spec, device, backward_follows)
    if backward_follows and refusals.may_cancel(spec):
        return False
    if frame.in_runs(spec) and not frame.is_wide(spec):
        enough = ENOUGH_ROWS_BOTH_WAYS if spec.decay else ENOUGH_ROWS
        return wide_heads.are_faster_in_runs(spec) and spec.B * spec.H * spec.T >= enough
    if frame.by_documents(spec) and not documents.are_faster_than_tritons(spec):
        return False
    # Triton's backward is faster behind its own forward: on an H100, B2 T16384 with segments of
    # 1024, D128 took 1.79 ms and 1.84 behind this backend's, D64 1.34 and 1.43.
    between_backends = spec.segments or frame.both_ways(spec)
    if backward_follows and between_backends and unsupported(spec, "backward"):
        return False
    enough = ENOUGH_ROWS
    if channel_blocks.is_cut(spec):
        return spec.B * spec.H * spec.T >= enough * 2 * frame.F // (spec.D + spec.V)
    if frame.by_two_walks(spec):
        # Whatever a head fills of a tile: Triton's kernels take two walks, and these one.
        enough = ENOUGH_ROWS_BOTH_WAYS * 2 * frame.F // (spec.D + spec.V)
        return spec.B * spec.H * spec.T >= enough
    tile, tiles = narrow.tile_of(spec), 1
    if value_blocks.is_cut(spec):
        # On an H200 B2 H16 T16384 D128 V256 without a decay took 0.550 ms and with gradients 1.80,
        # by Triton's kernels 0.903 and 3.45; D64 V256 with a decay per step and gradients 1.99 and
        # 3.25.
        tile, tiles = frame.F, value_blocks.in_blocks(spec).value_blocks
    if spec.dtype == "float32" and narrow.fills(spec, mosaic.HALF):
        tile = mosaic.HALF
    least_filled = LEAST_FILLED
    if spec.decay == "channel" and not backward_follows:
        least_filled = LEAST_FILLED_BY_CHANNEL
    elif spec.decay in ("head", "step") and tile == mosaic.HALF:
        least_filled = LEAST_FILLED_WITH_A_DECAY
    if tile is None or spec.D * spec.V < least_filled * tiles * tile**2:
        return False
    if frame.heads_of_tile(spec) == 2 and spec.H != spec.G and not (spec.decay or backward_follows):
        # On an H100, B2 H32 G8 T16384: 0.208 ms, by Triton's 0.200; with gradients 0.773 and 0.911.
        return False
    if spec.decay != "channel":
        enough = ENOUGH_ROWS * 2 * frame.F // (spec.D + spec.V)
    if spec.causal:
        return spec.B * spec.H * spec.T >= enough
    if spec.dtype == "float32" and spec.precision == "exact" and tile != mosaic.HALF:
        # Behind this backend is XLA. On an H200 4 heads of 1024 rows of 128 columns took 32.7 us
        # and by XLA 36.9, of 512 rows 44.9 and 41.5.
        enough //= 8
    return spec.B * (spec.H * spec.T + spec.G * spec.S) >= enough


Kept = Outputs | causal.Kept | narrow.Kept | wide_heads.Kept


def forward_for_own_backward(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs
) -> Kept | fits.Kept:
    if fit := _fit(spec, "backward"):
        return fit.kept(_keep_as_given(fit.spec, config, fit.inputs(inputs)))
    return _keep_as_given(spec, config, inputs)


def _keep_as_given(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Kept:
    if spec.feature_map.elementwise:
        kept: Kept = _keep_with_gates(_keep_all, spec, config, inputs)
        return kept
    if not spec.causal:
        return forward(spec, config, inputs)
    given = projected.inputs_in_parts(spec, inputs)
    return projected.kept_in_parts(spec, _keep_all(projected.in_parts(spec), config, given))


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    if fit := _fit(spec, "forward"):
        return fit.outputs(forward(fit.spec, config, fit.inputs(inputs)))
    if not spec.feature_map.elementwise and projected.is_whole(spec):
        return as_larger_batch(projected_whole.forward)(
            spec, config, *projected.whole_inputs(spec, inputs)
        )
    if not spec.feature_map.elementwise:
        inputs = projected.inner_inputs(spec, inputs)
        return forward(projected.inner_spec(spec), config, inputs)
    return _keep_with_gates(_keep, spec, config, inputs).plain()


def _keep_with_gates(
    keep: Callable[..., Any], spec: LinearAttentionSpec, config: Config, inputs: Inputs
) -> Any:
    spec, inputs = steps.in_place(spec, inputs)
    if inputs.decay is not None and spec.decay != "channel":
        inputs = inputs._replace(decay=_gates_of(spec, config, inputs))
    return keep(spec, config, inputs)


def _gates_of(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> jax.Array:
    assert inputs.decay is not None
    if spec.kv_lengths or spec.segments:
        return _gates_of_steps(spec, config, steps.decay_of_steps(spec, inputs))
    if spec.decay == "head":  # which is no part of a batch
        of_heads = both_ways.gates_of_heads if frame.by_two_walks(spec) else gates.of_heads
        return of_heads(spec, inputs.decay)
    return _gates_of_steps(spec, config, inputs.decay)


@as_larger_batch
def _gates_of_steps(spec: LinearAttentionSpec, _config: Config, decay: jax.Array) -> jax.Array:
    of_steps = both_ways.gates_of_steps if frame.by_two_walks(spec) else gates.of_steps
    return of_steps(spec, decay)


@as_larger_batch
def _keep(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Kept:
    """The forward pass alone. `inputs.decay` holds the gates."""
    return _kept(spec, config, inputs)


@as_larger_batch
def _keep_all(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Kept:
    """The forward pass, with what the backward pass reads of it."""
    return _kept(spec, config, inputs, features=spec.decay == "channel")


def _kept(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, features: bool = False
) -> Kept:
    if channel_blocks.is_cut(spec):
        return causal.keep_in_blocks(spec, config, inputs, features)
    spec, inputs = _in_tiles(spec, inputs)
    if frame.by_runs(spec):
        kept = wide_heads.keep(spec, config, inputs)
        return kept._replace(state=narrow.narrowed(spec, kept.state))
    if spec.causal or frame.by_two_walks(spec):
        keep = functools.partial(causal.keep, features=features) if spec.causal else both_ways.keep
        if spec.dtype == "float32":
            keep = float32_causal.keep
        found = keep(spec, config, inputs)
        return found._replace(state=value_blocks.narrowed(spec, found.state))
    if frame.by_documents(spec):
        out, state = documents.forward(spec, config, inputs)
        return Outputs(out, narrow.narrowed(spec, state))
    run = float32.forward if spec.dtype == "float32" else bidirectional.forward
    out, state = run(spec, config, inputs)
    return narrow.Kept(out, narrow.narrowed(spec, state), state)


def _in_tiles(spec: LinearAttentionSpec, inputs: Inputs) -> tuple[LinearAttentionSpec, Inputs]:
    spec = spec_in_tiles(spec)
    if inputs.initial_state is not None:
        inputs = inputs._replace(initial_state=value_blocks.widened(spec, inputs.initial_state))
    if isinstance(spec, value_blocks.Cut) and inputs.decay is not None:
        inputs = inputs._replace(decay=value_blocks.of_blocks(spec, inputs.decay, 1))
    return spec, inputs


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    run = functools.partial(_backward_as_given, config=config)
    return _fitted(run, spec, residuals, cotangents)


def _fitted(
    run: Callable[..., Inputs],
    spec: LinearAttentionSpec,
    residuals: Residuals,
    cotangents: Outputs,
) -> Inputs:
    """The gradients by `run`, whose call is the one that kernels take."""
    inputs, outputs = residuals
    fit = _fit(spec, "backward")
    # The forward pass may have returned a state, whose cotangent is not wanted any more.
    stateful = dataclasses.replace(spec, return_state=True)
    if isinstance(outputs, fits.Kept) and unsupported(stateful, "backward") is None:
        outputs = outputs if fit == _fit(stateful, "backward") else outputs.plain()
    if fit is None:
        return run(spec, residuals=Residuals(inputs, outputs), cotangents=cotangents)
    kept = fit.outputs_kept(outputs)

    def of_last(given: Inputs, g: Outputs) -> Inputs:
        return run(fit.spec, residuals=Residuals(given, kept), cotangents=g)

    return fit.gradients(of_last, inputs, cotangents)


def _backward_as_given(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    if not spec.feature_map.elementwise:
        return _projected_backward(spec, config, residuals, cotangents)
    if spec.decay is not None and spec.return_state:
        without = dataclasses.replace(spec, return_state=False)
        found = _backward_as_given(without, config, residuals, cotangents)
        lowers = spec.feature_map.name != "custom"
        return add_returned(spec, residuals.inputs, cotangents.state, found, lowers=lowers)
    called = spec
    spec, given = steps.in_place(spec, residuals.inputs)
    residuals = residuals._replace(inputs=given)
    decay = given.decay
    if decay is None:
        return _backward(spec, config, residuals, cotangents)
    residuals = residuals._replace(inputs=given._replace(decay=_gates_of(spec, config, given)))
    if (spec.kv_lengths or spec.segments) and not (frame.by_runs(spec) and spec.decay == "head"):
        # Infinite ones have no gradient.
        of_steps = steps.decay_of_steps(spec, given, at_borders=-jnp.inf)
        found = _backward(spec, config, residuals, cotangents, of_steps)
        return found._replace(decay=steps.gradient_of_decay(called, given, found.decay))
    if spec.decay == "step":
        return _backward(spec, config, residuals, cotangents, decay)
    found = _backward(spec, config, residuals, cotangents)
    return found._replace(decay=gates.gradient_of_heads(decay, found.decay))


def _projected_backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    if spec.causal:

        def in_parts(inner: LinearAttentionSpec, *arguments: Any) -> Inputs:
            return _backward(inner, config, *arguments)

        return projected.gradients_in_parts(in_parts, spec, residuals, cotangents)
    given, state = residuals.inputs, residuals.outputs.state
    (projection,) = given.feature_parameters
    g = random_features.without_padding(spec, cotangents.out, given.q_lengths)
    inputs, w = projected.whole_inputs(spec, given)
    run = as_larger_batch(projected_whole.backward)
    found, sums = run(spec, config, inputs, w, state, cotangents._replace(out=g))
    d_projection = projected.gradient_of_projection(spec, inputs, projection, g, state, sums)
    return found._replace(feature_parameters=(d_projection,))


def backward_with_fallback(
    spec: LinearAttentionSpec,
    config: Config,
    residuals: Residuals,
    cotangents: Outputs,
    fallback: causal.Fallback,
) -> Inputs:
    def run(
        spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
    ) -> Inputs:
        if spec.decay == "channel":
            return causal.backward_by_channel(spec, config, residuals, cotangents, fallback)
        gates = _gates_of(spec, config, steps.in_place(spec, residuals.inputs)[1])
        by_walks = functools.partial(_backward_as_given, config=config)
        arrays = residuals, cotangents
        return wide_heads.unless_steep(gates, fallback, by_walks, spec, *arrays)

    def as_given(spec: LinearAttentionSpec, residuals: Residuals, cotangents: Outputs) -> Inputs:
        # A decay per head is no part of a batch.
        of_batch = run if spec.decay == "head" else as_larger_batch(run)
        return of_batch(spec, config, residuals, cotangents)

    return _fitted(as_given, spec, residuals, cotangents)


@as_larger_batch
def _backward(
    spec: LinearAttentionSpec,
    config: Config,
    residuals: Residuals,
    cotangents: Outputs,
    decay: jax.Array | None = None,
) -> Inputs:
    """`inputs.decay` are the gates; of `decay` as `flows.decay_flows` takes it is the gradient."""
    kept: Any = residuals.outputs
    spec, inputs = _in_tiles(spec, residuals.inputs)
    if spec.return_state:
        state = value_blocks.widened(spec, cotangents.state, is_cotangent=True)
        cotangents = cotangents._replace(state=state)
    if isinstance(spec, value_blocks.Cut) and decay is not None:
        decay = value_blocks.of_blocks(spec, decay, value_blocks.heads_axis(spec))
    if frame.by_runs(spec):
        found = wide_heads.backward(spec, config, Residuals(inputs, kept), cotangents, decay)
    elif spec.causal and spec.dtype == "float32":
        found = float32_causal.backward(spec, config, Residuals(inputs, kept), cotangents)
    elif spec.causal:
        found = causal.backward(spec, config, Residuals(inputs, kept), cotangents, decay)
    elif frame.by_two_walks(spec):
        found = both_ways.backward(spec, config, Residuals(inputs, kept), cotangents, decay)
    elif frame.by_documents(spec):
        found = documents.backward(spec, config, inputs, cotangents)
    else:
        is_kept = isinstance(kept, narrow.Kept)
        state = kept.whole if is_kept else narrow.widened(spec, kept.state)
        run = float32.backward if spec.dtype == "float32" else bidirectional.backward
        found = run(spec, config, inputs, state, cotangents)
    if isinstance(spec, value_blocks.Cut):
        return value_blocks.whole_gradients(spec, found, of_steps=decay is not None)
    if found.initial_state is None:
        return found
    return found._replace(initial_state=narrow.narrowed(spec, found.initial_state))


class _MosaicGpu(Backend[LinearAttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)
    unsupported_device = staticmethod(unsupported_device)
    forward_for_own_backward = staticmethod(forward_for_own_backward)
    beats_later_backends = staticmethod(beats_later_backends)
    needs_fallback = staticmethod(needs_fallback)
    backward_with_fallback = staticmethod(backward_with_fallback)


BACKEND = _MosaicGpu()
