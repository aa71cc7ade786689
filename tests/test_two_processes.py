"""Two processes of four devices each, which `jax.distributed` joins: gloo carries what they send.

This file is the program of both. Each compares the parts that it holds with one device's results.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ato_jax
import ato_jax.parallel
from tests import processes

PROCESSES, DEVICES = 2, 4
B, T, H, G, D = 2, 16, 2, 1, 8


def test_two_processes() -> None:
    processes.run("tests.test_two_processes", PROCESSES, DEVICES)


def draw(*shape: int, seed: int) -> Any:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def program(function: Any, gradients: bool) -> Any:
    """The results, and the gradients of a sum over them."""

    def loss(arrays: Any) -> Any:
        found = function(**arrays)
        return sum(jnp.sum(jnp.sin(one)) for one in jax.tree.leaves(found)), found

    return jax.jit(jax.grad(loss, has_aux=True) if gradients else loss)


def check(
    name: str, on_mesh: Any, alone: Any, arrays: Any, mesh: Any, specs: Any, gradients: bool = True
) -> None:
    """Results and gradients on the mesh are those of `alone`."""
    wanted = program(alone, gradients)(arrays)
    placed = {
        one: jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, specs[one]), array.__getitem__
        )
        for one, array in arrays.items()
    }
    found = program(on_mesh, gradients)(placed)
    print(name, flush=True)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert not one.is_fully_addressable
        for shard in one.addressable_shards:
            np.testing.assert_allclose(
                shard.data, np.asarray(other)[shard.index], rtol=2e-4, atol=2e-5, err_msg=name
            )


def main() -> None:
    kinds = (AxisType.Auto,)
    mesh = jax.make_mesh((PROCESSES * DEVICES,), ("time",), axis_types=kinds)
    arrays = {
        name: draw(B, T, heads, D, seed=seed)
        for seed, (name, heads) in enumerate(zip("qkv", (H, G, G), strict=True))
    }
    rows = P(None, "time")

    def cut(function: Any, outputs: Any = rows, **options: Any) -> Any:
        call = functools.partial(function, axis_name="time", **options)
        return lambda **arrays: jax.shard_map(
            lambda arrays: call(**arrays), mesh=mesh, in_specs=rows, out_specs=outputs
        )(arrays)

    specs = dict.fromkeys((*"qkv", "decay"), rows)
    gated = {**arrays, "decay": -np.abs(draw(B, T, G, seed=4))}
    options: dict[str, Any] = {"causal": True, "return_state": True}
    check(
        "linear attention by time", cut(ato_jax.parallel.linear_attention, (rows, P()), **options),
        functools.partial(ato_jax.linear_attention, **options), gated, mesh, specs,
    )  # fmt: skip
    check(
        "softmax around a ring",
        cut(ato_jax.parallel.attention, schedule="ring", causal=True),
        functools.partial(ato_jax.attention, causal=True), arrays, mesh, specs,
    )  # fmt: skip

    # Heads within a process, the batch over both.
    mesh = jax.make_mesh((PROCESSES, DEVICES), ("data", "model"), axis_types=kinds * 2)
    four = {"q": draw(B, 8, 8, 16, seed=0)} | {
        name: draw(B, 8, 4, 16, seed=seed) for seed, name in enumerate("kv", 1)
    }
    call = functools.partial(ato_jax.attention, causal=True)
    with ato_jax.interpret():
        check(
            "a kernel by batch and heads", functools.partial(call, implementation="triton"), call,
            four, mesh, dict.fromkeys("qkv", P("data", None, "model")), gradients=False,
        )  # fmt: skip


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{sys.argv[1]}", num_processes=PROCESSES, process_id=int(sys.argv[2])
    )
    assert jax.device_count() == PROCESSES * DEVICES
    main()
    print(processes.ALL_ALIKE)
