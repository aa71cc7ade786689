"""This library beside other implementations on this machine: differences and times.

Softmax attention beside jax.nn.dot_product_attention and, where it is installed, PyTorch's
scaled_dot_product_attention; linear attention beside plain JAX with its features in memory. All
get the same numbers, are compared with float64 first, and are timed in turns, so that what else
the machine does meets all of them alike. Medians are printed, of --turns turns.

    python -m examples.03_comparison                    less than a minute on two CPU cores
    python -m examples.03_comparison --tokens 4096      another length

needs `pip install '.[torch]'` for PyTorch's, and writes the figures (JSON) to --output. The
benchmarks that results are made of are `python -m benchmarks`.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if not __package__:  # started by its path, from whatever folder
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import ato_jax
from examples import command

B, H, D = 1, 4, 64
EPS = 1e-6

# What gives the array, and what waits until it is there.
Contender = Callable[[], Any]


def plain_linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """elu + 1, normalised, every query sees every key."""
    q, k = (jax.nn.elu(x) + 1 for x in (q, k))
    state = jnp.einsum("bshd,bshv->bhdv", k, v)
    numerator = jnp.einsum("bthd,bhdv->bthv", q, state)
    denominator = jnp.einsum("bthd,bhd->bth", q, k.sum(axis=1))
    return numerator / jnp.maximum(denominator, EPS)[..., None]


def exactly(arrays: Sequence[np.ndarray], linear: bool) -> np.ndarray:
    """Both operations in float64, quadratic."""
    q, k, v = (array.astype(np.float64) for array in arrays)
    if linear:
        q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    weights = np.einsum("bthd,bshd->bhts", q, k)
    if not linear:
        weights = np.exp((weights - weights.max(axis=-1, keepdims=True)) * D**-0.5)
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhts,bshv->bthv", weights, v)


def contenders(arrays: Sequence[np.ndarray]) -> dict[str, dict[str, Contender]]:
    """By operation and name; each gives out [B, T, H, V] and is compiled once."""

    def in_jax(function: Callable[..., jax.Array]) -> Contender:
        compiled, inputs = jax.jit(function), [jnp.asarray(array) for array in arrays]
        return lambda: jax.block_until_ready(compiled(*inputs))

    found = {
        "softmax": {
            "ato_jax": in_jax(ato_jax.attention),
            "jax.nn": in_jax(jax.nn.dot_product_attention),
        },
        "linear": {
            "ato_jax": in_jax(ato_jax.linear_attention),
            "plain JAX": in_jax(plain_linear_attention),
        },
    }
    if importlib.util.find_spec("torch"):
        import torch

        place = "cuda" if torch.cuda.is_available() else "cpu"
        tensors = [torch.from_numpy(array).to(place).transpose(1, 2) for array in arrays]

        def sdpa() -> np.ndarray:
            out = torch.nn.functional.scaled_dot_product_attention(*tensors)
            return out.transpose(1, 2).cpu().numpy()

        found["softmax"]["PyTorch's SDPA"] = sdpa
    return found


def compare(T: int, turns: int) -> list[dict[str, Any]]:
    """A row for each contender."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((B, T, H, D), np.float32) for _ in range(3)]
    rows = []
    for op, members in contenders(arrays).items():
        exact = exactly(arrays, linear=op == "linear")
        seconds: dict[str, list[float]] = {name: [] for name in members}
        for name, call in members.items():
            error = np.linalg.norm(np.asarray(call()) - exact) / np.linalg.norm(exact)
            rows.append({"op": op, "contender": name, "error": float(error)})
        for _ in range(turns):
            for name, call in members.items():
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
        for row in rows[-len(members) :]:
            row["milliseconds"] = 1e3 * statistics.median(seconds[row["contender"]])
    return rows


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = command.parser(__doc__, output="comparison_output")
    parser.add_argument("--tokens", type=int, default=1024, help="T, at most 8192: T * T in memory")
    parser.add_argument("--turns", type=int, default=15, help="how often each is timed")
    options = parser.parse_args(arguments)
    for name, most in (("tokens", 8192), ("turns", 1000)):
        if not 1 <= getattr(options, name) <= most:
            parser.error(f"--{name} must be 1 to {most}, got {getattr(options, name)}")
    rows = compare(options.tokens, options.turns)
    print(f"float32, B {B}, T {options.tokens}, H {H}, D {D}, on {jax.devices()[0].device_kind}\n")
    print(f"{'operation':<10} {'implementation':<16} {'error':>8} {'milliseconds':>13}")
    for row in rows:
        print(
            f"{row['op']:<10} {row['contender']:<16} {row['error']:>8.1e} "
            f"{row['milliseconds']:>13.3f}"
        )
    path = options.output / "comparison.json"
    path.write_text(json.dumps(rows, indent=2) + "\n")
    command.told(path)
    return rows


if __name__ == "__main__":
    main()
