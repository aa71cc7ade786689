"""Runs a call by the backends chosen for it; the custom derivative that all kernels share.

Every op runs through `run`, which calls the first backend that supports the request
(`choosing.py`):

    forward    out = backend.forward(spec, config, inputs)
    backward   d_inputs = backend.backward(spec, config, Residuals(inputs, out), d_out)

`backend.py` has the protocol of a backend. Kernels are divided among the devices of a mesh
(`division.py`).

JAX differentiates the backends that are plain JAX, in forward mode and to any order. Kernels have a
custom derivative (`_kernels`). The derivative of its backward pass is that of the XLA backend, so
second order is right there, too. JAX refuses forward mode, with an error that says so.

JAX tells the custom derivative which cotangents are zero whatever the arrays hold, because nothing
that is differentiated reads the output. A backward pass that would do more for one of these, as
attention's for lse, runs as if the caller had not asked for that output (`Op.on_demand`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ato_jax import autodiff, choosing, device, division, meshes, partitioning, programs, tuning
from ato_jax.backend import InputsT, OutputsT, Residuals, SpecT
from ato_jax.choosing import PHASES, PLAIN_JAX, Call, Choice, Op

# XLA divides these among devices, or their kernels say how.
DIVIDES_ITSELF = (*PLAIN_JAX, "cudnn")


def _forward(call: Call, inputs: InputsT) -> Any:
    """The outputs, with what only the backward pass reads where that follows."""
    if (choice := _divided_choice(call, "forward", inputs)) is None:
        return _forward_here(call, inputs)

    def part(spec: Any, inputs: InputsT) -> Any:
        training = call.training or call.backward_follows
        here = dataclasses.replace(
            call, spec=spec, implementation=choice.backend, backward_follows=False,
            training=training,
        )  # fmt: skip
        return _forward_here(here, inputs)

    whole = functools.partial(_forward_here, call)
    return division.forward(call.op.parts(), call.spec, call.cut, inputs, whole, part)


def _divided_choice(call: Call, phase: str, arrays: Any) -> Choice | None:
    """The backend of a phase that the library divides among devices; None where it divides none."""
    if call.cut is None and not partitioning.may_divide(jax.tree.leaves(arrays)):
        return None
    choice = choosing.choose(call, phase)
    return None if choice.backend in DIVIDES_ITSELF else choice


def _forward_here(call: Call, inputs: InputsT) -> Any:
    """The outputs of a call that is not divided."""
    choice = choosing.choose(call, "forward")
    backend = call.op.backend(choice.backend)
    run: Any = backend.forward
    if choice.kernel != choice.backend:
        run = call.op.special_forward(choice.kernel).forward
    elif call.backward_follows:
        backward = choosing.choose_if_any(call, "backward")
        if backward is not None and backward.backend == choice.backend:
            run = backend.forward_for_own_backward
    with device.interpret(call.interpret):
        return run(call.spec, choice.config, inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels(call: Call, inputs: InputsT) -> Any:
    return _forward(call, inputs)


@programs.promoting_ranks
def _kernels_forward(call: Call, primals: Any) -> tuple[Any, Any]:
    inputs = jax.custom_derivatives.custom_vjp_primal_tree_values(primals)
    if _is_plain(dataclasses.replace(call, training=True)):
        # JAX's own derivative keeps what it needs, where `_kernels_backward` computes it again.
        training = dataclasses.replace(call, training=True)
        return autodiff.vjp(functools.partial(_forward, training), inputs)
    # `_kernels` and not `_forward`: a second derivative has to meet the custom rule again here.
    followed = _followed(call)
    outputs = _kernels(followed, inputs)
    returned = outputs if call == followed else outputs.plain()
    return returned, Residuals(inputs, outputs)


def _followed(call: Call) -> Call:
    """The forward pass of a call whose backward pass reads the outputs.

    A caller that keeps the outputs has asked for them all.
    """
    if call.training:
        return call
    return dataclasses.replace(call, spec=call.spec.for_backward(), backward_follows=True)


@programs.promoting_ranks
def _kernels_transposed(call: Call, residuals: Any, cotangents: OutputsT) -> tuple[InputsT]:
    if isinstance(residuals, jax.tree_util.Partial):
        return (residuals(jax.tree.map(_instantiated, cotangents)),)
    plain = cotangents.plain()
    here = _for_cotangents(call, jax.tree.map(lambda leaf: not _is_zero(leaf), plain))
    return (_kernels_backward(here, residuals, jax.tree.map(_instantiated, plain)),)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero)


def _instantiated(cotangent: Any) -> jax.Array:
    found: jax.Array = meshes.zeros(cotangent.aval) if _is_zero(cotangent) else cotangent
    return found


def _for_cotangents(call: Call, given: Any) -> Call:
    """The call of a backward pass, where `given` has for each output whether its cotangent may be
    other than zero."""
    fewer = dataclasses.replace(call, spec=call.op.for_cotangents(call.spec, given))
    # The forward pass kept arrays for the backend and block sizes of its own spec. Others may be
    # unable to read them.
    same = fewer == call or (
        choosing.choose_if_any(fewer, "backward") == choosing.choose_if_any(call, "backward")
    )
    return fewer if same else call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels_backward(
    call: Call, residuals: Residuals[InputsT, OutputsT], cotangents: OutputsT
) -> InputsT:
    found: InputsT = _backward(call, residuals, cotangents)
    return found


def _backward(call: Call, residuals: Any, cotangents: Any) -> Any:
    """The backward pass, divided among the devices of a mesh like the forward pass."""
    if (choice := _divided_choice(call, "backward", (residuals, cotangents))) is None:
        return _backward_here(call, residuals, cotangents)

    def part(spec: Any, residuals: Any, cotangents: Any) -> Any:
        here = dataclasses.replace(call, spec=spec, implementation=choice.backend)
        return _backward_here(here, residuals, cotangents)

    whole = functools.partial(_backward_here, call)
    return division.backward(
        call.op.parts(), call.spec, call.cut, (residuals, cotangents), whole, part
    )


def _backward_here(call: Call, residuals: Any, cotangents: Any) -> Any:
    """The backward pass of a call that is not divided."""
    with device.interpret(call.interpret):
        choice = choosing.choose(call, "backward")
        return backward_by(call.op, choice, call.spec, residuals, cotangents)


def backward_by(
    op: Op[SpecT, InputsT, OutputsT],
    choice: Choice,
    spec: SpecT,
    residuals: Residuals[InputsT, OutputsT],
    cotangents: OutputsT,
) -> InputsT:
    """The backward pass of a choice, with its fallback."""
    backend = op.backend(choice.backend)
    if choice.fallback is None:
        return backend.backward(spec, choice.config, residuals, cotangents)
    fallback = functools.partial(backward_by, op, choice.fallback)
    return backend.backward_with_fallback(spec, choice.config, residuals, cotangents, fallback)


@programs.promoting_ranks
def _twice_forward(
    call: Call, residuals: Residuals[InputsT, OutputsT], cotangents: OutputsT
) -> tuple[InputsT, tuple[InputsT, OutputsT]]:
    return _kernels_backward(call, residuals, cotangents), (residuals.inputs, cotangents)


@programs.promoting_ranks
def _twice_backward(
    call: Call, saved: tuple[InputsT, OutputsT], second_cotangents: InputsT
) -> tuple[Any, OutputsT]:
    """The derivative of the gradient: of the XLA gradient, as a function of the inputs alone."""
    xla = call.op.backend("xla")
    config = tuning.config(call.op.name, "xla", xla, call.spec, call.device)

    def first_gradient(pair: tuple[InputsT, OutputsT]) -> InputsT:
        inputs, cotangents = pair
        return autodiff.gradient(
            functools.partial(xla.forward, call.spec, config), inputs, cotangents
        )

    inputs_cotangent, cotangents_cotangent = autodiff.gradient(
        first_gradient, saved, second_cotangents
    )
    # The outputs among the residuals are functions of the inputs, whose cotangent counts them.
    return Residuals(inputs_cotangent, None), cotangents_cotangent


_kernels.defvjp(_kernels_forward, _kernels_transposed, symbolic_zeros=True)
_kernels_backward.defvjp(_twice_forward, _twice_backward)


def _warn_of_no_triton(call: Call, choices: Sequence[Choice | None]) -> None:
    """A warning where the call would run Triton kernels, if JAX could lower them.

    The Triton kernels that Mosaic GPU's passes launch count, too.
    """
    if call.device.platform != "gpu" or call.interpret or not choosing.no_triton():
        return
    for phase, choice in zip(PHASES, choices, strict=True):
        for name in choosing.candidates(call, phase):
            taken = choice is not None and name == choice.backend
            of_triton = choosing.family(name) == "triton" and call.implementation is None
            if (taken and name == "mosaic_gpu") or (
                of_triton and call.op.backend(name).unsupported(call.spec, phase) is None
            ):
                from ato_jax import launch

                launch.warn_of_no_triton()
                return
            if taken:
                break


@programs.jit(static=1)
def _run(call: Call[SpecT, InputsT, OutputsT], inputs: InputsT) -> OutputsT:
    forward = choosing.choose(call, "forward")
    _warn_of_no_triton(call, (forward, choosing.choose_if_any(call, "backward")))
    plain = forward.backend in PLAIN_JAX and _is_plain(dataclasses.replace(call, training=True))
    # JAX differentiates a call that is plain JAX whether or not its derivative is taken.
    return _forward(call, inputs) if plain else _kernels(call, inputs)


def _is_plain(call: Call) -> bool:
    """Whether both passes are plain JAX."""
    choices = [choosing.choose_if_any(call, phase) for phase in PHASES]
    return all(choice is not None and choice.backend in PLAIN_JAX for choice in choices)


def choices_of_training(call: Call) -> tuple[Choice | None, Choice | None]:
    """The choices of both passes of a call that JAX takes the derivative of."""
    training = dataclasses.replace(call, training=True)
    forward = training if _is_plain(training) else _followed(call)
    return choosing.choose_if_any(forward, "forward"), choosing.choose_if_any(training, "backward")


def _call_of(
    op: Op[SpecT, InputsT, OutputsT],
    spec: SpecT,
    inputs: InputsT,
    implementation: str | None,
    training: bool = False,
) -> Call[SpecT, InputsT, OutputsT]:
    op.check_name(implementation)
    here, interpret = device.of_call(inputs), device.interpreting()
    return Call(op, spec, implementation, here, interpret, training=training)


def run(
    op: Op[SpecT, InputsT, OutputsT],
    spec: SpecT,
    inputs: InputsT,
    implementation: str | None,
    training: bool = False,
) -> OutputsT:
    """The op's outputs, by the backend named or by the first that supports the request.

    `training`: the caller keeps the outputs for `backward`.
    """
    call = _call_of(op, spec, inputs, implementation, training)
    compute = _nothing if spec.B == 0 else _run
    if meshes.of(inputs) is None:
        return compute(call, inputs)
    letters = functools.partial(division.letters, op.parts(), spec, inputs)
    if cut := partitioning.cut_of(inputs, letters):
        call = dataclasses.replace(call, cut=cut)
    partition = functools.partial(inputs.partition_of_outputs, spec.layout)
    return meshes.call(lambda inputs: compute(call, inputs), inputs, partition)


def _nothing(call: Call[SpecT, InputsT, OutputsT], inputs: InputsT) -> OutputsT:
    """The outputs of an empty batch, after the checks of a batch of 1."""
    choosing.choose(_of_one(call), "forward")
    reference = call.op.backend("reference")
    config = reference.default_config(call.spec, call.device)
    shapes = jax.eval_shape(functools.partial(reference.forward, call.spec, config), inputs)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def _of_one(call: Call[SpecT, InputsT, OutputsT]) -> Call[SpecT, InputsT, OutputsT]:
    """The call with a batch of 1: backends do not choose for an empty one."""
    one: Any = call.spec
    return dataclasses.replace(call, spec=dataclasses.replace(one, B=1))


@programs.jit(static=2)
def _run_backward(
    call: Call[SpecT, InputsT, OutputsT],
    wanted: tuple[str, ...],
    residuals: Residuals[InputsT, OutputsT],
    cotangents: OutputsT,
) -> dict[str, Any]:
    gradients = _kernels_backward(call, residuals, cotangents)
    return {name: getattr(gradients, name) for name in wanted}


def backward(
    op: Op[SpecT, InputsT, OutputsT],
    spec: SpecT,
    inputs: InputsT,
    outputs: OutputsT,
    cotangents: OutputsT,
    implementation: str | None,
    wanted: tuple[str, ...],
) -> dict[str, Any]:
    """The cotangents of the inputs named in `wanted`, for a caller that kept the outputs.

    Of the outputs' cotangents, None stands for zeros.
    """
    call = _call_of(op, spec, inputs, implementation)
    plain = outputs.plain()
    given = jax.tree.map(lambda _, cotangent: cotangent is not None, plain, cotangents)
    every = jax.tree.map(
        lambda output, cotangent: (
            meshes.zeros(jax.typeof(output)) if cotangent is None else cotangent
        ),
        plain,
        cotangents,
    )
    return _run_backward(_for_cotangents(call, given), wanted, Residuals(inputs, outputs), every)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer of `ato_jax.explain`: the chosen backends, and the reasons against the others.

    A `Choice` is a backend, its block sizes and what chose them.

    Attributes:
      op: "attention", "linear_attention", "gated_delta_rule", "decode_attention",
        "linear_attention_step" or "gated_delta_rule_step".
      spec: Everything static about the call; a step's spec leaves out the arrays' shapes.
      device: Where it would run.
      forward: The `Choice` of the forward pass where no derivative is taken; None where no backend
        supports it.
      recorded: The `Choice` of the forward pass where a derivative is taken.
      backward: The `Choice` of the backward pass.
      reasons: `reasons[backend][phase]` is None where the backend supports the phase ("forward" or
        "backward"), or the reason why it does not.
      note: What the call does before any backend runs, or why or how much longer it takes than a
        plain call; empty for nothing.
    """

    op: str
    spec: Any
    device: device.Device
    forward: Choice | None
    recorded: Choice | None
    backward: Choice | None
    reasons: dict[str, dict[str, str | None]]
    note: str = ""

    @property
    def implementation(self) -> str | None:
        """The backend of the forward pass, or None."""
        return self.forward.backend if self.forward else None

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device.platform} {self.device.name}".rstrip()]
        if self.note:
            lines.append(f"  {self.note}")
        lines.append(f"  forward: {self.forward or '-'}")
        if self.recorded != self.forward:
            lines.append(f"  forward, its derivative taken: {self.recorded or '-'}")
        lines.append(f"  backward: {self.backward or '-'}")
        for name, reasons in self.reasons.items():
            for phase, reason in reasons.items():
                lines.append(f"  {name} {phase}: {reason or 'supported'}")
        return "\n".join(lines)


def explain(
    op: Op[SpecT, InputsT, OutputsT], spec: SpecT, inputs: InputsT, implementation: str | None
) -> Explanation:
    """Chooses backends for a call exactly as `run` does, without running it."""
    call = _call_of(op, spec, inputs, implementation)
    call = _of_one(call) if spec.B == 0 else call
    reasons = {
        name: {phase: choosing.reason_against(call, name, phase) for phase in PHASES}
        for name in op.backends + op.planned
    }
    forward = choosing.choose_if_any(call, "forward")
    recorded, backward = choices_of_training(call)
    return Explanation(op.name, spec, call.device, forward, recorded, backward, reasons)
