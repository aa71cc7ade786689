"""Decoding: the newest queries of each sequence against a cache of keys and values.

    query i of sequence b stands at position lengths[b] - T + i and sees the keys up to there
    key j of sequence b is row j % page of page page_table[b, j // page]
                        or row j of sequence b, where there is no table
    k = k_scale_pages * k_pages, v likewise, of pages in 8 bits

By `triton/paged.py` that is one kernel, and another that merges its parts; by XLA, and for every
derivative, the pages are put in a row and `attention` goes over them.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ato_jax import device, division, meshes, partitioning, programs, shapes, tuning
from ato_jax.choosing import PHASES, Choice, UnsupportedError
from ato_jax.device import Device
from ato_jax.dispatch import Explanation
from ato_jax.ops.attention.api import OP, PAGED, Window, attention, bind_sinks, bounds
from ato_jax.ops.attention.cache_checks import check_cache
from ato_jax.ops.attention.cached import EIGHT_BITS, MOST_QUERIES, CacheInputs
from ato_jax.ops.attention.spec import AttentionSpec
from ato_jax.ops.common import Integers, check_heads, is_batched, with_batch

# Those that None may mean; "reference" runs where it is named.
BACKENDS = ("xla", "triton")


class Request(NamedTuple):
    """A call with its arguments checked."""

    spec: AttentionSpec
    inputs: CacheInputs
    implementation: str | None
    batched: bool


def prepare(
    q: Any,
    k_pages: Any,
    v_pages: Any = None,
    page_table: Any = None,
    lengths: Any = None,
    *,
    value_dim: Any = None,
    k_scale_pages: Any = None,
    v_scale_pages: Any = None,
    window: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    scale: Any = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Request:
    """Checks and binds every argument of `decode_attention`; its ValueErrors come from here."""
    q = shapes.floating("q", q)
    k_pages = _pages("k_pages", k_pages, str(q.dtype))
    batched = is_batched(q, "BTHD")
    where = "" if batched else " where q is [T, H, D]"
    sizes: dict[str, int] = {}
    shapes.bind(sizes, "q", q.shape, "BTHD" if batched else "THD")
    rows: tuple[str, ...] = ("P", "page", "G")
    if page_table is None:
        rows = ("B", "S", "G") if batched else ("S", "G")
    shapes.bind(sizes, "k_pages", k_pages.shape, (*rows, "D"), where)
    if v_pages is None:
        _bind_value_dim(sizes, value_dim)
    else:
        if value_dim is not None:
            raise ValueError(
                f"value_dim goes without v_pages: got {value_dim!r} and values of their own"
            )
        v_pages = _pages("v_pages", v_pages, str(k_pages.dtype), "k_pages")
        shapes.bind(sizes, "v_pages", v_pages.shape, (*rows, "V"), where)
    k_scales = _bind_scales(sizes, "k_scale_pages", k_scale_pages, k_pages, rows)
    v_scales = _bind_scales(sizes, "v_scale_pages", v_scale_pages, v_pages, rows)
    if not 1 <= sizes["T"] <= MOST_QUERIES:
        raise ValueError(
            f"q must hold between 1 and {MOST_QUERIES} queries, got T={sizes['T']}; "
            "use attention() for more"
        )
    check_heads(sizes)
    sizes.setdefault("B", 1)
    table = None
    if page_table is not None:
        for axis in ("P", "page"):
            if sizes[axis] < 1:
                raise ValueError(f"axis {axis} of k_pages must be at least 1, got {axis}=0")
        table = shapes.integers("page_table", page_table)
        letters = ("B", "pages") if batched else ("pages",)
        shapes.bind(sizes, "page_table", table.shape, letters, where)
        sizes["S"] = sizes["pages"] * sizes["page"]
        if lengths is None:
            raise ValueError("lengths must be given with a page_table, got None")
    if lengths is None:
        keys = jnp.full(sizes["B"], sizes["S"], jnp.int32)
    else:
        keys = shapes.integers("lengths", lengths)
        shapes.bind_batch(sizes, "lengths", keys.shape, batched)
        shapes.within("lengths", lengths, 0, sizes["S"], f"S={sizes['S']}")
        keys = _narrowed(keys.reshape(-1), sizes["S"])
    check_cache(page_table, lengths, sizes)

    spec = AttentionSpec(
        B=sizes["B"],
        T=sizes["T"],
        S=sizes["S"],
        H=sizes["H"],
        G=sizes["G"],
        D=sizes["D"],
        V=sizes["V"],
        dtype=str(q.dtype),
        scale=shapes.scale(sizes["D"] ** -0.5 if scale is None else scale),
        left=bounds(True, window)[0],
        right=0,
        offset=None,
        query_offset=True,
        kv_lengths=True,
        softcap=None if softcap is None else shapes.positive("softcap", softcap),
        sinks=sinks is not None,
        return_lse=shapes.flag("return_lse", return_lse),
    )
    if table is not None:
        table = with_batch(_narrowed(table, sizes["P"]), 2)

    def each(array: jax.Array | None, ndim: int) -> jax.Array | None:
        """A cache in a row, or its scales, with a batch axis; pages have none."""
        return None if array is None else with_batch(array, ndim)

    inputs = CacheInputs(
        with_batch(q, 4),
        with_batch(k_pages, 4),
        each(v_pages, 4),
        keys,
        table=table,
        k_scales=each(k_scales, 3),
        v_scales=each(v_scales, 3),
        sinks=bind_sinks(sinks, sizes),
    )
    return Request(spec, inputs, implementation, batched)


@overload
def decode_attention(
    q: ArrayLike, k_pages: ArrayLike, v_pages: ArrayLike | None = ...,
    page_table: Integers | None = ..., lengths: Integers | None = ..., *,
    value_dim: int | None = ..., k_scale_pages: ArrayLike | None = ...,
    v_scale_pages: ArrayLike | None = ..., window: Window | None = ...,
    softcap: float | None = ..., sinks: ArrayLike | None = ..., scale: float | None = ...,
    return_lse: Literal[False] = ..., implementation: str | None = ...,
) -> jax.Array: ...  # fmt: skip


@overload
def decode_attention(
    q: ArrayLike, k_pages: ArrayLike, v_pages: ArrayLike | None = ...,
    page_table: Integers | None = ..., lengths: Integers | None = ..., *,
    value_dim: int | None = ..., k_scale_pages: ArrayLike | None = ...,
    v_scale_pages: ArrayLike | None = ..., window: Window | None = ...,
    softcap: float | None = ..., sinks: ArrayLike | None = ..., scale: float | None = ...,
    return_lse: Literal[True], implementation: str | None = ...,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


def decode_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike | None = None,
    page_table: Integers | None = None,
    lengths: Integers | None = None,
    *,
    value_dim: int | None = None,
    k_scale_pages: ArrayLike | None = None,
    v_scale_pages: ArrayLike | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention of each sequence's T newest queries against its cached keys and values.

        position(i) = lengths[b] - T + i ; query i sees key j iff j <= position(i)
        key j of sequence b is row j % page of page page_table[b, j // page], or, without a table,
        row j of sequence b
        s[i,j] = scale * q_i . k_j ; softcap: c * tanh(s / c)
        out_i  = softmax over j (and over the sink logit, which has no value) . v

    The keys and values of the T queries are in the cache already, and `lengths` counts them. Only
    pages that hold one of a sequence's first `lengths` keys are read: the other entries of
    page_table may hold anything, and a NaN in an unused row or page reaches no output. A page id
    out of range is an error where page_table and lengths are on the host. On a device, values are
    not waited for: keys of such a page are skipped, and `ato_jax.checked` reports the id, as it
    reports a length beyond the table.

    Args:
      q: Queries [B, T, H, D] with T from 1 to 16: float16, bfloat16 or float32. B may be missing,
        and then it is missing from `lengths`, `page_table`, caches without pages and results.
      k_pages: Keys [P, page, G, D] in q's dtype, int8 or float8_e4m3fn. H is a multiple of G; the
        query heads of a group share each key that is loaded. Without `page_table`: [B, S, G, D].
      v_pages: Values [P, page, G, V] in k_pages' dtype, or [B, S, G, V] without `page_table`. None
        means that the first `value_dim` columns of the keys are the values, as in latent attention.
      page_table: Integers [B, pages]: the page of keys 0 to page - 1, the page of the next, ...
      lengths: Integers [B]: keys of each sequence, its T newest included. Needed with a
        `page_table`; without one, None means S.
      value_dim: V, where `v_pages` is None.
      k_scale_pages: float32 [P, page, G], or [B, S, G] without `page_table`: the factor of each
        row of k_pages. Needed for 8-bit keys, refused for others.
      v_scale_pages: The same for v_pages.
      window: (left, right): query i sees keys from position(i) - left on; None for no bound. The
        right bound has no effect, since decoding is causal.
      softcap: c > 0: the scores are limited to (-c, c).
      sinks: Floats [H]: one more logit in the softmax of every query of a head, without a value.
      scale: Factor of the scores; D ** -0.5 unless given.
      return_lse: Return (out, lse) in place of out.
      implementation: "triton" reads the pages where they are; "xla" and "reference" first copy
        each sequence's keys and values into one row. None takes the kernel where the tuned table
        has it as the faster one on this device, and XLA elsewhere.

    Returns:
      out [B, T, H, V] in q's dtype; with `return_lse` the pair (out, lse), lse the natural
      logarithm of the softmax's denominator, float32 [B, T, H]. For a query that sees no key, as in
      an empty sequence, out is 0 and lse is -inf, or the sink's logit where there are sinks.

    Raises:
      ValueError: An argument is wrong for every backend: its shape, dtype or value. The message
        names it, what it was and what it has to be. The numbers in a jax array of page ids or
        lengths are not read, and `ato_jax.checked` reports them.
      UnsupportedError: The backend named by `implementation` does not support this call on this
        device; the message says why.

    Example:
      >>> import ato_jax, jax.numpy as jnp
      >>> q = jnp.ones((2, 1, 8, 32))  # [B, T, H, D]
      >>> pages = jnp.ones((6, 16, 2, 32))  # [P, page, G, D]
      >>> page_table = [[3, 0], [5, -1]]  # sequence 1 fits into one page
      >>> out = ato_jax.decode_attention(q, pages, pages, page_table, [20, 7])
      >>> out.shape
      (2, 1, 8, 32)
    """
    request = prepare(
        q,
        k_pages,
        v_pages,
        page_table,
        lengths,
        value_dim=value_dim,
        k_scale_pages=k_scale_pages,
        v_scale_pages=v_scale_pages,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        return_lse=return_lse,
        implementation=implementation,
    )
    spec, inputs, batched = request.spec, request.inputs, request.batched
    here = device.of_call(inputs)
    name = _backend(spec, here, inputs.k, implementation)
    if name == "triton":
        cut = partitioning.cut_of(inputs, inputs.letters)
        run = functools.partial(_by_kernel, spec, here, device.interpreting(), cut)
    else:
        _warn_of_no_triton(spec, here, inputs.k, implementation)
        run = functools.partial(_plain, spec, name)
    out, lse = meshes.call(run, inputs, inputs.partition_of_outputs)
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if spec.return_lse else out


def explain(*args: Any, **options: Any) -> Explanation:
    """What `decode_attention` with these arguments would run."""
    spec, inputs, implementation, _ = prepare(*args, **options)
    here = device.of_call(inputs)
    paged = OP.module(PAGED)
    reason = paged.unsupported(spec, here, inputs.k)
    reasons: dict[str, dict[str, str | None]] = {
        "triton": {"forward": reason, "backward": "the derivative is xla's"},
        "xla": dict.fromkeys(PHASES),
        "reference": dict.fromkeys(PHASES),
    }
    try:
        name = _backend(spec, here, inputs.k, implementation)
    except UnsupportedError:
        return Explanation("decode_attention", spec, here, None, None, None, reasons)
    unnamed = implementation is None and here.platform == "gpu"

    def plain(name: str, why: str = "") -> Choice:
        config = tuning.config(OP.name, name, OP.backend(name), spec, here)
        return Choice(name, config, name, why=why)

    if name == "triton":
        config = paged.default_config(spec, here, inputs)
        why = "first in the op's order" if unnamed else ""
        forward = Choice(name, config, PAGED, why=why, sizes_by="block sizes by rule")
        backward = plain("xla")
    else:
        table = _last_by(spec, here) if unnamed and reason is None else None
        forward = backward = plain(name, f"triton last by tuned/{table}.toml" if table else "")
    return Explanation("decode_attention", spec, here, forward, forward, backward, reasons)


def _pages(name: str, pages: Any, dtype: str, whose: str = "q") -> jax.Array:
    """Pages of 8 bits, or of q's dtype; both the same."""
    found = shapes.dtype_name(name, pages)
    if found in EIGHT_BITS or dtype in EIGHT_BITS:
        if whose != "q" and found != dtype:
            raise ValueError(f"{name} must have {whose}'s dtype {dtype}, got {found}")
        return shapes.as_array(name, pages)
    if found not in shapes.FLOATS:
        known = f"{', '.join(shapes.FLOATS)} or, with scales, {' or '.join(EIGHT_BITS)}"
        raise ValueError(f"{name} must be {known}, got {found}; convert it first")
    return shapes.floating(name, pages, dtype)


def _narrowed(array: jax.Array, high: int) -> jax.Array:
    """Integers as int32. Those that it does not hold are clipped, all others left: a kernel that
    knows what to do with them has no need of one before it.
    """
    if shapes.fits_int32(array.dtype):
        return array.astype(jnp.int32)
    return shapes.clipped(array, -1, high)


def _bind_value_dim(sizes: dict[str, int], value_dim: int | None) -> None:
    if value_dim is None:
        raise ValueError(
            "value_dim must be given without v_pages: the values are so many columns of the keys"
        )
    sizes["V"] = shapes.positive_int("value_dim", value_dim)
    if sizes["V"] > sizes["D"]:
        raise ValueError(f"value_dim must be at most D={sizes['D']}, got {value_dim}")


def _bind_scales(
    sizes: dict[str, int], name: str, scales: Any, pages: jax.Array | None, rows: tuple[str, ...]
) -> jax.Array | None:
    """Scales where there are pages in 8 bits, and nowhere else."""
    whose = name.replace("scale_", "")
    if pages is None or str(pages.dtype) not in EIGHT_BITS:
        if scales is not None:
            found = "none" if pages is None else f"{pages.dtype}"
            raise ValueError(f"{name} goes with {whose} in {' or '.join(EIGHT_BITS)}, got {found}")
        return None
    if scales is None:
        raise ValueError(f"{name} must be given with {whose} in {pages.dtype}")
    found = shapes.dtype_name(name, scales)
    if found != "float32":
        raise ValueError(f"{name} must be float32, got {found}")
    scales = shapes.as_array(name, scales)
    shapes.bind(sizes, name, scales.shape, rows)
    return scales


def _backend(spec: AttentionSpec, here: Device, k_pages: Any, implementation: str | None) -> str:
    OP.check_name(implementation)
    if implementation not in (None, *BACKENDS, "reference"):
        raise UnsupportedError(f"decode_attention: {implementation}: has no kernels for this op")
    named = implementation == "triton"
    # Not on a CPU, unless asked for, where naming the kernel would import Pallas's Triton.
    if named or (implementation is None and here.platform == "gpu"):
        reason = OP.module(PAGED).unsupported(spec, here, k_pages)
        if named and reason is not None:
            raise UnsupportedError(f"decode_attention: triton: {reason}")
        if named or (reason is None and _last_by(spec, here) is None):
            return "triton"
    return "reference" if implementation == "reference" else "xla"


def _last_by(spec: AttentionSpec, here: Device) -> str | None:
    """The name of the table that puts the kernel last; None where none does."""
    return tuning.order("decode_attention", spec, here, tuning.FORWARD).last.get("triton")


def _warn_of_no_triton(
    spec: AttentionSpec, here: Device, k_pages: Any, implementation: str | None
) -> None:
    """A warning where the kernel would run, if JAX could lower it."""
    if implementation is not None or here.platform != "gpu" or _last_by(spec, here):
        return
    from ato_jax import launch  # here, so that `import ato_jax` does not import Pallas

    if launch.no_triton and OP.module(PAGED).out_of_range(spec, here, k_pages) is None:
        launch.warn_of_no_triton()


@programs.jit(static=2)
def _plain(spec: AttentionSpec, name: str, inputs: CacheInputs) -> tuple[jax.Array, jax.Array]:
    """By attention's backend of that name."""
    table = inputs.table
    # Before anything follows from them: as in the kernel, longer than S is S.
    lengths = jnp.clip(inputs.lengths, 0, spec.S)
    mask = None
    if table is not None:
        count, page = inputs.k.shape[:2]
        used = jnp.arange(table.shape[1], dtype=jnp.int32) * page < lengths[:, None]
        exists = used & (table >= 0) & (table < count)  # [B, pages]
        table = jnp.where(exists, table, count)
        mask = jnp.repeat(exists, page, axis=1)[:, None, None]

    def contiguous(pages: jax.Array) -> jax.Array:
        """[P, page, G, ...] -> [B, S, G, ...]"""
        if table is None:
            return pages
        # 0 where there is no page: a mask does not keep a NaN of another one out.
        found = jnp.take(pages, table, axis=0, mode="fill", fill_value=0)
        return found.reshape(spec.B, spec.S, *pages.shape[2:])

    def rows(pages: jax.Array, scales: jax.Array | None) -> jax.Array:
        found = contiguous(pages)
        if scales is None:
            return found
        return found.astype(jnp.float32) * contiguous(scales)[..., None]

    k = rows(inputs.k, inputs.k_scales)
    v = k[..., : spec.V] if inputs.v is None else rows(inputs.v, inputs.v_scales)
    out, lse = attention(
        inputs.q.astype(k.dtype),
        k,
        v,
        causal=True,
        window=None if spec.left is None else (spec.left, 0),
        query_offset=lengths - spec.T,
        mask=mask,
        # Said of both sides: where T = S, the one given would stand for the other, too.
        q_lengths=jnp.full(spec.B, spec.T, jnp.int32),
        kv_lengths=lengths,
        softcap=spec.softcap,
        sinks=inputs.sinks,
        scale=spec.scale,
        return_lse=True,
        implementation=name,
    )
    return out.astype(spec.dtype), lse


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
@programs.jit(static=4)
def _by_kernel(
    spec: AttentionSpec,
    here: Device,
    interpret: bool,
    cut: partitioning.Cut | None,
    inputs: CacheInputs,
) -> tuple[jax.Array, jax.Array]:
    paged = OP.module(PAGED)

    def attend(cut: partitioning.Cut | None, inputs: CacheInputs) -> Any:
        own = spec if cut is None else division.spec_of(spec, cut)
        config = paged.default_config(own, here, inputs)
        with device.interpret(interpret):
            return paged.attend(own, config, inputs)

    outputs: tuple[jax.Array, jax.Array] = division.alone(
        attend, inputs, inputs.letters(), ("BTHV", "BTH"), cut
    )
    return outputs


@_by_kernel.defjvp
@programs.promoting_ranks
def _by_kernel_jvp(
    spec: AttentionSpec,
    here: Device,
    interpret: bool,
    cut: partitioning.Cut | None,
    primals: Any,
    tangents: Any,
) -> tuple[Any, Any]:
    """The plain one's derivative: right in forward mode, reverse mode and to any order."""
    _, tangents = jax.jvp(functools.partial(_plain, spec, "xla"), primals, tangents)
    return _by_kernel(spec, here, interpret, cut, *primals), tangents
