"""Inline PTX, instructions that Pallas cannot express, and what else holds compilers off. What ops
share of these changes no result: interpreted kernels leave it out, or compute the same values by
Pallas's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

from ato_jax import device
from ato_jax.mosaic.tiles import BF16, TILE, position, rounded

COLUMNS_OF_SIGNS = 8  # of a register tile; a thread has two of them


def instructions(
    text: str,
    constraints: str,
    operands: Sequence[Any] = (),
    result: Any = None,
    *,
    has_side_effects: bool = False,
) -> Any:
    """The result of PTX, of the type `result`; None where it has none. Without side effects the
    compiler may leave it out or move it."""
    attributes: dict[str, Any] = {
        "asm_string": ir.StringAttr.get(text),
        "constraints": ir.StringAttr.get(constraints),
    }
    if has_side_effects:
        attributes["has_side_effects"] = ir.UnitAttr.get()
    results = [] if result is None else [result]
    made = ir.Operation.create(
        "llvm.inline_asm", results=results, operands=operands, attributes=attributes
    )
    return None if result is None else made.result


def field(found: Any, number: int, type: Any) -> Any:
    """One of several results, which `instructions` returns as a struct."""
    at = ir.DenseI64ArrayAttr.get([number])
    return ir.Operation.create(
        "llvm.extractvalue", results=[type], operands=[found], attributes={"position": at}
    ).result


def constant(value: Any) -> Any:
    """The constant that an attribute with a type stands for."""
    return ir.Operation.create(
        "arith.constant", results=[value.type], attributes={"value": value}
    ).result


def element(pair: Any, number: int) -> Any:
    """One of the two float32 numbers of a register."""
    at = ir.DenseI64ArrayAttr.get([number])
    return ir.Operation.create(
        "vector.extract",
        results=[ir.F32Type.get()],
        operands=[pair],
        attributes={"static_position": at},
    ).result


def named_barrier(operation: str, number: Any, threads: int) -> None:
    """`operation` is "sync", to arrive and wait, or "arrive", to arrive alone."""
    if device.interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def at_barrier(_: Any, number: Any) -> None:
        text = f"bar.{operation} $0, {threads};"
        instructions(text, "r", [number.registers[()]], has_side_effects=True)

    at_barrier(number)


def hidden_position(axis: int) -> jax.Array:
    """`position`, whose rows a compiler cannot compute.

    Each row's number has a 0 added that is known only when the kernel runs: the z coordinate of the
    block, in a grid that has only x. Without it a mask such as row >= column would be constant in
    some registers. Where such a register is part of a product's first factor, ptxas 13.0 can set it
    behind the product in place of ahead of it, and the product reads what it held before.
    """
    index = position(axis)
    if axis != 0 or device.interpreting():
        return index
    own = plgpu.ShapeDtypeStruct(index.shape, jnp.int32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=own)
    def plus_zero(_: Any, tile: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        zero = instructions("mov.u32 $0, %ctaid.z;", "=r", result=word)
        return tile + mgpu.FragmentedArray.splat(
            zero, tile.shape, tile.layout, is_signed=tile.is_signed
        )

    return plus_zero(index)


def plus_zero(x: Any, number: Any) -> Any:
    """x plus 0, by the sign of a number that no compiler knows not to be negative. An address with
    it is computed where it is used: else the descriptors of all products in a loop are computed
    ahead of it, kept in registers, and spilled."""
    return x + lax.shift_right_arithmetic(number, jnp.int32(31))


def commit_to_warp() -> None:
    """Makes a warp's stores to shared memory visible to the other threads of the same warp.

    Each row of a tile in registers belongs to one warp, which alone stores and loads it. So a role
    that reads only tiles that it stored itself need not wait for its other warps, nor make the
    stores visible to the copy engine, as `plgpu.commit_smem` does."""
    if device.interpreting():
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def sync(_: Any) -> None:
        instructions("bar.warp.sync 0xffffffff;", "~{memory}", has_side_effects=True)

    sync()


def in_two_parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 tile in registers as bfloat16, and as bfloat16 what rounding took from it: 16 bits
    of each number.

    Two numbers take 6 instructions. By conversions they take 8: the compiler would unpack both of
    the rounded ones, and pack them again for a product.
    """
    first, second = in_bf16_parts(x, 2)
    return first, second


def in_bf16_parts(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """A float32 tile in registers as the sum of 2 or 3 bfloat16 tiles, each of what rounding took
    from those before it: 16 bits of each number, or all 24."""
    if device.interpreting():
        parts: list[jax.Array] = []
        for _ in range(count):
            parts.append(rounded(x))
            x = x - parts[-1].astype(jnp.float32)
        return tuple(parts)
    text, constraints = _SPLITS[count]
    part = plgpu.ShapeDtypeStruct(x.shape, BF16, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=(part,) * count)
    def split(_: Any, tile: Any) -> Any:
        pair_of_bf16 = ir.VectorType.get([2], ir.BF16Type.get())
        word = ir.IntegerType.get_signless(32)
        words = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
        parts = [np.empty(tile.registers.shape, object) for _ in range(count)]
        for place, pair in np.ndenumerate(tile.registers):
            operands = [element(pair, 1), element(pair, 0)]
            found = instructions(text, constraints, operands, words)
            for number, own in enumerate(parts):
                bits = field(found, number, word)
                own[place] = ir.Operation.create(
                    "llvm.bitcast", results=[pair_of_bf16], operands=[bits]
                ).result
        return tuple(
            mgpu.FragmentedArray(_registers=own, _layout=tile.layout, _is_signed=None)
            for own in parts
        )

    found: tuple[jax.Array, ...] = tuple(split(x))
    return found


# $0, $1: a pair's first and second parts; $2, $3: its upper and its lower number.
_SPLIT = """{
.reg .b32 upper, lower;
.reg .f32 of_upper, of_lower;
cvt.rn.bf16x2.f32 $0, $2, $3;
and.b32 upper, $0, 0xffff0000;
shl.b32 lower, $0, 16;
mov.b32 of_upper, upper;
mov.b32 of_lower, lower;
sub.f32 of_upper, $2, of_upper;
sub.f32 of_lower, $3, of_lower;
cvt.rn.bf16x2.f32 $1, of_upper, of_lower;
}"""
# $0 to $2: a pair's parts; $3, $4: its upper and its lower number.
_SPLIT_IN_THREE = """{
.reg .b32 upper, lower;
.reg .f32 of_upper, of_lower, rest_upper, rest_lower;
cvt.rn.bf16x2.f32 $0, $3, $4;
and.b32 upper, $0, 0xffff0000;
shl.b32 lower, $0, 16;
mov.b32 of_upper, upper;
mov.b32 of_lower, lower;
sub.f32 rest_upper, $3, of_upper;
sub.f32 rest_lower, $4, of_lower;
cvt.rn.bf16x2.f32 $1, rest_upper, rest_lower;
and.b32 upper, $1, 0xffff0000;
shl.b32 lower, $1, 16;
mov.b32 of_upper, upper;
mov.b32 of_lower, lower;
sub.f32 rest_upper, rest_upper, of_upper;
sub.f32 rest_lower, rest_lower, of_lower;
cvt.rn.bf16x2.f32 $2, rest_upper, rest_lower;
}"""
_SPLITS = {2: (_SPLIT, "=&r,=r,f,f"), 3: (_SPLIT_IN_THREE, "=&r,=&r,=r,f,f")}


def compute_first(x: jax.Array) -> None:
    """Keeps the next wait for products behind the computation of x, a float32 tile in registers
    whose elements are not negative.

    The assembler moves a wait ahead of arithmetic that does not depend on it, so that nothing runs
    under the products that are in flight. It does not move one ahead of a store, though. This one
    depends on x, and is never executed.
    """
    if device.interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(TILE,))
    def store_if_negative(_: Any, tile: Any) -> None:
        for pair in tile.registers.flat:
            elements = [element(pair, number) for number in range(2)]
            instructions(
                "{ .reg .pred negative; .reg .b32 nowhere; .reg .f32 sum; "
                "mov.b32 nowhere, 0; add.f32 sum, $0, $1; setp.lt.f32 negative, sum, 0f00000000; "
                "@negative st.volatile.shared.f32 [nowhere], sum; }",
                "f,f",
                elements,
                has_side_effects=True,
            )

    store_if_negative(_signs(x))


def _signs(x: jax.Array) -> jax.Array:
    """[rows, columns] to [rows, 8]: numbers with the sign bits of all elements of a thread. A tree
    of bitwise ORs takes a third of the instructions that a test of each pair would."""
    width = COLUMNS_OF_SIGNS
    parts = [x[:, first : first + width] for first in range(0, x.shape[1], width)]
    if len(parts) == 1:
        return x
    bits = [lax.bitcast_convert_type(part, jnp.int32) for part in parts]
    while len(bits) > 1:
        paired = [a | b for a, b in zip(bits[::2], bits[1::2], strict=False)]
        bits = paired + bits[len(paired) * 2 :]
    return lax.bitcast_convert_type(bits[0], jnp.float32)
