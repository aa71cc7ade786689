"""What the functions of the delta rule share: checks, gates, and the call.

Sequences that become rows of a batch are padded with zeros: padding writes nothing (beta = 0) and
forgets nothing (g = 0).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ato_jax import shapes
from ato_torch import _checks, _modes, _ops, _packed

Results = tuple[torch.Tensor, torch.Tensor | None]


def refuse(function: str, **given: Any) -> None:
    """Refuses arguments that would change the result and are not supported."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} is not supported by ato_torch.{function}")


class Inputs(NamedTuple):
    """q, k [B, T, G, D] and v [B, T, H, V] of one dtype, and the sizes of their axes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sizes: dict[str, int]


class States(NamedTuple):
    initial: torch.Tensor | None  # [N, H, D, V], or with `v_first` [N, H, V, D]
    wanted: bool
    v_first: bool


def inputs_of(q: Any, k: Any, v: Any, heads: str = "G") -> Inputs:
    """The inputs, checked; `heads` is the letter of the heads of q and k."""
    q, k, v = _checks.autocast(q, k, v)
    sizes: dict[str, int] = {}
    axes = f"BT{heads}D"
    for name, tensor, letters in (("q", q, axes), ("k", k, axes), ("v", v, "BTHV")):
        _checks.check(name, tensor, like=q if isinstance(q, torch.Tensor) else None, whose="q")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        shapes.bind(sizes, name, tuple(tensor.shape), letters)
    _checks.check_device("q", q)
    if heads == "G" and (not sizes["G"] or sizes["H"] % sizes["G"]):
        raise ValueError(
            "v's heads H must be a multiple of the heads G of q and k, "
            f"got H={sizes['H']}, G={sizes['G']}"
        )
    return Inputs(q, k, v, sizes)


def _named(inputs: Inputs, name: str, tensor: Any, letters: str) -> torch.Tensor:
    """A tensor of axes that are known, in float32."""
    _checks.check(name, tensor, like=inputs.q, whose="q")
    shapes.bind(dict(inputs.sizes), name, tuple(tensor.shape), letters)
    found: torch.Tensor = tensor.float()
    return found


def decay_of(inputs: Inputs, name: str, tensor: Any, letters: str) -> torch.Tensor:
    decay = _named(inputs, name, tensor, letters)
    if decay.device.type == "cpu" and _modes.runs_plainly([tensor]) and decay.numel():
        shapes.refuse_growing_decay(float(decay.detach().max()), name)
    return decay


def gate(
    inputs: Inputs,
    g: Any,
    letters: str,
    use_gate_in_kernel: bool,
    rates: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """The decay in float32: g itself, or the gate of g."""
    given = {"A_log": rates, "dt_bias": dt_bias, "lower_bound": lower_bound}
    if not shapes.flag("use_gate_in_kernel", use_gate_in_kernel):
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} needs use_gate_in_kernel=True")
        return decay_of(inputs, "g", g, letters)
    if rates is None and lower_bound is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True, got None")
    steps = _named(inputs, "g", g, letters)
    of_head = steps.shape[2:]  # [H] or [H, D]
    if dt_bias is not None:
        _checks.check("dt_bias", dt_bias, like=inputs.q, whose="q")
        if dt_bias.numel() != of_head.numel():
            raise ValueError(
                f"dt_bias must be [{' * '.join(letters[2:])}] = [{of_head.numel()}], "
                f"got shape {tuple(dt_bias.shape)}"
            )
        steps = steps + dt_bias.float().reshape(of_head)
    rate = None
    if rates is not None:
        rate = _named(inputs, "A_log", rates, "H").exp().view(-1, *[1] * (len(of_head) - 1))
    if lower_bound is None:
        assert rate is not None
        return -rate * torch.nn.functional.softplus(steps)
    lower_bound = _checks.required("lower_bound", lower_bound)
    if not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound must be from -5 to below 0, got {lower_bound}")
    return lower_bound * torch.sigmoid(steps if rate is None else rate * steps)


def written(
    inputs: Inputs, beta: Any, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool
) -> torch.Tensor:
    """beta in float32."""
    beta = _named(inputs, "beta", beta, "BTH")
    if not shapes.flag("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel):
        if shapes.flag("allow_neg_eigval", allow_neg_eigval):
            raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel=True")
        return beta
    fraction = torch.sigmoid(beta)
    return 2 * fraction if shapes.flag("allow_neg_eigval", allow_neg_eigval) else fraction


def run(
    inputs: Inputs,
    beta: torch.Tensor,
    decay: torch.Tensor | None,
    scale: float | None,
    l2norm: bool,
    states: States,
    sequences: _packed.Sequences,
) -> Results:
    """The results of all three functions."""
    if torch.compiler.is_compiling():
        (scale,) = _ops.static((scale,))
    options = {
        "scale": _checks.number("scale", scale),
        "l2norm": shapes.flag("use_qk_l2norm_in_kernel", l2norm),
    }
    wanted = shapes.flag("output_final_state", states.wanted)
    v_first = shapes.flag("state_v_first", states.v_first)
    ends, T = _packed.ends_of(sequences, inputs.q), inputs.sizes["T"]
    count = inputs.sizes["B"] if ends is None else len(ends) - 1  # N
    state = states.initial
    if state is not None:
        _checks.check("initial_state", state, like=inputs.q, whose="q")
        sizes = inputs.sizes | {"N": count}
        shapes.bind(sizes, "initial_state", tuple(state.shape), "NHVD" if v_first else "NHDV")
        state = (state.transpose(-1, -2) if v_first else state).float()
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "beta": beta}
    if decay is not None:
        tensors["decay"] = decay
    if ends is None or count == 1:
        o, state = _rows(tensors, state, wanted, options)
    elif state is None and not wanted:
        tensors["segment_ids"] = _packed.segment_ids(ends, T)
        o, state = _rows(tensors, state, wanted, options)
    else:
        rows = _packed.Rows(ends, _packed.longest_of(sequences, ends), T)
        padded = {name: rows.padded(tensor) for name, tensor in tensors.items()}
        o, state = _rows(padded, state, wanted, options)
        o = rows.packed(o)
    return o, state.transpose(-1, -2) if v_first and state is not None else state


def _rows(
    tensors: dict[str, torch.Tensor],
    state: torch.Tensor | None,
    wanted: bool,
    options: dict[str, Any],
) -> Results:
    """o and the last state, where it is wanted, of rows [B, T] that each have one state."""
    if tensors["q"].shape[1] == 1:
        token = {name: x[:, 0] for name, x in tensors.items() if name != "segment_ids"}
        if state is None:
            B, H, V = token["v"].shape
            state = token["beta"].new_zeros(B, H, token["q"].shape[-1], V)
        o, state = _ops.run("gated_delta_rule_step", token | {"state": state}, options)
        return o[:, None], state if wanted else None
    if state is not None:
        tensors = tensors | {"initial_state": state}
    options = options | {"return_state": wanted, "layout": "bthd"}
    o, *rest = _ops.run("gated_delta_rule", tensors, options)
    return o, rest[0] if wanted else None
