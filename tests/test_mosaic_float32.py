"""Float32 on Hopper where every query sees every key, by products of bfloat16 parts: interpreted
beside float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import options_of
from test_mosaic_maps import bumpy
from test_mosaic_maps_whole import against_the_reference

from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"


def draw(
    B: int,
    T: int,
    S: int,
    H: int,
    G: int,
    D: int,
    layout: str = "bthd",
    scale: float = 1.0,
    V: int | None = None,
) -> list[Any]:
    sizes = (T, H, D), (S, G, D), (S, G, V or D)
    shapes = ((B, *size) for size in sizes)
    drawn = [
        channel.draw(*shape, dtype="float32", seed=seed) * (scale if seed < 2 else 1.0)
        for seed, shape in enumerate(shapes)
    ]
    return drawn if layout == "bthd" else [jnp.swapaxes(array, 1, 2) for array in drawn]


@newest
@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize(
    "D, T, S, H, G, scale, options",
    [
        (128, 456, 456, 1, 1, 1.0, {}),
        (64, 200, 72, 2, 1, 0.01, {"layout": "bhtd"}),
        (64, 72, 136, 2, 2, 1.0, {"normalize": False} | options_of(1, 2, "bthd", True, 64)),
        (64, 136, 72, 1, 1, 1.0, {"feature_map": bumpy} | options_of(1, 1, "bthd", True, 64)),
        (64, 72, 72, 1, 1, 10.0, {"feature_map": "silu", "normalize": False}),
    ],
)
def test_every_query_sees_every_key(
    D: int,
    T: int,
    S: int,
    H: int,
    G: int,
    scale: float,
    options: dict[str, Any],
    precision: str | None,
) -> None:
    """In two pieces, the last of them in part: rows beyond the end are read as zeros, whose
    features need not be zero. With 4 chunks of a piece each slot is filled twice."""
    arrays = draw(1, T, S, H, G, D, options.get("layout", "bthd"), scale)
    against_the_reference(numerics.oracle(OP, *arrays, precision=precision, **options))


@newest
@pytest.mark.parametrize("D, V", [(80, 80), (96, 128)])
def test_columns_that_fill_a_tile_in_part(D: int, V: int) -> None:
    """With a map that is 0.7 where TMA fills zeros."""
    arrays = draw(1, 72, 72, 1, 1, D, V=V)
    against_the_reference(numerics.oracle(OP, *arrays, feature_map="softplus"))


@newest
@pytest.mark.parametrize("normalize", [True, False])
def test_lengths(normalize: bool) -> None:
    """NaN in padding reaches no sum."""
    q, k, v = draw(2, 136, 136, 1, 1, 64)
    lengths = {"q_lengths": jnp.array([70, 136]), "kv_lengths": jnp.array([128, 3])}
    behind = np.arange(136) >= np.array([[128], [3]])
    k, v = (jnp.where(behind[:, :, None, None], jnp.nan, x) for x in (k, v))
    q = q.at[0, 70:].set(jnp.nan)
    against_the_reference(numerics.oracle(OP, q, k, v, normalize=normalize, **lengths))
