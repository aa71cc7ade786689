"""The delta rule, the public function: arguments checked and bound, then dispatched.

    S_t   = (I - beta_t k_t k_t^T) Diag(exp(decay_t)) S_{t-1} + beta_t k_t v_t^T
    out_t = scale * q_t S_t
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ato_jax import choosing, dispatch, shapes
from ato_jax.ops.common import (
    LAYOUTS,
    Integers,
    Precision,
    axes,
    bind_segments,
    check_heads,
    check_lengths,
    is_batched,
    number_runs,
    pad_to_one,
    precision_of,
    refuse_positive,
    with_batch,
)
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs

OP: choosing.Op[DeltaRuleSpec, Inputs, Outputs] = choosing.Op(
    "gated_delta_rule",
    ("mosaic_gpu", "xla", "reference"),
    package="ato_jax.ops.delta_rule",
    planned=("triton", "cudnn"),
    on_demand=(("return_state", "state"),),
)


class Request(NamedTuple):
    """A call with its arguments checked: what `dispatch` needs, and the shape of the answer."""

    spec: DeltaRuleSpec
    inputs: Inputs
    implementation: str | None
    batched: bool
    T: int


def prepare(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    *,
    decay: Any = None,
    scale: Any = None,
    normalize_qk: bool = False,
    segment_ids: Any = None,
    lengths: Any = None,
    initial_state: Any = None,
    return_state: bool = False,
    layout: str = "bthd",
    precision: Any = None,
    implementation: str | None = None,
) -> Request:
    """Checks and binds every argument of `gated_delta_rule`; its ValueErrors come from here."""
    shapes.one_of("layout", layout, LAYOUTS)
    (q, k, v), beta = floating_arrays(q, k, v, beta)
    dtype = str(q.dtype)
    batched = is_batched(q, axes(layout, "BTGD"))
    sizes: dict[str, int] = {}
    first = 0 if batched else 1
    arrays = (("q", q, "BTGD"), ("k", k, "BTGD"), ("v", v, "BTHV"), ("beta", beta, "BTH"))
    for name, array, letters in arrays:
        shapes.bind(sizes, name, array.shape, axes(layout, letters)[first:])
    sizes.setdefault("B", 1)
    check_heads(sizes, layout, many=("v", "BTHV"), few="q")
    q, k, v, beta = (with_batch(array, len(letters)) for _, array, letters in arrays)
    decay, kind = bind_decay(decay, sizes, layout, "BTH", batched, lengths is not None)
    normalize_qk = shapes.flag("normalize_qk", normalize_qk)
    return_state = shapes.flag("return_state", return_state)
    runs, _ = bind_segments(segment_ids, None, None, sizes | {"S": sizes["T"]}, batched)
    if lengths is not None:
        given, lengths = lengths, shapes.lengths("lengths", lengths, sizes, "T", batched)
        check_lengths("lengths", given, "T", sizes["T"])
    if initial_state is not None:
        initial_state = bind_state("initial_state", initial_state, sizes, batched)

    T = sizes["T"]
    if T == 0:
        # One padded step, so that backends never meet an empty array.
        lengths = jnp.zeros(sizes["B"], jnp.int32)
        time = layout.index("t")
        q, k, v, beta = (pad_to_one(array, time) for array in (q, k, v, beta))
        decay = None if decay is None else pad_to_one(decay, time)
        runs = None if runs is None else pad_to_one(runs, 1)
        sizes["T"] = 1
    if runs is not None:
        runs = number_runs(runs)
        if lengths is not None:
            # Padding goes with the last run, which is the one whose state is returned.
            last = jnp.maximum(lengths - 1, 0)[:, None]
            runs = jnp.minimum(runs, jnp.take_along_axis(runs, last, 1))
    spec = DeltaRuleSpec(
        **sizes,
        dtype=dtype,
        scale=sizes["D"] ** -0.5 if scale is None else shapes.scale(scale),
        normalize_qk=normalize_qk,
        layout=layout,
        decay=kind,
        segments=runs is not None,
        lengths=lengths is not None,
        initial_state=initial_state is not None,
        return_state=return_state,
        precision=precision_of(precision, dtype),
    )
    inputs = Inputs(q, k, v, beta, decay, initial_state, runs, lengths)
    return Request(spec, inputs, implementation, batched, T)


def floating_arrays(q: Any, k: Any, v: Any, beta: Any) -> tuple[list[jax.Array], jax.Array]:
    """[q, k, v] of one dtype, and beta in float32."""
    q = shapes.floating("q", q)
    k, v = (shapes.floating(name, array, str(q.dtype)) for name, array in (("k", k), ("v", v)))
    return [q, k, v], shapes.floating("beta", beta).astype(jnp.float32)


def bind_decay(
    decay: Any,
    sizes: dict[str, int],
    layout: str,
    letters: str,
    batched: bool,
    padded: bool = False,
) -> tuple[jax.Array | None, str | None]:
    """decay in float32 with a batch axis, and its kind.

    `letters` are those of one per step. Where steps are `padded`, NaN may be in the padding.
    """
    if decay is None:
        return None, None
    decay = shapes.floating("decay", decay)
    kinds = {axes(layout, letters): "step", axes(layout, letters + "D"): "channel"}
    for form, kind in kinds.items():
        if decay.ndim == len(form) - (not batched):
            shapes.bind(sizes, "decay", decay.shape, form if batched else form[1:])
            refuse_positive(decay, padded)
            return with_batch(decay, len(form)).astype(jnp.float32), kind
    wanted = " or ".join(f"[{', '.join(form)}]" for form in kinds)
    raise ValueError(
        f"decay must be {wanted} (no B where q has none), got shape {tuple(decay.shape)}"
    )


def bind_state(name: str, state: Any, sizes: dict[str, int], batched: bool) -> jax.Array:
    """A state as float32 [B, H, D, V]."""
    state = shapes.floating(name, state)
    shapes.bind(sizes, name, state.shape, "BHDV" if batched else "HDV")
    return with_batch(state, 4).astype(jnp.float32)


@overload
def gated_delta_rule(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, beta: ArrayLike, *, decay: ArrayLike | None = ...,
    scale: float | None = ..., normalize_qk: bool = ..., segment_ids: Integers | None = ...,
    lengths: Integers | None = ..., initial_state: ArrayLike | None = ...,
    return_state: Literal[False] = ..., layout: str = ..., precision: Precision = ...,
    implementation: str | None = ...,
) -> jax.Array: ...  # fmt: skip


@overload
def gated_delta_rule(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, beta: ArrayLike, *, decay: ArrayLike | None = ...,
    scale: float | None = ..., normalize_qk: bool = ..., segment_ids: Integers | None = ...,
    lengths: Integers | None = ..., initial_state: ArrayLike | None = ...,
    return_state: Literal[True], layout: str = ..., precision: Precision = ...,
    implementation: str | None = ...,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    beta: ArrayLike,
    *,
    decay: ArrayLike | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    segment_ids: Integers | None = None,
    lengths: Integers | None = None,
    initial_state: ArrayLike | None = None,
    return_state: bool = False,
    layout: str = "bthd",
    precision: Precision = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes the delta rule: DeltaNet, gated DeltaNet or Kimi Delta Attention.

    A state S [D, V] is a memory that is read by multiplying it with a key. Each step lets it decay,
    moves what it returns for k_t by the fraction beta_t towards v_t, and reads it with q_t:

        S_t   = (I - beta_t k_t k_t^T) Diag(exp(decay_t)) S_{t-1} + beta_t k_t v_t^T
        out_t = scale * q_t S_t

    Time and memory are linear in T. The recurrence is stable where beta_t times the squared length
    of k_t lies between 0 and 2; `normalize_qk` makes that length 1.

    Args:
      q: Queries [B, T, G, D], float16, bfloat16 or float32. B may be missing, and then it is
        missing from every other argument and from the results.
      k: Keys [B, T, G, D] in q's dtype.
      v: Values [B, T, H, V] in q's dtype. H is a multiple of G: value head h is written and read
        with key and query head h // (H // G).
      beta: How far each step moves the memory, [B, T, H], taken as float32.
      decay: Natural logarithm of the factor of each step, <= 0, taken as float32: [B, T, H] (gated
        DeltaNet) or [B, T, H, D] (Kimi Delta Attention). None for no decay (DeltaNet).
      scale: Factor of the result; D ** -0.5 unless given.
      normalize_qk: Divide q and k by their lengths, row by row, in float32. A row of zeros stays
        one.
      segment_ids: Integers [B, T]. A segment is one contiguous run: the state starts from 0 at
        each new one, and an id that returns starts a new one.
      lengths: Integers [B]: steps from there on are padding. They give 0, leave the state as it is,
        and whatever they hold reaches nothing.
      initial_state: S before the first step, [B, H, D, V], taken as float32; the first segment
        continues from it. None for zeros.
      return_state: Return (out, state) in place of out.
      layout: "bthd", or "bhtd" for all arrays with a T: q, k [B, G, T, D], v [B, H, T, V], beta
        [B, H, T], decay [B, H, T] or [B, H, T, D].
      precision: How float32 inputs are multiplied. None is exact; "tf32" or "default" may round
        the factors to TF32. Other dtypes ignore it.
      implementation: None for the fastest backend that supports the call on this device, or one of
        "mosaic_gpu", "xla" and "reference". "mosaic_gpu", kernels for Hopper, takes bfloat16 with D
        of at most 128. Lengths, and columns that are no multiple of 64, cost it copies of q, k and
        v.

    Returns:
      out [B, T, H, V] in v's dtype; with `return_state` the pair (out, state). The state is S after
      the last step that is not padding, float32 [B, H, D, V], without `scale`. Gradients pass
      through a state, into a call and out of it.

    Raises:
      ValueError: An argument is wrong for every backend: its shape, dtype or value. The message
        names it, what it was and what it has to be. The numbers in a jax array of lengths
        are not read, and `ato_jax.checked` reports them.
      UnsupportedError: The backend named by `implementation` does not support this call on this
        device; the message says why.

    Example:
      >>> import ato_jax, jax, jax.numpy as jnp
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))  # [B, T, H, D] each
      >>> beta = jnp.full((2, 16, 4), 0.5)
      >>> decay = jnp.full((2, 16, 4), -0.1)
      >>> out, state = ato_jax.gated_delta_rule(
      ...     q, k, v, beta, decay=decay, normalize_qk=True, return_state=True
      ... )
      >>> out.shape, state.shape
      ((2, 16, 4, 8), (2, 4, 8, 8))
    """
    request = prepare(
        q,
        k,
        v,
        beta,
        decay=decay,
        scale=scale,
        normalize_qk=normalize_qk,
        segment_ids=segment_ids,
        lengths=lengths,
        initial_state=initial_state,
        return_state=return_state,
        layout=layout,
        precision=precision,
        implementation=implementation,
    )
    spec = request.spec
    out, state = dispatch.run(OP, spec, request.inputs, request.implementation)
    if request.T < spec.T:
        out = jax.lax.slice_in_dim(out, 0, request.T, axis=layout.index("t"))
    if not request.batched:
        out, state = out[0], state[0]
    return (out, state) if return_state else out
