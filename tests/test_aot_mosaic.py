"""What Mosaic GPU's kernels of linear attention take on a Hopper card, and what a call launches.

    ATO_ALL_ROWS=1 python -m pytest tests/test_aot_mosaic.py    compiles every call

The ordinary tests compile a quarter: with gates and without, of steps and of channels, one way and
both ways, of narrow and of wide heads. After a change to the kernels, compile all.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from types import ModuleType

import jax
import pytest

from tests import aot_attention, aot_covering, aot_delta_rule, aot_mosaic
from tests.aot_mosaic import Call, Compiled, Found, compile_call, requires_plugin

# Kernels launched in all, and bytes of registers that each spills: what is not here spills none.
# The second of two that write the same outputs, for pieces that lose much, may be called new_body.
WHOLE = {"whole_output": 32, "wide_query_gradient": 52, "wide_key_gradient": 44}
CALLS = [
    (
        Call(1, 65536, 16, 128),
        8,
        {"query_gradient": 52, "key_gradient": 64, "output": 8},
    ),
    (
        Call(1, 16384, 16, 128, feature_map="silu"),
        8,
        {"query_gradient": 40, "key_gradient": 80, "output": 8},
    ),
    (
        Call(1, 65536, 16, 128, decay="step"),
        14,
        {"query_gradient": 64, "new_body": 648, "key_gradient": 212, "output": 260},
    ),
    (
        Call(1, 16384, 32, 96, decay="step"),
        14,
        {"query_gradient": 48, "new_body": 328, "key_gradient": 68, "output": 184},
    ),
    (Call(8, 4096, 8, 64, layout="bhtd"), 8, {"key_gradient": 60}),
    (
        Call(8, 4096, 8, 64, decay="step", layout="bhtd", normalize=False, states=True),
        23,
        {"key_gradient": 124, "new_body": 624, "query_gradient": 8, "output": 16},
    ),
    (
        Call(8, 16384, 8, 64, decay="head"),
        16,
        {"query_gradient": 20, "new_body": 794, "key_gradient": 140, "output": 40},
    ),
    # A tail that is no multiple of 8 rows, whose tiles are copied as other references: of whole
    # ones the same kernels spill as much.
    (
        Call(8, 4091, 8, 64, decay="step"),
        14,
        {"key_gradient": 120, "new_body": 616, "query_gradient": 20, "output": 40},
    ),
    # Of one head 16 copies fill a tile of the walks for gradients.
    (
        Call(1, 16379, 16, 128, decay="step"),
        14,
        {"query_gradient": 240, "new_body": 696, "key_gradient": 432, "output": 276},
    ),
    (
        Call(1, 16384, 16, 128, causal=False, decay="step"),
        37,
        {
            "later_output": 260,
            "output": 360,
            "key_gradient": 212,
            "later_key_gradient": 412,
            "query_gradient": 12,
            "later_query_gradient": 200,
            "new_body": 1036,
        },
    ),
    (Call(1, 16384, 32, 128, causal=False), 7, {}),
    (Call(1, 16384, 32, 128, causal=False, dtype="float16"), 12, {}),
    (Call(1, 16384, 8, 192, causal=False, states=True), 9, {}),
    (Call(1, 16384, 8, 256, causal=False), 9, WHOLE),
    (
        Call(1, 16384, 8, 192),
        13,
        {},
    ),
    (
        Call(1, 16384, 8, 256),
        13,
        {"causal_wide_query_gradient": 132, "causal_wide_key_gradients": 28},
    ),
    (
        Call(1, 16384, 8, 256, decay="step", segments=True),
        20,  # and what a conditional does
        {
            "causal_wide_output": 44,
            "causal_wide_query_gradient": 320,
            "causal_wide_key_gradients": 200,
        },
    ),
    (
        Call(4, 4096, 16, 128, decay="channel"),
        8,  # and what a conditional does
        {
            "channel_sums": 8,
            "channel_output": 1276,
            "channel_query_gradient": 224,
            "channel_key_gradient": 72,
        },
    ),
    (
        Call(8, 4096, 8, 64, decay="channel", normalize=False),
        8,
        {"channel_sums": 32, "channel_output": 776, "channel_key_gradient": 112},
    ),
    (
        Call(1, 16384, 32, 128, causal=False, dtype="float32"),
        9,
        {"float32_query_gradient": 8, "float32_key_gradient": 220, "float32_output": 76},
    ),
    (Call(1, 16384, 32, 64, causal=False, dtype="float32", precision="tf32"), 9, {}),
    (
        Call(1, 16384, 8, 256, causal=False, segments=True),
        36,
        {
            "both_ways_wide_output": 16,
            "both_ways_wide_query_gradient": 764,
            "both_ways_wide_key_gradients": 896,
        },
    ),
    (
        Call(1, 16384, 8, 256, dtype="float16", segments=True),
        41,
        {
            "causal_wide_output": 28,
            "causal_wide_query_gradient": 160,
            "causal_wide_key_gradients": 56,
        },
    ),
    (
        Call(1, 16384, 8, 256, decay="head"),
        26,
        {
            "causal_wide_output": 28,
            "causal_wide_query_gradient": 296,
            "causal_wide_key_gradients": 192,
        },
    ),
    (
        Call(4, 4096, 16, 128, decay="channel", feature_map="identity", normalize=False),
        8,
        {
            "channel_sums": 24,
            "channel_output": 2100,  # most of it for turns of a steep chunk
            "channel_query_gradient": 8,
            "channel_key_gradient": 80,
        },
    ),
    (
        Call(4, 4096, 16, 128, decay="channel", segments=True),
        13,
        {
            "channel_sums": 88,
            "channel_output": 2564,
            "channel_query_gradient": 564,
            "channel_query_sums": 72,
            "channel_key_gradient": 348,
        },
    ),
]
# Gates of heads take the kernels of those of steps. A change to the kernels of the first call shows
# on every run in their modules' text, which tests/test_mosaic_kit.py compares for fewer rows.
ORDINARY = [CALLS[n] for n in (3, 10, 13, 16, 17, 21)]
if os.environ.get("ATO_ALL_ROWS") == "1":
    ORDINARY = CALLS
# The same kernel, compiled again, spills a few bytes more or less.
MARGIN = 16
# Of gates of channels, at D = 128: for want of registers. In two kernels nothing is, and it is no
# faster.
SERIALIZED = {"channel_output"}


def label(call: Call) -> str:
    seen = "causal" if call.causal else "every key"
    mapped = "" if call.feature_map == "elu1" else f", {call.feature_map}"
    of_group = "" if call.G is None else f", H = {call.H // call.G} G"
    in_half = "" if call.dtype == "bfloat16" else f", {call.dtype}"
    in_half += f", {call.precision}" if call.precision else ""
    cut = ", segments" * call.segments
    return f"D {call.D}, {seen}, decay {call.decay}{mapped}{of_group}{in_half}{cut}"


of_the_oldest = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="the figures are those of the oldest JAX's compiler"
)


@requires_plugin
@of_the_oldest
@pytest.mark.parametrize(
    "call, launches, spills",
    ORDINARY,
    ids=[label(call) for call, *_ in ORDINARY],
)
def test_calls_compile(call: Call, launches: int, spills: dict[str, int]) -> None:
    found = compile_call(call, machine_code=call.decay is not None)
    assert not any(kernel.hazards for kernel in found.kernels), str(found)
    assert sum(found.launches.values()) <= launches, found.launches
    assert not {kernel.name for kernel in found.kernels if kernel.serialized} - SERIALIZED
    for kernel in found.kernels:
        allowed = spills.get(kernel.name, -MARGIN) + MARGIN
        assert kernel.spill_stores <= allowed, kernel
    named = {name for name in found.launches if name not in ("fusion", "conditional", "copy")}
    of_mosaic = {kernel.name for kernel in found.kernels}
    assert of_mosaic - {"new_body"} <= named or "conditional" in found.launches


@requires_plugin
def test_what_does_not_compile_says_so() -> None:
    with pytest.raises(RuntimeError, match="needs D and V"):
        compile_call(Call(1, 16384, 8, 300))


OUTPUT = Compiled("output", 96, 8, True)


@pytest.mark.parametrize(
    "module, compiles, call, found",
    [
        (
            aot_mosaic,
            "compile_call",
            ['{"B": 1, "T": 64, "H": 1, "D": 128}'],
            Found([OUTPUT], collections.Counter(output=1)),
        ),
        (aot_attention, "compile_all", ['{"T": 64, "D": 128}'], [OUTPUT]),
        (aot_delta_rule, "compile_call", ['{"T": 64, "D": 128}'], [OUTPUT]),
        (aot_covering, "compile_rows", ["mosaic_delta_rule", "0", "5"], [OUTPUT]),
    ],
)
def test_the_commands_start_a_process_with_the_plugin(
    module: ModuleType,
    compiles: str,
    call: list[str],
    found: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The JAX of `make venv` cannot compile for a card by itself."""
    asked, here = [], []
    monkeypatch.setattr(module, compiles, lambda call: asked.append(call) or found)
    module.run(*call)
    told = capsys.readouterr().out
    assert told.startswith("output: 96 registers a thread, 8 bytes spilled, products serialized\n")
    # That process compiles the same call, and starts no other.
    monkeypatch.setattr(module, "main", here.append)
    module.run(aot_mosaic.IN_THIS_PROCESS, json.dumps(dataclasses.asdict(asked[0])))
    assert here == asked and len(asked) == 1
