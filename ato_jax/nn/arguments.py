"""Checks of constructor and call arguments that all layers share.

Each raises a ValueError that names the argument, what it was and what it has to be.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ato_jax import choosing, shapes
from ato_jax.parallel.devices import AxisName, devices_along
from ato_jax.quantizing import FLOAT8

# A mask as callers give it, and a feature map: a name, or an elementwise JAX function.
Mask = jax.Array | np.ndarray
Sharding = jax.sharding.NamedSharding | jax.sharding.PartitionSpec


def as_dropout_rate(rate: Any, keep_rngs: bool, rngs: nnx.Rngs) -> float:
    """`dropout_rate` of a constructor; it needs a stream in `rngs` if the layer keeps one."""
    rate = shapes.static_number("dropout_rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be at least 0 and below 1, got {rate}")
    if rate and keep_rngs:
        refuse_rngs_without("dropout", rngs)
    return rate


def dropout_key(
    layer: Any, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
) -> jax.Array | None:
    """The random key for a call's dropout; None where nothing is dropped.

    `layer` has nnx.MultiHeadAttention's attributes `dropout_rate`, `deterministic` and `rngs`.
    """
    deterministic = layer.deterministic if deterministic is None else deterministic
    optional_flag("deterministic", deterministic)
    if rngs is not None and not isinstance(rngs, nnx.RngStream | nnx.Rngs):
        raise ValueError(f"rngs must be an nnx.Rngs or an nnx.RngStream, got {rngs!r}")
    if not layer.dropout_rate:
        return None
    if deterministic is None:
        raise ValueError(
            "deterministic must be True or False where dropout_rate is above 0: give it to "
            "the call or to the constructor, or use model.train() and model.eval()"
        )
    if deterministic:
        return None
    stream = layer.rngs if rngs is None else rngs
    if stream is None:
        raise ValueError("rngs must be given for dropout where keep_rngs is False")
    if isinstance(stream, nnx.RngStream):
        return stream()
    refuse_rngs_without("dropout", stream, "an nnx.Rngs or an nnx.RngStream")
    return stream.dropout()


def refuse_no_array(name: str, inputs: Any) -> None:
    """Refuses what is no array of real numbers, of JAX or NumPy. A list has no shape to check."""
    is_array = hasattr(inputs, "shape") and hasattr(inputs, "ndim") and hasattr(inputs, "dtype")
    if not is_array or isinstance(inputs, jax.ShapeDtypeStruct | type):
        raise ValueError(f"{name} must be an array, got {inputs!r}")
    found = shapes.dtype_name(name, inputs)
    if not found.startswith(("bool", "int", "uint", "float", "bfloat")):
        raise ValueError(f"{name} must hold real numbers, got {found}")


def refuse_rngs_without(stream: str, rngs: Any, wanted: str = "an nnx.Rngs") -> None:
    """Refuses what is no nnx.Rngs with that stream or the stream `default`."""
    if not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"rngs must be {wanted}, for example nnx.Rngs(0), got {rngs!r}")
    if not hasattr(rngs, stream):  # the stream `default` stands for all
        raise ValueError(f"rngs must have a stream {stream!r} or 'default', got {rngs!r}")


def optional_flag(name: str, value: Any) -> None:
    """Refuses what is neither True, False nor None."""
    if value is not None:
        shapes.flag(name, value)


def as_implementation(op: choosing.Op, implementation: str | None) -> str | None:
    """`implementation` of a constructor: None, or the name of one of the op's backends."""
    if implementation is not None:
        shapes.one_of("implementation", implementation, op.backends + op.planned)
    return implementation


def refuse_no_dtype(**dtypes: Any) -> None:
    """Refuses all but None and floating-point dtypes, and float64 where JAX would narrow it."""
    for name, dtype in dtypes.items():
        if dtype is None:
            continue
        try:
            named = isinstance(dtype, str | type | np.dtype)  # an array has a dtype, but is none
            floats = named and jnp.issubdtype(jax.dtypes.canonicalize_dtype(dtype), jnp.floating)
        except (TypeError, ValueError):
            floats = False
        if not floats:
            raise ValueError(f"{name} must be None or a dtype of floats, got {dtype!r}")
        if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
            raise ValueError(
                f"{name} must have at most 32 bits, got {dtype!r}: JAX would narrow it to float32"
            )


def as_kv_dtype(kv_dtype: Any) -> str | None:
    """`kv_dtype` of a constructor: None, or float8_e4m3fn, by its name or as a dtype."""
    if kv_dtype is None:
        return None
    try:
        named = isinstance(kv_dtype, str | type | np.dtype)
        found = jnp.dtype(kv_dtype).name if named else None
    except (TypeError, ValueError):
        found = None
    if found != FLOAT8:
        raise ValueError(f"kv_dtype must be None or {FLOAT8!r}, got {kv_dtype!r}")
    return FLOAT8


def refuse_eight_bits(dtype: Any) -> None:
    """Refuses a `dtype` of `init_cache` that needs scales."""
    if dtype is not None and jnp.dtype(dtype).itemsize == 1:
        raise ValueError(
            f"dtype must have 16 bits or more, since 8 bits need scales, got {dtype!r}: give the "
            f"layer kv_dtype={FLOAT8!r}"
        )


# Constructor arguments of nnx.MultiHeadAttention that are functions or metadata.
_INITIALISERS = ("kernel_init", "out_kernel_init", "bias_init", "out_bias_init")
_PROMOTIONS = ("qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype")
_PRODUCTS = ("qkv_dot_general", "out_dot_general")
_PRODUCT_CLASSES = ("qkv_dot_general_cls", "out_dot_general_cls")
_METADATA = (
    *("kernel_metadata", "out_kernel_metadata", "bias_metadata", "out_bias_metadata"),
    *("query_ln_scale_metadata", "key_ln_scale_metadata"),
)
_OPTIONAL = (
    *("out_kernel_init", "out_bias_init", "out_kernel_metadata", "out_bias_metadata"),
    *(*_PRODUCTS, *_PRODUCT_CLASSES),
)


def refuse_no_parts(options: Mapping[str, Any]) -> None:
    """Refuses constructor arguments of nnx.MultiHeadAttention that Flax could not call or read."""
    for name, value in options.items():
        if value is None and name in _OPTIONAL:
            continue
        if name in _INITIALISERS:
            refuse_no_initialiser(**{name: value})
        elif name in _PROMOTIONS:
            refuse_no_promotion(name, value)
        elif name in _PRODUCTS and not takes(value, "left", "right", "axes", precision=None):
            raise ValueError(
                f"{name} must be None or a function like jax.lax.dot_general, got {value!r}"
            )
        elif name in _PRODUCT_CLASSES and not (inspect.isclass(value) or takes(value)):
            raise ValueError(f"{name} must be None or a class of such functions, got {value!r}")
        elif name in _METADATA:
            named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
            if not named:
                raise ValueError(f"{name} must be a mapping of names to values, got {value!r}")


# Other libraries' names for arguments of the layers.
_NAMES_ELSEWHERE = {
    "bias": "use_bias",
    "dropout": "dropout_rate",
    "embed_dim": "in_features",
    "head_dim": "qkv_features, which is num_heads * head_dim",
    "is_causal": "causal",
    "num_key_value_heads": "num_kv_heads",
    "qk_norm": "normalize_qk",
}


def refuse_unknown(cls: type, options: Mapping[str, Any]) -> None:
    """A TypeError for options that nnx.MultiHeadAttention does not take, with the nearest name."""
    of_flax = inspect.signature(nnx.MultiHeadAttention.__init__).parameters
    unknown = next((name for name in options if name not in of_flax), None)
    if unknown is None:
        return
    layers = [base for base in cls.__mro__ if issubclass(base, nnx.MultiHeadAttention)]
    names = [name for base in layers for name in inspect.signature(base.__init__).parameters]
    near = difflib.get_close_matches(unknown, names, n=1)
    near = [_NAMES_ELSEWHERE[unknown]] if unknown in _NAMES_ELSEWHERE else near
    hint = f": did you mean {near[0]}?" if near else ""
    raise TypeError(f"{cls.__name__} got an unexpected keyword argument {unknown!r}{hint}")


def refuse_no_initialiser(**initialisers: Any) -> None:
    """Refuses what cannot be called as Flax calls an initialiser."""
    for name, initialiser in initialisers.items():
        if not takes(initialiser, "key", "shape", "dtype"):
            raise ValueError(
                f"{name} must be a function of a key, a shape and a dtype, got {initialiser!r}"
            )


def refuse_no_promotion(name: str, promote_dtype: Any) -> None:
    """Refuses what cannot be called as Flax calls a `promote_dtype`."""
    if not takes(promote_dtype, "arrays", dtype=None):
        raise ValueError(
            f"{name} must be a function of a tuple of arrays and `dtype`, got {promote_dtype!r}"
        )


def takes(function: Any, *arguments: Any, **options: Any) -> bool:
    """Whether it is a function that accepts these arguments, as far as its signature is known."""
    if not callable(function) or inspect.isclass(function):
        return False
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def refuse_no_key(name: str, key: Any) -> None:
    """Refuses what is no single random key of JAX; nothing is drawn."""
    shapes.draw(name, key, functools.partial(jax.eval_shape, jax.random.bits))


def refuse_no_sharding(**shardings: Any) -> None:
    """Refuses what is neither None nor a sharding that JAX's `out_sharding` takes."""
    for name, sharding in shardings.items():
        kinds = jax.sharding.NamedSharding | jax.sharding.PartitionSpec
        if sharding is not None and not isinstance(sharding, kinds):
            raise ValueError(
                f"{name} must be None, a NamedSharding or a PartitionSpec, got {sharding!r}"
            )


def as_input_shape(input_shape: Any, features: int) -> tuple[int, ...]:
    """`input_shape` of `init_cache`, which must be [batch..., length, features]."""
    shape = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    sizes = all(shapes.is_int(size) and size >= 0 for size in shape)
    if len(shape) < 2 or not sizes or shape[-1] != features:
        raise ValueError(
            f"input_shape must be (batch..., length, {features}), the shape of the inputs, "
            f"got {input_shape!r}"
        )
    return shape


def refuse_beside_context(axis: AxisName, mask: Any, decode: bool, instead: str) -> None:
    """A ValueError for what a layer of whole sequences alone can do; `instead` says what takes the
    place of a mask."""
    devices_along(axis, "context_axis")
    if mask is not None:
        raise ValueError(
            "mask cannot be given with context_axis: it would have to be gathered; use " + instead
        )
    if decode:
        raise ValueError("decode cannot be given with context_axis: a cache holds whole sequences")


def as_decode(decode: Any) -> bool:
    """`decode` of a constructor or a call; None is False."""
    return decode is not None and shapes.flag("decode", decode)
