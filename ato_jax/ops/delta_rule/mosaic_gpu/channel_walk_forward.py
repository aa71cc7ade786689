"""The walk from the first chunk to the last, with a decay per channel and the state in registers.

As in `walk_forward.py`, with the rows and weights of `channel_solve.py`:

    r_t = v_t - k^_t S
    u   = X r
    out = q^_t S + P u
    S'  = exp2(L_C) S + sum_t k~_t^T u_t

All of it is transposed, and in two parts of bfloat16 but for S in q^_t S, for q^, and for k^, which
recalls from S. k~ in one part would leave an error in the state that all later steps read: where
keys are near one another, five times a state's budget.

For a backward pass the walk also keeps S of each chunk, rounded to bfloat16, and u in two parts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, Item
from ato_jax.ops.delta_rule.mosaic_gpu import frame
from ato_jax.ops.delta_rule.mosaic_gpu.channel_solve import Solved
from ato_jax.ops.delta_rule.mosaic_gpu.channel_walk import Plan, Walk, walk
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs

EARLY = ("recalled", "read", "rows", "solved")


def walk_forward(
    spec: DeltaRuleSpec,
    inputs: Inputs,
    kept: jax.Array,
    solved: Solved,
    *,
    keeps: bool = False,
) -> tuple[Outputs, jax.Array | None, jax.Array | None]:
    """The outputs; and where it `keeps` them, u in two parts [B, H, chunks, V / 64, PARTS, 64, 64],
    and the states that chunks begin with, S^T [B, H, chunks, V / 64, D / 64, 64, 64]."""
    plan = Plan(EARLY, parts=1, from_end=False, keeps=("u", "states") if keeps else ())
    given = {"rows": inputs.v, "kept": kept}
    if inputs.initial_state is not None:
        given["start"] = jnp.swapaxes(inputs.initial_state, 2, 3)
    found = walk("channel_walk", spec, plan, solved, given, multiply_chunk)
    outputs = Outputs(found["out"], jnp.swapaxes(found["end"], 2, 3))
    return outputs, found.get("u"), found.get("states")


def multiply_chunk(
    walk: Walk, item: Item, number: Any, chunk: Any, S: list[jax.Array]
) -> list[jax.Array]:
    """Stores the chunk's rows of out; returns S'."""
    own, here, blocks = walk.own, walk.begin(item, chunk), range(len(S))
    read, recalled = (
        [here.tile("read", n, 0).T for n in blocks],
        [here.tile("recalled", n, 0).T for n in blocks],
    )
    solved, pairs = (tuple(part.T for part in here.parts(name)) for name in ("solved", "pairs"))
    parts = [frame.in_two_parts(block) for block in S]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if walk.states is not None:
        for n, (first, _) in enumerate(parts):
            own.kept_states.at[n][...] = first

    def recall(found: jax.Array) -> tuple[jax.Array, jax.Array]:
        v = mosaic.load_transposed(here.tile("rows")).astype(F32)
        r = frame.in_two_parts(v - found)
        mosaic.compute_first(jnp.abs(r[1].astype(F32)))
        return r

    # r is computed while q^ S is in flight.
    r, (reads,) = mosaic.multiply_under(
        [(part, b) for both, b in zip(parts, recalled, strict=True) for part in both],
        (HALF, C),
        [(mosaic.zeros(HALF, C), [(one, b) for (one, _), b in zip(parts, read, strict=True)])],
        recall,
    )
    (u,) = mosaic.multiply((mosaic.zeros(HALF, C), frame.products(r, solved)))
    both = frame.in_two_parts(u)
    plgpu.commit_smem()
    here.release("early")
    own.late.produced.wait(here.late)
    next_state = [
        (S[n] * here.kept(n), frame.products(both, here.parts("written", n))) for n in blocks
    ]

    def store(paired: jax.Array) -> jax.Array:
        out = paired + reads
        mosaic.store_transposed(own.out.at[0], out.astype(BF16))
        return out

    # out is stored while S' is in flight.
    _, sums = mosaic.multiply_under(frame.products(both, pairs), (HALF, C), next_state, store)
    if walk.u is not None:
        for part, rounded in enumerate(both):
            mosaic.store_transposed(own.kept_rows.at[part], rounded)
    plgpu.commit_smem()
    here.release("late")
    plgpu.copy_smem_to_gmem(mosaic.for_copy(own.out.at[0]), walk.part(walk.out, item, chunk))
    walk.leave(item, chunk, *walk.plan.keeps)
    return list(sums)
