"""The kernels for wide heads: interpreted, against the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import choosing, tuning
from ato_jax.device import SHARED_MEMORY, Device
from ato_jax.ops.attention import api
from ato_jax.ops.attention.spec import Outputs
from ato_jax.ops.attention.triton import wide, wide_backward
from tests import numerics

# Several blocks of columns of queries whatever the width, and several tiles of queries from 17 on.
SMALL_TILES = {"block_q": 16, "block_d": 64, "block_v": 128}
BACKWARD_TILES = {f"backward_{name}": size for name, size in SMALL_TILES.items()}


def draw(dtype="float32", B=1, T=16, S=16, H=1, G=1, D=320, V=320, layout="bthd", scale=1.0):
    generator = np.random.default_rng(0)

    def array(length, heads, width):
        shape = (B, length, heads, width) if layout == "bthd" else (B, heads, length, width)
        return jnp.asarray(scale * generator.normal(size=shape), dtype)

    return array(T, H, D), array(S, G, D), array(S, G, V)


def check(sizes, slices=1, **options):
    layout = {"layout": sizes["layout"]} if "layout" in sizes else {}
    wanted = numerics.oracle("attention", *draw(**sizes), **options, **layout)
    with ato_jax.interpret():
        result = numerics.run_backends(
            "triton.wide",
            "triton.wide",
            wanted,
            forward_config={**SMALL_TILES, "slices": slices},
            backward_config={**BACKWARD_TILES, "backward_slices": slices},
        )
    numerics.compare(result, wanted)


@pytest.mark.parametrize(
    "dtype, slices", [("float32", 3), ("float16", 1), ("bfloat16", 3)]
)
def test_numerics_by_dtype(dtype, slices):
    check(dict(dtype=dtype, T=16, S=13, H=2, G=2, D=320, V=576), slices, causal=True)


@pytest.mark.parametrize("dtype, dlse", [("bfloat16", 0.62744), ("float16", 0.625305)])
@pytest.mark.parametrize("H", [1, 2], ids=["one kernel", "several kernels"])
def test_gradients_through_lse_that_are_all_alike(dtype, dlse, H):
    """The gradient of each score is dlse / 160: in the middle of two numbers of the dtype, so that
    the sign of q_i . k_j decides how it is rounded."""
    q, k, v = draw(dtype, T=160, S=160, H=H, D=8, V=300, scale=0.01)
    do = (1e-3 * jnp.repeat(v, H, axis=2)).astype(dtype)
    cotangents = Outputs(do, jnp.full((1, 160, H), dlse, jnp.float32))
    wanted = numerics.oracle("attention", q, k, v, cotangents=cotangents, return_lse=True)
    with ato_jax.interpret():
        numerics.compare(numerics.run_backends("triton.wide", "triton.wide", wanted), wanted)


def segments(length):
    return np.arange(length)[None] // 7


KEY = jax.random.key(1)
GROUPS = dict(T=33, S=17, H=4, G=2, layout="bhtd", B=2)
LENGTHS = dict(kv_lengths=[0, 12], q_lengths=[33, 12])
DROPOUT = dict(dropout_rate=0.4, dropout_key=KEY)
BAND = dict(window=(5, 2), query_offset=-3)


@pytest.mark.parametrize(
    "sizes, slices, options",
    [
        (dict(D=1000, V=1536, T=5, S=9), 4, dict(return_lse=True)),
        (dict(D=7, V=300, T=1, S=17), 2, dict(causal=True, return_lse=True)),
        (GROUPS, 2, dict(causal=True, return_lse=True)),
        (dict(dtype="float16", **GROUPS), 1, dict(LENGTHS, return_lse=True)),
        (dict(T=9, S=20), 1, dict(BAND, softcap=1.5, scale=-0.05, sinks=[0.5])),
        (dict(T=20, S=20), 1, dict(precision="tf32", segment_ids=segments(20))),
        (dict(T=12, S=16), 2, dict(mask=np.eye(12, 16, 2, dtype=bool)[None, None])),
        (dict(T=17, S=16, H=2), 2, dict(DROPOUT, sinks=[0.5, -3.0], return_lse=True)),
    ],
    ids=lambda part: ",".join(part) if isinstance(part, dict) else str(part),
)
def test_numerics_by_feature(sizes, slices, options):
    options = {
        name: jnp.asarray(option) if isinstance(option, list | np.ndarray) else option
        for name, option in options.items()
    }
    check(sizes, slices, **options)


def test_bias_forward_and_its_gradient_refused():
    q, k, v = draw(T=9, S=16)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, 9, 16)), jnp.float32)
    wanted = numerics.oracle("attention", q, k, v, bias=bias)
    with ato_jax.interpret():
        call = functools.partial(ato_jax.attention, implementation="triton.wide")
        result = call(q, k, v, bias=bias)
        with pytest.raises(ato_jax.UnsupportedError, match="no kernel for a bias's gradient"):
            jax.grad(lambda bias: call(q, k, v, bias=bias).sum())(bias)
    out = {"out": wanted.exact["out"]}
    numerics.compare({"out": result}, dataclasses.replace(wanted, exact=out))


def test_padding_may_hold_anything():
    lengths = dict(q_lengths=jnp.array([7]), kv_lengths=jnp.array([5]))
    q, k, v = (
        array.at[:, length:].set(jnp.nan)
        for array, length in zip(draw(T=12, S=9), (7, 5, 5), strict=True)
    )
    with ato_jax.interpret():
        out, pull = jax.vjp(
            functools.partial(ato_jax.attention, **lengths, implementation="triton.wide"), q, k, v
        )
        found = (out, *pull(out.at[:, 7:].set(jnp.nan)))
    assert all(bool(jnp.isfinite(array).all()) for array in found)


def test_which_calls_it_serves():
    def reason(phase="forward", **sizes):
        q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw(**sizes))
        found = []

        def prepared(q, k, v):
            found.append(api.prepare(q, k, v).spec)
            return q

        jax.eval_shape(prepared, q, k, v)
        return wide.unsupported(found[0], phase)

    assert reason(D=8192, V=8192) is None and reason("backward", D=257, V=1) is None
    assert reason(D=256, V=256) == "D or V must be at least 257, got 256 and 256"
    assert reason(D=8193) == "D must be at most 8192, got 8193"
    assert reason(T=257) == "T must be at most 256, got 257"
    assert reason(S=257) == "S must be at most 256, got 257"


@pytest.mark.lowering
def test_triton_means_these_kernels_too():
    q, k, v = draw(D=513)
    with ato_jax.interpret():
        told = ato_jax.explain(q=q, k=k, v=v, op="attention", implementation="triton")
        assert told.forward.backend == told.backward.backend == "triton.wide"
    with pytest.raises(ato_jax.UnsupportedError, match="forward: triton: needs a GPU"):
        ato_jax.attention(q, k, v, implementation="triton")


def test_slices_fill_the_card():
    device = Device("gpu", "another card", (9, 0), 132, SHARED_MEMORY[9, 0])
    request = api.prepare(*draw("bfloat16", D=8192, V=8192, H=2, G=2))
    config = tuning.config("attention", "triton.wide", wide, request.spec, device)
    assert 1 < config.slices <= 66 and 1 < config.backward_slices <= 66
    request = api.prepare(*draw("bfloat16", B=70, T=1, S=1, H=2, G=2, D=512, V=512))
    config = tuning.config("attention", "triton.wide", wide, request.spec, device)
    assert config.slices == config.backward_slices == 1


@pytest.mark.parametrize(
    "sizes, slices, options",
    [
        (dict(dtype="bfloat16", T=16, S=13, H=2, G=2), 1, dict(causal=True)),
        (dict(T=13, S=16, B=2, layout="bhtd"), 3, dict(kv_lengths=jnp.array([9, 16]))),
        (dict(dtype="float16", T=17, S=13, H=4, G=2), 1, dict(softcap=2.0)),
    ],
    ids=str,
)
def test_gradients_by_kept_products(monkeypatch, request, sizes, slices, options):
    """The derivative that JAX takes keeps them, and does not read q and k for them again."""
    rule = wide.default_config
    tiles = {**SMALL_TILES, **BACKWARD_TILES, "slices": slices, "backward_slices": slices}
    monkeypatch.setattr(
        wide.BACKEND,
        "default_config",
        lambda *problem: dataclasses.replace(rule(*problem), **tiles),
    )
    tuning._config.cache_clear()
    request.addfinalizer(tuning._config.cache_clear)
    kept = []
    find = wide_backward.kept_products

    def kept_products(outputs):
        kept.append(find(outputs))
        return kept[-1]

    monkeypatch.setattr(wide_backward, "kept_products", kept_products)
    q, k, v = draw(**sizes)
    options = options | {"layout": sizes.get("layout", "bthd")}
    wanted = numerics.oracle("attention", q, k, v, **options)
    with ato_jax.interpret():
        found = numerics.run(
            "attention", "triton.wide", q, k, v, cotangents=wanted.cotangents, **options
        )
    numerics.compare(found, wanted)
    (products,) = kept
    assert products.shape[2:] == (slices, sizes["T"], sizes["S"])


@pytest.mark.lowering
def test_only_calls_of_several_blocks_are_taken_unasked():
    device = Device("gpu", "another card", (9, 0), 132, SHARED_MEMORY[9, 0])

    def backend(B, implementation=None, **sizes):
        spec = api.prepare(*draw("bfloat16", **{"B": 1, "D": 513, **sizes})).spec
        spec = dataclasses.replace(spec, B=B)
        call = choosing.Call(api.OP, spec, implementation, device, False)
        chosen = {choosing.choose(call, phase).backend for phase in choosing.PHASES}
        (name,) = chosen
        return name

    assert backend(B=7) == "xla" and backend(B=8) == "triton.wide"
    assert backend(B=1, T=65, S=1, H=4) == "triton.wide" and backend(B=1, T=64, H=4) == "xla"
    # Heads that the kernels of whole rows take, too, and are no faster at.
    assert backend(B=7, D=300) == "xla" and backend(B=8, D=300) == "triton.wide"
    assert backend(B=1, implementation="triton") == "triton.wide"
    # What the kernels do not take is not asked whether it would pay.
    assert backend(B=67, T=300, S=300) == "xla"


@pytest.mark.lowering
def test_calls_with_a_bias_leave_what_other_kernels_read():
    """The gradient of a bias is the other kernels', which want more than the rounded output."""
    call = choosing.Call(
        api.OP,
        api.prepare(*draw("bfloat16", B=8), bias=jnp.zeros((1, 1, 16, 16))).spec,
        "triton",
        Device("gpu", "another card", (9, 0), 132, SHARED_MEMORY[9, 0]),
        False,
    )
    assert choosing.choose(call, "forward").backend == "triton.wide"
    call = dataclasses.replace(call, spec=call.spec.for_backward())
    assert {choosing.choose(call, phase).backend for phase in choosing.PHASES} == {"triton"}
    wide_call = dataclasses.replace(call, spec=dataclasses.replace(call.spec, D=600))
    with pytest.raises(ato_jax.UnsupportedError, match="no kernel for a bias's gradient"):
        choosing.choose(wide_call, "forward")


def test_no_sequences():
    q, k, v = draw(B=0, D=600, V=300)
    with ato_jax.interpret():
        out, pull = jax.vjp(functools.partial(ato_jax.attention, implementation="triton"), q, k, v)
        assert out.shape == (0, 16, 1, 300) and pull(out)[0].shape == q.shape
