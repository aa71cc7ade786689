"""ato_torch under what looks at a model from outside: compilers, export, transforms, threads."""

import contextlib
import io
import json
import shutil
import threading

import jax
import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402

import ato_jax  # noqa: E402
import ato_torch  # noqa: E402
from ato_torch import _bridge, _calls, _ops, _programs  # noqa: E402

B, H, T, D = 2, 4, 7, 16
FAVOR = ato_jax.favor(jax.random.key(0), 8, D)
takes_functions = pytest.mark.skipif(
    not _ops.TELLS_FUNCTIONS_APART, reason="torch.compile takes feature maps from 2.13 on"
)


@pytest.fixture(autouse=True)
def _nothing_compiled_is_kept():
    torch._dynamo.reset()


def draw(dtype=torch.float32, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, H, T, D, generator=generator).to(dtype).requires_grad_(requires_grad)
        for _ in range(3)
    ]


def causal(query, key, value):
    return ato_torch.attention(query, key, value, is_causal=True)


def loss(query, key, value):
    return causal(query, key, value).square().sum()


def check_compiled(function, tensors, **settings):
    """The same outputs and gradients compiled, without a break in the graph."""
    settings = {"backend": "aot_eager", "fullgraph": True} | settings
    compiled = torch.compile(function, **settings)
    found, wanted = compiled(*tensors), function(*tensors)
    torch.testing.assert_close(found, wanted)
    cotangent = torch.linspace(-1, 1, wanted.numel()).view(wanted.shape).to(wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, tensors, cotangent),
        torch.autograd.grad(wanted, tensors, cotangent),
    )


CALLS = {
    "causal": causal,
    "options": lambda q, k, v: ato_torch.attention(q, k, v, window=[2, 0], softcap=3.0, scale=0.3),
    "mask": lambda q, k, v: ato_torch.attention(q, k, v, (q[0, 0] @ k[0, 0].mT).detach() > -1),
    "bias": lambda q, k, v: ato_torch.attention(q, k, v, q[:, :1] @ k[:, :1].mT),
    "lse": lambda q, k, v: ato_torch.attention(q * v, k, v, return_lse=True)[1],
    "lengths": lambda q, k, v: ato_torch.attention(q, k, v, kv_lengths=torch.tensor([3, 5])),
    "list": lambda q, k, v: ato_torch.attention(q, k, v, kv_lengths=[3, 5]),
    "transposed": lambda q, k, v: causal(
        *(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    ),
    "linear": lambda q, k, v: ato_torch.linear_attention(
        q, k, v, causal=True, decay=-v[:, :, :, 0].square()
    ),
    "function": lambda q, k, v: ato_torch.linear_attention(q, k, v, feature_map=jax.nn.softplus),
    "favor": lambda q, k, v: ato_torch.linear_attention(q, k, v, feature_map=FAVOR),
    "step": lambda q, k, v: ato_torch.linear_attention_step(
        *(tensor[:, :, 0] for tensor in (q, k, v)), (k.mT @ v, k.sum(2))
    )[0],
    "divided": lambda q, k, v: ato_torch.chunk_linear_attn(q.square(), k.square(), v)[0],
    "combine": lambda q, k, v: ato_torch.combine([q, k], [v.sum(-1), k.sum(-1)])[0],
}


NAMES = [
    pytest.param(name, marks=takes_functions) if name in ("function", "favor") else name
    for name in CALLS
]


@pytest.mark.parametrize("name", NAMES)
def test_compiled_without_a_break(name):
    check_compiled(CALLS[name], draw())


def test_compiled_in_training_below_float32():
    check_compiled(causal, draw(torch.bfloat16))


def test_compiled_with_symbols_for_sizes_and_numbers():
    query, key, value = draw(requires_grad=False)
    compiled = torch.compile(
        lambda q, k, v, scale: ato_torch.attention(q, k, v, is_causal=True, scale=scale),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for rows, scale in ((3, 0.1), (6, 0.25), (0, 0.25)):
        found = compiled(query[:, :, :rows], key, value, scale)
        wanted = ato_torch.attention(query[:, :, :rows], key, value, is_causal=True, scale=scale)
        torch.testing.assert_close(found, wanted)


class Block(torch.nn.Module):
    """A transformer's block, with dropout off."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(H * D) for _ in range(2))
        self.project, self.out = torch.nn.Linear(H * D, 3 * H * D), torch.nn.Linear(H * D, H * D)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(H * D, 32), torch.nn.GELU(), torch.nn.Linear(32, H * D)
        )

    def forward(self, x):  # [B, T, H * D]
        heads = self.project(self.norms[0](x)).view(*x.shape[:2], 3, H, D)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        mixed = causal(query, key, value).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.feed(self.norms[1](x))


def test_a_block_compiled():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(B, T, H * D, requires_grad=True)
    leaves = [x, *block.parameters()]
    wanted = block(x)
    gradients = torch.autograd.grad(wanted.square().sum(), leaves)
    found = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), leaves), gradients, atol=1e-5, rtol=1e-4
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_compiled_by_inductor():
    with torch.no_grad():
        tensors = draw()
        found = torch.compile(lambda *tensors: causal(*tensors) * 2, fullgraph=True)(*tensors)
        torch.testing.assert_close(found, causal(*tensors) * 2)


@pytest.mark.parametrize(
    ("name", "strict"), [("linear", False), ("lengths", True), ("favor", False), ("favor", True)]
)
def test_exported_saved_and_loaded(name, strict):
    if name == "favor" and strict and not _ops.TELLS_FUNCTIONS_APART:
        pytest.skip("torch.compile takes feature maps from 2.13 on")

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return CALLS[name](*tensors)

    tensors = tuple(draw(requires_grad=False))
    program = torch.export.export(Model(), tensors, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(
        torch.export.load(file).module()(*tensors), CALLS[name](*tensors)
    )


def test_exported_for_any_batch_and_length():
    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return causal(*tensors)

    axes = {0: torch.export.Dim("batch"), 2: torch.export.Dim("time")}
    tensors = tuple(draw(requires_grad=False))
    program = torch.export.export(Model(), tensors, dynamic_shapes=((axes,) * 3,))
    longer = [torch.cat([tensor, tensor, tensor], 2)[:1] for tensor in tensors]
    torch.testing.assert_close(program.module()(*longer), causal(*longer))


def text(op, names, options, **changes):
    call = _calls.Call(op, tuple(names), tuple(options.items()), True, False)
    return call._replace(**changes).text


def test_a_text_says_the_call():
    options = {"feature_map": "elu1", "scale": 0.1, "window": (2, None), "causal": True}
    call = _calls.Call("attention", ("q", "k"), tuple(options.items()), False, False)
    assert _calls.parse(call.text) == call
    level = call.inside((True, False))
    assert _calls.parse(level.text) == level != call
    json.loads(call.text)


@pytest.mark.skipif(_ops.TELLS_FUNCTIONS_APART, reason="torch.compile takes them from 2.13 on")
def test_functions_are_refused_where_they_are_not_told_apart():
    with pytest.raises(Exception, match="takes a feature_map that is a function from PyTorch 2.13"):
        check_compiled(CALLS["function"], draw())


@takes_functions
def test_functions_of_the_same_code_are_compiled_each():
    query, key, value = draw(requires_grad=False)

    def closing_over(a):
        return lambda x: jax.numpy.exp(x) * a + x * x

    def with_default(a):
        def function(x, a=a):
            return jax.numpy.exp(x) + a * x * x

        return function

    def model(feature_map):
        return ato_torch.linear_attention(query, key, value, feature_map=feature_map)

    numbers = (1.0, 2.0, jax.numpy.float32(3.0), jax.numpy.float32(4.0))
    for maps in (
        [closing_over(a) for a in numbers],
        [with_default(a) for a in (1.0, 2.0)],
        [ato_jax.favor(jax.random.key(seed), 8, D) for seed in range(2)] + ["relu"],
    ):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for feature_map in (*maps, maps[0]):
            torch.testing.assert_close(compiled(feature_map), model(feature_map))


def test_options_that_change_are_compiled_each():
    query, key, value = draw(requires_grad=False)

    class Model(torch.nn.Module):
        def forward(self, query, options):
            return ato_torch.attention(query, key, value, **options, **self.own)

    model = Model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for options, own in (
        ({"query_offset": 1, "is_causal": False}, {"window": (1, None), "softcap": 1.0}),
        ({"query_offset": 1, "is_causal": True}, {"window": (1, None), "softcap": 1.0}),
        ({"query_offset": 2, "is_causal": True}, {"window": (1, None), "softcap": 1.0}),
        ({"query_offset": 2, "is_causal": True}, {"window": [3, 0], "softcap": 1.0}),
        ({"query_offset": 2, "is_causal": True}, {"window": [3, 0], "softcap": 2.0}),
        ({"query_offset": 2, "is_causal": True}, {"window": [3, 0]}),
    ):
        model.own = own
        torch.testing.assert_close(compiled(query, options), model(query, options))
    model.own = own | {"implementation": "cudnn"}
    with pytest.raises(ato_jax.UnsupportedError, match="cudnn"):
        compiled(query, options)


def test_equal_feature_maps_share_a_handle_and_no_other_process_has_it():
    def text_of(function):
        found, _ = _calls.resolve(function)
        return text("linear_attention", "qkv", {"feature_map": found})

    first = text_of(lambda x: jax.numpy.exp(x) + 3)
    assert text_of(lambda x: jax.numpy.exp(x) + 3) == first != text_of(lambda x: x + 3)
    elsewhere = first.replace(_calls._process, "0" * 32)
    with pytest.raises(ValueError, match="feature_map is a function of the process that exported"):
        _calls.parse(elsewhere)


def test_threads_that_count_at_once_give_two_functions_two_handles(monkeypatch):
    """Each thread waits in the count for the other, as long as the other can come there."""
    both = threading.Barrier(2)

    class Counted(dict):
        def __len__(self):
            found = super().__len__()
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            return found

    monkeypatch.setattr(_calls, "_handles", Counted())
    maps = [_calls.resolve(lambda x, n=n: jax.numpy.exp(x) + n)[0] for n in (3.0, 4.0)]
    found = [None, None]

    def ask(n):
        found[n] = _calls._in_words(maps[n])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [_calls._from_words(words) for words in found] == maps
    assert found[0] != found[1] and maps[0] != maps[1]


STATE = {"state.kv": torch.rand(B, H, D, D), "state.k_sum": torch.rand(B, H, D)}


@pytest.mark.parametrize(
    ("op", "options", "dtype"),
    [
        ("attention", {"causal": True, "layout": "bthd"}, torch.bfloat16),
        ("linear_attention", {"feature_map": "elu1", "layout": "bhtd"}, torch.float32),
        ("linear_attention_step", {"feature_map": "relu"}, torch.float32),
        ("combine", {"layout": "bhtd"}, torch.float32),
    ],
    ids=str,
)
def test_opcheck(op, options, dtype):
    named = dict(zip("qkv", draw(dtype), strict=True))
    if op == "linear_attention_step":
        named = {name: tensor[:, :, 0].detach() for name, tensor in named.items()} | STATE
    elif op == "combine":
        named = {"outs": torch.stack([named["q"], named["k"]]), "lses": torch.rand(2, B, H, T)}
    tensors = [tensor.detach().requires_grad_() for tensor in named.values()]
    words = text(op, named, options)
    torch.library.opcheck(_ops._forward, (words, tensors))
    plain = [tensor.detach() for tensor in tensors]
    outputs = _ops._forward(words, plain)
    given = [output.is_floating_point() for output in outputs]
    cotangents = [torch.randn_like(output) for output in outputs if output.is_floating_point()]
    needed = [True] * len(plain)
    torch.library.opcheck(_ops._backward, (words, [*plain, *outputs, *cotangents], needed, given))


def test_vmap_is_a_loop():
    query, key, value = draw(requires_grad=False)
    vmap, grad = torch.func.vmap, torch.func.grad
    torch.testing.assert_close(vmap(causal)(query, key, value), causal(query, key, value))
    found = vmap(causal, in_dims=(2, None, None), out_dims=1)(
        torch.stack([query, 2 * query], 2), key, value
    )
    wanted = [causal(query, key, value), causal(2 * query, key, value)]
    torch.testing.assert_close(found, torch.stack(wanted, 1))
    # Maps inside of derivatives, and the other way round: what is shared sums its gradients.
    each = [grad(loss, argnums=(0, 1))(one, key[0], value[0]) for one in query]
    first, second = (torch.stack(gradients) for gradients in zip(*each, strict=True))
    mapped = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, None, None))(query, key[0], value[0])
    torch.testing.assert_close(mapped, (first, second))
    whole = grad(
        lambda query, key: vmap(loss, in_dims=(0, None, None))(query, key, value[0]).sum(),
        argnums=(0, 1),
    )(query, key[0])
    torch.testing.assert_close(whole, (first, second.sum(0)))


def test_vmap_of_two_levels_with_autograd_and_compiled():
    query, key, value = draw()

    def mapped(*tensors):
        return torch.func.vmap(torch.func.vmap(causal))(*(tensor[None] for tensor in tensors))[0]

    found, wanted = mapped(query, key, value), causal(query, key, value)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), (query, key)),
        torch.autograd.grad(wanted.square().sum(), (query, key)),
    )
    tensors = draw(requires_grad=False)
    compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), causal(*tensors))


def test_derivatives_inside_of_what_is_compiled(monkeypatch):
    """torch.func takes no gradient of a custom op; what only a backward reads is kept, too."""
    texts = []

    def of_text(text, place, facts, of_text=_programs.of_text):
        texts.append(text)
        return of_text(text, place, facts)

    monkeypatch.setattr(_programs, "of_text", of_text)
    tensors = draw(torch.bfloat16, requires_grad=False)
    first = torch.func.grad(loss, argnums=(0, 1, 2))
    compiled = torch.compile(first, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), first(*tensors))
    assert texts and all(_calls.parse(text).training for text in texts)
    targets = []

    def backend(module, inputs):
        targets.extend(node.target for node in module.graph.nodes)
        return module

    # The op is what there is elsewhere.
    torch.compile(causal, backend=backend, fullgraph=True)(*tensors)
    assert torch.ops.ato.forward.default in targets


def test_second_order_and_forward_mode_are_refused_everywhere():
    query, key, value = draw(requires_grad=False)
    first = torch.func.grad(loss)
    with pytest.raises(NotImplementedError, match="no derivatives of second order"):
        torch.func.grad(lambda query: first(query, key, value).sum())(query)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.hessian(lambda query: loss(query, key, value))(query)
    words = text("attention", "qkv", {"layout": "bhtd"})
    tensors = draw()
    out, lse = _ops._forward(words, tensors)
    (gradient,) = torch.autograd.grad(out.sum() + lse.sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="no derivatives of second order"):
        gradient.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            causal(dual, key, value)
        out = causal(*tensors)
        cotangent = torch.autograd.forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            torch.autograd.grad(out, tensors, cotangent)


def test_sizes_that_are_symbols():
    """All of them, the number of heads, too; and what is decided by one."""
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    query, key, value = (mode.from_tensor(each) for each in draw(requires_grad=False))
    with mode:
        out = causal(query, key, value)
        assert out.shape == query.shape and isinstance(out.shape[1], torch.SymInt)

    def decided(*tensors):
        several = tensors[0].shape[2] > 1
        linear = ato_torch.linear_attention(*tensors, causal=several)
        return ato_torch.attention(*tensors, is_causal=several), linear

    tensors = draw(requires_grad=False)
    compiled = torch.compile(decided, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(*tensors), decided(*tensors))


def test_fake_tensors_and_modes():
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(B, H, T, D, dtype=torch.bfloat16, requires_grad=True)
        out, state = ato_torch.linear_attention(fake, fake, fake, return_state=True)
        assert out.shape == fake.shape and out.dtype == torch.bfloat16
        assert state.kv.shape == (B, H, D, D) and state.kv.dtype == torch.float32
        out.sum().backward()
        assert fake.grad.shape == fake.shape
    traced = torch.fx.experimental.proxy_tensor.make_fx(causal)(*draw(requires_grad=False))
    assert any("ato.forward" in str(node.target) for node in traced.graph.nodes)


def test_inference_mode_and_saved_on_the_host():
    query, key, value = draw()
    wanted = loss(query, key, value)
    with torch.inference_mode():
        out = loss(query * 1, key, value)
    assert out.is_inference()
    torch.testing.assert_close(out, wanted.detach())
    with torch.autograd.graph.save_on_cpu():
        found = loss(query, key, value)
    torch.testing.assert_close(
        torch.autograd.grad(found, query), torch.autograd.grad(wanted, query)
    )


def test_checkpointed_and_compiled():
    def checkpointed(query, key, value):
        return torch.utils.checkpoint.checkpoint(causal, query, key, value, use_reentrant=False)

    check_compiled(checkpointed, draw())


def test_autocast_compiled():
    def cast(query, key, value):
        with torch.autocast("cpu", torch.bfloat16):
            return ato_torch.attention(query, key, value.bfloat16())

    assert cast(*draw()).dtype == torch.bfloat16
    check_compiled(cast, draw())


def test_threads():
    """Calls and gradients from many threads at once, of sizes that they share and do not."""
    tensors = draw()
    sizes = [3, 5, 7, 3, 5, 7]

    def work(size):
        cut = [tensor[:, :, :size] for tensor in tensors]
        return torch.autograd.grad(loss(*cut), tensors)

    wanted = {size: work(size) for size in set(sizes)}
    _programs.kept.clear()
    found, failed = {}, []

    def calls(n):
        try:
            for _ in range(10):
                found[n] = work(sizes[n])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=calls, args=(n,)) for n in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for n, size in enumerate(sizes):
        torch.testing.assert_close(found[n], wanted[size])


@pytest.mark.parametrize("missing", ["with_kind", "private"])
def test_other_versions_of_jax(monkeypatch, missing):
    """Without the private names, or with fewer arguments to them, the results are the same."""
    wanted = causal(*draw())

    class Older:
        buffer_to_dlpack_managed_tensor = staticmethod(
            _bridge.jaxlib.buffer_to_dlpack_managed_tensor
        )

        @staticmethod
        def dlpack_managed_tensor_to_buffer(capsule, device, stream, copy):
            return _bridge_jaxlib.dlpack_managed_tensor_to_buffer(capsule, device, stream, copy)

    _bridge_jaxlib = _bridge.jaxlib
    monkeypatch.setattr(_bridge, "jaxlib", None if missing == "private" else Older)
    _bridge._exchange.cache_clear()
    try:
        torch.testing.assert_close(causal(*draw()), wanted)
        chosen = _bridge._exchange(torch.device("cpu")).into_jax
        assert (chosen is _bridge._public_in) == (missing == "private")
    finally:
        _bridge._exchange.cache_clear()


def test_a_tensor_that_is_negated_when_read():
    """The imaginary part of a conjugate is stored with the other sign."""
    query, key, value = draw(requires_grad=False)
    negated = torch.complex(query, query).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(causal(negated, key, value), causal(-query, key, value))


def test_what_a_compiler_asks_of_a_gpu_is_a_constant():
    """Asked about CUDA tensors alone, and yet no reason for a break in the graph."""
    compiled = torch.compile(
        lambda x: x * (2 if _bridge.has_gpu() else 3), backend="eager", fullgraph=True
    )
    assert compiled(torch.ones(1)) == (2 if _bridge.has_gpu() else 3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "bias", "linear", "step"])
def test_compiled_on_a_gpu(name):
    check_compiled(CALLS[name], [tensor.detach().cuda().requires_grad_() for tensor in draw()])


@pytest.mark.gpu
@pytest.mark.kernels("attention")
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_a_block_compiled_by_inductor_on_a_gpu():
    """In bfloat16 as near to float32 as the same without a compiler, gradients included."""
    torch.manual_seed(0)
    block, x = Block().cuda(), torch.randn(B, 64, H * D, device="cuda")
    results = []
    for dtype, function in (
        (torch.float32, block),
        (torch.bfloat16, block),
        (torch.bfloat16, torch.compile(block, fullgraph=True)),
    ):
        block.to(dtype)
        out = function(x.to(dtype))
        gradients = torch.autograd.grad(out.float().square().mean(), block.parameters())
        results.append(torch.cat([tensor.flatten().double() for tensor in (out, *gradients)]))
    exact, *found = results
    eager, compiled = ((each - exact).norm() / exact.norm() for each in found)
    assert eager < 2e-2 and compiled < 1.2 * eager, (eager, compiled)


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for():
    """PyTorch raises an error where a call of its own waits; the second call is past compiling."""
    tensors = [tensor.detach().cuda().requires_grad_() for tensor in draw()]
    decay = -torch.rand(B, H, T, device="cuda")

    def step():
        out = ato_torch.attention(*tensors, kv_lengths=[3, 5]) + causal(*tensors)
        out = out + ato_torch.linear_attention(*tensors, causal=True, decay=decay)
        return torch.autograd.grad(out, tensors, torch.ones_like(out))

    wanted = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found, wanted)
