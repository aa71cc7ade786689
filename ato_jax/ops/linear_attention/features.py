"""Feature maps phi: the named ones, any elementwise JAX function, and Performer's FAVOR+.

A `FeatureMap` is static and hashable: the same function written again is the same map, so an
inline lambda does not compile anew at every call. What the function closes over (a learned
temperature, FAVOR+'s projection) is hoisted out as its parameters and travels as arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import meshes, shapes


@dataclasses.dataclass(frozen=True)
class FeatureMap:
    """phi(x, *parameters) -> features, in x's dtype; `text` identifies a custom function, and
    `parameters` is how many arrays it takes.

    `elementwise` is False only for FAVOR+, which maps [..., D] to [..., num_features].
    """

    name: str
    nonnegative: bool
    function: Callable[..., jax.Array] = dataclasses.field(compare=False, repr=False)
    text: str = dataclasses.field(default="", repr=False)
    elementwise: bool = True
    parameters: int = 0

    def __call__(self, x: jax.Array, *parameters: jax.Array) -> jax.Array:
        return self.function(x, *parameters)


def _elu1(x: jax.Array) -> jax.Array:
    # exp of 0 where x > 0: it could overflow there, and its derivative would be 0 * inf.
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


NAMED = {
    feature_map.name: feature_map
    for feature_map in (
        FeatureMap("elu1", True, _elu1),
        FeatureMap("relu", True, lambda x: jnp.where(x > 0, x, 0)),
        FeatureMap("exp", True, jnp.exp),
        FeatureMap("softplus", True, lambda x: jnp.logaddexp(x, 0)),
        FeatureMap("identity", False, lambda x: x),
        FeatureMap("silu", False, lambda x: x * jax.nn.sigmoid(x)),
        FeatureMap("relu2", True, lambda x: jnp.where(x > 0, x * x, 0)),
    )
}


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Favor:
    """Performer's positive random features of one projection; call it to map [..., D].

    With w the projection's rows and x' = x / D^(1/4), phi(x) = exp(w x' - |x'|^2 / 2) / sqrt(M),
    so that the mean of phi(q) . phi(k) over projections is exp(q . k / sqrt(D)).
    """

    projection: jax.Array  # [M, D] float32

    def __call__(self, x: jax.Array) -> jax.Array:
        return _favor(x, self.projection)

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        return (self.projection,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array]) -> Favor:
        return cls(*children)


def _favor(x: jax.Array, projection: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    features, size = projection.shape
    x = x.astype(dtype) * size**-0.25
    product = jnp.einsum(
        "...d,md->...m", x, projection.astype(dtype), precision=jax.lax.Precision.HIGHEST
    )
    half_norm = 0.5 * jnp.sum(x * x, axis=-1, keepdims=True)
    return jnp.exp(product - half_norm) * features**-0.5


def favor(
    key: jax.Array, num_features: int, head_dim: int, *, orthogonal: bool = True
) -> Favor:
    """Draws Performer's positive random features (FAVOR+), which approximate softmax attention.

        x'     = x / D^(1/4)
        phi(x) = exp(w x' - |x'|^2 / 2) / sqrt(M)          w [M, D], normally distributed rows
        E[phi(q) . phi(k)] = exp(q . k / sqrt(D))

    The features are not shifted by a maximum. A feature is at most exp(|w|^2 / 2) / sqrt(M), with
    |w|^2 about D, so float32 overflows only where D is large and a query and a key lie along a row
    of w; `ato_jax.checked` reports it. A large x has small features: where |x|^2 / sqrt(D) is above
    about 30, their products can fall below `eps`, and the output goes to 0. (Choromanski et al.,
    "Rethinking Attention with Performers", 2021.)

    Args:
      key: JAX random key. Another key draws other features.
      num_features: M. The variance of the estimate falls as 1 / M.
      head_dim: D of the queries and keys that the map will be given.
      orthogonal: Make the rows of w orthogonal within each block of D. It lowers the variance, and
        the estimate stays unbiased.

    Returns:
      A map from [..., D] to [..., M] to pass as `feature_map`. It is a pytree whose one leaf is w,
      so it can be an argument of a jitted function.

    Raises:
      ValueError: `num_features` or `head_dim` is no int of at least 1, `orthogonal` no bool, or
        `key` not a single random key.

    Example:
      >>> import ato_jax, jax, jax.numpy as jnp
      >>> phi = ato_jax.favor(jax.random.key(0), num_features=256, head_dim=8)
      >>> phi(jnp.ones((5, 8))).shape
      (5, 256)
      >>> q = k = v = jnp.ones((1, 16, 2, 8))
      >>> ato_jax.linear_attention(q, k, v, feature_map=phi).shape
      (1, 16, 2, 8)
    """
    num_features = shapes.positive_int("num_features", num_features)
    head_dim = shapes.positive_int("head_dim", head_dim)
    orthogonal = shapes.flag("orthogonal", orthogonal)
    direction_key, norm_key = shapes.draw("key", key, jax.random.split)
    if not orthogonal:
        return Favor(jax.random.normal(direction_key, (num_features, head_dim), jnp.float32))
    blocks = -(-num_features // head_dim)
    gaussian = jax.random.normal(direction_key, (blocks, head_dim, head_dim), jnp.float32)
    unitary, upper = jnp.linalg.qr(gaussian)
    # QR fixes the signs of R's diagonal, not of Q's columns: without this Q is not uniform.
    unitary = unitary * jnp.sign(jnp.diagonal(upper, axis1=-2, axis2=-1))[:, None, :]
    rows = unitary.reshape(blocks * head_dim, head_dim)[:num_features]
    lengths = jnp.linalg.norm(
        jax.random.normal(norm_key, (num_features, head_dim), jnp.float32), axis=-1, keepdims=True
    )
    return Favor(rows * lengths)


# What becomes a feature: of booleans and integers the number, of which the gradient is 0.
REAL = (jnp.floating, jnp.integer, jnp.bool_)


def _trace(function: Callable[[jax.Array], jax.Array], dtype: Any) -> Any:
    """The jaxpr of an elementwise function: traced on one scalar, which no mixing survives."""
    try:
        with meshes.nowhere():
            traced = jax.make_jaxpr(function, return_shape=True)
            closed, out = traced(jax.ShapeDtypeStruct((), dtype))
    except Exception as error:
        raise ValueError(
            "feature_map must be an elementwise JAX function, which maps a scalar to a scalar; "
            f"tracing it failed with {type(error).__name__}: {error}"
        ) from error
    if not isinstance(out, jax.ShapeDtypeStruct) or out.shape != ():
        raise ValueError(
            "feature_map must be an elementwise JAX function, which maps a scalar to a scalar; "
            f"it mapped one to {out}"
        )
    if not any(jnp.issubdtype(out.dtype, kind) for kind in REAL):
        raise ValueError(f"feature_map must map real numbers to real ones, it gave {out.dtype}")
    # Of one scalar, a sum over everything is the scalar: it is elementwise here alone.
    if reduction := re.search(r"\b(reduce_\w+)\[\s*axes=\(\)", str(closed.jaxpr)):
        raise ValueError(
            "feature_map must be an elementwise JAX function, which maps each entry by itself; "
            f"it calls {reduction[1]} over all of them"
        )
    return closed


# What a jaxpr's text does not tell apart: rules of derivatives, and functions of the host.
HIDING = ("custom_jvp", "custom_vjp", "callback")


def _hides_something(closed: Any) -> bool:
    """Whether a custom map may differ from another of the same text, and is only itself."""
    inner = [
        parameter
        for equation in closed.jaxpr.eqns
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr")
        )
        if hasattr(parameter, "jaxpr")
    ]
    names = [equation.primitive.name for equation in closed.jaxpr.eqns]
    return (
        any(word in name for name in names for word in HIDING)
        or any(one.consts for one in inner)
        or any(map(_hides_something, inner))
    )


def _evaluate(
    function: Callable[[jax.Array], jax.Array], jaxpr: Any, x: jax.Array, *constants: jax.Array
) -> jax.Array:
    if x.dtype != jnp.float32:
        jaxpr = _trace(function, x.dtype).jaxpr

    # Inside jax.shard_map a derivative has steps that vary over devices, which an equation that was
    # traced without a mesh cannot hold. Constants vary here, and did not where they were hoisted.
    varies = bool(jax.typeof(x).manual_axis_type.varying) and not constants

    def scalar(element: jax.Array) -> jax.Array:
        equations = jax.make_jaxpr(function)(element).jaxpr if varies else jaxpr
        [found] = jax.core.eval_jaxpr(equations, constants, element)
        return jnp.asarray(found, x.dtype)  # a constant map's is a number, no array

    mapped = scalar
    for _ in range(x.ndim):
        mapped = jax.vmap(mapped)
    return mapped(x)


def resolve(feature_map: Any, D: int) -> tuple[FeatureMap, tuple[jax.Array, ...], int]:
    """The map, its parameters and the feature size F for keys of size D."""
    if isinstance(feature_map, str):
        if feature_map not in NAMED:
            names = ", ".join(map(repr, NAMED))
            raise ValueError(
                f"feature_map must be one of {names}, an elementwise JAX function or "
                f"ato_jax.favor(...), got {feature_map!r}"
            )
        return NAMED[feature_map], (), D
    if isinstance(feature_map, Favor):
        features, size = feature_map.projection.shape
        if size != D:
            raise ValueError(f"feature_map was drawn for head_dim {size}, but q has D={D}")
        favor_map = FeatureMap("favor", True, _favor, elementwise=False, parameters=1)
        return favor_map, (feature_map.projection,), features
    if not callable(feature_map):
        raise ValueError(
            "feature_map must be a name, an elementwise JAX function or ato_jax.favor(...), "
            f"got {feature_map!r}"
        )
    closed = _trace(feature_map, jnp.float32)
    function = functools.partial(_evaluate, feature_map, closed.jaxpr)
    parameters = tuple(jnp.asarray(constant) for constant in closed.consts)
    # Addresses of functions differ from one trace of the same function to the next.
    text = re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr))
    if _hides_something(closed):
        # Held by the map, so that no other function gets its number.
        text = f"{text} {id(feature_map)}"
    found = FeatureMap("custom", False, function, text, parameters=len(parameters))
    return found, parameters, D
