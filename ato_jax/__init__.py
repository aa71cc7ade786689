"""Linear and exact softmax attention for JAX, at the speed of the hardware."""

from ato_jax.device import interpret
from ato_jax.dispatch import UnsupportedError
from ato_jax.explain import explain
from ato_jax.ops.attention.api import attention
from ato_jax.ops.linear_attention.api import linear_attention
from ato_jax.ops.linear_attention.features import favor
from ato_jax.ops.linear_attention.spec import LinearState

__version__ = "0.1.0"

__all__ = [
    "LinearState",
    "UnsupportedError",
    "attention",
    "explain",
    "favor",
    "interpret",
    "linear_attention",
]
