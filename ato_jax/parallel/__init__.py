"""Attention over a sequence that is cut across devices, for use inside `jax.shard_map`."""

from ato_jax.parallel.linear import linear_attention
from ato_jax.parallel.order import unzigzag, zigzag
from ato_jax.parallel.softmax import attention

__all__ = ["attention", "linear_attention", "unzigzag", "zigzag"]
