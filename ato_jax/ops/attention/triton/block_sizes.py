"""Block sizes of the kernels that hold whole rows: a table of regimes, and what a call changes.

`REGIMES` has the tiles by the shared memory of a block, the kind of the factors and the width of a
head. Three rules follow: biases and masks as large as [T, S] take shared memory beside the tiles,
short problems share the blocks of one program among several, and a window or segments exclude the
forward kernel's tall tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jax.experimental import pallas as pl

from ato_jax.device import Device
from ato_jax.ops.attention.spec import AttentionSpec
from ato_jax.ops.attention.triton.common import SMALLEST_TILE, row_size


@dataclasses.dataclass(frozen=True)
class Config:
    """Queries and keys in a tile, warps and pipeline stages of each kernel.

    The kernels are the forward one, the one for dQ, the one for dK and dV, and the one for a bias's
    gradient.

    Attributes:
      strands: how many strands the forward kernel cuts its queries into (`forward.py`).
      parts, dq_parts, dkv_parts: how many programs share the blocks of one program's rows.
      fast_exp2: take NVIDIA's instruction for 2^x.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    dq_block_q: int
    dq_block_k: int
    dq_num_warps: int
    dq_num_stages: int
    dkv_block_q: int
    dkv_block_k: int
    dkv_num_warps: int
    dkv_num_stages: int
    dbias_block_q: int
    dbias_block_k: int
    dbias_num_warps: int
    dbias_num_stages: int
    strands: int = 1
    parts: int = 1
    dq_parts: int = 1
    dkv_parts: int = 1
    fast_exp2: bool = False


class Tiles(NamedTuple):
    """Queries and keys in a tile, warps and pipeline stages."""

    q: int
    k: int
    warps: int
    stages: int


class Kernels(NamedTuple):
    """Tiles of the forward kernel, of the one for dQ, and of the one for dK and dV."""

    forward: Tiles
    dq: Tiles
    dkv: Tiles


def _kernels(*tiles: tuple[int, int, int, int]) -> Kernels:
    return Kernels(*(Tiles(*one) for one in tiles))


NO_TILES: Mapping[int, Tiles] = {}


class Regime(NamedTuple):
    """The tiles of some devices and dtypes.

    Each mapping is by the most columns of a padded row of q, k or v, in ascending order.

    Attributes:
      shared_memory: bytes that a block may use at least.
      factors: kinds of factors, as `_factors` names them.
      tiles: the tiles of the three kernels.
      beside_planes: of the forward kernel, with biases or masks as large as [T, S], whose tiles
        are loaded like the keys.
      strands: of the forward kernel in two strands, with neither a window nor segments: with
        these, few keys of a block are seen, and tall tiles hold many hidden pairs.
    """

    shared_memory: int
    factors: tuple[str, ...]
    tiles: Mapping[int, Kernels]
    beside_planes: Mapping[int, Tiles] = NO_TILES
    strands: Mapping[int, Tiles] = NO_TILES


LARGE_SHARED_MEMORY = 200 * 1024
# Those for 200 KiB and more were the fastest of 5 to 15 tried each on an H200 at T = 8192, causal.
# WGMMA takes four warps for 64 rows of a tile's own side; the forward kernel and dQ's, which hold
# that side for the whole loop, gain from 128 rows. Some spill a little and are still the fastest.
# Those for less shared memory, down to the 99 KiB of consumer cards, are what compiles for sm_80
# with the fewest spills. They were not measured.
REGIMES = (
    Regime(
        LARGE_SHARED_MEMORY,
        ("16 bits",),
        {
            64: _kernels((128, 128, 4, 3), (128, 64, 4, 3), (64, 64, 4, 2)),
            96: _kernels((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2)),
            128: _kernels((128, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 2)),
            192: _kernels((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2)),
            256: _kernels((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2)),
            512: _kernels((64, 32, 8, 2), (64, 32, 8, 1), (32, 32, 8, 1)),
        },
        beside_planes={64: Tiles(64, 64, 4, 3), 128: Tiles(128, 32, 8, 3)},
        strands={64: Tiles(128, 128, 4, 3), 128: Tiles(256, 64, 8, 4)},
    ),
    Regime(
        LARGE_SHARED_MEMORY,
        ("tf32",),
        {
            64: _kernels((64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 4, 1)),
            128: _kernels((128, 64, 8, 2), (128, 32, 8, 2), (32, 32, 4, 2)),
            256: _kernels((128, 64, 8, 1), (32, 32, 4, 2), (32, 32, 4, 2)),
            512: _kernels((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        },
    ),
    Regime(
        LARGE_SHARED_MEMORY,
        ("float32",),
        {
            64: _kernels((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1)),
            128: _kernels((64, 64, 4, 1), (64, 32, 4, 1), (32, 128, 8, 1)),
            256: _kernels((32, 32, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1)),
            512: _kernels((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        },
    ),
    Regime(
        0,
        ("16 bits",),
        {
            64: _kernels((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2)),
            128: _kernels((128, 64, 8, 2), (64, 64, 8, 2), (32, 64, 8, 2)),
            256: _kernels((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
            512: _kernels((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
        },
    ),
    Regime(
        0,
        ("tf32", "float32"),
        {
            64: _kernels((64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
            128: _kernels((32, 32, 4, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
            256: _kernels((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
            512: _kernels((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
        },
    ),
)
# Of the kernel for a bias's gradient, which holds one tile of dbias for the whole loop.
DBIAS = {
    64: Tiles(64, 64, 4, 2),
    128: Tiles(64, 64, 4, 2),
    256: Tiles(32, 32, 4, 1),
    512: Tiles(16, 16, 4, 1),
}


def _factors(spec: AttentionSpec) -> str:
    if spec.dtype != "float32":
        return "16 bits"
    return "tf32" if spec.precision == "tf32" else "float32"


def default_config(spec: AttentionSpec, device: Device) -> Config:
    """The tiles of the first regime that fits, changed by the rules of the module's docstring."""
    regime = next(
        regime
        for regime in REGIMES
        if device.shared_memory >= regime.shared_memory and _factors(spec) in regime.factors
    )
    columns = max(row_size(spec.D), row_size(spec.V))
    width = next(width for width in regime.tiles if width >= columns)
    forward, dq, dkv = regime.tiles[width]
    strands = 1
    if _bytes_per_pair(spec):
        forward = regime.beside_planes.get(width, forward)
    elif spec.left is None and not spec.segments and width in regime.strands:
        forward, strands = regime.strands[width], 2
    forward = _beside_planes(spec, forward, width, 1, device.shared_memory)
    dq = _beside_planes(spec, dq, width, 2, device.shared_memory)
    # Its own rows are the keys.
    k, q, warps, stages = _beside_planes(
        spec, Tiles(dkv.k, dkv.q, dkv.warps, dkv.stages), width, 2, device.shared_memory
    )
    dkv = Tiles(q, k, warps, stages)
    return Config(
        *forward,
        *dq,
        *dkv,
        *next(tiles for most, tiles in DBIAS.items() if most >= width),
        strands=strands,
        parts=parts_of_keys(spec, forward, device),
        dq_parts=parts_of_keys(spec, dq, device),
        dkv_parts=parts_of_queries(spec, dkv, device),
        fast_exp2=device.capability is not None,
    )


# Shared memory that the compiler needs beside the tiles, to convert them from layout to layout.
SCRATCH = 16 * 1024
# Accumulators of so many elements leave 4 warps no registers for a bias's tile.
TOO_MUCH_FOR_4_WARPS = 128 * 64


def _bytes_per_pair(spec: AttentionSpec) -> int:
    """Bytes of a pair in biases and masks that have both T and S; a bias is float32 at most."""
    planes = ((spec.bias, 4), (spec.mask, 1))
    return sum(size for full, size in planes if full is not None and full[2] and full[3])


def _beside_planes(
    spec: AttentionSpec, tiles: Tiles, width: int, held: int, shared_memory: int
) -> Tiles:
    """Tiles that leave shared memory for those of biases and masks.

    `tiles.q` are the program's own rows, of which `held` tiles stay in shared memory for the whole
    loop, and `tiles.k` those of the blocks that it goes over. A bias's tiles take as many stages as
    the blocks.
    """
    per_pair = _bytes_per_pair(spec)
    rows, block, warps, stages = tiles
    if per_pair and rows * width >= TOO_MUCH_FOR_4_WARPS:
        warps = 8
    item = 4 if spec.dtype == "float32" else 2

    def fit() -> bool:
        streamed = stages * block * (2 * width * item + rows * per_pair)
        return held * rows * width * item + streamed + SCRATCH <= shared_memory

    while per_pair and stages > 2 and not fit():
        stages -= 1
    while per_pair and block > 32 and not fit():
        block //= 2
    if per_pair and not fit():
        stages = 1
    while per_pair and block > SMALLEST_TILE and not fit():
        block //= 2
    return Tiles(rows, block, warps, stages)


# A program's share of the blocks is at least this many: below, merging costs more than it gains.
FEWEST_BLOCKS = 8


def parts_of_keys(spec: AttentionSpec, tiles: Tiles, device: Device) -> int:
    """How many programs share the keys of a block of queries, to fill the card."""
    block_q, block_k, *_ = tiles
    programs = pl.cdiv(spec.T, block_q) * spec.H * spec.B
    seen = spec.S
    if spec.left is not None and spec.right is not None:
        seen = min(seen, spec.left + spec.right + min(spec.T, block_q))
    return _parts(programs, pl.cdiv(seen, block_k), device)


def parts_of_queries(spec: AttentionSpec, tiles: Tiles, device: Device) -> int:
    """How many programs share the queries of a block of keys, to fill the card."""
    block_q, block_k, *_ = tiles
    programs = pl.cdiv(spec.S, block_k) * spec.G * spec.B
    seeing = spec.T
    if spec.left is not None and spec.right is not None:
        seeing = min(seeing, spec.left + spec.right + min(spec.S, block_k))
    return _parts(programs, pl.cdiv(seeing, block_q), device)


def _parts(programs: int, blocks: int, device: Device) -> int:
    return max(1, min(device.multiprocessors // max(programs, 1), blocks // FEWEST_BLOCKS))
