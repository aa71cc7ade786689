"""Argument checks that all ops share: layouts, missing batch axes, lengths, segments, decays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ato_jax import checking, meshes, shapes

# Lengths, ids and offsets: an array, or a list on the host.
Integers = ArrayLike | Sequence[int]
Precision = jax.lax.PrecisionLike

LAYOUTS = ("bthd", "bhtd")

# How float32 inputs are multiplied: "exact" in full float32, "tf32" with factors that may be
# rounded to TF32.
PRECISIONS = {
    None: "exact",
    "highest": "exact",
    "high": "exact",
    "float32": "exact",
    jax.lax.Precision.HIGHEST: "exact",
    jax.lax.Precision.HIGH: "exact",
    "tf32": "tf32",
    "tensorfloat32": "tf32",
    "default": "tf32",
    jax.lax.Precision.DEFAULT: "tf32",
}


def precision_of(precision: Any, dtype: str) -> str:
    """Either "exact" or "tf32", by the argument `precision`; "exact" for 16-bit inputs."""
    try:
        found = PRECISIONS[precision]
    except (KeyError, TypeError):
        names = ", ".join(repr(name) for name in PRECISIONS if isinstance(name, str))
        raise ValueError(
            f"precision must be None, a jax.lax.Precision or one of {names}, got {precision!r}"
        ) from None
    return found if dtype == "float32" else "exact"


def axes(layout: str, letters: str) -> str:
    """The letters of an array's axes in the layout's order; `letters` has time before heads."""
    return letters if layout == "bthd" else letters[0] + letters[2] + letters[1] + letters[3:]


def with_batch(array: jax.Array, ndim: int) -> jax.Array:
    """`array` with a leading batch axis of size 1 where it has one axis less than `ndim`."""
    return array[None] if array.ndim == ndim - 1 else array


def is_batched(q: jax.Array, letters: str) -> bool:
    """Whether q has a batch axis; a ValueError unless it has three or four axes."""
    if q.ndim not in (3, 4):
        raise ValueError(
            f"q must be [{', '.join(letters)}] or [{', '.join(letters[1:])}], got shape {q.shape}"
        )
    return q.ndim == 4


def check_heads(
    sizes: dict[str, int],
    layout: str | None = None,
    many: tuple[str, str] = ("q", "BTHD"),
    few: str = "k",
) -> None:
    """A ValueError for an empty axis of heads, or unless H is a multiple of G.

    Args:
      sizes: the size of each letter.
      layout: the caller's, which the error names as a possible cause.
      many: the array with H heads, and its axes.
      few: the array with G heads.
    """
    for letter in "HGDV":
        if sizes[letter] < 1:
            raise ValueError(f"axis {letter} must be at least 1, got {letter}=0")
    if sizes["H"] % sizes["G"]:
        hint = ""
        if layout is not None:
            hint = f"; with layout={layout!r}, {many[0]} is [{', '.join(axes(layout, many[1]))}]"
        raise ValueError(
            f"{many[0]}'s heads H must be a multiple of {few}'s heads G, got H={sizes['H']}, "
            f"G={sizes['G']}{hint}"
        )


def bind_qkv(q: Any, k: Any, v: Any, layout: str) -> tuple[list[jax.Array], dict[str, int], bool]:
    """[q, k, v] with a batch axis, the sizes of their axes, and whether q came with a batch
    axis."""
    q = shapes.floating("q", q)
    k, v = (
        shapes.floating(name, array, str(q.dtype)) for name, array in (("k", k), ("v", v))
    )
    return bind_axes([q, k, v], layout)


def bind_axes(
    arrays: list[jax.Array], layout: str
) -> tuple[list[jax.Array], dict[str, int], bool]:
    """`bind_qkv` without its checks of dtypes."""
    q, k, v = arrays
    shapes.one_of("layout", layout, LAYOUTS)
    batched = is_batched(q, axes(layout, "BTHD"))
    sizes: dict[str, int] = {}
    first = 0 if batched else 1
    for name, array, letters in (("q", q, "BTHD"), ("k", k, "BSGD"), ("v", v, "BSGV")):
        shapes.bind(sizes, name, array.shape, axes(layout, letters)[first:])
    sizes.setdefault("B", 1)
    check_heads(sizes, layout)
    return [with_batch(array, 4) for array in arrays], sizes, batched


def bind_lengths(
    q_lengths: Any, kv_lengths: Any, sizes: dict[str, int], batched: bool
) -> tuple[jax.Array | None, jax.Array | None, bool]:
    """Both lengths [B] int32 or None, and whether the two are the same.

    Where T = S, giving one of them gives both.
    """
    shared = sizes["T"] == sizes["S"] and (
        q_lengths is None or kv_lengths is None or are_known_equal(q_lengths, kv_lengths)
    )

    def bound(name: str, array: Any, axis: str) -> jax.Array | None:
        if array is None:
            return None
        lengths = shapes.lengths(name, array, sizes, axis, batched)
        check_lengths(name, array, axis, sizes[axis])
        return lengths

    if shared and (q_lengths is not None or kv_lengths is not None):
        if q_lengths is not None:
            lengths = bound("q_lengths", q_lengths, "T")
        else:
            lengths = bound("kv_lengths", kv_lengths, "S")
        return lengths, lengths, True
    return bound("q_lengths", q_lengths, "T"), bound("kv_lengths", kv_lengths, "S"), shared


def are_known_equal(a: Any, b: Any) -> bool:
    """Whether two lengths, lists of them or arrays are one object, or the same integers on the
    host."""
    if a is b:
        return True
    plain = _integers_on_host(a)
    return plain is not None and plain == _integers_on_host(b)


def _integers_on_host(given: Any) -> Any:
    if type(given) is np.ndarray and given.dtype.kind in "iu":
        return given.tolist()
    if type(given) is int:
        return given
    is_list = isinstance(given, (list, tuple)) and all(type(one) is int for one in given)
    return list(given) if is_list else None


def check_lengths(name: str, found: ArrayLike, axis: str, size: int) -> None:
    """An error of `checked` unless the lengths lie between 0 and the size of the axis."""
    check_within(name, found, 0, size, f"{axis}={size}")


def check_within(name: str, found: ArrayLike, low: int, high: int, high_name: str) -> None:
    """An error of `checked` unless the integers lie in [low, high]."""
    if checking.checking():
        found = jnp.asarray(found)
        nearest = shapes.clipped(found, low - 1, high + 1)
        checking.check(
            ((nearest >= low) & (nearest <= high)).all(),
            f"{name} must lie between {low} and {high_name}, got {{{name}}}",
            **{name: found},
        )


def bind_segments(
    segment_ids: Any,
    q_segment_ids: Any,
    kv_segment_ids: Any,
    sizes: dict[str, int],
    batched: bool,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Segment ids of queries [B, T] and keys [B, S], one array where one is given for both."""
    if (q_segment_ids is None) != (kv_segment_ids is None):
        missing = "q_segment_ids" if q_segment_ids is None else "kv_segment_ids"
        raise ValueError(f"{missing} must be given with its counterpart, or use segment_ids")
    if segment_ids is not None:
        if q_segment_ids is not None:
            raise ValueError("segment_ids cannot be given together with q_segment_ids")
        if sizes["T"] != sizes["S"]:
            raise ValueError(
                "segment_ids serves both sides, so it needs T = S; give q_segment_ids and "
                f"kv_segment_ids, got T={sizes['T']}, S={sizes['S']}"
            )

    def bound(name: str, array: Any, letters: str) -> jax.Array:
        ids = shapes.integers(name, array)
        shapes.bind(sizes, name, ids.shape, letters if batched else letters[1:])
        return with_batch(ids, 2)

    if segment_ids is not None:
        ids = _narrow_ids(bound("segment_ids", segment_ids, "BT"))[0]
        return ids, ids
    if q_segment_ids is None:
        return None, None
    q_ids = bound("q_segment_ids", q_segment_ids, "BT")
    if q_segment_ids is kv_segment_ids and sizes["T"] == sizes["S"]:
        q_ids = _narrow_ids(q_ids)[0]
        return q_ids, q_ids
    q_ids, kv_ids = _narrow_ids(q_ids, bound("kv_segment_ids", kv_segment_ids, "BS"))
    return q_ids, kv_ids


def _narrow_ids(*sides: jax.Array) -> list[jax.Array]:
    """Ids [B, T] or [B, S] of each side as int32, which are equal exactly where the ids were."""
    if all(shapes.fits_int32(ids.dtype) for ids in sides):
        return [ids.astype(jnp.int32) for ids in sides]
    both = jnp.result_type(*sides)
    holds_both = all(np.can_cast(ids.dtype, both) for ids in sides)
    if not holds_both or not jnp.issubdtype(both, jnp.integer):
        found = " and ".join(str(ids.dtype) for ids in sides)
        raise ValueError(
            f"q_segment_ids and kv_segment_ids must have one dtype, got {found}; convert one"
        )

    def ranks(sides: list[jax.Array]) -> list[jax.Array]:
        """The rank of an id among the sorted ids of both sides."""
        ordered = jnp.sort(jnp.concatenate(sides, axis=1), axis=1)
        place = jax.vmap(jnp.searchsorted)
        return [place(ordered, ids.astype(both)).astype(jnp.int32) for ids in sides]

    # JAX searches no array with an explicit axis.
    return meshes.call(
        ranks, list(sides), lambda: [meshes.sharded(*meshes.partition(ids)) for ids in sides]
    )


def starts_of_runs(ids: jax.Array) -> jax.Array:
    """Whether a run of equal ids starts here, [N] int32; the first one is not counted."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), (ids[1:] != ids[:-1]).astype(jnp.int32)])


def number_runs(ids: jax.Array) -> jax.Array:
    """[B, N] ids -> the number of the run that each belongs to."""
    return jnp.cumsum(jax.vmap(starts_of_runs)(ids), axis=1, dtype=jnp.int32)


def refuse_positive(decay: jax.Array, padded: bool = False) -> None:
    """Refuses a log decay above 0, which grows without bound, and NaN.

    NaN is accepted where the sequence is `padded`, since it may be in the padding. A traced decay
    is looked at inside `checked` alone, which accepts NaN as well.
    """
    if not decay.size:
        return
    if isinstance(decay, jax.core.Tracer):
        if checking.checking():
            above = decay > 0
            message = f"decay {shapes.IS_LOG_DECAY}, got values up to {{largest}}"
            checking.check(~above.any(), message, largest=jnp.where(above, decay, 0).max())
        return
    # Also where jit traces: what a traced function closes over is concrete.
    with jax.ensure_compile_time_eval():
        largest = float(decay.max())  # NaN where one of them is
        if padded and math.isnan(largest):
            largest = float(jnp.where(decay > 0, decay, 0).max())
    shapes.refuse_growing_decay(largest)


def pad_to_one(array: jax.Array, axis: int) -> jax.Array:
    """`array` with an empty axis padded to size 1; callers hide the padding by a length of 0."""
    if array.shape[axis]:
        return array
    shape = list(array.shape)
    shape[axis] = 1
    return jnp.zeros(shape, array.dtype)
