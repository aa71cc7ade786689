"""What ato_torch does not compute with: errors that name the argument and say what to do."""

import warnings

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

from torch._subclasses import FakeTensorMode  # noqa: E402

import ato_torch  # noqa: E402
from ato_torch import _bridge  # noqa: E402

B, H, T, S, D = 2, 4, 7, 9, 16
FUNCTIONS = (ato_torch.attention, ato_torch.linear_attention)


def nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        pieces = [torch.zeros(3, H, D), torch.zeros(5, H, D)]
        return torch.nested.nested_tensor(pieces, layout=layout)


def quantised(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they will go
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


# How a tensor becomes what is refused, and what is said after its name.
KINDS = {
    "meta": (lambda x: x.to("meta"), "must be on cpu as query is, got meta; move it there"),
    "sparse": (lambda x: x.to_sparse(), "must be a dense tensor, got torch.sparse_coo; call to_d"),
    "mkldnn": (lambda x: x.to_mkldnn(), "must be a dense tensor, got torch._mkldnn; call to_dens"),
    "nested": (
        lambda _: nested(torch.strided), "must be a dense tensor, got a nested one; pad it by to_"
    ),
    "jagged": (
        lambda _: nested(torch.jagged), "must be a dense tensor, got a nested one; pad it by to_"
    ),
    "quantised": (quantised, "must be .*float32, got torch.qint8; dequantize"),
    "float64": (lambda x: x.double(), "must be .*float32, got torch.float64; convert it first"),
    "float8": (lambda x: x.to(torch.float8_e5m2), "must be .* got torch.float8_e5m2; convert it"),
    "complex": (lambda x: x.cfloat(), "must be .*float32, got torch.complex64; convert it first"),
    "int32": (lambda x: x.int(), "must be .*float32, got torch.int32; convert it first"),
    "bool": (lambda x: x.bool(), "must be .*float32, got torch.bool; convert it first"),
    "array": (lambda x: x.numpy(), "must be a torch.Tensor, got ndarray"),
    "nothing": (lambda _: None, "must be a torch.Tensor, got NoneType"),
}  # fmt: skip
# What a mask may be and the others not, and what is said of it in other words.
OF_A_MASK = {
    "bool": None,
    "quantised": "must be bool, float32 or query's torch.float32, got torch.qint8; convert it",
    "float64": "must be bool, float32 or query's torch.float32, got torch.float64; convert it",
    "float8": "must be bool, float32 or query's torch.float32, got torch.float8_e5m2; convert",
    "complex": "must be bool, float32 or query's torch.float32, got torch.complex64; convert it",
    "int32": "must be bool, float32 or query's torch.float32, got torch.int32; convert it",
    "nothing": None,
}


def arguments():
    return {
        "query": torch.zeros(B, H, T, D),
        "key": torch.zeros(B, H, S, D),
        "value": torch.zeros(B, H, S, D),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_other_kinds(kind):
    change, message = KINDS[kind]
    for function in FUNCTIONS:
        for name, tensor in arguments().items():
            if (name, kind) == ("query", "meta"):
                message_here = "key must be on meta as query is, got cpu; move it there"
            else:
                message_here = f"{name} {message}"
            with pytest.raises(ValueError, match=message_here):
                function(**arguments() | {name: change(tensor)})
    message = OF_A_MASK.get(kind, message)
    if message is not None:
        with pytest.raises(ValueError, match=f"attn_mask {message}"):
            ato_torch.attention(**arguments(), attn_mask=change(torch.zeros(T, S)))


def test_other_arguments():
    zeros = torch.zeros(H, dtype=torch.float64)
    with pytest.raises(ValueError, match="sinks must be .* got torch.float64; convert it first"):
        ato_torch.attention(**arguments(), sinks=zeros)
    with pytest.raises(ValueError, match="decay must be .* got torch.float64; convert it first"):
        ato_torch.linear_attention(**arguments(), decay=zeros)
    for name in ("segment_ids", "q_segment_ids", "kv_lengths", "query_offset"):
        with pytest.raises(ValueError, match=f"{name} must hold integers, got torch.float32"):
            ato_torch.attention(**arguments(), **{name: torch.zeros(B)})
        with pytest.raises(ValueError, match=f"{name} must be on cpu as query is, got meta; move"):
            given = torch.zeros(B, device="meta", dtype=torch.int64)
            ato_torch.attention(**arguments(), **{name: given})


def test_masked_arrays():
    """NumPy would ignore their masks."""
    masked = np.ma.masked_array([1, 2], mask=[False, True])
    for name in ("q_lengths", "kv_lengths", "segment_ids", "q_segment_ids"):
        for function in FUNCTIONS:
            for given in (masked, [masked]):
                with pytest.raises(ValueError, match=f"{name} must not be a masked array"):
                    function(**arguments(), **{name: given})


def test_what_explain_does_not_know():
    for function in (None, "attention", 3, torch.zeros(2)):
        with pytest.raises(ValueError, match="function must be one of ato_torch's, got"):
            ato_torch.explain(function, **arguments())
    with pytest.raises(ValueError, match="function must be one of ato_torch's: .* does not call"):
        ato_torch.explain(lambda **_: None, **arguments())


@pytest.mark.parametrize("flag", ["False", 0, 1.0, None, torch.tensor(True), np.ones(2, bool)])
def test_flags(flag):
    names = {
        ato_torch.attention: ("is_causal", "enable_gqa", "return_lse"),
        ato_torch.linear_attention: ("causal", "return_state"),
    }
    for function, flags in names.items():
        for name in flags:
            with pytest.raises(ValueError, match=f"{name} must be True or False"):
                function(**arguments(), **{name: flag})


@pytest.mark.parametrize(
    "shape", [(T, S + 1), (S, T), (3, 1, T, S), (S,), (1, B, H, T, S)], ids=str
)
def test_a_mask_of_a_wrong_shape(shape):
    for mask in (torch.zeros(shape), torch.ones(shape, dtype=torch.bool)):
        with pytest.raises(ValueError, match="attn_mask must broadcast to .* T, S. = .2, 4, 7, 9."):
            ato_torch.attention(**arguments(), attn_mask=mask)


def test_a_number_has_no_gradient():
    number = torch.tensor(0.5)
    for function, names in zip(
        FUNCTIONS, [("scale", "softcap", "dropout_p"), ("scale", "eps")], strict=True
    ):
        for name in names:
            options = {"normalize": False} if (function, name) == (FUNCTIONS[1], "scale") else {}
            function(**arguments(), **options, **{name: number})
            with pytest.raises(ValueError, match=f"{name} must be a number.*would get none; give"):
                function(**arguments(), **options, **{name: number.clone().requires_grad_()})


def test_zeros_that_take_no_memory():
    """As PyTorch's derivatives have them: they have no address."""
    tensors = arguments() | {"value": torch._efficientzerotensor((B, H, S, D))}
    (dense,) = _bridge.dense([tensors["value"]])
    assert dense.data_ptr()
    assert not ato_torch.attention(**tensors).any()


def test_all_on_meta():
    tensors = {name: tensor.to("meta") for name, tensor in arguments().items()}
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match="query is on meta, .* take FakeTensorMode"):
            function(**tensors)


def test_a_boolean_mask_has_no_gradient():
    """PyTorch says so, whoever asks; nobody gets zeros."""
    tensors = {name: tensor.requires_grad_() for name, tensor in arguments().items()}
    mask = torch.ones(T, S, dtype=torch.bool)

    def loss(mask):
        return ato_torch.attention(**tensors, attn_mask=mask).sum()

    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(loss(mask), mask)
    with pytest.raises(RuntimeError, match="floating point dtype can require gradients"):
        torch.func.grad(loss)(mask)


@pytest.mark.skipif(_bridge.has_gpu(), reason="JAX has a GPU here")
def test_on_a_gpu_that_jax_has_not():
    """Tensors on CUDA, as PyTorch feigns them, beside a JAX for CPUs."""
    with FakeTensorMode(), torch.device("cuda"):
        tensors = arguments()
        for function in FUNCTIONS:
            with pytest.raises(ValueError, match="query is on cuda:0, but JAX finds no GPU: insta"):
                function(**tensors)
        token = [torch.zeros(B, H, D) for _ in range(3)]
        with pytest.raises(ValueError, match="query is on cuda:0, but JAX finds no GPU: insta"):
            state = (torch.zeros(B, H, D, D), torch.zeros(B, H, D))
            ato_torch.linear_attention_step(*token, state)
        mixed = tensors | {"value": torch.zeros(B, H, S, D, device="cpu")}
        with pytest.raises(ValueError, match="value must be on cuda:0 as query is, got cpu; move"):
            ato_torch.attention(**mixed)
