"""Flax layers on linear and softmax attention, in place of nnx.MultiHeadAttention."""

from ato_jax.nn.attention import Attention
from ato_jax.nn.gated import GatedLinearAttention
from ato_jax.nn.latent import LatentAttention
from ato_jax.nn.linear_attention import LinearAttention, Performer

__all__ = [
    "Attention",
    "GatedLinearAttention",
    "LatentAttention",
    "LinearAttention",
    "Performer",
]
