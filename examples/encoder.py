"""A bidirectional encoder with softmax and with linear attention, side by side, on two tasks.

    x = embed(inputs) + positions, then blocks of attention and MLP        class = head(mean of x)

The models differ in their attention alone: they have equally many parameters, start from the same
values and see the same batches.

- Digits: the 1,797 images of 8 x 8 pixels that come with scikit-learn, each read as a sequence of
  its 64 pixels. A fifth of them is held out.
- Marked: T random symbols, two of them marked, generated; the class is the sum of these two. A
  mark may be anywhere in its half, so that both have to be found among all T, and the rest has to
  be ignored: the longer the sequence, the fainter they are at first.

Then each checkpoint is saved and loaded again, and the time of a training step is measured over
longer and longer sequences.

    python -m examples.encoder --small              a minute on two CPU cores
    python -m examples.encoder                      for a GPU
    python -m examples.encoder --length 2048        the T of the marked task
    python -m examples.encoder --speed              only the times of a training step

needs `pip install '.[examples]'` and writes pictures, the figures (JSON) and checkpoints to
--output.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

if not __package__:  # started by its path, from whatever folder
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import ato_jax.nn
from examples import command, training

LAYERS = {"softmax": ato_jax.nn.Attention, "linear": ato_jax.nn.LinearAttention}
SYMBOLS = 4  # of the marked task: two of them have 2 * SYMBOLS - 1 sums


@dataclasses.dataclass(frozen=True)
class Setting:
    features: int
    heads: int
    blocks: int
    batch_size: int
    digits_steps: int
    digits_learning_rate: float
    length: int  # T of the marked task
    marked_steps: int
    marked_learning_rate: float
    evaluations: int  # in the course of a training
    speed_lengths: tuple[int, ...]
    speed_batch_size: int
    speed_steps: int


SMALL = Setting(
    features=32,
    heads=4,
    blocks=1,
    batch_size=32,
    digits_steps=90,
    digits_learning_rate=1e-2,
    length=64,
    marked_steps=160,
    marked_learning_rate=1e-2,
    evaluations=4,
    speed_lengths=(256, 512),
    speed_batch_size=4,
    speed_steps=3,
)
FULL = Setting(
    features=128,
    heads=4,
    blocks=2,
    batch_size=64,
    digits_steps=1200,
    digits_learning_rate=2e-3,
    length=1024,
    marked_steps=3000,
    marked_learning_rate=2e-3,
    evaluations=10,
    speed_lengths=(256, 512, 1024, 2048, 4096, 8192, 16384),
    speed_batch_size=8,
    speed_steps=10,
)


class Batch(NamedTuple):
    inputs: np.ndarray  # [B, T, in_features]
    labels: np.ndarray  # [B]


class Task(NamedTuple):
    name: str
    batches: Callable[[], Iterator[Batch]]  # endless; the same ones at each call
    held_out: Batch
    classes: int
    positions: int | None  # None where the order tells nothing about the class
    steps: int
    evaluations: int
    learning_rate: float


class Block(nnx.Module):
    def __init__(self, attention: Any, setting: Setting, rngs: nnx.Rngs) -> None:
        features = setting.features
        self.attention_norm = nnx.LayerNorm(features, rngs=rngs)
        self.attention = attention(
            num_heads=setting.heads, in_features=features, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(features, rngs=rngs)
        self.widen = nnx.Linear(features, 4 * features, rngs=rngs)
        self.narrow = nnx.Linear(4 * features, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.narrow(nnx.gelu(self.widen(self.mlp_norm(x))))


class Encoder(nnx.Module):
    """inputs [B, T, in_features] -> logits [B, classes], for the sequences of a task.

    `attention` is the class of the layers: any that is built like nnx.MultiHeadAttention.
    """

    def __init__(self, attention: Any, task: Task, setting: Setting, rngs: nnx.Rngs) -> None:
        features = setting.features
        self.embed = nnx.Linear(task.held_out.inputs.shape[-1], features, rngs=rngs)
        self.positions = nnx.data(None)
        if task.positions is not None:
            table = 0.02 * jax.random.normal(rngs.params(), (task.positions, features))
            self.positions = nnx.Param(table)
        self.blocks = nnx.List([Block(attention, setting, rngs) for _ in range(setting.blocks)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, task.classes, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = self.embed(inputs)
        if self.positions is not None:
            x = x + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(axis=1)))


def digits(setting: Setting, seed: int) -> Task:
    images, labels = load_digits(return_X_y=True)
    inputs = (images[:, :, None] / 16).astype(np.float32)  # [1797, 64, 1], from 0 to 1
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out, kept = np.split(order, [len(order) // 5])

    def batches() -> Iterator[Batch]:
        random = np.random.default_rng(seed)
        while True:
            chosen = random.choice(kept, setting.batch_size)
            yield Batch(inputs[chosen], labels[chosen])

    return Task(
        "digits",
        batches,
        Batch(inputs[held_out], labels[held_out]),
        classes=10,
        positions=inputs.shape[1],
        steps=setting.digits_steps,
        evaluations=setting.evaluations,
        learning_rate=setting.digits_learning_rate,
    )


def draw_marked(random: np.random.Generator, B: int, T: int) -> Batch:
    """Symbols as one-hot vectors with one more feature, 1 at a position in each half, else 0."""
    symbols = random.integers(SYMBOLS, size=(B, T))
    marked = random.integers([0, T // 2], [T // 2, T], size=(B, 2))
    inputs = np.zeros((B, T, SYMBOLS + 1), np.float32)
    np.put_along_axis(inputs, symbols[:, :, None], 1, axis=2)
    np.put_along_axis(inputs[:, :, SYMBOLS], marked, 1, axis=1)
    return Batch(inputs, np.take_along_axis(symbols, marked, axis=1).sum(axis=1))


def marked_sum(length: int, batch_size: int, setting: Setting, seed: int) -> Task:
    def batches() -> Iterator[Batch]:
        random = np.random.default_rng(seed)
        while True:
            yield draw_marked(random, batch_size, length)

    return Task(
        "marked",
        batches,
        # From another stream, or what is held out would be what is trained on.
        draw_marked(np.random.default_rng([seed, 1]), 256, length),
        classes=2 * SYMBOLS - 1,
        positions=None,
        steps=setting.marked_steps,
        evaluations=setting.evaluations,
        learning_rate=setting.marked_learning_rate,
    )


def loss_function(model: Encoder, batch: Batch) -> tuple[jax.Array, training.Metrics]:
    """Cross entropy in nats and the share of right answers."""
    logits = model(batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch.labels).mean()}


# One for all models, so that equal ones are not compiled again.
measure = nnx.jit(loss_function)
logits = nnx.jit(Encoder.__call__)


def fit(
    model: Encoder, task: Task, batches: Iterator[Batch], steps: int, label: str
) -> training.History:
    """Trains on the batches, and measures on what the task holds out."""

    def evaluate(model: Encoder) -> training.Metrics:
        loss, metrics = measure(model, task.held_out)
        return {"held-out loss": float(loss), "held-out accuracy": float(metrics["accuracy"])}

    return training.train(
        model,
        batches,
        loss_function,
        steps=steps,
        learning_rate=task.learning_rate,
        evaluate=evaluate,
        evaluations=task.evaluations,
        label=f"{task.name}, {label}",
    )


def reloaded_alike(model: Encoder, fresh: Encoder, folder: Path, inputs: np.ndarray) -> bool:
    """Saves the model, loads that into a fresh one, and tells whether both say the same."""
    training.save(model, folder)
    training.load(fresh, folder)
    fresh.eval()  # as training leaves the model: so both are one program
    return bool((logits(model, inputs) == logits(fresh, inputs)).all())


def compare(task: Task, setting: Setting, output: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Trains with each of the layers; the figures by layer."""
    histories, figures = {}, {}
    for name, layer in LAYERS.items():
        model = Encoder(layer, task, setting, nnx.Rngs(seed))
        histories[name] = history = fit(model, task, task.batches(), task.steps, name)
        fresh = Encoder(layer, task, setting, nnx.Rngs(seed + 1))
        folder = output / "checkpoints" / f"{task.name}_{name}"
        figures[name] = {
            "parameters": training.count_parameters(model),
            "first_loss": history.first("held-out loss"),
            "loss": history.last("held-out loss"),
            "accuracy": history.last("held-out accuracy"),
            "milliseconds_per_step": 1000 * history.seconds_per_step,
            "reloaded_alike": reloaded_alike(model, fresh, folder, task.held_out.inputs[:8]),
        }
    width = max(1, task.steps // 20)
    training.plot(
        {
            f"{task.name}: loss, training": {
                name: training.smoothed(history.curves["loss"], width)
                for name, history in histories.items()
            },
            f"{task.name}: accuracy, held out": {
                name: history.curves["held-out accuracy"] for name, history in histories.items()
            },
        },
        output / f"encoder_{task.name}.png",
        note=f"loss: mean of {width} steps; B = {setting.batch_size}, "
        f"T = {task.held_out.inputs.shape[1]}, {describe(setting)}",
        y_labels=("nats", "share of right answers"),
    )
    return figures


def measure_speed(setting: Setting, output: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Milliseconds for a training step on the marked task, by layer and length."""
    curves: dict[str, training.Curve] = {name: [] for name in LAYERS}
    for length, (name, layer) in itertools.product(setting.speed_lengths, LAYERS.items()):
        task = marked_sum(length, setting.speed_batch_size, setting, seed)
        history = training.train(
            Encoder(layer, task, setting, nnx.Rngs(seed)),
            # One batch again and again, as to draw one takes time, too.
            itertools.repeat(next(task.batches())),
            loss_function,
            steps=setting.speed_steps,
            learning_rate=task.learning_rate,
            label=f"{name}, T = {length}",
        )
        curves[name].append((length, 1000 * history.seconds_per_step))
    training.plot(
        {f"a training step, B = {setting.speed_batch_size}": curves},
        output / "encoder_speed.png",
        note=describe(setting),
        x_label="tokens T",
        y_labels="milliseconds",
        logarithmic=True,
    )
    return {name: {f"T={T}": time for T, time in curve} for name, curve in curves.items()}


def describe(setting: Setting) -> str:
    return (
        f"blocks: {setting.blocks}, features: {setting.features}, heads: {setting.heads}, float32; "
        f"{jax.devices()[0].device_kind}"
    )


def report(title: str, figures: dict[str, dict[str, Any]]) -> None:
    width = max(map(len, [title, *figures]))
    columns = list(next(iter(figures.values())))
    print("\n" + "  ".join([title.ljust(width), *columns]))
    for name, row in figures.items():
        cells = [f"{cell:.3f}" if isinstance(cell, float) else f"{cell}" for cell in row.values()]
        print("  ".join([name.ljust(width), *map(str.rjust, cells, map(len, columns))]))


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    parser = training.argument_parser(__doc__, output="encoder_output")
    parser.add_argument("--length", type=int, help="T of the marked task")
    parser.add_argument("--speed", action="store_true", help="only the times of a training step")
    options = parser.parse_args(arguments)
    setting = SMALL if options.small else FULL
    if options.length is not None:
        setting = dataclasses.replace(setting, length=options.length)
    print(describe(setting))
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    if not options.speed:
        tasks = (
            digits(setting, options.seed),
            marked_sum(setting.length, setting.batch_size, setting, options.seed),
        )
        for task in tasks:
            figures[task.name] = compare(task, setting, options.output, options.seed)
    figures["milliseconds"] = measure_speed(setting, options.output, options.seed)
    for title, rows in figures.items():
        report(title, rows)
    written = {"setting": dataclasses.asdict(setting), "figures": figures}
    name = "encoder_speed.json" if options.speed else "encoder.json"
    written_to = command.told(options.output / name)
    written_to.write_text(json.dumps(written, indent=2) + "\n")
    if not options.speed:
        command.told(options.output / "checkpoints")
    return figures


if __name__ == "__main__":
    main()
