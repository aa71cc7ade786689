"""The mark and the race check of tests that interpret Mosaic GPU's kernels."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from ato_jax.mosaic import program


def newest(test: Any) -> Any:
    """A mark for a test of kernels that the newest JAX alone interprets."""
    reason = "JAX interprets from 0.12 on"
    return pytest.mark.skipif(program.interpreter is None, reason=reason)(test)


@pytest.fixture(autouse=True)
def no_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter raises where a warpgroup, or the copy engine, writes what another reads or
    writes, and no barrier says which comes first. It acts in each module that imports it."""
    if program.interpreter is not None:
        interpreter = functools.partial(program.interpreter, detect_races=True)
        monkeypatch.setattr(program, "interpreter", interpreter)
