"""Kernels under `jax.jit` are divided among devices by batch and heads, and nothing is gathered.

They need several devices, and so a process of their own, in which this file is the program. The
kernels are Triton's, interpreted.

    ATO_ALL_ROWS=1 python -m pytest tests/test_partitioning.py     every cut
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ato_jax
from ato_jax import device
from benchmarks.collectives import collectives
from tests import simulated
from tests.aot_devices import compile_calls
from tests.aot_mosaic import requires_plugin
from tests.mosaic_text import H200

B, T, H, D = 2, 8, 8, 16
KEY = jax.random.key(3)
ALL_ROWS = os.environ.get("ATO_ALL_ROWS") == "1"


def test_in_a_process_with_eight_devices() -> None:
    assert simulated.last_line("tests.test_partitioning", devices=8) == "all alike"


def gradients(*qkv: Any) -> Any:
    attend = functools.partial(ato_jax.attention, implementation="triton")
    return jax.grad(lambda *qkv: jnp.sum(attend(*qkv)), (0, 1, 2))(*qkv)


def test_one_device_divides_nothing() -> None:
    """Nor does a mesh of one, whose axis is explicit."""
    qkv = [draw(B, T, H, D, seed=seed) for seed in range(3)]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    placed = [jax.device_put(array, NamedSharding(mesh, P("data"))) for array in qkv]
    with ato_jax.interpret():
        alone = str(jax.make_jaxpr(gradients)(*qkv))
        with jax.set_mesh(mesh):
            on_a_mesh = str(jax.make_jaxpr(gradients)(*placed))
    for text in (alone, on_a_mesh):
        assert "pallas_call" in text
        assert "custom_partitioning" not in text and "shard_map" not in text


@requires_plugin
def test_compiled_for_eight_cards() -> None:
    """Kernels of each card's own part, and nothing that cards send to each other."""
    found = compile_calls()
    assert found["linear"]["kernels"]["mosaic_gpu"] >= 5
    assert found["softmax"]["kernels"]["mosaic_gpu"] == 1
    for call in found.values():
        assert not call["sent"] and call["results"] == ['["data", null, "model"]']


def both(call: Any) -> Any:
    """The call and its gradients."""

    def run(*arrays: Any) -> Any:
        out, pull = jax.vjp(call, *arrays)
        return out, pull(out)

    return run


def step(q: Any, k: Any, v: Any, kv: Any, k_sum: Any) -> Any:
    return ato_jax.linear_attention_step(q, k, v, ato_jax.LinearState(kv, k_sum))


# The calls, and of each array the shape, what cuts it and its dtype.
ROWS, HEADS, FIRST = P("data", None, "model"), P("data", "model"), P("data")
_qkv = [((8, 4096, 16, 128), ROWS, "bfloat16")] * 3
_pages = ((64, 64, 8, 128), P(None, None, "model"), "bfloat16")
CALLS: dict[str, tuple[Any, list[Any], int]] = {
    "linear": (both(functools.partial(ato_jax.linear_attention, causal=True)), _qkv, 5),
    "softmax": (
        both(functools.partial(ato_jax.attention, causal=True, implementation="mosaic_gpu")),
        _qkv, 3,
    ),
    "decode": (
        functools.partial(ato_jax.decode_attention, implementation="triton"),
        [
            ((8, 1, 16, 128), ROWS, "bfloat16"), _pages, _pages, ((8, 16), FIRST, "int32"),
            ((8,), FIRST, "int32"),
        ],
        2,
    ),
    "step": (
        step,
        [
            *[((8, 16, 128), HEADS, "bfloat16")] * 3, ((8, 16, 128, 128), HEADS, "float32"),
            ((8, 16, 128), HEADS, "float32"),
        ],
        1,
    ),
}  # fmt: skip


@pytest.mark.lowering
@pytest.mark.parametrize("name", CALLS)
def test_lowered_for_a_mesh_of_cards_that_are_not_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of eight H200s has kernels of its own part, and XLA multiplies nothing."""
    monkeypatch.setattr(device, "of_call", lambda _: H200)
    kind = jax.sharding.AbstractDevice(H200.name, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh(
        (2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, abstract_device=kind
    )
    call, arrays, least = CALLS[name]
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec, dtype in arrays
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))
    lines = lowered.as_text().splitlines()
    kernels = [line for line in lines if re.search(r"custom_call @(mosaic_gpu|__gpu)", line)]
    assert len(kernels) >= least
    # A part has 4 of 8 sequences.
    whole = re.compile(r"tensor<8x\d+x\d+x")
    assert not [line for line in kernels if whole.search(line.rpartition(":")[2])]
    assert not [line for line in lines if "stablehlo.dot_general" in line]


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def check(
    name: str, op: Any, arrays: dict[str, Any], specs: dict[str, Any], kind: Any = AxisType.Auto,
    sends: set[str] | None = None, gradients: bool = True, **options: Any,
) -> None:  # fmt: skip
    """The results and gradients on a mesh of 2 x 4 devices are those of XLA on one device.

    The collectives of the program are checked, too.

    `specs` places arrays by name; others are the same on all devices. `sends` are the kinds of the
    collectives that are allowed.
    """
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    learned = {one: array for one, array in arrays.items() if array.dtype == np.float32}
    others = {one: array for one, array in arrays.items() if one not in learned}

    def loss(implementation: str, learned: Any, others: Any) -> Any:
        found = op(**learned, **others, implementation=implementation, **options)
        # The derivative by a state or lse, too.
        return sum(jnp.sum(jnp.sin(array)) for array in jax.tree.leaves(found)), found

    def program(implementation: str) -> Any:
        call = functools.partial(loss, implementation)
        return jax.jit(jax.grad(call, has_aux=True) if gradients else call)

    wanted = program("xla")(learned, others)
    with ato_jax.interpret():
        with jax.set_mesh(mesh):
            place = lambda tree: {  # noqa: E731
                one: jax.device_put(array, NamedSharding(mesh, specs.get(one, P())))
                for one, array in tree.items()
            }
            compiled = program("triton").lower(place(learned), place(others)).compile()
            found = compiled(place(learned), place(others))
    sent = collectives(compiled.as_text())
    print(name, [(one.kind, one.result) for one in sent], flush=True)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5, err_msg=name)
    # The smallest of q, k, v, out and their gradients on one device.
    least = min(array.nbytes for one, array in arrays.items() if one in "qkv") // 8
    kinds = {one.kind for one in sent if one.result >= least}
    assert kinds <= (sends or set()), (name, sent)


def main() -> None:
    rows = P("data", None, "model")
    plain = dict.fromkeys("qkv", rows)
    q, k, v = (draw(B, T, H, D, seed=seed) for seed in range(3))
    four = {"q": q, "k": k[:, :, :4], "v": v[:, :, :4]}
    two = {"q": q, "k": k[:, :, :2], "v": v[:, :, :2]}
    lengths = np.array([3, 8], np.int32)

    attend = functools.partial(ato_jax.attention, causal=True, return_lse=True)
    more = {"sinks": draw(H), "bias": draw(1, 1, T, T), "kv_lengths": lengths}
    drop = {"dropout_rate": 0.3, "dropout_key": KEY}
    check("attention", attend, {**four, **more}, {**plain, "kv_lengths": P("data")}, **drop)
    # One head of keys for two devices: keys are whole on each, and their gradients are summed.
    few = {"q": rows, "k": P("data"), "v": P("data")}
    if ALL_ROWS:
        check("shared heads", attend, two, few, sends={"all-reduce"})
    heads_first = {one: array.swapaxes(1, 2) for one, array in four.items()}
    by_head = dict.fromkeys("qkv", P("data", "model"))
    check(
        "explicit axes, bhtd", attend, heads_first, by_head, AxisType.Explicit, layout="bhtd"
    )
    by_time = dict.fromkeys("qkv", P("data", "model"))
    check("cut by time", attend, four, by_time, sends={"all-gather"}, gradients=False)

    linear = functools.partial(ato_jax.linear_attention, causal=True, return_state=True)
    state = ato_jax.LinearState(draw(B, 2, D, D), np.abs(draw(B, 2, D)))

    def with_state(q: Any, k: Any, v: Any, decay: Any, kv: Any, k_sum: Any, **options: Any) -> Any:
        initial = ato_jax.LinearState(kv, k_sum)
        return linear(q, k, v, decay=-jnp.abs(decay), initial_state=initial, **options)

    gated = {**two, "decay": draw(B, T, 2), "kv": state.kv, "k_sum": state.k_sum}
    placed = {**few, **dict.fromkeys(("decay", "kv", "k_sum"), P("data"))}
    check("linear, shared heads, states", with_state, gated, placed, sends={"all-reduce"})
    mapped = {one: np.stack([array, 2 * array, -array]) for one, array in four.items()}

    def over_all(q: Any, k: Any, v: Any, decay: Any, implementation: str) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return linear(q, k, v, decay=-jnp.abs(decay), implementation=implementation)[0]

        return jax.vmap(jax.checkpoint(call))(q, k, v)

    rows = P(None, "data", None, "model")
    check(
        "vmap, remat, a decay per head", over_all, {**mapped, "decay": draw(4)},
        dict.fromkeys("qkv", rows),
    )  # fmt: skip
    # No type inside of the call names the mesh axis along which the mapped axis lies.

    def over_every(q: Any, k: Any, v: Any, implementation: str) -> Any:
        call = functools.partial(ato_jax.attention, implementation=implementation)
        return jax.vmap(call)(q, k, v)

    two_maps = {one: np.stack([array, 2 * array]) for one, array in four.items()}
    rows = P("data", None, None, "model")
    check(
        "vmap over an explicit axis", over_every, two_maps, dict.fromkeys("qkv", rows),
        AxisType.Explicit, gradients=False,
    )  # fmt: skip
    with ato_jax.interpret():
        alone = jax.jit(gradients).lower(*(array[:1, :, :1] for array in (q, k, v)))
    # As JAX names the call that XLA divides.
    assert "CustomSPMDPartitioning" not in alone.as_text()
    print("all alike")


if __name__ == "__main__":
    main()
