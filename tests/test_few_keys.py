"""Causal rows that see few keys, by interpreted kernels beside the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import test_linear_channel as channel
from few_keys import OP, OPTIONS, check_dq, inputs

import ato_jax
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


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
