"""Linear attention as layers, with nnx.MultiHeadAttention's parameters.

    w[i,j] = phi(query(x_i)) . phi(key(y_j))        out_i = sum_j w[i,j] value(y_j) / sum_j w[i,j]

`LinearAttention` takes any elementwise phi, `Performer` the random features for which w estimates
the weights of softmax attention. What they remember of a sequence has one size, however long it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ato_jax import shapes
from ato_jax.nn.common import (
    Call,
    MultiHead,
    as_implementation,
    as_input_shape,
    blank_steps,
    factor_mask,
    hide_inputs,
    hide_keys,
    hide_queries,
    made,
    optional_flag,
    refuse_no_dtype,
    refuse_rngs_without,
)
from ato_jax.ops.linear_attention.api import OP, linear_attention
from ato_jax.ops.linear_attention.features import Favor, favor, resolve
from ato_jax.ops.linear_attention.spec import LinearState
from ato_jax.ops.linear_attention.step import linear_attention_step


class LinearAttention(MultiHead):
    """Attention in time linear in T and S; loads nnx.MultiHeadAttention's checkpoints.

    Args:
      num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features, rngs and
        every name in `options` (dtype, normalize_qk, kernel_metadata, ...): as in
        nnx.MultiHeadAttention. `attention_fn` is refused, and so is a `dropout_rate`: there are no
        weights to drop; nnx.Dropout after the layer is the usual place.
      feature_map: phi, as in `ato_jax.linear_attention`: a name or an elementwise JAX function.
      causal: query i sees the keys up to i.
      normalize: as in `ato_jax.linear_attention`; None divides where phi is known not to be
        negative.
      rope_theta, implementation: as in `MultiHead`; the rotation comes before phi.

    Surprises:
      - A mask may be causal, or hide keys for all queries alike, [batch..., 1, 1, S], with holes
        anywhere; queries of padding give 0 before the last projection. Any other is a ValueError,
        and inside jit so is every mask with an axis of queries, whose values nobody knows there.
      - decode=True takes any number of tokens, causal among themselves: a prompt first, then one
        token at a time. Its mask is one over these tokens, not over a cache: there is no such
        thing as the keys of earlier tokens any more.
      - A single token is multiplied exactly, whatever `precision` says of prompts; it takes the
        fastest way only where `implementation` is None.
      - The cache is a state of sums, float32 whatever `init_cache`'s dtype, and never full.
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
        feature_map: Any = "elu1",
        causal: bool = False,
        normalize: bool | None = None,
        rope_theta: float | None = None,
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
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            causal=causal,
            rope_theta=rope_theta,
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

    def _features(self) -> tuple[Any, int]:
        """phi and its number of features."""
        return self.feature_map, self.head_dim

    def decay(self, call: Call) -> jax.Array | None:
        """The log-decay of the call's keys, [G], [B, S, G] or [B, S, G, D]; None for none.

        That of a hidden step is ignored if it is one by steps: no time passes there.
        """
        return None

    def _finish(self, out: jax.Array, call: Call) -> jax.Array:
        """What comes between the attention and the last projection, both [B, T, H, V]."""
        return out

    def attend(self, call: Call) -> jax.Array:
        visible = factor_mask(call._replace(causal=call.causal or call.decode))
        call = hide_inputs(call, visible)
        feature_map, _ = self._features()
        key, value, feature_map = hide_keys(call.key, call.value, visible.keys, feature_map)
        decay = self.decay(call)
        if decay is not None and decay.ndim > 1 and visible.keys is not None:
            decay = blank_steps(decay, visible.keys)
        options: dict[str, Any] = {"feature_map": feature_map, "normalize": self.normalize}
        if not call.decode:
            out = linear_attention(
                call.query,
                key,
                value,
                decay=decay,
                causal=visible.causal,
                precision=self.precision,
                implementation=self.implementation,
                **options,
            )
        else:
            state = self._state(call)
            # The step is exact, and chooses its backend itself: one that is named runs as it would
            # for a prompt.
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
        """The cache with a single batch axis."""
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

    def init_cache(self, input_shape: Sequence[int], dtype: Any = jnp.float32) -> None:
        """Makes an empty cache for inputs of shape [batch..., length, features].

        Of the shape only the batch matters, and `dtype` not at all: they are there so that a model
        can make the caches of all its layers alike. The state is float32, of one size.
        """
        features = self._features()[1]
        refuse_no_dtype(dtype=dtype)
        shape = (*as_input_shape(input_shape, self.in_features)[:-2], self.num_kv_heads, features)
        self.cached_kv = nnx.Cache(jnp.zeros((*shape, self.head_dim), jnp.float32))
        self.cached_k_sum = nnx.Cache(jnp.zeros(shape, jnp.float32))
        self.cache_index = nnx.Cache(jnp.array(0, jnp.int32))


class RandomFeatures(nnx.Variable):
    """What a `Performer` has drawn: saved and restored with the model, not trained."""


class Performer(LinearAttention):
    """FAVOR+ (Choromanski et al., 2021): linear attention that approximates softmax attention.

    phi(x) = exp(w x' - |x'|^2 / 2) / sqrt(M), x' = x / D^(1/4), with M random rows w, so that the
    mean of phi(q) . phi(k) over the draws is exp(q . k / sqrt(D)).

    Args:
      num_features: M; the error falls as 1 / sqrt(M). D log D, rounded up, unless given.
      All others: as in `LinearAttention`, less `feature_map` and `normalize`.

    Surprises:
      - The rows are drawn from the stream `params` of `rngs`, lie in the variable `random_features`
        [M, D], a `RandomFeatures` and no nnx.Param, and stay until `redraw`. They belong to this
        layer: a state of nnx.MultiHeadAttention loads by nnx.update, which leaves them alone.
      - A cache is worth nothing after `redraw`: call `init_cache` again.
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
            implementation=implementation,
            rngs=rngs,
            **options,
        )
        if num_features is None:
            num_features = max(1, math.ceil(self.head_dim * math.log(self.head_dim)))
        drawn = favor(rngs.params(), num_features, self.head_dim)
        self.random_features = RandomFeatures(drawn.projection)

    def _features(self) -> tuple[Any, int]:
        return Favor(self.random_features[...]), self.random_features.shape[0]

    def redraw(self, rngs: nnx.Rngs) -> None:
        """Draws the features anew, from the stream `params` of `rngs`; also inside jit.

        Of a stack of layers, as nnx.vmap makes them, each has its own.
        """
        refuse_rngs_without("params", rngs)
        *stack, num_features, head_dim = self.random_features.shape

        def draw(key: jax.Array) -> jax.Array:
            return favor(key, num_features, head_dim).projection

        for _ in stack:
            draw = jax.vmap(draw)
        key = rngs.params()
        self.random_features[...] = draw(jax.random.split(key, tuple(stack)) if stack else key)
