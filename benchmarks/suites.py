"""The suites: which cases, who meets there, how long that may take, and what is said of it.

Those of the report stand in the order in which they are run, the most wanted first and those with
most peers last. The report has to be done in ten minutes, so of some suites it measures a part,
`brief`; by its name a suite is whole. On a GPU sizes are real ones; on a CPU they are small, so
that everything has run before a card sees it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    attention,
    attention_jax,
    attention_torch,
    decode,
    delta,
    exponents,
    findings,
    linear,
    linear_jax,
    linear_torch,
    sdpa,
    sweeps,
    tables,
    variants,
)
from benchmarks.cases import HOST_PHASES, PHASES, Case
from benchmarks.results import Results, ResultsError
from benchmarks.side_by_side import Contest, Meeting
from benchmarks.tables import Table


def tell(meeting: Meeting) -> None:
    """Each case and phase as a table."""
    for case, phase in meeting.groups():
        rows = meeting.measure(case, phase)
        if rows:
            print("\n" + tables.measured(rows).text(), flush=True)


def nothing(results: Results) -> list[Table]:
    return []


@dataclasses.dataclass(frozen=True, eq=False)
class Suite:
    """`seconds` is what it takes of a report's time on a GPU, about. `tell` measures and prints a
    contest, and `findings` are the tables of the whole. `brief` are the contests of the report, if
    not all.
    """

    name: str
    title: str
    seconds: float
    contests: tuple[Contest, ...]
    findings: Callable[[Results], list[Table]] = nothing
    tell: Callable[[Meeting], Any] = tell
    brief: tuple[Contest, ...] = ()


def only(contest: Contest, wanted: Callable[[Case], bool]) -> Contest:
    """With these of its cases on a GPU."""
    cases = tuple(case for case in contest.cases["gpu"] if wanted(case))
    return dataclasses.replace(contest, cases={**contest.cases, "gpu": cases})


def some(contenders: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Of the contenders those of these names, whatever the case."""
    return {name: dataclasses.replace(contenders[name], takes=_any) for name in names}


def _any(case: Case) -> bool:
    return True


def _exact_float32(case: Case) -> bool:
    return case.dtype == "float32" and not case.tf32


FORWARD = PHASES[:1]
SDPA = ("SDPA default", "SDPA cuDNN", "SDPA flash")
FLA = ("fla chunk, phi out", "fla chunk, phi out, not normalised")
_A = functools.partial(Case, "linear", B=8, H=8, D=64, dtype="bfloat16")
_small = functools.partial(Case, "linear", B=1, H=2, D=16, dtype="float32")
_bf16 = functools.partial(Case, "softmax", dtype="bfloat16")
_tiny = functools.partial(Case, "softmax", B=1, H=2, D=16, dtype="float32")
OURS_LINEAR = some(linear_jax.CONTENDERS, ["ato_jax"])
OURS_SOFTMAX = some(attention_jax.CONTENDERS, ["ato_jax"])

SMOKE = tuple(
    Contest(dict.fromkeys(("gpu", "cpu"), (case,)), in_jax, some(in_torch, ["SDPA default"]))
    for case, in_jax, in_torch in (
        (_small(T=48), OURS_LINEAR, linear_torch.CONTENDERS),
        (
            _tiny(T=32, causal=True),
            OURS_SOFTMAX | some(attention_jax.CONTENDERS, ["plain JAX"]),
            attention_torch.CONTENDERS,
        ),
    )
)
BIDIRECTIONAL = Contest(
    {
        "gpu": tuple(_A(T=T) for T in findings.BIDIRECTIONAL),
        "cpu": tuple(_small(T=T) for T in (64, 128, 256)),
    },
    OURS_LINEAR,
    some(linear_torch.CONTENDERS, SDPA),
)
CAUSAL = Contest(
    {
        "gpu": tuple(_A(T=T, causal=True) for T in (4096, 8192, 16384)),
        "cpu": (_small(T=64, causal=True),),
    },
    OURS_LINEAR,
    some(linear_torch.CONTENDERS, SDPA),
)
FLA_BESIDE = Contest(
    {
        "gpu": tuple(_A(T=T, causal=True) for T in (4096, 8192, 16384, 32768, 65536)),
        "cpu": (_small(T=64, causal=True),),
    },
    OURS_LINEAR,
    some(linear_torch.CONTENDERS, FLA),
)
TILES = Contest(
    {
        "gpu": (_A(T=65536), _A(T=4096, causal=True), _A(T=16384, causal=True)),
        "cpu": (_small(T=64), _small(T=64, causal=True)),
    },
    OURS_LINEAR | variants.IN_LINEAR,
    {},
    FORWARD,
)
WIDE = Contest(
    {
        "gpu": tuple(
            Case("softmax", B=1, H=1, T=T, D=D, dtype="float32")
            for D in findings.WIDE
            for T in (64, 32, 16)
        ),
        "cpu": (_tiny(T=16, D=512, H=1),),
    },
    OURS_SOFTMAX | variants.IN_WIDE,
    some(attention_torch.CONTENDERS, ["SDPA default"]),
    FORWARD,
)
# Sequences enough to fill a card: the byte limit is what there is to reach.
WIDE_FULL = Contest(
    {
        "gpu": tuple(
            Case("softmax", B=64, H=4, T=64, D=D, dtype=dtype, tf32=tf32)
            for D, dtype, tf32 in (
                (8192, "bfloat16", False),
                (2048, "bfloat16", False),
                (512, "bfloat16", False),
                (8192, "float32", True),
                (8192, "float32", False),
            )
        ),
        "cpu": tuple(_tiny(T=16, D=512, tf32=tf32) for tf32 in (False, True)),
    },
    OURS_SOFTMAX
    | {
        "plain JAX": dataclasses.replace(
            attention_jax.CONTENDERS["plain JAX"], takes=lambda case: not _exact_float32(case)
        ),
        variants.EXACT: dataclasses.replace(variants.IN_WIDE[variants.EXACT], takes=_exact_float32),
    },
    some(attention_torch.CONTENDERS, ["SDPA default"]),
)
WIDE_SEARCHED = tuple(
    case
    for case in (*WIDE_FULL.cases["gpu"], *WIDE_FULL.cases["cpu"])
    if case.D != 2048 and (case.B == 1 or not _exact_float32(case))
)
LADDER = Contest(
    {
        "gpu": (
            *(_bf16(B=1, H=1, T=T, D=64) for T in (1024, 2048, 4096, 8192)),
            _bf16(B=1, H=16, T=8192, D=64),
        ),
        "cpu": tuple(_tiny(T=T, H=1) for T in (32, 64)),
    },
    variants.LADDER,
    {},
    FORWARD,
)
TECHNIQUES = Contest(
    {
        "gpu": (
            _bf16(B=4, H=16, T=8192, D=128),
            _bf16(B=4, H=32, T=8192, D=64, causal=True),
            _bf16(B=1, H=16, T=1, S=65536, D=128),
            _bf16(B=16, H=32, G=8, T=1, S=8192, D=128),
            _bf16(B=2, H=32, G=8, T=8192, D=128, causal=True),
        ),
        "cpu": (_tiny(T=1, S=64), _tiny(T=1, S=64, H=4, G=2)),
    },
    variants.IN_SOFTMAX,
    {},
    FORWARD,
)
LONG = Contest(
    {
        "gpu": tuple(_A(T=T, causal=causal) for T in (131072, 262144) for causal in (False, True)),
        "cpu": tuple(_small(T=T) for T in (512, 1024)),
    },
    OURS_LINEAR,
    {},
)
SOFTMAX_LENGTHS = Contest(
    {
        "gpu": tuple(_bf16(B=1, H=8, T=T, D=64) for T in (4096, 8192, 16384, 32768)),
        "cpu": tuple(_tiny(T=T) for T in (128, 256, 512)),
    },
    OURS_SOFTMAX | some(attention_jax.CONTENDERS, ["ato_jax triton"]),
    some(attention_torch.CONTENDERS, ["SDPA flash"]),
)
CROSSOVER = Contest(
    {
        "gpu": tuple(
            _A(B=4, T=T, D=D) for T in (512, 1024, 2048, 4096, 8192) for D in (64, 128, 32, 256)
        ),
        "cpu": tuple(_small(T=T, D=D) for T in (32, 64) for D in (16, 32)),
    },
    OURS_LINEAR,
    some(linear_torch.CONTENDERS, SDPA[1:]),
    FORWARD,
    turns=1,
)


# The cases of the suite `host` that are in the report.
HOST_CASES = tuple(
    Case(op, B=1, H=4, T=128, D=64, dtype="bfloat16", causal=causal)
    for op, causal in (("softmax", True), ("linear", False), ("linear", True))
)
HOST = Contest(
    {
        "gpu": (
            *HOST_CASES,
            # By Triton's kernels as those above, and on Hopper by Mosaic GPU's, which need tensor
            # maps: softmax attention of 1,024 rows, linear attention of 65,536 rows of all heads.
            Case("linear", B=1, H=4, T=1024, D=64, dtype="bfloat16", causal=True),
            _bf16(B=1, H=4, T=1024, D=64, causal=True),
            _bf16(B=1, H=4, T=1024, D=128),
            Case("linear", B=1, H=16, T=4096, D=128, dtype="bfloat16", causal=True),
            Case("linear", B=1, H=16, T=4096, D=128, dtype="bfloat16"),
        ),
        "cpu": (_tiny(T=32, causal=True), _small(T=32)),
    },
    {},
    some(linear_torch.ON_HOST, ["ato_torch"])
    | {
        "SDPA default": dataclasses.replace(
            attention_torch.CONTENDERS["SDPA default"], takes=lambda case: case.op == "softmax"
        )
    },
    HOST_PHASES,
)


def _sweep() -> tuple[Contest, ...]:
    """Of two files, one for each platform."""
    both = (sweeps.contests(sweeps.FOLDER / f"{name}.yaml") for name in ("original", "tiny"))
    return tuple(
        dataclasses.replace(large, cases={"gpu": large.cases["gpu"], "cpu": small.cases["cpu"]})
        for large, small in zip(*both, strict=True)
    )


# What the report measures of those that are too many for it.
LINEAR_BRIEF = dataclasses.replace(linear.CONTEST, meets=linear.in_report)
ATTENTION_BRIEF = dataclasses.replace(
    only(attention.CONTEST, attention.REPORT_CASES.__contains__), meets=attention.in_report
)
# The default is one of those beside it; at long sequences these take seconds.
BIDIRECTIONAL_BRIEF = dataclasses.replace(
    BIDIRECTIONAL, meets=lambda case, name: name != SDPA[0] or case.T < 16384
)
DELTA_BRIEF = dataclasses.replace(only(delta.CONTEST, delta.of_report), meets=delta.in_report)
DECODE_BRIEF = dataclasses.replace(decode.CONTEST, meets=decode.in_report)
# Plain JAX compiles for seconds, alone: XLA searches.
WIDE_BRIEF = dataclasses.replace(
    only(WIDE, lambda case: case.T != 32),
    meets=lambda case, name: name != variants.EXACT or case.T == 64 or case in WIDE.cases["cpu"],
)
WIDE_FULL_BRIEF = dataclasses.replace(
    WIDE_FULL,
    meets=lambda case, name: not name.startswith("plain JAX") or case in WIDE_SEARCHED,
)
FLA_BRIEF = only(FLA_BESIDE, lambda case: case.T in (4096, 16384, 65536))
SOFTMAX_LENGTHS_BRIEF = dataclasses.replace(
    only(SOFTMAX_LENGTHS, lambda case: case.T > 4096),
    meets=lambda case, name: name != "ato_jax triton",
)
HOST_BRIEF = only(HOST, HOST_CASES.__contains__)
CROSSOVER_BRIEF = only(CROSSOVER, lambda case: case.T in (512, 2048, 8192))


def corners(contest: Contest) -> Contest:
    """Of a sweep: the least and the most of batch and tokens, in all models."""
    batches, lengths = ([getattr(case, of) for case in contest.cases["gpu"]] for of in "BT")
    edges = {(B, T) for B in (min(batches), max(batches)) for T in (min(lengths), max(lengths))}
    found = only(contest, lambda case: (case.B, case.T) in edges)
    return dataclasses.replace(found, meets=lambda case, name: "package" not in name)


LENGTHS = (BIDIRECTIONAL, CAUSAL, FLA_BESIDE, LONG, SOFTMAX_LENGTHS)
REPORT = (
    Suite(
        "linear",
        "linear attention beside its peers",
        160,
        (linear.CONTEST,),
        findings.standing(linear.CONTEST, "Linear attention"),
        brief=(LINEAR_BRIEF,),
    ),
    Suite(
        "bidirectional",
        "bidirectional linear attention against SDPA, 4K to 64K",
        20,
        (BIDIRECTIONAL,),
        findings.bidirectional(BIDIRECTIONAL),
        brief=(BIDIRECTIONAL_BRIEF,),
    ),
    Suite(
        "causal",
        "causal linear attention against FlashAttention-2",
        8,
        (CAUSAL,),
        findings.causal(CAUSAL),
    ),
    Suite(
        "ladder",
        "naive, tiled, flash: time and memory",
        10,
        (LADDER,),
        findings.ladder(LADDER),
    ),
    Suite(
        "tiles",
        "tile sizes, fused maps, the loop in the kernel",
        8,
        (TILES,),
        findings.tiles(TILES),
    ),
    Suite(
        "fla",
        "beside flash-linear-attention",
        12,
        (FLA_BESIDE,),
        findings.fla(FLA_BESIDE),
        brief=(FLA_BRIEF,),
    ),
    Suite(
        "delta",
        "the delta rule beside its peers",
        25,
        (delta.CONTEST,),
        findings.beside(delta.CONTEST, "The delta rule"),
        brief=(DELTA_BRIEF,),
    ),
    Suite(
        "techniques",
        "FlagAttention's techniques, on and off",
        8,
        (TECHNIQUES,),
        findings.techniques(TECHNIQUES),
    ),
    Suite(
        "complexity",
        "exponents of time and memory",
        18,
        (LONG, SOFTMAX_LENGTHS),
        exponents.complexity(LENGTHS),
        brief=(LONG, SOFTMAX_LENGTHS_BRIEF),
    ),
    Suite(
        "crossover",
        "linear or softmax: which is faster",
        10,
        (CROSSOVER,),
        findings.crossover(CROSSOVER),
        brief=(CROSSOVER_BRIEF,),
    ),
    Suite(
        "host",
        "what a call from PyTorch takes the host",
        20,
        (HOST,),
        findings.host(HOST),
        lambda meeting: [meeting.measure(*group) for group in meeting.groups()],
        brief=(HOST_BRIEF,),
    ),
)
# Peers by the dozen, which take the longest: of these the last rows go where time runs out.
LONGEST = (
    Suite(
        "decode",
        "a few queries against caches",
        45,
        (decode.CONTEST,),
        findings.beside(decode.CONTEST, "Decoding"),
        brief=(DECODE_BRIEF,),
    ),
    Suite(
        "wide",
        "wide heads",
        30,
        (WIDE, WIDE_FULL),
        findings.both(
            findings.wide(WIDE), findings.beside(WIDE_FULL, "Wide heads, 64 sequences, four heads")
        ),
        brief=(WIDE_BRIEF, WIDE_FULL_BRIEF),
    ),
    Suite(
        "attention",
        "softmax attention beside its peers",
        100,
        (attention.CONTEST,),
        findings.standing(attention.CONTEST, "Softmax attention"),
        attention.tell,
        brief=(ATTENTION_BRIEF,),
    ),
)


def of_config(path: Path) -> Suite:
    contests = sweeps.contests(path)
    return Suite(path.stem, f"the sweep of {path}", 60, contests, findings.sweep(contests))


SMALL_HOST = dataclasses.replace(
    HOST, cases=dict.fromkeys(("gpu", "cpu"), HOST.cases["cpu"]), turns=1
)
SMOKE_SUITE = Suite("smoke", "a few small cases of everything", 60, (*SMOKE, SMALL_HOST))
# Beside the report: by their names alone.
APART = (
    Suite(
        "sdpa",
        "ato_torch.attention beside SDPA's default",
        300,
        (sdpa.CONTEST,),
        sdpa.findings(sdpa.CONTEST),
        sdpa.tell,
    ),
)
SWEEP = "sweep"
NAMES = (
    SMOKE_SUITE.name,
    *(suite.name for suite in REPORT),
    SWEEP,
    *(suite.name for suite in LONGEST),
    "report",
    *(suite.name for suite in APART),
)
# These have no peers, and so no contests: the module of that name runs each, by itself.
ALONE = ("choices", "cliffs", "devices", "training")


@functools.cache
def sweep() -> Suite:
    """Made when it is asked for: the file is YAML, and a reader of that may not be installed."""
    contests = _sweep()
    return Suite(
        SWEEP,
        "the original's sweep",
        10,
        contests,
        findings.sweep(contests),
        brief=tuple(map(corners, contests)),
    )


@functools.cache
def report() -> tuple[Suite, ...]:
    """Of every suite what the report measures of it."""
    return tuple(
        dataclasses.replace(suite, contests=suite.brief or suite.contests)
        for suite in (*REPORT, sweep(), *LONGEST)
    )


def named(name: str) -> tuple[Suite, ...]:
    """The suites that a name stands for; () if none."""
    if name == "report":
        return report()
    if name == SWEEP:
        return (sweep(),)
    return tuple(suite for suite in (SMOKE_SUITE, *REPORT, *LONGEST, *APART) if suite.name == name)


def chosen(names: Sequence[str], config: str) -> list[Suite]:
    """The suites of these names and that of a config; without one, an error names all."""
    found: list[Suite] = []
    for name in names:
        of_name = named(name)
        if not of_name:
            raise ResultsError(f"There is no suite {name!r}: {', '.join((*NAMES, *ALONE))}")
        found += of_name
    if config:
        found.append(of_config(Path(config)))
    if not found:
        known = ", ".join((*NAMES, *ALONE))
        raise ResultsError(f"Name a suite, --suite=NAME, or a --config: {known}")
    return list(dict.fromkeys(found))


def contests(wanted: Iterable[Suite]) -> list[Contest]:
    """In the order in which they are run."""
    return [contest for suite in wanted for contest in suite.contests]
