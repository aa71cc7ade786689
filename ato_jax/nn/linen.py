"""The layers as Linen modules.

    linen.MultiHeadDotProductAttention(num_heads=8)
    ato_jax.nn.to_linen(ato_jax.nn.Attention, num_heads=8)

The second replaces the first: its parameters have the same names, shapes and dtypes (`query`,
`key`, `value` and `out`, each with `kernel` and `bias`; `query_ln` and `key_ln` with `scale`), in
the module's own scope, so that

    module.apply({"params": params}, inputs)

takes the `params` of a checkpoint that Linen saved. The module is built on nnx.bridge.ToLinen, and
adds the sizes that Linen infers from its inputs, and the random keys.
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
from ato_jax.nn.arguments import as_decode, optional_flag, refuse_no_array, refuse_no_key
from ato_jax.nn.delta_net import DeltaNet
from ato_jax.nn.latent import LatentAttention
from ato_jax.nn.multi_head import MultiHead


def to_linen(
    cls: type[MultiHead] | type[LatentAttention] | type[DeltaNet],
    *,
    name: str | None = None,
    **options: Any,
) -> LinenAttention:
    """Returns a layer of this package as a Linen module.

    It stands in for `linen.MultiHeadDotProductAttention` and loads its checkpoints.

    Args:
      cls: `Attention`, `LinearAttention` or another layer class of this package.
      name: The module's name in Linen. Checkpoints of a model that left the name to Linen need that
        one: "MultiHeadDotProductAttention_0" and so on.
      **options: Arguments of the class's constructor without `rngs`. `in_features` and
        `in_kv_features` are taken from the inputs unless given. `decode=True` is refused, in the
        call as well, because Linen has no counterpart to `init_cache`; decode with the layer
        itself, in nnx, with the same parameters. Initialisers are nnx's: axis names go into
        `kernel_metadata` and the like, as in nnx, not into Linen's with_partitioning.

    Returns:
      A Linen module that is called like the layer, with `dropout_rng` in place of `rngs`. Dropout
      takes that key, or the module's rng named "dropout". Unlike in Linen, variables that the layer
      does not have are refused.

    Raises:
      ValueError: `cls` is no layer class, `name` no string, or an option cannot be given. Wrong
        constructor arguments raise it in `init` and `apply`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import ato_jax.nn
      >>> module = ato_jax.nn.to_linen(ato_jax.nn.Attention, num_heads=4, causal=True)
      >>> x = jnp.ones((2, 8, 16))
      >>> variables = module.init(jax.random.key(0), x)
      >>> module.apply(variables, x).shape
      (2, 8, 16)
    """
    given: Any = cls  # which may be anything, whatever its type says
    if not (inspect.isclass(given) and issubclass(given, (MultiHead, LatentAttention, DeltaNet))):
        raise ValueError(f"cls must be a layer of ato_jax.nn, a class, got {given!r}")
    if not (name is None or isinstance(name, str)):
        raise ValueError(f"name must be None or a string, got {name!r}")
    for taken in {"rngs", "keep_rngs"} & set(options):
        raise ValueError(f"{taken} cannot be given: Linen hands rngs to `init` and `apply`")
    _refuse_decode(options)
    return LinenAttention(cls, FrozenDict(options), name=name)


class LinenAttention(linen.Module):
    """The layer `cls(**options)` with its variables in Linen's collections: see `to_linen`."""

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
        """Computes the layer's call, with `dropout_rng` in place of `rngs`."""
        _refuse_decode(call_options)
        if "rngs" in call_options:
            raise ValueError("rngs cannot be given in Linen: the key for dropout is dropout_rng")
        arguments = {"in_features": _features("inputs_q", inputs_q)}
        if issubclass(self.cls, MultiHead):
            arguments["in_kv_features"] = (
                arguments["in_features"] if inputs_k is None else _features("inputs_k", inputs_k)
            )
        if not issubclass(self.cls, DeltaNet):
            arguments["keep_rngs"] = False  # the call brings the keys for dropout
        arguments |= self.options

        def build(rngs: nnx.Rngs) -> nnx.Module:
            if self.is_initializing():
                return self.cls(**arguments, rngs=rngs)
            # Shapes alone: all values come from Linen's collections, so none need be drawn.
            layer = nnx.eval_shape(lambda: self.cls(**arguments, rngs=nnx.Rngs(0)))
            _require_variables(layer, meta.unbox(bridge.variables), inputs_q, inputs_k)
            return layer

        for name, inputs in (("inputs_k", inputs_k), ("inputs_v", inputs_v)):
            if inputs is not None:
                call_options[name] = inputs
        key = call_options.pop("dropout_rng", None)
        deterministic = call_options.get("deterministic", self.options.get("deterministic"))
        optional_flag("deterministic", deterministic)
        undecided = deterministic is None  # the layer refuses this if it would drop
        rate = shapes.static_number("dropout_rate", self.options.get("dropout_rate", 0.0))
        if key is not None:
            refuse_no_key("dropout_rng", key)
        if rate > 0 and not (undecided or deterministic):
            # Without a key the bridge would use a constant one, the same for every step.
            call_options["rngs"] = nnx.Rngs(dropout=self._drawn() if key is None else key)
        bridge = _Bridge(build)
        linen.share_scope(self, bridge)  # else the parameters would be one level deeper
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
    """A bridge that does not take what Linen captured in its scope for the layer's variables."""

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
    """Refuses collections that do not hold exactly the layer's variables, in their shapes.

    The bridge would use fresh values in place of missing ones, and fail with others.
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
