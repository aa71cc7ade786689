"""The delta rule by its definition: one step after the other, in float32 or float64.

    S_t   = (I - beta_t k_t k_t^T) Diag(exp(decay_t)) S_{t-1} + beta_t k_t v_t^T
    out_t = scale * q_t S_t

S [D, V] starts from the initial state, and from 0 at every later segment. Steps beyond the length
leave it as it is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.meshes import varying_with
from ato_jax.ops.delta_rule.spec import LEAST_DECAY, DeltaRuleSpec, Inputs, Outputs, unit

EXACT = jax.lax.Precision.HIGHEST


def forward(spec: DeltaRuleSpec, inputs: Inputs) -> Outputs:
    dtype = jnp.promote_types(inputs.q.dtype, jnp.float32)

    def without_padding(array: jax.Array) -> jax.Array:
        """[T, B, heads, ...], so that a NaN in padding goes nowhere."""
        if inputs.lengths is None:
            return array
        real = jnp.arange(spec.T, dtype=jnp.int32)[:, None] < inputs.lengths  # [T, B]
        return jnp.where(real.reshape(real.shape + (1,) * (array.ndim - 2)), array, 0)

    def steps(array: jax.Array) -> jax.Array:
        return without_padding(jnp.moveaxis(array, spec.layout.index("t"), 0)).astype(dtype)

    q, k, v, beta = (steps(array) for array in inputs[:4])
    if spec.normalize_qk:
        q, k = unit(q), unit(k)
    q, k = (jnp.repeat(array, spec.H // spec.G, axis=2) for array in (q, k))  # [T, B, H, D]
    decay = starts = None
    if inputs.decay is not None:
        # -inf is a factor of 0, but its derivative would be NaN.
        decay = jnp.maximum(steps(inputs.decay), LEAST_DECAY)
        decay = decay if spec.decay == "channel" else decay[..., None]
    if inputs.segments is not None:
        # [T, B], of every segment but the first
        starts = jnp.diff(inputs.segments, axis=1, prepend=0).T != 0
    state: Any = inputs.initial_state
    if state is None:
        state = jnp.zeros((spec.B, spec.H, spec.D, spec.V), dtype)

    def step(state: jax.Array, arrays: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v, beta, decay, start = arrays  # of one step: [B, H, D], [B, H, V], [B, H], ...
        if start is not None:
            state = jnp.where(start[:, None, None, None], 0, state)
        if decay is not None:
            state = state * jnp.exp(decay)[..., None]
        recalled = jnp.einsum("bhd,bhdv->bhv", k, state, precision=EXACT)
        written = beta[..., None] * (v - recalled)
        state = state + k[..., None] * written[..., None, :]
        return state, spec.scale * jnp.einsum("bhd,bhdv->bhv", q, state, precision=EXACT)

    arrays = (q, k, v, beta, decay, starts)
    state = varying_with(state.astype(dtype), arrays)
    state, out = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), state, arrays)
    out = without_padding(out).astype(inputs.v.dtype)
    return Outputs(jnp.moveaxis(out, 0, spec.layout.index("t")), state)
