"""One token after the other, each of which updates a state in place, several to a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import cases, ours, timing
from benchmarks.cases import Case

# From a token's arrays and the state to the output [B, H, V] and the next state.
Step = Callable[..., tuple[jax.Array, Any]]


def calls_of(case: Case) -> int:
    """How many tokens are in a launch."""
    return timing.groups_of_inputs(case.set_bytes, ours.platform())[1]


def prepared(
    case: Case, step: Step, tokens: Sequence[Any], state: Any, wanted: np.ndarray
) -> ours.Prepared:
    """`step(*token, state)` for each of the tokens, compiled and compared.

    Args:
      case: what is timed.
      step: the function of one token.
      tokens: the arrays of each token of a launch.
      state: before the first token; it is donated.
      wanted: the output of the first token in the last head of the last batch entry, in float64.
    """

    def steps(tokens: Sequence[Any], state: Any) -> tuple[list[jax.Array], Any]:
        outs = []
        for token in tokens:
            # Not two in one pass over the state, as no model that decodes could.
            out, state = jax.lax.optimization_barrier(step(*token, state))
            outs.append(out)
        return outs, state

    function = jax.jit(steps, donate_argnums=1)
    outs, state = function(tokens, state)
    apart = np.asarray(outs[0][-1, -1].astype(np.float32)) - wanted
    errors = {"out": float(np.linalg.norm(apart) / np.linalg.norm(wanted))}
    if reason := cases.too_large(case, errors):
        raise ValueError(reason)
    # Each call takes the state that the one before it left.
    states = [state]

    def launch(_: int) -> list[jax.Array]:
        results, states[0] = function(tokens, states[0])
        return results

    return ours.Prepared(launch, len(tokens), errors)
