"""Sequences with a decay per channel that are walked in pieces side by side: interpreted beside the
float64 reference, and compiled for a Hopper card without one."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests import aot_delta_rule
from tests.aot_mosaic import requires_plugin
from tests.interpreted import newest, no_races  # noqa: F401
from tests.test_delta_rule_mosaic import (
    _a_clock_for_each_copy,  # noqa: F401
    check_kernels,
    compare,
    draw,
    runs,
)


def decays(T: int, H: int, D: int, strongest: float = 0.01) -> np.ndarray:
    """So small that much of a state passes a whole piece."""
    return -np.random.default_rng(1).uniform(0, strongest, (1, T, H, D))


@newest
@pytest.mark.parametrize(
    ("sizes", "pieces", "options"),
    [
        # A block of the maps' walk has two slices: one of v and one of the identity.
        (dict(T=300, D=64, V=64), 3, {}),
        # It has one slice, of three; heads that share keys; the last piece begins with a state of
        # none but the first piece's.
        (
            dict(T=300, D=128, V=64, H=2, layout="bhtd"),
            3,
            dict(
                decay=np.swapaxes(decays(300, 2, 128), 1, 2), initial_state=None, normalize_qk=True
            ),
        ),
        # Two blocks of two slices; keys near one another, for which errors of maps weigh most.
        (dict(T=201, D=128, V=128, near=True), 4, dict(decay=decays(201, 1, 128, 0.002))),
        # One piece is walked ahead of the others, from either end.
        (dict(T=140, D=64, V=128, alike=True, weak=True), 2, {}),
        # The last piece is one step.
        (dict(T=129, D=64, V=64, near=True, weak=True), 3, dict(initial_state=None)),
        # Segments that end within pieces, and a piece of nothing but padding.
        (dict(T=200, D=64, V=64, H=2), 4, dict(segment_ids=runs(200, 20, 100), lengths=[120])),
        (dict(T=200, D=48, V=40), 4, dict(segment_ids=runs(200, 64, 130))),
    ],
)
def test_pieces_with_a_decay_per_channel(sizes: Any, pieces: int, options: Any) -> None:
    """Outputs and all gradients, with a cotangent of the last state."""
    arrays, given = draw(**sizes, channel=True)
    if not sizes.get("weak"):
        given["decay"] = decays(sizes["T"], sizes.get("H", 1), sizes["D"])
    given |= options
    for name in ("decay", "segment_ids", "lengths"):
        if name in given:
            given[name] = jnp.asarray(given[name], "float32" if name == "decay" else None)
    compare(arrays, dict(pieces=pieces), **given)


@requires_plugin
@pytest.mark.parametrize("V", [64, 128])
def test_compiled_in_pieces_with_a_decay_per_channel(V: int) -> None:
    """Blocks of the maps' walk with one slice of v's and the identity's columns, and with two."""
    call = aot_delta_rule.Call(
        B=1, T=65_500, H=16, D=128, V=V, channel=True, states=True, gradients=True
    )
    most = {"solve": 660, "maps": 0, "walk": 84, "ends": 196, "walk_backward": 192}
    most = {f"channel_{name}": spilled for name, spilled in (most | {"gradients": 2250}).items()}
    check_kernels(aot_delta_rule.compile_call(call, machine_code=True), most)
