"""FAVOR+'s features as arrays, of rows in bfloat16, and the pull-back of gradients to the rows.

    phi(x)_m = exp(a_m)                                    a_m = w_m . x' - |x'|^2 / 2 - log(M) / 2
    d_a_m    = phi(x)_m d_phi_m                            x' = x / D^(1/4), x [R, D], w [M, D]
    d_x      = D^(-1/4) (sum_m d_a_m w_m - x' sum_m d_a_m)
    d_w_m    = sum over the rows of d_a_m x'

A kernel that Pallas lowers to Triton reads x once and writes phi(x). Another one reads x and d_a
and writes d_x. No other array has a row for each of x. XLA computes both where JAX cannot lower to
Triton, and d_w, which few calls ask for.

The kernels that attend over the features return d_a where their map is `OWN_SLOPE`, the identity
whose derivative is its value, exp's: the pull-back then needs no features.

x is in bfloat16 and enters products as it is. w, in powers of 2, is the sum of two arrays in
bfloat16: the error of an exponent is at most 2^-18 |w| |x'|, below 1e-3 where a feature that is not
0 in float32 can be. d_a is in float32 and enters its product in two parts, too, as the two sums of
d_x nearly cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import launch
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.features import FeatureMap
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec

ROWS = 128  # of x in a program
# Of a program that maps, and at once of one that pulls back: twice as many spill on an A100, by
# 1,200 bytes and 352.
FEATURES, FEATURES_AT_ONCE = 64, 32
WARPS = 8
LEAST_COLUMNS = 16  # of a product's tile
LOG2_E = math.log2(math.e)


@jax.custom_jvp
def _own_slope(x: jax.Array) -> jax.Array:
    return x


@_own_slope.defjvp
def _own_slope_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return primals[0], primals[0] * tangents[0]


# For kernels that are given features: gradients are those of the features' logarithms.
OWN_SLOPE = FeatureMap("features", True, _own_slope)


def without_padding(
    spec: LinearAttentionSpec, x: jax.Array, lengths: jax.Array | None
) -> jax.Array:
    """x with 0 in padding, which may hold anything."""
    if lengths is None:
        return x
    positions = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1 if spec.layout == "bthd" else 2)
    return jnp.where(positions < lengths[:, None, None, None], x, 0)


def counted(spec: LinearAttentionSpec, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """q and k with 0 in padding."""
    return (
        without_padding(spec, inputs.q, inputs.q_lengths),
        without_padding(spec, inputs.k, inputs.kv_lengths),
    )


class Projection(NamedTuple):
    """log2(e) w / D^(1/4), [M, D] bfloat16, and what its rounding left."""

    rounded: jax.Array
    rest: jax.Array


def in_two_parts(projection: jax.Array) -> Projection:
    w = projection.astype(jnp.float32) * (projection.shape[1] ** -0.25 * LOG2_E)
    # XLA may keep float32 where a number is rounded and widened again.
    rounded = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=7)
    return Projection(rounded.astype(jnp.bfloat16), (w - rounded).astype(jnp.bfloat16))


def _offset(x: jax.Array, D: int, features: int) -> jax.Array:
    """log2 of sqrt(M) exp(|x'|^2 / 2), [rows, 1]; x has 0 beyond its D columns."""
    x = x.astype(jnp.float32)
    squares = jnp.sum(x * x, axis=1, keepdims=True)
    return squares * (0.5 * LOG2_E * D**-0.5) + 0.5 * math.log2(features)


def offset_of(spec: LinearAttentionSpec, xs: Iterable[jax.Array]) -> jax.Array:
    """The same of each row, [rows], whose columns `xs` hold between them."""
    squares = sum(jnp.sum(x * x, axis=1) for x in (x.astype(jnp.float32) for x in xs))
    return squares * (0.5 * LOG2_E * spec.D**-0.5) + 0.5 * math.log2(spec.F)


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


def features_of(x: jax.Array, projection: jax.Array, dtype: Any = jnp.bfloat16) -> jax.Array:
    """phi(x) in `dtype`, x [..., D] bfloat16."""
    w = in_two_parts(projection)
    rows = x.reshape(-1, x.shape[-1])
    by = _features_by_xla if launch.no_triton is not None else _features_by_triton
    return by(rows, w, dtype).reshape(*x.shape[:-1], len(projection))


def _features_by_triton(x: jax.Array, w: Projection, dtype: Any) -> jax.Array:
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
        phi = jnp.exp2(exponents - _offset(x, D, count)).astype(dtype)
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
        out_shape=jax.ShapeDtypeStruct((length, count), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="random_features",
    )(x, *w)


def _by_xla(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.dot(a, b, preferred_element_type=jnp.float32)


def _features_by_xla(x: jax.Array, w: Projection, dtype: Any) -> jax.Array:
    exponents = sum(_by_xla(x, part.T) for part in reversed(w))
    phi = jnp.exp2(exponents - _offset(x, x.shape[1], len(w.rounded)))
    return phi.astype(dtype)


def gradient_of_rows(x: jax.Array, projection: jax.Array, d_a: jax.Array) -> jax.Array:
    """d_x in x's dtype, x [..., D] bfloat16, d_a [..., M] float32."""
    w = in_two_parts(projection)
    rows, d_rows = (array.reshape(-1, array.shape[-1]) for array in (x, d_a))
    by = _gradient_by_xla if launch.no_triton is not None else _gradient_by_triton
    return by(rows, w, d_rows).reshape(x.shape)


def _difference(x: jax.Array, D: int, product: jax.Array, total: jax.Array) -> jax.Array:
    """d_x from d_a w [rows, D], w in powers of 2, and the sum of d_a [rows, 1]."""
    d_x = product * (1 / LOG2_E) - x.astype(jnp.float32) * (total * D**-0.5)
    return d_x.astype(x.dtype)


def _gradient_by_triton(x: jax.Array, w: Projection, d_a: jax.Array) -> jax.Array:
    length, D = x.shape
    count = len(w.rounded)
    rows, columns, features = ROWS, _tile(D), min(FEATURES_AT_ONCE, _tile(count))
    blocks = int(pl.cdiv(count, features))

    def kernel(x_ref: Any, rounded_ref: Any, rest_ref: Any, d_a_ref: Any, d_x_ref: Any) -> None:
        rows_left = _left(length, rows, pl.program_id(0) * rows)
        D_left = _left(D, columns, 0)
        product = jnp.zeros((rows, columns), jnp.float32)
        total = jnp.zeros((rows, 1), jnp.float32)
        for first in range(0, blocks * features, features):
            left, some = _left(count, features, first), pl.ds(first, features)
            rounded = _load(rounded_ref.at[some, :], left, D_left)  # [features, columns]
            rest = _load(rest_ref.at[some, :], left, D_left)  # [features, columns]
            d_a = _load(d_a_ref.at[:, some], rows_left, left)  # [rows, features]
            total += jnp.sum(d_a, axis=1, keepdims=True)
            large = d_a.astype(jnp.bfloat16)
            small = (d_a - large.astype(jnp.float32)).astype(jnp.bfloat16)
            product += plgpu.dot(small, rounded)
            product += plgpu.dot(large, rest)
            product += plgpu.dot(large, rounded)
        x = _load(x_ref, rows_left, D_left)  # [rows, columns]
        d_x = _difference(x, D, product, total)
        plgpu.store(d_x_ref, d_x, mask=_exist(d_x_ref.shape, rows_left, D_left))

    of_rows = pl.BlockSpec((rows, columns), lambda i: (i, 0))
    width = int(pl.next_power_of_2(blocks * features))
    of_features = pl.BlockSpec((width, columns), lambda i: (0, 0))
    return pallas_call(
        kernel,
        grid=(pl.cdiv(length, rows),),
        in_specs=[
            of_rows,
            of_features,
            of_features,
            pl.BlockSpec((rows, width), lambda i: (i, 0)),
        ],
        out_specs=of_rows,
        out_shape=jax.ShapeDtypeStruct((length, D), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="random_features_gradient",
    )(x, *w, d_a)


def _gradient_by_xla(x: jax.Array, w: Projection, d_a: jax.Array) -> jax.Array:
    # XLA may keep float32 where a number is rounded and widened again.
    large = jax.lax.reduce_precision(d_a, exponent_bits=8, mantissa_bits=7)
    small = (d_a - large).astype(jnp.bfloat16)
    product = _by_xla(small, w.rounded)
    product += sum(_by_xla(large.astype(jnp.bfloat16), part) for part in reversed(w))
    total = jnp.sum(d_a, axis=1, keepdims=True)
    return _difference(x, x.shape[1], product, total)


def gradient_of_projection(x: jax.Array, d_a: jax.Array) -> jax.Array:
    """What the rows of x add to d_w, [M, D] float32."""
    scaled = x.astype(jnp.float32) * x.shape[-1] ** -0.25
    return jnp.einsum("...m,...d->md", d_a, scaled, precision=jax.lax.Precision.HIGHEST)


def pulled_back(spec: LinearAttentionSpec, inputs: Inputs, found: Inputs) -> Inputs:
    """The call's gradients, from those of the features' logarithms."""
    (projection,) = inputs.feature_parameters
    rows, of_rows = counted(spec, inputs), (found.q, found.k)
    dq, dk = (gradient_of_rows(x, projection, d_a) for x, d_a in zip(rows, of_rows, strict=True))
    of_q, of_k = map(gradient_of_projection, rows, of_rows)
    parameters = ((of_q + of_k).astype(projection.dtype),)
    v = found.v.astype(spec.dtype)
    return found._replace(q=dq, k=dk, v=v, feature_parameters=parameters)
