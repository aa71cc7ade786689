"""The delta rule by flash-linear-attention's names, with its arguments, layouts and results.

    chunk_gated_delta_rule              one decay per step: gated DeltaNet
    fused_recurrent_gated_delta_rule    the same, also without a decay or with one per channel
    chunk_kda                           one decay per step and channel: Kimi Delta Attention

All three are `ato_jax.gated_delta_rule`, and for a single token `ato_jax.gated_delta_rule_step`.
PyTorch computes gates and sigmoids that the originals compute in their kernels.
"""

from __future__ import annotations

import torch

from ato_jax import shapes
from ato_torch import _delta_rule, _packed
from ato_torch._checks import Integers
from ato_torch._delta_rule import Results


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integers | None = None,
    cu_seqlens_cpu: Integers | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,  # noqa: N803 (its name there)
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> Results:
    """Computes gated DeltaNet, like the function of flash-linear-attention.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * q_t S_t

    This is `ato_jax.gated_delta_rule` on tensors, which may be on the CPU or on a CUDA device. The
    results are on the same device, and differentiable once. Where flash-linear-attention writes H,
    HV and K, axes here are G, H and D, as everywhere in this library.

    Args:
      q: Queries [B, T, G, D], float16, bfloat16 or float32.
      k: Keys [B, T, G, D] in q's dtype.
      v: Values [B, T, H, V] in q's dtype. H is a multiple of G: value head h is written and read
        with key and query head h // (H // G).
      g: Natural logarithm of each step's factor, [B, T, H], <= 0; with `use_gate_in_kernel` the
        input of the gate.
      beta: How far each step moves the memory, [B, T, H].
      scale: Factor of the result; D ** -0.5 unless given.
      initial_state: S before the first step, [N, H, D, V], for each of N sequences; N is B without
        `cu_seqlens`. None for zeros.
      output_final_state: Return S after the last step, too.
      use_qk_l2norm_in_kernel: Divide each row x of q and k by sqrt(|x|^2 + 1e-6).
      use_beta_sigmoid_in_kernel: Take sigmoid(beta) for beta.
      allow_neg_eigval: Take 2 sigmoid(beta) for beta; needs `use_beta_sigmoid_in_kernel`.
      state_v_first: States are [N, H, V, D].
      cu_seqlens: The ends of N packed sequences, integers [0, ..., T]; B is then 1. With a state in
        or out, their values are read on the host, and the sequences padded to one length.
      cu_seqlens_cpu: The same in the host's memory, so that the host does not wait for the GPU.
      chunk_indices: Without effect: no argument of the kernels here.
      cp_context: Not supported; `ato_jax.parallel.gated_delta_rule` is for sequences cut across
        devices.
      use_gate_in_kernel: Take -exp(A_log) softplus(g + dt_bias) for g.
      A_log: [H], for the gate.
      dt_bias: [H], for the gate; zeros unless given.
      chunk_size: Without effect: each backend has chunks of its own.

    Returns:
      The pair (o [B, T, H, V] in q's dtype, state [N, H, D, V] in float32). The state is None
      without `output_final_state`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: An argument that is not supported is given, or a derivative of second
        order or of forward mode is asked for.

    Example:
      >>> import torch, ato_torch
      >>> q = k = torch.randn(2, 16, 2, 8)  # [B, T, G, D]
      >>> v = torch.randn(2, 16, 4, 8)  # [B, T, H, V]
      >>> g, beta = -torch.rand(2, 16, 4), torch.rand(2, 16, 4)
      >>> o, state = ato_torch.chunk_gated_delta_rule(
      ...     q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
      ... )
      >>> o.shape, state.shape
      (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 8, 8]))
    """
    _delta_rule.refuse("chunk_gated_delta_rule", cp_context=cp_context)
    inputs = _delta_rule.inputs_of(q, k, v)
    g = _delta_rule.gate(inputs, g, "BTH", use_gate_in_kernel, A_log, dt_bias)
    beta = _delta_rule.written(inputs, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    states = _delta_rule.States(initial_state, output_final_state, state_v_first)
    sequences = _packed.Sequences(cu_seqlens, cu_seqlens_cpu)
    return _delta_rule.run(inputs, beta, g, scale, use_qk_l2norm_in_kernel, states, sequences)


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,  # noqa: N803 (its name there)
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integers | None = None,
) -> Results:
    """Computes the delta rule for a few tokens, like the function of flash-linear-attention.

    The results are those of `chunk_gated_delta_rule`. Unlike the original it has gradients. A call
    of one token is one step of the recurrence.

    Args:
      q: As in `chunk_gated_delta_rule`.
      k: As in `chunk_gated_delta_rule`.
      v: As in `chunk_gated_delta_rule`.
      g: As in `chunk_gated_delta_rule`; None for no decay per step.
      gk: Natural logarithm of each step's factor by channel, [B, T, H, D], <= 0; None for none. The
        factors of g and gk are multiplied.
      gv: Not supported: a decay per channel of the values.
      beta: As in `chunk_gated_delta_rule`; ones unless given. [B, T, H, V] is not supported.
      scale: As in `chunk_gated_delta_rule`.
      initial_state: As in `chunk_gated_delta_rule`.
      output_final_state: As in `chunk_gated_delta_rule`.
      use_qk_l2norm_in_kernel: As in `chunk_gated_delta_rule`.
      use_gate_in_kernel: As in `chunk_gated_delta_rule`.
      A_log: As in `chunk_gated_delta_rule`.
      dt_bias: As in `chunk_gated_delta_rule`.
      use_beta_sigmoid_in_kernel: As in `chunk_gated_delta_rule`.
      allow_neg_eigval: As in `chunk_gated_delta_rule`.
      state_v_first: As in `chunk_gated_delta_rule`.
      cu_seqlens: As in `chunk_gated_delta_rule`.

    Returns:
      As `chunk_gated_delta_rule`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: As in `chunk_gated_delta_rule`.

    Example:
      >>> import torch, ato_torch
      >>> state = torch.zeros(2, 4, 8, 8)  # [B, H, D, V]
      >>> for _ in range(3):  # one token at a time
      ...     q, k, v = torch.randn(3, 2, 1, 4, 8).unbind()  # [B, T, H, D] each
      ...     g, beta = -torch.rand(2, 1, 4), torch.rand(2, 1, 4)
      ...     o, state = ato_torch.fused_recurrent_gated_delta_rule(
      ...         q, k, v, g, beta=beta, initial_state=state, output_final_state=True
      ...     )
      >>> o.shape
      torch.Size([2, 1, 4, 8])
    """
    _delta_rule.refuse("fused_recurrent_gated_delta_rule", gv=gv)
    inputs = _delta_rule.inputs_of(q, k, v)
    decay = None
    if g is not None or use_gate_in_kernel:
        decay = _delta_rule.gate(inputs, g, "BTH", use_gate_in_kernel, A_log, dt_bias)
    if gk is not None:
        of_channels = _delta_rule.decay_of(inputs, "gk", gk, "BTHD")
        decay = of_channels if decay is None else decay[..., None] + of_channels
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    beta = _delta_rule.written(inputs, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    states = _delta_rule.States(initial_state, output_final_state, state_v_first)
    sequences = _packed.Sequences(cu_seqlens, None)
    return _delta_rule.run(inputs, beta, decay, scale, use_qk_l2norm_in_kernel, states, sequences)


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integers | None = None,
    cu_seqlens_cpu: Integers | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,  # noqa: N803 (its name there)
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> Results:
    """Computes Kimi Delta Attention, like the function of flash-linear-attention.

        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * q_t S_t

    This is `ato_jax.gated_delta_rule` on tensors, with a decay for each channel of the keys.

    Args:
      q: As in `chunk_gated_delta_rule`.
      k: As in `chunk_gated_delta_rule`.
      v: As in `chunk_gated_delta_rule`.
      g: Natural logarithm of each step's factors, [B, T, H, D], <= 0; with `use_gate_in_kernel` the
        input of the gate.
      beta: As in `chunk_gated_delta_rule`.
      scale: As in `chunk_gated_delta_rule`.
      initial_state: As in `chunk_gated_delta_rule`.
      output_final_state: As in `chunk_gated_delta_rule`.
      use_qk_l2norm_in_kernel: As in `chunk_gated_delta_rule`.
      use_gate_in_kernel: Take -exp(A_log) softplus(g + dt_bias) for g, or with `lower_bound`
        lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
      use_beta_sigmoid_in_kernel: As in `chunk_gated_delta_rule`.
      allow_neg_eigval: As in `chunk_gated_delta_rule`.
      safe_gate: Says that g is bounded from below; needs `lower_bound` with `use_gate_in_kernel`,
        and has no other effect.
      lower_bound: The least g that the gate gives, from -5 to below 0.
      disable_recompute: Without effect: each backend keeps what it needs.
      return_intermediate_states: Not supported.
      state_v_first: As in `chunk_gated_delta_rule`.
      cu_seqlens: As in `chunk_gated_delta_rule`.
      cu_seqlens_cpu: As in `chunk_gated_delta_rule`.
      cp_context: As in `chunk_gated_delta_rule`.
      use_graph: Not supported.
      max_num_seqs: Not supported; it belongs to `use_graph`.
      A_log: [H], for the gate; with `lower_bound` it may be missing, for zeros.
      dt_bias: [H * D], for the gate; zeros unless given.
      chunk_size: As in `chunk_gated_delta_rule`.

    Returns:
      As `chunk_gated_delta_rule`.

    Raises:
      ValueError: An argument has a wrong shape, dtype, device or value. The message names it.
      NotImplementedError: As in `chunk_gated_delta_rule`.

    Example:
      >>> import torch, ato_torch
      >>> q = k = v = torch.randn(2, 16, 4, 8)  # [B, T, H, D]
      >>> g, beta = -torch.rand(2, 16, 4, 8), torch.rand(2, 16, 4)
      >>> o, state = ato_torch.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
      >>> o.shape, state
      (torch.Size([2, 16, 4, 8]), None)
    """
    _delta_rule.refuse(
        "chunk_kda",
        return_intermediate_states=return_intermediate_states,
        cp_context=cp_context,
        use_graph=use_graph,
        max_num_seqs=max_num_seqs,
    )
    safe_gate = shapes.flag("safe_gate", safe_gate)
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("lower_bound must be given with safe_gate and use_gate_in_kernel")
    inputs = _delta_rule.inputs_of(q, k, v)
    g = _delta_rule.gate(inputs, g, "BTHD", use_gate_in_kernel, A_log, dt_bias, lower_bound)
    beta = _delta_rule.written(inputs, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    states = _delta_rule.States(initial_state, output_final_state, state_v_first)
    sequences = _packed.Sequences(cu_seqlens, cu_seqlens_cpu)
    return _delta_rule.run(inputs, beta, g, scale, use_qk_l2norm_in_kernel, states, sequences)
