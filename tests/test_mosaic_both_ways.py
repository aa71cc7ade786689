"""A decay between a query and the keys on either side of it, by the Hopper kernels interpreted."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import test_linear_channel as channel
from test_linear_mosaic import OP, against_the_reference, draw

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import both_ways
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


def test_chunks_from_the_end_are_the_sequence_once() -> None:
    """T ends within a chunk, and the last piece is shorter than the others."""
    deal = both_ways.from_the_end(mosaic.Deal(1, 1, 300, 128, 3, 1), 300)
    items = [mosaic.Item(0, 0, 0, piece, 128 * piece, 2, 0, deal.end) for piece in range(3)]
    chunks = [(item.number_of(n), item.rows(n).start) for item in items for n in range(2)]
    assert [(int(n), start) for n, start in chunks[:5]] == [(n, 64 * n) for n in range(4, -1, -1)]
    assert int(items[0].rows_within(0, np.array([300]))) == 300 - 256


@newest
def test_every_query_sees_every_key_through_a_decay() -> None:
    """Two heads in a tile, and two pieces; steep chunks on either side of a mild one, and a last
    one that T cuts. The first step's decay is between no two rows."""
    T = 131
    decay = channel.draw_gates("mild", 1, T, 2).at[:, jnp.array([0, 40, T - 2])].set(-50.0)
    wanted = numerics.oracle(OP, *draw(1, T, 2, 2, D=64), decay=decay)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)
