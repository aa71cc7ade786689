"""The first hour: every main call once, with what it returns.

Linear attention both ways and causal, its state and one decoding step; exact softmax attention with
a window; gradients under jit; packed documents; a Flax layer; what would run on this machine.

    python -m examples.01_basics            seconds on a CPU; writes no file

needs `pip install '.[flax]'`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

if not __package__:  # started by its path, from whatever folder
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import ato_jax
import ato_jax.nn
from examples import command

B, T, H, G, D = 2, 256, 8, 2, 64


def draw() -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, T, H, D]; k and v [B, T, G, D]."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, T, H, D), (B, T, G, D), (B, T, G, D)
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return q, k, v


def difference(one: jax.Array, other: jax.Array) -> float:
    return float(jnp.abs(one - other).max())


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """The largest differences between calls that should agree."""
    command.parser(__doc__).parse_args(arguments)
    q, k, v = draw()
    found = {}

    out = ato_jax.linear_attention(q, k, v)
    print(f"linear attention, every query sees every key: {out.shape}")

    whole = ato_jax.linear_attention(q, k, v, causal=True)
    half = T // 2
    first, state = ato_jax.linear_attention(
        q[:, :half], k[:, :half], v[:, :half], causal=True, return_state=True
    )
    second = ato_jax.linear_attention(
        q[:, half:], k[:, half:], v[:, half:], causal=True, initial_state=state
    )
    found["two halves"] = difference(jnp.concatenate([first, second], axis=1), whole)
    print(f"causal in two halves, joined by a state: {found['two halves']:.1e} off")

    token, _ = ato_jax.linear_attention_step(q[:, half], k[:, half], v[:, half], state)
    found["one step"] = difference(token, whole[:, half])
    print(f"the next token by one step from that state: {found['one step']:.1e} off")

    exact = ato_jax.attention(q, k, v, causal=True)
    theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    found["softmax"] = difference(exact, theirs)
    print(f"softmax attention beside jax.nn.dot_product_attention: {found['softmax']:.1e} off")
    window = ato_jax.attention(q, k, v, causal=True, window=(127, 0))
    print(f"softmax attention, each query sees its own key and 127 before it: {window.shape}")

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ato_jax.linear_attention(q, k, v, causal=True).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    print(f"gradients of q, k and v under jit: {[gradient.shape for gradient in gradients]}")

    segment_ids = jnp.repeat(jnp.arange(2), half)[None].repeat(B, axis=0)  # [B, T]
    packed = ato_jax.linear_attention(q, k, v, causal=True, segment_ids=segment_ids)
    alone = ato_jax.linear_attention(q[:, half:], k[:, half:], v[:, half:], causal=True)
    found["packed"] = difference(packed[:, half:], alone)
    print(f"two documents packed in a row, the second beside itself alone: {found['packed']:.1e}")

    layer = ato_jax.nn.LinearAttention(
        num_heads=H, in_features=H * D, decode=False, rngs=nnx.Rngs(0)
    )
    print(f"a Flax layer where nnx.MultiHeadAttention stood: {layer(q.reshape(B, T, H * D)).shape}")

    print("\nWhat runs here, and why:")
    print(ato_jax.explain(ato_jax.linear_attention, q, k, v, causal=True))
    return found


if __name__ == "__main__":
    main()
