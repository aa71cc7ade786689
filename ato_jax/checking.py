"""Optional checks of values that are unknown while a program is traced.

    error, out = ato_jax.checked(step)(cache, k, v)
    error.throw()

A check costs time: its error is an output of the program, and what it reads cannot be optimised
away. So a program holds no check unless `checked` is around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.experimental import checkify

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Part of the keys of JAX's caches, so a function that was traced without checks is traced again.
_checking = jax.make_user_context(False)


def checked(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, tuple[checkify.Error, Result]]:
    """Adds to a function the checks of values that are not known when it is traced.

    They are: in every op, a length out of range; in softmax attention, a query offset beyond 2^29
    or below -2^29; in linear attention and the delta rule, a decay above 0; in linear attention,
    features whose sums overflow float32; in `decode_attention`, a page id out of range; and
    whatever a `PagedCache` refuses. Without `checked` such a value is clipped or masked, or told by
    a returned flag alone. A call without `checked` never reads the lengths, offsets and page ids in
    a jax array, since it would wait for the device; those in a NumPy array or a list it refuses.
    `jit` may be inside, around or both. A check costs time: the errors are outputs of the program.

    Args:
      function: Any function that JAX can trace.

    Returns:
      A function of the same arguments that returns (error, result). `error.get()` is the message
      or None, and `error.throw()` raises it, as for `jax.experimental.checkify.checkify`, whose
      own checks in `function` are found, too.

    Raises:
      ValueError: `function` is not callable.

    Example:
      >>> import ato_jax, jax, jax.numpy as jnp
      >>> q = k = v = jnp.ones((2, 16, 4, 8))
      >>> @jax.jit
      ... def attend(q, k, v, lengths):
      ...     return ato_jax.attention(q, k, v, kv_lengths=lengths)
      >>> error, out = ato_jax.checked(attend)(q, k, v, jnp.array([3, 99]))
      >>> error.get()
      'kv_lengths must lie between 0 and S=16, got [ 3 99] (`check` failed)'
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
