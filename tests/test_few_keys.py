"""Causal rows that see few keys, by interpreted kernels beside the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import test_linear_channel as channel
from few_keys import OP, OPTIONS, check_dq, inputs

import ato_jax
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


def check(backend: str, dtype: str, T: int, D: int = 64, **config: Any) -> None:
    wanted = numerics.oracle(OP, *inputs(dtype, T, 2, D), **OPTIONS)
    configs = {"forward_config": config, "backward_config": config}
    with ato_jax.interpret():
        found = numerics.run_backends(backend, backend, wanted, device=channel.GPU, **configs)
    check_dq(found["dq"], wanted)


@newest
@pytest.mark.parametrize("dtype, T", [("bfloat16", 128), ("float16", 64)])
def test_mosaic_gpu(dtype: str, T: int) -> None:
    check("mosaic_gpu", dtype, T, pieces=1)


@pytest.mark.parametrize(
    "dtype, T, D", [("bfloat16", 128, 64), ("bfloat16", 128, 128), ("float16", 64, 64)]
)
def test_triton(dtype: str, T: int, D: int) -> None:
    """By walks that carry a state, and where each tile reads a stored one."""
    check("triton", dtype, T, D, programs=1)
