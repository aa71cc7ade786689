"""How errors are measured: the budgets, the float64 oracle, and the one way to compare with it.

    error = |actual - exact| / |exact|    relative RMS over the whole array

`exact` is the reference in float64 on the same rounded inputs. `ideal` is the reference in float32
(all its inputs upcast), rounded once to the dtype of the result; where TF32 was asked for, its
inputs are rounded to TF32, which every product of theirs does. A result passes when

    error <= max(budget, 2 * the ideal's error)                                  =: limit
    every row: its error / max(its norm, half the RMS row of its batch entry)
               <= 4 * limit * (1 + 3 / sqrt(row width))              10 in place of 4 in float32
               or 2 * the same of the ideal's worst row, if that is more: at large scores a row in
               which two keys share the weight is as far off in the ideal itself

and when its shape and dtype are right, and it is finite or infinite exactly where `exact` is.

One exception: with a normaliser, a gradient of the scores is a difference of two terms (through
the numerator and through the normaliser) that nearly cancel for tiny or constant inputs and for
rows that see one key. The errors of dq and dk are measured against the norm of both terms. Those
of the decay's and the bias's gradients are, too, but only once a tenth of that norm is left.

And where a decay's gradient is 0 in a whole batch entry, its rows count as at least half the RMS
row of all entries: such a gradient is a sum of terms that cancel, and leaves their rounding.

    from tests import numerics
    wanted = numerics.oracle("attention", q, k, v, causal=True)
    result = numerics.run("attention", "xla", q, k, v, causal=True, cotangents=wanted.cotangents)
    numerics.compare(result, wanted)          # raises AssertionError, else tells every figure
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax import autodiff, choosing, dispatch
from ato_jax.backend import Residuals
from ato_jax.device import describe, interpreting
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.attention import reference as attention_reference
from ato_jax.ops.attention import spec as attention_spec
from ato_jax.ops.common import axes
from ato_jax.ops.delta_rule import api as delta_rule_api
from ato_jax.ops.delta_rule import reference as delta_rule_reference
from ato_jax.ops.delta_rule import spec as delta_rule_spec
from ato_jax.ops.linear_attention import api as linear_attention_api
from ato_jax.ops.linear_attention import reference as linear_attention_reference
from ato_jax.ops.linear_attention import spec as linear_attention_spec

APIS = {
    "attention": attention_api,
    "linear_attention": linear_attention_api,
    "gated_delta_rule": delta_rule_api,
}
REFERENCES = {
    "attention": attention_reference,
    "linear_attention": linear_attention_reference,
    "gated_delta_rule": delta_rule_reference,
}

# The columns are the inputs' dtype; "tf32" is float32 with precision="tf32", whose mantissa is
# float16's: where no figure was set for it, it is float16's.
COLUMNS = ("bfloat16", "float16", "float32", "tf32")
BUDGETS = {
    "out": (3e-3, 6e-4, 2e-6, 1e-3),
    "dq": (5e-3, 1e-3, 2e-6, 1e-3),
    "dk": (4e-3, 1e-3, 2e-6, 1e-3),
    "dv": (4e-3, 1e-3, 2e-6, 1e-3),
    "state": (4e-3, 1e-3, 2e-6, 1e-3),
    "ddecay": (1e-2, 2e-3, 2e-5, 2e-3),
    "dbeta": (1e-2, 2e-3, 2e-5, 2e-3),
    "dbias": (8e-3, 2e-3, 1e-5, 2e-3),
    "dsinks": (1e-2, 2e-3, 1e-5, 2e-3),
    "lse": (1e-5, 1e-5, 1e-5, 1e-3),
}
STATES = {
    name: "state"
    for name in ("state_kv", "state_k_sum", "dstate_kv", "dstate_k_sum", "dstate")
}
# How much of the two terms' norm an error is measured against at least.
SHARE_OF_TERMS = {"dq": 1.0, "dk": 1.0, "ddecay": 0.1, "dbias": 0.1}
# Where the reference runs, also beside a GPU: XLA compiles float64 for a CPU much faster.
PLATFORM = "cpu"
DIFFERENTIABLE = ("beta", "decay", "bias", "sinks", "initial_state")


def budget(name: str, dtype: str, precision: str = "exact") -> float:
    """The figure for a quantity, by the dtype of q, k and v."""
    column = "tf32" if dtype == "float32" and precision == "tf32" else dtype
    return BUDGETS[STATES.get(name, name)][COLUMNS.index(column)]


@dataclasses.dataclass(frozen=True)
class Measure:
    """What was found for one array; `ideal` is None where it was not needed."""

    name: str
    error: float
    limit: float
    worst_row: float
    row_limit: float
    ideal: float | None = None
    wrong: str = ""

    @property
    def ok(self) -> bool:
        return not self.wrong and self.error <= self.limit and self.worst_row <= self.row_limit

    def __str__(self) -> str:
        if self.wrong:
            return f"{self.name}: {self.wrong}"
        ideal = "" if self.ideal is None else f", ideal {self.ideal:.2e}"
        return (
            f"{self.name}: error {self.error:.2e} (limit {self.limit:.2e}{ideal}), "
            f"worst row {self.worst_row:.2e} (limit {self.row_limit:.2e})"
        )


def _norm(array: np.ndarray, axis: Any = None) -> Any:
    return np.sqrt(np.sum(np.square(array), axis=axis))


def _ratio(error: np.ndarray, size: np.ndarray) -> np.ndarray:
    """error / size, where nothing over nothing is no error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, error / size)


def errors(
    actual: np.ndarray,
    exact: np.ndarray,
    terms: np.ndarray | None,
    batched: bool,
    sums: bool = False,
) -> tuple[float, float]:
    """The relative RMS error of the whole array and of its worst row.

    `sums`: each element is a sum whose terms may cancel to nothing. Where they do in a whole batch
    entry, what is left is rounding, and counts beside the RMS row of all entries.
    """
    if exact.size == 0:
        return 0.0, 0.0
    finite = np.isfinite(exact)
    difference = np.where(finite, actual, 0) - np.where(finite, exact, 0)
    size = np.where(finite, exact, 0)
    whole, rows = _norm(size), _norm(size, -1)
    if terms is not None:
        whole, rows = max(whole, _norm(terms)), np.maximum(rows, _norm(terms, -1))
    within = tuple(range(1 if batched and rows.ndim else 0, rows.ndim))
    typical = np.sqrt(np.mean(np.square(rows), axis=within, keepdims=True))
    if sums:
        typical = np.where(typical == 0, np.sqrt(np.mean(np.square(rows))), typical)
    worst = np.max(_ratio(_norm(difference, -1), np.maximum(rows, typical / 2)))
    return float(_ratio(_norm(difference), whole)), float(worst)


def measure(
    name: str,
    actual: Any,
    exact: Any,
    *,
    dtype: str,
    precision: str = "exact",
    ideal: Any = None,
    terms: Any = None,
    result_dtype: Any = None,
    batched: bool = True,
) -> Measure:
    """Compares one array with the float64 reference's.

    Args:
      name: a key of BUDGETS or STATES.
      actual: the result under test.
      exact: the float64 reference's.
      dtype: of q, k and v.
      precision: "exact" or "tf32".
      ideal: the float32 reference's, rounded to the result's dtype, or a function that gives it;
        called only where the budget does not suffice.
      terms: the norm of the two terms of a gradient before they cancel, elementwise, or a
        function that gives it (or None).
      result_dtype: the dtype that `actual` must have.
      batched: whether the first axis is the batch.
    """
    actual_dtype = str(actual.dtype)
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    nothing = functools.partial(Measure, name, np.inf, 0.0, np.inf, 0.0)
    if actual.shape != exact.shape:
        return nothing(wrong=f"shape {actual.shape}, wanted {exact.shape}")
    if result_dtype is not None and actual_dtype != str(jnp.dtype(result_dtype)):
        return nothing(wrong=f"dtype {actual_dtype}, wanted {jnp.dtype(result_dtype)}")
    if np.isnan(actual).any():
        return nothing(wrong=f"{int(np.isnan(actual).sum())} of {actual.size} are NaN")
    infinite = np.isinf(exact) | np.isinf(actual)
    if (actual[infinite] != exact[infinite]).any():
        where = np.argwhere(infinite & (actual != exact))[0].tolist()
        return nothing(wrong=f"at {where}: {actual[tuple(where)]}, wanted {exact[tuple(where)]}")
    limit = budget(name, dtype, precision)
    width = exact.shape[-1] if exact.ndim else 1
    share = (10 if dtype == "float32" else 4) * (1 + 3 / np.sqrt(max(width, 1)))
    error_of = functools.partial(errors, batched=batched, sums=name == "ddecay")
    error, worst = error_of(actual, exact, None)
    row_limit, of_ideal = share * limit, None
    if error > limit or worst > share * limit:
        terms = terms() if callable(terms) else terms
        if terms is not None:
            terms = np.asarray(terms, np.float64) * SHARE_OF_TERMS[name]
            error, worst = error_of(actual, exact, terms)
    if error > limit or worst > share * limit:
        ideal = ideal() if callable(ideal) else ideal
        if ideal is not None:
            of_ideal, worst_of_ideal = error_of(np.asarray(ideal, np.float64), exact, terms)
            limit = max(limit, 2 * of_ideal)
            row_limit = max(share * limit, 2 * worst_of_ideal)
    return Measure(name, error, limit, worst, row_limit, of_ideal)


def check(name: str, actual: Any, exact: Any, **facts: Any) -> Measure:
    """`measure`, with an AssertionError where the result does not pass."""
    found = measure(name, actual, exact, **facts)
    assert found.ok, str(found)
    return found


def _users_output(request: Any, array: Any, letters: str = "") -> Any:
    """An output of the padded, batched call as the caller of the public function sees it."""
    if "T" in letters:
        time = axes(request.spec.layout, letters).index("T")
        array = array[(slice(None),) * time + (slice(0, request.T),)]
    return array if request.batched else array[0]


def users_outputs(op: str, request: Any, outputs: Any) -> dict[str, Any]:
    """The op's outputs by name, as the public function shapes them; those that it returns."""
    found = {"out": _users_output(request, outputs.out, "BTHV")}
    if op == "attention" and request.spec.return_lse:
        found["lse"] = _users_output(request, outputs.lse, "BTH")
    if op == "linear_attention" and request.spec.return_state:
        found["state_kv"] = _users_output(request, outputs.state.kv)
        found["state_k_sum"] = _users_output(request, outputs.state.k_sum)
    if op == "gated_delta_rule" and request.spec.return_state:
        found["state"] = _users_output(request, outputs.state)
    return found


def _users_gradient(array: Any, cotangent: Any) -> Any:
    """An input's cotangent in the shape of the caller's array, which may have been empty."""
    shape = np.shape(array)
    return cotangent.reshape(shape) if np.size(array) else np.zeros(shape, cotangent.dtype)


def users_gradients(arrays: Mapping[str, Any], inputs: Any) -> dict[str, Any]:
    """The inputs' cotangents by name, in the shapes of the caller's `arrays`."""
    found = {}
    for name, array in arrays.items():
        cotangent = getattr(inputs, name)
        if name == "initial_state" and not isinstance(array, tuple):
            found["dstate"] = _users_gradient(array, cotangent)
        elif name == "initial_state":
            for part in ("kv", "k_sum"):
                found[f"dstate_{part}"] = _users_gradient(
                    getattr(array, part), getattr(cotangent, part)
                )
        else:
            found[f"d{name}"] = _users_gradient(array, cotangent)
    return found


def _upcast(tree: Any, dtype: Any) -> Any:
    """Arrays for the reference, floats as `dtype`; float64 only inside jax.enable_x64."""

    def convert(leaf: Any) -> jax.Array:
        values = np.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = values.astype(dtype)
        return jax.device_put(values, jax.devices(PLATFORM)[0])

    return jax.tree.map(convert, tree)


def _rounded_to_tf32(inputs: Any) -> Any:
    """The float32 arrays among q, k, v and out, rounded to TF32's 10 bits of mantissa."""

    def rounded(array: Any) -> Any:
        return jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=10)

    given = {name: getattr(inputs, name, None) for name in ("q", "k", "v", "out")}
    return inputs._replace(
        **{name: rounded(x) for name, x in given.items() if getattr(x, "dtype", None) == np.float32}
    )


def _in_dtype(spec: Any, dtype: Any) -> Any:
    """For the reference, to which calls alike but for their dtype are one: so compiled once."""
    return dataclasses.replace(spec, dtype=np.dtype(dtype).name, precision="exact")


@dataclasses.dataclass
class Oracle:
    """What the reference says of one call, by name (see `users_outputs`, `users_gradients`).

    `cotangents` are those of the public function's result, in its structure; `inputs` and
    `outputs_cotangents` are the backend's own view of the same call.
    """

    op: str
    request: Any
    arrays: dict[str, Any]
    cotangents: Any
    outputs_cotangents: Any
    exact: dict[str, np.ndarray]

    @functools.cached_property
    def ideal(self) -> dict[str, np.ndarray]:
        """The float32 reference's results, each rounded once to the dtype it must have.

        TF32 rounds the inputs themselves. Where a row sees few keys, the errors of a sum of their
        products do not average out.
        """
        request, cotangents = self.request, self.outputs_cotangents
        if request.spec.precision == "tf32":
            request = request._replace(inputs=_rounded_to_tf32(request.inputs))
            cotangents = _rounded_to_tf32(cotangents)
        found = _reference(self.op, request, self.arrays, cotangents, np.float32)
        return {
            name: np.asarray(array).astype(self.result_dtype(name)) for name, array in found.items()
        }

    @functools.cached_property
    def terms(self) -> dict[str, np.ndarray]:
        """The norm of each gradient's two terms, where there is a normaliser."""
        spec = _in_dtype(self.request.spec, np.float64)
        with jax.enable_x64(True):
            inputs, cotangents = (
                _upcast(tree, np.float64) for tree in (self.request.inputs, self.outputs_cotangents)
            )
            cotangents = jax.tree.map(jnp.nan_to_num, cotangents)
            if self.op == "attention":
                pair = _attention_terms(spec, inputs, cotangents)
            elif self.op == "linear_attention" and spec.normalize:
                pair = _linear_attention_terms(spec, inputs, cotangents)
            else:
                return {}
            first, second = (users_gradients(self.arrays, term) for term in pair)
        return {
            name: np.hypot(np.asarray(first[name]), np.asarray(second[name]))
            for name in first
            if name in SHARE_OF_TERMS
        }

    def result_dtype(self, name: str) -> Any:
        if name == "out":
            return jnp.dtype(self.request.spec.dtype)
        if not name.startswith("d") or name not in self._gradients:
            return jnp.dtype("float32")
        return self._gradients[name]

    @functools.cached_property
    def _gradients(self) -> dict[str, Any]:
        found = {}
        for name, array in self.arrays.items():
            if name == "initial_state" and not isinstance(array, tuple):
                found["dstate"] = array.dtype
            elif name == "initial_state":
                found |= {"dstate_kv": array[0].dtype, "dstate_k_sum": array[1].dtype}
            else:
                found[f"d{name}"] = array.dtype
        return found


@functools.partial(jax.jit, static_argnums=0)
def _attention_terms(spec: Any, inputs: Any, cotangents: Any) -> tuple[Any, Any]:
    """With weights p, ds = p * (dp + dlse) - p * delta: the lse's cotangent splits the terms."""
    forward = functools.partial(attention_reference.forward, spec, None)
    outputs, pull = autodiff.vjp(forward, inputs)
    delta = jnp.sum(outputs.out * cotangents.out, axis=-1)
    without = cotangents._replace(lse=cotangents.lse + delta)
    through_normaliser = attention_spec.Outputs(jnp.zeros_like(outputs.out), -delta)
    return pull(without), pull(through_normaliser)


@functools.partial(jax.jit, static_argnums=0)
def _linear_attention_terms(spec: Any, inputs: Any, cotangents: Any) -> tuple[Any, Any]:
    """Numerator and denominator as one unnormalised call, the latter as a column of ones in v."""
    ones = jnp.ones(inputs.v.shape[:-1] + (1,), inputs.v.dtype)
    state = inputs.initial_state
    if state is not None:
        state = state._replace(kv=jnp.concatenate([state.kv, state.k_sum[..., None]], -1))
    extended = inputs._replace(v=jnp.concatenate([inputs.v, ones], -1), initial_state=state)
    sums = dataclasses.replace(spec, normalize=False, scale=1.0, V=spec.V + 1)
    forward = functools.partial(linear_attention_reference.forward, sums, None)
    outputs, pull = autodiff.vjp(forward, extended)
    numerator, denominator = outputs.out[..., :-1], outputs.out[..., -1:]
    divisor = jnp.maximum(denominator, spec.eps)
    d_numerator = cotangents.out / divisor
    d_denominator = jnp.where(
        denominator > spec.eps,
        -jnp.sum(cotangents.out * numerator, -1, keepdims=True) / divisor**2,
        0,
    )
    nothing = jax.tree.map(jnp.zeros_like, outputs.state)
    d_state = nothing._replace(
        kv=nothing.kv.at[..., :-1].set(cotangents.state.kv), k_sum=cotangents.state.k_sum
    )

    def term(d_numerator: Any, d_denominator: Any, d_state: Any) -> Any:
        d_out = jnp.concatenate([d_numerator, d_denominator], -1)
        found = pull(linear_attention_spec.Outputs(d_out, d_state))
        found = found._replace(v=found.v[..., :-1])
        if found.initial_state is not None:
            found = found._replace(
                initial_state=found.initial_state._replace(kv=found.initial_state.kv[..., :-1])
            )
        return found

    return (
        term(d_numerator, jnp.zeros_like(d_denominator), d_state),
        term(jnp.zeros_like(d_numerator), d_denominator, nothing),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _outputs_and_gradients(op: str, spec: Any, inputs: Any, cotangents: Any) -> tuple[Any, Any]:
    forward = functools.partial(REFERENCES[op].forward, spec, None)
    outputs, pull = autodiff.vjp(forward, inputs)
    return outputs, pull(cotangents)


def _reference(
    op: str, request: Any, arrays: Mapping[str, Any], cotangents: Any, dtype: Any
) -> dict[str, np.ndarray]:
    """Outputs and gradients by name, computed in `dtype`."""
    spec = _in_dtype(request.spec, dtype)
    with jax.enable_x64(dtype == np.float64):
        inputs, cotangents = (_upcast(tree, dtype) for tree in (request.inputs, cotangents))
        outputs, gradients = _outputs_and_gradients(op, spec, inputs, cotangents)
        found = users_outputs(op, request, outputs) | users_gradients(arrays, gradients)
        return {name: np.asarray(array) for name, array in found.items()}


def prepare(op: str, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The checked request, and the differentiable arrays by name as the caller gave them."""
    given = {name: options[name] for name in DIFFERENTIABLE if options.get(name) is not None}
    return APIS[op].prepare(q, k, v, **options), {"q": q, "k": k, "v": v} | given


def draw_cotangents(op: str, request: Any, seed: int = 0) -> Any:
    """Random cotangents of a backend's outputs; zero for what the call does not return.

    Those of padded queries are NaN: the contract keeps NaN in padding from every gradient.
    """
    generator = np.random.default_rng(seed)
    spec = request.spec
    inputs = request.inputs
    lengths = inputs.lengths if op == "gated_delta_rule" else inputs.q_lengths
    lengths = np.full(spec.B, spec.T) if lengths is None else lengths
    padding = np.arange(spec.T) >= np.asarray(lengths)[:, None]  # [B, T]

    def draw(letters: str, dtype: Any, returned: bool = True) -> Any:
        letters = axes(spec.layout, letters) if "T" in letters else letters
        values = generator.normal(size=[getattr(spec, letter) for letter in letters]) * returned
        if "T" in letters and returned:
            # NaN in padding reaches nothing, in the outputs' cotangents either.
            beyond = np.expand_dims(padding, tuple(range(2, values.ndim)))
            beyond = beyond if spec.layout == "bthd" else np.swapaxes(beyond, 1, 2)
            values = np.where(beyond, np.nan, values)
        return jnp.asarray(values.astype(dtype))

    out = draw("BTHV", request.inputs.v.dtype)
    if op == "attention":
        return attention_spec.Outputs(out, draw("BTH", np.float32, spec.return_lse))
    if op == "gated_delta_rule":
        return delta_rule_spec.Outputs(out, draw("BHDV", np.float32, spec.return_state))
    state = linear_attention_spec.LinearState(
        *(draw(letters, np.float32, spec.return_state) for letters in ("BGFV", "BGF"))
    )
    return linear_attention_spec.Outputs(out, state)


def oracle(op: str, q: Any, k: Any, v: Any, *, cotangents: Any = None, **options: Any) -> Oracle:
    """What the float64 reference gives: outputs and all gradients, on the inputs as rounded.

    `cotangents` are a backend's `Outputs` (see `draw_cotangents`); random ones if not given.
    """
    request, arrays = prepare(op, q, k, v, **options)
    if cotangents is None:
        cotangents = draw_cotangents(op, request)
    exact = _reference(op, request, arrays, cotangents, np.float64)
    users = users_outputs(op, request, cotangents)
    result: Any = users["out"]
    if "lse" in users:
        result = (result, users["lse"])
    if "state" in users:
        result = (result, users["state"])
    if "state_kv" in users:
        result = (
            result,
            linear_attention_spec.LinearState(users["state_kv"], users["state_k_sum"]),
        )
    return Oracle(op, request, arrays, result, cotangents, exact)


def named_outputs(op: str, result: Any) -> dict[str, Any]:
    """What the public function returned, by name."""
    if not isinstance(result, tuple):
        return {"out": result}
    out, beside = result
    if op == "attention":
        return {"out": out, "lse": beside}
    if op == "gated_delta_rule":
        return {"out": out, "state": beside}
    return {"out": out, "state_kv": beside.kv, "state_k_sum": beside.k_sum}


def named_results(op: str, result: Any, gradients: Mapping[str, Any]) -> dict[str, Any]:
    """The results of the public function and the gradients of its arguments, by name."""
    found = named_outputs(op, result)
    for name, gradient in gradients.items():
        if name == "initial_state" and op == "gated_delta_rule":
            found["dstate"] = gradient
        elif name == "initial_state":
            found |= {"dstate_kv": gradient[0], "dstate_k_sum": gradient[1]}
        else:
            found[f"d{name}"] = gradient
    return found


def run(
    op: str,
    implementation: str | None,
    q: Any,
    k: Any,
    v: Any,
    *,
    cotangents: Any,
    **options: Any,
) -> dict[str, Any]:
    """The public function's outputs and all gradients, by name."""
    function = getattr(APIS[op], op)
    arrays = {"q": q, "k": k, "v": v}
    arrays |= {name: options[name] for name in DIFFERENTIABLE if options.get(name) is not None}
    others = {name: value for name, value in options.items() if name not in arrays}

    def call(arrays: dict[str, Any]) -> Any:
        return function(**arrays, **others, implementation=implementation)

    result, pull = jax.vjp(call, arrays)
    (gradients,) = pull(cotangents)
    return named_results(op, result, gradients)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _forward_and_backward(
    op: str,
    forward: Any,
    spec: Any,
    forward_config: Any,
    backward: choosing.Choice,
    inputs: Any,
    cotangents: Any,
) -> tuple[Any, Any]:
    outputs = forward.forward(spec.for_backward(), forward_config, inputs)
    residuals = Residuals(inputs, outputs)
    return outputs, dispatch.backward_by(APIS[op].OP, backward, spec, residuals, cotangents)


def run_backends(
    forward: str,
    backward: str,
    wanted: Oracle,
    *,
    device: Any = None,
    forward_config: Mapping[str, int] | None = None,
    backward_config: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """One backend's forward with another's backward on the same residuals, by name.

    `forward_config` and `backward_config` override fields of the default config, as a tuning
    table does.
    """
    op, request = wanted.op, wanted.request
    device = describe(jax.devices()[0]) if device is None else device
    names = forward, backward
    modules = [APIS[op].OP.backend(name) for name in names]
    for name, module, phase in zip(names, modules, ("forward", "backward"), strict=True):
        reason = module.unsupported(request.spec, phase)
        assert reason is None, f"{name} refuses the {phase} pass of this call: {reason}"
    configs = [
        dataclasses.replace(module.default_config(request.spec, device), **(override or {}))
        for module, override in zip(modules, (forward_config, backward_config), strict=True)
    ]
    call = choosing.Call(APIS[op].OP, request.spec, backward, device, interpreting())
    fallback = choosing.fallback_of(call, backward, "backward")
    choice = choosing.Choice(backward, configs[1], backward, fallback)
    outputs, gradients = _forward_and_backward(
        op,
        modules[0],
        request.spec,
        configs[0],
        choice,
        request.inputs,
        wanted.outputs_cotangents,
    )
    found = users_outputs(op, request, outputs)
    for name, gradient in users_gradients(wanted.arrays, gradients).items():
        # Backends see sinks and decays in float32: the public function converts both ways.
        found[name] = gradient.astype(wanted.result_dtype(name))
    return found


def compare(
    result: Mapping[str, Any], wanted: Oracle, *, dtypes: bool = True
) -> dict[str, Measure]:
    """Every array of the oracle against the result's; an AssertionError tells all that fail."""
    spec = wanted.request.spec
    found = {}
    for name, exact in wanted.exact.items():
        whole = name == "dsinks" or name == "ddecay" and spec.decay == "head"
        found[name] = measure(
            name,
            result[name],
            exact,
            dtype=spec.dtype,
            precision=spec.precision,
            ideal=lambda name=name: wanted.ideal[name],
            terms=(lambda name=name: wanted.terms.get(name)) if name in SHARE_OF_TERMS else None,
            result_dtype=wanted.result_dtype(name) if dtypes else None,
            batched=wanted.request.batched and not whole,
        )
    failed = [str(one) for one in found.values() if not one.ok]
    assert not failed, "\n".join([*failed, str(spec)])
    return found
