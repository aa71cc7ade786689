"""Rows of float8_e4m3fn in shared memory: copied as 8 bits, widened in registers.

    x = values * scale        values of 8 bits, one scale for a whole tile

They lie in blocks of 64 columns, each [rows, 64] with rows of 64 bytes, and are copied untiled
(`Views`): a sequence may have any number of rows, and a head any multiple of 16 columns. No product
takes them. A role that maps them widens them in registers, where 16 bits hold every value exactly.
A factor that has to lie in shared memory is widened into a tile of 16 bits (`widen`, `widen_rows`),
by a role that has no other work: the conversion then hides behind the products of the chunk before.

Pallas loads and stores two numbers of 8 bits at once. `load_turned`, `store_turned` and
`widen_rows` are inline PTX of 16 bytes an access.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir

from ato_jax import device
from ato_jax.mosaic import assembly
from ato_jax.mosaic.masks import kept
from ato_jax.mosaic.tiles import (
    BF16,
    F16,
    F32,
    HALF,
    TILE,
    Tiling,
    for_copy,
    load,
    rounded,
    tiled,
)

F8 = jnp.float8_e4m3fn


def eight_bits(*shape: int) -> Any:
    """Room for blocks of 64 columns, [.., rows, 64]."""
    assert shape[-1] == HALF
    swizzle = plgpu.SwizzleTransform(HALF)
    tiled = plgpu.SMEM(shape, F8, transforms=(plgpu.TilingTransform((8, HALF)), swizzle))
    if device.interpreting():
        return tiled
    # Both are the same bytes, since a row of a block is one of the swizzle.
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, F8, transforms=(swizzle,)))


def copy_eight_bits(
    tiling: Tiling, ref: Any, item: Any, rows: Any, head: Any, blocks: Sequence[Any], barrier: Any
) -> None:
    """Loads rows of a sequence into `blocks`, [rows, 64] of its columns each, by as many copies."""
    for half, block in enumerate(blocks):
        source = tiling.part(ref, item, rows, head, half)
        plgpu.copy_gmem_to_smem(source, for_copy(block), barrier)


def load_eight_bits(block: Any) -> jax.Array:
    """A block [rows, 64] in registers, in 16 bits and without its scale."""
    return load(block).astype(F16)


def load_turned(block: Any) -> jax.Array:
    """The transpose [64, 64] of a block [64, 64] in float16, with its rows in the order of
    `store_turned`.

    A warp loads pairs of 8 bits that are neighbours in a row as one number of 16 bits, and the load
    (LDSM) transposes those. So a thread has columns 2 r and 2 r + 1 of the block where a factor has
    rows r and r + 8, of 16 rows for each warp; the interpreted load has them in their places.
    """
    if device.interpreting():
        return load(block.T).astype(F16)
    own = plgpu.ShapeDtypeStruct((HALF, HALF), F16, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(_EIGHT_BITS,), return_type=own)
    def turn(_: Any, ref: Any) -> Any:
        # $5: the thread's number. Its lane names a row of the block, its warp 16 columns.
        text = """{
.reg .b32 lane, warp, turned, at;
and.b32 lane, $5, 31;
bfe.u32 warp, $5, 5, 2;
bfe.u32 turned, lane, 1, 2;
xor.b32 warp, warp, turned;
shl.b32 at, lane, 6;
shl.b32 warp, warp, 4;
add.u32 at, at, warp;
add.u32 at, at, $4;
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [at];
}"""
        word, four = _word(), ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        address, thread = _address(ref), mgpu.thread_idx()
        registers = np.empty(_shape_of_registers(), object)
        flat = registers.reshape(HALF // 8, 2)
        for half in range(2):
            base = _plus(address, half * 32 * HALF)
            found = assembly.instructions(
                text, "=r,=r,=r,=r,r,r,~{memory}", [base, thread], four, has_side_effects=True
            )
            for number in range(4):
                pairs = _widened_columns(assembly.field(found, number, word))
                for row, pair in enumerate(pairs):
                    flat[4 * half + number, row] = pair
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    turned: jax.Array = turn(tiled(block))
    return turned


def store_turned(ref: Any, x: jax.Array) -> None:
    """Stores 32 columns of a product whose first factor is `load_turned`'s: x [64, 32] float32 with
    its rows in order, in a tile swizzled by 128 bytes."""
    if device.interpreting():
        ref[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(_FLOAT32, TILE))
    def store(_: Any, ref: Any, tile: Any) -> None:
        address, thread = _address(ref), mgpu.thread_idx()
        pairs = tile.registers.reshape(-1, 2)  # [eighth of columns, row r or r + 8]
        for eighth, rows in enumerate(pairs):
            for upper, pair in enumerate(rows):
                # $1: the thread's number. row = 16 warp + 2 (lane / 4) + upper
                text = f"""{{
.reg .b32 row, warp, place, at;
bfe.u32 row, $1, 2, 3;
bfe.u32 warp, $1, 5, 2;
shl.b32 row, row, 1;
shl.b32 warp, warp, 4;
add.u32 row, row, warp;
add.u32 row, row, {upper};
bfe.u32 place, $1, 1, 1;
add.u32 place, place, {2 * eighth};
and.b32 at, row, 7;
xor.b32 place, place, at;
shl.b32 place, place, 4;
shl.b32 at, row, 7;
add.u32 at, at, place;
and.b32 place, $1, 1;
shl.b32 place, place, 3;
add.u32 at, at, place;
add.u32 at, at, $0;
st.shared.v2.f32 [at], {{$2, $3}};
}}"""
                numbers = [assembly.element(pair, number) for number in range(2)]
                assembly.instructions(
                    text, "r,r,f,f,~{memory}", [address, thread, *numbers], has_side_effects=True
                )

    store(ref, x)


def store_turned_rows(ref: Any, x: jax.Array) -> None:
    """Stores the first column of x [64, 8], of which all are the same, to `ref` [64] float32, in
    the order of `store_turned`."""
    if device.interpreting():
        ref[...] = jnp.max(x, axis=1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def store(_: Any, ref: Any, tile: Any) -> None:
        for upper, pair in enumerate(tile.registers.flat):
            text = f"""{{
.reg .b32 row, warp, at;
bfe.u32 row, $1, 2, 3;
bfe.u32 warp, $1, 5, 2;
shl.b32 row, row, 3;
shl.b32 warp, warp, 6;
add.u32 at, row, warp;
add.u32 at, at, $0;
st.shared.f32 [at + {4 * upper}], $2;
}}"""
            operands = [_address(ref), mgpu.thread_idx(), assembly.element(pair, 0)]
            assembly.instructions(text, "r,r,f,~{memory}", operands, has_side_effects=True)

    store(ref, x)


def fill_with_ones(ref: Any) -> None:
    """Fills `ref`, 1 KiB of float16 or bfloat16."""
    if device.interpreting():
        ref[...] = jnp.ones(ref.shape, ref.dtype)
        return
    one = {F16: 0x3C003C00, BF16: 0x3F803F80}[ref.dtype.type]
    swizzled = plgpu.TilingTransform((8, HALF)), plgpu.SwizzleTransform(128)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled),))
    def fill(_: Any, ref: Any) -> None:
        text = f"""{{
.reg .b32 at, ones;
and.b32 at, $1, 127;
shl.b32 at, at, 3;
add.u32 at, at, $0;
mov.b32 ones, {one};
st.shared.v2.b32 [at], {{ones, ones}};
}}"""
        operands = [_address(ref), mgpu.thread_idx()]
        assembly.instructions(text, "r,r,~{memory}", operands, has_side_effects=True)

    fill(ref)


# Blocks of 8 bits, and 32 columns of float32, as inline PTX is given them.
_EIGHT_BITS = plgpu.RefType((plgpu.TilingTransform((8, HALF)), plgpu.SwizzleTransform(HALF)))
_FLOAT32 = plgpu.RefType((plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)))


def _word() -> Any:
    return ir.IntegerType.get_signless(32)


def _address(ref: Any) -> Any:
    """Where `ref` begins in shared memory."""
    return ir.Operation.create(
        "llvm.ptrtoint", results=[_word()], operands=[utils.memref_ptr(ref)]
    ).result


def _plus(word: Any, number: int) -> Any:
    return assembly.instructions(f"add.u32 $0, $1, {number};", "=r,r", [word], _word())


def _shape_of_registers() -> tuple[int, ...]:
    shape: tuple[int, ...] = mgpu.WGMMA_LAYOUT.registers_shape((HALF, HALF))
    return shape


def _widened_columns(word: Any) -> list[Any]:
    """Widens a word, which holds two columns of two rows in 8 bits, to float16: for each column
    the pair of its two rows."""
    text = """{
.reg .b32 pairs;
.reg .b16 first, second;
prmt.b32 pairs, $2, $2, 0x3120;
mov.b32 {first, second}, pairs;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}"""
    found = assembly.instructions(
        text, "=r,=r,r", [word], ir.Type.parse("!llvm.struct<(i32, i32)>")
    )
    pair = ir.VectorType.get([2], ir.F16Type.get())
    return [
        ir.Operation.create(
            "llvm.bitcast", results=[pair], operands=[assembly.field(found, number, _word())]
        ).result
        for number in range(2)
    ]


def scaled(x: jax.Array, scale: Any) -> jax.Array:
    """What 8 bits stand for, in float32."""
    return x.astype(F32) * scale


def widen(block: Any, target: Any, count: Any = None, scale: Any = None) -> None:
    """Stores a block [64, 64] of 8 bits to a bfloat16 tile, and 0 behind the first `count` rows:
    without its scale, which is exact, or times it, rounded once."""
    x = load_eight_bits(block).astype(F32)
    x = x if scale is None else x * scale
    target[...] = kept(rounded(x, BF16), count)


# $0, $1: the first bytes of a block and of a tile; $2: the thread's number; $3: the rows' count.
# A thread takes 16 numbers of a row, and 16 of the row 32 behind it.
_WIDEN = """{{
.reg .b32 row, part, place, from, to;
.reg .pred counts;
bfe.u32 row, $2, 2, 5;
and.b32 part, $2, 3;
bfe.u32 place, row, 1, 2;
xor.b32 place, place, part;
shl.b32 place, place, 4;
shl.b32 from, row, 6;
add.u32 from, from, place;
add.u32 from, from, $0;
shl.b32 part, part, 1;
and.b32 place, row, 7;
xor.b32 part, part, place;
shl.b32 part, part, 4;
shl.b32 place, place, 7;
add.u32 to, part, place;
shr.u32 place, row, 3;
mul.lo.u32 place, place, {stride};
add.u32 to, to, place;
add.u32 to, to, $1;
{both}
}}"""
_WIDEN_ROW = """{{
.reg .b32 x<4>, y<8>, next;
.reg .b16 h<8>;
ld.shared.v4.b32 {{x0, x1, x2, x3}}, [from + {source}];
{mask}
mov.b32 {{h0, h1}}, x0;
mov.b32 {{h2, h3}}, x1;
mov.b32 {{h4, h5}}, x2;
mov.b32 {{h6, h7}}, x3;
{convert}
xor.b32 next, to, 16;
st.shared.v4.b32 [to + {target}], {{y0, y1, y2, y3}};
st.shared.v4.b32 [next + {target}], {{y4, y5, y6, y7}};
}}"""
_MASK = """
add.u32 next, row, {first};
setp.lt.s32 counts, next, $3;
""" + "".join(f"selp.b32 x{n}, x{n}, 0, counts;\n" for n in range(4))
_TO_BF16 = """{{
.reg .b16 low, high;
.reg .f32 first, second;
mov.b32 {{low, high}}, y{n};
cvt.f32.f16 first, low;
cvt.f32.f16 second, high;
cvt.rn.bf16x2.f32 y{n}, second, first;
}}
"""


def widen_rows(block: Any, target: Any, half: int, count: Any = None) -> None:
    """Stores a block [64, 64] of 8 bits to that half of `target` [64, columns] of 16 bits, which is
    swizzled by 128 bytes, without its scale, and 0 behind the first `count` rows. Loads and stores
    are of 16 bytes."""
    dtype = target.dtype
    if device.interpreting():
        x = load_eight_bits(block).astype(F32)
        target.at[:, half * HALF : (half + 1) * HALF][...] = kept(rounded(x, dtype), count)
        return
    rows_of_8 = 8 * target.shape[1] * 2  # bytes
    convert = "".join(f"cvt.rn.f16x2.e4m3x2 y{n}, h{n};\n" for n in range(8))
    if dtype == BF16:
        convert += "".join(_TO_BF16.format(n=n) for n in range(8))
    both = "\n".join(
        _WIDEN_ROW.format(
            source=first * HALF,
            target=first // 8 * rows_of_8 + half * 1024,
            mask="" if count is None else _MASK.format(first=first),
            convert=convert,
        )
        for first in (0, 32)
    )
    text = _WIDEN.format(stride=rows_of_8, both=both)
    swizzled = plgpu.TilingTransform((8, HALF)), plgpu.SwizzleTransform(128)
    counts: tuple[Any, ...] = () if count is None else (count,)
    splats = (plgpu.Layout.WG_SPLAT,) * len(counts)

    @plgpu.inline_mgpu(arg_types=(_EIGHT_BITS, plgpu.RefType(swizzled), *splats))
    def convert_rows(_: Any, source: Any, target: Any, *counts: Any) -> None:
        operands = [_address(source), _address(target), mgpu.thread_idx()]
        operands += [count.registers[()] for count in counts]
        constraints = ",".join("r" for _ in operands) + ",~{memory}"
        assembly.instructions(text, constraints, operands, has_side_effects=True)

    convert_rows(tiled(block), target, *counts)
