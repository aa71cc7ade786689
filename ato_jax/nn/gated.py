"""Gated linear attention: the input determines how fast the state of a head decays.

    S_t = diag(exp(decay_t)) S_{t-1} + phi(k_t) v_t^T        decay_t = log sigmoid(f(y_t)) / tau
    o_t = phi(q_t) . S_t * D**-0.5                           z = out(rms_norm(o) * silu(g(x)))

With `gate="vector"` each channel has its own decay, and f has a low rank (GLA, Yang et al., 2023).
With `gate="scalar"` each head has one decay, as in Mamba-2 and simple GLA, which is faster. The
norm is over the values of one head, with a scale that all heads share. Beside the parameters of
nnx.MultiHeadAttention there are

    forget_gate         kernel [in_kv_features, G], bias [G]      f, gate="scalar"
    forget_gate_down    kernel [in_kv_features, gate_rank]        f, gate="vector"
    forget_gate_up      kernel [gate_rank, G, D], bias [G, D]
    output_gate         kernel [in_features, H, D], bias [H, D]   g
    norm                scale [D]
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Initializer

from ato_jax import programs, shapes
from ato_jax.nn.arguments import refuse_no_initialiser
from ato_jax.nn.call import Call
from ato_jax.nn.linear_attention import LinearAttention
from ato_jax.ops.linear_attention.api import FeatureMapLike


class GatedLinearAttention(LinearAttention):
    """Linear attention with a decay that depends on the input, its output normalised and gated.

        S_t = diag(exp(decay_t)) S_{t-1} + phi(k_t) v_t^T     decay_t = log sigmoid(f(y_t)) / tau
        z_t = out(rms_norm(D**-0.5 phi(q_t) S_t) * silu(g(x_t)))

    gate="vector" is gated linear attention (Yang et al., 2023); gate="scalar" has the decay of
    Mamba-2. A hidden step (a mask of padding) adds nothing and does not decay the state, so prompts
    of different lengths, padded on either side, can share a batch and a cache. Masks and decoding
    are otherwise those of `LinearAttention`. The decay is computed in float32 from logits in the
    layer's dtype.

    Args:
      num_heads: H, the number of query heads.
      in_features: Size of `inputs_q`.
      qkv_features: Size of all query heads together, H D; in_features unless given.
      out_features: Size of the outputs; in_features unless given.
      num_kv_heads: G, the number of key/value heads, which divides H; H unless given.
      in_kv_features: Size of `inputs_k` and `inputs_v`; in_features unless given.
      gate: "vector" for a decay per channel [B, S, G, D], or "scalar" for one per head [B, S, G],
        which is faster. On Hopper "vector" takes about twice the time of "scalar" where D is 64 or
        128 and phi "elu1", and runs on slower Triton kernels with any other phi, "identity"
        included. Beside `segment_ids` it runs by XLA, and "scalar" on kernels.
      gate_rank: Rank of f for gate="vector"; 16 unless given.
      temperature: tau > 0. A larger one gives a longer memory: where f is 0, half of the state is
        left after tau steps.
      feature_map: phi, as in `LinearAttention`.
      normalize: As in `LinearAttention`; with "identity" it is off unless given.
      causal: Query i sees the keys up to i (T = S). False decays by the number of steps between a
        query and a key, in both directions.
      use_output_gate: Multiply by silu(g(x)). The norm is applied in any case.
      norm_epsilon: Epsilon of the norm.
      kernel_init: Initialiser of the kernels of nnx.MultiHeadAttention, `output_gate` and
        `forget_gate_up`.
      bias_init: Initialiser of the biases of nnx.MultiHeadAttention and `output_gate`.
      gate_kernel_init: Initialiser of the kernel of `forget_gate` or `forget_gate_down`.
      gate_bias_init: Initialiser of the bias of `forget_gate` [G] or `forget_gate_up` [G, D], which
        sets the memory before training. This bias exists whatever `use_bias` is.
      norm_scale_init: Initialiser of the scale of `norm`.
      rngs: Random keys: the stream `params` for the parameters.
      **options: As in `LinearAttention`, with `rope_theta`, `context_axis` and `implementation`
        among them.

    Raises:
      ValueError: An argument has a wrong type or value. The message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> layer = ato_jax.nn.GatedLinearAttention(
      ...     num_heads=4, in_features=16, gate="scalar", rngs=nnx.Rngs(0)
      ... )
      >>> layer(jnp.ones((2, 8, 16))).shape  # [B, T, in_features] -> [B, T, out_features]
      (2, 8, 16)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        gate: Literal["vector", "scalar"] = "vector",
        gate_rank: int | None = None,
        temperature: float = 16.0,
        feature_map: FeatureMapLike = "identity",
        normalize: bool | None = None,
        causal: bool = True,
        use_output_gate: bool = True,
        norm_epsilon: float = 1e-5,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        gate_kernel_init: Initializer = default_kernel_init,
        gate_bias_init: Initializer = default_bias_init,
        norm_scale_init: Initializer = nnx.initializers.ones,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        shapes.one_of("gate", gate, ("vector", "scalar"))
        if gate == "scalar" and gate_rank is not None:
            raise ValueError(
                f"gate_rank needs gate='vector': a scalar gate has none, got {gate_rank}"
            )
        gate_rank = shapes.positive_int("gate_rank", 16 if gate_rank is None else gate_rank)
        use_output_gate = shapes.flag("use_output_gate", use_output_gate)
        refuse_no_initialiser(
            gate_kernel_init=gate_kernel_init,
            gate_bias_init=gate_bias_init,
            norm_scale_init=norm_scale_init,
        )
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            feature_map=feature_map,
            normalize=normalize,
            causal=causal,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            **options,
        )
        self.gate = gate
        self.temperature = shapes.positive("temperature", temperature)
        kernel_metadata = options.get("kernel_metadata", {})
        projection = functools.partial(
            nnx.LinearGeneral,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            promote_dtype=self.qkv_promote_dtype,
            rngs=rngs,
        )
        if gate == "scalar":
            self.forget_gate = projection(
                self.in_kv_features,
                self.num_kv_heads,
                kernel_init=gate_kernel_init,
                bias_init=gate_bias_init,
            )
        else:
            self.forget_gate_down = projection(
                self.in_kv_features,
                gate_rank,
                kernel_init=gate_kernel_init,
                use_bias=False,
            )
            self.forget_gate_up = projection(
                gate_rank,
                (self.num_kv_heads, self.head_dim),
                kernel_init=kernel_init,
                kernel_metadata=kernel_metadata,
                bias_init=gate_bias_init,
            )
        self.output_gate: nnx.LinearGeneral | None = nnx.data(None)
        if use_output_gate:
            self.output_gate = projection(
                self.in_features,
                (self.num_heads, self.head_dim),
                kernel_init=kernel_init,
                bias_init=bias_init,
                use_bias=self.use_bias,
                kernel_metadata=kernel_metadata,
                bias_metadata=options.get("bias_metadata", {}),
            )
        self.norm = nnx.RMSNorm(
            self.head_dim,
            epsilon=shapes.positive("norm_epsilon", norm_epsilon),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            scale_init=norm_scale_init,
            promote_dtype=self.ln_promote_dtype,
            rngs=rngs,
        )

    def decay(self, call: Call) -> jax.Array:
        """The natural logarithm of each step's factor, float32 [B, S, G] or [B, S, G, D]."""
        if self.gate == "scalar":
            logits = self.forget_gate(call.inputs_k)
        else:
            logits = self.forget_gate_up(self.forget_gate_down(call.inputs_k))
        return jax.nn.log_sigmoid(logits.astype(jnp.float32)) / self.temperature

    def _finish(self, out: jax.Array, call: Call) -> jax.Array:
        out = programs.promoting_ranks(self.norm)(out)
        if self.output_gate is None:
            return out
        return out * jax.nn.silu(self.output_gate(call.inputs_q))
