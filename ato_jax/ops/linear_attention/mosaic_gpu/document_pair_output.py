"""out of an item of up to 64 rows, from the pairs of its rows (`document_pairs.py`).

The role HALVES of `document_output.py` calls it. A weight is divided by the denominator before it
is rounded, so that out of a document of one row is v itself.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import HALF, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu.document_pairs import (
    let_go,
    map_keys,
    slots_of,
    weigh,
)
from ato_jax.ops.linear_attention.mosaic_gpu.document_table import Item
from ato_jax.ops.linear_attention.mosaic_gpu.document_walk import (
    Walk,
    leave,
    parts_of_features,
    share_features,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C


def write_pairs(walk: Walk, item: Item) -> None:
    lax.fori_loop(0, walk.group, lambda member, _: write_head(walk, item, member), None)


def write_head(walk: Walk, item: Item, member: Any) -> None:
    """Half of the output of one query head, or of the other head in a tile."""
    own, half, queries = walk.own, mosaic.group(), item.queries
    slots = slots_of(walk, item, member)
    parity = lax.rem(item.before + len(walk.arrays_of_pairs) * member, 2)
    map_keys(walk, item, slots)
    own.rows.produced.wait(slots.q)
    parts = parts_of_features(walk, load(own.tiles.at[slots.q, half]), half)
    factors = share_features(walk, slots.q, parity, parts)
    plgpu.commit_smem()
    walk.meet()
    products = [
        (part, own.tiles.at[slots.k, other].T) for other, of_half in factors for part in of_half
    ]
    (a,) = multiply((mosaic.zeros(C, C), products))
    w = mosaic.rounded(weigh(walk, item, a).w)
    (out,) = multiply((mosaic.zeros(C, HALF), [(w, own.tiles.at[slots.v, half])]))
    let_go(walk, slots)
    target = walk.out, item, queries.first, queries.size, walk.query_head(item, member)
    leave(walk, own.out.at[parity, half], mosaic.kept(out, queries.valid), *target)
