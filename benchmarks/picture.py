"""The demo's picture: time over T, forward and forward + backward side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import (  # noqa: E402
    FuncFormatter,
    LogLocator,  # noqa: F401
    NullFormatter,  # noqa: F401
    NullLocator,
)

# Colours that differ in lightness, too; the first contender, the library's own, is drawn thickest.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0b5fa5", "marker": "o", "linewidth": 3.0, "markersize": 7, "zorder": 5},
    {"color": "#c1440e", "marker": "s"},
    {"color": "#e09f1f", "marker": "^"},
    {"color": "#5b8c3e", "marker": "D"},
    {"color": "#8c6bb1", "marker": "v"},
)
LIMIT: dict[str, Any] = {"color": "#666666", "linestyle": (0, (4, 3)), "linewidth": 1.5}


def length(T: float, _: object = None) -> str:
    """512, 1K, 64K, 1M."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if T >= unit and T % unit == 0:
            return f"{T / unit:.0f}{letter}"
    return f"{T:.0f}"


def duration(seconds: float, _: object = None) -> str:
    """In the unit that needs no power of ten."""
    for unit, letters in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit * 0.999:
            return f"{seconds / unit:.3g} {letters}"
    return f"{seconds:.0e} s"


def draw(
    times: Mapping[str, Mapping[str, Mapping[int, float]]],
    limits: Mapping[str, Mapping[int, float]],
    sentence: str,
    setting: str,
    output: Path,
) -> None:
    """Writes the picture; `times[phase][contender][T]` and `limits[phase][T]` are seconds."""
    with plt.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panels = plt.subplots(1, len(times), figsize=(12, 6.6), sharex=True, sharey=True)
        handles = {}
        for panel, (phase, by_name) in zip(panels, times.items(), strict=True):
            styles = dict(zip(by_name, STYLES, strict=False))
            for name, by_length in by_name.items():
                if by_length:
                    handles[name] = panel.plot(
                        list(by_length), list(by_length.values()), label=name, **styles[name]
                    )[0]
            if limits[phase]:
                handles["byte limit: a copy of the same bytes"] = panel.plot(
                    list(limits[phase]), list(limits[phase].values()), **LIMIT
                )[0]
            panel.set(title=phase, xlabel="tokens T", xscale="log", yscale="log")
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(FuncFormatter(length))
            panel.yaxis.set_major_formatter(FuncFormatter(duration))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.yaxis.set_minor_locator(NullLocator())
            panel.grid(color="#e4e4e4", linewidth=0.8)
            panel.set_axisbelow(True)
        lengths = sorted({T for by_name in times.values() for row in by_name.values() for T in row})
        # Every second label where there are many.
        panels[0].set_xticks(lengths[:: 1 + len(lengths) // 10])
        panels[0].set_ylabel("time of one call")
        figure.suptitle("\n".join(textwrap.wrap(sentence, 92)), fontsize=13, fontweight="bold")
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="lower center",
            ncols=3,
            frameon=False,
            bbox_to_anchor=(0.5, 0.045),
        )
        figure.text(0.5, 0.015, setting, ha="center", fontsize=10, color="#555555")
        figure.subplots_adjust(left=0.085, right=0.985, top=0.83, bottom=0.25, wspace=0.06)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=130)
        plt.close(figure)
