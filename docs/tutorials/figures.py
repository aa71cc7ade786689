"""Draws the figures of the tutorials from the pages' own code.

    python docs/tutorials/figures.py             all of them, into docs/tutorials/figures
    python docs/tutorials/figures.py ring recall   these alone
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pages

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FOLDER = pages.FOLDER / "figures"
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#6b46c1", "#718096"
STYLE = {
    "figure.dpi": 110,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "legend.frameon": False,
    "lines.linewidth": 2,
}

ATTENTION = "01-attention-from-scratch"
QUADRATIC = "02-the-quadratic-problem"
LINEAR = "03-linear-attention"
MEMORY = "04-gpu-memory"
PALLAS = "05-pallas-and-triton"
KERNEL = "06-a-kernel-step-by-step"

page = functools.cache(pages.run)


def heat_maps(maps: dict[str, Any], size: tuple[float, float]) -> plt.Figure:
    """Attention weights side by side, with one colour bar; hidden pairs, which are 0, are white."""
    figure, axes = plt.subplots(1, len(maps), figsize=size, layout="constrained", sharey=True)
    for axis, (title, weights) in zip(axes, maps.items(), strict=True):
        weights = np.asarray(weights)
        shown = np.where(weights == 0, np.nan, weights)
        image = axis.imshow(shown, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axis.set(title=title, xlabel="key j")
        axis.grid(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("query i")
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    return figure


def masks() -> plt.Figure:
    ours = page(ATTENTION)
    rows = 12
    keys = jax.random.split(jax.random.key(3), 2)
    q, k = (jax.random.normal(key, (rows, 16)) for key in keys)
    scores = q @ k.T / 4
    seen = {
        "no mask": jnp.ones((rows, rows), bool),
        "causal": ours["causal"](rows, rows),
        "window of 4": ours["window"](rows, rows, 3),
    }
    weights = {
        title: ours["softmax"](jnp.where(mask, scores, -jnp.inf)) for title, mask in seen.items()
    }
    return heat_maps(weights, (9, 3.2))


def online_softmax() -> plt.Figure:
    ours = page(ATTENTION)
    keys = jax.random.split(jax.random.key(5), 3)
    q, k, v = (jax.random.normal(key, (64, 16)) for key in keys)
    _, _, history = ours["online"](q[2:3] * 1.5, k, v, block=1)
    top, total = (np.array([float(entry[n][0]) for entry in history]) for n in (0, 1))
    seen = np.arange(1, 65)
    figure, axes = plt.subplots(2, 1, figsize=(7, 4.2), sharex=True, layout="constrained")
    axes[0].step(seen, top, where="post", color=BLUE)
    axes[0].set(ylabel="top\n(largest score so far)")
    axes[1].step(seen, total, where="post", color=ORANGE)
    axes[1].set(ylabel="total\n(sum of exp(s - top))", xlabel="keys seen", xlim=(1, 64))
    return figure


def memory() -> plt.Figure:
    ours = page(QUADRATIC)
    lengths = 2.0 ** np.arange(10, 21)
    arrays = np.array([4 * ours["u_bytes"](8, T, 8, 64) for T in lengths])
    scores = np.array([ours["score_bytes"](8, 8, T, T) for T in lengths])
    lse = 4 * 8 * 8 * lengths  # float32, one number for each query and head
    figure, axis = plt.subplots(figsize=(7, 4.4), layout="constrained")
    axis.loglog(lengths, (arrays + scores) / 1e9, color=ORANGE, label="scores in memory")
    axis.loglog(lengths, (arrays + lse) / 1e9, color=BLUE, label="online softmax")
    axis.loglog(lengths, arrays / 1e9, "--", color=GREEN, label="linear attention")
    for size, name, side in ((80, "H100, 80 GB", "top"), (141, "H200, 141 GB", "bottom")):
        axis.axhline(size, color=GREY, linewidth=1)
        axis.text(1100, size * (0.93 if side == "top" else 1.07), name, va=side, color=GREY)
    axis.set(
        xlabel="sequence length T = S, tokens", ylabel="memory, GB",
        title="B 8, H 8, D 64, bfloat16, forward: inputs, output and scores", ylim=(0.01, 3e5),
    )
    axis.legend(loc="upper left", bbox_to_anchor=(0.0, 0.98))
    return figure


def roofline() -> plt.Figure:
    ours = page(QUADRATIC)
    intensity = np.logspace(0, 5, 200)
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    colors = {"H100, data sheet": ORANGE, "H200, data sheet": BLUE, "H200, measured": GREEN}
    for name, (peak, bandwidth) in ours["CARDS"].items():
        style = "--" if "measured" in name else "-"
        reach = np.minimum(peak, intensity * bandwidth) / 1e12
        axis.loglog(intensity, reach, style, color=colors[name], label=name)
    peak, bandwidth = ours["CARDS"]["H200, measured"]
    places = {
        "textbook softmax": (1.15, 0.30), "linear attention": (0.95, 0.30),
        "online softmax": (0.9, 0.45),
    }
    for name, (flop, moved) in ours["ways"].items():
        x = flop / moved
        if name == "linear attention":
            continue
        y = min(peak, x * bandwidth) / 1e12
        axis.plot(x, y, "o", color=GREEN)
        label = "textbook softmax and\nlinear attention" if name == "textbook softmax" else name
        right, down = places[name]
        axis.text(x * right, y * down, label, ha="left" if right > 1 else "center")
    axis.set(
        xlabel="arithmetic intensity, FLOP a byte", ylabel="rate, TFLOP a second",
        title="B 8, H 8, T 65,536, D 64, bfloat16", ylim=(1, 2000), xlim=(1, 1e5),
    )
    axis.legend(loc="lower right")
    return figure


def sharpness() -> plt.Figure:
    ours = page(LINEAR)
    rows, D = 32, 64
    k = jax.random.normal(jax.random.key(7), (rows, D))
    seen = jnp.tril(jnp.ones((rows, rows)))
    softmax = jax.nn.softmax(jnp.where(seen > 0, k @ k.T / D**0.5, -jnp.inf))
    w = ours["phi"](k) @ ours["phi"](k).T * seen
    i = jnp.arange(rows)
    gated = jnp.where(seen > 0, w * jnp.exp(-0.3 * (i[:, None] - i[None, :])), 0)
    maps = {
        "softmax": softmax,
        "elu + 1": w / w.sum(1, keepdims=True),
        "elu + 1, decay -0.3": gated / gated.sum(1, keepdims=True),
    }
    return heat_maps(maps, (9, 3.2))


def recall() -> plt.Figure:
    ours = page(LINEAR)
    counts = [2, 4, 8, 16, 32, 64, 128, 256]
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    ways = {
        "softmax": ("read_softmax", GREEN),
        "delta rule": ("read_delta", BLUE),
        "sum": ("read_linear", ORANGE),
    }
    for name, (read, color) in ways.items():
        errors = [ours["recall_error"](ours[read], n) for n in counts]
        axis.plot(counts, errors, "o-", color=color, label=name)
    axis.axvline(64, color=GREY, linewidth=1)
    axis.text(62, 1.75, "as many pairs\nas columns", ha="right", color=GREY)
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(n) for n in counts])
    axis.set(xlabel="stored pairs", ylabel="error of recalled values, relative")
    axis.set_title("state of 64 by 64, random keys")
    axis.legend()
    return figure


def coalescing() -> plt.Figure:
    ours = page(MEMORY)
    strides = np.arange(1, 33)
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for itemsize, name, color in ((4, "float32", BLUE), (2, "bfloat16", ORANGE)):
        used = [100 * ours["efficiency"](int(stride), itemsize) for stride in strides]
        axis.plot(strides, used, "o-", markersize=4, color=color, label=name)
    axis.set(xlabel="stride between threads, elements", ylabel="fetched bytes used, %")
    axis.set_ylim(0, 105)
    axis.legend()
    return figure


def banks() -> plt.Figure:
    row, column = np.mgrid[0:32, 0:32]
    layouts = {
        "plain: word c at place c": column,
        "swizzled: word c at place c xor r": column ^ row,
    }
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.9), layout="constrained", sharey=True)
    for axis, (title, bank) in zip(axes, layouts.items(), strict=True):
        image = axis.imshow(bank, cmap="viridis", vmin=0, vmax=31, interpolation="nearest")
        axis.set(title=title, xlabel="column c of the tile")
        axis.grid(False)
    axes[0].set_ylabel("row r of the tile")
    figure.colorbar(image, ax=axes, label="bank of the word", shrink=0.9)
    return figure


def pipeline() -> plt.Figure:
    ours = page(PALLAS)
    stages = np.arange(1, 11)
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    times = [ours["pipelined"](64, int(n), ours["load"], 0.25) for n in stages]
    axis.plot(stages, times, "o-", color=BLUE, label="model")
    axis.axhline(64 * 0.25, color=ORANGE, linestyle="--", label="computing alone")
    axis.axhline(64 * 0.2, color=GREEN, linestyle=":", label="loading alone")
    axis.set(xlabel="stages (tiles under way)", ylabel="time of 64 tiles, µs", ylim=(0, 80))
    axis.set_xticks(stages)
    axis.legend()
    return figure


def steps() -> plt.Figure:
    names, _, loads, stores, _ = zip(*page(KERNEL)["found_steps"], strict=True)
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    place = np.arange(len(names))
    kinds = ((-0.2, loads, "loads", BLUE), (0.2, stores, "stores", ORANGE))
    for shift, values, label, color in kinds:
        size = np.array(values) / 2**20
        bars = axis.bar(place + shift, size, 0.38, label=label, color=color)
        axis.bar_label(bars, [f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in size])
    axis.set_yscale("log")
    axis.set_xticks(place, names)
    axis.set(ylabel="bytes of all programs, MiB", xlabel="step", ylim=(0.5, 6e4))
    axis.set_title("one head, T = S = 8192, D 64, bfloat16")
    axis.legend()
    return figure


def ring() -> plt.Figure:
    ours = page(KERNEL)
    figure, axes = plt.subplots(2, 1, figsize=(9, 5.4), sharex=True, layout="constrained")
    colors = (BLUE, ORANGE, GREEN)
    for axis, slots in zip(axes, (1, 4), strict=True):
        found = ours["ring"](8, slots, **ours["times"])
        for level, (spans, color) in enumerate(zip(found, colors, strict=True)):
            for n, (start, end) in enumerate(spans):
                # Loads under way overlap: they are drawn on four rows in turns.
                height = 0.76 if level else 0.19
                low = level - 0.38 if level else level - 0.38 + (n % 4) * 0.19
                axis.broken_barh(
                    [(start, end - start)], (low, height), facecolor=color, edgecolor="white"
                )
                axis.text((start + end) / 2, low + height / 2, str(n), ha="center", va="center",
                          color="white", fontsize=9 if level else 7)
        axis.set_yticks(range(3), ["memory: load", "features: map", "values: multiply"])
        axis.set_title(f"{slots} slot" + "s" * (slots > 1), loc="left")
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
    axes[1].set_xlabel("time, µs (model); numbers are chunks")
    return figure


def journey() -> plt.Figure:
    # Milliseconds of the notes on linear attention, case B, causal, forward, H200.
    steps = {
        "one program carries\nthe state (Triton)": 0.97,
        "states stored\nfor runs (Triton)": 0.45,
        "Triton, beside the\nfirst Hopper kernel": 0.432,
        "Hopper: roles\nand a ring": 0.257,
        "features in pairs,\nslots free earlier": 0.231,
    }
    figure, axis = plt.subplots(figsize=(8.6, 4), layout="constrained")
    colors = [ORANGE, ORANGE, ORANGE, BLUE, BLUE]
    bars = axis.barh(list(steps), list(steps.values()), color=colors)
    axis.bar_label(bars, [f"{value} ms" for value in steps.values()], padding=3)
    limit = 4 * 2 * 16_384 * 32 * 128 / 4.26e12 * 1e3
    axis.axvline(limit, color=GREY, linestyle="--")
    axis.text(limit + 0.01, -0.62, f"byte limit, 4u: {limit:.3f} ms", color=GREY, va="bottom")
    axis.set(xlabel="causal forward, B 1, H 32, T 16,384, D 128, bfloat16, ms", xlim=(0, 1.1))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    return figure


FIGURES: dict[str, Callable[[], plt.Figure]] = {
    draw.__name__: draw
    for draw in (
        *(masks, online_softmax, memory, roofline, sharpness, recall),
        *(coalescing, banks, pipeline, steps, ring, journey),
    )
}


def main() -> None:
    names = sys.argv[1:] or list(FIGURES)
    if unknown := set(names) - set(FIGURES):
        sys.exit(f"no figure {', '.join(sorted(unknown))}: there are {', '.join(FIGURES)}")
    FOLDER.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        for name in names:
            figure = FIGURES[name]()
            figure.savefig(FOLDER / f"{name}.png", metadata={"Software": None})
            plt.close(figure)
            print(f"wrote {FOLDER / name}.png", flush=True)


if __name__ == "__main__":
    main()
