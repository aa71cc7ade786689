"""Finds registers that a kernel's machine code writes while a product on tensor cores needs them,
and those of a first factor that nothing has written.

    python -m tests.hazards              compiles all calls that tests compile for Hopper
    python -m tests.hazards FILE...      reads SASS, as `nvdisasm -c` prints it

A WGMMA runs beside the instructions behind it until a wait for its group ends. Until then nothing
may write its sums or the first factor that it has in registers, and only products may read its
sums. Where a register is copied, shared or computed again is the assembler's doing, and some
versions of ptxas go wrong there (BUILD_NOTES.md, "JAX and PyTorch in one process"). So they do
where a constant is computed again: 13.0 has left out the first time.

What may be in flight at an instruction is the union over all ways that lead to it: round loops,
past branches, into subroutines. A way that no input takes counts too, so what is found is to be
looked at. The exit status is 1 if anything is found.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

# These write no register of a thread: the first that they name is read.
READERS = set(
    """
    BAR BPT BRA BREAK BRX BSSY BSYNC CALL CCTL DEPBAR ELECT ERRBAR EXIT FCHK FENCE FSETP HSETP2
    ISETP JMP JMX KILL LDGDEPBAR LDGSTS MEMBAR NANOSLEEP NOP PLOP3 PREEXIT PSETP R2P R2UR RED RET
    S2UR ST STG STL STS STSM VOTEU WARPGROUP WARPSYNC YIELD
    """.split()
)
# These write one register, unless a suffix says more.
WRITERS = set(
    """
    ATOM ATOMG ATOMS B2R BMOV BREV CS2R F2F F2FP F2I FADD FFMA FLO FMNMX FMUL FRND FSEL FSET HADD2
    HFMA2 HMNMX2 HMUL2 HSET2 I2F I2FP IABS IADD3 IDP IMAD IMNMX ISCADD LD LDC LDG LDL LDS LDSM LEA
    LOP3 MATCH MOV MUFU P2R POPC PRMT REDUX S2R SEL SGXT SHF SHFL SHL SHR SYNCS VABSDIFF VIADD
    VIADDMNMX VIMNMX VIMNMX3 VOTE
    """.split()
)
PREDICATE = re.compile(r"!?U?P(\d|T|R)")
# Groups in flight that are told apart; older ones count as the last of them.
GROUPS = 16
State = tuple[frozenset[int], ...]  # products by number: not committed yet, then the newest group's


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: str
    text: str
    name: str  # with its suffixes
    operands: tuple[str, ...]
    guarded: bool  # by a predicate

    @functools.cached_property
    def kind(self) -> str:
        return self.name.split(".")[0]

    @property
    def is_product(self) -> bool:
        return self.kind in ("HGMMA", "IGMMA", "QGMMA")

    def __str__(self) -> str:
        return f"{self.address} {self.text}"


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    instructions: list[Instruction]
    labels: dict[str, int]  # the number of the instruction that follows

    @property
    def products(self) -> list[Instruction]:
        return [one for one in self.instructions if one.is_product]


def kernels_of(text: str) -> Iterator[Kernel]:
    """What `nvdisasm -c` printed, by sections of code."""
    for section in re.split(r"^\t*\.section\s+(?=\.text\.)", text, flags=re.MULTILINE)[1:]:
        kernel = Kernel(section[len(".text.") :].split(",")[0], [], {})
        for line in section.splitlines():
            if found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([^;]+?)\s*;", line):
                name, _, operands = found[3].partition(" ")
                parts = tuple(part.strip() for part in operands.split(",") if part.strip())
                kernel.instructions.append(
                    Instruction(found[1], found[3], name, parts, bool(found[2]))
                )
            elif found := re.match(r"\s*([.$\w]+):\s*$", line):
                kernel.labels[found[1]] = len(kernel.instructions)
        yield kernel


def sums(product: Instruction) -> set[int]:
    found = re.search(r"\.64x(\d+)x\d+\.(\w+)", product.name)
    assert found is not None, product.text
    of_a_register = 4 if found[2] == "F16" else 2
    return _from(product.operands[0], int(found[1]) // of_a_register)


def factor(product: Instruction) -> set[int]:
    """Registers of the first factor, unless that is in shared memory."""
    return _from(product.operands[1], 4)


def _from(operand: str, count: int) -> set[int]:
    found = re.match(r"R(\d+)\b", operand)
    return set(range(int(found[1]), int(found[1]) + count)) if found else set()


def _width(one: Instruction) -> int:
    """Registers of what an instruction loads, stores or computes."""
    suffixes = one.name.split(".")[1:]
    if one.kind in ("LDSM", "STSM"):
        return next((int(suffix) for suffix in suffixes if suffix in ("2", "4")), 1)
    if one.kind == "SHF":  # of a pair of registers one is left
        return 1
    if one.kind == "CS2R":
        return 1 if "32" in suffixes else 2
    if "128" in suffixes:
        return 4
    return 2 if {"64", "F64", "S64", "U64", "WIDE"} & set(suffixes) else 1


def written(one: Instruction) -> set[int]:
    """Registers that an instruction writes which is no product.

    Raises:
      ValueError: No table here has it.
    """
    if one.kind in READERS or one.kind.startswith("U"):  # of a warp
        return set()
    if one.kind not in WRITERS:
        raise ValueError(f"does not know what is written by {one}")
    to = next((of for of in one.operands if not PREDICATE.match(of)), "")
    return _from(to, _width(one))


def touched(one: Instruction) -> set[int]:
    """Registers that an instruction reads or writes which is no product."""
    found = written(one)
    for operand in one.operands:
        stored = one.kind.startswith("ST") and "[" not in operand
        for register, pair in re.findall(r"\bR(\d+)(\.64)?", operand):
            width = 2 if pair else _width(one) if stored else 1
            found |= set(range(int(register), int(register) + width))
    return found


def _following(kernel: Kernel) -> list[list[int]]:
    """The numbers of the instructions that may come next, of each."""
    code = kernel.instructions
    after_calls = [n + 1 for n, one in enumerate(code) if one.kind == "CALL"]
    named = [
        [kernel.labels[label] for label in re.findall(r"`\(([^)]+)\)", one.text)] for one in code
    ]
    joins = collections.defaultdict(list)  # by barrier
    for one, targets in zip(code, named, strict=True):
        if one.kind == "BSSY":
            joins[one.operands[0]] += targets
    found: list[list[int]] = []
    for n, (one, targets) in enumerate(zip(code, named, strict=True)):
        leaves = one.kind in ("EXIT", "KILL", "RET", "BRX", "JMX") or (
            one.name in ("BRA", "JMP") and not any(map(PREDICATE.match, one.operands))
        )
        then = [] if leaves and not one.guarded else [n + 1]
        if one.kind == "RET":
            then += after_calls
        elif one.kind in ("BRX", "JMX"):
            then += kernel.labels.values()
        elif one.kind == "BSYNC":
            then += joins[one.operands[0]]
        elif one.kind == "CALL" and not targets:
            raise ValueError(f"does not know where this goes: {one}")
        elif one.kind != "BSSY":
            then += targets
        found.append([to for to in then if to < len(code)])
    return found


def _behind(state: State, n: int, one: Instruction) -> State:
    """What is in flight behind an instruction."""
    if one.is_product:
        opened, *groups = state
        opened |= {n}
        if "gsb0" not in one.operands:
            return (opened, *groups)
        if len(groups) == GROUPS:
            groups[-2:] = [groups[-2] | groups[-1]]
        return (frozenset(), opened, *groups)
    if one.name.startswith("WARPGROUP.DEPBAR"):
        return state[: 1 + int(one.operands[1], 16)]
    return state


def _either(one: State, other: State) -> State:
    shorter, longer = sorted((one, other), key=len)
    common = zip(longer, shorter, strict=False)
    return (*(a | b for a, b in common), *longer[len(shorter) :])


def in_flight(kernel: Kernel) -> list[frozenset[int]]:
    """What may be at each instruction, by the numbers of the products."""
    code, following = kernel.instructions, _following(kernel)
    states: list[State | None] = [None] * len(code)
    states[0] = (frozenset(),)
    waiting = [0]
    while waiting:
        n = waiting.pop()
        before = states[n]
        assert before is not None
        behind = _behind(before, n, code[n])
        for to in following[n]:
            known = states[to]
            merged = behind if known is None else _either(known, behind)
            if merged != known:
                states[to] = merged
                waiting.append(to)
    nothing: frozenset[int] = frozenset()
    return [nothing.union(*state) if state else nothing for state in states]


def hazards_of(kernel: Kernel) -> list[str]:
    """One line for an instruction and a product whose registers it may not have yet."""
    found = []
    code = kernel.instructions
    for one, flying in zip(code, in_flight(kernel), strict=True):
        for n in sorted(flying):
            for what in _does(one, code[n]):
                found.append(f"{one} {what} of {code[n]}")
    return found


def _does(one: Instruction, product: Instruction) -> Iterator[str]:
    """What an instruction does to a product in flight. Products of the same sums follow each other
    without a wait."""
    if not one.is_product:
        if written(one) & factor(product):
            yield "writes the factor"
        if touched(one) & sums(product):
            yield "touches the sums"
        return
    if factor(one) & sums(product):
        yield "takes for its factor the sums"
    if sums(one) & factor(product):
        yield "sums up in the factor"
    if sums(one) & sums(product) and sums(one) != sums(product):
        yield "sums up in the sums"


def unwritten(kernel: Kernel) -> list[str]:
    """One line for each product whose first factor has a register that some way to it, from the
    kernel's start, does not write. A write under a predicate counts."""
    code, following = kernel.instructions, _following(kernel)
    known: list[frozenset[int] | None] = [None] * len(code)
    known[0] = frozenset()
    waiting = [0]
    while waiting:
        n = waiting.pop()
        before = known[n]
        assert before is not None
        behind = before | (sums(code[n]) if code[n].is_product else written(code[n]))
        for to in following[n]:
            earlier = known[to]
            merged = behind if earlier is None else earlier & behind
            if merged != earlier:
                known[to] = merged
                waiting.append(to)
    return [
        f"{one} reads R{', R'.join(map(str, sorted(missing)))}, which may be unwritten"
        for one, has in zip(code, known, strict=True)
        if one.is_product and has is not None and (missing := factor(one) - has)
    ]


def faults_of(kernel: Kernel) -> list[str]:
    return [*hazards_of(kernel), *unwritten(kernel)]


def nvdisasm() -> Path:
    """The disassembler that Triton brings along."""
    (folder,) = importlib.util.find_spec("triton").submodule_search_locations or ()
    return Path(folder) / "backends" / "nvidia" / "bin" / "nvdisasm"


def printing(folder: Path) -> dict[str, str]:
    """The environment in which Mosaic GPU prints the SASS of what it compiles; `folder` is empty.

    It starts bin/nvdisasm of a toolkit, and never removes the file that it has it read. The folder
    has nothing else: XLA would take a ptxas there for its own.
    """
    tool = folder / "bin" / "nvdisasm"
    tool.parent.mkdir()
    tool.write_text(
        f"""#!/bin/sh
{shlex.quote(str(nvdisasm()))} "$@"
status=$?
for read; do :; done
case "$read" in */mosaic-gpu-*/kernel.bin) rm -r "$(dirname "$read")" ;; esac
exit $status
"""
    )
    tool.chmod(0o755)
    return {"MOSAIC_GPU_DUMP_SASS": "1", "CUDA_ROOT": str(folder)}


def _report(name: str, kernel: Kernel) -> bool:
    found = faults_of(kernel)
    of_registers = sum(bool(factor(one)) for one in kernel.products)
    print(
        f"{name}, {kernel.name}: {len(kernel.products)} products, {of_registers} with a factor in "
        f"registers, {len(found)} hazards",
        *found,
        sep="\n    ",
        flush=True,
    )
    return bool(found)


def _compiled() -> Iterator[tuple[str, str]]:
    """Each call that tests compile for Hopper, and what is printed."""
    from tests import test_aot_mosaic, test_attention_mosaic, test_attention_mosaic_backward
    from tests import test_delta_rule_mosaic as of_delta_rule
    from tests.aot_mosaic import Call, printed_by

    calls = [("tests.aot_mosaic", call) for call, *_ in test_aot_mosaic.CALLS]
    # Where all chunks are the first ones, conditions and factors are constants.
    calls.append(("tests.aot_mosaic", Call(B=1, T=128, H=4, D=64)))
    calls += [("tests.aot_attention", call) for call, *_ in test_attention_mosaic.COMPILED]
    for call, *_ in test_attention_mosaic_backward.COMPILED:
        calls.append(("tests.aot_attention", dataclasses.replace(call, gradients=True)))
    calls.append(("tests.aot_delta_rule", of_delta_rule.COMPILED))
    for module, call in calls:
        yield str(call), printed_by(module, call, machine_code=True)


def main(*files: str) -> int:
    read = ((file, Path(file).read_text(errors="replace")) for file in files)
    found = [
        _report(name, kernel)
        for name, printed in (read if files else _compiled())
        for kernel in kernels_of(printed)
    ]
    print(f"{len(found)} kernels, {sum(found)} with hazards")
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
