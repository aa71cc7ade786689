"""The delta rule, one token at a time.

    S'  = (I - beta k k^T) Diag(exp(decay)) S + beta k v^T
    out = scale * q S'

A loop of steps equals `gated_delta_rule`. Key and query both read the old state, in one product,
and the query is given what the step writes:

    written = beta (v - k Diag(exp(decay)) S)
    S'      = Diag(exp(decay)) S + k written^T
    out     = scale * (q Diag(exp(decay)) S + (q . k) written)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ato_jax import programs, shapes
from ato_jax.ops.common import check_heads, with_batch
from ato_jax.ops.delta_rule.api import bind_decay, bind_state, floating_arrays
from ato_jax.ops.delta_rule.spec import LEAST_DECAY, unit

EXACT = jax.lax.Precision.HIGHEST


class _StepInputs(NamedTuple):
    """The arrays of one step, bound and batched."""

    q: jax.Array  # [B, G, D]
    k: jax.Array  # [B, G, D]
    v: jax.Array  # [B, H, V]
    beta: jax.Array  # [B, H] float32
    decay: jax.Array | None  # [B, H, D or 1] float32
    state: jax.Array  # [B, H, D, V] float32


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

    A loop of steps equals `gated_delta_rule` on the whole sequence. Where the caller's `jit`
    donates the state, the new one takes its memory.

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
    scale = sizes["D"] ** -0.5 if scale is None else shapes.static_number("scale", scale)
    normalize_qk = shapes.flag("normalize_qk", normalize_qk)
    out, state = _step(scale, normalize_qk, _StepInputs(q, k, v, beta, decay, state))
    return (out, state) if batched else (out[0], state[0])


@programs.jit(static=2)
def _step(scale: float, normalize_qk: bool, inputs: Any) -> tuple[jax.Array, jax.Array]:
    q, k, v, beta, decay, state = inputs
    B, H, V = v.shape
    G, D = q.shape[1:]
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if normalize_qk:
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
    out = scale * (read + jnp.sum(q * k, axis=-1)[:, :, None, None] * written)
    return out.reshape(B, H, V).astype(inputs.v.dtype), state.reshape(B, H, D, V)
