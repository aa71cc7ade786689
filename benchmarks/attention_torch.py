"""Softmax attention by what runs on PyTorch, for the process of `peers.py`.

scaled_dot_product_attention has neither windows nor documents but through a whole mask; what
has them is FlexAttention, by a mask of blocks that is made before the clock starts, PyTorch's own
FlashAttention-2 for packed sequences, and the packages of FlashAttention.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import numpy as np

from benchmarks.cases import Case
from benchmarks.linear_torch import Attend, Contender, by_case, sdpa

# Of plain PyTorch: beyond, its scores are no choice.
SHORT = 1024


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
    # Not compiled: its sort alone takes the assembler minutes.
    blocks = create_block_mask(visible, entries, None, case.T, case.key_shape[1], device=device)
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


def _flash_attention(module: str) -> Any:
    def make(torch: Any, case: Case) -> Attend:
        function = importlib.import_module(module).flash_attn_func
        window = (-1, -1) if case.left is None else (case.left, 0)

        def attend(q: Any, k: Any, v: Any) -> Any:
            found = function(q, k, v, causal=case.causal, window_size=window)
            return found[0] if isinstance(found, tuple) else found

        return attend

    return Contender(lambda case: case.documents is None, make, bthd=True)


def _xformers(torch: Any, case: Case) -> Attend:
    from xformers import ops

    mask = ops.LowerTriangularMask() if case.causal else None
    return lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=mask)


def _plain(torch: Any, case: Case) -> Attend:
    """The scores in memory, in float32."""
    S = case.key_shape[1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.ones(case.T, S, dtype=torch.bool, device=device).triu(1 + S - case.T)

    def attend(q: Any, k: Any, v: Any) -> Any:
        s = (q @ k.transpose(2, 3)).float() * case.D**-0.5
        if case.causal:
            s = s.masked_fill(hidden, float("-inf"))
        return s.softmax(-1).to(v.dtype) @ v

    return attend


def _compiled(torch: Any, case: Case) -> Attend:
    torch._dynamo.reset()
    return torch.compile(_plain(torch, case), dynamic=False)


def _ato_torch(torch: Any, case: Case) -> Attend:
    import ato_torch

    return functools.partial(ato_torch.attention, is_causal=case.causal)


def _heads_as_queries(torch: Any, case: Case) -> Attend:
    """All heads share the keys, of which the values are the first columns: one head of H queries,
    as who has to do with PyTorch alone would write it.
    """
    attend = torch.nn.functional.scaled_dot_product_attention

    def call(q: Any, k: Any) -> Any:
        return attend(q.transpose(1, 2), k, k[..., : case.V]).transpose(1, 2)

    return call


ON_HOST = {"ato_torch": Contender(_unmasked, _ato_torch)}
LATENT = {
    "SDPA default, heads as queries": Contender(lambda case: case.V is not None, _heads_as_queries)
}


def _short(case: Case) -> bool:
    """Where the scores are as good a choice as any."""
    return _unmasked(case) and case.G is None and case.T <= SHORT and case.key_shape[1] <= SHORT


CONTENDERS = {
    name: dataclasses.replace(sdpa(backend), takes=_unmasked)
    for name, backend in (
        ("SDPA cuDNN", "CUDNN_ATTENTION"),
        ("SDPA flash", "FLASH_ATTENTION"),
        ("SDPA default", None),
    )
}
CONTENDERS |= {
    "FlexAttention": Contender(_masked, _flex, shares=by_case),
    "PyTorch varlen flash": Contender(_masked, _packed, bthd=True),
    "FlashAttention-2's package": _flash_attention("flash_attn"),
    "FlashAttention-3's package": _flash_attention("flash_attn_interface"),
    "xFormers": Contender(lambda case: _unmasked(case) and case.G is None, _xformers, bthd=True),
    "PyTorch": Contender(_short, _plain),
    "PyTorch, compiled": Contender(
        lambda case: _short(case) and case.D == 64, _compiled, shares=by_case
    ),
}
