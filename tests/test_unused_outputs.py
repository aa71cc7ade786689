"""A backward pass spends nothing on an output that the caller does not differentiate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import choosing, device, dispatch, programs
from ato_jax.ops.attention import api
from ato_jax.ops.attention.spec import Outputs
from tests import interpreted


def qkv(T: int = 16, D: int = 16) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=(1, T, 1, D)), "bfloat16") for _ in range(3)]


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The specs of the backward passes that are traced."""
    found: list[Any] = []
    backward_by = dispatch.backward_by

    def recorded(op: Any, choice: Any, spec: Any, *arrays: Any) -> Any:
        found.append(spec)
        return backward_by(op, choice, spec, *arrays)

    monkeypatch.setattr(dispatch, "backward_by", recorded)
    programs.clear()
    return found


def attend(*arrays: jax.Array, **options: Any) -> Any:
    chosen: dict[str, Any] = {"causal": True, "implementation": "triton"} | options
    return ato_jax.attention(*arrays, **chosen)


def with_lse(*arrays: jax.Array) -> Any:
    return attend(*arrays, return_lse=True)


def total(array: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(array.astype(jnp.float32)))


def plain(*arrays: jax.Array) -> jax.Array:
    return total(attend(*arrays))


def unused(*arrays: jax.Array) -> jax.Array:
    return total(with_lse(*arrays)[0])


def used(*arrays: jax.Array) -> jax.Array:
    out, lse = with_lse(*arrays)
    return total(out) + total(lse)


def stopped(*arrays: jax.Array) -> jax.Array:
    out, lse = with_lse(*arrays)
    return total(out) + total(jax.lax.stop_gradient(lse))


def through_the_whole(change: Callable[[Any], Any]) -> Callable[..., jax.Array]:
    """`change` sees both outputs, one of which its caller then drops."""
    return lambda *arrays: total(change(with_lse)(*arrays)[0])


def in_a_scan(loss: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    def step(q: jax.Array, _: None) -> tuple[jax.Array, None]:
        return q + loss(q, *arrays[1:]).astype(q.dtype), None

    return total(jax.lax.scan(step, arrays[0], length=2)[0])


def batched(loss: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    return jnp.sum(jax.vmap(loss)(*(jnp.stack([array, array]) for array in arrays)))


AROUND: dict[str, Callable[[Any], Any]] = {
    "alone": lambda loss: loss,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda loss: functools.partial(batched, loss),
    "scan": lambda loss: functools.partial(in_a_scan, loss),
    "scan of remat": lambda loss: functools.partial(in_a_scan, jax.checkpoint(loss)),
}
BOTH_OUT: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "cond": lambda function: lambda *arrays: jax.lax.cond(
        arrays[0][0, 0, 0, 0] > 0, function, lambda *arrays: function(*arrays[::-1]), *arrays
    ),
}


def traced(told: list[Any], loss: Callable[..., jax.Array], *numbers: int) -> set[bool]:
    with ato_jax.interpret():
        jax.eval_shape(jax.grad(loss, numbers or (0, 1, 2)), *qkv())
    return {spec.return_lse for spec in told}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("loss, wanted", [(unused, False), (used, True)])
def test_lse_under_transformations(told: Any, around: str, loss: Any, wanted: bool) -> None:
    assert traced(told, AROUND[around](loss)) == {wanted}


@pytest.mark.parametrize("around", BOTH_OUT)
def test_lse_that_leaves_a_transformation_and_is_dropped(told: Any, around: str) -> None:
    assert traced(told, through_the_whole(BOTH_OUT[around])) == {False}


def test_lse_used_without_its_derivative_and_alone(told: Any) -> None:
    assert traced(told, stopped) == {False}
    told.clear()
    assert traced(told, lambda *arrays: total(with_lse(*arrays)[1])) == {True}


@pytest.mark.parametrize("number", range(3))
def test_the_gradient_of_one_input(told: Any, number: int) -> None:
    assert traced(told, unused, number) == {False}


def test_second_order(told: Any) -> None:
    def of_gradient(*arrays: jax.Array) -> jax.Array:
        return total(jax.grad(unused)(*arrays))

    assert traced(told, of_gradient) == {False}


def check_program(implementation: str) -> None:
    """A gradient's program is that of the plain call, unless lse has a cotangent: then the kernels
    for dq and dk have one product more each, written once for each of two loops or loop bodies."""

    def text_of(returned: Any) -> str:
        def loss(*arrays: jax.Array) -> jax.Array:
            return returned(functools.partial(attend, *arrays, implementation=implementation))

        programs.clear()
        return str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*qkv(T=128, D=64)))

    with ato_jax.interpret():
        text = text_of(lambda call: total(call()))
        assert text_of(lambda call: total(call(return_lse=True)[0])) == text
        more = text_of(lambda call: sum(map(total, call(return_lse=True))))
    assert more.count("dot_general") == text.count("dot_general") + 4


def test_the_program_of_triton() -> None:
    check_program("triton")


@interpreted.newest
def test_the_program_of_hopper() -> None:
    check_program("mosaic_gpu")


def test_numbers_are_those_of_the_plain_call() -> None:
    with ato_jax.interpret():
        wanted = jax.grad(plain, (0, 1, 2))(*qkv())
        found = jax.grad(unused, (0, 1, 2))(*qkv())
        with_zeros = jax.vjp(with_lse, *qkv())[1]
        out, lse = with_lse(*qkv())
        cotangent = jax.grad(total)(out), jnp.zeros_like(lse)
        in_parts = with_zeros(cotangent)
    for one, other, third in zip(wanted, found, in_parts, strict=True):
        np.testing.assert_array_equal(one, other)
        one, third = np.asarray(one, np.float64), np.asarray(third, np.float64)
        assert np.linalg.norm(one - third) <= 5e-3 * np.linalg.norm(one)


def test_a_cotangent_that_is_not_given(told: Any) -> None:
    """Callers that keep the outputs pass None."""
    request = api.prepare(*qkv(), causal=True, return_lse=True, implementation="triton")
    arguments = api.OP, request.spec, request.inputs
    no_array: Any = None
    with ato_jax.interpret():
        outputs = dispatch.run(*arguments, request.implementation, True)
        d_out = jnp.ones_like(outputs.out)
        found, wanted = (
            dispatch.backward(
                *arguments, outputs, Outputs(d_out, d_lse), request.implementation, ("q", "k")
            )
            for d_lse in (no_array, jnp.zeros_like(outputs.lse))
        )
    assert [spec.return_lse for spec in told] == [False, True]
    for name in ("q", "k"):
        one, other = (np.asarray(each[name], np.float64) for each in (found, wanted))
        assert np.linalg.norm(one - other) <= 5e-3 * np.linalg.norm(other)


def test_kernels_that_another_spec_would_choose_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the forward pass kept may be for the backward pass of its own spec alone."""
    spec = api.prepare(*qkv(), return_lse=True).spec
    call = choosing.Call(api.OP, spec, "triton", device.of_call(()), True)
    given: Any = Outputs(True, False)  # type: ignore[arg-type]
    without = dataclasses.replace(call, spec=dataclasses.replace(spec, return_lse=False))
    assert dispatch._for_cotangents(call, given) == without
    monkeypatch.setattr(choosing, "choose_if_any", lambda call, phase: call.spec.return_lse)
    assert dispatch._for_cotangents(call, given) == call


@interpreted.newest
@pytest.mark.parametrize("returned, wanted", [(slice(1), False), (slice(2), True)])
def test_states_of_the_delta_rule(told: Any, returned: slice, wanted: bool) -> None:
    q, k, v = qkv(T=128, D=64)
    beta = jnp.full((1, 128, 1), 0.5)

    def loss(*arrays: jax.Array) -> Any:
        found = ato_jax.gated_delta_rule(
            *arrays, normalize_qk=True, return_state=True, implementation="mosaic_gpu"
        )
        return sum(map(total, found[returned]))

    with ato_jax.interpret():
        jax.eval_shape(jax.grad(loss, (0, 1, 2, 3)), q, k, v, beta)
    assert {spec.return_state for spec in told} == {wanted}
