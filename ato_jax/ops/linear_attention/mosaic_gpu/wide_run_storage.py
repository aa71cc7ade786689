"""Shared memory of `wide_runs.py`, and `Runs`, which says what each pass reads and in which order.

A launch has one `Runs` for each of its passes. Its properties answer which operands a pass has and
how it multiplies them; its methods answer, for a unit (an `Item`), how many chunks it sees and in
which place of the ring each tile is. A "side" is 0 for the rows ahead of a run, or behind it in DV
and DK, and 1 for the other direction. In calls with documents it is 0 for a run's first document
and 1 for its last one (`document_states.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import device, mosaic
from ato_jax.mosaic import F32, HALF, Array, Buffer, Item, Ring, Role, Signal
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import document_states, feature_maps, row_copies
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_arrays import Arrays, Pass
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

UNIT = 2  # chunks of a unit, one for each warpgroup of OWN
UNITS = CHUNKS_OF_RUN // UNIT  # units of a run
OWN = Role("own", registers=208, warpgroups=UNIT)
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
FEATURES = Role("features", registers=72)
ROLES = mosaic.Roles((OWN, MEMORY, FEATURES))
# The most columns of the result of one product: for more, a warpgroup would need more registers
# than it has at its launch.
MOST_COLUMNS = 128
SHARED = 224 * 1024  # bytes for tiles; the rest of shared memory holds vectors and barriers


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    x: Array  # [UNIT, 64, D] or [UNIT, blocks, 64, 64]: x of the unit's rows, in the end found
    # [slots, 64, D] or [slots, blocks, 64, 64]. Where states are turned, the same bytes also are
    # [slots, D, 64]; interpreted, those are an array of their own, `turned`.
    tiles: Array
    turned: Array
    vector: Array  # [UNIT, D] float32: z or u
    held: Array  # of the shape of x: v of the unit's rows in DV, or q in DQ (`Runs.holds`)
    ring: Ring  # of tiles
    mapped: Signal  # the tile in this slot of the ring holds features
    x_loaded: Signal  # x and the vector of one warpgroup of OWN are loaded
    held_loaded: Signal | None  # None without `held`
    x_free: Signal  # one warpgroup of OWN no longer uses x, the vector and `held`


@dataclasses.dataclass(frozen=True)
class Runs:
    """One pass: its static arguments, its arrays in global memory, and the storage. A piece of
    `deal` is a unit, and its heads are those of all passes that share the launch."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    of: Pass
    arrays: Arrays
    left: Any = None  # `Left`
    own: Any = None  # `Storage`
    joined: bool = False  # whether DV and DK share a launch, and so the storage of DK
    unit: Any = None  # numbers of the unit's run that are already loaded, by their field

    @property
    def tiling(self) -> row_copies.ByBlocks:
        return row_copies.by_blocks(self.spec)

    @property
    def phi(self) -> feature_maps.Features:
        return feature_maps.features(self.spec)

    @property
    def blocks(self) -> int:
        """How many blocks of 64 columns a head has."""
        return self.spec.D // HALF

    @property
    def both_ways(self) -> bool:
        """Whether rows see those behind them, too."""
        return not self.spec.causal

    @property
    def sides(self) -> int:
        return 1 + self.both_ways

    @property
    def turns_states(self) -> bool:
        """Whether tiles of T lie as [D, 64]. Where rows read one state, or one for each document, a
        tile has 64 rows of T, and x T is one sum over all tiles; DQ and DK read T transposed. Where
        rows read the states of both sides, each side has its own factor, so a tile has 64 columns
        of T and a sum of its own.
        """
        return self.by_values if self.reads_both else not self.by_values

    @property
    def reads_both(self) -> bool:
        """Whether each row reads the state on either side of its run."""
        return self.both_ways and not self.of_documents

    @property
    def parts(self) -> list[Any]:
        """The parts of found's columns, each the result of one product. DV with flows has two
        products [64, 64] in registers beside found, and spills fewer registers with 64 columns."""
        in_halves = self.reads_both or self.tiling.untiled or self.of is Pass.DV and self.adds_flows
        most = HALF if in_halves else MOST_COLUMNS
        firsts = range(0, self.spec.D, most)
        return [pl.ds(first, min(most, self.spec.D - first)) for first in firsts]

    @property
    def by_values(self) -> bool:
        """Whether x and y are features, and p are values."""
        return self.of in (Pass.OUT, Pass.DV)

    @property
    def from_the_end(self) -> bool:
        return self.of in (Pass.DV, Pass.DK)

    @property
    def normalizes(self) -> bool:
        return self.spec.normalize and not self.from_the_end

    @property
    def in_two_parts(self) -> bool:
        """Whether w of two rows of the same chunk is multiplied in two parts: w rounded, and the
        rest that rounding left off.

        With a causal decay per step, in DQ and DK: the decay's gradient is a running sum in which
        pairs of near rows enter and leave, and these are far larger than the sum.

        In DQ with a normaliser, where rows see both sides: e follows from G, and in a short segment
        the gradients of its keys, which e enters, nearly cancel.

        In DK with a normaliser, where rows see both sides through a decay in bfloat16: the rows
        next to a key weigh most, and where their sum is small by chance the error of rounding them
        is not. Emulated with a decay of -0.1, inputs of scale 0.01 and 2,048 rows, the worst row
        has an error of 1.2e-2, and 7e-3 with two parts. In float16 both the error and its budget
        are smaller: an eighth and a fourth.
        """
        if self.both_ways:
            has_decay = self.spec.decay is not None and self.spec.dtype == "bfloat16"
            of_keys = self.of is Pass.DK and has_decay
            return self.spec.normalize and (of_keys or self.of is Pass.DQ)
        return self.all_in_two_parts or self.spec.decay == "step" and not self.by_values

    @property
    def all_in_two_parts(self) -> bool:
        """Whether w of rows of other chunks is multiplied in two parts, too: in DQ with a decay per
        head and a normaliser. All pairs of a query have the same e, and their features mostly one
        sign, so an error of e adds up over them in the decay's gradient."""
        return self.spec.decay == "head" and self.of is Pass.DQ and self.spec.normalize

    @property
    def weighs_pairs(self) -> bool:
        """Whether the decay's gradient is a sum over pairs (`wide_run_flows.py`), and not the
        running sum of `scans/flows.py`."""
        return self.spec.decay == "head" or self.spec.decay == "step" and self.both_ways

    @property
    def adds_flows(self) -> bool:
        """Whether this pass computes such sums."""
        return self.weighs_pairs and self.of in (Pass.DQ, Pass.DV)

    @property
    def holds_values(self) -> bool:
        """Whether shared memory keeps v of the unit's rows, which DV multiplies by g."""
        return self.weighs_pairs and self.joined

    @property
    def holds_queries(self) -> bool:
        """Whether shared memory keeps q of the unit's rows in DQ, which maps q twice: for the
        product with what each side's state gives, and for dq."""
        return self.both_ways and self.adds_flows and self.of is Pass.DQ

    @property
    def holds(self) -> bool:
        return self.holds_values or self.holds_queries

    @property
    def held(self) -> Any:
        """The array of which shared memory keeps the unit's rows, if any."""
        return self.arrays.reader if self.holds_queries else self.arrays.held

    @property
    def has_vector(self) -> bool:
        """Whether z or u is in shared memory. There is no room for those of both sides, which are
        read from global memory where they are needed."""
        return not self.both_ways and (self.normalizes or self.of is Pass.DK or self.joined)

    @property
    def of_pairs(self) -> tuple[Any, Any, Any]:
        """The arrays from which the weight of a pair follows: L, and the first and last row that a
        row sees."""
        beyond = self.arrays.beyond
        return self.arrays.sums, self.arrays.limit, None if beyond is None else beyond.limit

    @property
    def reads(self) -> list[Any]:
        """For each side, the array of the factors by which rows read the state of their run."""
        return self._of_sides("reads")

    @property
    def reads_of_chunk(self) -> list[Any]:
        return self._of_sides("reads_of_chunk")

    @property
    def states(self) -> list[Any]:
        return self._of_sides("states")

    @property
    def vectors(self) -> list[Any]:
        return self._of_sides("vectors")

    def _of_sides(self, name: str) -> list[Any]:
        sides = [self.arrays] if self.arrays.beyond is None else [self.arrays, self.arrays.beyond]
        return [getattr(side, name) for side in sides]

    @property
    def readers(self) -> int:
        """The number of tiles of `Arrays.reader` that come behind those of chunks."""
        return 0 if self.arrays.reader is None or self.holds_queries else UNIT

    @property
    def rereads_keys(self) -> bool:
        """Whether a unit with pairs loads k of its own rows again, for z. Elsewhere its slot of the
        ring is kept from the pairs on; too many tiles come behind that for it here."""
        return self.of_documents and self.of is Pass.DQ and self.normalizes

    @property
    def slots(self) -> int:
        """The slots of the ring: those that fit beside x and `held`."""
        return SHARED // (2 * C * self.spec.D) - UNIT * (1 + self.holds)

    def storage(self) -> Storage:
        tiling, D, slots = self.tiling, self.spec.D, self.slots
        x = Buffer(tiling.tiles(UNIT), tiling.blocks)
        tiles, turned = tiling.tiles(slots), None
        if (self.turns_states or self.joined) and not tiling.untiled:
            turned = tiling.shared(slots, D, HALF)
            if not device.interpreting():
                tiles, turned = plgpu.RefUnion(tiles, turned), None
        of_tiles = Buffer(tiles, tiling.blocks)
        vector = Buffer(plgpu.SMEM((UNIT, D), F32)) if self.has_vector else None
        filled = (x,) if vector is None else (x, vector)
        held = Buffer(tiling.tiles(UNIT), tiling.blocks) if self.holds else None
        return Storage(
            x=x,
            tiles=of_tiles,
            turned=None if turned is None else Buffer(turned),
            vector=vector,
            held=held,
            ring=Ring.of(slots, (of_tiles,), (OWN, FEATURES)),
            mapped=Signal((FEATURES,), slots, "ring"),
            x_loaded=Signal(filled, UNIT),
            held_loaded=None if held is None else Signal((held,), UNIT),
            # One arrival: each place of x belongs to one warpgroup.
            x_free=Signal((Buffer(None),), UNIT),
        )

    def first_of_run(self, item: Item) -> Any:
        """The first chunk of the unit's run."""
        return lax.div(item.piece * UNIT, CHUNKS_OF_RUN) * CHUNKS_OF_RUN

    def last_of_run(self, item: Item) -> Any:
        last = self.first_of_run(item) + CHUNKS_OF_RUN - 1
        return jnp.minimum(last, self.chunks - 1)

    @property
    def chunks(self) -> int:
        """The number of chunks in the sequence."""
        return int(pl.cdiv(self.spec.T, C))

    def others(self, item: Item) -> Any:
        """The number of chunks in the other unit of the run, where rows see both sides."""
        is_first = lax.rem(item.piece, UNITS) == 0
        behind = jnp.clip(self.chunks - (item.piece + 1) * UNIT, 0, UNIT)
        return jnp.where(is_first, behind, UNIT)

    @property
    def of_documents(self) -> bool:
        """Whether the states are the sums over whole documents (`document_states.py`)."""
        return self.arrays.documents is not None

    def of_run(self, item: Item, field: int) -> Any:
        """One of the numbers of the unit's run in `Documents.runs`."""
        if self.unit is not None and field in self.unit:
            return self.unit[field]
        run = lax.div(item.piece * UNIT, CHUNKS_OF_RUN)
        return self.arrays.documents.runs[item.batch, run, field]

    def in_unit(self, item: Item) -> Runs:
        """With the numbers loaded that say how many tiles a unit has."""
        if not self.of_documents:
            return self
        fields = document_states.STATE + 1, document_states.PAIRS
        return dataclasses.replace(self, unit={field: self.of_run(item, field) for field in fields})

    def with_vectors(self, item: Item, own: Any) -> Runs:
        """With the chunks loaded whose z or u a warpgroup's rows read."""
        if not self.of_documents:
            return self
        chunks = {
            document_states.VECTOR + side: self.chunk_of_vectors(item, own, side)
            for side in range(self.sides)
        }
        return dataclasses.replace(self, unit={**self.unit, **chunks})

    def has_last(self, item: Item) -> Any:
        """Whether rows read the state of the run's last document, too."""
        return self.of_run(item, document_states.STATE + 1) >= 0

    def has_pairs(self, item: Item) -> Any:
        """Whether rows see others of their run pair by pair."""
        return not self.of_documents or self.of_run(item, document_states.PAIRS) > 0

    def run_of_states(self, item: Item, side: int) -> Any:
        """The run whose state the unit reads on a side."""
        if self.of_documents:
            return self.of_run(item, document_states.STATE + side)
        return lax.div(item.piece * UNIT, CHUNKS_OF_RUN)

    def is_behind(self, side: int) -> bool:
        """Whether the states of a side contain the rows behind a run."""
        return self.from_the_end != bool(side)

    def turns(self, item: Item) -> Any:
        """The number of chunks of the run whose y and p the unit loads."""
        if self.both_ways:
            turns = self.last_of_run(item) - self.first_of_run(item) + 1
            return jnp.where(self.has_pairs(item), turns, 0) if self.of_documents else turns
        if self.from_the_end:
            return self.last_of_run(item) - item.piece * UNIT + 1
        last = jnp.minimum(item.piece * UNIT + UNIT - 1, self.chunks - 1)
        return last - self.first_of_run(item) + 1

    def tiles_of(self, item: Item) -> Any:
        """The number of tiles that a unit takes from the ring."""
        return self.tile_of_reader(item, self.readers) - item.before

    @property
    def tiles_of_states(self) -> int:
        """The number of tiles of states that come first."""
        return self.blocks * (1 if self.of_documents else self.sides)

    @property
    def first_readers(self) -> int:
        """The number of tiles of `Arrays.reader` that also come ahead of those of chunks."""
        return UNIT if self.adds_flows and self.of is Pass.DQ and not self.both_ways else 0

    def last_tiles_of_states(self, item: Item) -> Any:
        """The number of tiles of the last document's state, behind those of chunks."""
        if self.of_documents:
            return jnp.where(self.has_last(item), self.blocks, 0)
        return 0

    @property
    def tiles_ahead(self) -> int:
        """The number of tiles that come ahead of those of chunks."""
        return self.tiles_of_states + self.first_readers

    def chunk(self, item: Item, turn: Any) -> Any:
        """The number in the sequence of the chunk at `turn`: the unit's own chunks come last."""
        if self.both_ways:
            others, is_first = self.others(item), lax.rem(item.piece, UNITS) == 0
            start = item.piece * UNIT
            other = jnp.where(is_first, start + UNIT, start - UNIT)
            return jnp.where(turn < others, other + turn, start + turn - others)
        if self.from_the_end:
            return self.last_of_run(item) - turn
        return self.first_of_run(item) + turn

    def own_chunk(self, item: Item, own: Any) -> Any:
        return item.piece * UNIT + own

    def turns_of(self, item: Item, own: Any) -> tuple[Any, Any]:
        """The number of chunks that a warpgroup's rows see, and the turn of their own chunk. The
        second chunk of the last unit may lie behind the sequence; its result is not stored."""
        turns = self.turns(item)
        if self.both_ways:
            return turns, jnp.maximum(jnp.minimum(self.others(item) + own, turns - 1), 0)
        own_chunk = self.own_chunk(item, own)
        ahead = own_chunk - self.first_of_run(item)
        if self.from_the_end:
            ahead = self.last_of_run(item) - own_chunk
        seen = jnp.clip(ahead + 1, 1, turns)
        return seen, seen - 1

    def chunk_of_vectors(self, item: Item, own: Any, side: int = 0) -> Any:
        """The chunk whose z or u a warpgroup's rows read. DQ computes z of each row from that of
        the row's own chunk; the other passes read that of the run."""
        if self.unit is not None and document_states.VECTOR in self.unit:
            return self.unit[document_states.VECTOR + side]
        if self.of is Pass.DQ:
            own_chunk = self.own_chunk(item, own)
            if self.of_documents:
                return self.arrays.documents.chunks[item.batch, own_chunk, side]
            return own_chunk
        if self.of_documents:
            return self.of_run(item, document_states.VECTOR + side)
        return self.last_of_run(item) if self.is_behind(side) else self.first_of_run(item)

    def tile_of_state(self, item: Item, block: int, side: int = 0) -> Any:
        if self.of_documents:
            return item.before + (self.tiles_ahead + 2 * self.turns(item)) * side + block
        return item.before + block * self.sides + side

    def tile_of_chunk(self, item: Item, turn: Any, number: int) -> Any:
        """`number`: 0 of y, 1 of p."""
        return item.before + self.tiles_ahead + 2 * turn + number

    def tile_of_key(self, item: Item, own: Any) -> Any:
        """The number of the tile with the keys of a warpgroup's own chunk. A pass that
        `rereads_keys` loads these tiles behind those of states."""
        of_chunks = 2 * self.turns(item) + self.last_tiles_of_states(item)
        return item.before + self.tiles_ahead + of_chunks + own

    def tile_of_reader(self, item: Item, own: Any) -> Any:
        keys = jnp.where(self.has_pairs(item), UNIT, 0) if self.rereads_keys else 0
        return self.tile_of_key(item, keys + own)

    def tile_of_first_reader(self, item: Item, own: Any) -> Any:
        return item.before + self.tiles_of_states + own

    def kv_head(self, item: Item) -> Any:
        return lax.div(item.head, self.spec.H // self.spec.G)

    def own_head(self, item: Item) -> Any:
        """The head of x and found."""
        return self.kv_head(item) if self.from_the_end else item.head

    def seen_head(self, item: Item) -> Any:
        """The head of y and p."""
        return item.head if self.from_the_end else self.kv_head(item)

    def power(self, item: Item, number: int) -> Any:
        """One of the powers of two of the item's head of keys; None in bfloat16."""
        powers = self.arrays.powers
        return None if powers is None else powers[item.batch, self.kv_head(item), number]

    def wait(self, tile: Any) -> Any:
        """The slot of a tile once it is loaded."""
        slot = self.own.ring.slot(tile)
        self.own.ring.produced.wait(slot)
        return slot

    def let_go(self, slot: Any) -> None:
        self.own.ring.consumed.arrive(slot)

    @property
    def x(self) -> Any:
        return tiled(self.own.x)

    @property
    def tiles(self) -> Any:
        return tiled(self.own.tiles)

    @property
    def held_tiles(self) -> Any:
        return tiled(self.own.held)

    @property
    def turned(self) -> Any:
        """Tiles of T as [slots, D, 64], or as `tiles` where those are in blocks of 64 rows."""
        tiles = self.own.tiles
        if self.tiling.untiled:
            return self.tiles
        return tiles.untiled if isinstance(tiles, mosaic.Views) else self.own.turned

    def block_in(self, tile: Any, block: int) -> Any:
        """64 columns of a tile, [64, 64]."""
        return self.tiling.block_in(tile, block)

    def part_in(self, tile: Any, part: Any, turned: bool = False) -> Any:
        """One of `parts` of a tile's columns, or of the rows of a turned tile."""
        if self.tiling.untiled:
            return tile.at[part.start // HALF]
        return tile.at[part] if turned else tile.at[:, part]

    def factors(self, x: Any, y: Any, turned: bool = False) -> list[tuple[Any, Any]]:
        """x y^T of two tiles, or x y where y is `turned`, as products to be added up."""
        pairs = zip(self.tiling.all_in(x), self.tiling.all_in(y), strict=True)
        return [(left, right if turned else right.T) for left, right in pairs]


def columns_of(block: int) -> Any:
    return pl.ds(block * HALF, HALF)


def rows_of(chunk: Any) -> Any:
    return pl.ds(chunk * C, C)
