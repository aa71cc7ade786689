"""Compiles Mosaic GPU's kernels of the delta rule for a Hopper card on a machine that has none.

    python -m tests.aot_delta_rule '{"T": 4096, "D": 128, "decay": true}'

As `tests.aot_mosaic` does for linear attention, which says how.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
from typing import Any

from tests.aot_mosaic import (
    SCHEDULE,
    Compiled,
    _launches,
    command,
    compiled_kernels,
    compiled_on_hopper,
    printed_by,
    sharding_on_hopper,
)


@dataclasses.dataclass(frozen=True)
class Call:
    T: int
    D: int
    B: int = 4
    H: int = 16
    G: int | None = None  # H, unless it is said
    V: int | None = None  # D, unless it is said
    decay: bool = False
    channel: bool = False  # `decay` is per channel
    states: bool = False
    gradients: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def compile_call(call: Call, machine_code: bool = False) -> list[Compiled]:
    return compiled_kernels(printed_by("tests.aot_delta_rule", call, machine_code))


def launches_of(call: Call) -> collections.Counter[str]:
    """All that a call launches: kernels of Mosaic GPU as "custom-call", and XLA's own."""
    printed = printed_by("tests.aot_delta_rule", call).splitlines()
    (found,) = [line for line in printed if line.startswith(SCHEDULE)]
    return collections.Counter(json.loads(found.removeprefix(SCHEDULE)))


def main(call: Call) -> None:
    import jax

    import ato_jax

    sharding = sharding_on_hopper()
    V = call.V or call.D

    def array(heads: int, *columns: int, dtype: str = "bfloat16") -> Any:
        rows = (call.T, heads) if call.options.get("layout") != "bhtd" else (heads, call.T)
        return jax.ShapeDtypeStruct((call.B, *rows, *columns), dtype, sharding=sharding)

    q, v = array(call.G or call.H, call.D), array(call.H, V)
    numbers = array(call.H, dtype="float32")
    arrays = {"decay": numbers} if call.decay else {}
    if call.channel:
        arrays["decay"] = array(call.H, call.D, dtype="float32")
    if call.states:
        shape = (call.B, call.H, call.D, V)
        arrays["initial_state"] = jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    def forward(q: Any, k: Any, v: Any, beta: Any, arrays: dict[str, Any]) -> Any:
        return ato_jax.gated_delta_rule(
            q, k, v, beta, return_state=call.states, implementation="mosaic_gpu",
            **call.options, **arrays,
        )  # fmt: skip

    def with_gradients(cotangent: Any, *inputs: Any) -> Any:
        outputs, pull = jax.vjp(forward, *inputs)
        return outputs, pull(cotangent)

    inputs: tuple[Any, ...] = (q, q, v, numbers, arrays)
    function: Any = forward
    if call.gradients:
        cotangent = (v, arrays["initial_state"]) if call.states else v
        function, inputs = with_gradients, (cotangent, *inputs)
    text = compiled_on_hopper(function, sharding, inputs).as_text()
    print(SCHEDULE + json.dumps(_launches(text)))


def run(*arguments: str) -> None:
    command(arguments, Call, main, compile_call)


if __name__ == "__main__":
    run(*sys.argv[1:])
