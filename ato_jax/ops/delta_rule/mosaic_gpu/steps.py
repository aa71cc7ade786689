"""The numbers of each step that kernels read, which `solve.py` makes beside a chunk's inverse.

With d_t the log2 decay of a step, L_t the sum of them from the chunk's first step to t, and C the
chunk's last step:

    symbol      row          what it is
    beta_t      BETA         at least `LEAST_BETA` in magnitude
                OF_KEYS      what k_t is multiplied by: 1, or with `normalize_qk` 1 / |k_t|
                OF_QUERIES   likewise of q_t, times the scale
    L_t         LOG_DECAY
                READ         OF_QUERIES exp2(L_t): of q_t, as it reads the chunk's first state
                RECALLED     OF_KEYS exp2(L_t): of k_t, as it recalls from that state
                WRITTEN      OF_KEYS exp2(L_C - L_t): of k_t, as it is written to the last state
    d_t         DECAY
                ALIKE        the same for all steps of a chunk: 1 where its keys are alike, else 0

Without a decay L_t is 0; nobody reads LOG_DECAY and DECAY then, and nothing is stored there. ALIKE
is made where the pairs' products are (`solve.py`), and only for a backward pass with decays.

beta, decays and lengths are read where the caller has them, one number of each of 64 rows. A sum
L_t is one of 64 terms, those beyond t taken as 0, so all sums of a chunk are added up in the same
order: they never rise along a chunk, and L_C - L_C is 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, OF_COLUMNS, OF_ROWS, Item, load
from ato_jax.ops.delta_rule.mosaic_gpu import frame
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C
from ato_jax.ops.delta_rule.spec import LEAST_DECAY, DeltaRuleSpec, Inputs, inverse_lengths


class Given(NamedTuple):
    """float32, in the layout of [B, T, heads], with T up to a whole chunk; references in kernels,
    and what these hold of a chunk, [64]."""

    beta: Any
    decay: Any = None
    of_keys: Any = None  # one over the length of each k, with `normalize_qk`
    of_queries: Any = None

    def present(self) -> dict[str, Any]:
        return {name: one for name, one in self._asdict().items() if one is not None}


def given_of(spec: DeltaRuleSpec, inputs: Inputs) -> Given:
    found = Given(inputs.beta, inputs.decay)
    if spec.normalize_qk:
        of_keys, of_queries = (inverse_lengths(x.astype(F32)) for x in (inputs.k, inputs.q))
        found = found._replace(of_keys=of_keys, of_queries=of_queries)
    return Given(**{name: up_to_chunk(spec, one) for name, one in found.present().items()})


def up_to_chunk(spec: DeltaRuleSpec, array: jax.Array) -> jax.Array:
    """With zeros beyond the sequence: rows there are 0, and a decay of 1 leaves the state as it
    is."""
    padding = [(0, 0)] * array.ndim
    padding[spec.layout.index("t")] = (0, frame.chunks_of(spec) * C - spec.T)
    return array if spec.T % C == 0 else jnp.pad(array, padding)


def of_chunk(spec: DeltaRuleSpec, ref: Any, item: Item, head: Any, chunk: Any) -> Any:
    """A chunk's steps of a head, [64], in a reference of the layout's [B, T, heads]."""
    rows = pl.ds(chunk * C, C)
    at = (item.batch, rows, head) if spec.layout == "bthd" else (item.batch, head, rows)
    return ref.at[at]


def make(
    spec: DeltaRuleSpec, given: Given, item: Item, chunks: list[Any], targets: list[Any]
) -> None:
    """Makes the numbers of chunks, by the warpgroup that calls it, in shared memory,
    [NUMBERS, 64] each."""
    of_chunks = [read(spec, given, item, chunk) for chunk in chunks]
    if spec.decay is not None:
        for target, of_steps in zip(targets, of_chunks, strict=True):
            decay = jnp.maximum(of_steps.decay, LEAST_DECAY) * frame.LOG2_E
            target.at[frame.DECAY][...] = decay
        plgpu.commit_smem()
    for target, of_steps in zip(targets, of_chunks, strict=True):
        store(spec, of_steps, target)
    plgpu.commit_smem()


def read(spec: DeltaRuleSpec, given: Given, item: Item, chunk: Any) -> Given:
    key_head = frame.key_head(spec, item.head)
    heads = Given(item.head, item.head, key_head, key_head)._asdict()
    return Given(
        **{
            name: load(of_chunk(spec, ref, item, heads[name], chunk), OF_ROWS, optimized=False)
            for name, ref in given.present().items()
        }
    )


def store(spec: DeltaRuleSpec, given: Given, target: Any) -> None:
    """Stores a chunk's numbers to `target`, which has its log2 decays already."""
    beta = jnp.where(jnp.abs(given.beta) < frame.LEAST_BETA, frame.LEAST_BETA, given.beta)
    if spec.normalize_qk:
        of_keys, of_queries = given.of_keys, given.of_queries * spec.scale
    else:
        of_keys, of_queries = in_all_rows(1.0), in_all_rows(spec.scale)
    from_start = to_end = in_all_rows(1.0)
    if spec.decay is not None:
        decays = mosaic.in_rows(load(target.at[frame.DECAY], OF_COLUMNS), C)
        within = mosaic.hidden_position(0) >= mosaic.hidden_position(1)
        upto = jnp.sum(jnp.where(within, decays, 0.0), axis=1)
        target.at[frame.LOG_DECAY][...] = upto
        from_start, to_end = jnp.exp2(upto), jnp.exp2(jnp.sum(decays, axis=1) - upto)
    target.at[frame.BETA][...] = beta
    target.at[frame.OF_KEYS][...] = of_keys
    target.at[frame.OF_QUERIES][...] = of_queries
    target.at[frame.READ][...] = of_queries * from_start
    target.at[frame.RECALLED][...] = of_keys * from_start
    target.at[frame.WRITTEN][...] = of_keys * to_end


def in_all_rows(number: float) -> jax.Array:
    """[64]: a number for each row."""
    return plgpu.layout_cast(jnp.full(C, number, F32), OF_ROWS)


def sums_to_end(of_steps: jax.Array, of_last: jax.Array) -> jax.Array:
    """[64] of rows: the sum of `of_steps` over each step and all later ones, and of all `of_last`,
    both [64] of columns."""
    later = mosaic.hidden_position(1) >= mosaic.hidden_position(0)
    terms = jnp.where(later, mosaic.in_rows(of_steps, C), 0.0) + mosaic.in_rows(of_last, C)
    return jnp.sum(terms, axis=1)
