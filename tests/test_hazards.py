"""What a kernel's machine code may not do to registers of products in flight, in SASS by hand."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import hazards
from tests.aot_mosaic import COMPILING, Call, compiled_kernels, printed_by

# From a kernel that summed up a gradient of decays: its two products share a first factor of ones
# and zeros. ptxas 13.0.88 sets one of its registers between the two.
FOUND_BY_A_CARD = """
    LDS.128 R56, [R4]
    LDS.128 R160, [R4+0x10]
    LDS.128 R164, [R4+0x20]
    WARPGROUP.ARRIVE
    HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8].tnspB, R24
    HGMMA.64x64x16.F32.BF16 R24, R160, gdesc[UR8].tnspB, R24, gsb0
    STL [R1+0x3c4], R209
    IMAD.MOV.U32 R165, RZ, RZ, RZ
    IMAD.MOV.U32 R162, RZ, RZ, 0x3f803f80
    WARPGROUP.ARRIVE
    HGMMA.64x64x16.F32.BF16 R24, R164, gdesc[UR8].tnspB, R24
    HGMMA.64x64x16.F32.BF16 R24, R160, gdesc[UR8].tnspB, R24, gsb0
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    FADD R4, R24, R25
"""
PRODUCT = "HGMMA.64x64x16.F32 R24, R92, gdesc[UR4], R24, gsb0"
OTHER = "HGMMA.64x64x16.F32 R56, gdesc[UR4], RZ, !UPT, gsb0"


def printed(code: str, name: str = "kernel") -> str:
    """The code as nvdisasm prints it."""
    lines = [f'\t.section\t.text.{name},"ax",@progbits', f"{name}:", f".text.{name}:"]
    address = 0
    for line in (line.strip() for line in code.strip().splitlines()):
        is_label = line.endswith(":")
        lines.append(line if is_label else f"        /*{address:04x}*/    {line} ;")
        address += 0 if is_label else 16
    return "\n".join(lines) + "\n"


def hazards_in(code: str) -> list[str]:
    (kernel,) = hazards.kernels_of(printed(code))
    return hazards.hazards_of(kernel)


def test_a_constant_set_between_two_products_that_share_it() -> None:
    (found,) = hazards_in(FOUND_BY_A_CARD)
    assert found.startswith("0080 IMAD.MOV.U32 R162, RZ, RZ, 0x3f803f80 writes the factor of 0050")


# From a kernel of a gradient of queries: ones where a query sees a key, which two products share.
# ptxas 13.0.88 sets one of its registers behind the first, in a loop.
FOUND_BY_NAN = """
    IMAD.MOV.U32 R132, RZ, RZ, R4
    IMAD.MOV.U32 R134, RZ, RZ, R5
    IMAD.MOV.U32 R135, RZ, RZ, R6
.L_0:
    HGMMA.64x64x16.F32.BF16 R24, R132, gdesc[UR4].tnspB, R24, gsb0
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    IMAD.MOV.U32 R133, RZ, RZ, 0x3f803f80
    HGMMA.64x64x16.F32.BF16 R24, R132, gdesc[UR4].tnspB, R24, gsb0
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    @P0 BRA `(.L_0)
    EXIT
"""


def test_a_constant_set_behind_the_first_product_that_reads_it() -> None:
    (kernel,) = hazards.kernels_of(printed(FOUND_BY_NAN))
    (found,) = hazards.faults_of(kernel)
    assert found.startswith("0030 HGMMA") and found.endswith("reads R133, which may be unwritten")
    ahead = FOUND_BY_NAN.replace(".L_0:", "    MOV R133, R7\n.L_0:", 1)
    (kernel,) = hazards.kernels_of(printed(ahead))
    assert not hazards.faults_of(kernel)


@pytest.mark.parametrize(
    "code, what",
    [
        # One register, and the last of a vector.
        (f"{PRODUCT}\nMOV R93, 0x1", "writes the factor"),
        (f"{PRODUCT}\n@P0 LDS.128 R92, [R4]", "writes the factor"),
        (f"{PRODUCT}\nIMAD.WIDE R94, R2, R3, R4", "writes the factor"),
        (f"{PRODUCT}\nSHFL.BFLY PT, R95, R4, 0x1, 0x1f", "writes the factor"),
        # Sums that are not there yet, and sums that are overwritten.
        (f"{PRODUCT}\nFADD R4, R25, R5", "touches the sums"),
        (f"{PRODUCT}\nSTSM.16.M88.4 [R4], R52", "touches the sums"),
        (f"{PRODUCT}\nCS2R R54, SRZ", "touches the sums"),
        (f"{PRODUCT}\nHGMMA.64x8x16.F32 R96, R24, gdesc[UR4], R96", "takes for its factor"),
        (f"{PRODUCT}\nHGMMA.64x8x16.F32 R92, gdesc[UR4], R92", "sums up in the factor"),
        (f"{PRODUCT}\nHGMMA.64x8x16.F32 R52, gdesc[UR4], R52", "sums up in the sums"),
        # The wait is for older groups, or was ahead of the product.
        (f"{OTHER}\n{PRODUCT}\nWARPGROUP.DEPBAR.LE gsb0, 0x1\nMOV R92, R4", "writes the factor"),
        (f"WARPGROUP.DEPBAR.LE gsb0, 0x0\n{PRODUCT}\nMOV R92, R4", "writes the factor"),
        # No group takes the product.
        (
            f"{PRODUCT.removesuffix(', gsb0')}\nWARPGROUP.DEPBAR.LE gsb0, 0x0\nMOV R92, R4",
            "writes the factor",
        ),
        # At the top of a loop whose end is a product, on one of two ways, and in a subroutine.
        (f".L_0:\nMOV R92, R4\n{PRODUCT}\n@P0 BRA `(.L_0)\nEXIT", "writes the factor"),
        (
            f"{PRODUCT}\n@P0 BRA `(.L_0)\nWARPGROUP.DEPBAR.LE gsb0, 0x0\n.L_0:\nMOV R92, R4",
            "writes the factor",
        ),
        (
            f"CALL.REL.NOINC `(.L_0)\nMOV R92, R4\nEXIT\n.L_0:\n{PRODUCT}\nRET.REL.NODEC R8",
            "writes the factor",
        ),
    ],
)
def test_registers_of_a_product_in_flight(code: str, what: str) -> None:
    (found,) = hazards_in(code)
    assert what in found


@pytest.mark.parametrize(
    "code",
    [
        f"{PRODUCT}\nWARPGROUP.DEPBAR.LE gsb0, 0x0\nMOV R92, R24",
        f"{PRODUCT}\n{OTHER}\nWARPGROUP.DEPBAR.LE gsb0, 0x1\nMOV R92, R24",
        # Others are written, and the factor is read.
        f"{PRODUCT}\nLDS.128 R96, [R92]\nISETP.GT.AND P0, PT, R92, RZ, PT\nSTS.128 [R23], R92",
        # Products of the same sums follow each other.
        f"{PRODUCT}\nHGMMA.64x64x16.F32 R24, R96, gdesc[UR4], R24",
        # No way leads from the product to what is written.
        f"@P0 BRA `(.L_0)\n{PRODUCT}\nEXIT\n.L_0:\nMOV R92, R4",
        f".L_0:\nMOV R92, R4\n{PRODUCT}\nWARPGROUP.DEPBAR.LE gsb0, 0x0\n@P0 BRA `(.L_0)",
    ],
)
def test_what_products_in_flight_do_not_mind(code: str) -> None:
    assert hazards_in(code) == []


def test_an_unknown_instruction_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not know what is written by 0010 NEW R92, R4"):
        hazards_in(f"{PRODUCT}\nNEW R92, R4")


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file that has two kernels, one of them at fault."""
    file = tmp_path / "printed.txt"
    file.write_text(printed(FOUND_BY_A_CARD, "wrong") + printed(OTHER, "right"))
    assert hazards.main(str(file)) == 1
    told = capsys.readouterr().out
    assert f"{file}, wrong: 4 products, 4 with a factor in registers, 1 hazards" in told
    assert f"{file}, right: 1 products, 0 with a factor in registers, 0 hazards" in told
    assert told.endswith("2 kernels, 1 with hazards\n")


def test_hazards_are_told_with_what_was_compiled() -> None:
    """As Mosaic GPU prints both."""
    said = (
        f"ptxas info    : {COMPILING} 'wrong' for 'sm_90a'\n"
        "    0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 168 registers\n"
        "ptxas info    : Compile time = 1 ms\n"
    )
    (found,) = compiled_kernels(said + printed(FOUND_BY_A_CARD, "wrong"))
    assert str(found).startswith(
        "wrong: 168 registers a thread, 8 bytes spilled\n    0080 IMAD.MOV.U32 R162"
    )


def test_a_kernel_without_machine_code_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the disassembler fails."""
    done = subprocess.CompletedProcess([], 0, f"{COMPILING} 'kernel' for 'sm_90a'\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: done)
    call = Call(1, 64, 1, 64)
    assert printed_by("tests.aot_mosaic", call) == done.stdout
    with pytest.raises(RuntimeError, match="was not disassembled"):
        printed_by("tests.aot_mosaic", call, machine_code=True)


@pytest.mark.parametrize("status", [0, 3])
def test_what_is_disassembled_is_removed(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    own.chmod(0o755)
    monkeypatch.setattr(hazards, "nvdisasm", lambda: own)
    toolkit = tmp_path / "toolkit"
    toolkit.mkdir()
    told = hazards.printing(toolkit)
    assert told["CUDA_ROOT"] == str(toolkit)
    read = tmp_path / "mosaic-gpu-abc" / "kernel.bin"
    read.parent.mkdir()
    read.touch()
    command = [toolkit / "bin" / "nvdisasm", "-ndf", "-c", read]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == status and done.stdout == f"-ndf -c {read}\n"
    assert own.exists() and not read.parent.exists()
