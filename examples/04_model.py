"""A whole model in a hundred lines: a character language model with linear attention.

    x = x + attention(norm(x))        x = x + mlp(norm(x))        for each of two layers

It learns the text of this repository's licence for some steps, and then continues a prompt: the
prompt at once, then token by token from the layers' caches, which have one size however long the
text becomes. `--attention` puts another layer in the same place.

    python -m examples.04_model                             less than a minute on two CPU cores
    python -m examples.04_model --attention Attention       the same with exact softmax attention

needs `pip install '.[examples]'` and writes no file. examples/char_lm.py compares the layers at
larger sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

if not __package__:  # started by its path, from whatever folder
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import ato_jax.nn
from examples import command

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("LinearAttention", "GatedLinearAttention", "Attention")
FEATURES, HEADS, DEPTH, VOCABULARY = 64, 4, 2, 128
B, T = 16, 64
PROMPT = "subject to the terms and "


class Block(nnx.Module):
    def __init__(self, attention: type, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(FEATURES, rngs=rngs) for _ in range(2)])
        self.attention = attention(
            num_heads=HEADS, in_features=FEATURES, causal=True, decode=False, rngs=rngs
        )
        self.widen = nnx.Linear(FEATURES, 4 * FEATURES, rngs=rngs)
        self.narrow = nnx.Linear(4 * FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array, decode: bool = False) -> jax.Array:
        x = x + self.attention(self.norms[0](x), decode=decode)
        return x + self.narrow(nnx.gelu(self.widen(self.norms[1](x))))


class Model(nnx.Module):
    """tokens [B, T] -> logits [B, T, VOCABULARY]"""

    def __init__(self, attention: type, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
        self.blocks = nnx.List([Block(attention, rngs) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.head = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array, decode: bool = False) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, decode)
        return self.head(self.norm(x))


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """One step of training on tokens [B, T + 1]; the loss in nats a character."""

    def loss_function(model: Model) -> jax.Array:
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, gradients = nnx.value_and_grad(loss_function)(model)
    optimizer.update(model, gradients)
    return loss


def generate(model: Model, prompt: str, length: int) -> str:
    """The prompt and its most likely continuation."""
    tokens = jnp.asarray([list(prompt.encode())])  # [1, T]
    for block in model.blocks:
        block.attention.init_cache((1, len(prompt) + length, FEATURES))
    extend = nnx.jit(lambda model, tokens: model(tokens, decode=True)[:, -1:].argmax(axis=-1))
    text = prompt
    for _ in range(length):
        tokens = extend(model, tokens)  # the whole prompt first, then [1, 1]
        text += chr(int(tokens[0, 0]))
    return text


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """The loss at the first step and at the last ten."""
    parser = command.parser(__doc__)
    parser.add_argument("--attention", choices=LAYERS, default=LAYERS[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be 1 or more, got {options.steps}")
    text = np.frombuffer((ROOT / "LICENSE").read_bytes(), np.uint8).clip(max=VOCABULARY - 1)
    model = Model(getattr(ato_jax.nn, options.attention), nnx.Rngs(options.seed))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    random, losses = np.random.default_rng(options.seed), []
    for number in range(options.steps):
        starts = random.integers(len(text) - T, size=B)
        losses.append(
            float(step(model, optimizer, jnp.asarray(text[starts[:, None] + np.arange(T + 1)])))
        )
        if number % 50 == 0 or number == options.steps - 1:
            print(f"step {number + 1:>4}: {losses[-1]:.2f} nats a character")
    print(f"\n{generate(model, PROMPT, 40)}")
    return losses[0], float(np.mean(losses[-10:]))


if __name__ == "__main__":
    main()
