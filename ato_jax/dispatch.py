"""From a spec to a backend, and the custom derivative that all kernels share.

Every op runs through `run`, which calls the first backend that supports the request:

    forward    out = backend.forward(spec, config, inputs)
    backward   d_inputs = backend.backward(spec, config, Residuals(inputs, out), d_out)

`backend.py` has the protocol of a backend. Each phase is chosen by itself, so one backend's
forward may run with another's backward. On a GPU the backends are tried in the order of
`Op.backends`, except that the tables in `tuned/` put some first or last (`tuning.py`), and that
families which are slow at the call's sizes come last (`Backend.beats_later_backends`).

JAX differentiates the backends that are plain JAX, in forward mode and to any order. Kernels have a
custom derivative (`_kernels`). The derivative of its backward pass is that of the XLA backend, so
second order is right there, too. JAX refuses forward mode, with an error that says so.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import types
from collections.abc import Sequence
from typing import Any, Generic

import jax
import jax.numpy as jnp

from ato_jax import autodiff, device, meshes, partitioning, programs, tuning
from ato_jax.backend import Backend, InputsT, OutputsT, Residuals, SpecialForward, SpecT

PLAIN_JAX = ("xla", "reference")
# XLA divides these among devices, or their kernels say how.
DIVIDES_ITSELF = (*PLAIN_JAX, "cudnn")
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
      planned: names that are promised and have no kernels yet: refused as unsupported.
      special: pairs (backend, module) of a `SpecialForward` that runs some of the backend's calls.
    """

    name: str
    backends: tuple[str, ...]
    package: str
    planned: tuple[str, ...] = ()
    special: tuple[tuple[str, str], ...] = ()

    def module(self, name: str) -> types.ModuleType:
        return importlib.import_module(f"{self.package}.{name}")

    def backend(self, name: str) -> Backend[SpecT, Any, InputsT, OutputsT]:
        return self.module(name).BACKEND

    def special_forward(self, name: str) -> SpecialForward[SpecT, Any, InputsT, OutputsT]:
        return self.module(name).SPECIAL_FORWARD

    def parts(self) -> Any:
        """The module that says how a call is divided: `letters_of_inputs`, `letters_of_outputs`,
        `for_any_backward` and `placed`."""
        return self.module("parts")

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
class _Call(Generic[SpecT, InputsT, OutputsT]):
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
    backend = call.op.backend(name)
    reason = backend.unsupported_device(call.device, interpreted)
    return reason or backend.unsupported(call.spec, phase)


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
    return _in_order(call, phase)


def choose(call: _Call, phase: str) -> Choice:
    """The backend for a phase: the first of the family named, or of all, that supports it."""
    names = _candidates(call, phase)
    reasons = {}
    for name in names:
        reasons[name] = reason_against(call, name, phase)
        if reasons[name] is None:
            kernel = _kernel(call, name, phase)
            runner = call.op.backend(name) if kernel == name else call.op.special_forward(kernel)
            config = tuning.config(call.op.name, kernel, runner, call.spec, call.device)
            fallback = fallback_of(call, name, phase)
            return Choice(name, config, kernel, fallback, *_sources(call, name, kernel, phase))
    listing = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UnsupportedError(f"{call.op.name}, {phase}: {listing}")


def _order(call: _Call, phase: str) -> tuning.Order:
    backends = tuple(call.op.backends)
    return tuning.order(call.op.name, call.spec, call.device, call.use(phase), backends)


def _in_order(call: _Call, phase: str) -> list[str]:
    """The op's backends as `implementation=None` tries them on a GPU."""
    order = _order(call, phase)

    def rank(name: str) -> int:
        by_table = order.rank(name, family(name))
        if by_table == tuning.FIRST or _family_beats_later(call, name, phase):
            return by_table
        return tuning.LAST

    return sorted(call.op.backends, key=rank)


def _family_beats_later(call: _Call, name: str, phase: str) -> bool:
    """False where kernels of its family that are made for such sizes are slow at these."""
    both = call.backward_follows or phase == "backward"
    return all(
        call.op.backend(other).beats_later_backends(call.spec, call.device, both)
        for other in call.op.backends
        if family(other) == family(name) and reason_against(call, other, phase) is None
    )


def _sources(call: _Call, name: str, kernel: str, phase: str) -> tuple[str, str]:
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


def fallback_of(call: _Call, name: str, phase: str) -> Choice | None:
    """The backward that the backend's own branches to for some values, if there is one."""
    if phase == "forward" or not call.op.backend(name).needs_fallback(call.spec):
        return None
    others = tuple(other for other in call.op.backends if other != name)
    op = dataclasses.replace(call.op, backends=others)
    return choose(dataclasses.replace(call, op=op, implementation=None), phase)


def _kernel(call: _Call, name: str, phase: str) -> str:
    """The module of a backend that runs a phase."""
    if phase == "forward":
        for owner, kernel in call.op.special:
            if owner == name and call.op.special_forward(kernel).serves(call.spec, call.device):
                return kernel
    return name


def choose_if_any(call: _Call, phase: str) -> Choice | None:
    """`choose`, or None where no backend fits."""
    try:
        return choose(call, phase)
    except UnsupportedError:
        return None


def _forward(call: _Call, inputs: InputsT) -> Any:
    """The outputs, with what only the backward pass reads where that follows.

    Kernels are divided among the devices of a mesh (`partitioning.py`). What a part keeps for its
    own backward depends on the part's sizes, so there it is zeros, which `_divided_backward` does
    not read.
    """
    arrays, tree = jax.tree.flatten(inputs)
    choice = _divided_choice(call, "forward", arrays)
    if choice is None:
        return _forward_here(call, inputs)
    parts = call.op.parts()
    kept: list[Any] = []  # the outputs as shapes, and which of them every backward reads

    def whole(*arrays: jax.Array) -> list[jax.Array]:
        outputs = _forward_here(call, jax.tree.unflatten(tree, arrays))
        read = jax.tree.map(id, jax.tree.leaves(parts.for_any_backward(outputs)))
        kept[:] = jax.tree.structure(outputs), [
            read.index(id(leaf)) if id(leaf) in read else None
            for leaf in jax.tree.leaves(outputs)
        ], [jax.typeof(leaf) for leaf in jax.tree.leaves(outputs)]  # fmt: skip
        return jax.tree.leaves(outputs)

    def letters_of(shapes: Any) -> list[str]:
        outputs = parts.for_any_backward(jax.tree.unflatten(kept[0], shapes))
        known = _laid_out(parts.letters_of_outputs(outputs), call.spec.layout)
        return [
            "." * shape.ndim if index is None else known[index]
            for index, shape in zip(kept[1], shapes, strict=True)
        ]

    def part(cut: partitioning.Cut, *arrays: jax.Array) -> list[jax.Array]:
        spec, mine = _part_of(call, cut, jax.tree.unflatten(tree, arrays))
        training = call.training or call.backward_follows
        here = dataclasses.replace(
            call, spec=spec, implementation=choice.backend, backward_follows=False,
            training=training,
        )  # fmt: skip
        found = jax.tree.leaves(parts.for_any_backward(_forward_here(here, mine)))
        return [
            jnp.zeros(shape.shape, shape.dtype) if index is None else found[index]
            for index, shape in zip(*kept[1:], strict=True)
        ]

    operands = arrays, _letters(call, inputs)
    outputs = partitioning.divided(whole, part, operands, letters_of, cut=call.cut)
    return jax.tree.unflatten(kept[0], outputs)


def _divided_choice(call: _Call, phase: str, arrays: Sequence[jax.Array]) -> Choice | None:
    """The backend of a phase that the library divides among devices; None where it divides none."""
    if call.cut is None and not partitioning.may_divide(arrays):
        return None
    choice = choose(call, phase)
    return None if choice.backend in DIVIDES_ITSELF else choice


def _letters(call: _Call, inputs: InputsT) -> list[str]:
    """The letters of each array of a call."""
    return _laid_out(call.op.parts().letters_of_inputs(inputs), call.spec.layout)


def _laid_out(letters: Any, layout: str) -> list[str]:
    """The letters of each array in a tree, in the layout."""
    return [partitioning.laid_out(one, layout) for one in jax.tree.leaves(letters)]


def _part_of(call: _Call, cut: partitioning.Cut, inputs: InputsT) -> tuple[Any, Any]:
    """The spec and the inputs of a device's part of a call."""
    spec = dataclasses.replace(
        call.spec,
        **{letter: getattr(call.spec, letter) // cut.parts[letter] for letter in "BGH"},
    )
    return spec, call.op.parts().placed(inputs, cut.start("B", spec.B), cut.start("H", spec.H))


def _forward_here(call: _Call, inputs: InputsT) -> Any:
    """The outputs of a call that is not divided."""
    choice = choose(call, "forward")
    backend = call.op.backend(choice.backend)
    run: Any = backend.forward
    if choice.kernel != choice.backend:
        run = call.op.special_forward(choice.kernel).forward
    elif call.backward_follows:
        backward = choose_if_any(call, "backward")
        if backward is not None and backward.backend == choice.backend:
            run = backend.forward_for_own_backward
    with device.interpret(call.interpret):
        return run(call.spec, choice.config, inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels(call: _Call, inputs: InputsT) -> Any:
    return _forward(call, inputs)


def _kernels_forward(call: _Call, inputs: InputsT) -> tuple[Any, Any]:
    if _is_plain(dataclasses.replace(call, training=True)):
        # JAX's own derivative keeps what it needs, where `_kernels_backward` computes it again.
        training = dataclasses.replace(call, training=True)
        return autodiff.vjp(functools.partial(_forward, training), inputs)
    # `_kernels` and not `_forward`: a second derivative has to meet the custom rule again here.
    followed = _followed(call)
    outputs = _kernels(followed, inputs)
    returned = outputs if call == followed else outputs.plain()
    return returned, Residuals(inputs, outputs)


def _followed(call: _Call) -> _Call:
    """The forward pass of a call whose backward pass reads the outputs."""
    return dataclasses.replace(call, spec=call.spec.for_backward(), backward_follows=True)


def _kernels_transposed(call: _Call, residuals: Any, cotangents: OutputsT) -> tuple[InputsT]:
    if isinstance(residuals, jax.tree_util.Partial):
        return (residuals(cotangents),)
    return (_kernels_backward(call, residuals, cotangents.plain()),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels_backward(
    call: _Call, residuals: Residuals[InputsT, OutputsT], cotangents: OutputsT
) -> InputsT:
    return _divided_backward(call, residuals, cotangents)


def _divided_backward(
    call: _Call, residuals: Residuals[InputsT, OutputsT], cotangents: OutputsT
) -> InputsT:
    """The backward pass, divided among the devices of a mesh like the forward pass."""

    def run(call: _Call, residuals: Any, cotangents: Any) -> Any:
        with device.interpret(call.interpret):
            choice = choose(call, "backward")
            return backward_by(call.op, choice, call.spec, residuals, cotangents)

    arrays, tree = jax.tree.flatten((residuals, cotangents))
    choice = _divided_choice(call, "backward", arrays)
    if choice is None:
        return run(call, residuals, cotangents)
    parts, layout = call.op.parts(), call.spec.layout
    of_inputs = parts.letters_of_inputs(residuals.inputs)
    read = parts.for_any_backward(residuals.outputs)
    letters = _laid_out(parts.letters_of_outputs(read), layout)
    known = {
        id(leaf): one for leaf, one in zip(jax.tree.leaves(read), letters, strict=True)
    }
    of_outputs = [
        known.get(id(leaf), "." * leaf.ndim) for leaf in jax.tree.leaves(residuals.outputs)
    ]
    of_cotangents = _laid_out(parts.letters_of_outputs(cotangents), layout)
    of_gradients: list[Any] = []  # their structure, and their letters

    def whole(*arrays: jax.Array) -> list[jax.Array]:
        gradients = run(call, *jax.tree.unflatten(tree, arrays))
        of_gradients[:] = jax.tree.structure(gradients), _letters_of_given(
            gradients, of_inputs, layout
        )  # fmt: skip
        return jax.tree.leaves(gradients)

    def part(cut: partitioning.Cut, *arrays: jax.Array) -> list[jax.Array]:
        residuals, cotangents = jax.tree.unflatten(tree, arrays)
        spec, mine = _part_of(call, cut, residuals.inputs)
        here = dataclasses.replace(call, spec=spec, implementation=choice.backend)
        read = parts.for_any_backward(residuals.outputs)
        return jax.tree.leaves(run(here, Residuals(mine, read), cotangents))

    operands = arrays, [*_laid_out(of_inputs, layout), *of_outputs, *of_cotangents]
    marks = [False] * (len(arrays) - len(of_cotangents)) + [True] * len(of_cotangents)
    found = partitioning.divided(
        whole, part, operands, lambda _: of_gradients[1], marks, call.cut
    )
    gradients: InputsT = jax.tree.unflatten(of_gradients[0], found)
    return gradients


def _letters_of_given(gradients: Any, letters: Any, layout: str) -> list[str]:
    """The letters of those inputs that have a gradient; `letters` are those of all inputs."""
    absent = lambda leaf: leaf is None  # noqa: E731
    given = jax.tree.leaves(gradients, is_leaf=absent)
    names = jax.tree.leaves(letters, is_leaf=absent)
    return [
        partitioning.laid_out(name, layout)
        for one, name in zip(given, names, strict=True)
        if one is not None
    ]


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


def _twice_forward(
    call: _Call, residuals: Residuals[InputsT, OutputsT], cotangents: OutputsT
) -> tuple[InputsT, tuple[InputsT, OutputsT]]:
    return _kernels_backward(call, residuals, cotangents), (residuals.inputs, cotangents)


def _twice_backward(
    call: _Call, saved: tuple[InputsT, OutputsT], second_cotangents: InputsT
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


_kernels.defvjp(_kernels_forward, _kernels_transposed)
_kernels_backward.defvjp(_twice_forward, _twice_backward)


def _warn_of_no_triton(call: _Call, choices: Sequence[Choice | None]) -> None:
    """A warning where the call would run Triton kernels, if JAX could lower them.

    The Triton kernels that Mosaic GPU's passes launch count, too.
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
def _run(call: _Call[SpecT, InputsT, OutputsT], inputs: InputsT) -> OutputsT:
    forward = choose(call, "forward")
    _warn_of_no_triton(call, (forward, choose_if_any(call, "backward")))
    plain = forward.backend in PLAIN_JAX and _is_plain(dataclasses.replace(call, training=True))
    # JAX differentiates a call that is plain JAX whether or not its derivative is taken.
    return _forward(call, inputs) if plain else _kernels(call, inputs)


def _is_plain(call: _Call) -> bool:
    """Whether both passes are plain JAX."""
    choices = [choose_if_any(call, phase) for phase in PHASES]
    return all(choice is not None and choice.backend in PLAIN_JAX for choice in choices)


def choices_of_training(call: _Call) -> tuple[Choice | None, Choice | None]:
    """The choices of both passes of a call that JAX takes the derivative of."""
    training = dataclasses.replace(call, training=True)
    forward = training if _is_plain(training) else _followed(call)
    return choose_if_any(forward, "forward"), choose_if_any(training, "backward")


def _call_of(
    op: Op[SpecT, InputsT, OutputsT],
    spec: SpecT,
    inputs: InputsT,
    implementation: str | None,
    training: bool = False,
) -> _Call[SpecT, InputsT, OutputsT]:
    op.check_name(implementation)
    here, interpret = device.of_call(inputs), device.interpreting()
    return _Call(op, spec, implementation, here, interpret, training=training)


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
    mesh = meshes.of(inputs)
    if mesh is None:
        return compute(call, inputs)
    letters = functools.partial(_letters, call, inputs)
    if cut := partitioning.cut_by_types(mesh, jax.tree.leaves(inputs), letters):
        call = dataclasses.replace(call, cut=cut)
    partition = functools.partial(inputs.partition_of_outputs, spec.layout)
    return meshes.call(lambda inputs: compute(call, inputs), inputs, partition)


def _nothing(call: _Call[SpecT, InputsT, OutputsT], inputs: InputsT) -> OutputsT:
    """The outputs of an empty batch, after the checks of a batch of 1."""
    one: Any = call.spec
    choose(dataclasses.replace(call, spec=dataclasses.replace(one, B=1)), "forward")
    reference = call.op.backend("reference")
    config = reference.default_config(call.spec, call.device)
    shapes = jax.eval_shape(functools.partial(reference.forward, call.spec, config), inputs)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


@programs.jit(static=2)
def _run_backward(
    call: _Call[SpecT, InputsT, OutputsT],
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
    """The cotangents of the inputs named in `wanted`, for a caller that kept the outputs."""
    call = _call_of(op, spec, inputs, implementation)
    return _run_backward(call, wanted, Residuals(inputs, outputs), cotangents)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer of `ato_jax.explain`: the chosen backends, and the reasons against the others.

    A `Choice` is a backend, its block sizes and what chose them.

    Attributes:
      op: "attention", "linear_attention", "gated_delta_rule", "decode_attention" or
        "linear_attention_step".
      spec: Everything static about the call; a step's spec leaves out the arrays' shapes.
      device: Where it would run.
      forward: The `Choice` of the forward pass where no derivative is taken; None where no backend
        supports it.
      recorded: The `Choice` of the forward pass where a derivative is taken.
      backward: The `Choice` of the backward pass.
      reasons: `reasons[backend][phase]` is None where the backend supports the phase ("forward" or
        "backward"), or the reason why it does not.
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
        """The backend of the forward pass, or None."""
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


def explain(
    op: Op[SpecT, InputsT, OutputsT], spec: SpecT, inputs: InputsT, implementation: str | None
) -> Explanation:
    """Chooses backends for a call exactly as `run` does, without running it."""
    call = _call_of(op, spec, inputs, implementation)
    reasons = {
        name: {phase: reason_against(call, name, phase) for phase in PHASES}
        for name in op.backends + op.planned
    }
    forward = choose_if_any(call, "forward")
    recorded, backward = choices_of_training(call)
    return Explanation(op.name, spec, call.device, forward, recorded, backward, reasons)
