"""Rows of 8 bits in `output.py`: MEMORY loads them, and FEATURES widens them to bfloat16.

A scale of v is split in two, v_scale = power * rest, so that no product of a value and its scale is
rounded:

    power    a power of two; v times power is exact in bfloat16
    rest     from 1 to 2; the sums S are divided by it, and rows of out are multiplied by it
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import HALF, Item
from ato_jax.ops.linear_attention.mosaic_gpu.output_storage import Walk

MANTISSA = (1 << 23) - 1  # of a float32
ONE = 127 << 23  # the bits of 1.0


def split_scale(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The power of two in each float32 scale, and the rest. A scale of 0 is 0 times 1."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    parts = bits & ~MANTISSA, bits & MANTISSA | ONE
    power, rest = (lax.bitcast_convert_type(part, jnp.float32) for part in parts)
    return power, rest


def load_eight_bits(walk: Walk, item: Item, rows: Any, step: Any) -> None:
    own, kv_head = walk.own, walk.kv_head(item)
    assert own.eight is not None
    slot = own.eight.slot(step)
    own.eight.acquire(step)
    for ref, tiles, head in (
        (walk.k, own.eight_k, kv_head),
        (walk.q, own.eight_q, item.head),
        (walk.v, own.eight_v, kv_head),
    ):
        blocks = [tiles.at[slot, half] for half in range(2)]  # [64, 64] each
        produced = own.eight.produced.at[slot]
        mosaic.copy_eight_bits(walk.tiling, ref, item, rows, head, blocks, produced)


def map_eight_bits(
    walk: Walk, half: int, item: Item, step: Any, own_q: Any, own_k: Any, own_v: Any, count: Any
) -> None:
    """Fills half of the tiles of q and k with features, and half of v's tile with v times the
    power of two in its scale, from rows of 8 bits."""
    own, phi, first = walk.own, walk.phi, half * HALF
    assert own.eight is not None
    slot = own.eight.slot(step)
    own.eight.produced.wait(slot)
    head, kv_head = (
        (item.batch, walk.tiling.head_of(head, half)) for head in (item.head, walk.kv_head(item))
    )
    q = mosaic.scaled(mosaic.load_eight_bits(own.eight_q.at[slot, half]), walk.q_scale[head])
    own_q[...] = mosaic.kept(mosaic.rounded(phi.unrounded(q, first)), count)
    k = mosaic.scaled(mosaic.load_eight_bits(own.eight_k.at[slot, half]), walk.k_scale[kv_head])
    phi_k = mosaic.rounded(phi.keys(phi.present(k, first), first=first))
    own_k[...] = mosaic.kept(phi_k, count)
    mosaic.widen(own.eight_v.at[slot, half], own_v, scale=walk.v_scale[kv_head])
    plgpu.commit_smem()
    own.eight.consumed.arrive(slot)
