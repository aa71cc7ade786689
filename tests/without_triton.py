"""Hides Pallas's lowering to Triton, as a JAX without it would be.

    ATO_HIDE_TRITON=1 python -m pytest

runs the ordinary tests so; those that need a Triton kernel are skipped.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any

HIDDEN = ("jax.experimental.pallas.triton", "jax._src.pallas.triton")


class _Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if any(name == hidden or name.startswith(f"{hidden}.") for hidden in HIDDEN):
            raise ModuleNotFoundError(f"No module named {name!r}, which is hidden", name=name)


def hide() -> None:
    """Before anything has imported it."""
    found = [name for name in sys.modules if name.startswith(HIDDEN)]
    assert not found, found
    sys.meta_path.insert(0, _Hidden())
