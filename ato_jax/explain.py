"""Which backend and block sizes a call would run, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ato_jax import dispatch
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.linear_attention import api as linear_attention_api

APIS: dict[str, Any] = {
    "attention": attention_api,
    "linear_attention": linear_attention_api,
}


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> dispatch.Explanation:
    """Which backend and block sizes a call would run, and each other backend's reason.

    Args:
      op: `ato_jax.attention` or `ato_jax.linear_attention`, or the name of one.
      *args, **kwargs: the call's own arguments, as arrays or `jax.ShapeDtypeStruct`s.

    Raises the errors that the call itself would raise for wrong arguments. Nothing is computed.
    """
    # By identity, since ato_torch has functions of the same names with other meanings.
    names = {getattr(api, name): name for name, api in APIS.items()} | {name: name for name in APIS}
    unwrapped = inspect.unwrap(op) if callable(op) else op
    name = names.get(unwrapped) if isinstance(unwrapped, Hashable) else None
    if name is None:
        raise ValueError(f"op must be one of {', '.join(map(repr, APIS))}, got {op!r}")
    api = APIS[name]
    leaves, structure = jax.tree.flatten((args, kwargs))
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        request = api.prepare(*args, **kwargs)
        return dispatch.explain(api.OP, request.spec, request.inputs, request.implementation)
    arrays = {
        index: leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array)
        # Tracing would narrow these two; untraced, `prepare` refuses them.
        and str(leaf.dtype) not in ("float64", "complex128")
    }
    found: list[dispatch.Explanation] = []

    def prepare(traced: dict[int, Any]) -> None:
        merged = [traced.get(index, leaf) for index, leaf in enumerate(leaves)]
        call_args, call_kwargs = jax.tree.unflatten(structure, merged)
        request = api.prepare(*call_args, **call_kwargs)
        found.append(
            dispatch.explain(api.OP, request.spec, request.inputs, request.implementation)
        )

    jax.eval_shape(prepare, arrays)
    return found[0]
