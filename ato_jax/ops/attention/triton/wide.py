"""Softmax attention of wide heads over few keys: all keys in one tile, blocks of columns.

`wide_forward.py` and `wide_backward.py` hold the kernels and their mathematics.
"""

from __future__ import annotations

from jax.experimental import pallas as pl

from ato_jax.backend import Backend
from ato_jax.device import Device, of_call
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs
from ato_jax.ops.attention.triton.wide_backward import backward
from ato_jax.ops.attention.triton.wide_forward import (
    Config,
    forward,
    forward_for_own_backward,
)

# The kernels for whole rows hold narrower heads in one tile.
NARROWEST_HEAD = 257
WIDEST_HEAD = 8192
# The scores of more keys and a block of queries do not fit the registers.
LONGEST = 256
# The weights of more keys in float32, as sums of bfloat16 numbers, do not fit the 99 KiB of
# consumer cards.
MOST_FLOAT32_KEYS_OF_SMALL_CARDS = 64
LARGE_SHARED_MEMORY = 160 * 1024


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    if max(spec.D, spec.V) < NARROWEST_HEAD:
        return f"D or V must be at least {NARROWEST_HEAD}, got {spec.D} and {spec.V}"
    for name, width in (("D", spec.D), ("V", spec.V)):
        if width > WIDEST_HEAD:
            return f"{name} must be at most {WIDEST_HEAD}, got {width}"
    for name, length in (("T", spec.T), ("S", spec.S)):
        if length > LONGEST:
            return f"{name} must be at most {LONGEST}, got {length}"
    if spec.dtype not in ("float32", "float16", "bfloat16"):
        return f"dtype must be float32, float16 or bfloat16, got {spec.dtype}"
    # Nor a forward pass for a call with one: only this backend's backward reads its `rest`.
    if spec.bias is not None and (phase == "backward" or spec.keep_rest):
        return "has no kernel for a bias's gradient"
    here = of_call(())
    small = here.platform == "gpu" and here.shared_memory < LARGE_SHARED_MEMORY
    if small and spec.dtype == "float32" and spec.S > MOST_FLOAT32_KEYS_OF_SMALL_CARDS:
        return (
            f"float32 needs {LARGE_SHARED_MEMORY // 1024} KiB of shared memory per block for S "
            f"beyond {MOST_FLOAT32_KEYS_OF_SMALL_CARDS}, got {spec.S} and "
            f"{here.shared_memory // 1024}"
        )
    return None


# (queries, columns of q and k, columns of v, warps, stages)
Sizes = tuple[int, int, int, int, int]

# Forward and backward, by the most keys and the narrowest heads that they are for.
Table = tuple[tuple[int, int, Sizes, Sizes], ...]

# With 228 KiB of shared memory. For up to 64 keys the fastest of those tried on an H200 at T = S =
# 64 that compile without spills (exact float32's backward kernel spills 64 bytes where it
# recomputes the scores).
LARGE_HALF: Table = (
    (64, 4096, (64, 128, 128, 4, 5), (64, 128, 128, 8, 3)),
    (64, 1024, (64, 128, 128, 4, 3), (64, 128, 128, 8, 3)),
    (64, 0, (64, 128, 128, 4, 3), (64, 64, 64, 4, 4)),
)
LARGE_TF32: Table = ((64, 0, (64, 32, 32, 4, 4), (64, 32, 32, 4, 4)),)
LARGE_FLOAT32: Table = (
    (64, 4096, (64, 32, 64, 4, 3), (64, 64, 32, 4, 3)),
    (64, 0, (64, 32, 64, 4, 3), (64, 32, 32, 4, 4)),
)
# For more keys and for less shared memory: blocks of columns that fill the shared memory in several
# stages beside the tile of weights, and that compile without spills for sm_90. Not measured.
HALF: Table = (
    (64, 0, (64, 64, 64, 4, 4), (64, 64, 64, 4, 3)),
    (128, 0, (64, 64, 64, 4, 3), (128, 64, 64, 8, 2)),
    (256, 0, (64, 64, 32, 8, 2), (64, 32, 32, 8, 2)),
)
FLOAT32: Table = (
    (64, 0, (64, 32, 64, 4, 3), (64, 32, 32, 4, 2)),
    (128, 0, (64, 32, 32, 8, 2), (64, 32, 32, 8, 2)),
    (256, 0, (64, 32, 32, 8, 2), (64, 32, 32, 8, 2)),
)
ENOUGH_FOR_LARGE = 200 * 1024
# A slice of fewer columns saves less time than the launch of the kernel that merges it takes.
SHORTEST_SLICE = 256
FEWEST_PROGRAMS = 8


def default_config(spec: AttentionSpec, device: Device) -> Config:
    forward, backward = choices(spec, device)
    return Config(
        *forward,
        slices_of(spec, forward, device),
        *backward,
        slices_of(spec, backward, device),
        fast_exp2=device.capability is not None,
    )


def choices(spec: AttentionSpec, device: Device) -> tuple[Sizes, Sizes]:
    """The sizes of the forward and of the backward kernels: the first row of the tables that
    fits."""
    table, large = HALF, LARGE_HALF
    if spec.dtype == "float32":
        table, large = FLOAT32, LARGE_TF32 if spec.precision == "tf32" else LARGE_FLOAT32
    if device.shared_memory >= ENOUGH_FOR_LARGE:
        table = large + table
    return next(
        (forward, backward)
        for keys, width, forward, backward in table
        if keys >= spec.S and width <= max(spec.D, spec.V)
    )


def programs(spec: AttentionSpec, sizes: Sizes) -> int:
    """The programs of a kernel without slices: one for each block of queries."""
    return pl.cdiv(spec.T, sizes[0]) * spec.H * spec.B


def slices_of(spec: AttentionSpec, sizes: Sizes, device: Device) -> int:
    """How many programs share the columns of a block of queries, to fill the card."""
    most = max(spec.D, spec.V) // SHORTEST_SLICE
    return max(1, min(device.multiprocessors // max(1, programs(spec, sizes)), most))


def beats_later_backends(spec: AttentionSpec, device: Device, backward_follows: bool) -> bool:
    """Whether there are enough blocks of queries.

    On an H200 a single block takes 12 to 20 us forward, by the two kernels that slices need, where
    XLA takes 10 to 21 us; forward and backward XLA is faster at most sizes, 22 to 37 us against 31
    to 105 us. Eight blocks (B8 H1 T64 D2048, bfloat16) take 13 us where XLA takes 24 us, and
    forward and backward 28 us where XLA takes 54 us.
    """
    forward, _ = choices(spec, device)
    return programs(spec, forward) >= FEWEST_PROGRAMS


class _Wide(Backend[AttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)
    forward_for_own_backward = staticmethod(forward_for_own_backward)
    beats_later_backends = staticmethod(beats_later_backends)


BACKEND = _Wide()
