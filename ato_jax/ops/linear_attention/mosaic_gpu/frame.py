"""What all Hopper kernels of linear attention agree on: sizes, how heads lie in tiles, launches."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
ROWS_OF_A_TILE = 8  # as arrays in memory are cut by the copy engine

# Warpgroups of the flat kernels; where 0 and 1 alone multiply, with half of a state each.
MEMORY, FEATURES = 2, 3
WARPGROUPS = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """Blocks of each kernel; pieces of a sequence, 0: as many as fill the blocks."""

    blocks: int
    pieces: int = 0


def is_wide(spec: LinearAttentionSpec) -> bool:
    """Whether a head has more columns than a tile, and kernels take it whole."""
    return max(spec.D, spec.V) > F and not value_blocks.is_cut(spec)


def both_ways(spec: LinearAttentionSpec) -> bool:
    """Whether a decay per head or step stands between a query and the keys on either side of it."""
    return spec.decay in ("head", "step") and not spec.causal


def by_two_walks(spec: LinearAttentionSpec) -> bool:
    """Whether the causal kernels walk such a sequence from either end (`both_ways.py`)."""
    return both_ways(spec) and not by_runs(spec)


def by_documents(spec: LinearAttentionSpec) -> bool:
    """Whether every query sees the keys of its own segment, without a decay."""
    return spec.segments is not None and spec.decay is None and not spec.causal


def by_runs(spec: LinearAttentionSpec) -> bool:
    """Whether heads are walked, and then made run by run (`wide_runs.py`): wide ones, and some of
    up to 128 columns, in tiles of 128."""
    if in_runs(spec):
        return True
    return is_wide(spec) and (spec.causal or by_documents(spec) or both_ways(spec))


@functools.cache
def tiling(spec: LinearAttentionSpec) -> mosaic.Tiling:
    columns = F if heads_of_tile(spec) == 2 else spec.D
    heads, width = heads_of_tile(spec), math.gcd(*widths_of(spec))
    dtype = jnp.dtype(spec.dtype).type
    # With gates of channels T is a multiple of 8, and a head's columns are one of 16.
    as_given = heads == 2 and width < HALF and spec.decay != "channel"
    in_documents = by_documents(spec) and not by_runs(spec)
    odd = (spec.T % ROWS_OF_A_TILE, spec.S % ROWS_OF_A_TILE, width % STEP) != (0, 0, 0)
    untiled = odd or as_given or in_documents
    cut = isinstance(spec, value_blocks.Cut)
    return mosaic.Tiling(spec.layout, columns, width, heads, dtype, untiled, cut)


def shape_of_values(spec: LinearAttentionSpec, heads: int) -> tuple[int, ...]:
    """[B, T, heads, V], or as the layout has it, for so many heads of a kernel."""
    heads //= value_blocks.blocks_of(spec)
    lengths = (spec.T, heads) if spec.layout == "bthd" else (heads, spec.T)
    return (spec.B, *lengths, widths_of(spec)[1])


def head_of_keys(spec: LinearAttentionSpec, head: Any) -> Any:
    """The head of the keys that an item's queries see; of a pair of heads one for both."""
    group_size = spec.H // spec.G
    if heads_of_tile(spec) == 1 or group_size == 1:
        return lax.div(head, group_size)
    return mosaic.Heads(lax.div(head, group_size // 2), 0)


def name_of(kernel: str) -> str:
    """As profilers show it."""
    return f"linear_attention_{kernel}_mosaic"


def launch(
    body: mosaic.Body,
    name: str,
    deal: Deal,
    out_type: Any,
    scratch: dict[str, Any],
    arrays: Sequence[jax.Array | np.ndarray],
    *,
    warpgroups: int = WARPGROUPS,
    own_barriers: bool = False,
    approximates: bool = True,
    rest: tuple[mosaic.Body, dict[str, Any]] | None = None,
) -> Any:
    """Launches a flat kernel, whose barriers are counted by hand; see `mosaic.launch`."""
    return mosaic.launch(
        name_of(name),
        mosaic.Flat(body, scratch, warpgroups),
        deal,
        out_type,
        arrays,
        own_barriers=own_barriers,
        approximates=approximates,
        rest=None if rest is None else mosaic.Flat(*rest, warpgroups),
    )
