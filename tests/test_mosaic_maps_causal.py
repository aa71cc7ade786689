"""Whole causal passes of any feature map, interpreted beside float64: forward and backward as the
backend runs them, which does not choose them for these maps yet."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_linear_channel as channel
from test_linear_mosaic import (  # noqa: F401
    PLAIN,
    SMALL,
    against_the_reference,
    draw,
    newest,
    no_races,
    options_of,
)

from tests import numerics

OP = "linear_attention"


def offset(x: jax.Array) -> jax.Array:
    """Of which 0, as rows and columns that are not there are read, is far from 0; of both signs;
    and of primitives that Mosaic GPU does not lower."""
    return jax.nn.elu(x) + jnp.sqrt(1 + x * x) - 2.5


def peaked(x: jax.Array) -> jax.Array:
    """Largest at 0."""
    return 4 / (1 + x * x)


# Whole passes take five kernels, which are interpreted in turn: as few rows as have two pieces.
@newest
@pytest.mark.parametrize(
    "D, H, T, feature_map, gates, options",
    [
        (128, 1, 136, "silu", None, PLAIN),
        (96, 1, 136, peaked, None, {"layout": "bhtd"}),
        (64, 2, 200, "exp", None, options_of(1, 2, "bthd", True, 64) | {"return_state": False}),
        (128, 1, 192, "identity", "mixed", options_of(1, 1, "bthd", True) | PLAIN),
        (64, 2, 136, offset, "mild", PLAIN | {"layout": "bhtd"}),
        (96, 1, 136, offset, (-0.02,), PLAIN),
        (80, 1, 136, peaked, "mixed", {}),
    ],
)
def test_causal_passes(
    D: int, H: int, T: int, feature_map: Any, gates: Any, options: dict[str, Any]
) -> None:
    """In two pieces, the last chunk in part but where states are returned; two heads in a tile, and
    columns that a head does not have; with steep chunks, and a decay per head."""
    options = options | {"feature_map": feature_map}
    if isinstance(gates, tuple):
        options["decay"] = jnp.array(gates * H, jnp.float32)
    elif gates is not None:
        decay = channel.draw_gates(gates, 1, T, H)
        options["decay"] = decay if options.get("layout") != "bhtd" else jnp.swapaxes(decay, 1, 2)
    layout = options.get("layout", "bthd")
    wanted = numerics.oracle(OP, *draw(1, T, H, H, layout, D=D), causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)
