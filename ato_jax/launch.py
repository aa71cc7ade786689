"""How kernels are launched: Pallas's own call, which inside `jax.shard_map` has to be told more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl

from ato_jax import device, meshes


def pallas_call(kernel: Callable[..., None], *, out_shape: Any, **options: Any) -> Any:
    """`pl.pallas_call`, interpreted inside `device.interpret()`; what it writes varies over the
    axes of a mesh that any of the arrays varies over.
    """

    def call(*arrays: Any) -> Any:
        arrays = meshes.varying_with(arrays, arrays)
        shapes = meshes.varying_with(out_shape, arrays)
        launched = pl.pallas_call(
            kernel, out_shape=shapes, interpret=device.interpreting(), **options
        )
        return launched(*arrays)

    return call
