"""Decoding: the newest queries of each sequence against a cache of keys and values in pages.

    query i of sequence b stands at position lengths[b] - T + i and sees the keys up to there
    key j of sequence b is row j % page of page page_table[b, j // page]

By `triton/paged.py` that is one kernel, and where it has parts their merging; by XLA, and for every
derivative, the pages are put in a row and `attention` goes over them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax import checking, device, shapes, tuning
from ato_jax.device import Device
from ato_jax.dispatch import UnsupportedError
from ato_jax.ops.attention.api import OP, attention, bind_sinks, bounds
from ato_jax.ops.attention.spec import AttentionSpec, PagedInputs
from ato_jax.ops.common import check_heads

# More queries than this are a prefill: `attention` is made for them.
MOST_QUERIES = 16
KERNEL = "triton.paged"
BACKENDS = ("xla", "triton")


def decode_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    window: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    scale: Any = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention of the T newest queries of each sequence against a paged cache.

    The queries are causal among themselves; their own keys and values are in the cache already,
    and counted in `lengths`. Only the pages that hold a sequence's first `lengths` keys are read:
    the other ids in its row of the table may be anything, and no NaN in unused rows or pages gets
    into an output. Of the pages that are used an id out of range is refused where table and
    lengths are on the host; on a device its keys are read from nowhere and seen by nobody.
    `ato_jax.checked` makes an error of it, and of a length beyond the table.

    Args:
      q: [B, T, H, D], T from 1 to 16.
      k_pages: [P, page, G, D] with H % G == 0; the query heads of a group share each key.
      v_pages: [P, page, G, V].
      page_table: [B, pages] integers: which page holds keys 0 to page - 1, which the next, ...
      lengths: [B] integers, keys per sequence, the T newest included.
      window: (left, right): keys from position - left on, None for no bound.
      softcap, sinks, scale, return_lse: as in `attention`.
      implementation: "triton", the kernel that reads pages where they lie; "xla", which copies
        them; or None: the kernel where the device's table has it as the faster, else XLA.

    Returns:
      out [B, T, H, V], or (out, lse) with `return_lse`: lse float32 [B, T, H]. A query that sees
      nothing, as in an empty sequence, gives 0, and -inf (the sink's logit where there is one).
    """
    q = shapes.floating("q", q)
    k_pages, v_pages = (
        shapes.floating(name, array, str(q.dtype))
        for name, array in (("k_pages", k_pages), ("v_pages", v_pages))
    )
    sizes: dict[str, int] = {}
    shapes.bind(sizes, "q", q.shape, ("B", "T", "H", "D"))
    shapes.bind(sizes, "k_pages", k_pages.shape, ("P", "page", "G", "D"))
    shapes.bind(sizes, "v_pages", v_pages.shape, ("P", "page", "G", "V"))
    table = shapes.integers("page_table", page_table)
    shapes.bind(sizes, "page_table", table.shape, ("B", "pages"))
    if not 1 <= sizes["T"] <= MOST_QUERIES:
        raise ValueError(
            f"q must hold between 1 and {MOST_QUERIES} queries, got T={sizes['T']}; "
            "use attention() for more"
        )
    for axis in ("P", "page"):
        if sizes[axis] < 1:
            raise ValueError(f"axis {axis} of k_pages must be at least 1, got {axis}=0")
    check_heads(sizes)
    sizes["S"] = sizes["pages"] * sizes["page"]
    keys = shapes.lengths("lengths", lengths, sizes, "S")
    _check_used_pages(page_table, lengths, sizes)

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
    table = shapes.clipped(table, -1, sizes["P"])
    inputs = PagedInputs(q, k_pages, v_pages, table, keys, bind_sinks(sinks, sizes))
    here = device.of_call(inputs)
    if _backend(spec, here, implementation) == "triton":
        out, lse = _by_kernel(spec, here, device.interpreting(), inputs)
    else:
        out, lse = _plain(spec, inputs)
    return (out, lse) if return_lse else out


def _backend(spec: AttentionSpec, here: Device, implementation: str | None) -> str:
    if implementation is not None:
        shapes.one_of("implementation", implementation, BACKENDS)
    named = implementation == "triton"
    # Not on a CPU, unless asked for, where naming the kernel would import Pallas's Triton.
    if named or (implementation is None and here.platform == "gpu"):
        reason = OP.backend(KERNEL).unsupported(spec, here)
        if named and reason is not None:
            raise UnsupportedError(f"decode_attention: triton: {reason}")
        order = tuning.order("decode_attention", BACKENDS, spec, here)
        if named or (reason is None and order[0] == "triton"):
            return "triton"
    return "xla"


@functools.partial(jax.jit, static_argnums=0)
def _plain(spec: AttentionSpec, inputs: PagedInputs) -> tuple[jax.Array, jax.Array]:
    q, k_pages, v_pages, table, lengths, sinks = inputs
    count, page = k_pages.shape[:2]
    used = jnp.arange(table.shape[1]) * page < lengths[:, None]
    exists = used & (table >= 0) & (table < count)  # [B, pages]
    table = jnp.where(exists, table, 0)

    def contiguous(pages: jax.Array) -> jax.Array:
        """[P, page, G, D] -> [B, S, G, D]"""
        found = jnp.take(pages, table, axis=0, mode="clip")
        return found.reshape(spec.B, spec.S, *pages.shape[2:])

    return attention(
        q,
        contiguous(k_pages),
        contiguous(v_pages),
        causal=True,
        window=None if spec.left is None else (spec.left, 0),
        query_offset=lengths - spec.T,
        mask=jnp.repeat(exists, page, axis=1)[:, None, None],
        # Said of both sides: where T = S, the one given would stand for the other, too.
        q_lengths=jnp.full(spec.B, spec.T, jnp.int32),
        kv_lengths=lengths,
        softcap=spec.softcap,
        sinks=sinks,
        scale=spec.scale,
        return_lse=True,
        implementation="xla",
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _by_kernel(
    spec: AttentionSpec, here: Device, interpret: bool, inputs: PagedInputs
) -> tuple[jax.Array, jax.Array]:
    with device.interpret(interpret):
        out, lse = OP.backend(KERNEL).forward(spec, here, inputs)
    if inputs.sinks is not None:
        seen = lse
        lse = jnp.logaddexp(seen, inputs.sinks)
        # Of what saw nothing, out is 0 already.
        out = out * jnp.where(seen == -jnp.inf, 0, jnp.exp(seen - lse))[..., None]
    return out.astype(spec.dtype), lse


@_by_kernel.defjvp
def _by_kernel_jvp(
    spec: AttentionSpec, here: Device, interpret: bool, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    """The plain one's derivative: right in forward mode, reverse mode and to any order."""
    _, tangents = jax.jvp(functools.partial(_plain, spec), primals, tangents)
    return _by_kernel(spec, here, interpret, *primals), tangents


def _check_used_pages(page_table: Any, lengths: Any, sizes: dict[str, int]) -> None:
    """A ValueError for a page that there is not, where table and lengths are on the host.

    Where `checked` looks an error for either, wherever they are.
    """
    starts = np.arange(sizes["pages"]) * sizes["page"]
    span = f"P - 1 = {sizes['P'] - 1} where used"
    if checking.checking():
        table, keys = jnp.asarray(page_table), jnp.asarray(lengths)
        held = shapes.clipped(keys, -1, sizes["S"] + 1)
        checking.check(
            ((held >= 0) & (held <= sizes["S"])).all(),
            f"lengths must lie between 0 and S={sizes['S']}, got {{lengths}}",
            lengths=keys,
        )
        pages = shapes.clipped(table, -1, sizes["P"])
        exists = (pages >= 0) & (pages < sizes["P"])
        checking.check(
            (exists | (starts >= held[:, None])).all(),
            f"page_table must lie between 0 and {span}, got {{page_table}}",
            page_table=table,
        )
    elif not isinstance(page_table, jax.Array) and not isinstance(lengths, jax.Array):
        used = np.asarray(page_table)[starts < np.asarray(lengths)[:, None]]
        shapes.within("page_table", used, 0, sizes["P"] - 1, span)
