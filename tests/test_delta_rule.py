"""The delta rule against a loop, its reference and itself: every option, with all gradients."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import autodiff
from ato_jax.device import Device
from ato_jax.ops.delta_rule import api, reference, xla
from tests import numerics

B, T, G, H, D, V = 2, 21, 2, 4, 5, 3
HIGHEST = jax.lax.Precision.HIGHEST
KINDS = (None, "step", "channel")


def draw(
    kind: str | None = None,
    *,
    B: int = B,
    T: int = T,
    G: int = G,
    H: int = H,
    D: int = D,
    V: int = V,
    dtype: Any = "float32",
    seed: int = 0,
) -> tuple[list[jax.Array], dict[str, Any]]:
    """[q, k, v] with keys of length 1, and beta between 0 and 2, a decay and an initial state."""
    generator = np.random.default_rng(seed)
    q, k = generator.normal(size=(2, B, T, G, D))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = generator.normal(size=(B, T, H, V))
    beta = generator.uniform(0, 2, size=(B, T, H))
    decay = -np.abs(generator.normal(size=(B, T, H, D)))
    state = generator.normal(size=(B, H, D, V))
    options = {"beta": beta, "initial_state": state, "return_state": True}
    if kind is not None:
        options["decay"] = decay if kind == "channel" else decay[..., 0]
    arrays = [jnp.asarray(array, dtype) for array in (q, k, v)]
    return arrays, {
        name: jnp.asarray(value, jnp.float32) if name != "return_state" else value
        for name, value in options.items()
    }


def ids(T: int = T) -> np.ndarray:
    """An id that returns, and borders within and at the edge of chunks of 8."""
    both = [np.repeat([1, 2, 1], [3, 5, T - 8]), np.repeat([4, 7], [T // 2, T - T // 2])]
    return np.array(both)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"kind": None},
    "normalize": {"kind": None, "normalize_qk": True, "scale": 0.7, "layout": "bhtd"},
    "segments": {"kind": None, "segment_ids": ids(), "lengths": [T - 4, T]},
    "step": {"kind": "step", "normalize_qk": True},
    "step, segments": {"kind": "step", "segment_ids": ids(), "layout": "bhtd"},
    "step, lengths": {"kind": "step", "lengths": [9, 0]},
    "channel": {"kind": "channel", "layout": "bhtd"},
    "channel, segments": {"kind": "channel", "segment_ids": ids(), "lengths": [T, 6]},
    "channel, normalize": {"kind": "channel", "normalize_qk": True, "lengths": [1, 16]},
}
each_case = pytest.mark.parametrize("case", CASES)


def call_of(case: str, **sizes: Any) -> tuple[list[jax.Array], dict[str, Any]]:
    """A case's arrays, in its layout, and its options."""
    options = dict(CASES[case])
    arrays, more = draw(options.pop("kind"), **sizes)
    if options.get("layout") == "bhtd":
        arrays = [jnp.swapaxes(array, 1, 2) for array in arrays]
        for name in ("beta", "decay"):
            if name in more:
                more[name] = jnp.swapaxes(more[name], 1, 2)
    return arrays, more | options


def loop(
    q: Any,
    k: Any,
    v: Any,
    *,
    beta: Any,
    decay: Any = None,
    initial_state: Any = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    segment_ids: Any = None,
    lengths: Any = None,
    layout: str = "bthd",
    return_state: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """The contract, one batch entry, head and step after the other, in float64."""
    turned = [
        np.swapaxes(np.asarray(one, np.float64), 1, 2) if layout == "bhtd" else one
        for one in (q, k, v, beta, np.zeros_like(beta) if decay is None else decay)
    ]
    q, k, v, beta, decay = (np.asarray(one, np.float64) for one in turned)
    B, T, H, V = v.shape
    G, D = q.shape[2:]
    out, states = np.zeros((B, T, H, V)), np.zeros((B, H, D, V))
    for b in range(B):
        for h in range(H):
            S = np.asarray(initial_state[b, h], np.float64)
            for t in range(T if lengths is None else lengths[b]):
                if segment_ids is not None and t and segment_ids[b, t] != segment_ids[b, t - 1]:
                    S = np.zeros((D, V))
                q_t, k_t = q[b, t, h // (H // G)], k[b, t, h // (H // G)]
                if normalize_qk:
                    q_t, k_t = q_t / np.sqrt(q_t @ q_t), k_t / np.sqrt(k_t @ k_t)
                S = np.diag(np.exp(np.broadcast_to(decay[b, t, h], D))) @ S
                S = (np.eye(D) - beta[b, t, h] * np.outer(k_t, k_t)) @ S
                S = S + beta[b, t, h] * np.outer(k_t, v[b, t, h])
                out[b, t, h] = (D**-0.5 if scale is None else scale) * q_t @ S
            states[b, h] = S
    return np.swapaxes(out, 1, 2) if layout == "bhtd" else out, states


@each_case
def test_reference_is_the_loop(case: str) -> None:
    """Outputs, and gradients along a random direction against the loop's central difference."""
    arrays, options = call_of(case, T=T)
    wanted = numerics.oracle("gated_delta_rule", *arrays, **options)
    out, state = loop(*arrays, **options)
    np.testing.assert_allclose(wanted.exact["out"], out, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(wanted.exact["state"], state, rtol=1e-9, atol=1e-11)

    named = dict(zip("qkv", arrays, strict=True)) | options
    floats = [name for name in named if f"d{name}" in wanted.exact] + ["initial_state"]
    generator = np.random.default_rng(5)
    directions = {name: generator.normal(size=named[name].shape) for name in floats}
    cotangents = [np.nan_to_num(np.asarray(one, np.float64)) for one in wanted.cotangents]

    def along(size: float) -> float:
        moved = {
            name: np.asarray(named[name], np.float64) + size * directions[name] for name in floats
        }
        return sum(
            np.vdot(cotangent, one)
            for cotangent, one in zip(cotangents, loop(**(named | moved)), strict=True)
        )

    step = 1e-5
    slope = (along(step) - along(-step)) / (2 * step)
    found = sum(
        np.vdot(wanted.exact["dstate" if name == "initial_state" else f"d{name}"], directions[name])
        for name in floats
    )
    np.testing.assert_allclose(found, slope, rtol=1e-6)


@each_case
def test_xla_is_the_reference_in_float64(case: str) -> None:
    arrays, options = call_of(case)
    request = api.prepare(*arrays, **options)
    cotangents = numerics.draw_cotangents("gated_delta_rule", request)
    with jax.enable_x64(True):

        def wide(tree: Any) -> Any:
            return jax.tree.map(
                lambda leaf: jnp.asarray(np.asarray(leaf, np.float64))
                if jnp.issubdtype(leaf.dtype, jnp.floating)
                else leaf,
                tree,
            )

        def run(forward: Any, config: Any) -> Any:
            @jax.jit
            def both(inputs: Any, cotangents: Any) -> Any:
                outputs, pull = autodiff.vjp(
                    functools.partial(forward, request.spec, config), inputs
                )
                return outputs, pull(cotangents)

            return both(wide(request.inputs), wide(cotangents))

        wanted = run(reference.forward, None)
        found = run(xla.forward, xla.Config(chunk=8, piece=2))
        for one, exact in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, exact, rtol=0, atol=1e-12 * np.abs(exact).max())


def scans_steps(function: Any, *arguments: Any) -> bool:
    """Whether the program of a call of T steps has a scan over all of them."""
    return f"length={T}" in str(jax.make_jaxpr(function)(*arguments))


@each_case
def test_a_cpu_goes_step_by_step_where_no_derivative_is_taken(case: str) -> None:
    """And by chunks where one is, by any one input. Outputs differ by rounding alone."""
    arrays, options = call_of(case)

    def call(q: Any, initial_state: Any) -> Any:
        given = options | {"initial_state": initial_state}
        return ato_jax.gated_delta_rule(q, *arrays[1:], **given, implementation="xla")

    given = arrays[0], options["initial_state"]
    plain = call(*given)
    assert scans_steps(call, *given)
    for index in range(2):

        def of_one(one: Any, index: int = index) -> Any:
            return call(*(one if at == index else other for at, other in enumerate(given)))

        assert not scans_steps(lambda one, of_one=of_one: jax.vjp(of_one, one)[0], given[index])
        assert not scans_steps(
            lambda one, of_one=of_one: jax.jvp(of_one, (one,), (one,)), given[index]
        )
    for one, recorded in zip(plain, jax.vjp(call, *given)[0], strict=True):
        numerics.check("out", one, recorded, dtype="float32")


@pytest.mark.parametrize(
    ("kind", "sizes", "by_steps"),
    [
        (None, {"H": 16, "D": 64, "V": 64}, True),
        (None, {"H": 1, "D": 128, "V": 128}, False),
        ("channel", {"H": 64, "D": 64, "V": 64}, True),
        ("channel", {"H": 4, "D": 128, "V": 128}, True),
        ("channel", {"H": 8, "D": 128, "V": 128}, False),
        ("step", {"H": 12, "D": 64, "V": 64}, True),
        ("step", {"H": 16, "D": 64, "V": 64}, False),
        ("step", {"H": 2, "D": 128, "V": 128}, False),
    ],
)
def test_which_calls_go_step_by_step(kind: str | None, sizes: Any, by_steps: bool) -> None:
    arrays, options = draw(kind, B=1, T=2, G=1, **sizes)
    spec = api.prepare(*arrays, **options).spec
    assert xla.default_config(spec, Device("cpu")) == xla.Config(32, 1, by_steps)
    assert not xla.default_config(spec, Device("gpu")).by_steps


def compare(arrays: Any, options: Any) -> None:
    wanted = numerics.oracle("gated_delta_rule", *arrays, **options)
    result = numerics.run(
        "gated_delta_rule", "xla", *arrays, cotangents=wanted.cotangents, **options
    )
    numerics.compare(result, wanted)


# Each decay in float32 and in one dtype of 16 bits.
@pytest.mark.parametrize(
    "kind, dtype",
    [
        *((kind, "float32") for kind in KINDS),
        (None, "bfloat16"),
        ("channel", "bfloat16"),
        ("step", "float16"),
    ],
)
def test_within_the_budgets(kind: str | None, dtype: str) -> None:
    """Three chunks, and a part of one."""
    arrays, options = draw(kind, T=200, B=1, G=1, H=2, D=32, V=24, dtype=dtype)
    compare(arrays, options | {"normalize_qk": dtype != "float32"})


@pytest.mark.parametrize("kind", ["step", "channel"])
@pytest.mark.parametrize("beta", [2.0, "0, 1 and 2"])
def test_strong_decays_and_keys_all_alike(kind: str, beta: Any) -> None:
    """Decays of 0 and down to -50 side by side, and the triangle furthest from the identity."""
    arrays, options = draw(kind, T=130, B=1, G=1, H=2, D=8, V=8)
    generator = np.random.default_rng(2)
    shape = options["decay"].shape
    strength = generator.choice([0, -1e-3, -1, -50], p=[0.5, 0.3, 0.1, 0.1], size=shape)
    options["decay"] = jnp.asarray(strength, jnp.float32)
    some = generator.choice([0.0, 1.0, 2.0], size=options["beta"].shape)
    options["beta"] = jnp.asarray(some if isinstance(beta, str) else some * 0 + beta, jnp.float32)
    if not isinstance(beta, str):
        arrays[1] = jnp.broadcast_to(arrays[1][:, :1], arrays[1].shape)
    compare(arrays, options)


@pytest.mark.parametrize(("alike", "beta"), [(True, 1.0), (False, 0.0), (False, 2.0)])
def test_nothing_is_forgotten(alike: bool, beta: float) -> None:
    """Without a decay.

    Not with keys all alike and a beta near 2: float32 loses a digit there in any form by chunks,
    whose triangle's inverse has 64 terms of alternating signs in a row.
    """
    arrays, options = draw(T=130, B=1, G=1, H=1, D=32, V=8)
    if alike:
        arrays[1] = jnp.broadcast_to(arrays[1][:, :1], arrays[1].shape)
    compare(arrays, options | {"beta": jnp.full((1, 130, 1), beta)})


def test_a_decay_that_forgets_all() -> None:
    """-inf is a factor of 0, with a derivative of 0."""
    arrays, options = draw("channel")
    decay = options.pop("decay").at[:, 7].set(-jnp.inf)

    def loss(decay: jax.Array) -> jax.Array:
        return ato_jax.gated_delta_rule(*arrays, decay=decay, **options)[0].sum()

    for one in (jax.value_and_grad(loss)(decay), jax.value_and_grad(loss)(decay.clip(-200))):
        assert all(np.isfinite(leaf).all() for leaf in one)
        assert not one[1][:, 7].any()


@pytest.mark.parametrize("kind", KINDS)
def test_split_equals_whole(kind: str | None) -> None:
    """The first n steps and the rest with their state; the gradient of the state between, too."""
    n = 9
    arrays, options = draw(kind)
    named = dict(zip("qkv", arrays, strict=True)) | options

    def whole(named: Any) -> Any:
        return ato_jax.gated_delta_rule(**named, return_state=True)

    def split(named: Any) -> Any:
        state, outs = named.pop("initial_state"), []
        for part in (slice(0, n), slice(n, None)):
            cut = {name: array[:, part] for name, array in named.items()}
            out, state = ato_jax.gated_delta_rule(**cut, initial_state=state, return_state=True)
            outs.append(out)
        return jnp.concatenate(outs, axis=1), state

    named.pop("return_state")
    cotangents = numerics.oracle("gated_delta_rule", *arrays, **options).cotangents
    for function in (whole, split):
        result, pull = jax.vjp(lambda named, function=function: function(dict(named)), named)
        (gradients,) = pull(cotangents)
        found = {"out": result[0], "state": result[1], "dstate": gradients.pop("initial_state")}
        found |= {f"d{name}": array for name, array in gradients.items()}
        numerics.compare(found, numerics.oracle("gated_delta_rule", *arrays, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_the_whole(kind: str | None) -> None:
    arrays, options = draw(kind)
    shared = {"normalize_qk": True, "scale": 0.3}
    wanted = numerics.oracle("gated_delta_rule", *arrays, **options, **shared)
    step = jax.jit(
        functools.partial(ato_jax.gated_delta_rule_step, **shared), donate_argnames="state"
    )
    state, outs = options["initial_state"] + 0, []
    alone = state[0] + 0
    for t in range(T):
        token = [array[:, t] for array in (*arrays, options["beta"])]
        decay = {"decay": options["decay"][:, t]} if kind else {}
        before = state
        out, state = step(*token, state=state, **decay)
        assert before.is_deleted()
        outs.append(out)
        of_one = {name: array[0] for name, array in decay.items()}
        alone_out, alone = step(*(array[0] for array in token), state=alone, **of_one)
        numerics.check("out", alone_out, wanted.exact["out"][0, t], dtype="float32", batched=False)
    numerics.check("out", jnp.stack(outs, 1), wanted.exact["out"], dtype="float32")
    numerics.check("state", state, wanted.exact["state"], dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_leaves_the_dtypes_as_they_are_under_x64(kind: str | None) -> None:
    arrays, options = draw(kind)
    token = [array[:, 0] for array in (*arrays, options["beta"])]
    decay = options["decay"][:, 0] if kind else None
    with jax.enable_x64(True):
        out, state = ato_jax.gated_delta_rule_step(*token, options["initial_state"], decay=decay)
    assert out.dtype == arrays[2].dtype and state.dtype == jnp.float32


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_the_missing_batch(implementation: str) -> None:
    arrays, options = draw("step", B=1)
    options = {name: one for name, one in options.items() if name != "return_state"}
    function = functools.partial(
        ato_jax.gated_delta_rule, return_state=True, implementation=implementation
    )
    wanted = function(*arrays, **options, lengths=[11], segment_ids=ids()[:1])
    of_one = {name: one[0] for name, one in options.items()}
    found = function(*(one[0] for one in arrays), **of_one, lengths=11, segment_ids=ids()[0])
    for one, many in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, many[0])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_padding_reaches_nothing(kind: str | None) -> None:
    """Not as an input and not as a cotangent, which `draw_cotangents` makes."""
    lengths = [13, 0]
    arrays, options = draw(kind)
    options |= {"lengths": lengths, "normalize_qk": True, "segment_ids": ids()}
    wanted = numerics.oracle("gated_delta_rule", *arrays, **options)
    padding = np.arange(T) >= np.array(lengths)[:, None]

    def spoil(array: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(padding, tuple(range(2, array.ndim))), jnp.nan, array)

    spoilt = {name: spoil(options[name]) for name in ("beta", "decay") if name in options}
    result = numerics.run(
        "gated_delta_rule",
        "xla",
        *(spoil(array) for array in arrays),
        cotangents=wanted.cotangents,
        **(options | spoilt),
    )
    numerics.compare(result, wanted)
    assert not np.asarray(result["out"])[padding].any()


def test_a_row_of_zeros_has_no_direction() -> None:
    arrays, options = draw()
    zeros = [array.at[:, 4].set(0) for array in arrays[:2]]

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        out, state = ato_jax.gated_delta_rule(q, k, arrays[2], **options, normalize_qk=True)
        return out.sum() + state.sum()

    for gradient in jax.grad(loss, (0, 1))(*zeros):
        assert np.isfinite(gradient).all() and not gradient[:, 4].any() and gradient[:, 5].any()


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_and_none(kind: str | None) -> None:
    arrays, options = draw(kind, T=1)
    compare(arrays, options)
    arrays, options = draw(kind, T=0)
    out, state = ato_jax.gated_delta_rule(*arrays, **options)
    assert out.shape == (B, 0, H, V)
    np.testing.assert_array_equal(state, options["initial_state"])
    arrays, options = draw(kind, B=0)
    out, state = ato_jax.gated_delta_rule(*arrays, **options)
    assert out.shape == (0, T, H, V) and state.shape == (0, H, D, V)
    token = [array[:, 0] for array in (*arrays, options["beta"])]
    decay = options["decay"][:, 0] if kind else None
    out, state = ato_jax.gated_delta_rule_step(*token, options["initial_state"], decay=decay)
    assert out.shape == (0, H, V) and state.shape == (0, H, D, V)


# -- transformations -----------------------------------------------------------------------------


def exactly(function: Any, arrays: Any) -> Any:
    """What `function` gives with the reference in float64 in place of the public function."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(one, np.float64)) for one in arrays]

        def call(q: Any, k: Any, v: Any, beta: Any, decay: Any) -> jax.Array:
            narrow = [jnp.zeros(one.shape, jnp.float32) for one in (q, k, v, beta, decay)]
            request = api.prepare(*narrow[:4], decay=narrow[4], normalize_qk=True)
            inputs = request.inputs._replace(q=q, k=k, v=v, beta=beta, decay=decay)
            return reference.forward(request.spec, reference.Config(), inputs).out

        return jax.tree.map(np.asarray, function(call, wide))


def xla_call(q: Any, k: Any, v: Any, beta: Any, decay: Any) -> jax.Array:
    return ato_jax.gated_delta_rule(q, k, v, beta, decay=decay, normalize_qk=True)


def hessian_times(call: Any, arrays: Any, backward: bool = True) -> Any:
    """The Hessian times directions, by reverse over reverse mode (None unless `backward`) and by
    forward over reverse mode."""
    generator = np.random.default_rng(4)
    directions = [jnp.asarray(generator.normal(size=one.shape), one.dtype) for one in arrays]
    every = tuple(range(len(arrays)))

    def loss(*arrays: Any) -> jax.Array:
        return jnp.sum(jnp.sin(call(*arrays)))

    def along(*arrays: Any) -> jax.Array:
        return sum(map(jnp.vdot, jax.grad(loss, every)(*arrays), directions))

    forward = jax.jit(lambda *both: jax.jvp(jax.grad(loss, every), *both)[1])
    return jax.jit(jax.grad(along, every))(*arrays) if backward else None, forward(
        arrays, directions
    )


@pytest.mark.parametrize("kind", ["step", "channel"])
def test_second_order(kind: str) -> None:
    arrays, options = draw(kind, T=9, B=1, G=1, H=2)
    arrays += [options["beta"], options["decay"]]
    # Both orders of the derivatives give the same: the reference takes one of them.
    backward, forward = hessian_times(xla_call, arrays)
    wanted = exactly(lambda *given: hessian_times(*given, backward=False)[1], arrays)
    for found in (backward, forward):
        for one, exact in zip(found, wanted, strict=True):
            assert np.linalg.norm(one - exact) <= 2e-5 * np.linalg.norm(exact)


def test_forward_mode_vmap_and_remat() -> None:
    arrays, options = draw("step", T=9)
    arrays += [options["beta"], options["decay"]]

    def pushed(call: Any, arrays: Any) -> Any:
        return jax.jit(lambda arrays: jax.jvp(call, arrays, arrays))(arrays)

    for found, exact in zip(pushed(xla_call, arrays), exactly(pushed, arrays), strict=True):
        numerics.check("out", found, exact, dtype="float32")
    wanted = xla_call(*arrays)
    one_by_one = jax.vmap(lambda *one: xla_call(*one))(*arrays)
    np.testing.assert_allclose(one_by_one, wanted, rtol=1e-5, atol=1e-6)

    def loss(call: Any) -> Any:
        return jax.grad(lambda q: jnp.sum(call(q, *arrays[1:]) ** 2))(arrays[0])

    np.testing.assert_allclose(loss(jax.checkpoint(xla_call)), loss(xla_call), rtol=1e-5, atol=1e-6)


def test_memory_is_linear() -> None:
    """With gradients, too: four times the steps take at most 4.4 times the memory."""

    def needed(T: int) -> int:
        q = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)
        beta = jax.ShapeDtypeStruct((1, T, 1), jnp.float32)

        def loss(q: Any, k: Any, v: Any, beta: Any) -> jax.Array:
            return ato_jax.gated_delta_rule(q, k, v, beta, decay=-beta).sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, q, q, beta).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert needed(4096) <= 4.4 * needed(1024)


# -- the frame -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("forward", "backward"), [("reference", "xla"), ("xla", "reference")])
def test_any_forward_with_any_backward(forward: str, backward: str) -> None:
    arrays, options = draw("step")
    wanted = numerics.oracle("gated_delta_rule", *arrays, **options)
    numerics.compare(numerics.run_backends(forward, backward, wanted), wanted)


def test_explain() -> None:
    arrays, options = draw("step")
    explained = ato_jax.explain(ato_jax.gated_delta_rule, *arrays, **options)
    assert explained.op == "gated_delta_rule" and explained.implementation == "xla"
    assert explained.backward is not None and explained.backward.backend == "xla"
    assert explained.reasons["triton"]["forward"] == "has no kernels for this op"
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in arrays]
    assert ato_jax.explain("gated_delta_rule", *shapes, **options).spec == explained.spec
    hash(explained.spec)


def test_the_spec_is_frozen() -> None:
    spec = api.prepare(*draw()[0], draw()[1]["beta"]).spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.T = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["triton", "cudnn"])
def test_kernels_that_are_not_there(name: str) -> None:
    arrays, options = draw()
    with pytest.raises(ato_jax.UnsupportedError, match=f"{name}: has no kernels for this op"):
        ato_jax.gated_delta_rule(*arrays, **options, implementation=name)


def test_checked() -> None:
    arrays, options = draw("step")
    options.pop("decay")

    @jax.jit
    def call(decay: jax.Array, lengths: jax.Array) -> Any:
        return ato_jax.gated_delta_rule(*arrays, decay=decay, lengths=lengths, **options)

    check = ato_jax.checked(call)
    right, lengths = jnp.full((B, T, H), -0.5), jnp.array([T, 0])
    assert check(right, lengths)[0].get() is None
    found = check(right.at[1, 2, 0].set(0.25), lengths)[0].get()
    assert found is not None and "decay is" in found and "up to 0.25" in found
    found = check(right, jnp.array([T + 1, 0]))[0].get()
    assert found is not None and f"lengths must lie between 0 and T={T}" in found


def array(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
    ("changed", "patterns"),
    [
        ({"q": array(D)}, ["q must be", r"\[B, T, G, D\]", "got shape"]),
        ({"k": array(B, T, G, D + 1)}, ["k must be", r"\[B, T, G, D\]", "D=5", "got shape"]),
        ({"k": array(B, T, H, D)}, ["k must be", "G=2", "got shape"]),
        ({"v": array(B, T + 1, H, V)}, ["v must be", r"\[B, T, H, V\]", "T=21", "got shape"]),
        ({"v": array(B, T, 3, V), "beta": array(B, T, 3)}, ["v's heads H", "q's heads G", "H=3"]),
        ({"layout": "bhtd"}, ["v must be", r"\[B, H, T, V\]"]),
        ({"layout": "bnth"}, ["layout must be one of", "bthd"]),
        ({"v": array(B, T, H, 0)}, ["axis V must be at least 1"]),
        ({"beta": array(B, T, G)}, ["beta must be", r"\[B, T, H\]", "H=4", "got shape"]),
        ({"beta": np.ones((B, T, H))}, ["beta must be", "got float64"]),
        ({"beta": array(B, T, H, dtype=int)}, ["beta must be", "got int32"]),
        ({"beta": None}, ["beta must be an array, got None"]),
        ({"q": np.ones((B, T, G, D))}, ["q must be", "got float64"]),
        ({"q": array(B, T, G, D, dtype=int)}, ["q must be", "got int32"]),
        ({"k": array(B, T, G, D, dtype=jnp.bfloat16)}, ["k must have q's dtype", "bfloat16"]),
        ({"decay": array(B, T, H) * 0.5}, ["decay", "<= 0", "0.5"]),
        ({"decay": array(B, T, H) * jnp.nan}, ["decay", "<= 0", "got NaN"]),
        ({"decay": -array(B, T, G)}, ["decay must be", "H=4", "got shape"]),
        ({"decay": -array(B, T, H, V)}, ["decay must be", "D=5", "got shape"]),
        ({"decay": -array(H)}, [r"decay must be \[B, T, H\] or \[B, T, H, D\]", "got shape"]),
        ({"decay": -np.ones((B, T, H))}, ["decay must be", "float64"]),
        ({"decay": -array(B, T, H, dtype=int)}, ["decay must be", "int32"]),
        ({"initial_state": array(B, H, V, D)}, ["initial_state must be", r"\[B, H, D, V\]"]),
        ({"initial_state": array(B, G, D, V)}, ["initial_state must be", "H=4"]),
        ({"initial_state": np.ones((B, H, D, V))}, ["initial_state must be", "float64"]),
        ({"initial_state": (array(1),)}, ["initial_state must be"]),
        ({"segment_ids": array(B, T)}, ["segment_ids must hold integers"]),
        ({"segment_ids": np.zeros((B, T + 1), int)}, ["segment_ids must be", "T=21"]),
        ({"lengths": [T + 1, 0]}, ["lengths must lie between 0 and T=21", "22"]),
        ({"lengths": [1, 2, 3]}, ["lengths must be", "B=2", "got shape"]),
        ({"lengths": array(B)}, ["lengths must hold integers"]),
        ({"scale": "big"}, ["scale must be a number", "big"]),
        ({"scale": np.inf}, ["scale must be finite"]),
        ({"scale": 1e-50}, ["scale must be 0 or at least 1.2e-38", "got 1e-50"]),
        ({"normalize_qk": 1}, ["normalize_qk must be True or False", "1"]),
        ({"return_state": None}, ["return_state must be True or False", "None"]),
        ({"precision": "exact"}, ["precision must be", "tf32"]),
        ({"implementation": "cuda"}, ["implementation must be", "'xla'", "cuda"]),
    ],
)
def test_errors(changed: dict[str, Any], patterns: list[str]) -> None:
    arrays, options = draw()
    arguments = dict(zip("qkv", arrays, strict=True)) | {"beta": options["beta"]} | changed
    with pytest.raises(ValueError, match="(?s)" + ".*".join(patterns)):
        ato_jax.gated_delta_rule(**arguments)


@pytest.mark.parametrize(
    ("changed", "patterns"),
    [
        ({"q": array(B, T, G, D)}, ["q must be", r"\[B, G, D\]", "got shape"]),
        ({"v": array(B, G + 1, V)}, ["beta must be", r"\[B, H\]", "H=3"]),
        ({"beta": array(B, H, dtype=int)}, ["beta must be", "int32"]),
        ({"state": array(B, H, V, D)}, ["state must be", r"\[B, H, D, V\]", "got shape"]),
        ({"state": None}, ["state must be an array, got None"]),
        ({"state": array(B, H, D, V, dtype=int)}, ["state must be", "int32"]),
        ({"decay": array(B, H)}, ["decay", "<= 0"]),
        ({"decay": -array(H)}, [r"decay must be \[B, H\] or \[B, H, D\]", "got shape"]),
        ({"scale": np.nan}, ["scale must be finite"]),
        ({"normalize_qk": "no"}, ["normalize_qk must be True or False", "no"]),
    ],
)
def test_errors_of_a_step(changed: dict[str, Any], patterns: list[str]) -> None:
    arguments = {"q": array(B, G, D), "k": array(B, G, D), "v": array(B, H, V)}
    arguments |= {"beta": array(B, H), "state": array(B, H, D, V)}
    with pytest.raises(ValueError, match="(?s)" + ".*".join(patterns)):
        ato_jax.gated_delta_rule_step(**(arguments | changed))


def precisions(T: int, dtype: str = "bfloat16") -> set[tuple[str, str]]:
    """How XLA's form multiplies in both passes, for T steps of two heads."""
    q, k, v = (jnp.ones((1, T, 2, 8), dtype) for _ in range(3))
    beta = jnp.ones((1, T, 2))

    def loss(*arrays: jax.Array) -> jax.Array:
        return ato_jax.gated_delta_rule(*arrays, normalize_qk=True, implementation="xla").sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, beta))
    assert "dot_general[" in jaxpr
    return set(re.findall(r"Precision\.(\w+)|precision=(None)", jaxpr))


def test_few_steps_are_multiplied_exactly() -> None:
    """TF32 is off by 1e-2 of an out = q . k v in which q . k nearly cancels."""
    assert precisions(32) == {("HIGHEST", "")}
    assert precisions(33) > {("HIGHEST", "")}


def in_tf32(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~jnp.uint32(0x1FFF)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def with_factors_in_tf32(einsum: Any) -> Any:
    """`einsum` as a GPU does it: in products that are not exact, and in those of their gradients,
    it rounds the factors to TF32."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def rounded(letters: str, a: jax.Array, b: jax.Array) -> Any:
        return einsum(letters, in_tf32(a), in_tf32(b), precision=HIGHEST)

    def forward(letters: str, a: jax.Array, b: jax.Array) -> Any:
        return rounded(letters, a, b), (a, b)

    def backward(letters: str, factors: tuple[jax.Array, ...], cotangent: jax.Array) -> Any:
        exact = functools.partial(einsum, letters, precision=HIGHEST)
        return jax.vjp(exact, *map(in_tf32, factors))[1](in_tf32(cotangent))

    rounded.defvjp(forward, backward)

    def of(letters: str, a: jax.Array, b: jax.Array, *, precision: Any) -> Any:
        if precision == HIGHEST:
            return einsum(letters, a, b, precision=precision)
        return rounded(letters, a, b)

    return of


@pytest.mark.parametrize("precision", ["tf32", None])
def test_keys_all_alike_where_factors_are_rounded(
    precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are then sums of terms that change sign and nearly cancel."""
    dtype = "bfloat16" if precision is None else "float32"
    arrays, options = draw(T=130, B=1, G=1, H=1, D=32, V=32, dtype=dtype)
    arrays[1] = jnp.broadcast_to(arrays[1][:, :1], arrays[1].shape)
    options |= {"initial_state": None, "return_state": False, "precision": precision}
    wanted = numerics.oracle("gated_delta_rule", *arrays, **options)
    monkeypatch.setattr(jnp, "einsum", with_factors_in_tf32(jnp.einsum))
    found = numerics.run_backends("xla", "xla", wanted, device=Device("gpu"))
    numerics.compare(found, wanted)


@pytest.mark.parametrize("normalize_qk", [False, True])
@pytest.mark.parametrize("decay", [None, "channel"])
def test_steps_that_undo_each_other_where_factors_are_rounded(
    decay: str | None, normalize_qk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With betas of 2 and keys of length 1 that are all alike a step mirrors the state, so what
    rounding takes from one step comes back in all later ones."""
    arrays, options = draw(T=134, B=1, G=1, H=2, D=32, V=32, dtype="bfloat16")
    arrays[1] = jnp.broadcast_to(arrays[1][:, :1], arrays[1].shape)
    if not normalize_qk:  # signs of the same size, whose length is 1 in bfloat16
        arrays[1] = (jnp.sign(arrays[1]) * 32**-0.5).astype(jnp.bfloat16)
    options["beta"] = jnp.full_like(options["beta"], 2.0)
    options |= {"initial_state": None, "return_state": False, "normalize_qk": normalize_qk}
    options["decay"] = None if decay is None else jnp.full((1, 134, 2, 32), -1e-3)
    wanted = numerics.oracle("gated_delta_rule", *arrays, **options)
    monkeypatch.setattr(jnp, "einsum", with_factors_in_tf32(jnp.einsum))
    found = numerics.run_backends("xla", "xla", wanted, device=Device("gpu"))
    numerics.compare(found, wanted)
