"""Arrays whose types say where they lie: on a mesh with explicit axes, and inside `jax.shard_map`.

Explicit axes (`AxisType.Explicit`, as `jax.make_mesh` makes them) are automatic inside an op: where
XLA puts a product or a scan's carry is not what the op's mathematics is about. Its outputs say
again how they are sharded, like the inputs that they follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

InputsT = TypeVar("InputsT")
OutputsT = TypeVar("OutputsT")
Tree = TypeVar("Tree")


def partition(array: Any) -> tuple[Any, ...]:
    """Which mesh axes each axis of an array is explicitly sharded over, None for none."""
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


def sharded(*axes: Any) -> Any:
    """A `PartitionSpec`, in the place of an array in a tree of arrays."""
    return PartitionSpec(*axes)


def varying_with(arrays: Any, others: Any) -> Any:
    """`arrays`, or their shapes, with types that say over which of `jax.shard_map`'s axes those of
    `others` vary, too. A scan's carry has to start as it goes on.
    """
    kinds = [jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(others)]
    axes = frozenset(axis for kind in kinds for axis in kind.varying)
    if not axes:
        return arrays

    def cast(array: Any) -> Any:
        if isinstance(array, jax.ShapeDtypeStruct):
            kind = next(kind for kind in kinds if kind.varying).update(varying=axes)
            return array.update(manual_axis_type=kind)
        missing = axes - jax.typeof(array).manual_axis_type.varying
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array

    return jax.tree.map(cast, arrays)


def nowhere() -> contextlib.AbstractContextManager[Any]:
    """Inside, no mesh is set: what is traced is of one device, as a kernel's body is."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def call(
    function: Callable[[InputsT], OutputsT],
    inputs: InputsT,
    partition_of_outputs: Callable[[], OutputsT],
) -> OutputsT:
    """`function(inputs)`, with explicit axes of the mesh automatic inside, and inside
    `jax.shard_map` with inputs that all vary alike: a custom derivative gives each cotangent as
    varying as its input.

    Args:
      function, inputs: a call on a tree of arrays.
      partition_of_outputs: gives the outputs' tree with a `PartitionSpec` for each array.
    """
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(inputs))
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    if mesh is None:
        return function(inputs)
    inputs = varying_with(inputs, inputs)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if not explicit:
        return function(inputs)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        partition_of_outputs(),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)(inputs)
