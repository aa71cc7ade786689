"""The suite of the delta rule: what is right, what is drawn, and that it runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from benchmarks import cases, delta, delta_step, delta_torch, ours, peers, side_by_side
from benchmarks.cases import Case
from tests.figures import parsed_flags  # noqa: F401

CASE = Case("delta", B=2, H=2, T=150, D=8, dtype="float32")


@pytest.mark.parametrize("decay", [None, "step", "channel"])
@pytest.mark.parametrize("T", [150, 1040])
def test_exact_is_the_reference(decay, T):
    """Over whole runs of kept states and a rest; of long sequences by a sample of rows."""
    case = dataclasses.replace(CASE, T=T, decay=decay)
    inputs = ours.draw(case, jax.random.key(1))
    rows = cases.compared_rows(case)
    kept = np.zeros((T, 1, 1), np.float32)
    kept[rows] = 1
    gates = [inputs[name] for name in ("decay", "beta") if name in inputs]

    def attend(q, k, v):
        *of_decay, beta = gates
        named = dict(zip(["decay"], of_decay, strict=False))
        return ato_jax.gated_delta_rule(q, k, v, beta, implementation="reference", **named)

    out, pull = jax.vjp(attend, *(inputs[name] for name in "qkv"))
    found = {"out": out} | dict(
        zip(("dq", "dk", "dv"), pull(inputs["dout"] * kept), strict=True)
    )
    last = {name: np.asarray(array[-1, :, -1]) for name, array in (inputs | found).items()}
    arrays = (last[name] for name in ("q", "k", "v", "dout"))
    exact = cases.exact_delta(*arrays, rows, last.get("decay"), last["beta"])
    for name, wanted in exact.items():
        apart = last[name][rows] if name in ("out", "dq") else last[name]
        assert np.linalg.norm(apart - wanted) < 2e-6 * np.linalg.norm(wanted), name


@pytest.mark.parametrize("phase", cases.PHASES)
@pytest.mark.parametrize("case", delta.CASES["cpu"][:3], ids=str)
def test_the_library_is_right_and_a_mistake_is_seen(case, phase):
    assert not isinstance(ours.prepare(case, phase, delta._library(None, case)), str)

    def wrong(q, k, v, *gates):
        return delta._library(None, case)(q, k, v, *gates[:-1], 0.9 * gates[-1])

    assert "is wrong: relative error" in ours.prepare(case, phase, wrong)


@pytest.mark.parametrize("decay", delta.KINDS_ON_CPUS)
def test_plain_forms_are_right(decay):
    case = dataclasses.replace(delta.CASES["cpu"][0], T=64, decay=decay)
    names = [name for name in side_by_side.wanted(delta.CONTEST, case) if "plain" in name]
    assert len(names) == (1 if decay == "channel" else 3)
    for name in names:
        contender = delta.CONTEST.in_jax[name]
        assert not isinstance(ours.prepare(case, cases.PHASES[1], contender.make(case)), str)


def test_inputs_and_their_bytes():
    case = dataclasses.replace(CASE, decay="step")
    inputs = ours.draw(case, jax.random.key(0))
    np.testing.assert_allclose(jnp.linalg.norm(inputs["k"], axis=-1), 1, rtol=1e-5)
    beta = inputs["beta"]
    assert beta.shape == (2, 150, 2) and 0 < beta.min() < beta.max() < 1
    gates = 2 * inputs["beta"].nbytes
    assert case.traffic("forward") == 4 * case.unit + gates
    assert case.traffic("forward + backward") == 11 * case.unit + 3 * gates
    assert case.operations("forward") == 6 * 2 * 150 * 2 * 8 * 8
    assert str(case) == "delta B2 H2 T150 D8 float32, decay per step"


def test_peers_draw_the_same_kind_of_inputs_and_are_compared():
    """Through PyTorch's part, by a contender that computes it step by step."""
    torch = pytest.importorskip("torch")
    case = delta.CASES["cpu"][0]

    def make(torch, case, factor=1.0):
        def attend(q, k, v, decay, beta):
            state, outs = torch.zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
            for t in range(case.T):
                state = decay[:, t, :, None, None].exp() * state
                seen = (k[:, t, :, :, None] * state).sum(2)
                u = factor * beta[:, t, :, None] * (v[:, t] - seen)
                state = state + k[:, t, :, :, None] * u[:, :, None]
                outs.append((q[:, t, :, :, None] * state).sum(2) * case.D**-0.5)
            return torch.stack(outs, 1)

        return attend

    contender = dataclasses.replace(delta_torch.CONTENDERS["fla gated delta rule"], make=make)
    for phase in cases.PHASES:
        ready = peers._prepare(torch, "cpu", contender, case, phase)
        assert not isinstance(ready, str) and max(ready.errors.values()) < 1e-5, ready
    wrong = dataclasses.replace(contender, make=lambda *_: make(*_, factor=1.1))
    assert "out is wrong" in peers._prepare(torch, "cpu", wrong, case, "forward")


@pytest.mark.parametrize("decay", [None, "step", "channel"])
def test_a_step_is_right_and_a_mistake_is_seen(decay):
    """The step itself, beside the reference in float64 and in its two forms."""
    case = dataclasses.replace(delta.CASES["cpu"][-1], decay=decay)
    assert case.op == delta.STEP and delta.CONTEST.phases_of(case) == ("forward",)
    for name in side_by_side.wanted(delta.CONTEST, case):
        ready = delta.CONTEST.in_jax[name].compiled(case, "forward")()
        assert max(ready.errors.values()) < 1e-5
        first, second = (jax.block_until_ready(ready.launch(0))[0] for _ in range(2))
        assert not np.array_equal(first, second)  # the state is carried

    def wrong(q, k, v, beta, decay, state):
        return delta_step.by_library(q, k, v, 0.8 * beta, decay, state)

    with pytest.raises(ValueError, match="out is wrong"):
        delta_step.prepare(case, wrong)


def test_bytes_of_a_step():
    case = Case("delta step", B=64, H=32, T=1, D=128, dtype="bfloat16", decay="channel")
    state, row = 64 * 32 * 128 * 128 * 4, 64 * 32 * 128
    assert case.traffic("forward") == 2 * state + 4 * 2 * row + 4 * row + 4 * 64 * 32
    assert str(case) == "delta step B64 H32 D128 bfloat16, decay per channel"


def test_every_kind_has_peers_of_both_sides():
    for case in delta.CASES["gpu"]:
        names = side_by_side.wanted(delta.CONTEST, case)
        if case.op == delta.STEP:
            assert names == ["ato_jax", delta.XLA]
            continue
        assert sum(name.startswith("fla") for name in names) == 1
        assert "jax-linear-attention's delta rule" in names and "ato_jax" in names
        assert (delta.XLA in names) == ((case.B, case.T, case.H) not in delta.SIZES)
    assert set(delta_torch.CONTENDERS) <= set(peers.CONTENDERS["delta"])
