"""The walk from the last chunk to the first, with a decay per channel and the state's gradient in
registers.

With the letters of `channel_walk_forward.py`, and dS' the gradient of the state that a chunk ends
with:

    du_t = sum_s P[s, t] dout_s + k~_t dS'
    dr   = X^T du                                              which is dv
    dS   = exp2(L_C) dS' + sum_t q^_t^T dout_t - k^_t^T dr_t

Here q^, k^ and k~ are in two parts: where keys are near one another, dr is what is left of terms of
du that cancel. The walk leaves dv, and for `channel_gradient.py` dS' of each chunk, rounded to
bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, Item
from ato_jax.ops.delta_rule.mosaic_gpu import frame, pieces
from ato_jax.ops.delta_rule.mosaic_gpu.channel_solve import Solved
from ato_jax.ops.delta_rule.mosaic_gpu.channel_walk import Plan, Walk, walk
from ato_jax.ops.delta_rule.mosaic_gpu.frame import PARTS, C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.walk import Course
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Outputs

PLAN = Plan(
    early=("written", "pairs", "rows"),
    late=("recalled", "read", "solved", "kept"),
    parts=PARTS,
)


def walk_backward(
    spec: DeltaRuleSpec,
    config: Config,
    cotangents: Outputs,
    kept: jax.Array,
    solved: Solved,
    maps: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dv, the initial state's gradient [B, H, D, V], and dS'^T of each chunk [B, H, chunks,
    V / 64, D / 64, 64, 64]). `maps`: those of the forward walk."""
    given = {"rows": cotangents.out, "kept": kept}
    course = pieces.course_of(spec, config, ("out", "states"), from_end=True)
    start = jnp.swapaxes(cotangents.state, 2, 3) if spec.return_state else None

    def walk_later(course: Course) -> jax.Array:
        # As in `walk_backward.py` nobody reads what this walk leaves beside its ends.
        return walk("channel_ends", spec, PLAN, solved, given, multiply_chunk, course)["end"]

    starts = pieces.starts_backward(course, start, maps, walk_later)
    arrays = given | ({} if starts is None else {"start": starts})
    found = walk("channel_walk_backward", spec, PLAN, solved, arrays, multiply_chunk, course)
    return found["out"], jnp.swapaxes(found["end"][0], 2, 3), found["states"]


def multiply_chunk(
    walk: Walk, item: Item, number: Any, chunk: Any, dstate: list[jax.Array]
) -> list[jax.Array]:
    """Stores the chunk's rows of dv and its dS', which is `dstate`; returns dS."""
    own, here, blocks = walk.own, walk.begin(item, chunk), range(len(dstate))
    parts = [frame.in_two_parts(block) for block in dstate]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for n, (first, _) in enumerate(parts):
        own.kept_states.at[n][...] = first
    dout = mosaic.load_transposed(here.tile("rows"))  # [64, 64]
    products = [(dout, part) for part in here.parts("pairs")]
    for n in blocks:
        first, second = (part.T for part in here.parts("written", n))
        products += frame.products(parts[n], (first, second))
    (found,) = mosaic.multiply((mosaic.zeros(HALF, C), products))
    du = frame.in_two_parts(found)
    plgpu.commit_smem()
    here.release("early")
    own.late.produced.wait(here.late)

    def recall(dr: jax.Array) -> tuple[jax.Array, jax.Array]:
        mosaic.store_transposed(own.out.at[0], dr.astype(BF16))
        recalled = frame.in_two_parts(-dr)
        mosaic.compute_first(jnp.abs(recalled[1].astype(F32)))
        return recalled

    # dr is stored and rounded while the products of dout and q^ are in flight.
    recalled, sums = mosaic.multiply_under(
        frame.products(du, here.parts("solved")),
        (HALF, C),
        [
            (dstate[n] * here.kept(n), [(dout, part) for part in here.parts("read", n)])
            for n in blocks
        ],
        recall,
    )
    found_states = mosaic.multiply(
        *((sums[n], frame.products(recalled, here.parts("recalled", n))) for n in blocks)
    )
    plgpu.commit_smem()
    here.release("late")
    to = walk.part(walk.out, item, walk.number_of(item, chunk))
    plgpu.copy_smem_to_gmem(mosaic.for_copy(own.out.at[0]), to)
    walk.leave(item, chunk, *walk.course.leaves)
    return list(found_states)
