"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values live in one small latent.

    c_j = rms_norm(kv_down(x_j))  [C]            r_j = rotate(rope_key(x_j))  [R], one for all heads
    q_i = query(x_i) = (a_i [N], b_i [R])        or query(rms_norm(query_down(x_i)))
    s[i,j] = (a_i . key(c_j) + rotate(b_i) . r_j) / sqrt(N + R)                       for each head
    z_i = out(sum_j softmax(s)[i,j] value(c_j))

The cache holds c and r, C + R numbers a token, whatever the number of heads. It can be read in two
ways, which differ only in the order of the products:

    expanded    key(c_j) and value(c_j) are formed for every j; heads of N + R and V
    absorbed    a_i . key(c_j) = (a_i . key^T) . c_j, and value is applied to sum_j w[i,j] c_j: all
                heads read c itself, as attention with one kv head of D = C + R and V = C

Expanded pays for every key once, absorbed for every pair, so that prompts are best expanded and
single tokens absorbed: the layer takes what multiplies less. Its parameters are

    query_down   kernel [in_features, q_lora_rank], query_norm scale [q_lora_rank], or neither
    query        kernel [q_lora_rank or in_features, H, N + R], without positions first
    kv_down      kernel [in_features, C], kv_norm scale [C]
    rope_key     kernel [in_features, R]
    key, value   kernels [C, H, N] and [C, H, V]
    out          kernel [H, V, out_features]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Initializer

from ato_jax import shapes
from ato_jax.nn.common import (
    Call,
    append,
    as_decode,
    as_dropout_rate,
    as_implementation,
    as_input_shape,
    as_positions,
    bind_mask,
    caches_restored,
    dropout_key,
    made,
    one_batch_axis,
    optional_flag,
    refuse_no_array,
    refuse_no_dtype,
    refuse_no_initialiser,
    refuse_no_sharding,
    refuse_rngs_without,
    rotate,
)
from ato_jax.ops.attention.api import OP, attention
from ato_jax.ops.attention.cached import MOST_QUERIES
from ato_jax.ops.attention.decode import BACKENDS, decode_attention
from ato_jax.ops.common import precision_of


class LatentAttention(nnx.Module):
    """Exact attention whose cache is one latent and one rotated key a token.

    Args:
      num_heads: H.
      in_features: the size of the inputs.
      out_features: that of the outputs, in_features unless given.
      kv_lora_rank: C, the size of the latent.
      q_lora_rank: that of the queries' latent; None projects the inputs directly.
      qk_nope_head_dim, qk_rope_head_dim, v_head_dim: N, R (even) and V, all for one head. These
        and the ranks are called as in DeepSeek's configurations, and the defaults are theirs.
      rope_theta: the base of the rotation, whose pairs are the halves of R, as in nnx.RoPE.
      causal: True unless said otherwise: query i sees the keys up to i.
      dtype, param_dtype, precision, dropout_rate, deterministic, keep_rngs, decode, rngs: as in
        nnx.MultiHeadAttention.
      kernel_init: for `query`, `key` and `value`, of three axes, the second that of the heads.
      out_kernel_init: for `out`, whose first axis is that of the heads; None means kernel_init.
      down_kernel_init: for `query_down`, `kv_down` and `rope_key`, of two axes.
      use_bias, bias_init: for `query_down`, `kv_down`, `rope_key` and `out`; the projections out
        of a latent have none, or they could not be absorbed.
      norm_epsilon, norm_scale_init: for `query_norm` and `kv_norm`.
      implementation: as in `ato_jax.attention`.

    Surprises:
      - Each weight is dropped by itself, as in `Attention`; both orders of products drop the same.
      - A query that sees nothing gives 0 before the last projection, not the mean of all values.
      - DeepSeek's own weights pair neighbours, not halves: to load them, put the even ones of the
        last R columns of `query` and of `rope_key` before the odd ones.
      - decode=True takes any number of tokens, causal among themselves: a prompt first, then one
        token at a time. Its mask is one over the cache, [batch..., H, T, max_length].
      - Beyond the cache's length there is an error, or NaN inside jit, where the count of tokens
        is not known.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        out_features: int | None = None,
        *,
        kv_lora_rank: int = 512,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        rope_theta: float = 10000.0,
        causal: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        down_kernel_init: Initializer = default_kernel_init,
        use_bias: bool = False,
        bias_init: Initializer = default_bias_init,
        norm_epsilon: float = 1e-6,
        norm_scale_init: Initializer = nnx.initializers.ones,
        keep_rngs: bool = True,
        decode: bool | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        refuse_rngs_without("params", rngs)
        keep_rngs = shapes.flag("keep_rngs", keep_rngs)
        use_bias = shapes.flag("use_bias", use_bias)
        as_decode(decode)
        refuse_no_dtype(dtype=dtype, param_dtype=param_dtype)
        refuse_no_initialiser(
            kernel_init=kernel_init,
            down_kernel_init=down_kernel_init,
            bias_init=bias_init,
            norm_scale_init=norm_scale_init,
        )
        if out_kernel_init is not None:
            refuse_no_initialiser(out_kernel_init=out_kernel_init)
        self.num_heads = shapes.positive_int("num_heads", num_heads)
        self.in_features = shapes.positive_int("in_features", in_features)
        self.out_features = shapes.positive_int(
            "out_features", in_features if out_features is None else out_features
        )
        self.kv_lora_rank = shapes.positive_int("kv_lora_rank", kv_lora_rank)
        self.q_lora_rank = q_lora_rank
        self.qk_nope_head_dim = shapes.positive_int("qk_nope_head_dim", qk_nope_head_dim)
        self.qk_rope_head_dim = shapes.positive_int("qk_rope_head_dim", qk_rope_head_dim)
        if qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim must be even, for it is rotated in pairs, got {qk_rope_head_dim}"
            )
        self.v_head_dim = shapes.positive_int("v_head_dim", v_head_dim)
        self.rope_theta = shapes.positive("rope_theta", rope_theta)
        self.causal = shapes.flag("causal", causal)
        self.dtype = dtype
        self.param_dtype = param_dtype
        precision_of(precision, "float32")
        self.precision = precision
        self.dropout_rate = as_dropout_rate(dropout_rate, keep_rngs, rngs)
        optional_flag("deterministic", deterministic)
        self.deterministic = deterministic
        self.decode = decode
        self.implementation = as_implementation(OP, implementation)

        def projection(
            source: int | tuple[int, ...],
            target: int | tuple[int, ...],
            kernel_init: Initializer,
            use_bias: bool = False,
        ) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                source,
                target,
                axis=(-2, -1) if isinstance(source, tuple) else -1,
                kernel_init=kernel_init,
                use_bias=use_bias,
                bias_init=bias_init,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                rngs=rngs,
            )

        def norm(size: int) -> nnx.RMSNorm:
            return nnx.RMSNorm(
                size,
                epsilon=shapes.positive("norm_epsilon", norm_epsilon),
                dtype=dtype,
                param_dtype=param_dtype,
                scale_init=norm_scale_init,
                rngs=rngs,
            )

        self.query_down: nnx.LinearGeneral | None = nnx.data(None)
        self.query_norm: nnx.RMSNorm | None = nnx.data(None)
        if q_lora_rank is not None:
            shapes.positive_int("q_lora_rank", q_lora_rank)
            self.query_down = projection(in_features, q_lora_rank, down_kernel_init, use_bias)
            self.query_norm = norm(q_lora_rank)
        self.query = projection(
            in_features if q_lora_rank is None else q_lora_rank,
            (num_heads, qk_nope_head_dim + qk_rope_head_dim),
            kernel_init,
        )
        self.kv_down = projection(in_features, kv_lora_rank, down_kernel_init, use_bias)
        self.kv_norm = norm(kv_lora_rank)
        self.rope_key = projection(in_features, qk_rope_head_dim, down_kernel_init, use_bias)
        self.key = projection(kv_lora_rank, (num_heads, qk_nope_head_dim), kernel_init)
        self.value = projection(kv_lora_rank, (num_heads, v_head_dim), kernel_init)
        self.out = projection(
            (num_heads, v_head_dim), self.out_features, out_kernel_init or kernel_init, use_bias
        )
        keeps = keep_rngs and self.dropout_rate > 0
        self.rngs: nnx.RngStream | None = rngs.dropout.fork() if keeps else nnx.data(None)
        self.cached_latent: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[jax.Array] | None = nnx.data(None)

    def __call__(
        self,
        inputs_q: jax.Array,
        *,
        mask: Any = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool | None = None,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Attention of `inputs_q` to itself, or with `decode` also to what came before.

        Args:
          inputs_q: [batch..., T, in_features].
          mask: broadcastable to [batch..., H, T, T], with `decode` to [batch..., H, T, max_length];
            False or 0 hides.
          deterministic, rngs: as in Flax; they decide about dropout.
          decode: append to the cache and attend to what is in it; None means the constructor's,
            and there False.
          is_causal: causal for this call.
          input_positions: [batch..., T], what to rotate by; None counts from 0, or from the tokens
            already in the cache. It does not change who sees whom.
          out_sharding: as in nnx.MultiHeadAttention.

        Returns:
          [batch..., T, out_features].
        """
        refuse_no_array("inputs_q", inputs_q)
        refuse_no_sharding(out_sharding=out_sharding)
        if inputs_q.ndim < 2 or inputs_q.shape[-1] != self.in_features:
            raise ValueError(
                f"inputs_q must be [batch..., length, {self.in_features}], "
                f"got shape {inputs_q.shape}"
            )
        *batch, T = inputs_q.shape[:-1]
        inputs = one_batch_axis(inputs_q, 2)  # [B, T, in_features]
        decode = as_decode(self.decode if decode is None else decode)
        causal = shapes.flag("is_causal", is_causal) or self.causal
        held = made(self.cache_index)[...] if decode else jnp.zeros((), jnp.int32)
        positions = (held + jnp.arange(T))[None]
        if input_positions is not None:
            input_positions = as_positions(input_positions)
            if input_positions.shape != (*batch, T):
                raise ValueError(
                    f"input_positions must be [batch..., T] = {(*batch, T)}, "
                    f"got shape {input_positions.shape}"
                )
            positions = one_batch_axis(input_positions, 1)

        latent = self.kv_norm(self.kv_down(inputs))  # [B, T, C]
        rope_key = self.rope_key(inputs)  # [B, T, R]
        if self.query_down is not None and self.query_norm is not None:
            query = self.query(self.query_norm(self.query_down(inputs)))
        else:
            query = self.query(inputs)  # [B, T, H, N + R]
        query, latent, rope_key = promote_dtype((query, latent, rope_key), dtype=self.dtype)
        rope_key = rotate(rope_key[:, :, None], positions, self.rope_theta)[:, :, 0]
        plain, turned = jnp.split(query, (self.qk_nope_head_dim,), axis=-1)
        turned = rotate(turned, positions, self.rope_theta)

        options: dict[str, Any] = {"causal": causal}
        # Side by side, as the absorbed order reads them: in a cache, where one copies all of it.
        joint = jnp.concatenate((latent, rope_key), axis=-1)  # [B, T, C + R]
        with caches_restored(self):
            if decode:
                [joint], _ = append(
                    self.cache_index, tuple(batch), cached_latent=(self.cached_latent, joint)
                )
                # Both lengths are said: where T = S, one would stand for the other, too.
                B = inputs.shape[0]
                options = {
                    "causal": True,
                    "query_offset": held,
                    "q_lengths": jnp.full(B, T, jnp.int32),
                    "kv_lengths": jnp.broadcast_to(held + T, B),
                }
            S = joint.shape[1]
            call = Call(
                *(query, joint, joint, inputs, inputs, tuple(batch), mask, True, decode),
                dropout_key=dropout_key(self, deterministic, rngs),
            )
            options |= {
                "mask": bind_mask(mask, call),
                "scale": (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5,
                "dropout_rate": 0.0 if call.dropout_key is None else self.dropout_rate,
                "dropout_key": call.dropout_key,
                "precision": self.precision,
                "implementation": self.implementation,
            }
            attend = self._absorbed if self._absorbs(T, S) else self._expanded
            x = attend(plain, turned, joint, options, decode)  # [B, T, H, V]
            if decode:
                # Inside jit a full cache cannot be refused; it must not pass unnoticed either.
                x = jnp.where(held + T <= S, x, jnp.nan)
            return self.out(x.reshape(*batch, *x.shape[1:]), out_sharding=out_sharding)

    def _absorbs(self, T: int, S: int) -> bool:
        """Whether absorbed is the order that multiplies less, for T queries and S keys."""
        rank, nope, rope = self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim
        V = self.v_head_dim
        absorbed = T * rank * (nope + V) + T * S * (rank + rope + rank)
        expanded = S * rank * (nope + V) + T * S * (nope + rope + V)
        return absorbed < expanded

    def _expanded(
        self,
        plain: jax.Array,
        turned: jax.Array,
        joint: jax.Array,
        options: dict[str, Any],
        decode: bool,
    ) -> jax.Array:
        """Every head with keys and values of its own: [B, T, H, V]."""
        latent, rope_key = jnp.split(joint, (self.kv_lora_rank,), axis=-1)
        key, value = self.key(latent), self.value(latent)
        shared = jnp.broadcast_to(rope_key[:, :, None], (*key.shape[:-1], rope_key.shape[-1]))
        return attention(
            jnp.concatenate((plain, turned), axis=-1),  # [B, T, H, N + R]
            jnp.concatenate((key, shared), axis=-1),  # [B, S, H, N + R]
            value,  # [B, S, H, V]
            **options,
        )

    def _absorbed(
        self,
        plain: jax.Array,
        turned: jax.Array,
        joint: jax.Array,
        options: dict[str, Any],
        decode: bool,
    ) -> jax.Array:
        """Every head with the latent for key and value: [B, T, H, V]."""
        kernels = self.key.kernel[...], self.value.kernel[...]
        key, value = promote_dtype(kernels, dtype=joint.dtype)
        inward = jnp.einsum("bthn,chn->bthc", plain, key, precision=self.precision)
        query = jnp.concatenate((inward, turned), axis=-1)  # [B, T, H, C + R]
        joint = joint[:, :, None]  # [B, S, 1, C + R]
        if (
            decode
            and 1 <= query.shape[1] <= MOST_QUERIES
            and options["mask"] is None
            and options["dropout_key"] is None
            and self.implementation in (None, *BACKENDS)
        ):
            mean = decode_attention(
                query,
                joint,
                lengths=options["kv_lengths"],
                value_dim=self.kv_lora_rank,
                scale=options["scale"],
                implementation=self.implementation,
            )
        else:
            mean = attention(query, joint, joint[..., : self.kv_lora_rank], **options)
        return jnp.einsum("bthc,chv->bthv", mean, value, precision=self.precision)

    def init_cache(self, input_shape: Sequence[int], dtype: Any = jnp.float32) -> None:
        """Makes an empty cache for inputs of shape [batch..., max_length, features].

        `dtype` is that of latent and rotated key: the layer's, or where it has none that of its
        inputs and parameters together.
        """
        shape = as_input_shape(input_shape, self.in_features)[:-1]
        refuse_no_dtype(dtype=dtype)
        width = self.kv_lora_rank + self.qk_rope_head_dim
        self.cached_latent = nnx.Cache(jnp.zeros((*shape, width), dtype))
        self.cache_index = nnx.Cache(jnp.array(0, jnp.int32))

    def set_view(self, deterministic: bool | None = None, decode: bool | None = None) -> None:
        """What `nnx.view(model, ...)` sets, and `model.train()` and `model.eval()`.

        Args:
          deterministic, decode: as in the constructor; None leaves them.
        """
        optional_flag("deterministic", deterministic)
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = as_decode(decode)
