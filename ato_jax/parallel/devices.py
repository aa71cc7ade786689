"""The devices along a mesh axis, and a sequence that is cut into a part for each of them.

Device d of n holds rows d T to (d + 1) T of a sequence of n T rows, T being the rows of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ato_jax import meshes, shapes
from ato_jax.meshes import varying_with
from ato_jax.ops.common import bind_lengths

Tree = TypeVar("Tree")
InputsT = TypeVar("InputsT")
OutputsT = TypeVar("OutputsT")
AxisName = str | tuple[str, ...]
# The most devices whose steps stand one behind the other in a program, in place of a loop.
MOST_UNROLLED = 16


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices along one axis, or along several that count as one."""

    axis: AxisName
    count: int
    index: jax.Array  # int32, this device's

    def gather(self, array: jax.Array) -> jax.Array:
        """[...] of each device -> [count, ...]."""
        return lax.all_gather(varying_with(array, self.index), self.axis)

    def in_turn(
        self,
        step: Callable[[Any, Any], tuple[Any, None]],
        carry: Any,
        entries: Any,
        reverse: bool = False,
    ) -> Any:
        """The carry after a step for each device, from the first to the last, or the reverse.

        Each turn of a loop would launch several small kernels; the steps of a few devices are one.
        """
        unroll = self.count if self.count <= MOST_UNROLLED else 1
        carry, _ = lax.scan(step, carry, entries, reverse=reverse, unroll=unroll)
        return carry

    def same(self, tree: Tree) -> Tree:
        """Arrays that are equal on all devices, of a type that says so.

        All devices have them, but only a reduction tells JAX that they do.
        """
        here = self.index == 0
        found: Tree = jax.tree.map(
            lambda array: lax.psum(jnp.where(here, array, 0), self.axis), tree
        )
        return found


def devices_along(axis_name: Any, argument: str = "axis_name") -> Devices:
    """The devices along `axis_name`; a ValueError, which names the argument, unless `jax.shard_map`
    binds it here.
    """
    check_axis(axis_name, argument)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        count = int(np.prod([lax.axis_size(name) for name in names]))
        return Devices(axis_name, count, lax.axis_index(axis_name))
    except NameError:
        raise ValueError(
            f"{argument} must be an axis of the jax.shard_map around the call, over which it cuts "
            f"the sequence, got {axis_name!r}"
        ) from None


def check_axis(axis_name: Any, argument: str) -> None:
    """A ValueError unless `axis_name` can be the name of an axis, or a tuple of names."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, Hashable) and name is not None for name in names):
        raise ValueError(
            f"{argument} must be the name of a mesh axis, or a tuple of names, got {axis_name!r}"
        )


def with_automatic_axes(
    function: Callable[[InputsT], OutputsT],
    inputs: InputsT,
    partition_of_outputs: Callable[[], OutputsT],
) -> OutputsT:
    """`function(inputs)`, with explicit axes beside those of the `jax.shard_map` automatic inside.

    Its scans and branches would need types that name these axes. See `meshes.call`.
    """
    mesh = meshes.of(inputs)
    if mesh is None or not mesh.explicit_axes:
        return function(inputs)
    return meshes.call(function, inputs, partition_of_outputs)


def without_batch(partitions: Tree) -> Tree:
    """A tree of `PartitionSpec`s without the first axis of each."""
    found: Tree = jax.tree.map(
        lambda spec: PartitionSpec(*spec[1:]),
        partitions,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
    return found


def whole_lengths(
    q_lengths: Any, kv_lengths: Any, sizes: dict[str, int], batched: bool, devices: Devices
) -> tuple[jax.Array | None, jax.Array | None, bool]:
    """`bind_lengths` of the whole sequence, of which `sizes` has one device's T and S."""
    whole = sizes | {letter: sizes[letter] * devices.count for letter in "TS"}
    return bind_lengths(q_lengths, kv_lengths, whole, batched)


def part_of_lengths(lengths: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    """How many of the rows [start, start + size) lie within lengths [B]."""
    return jnp.clip(lengths - start, 0, size)


def comparable(name: str, ids: Any) -> Any:
    """Segment ids as int32 that are equal where the ids were, on whatever devices they lie."""
    if ids is None:
        return None
    found = shapes.integers(name, ids)
    if found.dtype.itemsize > 4:
        raise ValueError(f"{name} must fit in int32, got {found.dtype}; convert it first")
    return found.astype(jnp.int32)  # uint32 wraps around, which keeps what is equal and what is not
