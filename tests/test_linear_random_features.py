"""FAVOR+'s features as arrays: the kernels that make them and pull gradients back, and attention
over them by Mosaic GPU's kernels, and by those that make no such arrays, beside float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_mosaic as hopper
from test_mosaic_maps_whole import against_the_reference

import ato_jax
from ato_jax import launch, mosaic
from ato_jax.ops.linear_attention import api, features, mosaic_gpu, random_features
from ato_jax.ops.linear_attention.mosaic_gpu import projected, projected_sums, projected_whole
from ato_jax.ops.linear_attention.spec import Residuals
from tests import aot, mosaic_text, numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"


def error(found: jax.Array, wanted: np.ndarray) -> float:
    difference = np.asarray(found, np.float64) - wanted
    return float(np.sqrt(np.mean(difference**2) / np.mean(wanted**2)))


# A scale of 6.25 makes |x| about 50 where D is 64.
@pytest.mark.parametrize("by_triton", [True, False])
@pytest.mark.parametrize("D, features, scale", [(64, 128, 1.0), (64, 128, 6.25), (24, 40, 2.0)])
def test_features(
    D: int, features: int, scale: float, by_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of rows in part, and a batch; rows of columns that fill no tile."""
    if not by_triton:
        monkeypatch.setattr(launch, "no_triton", "is hidden")
    w = ato_jax.favor(jax.random.key(0), features, D).projection
    x = (scale * jax.random.normal(jax.random.key(1), (2, 75, D))).astype(jnp.bfloat16)

    @jax.jit
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        with ato_jax.interpret():
            return random_features.features_of(x, w)

    phi = run(x, w)
    assert phi.dtype == jnp.bfloat16
    w64, scaled = np.asarray(w, np.float64), np.asarray(x, np.float64) * D**-0.25
    half = 0.5 * np.sum(scaled**2, -1, keepdims=True)
    wanted = np.exp(scaled @ w64.T - half) * features**-0.5
    # Few large features decide the sum of squares, each with a rounding of up to 4e-3.
    assert error(phi, wanted) < 4e-3
    # float32's least normal number is 1.2e-38: rows of 50 have features down to 1e-96.
    difference = np.abs(np.asarray(phi, np.float64) - wanted)
    assert np.max(difference / np.maximum(wanted, 2e-36)) < 6e-3


# 40 features are no whole block of those at once, 144 are three blocks.
@pytest.mark.parametrize("by_triton", [True, False])
@pytest.mark.parametrize("D, features", [(64, 128), (24, 40), (24, 144)])
def test_gradients(
    D: int, features: int, by_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of which all but 2^-6 cancels in the sum over a row."""
    if not by_triton:
        monkeypatch.setattr(launch, "no_triton", "is hidden")
    w = ato_jax.favor(jax.random.key(0), features, D).projection
    x = (2.5 * jax.random.normal(jax.random.key(1), (2, 75, D))).astype(jnp.bfloat16)
    d_a = jax.random.normal(jax.random.key(2), (2, 75, features))
    d_a -= (1 - 2**-6) * jnp.mean(d_a, axis=-1, keepdims=True)

    @jax.jit
    def run(x: jax.Array, w: jax.Array, d_a: jax.Array) -> tuple[jax.Array, jax.Array]:
        with ato_jax.interpret():
            d_x = random_features.gradient_of_rows(x, w, d_a)
            return d_x, random_features.gradient_of_projection(x, d_a)

    d_x, d_w = run(x, w, d_a)
    assert d_x.dtype == jnp.bfloat16 and d_w.dtype == jnp.float32
    w64, d_a64 = np.asarray(w, np.float64), np.asarray(d_a, np.float64)
    scaled = np.asarray(x, np.float64) * D**-0.25
    total = np.sum(d_a64, -1, keepdims=True)
    wanted = (d_a64 @ w64 - scaled * total) * D**-0.25
    # d_x is rounded to bfloat16 once. By products with one part of w or of d_a it is 2.3e-3.
    assert error(d_x, wanted) < 1.9e-3
    assert error(d_w, np.einsum("btm,btd->md", d_a64, scaled)) < 2e-6


def test_the_kernels_return_the_gradients_of_logarithms() -> None:
    x = jnp.linspace(0.5, 3, 7)
    found, pull = jax.vjp(random_features.OWN_SLOPE, x)
    np.testing.assert_array_equal(found, x)
    np.testing.assert_array_equal(pull(2 * x)[0], 2 * x * x)


@aot.requires_triton
@pytest.mark.parametrize("D, features", [(64, 128), (128, 256), (96, 112)])
def test_they_lower_for_a_card(D: int, features: int) -> None:
    x = jnp.ones((3, 500, D), jnp.bfloat16)
    w = jnp.ones((features, D))
    kernels = aot.triton_kernels(random_features.features_of, x, w, capability=90)
    assert [kernel.name for kernel in kernels] == ["random_features"]
    d_a = jnp.ones((3, 500, features))
    kernels = aot.triton_kernels(random_features.gradient_of_rows, x, w, d_a, capability=90)
    assert [kernel.name for kernel in kernels] == ["random_features_gradient"]


FAVOR = ato_jax.favor(jax.random.key(0), 128, 64)


@newest
@pytest.mark.parametrize(
    "V, causal, options",
    [
        (128, False, {}),
        (64, True, {}),
        (64, True, {"kv_lengths": jnp.array([130])}),
    ],
)
def test_attention_over_features(V: int, causal: bool, options: dict[str, Any]) -> None:
    q, k, _ = hopper.draw(1, 136, 1, 1, D=64)
    v = hopper.draw(1, 136, 1, 1, D=V)[2]
    wanted = numerics.oracle(OP, q, k, v, feature_map=FAVOR, causal=causal, **options)
    hopper.against_the_reference("mosaic_gpu", "xla", wanted)


LENGTHS = {"q_lengths": jnp.array([70]), "kv_lengths": jnp.array([130])}


@newest
@pytest.mark.parametrize(
    "D, features, T, S, H, G, scale, options",
    [
        (64, 128, 136, 200, 2, 1, 2.5, {}),
        (128, 96, 72, 72, 1, 1, 1.0, {"layout": "bhtd"}),
        (64, 80, 136, 136, 1, 1, 1.0, {"normalize": False} | LENGTHS),
        (64, 128, 72, 72, 1, 1, 1.0, hopper.options_of(1, 1, "bthd", True, 128, 64)),
    ],
)
def test_every_query_sees_every_key(
    D: int,
    features: int,
    T: int,
    S: int,
    H: int,
    G: int,
    scale: float,
    options: dict[str, Any],
) -> None:
    """By the kernels that map rows and pull gradients back. NaN in padding reaches no sum."""
    layout = options.get("layout", "bthd")
    q, k, v = hopper.draw(1, T, H, G, layout, S, D)
    q, k = ((scale * x).astype(jnp.bfloat16) for x in (q, k))
    if "q_lengths" in options:
        q = q.at[:, 70:].set(jnp.nan)
        k, v = (x.at[:, 130:].set(jnp.nan) for x in (k, v))
    phi = ato_jax.favor(jax.random.key(0), features, D)
    wanted = numerics.oracle(OP, q, k, v, feature_map=phi, **options)
    against_the_reference(wanted)


@newest
@pytest.mark.parametrize(
    "D, features, V, T, H, G, scale, options",
    [
        (64, 128, 64, 200, 2, 1, 2.5, {}),
        (128, 96, 128, 136, 1, 1, 1.0, {"layout": "bhtd"}),
        (64, 64, 64, 136, 1, 1, 1.0, {"normalize": False}),
        (128, 128, 128, 136, 1, 1, 1.0, hopper.options_of(1, 1, "bthd", True, 128, 128)),
        (128, 64, 128, 136, 1, 1, 1.0, hopper.options_of(1, 1, "bthd", True, 64, 128)),
    ],
)
def test_gradients_where_causal(
    D: int, features: int, V: int, T: int, H: int, G: int, scale: float, options: dict[str, Any]
) -> None:
    """By arrays of features in float32, of which states and weights have 16 bits."""
    layout = options.get("layout", "bthd")
    q, k, _ = hopper.draw(1, T, H, G, layout, D=D)
    v = hopper.draw(1, T, H, G, layout, D=V)[2]
    q, k = ((scale * x).astype(jnp.bfloat16) for x in (q, k))
    phi = ato_jax.favor(jax.random.key(0), features, D)
    wanted = numerics.oracle(OP, q, k, v, feature_map=phi, causal=True, **options)
    against_the_reference(wanted)


@newest
def test_sums_have_16_bits() -> None:
    """The sums need 16 bits of features and projection. Calls of few rows pass with 8, too."""
    q, k, v = hopper.draw(1, 136, 1, 1, D=64)
    spec = api.prepare(q, k, v, feature_map=FAVOR).spec
    deal = mosaic.Deal(1, 1, 136, 64, 3, 2)

    @jax.jit
    def run(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        w = projected_whole.parts_of_projection(1, FAVOR.projection)
        return projected_sums.projected_sums(spec, deal, "random_features_sums", w, k, v)

    with ato_jax.interpret():
        S, z = (jnp.sum(x, axis=2)[0, 0] for x in run(k, v))
    w64, x = np.asarray(FAVOR.projection, np.float64), np.asarray(k[0, :, 0], np.float64)
    half = 0.5 * np.sum(x**2, 1, keepdims=True) * 64**-0.5
    phi = np.exp(64**-0.25 * x @ w64.T - half) * 128**-0.5
    assert error(S, phi.T @ np.asarray(v[0, :, 0], np.float64)) < 1e-4
    assert error(z, np.sum(phi, axis=0)) < 1e-4


@pytest.mark.parametrize("normalize", [True, False])
def test_the_gradients_lower_for_hopper(normalize: bool) -> None:
    """Layouts of vectors in registers, which no interpreter checks."""
    array = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        request = api.prepare(q, k, v, feature_map=FAVOR, normalize=normalize)
        spec, inputs = request.spec, request.inputs
        config = mosaic_gpu.default_config(spec, mosaic_text.H200)
        kept = mosaic_gpu.forward_for_own_backward(spec, config, inputs)
        residuals = Residuals(inputs, kept)
        return mosaic_gpu.backward(spec, config, residuals, kept.plain())

    with mosaic_text.on_hopper():
        traced = jax.jit(call).trace(array, array, array)
        lowered = traced.lower(lowering_platforms=("cuda",))
    names = [name for name, _ in mosaic_text.modules_of(lowered)]
    assert "linear_attention_random_features_query_gradient_mosaic" in names


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_of_the_projection(normalize: bool, layout: str) -> None:
    """By XLA, from the sums over keys and over queries; the latter are the state's gradient."""
    q, k, v = hopper.draw(2, 40, 6, 2, layout, D=16)
    w = ato_jax.favor(jax.random.key(0), 24, 16).projection
    given = {"layout": layout, "normalize": normalize}

    def run(w: jax.Array, state: Any) -> Any:
        more = given | {"initial_state": state, "return_state": True}
        phi = features.Favor(w)
        return ato_jax.linear_attention(
            q, k, v, feature_map=phi, implementation="reference", **more
        )

    nothing = ato_jax.LinearState(jnp.zeros((2, 2, 24, 16)), jnp.zeros((2, 2, 24)))
    (out, state), pull = jax.vjp(run, w, nothing)
    g = jax.random.normal(jax.random.key(1), out.shape).astype(out.dtype)
    wanted, sums = pull((g, jax.tree.map(jnp.zeros_like, state)))
    request = api.prepare(q, k, v, feature_map=features.Favor(w), **given)
    with ato_jax.interpret():
        found = projected.gradient_of_projection(request.spec, request.inputs, w, g, state, sums)
    assert error(found, np.asarray(wanted)) < 1e-5


def test_what_is_supported() -> None:
    q, k, v = hopper.draw(1, 128, 2, 2, D=64)

    def reason(
        phase: str = "forward", features: int = 128, dtype: str = "bfloat16", **options: Any
    ) -> str | None:
        phi = ato_jax.favor(jax.random.key(0), features, 64)
        arrays = (array.astype(dtype) for array in (q, k, v))
        spec = api.prepare(*arrays, feature_map=phi, **options).spec
        return mosaic_gpu.unsupported(spec, phase)

    for causal in (False, True):
        assert reason(causal=causal) is None
    assert reason("backward") is None
    assert reason("backward", causal=True) is None
    lengths = {"q_lengths": jnp.array([70]), "kv_lengths": jnp.array([70])}
    assert "causal=True and lengths" in str(reason("backward", causal=True, **lengths))
    gates = {"decay": -jnp.ones((1, 128, 2))}
    assert "a decay or segments" in str(reason("backward", causal=True, **gates))
    wide = ato_jax.favor(jax.random.key(0), 128, 144)
    rows = jnp.ones((1, 128, 2, 144), "bfloat16")
    spec = api.prepare(rows, rows, v, feature_map=wide, causal=True).spec
    assert "at most 128 columns of q and k" in str(mosaic_gpu.unsupported(spec, "backward"))
    assert "number of features, 144" in str(reason("backward", causal=True, features=144))
    assert "at most 128 features" in str(reason("backward", features=144))
    assert reason(causal=True, decay=-jnp.ones((1, 128, 2))) is None
    assert "bfloat16" in str(reason(dtype="float32"))
    assert "number of features, 300" in str(reason(features=300))
    by_channel = -jnp.ones((1, 128, 2, 128))
    assert "features that are not elementwise" in str(reason(causal=True, decay=by_channel))
