"""Softmax attention by Pallas kernels lowered to Triton: exact, in memory linear in T and S.

forward.py, backward.py and bias.py hold the kernels and their mathematics. They share tiles and
products (common.py), which blocks and which pairs see each other (visibility.py), what the options
say of pairs (pairs.py), and the backward ones the weights (weights.py).
"""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from ato_jax.backend import Backend
from ato_jax.device import Device, of_call
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs
from ato_jax.ops.attention.triton.backward import backward
from ato_jax.ops.attention.triton.common import SMALLEST_TILE, row_size
from ato_jax.ops.attention.triton.forward import forward

# Beyond this the gradients of a tile's rows no longer fit the registers.
WIDEST_HEAD = 512
# The smallest tiles of longer float32 rows do not fit the 99 KiB of consumer cards.
WIDEST_FLOAT32_HEAD_OF_SMALL_CARDS = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of queries and keys, warps and pipeline stages: of the forward kernel, of dQ's, of the
    one for dK and dV, and of that for a bias's gradient. The first three share the other side of
    each of their blocks among so many `parts`. The forward's queries come in `strands`
    (forward.py). `fast_exp2` takes NVIDIA's instruction for 2^x.
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


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    for name, width in (("D", spec.D), ("V", spec.V)):
        if width > WIDEST_HEAD:
            return f"{name} must be at most {WIDEST_HEAD}, got {width}"
    if spec.dtype not in ("float32", "float16", "bfloat16"):
        return f"dtype must be float32, float16 or bfloat16, got {spec.dtype}"
    device = of_call(())
    shared = device.shared_memory
    small = device.platform == "gpu" and shared < SMALL_SHARED_MEMORY
    widest = max(spec.D, spec.V)
    if small and spec.dtype == "float32" and widest > WIDEST_FLOAT32_HEAD_OF_SMALL_CARDS:
        return (
            f"float32 needs {SMALL_SHARED_MEMORY // 1024} KiB of shared memory per block for heads "
            f"wider than {WIDEST_FLOAT32_HEAD_OF_SMALL_CARDS}, got {widest} and {shared // 1024}"
        )
    return None


# (queries, keys, warps, stages) of the three kernels, by the widest head they are for.
Tiles = tuple[int, int, int, int]
Table = dict[int, tuple[Tiles, Tiles, Tiles]]

# With 228 KiB of shared memory: the fastest of 5 to 15 tried each on an H200 at T = 8192, causal.
# The warp-group instructions want four warps for each 64 rows of a tile's own side; the forward
# kernel and dQ's, which hold that side for the whole loop, gain from 128 rows. Some spill a little
# and are still the fastest.
LARGE: Table = {
    64: ((128, 128, 4, 3), (128, 64, 4, 3), (64, 64, 4, 2)),
    96: ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2)),
    128: ((128, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 2)),
    192: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2)),
    256: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2)),
    512: ((64, 32, 8, 2), (64, 32, 8, 1), (32, 32, 8, 1)),
}
# The forward's in two strands, where all blocks are alike and none is for the few keys of a window
# or a segment: there, tall tiles hold what nobody sees.
LARGE_STRANDS: dict[int, Tiles] = {64: (128, 128, 4, 3), 128: (256, 64, 8, 4)}
# The forward's beside biases and masks as wide as [T, S], whose tiles are loaded as keys are.
LARGE_PLANES: dict[int, Tiles] = {64: (64, 64, 4, 3), 128: (128, 32, 8, 3)}
LARGE_FLOAT32: Table = {
    64: ((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1)),
    128: ((64, 64, 4, 1), (64, 32, 4, 1), (32, 128, 8, 1)),
    256: ((32, 32, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1)),
    512: ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
LARGE_TF32: Table = {
    64: ((64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 4, 1)),
    128: ((128, 64, 8, 2), (128, 32, 8, 2), (32, 32, 4, 2)),
    256: ((128, 64, 8, 1), (32, 32, 4, 2), (32, 32, 4, 2)),
    512: ((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
# For less shared memory, down to the 99 KiB of consumer cards: what compiles for sm_80 with the
# fewest spills. Not measured.
SMALL: Table = {
    64: ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2)),
    128: ((128, 64, 8, 2), (64, 64, 8, 2), (32, 64, 8, 2)),
    256: ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    512: ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
}
SMALL_FLOAT32: Table = {
    64: ((64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    128: ((32, 32, 4, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
    256: ((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    512: ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
# For one tile of dbias per program: what is held for the whole loop is that tile alone.
DBIAS: dict[int, Tiles] = {
    64: (64, 64, 4, 2),
    128: (64, 64, 4, 2),
    256: (32, 32, 4, 1),
    512: (16, 16, 4, 1),
}
LARGE_SHARED_MEMORY = 200 * 1024
SMALL_SHARED_MEMORY = 120 * 1024


def default_config(spec: AttentionSpec, device: Device) -> Config:
    """Tiles by the width of a head, the dtype and the device's shared memory, from the tables."""
    large = device.shared_memory >= LARGE_SHARED_MEMORY
    if spec.dtype != "float32":
        table = LARGE if large else SMALL
    elif spec.precision == "tf32":
        table = LARGE_TF32 if large else SMALL_FLOAT32
    else:
        table = LARGE_FLOAT32 if large else SMALL_FLOAT32
    width = next(w for w in table if w >= max(row_size(spec.D), row_size(spec.V)))
    forward, dq, dkv = table[width]
    strands = 1
    if table is LARGE and _bytes_per_pair(spec):
        forward = LARGE_PLANES.get(width, forward)
    elif table is LARGE and spec.left is None and not spec.segments and width in LARGE_STRANDS:
        forward, strands = LARGE_STRANDS[width], 2
    forward = _beside_planes(spec, forward, width, 1, device.shared_memory)
    dq = _beside_planes(spec, dq, width, 2, device.shared_memory)
    block_q, block_k, warps, stages = dkv
    block_k, block_q, warps, stages = _beside_planes(
        spec, (block_k, block_q, warps, stages), width, 2, device.shared_memory
    )
    dkv = (block_q, block_k, warps, stages)
    parts, dq_parts = (parts_of_keys(spec, tiles, device) for tiles in (forward, dq))
    return Config(
        *forward,
        *dq,
        *dkv,
        *next(tiles for w, tiles in DBIAS.items() if w >= width),
        strands=strands,
        parts=parts,
        dq_parts=dq_parts,
        dkv_parts=parts_of_queries(spec, dkv, device),
        fast_exp2=device.capability is not None,
    )


# What the compiler wants of shared memory besides tiles, for turning them from layout to layout.
SCRATCH = 16 * 1024
# Sums of so many elements leave 4 warps no registers for a bias's tile.
TOO_MUCH_FOR_4_WARPS = 128 * 64


def _bytes_per_pair(spec: AttentionSpec) -> int:
    """What a pair has in biases and masks that have both T and S, in float32 at most."""
    planes = ((spec.bias, 4), (spec.mask, 1))
    return sum(size for full, size in planes if full is not None and full[2] and full[3])


def _beside_planes(
    spec: AttentionSpec, tiles: Tiles, width: int, held: int, shared_memory: int
) -> Tiles:
    """Tiles (own rows, block, warps, stages) that leave room for those of biases and masks.

    They wait in shared memory, too, in as many stages as the blocks. `held` tiles of the
    program's own rows stay there all the time.
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
    return rows, block, warps, stages


# Blocks that a program goes over at least, for a share of them to be worth the merging.
FEWEST_BLOCKS = 8


def parts_of_keys(spec: AttentionSpec, tiles: Tiles, device: Device) -> int:
    """How many programs share the keys of a block of queries, so that they fill the card."""
    block_q, block_k, *_ = tiles
    programs = pl.cdiv(spec.T, block_q) * spec.H * spec.B
    seen = spec.S
    if spec.left is not None and spec.right is not None:
        seen = min(seen, spec.left + spec.right + min(spec.T, block_q))
    return _parts(programs, pl.cdiv(seen, block_k), device)


def parts_of_queries(spec: AttentionSpec, tiles: Tiles, device: Device) -> int:
    """How many programs share the queries of a block of keys."""
    block_q, block_k, *_ = tiles
    programs = pl.cdiv(spec.S, block_k) * spec.G * spec.B
    seeing = spec.T
    if spec.left is not None and spec.right is not None:
        seeing = min(seeing, spec.left + spec.right + min(spec.S, block_k))
    return _parts(programs, pl.cdiv(seeing, block_q), device)


def _parts(programs: int, blocks: int, device: Device) -> int:
    return max(1, min(device.multiprocessors // max(programs, 1), blocks // FEWEST_BLOCKS))


class _Triton(Backend[AttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Triton()
