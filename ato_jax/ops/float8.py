"""Calls whose q, k and v are float8_e4m3fn: bound, and where no kernel reads 8 bits, widened.

    x = values * scale        values [B, T, H, D] of float8_e4m3fn, scale [B, H] float32

Some calls have kernels that read 8 bits. Their backend has an op of its own, since it takes scales
beside the arrays (`reading.py` of linear and of softmax attention). All other calls widen their
arrays first, to bfloat16 or, for a float32 output, to float32, and take the time and the memory of
a call on wide arrays. float8_e4m3fn has 4 significant bits and bfloat16 has 8, so a product with
a power of two is exact, and one with another scale is rounded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ato_jax import (
    checking,
    choosing,
    device,
    dispatch,
    meshes,
    programs,
    quantizing,
    shapes,
)
from ato_jax.ops import common
from ato_jax.quantizing import FLOAT8

# (q_scale [B, H], k_scale [B, G], v_scale [B, G])
Scales = tuple[ArrayLike, ArrayLike, ArrayLike]
RequestT = TypeVar("RequestT", bound=Any)

NO_DERIVATIVE = "float8 inputs have no derivative"
WAY_OUT = (
    "for training, quantise in the forward pass alone and differentiate the call on bfloat16 "
    "arrays, by jax.custom_vjp as the guide to float8 shows (docs/guides/float8.md); where no "
    "derivative is wanted, apply jax.lax.stop_gradient to every input"
)


def bind_qkv(
    q: Any, k: Any, v: Any, layout: str, scales: Any, out_dtype: Any
) -> tuple[list[jax.Array], dict[str, int], bool, str | None]:
    """As `common.bind_qkv`, with float8 arrays widened, and the output's dtype for such a call.

    The last is None where q, k and v are wide.
    """
    (arrays, own_scales), sizes, batched, out_dtype = bind(q, k, v, layout, scales, out_dtype)
    if out_dtype is not None:
        heads = common.axes(layout, "BTHD").index("H")
        arrays = widened(arrays, own_scales, heads, out_dtype)
    return arrays, sizes, batched, out_dtype


def bind(
    q: Any, k: Any, v: Any, layout: str, scales: Any, out_dtype: Any
) -> tuple[tuple[list[jax.Array], list[jax.Array]], dict[str, int], bool, str | None]:
    """As `bind_qkv`, with float8 arrays as they are, beside their scales."""
    out_dtype = resolve((q, k, v), scales, out_dtype)
    if out_dtype is None:
        arrays, sizes, batched = common.bind_qkv(q, k, v, layout)
        return (arrays, []), sizes, batched, None
    arrays = [shapes.as_array(*named) for named in zip("qkv", (q, k, v), strict=True)]
    bound, sizes, batched = common.bind_axes(arrays, layout)
    return (bound, bind_scales(scales, sizes, batched)), sizes, batched, out_dtype


def resolve(arrays: tuple[Any, ...], scales: Any, out_dtype: Any) -> str | None:
    """The output's dtype of a call on float8 arrays q, k, v; None where they are wide.

    A ValueError for a mixture, for float8 arrays without scales, and for wide ones with any.
    """
    found = [shapes.dtype_name(*named) for named in zip("qkv", arrays, strict=True)]
    for name, array, dtype in zip("qkv", arrays, found, strict=True):
        if dtype.startswith("torch."):
            shapes.floating(name, array)  # says where tensors go, whatever their dtype is
    if FLOAT8 not in found:
        for name, value in (("scales", scales), ("out_dtype", out_dtype)):
            if value is not None:
                raise ValueError(
                    f"{name} goes with q, k and v of {FLOAT8}, which ato_jax.quantize makes, "
                    f"got q of {found[0]}"
                )
        return None
    if any(dtype != FLOAT8 for dtype in found):
        raise ValueError(
            f"q, k and v must all be {FLOAT8} or none of them, got {', '.join(found)}: quantise "
            "all by ato_jax.quantize, or widen those that are not"
        )
    if scales is None:
        raise ValueError(
            f"scales must be given with q, k and v of {FLOAT8}: (q_scale, k_scale, v_scale), as "
            "ato_jax.quantize returns them"
        )
    return "bfloat16" if out_dtype is None else shapes.float_dtype("out_dtype", out_dtype)


def bind_scales(scales: Any, sizes: dict[str, int], batched: bool) -> list[jax.Array]:
    """The caller's scales, [B, H], [B, G] and [B, G].

    Args:
      scales: the caller's.
      sizes: the size of each letter.
      batched: whether the caller's arrays have a batch axis.
    """
    if not isinstance(scales, tuple | list) or len(scales) != 3:
        raise ValueError(
            "scales must be (q_scale [B, H], k_scale [B, G], v_scale [B, G]), "
            f"got {shapes_of(scales)}"
        )
    bound = []
    for name, scale, letters in zip("qkv", scales, ("BH", "BG", "BG"), strict=True):
        name = f"scales: {name}_scale"
        found = quantizing.check_scale(name, scale)
        shapes.bind(sizes, name, found.shape, letters if batched else letters[1:])
        bound.append(common.with_batch(found, 2))
    return bound


def widened(
    arrays: list[jax.Array], scales: list[jax.Array], heads: int, out_dtype: str
) -> list[jax.Array]:
    """[q, k, v] times their scales, as `bind` gives both, in the dtype of the kernels that run.
    `heads` is the axis of heads."""
    wide = wide_dtype(out_dtype)

    def partition() -> list[Any]:
        return [meshes.sharded(*meshes.partition(array)) for array in arrays]

    return meshes.call(lambda pair: _products(wide, heads, *pair), (arrays, scales), partition)


def wide_dtype(out_dtype: Any) -> str:
    """What arrays are widened to for an output in that dtype; None is the default."""
    return "float32" if out_dtype is not None and jnp.dtype(out_dtype) == "float32" else "bfloat16"


def shapes_of(scales: Any) -> str:
    """Describes what was given in place of three scales, without an array's values."""
    if isinstance(scales, tuple | list):
        return f"{len(scales)} of them"
    if isinstance(scales, Mapping):
        return f"a {type(scales).__name__} of {', '.join(map(repr, scales))}"
    return f"an array of shape {scales.shape}" if hasattr(scales, "shape") else repr(scales)


@programs.jit(static=2)
def _products(
    dtype: str, heads: int, arrays: list[jax.Array], scales: list[jax.Array]
) -> list[jax.Array]:
    """Each array times its scale [B, heads], rounded to the dtype."""
    found = []
    for array, scale in zip(arrays, scales, strict=True):
        shape = [1] * array.ndim
        shape[0], shape[heads] = scale.shape
        found.append((array.astype(jnp.float32) * scale.reshape(shape)).astype(dtype))
    return found


def resolved(
    request: RequestT,
    narrow: choosing.Op[Any, Any, Any],
    read: Any,
    scales: list[jax.Array],
    spec: Any,
) -> RequestT:
    """The request of a call on float8 arrays: to the backend that reads them, or with the arrays
    widened.

    Args:
      request: of the op of wide arrays; its inputs hold those of 8 bits as they are.
      narrow: the op whose one backend reads 8 bits.
      read: the inputs as that backend takes them.
      scales: as `bind` gives them.
      spec: that of `read`.
    """
    request.op.check_name(request.implementation)
    if not checking.checking() and is_read(request, narrow, read):
        (backend,) = narrow.backends
        inputs = forward_alone(read)
        return request._replace(spec=spec, inputs=inputs, implementation=backend, op=narrow)
    heads = common.axes(request.spec.layout, "BTHD").index("H")
    q, k, v = widened(list(request.inputs[:3]), scales, heads, request.out_dtype)
    return request._replace(inputs=forward_alone(request.inputs._replace(q=q, k=k, v=v)))


def is_read(request: Any, narrow: choosing.Op[Any, Any, Any], read: Any) -> bool:
    """Whether the backend of `narrow` reads the 8 bits of a call. It has to support the call, and
    the call has to name its family or none.

    For a call that names none, reading also has to pay by the backend's own rule,
    `beats_later_backends`. And the same call on wide arrays has to choose that family, too, or to
    be one that the family does not support.
    """
    (backend,) = narrow.backends
    spec, family = request.spec, choosing.family(backend)
    if request.implementation not in (None, family) or spec.B == 0:
        return False
    here, interpreted = device.of_call(read), device.interpreting()
    call = choosing.Call(narrow, spec, backend, here, interpreted)
    if choosing.reason_against(call, backend, "forward") is not None:
        return False
    if request.implementation is not None:
        return True
    if here.platform != "gpu" or interpreted:
        return False
    if not narrow.backend(backend).beats_later_backends(spec, here, False):
        return False
    on_wide = choosing.Call(request.op, spec, None, here, interpreted)
    if choosing.reason_against(on_wide, family, "forward") is not None:
        return True
    return choosing.choose(on_wide, "forward").backend == family


@jax.custom_jvp
def _forward_alone(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


@_forward_alone.defjvp
def _forward_alone_jvp(primals: Any, tangents: Any) -> Any:
    raise choosing.UnsupportedError(f"{NO_DERIVATIVE}: {WAY_OUT}")


def forward_alone(inputs: Any) -> Any:
    """The arrays of a call on float8 arrays, whose derivative by any of them is an error."""
    leaves, tree = jax.tree.flatten(inputs)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    for i, leaf in zip(floats, _forward_alone([leaves[i] for i in floats]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


def explained(found: dispatch.Explanation, out_dtype: Any) -> dispatch.Explanation:
    """Explains a call on float8 arrays by `found`, which explains its call on the widened ones, or
    on the arrays as they are, where a backend reads them."""
    reader = next((name for name in found.reasons if name.endswith(".float8")), None)
    if reader is None:
        wide = wide_dtype(out_dtype)
        note = f"{FLOAT8} inputs are widened to {wide} first; no kernel reads 8 bits of this call"
    else:
        note = f"{FLOAT8} inputs are read as 8 bits"
    reasons = {
        name: {**phases, "backward": NO_DERIVATIVE} for name, phases in found.reasons.items()
    }
    return dataclasses.replace(found, recorded=None, backward=None, reasons=reasons, note=note)
