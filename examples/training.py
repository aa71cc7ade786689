"""What the examples share: a training loop, its curves, their picture, and checkpoints.

    loss_function(model, batch) -> (loss, {name: metric})
    history = train(model, batches, loss_function, steps=..., learning_rate=...)
    plot({title: {label: history.curves["loss"]}}, path)
    save(model, folder)                      Orbax; load(model, folder) fills a model built alike

What is trained is every nnx.Param, by AdamW behind a clipped gradient, with a learning rate that
rises over the first tenth of the steps and falls along a cosine.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import matplotlib
import optax
import orbax.checkpoint
from flax import nnx

from examples import command

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

Curve = list[tuple[int, float]]  # (step, value)
Metrics = Mapping[str, Any]  # scalars by name

# Random streams and decoding caches belong to a run, not to what was learned.
LEARNED = nnx.Not(nnx.Any(nnx.RngState, nnx.Cache))


def argument_parser(description: str | None, *, output: str) -> argparse.ArgumentParser:
    """The flags of every example; an example adds its own."""
    parser = command.parser(description, output=output)
    parser.add_argument("--small", action="store_true", help="a minute on two CPU cores")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def count_parameters(model: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@dataclasses.dataclass
class History:
    """What a run has measured: its curves by name, and how fast it was."""

    curves: dict[str, Curve] = dataclasses.field(default_factory=dict)
    # Without the first steps, which compile and record, and evaluations. None after a single step.
    seconds_per_step: float | None = None

    def add(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.curves.setdefault(name, []).append((step, float(value)))

    def first(self, name: str) -> float:
        return self.curves[name][0][1]

    def last(self, name: str) -> float:
        return self.curves[name][-1][1]


class Progress:
    """One line on stderr: redrawn on a terminal, elsewhere printed `lines` times."""

    def __init__(self, label: str, steps: int, *, lines: int = 4, stream: TextIO | None = None):
        self.label = label
        self.steps = steps
        self.stream = sys.stderr if stream is None else stream
        self.redrawn = self.stream.isatty()
        self.every = 1 if self.redrawn else -(-steps // lines)
        self.started = time.monotonic()

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    def show(self, step: int, metrics: Metrics) -> None:
        width = 24
        done = width * step // self.steps
        left = (time.monotonic() - self.started) / step * (self.steps - step)
        values = "  ".join(f"{name} {float(value):.3f}" for name, value in metrics.items())
        line = (
            f"{self.label:<20} [{'#' * done}{'.' * (width - done)}] {step}/{self.steps}  "
            f"{values}  {left:.0f} s left"
        )
        ends = not self.redrawn or step == self.steps
        self.stream.write(("\r\x1b[K" if self.redrawn else "") + line + ("\n" if ends else ""))
        self.stream.flush()


# Equal arguments give the same transformation, and so no second compilation of a step.
@functools.cache
def adamw(
    learning_rate: float, steps: int, *, weight_decay: float = 0.1
) -> optax.GradientTransformation:
    """AdamW with the module docstring's schedule; vectors (biases, scales) do not decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=max(1, steps // 10),
        decay_steps=max(2, steps),
        end_value=0.1 * learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=weight_decay,
            mask=lambda parameters: jax.tree.map(lambda leaf: leaf.ndim > 1, parameters),
        ),
    )


# In place: parameters and what the optimizer keeps of them are held once.
@functools.partial(
    nnx.jit, static_argnames="loss_function", donate_argnames=("model", "optimizer")
)
def update(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    batch: Any,
    loss_function: Callable[[Any, Any], tuple[jax.Array, Metrics]],
) -> Metrics:
    """One step."""
    gradient = nnx.value_and_grad(loss_function, has_aux=True)
    (loss, metrics), gradients = gradient(model, batch)
    optimizer.update(model, gradients)
    return {"loss": loss, **metrics}


def train(
    model: nnx.Module,
    batches: Iterable[Any],
    loss_function: Callable[[Any, Any], tuple[jax.Array, Metrics]],
    *,
    steps: int,
    learning_rate: float,
    weight_decay: float = 0.1,
    evaluate: Callable[[Any], Metrics] | None = None,
    evaluations: int = 4,
    label: str = "",
) -> History:
    """Trains the model in place.

    Args:
      batches: gives a batch per step, a pytree of arrays; endless, or as long as the steps.
      loss_function: (model, batch) -> (loss, metrics), all scalars; runs inside nnx.jit.
      evaluate: model -> metrics, run on `model.eval()` before the first step and, evenly spread,
        `evaluations` times after; the last time after the last step.
      label: what the progress line begins with.

    Returns:
      The curves: "loss" and the loss function's metrics at every step, counted from 1, and those
      of `evaluate` where it ran.
    """
    optimizer = nnx.Optimizer(
        model, adamw(learning_rate, steps, weight_decay=weight_decay), wrt=nnx.Param
    )

    history = History()
    progress = Progress(label, steps)
    measured: list[Metrics] = []  # stays on the device, so that no step waits for another
    evaluate_every = -(-steps // evaluations)
    warm_up = max(1, min(5, steps // 3))
    seconds, timed_steps = 0.0, 0

    def run_evaluation(step: int) -> None:
        if evaluate is not None:
            model.eval()
            history.add(step, evaluate(model))
            model.train()

    run_evaluation(0)
    model.train()
    started = time.monotonic()
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        metrics = update(model, optimizer, batch, loss_function=loss_function)
        measured.append(metrics)
        timed_steps += 1
        if progress.due(step):
            progress.show(step, metrics)
        evaluated = step % evaluate_every == 0 or step == steps
        if step == warm_up or evaluated:
            jax.block_until_ready(metrics)
            seconds += time.monotonic() - started
            if step <= warm_up:
                seconds, timed_steps = 0.0, 0
            if evaluated:
                run_evaluation(step)
            started = time.monotonic()
    model.eval()
    if len(measured) < steps:
        raise ValueError(f"batches must last for {steps} steps, got {len(measured)}")
    for step, metrics in enumerate(jax.device_get(measured), start=1):
        history.add(step, metrics)
    if timed_steps:
        history.seconds_per_step = seconds / timed_steps
    return history


def smoothed(curve: Curve, width: int) -> Curve:
    """The mean of each value and the up to `width` - 1 before it."""
    values = [value for _, value in curve]
    windows = (values[max(0, n + 1 - width) : n + 1] for n in range(len(values)))
    means = (sum(window) / len(window) for window in windows)
    return [(step, mean) for (step, _), mean in zip(curve, means, strict=True)]


def plot(
    panels: Mapping[str, Mapping[str, Curve]],
    path: Path,
    *,
    note: str = "",
    x_label: str = "step",
    y_labels: Sequence[str] | str = "",
    logarithmic: bool = False,
) -> None:
    """Writes a PNG with a panel for each title, and in it a curve for each label."""
    if isinstance(y_labels, str):
        y_labels = [y_labels] * len(panels)
    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.4), squeeze=False)
        of_panels = zip(axes[0], panels.items(), y_labels, strict=True)
        for panel, (title, curves), y_label in of_panels:
            for label, curve in curves.items():
                # Points where there are few of them, or a curve of one would not be seen.
                panel.plot(*zip(*curve, strict=True), "o-" if len(curve) < 20 else "-", label=label)
            panel.set(title=title, xlabel=x_label, ylabel=y_label)
            if logarithmic:
                panel.set_xscale("log", base=2)
                panel.set_yscale("log")
                lengths = sorted({x for curve in curves.values() for x, _ in curve})
                panel.set_xticks(lengths, [f"{x:,}" for x in lengths])
                panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.grid(color="#e4e4e4", linewidth=0.8)
            # Below the axes, where it covers no curve.
            panel.legend(
                frameon=False, ncols=len(curves), loc="upper center", bbox_to_anchor=(0.5, -0.16),
                fontsize=9, columnspacing=1.0, handlelength=1.4,
            )
        figure.text(0.5, 0.01, note, ha="center", fontsize=9, color="#555555")
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        plt.close(figure)
    command.told(path)


def save(model: nnx.Module, folder: Path) -> None:
    """Writes what the model has learned to a folder, over what an earlier run left there."""
    state = nnx.to_pure_dict(nnx.state(model, LEARNED))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), state, force=True)


def load(model: nnx.Module, folder: Path) -> None:
    """Fills a model, built as the saved one was, with what that one had learned."""
    state = nnx.state(model, LEARNED)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder.absolute(), nnx.to_pure_dict(state))
    # Committed to no device, as what was built is not: else every program is compiled once more.
    restored = jax.tree.map(jnp.asarray, jax.device_get(restored))
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(model, state)
