"""Linear attention and retention by flash-linear-attention's names, with its arguments and results.

    chunk_linear_attn    fused_chunk_linear_attn    fused_recurrent_linear_attn
    chunk_retention      fused_chunk_retention      fused_recurrent_retention    parallel_retention

All are `ato_torch.linear_attention` with the identity as its feature map, and for a single token
`ato_torch.linear_attention_step`. Where flash-linear-attention writes K, the axis is D here.
"""

from __future__ import annotations

import torch

from ato_torch import _fla
from ato_torch._checks import Integers
from ato_torch._delta_rule import Results
from ato_torch._fla import Call, NormalizedResults, State


def chunk_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Integers | None = None,
) -> NormalizedResults:
    """Computes causal linear attention, like the function of flash-linear-attention.

        S_t = S_{t-1} + k_t v_t^T        z_t = z_{t-1} + k_t
        o_t = scale * q_t S_t / (scale * q_t . z_t + 1e-10)        normalize=True
        o_t = scale * q_t S_t                                      normalize=False

    No feature map is applied: q and k are features already. This is `ato_torch.linear_attention`
    with the identity as its feature map, on tensors that may be on the CPU or on a CUDA device.
    The results are on the same device, and differentiable once. For features that are known to be
    0 or more, that function has a normaliser in its kernels, which is faster.

    Args:
      q: Queries [B, T, H, D], float16, bfloat16 or float32.
      k: Keys [B, T, H, D] in q's dtype.
      v: Values [B, T, H, V] in q's dtype.
      scale: Factor of the result; D ** -0.5 unless given.
      initial_state: The pair (S, z) before the first step: S [N, H, D, V] and the sum of the
        earlier keys [N, 1, H, D], for each of N sequences; N is B without `cu_seqlens`. Without
        `normalize` S alone. None for zeros.
      output_final_state: Return them after the last step, too.
      normalize: Divide by the sum of the weights.
      cu_seqlens: The ends of N packed sequences, integers [0, ..., T]; B is then 1. With a state in
        or out or with `normalize`, their values are read on the host, and the sequences padded to
        one length.

    Returns:
      The pair (o [B, T, H, V] in q's dtype, state), and the state is (S, z) in float32, without
      `normalize` S alone, and None without `output_final_state`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: A derivative of second order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> q = k = v = torch.rand(2, 16, 4, 8)  # [B, T, H, D]
      >>> o, (S, z) = ato_torch.chunk_linear_attn(q, k, v, output_final_state=True)
      >>> o.shape, S.shape, z.shape
      (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 8, 8]), torch.Size([2, 1, 4, 8]))
    """
    inputs = _fla.inputs_of(q, k, v)
    call = Call(scale, initial_state, output_final_state, cu_seqlens, normalize=normalize)
    return _fla.run(inputs, None, call)


def fused_chunk_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Integers | None = None,
) -> NormalizedResults:
    """Computes `chunk_linear_attn`, by the other name that it has there.

    Args:
      q: As in `chunk_linear_attn`.
      k: As in `chunk_linear_attn`.
      v: As in `chunk_linear_attn`.
      scale: As in `chunk_linear_attn`.
      initial_state: As in `chunk_linear_attn`.
      output_final_state: As in `chunk_linear_attn`.
      normalize: As in `chunk_linear_attn`.
      cu_seqlens: As in `chunk_linear_attn`.

    Returns:
      As `chunk_linear_attn`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: A derivative of second order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> q = k = v = torch.rand(2, 16, 4, 8)  # [B, T, H, D]
      >>> o, state = ato_torch.fused_chunk_linear_attn(q, k, v)
      >>> o.shape, state
      (torch.Size([2, 16, 4, 8]), None)
    """
    return chunk_linear_attn(
        q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens
    )


def fused_recurrent_linear_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Integers | None = None,
) -> NormalizedResults:
    """Computes linear attention for a few tokens, like the function of flash-linear-attention.

    The results are those of `chunk_linear_attn`; the default is another one, normalize=False. A
    call of one token is one step of the recurrence.

    Args:
      q: As in `chunk_linear_attn`.
      k: As in `chunk_linear_attn`.
      v: As in `chunk_linear_attn`.
      scale: As in `chunk_linear_attn`.
      initial_state: As in `chunk_linear_attn`.
      output_final_state: As in `chunk_linear_attn`.
      reverse: Go from the last step to the first: S and z are sums over the later steps.
      normalize: As in `chunk_linear_attn`.
      cu_seqlens: As in `chunk_linear_attn`.

    Returns:
      As `chunk_linear_attn`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: A derivative of second order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> state = None
      >>> for _ in range(3):  # one token at a time
      ...     q = k = v = torch.rand(2, 1, 4, 8)  # [B, T, H, D]
      ...     o, state = ato_torch.fused_recurrent_linear_attn(
      ...         q, k, v, initial_state=state, output_final_state=True
      ...     )
      >>> o.shape, state.shape
      (torch.Size([2, 1, 4, 8]), torch.Size([2, 4, 8, 8]))
    """
    inputs = _fla.inputs_of(q, k, v)
    call = Call(
        scale, initial_state, output_final_state, cu_seqlens, reverse=reverse, normalize=normalize
    )
    return _fla.run(inputs, None, call)


def chunk_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Integers | None = None,
    *,
    chunk_size: int | None = None,
) -> Results:
    """Computes RetNet's retention, like the function of flash-linear-attention.

        S_t = (1 - 2^(-5 - h)) S_{t-1} + k_t v_t^T        for head h
        o_t = scale * q_t S_t

    This is `ato_torch.linear_attention` with a decay per head.

    Args:
      q: Queries [B, T, H, D], float16, bfloat16 or float32.
      k: Keys [B, T, H, D] in q's dtype.
      v: Values [B, T, H, V] in q's dtype.
      scale: Factor of the result; D ** -0.5 unless given.
      initial_state: S before the first step, [N, H, D, V], for each of N sequences; N is B without
        `cu_seqlens`. None for zeros.
      output_final_state: Return S after the last step, too.
      cu_seqlens: The ends of N packed sequences, integers [0, ..., T]; B is then 1. With a state in
        or out, their values are read on the host, and the sequences padded to one length.
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
      >>> o, state = ato_torch.chunk_retention(q, k, v, output_final_state=True)
      >>> o.shape, state.shape
      (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 8, 8]))
    """
    inputs = _fla.inputs_of(q, k, v)
    call = Call(scale, initial_state, output_final_state, cu_seqlens)
    return _fla.run(inputs, _fla.retention(inputs), call)


def fused_chunk_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Integers | None = None,
) -> Results:
    """Computes `chunk_retention`, by the other name that it has there.

    Args:
      q: As in `chunk_retention`.
      k: As in `chunk_retention`.
      v: As in `chunk_retention`.
      scale: As in `chunk_retention`.
      initial_state: As in `chunk_retention`.
      output_final_state: As in `chunk_retention`.
      cu_seqlens: As in `chunk_retention`.

    Returns:
      As `chunk_retention`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: A derivative of second order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> q = k = v = torch.rand(2, 16, 4, 8)  # [B, T, H, D]
      >>> o, state = ato_torch.fused_chunk_retention(q, k, v)
      >>> o.shape, state
      (torch.Size([2, 16, 4, 8]), None)
    """
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integers | None = None,
) -> Results:
    """Computes retention for a few tokens, like the function of flash-linear-attention.

    The results are those of `chunk_retention`. A call of one token is one step of the recurrence.

    Args:
      q: As in `chunk_retention`.
      k: As in `chunk_retention`.
      v: As in `chunk_retention`.
      scale: As in `chunk_retention`.
      initial_state: As in `chunk_retention`.
      output_final_state: As in `chunk_retention`.
      reverse: Go from the last step to the first: S is a sum over the later steps.
      state_v_first: States are [N, H, V, D].
      cu_seqlens: As in `chunk_retention`.

    Returns:
      As `chunk_retention`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: A derivative of second order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> state = torch.zeros(2, 4, 8, 8)  # [B, H, D, V]
      >>> for _ in range(3):  # one token at a time
      ...     q = k = v = torch.rand(2, 1, 4, 8)  # [B, T, H, D]
      ...     o, state = ato_torch.fused_recurrent_retention(
      ...         q, k, v, initial_state=state, output_final_state=True
      ...     )
      >>> o.shape
      torch.Size([2, 1, 4, 8])
    """
    inputs = _fla.inputs_of(q, k, v)
    call = Call(
        *(scale, initial_state, output_final_state, cu_seqlens),
        reverse=reverse,
        state_v_first=state_v_first,
    )
    return _fla.run(inputs, _fla.retention(inputs), call)


def parallel_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Integers | None = None,
) -> Results:
    """Computes retention without states, like the function of flash-linear-attention.

    The results are those of `chunk_retention`, which takes states, too.

    Args:
      q: As in `chunk_retention`.
      k: As in `chunk_retention`.
      v: As in `chunk_retention`.
      scale: As in `chunk_retention`.
      output_attentions: Not supported: no kernel stores the weights [B, H, T, T].
      cu_seqlens: As in `chunk_retention`.

    Returns:
      The pair (o [B, T, H, V] in q's dtype, None).

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: `output_attentions` is given, or a derivative of second order or of
        forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> q = k = v = torch.rand(2, 16, 4, 8)  # [B, T, H, D]
      >>> o, weights = ato_torch.parallel_retention(q, k, v)
      >>> o.shape, weights
      (torch.Size([2, 16, 4, 8]), None)
    """
    _fla.refuse("parallel_retention", "output_attentions", output_attentions, _fla.WEIGHTS)
    inputs = _fla.inputs_of(q, k, v)
    return _fla.run(inputs, _fla.retention(inputs), Call(scale, None, False, cu_seqlens))
