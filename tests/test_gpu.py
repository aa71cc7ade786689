"""The kernels on a card: numerics at real sizes, determinism, and no access out of bounds.

    python -m pytest -m gpu          writes the receipt, tests/gpu_receipt.json
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.attention import xla as attention_xla
from ato_jax.ops.linear_attention import xla as linear_attention_xla
from tests import numerics

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "float16", "bfloat16")
HEAD_SIZES = (32, 64, 80, 128)
LONG = 65_536


def arrays(
    dtype: str,
    *,
    B: int = 2,
    T: int,
    S: int | None = None,
    H: int = 4,
    G: int = 2,
    D: int = 64,
    V: int | None = None,
    scale: float = 1.0,
    layout: str = "bthd",
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    generator = np.random.default_rng(seed)

    def draw(length: int, heads: int, size: int) -> jax.Array:
        shape = (B, length, heads, size) if layout == "bthd" else (B, heads, length, size)
        values = generator.standard_normal(shape, np.float32) * scale
        return jnp.asarray(values, jnp.float32).astype(dtype)

    S, V = S or T, V or D
    return draw(T, H, D), draw(S, G, D), draw(S, G, V)


def check(op: str, *qkv: jax.Array, **options: Any) -> dict[str, Any]:
    """Triton against the float64 reference, forward and backward; the results."""
    wanted = numerics.oracle(op, *qkv, **options)
    result = numerics.run(op, "triton", *qkv, cotangents=wanted.cotangents, **options)
    numerics.compare(result, wanted)
    return result


@pytest.fixture
def linear_time_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle computed by the XLA backends in float64: linear in T, and tested elsewhere
    against the quadratic reference."""
    for op, module in (
        ("attention", attention_xla),
        ("linear_attention", linear_attention_xla),
    ):
        here = device.of_call(())

        def forward(spec: Any, _: Any, inputs: Any, module: Any = module, here: Any = here) -> Any:
            return module.forward(spec, module.default_config(spec, here), inputs)

        oracle = SimpleNamespace(forward=forward)
        monkeypatch.setitem(numerics.REFERENCES, op, oracle)
        monkeypatch.setattr(numerics, f"{op}_reference", oracle)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("feature_map", "normalize"),
    [("elu1", True), ("elu1", False), ("identity", False)],
)
def test_linear_attention(
    dtype: str, D: int, causal: bool, feature_map: str, normalize: bool
) -> None:
    options = {"causal": causal, "feature_map": feature_map, "normalize": normalize}
    check("linear_attention", *arrays(dtype, T=1100, D=D), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", (*HEAD_SIZES, 256))
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: str, D: int, causal: bool) -> None:
    check("attention", *arrays(dtype, T=1100, D=D), causal=causal, return_lse=True)


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "D", "V"), [(1, 64, 64), (37, 5, 1), (129, 96, 40), (513, 1, 128)])
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_odd_sizes_and_layouts(
    op: str, causal: bool, T: int, D: int, V: int, layout: str
) -> None:
    qkv = arrays("bfloat16", T=T, D=D, V=V, H=6, G=3, layout=layout)
    check(op, *qkv, causal=causal, layout=layout)


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
@pytest.mark.parametrize(("T", "S"), [(100, 1025), (1025, 100), (1, 700)])
def test_cross(op: str, T: int, S: int) -> None:
    check(op, *arrays("float16", T=T, S=S))


@pytest.mark.parametrize(("T", "S"), [(100, 1025), (1025, 100), (1, 700)])
def test_causal_cross_attention(T: int, S: int) -> None:
    check("attention", *arrays("float16", T=T, S=S), causal=True, return_lse=True)


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_small_and_large_inputs(op: str, dtype: str, causal: bool, scale: float) -> None:
    check(op, *arrays(dtype, T=600, D=64, scale=scale), causal=causal)


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
def test_tf32_when_asked_for(op: str) -> None:
    check(op, *arrays("float32", T=600, D=64), causal=True, precision="tf32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.usefixtures("linear_time_oracle")
def test_linear_attention_over_a_long_sequence(dtype: str, causal: bool, D: int) -> None:
    check("linear_attention", *arrays(dtype, B=1, T=LONG, H=2, G=1, D=D), causal=causal)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("linear_time_oracle")
def test_attention_over_a_long_sequence(dtype: str) -> None:
    check("attention", *arrays(dtype, B=1, T=LONG, H=1, G=1, D=64), causal=True)


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_give_the_same_bits(op: str, causal: bool, dtype: str) -> None:
    qkv = arrays(dtype, T=2000, D=64)
    cotangents = arrays(dtype, T=2000, D=64, seed=1)[0]
    first, second = (
        numerics.run(op, "triton", *qkv, cotangents=cotangents, causal=causal) for _ in range(2)
    )
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
def test_without_a_name_the_kernels_are_chosen(op: str) -> None:
    function, qkv = getattr(ato_jax, op), arrays("bfloat16", T=256)
    explanation = ato_jax.explain(function, *qkv)
    assert (explanation.forward.backend, explanation.backward.backend) == ("triton", "triton")
    chosen, named = (function(*qkv, implementation=name) for name in (None, "triton"))
    assert chosen.tobytes() == named.tobytes()


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(program):
        pytest.skip("compute-sanitizer is not installed")
    # One allocation per array, so that its ends are known: a pool would hide what runs over them.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    command = [program, "--tool", "memcheck", "--error-exitcode", "7"]
    # Kernels of ours alone: with XLA's and cuBLAS's watched, too, a run takes many minutes.
    command += ["--kernel-name", "kernel_substring=attention"]
    command += [sys.executable, "-m", "tests.sanitize", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


def test_no_kernel_reads_or_writes_out_of_bounds() -> None:
    found = sanitized()
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in found.stdout


def test_the_sanitizer_sees_a_planted_fault() -> None:
    found = sanitized("planted")
    assert found.returncode == 7, found.stdout[-4000:] + found.stderr[-2000:]
    assert "Invalid __global__ read" in found.stdout
