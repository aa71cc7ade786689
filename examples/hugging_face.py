"""Models of Hugging Face's transformers with ato_torch's attention, and nothing of them changed.

`register()` adds "ato" to the attention functions that a model may be asked for:

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ato")

Here a small Llama, whose groups of query heads share keys and values, and a small BERT are made
from their configurations, without a download. With the same weights, "ato" is put beside PyTorch's
own "sdpa": what the models answer, the loss and gradient of a step of training, and the text that
the Llama generates with its cache.

    python -m examples.hugging_face                 seconds on two CPU cores

needs `pip install '.[torch]' transformers`, and takes no options.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import ato_torch

NAME = "ato"


def register() -> None:
    """Adds "ato" to the names that `attn_implementation` takes."""
    AttentionInterface.register(NAME, attention)
    # Masks as for "sdpa": boolean, with padding, windows and packed sequences in them, or None
    # where causality or nothing is all there is to say.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, G, S, D]
    value: torch.Tensor,  # [B, G, S, V]
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it; the result is [B, T, H, V].

    `softcap` is Gemma's, `s_aux` are the sinks of gpt-oss; a window is in the mask already.
    """
    for name in ("position_bias", "cache", "output_attentions"):
        given = others.get(name)
        if given is not None and given is not False:
            raise ValueError(f"{name} is not supported with attn_implementation={NAME!r}")
    T = query.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Without a mask, a single query is the newest one and sees all; several begin with the first.
    is_causal = is_causal and attention_mask is None and T > 1
    out = ato_torch.attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        is_causal,
        scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


# Of both models, by the names of transformers.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES)).eval()


def bert() -> BertForMaskedLM:
    return BertForMaskedLM(BertConfig(**SIZES)).eval()


def compare(model: Any, tokens: torch.Tensor, padding: torch.Tensor | None) -> dict[str, float]:
    """Relative RMS differences of "ato" from "sdpa": the logits and the gradient of every weight.

    `padding` is 1 where there is a token, 0 beyond; what is answered there counts for nothing.
    """
    answers, gradients = {}, {}
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name)
        model.zero_grad()
        labels = tokens if padding is None else tokens.masked_fill(padding == 0, -100)
        found = model(tokens, attention_mask=padding, labels=labels)
        found.loss.backward()
        logits = found.logits.detach()
        answers[name] = logits if padding is None else logits[padding == 1]
        weights = [weight for weight in model.parameters() if weight.grad is not None]
        gradients[name] = torch.cat([weight.grad.flatten().float() for weight in weights])
    return {
        "logits": difference(answers[NAME], answers["sdpa"]),
        "gradient": difference(gradients[NAME], gradients["sdpa"]),
    }


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def generated(model: Any, name: str, tokens: torch.Tensor, count: int) -> torch.Tensor:
    model.set_attn_implementation(name)
    return model.generate(tokens, max_new_tokens=count, do_sample=False, pad_token_id=0)


def main() -> None:
    register()
    torch.manual_seed(0)
    tokens = torch.randint(1, 96, (2, 24))
    padding = (torch.arange(24) < torch.tensor([[24], [17]])).long()
    for model in (llama(), bert()):
        for mask in (None, padding):
            found = compare(model, tokens, mask)
            kind = "without padding" if mask is None else "with padding"
            figures = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
            print(f"{type(model).__name__}, {kind}: differs from sdpa by {figures}")
    model = llama()
    texts = [generated(model, name, tokens, count=8) for name in ("sdpa", NAME)]
    print(f"Generated with both the same: {torch.equal(*texts)}")


if __name__ == "__main__":
    main()
