"""Documents of wide heads, whose rows see both sides, by the Hopper kernels that store the sums
over each document once (`document_states.py`): interpreted beside the float64 reference.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear_mosaic import OP, PLAIN, against_the_reference, draw, options_of

from ato_jax.ops.linear_attention.mosaic_gpu import document_states
from ato_jax.ops.linear_attention.scans import borders
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

# The numbers of rows of documents; a run has 256 rows, and a chunk 64.
LENGTHS = {
    # The last row of a run and the first one of the next, single rows around both.
    "two rows across": (254, 1, 2, 1, 1, 61, 2, 62, 128, 64),
    "single rows": (1,) * 130 + (126, *(1,) * 200, 56, 3, 4),
    "whole runs": (256, 512, 64, 64, 128, 1),
    "inside": (100, 20, 300, 30, 5, 57, 256 * 2 - 511),
    "one": (513,),
    "chunks": (64, 128, 64, 192, 64, 3),
}


def ids_of(T: int, *names: str) -> jax.Array:
    """[B, T]: a batch entry for each name; the last document is as long as it has to be."""
    found = []
    for name in names:
        lengths = LENGTHS[name]
        rows = np.repeat(np.arange(len(lengths)), lengths)
        found.append(np.pad(rows, (0, max(0, T - len(rows))), mode="edge")[:T])
    return jnp.asarray(np.stack(found))


def wanted_of(
    D: int,
    T: int,
    *names: str,
    H: int = 1,
    G: int = 1,
    layout: str = "bthd",
    dtype: str = "bfloat16",
    scale: float = 1.0,
    **options: Any,
) -> numerics.Oracle:
    q, k, v = draw(len(names), T, H, G, layout, D=D)
    q, k = (x.astype(jnp.float32) * scale for x in (q, k))
    arrays = (x.astype(dtype) for x in (q, k, v))
    options = options_of(len(names), G, layout, False, D) | options
    return numerics.oracle(OP, *arrays, causal=False, segment_ids=ids_of(T, *names), **options)


@newest
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "D, T, names, options",
    [
        (144, 576, ("two rows across",), {}),
        (136, 520, ("single rows",), {}),
        (136, 520, ("two rows across", "inside"), {"H": 2}),
        (144, 776, ("whole runs",), {"layout": "bhtd", "scale": 0.01}),
        (144, 513, ("inside",), {"feature_map": "silu"} | PLAIN),
        (144, 515, ("chunks",), {"feature_map": "relu", "scale": 10.0}),
    ],
)
def test_beside_the_reference(
    D: int, T: int, names: tuple[str, ...], options: dict[str, Any], dtype: str
) -> None:
    wanted = wanted_of(D, T, *names, dtype=dtype, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@pytest.mark.parametrize("T", [1000, 1024, 1025, 577])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_find_their_document(T: int, seed: int) -> None:
    """Each row finds one place, that of the last row of its document, or is inside a run."""
    generator = np.random.default_rng(seed)
    lengths = generator.choice([1, 2, 5, 63, 64, 65, 128, 200, 256, 300], 60)
    lengths = lengths[generator.permutation(60)]
    ids = np.repeat(np.arange(60), lengths)[:T]
    spec: Any = numerics.prepare(OP, *draw(1, T, 1, 1, D=144), causal=False)[0].spec
    deal: Any = PieceOf(T)
    found = document_states.of_rows(spec, borders._by_xla(spec, deal, jnp.asarray(ids)[None]))
    first, behind = (np.searchsorted(ids, ids, side=side) for side in ("left", "right"))
    runs, chunks = np.asarray(found.documents.runs[0]), np.asarray(found.documents.chunks[0])
    steps, pairs = np.asarray(found.steps[0]), runs[:, document_states.PAIRS].copy()
    for row in range(T):
        for size, of_reads in ((256, found.reads), (64, found.reads_of_chunk)):
            end, start = (behind[row] - 1) // size, first[row]
            reads = [float(side[0, row]) for side in of_reads]
            place = row // size
            is_short = size == 256 and start % 256 == 0 and behind[row] - start <= 64
            if start > end * size or is_short:
                assert reads == [0, 0]
                if size == 256:
                    assert max(int(found.first[0, row]), 0) == start
                    assert min(int(found.last[0, row]), T - 1) == behind[row] - 1
                    assert runs[place, document_states.PAIRS]
                    pairs[place] = 0
                continue
            assert sum(reads) == 1
            side = reads.index(1)
            if size == 256:
                assert runs[place, document_states.STATE + side] == end
                assert runs[place, document_states.VECTOR + side] == (behind[row] - 1) // 64
                assert found.first[0, row] > T
            else:
                assert chunks[place, side] == end
    assert not pairs.any()
    ends = steps >> document_states.END & 0xFF
    where = np.nonzero(ends)[0]
    assert [c * 64 + ends[c] for c in where] == [behind[c * 64] for c in where]
    stored = np.nonzero(steps >> document_states.STORES & 1)[0] // 4
    has_state = {(behind[r * 256] - 1) // 256 for r in range(-(-T // 256))}
    assert sorted(has_state) == sorted(stored.tolist())


class PieceOf:
    """A sequence in one piece."""

    pieces = 1

    def __init__(self, T: int) -> None:
        self.rows = -(-T // 256) * 256
