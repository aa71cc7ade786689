"""The kernel of a step of the delta rule: interpreted on the CPU, compiled for GPUs, on a card.

The float64 reference is that of whole sequences: a loop of steps equals it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.delta_rule import step
from ato_jax.ops.delta_rule.step_spec import StepInputs, StepSpec
from ato_jax.ops.delta_rule.triton import decode
from tests import aot, numerics
from tests.test_delta_rule import draw

GPUS = {
    80: device.Device("gpu", "NVIDIA A100", (8, 0), 108, device.SHARED_MEMORY[8, 0]),
    90: device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0]),
}
KINDS = (None, "step", "channel")
DTYPES = ("float32", "bfloat16", "float16")
STEPS = 3


@pytest.fixture
def on_a_gpu() -> Iterator[None]:
    """Steps run by the kernel, interpreted."""
    with pytest.MonkeyPatch.context() as patch, ato_jax.interpret():
        patch.setattr(device, "of_call", lambda arrays: GPUS[90])
        yield


def by_steps(
    arrays: Any, options: dict[str, Any], first: int = 0, **shared: Any
) -> tuple[jax.Array, jax.Array]:
    """(out, state) of steps from `first` on. Each takes the state of the one before."""
    state, outs = options["initial_state"] + 0, []
    run = jax.jit(
        functools.partial(ato_jax.gated_delta_rule_step, **shared), donate_argnames="state"
    )
    for t in range(first, arrays[0].shape[1]):
        token = [array[:, t] for array in (*arrays, options["beta"])]
        decay = {"decay": options["decay"][:, t]} if "decay" in options else {}
        before = state
        out, state = run(*token, state=before, **decay)
        assert before.is_deleted()
        outs.append(out)
    return jnp.stack(outs, axis=1), state


def check(
    arrays: Any, options: dict[str, Any], run: Callable[..., Any] = by_steps, **shared: Any
) -> tuple[jax.Array, jax.Array]:
    """Steps beside the float64 reference of the whole; what they returned."""
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = numerics.oracle("gated_delta_rule", *arrays, **options, **shared)
    out, state = run(arrays, options, **shared)
    dtype = str(arrays[0].dtype)
    assert str(out.dtype) == dtype and state.dtype == jnp.float32
    numerics.check("out", out, wanted.exact["out"], dtype=dtype)
    # All sums are in float32, whatever the inputs are.
    numerics.check("state", state, wanted.exact["state"], dtype="float32")
    return out, state


def interpreted(arrays: Any, options: dict[str, Any], **shared: Any) -> tuple[jax.Array, jax.Array]:
    with pytest.MonkeyPatch.context() as patch, ato_jax.interpret():
        patch.setattr(device, "of_call", lambda arrays: GPUS[90])
        return by_steps(arrays, options, **shared)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize_qk", [False, True])
def test_steps(dtype: str, kind: str | None, normalize_qk: bool) -> None:
    arrays, options = draw(kind, T=STEPS, G=2, H=4, D=32, V=32, dtype=dtype)
    first = check(arrays, options, interpreted, normalize_qk=normalize_qk, scale=-0.3)
    second = interpreted(arrays, options, normalize_qk=normalize_qk, scale=-0.3)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    ("D", "V"), [(1, 1), (1, 24), (20, 33), (64, 80), (100, 100), (192, 96), (256, 40), (512, 20)]
)
def test_sizes(D: int, V: int) -> None:
    """Tails of rows and columns, and several programs for one state."""
    arrays, options = draw("channel", B=1, T=2, G=1, H=3, D=D, V=V)
    check(arrays, options, interpreted, normalize_qk=D > 1)


@pytest.mark.parametrize("columns", [8, 16, 64])
def test_any_columns_and_warps(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "default_config", lambda *sizes: decode.Config(columns, 1))
    arrays, options = draw("step", T=2, D=24, V=40)
    check(arrays, options, interpreted)


@pytest.mark.parametrize("kind", ["step", "channel"])
def test_strong_decays_and_every_beta(kind: str) -> None:
    """A decay of -inf leaves nothing of the state. Betas of 0 write nothing."""
    arrays, options = draw(kind, T=5, D=16, V=16)
    each = np.array([-50.0, -np.inf, 0.0, -1e9, -0.1], np.float32)
    options["decay"] = jnp.broadcast_to(
        each.reshape(1, 5, *(1,) * (options["decay"].ndim - 2)), options["decay"].shape
    )
    options["beta"] = jnp.broadcast_to(jnp.array([0.0, 1, 2, 0, 1])[:, None], (2, 5, 4))
    check(arrays, options, interpreted, normalize_qk=True)


def test_rows_of_zeros_and_states_of_zeros() -> None:
    arrays, options = draw("step", T=2, D=16, V=16)
    options["initial_state"] = jnp.zeros_like(options["initial_state"])
    arrays[:2] = [array.at[:, 0].set(0) for array in arrays[:2]]
    out, _ = check(arrays, options, interpreted, normalize_qk=True)
    assert not out[:, 0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_a_prompt_equal_the_whole(kind: str | None) -> None:
    T, n = 9, 6
    arrays, options = draw(kind, T=T, D=16, V=24)
    wanted = numerics.oracle("gated_delta_rule", *arrays, **options)
    cut = {name: value[:, :n] for name, value in options.items() if name in ("beta", "decay")}
    prompt, state = ato_jax.gated_delta_rule(*(array[:, :n] for array in arrays), **(options | cut))
    out, state = interpreted(arrays, options | {"initial_state": state}, first=n)
    whole = jnp.concatenate([prompt, out], axis=1)
    numerics.check("out", whole, wanted.exact["out"], dtype="float32")
    numerics.check("state", state, wanted.exact["state"], dtype="float32")


def token_of(kind: str | None, **sizes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one step: q, k, v, beta, state; and a decay."""
    arrays, options = draw(kind, T=1, **sizes)
    named = {"decay": options["decay"][:, 0]} if kind else {}
    token = tuple(array[:, 0] for array in (*arrays, options["beta"]))
    return (*token, options["initial_state"]), named


@pytest.mark.usefixtures("on_a_gpu")
def test_without_a_batch_axis() -> None:
    token, decay = token_of("channel", D=16, V=16)
    wanted = ato_jax.gated_delta_rule_step(*token, **decay)
    of_one = jax.tree.map(lambda array: array[0], (token, decay))
    found = ato_jax.gated_delta_rule_step(*of_one[0], **of_one[1])
    jax.tree.map(lambda one, all: np.testing.assert_array_equal(one, all[0]), found, wanted)


@pytest.mark.usefixtures("on_a_gpu")
def test_an_empty_batch() -> None:
    token, decay = token_of("step", B=0)
    out, state = ato_jax.gated_delta_rule_step(*token, **decay)
    assert out.shape == token[2].shape and state.shape == token[4].shape


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_mapped_steps(kind: str | None) -> None:
    """Under `jax.vmap`, of all arguments, and with the tokens alone mapped."""
    token, decay = token_of(kind, B=3, D=16, V=16)
    run = functools.partial(ato_jax.gated_delta_rule_step, normalize_qk=True)
    wanted = run(*token, **decay)
    found = jax.vmap(run)(*token, **decay)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), found, wanted)
    one_state = token[4][0]
    found = jax.vmap(lambda q, k, v, beta: run(q, k, v, beta, one_state))(*token[:4])
    wanted = run(*token[:4], jnp.broadcast_to(one_state, token[4].shape))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), found, wanted)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_the_plain_ones(kind: str | None) -> None:
    token, decay = token_of(kind, B=1, D=8, V=8)
    every = token + tuple(decay.values())

    def loss(*every: Any) -> Any:
        named = dict(zip(decay, every[5:], strict=True))
        out, state = ato_jax.gated_delta_rule_step(*every[:5], **named, normalize_qk=True)
        return jnp.sum(out**2) + jnp.sum(state**3)

    numbers = tuple(range(len(every)))
    ones = jax.tree.map(jnp.ones_like, every)
    found = jax.grad(loss, numbers)(*every)
    _, slope = jax.jvp(loss, every, ones)
    _, curve = jax.jvp(jax.grad(loss, 1), every, ones)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "of_call", lambda arrays: device.Device("cpu"))
        wanted = jax.grad(loss, numbers)(*every)
        _, wanted_curve = jax.jvp(jax.grad(loss, 1), every, ones)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, found, wanted)
    close(slope, sum(jnp.sum(leaf) for leaf in wanted))
    close(curve, wanted_curve)


def shapes(
    B: int, H: int, G: int, D: int, V: int, dtype: str = "bfloat16", kind: str | None = None
) -> StepInputs:
    def shape(*sizes: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    key, value = shape(B, G, D, dtype=dtype), shape(B, H, V, dtype=dtype)
    decay = None if kind is None else shape(B, H, D if kind == "channel" else 1)
    return StepInputs(key, key, value, shape(B, H), decay, shape(B, H, D, V))


def test_what_is_left_to_plain_jax() -> None:
    inputs = shapes(1, 1, 1, 16, 16)
    old = device.Device("gpu", "NVIDIA V100", (7, 0), 80)
    assert decode.out_of_range(inputs, GPUS[80]) is None
    assert "D=513" in str(decode.out_of_range(shapes(1, 1, 1, 513, 16), GPUS[80]))
    assert "empty" in str(decode.out_of_range(shapes(0, 1, 1, 16, 16), GPUS[80]))
    assert "8.0" in str(decode.out_of_range(inputs, old))
    assert "NVIDIA" in str(decode.out_of_range(inputs, device.Device("gpu", "AMD")))


def test_tiles() -> None:
    """64 values in each thread; where there are few states, narrower columns."""
    config = functools.partial(decode.default_config, here=GPUS[90])
    assert config(64 * 32, 128, 128) == decode.Config(64, 4)
    assert config(64 * 32, 64, 64) == decode.Config(64, 2)
    assert config(64 * 32, 192, 96) == config(64 * 32, 256, 256) == decode.Config(32, 4)
    assert config(64 * 32, 512, 128) == decode.Config(16, 4)
    assert config(32, 128, 128) == decode.Config(16, 1)
    assert config(1, 1, 1) == decode.Config(1, 1)


@pytest.mark.lowering
def test_explain() -> None:
    token, decay = token_of("step")
    assert ato_jax.explain("gated_delta_rule_step", *token, **decay).implementation == "xla"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "of_call", lambda arrays: GPUS[90])
        found = ato_jax.explain(ato_jax.gated_delta_rule_step, *token, **decay)
        refused = ato_jax.explain(
            "gated_delta_rule_step",
            *shapes(1, 1, 1, 600, 8)._replace(decay=None)[:4],
            shapes(1, 1, 1, 600, 8).state,
        )
    assert found.implementation == "triton" and found.backward.backend == "xla"
    assert refused.implementation == "xla"
    assert "D=600" in str(refused.reasons["triton"]["forward"])


SIZES = [
    (64, 32, 32, 128, 128),
    (64, 32, 8, 128, 128),
    (1, 32, 32, 128, 128),
    (64, 32, 32, 64, 64),
    (64, 16, 16, 192, 96),
    (64, 16, 16, 256, 256),
    (64, 16, 16, 100, 100),
    (8, 16, 16, 512, 128),
]


@aot.requires_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiles_without_spills(sizes: tuple[int, ...], kind: str | None, capability: int) -> None:
    run = functools.partial(decode.step, StepSpec(0.1, True), GPUS[capability])
    (kernel,) = aot.compile_function(run, shapes(*sizes, kind=kind), capabilities=(capability,))
    assert kernel.fits and not kernel.spills, kernel
    # 16 warps at a time on a multiprocessor, each with up to 8 KiB of its state in flight.
    assert 16 * 32 * kernel.registers <= 65536, kernel


@aot.requires_triton
def test_the_state_is_updated_in_place() -> None:
    """One kernel of the lowered step takes over the donated state."""
    run = functools.partial(step._step, StepSpec(0.1, True), GPUS[90], False, None)
    target = jax.sharding.AbstractDevice(aot.DEVICE_KIND[90], num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=target)):
        traced = jax.jit(run).trace(shapes(64, 32, 32, 128, 128))
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") == 1
    assert lowered.count("output_operand_alias<") == 1


# -- on a card -----------------------------------------------------------------------------------

on_a_card = pytest.mark.gpu
of_the_kernel = pytest.mark.kernels("delta_rule")


@on_a_card
@of_the_kernel
@pytest.mark.parametrize(
    ("D", "V", "kind", "dtype", "normalize_qk"),
    [
        (128, 128, None, "bfloat16", False),
        (128, 128, "step", "bfloat16", True),
        (128, 128, "channel", "bfloat16", True),
        (128, 128, "step", "float32", True),
        (128, 128, "channel", "float16", False),
        (64, 64, "step", "float16", True),
        (96, 192, "channel", "float32", True),
        (192, 96, "step", "bfloat16", True),
        (256, 256, "step", "float32", False),
        (100, 100, "channel", "bfloat16", True),
        (512, 33, None, "float32", True),
        (1, 24, "step", "float32", False),
    ],
)
def test_steps_on_a_card(D: int, V: int, kind: str | None, dtype: str, normalize_qk: bool) -> None:
    """Beside the float64 reference, and the same bits twice."""
    arrays, options = draw(kind, T=4, G=2, H=4, D=D, V=V, dtype=dtype)
    assert explained(arrays, options) == "triton"
    first = check(arrays, options, normalize_qk=normalize_qk)
    second = by_steps(arrays, options, normalize_qk=normalize_qk)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def explained(arrays: Any, options: dict[str, Any]) -> str | None:
    token = [array[:, 0] for array in (*arrays, options["beta"])]
    return ato_jax.explain("gated_delta_rule_step", *token, options["initial_state"]).implementation


@on_a_card
@of_the_kernel
def test_strong_decays_and_every_beta_on_a_card() -> None:
    arrays, options = draw("step", T=5, D=128, V=128)
    each = jnp.array([-50.0, -np.inf, 0.0, -1e9, -0.1], jnp.float32)
    options["decay"] = jnp.broadcast_to(each[:, None], options["decay"].shape)
    options["beta"] = jnp.broadcast_to(jnp.array([0.0, 1, 2, 0, 1])[:, None], (2, 5, 4))
    check(arrays, options, normalize_qk=True)


@on_a_card
@of_the_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_many_states_on_a_card(kind: str | None) -> None:
    """All programs of a full card, in place, beside the plain form: no block of columns reads what
    another one wrote."""
    token, decay = token_of(kind, B=64, G=8, H=32, D=128, V=128, dtype="bfloat16")
    inputs = step.prepare(*token, **decay, normalize_qk=True)
    wanted = jax.jit(functools.partial(step._plain, inputs.spec))(inputs.inputs)
    run = functools.partial(ato_jax.gated_delta_rule_step, normalize_qk=True)
    out, state = jax.jit(run, donate_argnums=4)(*token, **decay)
    numerics.check("out", out, wanted[0], dtype="bfloat16")
    numerics.check("state", state, wanted[1], dtype="float32")
