"""ato_torch's functions of the delta rule against their recurrence in float64, by PyTorch."""

import functools
import importlib.util

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)
F = torch.nn.functional

from torch._subclasses import FakeTensorMode  # noqa: E402

import ato_torch  # noqa: E402
from ato_torch import _ops  # noqa: E402
from tests import numerics  # noqa: E402
from tests.test_torch_direct import check_a_graph_of  # noqa: E402
from tests.test_torch_fla import by_fla  # noqa: E402

B, T, G, H, D, V = 2, 21, 2, 4, 8, 6
CUTS = [0, 5, 5, 20, T]  # the ends of packed sequences, one empty and one of a single token
FUNCTIONS = {
    "chunk": ato_torch.chunk_gated_delta_rule,
    "fused": ato_torch.fused_recurrent_gated_delta_rule,
    "kda": ato_torch.chunk_kda,
}
# The same as flash-linear-attention has them: modules of fla.ops, and names there.
OF_FLA = {
    "chunk": ("gated_delta_rule", "chunk_gated_delta_rule"),
    "fused": ("gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda": ("kda", "chunk_kda"),
}
NORMALIZED = {"use_qk_l2norm_in_kernel": True}
STATEFUL = NORMALIZED | {"output_final_state": True}


def draw(name, B=B, T=T, states=B, dtype=torch.float32, sizes=(G, H, D, V), device="cpu"):
    """The arguments of a call, all with gradients; without `states` none begins with a state."""
    generator = torch.Generator().manual_seed(0)
    G, H, D, V = sizes

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    found = {
        # So short that what the norm adds to their squared lengths shows.
        "q": 0.05 * normal(B, T, G, D).to(dtype),
        "k": 0.05 * normal(B, T, G, D).to(dtype),
        "v": normal(B, T, H, V).to(dtype),
        "g": F.logsigmoid(normal(B, T, H, *[D] * (name == "kda")) + 2),
        "beta": torch.sigmoid(normal(B, T, H)),
    }
    if states:
        found["initial_state"] = normal(states, H, D, V)
    return {name: tensor.to(device).requires_grad_() for name, tensor in found.items()}


def recurrence(q, k, v, g, beta, initial_state=None, l2norm=True, scale=None, cuts=(0, None)):
    """o and the last states in the dtype of the arguments; `cuts` as `CUTS`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    g = g if g.ndim == 4 else g[..., None]
    outs, states = [], []
    for n, (first, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        state = q.new_zeros(len(q), *v.shape[2:3], q.shape[-1], v.shape[-1])
        if initial_state is not None:
            state = initial_state if cuts == (0, None) else initial_state[n : n + 1]
        for t in range(first, q.shape[1] if end is None else end):
            state = g[:, t, :, :, None].exp() * state
            recalled = torch.einsum("bhd,bhdv->bhv", k[:, t], state)
            written = beta[:, t, :, None] * (v[:, t] - recalled)
            state = state + k[:, t, :, :, None] * written[:, :, None]
            outs.append(scale * torch.einsum("bhd,bhdv->bhv", q[:, t], state))
        states.append(state)
    return torch.stack(outs, 1), torch.cat(states)


def gradients(results, arguments):
    """Those of the sum of all results, weighted at random, by names that have budgets."""
    if not results[0].requires_grad:
        return {}
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.device) for x in results]
    loss = sum((x.double() * w).sum() for x, w in zip(results, weights, strict=True))
    names = {"g": "decay", "initial_state": "state"}
    found = torch.autograd.grad(loss, list(arguments.values()))
    return {f"d{names.get(n, n)}": x for n, x in zip(arguments, found, strict=True)}


def compare(function, arguments, peer=recurrence):
    """Results and gradients of `function` against those of `peer` in float64."""
    found = [x for x in function(**arguments) if x is not None]

    def all_of(results, arguments):
        results = results[: len(found)]
        named = dict(zip(("out", "state"), results, strict=False))
        return named | gradients(results, arguments)

    def by_peer(dtype):
        upcast = {
            n: x.detach().cpu().to(dtype).requires_grad_(x.requires_grad)
            for n, x in arguments.items()
        }
        return all_of(peer(**upcast), upcast)

    exact, ideal = by_peer(torch.float64), by_peer(torch.float32)
    for name, result in all_of(found, arguments).items():
        numerics.check(
            name,
            result.detach().cpu().float().numpy(),
            exact[name].detach().numpy(),
            dtype=str(arguments["q"].dtype).removeprefix("torch."),
            ideal=ideal[name].detach().to(result.dtype).float().numpy(),
        )
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_the_recurrence(name):
    compare(functools.partial(FUNCTIONS[name], **STATEFUL), draw(name))


def test_bfloat16_and_a_scale():
    function = functools.partial(FUNCTIONS["chunk"], output_final_state=True, scale=0.3)
    peer = functools.partial(recurrence, l2norm=False, scale=0.3)
    arguments = {n: x.detach() for n, x in draw("chunk", dtype=torch.bfloat16).items()}
    o, state = compare(function, arguments, peer)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32


@pytest.mark.parametrize("name", ["fused", "kda"])
def test_one_token_is_a_step(name, monkeypatch):
    ran, run = [], _ops.run
    monkeypatch.setattr(_ops, "run", lambda op, *rest: ran.append(op) or run(op, *rest))
    compare(functools.partial(FUNCTIONS[name], **STATEFUL), draw(name, T=1))
    assert ran == ["gated_delta_rule_step"]


def test_packed_sequences():
    """Sequences with states, and without: the first with gradients, which compile longer."""
    peer, cuts = functools.partial(recurrence, cuts=CUTS), torch.tensor(CUTS)
    function = functools.partial(ato_torch.chunk_gated_delta_rule, cu_seqlens=cuts)
    arguments = draw("chunk", B=1, states=len(CUTS) - 1)
    assert len(compare(functools.partial(function, **STATEFUL), arguments, peer)) == 2
    del arguments["initial_state"]
    with torch.no_grad():
        o, state = function(**arguments, **NORMALIZED)
        wanted, _ = peer(**arguments)
    assert state is None
    torch.testing.assert_close(o, wanted, atol=1e-5, rtol=1e-5)


def test_states_with_their_values_first():
    arguments = draw("chunk")
    wanted, state = ato_torch.chunk_gated_delta_rule(**arguments, **STATEFUL)
    turned = arguments | {"initial_state": arguments["initial_state"].mT}
    o, found = ato_torch.chunk_gated_delta_rule(**turned, **STATEFUL, state_v_first=True)
    torch.testing.assert_close((o, found.mT), (wanted, state))


def test_decays_per_step_and_per_channel_multiply():
    arguments = draw("kda", T=1)
    gk = arguments.pop("g")
    g = draw("chunk", T=1)["g"]
    fused = ato_torch.fused_recurrent_gated_delta_rule
    wanted = ato_torch.chunk_kda(**arguments, g=gk + g[..., None])
    torch.testing.assert_close(fused(**arguments, g=g, gk=gk), wanted)
    torch.testing.assert_close(fused(**arguments, gk=gk + g[..., None]), wanted)
    # Neither decay nor beta.
    del arguments["beta"]
    zeros, ones = torch.zeros_like(g), torch.ones_like(g)
    torch.testing.assert_close(
        fused(**arguments), ato_torch.chunk_gated_delta_rule(**arguments, g=zeros, beta=ones)
    )


@pytest.mark.parametrize("name", ["chunk", "kda"])
def test_gates_and_sigmoids(name):
    """As flash-linear-attention computes them in its kernels."""
    arguments, of_head = draw(name, T=1), (H, D) if name == "kda" else (H,)
    steps, logits = torch.randn(B, 1, *of_head), torch.randn(B, 1, H)
    rates, bias = torch.randn(H), torch.randn(of_head)
    rate = rates.exp().view(H, *[1] * (len(of_head) - 1))
    call = functools.partial(FUNCTIONS[name], **STATEFUL)
    decays = {"": (-rate * F.softplus(steps + bias), {})}
    if name == "kda":
        bounded = {"lower_bound": -4.0, "safe_gate": True}
        decays["bounded"] = (-4 * torch.sigmoid(rate * (steps + bias)), bounded)
    for decay, options in decays.values():
        wanted = call(**arguments | {"g": decay, "beta": 2 * torch.sigmoid(logits)})
        found = call(
            **arguments | {"g": steps, "beta": logits}, use_gate_in_kernel=True, A_log=rates,
            dt_bias=bias.flatten(), use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
            **options,
        )  # fmt: skip
        torch.testing.assert_close(found, wanted)
    if name == "kda":
        found = call(**arguments | {"g": steps}, use_gate_in_kernel=True, lower_bound=-4.0)
        torch.testing.assert_close(found, call(**arguments | {"g": -4 * torch.sigmoid(steps)}))


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        o, state = ato_torch.chunk_gated_delta_rule(**draw("chunk", T=1), **STATEFUL)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32


def test_shapes_that_compilers_see():
    for length in (T, 1):
        with FakeTensorMode():
            arguments = {n: x.detach() for n, x in draw("chunk", T=length).items()}
            found = ato_torch.chunk_gated_delta_rule(**arguments, **STATEFUL)
        assert [x.shape for x in found] == [(B, length, H, V), (B, H, D, V)]


# What changes a good call, and what the error says.
BAD = [
    ("chunk", {"q": None}, "q must be a torch.Tensor, got NoneType"),
    ("chunk", {"k": torch.zeros(B, T, G, D + 1)}, r"k must be \[B, T, G, D\] with .* D=8"),
    ("chunk", {"v": torch.zeros(B, T, 3, V)}, "v's heads H must be a multiple .* H=3, G=2"),
    ("chunk", {"v": torch.zeros(B, T, H, V).half()}, "v must have q's dtype torch.float32"),
    ("chunk", {"g": None}, "g must be a torch.Tensor, got NoneType"),
    ("chunk", {"g": torch.ones(B, T, H)}, "g is the natural log .* got values up to 1.0"),
    ("chunk", {"g": -torch.ones(B, T, H, D)}, r"g must be \[B, T, H\] with"),
    ("kda", {"g": -torch.ones(B, T, H)}, r"g must be \[B, T, H, D\] with"),
    ("fused", {"gk": torch.zeros(B, T, H)}, r"gk must be \[B, T, H, D\] with"),
    ("fused", {"beta": torch.ones(B, T, H, V)}, r"beta must be \[B, T, H\] with"),
    ("chunk", {"beta": torch.ones(B, T, H).to("meta")}, "beta must be on cpu as q is, got meta"),
    ("chunk", {"initial_state": torch.zeros(B, H, V, D)}, r"initial_state must be \[N, H, D, V"),
    ("chunk", {"output_final_state": 1}, "output_final_state must be True or False"),
    ("chunk", {"use_qk_l2norm_in_kernel": None}, "use_qk_l2norm_in_kernel must be True or"),
    ("chunk", {"scale": "large"}, "scale must be"),
    ("chunk", {"cu_seqlens": [0, T]}, "cu_seqlens needs a packed row, B = 1, got B=2"),
    ("chunk", {"cu_seqlens_cpu": [0, T]}, "cu_seqlens_cpu needs cu_seqlens"),
    ("chunk", {"use_gate_in_kernel": True}, "A_log must be given with use_gate_in_kernel=True"),
    ("chunk", {"dt_bias": torch.zeros(H)}, "dt_bias needs use_gate_in_kernel=True"),
    ("chunk", {"allow_neg_eigval": True}, "allow_neg_eigval needs use_beta_sigmoid_in_kernel"),
    ("kda", {"lower_bound": -1.0}, "lower_bound needs use_gate_in_kernel=True"),
    (
        "kda",
        {"use_gate_in_kernel": True, "lower_bound": -6},
        "lower_bound must be from -5 to below 0, got -6",
    ),
    (
        "kda",
        {"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.zeros(H)},
        "lower_bound must be given with safe_gate",
    ),
    ("kda", {"safe_gate": "x"}, "safe_gate must be True or False, got 'x'"),
    (
        "kda",
        {"use_gate_in_kernel": True, "A_log": torch.zeros(H), "dt_bias": torch.zeros(H)},
        r"dt_bias must be \[H \* D\] = \[32\], got shape \(4,\)",
    ),
]


@pytest.mark.parametrize(("name", "changed", "message"), BAD)
def test_bad_arguments(name, changed, message):
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[name](**draw(name) | changed)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([0, 5], r"cu_seqlens must rise from 0 to T=21, got \[0, 5\]"),
        ([0, 7, 5, T], "cu_seqlens must rise"),
        (torch.tensor([0.0, T]), r"cu_seqlens must hold integers \[N \+ 1\], got torch.float32"),
        ([[0, T]], "cu_seqlens must hold integers"),
        ("ab", r"cu_seqlens must hold integers \[N \+ 1\], got 'ab'"),
    ],
)
def test_bad_ends(ends, message):
    with pytest.raises(ValueError, match=message):
        ato_torch.chunk_gated_delta_rule(**draw("chunk", B=1, states=0), cu_seqlens=ends)


def test_ends_that_contradict_each_other():
    """The length of a row is read from the ends on the host: rows would overlap."""
    both = {"cu_seqlens": [0, 7, T], "cu_seqlens_cpu": torch.tensor([0, 9, T])}
    said = r"cu_seqlens_cpu must hold what cu_seqlens holds, \[0, 7, 21\], got \[0, 9, 21\]"
    with pytest.raises(ValueError, match=said):
        ato_torch.chunk_gated_delta_rule(**draw("chunk", B=1, states=0), **both)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("chunk", "cp_context"),
        ("fused", "gv"),
        ("kda", "return_intermediate_states"),
        ("kda", "use_graph"),
        ("kda", "max_num_seqs"),
    ],
)
def test_arguments_that_are_not_supported(name, argument):
    function = FUNCTIONS[name]
    with pytest.raises(NotImplementedError, match=f"{argument} is not supported by ato_torch"):
        function(**draw(name), **{argument: True})


def test_unknown_arguments_are_named():
    for function, name in zip(FUNCTIONS.values(), FUNCTIONS, strict=True):
        with pytest.raises(TypeError, match="head_first"):
            function(**draw(name), head_first=True)


# T and (G, H, D, V) of calls on a card: whole chunks of 64 steps and a tail.
ON_A_CARD = [(300, (2, 4, 64, 64)), (256, (2, 4, 128, 64))]
on_a_card = pytest.mark.parametrize(("T", "sizes"), ON_A_CARD, ids=str)
mosaic_gpu = pytest.mark.kernels("mosaic_delta_rule")


def on_hopper():
    return torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@mosaic_gpu
@on_a_card
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_a_gpu(name, T, sizes):
    """Against float64, forward and backward, with states."""
    arguments = draw(name, B=2, T=T, dtype=torch.bfloat16, sizes=sizes, device="cuda")
    compare(functools.partial(FUNCTIONS[name], **STATEFUL), arguments)


@pytest.mark.gpu
@mosaic_gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_packed_sequences_on_a_gpu(name):
    """With states, of which each sequence has one."""
    cuts = [0, 70, 70, 71, 300]
    arguments = draw(
        name,
        B=1,
        T=300,
        states=len(cuts) - 1,
        dtype=torch.bfloat16,
        sizes=ON_A_CARD[0][1],
        device="cuda",
    )
    options = {**STATEFUL, "cu_seqlens": torch.tensor(cuts, device="cuda")}
    peer = functools.partial(recurrence, cuts=cuts)
    compare(functools.partial(FUNCTIONS[name], **options), arguments, peer)


@pytest.mark.gpu
@mosaic_gpu
@on_a_card
@pytest.mark.parametrize("name", FUNCTIONS)
def test_goes_direct_on_a_gpu(name, T, sizes):
    """Both passes, by Hopper's own kernels where there are such, twice the same bits."""
    arguments = draw(name, B=2, T=T, dtype=torch.bfloat16, sizes=sizes, device="cuda")
    first, second = ([x for x in FUNCTIONS[name](**arguments, **STATEFUL)] for _ in range(2))
    assert all(map(torch.equal, first, second))
    of_first, of_second = (gradients(x, arguments) for x in (first, second))
    assert all(torch.equal(of_first[n], of_second[n]) for n in of_first)
    told = ato_torch.explain(FUNCTIONS[name], **arguments, **STATEFUL)
    assert told.forward.road == told.backward.road == "direct", told
    if on_hopper():
        assert all("mosaic" in str(road) for road in (told.forward, told.backward)), told


@pytest.mark.gpu
@mosaic_gpu
@pytest.mark.parametrize("length", [300, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_captured_in_a_cuda_graph(name, length):
    """Many steps with their gradients, and one step without."""
    sizes = ON_A_CARD[0][1]
    arguments = draw(name, B=2, T=length, dtype=torch.bfloat16, sizes=sizes, device="cuda")

    def step():
        results = FUNCTIONS[name](**arguments, **STATEFUL)
        if length == 1:
            return [x.detach() for x in results]
        loss = sum(x.float().square().sum() for x in results)
        return [*results, *torch.autograd.grad(loss, list(arguments.values()))]

    with torch.set_grad_enabled(length > 1):
        check_a_graph_of(step, [arguments[each] for each in "qkv"])


@pytest.mark.skipif(
    importlib.util.find_spec("fla") is None,
    reason="flash-linear-attention is not installed: pip install fla-core==0.6.0",
)
@pytest.mark.gpu
@mosaic_gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_beside_fla(name):
    """Results and gradients of both differ by at most two budgets, one for the error of each."""
    module, theirs = OF_FLA[name]
    function = getattr(importlib.import_module(f"fla.ops.{module}"), theirs)
    # As many heads of keys as of values, which every one of its functions takes.
    arguments = draw(name, B=2, T=1024, dtype=torch.bfloat16, sizes=(4, 4, 64, 64), device="cuda")

    def all_of(call):
        results = call(**arguments, **STATEFUL)
        return dict(zip(("out", "state"), results, strict=True)) | gradients(results, arguments)

    # A recurrence by steps has no gradients there.
    with torch.set_grad_enabled(name != "fused"):
        ours, other = all_of(FUNCTIONS[name]), by_fla(lambda: all_of(function))
    assert other.keys() in (ours.keys(), {"out", "state"})
    apart = {n: float((ours[n] - other[n]).float().norm() / other[n].float().norm()) for n in other}
    limits = {n: 2 * numerics.budget(n, "bfloat16") for n in apart}
    assert all(apart[n] <= limits[n] for n in apart), {n: (apart[n], limits[n]) for n in apart}
