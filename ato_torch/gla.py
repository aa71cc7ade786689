"""Gated linear attention by flash-linear-attention's names, with its arguments and results.

    chunk_simple_gla    fused_chunk_simple_gla    fused_recurrent_simple_gla    parallel_simple_gla
    chunk_gla                                     fused_recurrent_gla

All are `ato_torch.linear_attention` with the identity as its feature map, and for a single token
`ato_torch.linear_attention_step`. Where flash-linear-attention writes K, the axis is D here.
"""

from __future__ import annotations

import torch

from ato_torch import _delta_rule, _fla
from ato_torch._checks import Integers
from ato_torch._delta_rule import Results
from ato_torch._fla import Call


def chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integers | None = None,
    cu_seqlens_cpu: Integers | None = None,
    *,
    chunk_size: int | None = None,
) -> Results:
    """Computes simple GLA, a gate per head, like the function of flash-linear-attention.

        S_t = exp(g_t + g_gamma) S_{t-1} + k_t v_t^T
        o_t = scale * q_t S_t

    This is `ato_torch.linear_attention` with a decay per step or per head, on tensors that may be
    on the CPU or on a CUDA device. The results are on the same device, and differentiable once.

    Args:
      q: Queries [B, T, H, D], float16, bfloat16 or float32.
      k: Keys [B, T, H, D] in q's dtype.
      v: Values [B, T, H, V] in q's dtype.
      g: Natural logarithm of each step's factor, [B, T, H], <= 0; None for none.
      g_gamma: The same by head, [H]; None for none. The factors of g and g_gamma are multiplied.
      scale: Factor of the result; D ** -0.5 unless given.
      initial_state: S before the first step, [N, H, D, V], for each of N sequences; N is B without
        `cu_seqlens`. None for zeros.
      output_final_state: Return S after the last step, too.
      state_v_first: States are [N, H, V, D].
      cu_seqlens: The ends of N packed sequences, integers [0, ..., T]; B is then 1. With a state in
        or out, their values are read on the host, and the sequences padded to one length.
      cu_seqlens_cpu: The same in the host's memory, so that the host does not wait for the GPU.
      chunk_size: Without effect: each backend has chunks of its own.

    Returns:
      The pair (o [B, T, H, V] in q's dtype, state [N, H, D, V] in float32). The state is None
      without `output_final_state`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: A derivative of second order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> q = k = v = torch.rand(2, 16, 4, 8)  # [B, T, H, D]
      >>> g = -torch.rand(2, 16, 4)
      >>> o, state = ato_torch.chunk_simple_gla(q, k, v, g, output_final_state=True)
      >>> o.shape, state.shape
      (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 8, 8]))
    """
    inputs = _fla.inputs_of(q, k, v)
    decay = _fla.decay_of(inputs, g=(g, "BTH"), g_gamma=(g_gamma, "H"))
    call = Call(
        *(scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu),
        state_v_first=state_v_first,
    )
    return _fla.run(inputs, decay, call)


def fused_chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Integers | None = None,
) -> Results:
    """Computes `chunk_simple_gla`, by the other name that it has there.

    Args:
      q: As in `chunk_simple_gla`.
      k: As in `chunk_simple_gla`.
      v: As in `chunk_simple_gla`.
      g: As in `chunk_simple_gla`.
      g_gamma: As in `chunk_simple_gla`.
      scale: As in `chunk_simple_gla`.
      initial_state: As in `chunk_simple_gla`.
      output_final_state: As in `chunk_simple_gla`.
      cu_seqlens: As in `chunk_simple_gla`.

    Returns:
      As `chunk_simple_gla`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: A derivative of second order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> q = k = v = torch.rand(2, 16, 4, 8)  # [B, T, H, D]
      >>> g = -torch.rand(2, 16, 4)
      >>> o, state = ato_torch.fused_chunk_simple_gla(q, k, v, g)
      >>> o.shape, state
      (torch.Size([2, 16, 4, 8]), None)
    """
    inputs = _fla.inputs_of(q, k, v)
    decay = _fla.decay_of(inputs, g=(g, "BTH"), g_gamma=(g_gamma, "H"))
    return _fla.run(
        inputs, decay, Call(scale, initial_state, output_final_state, cu_seqlens)
    )


def fused_recurrent_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integers | None = None,
) -> Results:
    """Computes simple GLA for a few tokens, like the function of flash-linear-attention.

    The results are those of `chunk_simple_gla`. A call of one token is one step of the recurrence.

    Args:
      q: As in `chunk_simple_gla`.
      k: As in `chunk_simple_gla`.
      v: As in `chunk_simple_gla`.
      g: As in `chunk_simple_gla`.
      g_gamma: As in `chunk_simple_gla`.
      scale: As in `chunk_simple_gla`.
      initial_state: As in `chunk_simple_gla`.
      output_final_state: As in `chunk_simple_gla`.
      reverse: Go from the last step to the first: S is a sum over the later steps.
      state_v_first: As in `chunk_simple_gla`.
      cu_seqlens: As in `chunk_simple_gla`.

    Returns:
      As `chunk_simple_gla`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: A derivative of second order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> state = torch.zeros(2, 4, 8, 8)  # [B, H, D, V]
      >>> for _ in range(3):  # one token at a time
      ...     q = k = v = torch.rand(2, 1, 4, 8)  # [B, T, H, D]
      ...     g = -torch.rand(2, 1, 4)
      ...     o, state = ato_torch.fused_recurrent_simple_gla(
      ...         q, k, v, g, initial_state=state, output_final_state=True
      ...     )
      >>> o.shape
      torch.Size([2, 1, 4, 8])
    """
    inputs = _fla.inputs_of(q, k, v)
    decay = _fla.decay_of(inputs, g=(g, "BTH"), g_gamma=(g_gamma, "H"))
    call = Call(
        *(scale, initial_state, output_final_state, cu_seqlens),
        reverse=reverse,
        state_v_first=state_v_first,
    )
    return _fla.run(inputs, decay, call)


def parallel_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Integers | None = None,
    cu_seqlens_cpu: Integers | None = None,
) -> Results:
    """Computes simple GLA without states, like the function of flash-linear-attention.

    The results are those of `chunk_simple_gla`, which takes states, too.

    Args:
      q: As in `chunk_simple_gla`.
      k: As in `chunk_simple_gla`.
      v: As in `chunk_simple_gla`.
      g: As in `chunk_simple_gla`.
      scale: As in `chunk_simple_gla`.
      output_attentions: Not supported: no kernel stores the weights [B, H, T, T].
      cu_seqlens: As in `chunk_simple_gla`.
      cu_seqlens_cpu: As in `chunk_simple_gla`.

    Returns:
      The pair (o [B, T, H, V] in q's dtype, None).

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: `output_attentions` is given, or a derivative of second order or of
        forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> q = k = v = torch.rand(2, 16, 4, 8)  # [B, T, H, D]
      >>> g = -torch.rand(2, 16, 4)
      >>> o, weights = ato_torch.parallel_simple_gla(q, k, v, g)
      >>> o.shape, weights
      (torch.Size([2, 16, 4, 8]), None)
    """
    _fla.refuse("parallel_simple_gla", "output_attentions", output_attentions, _fla.WEIGHTS)
    inputs = _fla.inputs_of(q, k, v)
    decay = _fla.decay_of(inputs, g=(g, "BTH"))
    return _fla.run(inputs, decay, Call(scale, None, False, cu_seqlens, cu_seqlens_cpu))


def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integers | None = None,
    cu_seqlens_cpu: Integers | None = None,
) -> Results:
    """Computes gated linear attention, like the function of flash-linear-attention.

        S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T
        o_t = scale * q_t S_t

    This is `ato_torch.linear_attention` with a decay per step and channel of the keys.

    Args:
      q: As in `chunk_simple_gla`.
      k: As in `chunk_simple_gla`.
      v: As in `chunk_simple_gla`.
      g: Natural logarithm of each step's factors, [B, T, H, D], <= 0.
      scale: As in `chunk_simple_gla`.
      initial_state: As in `chunk_simple_gla`.
      output_final_state: As in `chunk_simple_gla`.
      state_v_first: As in `chunk_simple_gla`.
      cu_seqlens: As in `chunk_simple_gla`.
      cu_seqlens_cpu: As in `chunk_simple_gla`.

    Returns:
      As `chunk_simple_gla`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: A derivative of second order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> q = k = v = torch.rand(2, 16, 4, 8)  # [B, T, H, D]
      >>> g = -torch.rand(2, 16, 4, 8)
      >>> o, state = ato_torch.chunk_gla(q, k, v, g, output_final_state=True)
      >>> o.shape, state.shape
      (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 8, 8]))
    """
    inputs = _fla.inputs_of(q, k, v)
    decay = _delta_rule.decay_of(inputs, "g", g, "BTHD")
    call = Call(
        *(scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu),
        state_v_first=state_v_first,
    )
    return _fla.run(inputs, decay, call)


def fused_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integers | None = None,
) -> Results:
    """Computes GLA for a few tokens, like the function of flash-linear-attention.

    The results are those of `chunk_gla`. A call of one token is one step of the recurrence.

    Args:
      q: As in `chunk_simple_gla`.
      k: As in `chunk_simple_gla`.
      v: As in `chunk_simple_gla`.
      gk: As g in `chunk_gla`; None for no decay.
      gv: Not supported: a decay per channel of the values.
      scale: As in `chunk_simple_gla`.
      initial_state: As in `chunk_simple_gla`.
      output_final_state: As in `chunk_simple_gla`.
      reverse: Go from the last step to the first: S is a sum over the later steps.
      state_v_first: As in `chunk_simple_gla`.
      cu_seqlens: As in `chunk_simple_gla`.

    Returns:
      As `chunk_simple_gla`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: `gv` is given, or a derivative of second order or of forward mode is
        asked for.

    Example:
      >>> import torch, ato_torch
      >>> state = torch.zeros(2, 4, 8, 8)  # [B, H, D, V]
      >>> for _ in range(3):  # one token at a time
      ...     q = k = v = torch.rand(2, 1, 4, 8)  # [B, T, H, D]
      ...     g = -torch.rand(2, 1, 4, 8)
      ...     o, state = ato_torch.fused_recurrent_gla(
      ...         q, k, v, g, initial_state=state, output_final_state=True
      ...     )
      >>> o.shape
      torch.Size([2, 1, 4, 8])
    """
    _fla.refuse("fused_recurrent_gla", "gv", gv, _fla.BY_VALUE)
    inputs = _fla.inputs_of(q, k, v)
    decay = _fla.decay_of(inputs, gk=(gk, "BTHD"))
    call = Call(
        *(scale, initial_state, output_final_state, cu_seqlens),
        reverse=reverse,
        state_v_first=state_v_first,
    )
    return _fla.run(inputs, decay, call)
