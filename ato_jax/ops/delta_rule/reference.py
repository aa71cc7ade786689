"""The delta rule by its definition, in float32 or float64: `recurrence.py`, on any device."""

from __future__ import annotations

import dataclasses
import functools

from ato_jax import autodiff
from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.ops.delta_rule import recurrence
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs, Residuals


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to tune."""


def unsupported(spec: DeltaRuleSpec, phase: str) -> str | None:
    return None


def default_config(spec: DeltaRuleSpec, device: Device) -> Config:
    return Config()


def forward(spec: DeltaRuleSpec, config: Config, inputs: Inputs) -> Outputs:
    return recurrence.forward(spec, inputs)


def backward(
    spec: DeltaRuleSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    return autodiff.gradient(functools.partial(forward, spec, config), residuals.inputs, cotangents)


class _Reference(Backend[DeltaRuleSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Reference()
