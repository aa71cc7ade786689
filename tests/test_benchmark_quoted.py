"""Sentences that are made of files of figures: which rows they are of, and which they leave out."""

import dataclasses
import json

import pytest

from benchmarks import (
    attention,
    cliff_rows,
    delta,
    document,
    findings,
    float8_tables,
    quoted,
    results,
    run,
    sdpa,
    suites,
    summary,
)
from benchmarks.cases import PHASES
from benchmarks.results import Results, ResultsError, Row
from tests.figures import FACTS, parsed_flags  # noqa: F401

FORWARD = PHASES[0]


def row_of(case, phase, contender, seconds, load=""):
    work = case.traffic(phase), case.operations(phase)
    spread = summary.spread([seconds] * 3)
    return Row(str(case), phase, contender, 1e-6, *work, seconds, [seconds], spread, load=load)


def card(name, rows, date="2026-11-28", commit="abc"):
    about = {"date": date} if date else {}
    facts = FACTS | {"device": name, "commit": commit, "about": about}
    return name, Results(**facts, platform="gpu", rows=rows)


def crossing_rows(ratios, loads=()):
    """By length: linear attention, and SDPA by two backends of which flash is the faster."""
    cases = {case.T: case for case in suites.CROSSOVER.cases["gpu"] if case.D == 64}
    cases[1024] = dataclasses.replace(suites.BIDIRECTIONAL.cases["gpu"][0], T=1024)
    return [
        row_of(cases[T], FORWARD, name, seconds, "a load" if T in loads and name == own else "")
        for T, ratio in ratios.items()
        for own in ("ato_jax",)
        for name, seconds in ((own, 1.0), ("SDPA flash", ratio), ("SDPA cuDNN", 2 * ratio))
    ]


WHAT = (
    "Beside PyTorch's fastest softmax kernel, one bidirectional forward call of linear attention "
    "(H 8, D 64, bfloat16) has "
)


def test_a_doubtful_row_is_in_no_sentence():
    ratios = {512: 0.8, 1024: 2.2, 2048: 3.8}
    old = card("B", crossing_rows(ratios), date="")
    said = (
        "on one B {} times{} at 512 tokens (B 4), 2.2 times at 1,024 tokens (B 8) and 3.8 times at "
        "2,048 tokens (B 4), so it overtakes between 512 and 1,024 tokens"
    )
    assert quoted.crossover([old]) == f"{WHAT}{said.format(0.8, ' the speed')}."
    # The new card has no ratio at 512 tokens, so its part does not say between which lengths linear
    # attention overtakes.
    new = card("A", crossing_rows(ratios | {2048: 1.7}, loads=[512]))
    told = quoted.crossover([new, old])
    assert told == (
        f"{WHAT}on one A (2026-11-28) 2.2 times the speed at 1,024 tokens (B 8) and 1.7 times at "
        f"2,048 tokens (B 4); {said.format(0.8, '')}."
    )
    # A card without a steady row is left out, and without any card there is no figure.
    nothing = card("C", crossing_rows(ratios, loads=[512, 1024, 2048]))
    assert quoted.crossover([nothing, old]) == quoted.crossover([old])
    for reports in ([nothing], [card("D", [])], []):
        assert quoted.crossover(reports) == quoted.NOT_STEADY


def test_where_softmax_attention_is_slower_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    rows = []
    for case in sdpa.CONTEST.cases["gpu"]:
        if case.D == 128 and case.T in (512, 1024, 2048):
            rows += [row_of(case, FORWARD, sdpa.OURS, 1.0)]
            # The lengths' ratios are 0.5, 1 and 2; one of them is doubtful.
            load = "a load" if case.T == 2048 and case.causal else ""
            rows += [row_of(case, FORWARD, sdpa.THEIRS, case.T / 1024, load)]
    long = [case for case in attention.CASES["gpu"] if case.T >= quoted.LONG][:3]
    for case, seconds in zip(long, (0.9, 1.2, 0.1), strict=True):
        load = "a load" if seconds == 0.1 else ""
        rows += [row_of(case, FORWARD, findings.OURS, 1.0)]
        rows += [row_of(case, FORWARD, "SDPA cuDNN", seconds, load)]
    told = quoted.softmax([card("A", rows), card("B", rows, commit="")])
    assert told == (
        "On one A (2026-11-28) `ato_torch.attention` with heads of 128 columns is slower than "
        "`scaled_dot_product_attention` in 2 of 2 rows below 1,024 tokens (0.50 to 0.50) and in 0 "
        "of 3 rows from 1,024 tokens on (1.00 to 2.00; 1 more had no steady times); "
        "`ato_jax.attention` is slower than its fastest peer in 1 of 2 rows from 8,192 tokens on "
        "(0.90 to 1.20). In brackets stands the peer's time over this library's, the least to the "
        "most."
    )
    step = {"case": "a", "seconds": {"ato_torch": 1.0, "PyTorch": 0.75}, "host": {}}
    step |= {"memory": {}, "errors": {}}
    told = json.dumps({"device": "A", "rows": [step]})
    results.write(tmp_path / "training" / "A.json", told)
    said = quoted.softmax([card("A", rows)])
    assert "; a training step of a model is slower than PyTorch's own in 1 of 1 rows (0.75" in said
    # Nothing is said of kernels that are not known.
    assert quoted.softmax([card("B", rows, commit="")]) == quoted.NOT_STEADY


def test_the_pages_have_the_sentences_of_the_files():
    reports = [(path.stem, found) for path, found in document.reports()]
    for page, names in quoted.PAGES.items():
        path = document.ROOT / page
        text = path.read_text()
        for name in names:
            made = quoted.SENTENCES[name](reports)
            assert document.between(text, made, path, name, around="") == text
            other = document.between(text, "another", path, name, around="")
            assert f"<!-- {name} -->another<!-- /{name} -->" in other
            with pytest.raises(ResultsError, match="once each"):
                document.between(text.replace(f"<!-- {name} -->", ""), made, path, name)


def test_times_of_float8_calls_are_quoted_from_their_own_file(tmp_path, monkeypatch):
    """Those without options; a doubtful one is left out, and a file of their own is read."""
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    steps = [
        step
        for step in cliff_rows.STEPS["gpu"]
        if step.group == float8_tables.GROUP and "causal" in str(step.row)
    ]
    rows = []
    for step in steps:
        load = "a load" if step.row.D == 256 else ""
        work = dict(limit=1e-6, traffic=1, operations=1, turns=[1.0], load=load)
        for name, seconds in ((cliff_rows.OURS, 0.75), (cliff_rows.BASE, 1.0)):
            spread = summary.spread([seconds] * 3)
            row = Row(str(step.row), FORWARD, name, seconds=seconds, spread=spread, **work)
            rows.append(row)
    name, found = card("A", rows)
    said = "A forward call took, beside one on bfloat16 arrays, on one A (2026-11-28) 0.75 times "
    softmax, linear = "(B2 H16 T8192 D128, causal).", "(B2 H16 T16384 D128, causal) and 0.75 times "
    linear += "(B8 H8 T16384 D64, causal)."
    assert quoted.float8_softmax([(name, found)]) == said + softmax
    assert quoted.float8_linear([(name, found)]) == said + linear
    apart = tmp_path / float8_tables.GROUP / f"{name}.json"
    results.write(apart, results.json_text(found))
    assert quoted.float8_linear([card(name, [])]) == said + linear
    assert quoted.float8_linear([card("B", [])]) == quoted.NOT_STEADY


def test_times_of_the_delta_rule_are_quoted():
    step, _, channel, *_ = delta.CASES["gpu"]
    rows = [row_of(step, phase, "ato_jax", 1e-3) for phase in PHASES]
    rows += [row_of(step, phase, delta.XLA, 2e-3) for phase in PHASES]
    rows += [row_of(channel, phase, "ato_jax", 3e-3, phase[7:]) for phase in PHASES]
    rows += [row_of(delta.CASES["gpu"][-1], phase, "ato_jax", 4e-3) for phase in PHASES]
    assert quoted.delta_rule([card("A", rows)]) == (
        "Calls in bfloat16, B 2, T 8,192, 16 heads of 128 columns, forward and with gradients, "
        "take on one A (2026-11-28) 1.00 and 1.00 ms with a decay per step (by XLA 2.00 and 2.00 "
        "ms)."
    )
    assert quoted.delta_rule([card("A", [])]) == quoted.NOT_STEADY
