"""The walk from the last chunk to the first, with the state's gradient in registers.

For each head and 64 of v's columns, with the letters of `walk_forward.py`, and dS' the gradient of
the state that a chunk ends with:

    du_t = sum_s P[s, t] dout_s + exp2(L_C - L_t) k_t dS'
    dr   = X^T du                                              which is dv
    dS   = exp2(L_C) dS' + sum_t exp2(L_t) (scale * q_t^T dout_t - k_t^T dr_t)

As in the forward walk all of it is transposed, and every factor that is not an input is in two
parts of bfloat16. The walk leaves dv, and for `gradient.py` dS' of each chunk, rounded to bfloat16,
and where steps decay dr's second part.
`walk.py` has its roles and what it loads; BESIDE forms P.

    BESIDE
      |  pairs: stored, a chunk or two ahead; consumed once they are multiplied
      v
    STATE
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, Item
from ato_jax.ops.delta_rule.mosaic_gpu import frame, pieces
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.solve import Solved
from ato_jax.ops.delta_rule.mosaic_gpu.walk import Course, Walk, add_products, walk
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs


class Found(NamedTuple):
    """Attributes:
    dv: as v, which is dr's first part.
    rest: as dv, dr's second part where steps decay.
    dinitial: the initial state's gradient, [B, H, D, V].
    dstates: dS'^T of each chunk, [B, H, chunks, V / 64, D / 64, 64, 64].
    """

    dv: jax.Array
    rest: jax.Array | None
    dinitial: jax.Array
    dstates: jax.Array


def walk_backward(
    spec: DeltaRuleSpec,
    config: Config,
    inputs: Inputs,
    cotangents: Outputs,
    solved: Solved,
    maps: jax.Array | None,
) -> Found:
    """`maps`: those of the forward walk."""
    given = {"q": inputs.q, "k": inputs.k, "rows": cotangents.out, **solved._asdict()}
    leaves = ("out", "states") if spec.decay is None else ("out", "rest", "states")
    course = pieces.course_of(spec, config, leaves, from_end=True)
    start = jnp.swapaxes(cotangents.state, 2, 3) if spec.return_state else None

    def walk_later(course: Course) -> jax.Array:
        # Nobody reads what this walk leaves beside its ends. Without these stores ptxas takes the
        # first two sums of products out of the loop, although the next ones depend on them.
        course = dataclasses.replace(course, leaves=("out", "states"))
        return walk("ends", spec, config, given, multiply_chunk, weigh_chunk, course)["end"]

    starts = pieces.starts_backward(course, start, maps, walk_later)
    arrays = given | ({} if starts is None else {"start": starts})
    found = walk("walk_backward", spec, config, arrays, multiply_chunk, weigh_chunk, course)
    dinitial = jnp.swapaxes(found["end"][0], 2, 3)
    return Found(found["out"], found.get("rest"), dinitial, found["states"])


def weigh_chunk(walk: Walk, item: Item, chunk: Any) -> None:
    """Hands P to STATE."""
    own, here = walk.own, walk.begin(item, chunk)
    parts = frame.in_two_parts(walk.pairs_of(here))
    own.pairs.acquire(here.step)
    slot = own.pairs.slot(here.step)
    for n, part in enumerate(parts):
        own.weights.at[slot, n][...] = part
    plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
    own.pairs.produced.arrive(slot)
    own.chunks.consumed.arrive(here.slot)


def multiply_chunk(
    walk: Walk, item: Item, number: Any, chunk: Any, dstate: list[jax.Array]
) -> list[jax.Array]:
    """Stores the chunk's rows of dv and its dS', which is `dstate`; returns dS."""
    own, here = walk.own, walk.begin(item, chunk)
    rows = own.rows.at[here.slot, number]
    # dr's second part lies over dout, which nobody reads again, where there is no room beside.
    rest = rows if own.rest is None else own.rest.at[number]
    q, k, numbers = here.q, here.k, here.numbers
    of_pairs = own.pairs.slot(here.step)
    own.pairs.produced.wait(of_pairs)
    pairs = [own.weights.at[of_pairs, part] for part in range(frame.PARTS)]
    # Loaded ahead of products, so that nothing waits for it behind them.
    dout = mosaic.load_transposed(rows)  # [64, 64]
    parts = [frame.in_two_parts(block) for block in dstate]

    def store_state() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for n, (first, _) in enumerate(parts):
            own.states.at[0, number, n][...] = first

    written, of_out = mosaic.multiply(
        (
            mosaic.zeros(HALF, C),
            [(part, b.T) for both, b in zip(parts, k, strict=True) for part in both],
        ),
        (mosaic.zeros(HALF, C), [(dout, part) for part in pairs]),
        meanwhile=store_state,
    )
    du = frame.in_two_parts(of_out + numbers.times(written, numbers.of_written()))
    read = frame.in_two_parts(numbers.times(dout.astype(F32), numbers.of_read()))
    kept = numbers.kept()

    def recall(dr: jax.Array) -> tuple[jax.Array, jax.Array]:
        if walk.rest is None:
            mosaic.store_transposed(own.out.at[number], dr.astype(BF16))
        else:
            for tile, part in zip((own.out.at[number], rest), frame.in_two_parts(dr), strict=True):
                mosaic.store_transposed(tile, part)
        recalled = frame.in_two_parts(numbers.times(-dr, numbers.of_recalled()))
        mosaic.compute_first(jnp.abs(recalled[1].astype(F32)))
        return recalled

    # dr is stored and rounded while the products of dout and q are in flight.
    recalled, sums = mosaic.multiply_under(
        frame.products(du, here.solved),
        (HALF, C),
        [
            (block if kept is None else block * kept, [(part, b) for part in read])
            for block, b in zip(dstate, q, strict=True)
        ],
        recall,
    )

    def leave() -> None:
        plgpu.commit_smem()  # also what was read of the slot, ahead of what overwrites it
        walk.store_rows(item, chunk, number, own.out.at[number], walk.out)
        if walk.rest is not None:
            walk.store_rows(item, chunk, number, rest, walk.rest)
        walk.store_state(item, chunk, 0, number)

    found = add_products(list(sums), None, [(recalled, k)], leave)
    own.pairs.consumed.arrive(of_pairs)
    if walk.rest is not None and own.rest is None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    own.chunks.consumed.arrive(here.slot)
    return found
