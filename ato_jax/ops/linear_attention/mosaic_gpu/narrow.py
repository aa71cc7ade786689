"""Heads with fewer columns than the tile of their kernel, filled up with zeros without a copy.

The backend (`__init__.py`) and the block files call `in_tiles`, `widened` and `narrowed`. D and V
are multiples of 8, or of 16 with a decay per channel and in float32, and the larger one selects the
tile:

    tile of 64     16 to 56, causal or with segments
    tile of 128    72 to 120; 16 to 120 for calls of `scans.chunks.in_runs`
    tile of 192    136 to 184
    tile of 256    200 to 248

The copy engine (TMA) fills the columns of a tile behind those of a head with zeros, and leaves them
out of stores. This needs columns that are a multiple of 16, or tiles that are copied in blocks of
64 columns (`mosaic.Views`). phi(0) need not be 0, so the features of keys are set to 0 in these
columns (`phi.keys` in `feature_maps.py`). States are then 0 there, and products with them add
nothing.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.mosaic import HALF
from ato_jax.ops.linear_attention.scans.chunks import in_runs
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec, LinearState, Outputs

TILES = 128, 192, 256
LEAST = 72  # columns of a head that these tiles hold
STEP = 16  # the copy engine takes a part of a head's columns that a product takes
STEP_AS_THEY_ARE = 8  # or it takes them as they are: it needs rows of a multiple of 16 bytes
LEAST_OF_PAIRS = 16  # two heads of at most 64 columns share a tile; in runs each has its own


@dataclasses.dataclass(frozen=True)
class Narrow(LinearAttentionSpec):
    """A call as those kernels take it: `D`, `F` and `V` are a tile's, `width` is a head's D, and
    `values_width` its V."""

    width: int = 0
    values_width: int = 0


def step_of(spec: LinearAttentionSpec) -> int:
    """What D and V are multiples of."""
    tiled = spec.decay == "channel" or spec.dtype == "float32"
    return STEP if tiled else STEP_AS_THEY_ARE


def tile_of(spec: LinearAttentionSpec) -> int | None:
    """The columns that a head has in the tile that the larger of D and V fills, maybe in part; None
    where there is no such tile."""
    columns, step = max(spec.D, spec.V), step_of(spec)
    if in_runs(spec) and columns <= TILES[0]:
        whole = spec.D % step == spec.V % step == 0
        return TILES[0] if whole and min(spec.D, spec.V) >= LEAST_OF_PAIRS else None
    if (spec.causal or spec.segments) and columns <= HALF:
        whole = spec.D % STEP_AS_THEY_ARE == spec.V % STEP_AS_THEY_ARE == 0
        return HALF if whole and min(spec.D, spec.V) >= LEAST_OF_PAIRS else None
    if columns < LEAST or spec.D % step or spec.V % step:
        return None
    return next((tile for tile in TILES if columns <= tile), None)


def fills(spec: LinearAttentionSpec, tile: int | None) -> bool:
    """Whether the head has all of the tile's columns."""
    return spec.D == spec.V == tile


def in_tiles(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    tile = tile_of(spec)
    if tile is None or fills(spec, tile):
        return spec
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    widths = {"width": spec.D, "values_width": spec.V}
    return Narrow(**fields | dict.fromkeys("DFV", tile) | widths)


def widths_of(spec: LinearAttentionSpec) -> tuple[int, int]:
    """The columns of q and k in memory, and those of v."""
    return (spec.width, spec.values_width) if isinstance(spec, Narrow) else (spec.D, spec.V)


def widened(spec: LinearAttentionSpec, state: LinearState) -> LinearState:
    """A state as the kernels take it."""
    if not isinstance(spec, Narrow):
        return state

    def pad(x: jax.Array) -> jax.Array:
        beyond = [(0, spec.D - size) for size in x.shape[2:]]
        return jnp.pad(x, [(0, 0), (0, 0), *beyond])

    return LinearState(*map(pad, state))


def narrowed(spec: LinearAttentionSpec, state: LinearState) -> LinearState:
    """The reverse."""
    width, values_width = widths_of(spec)
    return LinearState(state.kv[:, :, :width, :values_width], state.k_sum[:, :, :width])


class Kept(NamedTuple):
    """`Outputs`, and the state as the kernels left it."""

    out: jax.Array
    state: LinearState
    whole: LinearState

    def plain(self) -> Outputs:
        return Outputs(self.out, self.state)
