"""Layers on the delta rule, which differ by their gates: gated DeltaNet and Kimi Delta Attention.

Beside the parameters that they share (`delta_net.py`), those of f and g are

    GatedDeltaNet           forget_gate kernel [in_features, H]
                            output_gate kernel [in_features, H, V]
    KimiDeltaAttention      forget_gate_down [in_features, gate_rank], _up [gate_rank, H, D]
                            output_gate_down [in_features, gate_rank], _up [gate_rank, H, V], bias
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from ato_jax import shapes
from ato_jax.nn.delta_net import DeltaNet


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet (Yang et al., 2024): the delta rule with one decay for each head and step.

        decay_t = -exp(A_log) softplus(forget_gate(x_t) + dt_bias)                     [H]
        z_t     = out(rms_norm(o_t) * silu(output_gate(x_t)))

    Queries, keys and values each pass a causal convolution and a silu; queries and keys are then
    divided by their lengths, and beta_t = sigmoid(write(x_t)). The layer is causal, so it takes no
    `causal`. As in Qwen3-Next, value heads may share the keys of a group. The state has one size
    for every length of a sequence.

    Args:
      num_heads: H, the number of value heads.
      in_features: Size of the inputs.
      out_features: Size of the outputs; in_features unless given.
      num_key_heads: G, the number of query and key heads, which divides H; H unless given.
      key_size: D; in_features / H unless given.
      value_size: V; D unless given.
      conv_size: How many tokens a convolution reads, the current one included; 1 reads no other.
      negative_eigenvalues: Let beta go up to 2 in place of 1, so that a step can also change the
        sign of what the state returns for its key.
      norm_epsilon: Epsilon of the norm.
      dtype: Of the arithmetic; None promotes the inputs' and the parameters'.
      param_dtype: Of the parameters.
      precision: Of the products, as in nnx.Linear.
      kernel_init: Initialiser of the projections.
      conv_kernel_init: Initialiser of the convolutions.
      a_log_init: Initialiser of `A_log`.
      dt_bias_init: Initialiser of `dt_bias`.
      norm_scale_init: Initialiser of the scale of `norm`.
      decode: Whether calls continue the cache; None is False.
      context_axis: The axis of the `jax.shard_map` around the call that cuts T, as in
        `ato_jax.parallel`. None for whole sequences. Masks and `decode` are refused with it.
      implementation: A backend of `ato_jax.gated_delta_rule` by name; None takes the fastest.
      rngs: Random keys: the stream `params` for the parameters.

    Raises:
      ValueError: An argument has a wrong type or value. The message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> layer = ato_jax.nn.GatedDeltaNet(
      ...     num_heads=4, in_features=16, num_key_heads=2, rngs=nnx.Rngs(0)
      ... )
      >>> layer(jnp.ones((2, 8, 16))).shape  # [B, T, in_features] -> [B, T, out_features]
      (2, 8, 16)
    """

    def _add_gates(self, rngs: nnx.Rngs) -> None:
        self.forget_gate = self._projection(self.in_features, self.num_heads, rngs)
        self.output_gate = self._projection(
            self.in_features, (self.num_heads, self.value_size), rngs
        )

    def _gate_shape(self) -> tuple[int, ...]:
        return (self.num_heads,)

    def _forget(self, inputs: jax.Array) -> jax.Array:
        return self.forget_gate(inputs)

    def _gated(self, out: jax.Array, inputs: jax.Array) -> jax.Array:
        return out * jax.nn.silu(self.output_gate(inputs))


class KimiDeltaAttention(DeltaNet):
    """Kimi Delta Attention (Moonshot AI, 2025): the delta rule with a decay for each channel.

        decay_t = -exp(A_log) softplus(forget_gate_up(forget_gate_down(x_t)) + dt_bias)   [H, D]
        z_t     = out(rms_norm(o_t) * sigmoid(output_gate_up(output_gate_down(x_t))))

    Both gates have the rank `gate_rank`. The state has one size for every length of a sequence.

    Args:
      num_heads: H, the number of heads.
      in_features: Size of the inputs.
      out_features: Size of the outputs; in_features unless given.
      gate_rank: Rank of both gates; V unless given.
      rngs: Random keys: the stream `params` for the parameters.
      **options: As in `GatedDeltaNet`.

    Raises:
      ValueError: An argument has a wrong type or value. The message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> layer = ato_jax.nn.KimiDeltaAttention(num_heads=4, in_features=16, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8, 16))).shape  # [B, T, in_features] -> [B, T, out_features]
      (2, 8, 16)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        out_features: int | None = None,
        *,
        gate_rank: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if gate_rank is not None:
            gate_rank = shapes.positive_int("gate_rank", gate_rank)
        self.gate_rank = gate_rank
        super().__init__(num_heads, in_features, out_features, rngs=rngs, **options)

    def _add_gates(self, rngs: nnx.Rngs) -> None:
        features, H = self.in_features, self.num_heads
        rank = self.value_size if self.gate_rank is None else self.gate_rank
        self.forget_gate_down = self._projection(features, rank, rngs)
        self.forget_gate_up = self._projection(rank, (H, self.key_size), rngs)
        self.output_gate_down = self._projection(features, rank, rngs)
        self.output_gate_up = self._projection(rank, (H, self.value_size), rngs, use_bias=True)

    def _gate_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.key_size)

    def _forget(self, inputs: jax.Array) -> jax.Array:
        return self.forget_gate_up(self.forget_gate_down(inputs))

    def _gated(self, out: jax.Array, inputs: jax.Array) -> jax.Array:
        gate: jax.Array = self.output_gate_up(self.output_gate_down(inputs))
        return out * jax.nn.sigmoid(gate)
