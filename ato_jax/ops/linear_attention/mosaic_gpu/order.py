"""Which calls these kernels take faster than the backends behind them do.

`implementation=None` asks `beats_later_backends`. It takes the kinds of calls one after the other,
and says from how many rows, columns or elements each kind is faster here. These numbers were
measured; `docs/notes/linear_attention.md` has more of them. No kernel depends on anything here.
"""

from __future__ import annotations

import dataclasses

from ato_jax import mosaic
from ato_jax.device import Device
from ato_jax.ops.linear_attention.fits import Fit
from ato_jax.ops.linear_attention.mosaic_gpu import (
    channel_blocks,
    frame,
    narrow,
    projected,
    refusals,
    support,
    value_blocks,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# With fewer rows of all heads, Triton's kernels are faster: they are fewer. On an H200 8 heads of
# 1024 rows took 23.8 us where they take 14.5, of 4096 rows 36.1 and 33.9; 32 heads of 2048 rows
# 43.7 and 64.7. Where every query sees every key they have no pieces to join: 8 heads of 1024 rows
# took 13.6 us and 12.3, of 4096 rows 19.0 and 22.0. Of other sizes as many elements: of 256 columns
# 8 heads of 1024 rows took 85 us and 77, of 4096 rows 101 and 149, where every query sees every key
# 77 and 129; of two heads of 64 in a tile 64 heads of 1024 rows took 31.7 us and 22.6, of 2048 rows
# 37.5 and 38.9, with gradients 114 and 134. But with gates of channels 16 heads of 4096 rows of 64
# columns took 66 us where Triton's kernels take 73, with gradients 236 and 277.
ENOUGH_ROWS = 2**16
# With a decay both ways 16 heads of 65,536 rows took 0.535 ms on an H200 where Triton's kernels
# take 1.085, with gradients 1.85 and 3.26; of 128 columns 1.06 and 3.54, 4.02 and 12.2. On an H100
# 32 heads of 8,192 rows of 64 columns took 0.196 ms and 0.340, with gradients 0.692 and 1.03; of
# 128 columns 0.355 and 1.14, 1.34 and 3.86. Fewer rows have not been timed.
ENOUGH_ROWS_BOTH_WAYS = 2**17
# With a decay per channel where XLA alone is behind these kernels. It takes as long as its scan has
# steps: on an H200 4 heads of 1,024 rows took 104 us here and 1,012 by XLA where causal, with
# segments and D64, with gradients 383 and 3,408; of 4,096 rows 104 and 4,190, 490 and 13,499. Where
# every query sees every key, D128, 1,024 rows took 109 and 1,769, with gradients 408 and 5,613.
# Shorter sequences have not been timed.
ENOUGH_ROWS_BESIDE_XLA = 2**12
LEAST_STEPS_BESIDE_XLA = 1024
# The share of a tile's products that a head needs. What it takes is the tile's time, less some
# traffic, so with a smaller share it is left to Triton. On an H200, T 16384, causal, forward and
# forward + backward in ms, and Triton's: B8 H16 D32 0.362, 1.29 (0.475, 1.59), B8 H42 D24 1.01,
# 3.68 (0.91, 3.59), B8 H7 D72 0.417, 1.71 (0.598, 2.22).
LEAST_FILLED = 1 / 4
# This share for tiles of more than 128 columns. Where every query sees every key, B8 H8 T16384
# D64 V144 took 0.371 and 1.43, and by Triton's kernels 0.547 and 2.15; in float16 V 136 0.501 and
# 1.59, and by products of plain JAX 1.33 and 3.93.
LEAST_FILLED_OF_WIDE = 1 / 5
# This share where a call has a decay per step or head, and two heads are in one tile. With a decay
# per step B8 H42 D24 took 1.08 and 4.21, and by Triton's kernels 1.29 and 6.12.
LEAST_FILLED_WITH_A_DECAY = 1 / 8
# This share where a call has a decay per channel and no gradients are taken. B8 H16 D32 took
# 0.715, and by Triton's kernels 0.675.
LEAST_FILLED_BY_CHANNEL = 3 / 8
# Elements of q, of which copies cost less than the kernels gain; and of wide heads in documents or
# in float16, where the backends behind take twice the time or more: causal float16 B4 H6 T16384
# D155 took 0.99 and 2.83, by products of plain JAX 3.56 and 11.9.
LEAST_ELEMENTS = 2**25
LEAST_ELEMENTS_OF_SLOW_CALLS = 2**23
# Up to as many columns a decay pays without gradients, too.
FEW_COLUMNS = 40
# The least D V at which heads of up to 128 columns are faster here than by the later backends: with
# segments alone, and with a decay. On an H200 at T 16384, forward alone and with gradients:
#     segments, float16, D64 B8 H8                              0.94, 2.69 ms; Triton 3.10, 8.19
#     segments and a decay per step, bfloat16, D128 B2 H16      0.82, 3.71 ms; Triton 1.86, 6.42
#     the same, D64 B8 H8                                       1.22, 6.38 ms; Triton 1.03, 3.28
LEAST_COLUMNS, LEAST_COLUMNS_BESIDE_A_DECAY = 64 * 64, 80 * 80
# The fewest tiles, by heads in a tile. One long document is one block's work for each tile, so its
# time follows from T alone, while that of Triton's kernels falls with the number of tiles.
ENOUGH_TILES = {1: 16, 2: 24}
# Heads of keys in which the terms of a decay's gradient may cancel (`may_cancel`).
FEW_HEADS = 3


def beats_later_backends(spec: LinearAttentionSpec, device: Device, backward_follows: bool) -> bool:
    if not spec.feature_map.elementwise:
        # On an H200, B2 H16 T16384 D64 F128: 0.345 ms and by Triton 0.912, causal 0.430 and 1.081.
        # Triton's gradients are the same behind either forward, whose outputs alone they are given.
        inner = projected.inner_spec(spec)
        return beats_later_backends(inner, device, backward_follows=False)
    if refusals.is_left_to_xla(spec):
        # On an H100, B1 H16 T16384 D256 took 1.15 ms and by XLA 25.9, with gradients 4.22 and 98.2.
        if backward_follows and support.unsupported(spec, "backward"):
            return False
        one_sign = spec.normalize or spec.feature_map.nonnegative
        if backward_follows and not (spec.causal or one_sign):
            # Two walks rounded their shares of dv, which on an H200 was 4.11e-3 off, of 4e-3. They
            # are added up in float32 now and keep the budget there, but nobody has timed them.
            return False
        columns = max(spec.D + spec.V, 2 * frame.F)
        enough = ENOUGH_ROWS if spec.T < LEAST_STEPS_BESIDE_XLA else ENOUGH_ROWS_BESIDE_XLA
        return spec.B * spec.H * spec.T >= enough * 2 * frame.F // columns
    if spec.decay == "channel" and spec.dtype == "float16" and backward_follows:
        # On an H200 the forward of B2 H8 T8192 D128 took 0.211 ms, by Triton's kernels 0.555.
        return False
    if fit := support.fit_of(spec, "backward" if backward_follows else "forward"):
        return pays(fit, backward_follows) and beats_later_backends(
            fit.spec, device, backward_follows
        )
    if backward_follows and may_cancel(spec):
        return False
    if frame.in_runs(spec) and not frame.is_wide(spec):
        enough = ENOUGH_ROWS_BOTH_WAYS if spec.decay else ENOUGH_ROWS
        return are_faster_in_runs(spec) and spec.B * spec.H * spec.T >= enough
    if frame.by_documents(spec) and not are_faster_than_tritons(spec):
        return False
    # Triton's backward is faster behind its own forward: on an H100, B2 T16384 with segments of
    # 1024, D128 took 1.79 ms and 1.84 behind this backend's, D64 1.34 and 1.43.
    between_backends = spec.segments or frame.both_ways(spec)
    if backward_follows and between_backends and support.unsupported(spec, "backward"):
        return False
    enough = ENOUGH_ROWS
    if channel_blocks.is_cut(spec):
        return spec.B * spec.H * spec.T >= enough * 2 * frame.F // (spec.D + spec.V)
    if frame.by_two_walks(spec):
        # Whatever a head fills of a tile: Triton's kernels take two walks, and these one.
        enough = ENOUGH_ROWS_BOTH_WAYS * 2 * frame.F // (spec.D + spec.V)
        return spec.B * spec.H * spec.T >= enough
    tile, tiles = narrow.tile_of(spec), 1
    if value_blocks.is_cut(spec):
        # On an H200 B2 H16 T16384 D128 V256 without a decay took 0.550 ms and with gradients 1.80,
        # by Triton's kernels 0.903 and 3.45; D64 V256 with a decay per step and gradients 1.99 and
        # 3.25.
        tile, tiles = frame.F, value_blocks.in_blocks(spec).value_blocks
    if spec.dtype == "float32" and narrow.fills(spec, mosaic.HALF):
        tile = mosaic.HALF
    least_filled = LEAST_FILLED
    if spec.decay == "channel" and not backward_follows:
        least_filled = LEAST_FILLED_BY_CHANNEL
    elif tile is not None and tile > frame.F:
        least_filled = LEAST_FILLED_OF_WIDE
    elif spec.decay in ("head", "step") and tile == mosaic.HALF:
        least_filled = LEAST_FILLED_WITH_A_DECAY
    if tile is None or spec.D * spec.V < least_filled * tiles * tile**2:
        return False
    in_groups = frame.heads_of_tile(spec) == 2 and spec.H != spec.G and max(spec.D, spec.V) > 32
    if in_groups and not (spec.decay or backward_follows):
        # On an H100, B2 H32 G8 T16384: 0.208 ms, by Triton's 0.200; with gradients 0.773 and 0.911.
        return False
    if spec.decay != "channel":
        enough = ENOUGH_ROWS * 2 * frame.F // (spec.D + spec.V)
    if spec.causal:
        return spec.B * spec.H * spec.T >= enough
    if spec.dtype == "float32" and spec.precision == "exact" and tile != mosaic.HALF:
        # Behind this backend is XLA. On an H200 4 heads of 1024 rows of 128 columns took 32.7 us
        # and by XLA 36.9, of 512 rows 44.9 and 41.5.
        enough //= 8
    return spec.B * (spec.H * spec.T + spec.G * spec.S) >= enough


def pays(fit: Fit, backward_follows: bool) -> bool:
    """Whether the kernels gain more over Triton's than the copies cost, in a large call.

    On an H200, forward and forward + backward in ms, and Triton's: wide, B15 H60 G15 T373 D164
    0.43, 1.06 (0.72, 2.95), B2 H27 T1083 D216 documents with lengths 0.32, 1.02 (0.60, 2.19), B9 H7
    G1 T5396 D156 0.49, 0.82 (0.54, 2.30); float32, B2 H16 T16383 D128 0.99, 2.41 (11.1, 16.4),
    causal with lengths 1.85, 7.32 (2.81, 13.6); with a decay, B30 H36 G9 T3050 D40 1.03, 3.71
    (1.21, 5.38), B8 H7 T16384 D64 0.62, 1.65 (0.38, 1.93), B2 H8 T16384 D250 0.80, 2.85 (1.65,
    2.92), folded B15 H1 T121606 D40 0.89, 2.64 (0.87, 11.5). But without a decay B8 H9 G3 T16384
    D64 took 0.80, 2.08 (0.32, 1.17), bidirectional B8 H8 T16384 D72 0.72, 1.61 (0.38, 1.27), and
    expanded ones B2 H12 G3 T16384 D192 2.50 (2.73), with gates of channels B2 H16 G4 T16384 D128
    2.77 (1.91). In float16, causal, B4 H9 T16384 D100 0.73, 2.27 (1.15, 6.03), B8 H14 T16384 D36
    0.95, 2.71 (0.93, 3.45), and bidirectional the former 0.53, 1.23 (0.41, 1.80).
    """
    called = fit.steps[0].before
    is_slow = frame.by_documents(called) or called.dtype == "float16"
    is_slow &= frame.is_wide(fit.spec)
    least = LEAST_ELEMENTS_OF_SLOW_CALLS if is_slow else LEAST_ELEMENTS
    if called.B * called.H * called.T * called.D < least:
        return False
    if called.decay in ("head", "step"):
        is_small = max(called.D, called.V) <= FEW_COLUMNS
        return backward_follows or is_small or frame.is_wide(fit.spec)
    if called.dtype == "float16" and not called.decay and _adds_columns_alone(fit):
        return backward_follows or called.causal or frame.is_wide(fit.spec)
    return called.dtype == "float32" or frame.is_wide(fit.spec)


def _adds_columns_alone(fit: Fit) -> bool:
    called, spec = fit.steps[0].before, fit.spec
    return dataclasses.replace(called, D=spec.D, F=spec.F, V=spec.V) == spec


def are_faster_in_runs(spec: LinearAttentionSpec) -> bool:
    """Whether these kernels are faster than the later backends, for a call of
    `scans.chunks.in_runs` with heads of up to 128 columns."""
    least = LEAST_COLUMNS_BESIDE_A_DECAY if spec.decay else LEAST_COLUMNS
    return spec.D * spec.V >= least


def are_faster_than_tritons(spec: LinearAttentionSpec) -> bool:
    """The lengths of documents are not known here. At T = 16,384 on an H200 documents of one row,
    of 30, of 1,024 rows and one document took B2 H16 D128 0.28, 0.61, 0.26 and 0.78 ms and by
    Triton's kernels 1.3, with gradients 0.74, 1.92, 0.76 and 2.41 and by Triton's 3.7; B8 H8 D64
    0.31, 0.56, 0.25 and 0.63 and 0.73, with gradients 0.73, 1.81, 0.67 and 1.87 and 2.03. With the
    fewest tiles here one document takes up to 1.2 times as long as by Triton's kernels (B1 H16
    T8192 D128: 0.40 and 0.36 ms), those of 300 rows 0.34 of its time. Where queries and keys have
    segments of their own, documents of a few rows are slow. Wide heads have other kernels, whose
    blocks share a document (`wide_heads.py`).
    """
    if frame.by_runs(spec):
        return spec.segments == "self"
    tiles = spec.B * spec.G // frame.heads_of_tile(spec)
    return spec.segments == "self" and tiles >= ENOUGH_TILES[frame.heads_of_tile(spec)]


def may_cancel(spec: LinearAttentionSpec) -> bool:
    """Whether rounding may be more than what is left of the gradient of a decay both ways. It has
    one number for each head, and in a few heads the terms of all of them may cancel by chance.
    Rounded states lose how values differ from their mean where that is large: with one head, values
    of mean 5 and 513 rows the gradient was up to 3.1e-2 off, of 1e-2. Triton's kernels multiply
    such calls in TF32."""
    few = spec.G <= FEW_HEADS and spec.decay == "head" and spec.normalize
    return few and frame.both_ways(spec) and frame.by_runs(spec)
