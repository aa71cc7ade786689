"""Decays and segments beside heads of 129 to 256 columns by the Hopper kernels: interpreted beside
the float64 reference, with borders at the edges of chunks, runs and pieces and within them."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, PLAIN, against_the_reference, draw, options_of
from test_mosaic_lengths import decay_of

import ato_jax
from ato_jax import mosaic
from ato_jax.ops.linear_attention import mosaic_gpu
from ato_jax.ops.linear_attention.mosaic_gpu import wide_factors, wide_heads
from ato_jax.ops.linear_attention.scans import borders, gates
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

# Rows of each segment. A run has 256 rows, and a chunk 64.
SEGMENTS = {
    "edges": (256, 64, 192, 128),
    "some": (40, 1, 23, 100, 36, 60, 380),
    "one": (640,),
    "late": (520, 10, 1, 109),
    "short": (*(1,) * 70, *(3,) * 100, 270),
}


def ids_of(T: int, *names: str) -> jax.Array:
    """[B, T]: a batch entry for each name."""
    rows = [np.repeat(np.arange(len(SEGMENTS[name])), SEGMENTS[name])[:T] for name in names]
    return jnp.asarray(np.stack(rows))


@newest
@pytest.mark.parametrize(
    "D, T, H, layout, names, decay, given, options",
    [
        (192, 320, 1, "bthd", ("some", "edges"), None, True, {}),
        (160, 520, 1, "bhtd", ("late",), None, False, {"feature_map": "silu"} | PLAIN),
        (192, 320, 2, "bhtd", None, "step", True, {}),
        (144, 520, 1, "bthd", None, "step", False, {"feature_map": "exp"}),
        (144, 264, 1, "bthd", None, "strong", False, {}),
        (176, 136, 1, "bthd", None, "step", False, {"feature_map": "identity"} | PLAIN),
        (192, 576, 1, "bthd", ("late", "some"), "step", True, {}),
        (160, 328, 1, "bhtd", ("short",), "step", False, {"feature_map": "silu"} | PLAIN),
    ],
)
def test_beside_the_reference(
    D: int,
    T: int,
    H: int,
    layout: str,
    names: tuple[str, ...] | None,
    decay: str | None,
    given: bool,
    options: dict[str, Any],
) -> None:
    """Some calls take a state, and return that of the last segment. Where a segment begins, nothing
    is left to decay."""
    B = len(names or "1")
    options = options_of(B, H, layout, given, D) | options
    if names is not None:
        options["segment_ids"] = ids_of(T, *names)
    if decay is not None:
        options["decay"] = decay_of("step", B, T, H, layout) * (5 if decay == "strong" else 1)
    wanted = numerics.oracle(OP, *draw(B, T, H, H, layout, D=D), causal=True, **options)
    configs = dict.fromkeys(("forward_config", "backward_config"), {"pieces": 2, "blocks": 3})
    with ato_jax.interpret():
        found = numerics.run_backends(
            "mosaic_gpu", "mosaic_gpu", wanted, device=channel.GPU, **configs
        )
    numerics.compare(found, wanted)
    if names is not None and decay is not None:
        ids = options["segment_ids"]
        begins = np.diff(ids, axis=1, prepend=0 if given else -1) != 0
        of_steps = found["ddecay"] if layout == "bthd" else jnp.swapaxes(found["ddecay"], 1, 2)
        assert begins.any() and not np.any(np.asarray(of_steps)[begins])


@newest
def test_groups_share_a_decay() -> None:
    """The forward pass alone: these gradients need H = G."""
    options = {"segment_ids": ids_of(320, "some"), "decay": decay_of("step", 1, 320, 1, "bthd")}
    wanted = numerics.oracle(OP, *draw(1, 320, 2, 1, D=144), causal=True, **options)
    against_the_reference("mosaic_gpu", "triton", wanted)


@newest
@pytest.mark.parametrize("T, strength, is_steep", [(136, 3.0, False), (144, 40.0, True)])
def test_steep_chunks_are_the_next_backends(
    T: int, strength: float, is_steep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward every decay is exact; the gradients of a call with a steep chunk are Triton's."""
    taken = []
    run = wide_heads.unless_steep

    def told(gates: Any, *others: Any) -> Any:
        rows = gates.reshape(-1, 64)
        steep = wide_heads.frame.is_steep(others[2], rows[:, 31], rows[:, 63])
        jax.debug.callback(lambda found: taken.append(bool(found)), jnp.any(steep))
        return run(gates, *others)

    monkeypatch.setattr(wide_heads, "unless_steep", told)
    decay = decay_of("step", 1, T, 1, "bthd") * strength
    wanted = numerics.oracle(OP, *draw(1, T, 1, 1, D=144), causal=True, decay=decay)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)
    assert taken == [is_steep]


def check_gradients_under_vmap(*arrays: jax.Array, **options: Any) -> None:
    """Compares the kernels' gradients of q, k, v and a decay, under vmap over the batch, with those
    of plain JAX in float32 on the whole batch."""

    def gradients(*arrays: jax.Array, implementation: str = "mosaic_gpu") -> Any:
        def loss(q: Any, k: Any, v: Any, decay: Any) -> Any:
            out = ato_jax.linear_attention(
                q, k, v, decay=decay, implementation=implementation, **options
            )
            return jnp.sum(out.astype(jnp.float32) * jnp.arange(out.shape[-1]))

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays)

    with ato_jax.interpret():
        found = jax.vmap(gradients)(*(x[:, None] for x in arrays))
    wanted = gradients(*(x.astype(jnp.float32) for x in arrays), implementation="xla")
    for own, exact in zip(found, wanted, strict=True):
        error = jnp.linalg.norm((own[:, 0] - exact).ravel())
        assert error < 1e-2 * jnp.linalg.norm(exact.ravel())


@newest
@pytest.mark.parametrize("strength", [1.0, 40.0])
def test_under_vmap(strength: float) -> None:
    """The arrays become a larger batch, so that the branch on steep chunks stays one."""
    decay = decay_of("step", 2, 136, 1, "bthd") * strength
    arrays = (*draw(2, 136, 1, 1, D=144), decay)
    check_gradients_under_vmap(*arrays, causal=True)


@newest
@pytest.mark.parametrize(
    "D, T, layout, dtype, decay, names, given, options",
    [
        (192, 320, "bthd", "bfloat16", -1.29, None, False, {}),
        (160, 320, "bhtd", "bfloat16", -0.01, None, True, {}),
        (144, 584, "bthd", "bfloat16", -1e-3, None, False, {"feature_map": "identity"} | PLAIN),
        (152, 328, "bthd", "bfloat16", -0.03, "some", False, {"feature_map": "relu"}),
        (160, 323, "bthd", "float16", -0.02, None, False, {"feature_map": "silu"} | PLAIN),
        (144, 300, "bhtd", "float16", -30.0, None, False, {}),
        (192, 320, "bthd", "float16", -0.3, "edges", True, {}),
    ],
)
def test_gradients_of_a_decay_per_head(
    D: int,
    T: int,
    layout: str,
    dtype: str,
    decay: float,
    names: str | None,
    given: bool,
    options: dict[str, Any],
) -> None:
    """Each is a sum over all pairs of rows: of any decay, also of a steep one."""
    options = options_of(1, 2, layout, given, D) | options
    if names is not None:
        options["segment_ids"] = ids_of(T, names)
    options["decay"] = decay * jnp.asarray([1.0, 1.3])
    arrays = (x.astype(dtype) for x in draw(1, T, 2, 2, layout, D=D))
    wanted = numerics.oracle(OP, *arrays, causal=True, **options)
    configs = dict.fromkeys(("forward_config", "backward_config"), {"pieces": 2, "blocks": 3})
    with ato_jax.interpret():
        found = numerics.run_backends(
            "mosaic_gpu", "mosaic_gpu", wanted, device=channel.GPU, **configs
        )
    numerics.compare(found, wanted)
    # Running sums over runs of rows are up to 2e-2 off in bfloat16, and by chance less than that.
    error = jnp.linalg.norm(found["ddecay"] - wanted.exact["ddecay"])
    assert error < 3e-3 * jnp.linalg.norm(wanted.exact["ddecay"])


@newest
@pytest.mark.usefixtures("no_races")
def test_gradients_of_a_decay_per_head_of_256_columns() -> None:
    """Beside v of the own rows shared memory has room for three tiles."""
    options = {"segment_ids": ids_of(328, "some"), "decay": jnp.asarray([-0.05])}
    wanted = numerics.oracle(OP, *draw(1, 328, 1, 1, D=256), causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


def test_gradients_of_a_decay_per_head_are_chosen() -> None:
    arrays = draw(1, 64, 1, 1, D=256)
    request, _ = numerics.prepare(OP, *arrays, causal=True, decay=decay_of("head", 1, 64, 1, ""))
    spec = dataclasses.replace(request.spec, T=2**17, S=2**17)
    assert mosaic_gpu.unsupported(spec, "forward") is None
    assert mosaic_gpu.unsupported(spec, "backward") is None
    assert not mosaic_gpu.needs_fallback(spec)
    assert mosaic_gpu.beats_later_backends(spec, channel.GPU, False)
    assert mosaic_gpu.beats_later_backends(spec, channel.GPU, True)


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("T", [600, 640])
@pytest.mark.parametrize("decay", [None, "step"])
def test_factors(name: str, T: int, decay: str | None) -> None:
    """What each row reads, adds and sees is made of the decays between two rows."""
    sizes = {"B": 1, "T": T, "S": T, "G": 1}
    spec: Any = types.SimpleNamespace(**sizes, layout="bthd", causal=True, decay=decay)
    ids = ids_of(T, name)
    steps = jnp.where(borders.are_borders(ids)[..., None], 0.0, decay_of("step", 1, T, 1, "bthd"))
    with ato_jax.interpret():
        of_borders = borders.of_sequence(spec, mosaic.Deal(1, 1, T, 512, 2, 1), ids)
        sums = gates.of_steps(spec, steps) if decay else None
    found = wide_factors.factors_of(spec, sums, of_borders)
    assert found is not None and found.first is not None and found.last is not None
    log = np.cumsum(np.asarray(steps)[0, :, 0], dtype=np.float64) if decay else np.zeros(T)
    own = np.asarray(ids)[0]

    def left(i: int, j: int) -> float:
        """What row i sees of row j, or of what is ahead of row 0."""
        if own[i] != own[max(j, 0)]:
            return 0.0
        return float(np.exp(log[i] - (log[j] if j >= 0 else 0.0)))

    for i in range(T):
        run, chunk = i // 256 * 256, i // 64 * 64
        end, last = min(T, chunk + 64) - 1, min(T, run + 256) - 1
        at = 0, 0, i
        assert found.reads[at] == pytest.approx(left(i, run - 1), rel=1e-5, abs=1e-30)
        assert found.reads_of_chunk[at] == pytest.approx(left(i, chunk - 1), rel=1e-5, abs=1e-30)
        assert found.adds[at] == pytest.approx(left(end, i), rel=1e-5, abs=1e-30)
        assert found.keeps[at] == pytest.approx(left(end, chunk - 1), rel=1e-5, abs=1e-30)
        if last + 1 < T:
            behind = left(last, i) if own[last] == own[last + 1] else 0.0
            assert found.reads_behind[at] == pytest.approx(behind, rel=1e-5, abs=1e-30)
        seen = np.flatnonzero(own[run : i + 1] == own[i]) + run
        assert max(int(found.first[0, i]), run) == seen[0]
        later = np.flatnonzero(own[i : last + 1] == own[i]) + i
        assert min(int(found.last[0, i]), last) == later[-1]


@pytest.mark.parametrize("causal", [False, True])
def test_factors_have_32_bits_whatever_the_callers_have(causal: bool) -> None:
    sizes = {"B": 1, "T": 328, "S": 328, "G": 1}
    spec: Any = types.SimpleNamespace(**sizes, layout="bthd", causal=causal, decay=None)
    with ato_jax.interpret():
        of_borders = borders.of_sequence(
            spec, mosaic.Deal(1, 1, 328, 512, 1, 1), ids_of(328, "some")
        )
    with jax.enable_x64(True):
        found = wide_factors.factors_of(spec, None, of_borders)
    assert {x.dtype.itemsize for x in found or () if x is not None} == {4}
