"""Feature maps of Hopper's kernels, and which maps these evaluate. The output's kernel and that of
dk and dv are interpreted by themselves beside float64, with a length, too."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel

import ato_jax
from ato_jax import mosaic
from ato_jax.mosaic import F32
from ato_jax.ops.linear_attention import decay as decay_limits
from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.mosaic_gpu import (
    feature_maps,
    frame,
    key_gradient,
    narrow,
    output,
)
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_storage import Arrays
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

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
    "D, feature_map, T, length, decay, normalize",
    [
        (128, "silu", 136, 136, None, False),
        (96, bumpy, 192, 192, "mild", True),
        (128, "exp", 128, 128, "steep", True),
        (128, "elu1", 192, 100, "mild", True),
    ],
)
def test_any_feature_map_and_length(
    D: int, feature_map: Any, T: int, length: int, decay: str | None, normalize: bool
) -> None:
    """In two pieces, the last of them in part; with columns that a head does not have; with a steep
    chunk; and with rows beyond the length, which hold NaN."""
    q, k, v = (channel.draw(1, length, 1, D, dtype="bfloat16", seed=seed) for seed in range(3))
    options: dict[str, Any] = {"feature_map": feature_map, "normalize": normalize}
    log2_decays = np.zeros(T)
    if decay is not None:
        decays = np.full((1, length, 1), -0.02, np.float32)
        if decay == "steep":
            decays[:, 70:74] = -20.0
        options["decay"] = jnp.asarray(decays)
        log2_decays[:length] = decays[0, :, 0].astype(np.float64) * frame.LOG2_E
    wanted = numerics.oracle(OP, q, k, v, causal=True, **options)
    exact = exact_of(wanted, log2_decays[:length])
    spec = narrow.in_tiles(dataclasses.replace(wanted.request.spec, T=T, S=T))
    pieces = -(-T // ROWS)
    deal = mosaic.Deal(1, 1, T, ROWS, pieces, 2)
    starts = [min(length, piece * ROWS) for piece in range(pieces + 1)]
    whole = mosaic.whole_chunks(T)

    def of_rows(x: np.ndarray) -> jax.Array:
        return jnp.asarray(np.pad(x, (0, whole - len(x))), jnp.float32)[None, None]

    def stacked(states: list[Any]) -> Any:
        for kind, dtype in zip(zip(*states, strict=True), (jnp.bfloat16, F32), strict=True):
            array = np.stack(kind)
            wide = [(0, 0)] + [(0, frame.F - D)] * (array.ndim - 1)
            yield jnp.asarray(np.pad(array, wide), F32).astype(dtype)[None, None]

    gates = steep = None
    if decay is not None:
        of_chunks = np.pad(log2_decays, (0, whole - T)).reshape(-1, frame.C).cumsum(1)
        gates = of_rows(of_chunks.reshape(-1))
        middle, last = of_chunks[:, frame.C // 2 - 1], of_chunks[:, -1]
        is_steep = np.minimum(middle, last - middle) < -decay_limits.MOST_LOST_OF_CHUNK
        assert is_steep.any() == (decay == "steep")
        is_steep = np.pad(is_steep, (0, pieces * 2 - is_steep.size)).reshape(pieces, 2)
        steep = jnp.asarray(is_steep.any(1), jnp.int32)[None, None]
    lengths = None if length == T else jnp.array([length], jnp.int32)
    ahead = stacked([exact.ahead(row) for row in starts[:-1]])
    behind = stacked([exact.behind(row) for row in starts[1:]])

    @jax.jit
    def call(q: Any, k: Any, v: Any, g: Any) -> Any:
        options = {"gates": gates, "steep": steep, "lengths": lengths}
        out, _ = output.output(spec, deal, q, k, v, *ahead, **options)
        rows = of_rows(exact.inverse), of_rows(exact.e)
        arrays = Arrays(q, k, v, g, *rows, *behind, gates, steep, lengths)
        dk, dv, _ = key_gradient.key_gradient(spec, deal, arrays)
        return {"out": out, "dk": dk, "dv": dv}

    beyond = [(0, 0), (0, T - length), (0, 0), (0, 0)]
    inputs = q, k, v, wanted.outputs_cotangents.out
    with ato_jax.interpret():
        found = call(*(jnp.pad(x, beyond, constant_values=jnp.nan) for x in inputs))
    for name, array in found.items():
        assert not jnp.any(array[:, length:]), name  # NaN, too, is not 0
        numerics.check(
            name,
            array[:, :length],
            wanted.exact[name],
            dtype="bfloat16",
            terms=wanted.terms.get(name) if name == "dk" else None,
            ideal=wanted.ideal[name],
        )


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


@jax.custom_vjp
def backward_alone(x: jax.Array) -> jax.Array:
    return 2 * x


backward_alone.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@jax.custom_jvp
def without_slope(x: jax.Array) -> jax.Array:
    return 2 * x


@without_slope.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise ValueError("no slope today")


TEMPERATURE = jnp.float32(2)


@pytest.mark.parametrize(
    "feature_map, reason",
    [
        (bumpy, None),
        (jax.nn.gelu, None),
        (lambda x: 1 / (1 + x**2), None),
        (lambda x: jnp.where(x > 0, x, 0), None),
        (lambda x: jax.nn.gelu(x, approximate=False), "calls erfc"),
        (lambda x: jnp.abs(x) ** 1.5, "calls pow"),
        (lambda x: x * TEMPERATURE, "closes over arrays"),
        (lambda x: 1.0, "is a constant"),
        (backward_alone, "custom_vjp"),
        (without_slope, "no slope today"),
        (lambda x: x * jnp.log(x), "not finite at 0"),
        (lambda x: 1 / x, "not finite at 0"),
        (jnp.sqrt, "not finite at 0"),  # its derivative
        (features.favor(jax.random.key(0), 16, 8), "elementwise"),
    ],
)
def test_what_kernels_evaluate(feature_map: Any, reason: str | None) -> None:
    resolved, *_ = features.resolve(feature_map, 8)
    feature_maps.unsupported.cache_clear()
    with jax.debug_nans(True), jax.debug_infs(True):
        found = feature_maps.unsupported(resolved)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("name", sorted(features.NAMED))
def test_named_maps_are_evaluated(name: str) -> None:
    with jax.enable_x64(True):
        assert feature_maps.unsupported(features.NAMED[name]) is None
