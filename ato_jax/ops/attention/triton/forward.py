"""The forward kernel: one program per (query block, head, batch entry), keys block by block.

With scores s in units of log2 (without a bias; `common.py`), each block of keys updates

    m'    = max(m, max_j s_j)
    p_j   = exp2(s_j - m')
    total = total * exp2(m - m') + sum_j p_j
    acc   = acc * exp2(m - m') + sum_j dropped(p_j) v_j

and at the end out = acc / total, lse = ln(2) * m + ln(total). In 16 bits, out is divided by total
less `_rounding_of_top`. A sink comes last (`_with_sink`). Where the queries are too few to fill the
card, several programs share the keys of a query block, and `merge` merges their parts.

The exponentials depend on q k^T, so with one block of queries the tensor cores idle until the
exponentials finish. A block of queries may therefore be cut into `strands`, each with its own m,
total and acc. q k^T of all strands comes first; then the exponentials of one strand overlap with
the products of the strand before it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.merging import merge
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs, rest_in_units
from ato_jax.ops.attention.triton.block_sizes import Config
from ato_jax.ops.attention.triton.common import (
    Blocks,
    Sliced,
    each,
    fitted,
    in_score_units,
    inner,
    load_rows,
    multiply_add,
    natural,
    parts_first,
    plus_product,
    power,
    raw_scores,
    score_factor,
    sequence_spec,
    span,
    store_rows,
    store_tile,
    whole_spec,
    zeros,
)
from ato_jax.ops.attention.triton.pairs import Options, Pairs, Side, batch_and_part, options_of
from ato_jax.ops.attention.triton.visibility import for_blocks

# The initial m: finite, so that rows which have seen no key yet subtract no infinities, and below
# every score, so that exp2(m - m') is 0 at the first key.
FLOOR = float(np.finfo(np.float32).min)


class Carry(NamedTuple):
    """The state of a strand's queries, after the keys so far."""

    m: jax.Array  # [rows]
    top: jax.Array | None  # [rows], the highest raw score; None unless `_rounds_top`
    total: jax.Array  # [rows]
    acc: Sliced  # [rows, V]


class Strand(NamedTuple):
    """Some of a program's queries, from row `start` of the sequence on."""

    start: Any
    query: Side  # [rows, 1]
    q: Sliced  # [rows, D]


def _start(spec: AttentionSpec, rows: int) -> Carry:
    """Queries that have seen no key."""
    m, total = jnp.full((rows,), FLOOR, jnp.float32), jnp.zeros((rows,), jnp.float32)
    top = jnp.full((rows,), -jnp.inf, jnp.float32) if _rounds_top(spec) else None
    return Carry(m, top, total, zeros(rows, spec.V))


def _with_sink(
    spec: AttentionSpec, sink: jax.Array, m: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """m and total with a sink, in units of scores, and the factor of what the old m was taken from.

    It comes after all keys. With m from a sink above the scores, the weights of scores that are
    all alike would all have one rounding, up to 4e-3 in bfloat16; from the highest of them they are
    all near 1, which bfloat16 holds.
    """
    m_next = jnp.maximum(m, sink)
    factor = power(spec, m - m_next)
    return m_next, total * factor + power(spec, sink - m_next), factor  # a sink of -inf adds 0


def _rounds_top(spec: AttentionSpec) -> bool:
    """Whether the highest score's weight may differ from 1 and is rounded for its product.

    With a bias, m is the highest score itself, and the weight is 1.
    """
    return spec.dtype != "float32" and spec.bias is None


def _rounding_of_top(
    spec: AttentionSpec, m: jax.Array, top: jax.Array, fast_exp2: bool
) -> jax.Array:
    """The highest score's weight less the weight as rounded to 16 bits, [rows].

    m = top * factor is rounded, and the multiply-add top * factor - m is not zero but that rounding
    error. At a score of 3000 the highest weight is therefore 1 + d with |d| up to 2e-4. total holds
    1 + d and acc holds 1 times v. Where that key has nearly all the weight, acc / total is
    v (1 - d), and in the backward pass d exceeds what is left of do . v - do . out.
    """
    weight = power(spec, multiply_add(top, score_factor(spec), -m), fast_exp2)
    return weight - weight.astype(spec.dtype).astype(jnp.float32)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    options: Options,
    out_ref: Any,
    lse_ref: Any,
    rest_ref: Any | None,
    *,
    spec: AttentionSpec,
    blocks: Blocks,
    strands: int,
) -> None:
    layout = spec.layout
    block_q, block_k, parts, fast_exp2 = blocks
    block, h = pl.program_id(0), pl.program_id(1)
    if spec.right is not None:
        # The last queries see the most keys, so their programs start first.
        block = pl.num_programs(0) - 1 - block
    b, part = batch_and_part(pl.program_id(2), parts)
    pairs = Pairs.of(spec, options, b, "queries")
    q_length, kv_length = pairs.limits.q_length, pairs.limits.kv_length
    rows = block_q // strands
    # An int means that no tile crosses the end and needs a mask. Where a block crosses it, a whole
    # strand may lie beyond, so `end` is an array there.
    end: Any = spec.T if spec.T % block_q == 0 else jnp.int32(spec.T)
    if not spec.q_lengths:
        q_length = end

    def strand(n: int) -> Strand:
        start = block * block_q + n * rows
        query = pairs.queries(span(start, rows)[:, None])
        return Strand(start, query, load_rows(layout, q_ref, None, start, rows, q_length, spec.D))

    own = [strand(n) for n in range(strands)]

    def weigh(
        masked: bool, query: Side, key: Side, product: jax.Array, m: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The highest raw score, m', exp2(m - m') for the sums so far, and p [rows, block_k]."""
        raw, factor = pairs.biased(h, raw_scores(spec, product), query, key)
        seen = pairs.visible(h, masked, query, key)
        if seen is not None:
            raw = jnp.where(seen, raw, -jnp.inf)
        highest = jnp.max(raw, axis=1)
        m_next = jnp.maximum(m, highest * factor)
        p = power(spec, multiply_add(raw, factor, -m_next[:, None]), fast_exp2)
        return highest, m_next, power(spec, m - m_next, fast_exp2), p

    def step(masked: bool, n: Any, carries: tuple[Carry, ...]) -> tuple[Carry, ...]:
        j0 = n * block_k
        key = pairs.keys(span(j0, block_k)[None, :], masked)  # [1, block_k]
        k = load_rows(layout, k_ref, None, j0, block_k, kv_length, spec.D, not masked)
        products = [inner(spec, q, k) for _, _, q in own]  # [rows, block_k]
        v: Sliced = ()
        found = []
        for (_, query, _), product, carry in zip(own, products, carries, strict=True):
            m, top, total, acc = carry
            highest, m, correction, p = weigh(masked, query, key, product, m)
            top = None if top is None else jnp.maximum(top, highest)
            total = total * correction + jnp.sum(p, axis=1)
            kept = pairs.kept(h, query, key)
            if kept is not None:
                p = jnp.where(kept, p, 0.0)
            # Loaded here, since without prefetching it would occupy registers until it is used.
            v = v or load_rows(layout, v_ref, None, j0, block_k, kv_length, spec.V, not masked)
            # mypy infers no type for a lambda with a default.
            acc = each(lambda tile, by=correction: tile * by[:, None], acc)  # type: ignore[misc]
            acc = plus_product(spec, acc, p.astype(v[0].dtype), v)
            found.append(Carry(m, top, total, acc))
        return tuple(found)

    first = _start(spec, rows)
    ranges = pairs.ranges(block, block_q, block_k, part, parts)
    ended = for_blocks(ranges, step, (first,) * strands)
    for (start, query, _), (m, top, total, acc) in zip(own, ended, strict=True):
        if spec.q_lengths:
            exists = query.indices[:, 0] < q_length
            m, total = jnp.where(exists, m, first.m), jnp.where(exists, total, first.total)
            top = None if top is None else jnp.where(exists, top, -jnp.inf)
            acc = each(lambda tile, exists=exists: jnp.where(exists[:, None], tile, 0.0), acc)  # type: ignore[misc]
        of_keys, factor = m, None
        if options.sinks is not None:
            # Where keys are cut into parts, only the first part adds the sink.
            sink = jnp.where(part == 0, in_score_units(spec, options.sinks[h]), -jnp.inf)
            m, total, factor = _with_sink(spec, sink, m, total)
            acc = each(lambda tile, by=factor: tile * by[:, None], acc)  # type: ignore[misc]
        nothing = total == 0
        safe = jnp.where(nothing, 1.0, total)
        lse = jnp.where(nothing, -jnp.inf, natural(spec, m) + jnp.log(safe))
        if top is not None:
            rounding = _rounding_of_top(spec, of_keys, top, fast_exp2)
            rounding = rounding if factor is None else rounding * factor
            safe = jnp.where(nothing, 1.0, total - rounding)
        divisor = safe * (1 - spec.dropout_rate) if spec.dropout_rate else safe
        out = each(lambda tile, by=divisor: tile / by[:, None], acc)  # type: ignore[misc]
        store_rows(layout, out_ref, None, start, out, end, spec.V)
        store_tile(layout, lse_ref, None, start, lse, end)
        if rest_ref is not None:

            def left(tile: jax.Array) -> jax.Array:
                rounded = tile.astype(out_ref.dtype).astype(jnp.float32)
                return rest_in_units(spec, tile, rounded)

            rest = each(left, out)
            store_rows(layout, rest_ref, None, start, rest, end, spec.V)


def forward(spec: AttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    layout, parts = spec.layout, config.parts
    block_q, block_k = fitted(config.block_q, spec.T), fitted(config.block_k, spec.S)
    share = spec.H // spec.G
    options = options_of(spec, inputs, "queries", block_q, block_k)
    rows = (spec.T, spec.H) if layout == "bthd" else (spec.H, spec.T)
    # Parts are rounded after they are merged.
    out_dtype = inputs.v.dtype if parts == 1 else jnp.float32
    in_kernel = spec.keep_rest and parts == 1
    out, lse, rest = pallas_call(
        functools.partial(
            _kernel,
            spec=spec,
            blocks=Blocks(block_q, block_k, parts, config.fast_exp2),
            # The strands of a shorter block would be too short for the tensor cores.
            strands=config.strands if block_q == config.block_q else 1,
        ),
        grid=(pl.cdiv(spec.T, block_q), spec.H, spec.B * parts),
        in_specs=[
            sequence_spec(layout, spec.T, spec.D, block_q, parts=parts),
            sequence_spec(layout, spec.S, spec.D, block_k, share=share, parts=parts),
            sequence_spec(layout, spec.S, spec.V, block_k, share=share, parts=parts),
            jax.tree.map(whole_spec, options),
        ],
        out_specs=[
            sequence_spec(layout, spec.T, spec.V, block_q),
            sequence_spec(layout, spec.T, None, block_q),
            sequence_spec(layout, spec.T, spec.V, block_q) if in_kernel else None,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((spec.B * parts, *rows, spec.V), out_dtype),
            jax.ShapeDtypeStruct((spec.B * parts, *rows), jnp.float32),
            jax.ShapeDtypeStruct((spec.B, *rows, spec.V), jnp.int8) if in_kernel else None,
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        name="attention_forward",
    )(inputs.q, inputs.k, inputs.v, options)
    if parts > 1:
        out, lse = merge(*(parts_first(array, parts) for array in (out, lse)))
        if spec.keep_rest:
            # XLA may remove a pair of casts, but not this.
            figures = jnp.finfo(inputs.v.dtype)
            rounded = lax.reduce_precision(out, figures.nexp, figures.nmant)
            rest = rest_in_units(spec, out, rounded)
    return Outputs(out.astype(inputs.v.dtype), lse, rest)
