"""Sweeps that a .yaml describes: all combinations of its values, each a case.

    op: [linear, softmax]                   or one of them
    batch: [1, 4]                           B
    tokens: [256, 1024]                     T, and S
    models: [{width: 768, heads: 12}]       H, and D = width / heads
    dtype: bfloat16
    causal: false                           or true, or both
    phases: [forward, forward + backward]
    peers: [SDPA default]                   by their whole names; this library is always there

Every value may be one or a list; `dtype`, `causal`, `phases` and `peers` may be left out. What is
not known is refused.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import attention_jax, attention_torch, cases, linear_jax, linear_torch
from benchmarks.cases import Case
from benchmarks.results import ResultsError
from benchmarks.side_by_side import Contest

FOLDER = Path(__file__).parent
CONTENDERS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "linear": (linear_jax.CONTENDERS, linear_torch.CONTENDERS),
    "softmax": (attention_jax.CONTENDERS, attention_torch.CONTENDERS),
}
OURS = "ato_jax"


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _model(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == {"width", "heads"}
        and all(map(_number, value.values()))
        and value["width"] % value["heads"] == 0
    )


def _peer(value: Any) -> bool:
    return any(value in names for both in CONTENDERS.values() for names in both)


# What each key's values have to be, in words and as a test, and what they are where it is absent.
KEYS: dict[str, tuple[str, Callable[[Any], bool], list[Any] | None]] = {
    "op": ("linear or softmax", CONTENDERS.__contains__, None),
    "batch": ("whole numbers above 0", _number, None),
    "tokens": ("whole numbers above 0", _number, None),
    "models": ("{width: W, heads: H}, W a multiple of H", _model, None),
    "dtype": (" or ".join(cases.ITEMSIZES), cases.ITEMSIZES.__contains__, ["bfloat16"]),
    "causal": ("true or false", lambda value: isinstance(value, bool), [False]),
    "phases": (" or ".join(cases.PHASES), cases.PHASES.__contains__, list(cases.PHASES)),
    "peers": ("names of peers", _peer, []),
}


def contests(path: Path) -> tuple[Contest, ...]:
    """One for each op."""
    told = _checked(path, _loaded(path))
    phases = tuple(told["phases"])
    return tuple(_contest(op, _cases(op, told), told["peers"], phases) for op in told["op"])


def _loaded(path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ResultsError("A --config is YAML: pip install '.[bench]'") from error
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def _checked(path: Path, told: Any) -> dict[str, list[Any]]:
    """A list of values for each key."""
    if not isinstance(told, Mapping):
        raise ResultsError(f"{path} has no keys; known are {', '.join(KEYS)}")
    for key in told:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(KEYS)}"
            raise ResultsError(f"{path} has the unknown key {key!r}: {hint}")
    found = {}
    for key, (words, fits, absent) in KEYS.items():
        values = told.get(key, absent)
        if values is None:
            raise ResultsError(f"{path} lacks {key}: {words}")
        found[key] = values if isinstance(values, list) else [values]
        for value in found[key]:
            if not _hashable_fits(fits, value):
                raise ResultsError(f"{path}: {key} must be {words}, got {value!r}")
    return found


def _hashable_fits(fits: Callable[[Any], bool], value: Any) -> bool:
    try:
        return fits(value)
    except TypeError:  # a list or mapping where a name is looked up
        return False


def _cases(op: str, told: Mapping[str, list[Any]]) -> Iterable[Case]:
    axes = (told[key] for key in ("models", "tokens", "batch", "dtype", "causal"))
    for model, T, B, dtype, causal in itertools.product(*axes):
        H = model["heads"]
        yield Case(op, B, H, T, model["width"] // H, dtype, causal)


def _contest(
    op: str, of_op: Iterable[Case], peers: Iterable[str], phases: tuple[str, ...]
) -> Contest:
    wanted = (OURS, *peers)
    in_jax, in_torch = (
        {name: one for name, one in contenders.items() if name in wanted}
        for contenders in CONTENDERS[op]
    )
    both = tuple(of_op)
    return Contest({"gpu": both, "cpu": both}, in_jax, in_torch, phases, turns=1)
