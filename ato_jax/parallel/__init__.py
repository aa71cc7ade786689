"""Attention over a sequence that is cut across devices, for use inside `jax.shard_map`."""

from ato_jax.parallel.delta_rule import gated_delta_rule
from ato_jax.parallel.linear import linear_attention
from ato_jax.parallel.order import unzigzag, zigzag
from ato_jax.parallel.softmax import attention

__all__ = ["attention", "gated_delta_rule", "linear_attention", "unzigzag", "zigzag"]
