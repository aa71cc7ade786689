"""Linear attention beside its peers: exact results, who takes which case, the table."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import (
    byte_limit,
    cases,
    linear,
    linear_jax,
    linear_torch,
    ours,
    side_by_side,
    tables,
    timing,
)
from benchmarks.cases import Case
from tests import numerics
from tests.figures import parsed_flags  # noqa: F401

HAS_TORCH = importlib.util.find_spec("torch") is not None
CASE = Case("linear", B=1, H=2, T=256, D=16, dtype="float32", causal=True)


@pytest.mark.parametrize("kind", ["head", "step", "channel"])
@pytest.mark.parametrize(("mapped", "normalize"), [(False, True), (True, False)])
def test_exact_with_decays_is_the_reference(kind, mapped, normalize):
    generator = np.random.default_rng(0)
    q, k, v = generator.normal(size=(3, 1, 12, 1, 4)).astype(np.float32)
    shape = {"head": (1,), "step": (1, 12, 1), "channel": (1, 12, 1, 4)}[kind]
    decay = -np.abs(generator.normal(size=shape)).astype(np.float32)
    options = {"feature_map": "identity", "scale": 1.0} if mapped else {}
    wanted = numerics.oracle(
        *("linear_attention", q, k, v),
        **{"causal": True, "decay": decay, "normalize": normalize, **options},
    )
    of_head = decay if kind == "head" else decay[0, :, 0]
    one = [array[0, :, 0] for array in (q, k, v, np.asarray(wanted.cotangents))]
    case = Case("linear", 1, 1, 12, 4, "float32", causal=True, decay=kind)
    of_head = np.broadcast_to(of_head, (12, *of_head.shape[1:]))
    found = cases.exact(case, *one, np.arange(12), of_head, mapped, normalize)
    for name in ("out", "dq", "dk", "dv"):
        exact = wanted.exact[name][0, :, 0]
        np.testing.assert_allclose(found[name], exact, rtol=1e-5, atol=1e-8)


def test_traffic_counts_the_gates():
    u = CASE.unit
    gated = {kind: dataclasses.replace(CASE, decay=kind) for kind in ("step", "channel")}
    steps = 4 * CASE.B * CASE.T * CASE.H
    assert [gated["step"].traffic(phase) for phase in cases.PHASES] == [
        4 * u + steps,
        11 * u + 3 * steps,
    ]
    # In bfloat16, float32 gates are two units.
    half = dataclasses.replace(gated["channel"], dtype="bfloat16")
    assert [half.traffic(phase) / half.unit for phase in cases.PHASES] == [6, 17]
    step = Case("step", B=2, H=3, T=1, D=16, dtype="bfloat16")
    assert step.traffic("forward") == 2 * 4 * 2 * 3 * 16 * 16 + 4 * step.unit


def test_operations_are_those_of_a_step_by_hand():
    # Two heads of width 3, five tokens: each adds 9 products to a state and reads 9 of it, each
    # product a multiplication and an addition. Backward is four times 9 products.
    case = Case("linear", B=1, H=2, T=5, D=3, dtype="float32")
    assert [case.operations(phase) for phase in cases.PHASES] == [2 * 5 * 2 * 18, 2 * 5 * 6 * 18]
    for same in (dataclasses.replace(case, causal=True, decay="step"), case):
        assert same.operations("forward") == 360
    step = Case("step", B=5, H=2, T=1, D=3, dtype="bfloat16")
    assert step.operations("forward") == 360


def test_plain_jax_computes_what_the_library_does():
    for name, case in (
        ("plain JAX", dataclasses.replace(CASE, causal=False)),
        ("plain JAX, associative scan", CASE),
    ):
        found = ours.finished(linear_jax.CONTENDERS[name].compiled(case, "forward + backward"))
        assert max(found.errors.values()) < 1e-5 and set(found.errors) == {"out", "dq", "dk", "dv"}
        assert isinstance(found.time(0.0), timing.Timing)
    step = Case("step", B=2, H=2, T=1, D=16, dtype="float32")
    for name in side_by_side.wanted(linear.CONTEST, step):
        assert (
            ours.finished(linear_jax.CONTENDERS[name].compiled(step, "forward")).errors["out"]
            < 1e-5
        )


def test_a_peer_with_phi_out_is_compared_with_what_it_computes():
    def weighted(q, k, v):
        weights = jnp.tril(jnp.einsum("bthd,bshd->bhts", q, k))
        return jnp.einsum("bhts,bshv->bthv", weights, v)

    with jax.default_matmul_precision("highest"):
        found = ours.prepare(CASE, "forward + backward", weighted, mapped=True, normalize=False)
        assert max(found.errors.values()) < 1e-5
        assert "is wrong" in ours.prepare(CASE, "forward", weighted)


def test_every_case_has_contenders():
    for case in linear.CASES["gpu"]:
        names = side_by_side.wanted(linear.CONTEST, case)
        assert names[0] == "ato_jax" and len(names) >= 2
        if case.op == "linear" and case.decay is None:
            assert {"SDPA cuDNN", "SDPA flash"} < set(names)
    for name in [*linear_jax.CONTENDERS, *linear_torch.CONTENDERS]:
        assert any(
            name in side_by_side.wanted(linear.CONTEST, case) for case in linear.CASES["gpu"]
        ), name
    with flagsaver.flagsaver(peer=["cuDNN"]):
        assert side_by_side.wanted(linear.CONTEST, linear.CASES["gpu"][0]) == [
            "ato_jax",
            "SDPA cuDNN",
        ]


def test_what_is_not_installed_is_said():
    absent = dataclasses.replace(linear_jax.CONTENDERS["plain JAX"], package="no_such_package")
    assert absent.compiled(CASE, "forward") == "no_such_package is not installed"


class Peer:
    """Answers as the process of PyTorch does."""

    asked: list

    def __init__(self):
        self.asked = []

    def prepare(self, name, case, phase):
        return "no kernel" if "flash" in name else {"errors": {"out": 1e-3}}

    def time(self, name, seconds):
        self.asked.append(name)
        return timing.Timing([1.0 if "cuDNN" in name else 2e-3] * 2, 1)

    def forget(self):
        pass


def test_turns_are_taken_and_the_table_says_why_not():
    case = dataclasses.replace(CASE, decay=None)
    peer = Peer()
    with flagsaver.flagsaver(peer=["SDPA cuDNN", "SDPA flash"]):
        rows = side_by_side.measure(linear.CONTEST, peer, case, "forward", 1e-3, lambda: 1.0)
        late = side_by_side.measure(linear.CONTEST, peer, case, "forward", 1e-3, lambda: 0.0)
    by_name = {row.contender: row for row in rows}
    assert len(by_name["ato_jax"].turns) == side_by_side.TURNS
    # Far behind: once is enough.
    assert by_name["SDPA cuDNN"].turns == [1.0] and peer.asked == ["SDPA cuDNN"]
    assert by_name["SDPA flash"].unavailable == "no kernel"
    text = tables.measured(rows).text()
    assert "SDPA flash: no kernel" in text and "1000" in text and "1.0e-03" in text
    assert all(row.unavailable == "no time left" for row in late)


@pytest.mark.skipif(not HAS_TORCH, reason="the benchmarks compare with PyTorch")
def test_linear_writes_its_figures(tmp_path, capsys, monkeypatch):
    path = tmp_path / "folder" / "linear.json"
    monkeypatch.setattr(byte_limit, "CPU_COPY_BYTES", 1 << 22)
    small = Case("linear", B=1, H=1, T=64, D=32, dtype="float32")
    gated = dataclasses.replace(small, causal=True, decay="step")
    monkeypatch.setitem(linear.CASES, "cpu", (small, gated))
    monkeypatch.delitem(linear_torch.CONTENDERS, "PyTorch, compiled")
    with flagsaver.flagsaver(json=str(path)):
        assert entry.main(["benchmarks", "linear"]) == 0
    figures = json.loads(path.read_text())
    assert figures["bandwidth"] > 0 and figures["device"]
    rows = {(row["case"], row["phase"], row["contender"]): row for row in figures["rows"]}
    plain = rows[str(small), "forward + backward", "PyTorch"]
    assert plain["turns"] and plain["errors"]["dk"] < 1e-5
    assert plain["reached"] == pytest.approx(plain["limit"] / plain["seconds"])
    traffic = small.traffic("forward + backward")
    assert plain["GB/s"] == pytest.approx(traffic / plain["seconds"] / 1e9)
    assert plain["reached"] == pytest.approx(1e9 * plain["GB/s"] / figures["bandwidth"])
    assert plain["spread"]["count"] >= timing.FEWEST_BATCHES * len(plain["turns"])
    assert plain["spread"]["p25"] <= plain["spread"]["p50"] <= plain["spread"]["p99"]
    assert rows[str(gated), "forward", "ato_jax"]["seconds"] > 0
    if importlib.util.find_spec("fla") is None:
        told = rows[str(gated), "forward", "fla simple GLA, phi out, not normalised"]
        assert told["unavailable"] == "fla is not installed"
    assert "byte limit" in capsys.readouterr().out


def test_nothing_is_prepared_once_the_time_is_over():
    class Watch:
        asked = 0

        def left(self):
            self.asked += 1
            # Time enough to begin, none to go on.
            return 1.0 if self.asked == 1 else 0.0

    class Peer:
        def prepare(self, *arguments):
            raise AssertionError("prepared")

        def forget(self):
            pass

    anyone = linear_torch.Contender(lambda case: True, None)
    contest = side_by_side.Contest({}, {}, {"PyTorch": anyone})
    (row,) = side_by_side.measure(contest, Peer(), CASE, "forward", 1.0, Watch().left)
    assert row.unavailable == "no time left" and row.seconds is None
