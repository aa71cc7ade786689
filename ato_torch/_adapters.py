"""The ops of ato_jax as functions of flat lists of arrays.

    forward:   arrays -> outputs
    backward:  arrays, outputs, cotangents -> gradients

An op with kernels of its own outputs its residuals, so that the backward pass recomputes nothing.
An op of plain JAX has JAX's derivative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ato_jax import choosing, dispatch
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.attention import reading
from ato_jax.ops.attention.pieces import combine
from ato_jax.ops.attention.spec import Outputs as AttentionOutputs
from ato_jax.ops.common import axes
from ato_jax.ops.delta_rule import api as delta_rule_api
from ato_jax.ops.delta_rule.spec import Outputs as DeltaRuleOutputs
from ato_jax.ops.delta_rule.step import gated_delta_rule_step, keeping_states
from ato_jax.ops.linear_attention import api as linear_attention_api
from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.spec import LinearState
from ato_jax.ops.linear_attention.spec import Outputs as LinearAttentionOutputs
from ato_jax.ops.linear_attention.step import linear_attention_step
from ato_torch import _elf
from ato_torch._calls import PARAMETERS, SCALES, Arrays, Call, Shape, Shapes

Cotangents = Sequence[jax.Array | None]


def tells_launches(version: tuple[int, ...]) -> bool:
    """Whether a launch of Mosaic GPU can be read from what this version of JAX serializes.

    It lies in code for the host (`_mosaic`). In JAX 0.11.0 that code also loads the machine code,
    which lies in it.
    """
    return version >= (0, 11, 1) and _elf.runs_host_code()


READS_LAUNCHES = tells_launches(jax.__version_info__)


def through_jax_alone() -> tuple[str, ...]:
    """Backends whose kernels only JAX's runtime can launch."""
    return () if READS_LAUNCHES else ("mosaic_gpu",)


def arguments(call: Call, arrays: Arrays) -> dict[str, Any]:
    """The keyword arguments of the op's function."""
    named = dict(zip(call.arrays, arrays, strict=True))
    for name in ("initial_state", "state"):
        if f"{name}.kv" in named:
            named[name] = LinearState(named.pop(f"{name}.kv"), named.pop(f"{name}.k_sum"))
    if call.is_float8:
        named["scales"] = tuple(named.pop(name) for name in SCALES)
    found = named | dict(call.options)
    parameters = [found.pop(name) for name in call.arrays if name in PARAMETERS]
    feature_map = found.get("feature_map")
    if isinstance(feature_map, features.FeatureMap):
        found["feature_map"] = (
            (lambda x: feature_map(x, *parameters))
            if feature_map.elementwise
            else features.Favor(*parameters)
        )
    return found


class Adapter(Protocol):
    """An op, as a function of a flat list of arrays, with a gradient."""

    @property
    def timed(self) -> tuple[bool, ...]:
        """Which outputs have an axis T, for an op with kernels of its own."""

    def answers(self, call: Call) -> int | None:
        """How many outputs the caller asked for, from the first; None for all."""

    def reads_float8(self, call: Call, arrays: Arrays) -> bool:
        """Whether kernels read the 8 bits of a call on float8 arrays."""

    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        """The outputs."""

    def backward(
        self,
        call: Call,
        needed: tuple[bool, ...],
        inputs: Arrays,
        outputs: Arrays,
        cotangents: Cotangents,
    ) -> list[jax.Array]:
        """The gradients of those inputs that `needed` names. A cotangent of zeros may be None."""

    def shapes(self, call: Call, inputs: dict[str, Shape]) -> Shapes:
        """Shape and dtype of each output, from those of the inputs by name."""


class _Kernels:
    """An op with kernels of its own for the forward and the backward pass.

    `asks` is the option with which a caller asks for more outputs than the first.
    """

    timed: tuple[bool, ...]
    asks: str

    def __init__(self, api: Any) -> None:
        self.api = api

    def answers(self, call: Call) -> int | None:
        return None if dict(call.options).get(self.asks) else 1

    def leaves(self, spec: Any, outputs: Any) -> list[jax.Array]:
        """The op's outputs as a flat list."""
        raise NotImplementedError

    def outputs(self, leaves: Arrays) -> Any:
        """The op's outputs out of a flat list."""
        raise NotImplementedError

    def op(self, request: Any) -> choosing.Op:
        """The op, without backends that cannot be launched directly unless one was asked for.

        A CUDA graph could not capture calls of such a backend. A call whose 8 bits are read has an
        op of its own.
        """
        if request.implementation == reading.BACKEND:
            return request.op
        if request.implementation is not None:
            return self.api.OP
        names = tuple(name for name in self.api.OP.backends if name not in through_jax_alone())
        return dataclasses.replace(self.api.OP, backends=names)

    def reads_float8(self, call: Call, arrays: Arrays) -> bool:
        named = dict(call.options)["implementation"]
        if named is None and choosing.family(reading.BACKEND) in through_jax_alone():
            return False
        request = self.api.prepare(**arguments(call, arrays))
        return bool(request.implementation == reading.BACKEND)

    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        request = self.api.prepare(**arguments(call, arrays))
        spec = request.spec.for_backward() if call.training else request.spec
        outputs = dispatch.run(
            self.op(request), spec, request.inputs, request.implementation, call.training
        )
        leaves = self.leaves(spec, outputs)
        if call.is_float8:
            leaves[0] = leaves[0].astype(request.out_dtype)
        if request.T < spec.T:
            # `prepare` makes one row of an empty T.
            time = axes(spec.layout, "BTHV").index("T")
            leaves = [
                jax.lax.slice_in_dim(leaf, 0, request.T, axis=time) if timed else leaf
                for leaf, timed in zip(leaves, self.timed, strict=False)
            ]
        return leaves

    def backward(
        self,
        call: Call,
        needed: tuple[bool, ...],
        inputs: Arrays,
        outputs: Arrays,
        cotangents: Cotangents,
    ) -> list[jax.Array]:
        request = self.api.prepare(**arguments(call, inputs))
        spec = request.spec
        wanted = [name for name, is_needed in zip(call.arrays, needed, strict=True) if is_needed]
        if spec.B == 0:
            found = dict(zip(call.arrays, map(jnp.zeros_like, inputs), strict=True))
            return [found[name] for name in wanted]
        if request.T < spec.T:
            time = axes(spec.layout, "BTHV").index("T")
            outputs, cotangents = (
                [
                    jnp.zeros((*leaf.shape[:time], 1, *leaf.shape[time + 1 :]), leaf.dtype)
                    if timed and leaf is not None
                    else leaf
                    for leaf, timed in zip(leaves, self.timed, strict=False)
                ]
                for leaves in (outputs, cotangents)
            )
        gradients = dispatch.backward(
            self.op(request),
            spec,
            request.inputs,
            self.outputs(outputs),
            self.outputs(cotangents).plain(),
            request.implementation,
            tuple(dict.fromkeys(name.split(".")[0] for name in wanted)),
        )
        shapes = dict(zip(call.arrays, (array.shape for array in inputs), strict=True))
        return [_cut(_part(gradients, name), shapes[name]) for name in wanted]


def _dtype_of_out(call: Call, dtype: str) -> str:
    """The dtype of out, where that of q is `dtype`."""
    return str(dict(call.options)["out_dtype"]) if call.is_float8 else dtype


def _part(gradients: dict[str, Any], name: str) -> jax.Array:
    whole, _, part = name.partition(".")
    return getattr(gradients[whole], part) if part else gradients[whole]


def _cut(gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The gradient without the row that `prepare` adds to an empty axis."""
    return gradient[tuple(map(slice, shape))] if gradient.shape != shape else gradient


class _Attention(_Kernels):
    """Outputs: out, lse, and in training below float32 what rounding to the dtype took from out."""

    timed = (True, True, True)
    asks = "return_lse"

    def leaves(self, spec: Any, outputs: Any) -> list[jax.Array]:
        out, lse, rest = outputs
        if not spec.keep_rest:
            return [out, lse]
        # Not every backend keeps the rest. Zeros change nothing in the backward pass.
        return [out, lse, jnp.zeros(out.shape, jnp.int8) if rest is None else rest]

    def outputs(self, leaves: Arrays) -> Any:
        return AttentionOutputs(*leaves)

    def shapes(self, call: Call, inputs: dict[str, Shape]) -> Shapes:
        (rows, dtype), (value, _) = inputs["q"], inputs["v"]
        dtype = _dtype_of_out(call, dtype)
        out, lse = (*rows[:-1], value[-1]), rows[:-1]
        rest: Shapes = [(out, "int8")] if call.training and dtype != "float32" else []
        return [(out, dtype), (lse, "float32"), *rest]


class _LinearAttention(_Kernels):
    """Outputs: out, and the two sums of the state."""

    timed = (True, False, False)
    asks = "return_state"

    def leaves(self, spec: Any, outputs: Any) -> list[jax.Array]:
        return jax.tree.leaves(outputs)

    def outputs(self, leaves: Arrays) -> Any:
        return LinearAttentionOutputs(leaves[0], LinearState(*leaves[1:]))

    def shapes(self, call: Call, inputs: dict[str, Shape]) -> Shapes:
        (rows, dtype), (key, _), (value, _) = (inputs[name] for name in "qkv")
        options = dict(call.options)
        heads = axes(options["layout"], "BSGD").index("G")
        size = _features(options["feature_map"], key[-1], inputs)
        k_sum = (key[0], key[heads], size)
        return [
            ((*rows[:-1], value[-1]), _dtype_of_out(call, dtype)),
            ((*k_sum, value[-1]), "float32"),
            (k_sum, "float32"),
        ]


def _features(feature_map: Any, D: Any, inputs: dict[str, Shape]) -> Any:
    """F, the number of features: D, or for FAVOR+ the rows of its projection."""
    is_favor = isinstance(feature_map, features.FeatureMap) and not feature_map.elementwise
    return inputs[PARAMETERS[0]][0][0] if is_favor else D


class _DeltaRule(_Kernels):
    """Outputs: out, and the state. With the option `l2norm`, q and k get rows of length 1."""

    timed = (True, False)
    asks = "return_state"

    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        call, arrays, _ = _of_unit_rows(call, arrays)
        return super().forward(call, arrays)

    def backward(
        self,
        call: Call,
        needed: tuple[bool, ...],
        inputs: Arrays,
        outputs: Arrays,
        cotangents: Cotangents,
    ) -> list[jax.Array]:
        call, inputs, transposed = _of_unit_rows(call, inputs)
        gradients = super().backward(call, needed, inputs, outputs, cotangents)
        names = [name for name, is_needed in zip(call.arrays, needed, strict=True) if is_needed]
        return [
            transposed[name](gradient)[0] if name in transposed else gradient
            for name, gradient in zip(names, gradients, strict=True)
        ]

    def leaves(self, spec: Any, outputs: Any) -> list[jax.Array]:
        return list(outputs)

    def outputs(self, leaves: Arrays) -> Any:
        return DeltaRuleOutputs(*leaves)

    def shapes(self, call: Call, inputs: dict[str, Shape]) -> Shapes:
        (value, dtype), (key, _) = inputs["v"], inputs["k"]
        B, _, H, V = value
        return [(value, dtype), ((B, H, key[-1], V), "float32")]


# What flash-linear-attention adds to the squared length of a row.
L2NORM_EPS = 1e-6


def _unit_rows(x: jax.Array) -> jax.Array:
    """Each row divided by sqrt(|row|^2 + L2NORM_EPS), in x's dtype."""
    rows = x.astype(jnp.float32)
    squares = jnp.sum(rows * rows, axis=-1, keepdims=True)
    return (rows * jax.lax.rsqrt(squares + L2NORM_EPS)).astype(x.dtype)


def _of_unit_rows(
    call: Call, arrays: Arrays
) -> tuple[Call, list[jax.Array], dict[str, Callable[..., Any]]]:
    """A call of the delta rule without its option `l2norm`, its arrays, and the transposes of what
    was done to them, by name."""
    options = dict(call.options)
    names = ("q", "k") if options.pop("l2norm") else ()
    found, transposed = [], {}
    for name, array in zip(call.arrays, arrays, strict=True):
        if name in names:
            array, transposed[name] = jax.vjp(_unit_rows, array)
        found.append(array)
    return call._replace(options=tuple(options.items())), found, transposed


class _Plain:
    """An op of plain JAX, which JAX differentiates."""

    timed: tuple[bool, ...] = ()

    def answers(self, call: Call) -> int | None:
        return None

    def reads_float8(self, call: Call, arrays: Arrays) -> bool:
        return False

    def backward(
        self,
        call: Call,
        needed: tuple[bool, ...],
        inputs: Arrays,
        outputs: Arrays,
        cotangents: Cotangents,
    ) -> list[jax.Array]:
        def of_needed(chosen: Arrays) -> list[jax.Array]:
            ahead = iter(chosen)
            every = [
                next(ahead) if is_needed else array
                for is_needed, array in zip(needed, inputs, strict=True)
            ]
            return self.forward(call, every)

        chosen = [array for is_needed, array in zip(needed, inputs, strict=True) if is_needed]
        every = [
            jnp.zeros_like(output) if cotangent is None else cotangent
            for output, cotangent in zip(outputs, cotangents, strict=True)
        ]
        return jax.vjp(of_needed, chosen)[1](every)[0]

    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        raise NotImplementedError


class _Step(_Plain):
    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        return jax.tree.leaves(linear_attention_step(**arguments(call, arrays)))

    def shapes(self, call: Call, inputs: dict[str, Shape]) -> Shapes:
        (rows, dtype), (value, _) = inputs["q"], inputs["v"]
        kv, k_sum = (inputs[f"state.{name}"][0] for name in LinearState._fields)
        return [((*rows[:-1], value[-1]), dtype), (kv, "float32"), (k_sum, "float32")]


class _DeltaRuleStep(_Plain):
    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        call, arrays, _ = _of_unit_rows(call, arrays)
        # PyTorch's tensor of the state stays as it is.
        with keeping_states():
            return list(gated_delta_rule_step(**arguments(call, arrays)))

    def shapes(self, call: Call, inputs: dict[str, Shape]) -> Shapes:
        return [inputs["v"], (inputs["state"][0], "float32")]


class _Combine(_Plain):
    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        return list(combine(**arguments(call, arrays)))

    def shapes(self, call: Call, inputs: dict[str, Shape]) -> Shapes:
        outs, dtype = inputs["outs"]
        return [(outs[1:], dtype), (outs[1:-1], "float32")]


OPS: dict[str, Adapter] = {
    "attention": _Attention(attention_api),
    "linear_attention": _LinearAttention(linear_attention_api),
    "linear_attention_step": _Step(),
    "gated_delta_rule": _DeltaRule(delta_rule_api),
    "gated_delta_rule_step": _DeltaRuleStep(),
    "combine": _Combine(),
}
