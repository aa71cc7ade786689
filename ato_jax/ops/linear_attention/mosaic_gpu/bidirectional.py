"""Every query sees every key, on Hopper: two passes forward, two backward, each array read once in
each.

Forward XLA adds up the sums of a few pieces (`whole_sums.py`), and queries stream past them
(`whole_output.py`). Backward the queries' gradient leaves sums of its pieces, too
(`whole_query_gradient.py`), past which keys and values stream (`whole_key_gradient.py`). Of heads
of more columns the backward is in kernels of its own (`wide_*.py`), where those sums are a pass
more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.mosaic_gpu.whole_key_gradient import whole_key_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.whole_output import whole_output
from ato_jax.ops.linear_attention.mosaic_gpu.whole_query_gradient import whole_query_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.whole_sums import blocks_of_state, whole_sums
from ato_jax.ops.linear_attention.mosaic_gpu.wide_key_gradient import wide_key_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.wide_query_gradient import wide_query_gradient
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)

# What an item takes before its first chunk, in the time of a chunk.
ITEM = 2.0
# Whose inverse is finite, float32's least but for denormal numbers.
LEAST_USUAL = 2.0**-126


def deal(spec: LinearAttentionSpec, config: Config, heads: int, length: int) -> frame.Deal:
    """In so many pieces that blocks end together, few."""
    chunks = pl.cdiv(length, frame.C)

    def cost(pieces: int) -> float:
        rounds = pl.cdiv(spec.B * heads * pieces, config.blocks)
        return rounds * (pl.cdiv(chunks, pieces) + ITEM)

    wanted = config.pieces or min(range(1, min(chunks, config.blocks) + 1), key=cost)
    each = pl.cdiv(chunks, wanted)
    pieces = pl.cdiv(chunks, each)
    return frame.Deal(spec.B, heads, length, each * frame.C, pieces, config.blocks)


def _in_parts(z: jax.Array) -> jax.Array:
    """z [.., F] in the rows of [.., 8, F] in bfloat16: 4 of it rounded, 4 of what that left off."""
    rounded = jax.lax.reduce_precision(z, 8, 7)
    both = jnp.stack([rounded, z - rounded], axis=-2).astype(frame.BF16)
    return jnp.repeat(both, frame.PARTS, axis=-2)


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    parts = blocks_of_state(spec)
    of_queries = deal(spec, config, spec.H * parts, spec.T)
    of_keys = deal(spec, config, spec.G * parts, spec.S)
    kv, k_sum = whole_sums(spec, of_keys, "whole_sums", inputs.k, inputs.v)
    state = LinearState(jnp.sum(kv, axis=2), jnp.sum(k_sum, axis=2))
    if inputs.initial_state is not None:
        state = jax.tree.map(jnp.add, state, inputs.initial_state)
    s = state.kv if spec.normalize else state.kv * spec.scale
    out = whole_output(spec, of_queries, inputs.q, s.astype(frame.BF16), _in_parts(state.k_sum))
    return Outputs(out, state)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs, (kv, k_sum) = residuals.inputs, residuals.outputs.state
    of_queries, of_keys = deal(spec, config, spec.H, spec.T), deal(spec, config, spec.G, spec.S)
    # S, z and with them phi' come in a unit of their own, in which the sums are given back. Where
    # rows are all alike, so are the roundings of phi', and would add up: in units of 1 / sum z
    # they have none where features are alike.
    unit = jnp.full(k_sum.shape[:2], spec.scale, jnp.float32)
    if spec.normalize:
        usual = jnp.sum(jnp.abs(k_sum), axis=2)
        unit = 1 / jnp.where(usual >= LEAST_USUAL, usual, 1.0)
    z = k_sum * unit[..., None]
    least = spec.eps * unit
    arrays = inputs.q, cotangents.out, (kv * unit[..., None, None]).astype(frame.BF16), z
    if frame.is_wide(spec):
        dq, *of_rows = wide_query_gradient(spec, of_queries, *arrays, least)
        of_sums = deal(spec, config, spec.H * blocks_of_state(spec), spec.T)
        r, u = whole_sums(spec, of_sums, "whole_query_sums", inputs.q, cotangents.out, of_rows)
        if not spec.normalize:
            u = jnp.zeros_like(u)
    else:
        rows = jnp.broadcast_to(least[..., None], (*least.shape, frame.C))
        dq, r, u = whole_query_gradient(spec, of_queries, *arrays, rows)
    # Over the pieces and over the query heads of each kv head.
    r = jnp.sum(r.reshape(spec.B, spec.G, -1, spec.D, spec.V), axis=2) * unit[..., None, None]
    u = jnp.sum(u.reshape(spec.B, spec.G, -1, spec.D), axis=2) * unit[..., None]
    if spec.return_state:
        r, u = r + cotangents.state.kv, u + cotangents.state.k_sum
    key_gradient = wide_key_gradient if frame.is_wide(spec) else whole_key_gradient
    dk, dv = key_gradient(spec, of_keys, inputs.k, inputs.v, r.astype(frame.BF16), u)
    d_state = LinearState(r, u) if spec.initial_state else None
    return Inputs(dq, dk, dv, initial_state=d_state)
