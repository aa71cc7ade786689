"""Linear attention in plain JAX: queries off the keys' timeline, derivatives, memory, one step."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ato_jax.device import Device
from ato_jax.ops.linear_attention import reference, xla
from ato_jax.ops.linear_attention.api import linear_attention, prepare
from ato_jax.ops.linear_attention.spec import Inputs, LinearState
from ato_jax.ops.linear_attention.step import linear_attention_step
from tests import numerics

SMALL_CHUNKS = {"chunk": 4, "wide_chunk": 8}


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)


def gates(*shape: int) -> jax.Array:
    """Some decays of 0, some strong, most weak."""
    draw = np.random.default_rng(shape)
    return jnp.asarray(-draw.choice([0, 0.05, 0.3, 50], p=[0.2, 0.4, 0.3, 0.1], size=shape), "f4")


def qkv(T: int, S: int) -> list[jax.Array]:
    return [normal(2, T, 4, 3), normal(2, S, 2, 3), normal(2, S, 2, 5)]


# Queries whose run lies before them, around them, behind them and nowhere; in no order.
QUERY_RUNS = np.array([[7] * 4 + [3] * 9 + [2] * 5 + [9] + [7] * 2, [0] * 15 + [4] * 6])
KEY_RUNS = np.array([[3] * 3 + [1] * 5 + [7] * 7 + [2] * 6, [0] * 21])
STATE = LinearState(normal(2, 2, 3, 5), jnp.abs(normal(2, 2, 3)))


@pytest.mark.parametrize(
    ("T", "options"),
    [
        (21, {"causal": True, "decay": gates(2, 21, 2, 3), "initial_state": STATE}),
        (21, {"decay": gates(2, 21, 2), "initial_state": STATE, "kv_lengths": [13, 21]}),
        (21, {"decay": gates(2, 21, 2, 3), "q_lengths": [21, 9], "kv_lengths": [21, 0]}),
        (8, {"causal": True, "decay": gates(2, 21, 2)}),
        (8, {"causal": True, "q_lengths": [3, 8], "kv_lengths": [13, 21]}),
        (8, {"kv_lengths": [13, 0], "initial_state": STATE}),
    ],
)
def test_queries_with_runs_of_their_own(T: int, options: dict[str, Any]) -> None:
    options = options | {"q_segment_ids": QUERY_RUNS[:, :T], "kv_segment_ids": KEY_RUNS}
    if "initial_state" in options:
        options["return_state"] = True
    options = {
        name: np.array(value) if name.endswith("lengths") else value
        for name, value in options.items()
    }
    wanted = numerics.oracle("linear_attention", *qkv(T, 21), **options)
    numerics.compare(
        numerics.run_backends(
            "xla", "xla", wanted, forward_config=SMALL_CHUNKS, backward_config=SMALL_CHUNKS
        ),
        wanted,
    )


@pytest.mark.parametrize("per_step", [False, True])
def test_a_strong_decay_among_queries_of_another_length(per_step: bool) -> None:
    """Weights without a decay, of queries right at their keys, are no part of its gradient."""
    q, k, v = normal(1, 60, 1, 32), normal(1, 40, 1, 32), normal(1, 40, 1, 32)
    decay = jnp.full((1, 40, 1) if per_step else (1,), -12.0)
    lengths = {"q_lengths": jnp.array([55]), "kv_lengths": jnp.array([34])}
    options: dict[str, Any] = {"feature_map": "identity", "decay": decay, "causal": True}
    wanted = numerics.oracle("linear_attention", q, k, v, **options, **lengths)
    numerics.compare(numerics.run_backends("xla", "xla", wanted), wanted)


@pytest.mark.parametrize(("shape", "seed"), [((1, 120, 2, 1), 6), ((1, 120, 2, 16), 2)])
def test_a_state_that_is_read_from_far(shape: tuple[int, ...], seed: int) -> None:
    """Its gradient is that of queries behind a sum of decays near -60."""
    B, T, G, _ = shape
    draw = np.random.default_rng(seed)
    q, k, v = (draw.normal(size=(B, T, G, width)) for width in (16, 16, 8))
    q[:, : 90 + seed] = 0
    g, decay = draw.normal(size=v.shape), draw.uniform(-1, -0.3, size=shape)
    q, k, v, g, decay = (array.astype("f4") for array in (q, k, v, g, decay))

    def call(state: LinearState) -> Any:
        return linear_attention(
            *(q, k, v), feature_map="identity", normalize=False, scale=1.0, causal=True,
            decay=decay if shape[-1] > 1 else decay[..., 0], initial_state=state,
            implementation="xla",
        )  # fmt: skip

    _, pull = jax.vjp(call, LinearState(jnp.zeros((B, G, 16, 8)), jnp.zeros((B, G, 16))))
    factors = np.exp(np.cumsum(decay.astype("f8"), axis=1))
    exact = np.einsum("btgd,btgv->bgdv", q.astype("f8") * factors, g.astype("f8"))
    numerics.check("dstate_kv", pull(jnp.asarray(g))[0].kv, exact, dtype="float32")


@pytest.mark.parametrize(("kind", "causal"), [("step", False), ("channel", True)])
def test_forward_mode_and_second_order(kind: str, causal: bool) -> None:
    """Every derivative is that of the definition, decay's included."""
    decay = 0.1 * gates(2, 9, 2, 3) if kind == "channel" else 0.1 * gates(2, 9, 2)
    request = prepare(*qkv(9, 9), decay=decay, causal=causal)
    tangent = jax.tree.map(lambda leaf: normal(*leaf.shape), request.inputs)

    def second(backend: Any, config: Any) -> Any:
        def loss(inputs: Inputs) -> jax.Array:
            return jnp.sum(jnp.sin(backend.forward(request.spec, config, inputs).out))

        return jax.jit(lambda inputs: jax.jvp(jax.grad(loss), (inputs,), (tangent,)))

    found = second(xla, xla.Config(**SMALL_CHUNKS))(request.inputs)
    wanted = second(reference, None)(request.inputs)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize(
    ("kind", "causal"),
    [(None, True), (None, False), ("step", True), ("step", False), ("channel", True)],
)
def test_memory_and_work_are_linear(kind: str | None, causal: bool) -> None:
    """In the gradient, too, and of the order of the inputs."""

    def cost(T: int) -> tuple[int, float]:
        sizes = {"step": (1, T, 2), "channel": (1, T, 2, 32)}
        shapes = [(1, T, 2, 32)] * 3 + ([sizes[kind]] if kind else [])

        def gradient(*arrays: jax.Array) -> Any:
            def loss(q: Any, k: Any, v: Any, decay: Any = None) -> jax.Array:
                request = prepare(q, k, v, decay=decay, causal=causal)
                config = xla.default_config(request.spec, Device("cpu"))
                return jnp.sum(jnp.sin(xla.forward(request.spec, config, request.inputs).out))

            return jax.grad(loss, range(len(arrays)))(*arrays)

        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        compiled = jax.jit(gradient).lower(*arrays).compile()
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes, memory.argument_size_in_bytes

    (short, _), (long, inputs) = cost(2048), cost(8192)
    assert long <= 4.1 * short
    assert long <= 8 * inputs


def test_step_takes_every_form_of_decay() -> None:
    q, k, v = normal(2, 4, 3), normal(2, 2, 3), normal(2, 2, 5)
    decay = gates(2, 2, 3)
    shared = jnp.broadcast_to(decay[:1, :, :1], decay.shape)
    wanted = linear_attention_step(q, k, v, STATE, decay=shared)
    for form in (shared[0, :, 0], shared[..., 0], shared):
        found = linear_attention_step(q, k, v, STATE, decay=form)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, wanted)
    of_one = jax.tree.map(lambda array: array[0], (q, k, v, STATE))
    for form in (shared[0, :, 0], shared[0]):
        out, state = linear_attention_step(*of_one, decay=form)
        np.testing.assert_allclose(out, wanted[0][0], rtol=1e-6)
        np.testing.assert_allclose(state.kv, wanted[1].kv[0], rtol=1e-6)


def test_step_equals_the_whole() -> None:
    q, k, v = qkv(1, 1)
    for options in ({}, {"normalize": False, "scale": 0.3}, {"feature_map": "silu"}):
        out, state = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], STATE, **options)
        wanted, last = linear_attention(
            q, k, v, initial_state=STATE, return_state=True, causal=True, **options
        )
        np.testing.assert_allclose(out, wanted[:, 0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.kv, last.kv, rtol=1e-5, atol=1e-6)
    half = [array[:, 0].astype(jnp.bfloat16) for array in (q, k, v)]
    out, state = linear_attention_step(*half, STATE)
    assert out.dtype == jnp.bfloat16 and state.kv.dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": normal(2, 1, 4, 3)}, r"q must be \[B, H, D\] or \[H, D\]"),
        ({"q": normal(2, 3, 3)}, "multiple of k's heads G, got H=3, G=2"),
        ({"k": normal(2, 2, 4)}, r"k must be \[B, G, D\] with B=2, D=3"),
        ({"v": normal(2, 2, 5).astype(jnp.float16)}, "v must have q's dtype"),
        ({"state": None}, "state must be a LinearState"),
        ({"state": LinearState(STATE.kv[:, :, :2], STATE.k_sum)}, r"state.kv must be \[B, G, F"),
        ({"decay": gates(2, 3)}, r"decay must be \[B, G\]"),
        ({"decay": gates(2, 2, 3, 1)}, r"decay must be \[G\], \[B, G\] or \[B, G, D\]"),
        ({"decay": jnp.ones(2)}, "decay is the natural log"),
        ({"eps": 0}, "eps must be positive"),
        ({"scale": 2.0}, "scale must be None"),
        ({"feature_map": "tanh"}, "feature_map must be one of"),
    ],
)
def test_step_refuses(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": normal(2, 4, 3), "k": normal(2, 2, 3), "v": normal(2, 2, 5), "state": STATE
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        linear_attention_step(**(arguments | changes))


@pytest.mark.parametrize("causal", [False, True])
def test_an_id_that_returns_beside_lengths_that_differ(causal: bool) -> None:
    """Queries and keys share the segments, so a query's is the one at its own place: not the last
    run of its id among the keys, which padding may have cut off."""
    generator = np.random.default_rng(0)
    q, k, v = (jnp.asarray(generator.normal(size=(1, 6, 1, 4)), jnp.float32) for _ in range(3))
    ids = jnp.asarray([[7, 7, 3, 3, 7, 7]])
    lengths = dict(q_lengths=jnp.asarray([6]), kv_lengths=jnp.asarray([4]))
    found = linear_attention(q, k, v, segment_ids=ids, causal=causal, **lengths)
    phi_q, phi_k = (np.asarray(jax.nn.elu(x) + 1)[0, :, 0] for x in (q, k))
    runs = np.asarray([0, 0, 1, 1, 2, 2])
    weights = phi_q @ phi_k.T * (runs[:, None] == runs)
    weights[:, 4:] = 0
    if causal:  # the last query sees the last key
        weights = np.where(np.arange(6) <= np.arange(6)[:, None] - 2, weights, 0)
    normaliser = np.maximum(weights.sum(1, keepdims=True), 1e-6)
    wanted = weights @ np.asarray(v)[0, :, 0] / normaliser
    np.testing.assert_allclose(found[0, :, 0], wanted, 1e-5, 1e-6)


def precisions(T: int, S: int) -> set[str]:
    """How XLA multiplies a bfloat16 call of two heads in both passes."""
    q, k, v = (jnp.ones((1, rows, 2, 8), "bfloat16") for rows in (T, S, S))

    def loss(*arrays: jax.Array) -> jax.Array:
        return linear_attention(*arrays, feature_map="silu", implementation="xla").sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v))
    assert "dot_general[" in jaxpr
    return set(re.findall(r"Precision\.(\w+)", jaxpr))


def test_few_rows_are_multiplied_exactly():
    """TF32 is off by 1e-2 of an out = phi(q) . phi(k) v in which phi(q) . phi(k) nearly cancels."""
    assert precisions(8, 100) == precisions(100, 8) == {"HIGHEST"}
    assert "DEFAULT" in precisions(9, 9)
