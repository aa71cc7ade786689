"""Softmax attention in plain JAX: every option against the oracle, derivatives, work and memory."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ato_jax.device import Device
from ato_jax.ops.attention import xla
from ato_jax.ops.attention.api import attention, prepare
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs, Residuals
from tests import numerics

CPU = Device("cpu")
# Several blocks, strips and heads at these sizes, neither of which divides the other.
SMALL_BLOCKS = {"block_t": 7, "strip_t": 20}


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape), dtype)


def qkv(
    B: int = 2, T: int = 37, S: int = 41, H: int = 4, G: int = 2, D: int = 8, V: int = 5,
    dtype: Any = np.float32, layout: str = "bthd",
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    arrays = (
        normal(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate(((B, T, H, D), (B, S, G, D), (B, S, G, V)))
    )
    q, k, v = (x.swapaxes(1, 2) if layout == "bhtd" else x for x in arrays)
    return q, k, v


def booleans(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).random(shape) < 0.6


def hiding_bias(*shape: int) -> jax.Array:
    """With -inf in it, and some rows all -inf."""
    hidden = booleans(*shape)
    hidden[..., :3, :] = True
    return jnp.where(hidden, -jnp.inf, normal(*shape))


def segments(length: int) -> np.ndarray:
    return np.sort(np.random.default_rng(length).integers(0, 4, (2, length)), axis=1)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bhtd": ({"layout": "bhtd"}, {"layout": "bhtd"}),
    "one query": ({"T": 1}, {"causal": True}),
    "one key": ({"S": 1}, {"causal": True}),
    "one of each": ({"B": 1, "T": 1, "S": 1, "H": 1, "G": 1, "D": 1, "V": 1}, {}),
    "causal": ({"S": 37}, {"causal": True}),
    "causal, fewer keys": ({"S": 20}, {"causal": True}),
    "top left": ({}, {"causal": True, "query_offset": 0}),
    "offset beyond the keys": ({}, {"window": (3, 0), "query_offset": 60}),
    "offset per entry": ({}, {"causal": True, "query_offset": np.array([-2, 7])}),
    "band": ({}, {"window": (4, 3)}),
    "causal band": ({"layout": "bhtd"}, {"causal": True, "window": (6, None), "layout": "bhtd"}),
    "left bound": ({}, {"window": (5, None)}),
    "right bound": ({}, {"window": (None, 3)}),
    "bias": ({}, {"bias": normal(2, 4, 37, 41)}),
    "bias, broadcast": ({}, {"bias": normal(4, 1, 41).astype(jnp.bfloat16), "causal": True}),
    "bias of a query": ({}, {"bias": normal(2, 1, 37, 1), "window": (4, 3)}),
    "bias of a band": ({}, {"bias": normal(1, 4, 37, 41), "window": (4, 3)}),
    "bias of a key, band": ({}, {"bias": normal(2, 1, 1, 41), "window": (4, 3)}),
    "bias that hides": ({}, {"bias": hiding_bias(1, 4, 37, 41)}),
    "mask": ({}, {"mask": booleans(2, 1, 37, 41)}),
    "segments": ({}, {"q_segment_ids": segments(37), "kv_segment_ids": segments(41)}),
    "segments in a band": ({"S": 37}, {"segment_ids": segments(37), "window": (9, 2)}),
    "lengths": ({}, {"q_lengths": np.array([37, 9]), "kv_lengths": np.array([0, 30])}),
    "causal lengths": ({"S": 37}, {"q_lengths": np.array([37, 0]), "causal": True}),
    "softcap": ({}, {"softcap": 1.5}),
    "sinks": ({}, {"sinks": normal(4), "causal": True}),
    "sinks alone": ({}, {"sinks": normal(4), "mask": np.zeros((1, 1, 1, 1), bool)}),
    "dropout": ({}, {"dropout_rate": 0.4, "dropout_key": jax.random.key(1), "causal": True}),
    "everything": (
        {"S": 37},
        {
            "window": (8, 1),
            "bias": hiding_bias(2, 1, 37, 37),
            "mask": booleans(1, 4, 1, 37),
            "segment_ids": segments(37),
            "q_lengths": np.array([30, 37]),
            "softcap": 2.0,
            "sinks": normal(4),
            "scale": 0.7,
            "dropout_rate": 0.2,
            "dropout_key": jax.random.key(2),
        },
    ),
}


def without_padding(request: Any, cotangents: Outputs, fill: float) -> Outputs:
    """The cotangents with `fill` in padded rows, whose gradients are 0 by contract."""
    if request.inputs.q_lengths is None:
        return cotangents
    held = np.arange(request.spec.T) < np.asarray(request.inputs.q_lengths)[:, None]
    held = held[:, None] if request.spec.layout == "bhtd" else held[..., None]  # as lse
    return Outputs(
        jnp.where(held[..., None], cotangents.out, fill), jnp.where(held, cotangents.lse, fill)
    )


def oracle(*arrays: Any, **options: Any) -> numerics.Oracle:
    request, _ = numerics.prepare("attention", *arrays, return_lse=True, **options)
    drawn = without_padding(request, numerics.draw_cotangents("attention", request), 0)
    return numerics.oracle("attention", *arrays, return_lse=True, cotangents=drawn, **options)


@pytest.mark.parametrize("case", CASES)
def test_options(case: str) -> None:
    sizes, options = CASES[case]
    wanted = oracle(*qkv(**sizes), **options)
    result = numerics.run_backends(
        "xla", "xla", wanted, forward_config=SMALL_BLOCKS, backward_config=SMALL_BLOCKS
    )
    numerics.compare(result, wanted)


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 30.0), ("float16", 0.01)])
def test_sixteen_bits(dtype: str, scale: float) -> None:
    q, k, v = qkv(dtype=dtype)
    wanted = oracle(q * scale, k, v * scale, causal=True, bias=normal(4, 37, 41, dtype=dtype))
    numerics.compare(numerics.run_backends("xla", "xla", wanted), wanted)


def test_heads_and_batch_together_or_apart() -> None:
    wanted = oracle(*qkv(B=4, T=7, S=7, H=8, G=4), causal=True, bias=normal(1, 8, 1, 7))
    for heads, batch in ((2, 1), (4, 2)):
        config = {"heads": heads, "batch": batch}
        result = numerics.run_backends(
            "xla", "xla", wanted, forward_config=config, backward_config=config
        )
        numerics.compare(result, wanted)


def test_nan_in_padding_goes_nowhere() -> None:
    q, k, v = qkv()
    options = {"q_lengths": np.array([20, 37]), "kv_lengths": np.array([41, 6])}
    options |= {"causal": True, "sinks": normal(4), "bias": normal(2, 4, 37, 41)}
    wanted = oracle(q, k, v, **options)
    held_q = (np.arange(37) < options["q_lengths"][:, None])[:, :, None, None]
    held_k = (np.arange(41) < options["kv_lengths"][:, None])[:, :, None, None]
    held_bias = held_q[:, None, :, 0] & held_k[:, None, :, 0, 0][:, :, None]
    spec, inputs = wanted.request.spec, wanted.request.inputs
    inputs = inputs._replace(
        q=jnp.where(held_q, q, jnp.nan),
        k=jnp.where(held_k, k, jnp.nan),
        v=jnp.where(held_k, v, jnp.inf),
        bias=jnp.where(held_bias, inputs.bias, jnp.nan),
    )
    cotangents = without_padding(wanted.request, wanted.outputs_cotangents, np.nan)
    config = xla.default_config(spec, CPU)

    @jax.jit
    def run(inputs: Inputs, cotangents: Outputs) -> tuple[Outputs, Any]:
        outputs = xla.forward(spec, config, inputs)
        return outputs, xla.backward(spec, config, Residuals(inputs, outputs), cotangents)

    outputs, gradients = run(inputs, cotangents)
    result = numerics.users_outputs("attention", wanted.request, outputs)
    numerics.compare(result | numerics.users_gradients(wanted.arrays, gradients), wanted)


def test_second_order_and_forward_mode() -> None:
    """Also where some queries see nothing."""
    q, k, v = qkv(B=1, T=9, S=7, H=2, G=1, D=4, V=3)
    options = {"causal": True, "softcap": 2.0, "sinks": normal(2), "return_lse": True}
    bias = hiding_bias(1, 1, 9, 7)
    tangents = tuple(normal(*x.shape, seed=9) for x in (q, k, v, bias))

    def loss(implementation: str, q: Any, k: Any, v: Any, bias: Any) -> Any:
        out, lse = attention(q, k, v, bias=bias, implementation=implementation, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0) ** 2)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(implementation: str) -> Any:
        function = functools.partial(loss, implementation)
        first = jax.jvp(function, (q, k, v, bias), tangents)
        second = jax.jvp(jax.grad(function, (0, 1, 2, 3)), (q, k, v, bias), tangents)
        return first, second

    found, wanted = derivatives("xla"), derivatives("reference")
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), found, wanted)


def test_queries_that_see_nothing() -> None:
    """Zeros, -inf, and zero gradients; of second order, too, and under infinite cotangents."""
    q, k, v = qkv(B=1, T=6, S=4, H=1, G=1, D=3, V=2)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, lse = attention(q, k, v, causal=True, return_lse=True, implementation="xla")
        assert out.shape == (1, 6, 1, 2)
        return jnp.sum(out**2) + jnp.sum(lse[:, :2] ** 2)

    out, lse = attention(q, k, v, causal=True, return_lse=True, implementation="xla")
    assert (out[:, :2] == 0).all() and (lse[:, :2] == -jnp.inf).all()
    gradients = jax.grad(loss, (0, 1, 2))(q, k, v)
    assert (gradients[0][:, :2] == 0).all()
    hessian = jax.jit(jax.hessian(loss, (0, 1, 2)))(q, k, v)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradients, hessian)))


def outputs_of_both(**options: Any) -> tuple[np.ndarray, np.ndarray]:
    """out [2, 6, 4, 5] and lse [2, 6, 4] by XLA, which are NaN where the reference is, gradients
    too."""
    arrays = qkv(T=6, S=7)

    def outputs(backend: str) -> tuple[Any, Any]:
        run = functools.partial(attention, return_lse=True, implementation=backend, **options)
        results, pull = jax.vjp(run, *arrays)
        return results, pull(jax.tree.map(jnp.ones_like, results))

    wanted, found = outputs("reference"), outputs("xla")
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)
    out, lse = found[0]
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize("bias", [{}, {"bias": jnp.ones((6, 1))}], ids=["no bias", "bias"])
def test_an_infinite_sink_shows(bias: dict[str, Any]) -> None:
    sinks = jnp.array([0.5, jnp.inf, 0.5, -jnp.inf])
    out, lse = outputs_of_both(sinks=sinks, **bias)
    for array in (np.isnan(out).any(-1), np.isnan(lse)):
        assert array[..., 1].all() and not array[..., [0, 2, 3]].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(6, 7), (6, 1), (1, 7)], ids=["pair", "query", "key"])
@pytest.mark.parametrize("sinks", [None, jnp.zeros(4)], ids=["no sinks", "sinks"])
def test_a_bias_that_is_no_number_shows(value: float, shape: Any, sinks: Any) -> None:
    """In the rows of the queries that see it, and in no others."""
    bias = np.zeros(shape, np.float32)
    bias[-1, -1] = value
    rows = np.broadcast_to(bias, (6, 7))
    for mask in (np.ones((6, 7), bool), np.eye(6, 7, dtype=bool), np.isfinite(rows)):
        out, lse = outputs_of_both(bias=jnp.asarray(bias), mask=mask, sinks=sinks)
        seen = (mask & ~np.isfinite(rows)).any(-1)  # [T]
        for array in (np.isnan(out).any(-1), np.isnan(lse)):
            assert (array == seen[:, None]).all()


# -- work and memory -----------------------------------------------------------------------------


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Every equation, inner ones too, and how often it runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        repeats = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, times * repeats)


def traced(spec: AttentionSpec, gradient: bool, **arrays: Any) -> Any:
    """The program of a call at sizes that no test could run."""

    def run(inputs: Inputs, cotangents: Outputs) -> Any:
        config = xla.default_config(spec, CPU)
        if not gradient:
            return xla.forward(spec, config, inputs)
        return xla.backward(spec, config, Residuals(inputs, cotangents), cotangents)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype))

    B, T, S, H, G = spec.B, spec.T, spec.S, spec.H, spec.G  # noqa: N806
    q, k, v = array(B, T, H, spec.D), array(B, S, G, spec.D), array(B, S, G, spec.V)
    lse = jax.ShapeDtypeStruct((B, T, H), jnp.float32)
    return jax.jit(run).trace(Inputs(q, k, v, **arrays), Outputs(array(B, T, H, spec.V), lse))


def long(T: int, **options: Any) -> AttentionSpec:
    sizes = {"B": 1, "T": T, "S": T, "H": 2, "G": 2, "D": 64, "V": 64}
    return AttentionSpec(**sizes, dtype="float32", scale=0.125, **options)


def multiplications(spec: AttentionSpec, gradient: bool) -> int:
    """Those of all matrix products."""
    total = 0
    for equation, times in equations(traced(spec, gradient).jaxpr.jaxpr):
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            depth = np.prod([left[axis] for axis in contracted])
            total += times * int(depth * np.prod(equation.outvars[0].aval.shape))
    return total


@pytest.mark.parametrize("gradient", [False, True])
def test_hidden_keys_cost_nothing(gradient: bool) -> None:
    full = multiplications(long(8192), gradient)
    assert full <= 8192**2 * 2 * 64 * (7 if gradient else 2) * 1.02
    assert multiplications(long(8192, right=0), gradient) < 0.6 * full
    band = multiplications(long(8192, left=1023, right=0), gradient)
    assert band < 1.6 * full * 1024 / 8192
    assert multiplications(long(16384, left=1023, right=0), gradient) <= 2.1 * band


def test_broadcast_bias_is_never_expanded() -> None:
    """Neither is its gradient: no array of the program comes near [H, T, S]."""
    bias = jax.ShapeDtypeStruct((1, 1, 1, 16384), jnp.float32)
    program = traced(long(16384, bias=(True, False, False, True)), True, bias=bias)
    sizes = [
        np.prod(variable.aval.shape)
        for equation, _ in equations(program.jaxpr.jaxpr)
        for variable in equation.outvars
    ]
    assert max(sizes) <= 4 * 16384 * 64 * 2


@pytest.mark.parametrize(
    "options", [{}, {"right": 0}, {"left": 1023, "right": 0}, {"segments": True}]
)
def test_memory_of_32768_keys(options: dict[str, Any]) -> None:
    """What XLA would allocate beside inputs and outputs, forward and backward."""
    ids = jax.ShapeDtypeStruct((1, 32768), jnp.int32) if "segments" in options else None
    program = traced(long(32768, **options), True, q_segments=ids, kv_segments=ids)
    compiled = program.lower().compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 600e6


def test_peak_memory_of_a_run() -> None:
    """The process's peak, above what it held before the call: the reference takes 2 GB."""
    script = """
        import resource, jax, jax.numpy as jnp
        from ato_jax.ops.attention.api import attention

        def gradient(q, k, v):
            def loss(q, k, v):
                return attention(q, k, v, implementation="xla").sum()
            return jax.grad(loss, (0, 1, 2))(q, k, v)

        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        q, k, v = (jax.random.normal(jax.random.key(i), (1, 8192, 1, 64)) for i in range(3))
        small = [x[:, :256] for x in (q, k, v)]
        jax.block_until_ready(jax.jit(gradient)(*small))
        before = peak()
        jax.block_until_ready(jax.jit(gradient)(q, k, v))
        print(peak() - before)
    """
    # With XLA's optimizations, which the other tests leave out: the peak that users see.
    settings = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | settings | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) < 200


def test_supports_everything() -> None:
    request = prepare(*qkv(), causal=True, sinks=normal(4))
    assert xla.unsupported(request.spec, "forward") is None
    assert xla.unsupported(request.spec, "backward") is None


def test_default_blocks_fill_the_budget() -> None:
    short, tall = (xla.default_config(long(T), CPU) for T in (64, 65536))
    assert (short.block_t, short.heads, short.batch) == (64, 2, 1)
    assert (tall.block_t, tall.heads) == (64, 1)
    assert xla.default_config(long(64), Device("tpu")).block_t == 64


def test_gradient_of_a_bias_whose_terms_cancel():
    """Exactly 0 where a query sees one key, or where its keys share the bias."""
    q, k, v = qkv(T=6, S=6, dtype=jnp.bfloat16)
    one_key = {"bias": normal(2, 4, 1, 6), "window": (0, 0)}
    shared = {"bias": normal(1, 4, 6, 1), "causal": True}
    for options in (one_key, shared):
        wanted = numerics.oracle("attention", q, k, v, **options)
        result = numerics.run("attention", "xla", q, k, v, cotangents=wanted.cotangents, **options)
        numerics.compare(result, wanted)
        np.testing.assert_array_equal(result["dbias"], 0)


@pytest.mark.parametrize("bias", [-1e3, -1e6, -1e9])
def test_lse_of_a_sink_beside_a_bias_by_query(bias: float) -> None:
    """The bias hides the keys from all queries but not the sink, whose logit is then lse."""
    sinks = jnp.full(4, 0.1)
    options = {"bias": jnp.full((1, 1, 1, 1), bias), "sinks": sinks, "return_lse": True}
    _, lse = attention(*qkv(), **options, implementation="xla")
    assert np.array_equal(lse, np.broadcast_to(np.float32(0.1), lse.shape))


def test_gradient_of_a_bias_by_query_beside_large_sinks() -> None:
    """The keys have 1e-7 of the weight: 1 less the sink's share says nothing of it."""
    q, k, v = qkv(T=6, S=6)
    sinks = jnp.full(4, 18.0)
    options = {"bias": normal(1, 4, 6, 1), "sinks": sinks, "return_lse": True}
    wanted = numerics.oracle("attention", q, k, v, causal=True, **options)
    result = numerics.run(
        "attention", "xla", q, k, v, cotangents=wanted.cotangents, causal=True, **options
    )
    numerics.compare(result, wanted)


def test_gradients_of_saturated_scores():
    """Where tanh(x) of the softcap is 1 but for some 1e-7, so is its float32 square."""
    q, k, v = qkv(T=12, S=12, D=1)
    options = {"softcap": 1.0, "scale": 1.0}
    q, k = jnp.sign(q), jnp.sign(k) * (7 + jnp.abs(k))
    wanted = numerics.oracle("attention", q, k, v, **options)
    result = numerics.run("attention", "xla", q, k, v, cotangents=wanted.cotangents, **options)
    numerics.compare(result, wanted)
    for name in ("dq", "dk"):
        error, _ = numerics.errors(np.asarray(result[name]), wanted.exact[name], None, True)
        assert error < 1e-5


def test_gradients_where_one_key_has_nearly_all_the_weight() -> None:
    """The weights add up to 1 in the backward pass, too, or dp - delta would not cancel there.

    float32 scores of 10,000 are 1e-3 apart. The terms before they cancel are no measure: they are
    1000 times the gradient.
    """
    q, k, v = qkv(T=43, S=43, D=149, V=64, dtype=jnp.bfloat16)
    q, k, options = 30 * q, 30 * k, {"scale": 0.3}
    wanted = numerics.oracle("attention", q, k, v, **options)
    result = numerics.run("attention", "xla", q, k, v, cotangents=wanted.cotangents, **options)
    numerics.compare(result, wanted)
    for name in ("dq", "dk"):
        error, _ = numerics.errors(np.asarray(result[name]), wanted.exact[name], None, True)
        assert error <= numerics.budget(name, "bfloat16")
