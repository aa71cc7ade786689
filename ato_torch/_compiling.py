"""How this package's programs are compiled: for the same bits in every process.

XLA times some of its own kernels and takes the faster one. They add in different orders, so sums
over the pieces of a kernel's work would change with the process that compiled them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

OPTIONS = {"xla_gpu_experimental_enable_fusion_autotuner": False}


def jit(function: Callable[..., Any], place: jax.Device, *, keep_unused: bool = False) -> Any:
    """`jax.jit` for one device, with the options of XLA that it knows."""
    options = None if place.platform == "cpu" else _known(place)
    return jax.jit(function, keep_unused=keep_unused, compiler_options=options)


@functools.cache
def _known(place: jax.Device) -> dict[str, bool] | None:
    """The options, or None for an XLA that has them no more: a trial program tells."""
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=jax.sharding.SingleDeviceSharding(place))
    try:
        jax.jit(lambda x: x, compiler_options=OPTIONS).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        if "compile option" not in str(error):
            raise
        return None
    return OPTIONS
