"""Calls under `jax_numpy_dtype_promotion="strict"`, where an integer of 64 bits beside one of 32 is
an error: what we make ourselves has 32 bits, also with 64-bit types switched on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ato_jax

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


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("call", CALLS)
def test_strict_promotion_with_64_bits(call: str, implementation: str) -> None:
    op, options = CALLS[call]
    beta = [options["beta"]] if "beta" in options else []
    others = {name: value for name, value in options.items() if name != "beta"}

    def run(*arrays: jax.Array) -> Any:
        function = getattr(ato_jax, op)
        return function(*arrays, *beta, implementation=implementation, **others)

    def both(*arrays: jax.Array) -> Any:
        out, pull = jax.vjp(run, *arrays)
        return pull(jax.tree.map(jnp.ones_like, out))

    x = jnp.ones((B, T, H, D), jnp.float32)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        found = jax.eval_shape(both, x, x, x)
    assert [one.dtype for one in found] == [jnp.float32] * 3
