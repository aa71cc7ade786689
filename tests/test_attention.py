"""Softmax attention against the float64 reference: every option, forward and all gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import ato_jax
from tests import calls


@given(call=calls.attention())
def test_xla(call: calls.Call) -> None:
    calls.check(call, "xla", {})


@given(call=calls.attention())
def test_xla_in_small_blocks(call: calls.Call) -> None:
    calls.check(call, "xla", {"block_t": 4, "heads": 1, "batch": 1})


# -- one thing at a time -------------------------------------------------------------------------

IMPLEMENTATIONS = ("xla", "triton")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

arrays = calls.arrays
run = functools.partial(calls.run, "attention")


@given(call=calls.attention().map(calls.for_triton))
@settings(max_examples=max(2, settings.default.max_examples // 3))
def test_triton(call: calls.Call) -> None:
    arguments, options = call.arguments()
    run("triton", *arguments, **options)


@each_implementation
@pytest.mark.parametrize("causal", [False, True])
def test_one_query_one_key(implementation: str, causal: bool) -> None:
    run(implementation, *arrays(2, 1, 1, 2, 1, 4, 3), causal=causal, return_lse=True)


@each_implementation
def test_layouts_and_the_missing_batch(implementation: str) -> None:
    q, k, v = arrays(1, 5, 7, 2, 1, 4, 3)
    options: dict[str, Any] = {"causal": True, "return_lse": True, "implementation": implementation}
    with ato_jax.interpret():
        out, lse = ato_jax.attention(q, k, v, **options)
        alone = ato_jax.attention(q[0], k[0], v[0], **options)
        swapped = [jnp.swapaxes(one, 1, 2) for one in (q, k, v)]
        turned = ato_jax.attention(*swapped, layout="bhtd", **options)
    np.testing.assert_array_equal(alone[0], out[0])
    np.testing.assert_array_equal(alone[1], lse[0])
    np.testing.assert_allclose(jnp.swapaxes(turned[0], 1, 2), out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jnp.swapaxes(turned[1], 1, 2), lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("magnitude", [0.01, 30.0])
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_scale(dtype: str, magnitude: float, implementation: str) -> None:
    qkv = arrays(2, 64, 64, 2, 1, 32, 16, dtype=dtype, magnitude=magnitude)
    run(implementation, *qkv, causal=True, return_lse=True)


@pytest.mark.parametrize("dtype", calls.DTYPES)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_constant_inputs(dtype: str, implementation: str) -> None:
    """dq and dk are nothing but what rounding leaves of two terms that cancel."""
    qkv = [jnp.full_like(one, 0.5) for one in arrays(1, 40, 40, 2, 2, 8, 4, dtype=dtype)]
    run(implementation, *qkv)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing(sinks: bool) -> None:
    q, k, v = arrays(1, 6, 4, 2, 2, 4, 3)
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    if sinks:
        options["sinks"] = jnp.array([0.5, -1.0])
    run("xla", q, k, v, **options)
    out, lse = ato_jax.attention(q, k, v, **options)
    assert not out[0, :2].any()
    expected = np.array([0.5, -1.0]) if sinks else np.full(2, -np.inf)
    np.testing.assert_array_equal(lse[0, :2], np.stack([expected] * 2))

    def loss(q: Any) -> Any:
        return sum(jnp.where(jnp.isfinite(one), one, 0).sum() for one in (out_lse(q)))

    def out_lse(q: Any) -> Any:
        return ato_jax.attention(q, k, v, **options)

    assert not jax.grad(loss)(q)[0, :2].any()


@pytest.mark.parametrize("width", [1, 96, 192, 300, 2048, 8192])
def test_widths(width: int) -> None:
    run("xla", *arrays(1, 5, 6, 2, 1, width, max(1, width // 3)), causal=True)


def test_dropout_keys() -> None:
    """The same bits for a typed and a raw key, others for another, the mean untouched."""
    qkv = arrays(2, 33, 65, 2, 1, 8, 8)

    def out(key: Any, **options: Any) -> Any:
        return ato_jax.attention(*qkv, dropout_rate=0.3, dropout_key=key, **options)

    np.testing.assert_array_equal(out(jax.random.key(1)), out(jax.random.PRNGKey(1)))
    assert np.abs(out(jax.random.key(1)) - out(jax.random.key(2))).max() > 0.01
    np.testing.assert_array_equal(
        ato_jax.attention(*qkv, dropout_rate=0.0), ato_jax.attention(*qkv)
    )
    keys = jax.random.split(jax.random.key(0), 256)
    mean = np.mean(jax.vmap(out)(keys), 0)
    np.testing.assert_allclose(mean, ato_jax.attention(*qkv), atol=0.15)


def test_pieces_make_the_whole() -> None:
    q, k, v = arrays(2, 8, 21, 4, 2, 4, 3)
    whole = ato_jax.attention(q, k, v, return_lse=True)
    parts = [
        ato_jax.attention(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in ((0, 4), (4, 5), (5, 21))
    ]
    merged = ato_jax.combine(*zip(*parts, strict=True))
    for one, other in zip(merged, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)
    received = ato_jax.total_attention(q, k, whole[1])
    np.testing.assert_allclose(received.sum(1), np.full((2, 4), 8.0), rtol=1e-5)
