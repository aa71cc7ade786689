"""The Triton kernels of linear attention, interpreted on the CPU against the float64 reference."""

import dataclasses

import aot
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest

import ato_jax
from ato_jax import device, launch
from ato_jax.ops.linear_attention import features, triton
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.triton import config, few_rows, products, projected, walk
from tests import regimes

OP = "linear_attention"
# Small enough that a short sequence has several pieces, and a piece several tiles.
SMALL = {
    "piece_rows": 32,
    "run_rows": 0,
    "backward_run_rows": 0,
    "output_rows": 32,
    "dkv_rows": 32,
    "programs": 1,
    "state_block": 16,
    "output_block": 16,
    "dq_block": 16,
    "dkv_block": 16,
}
# A state stored for every run of two blocks, instead of carried.
STORED = SMALL | {"run_rows": 32, "backward_run_rows": 32, "pair_block": 8}
GPUS = {
    80: device.Device("gpu", "NVIDIA A100", (8, 0), 108, device.SHARED_MEMORY[8, 0]),
    90: device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0]),
}


def draw(*shape, dtype="float32", scale=1.0, seed=0):
    values = np.random.default_rng(seed + len(shape) * shape[-2]).normal(size=shape) * scale
    return jnp.asarray(values.astype(np.float32).astype(jnp.dtype(dtype)))


def check(
    T,
    S,
    H,
    G,
    D,
    V,
    dtype="float32",
    scale=1.0,
    layout="bthd",
    B=1,
    poisoned=False,
    config=SMALL,
    **options,
):
    """Both phases against the oracle; `poisoned` puts NaN beyond the lengths."""
    q_lengths, kv_lengths = options.get("q_lengths"), options.get("kv_lengths")
    if T == S:
        q_lengths = kv_lengths if q_lengths is None else q_lengths
        kv_lengths = q_lengths if kv_lengths is None else kv_lengths

    def array(length, heads, width, seed, real=None):
        values = draw(B, length, heads, width, dtype=dtype, scale=scale, seed=seed)
        if poisoned and real is not None:
            beyond = np.arange(length) >= np.asarray(real)[:, None]
            values = jnp.where(beyond[..., None, None], jnp.nan, values)
        return values if layout == "bthd" else jnp.swapaxes(values, 1, 2)

    wanted = numerics.oracle(
        OP,
        array(T, H, D, 1, q_lengths),
        array(S, G, D, 2, kv_lengths),
        array(S, G, V, 3, kv_lengths),
        layout=layout,
        **options,
    )
    spec = wanted.request.spec
    for phase in ("forward", "backward"):
        assert triton.unsupported(spec, phase) is None
    with device.interpret():
        found = numerics.run_backends(
            "triton",
            "triton",
            wanted,
            device=GPUS[90],
            forward_config=config,
            backward_config=config,
        )
    numerics.compare(found, wanted)


@pytest.mark.parametrize("T", [50, 55, 60, 90])
def test_sequences_have_several_pieces_of_several_chunks(T):
    spec = spec_of(16, "float32", True, T=T, B=1, H=1)
    config = dataclasses.replace(triton.default_config(spec, GPUS[90]), **SMALL)
    pieces = walk.plan(spec, config).pieces
    assert pieces.count > 1 and pieces.rows > config.output_block


# In float32: of odd sizes, below. Causal in float16: with gates, and at two scales in
# test_linear_attention.py.
@pytest.mark.parametrize(
    "dtype, causal", [("bfloat16", False), ("float16", False), ("bfloat16", True)]
)
def test_dtypes(dtype, causal):
    check(90, 90, 2, 1, 32, 32, dtype, causal=causal)


# One call, compiled once. In float32 below, unnormalised in test_linear_gates.py.
@pytest.mark.parametrize("scale", [None, 0.01, 30.0])
def test_a_state_stored_for_every_run(scale):
    """With states, and at scales without: beside them, q, k and v would hardly matter."""
    state, cotangents = LinearState(draw(2, 2, 32, 16), abs(draw(2, 2, 32)) + 1), None
    if scale is not None:
        state = jax.tree.map(jnp.zeros_like, state)
        cotangents = Outputs(draw(2, 75, 4, 16, dtype="bfloat16"), state)
    options = {"initial_state": state, "return_state": True, "cotangents": cotangents}
    sizes = (75, 75, 4, 2, 32, 16)
    check(*sizes, "bfloat16", scale or 1.0, B=2, causal=True, config=STORED, **options)


# Of fewer keys than queries: in test_linear_gates.py, with a decay.
def test_stored_runs_of_more_keys_than_queries():
    check(23, 70, 2, 2, 16, 16, causal=True, config=STORED, layout="bhtd")


def test_stored_runs_with_segments_and_lengths():
    """Of segments aligned step by step; those of T = S are in test_linear_gates.py."""
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (2, 60)), axis=1)
    options = {"q_segment_ids": jnp.asarray(ids[:, :41]), "kv_segment_ids": jnp.asarray(ids)}
    lengths = {"q_lengths": jnp.array([41, 17]), "kv_lengths": jnp.array([60, 17])}
    check(
        41, 60, 2, 1, 16, 16, B=2, causal=True, config=STORED, poisoned=True, **options, **lengths
    )


def test_stored_runs_late_in_a_long_float16_sequence():
    """1 / den lies where float16 has no numbers left: what is divided by it must not be held so."""
    earlier = 1e5
    state = LinearState(
        draw(1, 1, 32, 32, seed=7) * earlier, (jnp.abs(draw(1, 1, 32, seed=8)) + 1) * earlier
    )
    check(50, 50, 2, 1, 32, 32, "float16", causal=True, config=STORED, initial_state=state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dq_block": 24}, "dq_block=24 must divide the 32 rows"),
        ({"run_rows": 40}, "must divide the 40 rows"),
        ({"pair_block": 12}, "pair_block=12 must divide output_block=16"),
    ],
)
def test_blocks_that_would_leave_rows_over_are_refused(change, words):
    spec = spec_of(16, "float32", True, T=128, B=1, H=1)
    config = dataclasses.replace(triton.default_config(spec, GPUS[90]), **(STORED | change))
    with pytest.raises(ValueError, match=words):
        walk.plan(spec, config)


def test_odd_sizes_groups_and_the_other_layout():
    check(55, 55, 4, 2, 20, 33, layout="bhtd", B=2)


def test_odd_sizes_groups_and_the_other_layout_with_a_custom_feature_map():
    custom = {"feature_map": lambda x: jnp.tanh(x) + 2, "normalize": True}
    check(55, 55, 4, 2, 20, 33, layout="bhtd", B=2, causal=True, **custom)


# More keys, causal: in test_linear_gates.py, with a decay. Fewer, otherwise: there, with lengths.
@pytest.mark.parametrize("T, S, causal", [(20, 90, False), (90, 20, True)])
def test_queries_and_keys_of_different_lengths(T, S, causal):
    check(T, S, 2, 1, 16, 16, causal=causal)


# silu is not normalised. relu, causal: test_linear_attention.py.
@pytest.mark.parametrize("name", ["exp", "softplus", "silu", "relu2"])
def test_named_feature_maps(name):
    check(40, 40, 1, 1, 16, 16, feature_map=name)


# In float32: the gradient of the projection, below.
@pytest.mark.parametrize("causal", [False, True])
def test_projected_features_where_differences_bring_out_roundings(causal):
    favor = ato_jax.favor(jax.random.key(0), 128, 64)
    check(200, 200, 2, 1, 64, 64, "bfloat16", feature_map=favor, causal=causal)


def test_projected_features_with_a_state_stored_in_one_phase():
    """As by default: carried in the other. Unnormalised in the other layout, too, and in TF32."""
    favor = ato_jax.favor(jax.random.key(0), 40, 16)
    options = {"feature_map": favor, "causal": True, "return_state": True}
    options |= {"normalize": False, "layout": "bhtd"}
    check(75, 75, 4, 2, 16, 24, "float16", config=STORED | {"backward_run_rows": 0}, **options)


def test_each_phase_of_projected_features_has_its_own_rule():
    spec = dataclasses.replace(
        spec_of(64, "bfloat16", True),
        F=128,
        feature_map=features.FeatureMap("favor", True, lambda x, w: x, elementwise=False),
    )
    config = triton.default_config(spec, GPUS[90])
    # The backward is TF32. Up to 128 features states are stored; beyond it programs walk, with
    # tiles of few rows.
    assert config.run_rows > 0 and config.backward_run_rows > 0
    assert config.state_warps == 8
    spec = dataclasses.replace(spec, F=256)
    config = triton.default_config(spec, GPUS[90])
    assert config.run_rows > 0 and config.backward_run_rows == 0
    assert config.dq_block < config.output_block


def test_projected_features_beside_stored_states():
    """With the block sizes of a Hopper card: two runs of rows, and the last one in part."""
    favor = ato_jax.favor(jax.random.key(0), 128, 64)
    config = projected.STORED | {"run_rows": 128}
    check(200, 200, 1, 1, 64, 64, "bfloat16", feature_map=favor, causal=True, config=config)


def test_gradients_of_the_projection_and_of_what_it_maps():
    favor = ato_jax.favor(jax.random.key(0), 32, 16)
    cotangent, *qkv = (draw(1, 40, 2, 16, seed=seed) for seed in range(4))

    def loss(favor, qkv, implementation):
        with ato_jax.interpret():
            out = ato_jax.linear_attention(*qkv, feature_map=favor, implementation=implementation)
        return jnp.sum(out * cotangent)

    found, wanted = (
        jax.tree.leaves(jax.grad(loss, (0, 1))(favor, qkv, implementation))
        for implementation in ("triton", "reference")
    )
    for one, other in zip(found, wanted, strict=True):
        assert jnp.linalg.norm(one - other) <= 1e-5 * jnp.linalg.norm(other)


# Causal: of projected features, below. In float32: unnormalised, below.
def test_states_in_blocks():
    """Of which those of V do not divide it."""
    state = LinearState(draw(2, 1, 192, 301, seed=7), jnp.abs(draw(2, 1, 192, seed=8)) + 1)
    check(40, 40, 2, 1, 192, 301, "bfloat16", B=2, initial_state=state, return_state=True)


# Stored in bfloat16, where no program has the state as a whole: it is summed in blocks of V and of
# F, and read in parts, of which neither V nor F need be multiples.
def test_stored_states_in_parts():
    """V is wider than what is written may be: two calls, each of them in parts."""
    state = LinearState(draw(1, 1, 192, 300, seed=7), jnp.abs(draw(1, 1, 192, seed=8)) + 1)
    options = {"causal": True, "initial_state": state, "return_state": True, "layout": "bhtd"}
    check(35, 35, 2, 1, 192, 300, "bfloat16", config=STORED, **options)


def test_stored_states_in_parts_with_a_decay_both_ways():
    decay = -0.1 * jnp.abs(draw(1, 35, 1))
    check(35, 35, 2, 1, 256, 150, "bfloat16", config=STORED, decay=decay)


@pytest.mark.parametrize("D", [64, 256])
def test_weights_are_multiplied_as_if_hardly_rounded(D):
    """By two products, in a loop or not; with one of them the error is 2e-3."""
    w, rows = draw(32, 32), draw(32, 16).astype(jnp.bfloat16)
    spec = spec_of(D, "bfloat16", True)

    def kernel(w_ref, rows_ref, out_ref):
        zeros = jnp.zeros(out_ref.shape, jnp.float32)
        out_ref[...] = products.add_weighted_sum(spec, zeros, w_ref[...], rows_ref[...])

    shape = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    with device.interpret():
        found = launch.pallas_call(kernel, out_shape=shape)(w, rows)
    wanted = np.asarray(w, np.float64) @ np.asarray(rows, np.float64)
    assert np.linalg.norm(found - wanted) < 2e-5 * np.linalg.norm(wanted)


def test_where_values_are_cut():
    """On a large card, where states are stored, no sooner than what is written is too wide."""
    for D, V, dtype, capability, causal, count in (
        (256, 256, "bfloat16", 90, True, 1),
        (256, 512, "bfloat16", 90, True, 2),
        (128, 200, "bfloat16", 90, True, 1),
        (256, 256, "bfloat16", 80, True, 4),
        (256, 256, "bfloat16", 90, False, 4),
        (256, 256, "float16", 90, True, 4),
        (64, 256, "bfloat16", 90, True, 2),
    ):
        spec = spec_of(D, dtype, causal, V=V)
        config = triton.default_config(spec, GPUS[capability])
        for phase in ("forward", "backward"):
            found = triton.blocks_of_values(spec, config, phase)
            assert found == count, (D, V, dtype, capability, causal)


def test_the_widest_blocks_unnormalised_in_the_other_layout():
    check(33, 33, 2, 2, 256, 256, layout="bhtd", normalize=False)


def test_projected_features_in_blocks():
    favor = ato_jax.favor(jax.random.key(0), 200, 24)
    state = LinearState(draw(1, 2, 200, 80, seed=7), jnp.abs(draw(1, 2, 200, seed=8)) + 1)
    options = {"causal": True, "initial_state": state, "return_state": True}
    check(33, 33, 2, 2, 24, 80, "bfloat16", feature_map=favor, **options)


def test_causal_unnormalised_in_tf32():
    check(50, 50, 2, 2, 32, 32, precision="tf32", feature_map="identity", causal=True)


@pytest.mark.parametrize("scale", [0.01, 30.0])
@pytest.mark.parametrize("causal", [False, True])
def test_scales(scale, causal):
    check(90, 90, 2, 1, 32, 32, "bfloat16", scale, causal=causal)


def custom(function, text, parameters=0):
    return features.FeatureMap("custom", False, function, text, parameters=parameters)


def on_the_host(x):
    return jax.pure_callback(np.exp, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def compare(q, k, v, **options):
    wanted = numerics.oracle(OP, q, k, v, **options)
    with ato_jax.interpret():
        numerics.compare(numerics.run_backends("triton", "triton", wanted), wanted)


def test_features_of_either_sign_are_read_in_two_parts():
    """Rounding them too would be the fourth of four roundings, at the limit."""
    q, k, v = (
        draw(1, 128, 2, 32, dtype="bfloat16", scale=scale, seed=seed)
        for seed, scale in enumerate((0.1, 0.1, 1.0))
    )
    compare(q, k, v, feature_map="silu")


@pytest.mark.parametrize(
    "seed, causal, decay", [(12, False, None), (9, True, None), (9, True, -0.01)]
)
def test_the_gradient_of_k_sum_where_keys_are_alike(seed, causal, decay):
    """It is one sum of terms of either sign in all of its numbers."""
    generator = np.random.default_rng(seed)
    q, k = (jnp.asarray(0.02 * generator.normal(size=(1, 40, 1, 16)), "bfloat16") for _ in "qk")
    sums = generator.uniform(0.2, 1.0, size=(1, 1, 16, 17))
    state = LinearState(*(jnp.asarray(x, jnp.float32) for x in (sums[..., :16], sums[..., 16])))
    options = {} if decay is None else {"decay": jnp.array([decay])}
    compare(q, k, jnp.ones_like(k), initial_state=state, causal=causal, **options)


def test_reasons():
    base = spec_of(64, "bfloat16", causal=True)
    for change, word in (
        ({"decay": "channel", "segments": "self"}, "segments"),
        ({"D": 512, "F": 512, "V": 64}, "D=512"),
        ({"D": 128, "F": 128, "V": 1024}, "V=1024"),
        ({"D": 16, "F": 16, "V": 1024}, "V=1024"),
        ({"D": 512, "F": 512, "V": 16}, "D=512"),
        ({"D": 32, "F": 32, "V": 512, "decay": "channel"}, "V = 256"),
        ({"feature_map": custom(lambda x, w: x * w, "a product", 1)}, "arrays"),
        ({"feature_map": custom(jax.lax.digamma, "digamma")}, "digamma"),
        ({"feature_map": custom(on_the_host, "a callback")}, "no derivative: ValueError: Pure"),
    ):
        assert word in triton.unsupported(dataclasses.replace(base, **change), "forward")


def test_one_query_whose_weight_is_all_of_dv():
    """Its rounding to bfloat16 does not average out."""
    random = np.random.default_rng(34)
    q, k, v = (jnp.asarray(random.normal(size=(1, 1, 1, 16)), jnp.bfloat16) for _ in range(3))
    state = LinearState(jnp.zeros((1, 1, 16, 16)), jnp.ones((1, 1, 16)))
    compare(q, k, v, causal=True, initial_state=state)


@pytest.mark.parametrize("seed", [9, 12])
def test_one_step_that_reads_a_state(seed):
    """The gradient of the decay is one sum, whose terms may cancel."""
    q, k, v = (
        draw(1, 1, heads, 32, dtype="bfloat16", seed=100 * seed + number)
        for number, heads in enumerate((2, 1, 1))
    )
    kv = np.random.default_rng(seed).normal(size=(1, 1, 32, 32))
    state = LinearState(jnp.asarray(kv, jnp.float32), jnp.ones((1, 1, 32)))
    options = {"feature_map": "relu2", "normalize": False, "causal": True}
    compare(q, k, v, decay=jnp.array([-0.1]), initial_state=state, **options)


def test_two_steps_of_features_of_either_sign():
    """Three weights are all of out and dv: off by 4.2e-3 and 6.6e-3 with factors in bfloat16."""
    compare(*signed_features(2, 2, seed=14), feature_map="silu", scale=1.0, causal=True)


def test_one_step_whose_weight_cancels():
    """One weight is all of out and dv, and too small for TF32's factors."""
    compare(*signed_features(1, 1, seed=14), feature_map="silu", scale=1.0, causal=True)


def test_one_short_head_whose_decay_has_a_gradient_that_cancels():
    """Too small a sum for TF32's factors."""
    q, k, v = signed_features(16, 16, seed=359)
    compare(q, k, v, feature_map="silu", causal=True, decay=jnp.array([-0.05]))


def test_one_head_whose_decay_has_a_gradient_that_cancels():
    q, k, v = signed_features(80, 80, seed=13)
    compare(q, k, v, feature_map="silu", causal=True, decay=jnp.array([-0.05]))


def test_one_head_whose_first_queries_see_nothing():
    """Their rows of zeros make the root mean square row small, beside which the others count."""
    q, k, v = signed_features(320, 40, seed=18)
    compare(q, k, v, feature_map="silu", causal=True, decay=jnp.array([-14.0]))


def test_decays_from_a_segment_to_queries_far_behind_it():
    """exp of -45 or so is in all weights: exponents that were rounded cost 3e-6 (budget 2e-6)."""
    q, k, v = (draw(1, size, 1, 16, seed=seed) for size, seed in ((3, 0), (200, 10), (200, 20)))
    keys = (jnp.arange(200) >= 8).astype(int)[None]
    ids = {"q_segment_ids": jnp.zeros((1, 3), int), "kv_segment_ids": keys}
    decay = -jnp.asarray(np.random.default_rng(0).uniform(0, 0.5, (1, 200, 1)), jnp.float32)
    compare(q, k, v, causal=True, decay=decay, **ids)


def test_a_segment_of_few_queries():
    """Keys see 7 of 89 queries, whose terms of dk nearly cancel: off by 1.2e-2 with factors in
    bfloat16."""
    q, k, v = (
        draw(1, size, 1, width, dtype="bfloat16", scale=scale, seed=seed)
        for seed, (size, width, scale) in enumerate(
            ((89, 64, 0.01), (221, 64, 0.01), (221, 8, 1.0))
        )
    )
    options = {
        "feature_map": "softplus",
        "normalize": False,
        "q_segment_ids": (jnp.arange(89) >= 7).astype(int)[None],
        "kv_segment_ids": (jnp.arange(221) >= 60).astype(int)[None],
        "kv_lengths": jnp.array([60]),
    }
    request, _ = numerics.prepare(OP, q, k, v, **options)
    cotangents = numerics.draw_cotangents(OP, request)
    do = cotangents.out.astype(jnp.float32)
    do = do.at[:, 6].set(0.5 * do[:, 6] - do[:, :6].sum(1)).astype(jnp.bfloat16)
    wanted = numerics.oracle(OP, q, k, v, cotangents=cotangents._replace(out=do), **options)
    with ato_jax.interpret():
        numerics.compare(numerics.run_backends("triton", "triton", wanted), wanted)


def signed_features(T, S, seed):
    """bfloat16 q, k and v of one head, whose q . k cancels; small, so that silu(x) is about x/2."""
    return (
        draw(1, length, 1, 16, dtype="bfloat16", scale=scale, seed=100 * seed + number)
        for number, (length, scale) in enumerate(((T, 0.01), (S, 0.01), (S, 1.0)))
    )


@pytest.mark.parametrize("causal", [False, True])
def test_few_rows_beside_a_state_that_no_program_holds(causal):
    q, k, v = (draw(1, 3, 1, 256, dtype="bfloat16", seed=seed) for seed in range(3))
    compare(q, k, v, causal=causal)


def test_one_decay_that_cancels_in_more_than_some_rows():
    """In bfloat16 the gradient is 7.8e-2 off: it happens to be a small part of the usual one."""
    numbers = np.random.default_rng(8)
    shapes = (257, 8), (257, 1), (257, 1)
    q, k, v = (jnp.asarray(numbers.normal(size=(1, *size, 8)), jnp.bfloat16) for size in shapes)
    decay = jnp.asarray(-0.1 * numbers.uniform(size=1), jnp.float32)
    do = jnp.asarray(numbers.normal(size=(1, 257, 8, 8)), jnp.bfloat16)
    assert 257 * 8 > few_rows.SOME_ROWS
    options = {"feature_map": "silu", "normalize": False, "decay": decay}
    request, _ = numerics.prepare(OP, q, k, v, **options)
    cotangents = numerics.draw_cotangents(OP, request)._replace(out=do)
    wanted = numerics.oracle(OP, q, k, v, cotangents=cotangents, **options)
    with ato_jax.interpret():
        numerics.compare(numerics.run_backends("triton", "triton", wanted), wanted)


def test_which_calls_are_multiplied_finer_than_their_dtype():
    plain = spec_of(64, "bfloat16", True, T=few_rows.FEW_ROWS, B=1, H=1)
    signed = dataclasses.replace(plain, feature_map=features.NAMED["silu"], normalize=False)
    by_head = dataclasses.replace(plain, decay="head")
    half = dataclasses.replace(plain, dtype="float16")
    few = few_rows.FEW_HEADS
    longer, longest = ({"T": rows, "S": rows} for rows in (few_rows.SOME_ROWS, 4096))
    for spec, wanted in (
        (plain, ("tf32", "tf32")),
        (dataclasses.replace(plain, T=few_rows.EXACT_QUERIES), ("exact", "exact")),
        (by_head, ("tf32", "exact")),
        (dataclasses.replace(by_head, causal=False), ("tf32", "exact")),
        (dataclasses.replace(signed, decay="channel"), ("tf32", "tf32")),
        (dataclasses.replace(plain, B=2), (None, None)),
        (dataclasses.replace(plain, S=few_rows.FEW_ROWS + 1), (None, None)),
        (half, (None, None)),
        (dataclasses.replace(half, T=few_rows.EXACT_QUERIES), ("exact", "exact")),
        (dataclasses.replace(half, decay="head"), (None, "exact")),
        (dataclasses.replace(half, initial_state=True), (None, "exact")),
        (dataclasses.replace(half, decay="head", initial_state=True, **longer), (None, None)),
        (dataclasses.replace(signed, **longer), ("tf32", "tf32")),
        (dataclasses.replace(by_head, **longer), (None, "tf32")),
        (dataclasses.replace(signed, decay="channel", **longer), (None, None)),
        (dataclasses.replace(plain, segments="cross", **longer), ("tf32", "tf32")),
        (dataclasses.replace(plain, q_lengths=True, **longer), ("tf32", "tf32")),
        (dataclasses.replace(plain, kv_lengths=True, decay="channel", **longer), (None, None)),
        (dataclasses.replace(plain, segments="self", **longest), (None, None)),
        (dataclasses.replace(signed, **longest), (None, None)),
        (dataclasses.replace(by_head, **longest), (None, "tf32")),
        (dataclasses.replace(by_head, H=few, G=few, **longest), (None, "tf32")),
        (dataclasses.replace(by_head, H=few + 1, G=few + 1, **longest), (None, None)),
    ):
        for phase, precision in zip(("forward", "backward"), wanted, strict=True):
            found = few_rows.finer(spec, phase)
            if precision is None:
                assert found is spec
            else:
                assert (found.dtype, found.precision) == ("float32", precision)


def test_the_gradient_of_a_steep_decay_of_segments():
    """exp(-12) of the last key's weight, which has no decay, is all that the gradient sums."""
    q, k, v = (draw(1, size, 1, 16, seed=size) for size in (1, 40, 40))
    ids = {"q_segment_ids": jnp.zeros((1, 1), int), "kv_segment_ids": jnp.zeros((1, 40), int)}
    compare(q, k, v, feature_map="identity", causal=True, decay=jnp.array([-12.0]), **ids)


def spec_of(D, dtype, causal, T=16384, B=4, H=8, V=None):
    elu1, V = features.NAMED["elu1"], V or D
    return LinearAttentionSpec(B, T, T, H, H, D, D, V, dtype, elu1, True, 1.0, 1e-6, causal=causal)


def phases(spec, capability):
    """Each phase as a function of arrays, and the arrays' shapes."""
    config = triton.default_config(spec, GPUS[capability])
    shape, values = (
        jax.ShapeDtypeStruct((spec.B, spec.T, spec.H, width), spec.dtype)
        for width in (spec.D, spec.V)
    )
    decay = jax.ShapeDtypeStruct((spec.G,), jnp.float32) if spec.decay == "head" else None
    inputs = Inputs(shape, shape, values, decay=decay)

    def forward(inputs):
        return triton.forward(spec, config, inputs)

    def backward(inputs, outputs, do):
        return triton.backward(spec, config, Residuals(inputs, outputs), Outputs(do, outputs.state))

    outputs = jax.eval_shape(forward, inputs)
    return (forward, inputs), (backward, inputs, outputs, values)


def compiled(spec, capability):
    """What the kernels of both phases became, by name."""
    return {
        kernel.name.removeprefix("linear_attention_"): kernel
        for phase in phases(spec, capability)
        for kernel in aot.compile_function(*phase, capabilities=(capability,))
    }


def check_shared_memory(spec, capability):
    """That of all kernels, whatever they spill: what that is takes as long again to find out."""
    for phase in phases(spec, capability):
        asked = aot.shared_bytes(*phase, capability=capability)
        assert 1024 < max(asked.values()) <= aot.SHARED_LIMIT[capability], asked


@aot.requires_triton
@pytest.mark.parametrize(
    "D, dtype, capability, causal",
    [
        (64, "bfloat16", 90, True),
        (64, "bfloat16", 90, False),
        (128, "bfloat16", 90, False),  # causal in test_linear_offsets.py
        (256, "bfloat16", 80, True),
        (256, "bfloat16", 90, True),
        (256, "bfloat16", 90, False),
        (256, "float16", 80, False),
        (256, "float16", 90, True),
    ],
)
def test_default_tiles_fit_the_gpu(D, dtype, capability, causal):
    spec = spec_of(D, dtype, causal)
    # The walks of the backward hold two states: larger tiles that spill were faster there.
    # On Ampere, whose tensor cores read all factors from registers, nothing was measured.
    if causal or capability == 80 or dtype == "float16":
        return check_shared_memory(spec, capability)
    for name, kernel in compiled(spec, capability).items():
        assert kernel.fits, kernel
        # Beside a state of D = 256, the largest tiles that tensor cores want spill a little.
        assert kernel.spill_stores <= (1024 if D == 256 else 0), (name, kernel)


@aot.requires_triton
@pytest.mark.parametrize(
    "rows, D, capability", [(128, 128, 80), (128, 128, 90), (2048, 64, 90), (2048, 128, 80)]
)
def test_tiles_of_few_rows_fit_the_gpu(rows, D, capability):
    """Their factors are float32, and the arrays that these are loaded from bfloat16."""
    spec = spec_of(D, "bfloat16", True, T=rows, B=1, H=1)
    check_shared_memory(dataclasses.replace(spec, decay="head"), capability)


@aot.requires_triton
@pytest.mark.parametrize(
    "D, V, dtype, capability, causal",
    [
        (16, 512, "bfloat16", 80, True),
        (16, 512, "bfloat16", 90, False),
        (16, 512, "float16", 90, True),
        (64, 256, "bfloat16", 90, False),
        (64, 256, "float16", 80, True),
        (128, 128, "float16", 80, True),
    ],
)
def test_default_tiles_of_wide_values_and_of_small_gpus_fit(D, V, dtype, capability, causal):
    for name, kernel in compiled(spec_of(D, dtype, causal, V=V), capability).items():
        assert kernel.fits, kernel
        assert kernel.spill_stores <= 2048, (name, kernel)


def test_block_sizes_are_those_of_the_golden_file():
    """`python -m tests.regimes` writes it anew."""
    assert regimes.golden() == regimes.GOLDEN.read_text()


def test_every_regime_is_in_the_golden_file():
    """A row of the table that no call reaches would never be seen to change."""
    assert regimes.regimes() == set(config.REGIMES)
