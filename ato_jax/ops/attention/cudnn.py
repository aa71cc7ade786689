"""cuDNN's flash attention, through `jax.nn.dot_product_attention`.

Only requests for which cuDNN gives what the reference defines are supported: 16-bit inputs, all
keys, causality with query 0 at position 0 (top left), and windows to the left of that. Options that
could hide every key from a query are refused, since cuDNN does not return 0 there. Lengths are
refused, since a NaN in the padding would reach the output.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ato_jax import autodiff, device
from ato_jax.backend import Backend
from ato_jax.device import AMPERE
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs, Residuals

# JAX's conditions on the head size.
HEAD_MULTIPLE = 8
WIDEST_HEAD = 256
WIDEST_HEAD_BEFORE_HOPPER = 128
HOPPER = (9, 0)


@dataclasses.dataclass(frozen=True)
class Config:
    """No block sizes: cuDNN chooses them."""


def unsupported_device(device: device.Device, interpreted: bool) -> str | None:
    """JAX calls cuDNN's flash attention from Ampere on."""
    if device.capability is None or device.capability < AMPERE:
        found = f", and this one, {device.name}, has {device.architecture or 'none that is known'}"
        return f"needs an NVIDIA GPU of compute capability 8.0 or more{found}"
    return _missing()


@functools.cache
def _missing() -> str | None:
    """The reason why JAX cannot call cuDNN, such as a missing one or one too old for the card.

    None where it can, or where this process has no GPU.
    """
    if jax.default_backend() != "gpu":
        return None
    smallest = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attend, smallest, smallest, smallest)
    except (RuntimeError, ValueError) as error:
        return f"jax.nn.dot_product_attention refuses cuDNN on this machine: {error}"
    return None


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    if spec.dtype not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16 alone, got {spec.dtype}"
    if spec.layout != "bthd":
        return "takes layout 'bthd' alone: jax.nn.dot_product_attention would have to copy"
    if spec.D != spec.V:
        return f"needs D = V, got D={spec.D}, V={spec.V}"
    capability = device.of_call(()).capability
    widest = WIDEST_HEAD_BEFORE_HOPPER if capability and capability < HOPPER else WIDEST_HEAD
    if spec.D % HEAD_MULTIPLE or spec.D > widest:
        return f"needs D to be a multiple of {HEAD_MULTIPLE} up to {widest}, got D={spec.D}"
    if spec.T % 2 or spec.S % 2:
        return f"needs T and S to be even, got T={spec.T}, S={spec.S}"
    features = {
        "return_lse (jax rounds it to 16 bits and drops its gradient)": spec.return_lse,
        "bias": spec.bias is not None,
        "mask": spec.mask is not None,
        "segments": spec.segments,
        "lengths": spec.q_lengths or spec.kv_lengths,
        "softcap": spec.softcap is not None,
        "sinks": spec.sinks,
        "dropout keyed by position": spec.dropout_rate > 0,
    }
    missing = [name for name, asked in features.items() if asked]
    if missing:
        return f"does not support {', '.join(missing)}"
    if spec.left is None and spec.right is None:
        return None
    if spec.right != 0:
        return "takes a window only together with causal=True"
    if spec.offset != 0:
        return (
            "aligns causal attention and windows top left, so that it needs query 0 at position 0 "
            f"(T = S or query_offset=0), got T={spec.T}, S={spec.S}, position {spec.offset}"
        )
    if spec.left is not None and spec.T - spec.left > spec.S:
        return "does not support queries that see nothing: the last ones' windows hold no key"
    return None


def default_config(spec: AttentionSpec, device: device.Device) -> Config:
    return Config()


def forward(spec: AttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    if spec.keep_rest:
        # The backward pass makes the same call; compiled together, XLA runs it once.
        out, _ = jax.vjp(functools.partial(_attention, spec), inputs)
    else:
        out = _attention(spec, inputs)
    # cuDNN's lse is not available. NaN makes a backward pass that reads it fail visibly.
    return Outputs(out, jnp.full((spec.B, spec.T, spec.H), jnp.nan, jnp.float32))


def backward(
    spec: AttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    """JAX's derivative of its function, which runs cuDNN's forward pass once more."""
    return autodiff.gradient(
        functools.partial(_attention, spec), residuals.inputs, cotangents.out
    )


def _attention(spec: AttentionSpec, inputs: Inputs) -> jax.Array:
    return jax.nn.dot_product_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        scale=spec.scale,
        is_causal=spec.right == 0,
        local_window_size=None if spec.left is None else (spec.left, 0),
        implementation="cudnn",
    )


class _Cudnn(Backend[AttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)
    unsupported_device = staticmethod(unsupported_device)


BACKEND = _Cudnn()
