"""The softcap's tanh and its slope in the backward kernels, of raw scores s and x = factor s.

    e = exp(-2 |x|),  r = 2 / (1 + e)
    tanh |x| = r - 1
    1 - tanh^2 x = e r^2                cancels no digits where tanh is close to 1

Three instructions on the unit for special functions with the weight's exponential, and none of
them needs a case apart: 1 + e is between 1 and 2.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

from ato_jax import device
from ato_jax.mosaic import F32, TILE
from ato_jax.mosaic.assembly import element, field, instructions
from ato_jax.ops.attention.mosaic_gpu.softmax import LOG2_E
from ato_jax.ops.attention.spec import SMALLEST_SLOPE

# $0, $1: r and tanh; $2, $3: x and s.
TEXT = """{
.reg .f32 positive;
rcp.approx.ftz.f32 $0, $2;
add.f32 positive, $0, 0fBF800000;
copysign.f32 $1, $3, positive;
}"""


def capped(s: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
    """tanh and its slope."""
    e = jnp.exp2(jnp.abs(s) * (-2 * LOG2_E * factor))
    r, tanh = of_half_sums(e * 0.5 + 0.5, s)
    u = jnp.where(e > SMALLEST_SLOPE / 4, e * r, 0.0)
    return tanh, u * r


def of_half_sums(x: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """r = 1 / x, x between a half and 1, where a division has cases for 0 and infinity, and r - 1
    with the sign of s."""
    if device.interpreting():
        r = 1 / x
        return r, jnp.where(s < 0, 1 - r, r - 1)
    own = plgpu.ShapeDtypeStruct(x.shape, F32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, TILE), return_type=(own, own))
    def each(_: Any, x: Any, s: Any) -> Any:
        number = ir.F32Type.get()
        of_pair, of_both = ir.VectorType.get([2], number), ir.Type.parse("!llvm.struct<(f32, f32)>")
        found = [np.empty(x.registers.shape, object) for _ in range(2)]
        for place, pair in np.ndenumerate(x.registers):
            halves = []
            for half in range(2):
                operands = [element(pair, half), element(s.registers[place], half)]
                both = instructions(TEXT, "=&f,=&f,f,f", operands, of_both)
                halves.append([field(both, result, number) for result in range(2)])
            for own, operands in zip(found, zip(*halves, strict=True), strict=True):
                own[place] = ir.Operation.create(
                    "vector.from_elements", results=[of_pair], operands=operands
                ).result
        return tuple(
            mgpu.FragmentedArray(_registers=own, _layout=x.layout, _is_signed=None)
            for own in found
        )

    r, tanh = each(x, s)
    return r, tanh
