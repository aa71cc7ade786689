"""The forward kernel: one program per (query block, head, batch entry), keys block by block.

With scores s in units of log2 (see common.py), each block of keys updates

    m'    = max(m, max_j s_j)
    p_j   = exp2(s_j - m')
    total = total * exp2(m - m') + sum_j p_j
    acc   = acc * exp2(m - m') + sum_j p_j v_j

and at the end out = acc / total, lse = ln(2) * m + ln(total).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ato_jax import device
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs
from ato_jax.ops.attention.triton.common import (
    LN_2,
    block_ranges,
    dot,
    exp2,
    fitted,
    for_blocks,
    key_bounds,
    load_tile,
    padded,
    raw_scores,
    score_factor,
    sequence_spec,
    store_tile,
    visible,
)

# Where m starts: finite, so that rows which have seen nothing yet subtract no infinities, and
# below every score, so that exp2(m - m') is then 0.
FLOOR = float(np.finfo(np.float32).min)

Carry = tuple[jax.Array, jax.Array, jax.Array]  # m, total, acc


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    spec: AttentionSpec,
    offset: int,
    block_q: int,
    block_k: int,
    fast_exp2: bool,
) -> None:
    layout = spec.layout
    factor = score_factor(spec)
    block = pl.program_id(0)
    if spec.right is not None:
        # The last queries see the most keys: started first, they do not end last.
        block = pl.num_programs(0) - 1 - block
    i0 = block * block_q
    query = (i0 + jnp.arange(block_q))[:, None]  # [block_q, 1]
    q = load_tile(layout, q_ref, None, i0, block_q, spec.T, spec.D)  # [block_q, D]

    def step(masked: bool, n: Any, carry: Carry) -> Carry:
        m, total, acc = carry  # [block_q], [block_q], [block_q, V]
        j0 = n * block_k
        k = load_tile(layout, k_ref, None, j0, block_k, spec.S, spec.D, not masked)  # [block_k, D]
        raw = raw_scores(spec, dot(spec, q, k, trans_b=True))  # [block_q, block_k]
        if masked:
            key = (j0 + jnp.arange(block_k))[None, :]  # [1, block_k]
            raw = jnp.where(visible(spec, offset, query, key), raw, -jnp.inf)
        m_next = jnp.maximum(m, jnp.max(raw, axis=1) * factor)
        p = exp2(raw * factor - m_next[:, None], fast_exp2)
        correction = exp2(m - m_next, fast_exp2)
        total = total * correction + jnp.sum(p, axis=1)
        v = load_tile(layout, v_ref, None, j0, block_k, spec.S, spec.V, not masked)  # [block_k, V]
        acc = acc * correction[:, None] + dot(spec, p.astype(v.dtype), v)
        return m_next, total, acc

    ranges = block_ranges(key_bounds(spec, offset), i0, block_q, spec.S, block_k)
    start = (
        jnp.full((block_q,), FLOOR, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
        jnp.zeros((block_q, padded(spec.V)), jnp.float32),
    )
    m, total, acc = for_blocks(ranges, step, start)

    nothing = total == 0
    safe = jnp.where(nothing, 1.0, total)
    lse = jnp.where(nothing, -jnp.inf, m * LN_2 + jnp.log(safe))
    store_tile(layout, out_ref, None, i0, acc / safe[:, None], spec.T, spec.V)
    store_tile(layout, lse_ref, None, i0, lse, spec.T)


def forward(spec: AttentionSpec, config: Any, inputs: Inputs) -> Outputs:
    assert spec.offset is not None
    layout = spec.layout
    block_q, block_k = fitted(config.block_q, spec.T), fitted(config.block_k, spec.S)
    share = spec.H // spec.G
    rows = (spec.T, spec.H) if layout == "bthd" else (spec.H, spec.T)
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            spec=spec,
            offset=spec.offset,
            block_q=block_q,
            block_k=block_k,
            fast_exp2=config.fast_exp2,
        ),
        grid=(pl.cdiv(spec.T, block_q), spec.H, spec.B),
        in_specs=[
            sequence_spec(layout, spec.T, spec.D, block_q),
            sequence_spec(layout, spec.S, spec.D, block_k, share=share),
            sequence_spec(layout, spec.S, spec.V, block_k, share=share),
        ],
        out_specs=[
            sequence_spec(layout, spec.T, spec.V, block_q),
            sequence_spec(layout, spec.T, None, block_q),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((spec.B, *rows, spec.V), inputs.v.dtype),
            jax.ShapeDtypeStruct((spec.B, *rows), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=device.interpreting(),
        name="attention_forward",
    )(inputs.q, inputs.k, inputs.v)
    return Outputs(out, lse)
