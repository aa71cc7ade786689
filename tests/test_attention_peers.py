"""Softmax attention beside its peers: exact results, what counts as work, who takes which case."""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest
from absl.testing import flagsaver

import ato_jax
from benchmarks import __main__ as entry
from benchmarks import (
    attention,
    attention_jax,
    attention_torch,
    byte_limit,
    cases,
    decode,
    ours,
    peers,
    results,
    side_by_side,
    timing,
)
from benchmarks.cases import Case
from tests import numerics
from tests.figures import parsed_flags  # noqa: F401

HAS_TORCH = importlib.util.find_spec("torch") is not None
CASE = Case("softmax", B=2, H=2, T=32, D=8, dtype="float32")
MASKED = [
    dataclasses.replace(CASE, causal=True, left=5),
    dataclasses.replace(CASE, documents=8),
    dataclasses.replace(CASE, causal=True, documents=8),
    dataclasses.replace(CASE, H=4, G=2, causal=True),
    dataclasses.replace(CASE, T=3, S=40),
    dataclasses.replace(CASE, T=3, S=40, causal=True),
]


def visible(case):
    """[B, T, S], from the definitions."""
    B, S, *_ = case.key_shape
    query, key = np.arange(case.T)[:, None] + S - case.T, np.arange(S)
    seen = np.ones((B, case.T, S), bool)
    if case.causal:
        seen &= key <= query
    if case.left is not None:
        seen &= key >= query - case.left
    if case.documents:
        ids = case.document_ids
        seen &= ids[:, :, None] == ids[:, None, :]
    return seen


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_what_is_seen_is_what_is_counted(case):
    seen = visible(case)
    for entry_number in range(case.B):
        first, last = case.seen(entry_number)
        keys = np.arange(case.key_shape[1])
        np.testing.assert_array_equal(
            (first[:, None] <= keys) & (keys < last[:, None]), seen[entry_number]
        )
    if case.T == case.key_shape[1] and case.left is None and case.documents is None:
        assert case.pairs == case.B * case.T**2 / 2
    else:
        assert case.pairs == seen.sum()
    assert case.operations("forward") == 4 * case.H * case.D * case.pairs
    assert case.operations("forward + backward") == 3.5 * case.operations("forward")


def test_visible_blocks_are_counted(monkeypatch):
    monkeypatch.setattr(cases, "BLOCK", 4)
    for case in MASKED:
        seen = visible(case)
        S = case.key_shape[1]
        padded = np.zeros((case.B, -(-case.T // 4) * 4, -(-S // 4) * 4), bool)
        padded[:, : case.T, :S] = seen
        blocks = padded.reshape(case.B, padded.shape[1] // 4, 4, -1, 4).any((2, 4))
        assert case.visible_blocks == pytest.approx(blocks.mean()), case


def test_documents_have_the_mean_length():
    ids = dataclasses.replace(CASE, T=4096, documents=64).document_ids
    assert (ids[:, -1] == 4096 // 64 - 1).all() and (ids[:, 0] == 0).all()
    assert set(np.unique(np.diff(ids))) == {0, 1}
    assert not np.array_equal(ids[0], ids[1])


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_exact_is_the_reference(case):
    generator = np.random.default_rng(0)
    q = generator.normal(size=case.query_shape).astype(np.float32)
    k, v = generator.normal(size=(2, *case.key_shape)).astype(np.float32)
    ids = [case.document_ids] if case.documents else []
    wanted = numerics.oracle("attention", q, k, v, **ours.options(case, *ids))
    dout = np.asarray(wanted.cotangents)
    heads = case.H // case.key_shape[2]
    inputs = {"k": k[-1, :, -1], "v": v[-1, :, -1]}
    inputs |= {
        name: array[-1, :, -heads:].swapaxes(0, 1) for name, array in (("q", q), ("dout", dout))
    }
    found = {name: wanted.exact[name][-1, :, -1] for name in ("dk", "dv")}
    found |= {name: wanted.exact[name][-1, :, -heads:].swapaxes(0, 1) for name in ("out", "dq")}
    assert max(cases.errors(case, inputs, found).values()) < 1e-6


@pytest.mark.parametrize("case", [CASE, *MASKED, dataclasses.replace(CASE, tf32=True)], ids=str)
def test_plain_jax_computes_what_the_library_does(case):
    for name in ("ato_jax", "plain JAX"):
        contender = attention_jax.CONTENDERS[name]
        found = ours.finished(contender.compiled(case, "forward + backward"))
        if name == "plain JAX" and case.causal and case.T != case.key_shape[1]:
            # Its causal mask starts at the top left.
            assert "is wrong" in found
            continue
        assert max(found.errors.values()) < 1e-5 and set(found.errors) == set(attention.ERRORS)
        assert isinstance(found.time(0.0), timing.Timing)


@pytest.mark.lowering  # JAX's own kernel, one of the peers, is imported with it
@pytest.mark.parametrize("case", decode.CASES["cpu"], ids=str)
def test_caches_in_every_form(case):
    names = side_by_side.wanted(decode.CONTEST, case)
    assert names[0] == "ato_jax"
    # The library's own tests have it in every form.
    own = case.V or case.ragged and case.page
    for name in names[0 if own else 1 :]:
        if name in decode.CONTEST.in_jax and not decode.CONTEST.in_jax[name].package:
            found = ours.finished(decode.CONTEST.in_jax[name].compiled(case, "forward"))
            assert found.errors["out"] < 1e-5, name
    if case.page:

        def without_table(q, k, v, table, lengths):
            return decode.CONTEST.in_jax["plain JAX"].make(case)(q, k, v, lengths=lengths)

        assert "out is wrong" in ours.prepare(case, "forward", without_table)
    if case.V:
        torch = pytest.importorskip("torch")
        for contender in attention_torch.LATENT.values():
            assert peers._prepare(torch, "cpu", contender, case, "forward").errors["out"] < 1e-5


def test_long_sequences_are_compared_in_all_gradients():
    case = Case("softmax", B=1, H=1, T=2 * cases.WHOLE, D=8, dtype="float32", causal=True)
    found = ours.finished(attention_jax.CONTENDERS["ato_jax"].compiled(case, "forward + backward"))
    assert set(found.errors) == set(attention.ERRORS)

    def without_causality(q, k, v):
        return ato_jax.attention(q, k, v)

    assert "is wrong" in ours.prepare(case, "forward + backward", without_causality)


def test_every_case_has_contenders():
    in_torch = set(attention_torch.CONTENDERS)
    for case in attention.CASES["gpu"]:
        names = side_by_side.wanted(attention.CONTEST, case)
        assert names[:2] == ["ato_jax", "ato_jax triton"]
        assert in_torch & set(names) and len(names) > 4
        assert ("Tokamax Triton" in names) == (case not in attention.LESSER)
        assert case.left is None or case.causal
        # The share of the full time is of an earlier case.
        cases_before = attention.CASES["gpu"][: attention.CASES["gpu"].index(case) + 1]
        assert attention.whole(case) in cases_before
    for name in [*attention_jax.CONTENDERS, *attention_torch.CONTENDERS]:
        assert any(
            name in side_by_side.wanted(attention.CONTEST, case) for case in attention.CASES["gpu"]
        ), name
    with flagsaver.flagsaver(peer=["cuDNN"]):
        wanted = side_by_side.wanted(attention.CONTEST, attention.CASES["gpu"][0])
        assert wanted == ["ato_jax", "ato_jax triton", "JAX cuDNN", "SDPA cuDNN"]


def test_memory_grows_with_the_scores_of_plain_jax():
    plain = attention_jax.CONTENDERS["plain JAX"]
    one, two = (
        ours.finished(plain.compiled(dataclasses.replace(CASE, T=T), "forward + backward")).scratch
        for T in (128, 256)
    )
    assert two > 3 * one > 0
    rows = [results.Row(str(CASE), "forward", name, 1.0, 1.0, 1.0) for name in ("plain", "other")]
    rows[0].scratch = 2 * 2 * 32 * 32 * 4
    table = attention.memory_table(CASE, rows)
    assert "100.00%" in table and "other" not in table


def test_the_table_tells_shares_and_reasons():
    full = dataclasses.replace(CASE, causal=True)
    masked = dataclasses.replace(full, left=5)

    def row(case, phase, contender, seconds, **more):
        work = case.traffic(phase), case.operations(phase)
        return results.Row(str(case), phase, contender, 1.0, *work, seconds, **more)

    earlier = [row(full, phase, "ato_jax", 2e-3) for phase in cases.PHASES]
    phases = {
        phase: [
            row(masked, phase, "ato_jax", 1e-3, errors={"out": 1e-4}),
            row(masked, phase, "other", None, unavailable="no kernel"),
        ]
        for phase in cases.PHASES
    }
    text = attention.table(masked, phases, earlier)
    assert text.count("50.0%") == 2 and "1.0e-04" in text and "byte limit" not in text
    assert "  other: no kernel" in text and "visible pairs: " in text
    phases["forward"][1] = row(masked, "forward", "other", 5e-3)
    text = attention.table(masked, phases, [])
    assert "other, forward + backward: no kernel" in text and "5.000" in text
    cache = dataclasses.replace(CASE, T=1, S=64)
    only = {phase: [row(cache, phase, "ato_jax", 1e-3)] for phase in cases.PHASES}
    assert "byte limit" in attention.table(cache, only, [])


@pytest.mark.skipif(not HAS_TORCH, reason="the benchmarks compare with PyTorch")
def test_attention_writes_its_figures(tmp_path, capsys, monkeypatch):
    path = tmp_path / "attention.json"
    monkeypatch.setattr(byte_limit, "CPU_COPY_BYTES", 1 << 22)
    grouped = dataclasses.replace(CASE, H=4, G=2, causal=True)
    monkeypatch.setitem(attention.CASES, "cpu", (CASE, grouped))
    monkeypatch.setitem(attention.MEMORY_CASES, "cpu", CASE)
    with flagsaver.flagsaver(json=str(path)):
        assert entry.main(["benchmarks", "attention"]) == 0
    figures = json.loads(path.read_text())
    rows = {(row["case"], row["phase"], row["contender"]): row for row in figures["rows"]}
    for case in (CASE, grouped):
        ours_, theirs = (
            rows[str(case), "forward + backward", name] for name in ("ato_jax", "SDPA flash")
        )
        for row in (ours_, theirs):
            assert max(row["errors"].values()) < 1e-5 and set(row["errors"]) == {*attention.ERRORS}
            operations = case.operations("forward + backward")
            assert row["TFLOP/s"] == pytest.approx(operations / row["seconds"] / 1e12)
    refused = rows[str(CASE), "forward", "ato_jax triton"]
    assert "needs a GPU" in refused["unavailable"] and refused["seconds"] is None
    out = capsys.readouterr().out
    assert "GFLOP/s" in out and "of [B, H, T, S]" in out
