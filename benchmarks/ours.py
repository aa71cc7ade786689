"""This library, and what else runs on JAX, timed in the driver's own process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ato_jax
from benchmarks import cases, timing

OPS: dict[str, Callable[..., Any]] = {
    "linear": ato_jax.linear_attention,
    "softmax": ato_jax.attention,
}


def platform() -> str:
    """"gpu" or "cpu", where JAX computes by default."""
    return jax.default_backend()


def device_name() -> str:
    return jax.devices()[0].device_kind


def backends(case: cases.Case) -> tuple[str, str]:
    """Which of the library's backends run the case: forward, backward."""
    shape = jax.ShapeDtypeStruct((case.B, case.T, case.H, case.D), case.dtype)
    told = ato_jax.explain(OPS[case.op], shape, shape, shape, causal=case.causal)
    forward, backward = (
        choice.backend if choice else "none" for choice in (told.forward, told.backward)
    )
    return forward, backward


@functools.partial(jax.jit, static_argnums=0)
def draw(case: cases.Case, key: jax.Array) -> dict[str, jax.Array]:
    """q, k, v and dout [B, T, H, D], and with a decay its logarithms, few of them far below 0."""
    shape = (case.B, case.T, case.H, case.D)
    keys = jax.random.split(key, 5)
    found = {
        name: jax.random.normal(one, shape, jnp.float32).astype(case.dtype)
        for name, one in zip(("q", "k", "v", "dout"), keys, strict=False)
    }
    if case.decay is not None:
        gates = {"head": (case.H,), "step": shape[:3], "channel": shape}[case.decay]
        found["decay"] = -cases.DECAY * jnp.abs(jax.random.normal(keys[4], gates))
    return found


def measure(
    case: cases.Case, phase: str, seconds: float, function: Callable[..., Any] | None = None
) -> timing.Timing | str:
    """Times the op, or another `function(q, k, v)` of arrays [B, T, H, D]; or says why not."""
    attend = function or functools.partial(OPS[case.op], causal=case.causal)

    def call(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        if phase == "forward":
            return {"out": attend(q, k, v)}
        out, pull = jax.vjp(attend, q, k, v)
        dq, dk, dv = pull(inputs["dout"])
        return {"out": out, "dq": dq, "dk": dk, "dv": dv}

    @jax.jit
    def launch(group: list[dict[str, jax.Array]]) -> list[dict[str, jax.Array]]:
        results = []
        while group:
            # One call after the other: XLA neither fuses two nor runs them side by side.
            result, group = jax.lax.optimization_barrier((call(group[0]), group[1:]))
            results.append(result)
        return results

    def one_head(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        return {
            name: np.asarray(array[-1, :, -1].astype(jnp.float32)) for name, array in arrays.items()
        }

    groups, calls = timing.groups_of_inputs(4 * case.unit, platform())
    try:
        keys = jax.random.split(jax.random.key(case.T), (groups, calls))
        sets = [[draw(case, key) for key in group] for group in keys]
        reason = cases.wrong(case, one_head(sets[0][0]), one_head(launch(sets[0])[0]))
        if reason:
            return reason
        return timing.measure(
            lambda index: launch(sets[index % groups]),
            jax.block_until_ready,
            platform(),
            seconds,
            calls,
        )
    except (ato_jax.UnsupportedError, ValueError) as error:
        return str(error).splitlines()[0]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return "out of memory"
        return str(error).splitlines()[0]
