"""The kernel of a decode step, interpreted on the CPU against plain JAX, and compiled for GPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.linear_attention import features, step
from ato_jax.ops.linear_attention.spec import LinearState, StepInputs, StepSpec
from ato_jax.ops.linear_attention.triton import decode
from tests import aot, numerics

GPUS = {
    80: device.Device("gpu", "NVIDIA A100", (8, 0), 108, device.SHARED_MEMORY[8, 0]),
    90: device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0]),
}
# One program per state, and a state over several programs.
ONE = device.Device("gpu", "a small GPU", (8, 0), 1, device.SHARED_MEMORY[8, 0])


def arguments(
    B: int, H: int, G: int, D: int, V: int, dtype: str = "float32", size: int | None = None
) -> tuple[Any, ...]:
    draw = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(draw.normal(size=shape), jnp.float32).astype(dtype)
        for shape in ((B, H, D), (B, G, D), (B, G, V))
    )
    sums = draw.uniform(0.2, 1.0, size=(B, G, size or D, V + 1)).astype(np.float32)
    return q, k, v, LinearState(jnp.asarray(sums[..., :V]), jnp.asarray(sums[..., V]))


def gates(*shape: int) -> jax.Array:
    return -jnp.abs(jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32))


def check(here: device.Device, *qkv_state: Any, **options: Any) -> None:
    """The public function by the kernel against the same by plain JAX."""
    wanted = ato_jax.linear_attention_step(*qkv_state, **options)
    with pytest.MonkeyPatch.context() as patch, ato_jax.interpret():
        patch.setattr(device, "of_call", lambda arrays: here)
        found = ato_jax.linear_attention_step(*qkv_state, **options)
    dtype = str(qkv_state[0].dtype)
    assert found[0].dtype == wanted[0].dtype
    for name, one, other in (
        ("out", found[0], wanted[0]),
        ("state_kv", found[1].kv, wanted[1].kv),
        ("state_k_sum", found[1].k_sum, wanted[1].k_sum),
    ):
        numerics.check(name, one, other, dtype=dtype)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    with ato_jax.interpret():
        monkeypatch.setattr(device, "of_call", lambda arrays: GPUS[90])
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("normalize", [False, True])
def test_dtypes(dtype: str, normalize: bool) -> None:
    check(GPUS[90], *arguments(2, 4, 2, 32, 32, dtype), normalize=normalize)


@pytest.mark.parametrize("here", [ONE, GPUS[90]], ids=["whole states", "blocks of columns"])
@pytest.mark.parametrize(("D", "V"), [(1, 1), (20, 33), (64, 80), (256, 256)])
def test_sizes(here: device.Device, D: int, V: int) -> None:
    check(here, *arguments(2, 2, 1, D, V), decay=gates(2, 1, D))


@pytest.mark.parametrize("shape", ["G", "BG", "BGD"])
def test_decays(shape: str) -> None:
    B, H, G, D, V = 2, 6, 2, 20, 24
    sizes = {"B": B, "G": G, "D": D}
    check(GPUS[90], *arguments(B, H, G, D, V), decay=gates(*(sizes[axis] for axis in shape)))


@pytest.mark.parametrize(
    "name",
    "relu exp softplus identity silu relu2 custom constant closed favor".split(),
)
def test_feature_maps(name: str) -> None:
    scales = jnp.linspace(0.5, 1.0, 4)
    maps: dict[str, Any] = {
        "custom": lambda x: jnp.tanh(x) + 2,
        "constant": lambda x: 1.0,
        "closed": lambda x: jnp.tanh(x) * scales[1] + 2,
        "favor": ato_jax.favor(jax.random.key(0), 24, 16),
    }
    qkv_state = arguments(1, 2, 1, 16, 16, size=24 if name == "favor" else None)
    check(GPUS[90], *qkv_state, feature_map=maps.get(name, name))


def test_without_a_batch_axis() -> None:
    check(GPUS[90], *jax.tree.map(lambda array: array[0], arguments(1, 2, 2, 16, 16)))


@pytest.mark.parametrize("feature_map", ["elu1", ato_jax.favor(jax.random.key(0), 16, 8)])
def test_an_empty_batch(feature_map: Any) -> None:
    rows, width = jnp.zeros((0, 4, 8)), 8 if feature_map == "elu1" else 16
    keys, state = rows[:, :2], LinearState(jnp.zeros((0, 2, width, 8)), jnp.zeros((0, 2, width)))
    out, following = ato_jax.linear_attention_step(
        rows, keys, keys, state, feature_map=feature_map
    )
    assert jax.tree.map(jnp.shape, (out, following)) == jax.tree.map(jnp.shape, (rows, state))


@pytest.mark.usefixtures("on_a_gpu")
def test_derivatives_are_the_plain_ones() -> None:
    qkv_state = arguments(1, 4, 2, 8, 8)

    def loss(*qkv_state: Any) -> Any:
        out, state = ato_jax.linear_attention_step(*qkv_state, decay=decay)
        return jnp.sum(out**2) + jnp.sum(state.kv**3)

    decay = gates(1, 2, 8)
    every = (0, 1, 2, 3)
    found = jax.grad(loss, every)(*qkv_state)
    ones = jax.tree.map(jnp.ones_like, qkv_state)
    _, slope = jax.jvp(loss, qkv_state, ones)
    _, curve = jax.jvp(jax.grad(loss), qkv_state, ones)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "of_call", lambda arrays: device.Device("cpu"))
        wanted = jax.grad(loss, every)(*qkv_state)
        _, wanted_curve = jax.jvp(jax.grad(loss), qkv_state, ones)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found, wanted)
    close(slope, sum(jnp.sum(leaf) for leaf in jax.tree.leaves(wanted)))
    close(curve, wanted_curve)


@pytest.mark.lowering
def test_what_is_left_to_plain_jax() -> None:
    inputs = StepInputs(*arguments(1, 1, 1, 16, 16), None, ())
    wide = StepInputs(*arguments(1, 1, 1, 257, 16), None, ())
    old = device.Device("gpu", "NVIDIA V100", (7, 0), 80)
    assert decode.unsupported(inputs, GPUS[80]) is None
    assert "F=257" in str(decode.unsupported(wide, GPUS[80]))
    assert "8.0" in str(decode.unsupported(inputs, old))
    assert "NVIDIA" in str(decode.unsupported(inputs, device.Device("gpu", "AMD")))


def shapes(B: int, H: int, G: int, D: int, V: int, dtype: str) -> StepInputs:
    def shape(*sizes: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    q, k, v = (shape(B, *rest, dtype=dtype) for rest in ((H, D), (G, D), (G, V)))
    return StepInputs(q, k, v, LinearState(shape(B, G, D, V), shape(B, G, D)), None, ())


@aot.requires_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "sizes",
    [(64, 32, 32, 128, 128), (64, 32, 8, 128, 128), (1, 8, 8, 128, 128), (64, 16, 16, 256, 256)],
    ids=str,
)
def test_compiles_without_spills(sizes: tuple[int, ...], capability: int) -> None:
    spec = StepSpec(features.NAMED["elu1"], True, 1.0, 1e-6)
    run = functools.partial(decode.step, spec, GPUS[capability])
    inputs = shapes(*sizes, dtype="bfloat16")
    (kernel,) = aot.compile_function(run, inputs, capabilities=(capability,))
    assert kernel.fits and not kernel.spills, kernel
    # Two programs at a time on a multiprocessor.
    assert 2 * 32 * kernel.num_warps * kernel.registers <= 65536, kernel


@aot.requires_triton
def test_the_state_is_updated_in_place() -> None:
    """One kernel of the lowered step takes over both parts of a donated state."""
    spec = StepSpec(features.NAMED["elu1"], True, 1.0, 1e-6)
    inputs = shapes(64, 32, 32, 128, 128, dtype="bfloat16")
    run = functools.partial(step._step, spec, GPUS[90], False, None)
    target = jax.sharding.AbstractDevice(aot.DEVICE_KIND[90], num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=target)
    ):
        lowered = jax.jit(run).trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") == 1
    assert lowered.count("output_operand_alias<") == 2
