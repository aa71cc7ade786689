"""How kernels are launched: Pallas's own call, which inside `jax.shard_map` has to be told more.

Kernels for Triton take Pallas's part for Triton from here, as `launch.triton`. JAX has deprecated
that part and a later JAX may lack it: `no_triton` then is the reason, which the backends for Triton
give as theirs, and all else works.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from ato_jax import device, meshes

LOWERING = "jax.experimental.pallas.triton"
# All that the kernels take from it.
NAMES = ("CompilerParams", "debug_barrier", "dot", "elementwise_inline_asm", "load", "store")


class _Missing:
    """Stands for the missing module, so that the kernels' modules can be imported."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which tools look for in every object
            raise AttributeError(name)
        raise NotImplementedError(f"a Triton kernel {self._reason}")


def _import_triton() -> tuple[Any, str | None]:
    """Pallas's part for Triton, or a stand-in and the reason why there is none."""
    try:
        module = importlib.import_module(LOWERING)
    except ImportError:
        lacking = LOWERING
    else:
        missing = [name for name in NAMES if not hasattr(module, name)]
        if not missing:
            return module, None
        lacking = f"{LOWERING}.{missing[0]}"
    reason = f"needs Pallas's lowering to Triton, and JAX {jax.__version__} has no {lacking}"
    return _Missing(reason), reason


triton, no_triton = _import_triton()
_not_yet_warned = threading.Lock()


def warn_of_no_triton() -> None:
    """Tells the user, once a process, that a call on a GPU runs without Triton kernels."""
    if _not_yet_warned.acquire(blocking=False):
        warnings.warn(
            f"ato_jax's Triton backend {no_triton}: calls on a GPU that it would run, or run a "
            "part of, are run by XLA instead, slower and with more memory; ato_jax.explain says "
            "what a call runs, and JAX 0.12 has that lowering",
            stacklevel=2,
        )


DEPRECATION = "jax-pallas-triton"


class _Deprecations:
    """JAX's module of that name, but for the warning that it will remove the lowering to Triton."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def warn(self, deprecation: str, *args: Any, **options: Any) -> None:
        if deprecation != DEPRECATION:
            self._module.warn(deprecation, *args, **options)


def _quiet_params() -> Any:
    """A kind of `triton.CompilerParams` whose kernels are lowered without a deprecation warning.

    JAX warns at each lowering, which a user of this library can do nothing about, and which their
    own `-W error` would make an error. JAX looks up how to lower a kernel by the type of its
    parameters, so a type of our own has a rule of its own: JAX's, without the warning. The user's
    own kernels still warn, and no filter of warnings is touched, which all threads would share.
    Where JAX has no such rule it does not warn at this place, and its own type is as good.
    """
    if no_triton is not None:
        return None
    try:
        from jax._src.pallas import core

        rule = core.get_lowering_rule(triton.CompilerParams, "gpu")
        register = core.register_lowering_rule
    except (ImportError, AttributeError):
        return None
    if not isinstance(rule, types.FunctionType) or "deprecations" not in rule.__globals__:
        return None
    quiet = types.FunctionType(
        rule.__code__,
        rule.__globals__ | {"deprecations": _Deprecations(rule.__globals__["deprecations"])},
        rule.__name__,
        rule.__defaults__,
        rule.__closure__,
    )
    quiet.__kwdefaults__ = rule.__kwdefaults__

    base: Any = triton.CompilerParams

    class QuietCompilerParams(base):
        """`triton.CompilerParams`, by another name."""

    register(QuietCompilerParams, quiet, "gpu")
    return QuietCompilerParams


QuietCompilerParams = _quiet_params()


def _quiet(params: Any) -> Any:
    """The parameters of a kernel for Triton, as they are lowered without JAX's warning."""
    kind = triton.CompilerParams if QuietCompilerParams is None else QuietCompilerParams
    return kind() if params is None else kind(**dataclasses.asdict(params))


def pallas_call(
    kernel: Callable[..., None], *, out_shape: Any, compiler_params: Any = None, **options: Any
) -> Any:
    """`pl.pallas_call` of a kernel for Triton, interpreted inside `device.interpret()`; what it
    writes varies over the axes of a mesh that any of the arrays varies over.
    """
    params = _quiet(compiler_params)

    def call(*arrays: Any) -> Any:
        arrays = meshes.varying_with(arrays, arrays)
        shapes = meshes.varying_with(out_shape, arrays)
        launched = pl.pallas_call(
            kernel,
            out_shape=shapes,
            compiler_params=params,
            interpret=device.interpreting(),
            **options,
        )
        return launched(*arrays)

    return call
