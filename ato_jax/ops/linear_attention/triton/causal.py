"""Query i sees keys up to position i + offset: chunks inside pieces, causal or both ways.

With offset = S - T the last query sees the last key. The positions are cut into pieces, a piece
into chunks of C rows. Position p is key p and query p - offset, so that in the same chunk row i
sees row j iff j <= i. One state per piece is summed (`states.py`) and accumulated over the pieces
(`scan.py`). Then either one program walks each piece chunk by chunk, its running state S [F, V]
and z [F] in registers (`carried.py`), or the pieces are short, and there is a program for each
chunk, which reads its piece's state and goes through the piece's chunks (`stored/`). With
seen[i, j] = 1 iff j <= i:

    num = phi(q) S + w v              w = seen * (phi(q) phi(k)^T)
    den = phi(q) . z + w 1
    out = num / max(den, eps)         normalize, else scale * num

Backward, a walk in the same order finds dq. With dw = seen * (do v^T), the weights' gradient
without the normaliser, and row i's own z_i = z + sum_{j<=i} phi(k_j):

    y_i       = S do_i + sum_j dw[i, j] phi(k_j)
    e_i       = -(phi(q_i) . y_i) / den_i, 0 where phi(q_i) . z_i <= eps or not normalize
    d_num_i   = do_i / den_i
    d_den_i   = e_i / den_i
    d_phi_q_i = (y_i + e_i z_i) / den_i

and a walk from the end finds dk and dv, with dS = sum phi(q_i) d_num_i^T and dz = sum d_den_i
phi(q_i) over the queries i of later chunks. The walk before left e and 1 / den in float32. 1 / den
multiplies phi(q), not do: one tile then serves dv, d_phi_k and dS, and weights that may all be
alike round differently from query to query.

    dv_j      = dS^T phi(k_j) + sum_i seen[i, j] (phi(q_i) . phi(k_j)) d_num_i
    d_phi_k_j = dS v_j + dz   + sum_i seen[i, j] (d_num_i . v_j + d_den_i) phi(q_i)

A decay or segments multiply a pair's weight, and what goes through a state, by the factors `pair`,
`reads`, `adds` and `keeps` (`steps.py`): w and dw by `pair`, S and z where a query reads them by
`reads`, phi(k_j) where it goes into them by `adds`, and likewise backwards.

Both ways, a pair has a weight for all i and j, and there is a second state, of the keys in later
chunks. A piece is then one chunk, so that there is a stored state on either side of each.

The states' kv are held transposed, [V, F], as the state pass leaves them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.scans.returned import add_returned
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.triton import carried, powers, stored
from ato_jax.ops.linear_attention.triton.calls import FineSpec, unrounded
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.scan import Edges, scan_states
from ato_jax.ops.linear_attention.triton.sequences import sum_over_group
from ato_jax.ops.linear_attention.triton.states import piece_states
from ato_jax.ops.linear_attention.triton.steps import (
    Steps,
    decay_flows,
    edge_flows,
    gates,
    lay_out,
    to_base_2,
)
from ato_jax.ops.linear_attention.triton.walk import Walk, plan


def _lay_out(spec: LinearAttentionSpec, walk: Walk, inputs: Inputs) -> tuple[Steps, Any]:
    """The steps; and a function from their decays' gradients to that of the inputs' decay."""
    layout = lay_out(spec, walk, inputs)
    decay = own = pull = None
    if inputs.decay is not None:
        _, pull = jax.vjp(layout.place, inputs.decay)
        # Part by part: `own` is a sum, too.
        decay, own = zip(*map(layout.place, to_base_2(spec, inputs.decay)), strict=True)
        own = None if own[0] is None else own
    steps = Steps(layout.rows, powers.arrays(spec, inputs), decay, own, layout.run)
    return steps, pull


def _sides(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk, steps: Steps
) -> list[Edges]:
    """The states that the queries read: sums over the keys before each edge, and both ways also
    over those behind it."""
    names = ("adds", "keeps", "adds_right", "keeps_right")
    of_pieces = gates(spec, walk, steps, walk.pieces.rows, names)

    def sums(suffix: str) -> tuple[jax.Array, jax.Array]:
        arrays = steps.rows | steps.powers
        if of_pieces:
            arrays["adds"] = of_pieces[f"adds{suffix}"]
        keys_at = functools.partial(walk.keys_at, spec)
        return piece_states(
            spec,
            config,
            inputs.k,
            inputs.v,
            walk.pieces,
            keys_at,
            arrays,
            dtype=walk.state_dtype,
        )

    start = None
    if inputs.initial_state is not None:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    left = scan_states(sums(""), start, of_pieces.get("keeps"))
    if not walk.both_ways:
        return [left]
    keeps = of_pieces["keeps_right"]
    return [left, scan_states(sums("_right"), None, keeps, reverse=True)]


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    walk = plan(spec, config)
    steps, _ = _lay_out(spec, walk, inputs)
    sides = _sides(spec, config, inputs, walk, steps)
    kernels = stored if walk.stored else carried
    out = kernels.output(spec, config, inputs, walk, steps, sides)
    state = LinearState(jnp.swapaxes(sides[0].end_kv, 2, 3), sides[0].k_sum[:, :, -1])
    return Outputs(out, state)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    if spec.decay is not None and spec.return_state:
        without = dataclasses.replace(spec, return_state=False)
        if isinstance(spec, FineSpec):
            # Rounded before the sum, too, few numbers that cancel are beyond their budget.
            without = unrounded(without)
        found = backward(without, config, residuals, cotangents)
        found = add_returned(spec, inputs, cotangents.state, found)
        if not isinstance(spec, FineSpec):
            return found
        return found._replace(
            q=found.q.astype(inputs.q.dtype),
            k=found.k.astype(inputs.k.dtype),
            v=found.v.astype(inputs.v.dtype),
        )
    walk = plan(spec, config, "backward")
    steps, pull = _lay_out(spec, walk, inputs)
    states = _sides(spec, config, inputs, walk, steps)
    kernels = stored if walk.stored else carried
    found = kernels.query_gradient(spec, config, inputs, walk, steps, states, cotangents.out)

    def of_group(array: jax.Array) -> jax.Array:
        # The array has an entry per piece that holds queries, or per step of these.
        first = array.shape[2] * walk.with_queries // (walk.pieces.count - walk.with_queries)
        return sum_over_group(spec, array, first)

    end = None
    if spec.return_state:
        end = jnp.swapaxes(cotangents.state.kv, 2, 3), cotangents.state.k_sum
    pieces = [(of_group(kv), of_group(k_sum)) for kv, k_sum in found.sides]
    keeps = gates(spec, walk, steps, walk.pieces.rows, ("keeps", "keeps_right"))
    sides = [scan_states(pieces[0], end, keeps.get("keeps"), reverse=True)]
    if walk.both_ways:
        sides.append(scan_states(pieces[1], None, keeps["keeps_right"]))
    dk, dv, flows = kernels.key_gradient(
        spec, config, inputs, walk, steps, sides, found.normalizer, cotangents.out
    )
    d_state = d_decay = None
    if inputs.initial_state is not None:
        d_state = LinearState(jnp.swapaxes(sides[0].end_kv, 2, 3), sides[0].k_sum[:, :, 0])
    if pull is not None:
        reads = [of_group(array) for array in found.reads]
        own = None if found.own is None else of_group(found.own)
        d_steps = _decay_gradient(walk, keeps, states, sides, reads, flows)
        (d_decay,) = pull((d_steps, own))
    return Inputs(found.dq, dk, dv, decay=d_decay, initial_state=d_state)


def _decay_gradient(
    walk: Walk,
    keeps: dict[str, jax.Array],
    states: list[Edges],
    cotangents: list[Edges],
    reads: list[jax.Array],
    flows: list[jax.Array],
) -> jax.Array:
    """The gradient of each step's decay, [B, G, steps] (`steps.py`)."""
    ends, starts, *right = flows

    def edges(side: Edges, part: slice) -> tuple[jax.Array, jax.Array]:
        return side.kv[:, :, part], side.k_sum[:, :, part]

    ahead, behind = slice(None, -1), slice(1, None)
    passing = keeps["keeps"] * edge_flows(edges(states[0], ahead), edges(cotangents[0], behind))
    if not walk.both_ways:
        return decay_flows(walk, starts, ends + reads[0], passing)
    passing += keeps["keeps_right"] * edge_flows(
        edges(states[1], behind), edges(cotangents[1], ahead)
    )
    return decay_flows(walk, starts + reads[1], ends + reads[0] + right[0], passing)
