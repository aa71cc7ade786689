"""This library, and what else runs on JAX, timed in the driver's own process."""

from __future__ import annotations

import dataclasses
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
    """ "gpu" or "cpu", where JAX computes by default."""
    return jax.default_backend()


def device_name() -> str:
    return jax.devices()[0].device_kind


def backends(case: cases.Case) -> tuple[str, str]:
    """Which of the library's backends run the case: forward, backward."""
    shape = jax.ShapeDtypeStruct((case.B, case.T, case.H, case.D), case.dtype)
    options: dict[str, Any] = {"causal": case.causal}
    if case.decay:
        options["decay"] = jax.ShapeDtypeStruct(case.gates, jnp.float32)
    told = ato_jax.explain(OPS[case.op], shape, shape, shape, **options)
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
        found["decay"] = (
            jnp.asarray(cases.head_decays(case.H))
            if case.decay == "head"
            else -cases.DECAY * jnp.abs(jax.random.normal(keys[4], case.gates))
        )
    return found


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call that is compiled and compared, ready to be timed."""

    launch: Callable[[int], Any]
    calls: int
    errors: dict[str, float]

    def time(self, seconds: float) -> timing.Timing:
        return timing.measure(self.launch, jax.block_until_ready, platform(), seconds, self.calls)


def measure(
    case: cases.Case, phase: str, seconds: float, function: Callable[..., Any] | None = None
) -> timing.Timing | str:
    """Times the op, or another `function(q, k, v)` of arrays [B, T, H, D]; or says why not."""
    ready = prepare(case, phase, function)
    return ready if isinstance(ready, str) else ready.time(seconds)


def prepare(
    case: cases.Case,
    phase: str,
    function: Callable[..., Any] | None = None,
    mapped: bool = False,
    normalize: bool = True,
) -> Prepared | str:
    """Compiles and compares the op or another function, or says why it cannot be timed.

    Args:
      case, phase: what to run.
      function: `function(q, k, v)` or, with a decay, `function(q, k, v, decay)`.
      mapped: the function takes features, phi(q) and phi(k), in place of q and k.
      normalize: whether it divides by the sum of the weights.
    """
    attend = function or functools.partial(_attend, OPS[case.op], case.causal)

    def call(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        arrays = [inputs[name] for name in ("q", "k", "v", "decay") if name in inputs]
        if phase == "forward":
            return {"out": attend(*arrays)}
        out, pull = jax.vjp(attend, *arrays)
        gradients = pull(inputs["dout"])
        return dict(zip(("out", "dq", "dk", "dv", "ddecay"), (out, *gradients), strict=False))

    @jax.jit
    def launch(group: list[dict[str, jax.Array]]) -> list[dict[str, jax.Array]]:
        results = []
        while group:
            # One call after the other: XLA neither fuses two nor runs them side by side.
            result, group = jax.lax.optimization_barrier((call(group[0]), group[1:]))
            results.append(result)
        return results

    def one_head(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        found = {
            name: np.asarray(array[-1, :, -1].astype(jnp.float32))
            for name, array in arrays.items()
            if "decay" not in name
        }
        if "decay" in arrays:
            decay = arrays["decay"]
            of_head = np.asarray(decay[-1] if decay.ndim == 1 else decay[-1, :, -1])
            found["decay"] = np.broadcast_to(of_head, (case.T, *of_head.shape[1:]))
        return found

    groups, calls = timing.groups_of_inputs(4 * case.unit, platform())
    try:
        keys = jax.random.split(jax.random.key(case.T), (groups, calls))
        sets = [[draw(case, key) for key in group] for group in keys]
        if mapped:
            sets = [[_mapped(arrays) for arrays in group] for group in sets]
        results = one_head(launch(sets[0])[0])
        found = cases.errors(
            case, one_head(sets[0][0]), results, mapped=mapped, normalize=normalize
        )
        reason = cases.too_large(case, found)
        return reason or Prepared(lambda index: launch(sets[index % groups]), calls, found)
    except (ato_jax.UnsupportedError, ValueError) as error:
        return str(error).splitlines()[0]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return "out of memory"
        return str(error).splitlines()[0]


def _attend(op: Callable[..., Any], causal: bool, *arrays: jax.Array) -> jax.Array:
    q, k, v, *decay = arrays
    options = {"decay": decay[0]} if decay else {}
    return op(q, k, v, causal=causal, **options)


@jax.jit
def _mapped(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    features = {name: jax.nn.elu(arrays[name]) + 1 for name in ("q", "k")}
    return arrays | features
