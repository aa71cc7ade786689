"""A character language model with softmax, linear, gated, delta-rule and mixed attention.

    x = x + attention(shift(norm(x)))        x = x + mlp(norm(x))        and that for every layer

The models differ in their attention alone, and have equally many parameters: a block has
12 * features^2 of them, and what its attention leaves goes to the MLP, whose width it decides (to
within half a column). "delta" is gated DeltaNet, and "hybrid" is gated linear attention with every
`softmax_every`-th layer softmax. `shift` mixes each token with the one before it, channel by
channel, which linear attention cannot do for itself.

Each is trained twice, from nothing:

- on text, the sources of Python's standard library in the order of their names. Every tenth file
  is for validation;
- on multi-query associative recall (MQAR, Arora et al., 2023), generated: pairs of a key and its
  value, then all the keys in another order, each to be answered by its value. A softmax layer sees
  all pairs; a linear one has to hold them in a state of one size.

Then its checkpoint is saved and loaded again, and it continues a text with its cache: the prompt
at once, then token by token.

    python -m examples.char_lm --small      about a minute on two CPU cores
    python -m examples.char_lm              for a GPU
    python -m examples.char_lm --speed      only training tokens/s, over longer and longer texts
    python -m examples.char_lm --speed --mesh data=1,context=4
                                            likewise, a million tokens over four GPUs
    python -m examples.char_lm --small --mesh data=2,context=4
                                            only training on text, on a mesh of devices, which a
                                            CPU simulates: sharding.py says what the axes do

needs `pip install '.[examples]'` and writes a picture, the figures (JSON) and checkpoints to
--output.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

if not __package__:  # started by its path, from whatever folder
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import ato_jax.nn
from examples import command, sharding, training
from examples.texts import UNCOUNTED, Batch, recall_batches, standard_library, text_batches

KINDS = ("softmax", "linear", "gated", "delta", "hybrid")
SPEED_KINDS = ("softmax", "linear", "gated", "delta")
MESH_SPEED_KINDS = ("linear", "gated", "delta")  # softmax of a million tokens takes long
CHARACTERS = 128  # ASCII; the little that is not in it is left out
PROMPT = "def __init__(self, "


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    layers: int
    features: int
    heads: int
    softmax_every: int  # in "hybrid"
    dtype: str  # of activations; parameters are float32
    batch_size: int
    tokens: int  # T of a text
    characters: int
    pairs: int  # of recall; its T is 4 * pairs
    symbols: int  # as many keys, and as many values
    steps: int  # of each task
    evaluation_batches: int
    learning_rate: float
    generated: int
    speed_tokens: tuple[int, ...]
    speed_batch_tokens: int  # B * T
    speed_steps: int
    mesh_tokens: int  # of each device, of its part of a text

    @property
    def vocabulary(self) -> int:
        """Of both tasks, so that the models for both are the same."""
        return max(CHARACTERS, 2 * self.symbols)


SMALL = Setting(
    name="small",
    layers=2,
    features=64,
    heads=2,
    softmax_every=2,
    dtype="float32",
    batch_size=16,
    tokens=32,
    characters=300_000,
    pairs=8,
    symbols=16,
    steps=160,
    evaluation_batches=4,
    learning_rate=1.5e-2,
    generated=40,
    speed_tokens=(256, 512),
    speed_batch_tokens=512,
    speed_steps=3,
    mesh_tokens=64,
)
FULL = Setting(
    name="full",
    layers=8,
    features=512,
    heads=8,
    softmax_every=4,
    dtype="bfloat16",
    batch_size=32,
    tokens=1024,
    characters=20_000_000,
    pairs=32,
    symbols=128,
    steps=1500,
    evaluation_batches=8,
    learning_rate=1e-3,
    generated=400,
    speed_tokens=(8192, 32768),
    speed_batch_tokens=65536,
    speed_steps=30,
    mesh_tokens=262144,
)


def build_attention(
    kind: str, setting: Setting, rngs: nnx.Rngs, context_axis: str | None = None
) -> nnx.MultiHeadAttention | ato_jax.nn.GatedDeltaNet:
    """One causal layer; rotary positions where no gate tells what is how far away."""
    options: dict[str, Any] = {
        "num_heads": setting.heads,
        "in_features": setting.features,
        "decode": False,
        "dtype": jnp.dtype(setting.dtype),
        "context_axis": context_axis,
        "rngs": rngs,
    }
    if kind == "delta":  # causal and without biases by itself
        return ato_jax.nn.GatedDeltaNet(**options)
    options |= {"causal": True, "use_bias": False}
    if kind == "softmax":
        return ato_jax.nn.Attention(rope_theta=10_000.0, **options)
    if kind == "linear":
        return ato_jax.nn.LinearAttention(rope_theta=10_000.0, **options)
    return ato_jax.nn.GatedLinearAttention(
        gate="scalar",
        feature_map="elu1",
        # A long memory to begin with: sigmoid(4)^(1/16) keeps half of the state for 600 tokens.
        gate_bias_init=nnx.initializers.constant(4.0),
        **options,
    )


class Shift(nnx.Module):
    """y_t = m * x_t + (1 - m) * x_{t-1}, with a learned m [features] that starts from 0 to 1."""

    def __init__(self, features: int, dtype: Any, context_axis: str | None = None) -> None:
        self.mix = nnx.Param(jnp.linspace(0.0, 1.0, features))
        self.dtype = dtype
        self.context_axis = context_axis
        self.cached_token: nnx.Cache[jax.Array] | None = nnx.data(None)

    def __call__(self, x: jax.Array, *, decode: bool) -> jax.Array:
        before = self.cached_token[...] if decode else jnp.zeros_like(x[:, :1])  # [B, 1, features]
        if self.context_axis is not None:
            # The last token of the device before; the first device gets zeros.
            pairs = [(n, n + 1) for n in range(jax.lax.axis_size(self.context_axis) - 1)]
            before = jax.lax.ppermute(x[:, -1:], self.context_axis, pairs)
        shifted = jnp.concatenate([before, x[:, :-1]], axis=1)
        if decode:
            self.cached_token[...] = x[:, -1:]
        mix = self.mix[...].astype(self.dtype)
        return mix * x + (1 - mix) * shifted

    def init_cache(self, input_shape: Sequence[int]) -> None:
        batch, _, features = input_shape
        self.cached_token = nnx.Cache(jnp.zeros((batch, 1, features), self.dtype))


class Block(nnx.Module):
    def __init__(
        self, kind: str, setting: Setting, rngs: nnx.Rngs, context_axis: str | None = None
    ) -> None:
        features, dtype = setting.features, jnp.dtype(setting.dtype)
        self.attention_norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.shift = Shift(features, dtype, context_axis)
        self.attention = build_attention(kind, setting, rngs, context_axis)
        self.mlp_norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        left = 12 * features**2 - training.count_parameters(self.attention)
        width = round(left / (2 * features))
        self.widen = nnx.Linear(features, width, use_bias=False, dtype=dtype, rngs=rngs)
        self.narrow = nnx.Linear(width, features, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, *, decode: bool) -> jax.Array:
        x = x + self.attention(self.shift(self.attention_norm(x), decode=decode), decode=decode)
        return x + self.narrow(jax.nn.gelu(self.widen(self.mlp_norm(x))))


class LanguageModel(nnx.Module):
    """tokens [B, T] -> logits [B, T, vocabulary], float32, for the token after each.

    With a `context_axis` it is called inside `jax.shard_map`, which cuts T along that axis.
    """

    def __init__(
        self, kind: str, setting: Setting, rngs: nnx.Rngs, context_axis: str | None = None
    ) -> None:
        features, dtype = setting.features, jnp.dtype(setting.dtype)
        vocabulary = setting.vocabulary
        self.features, self.dtype = features, dtype
        self.embed = nnx.Embed(vocabulary, features, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [
                Block(layer_kind(kind, layer, setting), setting, rngs, context_axis)
                for layer in range(setting.layers)
            ]
        )
        self.norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(features, vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, *, decode: bool = False) -> jax.Array:
        # A product, not a lookup, whose gradient would add up many tokens' rows in the vocabulary's
        # few places one after the other: half of a training step on a GPU.
        one_hot = jax.nn.one_hot(tokens, self.embed.num_embeddings, dtype=self.dtype)
        x = one_hot @ self.embed.embedding[...].astype(self.dtype)
        for block in self.blocks:
            x = block(x, decode=decode)
        return self.head(self.norm(x)).astype(jnp.float32)

    def init_cache(self, batch_size: int, length: int) -> None:
        shape = (batch_size, length, self.features)
        for block in self.blocks:
            block.shift.init_cache(shape)
            block.attention.init_cache(shape, self.dtype)


def layer_kind(kind: str, layer: int, setting: Setting) -> str:
    if kind != "hybrid":
        return kind
    return "softmax" if (layer + 1) % setting.softmax_every == 0 else "gated"


def sums(model: LanguageModel, batch: Batch) -> tuple[jax.Array, ...]:
    """Cross entropy in nats, right answers and targets that count, summed over the tokens."""
    tokens, targets = batch
    logits = model(tokens)
    counted = targets != UNCOUNTED
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets, where=counted)
    right = (logits.argmax(-1) == targets) & counted
    return losses.sum(), right.sum(), counted.sum()


def means(sums: tuple[jax.Array, ...]) -> tuple[jax.Array, training.Metrics]:
    losses, right, counted = sums
    return losses / counted, {"accuracy": right / counted}


def loss_function(model: LanguageModel, batch: Batch) -> tuple[jax.Array, training.Metrics]:
    """Cross entropy in nats and the share of right answers, over the targets that count."""
    return means(sums(model, batch))


measure = nnx.jit(loss_function)


def evaluator(batches: Iterator[Batch], count: int) -> Callable[[LanguageModel], training.Metrics]:
    """Evaluates on the first `count` batches, the same each time."""
    kept = [next(batches) for _ in range(count)]

    def evaluate(model: LanguageModel) -> training.Metrics:
        results = [measure(model, batch) for batch in kept]
        return {
            "validation loss": float(np.mean([loss for loss, _ in results])),
            "validation accuracy": float(np.mean([metrics["accuracy"] for _, metrics in results])),
        }

    return evaluate


def generate(model: LanguageModel, prompt: str, length: int, seed: int) -> str:
    """Continues the prompt by `length` characters, sampled at a temperature of 0.7."""
    tokens = jnp.asarray(np.frombuffer(prompt.encode("ascii"), np.uint8)[None], jnp.int32)
    model.init_cache(1, tokens.shape[1] + length)

    @nnx.jit
    def extend(model: LanguageModel, tokens: jax.Array, key: jax.Array) -> jax.Array:
        logits = model(tokens, decode=True)[:, -1]
        return jax.random.categorical(key, logits / 0.7)[:, None]

    written = []
    for key in jax.random.split(jax.random.key(seed), length):
        tokens = extend(model, tokens, key)  # the whole prompt first, then [1, 1]
        written.append(tokens)
    return prompt + bytes(np.concatenate(written, axis=1)[0].tolist()).decode("ascii")


def compare(setting: Setting, output: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Trains every kind on both tasks; the figures by kind."""
    text, validation = standard_library(setting.characters)
    B, T = setting.batch_size, setting.tokens
    count = setting.evaluation_batches
    evaluate_text = evaluator(text_batches(validation, B, T, seed=1), count)
    recall = (B, setting.pairs, setting.symbols)
    evaluate_recall = evaluator(recall_batches(*recall, seed=1), count)
    print(f"{len(text):,} characters to train on, {len(validation):,} for validation")
    on_text, on_recall, figures = {}, {}, {}
    for kind in KINDS:
        model = LanguageModel(kind, setting, nnx.Rngs(seed))
        on_text[kind] = training.train(
            model,
            text_batches(text, B, T, seed),
            loss_function,
            steps=setting.steps,
            learning_rate=setting.learning_rate,
            evaluate=evaluate_text,
            label=f"{kind}, text",
        )
        learner = LanguageModel(kind, setting, nnx.Rngs(seed))
        on_recall[kind] = training.train(
            learner,
            recall_batches(*recall, seed=seed + 2),
            loss_function,
            steps=setting.steps,
            learning_rate=setting.learning_rate,
            evaluate=evaluate_recall,
            label=f"{kind}, recall",
        )
        checkpoint = output / "checkpoints" / kind
        training.save(model, checkpoint)
        reloaded = LanguageModel(kind, setting, nnx.Rngs(seed + 1))
        training.load(reloaded, checkpoint)
        reloaded.eval()
        figures[kind] = {
            "parameters": training.count_parameters(model),
            "first_validation_loss": on_text[kind].first("validation loss"),
            "validation_loss": on_text[kind].last("validation loss"),
            "training_tokens_per_second": round(B * T / on_text[kind].seconds_per_step),
            "recall_accuracy": on_recall[kind].last("validation accuracy"),
            "reloaded_alike": evaluate_text(reloaded) == evaluate_text(model),
            "text": generate(reloaded, PROMPT, setting.generated, seed),
        }
        write(output / "char_lm.json", setting, figures)
    # A mean over more steps would lag behind what rises at the very end of a run.
    width = max(1, setting.steps // 100)
    training.plot(
        {
            "loss on text, training": {
                kind: training.smoothed(history.curves["loss"], width)
                for kind, history in on_text.items()
            },
            "loss on text, validation": {
                kind: history.curves["validation loss"] for kind, history in on_text.items()
            },
            f"recall of {setting.pairs} pairs, training": {
                kind: training.smoothed(history.curves["accuracy"], width)
                for kind, history in on_recall.items()
            },
        },
        output / "char_lm.png",
        y_labels=("nats a character", "nats a character", "share of right answers"),
        note=f"{describe(setting)}; training: mean of {width} steps",
    )
    command.told(output / "checkpoints")
    return figures


def trained_on(
    mesh: Mesh, kind: str, setting: Setting, batches: Iterator[Batch], seed: int
) -> tuple[LanguageModel, training.History]:
    """A new model of that kind, trained on batches that are cut over the mesh."""
    context_axis = "context" if "context" in mesh.axis_names else None
    model = LanguageModel(kind, setting, nnx.Rngs(seed), context_axis)
    sharding.place(model, mesh)
    history = training.train(
        model,
        sharding.batches_on(mesh, batches),
        sharding.loss_on(mesh, sums, means),
        steps=setting.steps,
        learning_rate=setting.learning_rate,
        label=f"{kind}, {', '.join(f'{name} {size}' for name, size in mesh.shape.items())}",
    )
    return model, history


def train_on_mesh(
    setting: Setting, sizes: dict[str, int], output: Path, seed: int
) -> dict[str, dict[str, Any]]:
    """Trains every kind on text on a mesh; each checkpoint is evaluated on one device."""
    text, validation = standard_library(setting.characters)
    B, T = setting.batch_size, setting.tokens
    mesh = sharding.mesh_of(sizes)
    evaluate = evaluator(text_batches(validation, B, T, seed=1), setting.evaluation_batches)
    figures = {}
    for kind in KINDS:
        model, history = trained_on(mesh, kind, setting, text_batches(text, B, T, seed), seed)
        checkpoint = output / "checkpoints" / kind
        training.save(model, checkpoint)
        alone = LanguageModel(kind, setting, nnx.Rngs(seed + 1))
        training.load(alone, checkpoint)
        alone.eval()
        figures[kind] = {
            "first_loss": history.first("loss"),
            "last_loss": history.last("loss"),
            "validation_loss": evaluate(alone)["validation loss"],
        }
    return figures


def measure_speed_on_mesh(
    setting: Setting, sizes: dict[str, int], seed: int
) -> dict[str, dict[str, Any]]:
    """Training tokens per second by kind. Each device of a context axis has `mesh_tokens` tokens of
    a text, so the text is longer on more devices."""
    text, _ = standard_library(setting.characters)
    mesh = sharding.mesh_of(sizes)
    B, T = sizes["data"], setting.mesh_tokens * sizes.get("context", 1)
    setting = dataclasses.replace(setting, steps=setting.speed_steps)
    figures: dict[str, dict[str, Any]] = {}
    for kind in MESH_SPEED_KINDS:
        _, history = trained_on(mesh, kind, setting, text_batches(text, B, T, seed), seed)
        figures[kind] = {f"T={T}": round(B * T / history.seconds_per_step)}
    return figures


def measure_speed(setting: Setting, seed: int) -> dict[str, dict[str, Any]]:
    """Training tokens per second by kind and T; the tokens of a batch stay as many."""
    text, _ = standard_library(setting.characters)
    figures: dict[str, dict[str, Any]] = {}
    for kind in SPEED_KINDS:
        figures[kind] = {}
        for T in setting.speed_tokens:
            B = setting.speed_batch_tokens // T
            history = training.train(
                LanguageModel(kind, setting, nnx.Rngs(seed)),
                text_batches(text, B, T, seed),
                loss_function,
                steps=setting.speed_steps,
                learning_rate=setting.learning_rate,
                label=f"{kind}, T = {T}",
            )
            figures[kind][f"T={T}"] = round(B * T / history.seconds_per_step)
    return figures


def describe(setting: Setting) -> str:
    device = jax.devices()[0]
    return (
        f"{setting.name} setting: {setting.layers} layers of {setting.features} features, "
        f"{setting.heads} heads, {setting.dtype}, B = {setting.batch_size}, "
        f"T = {setting.tokens}, {setting.steps} steps; {device.device_kind}"
    )


def write(path: Path, setting: Setting, figures: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {"setting": describe(setting), "figures": figures}
    path.write_text(json.dumps(written, indent=2) + "\n")


# With a number's format, True would be printed as 1.
FORMATS = {float: ".3f", int: ",", bool: ""}


def report(figures: dict[str, dict[str, Any]]) -> None:
    columns = [name for name in next(iter(figures.values())) if name != "text"]
    print("  ".join(["kind   ", *columns]))
    for kind, row in figures.items():
        cells = [f"{row[name]:{FORMATS[type(row[name])]}}" for name in columns]
        print("  ".join([f"{kind:<7}", *map(str.rjust, cells, map(len, columns))]))
    for kind, row in figures.items():
        if "text" in row:
            print(f"\n--- {kind}\n{row['text']}")


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = training.argument_parser(__doc__, output="examples/output")
    parser.add_argument("--speed", action="store_true", help="only training tokens/s, long texts")
    parser.add_argument("--steps", type=int, help="of each task, instead of the setting's")
    parser.add_argument(
        "--mesh", type=sharding.sizes_of, help="only train on text, such as data=2,context=4"
    )
    options = parser.parse_args(arguments)
    setting = SMALL if options.small else FULL
    if options.steps:
        setting = dataclasses.replace(setting, steps=options.steps)
    name = "char_lm.json"
    if options.mesh:
        try:
            sharding.mesh_of(options.mesh)
        except ValueError as error:
            parser.error(f"--mesh: {error}")
    print(describe(setting))
    if options.mesh and options.speed:
        name = "char_lm_mesh_speed.json"
        figures = measure_speed_on_mesh(setting, options.mesh, options.seed)
        write(options.output / name, setting, figures)
    elif options.mesh:
        name = "char_lm_mesh.json"
        figures = train_on_mesh(setting, options.mesh, options.output, options.seed)
        write(options.output / name, setting, figures)
    elif options.speed:
        name = "char_lm_speed.json"
        figures = measure_speed(setting, options.seed)
        write(options.output / name, setting, figures)
    else:
        figures = compare(setting, options.output, options.seed)
    command.told(options.output / name)
    report(figures)
    return figures


if __name__ == "__main__":
    main()
