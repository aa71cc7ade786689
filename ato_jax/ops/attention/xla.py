"""Softmax attention in plain JAX: every option, on every platform, memory linear in T.

For one kv head, a block of queries i and all the keys j that its strip can see (`blocks`):

    s[i,j] = softcap(scale * q_i . k_j) + bias[i,j]         -inf where i may not see j
    m_i    = max_j s[i,j], the sink too                     0 where that is -inf
    p[i,j] = exp(s[i,j] - m_i)
    l_i    = sum_j p[i,j] + exp(sink - m_i)
    out_i  = sum_j dropped(p[i,j]) v_j / l_i                0 where l_i = 0
    lse_i  = m_i + log l_i                                  -inf where l_i = 0

m only keeps exp in range: neither out nor lse depends on it, so it is a constant to every
derivative. JAX differentiates the rest itself, in forward mode and to any order; out of a block
it keeps m, l and p . v, and computes the weights again, as a flash kernel does.

Causality and windows skip what they hide where the position of query 0 is static
(`spec.offset`); where it is not, as with a traced `query_offset`, they are masks alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ato_jax import autodiff
from ato_jax.ops.attention import blocks
from ato_jax.ops.attention.blocks import Config, default_config
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs, Residuals, dropout_keep

__all__ = ["Config", "unsupported", "default_config", "forward", "backward"]


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    return None


def forward(spec: AttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("m", "l", "pv")
    )
    def block(arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
        return _block(spec, arrays)

    def strip(arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
        return blocks.over_queries(block, arrays, config.block_t)

    def head(arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
        return blocks.strips(spec, config, strip, arrays)

    out, lse = blocks.per_head(spec, config, head, blocks.per_kv_head(spec, inputs))
    if inputs.q_lengths is not None:
        # These rows hold that already; the selects keep NaN in their cotangents out.
        held = jnp.arange(spec.T) < inputs.q_lengths[:, None, None]  # [B, 1, T]
        out = jnp.where(held[..., None], out, 0)
        lse = jnp.where(held, lse, lax.stop_gradient(lse))
    if spec.layout == "bthd":
        out, lse = out.swapaxes(1, 2), lse.swapaxes(1, 2)
    return Outputs(out.astype(inputs.v.dtype), lse)


def _block(spec: AttentionSpec, arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
    """out [R, block, V] and lse [R, block] of a block of queries, from all of their keys."""
    s = blocks.scores(spec, arrays)  # [R, block, S]
    top = jnp.max(lax.stop_gradient(s), axis=-1, keepdims=True)  # [R, block, 1]
    sinks = arrays["sinks"][:, None, None] if spec.sinks else None  # [R, 1, 1]
    if sinks is not None:
        top = jnp.maximum(top, lax.stop_gradient(sinks))
    m = checkpoint_name(jnp.where(top == -jnp.inf, 0, top), "m")
    p = jnp.exp(s - m)  # [R, block, S]
    total = jnp.sum(p, axis=-1, keepdims=True)  # l, [R, block, 1]
    if sinks is not None:
        total = total + jnp.exp(sinks - m)
    total = checkpoint_name(total, "l")
    if spec.dropout_rate:
        i, j = blocks.indices(arrays)
        h = arrays["h"][:, None, None]
        keep = dropout_keep(spec.dropout_rate, arrays["seed"], arrays["b"], h, i, j)
        p = jnp.where(keep, p / (1 - spec.dropout_rate), 0)
    product = jnp.einsum("rts,sv->rtv", p, arrays["v"], precision=blocks.dot_precision(spec))
    product = checkpoint_name(product, "pv")
    sees = total > 0
    safe = jnp.where(sees, total, 1)
    return product / safe, jnp.where(sees, m + jnp.log(safe), -jnp.inf)[..., 0]


def backward(
    spec: AttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    return autodiff.gradient(
        functools.partial(forward, spec, config), residuals.inputs, cotangents
    )
