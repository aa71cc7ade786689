"""Gated linear attention: how fast a head forgets follows from the input.

    S_t = diag(exp(decay_t)) S_{t-1} + phi(k_t) v_t^T        decay_t = log sigmoid(f(y_t)) / tau
    o_t = phi(q_t) . S_t * D**-0.5                           z = out(rms_norm(o) * silu(g(x)))

`gate="vector"` forgets channel by channel, with f of a low rank (GLA, Yang et al., 2023);
`gate="scalar"` forgets head by head, as Mamba-2 and simple GLA do, and is faster. The norm is over
the values of one head, with a scale that all heads share. Beside nnx.MultiHeadAttention's
parameters there are

    forget_gate         kernel [in_kv_features, G], bias [G]      f, gate="scalar"
    forget_gate_down    kernel [in_kv_features, gate_rank]        f, gate="vector"
    forget_gate_up      kernel [gate_rank, G, D], bias [G, D]
    output_gate         kernel [in_features, H, D], bias [H, D]   g
    norm                scale [D]
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Initializer

from ato_jax import shapes
from ato_jax.nn.common import Call, refuse_no_initialiser
from ato_jax.nn.linear_attention import LinearAttention


class GatedLinearAttention(LinearAttention):
    """Linear attention that decays as the input says, its output normalised and gated.

    Args:
      num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features, rngs and
        every name in `options` (dtype, param_dtype, use_bias, decode, rope_theta, implementation,
        kernel_metadata, ...): as in `LinearAttention`.
      gate: "vector", a decay per channel [B, S, G, D], or "scalar", one per head [B, S, G].
      gate_rank: the rank of the vector gate, 16 unless given; a scalar gate has none.
      temperature: tau, which divides the log of the gate: the larger, the longer the memory. Where
        f is 0, half of the state is left after tau steps.
      feature_map, normalize: as in `ato_jax.linear_attention`.
      causal: True unless said otherwise; False decays by the steps between a query and a key.
      use_output_gate: False leaves the output gate away, but not the norm.
      norm_epsilon: the norm's.
      kernel_init, bias_init: as in nnx.MultiHeadAttention, and for `output_gate` and the kernel of
        `forget_gate_up`, whose axes are those of `query`.
      gate_kernel_init: for the kernel of `forget_gate` or `forget_gate_down`, of two axes.
      gate_bias_init: for the bias of `forget_gate` [G] or `forget_gate_up` [G, D], which is always
        there: it says how long the memory is before anything is learned.
      norm_scale_init: for the scale of `norm`.

    Surprises:
      - A hidden step (a mask of padding) adds nothing and lets no time pass: the rest comes out as
        if the step were not there. Prompts of any lengths, padded on either side, can share a
        batch and a cache. Masks and the cache are otherwise those of `LinearAttention`.
      - The decay is computed in float32 from logits in the layer's dtype.
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
        gate: str = "vector",
        gate_rank: int | None = None,
        temperature: float = 16.0,
        feature_map: Any = "identity",
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
        """The log of each step's factor, float32 [B, S, G] or [B, S, G, D]."""
        if self.gate == "scalar":
            logits = self.forget_gate(call.inputs_k)
        else:
            logits = self.forget_gate_up(self.forget_gate_down(call.inputs_k))
        return jax.nn.log_sigmoid(logits.astype(jnp.float32)) / self.temperature

    def _finish(self, out: jax.Array, call: Call) -> jax.Array:
        out = self.norm(out)
        if self.output_gate is None:
            return out
        return out * jax.nn.silu(self.output_gate(call.inputs_q))
