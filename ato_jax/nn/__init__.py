"""Flax layers on linear and softmax attention, in place of nnx.MultiHeadAttention."""

import importlib

try:
    importlib.import_module("flax.nnx")
except ImportError as error:
    raise ImportError(
        "ato_jax.nn needs Flax, which cannot be imported: pip install 'ato-jax[flax]'",
        name="flax",
    ) from error

from ato_jax.nn.attention import Attention
from ato_jax.nn.attention_fn import linear_attention_fn, softmax_attention_fn
from ato_jax.nn.delta_layers import GatedDeltaNet, KimiDeltaAttention
from ato_jax.nn.gated import GatedLinearAttention
from ato_jax.nn.latent import LatentAttention
from ato_jax.nn.linear_attention import LinearAttention, Performer
from ato_jax.nn.linen import to_linen
from ato_jax.nn.swap import convert_attention, replace_attention

__all__ = [
    "Attention",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LatentAttention",
    "LinearAttention",
    "Performer",
    "convert_attention",
    "linear_attention_fn",
    "replace_attention",
    "softmax_attention_fn",
    "to_linen",
]
