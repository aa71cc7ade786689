"""From a spec to a backend, and the one custom derivative.

Every op runs through `run`. A backend is a module with five names:

    Config                                      its tunable sizes, a frozen dataclass
    unsupported(spec, phase) -> str | None      why not, for phase "forward" or "backward"
    default_config(spec, device) -> Config
    forward(spec, config, inputs) -> outputs
    backward(spec, config, residuals, cotangents) -> inputs' cotangents

`outputs` and `residuals = (inputs, outputs)` are fixed by the op, so any forward pairs with any
backward; what only a backward reads of the outputs, a forward leaves where the spec is that of
`spec.for_backward()`, and `outputs.plain()` is without it. A backend may have four names more:

    keep(spec, config, inputs) -> outputs       forward, with what its own backward alone can read
    pays(spec, device, followed) -> bool        whether it is faster than what comes after it
    refuses(device, interpreted) -> str | None  why not on a GPU of this kind
    hands_over(spec) -> bool                    whether values can be beyond its own backward

`keep` runs where the derivative of a call is taken, by JAX, and the backend's own backward follows.
One that does not pay is what `implementation=None` comes to last, with all of its family: the
others' kernels are for other sizes. What a table in `tuned/` says of the call's device comes before
that (tuning.py). `followed` says that a backward pass on the same arrays is to
come: XLA may then do what it has in common with one forward once for both. A backward that hands
over takes `otherwise(spec, residuals, cotangents)`, too: the next backend's, which it branches to
on the device, also where the call names it. Backends that are plain JAX are differentiated by JAX
itself: in forward mode and to any order. Kernels carry a custom derivative; its own derivative goes
through XLA, so second order is right there, too, and forward mode is refused by JAX with an error
that says so.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import autodiff, device, meshes, programs, tuning

PLAIN_JAX = ("xla", "reference")
INTERPRETABLE = ("triton", "mosaic_gpu")
PHASES = ("forward", "backward")


class UnsupportedError(NotImplementedError):
    """The request is right, but not by this backend."""


@dataclasses.dataclass(frozen=True)
class Op:
    """`backends` in the order in which `implementation=None` tries them, but for what the
    device's table puts first.

    `planned` are names that are promised, but have no kernels yet: refused as unsupported.
    `special` are modules with a forward of their own, each by the backend that it belongs to: it
    runs in place of the backend's where the module `takes(spec, device)`.
    """

    name: str
    backends: tuple[str, ...]
    package: str
    planned: tuple[str, ...] = ()
    special: tuple[tuple[str, str], ...] = ()

    def backend(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")

    def check_name(self, implementation: Any) -> None:
        """A ValueError unless it is None or the name of a backend, planned ones included."""
        names = self.backends + self.planned
        named = isinstance(implementation, str) and implementation in names
        if implementation is not None and not named:
            raise ValueError(
                f"implementation must be None or one of {', '.join(map(repr, names))}, "
                f"got {implementation!r}"
            )

    @property
    def residuals(self) -> Any:
        """The op's own type of (inputs, outputs): backends read its fields by name."""
        return importlib.import_module(f"{self.package}.spec").Residuals


@dataclasses.dataclass(frozen=True)
class Choice:
    """One phase's backend and its block sizes; `kernel` is the module, the backend's own or one of
    `Op.special`; `otherwise` whose backward it is where that one hands over. `why` says what put
    the backend before the others, and `sizes_by` where its block sizes come from.
    """

    backend: str
    config: Any
    kernel: str
    otherwise: Choice | None = None
    why: str = dataclasses.field(default="", compare=False)
    sizes_by: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        beside = f", or by the arrays' values {self.otherwise}" if self.otherwise else ""
        sources = "; ".join(filter(None, (self.why, self.sizes_by)))
        return f"{self.backend}, {self.config}{f' ({sources})' if sources else ''}{beside}"


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything static about one call: the key of its compiled program.

    `followed`: its outputs go to `_kernels_backward` of the same call, and to nothing else.
    `training`: its derivative is taken, whoever takes it.
    """

    op: Op
    spec: Any
    implementation: str | None
    device: device.Device
    interpret: bool
    followed: bool = False
    training: bool = False

    def use(self, phase: str) -> str:
        """What the tables call the use that this phase is a part of."""
        both = phase == "backward" or self.followed or self.training
        return tuning.TRAINING if both else tuning.FORWARD


def family(name: str) -> str:
    """The backend that users know: "triton" of "triton.wide", its kernels for some sizes."""
    return name.partition(".")[0]


def _no_triton() -> str | None:
    """Why JAX cannot lower Triton kernels; None where it can."""
    from ato_jax import launch  # here, so that `import ato_jax` does not import Pallas

    return launch.no_triton


def reason_against(call: _Call, name: str, phase: str) -> str | None:
    """Why this backend cannot run this phase here; None if it can."""
    if name in call.op.planned:
        return "has no kernels for this op yet"
    if family(name) == "triton" and (reason := _no_triton()):
        return reason
    interpretable = family(name) in INTERPRETABLE
    interpreted = call.interpret and interpretable
    if name not in PLAIN_JAX and call.device.platform != "gpu" and not interpreted:
        hint = " (ato_jax.interpret() interprets kernels)" if interpretable else ""
        return f"needs a GPU, and this call runs on {call.device.platform}{hint}"
    if family(name) == "triton" and not interpreted and (reason := call.device.lacks_triton()):
        return reason
    module = call.op.backend(name)
    if hasattr(module, "refuses") and (reason := module.refuses(call.device, interpreted)):
        return reason
    return module.unsupported(call.spec, phase)


def _candidates(call: _Call, phase: str) -> Sequence[str]:
    """The backends that may run a phase, in the order in which they are tried."""
    names: Sequence[str] = call.op.backends
    if call.implementation in names:
        return tuple(name for name in names if call.implementation in (name, family(name)))
    if call.implementation is not None:
        return (call.implementation,)
    if call.device.platform != "gpu" or call.interpret:
        # Inside interpret(), too, kernels run only where they are asked for by name: they are slow.
        return tuple(name for name in call.op.backends if name in PLAIN_JAX)
    return in_order(call, phase)


def choose(call: _Call, phase: str) -> Choice:
    """The backend for a phase: the first of the family named, or of all, that supports it."""
    names = _candidates(call, phase)
    reasons = {}
    for name in names:
        reasons[name] = reason_against(call, name, phase)
        if reasons[name] is None:
            kernel = _kernel(call, name, phase)
            module = call.op.backend(kernel)
            config = tuning.config(call.op.name, kernel, module, call.spec, call.device)
            beside = otherwise(call, name, phase)
            return Choice(name, config, kernel, beside, *sources(call, name, kernel, phase))
    listing = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UnsupportedError(f"{call.op.name}, {phase}: {listing}")


def in_order(call: _Call, phase: str) -> list[str]:
    """The op's backends as `implementation=None` tries them on a GPU."""
    order = tuning.order(call.op.name, call.spec, call.device, call.use(phase))

    def rank(name: str) -> int:
        found = order.rank(name, family(name))
        return max(found, 2 * (not _pays(call, name, phase))) if found else found

    return sorted(call.op.backends, key=rank)


def sources(call: _Call, name: str, kernel: str, phase: str) -> tuple[str, str]:
    """What put the backend before the others, and where its block sizes come from."""
    if call.device.platform != "gpu":
        return "", ""
    why = ""
    if call.implementation is None and not call.interpret:
        order = tuning.order(call.op.name, call.spec, call.device, call.use(phase))
        before = call.op.backends[: call.op.backends.index(name)]
        passed = [other for other in before if family(other) in order.last]
        if name in order.first:
            why = f"first by tuned/{order.first[name]}.toml"
        elif passed:
            last = ", ".join(dict.fromkeys(map(family, passed)))
            why = f"{last} last by tuned/{order.last[family(passed[0])]}.toml"
        else:
            why = "first in the op's order"
    _, by = tuning.overrides(call.op.name, kernel, call.spec.traits(), call.device)
    return why, f"block sizes by tuned/{by}.toml" if by else "block sizes by rule"


def otherwise(call: _Call, name: str, phase: str) -> Choice | None:
    """What a backend hands over to, if it does."""
    module = call.op.backend(name)
    if phase == "forward" or not (hasattr(module, "hands_over") and module.hands_over(call.spec)):
        return None
    others = tuple(other for other in call.op.backends if other != name)
    op = dataclasses.replace(call.op, backends=others)
    return choose(dataclasses.replace(call, op=op, implementation=None), phase)


def _pays(call: _Call, name: str, phase: str) -> bool:
    """False where kernels of its family that are made for such a size say that they do not."""
    return all(
        module.pays(call.spec, call.device, call.followed)
        for other in call.op.backends
        if family(other) == family(name) and hasattr(module := call.op.backend(other), "pays")
        if reason_against(call, other, phase) is None
    )


def _kernel(call: _Call, name: str, phase: str) -> str:
    """The module of a backend that runs a phase."""
    if phase == "forward":
        for owner, kernel in call.op.special:
            if owner == name and call.op.backend(kernel).takes(call.spec, call.device):
                return kernel
    return name


def choose_if_any(call: _Call, phase: str) -> Choice | None:
    """`choose`, or None where no backend fits."""
    try:
        return choose(call, phase)
    except UnsupportedError:
        return None


def _forward(call: _Call, inputs: Any) -> Any:
    choice = choose(call, "forward")
    module = call.op.backend(choice.kernel)
    run = module.forward
    if call.followed and hasattr(module, "keep"):
        backward = choose_if_any(call, "backward")
        if backward is not None and backward.backend == choice.kernel:
            run = module.keep
    with device.interpret(call.interpret):
        return run(call.spec, choice.config, inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels(call: _Call, inputs: Any) -> Any:
    return _forward(call, inputs)


def _kernels_forward(call: _Call, inputs: Any) -> tuple[Any, Any]:
    if _is_plain(dataclasses.replace(call, training=True)):
        # JAX's own derivative: it keeps what it needs, where `_kernels_backward` computes anew.
        training = dataclasses.replace(call, training=True)
        return autodiff.vjp(functools.partial(_forward, training), inputs)
    # Not `_forward`: a second derivative passes here, and has to meet the custom rule again.
    followed = dataclasses.replace(call, spec=call.spec.for_backward(), followed=True)
    outputs = _kernels(followed, inputs)
    returned = outputs if call == followed else outputs.plain()
    return returned, call.op.residuals(inputs, outputs)


def _kernels_transposed(call: _Call, residuals: Any, cotangents: Any) -> tuple[Any]:
    if isinstance(residuals, jax.tree_util.Partial):
        return (residuals(cotangents),)
    return (_kernels_backward(call, residuals, cotangents.plain()),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels_backward(call: _Call, residuals: Any, cotangents: Any) -> Any:
    with device.interpret(call.interpret):
        choice = choose(call, "backward")
        return backward_by(call.op, choice, call.spec, residuals, cotangents)


def backward_by(op: Op, choice: Choice, spec: Any, residuals: Any, cotangents: Any) -> Any:
    """A backward as it was chosen, and what that hands over to."""
    options = {}
    if choice.otherwise is not None:
        options["otherwise"] = functools.partial(backward_by, op, choice.otherwise)
    run = op.backend(choice.backend).backward
    return run(spec, choice.config, residuals, cotangents, **options)


def _twice_forward(call: _Call, residuals: Any, cotangents: Any) -> tuple[Any, Any]:
    return _kernels_backward(call, residuals, cotangents), (residuals.inputs, cotangents)


def _twice_backward(call: _Call, saved: Any, second_cotangents: Any) -> tuple[Any, Any]:
    """The derivative of the gradient: of the XLA gradient, as a function of the inputs alone."""
    xla = call.op.backend("xla")
    config = tuning.config(call.op.name, "xla", xla, call.spec, call.device)

    def first_gradient(pair: Any) -> Any:
        inputs, cotangents = pair
        return autodiff.gradient(
            functools.partial(xla.forward, call.spec, config), inputs, cotangents
        )

    inputs_cotangent, cotangents_cotangent = autodiff.gradient(
        first_gradient, saved, second_cotangents
    )
    # The outputs among the residuals are functions of the inputs, which have them accounted for.
    return call.op.residuals(inputs_cotangent, None), cotangents_cotangent


_kernels.defvjp(_kernels_forward, _kernels_transposed)
_kernels_backward.defvjp(_twice_forward, _twice_backward)


def _warn_of_no_triton(call: _Call, choices: Sequence[Choice | None]) -> None:
    """A warning where the call would run Triton kernels, if JAX could lower them.

    Those that Mosaic GPU launches between its own are among them.
    """
    if call.device.platform != "gpu" or call.interpret or not _no_triton():
        return
    for phase, choice in zip(PHASES, choices, strict=True):
        for name in _candidates(call, phase):
            taken = choice is not None and name == choice.backend
            of_triton = family(name) == "triton" and call.implementation is None
            if (taken and name == "mosaic_gpu") or (
                of_triton and call.op.backend(name).unsupported(call.spec, phase) is None
            ):
                from ato_jax import launch

                launch.warn_of_no_triton()
                return
            if taken:
                break


@programs.jit(static=1)
def _run(call: _Call, inputs: Any) -> Any:
    forward = choose(call, "forward")
    _warn_of_no_triton(call, (forward, choose_if_any(call, "backward")))
    plain = forward.backend in PLAIN_JAX and _is_plain(dataclasses.replace(call, training=True))
    # Plain JAX whether the derivative is taken or not is left to JAX's own derivative.
    return _forward(call, inputs) if plain else _kernels(call, inputs)


def _is_plain(call: _Call) -> bool:
    """Whether both passes are plain JAX."""
    choices = [choose_if_any(call, phase) for phase in PHASES]
    return all(choice is not None and choice.backend in PLAIN_JAX for choice in choices)


def _call_of(
    op: Op, spec: Any, inputs: Any, implementation: str | None, training: bool = False
) -> _Call:
    op.check_name(implementation)
    here, interpret = device.of_call(inputs), device.interpreting()
    return _Call(op, spec, implementation, here, interpret, training=training)


def run(
    op: Op, spec: Any, inputs: Any, implementation: str | None, training: bool = False
) -> Any:
    """The op's outputs, by the backend named or by the first that supports the request.

    `training`: the caller keeps the outputs for `backward`.
    """
    call = _call_of(op, spec, inputs, implementation, training)
    function = functools.partial(_nothing if spec.B == 0 else _run, call)
    return meshes.call(function, inputs, lambda: inputs.partition_of_outputs(spec.layout))


def _nothing(call: _Call, inputs: Any) -> Any:
    """The outputs of an empty batch."""
    choose(dataclasses.replace(call, spec=dataclasses.replace(call.spec, B=1)), "forward")
    reference = functools.partial(call.op.backend("reference").forward, call.spec, None)
    shapes = jax.eval_shape(reference, inputs)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


@programs.jit(static=2)
def _run_backward(call: _Call, wanted: tuple[str, ...], residuals: Any, cotangents: Any) -> Any:
    gradients = _kernels_backward(call, residuals, cotangents)
    return {name: getattr(gradients, name) for name in wanted}


def backward(
    op: Op,
    spec: Any,
    inputs: Any,
    outputs: Any,
    cotangents: Any,
    implementation: str | None,
    wanted: tuple[str, ...],
) -> dict[str, Any]:
    """The cotangents of the inputs named in `wanted`, for a caller that kept the outputs."""
    call = _call_of(op, spec, inputs, implementation)
    return _run_backward(call, wanted, op.residuals(inputs, outputs), cotangents)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run, and why nothing else: `print` it, or read its fields.

    `forward`, `recorded` and `backward` are a `Choice` (backend, config), or None where no backend
    fits: the forward pass of a call whose derivative is not taken, and both passes of one whose
    derivative is;
    `reasons[backend][phase]` is None for a backend that could run the phase.
    """

    op: str
    spec: Any
    device: device.Device
    forward: Choice | None
    recorded: Choice | None
    backward: Choice | None
    reasons: dict[str, dict[str, str | None]]

    @property
    def implementation(self) -> str | None:
        return self.forward.backend if self.forward else None

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device.platform} {self.device.name}".rstrip()]
        lines.append(f"  forward: {self.forward or '-'}")
        if self.recorded != self.forward:
            lines.append(f"  forward, its derivative taken: {self.recorded or '-'}")
        lines.append(f"  backward: {self.backward or '-'}")
        for name, reasons in self.reasons.items():
            for phase, reason in reasons.items():
                lines.append(f"  {name} {phase}: {reason or 'supported'}")
        return "\n".join(lines)


def explain(op: Op, spec: Any, inputs: Any, implementation: str | None) -> Explanation:
    call = _call_of(op, spec, inputs, implementation)
    reasons = {
        name: {phase: reason_against(call, name, phase) for phase in PHASES}
        for name in op.backends + op.planned
    }
    training = dataclasses.replace(call, spec=spec.for_backward(), training=True)
    forward = choose_if_any(call, "forward")
    recorded, backward = (choose_if_any(training, phase) for phase in PHASES)
    return Explanation(op.name, spec, call.device, forward, recorded, backward, reasons)
