"""The direct road: what JAX lowers as steps of PyTorch's, on a CPU; the kernels, on a GPU."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

import ato_jax  # noqa: E402
import ato_torch  # noqa: E402
from ato_jax import device, lowering  # noqa: E402
from ato_torch import _bridge, _direct, _programs, functional  # noqa: E402
from tests import aot, numerics  # noqa: E402

B, H, G, T, D = 2, 4, 2, 300, 64
H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])
ATTENTION = {"layout": "bhtd", "query_offset": 0}
LINEAR = {"layout": "bhtd", "feature_map": "elu1"}
STATE = {"state.kv": (B, G, D, D), "state.k_sum": (B, G, D)}


def call_of(op, options, training=False, names=("q", "k", "v")):
    return _programs.Call(op, tuple(names), tuple(options.items()), training, False)


def inputs(dtype=torch.bfloat16, where="meta"):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, heads, T, D, generator=generator).to(dtype).to(where)
        for heads in (H, G, G)
    ]


def backward_of(program, tensors):
    """The backward of a program whose first output alone has a cotangent, and its tensors."""
    outputs = [
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for shape, dtype in _programs.output_shapes(
            program.call,
            [(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in tensors],
        )
    ]
    given = tuple(n == 0 for n in range(len(outputs)))
    function = program.backward((True,) * len(tensors), given)
    return function, [*tensors, *outputs, outputs[0]]


@pytest.fixture
def on_an_h200(monkeypatch):
    """Functions are traced as for that card."""
    monkeypatch.setattr(device, "describe", lambda _: H200)


def kernels(program):
    return [step.kernel.name for step in program.steps if isinstance(step, _direct.Launch)]


def operations(program):
    return sum(isinstance(step, _direct.Operation) for step in program.calls)


def test_attention_is_its_kernel(on_an_h200):
    call = call_of("attention", ATTENTION | {"causal": True})
    program = _programs.Program(call, jax.devices()[0])
    lowered = _direct.Program.of(program.answer.traced, inputs(), 90)
    assert kernels(lowered) == ["attention_forward"] and operations(lowered) == 0
    assert [lowered.metas[number].shape for number in lowered.results] == [(B, H, T, D)]
    training = _programs.Program(call_of("attention", ATTENTION, True), jax.devices()[0])
    function, tensors = backward_of(training, inputs())
    lowered = _direct.Program.of(function.traced, tensors, 90)
    assert kernels(lowered) == ["attention_backward_dq", "attention_backward_dkv"]
    assert operations(lowered) == 0
    shapes = [tuple(lowered.metas[number].shape) for number in lowered.results]
    assert shapes == [(B, H, T, D), (B, G, T, D), (B, G, T, D)]


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_is_kernels_and_a_few_sums(on_an_h200, causal):
    call = call_of("linear_attention", LINEAR | {"causal": causal}, True)
    program = _programs.Program(call, jax.devices()[0])
    lowered = _direct.Program.of(program.answer.traced, inputs(), 90)
    assert len(kernels(lowered)) == (3 if causal else 2)
    assert operations(lowered) == (0 if causal else 2)
    function, tensors = backward_of(program, inputs())
    lowered = _direct.Program.of(function.traced, tensors, 90)
    assert len(kernels(lowered)) == (5 if causal else 2)
    assert operations(lowered) == 2


def test_a_step_writes_to_a_copy(on_an_h200):
    shapes = {"q": (B, H, D), "k": (B, G, D), "v": (B, G, D)} | STATE
    tensors = [torch.empty(shape, device="meta") for shape in shapes.values()]
    call = call_of("linear_attention_step", {"feature_map": "elu1"}, names=shapes)
    program = _programs.Program(call, jax.devices()[0])
    lowered = _direct.Program.of(program.answer.traced, tensors, 90)
    (launch,) = (step for step in lowered.steps if isinstance(step, _direct.Launch))
    assert launch.rewritten and not set(launch.rewritten.values()) & set(range(len(tensors)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x + 1, "no Triton kernel"),
        (jnp.sort, "it holds stablehlo.sort"),
        (lambda x: x + np.arange(6, dtype=np.float32).reshape(2, 3), "a table of constants"),
        (lambda x: x.max(0), "a reduction that is no sum in float32"),
        (lambda x: x.astype(jnp.int8).sum(0), "a reduction that is no sum in float32"),
        (lambda x: jax.lax.complex(x, x), "it holds stablehlo.complex"),
    ],
)
def test_what_has_no_plan(function, reason):
    with pytest.raises(_direct.ClosedError, match=reason):
        _direct.Program.of(lambda *arrays: [function(*arrays)], [torch.empty(2, 3)], 90)


def test_what_xla_would_fuse_has_no_plan(monkeypatch, on_an_h200):
    monkeypatch.setattr(_direct, "MOST", 1)
    program = _programs.Program(call_of("linear_attention", LINEAR), jax.devices()[0])
    with pytest.raises(_direct.ClosedError, match="2 operations lie around its kernels"):
        _direct.Program.of(program.answer.traced, inputs(), 90)


def interpreted(program, tensors):
    """What a plan does on a GPU, for a program without kernels."""
    values = {**dict(enumerate(tensors))}
    for step in program.steps:
        values[step.outputs[0]] = step.function(*(values[number] for number in step.inputs))
    return [values[number] for number in program.results]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [x.reshape(4, 3).T, jnp.transpose(y, (2, 0, 1))],
        lambda x, y: [x[:, 1:], x[1]],
        lambda x, y: [y[0:1, ::2, 1:3], jnp.concatenate([y, 2 * y], 1)],
        lambda x, y: [jnp.pad(x, ((1, 2), (0, 3)), constant_values=4.0), jnp.pad(x, 0)],
        lambda x, y: [x.sum(0), y.sum((0, 2)), y.sum(()), y[:, :1].sum(1)],
        lambda x, y: [y.sum(1).T, y[:, :1].sum(1).T, jnp.transpose(y[None].sum(3), (2, 0, 1))],
        lambda x, y: [x.astype(jnp.bfloat16).astype(jnp.int32), x.astype(jnp.float32)],
        lambda x, y: [jnp.exp(-x) * x - 2, jnp.maximum(x, 0), jnp.minimum(x, x.sum())],
        lambda x, y: [x, x, y[0], jnp.zeros_like(x), jnp.zeros_like(x)],
        lambda x, y: [jnp.broadcast_to(x[:, None], (2, 3, 6)) + y[0, 0, 0]],
        lambda x, y: [jax.jit(lambda x: x * 2)(x) + jax.jit(lambda y: y.sum())(y)],
    ],
)
def test_operations_are_jaxs(monkeypatch, function):
    monkeypatch.setattr(_direct, "MOST", 99)
    monkeypatch.setattr(_direct.Program, "check", lambda self: None)
    torch.manual_seed(0)
    tensors = [torch.randn(2, 6), torch.randn(3, 4, 5)]
    found = interpreted(_direct.Program.of(function, tensors, 90), tensors)
    wanted = jax.jit(function)(*(jnp.asarray(tensor.numpy()) for tensor in tensors))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours.numpy(), np.asarray(theirs), rtol=1e-5, atol=1e-5)
    memory = [tensor.untyped_storage().data_ptr() for tensor in [*tensors, *found]]
    assert len(set(memory)) == len(memory)


@aot.requires_triton
def test_a_kernel_compiled(on_an_h200):
    program = _programs.Program(call_of("linear_attention", LINEAR), jax.devices()[0])
    lowered = _direct.Program.of(program.answer.traced, inputs(), 90)
    first = next(step for step in lowered.steps if isinstance(step, _direct.Launch))
    code = lowering.compile_kernel(first.kernel, 90)
    assert code.parameters >= len(first.inputs) + len(first.outputs)
    from triton import knobs

    image = lowering.assemble(code.ptx, 90, knobs.nvidia.ptxas.path)
    assert image.startswith(b"\x7fELF") and code.name.encode() in image
    with pytest.raises(RuntimeError, match="ptxas failed: .*fatal"):
        lowering.assemble("no PTX", 90, knobs.nvidia.ptxas.path)


READS_REGISTERS = """
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r276,%r277}, {%r268,%r269}, %rd52, 0;
"""
READS_MEMORY = READS_REGISTERS.replace("{%r268,%r269}", "%rd51")


@pytest.mark.parametrize(
    ("ptx", "ours", "drivers", "takes"),
    [
        (READS_REGISTERS, (13, 1), (12, 4), b"by XLA's"),
        (READS_REGISTERS, (13, 0), (13, 1), READS_REGISTERS.encode()),
        (READS_REGISTERS, None, (14, 0), READS_REGISTERS.encode()),
        (READS_REGISTERS, (12, 8), (13, 0), "JAX's is 12.8, the driver's is 13.0"),
        (READS_REGISTERS, None, (12, 8), "JAX's is none, the driver's is 12.8"),
        (READS_MEMORY, (12, 8), (12, 4), b"by XLA's"),
        (READS_MEMORY, None, (12, 8), READS_MEMORY.encode()),
    ],
)
def test_an_assembler_that_is_right(monkeypatch, ptx, ours, drivers, takes):
    monkeypatch.setattr(lowering, "xla_ptxas", lambda: ours and ("ptxas", ours))
    monkeypatch.setattr(lowering, "assemble", lambda ptx, capability, path: b"by XLA's")
    monkeypatch.setattr(_direct, "driver_version", lambda: drivers)
    code = lowering.Code("kernel", ptx, 0, 4)
    if isinstance(takes, str):
        with pytest.raises(_direct.ClosedError, match=f"needs an assembler of CUDA 13.1.*{takes}"):
            _direct._image(code, 90)
    else:
        assert _direct._image(code, 90) == takes


@pytest.fixture
def known(monkeypatch):
    """Plans that are JAX, on a CPU; what they were called with is appended."""
    calls = []

    def ready(function, tensors, turned=(), turned_results=()):
        def plan(tensors):
            calls.append([tensor.stride() for tensor in tensors])
            tensors = exchanged(tensors, turned or [False] * len(tensors))
            assert all(tensor.is_contiguous() for tensor in tensors)
            results = _bridge.execute(function.jitted, tensors)
            return exchanged(results, turned_results[: len(results)]) if any(turned) else results

        return plan

    monkeypatch.setattr(_direct, "ready", ready)
    return calls


def exchanged(tensors, turned):
    return [x.transpose(1, 2) if is_ else x for x, is_ in zip(tensors, turned, strict=True)]


@pytest.mark.parametrize("name", ["attention", "lse", "linear", "linear state"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_known_call_is_what_it_was(known, name, turned):
    tensors = [tensor[:, :, :9].contiguous() for tensor in inputs(torch.float32, "cpu")]
    if turned:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    function = CALLS[name]

    def step(weight):
        out, *rest = torch.utils._pytree.tree_leaves(function(*leaves))
        loss = (out * weight).sum() + sum(part.sum() for part in rest)
        return [out.detach(), *torch.autograd.grad(loss, leaves)]

    for weight in (torch.ones(()), torch.randn(B, H, 9, D)):
        known.clear()
        wanted = step(weight)
        # The first call of its kind goes through the checks, the second one here.
        functional._plans.clear()
        for _ in range(3):
            found = step(weight)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert len(known) >= (2 if name in ("attention", "linear") else 1)
        with torch.no_grad():
            torch.testing.assert_close(
                torch.utils._pytree.tree_leaves([function(*leaves) for _ in range(3)][-1])[0],
                wanted[0],
            )
    # Only part of the gradients; and a derivative of second order, refused.
    leaves[1].requires_grad_(False)
    out = [function(*leaves) for _ in range(3)][-1]
    out = out if isinstance(out, torch.Tensor) else out[0]
    gradients = torch.autograd.grad(out.sum(), leaves[::2], retain_graph=True)
    assert [each.shape for each in gradients] == [leaves[0].shape, leaves[2].shape]
    with pytest.raises(NotImplementedError, match="second order"):
        (again,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
        again.sum().backward()


def test_explain_on_a_cpu():
    tensors = [x[:, :, :9].clone() for x in inputs(torch.float32, "cpu")]
    told = ato_torch.explain(CALLS["causal"], *tensors)
    assert str(told.forward) == "through JAX (tensors on cpu, not on a CUDA device)"
    assert told.backward is None and "no gradient is asked for" in str(told)
    told = ato_torch.explain(CALLS["causal"], tensors[0].requires_grad_(), *tensors[1:])
    assert told.backward == told.forward
    with pytest.raises(ValueError, match="does not call ato_torch"):
        ato_torch.explain(torch.add, *tensors[:1], 1)


CALLS = {
    "lse": lambda q, k, v: ato_torch.attention(q, k, v, enable_gqa=True, return_lse=True),
    "linear state": lambda q, k, v: ato_torch.linear_attention(q, k, v, return_state=True),
    "attention": lambda q, k, v: ato_torch.attention(q, k, v, enable_gqa=True),
    "causal": lambda q, k, v: ato_torch.attention(q, k, v, is_causal=True, enable_gqa=True),
    "linear": ato_torch.linear_attention,
    "linear causal": lambda q, k, v: ato_torch.linear_attention(q, k, v, causal=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "options", "dtype"),
    [
        ("attention", {}, torch.bfloat16),
        ("attention", {"causal": True}, torch.float16),
        ("attention", {"window": (64, 0), "softcap": 20.0}, torch.float32),
        ("linear_attention", {"causal": False}, torch.bfloat16),
        ("linear_attention", {"causal": False}, torch.float32),
        ("linear_attention", {"causal": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_the_numbers_by_the_plan(op, options, dtype):
    """Within the budgets of float64, near what JAX gives, and the same each time."""
    tensors = inputs(dtype, "cuda")
    asked = (ATTENTION if op == "attention" else LINEAR) | options
    program = _programs.Program(call_of(op, asked, True), _bridge.jax_device(tensors[0].device))
    arrays = [jnp.asarray(tensor.float().cpu().numpy()) for tensor in tensors]
    arrays = [array.astype(str(dtype).removeprefix("torch.")) for array in arrays]
    wanted = numerics.oracle(op, *arrays, **asked)
    outputs = by_both(program.forward, tensors)
    cotangent = torch.tensor(np.asarray(wanted.cotangents, np.float32)).to(outputs[0])
    given = tuple(n == 0 for n in range(len(outputs)))
    gradients = by_both(program.backward((True,) * 3, given), [*tensors, *outputs, cotangent])
    names = ("out", "dq", "dk", "dv")
    numerics.compare(
        {
            name: jnp.asarray(tensor.float().cpu().numpy()).astype(arrays[0].dtype)
            for name, tensor in zip(names, (outputs[0], *gradients), strict=True)
        },
        wanted,
    )


def by_both(function, tensors):
    plan = _direct.plan_of(function, tensors)
    assert isinstance(plan, _direct.Plan), plan
    found, again = plan(tensors), plan(tensors)
    through_jax = _bridge.execute(function.jitted, tensors)
    for ours, same, theirs in zip(found, again, through_jax, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert torch.equal(ours, same)
        if ours.is_floating_point():  # the rest of what was rounded is noise
            error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
            assert error < (1e-5 if ours.dtype == torch.float32 else 1e-3)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "causal", "linear", "linear causal"])
def test_captured_in_a_cuda_graph(name):
    tensors = [tensor.requires_grad_() for tensor in inputs(where="cuda")]

    def step():
        out = CALLS[name](*tensors)
        return out, *torch.autograd.grad(out, tensors, torch.ones_like(out))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for ours, theirs in zip(found, step(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_a_first_call_in_a_cuda_graph_is_refused():
    tensors = [tensor[:, :, :17].contiguous() for tensor in inputs(where="cuda")]
    with pytest.raises(RuntimeError, match="make the call once before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            CALLS["causal"](*tensors)


@pytest.mark.gpu
def test_a_thread_without_a_context():
    tensors = inputs(where="cuda")
    wanted = CALLS["causal"](*tensors)
    found = []
    thread = threading.Thread(target=lambda: found.append(CALLS["causal"](*tensors)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)


@pytest.mark.gpu
def test_a_step_of_linear_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, D, generator=generator).cuda() for heads in (H, G, G))
    state = ato_jax.LinearState(*(torch.zeros(shape).cuda() for shape in STATE.values()))
    out, found = ato_torch.linear_attention_step(q, k, v, state)
    assert not state.kv.any() and not state.k_sum.any()
    wanted = ato_torch.linear_attention(*(x[:, :, None] for x in (q, k, v)), causal=True)
    torch.testing.assert_close(out, wanted[:, :, 0])
    torch.testing.assert_close(found.k_sum, torch.nn.functional.elu(k) + 1)


@pytest.mark.gpu
def test_as_they_lie():
    """Permuted, misaligned and negated tensors, and cotangents that are not dense."""
    plain = inputs(where="cuda")
    permuted = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    functional._plans.clear()
    misaligned = [x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x) for x in plain]
    for name in ("causal", "linear causal"):
        found = []
        for tensors in (plain, permuted, misaligned):
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            for _ in range(3):
                out = CALLS[name](*leaves)
                gradients = torch.autograd.grad(out.sum(), leaves)
            for _ in range(3):
                answer = CALLS[name](*tensors)
            assert torch.equal(answer, out)
            assert out.stride() == torch.empty_like(tensors[0]).stride()
            found.append([out.detach(), *gradients])
        torch.testing.assert_close(found[1], found[0], atol=1e-2, rtol=1e-2)
        for ours, theirs in zip(found[2], found[0], strict=True):
            assert torch.equal(ours, theirs)
        told = ato_torch.explain(CALLS[name], *leaves)
        assert told.forward.road == told.backward.road == "direct", told
    plans = [plan for plan in functional._plans.values() if plan.transposed]
    assert plans and all(plan.ready for plan in plans)
