"""Models of transformers through ato_torch.register_hf, small ones from their configurations."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed here")
transformers = pytest.importorskip("transformers", reason="transformers is not installed here")

from transformers import masking_utils as masks  # noqa: E402

import ato_torch  # noqa: E402
from ato_torch import _ops  # noqa: E402
from ato_torch import hugging_face as ours  # noqa: E402
from examples import hugging_face as example  # noqa: E402
from tests.replaced import delta_rule_put_back  # noqa: E402, F401

B, T = 2, 12


@pytest.fixture(autouse=True)
def _registered():
    torch.manual_seed(0)
    torch._dynamo.reset()
    ato_torch.register_hf()


@pytest.fixture
def no_mask(monkeypatch):
    """No mask [B, 1, T, S] is made."""
    monkeypatch.setattr(ours.Rules, "in_full", lambda _: pytest.fail("a mask was made"))
    monkeypatch.setattr(masks, "sdpa_mask", lambda **_: pytest.fail("a mask was made"))


def gemma2():
    """Soft caps, and a window in every other layer."""
    config = transformers.Gemma2Config(
        num_key_value_heads=2, head_dim=16, sliding_window=5, attn_logit_softcapping=0.5,
        query_pre_attn_scalar=16, **example.SIZES,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config).eval()


def gpt_oss():
    """Sinks, and a window in every other layer."""
    config = transformers.GptOssConfig(
        num_key_value_heads=2, head_dim=16, sliding_window=5, num_local_experts=2,
        num_experts_per_tok=1, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **example.SIZES,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def t5():
    """Position biases that are learned, an encoder, and attention across."""
    config = transformers.T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def tokens_and_padding():
    tokens = torch.randint(1, 96, (B, T))
    return tokens, (torch.arange(T) < torch.tensor([[T], [7]])).long()


@pytest.mark.parametrize(
    ("make", "padded"),
    [
        (example.llama, False),
        (example.llama, True),
        (example.mistral, True),
        (example.bert, False),
        (example.bert, True),
    ],
)
@pytest.mark.usefixtures("no_mask")
def test_logits_and_gradients_are_sdpas(make, padded):
    tokens, padding = tokens_and_padding()
    found = example.compare(make(), tokens, padding if padded else None)
    assert found["logits"] < 2e-6 and found["gradient"] < 1e-5


@pytest.mark.parametrize(("make", "peer"), [(gemma2, "eager"), (gpt_oss, "eager"), (t5, "sdpa")])
def test_soft_caps_sinks_and_position_biases(make, peer):
    tokens, padding = tokens_and_padding()
    found = example.compare(make(), tokens, padding, peer=peer)
    assert found["logits"] < 2e-6 and found["gradient"] < 1e-5


def check_bfloat16(model, tokens):
    """As near to float32 as "sdpa" is."""
    with torch.no_grad():
        model.set_attn_implementation("eager")
        exact = model(tokens).logits
        model.bfloat16()
        errors = {}
        for name in ("sdpa", example.NAME):
            model.set_attn_implementation(name)
            errors[name] = example.difference(model(tokens).logits, exact)
    assert errors[example.NAME] < 1.2 * errors["sdpa"] + 3e-3


def test_bfloat16():
    check_bfloat16(example.llama(), tokens_and_padding()[0])


def test_steps_of_training_lower_the_loss():
    model = example.llama().train()
    model.set_attn_implementation(example.NAME)
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


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("no_mask")
def test_checkpoints_keep_the_rules(reentrant):
    model = example.mistral().train()
    model.set_attn_implementation(example.NAME)
    tokens, padding = tokens_and_padding()

    def gradients():
        loss = model(tokens, attention_mask=padding, labels=tokens, use_cache=False).loss
        return torch.autograd.grad(loss, model.parameters())

    wanted = gradients()
    # Its name from transformers 5.24 on, and before.
    enable = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": reentrant})
    if reentrant:  # which has no gradients but by backward
        model.enable_input_require_grads()
        model(tokens, attention_mask=padding, labels=tokens, use_cache=False).loss.backward()
        found = [weight.grad for weight in model.parameters()]
    else:
        found = gradients()
    torch.testing.assert_close(list(found), list(wanted))


@pytest.mark.parametrize(
    ("make", "padded", "cache"),
    [
        (example.llama, False, "static"),
        (example.llama, True, "dynamic"),
        (example.mistral, False, "dynamic"),
        (example.mistral, True, "static"),
    ],
)
@pytest.mark.usefixtures("no_mask")
def test_generated_text_is_sdpas(make, padded, cache, monkeypatch):
    """And while it grows, the programs that it takes do not."""
    model = make()
    tokens, padding = tokens_and_padding()
    texts, lengths = [], set()

    def attention(query, key, *others, **options):
        lengths.add((query.shape[2], key.shape[2]))
        return ato_torch.attention(query, key, *others, **options)

    monkeypatch.setattr(ours, "attention", attention)
    for name in ("sdpa", example.NAME):
        model.set_attn_implementation(name)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        mask = padding.flip(1) if padded else torch.ones_like(padding)
        options |= {} if cache == "dynamic" else {"cache_implementation": "static"}
        texts.append(model.generate(tokens, attention_mask=mask, **options))
    assert torch.equal(*texts) and texts[0].shape == (B, T + 6)
    assert len(lengths) == 2


def test_text_generated_by_an_encoder_and_a_decoder():
    model = t5()
    tokens, padding = tokens_and_padding()
    texts = []
    for name in ("sdpa", example.NAME):
        model.set_attn_implementation(name)
        texts.append(
            model.generate(tokens, attention_mask=padding, max_new_tokens=4, do_sample=False)
        )
    assert torch.equal(*texts)


@pytest.mark.usefixtures("no_mask")
def test_packed_sequences_do_not_see_each_other():
    model = example.mistral()
    model.set_attn_implementation(example.NAME)
    tokens, _ = tokens_and_padding()
    cut = 5
    positions = torch.cat([torch.arange(cut), torch.arange(T - cut)])[None]
    call = functools.partial(model, use_cache=False)
    together = call(tokens, position_ids=positions).logits
    pieces = [call(piece).logits for piece in (tokens[:, :cut], tokens[:, cut:])]
    assert example.difference(together, torch.cat(pieces, 1)) < 2e-6


def test_packed_sequences_by_their_ends():
    query, key, value = torch.randn(3, 1, 4, T, 8).unbind()
    ends = torch.tensor([0, 5, 6, T], dtype=torch.int32)
    module = torch.nn.Module()
    found, _ = ours.attend(
        module, query, key, value, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends
    )
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        alone, _ = ours.attend(
            module, *(tensor[:, :, first:last] for tensor in (query, key, value)), None
        )
        torch.testing.assert_close(found[:, first:last], alone)


def test_a_window_without_a_mask():
    query, key, value = torch.randn(3, 1, 2, T, 8).unbind()
    scores = torch.arange(T)[:, None] - torch.arange(T)
    for is_causal, visible in ((True, (scores >= 0) & (scores < 3)), (False, scores.abs() < 3)):
        module = torch.nn.Module()
        module.is_causal = is_causal
        found, _ = ours.attend(module, query, key, value, None, sliding_window=3)
        wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, visible)
        torch.testing.assert_close(found, wanted.transpose(1, 2))
        newest, _ = ours.attend(module, query[:, :, -1:], key, value, None, sliding_window=3)
        torch.testing.assert_close(newest, wanted.transpose(1, 2)[:, -1:])


def packed(function):
    ids = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]])
    positions = torch.tensor([[4, 5, 6, 0, 1], [3, 0, 0, 1, 2]])
    of_sequences = masks.remap_positions_for_packed_sequence(function, positions)
    return masks.and_masks(of_sequences, masks.packed_sequence_mask_function(ids))


PATTERNS = {
    "causal": lambda: masks.causal_mask_function,
    "both ways": lambda: masks.bidirectional_mask_function,
    "window": lambda: masks.sliding_window_causal_mask_function(3),
    "wide window": lambda: masks.sliding_window_causal_mask_function(30),
    "window both ways": lambda: masks.sliding_window_bidirectional_mask_function(2),
    "packed": lambda: packed(masks.causal_mask_function),
    "packed window": lambda: packed(masks.sliding_window_causal_mask_function(2)),
}


# How many queries and keys, and at which positions they begin.
PLACES = [(5, 5, 0, 0), (1, 6, 5, 0), (3, 9, 6, 0), (1, 4, 7, 4), (4, 9, 0, 0), (1, 9, 3, 0)]


@pytest.mark.parametrize(
    ("name", "place"),
    # Sequences are packed where there is no cache alone.
    [(name, place) for name in PATTERNS for place in PLACES[: 1 if "packed" in name else None]],
)
def test_rules_are_the_mask(name, place):
    """And None, where they are left out, is read as the same."""
    length, keys, offset, first = place
    padding = torch.ones(B, first + keys, dtype=torch.bool)
    padded = padding.clone()
    padded[1, :2] = False
    unwritten = padding[:, : max(1, offset + length)]
    for given in (None, padding, padded, unwritten):
        if "packed" in name and given is padded:
            continue
        for where in (offset, torch.tensor(offset)):
            request = {
                "batch_size": B, "q_length": length, "kv_length": keys, "q_offset": where,
                "kv_offset": first, "mask_function": PATTERNS[name](), "attention_mask": given,
                "device": "cpu", "allow_is_causal_skip": False,
            }  # fmt: skip
            wanted = masks.sdpa_mask(**request)
            rules = ours.mask(**request)
            assert isinstance(rules, ours.Rules) and rules.shape == wanted.shape
            assert torch.equal(rules.in_full(), wanted) and torch.equal(rules & True, wanted)
            skip = {"allow_is_causal_skip": True, "allow_is_bidirectional_skip": True}
            if ours.mask(**request | skip) is None:
                module = torch.nn.Module()
                module.is_causal = rules.right == 0
                query, key, value = (torch.randn(B, 2, size, 4) for size in (length, keys, keys))
                found, _ = ours.attend(module, query, key, value, None)
                exact, _ = ours.attend(module, query, key, value, wanted)
                torch.testing.assert_close(found, exact)


def test_other_patterns_come_as_masks():
    causal = masks.causal_mask_function
    chunks = masks.chunked_causal_mask_function(3, torch.zeros(B, dtype=torch.int64))
    blocks = masks.or_masks(causal, masks.blockwise_overlay(torch.zeros(B, T).long()))
    own = masks.and_masks(causal, lambda b, h, i, j: j != 2)
    for function in (chunks, blocks, own):
        request = {
            "batch_size": B, "q_length": T, "kv_length": T, "q_offset": 0, "kv_offset": 0,
            "mask_function": function, "attention_mask": None, "allow_is_causal_skip": False,
        }  # fmt: skip
        found = ours.mask(**request)
        assert type(found) is torch.Tensor
        assert torch.equal(found, masks.sdpa_mask(**request))


def test_masks_of_the_callers_own():
    model = example.llama()
    tokens, _ = tokens_and_padding()
    visible = torch.rand(B, 1, T, T) > 0.3
    visible |= torch.eye(T, dtype=torch.bool)
    added = torch.where(visible, torch.randn(B, 1, T, T), torch.finfo(torch.float32).min)
    for mask in (visible, added):
        answers = []
        for name in ("sdpa", example.NAME):
            model.set_attn_implementation(name)
            answers.append(model(tokens, attention_mask=mask).logits)
        assert example.difference(*answers) < 2e-6


def test_compiled_without_a_break():
    model = example.mistral()
    del model.model.layers[1:]
    model.set_attn_implementation(example.NAME)
    tokens, padding = tokens_and_padding()
    call = {"attention_mask": padding, "use_cache": False}
    wanted = model(tokens, **call).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, **call).logits, wanted)


def test_layers_compiled_one_by_one_take_the_rules():
    """One graph, whatever the padding is."""
    model = example.mistral()
    model.set_attn_implementation(example.NAME)
    tokens, padding = tokens_and_padding()
    other = (torch.arange(T) < torch.tensor([[3], [T]])).long()
    calls = [{"attention_mask": mask, "use_cache": False} for mask in (padding, other)]
    wanted = [model(tokens, **call).logits for call in calls]
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for call, exact in zip(calls, wanted, strict=True):
        torch.testing.assert_close(model(tokens, **call).logits, exact)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ours.REFUSED)
def test_what_it_does_not_take_is_refused_by_name(name):
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=f"^{name} is not supported with .*'ato'"):
        ours.attend(torch.nn.Module(), query, query, query, None, **{name: torch.zeros(2)})


def test_weights_are_refused():
    model = example.bert()
    model.set_attn_implementation(example.NAME)
    with pytest.raises(ValueError, match="output_attentions is not supported"):
        model(torch.ones(1, 3, dtype=torch.int64), output_attentions=True)


@pytest.mark.skipif(
    example.real_model() is None, reason=f"{example.REAL_MODEL} is not installed here"
)
def test_vectors_of_a_real_model_are_its_own():
    found, *peers = (
        example.embeddings(example.real_model(), name, example.SENTENCES)
        for name in (example.NAME, "sdpa", "eager")
    )
    for peer in peers:
        assert (found * peer).sum(-1).min() > 0.999
    # They mean something: the first two say the same of a cat.
    assert (found @ found.mT).fill_diagonal_(-1).argmax(-1)[0] == 1


@pytest.mark.gpu
@pytest.mark.kernels("attention")
@pytest.mark.parametrize("make", [example.llama, example.mistral, example.bert, gemma2])
def test_logits_gradients_and_text_on_a_gpu(make):
    """Against transformers' own products, in float32, which PyTorch multiplies in full."""
    model = make().cuda()
    tokens, padding = (tensor.cuda() for tensor in tokens_and_padding())
    found = example.compare(model, tokens, padding, peer="eager")
    assert found["logits"] < 1e-5 and found["gradient"] < 1e-4, found
    if make is not example.bert:
        first, second = (
            example.generated(model, name, tokens, count=6) for name in ("eager", example.NAME)
        )
        assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.kernels("attention")
@pytest.mark.parametrize("make", [example.llama, example.bert])
def test_bfloat16_on_a_gpu(make):
    tokens, _ = tokens_and_padding()
    check_bfloat16(make().cuda(), tokens.cuda())


def qwen3_next():
    """A layer of gated DeltaNet, whose value heads share keys, and one of softmax attention."""
    config = transformers.Qwen3NextConfig(
        num_key_value_heads=2, head_dim=16, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, **example.SIZES,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config).eval()


def kimi_linear():
    """A layer of Kimi Delta Attention, and one of latent attention."""
    config = transformers.KimiLinearConfig(
        num_key_value_heads=4, layer_types=["linear_attention", "full_attention"],
        linear_num_heads=2, linear_head_dim=16, mlp_layer_types=["dense", "dense"],
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **example.SIZES,
    )  # fmt: skip
    return transformers.KimiLinearForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "config"),
    [(qwen3_next, "Qwen3NextConfig"), (kimi_linear, "KimiLinearConfig")],
    ids=["qwen3_next", "kimi"],
)
@pytest.mark.usefixtures("delta_rule_put_back")
def test_delta_rule_is_transformers_own(make, config, monkeypatch):
    """Logits, text that is generated with a cache, and gradients of all parameters."""
    if not hasattr(transformers, config):
        pytest.skip("this version of transformers has no such model")
    model = make()
    tokens, padding = tokens_and_padding()

    def results():
        found = model(tokens, attention_mask=padding, labels=tokens)
        gradients = torch.autograd.grad(found.loss, model.parameters())
        text = model.generate(
            tokens, attention_mask=padding.flip(1), max_new_tokens=4, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        logits = torch.cat([found.logits.flatten(), *map(torch.flatten, text.logits)])
        return logits, gradients, text.sequences

    wanted, ran, run = results(), set(), _ops.run
    ato_torch.replace_delta_rule(model)
    monkeypatch.setattr(_ops, "run", lambda op, *rest: ran.add(op) or run(op, *rest))
    found = results()
    assert ran == {"gated_delta_rule", "gated_delta_rule_step"}
    assert example.difference(found[0], wanted[0]) < 2e-6
    norm = torch.stack([gradient.norm() for gradient in wanted[1]]).norm()
    # One by one: those of a decay's parameters are less than a thousandth of all.
    for one, other in zip(found[1], wanted[1], strict=True):
        assert (one - other).norm() < 1e-4 * other.norm() + 1e-7 * norm
    assert torch.equal(found[2], wanted[2]) and found[2].shape == (B, T + 4)


def test_delta_rule_of_a_layer_and_of_none():
    """In transformers 4.57 a layer has the functions as attributes."""
    layer = torch.nn.Module()
    layer.chunk_gated_delta_rule = layer.recurrent_gated_delta_rule = None
    ato_torch.replace_delta_rule(torch.nn.Sequential(layer))
    q = torch.randn(1, 1, 2, 4)
    o, _ = layer.chunk_gated_delta_rule(
        q, q, q, g=-torch.ones(1, 1, 2), beta=torch.ones(1, 1, 2), position_ids=None
    )
    assert layer.recurrent_gated_delta_rule is ours.GATED[1] and o.shape == q.shape
    with pytest.raises(ValueError, match="model must have layers of transformers .* got Linear"):
        ato_torch.replace_delta_rule(torch.nn.Linear(2, 2))
