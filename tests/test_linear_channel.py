"""Gates per step and channel in the Triton kernels, interpreted, against the float64 reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest

from ato_jax import device
from ato_jax.ops.linear_attention import api, triton
from ato_jax.ops.linear_attention.spec import LinearState
from ato_jax.ops.linear_attention.triton import scan
from ato_jax.triton import work

OP = "linear_attention"
# Small enough that a short sequence has several pieces, and a piece several chunks.
SMALL = {
    "piece_rows": 64,
    "programs": 1,
    "state_block": 32,
    "output_block": 32,
    "dq_block": 32,
    "dkv_block": 32,
}
GPU = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])


def draw(*shape, dtype="float32", scale=1.0, seed=0):
    """Converted by NumPy, since JAX would compile a program for each shape."""
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(values.astype(np.float32).astype(jnp.dtype(dtype)))


def draw_gates(kind, *shape):
    """`mild` ones are parted at once in every chunk, `steep` ones level by level in most.

    `mixed` are mild but for some steps of the last piece, one of whose chunks has no steep one. A
    number is that of all.
    """
    if isinstance(kind, float):
        return jnp.full(shape, kind, jnp.float32)
    generator = np.random.default_rng(9)
    gates = -np.abs(generator.normal(size=shape)) / 16
    if kind == "none":
        gates = np.zeros(shape)
    if kind in ("steep", "mixed"):
        choice = generator.uniform(size=shape)
        if kind == "mixed":
            choice[:, :70] = choice[:, 90:] = 1.0
        for value, share in ((0.0, 0.3), (-1e-3, 0.2), (-50.0, 0.1), (-np.inf, 0.03)):
            gates[choice < share] = value
    return jnp.asarray(gates, jnp.float32)


def check(
    T, S, H, G, D, V, dtype="float32", gates="mild", scale=1.0, layout="bthd", B=1, **options
):
    q, k, v = (
        draw(B, length, heads, width, dtype=dtype, scale=scale, seed=width + heads)
        for length, heads, width in ((T, H, D), (S, G, D), (S, G, V))
    )
    decay = draw_gates(gates, B, S, G, D)
    if layout == "bhtd":
        q, k, v, decay = (jnp.swapaxes(array, 1, 2) for array in (q, k, v, decay))
    wanted = numerics.oracle(OP, q, k, v, decay=decay, causal=True, layout=layout, **options)
    spec = wanted.request.spec
    for phase in ("forward", "backward"):
        assert triton.unsupported(spec, phase) is None
    with device.interpret():
        found = numerics.run_backends(
            "triton", "triton", wanted, device=GPU, forward_config=SMALL, backward_config=SMALL
        )
    numerics.compare(found, wanted)


def test_sequences_have_several_pieces_of_several_chunks():
    pieces = work.cut(110, 1, SMALL["piece_rows"], SMALL["output_block"], SMALL["programs"])
    assert pieces.count > 1 and pieces.rows > SMALL["output_block"]
    assert pieces.rows <= 70  # before which `mixed` gates are mild


# As wide as chunks are long, where the denominators are one sum; narrower ones are below.
@pytest.mark.parametrize("gates", ["mild", "steep", "mixed", "none"])
def test_bfloat16(gates):
    check(110, 110, 1, 1, 32, 32, "bfloat16", gates)


def test_gates_alike_in_bfloat16():
    """Of one that lies between two bfloat16 numbers, the rounding would be that of all steps."""
    q, k, v = (abs(draw(1, 110, 1, 16, dtype="bfloat16", seed=seed)) for seed in range(3))
    decay = jnp.full(k.shape, -(1 + 2.0**-8) / 16 / np.log2(np.e), jnp.float32)
    wanted = numerics.oracle(OP, q, k, v, decay=decay, causal=True, feature_map="identity")
    spec = wanted.request.spec
    config = dataclasses.replace(triton.default_config(spec, GPU), **SMALL)
    with device.interpret():
        outputs = jax.jit(functools.partial(triton.forward, spec, config))(wanted.request.inputs)
    out = numerics.users_outputs(OP, wanted.request, outputs)["out"]
    numerics.check("out", out, wanted.exact["out"], dtype="bfloat16")


# What gates of -20 leave is less than the rounding of what they are no part of.
@pytest.mark.parametrize("gates", ["mild", "steep", -20.0])
def test_odd_sizes_groups_and_the_other_layout(gates):
    check(60, 110, 4, 2, 20, 33, gates=gates, layout="bhtd", B=2)


# Ahead of the keys lies a whole piece.
@pytest.mark.parametrize("gates", ["mild", "steep", -20.0])
def test_fewer_keys_than_queries_in_float16(gates):
    check(150, 80, 2, 1, 16, 16, "float16", gates)


def test_unnormalised_in_tf32():
    check(50, 50, 1, 1, 16, 32, precision="tf32", feature_map="identity")


@pytest.mark.parametrize("gates", ["mild", "steep"])
@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_scales(scale, gates):
    check(110, 110, 1, 1, 32, 32, "bfloat16", gates, scale)


def test_strong_gates_before_the_cotangent_of_a_state():
    """Which meets the last key without a gate: far more than what the gates leave of the others."""
    options = {"feature_map": "identity", "return_state": True}
    check(110, 110, 1, 1, 16, 16, gates=-16.0, **options)


# Of so many features that the forward has one kernel for mild and steep pieces.
@pytest.mark.parametrize("gates", ["mild", "steep"])
def test_states_in_and_out(gates):
    state = LinearState(draw(1, 1, 72, 16, seed=7), jnp.abs(draw(1, 1, 72, seed=8)) + 1)
    check(50, 50, 2, 1, 72, 16, gates=gates, initial_state=state, return_state=True)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("decayed, edges", [(None, False), (3, False), (4, False), (4, True)])
def test_scan(decayed, edges, reverse):
    """Against a loop; `decayed` is the decays' number of axes, `edges` are factors there."""
    B, G, P, V, width = 1, 2, 3, 20, 16
    kv, k_sum = draw(B, G, P, V, width), draw(B, G, P, width)
    start = draw(B, G, V, width, seed=1), draw(B, G, width, seed=2)
    decay = None if decayed is None else -jnp.abs(draw(*(B, G, P, width)[:decayed], seed=3))
    factors = {}
    if edges:
        factors = {"adds": draw(B, G, P, width, seed=4), "reads": draw(B, G, P + 1, width, seed=5)}
    with device.interpret():
        keeps = None if decay is None else jnp.exp(decay)
        found = scan.scan_states((kv, k_sum), start, keeps, reverse=reverse, **factors)
    if edges:
        kv, k_sum = kv * factors["adds"][:, :, :, None], k_sum * factors["adds"]
    keep = jnp.ones((B, G, P, width))
    if decay is not None:
        keep = keep * jnp.exp(decay.reshape(B, G, P, -1))
    order = range(P - 1, -1, -1) if reverse else range(P)
    states = [start]
    for p in order:
        kv_before, k_sum_before = states[-1]
        factor = keep[:, :, p]
        after = kv_before * factor[:, :, None] + kv[:, :, p], k_sum_before * factor + k_sum[:, :, p]
        states.append(after)
    end = states[-1][0]
    states = states[::-1] if reverse else states
    if edges:
        reads = [factors["reads"][:, :, edge] for edge in range(P + 1)]
        states = [
            (kv * read[:, :, None], k_sum * read)
            for read, (kv, k_sum) in zip(reads, states, strict=True)
        ]
    for part, array in enumerate(found[:2]):
        wanted = jnp.stack([state[part] for state in states], axis=2)
        np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.end_kv, end, rtol=1e-5, atol=1e-6)


def test_reasons():
    array = jnp.zeros((1, 32, 1, 16))
    spec = api.prepare(array, array, array, decay=array, causal=True).spec
    for change, word in (
        ({"causal": False}, "causal"),
        ({"segments": "self"}, "segments"),
        ({"q_lengths": True}, "lengths"),
    ):
        assert word in triton.unsupported(dataclasses.replace(spec, **change), "forward")


def test_outputs_behind_steep_decays_round_finely() -> None:
    """Weak decays but for one in 1000, so that each run of 128 rows is steep, and outputs are read
    of states: of q^, k^, the state and the output, roundings of q^ are multiplied, too."""
    T, D = 512, 128
    generator = np.random.default_rng(6)
    decay = -0.01 * np.abs(generator.standard_normal((1, T, 1, D), np.float32))
    decay[generator.random(decay.shape) < 1e-3] = -50
    q, k, v = (draw(1, T, 1, D, dtype="bfloat16", seed=seed) for seed in range(3))
    options = {"decay": jnp.asarray(decay), "causal": True, "feature_map": "identity"}
    wanted = numerics.oracle(OP, q, k, v, **options)
    spec = wanted.request.spec
    config = triton.default_config(spec, GPU)
    with device.interpret():
        outputs = jax.jit(functools.partial(triton.forward, spec, config))(wanted.request.inputs)
    out = numerics.users_outputs(OP, wanted.request, outputs)["out"]
    facts = {"dtype": "bfloat16", "ideal": lambda: wanted.ideal["out"]}
    numerics.check("out", out, wanted.exact["out"], **facts)
