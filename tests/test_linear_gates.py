"""Decays, segments, lengths and both ways by the Triton kernels, interpreted, against float64."""

import dataclasses

import aot
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from test_linear_triton import GPUS, SMALL, STORED, check, check_shared_memory, draw, spec_of

import ato_jax
from ato_jax.ops.linear_attention.spec import LinearState
from ato_jax.ops.linear_attention.triton import causal, default_config, steps, walk


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


# Carried: of more keys than queries, and in bfloat16 with everything at once. Both ways: with keys
# in smaller blocks, with segments and states, and with everything at once. In float16 carried
# alone: what is stored there has no decay, by default.
def test_stored_decay_unnormalised_with_states_and_segments():
    check(
        90,
        90,
        4,
        2,
        16,
        20,
        "bfloat16",
        B=2,
        causal=True,
        feature_map="silu",
        poisoned=True,
        layout="bhtd",
        decay=decays(2, 2, 90),
        segment_ids=runs(2, 90),
        kv_lengths=np.array([81, 90]),
        initial_state=state(2, 2, 16, 20),
        return_state=True,
        config=STORED,
    )


# The others of these with fewer and more keys are carried and stored without a decay.
def test_stored_decay_of_fewer_keys_than_queries():
    config = STORED | {"dkv_block": 32}
    check(90, 20, 2, 1, 16, 16, causal=True, decay=decays(1, 20, 1), config=config)


def test_stored_decay_with_segments_of_queries_and_keys():
    ids = {"q_segment_ids": runs(2, 43, seed=1), "kv_segment_ids": runs(2, 43, seed=2)}
    decay = 0.05 * decays(2, 43, 1)
    check(43, 43, 2, 1, 16, 16, B=2, causal=True, decay=decay, config=STORED, **ids)


@pytest.mark.parametrize("decay", ["none", "weak", "mixed"])
def test_stored_decays_over_runs_of_many_rows(decay):
    """In bfloat16, where the states are rounded, and sums go over 128 rows."""
    weak = -0.02 * np.random.default_rng(1).uniform(size=(1, 512, 1))
    values = {"none": 0 * weak, "weak": weak, "mixed": decays(1, 512, 1)}[decay]
    sizes = dict.fromkeys(("state_block", "output_block", "dq_block", "dkv_block"), 64)
    config = STORED | sizes | {"run_rows": 128, "backward_run_rows": 128, "pair_block": 32}
    values = jnp.asarray(values, jnp.float32)
    check(512, 512, 1, 1, 64, 64, "bfloat16", causal=True, decay=values, config=config)


@pytest.mark.parametrize(
    ("T", "dtype", "strength", "options"),
    [
        (300, "bfloat16", -0.5, {}),
        (300, "float16", -2.0, {}),
        # The cotangent of the state meets the last key without a decay.
        (90, "float32", -16.0, {"return_state": True}),
    ],
)
def test_the_gradient_of_a_decay_per_head_gathers_no_roundings(T, dtype, strength, options):
    """It is a sum over all steps, of which few terms are left where nothing is normalised."""
    decay = jnp.full((8,), strength, jnp.float32)
    options = {"feature_map": "identity", "causal": True, "decay": decay, **options}
    check(T, T, 8, 8, 16, 16, dtype, config={"programs": 1}, **options)


@pytest.mark.parametrize("strength", [-3.0, -10.0])
def test_dk_of_queries_that_all_but_see_one_key(strength):
    """The weights' gradient and the normaliser's, whose difference dk is, cancel in float32."""
    qkv = [draw(1, 90, 2, 16, dtype="bfloat16", seed=seed) for seed in range(3)]
    decay = jnp.full((2,), strength, jnp.float32)
    wanted = numerics.oracle("linear_attention", *qkv, causal=True, decay=decay)
    with ato_jax.interpret():
        found = numerics.run_backends(
            "triton", "triton", wanted, device=GPUS[90], backward_config=SMALL
        )
    numerics.compare(found, wanted)
    # Beside dk itself, not beside the terms.
    numerics.check("dk", found["dk"], wanted.exact["dk"], dtype="bfloat16")


def test_keys_in_smaller_blocks_than_queries_both_ways():
    config = STORED | {"dq_block": 32}
    check(90, 90, 2, 1, 16, 16, decay=decays(1, 90, 1), config=config)


# To the kernels a decay of heads is one of steps.
def test_decay_of_heads_and_segments_in_float16():
    options = {"decay": jnp.array([-0.05, 0.0]), "segment_ids": runs(1, 90)}
    check(90, 90, 4, 2, 16, 16, "float16", causal=True, **options)


def test_decay_of_more_keys_than_queries():
    check(20, 90, 2, 1, 16, 16, causal=True, decay=decays(1, 90, 1))


def differing_segments(T, S):
    q_ids, kv_ids = runs(2, T, seed=1), runs(2, S, seed=2)
    q_ids[:, 5:9] = 7  # which no key has
    lengths = np.array([T, T - 6])
    return {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids, "q_lengths": lengths}


def test_segments_of_queries_and_keys():
    check(30, 56, 2, 1, 16, 16, B=2, causal=True, **differing_segments(30, 56))


def test_segments_of_queries_and_keys_with_decay_and_states_unnormalised_both_ways():
    options = {"initial_state": state(2, 2, 16, 20), "return_state": True, "layout": "bhtd"}
    # Weak ones: a run that is long past weighs next to nothing.
    options |= {"decay": 0.05 * decays(2, 2, 43), "feature_map": "silu"}
    check(43, 43, 4, 2, 16, 20, B=2, **differing_segments(43, 43), **options)


def test_exact_factors_of_strong_decays():
    """Of queries up to 92 steps behind the last key of their run, by 8 decays of heads."""
    T, keys, G = 100, 8, 8
    rows = jnp.zeros((1, T, G, 16))
    decay = np.linspace(-0.8, -0.3, G, dtype=np.float32)
    kv_ids = np.arange(T)[None] >= keys
    request, _ = numerics.prepare(
        "linear_attention",
        *(rows, rows, rows),
        decay=jnp.asarray(decay),
        q_segment_ids=np.zeros((1, T), np.int32),
        kv_segment_ids=kv_ids.astype(np.int32),
    )
    spec = request.spec
    plan = walk.plan(spec, default_config(spec, GPUS[90]))

    @jax.jit
    def arrays(inputs):
        laid_out, _ = causal._lay_out(spec, plan, inputs)
        found = steps.gates(spec, plan, laid_out, plan.steps, ("reads",))
        return laid_out.rows["query"], found["reads"]

    query, reads = map(np.asarray, arrays(request.inputs))
    where = (query[0] >= 0) & (query[0] < T)
    exact = np.exp(np.float64(decay)[:, None] * (query[0, where] + 1))
    np.testing.assert_allclose(reads[0][:, where], exact, rtol=5e-7)


def test_segments_of_queries_that_see_all_of_a_run():
    q_ids, kv_ids = runs(2, 60, seed=1), runs(2, 30, seed=2)
    check(60, 30, 2, 1, 16, 16, B=2, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    check(60, 30, 2, 1, 16, 16, B=2, q_segment_ids=0 * q_ids, kv_segment_ids=kv_ids)


@pytest.mark.parametrize(
    "T, S, lengths, causal",
    # Causal where T = S: with a decay, below.
    [
        (60, 60, {"kv_lengths": [53, 0, 60]}, False),
        (20, 60, {"q_lengths": [7, 20, 0]}, False),
        (60, 20, {"kv_lengths": [7, 20, 0]}, False),
        (60, 20, {"kv_lengths": [7, 20, 0]}, True),
    ],
)
def test_lengths(T, S, lengths, causal):
    lengths = {name: np.array(values) for name, values in lengths.items()}
    options = {"initial_state": state(3, 1, 16, 16), "return_state": True} if T == S else {}
    check(T, S, 2, 1, 16, 16, B=3, causal=causal, poisoned=True, **lengths, **options)


@pytest.mark.parametrize("causal", [True, False])
def test_everything_at_once(causal):
    check(
        90,
        90,
        4,
        2,
        16,
        20,
        "bfloat16",
        B=2,
        causal=causal,
        poisoned=True,
        layout="bhtd",
        decay=decays(2, 2, 90),
        segment_ids=runs(2, 90),
        kv_lengths=np.array([81, 90]),
        initial_state=state(2, 2, 16, 20),
        return_state=True,
    )


def test_decay_with_alignment_by_lengths():
    check(
        60,
        60,
        2,
        1,
        16,
        16,
        B=4,
        causal=True,
        poisoned=True,
        # Weak ones, so that the state reaches the last queries.
        decay=0.05 * decays(4, 60, 1),
        q_lengths=np.array([53, 12, 1, 60]),
        kv_lengths=np.array([12, 53, 60, 0]),
        initial_state=state(4, 1, 16, 16),
        return_state=True,
    )


def test_a_state_continues():
    q, k, v = (draw(2, 40, heads, 16, seed=seed) for heads, seed in ((2, 1), (1, 2), (1, 3)))
    decay, ids = decays(2, 40, 1), runs(2, 40)

    def attend(steps, initial_state=None):
        arrays = (array[:, steps] for array in (q, k, v))
        return ato_jax.linear_attention(
            *arrays,
            causal=True,
            decay=decay[:, steps],
            segment_ids=ids[:, steps],
            initial_state=initial_state,
            return_state=True,
            implementation="triton",
        )

    with ato_jax.interpret():
        whole, after = attend(slice(0, 40))
        # Not where a segment ends: the state continues the first one.
        cut = 1 + int(np.argmax((ids[0, 1:] == ids[0, :-1]) & (ids[1, 1:] == ids[1, :-1])))
        first, between = attend(slice(0, cut))
        second, last = attend(slice(cut, 40), between)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(last.kv, after.kv, rtol=1e-4, atol=1e-6)


@aot.requires_triton
@pytest.mark.parametrize("D, causal", [(64, False), (128, True)])
def test_default_tiles_fit_the_gpu(D, causal):
    check_shared_memory(dataclasses.replace(spec_of(D, "bfloat16", causal), decay="head"), 90)
