"""Gradients where a state is returned from under a decay, and has a cotangent: the pass that adds
it to the kernels' gradients, and all of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import against_the_reference, draw
from test_linear_passes import check_compiled

import ato_jax
from ato_jax import launch
from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.scans import returned
from ato_jax.ops.linear_attention.spec import Inputs, LinearState, Outputs
from tests import aot, numerics
from tests.interpreted import newest

OP = "linear_attention"


def states_of(k: jax.Array, v: jax.Array, decay: np.ndarray) -> np.ndarray:
    """kv [D, V] and k_sum [D, 1] behind each step, as the columns of a matrix; of elu(x) + 1."""
    k, v = (np.asarray(x, np.float64) for x in (k, v))
    phi_k = np.where(k > 0, k + 1, np.exp(np.minimum(k, 0)))
    state, found = np.zeros((k.shape[1], v.shape[1] + 1)), []
    for step, gate in enumerate(np.broadcast_to(decay, len(k))):
        state = np.exp(gate) * state + np.outer(phi_k[step], [*v[step], 1.0])
        found.append(state.ravel())
    return np.stack(found, axis=1)


def check_small_parts(kind: str, backend: str) -> None:
    """The terms of <S, dS> cancel to a twentieth of what those of unrelated S and dS leave, in all
    steps, as they do in few where a sequence is long. Their roundings do not."""
    T, D = 256, 128
    q, k, v = draw(1, T, 1, 1)
    decay: Any = jnp.array([-0.01])
    if kind == "step":
        decay = channel.draw_gates("mild", 1, T, 1) * 0.1
    read = states_of(k[0, :, 0], v[0, :, 0], np.asarray(decay, np.float64).reshape(-1))
    cotangent = np.random.default_rng(9).standard_normal(D * (D + 1))
    cotangent -= 0.95 * read @ np.linalg.lstsq(read, cotangent, rcond=None)[0]
    of_kv, of_sum = np.split(cotangent.reshape(1, 1, D, D + 1).astype(np.float32), [D], axis=3)
    cotangents = Outputs(
        channel.draw(1, T, 1, D, seed=10, dtype="bfloat16"),
        LinearState(jnp.asarray(of_kv), jnp.asarray(of_sum[..., 0])),
    )
    options = {"causal": True, "decay": decay, "return_state": True, "cotangents": cotangents}
    wanted = numerics.oracle(OP, q, k, v, **options)
    against_the_reference(backend, backend, wanted)


@pytest.mark.parametrize("kind", ["head", "step"])
def test_a_cotangent_that_hardly_reads_the_state(kind: str) -> None:
    check_small_parts(kind, "triton")


@newest
@pytest.mark.parametrize("kind", ["head", "step"])
def test_a_cotangent_that_hardly_reads_the_state_on_hopper(kind: str) -> None:
    check_small_parts(kind, "mosaic_gpu")


def slow(
    spec: Any, inputs: Inputs, cotangent: LinearState, found: Inputs
) -> dict[str, np.ndarray]:
    """What a loop over keys finds, in float64, [B, S, G, ..]."""

    def rows_first(x: Any) -> np.ndarray:
        x = np.asarray(x, np.float64)
        return np.swapaxes(x, 1, 2) if spec.layout == "bhtd" else x

    k, v, dk, dv = map(rows_first, (inputs.k, inputs.v, found.k, found.v))
    decay = np.asarray(inputs.decay, np.float64)
    decay = np.broadcast_to(decay, k.shape[:3]) if spec.decay == "head" else rows_first(decay)
    decay = np.where(decay < LEAST_DECAY, -np.inf, decay)
    kv, k_sum = (np.asarray(x, np.float64) for x in cotangent)
    start_kv, start_sum = (np.asarray(x, np.float64) for x in inputs.initial_state or cotangent)
    d_kv, d_sum = np.zeros_like(kv), np.zeros_like(k_sum)
    d_decay = np.zeros(k.shape[:3])
    for b in range(spec.B):
        length = spec.S if inputs.kv_lengths is None else int(inputs.kv_lengths[b])
        ids = np.zeros(spec.S) if inputs.kv_segments is None else np.asarray(inputs.kv_segments[b])
        for g in range(spec.G):
            left, flows = 1.0, np.zeros(spec.S)
            for j in reversed(range(length)):
                if ids[j] != ids[length - 1]:
                    break
                x = k[b, j, g]
                slope = np.exp(np.minimum(x, 0))
                phi = np.maximum(x, 0) + slope
                read = left * (kv[b, g] @ v[b, j, g] + k_sum[b, g])
                dk[b, j, g] += read * slope
                dv[b, j, g] += left * phi @ kv[b, g]
                flows[j] = phi @ read
                left *= np.exp(decay[b, j, g])
            else:
                d_kv[b, g], d_sum[b, g] = left * kv[b, g], left * k_sum[b, g]
            passing = 0.0
            if inputs.initial_state is not None:
                passing = np.sum(start_kv[b, g] * d_kv[b, g]) + start_sum[b, g] @ d_sum[b, g]
            d_decay[b, :length, g] = passing + (np.cumsum(flows) - flows)[:length]
    if spec.decay == "head":
        d_decay = d_decay.sum(axis=(0, 1))
    names = {"dk": dk, "dv": dv, "ddecay": d_decay}
    if inputs.initial_state is not None:
        names |= {"dstate_kv": d_kv, "dstate_k_sum": d_sum}
    return names


ROWS = [
    ("bfloat16", 200, 2, 128, 128, {"state": True}),
    ("bfloat16", 128, 1, 48, 200, {"layout": "bhtd", "kind": "head"}),
    ("bfloat16", 70, 1, 256, 512, {"state": True}),
    ("float16", 100, 2, 64, 64, {"lengths": True, "segments": True}),
    ("float16", 64, 1, 128, 128, {"state": True, "segments": True, "layout": "bhtd"}),
    ("float32", 90, 2, 256, 128, {"lengths": True, "state": True, "kind": "head"}),
    ("float32", 64, 1, 32, 32, {"precision": "tf32"}),
]


# Without the kernel every second one: each dtype, layout, kind and option is there.
@aot.requires_triton
@pytest.mark.parametrize(
    "dtype, S, G, D, V, options, by_kernel",
    [(*row, True) for row in ROWS] + [(*ROWS[n], False) for n in (1, 3, 4, 5)],
)
def test_the_pass(
    dtype: str, S: int, G: int, D: int, V: int, options: dict[str, Any], by_kernel: bool
) -> None:
    """Padding holds NaN, and after a strong decay nothing is left of some tiles. What is there
    already stays beside it."""
    options = dict(options)
    B, layout, kind = 2, options.pop("layout", "bthd"), options.pop("kind", "step")
    given = {name: options.pop(name, False) for name in ("lengths", "segments", "state")}
    widths = enumerate((D, D, V))
    arrays = [channel.draw(B, S, G, width, dtype=dtype, seed=n) for n, width in widths]
    decay: Any = jnp.array([-0.02, -3.0][:G])
    if kind == "step":
        decay = channel.draw_gates("mild", B, S, G).at[0, S // 2].set(-150.0)
    if given["lengths"]:
        options["kv_lengths"] = jnp.array([S - 9, S // 2], jnp.int32)
        arrays = [
            array.at[0, S - 9 :].set(jnp.nan).at[1, S // 2 :].set(jnp.nan) for array in arrays
        ]
    if given["segments"]:
        options["segment_ids"] = jnp.arange(S)[None, :].repeat(B, 0) // jnp.array([[40], [1000]])
    if given["state"]:
        options["initial_state"] = LinearState(
            channel.draw(B, G, D, V, seed=3), channel.draw(B, G, D, seed=4)
        )
    if layout == "bhtd":
        arrays = [jnp.swapaxes(array, 1, 2) for array in arrays]
        decay = jnp.swapaxes(decay, 1, 2) if kind == "step" else decay
    options |= {"decay": decay, "layout": layout, "causal": True, "return_state": True}
    request, _ = numerics.prepare(OP, *arrays, **options)
    spec, inputs = request.spec, request.inputs
    cotangent = LinearState(channel.draw(B, G, D, V, seed=5), channel.draw(B, G, D, seed=6))
    found = Inputs(
        *(channel.draw(*x.shape, dtype=dtype, seed=7 + n) for n, x in enumerate(inputs[:3])),
        decay=jnp.zeros_like(inputs.decay),
        initial_state=jax.tree.map(jnp.zeros_like, inputs.initial_state),
    )
    add = functools.partial(returned.add_returned, spec, lowers=by_kernel)
    with ato_jax.interpret():
        result = jax.jit(add)(inputs, cotangent, found)
    wanted = slow(spec, inputs, cotangent, found)
    swapped = layout == "bhtd"
    users = {
        "dk": jnp.swapaxes(result.k, 1, 2) if swapped else result.k,
        "dv": jnp.swapaxes(result.v, 1, 2) if swapped else result.v,
        "ddecay": jnp.swapaxes(result.decay, 1, 2) if swapped and kind == "step" else result.decay,
    }
    if given["state"]:
        users |= dict(zip(("dstate_kv", "dstate_k_sum"), result.initial_state, strict=True))
    for name, array in users.items():
        batched = name != "ddecay" or kind == "step"
        found_one = numerics.check(
            name, array, wanted[name], dtype=dtype, precision=spec.precision, batched=batched
        )
        if name == "ddecay" and spec.precision != "tf32":
            assert found_one.error < 2e-5, str(found_one)
    if by_kernel and launch.no_triton is None and D <= returned.MOST_FEATURES:
        check_compiled(add, inputs, cotangent, found)
