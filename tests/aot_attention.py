"""Compiles Mosaic GPU's kernel of softmax attention for a Hopper card on a machine that has none.

    python -m tests.aot_attention '{"T": 8192, "D": 128, "options": {"causal": true}}'

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
from tests.numerics import DIFFERENTIABLE


@dataclasses.dataclass(frozen=True)
class Call:
    """`config` replaces fields of the kernel's block sizes; `options` are the call's. `arrays` are
    those of its options that are arrays, each with its shape's letters, or numbers, and dtype."""

    T: int
    D: int
    B: int = 2
    H: int = 16
    G: int | None = None  # H, unless it is said
    S: int | None = None  # T, unless it is said
    dtype: str = "bfloat16"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: bool = False


def compile_call(call: Call) -> Compiled:
    (found,) = compile_all(call)
    return found


def compile_gradients(call: Call) -> list[Compiled]:
    """The kernels of the backward pass."""
    found = compile_all(dataclasses.replace(call, gradients=True))
    return [one for one in found if one.name.startswith("attention_backward")]


def compile_all(call: Call) -> list[Compiled]:
    return compiled_kernels(printed_by("tests.aot_attention", call))


def launches_of(call: Call) -> collections.Counter[str]:
    """All that a call launches: kernels of Mosaic GPU as "custom-call", and XLA's own."""
    printed = printed_by("tests.aot_attention", call).splitlines()
    schedules = [line for line in printed if line.startswith(SCHEDULE)]
    return collections.Counter(json.loads(schedules[-1].removeprefix(SCHEDULE)))


def main(call: Call) -> None:
    import jax

    import ato_jax
    from ato_jax.ops.attention import mosaic_gpu

    rule = mosaic_gpu.default_config
    by_call = staticmethod(
        lambda spec, device: dataclasses.replace(rule(spec, device), **call.config)
    )
    mosaic_gpu._MosaicGpu.default_config = by_call
    mosaic_gpu.default_config = by_call.__func__
    sharding = sharding_on_hopper()

    B, T, H, G, S = call.B, call.T, call.H, call.G or call.H, call.S or call.T
    sizes = {"B": B, "T": T, "H": H, "G": G, "S": S, "D": call.D, "1": 1}
    of_queries, of_keys = "BTHD", "BSGD"
    if call.options.get("layout") == "bhtd":
        of_queries, of_keys = "BHTD", "BGSD"

    def array(letters: str, dtype: str) -> Any:
        shape = tuple(sizes[letter] for letter in letters)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def forward(q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
        if call.options.get("dropout_rate"):
            arrays = arrays | {"dropout_key": jax.random.key(0)}
        return ato_jax.attention(
            q, k, v, implementation="mosaic_gpu", **call.options, **arrays
        )

    def with_gradients(q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
        learned = {name: x for name, x in arrays.items() if name in DIFFERENTIABLE}
        others = {name: x for name, x in arrays.items() if name not in DIFFERENTIABLE}
        outputs, pull = jax.vjp(
            lambda q, k, v, learned: forward(q, k, v, learned | others), q, k, v, learned
        )
        return pull(outputs)

    q, k = array(of_queries, call.dtype), array(of_keys, call.dtype)
    arrays: dict[str, Any] = {name: array(*of) for name, of in call.arrays.items()}
    if call.dtype == "float8_e4m3fn":
        arrays["scales"] = tuple(array(letters, "float32") for letters in ("BH", "BG", "BG"))
    function = with_gradients if call.gradients else forward
    text = compiled_on_hopper(function, sharding, (q, k, k, arrays)).as_text()
    print(SCHEDULE + json.dumps(_launches(text)))


def run(*arguments: str) -> None:
    command(arguments, Call, main, compile_all)


if __name__ == "__main__":
    run(*sys.argv[1:])
