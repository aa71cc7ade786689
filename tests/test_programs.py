"""How many compiled programs stay in memory: the limit, what is dropped, and that it is freed."""

import gc
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import programs


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No programs from other tests, the default limit, and a warning that was not given yet."""
    monkeypatch.delenv(programs.VARIABLE, raising=False)
    monkeypatch.setattr(programs, "_warned", False)
    programs.clear()
    yield
    programs.program_limit(None)


def mappings():
    gc.collect()
    return len(Path("/proc/self/maps").read_text().splitlines())


class Named(programs.Program):
    def __init__(self, name, platform="cpu", pinned=False):
        super().__init__(platform)
        self.name, self.pinned = name, pinned

    def is_pinned(self):
        return self.pinned


def kept(found, names):
    """The names whose programs are still there."""
    return "".join(name for name in names if name in found._found)


def test_the_program_unused_for_longest_is_dropped():
    ato_jax.program_limit(3)
    found = programs.Programs()
    made = {name: found.find(name, lambda name=name: Named(name)) for name in "abc"}
    assert found.find("a", None) is made["a"] and len(found) == 3
    found.find("d", lambda: Named("d"))
    assert kept(found, "abcd") == "acd" and made["b"].is_dropped
    # The mark of "a" was cleared then.
    assert found.find("c", None) is made["c"]
    found.find("e", lambda: Named("e"))
    assert kept(found, "abcde") == "cde"


def test_a_program_in_use_is_never_dropped():
    """However many others come: each of them compiled once."""
    ato_jax.program_limit(2)
    found = programs.Programs()
    hot = found.find("hot", lambda: Named("hot"))
    for n in range(50):
        found.find(n, lambda n=n: Named(n))
        assert found.find("hot", None) is hot
    assert len(found) == 2


def test_platforms_are_counted_apart_and_pinned_ones_stay():
    ato_jax.program_limit(2)
    found = programs.Programs()
    for n in range(5):
        found.find(("gpu", n), lambda n=n: Named(n, "gpu", pinned=n < 3))
        found.find(("cpu", n), lambda n=n: Named(n))
    of_gpu = [n for n in range(5) if ("gpu", n) in found._found]
    assert of_gpu[:3] == [0, 1, 2] and len([n for n in range(5) if ("cpu", n) in found._found]) == 2


def test_other_dictionaries_forget_a_dropped_program():
    ato_jax.program_limit(1)
    found, others = programs.Programs(), {}
    first = found.find("first", lambda: Named("first"))
    found.also_known(first, others, "its other name", "value")
    assert others == {"its other name": "value"}
    found.find("second", lambda: Named("second"))
    assert not others
    # Too late: it was dropped by another thread meanwhile.
    found.also_known(first, others, "its other name", "value")
    assert not others


def test_the_limit_is_set_by_a_function_and_by_the_environment(monkeypatch):
    found = programs.Programs()
    monkeypatch.setenv(programs.VARIABLE, "2")
    for n in range(4):
        found.find(n, lambda n=n: Named(n))
    assert len(found) == 2
    ato_jax.program_limit(5)
    for n in range(4, 12):
        found.find(n, lambda n=n: Named(n))
    assert len(found) == 5
    ato_jax.program_limit(1)
    assert len(found) == 1
    ato_jax.program_limit(None)
    found.find("more", lambda: Named("more"))
    assert len(found) == 2
    monkeypatch.delenv(programs.VARIABLE)
    assert (programs._limit("cpu"), programs._limit("gpu")) == (128, 512)
    for wrong in (0, -1, True, 1.5, "many"):
        with pytest.raises(ValueError, match="limit must be None or an int of at least 1, got"):
            ato_jax.program_limit(wrong)
    for wrong in ("0", "-3", "many"):
        monkeypatch.setenv(programs.VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{programs.VARIABLE} must be a number .* got"):
            found.find("another", lambda: Named("another"))
    monkeypatch.delenv(programs.VARIABLE)
    assert found.find("another", lambda: Named("another")).name == "another"


def test_a_warning_says_once_that_a_dropped_program_was_needed():
    ato_jax.program_limit(1)
    found = programs.Programs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in "abc":
            found.find(name, lambda name=name: Named(name))
    with pytest.warns(RuntimeWarning, match="more than 1 are in use: raise .*program_limit"):
        found.find("a", lambda: Named("a"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.find("b", lambda: Named("b"))


def test_calls_outside_of_jit_take_bounded_memory():
    """Eager gradients, too: JAX compiles several programs for each."""
    ato_jax.program_limit(2)

    def step(T):
        q = jnp.asarray(np.random.default_rng(T).standard_normal((1, T, 1, 2)), jnp.float32)

        def loss(q):
            return ato_jax.linear_attention(q, q, q, causal=True).sum()

        return jax.grad(loss)(q)

    found, taken = {}, []
    for T in range(2, 8):
        found[T] = step(T)
        taken.append(mappings())
    # What is eager beside the op, such as the sum, JAX keeps by itself: a few mappings.
    assert taken[5] - taken[2] < (taken[1] - taken[0]), taken
    with pytest.warns(RuntimeWarning, match="compiled again"):
        np.testing.assert_array_equal(step(2), found[2])


torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

import ato_torch  # noqa: E402
from ato_torch import _checked_calls, _kernels, _programs  # noqa: E402


def gradients(T):
    generator = torch.Generator().manual_seed(T)
    leaves = [torch.randn(1, 1, T, 2, generator=generator).requires_grad_() for _ in range(3)]
    out = ato_torch.linear_attention(*leaves, causal=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def test_many_lengths_from_pytorch_take_bounded_memory():
    ato_jax.program_limit(2)
    taken, first = [], gradients(2)
    for T in range(3, 7):
        gradients(T)
        taken.append(mappings())
    assert len(_programs.kept) == 2 and len(_checked_calls.checked) == 2
    assert max(taken) - taken[0] < 20, taken
    with pytest.warns(RuntimeWarning, match="compiled again"):
        again = gradients(2)
    assert all(map(torch.equal, again, first))


def test_a_graph_of_autograd_outlives_its_program():
    ato_jax.program_limit(1)
    wanted = gradients(3)
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(1, 1, 3, 2, generator=generator).requires_grad_() for _ in range(3)]
    outs = [ato_torch.linear_attention(*leaves, causal=True) for _ in range(3)]
    gradients(4)
    for out in outs:
        found = torch.autograd.grad(out.square().sum(), leaves)
        assert all(map(torch.equal, [out, *found], wanted))


@pytest.mark.filterwarnings("ignore:a program is compiled again")
def test_threads_that_drop_each_others_programs():
    wanted = {T: gradients(T) for T in (3, 4)}
    ato_jax.program_limit(1)
    failed = []

    def calls(T):
        for _ in range(4):
            if not all(map(torch.equal, gradients(T), wanted[T])):
                failed.append(T)

    threads = [threading.Thread(target=calls, args=(T,)) for T in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(_programs.kept) == 1


def test_explain_tells_of_the_program_that_the_call_runs():
    leaves = [torch.randn(1, 1, 3, 2) for _ in range(3)]
    ato_torch.linear_attention(*leaves)
    count = len(_programs.kept)
    ato_torch.explain(ato_torch.linear_attention, *leaves)
    assert len(_programs.kept) == count == 1


@pytest.mark.gpu
def test_kernels_of_many_lengths_are_unloaded_on_a_gpu():
    """But for those that a CUDA graph has captured: it is replayed afterwards."""

    def attend(tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = ato_torch.linear_attention(*leaves, causal=True)
        # Without its graph, which would hold on to the kernels of the backward.
        return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))

    def draw(T):
        return [torch.randn(1, 2, T, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    ato_jax.program_limit(2)
    held = draw(64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = attend(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(held)
    first = draw(65)
    of_first = attend(first)
    for T in range(66, 74):
        attend(draw(T))
    torch.cuda.synchronize()
    gc.collect()
    loaded = [each for each in gc.get_objects() if type(each) is _kernels.Kernels]
    assert sum(each.loaded.is_captured for each in loaded) == 2
    # A forward and a backward of each program that is kept, and of what others' tests hold.
    assert len(_programs.kept) == 2 and len(loaded) <= 4, loaded
    with torch.cuda.device(0):
        _kernels.unload_retired()
    assert not _kernels.retired
    for tensor in found:
        tensor.zero_()
    graph.replay()
    assert all(map(torch.equal, found, wanted))
    with pytest.warns(RuntimeWarning, match="compiled again"):
        again = attend(first)
    assert all(map(torch.equal, again, of_first))
