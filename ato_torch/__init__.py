"""ato_jax on PyTorch's tensors, on the device they are on, with gradients and without copies.

    ato_torch.attention(query, key, value, attn_mask=None, ...)   as F.scaled_dot_product_attention
    ato_torch.linear_attention(query, key, value, ...)            as ato_jax.linear_attention
    ato_torch.linear_attention_step(query, key, value, state)     one token of it
    ato_torch.chunk_gated_delta_rule(q, k, v, g, beta, ...)       as in flash-linear-attention
    ato_torch.fused_recurrent_gated_delta_rule(q, k, v, g, ...)   as there, for a few tokens
    ato_torch.chunk_kda(q, k, v, g, beta, ...)                    as there, a decay per channel
    ato_torch.chunk_linear_attn(q, k, v, ...)                     as there, with no feature map
    ato_torch.chunk_retention(q, k, v, ...)                       as there, RetNet's decays
    ato_torch.chunk_simple_gla(q, k, v, g, ...)                   as there, a decay per step
    ato_torch.chunk_gla(q, k, v, g, ...)                          as there, a decay per channel
    ato_torch.combine(outs, lses)                                 merges attention to parts of keys
    ato_torch.explain(ato_torch.attention, query, ...)            says how a call is launched
    ato_torch.register_hf()                                       "ato" in transformers' models
    ato_torch.replace_delta_rule(model)                           the delta rule in those models
    ato_torch.sdpa_override()                                     serves unchanged PyTorch models

The functions of flash-linear-attention's names take tensors [B, T, H, D], all others [B, H, T, D].
`chunk_linear_attn`, `chunk_retention`, `chunk_simple_gla` and `chunk_gla` have the other forms that
they have there, too: fused_recurrent_... for one. Import this package before JAX starts on a GPU:
it keeps JAX from reserving most of the GPU's memory.
"""

import importlib

try:
    importlib.import_module("torch")
except ImportError as error:
    raise ImportError(
        "ato_torch needs PyTorch, which cannot be imported: pip install 'ato-jax[torch]'",
        name="torch",
    ) from error

from ato_jax import __version__ as __version__
from ato_torch import _bridge, _direct, _flops
from ato_torch.check_model import check_model
from ato_torch.delta_rule import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
)
from ato_torch.explain import explain
from ato_torch.functional import attention, combine
from ato_torch.gla import (
    chunk_gla,
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)
from ato_torch.hugging_face import register_hf, replace_delta_rule
from ato_torch.linear import linear_attention, linear_attention_step
from ato_torch.override import sdpa_override
from ato_torch.retention import (
    chunk_linear_attn,
    chunk_retention,
    fused_chunk_linear_attn,
    fused_chunk_retention,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    parallel_retention,
)

_bridge.share_the_gpu()
_flops.register()
_direct.is_on()  # refuses a wrong value in the environment at once

__all__ = [
    "attention",
    "check_model",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "combine",
    "explain",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "linear_attention",
    "linear_attention_step",
    "parallel_retention",
    "parallel_simple_gla",
    "register_hf",
    "replace_delta_rule",
    "sdpa_override",
]
