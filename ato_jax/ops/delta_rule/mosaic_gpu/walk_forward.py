"""The walk from the first chunk to the last, with the state in registers.

For each head and 64 of v's columns, chunk by chunk, with X of `solve.py` and P, and L_t the sum of
log2 decays from the chunk's first step to t:

    r_t = v_t - exp2(L_t) k_t S
    u   = X r
    out = scale * exp2(L_t) q_t S + P u
    S'  = exp2(L_C) S + sum_t k_t^T exp2(L_C - L_t) u_t         for the chunk's last step C

All of it is transposed: S^T [64, D], r^T, u^T and out^T [64, 64] have v's columns as rows. They are
results of products and first factors of the next ones, which both lie in registers, so nothing but
the rows of out goes through shared memory. Each is multiplied in two parts of bfloat16, but for S
in q_t S, which goes to out alone.

For a backward pass the walk also keeps S and u of each chunk, rounded to bfloat16. `walk.py` has
its roles and what it loads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, Item
from ato_jax.ops.delta_rule.mosaic_gpu import frame
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.walk import Walk, walk
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs


def walk_forward(
    spec: DeltaRuleSpec,
    config: Config,
    inputs: Inputs,
    numbers: jax.Array,
    solved: jax.Array,
    *,
    keeps: bool = False,
) -> tuple[Outputs, jax.Array | None, jax.Array | None]:
    """The outputs; and where it `keeps` them, u [B, H, chunks, V / 64, 64, 64] and the states that
    chunks begin with, S^T [B, H, chunks, V / 64, D / 64, 64, 64]."""
    given = {"q": inputs.q, "k": inputs.k, "rows": inputs.v}
    given |= {"solved": solved, "numbers": numbers}
    if inputs.initial_state is not None:
        given["start"] = jnp.swapaxes(inputs.initial_state, 2, 3)
    kept = ("written", "states") if keeps else ()
    found = walk("walk", spec, config, given, multiply_chunk, from_end=False, keeps=kept)
    outputs = Outputs(found["out"], jnp.swapaxes(found["end"], 2, 3))
    return outputs, found.get("written"), found.get("states")


def multiply_chunk(
    walk: Walk, item: Item, number: Any, chunk: Any, S: list[jax.Array]
) -> list[jax.Array]:
    """Stores the chunk's rows of out; returns S'."""
    own, here = walk.own, walk.begin(item, chunk)
    q, k, numbers = here.q, here.k, here.numbers
    solved, pairs = (tuple(part.T for part in parts) for parts in (here.solved, here.pairs))
    parts = [frame.in_two_parts(block) for block in S]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if walk.states is not None:
        for n, (first, _) in enumerate(parts):
            own.states.at[number, n][...] = first

    def recall(recalled: jax.Array) -> tuple[jax.Array, jax.Array]:
        v = mosaic.load_transposed(own.rows.at[here.slot, number]).astype(F32)
        r = frame.in_two_parts(v - numbers.times(recalled, numbers.of_recalled()))
        mosaic.compute_first(jnp.abs(r[1].astype(F32)))
        return r

    # r is computed while q S is in flight.
    r, (read,) = mosaic.multiply_under(
        [(part, b.T) for both, b in zip(parts, k, strict=True) for part in both],
        (HALF, C),
        [(mosaic.zeros(HALF, C), [(first, b.T) for (first, _), b in zip(parts, q, strict=True)])],
        recall,
    )
    (u,) = mosaic.multiply((mosaic.zeros(HALF, C), frame.products(r, solved)))
    both = frame.in_two_parts(u)
    written = frame.in_two_parts(numbers.times(u, numbers.of_written()))
    kept = numbers.kept()

    def store(paired: jax.Array) -> jax.Array:
        out = paired + numbers.times(read, numbers.of_read())
        mosaic.store_transposed(own.out.at[number], out.astype(BF16))
        return out

    own.pairs.produced.wait(here.of_pairs)
    # out is stored while S' is in flight.
    _, sums = mosaic.multiply_under(
        frame.products(both, pairs),
        (HALF, C),
        [
            (block if kept is None else block * kept, [(part, b) for part in written])
            for block, b in zip(S, k, strict=True)
        ],
        store,
    )
    if walk.states is not None:
        mosaic.store_transposed(own.written.at[number], both[0])
    walk.end_of(here)
    walk.store_rows(item, chunk, number)
    if walk.states is not None:
        walk.store_state(item, chunk, number)
        head, first = walk.place(item)
        target = walk.written.at[item.batch, head, chunk, first + number]  # [64, 64]
        plgpu.copy_smem_to_gmem(own.written.at[number], target)
    return list(sums)
