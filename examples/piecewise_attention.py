"""Piecewise attention: near keys are scored by one pair (q, k), far keys by another.

    s[i,j] = scale * q_near_i . k_near_j      where position(i) - j < threshold
             scale * q_far_i . k_far_j        elsewhere, both for j <= position(i)
    out_i  = softmax over j . v

as where rotary embeddings are extrapolated to contexts longer than those of the training. It is
two calls of `attention`, each over its own part of the keys, merged by `combine`: the near part is
a window, the far part is causal attention that ends `threshold` keys earlier. Neither forms
[T, S], each skips what the other sees, and the whole is differentiable.

    python -m examples.piecewise_attention      compares it with the definition; writes no file
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

if not __package__:  # started by its path, from whatever folder
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import ato_jax
from examples import command


def piecewise_attention(
    q_near: jax.Array,
    k_near: jax.Array,
    q_far: jax.Array,
    k_far: jax.Array,
    v: jax.Array,
    threshold: int,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """q_near, q_far [B, T, H, D]; k_near, k_far [B, S, G, D]; v [B, S, G, V] -> [B, T, H, V]."""
    T, S = q_near.shape[1], k_near.shape[1]
    near = ato_jax.attention(
        q_near,
        k_near,
        v,
        causal=True,
        window=(threshold - 1, None),
        return_lse=True,
        implementation=implementation,
    )
    far = ato_jax.attention(
        q_far,
        k_far,
        v,
        causal=True,
        query_offset=S - T - threshold,
        return_lse=True,
        implementation=implementation,
    )
    outs, lses = zip(near, far, strict=True)
    return ato_jax.combine(outs, lses)[0]


def definition(
    q_near: jax.Array,
    k_near: jax.Array,
    q_far: jax.Array,
    k_far: jax.Array,
    v: jax.Array,
    threshold: int,
) -> jax.Array:
    """The same from all T * S scores."""
    T, H, D = q_near.shape[1:]
    S, G = v.shape[1:3]

    def scores(q: jax.Array, k: jax.Array) -> jax.Array:
        k = jnp.repeat(k, H // G, axis=2)
        return D**-0.5 * jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")

    distance = jnp.arange(T)[:, None] + (S - T) - jnp.arange(S)
    s = jnp.where(distance < threshold, scores(q_near, k_near), scores(q_far, k_far))
    p = jax.nn.softmax(jnp.where(distance >= 0, s, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshv->bthv", p, jnp.repeat(v, H // G, axis=2), precision="highest")


def random_arrays(B: int, T: int, S: int, H: int, G: int, D: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(B, T, H, D), (B, S, G, D), (B, T, H, D), (B, S, G, D), (B, S, G, D)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    command.parser(__doc__).parse_args(arguments)
    arrays = random_arrays(2, 200, 300, 4, 2, 32)
    difference = piecewise_attention(*arrays, threshold=50) - definition(*arrays, threshold=50)
    print(f"largest difference from the definition: {jnp.abs(difference).max():.1e}")


if __name__ == "__main__":
    main()
