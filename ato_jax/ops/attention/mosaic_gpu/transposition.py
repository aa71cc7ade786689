"""The transposition of values of 8 bits, ahead of the forward kernel.

    v [B, S, G, V]  ->  [B, G, V, S up to whole blocks]

A product of 8 bits contracts over what lies side by side in both factors, here the keys. They lie
in the order of weights as a factor, which is the same in every 16 (`in_order_of_eight_bits`). XLA
would merge the transposition and that order into one permutation, and gather single bytes from
global memory.

A block of one warpgroup takes a tile of 128 keys. Two neighbouring columns are one element of 16
bits, which loads from shared memory transpose:

    x        [64, 128]       pairs of columns, keys; in registers
    across   [2, 64, 64]     the first and the second columns of the pairs, two keys an element
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import HALF, TILE
from ato_jax.mosaic.tiles import for_copy
from ato_jax.ops.attention.spec import AttentionSpec

KEYS = 128  # keys of a block's tile
U16 = jnp.uint16
# Rows of 128 bytes, copied as they are: sequences have any number of keys.
TILES = mosaic.Tiling("bthd", HALF, HALF, dtype=U16, untiled=True)


class Blocks:
    """The launch: a block for each head, tile of keys, and 128 columns."""

    def __init__(self, spec: AttentionSpec, keys: int) -> None:
        self.heads = spec.B * spec.G
        self.tiles = -(-keys // KEYS)
        self.parts = -(-spec.V // (2 * HALF))
        self.blocks = self.heads * self.tiles * self.parts


def transposed(
    spec: AttentionSpec, v: jax.Array, multiple: int, lengths: jax.Array | None
) -> jax.Array:
    """The transposed v, [B, G, V, S up to a multiple of keys], with zeros for keys behind the end
    of the sequence and beyond the lengths [B]."""
    keys = spec.S + -spec.S % multiple
    grid = Blocks(spec, keys)
    pairs = lax.bitcast_convert_type(v.reshape(*v.shape[:3], spec.V // 2, 2), U16)

    def body(*refs: Any, x_s: Any, across_s: Any, loaded: Any) -> None:
        *given, v_ref, out_ref = refs
        number = lax.axis_index("block")
        part, number = lax.rem(number, grid.parts), lax.div(number, grid.parts)
        tile, number = lax.rem(number, grid.tiles), lax.div(number, grid.tiles)
        batch, head = lax.div(number, spec.G), lax.rem(number, spec.G)
        own_keys, columns = pl.ds(tile * KEYS, KEYS), pl.ds(part * HALF, HALF)
        at = (batch, own_keys, head) if spec.layout == "bthd" else (batch, head, own_keys)
        source = v_ref.at[(*at, columns)]
        plgpu.copy_gmem_to_smem(source, for_copy(x_s.at[0]), loaded)  # [128, 64]
        plgpu.barrier_wait(loaded)
        x = mosaic.load_transposed(x_s.at[0])  # [64, 128]
        if given:
            count = given[0][batch] - tile * KEYS
            key = plgpu.broadcasted_iota(jnp.int32, x.shape, dimension=1, layout=TILE)
            x = jnp.where(key < count, x, jnp.zeros((), U16))
        for second in range(2):
            across_s.at[second][...] = mosaic.transposed_bytes(x, second)
        plgpu.commit_smem()
        own_pairs = pl.ds(tile * (KEYS // 2), KEYS // 2)
        for second in range(2):
            target = out_ref.at[batch, head, columns, second, own_pairs]
            plgpu.copy_smem_to_gmem(for_copy(across_s.at[second]), target)
        plgpu.wait_smem_to_gmem(0)

    scratch = dict(
        x_s=TILES.of_rows(1, KEYS, HALF),
        across_s=TILES.of_rows(2, HALF, HALF),
        loaded=plgpu.Barrier(num_arrivals=1),
    )
    out_type = jax.ShapeDtypeStruct((spec.B, spec.G, spec.V // 2, 2, keys // 2), U16)
    arrays = [pairs] if lengths is None else [lengths, pairs]
    found: jax.Array = mosaic.launch(
        "attention_transposition_mosaic",
        mosaic.Flat(body, scratch, 1),
        grid,
        out_type,
        arrays,
        own_barriers=True,
    )
    found = lax.bitcast_convert_type(found, mosaic.F8)
    return found.reshape(spec.B, spec.G, spec.V, keys)
