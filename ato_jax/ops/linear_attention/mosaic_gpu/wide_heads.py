"""Both passes of a call whose rows are computed run by run: `keep` forward, `backward` backward.

A run is 256 consecutive rows. These calls have heads of 129 to 256 columns and are causal, or each
query sees its whole segment, or a decay lies between a query and the keys on both sides of it.
Some calls with narrower heads that are not causal run here, too (`scans.chunks.in_runs`). The
backend (`__init__.py`) calls `keep` and `backward`, which launch two kernels:

    wide_states.py    walks a sequence and stores the state ahead of, or behind, each run
    wide_runs.py      computes the rows of each run from that state and the pairs within the run

A decay per head or step, and segments, become factors of rows (`wide_factors.py`). In float16
operands are multiplied by powers of two (`wide_powers.py`). Read `wide_runs.py` next.

In a causal call a row of out reads the sums over earlier keys, and a row of dk or dv the sums over
later queries: keys are walked from the first chunk to the last, queries from the last to the first.
Where rows see both sides through a decay, each of the two walks also runs in the other direction,
and each run reads two states. Where each query sees its whole segment, without a decay, both walks
go forwards and store the sums over each document (`document_states.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.ops.linear_attention.alignment import runs_of_keys
from ato_jax.ops.linear_attention.mosaic_gpu import (
    causal_pieces,
    document_states,
    frame,
    powers,
    wide_factors,
    wide_powers,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.mosaic_gpu.whole_sums import blocks_of_state, whole_sums
from ato_jax.ops.linear_attention.mosaic_gpu.wide_factors import Factors, factors_of
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_arrays import Arrays, Beyond, Left, Pass
from ato_jax.ops.linear_attention.mosaic_gpu.wide_runs import (
    whole_units,
    wide_key_gradients,
    wide_runs,
)
from ato_jax.ops.linear_attention.mosaic_gpu.wide_states import wide_states
from ato_jax.ops.linear_attention.scans.borders import OfSequence, of_sequence
from ato_jax.ops.linear_attention.scans.edges import at_edges
from ato_jax.ops.linear_attention.scans.gates import OfPieces, of_pieces
from ato_jax.ops.linear_attention.scans.run_flows import (
    AtRuns,
    decay_flows_of_runs,
    gradient_of_heads,
)
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)

State = tuple[jax.Array, jax.Array]


class States(NamedTuple):
    """The states of keys: S [B, G, runs, F, V] ahead of each run and z [B, G, chunks, F] ahead of
    each chunk; where rows see both sides through a decay also S and z behind each. With documents
    they are those of `document_states.py`. In float16 they are multiplied by `powers`."""

    ahead: State
    behind: State | None
    powers: wide_powers.OfKeys | None


class Kept(NamedTuple):
    """The outputs of the forward pass, and the states of keys for the backward pass."""

    out: jax.Array
    state: LinearState
    states: States

    def plain(self) -> Outputs:
        return Outputs(self.out, self.state)


@dataclasses.dataclass(frozen=True)
class Call:
    """What all walks of one call share. `deal` counts query heads. `factors` is None where the call
    has neither a decay nor segments, and where `documents` takes its place."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    pieces: OfPieces | None
    borders: OfSequence
    factors: Factors | None
    documents: document_states.OfRows | None

    @property
    def both_ways(self) -> bool:
        """Whether states are stored of both sides of a run."""
        return not self.spec.causal and self.documents is None


def call_of(spec: LinearAttentionSpec, deal: mosaic.Deal, inputs: Inputs) -> Call:
    """`inputs.decay` holds the gates: the prefix sums of the log2 decays in each chunk."""
    borders, pieces, gates = of_sequence(spec, deal, runs_of_keys(spec, inputs)), None, inputs.decay
    if gates is not None:
        pieces = of_pieces(spec, deal, gates, borders.begun)
        gates = pieces.gates
    if frame.by_documents(spec):
        return Call(spec, deal, pieces, borders, None, document_states.of_rows(spec, borders))
    return Call(spec, deal, pieces, borders, factors_of(spec, gates, borders), None)


def keep(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Kept:
    """The forward pass. `inputs.decay` holds the gates."""
    call = call_of(spec, causal_pieces.deal_of(spec, config), inputs)
    found, end = states_of(call, inputs, spec.return_state)
    given = Arrays(inputs.q, inputs.k, inputs.v, *found.ahead)
    if found.powers is not None:
        of_keys = found.powers.keys, found.powers.state, found.powers.features * spec.D
        given = given._replace(powers=_together(*of_keys))
    given = _with_factors(call, given, found.behind)
    out = wide_runs(spec, call.deal, Pass.OUT, given).found
    if found.powers is not None:
        end = powers.times(end, 1 / found.powers.keys)
    if end is None:
        of_state = spec.B, spec.G, spec.D, spec.V
        end = LinearState(jnp.zeros(of_state, jnp.float32), jnp.zeros(of_state[:3], jnp.float32))
    return Kept(out, end, found)


def states_of(call: Call, inputs: Inputs, is_returned: bool) -> tuple[States, LinearState | None]:
    """The states of keys that all passes read, and the state behind the last row, which in float16
    is multiplied by c (`wide_powers.py`)."""
    by = wide_powers.of_keys(call.spec, inputs)
    start, of_states, behind = inputs.initial_state, None, None
    if by is not None:
        start, of_states = powers.times(start, by.keys), _together(by.keys, by.state)
    arrays = inputs.k, inputs.v, (), of_states
    ahead, end = _walked(call, "wide_key_states", *arrays, start, is_returned)
    if call.both_ways:
        behind, _ = _walked(call, "wide_key_states", *arrays, from_the_end=True)
    return States(ahead, behind, by), end


def backward(
    spec: LinearAttentionSpec,
    config: Config,
    residuals: Residuals,
    cotangents: Outputs,
    decay: jax.Array | None,
) -> Inputs:
    """The backward pass, with H = G. `inputs.decay` holds the gates; `decay` holds the decays
    themselves, as `flows.decay_flows` takes them."""
    inputs, outputs = residuals
    call = call_of(spec, causal_pieces.deal_of_gradients(spec, config), inputs)
    if call.pieces is not None:
        inputs = inputs._replace(decay=call.pieces.gates)
    if isinstance(outputs, Kept) and call.deal == causal_pieces.deal_of(spec, config):
        kept = outputs.states
    else:
        kept, _ = states_of(call, inputs, is_returned=False)
    q, k, v, g = inputs.q, inputs.k, inputs.v, cotangents.out
    by = kept.powers
    of_queries = _query_gradient(call, (q, k, v, g), kept)
    own = of_queries.inverse, of_queries.e
    end = cotangents.state if spec.return_state else None
    of_sums, of_states, of_passes = None, None, None
    if by is not None:
        of_sums, own = _in_powers(spec, by, of_queries, end)
        end = powers.times(end, of_sums.queries / by.keys)
        of_states = _together(by.keys, of_sums.sums)
        of_pairs = of_sums.pairs, of_sums.queries, of_sums.shares
        of_passes = _together(by.keys, of_sums.sums, *of_pairs)
    arrays = q, g, own, of_states
    states, of_initial = _walked(
        call,
        "wide_query_states",
        *arrays,
        end,
        spec.initial_state,
        from_the_end=call.documents is None,
    )
    ahead = None
    if call.both_ways:
        ahead, _ = _walked(call, "wide_query_states", *arrays)
    given = Arrays(v, g, q, *states, k, *own, powers=of_passes)
    given = _with_factors(call, given, ahead, from_the_end=True)
    dk, of_keys = wide_key_gradients(spec, call.deal, given)
    if by is not None and of_sums is not None:
        of_initial = powers.times(of_initial, by.keys / of_sums.queries)
    d_decay = None
    if inputs.decay is not None:
        queries = AtRuns(of_queries.flows, *kept.ahead)
        keys = AtRuns(of_keys.flows, *states, within=of_keys.within)
        units, units_of_keys = {}, {}
        if by is not None and of_sums is not None:
            units = {"unit": 1 / by.keys, "unit_of_kv": 1 / by.state}
            units_of_keys = {"unit": by.keys / of_sums.queries, "unit_of_kv": 1 / of_sums.sums}
        queries, keys = queries._replace(**units), keys._replace(**units_of_keys)
        beyond = None
        if kept.behind is not None and ahead is not None:
            beyond = (
                AtRuns(of_queries.flows_beyond, *kept.behind, **units),
                AtRuns(of_keys.flows_beyond, *ahead, **units_of_keys),
            )
        if spec.decay == "head":
            assert call.factors is not None
            d_decay = gradient_of_heads(spec, queries, keys, beyond, call.factors.keeps)
        else:
            queries = queries._replace(within=of_keys.seen_within)
            of_start = None if of_initial is None else queries.of_start(of_initial)
            of_flows = inputs.decay, queries, keys, beyond, of_start, decay, call.borders
            d_decay = decay_flows_of_runs(spec, call.deal, *of_flows)
    return Inputs(of_queries.found, dk, of_keys.found, decay=d_decay, initial_state=of_initial)


def unless_steep(
    gates: jax.Array,
    fallback: Callable[..., Inputs],
    run: Callable[..., Inputs],
    spec: LinearAttentionSpec,
    residuals: Residuals,
    cotangents: Outputs,
) -> Inputs:
    """The gradients by `run`, or by `fallback` if any chunk is steep: there single terms of the
    decay's gradient may be far larger than their sum.

    Args:
      gates: the prefix sums of the log2 decays in each chunk, [B, G, T up to a whole chunk].
      fallback: takes the arguments of `run`, with `Outputs` in place of `Kept`.
    """
    of_chunks = gates.reshape(*gates.shape[:2], -1, frame.C)
    middle, last = of_chunks[..., frame.C // 2 - 1], of_chunks[..., frame.C - 1]
    inputs, outputs = residuals
    return jax.lax.cond(
        jnp.any(frame.is_steep(spec, middle, last)),
        lambda: fallback(spec, Residuals(inputs, outputs.plain()), cotangents),
        lambda: run(spec, residuals=residuals, cotangents=cotangents),
    )


def _walked(
    call: Call,
    name: str,
    x: jax.Array,
    y: jax.Array,
    own: tuple[jax.Array, ...],
    of_states: jax.Array | None,
    start: LinearState | None = None,
    is_whole: bool = False,
    from_the_end: bool = False,
) -> tuple[State, LinearState | None]:
    """Walks a sequence by `wide_states`: over keys, or over queries. Where the call has several
    pieces, `whole_sums` computes the sum of each piece first. "Ahead" and "behind" are meant in the
    direction of the walk.

    Returns the sums [B, heads, runs, F, V] ahead of each run with the vectors [B, heads, chunks, F]
    ahead of each chunk, and the state behind the last run.

    Args:
      x: k of a walk over keys, q of a walk over queries.
      y: v of a walk over keys, g of a walk over queries.
      own: () in a walk over keys; inverse and e, [B, H, T or more], in a walk over queries.
      of_states: the powers of two, as `wide_states` takes them.
      start: the state that the walk starts from.
      is_whole: whether the state behind the last run is wanted.
    """
    spec, factors = call.spec, call.factors
    deal = call.deal if own else dataclasses.replace(call.deal, heads=spec.G)
    first, count = 0, deal.pieces - (not is_whole)
    if from_the_end:
        # The sums of the first piece enter the state ahead of it alone, which `is_whole` asks for.
        first = deal.pieces - count
        part = dataclasses.replace(deal, first=first * deal.rows, pieces=count)
        of_piece = wide_factors.since_start_of_piece(spec, deal, call.pieces, call.borders)
    else:
        length = min(count * deal.rows, spec.T)
        part = dataclasses.replace(deal, length=length, pieces=count)
        of_piece = wide_factors.until_end_of_piece(spec, deal, call.pieces, call.borders)
    found = None
    if count:
        rows = own if of_piece is None else _times(own, of_piece)
        if not own and of_states is not None:
            rows = (_rows_of_keys(spec, of_piece) * of_states[..., wide_powers.KEYS, None],)
        found = _piece_sums(spec, part, "whole_query_sums" if own else "whole_sums", x, y, rows)
    keeps = call.borders.keeps if call.pieces is None else call.pieces.keeps
    dtype = jnp.bfloat16 if of_states is None else jnp.float32
    options: Any = {"ends": is_whole, "reverse": from_the_end, "dtype": dtype}
    edges = at_edges(spec, found, start, keeps, first, **options)
    kv = jnp.swapaxes(edges.kv, 3, 4)
    if of_states is not None:
        power = of_states[..., wide_powers.SUMS, None, None, None]
        kv = (kv * power).astype(frame.tiling(spec).dtype)
    rows, keeps = own, None
    if factors is not None:
        of_chunk = factors.reads_of_chunk if from_the_end else factors.adds
        rows, keeps = _times(own, of_chunk), factors.keeps
    given = x, y, (kv, edges.k_sum), rows, keeps, of_states
    steps = None if call.documents is None else call.documents.steps
    return wide_states(spec, deal, name, *given, from_the_end, steps), edges.end


def _rows_of_keys(spec: LinearAttentionSpec, of_piece: jax.Array | None) -> jax.Array:
    if of_piece is not None:
        return of_piece
    return jnp.ones((spec.B, spec.G, int(pl.cdiv(spec.T, frame.C)) * frame.C), jnp.float32)


def _with_factors(
    call: Call, given: Arrays, beyond: State | None, from_the_end: bool = False
) -> Arrays:
    """The arrays of a pass, with the factors of its rows and the states of the other side."""
    factors = call.factors
    if call.documents is not None:
        return _with_documents(call.spec, given, call.documents, from_the_end)
    if factors is None:
        return given
    ahead = factors.first, factors.reads, factors.reads_of_chunk
    behind = factors.last, factors.reads_behind, factors.adds
    own, other = (behind, ahead) if from_the_end else (ahead, behind)
    given = given._replace(sums=factors.sums, limit=own[0], reads=own[1])
    makes_z = given.reader is not None and not from_the_end and call.spec.normalize
    if makes_z:
        given = given._replace(reads_of_chunk=own[2])
    if beyond is None:
        return given
    side = Beyond(*beyond, *other[:2], other[2] if makes_z else None)
    return given._replace(beyond=side)


def _with_documents(
    spec: LinearAttentionSpec, given: Arrays, found: document_states.OfRows, from_the_end: bool
) -> Arrays:
    """The arrays of a pass whose rows read the sums over their document."""
    makes_z = given.reader is not None and not from_the_end and spec.normalize
    of_chunk = found.reads_of_chunk if makes_z else (None, None)
    limits = (found.last, found.first) if from_the_end else (found.first, found.last)
    (first, last), (reads, others) = limits, found.reads
    side = Beyond(given.states, given.vectors, last, others, of_chunk[1])
    own = {"limit": first, "reads": reads, "reads_of_chunk": of_chunk[0]}
    return given._replace(**own, beyond=side, documents=found.documents)


def _together(*of_heads: jax.Array) -> jax.Array:
    """Powers of two, [B, G] each, as one array [B, G, n]."""
    return jnp.stack(of_heads, axis=2)


def _query_gradient(
    call: Call, arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array], kept: States
) -> Left:
    """dq, and for each row inverse, e and, with a decay, flows, [B, H, T up to a whole unit] in
    float32. In float16 also the largest features and cotangents of each row, and inverse is divided
    by c. `arrays` are q, k, v and g."""
    spec, by, (q, k, v, g) = call.spec, kept.powers, arrays
    given = Arrays(g, v, k, *kept.ahead, q)
    if by is not None:
        of_pairs = by.values * spec.D
        given = given._replace(powers=_together(by.keys, by.state, of_pairs))
    left = wide_runs(spec, call.deal, Pass.DQ, _with_factors(call, given, kept.behind))
    if spec.normalize:
        return left
    inverse = jnp.full((spec.B, spec.H, whole_units(spec.T)), spec.scale, jnp.float32)
    if by is not None:
        inverse /= by.keys[..., None]
    return left._replace(inverse=inverse, e=jnp.zeros_like(inverse))


def _in_powers(
    spec: LinearAttentionSpec,
    by: wide_powers.OfKeys,
    left: Left,
    end: LinearState | None,
) -> tuple[wide_powers.OfQueries, tuple[jax.Array, jax.Array]]:
    """The powers of two for the sums over queries; and inverse, times the power of queries, and e.
    Both are 0 in rows behind the end of the sequence."""
    there = jnp.arange(left.inverse.shape[2], dtype=jnp.int32) < spec.T
    rows = left.inverse, left.e, left.features, left.cotangents
    inverse, e, features, cotangents = (jnp.where(there, x, 0.0) for x in rows)
    found = wide_powers.of_queries(spec, by, features * inverse, cotangents, e, end)
    return found, (inverse * found.queries[..., None], e)


def _times(own: Sequence[jax.Array], factor: jax.Array) -> tuple[jax.Array, ...]:
    """The numbers of rows that a walk takes. Of queries: inverse times the factor, and e, cut to
    the shorter length of the two. Of keys, which have neither: the factor."""
    if not own:
        return (factor,)
    inverse, e = own
    rows = min(inverse.shape[2], factor.shape[2])
    return inverse[:, :, :rows] * factor[:, :, :rows], e[:, :, :rows]


def _piece_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    x: jax.Array,
    y: jax.Array,
    of_rows: Sequence[jax.Array] = (),
) -> State:
    """The result of `whole_sums`, with kv transposed to [B, heads, P, V, F]."""
    deal = dataclasses.replace(deal, heads=deal.heads * blocks_of_state(spec))
    kv, k_sum = whole_sums(spec, deal, name, x, y, of_rows)
    return jnp.swapaxes(kv, 3, 4), k_sum
