"""float16 features far below its smallest normal number, in the Triton kernels of linear attention.

elu(x) + 1 of -16 is 1e-7, and float16's smallest normal number 6e-5: rounded as they stand, such
features have one or two digits.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import powers

OP = "linear_attention"
H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])
# A short sequence has several pieces, and a piece several tiles.
BLOCKS = {"state_block": 16, "output_block": 16, "dq_block": 16, "dkv_block": 16}
CARRIED = BLOCKS | {"piece_rows": 32, "run_rows": 0, "backward_run_rows": 0, "programs": 1}
STORED = BLOCKS | {"run_rows": 32, "backward_run_rows": 32, "pair_block": 16, "programs": 1}

# (scale, mean) of q and of k.
TINY_KEYS = (1.0, 2.0), (1.0, -16.0)
TINY_QUERIES = (1.0, -16.0), (1.0, 2.0)
BOTH_TINY = (1.0, -12.0), (1.0, -1.0)
NARROW = (1.0, -1.0), (0.3, -12.0)
INPUTS = [TINY_KEYS, TINY_QUERIES, BOTH_TINY, NARROW]


def draw(*shape, of=(1.0, 0.0), seed=0):
    scale, mean = of
    values = np.random.default_rng(seed).normal(size=shape) * scale + mean
    return jnp.asarray(values.astype(np.float16))


def gates(*shape):
    return -0.05 * abs(draw(*shape).astype(jnp.float32))


def check(of_inputs, T=90, S=None, config=CARRIED, H=2, G=1, D=32, **options):
    S = T if S is None else S
    q, k, v = (
        draw(1, *shape, D, of=of, seed=seed)
        for seed, (shape, of) in enumerate(
            zip(((T, H), (S, G), (S, G)), (*of_inputs, (1.0, 0.0)), strict=True)
        )
    )
    wanted = numerics.oracle(OP, q, k, v, **options)
    with ato_jax.interpret():
        found = numerics.run_backends(
            "triton",
            "triton",
            wanted,
            device=H200,
            forward_config=config,
            backward_config=config,
        )
    numerics.compare(found, wanted)


@pytest.mark.parametrize("of_inputs", INPUTS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_tiny_features(causal, normalize, of_inputs):
    # Unscaled, the largest results would lie below float16's normal numbers, too.
    options = {} if normalize else {"scale": 2.0**12}
    check(of_inputs, causal=causal, normalize=normalize, **options)


@pytest.mark.parametrize("of_inputs", [TINY_KEYS, NARROW])
@pytest.mark.parametrize("decay", [None, "head", "step"])
def test_states_stored_for_every_run(decay, of_inputs):
    shape = {None: None, "head": (1,), "step": (1, 90, 1)}[decay]
    options = (
        {} if decay is None else {"decay": -0.05 * abs(jnp.asarray(draw(*shape), jnp.float32))}
    )
    check(of_inputs, config=STORED, causal=True, **options)


@pytest.mark.parametrize("kind", ["head", "step", "segments"])
def test_both_ways(kind):
    if kind == "segments":
        options = {"segment_ids": jnp.asarray((np.arange(90) // 37)[None])}
    else:
        shape = (1,) if kind == "head" else (1, 90, 1)
        options = {"decay": gates(*shape)}
    check(TINY_KEYS, **options)


@pytest.mark.parametrize("feature_map", ["softplus", "silu"])
@pytest.mark.parametrize("causal", [False, True])
def test_other_maps(causal, feature_map):
    # silu(x) is about x exp(x).
    check(TINY_KEYS, causal=causal, feature_map=feature_map, scale=2.0**10, normalize=False)


@pytest.mark.parametrize("of_inputs", [TINY_KEYS, TINY_QUERIES])
def test_channel(of_inputs):
    check(of_inputs, T=48, decay=gates(1, 48, 1, 32), causal=True)


def test_more_keys_than_queries_with_a_state():
    """The power multiplies a state that is given, and is no part of the one returned."""
    state = ato_jax.LinearState(
        jnp.asarray(draw(1, 1, 32, 32), jnp.float32) * 1e-4,
        jnp.asarray(abs(draw(1, 1, 32)), jnp.float32) * 1e-4,
    )
    check(TINY_KEYS, causal=True, initial_state=state, return_state=True)
    check(TINY_KEYS, T=23, S=70, causal=True)


def spec_of(feature_map, **fields):
    phi = features.NAMED[feature_map]
    spec = LinearAttentionSpec(2, 8, 8, 2, 2, 4, 4, 4, "float16", phi, True, 1.0, 1e-6)
    return dataclasses.replace(spec, **fields)


def test_powers():
    k = np.full((2, 8, 2, 4), -20.0, np.float16)
    k[0, 3, 0, 1], k[0, 3, 1, 1], k[1, 5, 0, 0] = -10.0, 30.0, -12.0
    k[1, 6:, :, :] = np.nan  # padding
    inputs = Inputs(jnp.asarray(k), jnp.asarray(k), jnp.asarray(k), kv_lengths=jnp.array([8, 6]))
    for feature_map in ("elu1", "softplus", "silu"):
        phi = features.NAMED[feature_map]
        found = powers.arrays(spec_of(feature_map), inputs)[powers.NAME]
        assert found.shape == (2, 2, 1)
        largest = np.nanmax(np.abs(phi(jnp.asarray(k, jnp.float32))), axis=(1, 3))
        raised = largest * np.asarray(found)[..., 0]
        assert np.all((raised >= powers.LARGEST) & (raised < 2 * powers.LARGEST))
        assert np.all(np.log2(found) % 1 == 0)
        turned = inputs._replace(k=jnp.swapaxes(inputs.k, 1, 2))
        again = powers.arrays(spec_of(feature_map, layout="bhtd"), turned)[powers.NAME]
        assert jnp.array_equal(found, again)
    assert not powers.arrays(spec_of("relu"), inputs)
    assert not powers.arrays(spec_of("elu1", dtype="bfloat16"), inputs)
    largest = jnp.full((2, 8, 2, 4), 60000.0, jnp.float16)
    found = powers.arrays(spec_of("elu1"), inputs._replace(k=largest))[powers.NAME]
    assert jnp.all(found == 1)


@pytest.mark.parametrize("causal", [False, True])
def test_ordinary_features_keep_their_bits(causal, monkeypatch):
    """Powers of two are exact: where nothing is below float16's normal numbers, nothing changes."""
    q, k, v = (draw(1, 90, 2, 32, seed=seed) for seed in range(3))

    def both(q, k, v):
        def attend(q, k, v):
            return ato_jax.linear_attention(q, k, v, causal=causal, implementation="triton")

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(out)

    with ato_jax.interpret():
        found = both(q, k, v)
        monkeypatch.setattr(powers, "arrays", lambda spec, inputs: {})
        plain = both(q, k, v)
    for a, b in zip(found, plain, strict=True):
        assert jnp.array_equal(a, b)
