"""One token of the delta rule: what is static about the call, and its arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from ato_jax.meshes import partition, sharded


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """The static values of one step. The shapes are those of the arrays.

    With `in_place` the kernel writes the new state over the old one. XLA copies the old one first
    where the caller keeps it.
    """

    scale: float
    normalize_qk: bool
    in_place: bool = True


class StepInputs(NamedTuple):
    """The arrays of one step, bound and batched."""

    q: jax.Array  # [B, G, D]
    k: jax.Array  # [B, G, D]
    v: jax.Array  # [B, H, V]
    beta: jax.Array  # [B, H] float32
    decay: jax.Array | None  # [B, H, D or 1] float32
    state: jax.Array  # [B, H, D, V] float32

    def letters(self) -> Any:
        """The tree with each array replaced by the letters of its axes (`partitioning.py`)."""
        decay = None
        if self.decay is not None:
            decay = "BHD" if self.decay.shape[2] == self.state.shape[2] else "BH."
        return StepInputs("BGD", "BGD", "BHV", "BH", decay, "BHDV")  # type: ignore[arg-type]

    def partition_of_outputs(self) -> Any:
        """(out, state) with a `PartitionSpec` in place of each array."""
        heads = partition(self.v)[:2]
        return sharded(*heads, None), sharded(*heads, None, None)


OUTPUT_LETTERS = ("BHV", "BHDV")
