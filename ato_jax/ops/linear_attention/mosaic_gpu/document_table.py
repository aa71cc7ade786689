"""The table of documents, which XLA computes, and the items of it that each block takes.

`documents.py` calls `of` and `deal`. A document is a segment of one batch entry, with its queries
and its keys, and an item is one document. Where queries and keys have the same segments, all
documents inside a chunk of 64 rows are one item. So there are at most two items for each chunk,
however short documents are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec

# As many as one sum of all their pairs finds the order of in a few microseconds.
SORTED = 2048


class Table(NamedTuple):
    """The items of all batch entries. Each query and each key belongs to one; an item that has
    queries or keys alone has size 0 on the other side."""

    fields: jax.Array  # [7, items at most] int32: those of `Item` but its head
    number: jax.Array  # [1] int32: how many there are
    ids: jax.Array | None = None  # [B, T + C] int32: the segment of each row, where queries' and
    # keys' are the same

    def arrays(self) -> dict[str, jax.Array]:
        return {name: x for name, x in self._asdict().items() if x is not None}


class Rows(NamedTuple):
    """Rows of a sequence: `size` from `first` on, of which the first `valid` count."""

    first: Any
    size: Any
    valid: Any

    @property
    def chunks(self) -> Any:
        return _chunks(self.size)

    @property
    def valid_chunks(self) -> Any:
        return _chunks(self.valid)

    def of(self, chunk: Any) -> Any:
        return self.first + chunk * C


class Item(NamedTuple):
    """A column of the table, and a tile of kv heads. `before` is how many steps the block has
    had."""

    batch: Any
    queries: Rows
    keys: Rows
    head: Any
    before: Any


def _chunks(rows: Any) -> Any:
    return lax.div(rows + (C - 1), C)


@dataclasses.dataclass(frozen=True)
class Deal:
    """Which items a block takes: one after the other, those of all heads side by side."""

    heads: int  # tiles of kv heads
    blocks: int

    def each(
        self,
        fields: Any,
        count: Any,
        steps_of: Callable[[Item], Any],
        do: Callable[[Item], None],
    ) -> Any:
        """Runs `do` for each of this block's; returns how many steps these had in all."""
        total, block = count[0] * self.heads, lax.axis_index("block")

        def number_of(turn: Any) -> Any:
            """Blocks take turns there and back."""
            place = jnp.where(lax.rem(turn, 2) == 0, block, self.blocks - 1 - block)
            return turn * self.blocks + place

        def one(turn: Any, before: Any) -> Any:
            number = number_of(turn)
            column = lax.div(number, self.heads)
            batch, *rows = (fields[field, column] for field in range(7))
            head = lax.rem(number, self.heads)
            item = Item(batch, Rows(*rows[:3]), Rows(*rows[3:]), head, before)
            do(item)
            return before + steps_of(item)

        whole = lax.div(total, self.blocks)
        own = whole + jnp.where(number_of(whole) < total, 1, 0)
        return lax.fori_loop(0, own, one, jnp.int32(0))


def deal(spec: LinearAttentionSpec, config: frame.Config) -> Deal:
    return Deal(spec.G // frame.heads_of_tile(spec), config.blocks)


def of(spec: LinearAttentionSpec, inputs: Inputs) -> Table:
    """A run of queries is an item, with the run of keys that it sees, if there is one; and so is a
    run of keys that no query sees."""
    assert inputs.q_segments is not None and inputs.kv_segments is not None
    ids = None
    if spec.segments == "self":
        ids = jnp.pad(inputs.q_segments, ((0, 0), (0, C)), constant_values=-1)
        first, count = _of_numbers(_joined(inputs.q_segments))
        entry, sides = first // spec.T, [_sizes(first, spec.T)] * 2
    else:
        entry, sides, count = _of_both(inputs.q_segments, inputs.kv_segments)
    fields = [entry]
    for (row, size), lengths in zip(sides, (inputs.q_lengths, inputs.kv_lengths), strict=True):
        valid = size
        if lengths is not None:
            valid = jnp.clip(lengths[jnp.minimum(entry, spec.B - 1)] - row, 0, size)
        if len(fields) > 1:
            valid = jnp.where(fields[2] > 0, valid, 0)  # of keys that no query sees
        fields += [row, size, valid]
    table = _longest_first(jnp.stack(fields).astype(jnp.int32))
    return Table(table, count[None].astype(jnp.int32), ids)


def _joined(runs: jax.Array) -> jax.Array:
    """Like `runs`, but all runs that lie within one chunk have one number."""
    B, rows = runs.shape
    chunks = -(-rows // C)
    # The run of the row just before each chunk, and of the row just behind it; -1 at the ends.
    ahead = jnp.pad(runs[:, C - 1 :: C][:, : chunks - 1], ((0, 0), (1, 0)), constant_values=-1)
    behind = jnp.pad(runs[:, C::C], ((0, 0), (0, 1)), constant_values=-1)

    def of_rows(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, C, axis=1)[:, :rows]

    within = (runs != of_rows(ahead)) & (runs != of_rows(behind))
    inner = jnp.arange(rows, dtype=jnp.int32) % C != 0
    follows = jnp.pad(within[:, :-1], ((0, 0), (1, 0))) & inner
    begins = _begins(runs).reshape(B, rows) & ~(within & follows)
    return jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1


def _longest_first(fields: jax.Array) -> jax.Array:
    """The table with its first `SORTED` items in the order of their rows, so that blocks end
    together; where there are more, they are short. A sort would launch more than this sum."""
    some = fields[:, :SORTED]
    size, number = some[2] + some[5], jnp.arange(some.shape[1], dtype=jnp.int32)
    ahead = size > size[:, None]
    ahead |= (size == size[:, None]) & (number < number[:, None])
    place = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    return fields.at[:, place].set(some, unique_indices=True)


def _of_numbers(runs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_where` of the runs' numbers within each entry, [B, rows]."""
    size, counts = runs.size, runs[:, -1] + 1
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    begins = _begins(runs).reshape(runs.shape)
    place = jnp.where(begins, runs + before[:, None], size).reshape(-1)
    first = jnp.full(size, size, jnp.int32)
    first = first.at[place].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    return first, jnp.sum(counts, dtype=jnp.int32)


def _begins(ids: jax.Array) -> jax.Array:
    """Whether each row begins a run of equal ids: ids [B, rows] to booleans [B rows]."""
    changes = ids[:, 1:] != ids[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True).reshape(-1)


def _where(begins: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers of the rows with which runs begin, then that behind the last row; and how many
    runs there are."""
    size = begins.size
    first = jnp.nonzero(begins, size=size, fill_value=size)[0].astype(jnp.int32)
    return first, jnp.sum(begins, dtype=jnp.int32)


def _sizes(first: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The first row of each run in its entry of so many rows, and how many it has."""
    return first % rows, jnp.append(first[1:], first.size) - first


def _of_both(
    q_ids: jax.Array, kv_ids: jax.Array
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]], jax.Array]:
    """Each item's batch entry, its rows of queries and of keys, and how many items there are."""
    (B, T), S = q_ids.shape, kv_ids.shape[1]
    k_begins = _begins(kv_ids)
    k_first, _ = _where(k_begins)
    k_row, k_size = _sizes(k_first, S)
    runs = kv_ids[:, -1] + 1
    # The runs of keys of the batch entries before.
    before = jnp.cumsum(runs, dtype=jnp.int32) - runs
    entries = jnp.arange(B, dtype=jnp.int32)[:, None]
    seen = jnp.zeros((B, S + 1), bool).at[entries, jnp.where(q_ids < 0, S, q_ids)].set(True)
    unseen = k_begins & ~jnp.take_along_axis(seen, kv_ids, axis=1).reshape(-1)
    # Rows of queries, then rows of keys.
    first, count = _where(jnp.append(_begins(q_ids), unseen))
    q_last = jnp.minimum(jnp.append(first[1:], first.size), B * T)
    of_keys = first >= B * T
    entry = jnp.where(of_keys, (first - B * T) // S, first // T)
    of_entry = jnp.minimum(entry, B - 1)
    own_ids = jnp.append(q_ids.reshape(-1), kv_ids.reshape(-1))
    run = own_ids[jnp.minimum(first, own_ids.size - 1)]
    at = before[of_entry] + jnp.maximum(run, 0)
    q_size = jnp.where(of_keys, 0, q_last - first)
    none = (run < 0) | (first == own_ids.size)
    sides = [(first % T, q_size), (k_row[at], jnp.where(none, 0, k_size[at]))]
    return entry, sides, count


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    if spec.initial_state or spec.return_state:
        return "with a state and without causal=True"
    if spec.dtype != "bfloat16":
        return f"of {spec.dtype} without causal=True"
    if spec.D != spec.V or spec.D > frame.F:
        return f"without causal=True but of D = V, up to {frame.F}"
    return None
