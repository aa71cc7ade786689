"""Arrays in 8 bits: float8_e4m3fn values, and one scale for each head of each batch entry.

    values = x / scale, rounded to float8_e4m3fn        x is about values * scale

A scale is the least power of two by which no value is above 448, the format's largest. Float8 keeps
4 significant bits at every magnitude from 2^-6 to 448, so a power of two costs no digits, and
values * scale is exact in bfloat16 unless it leaves the range of normal numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ato_jax import checking, choosing, meshes, programs, shapes

FLOAT8 = "float8_e4m3fn"
MOST = float(jnp.finfo(FLOAT8).max)  # 448
MANTISSA = (1 << 23) - 1  # of a float32
# XLA divides by a scale as it multiplies by its inverse, which counts as 0 below 2^-126.
LARGEST_DIVISOR = 2.0**126


def quantize(
    x: ArrayLike, axes: int | Sequence[int], *, scale: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Quantises an array to float8_e4m3fn, with a scale for all values along some of its axes.

        values = x / scale, rounded to float8_e4m3fn        x is about values * scale

    Without a `scale`, each one is the least power of two by which no value exceeds 448, the
    format's largest. **Such a scale depends on every value of x along `axes`.** Where `axes` has
    the axis of time, the scale of a causal call depends on later tokens, and so do the rounded
    values of earlier ones. A call that must not know the future takes a `scale` that is known
    beforehand: one from calibration, or the largest of the chunks before (a running scale).

    Values beyond 448 times a given scale become that. Infinity and NaN become NaN, since the format
    has no infinity, and do not count for a scale: those in padding do no harm. Finite values in
    padding count: set large ones to 0 first. Zeros alone have the least scale, 2^-126. Values from
    3.296e38 on have no scale by which values * scale is finite.

    Args:
      x: An array in float16, bfloat16 or float32.
      axes: The axis or axes that share a scale: (1, 3) of [B, T, H, D] gives a scale [B, H], as
        `attention` and `linear_attention` take it; (2, 3) with layout "bhtd".
      scale: float32, of x's shape without `axes`, above 0; or a Python number, for all of them. A
        power of two keeps values * scale exact in bfloat16.

    Returns:
      (values, scale): values in float8_e4m3fn, of x's shape, and the scale in float32, of x's shape
      without `axes`.

    Raises:
      ValueError: An argument is wrong: its shape, dtype or value. The message names it, what it was
        and what it has to be.
      UnsupportedError: A derivative is taken.

    Example:
      >>> import ato_jax, jax
      >>> x = jax.random.normal(jax.random.key(0), (2, 64, 4, 32))  # [B, T, H, D]
      >>> values, scale = ato_jax.quantize(x, (1, 3))
      >>> values.dtype, scale.shape
      (dtype(float8_e4m3fn), (2, 4))
      >>> first, _ = ato_jax.quantize(x[:, :16], (1, 3), scale=scale)  # by a scale that is given
      >>> bool((first == values[:, :16]).all())
      True
    """
    x = shapes.floating("x", x)
    reduced = _axes(axes, x.ndim)
    kept = [axis for axis in range(x.ndim) if axis not in reduced]
    if scale is not None:
        wanted = tuple(x.shape[axis] for axis in kept)
        if isinstance(scale, int | float) and not isinstance(scale, bool):
            scale = jnp.full(wanted, shapes.positive("scale", scale), jnp.float32)
        scale = check_scale("scale", scale)
        if scale.shape != wanted:
            raise ValueError(f"scale must have shape {wanted}, got shape {scale.shape}")

    def partition() -> tuple[jax.Array, jax.Array]:
        names = meshes.partition(x)
        return meshes.sharded(*names), meshes.sharded(*(names[axis] for axis in kept))

    arrays = _without_derivative((x,) if scale is None else (x, scale))
    return meshes.call(lambda arrays: _quantised(reduced, *arrays), arrays, partition)


@jax.custom_jvp
def _without_derivative(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """As they are. A cotangent of float8 values would be float8, and round to 0 or NaN."""
    return arrays


@_without_derivative.defjvp
def _without_derivative_jvp(primals: Any, tangents: Any) -> Any:
    raise choosing.UnsupportedError(
        "quantize has no derivative: quantise in the forward pass alone, by jax.custom_vjp as the "
        "guide to float8 shows (docs/guides/float8.md), or quantise jax.lax.stop_gradient(x)"
    )


@programs.jit(static=1)
def _quantised(
    axes: tuple[int, ...], x: jax.Array, scale: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    scale = _scale_of(x, axes) if scale is None else scale
    # Both divided by 4, which is exact, have the same quotient.
    part = jnp.where(scale > LARGEST_DIVISOR, 0.25, 1.0)
    quotients = x * jnp.expand_dims(part, axes) / jnp.expand_dims(scale * part, axes)
    values = jnp.clip(quotients, -MOST, MOST)
    return jnp.where(jnp.isfinite(x), values, jnp.nan).astype(FLOAT8), scale


def rotate(x: ArrayLike) -> jax.Array:
    """Rotates the last axis by a Hadamard matrix, which spreads outliers over all columns.

        out = x diag(signs) M / sqrt(n)        signs fixed; M [n, n] of +1 and -1, rows orthogonal

    The scores of softmax attention stay as they are if queries and keys are both rotated, after
    their rotary embedding: (q R) . (k R) = q . k. Float8 rounds every value by a share of itself,
    so where a few columns are much larger than the others, a score's error is that of a few large
    products. Rotated, all columns have about the same size, and their errors average out. Inputs
    without such columns gain nothing. Values may be rotated, too, but then the output is. In linear
    attention a feature map comes between, so only the map "identity" allows it.

    n is the largest power of two that divides the axis. If it is less than the axis, each n columns
    are rotated among themselves.

    Args:
      x: An array in float16, bfloat16 or float32, whose last axis has an even size. Sums are
        float32.

    Returns:
      The rotated array, in x's shape and dtype.

    Raises:
      ValueError: x has another dtype, or an odd last axis.

    Example:
      >>> import ato_jax, jax, jax.numpy as jnp
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 64, 32))
      >>> scores = ato_jax.rotate(q) @ ato_jax.rotate(k).T
      >>> bool(jnp.allclose(scores, q @ k.T, atol=1e-4))
      True
    """
    x = shapes.floating("x", x)
    if x.ndim == 0 or x.shape[-1] % 2 or not x.shape[-1]:
        raise ValueError(f"x must have a last axis of an even size, got shape {x.shape}")

    return meshes.call(_rotated, x, lambda: meshes.sharded(*meshes.partition(x)))


@programs.jit()
def _rotated(x: jax.Array) -> jax.Array:
    columns = x.shape[-1]
    n = columns & -columns
    # NumPy never changes the numbers of its old generator: a cache may outlive the process.
    bits = np.random.RandomState(columns).randint(0, 2, columns)
    out = x.astype(jnp.float32) * (2 * bits - 1).astype(np.float32)
    width = 1
    while width < n:
        pairs = out.reshape(*x.shape[:-1], columns // (2 * width), 2, width)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        out = jnp.stack([left + right, left - right], axis=-2)
        width *= 2
    return (out.reshape(x.shape) * n**-0.5).astype(x.dtype)


def check_scale(name: str, scale: Any) -> jax.Array:
    """A float32 array; a ValueError for another dtype, or for values that are no positive numbers.

    `checked` alone sees the values of a traced one.
    """
    found = shapes.dtype_name(name, scale)
    if found != "float32":
        raise ValueError(f"{name} must be float32, got {found}")
    scale = shapes.as_array(name, scale)
    message = (
        f"{name} must be positive and finite, at least {shapes.LEAST:.2g}, "
        "got values from {least} to {most}"
    )
    if isinstance(scale, jax.core.Tracer):
        if checking.checking():
            right = (scale >= shapes.LEAST) & (scale <= shapes.MOST)
            checking.check(
                right.all(),
                message,
                least=jnp.min(scale, initial=jnp.inf),
                most=jnp.max(scale, initial=-jnp.inf),
            )
    elif scale.size:
        # Also where jit traces: what a traced function closes over is concrete.
        with jax.ensure_compile_time_eval():
            least, most = float(scale.min()), float(scale.max())
        if not shapes.LEAST <= least <= most <= shapes.MOST:
            raise ValueError(message.format(least=least, most=most))
    return scale


def _axes(axes: Any, ndim: int) -> tuple[int, ...]:
    """The axes from 0 on, in order; a ValueError unless they are different axes of the array."""
    given = axes if isinstance(axes, tuple | list) else (axes,)
    whole = all(shapes.is_int(axis) and -ndim <= axis < ndim for axis in given)
    found = sorted({int(axis) % ndim for axis in given}) if whole and ndim else []
    if not found or len(found) != len(given):
        raise ValueError(f"axes must be different axes of x, which has {ndim}, got {axes!r}")
    return tuple(found)


def _scale_of(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The least power of two, from 2^-126 on, by which no finite value is above 448. That of zeros
    alone is the least of all: a running maximum of scales ignores it."""
    largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axis=axes, initial=0)
    ratio = jnp.maximum(largest / MOST, shapes.LEAST)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.int32)
    # A mantissa other than 0 carries into the exponent, which alone is kept.
    return jax.lax.bitcast_convert_type((bits + MANTISSA) & ~MANTISSA, jnp.float32)
