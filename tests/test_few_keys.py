"""Causal rows that see few keys, by interpreted kernels beside the float64 reference.

A row counts as at least half the RMS row of its batch entry, and of small inputs the first rows are
by far the largest. So the rows at fault are those in which g_i . out_i is small by chance, and they
fail in a long call alone: in a short one the RMS row is larger. Here a row counts as its own two
terms, or as half of what the RMS row of `LONG` rows would be.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel

import ato_jax
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"
LONG = 65_536
OPTIONS = {"causal": True}


def inputs(dtype: str, T: int, H: int, D: int = 64) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    draws = [generator.standard_normal((1, T, H, D)) * 0.01 for _ in range(3)]
    return [jnp.asarray(draw, jnp.float32).astype(dtype) for draw in draws]


def worst_row(dq: Any, wanted: numerics.Oracle) -> tuple[float, float]:
    """dq's worst row, and its limit. The terms of row i are about the first one's / sqrt(i)."""
    exact, terms = wanted.exact["dq"], wanted.terms["dq"]
    of_rows = np.linalg.norm(terms, axis=-1)  # [B, T, H]
    T, width = exact.shape[1], exact.shape[-1]
    squares = np.sum(np.mean(np.square(of_rows), axis=(0, 2)))
    squares *= np.log(LONG) / np.log(T)  # sums of 1 / i
    size = np.maximum(np.linalg.norm(exact, axis=-1), of_rows)
    size = np.maximum(size, np.sqrt(squares / LONG) / 2)
    error = np.linalg.norm(np.asarray(dq, np.float64) - exact, axis=-1)
    limit = 4 * (1 + 3 / np.sqrt(width)) * numerics.budget("dq", wanted.request.spec.dtype)
    return float(np.max(error / size)), float(limit)


def check_dq(dq: Any, wanted: numerics.Oracle) -> None:
    worst, limit = worst_row(dq, wanted)
    assert worst <= limit, f"worst row {worst:.2e} (limit {limit:.2e})"


@newest
@pytest.mark.parametrize("dtype, T", [("bfloat16", 128), ("float16", 64)])
def test_mosaic_gpu(dtype: str, T: int) -> None:
    """With two heads in a tile. With one, and in Triton's kernels, these rows are as they were."""
    wanted = numerics.oracle(OP, *inputs(dtype, T, H=2, D=64), **OPTIONS)
    configs: Any = {"forward_config": {"pieces": 1}, "backward_config": {"pieces": 1}}
    name = "mosaic_gpu"
    with ato_jax.interpret():
        found = numerics.run_backends(name, name, wanted, device=channel.GPU, **configs)
    check_dq(found["dq"], wanted)
