"""Softmax attention by its definition: quadratic in T and S, in float32 or float64.

    s[i,j] = scale * q_i . k_j ; softcap: c * tanh(s / c) ; + bias ; masked where not visible
    out_i  = softmax over j (and over the sink logit, which has no value) . v
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ato_jax import autodiff
from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.ops.attention.spec import (
    AttentionSpec,
    Inputs,
    Outputs,
    Residuals,
    dropout_keep,
    positions_of_first_query,
    within_bounds,
)

EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Config:
    """No block sizes."""


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    return None


def default_config(spec: AttentionSpec, device: Device) -> Config:
    return Config()


def visible_pairs(spec: AttentionSpec, inputs: Inputs) -> jax.Array:
    """Which query sees which key, [B, H|1, T, S]."""
    i = jnp.arange(spec.T, dtype=jnp.int32)[:, None]
    j = jnp.arange(spec.S, dtype=jnp.int32)[None, :]
    position = i + positions_of_first_query(spec, inputs)[:, None, None]  # [B, T, 1]
    visible = jnp.ones((spec.B, spec.T, spec.S), bool) & within_bounds(spec, position, j)
    if inputs.q_segments is not None and inputs.kv_segments is not None:
        visible &= inputs.q_segments[:, :, None] == inputs.kv_segments[:, None, :]
    if inputs.q_lengths is not None:
        visible &= i < inputs.q_lengths[:, None, None]
    if inputs.kv_lengths is not None:
        visible &= j < inputs.kv_lengths[:, None, None]
    visible = visible[:, None]
    return visible if inputs.mask is None else visible & inputs.mask


def forward(spec: AttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    q, k, v = inputs.q, inputs.k, inputs.v
    if spec.layout == "bthd":
        q, k, v = (jnp.swapaxes(array, 1, 2) for array in (q, k, v))
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    # Padding is replaced before any arithmetic, so that a NaN in it goes nowhere.
    q_lengths = inputs.q_lengths
    if q_lengths is None:
        q_lengths = jnp.full(spec.B, spec.T, jnp.int32)
    asked = jnp.arange(spec.T, dtype=jnp.int32) < q_lengths[:, None]
    asked = asked[:, None, :, None]  # [B, 1, T, 1]
    q = jnp.where(asked, q, 0)
    if inputs.kv_lengths is not None:
        real = jnp.arange(spec.S, dtype=jnp.int32) < inputs.kv_lengths[:, None]
        k, v = (jnp.where(real[:, None, :, None], array, 0) for array in (k, v))
    q = q.astype(dtype)  # [B, H, T, D]
    k, v = (
        jnp.repeat(array.astype(dtype), spec.H // spec.G, axis=1) for array in (k, v)
    )  # [B, H, S, D], [B, H, S, V]

    s = spec.scale * jnp.einsum("bhtd,bhsd->bhts", q, k, precision=EXACT)
    if spec.softcap is not None:
        s = spec.softcap * jnp.tanh(s / spec.softcap)
    visible = visible_pairs(spec, inputs)
    if inputs.bias is not None:
        bias = jnp.where(visible, inputs.bias.astype(dtype), 0)
        visible = visible & (bias != -jnp.inf)
        s = s + jnp.where(visible, bias, 0)
    s = jnp.where(visible, s, -jnp.inf)
    logits = s
    if inputs.sinks is not None:
        sink = jnp.broadcast_to(inputs.sinks.astype(dtype)[:, None, None], s.shape[:3] + (1,))
        logits = jnp.concatenate([s, sink], axis=-1)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    top = jnp.where(top > -jnp.inf, top, 0)
    # Hidden logits are replaced before the exponential, so that no gradient passes an infinity.
    hidden = logits == -jnp.inf
    weights = jnp.where(hidden, 0, jnp.exp(jnp.where(hidden, 0, logits - top)))
    total = jnp.sum(weights, axis=-1)  # [B, H, T]
    nothing = total == 0
    safe = jnp.where(nothing, 1, total)
    lse = jnp.where(nothing, -jnp.inf, top[..., 0] + jnp.log(safe))
    p = weights[..., : spec.S] / safe[..., None]
    if inputs.dropout_seed is not None:
        b, h, i, j = jnp.ogrid[: spec.B, : spec.H, : spec.T, : spec.S]
        keep = dropout_keep(spec.dropout_rate, inputs.dropout_seed, b, h, i, j)
        p = jnp.where(keep, p / (1 - spec.dropout_rate), 0)
    out = jnp.einsum("bhts,bhsv->bhtv", p, v, precision=EXACT).astype(inputs.v.dtype)
    out = jnp.where(asked, out, 0)
    # Padded queries give the sinks no gradient, and NaN in their cotangents reaches nothing.
    lse = jnp.where(asked[..., 0], lse, jax.lax.stop_gradient(lse))
    if spec.layout == "bthd":
        out, lse = jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)
    return Outputs(out, lse)


def backward(
    spec: AttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    return autodiff.gradient(
        functools.partial(forward, spec, config), residuals.inputs, cotangents
    )


class _Reference(Backend[AttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Reference()
