"""Linear attention by what runs on JAX, in the driver's process: this library, plain JAX, and
jax-linear-attention. Arrays are [B, T, H, D].
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ato_jax
from benchmarks import cases, ours, stepping
from benchmarks.cases import Case

CHUNK = 128  # of plain JAX's causal form
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Contender:
    """`function(q, k, v)`, or with a decay `function(q, k, v, decay)`; None is the library."""

    takes: Callable[[Case], bool]
    function: Callable[..., Any] | None = None
    mapped: bool = False
    normalize: bool = True
    package: str = ""
    searches: bool = False
    steps: bool = False

    def compiled(self, case: Case, phase: str) -> ours.Compiled | str:
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if case.op == "step":
            step = self.function or ato_jax.linear_attention_step
            return lambda: _prepare_step(case, step)
        return ours.compiled(
            case, phase, self.function, self.mapped, self.normalize, self.steps
        )


def phi(x: jax.Array) -> jax.Array:
    return jax.nn.elu(x) + 1


def _full(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k = phi(q), phi(k)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    state = product("bshd,bshv->bhdv", k, v).astype(v.dtype)
    total = product("bthd,bhd->bth", q, k.sum(1, dtype=jnp.float32).astype(k.dtype))
    out = product("bthd,bhdv->bthv", q, state) / jnp.maximum(total, EPS)[..., None]
    return out.astype(v.dtype)


def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Chunks, whose states an associative scan adds up."""
    B, T, H, D = q.shape
    q, k, v = (x.reshape(B, T // CHUNK, CHUNK, H, -1) for x in (phi(q), phi(k), v))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    states = product("bnshd,bnshv->bnhdv", k, v), k.sum(2, dtype=jnp.float32)
    before = [
        (jax.lax.associative_scan(jnp.add, state, axis=1) - state).astype(v.dtype)
        for state in states
    ]
    weights = jnp.tril(product("bnthd,bnshd->bnhts", q, k))
    total = weights.sum(-1).swapaxes(2, 3) + product("bnthd,bnhd->bnth", q, before[1])
    out = product("bnhts,bnshv->bnthv", weights.astype(v.dtype), v)
    out += product("bnthd,bnhdv->bnthv", q, before[0])
    out /= jnp.maximum(total, EPS)[..., None]
    return out.reshape(B, T, H, D).astype(v.dtype)


def _flash_bla(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from benchmarks import flash_bla_jax

    return flash_bla_jax.linear_attention(q, k, v)


def _jla(kind: str) -> Callable[..., Any]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *decay: jax.Array) -> jax.Array:
        # Its kernels first: whoever calls it while another thread imports them finds none.
        importlib.import_module("jla.ops.mosaic_gpu")
        from jla import ops

        # It has no kind without a gate. XLA is not to work out what it makes of a known one: that
        # takes it a minute.
        zeros = jax.lax.optimization_barrier(jnp.zeros(q.shape[:3], jnp.float32))
        gate = decay[0] if decay else zeros
        return ops.linear_attention(kind, q, k, v, g=gate, scale=1.0, impl="mosaic_gpu")[0]

    return attend


def _step(q: jax.Array, k: jax.Array, v: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    q, k = (phi(x.astype(jnp.float32)) for x in (q, k))
    kv = state.kv + k[..., :, None] * v.astype(jnp.float32)[..., None, :]
    k_sum = state.k_sum + k
    total = jnp.maximum((q * k_sum).sum(-1), EPS)[..., None]
    out = jnp.einsum("bhd,bhdv->bhv", q, kv) / total
    return out.astype(v.dtype), ato_jax.LinearState(kv, k_sum)


_jla_of = functools.partial(Contender, mapped=True, normalize=False, package="jla")

CONTENDERS = {
    "ato_jax": Contender(lambda case: True),
    "plain JAX": Contender(
        lambda case: case.op == "linear" and not case.causal and not case.decay,
        _full,
        searches=True,
    ),
    "plain JAX, one step": Contender(lambda case: case.op == "step", _step, searches=True),
    "plain JAX, associative scan": Contender(
        lambda case: case.causal and not case.decay and case.T % CHUNK == 0, _causal, searches=True
    ),
    # It has no backward pass.
    "flash-bidirectional-linear-attention by jax-triton, phi out": Contender(
        lambda case: case.op == "linear" and not case.causal and not case.decay and case.B == 1,
        _flash_bla,
        mapped=True,
        package="jax_triton",
    ),
    "jax-linear-attention, phi out, not normalised": _jla_of(
        lambda case: case.causal and case.decay in (None, "step"), _jla("simple_gla")
    ),
    "jax-linear-attention GLA, phi out, not normalised": _jla_of(
        lambda case: case.decay == "channel", _jla("gla")
    ),
}


def _prepare_step(case: Case, step: Callable[..., Any]) -> ours.Prepared:
    keys = jax.random.split(jax.random.key(0), stepping.calls_of(case) + 2)
    *of_tokens, of_kv, of_k_sum = keys
    shape = (case.B, case.H, case.D)

    def token(key: jax.Array) -> list[jax.Array]:
        qkv = jax.random.split(key, 3)
        return [jax.random.normal(one, shape).astype(case.dtype) for one in qkv]

    tokens = [token(key) for key in of_tokens]
    kv = jax.random.normal(of_kv, (*shape, case.D))
    k_sum = 100 + 10 * jnp.abs(jax.random.normal(of_k_sum, shape))

    first = [*tokens[0], kv, k_sum]
    last = [np.asarray(x[-1, -1].astype(jnp.float32), np.float64) for x in first]
    left, right = cases.phi(last[0]), cases.phi(last[1])
    wanted = left @ (last[3] + np.outer(right, last[2])) / (left @ (last[4] + right))
    return stepping.prepared(case, step, tokens, ato_jax.LinearState(kv, k_sum), wanted)
