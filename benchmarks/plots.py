"""The report's pictures, each from a file of figures: times over T with the byte limit, a roofline,
the ladder's memory, where linear attention overtakes softmax, and accuracy against speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import (
    attention,
    findings,
    linear,
    picture,
    side_by_side,
    suites,
    variants,
)
from benchmarks.findings import FORWARD, OURS, Found
from benchmarks.picture import (
    LIMIT,
    STYLES,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
    plt,
)
from benchmarks.results import Results, Row

# Lengths of one line, and what they are of.
Lines = Mapping[str, Mapping[int, float]]
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
# How points are drawn whose time is not steady (`noise`).
OPEN: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "white"}
OPEN_LABEL = "open marker: a time that is not steady"
# Beyond the demo's: a line each.
MORE_STYLES: tuple[dict[str, Any], ...] = (
    *STYLES,
    {"color": "#444444", "marker": "P"},
    {"color": "#d1719c", "marker": "X"},
)


def _logarithmic(panel: Any, lengths: Sequence[int]) -> None:
    panel.set(xscale="log", yscale="log", xlabel="tokens T")
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths)
    panel.xaxis.set_major_formatter(FuncFormatter(picture.length))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(color="#e4e4e4", linewidth=0.8)
    panel.set_axisbelow(True)


def _by_length(results: Results, contest: Any, phase: str) -> dict[str, dict[int, Row]]:
    found: dict[str, dict[int, Row]] = {}
    for case in findings.cases_of(results, contest):
        for row in Found(results).of(case, phase):
            if row.contender not in contest.in_jax and row.contender not in contest.in_torch:
                continue
            found.setdefault(row.contender, {})[case.T] = row
    return found


def _open_marker() -> Any:
    """The legend's sample of an open marker."""
    return plt.Line2D([], [], color="#666666", marker="o", **OPEN)


def times(results: Results, contest: Any, title: str) -> Any:
    """Time over T in logarithms, both phases, with the byte limit."""
    figure, panels = plt.subplots(
        1, len(contest.phases), figsize=(12, 6), sharey=True, squeeze=False
    )
    handles: dict[str, Any] = {}
    styles: dict[str, dict[str, Any]] = {}
    opened = False
    for panel, phase in zip(panels[0], contest.phases, strict=True):
        limits: dict[int, float] = {}
        for name, rows in _by_length(results, contest, phase).items():
            style = styles.setdefault(name, MORE_STYLES[len(styles) % len(MORE_STYLES)])
            seconds = {T: row.seconds for T, row in sorted(rows.items())}
            (handles[name],) = panel.plot(list(seconds), list(seconds.values()), **style)
            doubtful = {T: seconds[T] for T, row in rows.items() if row.doubt}
            if doubtful:
                over = {**style, **OPEN, "zorder": style.get("zorder", 2) + 1}
                panel.plot(list(doubtful), list(doubtful.values()), **over)
                opened = True
            limits |= {T: row.limit for T, row in rows.items()}
        if not limits:
            plt.close(figure)
            return None
        limits = dict(sorted(limits.items()))
        label = "byte limit: a copy of the same bytes"
        (handles[label],) = panel.plot(list(limits), list(limits.values()), **LIMIT)
        _logarithmic(panel, list(limits))
        panel.set(title=phase)
        panel.yaxis.set_major_formatter(FuncFormatter(picture.duration))
    panels[0][0].set_ylabel("time of one call")
    if opened:
        handles[OPEN_LABEL] = _open_marker()
    _legend(figure, handles, title, results)
    return figure


def _legend(figure: Any, handles: Mapping[str, Any], title: str, results: Results) -> None:
    rows = -(-len(handles) // 3)
    figure.suptitle(title, fontweight="bold")
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
        bbox_to_anchor=(0.5, 0.03),
    )
    figure.text(0.5, 0.01, results.device, ha="center", fontsize=9, color="#555555")
    figure.subplots_adjust(left=0.1, right=0.98, top=0.88, bottom=0.2 + 0.035 * rows, wspace=0.06)


def _contests() -> dict[str, tuple[Any, str]]:
    """Whose rows the roofline has, by the marker that they get."""
    return {
        "linear attention": (linear.CONTEST, "o"),
        "softmax attention": (attention.CONTEST, "s"),
    }


def roofline(results: Results) -> Any:
    """Operations per second over operations per byte, under a copy's and a product's rates, of
    steady times of `implementation=None` and of peers.
    """
    figure, panel = plt.subplots(figsize=(9, 6))
    handles: dict[str, Any] = {}
    found = Found(results)
    highest = max(results.matrix.values(), default=None)
    intensities = []
    for op, (contest, marker) in _contests().items():
        for case in findings.cases_of(results, contest):
            for row in found.of(case, FORWARD):
                own = row.contender == OURS
                if row.doubt or (side_by_side.is_ours(row.contender) and not own):
                    continue
                colour, size, order = ("#0b5fa5", 60, 5) if own else ("#bbbbbb", 22, 2)
                intensity = row.operations / row.traffic
                intensities.append(intensity)
                handles[f"{op}, {'ato_jax' if own else 'peers'}"] = panel.scatter(
                    intensity, row.rate, color=colour, marker=marker, s=size, zorder=order
                )
    if not intensities:
        plt.close(figure)
        return None
    span = np.geomspace(min(intensities) / 2, max(intensities) * 2, 100)
    roof = span * results.bandwidth
    if highest:
        roof = np.minimum(roof, highest)
    (handles["a copy, then a large product"],) = panel.plot(span, roof, **LIMIT)
    panel.set(xscale="log", yscale="log", xlabel="operations per byte that has to move")
    panel.set_ylabel("operations per second")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e12:g} T"))
    panel.grid(color="#e4e4e4", linewidth=0.8)
    panel.set_axisbelow(True)
    _legend(figure, handles, "Roofline, forward", results)
    return figure


def memory(results: Results) -> Any:
    """The ladder's peak memory over T."""
    figure, panel = plt.subplots(figsize=(9, 6))
    handles: dict[str, Any] = {}
    lengths: set[int] = set()
    rungs = {"naive: plain JAX": variants.NAIVE, variants.TILES_IN_MEMORY: variants.TILES_IN_MEMORY}
    rungs["flash: ato_jax"] = variants.KERNEL
    members = [case for case in findings.cases_of(results, suites.LADDER) if case.H == 1]
    for (label, name), style in zip(rungs.items(), (STYLES[1], STYLES[2], STYLES[0]), strict=True):
        rows = {case.T: Found(results).row(case, FORWARD, name) for case in members}
        peaks = {T: row.peak for T, row in sorted(rows.items()) if row and row.peak}
        (handles[label],) = panel.plot(list(peaks), list(peaks.values()), **style)
        lengths |= peaks.keys()
    if not lengths:
        plt.close(figure)
        return None
    _logarithmic(panel, sorted(lengths))
    # Powers of two have short labels; powers of ten bytes are 0.953674 MB and so on.
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 2**20:g} MB"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_ylabel("peak memory of one call")
    _legend(figure, handles, "The ladder's memory", results)
    figure.subplots_adjust(left=0.13)
    return figure


def crossover(results: Results) -> Any:
    """T x D: how many times as long the best of SDPA takes as linear attention."""
    grid = findings.crossovers(results, suites.CROSSOVER)
    lengths, widths = (sorted({key[axis] for key in grid}) for axis in (0, 1))
    ratios = {key: findings.steady_ratio(*rows) for key, rows in grid.items()}
    values = np.array([[ratios.get((T, D)) or np.nan for T in lengths] for D in widths])
    if np.isnan(values).all():
        return None
    figure, panel = plt.subplots(figsize=(9, 5.5))
    ratio = np.log2(values)
    edge = float(np.nanmax(np.abs(ratio))) or 1.0
    panel.imshow(ratio, cmap="RdBu", vmin=-edge, vmax=edge, aspect="auto", origin="lower")
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            # A white cell says why it has no ratio.
            key = lengths[column], widths[row]
            text, colour = (findings.times(*grid[key]) if key in grid else "-"), "#777777"
        else:
            strong = abs(np.log2(value)) > 0.6 * edge
            text = f"{value:.2g}x" if value < 10 else f"{value:.0f}x"
            colour = "white" if strong else "black"
        panel.text(column, row, text, ha="center", va="center", color=colour)
    panel.set_xticks(range(len(lengths)), [picture.length(T) for T in lengths])
    panel.set_yticks(range(len(widths)), [str(D) for D in widths])
    panel.set(xlabel="tokens T", ylabel="head size D")
    title = "The best SDPA backend's time over linear attention's, forward (blue: linear is faster)"
    _legend(figure, {}, title, results)
    return figure


def accuracy(results: Results) -> Any:
    """Relative error of the output against time, in each op's first case."""
    both = _contests()
    first = {op: findings.cases_of(results, contest)[0] for op, (contest, _) in both.items()}
    if not any(Found(results).of(case, FORWARD) for case in first.values()):
        return None
    figure, panels = plt.subplots(1, len(both), figsize=(12, 6.5))
    opened = False
    for panel, (op, case) in zip(panels, first.items(), strict=True):
        # Numbers of colours and markers without a common factor: no two look the same.
        colours = itertools.cycle(style["color"] for style in MORE_STYLES)
        markers = itertools.cycle("os^DP")
        wanted = side_by_side.wanted(both[op][0], case)
        rows = [row for row in Found(results).of(case, FORWARD) if row.contender in wanted]
        opened = opened or any(row.doubt for row in rows)
        # The library's own first, so that it looks the same in all panels.
        for row in sorted(rows, key=lambda row: row.contender != OURS):
            colour, marker = next(colours), next(markers)
            panel.scatter(
                row.seconds,
                row.errors["out"],
                s=90 if row.contender == OURS else 45,
                edgecolors=colour,
                facecolors="white" if row.doubt else colour,
                marker=marker,
                label=row.contender,
            )
        panel.set(title=f"{op}\n{case}", xscale="log", yscale="log", xlabel="time of one call")
        low, high = panel.get_ylim()
        panel.set_ylim(low / 1.5, high * 1.5)
        # Either axis may hold no power of ten.
        for axis, subs in ((panel.xaxis, (1, 3)), (panel.yaxis, (1, 2, 3, 5))):
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_minor_formatter(NullFormatter())
        panel.xaxis.set_major_formatter(FuncFormatter(picture.duration))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda error, _: f"{error:.0e}"))
        panel.grid(color="#e4e4e4", linewidth=0.8)
        panel.set_axisbelow(True)
        if panel.collections:
            panel.legend(
                fontsize=8,
                frameon=False,
                ncols=2,
                loc="upper center",
                bbox_to_anchor=(0.5, -0.14),
            )
    panels[0].set_ylabel("relative error of the output against float64")
    figure.subplots_adjust(left=0.09, right=0.98, top=0.9, bottom=0.4, wspace=0.2)
    told = f"{results.device}; {OPEN_LABEL}" if opened else results.device
    figure.text(0.5, 0.01, told, ha="center", fontsize=9, color="#555555")
    return figure


# What the pictures are of.
SUITES = ("linear", "attention", "bidirectional", "fla", "ladder", "crossover")
PICTURES: dict[str, Callable[[Results], Any]] = {
    "bidirectional": lambda results: times(
        results, suites.BIDIRECTIONAL, "Bidirectional linear attention against SDPA"
    ),
    "causal": lambda results: times(
        results, suites.FLA_BESIDE, "Causal linear attention against flash-linear-attention"
    ),
    "roofline": roofline,
    "memory": memory,
    "crossover": crossover,
    "accuracy": accuracy,
}


def draw(results: Results, folder: Path) -> list[Path]:
    """Writes the pictures of what was measured; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, make in PICTURES.items():
        with plt.rc_context(STYLE):
            figure = make(results)
            if figure is None:
                continue
            drawn.append(folder / f"{name}.png")
            figure.savefig(drawn[-1], dpi=110)
            plt.close(figure)
    return drawn
