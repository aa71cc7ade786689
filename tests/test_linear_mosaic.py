"""Linear attention by Mosaic GPU: interpreted beside the float64 reference, lowered for a
Hopper card, and on one."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel

import ato_jax
from ato_jax import choosing, dispatch
from ato_jax.ops.linear_attention import api, mosaic_gpu
from ato_jax.ops.linear_attention import decay as decay_limits
from ato_jax.ops.linear_attention.mosaic_gpu import channel as by_channel
from ato_jax.ops.linear_attention.mosaic_gpu import frame, support
from ato_jax.ops.linear_attention.scans import channel_flows, flow_places
from ato_jax.ops.linear_attention.spec import Inputs, LinearState, Residuals
from tests import aot, numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"


def draw(
    B: int, T: int, H: int, G: int, layout: str = "bthd", S: int | None = None, D: int = 128
) -> list[jax.Array]:
    shapes = ((B, length, heads, D) for length, heads in ((T, H), (S or T, G), (S or T, G)))
    found = [channel.draw(*shape, dtype="bfloat16", seed=seed) for seed, shape in enumerate(shapes)]
    return found if layout == "bthd" else [jnp.swapaxes(array, 1, 2) for array in found]


def options_of(
    B: int, G: int, layout: str, given: bool, D: int = 128, V: int | None = None
) -> dict[str, Any]:
    """With a state given and asked for, or without."""
    if not given:
        return {"layout": layout}
    k_sum = jnp.abs(channel.draw(B, G, D, seed=8)) + 1
    state = LinearState(channel.draw(B, G, D, V or D, seed=7), k_sum)
    return {"layout": layout, "initial_state": state, "return_state": True}


PLAIN = {"normalize": False}
# Two pieces, on fewer blocks than there are pieces of all heads.
SMALL = {"pieces": 2, "blocks": 3}


def against_the_reference(
    forward: str, backward: str, wanted: numerics.Oracle
) -> dict[str, numerics.Measure]:
    """One backend's forward, and one's backward."""
    names = {"forward_config": forward, "backward_config": backward}
    configs = {field: SMALL for field, name in names.items() if name == "mosaic_gpu"}
    with ato_jax.interpret():
        found = numerics.run_backends(forward, backward, wanted, device=channel.GPU, **configs)
    return numerics.compare(found, wanted)


@newest
@pytest.mark.parametrize("B, H, D", [(2, 1, 128), (1, 2, 64)])
def test_pieces_and_a_state(B: int, H: int, D: int) -> None:
    """Of two chunks, the last of them in part."""
    options = options_of(B, H, "bhtd", True, D) | {"return_state": False}
    wanted = numerics.oracle(OP, *draw(B, 200, H, H, "bhtd", D=D), causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "T, D, layout, decay, options",
    [
        (101, 64, "bthd", None, {}),
        (67, 48, "bhtd", None, options_of(1, 2, "bhtd", True, 48) | {"return_state": False}),
        (131, 64, "bhtd", "step", {}),
        (70, 40, "bthd", "step", PLAIN),
        (131, 64, "bthd", "head", {}),
    ],
)
def test_tails_within_8_rows(T: int, D: int, layout: str, decay: str | None, options: Any) -> None:
    """With steep chunks, too: the last one in part, and one that is whole; of heads that fill a
    tile's half, and narrower ones."""
    gates = channel.draw_gates("mild", 1, T, 2).at[:, jnp.array([40, T - 2])].set(-50.0)
    if decay == "step":
        options = options | {"decay": gates if layout == "bthd" else jnp.swapaxes(gates, 1, 2)}
    elif decay == "head":
        options = options | {"decay": jnp.array([-0.05, -0.3])}
    arrays = draw(1, T, 2, 2, layout, D=D)
    wanted = numerics.oracle(OP, *arrays, causal=True, **{"layout": layout} | options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "T, H, layout, decay, options",
    [
        (203, 1, "bthd", None, options_of(1, 1, "bthd", True)),
        (67, 2, "bhtd", None, PLAIN | {"layout": "bhtd"}),
        (203, 2, "bhtd", "mild", {"layout": "bhtd"}),
        (203, 1, "bthd", "steep", {}),
        (131, 1, "bhtd", "steep", options_of(1, 1, "bhtd", True) | PLAIN),
    ],
)
def test_tails_within_8_rows_of_one_head(
    T: int, H: int, layout: str, decay: str | None, options: Any
) -> None:
    """A tile of one head lies in two blocks, and for the gradients in atoms of 8 rows. Some heads
    share keys, and some calls take a state and return one. The steep chunk is one of several, or
    the last one, which T cuts."""
    if decay:
        gates = channel.draw_gates("mild", 1, T, 1)
        if decay == "steep":
            gates = gates.at[:, jnp.array([40, T - 2])].set(-50.0)
        options = options | {"decay": gates if layout == "bthd" else jnp.swapaxes(gates, 1, 2)}
    wanted = numerics.oracle(OP, *draw(1, T, H, 1, layout), causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "T, D, V, layout, options",
    [
        (99, 80, 80, "bthd", {}),
        (77, 72, 72, "bthd", {}),
        (131, 112, 112, "bhtd", {"feature_map": "exp"}),
        (75, 128, 64, "bthd", {}),
        (101, 64, 96, "bhtd", PLAIN),
    ],
)
def test_tails_within_8_rows_of_part_of_a_tile(
    T: int, D: int, V: int, layout: str, options: Any
) -> None:
    """Of v, or of q and k, the second half of the columns may lie wholly beyond the head."""
    q, k, _ = draw(1, T, 1, 1, layout, D=D)
    (*_, v) = draw(1, T, 1, 1, layout, D=V)
    wanted = numerics.oracle(OP, q, k, v, causal=True, layout=layout, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
def test_every_query_sees_every_key() -> None:
    """In groups, beside a state; with a denominator below eps, too. Each backend's backward goes
    with the other's forward."""
    options = options_of(2, 1, "bhtd", True) | {"eps": 5e3}
    kv, k_sum = options["initial_state"]
    options["initial_state"] = LinearState(kv, k_sum.at[1].multiply(-100))
    wanted = numerics.oracle(OP, *draw(2, 72, 2, 1, "bhtd", S=136), **options)
    against_the_reference("mosaic_gpu", "triton", wanted)
    against_the_reference("triton", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "D, V, T, S, H, layout, causal, options",
    [
        (160, 160, 72, 136, 2, "bhtd", False, options_of(1, 1, "bhtd", True, 160)),
        (208, 208, 72, 64, 1, "bthd", False, PLAIN),
        (256, 256, 136, 136, 1, "bhtd", True, options_of(1, 1, "bhtd", True, 256) | {"eps": 2e4}),
        (96, 96, 72, 136, 2, "bhtd", False, options_of(1, 1, "bhtd", True, 96)),
        (112, 64, 72, 64, 1, "bthd", False, {}),
        (72, 72, 72, 136, 2, "bthd", False, options_of(1, 1, "bthd", True, 72)),
        (72, 72, 136, 136, 1, "bhtd", True, {"layout": "bhtd"}),
        (80, 80, 128, 128, 1, "bthd", True, options_of(1, 1, "bthd", True, 80)),
        (64, 128, 136, 136, 1, "bhtd", True, {"eps": 2e3, "layout": "bhtd"}),
    ],
)
def test_heads_of_other_sizes(
    D: int, V: int, T: int, S: int, H: int, layout: str, causal: bool, options: dict[str, Any]
) -> None:
    """Heads have two to four blocks of 64 columns, the last one in part, and V may differ from D.
    Causal rows come in two pieces, the last one in part. Some cases have groups, no normaliser or a
    denominator below eps."""
    options = options | ({"return_state": False} if T % frame.C and causal else {})
    q, k, v = draw(1, T, H, 1, layout, S=S, D=max(D, V))
    q, k, v = q[..., :D], k[..., :D], v[..., :V]
    wanted = numerics.oracle(OP, q, k, v, causal=causal, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
def test_features_that_are_rounded_alike() -> None:
    """1 + 2^-8 lies in the middle between two numbers of bfloat16."""
    q, k, v = draw(1, 72, 1, 1, D=176)
    wanted = numerics.oracle(OP, jnp.full_like(q, 2**-8), k, v, causal=True)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "kind, B, T, channels, V, options",
    [
        ("mixed", 2, 192, (), 128, options_of(2, 1, "bthd", True)),
        ({60: -50.0, 70: -50.0}, 1, 192, (128,), 128, options_of(1, 1, "bthd", True)),
        ({2: -jnp.inf, 4: -50.0}, 2, 72, (128,), 128, {"layout": "bhtd", "normalize": False}),
        ({40: -50.0, 42: -50.0}, 2, 72, (64,), 64, {"layout": "bhtd"}),
        ({40: -50.0, 42: -50.0}, 1, 128, (144,), 160, options_of(1, 1, "bhtd", True, 144, 160)),
    ],
)
def test_gates(
    kind: Any, B: int, T: int, channels: tuple[int, ...], V: int, options: dict[str, Any]
) -> None:
    """In groups, whose gradients are Triton's, tested elsewhere. Of channels: a strong one on
    either side of a chunk's edge is nowhere steep, but between the middles of the chunks states
    lose more than float32 holds; two in four rows are, and that chunk takes 8 turns. Two heads
    in a tile take the turns of either; of a head that is cut each pair of blocks has its own."""
    D = channels[0] if channels else 128
    H, G = (4, 4) if D == 64 else (2, 1)
    if isinstance(kind, dict):
        decay = channel.draw_gates("mild", B, T, G, *channels)
        for step, strong in kind.items():
            decay = decay.at[:, step, G - 1].set(strong)
    else:
        decay = channel.draw_gates(kind, B, T, G, *channels)
    layout = options["layout"]
    decay = decay if layout == "bthd" else jnp.swapaxes(decay, 1, 2)
    q, k, v = draw(B, T, H, G, layout, D=max(D, V))
    q, k, v = q[..., :D], k[..., :D], v[..., :V]
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


def test_turns_of_chunks() -> None:
    """As few as leave no half of one steep, by sums as the kernel's product makes them."""
    generator = np.random.default_rng(5)
    strength = np.array([0.2, 1.0, 2.5, 5.0, 9.0, 15.0, 30.0, 100.0])
    gates = -strength[:, None, None] * generator.uniform(0.8, 1.0, (8, frame.C, 2))
    gates = np.maximum(gates, by_channel.LEAST_DECAY) * frame.LOG2_E
    gates[:2, 3, 1] = -70

    def turns_of(chunk: np.ndarray) -> int:
        turns = 1
        while chunk.reshape(2 * turns, -1, 2).sum(axis=1).min() < -by_channel.MOST_LOST:
            turns *= 2
        return turns

    row, column = jnp.mgrid[: frame.C, : frame.C]
    weights = np.asarray(by_channel.weights_of_halves(row, column), np.float64)
    weights /= by_channel.UNIT
    sums = jnp.asarray(np.moveaxis(weights @ gates, 2, 1), jnp.float32)
    wanted = [turns_of(chunk) for chunk in gates]
    assert sorted(set(wanted)) == [1, 2, 4, 8, 16, 32]
    assert by_channel.turns_of(sums[None, None])[0, 0].tolist() == wanted


# Gates that leave nothing of a state here and there, of one of a tile's heads more than of the
# other; or, by heads, nearly all and as little as they may in a chunk that is not steep. A
# denominator below eps.
@newest
@pytest.mark.parametrize(
    "D, gates, options",
    [
        (128, "mixed", {"eps": 300.0}),
        (64, "mixed", {}),
        (64, (-0.001, -1.25), {"normalize": False}),
        (96, "mixed", {}),
        (112, (-0.001, -1.25), {}),
    ],
)
def test_gradients_of_gates(
    D: int, gates: str | tuple[float, float], options: dict[str, Any]
) -> None:
    B, T = 1, 192
    options = options_of(B, 2, "bthd", True, D) | options
    if isinstance(gates, str):
        decay = channel.draw_gates(gates, B, T, 2)
        decay = decay.at[..., 0].multiply(0.1) if D == 64 else decay
    else:
        decay = jnp.array(gates, jnp.float32)
        halves = decay * (frame.C // 2 * frame.LOG2_E)
        most_lost = decay_limits.MOST_LOST_OF_CHUNK
        assert -most_lost < halves.min() < -0.9 * most_lost
    wanted = numerics.oracle(OP, *draw(B, T, 2, 2, D=D), causal=True, decay=decay, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "T, H, D, V, kind, options",
    [
        (192, 1, 128, 128, "mild", options_of(1, 1, "bhtd", True)),
        (136, 2, 64, 64, "mild", options_of(1, 2, "bthd", True, 64) | {"return_state": False}),
        (72, 4, 64, 64, "edge", {"normalize": False, "layout": "bhtd"}),
        (96, 2, 64, 64, "mixed", {}),
        (72, 2, 32, 48, "mild", options_of(1, 2, "bhtd", True, 32, 48) | {"return_state": False}),
        (128, 1, 144, 160, "mild", options_of(1, 1, "bthd", True, 144, 160)),
    ],
)
def test_gradients_of_gates_of_channels(
    T: int,
    H: int,
    D: int,
    V: int,
    kind: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two pieces, the last of them in part; unnormalised, where neither of two chunks is steep,
    but from middle to middle more is lost than float32 holds; of heads that fill a tile in part,
    and of one that is cut; and another backend's where a chunk is steep, and these would be 0."""
    monkeypatch.setattr(by_channel, "CHUNKS", 2)
    for module in (by_channel, channel_flows):
        monkeypatch.setattr(module, "RUN", 2 * frame.C)
    if kind == "mixed":

        def nothing(_spec: Any, _deal: Any, inputs: Inputs, *_arrays: Any) -> Inputs:
            return jax.tree.map(jnp.zeros_like, inputs)

        monkeypatch.setattr(mosaic_gpu.causal.channel_backward, "gradients", nothing)
    layout = options.get("layout", "bthd")
    decay = channel.draw_gates("mild" if kind == "edge" else kind, 1, T, H, D)
    if kind == "edge":
        decay = decay.at[:, jnp.array([60, 66]), 1].set(-50.0)
    decay = decay if layout == "bthd" else jnp.swapaxes(decay, 1, 2)
    q, k, v = draw(1, T, H, H, layout, D=max(D, V))
    q, k, v = q[..., :D], k[..., :D], v[..., :V]
    wanted = numerics.oracle(OP, q, k, v, causal=True, decay=decay, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
def test_gradients_of_gates_in_long_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums begin anew within them, the last chunk is in part, strong gates and some beyond what
    float32 holds; behind Triton's forward, which keeps no states."""
    spacing = 2
    monkeypatch.setitem(flow_places.SPACING, "step", spacing)
    T, chunks = 328, 3
    assert chunks * frame.C * SMALL["pieces"] > T > 2 * spacing * frame.C
    decay = jnp.full((1, 2, T), -0.01).at[:, 1].set(-20.0).at[:, 1, ::7].set(-128.5)
    options: dict[str, Any] = {"causal": True, "layout": "bhtd"}
    wanted = numerics.oracle(OP, *draw(1, T, 2, 2, "bhtd"), decay=decay, **options)
    against_the_reference("triton", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_of_calls_is_a_larger_batch(causal: bool) -> None:
    """Also of calls that share an array, unnormalised, in one piece."""
    q, k, v = draw(2, 72, 2, 1)

    def call(q: jax.Array, k: jax.Array, implementation: str | None) -> jax.Array:
        return ato_jax.linear_attention(
            q, k, v[0], causal=causal, normalize=False, implementation=implementation
        )

    batch = jax.jit(jax.vmap(call, in_axes=(0, None, None)), static_argnums=2)
    with ato_jax.interpret():
        found = batch(q, k[1], "mosaic_gpu")
    wanted = batch(q, k[1], None)
    assert jnp.linalg.norm((found - wanted).astype(jnp.float32)) <= 5e-3 * jnp.linalg.norm(
        wanted.astype(jnp.float32)
    )


def mesh_of(*axes: str) -> jax.sharding.AbstractMesh:
    """Two Hopper cards along each axis."""
    device = jax.sharding.AbstractDevice(aot.DEVICE_KIND[90], num_cores=None, platform="gpu")
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh(
        (2,) * len(axes), axes, abstract_device=device, axis_types=types
    )


def kernels_of(function: Any, *arrays: Any, mesh: Any = None) -> int:
    """How many Mosaic GPU kernels it lowers to, for a Hopper card."""
    mesh = mesh_of() if mesh is None else mesh
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
    return sum(target.startswith("mosaic_gpu") for target in aot.targets_of_calls(lowered))


# Lowered elsewhere, too: of 64 columns, and of 128 without gates, in tests/test_mosaic_kit.py;
# where every query sees every key, below; with all options in tests/covering.py.
OTHERS = [
    (1, 16384, 32, 32, "bthd", {"causal": True}, 5),
    (1, 16384, 32, 32, "bthd", {"causal": True, "D": 64}, 5),
    (1, 16384, 8, 8, "bhtd", {"causal": True, "D": 64, "decay": True} | PLAIN, 7),
    (1, 16384, 32, 32, "bthd", {"S": 1000}, 4),
    (1, 16384, 8, 8, "bhtd", {"causal": True, "D": 80, "return_state": True}, 5),
    (2, 1000, 8, 2, "bhtd", {"S": 712, "return_state": True} | PLAIN, 4),
    (1, 4096, 8, 8, "bthd", {"causal": True, "decay": "channel", "D": 64}, 5),
]


@pytest.mark.parametrize(
    "B, T, H, G, layout, options, count",
    [
        *(OTHERS if os.environ.get("ATO_ALL_ROWS") == "1" else ()),
        (16, 1000, 16, 16, "bhtd", {"causal": True}, 3),
        (1, 1024, 8, 8, "bthd", {"causal": True, "return_state": True} | PLAIN, 5),
        (1, 1000, 8, 2, "bthd", {"causal": True, "decay": True}, 7),
        (1, 16384, 8, 8, "bthd", {"causal": True, "decay": True, "return_state": True} | PLAIN, 7),
        (2, 1000, 8, 2, "bhtd", {"S": 712, "D": 96, "return_state": True} | PLAIN, 4),
        (1, 16384, 8, 8, "bthd", {"causal": True, "D": 112, "decay": True}, 7),
        (2, 1000, 8, 2, "bthd", {"S": 712, "D": 192, "return_state": True}, 5),
        (1, 4096, 8, 8, "bhtd", {"D": 256}, 5),
        (1, 4096, 8, 2, "bthd", {"causal": True, "D": 256}, 7),
        (1, 16384, 8, 8, "bhtd", {"causal": True, "D": 256}, 7),
        (1, 1024, 8, 8, "bthd", {"causal": True, "D": 192, "return_state": True} | PLAIN, 6),
        (1, 4096, 8, 8, "bhtd", {"causal": True, "decay": "channel"}, 5),
        (1, 4096, 8, 2, "bhtd", {"causal": True, "decay": "channel", "return_state": True}, 2),
        (2, 1000, 2, 2, "bhtd", {"causal": True, "decay": "channel", "D": 64} | PLAIN, 5),
    ],
)
def test_lowers(
    B: int, T: int, H: int, G: int, layout: str, options: dict[str, Any], count: int
) -> None:
    """Layouts, barriers and products are checked on the way. Causal, one piece needs no sums."""
    options = dict(options)
    S, D = options.pop("S", T), options.pop("D", 128)
    with jax.enable_x64(layout == "bhtd"):
        arrays = [
            jax.ShapeDtypeStruct(
                (B, length, heads, D) if layout == "bthd" else (B, heads, length, D),
                jnp.bfloat16,
            )
            for length, heads in ((T, H), (S, G), (S, G))
        ]
        decay = options.pop("decay", None)
        of_gates = arrays[1].shape if decay == "channel" else arrays[1].shape[:3]
        like = jnp.zeros(of_gates, jnp.float32)
        gates = [like] if decay else []
        options = options | ({"decay": gates[0]} if gates else {})
        found: list[Any] = []

        def prepared(*qkv: jax.Array) -> None:
            found.append(api.prepare(*qkv, layout=layout, **options).spec)

        jax.eval_shape(prepared, *arrays)
        (spec,) = found
        config = mosaic_gpu.default_config(spec, channel.GPU)
        call = choosing.Call(api.OP, spec, "mosaic_gpu", channel.GPU, False)
        backward = choosing.choose_if_any(call, "backward")

        def both(*arrays: Any) -> Any:
            inputs = Inputs(*arrays)
            kept = mosaic_gpu.forward_for_own_backward(spec, config, inputs)
            if backward is None:
                return kept
            residuals = Residuals(inputs, kept)
            return dispatch.backward_by(api.OP, backward, spec, residuals, kept.plain())

        arrays += gates
        assert kernels_of(both, *arrays) == count


def test_transforms_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on a mesh, of a batch of calls, too; a decay for each head in a batch of calls, and
    of none."""
    monkeypatch.setattr(choosing.device, "of_call", lambda arrays: channel.GPU)

    def gradients(*qkv: jax.Array, causal: bool) -> Any:
        def total(*qkv: jax.Array) -> jax.Array:
            return ato_jax.linear_attention(*qkv, causal=causal).astype(jnp.float32).sum()

        return jax.grad(total, argnums=(0, 1, 2))(*qkv)

    arrays = [jax.ShapeDtypeStruct((4, 2048, 64, 128), jnp.bfloat16)] * 3
    axes = jax.sharding.PartitionSpec("data", None, "heads")
    mesh = mesh_of("data", "heads")
    wide = [jax.ShapeDtypeStruct((4, 2048, 64, 256), jnp.bfloat16)] * 3
    single = [jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32)] * 3
    causal, full = (functools.partial(gradients, causal=causal) for causal in (True, False))
    for function, qkv, count in (
        (causal, arrays, 5),
        (causal, wide, 5),
        (jax.vmap(full), arrays, 4),
        (jax.vmap(full), single, 5),
    ):
        with jax.sharding.use_abstract_mesh(mesh):
            sharded = jax.shard_map(function, mesh=mesh, in_specs=axes, out_specs=axes)
        assert kernels_of(sharded, *qkv, mesh=mesh) == count

    def decayed(q: jax.Array, decay: jax.Array) -> jax.Array:
        return ato_jax.linear_attention(q, q, q, causal=True, decay=decay)

    decay = jax.ShapeDtypeStruct((64,), jnp.float32)
    batch = jax.ShapeDtypeStruct((3, *arrays[0].shape), jnp.bfloat16)
    assert kernels_of(jax.vmap(decayed, (0, None)), batch, decay) == 1

    def of_decay(q: jax.Array, decay: jax.Array) -> jax.Array:
        return jax.grad(lambda decay: decayed(q, decay).astype(jnp.float32).sum())(decay)

    steps = jax.ShapeDtypeStruct(arrays[0].shape[:3], jnp.float32)
    assert kernels_of(jax.vmap(of_decay, (0, None)), batch, steps) == 5
    with jax.sharding.use_abstract_mesh(mesh):
        sharded = jax.shard_map(of_decay, mesh=mesh, in_specs=(axes, axes), out_specs=axes)
    assert kernels_of(sharded, arrays[0], steps, mesh=mesh) == 7
    channels = jax.ShapeDtypeStruct(batch.shape, jnp.float32)
    assert kernels_of(jax.vmap(of_decay), batch, channels) == 4
    none = jax.ShapeDtypeStruct((0, *arrays[0].shape), jnp.bfloat16)
    assert jax.eval_shape(jax.vmap(decayed, (0, None)), none, decay).shape == none.shape


def test_pieces_fill_the_card() -> None:
    """As many as make one round of blocks; one where there are heads enough."""
    spec = api.prepare(*draw(1, 64, 1, 1)).spec
    config = mosaic_gpu.default_config(spec, channel.GPU)

    def pieces(B: int, T: int, H: int) -> tuple[int, int]:
        """Where causal, and where not."""
        sizes = dataclasses.replace(spec, B=B, T=T, S=T, H=H, G=H)
        both_ways = mosaic_gpu.bidirectional.deal(sizes, config, H, T)
        return mosaic_gpu.causal_pieces.pieces_of(sizes, config), both_ways.pieces

    assert pieces(1, 16384, 32) == (4, 4)
    assert pieces(1, 65536, 16) == (8, 8)
    assert pieces(8, 4096, 16) == (1, 1)
    assert pieces(1, 64, 1) == (1, 1)
    assert pieces(1, 1024, 32)[0] == 2
    assert pieces(1, 131072, 32)[0] == 4  # 41 cost 0.6% less


@pytest.mark.lowering
def test_who_is_asked_for_what() -> None:
    """Hopper alone, and long enough; other calls are Triton's, and the reason says why."""
    ampere = dataclasses.replace(channel.GPU, name="NVIDIA A100", capability=(8, 0))
    q, k, v = draw(1, 64, 2, 1)

    def backend(device: Any, B: int = 1024, followed: bool = False, **options: Any) -> str:
        spec = dataclasses.replace(api.prepare(q, k, v, **options).spec, B=B)
        call = choosing.Call(api.OP, spec, None, device, False, followed)
        return choosing.choose(call, "forward").backend

    assert backend(channel.GPU, causal=True) == backend(channel.GPU, 342) == "mosaic_gpu"
    assert backend(channel.GPU, causal=True, feature_map="silu") == "mosaic_gpu"
    for causal in (True, False):
        assert backend(channel.GPU, causal=causal, kv_lengths=jnp.array([3])) == "mosaic_gpu"
    ids = jnp.zeros((1, 64), jnp.int32)
    assert backend(channel.GPU, causal=True, segment_ids=ids) == "mosaic_gpu"
    assert backend(channel.GPU, segment_ids=ids) == "mosaic_gpu"
    assert backend(channel.GPU, 15, segment_ids=ids) == "triton"
    others = {"q_segment_ids": ids, "kv_segment_ids": ids + 1}
    assert backend(channel.GPU, **others) == "triton"
    assert backend(channel.GPU, feature_map=lambda x: jnp.tanh(x) + 1) == "mosaic_gpu"
    assert backend(ampere) == backend(ampere, causal=True) == "triton"
    assert backend(channel.GPU, 511, causal=True) == backend(channel.GPU, 341) == "triton"
    options = {"causal": True, "decay": -jnp.ones((1, 64, 1, 128))}
    assert backend(channel.GPU, **options) == "mosaic_gpu"
    assert backend(channel.GPU, followed=True, **options) == "mosaic_gpu"
    q, k, v = draw(1, 64, 2, 2, D=64)
    options |= {"decay": -jnp.ones(k.shape)}
    assert backend(channel.GPU, **options) == "mosaic_gpu"
    assert backend(channel.GPU, causal=True) == "mosaic_gpu"
    assert backend(channel.GPU) == backend(channel.GPU, 511, **options) == "triton"
    assert backend(channel.GPU, 1023, causal=True) == "triton"
    q, k, v = draw(1, 64, 2, 1, D=256)
    assert backend(channel.GPU, 512, causal=True) == backend(channel.GPU, 171) == "mosaic_gpu"
    assert backend(channel.GPU, 255, causal=True) == backend(channel.GPU, 170) == "triton"
    q, k, v = draw(1, 64, 2, 1)
    spec = dataclasses.replace(api.prepare(q, q, q, causal=True).spec, T=128, S=128, B=1024)
    for decay, after in (("channel", "triton"), ("step", None)):
        call = choosing.Call(
            api.OP, dataclasses.replace(spec, decay=decay), "mosaic_gpu", channel.GPU, False
        )
        choice = choosing.choose(call, "backward")
        assert choice.backend == "mosaic_gpu"
        assert (choice.fallback.backend if choice.fallback else None) == after
    assert "Hopper" in str(mosaic_gpu.unsupported_device(ampere, False))
    lengths = jnp.array([3])
    both_ways = {"decay": -jnp.ones(1)}
    spec = api.prepare(q, k, v, **both_ways).spec
    assert mosaic_gpu.unsupported(spec, "forward") is None
    assert "gradients of a decay per head" in str(mosaic_gpu.unsupported(spec, "backward"))
    assert backend(channel.GPU, **both_ways) == "mosaic_gpu"
    assert backend(channel.GPU, followed=True, **both_ways) == "triton"
    options = {"causal": True, "kv_lengths": lengths, "q_lengths": lengths + 1}
    spec = api.prepare(q, k, v, **options).spec
    assert "queries and keys that differ" in str(mosaic_gpu.unsupported(spec, "forward"))
    assert backend(channel.GPU, **options) == "triton"
    many = ato_jax.favor(jax.random.key(0), 300, 128)
    spec = api.prepare(q, k, v, feature_map=many).spec
    assert "number of features, 300" in str(mosaic_gpu.unsupported(spec, "forward"))
    for T, D, given, reason in (
        (101, 64, {}, None),
        (101, 64, {"decay": "step"}, None),
        (104, 128, {}, None),
        (101, 96, {"decay": "step"}, None),
        (101, 256, {}, None),
        (101, 120, {"causal": False}, None),
        (104, 132, {"causal": False}, "multiples of 8"),
        (101, 64, {"decay": "channel"}, "multiples of 8"),
        (101, 64, {"return_state": True}, None),
        (200, 192, {"return_state": True}, "needs T to be a multiple of 64 with more than 128"),
        (63, 64, {}, "needs T and S of at least 64, got 63"),
    ):
        spec = api.prepare(*draw(1, T, 2, 2, D=D), causal=True).spec
        for phase in ("forward", "backward"):
            called = dataclasses.replace(spec, **given)
            found = support.unsupported_as_given(called, phase)
            assert found is None if reason is None else reason in str(found), (T, D, given, found)
    for options in ({}, {"decay": jnp.full(2, -0.1)}):
        spec = api.prepare(*draw(1, 101, 4, 2), causal=True, **options).spec
        for phase in ("forward", "backward"):
            assert mosaic_gpu.unsupported(spec, phase) is None
    for H, G in ((2, 1), (3, 3)):
        qkv = draw(1, 64, H, G, D=64)
        spec = api.prepare(*qkv, causal=True, decay=-jnp.ones(qkv[1].shape)).spec
        assert "H = G, and even" in str(support.unsupported_as_given(spec, "forward"))
