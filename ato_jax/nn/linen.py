"""The layers as Linen modules.

    linen.MultiHeadDotProductAttention(num_heads=8)
    ato_jax.nn.to_linen(ato_jax.nn.Attention, num_heads=8)

The second stands where the first stood: the parameters have the same names, shapes and dtypes
(`query`, `key`, `value` and `out`, each with `kernel` and `bias`; `query_ln` and `key_ln` with
`scale`), in the module's own scope, so that

    module.apply({"params": params}, inputs)

takes the `params` of a checkpoint that Linen saved. nnx.bridge.ToLinen does the work; added are
what Linen infers from its inputs and the random keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen, nnx
from flax.core import FrozenDict, meta
from flax.traverse_util import flatten_dict

from ato_jax import shapes
from ato_jax.nn.common import (
    MultiHead,
    as_decode,
    optional_flag,
    refuse_no_array,
    refuse_no_key,
)
from ato_jax.nn.latent import LatentAttention


def to_linen(cls: Any, *, name: str | None = None, **options: Any) -> LinenAttention:
    """A layer of this package as a Linen module, in place of MultiHeadDotProductAttention.

    Args:
      cls: `Attention`, `LinearAttention` or another layer of this package.
      name: the module's name in Linen. Checkpoints of a model that named its attention by
        default need Linen's name, "MultiHeadDotProductAttention_0" and so on.
      options: the arguments of its constructor, `rngs` left out. `in_features` and
        `in_kv_features` need not be given: they are those of the inputs.

        `decode=True` is refused, to the call as well: Linen makes its cache in `init`, empty and
        as long as the inputs, where these layers make theirs in `init_cache`, which no Linen
        module calls. Decode with the layer itself, in nnx, from the same parameters.

        The initialisers are nnx's, of plain arrays: those of Linen's with_partitioning, which
        box what they return, do not work here. The axes' names go into `kernel_metadata` and the
        like: kernel_metadata={"out_sharding": (None, "heads", None)}, under a mesh, as in nnx.

    Returns:
      A module to be called as the layer is, but with `dropout_rng` in place of `rngs`. Dropout
      takes that key, or the module's rng named "dropout". Other than in Linen, variables that
      the layer does not have are refused.
    """
    if not (inspect.isclass(cls) and issubclass(cls, (MultiHead, LatentAttention))):
        raise ValueError(f"cls must be a layer of ato_jax.nn, a class, got {cls!r}")
    if not (name is None or isinstance(name, str)):
        raise ValueError(f"name must be None or a string, got {name!r}")
    for taken in {"rngs", "keep_rngs"} & set(options):
        raise ValueError(f"{taken} cannot be given: Linen hands rngs to `init` and `apply`")
    _refuse_decode(options)
    return LinenAttention(cls, FrozenDict(options), name=name)


class LinenAttention(linen.Module):
    """What `to_linen` returns: the layer `cls(**options)`, its variables in Linen's collections."""

    cls: Any
    options: Mapping[str, Any]

    @linen.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        **call_options: Any,
    ) -> jax.Array:
        _refuse_decode(call_options)
        if "rngs" in call_options:
            raise ValueError("rngs cannot be given in Linen: the key for dropout is dropout_rng")
        arguments = {"in_features": _features("inputs_q", inputs_q)}
        if issubclass(self.cls, MultiHead):
            arguments["in_kv_features"] = (
                arguments["in_features"] if inputs_k is None else _features("inputs_k", inputs_k)
            )
        arguments["keep_rngs"] = False  # the keys for dropout come with the call
        arguments |= self.options

        def build(rngs: nnx.Rngs) -> nnx.Module:
            if self.is_initializing():
                return self.cls(**arguments, rngs=rngs)
            # Every value comes from Linen's collections: none is drawn only to be replaced.
            layer = nnx.eval_shape(lambda: self.cls(**arguments, rngs=nnx.Rngs(0)))
            _require_variables(layer, meta.unbox(bridge.variables), inputs_q, inputs_k)
            return layer

        for name, inputs in (("inputs_k", inputs_k), ("inputs_v", inputs_v)):
            if inputs is not None:
                call_options[name] = inputs
        key = call_options.pop("dropout_rng", None)
        deterministic = call_options.get("deterministic", self.options.get("deterministic"))
        optional_flag("deterministic", deterministic)
        undecided = deterministic is None  # which the layer refuses where it would drop
        rate = shapes.static_number("dropout_rate", self.options.get("dropout_rate", 0.0))
        if key is not None:
            refuse_no_key("dropout_rng", key)
        if rate > 0 and not (undecided or deterministic):
            # The bridge would make up a key where there is none, the same for every step.
            call_options["rngs"] = nnx.Rngs(dropout=self._drawn() if key is None else key)
        bridge = _Bridge(build)
        linen.share_scope(self, bridge)  # or the parameters would lie one level deeper
        return bridge(inputs_q, **call_options)

    def _drawn(self) -> jax.Array:
        try:
            return self.make_rng("dropout")
        except errors.InvalidRngError:
            raise ValueError(
                "dropout needs a key where deterministic is False: give `apply` "
                'rngs={"dropout": key}, or dropout_rng=key to the call'
            ) from None


def _features(name: str, inputs: Any) -> int:
    """The size of the last axis of [batch..., length, features]."""
    refuse_no_array(name, inputs)
    if inputs.ndim < 2 or not inputs.shape[-1]:
        raise ValueError(
            f"{name} must be [batch..., length, features] with at least one feature, "
            f"got shape {inputs.shape}"
        )
    return int(inputs.shape[-1])


def _refuse_decode(options: Mapping[str, Any]) -> None:
    if as_decode(options.get("decode")):
        raise ValueError("decode must be False in Linen: decode with the layer itself, in nnx")


class _Bridge(nnx.bridge.ToLinen):
    """Takes all that its scope holds for the layer's: it must not see what Linen captured there."""

    @property
    def variables(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            collection: values
            for collection, values in super().variables.items()
            if collection != "intermediates"
        }


def _require_variables(
    layer: nnx.Module, collections: Mapping[str, Any], inputs_q: Any, inputs_k: Any
) -> None:
    """A ValueError unless the collections hold the layer's variables, in their shapes, and no more.

    The bridge would go on with a fresh one in place of what is missing, and stumbles over others.
    """
    given = {
        path: (collection, jnp.shape(value))
        for collection, values in collections.items()
        for path, value in flatten_dict(values).items()
    }
    for path, variable in nnx.to_flat_state(nnx.state(layer, nnx.Not(nnx.RngState))):
        _, shape = given.pop(path, ("", None))
        if shape != variable.shape:
            collection = nnx.variablelib.variable_name_from_type(type(variable))
            raise ValueError(
                f"{_joined(collection, path)} must have shape {variable.shape}, "
                + ("but it is not there" if shape is None else f"got {shape}")
                + f"; inputs_q has shape {inputs_q.shape}"
                + ("" if inputs_k is None else f", inputs_k has shape {inputs_k.shape}")
            )
    if given:
        names = ", ".join(_joined(collection, path) for path, (collection, _) in given.items())
        raise ValueError(
            f"{names}: {type(layer).__name__} has no such variables with the options it was given"
        )


def _joined(collection: str, path: tuple[Any, ...]) -> str:
    return "/".join(map(str, (collection, *path)))
