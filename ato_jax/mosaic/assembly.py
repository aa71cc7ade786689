"""Inline PTX: what Pallas has no words for. Nothing of it changes a result, so it is left out where
kernels are interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir

from ato_jax import device
from ato_jax.mosaic.tiles import TILE

COLUMNS_OF_SIGNS = 8  # of a register tile; a thread has two of them


def _ptx(text: str, constraints: str, operands: Sequence[Any]) -> None:
    """Instructions with operands and without results."""
    ir.Operation.create(
        "llvm.inline_asm",
        operands=operands,
        attributes={
            "asm_string": ir.StringAttr.get(text),
            "constraints": ir.StringAttr.get(constraints),
            "has_side_effects": ir.UnitAttr.get(),
        },
    )


def named_barrier(operation: str, number: Any, threads: int) -> None:
    """`operation` is "sync", to arrive and wait, or "arrive", to arrive alone."""
    if device.interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def at_barrier(_: Any, number: Any) -> None:
        _ptx(f"bar.{operation} $0, {threads};", "r", [number.registers[()]])

    at_barrier(number)


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
            elements = [
                ir.Operation.create(
                    "vector.extract",
                    results=[ir.F32Type.get()],
                    operands=[pair],
                    attributes={"static_position": ir.DenseI64ArrayAttr.get([position])},
                ).result
                for position in range(2)
            ]
            _ptx(
                "{ .reg .pred negative; .reg .b32 nowhere; .reg .f32 sum; "
                "mov.b32 nowhere, 0; add.f32 sum, $0, $1; setp.lt.f32 negative, sum, 0f00000000; "
                "@negative st.volatile.shared.f32 [nowhere], sum; }",
                "f,f",
                elements,
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
