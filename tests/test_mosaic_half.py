"""Causal kernels for Hopper in float16, interpreted beside the float64 reference: sums
and weights beyond float16's range, and far below."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import test_linear_channel as channel
from test_linear_mosaic import (  # noqa: F401
    OP,
    against_the_reference,
    newest,
    no_races,
)

from tests import numerics

CALLS = pytest.mark.parametrize(
    "D, H, scale, options",
    [
        (128, 1, 1.0, {}),
        (64, 2, 30.0, {"layout": "bhtd"}),
        (128, 1, 30.0, {"feature_map": "identity", "scale": 1e-4}),
        (96, 1, 0.01, {"feature_map": "relu", "normalize": True}),
    ],
)


def oracle_of(D: int, H: int, scale: float, options: dict[str, Any]) -> numerics.Oracle:
    """For two pieces of two chunks, the last in part."""
    rows = (2, 200, H, D)
    q, k, v = (channel.draw(*rows, dtype="float32", seed=seed) * scale for seed in range(3))
    arrays = [x.astype(jnp.float16) for x in (q, k, v)]
    if options.get("layout") == "bhtd":
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    return numerics.oracle(OP, *arrays, causal=True, **options)


@newest
@CALLS
def test_output_and_gradients(D: int, H: int, scale: float, options: dict[str, Any]) -> None:
    against_the_reference("mosaic_gpu", "mosaic_gpu", oracle_of(D, H, scale, options))
