"""Checks of values that nobody knows when a program is traced, where they are asked for.

    error, out = ato_jax.checked(step)(cache, k, v)
    error.throw()

A check costs: its error is an output, and what it looks at cannot be left out of the program. So
none is in a program unless `checked` is around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import checkify

# A part of what jit remembers programs by: one that was traced without checks is traced again.
_checking = jax.make_user_context(False)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the checks of what would otherwise be masked, or told by a flag alone.

    The checks are: a length out of range, in every op; in linear attention a decay above 0, and
    features whose sums overflow float32; a page id out of range in `decode_attention`; and whatever
    a `PagedCache` refuses. jit may be inside, around or both.

    Args:
      function: any that JAX can trace.

    Returns:
      A function of the same arguments that returns (error, what `function` returns), as
      `jax.experimental.checkify.checkify` does: `error.get()` is the message or None, and
      `error.throw()` raises it. `checkify.check` in `function` is honoured, too.
    """
    if not callable(function):
        raise ValueError(f"function must be callable, got {function!r}")

    @functools.wraps(function)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        with _checking(True):
            return function(*args, **kwargs)

    return checkify.checkify(with_checks)


def checking() -> bool:
    """Whether `checked` is around what is being traced."""
    return bool(_checking.value)


def check(holds: jax.Array, message: str, **numbers: Any) -> None:
    """An error of `checked` unless it holds; the message may have fields for numbers."""
    if checking():
        checkify.check(holds, message, **numbers)
