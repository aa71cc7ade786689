"""Whole causal passes with feature maps other than elu + 1, forward and backward as the backend
runs them, interpreted beside float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_linear_channel as channel
from test_linear_mosaic import PLAIN, against_the_reference, draw, options_of

from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"


def peaked(x: jax.Array) -> jax.Array:
    """Largest at 0, as which rows and columns that are not there are read."""
    return 4 / (jax.nn.relu(x) + jnp.sqrt(1 + x * x))


# Whole passes take five kernels, which are interpreted in turn: few rows, and few cases.
@newest
@pytest.mark.parametrize(
    "D, H, T, feature_map, gates, options",
    [
        (128, 1, 136, "silu", None, PLAIN),
        (64, 2, 136, "exp", None, options_of(1, 2, "bthd", True, 64) | {"return_state": False}),
        (96, 1, 136, peaked, "mild", {"layout": "bhtd"}),
        (128, 1, 128, "identity", "mixed", options_of(1, 1, "bthd", True) | PLAIN),
    ],
)
def test_causal_passes(
    D: int, H: int, T: int, feature_map: Any, gates: str | None, options: dict[str, Any]
) -> None:
    """In two pieces, the last chunk in part but where a state is returned; two heads in a tile, and
    columns that a head does not have; with a steep chunk."""
    layout = options.get("layout", "bthd")
    options = options | {"feature_map": feature_map}
    if gates is not None:
        decay = channel.draw_gates(gates, 1, T, H)
        options["decay"] = decay if layout == "bthd" else jnp.swapaxes(decay, 1, 2)
    wanted = numerics.oracle(OP, *draw(1, T, H, H, layout, D=D), causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "D, T, decay, options",
    [
        (64, 320, (-0.4, -1.0), {}),
        (64, 136, (-0.3, -4.0), options_of(1, 2, "bthd", True, 64) | {"return_state": False}),
    ],
)
def test_a_decay_per_head_and_features_of_either_sign(
    D: int, T: int, decay: tuple[float, ...], options: dict[str, Any]
) -> None:
    """Its gradient is a sum over all steps, in which what rounding the states leaves off would add
    up. In two pieces; a steep head beside one that is not."""
    H = len(decay)
    options = options | PLAIN | {"feature_map": "identity", "decay": jnp.array(decay)}
    wanted = numerics.oracle(OP, *draw(1, T, H, H, D=D), causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)
