"""The rows, decays and segments at each step of a walk, and the factors that follow from them.

With l_t the log-decay of step t's key, `run` the steps' segments, and sums that start anew with
each chunk, kernels take from a decay, in float32 and never above 1,

    up[t]    = sum l[first..t]                 after[t] = sum l[t+1..last]
    reads[t] = exp(up[t]),    0 unless run[t] is the run of the last step before the chunk
    adds[t]  = exp(after[t]), 0 unless run[t] is the run of the chunk's last step
    keeps[c] = exp(sum l[first..last]), 0 unless these two runs are the same

the factors of the queries that read the state ahead of the chunk, of the keys that go into the
state behind it, and of the state itself. They are the same for pieces. Within a chunk the pair
(i, j) carries exp(up[i] - up[j]), 0 unless run[i] = run[j]. Both ways, mirrored,

    reads_right[t] = exp(after[t])     adds_right[t] = exp(up[t])

These are small arrays, [B, G, steps], which XLA computes. A query that stands behind its last key
has a log-decay of its own on top, `own`.

The decay's gradient. With M[i, j] what the pair adds to the loss's derivative by its own exponent,
and F(t) that by l_t, the sum of M over the pairs with j < t <= i:

    F(t) = X + sum_{i >= t} R_i + sum_{j < t} A_j + sum_{s >= t} (sum_j M[s, j] - sum_i M[i, s])

with sums within the piece, R_i what query i reads from the state ahead of it, A_j what key j adds
to the cotangent of the state behind it, and X what passes the whole piece: with S and z ahead of
piece p and their cotangents dS and dz behind it,

    X(p) = keeps[p] (<S, dS> + z . dz)

The last sum holds each pair of two steps from t on twice, with opposite signs and the same bits. No
other part is a difference. That takes a state and a cotangent for every piece, so the backward of a
call with a decay stores them (`stored/`). Running sums E(p + 1) = E(p) - sum R + sum A of what
crosses the edges would need neither. But they gather the roundings of all their terms, and after a
strong decay the difference E - sum R has none of its bits left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax.ops.linear_attention.alignment import runs_of_keys, sort_steps, sum_between
from ato_jax.ops.linear_attention.decay import EXACT_STEP, LEAST_DECAY
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    positions_of_first_query,
)
from ato_jax.ops.linear_attention.triton import sequences
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton.arithmetic import LOG2_E

# Rows over which one product with zeros and ones sums.
SUMMED_AT_ONCE = 128
# ln 2 as 9 bits, whose products with multiples of `EXACT_STEP` are exact, and the rest.
LN2 = 355 / 512, math.log(2) - 355 / 512

# An exponent to base 2, in one part or in two: multiples of `EXACT_STEP`, which float32 adds
# exactly, and what these leave off.
Exponent = tuple[Any, ...]


class Steps(NamedTuple):
    """The rows at each of the N = walk.steps steps, and the decays and segments for `gates`."""

    rows: dict[str, jax.Array]
    powers: dict[str, jax.Array]  # `powers.arrays` of the keys; may be empty
    decay: Exponent | None  # of [B, G, N]
    own: Exponent | None  # of [B, G, N]
    run: jax.Array | None  # [B, N]


class Layout(NamedTuple):
    """`Steps` without the decays. `place`, a linear function, takes them from the inputs' array."""

    rows: dict[str, jax.Array]
    run: jax.Array | None
    place: Any


def lay_out(spec: LinearAttentionSpec, walk: Walk, inputs: Inputs) -> Layout:
    T, S, count = spec.T, spec.S, walk.steps

    def heads_first(decay: jax.Array) -> jax.Array:
        """[B, G, S], 0 for padding."""
        if spec.decay == "head":
            decay = jnp.broadcast_to(decay[:, None], (spec.B, spec.G, S))
        elif spec.layout == "bthd":
            decay = jnp.swapaxes(decay, 1, 2)
        if inputs.kv_lengths is None:
            return decay
        real = jnp.arange(S, dtype=jnp.int32) < inputs.kv_lengths[:, None, None]
        return jnp.where(real, decay, 0)

    if not walk.indexed:
        before, behind = -walk.first_key, count - S + walk.first_key

        def pad(decay: jax.Array) -> tuple[jax.Array, None]:
            return jnp.pad(heads_first(decay), ((0, 0), (0, 0), (before, behind))), None

        run = runs_of_keys(spec, inputs)
        if run is not None:
            run = jnp.pad(run, ((0, 0), (before, behind)), mode="edge")
        return Layout(sequences.length_arrays(inputs), run, pad)

    q_lengths = jnp.full(spec.B, T, jnp.int32) if inputs.q_lengths is None else inputs.q_lengths
    kv_lengths = jnp.full(spec.B, S, jnp.int32) if inputs.kv_lengths is None else inputs.kv_lengths
    step = jnp.arange(count, dtype=jnp.int32)
    if spec.segments == "cross":
        runs = runs_of_keys(spec, inputs)
        assert runs is not None and inputs.q_segments is not None
        order = sort_steps(spec, inputs, runs)
        # Steps at the end hold no row.
        numbers = jnp.pad(order.steps, ((0, 0), (0, count - T - S)), constant_values=T + S)
        key, query = numbers, jnp.where(numbers < S, T, numbers - S)
        asked = jnp.take_along_axis(order.asked, jnp.minimum(query, T - 1), 1)
        q_runs = jnp.where(order.asked, inputs.q_segments, runs[:, -1:])
        run = jnp.where(
            numbers < S,
            jnp.take_along_axis(runs, jnp.minimum(key, S - 1), 1),
            jnp.take_along_axis(q_runs, jnp.minimum(query, T - 1), 1),
        )
        run = jnp.where(step < T + S, run, run[:, T + S - 1, None])
    else:
        # From the first real row on, and round: rows that are passed over come again, as padding.
        run, order = None, None
        offset = positions_of_first_query(spec, inputs)[:, None]
        first = jnp.minimum(offset, 0)
        key, query = (first + step) % count, (first - offset + step) % count
        asked = (query < q_lengths[:, None]) & (query + offset >= -1)
    real = key < kv_lengths[:, None]

    def entries(number: jax.Array, real: jax.Array, length: int) -> jax.Array:
        padding = jnp.where(number < length, -1 - number, length)
        return jnp.where(real & (number < length), number, padding).astype(jnp.int32)

    def gather(decay: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        decay = heads_first(decay)
        index = jnp.minimum(key, S - 1)[:, None]
        steps = jnp.where(real[:, None], jnp.take_along_axis(decay, index, 2), 0)
        if order is None:
            return steps, None
        own = jax.vmap(sum_between)(decay[..., None], order.low, order.high)[..., 0]
        index = jnp.minimum(query, T - 1)[:, None]
        return steps, jnp.where(asked[:, None], jnp.take_along_axis(own, index, 2), 0)

    return Layout({"query": entries(query, asked, T), "key": entries(key, real, S)}, run, gather)


def _running(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> the sums up to each entry, itself included, and of those after it.

    Products with triangles of ones, because differences of sums would lose bits."""
    size = values.shape[-1]
    if size > SUMMED_AT_ONCE and size % SUMMED_AT_ONCE == 0:
        parts = values.reshape(*values.shape[:-1], -1, SUMMED_AT_ONCE)
        up, after = _running(parts)
        totals = up[..., -1]
        before, behind = (
            jnp.einsum("...i,it->...t", totals, triangle, precision=jax.lax.Precision.HIGHEST)
            for triangle in _triangles(totals.shape[-1], strict=True)
        )
        up, after = up + before[..., None], after + behind[..., None]
        return up.reshape(values.shape), after.reshape(values.shape)
    up, after = (
        jnp.einsum("...i,it->...t", values, triangle, precision=jax.lax.Precision.HIGHEST)
        for triangle in _triangles(size, strict=False)
    )
    return up, after


def _triangles(size: int, strict: bool) -> tuple[np.ndarray, np.ndarray]:
    """[i, t]: 1 where i <= t, or i < t; and where i > t."""
    i, t = np.arange(size)[:, None], np.arange(size)[None, :]
    return ((i < t) if strict else (i <= t)).astype(np.float32), (i > t).astype(np.float32)


def to_base_2(spec: LinearAttentionSpec, decay: jax.Array) -> Exponent:
    """The log-decays, clamped; in two parts where products are exact.

    A difference of sums loses what is small beside them, and so does 2 to the power of a sum. The
    parts add up to more bits than the product with `LOG2_E` has, whose roundings are all alike in
    like steps.
    """
    decay = jnp.maximum(decay, LEAST_DECAY)
    if spec.dtype != "float32" or spec.precision != "exact":
        return (decay * LOG2_E,)
    coarse = jnp.round(decay * (LOG2_E / EXACT_STEP)) * EXACT_STEP
    high, low = LN2
    return coarse, (decay - coarse * high - coarse * low) * LOG2_E


def _power(exponent: Exponent) -> jax.Array:
    """2 to the exponent.

    exp2 of 64 has an error of several 1e-6, that of rounding its product with ln 2, which XLA takes
    exp of. So of two parts it only takes the fraction; powers below 2^-126 are then 0.
    """
    if len(exponent) == 1:
        return jnp.exp2(jnp.asarray(exponent[0], jnp.float32))
    coarse, fine = exponent
    whole = jnp.round(coarse)
    bits = jnp.maximum(whole.astype(jnp.int32) + 127, 0) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32) * jnp.exp2(coarse - whole + fine)


def gates(
    spec: LinearAttentionSpec, walk: Walk, steps: Steps, block: int, names: Sequence[str]
) -> dict[str, jax.Array]:
    """The arrays of these names, where the call has them, for chunks of `block` steps.

    `up`, `fine`, `own`, `own_fine` [B, G, N] are exponents to base 2, the fine parts what exact
    products need beside the others; `run` [B, N]; `reads`, `adds` [B, G or 1, N]; `keeps` [B, G or
    1, chunks].
    """
    if steps.decay is None and steps.run is None:
        return {}
    count = walk.steps // block
    found: dict[str, jax.Array] = {}
    up: Exponent = (0.0,)
    after: Exponent = (0.0,)
    own: Exponent = (0.0, 0.0)
    if steps.decay is not None:
        shape = *steps.decay[0].shape[:2], count, block
        up, after = zip(*(_running(part.reshape(shape)) for part in steps.decay), strict=True)
        found |= dict(zip(("up", "fine"), up, strict=False))
        if steps.own is not None:
            own = tuple(part.reshape(shape) for part in steps.own)
            found |= dict(zip(("own", "own_fine"), own, strict=False))
    here: Any = True
    at_left = at_right = (here, here)
    left_stays = right_stays = here
    if steps.run is not None:
        run = steps.run.reshape(-1, 1, count, block)  # [B, 1, chunks, C]
        first, last = run[..., :1], run[..., -1:]
        ahead = jnp.pad(last[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))
        behind = jnp.concatenate([first[:, :, 1:], last[:, :, -1:]], axis=2)
        at_left, at_right = (run == ahead, run == last), (run == behind, run == first)
        left_stays, right_stays = ahead == last, behind == first

    def factor(exponent: Exponent, where: Any) -> jax.Array:
        return jnp.where(where, _power(exponent), 0.0)

    def with_own(exponent: Exponent) -> Exponent:
        return tuple(part + on_top for part, on_top in zip(exponent, own, strict=False))

    total = up if steps.decay is None else tuple(part[..., -1:] for part in up)
    found |= {
        "reads": factor(with_own(up), at_left[0]),
        "adds": factor(after, at_left[1]),
        "keeps": factor(total, left_stays),
    }
    if walk.both_ways:
        found |= {
            "reads_right": factor(with_own(after), at_right[0]),
            "adds_right": factor(up, at_right[1]),
            "keeps_right": factor(total, right_stays),
        }
    found = {
        name: array.reshape(*array.shape[:2], -1) for name, array in found.items() if name in names
    }
    if steps.run is not None and "run" in names:
        found["run"] = steps.run
    return found


def edge_flows(state: tuple[jax.Array, jax.Array], cotangent: tuple[jax.Array, jax.Array]) -> Any:
    """<S, dS> + z . dz, [B, G, P], from kv [B, G, P, V, F] and k_sum [B, G, P, F] of both."""
    kv = jnp.sum(state[0].astype(jnp.float32) * cotangent[0].astype(jnp.float32), axis=(3, 4))
    return kv + jnp.sum(state[1] * cotangent[1], axis=3)


def decay_flows(walk: Walk, starts: jax.Array, ends: jax.Array, passing: jax.Array) -> jax.Array:
    """F at each step, [B, G, N] float32.

    Args:
      starts: [B, G, N], what each step adds for the later steps of its piece.
      ends: [B, G, N], what each step adds for the earlier steps of its piece and itself.
      passing: [B, G, P], X of each piece.
    """
    starts, ends = (
        array.reshape(*array.shape[:2], -1, walk.pieces.rows) for array in (starts, ends)
    )
    # Not the sum up to a step less the step's own, which may be nearly all of it before a strong
    # decay.
    before = jnp.flip(_running(jnp.flip(starts, -1))[1], -1)
    flow = ends + _running(ends)[1] + before + passing[..., None]
    return flow.reshape(*flow.shape[:2], -1)
