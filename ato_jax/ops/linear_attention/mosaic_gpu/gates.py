"""The sums of a decay's logarithms, from each chunk's first row on, as the kernels read them.

Of steps they are made by a kernel that Pallas lowers to Triton: a transpose and a product with a
triangle, as XLA has them, take several times what their bytes do.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ato_jax.launch import pallas_call
from ato_jax.ops.linear_attention.mosaic_gpu.frame import LOG2_E, C, whole_chunks
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

LEAST_DECAY = -128.0  # exp of it is 0 in float32
MOST_HEADS = 16  # of a tile
WARPS = 2


def of_heads(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """[B, G, T up to a whole chunk] to base 2, of decay [G]."""
    up = _to_base_2(decay)[:, None] * jnp.arange(1, C + 1, dtype=jnp.float32)  # [G, C]
    length = whole_chunks(spec.T)
    shape = (spec.B, spec.G, length // C, C)
    return jnp.broadcast_to(up[:, None], shape).reshape(spec.B, spec.G, length)


def of_steps(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """The same of decay [B, T, G], or [B, G, T]."""
    heads = min(MOST_HEADS, pl.next_power_of_2(spec.G))
    length, blocks = whole_chunks(spec.T), pl.cdiv(spec.G, heads)
    chunks = length // C

    def kernel(decay_ref: Any, sums_ref: Any) -> None:
        chunk, of_batch = pl.program_id(0) % chunks, pl.program_id(0) // chunks
        rows = chunk * C + jnp.arange(C, dtype=jnp.int32)
        head = of_batch % blocks * heads + jnp.arange(heads, dtype=jnp.int32)
        batch = of_batch // blocks
        exist = (head < spec.G)[:, None]
        given = exist & (rows < spec.T)[None, :]
        at = head[:, None], rows[None, :]
        of_decay = at if spec.layout == "bhtd" else at[::-1]
        x = plgpu.load(decay_ref.at[(batch, *of_decay)], mask=given, other=0.0)
        sums = jax.lax.cumsum(_to_base_2(x), axis=1)
        plgpu.store(sums_ref.at[(batch, *at)], sums, mask=exist)

    return pallas_call(
        kernel,
        grid=(chunks * blocks * spec.B,),
        out_shape=jax.ShapeDtypeStruct((spec.B, spec.G, length), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="linear_attention_gates",
    )(decay)


def gradient(spec: LinearAttentionSpec, decay: jax.Array, steps: jax.Array) -> jax.Array:
    """Of the decay as it is given, of that of each step, [B, G, T]."""
    if spec.decay == "head":
        steps = jnp.sum(steps, axis=(0, 2))
    elif spec.layout == "bthd":
        steps = jnp.swapaxes(steps, 1, 2)
    return jnp.where(decay < LEAST_DECAY, 0.0, steps)


def _to_base_2(decay: jax.Array) -> jax.Array:
    return jnp.maximum(decay, LEAST_DECAY) * LOG2_E
