"""Binding axis letters to sizes, and the errors about shapes, dtypes and numbers.

    B batch, T queries, S keys, H query heads, G key/value heads (H % G == 0),
    D key size, V value size

A shape is bound letter by letter: the first array with a letter fixes its size, and every later one
must agree. An error names the argument, what it got and what it needs.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

FLOATS = ("bfloat16", "float16", "float32")
INT32 = np.iinfo(np.int32)
LEAST = float(np.finfo(np.float32).tiny)  # denormals count as 0 in a kernel
MOST = float(np.finfo(np.float32).max)
IS_LOG_DECAY = "is the natural log of a factor and must be <= 0"


def refuse_masked(name: str, array: Any) -> None:
    """A ValueError for a NumPy masked array, alone or in a list: its mask would be ignored."""
    leaves = jax.tree.leaves(array) if isinstance(array, list | tuple) else [array]
    if any(isinstance(leaf, np.ma.MaskedArray) for leaf in leaves):
        raise ValueError(
            f"{name} must not be a masked array, whose mask would be ignored; call filled() on it, "
            f"got {array!r}"
        )


def dtype_name(name: str, array: Any) -> str:
    """The name of an argument's dtype before JAX narrows it; a ValueError unless it is an array."""
    refuse_masked(name, array)
    if hasattr(array, "dtype"):
        return str(array.dtype)
    try:
        found = str(np.asarray(array).dtype)
    except ValueError:
        found = "object"
    if found == "object":  # None, or anything else that NumPy cannot turn into numbers
        raise ValueError(f"{name} must be an array, got {array!r}")
    return found


def as_array(name: str, array: Any) -> jax.Array:
    """`array` as a JAX array; a ValueError where it has a dtype but no values."""
    refuse_masked(name, array)
    try:
        return jnp.asarray(array)
    except TypeError:
        raise ValueError(f"{name} must be an array, got {array!r}") from None


def float_dtype(name: str, dtype: Any) -> str:
    """A dtype's name, one of `FLOATS`; a ValueError for anything else."""
    try:
        # jnp.dtype would read None as float64, and an array as its dtype.
        found = jnp.dtype(dtype).name if isinstance(dtype, str | type | np.dtype) else dtype
    except (TypeError, ValueError):
        found = dtype
    one_of(name, found, FLOATS)
    return str(found)


def bind(
    sizes: dict[str, int],
    name: str,
    shape: tuple[int, ...],
    letters: Sequence[str],
    where: str = "",
) -> None:
    """Binds the axes of `shape` to `letters` in `sizes`; a ValueError where they disagree.

    Args:
      sizes: the size of each letter bound so far; gets the new ones.
      name: the argument's name.
      shape: its shape.
      letters: a letter for each axis.
      where: added to the error, the condition under which the argument has these axes.
    """
    agrees = len(shape) == len(letters) and all(
        sizes.get(letter, size) == size for letter, size in zip(letters, shape, strict=True)
    )
    if not agrees:
        known = ", ".join(f"{letter}={sizes[letter]}" for letter in letters if letter in sizes)
        wanted = f"[{', '.join(letters)}]" if letters else "a scalar where q has no batch axis"
        raise ValueError(
            f"{name} must be {wanted}{where}{' with ' + known if known else ''}, "
            f"got shape {tuple(shape)}"
        )
    sizes.update(zip(letters, shape, strict=True))


def bind_batch(
    sizes: dict[str, int], name: str, shape: tuple[int, ...], batched: bool = True
) -> None:
    """Binds [B]; where q has no batch axis, a scalar or [1] instead."""
    bind(sizes, name, shape, "B" if batched or shape == (1,) else "")


def broadcastable(
    sizes: dict[str, int], name: str, shape: tuple[int, ...], letters: str
) -> tuple[int, ...]:
    """`shape` with leading ones, an axis for each letter, of size 1 or the letter's."""
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
    if found.startswith("torch."):
        raise ValueError(
            f"{name} must be a JAX array, got a PyTorch tensor: ato_torch has functions of the "
            "same names for tensors, and ato_jax.explain takes jax.ShapeDtypeStruct(shape, dtype)"
        )
    if found not in FLOATS:
        how = "convert it first"
        if found.startswith("float8"):
            how = (
                "multiply by the scale of ato_jax.quantize first: "
                f"({name}.astype('float32') * jnp.expand_dims(scale, axes)).astype('bfloat16')"
            )
        raise ValueError(f"{name} must be float16, bfloat16 or float32, got {found}; {how}")
    if dtype is not None and found != dtype:
        raise ValueError(f"{name} must have q's dtype {dtype}, got {found}; convert one of them")
    return as_array(name, array)


def integers(name: str, array: Any) -> jax.Array:
    """`array` as a JAX array; a ValueError unless it holds integers.

    Values on the host become int32, with a ValueError where they do not fit. A JAX array keeps its
    dtype, which may be wider, because its values are not waited for: `clipped` narrows them. An
    empty list is taken for no integers.
    """
    if isinstance(array, list | tuple) and not array:
        return jnp.zeros(0, jnp.int32)
    found = dtype_name(name, array)
    if not found.startswith(("int", "uint")):
        raise ValueError(f"{name} must hold integers, got {found}")
    if isinstance(array, jax.Array):
        return array
    host = np.asarray(array)
    if host.dtype == object:
        raise ValueError(f"{name} must be an array, got {array!r}")
    if host.size and (host.min() < INT32.min or host.max() > INT32.max):
        raise ValueError(f"{name} must fit in int32, got {_span(host)}")
    return jnp.asarray(host, jnp.int32)


def fits_int32(dtype: DTypeLike) -> bool:
    """Whether int32 holds every integer of this dtype."""
    return bool(jnp.iinfo(dtype).max <= INT32.max)


def clipped(array: jax.Array, low: int, high: int) -> jax.Array:
    """Integers clipped to [low, high] as int32; they are clipped before they are narrowed."""
    if fits_int32(array.dtype):
        array = array.astype(jnp.int32)
    low = max(low, int(jnp.iinfo(array.dtype).min))
    return jnp.clip(array, low, high).astype(jnp.int32)


def within(name: str, array: Any, low: int, high: int, high_name: str) -> None:
    """A ValueError unless the values lie in [low, high]; those on a device are not waited for."""
    if isinstance(array, jax.Array):
        return
    host = np.asarray(array)
    if host.size and (host.min() < low or host.max() > high):
        raise ValueError(f"{name} must lie between {low} and {high_name}, got {_span(host)}")


def _span(host: np.ndarray) -> str:
    return f"{host.item()}" if host.size == 1 else f"values from {host.min()} to {host.max()}"


def lengths(
    name: str, array: Any, sizes: dict[str, int], axis: str, batched: bool = True
) -> jax.Array:
    """Lengths [B] as int32, between 0 and the size of the axis."""
    found = integers(name, array)
    bind_batch(sizes, name, found.shape, batched)
    within(name, array, 0, sizes[axis], f"{axis}={sizes[axis]}")
    return clipped(found.reshape(-1), 0, sizes[axis])


def number(name: str, value: Any) -> float:
    """A Python number, NaN and infinity included; a ValueError for a traced one.

    A kernel is compiled for the number, so it must be known while tracing.
    """
    if isinstance(value, jax.core.Tracer):
        instead = "multiply q by it" if name == "scale" else "make it a static argument of jit"
        raise ValueError(f"{name} must be a concrete number, got a traced one; {instead}")
    try:
        if not _is_real(value):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None


def static_number(name: str, value: Any) -> float:
    """A Python number within float32's range; a ValueError for any other."""
    found = number(name, value)
    if not abs(found) <= MOST:
        raise ValueError(f"{name} must be finite, as a float32, got {found}")
    return found


def _is_real(value: Any) -> bool:
    """Whether it is a real number. float() alone would also take text and truth values."""
    if isinstance(value, np.ma.MaskedArray):
        return False
    if hasattr(value, "dtype"):
        name = str(value.dtype)
        return np.ndim(value) == 0 and ("int" in name or "float" in name)
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def positive(name: str, value: Any) -> float:
    """A number that is above 0 as a float32; a ValueError for any other."""
    found = static_number(name, value)
    if found < LEAST:
        least = f" (at least {LEAST:.2g}, float32's least)" if found > 0 else ""
        raise ValueError(f"{name} must be positive{least}, got {found}")
    return found


def scale(value: Any) -> float:
    """The number `scale`: 0, or one that is not 0 as a float32; a ValueError for any other."""
    found = static_number("scale", value)
    if 0 < abs(found) < LEAST:
        raise ValueError(
            f"scale must be 0 or at least {LEAST:.2g} in size, float32's least, got {found}"
        )
    return found


def refuse_growing_decay(largest: float, name: str = "decay") -> None:
    """A ValueError for log decays up to `largest`, where it is above 0 or NaN."""
    if not largest <= 0:
        found = "NaN" if math.isnan(largest) else f"values up to {largest}"
        raise ValueError(f"{name} {IS_LOG_DECAY}, got {found}")


def is_int(value: Any) -> TypeGuard[int | np.integer[Any]]:
    """Whether a value is one whole number. NumPy derives a time difference from its integers."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def positive_int(name: str, value: Any) -> int:
    if not is_int(value) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    return int(value)


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def flag(name: str, value: Any) -> bool:
    """A plain True or False; a ValueError for an array or a tracer, which no kernel can branch
    on."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def draw(name: str, key: Any, sample: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`sample(key)`; a ValueError unless `key` is a single JAX random key, typed or raw."""
    try:
        return sample(key)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a single JAX random key, got {key!r}") from error
