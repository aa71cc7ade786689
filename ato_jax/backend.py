"""The protocol that every backend of every op implements.

A backend is a module of named functions, and at its end an object that declares them:

    class _Cudnn(Backend[AttentionSpec, Config, Inputs, Outputs]):
        unsupported = staticmethod(unsupported)
        default_config = staticmethod(default_config)
        forward = staticmethod(forward)
        backward = staticmethod(backward)

    BACKEND = _Cudnn()

mypy compares the type of each function with the protocol, and reports a missing one at the line
that makes the object. Functions that the protocol gives a body are optional. The spec and the
arrays have the op's types, which all of its backends share; `Config`, a frozen dataclass of block
sizes, is the backend's own. `choosing.py` and `dispatch.py` call the functions.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import jax

from ato_jax.device import Device


class Spec(Protocol):
    """An op's spec: a frozen dataclass that says everything static about one call."""

    def __hash__(self) -> int: ...

    @property
    def B(self) -> int: ...
    @property
    def T(self) -> int: ...
    @property
    def S(self) -> int: ...
    @property
    def H(self) -> int: ...
    @property
    def layout(self) -> str: ...

    def for_backward(self) -> Self:
        """The spec of a forward pass whose outputs a backward pass reads."""

    def traits(self) -> Mapping[str, Any]:
        """The facts that a tuning table may ask for in `when`."""


class ForwardOutputs(Protocol):
    """The outputs of a forward pass, with arrays beside them that only a backward pass reads."""

    def plain(self) -> Any:
        """The op's `Outputs`, without what only a backward pass reads."""


class OpInputs(Protocol):
    """The arrays of a call, a pytree."""

    def partition_of_outputs(self, layout: str) -> Any:
        """The op's `Outputs` with a `PartitionSpec` in place of each array."""


SpecT = TypeVar("SpecT", bound=Spec)
InputsT = TypeVar("InputsT", bound=OpInputs)
OutputsT = TypeVar("OutputsT", bound=ForwardOutputs)
ConfigT = TypeVar("ConfigT")


class Residuals(NamedTuple, Generic[InputsT, OutputsT]):
    """The arrays that a backward pass reads. One type per op: any forward pairs with any backward.

    `outputs` are an `OutputsT`, or what the same backend's `forward_for_own_backward` returned.
    """

    inputs: InputsT
    outputs: OutputsT


class Backend(Protocol[SpecT, ConfigT, InputsT, OutputsT]):
    """One implementation of an op. `phase` is "forward" or "backward"."""

    @abc.abstractmethod
    def unsupported(self, spec: SpecT, phase: str, /) -> str | None:
        """The reason why it cannot run this phase of the call, or None."""

    @abc.abstractmethod
    def default_config(self, spec: SpecT, device: Device, /) -> ConfigT:
        """The block sizes by rule; a table in `tuned/` may replace fields of it."""

    @abc.abstractmethod
    def forward(self, spec: SpecT, config: ConfigT, inputs: InputsT, /) -> OutputsT:
        """The outputs.

        Where `spec` is that of `Spec.for_backward`, they hold what any backward of the op reads.
        """

    @abc.abstractmethod
    def backward(
        self,
        spec: SpecT,
        config: ConfigT,
        residuals: Residuals[InputsT, OutputsT],
        cotangents: OutputsT,
        /,
    ) -> InputsT:
        """The cotangents of the inputs; None for an input without one."""

    def unsupported_device(self, device: Device, interpreted: bool, /) -> str | None:
        """The reason why it cannot run on a GPU of this kind, or be interpreted, or None."""
        return None

    def forward_for_own_backward(
        self, spec: SpecT, config: ConfigT, inputs: InputsT, /
    ) -> ForwardOutputs:
        """`forward`, with arrays kept that only this backend's own backward reads.

        It runs in place of `forward` where JAX takes the derivative of the call and this backend
        runs both passes.
        """
        return self.forward(spec, config, inputs)

    def beats_later_backends(self, spec: SpecT, device: Device, backward_follows: bool, /) -> bool:
        """Whether it is faster at these sizes than the backends behind it in the op's order.

        Where it is not, `implementation=None` tries its whole family last: the other kernels of
        the family are for other sizes. A table in `tuned/` comes before this rule.
        `backward_follows` tells that a backward pass on the same arrays is in the same program, so
        that XLA may compute once what both passes have in common.
        """
        return True

    def needs_fallback(self, spec: SpecT, /) -> bool:
        """Whether the arrays may hold values for which its backward kernels are not right.

        `backward_with_fallback` then runs in place of `backward`, also where the call names this
        backend.
        """
        return False

    def backward_with_fallback(
        self,
        spec: SpecT,
        config: ConfigT,
        residuals: Residuals[InputsT, OutputsT],
        cotangents: OutputsT,
        fallback: Callable[[SpecT, Residuals[InputsT, OutputsT], OutputsT], InputsT],
        /,
    ) -> InputsT:
        """`backward`, which branches on the device to `fallback`, the next backend's backward."""
        return self.backward(spec, config, residuals, cotangents)


class Parts(Protocol[InputsT, OutputsT]):
    """How a call of an op is divided by batch and heads: the axes of its arrays, and what a part
    reads.

    `partitioning.py` says what the letters mean. They stand as with layout "bthd", and a "." is an
    axis that is never cut. Each op has a module `parts`, which declares its functions as a
    backend's module does.
    """

    @abc.abstractmethod
    def letters_of_inputs(self, inputs: InputsT, /) -> Any:
        """The tree of inputs with each array replaced by the letters of its axes."""

    @abc.abstractmethod
    def letters_of_outputs(self, outputs: OutputsT, /) -> Any:
        """The letters of the outputs that callers and any backend's backward read."""

    def for_any_backward(self, outputs: Any, /) -> OutputsT:
        """The outputs without what only the same backend's own backward reads."""
        found: OutputsT = outputs.plain()
        return found

    def placed(self, inputs: InputsT, b: jax.Array, h: jax.Array, /) -> InputsT:
        """The inputs of a part of a call that begins at batch entry b and head h."""
        return inputs


class SpecialForward(abc.ABC, Generic[SpecT, ConfigT, InputsT, OutputsT]):
    """A forward pass for some calls of a backend, in a module of its own (`Op.special`)."""

    @abc.abstractmethod
    def serves(self, spec: SpecT, device: Device, /) -> bool:
        """Whether it runs this call in place of the backend's own forward."""

    @abc.abstractmethod
    def default_config(self, spec: SpecT, device: Device, /) -> ConfigT:
        """The block sizes by rule."""

    @abc.abstractmethod
    def forward(self, spec: SpecT, config: ConfigT, inputs: InputsT, /) -> OutputsT:
        """The outputs."""
