"""Arrays that lie on several devices: explicit and automatic axes of a mesh, and shard_map.

They need several devices, and so a process of their own, in which this file is the program.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ato_jax
import ato_jax.nn

B, T, H, D = 4, 8, 4, 8
OPS: dict[str, Any] = {
    "attention": functools.partial(ato_jax.attention, causal=True, return_lse=True),
    "attention with options": functools.partial(
        ato_jax.attention,
        window=(3, 0),
        dropout_rate=0.1,
        dropout_key=np.zeros(2, np.uint32),
        bias=np.ones((B, 1, 1, T), np.float32),
        kv_lengths=np.array([3, 8, 1, 0]),
        layout="bhtd",
    ),
    "linear attention": functools.partial(
        ato_jax.linear_attention, segment_ids=np.arange(T)[None].repeat(B, 0) // 3
    ),
    "causal linear attention": functools.partial(
        ato_jax.linear_attention, causal=True, decay=-np.ones(H, np.float32), return_state=True
    ),
}
LAYERS: dict[str, Any] = {
    "Attention": ato_jax.nn.Attention,
    "LinearAttention": functools.partial(ato_jax.nn.LinearAttention, causal=True),
    "Performer": ato_jax.nn.Performer,
    "GatedLinearAttention": ato_jax.nn.GatedLinearAttention,
    "LatentAttention": functools.partial(
        ato_jax.nn.LatentAttention, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4
    ),
}


def test_in_a_process_with_four_devices() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.test_sharding"],
        cwd=Path(__file__).parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.split("\n")[-2] == "all alike"


def arrays(layout: str) -> list[Any]:
    draw = np.random.default_rng(0)
    shape = (B, T, H, D) if layout == "bthd" else (B, H, T, D)
    return [draw.normal(size=shape).astype(np.float32) for _ in range(3)]


def alike(name: str, found: Any, wanted: Any) -> None:
    print(name, flush=True)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)


def gradient(function: Any) -> Any:
    def loss(*qkv: Any) -> Any:
        return sum(jnp.sum(array**2) for array in jax.tree.leaves(function(*qkv)))

    return jax.grad(loss, (0, 1, 2))


def check_meshes(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    for name, op in OPS.items():
        layout = op.keywords.get("layout", "bthd")
        qkv = arrays(layout)
        wanted, wanted_gradient = op(*qkv), gradient(op)(*map(jnp.asarray, qkv))
        by_head = P("data", None, "model") if layout == "bthd" else P("data", "model")
        with jax.set_mesh(mesh):
            placed = [jax.device_put(array, NamedSharding(mesh, by_head)) for array in qkv]
            out = op(*placed)
            alike(f"{kind}: {name}", out, wanted)
            alike("  gradient", jax.jit(gradient(op))(*placed), wanted_gradient)
            if kind == AxisType.Explicit:
                first = jax.tree.leaves(out)[0]
                assert jax.typeof(first).sharding == jax.typeof(placed[0]).sharding


def check_layers() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = np.random.default_rng(0).normal(size=(B, T, 16)).astype(np.float32)
    for name, make in LAYERS.items():
        wanted = make(H, 16, rngs=nnx.Rngs(0))(x)
        with jax.set_mesh(mesh):
            layer = make(H, 16, rngs=nnx.Rngs(0))
            out = layer(jax.device_put(x, NamedSharding(mesh, P("data"))))
            alike(name, out, wanted)
            assert jax.typeof(out).sharding.spec[0] == "data"


def check_shard_map() -> None:
    """Each device its own batch entry, or its own heads, as kernels run on several GPUs."""
    mesh = jax.make_mesh((4,), ("shards",), axis_types=(AxisType.Auto,))
    for name in ("attention", "causal linear attention"):
        options = {key: value for key, value in OPS[name].keywords.items() if key == "causal"}
        wanted = gradient(functools.partial(OPS[name].func, **options))(*arrays("bthd"))
        for implementation, spec in (("xla", P("shards")), ("triton", P(None, None, "shards"))):
            op = functools.partial(OPS[name].func, implementation=implementation, **options)
            # An interpreted kernel's types do not say which axes it varies over.
            mapped = jax.shard_map(
                op, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=implementation == "xla"
            )
            with ato_jax.interpret(implementation == "triton"):
                found = jax.jit(gradient(mapped))(*arrays("bthd"))
            alike(f"shard_map, {spec}: {name}, {implementation}", found, wanted)


if __name__ == "__main__":
    check_meshes(AxisType.Explicit)
    check_meshes(AxisType.Auto)
    check_layers()
    check_shard_map()
    print("all alike")
