"""Which calls the kernels take with other sizes, heads or rows, by the steps of `fits.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ato_jax import mosaic
from ato_jax.ops.linear_attention.fits import (
    Counted,
    Expanded,
    Fit,
    Folded,
    Padded,
    Step,
    fills,
    up,
)
from ato_jax.ops.linear_attention.mosaic_gpu import channel_blocks, frame, narrow, refusals
from ato_jax.ops.linear_attention.mosaic_gpu import steps as steps_of_rows
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Elements of q, of which copies cost less than the kernels gain; and of wide heads in documents,
# where Triton's kernels take twice the time.
LEAST_ELEMENTS = 2**25
LEAST_ELEMENTS_OF_DOCUMENTS = 2**23
# Up to as many columns a decay pays without gradients, too.
FEW_COLUMNS = 40


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
    2.77 (1.91).
    """
    called = fit.steps[0].before
    in_documents = frame.by_documents(called) and frame.is_wide(fit.spec)
    least = LEAST_ELEMENTS_OF_DOCUMENTS if in_documents else LEAST_ELEMENTS
    if called.B * called.H * called.T * called.D < least:
        return False
    if called.decay in ("head", "step"):
        is_small = max(called.D, called.V) <= FEW_COLUMNS
        return backward_follows or is_small or frame.is_wide(fit.spec)
    return called.dtype == "float32" or frame.is_wide(fit.spec)


def candidates(spec: LinearAttentionSpec) -> Iterator[Fit]:
    """Calls in place of this one, the cheapest first; kernels may refuse them, too."""
    for steps, heads in _heads(spec):
        for counted in ([], *_counted(steps[-1].after if steps else spec)):
            done = [*steps, *counted]
            last = done[-1].after if done else spec
            for rows in ({}, *_rows(last)):
                for columns in _columns(last):
                    fit = _with_sizes(spec, done, heads | rows | columns)
                    if fit is not None and fills(fit):
                        yield fit


def _with_sizes(spec: LinearAttentionSpec, steps: list[Step], sizes: dict[str, int]) -> Fit | None:
    last = steps[-1].after if steps else spec
    offset = None if last.offset is None else sizes.get("S", last.S) - sizes.get("T", last.T)
    changed: dict[str, Any] = {**sizes, "offset": offset}
    padded = dataclasses.replace(last, **changed)
    if padded != last:
        steps = [*steps, Padded(last, padded)]
    return Fit(tuple(steps)) if steps else None


def _heads(spec: LinearAttentionSpec) -> Iterator[tuple[list[Step], dict[str, int]]]:
    """Steps that change heads, and the numbers of heads to pad to behind them."""
    yield [], {}
    if spec.H == 1 < spec.B and not (spec.q_lengths or spec.kv_lengths or spec.segments):
        yield [Folded.of(spec)], dict.fromkeys("HG", up(spec.B, 2))
    group, G = spec.H // spec.G, up(spec.G, 2)
    padded = {"G": G, "H": G * (group if group == 1 else up(group, 2))}
    of_group = spec.decay in ("head", "step") or frame.by_runs(spec)
    if group > 1 and (of_group or refusals.is_left_to_xla(spec)):
        yield [Expanded.of(spec)], {}
        expanded = dict.fromkeys("HG", up(spec.H, 2))
        if 2 * expanded["H"] < padded["H"] + G:
            yield [Expanded.of(spec)], expanded
    yield [], padded


def _counted(spec: LinearAttentionSpec) -> list[list[Step]]:
    """In place of lengths, if there are any."""
    lengths = spec.q_lengths or spec.kv_lengths
    aligned = spec.offset is not None or not spec.causal and spec.decay is None
    fits = lengths and aligned and _may_go_on(spec)
    return [[Counted.of(spec)]] if fits else []


def _may_go_on(spec: LinearAttentionSpec) -> bool:
    """Whether more rows may come after the last ones. Segments of wide heads, and beside a decay
    per channel, go on, but not where queries and keys have segments of their own; and so does a
    decay per head in wide heads, which takes from a state. Other heads take any number of rows of
    these, but few rows are not for them."""
    if spec.segments is None and spec.decay != "head":
        return True
    stateful = spec.decay == "head" and spec.return_state
    goes_on = spec.decay == "channel" or frame.by_runs(spec)
    return goes_on and spec.segments != "cross" and not stateful


def _rows(spec: LinearAttentionSpec) -> list[dict[str, int]]:
    """T and S that kernels take, if need be. Where causal, rows are padded at the end, so that
    queries and keys keep their places only if there are as many."""
    if not _may_go_on(spec) or 2 * min(spec.T, spec.S) < frame.C:
        return []
    if spec.causal and spec.T != spec.S:
        return []
    multiple = 1 if refusals.takes_any_rows(spec) else frame.ROWS_OF_A_TILE
    in_walks = spec.causal or spec.decay == "channel"
    if in_walks and spec.return_state and steps_of_rows.unsupported_lengths(spec, "forward"):
        multiple = frame.C
    # The gradients of a decay per channel take more rows than a chunk has.
    is_short = refusals.is_left_to_xla(spec) and spec.T <= frame.C
    least = [frame.C, 2 * frame.C] if is_short else [frame.C]
    given = {"T": spec.T, "S": spec.S}
    found = [{name: up(max(rows, given[name]), multiple) for name in "TS"} for rows in least]
    return [sizes for sizes in found if sizes != given]


def _columns(spec: LinearAttentionSpec) -> list[dict[str, int]]:
    """The least D and V that tiles hold, if any do."""
    D, V, step = spec.D, spec.V, narrow.step_of(spec)
    columns = max(D, V)
    if channel_blocks.is_cut(spec):
        D, V = (up(size, step) for size in (D, V))
    elif frame.by_two_walks(spec):
        size = next((size for size in refusals.SIZES_BOTH_WAYS if size >= columns), None)
        D, V = (size or D, size or V)
    elif (
        columns <= frame.F
        and frame.in_runs(spec)
        or ((spec.causal or spec.segments) and columns <= mosaic.HALF and spec.dtype != "float32")
    ):
        D, V = (max(narrow.LEAST_OF_PAIRS, up(size, step)) for size in (D, V))
    elif columns > mosaic.HALF:
        D, V = (up(size, step) for size in (D, V))
        if max(D, V) < narrow.LEAST:
            D = V = up(narrow.LEAST, step)
    return [{"D": D, "F": D, "V": V}]
