"""Every kernel of the support table compiles for sm_80 and sm_90, without a GPU.

Each fits the device's shared memory and spills no register, but for what `tests/spills.txt`
accepts, and for one of the reasons below. After a change of kernels or tiles

    python -m tests.test_aot_kernels

writes that file anew (minutes); its difference is what to look at.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ato_jax import choosing, tuning
from ato_jax.backend import Residuals
from ato_jax.device import SHARED_MEMORY, Device
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.linear_attention import api as linear_attention_api
from tests import aot

APIS: dict[str, Any] = {"attention": attention_api, "linear_attention": linear_attention_api}
OPS: dict[str, choosing.Op] = {op: api.OP for op, api in APIS.items()}
DEVICES = {
    80: Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108, SHARED_MEMORY[8, 0]),
    90: Device("gpu", "NVIDIA H200", (9, 0), 132, SHARED_MEMORY[9, 0]),
}
ACCEPTED = Path(__file__).parent / "spills.txt"
# One thread's spilled bytes, beyond which a kernel needs a reason of its own.
FEW_BYTES = 1024
# Those of more bytes that were timed against tiles with fewer, and were faster.
FASTEST = {
    ("attention", 512, "-", 90, "attention_backward_dq"),
}

# op, dtype, D, causal, feature map or GATES (linear attention), or OPTIONS (attention)
Case = tuple[str, str, int, bool, str]
Target = tuple[Case, int]  # and the capability
Row = tuple[str, str, int, bool, str, int, str]  # case, capability, kernel

SIZES = {"B": 2, "T": 1000, "S": 1000, "H": 4, "G": 2}


def shape(axes: str, dtype: Any, **sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([(SIZES | sizes).get(axis, 1) for axis in axes], jnp.dtype(dtype))


def every_option() -> dict[str, Any]:
    """Of the options of attention, all that kernels see; a bias as wide as can be."""
    return {
        "window": (300, None),
        "query_offset": shape("B", "int32"),
        "bias": shape("11TS", "float32"),
        "mask": shape("BHTS", "bool"),
        "q_segment_ids": shape("BT", "int32"),
        "kv_segment_ids": shape("BS", "int32"),
        "q_lengths": shape("B", "int32"),
        "kv_lengths": shape("B", "int32"),
        "softcap": 5.0,
        "sinks": shape("H", "float32"),
        "dropout_rate": 0.1,
        "dropout_key": jax.ShapeDtypeStruct((2,), jnp.uint32),
    }


OPTIONS: dict[str, Any] = {"-": dict, "all": every_option}
GATES: dict[str, Any] = {
    "step": lambda D: {"decay": shape("BSG", "float32")},
    "channel": lambda D: {"decay": shape("BSGD", "float32", D=D)},
    "segments": lambda D: {"segment_ids": shape("BS", "int32"), "kv_lengths": shape("B", "int32")},
}


def targets() -> list[Target]:
    """Each compiles the kernels of both phases. D = 80 has the tiles of 128, but for its masks.

    What is used most is compiled for both capabilities with and without a causal mask. All else of
    sm_90 is, with the mask or without it; of sm_80, which no tile was measured for, each kernel at
    its widest tile, and once with gates.
    """
    both = [("linear_attention", "bfloat16", 128, "elu1"), ("attention", "bfloat16", 128, "-")]
    step, narrow_step = (("linear_attention", "bfloat16", D, "step") for D in (128, 64))
    by_direction: dict[tuple[bool, int], list[tuple[str, str, int, str]]] = {
        (False, 80): [
            ("linear_attention", "float32", 128, "elu1"),
            step,
            ("attention", "float32", 128, "-"),
            ("attention", "bfloat16", 512, "-"),
            ("attention", "bfloat16", 64, "all"),
        ],
        (False, 90): [
            *itertools.product(["linear_attention"], ["bfloat16"], [64], ["elu1", "identity"]),
            ("linear_attention", "float32", 64, "elu1"),
            ("linear_attention", "float16", 128, "elu1"),
            narrow_step,
            *itertools.product(["attention"], ["bfloat16"], (64, 256), ["-"]),
            ("attention", "float32", 64, "-"),
            ("attention", "float16", 128, "-"),
            step,  # Both ways it takes the most shared memory.
        ],
        # With a decay per channel: `test_fits`.
        (True, 80): [narrow_step, ("attention", "bfloat16", 256, "-")],
        (True, 90): [
            *itertools.product(["linear_attention"], ["bfloat16"], (32, 80), ["elu1"]),
            ("linear_attention", "bfloat16", 128, "identity"),
            ("linear_attention", "float32", 128, "elu1"),
            ("linear_attention", "float16", 64, "elu1"),
            step,
            ("linear_attention", "bfloat16", 128, "segments"),
            *itertools.product(["attention"], ["bfloat16"], (32, 80), ["-"]),
            ("attention", "float32", 128, "-"),
            ("attention", "float16", 64, "-"),
            ("attention", "bfloat16", 512, "-"),
            ("attention", "bfloat16", 64, "all"),
            *itertools.product(["linear_attention"], ["bfloat16"], (64, 128), ["channel"]),
        ],
    }
    return [
        ((op, dtype, D, causal, named), capability)
        for (causal, capability), more in by_direction.items()
        for op, dtype, D, named in (*both, *more)
    ]


def reason(row: Row, spilled: int) -> str | None:
    """Why a spill is accepted; None where it is not."""
    op, dtype, D, _, named, capability, kernel = row
    if spilled <= FEW_BYTES or (op, D, named, capability, kernel) in FASTEST:
        return "a few registers: the fastest tile of those tried on a card, spill and all"
    if named == "channel":
        return "factors are held twice, decayed and not, beside a state: no tile tried spills less"
    if (op, dtype, D, kernel) == ("attention", "bfloat16", 256, "attention_backward_dkv"):
        return "ds is multiplied in two parts where lse has a cotangent; right first, fast later"
    if dtype == "float32":
        return "exact products hold three bfloat16 pieces of each operand; right first, fast later"
    if capability == 80:
        return "tiles were measured on sm_90 alone: an sm_80 card runs them, slowly"
    if dtype == "float16":
        return "products with the state are TF32, twice as wide as the tiles were measured for"
    return None


def accepted() -> dict[Row, int]:
    found: dict[Row, int] = {}
    for line in ACCEPTED.read_text().splitlines():
        if line and not line.startswith("#"):
            op, dtype, D, causal, named, capability, kernel, spilled = line.split()
            row = (op, dtype, int(D), causal == "causal", named, int(capability), kernel)
            found[row] = int(spilled)
    return found


def programs(
    case: Case, target: Device, V: int | None = None
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each phase as a function of arrays, and the arrays' shapes. V is D unless it is said."""
    op, dtype, D, causal, named = case
    options: dict[str, Any] = {"causal": causal}
    if op == "linear_attention":
        options |= GATES[named](D) if named in GATES else {"feature_map": named}
    else:
        options |= {"return_lse": True} | OPTIONS[named]()
    q, k, v = (
        jax.ShapeDtypeStruct((2, 1000, heads, width), jnp.dtype(dtype))
        for heads, width in ((4, D), (2, D), (2, V or D))
    )
    arrays = {
        name: option for name, option in options.items() if isinstance(option, jax.ShapeDtypeStruct)
    }
    found: list[Any] = []  # the spec, which is no array

    def prepared(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        request = APIS[op].prepare(q, k, v, **options | arrays)
        found.append(request.spec)
        return request.inputs

    inputs = jax.eval_shape(prepared, q, k, v, arrays)
    (spec,) = found
    spec = spec.for_backward()
    triton = OPS[op].backend("triton")
    assert triton.unsupported(spec, "forward") is None
    assert triton.unsupported(spec, "backward") is None
    config = tuning.config(op, "triton", triton, spec, target)
    forward = functools.partial(triton.forward, spec, config)
    outputs = jax.eval_shape(forward, inputs)
    yield forward, (inputs,)
    residuals = Residuals(inputs, outputs)
    yield functools.partial(triton.backward, spec, config), (residuals, outputs)


def compiled(case: Case, capability: int) -> list[aot.Compiled]:
    return [
        kernel
        for function, shapes in programs(case, DEVICES[capability])
        for kernel in aot.compile_function(function, *shapes, capabilities=(capability,))
    ]


def spills(case: Case, capability: int) -> dict[Row, int]:
    found: dict[Row, int] = {}
    for kernel in compiled(case, capability):
        row = (*case, capability, kernel.name)
        spilled = max(kernel.spill_stores, kernel.spill_loads)
        found[row] = max(spilled, found.get(row, 0))
    return found


@aot.requires_triton
@pytest.mark.parametrize(
    ("case", "capability"),
    targets(),
    ids=lambda part: "-".join(map(str, part)) if isinstance(part, tuple) else str(part),
)
def test_compiles(case: Case, capability: int) -> None:
    allowed = accepted()
    for kernel in compiled(case, capability):
        assert kernel.fits, kernel
        assert kernel.registers <= 255, kernel
        spilled = max(kernel.spill_stores, kernel.spill_loads)
        assert spilled <= allowed.get((*case, capability, kernel.name), 0), kernel


def fits(case: Case, capability: int, V: int | None = None) -> None:
    for function, shapes in programs(case, DEVICES[capability], V):
        asked = aot.shared_bytes(function, *shapes, capability=capability)
        assert 1024 < max(asked.values()) <= aot.SHARED_LIMIT[capability], asked


@aot.requires_triton
def test_fits() -> None:
    """On sm_80 a decay per channel spills tens of kilobytes, which takes ptxas half a minute."""
    fits(("linear_attention", "bfloat16", 128, True, "channel"), 80)


@aot.requires_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("D", "V", "causal", "named"),
    [
        (96, 256, False, "step"),
        (128, 256, False, "segments"),
        (80, 200, False, "segments"),
        (128, 192, True, "step"),
        (64, 256, True, "elu1"),
    ],
)
def test_wide_values_fit(D: int, V: int, causal: bool, named: str, capability: int) -> None:
    """States of more than 128 x 128 are multiplied in parts, by tiles of their own."""
    fits(("linear_attention", "bfloat16", D, causal, named), capability, V)


@aot.requires_triton
@pytest.mark.parametrize("op", sorted(OPS))
def test_compiles_with_x64(op: str) -> None:
    case = (op, "bfloat16", 64, True, "elu1" if op == "linear_attention" else "-")
    with jax.enable_x64(True):
        fits(case, 90)


def test_every_option_lowers_with_x64() -> None:
    with jax.enable_x64(True):
        for function, shapes in programs(("attention", "bfloat16", 64, True, "all"), DEVICES[90]):
            assert aot.triton_kernels(function, *shapes, capability=90)


def test_every_accepted_spill_has_a_reason() -> None:
    for row, spilled in accepted().items():
        assert reason(row, spilled) is not None, (row, spilled)
        assert (row[:5], row[5]) in targets(), row


def write() -> None:
    # By one thread: two that import it at once lock each other out.
    importlib.import_module("triton.backends.nvidia.compiler")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda pair: spills(*pair), targets()))
    by_reason: dict[str, list[str]] = {}
    for rows in found:
        for row, spilled in rows.items():
            if spilled:
                words = [*map(str, row[:3]), "causal" if row[3] else "full", *map(str, row[4:])]
                because = reason(row, spilled) or "NO REASON: not accepted"
                by_reason.setdefault(because, []).append(" ".join([*words, str(spilled)]))
    lines = [
        "# Bytes of registers that a thread of each kernel spills, and why that is accepted;",
        "# made by python -m tests.test_aot_kernels. What is not here spills nothing.",
        "# op, dtype, D, causal or full, feature map or options, capability, kernel, bytes",
    ]
    for because, rows in sorted(by_reason.items()):
        lines += ["", f"# {because}", *rows]
    ACCEPTED.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
