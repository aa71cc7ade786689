"""What is static about a call of an op, but for shapes and dtypes, and that as text.

A `Call` names the op, its arrays and its options. Its `text` is JSON that `parse` reads back, so
that a compiled or exported PyTorch program carries the call along. A feature map that is a function
cannot be written down: the text has a handle for it, which is valid in this process alone. Equal
functions share a handle.
"""

from __future__ import annotations

import functools
import json
import threading
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ato_jax.ops.linear_attention import features

# The most parsed texts, and the most checked calls, to keep: more than one model has.
KEPT = 1024

# The names of the arrays that a feature map closes over. They get no gradient.
PARAMETERS = tuple(f"feature_map.{n}" for n in range(64))
# The names of the scales of float8 arrays q, k and v. Such a call has the option `out_dtype`, too.
SCALES = ("q_scale", "k_scale", "v_scale")

Arrays = Sequence[Any]
Shape = tuple[tuple[Any, ...], str]  # sizes, which may be PyTorch's symbols, and a dtype's name
Shapes = list[Shape]
Levels = tuple[tuple[bool, ...], ...]


class Call(NamedTuple):
    """One call of an op, without shapes and dtypes.

    `arrays` are the arrays' names in their order; "state.kv" is a part of the argument "state".
    `training` says that the outputs include what only the backward pass reads. `batched` has one
    entry for each vmap around the op, innermost first: which arrays have a leading axis to map
    over. `batched_backward` is that for vmaps around the backward pass alone.
    """

    op: str
    arrays: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    training: bool
    interpreting: bool
    batched: Levels = ()
    batched_backward: Levels = ()

    @property
    def is_float8(self) -> bool:
        """Whether q, k and v are float8 arrays with scales."""
        return SCALES[0] in self.arrays

    @property
    def text(self) -> str:
        """The call as JSON."""
        return json.dumps(self._asdict(), default=_in_words, separators=(",", ":"))

    def inside(self, level: tuple[bool, ...]) -> Call:
        """This call, mapped over one more axis."""
        return self._replace(batched=(*self.batched, level))

    def inside_backward(self, level: tuple[bool, ...]) -> Call:
        """This call, its backward pass mapped over one more axis."""
        return self._replace(batched_backward=(*self.batched_backward, level))


@functools.lru_cache(maxsize=KEPT)
def parse(text: str) -> Call:
    """The call with this text.

    Raises:
      ValueError: its feature map is a function of another process.
    """
    fields = json.loads(text)
    options = tuple((name, _from_words(value)) for name, value in fields.pop("options"))
    return Call(
        **{name: _as_tuple(value) for name, value in fields.items()},
        options=options,
    )


# The handles of feature maps that are functions, and the feature maps by their handles.
_handles: dict[features.FeatureMap, str] = {}
_feature_maps: dict[str, features.FeatureMap] = {}
# Without a lock two threads could give two functions the same handle.
_counting = threading.Lock()
# Part of every handle. A program loaded in another process must not find a function there.
_process = uuid.uuid4().hex


def resolve(feature_map: Any) -> tuple[features.FeatureMap, tuple[jax.Array, ...]]:
    """A feature map that is a function, as a `FeatureMap`, and the arrays that it closes over.

    `prepare` checks later whether it fits D.

    Raises:
      ValueError: it closes over more arrays than there are names for.
    """
    is_favor = isinstance(feature_map, features.Favor)
    found, parameters, _ = features.resolve(
        feature_map, feature_map.projection.shape[1] if is_favor else 1
    )
    if len(parameters) > len(PARAMETERS):
        raise ValueError(
            f"feature_map must close over at most {len(PARAMETERS)} arrays, got {len(parameters)}"
        )
    return found, parameters


def _in_words(value: Any) -> Any:
    if callable(value) and not isinstance(value, features.FeatureMap):
        value, _ = resolve(value)
    if isinstance(value, features.FeatureMap):
        return {"feature_map": _handle(value)}
    if isinstance(value, jax.lax.Precision):
        return value.name.lower()
    if hasattr(value, "item"):
        return value.item()
    raise ValueError(f"{value!r} cannot be an option of a compiled call")


def _handle(feature_map: features.FeatureMap) -> str:
    with _counting:
        handle = _handles.get(feature_map)
        if handle is None:
            handle = f"{_process}-{len(_handles)}"
            _feature_maps[handle] = feature_map
            _handles[feature_map] = handle
    return handle


def _from_words(value: Any) -> Any:
    if not isinstance(value, dict):
        return _as_tuple(value)
    handle = value["feature_map"]
    if handle not in _feature_maps:
        raise ValueError(
            "feature_map is a function of the process that exported this program, and does not "
            "travel with it: export with a feature map that has a name"
        )
    return _feature_maps[handle]


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
