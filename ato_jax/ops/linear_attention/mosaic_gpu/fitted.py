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
