"""Optional checks of values that are unknown while a program is traced.

    error, out = ato_jax.checked(step)(cache, k, v)
    error.throw()

A check costs time: its error is an output of the program, and what it reads cannot be optimised
away. So a program holds no check unless `checked` is around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import checkify

# Part of the keys of JAX's caches, so a function that was traced without checks is traced again.
_checking = jax.make_user_context(False)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with checks of values that would otherwise be masked or only set a flag.

    The checks are: a length out of range, in every op; in linear attention a decay above 0, and
    features whose sums overflow float32; a page id out of range in `decode_attention`; and every
    refusal of a `PagedCache`. jit may be inside, around or both.

    Args:
      function: any function that JAX can trace.

    Returns:
      A function of the same arguments that returns (error, what `function` returns), as
      `jax.experimental.checkify.checkify` does: `error.get()` is the message or None, and
      `error.throw()` raises it. Calls of `checkify.check` in `function` count, too.
    """
    if not callable(function):
        raise ValueError(f"function must be callable, got {function!r}")

    @functools.wraps(function)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        with _checking(True):
            return function(*args, **kwargs)

    return checkify.checkify(with_checks)


def checking() -> bool:
    """Whether the code that is being traced is inside `checked`."""
    return bool(_checking.value)


def check(holds: jax.Array, message: str, **numbers: Any) -> None:
    """An error of `checked` unless `holds` is true; the message may have fields for `numbers`."""
    if checking():
        checkify.check(holds, message, **numbers)
