"""Linear attention by its definition: quadratic, in float32 or float64, no cleverness.

    w[i,j] = (phi(q_i) . phi(k_j)) * decay(i,j) * visible(i,j)
    out_i  = sum_j w[i,j] v_j / max(sum_j w[i,j], eps)     normalize=True
    out_i  = scale * sum_j w[i,j] v_j                      normalize=False

The initial state is one more key at position -1, of which only the sums are known.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import autodiff
from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
    positions_of_first_query,
)

EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to tune."""


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    return None


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    return Config()


def sums_between(steps: jax.Array) -> jax.Array:
    """[S, F] steps -> [S+1, S+1, F]: at [a, b], the sum of steps[a:b]; 0 where a >= b."""
    number = jnp.arange(steps.shape[0] + 1, dtype=jnp.int32)
    counted = jnp.where(number[None, :-1, None] >= number[:, None, None], steps, 0)
    return jnp.pad(jnp.cumsum(counted, axis=1), ((0, 0), (1, 0), (0, 0)))


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    """One query head of one batch entry at a time, every pair (i, j) written out."""
    q, k, v, decay = inputs.q, inputs.k, inputs.v, inputs.decay
    per_step = spec.decay in ("step", "channel")
    if spec.layout == "bhtd":
        q, k, v = (jnp.swapaxes(array, 1, 2) for array in (q, k, v))
        decay = jnp.swapaxes(decay, 1, 2) if decay is not None and per_step else decay
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q_lengths = inputs.q_lengths
    if q_lengths is None:
        q_lengths = jnp.full(spec.B, spec.T, jnp.int32)
    kv_lengths = inputs.kv_lengths
    if kv_lengths is None:
        kv_lengths = jnp.full(spec.B, spec.S, jnp.int32)
    first = positions_of_first_query(spec, inputs)
    real = jnp.arange(spec.S, dtype=jnp.int32) < kv_lengths[:, None]  # [B, S]
    asked = jnp.arange(spec.T, dtype=jnp.int32) < q_lengths[:, None]  # [B, T]
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    q_segments = zeros((spec.B, spec.T)) if inputs.q_segments is None else inputs.q_segments
    kv_segments = zeros((spec.B, spec.S)) if inputs.kv_segments is None else inputs.kv_segments

    def phi(x: jax.Array) -> jax.Array:
        return spec.feature_map(x.astype(dtype), *inputs.feature_parameters)

    # Padding is replaced before any arithmetic, so that a NaN in it goes nowhere.
    q = phi(jnp.where(asked[..., None, None], q, 0))  # [B, T, H, F]
    k = jnp.where(real[..., None, None], phi(jnp.where(real[..., None, None], k, 0)), 0)
    v = jnp.where(real[..., None, None], v, 0).astype(dtype)
    # Log-decays, [B, S, G, F], or [B, S, G, 1] where the channels share them.
    steps = jnp.zeros((spec.B, spec.S, spec.G, 1), dtype)
    if decay is not None:
        steps += decay.astype(dtype) if spec.decay == "channel" else decay.astype(dtype)[..., None]
        steps = jnp.where(real[..., None, None], steps, 0)
    if inputs.initial_state is None:
        state = LinearState(
            jnp.zeros((spec.B, spec.G, spec.F, spec.V), dtype),
            jnp.zeros((spec.B, spec.G, spec.F), dtype),
        )
    else:
        state = jax.tree.map(lambda array: array.astype(dtype), inputs.initial_state)

    def one_entry(
        q: Any, k: Any, v: Any, steps: Any, state: Any, b_facts: Any
    ) -> tuple[jax.Array, LinearState]:
        """q [T, F] of one head; k [S, F], v [S, V], steps [S, F|1], state [F, V], [F] of its kv."""
        first, asked, real, q_segments, kv_segments, kv_length = b_facts
        i = jnp.arange(spec.T, dtype=jnp.int32)[:, None]
        j = jnp.arange(spec.S, dtype=jnp.int32)[None, :]
        position = i + first if spec.causal else i
        sums = sums_between(steps)
        step = jnp.clip(position, -1, spec.S - 1)
        visible = asked[:, None] & real & (q_segments[:, None] == kv_segments)
        if spec.causal:
            visible &= j <= position
        # The sum of decay[j+1..position], a slice from j + 1 to position + 1, or mirrored.
        between = sums[jnp.minimum(step, j) + 1, jnp.maximum(step, j) + 1]  # [T, S, F or 1]
        if spec.decay == "channel":
            w = jnp.sum(q[:, None] * k * jnp.exp(between), axis=-1)  # [T, S]
        else:
            w = jnp.matmul(q, k.T, precision=EXACT) * jnp.exp(between[..., 0])  # [T, S]
        w = jnp.where(visible, w, 0)
        sees_state = asked[:, None] & (q_segments == 0)[:, None] & (position >= -1)  # [T, 1]
        q_state = jnp.where(sees_state, q * jnp.exp(sums[0, step[:, 0] + 1]), 0)
        num = jnp.matmul(w, v, precision=EXACT) + jnp.matmul(q_state, state.kv, precision=EXACT)
        den = jnp.sum(w, axis=1) + jnp.matmul(q_state, state.k_sum, precision=EXACT)
        if spec.normalize:
            out = autodiff.quotient(num, jnp.maximum(den, spec.eps)[:, None])
        else:
            out = spec.scale * num

        last_segment = jnp.where(kv_length > 0, kv_segments[jnp.maximum(kv_length - 1, 0)], 0)
        in_last = (real & (kv_segments == last_segment))[:, None]
        kept = jnp.where(in_last, k * jnp.exp(sums[1:, kv_length]), 0)  # [S, F]
        since = jnp.where(last_segment == 0, jnp.exp(sums[0, kv_length]), 0)  # [F or 1]
        return out, LinearState(
            jnp.matmul(kept.T, v, precision=EXACT) + since[:, None] * state.kv,
            jnp.sum(kept, axis=0) + since * state.k_sum,
        )

    q = q.reshape(spec.B, spec.T, spec.G, spec.H // spec.G, spec.F)
    over_group = jax.vmap(one_entry, (1, None, None, None, None, None), (1, None))
    over_heads = jax.vmap(over_group, (1, 1, 1, 1, 0, None), (1, 0))
    facts = (first, asked, real, q_segments, kv_segments, kv_lengths)
    out, state = jax.vmap(over_heads)(q, k, v, steps, state, facts)
    out = out.reshape(spec.B, spec.T, spec.H, spec.V)
    out = jnp.where(asked[..., None, None], out, 0).astype(inputs.v.dtype)
    return Outputs(jnp.swapaxes(out, 1, 2) if spec.layout == "bhtd" else out, state)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    return autodiff.gradient(
        functools.partial(forward, spec, config), residuals.inputs, cotangents
    )


class _Reference(Backend[LinearAttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Reference()
