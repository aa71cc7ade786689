"""What all tests share: hypothesis profiles, the skip where there is no GPU, compile settings.

ATO_HYPOTHESIS_PROFILE picks a profile. With ATO_SAMPLE=9 about every 9th test runs, drawn by its
name, and all that are marked `newest`. Tests that take long are skipped where they passed with the
same sources (long_tests.py). With ATO_HIDE_TRITON=1 JAX has no lowering to Triton, and tests that
need one are skipped.
"""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Iterator

import hypothesis
import jax
import pytest

from tests import long_tests, receipt, without_triton

# Here, before any test imports the library.
HIDES_TRITON = os.environ.get("ATO_HIDE_TRITON") == "1"
if HIDES_TRITON:
    without_triton.hide()

# Nearly all of the time goes into XLA's compiler for CPUs, which reads these when it starts: by
# default it spreads a program over several modules, and makes each fusion by way of MLIR, which
# takes half of the time. From 0.11 on there is no other way, and the flag would end the process.
# On a GPU the search for the fastest of XLA's own products is left out: many workers share it.
XLA_FLAGS = ["--xla_cpu_parallel_codegen_split_count=1", "--xla_gpu_autotune_level=0"]
if jax.__version_info__ < (0, 11):
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*XLA_FLAGS, os.environ.get("XLA_FLAGS", "")])

# quick and default draw the same examples every time, so that no build fails by luck, and leave a
# failing one as it is: it prints short already, and every step of shrinking would compile anew.
for name, examples, settled in (
    ("quick", 2, True),
    ("default", 3, True),
    ("thorough", 300, False),
):
    hypothesis.settings.register_profile(
        name,
        max_examples=examples,
        derandomize=settled or "CI" in os.environ,
        deadline=None,
        print_blob=True,
        phases=[
            phase
            for phase in hypothesis.Phase
            if phase is not hypothesis.Phase.explain
            and not (settled and phase is hypothesis.Phase.shrink)
        ],
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
        ],
    )
hypothesis.settings.load_profile(os.environ.get("ATO_HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True, scope="module")
def _what_was_compiled_is_let_go() -> Iterator[None]:
    """Each program holds mappings of memory, of which Linux grants a process 65,530: where they run
    out, LLVM ends in a segmentation fault."""
    yield
    from ato_jax import programs  # not before Triton may be hidden

    programs.clear()
    jax.clear_caches()


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


# The interpreter of Mosaic GPU kernels keeps a thread of XLA's for each warpgroup, which wait for
# one another; XLA has as many as there are cores, or as this says.
os.environ.setdefault("NPROC", "32")


def pytest_configure(config: pytest.Config) -> None:
    # A trace leaves many objects and little garbage: looking through them took a twentieth of all.
    gc.set_threshold(50_000, 20, 50)
    # As the flags above: nothing here is about the speed of what is compiled. Processes that tests
    # start read it from the environment: half of their time.
    if not has_gpu():
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # With workers, their parent hears of all outcomes.
    if long_tests.mode() == "record" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(long_tests.Recorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed_before = long_tests.skip(items)
    sample = int(os.environ.get("ATO_SAMPLE", "1"))
    drawn = {
        item
        for item in items
        if item.get_closest_marker("newest") or zlib.crc32(item.nodeid.encode()) % sample == 0
    }
    drawn |= passed_before
    config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
    items[:] = [item for item in items if item in drawn]
    if HIDES_TRITON:
        for item in items:
            if item.get_closest_marker("lowering"):
                item.add_marker(pytest.mark.skip(reason="is about Pallas's lowering to Triton"))
    if has_gpu():
        return
    reason = f"needs an NVIDIA GPU; JAX finds {', '.join(map(str, jax.devices()))} alone"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _lacks_triton(error: BaseException | None) -> bool:
    from ato_jax import launch

    while error is not None:
        if isinstance(error, NotImplementedError) and str(launch.no_triton) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _skips_what_lacks_triton() -> Iterator[None]:
    try:
        return (yield)
    except Exception as error:
        if HIDES_TRITON and _lacks_triton(error):
            pytest.skip("needs Pallas's lowering to Triton, which is hidden")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    return (yield from _skips_what_lacks_triton())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = long_tests.used()
    try:
        return (yield from _skips_what_lacks_triton())
    finally:
        item.user_properties.append((long_tests.CPU_SECONDS, long_tests.used() - before))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if has_gpu():
        receipt.after(session)
