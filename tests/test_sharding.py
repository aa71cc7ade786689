"""Arrays that lie on several devices: explicit and automatic axes of a mesh, and shard_map.

They need several devices, and so a process of their own, in which this file is the program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ato_jax
import ato_jax.nn
from ato_jax import device
from tests import simulated

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
    "GatedLinearAttention": ato_jax.nn.GatedLinearAttention,
    "LatentAttention": functools.partial(
        ato_jax.nn.LatentAttention, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4
    ),
    "GatedDeltaNet": ato_jax.nn.GatedDeltaNet,
    "KimiDeltaAttention": ato_jax.nn.KimiDeltaAttention,
}


def test_in_a_process_with_four_devices() -> None:
    assert simulated.last_line("tests.test_sharding", devices=4) == "all alike"


def arrays(layout: str) -> list[Any]:
    draw = np.random.default_rng(0)
    shape = (B, T, H, D) if layout == "bthd" else (B, H, T, D)
    return [draw.normal(size=shape).astype(np.float32) for _ in range(3)]


def alike(name: str, found: Any, wanted: Any) -> None:
    print(name, flush=True)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)


def with_gradient(function: Any) -> Any:
    """One program that gives the outputs, and the gradient of the sum of their squares."""

    def loss(*qkv: Any) -> Any:
        out = function(*qkv)
        return sum(jnp.sum(array**2) for array in jax.tree.leaves(out)), out

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def check_meshes(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    for name, op in OPS.items():
        if kind == AxisType.Auto and name != "causal linear attention":
            continue
        layout = op.keywords.get("layout", "bthd")
        qkv = arrays(layout)
        wanted = with_gradient(op)(*qkv)
        by_head = P("data", None, "model") if layout == "bthd" else P("data", "model")
        with jax.set_mesh(mesh):
            placed = [jax.device_put(array, NamedSharding(mesh, by_head)) for array in qkv]
            found = with_gradient(op)(*placed)
            alike(f"{kind}: {name}", found, wanted)
            if kind == AxisType.Explicit:
                if name == "attention":
                    alike("  outside of jit", op(*placed), found[1])
                for array in (found[0][0], jax.tree.leaves(found[1])[0]):
                    assert jax.typeof(array).sharding == jax.typeof(placed[0]).sharding


def check_total_and_nothing() -> None:
    """What each key received, whatever is sharded; and an empty batch of either op."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    q, k, _ = arrays("bthd")
    lse = np.full((B, T, H), np.log(T), np.float32)
    wanted = ato_jax.total_attention(q, k, lse)
    for spec in (P(None, None, "model"), P("data", "model")):
        with jax.set_mesh(mesh):
            placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array in (q, k, lse)]
            alike(f"total_attention, {spec}", ato_jax.total_attention(*placed), wanted)
            none = jax.device_put(np.zeros((0, T, H, D), np.float32), NamedSharding(mesh, spec))
            for op in (ato_jax.attention, ato_jax.linear_attention):
                assert op(none, none, none).shape == none.shape


def check_layers() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = np.random.default_rng(0).normal(size=(B, T, 16)).astype(np.float32)
    for name, make in LAYERS.items():
        call = nnx.jit(lambda layer, x: layer(x))
        wanted = call(make(H, 16, rngs=nnx.Rngs(0)), x)
        for spec in (P("data"), P(None, "data")):
            with jax.set_mesh(mesh):
                layer = make(H, 16, rngs=nnx.Rngs(0))
                out = call(layer, jax.device_put(x, NamedSharding(mesh, spec)))
                alike(f"{name}, {spec}", out, wanted)
                found = jax.typeof(out).sharding.spec
                assert found == P(*spec, *[None] * (3 - len(spec))), found


def check_shard_map() -> None:
    """Each device its own batch entries, or its own heads, as kernels run on several GPUs."""
    mesh = jax.make_mesh((4,), ("shards",), axis_types=(AxisType.Auto,))
    for name, spec in (
        ("attention", P("shards")),
        ("causal linear attention", P(None, None, "shards")),
    ):
        options = {key: value for key, value in OPS[name].keywords.items() if key == "causal"}
        op = functools.partial(OPS[name].func, **options)
        mapped = jax.shard_map(op, mesh=mesh, in_specs=spec, out_specs=spec)
        found, wanted = (with_gradient(function)(*arrays("bthd")) for function in (mapped, op))
        alike(f"shard_map, {spec}: {name}", found, wanted)


def check_types_of_kernels() -> None:
    """Lowered as for GPUs, inside a shard_map that checks what varies, as it does by default."""
    mesh = jax.make_mesh((4,), ("shards",), axis_types=(AxisType.Auto,))
    gpu = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])
    shapes = [jax.ShapeDtypeStruct((B, 64, H, 32), jnp.bfloat16)] * 3
    # What is the same for all shards has a gradient that is their sum.
    bias = {"bias": np.zeros((1, 1, 1, 64), np.float32), "sinks": np.zeros(H, np.float32)}
    cases = (
        (ato_jax.attention, bias),
        (ato_jax.linear_attention, {}),
        (ato_jax.linear_attention, {"causal": True, "decay": -np.ones(H, np.float32)}),
        (ato_jax.linear_attention, {"feature_map": lambda x: jnp.where(x > 0, x, 0)}),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "of_call", lambda arrays: gpu)
        for op, options in cases:

            def loss(options: Any, *qkv: Any, op: Any = op, rest: Any = None) -> Any:
                def attend(options: Any, *qkv: Any) -> Any:
                    return op(*qkv, implementation="triton", **options, **rest)

                mapped = jax.shard_map(
                    attend, mesh=mesh, in_specs=(P(), *[P("shards")] * 3), out_specs=P("shards")
                )
                return jnp.sum(mapped(options, *qkv).astype(jnp.float32))

            static = {key: value for key, value in options.items() if not hasattr(value, "shape")}
            learned = {key: value for key, value in options.items() if key not in static}
            function = functools.partial(loss, rest=static)
            print(f"types: {op.__name__}, {list(options)}", flush=True)
            traced = jax.jit(jax.grad(function, argnums=(0, 1, 2, 3))).trace(learned, *shapes)
            assert "pallas_call" in str(traced.jaxpr)


if __name__ == "__main__":
    check_meshes(AxisType.Explicit)
    check_meshes(AxisType.Auto)
    check_layers()
    check_total_and_nothing()
    check_shard_map()
    check_types_of_kernels()
    print("all alike")
