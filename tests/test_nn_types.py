"""A user's program with types checks with mypy, and mistakes in it are found."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import jax
import jax.numpy as jnp
import torch
from flax import nnx
from typing_extensions import assert_type

import ato_jax.nn
import ato_torch
from ato_jax import LinearState

layer = ato_jax.nn.GatedLinearAttention(4, 16, gate="scalar", rngs=nnx.Rngs(0))
assert_type(layer(jnp.ones((2, 8, 16))), jax.Array)
old = nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0))
assert_type(ato_jax.nn.convert_attention(old, ato_jax.nn.Attention), ato_jax.nn.Attention)
x = torch.ones(1, 2, 8, 4)
assert_type(ato_torch.attention(x, x, x, is_causal=True, window=(3, None)), torch.Tensor)
out, lse = ato_torch.attention(x, x, x, return_lse=True)
out, state = ato_torch.linear_attention(x, x, x, feature_map=jnp.exp, return_state=True)
assert_type(state, LinearState)
"""
MISTAKES = """
ato_jax.nn.GatedLinearAttention(4, 16, gate="matrix", rngs=nnx.Rngs(0))
layer(jnp.ones((2, 8, 16)), causal=True)
ato_torch.attention(x, x, x, is_causal="yes")
ato_torch.linear_attention(x, x, x, layout="btdh")
ato_torch.attention(x, x, x).lse
"""


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("mypy", "torch", "flax")),
    reason="mypy, PyTorch or Flax is not installed here",
)
def test_a_typed_program(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM + MISTAKES)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    first = PROGRAM.count("\n") + 1
    wrong = sorted(
        {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    )
    assert wrong == list(range(first + 1, first + MISTAKES.count("\n"))), done.stdout + done.stderr
