"""Every Triton kernel becomes machine code for AMD's gfx90a and gfx942, without a GPU.

No AMD GPU has run them. The rows are those of the support table; beside them stand decoding, wide
heads and the tiles of long sequences. The kernels of one row in `STEP` are compiled in the ordinary
tests, and all of them, with a line for each row, by

    python -m tests.test_aot_amd
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from ato_jax import choosing, tuning
from ato_jax.backend import Residuals
from ato_jax.device import Device, compiling_for
from ato_jax.ops.delta_rule.step_spec import StepSpec as DeltaRuleStepSpec
from ato_jax.ops.delta_rule.triton import decode as delta_rule_decode
from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.spec import StepSpec
from ato_jax.ops.linear_attention.triton import decode
from tests import (
    aot,
    support,
    test_aot_kernels,
    test_aot_wide,
    test_attention_paged,
    test_delta_rule_decode,
    test_linear_decode,
)

# Of the block sizes of this card some ask for the bare instruction of an exponential.
AMPERE = test_aot_kernels.DEVICES[80]
INSTINCT = Device("gpu", "AMD Instinct MI300X", None, 304, aot.AMD_SHARED_LIMIT, "gfx942")
STEP = 13
ROWS = [(op, row) for op, rows in support.ROWS.items() for row in rows]
Program = tuple[Any, tuple[Any, ...]]


def programs_of_row(op: str, row: support.Row) -> Iterator[Program]:
    """Both phases of a row, by whichever of Triton's kernels takes it; none where none does."""
    api = support.APIS[op]
    arrays, options = support.arguments(row)
    request = api.prepare(*arrays, **options)
    for name in api.OP.backends:
        module = api.OP.backend(name)
        spec = request.spec.for_backward()
        is_triton = choosing.family(name) == "triton"
        if not is_triton or any(module.unsupported(spec, phase) for phase in support.PHASES):
            continue
        config = tuning.config(op, name, module, spec, INSTINCT)
        forward = functools.partial(module.forward, spec, config)
        outputs = jax.eval_shape(forward, request.inputs)
        yield forward, (request.inputs,)
        residuals = Residuals(request.inputs, outputs)
        yield functools.partial(module.backward, spec, config), (residuals, outputs)
        return


def other_programs() -> Iterator[Program]:
    """What the rows have not: decoding, wide heads, and the tiles of long sequences."""
    for dtype in ("bfloat16", "float16"):
        step = StepSpec(features.NAMED["elu1"], True, 1.0, 1e-6)
        inputs = test_linear_decode.shapes(2, 4, 2, 64, 64, dtype)
        yield functools.partial(decode.step, step, INSTINCT), (inputs,)
        for kind, D in (("step", 128), ("channel", 100)):
            delta_rule_step = DeltaRuleStepSpec(1.0, True)
            inputs = test_delta_rule_decode.shapes(2, 4, 2, D, D, dtype, kind)
            yield functools.partial(delta_rule_decode.step, delta_rule_step, INSTINCT), (inputs,)
        yield test_attention_paged.program(dtype, 128, 128, 1, INSTINCT)
    for kept in ("int8", "float8_e4m3fn"):
        yield test_attention_paged.program("float16", 128, 128, 4, INSTINCT, cached=kept)
    for case in (test_aot_wide.HALF, test_aot_wide.LONG):
        yield from test_aot_wide.programs(case, INSTINCT)
    for op, named in (("linear_attention", "step"), ("attention", "all")):
        yield from test_aot_kernels.programs((op, "bfloat16", 64, True, named), INSTINCT)


def objects(programs: Iterator[Program]) -> list[aot.AmdObject]:
    # JAX does not trace again what it has traced for CUDA: the context is around all of it.
    with compiling_for("rocm"):
        return [
            compiled
            for function, arrays in programs
            for compiled in aot.amd_objects(function, *arrays)
        ]


def check(found: list[aot.AmdObject]) -> None:
    for compiled in found:
        assert compiled.object_bytes > 0, compiled
        assert compiled.shared_bytes <= aot.AMD_SHARED_LIMIT, compiled


@aot.requires_triton
@pytest.mark.parametrize(
    ("op", "row"), ROWS[::STEP], ids=lambda part: getattr(part, "feature", part)
)
def test_rows_compile(op: str, row: support.Row) -> None:
    check(objects(programs_of_row(op, row)))


@aot.requires_triton
def test_decoding_wide_heads_and_long_sequences_compile() -> None:
    found = objects(other_programs())
    check(found)
    assert {compiled.architecture for compiled in found} == set(aot.AMD_ARCHITECTURES)


def test_kernels_for_amd_hold_no_ptx() -> None:
    for op, named in (("attention", "-"), ("linear_attention", "step")):
        case = (op, "bfloat16", 64, True, named)
        for target, holds in (("cuda", True), ("rocm", False)):
            with compiling_for(target):
                kernels = [
                    kernel
                    for function, arrays in test_aot_kernels.programs(case, AMPERE)
                    for kernel in aot.lowered_kernels(function, *arrays, platform=target)
                ]
            assert any("inline_asm" in kernel.ttir for kernel in kernels) is holds, (op, target)


def main() -> None:
    count = 0
    programs = [(f"{op}, ", row.feature, programs_of_row(op, row)) for op, row in ROWS]
    others = ("", "decoding, wide heads, long sequences", other_programs())
    for op, name, of_row in [*programs, others]:
        found = objects(of_row)
        check(found)
        count += len(found)
        most = max((compiled.spilled_registers for compiled in found), default=0)
        print(f"{op}{name}: {len(found)} objects, at most {most} registers spilled", flush=True)
    print(f"{count} objects for {', '.join(aot.AMD_ARCHITECTURES)}")


if __name__ == "__main__":
    main()
