"""Linear attention by what runs on PyTorch, for the process of `peers.py`.

Each contender says which cases it takes, and makes the function that is timed. A contender
`mapped` takes features, phi(q) and phi(k): its time leaves out the mapping. One that does not
`normalize` leaves out the division, too.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Hashable
from typing import Any

from benchmarks.cases import Case

# The elements of an array of which a call by SDPA takes long.
LONG = 1 << 26

# From tensors q, k, v and maybe decay to the output.
Attend = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Contender:
    """`make(torch, case)` gives the function; tensors are [B, H, T, D], or [B, T, H, D].

    `picked(torch, tensors, case)` says which implementation a contender takes that has several.
    `shares` where its first call compiles, into a cache on disk: cases of which it is the same
    share what is compiled.
    """

    takes: Callable[[Case], bool]
    make: Callable[[Any, Case], Attend]
    bthd: bool = False
    mapped: bool = False
    normalize: bool = True
    softmax: bool = False
    picked: Callable[[Any, dict[str, Any], Case], str] | None = None
    shares: Callable[[Case], Hashable] | None = None


def _ungated(case: Case) -> bool:
    return case.op == "linear" and case.decay is None


def _long(case: Case) -> bool:
    return case.B * case.H * case.T * case.D >= LONG


def _full(case: Case) -> bool:
    return _ungated(case) and not case.causal


def _causal(case: Case) -> bool:
    return _ungated(case) and case.causal


def sdpa(backend: str | None) -> Contender:
    """One of scaled_dot_product_attention's backends, by PyTorch's name; None lets it choose."""

    def make(torch: Any, case: Case) -> Attend:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        attend = functools.partial(
            torch.nn.functional.scaled_dot_product_attention,
            is_causal=case.causal,
            enable_gqa=case.G is not None,
        )
        if backend is None:
            return attend

        def by_backend(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel([getattr(SDPBackend, backend)]):
                return attend(q, k, v)

        return by_backend

    return Contender(_ungated, make, softmax=True, picked=None if backend else _picked)


def _picked(torch: Any, tensors: dict[str, Any], case: Case) -> str:
    """The backend that scaled_dot_product_attention chooses for itself."""
    from torch.nn.attention import SDPBackend

    # An inner part of PyTorch, which another version may be without.
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return ""
    tensors = [tensors[name] for name in "qkv"]
    return SDPBackend(choose(*tensors, is_causal=case.causal, enable_gqa=case.G is not None)).name


def _plain(torch: Any, case: Case) -> Attend:
    elu = torch.nn.functional.elu

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k = elu(q) + 1, elu(k) + 1
        total = q @ k.sum(2, dtype=torch.float32).to(k.dtype)[..., None]  # [B, H, T, 1]
        return (q @ (k.transpose(2, 3) @ v)) / total

    return attend


def _compiled(torch: Any, case: Case) -> Attend:
    # A program for each case, as the other contenders have.
    torch._dynamo.reset()
    return torch.compile(_plain(torch, case), dynamic=False)


def _flash_bla(torch: Any, case: Case, mapped: bool) -> Attend:
    from flash_bla.ops.linear_attn import fused

    _search_less(fused)
    if mapped:
        return fused.linear_attention
    elu = torch.nn.functional.elu
    return lambda q, k, v: fused.linear_attention(elu(q) + 1, elu(k) + 1, v)


def _search_less(module: Any) -> None:
    """Of 144 configs for each T, those that use a Hopper's tensor cores well, once for each D.

    The whole search takes minutes for every length.
    """
    for kernel in vars(module).values():
        if hasattr(kernel, "configs") and hasattr(kernel, "keys"):
            kernel.keys = ["DK"]
            kernel.configs = [
                config
                for config in kernel.configs
                if config.num_warps > 1
                and config.kwargs["BL"] > 32
                and config.kwargs["BK"] == config.kwargs["BV"] == 64
            ]


def _fla(name: str, **options: Any) -> Callable[[Any, Case], Attend]:
    def make(torch: Any, case: Case) -> Attend:
        from fla import ops

        function = getattr(ops, name)
        return lambda q, k, v: function(q, k, v, scale=1.0, **options)[0]

    return make


def _fla_gated(name: str) -> Callable[[Any, Case], Attend]:
    def make(torch: Any, case: Case) -> Attend:
        from fla import ops

        function = getattr(ops, name)
        return lambda q, k, v, decay: function(q, k, v, g=decay, scale=1.0)[0]

    return make


def _fla_retention(torch: Any, case: Case) -> Attend:
    from fla import ops

    # Its decays are fixed, and are those that the case has.
    return lambda q, k, v, decay: ops.chunk_retention(q, k, v, scale=1.0)[0]


def by_size(case: Case) -> Hashable:
    return case.D


def by_case(case: Case) -> Hashable:
    return case


def _ato_torch(torch: Any, case: Case) -> Attend:
    import ato_torch

    return functools.partial(ato_torch.linear_attention, causal=case.causal)


_phi_out = functools.partial(Contender, bthd=True, mapped=True, normalize=False, shares=by_size)

CONTENDERS = {
    # It is one of the two below, and these take seconds.
    "SDPA default": dataclasses.replace(
        sdpa(None), takes=lambda case: _ungated(case) and not _long(case)
    ),
    "SDPA cuDNN": sdpa("CUDNN_ATTENTION"),
    "SDPA flash": sdpa("FLASH_ATTENTION"),
    "flash-bidirectional-linear-attention, phi out": Contender(
        _full, functools.partial(_flash_bla, mapped=True), mapped=True, shares=by_size
    ),
    # Its kernels are those of the one above.
    "flash-bidirectional-linear-attention, eager phi": Contender(
        _full, functools.partial(_flash_bla, mapped=False)
    ),
    # Each takes seconds to compile.
    "PyTorch, compiled": Contender(
        lambda case: _full(case) and _long(case), _compiled, shares=by_case
    ),
    "PyTorch": Contender(_full, _plain),
    "fla chunk, phi out, not normalised": _phi_out(
        _causal, _fla("chunk_linear_attn", normalize=False)
    ),
    # Its kernels are those of the one above.
    "fla chunk, phi out": _phi_out(
        _causal, _fla("chunk_linear_attn", normalize=True), normalize=True, shares=None
    ),
    "fla fused chunk, phi out, not normalised": _phi_out(
        _causal, _fla("fused_chunk_linear_attn", normalize=False)
    ),
    "fla retention, phi out, not normalised": _phi_out(
        lambda case: case.decay == "head", _fla_retention
    ),
    "fla simple GLA, phi out, not normalised": _phi_out(
        lambda case: case.decay == "step", _fla_gated("chunk_simple_gla")
    ),
    "fla GLA, phi out, not normalised": _phi_out(
        lambda case: case.decay == "channel", _fla_gated("chunk_gla")
    ),
}


# Whose host time is asked for. It has JAX in this process, where no others' figures are its.
ON_HOST = {"ato_torch": Contender(_ungated, _ato_torch)}


def hasten_triton() -> None:
    """Lets Triton's search for block sizes compile on all cores, and time each config briefly.

    It tries the same configs; where this fails, it compiles one after the other as always.
    """
    try:
        import triton
        from triton.runtime import _async_compile, autotuner
    except ImportError:
        return
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    prune = autotuner.Autotuner.prune_configs

    def compile_all(self: Any, kwargs: dict[str, Any]) -> Any:
        configs = prune(self, kwargs)
        facts = {name: value for name, value in kwargs.items() if name != "warmup"}
        try:
            with _async_compile.AsyncCompileMode(pool, ignore_errors=True):
                for config in configs:
                    self.fn.warmup(*self.nargs.values(), **facts, **config.all_kwargs())
        except Exception:  # an inner part of Triton, which may be different in another version
            _async_compile.active_mode.set(None)
        return configs

    autotuner.Autotuner.prune_configs = compile_all
    autotuner.Autotuner.do_bench = property(
        lambda self: functools.partial(triton.testing.do_bench, warmup=2, rep=8)
    )


def search_nothing() -> None:
    """Has searches for block sizes launch each config once and time none, in a process that only
    fills caches: beside others that compile, figures would say nothing. None are kept.
    """

    def launch(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]

    try:
        from triton.runtime import autotuner

        autotuner.Autotuner.do_bench = property(lambda self: launch)
    except ImportError:
        pass
    try:
        from torch._inductor import config
    except ImportError:
        return
    config.autotune_local_cache = False
    config.autotune_remote_cache = False
