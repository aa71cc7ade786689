"""Decoding beside its peers: one query of each sequence, or a few, against a cache.

The limit is the bytes of the cache: those of the keys that there are, and where the values are
columns of the keys, of the keys alone. A cache lies in a row, [B, S, G, D] in JAX and [B, G, S, D]
in PyTorch, each as it is written there, or in pages in random order.

What the bytes are is all that differs: a peer that takes no pages, no lengths or no values in the
keys is not in those cases, and plain JAX, which takes all, is where it tells of a form.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

import ato_jax
from benchmarks import attention_jax, attention_torch, ours, side_by_side
from benchmarks.attention_jax import Attend, Contender
from benchmarks.cases import Case

_cache = functools.partial(Case, "softmax", T=1, dtype="bfloat16")
_grouped = functools.partial(_cache, B=16, H=32, G=8, D=128)
_latent = functools.partial(_cache, B=16, G=1, D=576, V=512)
_tiny = functools.partial(Case, "softmax", B=2, H=4, G=2, T=1, D=16, dtype="float32")
SHORT, LONG = 8192, 65536
IN_A_ROW = tuple(_grouped(S=S) for S in (SHORT, LONG, 32768, 131072))
CASES = {
    "gpu": (
        *IN_A_ROW,
        *(_grouped(S=S, page=page) for S in (SHORT, LONG) for page in (16, 64)),
        _grouped(S=LONG, ragged=True),
        _grouped(S=LONG, ragged=True, page=16),
        *(_grouped(S=S, cache="int8") for S in (SHORT, LONG)),
        dataclasses.replace(_grouped(S=LONG, causal=True), T=4),
        _cache(B=1, H=32, G=8, S=131072, D=128),
        *(_latent(H=H, S=S) for H in (16, 128) for S in (SHORT, LONG)),
    ),
    "cpu": (
        _tiny(S=512),
        _tiny(S=64, page=16),
        _tiny(S=64, ragged=True),
        _tiny(S=64, ragged=True, page=16),
        _tiny(S=64, cache="int8"),
        dataclasses.replace(_tiny(S=64, causal=True), T=4),
        _tiny(G=1, S=64, V=8),
    ),
}


def _library(case: Case) -> Attend:
    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array | None = None, **cache: jax.Array
    ) -> jax.Array:
        def laid_out(array: jax.Array | None) -> jax.Array | None:
            """[B, S, ...] as [P, page, ...], where there are pages."""
            if array is None or case.page is None:
                return array
            return array.reshape(-1, case.page, *array.shape[2:])

        return ato_jax.decode_attention(
            q,
            *map(laid_out, (k, v)),
            *(cache.get(name) for name in ("table", "lengths")),
            value_dim=case.V,
            k_scale_pages=laid_out(cache.get("k_scales")),
            v_scale_pages=laid_out(cache.get("v_scales")),
        )

    return attend


def _plain(case: Case) -> Attend:
    """Two products and a softmax under jit, all scores in memory."""
    heads = case.H // case.key_shape[2]
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def by_key(scales: jax.Array) -> jax.Array:
        """[B, S, G] beside scores [B, G, H / G, T, S]."""
        return scales.swapaxes(1, 2)[:, :, None, None]

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array | None = None, **cache: jax.Array
    ) -> jax.Array:
        v = k[..., : case.V] if v is None else v
        B, T, H, D = q.shape
        # 8 bits are exact in any of q's dtypes; their scales are those of scores and of weights.
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        s = product("btgjd,bsgd->bgjts", q.reshape(B, T, -1, heads, D), k) * D**-0.5
        if "k_scales" in cache:
            s *= by_key(cache["k_scales"])
        if case.ragged or case.causal:
            # The keys before which each query sees: [B, T].
            last = cache.get("lengths", jnp.full(B, k.shape[1]))[:, None] + jnp.arange(T) - (T - 1)
            visible = jnp.arange(k.shape[1]) < last[:, None, None, :, None]  # [B, 1, 1, T, S]
            s = jnp.where(visible, s, -jnp.inf)
        p = jax.nn.softmax(s, axis=-1)
        if "v_scales" in cache:
            p *= by_key(cache["v_scales"])
        out = product("bgjts,bsgv->btgjv", p.astype(v.dtype), v)
        return out.reshape(B, T, H, -1).astype(q.dtype)

    return attend


def _pallas(case: Case) -> Attend:
    """Its public function, with the tiles that it has by default."""
    with warnings.catch_warnings():
        # JAX 0.12 is about to remove it, which is no fault of whoever measures it.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import decode_attention

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return decode_attention.gqa(q[:, 0], k, v, interpret=ours.platform() == "cpu")[:, None]

    return attend


def _every(case: Case) -> bool:
    return True


def _in_a_row(case: Case) -> bool:
    """What takes keys and values alone can do."""
    return not (case.page or case.ragged or case.cache or case.V or case.causal)


def _measured_often(case: Case) -> bool:
    """Where those meet that are far behind."""
    return case in (*IN_A_ROW[:2], CASES["cpu"][0])


def _by_flash(case: Case) -> bool:
    return _in_a_row(case) and case not in IN_A_ROW[2:]


def _by_plain(case: Case) -> bool:
    """Every form once, if its scores are few; pages it would copy first."""
    scores = 4 * case.B * case.H * case.T * case.key_shape[1]
    return not case.page and case not in IN_A_ROW[2:] and scores <= attention_jax.SCORES_BYTES


def in_report(case: Case, name: str) -> bool:
    """Plain JAX compiles for seconds, alone: XLA searches."""
    return name != "plain JAX" or _measured_often(case)


def _of(contenders: Any, name: str, takes: Any) -> dict[str, Any]:
    return {name: dataclasses.replace(contenders[name], takes=takes)}


CONTEST = side_by_side.Contest(
    CASES,
    {
        "ato_jax": Contender(_every, _library),
        "plain JAX": Contender(_by_plain, _plain, searches=True),
        "JAX's Pallas decode kernel": Contender(_measured_often, _pallas),
    }
    | _of(attention_jax.CONTENDERS, "Tokamax Triton, 128x64", _measured_often),
    _of(attention_torch.CONTENDERS, "SDPA cuDNN", _in_a_row)
    | _of(attention_torch.CONTENDERS, "SDPA flash", _by_flash)
    | _of(attention_torch.CONTENDERS, "FlexAttention", _measured_often)
    | attention_torch.LATENT,
)
