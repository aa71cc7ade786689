"""Causal kernels for Hopper in float16, interpreted beside the float64 reference: sums
and weights beyond float16's range, and far below."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_linear_channel as channel
from test_linear_mosaic import (  # noqa: F401
    OP,
    SMALL,
    against_the_reference,
    newest,
    no_races,
)

import ato_jax
from ato_jax.ops.linear_attention import mosaic_gpu
from ato_jax.ops.linear_attention.mosaic_gpu import causal, frame
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient import query_gradient
from ato_jax.ops.linear_attention.spec import Inputs
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
def test_output(D: int, H: int, scale: float, options: dict[str, Any]) -> None:
    against_the_reference("mosaic_gpu", "xla", oracle_of(D, H, scale, options))


@newest
@CALLS
def test_gradient_of_queries(D: int, H: int, scale: float, options: dict[str, Any]) -> None:
    wanted = oracle_of(D, H, scale, options)
    spec, inputs = mosaic_gpu._in_tiles(wanted.request.spec, wanted.request.inputs)
    config = frame.Config(**SMALL)

    @jax.jit
    def call(inputs: Inputs, g: jax.Array) -> jax.Array:
        kept = causal.keep(spec, config, inputs)
        arrays = inputs.q, inputs.k, inputs.v, g, kept.s, kept.z
        deal = causal._deal(spec, config)
        return query_gradient(spec, deal, *arrays, None, None, s_units=kept.units)[0]

    with ato_jax.interpret():
        found = call(inputs, wanted.outputs_cotangents.out)
    facts = {"dtype": "float16", "ideal": wanted.ideal["dq"], "terms": wanted.terms.get("dq")}
    numerics.check("dq", found, wanted.exact["dq"], **facts)
