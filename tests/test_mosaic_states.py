"""What rounding leaves off beside a state, in the causal Hopper kernels' gradients. Those kernels
alone are interpreted that the figure depends on; the others are replaced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, options_of

import ato_jax
from ato_jax import launch
from ato_jax.ops.linear_attention.mosaic_gpu import causal, frame
from ato_jax.ops.linear_attention.scans import gates
from ato_jax.ops.linear_attention.spec import Inputs, Outputs, Residuals
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

ONE_PIECE = frame.Config(blocks=3, pieces=1)


@pytest.fixture(autouse=True)
def passes_by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between these kernels."""
    monkeypatch.setattr(launch, "no_triton", "is hidden")


def draw(T: int, H: int, seed: int, D: int = 128) -> list[jax.Array]:
    shapes = [(1, T, heads, D) for heads in (H, 1, 1)]
    return [
        channel.draw(*shape, dtype="bfloat16", seed=seed + number)
        for number, shape in enumerate(shapes)
    ]


def gradients(wanted: numerics.Oracle, cotangents: Outputs) -> Inputs:
    spec, inputs = wanted.request.spec, wanted.request.inputs
    if inputs.decay is not None:
        inputs = inputs._replace(decay=gates.of_steps(spec, inputs.decay))
    residuals = Residuals(inputs, cotangents)  # no kernel reads outputs
    with ato_jax.interpret():
        found: Inputs = jax.jit(causal.backward, static_argnums=(0, 1))(
            spec, ONE_PIECE, residuals, cotangents, None
        )
    return found


@newest
@pytest.mark.parametrize("gated", [False, True])
def test_the_gradient_of_k_sum(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over queries that cancels here: 5e-3 of it is what g_i . v_j loses when rounded."""
    monkeypatch.setattr(causal, "key_gradient", lambda spec, deal, own: (own.k, own.v, None))
    options: dict[str, Any] = {"initial_state": options_of(1, 1, "bthd", True)["initial_state"]}
    if gated:
        options["decay"] = -0.2 * jnp.abs(channel.draw(1, 64, 1, seed=5))
    wanted = numerics.oracle(OP, *draw(64, 2, seed=2), causal=True, **options)
    found = gradients(wanted, wanted.outputs_cotangents).initial_state
    assert found is not None
    for name, array in (("dstate_k_sum", found.k_sum), ("dstate_kv", found.kv)):
        numerics.check(name, array, wanted.exact[name], dtype="bfloat16")


@newest
def test_dv_beside_the_cotangent_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is far above what chunks add to R: rounded ahead of them, 4.4e-3 of dv are lost."""
    q, k, v = draw(192, 1, seed=0)
    request = numerics.prepare(OP, q, k, v, causal=True, return_state=True)[0]
    cotangents = numerics.draw_cotangents(OP, request)
    cotangents = cotangents._replace(state=jax.tree.map(lambda x: 0.3 * x, cotangents.state))
    wanted = numerics.oracle(OP, q, k, v, cotangents=cotangents, causal=True, return_state=True)

    phi_q, phi_k = (np.asarray(jax.nn.elu(x.astype(jnp.float32)) + 1)[0, :, 0] for x in (q, k))
    inverse = 1 / np.sum(phi_q * np.cumsum(phi_k, axis=0), axis=1)
    e = np.sum(wanted.exact["out"] * np.asarray(cotangents.out, np.float64), axis=3)[0, :, 0]
    rows = [jnp.asarray(of_row, jnp.float32)[None, None] for of_row in (inverse, e)]
    monkeypatch.setattr(causal, "query_gradient", lambda *_: (q, *rows, None, None))
    found = gradients(wanted, cotangents)
    for name, array in (("dv", found.v), ("dk", found.k)):
        numerics.check(name, array, wanted.exact[name], dtype="bfloat16")
