"""Decays, segments, lengths and both ways by the Triton kernels, interpreted, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_linear_triton import check

from ato_jax.ops.linear_attention.spec import LinearState

DTYPES = ("float32", "bfloat16", "float16")


def decays(*shape, seed=0):
    """None, weak and overwhelming ones mixed."""
    draw = np.random.default_rng(seed)
    values = draw.choice([0.0, -1e-3, -0.1, -1.0, -50.0], p=[0.1, 0.4, 0.3, 0.15, 0.05], size=shape)
    return jnp.asarray(values * draw.uniform(0.5, 1.0, size=shape), jnp.float32)


def state(B, G, D, V):
    draw = np.random.default_rng(5)
    return LinearState(
        jnp.asarray(draw.normal(size=(B, G, D, V)), jnp.float32),
        jnp.asarray(draw.uniform(1.0, 2.0, size=(B, G, D)), jnp.float32),
    )


def runs(B, length, seed=0):
    """Ids of runs of several lengths, some of which return."""
    draw = np.random.default_rng(seed)
    return (np.cumsum(draw.uniform(size=(B, length)) < 0.08, axis=1) + draw.integers(3)) % 4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decay_of_steps(dtype, causal):
    check(70, 70, 2, 1, 16, 32, dtype, causal=causal, decay=decays(1, 70, 1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decay_of_heads(dtype, causal):
    check(70, 70, 4, 2, 16, 16, dtype, causal=causal, decay=jnp.array([-0.05, 0.0]))


@pytest.mark.parametrize("causal", [True, False])
def test_decay_unnormalised_with_states(causal):
    options = {"initial_state": state(2, 2, 16, 20), "return_state": True}
    check(
        75,
        75,
        4,
        2,
        16,
        20,
        B=2,
        causal=causal,
        feature_map="silu",
        decay=decays(2, 2, 75),
        layout="bhtd",
        **options,
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decay_normalised_with_states(dtype, causal):
    options = {"initial_state": state(1, 1, 16, 16), "return_state": True}
    check(70, 70, 2, 1, 16, 16, dtype, causal=causal, decay=decays(1, 70, 1, seed=3), **options)


@pytest.mark.parametrize("T, S", [(20, 70), (70, 20), (1, 40)])
def test_decay_of_different_lengths(T, S):
    check(T, S, 2, 1, 16, 16, causal=True, decay=decays(1, S, 1))
