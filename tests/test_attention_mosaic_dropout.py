"""Dropout's bits on Hopper, which come by fewer instructions than the hash in `spec.py` says."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ato_jax.ops.attention.mosaic_gpu import dropout
from ato_jax.ops.attention.spec import dropout_keep_in_row

INVERSES = tuple(pow(factor, -1, 2**32) for _, factor in dropout.ROUNDS)


def before_the_hash(x: np.ndarray) -> np.ndarray:
    """The words whose hash ahead of its last shift is x."""
    for (by, _), inverse in zip(reversed(dropout.ROUNDS), reversed(INVERSES), strict=True):
        x = x * np.uint32(inverse)
        x = x ^ (x >> np.uint32(by)) ^ (x >> np.uint32(2 * by) if 2 * by < 32 else np.uint32(0))
    return x


@pytest.mark.parametrize(
    "rate", [2**-25, 2**-24, 0.1, 0.3, 1 / 3, 0.5, 0.75, 1 - 2**-24, 1 - 2**-26]
)
def test_bits(rate: float) -> None:
    """Random words, and all whose upper half is the threshold's, where the lower half decides."""
    threshold = round(rate * 2**24)
    upper = np.uint32(min(threshold, 2**24 - 1) >> 8 << 16)
    words = before_the_hash(upper | np.arange(2**16, dtype=np.uint32))
    drawn = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32)
    rows = jnp.asarray(np.concatenate([words, drawn]).astype(np.int32))
    wanted = dropout_keep_in_row(rate, rows, jnp.int32(0))
    assert (dropout.keep(rate, rows, jnp.int32(0)) == wanted).all()
