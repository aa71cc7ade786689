"""Every query sees every key, on Hopper: the mathematics of `triton/bidirectional.py`, of which
each array is read once in each of two passes, forward and backward.

Forward XLA adds up the sums of a few pieces (`whole_sums.py`), and queries stream past them
(`whole_output.py`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.whole_output import whole_output
from ato_jax.ops.linear_attention.mosaic_gpu.whole_sums import whole_sums
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs

# What an item takes before its first chunk, in the time of a chunk.
ITEM = 2.0


def _deal(B: int, heads: int, length: int, blocks: int, pieces: int = 0) -> frame.Deal:
    """In so many pieces that blocks end together, few."""
    chunks = pl.cdiv(length, frame.C)

    def cost(pieces: int) -> float:
        return pl.cdiv(B * heads * pieces, blocks) * (pl.cdiv(chunks, pieces) + ITEM)

    wanted = pieces or min(range(1, min(chunks, blocks) + 1), key=cost)
    each = pl.cdiv(chunks, wanted)
    return frame.Deal(B, heads, length, each * frame.C, pl.cdiv(chunks, each), blocks)


def _in_parts(z: jax.Array) -> jax.Array:
    """z [.., F] in the rows of [.., 8, F] in bfloat16: 4 of it rounded, 4 of what that left off."""
    rounded = jax.lax.reduce_precision(z, 8, 7)
    both = jnp.stack([rounded, z - rounded], axis=-2).astype(frame.BF16)
    return jnp.repeat(both, frame.ALIKE // 2, axis=-2)


def forward(spec: LinearAttentionSpec, blocks: int, pieces: int, inputs: Inputs) -> Outputs:
    kv, k_sum = whole_sums(
        spec, _deal(spec.B, spec.G, spec.S, blocks, pieces), inputs.k, inputs.v
    )
    state = LinearState(jnp.sum(kv, axis=2), jnp.sum(k_sum, axis=2))
    if inputs.initial_state is not None:
        state = jax.tree.map(jnp.add, state, inputs.initial_state)
    s = state.kv if spec.normalize else state.kv * spec.scale
    deal = _deal(spec.B, spec.H, spec.T, blocks, pieces)
    out = whole_output(spec, deal, inputs.q, s.astype(frame.BF16), _in_parts(state.k_sum))
    return Outputs(out, state)
