"""The delta rule by what runs on PyTorch, for the process of `peers.py`: flash-linear-attention's
kernels. Tensors are [B, T, H, D], beta is [B, T, H].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.cases import Case
from benchmarks.linear_torch import Attend, Contender, by_case


def _fla(name: str) -> Callable[[Any, Case], Attend]:
    def make(torch: Any, case: Case) -> Attend:
        from fla import ops

        function = getattr(ops, name)

        def attend(q: Any, k: Any, v: Any, *gates: Any) -> Any:
            *decay, beta = gates
            return function(q, k, v, beta=beta, **dict(zip("g", decay, strict=False)))[0]

        return attend

    return make


def _takes(case: Case, decay: str | None) -> bool:
    """Whole sequences."""
    return case.op == "delta" and case.decay == decay


_contender = functools.partial(Contender, bthd=True, shares=by_case)

CONTENDERS = {
    "fla delta rule": _contender(lambda case: _takes(case, None), _fla("chunk_delta_rule")),
    "fla gated delta rule": _contender(
        lambda case: _takes(case, "step"), _fla("chunk_gated_delta_rule")
    ),
    "fla KDA": _contender(lambda case: _takes(case, "channel"), _fla("chunk_kda")),
}
