"""The part of an attention layer around the attention: projections, positions, and the call.

    q = query(x) [B, T, H, D]    k, v = key(y), value(y) [B, S, G, D]    z = out(attend(q, k, v))

`MultiHead` is an nnx.MultiHeadAttention: Flax builds its parameters (`query`, `key`, `value`,
`out`, with `normalize_qk` also `query_ln` and `key_ln`), so constructor arguments, dtypes,
initialisers and metadata are those of Flax. `MultiHead` replaces the call. A layer on top of it
writes one method,

    def attend(self, call: Call) -> jax.Array      # [B, T, H, V]

`Call` has the projected and rotated q, k and v with one batch axis B, whatever the batch axes of
the inputs, the inputs themselves (for gates), the mask as given (for `masks`), and the options of
the call.

A cache consists of `nnx.Cache` attributes, `nnx.data(None)` until `init_cache` makes them. Every
layer has `cache_index`, the number of tokens in its cache: positions continue from it, unless a
layer overrides `_held` because its sequences differ in length. The call restores the caches if
`attend` raises an error.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from ato_jax import programs, shapes
from ato_jax.nn.arguments import (
    Mask,
    Sharding,
    as_decode,
    as_dropout_rate,
    dropout_key,
    optional_flag,
    refuse_beside_context,
    refuse_no_array,
    refuse_no_dtype,
    refuse_no_parts,
    refuse_no_sharding,
    refuse_rngs_without,
    refuse_unknown,
)
from ato_jax.nn.caches import caches_restored, made
from ato_jax.nn.call import Call, as_segment_ids, one_batch_axis
from ato_jax.nn.rotary import as_positions, positions_in_segments, positions_over_devices, rotate
from ato_jax.ops.common import Integers, precision_of
from ato_jax.parallel.devices import AxisName, check_axis, devices_along
from ato_jax.parallel.order import positions


class MultiHead(nnx.MultiHeadAttention):
    """The part of an attention layer around the attention: see the module's docstring.

    Args:
      num_heads: H, the number of query heads.
      in_features: Size of `inputs_q`.
      qkv_features: Size of all query heads together, H D; in_features unless given.
      out_features: Size of the outputs; in_features unless given.
      num_kv_heads: G, the number of key/value heads, which divides H; H unless given.
      in_kv_features: Size of `inputs_k` and `inputs_v`; in_features unless given.
      causal: Query i sees the keys up to i (T = S).
      rope_theta: Base of the rotary positions (10000 in RoFormer) of queries and keys; None for
        none. It needs an even D.
      context_axis: The axis of the `jax.shard_map` around the call that cuts T and S, as in
        `ato_jax.parallel`: each device gives its own tokens and gets their outputs. None for whole
        sequences. Masks and `decode` are refused with it.
      implementation: A backend of `ato_jax.attention` by name; None takes the fastest.
      rngs: Random keys: the stream `params` for the parameters.
      **options: Other constructor arguments of nnx.MultiHeadAttention, such as dtype, param_dtype,
        precision, use_bias, normalize_qk, decode, kernel_init and kernel_metadata. `attention_fn`
        is refused.

    Raises:
      ValueError: An argument has a wrong type or value. The message names it.
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
        causal: bool = False,
        rope_theta: float | None = None,
        context_axis: AxisName | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if "attention_fn" in options:
            raise ValueError(
                f"attention_fn cannot be given: {type(self).__name__} brings its own attention"
            )
        refuse_unknown(type(self), options)
        for name, size in (
            ("num_heads", num_heads),
            ("in_features", in_features),
            ("qkv_features", qkv_features),
            ("out_features", out_features),
            ("num_kv_heads", num_kv_heads),
            ("in_kv_features", in_kv_features),
        ):
            if size is not None or name in ("num_heads", "in_features"):
                shapes.positive_int(name, size)
        if (qkv_features or in_features) % num_heads:
            raise ValueError(
                "qkv_features must be divisible by num_heads, "
                f"got {qkv_features or in_features} and {num_heads}"
            )
        for name in ("use_bias", "normalize_qk", "keep_rngs", "broadcast_dropout"):
            shapes.flag(name, options.get(name, True))
        refuse_no_parts(options)
        as_decode(options.get("decode"))
        optional_flag("deterministic", options.get("deterministic"))
        precision_of(options.get("precision"), "float32")
        refuse_no_dtype(dtype=options.get("dtype"), param_dtype=options.get("param_dtype"))
        refuse_rngs_without("params", rngs)
        as_dropout_rate(options.get("dropout_rate", 0.0), options.get("keep_rngs", True), rngs)
        super().__init__(
            num_heads=num_heads,
            in_features=in_features,
            qkv_features=qkv_features,
            out_features=out_features,
            num_kv_heads=num_kv_heads,
            in_kv_features=in_kv_features,
            rngs=rngs,
            **options,
        )
        if rope_theta is not None and self.head_dim % 2:
            raise ValueError(
                "rope_theta rotates pairs and needs an even qkv_features // num_heads, "
                f"got {self.head_dim}"
            )
        self.causal = shapes.flag("causal", causal)
        self.rope_theta = None if rope_theta is None else shapes.positive("rope_theta", rope_theta)
        if context_axis is not None:
            check_axis(context_axis, "context_axis")
        self.context_axis = context_axis
        self.context_order = "contiguous"
        self.implementation = implementation

    def attend(self, call: Call) -> jax.Array:
        """The attention itself, [B, T, H, V]: what a subclass implements."""
        raise NotImplementedError(f"{type(self).__name__} has no attention of its own")

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
        segment_ids: Integers | None = None,
        out_sharding: Sharding | None = None,
        qkv_sharding: Sharding | None = None,
    ) -> jax.Array:
        """Computes the attention of `inputs_q` to `inputs_k` and `inputs_v`.

        Args:
          inputs_q: [batch..., T, in_features].
          inputs_k: [batch..., S, in_kv_features]; inputs_q unless given.
          inputs_v: [batch..., S, in_kv_features]; inputs_k unless given.
          mask: Booleans that broadcast to [batch..., H, T, S]; False or 0 hides a key. A mask to be
            added to the scores is refused, except inside jit, where its values are not known. The
            class says which masks it honours, and what they mean with `decode`.
          deterministic: Whether to drop nothing; None takes the constructor's value.
          rngs: Random keys for dropout; None takes the layer's own.
          sow_weights: Must be False: the weights are never formed.
          decode: Append to the cache and attend to all tokens in it; None takes the constructor's
            value, and False where that is None.
          is_causal: Query i sees the keys up to i in this call (T = S).
          input_positions: [batch..., T], the positions for `rope_theta`, of queries and keys alike
            (T = S). None counts from 0 in each segment, or from the number of tokens in the cache.
          segment_ids: Integers [batch..., T], the document of each token, of queries and keys alike
            (T = S): only equal ids see each other, and no state passes from one to the next. Each
            document is one contiguous run. Refused with `decode`.
          out_sharding: Sharding of the result, as in nnx.LinearGeneral.
          qkv_sharding: Sharding of the projected queries, keys and values.

        Returns:
          [batch..., T, out_features]. A query that sees no key has 0 before the last projection;
          nnx.MultiHeadAttention gives it the mean of all values there.

        Raises:
          ValueError: An argument has a wrong shape, type or value, the layer cannot honour `mask`,
            or `decode` has no cache, or one without room. The cache is then as it was.
          UnsupportedError: The backend `implementation` does not support the call.
        """
        if shapes.flag("sow_weights", sow_weights):
            raise ValueError(
                "sow_weights must be False: the attention weights are never formed. "
                "nnx.MultiHeadAttention holds the same parameters and can show them"
            )
        if inputs_k is None:
            if inputs_v is not None:
                raise ValueError("inputs_v needs inputs_k: give it, or leave both to inputs_q")
            inputs_k = inputs_q
        inputs_v = inputs_k if inputs_v is None else inputs_v
        refuse_no_array("inputs_q", inputs_q)
        batch = inputs_q.shape[:-2]
        refuse_no_sharding(out_sharding=out_sharding, qkv_sharding=qkv_sharding)
        for name, inputs, features in (
            ("inputs_q", inputs_q, self.in_features),
            ("inputs_k", inputs_k, self.in_kv_features),
            ("inputs_v", inputs_v, self.in_kv_features),
        ):
            refuse_no_array(name, inputs)
            fits = inputs.ndim >= 2 and inputs.shape[-1] == features and inputs.shape[:-2] == batch
            if not fits:
                wanted, beside = f"{name} must be [batch..., length, {features}]", ""
                if inputs is not inputs_q:
                    wanted += " with inputs_q's batch axes"
                    beside = f", where inputs_q has {inputs_q.shape}"
                raise ValueError(f"{wanted}, got shape {inputs.shape}{beside}")
        decode = as_decode(self.decode if decode is None else decode)
        causal = shapes.flag("is_causal", is_causal) or self.causal
        T, S = inputs_q.shape[-2], inputs_k.shape[-2]
        if T != S and (causal or decode):
            asked = "decode" if decode else "causal attention"
            raise ValueError(f"{asked} needs as many keys as queries, got T={T}, S={S}")
        ids = as_segment_ids(segment_ids, batch, T, S, decode)
        if self.context_axis is not None:
            instead = "causal, segment_ids or a window"
            refuse_beside_context(self.context_axis, mask, decode, instead)

        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query = programs.promoting_ranks(self.query_ln)(query)
            key = programs.promoting_ranks(self.key_ln)(key)
        query, key, value = promote_dtype((query, key, value), dtype=self.dtype)
        query, key, value = (one_batch_axis(array, 3) for array in (query, key, value))
        if self.rope_theta is None:
            if input_positions is not None:
                raise ValueError("input_positions need a rope_theta: this layer rotates nothing")
        else:
            if input_positions is None and ids is not None and self.context_axis is None:
                q_positions = k_positions = positions_in_segments(ids)
            elif input_positions is None and ids is not None and self.context_order == "contiguous":
                devices = devices_along(self.context_axis, "context_axis")
                q_positions = k_positions = positions_over_devices(ids, devices)
            else:
                q_positions, k_positions = self._positions(input_positions, batch, T, S, decode)
            query = rotate(query, q_positions, self.rope_theta)
            key = rotate(key, k_positions, self.rope_theta)

        call = Call(
            query,
            key,
            value,
            one_batch_axis(inputs_q, 2),
            one_batch_axis(inputs_k, 2),
            batch,
            mask,
            causal,
            decode,
            dropout_key(self, deterministic, rngs),
            ids,
        )
        with caches_restored(self):
            x = self.attend(call)
            if len(batch) != 1:
                x = x.reshape(*batch, *x.shape[1:])
            return self.out(x, out_sharding=out_sharding)

    def _positions(
        self, given: jax.Array | None, batch: tuple[int, ...], T: int, S: int, decode: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Positions of the queries [B|1, T] and of the keys [B|1, S]."""
        if given is not None:
            given = as_positions(given)
            wanted = (*batch, T)
            if given.shape != wanted or T != S:
                raise ValueError(
                    f"input_positions must be {wanted} and T = S, got shape {given.shape}, "
                    f"T={T}, S={S}"
                )
            given = one_batch_axis(given, 1)
            return given, given
        if self.context_axis is not None:
            devices = devices_along(self.context_axis, "context_axis")
            found = (
                positions(self.context_order, devices.index, devices.count, rows)[None]
                for rows in (T, S)
            )
            return next(found), next(found)
        first = self._held() if decode else 0
        rows, columns = (jnp.arange(size, dtype=jnp.int32)[None] for size in (T, S))
        return first + rows, first + columns

    def _held(self) -> jax.Array:
        """The number of tokens in the cache: a scalar, or [B, 1] if sequences differ."""
        return made(self.cache_index)[...]
