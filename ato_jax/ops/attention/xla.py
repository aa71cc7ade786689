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

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ato_jax import autodiff
from ato_jax.device import Device
from ato_jax.ops.attention import blocks
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs, Residuals, dropout_keep

# How many scores to hold at once. On a CPU 4 MB of them: they stay in its caches, while the
# products are large enough. Accelerators want long programs: 256 MB.
SCORES_AT_ONCE = {"cpu": 1 << 20}
SCORES_AT_ONCE_ELSEWHERE = 1 << 26
# Below this many rows, products wait for the memory of their keys.
FEWEST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Queries to a block; kv heads and batch entries that are computed together."""

    block_t: int
    heads: int
    batch: int


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    return None


def default_config(spec: AttentionSpec, device: Device) -> Config:
    """As many scores at once as the platform likes: first queries, then heads, then batch."""
    scores = SCORES_AT_ONCE.get(device.platform, SCORES_AT_ONCE_ELSEWHERE)
    R = spec.H // spec.G
    block_t = min(spec.T, max(scores // (R * spec.S), -(-FEWEST_ROWS // R)))
    heads = _divisor(spec.G, scores // (R * spec.S * block_t))
    batch = _divisor(spec.B, scores // (R * spec.S * block_t * heads)) if heads == spec.G else 1
    return Config(block_t, heads, batch)


def _divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` up to `limit`, at least 1."""
    return next(d for d in range(max(1, min(size, limit)), 0, -1) if size % d == 0)


def forward(spec: AttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    arrays = blocks.per_kv_head(spec, inputs)

    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("m", "l", "pv")
    )
    def block(arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
        return _block(spec, arrays)

    def strip(arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
        return blocks.over_queries(block, arrays, config.block_t)

    def head(arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
        return blocks.strips(spec, strip, arrays)

    def entry(arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
        return blocks.each(head, arrays, spec.G, config.heads)

    out, lse = blocks.each(entry, arrays, spec.B, config.batch)
    out = out.reshape(spec.B, spec.H, spec.T, spec.V)
    lse = lse.reshape(spec.B, spec.H, spec.T)
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
    if spec.sinks:
        sinks = arrays["sinks"].astype(s.dtype)[:, None, None]  # [R, 1, 1]
        top = jnp.maximum(top, lax.stop_gradient(sinks))
    m = checkpoint_name(jnp.where(top == -jnp.inf, 0, top), "m")
    p = jnp.exp(s - m)  # [R, block, S]
    total = jnp.sum(p, axis=-1, keepdims=True)  # l, [R, block, 1]
    if spec.sinks:
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
