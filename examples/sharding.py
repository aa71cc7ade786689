"""A mesh from the command line, and the training of a model on it.

    --mesh data=2             data parallel: each device has its own sequences
    --mesh data=2,model=4     tensor parallel beside it: its own heads and columns of the MLP
    --mesh data=2,context=4   context parallel beside it: its own part of each sequence

By data and model XLA divides everything, following the arrays (automatic axes). With a context axis
the loss runs inside `jax.shard_map`, and the model's layers know the axis. On a CPU as many devices
are simulated as the mesh has.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "model", "context")


def sizes_of(text: str) -> dict[str, int]:
    """The type of --mesh: "data=2,context=4" -> {"data": 2, "context": 4}."""
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"give sizes of {', '.join(AXES)}, such as data=2,context=4; got {text!r}"
            )
        sizes[name] = int(size)
    if {"model", "context"} <= set(sizes):
        raise argparse.ArgumentTypeError("give model or context, not both")
    return {"data": 1, **sizes}


def mesh_of(sizes: dict[str, int]) -> Mesh:
    """The mesh; a ValueError where there are too few devices."""
    count = math.prod(sizes.values())
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has its devices already
    if jax.device_count() < count:
        raise ValueError(f"the mesh needs {count} devices, JAX finds {jax.device_count()}")
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), devices=jax.devices()[:count], axis_types=kinds
    )


def spec_of(path: tuple[Any, ...], shape: tuple[int, ...], parts: int) -> P:
    """How the model axis cuts a parameter: projections by heads, the MLP by its width.

    A parameter whose axis does not divide into so many parts is whole on every device.
    """
    names = set(map(str, path))
    axis = 0 if names & {"out", "narrow"} else 1
    if names & {"query", "key", "value", "widen", "out", "narrow"} and len(shape) > axis:
        if shape[axis] % parts == 0:
            return P(*[None] * axis, "model")
    return P()


def place(model: nnx.Module, mesh: Mesh) -> None:
    """Puts what the model has on the mesh, in place."""
    state = nnx.to_pure_dict(nnx.state(model))

    def on_mesh(path: Any, array: jax.Array) -> jax.Array:
        names, parts = tuple(key.key for key in path), mesh.shape.get("model", 1)
        spec = spec_of(names, array.shape, parts) if parts > 1 else P()
        return jax.device_put(array, NamedSharding(mesh, spec))

    nnx.update(model, jax.tree_util.tree_map_with_path(on_mesh, state))


def batches_on(mesh: Mesh, batches: Any) -> Any:
    """Batches of arrays [B, T], cut over the mesh."""
    sharding = NamedSharding(mesh, rows_of(mesh))
    for batch in batches:
        yield jax.device_put(batch, sharding)


def rows_of(mesh: Mesh) -> P:
    return P("data", "context" if "context" in mesh.axis_names else None)


def loss_on(mesh: Mesh, sums: Callable[[Any, Any], Any], loss_of: Callable[[Any], Any]) -> Any:
    """The loss function of a model and a batch that is cut over the mesh.

    `sums(model, batch)` is a tree of sums over tokens, of which `loss_of` makes the loss and
    metrics.
    """

    def loss(model: nnx.Module, batch: Any) -> Any:
        if "context" not in mesh.axis_names:
            return loss_of(sums(model, batch))
        graph, state = nnx.split(model)

        def of_part(state: Any, batch: Any) -> Any:
            return jax.lax.psum(sums(nnx.merge(graph, state), batch), ("data", "context"))

        rows = rows_of(mesh)
        return loss_of(
            jax.shard_map(of_part, mesh=mesh, in_specs=(P(), rows), out_specs=P())(state, batch)
        )

    return loss
