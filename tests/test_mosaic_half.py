"""Causal kernels for Hopper in float16, interpreted beside the float64 reference: sums
and weights beyond float16's range, and far below."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, against_the_reference
from test_mosaic_lengths import poisoned

from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


@newest
@pytest.mark.parametrize(
    "D, H, G, scale, options",
    [
        (128, 1, 1, 1.0, {}),
        (64, 2, 2, 30.0, {"layout": "bhtd"}),
        (128, 1, 1, 30.0, {"feature_map": "identity", "scale": 1e-4}),
        (96, 1, 1, 0.01, {"feature_map": "relu", "normalize": True, "kv_lengths": [60, 200]}),
        (128, 2, 1, 1.0, {"feature_map": "silu", "kv_lengths": [90, 200], "return_state": True}),
    ],
)
def test_output_and_gradients(
    D: int, H: int, G: int, scale: float, options: dict[str, Any]
) -> None:
    """In two pieces of two chunks, the last in part."""
    B = 2 if "kv_lengths" in options else 1
    arrays = [
        (channel.draw(B, 200, heads, D, dtype="float32", seed=seed) * scale).astype(jnp.float16)
        for seed, heads in enumerate((H, G, G))
    ]
    if options.get("layout") == "bhtd":
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    if "kv_lengths" in options:
        lengths = jnp.array(options["kv_lengths"], jnp.int32)
        options, arrays = options | {"kv_lengths": lengths}, poisoned(arrays, lengths, "bthd")
    wanted = numerics.oracle(OP, *arrays, causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)
