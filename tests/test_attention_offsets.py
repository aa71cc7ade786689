"""Softmax attention on arrays of more than 2^31 elements: 64-bit offsets where they are needed.

See tests/test_linear_offsets.py for how Pallas chooses the width of an offset, by array. A mask has
one byte an element, so that 2^32 bytes would be counted in 32 bits, which hold half of that.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from ato_jax.ops.attention import triton
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs, Residuals
from tests import aot
from tests.test_aot_kernels import DEVICES
from tests.test_linear_offsets import widths


def kernels(T: int, S: int, D: int = 128, **planes: jax.ShapeDtypeStruct) -> list[aot.Kernel]:
    """Of a forward and a backward pass with 16 * 64 heads."""
    B, H = 16, 64
    full = {name: tuple(size > 1 for size in plane.shape) for name, plane in planes.items()}
    spec = AttentionSpec(B, T, S, H, H, D, D, "bfloat16", 1.0, **full)
    config = triton.default_config(spec, DEVICES[90])
    q, k = (jax.ShapeDtypeStruct((B, length, H, D), jnp.bfloat16) for length in (T, S))
    inputs = Inputs(q, k, k, **planes)

    def both(inputs: Inputs, do: jax.Array) -> Inputs:
        outputs = triton.forward(spec, config, inputs)
        residuals = Residuals(inputs, outputs)
        return triton.backward(spec, config, residuals, Outputs(do, outputs.lse))

    return aot.triton_kernels(both, inputs, q, capability=90)


@pytest.mark.parametrize(("T", "width"), [(2**14, 32), (2**14 + 64, 64)])
def test_width_of_offsets(T: int, width: int) -> None:
    found = kernels(T, T)
    assert len(found) == 3
    for kernel in found:
        assert widths(kernel)["bf16"] == {width}, kernel.name
        assert widths(kernel)["f32"] == {32}, kernel.name


@pytest.mark.parametrize(("T", "S"), [(2**10, 2**11), (2**10 + 16, 2**11), (2**11, 2**11 + 1)])
def test_masks_and_biases_have_offsets_wide_enough(T: int, S: int) -> None:
    shape = (16, 64, T, S)
    planes = functools.partial(jax.ShapeDtypeStruct, shape)
    elements = 16 * 64 * T * S
    for kernel in kernels(T, S, mask=planes(jnp.bool_)):
        found = widths(kernel)
        # Up to 2^31 elements of a byte each; beyond, of two bytes, more than 2^32.
        assert found.get("i16" if elements > 2**31 else "i1") == {64 if elements > 2**31 else 32}
    for kernel in kernels(T, S, bias=planes(jnp.float32)):
        assert 64 in widths(kernel)["f32"], kernel.name


def test_strands_beyond_the_end_are_masked() -> None:
    """The second half of the last block of 128 queries, which 192 divides into thirds of 64."""
    forward, *_ = kernels(192, 192, D=64)
    stores = [line for line in forward.ttir.splitlines() if "tt.store" in line]
    assert len(stores) == 4
    assert all(line.split(":")[0].count("%") == 3 for line in stores), stores
