"""The backward pass: what is kept of the forward walk, the walk back, the chunks' gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.mosaic import BF16, F32
from ato_jax.ops.delta_rule.mosaic_gpu import frame, gradient
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.gradient import chunk_gradients
from ato_jax.ops.delta_rule.mosaic_gpu.solve import solve_chunks
from ato_jax.ops.delta_rule.mosaic_gpu.walk_backward import walk_backward
from ato_jax.ops.delta_rule.mosaic_gpu.walk_forward import walk_forward
from ato_jax.ops.delta_rule.spec import LEAST_DECAY, DeltaRuleSpec, Inputs, Outputs, Residuals


class Kept(NamedTuple):
    """`Outputs`, with X, u and the state that each chunk begins with: for each element of v
    1 + D / 64 + 128 / V elements."""

    out: jax.Array
    state: jax.Array
    solved: jax.Array  # [B, H, chunks, PARTS, 64, 64] bfloat16
    written: jax.Array  # [B, H, chunks, V / 64, 64, 64] bfloat16
    states: jax.Array  # [B, H, chunks, V / 64, D / 64, 64, 64] bfloat16
    maps: jax.Array | None  # [pieces, B, H, D, D] float32, of sequences in pieces

    def plain(self) -> Outputs:
        return Outputs(self.out, self.state)


def keep(spec: DeltaRuleSpec, config: Config, inputs: Inputs) -> Kept:
    """The forward pass."""
    numbers = frame.numbers_of(spec, inputs)
    solved = solve_chunks(spec, config, inputs, numbers)
    found = walk_forward(spec, config, inputs, numbers, solved, keeps=True)
    assert found.written is not None and found.states is not None
    return Kept(*found.outputs, solved, found.written, found.states, found.maps)


def backward(
    spec: DeltaRuleSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    kept: Any = residuals.outputs
    if not isinstance(kept, Kept):  # of another backend's forward pass, or of several devices
        kept = keep(spec, config, inputs)
    numbers = frame.numbers_of(spec, inputs)
    dv, dstate, dstates = walk_backward(
        spec, config, inputs, cotangents, numbers, kept.solved, kept.maps
    )
    arrays = dict(q=inputs.q, k=inputs.k, dout=cotangents.out, dr=dv)
    arrays |= dict(written=kept.written, states=kept.states, dstates=dstates, numbers=numbers)
    found = chunk_gradients(spec, config, arrays)
    sums = jnp.sum(found.sums, axis=3)  # [B, H, chunks, SUMS, 64]
    beta = numbers[:, :, :, frame.BETA]
    return Inputs(
        q=over_group(spec, found.dq),
        k=over_group(spec, found.dk),
        v=dv,
        beta=of_steps(spec, sums[:, :, :, gradient.OF_BETA] / beta / beta),
        decay=decay_gradient(spec, inputs, sums),
        initial_state=dstate if spec.initial_state else None,
    )


def over_group(spec: DeltaRuleSpec, of_heads: jax.Array) -> jax.Array:
    """The sums over the value heads that share a key head."""
    if spec.H == spec.G:
        return of_heads
    axis = spec.layout.index("h")
    shape = of_heads.shape
    groups = (*shape[:axis], spec.G, spec.H // spec.G, *shape[axis + 1 :])
    return jnp.sum(of_heads.reshape(groups).astype(F32), axis=axis + 1).astype(BF16)


def of_steps(spec: DeltaRuleSpec, of_chunks: jax.Array) -> jax.Array:
    """[B, H, chunks, 64] as an array of the layout's [B, T, H]."""
    found = of_chunks.reshape(spec.B, spec.H, -1)[:, :, : spec.T]
    return jnp.swapaxes(found, 1, 2) if spec.layout == "bthd" else found


def decay_gradient(spec: DeltaRuleSpec, inputs: Inputs, sums: jax.Array) -> jax.Array | None:
    """Each step's decay is part of the sums of it and of all later steps of its chunk."""
    if inputs.decay is None:
        return None
    of_last = jnp.sum(sums[:, :, :, gradient.OF_LAST], axis=3)
    of_sums = sums[:, :, :, gradient.OF_LOG_DECAY].at[..., C - 1].add(of_last)
    found = of_steps(spec, jax.lax.cumsum(of_sums, axis=3, reverse=True))
    return jnp.where(inputs.decay > LEAST_DECAY, found, 0)
