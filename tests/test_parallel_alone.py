"""Context parallelism on a mesh of one device: the plain operation, and nothing beside it."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ato_jax
import ato_jax.parallel

B, T, H, G, D = 2, 24, 4, 2, 8
IDS = np.repeat([[0, 1], [0, 0]], 12, axis=1).astype(np.int32)
LENGTHS = np.array([T, 15], np.int32)


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "causal": ("linear_attention", {"causal": True, "return_state": True}, {}),
    "packed both ways": (
        "linear_attention",
        {"segment_ids": IDS, "initial_state": ato_jax.LinearState(
            draw(B, G, D, D), np.abs(draw(B, G, D))
        )},
        {},
    ),
    "LION": ("linear_attention", {"decay": -np.abs(draw(B, T, G)), "q_lengths": LENGTHS}, {}),
    "ring": ("attention", {"causal": True, "sinks": draw(H)}, {"schedule": "ring"}),
    "zigzag": (
        "attention",
        {"causal": True, "kv_lengths": LENGTHS, "return_lse": True},
        {"order": "zigzag"},
    ),
    "delta rule": (
        "gated_delta_rule",
        {"decay": -np.abs(draw(B, T, H)), "normalize_qk": True, "return_state": True},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_device_computes_what_the_plain_operation_does(name: str) -> None:
    op, options, more = CASES[name]
    arrays = [draw(B, T, H, D), draw(B, T, G, D, seed=1), draw(B, T, G, D, seed=2)]
    if op == "gated_delta_rule":
        arrays[2] = draw(B, T, H, D, seed=2)
        arrays = [arrays[1], arrays[1][::-1], arrays[2], np.full((B, T, H), 0.5, np.float32)]
    mesh = jax.make_mesh((1,), ("time",), axis_types=(AxisType.Auto,))
    plain = functools.partial(getattr(ato_jax, op), **options)
    cut = functools.partial(getattr(ato_jax.parallel, op), axis_name="time", **options, **more)
    specs: Any = P(None, "time")
    if options.get("return_state"):
        specs = specs, P()
    cut = jax.shard_map(cut, mesh=mesh, in_specs=P(None, "time"), out_specs=specs)

    def loss(function: Any, *arrays: Any) -> Any:
        return sum(jnp.sum(jnp.sin(one)) for one in jax.tree.leaves(function(*arrays)))

    both = [
        jax.jit(jax.value_and_grad(functools.partial(loss, function), range(len(arrays))))
        for function in (plain, cut)
    ]
    texts = [one.lower(*arrays).as_text() for one in both]
    assert not re.search("all_gather|collective_permute|reduce_scatter", texts[1])
    assert texts[0].count("dot_general") == texts[1].count("dot_general") > 0
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(same, *(one(*arrays) for one in both))
