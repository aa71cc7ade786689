"""Feature maps of tiles: where a map and its derivative plug into a kernel.

A kernel asks `features(spec)` for phi and calls it on tiles in registers, [rows, columns]:

    phi.queries(x)             phi(x), rounded once
    phi.present(x)             x of keys as they were loaded, before `keys`
    phi.keys(x, exponents)     phi(x), with a decay times exp2 of each row's exponent, rounded once;
                               0 in columns that the head does not have
    phi.unrounded(x)           phi(x) in float32
    phi.decayed(x, exponents, first)  phi(x) times exp2 of an exponent for each element, float32;
                               with `for_flows`, of phi(x) as `flow_features.of_flows` has it
    phi.slope_by_feature(x)    a function of y, y phi'(x) / phi(x), with phi(x) of `for_flows`
    phi.slope(x)               phi's derivative in float32
    phi.slope_of(x, phi_x)     the same where both x and phi(x) are at hand
    phi.transposed_keys(x, first)  phi(x) of a transposed tile [columns, rows], whose first row is
                               column `first`; 0 in columns that the head does not have
    phi.unrounded_transposed_keys(x, first)  the same in float32
    phi.unrounded_transposed_queries(x, first)  the same of queries, which need not be 0 there
    phi.unrounded_of_rows(x)   phi(x) in float32 of an array outside of kernels
    phi.largest_of_rows(x, first)  the largest magnitude of phi(x) in each row, float32

elu(x) + 1 has fast paths of its own: in bfloat16 two elements take one instruction, and its
derivative is the smaller of it and 1, which is known where phi(x) replaced x (`slope_is_known`).
Any other map is traced, with its derivative, and primitives that Mosaic GPU does not lower are
replaced by others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import meshes, mosaic
from ato_jax.mosaic import F32, HALF
from ato_jax.ops.linear_attention.features import FeatureMap
from ato_jax.ops.linear_attention.fits import LEAST_KEY as LEAST_KEY
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import LOG2_E
from ato_jax.ops.linear_attention.mosaic_gpu.narrow import Narrow
from ato_jax.ops.linear_attention.scans.flow_features import of_flows, slope_by_feature
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

LARGEST_OF_FLOAT16 = 65504.0
RISING = (
    "elu1",
    "relu",
    "relu2",
    "exp",
    "softplus",
)  # maps whose largest feature is that of the largest x


def features_of(x: jax.Array) -> jax.Array:
    """elu(x) + 1 in bfloat16; its derivative is the smaller of it and 1.

    Two to an instruction but for exp, and the same as in float32, rounded at the end.
    """
    raised = jnp.exp2(jnp.minimum(x, 0).astype(mosaic.F32) * LOG2_E)
    return jnp.maximum(x + 1, raised.astype(x.dtype))


def unrounded_features_of(x: jax.Array) -> jax.Array:
    x = x.astype(mosaic.F32)
    return jnp.maximum(x + 1, jnp.exp2(jnp.minimum(x, 0.0) * LOG2_E))


def decayed_features_of(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """The features of rows times exp2 of `exponents` [rows], rounded once."""
    x = x.astype(mosaic.F32)
    return mosaic.rounded(
        unrounded_decayed_features_of(x, mosaic.in_columns(exponents, x.shape[1]))
    )


def unrounded_decayed_features_of(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """elu(x) + 1 times exp2 of an exponent for each element, of x in float32."""
    factor = jnp.exp2(exponents)
    raised = jnp.exp2(jnp.minimum(x, 0.0) * LOG2_E + exponents)
    return jnp.maximum(x * factor + factor, raised)


def map_keys_in_place(
    spec: LinearAttentionSpec,
    ref: Any,
    half: int,
    exponents: jax.Array | None = None,
    power: Any = None,
) -> None:
    """Features of half a tile of keys in shared memory, where they replace it.

    With `exponents`, the decay's, the features of each row are multiplied by exp2 of its exponent;
    and by `power`, as `powers.py` has it.
    """
    phi, first = features(spec), half * HALF
    x = phi.present(mosaic.load(ref), first)
    if power is not None:
        ref[...] = times_power(phi, x, power, first, exponents)
        return
    ref[...] = phi.keys(x, exponents, first)


def times_power(
    phi: Features, x: jax.Array, power: Any, first: Any = 0, exponents: jax.Array | None = None
) -> jax.Array:
    """phi(x) of float16 x times `power`, and rows times exp2 of `exponents`; rounded once."""
    found = phi.unrounded(x, first) * power
    if exponents is not None:
        found = found * mosaic.in_columns(jnp.exp2(exponents), x.shape[1])
    return mosaic.rounded(found, x.dtype)


def map_queries_in_place(
    spec: LinearAttentionSpec, ref: Any, inverse: jax.Array, first: Any = 0
) -> None:
    """phi(q_i) inverse_i of a tile of queries in shared memory, where they replace it, rounded
    once: inverse is of phi(q_i) in float32, too."""
    maps, x = features(spec), mosaic.load(ref)
    if mosaic.has_units(ref.dtype):  # where a head has no column, 1 times inverse may be too large
        x = maps.present(x, first)
    phi = maps.unrounded(x, first)
    ref[...] = (phi * mosaic.in_columns(inverse, phi.shape[1])).astype(ref.dtype)


def keys(spec: LinearAttentionSpec, x: jax.Array, first: Any = 0, axis: int = 1) -> jax.Array:
    """x, keys from column `first` of a tile on (or from that row of its transpose), with
    `LEAST_KEY`, whose feature is 0, in columns that the head does not have. Where a tile holds two
    heads, x has the columns of one of them."""
    if not isinstance(spec, Narrow) or spec.width == spec.D:
        return x
    first = 0 if spec.D == HALF else first
    if isinstance(first, int) and first + x.shape[axis] <= spec.width:
        return x
    column = first + plgpu.broadcasted_iota(jnp.int32, x.shape, dimension=axis, layout=mosaic.TILE)
    return jnp.where(column < spec.width, x, LEAST_KEY)


@dataclasses.dataclass(frozen=True)
class Elu1:
    """elu(x) + 1 of heads with `spec`'s columns."""

    spec: LinearAttentionSpec
    slope_is_known = True

    def unrounded(self, x: jax.Array, first: Any = 0) -> jax.Array:
        return unrounded_features_of(x)

    def queries(self, x: jax.Array, first: Any = 0) -> jax.Array:
        return features_of(x)

    def present(self, x: jax.Array, first: Any = 0) -> jax.Array:
        return keys(self.spec, x, first)

    def keys(self, x: jax.Array, exponents: jax.Array | None = None, first: Any = 0) -> jax.Array:
        return features_of(x) if exponents is None else decayed_features_of(x, exponents)

    def decayed(
        self, x: jax.Array, exponents: jax.Array, first: Any = 0, for_flows: bool = False
    ) -> jax.Array:
        return unrounded_decayed_features_of(x.astype(F32), exponents)

    def slope_by_feature(self, x: jax.Array) -> Callable[[jax.Array], jax.Array]:
        # phi(x) = (max(x, 0) + 1) phi'(x)
        over = jnp.maximum(x.astype(F32), 0.0) + 1.0
        return lambda y: y / over

    def slope(self, x: jax.Array) -> jax.Array:
        return jnp.exp2(jnp.minimum(x.astype(F32), 0.0) * LOG2_E)

    def slope_of_features(self, phi: jax.Array, decay: jax.Array | None = None) -> jax.Array:
        """The derivative of phi(x), or, times `decay` [rows], of phi(x) times it, instead of x."""
        return jnp.minimum(phi, 1.0 if decay is None else mosaic.in_columns(decay, self.spec.F))

    def scaled_slope(self, phi: jax.Array, factor: jax.Array) -> jax.Array:
        """The derivative times `factor`, which is positive, of phi(x) times it."""
        return jnp.minimum(phi, factor)

    def slope_of(self, x: jax.Array, phi: jax.Array) -> jax.Array:
        return self.slope_of_features(phi)

    def transposed_keys(self, x: jax.Array, first: Any) -> jax.Array:
        return features_of(keys(self.spec, x, first, axis=0))

    def unrounded_transposed_keys(self, x: jax.Array, first: Any) -> jax.Array:
        return unrounded_features_of(keys(self.spec, x, first, axis=0))

    def unrounded_transposed_queries(self, x: jax.Array, first: Any) -> jax.Array:
        # Beside powers of two and shares a feature of 1, where a head has no column, may be large.
        in_float16 = mosaic.has_units(x.dtype)
        return self.unrounded_transposed_keys(x, first) if in_float16 else unrounded_features_of(x)

    def unrounded_of_rows(self, x: jax.Array) -> jax.Array:
        return unrounded_features_of(x)

    def largest_of_rows(self, x: jax.Array, first: Any = 0) -> jax.Array:
        return unrounded_features_of(jnp.max(self.present(x, first).astype(F32), axis=1))


@dataclasses.dataclass(frozen=True)
class Traced:
    """Any elementwise map, with its derivative."""

    map: FeatureMap
    width: int | None  # columns that a head has, if these do not fill a tile
    dtype: Any = mosaic.BF16
    in_pairs: bool = False  # a tile holds two heads, and x has the columns of one of them
    slope_is_known = False

    def _evaluated(self, shape: tuple[int, ...], derivative: bool) -> Callable[..., Sequence[Any]]:
        return _evaluated(self.map, shape, derivative, self.dtype == F32)

    def unrounded(self, x: jax.Array, first: Any = 0) -> jax.Array:
        (phi,) = self._evaluated(x.shape, False)(x.astype(F32))
        return self._within(phi, first)

    def decayed(
        self, x: jax.Array, exponents: jax.Array, first: Any = 0, for_flows: bool = False
    ) -> jax.Array:
        if self.map.name == "exp":
            # One exponential, which cannot overflow unless the result does.
            return self._within(jnp.exp2(x.astype(F32) * LOG2_E + exponents), first)
        (phi,) = self._evaluated(x.shape, False)(x.astype(F32))
        if for_flows:
            phi = of_flows(self.map, phi)
        return self._within(phi * jnp.exp2(exponents), first)

    def slope_by_feature(self, x: jax.Array) -> Callable[[jax.Array], jax.Array]:
        if self.map.name == "exp":
            return lambda y: y
        (phi,) = self._evaluated(x.shape, False)(x.astype(F32))
        factor = slope_by_feature(self.map, phi, self.slope(x))
        return lambda y: y * factor

    def _within(self, phi: jax.Array, first: Any) -> jax.Array:
        """phi of the columns from `first` on, and 0 in those that the head does not have."""
        if self.width is None:
            return phi
        first, shape = 0 if self.in_pairs else first, phi.shape
        if isinstance(first, int) and first + shape[1] <= self.width:
            return phi
        column = first + plgpu.broadcasted_iota(jnp.int32, shape, dimension=1, layout=mosaic.TILE)
        return jnp.where(column < self.width, phi, 0.0)

    def present(self, x: jax.Array, first: Any = 0) -> jax.Array:
        return x

    def queries(self, x: jax.Array, first: Any = 0) -> jax.Array:
        return mosaic.rounded(self.unrounded(x, first), self.dtype)

    def keys(self, x: jax.Array, exponents: jax.Array | None = None, first: Any = 0) -> jax.Array:
        phi = self.unrounded(x, first)
        if exponents is not None:
            phi = phi * mosaic.in_columns(jnp.exp2(exponents), x.shape[1])
        return mosaic.rounded(phi, self.dtype)

    def slope(self, x: jax.Array) -> jax.Array:
        (found,) = self._evaluated(x.shape, True)(x.astype(F32))
        return found

    def slope_of_features(self, phi: jax.Array, decay: jax.Array | None = None) -> jax.Array:
        raise NotImplementedError("only x tells the derivative of a traced map")

    def scaled_slope(self, phi: jax.Array, factor: jax.Array) -> jax.Array:
        raise NotImplementedError("only x tells the derivative of a traced map")

    def slope_of(self, x: jax.Array, phi: jax.Array) -> jax.Array:
        return self.slope(x)

    def transposed_keys(self, x: jax.Array, first: Any) -> jax.Array:
        return mosaic.rounded(self.unrounded_transposed_keys(x, first), self.dtype)

    def unrounded_transposed_keys(self, x: jax.Array, first: Any) -> jax.Array:
        (phi,) = self._evaluated(x.shape, False)(x.astype(F32))
        if self.width is not None:
            rows = plgpu.broadcasted_iota(jnp.int32, x.shape, dimension=0, layout=mosaic.TILE)
            phi = jnp.where(first + rows < self.width, phi, 0.0)
        return phi

    def unrounded_transposed_queries(self, x: jax.Array, first: Any) -> jax.Array:
        return self.unrounded_transposed_keys(x, first)

    def unrounded_of_rows(self, x: jax.Array) -> jax.Array:
        return self.map(x.astype(F32))

    def largest_of_rows(self, x: jax.Array, first: Any = 0) -> jax.Array:
        if self.map.name not in RISING or self.width is not None:
            return jnp.max(jnp.abs(self.unrounded(x, first)), axis=1)
        largest = jnp.max(x.astype(F32), axis=1)
        (found,) = self._evaluated(largest.shape, False)(largest)
        return found


Features = Elu1 | Traced


def features(spec: LinearAttentionSpec) -> Features:
    if spec.feature_map.name == "elu1":
        return Elu1(spec)
    width = spec.width if isinstance(spec, Narrow) and spec.width < spec.D else None
    tiling = frame.tiling(spec)
    return Traced(spec.feature_map, width, tiling.dtype, in_pairs=tiling.heads == 2)


def _expm1(x: jax.Array) -> jax.Array:
    """Where x is small the series, as exp(x) - 1 would cancel."""
    series = x * (1 + x * (0.5 + x * (1 / 6)))
    return jnp.where(jnp.abs(x) < 0.03, series, jnp.exp2(x * LOG2_E) - 1)


def _log1p(x: jax.Array) -> jax.Array:
    series = x * (1 - x * (0.5 - x * (1 / 3)))
    return jnp.where(jnp.abs(x) < 0.01, series, jnp.log(1 + x))


def _expm1_in_float32(x: jax.Array) -> jax.Array:
    u = jax.lax.optimization_barrier(jnp.exp(x))
    # Far from 0 it is u - 1, also where the logarithm is not finite.
    near = jnp.abs(x) < 1
    log = jnp.log(jnp.where(near, u, 2.0))
    found = (u - 1) * jnp.where(near & (u != 1), x / jnp.where(u == 1, 1.0, log), 1.0)
    return jnp.where(u == 1, x, found)


def _log1p_in_float32(x: jax.Array) -> jax.Array:
    u = jax.lax.optimization_barrier(1 + x)
    near = (jnp.abs(x) < 1) & (u != 1)
    found = jnp.log(u) * jnp.where(near, x / jnp.where(near, u - 1, 1.0), 1.0)
    return jnp.where(u == 1, x, found)


def _integer_pow(x: jax.Array, y: int) -> jax.Array:
    if y == 0:
        return jnp.ones_like(x)
    power = jax.lax.integer_pow(x, abs(y)) if abs(y) > 1 else x
    return power if y > 0 else 1 / power


# In the place of primitives that Mosaic GPU does not lower, or not with every parameter.
INSTEAD: dict[str, Callable[..., jax.Array]] = {
    "add_any": lambda x, y, **_: x + y,
    "exp": lambda x, **_: jnp.exp2(x * LOG2_E),
    "expm1": lambda x, **_: _expm1(x),
    "integer_pow": lambda x, y, **_: _integer_pow(x, y),
    "log1p": lambda x, **_: _log1p(x),
    "one_minus_square": lambda x, **_: 1 - x * x,
    "sqrt": lambda x, **_: jnp.where(x > 0, x * jax.lax.rsqrt(x), x),
    "stop_gradient": lambda x, **_: x,
}
# Replacements for float32 inputs, where the errors of the series above would be too large.
# u = 1 + x and u = exp(x) are rounded; a quotient corrects for the error of that rounding.
INSTEAD_IN_FLOAT32 = INSTEAD | {
    "exp": lambda x, **_: jnp.exp(x),
    "expm1": lambda x, **_: _expm1_in_float32(x),
    "log1p": lambda x, **_: _log1p_in_float32(x),
}
# Calls of other jaxprs, which are inlined, and under which parameter that is.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr"}
# What Mosaic GPU lowers of float32 and bool tiles, from JAX 0.10.2 on.
LOWERED = frozenset(
    "abs add and broadcast_in_dim clamp cos div eq erf exp2 ge gt le log logistic lt "
    "max min mul ne neg not or rsqrt select_n sign sin square sub tanh".split()
)


@functools.lru_cache(maxsize=256)
def unsupported(feature_map: FeatureMap) -> str | None:
    """Why kernels cannot evaluate the map and its derivative; None where they can."""
    if not feature_map.elementwise:
        return f"takes elementwise feature maps, {feature_map.name} is none"
    if feature_map.parameters:
        return "does not support a feature_map that closes over arrays"
    for derivative in (False, True):
        try:
            traced = _traced(feature_map, (), derivative)
        except Exception as error:
            # A function with a `jax.custom_vjp` has no derivative forward, and a rule of the user's
            # may raise anything.
            return f"does not support this feature_map: {error}".split("\n")[0]
        if not derivative and _is_literal(traced.jaxpr.outvars[0]):
            return "does not support a feature_map that is a constant"
        if lacking := _lacking(traced.jaxpr):
            return f"does not support a feature_map that calls {lacking}"
    # Rows beyond the end of a sequence are read as zeros, and masked by products with 0.
    with (
        jax.ensure_compile_time_eval(),
        jax.enable_x64(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        at_zero = jax.jvp(feature_map, (jnp.float32(0),), (jnp.float32(1),))
        if not all(jnp.isfinite(jnp.asarray(value)) for value in at_zero):
            return "does not support a feature_map that is not finite at 0"
    return None


def _lacking(jaxpr: Any) -> str | None:
    """The first primitive that kernels do not have, if there is one."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        variables = [one.aval for one in (*equation.invars, *equation.outvars)]
        if name in CALLS:
            if lacking := _lacking(equation.params[CALLS[name]].jaxpr):
                return lacking
        elif name == "convert_element_type":
            if any(aval.dtype not in (jnp.float32, jnp.int32, jnp.bool_) for aval in variables):
                return f"{name} of {variables[0].dtype} to {variables[1].dtype}"
        elif name not in INSTEAD and name not in LOWERED:
            return name
    return None


@functools.lru_cache(maxsize=256)
def _evaluated(
    feature_map: FeatureMap, shape: tuple[int, ...], derivative: bool, in_float32: bool
) -> Callable[..., Sequence[Any]]:
    """The map, or its derivative, as a function of a float32 tile of that shape; `in_float32`:
    whose numbers were not rounded before."""
    closed = _traced(feature_map, shape, derivative)
    instead = INSTEAD_IN_FLOAT32 if in_float32 else INSTEAD
    return functools.partial(_evaluate, instead, closed.jaxpr, closed.consts)


def _traced(feature_map: FeatureMap, shape: tuple[int, ...], derivative: bool) -> Any:
    x = jax.ShapeDtypeStruct(shape, F32)

    def of_one(x: jax.Array) -> Any:
        if not derivative:
            return feature_map(x)
        return jax.jvp(feature_map, (x,), (jnp.ones_like(x),))[1]

    # Tiles have no 64 bits, whatever the caller's numbers have.
    with meshes.nowhere(), jax.enable_x64(False):
        return jax.make_jaxpr(of_one)(x)


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")


def _evaluate(
    instead: dict[str, Callable[..., jax.Array]],
    jaxpr: Any,
    consts: Sequence[Any],
    *arguments: Any,
) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if _is_literal(variable) else values[variable]

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [read(one) for one in equation.invars]
        if name in CALLS:
            inner = equation.params[CALLS[name]]
            found = _evaluate(instead, inner.jaxpr, inner.consts, *inputs)
        elif name in instead:
            found = [instead[name](*inputs, **equation.params)]
        else:
            bound = equation.primitive.bind(*inputs, **equation.params)
            found = list(bound) if equation.primitive.multiple_results else [bound]
        values |= dict(zip(equation.outvars, found, strict=True))
    return [read(one) for one in jaxpr.outvars]
