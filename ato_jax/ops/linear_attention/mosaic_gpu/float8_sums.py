"""The sums over the keys of each piece, for keys and values in 8 bits, without a decay.

`bidirectional.py` and `causal.py` launch it; `sums_walk.py` has its loops.

    S = sum_j phi(k_j) v_j^T [F, V],  z = sum_j phi(k_j) [F]
    k_j = k8_j k_scale,  v_j = v8_j v_scale

    memory    loads groups of rows of k8 and v8
    values    widens v8 into tiles of 16 bits, which products take from shared memory
    sums      each 64 rows of S, of 64 rows of a group: phi(k)^T [64, C] in registers

    k8   memory -> keys -> sums          v8   memory -> values8 -> values
                                         v16  values -> values16 -> sums

    symbol     shape          where
    phi(k)^T   [64, C]        registers of sums, from k8 transposed by its load; in bfloat16, or for
                              relu and identity in float16 times a power of two
                              (`float8_features.py`)
    v16        [C, V]         shared memory, unscaled: S has v_scale as a number per head
    ones       [C, 8]         shared memory: z is a product, too
    S, z       [64, V + 8]    registers of sums

Issuing instructions limits this kernel: at 4.2 TB/s, 64 rows of 64 columns of k8 and v8 arrive in
460 cycles of an SM, and a warp scheduler issues one instruction a cycle. So an instruction handles
two numbers or more where it can. k^T is loaded by instructions that transpose 16 bits, here two
numbers of 8 bits. v is loaded and stored 16 bytes at a time.

Two warpgroups accumulate. With heads of 128 columns each has half of S. With heads of 64 columns a
group is two chunks, one for each warpgroup, and each writes sums of its own, which are added up
like those of pieces. The features of a chunk are computed while the products of the chunk before
run. Their last step follows the wait for these, since ptxas serializes products while registers of
an operand are written.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, Array, Buffer, Item, Ring, Role
from ato_jax.ops.linear_attention.mosaic_gpu import float8_features, narrow, sums_walk
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.sums_walk import COLUMNS
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES, WIDE_STAGES = 6, 2

SUMS = Role("sums", registers=192, warpgroups=2)
VALUES = Role("values", registers=104)
MEMORY = Role("memory", registers=24)
ROLES = mosaic.Roles((SUMS, VALUES, MEMORY))


def chunks_of_group(spec: LinearAttentionSpec) -> int:
    """How many chunks of rows the warpgroups that sum take at once."""
    return SUMS.warpgroups // (spec.D // HALF)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    k: Array  # [STAGES, D / 64, chunks * 64, 64] of 8 bits
    v: Array  # [STAGES, V / 64, chunks * 64, 64] of 8 bits
    wide_v: Array  # [WIDE_STAGES, chunks * 64, V]
    total: Array  # [2, 64, COLUMNS] float32: what is stored of S
    vector: Array  # [2, 64] float32: what is stored of z
    ones: Array  # [8, 64] in the dtype of wide_v
    keys: Ring  # of k
    values: Ring  # of v
    wide_values: Ring  # of wide_v


def storage_of(spec: LinearAttentionSpec) -> Storage:
    rows = chunks_of_group(spec) * C
    k_blocks, v_blocks = spec.D // HALF, spec.V // HALF
    k = Buffer(mosaic.eight_bits(STAGES, k_blocks, rows, HALF), copies=k_blocks)
    v = Buffer(mosaic.eight_bits(STAGES, v_blocks, rows, HALF), copies=v_blocks)
    products, dtype = mosaic.Tiling(spec.layout, spec.V, HALF), float8_features.dtype_of(spec)
    return Storage(
        k=k,
        v=v,
        wide_v=Buffer(products.shared(WIDE_STAGES, rows, spec.V, dtype=dtype)),
        ones=Buffer(products.shared(ALIKE, C, dtype=dtype)),
        total=Buffer(products.shared(SUMS.warpgroups, HALF, COLUMNS, dtype=F32)),
        vector=Buffer(plgpu.SMEM((SUMS.warpgroups, HALF), F32)),
        keys=Ring.of(STAGES, (k,), (SUMS,)),
        values=Ring.of(STAGES, (v,), (VALUES,)),
        wide_values=Ring.of(WIDE_STAGES, (VALUES,), (SUMS,)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk(sums_walk.Walk):
    """`deal` counts groups as chunks; `rows` are those of a piece, and `length` those of all
    pieces. x and y are k and v."""

    rows: int
    length: int
    k_scale: Any
    v_scale: Any

    @property
    def at_once(self) -> int:
        return chunks_of_group(self.spec)

    @property
    def halves(self) -> int:
        return self.spec.D // HALF

    @property
    def tiling(self) -> mosaic.Tiling:
        """A tile here holds one head, also where the bfloat16 kernels put two into a tile."""
        return mosaic.Tiling(self.spec.layout, self.spec.D, math.gcd(*narrow.widths_of(self.spec)))

    @property
    def cuts_groups(self) -> bool:
        """Whether pieces end within a group, whose other rows are there."""
        return self.deal.pieces > 1 and self.rows % (self.at_once * C) != 0

    def first_row(self, item: Item, chunk: Any, number: Any = 0) -> Any:
        """The number in the sequence of a chunk's first row; `number` counts within a group."""
        return item.piece * self.rows + (chunk * self.at_once + number) * C

    def count(self, item: Item, chunk: Any, number: Any = 0) -> Any:
        """How many of a chunk's rows there are, at most 64 of them; None where all are."""
        end: Any = self.length
        if self.lengths is not None:
            end = jnp.minimum(end, self.lengths[item.batch])
        elif not self.cuts_groups and not self.length % (self.at_once * C):
            return None
        if self.cuts_groups:
            end = jnp.minimum(end, (item.piece + 1) * self.rows)
        return end - self.first_row(item, chunk, number)


def float8_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    arrays: Sequence[jax.Array],
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """[B, G, N P, F, V] and [B, G, N P, F], float32, of N = `chunks_of_group`: the sums of a piece
    are in N parts.

    Args:
      deal: of keys, by heads.
      arrays: k and v, float8_e4m3fn, and their scales [B, G] float32.
      lengths: of keys, [B] int32: rows behind them are left out.
    """
    at_once = chunks_of_group(spec)
    last = deal.length - (deal.pieces - 1) * deal.rows

    def in_chunks(rows: int) -> int:
        """As many rows as have a chunk for each group of these."""
        return int(pl.cdiv(rows, at_once * C)) * C

    rows = in_chunks(deal.rows)
    length = (deal.pieces - 1) * rows + in_chunks(last)
    of_groups = dataclasses.replace(deal, rows=rows, length=length)
    walk = functools.partial(Walk, rows=deal.rows, length=deal.length)
    return sums_walk.sums_of_pieces(
        spec,
        of_groups,
        "float8_sums",
        (walk, storage_of(spec), ((MEMORY, memory), (VALUES, values), (SUMS, sums))),
        (deal.pieces * at_once, spec.D, spec.V),
        dict(zip(("x", "y", "k_scale", "v_scale"), arrays, strict=True)),
        lengths=lengths,
    )


def memory(walk: Walk) -> None:
    """Loads groups of rows."""
    own, tiling = walk.own, walk.tiling

    def load_group(item: Item, chunk: Any) -> None:
        step = item.before + chunk
        rows = pl.ds(walk.first_row(item, chunk), walk.at_once * C)
        for ring, ref, tiles, size in (
            (own.keys, walk.x, own.k, walk.spec.D),
            (own.values, walk.y, own.v, walk.spec.V),
        ):
            slot = ring.slot(step)
            ring.acquire(step)
            # [rows, 64] each
            blocks = [tiles.at[slot, block] for block in range(size // HALF)]
            barrier = ring.produced.at[slot]
            mosaic.copy_eight_bits(tiling, ref, item, rows, item.head, blocks, barrier)

    steps = walk.each_chunk(load_group)
    own.keys.drain(steps)
    own.values.drain(steps)


def values(walk: Walk) -> None:
    """Widens v; rows that do not count become 0, since features of 0 do not cancel NaN."""
    own = walk.own
    mosaic.fill_with_ones(own.ones)  # seen with the first slot of `wide_values`

    def widen_group(item: Item, chunk: Any) -> None:
        def write(slot: Any, wide_slot: Any) -> None:
            for number in range(walk.at_once):
                cut = walk.lengths is not None or walk.cuts_groups
                count = walk.count(item, chunk, number) if cut else None
                rows = pl.ds(number * C, C)
                target = own.wide_v.at[wide_slot, rows]  # [64, V]
                for half in range(walk.spec.V // HALF):
                    mosaic.widen_rows(own.v.at[slot, half, rows], target, half, count)

        sums_walk.pass_on(own.values, own.wide_values, item.before + chunk, write)

    own.wide_values.drain(walk.each_chunk(widen_group))


def sums(walk: Walk) -> None:
    walk.each_sum(functools.partial(sum_piece, walk))


def sum_piece(walk: Walk, item: Item) -> None:
    own, spec = walk.own, walk.spec
    worker = mosaic.group()
    half, number = lax.rem(worker, walk.halves), lax.div(worker, walk.halves)
    rows = pl.ds(number * C, C)
    scale = walk.k_scale[item.batch, item.head]
    power = float8_features.power_of(spec, scale)

    def products(begun: jax.Array, chunk: Any) -> tuple[list[tuple[Any, Any]], Any]:
        """The factors of phi(k)^T v and phi(k)^T 1, and the slot of v, once it is there."""
        slot = own.wide_values.slot(item.before + chunk)
        own.wide_values.produced.wait(slot)
        phi = float8_features.finish(spec, begun, walk.count(item, chunk, number))
        return [(phi, own.wide_v.at[slot, rows]), (phi, own.ones.T)], slot

    def with_factors(totals: Any, factors: list[tuple[Any, Any]]) -> list[Any]:
        return [(total, [pair]) for total, pair in zip(totals, factors, strict=True)]

    def begin_chunk(chunk: Any) -> jax.Array:
        slot = own.keys.slot(item.before + chunk)
        own.keys.produced.wait(slot)
        x = mosaic.load_turned(own.k.at[slot, half, rows])  # [64, C]
        plgpu.commit_smem()  # reads finish before the next load overwrites them
        own.keys.consumed.arrive(slot)
        return float8_features.begin(spec, x, scale, power, half * HALF)

    def sum_chunk(chunk: Any, carried: Any) -> Any:
        totals, begun = carried
        factors, slot = products(begun, chunk - 1)
        totals, begun = mosaic.accumulate_all_while(
            with_factors(totals, factors), functools.partial(begin_chunk, chunk)
        )
        plgpu.commit_smem()  # reads finish before the next store there
        own.wide_values.consumed.arrive(slot)
        return totals, begun

    start = (mosaic.zeros(HALF, spec.V), mosaic.zeros(HALF, ALIKE)), begin_chunk(0)
    totals, begun = lax.fori_loop(1, item.chunks, sum_chunk, start)
    factors, slot = products(begun, item.chunks - 1)
    totals = mosaic.multiply(*with_factors(totals, factors))
    plgpu.commit_smem()
    own.wide_values.consumed.arrive(slot)
    leave_sums(walk, item, half, number, totals, 1.0 / power)


def leave_sums(
    walk: Walk, item: Item, half: Any, number: Any, totals: Sequence[jax.Array], inverse: Any
) -> None:
    """Stores S, times v's scale, and z, both without the power of the features."""
    own, worker, (total, vector) = walk.own, mosaic.group(), totals
    total = total * (walk.v_scale[item.batch, item.head] * inverse)
    of_piece = item.batch, item.head, item.piece * walk.at_once + number
    rows = pl.ds(half * HALF, HALF)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    mosaic.store_turned_rows(own.vector.at[worker], vector * inverse)
    for column in range(0, walk.spec.V, COLUMNS):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mosaic.store_turned(own.total.at[worker], total[:, column : column + COLUMNS])
        plgpu.commit_smem()
        target = walk.total.at[(*of_piece, rows, pl.ds(column, COLUMNS))]
        plgpu.copy_smem_to_gmem(own.total.at[worker], target)
    plgpu.copy_smem_to_gmem(own.vector.at[worker], walk.vector.at[(*of_piece, rows)])
