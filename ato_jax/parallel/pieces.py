"""Softmax attention of some queries to some keys of a sequence that is cut across devices.

Device d of n holds one chunk of rows, d, or in zigzag order two, d and 2 n - 1 - d. A piece is the
attention of one chunk of queries to keys that follow one another in the whole sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax.ops.attention import api
from ato_jax.parallel.devices import AxisName, Devices, devices_along, part_of_lengths


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about one call.

    Attributes:
      chunks: of each device, 1 or 2.
      T, S: rows of one device.
      left, right: the bounds of the keys around a query's position, None for no bound.
      options: arguments of `ato_jax.attention` that every piece shares, as pairs.
      layout: as in `ato_jax.attention`.
      interpret: whether kernels are interpreted.
    """

    axis: AxisName
    chunks: int
    T: int
    S: int
    left: int | None
    right: int | None
    options: tuple[tuple[str, Any], ...]
    layout: str
    interpret: bool

    @property
    def devices(self) -> Devices:
        return devices_along(self.axis)

    @property
    def time(self) -> int:
        return self.layout.index("t")

    def cut(self, array: jax.Array, axis: int) -> list[jax.Array]:
        """A device's rows as its chunks."""
        return jnp.split(array, self.chunks, axis=axis)

    def starts(self, device: jax.Array, rows: int) -> list[jax.Array]:
        """Where the chunks of a device with `rows` rows begin in the whole sequence."""
        size = rows // self.chunks
        if self.chunks == 1:
            return [device * size]
        last = 2 * self.devices.count - 1
        return [device * size, (last - device) * size]


class Rows(NamedTuple):
    """What tells pieces which of their queries see which of their keys; absent arrays are None."""

    q_ids: Any  # [B, T], of this device's queries
    kv_ids: Any  # [B, S], of this device's keys
    q_lengths: Any  # [B], of the whole sequence
    kv_lengths: Any  # [B]
    offset: Any  # [B], the position of the first query of all among the keys
    seed: Any = None  # [2] uint32, of dropout


def arguments(
    plan: Plan, rows: Rows, q: jax.Array, k: jax.Array, starts: tuple[Any, Any]
) -> dict[str, Any]:
    """The options of `ato_jax.attention` for a chunk of queries and of keys, which begin at
    `starts` of all.

    `rows` has the ids of these rows alone.
    """
    q_start, k_start = starts
    found: dict[str, Any] = dict(plan.options)
    for name, whole, start, array in (
        ("q_lengths", rows.q_lengths, q_start, q),
        ("kv_lengths", rows.kv_lengths, k_start, k),
    ):
        size = array.shape[plan.time]
        if whole is not None:
            found[name] = part_of_lengths(whole, start, size)
        elif rows.q_lengths is not None or rows.kv_lengths is not None:
            # Where T = S, one that is missing would be taken for the other.
            found[name] = jnp.full(q.shape[0], size, jnp.int32)
    if rows.seed is not None:
        # Positions in the whole sequence, so that the same weights are dropped on any mesh.
        found["dropout_key"] = api.PlacedSeed(rows.seed, 0, 0, q_start, k_start)
    bounded = plan.left is not None or plan.right is not None
    return found | {
        "window": (plan.left, plan.right),
        "query_offset": rows.offset + (q_start - k_start) if bounded else None,
        "q_segment_ids": rows.q_ids,
        "kv_segment_ids": rows.kv_ids,
        "layout": plan.layout,
    }


def attend(
    plan: Plan,
    rows: Rows,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: tuple[jax.Array | int, jax.Array | int],
    **more: Any,
) -> Any:
    """`ato_jax.attention` of a chunk of queries to a chunk of keys, as `arguments` has it."""
    return api.attention(q, k, v, **arguments(plan, rows, q, k, starts), **more)


def sees(plan: Plan, rows: Rows, starts: tuple[Any, Any], sizes: tuple[int, int]) -> Any:
    """Whether any query of a piece may see any of its keys; True where that is always so."""
    q_start, k_start = starts
    found: Any = True
    if plan.right is not None:
        found &= k_start <= jnp.max(rows.offset) + q_start + sizes[0] - 1 + plan.right
    if plan.left is not None:
        found &= k_start + sizes[1] - 1 >= jnp.min(rows.offset) + q_start - plan.left
    if rows.kv_lengths is not None:
        found &= k_start < jnp.max(rows.kv_lengths)
    if rows.q_lengths is not None:
        found &= q_start < jnp.max(rows.q_lengths)
    return found


def in_order(plan: Plan, gathered: jax.Array, axis: int) -> jax.Array:
    """The rows of all devices, one device's after another's, in the sequence's order."""
    if plan.chunks == 1:
        return gathered
    count = plan.devices.count
    chunks = jnp.split(gathered, 2 * count, axis=axis)
    return lax.concatenate([*chunks[0::2], *reversed(chunks[1::2])], axis)
