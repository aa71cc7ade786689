"""Runs a jitted JAX function on PyTorch's tensors by DLPack, without copies: `execute`.

Memory: an array made from a tensor shares the tensor's memory and keeps it alive, and vice versa. A
tensor is copied only if it is not contiguous or not aligned to `ALIGNMENT` bytes. No output shares
memory with an input or another output: JAX may return an input as a result, and PyTorch may write
to a result.

Order: on a GPU, JAX waits for the work in the current PyTorch stream, and that stream then waits
for JAX, each by an event and without blocking the host. Work in other PyTorch streams, and the
caller's own JAX code that reuses memory which a PyTorch kernel still reads, must be ordered by the
caller. On a CPU PyTorch has no streams, so a call returns when its results are complete.

Cost: the public functions of JAX and PyTorch query device, stream and protocol version for every
array. Here this is done once for each device, and DLPack capsules are passed on directly.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ato_torch import _private

_private.check()  # this module is imported before those that use the names

# Private. No public name says whether JAX has started. Without it there is no warning if it has.
backends_are_initialized: Any
try:
    from jax._src.xla_bridge import backends_are_initialized
except ImportError:
    backends_are_initialized = None

# Private. Without it JAX's public functions do the same more slowly.
jaxlib: Any
try:
    from jax._src.lib import _jax as jaxlib
except ImportError:
    jaxlib = None

# Bytes: kernels load 16 bytes at a time, and a misaligned load makes CUDA unusable in the process.
ALIGNMENT = 16
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"

to_capsule, from_capsule = torch.utils.dlpack.to_dlpack, torch.utils.dlpack.from_dlpack


def execute(
    function: Callable[..., Sequence[jax.Array]], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The results of a jitted function of tensors on one device, as tensors on that device."""
    place = tensors[0].device
    on_gpu = place.type == "cuda"
    tensors = dense(tensors)
    exchange = _exchange(place)
    if on_gpu:
        current = torch.cuda.current_stream(place)
        incoming = exchange.device.get_stream_for_external_ready_events()
        stream = torch.cuda.ExternalStream(incoming, device=place)
        stream.wait_event(current.record_event())
        # DLPack names the default stream 1; its handle is 0.
        outgoing = current.cuda_stream or 1
    else:
        incoming = outgoing = None
    arrays = function(*[exchange.into_jax(tensor, incoming) for tensor in tensors])
    if outgoing is None:
        for array in arrays:
            array.block_until_ready()
    taken = {tensor.data_ptr() for tensor in tensors}
    results = []
    for array in arrays:
        result = exchange.out_of_jax(array, outgoing)
        pointer = result.data_ptr()
        if pointer:  # an empty tensor has none
            result = result.clone() if pointer in taken else result
            taken.add(pointer)
        results.append(result)
    return results


def dense(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with copies of those that a kernel cannot read as they are.

    These are tensors that are not contiguous, not aligned or lazily negated, and PyTorch's zero
    tensors without memory, which have no address.
    """
    return [
        tensor
        if tensor.is_contiguous() and not is_unreadable(tensor)
        else tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        for tensor in tensors
    ]


def exchanged(tensors: Sequence[torch.Tensor], which: Sequence[bool]) -> list[torch.Tensor]:
    """The tensors, of which those that `which` says have their second and third axis exchanged."""
    return [
        tensor.transpose(1, 2) if is_exchanged else tensor
        for tensor, is_exchanged in zip(tensors, which, strict=True)
    ]


def is_unreadable(tensor: torch.Tensor) -> bool:
    """Whether a kernel cannot read the tensor at its address, whatever its strides."""
    pointer = tensor.data_ptr()
    return bool(pointer % ALIGNMENT or not pointer or tensor.is_neg())


class _Exchange:
    """Passes memory to a JAX device and back, `into_jax` and `out_of_jax`.

    The streams are handles: of the stream that has waited for the tensors, and of the stream that
    will wait for the arrays. They are None on a CPU.
    """

    def __init__(self, place: torch.device) -> None:
        self.device = jax_device(place)
        probe = torch.zeros(1, device=place)
        for into_jax, out_of_jax in (*self._private(probe), (_public_in, _public_out)):
            try:
                out_of_jax(into_jax(probe, None), None)
            except (TypeError, AttributeError):
                continue
            self.into_jax, self.out_of_jax = _with_float8(into_jax, place), out_of_jax
            return
        raise RuntimeError("this version of JAX does not take PyTorch's tensors by DLPack")

    def _private(self, probe: torch.Tensor) -> list[tuple[Any, Any]]:
        """By private functions of JAX; newer versions also take the kind of device."""
        kind = int(probe.__dlpack_device__()[0])
        device = self.device

        def out_of_jax(array: jax.Array, stream: int | None) -> torch.Tensor:
            return from_capsule(jaxlib.buffer_to_dlpack_managed_tensor(array, stream=stream))

        def with_kind(tensor: torch.Tensor, stream: int | None) -> jax.Array:
            return jaxlib.dlpack_managed_tensor_to_buffer(
                to_capsule(tensor), device, stream, None, kind
            )

        def without(tensor: torch.Tensor, stream: int | None) -> jax.Array:
            return jaxlib.dlpack_managed_tensor_to_buffer(to_capsule(tensor), device, stream, None)

        return [(with_kind, out_of_jax), (without, out_of_jax)]


def _with_float8(into_jax: Callable[..., jax.Array], place: torch.device) -> Any:
    """`into_jax`, also for float8 tensors where DLPack does not take these: as bytes, which JAX
    copies into an array of float8."""
    try:
        into_jax(torch.zeros(1, dtype=torch.float8_e4m3fn, device=place), None)
    except Exception:  # PyTorch and JAX have errors of their own for a dtype that is not known

        def by_bytes(tensor: torch.Tensor, stream: int | None) -> jax.Array:
            if tensor.dtype is not torch.float8_e4m3fn:
                return into_jax(tensor, stream)
            array = into_jax(tensor.view(torch.uint8), stream)
            return jax.lax.bitcast_convert_type(array, jnp.float8_e4m3fn)

        return by_bytes
    return into_jax


def _public_in(tensor: torch.Tensor, stream: int | None) -> jax.Array:
    return jax.dlpack.from_dlpack(tensor.detach())


def _public_out(array: jax.Array, stream: int | None) -> torch.Tensor:
    return torch.from_dlpack(array)


@functools.cache
def _exchange(place: torch.device) -> _Exchange:
    return _Exchange(place)


@functools.cache
def jax_device(place: torch.device) -> jax.Device:
    """The JAX device that is PyTorch's device `place`."""
    if place.type == "cpu":
        return jax.local_devices(backend="cpu")[0]
    by_number = {device.local_hardware_id: device for device in jax.local_devices(backend="gpu")}
    if place.index not in by_number:
        raise ValueError(
            f"query is on {place}, which JAX does not see: it sees "
            f"{', '.join(map(str, by_number.values()))}"
        )
    return by_number[place.index]


def from_jax(array: jax.Array, place: torch.device) -> torch.Tensor:
    """A JAX array as a tensor on the device `place`."""
    return torch.from_dlpack(jax.device_put(array, jax_device(place)))


@torch.compiler.assume_constant_result
def has_gpu() -> bool:
    """Whether JAX can reach a GPU at all."""
    return _has_gpu()


@functools.cache
def _has_gpu() -> bool:
    try:
        return bool(jax.local_devices(backend="gpu"))
    except RuntimeError:
        return False


def _preallocates() -> bool:
    """Whether JAX, with the environment as it is, reserves most of a GPU's memory at once."""
    value = os.environ.get(PREALLOCATE, "")
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    return value not in ("false", "False", "0") and allocator in ("default", "bfc")


def _platform_started() -> str | None:
    """JAX's default platform, or None if JAX has not started yet or does not say."""
    has_started = backends_are_initialized is not None and backends_are_initialized()
    return jax.default_backend() if has_started else None


def share_the_gpu() -> None:
    """Makes JAX allocate GPU memory as needed, so that PyTorch has its part of it."""
    if _platform_started() == "gpu" and _preallocates():
        warnings.warn(
            "JAX started on a GPU before ato_torch was imported, and has taken most of its memory, "
            f"which PyTorch needs as well: import ato_torch first, or set {PREALLOCATE}=false",
            RuntimeWarning,
            stacklevel=3,
        )
    # JAX reads this variable when it starts.
    os.environ.setdefault(PREALLOCATE, "false")
