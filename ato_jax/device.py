"""What the device is that a call will run on: the facts from which block sizes follow."""

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
# Of every GPU, NVIDIA's from sm_75 on and AMD's (a compute unit's 64 KiB).
SMALLEST_SHARED_MEMORY = 65_536
# The oldest architecture that Triton makes machine code for.
AMPERE = (8, 0)
# AMD's architectures of data centers, whose waves have 64 threads (gfx90a, gfx942); in a wave of
# its other ones, gfx10 and later, are 32.
WIDE_WAVES = "gfx9"

_interpreting = contextvars.ContextVar("ato_jax_interpreting", default=False)
_target: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "ato_jax_target", default=None
)


@dataclasses.dataclass(frozen=True)
class Device:
    """`platform` is "cpu", "gpu" or "tpu"; the other facts are a GPU's.

    An NVIDIA GPU has a compute capability, an AMD GPU the name of its architecture, `gfx`; where
    JAX tells neither, nothing is known of the GPU but that it is one.
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
        """The threads of a warp, which AMD calls a wave."""
        return 64 if self.gfx.startswith(WIDE_WAVES) else 32

    def waves(self, warps: int) -> int:
        """How many of the device's warps have the threads of so many warps of 32."""
        return max(1, warps * 32 // self.warp_size)

    def lacks_triton(self) -> str | None:
        """Why no kernel can be compiled by Triton for this GPU; None if it can."""
        if self.is_amd or self.capability is not None and self.capability >= AMPERE:
            return None
        needs = "needs an NVIDIA GPU of compute capability 8.0 or more, or an AMD GPU"
        if self.capability is None:
            return f"{needs}, and JAX tells no architecture of this one, {self.name!r}"
        return f"{needs}, and this one, {self.name}, has {'.'.join(map(str, self.capability))}"


def describe(device: Any) -> Device:
    """A JAX device as a `Device`."""
    if device.platform not in ("gpu", "cuda", "rocm"):
        return Device(device.platform, device.device_kind)
    # "9.0" of NVIDIA's, "gfx942:sramecc+:xnack-" of AMD's.
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
    """What a block may use; of an unknown capability the least of those of its generation, or of
    all from sm_80 on where that is newer than any known.
    """
    if capability is None or capability < AMPERE:
        return SMALLEST_SHARED_MEMORY
    known = [size for (major, _), size in SHARED_MEMORY.items() if major == capability[0]]
    return SHARED_MEMORY.get(capability, min(known or SHARED_MEMORY.values()))


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


@functools.cache
def _has_amd_gpu() -> bool:
    """Whether JAX runs on AMD GPUs; one process has those of one maker alone."""
    try:
        return bool(jax.local_devices(backend="rocm"))
    except RuntimeError:
        return False


def takes_ptx() -> bool:
    """Whether a kernel that is traced here may hold inline PTX: compiled for an NVIDIA GPU.

    Elsewhere a kernel takes the portable form of the same arithmetic.
    """
    if interpreting():
        return False
    target = _target.get()
    return target == "cuda" if target else not _has_amd_gpu()


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[None]:
    """Inside this context kernels are traced for "cuda" or "rocm", on a machine without a GPU.

    JAX keeps what it traced without knowing of the target, so its caches are emptied on both ends.
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
