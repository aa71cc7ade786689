"""The steps that the chunked kernels walk along: their pieces, and the rows at each step.

A step holds a key, a query, or both. With offset = S - T the last query sees the last key: step s
is key s and query s - offset, counted from the first row of whichever sequence starts first. The
steps are cut into pieces, a piece into chunks of C. A piece is what one program walks with its
state in registers (`carried.py`), or a run of rows for which a state is stored (`stored/`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.triton import tiles, work
from ato_jax.triton.tiles import Rows
from ato_jax.triton.work import Pieces

# With a decay per step and channel its gradient is exact at the edges of the pieces, and between
# them a sum of rounded terms: so the pieces are short.
GATED_PIECE_ROWS = 1024


class Walk(NamedTuple):
    """The pieces of the steps, and where the queries and the keys stand.

    Step s is key `first_key` + s and query `first_query` + s. Either may be negative, where the
    other sequence is the longer one. Where `indexed`, arrays say which row each step holds.
    """

    pieces: Pieces
    first_key: int
    first_query: int
    aligned: bool  # whether every step holds a query and a key
    with_queries: int  # the first piece that holds queries
    indexed: bool
    both_ways: bool
    # Whether a state is stored for every piece, and in which dtype.
    stored: bool
    state_dtype: Any

    @property
    def steps(self) -> int:
        return self.pieces.count * self.pieces.rows

    def rows_at(
        self, spec: LinearAttentionSpec, refs: dict[str, Any], start: Any, block: int
    ) -> tuple[Rows, Rows]:
        """The queries and the keys of the chunk of `block` steps that begins with step `start`."""
        return self.queries_at(spec, refs, start, block), self.keys_at(spec, refs, start, block)

    def queries_at(
        self, spec: LinearAttentionSpec, refs: dict[str, Any], start: Any, block: int
    ) -> Rows:
        if self.indexed:
            return tiles.indexed_rows(refs["query"], start, block, spec.T)
        first, length = self.first_query + start, refs.get("q_length")
        return tiles.tile_rows(first, block, spec.T, self.aligned, length)

    def keys_at(
        self, spec: LinearAttentionSpec, refs: dict[str, Any], start: Any, block: int
    ) -> Rows:
        if self.indexed:
            return tiles.indexed_rows(refs["key"], start, block, spec.S)
        whole = self.first_key == 0 and self.steps == spec.S
        first, length = self.first_key + start, refs.get("kv_length")
        return tiles.tile_rows(first, block, spec.S, whole, length)


def _check_blocks(config: Config, pieces: Pieces, in_pairs: bool) -> None:
    """Blocks have to divide a piece, and tiles of pairs a block: kernels leave no rows over."""
    names = ("state_block", "output_block", "dq_block", "dkv_block")
    for name in names:
        block = getattr(config, name)
        if block < pieces.rows and pieces.rows % block:
            raise ValueError(f"{name}={block} must divide the {pieces.rows} rows of a piece")
    for name in names[1:] if in_pairs else ():
        block = pieces.block_within(getattr(config, name))
        if config.pair_block < block and block % config.pair_block:
            raise ValueError(f"pair_block={config.pair_block} must divide {name}={block}")


def _largest_block(config: Config) -> int:
    return max(config.state_block, config.output_block, config.dq_block, config.dkv_block)


def _run_rows(spec: LinearAttentionSpec, config: Config, phase: str) -> int:
    if phase == "forward":
        return config.run_rows
    if spec.decay in ("head", "step"):
        # The decay's gradient needs a stored state for every run.
        return config.backward_run_rows or _largest_block(config)
    return config.backward_run_rows


def _both_ways(spec: LinearAttentionSpec) -> bool:
    return not spec.causal and (spec.decay is not None or spec.segments == "self")


def stores(spec: LinearAttentionSpec, config: Config, phase: str) -> bool:
    """Whether a state is stored for every piece, instead of carried through it."""
    return _both_ways(spec) or _run_rows(spec, config, phase) > 0 and spec.decay != "channel"


def plan(spec: LinearAttentionSpec, config: Config, phase: str = "forward") -> Walk:
    run_rows, both_ways = _run_rows(spec, config, phase), _both_ways(spec)
    indexed = spec.segments == "cross" or spec.causal and spec.offset is None
    offset = spec.S - spec.T if spec.causal and not indexed else 0
    first_key = min(0, offset)
    if spec.segments == "cross":
        length = spec.T + spec.S
    else:
        length = max(spec.T, spec.S)
    stored = stores(spec, config, phase)
    if both_ways:
        # A state for every chunk: queries read the two beside it, and all else is in the chunk.
        pieces = Pieces(pl.cdiv(length, config.dq_block), config.dq_block, length)
    elif stored:
        most = _largest_block(config)
        rows = min(run_rows, pl.cdiv(length, most) * most)
        pieces = Pieces(pl.cdiv(length, rows), rows, length)
    else:
        block = _largest_block(config)
        most_rows = config.piece_rows
        if spec.decay is not None:
            most_rows = min(most_rows, max(block, GATED_PIECE_ROWS))
        pieces = work.cut(length, spec.B * spec.G, most_rows, block, config.programs)
    _check_blocks(config, pieces, stored and not both_ways)
    aligned = offset == 0 and not indexed and pieces.count * pieces.rows == length
    # Earlier pieces hold keys alone: the passes over queries leave them out.
    with_queries = max(0, offset) // pieces.rows
    # Both ways with a decay, only float32 was tried.
    rounded = stored and spec.dtype == "bfloat16" and (spec.decay is None or not both_ways)
    return Walk(
        pieces,
        first_key,
        first_key - offset,
        aligned,
        with_queries,
        indexed,
        both_ways,
        stored,
        jnp.bfloat16 if rounded else jnp.float32,
    )
