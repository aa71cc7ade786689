"""Causal segments by the Hopper kernels: interpreted beside the float64 reference, with borders
between and within chunks and pieces."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, SMALL, against_the_reference, draw, options_of
from test_mosaic_lengths import decay_of, poisoned

import ato_jax
from ato_jax import launch, mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu import steps as decay_steps
from ato_jax.ops.linear_attention.scans import borders
from tests import aot, numerics
from tests.interpreted import newest, no_races  # noqa: F401

# Rows of each segment: borders at the edges of chunks and of the pieces of two chunks; several in a
# chunk; of one row each; within the last chunk, which is cut.
SEGMENTS = {
    "edges": (64, 64, 72),
    "some": (40, 1, 23, 100, 36),
    "short": (*(1,) * 70, *(3,) * 20, 70),
    "one": (200,),
    "late": (130, 10, 1, 59),
}
# The error of the decays' gradient over one segment, beside its norm.
SEGMENT_BUDGET = 5e-3


def ids_of(*names: str, length: int = 200) -> jax.Array:
    """[B, length]: a batch entry for each name."""
    rows = [np.repeat(np.arange(len(SEGMENTS[name])), SEGMENTS[name]) for name in names]
    return jnp.asarray(np.stack(rows)[:, :length])


@newest
@pytest.mark.parametrize(
    "D, H, G, layout, names, given, options",
    [
        (128, 1, 1, "bthd", ("some", "edges"), True, {}),
        (128, 2, 1, "bhtd", ("short",), False, {"feature_map": "silu", "normalize": False}),
        (128, 1, 1, "bhtd", ("late", "one"), False, {}),
        (64, 2, 2, "bthd", ("some", "short"), False, {}),
        (64, 2, 2, "bhtd", ("edges",), True, {"normalize": False, "feature_map": "exp"}),
        (64, 4, 2, "bthd", ("late",), True, {}),
        (96, 1, 1, "bthd", ("late",), True, {"feature_map": "relu"}),
        (40, 2, 2, "bhtd", ("some",), False, {}),
    ],
)
def test_segments_without_a_decay(
    D: int,
    H: int,
    G: int,
    layout: str,
    names: tuple[str, ...],
    given: bool,
    options: dict[str, Any],
) -> None:
    """Some calls take a state, which the first segment continues, and return that of the last."""
    B = len(names)
    options = options_of(B, G, layout, given, D) | {"segment_ids": ids_of(*names)} | options
    wanted = numerics.oracle(OP, *draw(B, 200, H, G, layout, D=D), causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "D, H, G, layout, names, decay, given, options",
    [
        (128, 1, 1, "bthd", ("some", "edges"), "step", True, {}),
        (128, 2, 1, "bhtd", ("short",), "step", False, {"feature_map": "silu", "normalize": False}),
        (128, 1, 1, "bhtd", ("late", "one"), "head", False, {}),
        (64, 2, 2, "bthd", ("some", "short"), "step", False, {}),
        (64, 4, 2, "bthd", ("late",), "head", True, {}),
        (96, 1, 1, "bthd", ("late",), "first piece", True, {"feature_map": "relu"}),
        (64, 2, 2, "bhtd", ("some",), "last piece", False, {}),
        (40, 2, 2, "bhtd", ("some", "late"), "steep", False, {}),
    ],
)
def test_segments_beside_a_decay(
    D: int,
    H: int,
    G: int,
    layout: str,
    names: tuple[str, ...],
    decay: str,
    given: bool,
    options: dict[str, Any],
) -> None:
    """Pieces with a steep chunk have no masks; one piece of two is such a one, or both, or none."""
    B = len(names)
    steps = decay_of("step" if "piece" in decay else decay, B, 200, G, layout)
    if "piece" in decay:
        rows = jnp.arange(200) < 128
        rows = rows if decay == "first piece" else ~rows
        steps = jnp.where(rows[:, None] if layout == "bthd" else rows, 20 * steps, steps)
    options = options_of(B, G, layout, given, D) | {"segment_ids": ids_of(*names)} | options
    wanted = numerics.oracle(
        OP, *draw(B, 200, H, G, layout, D=D), causal=True, decay=steps, **options
    )
    configs = dict.fromkeys(("forward_config", "backward_config"), SMALL)
    with ato_jax.interpret():
        found = numerics.run_backends(
            "mosaic_gpu", "mosaic_gpu", wanted, device=channel.GPU, **configs
        )
    numerics.compare(found, wanted)
    if decay != "head":
        # Nothing of earlier steps is left to decay where a segment begins, nor at the first step,
        # unless a state is given.
        begins = np.diff(options["segment_ids"], axis=1, prepend=0 if given else -1) != 0
        of_steps = found["ddecay"] if layout == "bthd" else jnp.swapaxes(found["ddecay"], 1, 2)
        assert begins.any() and not np.any(np.asarray(of_steps)[begins])


@newest
@pytest.mark.parametrize(
    "D, H, G, layout, decay, given, options",
    [
        (128, 1, 1, "bthd", "step", False, {}),
        (64, 2, 2, "bhtd", "first piece", True, {}),
        (64, 4, 2, "bthd", "head", False, {}),
        (128, 1, 1, "bthd", "head", False, {"feature_map": "silu", "normalize": False}),
        (64, 2, 2, "bthd", "head", False, {"feature_map": "silu", "normalize": False}),
    ],
)
def test_decays_of_unequal_segments(
    D: int,
    H: int,
    G: int,
    layout: str,
    decay: str,
    given: bool,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient of each segment's decays is right beside its own norm, where cotangents of some
    segments are a thousandth of others'. Where they are 0 it is exactly 0. That of a decay per head
    is taken before it is summed over steps."""
    ids = np.repeat(np.arange(5), (90, 50, 30, 40, 40))
    scales = jnp.array([1.0, 1e-3, 1.0, 0.0, 1e-3])[ids]
    T = len(ids)
    of_heads = decay_of("head", 1, T, G, layout)
    steps = decay_of("step", 1, T, G, layout)
    if decay == "head":
        steps = jnp.broadcast_to(of_heads, (1, T, G))
    if decay == "first piece":  # which has a steep chunk then
        steps = jnp.where(jnp.arange(T) < 128, 20 * steps, steps)
    options = options_of(1, G, layout, given, D) | {"segment_ids": jnp.asarray(ids)[None]} | options
    options |= {"return_state": False, "causal": True, "decay": steps}
    arrays = draw(1, T, H, G, layout, D=D)
    g = numerics.draw_cotangents(OP, numerics.prepare(OP, *arrays, **options)[0])
    of_rows = scales[:, None, None] if layout == "bthd" else scales[:, None]
    g = g._replace(out=(g.out * of_rows).astype(g.out.dtype))
    wanted = numerics.oracle(OP, *arrays, cotangents=g, **options)
    if decay == "head":
        request, _ = numerics.prepare(OP, *arrays, **options | {"decay": of_heads})
        wanted = dataclasses.replace(wanted, request=request)
        monkeypatch.setattr(
            decay_steps, "gradient_of_decay", lambda called, inputs, d_steps: d_steps
        )
    configs = dict.fromkeys(("forward_config", "backward_config"), SMALL)
    with ato_jax.interpret():
        found = numerics.run_backends(
            "mosaic_gpu", "mosaic_gpu", wanted, device=channel.GPU, **configs
        )
    time = 1 if layout == "bthd" else 2
    found, exact = (
        np.moveaxis(np.asarray(x["ddecay"], np.float64), time, 0) for x in (found, wanted.exact)
    )
    for run in range(5):
        error = np.linalg.norm(found[ids == run] - exact[ids == run])
        norm = np.linalg.norm(exact[ids == run])
        assert error <= SEGMENT_BUDGET * norm, (run, error, norm)
        assert (norm == 0) == (run == 3)


@newest
@pytest.mark.parametrize("D, H, G", [(128, 1, 1), (64, 2, 2)])
def test_lengths_and_segments(D: int, H: int, G: int) -> None:
    """Sequences end within a segment, and padding holds NaN."""
    lengths = jnp.array([90, 164], jnp.int32)
    arrays = poisoned(draw(2, 200, H, G, D=D), lengths, "bthd")
    options = options_of(2, G, "bthd", True, D) | {"segment_ids": ids_of("some", "late")}
    wanted = numerics.oracle(OP, *arrays, causal=True, kv_lengths=lengths, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize("D, H, backward", [(64, 2, "mosaic_gpu"), (128, 1, "triton")])
def test_rows_that_are_no_multiple_of_8(D: int, H: int, backward: str) -> None:
    options = {"segment_ids": ids_of("some", length=197)}
    wanted = numerics.oracle(OP, *draw(1, 197, H, H, D=D), causal=True, **options)
    against_the_reference("mosaic_gpu", backward, wanted)


@pytest.mark.parametrize("by", ["xla", pytest.param("triton", marks=aot.requires_triton)])
@pytest.mark.parametrize("T", [192, 200])
def test_rows_of_borders(T: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and XLA's form each find the borders that loops over rows find. The sequences have
    two pieces of two chunks."""
    if by == "xla":
        monkeypatch.setattr(launch, "no_triton", "is left out")
    lengths = [[1, 62, 1, 64, 1, T - 129], [T], [100, 28, T - 128], [T - 1, 1]]
    runs = np.stack([np.repeat(np.arange(len(own)), own) for own in lengths])
    whole = np.pad(runs, ((0, 0), (0, mosaic.whole_chunks(T) - T)), mode="edge")
    spec: Any = types.SimpleNamespace(B=4, T=T, S=T, G=2)
    deal = mosaic.Deal(4, 2, T, 2 * frame.C, 2, 3)
    with ato_jax.interpret():
        found = borders.of_sequence(spec, deal, jnp.asarray(runs))
    if by == "triton":
        made = functools.partial(borders.of_sequence, spec, deal)
        for kernel in aot.compile_function(made, jnp.asarray(runs), capabilities=(90,)):
            assert not kernel.spills and kernel.fits, kernel
    assert found.begins is not None and found.ends is not None and found.begun is not None
    assert found.chunks is not None and found.keeps is not None
    assert found.adding is not None and found.reading is not None
    for b, own in enumerate(whole):
        for chunk in range(whole.shape[1] // frame.C):
            first = chunk * frame.C
            rows = own[first : first + frame.C]
            ahead = own[max(first - 1, 0)]
            begins = [list(rows).index(run) for run in rows]
            ends = [frame.C - 1 - list(rows[::-1]).index(run) for run in rows]
            here = slice(first, first + frame.C)
            np.testing.assert_array_equal(found.begins[b, here], begins)
            np.testing.assert_array_equal(found.ends[b, here], ends)
            before = [ahead, *rows[:-1]]
            count = np.cumsum([run != last for run, last in zip(rows, before, strict=True)])
            np.testing.assert_array_equal(found.begun[b, here], count)
            assert list(found.chunks[b, chunk]) == [sum(rows == ahead), begins[-1]]
        for piece in range(2):
            first, end = piece * deal.rows, min(T, (piece + 1) * deal.rows)
            rows, ahead = own[first:end], own[max(first - 1, 0)]
            adds, reads = first + list(rows).index(rows[-1]), first + sum(rows == ahead)
            assert list(found.adding[b, piece]) == [adds, end]
            assert list(found.reading[b, piece]) == [first, reads]
            assert list(found.keeps[b, :, piece]) == [float(ahead == rows[-1])] * 2
