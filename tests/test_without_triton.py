"""A JAX without Pallas's lowering to Triton, and one that warns of its end."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device, launch
from ato_jax.device import Device
from tests import aot

ROOT = Path(__file__).parents[1]
REASON = "needs Pallas's lowering to Triton, and JAX"
HOPPER = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448)
AMPERE = Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912)


def draw(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(T: int = 64, D: int = 16, dtype: str = "float32") -> list[jax.Array]:
    return [draw(1, T, 2, D, seed=seed, dtype=dtype) for seed in range(3)]


def cache() -> tuple[Any, ...]:
    q, k, v = draw(1, 1, 2, 16), draw(4, 16, 2, 16, seed=1), draw(4, 16, 2, 16, seed=2)
    return q, k, v, np.arange(4)[None], np.array([50])


def step_arguments() -> tuple[Any, ...]:
    q, k, v = (draw(1, 2, 16, seed=seed) for seed in range(3))
    return q, k, v, ato_jax.LinearState(jnp.zeros((1, 2, 16, 16)), jnp.ones((1, 2, 16)))


def delta_step_arguments() -> tuple[Any, ...]:
    return *step_arguments()[:3], jnp.full((1, 2), 0.5), jnp.ones((1, 2, 16, 16))


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it cannot be imported, in a process that has not warned yet."""
    monkeypatch.setattr(launch, "no_triton", f"{REASON} 9.9 has no {launch.LOWERING}")
    monkeypatch.setattr(launch, "_not_yet_warned", threading.Lock())
    jax.clear_caches()
    yield
    jax.clear_caches()


def on(monkeypatch: pytest.MonkeyPatch, here: Device) -> None:
    """Calls are made for that card: what XLA runs of them, runs here."""
    monkeypatch.setattr(device, "of_call", lambda _arrays: here)


PROGRAM = """
import sys, warnings
from tests import without_triton
without_triton.hide()
warnings.simplefilter("error")
import jax, numpy as np
import ato_jax, ato_jax.nn
from tests import test_without_triton as cases
q, k, v = cases.qkv()
for name in ("attention", "linear_attention"):
    op = getattr(ato_jax, name)
    out, pull = jax.vjp(lambda *qkv: op(*qkv, causal=True), q, k, v)
    assert all(bool(np.isfinite(array).all()) for array in (out, *pull(out)))
    told = ato_jax.explain(name, q, k, v, causal=True)
    for backend, reasons in told.reasons.items():
        if backend.startswith("triton"):
            assert all(cases.REASON in reason for reason in reasons.values()), reasons
    assert cases.REASON in str(told) and told.implementation == "xla"
    for interpreted in (False, True):
        with ato_jax.interpret(interpreted):
            try:
                op(q, k, v, implementation="triton")
            except ato_jax.UnsupportedError as error:
                assert cases.REASON in str(error), error
            else:
                raise AssertionError(name)
_, lse = ato_jax.attention(q, k, v, causal=True, return_lse=True)
ato_jax.total_attention(q, k, lse, causal=True)
ato_jax.linear_attention_step(*cases.step_arguments())
ato_jax.gated_delta_rule_step(*cases.delta_step_arguments())
ato_jax.decode_attention(*cases.cache())
try:
    ato_jax.decode_attention(*cases.cache(), implementation="triton")
except ato_jax.UnsupportedError as error:
    assert cases.REASON in str(error), error
else:
    raise AssertionError("decode_attention")
assert not [name for name in sys.modules if name.startswith(without_triton.HIDDEN)]
"""


def test_everything_on_a_cpu_works_where_it_cannot_be_imported() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]


@pytest.mark.parametrize("call", ["attention", "linear_attention", "decode", "step", "delta step"])
@pytest.mark.parametrize("here", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
@pytest.mark.usefixtures("hidden")
def test_one_warning_says_what_a_gpu_loses(
    monkeypatch: pytest.MonkeyPatch, call: str, here: Device
) -> None:
    calls: dict[str, Any] = {
        "attention": lambda: ato_jax.attention(*qkv(), causal=True),
        "linear_attention": lambda: ato_jax.linear_attention(*qkv(), causal=True),
        "decode": lambda: ato_jax.decode_attention(*cache()),
        "step": lambda: ato_jax.linear_attention_step(*step_arguments())[0],
        "delta step": lambda: ato_jax.gated_delta_rule_step(*delta_step_arguments())[0],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = calls[call]()  # on a CPU nothing is lost
        assert launch.no_triton in str(ato_jax.explain("attention", *qkv()))
    if call == "decode":  # by whose table Triton comes first
        here = Device("gpu", "NVIDIA H200", (9, 0), 132, 232_448)
        monkeypatch.setitem(calls, call, lambda: bfloat16_decode())
        wanted = bfloat16_decode()
    on(monkeypatch, here)
    with pytest.warns(UserWarning, match="by XLA instead, slower") as caught:
        found = calls[call]()
    assert len(caught) == 1 and launch.no_triton in str(caught[0].message)
    np.testing.assert_array_equal(found, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in calls.values():
            again()


def bfloat16_decode() -> jax.Array:
    q, k, v, *rest = cache()
    return ato_jax.decode_attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), *rest)


@pytest.mark.usefixtures("hidden")
def test_no_warning_where_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a backend's name, and of what Triton's kernels would not run either."""
    on(monkeypatch, HOPPER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ato_jax.attention(*qkv(), implementation="xla")
        ato_jax.linear_attention(*qkv(), implementation="xla")
        ato_jax.linear_attention(*qkv(D=320), causal=True)


@pytest.mark.usefixtures("hidden")
def test_choices_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mosaic GPU goes on, and else XLA; Triton by name is refused with the reason."""
    on(monkeypatch, HOPPER)
    large = [jax.ShapeDtypeStruct((1, 16384, 32, 128), jnp.bfloat16)] * 3
    told = ato_jax.explain("linear_attention", *large, causal=True)
    assert told.forward.backend == told.backward.backend == "mosaic_gpu"
    assert told.reasons["triton"] == dict.fromkeys(("forward", "backward"), launch.no_triton)
    decay = jax.ShapeDtypeStruct((1, 16384, 32, 128), jnp.float32)
    told = ato_jax.explain("linear_attention", *large, causal=True, decay=decay)
    assert told.backward.backend == "mosaic_gpu"
    assert told.backward.fallback.backend == "xla.products"
    wide = [jax.ShapeDtypeStruct((1, 128, 2, 1024), jnp.bfloat16)] * 3
    assert ato_jax.explain("attention", *wide).implementation == "xla"
    for name in ("triton", "triton.wide"):
        with pytest.raises(ato_jax.UnsupportedError, match=REASON):
            ato_jax.attention(*qkv(), implementation=name)


@pytest.mark.parametrize("lacking", ["the module", "dot"])
def test_what_counts_as_missing(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """No such module, or one that lacks a name; the stand-in says why when it is used."""
    if lacking == "the module":
        monkeypatch.setitem(sys.modules, launch.LOWERING, None)
    else:
        names = dict.fromkeys(launch.NAMES)
        del names[lacking]
        monkeypatch.setitem(sys.modules, launch.LOWERING, type("Module", (), names))
    stand_in, reason = launch._import_triton()
    assert reason is not None and reason.startswith(REASON) and jax.__version__ in reason
    assert reason.endswith(launch.LOWERING if lacking == "the module" else ".dot")
    with pytest.raises(NotImplementedError, match="needs Pallas's lowering"):
        stand_in.load(None)


def lower(function: Any, *arrays: Any) -> int:
    """For a Hopper card, with all warnings errors; the count of Triton kernels."""
    kind = jax.sharding.AbstractDevice(aot.DEVICE_KIND[90], num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind, axis_types=())
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
    return aot.targets_of_calls(lowered).count(aot.TRITON_CALL)


def gradients(function: Any) -> Any:
    def both(*arrays: Any) -> Any:
        out, pull = jax.vjp(function, *arrays)
        return out, pull(out)

    return both


@pytest.mark.lowering
@pytest.mark.newest
@pytest.mark.parametrize(
    "call", ["attention", "linear_attention", "mosaic_gpu", "decode", "step", "delta step"]
)
def test_lowering_for_a_gpu_warns_of_nothing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """JAX warns at each lowering to Triton that this will go; users here cannot do anything."""
    on(monkeypatch, HOPPER)
    jax.clear_caches()
    if call == "decode":
        arguments = cache()
        count = lower(lambda *x: ato_jax.decode_attention(*x, implementation="triton"), *arguments)
    elif call == "step":
        count = lower(ato_jax.linear_attention_step, *step_arguments())
    elif call == "delta step":
        count = lower(ato_jax.gated_delta_rule_step, *delta_step_arguments())
    else:
        op = getattr(ato_jax, "attention" if call == "attention" else "linear_attention")
        name = "mosaic_gpu" if call == "mosaic_gpu" else "triton"
        sizes: dict[str, Any] = dict(T=1024, D=128, dtype="bfloat16") if name != "triton" else {}
        decay = {} if call != "mosaic_gpu" else {"decay": jnp.array([-0.1, -0.2])}
        function = functools.partial(op, causal=True, implementation=name, **decay)
        count = lower(function if decay else gradients(function), *qkv(**sizes))
    assert count > 0


@pytest.mark.lowering
@pytest.mark.newest
def test_kernels_that_are_not_ours_still_warn() -> None:
    """The warning of JAX, where it has one, is kept from our own kernels alone."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...]

    x = jnp.zeros(128)
    call = {"out_shape": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    assert lower(launch.pallas_call(kernel, **call), x) == 1
    if launch.QuietCompilerParams is not None:
        theirs = launch.pl.pallas_call(
            kernel, compiler_params=launch.triton.CompilerParams(), **call
        )
        with pytest.raises(DeprecationWarning, match="Pallas Triton backend"):
            lower(theirs, x)
