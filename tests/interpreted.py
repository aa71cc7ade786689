"""The mark of tests that interpret Mosaic GPU's kernels, and what they are checked for besides."""

from __future__ import annotations

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest

from ato_jax.mosaic import program
from tests import unclipped

# A mark for a test of kernels that the newest JAX alone interprets.
newest = pytest.mark.skipif(program.interpreter is None, reason="JAX interprets from 0.12 on")


@pytest.fixture(autouse=True)
def no_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter raises where a warpgroup, or the copy engine, writes what another reads or
    writes, and no barrier says which comes first; and so does a store that nothing cuts off, where
    it may run over the end of an axis. It acts in each module that imports it."""
    monkeypatch.setattr(plgpu, "copy_smem_to_gmem", unclipped.checked(plgpu.copy_smem_to_gmem))
    if program.interpreter is not None:
        interpreter = functools.partial(program.interpreter, detect_races=True)
        monkeypatch.setattr(program, "interpreter", interpreter)
