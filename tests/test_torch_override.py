"""ato_torch.sdpa_override: PyTorch's own modules inside and outside of it."""

import threading
import warnings

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)
F = torch.nn.functional

from functorch.compile import aot_function, nop  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as taken_before  # noqa: E402

import ato_torch  # noqa: E402
from ato_torch import override  # noqa: E402

B, H, T, D = 2, 4, 7, 16
KIND = "torch.float32 query [2, 4, 7, 16], key [2, 4, 7, 16]"


@pytest.fixture(autouse=True)
def _as_it_was():
    torch.manual_seed(0)
    torch._dynamo.reset()
    before = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
    yield
    assert before == (F.scaled_dot_product_attention, F.multi_head_attention_forward)
    assert torch.backends.mha.get_fastpath_enabled()


def draw():
    return [torch.randn(B, H, T, D, requires_grad=True) for _ in range(3)]


def causal(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def with_gradients(function, tensors):
    out = function(*tensors)
    return out, *torch.autograd.grad(out.square().sum(), tensors)


def test_values_and_gradients_are_pytorchs():
    tensors = draw()
    wanted = with_gradients(causal, tensors)
    with ato_torch.sdpa_override() as calls:
        found = with_gradients(causal, tensors)
    torch.testing.assert_close(found, wanted)
    assert calls.taken == {KIND: 1} and not calls.left
    assert str(calls) == f"taken, 1 times: {KIND}"


def test_what_is_left_is_said_once():
    query, key, value = (tensor.detach() for tensor in draw())
    with pytest.warns(RuntimeWarning, match="left a call to PyTorch: query must be") as caught:
        with ato_torch.sdpa_override() as calls:
            for _ in range(3):
                out = causal(query.double(), key.double(), value.double())
    assert len(caught) == 1
    torch.testing.assert_close(out.float(), causal(query, key, value))
    ((reason, count),) = calls.left.items()
    assert count == 3 and "got torch.float64" in reason and not calls.taken
    assert "left to PyTorch, 3 times: query must be" in str(calls)


def test_a_wrong_call_gets_pytorchs_error():
    query, key, value = draw()
    with pytest.warns(RuntimeWarning, match="enable_gqa"), ato_torch.sdpa_override():
        with pytest.raises(RuntimeError):
            causal(query, key[:, :2], value[:, :2])


def test_kinds_of_tensors_with_a_meaning_of_their_own():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            return "loud"

    query, key, value = draw()
    with pytest.warns(RuntimeWarning, match="Loud is a kind of tensor"):
        with ato_torch.sdpa_override():
            assert causal(query.detach().as_subclass(Loud), key, value) == "loud"


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_of_pytorchs(bias):
    query, key, value = draw()
    query = query[:, :, :3]
    for dtype in (torch.float32, torch.float64):
        tensors = [tensor.to(dtype) for tensor in (query, key, value)]
        wanted = F.scaled_dot_product_attention(*tensors, bias(3, T))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with ato_torch.sdpa_override() as calls:
                found = F.scaled_dot_product_attention(*tensors, bias(3, T))
                compiled = torch.compile(
                    lambda *tensors: F.scaled_dot_product_attention(*tensors, bias(3, T)),
                    backend="eager",
                )(*tensors)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(compiled, wanted)
        assert bool(calls.taken) == (dtype == torch.float32) != bool(calls.left)


def encoder():
    layer = torch.nn.TransformerEncoderLayer(H * D, H, 32, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.parametrize("masked", ["no", "padding", "causal"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_as_it_is(masked):
    """Outside, PyTorch takes the fast path, which no function of a name is in."""
    model, x = encoder(), torch.randn(B, T, H * D)
    padding = torch.arange(T) >= torch.tensor([[T], [4]])
    options = {
        "no": {},
        "padding": {"src_key_padding_mask": padding},
        "causal": {
            "mask": torch.nn.Transformer.generate_square_subsequent_mask(T),
            "is_causal": True,
        },
    }[masked]
    with torch.no_grad():
        wanted = model(x, **options)
        with ato_torch.sdpa_override() as calls:
            found = model(x, **options)
    seen = ~padding if masked == "padding" else slice(None)
    torch.testing.assert_close(found[seen], wanted[seen], atol=1e-5, rtol=1e-5)
    assert sum(calls.taken.values()) == 2 and not calls.left


def test_an_encoder_is_trained():
    model, x = encoder(), torch.randn(B, T, H * D)
    leaves = list(model.parameters())

    def gradients():
        return torch.autograd.grad(model(x).square().mean(), leaves)

    wanted = gradients()
    with ato_torch.sdpa_override() as calls:
        found = gradients()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert sum(calls.taken.values()) == 2


def test_weights_are_left():
    layer, x = torch.nn.MultiheadAttention(H * D, H, batch_first=True).eval(), torch.randn(B, T, 64)
    with pytest.warns(RuntimeWarning, match="need_weights=False"):
        with ato_torch.sdpa_override() as calls:
            out, weights = layer(x, x, x)
    assert weights is not None and calls.left == {override.WEIGHTS: 1} and not calls.taken
    with ato_torch.sdpa_override() as calls:
        same, _ = layer(x, x, x, need_weights=False)
    torch.testing.assert_close(same, out)
    assert sum(calls.taken.values()) == 1


def test_one_inside_of_another_and_an_error():
    tensors = draw()
    with ato_torch.sdpa_override() as outer:
        with pytest.raises(KeyError):
            with ato_torch.sdpa_override() as inner:
                causal(*tensors)
                raise KeyError
        causal(*tensors)
        assert not torch.backends.mha.get_fastpath_enabled()
    assert (inner.taken[KIND], outer.taken[KIND]) == (1, 2)


def test_other_threads_and_what_outlives_the_one_it_began_in():
    tensors = draw()
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def work():
        with ato_torch.sdpa_override() as calls:
            seen.append(calls)
            inside.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    causal(*tensors)
    with ato_torch.sdpa_override() as calls:
        leave.set()
        thread.join()
        causal(*tensors)
    assert (seen[0].taken[KIND], calls.taken[KIND]) == (1, 1)


def test_nothing_seen_is_said():
    with pytest.warns(RuntimeWarning, match="has seen no attention"):
        with ato_torch.sdpa_override() as calls:
            taken_before(*draw())
    assert str(calls) == "no attention was called"


def test_autocast_and_transforms():
    query, key, value = (tensor.detach() for tensor in draw())
    with ato_torch.sdpa_override() as calls:
        with torch.autocast("cpu", torch.bfloat16):
            assert causal(query, key, value.bfloat16()).dtype == torch.bfloat16
        mapped = torch.func.vmap(causal)(query, key, value)
        gradient = torch.func.grad(lambda query: causal(query, key, value).sum())(query)
    torch.testing.assert_close(mapped, causal(query, key, value))
    exact = torch.func.grad(lambda query: causal(query, key, value).sum())(query)
    torch.testing.assert_close(gradient, exact)
    assert sum(calls.taken.values()) == 3


def test_a_checkpoint_inside():
    tensors = draw()

    def checkpointed(*tensors):
        return torch.utils.checkpoint.checkpoint(causal, *tensors, use_reentrant=False)

    with ato_torch.sdpa_override() as calls:
        found = with_gradients(checkpointed, tensors)
    torch.testing.assert_close(found, with_gradients(causal, tensors))
    assert calls.taken and not calls.left


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_before_inside_and_after(backend):
    """Without a break, and never what was compiled for the other side."""
    tensors = draw()
    compiled = torch.compile(causal, backend=backend, fullgraph=True)
    wanted = with_gradients(compiled, tensors)
    with ato_torch.sdpa_override() as calls:
        found = [with_gradients(compiled, tensors) for _ in range(2)]
    assert calls.taken == {override.TRACED: 1} and not calls.left
    for one in found:
        torch.testing.assert_close(one, wanted)
    again = compiled(*tensors)
    assert torch.equal(again, wanted[0]) and not torch.equal(found[0][0], wanted[0])


def test_an_encoder_compiled():
    model, x = encoder(), torch.randn(B, T, H * D)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    wanted = model(x)
    with ato_torch.sdpa_override() as calls:
        found = compiled(x)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert calls.taken.keys() == {override.TRACED}
    compiled(x)
    assert F.scaled_dot_product_attention is taken_before


def test_traced_past_dynamo():
    """Some versions of it leave the whole call to the tracers behind it."""
    tensors = [tensor.detach() for tensor in draw()]
    with ato_torch.sdpa_override() as calls:
        found = aot_function(causal, nop)(*tensors)
    torch.testing.assert_close(found, taken_before(*tensors, is_causal=True))
    assert calls.taken.keys() == {override.TRACED} and not calls.left


def test_compiled_what_is_left():
    tensors = [tensor.detach().double() for tensor in draw()]
    compiled = torch.compile(causal, backend="aot_eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="got torch.float64"):
        with ato_torch.sdpa_override() as calls:
            torch.testing.assert_close(compiled(*tensors), taken_before(*tensors, is_causal=True))
    assert calls.left and not calls.taken


def test_no_warning_where_all_is_taken():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ato_torch.sdpa_override():
            causal(*draw())


@pytest.mark.gpu
@pytest.mark.kernels("attention")
def test_an_encoder_on_a_gpu():
    """And compiled, for this side alone."""
    model, x = encoder().cuda(), torch.randn(B, T, H * D, device="cuda")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        wanted = model(x)
        for function in (model, compiled):
            function(x)
            with ato_torch.sdpa_override() as calls:
                found = function(x)
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
            assert calls.taken and not calls.left
