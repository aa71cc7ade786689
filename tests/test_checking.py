"""`ato_jax.checked`: values that nobody knows when a program is traced, reported by name."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from tests import numerics

B, T, S, H, G, D = 2, 4, 6, 4, 2, 3


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("junk", [None, "attention", 3, [len], {}, np.ones(2), jnp.ones(2), ...])
def test_what_is_no_function(junk: Any) -> None:
    with pytest.raises(ValueError, match="function must be callable, got"):
        ato_jax.checked(junk)


@pytest.mark.parametrize("function", [ato_jax.attention, ato_jax.linear_attention])
@pytest.mark.parametrize(
    ("name", "most", "lengths"),
    [
        ("kv_lengths", "S=6", [7, 1]),
        ("kv_lengths", "S=6", [-1, 1]),
        ("q_lengths", "T=4", [0, 5]),
        ("q_lengths", "T=4", [-3, 5]),
    ],
)
def test_lengths(function: Any, name: str, most: str, lengths: list[int]) -> None:
    q, k = normal(B, T, H, D), normal(B, S, G, D)

    def call(lengths: jax.Array) -> jax.Array:
        return function(q, k, k, **{name: lengths})

    message = ato_jax.checked(jax.jit(call))(jnp.array(lengths))[0].get()
    assert message is not None and f"{name} must lie between 0 and {most}, got" in message
    assert ato_jax.checked(jax.jit(call))(jnp.array([0, 4]))[0].get() is None
    call(jnp.array(lengths))  # without `checked` they are clipped


def test_lengths_in_an_array_of_jax() -> None:
    """A jax array's numbers are not read: outside of `checked` they are clipped."""
    q, k = normal(B, T, H, D), normal(B, S, G, D)
    beta = jnp.full((B, T, H), 0.5)
    for function, arrays, name in (
        (ato_jax.attention, (q, k, k), "kv_lengths"),
        (ato_jax.linear_attention, (q, k, k), "kv_lengths"),
        (ato_jax.gated_delta_rule, (q[:, :, :G], q[:, :, :G], q, beta), "lengths"),
        (ato_jax.decode_attention, (q, k, k), "lengths"),
    ):
        for lengths in ([99, 1], [-2, 1]):
            call = functools.partial(function, **{name: jnp.array(lengths)})
            message = str(ato_jax.checked(call)(*arrays)[0].get())
            assert f"{name} must lie between 0 and" in message and "got" in message
            call(*arrays)
            with pytest.raises(ValueError, match=f"{name} must lie between 0 and"):
                function(*arrays, **{name: np.array(lengths)})


def test_query_offsets() -> None:
    q, k = normal(B, T, H, D), normal(B, S, G, D)

    def call(offset: jax.Array) -> jax.Array:
        return ato_jax.attention(q, k, k, causal=True, query_offset=offset)

    for check in (ato_jax.checked(call), ato_jax.checked(jax.jit(call))):
        for right in ([1 << 29, 0], [-(1 << 29), 0]):
            assert check(jnp.array(right))[0].get() is None
        for wrong in ([(1 << 29) + 1, 0], [0, -(1 << 29) - 1], [(1 << 31) - 1, -(1 << 31)]):
            message = str(check(jnp.array(wrong))[0].get())
            assert "query_offset must lie between -536870912 and 536870912, got" in message


def test_lengths_everywhere() -> None:
    """With jit on either side, in a loop, in a batch and in a derivative."""
    q, k = normal(T, H, D), normal(S, G, D)

    def call(length: jax.Array, q: jax.Array = q) -> jax.Array:
        return ato_jax.linear_attention(q, k, k, kv_lengths=length).sum()

    plain, around = ato_jax.checked(call), jax.jit(ato_jax.checked(call))
    for check in (plain, around):
        assert "kv_lengths must" in str(check(jnp.int32(7))[0].get())
        assert check(jnp.int32(6))[0].get() is None
    wrong = jnp.array([6, 7])
    for many in (jax.vmap(call), lambda lengths: jax.lax.map(call, lengths)):
        check = jax.jit(ato_jax.checked(many))
        assert "kv_lengths must" in str(check(wrong)[0].get())
        assert check(wrong - 1)[0].get() is None
    gradient = ato_jax.checked(jax.grad(lambda q: call(jnp.int32(7), q)))
    assert "kv_lengths must" in str(gradient(q)[0].get())


@pytest.mark.parametrize("shape", [(G,), (B, T, G), (B, T, G, D)], ids=["head", "step", "channel"])
def test_decays(shape: tuple[int, ...]) -> None:
    q, k = normal(B, T, H, D), normal(B, T, G, D)

    def call(decay: jax.Array) -> jax.Array:
        return ato_jax.linear_attention(q, k, k, decay=decay, causal=True).sum()

    decay = -jnp.ones(shape)
    wrong = decay.at[(-1,) * len(shape)].set(0.25)
    for function in (jax.jit(call), jax.grad(jax.jit(call))):
        check = jax.jit(ato_jax.checked(function))
        message = check(wrong)[0].get()
        assert message is not None and "must be <= 0, got values up to 0.25" in message
        # NaN, which may stand in padding, is not above 0.
        for right in (decay, jnp.zeros(shape), jnp.full(shape, jnp.nan), decay * jnp.inf):
            assert check(right)[0].get() is None


def test_the_decay_of_a_step() -> None:
    state = ato_jax.LinearState(jnp.zeros((B, G, D, D)), jnp.zeros((B, G, D)))
    q, k = normal(B, H, D), normal(B, G, D)

    @jax.jit
    def call(decay: jax.Array) -> Any:
        return ato_jax.linear_attention_step(q, k, k, state, decay=decay)

    message = ato_jax.checked(call)(jnp.array([-1.0, 0.5]))[0].get()
    assert message is not None and "decay is" in message and "up to 0.5" in message
    assert ato_jax.checked(call)(jnp.array([-1.0, 0.0]))[0].get() is None


# Features that overflow float32.


def below(top: float, seed: int, dtype: str) -> jax.Array:
    """[1, 32, 1, 16] from top - 1 to top."""
    draw = np.random.default_rng(seed).uniform(size=(1, 32, 1, 16))
    return jnp.asarray(top - draw, dtype)


@pytest.mark.parametrize(
    ("dtype", "causal"), [("float32", True), ("bfloat16", True), ("float16", False)]
)
def test_features_at_the_limit(dtype: str, causal: bool) -> None:
    """Below the docstring's limit everything is right; beyond it `checked` says so.

    max(q) + max(k) + log(16 * 32) is 79.8 at 36.8.
    """
    arguments = [below(36.8, 0, dtype), below(36.8, 1, dtype), below(0.5, 2, dtype)]
    options = {"feature_map": "exp", "causal": causal}
    wanted = numerics.oracle("linear_attention", *arguments, **options)
    for backend in ("reference", "xla", "triton"):
        kernels = backend == "triton"
        with ato_jax.interpret() if kernels else contextlib.nullcontext():
            result = numerics.run(
                "linear_attention", backend, *arguments, **options, cotangents=wanted.cotangents
            )
        numerics.compare(result, wanted)

    def call(q: jax.Array, k: jax.Array) -> jax.Array:
        return ato_jax.linear_attention(q, k, arguments[2], **options)

    check = jax.jit(ato_jax.checked(call))
    assert check(*arguments[:2])[0].get() is None
    for top in (42.0, 50.0, 95.0):
        beyond = below(top, 0, dtype)
        message = check(beyond, beyond)[0].get()
        assert message is not None and "feature_map 'exp' leaves float32" in message


def test_a_normaliser_that_overflows_gives_zeros_unchecked() -> None:
    """The reason for the check: without it they are no NaN, and no error either."""
    q = below(42, 0, "float32")
    assert not ato_jax.linear_attention(q, q, q * 0 + 1e-4, feature_map="exp").any()


@pytest.mark.parametrize("top", [24.0, 30.0])
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_gradients_of_a_large_normaliser(backend: str, top: float) -> None:
    """JAX's derivative of a quotient divides by its square, which is infinite here.

    The ideal is the reference in float32, which would be as wrong: the budget alone counts.
    """
    arguments = [below(top, 0, "float32"), below(top, 1, "float32"), below(0.5, 2, "float32")]
    wanted = numerics.oracle("linear_attention", *arguments, feature_map="exp")
    result = numerics.run(
        "linear_attention", backend, *arguments, feature_map="exp", cotangents=wanted.cotangents
    )
    for measure in numerics.compare(result, wanted).values():
        assert measure.error <= numerics.budget(measure.name, "float32"), measure


def test_other_features() -> None:
    """States, steps, sums that are not normalised, random features; NaN that was given passes."""
    state = ato_jax.LinearState(jnp.full((1, 1, 16, 16), 1.0), jnp.full((1, 1, 16), 1e30))
    v = below(0.5, 2, "float32")

    def step(q: jax.Array) -> Any:
        return ato_jax.linear_attention_step(q[:, 0], q[:, 0], v[:, 0], state, feature_map="exp")

    def continued(q: jax.Array) -> Any:
        return ato_jax.linear_attention(
            q, q, v, feature_map="exp", causal=True, initial_state=state, return_state=True
        )

    def plain(q: jax.Array) -> Any:
        return ato_jax.linear_attention(q, q, v, feature_map="exp", normalize=False)

    for function, right, wrong in ((step, 5, 20), (continued, 5, 20), (plain, 41, 50)):
        check = jax.jit(ato_jax.checked(function))
        assert check(below(right, 0, "float32"))[0].get() is None
        message = check(below(wrong, 0, "float32"))[0].get()
        assert message is not None and "feature_map 'exp' leaves float32" in message
    assert check(v.at[0, 3].set(jnp.nan))[0].get() is None  # of plain

    phi = ato_jax.favor(jax.random.key(0), 256, 256)

    def favor(q: jax.Array) -> Any:
        return ato_jax.linear_attention(q, q, q, feature_map=phi)

    along = phi.projection[None, :8, None] * 4.0  # x' = w: the largest features there are
    check = jax.jit(ato_jax.checked(favor))
    assert "feature_map 'favor' leaves" in str(check(along)[0].get())
    assert check(normal(1, 8, 1, 256) * 30)[0].get() is None
