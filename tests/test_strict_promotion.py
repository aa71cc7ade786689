"""Calls under what a program may forbid in all of its code: `jax_numpy_dtype_promotion="strict"`,
where an integer of 64 bits beside one of 32 is an error, since what we make ourselves has 32 bits,
also with 64-bit types switched on; and `jax_numpy_rank_promotion="raise"`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import ato_jax
import ato_jax.nn

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
def test_strict_promotion_with_64_bits(call: str, implementation: str) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        found = jax.eval_shape(passes(call, implementation), X, X, X)
    assert [one.dtype for one in found] == [jnp.float32] * 3


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("call", CALLS)
def test_without_promotion_of_ranks(call: str, implementation: str) -> None:
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(passes(call, implementation), X, X, X)


def layer_steps(name: str) -> Any:
    """A layer's pass, its gradient, and two steps of decoding."""
    x = jnp.ones((2, 5, 16), jnp.float32)
    layer = getattr(ato_jax.nn, name)(num_heads=2, in_features=16, rngs=nnx.Rngs(0))
    gradient = nnx.grad(lambda layer: layer(x).sum())(layer)
    layer.init_cache((2, 8, 16))
    return jax.tree.leaves(gradient), layer(x, decode=True), layer(x[:, :1], decode=True)


LSE = jnp.zeros((B, T, H), jnp.float32)
LAYERS = ("Attention", "GatedDeltaNet", "GatedLinearAttention", "KimiDeltaAttention", "Performer")
OTHERS: dict[str, Callable[[], Any]] = {
    "total_attention": lambda: ato_jax.total_attention(X, X, LSE, causal=True),
    "total_attention, lengths": lambda: ato_jax.total_attention(
        X, X, LSE, q_lengths=LENGTHS, kv_lengths=LENGTHS
    ),
    "combine": lambda: ato_jax.combine([X, X], [LSE, LSE]),
    "quantize": lambda: ato_jax.quantize(X, (1, 3)),
    "rotate": lambda: ato_jax.rotate(X),
    "decode_attention": lambda: ato_jax.decode_attention(
        X[:, :1], X, X, jnp.array([[0], [1]]), LENGTHS, window=(4, 0)
    ),
    "gated_delta_rule_step": lambda: ato_jax.gated_delta_rule_step(
        X[:, 0], X[:, 0], X[:, 0], -GATE[:, 0], jnp.ones((B, H, D, D)), normalize_qk=True
    ),
    **{f"nn.{name}": functools.partial(layer_steps, name) for name in LAYERS},
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_without_promotion_of_ranks(name: str) -> None:
    with jax.numpy_rank_promotion("raise"):
        jax.block_until_ready(OTHERS[name]())


def test_a_caller_keeps_the_setting() -> None:
    with jax.numpy_rank_promotion("raise"):
        ato_jax.attention(X, X, X)
        with pytest.raises(ValueError, match="rank_promotion"):
            X + X[0]
