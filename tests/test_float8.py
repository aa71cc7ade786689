"""Calls on float8_e4m3fn arrays: right, refused where they are wrong, and without a derivative."""

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
from tests import numerics

B, T, S, H, G, D, V = 2, 24, 24, 4, 2, 16, 8
FUNCTIONS = {"attention": ato_jax.attention, "linear_attention": ato_jax.linear_attention}
each_op = pytest.mark.parametrize("op", FUNCTIONS)
# Relative RMS error against float64 on the same float8 arrays, whatever their scales.
LIMITS = {"attention": 3e-2, "linear_attention": 5e-3}


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def wide(layout: str = "bthd") -> list[jax.Array]:
    shapes = ((B, T, H, D), (B, S, G, D), (B, S, G, V))
    arrays = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return [array.swapaxes(1, 2) for array in arrays] if layout == "bhtd" else arrays


@functools.cache
def drawn(layout: str = "bthd", odd: bool = False) -> tuple[Any, Any]:
    """`wide` as float8 arrays, and their scales, which are no powers of two if `odd`."""
    values, scales = quantised(wide(layout), layout)
    if odd:
        factors = (1.1, 0.9, 1.7)
        scales = tuple(scale * factor for scale, factor in zip(scales, factors, strict=True))
    return values, scales


def quantised(arrays: Any, layout: str = "bthd") -> tuple[Any, Any]:
    axes = (1, 3) if layout == "bthd" else (2, 3)
    values, scales = zip(*(ato_jax.quantize(array, axes) for array in arrays), strict=True)
    return values, scales


def products(values: Any, scales: Any, layout: str = "bthd") -> list[jax.Array]:
    """What float8 arrays stand for, in float32."""
    time = 1 if layout == "bthd" else 2
    return [
        array.astype(jnp.float32) * jnp.expand_dims(scale, (time, 3))
        for array, scale in zip(values, scales, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _reference(op: str, spec: Any, inputs: Any) -> Any:
    return numerics.REFERENCES[op].forward(spec, None, inputs)


def in_float64(op: str, arrays: list[jax.Array], **options: Any) -> dict[str, Any]:
    """The reference's outputs by name."""
    request, _ = numerics.prepare(op, *arrays, **options)
    spec = dataclasses.replace(request.spec, dtype="float64")
    with jax.enable_x64(True):
        inputs = jax.tree.map(
            lambda array: array.astype("float64") if array.dtype == "float32" else array,
            request.inputs,
        )
        return numerics.users_outputs(op, request, _reference(op, spec, inputs))


def error(actual: Any, exact: Any) -> float:
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))


STATE = ato_jax.LinearState(jnp.abs(normal(B, G, D, V)), jnp.abs(normal(B, G, D)))
CALLS = {
    "softmax": ("attention", {}),
    "softmax options": (
        "attention",
        {
            "causal": True,
            "window": (9, None),
            "softcap": 3.0,
            "sinks": normal(H),
            "kv_lengths": np.array([5, 24]),
            "return_lse": True,
        },
    ),
    "softmax bhtd": ("attention", {"layout": "bhtd", "bias": normal(B, 1, 1, S)}),
    "elu1": ("linear_attention", {}),
    "gates, states": (
        "linear_attention",
        {
            "causal": True,
            "decay": -jnp.abs(normal(B, S, G)),
            "initial_state": STATE,
            "return_state": True,
        },
    ),
    "silu bhtd": ("linear_attention", {"feature_map": "silu", "layout": "bhtd"}),
    "favor, lengths": (
        "linear_attention",
        {"feature_map": ato_jax.favor(jax.random.key(0), 32, D), "kv_lengths": np.array([5, 24])},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    """Powers of two keep the budgets of bfloat16; other scales keep those of float8."""
    op, options = CALLS[name]
    layout = options.get("layout", "bthd")
    for odd in (False, True):
        values, scales = drawn(layout, odd)
        exact = in_float64(op, products(values, scales, layout), **options)
        result = FUNCTIONS[op](*values, scales=scales, **options)
        for part, array in numerics.named_outputs(op, result).items():
            if odd:
                assert error(array, exact[part]) < LIMITS[op], part
            else:
                dtype = "bfloat16" if part == "out" else "float32"
                numerics.check(part, array, exact[part], dtype="bfloat16", result_dtype=dtype)


@each_op
def test_dtypes_of_the_output(op: str) -> None:
    """float32 is computed in float32; float16 has bfloat16's digits."""
    values, scales = drawn(odd=True)
    exact = in_float64(op, products(values, scales))["out"]
    for dtype, least, most in (("float32", 0, 2e-6), (jnp.float16, 1e-4, LIMITS[op])):
        out = FUNCTIONS[op](*values, scales=scales, out_dtype=dtype)
        assert out.dtype == dtype and least < error(out, exact) < most


@each_op
def test_under_jit_and_vmap_and_without_a_batch(op: str) -> None:
    function = functools.partial(FUNCTIONS[op], causal=True)
    values, scales = drawn()
    wanted = function(*values, scales=scales)
    mapped = jax.jit(jax.vmap(lambda values, scales: function(*values, scales=scales)))
    assert error(mapped(values, scales), wanted) < 1e-3
    alone = function(*(array[0] for array in values), scales=[scale[0] for scale in scales])
    assert alone.shape == wanted[0].shape and error(alone, wanted[0]) < 1e-3
    empty = function(*(array[:0] for array in values), scales=[scale[:0] for scale in scales])
    assert empty.shape == (0, *wanted.shape[1:])


@each_op
def test_nan_in_padding_reaches_nothing(op: str) -> None:
    arrays = wide()
    for array, options in ((arrays[1], {}), (arrays[2], {"causal": True})):
        poisoned = [array.at[:, 10:].set(jnp.nan) for array in arrays]
        values, scales = quantised(poisoned)
        out = FUNCTIONS[op](*values, scales=scales, kv_lengths=np.array([10, 7]), **options)
        assert jnp.isfinite(out).all() and jnp.abs(out[:, :7]).min() > 0, array.shape


@each_op
def test_a_given_scale_knows_no_future(op: str) -> None:
    """A scale over all of T does: later tokens change what earlier queries give."""
    first = wide()
    later = [array.at[:, 12:].multiply(100.0) for array in first]

    def early(arrays: Any, scales: Any) -> Any:
        scales = scales or [None] * 3
        pairs = [
            ato_jax.quantize(array, (1, 3), scale=scale)
            for array, scale in zip(arrays, scales, strict=True)
        ]
        values, scales = zip(*pairs, strict=True)
        return np.asarray(FUNCTIONS[op](*values, scales=scales, causal=True)[:, :12], np.float32)

    given = quantised([array[:, :12] for array in first])[1]
    assert (early(first, given) == early(later, given)).all()
    assert (early(first, None) != early(later, None)).any()


def test_the_step_of_linear_attention() -> None:
    values, scales = drawn()
    decay = jnp.full(G, -0.1)
    wanted, last = ato_jax.linear_attention(
        *values, scales=scales, causal=True, decay=decay, return_state=True
    )
    state = ato_jax.LinearState(jnp.zeros((B, G, D, V)), jnp.zeros((B, G, D)))
    step = jax.jit(functools.partial(ato_jax.linear_attention_step, scales=scales, decay=decay))
    for t in range(T):
        out, state = step(*(array[:, t] for array in values), state)
        assert out.dtype == "bfloat16" and error(out, wanted[:, t]) < 5e-3
    assert error(state.kv, last.kv) < 1e-5
    alone, _ = ato_jax.linear_attention_step(
        *(array[0, -1] for array in values),
        jax.tree.map(lambda array: array[0], state),
        scales=[scale[0] for scale in scales],
        out_dtype="float32",
    )
    assert alone.shape == (H, V) and alone.dtype == "float32"


# What is refused.


def with_scale(index: int, scale: Any) -> dict[str, Any]:
    scales = [jnp.ones((B, heads)) for heads in (H, G, G)]
    scales[index] = scale
    return {"scales": tuple(scales)}


BAD = [
    ({"v": normal(B, S, G, V)}, ["q, k and v must all be float8_e4m3fn", "e4m3fn, float32"]),
    ({"q": normal(B, T, H, D)}, ["q, k and v must all be float8_e4m3fn", "got float32, float8"]),
    ({"k": normal(B, S, G, D).astype("float8_e5m2")}, ["q, k and v must all be", "float8_e5m2"]),
    ({"k": jnp.zeros((B, S, G, D + 1), "float8_e4m3fn")}, ["k must be", "got shape"]),
    ({"scales": None}, ["scales must be given with q, k and v of float8_e4m3fn"]),
    ({"scales": dict.fromkeys("qkv", jnp.ones((B, H)))}, ["got a dict of 'q', 'k', 'v'$"]),
    ({"scales": 1.0}, [r"scales must be \(q_scale \[B, H\]", "got 1.0"]),
    ({"scales": jnp.ones((3, B, H))}, [r"scales must be \(q_scale", r"shape \(3, 2, 4\)"]),
    ({"scales": (jnp.ones((B, H)),) * 2}, [r"scales must be \(q_scale", "got 2 of them"]),
    (with_scale(0, jnp.ones((B, G))), [r"q_scale must be \[B, H\]", "H=4", r"\(2, 2\)"]),
    (with_scale(1, jnp.ones((B, H))), [r"k_scale must be \[B, G\]", "G=2", r"\(2, 4\)"]),
    (with_scale(2, jnp.ones(())), [r"v_scale must be \[B, G\]", r"got shape \(\)"]),
    (with_scale(2, jnp.ones((B, G), "bfloat16")), ["v_scale must be float32, got bfloat16"]),
    (with_scale(1, np.ones((B, G))), ["k_scale must be float32, got float64"]),
    (with_scale(1, None), ["k_scale must be an array, got None"]),
    (with_scale(0, -jnp.ones((B, H))), ["q_scale must be positive and finite", "-1.0 to -1.0"]),
    (with_scale(2, jnp.ones((B, G)).at[1, 1].set(0)), ["v_scale must be positive", "0.0 to 1.0"]),
    (with_scale(2, jnp.full((B, G), jnp.nan)), ["v_scale must be positive and finite", "nan"]),
    (with_scale(2, jnp.full((B, G), jnp.inf)), ["v_scale must be positive and finite", "inf"]),
    ({"out_dtype": "float64"}, ["out_dtype must be one of 'bfloat16', 'float16', 'float32'"]),
    ({"out_dtype": "float8_e4m3fn"}, ["out_dtype must be one of"]),
]


def refused(*patterns: str) -> Any:
    return pytest.raises(ValueError, match=".*".join(patterns))


@each_op
@pytest.mark.parametrize(("changed", "patterns"), BAD)
def test_bad_arguments(op: str, changed: dict[str, Any], patterns: list[str]) -> None:
    values, scales = drawn()
    arguments = dict(zip("qkv", values, strict=True)) | {"scales": scales}
    FUNCTIONS[op](**arguments)
    with refused(*patterns):
        FUNCTIONS[op](**(arguments | changed))
    step: dict[str, Any] = {
        name: array[:, 0] if getattr(array, "ndim", 0) == 4 else array
        for name, array in (arguments | changed).items()
    }
    with refused(*patterns):
        ato_jax.linear_attention_step(**step, state=STATE)


@each_op
def test_what_goes_with_float8_alone(op: str) -> None:
    scales = drawn()[1]
    for name, value in (("scales", scales), ("out_dtype", "bfloat16")):
        with refused(f"^{name} goes with q, k and v of float8_e4m3fn", "got q of float32"):
            FUNCTIONS[op](*wide(), **{name: value})


def test_what_takes_no_float8() -> None:
    (q, k, _), _ = drawn()
    lse = jnp.zeros((B, T, H))
    for name, arrays in (("q", (q, k)), ("q", (q, wide()[1])), ("k", (wide()[0], k))):
        with refused(f"^{name} must be float16, bfloat16 or float32, got float8_e4m3fn"):
            ato_jax.total_attention(*arrays, lse)


@each_op
def test_traced_scales_are_checked(op: str) -> None:
    values, scales = drawn()
    check = jax.jit(ato_jax.checked(lambda scales: FUNCTIONS[op](*values, scales=scales)))
    assert check(scales)[0].get() is None
    for index, wrong in ((0, 0.0), (1, -1.0), (2, jnp.nan)):
        changed = [*scales[:index], scales[index].at[0, 1].set(wrong), *scales[index + 1 :]]
        message = str(check(tuple(changed))[0].get())
        assert re.search(f"{'qkv'[index]}_scale must be positive and finite", message), message


def _of_values(op: str) -> Any:
    values, scales = drawn()
    return lambda q: FUNCTIONS[op](q, *values[1:], scales=scales), values[0]


def _of_wide(op: str) -> Any:
    def call(q: jax.Array) -> Any:
        values, scales = quantised([q, *wide()[1:]])
        return FUNCTIONS[op](*values, scales=scales)

    return call, wide()[0]


def _of_a_scale(op: str) -> Any:
    values, scales = drawn()
    return lambda scale: FUNCTIONS[op](*values, scales=(*scales[:2], scale)), scales[2]


def _of_another(op: str) -> Any:
    values, scales = drawn()
    if op == "attention":
        return lambda x: FUNCTIONS[op](*values, scales=scales, sinks=x), normal(H)
    return lambda x: FUNCTIONS[op](*values, scales=scales, decay=x, causal=True), -jnp.ones(G)


@each_op
@pytest.mark.parametrize("of", [_of_values, _of_wide, _of_a_scale, _of_another])
def test_derivatives_are_refused(op: str, of: Any) -> None:
    """Each of them names the way out; what does not depend on the call has a derivative."""
    call, x = of(op)
    total = lambda x: call(x).astype(jnp.float32).sum()  # noqa: E731
    ways = {
        "jvp": lambda: jax.jvp(call, (x,), (x,)),
        "vjp": lambda: jax.vjp(call, x),
        "both": lambda: jax.jit(jax.jacfwd(jax.grad(total)))(x),
    }
    told = "no derivative.*custom_vjp.*stop_gradient"
    for way, derive in ways.items():
        with pytest.raises(ato_jax.UnsupportedError, match=told):
            derive()
            pytest.fail(way)
    constant = jax.lax.stop_gradient
    assert jax.grad(lambda y: total(constant(x)) * y)(2.0) == total(x)


@each_op
def test_explain_says_what_happens_to_float8(op: str) -> None:
    values, scales = drawn()
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in values]
    for dtype, wanted in ((None, "bfloat16"), ("float32", "float32")):
        found = ato_jax.explain(op, *shapes, scales=scales, out_dtype=dtype)
        told = str(found)
        assert f"widened to {wanted} first; no kernel reads 8 bits" in told
        assert found.implementation == "xla" and found.backward is None
        assert "xla backward: float8 inputs have no derivative" in told
    assert not ato_jax.explain(op, *wide()).note
    step = [array[:, 0] for array in values]
    told = str(ato_jax.explain("linear_attention_step", *step, STATE, scales=scales))
    assert "widened to bfloat16 first" in told and "backward: -" in told


# Quantising.


def test_a_scale_is_the_least_power_of_two() -> None:
    for seed, factor in enumerate((1e-30, 1e-4, 1.0, 3e20)):
        x = normal(3, 5, 4, 7, seed=seed) * factor
        values, scale = ato_jax.quantize(x, (1, -1))
        mantissa, _ = np.frexp(np.asarray(scale))
        assert scale.shape == (3, 4) and (mantissa == 0.5).all()
        largest = np.abs(np.asarray(values, np.float32)).max((1, 3))
        assert (largest > 224 - 16).all() and (largest <= 448).all()
        widened = products([values], [scale])[0]
        assert (widened.astype("bfloat16").astype("float32") == widened).all()
        assert error(widened, x) < 0.03
    for exact, wanted in ((448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (0.0, 2.0**-126)):
        values, scale = ato_jax.quantize(jnp.array([exact, -exact / 2]), 0)
        assert scale.shape == () and scale == wanted
        assert jnp.isfinite(values.astype("float32")).all()


def test_a_running_scale_ignores_a_chunk_of_zeros() -> None:
    x = normal(8) * 1e-4
    _, scale = ato_jax.quantize(x, 0)
    _, of_zeros = ato_jax.quantize(0 * x, 0)
    assert jnp.maximum(scale, of_zeros) == scale


def test_quantize_itself_has_no_derivative() -> None:
    """A cotangent of its values would be float8: 0 for a small loss, and NaN for a large one."""

    def loss(x: jax.Array) -> jax.Array:
        values, scale = ato_jax.quantize(x, 0)
        return (values.astype("float32") * scale).sum()

    with pytest.raises(ato_jax.UnsupportedError, match="quantize has no derivative"):
        jax.grad(loss)(normal(8))
    stopped = jax.grad(lambda x: loss(jax.lax.stop_gradient(x)) + x.sum())(normal(8))
    assert stopped.tolist() == [1] * 8


def test_values_that_float8_does_not_hold() -> None:
    x = jnp.array([1.0, -500.0, jnp.nan, jnp.inf, -jnp.inf, 460.0], "bfloat16")
    values, scale = ato_jax.quantize(x, 0, scale=jnp.float32(1))
    found = np.asarray(values, np.float32)
    assert scale == 1 and found[:2].tolist() == [1, -448] and found[5] == 448
    assert np.isnan(found[2:5]).all()
    assert ato_jax.quantize(x, 0)[1] == 2


@pytest.mark.parametrize("scale", [2.0**126, 2.0**127, 3e38])
def test_the_largest_scales_that_are_given(scale: float) -> None:
    """The inverse of one above 2^126 is no normal number."""
    x = jnp.array([1.0, -0.625, 0.25, 0.0]) * scale
    values, _ = ato_jax.quantize(x, 0, scale=jnp.float32(scale))
    assert values[:2].tolist() == [1, -0.625] and not values[3]


def test_one_number_scales_all() -> None:
    x = normal(2, 6, 3, 4)
    wanted = ato_jax.quantize(x, (1, 3), scale=jnp.full((2, 3), 0.5))
    for number in (0.5, np.float64(0.5)):
        found = jax.jit(lambda x, number=number: ato_jax.quantize(x, (1, 3), scale=number))(x)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one.astype("float32"), other.astype("float32"))


def test_functions_without_scales_say_how_to_widen() -> None:
    """And that keeps the values: converting alone would lose the scales."""
    values, scale = ato_jax.quantize(q := normal(2, 4, 2, 8), (1, 3))
    told = (
        "q must be float16, bfloat16 or float32, got float8_e4m3fn; multiply by the scale of "
        "ato_jax.quantize first: "
        "(q.astype('float32') * jnp.expand_dims(scale, axes)).astype('bfloat16')"
    )
    wide = (values.astype("float32") * jnp.expand_dims(scale, (1, 3))).astype("bfloat16")
    assert error(wide, q) < 0.04
    mesh = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.sharding.PartitionSpec(None, "time")
    calls = [
        jax.shard_map(
            functools.partial(function, axis_name="time"), mesh=mesh, in_specs=cut, out_specs=cut
        )
        for function in (ato_jax.parallel.attention, ato_jax.parallel.linear_attention)
    ]
    for call in (*calls, ato_jax.decode_attention):
        with refused(re.escape(told)):
            call(values, values, values)
        assert call(wide, wide, wide).shape == q.shape


@pytest.mark.parametrize(
    ("arguments", "options", "patterns"),
    [
        ((np.ones(3), 0), {}, ["x must be", "float32", "float64"]),
        ((jnp.ones(3, "float8_e4m3fn"), 0), {}, ["x must be", "float8_e4m3fn"]),
        ((jnp.ones((2, 3)), 2), {}, ["axes must be different axes of x, which has 2, got 2"]),
        ((jnp.ones((2, 3)), (0, -2)), {}, ["axes must be different axes", r"got \(0, -2\)"]),
        ((jnp.ones((2, 3)), ()), {}, ["axes must be"]),
        ((jnp.ones((2, 3)), True), {}, ["axes must be"]),
        ((jnp.ones((2, 3)), None), {}, ["axes must be"]),
        ((jnp.ones((2, 3)), 1), {"scale": jnp.ones(3)}, [r"scale must have shape \(2,\)", "3"]),
        ((jnp.ones((2, 3)), 1), {"scale": jnp.zeros(2)}, ["scale must be positive", "0.0"]),
        ((jnp.ones((2, 3)), 1), {"scale": np.ones(2)}, ["scale must be float32, got float64"]),
        ((jnp.ones((2, 3)), 1), {"scale": -0.5}, ["scale must be positive", "-0.5"]),
        ((jnp.ones((2, 3)), 1), {"scale": 1e-50}, ["scale must be positive", "1e-50"]),
        ((jnp.ones((2, 3)), 1), {"scale": True}, ["scale must be float32, got bool"]),
    ],
)
def test_bad_arguments_of_quantize(arguments: Any, options: Any, patterns: list[str]) -> None:
    with refused(*patterns):
        ato_jax.quantize(*arguments, **options)


def test_a_rotation_keeps_scores_and_spreads_outliers() -> None:
    for columns in (2, 64, 96):
        x, y = (normal(5, columns, seed=seed) for seed in (0, 1))
        turned = ato_jax.rotate(x)
        assert error(turned @ ato_jax.rotate(y).T, x @ y.T) < 1e-6
        one = ato_jax.rotate(jnp.eye(columns)[0])
        n = columns & -columns
        assert np.count_nonzero(one) == n
        assert np.allclose(np.abs(np.asarray(one))[np.asarray(one) != 0], n**-0.5)
    assert ato_jax.rotate(x.astype("float16")).dtype == "float16"
    for wrong in (jnp.ones((2, 3)), jnp.ones((2, 0)), jnp.ones(())):
        with refused("x must have a last axis of an even size"):
            ato_jax.rotate(wrong)


def test_a_rotation_lowers_the_error_beside_outliers() -> None:
    """Two of 64 columns are 8 times the others, in queries and keys."""
    q, k, v = (normal(1, 64, 2, 64, seed=seed) for seed in range(3))
    q, k = (x.at[..., :2].multiply(8.0) for x in (q, k))

    def found(turn: Any) -> float:
        values, scales = quantised([turn(q), turn(k), v])
        out = ato_jax.attention(*values, scales=scales, scale=0.01)
        return error(out, ato_jax.attention(q, k, v, scale=0.01))

    assert found(ato_jax.rotate) < 0.6 * found(lambda x: x)


def test_arrays_of_a_mesh_with_explicit_axes() -> None:
    mesh = jax.make_mesh((1, 1), ("b", "h"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        arrays = [
            jax.device_put(array, jax.NamedSharding(mesh, jax.P("b", None, "h", None)))
            for array in wide()
        ]
        values, scales = quantised([ato_jax.rotate(array) for array in arrays])
        assert jax.typeof(scales[0]).sharding.spec == jax.P("b", "h")
        for function in FUNCTIONS.values():
            out = jax.jit(function)(*values, scales=scales)
            assert jax.typeof(out).sharding.spec == jax.P("b", None, "h", None)
