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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax import checking, device, programs, shapes, tuning
from ato_jax.device import Device
from ato_jax.dispatch import UnsupportedError
from ato_jax.ops.attention.api import OP, PAGED, attention, bind_sinks, bounds
from ato_jax.ops.attention.cached import EIGHT_BITS, MOST_QUERIES, CacheInputs
from ato_jax.ops.attention.spec import AttentionSpec
from ato_jax.ops.common import check_heads, check_lengths, is_batched, with_batch

# Those that None may mean; "reference" runs where it is named.
BACKENDS = ("xla", "triton")


def decode_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any = None,
    page_table: Any = None,
    lengths: Any = None,
    *,
    value_dim: int | None = None,
    k_scale_pages: Any = None,
    v_scale_pages: Any = None,
    window: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    scale: Any = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention of the T newest queries of each sequence against a cache, in pages or not.

    The queries are causal among themselves; their own keys and values are in the cache already,
    and counted in `lengths`. Only the pages that hold a sequence's first `lengths` keys are read:
    the other ids in its row of the table may be anything, and no NaN in unused rows or pages gets
    into an output. Of the pages that are used an id out of range is refused where table and
    lengths are on the host; on a device its keys are read from nowhere and seen by nobody.
    `ato_jax.checked` makes an error of it, and of a length beyond the table.

    Args:
      q: [B, T, H, D], T from 1 to 16; the batch axis may be missing, here and everywhere but in
        pages: [pages] is the table of one sequence, and its length a scalar.
      k_pages: [P, page, G, D] with H % G == 0; the query heads of a group share each key. Without
        a table [B, S, G, D]: every sequence's keys in a row.
      v_pages: [P, page, G, V], or [B, S, G, V]. None: the values are the first `value_dim` columns
        of the keys, and read once, as latent attention has them.
      page_table: [B, pages] integers: which page holds keys 0 to page - 1, which the next, ...
      lengths: [B] integers, keys per sequence, the T newest included. Without a table None means
        all S.
      value_dim: V, where there are no `v_pages`.
      k_scale_pages, v_scale_pages: float32 [P, page, G], or [B, S, G]: what each row is to be
        multiplied by. For pages in int8 or float8_e4m3fn, and needed there.
      window: (left, right): keys from position - left on, None for no bound.
      softcap, sinks, scale, return_lse: as in `attention`.
      implementation: "triton", the kernel that reads pages where they lie; "xla" or "reference",
        which copy them; or None: the kernel where the device's table has it as the faster, else
        XLA.

    Returns:
      out [B, T, H, V] in q's dtype, or (out, lse) with `return_lse`: lse float32 [B, T, H]. A query
      that sees nothing, as in an empty sequence, gives 0, and -inf (the sink's logit where there is
      one).
    """
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
    _check_cache(page_table, lengths, sizes)

    spec = AttentionSpec(
        B=sizes["B"],
        T=sizes["T"],
        S=sizes["S"],
        H=sizes["H"],
        G=sizes["G"],
        D=sizes["D"],
        V=sizes["V"],
        dtype=str(q.dtype),
        scale=shapes.static_number("scale", sizes["D"] ** -0.5 if scale is None else scale),
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
    here = device.of_call(inputs)
    name = _backend(spec, here, k_pages, implementation)
    if name == "triton":
        out, lse = _by_kernel(spec, here, device.interpreting(), inputs)
    else:
        out, lse = _plain(spec, name, inputs)
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


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
        from ato_jax import launch  # here, so that `import ato_jax` does not import Pallas

        paged = OP.module(PAGED)
        reason = paged.unsupported(spec, here, k_pages)
        if named and reason is not None:
            raise UnsupportedError(f"decode_attention: triton: {reason}")
        order = tuning.order("decode_attention", spec, here, tuning.FORWARD)
        if named or (reason is None and "triton" not in order.last):
            return "triton"
        if launch.no_triton and "triton" not in order.last:
            if paged.out_of_range(spec, here, k_pages) is None:
                launch.warn_of_no_triton()
    return "reference" if implementation == "reference" else "xla"


@programs.jit(static=2)
def _plain(spec: AttentionSpec, name: str, inputs: CacheInputs) -> tuple[jax.Array, jax.Array]:
    """By attention's backend of that name."""
    table = inputs.table
    # Before anything follows from them: as in the kernel, longer than S is S.
    lengths = jnp.clip(inputs.lengths, 0, spec.S)
    mask = None
    if table is not None:
        count, page = inputs.k.shape[:2]
        used = jnp.arange(table.shape[1]) * page < lengths[:, None]
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
@programs.jit(static=3)
def _by_kernel(
    spec: AttentionSpec, here: Device, interpret: bool, inputs: CacheInputs
) -> tuple[jax.Array, jax.Array]:
    paged = OP.module(PAGED)
    config = paged.default_config(spec, here, inputs)
    with device.interpret(interpret):
        return paged.attend(spec, config, inputs)


@_by_kernel.defjvp
def _by_kernel_jvp(
    spec: AttentionSpec, here: Device, interpret: bool, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    """The plain one's derivative: right in forward mode, reverse mode and to any order."""
    _, tangents = jax.jvp(functools.partial(_plain, spec, "xla"), primals, tangents)
    return _by_kernel(spec, here, interpret, *primals), tangents


def _check_cache(page_table: Any, lengths: Any, sizes: dict[str, int]) -> None:
    """A ValueError for a page that there is not, where table and lengths are on the host.

    Where `checked` looks an error for it, and for a length, wherever they are.
    """
    if lengths is not None:
        check_lengths("lengths", lengths, "S", sizes["S"])
    if page_table is None:
        return
    starts = np.arange(sizes["pages"]) * sizes["page"]
    span = f"P - 1 = {sizes['P'] - 1} where used"
    if checking.checking():
        table = jnp.asarray(page_table)
        used = starts < jnp.asarray(lengths).reshape(-1, 1)  # [B, pages]
        pages = shapes.clipped(table, -1, sizes["P"])
        exists = (pages >= 0) & (pages < sizes["P"])
        checking.check(
            (exists | ~used).all(),
            f"page_table must lie between 0 and {span}, got {{page_table}}",
            page_table=table,
        )
    elif not isinstance(page_table, jax.Array) and not isinstance(lengths, jax.Array):
        host = np.asarray(page_table).reshape(sizes["B"], sizes["pages"])
        of_use = host[starts < np.asarray(lengths).reshape(-1, 1)]
        shapes.within("page_table", of_use, 0, sizes["P"] - 1, span)
