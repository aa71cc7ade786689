"""Random calls on float8 inputs agree with the oracle by XLA, and a scale that is off is seen."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch")

from tests import random_float8  # noqa: E402

# Of calls that are alike, one each; some have padding, NaN in 8 bits.
SEEDS = (0, 24, 60, 108)


@pytest.mark.parametrize("op", random_float8.OPS)
def test_outputs_are_within_their_budgets(op: str) -> None:
    for seed in SEEDS:
        call = random_float8.draw(seed, longest=24, op=op)
        assert random_float8.check(call, "xla", random_float8.exact(call)) == []


@pytest.mark.parametrize("op", random_float8.OPS)
def test_a_scale_that_is_off_is_seen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 1%, of v: the 8 bits are the same."""
    call = random_float8.draw(SEEDS[1], longest=24, op=op)
    exact = random_float8.exact(call)
    *scales, v_scale = call.options["scales"]
    arrays = call.arrays | {"v": call.arrays["v"] * 1.01}
    options = call.options | {"scales": [*scales, v_scale * 1.01]}
    found = random_float8.run(dataclasses.replace(call, arrays=arrays, options=options), "xla")
    monkeypatch.setattr(random_float8, "run", lambda *_: found)
    assert " out" in "".join(random_float8.check(call, "xla", exact) or ())
