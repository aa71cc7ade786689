"""The number of pieces of a sequence in causal calls, and the schedule (`mosaic.Deal`) of kernels.

`causal.py`, `both_ways.py` and `wide_heads.py` call `deal_of` and `deal_of_gradients`.
"""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import channel, frame, wide_states
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Costs in units of the time that `output.py` takes for a chunk: of the further kernel and the scan
# that cutting needs, of a chunk in that kernel, and of an item before its first chunk.
CUT, CUT_CHUNK, ITEM = 4.0, 0.4, 1.0
# The fewest chunks of a piece, so that its state is small beside its rows.
LEAST_CHUNKS = 8
# Costs within this factor count as equal, and then the smaller number of pieces is chosen, since
# more rows are read only once: 8 sequences of 131,072 rows with 8 heads of 64 columns took 15%
# longer for each row in 41 pieces than sequences of half the length in 4, where the cost estimates
# 0.6% less.
AS_GOOD = 1.02


def pieces_of(spec: LinearAttentionSpec, config: Config) -> int:
    """The fewest pieces among those with nearly the least cost: a last round of blocks that is
    nearly full, and few rows that are read twice."""
    if frame.by_runs(spec) and not config.pieces:
        config = dataclasses.replace(config, pieces=wide_states.pieces_of(spec, config.blocks))
    at_once = chunks_at_once(spec)
    units = pl.cdiv(spec.T, at_once * frame.C)
    heads = spec.B * spec.H // frame.heads_of_tile(spec)

    def cost(pieces: int) -> float:
        each = pl.cdiv(units, pieces) * at_once
        rounds = pl.cdiv(heads * pieces, config.blocks)
        if pieces == 1:
            return rounds * (each + ITEM)
        rounds_before = pl.cdiv(heads * (pieces - 1), config.blocks)
        return CUT + (rounds + CUT_CHUNK * rounds_before) * (each + ITEM)

    counts = range(1, max(2, units * at_once // LEAST_CHUNKS + 1))
    least = min(map(cost, counts))
    wanted = config.pieces or next(count for count in counts if cost(count) <= AS_GOOD * least)
    return int(pl.cdiv(units, pl.cdiv(units, wanted)))


def pieces_of_groups(spec: LinearAttentionSpec, config: Config) -> int:
    """The number of pieces for the gradients. A block that walks keys also walks all queries of
    their group, and there are fewer heads of keys: more pieces fill the card."""
    pieces, chunks = pieces_of(spec, config), pl.cdiv(spec.T, frame.C)
    wanted = max(pieces, min(spec.H // spec.G * pieces, chunks // LEAST_CHUNKS))
    return int(pl.cdiv(chunks, pl.cdiv(chunks, wanted)))


def chunks_at_once(spec: LinearAttentionSpec) -> int:
    """The number of chunks of which a piece has a multiple."""
    return channel.CHUNKS if spec.decay == "channel" else wide_states.chunks_at_once(spec)


def deal_of(spec: LinearAttentionSpec, config: Config) -> mosaic.Deal:
    """The schedule of all rows of all query heads."""
    pieces, unit = pieces_of(spec, config), chunks_at_once(spec) * frame.C
    rows = pl.cdiv(pl.cdiv(spec.T, unit), pieces) * unit
    heads = spec.H // frame.heads_of_tile(spec)
    return mosaic.Deal(spec.B, heads, spec.T, rows, pieces, config.blocks)


def deal_of_gradients(spec: LinearAttentionSpec, config: Config) -> mosaic.Deal:
    if spec.H != spec.G:
        config = dataclasses.replace(config, pieces=pieces_of_groups(spec, config))
    return deal_of(spec, config)
