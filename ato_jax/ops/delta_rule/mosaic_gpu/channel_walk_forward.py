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

The walk for the maps of pieces (`pieces.py`) has r, u and S' alone. It takes k^ in one part, too,
also for the gradients that pass pieces by the same maps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, Item
from ato_jax.ops.delta_rule.mosaic_gpu import frame, pieces
from ato_jax.ops.delta_rule.mosaic_gpu.channel_solve import Solved
from ato_jax.ops.delta_rule.mosaic_gpu.channel_walk import Plan, Walk, walk
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.walk import Course
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs

PLAN = Plan(
    early=("recalled", "read", "rows", "solved"),
    late=("written", "pairs", "kept"),
    parts=1,
)


class Found(NamedTuple):
    """Attributes:
    written: u of each chunk, [B, H, chunks, V / 64, PARTS, 64, 64].
    states: S^T that each chunk begins with, [B, H, chunks, V / 64, D / 64, 64, 64].
    maps: M of each piece, where there are several, [pieces, B, H, D, D].
    """

    outputs: Outputs
    written: jax.Array | None
    states: jax.Array | None
    maps: jax.Array | None


def plan_of_maps(spec: DeltaRuleSpec) -> Plan:
    return Plan(
        early=("recalled", "rows", "solved"),
        late=("written", "kept"),
        parts=1,
        slices=pieces.slices_of_maps(spec),
    )


def walk_forward(
    spec: DeltaRuleSpec,
    config: Config,
    inputs: Inputs,
    kept: jax.Array,
    solved: Solved,
    *,
    keeps: bool = False,
) -> Found:
    """The outputs, and where it `keeps` them what a backward pass needs."""
    given = {"rows": inputs.v, "kept": kept}
    left = ("u", "states") if keeps else ()
    course = pieces.course_of(spec, config, ("out", *left), from_end=False)
    start = inputs.initial_state
    start = None if start is None else jnp.swapaxes(start, 2, 3)

    def walk_maps(course: Course, starts: jax.Array) -> jax.Array:
        plan, arrays = plan_of_maps(spec), given | {"start": starts}
        return walk("channel_maps", spec, plan, solved, arrays, map_chunk, course)["end"]

    maps, starts = pieces.starts_forward(spec, course, start, walk_maps, keeps=keeps)
    arrays = given | ({} if starts is None else {"start": starts})
    found = walk("channel_walk", spec, PLAN, solved, arrays, multiply_chunk, course)
    outputs = Outputs(found["out"], jnp.swapaxes(found["end"][-1], 2, 3))
    return Found(outputs, found.get("u"), found.get("states"), maps)


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
    to = walk.part(walk.out, item, walk.number_of(item, chunk))
    plgpu.copy_smem_to_gmem(mosaic.for_copy(own.out.at[0]), to)
    walk.leave(item, chunk, *walk.course.leaves)
    return list(sums)


def map_chunk(
    walk: Walk, item: Item, number: Any, chunk: Any, S: list[jax.Array]
) -> list[jax.Array]:
    """S' of v's columns, or of the identity's, where rows of 0 stand for v."""
    own, here, blocks = walk.own, walk.begin(item, chunk), range(len(S))
    recalled = [here.tile("recalled", n, 0).T for n in blocks]
    solved = tuple(part.T for part in here.parts("solved"))
    # Loaded ahead of products, so that nothing waits for it behind them.
    rows = here.tile("rows") if walk.plan.slices == 1 else here.tile("rows", number)
    v = mosaic.load_transposed(rows).astype(F32)
    _, first = walk.place(item)
    v = jnp.where(first + number < walk.spec.V // HALF, v, 0.0)
    factors = [
        (part, b)
        for block, b in zip(S, recalled, strict=True)
        for part in frame.in_two_parts(block)
    ]
    (found,) = mosaic.multiply((mosaic.zeros(HALF, C), factors))
    r = frame.in_two_parts(v - found)
    (u,) = mosaic.multiply((mosaic.zeros(HALF, C), frame.products(r, solved)))
    both = frame.in_two_parts(u)
    plgpu.commit_smem()
    here.release("early")
    own.late.produced.wait(here.late)
    next_state = (
        (S[n] * here.kept(n), frame.products(both, here.parts("written", n))) for n in blocks
    )
    sums = mosaic.multiply(*next_state)
    plgpu.commit_smem()
    here.release("late")
    return list(sums)
