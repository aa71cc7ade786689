"""Linear attention against the float64 reference: every option, forward and all gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import ato_jax
from ato_jax import programs
from tests import calls, numerics


@given(call=calls.linear_attention())
def test_xla(call: calls.Call) -> None:
    calls.check(call, "xla", {})


@given(call=calls.linear_attention())
def test_xla_in_small_chunks(call: calls.Call) -> None:
    calls.check(call, "xla", {"chunk": 4, "wide_chunk": 4})


# -- one thing at a time -------------------------------------------------------------------------

IMPLEMENTATIONS = ("xla", "triton")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

arrays = calls.arrays
run = functools.partial(calls.run, "linear_attention")


def gates(*shape: int) -> jax.Array:
    return jnp.asarray(-np.abs(np.random.default_rng(1).normal(size=shape)), jnp.float32)


@given(call=calls.linear_attention().map(calls.for_triton))
@settings(max_examples=max(1, settings.default.max_examples // 3))
def test_triton(call: calls.Call) -> None:
    arguments, options = call.arguments()
    run("triton", *arguments, **options)


@each_implementation
@pytest.mark.parametrize("causal", [False, True])
def test_one_query_one_key(implementation: str, causal: bool) -> None:
    run(implementation, *arrays(2, 1, 1, 2, 1, 4, 3), causal=causal, return_state=True)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_layouts_and_the_missing_batch(implementation: str) -> None:
    q, k, v = arrays(1, 7, 7, 2, 1, 4, 3)
    decay = gates(1, 7, 1, 4)
    function = functools.partial(
        ato_jax.linear_attention, causal=True, return_state=True, implementation=implementation
    )
    out, state = function(q, k, v, decay=decay)
    alone, alone_state = function(q[0], k[0], v[0], decay=decay[0])
    np.testing.assert_array_equal(alone, out[0])
    np.testing.assert_array_equal(alone_state.kv, state.kv[0])
    swapped = [jnp.swapaxes(one, 1, 2) for one in (q, k, v, decay)]
    turned, turned_state = function(*swapped[:3], decay=swapped[3], layout="bhtd")
    np.testing.assert_allclose(jnp.swapaxes(turned, 1, 2), out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(turned_state.k_sum, state.k_sum, rtol=1e-5, atol=1e-6)


# Of the kernels, test_linear_gates.py has outputs that continue, and gradients through states.
@pytest.mark.parametrize("kind", [None, "head", "channel"])
def test_split_equals_whole(kind: str | None) -> None:
    """The first n steps and then the rest with their state, gradients through the state too."""
    B, T, G, D, V, n = 2, 10, 1, 4, 3, 5
    qkv = arrays(B, T, T, 2, G, D, V)
    # From nothing, so that one program serves both parts.
    nothing = ato_jax.LinearState(jnp.zeros((B, G, D, V)), jnp.zeros((B, G, D)))
    decay = (
        None if kind is None else gates(*{"head": (G,), "step": (B, T, G)}.get(kind, (B, T, G, D)))
    )
    function = functools.partial(
        ato_jax.linear_attention, causal=True, return_state=True, implementation="xla"
    )

    def part(a: int, b: int, qkv: Any, decay: Any, state: Any) -> Any:
        taken = decay if decay is None or kind == "head" else decay[:, a:b]
        return function(*(one[:, a:b] for one in qkv), decay=taken, initial_state=state)

    def whole(qkv: Any, decay: Any) -> Any:
        return part(0, T, qkv, decay, None)

    def in_two(qkv: Any, decay: Any) -> Any:
        first, state = part(0, n, qkv, decay, nothing)
        second, state = part(n, T, qkv, decay, state)
        return jnp.concatenate([first, second], 1), state

    wanted, pull_wanted = jax.vjp(whole, qkv, decay)
    found, pull_found = jax.vjp(in_two, qkv, decay)
    ones = jax.tree.map(jnp.ones_like, wanted)
    pairs = zip(
        jax.tree.leaves((found, pull_found(ones))),
        jax.tree.leaves((wanted, pull_wanted(ones))),
        strict=True,
    )
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("magnitude", [0.01, 30.0])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    # Of the kernels in bfloat16: test_linear_triton.py.
    [*(("xla", dtype) for dtype in calls.DTYPES), ("triton", "float16"), ("triton", "float32")],
)
def test_scale(dtype: str, magnitude: float, implementation: str) -> None:
    qkv = arrays(2, 64, 64, 2, 1, 32, 16, dtype=dtype, magnitude=magnitude)
    run(implementation, *qkv, causal=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_constant_inputs(dtype: str, implementation: str) -> None:
    """dq and dk are nothing but what rounding leaves of two terms that cancel."""
    qkv = [jnp.full_like(one, 0.5) for one in arrays(1, 40, 40, 2, 2, 8, 4, dtype=dtype)]
    run(implementation, *qkv)


@pytest.mark.parametrize("causal", [False, True])
def test_strong_weak_and_total_decay(causal: bool) -> None:
    """Decays of 0, -50 and -inf beside each other, over several chunks of the default size."""
    T = 70
    qkv = arrays(1, T, T, 2, 1, 2, 2)
    draw = np.random.default_rng(2)
    decay = draw.choice([0.0, 0.0, 0.0, -1e-3, -0.5, -50.0, -np.inf], size=(1, T, 1, 2))
    run("xla", *qkv, decay=jnp.asarray(decay, jnp.float32), causal=causal, return_state=True)


def long_sums(q: Any, k: Any, v: Any, causal: bool) -> np.ndarray:
    """elu + 1 attention of one head in float64, by running sums."""
    q, k, v = (np.asarray(one, np.float64)[0, :, 0] for one in (q, k, v))
    q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    kv = np.einsum("sd,sv->sdv", k, v)
    if causal:
        kv, k_sum = kv.cumsum(0), k.cumsum(0)
    else:
        kv, k_sum = kv.sum(0, keepdims=True), k.sum(0, keepdims=True)
    numerator = np.einsum("td,tdv->tv", q, np.broadcast_to(kv, (len(q), *kv.shape[1:])))
    out = numerator / np.sum(q * k_sum, -1, keepdims=True)
    return out[None, :, None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", calls.DTYPES)
def test_a_long_sequence(dtype: str, causal: bool) -> None:
    """A normaliser in float16 would overflow from T = 1024 on, and one in bfloat16 stand still."""
    T = 65_536
    qkv = arrays(1, T, T, 1, 1, 4, 4, dtype=dtype)
    qkv[2] = qkv[2] + 1
    out = ato_jax.linear_attention(*qkv, causal=causal, implementation="xla")
    numerics.check("out", out, long_sums(*qkv, causal), dtype=dtype, result_dtype=dtype)

    if dtype != "float16":
        return
    gradients = jax.grad(
        lambda *qkv: ato_jax.linear_attention(*qkv, causal=causal).astype(jnp.float32).sum(),
        (0, 1, 2),
    )(*qkv)
    assert all(jnp.isfinite(one).all() for one in gradients)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_eps(implementation: str) -> None:
    """The denominator's floor cuts its gradient, too."""
    qkv = arrays(1, 12, 12, 2, 2, 4, 3)
    run(implementation, *qkv, eps=20.0)
    run(implementation, *qkv, feature_map="relu", causal=True)


def test_normalised_identity() -> None:
    qkv = [jnp.abs(one) for one in arrays(1, 12, 12, 2, 2, 4, 3)]
    run("xla", *qkv, feature_map="identity", normalize=True)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_loop_of_steps(normalize: bool) -> None:
    """One token at a time equals the whole, in place where the state is donated."""
    B, T, H, G, D, V = 2, 6, 4, 2, 3, 5
    qkv = arrays(B, T, T, H, G, D, V)
    options: dict[str, Any] = {"normalize": normalize}
    decay = gates(B, T, G, D)
    wanted, last = ato_jax.linear_attention(
        *qkv, decay=decay, causal=True, return_state=True, **options
    )
    state = ato_jax.LinearState(jnp.zeros((B, G, D, V)), jnp.zeros((B, G, D)))
    step = jax.jit(functools.partial(ato_jax.linear_attention_step, **options), donate_argnums=3)
    for t in range(T):
        out, state = step(*(one[:, t] for one in qkv), state, decay=decay[:, t])
        np.testing.assert_allclose(out, wanted[:, t], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state.kv, last.kv, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state.k_sum, last.k_sum, rtol=2e-5, atol=1e-6)


# -- feature maps --------------------------------------------------------------------------------


# Causal, of the kernels: test_linear_triton.py.
@pytest.mark.parametrize(
    ("implementation", "causal"), [("xla", False), ("xla", True), ("triton", False)]
)
def test_a_function_as_feature_map(implementation: str, causal: bool) -> None:
    """Any elementwise function, written in place: as the named one, derivative included."""
    qkv = arrays(1, 9, 9, 2, 1, 4, 3)

    def gradients(feature_map: Any) -> Any:
        def loss(*qkv: Any) -> Any:
            out = ato_jax.linear_attention(
                *qkv,
                feature_map=feature_map,
                normalize=True,
                causal=causal,
                implementation=implementation,
            )
            return jnp.sin(out).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(*qkv)

    with ato_jax.interpret():
        found = gradients(lambda x: jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0))))
        wanted = gradients("elu1")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_a_learned_temperature() -> None:
    """What the function closes over may be traced, and has its gradient."""
    q, k, v = arrays(1, 9, 9, 2, 1, 4, 3)

    def loss(temperature: Any, scaled_outside: bool) -> Any:
        if scaled_outside:
            return ato_jax.linear_attention(q * temperature, k * temperature, v).sum()
        return ato_jax.linear_attention(
            q, k, v, feature_map=lambda x: jax.nn.elu(x * temperature) + 1, normalize=True
        ).sum()

    for transform in (
        jax.value_and_grad,
        lambda f: jax.jit(jax.value_and_grad(f), static_argnums=1),
    ):
        found = transform(loss)(jnp.float32(0.7), False)
        wanted = jax.value_and_grad(loss)(jnp.float32(0.7), True)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


TO_NUMBERS: dict[str, Any] = {
    "float": lambda x: 1.0,
    "x > 0": lambda x: x > 0,
    "int": lambda x: -2,
    "bool": lambda x: True,
    "np.float64": lambda x: np.float64(0.5),
    "0-d array": lambda x: np.array(3, np.int8),
    "ones_like": jnp.ones_like,
}
SOME = ("float", "x > 0")


@pytest.mark.parametrize(
    ("implementation", "name"),
    [("xla", name) for name in TO_NUMBERS]
    + [(implementation, name) for implementation in ("reference", "triton") for name in SOME],
)
def test_maps_to_numbers(implementation: str, name: str) -> None:
    """Constants, of whatever kind, and steps: features like others, with gradients of 0."""
    feature_map = TO_NUMBERS[name]
    q, k, v = arrays(1, 9, 9, 2, 1, 4, 3)
    do = q[..., 1:]

    def out(q: Any, k: Any, v: Any) -> Any:
        return ato_jax.linear_attention(
            q, k, v, feature_map=feature_map, causal=True, implementation=implementation
        )

    features = [np.float32(np.vectorize(feature_map)(np.asarray(x))) for x in (q, k)]
    w = np.tril(np.einsum("bihd,bjgd->bhij", *features)) * 4**-0.5
    with ato_jax.interpret():
        found, pull = jax.vjp(out, q, k, v)
        dq, dk, dv = pull(do)
    np.testing.assert_allclose(found, np.einsum("bhij,bjgv->bihv", w, v), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        dv, np.einsum("bhij,bihv->bjv", w, do)[:, :, None], rtol=1e-5, atol=1e-5
    )
    assert not dq.any() and not dk.any()


def test_the_same_lambda_written_twice_compiles_once() -> None:
    qkv = arrays(1, 5, 5, 2, 1, 3, 2)

    def call(size: float) -> Any:
        return ato_jax.linear_attention(*qkv, feature_map=lambda x: jnp.tanh(x * size) + 1)

    first = call(0.5)
    compiled = len(programs._jitted)
    np.testing.assert_array_equal(call(0.5), first)
    assert len(programs._jitted) == compiled
    other = call(0.25)
    assert np.abs(other - first).max() > 1e-3


@pytest.mark.parametrize(("features", "orthogonal"), [(3, True), (4, True), (10, True), (6, False)])
def test_favor_is_unbiased(features: int, orthogonal: bool) -> None:
    """The mean of phi(q) . phi(k) over many draws is exp(q . k / sqrt(D)); M above and below D."""
    D, draws = 4, 60_000
    draw = np.random.default_rng(0)
    q, k = (jnp.asarray(draw.normal(size=(5, D)), jnp.float32) for _ in range(2))

    def estimate(key: Any) -> Any:
        phi = ato_jax.favor(key, features, D, orthogonal=orthogonal)
        return jnp.sum(phi(q) * phi(k), -1)

    found = jax.jit(jax.vmap(estimate))(jax.random.split(jax.random.key(0), draws))
    wanted = np.exp(np.sum(np.asarray(q) * np.asarray(k), -1) / np.sqrt(D))
    error = np.asarray(found, np.float64).std(0) / np.sqrt(draws)
    assert (np.abs(found.mean(0) - wanted) < 5 * error).all()
    assert (error < 0.02 * wanted).all()


def test_favor_blocks_are_orthogonal() -> None:
    rows = np.asarray(ato_jax.favor(jax.random.key(3), 10, 4).projection)
    for block in (rows[:4], rows[4:8], rows[8:]):
        products = block @ block.T
        np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-4)


def test_favor_approximates_softmax_attention() -> None:
    """The more features, the less error."""
    q, k, v = arrays(1, 32, 32, 1, 1, 4, 3, magnitude=0.5)
    wanted = ato_jax.attention(q, k, v)

    def error(features: int) -> float:
        phi = ato_jax.favor(jax.random.key(0), features, 4)
        return float(jnp.linalg.norm(ato_jax.linear_attention(q, k, v, feature_map=phi) - wanted))

    assert error(4096) < error(64) / 3
    assert error(4096) < 0.1 * float(jnp.linalg.norm(wanted))


@pytest.mark.parametrize("causal", [False, True])
def test_favor_against_the_oracle(causal: bool) -> None:
    phi = ato_jax.favor(jax.random.key(0), 6, 4)
    run("xla", *arrays(1, 9, 9, 2, 1, 4, 3), feature_map=phi, causal=causal)


def test_maps_of_the_same_text_stay_apart() -> None:
    """What a jaxpr does not show: constants of an inner function, and rules of derivatives."""

    def inner(factor: float) -> Any:
        constant = jnp.asarray(factor)
        return jax.jit(lambda x: x * constant)

    def surrogate(slope: float) -> Any:
        @jax.custom_jvp
        def relu(x: jax.Array) -> jax.Array:
            return jnp.where(x > 0, x, 0.0)

        relu.defjvp(lambda primals, tangents: (relu(*primals), tangents[0] * slope))
        return relu

    ones = jnp.ones((1, 2, 1, 4))

    def total(q: jax.Array, feature_map: Any) -> jax.Array:
        out = ato_jax.linear_attention(
            q, ones, ones, feature_map=feature_map, normalize=False, scale=1.0
        )
        return jnp.sum(out)

    assert total(ones, inner(3.0)) == 9 * total(ones, inner(1.0))
    slopes = [jax.grad(total)(ones, surrogate(slope)) for slope in (1.0, 3.0)]
    np.testing.assert_allclose(slopes[1], 3 * slopes[0])
