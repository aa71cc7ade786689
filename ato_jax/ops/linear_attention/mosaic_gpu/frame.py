"""What all Hopper kernels of linear attention share: sizes, classes of calls, tilings, launches.

The functions `is_wide`, `by_runs` and those between them say which kernels a call has; the backend
and most files of this folder ask them. `tiling` says how heads lie in tiles of shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import HALF as HALF
from ato_jax.mosaic import Deal as Deal
from ato_jax.ops.linear_attention.mosaic_gpu import value_blocks
from ato_jax.ops.linear_attention.mosaic_gpu.narrow import STEP, widths_of
from ato_jax.ops.linear_attention.scans.chunks import LOG2_E as LOG2_E
from ato_jax.ops.linear_attention.scans.chunks import C as C
from ato_jax.ops.linear_attention.scans.chunks import heads_of_tile
from ato_jax.ops.linear_attention.scans.chunks import in_runs as in_runs
from ato_jax.ops.linear_attention.scans.chunks import is_steep as is_steep
from ato_jax.ops.linear_attention.scans.chunks import whole_chunks as whole_chunks
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

F = V = 128
ROWS_OF_A_TILE = 8  # rows of an array in memory that the copy engine takes as a unit


@dataclasses.dataclass(frozen=True)
class Config:
    """The blocks of each kernel, and the pieces of a sequence; 0 pieces means as many as fill the
    blocks."""

    blocks: int
    pieces: int = 0


def is_wide(spec: LinearAttentionSpec) -> bool:
    """Whether a head has more than 128 columns and is not cut into blocks."""
    return max(spec.D, spec.V) > F and not value_blocks.is_cut(spec)


def both_ways(spec: LinearAttentionSpec) -> bool:
    """Whether a decay per head or step stands between a query and the keys on either side of it."""
    return spec.decay in ("head", "step") and not spec.causal


def by_two_walks(spec: LinearAttentionSpec) -> bool:
    """Whether the causal kernels run twice, from either end of the sequence (`both_ways.py`)."""
    return both_ways(spec) and not by_runs(spec)


def by_documents(spec: LinearAttentionSpec) -> bool:
    """Whether every query sees the keys of its own segment, without a decay."""
    return spec.segments is not None and spec.decay is None and not spec.causal


def by_runs(spec: LinearAttentionSpec) -> bool:
    """Whether `wide_heads.py` runs the call: heads of more than 128 columns, unless every query
    sees every key without a decay, and some calls with narrower heads, in tiles of 128."""
    if in_runs(spec):
        return True
    return is_wide(spec) and (spec.causal or by_documents(spec) or both_ways(spec))


@functools.cache
def tiling(spec: LinearAttentionSpec) -> mosaic.Tiling:
    columns = F if heads_of_tile(spec) == 2 else spec.D
    heads, width = heads_of_tile(spec), math.gcd(*widths_of(spec))
    dtype = jnp.dtype(spec.dtype).type
    # With a decay per channel T is a multiple of 8, and the columns of a head are one of 16.
    as_given = heads == 2 and width < HALF and spec.decay != "channel"
    in_documents = by_documents(spec) and not by_runs(spec)
    odd = (spec.T % ROWS_OF_A_TILE, spec.S % ROWS_OF_A_TILE, width % STEP) != (0, 0, 0)
    untiled = odd or as_given or in_documents
    cut = isinstance(spec, value_blocks.Cut)
    return mosaic.Tiling(spec.layout, columns, width, heads, dtype, untiled, cut)


def shape_of_values(spec: LinearAttentionSpec, heads: int) -> tuple[int, ...]:
    """[B, T, heads, V], in the order of the layout, for the number of heads that a kernel has."""
    heads //= value_blocks.blocks_of(spec)
    lengths = (spec.T, heads) if spec.layout == "bthd" else (heads, spec.T)
    return (spec.B, *lengths, widths_of(spec)[1])


def head_of_keys(spec: LinearAttentionSpec, head: Any) -> Any:
    """The head of keys of an item's query head. A pair of query heads in a tile may share one."""
    group_size = spec.H // spec.G
    if heads_of_tile(spec) == 1 or group_size == 1:
        return lax.div(head, group_size)
    return mosaic.Heads(lax.div(head, group_size // 2), 0)


def name_of(kernel: str) -> str:
    """The name of a kernel in profilers."""
    return f"linear_attention_{kernel}_mosaic"
