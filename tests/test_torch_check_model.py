"""ato_torch.check_model: which layers of a model call the library, and what the others do."""

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)
F = torch.nn.functional

from torch.nn.attention.flex_attention import flex_attention  # noqa: E402

import ato_torch  # noqa: E402
from ato_torch.hugging_face import MODULES_NAMES  # noqa: E402
from tests.replaced import delta_rule_put_back  # noqa: E402, F401

B, T, H, D = 2, 7, 4, 16
PRODUCTS = "a softmax and products of its own"


@pytest.fixture
def transformers():
    found = pytest.importorskip("transformers", reason="transformers is not installed here")
    ato_torch.register_hf()
    return found


def kinds(layers):
    return [(layer.name, layer.kind, layer.calls, layer.others) for layer in layers]


@pytest.mark.parametrize("name", ["eager", "sdpa", "ato"])
def test_layers_of_transformers(transformers, name):
    from examples import hugging_face as example

    model = example.llama()
    model.set_attn_implementation(name)
    found = ato_torch.check_model(model, torch.ones(1, 5, dtype=torch.long))
    assert [layer.name for layer in found.layers] == [
        f"model.layers.{n}.self_attn" for n in range(2)
    ]
    assert len(found.ours) == (2 if name == "ato" else 0)
    (how,) = {layer.others for layer in found.layers}
    if name == "ato":
        assert how == () and str(found).startswith("2 of 2 layers compute attention by ato_torch")
    elif name == "eager":
        assert how == (PRODUCTS,)
    else:
        assert "scaled_dot_product" in how[0]
    # Without arguments by the model's own inputs.
    assert kinds(ato_torch.check_model(model).layers) == kinds(found.layers)


def test_a_model_that_ignores_the_name(transformers):
    """DeBERTa-v2 takes attn_implementation and computes attention by itself, without a word."""
    config = transformers.DebertaV2Config(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, relative_attention=True, pos_att_type=["p2c", "c2p"],
        attn_implementation="ato",
    )  # fmt: skip
    found = ato_torch.check_model(transformers.DebertaV2Model(config))
    assert not found.ours and [layer.kind for layer in found.others] == [
        "DisentangledSelfAttention"
    ]


@pytest.mark.usefixtures("delta_rule_put_back")
def test_a_hybrid_before_and_after_its_delta_rule_is_replaced(transformers):
    from tests.test_torch_hugging_face import qwen3_next

    if not hasattr(transformers, "Qwen3NextConfig"):
        pytest.skip("this version of transformers has no such model")
    model = qwen3_next()
    model.set_attn_implementation("ato")
    places = {ato_torch.hugging_face.sys.modules[type(one).__module__] for one in model.modules()}
    names = [(place, name) for place in places for name in MODULES_NAMES if hasattr(place, name)]
    before = [getattr(*one) for one in names]
    found = ato_torch.check_model(model)
    assert [getattr(*one) for one in names] == before
    assert [layer.kind for layer in found.ours] == ["Qwen3NextAttention"]
    (other,) = found.others
    assert other.kind == "Qwen3NextGatedDeltaNet" and "replace_delta_rule" in other.others[0]
    ato_torch.replace_delta_rule(model)
    found = ato_torch.check_model(model)
    assert not found.others and found.ours[0].calls == ("gated_delta_rule",)


@pytest.mark.parametrize("training", [False, True])
def test_pytorchs_encoder_and_its_fast_path(training):
    layer = torch.nn.TransformerEncoderLayer(H * D, H, 32, batch_first=True)
    model, x = torch.nn.TransformerEncoder(layer, 2).train(training), torch.randn(B, T, H * D)
    found = ato_torch.check_model(model, x)
    assert not found.ours and len(found.others) == 2
    fast = "aten._transformer_encoder_layer_fwd"
    assert all((layer.others == (fast,)) != training for layer in found.others)
    with ato_torch.sdpa_override():
        found = ato_torch.check_model(model, x)
    assert not found.others
    assert kinds(found.ours)[0] == ("layers.0.self_attn", "MultiheadAttention", ("attention",), ())


class Layer(torch.nn.Module):
    """A layer of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def own(q, k, v):
    s = q @ k.mT
    return F.dropout(s.softmax(-1, dtype=torch.float32).to(v.dtype), 0.1, True) @ v


def with_sink(q, k, v):
    s = torch.cat([q @ k.mT, torch.zeros_like(q[..., :1])], -1)
    return s.softmax(-1)[..., :-1] @ v


def router(q, k, v):
    """Weights of experts are no attention."""
    weights, _ = q.flatten(0, 2).softmax(-1).topk(2)
    return (weights.sum(-1, keepdim=True) * v.flatten(0, 2)).view_as(v) @ torch.eye(D)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("function", "others"),
    [
        (ato_torch.attention, ()),
        (own, ("a softmax and products of its own",)),
        (with_sink, ("a softmax and products of its own",)),
        (flex_attention, ("flex_attention",)),
        (
            lambda *qkv: ato_torch.attention(*qkv) + own(*qkv),
            ("a softmax and products of its own",),
        ),
    ],
)
def test_how_a_layer_computes_attention(function, others):
    q, k, v = torch.randn(3, B, H, T, D)
    (layer,) = ato_torch.check_model(Layer(function), q, k, v).layers
    assert layer.others == others and layer.is_ours == (not others)


def test_what_is_no_attention():
    found = ato_torch.check_model(Layer(router), *torch.randn(3, B, H, T, D))
    assert found.layers == () and str(found) == "no layer computes attention"


def test_a_layer_that_is_not_called():
    model = Layer(ato_torch.attention)
    model.unused = torch.nn.MultiheadAttention(8, 2)
    found = ato_torch.check_model(model, *torch.randn(3, B, H, T, D))
    # The model's own call does not stand for that of its part, which has "" in front of it.
    assert kinds(found.others) == [
        ("unused", "MultiheadAttention", (), ("not called in this forward pass",))
    ]


def test_nothing_is_left_changed():
    model = Layer(lambda *qkv: F.dropout(own(*qkv), 0.5))
    tensors = torch.randn(3, B, H, T, D)
    state = torch.get_rng_state()
    ato_torch.check_model(model, *tensors)
    assert torch.equal(torch.get_rng_state(), state)
    broken = Layer(lambda *_: 1 / 0)
    for _ in range(2):  # an error takes the hooks away, too
        with pytest.raises(ZeroDivisionError):
            ato_torch.check_model(broken, *tensors)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_compiled_model():
    model = torch.compile(Layer(ato_torch.attention), backend="eager")
    (layer,) = ato_torch.check_model(model, *torch.randn(3, B, H, T, D)).layers
    assert layer.is_ours and layer.calls == ("attention",)


def test_bad_input():
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got function"):
        ato_torch.check_model(own)
    with pytest.raises(ValueError, match="Linear has no dummy_inputs: pass the arguments"):
        ato_torch.check_model(torch.nn.Linear(2, 2))
