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
# This text takes two numbers of out, before ($1, $2) and after rounding ($3, $4). Their rests are
# from -127 to 127 units, so the lowest byte of each sum holds one. A conversion to integers would
# take four times as long. Only a subnormal number may lose more than 127 units: then the byte wraps
# around. In float16 such a number is below 2^-14, and a byte is at most 128 units of 2^-11 / 127 of
# it. So whatever the byte is, it moves the number by less than 1.01 times 2^-25.
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


# Four threads hold two columns each of four times eight ($1 to $4, from left to right). Afterwards
# each holds all columns of one eight: they exchange two of the four with the thread that is two
# further, then one of the two with its neighbour. $5 is the thread's number.
OF_A_ROW = """{
.reg .b32 left, right, kept, sent, low, high, own, other;
.reg .pred upper, odd;
and.b32 own, $5, 2;
setp.ne.b32 upper, own, 0;
and.b32 own, $5, 1;
setp.ne.b32 odd, own, 0;
mov.b32 left, {$1, $2};
mov.b32 right, {$3, $4};
selp.b32 sent, left, right, upper;
selp.b32 kept, right, left, upper;
shfl.sync.bfly.b32 other, sent, 2, 0x1f, 0xffffffff;
selp.b32 low, other, kept, upper;
selp.b32 high, kept, other, upper;
selp.b32 own, 0x7632, 0x5410, odd;
prmt.b32 kept, low, high, own;
selp.b32 own, 0x5410, 0x7632, odd;
prmt.b32 sent, low, high, own;
shfl.sync.bfly.b32 other, sent, 1, 0x1f, 0xffffffff;
selp.b32 own, 0x1054, 0x5410, odd;
prmt.b32 low, kept, other, own;
selp.b32 own, 0x3276, 0x7632, odd;
prmt.b32 high, kept, other, own;
mov.b64 $0, {low, high};
}"""
# In this layout a thread has eight columns side by side, and four threads have 32.
IN_EIGHTS = plgpu.Layout.WGMMA_UPCAST_4X
COLUMNS_OF_A_ROW = 32


def _bits(number: np.float32) -> str:
    return f"0f{number.view(np.uint32):08X}"


def in_units(spec: AttentionSpec, exact: jax.Array, rounded: jax.Array) -> jax.Array:
    """`rest_in_units` of tiles in registers. Where out is 0, a backward pass multiplies the rest by
    0: any value will do. The result is in a layout that is stored in whole sectors of memory, if
    the columns are a multiple of 32."""
    if device.interpreting():
        return rest_in_units(spec, exact, rounded)
    whole_rows = exact.shape[1] % COLUMNS_OF_A_ROW == 0
    layout = IN_EIGHTS if whole_rows else TILE
    own = plgpu.ShapeDtypeStruct(exact.shape, jnp.int8, layout=layout)
    units = np.float32(1 / REST_UNITS[spec.dtype])
    text = OF_A_PAIR.format(units=_bits(units), magic=_bits(MAGIC))

    @plgpu.inline_mgpu(arg_types=(TILE, TILE), return_type=own)
    def convert(_: Any, exact: Any, rounded: Any) -> Any:
        half = ir.IntegerType.get_signless(16)
        words = np.empty(exact.registers.shape, object)
        for place, numbers in np.ndenumerate(exact.registers):
            both = numbers, rounded.registers[place]
            operands = [element(one, n) for one in both for n in range(2)]
            words[place] = instructions(text, "=h,f,f,f,f", operands, half)
        words = _in_eights(words) if whole_rows else words
        count = 8 if whole_rows else 2
        vector = ir.VectorType.get((count,), ir.IntegerType.get_signless(8))
        found = np.empty(words.shape, object)
        for place, word in np.ndenumerate(words):
            found[place] = ir.Operation.create(
                "llvm.bitcast", results=[vector], operands=[word]
            ).result
        own_layout = layout.to_mgpu()
        return mgpu.FragmentedArray(_registers=found, _layout=own_layout, _is_signed=True)

    return convert(exact, rounded.astype(F32))


def _in_eights(words: np.ndarray) -> np.ndarray:
    """Registers of two columns, [R / 64, columns / 8, ...], as registers of eight,
    [R / 64, columns / 32, ...]."""
    wide = ir.IntegerType.get_signless(64)
    number = mgpu.thread_idx()
    found = np.empty((words.shape[0], words.shape[1] // 4, *words.shape[2:]), object)
    for place in np.ndindex(found.shape):
        block, first, *others = place
        row = [words[(block, 4 * first + n, *others)] for n in range(4)]
        # Threads exchange registers: the compiler may not move this behind a branch.
        found[place] = instructions(
            OF_A_ROW, "=l,h,h,h,h,r", [*row, number], wide, has_side_effects=True
        )
    return found


def store(spec: AttentionSpec, ref: Any, at: tuple[Any, ...], exact: list[jax.Array]) -> None:
    """Stores, from registers, what rounding takes from rows `at` of out, given in float32 in parts
    of columns."""
    columns = 0
    for part in exact:
        rounded = mosaic.rounded(part, frame.dtype_of(spec))
        own = ref.at[(*at, pl.ds(columns, part.shape[1]))]  # [R, columns of the part]
        mosaic.store_in_memory(own, in_units(spec, part, rounded))
        columns += part.shape[1]
