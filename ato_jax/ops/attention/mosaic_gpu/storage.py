"""The forward kernel's roles, its shared memory, and what its parts are called with (`forward.py`
has the mathematics)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import OF_COLUMNS, OF_ROWS, Array, Buffer, Ring, Role, Signal
from ato_jax.ops.attention.eight_bits import reads_eight_bits
from ato_jax.ops.attention.mosaic_gpu import frame, pairs, segments, visibility
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.mosaic_gpu.schedule import Schedule
from ato_jax.ops.attention.mosaic_gpu.softmax import EXPONENT, Softmax
from ato_jax.ops.attention.spec import AttentionSpec, Limits, Ranges

# The most registers of a consumer's thread: as many as each of two consumers gets.
MOST_REGISTERS = 240
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)


def consumer(config: Config) -> Role:
    return consumers_of(config.consumers)


@functools.cache
def consumers_of(count: int) -> Role:
    """The role of `count` warpgroups that multiply, beside the one that loads."""
    return Role("consumer", mosaic.workers_registers(count, MOST_REGISTERS), count)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    q: Array  # [n, R, D]; at the end out, if it has no place of its own
    k: Array  # [stages, K, D]
    v: Array  # [stages, K, V]; of 8 bits [stages, V, K]
    k_ids: Array  # [stages, K] int32, with k
    out: Array  # [n, R, V], see `frame.has_own_outputs`
    bias: Array  # [1 or 2, n, R, K] or [1 or 2, K]
    mask: Array  # as bias
    queries: Ring
    keys: Ring
    values: Ring
    pairs: Ring | None  # of bias and mask
    cleaned: Signal | None


def storage_of(spec: AttentionSpec, config: Config, planes: pairs.Planes) -> Storage:
    of_queries, of_keys, of_values = frame.queries(spec), frame.keys(spec), frame.values(spec)
    q = Buffer(
        of_queries.tiles(config.consumers, config.rows),
        copies=config.consumers * of_queries.parts,
    )
    k = Buffer(of_keys.tiles(config.stages, config.keys), copies=of_keys.parts)
    v = Buffer(of_values.tiles(config.stages, config.keys), copies=of_values.parts)
    k_ids = None
    if spec.segments:
        k_ids = Buffer(plgpu.SMEM((config.stages, config.keys), jnp.int32))
    out = None
    if frame.has_own_outputs(spec, config):
        out = Buffer(frame.outputs(spec).tiles(config.consumers, config.rows))
    block = pairs.block_of(config)
    slots = planes.slots(block, frame.MOST_BYTES - frame.shared_bytes(spec, config))
    bias, mask = (None if plane is None else plane.buffer(block, slots) for plane in planes)
    readers = (consumer(config),)
    return Storage(
        q=q,
        k=k,
        v=v,
        k_ids=k_ids,
        out=out,
        bias=bias,
        mask=mask,
        queries=Ring.of(1, (q,), readers),
        keys=Ring.of(config.stages, (k, k_ids), readers),
        values=Ring.of(config.stages, (v,), readers),
        pairs=Ring.of(slots, (bias, mask), readers) if planes.in_ring else None,
        cleaned=Signal(readers) if spec.kv_lengths and not reads_eight_bits(spec) else None,
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """The kernel: what it is of, its arrays in global memory, and its storage."""

    spec: AttentionSpec
    config: Config
    planes: pairs.Planes
    own: Storage
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any  # [B, T up to whole tiles, H] float32, or [B, H, T ..] where the layout is "bhtd"
    rest: Any = None  # [.., V] int8, the axes of lse ahead: what rounding took from out
    sinks: Any = None
    bounds: Any = None
    q_ids: Any = None  # see `segments.arrays_of`, as for the two below
    k_ids: Any = None
    shared: Any = None
    bias: Any = None
    mask: Any = None
    hashes: Any = None  # [B, H, T up to whole tiles], for dropout
    units: Any = None  # [B, H], what scores of 8 bits are multiplied by
    v_scales: Any = None  # [B, H]

    @property
    def turns(self) -> mosaic.Turns:
        return mosaic.Turns(self.config.consumers, self.config.consumers + 1)

    def unit(self, item: Any) -> Any:
        """What scores are multiplied by."""
        return self.spec.scale if self.units is None else self.units[item.batch, item.head]

    def softmax(self, unit: Any) -> Softmax:
        shift = EXPONENT if reads_eight_bits(self.spec) else 0
        dtype = frame.dtype_of_inputs(self.spec)
        if self.planes.bias is not None:
            return Softmax(1.0, True, shift, dtype)
        return Softmax(self.spec.softcap or unit, False, shift, dtype)

    def limits(self, batch: Any) -> Limits:
        return visibility.limits_of(self.spec, self.bounds, batch)

    @property
    def cleans(self) -> bool:
        """Whether values beyond the keys' end may be anything, NaN too."""
        return self.spec.kv_lengths and not reads_eight_bits(self.spec)

    def seen(self, batch: Any, first_row: Any, rows: int) -> Ranges:
        """The blocks that so many rows go through."""
        blocks = int(pl.cdiv(self.spec.S, self.config.keys))
        found = visibility.ranges(self.limits(batch), first_row, rows, self.config.keys, blocks)
        if self.shared is None:
            return found
        allowed = segments.ranges_of(self.config.rows, self.shared, batch, first_row, rows)
        return visibility.intersection(found, allowed, blocks)

    def ids(self, batch: Any, first_row: Any, slot: Any) -> visibility.Ids | None:
        """The segments of a consumer's queries and of the keys in a slot; None without segments."""
        if self.q_ids is None:
            return None
        rows = self.q_ids.at[batch, pl.ds(first_row, self.config.rows)]
        of_rows = mosaic.load(rows, OF_ROWS, optimized=False)  # [R]
        of_keys = mosaic.load(self.own.k_ids.at[slot], OF_COLUMNS)  # [K]
        plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
        return of_rows, of_keys

    def each_item(self, do: Any) -> tuple[Any, Any]:
        tile = self.config.tile
        schedule = Schedule(self.spec, self.config)
        return schedule.each(lambda batch, row: self.seen(batch, row, tile), do)
