"""Products with states, x T, for the role OWN of `wide_runs.py`.

`read_state` is the first product of each unit. In calls with documents it reads the state of the
run's first document; `add_last_document` adds that of the last one, behind the pairs.
"""

from __future__ import annotations

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import wide_run_flows
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_arrays import Pass
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_numbers import (
    Found,
    Powers,
    of_own,
    reads_of_states,
    times,
)
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_storage import UNIT, Runs


def read_both_states(
    runs: Runs, item: Item, own: Powers | None
) -> tuple[Found, list[wide_run_flows.OfSide]]:
    """The sum over both sides of x T times the row's factor, 64 columns of T at a time; and for
    each side the row's sums for a decay's gradient, where the pass computes them."""
    x, found = runs.x.at[mosaic.group()], []
    reads = reads_of_states(runs, item, own)
    flows: list[wide_run_flows.OfSide] = [(0.0, 0.0)] * runs.sides
    if runs.adds_flows:
        runs.own.held_loaded.wait(mosaic.slot_of(mosaic.group(), UNIT))
    for block in range(runs.blocks):
        parts = []
        for side in range(runs.sides):
            slot = runs.wait(runs.tile_of_state(item, block, side))
            turned = runs.turns_states
            tile = runs.turned.at[slot] if turned else runs.tiles.at[slot]
            (part,) = multiply((mosaic.zeros(C, HALF), runs.factors(x, tile, turned)))
            runs.let_go(slot)
            parts.append(times(part, reads[side]))
        if runs.adds_flows:
            flows = wide_run_flows.with_block(runs, item, block, flows, parts)
        found.append(functools.reduce(jnp.add, parts))
    return tuple(found), flows


def add_last_document(runs: Runs, item: Item, own: Powers | None, found: Found) -> Found:
    """Adds x T of the run's last document, in its rows. x becomes 0 in all other rows, so that the
    products are added in place: registers have no room for a second sum."""
    x = runs.x.at[mosaic.group()]
    reads = of_own(runs, item, runs.reads[1])
    for block in range(runs.blocks):
        part = runs.block_in(x, block)
        part[...] = times(load(part).astype(F32), reads).astype(runs.tiling.dtype)
    plgpu.commit_smem()
    if own is not None:
        found = tuple(times(part, 1.0 / own.state) for part in found)
    for block in range(runs.blocks):
        found = add_block_of_state(runs, item, block, 1, found)
    return found if own is None else tuple(times(part, own.state) for part in found)


def add_block_of_state(runs: Runs, item: Item, block: int, side: int, found: Found) -> Found:
    """Adds the product of 64 columns of x with 64 rows of T."""
    slot = runs.wait(runs.tile_of_state(item, block, side))
    tile = runs.turned.at[slot] if runs.turns_states else runs.tiles.at[slot]
    factors = [runs.part_in(tile, columns, runs.turns_states) for columns in runs.parts]
    factors = [factor.T if runs.turns_states else factor for factor in factors]
    part = runs.block_in(runs.x.at[mosaic.group()], block)
    sums = ((start, [(part, own)]) for start, own in zip(found, factors, strict=True))
    found = multiply(*sums)
    runs.let_go(slot)
    return found


def read_state(
    runs: Runs, item: Item, own: Powers | None
) -> tuple[Found, list[wide_run_flows.OfSide]]:
    """x T times the row's factor, 64 rows of T at a time; and the row's sums for a decay's
    gradient, where the pass computes them."""
    if runs.reads_both:
        return read_both_states(runs, item, own)
    found = tuple(mosaic.zeros(C, columns.size) for columns in runs.parts)
    for block in range(runs.blocks):
        found = add_block_of_state(runs, item, block, 0, found)
    reads = reads_of_states(runs, item, own)[0]
    found = tuple(times(part, reads) for part in found)
    if not runs.adds_flows:
        return found, []
    if runs.of is Pass.DV:
        return found, [wide_run_flows.read_by_keys(runs, item, found)]
    return found, [wide_run_flows.read_by_queries(runs, item, found)]
