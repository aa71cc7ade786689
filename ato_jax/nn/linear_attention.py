"""Linear attention as layers, with nnx.MultiHeadAttention's parameters.

    w[i,j] = phi(query(x_i)) . phi(key(y_j))        out_i = sum_j w[i,j] value(y_j) / sum_j w[i,j]

`LinearAttention` takes any elementwise phi. `Performer` has random features, for which w estimates
the weights of softmax attention. Their state has the same size for every length of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from ato_jax import shapes
from ato_jax.nn.arguments import (
    as_implementation,
    as_input_shape,
    optional_flag,
    refuse_no_dtype,
    refuse_rngs_without,
)
from ato_jax.nn.caches import made
from ato_jax.nn.call import Call
from ato_jax.nn.masks import blank_steps, factor_mask, hide_inputs, hide_keys, hide_queries
from ato_jax.nn.multi_head import MultiHead
from ato_jax.ops.linear_attention.api import OP, FeatureMapLike, linear_attention
from ato_jax.ops.linear_attention.features import Favor, favor, resolve
from ato_jax.ops.linear_attention.spec import LinearState
from ato_jax.ops.linear_attention.step import linear_attention_step
from ato_jax.parallel import linear as parallel
from ato_jax.parallel.devices import AxisName


class LinearAttention(MultiHead):
    """Linear attention as a layer, with nnx.MultiHeadAttention's parameters.

        w[i,j] = phi(query(x_i)) . phi(key(y_j))
        z_i = out(sum_j w[i,j] value(y_j) / sum_j w[i,j])

    Time is linear in T and S. Checkpoints of nnx.MultiHeadAttention load.

    - A mask may be causal, or hide keys for all queries alike, [batch..., 1, 1, S], or both. Padded
      queries have 0 before the last projection. Any other mask is a ValueError, and so is
      every traced mask with an axis of queries, since its values are not known: inside jit, an
      argument or what JAX makes there. Packed documents take `segment_ids` in place of a mask of
      blocks.
    - With `decode=True` a call takes any number of tokens, causal among themselves: first a prompt,
      then one token at a time. Its mask covers these tokens, not a cache of keys: earlier keys
      exist only as sums.
    - The cache is a state of float32 sums of a constant size, and is never full. `Attention`'s
      `kv_dtype` is refused: a sum in 8 bits soon ignores what is added.
    - A single token is multiplied exactly, whatever `precision` is, and takes the fast path only if
      `implementation` is None.

    Args:
      num_heads: H, the number of query heads.
      in_features: Size of `inputs_q`.
      qkv_features: Size of all query heads together, H D; in_features unless given.
      out_features: Size of the outputs; in_features unless given.
      num_kv_heads: G, the number of key/value heads, which divides H; H unless given.
      in_kv_features: Size of `inputs_k` and `inputs_v`; in_features unless given.
      feature_map: phi: a name or an elementwise JAX function, as in `ato_jax.linear_attention`.
      causal: Query i sees the keys up to i (T = S).
      normalize: Divide by the sum of the weights. None does so where phi is known to be
        non-negative.
      rope_theta: Base of the rotary positions (10000 in RoFormer) of queries and keys; None for
        none. It needs an even D.
      context_axis: The axis of the `jax.shard_map` around the call that cuts T and S, as in
        `ato_jax.parallel`: each device gives its own tokens and gets their outputs. None for whole
        sequences. Masks and `decode` are refused with it.
      implementation: A backend of `ato_jax.linear_attention` by name; None takes the fastest.
      rngs: Random keys: the stream `params` for the parameters.
      **options: Other constructor arguments of nnx.MultiHeadAttention, such as dtype, param_dtype,
        precision, use_bias, normalize_qk, decode, kernel_init and kernel_metadata. `attention_fn`
        is refused and so is a `dropout_rate`: there are no weights to drop.

    Raises:
      ValueError: An argument has a wrong type or value. The message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> layer = ato_jax.nn.LinearAttention(
      ...     num_heads=4, in_features=16, feature_map="relu", causal=True, rngs=nnx.Rngs(0)
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
        feature_map: FeatureMapLike = "elu1",
        causal: bool = False,
        normalize: bool | None = None,
        rope_theta: float | None = None,
        context_axis: AxisName | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if isinstance(feature_map, Favor):
            raise ValueError(
                "feature_map holds a random projection: use ato_jax.nn.Performer, which keeps it "
                "as a variable and can redraw it"
            )
        if shapes.static_number("dropout_rate", options.get("dropout_rate", 0.0)):
            raise ValueError(
                "dropout_rate must be 0: linear attention forms no weights that could be dropped; "
                f"put nnx.Dropout after the layer, got {options['dropout_rate']}"
            )
        if (kv_dtype := options.pop("kv_dtype", None)) is not None:
            raise ValueError(
                "kv_dtype must be None: the cache holds sums over all tokens, in float32 and of a "
                "constant size, and a sum in 8 bits soon ignores what is added; "
                f"got {kv_dtype!r}"
            )
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            causal=causal,
            rope_theta=rope_theta,
            context_axis=context_axis,
            implementation=as_implementation(OP, implementation),
            rngs=rngs,
            **options,
        )
        resolve(feature_map, self.head_dim)
        optional_flag("normalize", normalize)
        self.feature_map = feature_map
        self.normalize = normalize
        self.cached_kv: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.cached_k_sum: nnx.Cache[jax.Array] | None = nnx.data(None)

    def _features(self) -> tuple[FeatureMapLike, int]:
        """phi, and F, its number of features."""
        return self.feature_map, self.head_dim

    def decay(self, call: Call) -> jax.Array | None:
        """The natural logarithm of the decay, [G], [B, S, G] or [B, S, G, D]; None for no decay.

        A decay per step is taken as 0 in hidden steps: the state does not decay there.
        """
        return None

    def _finish(self, out: jax.Array, call: Call) -> jax.Array:
        """Applied between the attention and the last projection, [B, T, H, V] to [B, T, H, V]."""
        return out

    def attend(self, call: Call) -> jax.Array:
        """The attention of a call, [B, T, H, V]; with `decode` it continues the state."""
        visible = factor_mask(call._replace(causal=call.causal or call.decode))
        call = hide_inputs(call, visible)
        feature_map, _ = self._features()
        key, value, feature_map = hide_keys(call.key, call.value, visible.keys, feature_map)
        decay = self.decay(call)
        if decay is not None and decay.ndim > 1 and visible.keys is not None:
            decay = blank_steps(decay, visible.keys)
        options: dict[str, Any] = {"feature_map": feature_map, "normalize": self.normalize}
        if not call.decode:
            if self.context_axis is not None:
                options["axis_name"] = self.context_axis
            function: Any = (
                linear_attention if self.context_axis is None else parallel.linear_attention
            )
            out = function(
                call.query,
                key,
                value,
                decay=decay,
                causal=visible.causal,
                segment_ids=call.segment_ids,
                precision=self.precision,
                implementation=self.implementation,
                **options,
            )
        else:
            state = self._state(call)
            # The step is exact and chooses its backend itself, so a backend asked for by name gets
            # the token as a prompt of length 1.
            if call.query.shape[1] == 1 and self.implementation is None:
                if decay is not None and decay.ndim > 1:
                    decay = decay[:, 0]
                out, state = linear_attention_step(
                    call.query[:, 0], key[:, 0], value[:, 0], state, decay=decay, **options
                )
                out = out[:, None]
            else:
                out, state = linear_attention(
                    call.query,
                    key,
                    value,
                    decay=decay,
                    causal=True,
                    initial_state=state,
                    return_state=True,
                    precision=self.precision,
                    implementation=self.implementation,
                    **options,
                )
            self._remember(call, state)
        return hide_queries(self._finish(out, call), visible.queries)

    def _state(self, call: Call) -> LinearState:
        """The cache as a state with a single batch axis."""
        kv, k_sum = made(self.cached_kv), made(self.cached_k_sum)
        G, V = call.value.shape[2:]
        wanted = (*call.batch, G, self._features()[1], V)
        if kv.shape != wanted or kv.dtype != jnp.float32:
            raise ValueError(
                f"the cache holds [batch..., G, F, V] = {kv.shape} in {kv.dtype}, but this call "
                f"needs {wanted} in float32: call init_cache(input_shape) with this batch"
            )
        B = call.key.shape[0]
        return LinearState(kv[...].reshape(B, *wanted[-3:]), k_sum[...].reshape(B, *wanted[-3:-1]))

    def _remember(self, call: Call, state: LinearState) -> None:
        kv, k_sum, index = map(made, (self.cached_kv, self.cached_k_sum, self.cache_index))
        kv[...] = state.kv.reshape(kv.shape)
        k_sum[...] = state.k_sum.reshape(k_sum.shape)
        index[...] += call.key.shape[1]

    def init_cache(self, input_shape: Sequence[int], dtype: Dtype = jnp.float32) -> None:
        """Makes an empty cache for decoding: a state of zeros, float32.

        Args:
          input_shape: [batch..., length, in_features]. Only the batch axes matter: the state has
            one size for every length.
          dtype: Has no effect. It is there so that a model can make the caches of all its layers
            by the same call.

        Raises:
          ValueError: An argument has a wrong type or value.

        Example:
          >>> import jax.numpy as jnp
          >>> import ato_jax.nn
          >>> from flax import nnx
          >>> layer = ato_jax.nn.LinearAttention(num_heads=4, in_features=16, rngs=nnx.Rngs(0))
          >>> layer.init_cache((2, 32, 16))
          >>> prompt = layer(jnp.ones((2, 5, 16)), decode=True)
          >>> layer(jnp.ones((2, 1, 16)), decode=True).shape  # the 6th token
          (2, 1, 16)
        """
        features = self._features()[1]
        refuse_no_dtype(dtype=dtype)
        shape = (*as_input_shape(input_shape, self.in_features)[:-2], self.num_kv_heads, features)
        self.cached_kv = nnx.Cache(jnp.zeros((*shape, self.head_dim), jnp.float32))
        self.cached_k_sum = nnx.Cache(jnp.zeros(shape, jnp.float32))
        self.cache_index = nnx.Cache(jnp.array(0, jnp.int32))


class RandomFeatures(nnx.Variable):
    """A `Performer`'s random features: saved and restored with the model, not trained."""


class Performer(LinearAttention):
    """Linear attention with random features that approximates softmax attention (FAVOR+).

        phi(x) = exp(w x' - |x'|^2 / 2) / sqrt(M)        x' = x / D^(1/4), w [M, D]
        mean of phi(q) . phi(k) over draws of w = exp(q . k / sqrt(D))

    (Choromanski et al., "Rethinking Attention with Performers", 2021.) The rows of w are drawn from
    the stream `params` of `rngs` and kept in the variable `random_features` [M, D], which is not
    trained, until `redraw`. A state of nnx.MultiHeadAttention loads with nnx.update, which leaves
    that variable as it is. A checkpoint has to hold it beside the nnx.Params: without it, a layer
    of another seed keeps its own features and gives other results. Masks and decoding are those of
    `LinearAttention`.

    Args:
      num_heads: H, the number of query heads.
      in_features: Size of `inputs_q`.
      qkv_features: Size of all query heads together, H D; in_features unless given.
      out_features: Size of the outputs; in_features unless given.
      num_kv_heads: G, the number of key/value heads, which divides H; H unless given.
      in_kv_features: Size of `inputs_k` and `inputs_v`; in_features unless given.
      num_features: M. The error of the weights falls as 1 / sqrt(M). D log D, rounded up, unless
        given.
      causal: Query i sees the keys up to i (T = S).
      rope_theta: Base of the rotary positions (10000 in RoFormer) of queries and keys; None for
        none. It needs an even D.
      context_axis: As in `LinearAttention`.
      implementation: A backend of `ato_jax.linear_attention` by name; None takes the fastest.
      rngs: Random keys: the stream `params` for the parameters and w.
      **options: Other constructor arguments of nnx.MultiHeadAttention, such as dtype, param_dtype,
        precision, use_bias, normalize_qk, decode, kernel_init and kernel_metadata. `attention_fn`
        is refused, as are `dropout_rate`,
        `feature_map` and `normalize`.

    Raises:
      ValueError: An argument has a wrong type or value. The message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> import ato_jax.nn
      >>> from flax import nnx
      >>> layer = ato_jax.nn.Performer(
      ...     num_heads=4, in_features=16, num_features=32, rngs=nnx.Rngs(0)
      ... )
      >>> layer(jnp.ones((2, 8, 16))).shape  # [B, T, in_features] -> [B, T, out_features]
      (2, 8, 16)
      >>> layer.random_features.shape
      (32, 4)
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
        num_features: int | None = None,
        causal: bool = False,
        rope_theta: float | None = None,
        context_axis: AxisName | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        taken = sorted({"feature_map", "normalize"} & set(options))
        if taken:
            raise ValueError(f"{taken[0]} cannot be given: it is what makes a Performer")
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            causal=causal,
            rope_theta=rope_theta,
            context_axis=context_axis,
            implementation=implementation,
            rngs=rngs,
            **options,
        )
        if num_features is None:
            num_features = max(1, math.ceil(self.head_dim * math.log(self.head_dim)))
        drawn = favor(rngs.params(), num_features, self.head_dim)
        self.random_features = RandomFeatures(drawn.projection)

    def _features(self) -> tuple[FeatureMapLike, int]:
        return Favor(self.random_features[...]), self.random_features.shape[0]

    def redraw(self, rngs: nnx.Rngs) -> None:
        """Draws the random features anew; also inside jit.

        In a stack of layers, as nnx.vmap makes it, each layer gets its own. A cache has to be made
        again by `init_cache` afterwards.

        Args:
          rngs: Random keys: the stream `params`.

        Raises:
          ValueError: `rngs` is no nnx.Rngs with such a stream.

        Example:
          >>> import ato_jax.nn
          >>> from flax import nnx
          >>> layer = ato_jax.nn.Performer(num_heads=4, in_features=16, rngs=nnx.Rngs(0))
          >>> before = layer.random_features[...]
          >>> layer.redraw(nnx.Rngs(1))
          >>> bool((layer.random_features[...] == before).any())
          False
        """
        refuse_rngs_without("params", rngs)
        *stack, num_features, head_dim = self.random_features.shape

        def draw(key: jax.Array) -> jax.Array:
            return favor(key, num_features, head_dim).projection

        for _ in stack:
            draw = jax.vmap(draw)
        key = rngs.params()
        self.random_features[...] = draw(jax.random.split(key, tuple(stack)) if stack else key)
