"""Linear attention in plain JAX against the float64 reference, and one step at a time."""

from __future__ import annotations

from hypothesis import given

from tests import calls, numerics


def check(call: calls.Call, config: dict[str, int]) -> None:
    arguments, options = call.arguments()
    wanted = numerics.oracle("linear_attention", *arguments, **options)
    result = numerics.run_backends(
        "xla", "xla", wanted, forward_config=config, backward_config=config
    )
    numerics.compare(result, wanted)


@given(call=calls.linear_attention())
def test_one_chunk(call: calls.Call) -> None:
    check(call, {})


@given(call=calls.linear_attention())
def test_many_chunks(call: calls.Call) -> None:
    check(call, {"chunk": 4, "wide_chunk": 8})
