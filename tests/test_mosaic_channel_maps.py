"""Gates per step and channel beside feature maps other than elu + 1, forward and backward as the
backend runs them, interpreted beside float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest
import test_linear_channel as channel
from test_linear_mosaic import PLAIN, against_the_reference, draw, options_of

from ato_jax.ops.linear_attention import mosaic_gpu
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"


def call(
    T: int, H: int, D: int, V: int, gates: Any, options: dict[str, Any], zeros: bool = False
) -> numerics.Oracle:
    layout = options.get("layout", "bthd")
    decay = channel.draw_gates(gates, 1, T, H, D)
    decay = decay if layout == "bthd" else jnp.swapaxes(decay, 1, 2)
    q, k, v = draw(1, T, H, H, layout, D=max(D, V))
    q, k, v = q[..., :D], k[..., :D], v[..., :V]
    if zeros:
        q, k = q.at[..., 1::3].set(0), k.at[..., ::3].set(0)
    return numerics.oracle(OP, q, k, v, causal=True, decay=decay, **options)


@newest
@pytest.mark.parametrize(
    "T, H, D, V, feature_map, options",
    [
        (200, 1, 128, 128, "identity", options_of(1, 1, "bthd", True) | PLAIN),
        (136, 2, 64, 64, jnp.tanh, {"layout": "bhtd"} | PLAIN),
        (72, 2, 32, 48, "softplus", {}),
        (128, 1, 144, 160, "exp", options_of(1, 1, "bhtd", True, 144, 160)),
    ],
)
def test_passes(T: int, H: int, D: int, V: int, feature_map: Any, options: dict[str, Any]) -> None:
    """Some queries and keys are 0, where the slope of a map with phi(0) = 0 is 1; of two pieces,
    the last one in part; of heads that fill a tile in part, and of one that is cut, where XLA pads
    the last block."""
    options = options | {"feature_map": feature_map}
    options |= {"return_state": False} if T % mosaic_gpu.frame.C else {}
    wanted = call(T, H, D, V, "mild", options, zeros=True)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
def test_features_of_either_sign_where_little_is_lost() -> None:
    """The output is a sum over many rows, in which each further rounding counts."""
    wanted = call(328, 1, 128, 128, -1e-3, PLAIN | {"feature_map": "identity"})
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
def test_steep_chunks() -> None:
    """Its outputs are added up over turns, and the gradients are another backend's."""
    wanted = call(128, 2, 64, 64, "steep", PLAIN | {"feature_map": "silu"})
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


def test_what_is_refused() -> None:
    """Where keys of heads that are cut are padded, a map that has no name may not be 0 there."""
    spec = call(128, 1, 160, 160, "none", {"feature_map": jnp.cos}).request.spec
    for phase in ("forward", "backward"):
        assert mosaic_gpu.unsupported(spec, phase) is None
        narrower = dataclasses.replace(spec, D=144, F=144)
        assert "to be a multiple of 32" in (mosaic_gpu.unsupported(narrower, phase) or "")
