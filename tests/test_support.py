"""The support table is up to date, and what it promises runs."""

from __future__ import annotations

from typing import Any

import pytest

import ato_jax
from ato_jax import choosing
from tests import numerics, support

REGENERATE = "support has changed: run `python -m tests.support` and look at what it changed"


def test_golden_file() -> None:
    assert support.GOLDEN.read_text() == support.golden(), REGENERATE


def test_table_in_the_documentation() -> None:
    text = support.TABLE.read_text()
    assert support.MARKERS.search(text), "docs/support.md lacks the support markers"
    assert text == support.with_table(text), REGENERATE


def test_every_backend_answers_for_both_phases() -> None:
    for op, rows in support.ROWS.items():
        for row in rows:
            for name, of_phase in support.reasons(op, row).items():
                assert set(of_phase) == set(support.PHASES), name
                assert all(reason is None or reason for reason in of_phase.values()), name


# Every so many rows, among them one that Triton refuses, so that interpreting stays short.
SAMPLE = [
    (op, row)
    for op, rows in support.ROWS.items()
    for row in rows[7::8]
    if row.sizes.get("D", 0) <= 128
]


@pytest.mark.lowering
@pytest.mark.parametrize(("op", "row"), SAMPLE, ids=[f"{op}-{row.feature}" for op, row in SAMPLE])
def test_supported_rows_run(op: str, row: support.Row) -> None:
    """Triton, interpreted, where it says yes; a clear refusal where it says no."""
    arrays, options = support.arguments(row)
    function = getattr(ato_jax, op)
    found = support.reasons(op, row)["triton"]
    with ato_jax.interpret():
        explained = ato_jax.explain(op, *arrays, implementation="triton", **options)
        if found["forward"] is not None:
            assert explained.forward is None
            with pytest.raises(ato_jax.UnsupportedError) as refusal:
                function(*arrays, implementation="triton", **options)
            assert found["forward"] in str(refusal.value)
            return
        assert explained.forward is not None
        assert choosing.family(explained.forward.backend) == "triton"
        wanted = numerics.oracle(op, *arrays, **options)
        result: Any = numerics.run(op, "triton", *arrays, cotangents=wanted.cotangents, **options)
    numerics.compare(result, wanted)
