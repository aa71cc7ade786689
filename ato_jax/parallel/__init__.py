"""Attention over a sequence that is cut across devices, for use inside `jax.shard_map`."""

from ato_jax.parallel.linear import linear_attention

__all__ = ["linear_attention"]
