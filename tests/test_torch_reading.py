"""Float8 tensors whose 8 bits kernels read: which calls these are, that no wide copy is made, and
what compilers, autocast and `explain` see. On a CPU a stand-in takes the place of Hopper's kernels:
values times scales in float32, without the rounding of a widened call."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.attention import reading as attention_reading
from ato_jax.ops.linear_attention import api as linear_api
from ato_jax.ops.linear_attention import reading as linear_reading

torch = pytest.importorskip("torch")

import ato_torch  # noqa: E402
from ato_torch import (  # noqa: E402
    _adapters,
    _bridge,
    _calls,
    _direct,
    _float8,
    _ops,
    _programs,
)

explaining = importlib.import_module("ato_torch.explain")  # the package has a function named so

H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])
FLOAT8 = torch.float8_e4m3fn
B, H, G, T = 2, 4, 2, 76
OPS = ("attention", "linear_attention")
each_op = pytest.mark.parametrize("op", OPS)
# As of the calls that these kernels serve where a backend is named.
NAMED: dict[str, Any] = {"implementation": "mosaic_gpu"}


def drawn(D: int = 128, layout: str = "bhtd") -> tuple[list[Any], list[Any]]:
    """Tensors and their scales, which are no powers of two."""
    draw = np.random.default_rng(D)
    tensors, scales = [], []
    for heads in (H, G, G):
        shape = (B, heads, T, D) if layout == "bhtd" else (B, T, heads, D)
        tensors.append(torch.tensor(draw.normal(size=shape) * 9).to(FLOAT8))
        scales.append(torch.tensor(draw.uniform(0.02, 0.2, (B, heads)), dtype=torch.float32))
    return tensors, scales


def in_jax(tensors: Any) -> list[jax.Array]:
    """Arrays of the same bits."""
    return [
        jnp.asarray(tensor.cpu().float().numpy(), str(tensor.dtype).removeprefix("torch."))
        for tensor in tensors
    ]


def call_of(op: str, tensors: Any, scales: Any, **options: Any) -> Any:
    """The call on tensors; heads in groups, as all tensors here have them."""
    if op == "attention":
        options.setdefault("enable_gqa", True)
        if "causal" in options:
            options["is_causal"] = options.pop("causal")
    return getattr(ato_torch, op)(*tensors, scales=scales, **options)


def by_jax(op: str, tensors: Any, scales: Any, **options: Any) -> Any:
    """The result of `ato_jax` for the same arguments, in the layout "bhtd" unless they name one."""
    options = {"layout": "bhtd"} | options
    if op == "attention":
        options = {"query_offset": 0} | options
    function = functools.partial(getattr(ato_jax, op), **options)
    return jax.jit(lambda arrays, scales: function(*arrays, scales=scales))(
        in_jax(tensors), in_jax(scales) or None
    )


def equal(tensor: Any, array: jax.Array) -> bool:
    """Whether all bits are equal, and the dtypes."""
    assert str(tensor.dtype) == f"torch.{array.dtype}" and tuple(tensor.shape) == array.shape
    return bool((tensor.cpu().float().numpy() == np.asarray(array, np.float32)).all())


def product(array: jax.Array, scale: jax.Array, layout: str) -> jax.Array:
    return array.astype(jnp.float32) * jnp.expand_dims(scale, (1 if layout == "bthd" else 2, 3))


def stand_in(api: Any, count: list[str]) -> Callable[..., Any]:
    """The op in float32, of the 8 bits that a kernel would read."""

    def forward(spec: Any, config: Any, inputs: Any) -> Any:
        count.append(api.OP.name)
        plain = inputs.arrays if api is attention_api else inputs.without_scales()
        scales = inputs.q_scale, inputs.k_scale, inputs.v_scale
        q, k, v = (product(x, s, spec.layout) for x, s in zip(plain[:3], scales, strict=True))
        fields = dataclasses.fields(spec)
        kind = type(spec) if api is linear_api else attention_api.AttentionSpec
        wide = kind(**{field.name: getattr(spec, field.name) for field in fields})
        wide = dataclasses.replace(wide, dtype="float32")
        found = api.OP.backend("reference").forward(wide, None, plain._replace(q=q, k=k, v=v))
        return found._replace(out=found.out.astype(jnp.bfloat16))

    return forward


def forget() -> None:
    """Drops what was traced or remembered: other kernels would be in it."""
    jax.clear_caches()
    _programs.kept.clear()
    _float8._widened.clear()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A CPU as a Hopper card that reads 8 bits; the ops that were traced by the stand-in."""
    count: list[str] = []
    forget()
    monkeypatch.setattr(device, "of_call", lambda arrays: H200)
    monkeypatch.setattr(_float8, "has_readers", lambda place: True)
    monkeypatch.setattr(_adapters, "READS_LAUNCHES", True)
    for api, reading in ((attention_api, attention_reading), (linear_api, linear_reading)):
        backend = type(reading.OP.backend(reading.BACKEND))
        monkeypatch.setattr(backend, "forward", staticmethod(stand_in(api, count)))
    yield count
    forget()


@pytest.fixture
def unwidened(read: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As `read`, and whatever makes a wide copy fails."""
    monkeypatch.setattr(_float8, "product", lambda *arguments: pytest.fail("it was widened"))
    return read


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("attention", {}),
    "softmax causal": ("attention", {"causal": True}),
    "linear": ("linear_attention", {}),
    "linear causal, state": ("linear_attention", {"causal": True, "return_state": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_bits_of_ato_jax(name: str, unwidened: list[str]) -> None:
    """Those of the 8 bits that are read, with no wide copy; float16 has bfloat16's digits."""
    op, options = CALLS[name]
    tensors, scales = drawn()
    for dtype in (None, "float16"):
        given = options | NAMED | {"out_dtype": dtype}
        found = call_of(op, tensors, scales, **given)
        assert op in unwidened
        wanted = by_jax(op, tensors, scales, **given)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        assert all([equal(tensor, array) for tensor, array in pairs])
    # Another road rounds the values times their scales.
    wide = [_wide(*pair) for pair in zip(tensors, scales, strict=True)]
    rounded = by_jax(op, wide, [], implementation="xla", **options)
    found = call_of(op, tensors, scales, **given | {"out_dtype": None})
    assert not equal(*(jax.tree.leaves(each)[0] for each in (found, rounded)))


def _wide(tensor: Any, scale: Any) -> Any:
    return (tensor.float() * scale[..., None, None]).bfloat16()


def test_arguments_as_they_come(unwidened: list[str]) -> None:
    """Without a batch, with broadcast axes, in the other order of memory, with options."""
    tensors, scales = drawn()
    whole = call_of("attention", tensors, scales, **NAMED)
    alone = call_of("attention", [x[0] for x in tensors], [s[0] for s in scales], **NAMED)
    assert torch.equal(alone, whole[0])
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert torch.equal(call_of("attention", turned, scales, **NAMED), whole)
    # One head of keys for all batch entries.
    shared = [tensors[0], *(x[:1, :1] for x in tensors[1:])]
    of_shared = [scales[0], *(s[:1, :1] for s in scales[1:])]
    found = call_of("attention", shared, of_shared, enable_gqa=False, **NAMED)
    spread = [shared[0], *(x.expand(B, H, -1, -1).contiguous() for x in shared[1:])]
    by_hand = [scales[0], *(s.expand(B, H).contiguous() for s in of_shared[1:])]
    assert torch.equal(found, call_of("attention", spread, by_hand, **NAMED))
    mask = torch.randn(1, T).bfloat16()
    options: dict[str, Any] = {"window": (9, 3), "kv_lengths": [T, 40], "return_lse": True}
    out, lse = call_of("attention", tensors, scales, attn_mask=mask, **options, **NAMED)
    options["kv_lengths"] = np.array([T, 40])
    bias = in_jax([mask])[0][None, None]
    wanted = by_jax("attention", tensors, scales, bias=bias, **options, **NAMED)
    assert equal(out, wanted[0]) and equal(lse, wanted[1])
    assert not call_of("attention", tensors, scales, dropout_p=1.0, **NAMED).any()
    other, scales = drawn(layout="bthd")
    found = call_of("linear_attention", other, scales, layout="bthd", **NAMED)
    assert equal(found, by_jax("linear_attention", other, scales, layout="bthd", **NAMED))
    one = [x[0] for x in other], [s[0] for s in scales]
    assert torch.equal(call_of("linear_attention", *one, layout="bthd", **NAMED), found[0])


@each_op
@pytest.mark.parametrize("turned", [False, True])
def test_a_known_call(
    op: str, turned: bool, unwidened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third on, a call of the same shapes skips the checks of the op. Plans are JAX here.
    Scales that do not lie contiguous, other options and other dtypes are other calls."""
    taken: list[list[tuple[int, ...]]] = []

    def ready(function: Any, tensors: Any, which: Any, of_results: Any) -> Any:
        def plan(given: Any) -> Any:
            taken.append([tuple(x.shape) for x in given])
            found = _bridge.execute(function.jitted, _bridge.exchanged(given, which))
            return _bridge.exchanged(found, of_results[: len(found)]) if any(which) else found

        lie = _bridge.exchanged(tensors, which)
        return plan, tuple([not tensor.is_contiguous() for tensor in lie])

    monkeypatch.setattr(_direct, "ready", ready)
    tensors, scales = drawn()
    if turned:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    call = functools.partial(call_of, op, **NAMED)
    wanted = call(tensors, scales)
    assert not taken and equal(wanted, by_jax(op, tensors, scales, **NAMED))
    for _ in range(2):
        assert torch.equal(call(tensors, scales), wanted)
    assert taken == [[tuple(x.shape) for x in (*tensors, *scales)]]
    others = [x.flip(2) for x in tensors], [scale * 0.7 for scale in scales]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ops, "refuse_unread", lambda *arguments: pytest.fail("it was checked"))
        found = call(*others)
    assert equal(found, by_jax(op, *others, **NAMED)) and len(taken) == 2
    spread = [torch.stack([scale, scale], dim=-1)[..., 0] for scale in scales]
    for _ in range(3):
        assert torch.equal(call(tensors, spread), wanted)
    assert len(taken) == 3
    for dtype in ("float16", "bfloat16", "float16"):
        assert call(tensors, scales, out_dtype=dtype).dtype == getattr(torch, dtype)
    assert torch.equal(call(tensors, scales), wanted)


@pytest.mark.parametrize("drops", [0.0, 0.5])
def test_what_is_not_read_is_widened_as_before(drops: float, read: list[str]) -> None:
    """Once that is known, it is asked no more; one draw of the generator a call in either case."""
    tensors, scales = drawn()
    asked: list[Any] = []
    before = _ops.refuse_unread
    for options in ({}, {"out_dtype": "float32"}):
        options = options | {"implementation": "xla"}
        found = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_ops, "refuse_unread", lambda *a: (asked.append(a), before(*a)))
            for _ in range(3):
                torch.manual_seed(3)
                found.append(call_of("attention", tensors, scales, dropout_p=drops, **options))
        assert len(asked) == ("out_dtype" not in options) and not read
        asked.clear()
        assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_float8, "has_readers", lambda place: False)
            torch.manual_seed(3)
            unasked = call_of("attention", tensors, scales, dropout_p=drops, **options)
        assert torch.equal(unasked, found[0])


@each_op
def test_what_is_read_is_what_ato_jax_reads(op: str, read: list[str]) -> None:
    """By the same decision, but where only JAX can launch the kernels and none is named."""
    place = jax.devices("cpu")[0]
    for T, D, options in (
        (8192, 128, {}),
        (8192, 256, {}),
        (8192, 64, {}),
        (8192, 96, {}),
        (8192, 128, {"causal": True}),
        (8192, 128, {"implementation": "triton"}),
        (300, 64, {"implementation": "mosaic_gpu"}),
        (300, 128, {}),
        (8192, 128, {"out_dtype": "float16"}),
    ):
        options = {"implementation": None, "out_dtype": "bfloat16"} | options
        shapes = [((1, 16, T, D), "float8_e4m3fn")] * 3 + [((1, 16), "float32")] * 3
        structs = [jax.ShapeDtypeStruct(*each) for each in shapes]
        given = options | {"layout": "bhtd"}
        told = ato_jax.explain(op, *structs[:3], scales=structs[3:], **given)
        names = ("q", "k", "v", *_calls.SCALES)
        call = _calls.Call(op, names, tuple(_all_options(op, given)), False, False)
        found = _programs.reads_float8(call, place, shapes)
        assert found == ("read as 8 bits" in told.note), (T, D, options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_adapters, "READS_LAUNCHES", False)
            only_named = found and options["implementation"] is not None
            assert _programs.reads_float8(call, place, shapes) == only_named


def _all_options(op: str, given: dict[str, Any]) -> Any:
    others: dict[str, Any] = {"query_offset": 0} if op == "attention" else {"feature_map": "elu1"}
    return (given | others).items()


def test_which_devices_have_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, card = torch.device("cpu"), torch.device("cuda:0")
    assert not _float8.has_readers(cpu)
    with ato_jax.interpret():
        assert _float8.has_readers(cpu)
    monkeypatch.setattr(_bridge, "has_gpu", lambda: True)
    monkeypatch.setattr(_bridge, "jax_device", lambda place: place)
    for capability, wanted in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        here = dataclasses.replace(H200, capability=capability)
        monkeypatch.setattr(device, "describe", lambda place, here=here: here)
        _float8._card_has_readers.cache_clear()
        assert _float8.has_readers(card) == wanted
    _float8._card_has_readers.cache_clear()


def test_transforms_take_wide_tensors(read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether kernels would read their 8 bits is not asked."""
    tensors, scales = drawn()
    call = functools.partial(call_of, "attention", implementation="xla")
    wanted = call(tensors, scales)
    monkeypatch.setattr(_float8, "has_readers", lambda place: pytest.fail("it was asked"))
    mapped = torch.func.vmap(lambda *each: call(each[:3], each[3:]))(*tensors, *scales)
    assert not read
    torch.testing.assert_close(mapped, wanted)


@each_op
def test_compiled(op: str, read: list[str]) -> None:
    """One op in one graph, which decides when it runs, also for another length."""
    tensors, scales = drawn()
    of_float32 = {"implementation": "xla", "out_dtype": torch.float32}
    for options in (NAMED, {"implementation": "xla"}, of_float32):
        torch.compiler.reset()

        def call(tensors: Any, scales: Any, options: Any = options) -> Any:
            out = call_of(op, tensors, scales, **options)
            return out, out.dtype  # as the compiler sees it

        compiled = torch.compile(call, backend="eager", fullgraph=True)
        for length in (T, 66):
            some = [x[:, :, :length].contiguous() for x in tensors]
            with pytest.MonkeyPatch.context() as patch:
                if options == NAMED:
                    patch.setattr(_float8, "product", lambda *_: pytest.fail("it was widened"))
                out, dtype = compiled(some, scales)
            assert dtype == out.dtype
            assert torch.equal(out, call_of(op, some, scales, **options))
        assert (op in read) == (NAMED.items() <= options.items())
        read.clear()


@each_op
def test_under_autocast(op: str, unwidened: list[str]) -> None:
    tensors, scales = drawn()
    wanted = call_of(op, tensors, scales, **NAMED)
    with torch.autocast("cpu", dtype=torch.float16):
        found = call_of(op, tensors, scales, **NAMED)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)


def test_explain_records_the_call_that_runs(
    read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def road(function: Any, tensors: Any) -> Any:
        kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        return explaining.Road("direct", " ".join(kinds))

    monkeypatch.setattr(explaining, "_road", road)
    tensors, scales = drawn()
    explain = functools.partial(ato_torch.explain, ato_torch.linear_attention, *tensors)
    told = explain(scales=scales, **NAMED)
    kinds = ["float8_e4m3fn"] * 3 + ["float32"] * 3
    assert sorted(told.forward.why.split()) == sorted(kinds) and told.backward is None
    told = explain(scales=scales, implementation="xla")
    assert told.forward.why.split() == ["bfloat16"] * 3


def test_gradients_and_bad_arguments_are_refused(read: list[str]) -> None:
    tensors, scales = drawn()
    with pytest.raises(ato_jax.UnsupportedError, match="no derivative"):
        call_of("attention", tensors, [scales[0].clone().requires_grad_(), *scales[1:]], **NAMED)
    for changed, told in (
        ({"attn_mask": torch.zeros(T, T).half()}, "bool, float32 or query's torch.bfloat16, got"),
        ({"enable_gqa": False}, "pass enable_gqa=True"),
        ({"implementation": "mosaic_gpu.float8"}, "implementation must be None or one of"),
        ({"kv_lengths": [1, 2, 3]}, "kv_lengths must be"),
        ({"dropout_p": 2}, "dropout_p must be from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=told):
            call_of("attention", tensors, scales, **NAMED | changed)
    with pytest.raises(ValueError, match="key must be"):
        call_of("linear_attention", [tensors[0], tensors[1][..., :64], tensors[2]], scales)


def test_float8_numbers_drawn() -> None:
    """Finite, of both signs, and with the strides of those given."""
    tensors, scales = drawn()
    turned = [x.transpose(1, 2) for x in tensors]
    found = _direct._drawn([*turned, *scales])
    for one, other in zip(found, [*turned, *scales], strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert one.float().isfinite().all() and not torch.equal(one.float(), other.float())
        assert (one.float() < 0).any() == (one.dtype is FLOAT8)
        assert one.float().unique().numel() >= 4
    again = _direct._drawn([*turned, *scales])
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(found, again, strict=True))


def test_float8_where_dlpack_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bytes, which become the same values; other dtypes as before."""
    passed = []

    def into_jax(tensor: Any, stream: Any) -> jax.Array:
        if tensor.dtype is FLOAT8:
            raise BufferError("planted")
        passed.append(tensor.dtype)
        return jax.dlpack.from_dlpack(tensor)

    by_bytes = _bridge._with_float8(into_jax, torch.device("cpu"))
    (tensor, *_), scales = drawn()
    for each in (tensor, scales[0]):
        array = by_bytes(each, None)
        assert equal(each, array)
    assert passed == [torch.uint8, torch.float32]
    assert _bridge._with_float8(_bridge._public_in, torch.device("cpu")) is _bridge._public_in


# On a Hopper card, where no backend is named

# B, H, G, T, D: more of linear attention, so that its kernels are taken for the fastest.
SIZES = {"D128": (2, 8, 4, 2048, 128), "D256": (2, 8, 4, 2048, 256), "linear": (2, 8, 4, 4096, 128)}
ON_A_CARD = [
    ("attention", "D128", False),
    ("attention", "D128", True),
    ("attention", "D256", False),
    ("attention", "D256", True),
    ("linear_attention", "linear", False),
    ("linear_attention", "linear", True),
]
# Relative RMS error against float64 on the same values times scales.
LIMITS = {"attention": 3e-2, "linear_attention": 5e-3}


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    """A test of each call on a card, skipped where no kernel reads 8 bits."""

    @pytest.mark.gpu
    @pytest.mark.skipif(not _adapters.READS_LAUNCHES, reason="this JAX does not tell the launches")
    @pytest.mark.parametrize(("op", "size", "causal"), ON_A_CARD)
    @functools.wraps(test)
    def on_a_card(op: str, size: str, causal: bool, **fixtures: Any) -> None:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("it needs a Hopper GPU")
        test(op, size, causal, **fixtures)

    return on_a_card


def on_the_card(size: str) -> tuple[list[Any], list[Any]]:
    batch, heads, groups, length, D = SIZES[size]
    draw = torch.Generator("cuda").manual_seed(0)
    tensors, scales = [], []
    for number in (heads, groups, groups):
        shape = (batch, number, length, D)
        x = torch.randn(shape, generator=draw, device="cuda")
        scales.append(x.abs().amax((2, 3)) / 448 * 1.1)  # no powers of two
        tensors.append((x / scales[-1][..., None, None]).to(FLOAT8))
    return tensors, scales


def in_float64(op: str, tensors: Any, scales: Any, causal: bool) -> Any:
    q, k, v = (x.double() * s[..., None, None] for x, s in zip(tensors, scales, strict=True))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if op == "attention":
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    weights = q @ k.mT
    weights = weights.tril() if causal else weights
    return weights @ v / weights.sum(-1, keepdim=True)


@on_hopper
def test_numbers_on_a_card(op: str, size: str, causal: bool) -> None:
    """The bits of ato_jax for the same values, and what float64 gives within the budget of 8 bits.
    So does the other order of axes in memory."""
    tensors, scales = on_the_card(size)
    out = call_of(op, tensors, scales, causal=causal)
    assert out.is_cuda and equal(out, by_jax(op, tensors, scales, causal=causal))
    exact = in_float64(op, tensors, scales, causal)
    assert (out.double() - exact).norm() < LIMITS[op] * exact.norm()
    for _ in range(2):
        assert torch.equal(call_of(op, tensors, scales, causal=causal), out)
    turned = [x.transpose(1, 2).contiguous() for x in tensors]
    found = call_of(op, [x.transpose(1, 2) for x in turned], scales, causal=causal)
    wanted = by_jax(op, turned, scales, causal=causal, layout="bthd")
    assert equal(found.transpose(1, 2), wanted)


@on_hopper
def test_no_wide_copy_on_a_card(
    op: str, size: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the output, less memory than one wide copy of each tensor takes."""
    tensors, scales = on_the_card(size)
    call_of(op, tensors, scales, causal=causal)  # compiles
    monkeypatch.setattr(_float8, "product", lambda *arguments: pytest.fail("it was widened"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call_of(op, tensors, scales, causal=causal)
    beside = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert beside < 2 * sum(tensor.nbytes for tensor in tensors)


@on_hopper
def test_the_road_on_a_card(
    op: str, size: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched directly, by Hopper's kernels, without a copy; through JAX with the same bits."""
    tensors, scales = on_the_card(size)
    call = functools.partial(call_of, op, scales=scales, causal=causal)
    told = ato_torch.explain(call, tensors)
    assert told.forward.road == "direct" and told.backward is None, told
    assert "mosaic_gpu" in told.forward.why and "copy" not in told.forward.why, told
    if op == "linear_attention":
        assert "float8" in told.forward.why, told
    out = call(tensors)
    monkeypatch.setenv(_direct.SWITCH, "0")
    _programs.kept.clear()
    told = ato_torch.explain(call, tensors)
    assert told.forward.road == "through JAX", told
    assert torch.equal(call(tensors), out)
    _programs.kept.clear()


@on_hopper
def test_a_cuda_graph_on_a_card(op: str, size: str, causal: bool) -> None:
    tensors, scales = on_the_card(size)
    given = [x.clone() for x in tensors], [s.clone() for s in scales]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call_of(op, *given, causal=causal)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call_of(op, *given, causal=causal)
    for x, s in zip(*given, strict=True):
        x.copy_(x.flip(2))
        s.mul_(0.7)
    graph.replay()
    assert torch.equal(out, call_of(op, *given, causal=causal))
    assert not torch.equal(out, call_of(op, tensors, scales, causal=causal))


@on_hopper
def test_compiled_on_a_card(op: str, size: str, causal: bool) -> None:
    """In one graph, whose op reads the 8 bits, too."""
    tensors, scales = on_the_card(size)

    def call(tensors: Any, scales: Any) -> Any:
        return call_of(op, tensors, scales, causal=causal)

    compiled = torch.compile(call, fullgraph=True)
    assert torch.equal(compiled(tensors, scales), call(tensors, scales))


@on_hopper
def test_what_no_kernel_reads_on_a_card(op: str, size: str, causal: bool) -> None:
    """An output in float32, and the backend for other cards, by tensors that PyTorch widens."""
    tensors, scales = on_the_card(size)
    for options in ({"out_dtype": "float32"}, {"implementation": "triton"}):
        out = call_of(op, tensors, scales, causal=causal, **options)
        told = ato_torch.explain(
            functools.partial(call_of, op, tensors, scales), causal=causal, **options
        )
        assert "float8" not in told.forward.why, told
        exact = in_float64(op, tensors, scales, causal)
        limit = 2e-6 if "out_dtype" in options else LIMITS[op]
        assert (out.double() - exact).norm() < limit * exact.norm()
