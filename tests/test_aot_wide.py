"""The kernels for wide heads compile for sm_80 and sm_90, without a GPU, and fit them.

What spills is named here, as in `tests/spills.txt` for the other kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ato_jax import tuning
from ato_jax.device import Device
from ato_jax.ops.attention import api
from ato_jax.ops.attention.spec import Residuals
from ato_jax.ops.attention.triton import wide
from tests import aot
from tests.test_aot_kernels import DEVICES

# Exact products hold three bfloat16 pieces of each operand: right first, fast later.
FEW_BYTES = 128
# The weights of 128 queries and their gradients are held whole.
LARGE_TILE_BYTES = 64
# Of two programs that share a multiprocessor of sm_90; one alone has more in flight, and was
# measured to be faster in bfloat16.
HALF_OF_SHARED = 113 * 1024
ALONE = {"bfloat16"}

# dtype, precision, B, T, S, G of 4 heads, D
Case = tuple[str, str | None, int, int, int, int, int]
EXACT: Case = ("float32", None, 64, 64, 64, 4, 8192)
TF32: Case = ("float32", "tf32", 64, 64, 64, 4, 8192)
HALF: Case = ("bfloat16", None, 64, 64, 64, 4, 8192)
ONE_SEQUENCE: Case = ("bfloat16", None, 1, 64, 64, 4, 4096)
TALL: Case = ("bfloat16", None, 64, 128, 128, 4, 1000)
LONG: Case = ("bfloat16", None, 4, 200, 256, 2, 1000)
LONG_EXACT: Case = ("float32", None, 4, 200, 256, 2, 2048)


def compiled(case: Case, capability: int) -> Iterator[aot.Compiled]:
    for function, shapes in programs(case, DEVICES[capability]):
        yield from aot.compile_function(function, *shapes, capabilities=(capability,))


def programs(case: Case, target: Device) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    dtype, precision, B, T, S, G, D = case
    q, k, v = (
        jax.ShapeDtypeStruct((B, length, heads, D), jnp.dtype(dtype))
        for length, heads in ((T, 4), (S, G), (S, G))
    )
    found: list[Any] = []

    def prepared(q: Any, k: Any, v: Any) -> Any:
        request = api.prepare(q, k, v, precision=precision, causal=T == S, return_lse=True)
        found.append(request.spec)
        return request.inputs

    inputs = jax.eval_shape(prepared, q, k, v)
    spec = found[0].for_backward()
    config = tuning.config("attention", "triton.wide", wide, spec, target)
    forward = functools.partial(wide.forward, spec, config)
    outputs = jax.eval_shape(forward, inputs)
    yield forward, (inputs,)
    backward = functools.partial(wide.backward, spec, config)
    yield backward, (Residuals(inputs, outputs), outputs)
    if T == S and target == DEVICES[90]:
        keep = functools.partial(wide.forward_for_own_backward, spec, config)
        yield keep, (inputs,)
        yield backward, (Residuals(inputs, jax.eval_shape(keep, inputs)), outputs)


@aot.requires_triton
@pytest.mark.parametrize("case", [HALF, TF32, EXACT, ONE_SEQUENCE], ids=str)
def test_compiles_without_spills(case: Case) -> None:
    found = list(compiled(case, 90))
    names = {kernel.name for kernel in found}
    assert names >= {"attention_wide_forward", "attention_wide_backward"}
    for kernel in found:
        most = aot.SHARED_LIMIT[90] if case[0] in ALONE else HALF_OF_SHARED
        # One that makes exact scores again; with the scores kept, its tile spills nothing and is
        # the fastest.
        spilled = 64 if case == EXACT and kernel.name == "attention_wide_backward" else 0
        assert kernel.spill_stores <= spilled and kernel.shared_bytes <= most, kernel


@aot.requires_triton
@pytest.mark.parametrize(
    ("case", "capability", "allowed"),
    [
        (HALF, 80, 0),
        (EXACT, 80, FEW_BYTES),
        (TALL, 90, LARGE_TILE_BYTES),
        (LONG, 90, 0),
        (LONG, 80, 0),
        (LONG_EXACT, 90, FEW_BYTES),
    ],
    ids=str,
)
def test_compiles(case: Case, capability: int, allowed: int) -> None:
    for kernel in compiled(case, capability):
        assert kernel.fits and kernel.registers <= 255, kernel
        assert max(kernel.spill_stores, kernel.spill_loads) <= allowed, kernel


@aot.requires_triton
def test_fits() -> None:
    """On sm_80 long exact products spill by the kilobyte, and take as long to compile."""
    for function, shapes in programs(LONG_EXACT, DEVICES[80]):
        asked = aot.shared_bytes(function, *shapes, capability=80)
        assert max(asked.values()) <= aot.SHARED_LIMIT[80], asked


@aot.requires_triton
@pytest.mark.parametrize("case", [EXACT, LONG], ids=str)
def test_fits_small_cards(case: Case) -> None:
    for function, shapes in programs(case, DEVICES[80]):
        asked = aot.shared_bytes(function, *shapes, capability=80)
        assert max(asked.values()) <= 99 * 1024, asked


def test_lowers_with_x64() -> None:
    with jax.enable_x64(True):
        for case in (ONE_SEQUENCE, LONG):
            for function, shapes in programs(case, DEVICES[90]):
                assert aot.triton_kernels(function, *shapes, capability=90)
