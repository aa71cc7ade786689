"""float8_e4m3fn tensors: what ato_jax gives for the same values and scales, and clear refusals."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import ato_torch  # noqa: E402
from ato_torch import _float8  # noqa: E402

B, T, H, G, D = 2, 8, 4, 2, 8
FLOAT8 = torch.float8_e4m3fn


@pytest.fixture(params=[False, True], ids=["unasked", "asked"])
def has_readers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether calls ask if kernels read their 8 bits, as on Hopper; none reads those here."""
    monkeypatch.setattr(_float8, "has_readers", lambda place: request.param)
    _float8._widened.clear()


asked_or_not = pytest.mark.usefixtures("has_readers")


def drawn(layout: str = "bhtd") -> tuple[list[Any], list[Any]]:
    """Tensors and their scales, some of which are no powers of two."""
    draw = np.random.default_rng(0)
    tensors, scales = [], []
    for heads in (H, G, G):
        shape = (B, heads, T, D) if layout == "bhtd" else (B, T, heads, D)
        tensors.append(torch.tensor(draw.normal(size=shape) * 9).to(FLOAT8))
        scales.append(torch.tensor(draw.uniform(0.02, 0.2, (B, heads)), dtype=torch.float32))
    return tensors, scales


def in_jax(tensors: list[Any]) -> list[Any]:
    return [
        jnp.asarray(tensor.float().numpy(), "float8_e4m3fn" if tensor.dtype == FLOAT8 else None)
        for tensor in tensors
    ]


def same(tensor: Any, array: Any) -> bool:
    assert str(tensor.dtype) == f"torch.{array.dtype}" and tuple(tensor.shape) == array.shape
    difference = tensor.float().numpy() - np.asarray(array, np.float32)
    return bool(np.linalg.norm(difference) < 5e-3 * np.linalg.norm(np.asarray(array, np.float32)))


@asked_or_not
def test_attention() -> None:
    tensors, scales = drawn()
    arrays, factors = in_jax(tensors), in_jax(scales)
    call = functools.partial(ato_torch.attention, scales=scales, enable_gqa=True)
    for dtype, name in ((None, None), (torch.float32, "float32")):
        out, lse = call(*tensors, out_dtype=dtype, return_lse=True)
        wanted = ato_jax.attention(
            *arrays, scales=factors, out_dtype=name, layout="bhtd", return_lse=True
        )
        assert same(out, wanted[0]) and same(lse, wanted[1])
    plain = call(*tensors)
    assert torch.equal(call(*tensors, out_dtype="float16"), plain.half())
    alone = call(*(tensor[0] for tensor in tensors), scales=[scale[0] for scale in scales])
    assert torch.equal(alone, plain[0])


@asked_or_not
def test_linear_attention_and_its_step() -> None:
    for layout in ("bhtd", "bthd"):
        tensors, scales = drawn(layout)
        arrays, factors = in_jax(tensors), in_jax(scales)
        options: Any = {"causal": True, "layout": layout, "return_state": True}
        out, state = ato_torch.linear_attention(*tensors, scales=scales, **options)
        wanted, last = ato_jax.linear_attention(*arrays, scales=factors, **options)
        assert same(out, wanted) and same(state.kv, last.kv)
    zeros = torch.zeros(B, G, D, D), torch.zeros(B, G, D)
    for t in range(T):
        token = [tensor[:, t] for tensor in tensors]
        step, zeros = ato_torch.linear_attention_step(*token, zeros, scales=scales)
        assert same(step, wanted[:, t])


@asked_or_not
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"key": lambda x: x.float()}, "must all be torch.float8_e4m3fn or none"),
        ({"query": lambda x: x.float()}, "must all be torch.float8_e4m3fn or none"),
        ({"scales": lambda x: None}, "scales must be (query_scale"),
        (
            {"scales": lambda x: x[:2]},
            "value_scale [B, G]) with tensors of torch.float8_e4m3fn, got 2 of them",
        ),
        ({"scales": lambda x: [x[1], *x[1:]]}, "query_scale must be one number for each head"),
        (
            {"scales": lambda x: [*x[:2], x[2].double()]},
            "value_scale must be float32, got torch.float64; pass value_scale.float()",
        ),
        (
            {"scales": lambda x: [x[0], x[1].half(), x[2]]},
            "key_scale must be float32, got torch.float16; pass key_scale.float()",
        ),
        (
            {"scales": lambda x: [x[0].int(), *x[1:]]},
            "query_scale must be float32, got torch.int32; pass query_scale.float()",
        ),
        ({"scales": lambda x: [x[0].numpy(), *x[1:]]}, "query_scale must be a torch.Tensor"),
        ({"scales": lambda x: [x[0], -x[1], x[2]]}, "key_scale must be positive and finite"),
        ({"scales": lambda x: [x[0] * torch.inf, *x[1:]]}, "query_scale must be positive and"),
        ({"scales": lambda x: [x[0] * 1e-40, *x[1:]]}, "query_scale must be positive and finite"),
        ({"out_dtype": lambda x: torch.float64}, "out_dtype must be one of"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], told: str) -> None:
    tensors, scales = drawn()
    right = dict(zip(("query", "key", "value"), tensors, strict=True)) | {"scales": scales}
    given = right | {name: change(right.get(name)) for name, change in changed.items()}
    with pytest.raises(ValueError, match=re.escape(told)):
        ato_torch.attention(**given, enable_gqa=True)
    with pytest.raises(ValueError, match=re.escape(told)):
        ato_torch.linear_attention(**given)


@asked_or_not
def test_what_goes_with_float8_alone() -> None:
    wide, scales = [tensor.float() for tensor in drawn()[0]], drawn()[1]
    for name, value in (("scales", scales), ("out_dtype", torch.float32)):
        with pytest.raises(ValueError, match=f"^{name} goes with query, key and value of"):
            ato_torch.linear_attention(*wide, **{name: value})


@asked_or_not
def test_a_wrong_layout() -> None:
    tensors, scales = drawn()
    with pytest.raises(ValueError, match="^layout must be one of"):
        ato_torch.linear_attention(*tensors, scales=scales, layout="btdh")


def test_a_product_is_rounded_once() -> None:
    tensors, scales = drawn()
    for wide in (torch.bfloat16, torch.float32):
        found = _float8.product(tensors[1], scales[1], -3, 3, wide)
        wanted = (tensors[1].float() * scales[1][..., None, None]).to(wide)
        assert found.dtype == wide and torch.equal(found, wanted)


@asked_or_not
def test_under_autocast_out_dtype_decides() -> None:
    """As without autocast, which would round float32 to bfloat16."""
    tensors, scales = drawn()
    call = functools.partial(ato_torch.linear_attention, *tensors, scales=scales)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(out_dtype="float32")
        # What follows is under autocast again.
        assert (out[0, 0] @ out[0, 0].T).dtype == torch.bfloat16
    assert torch.equal(out, call(out_dtype="float32"))


@asked_or_not
def test_compiled() -> None:
    """In one graph, and refused there where a gradient is asked for."""
    tensors, scales = drawn()

    def causal(scale: Any) -> Any:
        options: Any = {"is_causal": True, "enable_gqa": True, "out_dtype": torch.float32}
        return ato_torch.attention(*tensors, scales=(scale, *scales[1:]), **options)

    compiled = torch.compile(causal, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(scales[0]), causal(scales[0]))
    with pytest.raises(Exception, match="no derivative"):
        compiled(scales[0].clone().requires_grad_())


@asked_or_not
def test_gradients_are_refused() -> None:
    tensors, scales = drawn()
    decay = torch.full((G,), -0.1, requires_grad=True)
    with pytest.raises(ato_jax.UnsupportedError, match="no derivative.*no_grad.*autograd.Function"):
        ato_torch.linear_attention(*tensors, scales=scales, decay=decay, causal=True)
    with torch.no_grad():
        ato_torch.linear_attention(*tensors, scales=scales, decay=decay, causal=True)
    kept = scales[2].clone().requires_grad_()
    with pytest.raises(ato_jax.UnsupportedError, match="no derivative"):
        ato_torch.attention(*tensors, scales=(*scales[:2], kept), enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["attention", "linear_attention"])
def test_on_a_gpu(op: str) -> None:
    """Against float64 on the same values, within bfloat16's budget, since scales are powers of 2.

    The second call of its kind is launched directly, if anything is.
    """
    draw = torch.Generator().manual_seed(0)
    tensors = [
        (torch.randn(2, heads, 192, 64, generator=draw) * 64).to(FLOAT8) for heads in (4, 4, 4)
    ]
    scales = [2.0 ** torch.randint(-7, -4, (2, 4), generator=draw) for _ in tensors]
    q, k, v = (x.double() * s[..., None, None] for x, s in zip(tensors, scales, strict=True))
    if op == "attention":
        exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        call = functools.partial(ato_torch.attention, is_causal=True)
    else:
        weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
        exact = weights @ v / weights.sum(-1, keepdim=True)
        call = functools.partial(ato_torch.linear_attention, causal=True)
    on_card = [tensor.cuda() for tensor in tensors]
    for _ in range(2):
        out = call(*on_card, scales=[scale.cuda() for scale in scales])
        assert out.is_cuda and out.dtype == torch.bfloat16
        assert (out.cpu().double() - exact).norm() < 3e-3 * exact.norm()
