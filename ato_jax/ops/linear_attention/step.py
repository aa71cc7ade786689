"""Linear attention, one token at a time: the state takes the key in, and the query reads it.

    kv'    = exp(decay) kv + phi(k) v^T
    k_sum' = exp(decay) k_sum + phi(k)
    out    = phi(q) . kv' / max(phi(q) . k_sum', eps)     normalize=True
    out    = scale * phi(q) . kv'                         normalize=False

A loop of steps equals `linear_attention(causal=True)`. The new state is read, not the old one, so
that where the caller's `jit` donates the state, the update happens in place. On an NVIDIA GPU that
is one kernel, `triton/decode.py`; elsewhere, and for every derivative, plain JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ato_jax import (
    autodiff,
    checking,
    device,
    division,
    meshes,
    partitioning,
    programs,
    shapes,
)
from ato_jax.choosing import PHASES, Choice
from ato_jax.device import Device
from ato_jax.dispatch import Explanation
from ato_jax.ops import float8
from ato_jax.ops.common import check_heads, refuse_positive, with_batch
from ato_jax.ops.float8 import Scales
from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.api import (
    OP,
    FeatureMapLike,
    bind_state,
    check_sums,
    resolve_output,
    to_sums,
    with_sums,
)
from ato_jax.ops.linear_attention.spec import STATE_LETTERS, LinearState, StepInputs, StepSpec

EXACT = jax.lax.Precision.HIGHEST
KERNEL = "triton.decode"


class Request(NamedTuple):
    """A step with its arguments checked."""

    spec: StepSpec
    inputs: StepInputs
    batched: bool
    out_dtype: str | None = None  # of a step on float8 arrays


def prepare(
    q: Any,
    k: Any,
    v: Any,
    state: Any,
    *,
    feature_map: FeatureMapLike = "elu1",
    decay: Any = None,
    normalize: Any = None,
    scale: Any = None,
    eps: Any = 1e-6,
    scales: Any = None,
    out_dtype: Any = None,
) -> Request:
    """Checks and binds every argument of a step; its ValueErrors come from here."""
    out_dtype = float8.resolve((q, k, v), scales, out_dtype)
    if out_dtype is None:
        q = shapes.floating("q", q)
        k, v = (shapes.floating(name, array, str(q.dtype)) for name, array in (("k", k), ("v", v)))
    else:
        q, k, v = (shapes.as_array(*named) for named in zip("qkv", (q, k, v), strict=True))
    if q.ndim not in (2, 3):
        raise ValueError(f"q must be [B, H, D] or [H, D], got shape {q.shape}")
    batched = q.ndim == 3
    sizes: dict[str, int] = {}
    for name, array, letters in (("q", q, "BHD"), ("k", k, "BGD"), ("v", v, "BGV")):
        shapes.bind(sizes, name, array.shape, letters if batched else letters[1:])
    sizes.setdefault("B", 1)
    check_heads(sizes)
    q, k, v = (with_batch(array, 3) for array in (q, k, v))
    if out_dtype is not None:
        own_scales = float8.bind_scales(scales, sizes, batched)
        q, k, v = float8.widened([q, k, v], own_scales, 1, out_dtype)
    phi, parameters, sizes["F"] = features.resolve(feature_map, sizes["D"])
    normalize, scale, eps = resolve_output(phi, normalize, scale, eps, sizes["D"])
    state = bind_state("state", state, sizes, batched)
    decay = _bind_decay(decay, sizes, batched)
    inputs = StepInputs(q, k, v, state, decay, parameters)
    if out_dtype is not None:
        inputs = float8.forward_alone(inputs)
    spec = StepSpec(phi, normalize, scale, eps)
    return Request(spec, inputs, batched, out_dtype)


def linear_attention_step(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    state: LinearState,
    *,
    feature_map: FeatureMapLike = "elu1",
    decay: ArrayLike | None = None,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    scales: Scales | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, LinearState]:
    """Computes one token of causal linear attention from a state of constant size.

        kv'    = exp(decay) kv + phi(k) v^T
        k_sum' = exp(decay) k_sum + phi(k)
        out    = phi(q) . kv' / max(phi(q) . k_sum', eps)     normalize=True
        out    = scale * phi(q) . kv'                         normalize=False

    A loop of steps equals `linear_attention(causal=True)` on the whole sequence. On an NVIDIA GPU
    a step is one kernel. Where the caller's `jit` donates the state, it is updated in place.

    Args:
      q: Query [B, H, D], float16, bfloat16, float32 or float8_e4m3fn. B may be missing, and then
        it is missing from every other argument and from the results.
      k: Key [B, G, D] in q's dtype. H is a multiple of G.
      v: Value [B, G, V] in q's dtype.
      state: LinearState(kv [B, G, D, V], k_sum [B, G, D]), float32: what `linear_attention` with
        `return_state`, or the step before, returned; zeros for an empty sequence.
      feature_map: phi, as in `linear_attention`.
      decay: Natural logarithm of this step's factor, <= 0: [G], [B, G] or [B, G, D].
      normalize: Divide by the sum of the weights. None means True where phi is known to be
        non-negative.
      scale: Factor of the result for normalize=False; D ** -0.5 unless given.
      eps: The smallest denominator, > 0.
      scales: (q_scale [B, H], k_scale [B, G], v_scale [B, G]) for q, k and v of float8_e4m3fn, as
        in `linear_attention`. The state stays float32.
      out_dtype: Dtype of out where q, k and v are float8_e4m3fn, "bfloat16" unless given.

    Returns:
      (out, state): out [B, H, V] in v's dtype, or `out_dtype`, and the new state.

    Raises:
      ValueError: An argument is wrong: its shape, dtype or value. The message names it, what it was
        and what it has to be.
      UnsupportedError: A derivative is taken of a step on float8 arrays.

    Example:
      >>> import ato_jax, jax.numpy as jnp
      >>> state = ato_jax.LinearState(jnp.zeros((2, 4, 8, 8)), jnp.zeros((2, 4, 8)))
      >>> q = k = v = jnp.ones((2, 4, 8))  # [B, H, D]
      >>> out, state = ato_jax.linear_attention_step(q, k, v, state)
      >>> out.shape
      (2, 4, 8)
    """
    spec, inputs, batched, out_dtype = prepare(
        q,
        k,
        v,
        state,
        feature_map=feature_map,
        decay=decay,
        normalize=normalize,
        scale=scale,
        eps=eps,
        scales=scales,
        out_dtype=out_dtype,
    )
    if checking.checking():
        unscaled = dataclasses.replace(spec, normalize=False, scale=1.0)
        of_sums = to_sums(inputs)
        sums, _ = _plain(unscaled, of_sums._replace(state=with_sums(of_sums.state)))
        check_sums(spec.feature_map, spec.normalize, sums)
    cut = partitioning.cut_of(inputs, inputs.letters)
    run = functools.partial(_step, spec, device.of_call(inputs), device.interpreting(), cut)
    out, state = meshes.call(run, inputs, inputs.partition_of_outputs)
    out = out if out_dtype is None else out.astype(out_dtype)
    return (out, state) if batched else (out[0], jax.tree.map(lambda array: array[0], state))


def explain(*args: Any, **options: Any) -> Explanation:
    """What `linear_attention_step` with these arguments would run."""
    spec, inputs, *_ = prepare(*args, **options)
    here = device.of_call(inputs)
    reason = OP.module(KERNEL).unsupported(inputs, here)
    reasons: dict[str, dict[str, str | None]] = {
        "triton": {"forward": reason, "backward": "the derivative is xla's"},
        "xla": dict.fromkeys(PHASES),
    }
    plain = Choice("xla", None, "xla")
    forward = plain
    if reason is None:
        forward = Choice("triton", None, KERNEL, why="first in the op's order")
    return Explanation("linear_attention_step", spec, here, forward, forward, plain, reasons)


def _bind_decay(decay: Any, sizes: dict[str, int], batched: bool) -> jax.Array | None:
    """decay as float32 [B or 1, G, F or 1]."""
    if decay is None:
        return None
    decay = shapes.floating("decay", decay)
    letters = {1: "G", 1 + batched: "BG", 2 + batched: "BGF"}.get(decay.ndim)
    if letters is None:
        raise ValueError(
            "decay must be [G], [B, G] or [B, G, D] (no B where q has none), "
            f"got shape {decay.shape}"
        )
    if not batched:
        letters = letters.removeprefix("B")
    shapes.bind(sizes, "decay", decay.shape, letters)
    refuse_positive(decay)
    decay = decay.astype(jnp.float32)
    decay = decay if "B" in letters else decay[None]
    return decay if "F" in letters else decay[..., None]


def _plain(spec: StepSpec, inputs: StepInputs) -> tuple[jax.Array, LinearState]:
    q, k, v, (kv, k_sum), decay, parameters = inputs
    phi = spec.feature_map
    B, H, _ = q.shape
    G, V = v.shape[1:]
    k_features = phi(k.astype(jnp.float32), *parameters)  # [B, G, F]
    q_features = phi(q.astype(jnp.float32), *parameters)
    q_features = q_features.reshape(B, G, H // G, k_features.shape[-1])
    if decay is not None:
        kv, k_sum = kv * jnp.exp(decay)[..., None], k_sum * jnp.exp(decay)
    kv = kv + k_features[..., None] * v.astype(jnp.float32)[:, :, None]  # [B, G, F, V]
    k_sum = k_sum + k_features
    out = jnp.einsum("bgrf,bgfv->bgrv", q_features, kv, precision=EXACT)
    if spec.normalize:
        den = jnp.einsum("bgrf,bgf->bgr", q_features, k_sum, precision=EXACT)
        # Not jnp.maximum, which passes on half of the gradient where both are equal.
        out = autodiff.quotient(out, jnp.where(den > spec.eps, den, spec.eps)[..., None])
    else:
        out = out * spec.scale
    return out.reshape(B, H, V).astype(v.dtype), LinearState(kv, k_sum)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _kernel(
    spec: StepSpec,
    here: Device,
    interpret: bool,
    cut: partitioning.Cut | None,
    inputs: StepInputs,
) -> tuple[jax.Array, LinearState]:
    def step(_: partitioning.Cut | None, inputs: StepInputs) -> Any:
        with device.interpret(interpret):
            return OP.module(KERNEL).step(spec, here, inputs)

    outputs: tuple[jax.Array, LinearState] = division.alone(
        step, inputs, inputs.letters(), ("BHV", STATE_LETTERS), cut
    )
    return outputs


@_kernel.defjvp
@programs.promoting_ranks
def _kernel_jvp(
    spec: StepSpec,
    here: Device,
    interpret: bool,
    cut: partitioning.Cut | None,
    primals: Any,
    tangents: Any,
) -> tuple[Any, Any]:
    """The plain step's derivative: right in forward mode, reverse mode and to any order."""
    _, tangents = jax.jvp(functools.partial(_plain, spec), primals, tangents)
    return _kernel(spec, here, interpret, cut, *primals), tangents


@programs.jit(static=4)
def _step(
    spec: StepSpec,
    here: Device,
    interpret: bool,
    cut: partitioning.Cut | None,
    inputs: StepInputs,
) -> tuple[jax.Array, LinearState]:
    # Not on a CPU at all, where naming the kernel would import Pallas's Triton.
    if here.platform == "gpu":
        from ato_jax import launch  # here, so that `import ato_jax` does not import Pallas

        kernel = OP.module(KERNEL)
        if kernel.unsupported(inputs, here) is None:
            return _kernel(spec, here, interpret, cut, inputs)
        if kernel.out_of_range(inputs, here) is None:
            launch.warn_of_no_triton()
    return _plain(spec, inputs)
