"""A step of the delta rule: one token against the state of each head, as in a loop that decodes.

Keys are of length 1 and betas between 0 and 1, so no state grows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ato_jax
from ato_jax.ops.delta_rule import step as delta_rule_step
from benchmarks import ours, stepping
from benchmarks.cases import Case


def by_library(
    q: Any, k: Any, v: Any, beta: Any, decay: Any, state: Any
) -> tuple[jax.Array, jax.Array]:
    return ato_jax.gated_delta_rule_step(q, k, v, beta, state, decay=decay)


def by_xla(
    q: Any, k: Any, v: Any, beta: Any, decay: Any, state: Any
) -> tuple[jax.Array, jax.Array]:
    """A step in plain JAX, which runs where the kernel cannot. It reads the state twice."""
    spec, inputs, _ = delta_rule_step.prepare(q, k, v, beta, state, decay=decay)
    return delta_rule_step._plain(spec, inputs)


def prepare(case: Case, step: stepping.Step) -> ours.Prepared:
    *of_tokens, of_state = jax.random.split(jax.random.key(0), stepping.calls_of(case) + 1)
    heads = (case.B, case.H)

    def token(key: jax.Array) -> list[jax.Array | None]:
        drawn = ours.draw(case, key)
        decay = drawn["decay"][:, 0] if case.decay else None
        return [*(drawn[name][:, 0] for name in ("q", "k", "v", "beta")), decay]

    tokens = [token(key) for key in of_tokens]
    state = jax.random.normal(of_state, (*heads, case.D, case.D))
    return stepping.prepared(case, step, tokens, state, exact(case, *tokens[0], state))


def exact(case: Case, *arrays: Any) -> np.ndarray:
    """The output of the last head of the last batch entry, in float64."""
    q, k, v, beta, decay, state = (
        None if x is None else np.asarray(x[-1, -1].astype(jnp.float32), np.float64)
        for x in arrays
    )
    if decay is not None:
        state = np.exp(decay.reshape(-1, 1)) * state
    state = state + np.outer(k, beta * (v - k @ state))
    return case.D**-0.5 * (q @ state)
