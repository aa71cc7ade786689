"""Linear attention on each device from the state ahead of it, with one exchange of states each way.

    forward     S_d from the operation on d's own rows and no state; gather S_d and M_d; the state
                ahead of d by `states.around`; the operation again, from that state
    backward    D_d, the cotangent of the state ahead of d by d's own rows alone, from the
                operation's derivative; gather D_d; the cotangent of the state after d

                    E_d-1 = D_d + M_d E_d       causal; 0 where a segment begins with d's first row
                    E_d   = sum of D_e, e != d  both ways

                and the derivative again, with E_d

Of the first call in each direction, only the state is used, so XLA leaves out the kernels that make
no part of it, and those that both calls have alike run once. So a device runs the kernels that it
would run for its rows alone.

Where a backend does not support a state's cotangent, so that another one would run, S_d are sums by
XLA (`states.sums`), and JAX's own derivative sums the cotangents of the states over devices.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import autodiff, choosing, device, dispatch
from ato_jax.meshes import varying_with
from ato_jax.ops.linear_attention import api
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs
from ato_jax.parallel import states
from ato_jax.parallel.devices import AxisName, Devices, devices_along


@dataclasses.dataclass(frozen=True)
class Walk:
    """The static part of one call."""

    spec: LinearAttentionSpec
    implementation: str | None
    T: int
    axis: AxisName
    interpret: bool
    returns_total: bool
    sums_forward: bool  # whether XLA computes S_d where no derivative is taken
    sums_training: bool  # and where one is

    @property
    def devices(self) -> Devices:
        return devices_along(self.axis)

    def run(self, inputs: Inputs) -> Outputs:
        """The operation on this device's rows, from a state to a state."""
        spec = dataclasses.replace(self.spec, initial_state=True, return_state=True)
        return Outputs(*api.run(api.Request(spec, inputs, self.implementation, True, self.T)))

    def by_sums(
        self, inputs: Inputs, ids: jax.Array | None
    ) -> tuple[jax.Array, LinearState]:
        """The output, and the state after the last key of all, with S_d by XLA."""
        found = _around(self, inputs, _gathered(self, inputs, ids))
        spec = dataclasses.replace(self.spec, initial_state=True, return_state=False)
        inputs = inputs._replace(initial_state=found.ahead)
        out, _ = api.run(api.Request(spec, inputs, self.implementation, True, self.T))
        return out, found.total

    def zeros(self, like: Any) -> LinearState:
        rows = (self.spec.B, self.spec.G, self.spec.F)
        state = LinearState(
            jnp.zeros((*rows, self.spec.V), jnp.float32), jnp.zeros(rows, jnp.float32)
        )
        return varying_with(state, like)


def attend(
    request: api.Request, ids: jax.Array | None, devices: Devices
) -> tuple[jax.Array, LinearState]:
    """The output [B, T, H, V] of this device's queries, and the state after the last key of all.

    The call is causal, or sees both ways without a decay and without segments. `ids` [B, S] are the
    keys' segments on all devices.
    """
    inputs = request.inputs
    with_state, without = (
        dispatch.explain(
            api.OP,
            dataclasses.replace(request.spec, initial_state=True, return_state=returns),
            inputs,
            request.implementation,
        )
        for returns in (True, False)
    )
    walk = Walk(
        request.spec,
        request.implementation,
        request.T,
        devices.axis,
        device.interpreting(),
        request.spec.return_state,
        _other(with_state.forward, without.forward),
        _other(with_state.recorded, without.recorded)
        or _other(with_state.backward, without.backward),
    )
    if inputs.initial_state is None:
        inputs = inputs._replace(initial_state=walk.zeros(inputs))
    # A custom derivative gives each cotangent the type of its input.
    return _attend(walk, *varying_with((inputs, ids), (inputs, ids, devices.index)))


def _other(one: choosing.Choice | None, other: choosing.Choice | None) -> bool:
    """Whether two choices are of different backends."""
    return (one and one.backend) != (other and other.backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    walk: Walk, inputs: Inputs, ids: jax.Array | None
) -> tuple[jax.Array, LinearState]:
    if walk.sums_forward:
        return walk.by_sums(inputs, ids)
    own = walk.run(inputs._replace(initial_state=walk.zeros(inputs))).state
    parts = _gathered(walk, inputs, ids, own)
    found = _around(walk, inputs, parts)
    return walk.run(inputs._replace(initial_state=found.ahead)).out, found.total


def _forward(walk: Walk, inputs: Inputs, ids: jax.Array | None) -> Any:
    if walk.sums_training:
        return autodiff.vjp(lambda inputs: walk.by_sums(inputs, ids), inputs)
    # Both calls are those of a derivative, which may keep more: so they have their kernels alike.
    nothing = inputs._replace(initial_state=walk.zeros(inputs))
    own, _ = autodiff.vjp(walk.run, nothing)
    parts = _gathered(walk, inputs, ids, own.state)
    found = _around(walk, inputs, parts)
    outputs, pull = autodiff.vjp(walk.run, inputs._replace(initial_state=found.ahead))
    starts = states.begins(parts.ids, parts.empty)
    return (outputs.out, found.total), (pull, parts.keeps, starts)


def _backward(walk: Walk, residuals: Any, cotangents: Any) -> tuple[Inputs, None]:
    if walk.sums_training:
        with device.interpret(walk.interpret):
            return residuals(cotangents), None
    pull, keeps, starts = residuals
    d_out, d_total = cotangents
    devices, zero = walk.devices, walk.zeros(d_out)
    d_total = varying_with(lax.psum(d_total, walk.axis), d_out) if walk.returns_total else zero
    with device.interpret(walk.interpret):
        own = pull(Outputs(d_out, zero)).initial_state
        gathered = states.gather(own, devices)
        if walk.spec.causal:
            after, first = _rightwards(walk, gathered, keeps, starts, d_total)
        else:
            after = states.plus(states.others(gathered, devices), d_total)
            first = states.plus(after, own)
        found: Inputs = pull(Outputs(d_out, after))
    # The initial state is the same on all devices, and its cotangents there are summed.
    here = devices.index == 0
    d_initial = jax.tree.map(lambda array: jnp.where(here, array, 0), first)
    return found._replace(initial_state=d_initial), None


_attend.defvjp(_forward, _backward)


def _gathered(
    walk: Walk, inputs: Inputs, ids: jax.Array | None, own: LinearState | None = None
) -> states.Part:
    return states.gather(states.part_of(walk.spec, inputs, ids, own), walk.devices)


def _around(walk: Walk, inputs: Inputs, parts: states.Part) -> states.Around:
    assert inputs.initial_state is not None
    return states.around(walk.spec, parts, inputs.initial_state, walk.devices)


def _rightwards(
    walk: Walk, own: LinearState, keeps: Any, starts: Any, d_total: LinearState
) -> tuple[LinearState, LinearState]:
    """The cotangents of the state after this device and of the initial state."""
    index, count = walk.devices.index, walk.devices.count

    def step(carry: Any, entry: Any) -> tuple[Any, None]:
        after, here = carry
        number, own, keeps, starts = entry
        here = states.pick(number == index, after, here)
        ahead = states.plus(own, states.times(keeps, after))
        return (states.zero_where(starts, ahead), here), None

    entries = jnp.arange(count, dtype=jnp.int32), own, keeps, starts
    carry = varying_with((d_total, walk.zeros(own)), (d_total, entries, index))
    first, after = walk.devices.in_turn(step, carry, entries, reverse=True)
    return after, first
