"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values live in one small latent.

    c_j = rms_norm(kv_down(x_j))  [C]            r_j = rotate(rope_key(x_j))  [R], one for all heads
    q_i = query(x_i) = (a_i [N], b_i [R])        or query(rms_norm(query_down(x_i)))
    s[i,j] = (a_i . key(c_j) + rotate(b_i) . r_j) / sqrt(N + R)                       for each head
    z_i = out(sum_j softmax(s)[i,j] value(c_j))

The cache holds c and r, C + R numbers a token, whatever the number of heads. There are two orders
of the products:

    expanded    key(c_j) and value(c_j) are formed for every j; heads of N + R and V
    absorbed    a_i . key(c_j) = (a_i . key^T) . c_j, and value is applied to sum_j w[i,j] c_j: all
                heads read c itself, as attention with one kv head of D = C + R and V = C

The extra work of the expanded order is per key, that of the absorbed order per pair of query and
key. The layer takes the order with fewer multiplications: expanded for prompts, absorbed for single
tokens. Its parameters are

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
from flax.typing import Dtype, Initializer, PrecisionLike

from ato_jax import programs, shapes
from ato_jax.nn.arguments import (
    Mask,
    Sharding,
    as_decode,
    as_dropout_rate,
    as_implementation,
    as_input_shape,
    dropout_key,
    optional_flag,
    refuse_no_array,
    refuse_no_dtype,
    refuse_no_initialiser,
    refuse_no_sharding,
    refuse_rngs_without,
)
from ato_jax.nn.caches import append, caches_restored, made
from ato_jax.nn.call import Call, as_segment_ids, one_batch_axis
from ato_jax.nn.masks import bind_mask
from ato_jax.nn.rotary import as_positions, positions_in_segments, rotate
from ato_jax.ops.attention.api import OP, attention
from ato_jax.ops.attention.cached import MOST_QUERIES
from ato_jax.ops.attention.decode import BACKENDS, decode_attention
from ato_jax.ops.common import Integers, precision_of


class LatentAttention(nnx.Module):
    """Multi-head latent attention: exact attention with a small cache (DeepSeek-V2, 2024).

        c_j = rms_norm(kv_down(x_j)), r_j = rotate(rope_key(x_j))           the cache, C + R numbers
        (a_i, b_i) = query(x_i), or query(rms_norm(query_down(x_i)))
        s[i,j] = (a_i . key(c_j) + rotate(b_i) . r_j) / sqrt(N + R)           for each head
        z_i = out(sum_j softmax(s)[i,j] value(c_j))

    - A query that sees no key has 0 before the last projection, not the mean of all values.
    - Each weight is dropped independently, the same ones in both orders of the products.
    - DeepSeek's own weights pair neighbouring channels for the rotation, not the halves of R. To
      load them, put the even ones of the last R columns of `query` and of `rope_key` before the odd
      ones.
    - With `decode=True` a call takes any number of tokens, causal among themselves: first a prompt,
      then one token at a time. Its mask covers the cache, [batch..., H, T, max_length]. A call for
      which the cache has no room raises an error, or gives NaN inside jit.

    Args:
      num_heads: H, the number of heads.
      in_features: Size of the inputs.
      out_features: Size of the outputs; in_features unless given.
      kv_lora_rank: C, the size of the latent. This and the next names and defaults are those of
        DeepSeek's configurations.
      q_lora_rank: Size of the queries' latent; None projects the inputs directly.
      qk_nope_head_dim: N, the part of a head's query and key without positions.
      qk_rope_head_dim: R, the part with positions, even.
      v_head_dim: V, the size of a head's value.
      rope_theta: Base of the rotary positions.
      causal: Query i sees the keys up to i.
      dtype: Dtype of the computation; None promotes that of inputs and parameters.
      param_dtype: Dtype of the parameters.
      precision: Precision of the products, as in nnx.MultiHeadAttention.
      dropout_rate: Probability in [0, 1) with which a weight is dropped.
      deterministic: Whether to drop nothing; a call may decide it.
      kernel_init: Initialiser of `query`, `key` and `value`, kernels [size, H, size of a head].
      out_kernel_init: Initialiser of `out`; kernel_init unless given.
      down_kernel_init: Initialiser of `query_down`, `kv_down` and `rope_key`.
      use_bias: Whether `query_down`, `kv_down`, `rope_key` and `out` have a bias. The projections
        out of a latent have none, since a bias could not be absorbed.
      bias_init: Initialiser of the biases.
      norm_epsilon: Epsilon of `query_norm` and `kv_norm`.
      norm_scale_init: Initialiser of their scales.
      keep_rngs: Keep the stream `dropout` of `rngs` in the layer.
      decode: Whether calls append to the cache; a call may decide it.
      implementation: A backend of `ato_jax.attention` by name; None takes the fastest.
      rngs: Random keys: the stream `params` for the parameters, and `dropout`.

    Raises:
      ValueError: An argument has a wrong type or value. The message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> layer = ato_jax.nn.LatentAttention(
      ...     num_heads=4, in_features=16, kv_lora_rank=8, qk_nope_head_dim=4,
      ...     qk_rope_head_dim=2, v_head_dim=4, rngs=nnx.Rngs(0),
      ... )
      >>> layer(jnp.ones((2, 8, 16))).shape  # [B, T, in_features] -> [B, T, out_features]
      (2, 8, 16)
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
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
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
        mask: Mask | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool | None = None,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
        segment_ids: Integers | None = None,
        out_sharding: Sharding | None = None,
    ) -> jax.Array:
        """Computes the attention of `inputs_q` to itself, or with `decode` to the cache.

        Args:
          inputs_q: [batch..., T, in_features].
          mask: Booleans that broadcast to [batch..., H, T, T], with `decode` to [batch..., H, T,
            max_length]; False or 0 hides a key.
          deterministic: Whether to drop nothing; None takes the constructor's value.
          rngs: Random keys for dropout; None takes the layer's own.
          decode: Append to the cache and attend to all tokens in it; None takes the constructor's
            value, and False where that is None.
          is_causal: Query i sees the keys up to i in this call.
          input_positions: [batch..., T], the positions to rotate by. None counts from 0 in each
            segment, or from the number of tokens in the cache. They do not change which keys a
            query sees.
          segment_ids: Integers [batch..., T], the document of each token: only equal ids see each
            other. Each document is one contiguous run. Refused with `decode`.
          out_sharding: Sharding of the result, as in nnx.LinearGeneral.

        Returns:
          [batch..., T, out_features].

        Raises:
          ValueError: An argument has a wrong shape, type or value, or `decode` has no cache, or one
            without room. The cache is then as it was.
          UnsupportedError: The backend `implementation` does not support the call.
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
        positions = (held + jnp.arange(T, dtype=jnp.int32))[None]
        ids = as_segment_ids(segment_ids, tuple(batch), T, T, decode)
        if ids is not None:
            positions = positions_in_segments(ids)
        if input_positions is not None:
            input_positions = as_positions(input_positions)
            if input_positions.shape != (*batch, T):
                raise ValueError(
                    f"input_positions must be [batch..., T] = {(*batch, T)}, "
                    f"got shape {input_positions.shape}"
                )
            positions = one_batch_axis(input_positions, 1)

        latent = programs.promoting_ranks(self.kv_norm)(self.kv_down(inputs))  # [B, T, C]
        rope_key = self.rope_key(inputs)  # [B, T, R]
        if self.query_down is not None and self.query_norm is not None:
            query_norm = programs.promoting_ranks(self.query_norm)
            query = self.query(query_norm(self.query_down(inputs)))
        else:
            query = self.query(inputs)  # [B, T, H, N + R]
        query, latent, rope_key = promote_dtype((query, latent, rope_key), dtype=self.dtype)
        rope_key = rotate(rope_key[:, :, None], positions, self.rope_theta)[:, :, 0]
        plain, turned = jnp.split(query, (self.qk_nope_head_dim,), axis=-1)
        turned = rotate(turned, positions, self.rope_theta)

        options: dict[str, Any] = {"causal": causal, "segment_ids": ids}
        # Joined, as the absorbed order reads them. Joining them later would copy the whole cache.
        joint = jnp.concatenate((latent, rope_key), axis=-1)  # [B, T, C + R]
        with caches_restored(self):
            if decode:
                [joint], _ = append(
                    self.cache_index, tuple(batch), cached_latent=(self.cached_latent, joint)
                )
                # Both lengths are given: if T = S, a missing one would be taken from the other.
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
                # Inside jit a full cache cannot be refused. NaN makes it noticed.
                x = jnp.where(held + T <= S, x, jnp.nan)
            return self.out(x.reshape(*batch, *x.shape[1:]), out_sharding=out_sharding)

    def _absorbs(self, T: int, S: int) -> bool:
        """Whether the absorbed order has fewer multiplications for T queries and S keys."""
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
        """The attention with keys and values formed for each head: [B, T, H, V]."""
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
        """The attention with the latent as key and value of all heads: [B, T, H, V]."""
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

    def init_cache(self, input_shape: Sequence[int], dtype: Dtype = jnp.float32) -> None:
        """Makes an empty cache for decoding.

        Args:
          input_shape: [batch..., max_length, in_features]: the batch of later calls, and the most
            tokens that a sequence will have.
          dtype: Dtype of the latent and the rotated key: the layer's, or if it has none the
            promoted dtype of its inputs and parameters.

        Raises:
          ValueError: An argument has a wrong type or value.

        Example:
          >>> import jax.numpy as jnp
          >>> import ato_jax.nn
          >>> from flax import nnx
          >>> layer = ato_jax.nn.LatentAttention(
          ...     num_heads=4, in_features=16, kv_lora_rank=8, qk_nope_head_dim=4,
          ...     qk_rope_head_dim=2, v_head_dim=4, rngs=nnx.Rngs(0),
          ... )
          >>> layer.init_cache((2, 32, 16))
          >>> prompt = layer(jnp.ones((2, 5, 16)), decode=True)
          >>> layer.cached_latent.shape  # [B, max_length, C + R]
          (2, 32, 10)
        """
        shape = as_input_shape(input_shape, self.in_features)[:-1]
        refuse_no_dtype(dtype=dtype)
        width = self.kv_lora_rank + self.qk_rope_head_dim
        self.cached_latent = nnx.Cache(jnp.zeros((*shape, width), dtype))
        self.cache_index = nnx.Cache(jnp.array(0, jnp.int32))

    def set_view(self, deterministic: bool | None = None, decode: bool | None = None) -> None:
        """Sets what `nnx.view(model, ...)`, `model.train()` and `model.eval()` set.

        Args:
          deterministic: As in the constructor; None leaves it.
          decode: As in the constructor; None leaves it.

        Raises:
          ValueError: A value is neither True, False nor None.
        """
        optional_flag("deterministic", deterministic)
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = as_decode(decode)
