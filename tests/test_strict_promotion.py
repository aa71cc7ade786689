"""Calls under what a program may forbid in all its code: `jax_numpy_dtype_promotion="strict"` and
`jax_numpy_rank_promotion="raise"`. Our own code is traced without either.

In float32 it keeps to the first nevertheless: what we make ourselves has 32 bits, also with 64-bit
types switched on, where an integer of 64 bits beside one of 32 is an error."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import ato_jax
import ato_jax.nn
from ato_jax import programs

B, T, H, D = 2, 24, 2, 8
LENGTHS = jnp.array([20, 7], jnp.int32)
SEGMENTS = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T) // 9
GATE = jnp.full((B, T, H), -0.1, jnp.float32)
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths of keys": {"kv_lengths": LENGTHS},
    "lengths": {"q_lengths": LENGTHS, "kv_lengths": LENGTHS},
    "segments": {"segment_ids": SEGMENTS},
}
SOFTMAX: dict[str, dict[str, Any]] = {
    "window": {"causal": True, "window": (3, 0)},
    "offset": {"causal": True, "query_offset": LENGTHS},
    "dropout": {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": jnp.ones(H, jnp.float32)},
    "bias": {"bias": jnp.ones((1, H, T, T), jnp.float32)},
    "lse": {"return_lse": True},
}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"attention, {name}": ("attention", options) for name, options in SOFTMAX.items()},
    **{
        f"{op}, {'causal, ' * causal}{name}": (op, {"causal": causal, **options})
        for op in ("attention", "linear_attention")
        for causal in (False, True)
        for name, options in MASKS.items()
    },
    **{
        f"linear_attention, {kind}, {name}": (
            "linear_attention",
            {"causal": True, "decay": decay, **options},
        )
        for kind, decay in (
            ("decay", GATE),
            ("gate", jnp.full((B, T, H, D), -0.1, jnp.float32)),
        )
        for name, options in MASKS.items()
    },
    **{
        f"gated_delta_rule, {name}": ("gated_delta_rule", {"beta": -GATE, **options})
        for name, options in {
            "plain": {},
            "lengths": {"lengths": LENGTHS},
            "segments": {"segment_ids": SEGMENTS},
            "decay": {"decay": GATE},
        }.items()
    },
}


MAPS: dict[str, Any] = {
    "relu": "relu",
    "function": lambda x: jnp.where(x > 0, x, 0.1 * jnp.expm1(x)),
    "favor": ato_jax.favor(jax.random.key(0), num_features=16, head_dim=D),
}
CALLS |= {
    f"linear_attention, {'causal, ' * causal}{name}": (
        "linear_attention",
        {"feature_map": feature_map, "causal": causal},
    )
    for name, feature_map in MAPS.items()
    for causal in (False, True)
}
CALLS |= {
    "linear_attention, decay per head": (
        "linear_attention",
        {"decay": jnp.full(H, -0.1, jnp.float32)},
    ),
    "linear_attention, state": ("linear_attention", {"causal": True, "return_state": True}),
    "gated_delta_rule, gate, state": (
        "gated_delta_rule",
        {
            "beta": -GATE,
            "decay": jnp.full((B, T, H, D), -0.1, jnp.float32),
            "normalize_qk": True,
            "return_state": True,
        },
    ),
}


def passes(call: str, implementation: str) -> Callable[..., Any]:
    """A function of q, k and v that makes the call and its backward pass."""
    op, options = CALLS[call]
    beta = [options["beta"]] if "beta" in options else []
    others = {name: value for name, value in options.items() if name != "beta"}

    def run(*arrays: jax.Array) -> Any:
        function = getattr(ato_jax, op)
        return function(*arrays, *beta, implementation=implementation, **others)

    def both(*arrays: jax.Array) -> Any:
        out, pull = jax.vjp(run, *arrays)
        return pull(jax.tree.map(jnp.ones_like, out))

    return both


X = jnp.ones((B, T, H, D), jnp.float32)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("call", CALLS)
def test_strict_promotion_with_64_bits(
    call: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        # Our own code, too.
        monkeypatch.setattr(jax, "numpy_dtype_promotion", lambda _: contextlib.nullcontext())
        found = jax.eval_shape(passes(call, implementation), X, X, X)
    assert [one.dtype for one in found] == [jnp.float32] * 3


HALVES = (jnp.bfloat16, jnp.float16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("call", CALLS)
def test_strict_promotion_in_halves(call: str, implementation: str, dtype: Any) -> None:
    x = X.astype(dtype)
    with jax.numpy_dtype_promotion("strict"):
        found = jax.eval_shape(passes(call, implementation), x, x, x)
    assert [one.dtype for one in found] == [dtype] * 3


@pytest.mark.parametrize("implementation", ["triton", "xla", "reference"])
@pytest.mark.parametrize(
    "call",
    ["attention, sinks", "linear_attention, causal, favor", "linear_attention, causal, plain"],
)
def test_second_derivatives_under_strict_promotion(call: str, implementation: str) -> None:
    """JAX calls the derivatives of kernels outside of our programs."""

    def total(*arrays: jax.Array) -> jax.Array:
        found = passes(call, implementation)(*arrays)
        return sum(jnp.sum(one.astype(jnp.float32)) for one in found)

    x = X.astype(jnp.bfloat16)
    with ato_jax.interpret(), jax.numpy_dtype_promotion("strict"):
        found = jax.eval_shape(jax.grad(total, (0, 1, 2)), x, x, x)
    assert [one.dtype for one in found] == [jnp.bfloat16] * 3


@pytest.mark.parametrize(
    "call",
    ["attention, lse", "linear_attention, causal, function", "gated_delta_rule, gate, state"],
)
def test_results_are_those_without_strict_promotion(call: str) -> None:
    arrays = jax.random.normal(jax.random.key(1), (3, B, T, H, D), jnp.bfloat16)
    run = passes(call, "xla")
    expected = run(*arrays)
    with jax.numpy_dtype_promotion("strict"):
        found = run(*arrays)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and bool(jnp.array_equal(ours, theirs))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("call", CALLS)
def test_without_promotion_of_ranks(call: str, implementation: str) -> None:
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(passes(call, implementation), X, X, X)


def gradients(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """The function's results, and their gradients by the arrays."""
    out, pull = jax.vjp(function, *arrays)
    return out, pull(jax.tree.map(jnp.ones_like, out))


def layer_steps(name: str, options: dict[str, Any], x: jax.Array) -> Any:
    """A layer's pass, its gradient, and two steps of decoding."""
    x = x[:, :5].reshape(B, 5, H * D)
    layer = getattr(ato_jax.nn, name)(
        num_heads=H, in_features=H * D, dtype=x.dtype, rngs=nnx.Rngs(0), **options
    )
    gradient = nnx.grad(lambda layer: layer(x).sum())(layer)
    layer.init_cache((B, 8, H * D), x.dtype)
    steps = layer(x, decode=True), layer(x[:, :1], decode=True)
    assert [step.dtype for step in steps] == [x.dtype] * 2
    return jax.tree.leaves(gradient), steps


LSE = jnp.zeros((B, T, H), jnp.float32)
STATE = jnp.ones((B, H, D, D), jnp.float32)
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
LAYERS: dict[str, dict[str, Any]] = {
    "Attention": {"normalize_qk": True, "rope_theta": 1e4},
    "GatedDeltaNet": {},
    "GatedLinearAttention": {},
    "KimiDeltaAttention": {},
    "LatentAttention": {"q_lora_rank": 8, **LATENT},
    "LinearAttention": {},
    "Performer": {},
}
OTHERS: dict[str, Callable[[jax.Array], Any]] = {
    "total_attention": lambda x: gradients(
        functools.partial(ato_jax.total_attention, causal=True), x, x, LSE
    ),
    "total_attention, lengths": lambda x: gradients(
        functools.partial(ato_jax.total_attention, q_lengths=LENGTHS, kv_lengths=LENGTHS),
        x,
        x,
        LSE,
    ),
    "combine": lambda x: gradients(lambda x: ato_jax.combine([x, x], [LSE, LSE]), x),
    "quantize": lambda x: ato_jax.quantize(x, (1, 3)),
    "rotate": lambda x: gradients(ato_jax.rotate, x),
    **{
        f"decode_attention, {implementation}": functools.partial(
            lambda implementation, x: gradients(
                lambda q, k, v: ato_jax.decode_attention(
                    q,
                    k,
                    v,
                    jnp.array([[0], [1]]),
                    LENGTHS,
                    window=(4, 0),
                    implementation=implementation,
                ),
                x[:, :1],
                x,
                x,
            ),
            implementation,
        )
        for implementation in ("xla", "reference")
    },
    **{
        f"linear_attention_step, {name}": functools.partial(
            lambda feature_map, size, x: gradients(
                lambda q, k, v, decay, *state: ato_jax.linear_attention_step(
                    q, k, v, ato_jax.LinearState(*state), decay=decay, feature_map=feature_map
                ),
                *(x[:, 0],) * 3,
                GATE[:, 0],
                jnp.ones((B, H, size, D), jnp.float32),
                jnp.ones((B, H, size), jnp.float32),
            ),
            feature_map,
            16 if name == "favor" else D,
        )
        for name, feature_map in MAPS.items()
    },
    "gated_delta_rule_step": lambda x: gradients(
        functools.partial(ato_jax.gated_delta_rule_step, normalize_qk=True),
        *(x[:, 0],) * 3,
        -GATE[:, 0],
        STATE,
    ),
    **{f"nn.{layer[0]}": functools.partial(layer_steps, *layer) for layer in LAYERS.items()},
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_without_promotion_of_ranks(name: str) -> None:
    with jax.numpy_rank_promotion("raise"):
        jax.block_until_ready(OTHERS[name](X))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OTHERS)
def test_others_under_strict_promotion(name: str, dtype: Any) -> None:
    with jax.numpy_dtype_promotion("strict"):
        jax.block_until_ready(OTHERS[name](X.astype(dtype)))


def test_a_caller_keeps_the_settings() -> None:
    x = X.astype(jnp.bfloat16)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        ato_jax.attention(x, x, x)
        with pytest.raises(ValueError, match="rank_promotion"):
            X + X[0]
        with pytest.raises(ValueError, match="dtype_promotion=strict"):
            X + x


def test_a_feature_map_is_the_callers_own_code() -> None:
    def mixed(x: jax.Array) -> jax.Array:
        return x * jnp.ones((), jnp.int32)

    x = X.astype(jnp.bfloat16)
    ato_jax.linear_attention(x, x, x, feature_map=mixed)
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(ValueError, match="dtype_promotion=strict"),
    ):
        ato_jax.linear_attention(x, x, x, feature_map=mixed)


def test_a_call_is_traced_once_in_each_setting() -> None:
    traces = []

    @programs.jit()
    def widened(x: jax.Array) -> jax.Array:
        traces.append(x.dtype)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    x = X.astype(jnp.bfloat16)
    for _ in range(3):
        for setting in ("standard", "strict"):
            with jax.numpy_dtype_promotion(setting):
                assert widened(x).dtype == jnp.float32
    assert len(traces) == 2
