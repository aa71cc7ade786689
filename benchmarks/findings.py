"""What suites found, as tables: a screen shows them, and the documents are made of them.

Times of the original were taken on other hardware: what stands beside ours are its ratios.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks import cases, demo, noise, side_by_side, variants
from benchmarks.cases import Case
from benchmarks.results import Results, Row
from benchmarks.side_by_side import Contest
from benchmarks.tables import Table, milliseconds, shares

FORWARD, BOTH = cases.PHASES
HOST = cases.HOST_PHASES
OURS = "ato_jax"
SDPA = ("SDPA default", "SDPA flash", "SDPA cuDNN")

# The original's ratios.
BIDIRECTIONAL = {4096: 1.0, 8192: 3.4, 16384: 10.6, 32768: 24.3, 65536: 50.0}
MAPS_FUSED = 1.5
FLA_FASTER = 1.38
WIDE = {512: 1.91, 2048: 2.02, 4096: 1.48, 8192: 1.03}
LADDER_TILED, LADDER_FLASH = 2.4, 4.9
LADDER_MEGABYTES = (256, 16)


@dataclasses.dataclass
class Found:
    """The rows by what they are of."""

    results: Results

    def __post_init__(self) -> None:
        self._rows = {row.key: row for row in self.results.rows}

    def row(self, case: Case, phase: str, contender: str) -> Row | None:
        return self._rows.get((str(case), phase, contender))

    def seconds(self, case: Case, phase: str, contender: str) -> float | None:
        row = self.row(case, phase, contender)
        return row.seconds if row else None

    def of(self, case: Case, phase: str) -> list[Row]:
        """All timed rows of a case and phase."""
        group = str(case), phase
        return [row for key, row in self._rows.items() if key[:2] == group and row.seconds]

    def ms(self, case: Case, phase: str, contender: str) -> str:
        """Milliseconds, marked where they are doubtful, or a dash."""
        return milliseconds(self.row(case, phase, contender)) or "-"

    def ratio(self, case: Case, phase: str, over: str, under: str = OURS) -> str:
        """How many times as long the one takes as the other, or a dash."""
        return times(self.row(case, phase, over), self.row(case, phase, under))


def steady_ratio(over: Row | None, under: Row | None) -> float | None:
    """How many times as long the one takes as the other; None unless both times are there, steady
    and of one machine.
    """
    if over is None or under is None or not over.seconds or not under.seconds:
        return None
    if over.machine != under.machine or over.doubt or under.doubt:
        return None
    return over.seconds / under.seconds


def times(over: Row | None, under: Row | None) -> str:
    """`steady_ratio` as a cell of a table, such as 2.0x; where there is no ratio, a mark for the
    reason.
    """
    if over is None or under is None or not over.seconds or not under.seconds:
        return "-"
    if over.machine != under.machine:
        return noise.TWO_MACHINES
    ratio = steady_ratio(over, under)
    return noise.NOISY if ratio is None else f"{demo.ratio(ratio)}x"


def cases_of(results: Results, contest: Contest) -> list[Case]:
    """Those of the platform that the figures are of."""
    return contest.wanted_cases(results.platform)


def best(rows: Iterable[Row], part: bool = False) -> Row | None:
    """The fastest of those that are not this library's and compute all of the problem, or of those
    that compute a part of it.
    """
    peers = [
        row
        for row in rows
        if not side_by_side.is_ours(row.contender) and ("phi out" in row.contender) == part
    ]
    return min(peers, key=lambda row: row.seconds or math.inf, default=None)


def timed(found: Found, contest: Contest) -> Iterator[tuple[Case, str, Row]]:
    """Where the library has a time: the case, the phase and its row."""
    for case in cases_of(found.results, contest):
        for phase in contest.phases_of(case):
            row = found.row(case, phase, OURS)
            if row is not None and row.seconds is not None:
                yield case, phase, row


def standing(contest: Contest, what: str) -> Callable[[Results], list[Table]]:
    """The library beside the fastest peer on the same problem, case by case.

    Where there are peers that take features already, beside the fastest of these, too.
    """
    part = any("phi out" in name for name in contest.in_torch)

    def tables(results: Results) -> list[Table]:
        found, lines = Found(results), []
        for case, phase, row in timed(found, contest):
            line = [
                *(str(case), phase, milliseconds(row)),
                *shares(row)[:2],
            ]
            for of_part in (False, True)[: 1 + part]:
                peer = best(found.of(case, phase), of_part)
                line += [peer.contender if peer else "", milliseconds(peer)]
                line.append(times(peer, row))
            lines.append(line)
        head = ["case", "phase", "ato_jax, ms", "of a copy", "TFLOP/s"]
        head += ["fastest peer on all of it", "ms", "peer / ato_jax"]
        if part:
            head += ["fastest peer with phi out", "ms", "peer / ato_jax"]
        title = f"{what} beside the fastest peer"
        return [Table(title, head, lines, texts=2)] if lines else []

    return tables


def beside(contest: Contest, title: str) -> Callable[[Results], list[Table]]:
    """The library and every peer that was timed, case by case: times, shares of the copy bandwidth
    by the bytes that are needed, and the fastest peer's ratio.
    """
    peers = [name for name in (*contest.in_jax, *contest.in_torch) if name != OURS]

    def tables(results: Results) -> list[Table]:
        found, lines = Found(results), []
        rows = [*timed(found, contest)]
        names = [
            name for name in peers if any(found.row(case, phase, name) for case, phase, _ in rows)
        ]
        for case, phase, row in rows:
            peer = best(found.of(case, phase))
            lines.append(
                [
                    *(str(case), phase, milliseconds(row), shares(row)[0]),
                    *(found.ms(case, phase, name) for name in names),
                    times(peer, row),
                ]
            )
        head = ["case", "phase", "ato_jax, ms", "of a copy", *(f"{name}, ms" for name in names)]
        head.append("fastest peer / ato_jax")
        return [Table(title, head, lines, texts=2)] if lines else []

    return tables


def both(*parts: Callable[[Results], list[Table]]) -> Callable[[Results], list[Table]]:
    """One after the other."""
    return lambda results: [table for part in parts for table in part(results)]


def bidirectional(contest: Contest) -> Callable[[Results], list[Table]]:
    def tables(results: Results) -> list[Table]:
        found = Found(results)
        made = []
        for phase in contest.phases:
            lines = []
            for case in cases_of(results, contest):
                fastest, own = beside_sdpa(found, case, phase)
                default = found.row(case, phase, SDPA[0])
                lines.append(
                    [
                        f"{case.T}",
                        found.ms(case, phase, OURS),
                        *(found.ms(case, phase, name) for name in SDPA),
                        default.picked if default else "",
                        f"{BIDIRECTIONAL[case.T]:g}x" if case.T in BIDIRECTIONAL else "",
                        found.ratio(case, phase, "SDPA flash"),
                        times(fastest, own),
                    ]
                )
            head = ["T", "ato_jax, ms", *(f"{name}, ms" for name in SDPA), "the default picked"]
            head += ["SDPA / linear: the original", "FlashAttention-2 / ours", "best SDPA / ours"]
            title = f"Bidirectional linear attention against SDPA, {phase}"
            made.append(Table(title, head, lines))
        return made

    return tables


def causal(contest: Contest) -> Callable[[Results], list[Table]]:
    def tables(results: Results) -> list[Table]:
        found = Found(results)
        lines = [
            [
                f"{case.T}",
                phase,
                found.ms(case, phase, OURS),
                found.ms(case, phase, "SDPA flash"),
                "below 1x",
                found.ratio(case, phase, "SDPA flash"),
                found.ratio(case, phase, "SDPA cuDNN"),
            ]
            for case in cases_of(results, contest)
            for phase in contest.phases
        ]
        head = ["T", "phase", "ato_jax, ms", "FlashAttention-2, ms"]
        head += ["FlashAttention-2 / linear: the original", "ours", "cuDNN / ours"]
        return [Table("Causal linear attention against FlashAttention-2", head, lines, texts=2)]

    return tables


def tiles(contest: Contest) -> Callable[[Results], list[Table]]:
    def tables(results: Results) -> list[Table]:
        found, lines, more = Found(results), [], []
        for case in cases_of(results, contest):
            if case.causal:
                ratio = found.ratio(case, FORWARD, variants.LOOP)
                more.append([f"the loop in the kernel, {case}", "faster", ratio])
                continue
            ratio = found.ratio(case, FORWARD, variants.MAPS_APART)
            more.append([f"feature maps fused, {case}", f"{MAPS_FUSED}x", ratio])
            for name in (OURS, *variants.TILED):
                row = found.row(case, FORWARD, name)
                if row and row.throughput and not row.doubt:
                    cells = [f"{row.throughput / 1e9:.0f}", f"{row.reached:.0%}"]
                    lines.append([f"{name}, {case}", *cells])
        return [
            Table("Bandwidth by tile size", ["", "GB/s", "of a copy"], lines),
            Table("With and without", ["", "the original", "ours"], more),
        ]

    return tables


def fla(contest: Contest) -> Callable[[Results], list[Table]]:
    def tables(results: Results) -> list[Table]:
        found = Found(results)
        names = [name for name in contest.in_torch if name.startswith("fla ")]
        lines = [
            [
                f"{case.T}",
                phase,
                found.ms(case, phase, OURS),
                *(found.ms(case, phase, name) for name in names),
                f"{1 / FLA_FASTER:.2f}x",
                found.ratio(case, phase, names[0]),
            ]
            for case in cases_of(results, contest)
            for phase in contest.phases
        ]
        head = ["T", "phase", "ato_jax, ms", *(f"{name}, ms" for name in names)]
        head += ["fla / linear: the original", f"{names[0]} / ours"]
        return [Table("Beside flash-linear-attention, causal", head, lines, texts=2)]

    return tables


def wide(contest: Contest) -> Callable[[Results], list[Table]]:
    def tables(results: Results) -> list[Table]:
        found = Found(results)
        lines = [
            [
                f"{case.D}",
                f"{case.T}",
                found.ms(case, FORWARD, OURS),
                found.ms(case, FORWARD, variants.EXACT),
                f"{WIDE[case.D]:g}x" if case.D in WIDE else "",
                found.ratio(case, FORWARD, variants.EXACT),
                *(found.ratio(case, FORWARD, name) for name in contest.in_torch),
            ]
            for case in cases_of(results, contest)
        ]
        head = ["D", "T", "ato_jax, ms", "plain JAX, ms", "untiled / tiled: the original"]
        head += ["plain JAX / ours", *(f"{name} / ours" for name in contest.in_torch)]
        note = (
            "The original measured against a kernel of its own that does not tile K and V; what is "
            "untiled here is plain JAX. It left SDPA open."
        )
        return [Table("Wide heads, float32, one sequence, one head", head, lines, [note], texts=2)]

    return tables


def ladder(contest: Contest) -> Callable[[Results], list[Table]]:
    rungs = (variants.NAIVE, variants.TILES_IN_MEMORY, variants.KERNEL)

    def tables(results: Results) -> list[Table]:
        found, lines = Found(results), []
        for case in cases_of(results, contest):
            rows = [found.row(case, FORWARD, name) for name in rungs]
            memory = [f"{row.peak / 2**20:.1f}" if row and row.peak else "-" for row in rows]
            lines.append(
                [
                    f"{case.T}" if case.H == 1 else f"{case.T}, H {case.H}",
                    *(found.ms(case, FORWARD, name) for name in rungs),
                    *(found.ratio(case, FORWARD, rungs[0], name) for name in rungs[1:]),
                    *memory,
                ]
            )
        names = ("naive", "tiled", "flash")
        head = ["T", *(f"{name}, ms" for name in names), "naive / tiled", "naive / flash"]
        head += [f"{name}, MB" for name in names]
        note = (
            f"The original: {LADDER_TILED}x tiled and {LADDER_FLASH}x flash over naive, "
            f"{LADDER_MEGABYTES[0]} MB down to {LADDER_MEGABYTES[1]} MB. Naive is plain JAX, tiled "
            "has its scores in memory, flash is this library's Triton kernel; MB is a call's peak, "
            "inputs and outputs included."
        )
        return [Table("The ladder: naive, tiled, flash", head, lines, [note])]

    return tables


TECHNIQUES = (
    ("2^x by the bare instruction", variants.KERNEL, variants.FULL_EXP2),
    ("queries in two strands", variants.KERNEL, variants.ONE_STRAND),
    ("split-KV", variants.KERNEL, variants.NOT_SPLIT),
    ("K and V not repeated for their group", variants.KERNEL, variants.REPEATED),
    ("a group's queries in one tile", variants.PAGED, variants.REPEATED),
)


def techniques(contest: Contest) -> Callable[[Results], list[Table]]:
    def tables(results: Results) -> list[Table]:
        found, lines = Found(results), []
        for what, on, off in TECHNIQUES:
            for case in cases_of(results, contest):
                if off in side_by_side.wanted(contest, case) and on in side_by_side.wanted(
                    contest, case
                ):
                    on_off = (found.ms(case, FORWARD, name) for name in (on, off))
                    lines.append([what, str(case), *on_off, found.ratio(case, FORWARD, off, on)])
        head = ["technique", "case", "on, ms", "off, ms", "off / on"]
        return [Table("FlagAttention's techniques, on and off", head, lines, texts=2)]

    return tables


def host(contest: Contest) -> Callable[[Results], list[Table]]:
    def tables(results: Results) -> list[Table]:
        found = Found(results)
        lines = [
            [str(case), name, *(microseconds(found.row(case, one, name)) for one in HOST)]
            for case in cases_of(results, contest)
            for name in side_by_side.wanted(contest, case)
        ]
        head = ["case", "", "forward, µs", "with a gradient recorded, µs", "forward + backward, µs"]
        note = "Calls one after the other, none of whose results is waited for."
        return [Table("What a call from PyTorch takes the host", head, lines, [note], texts=2)]

    return tables


def microseconds(row: Row | None) -> str:
    """Marked where they are doubtful, or a dash."""
    if row is None or row.seconds is None:
        return "-"
    return f"{noise.MARK * bool(row.doubt)}{1e6 * row.seconds:.3g}"


def crossover(contest: Contest) -> Callable[[Results], list[Table]]:
    def tables(results: Results) -> list[Table]:
        grid = crossovers(results, contest)
        widths = sorted({D for _, D in grid})
        lines = [
            [f"{T}", *(times(*grid[T, D]) if (T, D) in grid else "-" for D in widths)]
            for T in sorted({T for T, _ in grid})
        ]
        head = ["T", *(f"D {D}" for D in widths)]
        kinds = {
            f"B {case.B}, H {case.H}, {case.dtype}, {'causal' if case.causal else 'bidirectional'}"
            for case in cases_of(results, contest)
        }
        notes = [f"{'; '.join(sorted(kinds))}, {FORWARD}."] if lines else []
        return [Table("The best SDPA backend's time over linear attention's", head, lines, notes)]

    return tables


def crossovers(results: Results, contest: Contest) -> dict[tuple[int, int], tuple[Row, Row]]:
    """By T and D: the rows of the best of SDPA and of linear attention, where both have a time."""
    found, grid = Found(results), {}
    for case in cases_of(results, contest):
        peer, own = beside_sdpa(found, case, FORWARD)
        if own is not None and own.seconds and peer is not None:
            grid[case.T, case.D] = peer, own
    return grid


def beside_sdpa(found: Found, case: Case, phase: str) -> tuple[Row | None, Row | None]:
    """The rows of SDPA's fastest backend and of linear attention, as far as there are."""
    peer = best(row for row in found.of(case, phase) if row.contender in SDPA)
    return peer, found.row(case, phase, OURS)


def sweep(contests: Sequence[Contest]) -> Callable[[Results], list[Table]]:
    def tables(results: Results) -> list[Table]:
        found, made = Found(results), []
        for contest in contests:
            all_cases = cases_of(results, contest)
            if not all_cases:
                continue
            for phase in contest.phases:
                by_batch = sorted({case.B for case in all_cases if found.of(case, phase)})
                by_size: dict[tuple[int, int, int, bool], dict[int, Case]] = {}
                for case in all_cases:
                    size = case.H * case.D, case.H, case.T, case.causal
                    by_size.setdefault(size, {})[case.B] = case
                lines = []
                for (width, H, T, is_causal), batches in by_size.items():
                    ratios = []
                    for case in (batches[B] for B in by_batch):
                        peer = best(found.of(case, phase))
                        ratios.append(times(peer, found.row(case, phase, OURS)))
                    name = f"{width}, {H} heads{', causal' if is_causal else ''}"
                    lines.append([name, f"{T}", *ratios])
                op = all_cases[0].op
                title = f"Best peer over ato_jax, {op} attention, {phase}"
                head = ["width", "T", *(f"B {B}" for B in by_batch)]
                made.append(Table(title, head, lines, texts=2))
        return made

    return tables
