"""Softmax attention against the float64 reference: every option, forward and all gradients."""

from __future__ import annotations

from hypothesis import given

from tests import calls, numerics

SMALL = {"xla": ({}, {"block_t": 4, "heads": 1, "batch": 1})}


def check(call: calls.Call, implementation: str, config: dict[str, int]) -> None:
    arguments, options = call.arguments()
    wanted = numerics.oracle("attention", *arguments, **options)
    result = numerics.run_backends(
        implementation, implementation, wanted, forward_config=config, backward_config=config
    )
    numerics.compare(result, wanted)


@given(call=calls.attention())
def test_xla(call: calls.Call) -> None:
    check(call, "xla", {})


@given(call=calls.attention())
def test_xla_in_small_blocks(call: calls.Call) -> None:
    check(call, "xla", {"block_t": 4, "heads": 1, "batch": 1})
