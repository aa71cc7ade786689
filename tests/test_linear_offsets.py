"""Arrays of more than 2^31 elements: which of the kernels' offsets are 64 bits wide.

Pallas counts offsets in elements, each term (start of the block + row) * stride, and makes them of
int64 where the array that a ref belongs to has more than 2^32 bytes, else of int32: of 2 bytes an
element, those are 2^31 elements, the last of which int32 still reaches. That choice is by array
and static, so that small arrays keep 32-bit arithmetic, and nothing in our kernels multiplies a
row by a stride: rows, heads and batch entries by themselves are small. What has to hold, and is
tested here, is that the width is chosen so, by every kernel for every large array.

An int32 index is extended by zeros, so that a row below 0 becomes one far behind the end: these
are masked, as are those beyond the end.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ato_jax.ops.linear_attention import features, triton
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals
from tests import aot
from tests.test_linear_decode import GPUS


def call(T: int, causal: bool, layout: str = "bthd", B: int = 16, H: int = 64) -> tuple[Any, ...]:
    """Forward and backward as a function, and its arguments: q, k, v and do of 2^17 T elements."""
    D = 128
    axes = (T, H) if layout == "bthd" else (H, T)
    spec = LinearAttentionSpec(
        B, T, T, H, H, D, D, D, "bfloat16", features.NAMED["elu1"], True, 1.0, 1e-6, layout, causal
    )
    config = triton.default_config(spec, GPUS[90])
    shape = jax.ShapeDtypeStruct((B, *axes, D), jnp.bfloat16)
    inputs = Inputs(shape, shape, shape)

    def both(inputs: Inputs, do: jax.Array) -> Inputs:
        outputs = triton.forward(spec, config, inputs)
        cotangents = Outputs(do, outputs.state)
        return triton.backward(spec, config, Residuals(inputs, outputs), cotangents)

    return both, inputs, shape


def widths(kernel: aot.Kernel) -> dict[str, set[int]]:
    """The widths of the offsets that the kernel adds to pointers, to bfloat16 and to float32."""
    found: dict[str, set[int]] = {}
    for element, width in re.findall(
        r"tt\.addptr [^\n]*!tt\.ptr<(\w+)>>?, (?:tensor<[\dx]*x)?i(\d+)", kernel.ttir
    ):
        found.setdefault(element, set()).add(int(width))
    return found


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("causal", [False, True])
def test_width_of_offsets(causal: bool, layout: str) -> None:
    # Nearly 2^31 elements, and a few more; causal, the states of all runs are as many.
    for T, width in ((2**14 - 256, 32), (2**14 + 64, 64)):
        for kernel in aot.triton_kernels(*call(T, causal, layout), capability=90):
            assert widths(kernel).get("bf16", {width}) == {width}, (T, kernel.name)
            # Other states and normalisers are small, whatever the sequences are.
            assert widths(kernel).get("f32", {32}) == {32}, (T, kernel.name)


@aot.requires_triton
def test_wide_offsets_do_not_cost_spills() -> None:
    """64-bit offsets take registers: a kernel spills a few more of them at most."""
    narrow, wide = (
        aot.compile_function(*call(T, causal=True, B=B, H=H), capabilities=(90,))
        for T, B, H in ((2**14, 4, 8), (2**15, 16, 64))
    )
    for before, after in zip(narrow, wide, strict=True):
        assert before.fits and after.fits, (before, after)
        assert after.spill_stores <= before.spill_stores + 256, (before, after)
