"""What the tests of benchmarks share: flags that are parsed, and the facts of a file of figures."""

from __future__ import annotations

import pytest
from absl import flags

FACTS = {"device": "a card", "ato_jax": "1", "jax": "2", "torch": "3", "bandwidth": 1e9}


@pytest.fixture(autouse=True)
def parsed_flags() -> None:
    """It acts in each module that imports it."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmarks"])
