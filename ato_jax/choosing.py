"""Which backend runs a phase of a call, and with which block sizes.

On a GPU the backends are tried in the order of `Op.backends`, except that the tables in `tuned/`
put some first or last (`tuning.py`), and that families which are slow at the call's sizes come last
(`Backend.beats_later_backends`). Each phase is chosen by itself, so one backend's forward may run
with another's backward.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Sequence
from typing import Any, Generic

import jax

from ato_jax import device, partitioning, tuning
from ato_jax.backend import Backend, InputsT, OutputsT, Parts, SpecialForward, SpecT

PLAIN_JAX = ("xla", "reference")
INTERPRETABLE = ("triton", "mosaic_gpu")
PHASES = ("forward", "backward")


class UnsupportedError(NotImplementedError):
    """The request is right, but the backend that was asked for does not support it.

    The message lists the reason of each backend that was considered. A request that is wrong for
    every backend raises a ValueError.

    Example:
      >>> import ato_jax, jax.numpy as jnp
      >>> q = k = v = jnp.ones((1, 8, 2, 16))
      >>> try:
      ...     ato_jax.attention(q, k, v, implementation="cudnn")
      ... except ato_jax.UnsupportedError as error:
      ...     print(error)  # on a CPU
      attention, forward: cudnn: needs a GPU, and this call runs on cpu
    """


@dataclasses.dataclass(frozen=True)
class Op(Generic[SpecT, InputsT, OutputsT]):
    """An op and the names of its backends, which are imported when they are needed.

    Attributes:
      backends: in the order in which `implementation=None` tries them, where no table says
        otherwise. "triton.wide" is the module `wide` of the family "triton".
      package: the package that the backends' modules are in.
      planned: names that have no kernels for this op: refused as unsupported.
      special: pairs (backend, module) of a `SpecialForward` that runs some of the backend's calls.
      on_demand: pairs (field of the spec, field of the outputs) of what callers ask for by an
        option. A backward pass reads the output's cotangent where the spec's field is True, and
        reads nothing else of the forward pass for it, so that False stands for a cotangent of zero.
    """

    name: str
    backends: tuple[str, ...]
    package: str
    planned: tuple[str, ...] = ()
    special: tuple[tuple[str, str], ...] = ()
    on_demand: tuple[tuple[str, str], ...] = ()

    def module(self, name: str) -> types.ModuleType:
        return importlib.import_module(f"{self.package}.{name}")

    def backend(self, name: str) -> Backend[SpecT, Any, InputsT, OutputsT]:
        return self.module(name).BACKEND

    def special_forward(self, name: str) -> SpecialForward[SpecT, Any, InputsT, OutputsT]:
        return self.module(name).SPECIAL_FORWARD

    def parts(self) -> Parts[InputsT, OutputsT]:
        """What says how a call is divided among devices."""
        return self.module("parts").PARTS

    def for_cotangents(self, spec: SpecT, given: OutputsT) -> SpecT:
        """The spec of a backward pass. `given` has for each output whether its cotangent may be
        other than zero."""
        absent = [
            option
            for option, output in self.on_demand
            if not any(jax.tree.leaves(getattr(given, output)))
        ]
        one: Any = spec
        found: SpecT = dataclasses.replace(one, **dict.fromkeys(absent, False))
        return found

    def check_name(self, implementation: object) -> None:
        """A ValueError unless it is None or the name of a backend, planned ones included."""
        names = self.backends + self.planned
        named = isinstance(implementation, str) and implementation in names
        if implementation is not None and not named:
            raise ValueError(
                f"implementation must be None or one of {', '.join(map(repr, names))}, "
                f"got {implementation!r}"
            )


@dataclasses.dataclass(frozen=True)
class Choice:
    """One phase's backend and its block sizes.

    Attributes:
      backend: the backend's name.
      config: its block sizes; None where it has none to choose.
      kernel: the module that runs the phase: the backend's own, or one of `Op.special`.
      fallback: the backward for values for which this one's kernels are not right, if there are
        any (`Backend.needs_fallback`).
      why: what put the backend before the others.
      sizes_by: where the block sizes come from.
    """

    backend: str
    config: Any
    kernel: str
    fallback: Choice | None = None
    why: str = dataclasses.field(default="", compare=False)
    sizes_by: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        beside = f", or by the arrays' values {self.fallback}" if self.fallback else ""
        sources = "; ".join(filter(None, (self.why, self.sizes_by)))
        config = "" if self.config is None else f", {self.config}"
        return f"{self.backend}{config}{f' ({sources})' if sources else ''}{beside}"


@dataclasses.dataclass(frozen=True)
class Call(Generic[SpecT, InputsT, OutputsT]):
    """Everything static about one call: the key of its compiled program.

    Attributes:
      backward_follows: the outputs go to `_kernels_backward` of the same call, and nowhere else.
      training: the derivative of the call is taken, by JAX or by the caller.
      cut: how the explicit axes of a mesh cut the arrays; None without such axes.
    """

    op: Op[SpecT, InputsT, OutputsT]
    spec: SpecT
    implementation: str | None
    device: device.Device
    interpret: bool
    backward_follows: bool = False
    training: bool = False
    cut: partitioning.Cut | None = None

    def use(self, phase: str) -> str:
        """The name that the tables give to the use that this phase is a part of."""
        both = phase == "backward" or self.backward_follows or self.training
        return tuning.TRAINING if both else tuning.FORWARD


def family(name: str) -> str:
    """The backend that users know: "triton" of "triton.wide", its kernels for some sizes."""
    return name.partition(".")[0]


def no_triton() -> str | None:
    """Why JAX cannot lower Triton kernels; None where it can."""
    from ato_jax import launch  # here, so that `import ato_jax` does not import Pallas

    return launch.no_triton


def reason_against(call: Call, name: str, phase: str) -> str | None:
    """Why this backend cannot run this phase here; None if it can."""
    if name in call.op.planned:
        return "has no kernels for this op"
    if family(name) == "triton" and (reason := no_triton()):
        return reason
    interpretable = family(name) in INTERPRETABLE
    interpreted = call.interpret and interpretable
    if family(name) not in PLAIN_JAX and call.device.platform != "gpu" and not interpreted:
        hint = " (ato_jax.interpret() interprets kernels)" if interpretable else ""
        return f"needs a GPU, and this call runs on {call.device.platform}{hint}"
    if family(name) == "triton" and not interpreted and (reason := call.device.lacks_triton()):
        return reason
    backend = call.op.backend(name)
    reason = backend.unsupported_device(call.device, interpreted)
    return reason or backend.unsupported(call.spec, phase)


def candidates(call: Call, phase: str) -> Sequence[str]:
    """The backends that may run a phase, in the order in which they are tried."""
    names: Sequence[str] = call.op.backends
    if call.implementation in PLAIN_JAX:
        # Not its family: JAX takes any derivative of plain JAX alone.
        return (call.implementation,)
    if call.implementation in names:
        return tuple(name for name in names if call.implementation in (name, family(name)))
    if call.implementation is not None:
        return (call.implementation,)
    if call.device.platform != "gpu" or call.interpret:
        # Inside interpret(), too, kernels run only where they are asked for by name: they are slow.
        return tuple(name for name in call.op.backends if name in PLAIN_JAX)
    return _in_order(call, phase)


def choose(call: Call, phase: str) -> Choice:
    """The backend for a phase: the first of the family named, or of all, that supports it."""
    names = candidates(call, phase)
    reasons = {}
    for name in names:
        reasons[name] = reason_against(call, name, phase)
        if reasons[name] is None:
            kernel = _kernel(call, name, phase)
            runner = call.op.backend(name) if kernel == name else call.op.special_forward(kernel)
            config = tuning.config(call.op.name, kernel, runner, call.spec, call.device)
            fallback = fallback_of(call, name, phase)
            return Choice(name, config, kernel, fallback, *_sources(call, name, kernel, phase))
    listing = "; ".join(
        f"{name}: {reason}"
        for name, reason in reasons.items()
        # "triton.wide" has something to say only where "triton" does not say it, too.
        if name == family(name) or reason != reasons.get(family(name))
    )
    raise UnsupportedError(f"{call.op.name}, {phase}: {listing}")


def _order(call: Call, phase: str) -> tuning.Order:
    backends = tuple(call.op.backends)
    return tuning.order(call.op.name, call.spec, call.device, call.use(phase), backends)


def _in_order(call: Call, phase: str) -> list[str]:
    """The op's backends as `implementation=None` tries them on a GPU."""
    order = _order(call, phase)

    def rank(name: str) -> int:
        by_table = order.rank(name, family(name))
        if by_table == tuning.FIRST or _family_beats_later(call, name, phase):
            return by_table
        return tuning.LAST

    return sorted(call.op.backends, key=rank)


def _family_beats_later(call: Call, name: str, phase: str) -> bool:
    """False where kernels of its family that are made for such sizes are slow at these."""
    both = call.backward_follows or phase == "backward"
    return all(
        call.op.backend(other).beats_later_backends(call.spec, call.device, both)
        for other in call.op.backends
        if family(other) == family(name) and reason_against(call, other, phase) is None
    )


def _sources(call: Call, name: str, kernel: str, phase: str) -> tuple[str, str]:
    """What put the backend before the others, and where its block sizes come from."""
    if call.device.platform != "gpu":
        return "", ""
    why = ""
    if call.implementation is None and not call.interpret:
        order = _order(call, phase)
        before = call.op.backends[: call.op.backends.index(name)]
        passed = [other for other in before if family(other) in order.last]
        slow = [other for other in before if reason_against(call, other, phase) is None]
        if name in order.first:
            why = f"first by tuned/{order.first[name]}.toml"
        elif passed:
            last = ", ".join(dict.fromkeys(map(family, passed)))
            why = f"{last} last by tuned/{order.last[family(passed[0])]}.toml"
        elif slow:
            last = ", ".join(dict.fromkeys(map(family, slow)))
            why = f"{last} last by its own rule for such calls"
        else:
            why = "first in the op's order"
    _, by = tuning.overrides(call.op.name, kernel, call.spec.traits(), call.device)
    return why, f"block sizes by tuned/{by}.toml" if by else "block sizes by rule"


def fallback_of(call: Call, name: str, phase: str) -> Choice | None:
    """The backward that the backend's own branches to for some values, if there is one."""
    if phase == "forward" or not call.op.backend(name).needs_fallback(call.spec):
        return None
    others = tuple(other for other in call.op.backends if other != name)
    op = dataclasses.replace(call.op, backends=others)
    return choose(dataclasses.replace(call, op=op, implementation=None), phase)


def _kernel(call: Call, name: str, phase: str) -> str:
    """The module of a backend that runs a phase."""
    if phase == "forward":
        for owner, kernel in call.op.special:
            if owner == name and call.op.special_forward(kernel).serves(call.spec, call.device):
                return kernel
    return name


def choose_if_any(call: Call, phase: str) -> Choice | None:
    """`choose`, or None where no backend fits."""
    try:
        return choose(call, phase)
    except UnsupportedError:
        return None
