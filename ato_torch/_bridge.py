"""One op of ato_jax as one differentiable function of PyTorch tensors.

    forward:   tensors -> DLPack -> arrays -> the op's prepare and dispatch.run -> DLPack -> tensors
    backward:  tensors, outputs, cotangents -> dispatch.backward -> gradients

The outputs are the op's own residuals, so backward computes nothing of the forward again.

Memory: an array made from a tensor is the tensor's memory and keeps it alive, and the other way
round. A tensor is copied only where its memory is not dense in the order of its axes, or does not
start at a multiple of `ALIGNMENT` bytes. No output shares memory with an input or with another
output: JAX hands an input on where a result equals it, PyTorch may write to a result.

Order: on a GPU, DLPack makes JAX wait for the current PyTorch stream, and the current PyTorch
stream wait for JAX, without a block of the host. So work on other PyTorch streams, and JAX code
of the caller's own that reuses memory which a PyTorch kernel still reads, need an order of their
own. On a CPU PyTorch has no streams, so a call returns when its results are there.

Derivatives of second order are refused; forward mode and vmap raise PyTorch's own errors.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from types import ModuleType
from typing import Any

import jax
import torch
from jax._src import xla_bridge  # the one place that tells whether JAX has started

from ato_jax import device, dispatch

# The kernels load 16 bytes at a time; a misaligned load ends the process's CUDA context.
ALIGNMENT = 16
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


@dataclasses.dataclass
class Call:
    """One call of an op, without its tensors.

    `api` is the op's api module; `arguments` is the structure of the dict of tensors that go to
    its `prepare` by name; `options` are `prepare`'s other arguments. `outputs` is the structure
    of the op's Outputs, known from the forward on.
    """

    api: ModuleType
    arguments: Any
    options: dict[str, Any]
    interpreting: bool
    outputs: Any = None

    def prepare(self, arrays: list[jax.Array]) -> Any:
        return self.api.prepare(**jax.tree.unflatten(self.arguments, arrays), **self.options)


# torch.compile breaks its graph here: it cannot follow Python into JAX.
@torch.compiler.disable
def run(api: ModuleType, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """The op's Outputs, of tensors; `tensors` holds what `prepare` takes, in canonical shapes.

    Canonical: `prepare` keeps the shape and the dtype of every argument that has a gradient.
    """
    leaves, arguments = jax.tree.flatten(tensors)
    call = Call(api, arguments, options, device.interpreting())
    outputs = _Function.apply(call, *leaves)
    return jax.tree.unflatten(call.outputs, outputs)


class _Function(torch.autograd.Function):
    """(call, *tensors) -> the leaves of the op's Outputs."""

    @staticmethod
    def forward(call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arrays = [to_jax(tensor) for tensor in tensors]
        with _where(arrays), device.interpret(call.interpreting):
            request = call.prepare(arrays)
            outputs = dispatch.run(
                call.api.OP, request.spec, request.inputs, request.implementation
            )
        leaves, call.outputs = jax.tree.flatten(outputs)
        return tuple(_to_torch(leaves, arrays))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        # Saved by PyTorch, so that it refuses a backward after one of them was written to.
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = tuple(ctx.needs_input_grad[1:])
        return None, *_Gradient.apply(ctx.call, needed, *ctx.saved_tensors, *cotangents)


class _Gradient(torch.autograd.Function):
    """(call, needed, *tensors, *outputs, *cotangents) -> the gradient of each tensor, or None.

    `needed` tells of each tensor whether its gradient is.
    """

    @staticmethod
    def forward(
        call: Call, needed: tuple[bool, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        arrays = [to_jax(tensor) for tensor in tensors]
        inputs, held = arrays[: len(needed)], arrays[len(needed) :]
        outputs, cotangents = (
            jax.tree.unflatten(call.outputs, leaves)
            for leaves in (held[: len(held) // 2], held[len(held) // 2 :])
        )
        # For each argument, which of the tensors it is made of.
        places = jax.tree.unflatten(call.arguments, range(len(needed)))
        wanted = tuple(
            name for name in places if any(needed[at] for at in jax.tree.leaves(places[name]))
        )
        with _where(arrays), device.interpret(call.interpreting):
            request = call.prepare(inputs)
            if request.spec.B == 0:
                return tuple(torch.zeros_like(tensor) for tensor in tensors[: len(needed)])
            found = dispatch.backward(
                call.api.OP,
                request.spec,
                request.inputs,
                outputs,
                cotangents,
                request.implementation,
                wanted,
            )
        gradients: list[torch.Tensor | None] = [None] * len(needed)
        order = [at for name in wanted for at in jax.tree.leaves(places[name])]
        ordered = [leaf for name in wanted for leaf in jax.tree.leaves(found[name])]
        for at, gradient in zip(order, _to_torch(ordered, arrays), strict=True):
            gradients[at] = _cut(gradient, tensors[at].shape)
        return tuple(gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        raise NotImplementedError(
            "ato_torch has no derivatives of second order; ato_jax, called from JAX, has them"
        )


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The tensor's memory as an array, on the same device; a copy only where it has to be one."""
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return jax.dlpack.from_dlpack(tensor)


def _to_torch(arrays: list[jax.Array], inputs: list[jax.Array]) -> list[torch.Tensor]:
    """The arrays' memory as tensors; a copy where it is an input's or an earlier one's."""
    if all(place.platform == "cpu" for array in arrays for place in array.devices()):
        jax.block_until_ready(arrays)
    taken = {array.unsafe_buffer_pointer() for array in inputs if array.size}
    tensors = []
    for array in arrays:
        tensor = torch.from_dlpack(array)
        if array.size:
            pointer = tensor.data_ptr()
            tensor = tensor.clone() if pointer in taken else tensor
            taken.add(pointer)
        tensors.append(tensor)
    return tensors


def _cut(gradient: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Without the row that `prepare` adds to an empty axis."""
    if gradient.shape == shape:
        return gradient
    return gradient[tuple(slice(size) for size in shape)]


def _where(arrays: list[jax.Array]) -> Any:
    """What JAX makes on the way, such as a default, is made where the tensors live."""
    return jax.default_device(next(iter(arrays[0].devices())))


@functools.cache
def has_gpu() -> bool:
    """Whether JAX can reach a GPU at all."""
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
    """The platform that JAX computes on by default, None where it has not started one yet."""
    return jax.default_backend() if xla_bridge.backends_are_initialized() else None


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
