"""Axis letters bound to sizes, and every error about a shape or a dtype.

    B batch, T queries, S keys, H query heads, G key/value heads (H % G == 0),
    D key size, V value size

A shape is bound letter by letter: the first array that carries a letter fixes its size, every
later one must agree. The error names the argument, what came and what was needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("bfloat16", "float16", "float32")


def dtype_name(name: str, array: Any) -> str:
    """The dtype as it came, before JAX could narrow it."""
    if hasattr(array, "dtype"):
        return str(array.dtype)
    try:
        return str(np.asarray(array).dtype)
    except ValueError:
        raise ValueError(f"{name} must be an array, got {array!r}") from None


def bind(
    sizes: dict[str, int], name: str, shape: tuple[int, ...], letters: Sequence[str]
) -> None:
    """Binds the axes of `shape` to `letters`, in place; a ValueError where they disagree."""
    agrees = len(shape) == len(letters) and all(
        sizes.get(letter, size) == size for letter, size in zip(letters, shape, strict=True)
    )
    if not agrees:
        known = ", ".join(f"{letter}={sizes[letter]}" for letter in letters if letter in sizes)
        raise ValueError(
            f"{name} must be [{', '.join(letters)}]{' with ' + known if known else ''}, "
            f"got shape {tuple(shape)}"
        )
    sizes.update(zip(letters, shape, strict=True))


def broadcastable(
    sizes: dict[str, int], name: str, shape: tuple[int, ...], letters: str
) -> tuple[int, ...]:
    """`shape` with leading ones added, one axis a letter; each must be 1 or the letter's size."""
    full = (1,) * (len(letters) - len(shape)) + tuple(shape)
    fits = len(full) == len(letters) and all(
        size in (1, sizes[letter]) for letter, size in zip(letters, full, strict=True)
    )
    if not fits:
        known = ", ".join(f"{letter}={sizes[letter]}" for letter in letters)
        raise ValueError(
            f"{name} must broadcast to [{', '.join(letters)}] with {known}, got shape {shape}"
        )
    return full


def floating(name: str, array: Any, dtype: str | None = None) -> jax.Array:
    """`array` as a JAX array; a ValueError unless it is float16, bfloat16 or float32."""
    found = dtype_name(name, array)
    if found not in FLOATS:
        raise ValueError(
            f"{name} must be float16, bfloat16 or float32, got {found}; convert it first"
        )
    if dtype is not None and found != dtype:
        raise ValueError(f"{name} must have q's dtype {dtype}, got {found}; convert one of them")
    return jnp.asarray(array)


def integers(name: str, array: Any) -> jax.Array:
    """`array` as int32; a ValueError unless it holds integers that int32 can hold."""
    found = dtype_name(name, array)
    if not found.startswith(("int", "uint")):
        raise ValueError(f"{name} must hold integers, got {found}")
    if not isinstance(array, jax.Array):
        host = np.asarray(array)
        limits = np.iinfo(np.int32)
        if host.size and (host.min() < limits.min or host.max() > limits.max):
            raise ValueError(f"{name} must fit in int32, got values up to {host.max()}")
    return jnp.asarray(array, jnp.int32)


def lengths(name: str, array: Any, sizes: dict[str, int], axis: str) -> jax.Array:
    """Lengths [B] as int32 between 0 and the axis' size."""
    found = integers(name, array)
    bind(sizes, name, found.shape, "B")
    if not isinstance(array, jax.Array):
        host = np.asarray(array)
        if host.size and (host.min() < 0 or host.max() > sizes[axis]):
            raise ValueError(
                f"{name} must lie between 0 and {axis}={sizes[axis]}, got {host.tolist()}"
            )
    return jnp.clip(found, 0, sizes[axis])


def static_number(name: str, value: Any) -> float:
    """A Python number; a ValueError for a traced one, which no kernel could be built for."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be a concrete number, got a traced one; multiply q by it")
    try:
        if isinstance(value, bool | str) or np.ndim(value) != 0:
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not np.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def positive_int(name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    return int(value)


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def flag(name: str, value: Any) -> bool:
    """A plain True or False; an array or a tracer would be decided too late for a kernel."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)
