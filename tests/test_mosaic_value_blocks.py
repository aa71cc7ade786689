"""Causal heads whose values are cut into blocks of 128 columns, by Hopper's kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, PLAIN, against_the_reference, options_of

from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

MAMBA = PLAIN | {"feature_map": "identity"}


def draw(
    T: int, H: int, G: int, D: int, V: int, layout: str, decay: str | None, B: int = 1
) -> tuple[list[jax.Array], dict[str, Any]]:
    """q, k and v; and the decay, steep in some chunks."""

    def in_layout(x: jax.Array) -> jax.Array:
        return x if layout == "bthd" else jnp.swapaxes(x, 1, 2)

    shapes = (B, T, H, D), (B, T, G, D), (B, T, G, V)
    arrays = [
        in_layout(channel.draw(*shape, dtype="bfloat16", seed=seed))
        for seed, shape in enumerate(shapes)
    ]
    options: dict[str, Any] = {"layout": layout, "causal": True}
    if decay == "head":
        options["decay"] = -0.1 - 0.2 * jnp.arange(G)
    elif decay:
        gates = channel.draw_gates("mild", B, T, G)
        if decay == "steep":
            gates = gates.at[:, jnp.array([40, T - 2])].set(-50.0)
        options["decay"] = in_layout(gates)
    return arrays, options


@newest
@pytest.mark.parametrize(
    "T, H, G, D, V, layout, decay, options",
    [
        (128, 2, 2, 128, 256, "bthd", "mild", MAMBA),
        (128, 2, 1, 128, 256, "bhtd", "mild", {}),
        (200, 1, 1, 128, 192, "bthd", "steep", {}),
        (131, 1, 1, 128, 160, "bhtd", "steep", MAMBA),
        (128, 2, 2, 64, 256, "bthd", "head", {}),
        (72, 1, 1, 96, 256, "bhtd", None, options_of(1, 1, "bhtd", True, 96, 256)),
        (128, 1, 1, 128, 256, "bthd", "mild", MAMBA | options_of(1, 1, "bthd", True, 128, 256)),
    ],
)
def test_gradients(
    T: int, H: int, G: int, D: int, V: int, layout: str, decay: str | None, options: Any
) -> None:
    """Of one or two pieces; some chunks in part, some rows of no whole tile, and a second block
    that is filled in part."""
    arrays, given = draw(T, H, G, D, V, layout, decay)
    wanted = numerics.oracle(OP, *arrays, **given | options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "T, H, G, D, V, layout, decay, options",
    [
        (72, 2, 1, 64, 144, "bthd", None, {"feature_map": "relu"}),
        (128, 1, 1, 128, 256, "bhtd", "mild", {}),
        (131, 1, 1, 128, 192, "bthd", "mild", MAMBA),
        (72, 1, 1, 96, 256, "bthd", None, PLAIN | options_of(2, 1, "bthd", True, 96, 256)),
    ],
)
def test_float16(
    T: int, H: int, G: int, D: int, V: int, layout: str, decay: str | None, options: Any
) -> None:
    """Two sequences whose keys differ by a factor of 64, so that they have powers of their own."""
    arrays, given = draw(T, H, G, D, V, layout, decay, B=2)
    q, k, v = (x.astype(jnp.float16) for x in arrays)
    arrays = [q, k * jnp.array([2.0**-6, 1.0], k.dtype)[:, None, None, None], v]
    wanted = numerics.oracle(OP, *arrays, **given | options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize("decay", ["mild", None])
def test_lengths_and_segments(decay: str | None) -> None:
    arrays, options = draw(128, 1, 1, 128, 192, "bthd", decay)
    ids = (jnp.arange(128) >= 50).astype(jnp.int32)[None]
    options |= {"segment_ids": ids, "kv_lengths": jnp.array([111], jnp.int32)}
    wanted = numerics.oracle(OP, *arrays, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)
