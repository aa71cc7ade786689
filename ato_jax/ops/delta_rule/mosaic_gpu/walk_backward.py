"""The walk from the last chunk to the first, with the state's gradient in registers.

For each head and 64 of v's columns, with the letters of `walk_forward.py`, and dS' the gradient of
the state that a chunk ends with:

    du_t = sum_s P[s, t] dout_s + exp2(L_C - L_t) k_t dS'
    dr   = X^T du                                              which is dv
    dS   = exp2(L_C) dS' + sum_t exp2(L_t) (scale * q_t^T dout_t - k_t^T dr_t)

As in the forward walk all of it is transposed, and every factor that is not an input is in two
parts of bfloat16. The walk leaves dv, and for `gradient.py` dS' of each chunk, rounded to bfloat16.
`walk.py` has its roles and what it loads.
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


def walk_backward(
    spec: DeltaRuleSpec,
    config: Config,
    inputs: Inputs,
    cotangents: Outputs,
    numbers: jax.Array,
    solved: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dv, the initial state's gradient [B, H, D, V], and dS'^T of each chunk [B, H, chunks,
    V / 64, D / 64, 64, 64])."""
    given = {"q": inputs.q, "k": inputs.k, "rows": cotangents.out}
    given |= {"solved": solved, "numbers": numbers}
    if spec.return_state:
        given["start"] = jnp.swapaxes(cotangents.state, 2, 3)
    found = walk(
        "walk_backward", spec, config, given, multiply_chunk, from_end=True, keeps=("states",)
    )
    return found["out"], jnp.swapaxes(found["end"], 2, 3), found["states"]


def multiply_chunk(
    walk: Walk, item: Item, number: Any, chunk: Any, dstate: list[jax.Array]
) -> list[jax.Array]:
    """Stores the chunk's rows of dv and its dS', which is `dstate`; returns dS."""
    own, here = walk.own, walk.begin(item, chunk)
    q, k, numbers = here.q, here.k, here.numbers
    parts = [frame.in_two_parts(block) for block in dstate]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for n, (first, _) in enumerate(parts):
        own.states.at[number, n][...] = first
    dout = mosaic.load_transposed(own.rows.at[here.slot, number])  # [64, 64]
    own.pairs.produced.wait(here.of_pairs)
    written, of_out = mosaic.multiply(
        (
            mosaic.zeros(HALF, C),
            [(part, b.T) for both, b in zip(parts, k, strict=True) for part in both],
        ),
        (mosaic.zeros(HALF, C), [(dout, part) for part in here.pairs]),
    )
    du = frame.in_two_parts(of_out + numbers.times(written, numbers.of_written()))
    read = frame.in_two_parts(numbers.times(dout.astype(F32), numbers.of_read()))
    kept = numbers.kept()

    def recall(dr: jax.Array) -> tuple[jax.Array, jax.Array]:
        mosaic.store_transposed(own.out.at[number], dr.astype(BF16))
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
    terms = zip(sums, k, strict=True)
    found = mosaic.multiply(*((sum, [(part, b) for part in recalled]) for sum, b in terms))
    walk.end_of(here)
    walk.store_rows(item, chunk, number)
    walk.store_state(item, chunk, number)
    return list(found)
