"""ato_torch under load: many threads in little memory, what a profiler sees, and a sanitizer.

Inputs are made anew for each call and dropped as soon as it returns, while a GPU is yet to read
them, and their memory is filled with NaN: a kernel that reads what was freed too early shows it.
"""

import concurrent.futures
import contextlib
import json
import random

import pytest

from tests import numerics
from tests.test_gpu import sanitized

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)
F = torch.nn.functional

import ato_torch  # noqa: E402

# Few, as each takes programs of its own: dtype, T, S, the heads of keys where there are 4 of
# queries, causal.
SIZES = (
    (torch.bfloat16, 256, 256, 2, True),
    (torch.float16, 96, 200, 4, False),
    (torch.float32, 64, 64, 1, True),
)
B, H, D = 2, 4, 64
# Of a call's result, how often it is compared, and how often its gradients are asked for.
CHECKED, DIFFERENTIATED = 0.05, 0.25


def draw(sizes, seed, device):
    """q, k, v and a cotangent, the same for a seed."""
    dtype, T, S, G, _ = sizes
    generator = torch.Generator(device).manual_seed(seed)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, D), (B, H, T, D))
    return [
        torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()
        for shape in shapes
    ]


def results(function, tensors, causal, differentiates):
    query, key, value, cotangent = tensors
    if not differentiates:
        with torch.no_grad():
            return [function(query, key, value, is_causal=causal, enable_gqa=True)]
    out = function(query, key, value, is_causal=causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), cotangent)]


def array(tensor):
    return tensor.detach().double().cpu().numpy()


def math(query, key, value, is_causal, enable_gqa):
    """PyTorch's MATH by its own name: what chooses a backend holds for all threads at once."""
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, is_causal=is_causal, enable_gqa=enable_gqa
    )[0]


def compare(found, sizes, seed, device):
    dtype, *_, causal = sizes
    tensors = [one.detach().double().requires_grad_() for one in draw(sizes, seed, device)]
    exact = results(math, tensors, causal, differentiates=len(found) > 1)
    for name, ours, wanted in zip(("out", "dq", "dk", "dv"), found, exact, strict=False):
        numerics.check(name, array(ours), array(wanted), dtype=str(dtype).removeprefix("torch."))


def call(sizes, seed, device, differentiates, checks):
    *_, causal = sizes
    tensors = draw(sizes, seed, device)
    found = results(ato_torch.attention, tensors, causal, differentiates)
    shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
    del tensors
    # In the memory that was freed.
    scrap = [torch.full(shape, torch.nan, dtype=dtype, device=device) for shape, dtype in shapes]
    if checks:
        compare(found, sizes, seed, device)
    del scrap


def many_calls(number, count, device, streams):
    """Of one thread; every other has a stream of its own."""
    chosen = random.Random(number)
    own = streams and number % 2
    with torch.cuda.stream(torch.cuda.Stream()) if own else contextlib.nullcontext():
        for n in range(count):
            call(
                chosen.choice(SIZES),
                number * count + n,
                device,
                chosen.random() < DIFFERENTIATED,
                chosen.random() < CHECKED,
            )
    return count


def stress(threads, count, device):
    # Compiled once, before.
    for sizes in SIZES:
        for differentiates in (False, True):
            call(sizes, 0, device, differentiates, checks=True)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        runs = [
            pool.submit(many_calls, number, count, device, device == "cuda")
            for number in range(threads)
        ]
        assert sum(run.result() for run in runs) == threads * count


def test_threads_and_dropped_tensors():
    stress(threads=2, count=50, device="cpu")


@contextlib.contextmanager
def little_memory(limit):
    """PyTorch's allocator with so many bytes at most, nine tenths of which are taken."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        taken = int(0.9 * limit) - torch.cuda.memory_allocated()
        ballast = torch.empty(taken, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() >= 0.9 * limit - 1024
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(limit // 5, dtype=torch.uint8, device="cuda")
        yield
        del ballast
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.kernels("attention")
def test_threads_and_dropped_tensors_on_a_gpu():
    # What is left is shared by eight threads, most of which have a pool of memory of their own.
    with little_memory(16 << 30):
        stress(threads=8, count=1000, device="cuda")
        torch.cuda.synchronize()


# Host calls that wait for a GPU, by the names of CUDA's runtime and of its driver, which JAX calls.
WAITS = ("Synchronize", "cudaMemcpy_", "cuMemcpyHtoD_", "cuMemcpyDtoH_", "cuMemcpyDtoD_")


def waits(step, path):
    """What waits within a step, from a profiler's trace: calls by the host, on any of its threads,
    and copies between host and device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("the step"):
            step()
        # So that the step's end is not the profiler's own, which waits.
        with torch.profiler.record_function("after it"):
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    (whole,) = [
        event
        for event in events
        if event.get("name") == "the step" and event.get("cat") == "user_annotation"
    ]
    first, last = whole["ts"], whole["ts"] + whole["dur"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    found = []
    for event in events:
        name, kind = event.get("name", ""), event.get("cat", "")
        within = first <= event.get("ts", -1) <= last
        if kind in ("cuda_runtime", "cuda_driver") and within:
            if any(word in f"{name}_" for word in WAITS):
                found.append(name)
        elif kind == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            found.append(name)
    return found, kernels


class Model(torch.nn.Module):
    """Softmax attention with a window and linear attention, over one projection."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(H * D, 3 * H * D)
        self.out = torch.nn.Linear(H * D, H * D)

    def forward(self, x):  # [B, T, H * D]
        heads = self.project(x).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)
        mixed = ato_torch.attention(*heads, is_causal=True, window=(99, 0))
        mixed = mixed + ato_torch.linear_attention(*heads, causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


@pytest.mark.gpu
def test_nothing_in_a_step_of_training_waits(tmp_path):
    model = Model().cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(B, 256, H * D, device="cuda", dtype=torch.bfloat16)

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    found, kernels = waits(step, tmp_path / "step.json")
    assert any("attention" in name for name in kernels), kernels
    assert not found, found
    # What it would say, of a value that is read and of one that is written.
    found, _ = waits(lambda: step().item(), tmp_path / "reads.json")
    assert "cudaStreamSynchronize" in found and any("DtoH" in name for name in found), found
    found, _ = waits(lambda: step() + torch.ones(()).cuda(), tmp_path / "writes.json")
    assert any("HtoD" in name for name in found), found


@pytest.mark.gpu
def test_the_bridge_reads_and_writes_within_bounds():
    check_within_bounds("from PyTorch")


@pytest.mark.gpu
@pytest.mark.kernels("mosaic_attention", "mosaic_gpu")
def test_mosaic_gpu_from_pytorch_reads_and_writes_within_bounds():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Mosaic GPU's kernels are for Hopper")
    check_within_bounds("from PyTorch, mosaic_gpu")


def check_within_bounds(name):
    # A kernel's parameters are asked for until the driver says that there is no more.
    status, printed = sanitized(name, "--report-api-errors", "no")
    clean = status == 0 and "ERROR SUMMARY: 0 errors" in printed
    assert clean, f"{name!r} ended with {status}:\n{printed[-6000:]}"
