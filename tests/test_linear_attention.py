"""Linear attention against the float64 reference: every option, forward and all gradients."""

from __future__ import annotations

from hypothesis import given

from tests import calls, numerics


def check(call: calls.Call, implementation: str, config: dict[str, int]) -> None:
    arguments, options = call.arguments()
    wanted = numerics.oracle("linear_attention", *arguments, **options)
    result = numerics.run_backends(
        implementation, implementation, wanted, forward_config=config, backward_config=config
    )
    numerics.compare(result, wanted)


@given(call=calls.linear_attention())
def test_xla(call: calls.Call) -> None:
    check(call, "xla", {})


@given(call=calls.linear_attention())
def test_xla_in_small_chunks(call: calls.Call) -> None:
    check(call, "xla", {"chunk": 4, "wide_chunk": 4})
