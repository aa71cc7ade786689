"""Causal float32 on Hopper, by products of bfloat16 parts: interpreted beside float64."""

from __future__ import annotations

from typing import Any

import pytest
from test_linear_mosaic import options_of
from test_mosaic_float32 import OP, draw
from test_mosaic_maps import bumpy
from test_mosaic_maps_whole import against_the_reference

from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


@newest
@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize(
    "D, T, H, G, scale, options",
    [
        (128, 328, 1, 1, 1.0, {}),
        (64, 192, 2, 1, 0.01, {"layout": "bhtd"}),
        (64, 136, 2, 2, 1.0, {"normalize": False} | options_of(1, 2, "bthd", True, 64)),
        (64, 136, 2, 1, 1.0, {"feature_map": bumpy} | options_of(1, 1, "bthd", True, 64)),
        (64, 136, 1, 1, 10.0, {"feature_map": "silu", "normalize": False}),
        (64, 72, 1, 1, 1e-5, {"feature_map": "relu"}),
    ],
)
def test_causal(
    D: int, T: int, H: int, G: int, scale: float, options: dict[str, Any], precision: str | None
) -> None:
    """In more than one run, the last of them in part. With TF32 and D = 128 a run has two units,
    of which one sees the rows of the other. Features of 1e-5 leave denominators below eps, which
    have no gradient."""
    arrays = draw(1, T, T, H, G, D, options.get("layout", "bthd"), scale)
    options = {"causal": True, "precision": precision} | options
    against_the_reference(numerics.oracle(OP, *arrays, **options))


@newest
@pytest.mark.parametrize("D, V", [(80, 80), (96, 128), (128, 64), (64, 128)])
def test_columns_that_fill_a_tile_in_part(D: int, V: int) -> None:
    """With a map that is 0.7 where TMA fills zeros."""
    arrays = draw(1, 136, 136, 1, 1, D, V=V)
    against_the_reference(numerics.oracle(OP, *arrays, feature_map="softplus", causal=True))
