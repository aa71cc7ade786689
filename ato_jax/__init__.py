"""Linear and exact softmax attention for JAX, as GPU kernels and plain JAX."""

import jax

if jax.__version_info__ < (0, 10, 2):
    raise ImportError(f"ato_jax needs JAX 0.10.2 or newer, found {jax.__version__}")

from ato_jax import parallel as parallel
from ato_jax.checking import checked
from ato_jax.choosing import UnsupportedError
from ato_jax.device import interpret
from ato_jax.explain import explain
from ato_jax.ops.attention.api import attention
from ato_jax.ops.attention.decode import decode_attention
from ato_jax.ops.attention.pieces import combine, total_attention
from ato_jax.ops.delta_rule.api import gated_delta_rule
from ato_jax.ops.delta_rule.step import gated_delta_rule_step
from ato_jax.ops.linear_attention.api import linear_attention
from ato_jax.ops.linear_attention.features import favor
from ato_jax.ops.linear_attention.spec import LinearState
from ato_jax.ops.linear_attention.step import linear_attention_step
from ato_jax.paged_cache import PagedCache
from ato_jax.programs import program_limit
from ato_jax.quantizing import quantize, rotate

__version__ = "0.1.0"

__all__ = [
    "LinearState",
    "PagedCache",
    "UnsupportedError",
    "attention",
    "checked",
    "combine",
    "decode_attention",
    "explain",
    "favor",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "interpret",
    "linear_attention",
    "linear_attention_step",
    "program_limit",
    "quantize",
    "rotate",
    "total_attention",
]
