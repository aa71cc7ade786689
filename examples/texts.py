"""What the character language model is trained on: Python's own sources, and recall."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]  # tokens and targets [B, T]
UNCOUNTED = -1  # a target that is no task


def standard_library(most: int) -> tuple[np.ndarray, np.ndarray]:
    """The text for training and that for validation, at `most` so many characters together."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(
        source for source in library.rglob("*.py") if "-packages" not in source.parent.as_posix()
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, source in enumerate(sources):
        text = source.read_text(encoding="utf-8", errors="ignore").encode("ascii", "ignore")
        parts[number % 10 == 9].append(text)
    train, validation = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train[: most * 9 // 10].astype(np.int32), validation[: most // 10].astype(np.int32)


def text_batches(text: np.ndarray, B: int, T: int, seed: int) -> Iterator[Batch]:
    """Endless: pieces of the text from anywhere in it, and for each token the next."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - T, (B, 1))
        pieces = text[starts + np.arange(T + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


def recall_batches(B: int, pairs: int, symbols: int, seed: int) -> Iterator[Batch]:
    """Endless: k1 v1 k2 v2 ..., then the same pairs in another order, where each k asks for its v.

    No key comes twice among the pairs. Keys are the tokens from 0, values those from `symbols`.
    """
    random = np.random.default_rng(seed)
    while True:
        keys = random.permuted(np.tile(np.arange(symbols), (B, 1)), axis=1)[:, :pairs]
        values = symbols + random.integers(0, symbols, (B, pairs))
        told = np.stack([keys, values], axis=-1)  # [B, pairs, 2]
        order = random.permuted(np.tile(np.arange(pairs), (B, 1)), axis=1)
        asked = np.take_along_axis(told, order[..., None], axis=1)
        targets = np.full((B, 2 * pairs, 2), UNCOUNTED)
        targets[:, pairs:, 0] = asked[..., 1]
        tokens = np.concatenate([told, asked], axis=1)
        yield tokens.reshape(B, -1).astype(np.int32), targets.reshape(B, -1).astype(np.int32)
