"""Where the rows of each run find the sums over their document, for `wide_states.py` and
`wide_runs.py`: calls with segments in which every query sees its whole segment, without a decay.

The walk goes from the first chunk to the last. It stores the sum over a document once, in the place
of the run or chunk in which the document ends, if the document contains that run's, or chunk's,
first row:

    S of run r      the sum over the document that contains the first row of r and ends in r
    z of chunk c    the same for chunks

So a document's state is stored once, unless the document lies inside one run behind the run's first
row: such a document is *inner*, and its rows are multiplied pair by pair. In a run at most two
documents are not inner: the first one, and the last one if it goes on behind the run. A run
reads the state of the first one, and that of the last one only if there is one. The same holds for
z in chunks.

A document that begins at a run's first row and ends in the run's first chunk is inner, too: its
state is stored, but its rows multiply it by 0. In the gradients of a few rows that see only each
other most terms cancel; in those of a single row all do. The rounding of a stored state would be
large beside what is left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import wide_factors
from ato_jax.ops.linear_attention.scans.borders import OfSequence
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN, RUN, C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# The numbers of a chunk, a byte each at this place of its number in `OfRows.steps`, and a bit for
# each of the last three.
#   END      how many rows belong to the document of its first row, if that ends in it; else 0
#   BEGIN    the first row in the chunk of the document of its last row
#   KEEPS    1 if no document begins in the chunk
#   GOES_ON  1 if none begins at the chunk's first row
#   STORES   1 if END is the end of a document that contains the first row of the chunk's run
END, BEGIN, KEEPS, GOES_ON, STORES = 0, 8, 16, 17, 18
# The numbers of a run in `Documents.runs`. For each side, 0 of the run's first document and 1 of
# its last one, STATE is the run with the document's S, and VECTOR the chunk with its z. STATE is -1
# where the last document does not go on behind the run or is the first one, too; VECTOR then
# repeats that of side 0. PAIRS is 1 if the run has inner documents.
STATE, VECTOR, PAIRS = 0, 2, 4


class Documents(NamedTuple):
    """The int32 arrays that tell the kernels of `wide_runs.py` where states and vectors lie."""

    runs: Any  # [B, runs, 5]
    chunks: Any  # [B, chunks up to a whole run, 2]: VECTOR of the chunk's first and last document


class OfRows(NamedTuple):
    """For `wide_heads.py`: the walk's and the passes' arrays. Rows are those up to a whole run."""

    steps: jax.Array  # [B, chunks] int32
    documents: Documents
    # [B, rows] float32 for each side: 1 where the row's document is that of the side; of runs, and
    # of chunks.
    reads: tuple[jax.Array, jax.Array]
    reads_of_chunk: tuple[jax.Array, jax.Array]
    # [B, rows] int32: the first and the last row of each row's document, if it is inner; otherwise
    # `first` lies behind all rows.
    first: jax.Array
    last: jax.Array


def rows_in(step: Any, field: int) -> Any:
    """END or BEGIN of a chunk."""
    return lax.shift_right_logical(step, field) & 0xFF


def is_set(step: Any, field: int) -> Any:
    """KEEPS, GOES_ON or STORES of a chunk, 0 or 1."""
    return lax.shift_right_logical(step, field) & 1


def of_rows(spec: LinearAttentionSpec, borders: OfSequence) -> OfRows:
    assert borders.chunks is not None and borders.begun is not None and borders.ends is not None
    B, count = spec.B, int(pl.cdiv(spec.T, C))
    runs = int(pl.cdiv(spec.T, RUN))
    missing = runs * CHUNKS_OF_RUN - count
    number = jnp.arange(count, dtype=jnp.int32)
    is_last = number + 1 == count
    begun = borders.begun.reshape(B, count, C)
    # The sequence's first row continues a document of zeros.
    fresh = (borders.chunks[..., 0] == 0) & (number > 0)
    next_fresh = jnp.pad(fresh[:, 1:], ((0, 0), (0, 1)))
    of_first = borders.ends.reshape(B, count, C)[..., 0]
    ends_here = (of_first < C - 1) | next_fresh | is_last
    end = jnp.where(ends_here, jnp.minimum(of_first + 1, spec.T - number * C), 0)
    # The chunk in which the document of a chunk's first row ends.
    where = lax.cummin(jnp.where(ends_here, number, count), axis=1, reverse=True)
    of_next = jnp.pad(where[:, 1:], ((0, 0), (0, 1)))
    goes_on = ~next_fresh & ~is_last  # behind the chunk
    cut = begun[..., -1] > 0
    starts_later = begun[..., -1] - fresh > 0
    has_last = goes_on & starts_later
    chunks = jnp.stack([where, jnp.where(has_last, of_next, where)], axis=2)

    first_chunk = jnp.arange(runs, dtype=jnp.int32) * CHUNKS_OF_RUN
    last_chunk = jnp.minimum(first_chunk + CHUNKS_OF_RUN, count) - 1
    of_run = where[:, first_chunk]
    beyond = of_next[:, last_chunk]
    has_beyond = goes_on[:, last_chunk] & (of_run <= last_chunk)
    begins_run = fresh[:, first_chunk] | (first_chunk == 0)
    is_short = begins_run & (end[:, first_chunk] > 0)
    in_runs = jnp.pad(begun[..., -1], ((0, 0), (0, missing))).reshape(B, runs, CHUNKS_OF_RUN)
    is_fresh = fresh[:, first_chunk].astype(jnp.int32)
    others = jnp.sum(in_runs, axis=2, dtype=jnp.int32) - is_fresh  # documents but the first one
    of_states = [
        of_run // CHUNKS_OF_RUN,
        jnp.where(has_beyond, beyond // CHUNKS_OF_RUN, -1),
        of_run,
        jnp.where(has_beyond, beyond, of_run),
        ((others > has_beyond) | is_short).astype(jnp.int32),
    ]
    stores = ends_here & (jnp.repeat(of_run, CHUNKS_OF_RUN, axis=1)[:, :count] == number)
    steps = (end << END) + (borders.chunks[..., 1] << BEGIN)
    for bit, here in ((KEEPS, ~cut), (GOES_ON, ~fresh), (STORES, stores)):
        steps += here.astype(jnp.int32) << bit

    padded = jnp.pad(begun, ((0, 0), (0, missing), (0, 0)))
    before = jnp.cumsum(in_runs, axis=2, dtype=jnp.int32) - in_runs
    rows = padded.reshape(B, runs, CHUNKS_OF_RUN, C)
    place = rows + before[..., None] - is_fresh[:, :, None, None]  # of the row's document
    reads = place == 0, (place == others[:, :, None, None]) & has_beyond[:, :, None, None]
    reads = reads[0] & ~is_short[:, :, None, None], reads[1] & ~reads[0]
    of_chunk = begun - fresh[..., None].astype(jnp.int32)
    is_first = of_chunk == 0
    is_other = (of_chunk == of_chunk[..., -1:]) & has_last[..., None] & ~is_first
    first, last, _ = wide_factors.of_segments(spec, borders)
    first = jnp.where(reads[0] | reads[1], wide_factors.BEYOND, first)

    def flat(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32).reshape(B, -1)

    def up_to_run(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, missing), (0, 0)), mode="edge")

    return OfRows(
        steps,
        Documents(jnp.stack(of_states, axis=2), up_to_run(chunks)),
        (flat(reads[0]), flat(reads[1])),
        (flat(up_to_run(is_first)), flat(up_to_run(is_other))),
        first.reshape(B, -1),
        last.reshape(B, -1),
    )
