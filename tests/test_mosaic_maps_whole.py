"""Feature maps other than elu + 1 where every query sees every key, and of heads of 192 columns:
interpreted beside float64. The backend's functions are called directly, since the gradients are to
be made of what the forward keeps for its own backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import SMALL, draw, options_of
from test_mosaic_maps import bumpy

import ato_jax
from ato_jax.ops.linear_attention import api, mosaic_gpu
from ato_jax.ops.linear_attention.scans import totals
from ato_jax.ops.linear_attention.spec import Residuals
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"


def against_the_reference(wanted: numerics.Oracle) -> None:
    """The gradients are made of what the forward kept for them."""
    request = wanted.request
    config = dataclasses.replace(mosaic_gpu.default_config(request.spec, channel.GPU), **SMALL)

    @jax.jit
    def call(inputs: Any, cotangents: Any) -> Any:
        kept = mosaic_gpu.forward_for_own_backward(request.spec, config, inputs)
        residuals = Residuals(inputs, kept)
        return kept.plain(), mosaic_gpu.backward(request.spec, config, residuals, cotangents)

    with ato_jax.interpret():
        outputs, gradients = call(request.inputs, wanted.outputs_cotangents)
    found = numerics.users_outputs(OP, request, outputs)
    numerics.compare(found | numerics.users_gradients(wanted.arrays, gradients), wanted)


@newest
@pytest.mark.parametrize(
    "D, T, S, H, scale, feature_map, options",
    [
        (128, 72, 136, 2, 0.1, "silu", {"layout": "bhtd"}),
        (96, 72, 64, 1, 1.0, bumpy, options_of(1, 1, "bhtd", True, 96) | {"normalize": True}),
        (128, 72, 64, 1, 1.0, "identity", {"normalize": True, "eps": 50.0}),
        (192, 72, 64, 1, 1.0, bumpy, {"normalize": True}),
    ],
)
def test_every_query_sees_every_key(
    D: int, T: int, S: int, H: int, scale: float, feature_map: Any, options: dict[str, Any]
) -> None:
    """In two pieces, the last of them in part: rows beyond the end are read as zeros, whose
    features need not be zero, nor are those of columns that a head does not have. Also where
    features cancel, or a denominator is negative."""
    q, k, v = draw(1, T, H, 1, options.get("layout", "bthd"), S=S, D=D)
    wanted = numerics.oracle(OP, q * scale, k * scale, v, feature_map=feature_map, **options)
    against_the_reference(wanted)


@newest
@pytest.mark.parametrize("feature_map, T", [("exp", 136), ("silu", 72)])
def test_wide_heads_up_to_each_query(feature_map: str, T: int) -> None:
    wanted = numerics.oracle(OP, *draw(1, T, 1, 1, D=192), causal=True, feature_map=feature_map)
    against_the_reference(wanted)


def test_units_of_sums_that_cancel() -> None:
    """k_sum in units of itself, where kv in these would not be finite; and eps, whose inverse is
    multiplied by features of 0."""
    options: dict[str, Any] = {"normalize": True, "eps": 1e-30, "feature_map": "identity"}
    spec = api.prepare(*draw(1, 64, 1, 1), **options).spec
    for size in (2.0**-126, 2.0**30):
        k_sum = jnp.zeros((1, 1, 1, 128)).at[..., 3].set(-size)
        pieces = jnp.full((1, 1, 1, 128, 128), 1e3), k_sum
        with ato_jax.interpret():
            found = totals.add_up(spec, pieces, unit_of=k_sum[:, :, 0], returned=False)
        by_xla = totals._add_up_by_xla(spec, pieces, None, k_sum[:, :, 0], False)
        for name in ("read", "k_sum", "least"):
            own, other = (np.asarray(getattr(one, name), np.float32) for one in (found, by_xla))
            np.testing.assert_allclose(own, other, rtol=1e-6)
            assert np.isfinite(own).all(), name
        assert (1 / np.asarray(found.least) < np.inf).all()
