"""A fixture for tests that replace functions of other packages for the whole process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


@pytest.fixture
def delta_rule_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the test transformers' modules have the functions again that
    `ato_torch.replace_delta_rule` replaced in them."""
    from ato_torch import hugging_face  # here, since not every environment has PyTorch

    delta_rules = hugging_face.delta_rules

    def noted(layers: Iterable[Any]) -> list[tuple[Any, str, Callable[..., Any]]]:
        found = delta_rules(layers)
        for place, name, _ in found:
            monkeypatch.setattr(place, name, getattr(place, name))
        return found

    monkeypatch.setattr(hugging_face, "delta_rules", noted)
