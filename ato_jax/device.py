"""What the device is that a call will run on: the facts from which block sizes follow."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

# Shared memory that one block may use, in bytes, by compute capability (CUDA C Programming Guide,
# technical specifications: 163, 99 and 227 KiB).
SHARED_MEMORY = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (12, 0): 101_376,
}
SMALLEST_SHARED_MEMORY = 65_536

_interpreting = contextvars.ContextVar("ato_jax_interpreting", default=False)


@dataclasses.dataclass(frozen=True)
class Device:
    """`platform` is "cpu", "gpu" or "tpu"; the other facts are a GPU's."""

    platform: str
    name: str = ""
    capability: tuple[int, int] | None = None
    multiprocessors: int = 1
    shared_memory: int = SMALLEST_SHARED_MEMORY


def describe(device: Any) -> Device:
    """A JAX device as a `Device`."""
    if device.platform not in ("gpu", "cuda", "rocm"):
        return Device(device.platform, device.device_kind)
    capability = None
    text = str(getattr(device, "compute_capability", ""))
    if text.replace(".", "").isdigit() and "." in text:
        major, minor = text.split(".")
        capability = (int(major), int(minor))
    return Device(
        "gpu",
        device.device_kind,
        capability,
        int(getattr(device, "core_count", 1)),
        SHARED_MEMORY.get(capability, SMALLEST_SHARED_MEMORY)
        if capability
        else SMALLEST_SHARED_MEMORY,
    )


def of_call(arrays: Any) -> Device:
    """The device of a call: that of its concrete arrays, else JAX's default device."""
    for array in jax.tree.leaves(arrays):
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return describe(next(iter(array.devices())))
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is None or isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return describe(default)


def interpreting() -> bool:
    """Whether Pallas kernels are to be interpreted instead of compiled."""
    return _interpreting.get()


def interpret(value: bool = True) -> contextlib.AbstractContextManager[None]:
    """Inside this context Pallas interprets the kernels, on any platform: slow, for tests."""
    if not isinstance(value, bool):
        raise ValueError(f"interpret's value must be True or False, got {value!r}")
    return _interpreted(value)


@contextlib.contextmanager
def _interpreted(value: bool) -> Iterator[None]:
    token = _interpreting.set(value)
    try:
        yield
    finally:
        _interpreting.reset(token)
