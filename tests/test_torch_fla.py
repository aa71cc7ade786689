"""Linear attention by flash-linear-attention's names against its recurrence in float64.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T,  z_t = z_{t-1} + k_t
    o_t = scale * q_t S_t, divided by scale * q_t . z_t + 1e-10 where it is normalised

On a card also beside flash-linear-attention itself, where that is installed.
"""

import functools
import importlib.util
import inspect

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

from torch._subclasses import FakeTensorMode  # noqa: E402

import ato_torch  # noqa: E402
from ato_torch import _fla, _ops  # noqa: E402
from tests import numerics  # noqa: E402

B, T, H, D, V = 2, 70, 3, 8, 6
CUTS = [0, 5, 5, 69, T]  # the ends of packed sequences, one empty and one of a single token
# Parameters of flash-linear-attention 0.6 after q, k and v, in their order. All but `BOOLEANS`
# and g of chunk_gla are None by default.
PARAMETERS = {
    "chunk_linear_attn": "scale initial_state output_final_state normalize cu_seqlens",
    "fused_chunk_linear_attn": "scale initial_state output_final_state normalize cu_seqlens",
    "fused_recurrent_linear_attn": (
        "scale initial_state output_final_state reverse normalize cu_seqlens"
    ),
    "chunk_retention": "scale initial_state output_final_state cu_seqlens",
    "fused_chunk_retention": "scale initial_state output_final_state cu_seqlens",
    "fused_recurrent_retention": (
        "scale initial_state output_final_state reverse state_v_first cu_seqlens"
    ),
    "parallel_retention": "scale output_attentions cu_seqlens",
    "chunk_simple_gla": (
        "g g_gamma scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu"
    ),
    "fused_chunk_simple_gla": "g g_gamma scale initial_state output_final_state cu_seqlens",
    "fused_recurrent_simple_gla": (
        "g g_gamma scale initial_state output_final_state reverse state_v_first cu_seqlens"
    ),
    "parallel_simple_gla": "g scale output_attentions cu_seqlens cu_seqlens_cpu",
    "chunk_gla": (
        "g scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu"
    ),
    "fused_recurrent_gla": (
        "gk gv scale initial_state output_final_state reverse state_v_first cu_seqlens"
    ),
}
BOOLEANS = "output_final_state normalize reverse state_v_first output_attentions".split()
NORMALIZED = {"chunk_linear_attn", "fused_chunk_linear_attn"}
GATES = {"simple_gla": ("g", ()), "gla": ("g", (D,)), "linear_attn": None, "retention": None}
STATEFUL = {"output_final_state": True}


def family_of(name):
    return (
        name.removeprefix("fused_")
        .removeprefix("chunk_")
        .removeprefix("recurrent_")
        .replace("parallel_", "")
    )


def draw(name, B=B, T=T, states=B, dtype=torch.float32, normalize=None, sizes=(H, D, V)):
    """The arguments of a call, all with gradients; without `states` none begins with a state."""
    generator = torch.Generator().manual_seed(0)
    H, D, V = sizes

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def sums():
        return normal(states, H, D, V).requires_grad_()

    normalize = name in NORMALIZED if normalize is None else normalize
    # Sums of weights of either sign, and none near 0: features have the signs of their steps.
    signs = normal(B, T, 1, 1).sign() if normalize else 1
    q, k = ((0.1 + normal(B, T, H, D).abs()) for _ in range(2))
    found = {
        "q": (signs * q).to(dtype),
        "k": k.to(dtype) if normalize else (k * normal(B, T, H, D).sign()).to(dtype),
        "v": normal(B, T, H, V).to(dtype),
    }
    gate = GATES[family_of(name)]
    if gate is not None:
        letter = "gk" if name == "fused_recurrent_gla" else gate[0]
        found[letter] = -0.3 * normal(B, T, H, *[D] * len(gate[1])).abs()
    found = {each: tensor.requires_grad_() for each, tensor in found.items()}
    if states:
        found["initial_state"] = sums()
        if normalize:
            z = (0.1 + normal(states, 1, H, D).abs()).requires_grad_()
            found["initial_state"] = (found["initial_state"], z)
    return found


def recurrence(
    q, k, v, g=None, initial_state=None, normalize=False, scale=None, cuts=(0, None),
    reverse=False, fixed=False,
):  # fmt: skip
    """o and the last states in the dtype of the arguments; g [B|1, T|1, H, D|1]; cuts as `CUTS`.

    With `fixed`, gradients leave the normaliser out.
    """
    out, states, sums = {}, [], []
    (batch, length, H, D), V = q.shape, v.shape[-1]
    scale = D**-0.5 if scale is None else scale
    factors = None if g is None else g.exp().expand(batch, length, H, -1)[..., None].unbind(1)
    # Slices, whose gradients would be arrays of the whole length each.
    q, k, v = (x.unbind(1) for x in (q, k, v))
    for n, (first, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        rows = slice(None) if cuts == (0, None) else slice(n, n + 1)
        steps = range(first, length if end is None else end)
        kv, z = q[0].new_zeros(batch, H, D, V), q[0].new_zeros(batch, H, D)
        if initial_state is not None:
            kv = (initial_state[0] if normalize else initial_state)[rows]
            z = initial_state[1][rows, 0] if normalize else z
        for t in reversed(steps) if reverse else steps:
            if factors is not None:
                kv = factors[t] * kv
            kv = kv + k[t][..., None] * v[t][..., None, :]
            z = z + k[t]
            out[t] = scale * torch.einsum("bhd,bhdv->bhv", q[t], kv)
            if normalize:
                weights = scale * (q[t] * z).sum(-1, keepdim=True) + 1e-10
                out[t] = out[t] / (weights.detach() if fixed else weights)
        states.append(kv)
        sums.append(z[:, None])
    o = torch.stack([out[t] for t in sorted(out)], 1)
    return (o, torch.cat(states), torch.cat(sums)) if normalize else (o, torch.cat(states))


def plain(name):
    """`recurrence` with the arguments of a function of that name."""

    def call(q, k, v, g=None, gk=None, g_gamma=None, **options):
        decays = [None if gk is None else gk, None if g is None else g.view(*g.shape[:3], -1)]
        if g_gamma is not None:
            decays.append(g_gamma[None, None, :, None])
        if "retention" in name:
            heads = torch.arange(q.shape[2], dtype=torch.float64)
            decays.append((1 - 2 ** (-5 - heads)).log()[None, None, :, None].to(q.dtype))
        decays = [decay for decay in decays if decay is not None]
        return recurrence(q, k, v, sum(decays) if decays else None, **options)

    return call


def flat(results):
    """o and the tensors of the state."""
    o, state = results
    return [o, *(state if isinstance(state, tuple) else [] if state is None else [state])]


def leaves(arguments):
    """The tensors among the arguments, by name."""
    found = dict(arguments)
    if isinstance(found.get("initial_state"), tuple):
        found["initial_state"], found["z"] = found["initial_state"]
    return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}


def gradients(results, arguments):
    """Those of the sum of all results, weighted at random, by names that have budgets."""
    if not results[0].requires_grad:
        return {}
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.device) for x in results]
    loss = sum((x.double() * w).sum() for x, w in zip(results, weights, strict=True))
    given = leaves(arguments)
    found = torch.autograd.grad(loss, list(given.values()))
    return dict(zip(given, found, strict=True))


BUDGET = {"q": "dq", "k": "dk", "v": "dv", "initial_state": "dstate", "z": "dstate"}


def quantity(name):
    """The name in `numerics.BUDGETS` of a result or of an argument's gradient."""
    if name == "result 0":
        return "out"
    return BUDGET.get(name, "ddecay" if "g" in name else "state")


def named(results, arguments):
    """The results and the gradients by name."""
    found = {f"result {n}": x for n, x in enumerate(results)}
    return found | gradients(list(found.values()), arguments)


def compare(function, arguments, peer):
    """Results and gradients of `function` against those of `peer` in float64."""
    found = flat(function(**arguments))

    def by_peer(dtype, **fixed):
        def upcast(x):
            if isinstance(x, tuple):
                return tuple(map(upcast, x))
            if not isinstance(x, torch.Tensor):
                return x
            return x.detach().cpu().to(dtype).requires_grad_(x.requires_grad)

        upcasts = {name: upcast(x) for name, x in arguments.items()}
        return named(peer(**upcasts, **fixed)[: len(found)], upcasts)

    def terms(name):
        """The norm of the gradient's two terms, through the numerator and the normaliser."""
        if name not in ("q", "k") or "z" not in leaves(arguments):
            return None
        numerators = by_peer(torch.float64, fixed=True)[name]
        return torch.hypot(numerators, exact[name] - numerators).numpy()

    exact, in_float32 = by_peer(torch.float64), functools.cache(by_peer)

    def ideal(name, dtype):
        return in_float32(torch.float32)[name].detach().to(dtype).float().numpy()

    for name, result in named(found, arguments).items():
        numerics.check(
            quantity(name),
            result.detach().cpu().float().numpy(),
            exact[name].detach().numpy(),
            dtype=str(arguments["q"].dtype).removeprefix("torch."),
            ideal=functools.partial(ideal, name, result.dtype),
            terms=functools.partial(terms, name),
        )
    return found


def of(name, **options):
    return functools.partial(getattr(ato_torch, name), **options)


@pytest.mark.parametrize(
    "name", ["chunk_linear_attn", "chunk_retention", "chunk_simple_gla", "chunk_gla"]
)
def test_is_the_recurrence(name):
    options = {"normalize": True} if name in NORMALIZED else {}
    with torch.set_grad_enabled(name != "chunk_retention"):  # its decay is that of simple GLA
        found = compare(of(name, **STATEFUL), draw(name), functools.partial(plain(name), **options))
    assert [x.dtype for x in found] == [torch.float32] * (3 if options else 2)


@pytest.mark.parametrize("name", PARAMETERS)
def test_names_of_one_family_agree(name):
    """In both directions, with a scale, and without a gradient."""
    family = family_of(name)
    normalize = {"normalize": True} if family == "linear_attn" else {}
    with torch.no_grad():
        arguments = draw(name, states=0, normalize=bool(normalize))
        peer = functools.partial(plain(name), scale=0.3, **normalize)
        found = of(name, scale=0.3, **normalize)(**arguments)
        assert found[1] is None
        torch.testing.assert_close(found[0], peer(**arguments)[0], atol=2e-5, rtol=1e-4)
        if "reverse" in PARAMETERS[name]:
            found = of(name, scale=0.3, reverse=True, **normalize)(**arguments)
            wanted = peer(**arguments, reverse=True)
            torch.testing.assert_close(found[0], wanted[0], atol=2e-5, rtol=1e-4)


def test_gammas_and_gates_multiply():
    arguments = {n: x.detach() for n, x in draw("chunk_simple_gla").items()}
    g_gamma = torch.tensor([-0.3, -0.1, 0.0])
    found = of("chunk_simple_gla", **STATEFUL)(**arguments, g_gamma=g_gamma)
    wanted = of("chunk_simple_gla", **STATEFUL)(**arguments | {"g": arguments["g"] + g_gamma})
    torch.testing.assert_close(found, wanted)
    del arguments["g"], arguments["initial_state"]
    found = of("chunk_simple_gla")(**arguments, g_gamma=_fla.retention(
        _fla.inputs_of(arguments["q"], arguments["k"], arguments["v"])
    ))  # fmt: skip
    torch.testing.assert_close(found, of("chunk_retention")(**arguments))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["fused_recurrent_linear_attn", "fused_recurrent_retention"])
def test_packed_sequences_with_states(name, reverse):
    """Sequences become rows of a batch. Only one of them has gradients, which compile longer."""
    normalize = {"normalize": True} if "linear" in name else {}
    arguments = draw(name, B=1, states=len(CUTS) - 1, normalize=bool(normalize))
    options = {"reverse": reverse, **normalize}
    peer = functools.partial(plain(name), cuts=CUTS, **options)
    with torch.set_grad_enabled("linear" in name):
        compare(of(name, **STATEFUL, **options, cu_seqlens=torch.tensor(CUTS)), arguments, peer)


def test_packed_sequences_without_states():
    """A row with segments, except where it is normalised."""
    with torch.no_grad():
        for name in ("chunk_simple_gla", "chunk_linear_attn"):
            arguments = draw(name, B=1, states=0)
            options = {"normalize": True} if name in NORMALIZED else {}
            wanted = plain(name)(**arguments, **options, cuts=CUTS)[0]
            o, state = of(name, cu_seqlens=CUTS)(**arguments)
            assert state is None
            torch.testing.assert_close(o, wanted, atol=2e-5, rtol=1e-4)
            alone = of(name, cu_seqlens=[0, T])(**arguments)[0]
            assert torch.equal(alone, of(name)(**arguments)[0])


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_retention"])
def test_a_sequence_does_not_read_another(name):
    """NaN in one packed sequence reaches no other, nor its gradients."""
    cuts, steps = [0, 5, T], torch.arange(T)
    arguments = draw("chunk_retention", B=1, states=0)
    if "delta" in name:
        arguments |= {"g": -torch.ones(1, T, H), "beta": torch.ones(1, T, H)}
    spoiled = [
        torch.where(steps[:, None, None] < 5, x.detach(), torch.nan).requires_grad_()
        for x in (arguments.pop(each) for each in "qkv")
    ]
    with torch.set_grad_enabled("delta" not in name):
        o, state = of(name, **STATEFUL, cu_seqlens=cuts)(*spoiled, **arguments)
    assert o[:, :5].isfinite().all() and state[0].isfinite().all() and state[1].isnan().any()
    if o.requires_grad:
        for gradient in torch.autograd.grad(o[:, :5].sum() + state[0].sum(), spoiled):
            assert gradient[:, :5].isfinite().all() and gradient[:, :5].any()


@pytest.mark.parametrize("packed", [False, True])
def test_single_tokens_are_steps(packed, monkeypatch):
    ran, run = [], _ops.run
    monkeypatch.setattr(_ops, "run", lambda op, *rest: ran.append(op) or run(op, *rest))
    name = "fused_recurrent_linear_attn"
    ends = {"cu_seqlens": [0, 1, 2]} if packed else {}
    shape = {"B": 1, "T": 2} if packed else {"T": 1}
    options = STATEFUL | {"normalize": True}
    peer = functools.partial(plain(name), normalize=True, cuts=[0, 1, 2] if packed else (0, None))
    with torch.no_grad():
        compare(of(name, **options, **ends), draw(name, **shape, normalize=True), peer)
        for other in ("fused_recurrent_retention", "fused_recurrent_gla"):
            arguments = draw(other, T=1, states=0)
            o, state = of(other)(**arguments)
            torch.testing.assert_close(o, plain(other)(**arguments)[0])
            assert state is None
    assert set(ran) == {"linear_attention_step"}


def test_no_tokens():
    name = "chunk_linear_attn"
    with torch.no_grad():
        for states in (B, 0):
            arguments = draw(name, T=0, states=states)
            o, found = of(name, **STATEFUL)(**arguments)
            assert o.shape == (B, 0, H, V)
            zeros = torch.zeros(B, H, D, V), torch.zeros(B, 1, H, D)
            for state, wanted in zip(found, arguments.get("initial_state", zeros), strict=True):
                assert torch.equal(state, wanted)


def test_states_with_their_values_first():
    arguments = {n: x.detach() for n, x in draw("fused_recurrent_gla", T=1).items()}
    wanted, state = of("fused_recurrent_gla", **STATEFUL)(**arguments)
    turned = arguments | {"initial_state": arguments["initial_state"].mT}
    for name, gate in (("fused_recurrent_gla", "gk"), ("chunk_gla", "g")):
        call = of(name, **STATEFUL, state_v_first=True)
        o, found = call(**{gate if n == "gk" else n: x for n, x in turned.items()})
        torch.testing.assert_close((o, found.mT), (wanted, state))


def test_bfloat16_and_autocast():
    arguments = {n: x.detach() for n, x in draw("chunk_simple_gla", dtype=torch.bfloat16).items()}
    o, state = compare(of("chunk_simple_gla", **STATEFUL), arguments, plain("chunk_simple_gla"))
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    upcast = {n: x.float() for n, x in arguments.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = of("chunk_simple_gla", **STATEFUL)(**upcast)
    torch.testing.assert_close(found, (o, state))


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_that_compilers_see(name):
    stateful = "initial_state" in PARAMETERS[name]
    with FakeTensorMode():
        found = of(name, **STATEFUL if stateful else {})(**draw(name, states=B * stateful))
    shapes = [(B, T, H, V), (B, H, D, V), (B, 1, H, D)]
    assert [x.shape for x in flat(found)] == shapes[: 1 + stateful + (name in NORMALIZED)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_signatures(name):
    """As there, where it is installed, too; after them what it takes by keyword alone."""
    functions = [getattr(ato_torch, name)]
    if importlib.util.find_spec("fla") is not None:
        functions.append(fla_function(name))
    for function in functions:
        found = inspect.signature(function).parameters.values()
        by_place = [each for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert [each.name for each in by_place] == ["q", "k", "v", *PARAMETERS[name].split()]
        for each in by_place[3:]:
            wanted = name in NORMALIZED and each.name == "normalize"
            wanted = wanted if each.name in BOOLEANS else None
            if name != "chunk_gla" or each.name != "g":
                assert each.default is wanted, each


# What changes a good call, and what the error says.
ATTENTIONS = torch.zeros(B, T, H, D)
BAD = [
    ("chunk_gla", {"q": None}, "q must be a torch.Tensor, got NoneType"),
    ("chunk_gla", {"k": torch.zeros(B, T, H + 1, D)}, r"k must be \[B, T, H, D\] with .* H=3"),
    ("chunk_gla", {"v": torch.zeros(B, T, H, V).half()}, "v must have q's dtype torch.float32"),
    ("chunk_gla", {"g": None}, "g must be a torch.Tensor, got NoneType"),
    ("chunk_gla", {"g": -torch.ones(B, T, H)}, r"g must be \[B, T, H, D\] with"),
    ("chunk_simple_gla", {"g": torch.ones(B, T, H)}, "g is the natural log .* up to 1.0"),
    ("chunk_simple_gla", {"g": ATTENTIONS}, r"g must be \[B, T, H\] with"),
    ("chunk_simple_gla", {"g_gamma": torch.zeros(H + 1)}, r"g_gamma must be \[H\] with"),
    ("fused_recurrent_gla", {"gk": torch.zeros(B, T, H)}, r"gk must be \[B, T, H, D\] with"),
    ("chunk_gla", {"initial_state": torch.zeros(B, H, V, D)}, r"initial_state must be \[N, H, D"),
    ("chunk_gla", {"state_v_first": True}, r"initial_state must be \[N, H, V, D\]"),
    ("chunk_gla", {"state_v_first": 1}, "state_v_first must be True or False"),
    ("chunk_gla", {"output_final_state": 1}, "output_final_state must be True or False"),
    ("fused_recurrent_gla", {"reverse": None}, "reverse must be True or False"),
    ("chunk_linear_attn", {"normalize": 1}, "normalize must be True or False"),
    ("chunk_gla", {"scale": "large"}, "scale must be"),
    ("chunk_gla", {"cu_seqlens": [0, T]}, "cu_seqlens needs a packed row, B = 1, got B=2"),
    ("chunk_gla", {"cu_seqlens_cpu": [0, T]}, "cu_seqlens_cpu needs cu_seqlens"),
    (
        "chunk_linear_attn",
        {"initial_state": torch.zeros(B, H, D, V)},
        r"initial_state must be a pair \(S \[N, H, D, V\], z \[N, 1, H, D\]\) .* got Tensor",
    ),
    (
        "chunk_linear_attn",
        {"initial_state": (torch.zeros(B, H, D, V), torch.zeros(B, H, D))},
        r"initial_state\[1\] must be \[N, 1, H, D\] with",
    ),
    ("chunk_linear_attn", {"normalize": False}, "initial_state must be a torch.Tensor, got tuple"),
]


@pytest.mark.parametrize(("name", "changed", "message"), BAD)
def test_bad_arguments(name, changed, message):
    with pytest.raises(ValueError, match=message):
        of(name)(**draw(name) | changed)


@pytest.mark.parametrize(
    ("name", "argument", "way_out"),
    [
        ("parallel_retention", "output_attentions", "form them in PyTorch"),
        ("parallel_simple_gla", "output_attentions", "form them in PyTorch"),
        ("fused_recurrent_gla", "gv", "one per channel of the keys into gk"),
    ],
)
def test_arguments_that_are_not_supported(name, argument, way_out):
    message = f"{argument} is not supported by ato_torch.{name}; .*{way_out}"
    with pytest.raises(NotImplementedError, match=message):
        of(name)(**draw(name, states=0), **{argument: True})


def test_arguments_that_were_removed_are_named():
    with pytest.raises(TypeError, match="head_first"):
        of("chunk_retention")(**draw("chunk_retention"), head_first=False)


def fla_function(name):
    """The function of that name in flash-linear-attention."""
    module = importlib.import_module(f"fla.ops.{family_of(name)}")
    return getattr(module, name)


def on_gpu(arguments):
    def moved(x):
        return tuple(map(moved, x)) if isinstance(x, tuple) else x.detach().cuda().requires_grad_()

    return {name: moved(x) for name, x in arguments.items()}


def takes_states(name):
    return "initial_state" in PARAMETERS[name]


def drawn_on_gpu(name, **sizes):
    """The arguments of a call on the card, with states where it takes them, and its options."""
    stateful = takes_states(name)
    options = STATEFUL if stateful else {}
    return on_gpu(draw(name, **{"states": sizes.get("B", B) * stateful, **sizes})), options


@pytest.mark.gpu
@pytest.mark.kernels("linear_attention")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PARAMETERS)
def test_on_a_gpu(name, dtype):
    """Against float64."""
    arguments, options = drawn_on_gpu(name, dtype=dtype)
    peer = functools.partial(plain(name), **{"normalize": True} if name in NORMALIZED else {})
    compare(of(name, **options), arguments, peer)


@pytest.mark.gpu
@pytest.mark.kernels("linear_attention")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["fused_recurrent_linear_attn", "fused_recurrent_gla"])
def test_packed_sequences_on_a_gpu(name, reverse):
    """In both directions, with states."""
    arguments = on_gpu(draw(name, B=1, states=len(CUTS) - 1, dtype=torch.bfloat16))
    options = {"reverse": reverse, **STATEFUL, "cu_seqlens": torch.tensor(CUTS).cuda()}
    peer = functools.partial(plain(name), cuts=CUTS, reverse=reverse)
    compare(of(name, **options), arguments, peer)


# B, T and (H, D, V) of calls beside flash-linear-attention: those that Triton's kernels run, and
# those that Hopper's do, which are too large for a recurrence in float64.
BESIDE_FLA = {"T 1024": (2, 1024, (4, 64, 64)), "T 4096": (1, 4096, (16, 128, 128))}
CHUNKS = ["chunk_linear_attn", "chunk_retention", "chunk_simple_gla", "chunk_gla"]
requires_fla = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None,
    reason="flash-linear-attention is not installed: pip install fla-core==0.6.0",
)


@pytest.mark.gpu
@pytest.mark.kernels("linear_attention", "mosaic_gpu")
@pytest.mark.parametrize("name", CHUNKS)
def test_longer_calls_on_a_gpu(name):
    """Against float64, forward and backward, at the shorter of the lengths beside fla."""
    B, T, sizes = BESIDE_FLA["T 1024"]
    arguments, options = drawn_on_gpu(name, B=B, T=T, sizes=sizes, dtype=torch.bfloat16)
    peer = functools.partial(plain(name), **{"normalize": True} if name in NORMALIZED else {})
    compare(of(name, **options), arguments, peer)


def by_fla(all_of):
    """`all_of()`, without gradients where flash-linear-attention refuses them: it knows versions of
    Triton that compute those of a gate wrongly on Hopper."""
    try:
        return all_of()
    except RuntimeError as error:
        if "produces incorrect results for gated" not in str(error):
            raise
    with torch.no_grad():
        return all_of()


def apart(ours, theirs):
    """The relative RMS difference."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


@requires_fla
@pytest.mark.gpu
@pytest.mark.kernels("linear_attention", "mosaic_gpu")
@pytest.mark.parametrize(
    ("name", "size"), [(n, "T 1024") for n in PARAMETERS] + [(n, "T 4096") for n in CHUNKS]
)
def test_beside_fla(name, size):
    """Results and gradients of both differ by at most two budgets, one for the error of each."""
    B, T, sizes = BESIDE_FLA[size]
    arguments, options = drawn_on_gpu(name, B=B, T=T, sizes=sizes, dtype=torch.bfloat16)

    def all_of(function):
        return named(flat(function(**arguments, **options)), arguments)

    ours, theirs = all_of(of(name)), by_fla(lambda: all_of(fla_function(name)))
    limits = {n: 2 * numerics.budget(quantity(n), "bfloat16") for n in theirs}
    found = {n: apart(ours[n], theirs[n]) for n in theirs}
    results = {n for n in ours if n.startswith("result")}
    assert theirs.keys() in (ours.keys(), results)
    assert all(found[n] <= limits[n] for n in found), {n: (found[n], limits[n]) for n in found}
