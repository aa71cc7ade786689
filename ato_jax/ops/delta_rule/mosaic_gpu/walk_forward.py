"""The walk from the first chunk to the last, with the state in registers.

For each head and 64 of v's columns, chunk by chunk, with X of `solve.py` and P, and L_t the sum of
log2 decays from the chunk's first step to t:

    r_t = v_t - exp2(L_t) k_t S
    u   = X r
    out = scale * exp2(L_t) q_t S + P u
    S'  = exp2(L_C) S + sum_t k_t^T exp2(L_C - L_t) u_t         for the chunk's last step C

What the next chunk waits for is transposed: S^T [64, D], r^T and u^T [64, 64] have v's columns as
rows. They are results of products and first factors of the next ones, which both lie in registers.
Each is multiplied in two parts of bfloat16, but for S in q_t S, which goes to out alone.

    STATE          r, u and S'
      |  begun: S is stored, rounded; consumed once out is known
      |  corrected: u is stored, in two parts; consumed with S
      v
    BESIDE         P, which stays in registers, and out

For a backward pass the walk also keeps S of each chunk, rounded to bfloat16, and u in two parts.
`walk.py` has its roles and what it loads.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_ROWS, Item
from ato_jax.ops.delta_rule.mosaic_gpu import frame, pieces
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.solve import Solved
from ato_jax.ops.delta_rule.mosaic_gpu.walk import Course, Walk, add_products, walk
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs


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


def walk_forward(
    spec: DeltaRuleSpec,
    config: Config,
    inputs: Inputs,
    solved: Solved,
    *,
    keeps: bool = False,
) -> Found:
    """The outputs, and where it `keeps` them what a backward pass needs."""
    # Two slices in a block would leave BESIDE and STATE too few registers.
    config = dataclasses.replace(config, slices=1)
    given = {"k": inputs.k, "rows": inputs.v, **solved._asdict()}
    kept = ("written", "states") if keeps else ()
    course = pieces.course_of(spec, config, ("out", *kept), from_end=False)
    start = inputs.initial_state
    start = None if start is None else jnp.swapaxes(start, 2, 3)

    def walk_maps(course: Course, starts: jax.Array) -> jax.Array:
        of_maps = dataclasses.replace(config, slices=pieces.slices_of_maps(spec))
        arrays = given | {"start": starts}
        return walk("maps", spec, of_maps, arrays, multiply_chunk, None, course)["end"]

    maps, starts = pieces.starts_forward(spec, course, start, walk_maps, keeps=keeps)
    arrays = given | {"q": inputs.q} | ({} if starts is None else {"start": starts})
    found = walk("walk", spec, config, arrays, multiply_chunk, put_out, course)
    outputs = Outputs(found["out"], jnp.swapaxes(found["end"][-1], 2, 3))
    return Found(outputs, found.get("written"), found.get("states"), maps)


def multiply_chunk(
    walk: Walk, item: Item, number: Any, chunk: Any, S: list[jax.Array]
) -> list[jax.Array]:
    """Hands S and u to BESIDE, where there is one; returns S'."""
    own, here = walk.own, walk.begin(item, chunk)
    k, numbers = here.k, here.numbers
    # Loaded ahead of products, so that nothing waits for it behind them.
    v = mosaic.load_transposed(own.rows.at[here.slot, number])
    of_recalled = numbers.of_recalled()
    parts = [frame.in_two_parts(block) for block in S]

    def hand_state() -> None:
        if own.begun is None:
            return
        slot = own.begun.slot(here.step)
        own.begun.acquire(here.step)
        for n, (first, _) in enumerate(parts):
            own.states.at[slot, number, n][...] = first
        plgpu.commit_smem()
        own.begun.produced.arrive(slot)

    factors = [(part, b.T) for both, b in zip(parts, k, strict=True) for part in both]
    (recalled,) = mosaic.multiply((mosaic.zeros(HALF, C), factors), meanwhile=hand_state)
    v = v.astype(F32)
    if walk.course.maps:
        _, first = walk.place(item)
        v = jnp.where(first + number < walk.spec.V // HALF, v, 0.0)
    r = frame.in_two_parts(v - numbers.times(recalled, of_recalled))
    of_written, kept = numbers.of_written(), numbers.kept()
    solved = tuple(part.T for part in here.solved)
    (u,) = mosaic.multiply((mosaic.zeros(HALF, C), frame.products(r, solved)))
    written = frame.in_two_parts(numbers.times(u, of_written))

    def hand_written() -> None:
        if own.corrected is None:
            plgpu.commit_smem()
            return
        own.corrected.acquire(here.step)
        slot = own.corrected.slot(here.step)
        for part, rounded in enumerate(frame.in_two_parts(u)):
            mosaic.store_transposed(own.written.at[slot, number, part], rounded)
        plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
        own.corrected.produced.arrive(slot)

    found = add_products(S, kept, [(written, k)], hand_written)
    own.chunks.consumed.arrive(here.slot)
    return found


def put_out(walk: Walk, item: Item, chunk: Any) -> None:
    """Stores the chunk's rows of out; and what the walk keeps, from where it was handed on."""
    own, here = walk.own, walk.begin(item, chunk, OF_ROWS)
    slot, blocks = own.begun.slot(here.step), range(frame.blocks_of_key(walk.spec))
    pairs = frame.in_two_parts(walk.pairs_of(here))
    own.begun.produced.wait(slot)
    for number in range(walk.config.slices):
        states = [own.states.at[slot, number, n].T for n in blocks]
        (read,) = mosaic.multiply((mosaic.zeros(C, HALF), list(zip(here.q, states, strict=True))))
        read = here.numbers.times(read, here.numbers.of_read())
        if number == 0:
            own.corrected.produced.wait(slot)
        u = own.written.at[slot, number, 0], own.written.at[slot, number, 1]
        (out,) = mosaic.multiply((read, frame.products(pairs, u)))
        if number == 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own.out.at[number][...] = out.astype(BF16)
    plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
    own.chunks.consumed.arrive(here.slot)
    for number in range(walk.config.slices):
        walk.store_rows(item, chunk, number, own.out.at[number], walk.out)
        if walk.states is not None:
            walk.store_state(item, chunk, slot, number)
            head, first = walk.place(item)
            at = item.batch, head, walk.number_of(item, chunk), first + number
            for part in range(frame.PARTS):
                target = walk.written.at[(*at, part)]  # [64, 64]
                plgpu.copy_smem_to_gmem(own.written.at[slot, number, part], target)
    if walk.states is not None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    own.begun.consumed.arrive(slot)
    own.corrected.consumed.arrive(slot)
