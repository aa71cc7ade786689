"""What rounding took from out, in 8 bits: `Outputs.rest`, made where out is still in registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

from ato_jax import device, mosaic
from ato_jax.mosaic import F32, TILE
from ato_jax.mosaic.assembly import element, instructions
from ato_jax.ops.attention.mosaic_gpu import frame
from ato_jax.ops.attention.spec import REST_UNITS, AttentionSpec, rest_in_units

# Adding it leaves the nearest whole number in the lowest bits of a float32 number.
MAGIC = np.float32(1.5 * 2**23)
# Takes two numbers of out, before ($1, $2) and after rounding ($3, $4). Their rests are from -127
# to 127, so the lowest byte of each sum holds one. A conversion to integers would take four times
# as long. Only a subnormal number may lose more than 127 units: then the byte wraps around. In
# float16 such a number is below 2^-14, and a byte is at most 128 units of 2^-11 / 127 of it. So
# whatever the byte is, it moves the number by less than 1.01 times 2^-25.
OF_A_PAIR = """{{
.reg .f32 x, y;
.reg .b32 a, b;
sub.f32 x, $1, $3;
rcp.approx.ftz.f32 y, $3;
mul.f32 x, x, y;
fma.rn.f32 x, x, {units}, {magic};
mov.b32 a, x;
sub.f32 x, $2, $4;
rcp.approx.ftz.f32 y, $4;
mul.f32 x, x, y;
fma.rn.f32 x, x, {units}, {magic};
mov.b32 b, x;
prmt.b32 a, a, b, 0x3340;
cvt.u16.u32 $0, a;
}}"""


def _bits(number: np.float32) -> str:
    return f"0f{number.view(np.uint32):08X}"


def in_units(spec: AttentionSpec, exact: jax.Array, rounded: jax.Array) -> jax.Array:
    """`rest_in_units` of tiles in registers. Where out is 0, a backward pass multiplies the rest by
    0: any value will do."""
    if device.interpreting():
        return rest_in_units(spec, exact, rounded)
    own = plgpu.ShapeDtypeStruct(exact.shape, jnp.int8, layout=TILE)
    units = np.float32(1 / REST_UNITS[spec.dtype])
    text = OF_A_PAIR.format(units=_bits(units), magic=_bits(MAGIC))

    @plgpu.inline_mgpu(arg_types=(TILE, TILE), return_type=own)
    def convert(_: Any, exact: Any, rounded: Any) -> Any:
        half = ir.IntegerType.get_signless(16)
        pair = ir.VectorType.get((2,), ir.IntegerType.get_signless(8))
        found = np.empty(exact.registers.shape, object)
        for place, numbers in np.ndenumerate(exact.registers):
            both = numbers, rounded.registers[place]
            operands = [element(one, n) for one in both for n in range(2)]
            word = instructions(text, "=h,f,f,f,f", operands, half)
            found[place] = ir.Operation.create(
                "llvm.bitcast", results=[pair], operands=[word]
            ).result
        return mgpu.FragmentedArray(_registers=found, _layout=exact.layout, _is_signed=True)

    return convert(exact, rounded.astype(F32))


def store(spec: AttentionSpec, ref: Any, at: tuple[Any, ...], exact: list[jax.Array]) -> None:
    """Stores, from registers, what rounding takes from rows `at` of out, given in float32 in parts
    of columns."""
    columns = 0
    for part in exact:
        rounded = mosaic.rounded(part, frame.dtype_of(spec))
        own = ref.at[(*at, pl.ds(columns, part.shape[1]))]  # [R, columns of the part]
        mosaic.store_in_memory(own, in_units(spec, part, rounded))
        columns += part.shape[1]
