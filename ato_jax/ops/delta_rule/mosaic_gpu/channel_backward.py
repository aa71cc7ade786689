"""The passes of a decay per channel: forward, with what is kept of it, and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.delta_rule.mosaic_gpu import backward as gradients
from ato_jax.ops.delta_rule.mosaic_gpu import channel, frame
from ato_jax.ops.delta_rule.mosaic_gpu.channel_gradient import chunk_gradients
from ato_jax.ops.delta_rule.mosaic_gpu.channel_solve import Solved, solve_chunks
from ato_jax.ops.delta_rule.mosaic_gpu.channel_walk_backward import walk_backward
from ato_jax.ops.delta_rule.mosaic_gpu.channel_walk_forward import walk_forward
from ato_jax.ops.delta_rule.mosaic_gpu.frame import Config
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs, Residuals


class Kept(NamedTuple):
    """`Outputs`, with u and the state that each chunk begins with: for each element of v 2 + D / 64
    elements. What `channel_solve.py` makes is made again, which takes less time than room."""

    out: jax.Array
    state: jax.Array
    written: jax.Array  # [B, H, chunks, V / 64, PARTS, 64, 64] bfloat16
    states: jax.Array  # [B, H, chunks, V / 64, D / 64, 64, 64] bfloat16
    maps: jax.Array | None  # [pieces, B, H, D, D] float32, of sequences in pieces

    def plain(self) -> Outputs:
        return Outputs(self.out, self.state)


class Prepared(NamedTuple):
    """What both passes read of the inputs."""

    numbers: jax.Array
    decays: jax.Array
    kept: jax.Array
    solved: Solved


def prepare(spec: DeltaRuleSpec, config: Config, inputs: Inputs, *, parts: int) -> Prepared:
    """`parts`: of the rows by which the walk reads the state."""
    decays, kept, one_level = channel.decays_of(spec, inputs)
    numbers = channel.numbers_of(spec, inputs, one_level)
    solved = solve_chunks(spec, config, inputs, decays, numbers, parts=parts)
    return Prepared(numbers, decays, kept, solved)


def parts_of_forward(spec: DeltaRuleSpec) -> int:
    """One is read. But with 64 columns `channel_solve.py` takes less time for two: 350 us where it
    takes 423 for one (H200, B4 T4096 H32)."""
    return 1 if frame.blocks_of_key(spec) > 1 else frame.PARTS


def forward(spec: DeltaRuleSpec, config: Config, inputs: Inputs) -> Outputs:
    _, _, kept, solved = prepare(spec, config, inputs, parts=parts_of_forward(spec))
    return walk_forward(spec, config, inputs, kept, solved).outputs


def keep(spec: DeltaRuleSpec, config: Config, inputs: Inputs) -> Kept:
    _, _, kept, solved = prepare(spec, config, inputs, parts=parts_of_forward(spec))
    found = walk_forward(spec, config, inputs, kept, solved, keeps=True)
    assert found.written is not None and found.states is not None
    return Kept(*found.outputs, found.written, found.states, found.maps)


def backward(
    spec: DeltaRuleSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    assert inputs.decay is not None
    result: Any = residuals.outputs
    if not isinstance(result, Kept):  # of another backend's forward pass, or of several devices
        result = keep(spec, config, inputs)
    numbers, decays, kept, solved = prepare(spec, config, inputs, parts=frame.PARTS)
    dv, dstate, dstates = walk_backward(spec, config, cotangents, kept, solved, result.maps)
    arrays = dict(q=inputs.q, k=inputs.k, decays=decays, dout=cotangents.out, dr=dv)
    arrays |= dict(written=result.written, states=result.states, dstates=dstates)
    arrays |= dict(numbers=numbers, kept=kept)
    found = chunk_gradients(spec, config, arrays)
    beta = numbers[:, :, :, frame.BETA]
    return Inputs(
        q=gradients.over_group(spec, found.dq),
        k=gradients.over_group(spec, found.dk),
        v=dv,
        beta=of_steps(spec, found.dbeta / beta / beta),
        decay=found.ddecay,
        initial_state=dstate if spec.initial_state else None,
    )


def of_steps(spec: DeltaRuleSpec, of_chunks: jax.Array) -> jax.Array:
    """[B, H, chunks, 64] as an array of the layout's [B, T, H]."""
    found = of_chunks.reshape(spec.B, spec.H, -1)[:, :, : spec.T]
    return jnp.swapaxes(found, 1, 2) if spec.layout == "bthd" else found
