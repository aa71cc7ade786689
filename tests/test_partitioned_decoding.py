"""Decoding, caches and pieces under `jax.jit` are divided by batch and heads; nothing is gathered.

They need several devices, and so a process of their own, in which this file is the program. The
kernels are Triton's, interpreted.

    ATO_ALL_ROWS=1 python -m pytest tests/test_partitioned_decoding.py     every function on both
                                                                           kinds of meshes
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ato_jax
from ato_jax import device
from ato_jax.ops.attention import blocks
from benchmarks.collectives import collectives
from tests import simulated
from tests.test_partitioning import draw

ALL_ROWS = os.environ.get("ATO_ALL_ROWS") == "1"
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
B, T, H, G, D = 4, 2, 8, 4, 16
PAGES, PAGE = 16, 4
GPU = device.Device("gpu", "a GPU", (9, 0), 4, device.SHARED_MEMORY[9, 0])
# Batch and heads of [B, T, H, D] and [B, H, D], and heads of pages [P, page, G, D].
ROWS, STEP, HEADS = P("data", None, "model"), P("data", "model"), P(None, None, "model")


def test_in_a_process_with_eight_devices() -> None:
    assert simulated.last_line("tests.test_partitioned_decoding", devices=8) == "all alike"


@contextlib.contextmanager
def kernels() -> Any:
    """Kernels run where a GPU's would, interpreted."""
    with pytest.MonkeyPatch.context() as patch, ato_jax.interpret():
        patch.setattr(device, "of_call", lambda _: GPU)
        yield


def check(
    name: str, function: Any, arrays: dict[str, Any], specs: dict[str, Any], kind: AxisType,
    learned: tuple[str, ...] = (), sends: Any = (), here: Any = contextlib.nullcontext,
) -> None:  # fmt: skip
    """Results and gradients on a mesh of 2 x 4 devices are those of plain JAX on one device.

    `specs` places arrays; others are the same on all devices. `sends` are pairs of the kind and the
    bytes of each collective of 64 bytes or more, in whole units of 64.
    """
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    mine = {one: arrays[one] for one in learned}
    others = {one: array for one, array in arrays.items() if one not in mine}

    def program() -> Any:
        def loss(mine: Any, others: Any) -> Any:
            found = function(**mine, **others)
            leaves = jax.tree.leaves(found)
            return sum(jnp.sum(jnp.sin(one)) for one in leaves if one.dtype.kind == "f"), found

        return jax.jit(jax.grad(loss, has_aux=True) if learned else lambda *all: loss(*all)[1])

    wanted = program()(mine, others)
    put = lambda one, spec: jax.device_put(one, NamedSharding(mesh, spec))  # noqa: E731
    with here(), jax.set_mesh(mesh):
        placed = [
            {
                one: jax.tree.map(put, array, specs.get(one, jax.tree.map(lambda _: P(), array)))
                for one, array in given.items()
            }
            for given in (mine, others)
        ]
        compiled = program().lower(*placed).compile()
        found = compiled(*placed)
    sent = collectives(compiled.as_text())
    print(name, kind, [(one.kind, one.result) for one in sent], flush=True)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5, err_msg=name)
    large = sorted(
        (one.kind, one.result // 64 * 64 * one.times) for one in sent if one.result >= 64
    )
    assert large == sorted(sends), (name, large)


def check_decode(kind: AxisType) -> None:
    def decode(q: Any, k: Any, v: Any, lengths: Any, table: Any = None, sinks: Any = None) -> Any:
        return ato_jax.decode_attention(
            q, k, v, table, lengths, sinks=sinks, return_lse=True,
            implementation="triton" if device.interpreting() else "xla",
        )  # fmt: skip

    lengths = np.array([3, 16, 9, 2], np.int32)
    table = np.random.default_rng(0).permutation(PAGES).reshape(B, -1).astype(np.int32)
    pages = {name: draw(PAGES, PAGE, G, D, seed=seed) for seed, name in enumerate("kv")}
    paged = {"q": draw(B, T, H, D), **pages, "table": table, "lengths": lengths, "sinks": draw(H)}
    by_slot = dict.fromkeys(("table", "lengths"), P("data"))
    specs = {"q": ROWS, "k": HEADS, "v": HEADS, "sinks": P("model"), **by_slot}
    # The devices that share a head's pages sum their gradients; those of the sinks are few.
    shared = ("all-reduce", 4 * 2 * PAGES * PAGE * D * G // 4)
    check(
        "decode, pages", decode, paged, specs, kind, ("q", "k", "v", "sinks"), [shared], kernels
    )
    rows = {**paged, "k": draw(B, 16, G, D), "v": draw(B, 16, G, D)}
    del rows["table"], rows["sinks"]
    specs = {**dict.fromkeys("qkv", ROWS), "lengths": P("data")}
    check("decode, rows", decode, rows, specs, kind, here=kernels)


def check_step(kind: AxisType, learned: tuple[str, ...] = ()) -> None:
    def step(q: Any, k: Any, v: Any, state: Any, decay: Any) -> Any:
        return ato_jax.linear_attention_step(q, k, v, state, decay=-jnp.abs(decay))

    state = ato_jax.LinearState(draw(B, G, D, D), np.abs(draw(B, G, D)))
    arrays = {"q": draw(B, H, D), "k": draw(B, G, D), "v": draw(B, G, D), "state": state}
    specs = {**dict.fromkeys("qkv", STEP), "state": ato_jax.LinearState(STEP, STEP)}  # type: ignore[arg-type]
    check(
        "step", step, {**arrays, "decay": draw(G)}, {**specs, "decay": P("model")}, kind, learned,
        here=kernels,
    )  # fmt: skip
    if learned:
        # More parts than heads of keys: the devices of a head each add a part to the state.
        few = {**arrays, "k": draw(B, 2, D), "v": draw(B, 2, D), "decay": draw(B, 2)}
        few["state"] = jax.tree.map(lambda array: array[:, :2], state)
        sizes = 4 * B // 2 * 2 * D * D, 4 * B // 2 * 2 * D
        check(
            "step, shared heads", step, few,
            {"q": STEP, **dict.fromkeys(("k", "v", "decay"), P("data"))}, kind,
            sends=[("all-reduce", sum(sizes))], here=kernels,
        )  # fmt: skip


def check_delta_step(kind: AxisType, learned: tuple[str, ...] = ()) -> None:
    def step(q: Any, k: Any, v: Any, beta: Any, state: Any, decay: Any) -> Any:
        return ato_jax.gated_delta_rule_step(
            q, k, v, beta, state, decay=-jnp.abs(decay), normalize_qk=True
        )

    arrays = {
        "q": draw(B, G, D), "k": draw(B, G, D), "v": draw(B, H, D), "beta": np.abs(draw(B, H)),
        "state": draw(B, H, D, D), "decay": draw(B, H, D),
    }  # fmt: skip
    check("delta step", step, arrays, dict.fromkeys(arrays, STEP), kind, learned, here=kernels)
    if learned:
        # More parts than heads of keys: each device reads the key head of its value heads.
        few = {**arrays, "q": draw(B, 2, D), "k": draw(B, 2, D), "decay": draw(B, H)}
        specs = {**dict.fromkeys(arrays, STEP), **dict.fromkeys("qk", P("data"))}
        check("delta step, shared heads", step, few, specs, kind, here=kernels)


def check_pieces(kind: AxisType) -> None:
    outs, lses = draw(3, B, 8, H, D), draw(3, B, 8, H)
    specs = {"outs": P(None, *ROWS), "lses": P(None, *ROWS)}
    arrays = {"outs": outs, "lses": lses}
    check("combine", ato_jax.combine, arrays, specs, kind, ("outs", "lses"))
    for name, call, names in (
        ("total_attention", ato_jax.total_attention, ("q", "k", "lse")),
        ("attention by XLA", ato_jax.attention, ("q", "k", "v")),
    ):
        given = {"lse": 9 + draw(B, 64, H), "q": draw(B, 64, H, D), "k": draw(B, 64, G, D)}
        arrays = {one: given.get(one, given["k"]) for one in names}
        with pytest.MonkeyPatch.context() as patch:
            # So few that one head of one sequence is computed at a time.
            patch.setitem(blocks.SCORES_AT_ONCE, "cpu", 1 << 10)
            check(name, call, arrays, dict.fromkeys(names, ROWS), kind, names)


def check_cache(kind: AxisType) -> None:
    cache = ato_jax.PagedCache.empty(
        B, 16, num_pages=PAGES, page_size=PAGE, num_kv_heads=G, head_dim=D, dtype=jnp.float32
    )
    for _ in range(3):
        cache, _ = cache.allocate()

    def serve(cache: Any, k: Any, v: Any) -> Any:
        cache, fits = cache.append(k, v)
        cache, other = cache.fork(jnp.int32(0))
        cache, fits_too = cache.append(k[:, :2], v[:, :2])
        cache = cache.free(jnp.int32(1)).defragment()
        return cache, fits, other, fits_too, cache.contiguous()

    arrays = {"cache": cache, "k": draw(B, 5, G, D), "v": draw(B, 5, G, D)}
    whole = ato_jax.PagedCache(HEADS, HEADS, *[P()] * 6)  # type: ignore[arg-type]
    check("a cache by heads", serve, arrays, {"cache": whole, "k": HEADS, "v": HEADS}, kind)
    if kind == EXPLICIT:
        # All pages are on each device, which so needs what the others append.
        by_slot = whole._replace(page_table=P("data"), lengths=P("data"), active=P("data"))  # type: ignore[arg-type]
        placed = {"cache": by_slot, "k": ROWS, "v": ROWS}
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
        wanted = jax.jit(serve)(**arrays)
        with jax.set_mesh(mesh):
            given = {
                one: jax.tree.map(
                    lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)),
                    array, placed[one],
                )
                for one, array in arrays.items()
            }  # fmt: skip
            found = jax.jit(serve)(**given)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert found[0].lengths.sharding.spec[0] == "data"


def main() -> None:
    check_decode(AUTO)
    check_step(EXPLICIT, ("q", "state", "decay"))
    check_delta_step(AUTO, ("q", "beta", "state", "decay"))
    check_pieces(AUTO)
    check_cache(EXPLICIT)
    if ALL_ROWS:
        check_decode(EXPLICIT)
        check_step(AUTO, ("q", "state", "decay"))
        check_delta_step(EXPLICIT, ("q", "beta", "state", "decay"))
        check_pieces(EXPLICIT)
        check_cache(AUTO)
    print("all alike")


if __name__ == "__main__":
    main()
