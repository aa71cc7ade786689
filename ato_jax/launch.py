"""How Triton kernels are launched: Pallas's own call, with types that `jax.shard_map` accepts.

Kernels import Pallas's Triton part from here, as `launch.triton`, and nowhere else. JAX has
deprecated that part, and a later JAX may lack it. `no_triton` is then the reason, which the Triton
backends give as theirs, and everything else works.
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
# All names that the kernels use of it.
NAMES = ("CompilerParams", "debug_barrier", "dot", "elementwise_inline_asm", "load", "store")


class _Missing:
    """A stand-in for the missing module, so that the kernels' modules can be imported."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # tools look for such names in every object
            raise AttributeError(name)
        raise NotImplementedError(f"a Triton kernel {self._reason}")


def _import_triton() -> tuple[Any, str | None]:
    """Pallas's Triton part and None, or a stand-in and the reason why there is none."""
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
    """Warns once per process that a call on a GPU runs without Triton kernels."""
    if _not_yet_warned.acquire(blocking=False):
        warnings.warn(
            f"ato_jax's Triton backend {no_triton}: calls on a GPU that it would run, or run a "
            "part of, are run by XLA instead, slower and with more memory; ato_jax.explain says "
            "what a call runs, and JAX 0.12 has that lowering",
            stacklevel=2,
        )


DEPRECATION = "jax-pallas-triton"


class _Deprecations:
    """JAX's `deprecations` module, without the warning about the lowering to Triton."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def warn(self, deprecation: str, *args: Any, **options: Any) -> None:
        if deprecation != DEPRECATION:
            self._module.warn(deprecation, *args, **options)


def _quiet_params() -> Any:
    """A subclass of `triton.CompilerParams` whose kernels lower without a deprecation warning.

    JAX warns at each lowering. A user of this library can do nothing about that, and their own `-W
    error` would turn it into an error. JAX finds the lowering rule of a kernel by the type of its
    parameters, so a type of our own can have JAX's rule without the warning. The user's own kernels
    still warn, and the filters of warnings, which all threads share, stay as they are. A JAX
    without such rules does not warn at this place; then None, and JAX's own type is used.
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
        """`triton.CompilerParams` under a type of our own."""

    register(QuietCompilerParams, quiet, "gpu")
    return QuietCompilerParams


QuietCompilerParams = _quiet_params()


def _quiet(params: Any) -> Any:
    """The compiler parameters of a Triton kernel, of the type that lowers without a warning."""
    kind = triton.CompilerParams if QuietCompilerParams is None else QuietCompilerParams
    return kind() if params is None else kind(**dataclasses.asdict(params))


def pallas_call(
    kernel: Callable[..., None], *, out_shape: Any, compiler_params: Any = None, **options: Any
) -> Any:
    """`pl.pallas_call` of a Triton kernel, interpreted inside `device.interpret()`.

    Inside `jax.shard_map`, the outputs vary over every mesh axis that one of the arrays varies
    over.
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
