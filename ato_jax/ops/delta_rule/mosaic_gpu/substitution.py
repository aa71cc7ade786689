"""Inverses of small triangles in registers: of the blocks of 16 rows along a tile's diagonal.

Each such block lies in the registers of one warp, so a warp solves its own by forward substitution
in float32, without shared memory. For j = 0 .. 15, in a matrix R that begins as the identity and
ends as the inverse of I + A:

    R[i] -= A[i, j] R[j]        for all rows i below j

A thread has rows g and g + 8 of its block, for g = lane / 4, and in both the columns 2 t and
2 t + 1 of each 8, for t = lane mod 4. So row j comes from the lanes from 4 (j mod 8) on, and
column j from the lanes g of the same rows: by shuffles, for which Pallas has no words.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

from ato_jax import device, mosaic
from ato_jax.mosaic import F32, assembly

BLOCK = 16
ROWS = mosaic.ROWS
EIGHTS = ROWS // 8  # of columns of a tile; a thread has 2 rows of them, and 2 columns in each
VALUES = 4 * EIGHTS  # of a thread


def inverses_along_diagonal(lower: list[jax.Array]) -> list[jax.Array]:
    """The inverses of the blocks of I + A along the diagonal, and 0 beside them, of A that is 0 in
    these blocks on and above the diagonal; in column blocks [64, 16], as A is."""
    if device.interpreting():
        return _interpreted(lower)

    count = len(lower)
    own = plgpu.ShapeDtypeStruct((ROWS, BLOCK), F32, layout=mosaic.TILE)

    @plgpu.inline_mgpu(arg_types=(mosaic.TILE,) * count, return_type=(own,) * count)
    def substitute(_: Any, *tiles: Any) -> Any:
        # In the order of [eighth, row g or g + 8, column 2 t or 2 t + 1].
        pairs = [pair for tile in tiles for pair in tile.registers.flat]
        given = [assembly.element(pair, number) for pair in pairs for number in range(2)]
        f32 = ir.F32Type.get()
        results = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * VALUES)})>")
        constraints = ",".join(["=f"] * VALUES + ["f"] * VALUES)
        found = assembly.instructions(
            _program(), constraints, given, results, has_side_effects=True
        )
        values = iter(assembly.field(found, number, f32) for number in range(VALUES))
        made = []
        for tile in tiles:
            registers = np.empty(tile.registers.shape, object)
            for place, pair in np.ndenumerate(tile.registers):
                both = [next(values), next(values)]
                registers[place] = ir.Operation.create(
                    "vector.from_elements", results=[pair.type], operands=both
                ).result
            made.append(
                mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)
            )
        return tuple(made)

    return list(substitute(*lower))


def _program() -> str:
    """PTX. $0 to $31 are a thread's elements of the result, $32 to $63 those of A, in the order of
    [eighth, row, column]; a{c}{h}{e} and r{c}{h}{e} those of the warp's block in A and in R."""
    places = [(c, h, e) for c in range(2) for h in range(2) for e in range(2)]
    names = [f"{c}{h}{e}" for c, h, e in places]
    lines = [
        ".reg .b32 lane, warp, first, row, own, from;",
        ".reg .pred " + ", ".join(f"is{w}" for w in range(4)) + ", one;",
        *(f".reg .f32 a{name}, r{name};" for name in names),
        ".reg .f32 x0, x1, x2, x3, f0, f1;",
        "mov.u32 lane, %laneid;",
        "mov.u32 warp, %tid.x;",
        "shr.u32 warp, warp, 5;",
        "and.b32 warp, warp, 3;",
        *(f"setp.eq.u32 is{w}, warp, {w};" for w in range(4)),
        "and.b32 own, lane, 3;",  # t
        "and.b32 first, lane, 28;",  # 4 g
        "shr.u32 row, lane, 2;",  # g
    ]
    for (c, h, e), name in zip(places, names, strict=True):
        of_warp = [f"${VALUES + ((2 * w + c) * 2 + h) * 2 + e}" for w in range(4)]
        # A warp's elements are negated once, and then added.
        lines += [
            f"mov.f32 a{name}, {of_warp[0]};",
            *(f"selp.f32 a{name}, {of_warp[w]}, a{name}, is{w};" for w in (1, 2, 3)),
            f"neg.f32 a{name}, a{name};",
        ]
    for e in range(2):
        lines += ["shl.b32 from, own, 1;"] + (["add.u32 from, from, 1;"] if e else [])
        lines += ["setp.eq.u32 one, from, row;", f"selp.f32 r00{e}, 0f3F800000, 0f00000000, one;"]
        lines += [f"mov.f32 r11{e}, r00{e};"]
        lines += [f"mov.f32 r01{e}, 0f00000000;", f"mov.f32 r10{e}, 0f00000000;"]
    for j in range(BLOCK - 1):
        lines += _step(j)
    for n in range(VALUES):
        eighth, within = divmod(n, 4)
        name = f"{eighth % 2}{within // 2}{within % 2}"
        lines.append(f"selp.f32 ${n}, r{name}, 0f00000000, is{eighth // 2};")
    return "{ " + "\n".join(lines) + " }"


def _step(j: int) -> list[str]:
    """Subtracts row j of R from the rows below. Columns beyond j are 0 in row j, and A is 0 in the
    rows that are not below."""
    half, of_eight = divmod(j, 8)
    columns = [(c, e) for c in range(half + 1) for e in range(2)]
    rows = range(half, 2)

    def shuffle(to: str, of: str) -> str:
        return f"shfl.sync.idx.b32 {to}, {of}, from, 31, 0xffffffff;"

    lines = [f"add.u32 from, own, {4 * of_eight};"]
    lines += [shuffle(f"x{n}", f"r{c}{half}{e}") for n, (c, e) in enumerate(columns)]
    lines += [f"add.u32 from, first, {of_eight // 2};"]
    lines += [shuffle(f"f{h}", f"a{half}{h}{of_eight % 2}") for h in rows]
    lines += [
        f"fma.rn.f32 r{c}{h}{e}, f{h}, x{n}, r{c}{h}{e};"
        for h in rows
        for n, (c, e) in enumerate(columns)
    ]
    return lines


def _interpreted(lower: list[jax.Array]) -> list[jax.Array]:
    """The inverses by repeated products: each product makes one more row right, from the top."""
    found = []
    for number, block in enumerate(lower):
        rows = slice(number * BLOCK, (number + 1) * BLOCK)
        identity = jnp.eye(BLOCK, dtype=F32)
        own = identity
        for _ in range(BLOCK - 1):
            own = identity - jnp.dot(block[rows], own, precision="highest")
        found.append(jnp.pad(own, ((rows.start, ROWS - rows.stop), (0, 0))))
    return found
