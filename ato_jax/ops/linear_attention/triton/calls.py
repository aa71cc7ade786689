"""Facts about a call beyond its spec: the size of its state, and the needs of its caller.

A state is kv [V, F], held transposed, and k_sum [F]. Its size decides which kernels run, and with
which tiles: up to `SMALL_STATE` 4 warps hold it beside tiles of 64 rows, up to `LARGEST_STATE` 8
warps hold it, and beyond that no program does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.triton.tiles import padded

SMALL_STATE = 64 * 64
# The elements of a state [V, F] that a program holds in float32, beside all else: with 8 warps 64
# of a thread's 255 registers.
LARGEST_STATE = 128 * 128
# A larger state is stored. So many of its columns or rows lie in shared memory at one time, and it
# is summed up in blocks of so many columns and rows.
STATE_PART = 64
STATE_BLOCK = 128


def state_size(spec: LinearAttentionSpec) -> int:
    """The elements of a state as a program holds it."""
    return padded(spec.F) * padded(spec.V)


def in_parts(spec: LinearAttentionSpec) -> bool:
    """Whether no program holds a state as a whole: only where states are stored (`split.py`)."""
    return state_size(spec) > LARGEST_STATE


def one_state(spec: LinearAttentionSpec) -> bool:
    """Whether one state serves all queries: all see all keys, and nothing weighs the pairs."""
    return not spec.causal and spec.decay is None and spec.segments is None


# Up to so many features a call with a decay per step and channel is prepared.
LARGEST_PREPARED_F = 128


def is_prepared(spec: LinearAttentionSpec) -> bool:
    """Whether the features are decayed beforehand (`prepared/`): beside a large state, where the
    kernels of `channel/` would be short of registers."""
    return (
        spec.decay == "channel"
        and spec.causal
        and spec.dtype == "bfloat16"
        and state_size(spec) > SMALL_STATE
        and padded(spec.F) <= LARGEST_PREPARED_F
    )


@dataclasses.dataclass(frozen=True)
class UnroundedSpec(LinearAttentionSpec):
    """A call whose sequences are written in float32: the caller computes on, and rounds once."""


@dataclasses.dataclass(frozen=True)
class MatchedSpec(LinearAttentionSpec):
    """A call whose caller subtracts k's gradient times k from q's gradient times q.

    What both say of a pair has to cancel in that difference. So both gradients are written in
    float32, and both passes multiply the same roundings of the factors and of the pair's weight,
    which is rounded in two parts.
    """


@dataclasses.dataclass(frozen=True)
class FineSpec(LinearAttentionSpec):
    """A call on bfloat16 arrays that is multiplied as one on float32 arrays is, which its dtype
    says (`few_rows.py`)."""


@dataclasses.dataclass(frozen=True)
class FineFloat16Spec(FineSpec):
    """The same of a call on float16 arrays."""


def sequence_dtype(spec: LinearAttentionSpec) -> str:
    """The dtype in which the call's sequences are written."""
    if isinstance(spec, UnroundedSpec):
        return "float32"
    if isinstance(spec, FineFloat16Spec):
        return "float16"
    return "bfloat16" if isinstance(spec, FineSpec) else spec.dtype


def unrounded(spec: LinearAttentionSpec) -> UnroundedSpec:
    return UnroundedSpec(**fields(spec))


def matched(spec: LinearAttentionSpec) -> MatchedSpec:
    return MatchedSpec(**fields(spec))


def fields(spec: LinearAttentionSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
