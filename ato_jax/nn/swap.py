"""Replaces the attention in a model that is already built.

    replace_attention(model, ato_jax.nn.Attention)
    replace_attention(model, ato_jax.nn.LinearAttention, causal=True)

Each nnx.MultiHeadAttention in the model becomes a layer of this package around the same
projections: the modules `query`, `key`, `value`, `out`, `query_ln` and `key_ln` and the stream of
random keys are those of the old layer, not copies. Paths and parameters are unchanged, so the
optimizer's state and checkpoints still fit. A stack of layers with leading axes (made by nnx.vmap,
run by nnx.scan) is treated as one layer and keeps its axes.

A layer that cannot be replaced raises an error with its path before anything is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from ato_jax.nn.arguments import takes
from ato_jax.nn.gated import GatedLinearAttention
from ato_jax.nn.multi_head import MultiHead

Layer = TypeVar("Layer", bound=MultiHead)
Path = tuple[Any, ...]  # names of attributes, keys and indices

# Constructor arguments that a layer stores as attributes of the same name.
KEPT = (
    "num_heads",
    "in_features",
    "qkv_features",
    "out_features",
    "num_kv_heads",
    "in_kv_features",
    "dtype",
    "param_dtype",
    "broadcast_dropout",
    "dropout_rate",
    "deterministic",
    "precision",
    "use_bias",
    "decode",
    "normalize_qk",
    "qkv_promote_dtype",
    "out_promote_dtype",
    "ln_promote_dtype",
    "qkv_dot_general",
    "out_dot_general",
    "qkv_dot_general_cls",
    "out_dot_general_cls",
)
# Arguments of nnx.MultiHeadAttention that do not concern the projections and may be changed. The
# layers themselves refuse `attention_fn`.
FREE = ("broadcast_dropout", "dropout_rate", "deterministic", "decode", "keep_rngs", "attention_fn")
# Arguments that also apply to the new gates of a gated layer.
OF_GATES = ("kernel_init", "bias_init", "kernel_metadata", "bias_metadata")
SHARED = ("query", "key", "value", "out", "query_ln", "key_ln", "rngs")


def replace_attention(
    model: nnx.Module,
    cls: type[MultiHead],
    *,
    where: nnx.filterlib.Filter = ...,
    rngs: nnx.Rngs | None = None,
    **options: Any,
) -> tuple[Path, ...]:
    """Replaces the nnx.MultiHeadAttention layers of a model, in place.

    The new layers share the projections and the parameters of the old ones. Only
    nnx.MultiHeadAttention itself with Flax's own attention function is replaced. A subclass or
    another `attention_fn` is refused, since what it does would be lost, unless `where` leaves it
    out. Layers of this package stay as they are. `GatedLinearAttention` and `Performer` add
    variables, which older checkpoints and optimizer states lack. `GatedDeltaNet`,
    `KimiDeltaAttention` and `LatentAttention` have other parameters: a model is built with them.

    Args:
      model: An nnx.Module, list or dict. Layers are found in attributes, lists, dicts, tuples and
        modules.
      cls: The class of the new layers: `Attention`, `LinearAttention`, ...
      where: An nnx filter that selects layers: nnx.PathContains("encoder"), a function of (path,
        layer), ...; all unless given.
      rngs: Random keys for what new layers have and old ones do not: `Performer`'s projection, the
        gates of `GatedLinearAttention`, the stream for dropout.
      **options: Constructor arguments of the new layers that are not about the projections, such as
        `causal=True`. Sizes, dtypes, precision, initialisers and metadata are those of the old
        layers; `GatedLinearAttention` alone takes `kernel_init`, `bias_init` and their metadata,
        for its gates.

    Returns:
      The paths of the replaced layers. A layer that the model holds twice is listed once.

    Raises:
      ValueError: There is nothing to replace, a layer cannot be replaced, or an argument is wrong.
        The message names the layer's path, and the model is unchanged.

    Example:
      >>> import jax.numpy as jnp
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> model = nnx.Sequential(
      ...     nnx.Linear(8, 16, rngs=nnx.Rngs(0)),
      ...     nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(1)),
      ... )
      >>> ato_jax.nn.replace_attention(model, ato_jax.nn.LinearAttention, causal=True)
      (('layers', 1),)
      >>> model(jnp.ones((2, 5, 8))).shape
      (2, 5, 16)
    """
    if not isinstance(model, nnx.Module | list | dict):
        raise ValueError(
            "model must be an nnx.Module, a list or a dict, which can be changed in place, "
            f"got {type(model).__name__}"
        )
    try:
        matches = nnx.filterlib.to_predicate(where)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"where must be an nnx filter, such as nnx.PathContains('encoder'), got {where!r}"
        ) from error
    if not takes(matches, "path", "layer"):
        raise ValueError(f"where must be a function of (path, layer), got {where!r}")
    found = {
        path: layer
        for path, layer in nnx.iter_graph(model, graph=True)
        if isinstance(layer, nnx.MultiHeadAttention)
        and not isinstance(layer, MultiHead)
        and matches(path, layer)
    }
    if not found:
        layers = nnx.iter_graph(model, graph=True)
        own = [path for path, layer in layers if isinstance(layer, MultiHead)]
        raise ValueError(
            "model holds no nnx.MultiHeadAttention"
            + (" that `where` lets through" if where is not ... else "")
            + (f"; what lies at {own[0]} is of ato_jax.nn already: it stays so" if own else "")
        )
    if () in found:
        raise ValueError(
            "model is the attention layer itself, which no other module holds: "
            "use ato_jax.nn.convert_attention(layer, cls), which returns the new one"
        )
    replaced = {}
    for path, layer in found.items():
        try:
            replaced[id(layer)] = convert_attention(layer, cls, rngs=rngs, **options)
        except Exception as error:
            error.add_note(f"Raised by the layer at {path} of the model, which is unchanged.")
            raise
    _substitute(model, replaced, set())
    return tuple(found)


def convert_attention(
    layer: nnx.MultiHeadAttention,
    cls: type[Layer],
    *,
    rngs: nnx.Rngs | None = None,
    **options: Any,
) -> Layer:
    """Returns a layer of class `cls` that shares the projections of `layer`.

    Args:
      layer: An nnx.MultiHeadAttention, and no subclass.
      cls: The class of the new layer: `Attention`, `LinearAttention`, ...
      rngs: Random keys for what the new layer has and `layer` does not, as in `replace_attention`.
      **options: Constructor arguments that are not about the projections, as in
        `replace_attention`.

    Returns:
      The new layer. Its projections are the modules of `layer` themselves, not copies.

    Raises:
      ValueError: `layer` cannot be converted, or an argument is wrong.

    Example:
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> old = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
      >>> new = ato_jax.nn.convert_attention(old, ato_jax.nn.Attention, causal=True)
      >>> new.query is old.query
      True
    """
    given: Any = cls  # which may be anything, whatever its type says
    if not (inspect.isclass(given) and issubclass(given, MultiHead)):
        raise ValueError(
            "cls must be a layer of ato_jax.nn with nnx.MultiHeadAttention's parameters, a class; "
            f"build the model with any other layer; got {given!r}"
        )
    if type(layer) is not nnx.MultiHeadAttention:
        raise ValueError(
            f"layer must be an nnx.MultiHeadAttention, and no subclass, got {type(layer).__name__}"
        )
    if layer.attention_fn is not nnx.dot_product_attention:
        raise ValueError(
            f"attention_fn must be nnx.dot_product_attention, or {cls.__name__} would not do what "
            f"the layer does; got {layer.attention_fn!r}"
        )
    if layer.cached_key is not None:
        raise ValueError(
            "the layer holds a decoding cache; replace it first and call init_cache afterwards"
        )
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"rngs must be an nnx.Rngs, got {rngs!r}")
    free = (*FREE, *OF_GATES) if issubclass(cls, GatedLinearAttention) else FREE
    of_flax = inspect.signature(nnx.MultiHeadAttention.__init__).parameters
    if fixed := [name for name in options if name in of_flax and name not in free]:
        raise ValueError(
            f"{', '.join(fixed)} cannot be changed: the projections are those of the old layer, "
            "made already"
        )
    arguments = {name: getattr(layer, name) for name in KEPT} | options
    # A layer with dropout has a stream of keys unless it was built with keep_rngs=False.
    arguments.setdefault("keep_rngs", layer.rngs is not None or not layer.dropout_rate)

    def build(rngs: nnx.Rngs) -> Layer:
        return cls(**arguments, rngs=rngs)

    # Shapes alone: the old layer has most of what the constructor would draw.
    new = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    expected = new.query.kernel.shape
    shared = set(SHARED)
    if layer.rngs is None or new.rngs is None:
        shared.remove("rngs")  # one of them has no dropout or keeps no stream
    own = {
        path: leaf
        for path, leaf in nnx.iter_graph(new, graph=True)
        if isinstance(leaf, nnx.Variable) and path[0] not in shared
    }
    for name in shared:
        setattr(new, name, getattr(layer, name))
    if own:
        if rngs is None:
            names = dict.fromkeys(str(path[0]) for path in own)
            if "rngs" in names:
                names = {name: None for name in names if name != "rngs"} | {
                    "keys for dropout": None
                }
            raise ValueError(
                f"rngs must be given: {cls.__name__} has variables of its own, {', '.join(names)}"
            )
        kernel = layer.query.kernel.shape
        if kernel[-3:] != expected:
            raise ValueError(
                f"the axes of a stack must come first: query's kernel must end in {expected}, "
                f"got shape {kernel}"
            )
        values = _draw(build, list(own), rngs.params(), kernel[:-3])
        for leaf, value in zip(own.values(), values, strict=True):
            leaf.set_value(value)
    return new


def _draw(
    build: Callable[[nnx.Rngs], MultiHead],
    paths: list[Path],
    key: jax.Array,
    stacked: tuple[int, ...],
) -> list[jax.Array]:
    """Values of the variables at `paths` in a new layer, or in a stack with these leading axes."""

    def draw(key: jax.Array) -> list[jax.Array]:
        variables = dict(nnx.to_flat_state(nnx.state(build(nnx.Rngs(key)))))
        return [variables[path].get_value() for path in paths]

    for _ in stacked:
        draw = jax.vmap(draw)
    # Inside jit XLA removes the drawing of the projections, which are not read.
    return jax.jit(draw)(jax.random.split(key, stacked) if stacked else key)


def _substitute(value: Any, replaced: dict[int, MultiHead], visited: set[int]) -> Any:
    """`value` with its old layers replaced; `replaced` has the new ones by the ids of the old.

    Modules, lists and dicts are changed in place; tuples and other pytrees are rebuilt.
    """
    if id(value) in replaced:
        return replaced[id(value)]
    if isinstance(value, nnx.Variable) or id(value) in visited:
        return value
    if isinstance(value, nnx.Pytree | list | dict):
        visited.add(id(value))
        entries: Any
        if isinstance(value, list):
            entries = enumerate(value)
        else:
            entries = (value if isinstance(value, dict) else vars(value)).items()
        for name, entry in list(entries):
            changed = _substitute(entry, replaced, visited)
            if changed is entry:
                continue
            if isinstance(value, nnx.Pytree):
                setattr(value, name, changed)
            else:
                value[name] = changed
        return value
    leaves, structure = jax.tree.flatten(
        value,
        is_leaf=lambda leaf: (
            leaf is not value and isinstance(leaf, nnx.Pytree | nnx.Variable | list | dict)
        ),
    )
    if jax.tree_util.treedef_is_leaf(structure):
        return value
    new_leaves = [_substitute(leaf, replaced, visited) for leaf in leaves]
    same = all(new is old for new, old in zip(new_leaves, leaves, strict=True))
    return value if same else jax.tree.unflatten(structure, new_leaves)
