"""Packed sequences by flash-linear-attention's `cu_seqlens`: their ends, checked, and two ways in.

A packed row [1, T] is a row with segments, or its sequences become rows [N, L] of a batch, padded
with zeros to one length L. A row with segments has one state to begin with and one to end with, so
sequences with states become rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ato_torch import _checks, _modes
from ato_torch._checks import Integers


class Sequences(NamedTuple):
    """The ends of packed sequences, [N + 1], as given and in the host's memory."""

    ends: Integers | None
    on_host: Integers | None


def ends_of(sequences: Sequences, q: torch.Tensor) -> torch.Tensor | None:
    """The ends on q's device, for q [B, T, ...], checked where that waits for no GPU."""
    given, on_host = sequences
    if given is None:
        if on_host is not None:
            raise ValueError("cu_seqlens_cpu needs cu_seqlens, got None")
        return None
    B, T = q.shape[:2]
    if B != 1:
        raise ValueError(f"cu_seqlens needs a packed row, B = 1, got B={B}")
    ends = None
    known = {}
    for name, value in (("cu_seqlens_cpu", on_host), ("cu_seqlens", given)):
        if value is None:
            continue
        try:
            ends = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"{name} must hold integers [N + 1], got {value!r}") from None
        if ends.is_floating_point() or ends.dtype == torch.bool or ends.ndim != 1 or not len(ends):
            raise ValueError(
                f"{name} must hold integers [N + 1], got {ends.dtype} of shape "
                f"{tuple(ends.shape)}"
            )
        if ends.device.type != "cpu":
            _checks.check_place(name, ends, q, whose="q")
        elif _modes.runs_plainly([ends]):
            found = ends.tolist()
            if found[0] != 0 or found[-1] != T or sorted(found) != found:
                raise ValueError(f"{name} must rise from 0 to T={T}, got {found}")
            known[name] = found
    if len(known) == 2 and known["cu_seqlens_cpu"] != known["cu_seqlens"]:
        raise ValueError(
            f"cu_seqlens_cpu must hold what cu_seqlens holds, {known['cu_seqlens']}, "
            f"got {known['cu_seqlens_cpu']}"
        )
    assert ends is not None
    return ends.long().to(q.device)


def longest_of(sequences: Sequences, ends: torch.Tensor) -> int:
    """The length of the longest sequence; waits for the GPU unless the ends are on the host."""
    on_host = ends if sequences.on_host is None else torch.as_tensor(sequences.on_host)
    return int(on_host.diff().max()) if len(ends) > 1 else 0


def segment_ids(ends: torch.Tensor, T: int) -> torch.Tensor:
    """The number of the sequence that each step is in, [1, T]."""
    return _sequence_of(ends, T).int()[None]


class Rows:
    """Packed sequences as rows of a batch, and rows as packed sequences; both differentiable."""

    def __init__(self, ends: torch.Tensor, longest: int, T: int) -> None:
        self.count = len(ends) - 1
        # Single tokens stay rows of one step each, which have an op of their own.
        self.length = longest if longest == 1 else _checks.filled(longest)
        sequence = _sequence_of(ends, T)
        steps = torch.arange(T, device=ends.device, dtype=ends.dtype)
        # Of each step, its place in [N * L]. All differ, so no gradient adds two of them up.
        self.places = sequence * self.length + steps - ends[sequence]  # [T]

    def padded(self, packed: torch.Tensor) -> torch.Tensor:
        """[1, T, ...] as [N, L, ...], with zeros as the padding."""
        rows = packed.new_zeros(self.count * self.length, *packed.shape[2:])
        return rows.index_copy(0, self.places, packed[0]).unflatten(0, (self.count, self.length))

    def packed(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, L, ...] as [1, T, ...]."""
        return rows.flatten(0, 1).index_select(0, self.places)[None]


def _sequence_of(ends: torch.Tensor, T: int) -> torch.Tensor:
    """The number of the sequence that each step is in, [T]; empty sequences have none."""
    steps = torch.arange(T, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends[1:].contiguous(), steps, right=True)

