"""This library with one thing switched: a size of its kernels, a technique, where a step is done.

What runs is the Triton kernels' forward pass, called with a config of its own. On a CPU, where
sizes are small, Pallas interprets them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import ato_jax
from ato_jax import device, tuning
from ato_jax.ops.attention import api as softmax_api
from ato_jax.ops.linear_attention import api as linear_api
from benchmarks import attention_jax, linear_jax, ours, tiled
from benchmarks.cases import Case

BACKEND = "triton"
TILES = (32, 64, 128)
# Rows of a step of the loop in Python; keys in a page.
STEP_ROWS = {"gpu": 256, "cpu": 32}
PAGE = {"gpu": 64, "cpu": 16}


def _interpreted(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def call(*arrays: jax.Array) -> jax.Array:
        with ato_jax.interpret(ours.platform() == "cpu"):
            return attend(*arrays)

    return call


def _with_config(api: Any, request: Any, **fields: Any) -> jax.Array:
    """The output by the Triton kernels, their config changed in these fields."""
    here = device.describe(jax.devices()[0])
    backend = api.OP.backend(BACKEND)
    config = tuning.config(api.OP.name, BACKEND, backend, request.spec, here)
    config = dataclasses.replace(config, **fields)
    return backend.forward(request.spec, config, request.inputs).out


def _softmax(fields: dict[str, Any], case: Case) -> Callable[..., jax.Array]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return _with_config(softmax_api, softmax_api.prepare(q, k, v, causal=case.causal), **fields)

    return _interpreted(attend)


def _linear(**fields: Any) -> Callable[..., jax.Array]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return _with_config(linear_api, linear_api.prepare(q, k, v), **fields)

    return _interpreted(attend)


def _repeated(case: Case) -> Callable[..., jax.Array]:
    """Keys and values laid out once for each query head."""
    attend = _softmax({}, case)

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, case.H // x.shape[2], axis=2) for x in (k, v))
        return attend(q, *jax.lax.optimization_barrier((k, v)))

    return call


def _paged(case: Case) -> Callable[..., jax.Array]:
    """The kernel in which all queries of a group share each load of keys; the cache is in pages
    of one run.
    """
    page = PAGE[ours.platform()]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        B, S, G, D = k.shape
        pages = [x.reshape(B * S // page, page, G, D) for x in (k, v)]
        table = jnp.arange(B * S // page, dtype=jnp.int32).reshape(B, -1)
        lengths = jnp.full((B,), S, jnp.int32)
        return ato_jax.decode_attention(q, *pages, table, lengths, implementation=BACKEND)

    return _interpreted(attend)


@jax.jit
def _map_apart(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The maps by XLA, written to memory and read again, as before a kernel that has none."""
    q, k = jax.lax.optimization_barrier((linear_jax.phi(q), linear_jax.phi(k)))
    request = linear_api.prepare(q, k, v, feature_map="identity", normalize=True)
    return _with_config(linear_api, request)


@jax.jit
def _step(
    q: jax.Array, k: jax.Array, v: jax.Array, state: ato_jax.LinearState, start: Any
) -> tuple[jax.Array, ato_jax.LinearState]:
    rows = STEP_ROWS[ours.platform()]
    q, k, v = (jax.lax.dynamic_slice_in_dim(x, start, rows, axis=1) for x in (q, k, v))
    return ato_jax.linear_attention(q, k, v, causal=True, initial_state=state, return_state=True)


def _loop(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """One program after the other from Python, each with the state that the last one left."""
    B, T, H, D = q.shape
    state = ato_jax.LinearState(
        jnp.zeros((B, H, D, v.shape[-1]), jnp.float32), jnp.zeros((B, H, D), jnp.float32)
    )
    outs = []
    for start in range(0, T, STEP_ROWS[ours.platform()]):
        out, state = _step(q, k, v, state, start)
        outs.append(out)
    return jnp.concatenate(outs, axis=1)


def _always(case: Case) -> bool:
    return True


def _whole(case: Case) -> bool:
    return not case.causal


def _causal(case: Case) -> bool:
    return case.causal


def _grouped(case: Case) -> bool:
    return case.G is not None


def _short(case: Case) -> bool:
    return case.T <= 16 and not case.causal


def _tall(case: Case) -> bool:
    """What the forward's queries come in two strands in."""
    return case.T >= 1024 and case.D <= 128


# Of linear attention.
MAPS_APART = "ato_jax, maps apart"
LOOP = "ato_jax, loop in Python"
TILED = {f"ato_jax, tiles of {block}": block for block in TILES}
IN_LINEAR = {
    name: linear_jax.Contender(_whole, _linear(state_block=block, output_block=block))
    for name, block in TILED.items()
} | {
    MAPS_APART: linear_jax.Contender(_whole, _interpreted(_map_apart)),
    LOOP: linear_jax.Contender(_causal, _loop, steps=True),
}

# Of softmax attention.
KERNEL = "ato_jax triton"
FULL_EXP2 = "ato_jax triton, 2^x in full"
ONE_STRAND = "ato_jax triton, one strand"
NOT_SPLIT = "ato_jax triton, keys not split"
REPEATED = "ato_jax triton, K and V repeated"
PAGED = "ato_jax, queries of a group in one tile"
IN_SOFTMAX = {
    name: attention_jax.Contender(takes, functools.partial(_softmax, fields))
    for name, takes, fields in (
        (KERNEL, _always, {}),
        (FULL_EXP2, _tall, {"fast_exp2": False}),
        (ONE_STRAND, _tall, {"strands": 1}),
        (NOT_SPLIT, lambda case: _short(case) and not _grouped(case), {"parts": 1}),
    )
} | {
    REPEATED: attention_jax.Contender(_grouped, _repeated),
    PAGED: attention_jax.Contender(lambda case: _grouped(case) and _short(case), _paged),
}

def _exact(case: Case) -> Callable[..., jax.Array]:
    """Plain JAX with float32 multiplied in full, as this library does."""
    attend = attention_jax.CONTENDERS[NAIVE].make(case)

    def call(*arrays: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return attend(*arrays)

    return call


# Without tiles.
NAIVE = "plain JAX"
EXACT = "plain JAX, exact products"
IN_WIDE = {EXACT: attention_jax.Contender(_always, _exact, searches=True)}
# The ladder's rungs.
TILES_IN_MEMORY = "tiled, scores in memory"
LADDER = {
    NAIVE: dataclasses.replace(attention_jax.CONTENDERS[NAIVE], takes=_always),
    TILES_IN_MEMORY: attention_jax.Contender(_always, lambda case: _interpreted(tiled.attention)),
    KERNEL: IN_SOFTMAX[KERNEL],
}
