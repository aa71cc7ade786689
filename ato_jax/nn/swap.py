"""Other attention in a model that is built already.

    replace_attention(model, ato_jax.nn.Attention)
    replace_attention(model, ato_jax.nn.LinearAttention, causal=True)

Each nnx.MultiHeadAttention in the model becomes a layer of this package around the very same
projections: the modules `query`, `key`, `value`, `out`, `query_ln` and `key_ln` and the stream of
random keys are those of the old layer, not copies. Paths and parameters stay what they were, so
that the optimizer's state and checkpoints still fit. A stack of layers with leading axes (made by
nnx.vmap, run by nnx.scan) is one layer here, and its axes stay.

What the new layer cannot do is said, with the layer's path, before anything is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from ato_jax.nn.common import MultiHead, takes
from ato_jax.nn.gated import GatedLinearAttention

Path = tuple[Any, ...]  # names of attributes, keys and indices

# Constructor arguments that a layer keeps as attributes of the same name.
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
# Those that may be decided anew, as the projections have no part in them. All others of
# nnx.MultiHeadAttention's are theirs; `attention_fn` the layers refuse themselves.
FREE = ("broadcast_dropout", "dropout_rate", "deterministic", "decode", "keep_rngs", "attention_fn")
# Those that also make the gates of a gated layer, which are new.
OF_GATES = ("kernel_init", "bias_init", "kernel_metadata", "bias_metadata")
SHARED = ("query", "key", "value", "out", "query_ln", "key_ln", "rngs")


def replace_attention(
    model: nnx.Module,
    cls: Any,
    *,
    where: nnx.filterlib.Filter = ...,
    rngs: nnx.Rngs | None = None,
    **options: Any,
) -> tuple[Path, ...]:
    """Replaces, in place, the nnx.MultiHeadAttention layers of a model.

    Args:
      model: any nnx.Module; layers are found in attributes, lists, dicts, tuples and modules.
      cls: the class to replace them by: `Attention`, `LinearAttention`, ...
      where: which of them, an nnx filter: a function of (path, layer), nnx.PathContains("encoder"),
        ...; all unless given.
      rngs: draws what the new layers have and the old ones do not: Performer's projection, the
        parameters that GatedLinearAttention adds, keys for dropout where there was none.
      options: arguments of the new layers' constructor that the old ones leave open, or that they
        decide otherwise, as `causal=True`. What the projections are made of is theirs and cannot
        be changed: sizes, dtypes, precision, initialisers, metadata. GatedLinearAttention alone
        takes `kernel_init`, `bias_init` and their metadata, for its gates.

    Returns:
      The paths of the replaced layers; a layer that the model holds twice counts once.

    Only nnx.MultiHeadAttention itself is replaced, with Flax's own attention function: a subclass
    or an `attention_fn` does something of its own, which would be lost, and is refused unless
    `where` leaves it out. Layers of this package are left alone.

    GatedLinearAttention adds parameters of its own, its gates and its norm, to those that the
    model had: checkpoints and an optimizer's state from before lack them.
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
    cls: Any,
    *,
    rngs: nnx.Rngs | None = None,
    **options: Any,
) -> MultiHead:
    """A layer of class `cls` around the projections of `layer`, which it shares, not copies.

    Args:
      layer, cls, rngs, options: as in `replace_attention`; GatedLinearAttention adds parameters
        here, too.
    """
    if not (inspect.isclass(cls) and issubclass(cls, MultiHead)):
        raise ValueError(
            "cls must be a layer of ato_jax.nn with nnx.MultiHeadAttention's parameters, a class, "
            f"got {cls!r}"
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
    # A layer that drops has a stream of keys unless it was told to keep none.
    arguments.setdefault("keep_rngs", layer.rngs is not None or not layer.dropout_rate)

    def build(rngs: nnx.Rngs) -> MultiHead:
        return cls(**arguments, rngs=rngs)

    # Shapes alone: most of what the constructor draws is there already.
    new = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    expected = new.query.kernel.shape
    shared = set(SHARED)
    if layer.rngs is None or new.rngs is None:
        shared.remove("rngs")  # one of them drops nothing or keeps no stream
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
    """The variables at `paths` of a new layer, or of a stack of layers with these leading axes."""

    def draw(key: jax.Array) -> list[jax.Array]:
        variables = dict(nnx.to_flat_state(nnx.state(build(nnx.Rngs(key)))))
        return [variables[path].get_value() for path in paths]

    for _ in stacked:
        draw = jax.vmap(draw)
    # Inside jit the projections are not drawn, as nobody reads them.
    return jax.jit(draw)(jax.random.split(key, stacked) if stacked else key)


def _substitute(value: Any, replaced: dict[int, MultiHead], visited: set[int]) -> Any:
    """`value` with the replaced layers in it, by the id of the old ones.

    Modules, lists and dicts are changed in place, tuples and other pytrees are built anew.
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
