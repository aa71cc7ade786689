"""Arrays whose types hold their sharding: on a mesh with explicit axes, and inside `jax.shard_map`.

Inside an op, explicit axes (`AxisType.Explicit`, as `jax.make_mesh` makes them) become automatic:
XLA shards the op's products and the carries of its scans. The types of the outputs hold their
sharding again, which follows that of the inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

InputsT = TypeVar("InputsT")
OutputsT = TypeVar("OutputsT")
Tree = TypeVar("Tree")
AxisNames = str | tuple[str, ...] | None


def partition(array: jax.Array) -> tuple[AxisNames, ...]:
    """The mesh axes that each axis of an array is explicitly sharded over, None for none."""
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


def sharded(*axes: AxisNames) -> Any:
    """A `PartitionSpec`, typed so that it can stand for an array in a tree of arrays."""
    return PartitionSpec(*axes)


def varying_with(arrays: Tree, others: Any) -> Tree:
    """`arrays` with types that vary over every `jax.shard_map` axis that one of `others` varies
    over.

    The carry of a scan needs it: its type at the start must be that after a step.

    Args:
      arrays: a tree of arrays or of `jax.ShapeDtypeStruct`s.
      others: a tree of arrays.
    """
    kinds = [jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(others)]
    axes = frozenset(axis for kind in kinds for axis in kind.varying)
    if not axes:
        return arrays

    def cast(array: jax.Array | jax.ShapeDtypeStruct) -> Any:
        if isinstance(array, jax.ShapeDtypeStruct):
            kind = next(kind for kind in kinds if kind.varying).update(varying=axes)
            return array.update(manual_axis_type=kind)
        missing = axes - jax.typeof(array).manual_axis_type.varying
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array

    found: Tree = jax.tree.map(cast, arrays)
    return found


def zeros(kind: Any) -> jax.Array:
    """Zeros of a type, as `jax.typeof` returns it, that vary over the same `jax.shard_map` axes."""
    found = jnp.zeros(kind.shape, kind.dtype)
    axes = kind.manual_axis_type.varying
    return jax.lax.pcast(found, tuple(axes), to="varying") if axes else found


def nowhere() -> contextlib.AbstractContextManager[Any]:
    """A context without a mesh, to trace code for one device, such as a kernel's body."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def of(arrays: Any) -> Any:
    """The mesh that the arrays' types name; None where they name none."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(arrays))
    return next((mesh for mesh in meshes if not mesh.empty), None)


def call(
    function: Callable[[InputsT], OutputsT],
    inputs: InputsT,
    partition_of_outputs: Callable[[], OutputsT],
) -> OutputsT:
    """`function(inputs)`, with the mesh's explicit axes automatic inside.

    Inside `jax.shard_map` all inputs are made to vary over the same axes, since a custom derivative
    gives each cotangent the type of its input.

    Args:
      function: a function of a tree of arrays.
      inputs: the tree.
      partition_of_outputs: returns the outputs' tree with a `PartitionSpec` for each array.
    """
    mesh = of(inputs)
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
