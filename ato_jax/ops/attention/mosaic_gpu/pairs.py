"""Bias and mask: arrays over pairs of queries and keys, [B|1, H|1, T|1, S|1].

A kernel's rows are its own side's, queries or keys, and its columns those of the side that it walks
over. What an array is broadcast over decides how a consumer gets its elements for R rows and C
columns:

    extent      rows, columns   how
    pairs       full, full      a tile [R, C] by TMA, in the dtype it has; masks as int8
    columns     1, full         a vector [C] by TMA
    rows        full, 1         a vector [R], loaded from global memory
    one         1, 1            a scalar, loaded from global memory

All but those of pairs are small, so XLA makes them float32 or int32 and pads them to whole blocks.
Tiles and vectors of columns come through a ring of their own: a consumer lets go of a slot as soon
as it has it in registers.

Where the rows are keys, the last two axes are exchanged: those of a bias over pairs as its tile,
[C, R], is read from shared memory, where loads transpose 16 bits; those of a mask by XLA, ahead of
the kernel, since no load transposes bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from ato_jax import device, mosaic
from ato_jax.mosaic import F32, OF_COLUMNS, OF_ROWS, TILE, Buffer
from ato_jax.mosaic.assembly import constant, element
from ato_jax.ops.attention.mosaic_gpu import frame
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.spec import AttentionSpec, Broadcast, Inputs

# Columns of a tile that lie side by side in a row of the swizzle; in float32 half as many. An axis
# of columns is a multiple of them.
COLUMNS_OF_A_TILE = 64


class Block(NamedTuple):
    """The pairs of a step: those of so many rows of each consumer, and of so many columns."""

    consumers: int
    rows: int
    columns: int

    @property
    def tile(self) -> int:
        return self.consumers * self.rows


def block_of(config: Config) -> Block:
    """The block sizes of the forward kernel."""
    return Block(config.consumers, config.rows, config.keys)


def extent(full: Broadcast) -> str:
    if full[2]:
        return "pairs" if full[3] else "rows"
    return "columns" if full[3] else "one"


@dataclasses.dataclass(frozen=True)
class Plane:
    """One of the two arrays: `full`, as in the spec, with the kernel's rows first, and the dtype
    that the kernel sees. `across`: whether rows and columns are those of the array exchanged."""

    full: Broadcast
    dtype: Any
    across: bool = False

    @property
    def extent(self) -> str:
        return extent(self.full)

    @property
    def in_ring(self) -> bool:
        return self.extent in ("pairs", "columns")

    def at(self, ref: Any, batch: Any, head: Any) -> tuple[Any, Any]:
        """The indices of a batch entry and head."""
        return (batch if self.full[0] else 0), (head if self.full[1] else 0)

    def bytes(self, block: Block) -> int:
        """How many bytes a slot takes."""
        size = jnp.dtype(self.dtype).itemsize
        rows = {"pairs": block.tile, "columns": 1}.get(self.extent, 0)
        return rows * block.columns * size

    def buffer(self, block: Block, slots: int) -> Buffer | None:
        if self.extent == "columns":
            return Buffer(plgpu.SMEM((slots, block.columns), self.dtype))
        if self.extent != "pairs":
            return None
        size = jnp.dtype(self.dtype).itemsize
        swizzle = min(128, COLUMNS_OF_A_TILE * size)
        tiled = plgpu.TilingTransform((8, swizzle // size))
        transforms = (tiled, plgpu.SwizzleTransform(swizzle))
        tile = (block.columns, block.rows) if self.across else (block.rows, block.columns)
        shape = slots, block.consumers, *tile
        tiles = plgpu.SMEM(shape, self.dtype, transforms=transforms)
        return Buffer(tiles, block.consumers)

    def load(
        self,
        ref: Any,
        block: Block,
        at: tuple[Any, Any],
        first: tuple[Any, Any],
        tiles: Any,
        barrier: Any,
    ) -> None:
        """Starts the copies of a slot, from row and column `first` on."""
        (batch, head), (row, column) = self.at(ref, *at), first
        columns = pl.ds(column, block.columns)
        if self.extent == "columns":
            plgpu.copy_gmem_to_smem(ref.at[batch, head, 0, columns], tiles, barrier)  # [C]
            return
        for number in range(block.consumers):
            rows = pl.ds(row + number * block.rows, block.rows)
            tile = (columns, rows) if self.across else (rows, columns)
            source = ref.at[(batch, head, *tile)]
            plgpu.copy_gmem_to_smem(source, tiles.at[number], barrier)  # [R, C]

    def of_rows(self, ref: Any, block: Block, at: tuple[Any, Any], first_row: Any) -> Any:
        """The values that all columns share: a vector [R] or a scalar; None where they differ."""
        if self.in_ring:
            return None
        batch, head = self.at(ref, *at)
        if self.extent == "one":
            return ref[batch, head, 0, 0]
        rows = ref.at[batch, head, 0, pl.ds(first_row, block.rows)]
        return mosaic.load(rows, OF_ROWS, optimized=False)

    def read(self, of_rows: Any, tiles: Any, block: Block, slot: Any, number: Any) -> Any:
        """The elements for R rows and C columns in registers, from a slot or from `of_rows`: a
        tile [R, C], or a scalar."""
        if self.extent == "pairs":
            tile = tiles.at[slot, number]
            if self.across:
                return mosaic.load_transposed(tile)
            return mosaic.load(tile, optimized=jnp.dtype(self.dtype).itemsize > 1)
        if self.extent == "columns":
            return mosaic.in_rows(mosaic.load(tiles.at[slot], OF_COLUMNS), block.rows)
        return of_rows if self.extent == "one" else mosaic.in_columns(of_rows, block.columns)


@dataclasses.dataclass(frozen=True)
class Planes:
    bias: Plane | None
    mask: Plane | None

    def __iter__(self) -> Any:
        return iter((self.bias, self.mask))

    @property
    def in_ring(self) -> list[Plane]:
        return [plane for plane in self if plane is not None and plane.in_ring]

    def read(
        self, own: Any, of_rows: Iterable[Any], block: Block, slot: Any, number: Any
    ) -> tuple[Any, Any]:
        """Bias and mask of a step in registers, each as `Plane.read` returns it, from the slots of
        a kernel's storage `own`. `of_rows`: of each plane; a generator loads them behind the wait
        for the slot."""
        if own.pairs is not None:
            own.pairs.produced.wait(slot)
        bias, mask = (
            None if plane is None else plane.read(vector, tiles, block, slot, number)
            for plane, vector, tiles in zip(self, of_rows, (own.bias, own.mask), strict=True)
        )
        if own.pairs is not None:
            plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
            own.pairs.consumed.arrive(slot)
        return bias, mask

    @property
    def fit_beside_scores(self) -> bool:
        """Whether a step's elements have registers ahead of its scores: not those of float32."""
        of_pairs = [plane for plane in self if plane is not None and plane.extent == "pairs"]
        return all(jnp.dtype(plane.dtype).itemsize < 4 for plane in of_pairs)

    def slots(self, block: Block, room: int) -> int:
        """Two where there is room for them, in bytes."""
        return 2 if 2 * sum(plane.bytes(block) for plane in self.in_ring) <= room else 1


def planes_of(spec: AttentionSpec, inputs: Inputs, of_keys: bool = False) -> Planes:
    """`of_keys`: of a kernel whose rows are keys."""
    bias = mask = None
    if spec.bias is not None and inputs.bias is not None:
        own = inputs.bias.dtype if extent(spec.bias) == "pairs" else F32
        across = of_keys and extent(spec.bias) == "pairs"
        bias = Plane(_turned(spec.bias, of_keys), jnp.dtype(own).type, across)
    if spec.mask is not None:
        own = jnp.int8 if extent(spec.mask) == "pairs" else jnp.int32
        mask = Plane(_turned(spec.mask, of_keys), own)
    return Planes(bias, mask)


def _turned(full: Broadcast, of_keys: bool) -> Broadcast:
    return (full[0], full[1], full[3], full[2]) if of_keys else full


def arrays_of(
    planes: Planes, inputs: Inputs, rows: int, columns: int, of_keys: bool = False
) -> dict[str, jax.Array]:
    """The kernel's arrays, by the names of its `Walk`. `rows`, `columns`: in whole tiles and
    blocks."""
    found = {}
    for name, plane, array in (
        ("bias", planes.bias, inputs.bias),
        ("mask", planes.mask, inputs.mask),
    ):
        if plane is not None and array is not None:
            turned = jnp.swapaxes(array, 2, 3) if of_keys and not plane.across else array
            found[name] = _prepared(plane, turned, rows, columns)
    return found


def _prepared(plane: Plane, array: jax.Array, rows: int, columns: int) -> jax.Array:
    array = array.astype(plane.dtype)
    if plane.across:
        return array
    if plane.extent == "rows":
        array, columns = jnp.swapaxes(array, 2, 3), rows
    elif plane.extent == "pairs":
        columns = int(pl.cdiv(array.shape[3], COLUMNS_OF_A_TILE)) * COLUMNS_OF_A_TILE
    elif plane.extent == "one":
        return array
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, columns - array.shape[3])))


def unsupported(spec: AttentionSpec) -> str | None:
    """Why not these arrays."""
    of_pairs = [
        name
        for name, full in (("bias", spec.bias), ("mask", spec.mask))
        if full is not None and extent(full) == "pairs"
    ]
    if not of_pairs:
        return None
    multiples = (frame.ROWS_OF_A_TILE, COLUMNS_OF_A_TILE)
    if spec.T % multiples[0] or spec.S % multiples[1]:
        return (
            f"needs T to be a multiple of {multiples[0]} and S of {multiples[1]} for a "
            f"{of_pairs[0]} over pairs, got T={spec.T}, S={spec.S}"
        )
    return None


def most_bytes(spec: AttentionSpec, block: Block, of_keys: bool = False) -> int:
    """Of shared memory for a slot of both, where a bias has float32."""
    found = 0
    for full, dtype in ((spec.bias, F32), (spec.mask, jnp.int8)):
        if full is not None:
            own = dtype if extent(full) == "pairs" else F32
            found += Plane(_turned(full, of_keys), own).bytes(block)
    return found


def add(s: jax.Array, bias: Any) -> jax.Array:
    """s in natural units, with the bias; -inf in it hides."""
    if isinstance(bias, jax.Array) and bias.ndim == 0:
        return s + lax.broadcast(bias, s.shape)
    return s + bias.astype(F32)


def keep(s: jax.Array, mask: Any) -> jax.Array:
    if mask.ndim == 0:
        return jnp.where(mask != 0, s, -jnp.inf)
    if mask.dtype == jnp.int8 and not device.interpreting():
        return keep_by_bytes(s, mask)
    return jnp.where(mask.astype(jnp.int32) != 0, s, -jnp.inf)


def keep_by_bytes(s: jax.Array, mask: jax.Array) -> jax.Array:
    """Tests both bytes of a register where they are: two instructions a pair, where a comparison
    of bytes that were extracted takes three."""
    own = plgpu.ShapeDtypeStruct(s.shape, F32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, TILE), return_type=own)
    def select(_: Any, s: Any, mask: Any) -> Any:
        number, word, half = ir.F32Type.get(), *map(ir.IntegerType.get_signless, (32, 16))
        hidden = constant(ir.FloatAttr.get(number, -math.inf))
        zero = constant(ir.IntegerAttr.get(word, 0))
        found = np.empty(s.registers.shape, object)
        for place, pair in np.ndenumerate(s.registers):
            both = ir.Operation.create(
                "llvm.bitcast", results=[half], operands=[mask.registers[place]]
            ).result
            both, operands = arith.extui(word, both), []
            for n in range(2):
                byte = constant(ir.IntegerAttr.get(word, 0xFF << 8 * n))
                kept = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(both, byte), zero)
                operands.append(arith.select(kept, element(pair, n), hidden))
            found[place] = ir.Operation.create(
                "vector.from_elements", results=[pair.type], operands=operands
            ).result
        return mgpu.FragmentedArray(_registers=found, _layout=s.layout, _is_signed=None)

    return select(s, mask)
