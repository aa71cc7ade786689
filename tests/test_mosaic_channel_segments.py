"""Gates per step and channel beside segments, forward and backward as the backend runs them,
interpreted beside float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import PLAIN, against_the_reference, draw, options_of

from ato_jax.ops.linear_attention.mosaic_gpu import channel as by_channel
from ato_jax.ops.linear_attention.scans import channel_flows
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"


def call(
    T: int, H: int, D: int, V: int, gates: Any, starts: tuple[int, ...], options: dict[str, Any]
) -> numerics.Oracle:
    """`starts`: the rows at which segments begin. The gates there are strong, and count as 0."""
    layout = options.get("layout", "bthd")
    decay = channel.draw_gates(gates, 1, T, H, D).at[:, jnp.array(starts)].set(-50.0)
    decay = decay if layout == "bthd" else jnp.swapaxes(decay, 1, 2)
    q, k, v = draw(1, T, H, H, layout, D=max(D, V))
    q, k, v = q[..., :D], k[..., :D], v[..., :V]
    ids = np.zeros((1, T), np.int32)
    for start in starts:
        ids[:, start:] += 1
    options = options | {"segment_ids": jnp.asarray(ids)}
    return numerics.oracle(OP, q, k, v, causal=True, decay=decay, **options)


def never_steep(least: jax.Array, *_: float) -> jax.Array:
    return jnp.ones(least.shape[:3], jnp.int32)


# A chunk has 64 rows and a piece two chunks or four; here a run of the gates' sums has two.
@newest
@pytest.mark.parametrize(
    "T, H, D, V, starts, options",
    [
        # Rows of their own, a border at a chunk's start, one at a piece's, chunks without one.
        (200, 1, 128, 128, (30, 31, 50, 64, 128, 190), {}),
        (256, 1, 128, 128, (70,), options_of(1, 1, "bthd", True)),
        (136, 2, 64, 64, (65, 70, 131), {"layout": "bhtd", "feature_map": "identity"} | PLAIN),
        (128, 1, 144, 160, (33, 100), options_of(1, 1, "bhtd", True, 144, 160)),
    ],
)
def test_passes(
    T: int,
    H: int,
    D: int,
    V: int,
    starts: tuple[int, ...],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_channel, "CHUNKS", 2)
    for module in (by_channel, channel_flows):
        monkeypatch.setattr(module, "RUN", 2 * by_channel.C)
    # The walks are right only if no chunk is steep, and are made in any case.
    monkeypatch.setattr(by_channel, "turns_of", never_steep)
    wanted = call(T, H, D, V, "mild", starts, options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "D, options", [(64, {}), (128, PLAIN | {"feature_map": "identity", "layout": "bhtd"})]
)
def test_steep_chunks(D: int, options: dict[str, Any]) -> None:
    """Borders within turns, at their edges, and in chunks that are taken at once beside them. The
    gradients are another backend's."""
    wanted = call(192, 128 // D, D, D, "steep", (1, 31, 50, 64, 100, 128, 190), options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)
