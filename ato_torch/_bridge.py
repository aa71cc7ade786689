"""A jitted function of JAX on PyTorch's tensors: `execute`, by DLPack, without copies.

Memory: an array made from a tensor is the tensor's memory and keeps it alive, and the other way
round. A tensor is copied only where its memory is not dense in the order of its axes, or does not
start at a multiple of `ALIGNMENT` bytes. No output shares memory with an input or with another
output: JAX hands an input on where a result equals it, PyTorch may write to a result.

Order: on a GPU, JAX waits for what the current PyTorch stream holds so far, and the current
PyTorch stream for JAX, each by an event, without a block of the host. So work on other PyTorch
streams, and JAX code of the caller's own that reuses memory which a PyTorch kernel still reads,
need an order of their own. On a CPU PyTorch has no streams, so a call returns when its results
are there.

Cost: the public functions of JAX and PyTorch look at every array anew, its device, its stream, its
version of the protocol. Here that is looked at once, and what is passed is the protocol's capsule.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from ato_torch import _private

_private.check()  # this module is imported first, and the others need the names

# Not public, nor is anything else that tells whether JAX has started: where a version lacks it, no
# warning tells that JAX came first.
backends_are_initialized: Any
try:
    from jax._src.xla_bridge import backends_are_initialized
except ImportError:
    backends_are_initialized = None

# Not public: where a version of JAX lacks them, its public functions do the same more slowly.
jaxlib: Any
try:
    from jax._src.lib import _jax as jaxlib
except ImportError:
    jaxlib = None

# The kernels load 16 bytes at a time; a misaligned load ends the process's CUDA context.
ALIGNMENT = 16
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"

to_capsule, from_capsule = torch.utils.dlpack.to_dlpack, torch.utils.dlpack.from_dlpack


def execute(
    function: Callable[..., Sequence[jax.Array]], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """`function`, jitted, of the tensors: all on one device, where the results are, too."""
    place = tensors[0].device
    on_gpu = place.type == "cuda"
    tensors = dense(tensors)
    road = _road(place)
    if on_gpu:
        current = torch.cuda.current_stream(place)
        incoming = road.device.get_stream_for_external_ready_events()
        stream = torch.cuda.ExternalStream(incoming, device=place)
        stream.wait_event(current.record_event())
        # 1 is the protocol's name for the default stream, whose handle is 0.
        outgoing = current.cuda_stream or 1
    else:
        incoming = outgoing = None
    arrays = function(*[road.into_jax(tensor, incoming) for tensor in tensors])
    if outgoing is None:
        for array in arrays:
            array.block_until_ready()
    taken = {tensor.data_ptr() for tensor in tensors}
    results = []
    for array in arrays:
        result = road.out_of_jax(array, outgoing)
        pointer = result.data_ptr()
        if pointer:  # an empty tensor has none
            result = result.clone() if pointer in taken else result
            taken.add(pointer)
        results.append(result)
    return results


def dense(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As they are, where a kernel can read them so; else copies. PyTorch's zeros that take no
    memory have no address."""
    return [
        tensor
        if tensor.is_contiguous()
        and (pointer := tensor.data_ptr())
        and not pointer % ALIGNMENT
        and not tensor.is_neg()
        else tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        for tensor in tensors
    ]


class _Road:
    """How memory goes to one JAX device and comes back: `into_jax`, `out_of_jax`.

    The streams of both are handles: the one that waited for the tensors, the one that will wait
    for the arrays; None on a CPU.
    """

    def __init__(self, place: torch.device) -> None:
        self.device = jax_device(place)
        probe = torch.zeros(1, device=place)
        for into_jax, out_of_jax in (*self._private(probe), (_public_in, _public_out)):
            try:
                out_of_jax(into_jax(probe, None), None)
            except (TypeError, AttributeError):
                continue
            self.into_jax, self.out_of_jax = into_jax, out_of_jax
            return
        raise RuntimeError("this version of JAX does not take PyTorch's tensors by DLPack")

    def _private(self, probe: torch.Tensor) -> list[tuple[Any, Any]]:
        """By the names that JAX's own functions end in; from some version on the kind is named."""
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


def _public_in(tensor: torch.Tensor, stream: int | None) -> jax.Array:
    return jax.dlpack.from_dlpack(tensor.detach())


def _public_out(array: jax.Array, stream: int | None) -> torch.Tensor:
    return torch.from_dlpack(array)


@functools.cache
def _road(place: torch.device) -> _Road:
    return _Road(place)


@functools.cache
def jax_device(place: torch.device) -> jax.Device:
    """The JAX device with that memory."""
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
    """An array that JAX made, as a tensor there."""
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
    """Whether JAX, started as the environment is now, takes most of a GPU's memory at once."""
    value = os.environ.get(PREALLOCATE, "")
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    return value not in ("false", "False", "0") and allocator in ("default", "bfc")


def _platform_started() -> str | None:
    """The platform that JAX computes on by default; None where it has not started one yet, or does
    not tell."""
    has_started = backends_are_initialized is not None and backends_are_initialized()
    return jax.default_backend() if has_started else None


def share_the_gpu() -> None:
    """Leaves PyTorch its part of the GPU's memory: JAX is to take what it needs when it does."""
    if _platform_started() == "gpu" and _preallocates():
        warnings.warn(
            "JAX started on a GPU before ato_torch was imported, and has taken most of its memory, "
            f"which PyTorch needs as well: import ato_torch first, or set {PREALLOCATE}=false",
            RuntimeWarning,
            stacklevel=3,
        )
    # JAX reads it when it starts.
    os.environ.setdefault(PREALLOCATE, "false")
