"""Linear attention's Triton kernels on cards whose blocks have 99 KiB: sm_86, sm_89 and sm_120.

Every kernel of a call fits that shared memory, and a call whose V is cut there comes to the same
numbers. What a kernel asks for is found without a GPU, as sm_80's instructions have it: the three
architectures multiply by these, and came to the same bytes.

    ATO_ALL_ROWS=1 python -m pytest tests/test_linear_small_cards.py     every call

takes a core about half an hour. The ordinary tests take the calls that ask for the most, and those
of each regime that only these cards have.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.backend import Residuals
from ato_jax.ops.linear_attention import api, triton
from ato_jax.ops.linear_attention.triton import config as configs
from tests import regimes

A10 = regimes.CARDS["A10"]
DTYPES = ("bfloat16", "float16", "float32", "float32, TF32")
LONG, FEW = 1000, 16
# The axes of arrays, and options.
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, states": {"state": True},
    "full, decay": {"decay": "BSG"},
    "full, segments": {"segment_ids": "BS"},
    "full, segments of both": {"q_segment_ids": "BT", "kv_segment_ids": "BS", "decay": "BSG"},
    "full, favor": {"feature_map": "favor"},
    "causal": {"causal": True},
    "causal, lengths": {"causal": True, "q_lengths": "B", "kv_lengths": "B"},
    "causal, signed features": {"causal": True, "feature_map": "silu", "normalize": False},
    "causal, few rows": {"causal": True, "feature_map": "silu", "T": FEW},
    "causal, decay": {"causal": True, "decay": "BSG"},
    "causal, decay of heads, states": {"causal": True, "decay": "G", "state": True},
    "causal, few rows, decay": {"causal": True, "decay": "G", "T": FEW},
    "causal, decay per channel": {"causal": True, "decay": "BSGD"},
}
Case = tuple[str, str, tuple[int, int]]
CASES: list[Case] = list(itertools.product(CALLS, DTYPES, regimes.SIZES))
SAMPLE: list[Case] = [
    ("full", "float16", (128, 128)),
    ("full", "float32, TF32", (256, 256)),
    ("causal", "float32", (128, 128)),
    ("full, decay", "bfloat16", (256, 64)),
    ("causal, few rows", "bfloat16", (128, 128)),
    ("causal, decay", "bfloat16", (256, 16)),
    ("causal, decay", "float32", (256, 16)),
    ("causal, decay per channel", "bfloat16", (256, 16)),
    ("causal, decay per channel", "float32", (128, 128)),
]
if os.environ.get("ATO_ALL_ROWS") == "1":
    SAMPLE = CASES


def programs(case: Case) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each phase as a function of arrays, and the arrays' shapes; none where it is refused."""
    name, dtype, (D, V) = case
    options = dict(CALLS[name])
    T = options.pop("T", LONG)
    sizes = {"B": 2, "T": T, "S": T, "H": 4, "G": 2, "D": D, "V": V}
    dtype, _, tf32 = dtype.partition(", ")
    if tf32:
        options["precision"] = "tf32"
    if options.get("feature_map") == "favor":
        options["feature_map"] = ato_jax.favor(jax.random.key(0), D, sizes["D"])

    def shape(axes: str, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct([sizes[axis] for axis in axes], jnp.dtype(dtype))

    arrays = {
        option: shape(options.pop(option), "float32" if option == "decay" else "int32")
        for option in [*options]
        if option == "decay" or option.endswith(("_ids", "_lengths"))
    }
    if options.pop("state", False):
        state = ato_jax.LinearState(shape("BGDV", "float32"), shape("BGD", "float32"))
        arrays["initial_state"], options["return_state"] = state, True
    found: list[Any] = []  # the spec, which is no array

    def prepared(arrays: Any) -> Any:
        request = api.prepare(**arrays, **options)
        found.append(request.spec)
        return request.inputs

    arrays |= {"q": shape("BTHD", dtype), "k": shape("BSGD", dtype), "v": shape("BSGV", dtype)}
    inputs = jax.eval_shape(prepared, arrays)
    spec = found[0].for_backward()
    if any(triton.unsupported(spec, phase) for phase in ("forward", "backward")):
        return
    config = triton.default_config(spec, A10)
    forward = functools.partial(triton.forward, spec, config)
    outputs = jax.eval_shape(forward, inputs)
    yield forward, (inputs,)
    residuals = Residuals(inputs, outputs)
    yield functools.partial(triton.backward, spec, config), (residuals, outputs)


def most_bytes(case: Case) -> int:
    asked = (aot.shared_bytes(of, *shapes, capability=80) for of, shapes in programs(case))
    return max((max(kernels.values()) for kernels in asked), default=0)


@aot.requires_triton
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_kernels_fit(case: Case) -> None:
    assert most_bytes(case) <= A10.shared_memory == 99 * 1024


@aot.requires_triton
def test_one_more_stage_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that has two stages on these cards, with the three of larger ones."""
    case: Case = ("causal, decay", "float32", (256, 16))
    larger = [
        row._replace(state=(*row.state[:2], row.state[2] + 1)) if row.memory == "small" else row
        for row in configs.REGIMES
    ]
    monkeypatch.setattr(configs, "REGIMES", tuple(larger))
    assert most_bytes(case) > A10.shared_memory


def test_every_memory_of_the_cards_has_its_word() -> None:
    by_bytes = {163 * 1024: "tight", 227 * 1024: "roomy", 99 * 1024: "small"}
    _, spec = next(regimes.calls())
    for capability, size in device.SHARED_MEMORY.items():
        card = device.Device("gpu", "", capability, 1, size)
        wanted = next(by_bytes[known] for known in sorted(by_bytes, reverse=True) if size >= known)
        assert configs.facts_of(spec, card).memory == wanted


def draw(*shape: int, seed: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "causal"),
        ("float16", "full, states"),
        ("float32", "causal, decay"),
        ("bfloat16", "causal, few rows"),
        ("float32", "causal, decay per channel"),
    ],
)
def test_values_cut_in_two(dtype: str, name: str) -> None:
    """Interpreted, against the float64 reference: of 128 columns, which are two blocks there."""
    T, H, G, D, V = (8 if "few" in name else 40), 2, 1, 128, 128
    options = {key: CALLS[name][key] for key in CALLS[name] if key not in ("T", "state", "decay")}
    q, k = draw(1, T, H, D, seed=0, dtype=dtype), draw(1, T, G, D, seed=1, dtype=dtype)
    if "decay" in CALLS[name]:
        axes = {"B": 1, "S": T, "G": G, "D": D}
        shape = [axes[axis] for axis in CALLS[name]["decay"]]
        options["decay"] = -abs(draw(*shape, seed=3, dtype="float32")) / 16
    if "state" in CALLS[name]:
        state = draw(1, G, D, V, seed=4, dtype="float32"), draw(1, G, D, seed=5, dtype="float32")
        options["initial_state"] = ato_jax.LinearState(state[0], abs(state[1]) + 1)
        options["return_state"] = True
    v = draw(1, T, G, V, seed=2, dtype=dtype)
    wanted = numerics.oracle("linear_attention", q, k, v, **options)
    spec = wanted.request.spec
    config = triton.default_config(spec, A10)
    finer = triton.finer(spec, "backward")
    assert triton.blocks_of_values(finer, config, "backward") == 2
    roomy = dataclasses.replace(config, wide_state=128 * 128)
    assert triton.blocks_of_values(finer, roomy, "backward") == 1
    with ato_jax.interpret():
        found = numerics.run_backends("triton", "triton", wanted, device=A10)
    numerics.compare(found, wanted)
