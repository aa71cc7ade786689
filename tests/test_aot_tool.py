"""The compiler without a GPU: it sees spills and shared memory, and its cache hides nothing."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import ato_jax
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from tests import aot

pytestmark = aot.requires_triton


def matmul_kernel(x_ref: Any, y_ref: Any, out_ref: Any, *, D_block: int, eviction: str | None):
    def step(index, total):
        inner = pl.ds(index * D_block, D_block)
        x = plgpu.load(x_ref.at[:, inner], eviction_policy=eviction)  # [T_block, D_block]
        y = plgpu.load(y_ref.at[inner, :], eviction_policy=eviction)  # [D_block, V_block]
        return total + plgpu.dot(x, y)

    steps = x_ref.shape[1] // D_block
    total = jax.lax.fori_loop(0, steps, step, jnp.zeros(out_ref.shape, jnp.float32))
    plgpu.store(out_ref, total.astype(out_ref.dtype), eviction_policy=eviction)


def matmul(
    x: jax.Array,
    y: jax.Array,
    *,
    block: tuple[int, int, int] = (64, 64, 32),
    num_warps: int = 4,
    num_stages: int = 3,
    eviction: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    T_block, V_block, D_block = block
    T, D = x.shape
    V = y.shape[1]
    call = pallas_call(
        functools.partial(matmul_kernel, D_block=D_block, eviction=eviction),
        out_shape=jax.ShapeDtypeStruct((T, V), x.dtype),
        grid=(T // T_block, V // V_block),
        in_specs=[
            pl.BlockSpec((T_block, D), lambda i, j: (i, 0)),
            pl.BlockSpec((D, V_block), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((T_block, V_block), lambda i, j: (i, j)),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        name="matmul",
    )
    with ato_jax.interpret(interpret):
        return call(x, y)


SQUARE = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setattr(aot, "CACHE", cache)
    return cache


def refuse(*args: object) -> None:
    raise RuntimeError("cannot compile")


def test_shared_limits_are_nvidias():
    assert aot.SHARED_LIMIT == {80: 166_912, 90: 232_448}


def test_blocked_matmul_compiles_for_both_without_spills():
    compiled = aot.compile_function(matmul, SQUARE, SQUARE)
    assert [kernel.capability for kernel in compiled] == [80, 90]
    for kernel in compiled:
        assert (kernel.name, kernel.grid) == ("matmul", (8, 8, 1))
        assert (kernel.num_warps, kernel.num_stages) == (4, 3)
        assert not kernel.spills
        # The accumulator alone is 64 * 64 floats over 128 threads.
        assert 32 < kernel.registers < 255
        # Two stages of two bfloat16 tiles of 64 x 32 at the least.
        assert kernel.fits and kernel.shared_bytes >= 2 * 2 * 64 * 32 * 2


def test_the_record_is_believed_but_for_a_few(monkeypatch):
    figures = [[one.registers, one.shared_bytes, 0, 0] for one in matmul_compiled()]
    assert figures[0] != figures[1]

    class Always(dict):
        def get(self, key):
            return figures[0]

    monkeypatch.setattr(aot, "_recorded", Always)
    monkeypatch.setattr(aot, "COMPILED_ANYWAY", "no digit")
    assert [one.registers for one in matmul_compiled()] == [figures[0][0]] * 2
    monkeypatch.setattr(aot, "COMPILED_ANYWAY", "")
    with pytest.raises(RuntimeError, match="aot_record.json has .* for 'matmul', found"):
        matmul_compiled()


def test_what_was_compiled_goes_into_the_record(tmp_path, monkeypatch):
    (tmp_path / "record.json").write_text('{"old": [1]}')
    monkeypatch.setattr(aot, "RECORD", tmp_path / "record.json")
    aot._recorded.cache_clear()
    compiled = matmul_compiled()
    aot.record()
    aot._recorded.cache_clear()
    found = aot._recorded()
    assert found.pop("old") == [1]
    assert sorted(found.values()) == sorted(
        [one.registers, one.shared_bytes, one.spill_stores, one.spill_loads] for one in compiled
    )
    aot._recorded.cache_clear()


def matmul_compiled():
    return aot.compile_function(matmul, SQUARE, SQUARE)


def test_warps_and_stages_reach_the_compiler():
    wide = functools.partial(matmul, num_warps=8, num_stages=5)
    for narrow, other in zip(
        aot.compile_function(matmul, SQUARE, SQUARE),
        aot.compile_function(wide, SQUARE, SQUARE),
        strict=True,
    ):
        assert (other.num_warps, other.num_stages) == (8, 5)
        assert other.registers < narrow.registers
        assert other.shared_bytes > narrow.shared_bytes


def test_a_huge_accumulator_spills():
    # 128 x 128 floats over 32 threads are 512 registers, and a thread has 255.
    huge = functools.partial(matmul, block=(128, 128, 16), num_warps=1)
    for kernel in aot.compile_function(huge, SQUARE, SQUARE):
        assert kernel.spills
        assert kernel.registers == 255
        assert kernel.spill_stores > 0 and kernel.spill_loads > 0


def test_too_much_shared_memory_is_seen():
    # One stage of two bfloat16 tiles of 128 x 128 is 64 KiB, and there are at least seven.
    deep = functools.partial(matmul, block=(128, 128, 128), num_warps=8, num_stages=8)
    x = jax.ShapeDtypeStruct((128, 2048), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((2048, 128), jnp.bfloat16)
    for kernel in aot.compile_function(deep, x, y):
        assert not kernel.fits
        assert kernel.shared_bytes > aot.SHARED_LIMIT[kernel.capability]


def test_shared_memory_is_known_before_machine_code():
    deep = functools.partial(matmul, num_stages=4)
    for kernel in aot.compile_function(deep, SQUARE, SQUARE):
        asked = aot.shared_bytes(deep, SQUARE, SQUARE, capability=kernel.capability)
        assert asked == {"matmul": kernel.shared_bytes}


def test_every_launch_is_returned():
    def twice(x, y):
        return matmul(matmul(x, y), y, num_warps=8)

    compiled = aot.compile_function(twice, SQUARE, SQUARE, capabilities=(90,))
    assert [kernel.num_warps for kernel in compiled] == [4, 8]


def test_eviction_policies_compile():
    streaming = functools.partial(matmul, eviction="evict_first")
    [kernel] = aot.triton_kernels(streaming, SQUARE, SQUARE, capability=90)
    assert kernel.ttir.count("evictionPolicy = evict_first") == 3
    [compiled] = aot.compile_function(streaming, SQUARE, SQUARE, capabilities=(90,))
    assert not compiled.spills


def test_no_kernel_is_an_error():
    with pytest.raises(ValueError, match="no Triton kernel"):
        aot.compile_function(functools.partial(matmul, interpret=True), SQUARE, SQUARE)


def test_an_unchanged_kernel_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch):
    first = aot.compile_function(matmul, SQUARE, SQUARE)
    monkeypatch.setattr(aot, "_figures", refuse)
    assert aot.compile_function(matmul, SQUARE, SQUARE) == first
    with pytest.raises(RuntimeError, match="cannot compile"):
        aot.compile_function(functools.partial(matmul, num_stages=2), SQUARE, SQUARE)


def test_a_failure_is_not_cached(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(aot, "_figures", refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot compile") as failure:
            aot.compile_function(matmul, SQUARE, SQUARE)
        assert failure.value.__notes__ == ["while compiling the kernel 'matmul' for sm_80"]
    assert not empty_cache.exists()


def test_what_triton_cannot_read_fails():
    [kernel] = aot.triton_kernels(matmul, SQUARE, SQUARE, capability=90)
    broken = dataclasses.replace(kernel, ttir=kernel.ttir.replace("tt.dot", "tt.unknown"))
    with pytest.raises(RuntimeError):
        aot._figures(broken, 90)
