"""Flax layers on linear and softmax attention, in place of nnx.MultiHeadAttention."""
