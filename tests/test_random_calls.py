"""The generator of random calls agrees with XLA's form, and sees a result that is off."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests import random_calls  # noqa: E402

SEEDS = (3, 15, 40)


def calls(op: str) -> list[random_calls.Call]:
    return [random_calls.draw(seed, longest=24, op=op, dtype="float32") for seed in SEEDS]


@pytest.mark.parametrize("op", random_calls.OPS)
def test_results_are_within_their_budgets(op: str) -> None:
    for call in calls(op):
        exact = random_calls.oracle(call, torch.float64)
        assert random_calls.check(call, "xla", exact) == []


def test_a_result_that_is_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    call = calls("attention")[0]
    found = random_calls.run(call, "xla")
    monkeypatch.setattr(random_calls, "run", lambda *_: {**found, "dv": found["dv"] * 1.01})
    exact = random_calls.oracle(call, torch.float64)
    (line,) = random_calls.check(call, "xla", exact) or ()
    assert "xla dv" in line and f"seed={call.seed}" in line
