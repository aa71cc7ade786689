"""ato_torch against PyTorch itself: values, gradients, meaning, lifetimes and errors."""

import gc
import importlib.util
import sys
import warnings

import jax
import numpy as np
import pytest

from tests import numerics

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)
F = torch.nn.functional

import ato_jax  # noqa: E402
import ato_torch  # noqa: E402
from ato_jax import LinearState, UnsupportedError  # noqa: E402
from ato_torch import _bridge, _checks  # noqa: E402

B, H, T, S, D = 2, 4, 7, 9, 16
SHAPES = ((B, H, T, D), (B, H, S, D), (B, H, S, D))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(*shapes, dtype=torch.float32, seed=0, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_(requires_grad)
        for shape in shapes
    ]


def results(function, tensors, cotangent):
    """The output and the gradients of all tensors that want one, by name; q, k, v, then others."""
    names = ("q", "k", "v", "bias")
    wanted = {
        name: tensor
        for name, tensor in zip(names, tensors, strict=False)
        if tensor is not None and tensor.requires_grad
    }
    out = function(*tensors)
    gradients = torch.autograd.grad(out, list(wanted.values()), cotangent.to(out.dtype))
    return {"out": out.detach()} | {
        f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)
    }


def upcast(tensors, dtype):
    return [
        tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
        if tensor is not None and tensor.is_floating_point()
        else tensor
        for tensor in tensors
    ]


def array(tensor):
    """As NumPy sees it, bfloat16 included."""
    return np.asarray(jax.dlpack.from_dlpack(tensor.detach().contiguous()))


def check(function, peer, tensors):
    """`function` on the tensors against `peer` in float64, within the budgets of the dtype."""
    shape = peer(*(tensor if tensor is None else tensor.detach() for tensor in tensors)).shape
    (cotangent,) = draw(shape, seed=1, requires_grad=False)
    cotangent = cotangent.to(tensors[0].dtype)
    found = results(function, tensors, cotangent)
    exact = results(peer, upcast(tensors, torch.float64), cotangent)
    ideal = results(peer, upcast(tensors, torch.float32), cotangent)
    assert found.keys() == exact.keys()
    for name in exact:
        numerics.check(
            name,
            array(found[name]),
            exact[name].numpy(),
            dtype=str(tensors[0].dtype).removeprefix("torch."),
            ideal=array(ideal[name].to(found[name].dtype)),
        )
        assert found[name].dtype == (tensors[0] if name == "out" else found[name]).dtype


def check_attention(tensors, **options):
    check(
        lambda *tensors: ato_torch.attention(*tensors, **options),
        lambda *tensors: F.scaled_dot_product_attention(*tensors, **options),
        tensors,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_sdpa(dtype):
    check_attention(draw(*SHAPES, dtype=dtype))


@pytest.mark.parametrize("sizes", [(T, S), (S, T)], ids=["T < S", "T > S"])
def test_causal_is_top_left(sizes):
    T, S = sizes
    check_attention(draw((B, H, T, D), (B, H, S, D), (B, H, S, D)), is_causal=True)


def test_scale_value_size_and_grouped_heads():
    tensors = draw((B, H, T, D), (B, 2, S, D), (B, 2, S, 5))
    check_attention(tensors, scale=0.3, enable_gqa=True)


@pytest.mark.parametrize("heads", [(4, 2, 1), (4, 1, 2), (6, 2, 3)], ids=str)
def test_other_heads_in_the_value_than_in_the_key(heads):
    H, G, of_value = heads
    check_attention(draw((B, H, T, D), (B, G, S, D), (B, of_value, S, 5)), enable_gqa=True)


def test_all_weights_dropped():
    tensors = draw(*SHAPES)
    out, lse = ato_torch.attention(*tensors, dropout_p=1.0, return_lse=True)
    wanted = F.scaled_dot_product_attention(*tensors, dropout_p=1.0)
    assert torch.equal(out, wanted) and not out.any()
    assert torch.equal(lse, ato_torch.attention(*tensors, return_lse=True)[1])
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert not gradient.any()


@pytest.mark.parametrize(
    "shape", [(T, S), (B, 1, 1, S), (H, T, 1)], ids=str
)
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_mask(shape, kind):
    tensors = draw(*SHAPES, shape)
    if kind == "bool":
        mask = tensors[-1].detach() > -0.5
        if shape[-2:] == (T, S):
            mask[..., 2, :] = False  # sees nothing
        check_attention([*tensors[:3], mask])
    else:
        check_attention(tensors)


def test_infinite_mask_hides_and_a_row_that_sees_nothing_gives_zero():
    query, key, value = draw(*SHAPES)
    mask = torch.zeros(T, S).masked_fill_(torch.ones(T, S).tril() == 0, -torch.inf)
    mask[3] = -torch.inf
    out = ato_torch.attention(query, key, value, mask)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, mask))
    assert (out[:, :, 3] == 0).all()
    out.sum().backward()
    assert (query.grad[:, :, 3] == 0).all() and torch.isfinite(key.grad).all()


def test_float32_mask_on_bfloat16_and_an_expanded_one():
    tensors = draw(*SHAPES, dtype=torch.bfloat16)
    (mask,) = draw((T, 1), requires_grad=False)
    check_attention([*tensors, mask.expand(T, S)])
    (mask,) = draw((B, 1, 1, S))
    query, key, value = (tensor.detach() for tensor in tensors)
    ato_torch.attention(query, key, value, mask.expand(B, H, T, S)).sum().backward()
    assert mask.grad.shape == mask.shape and mask.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "shapes",
    [
        ((T, D), (S, D), (S, D)),
        ((H, T, D), (H, S, D), (H, S, D)),
        ((B, H, T, D), (H, S, D), (1, 1, S, D)),
        ((2, 3, H, T, D), (3, H, S, D), (2, 3, H, S, D)),
        ((1, 1, T, D), (B, H, S, D), (B, H, S, D)),
    ],
    ids=str,
)
def test_leading_axes_broadcast_as_there(shapes):
    check_attention(draw(*shapes))


def test_mask_of_more_leading_axes():
    check_attention(draw((2, 3, H, T, D), (2, 3, H, S, D), (2, 3, H, S, D), (3, 1, T, S)))


def test_views_of_any_stride_and_offset():
    def views(tensors):
        first, second, third = tensors
        return (
            first.transpose(1, 2),  # [B, T, H, D] in memory
            second[..., 1 : D + 1],  # neither dense nor aligned
            third.flatten()[3:].view(B, H, S, D),  # dense, starts at byte 12
        )

    tensors = draw((B, T, H, D), (B, H, S, D + 1), (B * H * S * D + 3,))
    check(
        lambda *tensors: ato_torch.attention(*views(tensors)),
        lambda *tensors: F.scaled_dot_product_attention(*views(tensors)),
        tensors,
    )


def test_transposed_memory_is_not_copied(monkeypatch):
    tensors = draw((B, T, H, D), (B, S, 2, D), (B, S, 2, D), requires_grad=False)
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    wanted = ato_torch.attention(
        *(tensor.contiguous() for tensor in (query, key, value)), is_causal=True, enable_gqa=True
    )
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_, **__: pytest.fail("a copy was made"))
    found = ato_torch.attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, wanted)
    decay = torch.full((B, S, 2), -0.1).transpose(1, 2)
    linear = ato_torch.linear_attention(key, key, value, causal=True, decay=decay)
    assert linear.shape == (B, 2, S, D)


@pytest.mark.parametrize("wanting", [(True, False, False), (False, True, True)])
def test_only_the_gradients_that_are_wanted(wanting):
    tensors = draw(*SHAPES, (T, S), requires_grad=False)
    for tensor, wants in zip(tensors, (*wanting, wanting[0]), strict=True):
        tensor.requires_grad_(wants)
    check_attention(tensors)


def test_no_grad_and_nothing_that_wants_a_gradient():
    tensors = draw(*SHAPES)
    with torch.no_grad():
        assert not ato_torch.attention(*tensors).requires_grad
    assert not ato_torch.attention(*(tensor.detach() for tensor in tensors)).requires_grad


def test_dropout_follows_torchs_generator():
    query, key, value = draw(*SHAPES)
    value = torch.ones_like(value)

    def call(seed):
        torch.manual_seed(seed)
        return ato_torch.attention(query, key, value, dropout_p=0.5)

    assert torch.equal(call(0), call(0)) and not torch.equal(call(0), call(1))
    # The sum of the weights that are kept: 1 in the mean.
    query, key, value = draw((1, 8, 64, D), (1, 8, 64, D), (1, 8, 64, D), requires_grad=False)
    value = torch.ones_like(value)
    assert call(2).std() > 0.05 and abs(call(2).mean() - 1) < 0.05


def test_dropout_gradient_drops_what_the_forward_dropped():
    query, key, value = draw((1, 1, 5, D), (1, 1, 5, D), (1, 1, 5, 5), requires_grad=False)
    value = torch.eye(5)[None, None].requires_grad_()
    weights = ato_torch.attention(query, key, value, dropout_p=0.5)
    (gradient,) = torch.autograd.grad(weights[..., :1].sum(), value)
    torch.testing.assert_close(gradient[0, 0, :, 0], weights.detach()[0, 0].sum(0))


def test_extras_of_attention():
    query, key, value = draw((B, H, S, D), (B, H, S, D), (B, H, S, D))
    (sinks,) = draw((H,))
    ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    out, lse = ato_torch.attention(
        query, key, value, window=(2, 0), segment_ids=ids, sinks=sinks, return_lse=True
    )
    i, j = torch.arange(S)[:, None], torch.arange(S)
    visible = (j <= i) & (j >= i - 2) & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = (query @ key.mT) * D**-0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    wanted = torch.logaddexp(torch.logsumexp(scores, -1), sinks[:, None])
    torch.testing.assert_close(lse, wanted)
    torch.testing.assert_close(out, torch.exp(scores - wanted[..., None]) @ value)
    found = torch.autograd.grad(lse.sum() + out.square().sum(), (query, sinks))
    wanted_out = torch.exp(scores - wanted[..., None]) @ value
    exact = torch.autograd.grad(wanted.sum() + wanted_out.square().sum(), (query, sinks))
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
    lengths = torch.tensor([9, 4])
    out = ato_torch.attention(query, key, value, kv_lengths=lengths)
    assert (out[1, :, 4:] == 0).all() and (out[0] != 0).all()


def plain_linear(query, key, value, causal=False, decay=None, normalize=True):
    """w[i,j] = phi(q_i) . phi(k_j) * decay(i,j), written out; [B, H, T, D]."""
    phi_q, phi_k = F.elu(query) + 1, F.elu(key) + 1
    groups = query.shape[1] // key.shape[1]
    phi_k, value = (tensor.repeat_interleave(groups, 1) for tensor in (phi_k, value))
    w = phi_q @ phi_k.mT
    if decay is not None:
        total = decay.to(w.dtype).repeat_interleave(groups, 1).cumsum(-1)
        w = w * torch.exp((total[..., :, None] - total[..., None, :]).tril())
    w = w.tril(key.shape[2] - query.shape[2]) if causal else w
    out = w @ value
    return out / w.sum(-1, keepdim=True) if normalize else out * query.shape[-1] ** -0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention(causal, dtype):
    check(
        lambda *tensors: ato_torch.linear_attention(*tensors, causal=causal),
        lambda *tensors: plain_linear(*tensors, causal=causal),
        draw((B, H, T, D), (B, 2, S, D), (B, 2, S, D), dtype=dtype),
    )


def test_linear_attention_options_layout_and_no_batch():
    tensors = draw((B, S, H, D), (B, S, 2, D), (B, S, 2, D))
    options = {"causal": True, "normalize": False, "layout": "bthd"}
    flipped = [tensor.transpose(1, 2) for tensor in tensors]
    out = ato_torch.linear_attention(*tensors, **options)
    wanted = plain_linear(*flipped, causal=True, normalize=False)
    torch.testing.assert_close(out.transpose(1, 2), wanted)
    single = ato_torch.linear_attention(*(tensor[1] for tensor in tensors), **options)
    torch.testing.assert_close(single, out[1])


def test_linear_attention_state_and_decay_have_gradients():
    query, key, value = draw((B, 2, S, D), (B, 2, S, D), (B, 2, S, D))
    decay = (-torch.rand(B, 2, S)).requires_grad_()
    whole = plain_linear(query, key, value, causal=True, decay=decay)
    first, state = ato_torch.linear_attention(
        query[:, :, :4],
        key[:, :, :4],
        value[:, :, :4],
        causal=True,
        decay=decay[:, :, :4],
        return_state=True,
    )
    assert isinstance(state, LinearState) and state.kv.dtype == torch.float32
    rest = ato_torch.linear_attention(
        query[:, :, 4:],
        key[:, :, 4:],
        value[:, :, 4:],
        causal=True,
        decay=decay[:, :, 4:],
        initial_state=state,
    )
    joined = torch.cat([first, rest], 2)
    torch.testing.assert_close(joined, whole)
    leaves = (query, key, value, decay)
    (cotangent,) = draw(whole.shape, seed=1, requires_grad=False)
    torch.testing.assert_close(
        torch.autograd.grad(joined, leaves, cotangent),
        torch.autograd.grad(whole, leaves, cotangent),
        atol=1e-5,
        rtol=1e-4,
    )


def test_linear_attention_takes_jax_feature_maps():
    query, key, value = draw(*SHAPES, requires_grad=False)
    named = ato_torch.linear_attention(query, key, value, feature_map="silu")
    torch.testing.assert_close(
        ato_torch.linear_attention(query, key, value, feature_map=jax.nn.silu), named
    )


def states(*shape, seed=3):
    """A positive state of B, G, D, V, as PyTorch's and as JAX's."""
    kv, k_sum = (tensor.square().detach() for tensor in draw(shape, shape[:-1], seed=seed))
    return LinearState(kv.requires_grad_(), k_sum.requires_grad_())


def from_torch(tensors):
    return [None if tensor is None else jax.numpy.asarray(array(tensor)) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay_shape", [None, (2,), (B, 2), (B, 2, D)], ids=str)
def test_step_is_ato_jaxs(decay_shape, dtype):
    query, key, value = draw((B, H, D), (B, 2, D), (B, 2, 5), dtype=dtype)
    state = states(B, 2, D, 5)
    decay = None if decay_shape is None else (-torch.rand(decay_shape)).requires_grad_()
    out, found = ato_torch.linear_attention_step(query, key, value, state, decay=decay)
    q, k, v, kv, k_sum, log = from_torch([query, key, value, *state, decay])

    def step(q, k, v, kv, k_sum, log):
        return ato_jax.linear_attention_step(q, k, v, LinearState(kv, k_sum), decay=log)

    (wanted, wanted_state), pull = jax.vjp(step, q, k, v, kv, k_sum, log)
    assert out.dtype == dtype and isinstance(found, LinearState)
    cotangents = draw(out.shape, found.kv.shape, found.k_sum.shape, seed=5, requires_grad=False)
    cotangents[0] = cotangents[0].to(dtype)
    leaves = [tensor for tensor in (query, key, value, *state, decay) if tensor is not None]
    gradients = torch.autograd.grad((out, *found), leaves, cotangents)
    first, *rest = from_torch(cotangents)
    exact = [one for one in pull((first, LinearState(*rest))) if one is not None]
    for ours, theirs in zip(
        (out, *found, *gradients), (wanted, *wanted_state, *exact), strict=True
    ):
        np.testing.assert_allclose(
            array(ours).astype(np.float32), np.asarray(theirs, np.float32), rtol=1e-2, atol=1e-6
        )


def test_steps_are_causal_linear_attention():
    query, key, value = draw((B, H, S, D), (B, 2, S, D), (B, 2, S, 5), requires_grad=False)
    decay = -torch.rand(B, 2, S)
    wanted, last = ato_torch.linear_attention(
        query, key, value, causal=True, decay=decay, return_state=True
    )
    state = LinearState(torch.zeros(B, 2, D, 5), torch.zeros(B, 2, D))
    first = state
    for t in range(S):
        token = (tensor[:, :, t] for tensor in (query, key, value))
        out, state = ato_torch.linear_attention_step(*token, state, decay=decay[:, :, t])
        torch.testing.assert_close(out, wanted[:, :, t])
    torch.testing.assert_close(tuple(state), tuple(last))
    assert not first.kv.any() and not first.k_sum.any()
    alone, _ = ato_torch.linear_attention_step(
        *(tensor[1, :, 0] for tensor in (query, key, value)),
        tuple(part[1] for part in first),
        decay=decay[1, :, 0],
    )
    torch.testing.assert_close(alone, wanted[1, :, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(B, H, T, D)}, "query must be .B, H, D. or .H, D., got shape"),
        ({"key": torch.zeros(B, 3, D), "value": torch.zeros(B, 3, D)}, "multiple of key's heads"),
        ({"state": torch.zeros(B, 2, D, D)}, "state must be a pair of tensors"),
        ({"state": (torch.zeros(B, 2, D, D), np.zeros((B, 2, D)))}, "state.k_sum must be a torch"),
        ({"state": (torch.zeros(B, 2, D), torch.zeros(B, 2, D))}, "state.kv must be .B, G, F, V"),
        ({"decay": -torch.ones(3)}, "decay must be .G. with G=2"),
        ({"decay": torch.ones(2)}, "decay .* must be <= 0"),
        ({"decay": torch.full((2,), torch.nan)}, "decay .* must be <= 0, got NaN"),
        ({"scale": 1e-50, "normalize": False}, "scale must be 0 or at least 1.2e-38"),
        ({"scale": 2.0}, "scale must be None where normalize is True"),
        ({"feature_map": "cosine"}, "feature_map must be one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_step(change, message):
    arguments = {
        "query": torch.zeros(B, H, D),
        "key": torch.zeros(B, 2, D),
        "value": torch.zeros(B, 2, D),
        "state": (torch.zeros(B, 2, D, D), torch.zeros(B, 2, D)),
    }
    with pytest.raises(ValueError, match=message):
        ato_torch.linear_attention_step(**arguments | change)


@pytest.mark.parametrize("stacked", [False, True])
def test_combined_pieces_are_the_whole(stacked):
    query, key, value = draw(*SHAPES)
    whole, whole_lse = ato_torch.attention(query, key, value, return_lse=True)
    pieces = [
        ato_torch.attention(query, key[:, :, cut], value[:, :, cut], return_lse=True)
        for cut in (slice(0, 4), slice(4, 4), slice(4, S))
    ]
    outs, lses = zip(*pieces, strict=True)
    if stacked:
        outs, lses = torch.stack(outs), torch.stack(lses)
    out, lse = ato_torch.combine(outs, lses)
    torch.testing.assert_close((out, lse), (whole, whole_lse))
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum() + lse.sum(), (query, key, value)),
        torch.autograd.grad(whole.square().sum() + whole_lse.sum(), (query, key, value)),
        atol=1e-5,
        rtol=1e-4,
    )


def test_combine_is_ato_jaxs_in_both_layouts_and_dtypes():
    outs = draw((3, B, T, H, 5), dtype=torch.bfloat16, requires_grad=False)[0]
    lses = draw((3, B, T, H), seed=1, requires_grad=False)[0]
    lses[:, 0, 0] = -torch.inf
    wanted = ato_jax.combine(*from_torch([outs, lses]))
    found = ato_torch.combine(outs, lses, layout="bthd")
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(array(ours), np.asarray(theirs))
    assert found[0].dtype == torch.bfloat16 and not found[0][0, 0].any()


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ((), (), "outs must hold at least one piece"),
        (torch.zeros(0, H, T, D), torch.zeros(0, H, T), "outs must hold at least one piece"),
        (3, (), "outs must be tensors or one tensor, got int"),
        ((torch.zeros(H, T, D), np.zeros((H, T, D))), (), r"outs.1. must be a torch.Tensor"),
        ((torch.zeros(H, T, D), torch.zeros(H, T, 1)), (), "outs must be alike in shape"),
        (torch.zeros(2, T, D), torch.zeros(2, T), "outs must hold pieces .B, H, T, V. or"),
        (torch.zeros(2, H, T, D), torch.zeros(2, T, H), "lses must be .N, H, T. with"),
        (torch.zeros(2, H, T, D), torch.zeros(2, H, T, device="meta"), "lses must be on cpu"),
        (torch.zeros(2, H, T, D).double(), torch.zeros(2, H, T), "outs must be bfloat16"),
    ],
    ids=str,
)
def test_errors_of_combine(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        ato_torch.combine(outs, lses)


def test_empty_axes():
    for tokens, keys in ((0, S), (T, 0)):
        tensors = draw((B, H, tokens, D), (B, H, keys, D), (B, H, keys, D))
        for function in (ato_torch.attention, ato_torch.linear_attention):
            out = function(*tensors)
            assert out.shape == (B, H, tokens, D) and not out.any()
            gradients = torch.autograd.grad(out.sum(), tensors)
            for gradient, tensor in zip(gradients, tensors, strict=True):
                assert gradient.shape == tensor.shape and not gradient.any()
    tensors = draw((0, H, T, D), (0, H, S, D), (0, H, S, D))
    out = ato_torch.attention(*tensors)
    assert out.shape == (0, H, T, D)
    assert torch.autograd.grad(out.sum(), tensors)[0].shape == (0, H, T, D)


def test_results_share_no_memory_with_inputs():
    state = LinearState(torch.zeros(B, H, D, D), torch.zeros(B, H, D))
    query, key, value = draw((B, H, T, D), (B, H, 0, D), (B, H, 0, D), requires_grad=False)
    # Without keys the state is handed on as it came.
    _, found = ato_torch.linear_attention(
        query, key, value, initial_state=state, return_state=True
    )
    for before, after in zip(state, found, strict=True):
        after += 1
        assert not before.any()


def test_lifetimes():
    """Results outlive the inputs, and inputs written to after the call don't change results."""
    for _ in range(5):
        query, key, value = draw((1, 2, 64, 32), (1, 2, 64, 32), (1, 2, 64, 32))
        wanted = F.scaled_dot_product_attention(query, key, value).detach()
        out = ato_torch.attention(query, key, value)
        with torch.no_grad():
            copy = out.detach() * 1
            for tensor in (query, key, value):
                tensor.zero_()
        del query, key, value, tensor
        gc.collect()
        torch.testing.assert_close(copy, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out.detach(), wanted, atol=1e-5, rtol=1e-5)


def test_an_input_written_to_before_backward_is_refused():
    query, key, value = draw(*SHAPES)
    out = ato_torch.attention(query, key * 1, value)
    with torch.no_grad():
        query.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_order_and_forward_mode_are_refused():
    query, key, value = draw(*SHAPES)
    (gradient,) = torch.autograd.grad(
        ato_torch.attention(query, key, value).sum(), query, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="no derivatives of second order"):
        gradient.sum().backward()
    with pytest.raises((RuntimeError, NotImplementedError), match="forward|jvp"):
        torch.func.jvp(lambda query: ato_torch.attention(query, key, value), (query,), (query,))


def test_func_grad_and_checkpoint():
    query, key, value = draw(*SHAPES)

    def loss(query):
        return ato_torch.attention(query, key, value, dropout_p=0.5).square().sum()

    torch.manual_seed(0)
    (wanted,) = torch.autograd.grad(loss(query), query)
    torch.manual_seed(0)
    torch.testing.assert_close(torch.func.grad(loss)(query), wanted)
    torch.manual_seed(0)
    out = torch.utils.checkpoint.checkpoint(loss, query, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out, query)[0], wanted)


def test_compiled_models_call_it():
    query, key, value = draw(*SHAPES)

    def model(query):
        return ato_torch.attention(query * 2, key, value, is_causal=True).square().sum()

    compiled = torch.compile(model, backend="eager")
    (wanted,) = torch.autograd.grad(model(query), query)
    torch.testing.assert_close(torch.autograd.grad(compiled(query), query)[0], wanted)


def test_autocast():
    query, key, value = draw(*SHAPES)
    with torch.autocast("cpu", torch.bfloat16):
        out = ato_torch.attention(query, key, value.bfloat16())
        linear = ato_torch.linear_attention(query, key, value)
    assert out.dtype == linear.dtype == torch.bfloat16
    out.float().sum().backward()
    assert query.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(B, H, T, D, dtype=torch.float64)}, "query must be bfloat16"),
        ({"query": torch.zeros(B, H, T, D, dtype=torch.int32)}, "query must be bfloat16"),
        ({"query": np.zeros((B, H, T, D), np.float32)}, "query must be a torch.Tensor"),
        ({"query": torch.zeros(B, H, T, D, device="meta")}, "key must be on meta"),
        ({"key": torch.zeros(B, H, S, D).half()}, "key must have query's dtype"),
        ({"key": torch.zeros(B, H, S, D + 1)}, "key must be .B, G, S, D. with .*D=16"),
        ({"value": torch.zeros(B, H, S + 1, D)}, "value must be .B, G, S, V. with .*S=9"),
        ({"value": torch.zeros(3, H, S, D)}, "leading axes of query, key and value"),
        ({"key": torch.zeros(B, 2, S, D), "value": torch.zeros(B, 2, S, D)}, "enable_gqa=True"),
        ({"attn_mask": torch.zeros(T, S + 1)}, "attn_mask must broadcast to .* got shape .7, 10"),
        ({"attn_mask": torch.zeros(S)}, "attn_mask must broadcast"),
        ({"attn_mask": torch.zeros(T, S, dtype=torch.int32)}, "attn_mask must be bool"),
        ({"attn_mask": torch.zeros(T, S), "is_causal": True}, "attn_mask .* is_causal=True"),
        ({"dropout_p": 1.5}, "dropout_p must be from 0 to 1, got 1.5"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"dropout_p": "a"}, "dropout_p must be a number, got 'a'"),
        ({"dropout_p": None}, "dropout_p must be a number, got None"),
        ({"dropout_p": float("nan")}, "dropout_p must be finite"),
        ({"is_causal": 1}, "^is_causal must be True or False, got 1"),
        ({"is_causal": None}, "^is_causal must be True or False, got None"),
        (
            {"key": torch.zeros(B, 2, S, D), "value": torch.zeros(B, 3, S, D), "enable_gqa": True},
            "query's heads must be a multiple of key's and of value's, got 4, 2 and 3",
        ),
        ({"enable_gqa": "no"}, "enable_gqa must be True or False, got 'no'"),
        ({"sinks": torch.zeros(3)}, "sinks must be .H. with H=4"),
        ({"kv_lengths": torch.tensor([3, 10])}, "kv_lengths must lie between 0 and S=9"),
        ({"kv_lengths": 3}, r"kv_lengths must be .B. with B=2, got shape \(\)"),
        ({"kv_lengths": torch.tensor(3)}, r"kv_lengths must be .B. with B=2, got shape \(\)"),
        ({"kv_lengths": torch.ones(2, requires_grad=True)}, "kv_lengths must hold integers"),
        ({"kv_lengths": torch.ones(2).bfloat16()}, "kv_lengths must hold integers"),
        ({"kv_lengths": torch.ones(2, dtype=torch.bool)}, "kv_lengths must hold integers"),
        ({"kv_lengths": [[1], [1, 2]]}, "kv_lengths must be an array"),
        ({"kv_lengths": torch.ones(B, device="meta").long()}, "kv_lengths must be on cpu"),
        ({"kv_lengths": torch.ones(B).long().to_sparse()}, "kv_lengths must be a dense tensor"),
        ({"attn_mask": torch.ones(T, S).to_sparse()}, "attn_mask must be a dense tensor"),
        ({"segment_ids": torch.zeros(T).long()}, "segment_ids must be .B, T. with B=2, T=7"),
        ({"query_offset": True}, "query_offset must hold integers, got bool"),
        ({"query_offset": np.array([1, 1 << 31])}, "query_offset must fit in int32"),
        ({"implementation": "fast"}, "implementation must be None or one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_attention(change, message):
    arguments = dict(zip(("query", "key", "value"), draw(*SHAPES), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        ato_torch.attention(**arguments)


def test_errors_of_linear_attention():
    query, key, value = draw(*SHAPES)
    with pytest.raises(ValueError, match="key must be .B, G, S, D. with .*D=16"):
        ato_torch.linear_attention(query, key[..., 1:], value)
    with pytest.raises(ValueError, match="query's heads H must be a multiple"):
        ato_torch.linear_attention(query, key[:, :3], value[:, :3])
    with pytest.raises(ValueError, match="decay .* must be <= 0"):
        ato_torch.linear_attention(query, key, value, causal=True, decay=torch.ones(H))
    padded = torch.zeros(key.shape[:-1])
    padded[..., -1] = torch.nan
    with pytest.raises(ValueError, match="decay .* must be <= 0, got NaN"):
        ato_torch.linear_attention(query, key, value, causal=True, decay=padded)
    lengths = torch.full((B,), key.shape[2] - 1)
    out = ato_torch.linear_attention(
        query, key, value, causal=True, decay=padded, kv_lengths=lengths
    )
    assert out.isfinite().all()
    with pytest.raises(ValueError, match="initial_state must be a pair of tensors"):
        ato_torch.linear_attention(query, key, value, initial_state=torch.zeros(2))
    with pytest.raises(ValueError, match="layout must be one of"):
        ato_torch.linear_attention(query, key, value, layout="bhdt")
    transposed = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in draw(*SHAPES)]
    for tensors in (draw(*SHAPES), transposed):
        with pytest.raises(ValueError, match=r"decay must be .G. or .B, G, S. or .*, got shape"):
            ato_torch.linear_attention(*tensors, causal=True, decay=-torch.ones(H, S))
        with pytest.raises(ValueError, match=r"decay must be .B, G, S. with .*, got shape .2, 9"):
            ato_torch.linear_attention(*tensors, causal=True, decay=-torch.ones(B, S, H))


def test_without_a_batch_axis_lengths_are_scalars():
    tensors = draw(*SHAPES)
    for function in (ato_torch.attention, ato_torch.linear_attention):
        wanted = function(*tensors, kv_lengths=torch.tensor([3, 3]))[0]
        unbatched = [tensor[0] for tensor in tensors]
        for scalar in (3, torch.tensor(3), np.int64(3), [3], torch.tensor([3])):
            torch.testing.assert_close(function(*unbatched, kv_lengths=scalar), wanted)
        with pytest.raises(ValueError, match="kv_lengths must be a scalar where q has no batch"):
            function(*unbatched, kv_lengths=torch.tensor([3, 3]))
    wanted = ato_torch.attention(*tensors, is_causal=True, query_offset=2)
    for offset in (torch.tensor(2), np.int64(2), torch.tensor([2, 2])):
        found = ato_torch.attention(*tensors, is_causal=True, query_offset=offset)
        torch.testing.assert_close(found, wanted)


def test_lengths_that_are_given_twice():
    """One tensor says both where T = S."""
    query, lengths = torch.ones(2, 8, 1, 4), torch.tensor([3, 8])
    for of_queries, of_keys, S, count in (
        ([3, 8], np.array([3, 8]), 8, 1),
        (lengths, lengths, 8, 1),
        ([3, 8], [3, 8], 9, 2),
        ([3, 8], [3, 7], 8, 2),
        ([3, 8], None, 8, 1),
    ):
        given = {"q_lengths": (of_queries, "B"), "kv_lengths": (of_keys, "B")}
        sizes = {"B": 2, "T": 8, "S": S}
        tensors, _ = _checks.integers(given, query, sizes, batched=True)
        assert len(tensors) == count


def test_wide_integers_are_narrowed_by_their_meaning():
    """As on a GPU, where no value is waited for."""
    wide = 1 << 32
    found = _checks.narrow(
        {
            "q_segment_ids": torch.tensor([[5, 5 + wide, 5, 9]]),
            "kv_segment_ids": torch.tensor([[5 + wide, 5, 5 - wide]], dtype=torch.int64),
            "kv_lengths": torch.tensor([wide + 1, -wide]),
        }
    )
    assert {tensor.dtype for tensor in found.values()} == {torch.int32}
    same = found["q_segment_ids"][0, :, None] == found["kv_segment_ids"][0]
    wanted = [[False, True, False], [True, False, False], [False, True, False], [False] * 3]
    assert same.tolist() == wanted
    assert found["kv_lengths"].tolist() == [2**31 - 1, -(2**31)]
    narrow = _checks.narrow({"segment_ids": torch.tensor([[5, -6]], dtype=torch.int32)})
    assert narrow["segment_ids"].tolist() == [[5, -6]]


def test_a_window_written_to_before_backward():
    tensors = [tensor.requires_grad_() for tensor in draw(*SHAPES)]
    wanted = torch.autograd.grad(ato_torch.attention(*tensors, window=(1, 0)).sum(), tensors)
    window = [1, 0]
    out = ato_torch.attention(*tensors, window=window)
    window[0] = 5
    for one, other in zip(torch.autograd.grad(out.sum(), tensors), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_call_like_an_earlier_one_is_checked_as_well():
    """It goes straight to its program; what is only equal to an earlier argument does not."""
    tensors = draw((B, H, S, D), (B, H, S, D), (B, H, S, D))
    transposed = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    bfloat16 = [tensor.bfloat16() for tensor in tensors]
    for function, flag in (
        (ato_torch.attention, "is_causal"),
        (ato_torch.linear_attention, "causal"),
    ):
        for inputs in (tensors, transposed, bfloat16):
            wanted = function(*inputs, **{flag: True})
            found = function(*inputs, **{flag: True})
            assert torch.equal(found, wanted) and found.dtype == wanted.dtype
            torch.testing.assert_close(
                torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs)
            )
            with torch.no_grad():
                assert not function(*inputs, **{flag: True}).requires_grad
        with pytest.raises(ValueError, match=f"{flag} must be True or False, got 1"):
            function(*tensors, **{flag: 1})
        with torch.autocast("cpu", torch.bfloat16):
            assert function(*tensors, **{flag: True}).dtype == torch.bfloat16
    for _ in range(2):
        ato_torch.attention(*tensors, window=(1, 0))
        ato_torch.attention(*tensors, query_offset=0)
    with pytest.raises(ValueError, match="window must be a pair"):
        ato_torch.attention(*tensors, window=(True, 0))
    with pytest.raises(ValueError, match="query_offset must hold integers"):
        ato_torch.attention(*tensors, query_offset=False)
    scale = torch.tensor(0.1)
    first = ato_torch.attention(*tensors, scale=scale)
    scale.fill_(0.9)
    again = ato_torch.attention(*tensors, scale=scale)
    torch.testing.assert_close(again, ato_torch.attention(*tensors, scale=float(scale)))
    assert not torch.equal(first, again)


def test_a_backend_that_cannot_says_so():
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        ato_torch.attention(*draw(*SHAPES), implementation="triton")


@pytest.mark.parametrize(
    ("platform", "environment", "warns"),
    [
        ("gpu", {}, True),
        ("gpu", {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, True),
        ("gpu", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, False),
        ("gpu", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, False),
        ("cpu", {}, False),
        (None, {}, False),
    ],
)
def test_sharing_the_gpu(monkeypatch, platform, environment, warns):
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_bridge, "_platform_started", lambda: platform)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _bridge.share_the_gpu()
    assert bool(caught) == warns
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in str(caught[0].message) if warns else True
    assert _bridge.os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] in (
        environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    )


def test_a_jax_that_does_not_tell_whether_it_started(monkeypatch):
    """Nothing but a warning is lost with the private name that tells."""
    monkeypatch.delattr(jax._src, "xla_bridge")
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", None)
    place = importlib.util.find_spec("ato_torch._bridge")
    without = importlib.util.module_from_spec(place)
    place.loader.exec_module(without)
    monkeypatch.undo()
    assert _bridge._platform_started() == "cpu" and without._platform_started() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        without.share_the_gpu()
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(without.execute(jax.jit(lambda x: [x + 1]), [x])[0], x + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("views", ["whole", "offset", "transposed"])
@pytest.mark.parametrize("op", ["attention", "causal", "linear_attention"])
def test_on_a_gpu(op, views, dtype):
    """Against float64 on the CPU; "offset" starts 2 or 4 bytes into the memory."""
    shape = (2, 4, 96, 64)
    drawn, view = {
        "whole": (shape, lambda x: x),
        "offset": ((2 * 4 * 96 * 64 + 1,), lambda x: x[1:].view(shape)),
        "transposed": ((2, 96, 4, 64), lambda x: x.transpose(1, 2)),
    }[views]
    ours, peer = {
        "attention": (ato_torch.attention, F.scaled_dot_product_attention),
        "causal": (
            lambda *tensors: ato_torch.attention(*tensors, is_causal=True),
            lambda *tensors: F.scaled_dot_product_attention(*tensors, is_causal=True),
        ),
        "linear_attention": (ato_torch.linear_attention, plain_linear),
    }[op]
    tensors = draw(*(drawn,) * 3, dtype=dtype)
    (cotangent,) = draw(shape, dtype=dtype, seed=1, requires_grad=False)
    found = results(
        lambda *tensors: ours(*map(view, tensors)),
        [tensor.detach().cuda().requires_grad_() for tensor in tensors],
        cotangent.cuda(),
    )
    exact, ideal = (
        results(
            lambda *tensors: peer(*map(view, tensors)),
            upcast(tensors, precision),
            cotangent.to(precision),
        )
        for precision in (torch.float64, torch.float32)
    )
    for name, tensor in found.items():
        assert tensor.is_cuda and tensor.dtype == dtype
        numerics.check(
            name,
            array(tensor.cpu()),
            exact[name].numpy(),
            dtype=str(dtype).removeprefix("torch."),
            ideal=array(ideal[name].to(dtype)),
        )


@pytest.mark.gpu
def test_streams_and_lifetimes_on_a_gpu():
    """Kernels before and after on the current stream are waited for; freed memory is not read."""
    slow = torch.randn(8192, 8192, device="cuda")
    query = torch.randn(4, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
    wanted = F.scaled_dot_product_attention(query * 2, query + 1, query)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(10):
                slow @ slow
                doubled, moved, value = query * 2, query + 1, query.clone()
                out = ato_torch.attention(doubled, moved, value)
                for tensor in (doubled, moved, value):
                    tensor.zero_()
                del doubled, moved, value, tensor
                scrap = torch.randn(3, *query.shape, device="cuda", dtype=query.dtype)
                error = (out - wanted).float().norm() / wanted.float().norm()
                del out, scrap
                assert error < 1e-2
    torch.cuda.synchronize()
