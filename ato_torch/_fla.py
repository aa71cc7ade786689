"""What the functions of linear attention by flash-linear-attention's names share.

    S_t = Diag(exp(decay_t)) S_{t-1} + k_t v_t^T
    o_t = scale * q_t S_t
    o_t = scale * q_t S_t / (scale * q_t . z_t + 1e-10),  z_t = z_{t-1} + k_t       normalize

The numerators are `linear_attention` with the identity as its feature map, causal and without a
normaliser. That function's own normaliser is not this one: it takes `eps` for every sum below it,
also for negative ones, which features of either sign give. So PyTorch computes z_t and divides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ato_jax import shapes
from ato_torch import _checks, _delta_rule, _ops, _packed, linear
from ato_torch._checks import Integers
from ato_torch._delta_rule import Inputs

# S [N, H, D, V], or the pair (S, z [N, 1, H, D]) of a normalised call.
State = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
NormalizedResults = tuple[torch.Tensor, State | None]

WEIGHTS = "no kernel stores the weights: form them in PyTorch, from q, k and the decay"
BY_VALUE = (
    "a decay per head goes into g of fused_recurrent_simple_gla, one per channel of the keys into "
    "gk; the channels of the values have one decay"
)
LEAST = 1e-10  # is added to the sum of the weights
CHUNK = 64  # steps whose keys are summed up one by one


class Call(NamedTuple):
    """The arguments that all functions have, or that are as here where they have none."""

    scale: float | None
    initial_state: Any
    output_final_state: bool
    cu_seqlens: Integers | None
    cu_seqlens_cpu: Integers | None = None
    reverse: bool = False
    state_v_first: bool = False
    normalize: bool = False


def inputs_of(q: Any, k: Any, v: Any) -> Inputs:
    """q, k [B, T, H, D] and v [B, T, H, V], checked."""
    return _delta_rule.inputs_of(q, k, v, heads="H")


def refuse(function: str, name: str, value: Any, instead: str) -> None:
    """Refuses an argument that would change the result and is not supported."""
    if value is not None and value is not False:
        raise NotImplementedError(f"{name} is not supported by ato_torch.{function}; {instead}")


def decay_of(inputs: Inputs, **given: tuple[Any, str]) -> torch.Tensor | None:
    """The sum of decays, each given as (a tensor or None, its axes), in float32."""
    found = None
    for name, (tensor, letters) in given.items():
        if tensor is not None:
            decay = _delta_rule.decay_of(inputs, name, tensor, letters)
            found = decay if found is None else found + decay
    return found


def retention(inputs: Inputs) -> torch.Tensor:
    """RetNet's decays, log(1 - 2^(-5 - h)), [H] in float32."""
    heads = torch.arange(inputs.sizes["H"], device=inputs.q.device, dtype=torch.float32)
    return torch.log1p(-torch.exp2(-5 - heads))


def run(inputs: Inputs, decay: torch.Tensor | None, call: Call) -> Any:
    """The results of all functions: o and the last state, a pair where the call is normalised.

    Args:
      inputs: As `inputs_of` returns them.
      decay: None, [H], [B, T, H] or [B, T, H, D], in float32.
      call: The other arguments, as users gave them.
    """
    scale = _ops.static((call.scale,))[0] if torch.compiler.is_compiling() else call.scale
    scale = _checks.number("scale", scale)
    if scale is None:
        scale = max(inputs.sizes["D"], 1) ** -0.5
    wanted = shapes.flag("output_final_state", call.output_final_state)
    normalize = shapes.flag("normalize", call.normalize)
    sequences = _packed.Sequences(call.cu_seqlens, call.cu_seqlens_cpu)
    ends, T = _packed.ends_of(sequences, inputs.q), inputs.sizes["T"]
    count = inputs.sizes["B"] if ends is None else len(ends) - 1  # N
    kv, z = _parts(inputs, call, count)
    if count == 1:  # one sequence is a row as it is
        ends = None
    tensors = {"query": inputs.q, "key": inputs.k, "value": inputs.v}
    if decay is not None:
        tensors["decay"] = decay
    reverse = shapes.flag("reverse", call.reverse)
    if reverse:
        tensors = {name: x if x.ndim == 1 else x.flip(1) for name, x in tensors.items()}
        if ends is not None:  # the last sequence comes first
            ends, kv, z = T - ends.flip(0), _exchanged(kv), _exchanged(z)
    if ends is None:
        o, kv, z = _rows(tensors, scale, normalize, kv, z, wanted)
    elif kv is None and not wanted and not normalize:
        o, kv, z = _rows(tensors, scale, False, None, None, False, _packed.segment_ids(ends, T))
    else:
        rows = _packed.Rows(ends, _packed.longest_of(sequences, ends), T)
        if decay is not None and decay.ndim == 1:  # padding must forget nothing
            tensors["decay"] = decay.expand(1, T, -1)
        tensors = {name: rows.padded(tensor) for name, tensor in tensors.items()}
        o, kv, z = _rows(tensors, scale, normalize, kv, z, wanted)
        o = rows.packed(o)
    if reverse:
        o = o.flip(1)
        if ends is not None:
            kv, z = _exchanged(kv), _exchanged(z)
    if not wanted:
        return o, None
    assert kv is not None
    kv = kv.transpose(-1, -2) if call.state_v_first else kv
    return o, (kv, z) if normalize else kv


def _parts(
    inputs: Inputs, call: Call, count: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """S [N, H, D, V] and z [N, 1, H, D] before the first step, in float32, where they are given."""
    given, v_first = call.initial_state, shapes.flag("state_v_first", call.state_v_first)
    if given is None:
        return None, None
    named = {"initial_state": (given, "NHVD" if v_first else "NHDV")}
    if call.normalize:
        if not isinstance(given, tuple) or len(given) != 2:
            raise ValueError(
                "initial_state must be a pair (S [N, H, D, V], z [N, 1, H, D]) with "
                f"normalize=True, got {type(given).__name__}; z is the sum of the earlier keys"
            )
        named = {
            "initial_state[0]": (given[0], "NHDV"),
            "initial_state[1]": (given[1], "N1HD"),
        }
    parts: list[torch.Tensor] = []
    for name, (tensor, letters) in named.items():
        if tensor is None:
            raise ValueError(f"{name} must be a torch.Tensor, got NoneType")
        _checks.check(name, tensor, like=inputs.q, whose="q")
        shapes.bind(inputs.sizes | {"N": count, "1": 1}, name, tuple(tensor.shape), letters)
        parts.append(tensor.float())
    kv = parts[0].transpose(-1, -2) if v_first else parts[0]
    return kv, parts[1] if call.normalize else None


def _exchanged(states: torch.Tensor | None) -> torch.Tensor | None:
    """The states of N sequences in the opposite order."""
    return None if states is None else states.flip(0)


def _rows(
    tensors: dict[str, torch.Tensor],
    scale: float,
    normalize: bool,
    kv: torch.Tensor | None,
    z: torch.Tensor | None,
    wanted: bool,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """o and the last S and z, where they are wanted, of rows [B, T] that each have one state."""
    q, k, v = (tensors[name] for name in ("query", "key", "value"))
    call: dict[str, Any] = {"feature_map": "identity", "normalize": False, "scale": scale}
    single = q.shape[1] == 1
    if single and kv is None:
        kv = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1], dtype=torch.float32)
    if kv is not None:  # the sum of the keys is read by normalisers alone
        call["state" if single else "initial_state"] = kv, torch.zeros_like(kv[..., 0])
    found: Any
    if single:
        call |= {name: x if x.ndim == 1 else x[:, 0] for name, x in tensors.items()}
        found = linear.linear_attention_step(**call)
        o, kv = found[0][:, None], found[1].kv
    else:
        call |= {"causal": True, "segment_ids": segment_ids, "layout": "bthd"} | tensors
        found = linear.linear_attention(**call | {"return_state": wanted})
        o, kv = (found[0], found[1].kv) if wanted else (found, None)
    if normalize:
        sums = _running_sums(k, z)
        weights = scale * (q * sums).sum(-1, keepdim=True) + LEAST  # [B, T, H, 1]
        o = (o / weights).to(o.dtype)
        # A copy, which does not keep the sums of all steps in memory.
        if q.shape[1]:
            z = sums[:, -1:].clone()
        elif z is None:
            z = sums.new_zeros(q.shape[0], 1, *q.shape[2:])
    return o, kv, z if wanted else None


def _running_sums(k: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
    """z_t [B, T, H, D] in float32, from z [B, 1, H, D] before the first step.

    Two short sums in place of one over T: columns are too few to fill a GPU with one thread each,
    and the error grows with the length of a sum.
    """
    T = k.shape[1]
    if T > CHUNK:
        padded = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, -T % CHUNK))
        sums = padded.unflatten(1, (-1, CHUNK)).cumsum(2, dtype=torch.float32)  # [B, n, C, H, D]
        before = torch.nn.functional.pad(sums[:, :-1, -1].cumsum(1), (0, 0, 0, 0, 1, 0))
        sums = (sums + before[:, :, None]).flatten(1, 2)[:, :T]
    else:
        sums = k.cumsum(1, dtype=torch.float32)
    return sums if z is None else sums + z
