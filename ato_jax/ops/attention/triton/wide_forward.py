"""Wide heads, forward: few enough keys that all scores of a query fit the registers.

A program owns some queries of one head. It goes over blocks of columns of q and k,

    products = sum over blocks of columns  q[:, block] . k[:, block]^T

then has all scores of its queries, and their weights without the running maximum of `forward.py`,
and goes over blocks of columns of v, each of which gives final columns of out:

    out[:, block] = p . v[:, block] / total

A tile holds some columns of all keys, where `forward.py`'s holds all columns of some keys. Every
input is read once per block of queries, whatever the width is. Where the programs are too few to
fill the card, `slices` programs share the columns: one kernel stores the product of each slice of q
and k, and each program of the next kernel sums these and has a slice of v.

`forward_for_own_backward` keeps the products of q and k in `Outputs.rest`, [B, H, slices, T, S]
float32, whose sum over the slices is q . k^T. The backward pass then does not read q and k for
them. They take 4 bytes per pair to write and to read, and are kept where that is less than the rows
of q and k.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs
from ato_jax.ops.attention.triton.common import (
    dot,
    fitted,
    in_score_units,
    natural,
    padded,
    power,
    quotient,
    raw_scores,
    raw_scores_and_slope,
    sequence_spec,
    span,
    store_tile,
    whole_spec,
)
from ato_jax.ops.attention.triton.forward import FLOOR
from ato_jax.ops.attention.triton.pairs import Options, Pairs, Side, options_of


class Tiles(NamedTuple):
    """Block sizes of a kernel.

    Attributes:
      block_q: queries in a tile.
      block_d, block_v: columns in a block of q and k, and of v.
      num_warps, num_stages: warps and pipeline stages.
      slices: how many programs share the columns.
    """

    block_q: int
    block_d: int
    block_v: int
    num_warps: int
    num_stages: int
    slices: int

    @property
    def compiler_params(self) -> plgpu.CompilerParams:
        return plgpu.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields of `Tiles`, for the forward kernels and for the backward ones."""

    block_q: int
    block_d: int
    block_v: int
    num_warps: int
    num_stages: int
    slices: int
    backward_block_q: int
    backward_block_d: int
    backward_block_v: int
    backward_num_warps: int
    backward_num_stages: int
    backward_slices: int
    fast_exp2: bool = False

    @property
    def tiles(self) -> Tiles:
        return Tiles(*(getattr(self, name) for name in Tiles._fields))

    @property
    def backward_tiles(self) -> Tiles:
        return Tiles(*(getattr(self, f"backward_{name}") for name in Tiles._fields))


class Rows(NamedTuple):
    """`size` rows of a sequence from `start` on, of which those below `length` exist."""

    start: Any
    size: int
    length: Any


class Cut(NamedTuple):
    """The columns of a row of `width`, in blocks of `block`, shared among `slices` programs."""

    width: int
    block: int
    slices: int

    @classmethod
    def of(cls, width: int, block: int, slices: int) -> Cut:
        return cls(width, fitted(block, width), slices)

    def each(self, n: Any, step: Any, carry: Any) -> Any:
        """`step(start, carry)` over the blocks of the n-th slice, by their first columns."""
        blocks = pl.cdiv(self.width, self.block)
        own = pl.cdiv(blocks, self.slices)
        first: Any = np.int32(0)
        end: Any = np.int32(blocks)
        if self.slices > 1:
            first = jnp.minimum(n * own, blocks)
            end = jnp.minimum(first + own, blocks)

        def block(n: Any, carry: Any) -> Any:
            return step(jnp.int32(n) * self.block, carry)

        return lax.fori_loop(first, end, block, carry)


class Cuts(NamedTuple):
    """The columns of q and k, and those of v and out."""

    keys: Cut
    values: Cut


class Matrix(NamedTuple):
    """Rows of one head of an array, loaded and stored by blocks of columns.

    `head` is None where the ref holds a single head. Rows and columns past the end read 0.
    """

    layout: str
    ref: Any
    head: Any
    rows: Rows
    cut: Cut

    def _place(self, start: Any) -> tuple[Any, jax.Array | None]:
        rows, (width, block, _) = self.rows, self.cut
        index: tuple[Any, ...] = (pl.ds(rows.start, rows.size),)
        if self.head is not None:
            index = (*index, self.head) if self.layout == "bthd" else (self.head, *index)
        mask = None
        if not isinstance(rows.length, int) or rows.length % rows.size:
            mask = (span(rows.start, rows.size) < rows.length)[:, None]
        if width % block:
            exists = (span(start, block) < width)[None, :]
            mask = exists if mask is None else mask & exists
        if mask is not None:
            mask = jnp.broadcast_to(mask, (rows.size, block))
        return self.ref.at[(*index, pl.ds(start, block))], mask

    def load(self, start: Any) -> jax.Array:
        """[size, block]"""
        place, mask = self._place(start)
        return plgpu.load(place) if mask is None else plgpu.load(place, mask=mask, other=0)

    def store(self, start: Any, value: jax.Array) -> None:
        place, mask = self._place(start)
        plgpu.store(place, value.astype(self.ref.dtype), mask=mask)


def products(spec: AttentionSpec, a: Matrix, b: Matrix, n: Any) -> jax.Array:
    """a . b^T over the columns of the n-th slice: [rows of a, rows of b]."""

    def step(start: Any, total: jax.Array) -> jax.Array:
        return total + dot(spec, a.load(start), b.load(start), trans_b=True)

    return a.cut.each(n, step, jnp.zeros((a.rows.size, b.rows.size), jnp.float32))


class Pair(NamedTuple):
    """A program's tile of pairs: some queries of one head, and all keys."""

    pairs: Pairs
    h: Any
    query: Side  # [block_q, 1]
    key: Side  # [1, block_k]

    @property
    def mask(self) -> jax.Array:
        """The pairs of the tile that exist in an array of all pairs, [T, S]."""
        spec = self.pairs.spec
        return (self.query.indices < spec.T) & (self.key.indices < spec.S)

    def place(self) -> tuple[jax.Array, jax.Array]:
        return self.query.indices, self.key.indices


def load_parts(ref: Any, tile: Pair) -> jax.Array:
    """A tile of [parts, T, S], summed over the parts: [block_q, block_k]."""

    def add(n: Any, total: jax.Array) -> jax.Array:
        return total + plgpu.load(ref.at[(jnp.int32(n), *tile.place())], mask=tile.mask, other=0)

    shape = jnp.broadcast_shapes(tile.query.indices.shape, tile.key.indices.shape)
    return lax.fori_loop(np.int32(0), np.int32(ref.shape[0]), add, jnp.zeros(shape, jnp.float32))


class Weights(NamedTuple):
    """p = exp(score - m), and the sum of p with the sink's term; `slope` is the softcap's."""

    m: jax.Array  # [block_q, 1]
    total: jax.Array  # [block_q, 1]
    p: jax.Array  # [block_q, block_k]
    slope: jax.Array | None
    sink: Any  # the sink's weight, [block_q, 1]; 0 where there is none


def weigh(tile: Pair, product: jax.Array, fast_exp2: bool) -> Weights:
    pairs, h = tile.pairs, tile.h
    raw = raw_scores(pairs.spec, product)
    _, slope = raw_scores_and_slope(pairs.spec, product)
    raw, factor = pairs.biased(h, raw, tile.query, tile.key)
    seen = pairs.visible(h, True, tile.query, tile.key)
    if pairs.spec.q_lengths:
        exists = tile.query.indices < pairs.limits.q_length
        seen = exists if seen is None else seen & exists
    if seen is not None:
        raw = jnp.where(seen, raw, -jnp.inf)
    # Finite, so that a row that sees no key subtracts no infinities.
    m = jnp.maximum(jnp.max(raw, axis=1, keepdims=True) * factor, FLOOR)
    sink: Any = 0.0
    if pairs.refs.sinks is not None:
        logit = in_score_units(pairs.spec, pairs.refs.sinks[h])
        m = jnp.maximum(m, logit)
        sink = power(pairs.spec, logit - m, fast_exp2)
    p = power(pairs.spec, raw * factor - m, fast_exp2)
    return Weights(m, jnp.sum(p, axis=1, keepdims=True) + sink, p, slope, sink)


def not_zero(total: jax.Array) -> jax.Array:
    return jnp.where(total == 0, 1.0, total)


def tile_of(
    spec: AttentionSpec, options: Options, b: Any, h: Any, start: Any, block_q: int
) -> Pair:
    pairs = Pairs.of(spec, options, b, "queries")
    query = pairs.queries(span(start, block_q)[:, None])
    key = pairs.keys(span(0, padded(spec.S))[None, :])
    return Pair(pairs, h, query, key)


def own_rows(tile: Pair, start: Any) -> tuple[Rows, Rows]:
    """The rows of the tile's queries, and of its keys."""
    limits = tile.pairs.limits
    queries = Rows(start, tile.query.indices.shape[0], limits.q_length)
    return queries, Rows(0, tile.key.indices.shape[1], limits.kv_length)


def block_and_slice(n: Any, slices: int) -> tuple[Any, Any]:
    """A program's block of queries and its slice; the slices of a block are adjacent programs."""
    block = quotient(n, slices)
    return block, n - block * slices


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    parts_ref: Any | None,
    options: Options,
    out_ref: Any,
    lse_ref: Any,
    kept_ref: Any | None,
    *,
    spec: AttentionSpec,
    block_q: int,
    cuts: Cuts,
    fast_exp2: bool,
) -> None:
    layout, (columns, value_columns) = spec.layout, cuts
    slices = value_columns.slices
    n, h, b = (pl.program_id(axis) for axis in range(3))
    block, n = block_and_slice(n, slices)
    start = block * block_q
    tile = tile_of(spec, options, b, h, start, block_q)
    queries, keys = own_rows(tile, start)
    if parts_ref is None:
        q = Matrix(layout, q_ref, None, queries, columns)
        k = Matrix(layout, k_ref, None, keys, columns)
        product = products(spec, q, k, n)
    else:
        product = load_parts(parts_ref, tile)
    if kept_ref is not None:
        plgpu.store(kept_ref.at[(0, *tile.place())], product, mask=tile.mask)
    m, total, p, _, _ = weigh(tile, product, fast_exp2)
    lse = jnp.where(total == 0, -jnp.inf, natural(spec, m) + jnp.log(not_zero(total)))
    store_tile(layout, lse_ref, None, start, lse[:, 0], spec.T)
    divisor = not_zero(total) * (1 - spec.dropout_rate)
    kept = tile.pairs.kept(h, tile.query, tile.key)
    if kept is not None:
        p = jnp.where(kept, p, 0.0)
    p = p.astype(spec.dtype)
    v = Matrix(layout, v_ref, None, keys, value_columns)
    out = Matrix(layout, out_ref, None, queries._replace(length=spec.T), value_columns)

    def step(start: Any, nothing: Any) -> Any:
        out.store(start, dot(spec, p, v.load(start)) / divisor)  # [block_q, block]
        return nothing

    value_columns.each(n, step, np.int32(0))


def _parts_kernel(
    factors: tuple[tuple[Any, Any], ...],
    lengths: Options,
    *parts: Any,
    spec: AttentionSpec,
    block_q: int,
    cuts: tuple[Cut, ...],
) -> None:
    n, h, b = (pl.program_id(axis) for axis in range(3))
    block, n = block_and_slice(n, cuts[0].slices)
    start = block * block_q
    tile = tile_of(spec, lengths, b, h, start, block_q)
    queries, keys = own_rows(tile, start)
    for (of_queries, of_keys), cut, ref in zip(factors, cuts, parts, strict=True):
        one = Matrix(spec.layout, of_queries, None, queries, cut)
        other = Matrix(spec.layout, of_keys, None, keys, cut)
        found = products(spec, one, other, n)
        plgpu.store(ref.at[(n, *tile.place())], found, mask=tile.mask)


def parts_spec(slices: int, spec: AttentionSpec, block_q: int) -> pl.BlockSpec:
    """The parts of one head's products, [slices, T, S]."""
    rows, keys = max(spec.T, block_q), padded(spec.S)
    return pl.BlockSpec((None, None, slices, rows, keys), lambda n, h, b: (b, h, 0, 0, 0))


def parts_shape(slices: int, spec: AttentionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((spec.B, spec.H, slices, spec.T, spec.S), jnp.float32)


def parts_of_products(
    spec: AttentionSpec, tiles: Tiles, options: Options, *factors: tuple[jax.Array, jax.Array]
) -> list[jax.Array]:
    """a . b^T of every head, by slices of the columns: [B, H, slices, T, S] float32 for each (a,
    b).

    a has queries, such as q or do; b has keys, such as k or v.
    """
    layout, slices = spec.layout, tiles.slices
    block_q, block_k = fitted(tiles.block_q, spec.T), padded(spec.S)
    lengths = Options(limits=options.limits)
    widths = [of_queries.shape[-1] for of_queries, _ in factors]
    return pallas_call(
        functools.partial(
            _parts_kernel,
            spec=spec,
            block_q=block_q,
            cuts=tuple(Cut.of(width, tiles.block_d, slices) for width in widths),
        ),
        grid=(pl.cdiv(spec.T, block_q) * slices, spec.H, spec.B),
        in_specs=[
            tuple(
                (
                    sequence_spec(layout, spec.T, width, block_q),
                    sequence_spec(layout, spec.S, width, block_k, share=spec.H // spec.G),
                )
                for width in widths
            ),
            jax.tree.map(whole_spec, lengths),
        ],
        out_specs=[parts_spec(slices, spec, block_q)] * len(factors),
        out_shape=[parts_shape(slices, spec)] * len(factors),
        compiler_params=tiles.compiler_params,
        name="attention_wide_parts",
    )(factors, lengths)


def options_for(spec: AttentionSpec, inputs: Inputs, block_q: int) -> Options:
    """The options without ranges of blocks, since all keys are one block."""
    options = options_of(spec, inputs, "queries", block_q, padded(spec.S))
    return options._replace(ranges=None)


def forward_for_own_backward(spec: AttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    """`forward`, which keeps the products where that saves the backward pass time."""
    bytes_of_products = 4 * spec.T * spec.S
    bytes_of_rows = (spec.T + spec.S) * spec.D * inputs.q.dtype.itemsize
    return forward(spec, config, inputs, 2 * bytes_of_products < bytes_of_rows)


def forward(
    spec: AttentionSpec, config: Config, inputs: Inputs, keeps_products: bool = False
) -> Outputs:
    layout, tiles, slices = spec.layout, config.tiles, config.slices
    block_q, block_k = fitted(tiles.block_q, spec.T), padded(spec.S)
    share = spec.H // spec.G
    options = options_for(spec, inputs, block_q)
    parts = None
    if slices > 1:
        (parts,) = parts_of_products(spec, tiles, options, (inputs.q, inputs.k))
    # With slices, the parts of the products are in memory already, and are what is kept.
    stores = keeps_products and parts is None
    rows = (spec.T, spec.H) if layout == "bthd" else (spec.H, spec.T)
    out, lse, products = pallas_call(
        functools.partial(
            _kernel,
            spec=spec,
            block_q=block_q,
            cuts=Cuts(Cut.of(spec.D, tiles.block_d, 1), Cut.of(spec.V, tiles.block_v, slices)),
            fast_exp2=config.fast_exp2,
        ),
        grid=(pl.cdiv(spec.T, block_q) * slices, spec.H, spec.B),
        in_specs=[
            sequence_spec(layout, spec.T, spec.D, block_q),
            sequence_spec(layout, spec.S, spec.D, block_k, share=share),
            sequence_spec(layout, spec.S, spec.V, block_k, share=share),
            None if parts is None else parts_spec(slices, spec, block_q),
            jax.tree.map(whole_spec, options),
        ],
        out_specs=[
            sequence_spec(layout, spec.T, spec.V, block_q),
            sequence_spec(layout, spec.T, None, block_q),
            parts_spec(1, spec, block_q) if stores else None,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((spec.B, *rows, spec.V), inputs.v.dtype),
            jax.ShapeDtypeStruct((spec.B, *rows), jnp.float32),
            parts_shape(1, spec) if stores else None,
        ],
        compiler_params=tiles.compiler_params,
        name="attention_wide_forward",
    )(inputs.q, inputs.k, inputs.v, parts, options)
    return Outputs(out, lse, (products if stores else parts) if keeps_products else None)
