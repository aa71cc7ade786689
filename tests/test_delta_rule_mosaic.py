"""The delta rule by Mosaic GPU: interpreted beside the float64 reference, compiled for a Hopper
card without one, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.delta_rule import mosaic_gpu
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec
from tests import aot_delta_rule, numerics
from tests.aot_mosaic import requires_plugin
from tests.interpreted import newest, no_races  # noqa: F401

H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])


def draw(
    T: int, D: int, V: int, H: int = 1, G: int = 1, layout: str = "bthd", alike: bool = False
) -> tuple[list[jax.Array], dict[str, Any]]:
    """[q, k, v] with keys of length 1, beta between 0 and 2, decays from 0 down to -50 side by
    side, and an initial state. `alike`: all keys the same, whose triangle is the furthest from the
    identity."""
    generator = np.random.default_rng(0)
    q, k = generator.normal(size=(2, 1, T, G, D))
    k = np.broadcast_to(k[:, :1], k.shape) if alike else k
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v = generator.normal(size=(1, T, H, V))
    beta = generator.uniform(0, 2, size=(1, T, H))
    decay = generator.choice([0, -1e-3, -1, -50], p=[0.5, 0.3, 0.1, 0.1], size=(1, T, H))
    rows = [np.swapaxes(one, 1, 2) if layout == "bhtd" else one for one in (q, k, v, beta, decay)]
    *qkv, beta, decay = rows
    state = generator.normal(size=(1, H, D, V))
    numbers = {"beta": beta, "decay": decay, "initial_state": state}
    options = {name: jnp.asarray(one, jnp.float32) for name, one in numbers.items()}
    return [jnp.asarray(one, jnp.bfloat16) for one in qkv], {"layout": layout, **options}


def compare(arrays: list[jax.Array], config: dict[str, int], **options: Any) -> None:
    wanted = numerics.oracle("gated_delta_rule", *arrays, return_state=True, **options)
    spec = wanted.request.spec
    assert mosaic_gpu.unsupported(spec, "forward") is None
    config_of = dataclasses.replace(mosaic_gpu.default_config(spec, H200), **config)
    with ato_jax.interpret():
        outputs = jax.jit(functools.partial(mosaic_gpu.forward, spec, config_of))(
            wanted.request.inputs
        )
    found = numerics.users_outputs("gated_delta_rule", wanted.request, outputs)
    exact = {name: wanted.exact[name] for name in ("out", "state")}
    numerics.compare(found, dataclasses.replace(wanted, exact=exact))


@newest
@pytest.mark.parametrize(
    "sizes, config, options",
    [
        # Rows that are no multiple of 8, two blocks of keys' columns, heads that share keys.
        (dict(T=203, D=128, V=64, H=2), {}, dict(normalize_qk=True)),
        # Two warpgroups with a part of v each; a block solves several chunks.
        (dict(T=200, D=64, V=128, layout="bhtd"), dict(slices=2, solve_blocks=1), {}),
        (dict(T=75, D=64, V=64, alike=True), {}, dict(decay=None, scale=0.3)),
    ],
)
def test_numbers(sizes: Any, config: Any, options: Any) -> None:
    arrays, more = draw(**sizes)
    compare(arrays, config, **more | options)


SPEC = DeltaRuleSpec(
    B=2, T=300, G=1, H=4, D=128, V=128, dtype="bfloat16", scale=1.0, decay="step"
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "takes bfloat16 alone, got float32"),
        ({"D": 96}, "needs D to be 64 or 128, got 96"),
        ({"D": 192}, "needs D to be 64 or 128, got 192"),
        ({"V": 96}, "needs V to be a multiple of 64, got 96"),
        ({"decay": "channel"}, "a decay per channel"),
        ({"segments": True}, "segments"),
        ({"lengths": True}, "lengths"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    assert mosaic_gpu.unsupported(SPEC, "forward") is None
    assert "gradients" in str(mosaic_gpu.unsupported(SPEC, "backward"))
    assert reason in str(mosaic_gpu.unsupported(dataclasses.replace(SPEC, **changes), "forward"))


def test_slices_fill_the_card() -> None:
    """One slice of v's columns a block, until blocks would have to wait."""
    assert mosaic_gpu.default_config(SPEC, H200).slices == 1
    many = dataclasses.replace(SPEC, H=64)
    assert mosaic_gpu.default_config(many, H200).slices == 2
    assert mosaic_gpu.default_config(dataclasses.replace(many, V=192), H200).slices == 1


def test_it_runs_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "of_call", lambda _: H200)
    arrays, options = draw(T=64, D=64, V=64)
    for implementation, wanted in ((None, "xla"), ("mosaic_gpu", "mosaic_gpu")):
        found = ato_jax.explain(
            "gated_delta_rule", *arrays, implementation=implementation, **options
        )
        assert found.forward is not None and found.forward.backend == wanted
    assert "gradients" in str(found.reasons["mosaic_gpu"]["backward"])


@requires_plugin
def test_compiled_for_a_card() -> None:
    """Two warpgroups of the walk, tails that are copied untiled; the walk spills nothing."""
    call = aot_delta_rule.Call(T=4091, D=128, H=32, decay=True, states=True)
    kernels = {one.name: one for one in aot_delta_rule.compile_call(call)}
    assert set(kernels) == {"gated_delta_rule_solve", "gated_delta_rule_walk"}
    assert not any(one.serialized for one in kernels.values())
    assert kernels["gated_delta_rule_walk"].spill_stores == 0
    assert kernels["gated_delta_rule_solve"].spill_stores <= 128
