"""The device that a call runs on, as the facts that block sizes and support depend on."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import re
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
    (10, 3): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}
# A block may use this much on every GPU: NVIDIA's from sm_75 on, and AMD's, whose compute units
# have 64 KiB.
SMALLEST_SHARED_MEMORY = 65_536
# The oldest architecture that Triton compiles for.
AMPERE = (8, 0)
# AMD's data center architectures (gfx90a, gfx942), whose waves have 64 threads. The waves of gfx10
# and later have 32.
WIDE_WAVES = "gfx9"

_interpreting = contextvars.ContextVar("ato_jax_interpreting", default=False)
_target: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "ato_jax_target", default=None
)


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
      platform: "cpu", "gpu" or "tpu". All else describes a GPU.
      name: as JAX calls the kind of device.
      capability: an NVIDIA GPU's compute capability; None where JAX does not tell it.
      multiprocessors: how many the GPU has.
      shared_memory: bytes that one block may use.
      gfx: an AMD GPU's architecture; "" otherwise.
    """

    platform: str
    name: str = ""
    capability: tuple[int, int] | None = None
    multiprocessors: int = 1
    shared_memory: int = SMALLEST_SHARED_MEMORY
    gfx: str = ""

    @property
    def architecture(self) -> str:
        """Such as "sm_90" or "gfx942"; "" where it is not known."""
        return "sm_{}{}".format(*self.capability) if self.capability else self.gfx

    @property
    def is_amd(self) -> bool:
        return bool(self.gfx)

    @property
    def warp_size(self) -> int:
        """The threads of a warp; AMD calls it a wave."""
        return 64 if self.gfx.startswith(WIDE_WAVES) else 32

    def waves(self, warps: int) -> int:
        """How many of the device's warps have as many threads as `warps` warps of 32."""
        return max(1, warps * 32 // self.warp_size)

    def lacks_triton(self) -> str | None:
        """The reason why Triton cannot compile for this GPU; None if it can."""
        if self.is_amd or self.capability is not None and self.capability >= AMPERE:
            return None
        needs = "needs an NVIDIA GPU of compute capability 8.0 or more, or an AMD GPU"
        if self.capability is None:
            return f"{needs}, and JAX tells no architecture of this one, {self.name!r}"
        return f"{needs}, and this one, {self.name}, has {'.'.join(map(str, self.capability))}"


def describe(device: jax.Device) -> Device:
    """A JAX device as a `Device`."""
    if device.platform not in ("gpu", "cuda", "rocm"):
        return Device(device.platform, device.device_kind)
    # "9.0" for NVIDIA, "gfx942:sramecc+:xnack-" for AMD.
    text = str(getattr(device, "compute_capability", ""))
    numbers = re.fullmatch(r"(\d+)\.(\d+)", text)
    capability = (int(numbers[1]), int(numbers[2])) if numbers else None
    gfx = text.partition(":")[0]
    return Device(
        "gpu",
        str(device.device_kind),
        capability,
        int(getattr(device, "core_count", None) or 1),
        shared_memory_of(capability),
        gfx if gfx.startswith("gfx") else "",
    )


def shared_memory_of(capability: tuple[int, int] | None) -> int:
    """Bytes of shared memory that a block may use.

    For an unknown capability it is the least of those with the same major number, and where there
    are none of those, the least of all from sm_80 on.
    """
    if capability is None or capability < AMPERE:
        return SMALLEST_SHARED_MEMORY
    known = [size for (major, _), size in SHARED_MEMORY.items() if major == capability[0]]
    return SHARED_MEMORY.get(capability, min(known or SHARED_MEMORY.values()))


def of_call(arrays: Any) -> Device:
    """The device of a call: that of its first concrete array, else JAX's default device."""
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
    """Makes a context in which Pallas interprets the kernels, on any platform.

    Interpreted kernels are slow: use small arrays. Inside it a kernel backend can be named on a
    machine without a GPU, to test a kernel or a call's options.

    Args:
      value: False switches it off again, inside another such context.

    Returns:
      A context manager.

    Raises:
      ValueError: `value` is no bool.

    Example:
      >>> import ato_jax, jax.numpy as jnp
      >>> q = k = v = jnp.ones((1, 8, 1, 8))
      >>> with ato_jax.interpret():
      ...     out = ato_jax.attention(q, k, v, implementation="triton")
      >>> out.shape
      (1, 8, 1, 8)
    """
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


@functools.cache
def _has_amd_gpu() -> bool:
    """Whether JAX runs on AMD GPUs. One process never has GPUs of two makers."""
    try:
        return bool(jax.local_devices(backend="rocm"))
    except RuntimeError:
        return False


def takes_ptx() -> bool:
    """Whether the kernel that is traced now will be compiled for an NVIDIA GPU.

    Only then may it hold inline PTX. Elsewhere it takes the portable form of the same arithmetic.
    """
    if interpreting():
        return False
    target = _target.get()
    return target == "cuda" if target else not _has_amd_gpu()


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[None]:
    """Inside this context kernels are traced for "cuda" or "rocm", on a machine without a GPU.

    The target is no part of the keys of JAX's caches, so these are emptied on entry and on exit.
    """
    if _target.get() == target:
        yield
        return
    jax.clear_caches()
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)
        jax.clear_caches()
