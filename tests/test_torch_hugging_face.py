"""Models of transformers through ato_torch, as examples/hugging_face.py puts them."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed here")
pytest.importorskip("transformers", reason="transformers is not installed here")

from examples import hugging_face  # noqa: E402


@pytest.fixture(autouse=True)
def _registered():
    torch.manual_seed(0)
    hugging_face.register()


def tokens_and_padding():
    tokens = torch.randint(1, 96, (2, 12))
    return tokens, (torch.arange(12) < torch.tensor([[12], [7]])).long()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [hugging_face.llama, hugging_face.bert])
def test_logits_and_gradients_are_sdpas(make, padded):
    tokens, padding = tokens_and_padding()
    found = hugging_face.compare(make(), tokens, padding if padded else None)
    assert found["logits"] < 2e-6 and found["gradient"] < 1e-5


@pytest.mark.parametrize("make", [hugging_face.llama, hugging_face.bert])
def test_bfloat16_is_as_near_to_float32_as_sdpa_is(make):
    model = make()
    tokens, _ = tokens_and_padding()
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        exact = model(tokens).logits
        model.bfloat16()
        errors = {}
        for name in ("sdpa", hugging_face.NAME):
            model.set_attn_implementation(name)
            errors[name] = hugging_face.difference(model(tokens).logits, exact)
    assert errors[hugging_face.NAME] < 1.2 * errors["sdpa"] + 3e-3


def test_steps_of_training_lower_the_loss():
    model = hugging_face.llama().train()
    model.set_attn_implementation(hugging_face.NAME)
    tokens, _ = tokens_and_padding()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1


def test_generated_text_is_sdpas():
    model = hugging_face.llama()
    tokens, _ = tokens_and_padding()
    found, wanted = (
        hugging_face.generated(model, name, tokens, count=4)
        for name in (hugging_face.NAME, "sdpa")
    )
    assert torch.equal(found, wanted) and found.shape == (2, 16)


def test_compiled_without_a_break():
    model = hugging_face.llama()
    model.set_attn_implementation(hugging_face.NAME)
    tokens, _ = tokens_and_padding()
    wanted = model(tokens, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, use_cache=False).logits, wanted)


def test_what_it_does_not_take_is_refused_by_name():
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="position_bias is not supported"):
        hugging_face.attention(
            torch.nn.Module(), query, query, query, None, position_bias=torch.zeros(1, 2, 3, 3)
        )
