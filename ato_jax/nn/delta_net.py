"""The base class of the layers on the delta rule, gated DeltaNet and Kimi Delta Attention.

    q, k, v = silu(conv(query(x))), silu(conv(key(x))), silu(conv(value(x)))
    beta_t  = sigmoid(write(x_t))            decay_t = -exp(A_log) softplus(f(x_t) + dt_bias)
    S_t     = (I - beta_t k_t k_t^T) diag(exp(decay_t)) S_{t-1} + beta_t k_t v_t^T
    z_t     = out(rms_norm(D**-0.5 q_t S_t) * act(g(x_t)))                q, k of length 1

conv is causal, over `conv_size` tokens, each channel for itself. The parameters are

    query, key              kernel [in_features, G, D]
    value                   kernel [in_features, H, V]
    conv_query, conv_key    [conv_size, G, D]
    conv_value              [conv_size, H, V]
    write                   kernel [in_features, H]
    A_log, dt_bias          [H], [H]; of KimiDeltaAttention [H], [H, D]
    norm                    scale [V]
    out                     kernel [H, V, out_features]

and, of each class, those of f and g, which `delta_layers.py` lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from ato_jax import meshes, programs, shapes
from ato_jax.nn.arguments import (
    Mask,
    Sharding,
    as_decode,
    as_implementation,
    as_input_shape,
    refuse_beside_context,
    refuse_no_array,
    refuse_no_dtype,
    refuse_no_initialiser,
    refuse_no_sharding,
    refuse_rngs_without,
)
from ato_jax.nn.caches import caches_restored, made
from ato_jax.nn.call import Call, as_segment_ids, one_batch_axis
from ato_jax.nn.convolution import convolve, from_device_ahead, tail, visible_first
from ato_jax.nn.masks import blank_steps, factor_mask
from ato_jax.ops.common import Integers, precision_of
from ato_jax.ops.delta_rule.api import OP, gated_delta_rule
from ato_jax.ops.delta_rule.step import gated_delta_rule_step
from ato_jax.parallel import delta_rule as parallel
from ato_jax.parallel.devices import AxisName, check_axis


def conv_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Uniform within 1 / sqrt(conv_size), as PyTorch draws a convolution of single channels."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def rate_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """The logarithm of a rate between 1 and 16."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0)).astype(dtype)


def step_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """A bias whose softplus is between 0.001 and 0.1, its logarithm uniform."""
    low, high = math.log(1e-3), math.log(0.1)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


class DeltaNet(nnx.Module):
    """What both layers share; a subclass has the gates f and g."""

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        out_features: int | None = None,
        *,
        num_key_heads: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        conv_size: int = 4,
        negative_eigenvalues: bool = False,
        norm_epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        conv_kernel_init: Initializer = conv_init,
        a_log_init: Initializer = rate_init,
        dt_bias_init: Initializer = step_init,
        norm_scale_init: Initializer = nnx.initializers.ones,
        decode: bool | None = None,
        context_axis: AxisName | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        refuse_rngs_without("params", rngs)
        as_decode(decode)
        refuse_no_dtype(dtype=dtype, param_dtype=param_dtype)
        refuse_no_initialiser(
            kernel_init=kernel_init,
            conv_kernel_init=conv_kernel_init,
            a_log_init=a_log_init,
            dt_bias_init=dt_bias_init,
            norm_scale_init=norm_scale_init,
        )
        self.num_heads = shapes.positive_int("num_heads", num_heads)
        self.num_key_heads = shapes.positive_int(
            "num_key_heads", num_heads if num_key_heads is None else num_key_heads
        )
        if num_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads must divide num_heads={num_heads}, got {num_key_heads}"
            )
        self.in_features = shapes.positive_int("in_features", in_features)
        self.out_features = shapes.positive_int(
            "out_features", in_features if out_features is None else out_features
        )
        if key_size is None and in_features % num_heads:
            raise ValueError(
                f"key_size must be given where num_heads={num_heads} does not divide "
                f"in_features={in_features}"
            )
        self.key_size = shapes.positive_int(
            "key_size", in_features // num_heads if key_size is None else key_size
        )
        self.value_size = shapes.positive_int(
            "value_size", self.key_size if value_size is None else value_size
        )
        self.conv_size = shapes.positive_int("conv_size", conv_size)
        self.negative_eigenvalues = shapes.flag("negative_eigenvalues", negative_eigenvalues)
        self.dtype = dtype
        self.param_dtype = param_dtype
        precision_of(precision, "float32")
        self.precision = precision
        self.decode = decode
        if context_axis is not None:
            check_axis(context_axis, "context_axis")
        self.context_axis = context_axis
        self.implementation = as_implementation(OP, implementation)
        self._kernel_init = kernel_init
        G, H, D, V = self.num_key_heads, self.num_heads, self.key_size, self.value_size
        self.query, self.key = (self._projection(in_features, (G, D), rngs) for _ in range(2))
        self.value = self._projection(in_features, (H, V), rngs)
        self.conv_query, self.conv_key, self.conv_value = (
            nnx.Param(conv_kernel_init(rngs.params(), (conv_size, *size), param_dtype))
            for size in ((G, D), (G, D), (H, V))
        )
        self.write = self._projection(in_features, H, rngs)
        self.A_log = nnx.Param(a_log_init(rngs.params(), (H,), param_dtype))
        self.dt_bias = nnx.Param(dt_bias_init(rngs.params(), self._gate_shape(), param_dtype))
        self.norm = nnx.RMSNorm(
            V,
            epsilon=shapes.positive("norm_epsilon", norm_epsilon),
            dtype=dtype,
            param_dtype=param_dtype,
            scale_init=norm_scale_init,
            rngs=rngs,
        )
        self.out = self._projection((H, V), self.out_features, rngs)
        self._add_gates(rngs)
        self.cached_state: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.cached_tail: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[jax.Array] | None = nnx.data(None)

    def _projection(
        self,
        source: int | tuple[int, ...],
        target: int | tuple[int, ...],
        rngs: nnx.Rngs,
        use_bias: bool = False,
    ) -> nnx.LinearGeneral:
        return nnx.LinearGeneral(
            source,
            target,
            axis=(-2, -1) if isinstance(source, tuple) else -1,
            kernel_init=self._kernel_init,
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            rngs=rngs,
        )

    def _add_gates(self, rngs: nnx.Rngs) -> None:
        """Makes the projections of f and g."""
        raise NotImplementedError

    def _gate_shape(self) -> tuple[int, ...]:
        """The shape of a step's decay: (H,) or (H, D)."""
        raise NotImplementedError

    def _forget(self, inputs: jax.Array) -> jax.Array:
        """f [B, T, H] or [B, T, H, D]."""
        raise NotImplementedError

    def _gated(self, out: jax.Array, inputs: jax.Array) -> jax.Array:
        """The normalised output [B, T, H, V] times its gate."""
        raise NotImplementedError

    def decay(self, inputs: jax.Array) -> jax.Array:
        """The natural logarithm of each step's factor, float32.

        Args:
          inputs: [B, T, in_features].

        Returns:
          [B, T, H], of KimiDeltaAttention [B, T, H, D].
        """
        bias, log_rate = (x[...].astype(jnp.float32) for x in (self.dt_bias, self.A_log))
        steps = self._forget(inputs).astype(jnp.float32) + bias[None, None]
        rate = jnp.exp(jnp.expand_dims(log_rate, (0, 1, *range(3, steps.ndim))))
        return -rate * jax.nn.softplus(steps)

    def __call__(
        self,
        inputs_q: jax.Array,
        *,
        mask: Mask | None = None,
        decode: bool | None = None,
        segment_ids: Integers | None = None,
        out_sharding: Sharding | None = None,
    ) -> jax.Array:
        """Computes the layer's output for `inputs_q`, a token from itself and those ahead of it.

        Args:
          inputs_q: [batch..., T, in_features].
          mask: Booleans that broadcast to [batch..., H, T, T] and hide steps for all alike,
            [batch..., 1, 1, T]; they may be causal besides. A hidden step writes nothing, does not
            decay the state, is skipped by the convolutions, and has output 0 before the
            last projection, NaN in it or not.
          decode: Continue the cache; None takes the constructor's value, and False where that is
            None. The mask then covers this call's tokens.
          segment_ids: Integers [batch..., T], the document of each token: each is one contiguous
            run, and nothing passes from one to the next. Refused with `decode`.
          out_sharding: Sharding of the result, as in nnx.LinearGeneral.

        Returns:
          [batch..., T, out_features].

        Raises:
          ValueError: An argument has a wrong shape, type or value, the mask is no mask of steps, or
            `decode` has no cache. The cache is then as it was.
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
        decode = as_decode(self.decode if decode is None else decode)
        ids = as_segment_ids(segment_ids, tuple(batch), T, T, decode)
        if self.context_axis is not None:
            refuse_beside_context(self.context_axis, mask, decode, "segment_ids")
        inputs = one_batch_axis(inputs_q, 2)  # [B, T, in_features]
        visible = self._visible(inputs, tuple(batch), mask, decode)
        if T == 0:
            visible = ids = None  # no step to hide, and none that belongs to a segment
        if visible is not None:
            inputs = blank_steps(inputs, visible)
        with caches_restored(self):
            out = self._attend(inputs, tuple(batch), visible, ids, decode)  # [B, T, H, V]
            out = self._gated(programs.promoting_ranks(self.norm)(out), inputs)
            if visible is not None:
                out = blank_steps(out, visible)
            return self.out(out.reshape(*batch, *out.shape[1:]), out_sharding=out_sharding)

    def _visible(
        self, inputs: jax.Array, batch: tuple[int, ...], mask: Mask | None, decode: bool
    ) -> jax.Array | None:
        """Which steps are visible, [B, T]; None for all."""
        if mask is None:
            return None
        B, T = inputs.shape[:2]
        heads = jax.ShapeDtypeStruct((B, T, self.num_heads, self.key_size), inputs.dtype)
        call: Any = (heads, heads, heads, inputs, inputs, batch, mask, True, decode, None)
        found = factor_mask(Call(*call))
        visible = jnp.ones((B, T), bool)
        for side in (found.queries, found.keys):
            visible = visible if side is None else visible & jnp.asarray(side)
        return visible

    def _attend(
        self,
        inputs: jax.Array,
        batch: tuple[int, ...],
        visible: jax.Array | None,
        ids: jax.Array | None,
        decode: bool,
    ) -> jax.Array:
        """The delta rule's output [B, T, H, V]; with `decode` it continues the cache."""
        tail_before, state = self._cached(batch) if decode else (None, None)
        query, key, value, tail_after = self._projected(inputs, visible, ids, tail_before)
        beta = jax.nn.sigmoid(self.write(inputs).astype(jnp.float32))  # [B, T, H]
        beta = 2 * beta if self.negative_eigenvalues else beta
        decay = self.decay(inputs)
        if visible is not None:
            beta, decay = blank_steps(beta, visible), blank_steps(decay, visible)
        if state is not None and inputs.shape[1] == 1 and self.implementation is None:
            q, k, v, beta, decay = (array[:, 0] for array in (query, key, value, beta, decay))
            out, state = gated_delta_rule_step(
                q, k, v, beta, state, decay=decay, normalize_qk=True
            )
            out = out[:, None]
        else:
            options: dict[str, Any] = {"segment_ids": ids}
            function: Any = gated_delta_rule
            if self.context_axis is not None:
                function, options["axis_name"] = parallel.gated_delta_rule, self.context_axis
            out = function(
                query,
                key,
                value,
                beta,
                decay=decay,
                normalize_qk=True,
                precision=self.precision,
                implementation=self.implementation,
                **(options | ({"initial_state": state, "return_state": True} if decode else {})),
            )
            out, state = out if decode else (out, None)
        if decode:
            self._remember(tail_after, state, inputs.shape[1])
        return out

    def _projected(
        self,
        inputs: jax.Array,
        visible: jax.Array | None,
        ids: jax.Array | None,
        before: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """q, k [B, T, G, D] and v [B, T, H, V], convolved, and the tokens that the next call's taps
        read, [B, conv_size - 1, C]."""
        projected = self.query(inputs), self.key(inputs), self.value(inputs)
        kernels = (self.conv_query[...], self.conv_key[...], self.conv_value[...])
        projected, kernels = (
            promote_dtype(arrays, dtype=self.dtype or projected[0].dtype)
            for arrays in (projected, kernels)
        )

        def partition() -> Any:
            names = [meshes.partition(array) for array in projected]
            of_tail = names[0][:1] if before is None else meshes.partition(before)
            return [meshes.sharded(*own) for own in (*names, of_tail)]

        query, key, value, after = meshes.call(
            self._convolved, [projected, kernels, visible, ids, before], partition
        )
        return query, key, value, after

    def _convolved(self, arrays: list[Any]) -> list[jax.Array]:
        """What `_projected` returns, of the projections and the kernels."""
        projected, kernels, visible, ids, before = arrays
        B, T = projected[0].shape[:2]
        sizes = [math.prod(array.shape[2:]) for array in projected]
        flat = [array.reshape(B, T, size) for array, size in zip(projected, sizes, strict=True)]
        x = jnp.concatenate(flat, axis=-1)
        kernel = jnp.concatenate([one.reshape(self.conv_size, -1) for one in kernels], axis=-1)
        order = None if visible is None else visible_first(visible)
        if order is not None:
            x, ids = order.apply(x), None if ids is None else order.apply(ids)
        reach = self.conv_size - 1
        if self.context_axis is not None:
            before = from_device_ahead(x, reach, self.context_axis)
        elif before is None:
            before = jnp.zeros((B, reach, x.shape[-1]), x.dtype)
        if ids is not None:
            ids_before = jnp.broadcast_to(ids[:, :1], (B, reach))
            if self.context_axis is not None:
                ids_before = from_device_ahead(ids, reach, self.context_axis)
            ids = jnp.concatenate([ids_before, ids], axis=1)
        after = tail(x, before, None if order is None else order.visible)
        x = jax.nn.silu(convolve(x, kernel, before, ids))
        x = x if order is None else order.undo(x)
        parts = jnp.split(x, (sizes[0], sizes[0] + sizes[1]), axis=-1)
        parts = [part.reshape(array.shape) for part, array in zip(parts, projected, strict=True)]
        return [*parts, after]

    def _channels(self) -> int:
        """C, the channels of all convolutions."""
        return 2 * self.num_key_heads * self.key_size + self.num_heads * self.value_size

    def _cached(self, batch: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """The cache with a single batch axis: the tail and the state."""
        held, state = made(self.cached_tail), made(self.cached_state)
        wanted = (*batch, self.num_heads, self.key_size, self.value_size)
        if state.shape != wanted:
            raise ValueError(
                f"the cache holds [batch..., H, D, V] = {state.shape}, but this call needs "
                f"{wanted}: call init_cache(input_shape) with this batch"
            )
        B = math.prod(batch)
        return (
            held[...].reshape(B, self.conv_size - 1, self._channels()),
            state[...].reshape(B, *wanted[-3:]),
        )

    def _remember(self, tail_after: jax.Array, state: jax.Array | None, T: int) -> None:
        held, kept, index = map(made, (self.cached_tail, self.cached_state, self.cache_index))
        assert state is not None
        held[...] = tail_after.astype(held.dtype).reshape(held.shape)
        kept[...] = state.reshape(kept.shape)
        index[...] += T

    def init_cache(self, input_shape: Sequence[int], dtype: Dtype = jnp.float32) -> None:
        """Makes an empty cache for decoding: a state of zeros, float32, and the convolutions' tail.

        Args:
          input_shape: [batch..., length, in_features]. Only the batch axes matter: the cache has
            one size for every length.
          dtype: Dtype of the tail, `conv_size` - 1 projected tokens.

        Raises:
          ValueError: An argument has a wrong type or value.

        Example:
          >>> import jax.numpy as jnp
          >>> import ato_jax.nn
          >>> from flax import nnx
          >>> layer = ato_jax.nn.GatedDeltaNet(num_heads=4, in_features=16, rngs=nnx.Rngs(0))
          >>> layer.init_cache((2, 32, 16))
          >>> prompt = layer(jnp.ones((2, 5, 16)), decode=True)
          >>> layer(jnp.ones((2, 1, 16)), decode=True).shape  # the 6th token
          (2, 1, 16)
        """
        batch = as_input_shape(input_shape, self.in_features)[:-2]
        refuse_no_dtype(dtype=dtype)
        state = (*batch, self.num_heads, self.key_size, self.value_size)
        self.cached_state = nnx.Cache(jnp.zeros(state, jnp.float32))
        self.cached_tail = nnx.Cache(
            jnp.zeros((*batch, self.conv_size - 1, self._channels()), dtype)
        )
        self.cache_index = nnx.Cache(jnp.array(0, jnp.int32))

    def set_view(self, decode: bool | None = None) -> None:
        """Sets what `nnx.view(model, ...)` sets.

        Args:
          decode: As in the constructor; None leaves it.

        Raises:
          ValueError: The value is neither True, False nor None.
        """
        if decode is not None:
            self.decode = as_decode(decode)
