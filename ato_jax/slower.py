"""Options of linear attention that take at least twice their base case's time for each byte.

    factor = (time / bytes) of a call with the option / (time / bytes) of its base case

The base case is the plain call, unless `Option.beside` names another one; bytes are those of every
input and output, once. `slower.toml` has the least and the most factor of each option among the
sizes that the suite `cliffs` of the benchmarks measures, and the backend that ran there. `python -m
benchmarks report` writes it. `explain` prints it for a call of such an option on a card of the same
architecture and by the same backend. Other calls never read the file.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from ato_jax import choosing, dispatch
from ato_jax.backend import Spec

NAME = "slower.toml"
# From this factor on an option is in the table.
LEAST = 2.0
# The compute capability of an H200, on which the table was measured.
CAPABILITY = 9, 0
FORWARD, TRAINING = "forward", "training"
# Between the backends of the two passes of training, where these differ.
BOTH = " + "


@dataclasses.dataclass(frozen=True)
class Option:
    """Calls that one entry of `slower.toml` stands for: `when` has the spec's traits, and of sizes
    the least and the most.
    """

    name: str
    when: Mapping[str, Any]
    beside: str = "the plain call"

    def holds(self, traits: Mapping[str, Any]) -> bool:
        return all(
            value[0] <= traits[name] <= value[1] if name in ("D", "V") else traits[name] == value
            for name, value in self.when.items()
        )


def _when(columns: tuple[int, int], /, **traits: Any) -> dict[str, Any]:
    """A plain call in bfloat16 but for these traits; both D and V are within `columns`."""
    plain = {"decay": "none", "segments": "none", "features": "elementwise", "precision": "exact"}
    return {"dtype": "bfloat16", "D": columns, "V": columns, **plain, **traits}


_CAUSAL, _BIDIRECTIONAL = {"causal": True}, {"causal": False}
_FLOAT32 = {"dtype": "float32", **_CAUSAL}
_FAVOR = {"features": "projected"}
_NARROW, _WIDE = (f"the plain call in heads of {D} columns" for D in (64, 128))
# No call has two of them.
OPTIONS = (
    Option("FAVOR+, causal", _when((1, 128), **_FAVOR, **_CAUSAL)),
    Option("FAVOR+, bidirectional", _when((1, 128), **_FAVOR, **_BIDIRECTIONAL)),
    Option("exact float32, causal", _when((1, 128), **_FLOAT32)),
    Option("float32 in TF32, causal", _when((1, 128), **_FLOAT32, precision="tf32")),
    Option("heads of 32 columns, causal", _when((32, 32), **_CAUSAL), _NARROW),
    Option("heads of 72 columns, causal", _when((72, 72), **_CAUSAL), _NARROW),
    Option("heads of 72 columns, bidirectional", _when((72, 72), **_BIDIRECTIONAL), _NARROW),
    Option("heads of 129 to 256 columns, causal", _when((129, 256), **_CAUSAL), _WIDE),
    Option("heads above 256 columns, causal", _when((257, 8192), **_CAUSAL), _WIDE),
    Option("heads above 256 columns, bidirectional", _when((257, 8192), **_BIDIRECTIONAL), _WIDE),
    Option(
        "a decay per channel in heads of 129 to 256 columns, causal",
        _when((129, 256), **_CAUSAL, decay="channel"),
        "the same decay in heads of 128 columns",
    ),
    Option(
        "a decay per step, bidirectional",
        _when((1, 128), **_BIDIRECTIONAL, decay="step"),
        "the causal call",
    ),
    Option(
        "segments in heads of up to 64 columns, bidirectional",
        _when((1, 64), **_BIDIRECTIONAL, segments="self"),
    ),
)


@functools.cache
def table() -> dict[str, Any]:
    """`slower.toml`: the card, and by option what was measured of each phase."""
    read = tomllib.loads((resources.files("ato_jax") / NAME).read_text())
    return {"card": read["card"], "options": {one["name"]: one for one in read["options"]}}


def option_of(traits: Mapping[str, Any]) -> Option | None:
    """The option of a call with these traits, if it has one."""
    return next((one for one in OPTIONS if one.holds(traits)), None)


def measured(spec: Spec) -> tuple[Option, dict[str, Any]] | None:
    """The option of a call that is in the table, and its entry."""
    option = option_of(spec.traits())
    entry = option and table()["options"].get(option.name)
    return (option, entry) if option and entry else None


def _times(entry: dict[str, Any]) -> str:
    least, most = entry["least"], entry["most"]
    return f"{most} times" if least == most else f"{least} to {most} times"


def told(found: dispatch.Explanation) -> dispatch.Explanation:
    """The explanation, with a note where the call is in the table."""
    if found.device.capability != CAPABILITY or (known := measured(found.spec)) is None:
        return found
    option, entry = known
    parts = []
    for choices, phase, named in (
        ((found.forward,), FORWARD, "forward"),
        ((found.recorded, found.backward), TRAINING, "with gradients"),
    ):
        ran = entry.get(phase)
        backends = dict.fromkeys(choosing.family(one.backend) if one else "" for one in choices)
        if ran and BOTH.join(backends) == ran["backend"]:
            parts.append(f"{_times(ran)} {named}")
    if not parts:
        return found
    note = (
        f"{option.name}: for each byte, {' and '.join(parts)} as long as {option.beside} "
        f"(large calls on one {table()['card']})"
    )
    return dataclasses.replace(found, note=note)
