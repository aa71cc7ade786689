"""The delta rule, one token at a time.

    S'  = (I - beta k k^T) Diag(exp(decay)) S + beta k v^T
    out = scale * q S'

A loop of steps equals `gated_delta_rule`. Key and query both read the old state, in one product,
and the query is given what the step writes:

    written = beta (v - k Diag(exp(decay)) S)
    S'      = Diag(exp(decay)) S + k written^T
    out     = scale * (q Diag(exp(decay)) S + (q . k) written)

On an NVIDIA GPU that is one kernel, `triton/decode.py`; elsewhere, and for every derivative, plain
JAX.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ato_jax import device, division, meshes, partitioning, programs, shapes
from ato_jax.choosing import PHASES, Choice
from ato_jax.device import Device
from ato_jax.dispatch import Explanation
from ato_jax.ops.common import check_heads, with_batch
from ato_jax.ops.delta_rule.api import OP, bind_decay, bind_state, floating_arrays
from ato_jax.ops.delta_rule.spec import LEAST_DECAY, unit
from ato_jax.ops.delta_rule.step_spec import OUTPUT_LETTERS, StepInputs, StepSpec

EXACT = jax.lax.Precision.HIGHEST
KERNEL = "triton.decode"


_keeping = contextvars.ContextVar("ato_jax_keeping_states", default=False)


@contextlib.contextmanager
def keeping_states() -> Iterator[None]:
    """Inside it steps write apart from the state that they read: for callers that donate none."""
    token = _keeping.set(True)
    try:
        yield
    finally:
        _keeping.reset(token)


class Request(NamedTuple):
    """A step with its arguments checked."""

    spec: StepSpec
    inputs: StepInputs
    batched: bool


def prepare(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    state: Any,
    *,
    decay: Any = None,
    scale: Any = None,
    normalize_qk: Any = False,
) -> Request:
    """Checks and binds every argument of a step; its ValueErrors come from here."""
    (q, k, v), beta = floating_arrays(q, k, v, beta)
    if q.ndim not in (2, 3):
        raise ValueError(f"q must be [B, G, D] or [G, D], got shape {q.shape}")
    batched = q.ndim == 3
    sizes: dict[str, int] = {}
    first = 0 if batched else 1
    arrays = (("q", q, "BGD"), ("k", k, "BGD"), ("v", v, "BHV"), ("beta", beta, "BH"))
    for name, array, letters in arrays:
        shapes.bind(sizes, name, array.shape, letters[first:])
    sizes.setdefault("B", 1)
    check_heads(sizes, many=("v", "BHV"), few="q")
    q, k, v, beta = (with_batch(array, len(letters)) for _, array, letters in arrays)
    decay, kind = bind_decay(decay, sizes, "bthd", "BH", batched)
    if kind == "step" and decay is not None:
        decay = decay[..., None]
    state = bind_state("state", state, sizes, batched)
    scale = sizes["D"] ** -0.5 if scale is None else shapes.scale(scale)
    normalize_qk = shapes.flag("normalize_qk", normalize_qk)
    inputs = StepInputs(q, k, v, beta, decay, state)
    return Request(StepSpec(scale, normalize_qk, not _keeping.get()), inputs, batched)


def gated_delta_rule_step(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    beta: ArrayLike,
    state: ArrayLike,
    *,
    decay: ArrayLike | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes one token of the delta rule from a state of constant size.

        S'  = (I - beta k k^T) Diag(exp(decay)) S + beta k v^T
        out = scale * q S'

    A loop of steps equals `gated_delta_rule` on the whole sequence. On an NVIDIA GPU a step is one
    kernel, for D up to 512. Where the caller's `jit` donates the state, it is updated in place.

    Args:
      q: Query [B, G, D], float16, bfloat16 or float32. B may be missing, and then it is missing
        from every other argument and from the results.
      k: Key [B, G, D] in q's dtype.
      v: Value [B, H, V] in q's dtype. H is a multiple of G: value head h is written and read with
        key and query head h // (H // G).
      beta: How far the step moves the memory, [B, H], taken as float32.
      state: S [B, H, D, V], float32: what `gated_delta_rule` with `return_state`, or the step
        before, returned; zeros for an empty sequence.
      decay: Natural logarithm of this step's factor, <= 0: [B, H] or [B, H, D]. None for no decay.
      scale: Factor of the result; D ** -0.5 unless given.
      normalize_qk: Divide q and k by their lengths, as in `gated_delta_rule`.

    Returns:
      (out, state): out [B, H, V] in v's dtype, and the new state.

    Raises:
      ValueError: An argument is wrong: its shape, dtype or value. The message names it, what it was
        and what it has to be.

    Example:
      >>> import ato_jax, jax.numpy as jnp
      >>> state = jnp.zeros((2, 4, 8, 8))
      >>> q = k = v = jnp.ones((2, 4, 8))  # [B, H, D]
      >>> beta = jnp.full((2, 4), 0.5)
      >>> out, state = ato_jax.gated_delta_rule_step(q, k, v, beta, state, normalize_qk=True)
      >>> out.shape
      (2, 4, 8)
    """
    spec, inputs, batched = prepare(
        q, k, v, beta, state, decay=decay, scale=scale, normalize_qk=normalize_qk
    )
    cut = partitioning.cut_of(inputs, inputs.letters)
    run = functools.partial(_step, spec, device.of_call(inputs), device.interpreting(), cut)
    out, new_state = meshes.call(run, inputs, inputs.partition_of_outputs)
    return (out, new_state) if batched else (out[0], new_state[0])


def explain(*args: Any, **options: Any) -> Explanation:
    """What `gated_delta_rule_step` with these arguments would run."""
    spec, inputs, _ = prepare(*args, **options)
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
    return Explanation("gated_delta_rule_step", spec, here, forward, forward, plain, reasons)


def _plain(spec: StepSpec, inputs: StepInputs) -> tuple[jax.Array, jax.Array]:
    q, k, v, beta, decay, state = inputs
    B, H, V = v.shape
    G, D = q.shape[1:]
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if spec.normalize_qk:
        q, k = unit(q), unit(k)
    # Decays k and q for the product instead of the state.
    ones = jnp.ones((B, H, 1), jnp.float32)
    factor = ones if decay is None else jnp.exp(jnp.maximum(decay, LEAST_DECAY))
    groups = (B, G, H // G)  # no size is left to be found, which fails where B is 0
    factor = factor.reshape(*groups, factor.shape[-1])
    state = state.reshape(*groups, D, V)
    v, beta = v.astype(jnp.float32).reshape(*groups, V), beta.reshape(*groups, 1)
    both = jnp.stack([q, k], axis=2)[:, :, None] * factor[..., None, :]  # [B, G, R, 2, D]
    read, recalled = jnp.moveaxis(
        jnp.einsum("bgrmd,bgrdv->bgrmv", both, state, precision=EXACT), 3, 0
    )
    written = beta * (v - recalled)
    state = factor[..., None] * state + k[:, :, None, :, None] * written[..., None, :]
    out = spec.scale * (read + jnp.sum(q * k, axis=-1)[:, :, None, None] * written)
    return out.reshape(B, H, V).astype(inputs.v.dtype), state.reshape(B, H, D, V)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _kernel(
    spec: StepSpec,
    here: Device,
    interpret: bool,
    cut: partitioning.Cut | None,
    inputs: StepInputs,
) -> tuple[jax.Array, jax.Array]:
    def step(_: partitioning.Cut | None, inputs: StepInputs) -> Any:
        with device.interpret(interpret):
            return OP.module(KERNEL).step(spec, here, inputs)

    outputs: tuple[jax.Array, jax.Array] = division.alone(
        step, inputs, inputs.letters(), OUTPUT_LETTERS, cut
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
) -> tuple[jax.Array, jax.Array]:
    # Not on a CPU at all, where naming the kernel would import Pallas's Triton.
    if here.platform == "gpu":
        from ato_jax import launch  # here, so that `import ato_jax` does not import Pallas

        kernel = OP.module(KERNEL)
        if kernel.unsupported(inputs, here) is None:
            return _kernel(spec, here, interpret, cut, inputs)
        if kernel.out_of_range(inputs, here) is None:
            launch.warn_of_no_triton()
    return _plain(spec, inputs)
