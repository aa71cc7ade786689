"""Which backend and block sizes a call would run, without running it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ato_jax import dispatch, slower
from ato_jax.ops import float8
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.attention import decode
from ato_jax.ops.delta_rule import api as delta_rule_api
from ato_jax.ops.delta_rule import step as delta_rule_step
from ato_jax.ops.linear_attention import api as linear_attention_api
from ato_jax.ops.linear_attention import step


def _by_dispatch(api: Any) -> Callable[..., dispatch.Explanation]:
    """Explains a call of an op that `dispatch` runs."""

    def explain(*args: Any, **options: Any) -> dispatch.Explanation:
        request = api.prepare(*args, **options)
        op = getattr(request, "op", api.OP)
        return dispatch.explain(op, request.spec, request.inputs, request.implementation)

    return explain


def _explain_linear_attention(*args: Any, **options: Any) -> dispatch.Explanation:
    found = slower.told(_by_dispatch(linear_attention_api)(*args, **options))
    if found.backward is None or found.backward.backend != "triton":
        return found
    few_rows: Any = linear_attention_api.OP.module("triton.few_rows")
    spec = found.spec
    is_long = spec.B * spec.H * max(spec.T, spec.S) > few_rows.SOME_ROWS
    if not is_long or few_rows.finer(spec, "backward") is spec:
        return found
    note = (
        f"the backward multiplies {spec.dtype} in TF32, since a decay per head of at most "
        f"{few_rows.FEW_HEADS} key/value heads has few numbers for a gradient: forward and "
        "gradients take up to 2.6 times as long"
    )
    return dataclasses.replace(found, note="; ".join(filter(None, (found.note, note))))


# Each function, and what explains a call of it.
KNOWN: dict[str, tuple[Callable[..., Any], Callable[..., dispatch.Explanation]]] = {
    "attention": (attention_api.attention, _by_dispatch(attention_api)),
    "linear_attention": (
        linear_attention_api.linear_attention,
        _explain_linear_attention,
    ),
    "decode_attention": (decode.decode_attention, decode.explain),
    "linear_attention_step": (step.linear_attention_step, step.explain),
    "gated_delta_rule": (
        delta_rule_api.gated_delta_rule,
        _by_dispatch(delta_rule_api),
    ),
    "gated_delta_rule_step": (delta_rule_step.gated_delta_rule_step, delta_rule_step.explain),
}


def _described(op: object) -> str:
    """What was given in place of an op, and what to do instead where that is known."""
    module = str(getattr(op, "__module__", ""))
    name = getattr(op, "__name__", type(op).__name__)
    if module.startswith("ato_torch"):
        return f"{op!r}; of PyTorch's tensors ato_torch.explain tells how a call is launched"
    if module.startswith("ato_jax.parallel"):
        return f"ato_jax.parallel.{name}: explain ato_jax.{name} with the arrays of one device"
    if module.startswith("ato_jax.nn"):
        return f"ato_jax.nn.{name}: explain the function that the layer calls, with its q, k and v"
    if hasattr(op, "shape"):
        return f"an array of shape {op.shape}: the function comes first"
    return repr(op)


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> dispatch.Explanation:
    """Tells, without running it, which backend and block sizes a call would use, and why.

    Args:
      op: `ato_jax.attention`, `ato_jax.linear_attention`, `ato_jax.gated_delta_rule`,
        `ato_jax.decode_attention`, `ato_jax.linear_attention_step` or
        `ato_jax.gated_delta_rule_step`, or the name of one of them.
      *args: The call's own arguments: arrays or `jax.ShapeDtypeStruct`s.
      **kwargs: The call's own options.

    Returns:
      An `Explanation`: print it, or read its fields.

    Raises:
      ValueError: `op` is none of these, or the call itself would raise it.
      TypeError: An argument of the call is missing or unknown.

    Example:
      >>> import ato_jax, jax, jax.numpy as jnp
      >>> q = k = v = jax.ShapeDtypeStruct((2, 4096, 8, 64), jnp.bfloat16)
      >>> explanation = ato_jax.explain(ato_jax.attention, q, k, v, causal=True)
      >>> explanation.implementation  # on a CPU
      'xla'
      >>> explanation.reasons["cudnn"]["forward"]
      'needs a GPU, and this call runs on cpu'
    """
    # By identity, since ato_torch has functions of the same names with other meanings.
    names: dict[Hashable, str] = {name: name for name in KNOWN}
    names |= {function: name for name, (function, _) in KNOWN.items()}
    unwrapped = inspect.unwrap(op) if callable(op) else op
    name = names.get(unwrapped) if isinstance(unwrapped, Hashable) else None
    if name is None:
        raise ValueError(
            f"op must be one of {', '.join(map(repr, KNOWN))} or that function of ato_jax, "
            f"got {_described(op)}"
        )
    function, of_wide = KNOWN[name]

    def explained(*args: Any, **options: Any) -> dispatch.Explanation:
        found = of_wide(*args, **options)
        if options.get("scales") is None:
            return found
        return float8.explained(found, options.get("out_dtype"))

    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    leaves, structure = jax.tree.flatten((args, kwargs))
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return explained(*args, **kwargs)
    arrays = {
        index: leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array)
        # Tracing would narrow these two; untraced, the call's checks refuse them.
        and str(leaf.dtype) not in ("float64", "complex128")
    }
    found: list[dispatch.Explanation] = []

    def trace(traced: dict[int, Any]) -> None:
        merged = [traced.get(index, leaf) for index, leaf in enumerate(leaves)]
        call_args, call_kwargs = jax.tree.unflatten(structure, merged)
        found.append(explained(*call_args, **call_kwargs))

    jax.eval_shape(trace, arrays)
    return found[0]
