"""Both ops under JAX's transformations: any order of derivatives, vmap, jit, remat, x64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import choosing
from tests import numerics

OPTIONS: dict[str, dict[str, Any]] = {
    "attention": {"causal": True, "softcap": 2.0},
    "linear_attention": {"causal": True},
}
each_op = pytest.mark.parametrize("op", OPTIONS)


def arrays(*, batch: int = 2, seed: int = 0, dtype: Any = jnp.float32) -> list[jax.Array]:
    draw = np.random.default_rng(seed)
    shapes = ((batch, 9, 4, 4), (batch, 9, 2, 4), (batch, 9, 2, 3))
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]


def options_of(op: str, implementation: str | None) -> dict[str, Any]:
    """No transformation sees into a kernel, and those of the causal walk take long to compile."""
    return {} if (op, implementation) == ("linear_attention", "triton") else OPTIONS[op]


def call(op: str, implementation: str | None = "xla", **more: Any) -> Any:
    options = options_of(op, implementation)
    return functools.partial(getattr(ato_jax, op), implementation=implementation, **options, **more)


def loss_of(function: Any) -> Any:
    """A scalar whose second derivative is not zero anywhere."""

    def loss(*qkv: Any) -> Any:
        out = function(*qkv)
        return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, jnp.float32))))

    return loss


def reference(op: str, implementation: str, *qkv: Any) -> Any:
    """The reference's output, in whatever precision q, k and v have, with the other's options."""
    narrow = [jnp.zeros(one.shape, jnp.float32) for one in qkv]
    request = numerics.APIS[op].prepare(*narrow, **options_of(op, implementation))
    inputs = request.inputs._replace(**dict(zip("qkv", qkv, strict=True)))
    return numerics.REFERENCES[op].forward(request.spec, None, inputs).out


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda one: jnp.asarray(np.asarray(one, np.float64)), tree)


def close(found: Any, wanted: Any, limit: float) -> None:
    for one, exact in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, exact = np.asarray(one, np.float64), np.asarray(exact, np.float64)
        error = np.linalg.norm(one - exact) / np.linalg.norm(exact)
        assert error <= limit, error


@functools.cache
def exact_second_order(op: str, implementation: str) -> Any:
    with jax.enable_x64(True):
        exact = functools.partial(reference, op, implementation)
        gradient = jax.grad(loss_of(exact), (0, 1, 2))
        along = jax.jit(lambda *arrays: jax.jvp(gradient, *arrays)[1])
        return jax.tree.map(np.asarray, along(wide(arrays()), wide(arrays(seed=1))))


def forward_over_reverse(loss: Any) -> Any:
    gradient = jax.grad(loss, (0, 1, 2))
    return jax.jit(lambda *both: jax.jvp(gradient, *both)[1])(arrays(), arrays(seed=1))


def reverse_over_reverse(loss: Any) -> Any:
    def along(*qkv: Any) -> Any:
        gradients = jax.grad(loss, (0, 1, 2))(*qkv)
        return sum(
            jnp.vdot(one, direction)
            for one, direction in zip(gradients, arrays(seed=1), strict=True)
        )

    return jax.jit(jax.grad(along, (0, 1, 2)))(*arrays())


@each_op
@pytest.mark.parametrize(
    ("implementation", "how"),
    [
        ("xla", forward_over_reverse),
        ("xla", reverse_over_reverse),
        ("triton", reverse_over_reverse),
    ],
)
def test_second_order(op: str, implementation: str, how: Any) -> None:
    """Hessians are symmetric: both ways give the exact product with the same direction."""
    with ato_jax.interpret():
        found = how(loss_of(call(op, implementation)))
    close(found, exact_second_order(op, implementation), 2e-5)


@each_op
def test_forward_mode(op: str) -> None:
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(jax.jvp, functools.partial(reference, op, "xla")))
        wanted = np.asarray(exact(wide(arrays()), wide(arrays(seed=1)))[1])
    _, found = jax.jvp(call(op), arrays(), arrays(seed=1))
    close(found, wanted, 1e-5)


@each_op
def test_forward_mode_of_kernels_is_refused(op: str) -> None:
    with ato_jax.interpret(), pytest.raises(TypeError, match="(?i)forward-mode|jvp"):
        jax.jvp(call(op, "triton"), arrays(), arrays(seed=1))


@each_op
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_vmap(op: str, implementation: str) -> None:
    """Over an axis of its own, shared by some arguments, forward and backward."""
    q, k, v = (jnp.stack(pair) for pair in zip(arrays(), arrays(seed=1), strict=True))
    k = k[0]

    def gradients(q: Any, k: Any, v: Any) -> Any:
        return jax.value_and_grad(loss_of(call(op, implementation)), (0, 1, 2))(q, k, v)

    with ato_jax.interpret():
        found = jax.vmap(gradients, (0, None, 0))(q, k, v)
        for index in range(2):
            wanted = gradients(q[index], k, v[index])
            close(jax.tree.map(lambda one, index=index: one[index], found), wanted, 2e-6)


@each_op
def test_jit_remat_and_donation(op: str) -> None:
    wanted = jax.grad(loss_of(call(op)), (0, 1, 2))(*arrays())
    gradient = jax.grad(jax.checkpoint(loss_of(call(op))), (0, 1, 2))
    close(jax.jit(gradient, donate_argnums=(0, 1, 2))(*arrays()), wanted, 2e-6)


@each_op
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_remat_of_kernels(op: str, implementation: str) -> None:
    with ato_jax.interpret():
        loss = loss_of(call(op, implementation))
        wanted = jax.grad(loss)(*arrays())
        close(jax.grad(jax.checkpoint(loss))(*arrays()), wanted, 2e-6)


@each_op
def test_traced_lengths_and_segments(op: str) -> None:
    """What tells who sees whom may be traced: one program serves all of it."""
    function = getattr(ato_jax, op)

    @jax.jit
    def traced(lengths: Any, ids: Any) -> Any:
        return function(*arrays(), kv_lengths=lengths, segment_ids=ids, causal=True)

    for lengths in ([9, 4], [0, 7]):
        for start in (3, 6):
            ids = np.repeat((np.arange(9) >= start)[None], 2, 0).astype(np.int32)
            wanted = function(*arrays(), kv_lengths=np.array(lengths), segment_ids=ids, causal=True)
            found = traced(jnp.array(lengths), jnp.asarray(ids))
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_traced_offset() -> None:
    @jax.jit
    def traced(offset: Any) -> Any:
        return ato_jax.attention(*arrays(), query_offset=offset, causal=True)

    for offset in (0, 3, -4):
        wanted = ato_jax.attention(*arrays(), query_offset=offset, causal=True)
        np.testing.assert_allclose(traced(offset), wanted, rtol=1e-5, atol=1e-6)
        each = ato_jax.attention(*arrays(), query_offset=jnp.full(2, offset), causal=True)
        np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-6)


@each_op
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("xla", "float32"), ("xla", "bfloat16"), ("reference", "float32"), ("triton", "bfloat16")],
)
def test_x64_changes_no_dtype(
    op: str, dtype: str, implementation: str, request: pytest.FixtureRequest
) -> None:
    """With jax_enable_x64 the answer is the same, to the bit or nearly, and of the same dtype."""
    if (op, implementation) == ("attention", "triton"):
        # `test_aot_kernels.test_compiles_with_x64` shows that only the interpreter does.
        reason = "Pallas's interpreter slices refs with indices of two dtypes under x64"
        request.applymarker(pytest.mark.xfail(strict=True, raises=TypeError, reason=reason))
    more = {"return_lse": True} if op == "attention" else {"return_state": True}
    function = call(op, implementation, **more)
    narrow = [np.asarray(one) for one in arrays(dtype=dtype)]

    def outputs(function: Any) -> Any:
        result, pull = jax.vjp(function, *map(jnp.asarray, narrow))
        return result, pull(jax.tree.map(jnp.ones_like, result))

    with ato_jax.interpret():
        wanted = outputs(function)
        with jax.enable_x64(True):
            found = outputs(function)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=2e-2, atol=1e-5
        )


@each_op
def test_inside_a_scan(op: str) -> None:
    """Inside lax.scan, as a layer would call it."""

    def layer(q: Any, _: None) -> tuple[Any, None]:
        out = call(op)(q, *arrays()[1:])
        return q + jnp.pad(out, ((0, 0),) * 3 + ((0, 1),)), None

    found, _ = jax.jit(lambda q: jax.lax.scan(layer, q, None, length=3))(arrays()[0])
    wanted = arrays()[0]
    for _ in range(3):
        wanted, _ = layer(wanted, None)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@each_op
def test_numpy_arrays_are_taken(op: str) -> None:
    wanted = call(op)(*arrays())
    np.testing.assert_array_equal(call(op)(*map(np.asarray, arrays())), wanted)


@each_op
def test_a_phase_without_a_backend_says_so(op: str) -> None:
    with pytest.raises(ato_jax.UnsupportedError), ato_jax.interpret():
        jax.grad(loss_of(call(op, "mosaic_gpu")))(*arrays())
    assert choosing.PHASES == ("forward", "backward")


def test_a_decay_that_a_traced_function_closes_over() -> None:
    q, k, v = arrays()
    decay = jnp.full(k.shape[2], -0.5)
    wanted = ato_jax.linear_attention(q, k, v, decay=decay, causal=True)
    found = jax.jit(lambda q: ato_jax.linear_attention(q, k, v, decay=decay, causal=True))(q)
    assert jnp.allclose(found, wanted)
    growth = -decay
    with pytest.raises(ValueError, match="decay .* up to 0.5"):
        jax.jit(lambda q: ato_jax.linear_attention(q, k, v, decay=growth, causal=True))(q)
