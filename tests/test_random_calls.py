"""The generator of random calls agrees with XLA's form, and sees a result that is off."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
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


# A float32 call of inputs of scale 30, in which two keys share the weight of some queries.
LARGE_SCORES = 26150180


def beyond(call: random_calls.Call, found: dict, exact: dict) -> set[str]:
    return {one.name for one in random_calls.compare(call, found, exact) if not one.ok}


def test_another_order_of_sums_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_calls.draw(31000380, longest=200, op="attention")
    exact, plain = random_calls.oracle(call, torch.float64), random_calls.oracle
    of_orders = [
        plain(call, torch.float32, order=order)
        for order in random_calls.orders(dataclasses.replace(call, seed=1))
    ]

    def lucky(call: random_calls.Call, dtype: object, part: object = None, order: object = None):
        """The one order that is tried first has no error."""
        return plain(call, dtype if order is not None else torch.float64, part, order)

    monkeypatch.setattr(random_calls, "oracle", lucky)
    assert [beyond(call, found, exact) for found in of_orders] == [set()] * len(of_orders)
    monkeypatch.setattr(random_calls, "orders", lambda _: [])
    assert any(beyond(call, found, exact) for found in of_orders)


def test_products_in_tf32_are_seen() -> None:
    call = random_calls.draw(LARGE_SCORES, op="attention")
    exact = random_calls.oracle(call, torch.float64)
    rounded = {
        name: np.asarray(jax.lax.reduce_precision(call.arrays[name], 8, 10)) for name in ("q", "k")
    }
    off = dataclasses.replace(call, arrays=call.arrays | rounded)
    found = random_calls.oracle(off, torch.float32)
    assert beyond(call, found, exact) == {"out", "lse", "dq", "dk", "dv"}


def test_a_key_that_is_left_out_is_seen() -> None:
    call = random_calls.draw(LARGE_SCORES, op="attention")
    exact = random_calls.oracle(call, torch.float64)
    seen = np.ones((1, 1, 1, call.sizes["S"]), bool)
    # Sorted by their weight, the key in the middle of 66.
    weighty = np.argsort(np.linalg.norm(exact["dv"][0, :, 0], axis=-1))[call.sizes["S"] // 2]
    seen[..., weighty] = False
    off = dataclasses.replace(call, options=call.options | {"mask": seen})
    found = random_calls.oracle(off, torch.float32)
    assert beyond(call, found, exact) == {"out", "lse", "dq", "dk", "dv"}


def test_results_that_underflow_are_only_bounded() -> None:
    call = random_calls.draw(0, longest=8, op="linear_attention", dtype="float32")
    exact = {"dv": np.full(call.arrays["v"].shape, 1e-36)}
    nothing = np.zeros(call.arrays["v"].shape, np.float32)
    assert random_calls.compare(call, {"dv": nothing}, exact) == []
    for wrong in (np.nan, 1.0):
        with pytest.raises(AssertionError, match="dv"):
            random_calls.compare(call, {"dv": nothing + np.float32(wrong)}, exact)
