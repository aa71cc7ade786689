"""The backward pass: what is kept of the forward walk, the walk back, the corrections of ddecay
for rounded states, the chunks' gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.mosaic import BF16, F32
from ato_jax.ops.delta_rule.mosaic_gpu import steps
from ato_jax.ops.delta_rule.mosaic_gpu.corrections import corrections
from ato_jax.ops.delta_rule.mosaic_gpu.frame import Config
from ato_jax.ops.delta_rule.mosaic_gpu.gradient import chunk_gradients
from ato_jax.ops.delta_rule.mosaic_gpu.solve import Solved, solve_chunks
from ato_jax.ops.delta_rule.mosaic_gpu.walk_backward import walk_backward
from ato_jax.ops.delta_rule.mosaic_gpu.walk_forward import walk_forward
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs, Residuals


class Kept(NamedTuple):
    """`Outputs`, with what `solve.py` left, u in two parts and the state that each chunk begins
    with: for each element of v 2 + D / 64 + 144 / V elements of bfloat16."""

    out: jax.Array
    state: jax.Array
    solved: Solved
    written: jax.Array  # [B, H, chunks, V / 64, PARTS, 64, 64] bfloat16
    states: jax.Array  # [B, H, chunks, V / 64, D / 64, 64, 64] bfloat16
    maps: jax.Array | None  # [pieces, B, H, D, D] float32, of sequences in pieces

    def plain(self) -> Outputs:
        return Outputs(self.out, self.state)


def keep(spec: DeltaRuleSpec, config: Config, inputs: Inputs) -> Kept:
    """The forward pass."""
    decays = spec.decay is not None
    given = steps.given_of(spec, inputs)
    solved = solve_chunks(spec, config, inputs.k, given, leaves_alike=decays)
    found = walk_forward(spec, config, inputs, solved, keeps=True)
    assert found.written is not None and found.states is not None
    return Kept(*found.outputs, solved, found.written, found.states, found.maps)


def backward(
    spec: DeltaRuleSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    kept: Any = residuals.outputs
    if not isinstance(kept, Kept):  # of another backend's forward pass, or of several devices
        kept = keep(spec, config, inputs)
    back = walk_backward(spec, config, inputs, cotangents, kept.solved, kept.maps)
    arrays = dict(q=inputs.q, k=inputs.k, dout=cotangents.out, dr=back.dv)
    arrays |= dict(written=kept.written, states=kept.states, dstates=back.dstates)
    arrays |= dict(numbers=kept.solved.numbers)
    if back.rest is not None:
        arrays |= dict(rest=back.rest)
        last = cotangents.state if spec.return_state else None
        arrays |= dict(corrections=corrections(spec, config, arrays, inputs.initial_state, last))
    found = chunk_gradients(spec, config, arrays)
    return Inputs(
        q=over_group(spec, found.dq),
        k=over_group(spec, found.dk),
        v=back.dv,
        beta=found.dbeta,
        decay=found.ddecay,
        initial_state=back.dinitial if spec.initial_state else None,
    )


def over_group(spec: DeltaRuleSpec, of_heads: jax.Array) -> jax.Array:
    """The sums over the value heads that share a key head."""
    if spec.H == spec.G:
        return of_heads
    axis = spec.layout.index("h")
    shape = of_heads.shape
    groups = (*shape[:axis], spec.G, spec.H // spec.G, *shape[axis + 1 :])
    return jnp.sum(of_heads.reshape(groups).astype(F32), axis=axis + 1).astype(BF16)
