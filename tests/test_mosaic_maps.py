"""The kernels that are built on the kit with any feature map, interpreted beside float64: the
backend does not choose them for these yet, so they are called by themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import newest, no_races  # noqa: F401

import ato_jax
from ato_jax import mosaic
from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.mosaic_gpu import (
    feature_maps,
    frame,
    key_gradient,
    narrow,
    output,
)
from tests import numerics

OP = "linear_attention"
ROWS = 128  # of a piece


def bumpy(x: jax.Array) -> jax.Array:
    """Of primitives that Mosaic GPU does not lower, too, and with a rule of its own in `elu`."""
    return jax.nn.elu(x) + jnp.sqrt(1 + x * x) + 0.5


@dataclasses.dataclass(frozen=True)
class Exact:
    """One head in float64: phi, 2^(sums of decays), and what the other kernels hand over."""

    phi_q: np.ndarray
    phi_k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    since: np.ndarray  # [T + 1] the log2 decays' sums from the start on
    inverse: np.ndarray
    e: np.ndarray

    def ahead(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """S [V, F] and z [F] of the keys before a row, as that row's start sees them."""
        phi = self.phi_k[:row] * np.exp2(self.since[row] - self.since[1 : row + 1])[:, None]
        return self.v[:row].T @ phi, phi.sum(0)

    def behind(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """R [V, F] and u [F] of the queries from a row on, as the row before it sees them."""
        factors = self.inverse[row:] * np.exp2(self.since[row + 1 :] - self.since[row])
        phi = self.phi_q[row:] * factors[:, None]
        return self.g[row:].T @ phi, -(self.e[row:, None] * phi).sum(0)


def exact_of(wanted: numerics.Oracle, log2_decays: np.ndarray) -> Exact:
    spec, inputs = wanted.request.spec, wanted.request.inputs
    q, k, v, g, out = (
        np.asarray(array, np.float64)[0, :, 0]
        for array in (
            inputs.q,
            inputs.k,
            inputs.v,
            wanted.outputs_cotangents.out,
            wanted.exact["out"],
        )
    )
    with jax.enable_x64(True):
        phi_q, phi_k = (np.asarray(spec.feature_map(jnp.asarray(x))) for x in (q, k))
    since = np.concatenate([[0.0], np.cumsum(log2_decays)])
    inverse, e = np.full(spec.T, spec.scale), np.zeros(spec.T)
    if spec.normalize:
        pairs = np.tril(phi_q @ phi_k.T * np.exp2(np.tril(since[1:, None] - since[None, 1:])))
        inverse = 1 / np.maximum(pairs.sum(1), spec.eps)
        e = (g * out).sum(1)
    return Exact(phi_q, phi_k, v, g, since, inverse, e)


@newest
@pytest.mark.parametrize(
    "D, feature_map, T, decay, normalize",
    [
        (128, "silu", 136, None, False),
        (96, bumpy, 192, "mild", True),
        (128, "exp", 128, "steep", True),
    ],
)
def test_any_feature_map(
    D: int, feature_map: Any, T: int, decay: str | None, normalize: bool
) -> None:
    """In two pieces, the last of them in part; with columns that a head does not have; with a steep
    chunk."""
    q, k, v = (channel.draw(1, T, 1, D, dtype="bfloat16", seed=seed) for seed in range(3))
    options: dict[str, Any] = {"feature_map": feature_map, "normalize": normalize}
    log2_decays = np.zeros(T)
    if decay is not None:
        decays = np.full((1, T, 1), -0.02, np.float32)
        if decay == "steep":
            decays[:, 70:74] = -20.0
        options["decay"] = jnp.asarray(decays)
        log2_decays = decays[0, :, 0].astype(np.float64) * frame.LOG2_E
    wanted = numerics.oracle(OP, q, k, v, causal=True, **options)
    exact = exact_of(wanted, log2_decays)
    spec = narrow.in_tiles(wanted.request.spec)
    pieces = -(-T // ROWS)
    deal = mosaic.Deal(1, 1, T, ROWS, pieces, 2)
    ends = [min(T, (piece + 1) * ROWS) for piece in range(pieces)]

    def stacked(states: list[Any], dtypes: tuple[Any, Any] = (jnp.bfloat16, jnp.float32)) -> Any:
        for kind, dtype in zip(zip(*states, strict=True), dtypes, strict=True):
            array = np.stack(kind)
            wide = [(0, 0)] + [(0, frame.F - D)] * (array.ndim - 1)
            yield jnp.asarray(np.pad(array, wide), jnp.float32).astype(dtype)[None, None]

    length = mosaic.whole_chunks(T)
    inverse, e = (
        jnp.asarray(np.pad(x, (0, length - T)), jnp.float32)[None, None]
        for x in (exact.inverse, exact.e)
    )
    gates = steep = None
    if decay is not None:
        of_chunks = np.pad(log2_decays, (0, length - T)).reshape(-1, frame.C).cumsum(1)
        gates = jnp.asarray(of_chunks.reshape(1, 1, -1), jnp.float32)
        middle, last = of_chunks[:, frame.C // 2 - 1], of_chunks[:, -1]
        steep_chunks = np.minimum(middle, last - middle) < -frame.MOST_LOST
        assert steep_chunks.any() == (decay == "steep")
        steep_chunks = np.pad(steep_chunks, (0, pieces * 2 - steep_chunks.size))
        steep = jnp.asarray(steep_chunks.reshape(1, 1, pieces, 2).any(3), jnp.int32)
    ahead = stacked([exact.ahead(piece * ROWS) for piece in range(pieces)])
    behind = stacked([exact.behind(end) for end in ends])

    @jax.jit
    def call(q: Any, k: Any, v: Any, g: Any) -> Any:
        out = output.output(spec, deal, q, k, v, *ahead, gates, steep)
        arrays = q, k, v, g, inverse, e, *behind
        dk, dv, _ = key_gradient.key_gradient(spec, deal, *arrays, gates, steep)
        return {"out": out, "dk": dk, "dv": dv}

    with ato_jax.interpret():
        found = call(q, k, v, wanted.outputs_cotangents.out)
    for name, array in found.items():
        terms = wanted.terms.get(name) if name == "dk" else None
        ideal = wanted.ideal[name]
        numerics.check(name, array, wanted.exact[name], dtype="bfloat16", terms=terms, ideal=ideal)


@pytest.mark.parametrize("name", sorted(features.NAMED))
def test_maps_and_slopes(name: str) -> None:
    """Of what kernels make of them, over many orders of magnitude."""
    x = jnp.concatenate([sign * jnp.geomspace(1e-6, 60, 512) for sign in (-1, 1)])[None]
    phi = feature_maps.Traced(features.NAMED[name], 4096)
    with jax.enable_x64(True):
        exact_x = jnp.asarray(np.asarray(x, np.float64))
        wanted, slopes = jax.jvp(features.NAMED[name], (exact_x,), (jnp.ones_like(exact_x),))
    for found, of_map in ((phi.unrounded(x), wanted), (phi.slope(x), slopes)):
        np.testing.assert_allclose(found, np.asarray(of_map), rtol=2e-5, atol=1e-30)
