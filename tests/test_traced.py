"""Every path through linear attention's Triton kernels is traced with the options that change it.

Which path a kernel takes depends on the block sizes of a card, which interpreted kernels do not
have: whether a pass adds terms one tile later, stores its states, or cuts them into parts. So the
calls of `regimes.py` are grouped by what they make of a kernel's code, and one of each group is
traced, forward and backward, as on its card. Nothing is lowered.

    ATO_ALL_ROWS=1 python -m pytest tests/test_traced.py

traces each group with every pair of options, which takes a core about 5 minutes. The ordinary tests
trace it with most options at once; segments, which XLA lays out, would take most of their time.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import pytest

import ato_jax
from ato_jax.device import Device
from ato_jax.ops.linear_attention import triton
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton.calls import in_parts
from ato_jax.ops.linear_attention.triton.config import facts_of
from tests import covering, regimes
from tests.covering import Row, Rule, Space

B, T, G = 2, 16384, 2


class Path(NamedTuple):
    """The facts of a config that change a kernel's code, beside the options. Calls that share them
    are one group."""

    kind: str
    dtype: str
    delayed: bool
    stores: tuple[bool, bool]
    in_parts: bool


def path_of(spec: LinearAttentionSpec, card: Device) -> Path:
    """Where V is cut into blocks, the kernels are those of a block."""
    config = triton.default_config(spec, card)
    facts = facts_of(spec, card)
    whole = triton.blocks_of_values(spec, config, "backward") == 1
    stores = bool(config.run_rows), bool(config.backward_run_rows)
    return Path(facts.kind, facts.dtype, config.dq_delayed, stores, whole and in_parts(spec))


def paths() -> dict[Path, tuple[LinearAttentionSpec, str]]:
    """A call and a card for each."""
    found: dict[Path, tuple[LinearAttentionSpec, str]] = {}
    for _, spec in regimes.calls():
        for name, card in regimes.CARDS.items():
            found.setdefault(path_of(spec, card), (spec, name))
    return found


SEEN_TOGETHER = ("one", "both")
# The ordinary tests take each option's first value that the kind allows.
OPTIONS = Space(
    "linear_attention",
    {
        "kind": ("one", "both", "causal", "decayed", "channel", "prepared"),
        "initial_state": (True, False),
        "return_state": (True, False),
        "padding": ("kv", "both", "none"),
        "segments": ("none", "self", "cross"),
        "decay": ("step", "head", "channel", "none"),
        "normalize": (True, False),
        "feature_map": ("elu1", "silu", "tanh"),
        "group_size": (2, 1),
        "layout": covering.LAYOUTS,
        "x64": (False, True),
        "square": (True, False),
        "precision": (None, "tf32"),
    },
    rules=(
        Rule(
            ("kind", "decay"),
            lambda kind, decay: (
                (decay == "channel") != (kind in ("channel", "prepared"))
                or (decay == "none") != (kind in ("one", "causal"))
            ),
            None,
        ),
        Rule(
            ("kind", "segments"),
            lambda kind, segments: segments != "none" and kind in ("one", "channel", "prepared"),
            None,
        ),
        Rule(
            ("kind", "padding"),
            lambda kind, padding: padding != "none" and kind in ("channel", "prepared"),
            None,
        ),
        Rule(
            ("square", "kind", "initial_state", "return_state", "segments"),
            lambda square, kind, initial_state, return_state, segments: (
                not square
                and (
                    kind == "both"
                    or segments == "self"
                    or kind != "one" and (initial_state or return_state)
                )
            ),
            None,
        ),
    ),
)


@functools.cache
def rows_of(kind: str) -> list[Row]:
    """The first value of each option, then rows with all pairs of their values."""
    space = dataclasses.replace(OPTIONS, factors=OPTIONS.factors | {"kind": (kind,)})
    first: Row = {}
    for name, values in space.factors.items():
        first[name] = next(value for value in values if space.completes(first | {name: value}))
    return [first, *(row for row in covering.rows(space) if row != first)]


def trace(spec: LinearAttentionSpec, card: str, row: Row) -> None:
    """The call's outputs and all gradients, their shapes and dtypes as the arguments'."""
    H, S, D, V = G * row["group_size"], T if row["square"] else T + 500, spec.F, spec.V
    shapes = {"q": (B, T, H, D), "k": (B, S, G, D), "v": (B, S, G, V)}
    if row["decay"] in ("step", "channel"):
        shapes["decay"] = (B, S, G) if row["decay"] == "step" else (B, S, G, D)
    if row["layout"] == "bhtd":
        shapes = {name: (b, h, t, *rest) for name, (b, t, h, *rest) in shapes.items()}
    if row["decay"] == "head":
        shapes["decay"] = (G,)

    def array(name: str, shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, "float32" if name == "decay" else spec.dtype)

    floats: dict[str, Any] = {name: array(name, shape) for name, shape in shapes.items()}
    state = ato_jax.LinearState(
        jax.ShapeDtypeStruct((B, G, D, V), "float32"), jax.ShapeDtypeStruct((B, G, D), "float32")
    )
    if row["initial_state"]:
        floats["initial_state"] = state
    integers = {}
    for side in ("q", "kv"):
        if row["padding"] in (side, "both"):
            integers[f"{side}_lengths"] = jax.ShapeDtypeStruct((B,), "int32")
        if row["segments"] == "cross":
            ids = (B, T if side == "q" else S)
            integers[f"{side}_segment_ids"] = jax.ShapeDtypeStruct(ids, "int32")
    if row["segments"] == "self":
        integers["segment_ids"] = jax.ShapeDtypeStruct((B, T), "int32")
    options = {name: row[name] for name in ("return_state", "normalize", "layout", "precision")}
    options["feature_map"] = covering.MAPS.get(row["feature_map"], row["feature_map"])
    options["causal"] = row["kind"] not in SEEN_TOGETHER

    def run(floats: Any, integers: Any) -> Any:
        def call(floats: Any) -> Any:
            return ato_jax.linear_attention(
                **floats, **integers, **options, implementation="triton"
            )

        outputs, pull = jax.vjp(call, floats)
        return outputs, *pull(outputs)

    with covering.as_on_a_card({"card": CAPABILITIES[card], "x64": row["x64"]}):
        outputs, gradients = jax.eval_shape(run, floats, integers)
    out = jax.ShapeDtypeStruct((*floats["q"].shape[:3], V), spec.dtype)
    assert outputs == ((out, state) if row["return_state"] else out)
    assert gradients == floats


CAPABILITIES = {"H200": 90, "A100": 80}


def cases() -> Iterator[Any]:
    most = None if os.environ.get("ATO_ALL_ROWS") == "1" else 1
    for path, (spec, card) in paths().items():
        stores = "".join(" stored" if one else " carried" for one in path.stores)
        label = f"{path.kind} {path.dtype}{stores}{' delayed' * path.delayed}"
        label += " in parts" * path.in_parts
        for n, row in enumerate(rows_of(path.kind)[:most]):
            yield pytest.param(spec, card, row, id=f"{label}, row {n}")


@pytest.mark.lowering
@pytest.mark.parametrize(("spec", "card", "row"), list(cases()))
def test_traces(spec: LinearAttentionSpec, card: str, row: Row) -> None:
    trace(spec, card, row)
