"""What the layers share: projections, rotary positions, masks, and the shape of a call.

    q = query(x) [B, T, H, D]    k, v = key(y), value(y) [B, S, G, D]    z = out(attend(q, k, v))

`MultiHead` is an nnx.MultiHeadAttention: its constructor, its parameters (`query`, `key`, `value`,
`out`, with `normalize_qk` also `query_ln` and `key_ln`), its dtypes, initialisers and metadata are
those of Flax because Flax builds them. It replaces the call. A layer on top of it writes one
method,

    def attend(self, call: Call) -> jax.Array      # [B, T, H, V]

and finds in `Call` everything with one batch axis B, whatever the batch axes of the inputs: the
projected and rotated q, k and v, the inputs they came from (for gates), the mask as it was given,
and what the call asks for. A mask is read by one of

    bind_mask(call.mask, call)     any mask, boolean [B|1, H|1, T|1, S|1]: for softmax attention
    factor_mask(call)              causal and [B, T] queries and [B, S] keys, or a ValueError: for
                                   linear attention, with `hide_keys`, `hide_inputs` and
                                   `hide_queries`

A cache is a handful of `nnx.Cache` attributes, `nnx.data(None)` until `init_cache` makes them.
`cache_index`, the number of tokens in it, is there in every layer: positions continue from it,
unless a layer whose sequences differ in length says otherwise in `_held`.
`made(self.cached_...)` is the variable, or the error that says to call `init_cache`, and `append`
puts tokens into caches that grow. What raises after that is undone: a call runs inside of
`caches_restored`, so that an error leaves the cache as it was.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from ato_jax import dispatch, shapes
from ato_jax.ops.common import precision_of
from ato_jax.ops.linear_attention.features import Favor


class Call(NamedTuple):
    """One call of a layer, its inputs projected and with a single batch axis."""

    query: jax.Array  # [B, T, H, D]
    key: jax.Array  # [B, S, G, D]
    value: jax.Array  # [B, S, G, D]
    inputs_q: jax.Array  # [B, T, in_features]
    inputs_k: jax.Array  # [B, S, in_kv_features]
    batch: tuple[int, ...]  # the batch axes that became B
    mask: Any  # as given, broadcastable to [batch..., H, T, S]
    causal: bool
    decode: bool
    dropout_key: jax.Array | None  # None: nothing is dropped


class MultiHead(nnx.MultiHeadAttention):
    """The part of an attention layer around the attention: see the module's docstring.

    Args:
      num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features, rngs and
        every name in `options`: as in nnx.MultiHeadAttention, which they go to.
      causal: query i sees the keys up to i, T = S.
      rope_theta: rotates queries and keys by their positions, with this base (10000 in RoFormer);
        None leaves them. The halves of a head are paired as in nnx.RoPE.
      implementation: as in `ato_jax.attention` and `ato_jax.linear_attention`.
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
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if "attention_fn" in options:
            raise ValueError(
                f"attention_fn cannot be given: {type(self).__name__} brings its own attention"
            )
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
        self.implementation = implementation

    def attend(self, call: Call) -> jax.Array:
        """The attention itself: [B, T, H, V]."""
        raise NotImplementedError(f"{type(self).__name__} has no attention of its own")

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: Any = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
    ) -> jax.Array:
        """Attention of `inputs_q` to `inputs_k` and `inputs_v`.

        Args:
          inputs_q: [batch..., T, in_features].
          inputs_k: [batch..., S, in_kv_features]; None means inputs_q.
          inputs_v: [batch..., S, in_kv_features]; None means inputs_k.
          mask: broadcastable to [batch..., H, T, S]; False or 0 hides. A mask that is added to the
            scores is refused, but inside jit nobody can tell. Other than in Flax, a query that sees
            nothing gives 0 before the last projection, not the mean of all values.
          deterministic, rngs: as in Flax; they decide about dropout.
          sow_weights: refused: the weights are never formed.
          decode: append to the cache and attend to what is in it; None means the constructor's,
            and there False.
          is_causal: causal for this call.
          input_positions: [batch..., T] for `rope_theta`, of queries and keys alike, T = S; None
            counts from 0, or from the tokens already in the cache. Refused without `rope_theta`.
          out_sharding, qkv_sharding: as in Flax.

        Returns:
          [batch..., T, out_features].
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
                raise ValueError(
                    f"{name} must be [batch..., length, {features}] with inputs_q's batch axes, "
                    f"got shape {inputs.shape}, where inputs_q has {inputs_q.shape}"
                )
        decode = as_decode(self.decode if decode is None else decode)
        causal = shapes.flag("is_causal", is_causal) or self.causal
        T, S = inputs_q.shape[-2], inputs_k.shape[-2]
        if T != S and (causal or decode):
            asked = "decode" if decode else "causal attention"
            raise ValueError(f"{asked} needs as many keys as queries, got T={T}, S={S}")

        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        query, key, value = promote_dtype((query, key, value), dtype=self.dtype)
        query, key, value = (one_batch_axis(array, 3) for array in (query, key, value))
        if self.rope_theta is None:
            if input_positions is not None:
                raise ValueError("input_positions need a rope_theta: this layer rotates nothing")
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
        first = self._held() if decode else 0
        return first + jnp.arange(T)[None], first + jnp.arange(S)[None]

    def _held(self) -> jax.Array:
        """How many tokens are in the cache: a scalar, or [B, 1] where that differs."""
        return made(self.cache_index)[...]


def as_dropout_rate(rate: Any, keep_rngs: bool, rngs: nnx.Rngs) -> float:
    """`dropout_rate` of a constructor; a ValueError where `rngs` is kept and has nothing for it."""
    rate = shapes.static_number("dropout_rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be at least 0 and below 1, got {rate}")
    if rate and keep_rngs:
        refuse_rngs_without("dropout", rngs)
    return rate


def dropout_key(
    layer: Any, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
) -> jax.Array | None:
    """The key of a call's dropout; None where nothing is dropped.

    `layer` has the attributes of nnx.MultiHeadAttention: dropout_rate, deterministic and rngs.
    """
    deterministic = layer.deterministic if deterministic is None else deterministic
    optional_flag("deterministic", deterministic)
    if rngs is not None and not isinstance(rngs, nnx.RngStream | nnx.Rngs):
        raise ValueError(f"rngs must be an nnx.Rngs or an nnx.RngStream, got {rngs!r}")
    if not layer.dropout_rate:
        return None
    if deterministic is None:
        raise ValueError(
            "deterministic must be True or False where dropout_rate is above 0: give it to "
            "the call or to the constructor, or use model.train() and model.eval()"
        )
    if deterministic:
        return None
    stream = layer.rngs if rngs is None else rngs
    if stream is None:
        raise ValueError("rngs must be given for dropout where keep_rngs is False")
    if isinstance(stream, nnx.RngStream):
        return stream()
    refuse_rngs_without("dropout", stream, "an nnx.Rngs or an nnx.RngStream")
    return stream.dropout()


def refuse_no_array(name: str, inputs: Any) -> None:
    """A ValueError unless `inputs` is an array, of JAX or NumPy: a list has no shape to check."""
    is_array = hasattr(inputs, "shape") and hasattr(inputs, "ndim") and hasattr(inputs, "dtype")
    if not is_array or isinstance(inputs, jax.ShapeDtypeStruct | type):
        raise ValueError(f"{name} must be an array, got {inputs!r}")
    found = shapes.dtype_name(name, inputs)
    if not found.startswith(("bool", "int", "uint", "float", "bfloat")):
        raise ValueError(f"{name} must hold real numbers, got {found}")


def refuse_rngs_without(stream: str, rngs: Any, wanted: str = "an nnx.Rngs") -> None:
    """A ValueError unless `rngs` has that stream, or the one that stands for any."""
    if not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"rngs must be {wanted}, for example nnx.Rngs(0), got {rngs!r}")
    if not hasattr(rngs, stream):  # the stream `default` is every stream
        raise ValueError(f"rngs must have a stream {stream!r} or 'default', got {rngs!r}")


def optional_flag(name: str, value: Any) -> None:
    """A ValueError unless it is True, False or None."""
    if value is not None:
        shapes.flag(name, value)


def as_implementation(op: dispatch.Op, implementation: str | None) -> str | None:
    """`implementation` of a constructor; a ValueError unless the op has a backend of that name."""
    if implementation is not None:
        shapes.one_of("implementation", implementation, op.backends + op.planned)
    return implementation


def refuse_no_dtype(**dtypes: Any) -> None:
    """A ValueError for one that is neither None nor a dtype of floats, as JAX narrows it."""
    for name, dtype in dtypes.items():
        if dtype is None:
            continue
        try:
            named = isinstance(dtype, str | type | np.dtype)  # an array only has one
            floats = named and jnp.issubdtype(jax.dtypes.canonicalize_dtype(dtype), jnp.floating)
        except (TypeError, ValueError):
            floats = False
        if not floats:
            raise ValueError(f"{name} must be None or a dtype of floats, got {dtype!r}")


# Arguments of nnx.MultiHeadAttention that are functions or metadata.
_INITIALISERS = ("kernel_init", "out_kernel_init", "bias_init", "out_bias_init")
_PROMOTIONS = ("qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype")
_PRODUCTS = ("qkv_dot_general", "out_dot_general")
_PRODUCT_CLASSES = ("qkv_dot_general_cls", "out_dot_general_cls")
_METADATA = (
    *("kernel_metadata", "out_kernel_metadata", "bias_metadata", "out_bias_metadata"),
    *("query_ln_scale_metadata", "key_ln_scale_metadata"),
)
_OPTIONAL = (
    *("out_kernel_init", "out_bias_init", "out_kernel_metadata", "out_bias_metadata"),
    *(*_PRODUCTS, *_PRODUCT_CLASSES),
)


def refuse_no_parts(options: Mapping[str, Any]) -> None:
    """A ValueError for a function or metadata of nnx.MultiHeadAttention's that is none."""
    for name, value in options.items():
        if value is None and name in _OPTIONAL:
            continue
        if name in _INITIALISERS:
            refuse_no_initialiser(**{name: value})
        elif name in _PROMOTIONS:
            refuse_no_promotion(name, value)
        elif name in _PRODUCTS and not takes(value, "left", "right", "axes", precision=None):
            raise ValueError(
                f"{name} must be None or a function like jax.lax.dot_general, got {value!r}"
            )
        elif name in _PRODUCT_CLASSES and not (inspect.isclass(value) or takes(value)):
            raise ValueError(f"{name} must be None or a class of such functions, got {value!r}")
        elif name in _METADATA:
            named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
            if not named:
                raise ValueError(f"{name} must be a mapping of names to values, got {value!r}")


def refuse_no_initialiser(**initialisers: Any) -> None:
    """A ValueError for what cannot be called as Flax calls an initialiser."""
    for name, initialiser in initialisers.items():
        if not takes(initialiser, "key", "shape", "dtype"):
            raise ValueError(
                f"{name} must be a function of a key, a shape and a dtype, got {initialiser!r}"
            )


def refuse_no_promotion(name: str, promote_dtype: Any) -> None:
    """A ValueError for what cannot be called as Flax calls a `promote_dtype`."""
    if not takes(promote_dtype, "arrays", dtype=None):
        raise ValueError(
            f"{name} must be a function of a tuple of arrays and `dtype`, got {promote_dtype!r}"
        )


def takes(function: Any, *arguments: Any, **options: Any) -> bool:
    """Whether it is a function that can be called so, as far as its signature is known."""
    if not callable(function) or inspect.isclass(function):
        return False
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def refuse_no_key(name: str, key: Any) -> None:
    """A ValueError for what is no single random key of JAX; nothing is drawn."""
    shapes.draw(name, key, functools.partial(jax.eval_shape, jax.random.bits))


def refuse_no_sharding(**shardings: Any) -> None:
    """A ValueError for what is neither None nor a sharding that `out_sharding` of JAX takes."""
    for name, sharding in shardings.items():
        kinds = jax.sharding.NamedSharding | jax.sharding.PartitionSpec
        if sharding is not None and not isinstance(sharding, kinds):
            raise ValueError(
                f"{name} must be None, a NamedSharding or a PartitionSpec, got {sharding!r}"
            )


def as_input_shape(input_shape: Any, features: int) -> tuple[int, ...]:
    """`input_shape` of `init_cache`; a ValueError unless it is [batch..., length, features]."""
    shape = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    sizes = all(
        isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0
        for size in shape
    )
    if len(shape) < 2 or not sizes or shape[-1] != features:
        raise ValueError(
            f"input_shape must be (batch..., length, {features}), the shape of the inputs, "
            f"got {input_shape!r}"
        )
    return shape


def as_decode(decode: Any) -> bool:
    """`decode` of a constructor or a call, where None is False."""
    return decode is not None and shapes.flag("decode", decode)


def as_positions(positions: Any) -> jax.Array:
    """`input_positions` as a JAX array; a ValueError unless it holds numbers."""
    found = shapes.dtype_name("input_positions", positions)
    if not found.startswith(("int", "uint", "float", "bfloat")):
        raise ValueError(f"input_positions must hold integers or floats, got {found}")
    return shapes.as_array("input_positions", positions)


def made(variable: nnx.Cache[jax.Array] | None) -> nnx.Cache[jax.Array]:
    """A variable of a cache; a ValueError unless `init_cache` made it."""
    if variable is None:
        raise ValueError(
            "decode needs a cache: call init_cache(input_shape) first, with the shape "
            "[batch..., length, features] of the inputs"
        )
    return variable


@contextlib.contextmanager
def caches_restored(layer: nnx.Module) -> Iterator[None]:
    """What a layer holds in its cache is there again if the block raises.

    Whatever can be wrong with a mask, an option or a backend shows in the attention itself, when
    the tokens are already in the cache; a second try must not find them there.
    """
    caches = [cache for cache in vars(layer).values() if isinstance(cache, nnx.Cache)]
    before = [cache.get_value() for cache in caches]
    try:
        yield
    except BaseException:
        for cache, value in zip(caches, before, strict=True):
            cache.set_value(value)
        raise


def append(
    index: Any, batch: tuple[int, ...], **caches: tuple[Any, jax.Array]
) -> tuple[list[jax.Array], jax.Array]:
    """Puts a call's tokens into caches, and counts them in `index`.

    Args:
      index: `cache_index`.
      batch: the batch axes of the caches.
      caches: by the attributes' names, the variable [batch..., max_length, ...] and what to put
        into it, [B, T, ...].

    Returns:
      The caches as [B, max_length, ...], and how many tokens they held before.
    """
    index = made(index)
    held = index[...]
    found, T = [], 0
    for name, (cache, new) in caches.items():
        cache = made(cache)
        B, T, *sizes = new.shape
        max_length = cache.shape[len(batch)] if cache.ndim > len(batch) else 0
        if cache.shape != (*batch, max_length, *sizes) or cache.dtype != new.dtype:
            raise ValueError(
                f"{name} is {cache.shape} in {cache.dtype}, but this call appends "
                f"{(*batch, T, *sizes)} in {new.dtype}: call init_cache(input_shape, dtype) with "
                "this batch and this dtype"
            )
        at_least = 0 if isinstance(held, jax.core.Tracer) else int(held)
        if at_least + T > max_length:
            raise ValueError(
                f"the cache has room for {max_length} tokens and holds {at_least} or more: there "
                f"is none for {T} more. Call init_cache with a longer input_shape"
            )
        new = new.reshape(*batch, T, *sizes)
        cache[...] = jax.lax.dynamic_update_slice_in_dim(cache[...], new, held, len(batch))
        found.append(cache[...].reshape(B, max_length, *sizes))
    index[...] = held + T
    return found, held


def one_batch_axis(array: jax.Array, trailing: int) -> jax.Array:
    """[batch..., *trailing axes] -> [B, *trailing axes]."""
    if array.ndim == trailing + 1:
        return array
    return array.reshape(math.prod(array.shape[:-trailing]), *array.shape[-trailing:])


@functools.partial(jax.jit, static_argnames="theta", inline=True)  # one program, not a dozen
def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """RoPE: turns the pairs (x[d], x[d + D/2]) of x [B, T, H, D] by position * theta^(-2d/D).

    positions [B|1, T]. The angles and the product are float32, the result has x's dtype.
    """
    size = x.shape[-1]
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)  # [D/2]
    angles = (positions[..., None].astype(jnp.float32) * frequencies)[:, :, None]  # [B, T, 1, D/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def as_mask(mask: Any) -> Any:
    """A mask as it may be read: an array, of NumPy or JAX, whose zeros hide; None stays None.

    One that is added to the scores, 0 where a key is seen, would hide what it should show and show
    what it should hide. Inside jit its values are not known; it passes for one of 0 and 1, as Flax
    makes them in float32.
    """
    if mask is None:
        return None
    if isinstance(mask, nnx.Variable):
        mask = mask[...]
    shapes.refuse_masked("mask", mask)
    if not isinstance(mask, jax.Array):
        try:
            mask = np.asarray(mask)
        except ValueError as error:
            raise ValueError(f"mask must be an array of booleans, got {mask!r}") from error
    floating = jnp.issubdtype(mask.dtype, jnp.floating)
    boolean = mask.dtype == bool
    if not (floating or boolean or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise ValueError(f"mask must be an array of booleans, got one of {mask.dtype}")
    known = not isinstance(mask, jax.core.Tracer) and getattr(mask, "is_fully_addressable", True)
    if not boolean and known:
        values = np.asarray(mask)
        if floating and values.size and not values.any():
            raise ValueError(
                "mask must not hold zeros alone, got shape "
                f"{values.shape}: one that is added to the scores and hides nothing can be left "
                "out; to hide everything give booleans"
            )
        if not ((values == 0) | (values == 1)).all():
            raise ValueError(
                "mask must hold True and False, or 1 and 0, got values from "
                f"{float(values.min()):g} to {float(values.max()):g}: in place of one that "
                "is added to the scores give mask == 0"
            )
    return mask


def bind_mask(mask: Any, call: Call, S: int | None = None) -> Any:
    """A mask as booleans [B|1, H|1, T|1, S|1], as NumPy where it came so; None stays None.

    `S` is the number of keys where that is not the call's: in a cache.
    """
    mask = as_mask(mask)
    if mask is None:
        return None
    T, H = call.query.shape[1:3]
    S = call.key.shape[1] if S is None else S
    shape = (1,) * (len(call.batch) + 3 - mask.ndim) + mask.shape
    wanted = (*call.batch, H, T, S)
    fits = len(shape) == len(wanted) and all(
        size in (1, full) for size, full in zip(shape, wanted, strict=True)
    )
    if not fits:
        raise ValueError(
            f"mask must broadcast to [batch..., H, T, S] = {wanted}, got shape {mask.shape}"
        )
    mask = mask.astype(bool).reshape(shape)
    if all(size == 1 for size in shape[:-3]):
        return mask.reshape(1, *shape[-3:])
    numpy = np if isinstance(mask, np.ndarray) else jnp
    full = numpy.broadcast_to(mask, call.batch + shape[-3:])
    # Not -1, which means nothing where an axis is empty.
    return full.reshape(math.prod(call.batch), *shape[-3:])


class Visible(NamedTuple):
    """A mask in factors: query i sees key j iff queries[i], keys[j], and j <= i where causal."""

    causal: bool
    queries: Any  # [B|1, T] booleans, None for all
    keys: Any  # [B|1, S|1] booleans, None for all


def factor_mask(call: Call) -> Visible:
    """The call's mask and `causal` in factors; a ValueError where they are not the whole mask.

    A sum over keys that is shared by all queries can leave out keys, or stop at the query's own.
    Only a mask that is known to say no more can be honoured: one for keys, [batch..., 1, 1, S],
    says no more by its shape. Any other is looked at, value by value, which only works where it
    has values: outside of jit, or as a constant inside of it.
    """
    mask, causal = as_mask(call.mask), call.causal
    if mask is None:
        return Visible(causal, None, None)
    for_keys = mask.ndim < 2 or mask.shape[-2] == 1
    if not for_keys and isinstance(mask, jax.core.Tracer):
        raise ValueError(
            "mask has an axis of queries, and its values are not known inside jit: a linear layer "
            "cannot tell whether it can honour it. For a causal layer say causal=True (or "
            "is_causal=True in the call); for padding give a mask [batch..., 1, 1, S] of the "
            f"keys; got shape {mask.shape}"
        )
    # As NumPy at once: inside jit any operation of JAX would turn values into tracers.
    mask = bind_mask(mask if for_keys else np.asarray(mask), call)
    if for_keys and mask.shape[1] > 1 and not isinstance(mask, jax.core.Tracer):
        values = np.asarray(mask)
        mask = values[:, :1] if (values == values[:, :1]).all() else mask
    if mask.shape[1] == 1 and for_keys:
        return Visible(causal, None, mask[:, 0, 0])
    if for_keys:
        raise ValueError(
            "mask hides keys head by head, which a linear layer cannot do: its axis of heads must "
            f"be 1, or all heads alike outside of jit, got shape {np.shape(call.mask)}"
        )
    T, S = call.query.shape[1], call.key.shape[1]
    pairs: Any = np.broadcast_to(mask, (*mask.shape[:2], T, S))
    for known_causal in (True,) if causal else (False, True) if T == S else (False,):
        order = np.tri(T, S, dtype=bool) if known_causal else np.ones((T, S), bool)
        # Where the layer is causal, the mask may say so or leave it to the layer.
        seen = pairs[:, 0] & order if causal else pairs[:, 0]
        queries, keys = seen.any(2), seen.any(1)
        same_in_heads = ((pairs & order if causal else pairs) == seen[:, None]).all()
        if same_in_heads and (seen == (queries[:, :, None] & keys[:, None] & order)).all():
            return Visible(known_causal, queries, keys)
    raise ValueError(
        "mask is neither causal nor a mask of padding nor both, and a linear layer can honour no "
        f"other, got shape {np.shape(call.mask)}: use ato_jax.nn.Attention for it"
    )


# Where phi is 0 to the last bit, in float32 and in 16 bits: exp(-10000) is.
_BLANK = {
    "elu1": -1e4,
    "relu": 0.0,
    "exp": -1e4,
    "softplus": -1e4,
    "identity": 0.0,
    "silu": 0.0,
    "relu2": 0.0,
}
# Far from the origin the term -|k|^2 / 2 outweighs w k for any w that is ever drawn.
_BLANK_FAVOR = 1e4


class _Itself:
    """A feature map that equals only itself: it may have no hash, as a dataclass of arrays."""

    def __init__(self, feature_map: Callable[[jax.Array], jax.Array]) -> None:
        self.feature_map = feature_map

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.feature_map is other.feature_map

    def __hash__(self) -> int:
        return id(self.feature_map)


@functools.lru_cache(maxsize=64)
def _zero_at_infinity(which: _Itself) -> Any:
    """phi, but 0 at -inf. Remembered, so that one function stays one function."""

    def extended(x: jax.Array) -> jax.Array:
        blank = x == -jnp.inf
        # phi of 0 where blank: what it makes of -inf may be NaN, also in its derivative.
        return jnp.where(blank, 0.0, which.feature_map(jnp.where(blank, 0.0, x)))

    return extended


def hide_keys(
    key: jax.Array, value: jax.Array, keys: Any, feature_map: Any
) -> tuple[jax.Array, jax.Array, Any]:
    """k, v [B, S, G, D] and phi such that a hidden key adds nothing to any sum: phi(k) = 0, v = 0.

    `keys` [B|1, S|1] is what `factor_mask` found. Exact, the normaliser included, with holes
    anywhere, causal or not; NaN in a hidden key or value goes nowhere, its gradient is 0.
    """
    if keys is None:
        return key, value, feature_map
    if isinstance(feature_map, str):
        blank = _BLANK.get(feature_map, 0.0)  # a name that is none is refused further down
    elif isinstance(feature_map, Favor):
        blank = _BLANK_FAVOR
    else:
        blank, feature_map = -jnp.inf, _zero_at_infinity(_Itself(feature_map))
    seen = jnp.asarray(keys)[:, :, None, None]
    return jnp.where(seen, key, blank), jnp.where(seen, value, 0), feature_map


def hide_queries(array: jax.Array, queries: Any) -> jax.Array:
    """[B, T, ...], 0 where a query sees nothing; `queries` as in `Visible`.

    For the output, and before it for the query itself: NaN in what is hidden would otherwise reach
    the gradients of every key, as NaN times a cotangent of 0.
    """
    return array if queries is None else blank_steps(array, queries)


def hide_inputs(call: Call, visible: Visible) -> Call:
    """The call with the query, and the inputs of gates, 0 where they are hidden."""
    return call._replace(
        query=hide_queries(call.query, visible.queries),
        inputs_q=hide_queries(call.inputs_q, visible.queries),
        inputs_k=call.inputs_k
        if visible.keys is None
        else blank_steps(call.inputs_k, visible.keys),
    )


def blank_steps(array: jax.Array, steps: Any) -> jax.Array:
    """array [B, T, ...], 0 where `steps` [B|1, T|1] is False."""
    return jnp.where(jnp.expand_dims(jnp.asarray(steps), tuple(range(2, array.ndim))), array, 0)
