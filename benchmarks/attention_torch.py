"""Softmax attention by what runs on PyTorch, for the process of `peers.py`.

scaled_dot_product_attention has neither windows nor documents but through a whole mask; what
has them is FlexAttention, by a mask of blocks that is made before the clock starts, and
FlashAttention-2 for packed sequences.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.cases import Case
from benchmarks.linear_torch import Attend, Contender, sdpa


def _unmasked(case: Case) -> bool:
    return case.left is None and case.documents is None


def _masked(case: Case) -> bool:
    return not _unmasked(case)


def _flex(torch: Any, case: Case) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # A program for each case, as the other contenders have.
    torch._dynamo.reset()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.as_tensor(case.document_ids, device=device) if case.documents else None

    def visible(entry: Any, head: Any, query: Any, key: Any) -> Any:
        found = query >= 0
        if case.causal:
            found = found & (key <= query)
        if case.left is not None:
            found = found & (key >= query - case.left)
        if ids is not None:
            found = found & (ids[entry, query] == ids[entry, key])
        return found

    entries = case.B if case.documents else None
    # Compiled, so that it holds no [T, T] of its own.
    make = torch.compile(create_block_mask) if device == "cuda" else create_block_mask
    blocks = make(visible, entries, None, case.T, case.key_shape[1], device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = case.G is not None
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=grouped)


def _packed(torch: Any, case: Case) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    if case.documents:
        ids = case.document_ids
        starts = np.flatnonzero(np.diff(ids, axis=1, prepend=-1).reshape(-1))
    else:
        starts = np.arange(case.B) * case.T
    ends = np.append(starts, case.B * case.T)
    bounds = torch.as_tensor(ends.astype(np.int32), device="cuda")
    longest = int(np.diff(ends).max())
    window = (-1 if case.left is None else case.left, 0) if case.causal else (-1, -1)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=window)
        return out.unflatten(0, (case.B, case.T))

    return attend


CONTENDERS = {
    name: dataclasses.replace(sdpa(backend), takes=_unmasked)
    for name, backend in (
        ("SDPA cuDNN", "CUDNN_ATTENTION"),
        ("SDPA flash", "FLASH_ATTENTION"),
        ("SDPA default", None),
    )
}
CONTENDERS |= {
    "FlexAttention": Contender(_masked, _flex),
    "PyTorch varlen flash": Contender(_masked, _packed, bthd=True),
}
