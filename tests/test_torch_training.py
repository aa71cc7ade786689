"""ato_torch in training as users train: whole models compiled, checkpointed, cast, on two ranks.

This file is also the program of both ranks of DistributedDataParallel and FSDP2, which gloo joins.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
import sys

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

from torch.utils import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import ato_torch  # noqa: E402
from tests import processes  # noqa: E402

F = torch.nn.functional
RANKS = 2
B, T, H, D, WORDS = 2, 8, 2, 16, 32
WIDTH = H * D


def by_sdpa(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def by_ours(query, key, value):
    return ato_torch.attention(query, key, value, is_causal=True)


class Block(torch.nn.Module):
    """A block of a transformer; `attend` is what is under test."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.project, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 32), torch.nn.GELU(), torch.nn.Linear(32, WIDTH)
        )

    def forward(self, x):  # [B, T, WIDTH]
        heads = self.project(self.norms[0](x)).unflatten(-1, (3, H, D))
        mixed = self.attend(*heads.permute(2, 0, 3, 1, 4))  # [B, H, T, D] each
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


class Model(torch.nn.Module):
    """A causal transformer of two layers; its output is the loss.

    `run(block, x)` calls a block: checkpoints are other ways to do so.
    """

    def __init__(self, attend, run=lambda block, x: block(x)):
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.words, self.head = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS)
        self.blocks = torch.nn.ModuleList(Block(attend) for _ in range(2))

    def forward(self, tokens):  # [B, T]
        x = self.words(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def batch(seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (B, T), generator=generator).to(device)


def trained(model, step=None, steps=3, device="cpu"):
    """The losses of some steps, and all weights after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = (model if step is None else step)(batch(number, device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses, [weight.detach() for weight in model.parameters()]


@functools.cache
def wanted():
    return trained(Model(by_sdpa))


def check(found):
    torch.testing.assert_close(found, wanted(), atol=1e-4, rtol=1e-4)


@pytest.fixture(autouse=True)
def _nothing_compiled_is_kept():
    torch._dynamo.reset()


# A whole model, compiled.


def test_a_model_compiled_as_a_whole():
    model = Model(by_ours)
    check(trained(model, torch.compile(model, fullgraph=True, backend="aot_eager")))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_a_model_compiled_with_less_overhead():
    model = Model(by_ours)
    check(trained(model, torch.compile(model, fullgraph=True, mode="reduce-overhead")))


def test_an_unchanged_model_compiled_inside_of_the_override():
    model = Model(by_sdpa)
    with ato_torch.sdpa_override() as calls:
        check(trained(model, torch.compile(model, fullgraph=True, backend="aot_eager")))
    assert calls.taken and not calls.left


@pytest.mark.gpu
@pytest.mark.kernels("attention")
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_a_model_compiled_with_less_overhead_on_a_gpu():
    """Its CUDA graphs hold all but this library's calls."""
    model = Model(by_ours).cuda()
    step = torch.compile(model, fullgraph=True, mode="reduce-overhead")

    def marked(tokens):
        torch.compiler.cudagraph_mark_step_begin()
        return step(tokens)

    found = trained(model, marked, 6, "cuda")
    exact = trained(Model(by_sdpa).cuda(), None, 6, "cuda")
    torch.testing.assert_close(found[0], exact[0], atol=2e-2, rtol=2e-2)


# Checkpoints.


def saving_ours(context, op, *_, **__):
    """Keeps what this library's op returns, and computes all else again."""
    ours = op is torch.ops.ato.forward.default
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if ours else policy.PREFER_RECOMPUTE


def selective():
    return checkpoint.create_selective_checkpoint_contexts(saving_ours)


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": selective},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("compiles", [False, True])
def test_checkpoints(name, compiles):
    if compiles and name == "reentrant":
        pytest.skip("torch.compile has no reentrant checkpoints of this form")

    def run(block, x):
        return checkpoint.checkpoint(block, x, **CHECKPOINTS[name])

    model = Model(by_ours, run)
    step = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else None
    check(trained(model, step))


@pytest.mark.parametrize(("name", "forwards"), [("not reentrant", 2), ("selective", 1)])
def test_what_a_checkpoint_computes_again(name, forwards):
    def run(block, x):
        return checkpoint.checkpoint(block, x, **CHECKPOINTS[name])

    model = Model(by_ours, run)
    with FlopCounterMode(display=False) as counter:
        model(batch()).backward()
    pairs = 2 * B * H * T * T * D * len(model.blocks)
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.ato.forward] == forwards * 2 * pairs
    assert counts[torch.ops.ato.backward] == 5 * pairs


# Mixed precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_scaler(dtype):
    """As near to float32 as PyTorch's own is; the backward pass runs outside of autocast."""
    results = []
    for attend, enabled in ((by_sdpa, False), (by_sdpa, True), (by_ours, True)):
        model = Model(attend)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=1024.0)
        for number in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=enabled):
                loss = model(batch(number))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert all(weight.dtype == torch.float32 for weight in model.parameters())
        results.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    start = torch.cat([weight.detach().flatten() for weight in Model(by_sdpa).parameters()])
    exact, theirs, ours = (one - start for one in results)
    errors = [((one - exact).norm() / exact.norm()).item() for one in (theirs, ours)]
    assert errors[1] < 1.2 * errors[0] + 1e-3, errors


# PyTorch's tools.


def test_operations_are_counted_as_pytorchs():
    """Of its own kernels it counts all pairs, and in the backward pass the scores once more."""
    counts = []
    math = torch.ops.aten._scaled_dot_product_attention_math
    for attend in (ato_torch.attention, lambda *qkv: math(*qkv)[0]):
        query = torch.randn(B, H, T, D, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            attend(query, query, query).sum().backward()
        counts.append(counter.get_total_flops())
    # The formula for kernels has five products where the derivative of two products has four.
    assert counts[0] - counts[1] == 2 * B * H * T * T * D


def counted(function, *tensors):
    tensors = [tensor.requires_grad_() for tensor in tensors]
    with FlopCounterMode(display=False) as counter:
        out = function(*tensors)
        forward = counter.get_total_flops()
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return forward, counter.get_total_flops() - forward


def test_operations_of_all_ops():
    G, S, V = 1, 12, 4
    query, key, value = (
        torch.rand(B, heads, length, size)
        for heads, length, size in ((H, T, D), (G, S, D), (G, S, V))
    )
    grouped = functools.partial(ato_torch.attention, enable_gqa=True)
    unit = 2 * B * H * T * S
    assert counted(grouped, query, key, value) == (unit * (D + V), unit * (3 * D + 2 * V))
    bthd = [one.detach().transpose(1, 2) for one in (query, key, value)]
    one = 2 * B * (H * T + G * S) * D * V
    assert counted(ato_torch.linear_attention, query, key, value) == (one, 2 * one)
    linear = functools.partial(ato_torch.linear_attention, layout="bthd")
    assert counted(linear, *bthd) == (one, 2 * one)
    x = torch.rand(B, T, H, D)
    delta = functools.partial(ato_torch.fused_recurrent_gated_delta_rule, beta=torch.rand(B, T, H))
    one = 6 * B * T * H * D * D
    assert counted(delta, x, x.clone(), x.clone()) == (one, 2 * one)
    token = [one.detach()[:, :, 0] for one in (query, key, value)]
    state = torch.zeros(B, G, D, V), torch.zeros(B, G, D)
    step = functools.partial(ato_torch.linear_attention_step, state=state)
    one = 2 * B * (H + G) * D * V
    assert counted(step, *token) == (one, 2 * one)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        torch.func.vmap(ato_torch.attention)(*torch.rand(3, 5, B, H, T, D).unbind())
    assert counter.get_total_flops() == 5 * 2 * B * H * T * T * 2 * D


@pytest.mark.parametrize("compiles", [False, True])
def test_a_profiler_names_the_op(compiles):
    model = Model(by_ours)
    step = torch.compile(model, backend="aot_eager") if compiles else model
    for _ in range(2):  # the second call skips the checks of the first
        with torch.profiler.profile() as profile:
            step(batch()).backward()
    names = [event.name for event in profile.events() if event.name.startswith("ato::")]
    for name in ("ato::attention", "ato::attention_backward"):
        assert names.count(name) == len(model.blocks), names


@pytest.mark.gpu
@pytest.mark.kernels("attention", "linear_attention")
def test_a_profiler_names_the_op_that_launches_kernels_directly():
    tensors = [
        torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    for function, op in (
        (ato_torch.attention, "attention"),
        (ato_torch.linear_attention, "linear_attention"),
    ):
        for _ in range(3):
            with torch.profiler.profile() as profile:
                function(*tensors).sum().backward()
                with torch.no_grad():
                    function(*tensors)
        # A GPU's timeline has each range once more.
        names = [
            event.name
            for event in profile.events()
            if event.name.startswith("ato::")
            and event.device_type == torch.autograd.DeviceType.CPU
        ]
        assert names.count(f"ato::{op}") == 2 and names.count(f"ato::{op}_backward") == 1, names


# Two ranks.


def distributed(kind, rank):
    """Trains on one half of each batch of this rank, and compares with one process on the whole."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    run = None
    if "checkpoints" in kind:
        run = functools.partial(checkpoint.checkpoint, use_reentrant=False)
    model = Model(by_ours, run) if run else Model(by_ours)
    whole = copy.deepcopy(model)
    if kind == "DDP":
        model = DistributedDataParallel(model)
    elif "DDP" in kind:
        model = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    else:
        low = torch.bfloat16 if "bfloat16" in kind else None
        policy = MixedPrecisionPolicy(param_dtype=low)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    most = 5e-2 if "bfloat16" in kind else 1e-5
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-1) for one in (model, whole)]
    for number in range(2):
        tokens = batch(number)
        for one, optimizer, rows in zip(
            (model, whole), optimizers, (tokens[rank : rank + 1], tokens), strict=True
        ):
            optimizer.zero_grad()
            one(rows).backward()
            optimizer.step()
    for found, exact in zip(model.parameters(), whole.parameters(), strict=True):
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        apart = (found - exact).norm() / exact.norm().clamp(min=1e-3)
        assert apart < most, (kind, apart)


KINDS = ("DDP", "DDP, compiled", "FSDP2", "FSDP2, checkpoints", "FSDP2, bfloat16")


def test_two_ranks():
    processes.run("tests.test_torch_training", RANKS)


def main(port, rank):
    torch.distributed.init_process_group(
        "gloo", f"tcp://localhost:{port}", rank=int(rank), world_size=RANKS
    )
    with contextlib.ExitStack() as stack:
        stack.callback(torch.distributed.destroy_process_group)
        for kind in KINDS:
            torch._dynamo.reset()
            distributed(kind, int(rank))
            print(kind, flush=True)
        print(processes.ALL_ALIKE, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
