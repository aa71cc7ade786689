"""Bias and mask: arrays over pairs of queries and keys, [B|1, H|1, T|1, S|1].

What an array is broadcast over decides how a consumer gets its elements for R queries and K keys:

    extent      T, S      how
    pairs       full      a tile [R, K] by TMA, in the dtype it has; masks as int8
    keys        1, full   a vector [K] by TMA
    queries     full, 1   a vector [R], loaded from global memory
    one         1, 1      a scalar, loaded from global memory

All but those of pairs are small, so XLA makes them float32 or int32 and pads them to whole blocks.
Tiles and vectors of keys come through a ring of their own: a consumer lets go of a slot as soon as
it has it in registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, OF_COLUMNS, OF_ROWS, Buffer
from ato_jax.ops.attention.mosaic_gpu import frame
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.spec import AttentionSpec, Broadcast, Inputs

# Keys of a tile that lie side by side in a row of the swizzle; in float32 half as many. S is a
# multiple of them.
KEYS_OF_A_TILE = 64


def extent(full: Broadcast) -> str:
    if full[2]:
        return "pairs" if full[3] else "queries"
    return "keys" if full[3] else "one"


@dataclasses.dataclass(frozen=True)
class Plane:
    """One of the two arrays: `full`, as in the spec, and the dtype that the kernel sees."""

    full: Broadcast
    dtype: Any

    @property
    def extent(self) -> str:
        return extent(self.full)

    @property
    def in_ring(self) -> bool:
        return self.extent in ("pairs", "keys")

    def at(self, ref: Any, batch: Any, head: Any) -> tuple[Any, Any]:
        """The indices of a batch entry and head."""
        return (batch if self.full[0] else 0), (head if self.full[1] else 0)

    def bytes(self, config: Config) -> int:
        """How many bytes a slot takes."""
        size = jnp.dtype(self.dtype).itemsize
        rows = {"pairs": config.tile, "keys": 1}.get(self.extent, 0)
        return rows * config.keys * size

    def buffer(self, config: Config, slots: int) -> Buffer | None:
        if self.extent == "keys":
            return Buffer(plgpu.SMEM((slots, config.keys), self.dtype))
        if self.extent != "pairs":
            return None
        size = jnp.dtype(self.dtype).itemsize
        swizzle = min(128, KEYS_OF_A_TILE * size)
        tiled = plgpu.TilingTransform((8, swizzle // size))
        shape = (slots, config.consumers, config.rows, config.keys)
        transforms = (tiled, plgpu.SwizzleTransform(swizzle))
        return Buffer(plgpu.SMEM(shape, self.dtype, transforms=transforms), config.consumers)

    def load(
        self,
        ref: Any,
        config: Config,
        at: tuple[Any, Any],
        first: tuple[Any, Any],
        tiles: Any,
        barrier: Any,
    ) -> None:
        """Starts the copies of a slot, from query and key `first` on."""
        (batch, head), (row, key) = self.at(ref, *at), first
        keys = pl.ds(key, config.keys)
        if self.extent == "keys":
            plgpu.copy_gmem_to_smem(ref.at[batch, head, 0, keys], tiles, barrier)  # [K]
            return
        for number in range(config.consumers):
            rows = pl.ds(row + number * config.rows, config.rows)
            source = ref.at[batch, head, rows, keys]
            plgpu.copy_gmem_to_smem(source, tiles.at[number], barrier)  # [R, K]

    def read(
        self, ref: Any, tile: Any, config: Config, at: tuple[Any, Any], first_row: Any
    ) -> Any:
        """Loads the elements for R queries and K keys into registers: [R, K], or a scalar."""
        shape = (config.rows, config.keys)
        if self.extent == "pairs":
            return mosaic.load(tile, optimized=jnp.dtype(self.dtype).itemsize > 1)
        if self.extent == "keys":
            return mosaic.in_rows(mosaic.load(tile, OF_COLUMNS), shape[0])
        batch, head = self.at(ref, *at)
        if self.extent == "one":
            return ref[batch, head, 0, 0]
        rows = ref.at[batch, head, 0, pl.ds(first_row, config.rows)]
        return mosaic.in_columns(mosaic.load(rows, OF_ROWS, optimized=False), shape[1])


@dataclasses.dataclass(frozen=True)
class Planes:
    bias: Plane | None
    mask: Plane | None

    def __iter__(self) -> Any:
        return iter((self.bias, self.mask))

    @property
    def in_ring(self) -> list[Plane]:
        return [plane for plane in self if plane is not None and plane.in_ring]

    def slots(self, spec: AttentionSpec, config: Config) -> int:
        """Two where there is room for them."""
        room = frame.MOST_BYTES - frame.shared_bytes(spec, config)
        return 2 if 2 * sum(plane.bytes(config) for plane in self.in_ring) <= room else 1


def planes_of(spec: AttentionSpec, inputs: Inputs) -> Planes:
    bias = mask = None
    if spec.bias is not None and inputs.bias is not None:
        own = inputs.bias.dtype if extent(spec.bias) == "pairs" else F32
        bias = Plane(spec.bias, jnp.dtype(own).type)
    if spec.mask is not None:
        own = jnp.int8 if extent(spec.mask) == "pairs" else jnp.int32
        mask = Plane(spec.mask, own)
    return Planes(bias, mask)


def arrays_of(
    spec: AttentionSpec, config: Config, inputs: Inputs, planes: Planes
) -> dict[str, jax.Array]:
    """The kernel's arrays, by the names of `forward.Walk`."""
    found = {}
    for name, plane, array in (
        ("bias", planes.bias, inputs.bias),
        ("mask", planes.mask, inputs.mask),
    ):
        if plane is not None and array is not None:
            found[name] = _prepared(spec, config, plane, array)
    return found


def _prepared(
    spec: AttentionSpec, config: Config, plane: Plane, array: jax.Array
) -> jax.Array:
    array = array.astype(plane.dtype)
    if plane.extent == "keys":
        keys = int(pl.cdiv(spec.S, config.keys)) * config.keys
        return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, keys - spec.S)))
    if plane.extent == "queries":
        rows = frame.whole_tiles(spec, config)
        return jnp.pad(jnp.swapaxes(array, 2, 3), ((0, 0), (0, 0), (0, 0), (0, rows - spec.T)))
    return array


def unsupported(spec: AttentionSpec) -> str | None:
    """Why not these arrays."""
    of_pairs = [
        name
        for name, full in (("bias", spec.bias), ("mask", spec.mask))
        if full is not None and extent(full) == "pairs"
    ]
    if not of_pairs:
        return None
    multiples = (frame.ROWS_OF_A_TILE, KEYS_OF_A_TILE)
    if spec.T % multiples[0] or spec.S % multiples[1]:
        return (
            f"needs T to be a multiple of {multiples[0]} and S of {multiples[1]} for a "
            f"{of_pairs[0]} over pairs, got T={spec.T}, S={spec.S}"
        )
    return None


def most_bytes(spec: AttentionSpec, config: Config) -> int:
    """Of shared memory for a slot of both, where a bias has float32."""
    found = 0
    for full, dtype in ((spec.bias, F32), (spec.mask, jnp.int8)):
        if full is not None:
            own = dtype if extent(full) == "pairs" else F32
            found += Plane(full, own).bytes(config)
    return found


def add(s: jax.Array, bias: Any) -> jax.Array:
    """s in natural units, with the bias; -inf in it hides."""
    if isinstance(bias, jax.Array) and bias.ndim == 0:
        return s + lax.broadcast(bias, s.shape)
    return s + bias.astype(F32)


def keep(s: jax.Array, mask: Any) -> jax.Array:
    if mask.ndim == 0:
        return jnp.where(mask != 0, s, -jnp.inf)
    return jnp.where(mask.astype(jnp.int32) != 0, s, -jnp.inf)
