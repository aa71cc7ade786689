"""A trained softmax model gets linear attention: what is lost, and what comes back.

An encoder with Flax's own nnx.MultiHeadAttention learns to read scikit-learn's digits, as sequences
of 64 pixels. Then `ato_jax.nn.replace_attention` puts another layer around the projections that it
has learned, and the same parameters are used in three ways:

    softmax      nnx.MultiHeadAttention, as it was
    linear       LinearAttention with its default, phi(x) = elu(x) + 1
    linear_exp   LinearAttention with phi(x) = exp(x)
    performer    Performer: random features, whose weights estimate the softmax's

Each is evaluated on the held-out images, and trained further, by the same batches for the same
number of steps: the softmax model, too, as it may not have been at its best yet.

    python -m examples.swap_attention --small       less than a minute on two CPU cores
    python -m examples.swap_attention               for a GPU

needs `pip install '.[examples]'` and writes a picture, the figures (JSON) and checkpoints to
--output.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax import nnx

if not __package__:  # started by its path, from whatever folder
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import ato_jax.nn
from examples import command, encoder, training
from examples.encoder import Encoder, Setting

# Classes and what they are built with. Performer gets more random features than by default: the
# model has not learned to live with a coarse estimate.
LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "softmax": (nnx.MultiHeadAttention, {}),
    "linear": (ato_jax.nn.LinearAttention, {}),
    "linear_exp": (ato_jax.nn.LinearAttention, {"feature_map": "exp"}),
    "performer": (ato_jax.nn.Performer, {"num_features": 256}),
}
SMALL = encoder.SMALL
FULL = dataclasses.replace(encoder.FULL, blocks=4)


def parameters_by_path(model: nnx.Module) -> dict[Any, nnx.Param]:
    return {
        path: leaf
        for path, leaf in nnx.iter_graph(model, graph=True)
        if isinstance(leaf, nnx.Param)
    }


def swap(model: Encoder, layer: Any, options: dict[str, Any], seed: int) -> bool:
    """Replaces the attention in place; whether the parameters are the same objects after as before.

    `rngs` is for Performer, which draws its features; LinearAttention has nothing to draw.
    """
    before = parameters_by_path(model)
    ato_jax.nn.replace_attention(model, layer, rngs=nnx.Rngs(seed), **options)
    after = parameters_by_path(model)
    return before.keys() == after.keys() and all(after[path] is before[path] for path in before)


def shifted(curve: training.Curve, steps: int) -> training.Curve:
    return [(step + steps, value) for step, value in curve]


def compare(setting: Setting, output: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Trains with softmax, swaps, trains further; the figures by layer."""
    task = encoder.digits(setting, seed)
    checkpoints = output / "checkpoints"

    def build(layer: Any, seed: int) -> Encoder:
        return Encoder(layer, task, setting, nnx.Rngs(seed))

    model = build(nnx.MultiHeadAttention, seed)
    pretraining = encoder.fit(model, task, task.batches(), task.steps, "before the swap")
    training.save(model, checkpoints / "before")
    trained = {
        name: pretraining.last(f"held-out {name}")  # the softmax model's, where the others start
        for name in ("loss", "accuracy")
    }

    # What is known already is only adjusted: half as many steps, a smaller learning rate.
    steps = task.steps // 2
    further = task._replace(learning_rate=task.learning_rate / 2)
    histories, figures = {"before": pretraining.curves}, {}
    for name, (layer, options) in LAYERS.items():
        model = build(nnx.MultiHeadAttention, seed + 1)
        training.load(model, checkpoints / "before")
        shared = layer is nnx.MultiHeadAttention or swap(model, layer, options, seed)
        history = encoder.fit(
            model, further, itertools.islice(task.batches(), task.steps, None), steps, name
        )
        fresh = build(functools.partial(layer, **options), seed + 2)
        inputs = task.held_out.inputs[:8]
        figures[name] = {
            "parameters_shared": shared,
            "accuracy_before": trained["accuracy"],
            "accuracy_swapped": history.first("held-out accuracy"),
            "accuracy_tuned": history.last("held-out accuracy"),
            "loss_before": trained["loss"],
            "loss_swapped": history.first("held-out loss"),
            "loss_tuned": history.last("held-out loss"),
            "reloaded_alike": encoder.reloaded_alike(model, fresh, checkpoints / name, inputs),
        }
        histories[name] = {
            metric: shifted(curve, task.steps) for metric, curve in history.curves.items()
        }
    training.plot(
        {
            f"digits: {metric}": {name: curves[metric] for name, curves in histories.items()}
            for metric in ("held-out loss", "held-out accuracy")
        },
        output / "swap_attention.png",
        y_labels=("nats", "share of right answers"),
        note=f"swapped at step {task.steps}; B = {setting.batch_size}, {encoder.describe(setting)}",
    )
    return figures


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    options = training.argument_parser(__doc__, output="swap_attention_output").parse_args(
        arguments
    )
    setting = SMALL if options.small else FULL
    print(encoder.describe(setting))
    figures = compare(setting, options.output, options.seed)
    encoder.report("digits", figures)
    written = {"setting": dataclasses.asdict(setting), "figures": figures}
    written_to = command.told(options.output / "swap_attention.json")
    written_to.write_text(json.dumps(written, indent=2) + "\n")
    command.told(options.output / "checkpoints")
    return figures


if __name__ == "__main__":
    main()
