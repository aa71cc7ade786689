"""What `tune` searches for linear attention; tune.py says what each name is for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.device import Device
from ato_jax.ops.linear_attention import api
from ato_jax.ops.linear_attention.spec import LinearState, Outputs
from benchmarks import ours
from benchmarks.cases import Case

__all__ = ["api", "CASES", "WHEN", "BUDGETS"]
__all__ += ["steps", "draw", "prepare", "cotangents", "results"]

_bf16 = functools.partial(Case, "linear", dtype="bfloat16")
# The most wanted first. Each fills a card, and its arrays are larger than a cache.
CASES = (
    _bf16(B=8, T=65536, H=8, D=64),
    _bf16(B=1, T=16384, H=32, D=128),
    _bf16(B=8, T=65536, H=8, D=64, causal=True),
    _bf16(B=1, T=16384, H=32, D=128, causal=True),
    _bf16(B=8, T=16384, H=8, D=64, causal=True, decay="step"),
    _bf16(B=1, T=65536, H=16, D=128, causal=True, decay="step"),
    _bf16(B=8, T=16384, H=8, D=64, causal=True, decay="channel"),
    _bf16(B=4, T=4096, H=16, D=128, causal=True, decay="channel"),
    _bf16(B=8, T=16384, H=8, D=64, causal=True, decay="head"),
    _bf16(B=1, T=16384, H=32, D=128, causal=True, decay="head"),
    _bf16(B=4, T=8192, H=8, D=256, causal=True),
    Case("linear", B=8, T=16384, H=8, D=64, dtype="float16"),
    Case("linear", B=8, T=16384, H=8, D=64, dtype="float16", causal=True),
    Case("linear", B=4, T=16384, H=8, D=64, dtype="float32"),
    Case("linear", B=4, T=16384, H=8, D=64, dtype="float32", causal=True),
)
WHEN = ("dtype", "D", "V", "causal", "decay", "segments", "features", "precision")

# The candidates. Fields that end in `programs` are given per multiprocessor. Where a field does
# nothing for a case, its candidates are one program, and cost no time.
STEPS: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"programs": (2, 4, 8, 16), "piece_rows": (4096, 16384)},
    {"run_rows": (0, 64, 128, 256), "backward_run_rows": (0, 64, 128, 256)},
    {"stored_columns": (0, 256)},
    {"pair_block": (32, 64)},
    {"state_block": (32, 64, 128), "state_warps": (4, 8)},
    {"state_stages": (2, 3, 4, 5)},
    {"state_programs": (1, 2, 3, 4, 8)},
    {"output_block": (32, 64, 128), "output_warps": (4, 8)},
    {"output_stages": (1, 2, 3, 4, 5)},
    {"output_rows": (0, 128, 256), "output_programs": (1, 2, 4)},
    {"dq_block": (16, 32, 64, 128), "dq_warps": (4, 8)},
    {"dq_delayed": (False, True), "dq_stages": (1, 2, 3, 4)},
    {"dq_programs": (1, 2, 3, 4, 8)},
    {"dkv_block": (16, 32, 64, 128), "dkv_warps": (4, 8)},
    {"dkv_stages": (1, 2, 3, 4, 5)},
    {"dkv_rows": (0, 128, 256), "dkv_programs": (1, 2, 4)},
)

BUDGETS = {
    "state_kv": (4e-3, 1e-3, 2e-6),
    "state_k_sum": (4e-3, 1e-3, 2e-6),
    "ddecay": (1e-2, 2e-3, 2e-5),
}


def choices(step: Mapping[str, Sequence[Any]], places: int) -> Iterator[dict[str, Any]]:
    """All combinations, `programs` times the number of multiprocessors."""
    for values in itertools.product(*step.values()):
        yield {
            name: value * places if name.endswith("programs") else value
            for name, value in zip(step, values, strict=True)
        }


def steps(spec: Any, device: Device) -> list[list[dict[str, Any]]]:
    return [list(choices(step, device.multiprocessors)) for step in STEPS]


def draw(case: Case, key: jax.Array) -> dict[str, jax.Array]:
    return ours.draw(case, key)


def prepare(case: Case, arrays: Mapping[str, jax.Array]) -> api.Request:
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    return api.prepare(q, k, v, causal=case.causal, decay=arrays.get("decay"))


def cotangents(outputs: Outputs, dout: jax.Array) -> Outputs:
    return Outputs(dout, LinearState(*(jnp.zeros_like(array) for array in outputs.state)))


def results(phase: str, found: Any) -> dict[str, jax.Array]:
    if phase != "backward":
        return {"out": found.out, "state_kv": found.state.kv, "state_k_sum": found.state.k_sum}
    gradients = {"dq": found.q, "dk": found.k, "dv": found.v}
    return gradients if found.decay is None else gradients | {"ddecay": found.decay}
