"""FAVOR+'s features as arrays in bfloat16.

    phi(x)_m = exp(w_m . x' - |x'|^2 / 2) / sqrt(M)         x' = x / D^(1/4), x [R, D], w [M, D]

A kernel that Pallas lowers to Triton reads x once and writes phi(x). XLA computes it where JAX
cannot lower to Triton.

x is in bfloat16 and enters products as it is. w, in powers of 2, is the sum of two arrays in
bfloat16: the error of an exponent is at most 2^-18 |w| |x'|, below 1e-3 where a feature that is not
0 in float32 can be.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import launch
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu

ROWS = 128  # of x in a program
FEATURES = 128  # of a program
WARPS = 8
LEAST_COLUMNS = 16  # of a product's tile
LOG2_E = math.log2(math.e)


class Projection(NamedTuple):
    """log2(e) w / D^(1/4), [M, D] bfloat16, and what its rounding left."""

    rounded: jax.Array
    rest: jax.Array


def _in_two_parts(projection: jax.Array) -> Projection:
    w = projection.astype(jnp.float32) * (projection.shape[1] ** -0.25 * LOG2_E)
    # XLA may keep float32 where a number is rounded and widened again.
    rounded = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=7)
    return Projection(rounded.astype(jnp.bfloat16), (w - rounded).astype(jnp.bfloat16))


def _offset(x: jax.Array, D: int, features: int) -> jax.Array:
    """log2 of sqrt(M) exp(|x'|^2 / 2), [rows, 1]; x has 0 beyond its D columns."""
    x = x.astype(jnp.float32)
    squares = jnp.sum(x * x, axis=1, keepdims=True)
    return squares * (0.5 * LOG2_E * D**-0.5) + 0.5 * math.log2(features)


def _load(ref: Any, rows_left: Any, columns_left: Any) -> jax.Array:
    """A tile, with 0 beyond the array's rows and columns."""
    exist = _exist(ref.shape, rows_left, columns_left)
    return plgpu.load(ref, mask=exist, other=None if exist is None else 0.0)


def _exist(shape: tuple[int, ...], rows_left: Any, columns_left: Any) -> jax.Array | None:
    exist = None
    for axis, left in enumerate((rows_left, columns_left)):
        if left is not None:
            inside = jax.lax.broadcasted_iota(jnp.int32, shape, axis) < left
            exist = inside if exist is None else exist & inside
    return exist


def _left(length: int, block: int, first: Any) -> Any:
    """What of the array is left from element `first` on; None where blocks divide it."""
    return None if length % block == 0 else length - first


def _tile(length: int) -> int:
    return max(LEAST_COLUMNS, int(pl.next_power_of_2(length)))


def features_of(x: jax.Array, projection: jax.Array) -> jax.Array:
    """phi(x) in bfloat16, x [..., D] bfloat16."""
    w = _in_two_parts(projection)
    rows = x.reshape(-1, x.shape[-1])
    by = _features_by_xla if launch.no_triton is not None else _features_by_triton
    return by(rows, w).reshape(*x.shape[:-1], len(projection))


def _features_by_triton(x: jax.Array, w: Projection) -> jax.Array:
    length, D = x.shape
    count = len(w.rounded)
    rows, columns, features = ROWS, _tile(D), min(FEATURES, _tile(count))
    blocks = int(pl.cdiv(count, features))

    def kernel(x_ref: Any, rounded_ref: Any, rest_ref: Any, phi_ref: Any) -> None:
        program = pl.program_id(0)
        features_left = _left(count, features, program % blocks * features)
        rows_left = _left(length, rows, program // blocks * rows)
        D_left = _left(D, columns, 0)
        x = _load(x_ref, rows_left, D_left)  # [rows, columns]
        rounded = _load(rounded_ref, features_left, D_left)  # [features, columns]
        rest = _load(rest_ref, features_left, D_left)  # [features, columns]
        exponents = plgpu.dot(x, rest, trans_b=True) + plgpu.dot(x, rounded, trans_b=True)
        phi = jnp.exp2(exponents - _offset(x, D, count)).astype(jnp.bfloat16)
        plgpu.store(phi_ref, phi, mask=_exist(phi_ref.shape, rows_left, features_left))

    of_rows = pl.BlockSpec((rows, columns), lambda i: (i // blocks, 0))
    of_features = pl.BlockSpec((features, columns), lambda i: (i % blocks, 0))
    return pallas_call(
        kernel,
        # One after another all features of rows, which are then still in the cache. CUDA takes no
        # more than 65,535 programs along another axis.
        grid=(pl.cdiv(length, rows) * blocks,),
        in_specs=[of_rows, of_features, of_features],
        out_specs=pl.BlockSpec((rows, features), lambda i: (i // blocks, i % blocks)),
        out_shape=jax.ShapeDtypeStruct((length, count), jnp.bfloat16),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="random_features",
    )(x, *w)


def _by_xla(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.dot(a, b, preferred_element_type=jnp.float32)


def _features_by_xla(x: jax.Array, w: Projection) -> jax.Array:
    exponents = sum(_by_xla(x, part.T) for part in reversed(w))
    phi = jnp.exp2(exponents - _offset(x, x.shape[1], len(w.rounded)))
    return phi.astype(jnp.bfloat16)
