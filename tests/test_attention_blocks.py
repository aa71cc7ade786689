"""The rules for the block sizes of softmax attention's Triton kernels give the golden print."""

from __future__ import annotations

from tests import attention_blocks

REGENERATE = "block sizes have changed: run `python -m tests.attention_blocks`, look at the diff"


def test_golden_print() -> None:
    assert attention_blocks.PATH.read_text() == attention_blocks.text(), REGENERATE
