"""Causal linear attention by Mosaic GPU: interpreted beside the float64 reference, lowered for a
Hopper card, and on one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_linear_channel as channel

import ato_jax
from ato_jax import dispatch
from ato_jax.ops.linear_attention import api, mosaic_gpu
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.spec import Inputs, LinearState, Residuals
from tests import aot, numerics

OP = "linear_attention"


def newest(test: Any) -> Any:
    lacking = pytest.mark.skipif(frame.interpreter is None, reason="JAX interprets from 0.12 on")
    return pytest.mark.newest(lacking(test))


def draw(
    B: int, T: int, H: int, G: int, layout: str = "bthd", scale: float = 1.0
) -> list[jax.Array]:
    shapes = ((B, T, heads, 128) for heads in (H, G, G))
    found = [
        channel.draw(*shape, dtype="bfloat16", scale=scale, seed=seed)
        for seed, shape in enumerate(shapes)
    ]
    return found if layout == "bthd" else [jnp.swapaxes(array, 1, 2) for array in found]


def options_of(B: int, G: int, layout: str, given: bool) -> dict[str, Any]:
    """With a state given and asked for, or without."""
    if not given:
        return {"layout": layout}
    k_sum = jnp.abs(channel.draw(B, G, 128, seed=8)) + 1
    state = LinearState(channel.draw(B, G, 128, 128, seed=7), k_sum)
    return {"layout": layout, "initial_state": state, "return_state": True}


def against_the_reference(
    qkv: list[jax.Array], backward: str, device: Any = None, config: Any = None, **options: Any
) -> None:
    wanted = numerics.oracle(OP, *qkv, causal=True, **options)
    spec = wanted.request.spec
    assert mosaic_gpu.unsupported(spec, "forward") is None
    configs = {"forward_config": config}
    if backward == "mosaic_gpu":
        assert mosaic_gpu.unsupported(spec, "backward") is None
        configs["backward_config"] = config
    found = numerics.run_backends("mosaic_gpu", backward, wanted, device=device, **configs)
    numerics.compare(found, wanted)


# Two pieces of two chunks, the last of them in part, on fewer blocks than there are pieces.
SMALL = {"pieces": 2, "blocks": 3}


@newest
def test_pieces_and_a_state() -> None:
    options = options_of(2, 2, "bhtd", True) | {"return_state": False}
    with ato_jax.interpret():
        arrays = draw(2, 200, 2, 2, "bhtd")
        against_the_reference(arrays, "mosaic_gpu", channel.GPU, SMALL, **options)


@newest
def test_gates() -> None:
    """Beside a state, in groups; their gradients are Triton's, tested elsewhere."""
    T = 192
    options = options_of(2, 1, "bthd", True)
    decay = channel.draw_gates("mixed", 2, T, 1)
    q, k, v = draw(2, T, 2, 1)
    wanted = numerics.oracle(OP, q, k, v, causal=True, decay=decay, **options)
    spec = wanted.request.spec
    config = dataclasses.replace(mosaic_gpu.default_config(spec, channel.GPU), **SMALL)
    with ato_jax.interpret():
        found = jax.jit(mosaic_gpu.forward, static_argnums=(0, 1))(
            spec, config, wanted.request.inputs
        )
    users = numerics.users_outputs(OP, wanted.request, found)
    for name, array in users.items():
        numerics.check(name, array, wanted.exact[name], dtype="bfloat16")


@newest
def test_a_batch_of_calls_is_a_larger_batch() -> None:
    """Also of calls that share an array, unnormalised, in one piece."""
    q, k, v = draw(2, 72, 2, 1)

    def call(q: jax.Array, k: jax.Array) -> jax.Array:
        return ato_jax.linear_attention(
            q, k, v[0], causal=True, normalize=False, implementation="mosaic_gpu"
        )

    with ato_jax.interpret():
        found = jax.jit(jax.vmap(call, in_axes=(0, None)))(q, k[1])
    wanted = jax.vmap(
        lambda q: ato_jax.linear_attention(q, k[1], v[0], causal=True, normalize=False)
    )(q)
    assert jnp.linalg.norm((found - wanted).astype(jnp.float32)) <= 5e-3 * jnp.linalg.norm(
        wanted.astype(jnp.float32)
    )


def kernels_of(function: Any, *arrays: Any) -> int:
    """How many Mosaic GPU kernels it lowers to, for a Hopper card."""
    device = jax.sharding.AbstractDevice(aot.DEVICE_KIND[90], num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("@mosaic_gpu")


@pytest.mark.parametrize(
    "B, T, H, G, layout, options, count",
    [
        (1, 16384, 32, 32, "bthd", {}, 5),
        (16, 1000, 16, 16, "bhtd", {}, 3),
        (1, 1024, 8, 8, "bthd", {"normalize": False, "return_state": True}, 5),
        (1, 1000, 8, 2, "bthd", {"decay": True}, 2),
    ],
)
def test_lowers(
    B: int, T: int, H: int, G: int, layout: str, options: dict[str, Any], count: int
) -> None:
    """Layouts, barriers and products are checked on the way. One piece needs no sums."""
    options = dict(options)
    with jax.enable_x64(layout == "bhtd"):
        arrays = [
            jax.ShapeDtypeStruct(
                (B, T, heads, 128) if layout == "bthd" else (B, heads, T, 128), jnp.bfloat16
            )
            for heads in (H, G, G)
        ]
        gates = [jnp.zeros((B, T, G), jnp.float32)] if options.pop("decay", False) else []
        options = options | ({"decay": gates[0]} if gates else {})
        spec = api.prepare(*map(jnp.zeros_like, arrays), causal=True, layout=layout, **options).spec
        config = mosaic_gpu.default_config(spec, channel.GPU)

        def both(*arrays: Any) -> Any:
            inputs = Inputs(*arrays)
            kept = mosaic_gpu.keep(spec, config, inputs)
            if mosaic_gpu.unsupported(spec, "backward"):
                return kept
            return mosaic_gpu.backward(spec, config, Residuals(inputs, kept), kept.plain())

        arrays += gates
        assert kernels_of(both, *arrays) == count


def test_pieces_fill_the_card() -> None:
    """As many as make one round of blocks; one where there are heads enough."""
    spec = api.prepare(*draw(1, 64, 1, 1), causal=True).spec
    config = mosaic_gpu.default_config(spec, channel.GPU)

    def pieces(B: int, T: int, H: int) -> int:
        sizes = dataclasses.replace(spec, B=B, T=T, S=T, H=H, G=H)
        return mosaic_gpu.pieces_of(sizes, config)

    assert pieces(1, 16384, 32) == 4
    assert pieces(1, 65536, 16) == 8
    assert pieces(8, 4096, 16) == 1
    assert pieces(1, 64, 1) == 1


def test_who_is_asked_for_what() -> None:
    """Hopper alone, and long enough; other calls are Triton's, and the reason says why."""
    ampere = dataclasses.replace(channel.GPU, name="NVIDIA A100", capability=(8, 0))
    q, k, v = draw(1, 64, 2, 1)

    def backend(device: Any, B: int = 1024, **options: Any) -> str:
        spec = dataclasses.replace(api.prepare(q, k, v, **options).spec, B=B)
        call = dispatch._Call(api.OP, spec, None, device, False)
        return dispatch.choose(call, "forward").backend

    assert backend(channel.GPU, causal=True) == "mosaic_gpu"
    assert backend(channel.GPU) == backend(ampere, causal=True) == "triton"
    assert backend(channel.GPU, 511, causal=True) == "triton"
    assert "Hopper" in str(mosaic_gpu.refuses(ampere, False))
    lengths = jnp.array([3])
    for options, name in (
        ({"causal": False}, "causal"),
        ({"kv_lengths": lengths}, "lengths"),
        ({"decay": -jnp.ones((1, 64, 1, 128))}, "decay"),
        ({"feature_map": "silu"}, "silu"),
    ):
        spec = api.prepare(q, k, v, **{"causal": True, **options}).spec
        assert name in str(mosaic_gpu.unsupported(spec, "forward"))
        assert backend(channel.GPU, **{"causal": True, **options}) == "triton"
