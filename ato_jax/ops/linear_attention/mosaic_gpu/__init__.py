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
(`support.py`, `refusals.py`, `steps.py`). Options: any elementwise phi that Mosaic GPU lowers
(`feature_maps.py`); lengths and segments (`steps.py`, `chunk_borders.py`); float16 by units and
powers of two (`mosaic/scales.py`, `powers.py`, `wide_powers.py`, `channel_powers.py`,
`whole_units.py`); FAVOR+ in bfloat16 (`projected.py`, `projected_whole.py`); `vmap` as a larger
batch (`batches.py`). `order.py` leaves calls to other backends that are faster at them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

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
    float32,
    float32_causal,
    frame,
    narrow,
    projected,
    projected_whole,
    steps,
    support,
    value_blocks,
    wide_heads,
)
from ato_jax.ops.linear_attention.mosaic_gpu.batches import as_larger_batch as as_larger_batch
from ato_jax.ops.linear_attention.mosaic_gpu.batches import spec_in_tiles
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config as Config
from ato_jax.ops.linear_attention.mosaic_gpu.order import beats_later_backends
from ato_jax.ops.linear_attention.mosaic_gpu.support import unsupported
from ato_jax.ops.linear_attention.scans import gates
from ato_jax.ops.linear_attention.scans.returned import add_returned
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    return Config(blocks=device.multiprocessors)


def needs_fallback(spec: LinearAttentionSpec) -> bool:
    """Where a chunk is steep, the walks over features are not right with a decay per channel, and
    the sums for the decay's gradient are not right in wide heads; of a decay per head where
    float16's range is too small for states (`MOST_LOST_OF_BOTH_SIDES`)."""
    if spec.decay == "head":
        return spec.dtype == "float16" and frame.both_ways(spec)
    return spec.decay == "channel" or spec.decay == "step" and frame.by_runs(spec)


Kept = Outputs | causal.Kept | narrow.Kept | wide_heads.Kept


def forward_for_own_backward(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs
) -> Kept | fits.Kept:
    if fit := support.fit_of(spec, "backward"):
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
    if fit := support.fit_of(spec, "forward"):
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
    fit = support.fit_of(spec, "backward")
    # The forward pass may have returned a state, whose cotangent is not wanted any more.
    stateful = dataclasses.replace(spec, return_state=True)
    if isinstance(outputs, fits.Kept) and unsupported(stateful, "backward") is None:
        outputs = outputs if fit == support.fit_of(stateful, "backward") else outputs.plain()
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
