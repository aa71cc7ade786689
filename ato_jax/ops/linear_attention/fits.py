"""Rewrites a call that no kernel supports into one that a kernel supports, and maps its outputs and
gradients back.

Each step changes one thing of a call and says how its inputs and outputs become those of the call
behind it:

    Folded      the entries of a batch of one head each are heads of one entry
    Expanded    each query head has a head of keys of its own
    Counted     rows beyond a length hold keys and values that contribute 0, in place of lengths
    Padded      rows, columns and heads up to the sizes that kernels take

Such a key has features of 0 and values of 0, and a query of features 0 has an
output of 0 (`FILLERS`). XLA writes the arrays anew, so such a call takes the time of a few copies
more. Gradients go back through the same steps: they are functions of arrays, which JAX transposes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import programs
from ato_jax.ops.linear_attention import random_features
from ato_jax.ops.linear_attention.alignment import runs_of_keys
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs

# elu(x) + 1 of it is 0, with any decay.
LEAST_KEY = -1024.0
# An x whose feature is 0, by the map's name.
FILLERS = dict.fromkeys(("elu1", "exp", "softplus"), LEAST_KEY) | dict.fromkeys(
    ("relu", "relu2", "identity", "silu"), 0.0
)
# The axes of an array; r is a query head of the group of a head of keys g.
QUERIES = {"bthd": "btgrd", "bhtd": "bgrtd"}
KEYS = {"bthd": "bsgd", "bhtd": "bgsd"}
DECAYS = {"head": dict.fromkeys(KEYS, "g"), "step": {"bthd": "bsg", "bhtd": "bgs"}, "channel": KEYS}


def _in_groups(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    axis = spec.layout.index("h")
    return x.reshape(*x.shape[:axis], spec.G, -1, *x.shape[axis + 1 :])


def _of_heads(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    axis = spec.layout.index("h")
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


@dataclasses.dataclass(frozen=True)
class Step:
    """A call `before`, and the call `after` that takes its place."""

    before: LinearAttentionSpec
    after: LinearAttentionSpec

    def inputs(self, inputs: Inputs) -> Inputs:
        """The inputs of the call after."""
        raise NotImplementedError

    def outputs(self, outputs: Outputs) -> Outputs:
        """The outputs of the call before."""
        raise NotImplementedError

    def given(self, outputs: Outputs) -> Outputs:
        """The inverse of `outputs`; padding becomes 0."""
        raise NotImplementedError


class Folded(Step):
    """Turns a batch of single heads into the heads of one batch entry. The call has neither lengths
    nor segments."""

    @classmethod
    def of(cls, spec: LinearAttentionSpec) -> Folded:
        return cls(spec, dataclasses.replace(spec, B=1, H=spec.B, G=spec.B, layout="bhtd"))

    def inputs(self, inputs: Inputs) -> Inputs:
        spec, decay = self.before, inputs.decay
        q, k, v = (x.reshape(1, spec.B, -1, x.shape[-1]) for x in (inputs.q, inputs.k, inputs.v))
        if decay is not None and spec.decay == "head":
            decay = jnp.broadcast_to(decay, spec.B)
        elif decay is not None:
            width = (spec.F,) if spec.decay == "channel" else ()
            decay = decay.reshape(1, spec.B, spec.S, *width)
        state = inputs.initial_state
        state = state if state is None else self._state(state)
        return inputs._replace(q=q, k=k, v=v, decay=decay, initial_state=state)

    def _state(self, state: LinearState) -> LinearState:
        return LinearState(*(jnp.swapaxes(x, 0, 1) for x in state))

    def outputs(self, outputs: Outputs) -> Outputs:
        spec = self.before
        rows = (spec.T, 1) if spec.layout == "bthd" else (1, spec.T)
        return Outputs(outputs.out.reshape(spec.B, *rows, spec.V), self._state(outputs.state))

    def given(self, outputs: Outputs) -> Outputs:
        spec = self.before
        return Outputs(outputs.out.reshape(1, spec.B, spec.T, spec.V), self._state(outputs.state))


class Expanded(Step):
    """Keys, values, decays and states of a group are written for each of its heads."""

    @classmethod
    def of(cls, spec: LinearAttentionSpec) -> Expanded:
        return cls(spec, dataclasses.replace(spec, G=spec.H))

    def _repeated(self, x: jax.Array, axis: int) -> jax.Array:
        # In float32, as are the sums that are its transpose.
        group = self.before.H // self.before.G
        return jnp.repeat(x.astype(jnp.float32), group, axis).astype(x.dtype)

    def _state(self, state: LinearState) -> LinearState:
        return LinearState(*(self._repeated(x, 1) for x in state))

    def inputs(self, inputs: Inputs) -> Inputs:
        spec, decay, state = self.before, inputs.decay, inputs.initial_state
        axis = spec.layout.index("h")
        k, v = (self._repeated(x, axis) for x in (inputs.k, inputs.v))
        if decay is not None:
            decay = self._repeated(decay, 0 if spec.decay == "head" else axis)
        state = state if state is None else self._state(state)
        return inputs._replace(k=k, v=v, decay=decay, initial_state=state)

    def outputs(self, outputs: Outputs) -> Outputs:
        group = self.before.H // self.before.G
        return outputs._replace(state=LinearState(*(x[:, ::group] for x in outputs.state)))

    def given(self, outputs: Outputs) -> Outputs:
        return outputs._replace(state=self._state(outputs.state))


class Counted(Step):
    """Lengths, and what a row beyond one holds instead."""

    @classmethod
    def of(cls, spec: LinearAttentionSpec) -> Counted:
        return cls(spec, dataclasses.replace(spec, q_lengths=False, kv_lengths=False))

    def inputs(self, inputs: Inputs) -> Inputs:
        spec, decay = self.before, inputs.decay
        filler = FILLERS[spec.feature_map.name]
        q = self._where_counted(inputs.q, inputs.q_lengths, filler)
        k = self._where_counted(inputs.k, inputs.kv_lengths, filler)
        v = self._where_counted(inputs.v, inputs.kv_lengths, 0.0)
        if decay is not None and spec.decay != "head":
            decay = self._where_counted(decay, inputs.kv_lengths, 0.0)
        # Rows beyond a length go on with the last segment.
        runs = runs_of_keys(spec, inputs)
        inputs = inputs._replace(kv_segments=runs, q_lengths=None, kv_lengths=None)
        return inputs._replace(q=q, k=k, v=v, decay=decay)

    def _where_counted(self, x: jax.Array, lengths: jax.Array | None, other: float) -> jax.Array:
        if lengths is None:
            return x
        axis = self.before.layout.index("t")
        counted = jnp.arange(x.shape[axis], dtype=jnp.int32)[None] < lengths[:, None]
        shape = [len(lengths) if a == 0 else -1 if a == axis else 1 for a in range(x.ndim)]
        return jnp.where(counted.reshape(shape), x, jnp.asarray(other, x.dtype))

    def outputs(self, outputs: Outputs) -> Outputs:
        return outputs

    def given(self, outputs: Outputs) -> Outputs:
        return outputs


class Padded(Step):
    """Sizes of a call, and larger ones."""

    def _pad(self, x: jax.Array, axes: str, filler: float = 0.0) -> jax.Array:
        beyond = [_size(self.after, axis) - _size(self.before, axis) for axis in axes]
        value = jnp.asarray(filler, x.dtype)
        return jax.lax.pad(x, value, [(0, more, 0) for more in beyond]) if any(beyond) else x

    def _cut(self, x: jax.Array, axes: str) -> jax.Array:
        return jax.lax.slice(x, (0,) * x.ndim, [_size(self.before, axis) for axis in axes])

    def inputs(self, inputs: Inputs) -> Inputs:
        spec, decay, state = self.before, inputs.decay, inputs.initial_state
        filler = FILLERS.get(spec.feature_map.name, 0.0)
        q = self._pad(_in_groups(spec, inputs.q), QUERIES[spec.layout], filler)
        k = self._pad(inputs.k, KEYS[spec.layout], filler)
        v = self._pad(inputs.v, KEYS[spec.layout].replace("d", "v"))
        if decay is not None and spec.decay is not None:
            decay = self._pad(decay, DECAYS[spec.decay][spec.layout])
        state = state if state is None else self._state(self._pad, state)
        segments = self._go_on(inputs.q_segments, "t"), self._go_on(inputs.kv_segments, "s")
        inputs = inputs._replace(q_segments=segments[0], kv_segments=segments[1])
        return inputs._replace(q=_of_heads(spec, q), k=k, v=v, decay=decay, initial_state=state)

    def _go_on(self, segments: jax.Array | None, axis: str) -> jax.Array | None:
        """Rows beyond the last one are of its segment."""
        if segments is None:
            return None
        beyond = (0, 0), (0, _size(self.after, axis) - _size(self.before, axis))
        return jnp.pad(segments, beyond, mode="edge")

    def _state(self, change: Callable[..., jax.Array], state: LinearState) -> LinearState:
        return LinearState(change(state.kv, "bgdv"), change(state.k_sum, "bgd"))

    def outputs(self, outputs: Outputs) -> Outputs:
        axes = QUERIES[self.before.layout].replace("d", "v")
        out = self._cut(_in_groups(self.after, outputs.out), axes)
        return Outputs(_of_heads(self.before, out), self._state(self._cut, outputs.state))

    def given(self, outputs: Outputs) -> Outputs:
        axes = QUERIES[self.before.layout].replace("d", "v")
        out = self._pad(_in_groups(self.before, outputs.out), axes)
        return Outputs(_of_heads(self.before, out), self._state(self._pad, outputs.state))


def _size(spec: LinearAttentionSpec, axis: str) -> int:
    return spec.H // spec.G if axis == "r" else int(getattr(spec, axis.upper()))


class Kept(NamedTuple):
    """`Outputs` of the call before all steps, and what the kernels saved for the backward
    pass, without their outputs."""

    out: jax.Array
    state: LinearState
    inner: Any

    def plain(self) -> Outputs:
        return Outputs(self.out, self.state)


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """The steps from a call to one that kernels take, `spec`.

    Two are equal where their arrays have the same sizes, whether a state is returned or not.
    """

    steps: tuple[Step, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fit) and self._sizes() == other._sizes()

    def _sizes(self) -> list[Any]:
        specs = (step.after for step in self.steps)
        stateless = (dataclasses.replace(spec, return_state=False) for spec in specs)
        return list(zip(map(type, self.steps), stateless, strict=True))

    @property
    def spec(self) -> LinearAttentionSpec:
        return self.steps[-1].after

    def inputs(self, inputs: Inputs) -> Inputs:
        for step in self.steps:
            inputs = step.inputs(inputs)
        return inputs

    def outputs(self, outputs: Outputs) -> Outputs:
        for step in reversed(self.steps):
            outputs = step.outputs(outputs)
        return outputs

    def given(self, outputs: Outputs) -> Outputs:
        for step in self.steps:
            outputs = step.given(outputs)
        return outputs

    def kept(self, inner: Any) -> Kept:
        """`inner` is what the kernels keep of the last call."""
        return Kept(*self.outputs(inner.plain()), inner._replace(out=None, state=None))

    def outputs_kept(self, outputs: Any) -> Any:
        """Undoes `kept`. Where another backend made the outputs, these are returned in the sizes of
        the last call."""
        whole = self.given(outputs.plain())
        return outputs.inner._replace(**whole._asdict()) if isinstance(outputs, Kept) else whole

    @programs.promoting_ranks
    def gradients(
        self, run: Callable[[Inputs, Outputs], Inputs], inputs: Inputs, cotangents: Outputs
    ) -> Inputs:
        """The gradients of the first call. `run` computes those of the last call."""

        def numbers(inputs: Inputs) -> Inputs:
            return Inputs(*inputs[:5])

        def fitted(arrays: Inputs) -> tuple[Inputs, Inputs]:
            found = self.inputs(Inputs(*arrays[:5], *inputs[5:]))
            return numbers(found), found

        _, pull, given = jax.vjp(fitted, numbers(inputs), has_aux=True)
        called = self.steps[0].before
        out = random_features.without_padding(called, cotangents.out, inputs.q_lengths)
        cotangents = cotangents._replace(out=out)
        of_last = jax.eval_shape(self.given, cotangents)
        [g] = jax.linear_transpose(self.outputs, of_last)(cotangents)
        found: Inputs = pull(numbers(run(given, g)))[0]
        return found


def fills(fit: Fit) -> bool:
    """Whether the features of what the steps add are 0, as they have to be. Those of padded heads
    need not be: their values are 0."""
    adds = any(isinstance(step, Counted) for step in fit.steps)
    for step in fit.steps:
        sizes = ((spec.D, spec.T, spec.S) for spec in (step.before, step.after))
        adds |= isinstance(step, Padded) and len(set(sizes)) > 1
    return not adds or fit.spec.feature_map.name in FILLERS


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
